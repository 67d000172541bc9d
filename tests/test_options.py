"""Options of `initialize` and `Trainer` for speed and mixed precision, each
against the same training without it.

Where two ways to compute one sum are compared, training is in float64 and
the limit is `ROUNDING`: a few hundred additions in another order are off by
1e-14 at most, another formula (an unbiased variance, another dropout mask)
by 1e-3.
"""
import contextlib
import os

import numpy as np
import pytest

import mgpu
from helpers import (BACKENDS, assert_bit_equal, convnet, mlp, on,
                     relative_difference, using_engine, worst)
from mgpu.nn import functional as F
from mgpu.optim.loss_scale import LossScale
from nets import conv_gluon, conv_torch
from steps import LOSS

TORCH = [name for name in BACKENDS if name == "torch"]
ROUNDING = 1e-11


@pytest.fixture(autouse=True)
def nothing_left_by_the_compiler():
    """torch sets this one whenever it loads compiled code, for that code."""
    yield
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)


def images(n, seed=0, dtype="float64"):
    return np.random.default_rng(seed).normal(
        size=(n, 2, 6, 6)).astype(dtype)


def labels(n):
    return np.arange(n) % 3


def small(backend, dropout=0.5):
    """Few operations, so that compiling them is quick."""
    return (conv_gluon if backend.name == "mxnet" else conv_torch)(
        dropout=dropout, channels=2)


def start(net, devices, dtype="float64", loss_scale=None, optimizer="sgd",
          rate=0.125, **options):
    mgpu.seed(5)
    replicas = mgpu.initialize(net, devices, "xavier", seed=1, dtype=dtype,
                               **options)
    return replicas, mgpu.Trainer(replicas, optimizer,
                                  {"learning_rate": rate},
                                  loss_scale=loss_scale)


def step(replicas, trainer, n, seed=0, dtype="float64", factor=1.0):
    """The losses of a batch of `n` rows, on which it has trained."""
    found = mgpu.train_batch(
        images(n, seed, dtype), labels(n), replicas,
        lambda out, y: LOSS(out, y) * factor, trainer)
    return np.concatenate([mgpu.to_numpy(x) for x in found if x is not None])


def predict(replicas, n, dtype="float64"):
    shards = mgpu.split_and_load(images(n, 9, dtype), replicas.devices,
                                 even_split=False)
    return np.concatenate([mgpu.to_numpy(x) for x in replicas(shards)
                           if x is not None])


def everything(replicas):
    return replicas.export_numpy(all_devices=True)


def floats(values):
    """Without torch's counters."""
    return {name: x for name, x in values.items() if x.dtype.kind == "f"}


def compilations():
    from torch._dynamo.utils import counters
    return counters["stats"]["unique_graphs"]


# -- hybridize ----------------------------------------------------------------

@pytest.mark.crosses_devices("the mode runs a compiled network by layers")
def test_hybridize_changes_no_number(backend):
    """Three steps on full batches, a short last batch, a batch of one row
    that leaves devices without any, and predictions: dropout masks, running
    statistics of every device, weights. On three devices, which share one
    graph for each shape, without breaks."""
    k, devices, found = 3, on(0, 1, 2), []
    for hybridize in (False, True):
        net = small(backend)
        replicas, trainer = start(net, devices, hybridize=hybridize)
        losses = []
        for seed, n in enumerate((2 * k, 2 * k, 2 * k, k + 1, 1, 2 * k)):
            before = compilations() if backend.name == "torch" else 0
            losses.append(step(replicas, trainer, n, seed))
            if seed in (0, 1, 2, 5) and backend.name == "torch":
                assert compilations() == before + (hybridize and seed == 0)
        found.append((np.concatenate(losses), everything(replicas),
                      predict(replicas, 2 * k)))
        assert replicas.net is net
        if hybridize and backend.name == "mxnet":
            assert net._active and net._cached_graph
            assert dict(net._flags)["static_alloc"] is True
    if backend.name == "torch":     # the user's own module is an ordinary one
        assert type(net).__name__ == "Sequential"
        assert all("forward" not in m.__dict__ and m.training
                   for m in net.modules())
        assert list(net.state_dict())[:2] == ["0.weight", "0.bias"]
    (wanted, weights, outputs), (losses, values, predictions) = found
    assert relative_difference(losses, wanted) < ROUNDING
    assert values.keys() == weights.keys()
    assert worst(floats(values), floats(weights))[0] < ROUNDING
    assert relative_difference(predictions, outputs) < ROUNDING
    if backend.name == "mxnet":     # the same operators in the same order
        for name, value in values.items():
            assert_bit_equal(value, weights[name])


@pytest.mark.parametrize("name", TORCH)
def test_functional_dropout_keeps_its_stream(name):
    """Masks that a network draws from torch's own stream: those of its
    device, compiled or not, and the user's stream stays where it was."""
    with using_engine(name):
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.dense = nn.Linear(6, 3)

            def forward(self, x):
                x = nn.functional.dropout(x, 0.5, self.training)
                return self.dense(x)
        found = []
        for hybridize in (False, True):
            replicas, trainer = start(Net(), on(0, 1), hybridize=hybridize)
            users = torch.get_rng_state()
            for _ in range(3):
                mgpu.train_batch(np.ones((4, 6)), labels(4), replicas, LOSS,
                                 trainer)
            assert torch.equal(torch.get_rng_state(), users)
            found.append(everything(replicas))
        assert worst(found[1], found[0])[0] < ROUNDING


# -- channels_last ------------------------------------------------------------

def test_channels_last_changes_no_number(backend, devices):
    found = []
    for channels_last in (False, True):
        net = convnet(backend)
        replicas, trainer = start(net, devices, channels_last=channels_last)
        losses = [step(replicas, trainer, n, seed)
                  for seed, n in enumerate((8, 7, 1))]
        found.append((np.concatenate(losses), floats(everything(replicas)),
                      predict(replicas, 5)))
    assert relative_difference(found[1][0], found[0][0]) < ROUNDING
    assert worst(found[1][1], found[0][1])[0] < ROUNDING
    assert relative_difference(found[1][2], found[0][2]) < ROUNDING
    exported = found[1][1]["0.weight"]      # an ordinary array of that shape
    assert exported.shape == (4, 2, 3, 3) and exported.flags.c_contiguous
    if backend.name == "torch":
        import torch
        for x in replicas.params()[0].list_data():
            assert x.is_contiguous(memory_format=torch.channels_last)
            assert not x.is_contiguous()


# -- autocast -----------------------------------------------------------------

@pytest.mark.parametrize("name", TORCH)
def test_autocast_bfloat16(name, devices):
    """The forward pass rounds to 2**-8 relative, so do some gradients; five
    layers and a batch norm that divides by a standard deviation: 8 times
    that, and far more than float32 would give."""
    with using_engine(name) as backend:
        found = []
        for autocast in (None, "bfloat16"):
            replicas, trainer = start(convnet(backend), devices, "float32",
                                      autocast=autocast)
            losses = step(replicas, trainer, 7, dtype="float32")
            found.append((losses, floats(everything(replicas)),
                          predict(replicas, 7, "float32")))
            for p in (*replicas.params(), *replicas.statistics()):
                assert {str(x.dtype) for x in p.list_data()} == {
                    "torch.float32"}
            for p in replicas.params():
                assert str(p.list_grad()[0].dtype) == "torch.float32"
        for got, wanted in zip(found[1], found[0]):
            gap = worst(got, wanted)[0] if isinstance(got, dict) \
                else relative_difference(got, wanted)
            assert 1e-5 < gap < 8 * 2.0 ** -8


@pytest.mark.parametrize("name", TORCH)
def test_autocast_reaches_layers_and_loss_and_nothing_else(name):
    with using_engine(name):
        import torch
        from torch import nn

        class Net(nn.Linear):
            def forward(self, x):
                found = super().forward(x)
                seen.append(found.dtype)
                return found
        seen = []
        replicas, trainer = start(Net(6, 3), on(0, 1), "float32",
                                  autocast="bfloat16")

        def loss(out, y):
            assert out.dtype is torch.float32   # of the network's output
            assert (out @ out.T).dtype is torch.bfloat16
            return (out * out).sum(1)
        X = np.ones((4, 6), "float32")
        losses = mgpu.train_batch(X, labels(4), replicas, loss, trainer)
        assert set(seen) == {torch.bfloat16}
        assert all(x.dtype is torch.float32 for x in losses)
        with replicas.autocast():
            x = mgpu.put(X, mgpu.cpu(0))
            assert (x @ x.T).dtype is torch.bfloat16
        assert (x @ x.T).dtype is torch.float32


@pytest.mark.parametrize("name", TORCH)
def test_autocast_ends_before_the_backward_pass(name):
    """What a network keeps out of it is exact in both passes."""
    with using_engine(name):
        import torch

        class Net(torch.nn.Linear):
            def forward(self, x):
                with torch.autocast("cpu", enabled=False):
                    return torch.tanh(super().forward(x.float()))
        found = []
        for autocast in (None, "bfloat16"):
            replicas, trainer = start(torch.nn.Sequential(
                Net(6, 6), Net(6, 3)), on(0, 1), "float32",
                autocast=autocast)
            mgpu.train_batch(
                np.random.default_rng(0).normal(size=(4, 6)).astype(
                    "float32"), labels(4), replicas,
                lambda out, y: (out * out).sum(1), trainer)
            found.append(everything(replicas))
        for key, value in found[0].items():
            assert_bit_equal(found[1][key], value)


@pytest.mark.parametrize("name", TORCH)
def test_autocast_float16_with_a_dynamic_scale(name):
    """float16 rounds to 2**-11 relative; the limit has the same margin as that
    of bfloat16."""
    with using_engine(name) as backend:
        found = []
        for autocast, scale in ((None, None), ("float16", "dynamic")):
            replicas, trainer = start(convnet(backend), on(0, 1), "float32",
                                      scale, autocast=autocast)
            while trainer.num_update < 1:
                step(replicas, trainer, 4, dtype="float32")
            found.append({p.name: mgpu.to_numpy(p.data())
                          for p in replicas.params()})
        assert 0 < worst(found[1], found[0])[0] < 8 * 2.0 ** -11


# -- loss_scale ---------------------------------------------------------------

@pytest.mark.parametrize("dtype, strict", [("float32", False),
                                           ("float64", True)])
def test_a_power_of_two_changes_no_bit(backend, devices, dtype, strict):
    """In strict mode the backend's own arrays are updated, as on GPUs, not
    the host's memory behind them."""
    wanted, norms = None, []
    for scale in (None, 1024.0, 2.0 ** -5, "dynamic"):
        with mgpu.strict_devices() if strict else contextlib.nullcontext():
            replicas, trainer = start(convnet(backend), devices, dtype, scale,
                                      "adam", 0.01)
            losses = [step(replicas, trainer, n, n, dtype) for n in (7, 1)]
            assert trainer.skipped_steps == 0 and trainer.num_update == 2
            found = {"losses": np.concatenate(losses), **everything(replicas)}
            # What is left of the last step: scaled gradients, to be divided.
            gradient, = {g.tobytes(): g for g in map(
                mgpu.to_numpy, replicas.params()[0].list_grad())}.values()
        wanted = wanted or found
        for name, value in found.items():
            assert_bit_equal(value, wanted[name])
        norms.append(np.abs(gradient).max())
    assert norms[1:] == [norms[0] * 1024, norms[0] / 32, norms[0] * 65536]


def embedding(backend):
    """A network of one layer that computes in float16 on MXNet's CPU too."""
    if backend.name == "mxnet":
        from mxnet.gluon import nn
        return nn.Embedding(1, 2)
    from torch import nn
    return nn.Embedding(1, 2)


def float16_pass(backend, slope, loss_scale=None):
    """(replicas, trainer), with summed gradients of 4 * slope * scale."""
    replicas, trainer = start(embedding(backend), on(0, 1), "float16",
                              loss_scale, rate=1.0)
    replicas.params()[0].set_data(np.zeros((1, 2)))
    with mgpu.record():
        losses = [F.sum(out, axis=1) * (slope * trainer.loss_scale)
                  for out in replicas(mgpu.split_and_load(
                      np.zeros(4, "int32"), replicas.devices))]
    mgpu.backward(losses)
    trainer.allreduce_grads()
    return replicas, trainer


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_a_scale_and_a_batch_size_do_not_vanish_together(backend, strict):
    """1 / (10000 * 1024) is 1.6 times the smallest float16."""
    found = []
    with mgpu.strict_devices() if strict else contextlib.nullcontext():
        for scale in (None, 1024.0):
            replicas, trainer = float16_pass(backend, 2000 / 1024, scale)
            trainer.update(10000)
            found.append(everything(replicas))
    for name, value in found[0].items():
        assert (value < 0).all()
        assert_bit_equal(found[1][name], value)


def test_the_norm_of_float16_gradients(backend):
    """The squares are beyond float16."""
    replicas, trainer = float16_pass(backend, 100.0)
    # One of the sum, and one of the root, of float32.
    assert abs(trainer.clip_global_norm(1.0) / (400 * 2 ** 0.5) - 1) < 1e-6
    for g in replicas.params()[0].list_grad():
        norm = np.linalg.norm(mgpu.to_numpy(g).astype("float64"))
        assert abs(norm - 1) < 2.0 ** -10       # two roundings to float16


def test_a_scale_that_is_no_power_of_two_is_divided_out(backend):
    found = []
    for scale in (None, 3.0):
        replicas, trainer = start(convnet(backend), on(0, 1),
                                  loss_scale=scale)
        step(replicas, trainer, 4)
        found.append(floats(everything(replicas)))
    assert worst(*found)[0] < ROUNDING


def test_a_dynamic_scale_is_halved_until_gradients_are_finite(backend,
                                                              devices):
    """Losses near 1e36 in float32, whose largest number is 3.4e38: 2**16
    times the gradient overflows, on all devices or on one. What is done then
    is a step with the scale that was found, to the last bit."""
    rows, factor = 2 * len(devices), 1e36
    replicas, trainer = start(mlp(backend), devices, "float32", "dynamic",
                              rate=1e-38)
    begin = everything(replicas)
    X, y = np.random.default_rng(0).normal(size=(rows, 6)).astype(
        "float32"), labels(rows)

    def train(replicas, trainer):
        mgpu.train_batch(X, y, replicas,
                         lambda out, y: LOSS(out, y) * factor, trainer)
    skipped = 0
    while True:
        train(replicas, trainer)
        if trainer.num_update:
            break
        skipped += 1
        assert skipped < 30, "no scale is small enough"
        assert trainer.skipped_steps == skipped
        assert trainer.loss_scale == 2.0 ** (16 - skipped)
        for name, value in everything(replicas).items():
            assert_bit_equal(value, begin[name])
    assert skipped > 0
    other, with_static = start(mlp(backend), devices, "float32",
                               trainer.loss_scale, rate=1e-38)
    train(other, with_static)
    end = everything(other)
    for name, value in everything(replicas).items():
        assert_bit_equal(value, end[name])
        assert (value != begin[name]).any()


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_one_bad_gradient_skips_the_update(backend, devices, bad):
    replicas, trainer = start(convnet(backend), devices,
                              loss_scale="dynamic", optimizer="adam")
    step(replicas, trainer, 8)
    Xs, ys = mgpu.split_batch(images(8), labels(8), devices)
    with mgpu.record():
        losses = [LOSS(out, y) * trainer.loss_scale
                  for out, y in zip(replicas(Xs), ys)]
    mgpu.backward(losses)
    trainer.allreduce_grads()
    for p in replicas.params():
        if p.name == "5.gamma":     # the same bits everywhere, as summed
            for g in p.list_grad():
                g[1:2] = bad
    assert not np.isfinite(trainer.clip_global_norm(1.0))
    begin, states = everything(replicas), trainer.export_states()
    trainer.update(8)
    assert (trainer.loss_scale, trainer.skipped_steps) == (2.0 ** 15, 1)
    for name, value in everything(replicas).items():
        assert_bit_equal(value, begin[name])
    after = trainer.export_states()
    assert (after.num_update, after.counts) == (1, states.counts)
    for key, value in states.slots.items():
        assert_bit_equal(after.slots[key], value)
    with pytest.raises(RuntimeError, match="allreduce_grads first"):
        trainer.update(8)           # it was this step's gradient


def test_a_dynamic_scale_doubles_after_good_steps(backend, monkeypatch):
    """The interval is 2000; three here, to see it. A skipped step starts the
    count again."""
    assert LossScale.GROWTH_INTERVAL == 2000
    monkeypatch.setattr(LossScale, "GROWTH_INTERVAL", 3)
    replicas, trainer = start(mlp(backend), on(0, 1), loss_scale="dynamic")
    X = np.ones((4, 6))
    exponents = []
    for good in (1, 1, 0, 1, 1, 1, 1, 1, 1, 0):
        mgpu.train_batch(X if good else X * np.nan, labels(4), replicas, LOSS,
                         trainer)
        exponents.append(int(np.log2(trainer.loss_scale)))
    assert exponents == [16, 16, 15, 15, 15, 16, 16, 16, 17, 16]
    assert (trainer.num_update, trainer.skipped_steps) == (8, 2)


def test_a_dynamic_scale_is_saved(backend, tmp_path):
    file = tmp_path / "states"
    replicas, trainer = start(mlp(backend), on(0, 1), loss_scale="dynamic")
    for value in (np.nan, 1.0, 1.0):
        mgpu.train_batch(np.full((4, 6), value), labels(4), replicas, LOSS,
                         trainer)
    trainer.save_states(file)
    _, other = start(mlp(backend), on(0), loss_scale="dynamic")
    other.load_states(file)
    assert (other.loss_scale, other.skipped_steps) == (2.0 ** 15, 1)
    assert other.export_states()[5:8] == (2.0 ** 15, 2, 1)
    _, static = start(mlp(backend), on(0), loss_scale=8.0)
    static.load_states(file)        # it keeps its own options
    assert (static.loss_scale, static.skipped_steps) == (8.0, 1)


# -- errors -------------------------------------------------------------------

def test_wrong_options_change_nothing(backend):
    for options, text in (
            ({"channels_last": "yes"},
             "unknown channels_last; received 'yes'. Use one of True, False."),
            ({"autocast": "float64"}, "unknown autocast; received 'float64'. "
             "Use one of None, 'bfloat16', 'float16'."),
            ({"hybridize": True, "batch_norm": "sync"},
             "batch_norm='sync' does not support hybridize. Use one of "
             "them."),
            ({"autocast": "bfloat16", "dtype": "float64"},
             "autocast requires a float32 network; received "
             "autocast='bfloat16' with float64. Use dtype='float32', or "
             "autocast=None.")):
        refused(convnet(backend), ValueError, text, **options)
    if backend.name == "mxnet":
        refused(convnet(backend), ValueError,
                "autocast is not supported by the mxnet backend; received "
                "autocast='float16'. Use autocast=None, or dtype='float16' "
                "for the whole network.", autocast="float16")


def refused(net, kind, text, **options):
    with pytest.raises(kind) as caught:
        mgpu.initialize(net, on(0, 1), **options)
    assert str(caught.value) == text
    replicas = mgpu.initialize(net, on(0), "uniform")      # not before
    assert {p.dtype for p in replicas.params()} == {"float32"}


@pytest.mark.parametrize("name", TORCH)
def test_a_cumulative_average_cannot_be_compiled(name):
    with using_engine(name):
        from torch import nn
        refused(nn.Sequential(nn.Conv2d(2, 3, 3),
                              nn.BatchNorm2d(3, momentum=None)),
                ValueError,
                "hybridize=True does not support batch-norm layers with "
                "momentum=None; received ['1']. Give the layers a momentum, "
                "or use hybridize=False.", hybridize=True)


def test_wrong_loss_scales(backend):
    replicas = mgpu.initialize(mlp(backend), on(0), "uniform")
    for scale in (0, -2.0, float("inf"), float("nan"), True, "static", [2.0]):
        with pytest.raises(ValueError) as caught:
            mgpu.Trainer(replicas, "sgd", loss_scale=scale)
        assert str(caught.value) == (
            "loss_scale must be None, 'dynamic' or a finite number above 0; "
            f"received {scale!r}. Use a power of two, such as 1024.0.")


@pytest.mark.parametrize("name", TORCH)
def test_hooks_of_a_compiled_network_may_change(name):
    from torch import nn
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    with mgpu.using_backend(name):
        replicas = mgpu.initialize(net, on(0, 1), hybridize=True)
        shards = mgpu.split_and_load(np.eye(6)[:4], replicas.devices)
        before = replicas(shards)
        handle = net[2].register_forward_hook(lambda m, x, out: 3 * out)
        for a, b in zip(replicas(shards), before):
            assert (a - 3 * b).abs().max() < 1e-12
        handle.remove()
        for a, b in zip(replicas(shards), before):
            assert (a - b).abs().max() < 1e-12
