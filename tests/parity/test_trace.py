"""`mgpu.parity.record` and `compare_trace`: golden traces."""
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mgpu
import nets
from mgpu import parity
from mgpu.parity import recorded, trace, trace_file
from nets import conv_gluon as gluon
from nets import conv_torch as port
from nets import torch_block

#: float64, a handful of small layers: rounding of some hundred terms, and
#: cancellation in the gradients behind a batch norm of two rows
EXACT = 1e-11
MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}
MAKE = {"mxnet": gluon, "torch": port}


def batches(rows=(8, 8), seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.random((n, 1, 6, 6)), rng.integers(0, 3, n).astype("int32"))
            for n in rows]


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "a.safetensors")


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """A trace of MXNet on two devices."""
    file = str(tmp_path_factory.mktemp("trace") / "golden.safetensors")
    trace.record(gluon, batches=batches((8, 8, 8)), file=file, devices=2,
                 optimizer_params=MOMENTUM)
    return file


def never():
    raise AssertionError("the network was made before the file was refused")


# -- same ---------------------------------------------------------------------

@pytest.mark.parametrize("policy", ("per_device", "sync"))
def test_every_engine_repeats_the_trace(backend, devices, policy, file):
    recording = trace.record(
        MAKE[backend.name], batches=batches((5, 5, 5)), file=file,
        devices=devices, optimizer_params=MOMENTUM, batch_norm=policy)
    assert recording.kept == [1, 3] and recording.steps == 3
    assert recording.size == os.path.getsize(file)
    for make in MAKE.values():
        result = trace.compare_trace(file, make)
        assert result.same, str(result)
        assert max(g.relative for g in result.gaps) < EXACT
        assert set(result.worst) == {"output", "loss", "gradient", "weight",
                                     "memory", "statistic",
                                     "prediction"}
        assert {g.step for g in result.gaps} == {1, 3}
        assert result.plan.confirmed is True
        assert len(result.plan.pairs) == 8
        assert result.sides["a"]["engine"].startswith(backend.name)
        assert result.sides["a"]["sha256"] == recording.sha256
        json.dumps(result.to_dict())


def test_without_the_other_engine(golden):
    """A machine where MXNet cannot be imported."""
    code = f"""
import sys
sys.modules["mxnet"] = None     # importing it raises
sys.path.append({os.path.dirname(nets.__file__)!r})
from mgpu import parity
from nets import conv_torch as port
result = parity.compare_trace({golden!r}, port)
wrong = parity.compare_trace({golden!r}, lambda: port(1e-3))
assert result.same and result.plan.confirmed, str(result)
assert wrong.causes[0].name == "normalization epsilon", str(wrong)
print(max(g.relative for g in result.gaps))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < EXACT


def test_float32(file, golden):
    recording = trace.record(gluon, batches=batches((8, 8, 8)), file=file,
                             devices=2, optimizer_params=MOMENTUM,
                             dtype="float32")
    # headers and initial values, which are float32 anyway, stay
    assert recording.size < 0.9 * os.path.getsize(golden)
    result = trace.compare_trace(file, port)
    assert result.same and result.settings["dtype"] == "float32"
    assert 1e-9 < result.worst["gradient"].relative < 1e-5


def test_other_memories(file):
    for optimizer in ("adam", "nadam"):
        trace.record(gluon, batches=batches((16, 16)), file=file,
                     optimizer=optimizer)
        result = trace.compare_trace(file, port)
        assert result.same and "memory" in result.worst, str(result)


def test_torchs_momentum_repeats_gluons(golden):
    """A velocity without the rate in it: converted by the file's rates."""
    side = parity.Side(port, optimizer="sgd", semantics="torch",
                       optimizer_params={"lr": 0.1, "momentum": 0.9,
                                         "weight_decay": 1e-3})
    result = trace.compare_trace(golden, side)
    assert result.same and "memory" in result.worst, str(result)


# -- different ----------------------------------------------------------------


def test_a_fault_of_a_later_step(file):
    """Which is kept, and that what is not kept is not compared."""
    def faulty():
        net = port()
        calls = itertools.count()
        net[5].register_forward_hook(
            lambda m, i, o: o * (1 + (m.training and next(calls) >= 9) / 2))
        return net
    trace.record(gluon, batches=batches((8,) * 6), file=file, dropout="off")
    result = trace.compare_trace(file, faulty)
    # 2 passes of the check, then one for each of the 2 steps kept
    assert result.same
    trace.record(gluon, batches=batches((8,) * 9), file=file, dropout="off",
                 keep=range(1, 10))
    result = trace.compare_trace(file, faulty)
    assert result.first.step == 8 and result.settings["kept"] \
        == list(range(1, 10))


# -- what is kept -------------------------------------------------------------

def test_steps_where_something_changes(file):
    """The rate after step 1, and rows at step 6."""
    schedule = mgpu.lr_scheduler.MultiFactorScheduler([1], factor=0.5,
                                                      base_lr=0.25)
    recording = trace.record(
        parity.Side(gluon, lr_scheduler=schedule),
        batches=batches((8, 8, 8, 8, 8, 5, 5, 5)), file=file,
        optimizer_params={"momentum": 0.5, "learning_rate": 0.25})
    assert recording.kept == [1, 2, 6, 8]
    result = trace.compare_trace(file, port)
    assert result.same
    assert {g.step for g in result.gaps} == {1, 2, 6, 8}
    assert "b follows the learning rates of the trace" in result.notes
    own = mgpu.lr_scheduler.MultiFactorScheduler([1], factor=0.25,
                                                 base_lr=0.25)
    other = trace.compare_trace(file, parity.Side(
        port, lr_scheduler=own))
    assert other.first.step == 2 and other.first.stage in ("weight",
                                                           "memory")


def test_no_more_than_a_few_of_many_changes(file):
    recording = trace.record(
        gluon, batches=batches((4, 5) * 10), file=file)
    assert recording.kept == [1, 2, 3, 4, 5, 6, 7, 20]


def test_chosen_steps(file, golden):
    recording = trace.record(gluon, batches=batches((8, 8, 8)), file=file,
                             keep=[2], devices=2, optimizer_params=MOMENTUM)
    assert recording.kept == [2]
    assert recording.size < 0.8 * os.path.getsize(golden)
    result = trace.compare_trace(file, port)
    assert result.same and {g.step for g in result.gaps} == {2}
    for keep in ([0], [4], []):
        with pytest.raises(ValueError, match="numbers from 1 to 3"):
            trace.record(never, batches=batches((8, 8, 8)), file=file,
                         keep=keep)


def test_arrays_come_back_as_they_were(file):
    for value in (np.zeros((3, 4)), np.full(5, -0.0),
                  np.float64([0.0, -0.0]), np.float64([np.nan, 1.0, np.inf]),
                  np.float64([1e300, 0.1]), np.float64(0.1), np.zeros((0, 3)),
                  np.arange(6).reshape(2, 3), np.float32([[0.1]]),
                  np.array([True, False]), np.arange(8.0).reshape(2, 4).T):
        writer = trace_file.Writer()
        node = writer.put(value)
        assert writer.put(value) == node and len(writer.arrays) == 1    # once
        writer.write(file, {})
        back = trace_file.Reader(file).get(json.loads(json.dumps(node)))
        assert back.shape == np.shape(value) and back.dtype == value.dtype
        assert back.tobytes() == np.ascontiguousarray(value).tobytes()


def test_layers_are_matched_by_what_arrives(file):
    def net(names, order):
        def forward(net, x):
            for name in order:
                x = getattr(net, name)(x).tanh()
            return x
        return torch_block(lambda nn: {n: nn.Linear(80, 80) for n in names},
                           forward)
    # two rows of it are more than a summary holds
    data = [(np.random.default_rng(0).random((4, 80)), np.arange(4))]
    trace.record(net("abc", "abc"), batches=data, file=file)
    result = trace.compare_trace(file, net("zxy", "xyz"))
    assert result.same and result.plan.confirmed
    assert result.plan.how == "position in the graph"
    assert {(*p.a, *p.b) for p in result.plan.pairs} >= {
        ("a.weight", "x.weight"), ("c.bias", "z.bias")}


# -- refused ------------------------------------------------------------------

def flipped(place):
    """A copy with one wrong bit."""
    def write(golden, file):
        content = bytearray(Path(golden).read_bytes())
        content[int(place * len(content))] ^= 1
        Path(file).write_bytes(content)
    return write


def rewritten(**changes):
    """The same arrays under a header that ``changes`` (name: function of the
    text) make."""
    def write(golden, file):
        from safetensors import safe_open
        from safetensors.numpy import load_file, save_file
        with safe_open(golden, "numpy") as opened:
            about = opened.metadata()
        save_file(load_file(golden), file, {
            name: changes.get(name, str)(text)
            for name, text in about.items()})
    return write


def test_a_rewritten_file_is_the_same(golden, file):
    rewritten()(golden, file)
    assert trace.compare_trace(file, port).same


@pytest.mark.parametrize("write, error, words", [
    (flipped(0.5), ValueError, "damaged"),
    (flipped(0.999), ValueError, "damaged"),
    (rewritten(trace=lambda text: text.replace("0.1", "0.2")), ValueError,
     "SHA-256"),
    (rewritten(format=lambda text: "mgpu trace 99"), ValueError,
     "'mgpu trace 99'"),
    (lambda golden, file: Path(file).write_bytes(b"not a trace"), ValueError,
     "is not one"),
    (lambda golden, file: None, FileNotFoundError, "a.safetensors")],
    ids=["an array", "the end", "the text", "a version", "no trace",
         "no file"])
def test_what_is_no_trace(write, error, words, golden, file):
    write(golden, file)
    with pytest.raises(error, match=words):
        trace.compare_trace(file, never)


def test_another_number_of_devices(golden):
    for devices, of_side in ((3, None), (None, 3)):
        with pytest.raises(ValueError, match="on 2 devices"):
            trace.compare_trace(golden, parity.Side(never, devices=of_side),
                                devices=devices)


def test_a_file_names_nothing_but_losses_and_optimizers():
    assert recorded.known_loss({"name": "copy", "options": {}}) is None
    assert recorded.known_loss({"name": "__builtins__", "options": {}}) is None
    assert recorded.known_optimizer({"name": "fields", "options": {}}) is None
    rule = recorded.known_optimizer({"name": "SGD",
                             "options": {"learning_rate": 0.5}})
    assert rule.learning_rate == 0.5
    loss = recorded.known_loss({"name": "HuberLoss", "options": {"rho": 2.0}})
    assert isinstance(loss, mgpu.losses.HuberLoss)


def test_losses(file):
    def squares(pred, label):
        return ((pred - label) ** 2).reshape((-1,))
    net = nets.torch(lambda nn: [nn.Linear(3, 1)])
    rng = np.random.default_rng(0)
    data = [(rng.random((4, 3)), rng.random((4, 1)))]
    trace.record(net, batches=data, file=file, loss=squares)
    with pytest.raises(ValueError, match="trace of squares. Pass loss="):
        trace.compare_trace(file, never)
    assert trace.compare_trace(file, net, loss=squares).same
    trace.record(net, batches=data, file=file,
                 loss=mgpu.losses.HuberLoss(rho=0.5, weight=2.0))
    assert trace.compare_trace(file, net).same
    other = trace.compare_trace(file, net, loss=mgpu.losses.HuberLoss(0.4))
    assert other.first.stage == "loss"


def test_other_masks(golden, monkeypatch):
    monkeypatch.setattr(trace, "_draws", lambda seed: [0.5] * 4)
    with pytest.raises(ValueError, match="draws other numbers"):
        trace.compare_trace(golden, never)


def test_safetensors_is_an_extra(monkeypatch, file, golden):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for act in (lambda: trace.record(never, batches=batches(), file=file),
                lambda: trace.compare_trace(golden, never)):
        with pytest.raises(ImportError, match="pip install safetensors"):
            act()


def test_a_failed_record_leaves_nothing(tmp_path, file):
    def wrong(pred, label):
        raise RuntimeError("no loss today")
    with pytest.raises(RuntimeError, match="today"):
        trace.record(gluon, batches=batches(), file=file, loss=wrong)
    assert not os.listdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="Make"):
        trace.record(never, batches=batches(),
                     file=tmp_path / "absent" / "file")
