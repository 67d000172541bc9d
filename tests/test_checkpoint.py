"""`mgpu.save_checkpoint`: a run resumed from the file equals the uninterrupted
run bit for bit, or loading raises and nothing changes."""
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest

import mgpu
import nets
from conftest import BACKENDS
from helpers import assert_bit_equal, mlp, on, relative_difference
from mgpu import datasets
from mgpu.checkpoints import checkpoint, trainer_states
from mgpu.optim import lr_scheduler
from mgpu.utils import files

LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()

rng = np.random.default_rng(0)
ROWS = rng.normal(size=(30, 6)).astype("float32")
LABELS = rng.integers(0, 3, 30).astype("int32")


def layers(engine):
    return nets.rows_gluon() if engine.name == "mxnet" \
        else nets.rows_torch()


def network(engine):
    """Dropout as a layer and as a function of the framework."""
    if engine.name == "mxnet":
        return layers(engine)
    import torch

    class Net(torch.nn.Module):

        def __init__(self):
            super().__init__()
            self.body = layers(engine)

        def forward(self, x):
            return self.body(torch.nn.functional.dropout(
                x, 0.3, self.training))
    return Net()


def noisy(X):
    """Numbers of NumPy's and of Python's own streams."""
    return X + (np.random.normal(0, 0.1, X.shape)
                + random.gauss(0, 0.1)).astype(X.dtype)


#: by the number of devices: optimizer, options, arguments of the trainer
TRAINERS = [
    ("sgd", {"momentum": 0.9}, {"lr_scheduler": lr_scheduler.FactorScheduler(
        2, 0.5, base_lr=0.25)}),
    ("adam", {}, {"lr_scheduler": lr_scheduler.CosineScheduler(
        20, 0.01, warmup_steps=4)}),
    ("nadam", {"learning_rate": 0.01}, {"loss_scale": "dynamic"}),
    ("rmsprop", {"centered": True}, {"lr_scheduler":
                                     lr_scheduler.PolyScheduler(20, 0.01)})]


def training(engine, devices, transform=noisy, kind=1, net=None, **options):
    """Replicas, their trainer and their data, as a program begins."""
    options = {"init": mgpu.initializers.Xavier(), **options}
    replicas = mgpu.initialize(net or network(engine), devices,
                               **options)
    name, params, others = TRAINERS[kind]
    return (replicas, mgpu.Trainer(replicas, name, params, **others),
            datasets.BatchIterator(ROWS, LABELS, 7, 3, transform=transform))


def go_on(run, until, save_at=None, file=None):
    """Steps over the ends of epochs, up to number `until`."""
    replicas, trainer, data = run
    while trainer.num_update < until:
        for X, y in data:
            mgpu.train_batch(X, y, replicas, LOSS, trainer)
            if trainer.num_update == save_at:
                mgpu.save_checkpoint(file, replicas, trainer, data)
            if trainer.num_update == until:
                break


def everything(run):
    """All arrays of all devices, and all numbers."""
    replicas, trainer, data = run
    states = trainer.export_states()
    arrays = {(p.name, i): mgpu.to_numpy(x)
              for p in replicas.all_parameters()
              for i, x in enumerate(p.list_data())}
    if replicas.backend.name == "torch":        # MXNet's cannot be read
        arrays |= replicas.backend.export_streams()
    return {**arrays, **states.slots}, (
        states._replace(slots={}), data.position, replicas.grad_reqs(),
        random.getstate(), np.random.get_state()[1].tolist())


def assert_same(found, wanted):
    assert found[1] == wanted[1]
    assert found[0].keys() == wanted[0].keys()
    for key, x in wanted[0].items():
        assert_bit_equal(found[0][key], x)


def disturb(engine):
    """Streams elsewhere than where a save or a program left them."""
    mgpu.seed(99)
    np.random.seed(99)
    random.seed(99)
    if engine.name == "torch":
        import torch
        torch.manual_seed(99)


@pytest.mark.parametrize("kind, save_at", [
    (0, 3), (1, 5), (2, 3), (3, 5)], ids=lambda x: str(x))
def test_a_resumed_run_is_the_uninterrupted_one(
        backend, devices, tmp_path, kind, save_at):
    """Bit for bit: dropout, batch norm per device, schedules, every kind of
    slot, a dynamic loss scale, noise in the data, idle devices; saved in an
    epoch and between two."""
    mgpu.seed(7)
    whole = training(backend, devices, kind=kind)
    go_on(whole, 8, save_at, tmp_path / "saved")
    disturb(backend)
    resumed = training(backend, devices, kind=kind, seed=5)
    mgpu.load_checkpoint(tmp_path / "saved", *resumed)
    assert resumed[1].num_update == save_at
    go_on(resumed, 8)
    assert_same(everything(resumed), everything(whole))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_resumed_run_under_sync(backend, tmp_path):
    """Where the threads of devices draw; and whatever each of them has
    recorded before, by which torch orders a backward pass."""
    found, x = [], mgpu.put(ROWS, mgpu.cpu(1))
    mgpu.attach_grad(x)

    def record(count):
        with mgpu.record():
            return [x * 2 for _ in range(count)]
    # Devices have recorded thousands of operations more or fewer than the
    # others, whatever ran before: threads that start have recorded none.
    for counts in (0, 5, 10), (10, 0, 5):
        backend._workers.end()
        backend.parallel([lambda count=count: record(1000 * count)
                         for count in counts], rendezvous=True)
        run = training(backend, on(0, 1, 2), None, net=layers(backend),
                       batch_norm="sync")
        disturb(backend)
        go_on(run, 4, 2, tmp_path / "saved")
        found.append(everything(run))
        assert_same(found[-1], found[0])
    disturb(backend)
    mgpu.load_checkpoint(tmp_path / "saved", *run)
    go_on(run, 4)
    assert_same(everything(run), found[0])


@pytest.mark.parametrize("stop_at, ahead", [(2, False), (4, True)],
                         ids=["in an epoch", "its last, prefetched"])
def test_a_batch_that_was_cut_short_comes_again(
        backend, devices, tmp_path, stop_at, ahead):
    """And the one that a save before its step finds handed out."""
    whole = training(backend, devices, transform=None, net=mlp(backend))
    go_on(whole, 6)
    run = training(backend, devices, transform=None, net=mlp(backend))
    replicas, trainer, data = run
    batches = mgpu.prefetch(data, 2) if ahead else data

    def stopped(pred, label):
        if trainer.num_update == stop_at:
            raise KeyboardInterrupt
        return LOSS(pred, label)
    try:
        for X, y in batches:
            if trainer.num_update == stop_at:
                mgpu.save_checkpoint(tmp_path / "before", replicas, trainer,
                                     batches)
            mgpu.train_batch(X, y, replicas, stopped, trainer)
    except KeyboardInterrupt:
        mgpu.save_checkpoint(tmp_path / "after", replicas, trainer, batches)
    for name in ("before", "after"):
        resumed = training(backend, devices, None, net=mlp(backend), seed=5)
        mgpu.load_checkpoint(tmp_path / name, *resumed)
        assert resumed[2].position == (0, stop_at)
        go_on(resumed, 6)
        assert_same(everything(resumed), everything(whole))


def test_batches_without_a_step_come_again_until_their_epoch_ends(
        backend, tmp_path):
    """A batch that the loop left out, and an epoch that was only looked
    at."""
    replicas, trainer, data = run = plain(backend, on(0, 1))

    def position():
        mgpu.save_checkpoint(tmp_path / "saved", *run)
        other = plain(backend, on(0, 1))
        mgpu.load_checkpoint(tmp_path / "saved", *other)
        return other[2].position
    found = []
    for i, (X, y) in enumerate(data):
        if i in (1, 4):
            mgpu.train_batch(X, y, replicas, LOSS, trainer)
        found.append(position())
    assert found == [(0, 0), (0, 2), (0, 2), (0, 2), (1, 0)]
    for batches in (data, mgpu.prefetch(data)):
        epoch = data.epoch
        for _ in batches:
            assert position() == (epoch, 0)
        assert position() == (epoch + 1, 0)


def test_saving_changes_nothing(backend, tmp_path):
    """But for MXNet's streams, which cannot be read: as documented."""
    found = []
    for save_at in (2, None):
        run = training(backend, on(0, 1))
        disturb(backend)
        go_on(run, 2, save_at, tmp_path / "saved")
        if backend.name == "mxnet":
            mgpu.seed(7)
        go_on(run, 4)
        found.append(everything(run))
    assert_same(*found)


# -- other devices, the other backend -----------------------------------------

def plain(backend, devices, **options):
    """Without random numbers in it, float64."""
    replicas = mgpu.initialize(
        mlp(backend), devices, dtype="float64", **options)
    return (replicas, mgpu.Trainer(replicas, "adam"),
            datasets.BatchIterator(ROWS.astype("float64"), LABELS, 7))


@pytest.mark.parametrize("source", BACKENDS)
@pytest.mark.parametrize("target", BACKENDS)
@pytest.mark.parametrize("k, other", [(4, 3)])
def test_another_number_of_devices_or_backend(source, target, k, other,
                                             tmp_path):
    """With new random streams; numbers agree to rounding."""
    with mgpu.using_backend(source) as backend:
        whole = plain(backend, on(*range(k)), init=mgpu.initializers.Xavier())
        go_on(whole, 9, 3, tmp_path / "saved")
        wanted = whole[0].export_numpy()
    with mgpu.using_backend(target) as backend:
        resumed = plain(backend, on(*range(other)))
        mgpu.load_checkpoint(tmp_path / "saved", *resumed, seed=0)
        go_on(resumed, 9)
        for name, x in resumed[0].export_numpy().items():
            assert relative_difference(x, wanted[name]) < 1e-12


def test_statistics_that_differ_belong_to_as_many_devices(backend, tmp_path):
    run = training(backend, on(0, 1), None)
    go_on(run, 3, 3, tmp_path / "saved")
    other = training(backend, on(0), None)
    before = everything(other)
    with pytest.raises(ValueError, match="the buffers of 2 devices"):
        mgpu.load_checkpoint(tmp_path / "saved", *other, seed=0)
    assert_same(everything(other), before)


TORCH = [name for name in BACKENDS if name == "torch"]


def counting(state, key="n", back=True):
    """A network whose layers count their passes, and say so by `state`."""
    import torch
    from torch import nn

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.n, self.sum, self.note = 0, torch.zeros(2), None

        def forward(self, x):
            if self.training:
                self.n += 1
                self.sum = self.sum + 0.5
            return x / (1 + self.n) + self.sum.mean()

        def get_extra_state(self):
            return state(self)

    def set_extra_state(self, state):
        if key is not None:
            self.n, self.sum, self.note = (
                state[key], state["sum"], state.get("note"))
    if back:
        Counts.set_extra_state = set_extra_state
    return nn.Sequential(nn.Linear(6, 6), Counts(), nn.Linear(6, 3), Counts())


NOTE = {"text": ["a", (1, 2.5, None, True)], 3: float("nan"),
        ("t",): b"bytes", "array": np.arange(6.0).reshape(2, 3),
        "number": np.float32(0.1), "empty": {}}


def same(x, y):
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[k], y[k]) for k in x)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(same, x, y))
    return type(x) is type(y) and (
        x.tobytes() == y.tobytes() and x.dtype == y.dtype
        if hasattr(x, "tobytes") else x == y or x != x and y != y)


def extra_state(layer):
    return {"n": layer.n, "sum": layer.sum.to(layer.sum.dtype), "note": NOTE}


@pytest.mark.parametrize("backend", TORCH, indirect=True)
def test_extra_state_of_layers_is_resumed(backend, devices, tmp_path):
    """Without pickle."""
    whole = training(backend, devices, None, net=counting(extra_state))
    go_on(whole, 7, 4, tmp_path / "saved")
    resumed = training(backend, devices, None, net=counting(extra_state),
                       seed=5)
    mgpu.load_checkpoint(tmp_path / "saved", *resumed)
    layer = resumed[0].net[1]
    assert layer.n == 4 and same(layer.note, NOTE)
    go_on(resumed, 7)
    assert_same(everything(resumed), everything(whole))
    for k in (1, 3):
        one, two = whole[0].net[k], resumed[0].net[k]
        assert one.n == two.n == 7 and (one.sum == two.sum).all()


def set_rate(net, rate):
    """Of the dropout layer."""
    for layer in getattr(net, "body", net):
        for name in ("p", "_rate"):
            if name in vars(layer):
                setattr(layer, name, rate)


def test_what_is_set_before_a_file_is_loaded_is_on_all_devices(
        backend, devices, tmp_path):
    """Attributes, of a network that has run and of one that has not."""
    whole = training(backend, devices, None)
    go_on(whole, 4, 3, tmp_path / "saved")
    found = []
    for steps, before in (0, True), (2, True), (2, False):
        run = training(backend, devices, None)
        go_on(run, steps)
        if before:
            set_rate(run[0].net, 0.9)
        mgpu.load_checkpoint(tmp_path / "saved", *run)
        set_rate(run[0].net, 0.9)
        go_on(run, 5)
        found.append(everything(run))
        assert_same(found[-1], found[0])


@pytest.mark.parametrize("backend", TORCH, indirect=True)
def test_a_state_that_does_not_go_back_is_refused(backend, tmp_path):
    import torch

    def saved(net):
        run = training(backend, on(0, 1), None, net=net)
        go_on(run, 1)
        mgpu.save_checkpoint(tmp_path / "saved", *run)
        return run
    for wrong in ({1, 2}, 1j, np.ones(2, "complex128"),
                  torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(ValueError, match="holds no pickle.*"
                           "in '1._extra_state'"):
            saved(counting(lambda layer, wrong=wrong: {"a": [wrong]}))
    with pytest.raises(ValueError, match=r"without it: \['1', '3'\]"):
        saved(counting(lambda layer: layer.n, back=False))
    assert not (tmp_path / "saved").exists()
    saved(counting(lambda layer: {"n": layer.n, "sum": layer.sum}))
    other = training(backend, on(0, 1), None, net=torch.nn.Sequential(
        torch.nn.Linear(6, 6), torch.nn.Identity(), torch.nn.Linear(6, 3)))
    before = everything(other)
    with pytest.raises(ValueError, match=r"received \['1._extra_state', '3."
                       r"_extra_state'\] for \[\]"):
        mgpu.load_checkpoint(tmp_path / "saved", *other)
    assert_same(everything(other), before)

    class Late(torch.nn.Linear):
        keeps = True

        def forward(self, x):
            self.register_buffer("late", x.new_ones(1), self.keeps)
            return super().forward(x)
    with pytest.raises(ValueError, match=r"received \['late'\], which passes "
                       "have created"):
        saved(Late(6, 3))
    Late.keeps = False
    saved(Late(6, 3))


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_gradients_that_wait_for_a_step(backend, devices, tmp_path, grad_req):
    """The step after the file is that of the run that saved; gradients of the
    program that loads are gone."""
    def backward(run, rows):
        shards, labels = mgpu.split_batch(
            ROWS[:rows].astype("float64"), LABELS[:rows], run[0].devices)
        with mgpu.record():
            losses = mgpu.parallel(LOSS, run[0](shards), labels)
        mgpu.backward([x for x in losses if x is not None])

    def step(run):
        if grad_req == "add":
            backward(run, 5)
        run[1].step(7)
    whole, resumed = (plain(backend, devices)[:2] for _ in range(2))
    for p in whole[0].params():
        p.grad_req = grad_req
    backward(whole, 7)
    mgpu.save_checkpoint(tmp_path / "saved", *whole)
    step(whole)
    backward(resumed, 3)
    mgpu.load_checkpoint(tmp_path / "saved", *resumed)
    step(resumed)
    if grad_req == "write":
        for run in whole, resumed:      # applied once
            with pytest.raises(mgpu.StaleGradientError):
                run[1].step(7)
    else:
        for run in whole, resumed:      # added to once more
            mgpu.save_checkpoint(tmp_path / "saved", *run)
            mgpu.load_checkpoint(tmp_path / "saved", *run)
            step(run)
    for name, x in whole[0].export_numpy().items():
        assert_bit_equal(resumed[0].export_numpy()[name], x)


# -- errors -------------------------------------------------------------------

def test_a_save_between_the_halves_of_a_step_is_refused(backend, tmp_path):
    replicas, trainer, data = run = plain(backend, on(0, 1))
    X, y = next(iter(data))
    shards, labels = mgpu.split_batch(X, y, replicas.devices)

    def refused():
        with pytest.raises(RuntimeError, match="Save after Trainer.step or, "
                           "where no step is to apply them, after Replica"):
            mgpu.save_checkpoint(tmp_path / "saved", *run)
        assert not list(tmp_path.iterdir())
    with mgpu.record():
        losses = mgpu.parallel(LOSS, replicas(shards), labels)
    mgpu.backward(losses)
    refused()
    trainer.allreduce_grads()
    with pytest.raises(RuntimeError, match="Save after Trainer.update"):
        mgpu.save_checkpoint(tmp_path / "saved", *run)
    trainer.update(len(X))
    mgpu.save_checkpoint(tmp_path / "saved", *run)
    (tmp_path / "saved").unlink()
    for p in replicas.params():
        p.grad_req = "add"
    mgpu.train_batch(X, y, replicas, LOSS, trainer)
    refused()
    replicas.zero_grad()
    mgpu.save_checkpoint(tmp_path / "saved", *run)


def test_other_data_is_refused(backend, tmp_path):
    replicas, trainer, data = run = plain(backend, on(0))
    go_on(run, 2, 2, tmp_path / "saved")
    stranger = plain(backend, on(0))[1]
    before = everything(run)
    for other, error, match in (
            (None, ValueError, "a position in the file without data"),
            (datasets.BatchIterator(ROWS, LABELS, 6), ValueError,
             "batch_size=6 for a position with 7"),
            (datasets.BatchIterator(ROWS, LABELS, 7, 1), ValueError,
             "seed=1 for"),
            (datasets.BatchIterator(ROWS + 1, LABELS, 7), ValueError,
             "other examples"),
            (datasets.BatchIterator(ROWS, LABELS[::-1], 7), ValueError,
             "other examples"),
            ([(ROWS, LABELS)], TypeError, "received list")):
        with pytest.raises(error, match=match):
            mgpu.load_checkpoint(tmp_path / "saved", replicas, trainer, other)
    with pytest.raises(TypeError, match="received list"):
        mgpu.save_checkpoint(tmp_path / "saved", replicas, trainer, [1])
    mgpu.save_checkpoint(tmp_path / "saved", replicas, trainer)
    with pytest.raises(ValueError, match="data without a position"):
        mgpu.load_checkpoint(tmp_path / "saved", *run)
    with pytest.raises(ValueError, match="was made with other replicas"):
        mgpu.save_checkpoint(tmp_path / "saved", replicas, stranger)
    assert_same(everything(run), before)


def contents(file, forms=checkpoint.FORMATS + trainer_states.FORMATS):
    return files.read_arrays(file, forms, "a file",
                             lambda header, arrays: (header, arrays))


def change(file, edit):
    """Write the file again, with its header and arrays after `edit`."""
    header, arrays = contents(file)
    edit(header, arrays)
    files.write_arrays(file, header, arrays)


def of_states(**numbers):
    return lambda header, arrays: header["states"].update(numbers)


HOSTILE = {
    "rate": of_states(learning_rate=float("nan")),
    "updates": of_states(num_update=-1),
    "huge count": of_states(counts={"0.weight": 10 ** 400}),
    "slot of flags": lambda header, arrays: arrays.update(
        {"slot:0.weight|mean": np.full((5, 6), True)}),
}
HOSTILE_CHECKPOINT = {
    "numpy": lambda header, arrays: arrays.update(
        {"host:0|numpy": arrays["host:0|numpy"][:-1]}),
    "grad_req": lambda header, arrays: header["grad_req"].update(x="both"),
    "group": lambda header, arrays: arrays.update({"code:x": np.ones(1)}),
    "stream": lambda header, arrays: header["streams"][0]["text"].update(
        seed="-1"),
    "batch": lambda header, arrays: header["position"].update(
        position=[0, 77]),
    "extra": lambda header, arrays: header.update(extra={"x": [["set", []]]}),
    "name": lambda header, arrays: arrays.update({"value:../x": np.ones(1)}),
}


@pytest.mark.parametrize("kind", [*HOSTILE, *HOSTILE_CHECKPOINT])
@pytest.mark.parametrize("backend", BACKENDS[-1:], indirect=True)
def test_hostile_numbers_are_refused_and_nothing_changes(
        backend, tmp_path, kind):
    """In a checkpoint, and in a file of states; one code for all backends."""
    _, trainer, _ = run = plain(backend, on(0, 1))
    go_on(run, 3, 2, tmp_path / "saved")
    before = everything(run)
    change(tmp_path / "saved", {**HOSTILE, **HOSTILE_CHECKPOINT}[kind])
    with pytest.raises(ValueError):
        mgpu.load_checkpoint(tmp_path / "saved", *run)
    if kind in HOSTILE:
        trainer.save_states(tmp_path / "states")

        def edit(header, arrays):
            inner = {f"slot:{key}": x for key, x in arrays.items()}
            HOSTILE[kind]({"states": header}, inner)
            arrays.update({key[5:]: x for key, x in inner.items()})
        change(tmp_path / "states", edit)
        with pytest.raises(ValueError):
            trainer.load_states(tmp_path / "states")
    assert_same(everything(run), before)


@pytest.mark.timeout(120)
def test_a_pipe_is_refused_and_not_waited_for(backend, tmp_path):
    _, trainer, _ = run = plain(backend, on(0))
    with pytest.raises(FileNotFoundError):
        mgpu.load_checkpoint(tmp_path / "missing", *run)
    os.mkfifo(tmp_path / "pipe")
    for load in (lambda path: mgpu.load_checkpoint(path, *run),
                 trainer.load_states):
        with pytest.raises(mgpu.errors.CheckpointCorrupt,
                           match="not a regular file"):
            load(tmp_path / "pipe")


# -- swaps --------------------------------------------------------------------

OLD = Path(__file__).parent / "files" / "checkpoint"


@pytest.mark.parametrize("source", BACKENDS)
@pytest.mark.parametrize("target", BACKENDS)
def test_files_of_version_1_load(source, target):
    """npz, of two devices: on them and their backend with their streams."""
    with mgpu.using_backend(target) as backend:
        run = plain(backend, on(0, 1), init=mgpu.initializers.Xavier())
        file = OLD / f"1-{source}.npz"
        with np.load(file) as found:
            values = {name.removeprefix("value:"): found[name]
                      for name in found if name.startswith("value:")}
        mgpu.load_checkpoint(file, *run,
                             seed=None if source == target else 1)
        for name, x in run[0].export_numpy().items():
            assert_bit_equal(x, values[name])
        assert run[1].num_update == 3 and run[2].position == (0, 3)
        assert random.random() == 0.13436424411240122
        assert np.random.random() == 0.417022004702574
        go_on(run, 6)


SWAPS = {
    "optimizer": "the state of Adam instead of SGD",
    "network": r"0.weight: shape \(5, 6\) instead of \(4, 6\)",
    "layers": "missing 4.weight; missing 4.bias",
    "dtype": "0.weight of float64 instead of float32",
    "batches": "batch_size=6 for a position with 7",
    "seed": "seed=1 for a position with 0",
    "devices": r"cpu\(0\), cpu\(1\)] for .*cpu\(0\)]. Pass seed="}


def test_all_that_does_not_fit_is_listed(backend, tmp_path):
    """Each by itself and all together; of the other backend, where there is
    one."""
    with mgpu.using_backend(min(BACKENDS, key=backend.name.__eq__)) as other:
        go_on(plain(other, on(0, 1)), 2, 2, tmp_path / "saved")
    for wrong in (*([name] for name in SWAPS), [*SWAPS]):
        net = mlp(backend, (6, 4 if "network" in wrong else 5, 3,
                            *([3] if "layers" in wrong else [])))
        replicas = mgpu.initialize(
            net, on(0) if "devices" in wrong else on(0, 1), sample=ROWS[:2],
            dtype="float32" if "dtype" in wrong else "float64")
        trainer = mgpu.Trainer(replicas, "sgd" if "optimizer" in wrong
                               else "adam")
        data = datasets.BatchIterator(
            ROWS, LABELS, 6 if "batches" in wrong else 7,
            int("seed" in wrong))
        before = everything((replicas, trainer, data))
        with pytest.raises(ValueError) as seen:
            mgpu.load_checkpoint(tmp_path / "saved", replicas, trainer, data,
                                 seed=None if "devices" in wrong else 1)
        assert not isinstance(seen.value, mgpu.errors.CheckpointCorrupt)
        for name in wrong:
            assert re.search(SWAPS[name], str(seen.value)), (wrong, name)
        assert_same(everything((replicas, trainer, data)), before)
