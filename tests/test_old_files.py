"""Files and names of older versions: what mgpu 0.1 and 0.2 wrote loads on
both backends, and training continues with the same numbers.

``files/0.1`` and ``files/0.2`` hold the files, with the values that the run
had when it wrote them and after further steps. The program that made the
second folder, with the networks and trainers of this module, is in the history
of that folder: another version would write other files.
"""
import importlib
import importlib.util
import json
import operator
import random
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from distributed import jobs
from helpers import mlp, on, relative_difference
from mgpu import parity
from mgpu.optim.lr_scheduler import (CosineScheduler, FactorScheduler,
                                     MultiFactorScheduler, PolyScheduler)
from mgpu.training.callbacks import EMA, EarlyStopping

FILES = Path(__file__).parent / "files"
OLD, NEW = FILES / "0.1", FILES / "0.2"
WRITERS = ["mxnet", "torch"]
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()
MOMENTUM = {"learning_rate": 0.125, "momentum": 0.5}
LIMIT = 1e-12

# The six examples of 0.1; 0.2 has 20, and batches of 7 for three devices.
rng = np.random.default_rng(0)
X, y = rng.normal(size=(6, 3)), rng.integers(0, 2, 6).astype("int32")
rng = np.random.default_rng(1)
EXAMPLES = rng.normal(size=(20, 3))
LABELS = rng.integers(0, 2, 20).astype("int32")
BATCH = EXAMPLES[:7], LABELS[:7]


def network(engine, dropout=0.0):
    """Dense, batch norm, ReLU, dropout, dense."""
    if engine == "torch":
        from torch import nn
        return nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(),
            *([nn.Dropout(dropout)] if dropout else []), nn.Linear(4, 2))
    from mxnet.gluon import nn
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4),
            nn.Activation("relu"),
            *([nn.Dropout(dropout)] if dropout else []),
            nn.Dense(2, in_units=4))
    return net


def assert_close(found, expected, limit=LIMIT):
    """The same names and values, but for the counter that only torch has."""
    found, expected = ({name: x for name, x in values.items()
                        if not name.endswith("num_batches_tracked")}
                       for values in (found, expected))
    assert found.keys() == expected.keys()
    gaps = {name: gap for name, x in expected.items()
            if (gap := relative_difference(found[name], x, 1e-3)) >= limit}
    assert not gaps


def part(written, begin):
    """The arrays of an npz file whose names begin so, by their other half."""
    return {name.removeprefix(begin): written[name] for name in written
            if name.startswith(begin)}


# -- names --------------------------------------------------------------------

def missing(names):
    """The paths that are not importable, of {module: "Name Class.method"}."""
    def exists(module, name):
        owner, _, last = name.rpartition(".")
        try:
            found = importlib.import_module(module)
            if owner:
                found = operator.attrgetter(owner)(found)
        except (AttributeError, ImportError):
            return False
        return hasattr(found, last) or last in getattr(
            found, "__annotations__", ())       # the field of a dataclass
    return [f"{module}.{name}" for module, every in names.items()
            for name in every.split() if not exists(module, name)]


def test_public_names_of_the_previous_version():
    """0.2's, with those of 0.1 that 0.2 honours, and members of classes that
    the guides and examples use. (A device has no object of the backend's.
    Three of MXNet's names raised with a hint, and still do; losses look up
    themselves what they are called with. `Meeting` and `room_for_cpus` were
    of mgpu's own modules; MGPU_ENGINE is read as MGPU_COMM.)"""
    names = json.loads((NEW / "names.json").read_text(encoding="utf-8"))
    assert missing(names) == [
        "mgpu.backends.base.Replica", "mgpu.batch_norm.Meeting",
        "mgpu.compat.mxnet.callback", "mgpu.compat.mxnet.io",
        "mgpu.compat.mxnet.optimizer", "mgpu.environment.engine",
        "mgpu.losses.of_shards", "mgpu.profiling.room_for_cpus"]


def test_a_missing_name_is_seen():
    assert missing({"mgpu.training.trainer": "Trainer Tractor Trainer.step "
                    "Trainer.leap", "mgpu.attic": "Trainer"}) == [
        "mgpu.training.trainer.Tractor", "mgpu.training.trainer.Trainer.leap",
        "mgpu.attic.Trainer"]


# -- 0.1 ----------------------------------------------------------------------
# Float64, two devices: after three steps the values, and the states of the
# trainer; the values after a fourth step.

def next_step(backend, writer, optimizer, states=True):
    """How far a fourth step is from the one that was written."""
    def old(what):
        values = dict(np.load(OLD / f"{writer}-{optimizer}{what}.npz"))
        values.pop("1.num_batches_tracked", None)   # only torch has it
        return values
    replicas = mgpu.initialize(network(backend.name), on(0, 1),
                               "uniform", sample=X,
                               dtype="float64")
    trainer = mgpu.Trainer(replicas, optimizer, MOMENTUM if optimizer == "sgd"
                           else {"learning_rate": 0.125},
                           loss_scale="dynamic" if optimizer == "adam"
                           else None)
    replicas.import_numpy(old("-values"))
    if states:
        trainer.load_states(OLD / f"{writer}-{optimizer}.npz")
        assert trainer.num_update == 3
    mgpu.train_batch(X, y, replicas, LOSS, trainer)
    values, expected = replicas.export_numpy(all_devices=True), old("-next")
    assert len(expected) == 8
    return max(relative_difference(values[name], expected[name], 1e-3)
               for name in expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("writer", WRITERS)
def test_states_of_0_1(backend, writer, optimizer):
    # Adam divides noise by noise in the bias before the batch norm, and
    # processors round that differently.
    limit = 1e-12 if optimizer == "sgd" else 1e-7
    assert next_step(backend, writer, optimizer) < limit
    assert next_step(backend, writer, optimizer, states=False) > 1e-4


# -- 0.2: states of trainers --------------------------------------------------

RATE, DECAY = 0.125, 0.0625


class Halving:
    """A schedule of a program's own, which counts its calls. Its file names
    the class and this module: both keep their names."""

    def __init__(self):
        self.calls = 0

    def __call__(self, number):
        self.calls += 1
        return RATE / 2 ** self.calls


def rule(semantics, name, loss_scale=None, **options):
    rate, decay = ("learning_rate", "wd") if semantics == "gluon" \
        else ("lr", "weight_decay")
    options = {rate: RATE, decay: DECAY, **options}
    return lambda net: {"optimizer": name, "semantics": semantics,
                        "loss_scale": loss_scale, "optimizer_params": options}


def scheduled(schedule):
    return lambda net: {"optimizer": "sgd", "lr_scheduler": schedule(),
                        "optimizer_params": {"momentum": 0.5}}


def torch_object(name, **options):
    """Of `torch.optim`, with a group for the biases."""
    def arguments(net):
        import torch
        groups = [{"params": [p for p in net.parameters() if p.ndim > 1]},
                  {"params": [p for p in net.parameters() if p.ndim == 1],
                   "lr": RATE / 4, "weight_decay": 0.0}]
        return {"optimizer": getattr(torch.optim, name)(
            groups, lr=RATE, weight_decay=DECAY, **options)}
    return arguments


def mxnet_object(name, schedule=False, **options):
    """Of `mx.optimizer`, whose own schedule counts as it is called."""
    def arguments(net):
        import mxnet as mx
        more = {"lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.5)} \
            if schedule else {}
        return {"optimizer": getattr(mx.optimizer, name)(
            learning_rate=RATE, wd=DECAY, **more, **options)}
    return arguments


#: by the name of the file: ``arguments(net)`` of `mgpu.Trainer`
TRAINERS = {
    **{f"gluon-{name}": rule("gluon", name) for name in (
        "adam", "adamw", "adamax", "nadam", "adagrad", "adadelta", "ftrl",
        "lamb", "ftml", "dcasgd", "sgld")},
    **{f"gluon-{name}": rule("gluon", name, momentum=0.5) for name in (
        "sgd", "nag", "signum")},
    "gluon-lars": rule("gluon", "lars", momentum=0.5,
                       momentum_correction=False),
    "gluon-groupadagrad": rule("gluon", "groupadagrad", wd=0.0),
    "gluon-rmsprop": rule("gluon", "rmsprop", centered=True),
    **{f"torch-{name}": rule("torch", name) for name in (
        "adamw", "adamax", "nadam", "adagrad", "adadelta")},
    **{f"torch-{name}": rule("torch", name, momentum=0.5)
       for name in ("sgd", "nag")},
    "torch-adam": rule("torch", "adam", amsgrad=True),
    "torch-rmsprop": rule("torch", "rmsprop", momentum=0.5, centered=True),
    "loss_scale": rule("gluon", "adam", "dynamic"),
    "frozen": rule("gluon", "adam"),
    "factor": scheduled(lambda: FactorScheduler(2, 0.5, base_lr=RATE)),
    "multifactor": scheduled(
        lambda: MultiFactorScheduler([1, 3], 0.5, base_lr=RATE)),
    "poly": scheduled(lambda: PolyScheduler(9, RATE)),
    "cosine": scheduled(lambda: CosineScheduler(9, RATE, warmup_steps=5)),
    "counting": scheduled(Halving),
    **{f"torch.optim-{name}": torch_object(name) for name in (
        "Adadelta", "Adagrad", "AdamW", "Adamax", "NAdam")},
    "torch.optim-Adam": torch_object("Adam", amsgrad=True),
    "torch.optim-RMSprop": torch_object("RMSprop", momentum=0.5),
    "torch.optim-SGD": torch_object("SGD", momentum=0.5),
    "mxnet.optimizer-SGD": mxnet_object("SGD", momentum=0.5),
    "mxnet.optimizer-Adam": mxnet_object("Adam", schedule=True)}


def readable(kind, backend):
    """Whether a trainer with such an optimizer object can be made here."""
    library = kind.partition(".")[0]
    return kind.partition("-")[0] not in ("torch.optim", "mxnet.optimizer") \
        or library == backend.name or library == "mxnet" in BACKENDS


def begin(kind, backend):
    """A network without batch norm on three devices, its trainer, and the
    arguments of that."""
    net = mlp(backend, (3, 4, 2))
    replicas = mgpu.initialize(net, on(0, 1, 2), "uniform", dtype="float64")
    arguments = TRAINERS[kind](net)
    moved = [p for p in replicas.params() if len(p.shape) > 1] \
        if kind == "gluon-groupadagrad" else replicas   # it takes matrices
    return replicas, mgpu.Trainer(moved, **arguments), arguments


def flat(replicas):
    """All values in one vector."""
    values = replicas.export_numpy()
    return np.concatenate([values[p.name].ravel() for p in replicas.params()])


def put(replicas, vector):
    values = {}
    for p in replicas.params():
        size = int(np.prod(p.shape))
        values[p.name], vector = vector[:size].reshape(p.shape), vector[size:]
    replicas.import_numpy(values)


@pytest.mark.parametrize("writer", WRITERS)
def test_trainer_states(backend, writer):
    """Values and states after three steps give the written fourth step: for
    each rule (MXNet has written Gluon's, and the schedules; PyTorch torch's)
    and each optimizer object."""
    written, gaps = np.load(NEW / f"{writer}-trainers.npz"), {}
    for kind in written:
        if not readable(kind, backend):
            continue
        replicas, trainer, _ = begin(kind, backend)
        put(replicas, written[kind][0])
        trainer.load_states(NEW / f"{writer}-trainers" / f"{kind}.states")
        assert trainer.num_update == 3
        mgpu.train_batch(*BATCH, replicas, LOSS, trainer)
        gap = relative_difference(flat(replicas), written[kind][1])
        # An object of MXNet's reads its options as float32; 0.2 did not.
        if gap >= (2e-6 if kind.startswith("mxnet.optimizer") else LIMIT):
            gaps[kind] = gap
        if kind == "loss_scale":
            assert trainer.loss_scale == 2.0 ** 15
            assert trainer.skipped_steps == 1
    assert not gaps


@pytest.mark.parametrize("backend", ["torch"] * ("torch" in BACKENDS),
                         indirect=True)
def test_a_state_dict(backend):
    """Of a trainer, as ``torch.save`` wrote it."""
    import torch
    values, expected = np.load(NEW / "torch-trainers.npz")["torch-adam"]
    replicas, trainer, _ = begin("torch-adam", backend)
    put(replicas, values)
    file = NEW / "torch-trainers" / "state_dict.pt"
    trainer.load_state_dict(torch.load(file, weights_only=True))
    mgpu.train_batch(*BATCH, replicas, LOSS, trainer)
    assert relative_difference(flat(replicas), expected) < LIMIT


# -- 0.2: checkpoints ---------------------------------------------------------

def begin_norm(backend, devices, policy="per_device", net=None):
    """A network with batch norm, its trainer and its data."""
    replicas = mgpu.initialize(
        net or network(backend.name), devices, "uniform", dtype="float64",
        sample=X, batch_norm=policy)
    return (replicas, mgpu.Trainer(replicas, "sgd", MOMENTUM,
                                   lr_scheduler=FactorScheduler(2, 0.5)),
            mgpu.datasets.BatchIterator(EXAMPLES, LABELS, 7, 3))


def steps(run, end):
    """Train to update number `end`, over the ends of epochs; yields each
    number."""
    replicas, trainer, data = run
    while trainer.num_update < end:
        for batch in data:
            mgpu.train_batch(*batch, replicas, LOSS, trainer)
            yield trainer.num_update
            if trainer.num_update == end:
                break


def draws(backend):
    """The next numbers of Python's, NumPy's and the framework's streams."""
    if backend.name == "torch":
        import torch
        native = torch.rand(()).item()
    else:
        import mxnet as mx
        native = mx.nd.random.uniform().asscalar()
    return np.array([random.random(), np.random.random(), native])


@pytest.mark.parametrize("writer, policy, count", [
    ("mxnet", "per_device", 3), ("torch", "per_device", 3),
    ("mxnet", "sync", 2), ("mxnet", "sync", 3)])
def test_checkpoints(backend, writer, policy, count):
    """Values, momentum, schedule, what is frozen, and the place in the data;
    with "per_device" the statistics of each of three devices, with "sync"
    those of all, of two devices and for any number. Where nothing else is
    asked for, the random streams."""
    written = np.load(NEW / f"{writer}-{policy}.npz")
    same = backend.name == writer and policy == "per_device"
    run = replicas, _, _ = begin_norm(backend, on(*range(count)), policy)
    mgpu.load_checkpoint(NEW / f"{writer}-{policy}.checkpoint", *run,
                         seed=None if same else 1)
    if same:
        np.testing.assert_array_equal(draws(backend), written["draws"])
    every = policy == "per_device"
    for end, what in (4, "values|"), (6, "next|"):
        assert list(steps(run, end)) == [*range(5, end + 1)]
        assert_close(replicas.export_numpy(all_devices=every),
                     part(written, what), 1e-300 if end == 4 else LIMIT)


@pytest.mark.parametrize("writer", WRITERS)
def test_statistics_of_each_device(backend, writer):
    """``export_numpy(all_devices=True)`` in an npz file, and one pass of a
    new trainer, which does not move the weights."""
    written = np.load(NEW / f"{writer}-statistics.npz")
    values = {name: written[name] for name in written if "|" not in name}
    assert values["1.running_mean"].shape == (3, 4)
    replicas = begin_norm(backend, on(0, 1, 2))[0]
    replicas.import_numpy(values)
    assert_close(replicas.export_numpy(all_devices=True), values, 1e-300)
    mgpu.train_batch(*BATCH, replicas, LOSS,
                     mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.0}))
    assert_close(replicas.export_numpy(all_devices=True),
                 part(written, "next|"))


def counting():
    """A torch network with a layer that keeps sums as its extra state."""
    import torch
    from torch import nn

    class Sums(nn.Module):

        def __init__(self):
            super().__init__()
            self.state = {"passes": 0, "sum": torch.zeros(
                4, dtype=torch.float64), "note": None}

        def forward(self, x):
            if self.training:
                self.state = {**self.state, "passes": self.state["passes"] + 1,
                              "sum": self.state["sum"] + x.detach().sum(0)}
            return x / self.state["passes"] + 0.125 * self.state["sum"]

        def get_extra_state(self):
            return self.state

        def set_extra_state(self, state):
            self.state = state
    return nn.Sequential(nn.Linear(3, 4), Sums(), nn.Tanh(), nn.Linear(4, 2))


NOTE = {"text": ["a", (1, 2.5, None, True)], ("t",): b"bytes",
        "array": np.arange(6.0).reshape(2, 3), "number": np.float32(0.1)}


@pytest.mark.parametrize("backend", ["torch"] * ("torch" in BACKENDS),
                         indirect=True)
def test_extra_states_of_two_devices(backend):
    written = np.load(NEW / "torch-extra.npz")
    net = counting()
    run = begin_norm(backend, on(0, 1), net=net)
    mgpu.load_checkpoint(NEW / "torch-extra.checkpoint", *run)
    layer = net[1]
    assert layer.state["passes"] == 4
    assert repr(layer.state["note"]) == repr(NOTE)
    assert (layer.state["sum"].numpy() == written["sum"]).all()
    assert_close(run[0].export_numpy(), part(written, "values|"), 1e-300)
    assert list(steps(run, 6)) == [5, 6]    # from the network's sums


# -- 0.2: folders of checkpoints, of one process and of two -------------------

#: devices of the folders, and of each of the two processes
DEVICES = {"folder": 2, "ranks": 3}
RANKS = 2, 1


def train(run, folder, **options):
    """Three epochs of three steps; with a moving average."""
    replicas, trainer, data = run
    ema = EMA(0.5)
    history = mgpu.train(
        replicas, data, mgpu.datasets.BatchIterator(EXAMPLES, LABELS, 20),
        LOSS, trainer, 3, progress=False, checkpoint_dir=folder,
        resume="auto", checkpoint_every=2, keep=2, **options,
        callbacks=[ema, EarlyStopping(3, "train_loss")])
    return {"loss_per_step": np.array(history.loss_per_step),
            "train_loss": np.array(history.train_loss),
            "test_acc": np.array(history.test_acc),
            **{f"ema|{name}": x for name, x in ema.averages().items()},
            **replicas.export_numpy(all_devices=True)}


@pytest.mark.parametrize("form", ["folder", "ranks"])
@pytest.mark.parametrize("writer", WRITERS)
def test_folders_of_checkpoints(backend, writer, form, tmp_path):
    """After step 4, inside an epoch: all nine steps, and their history, are
    those of the uninterrupted run."""
    shutil.copytree(NEW / f"{writer}-{form}", tmp_path, dirs_exist_ok=True)
    run = begin_norm(backend, on(*range(DEVICES[form])))
    same = backend.name == writer and form == "folder"
    found = train(run, tmp_path, resume_seed=None if same else 1)
    assert_close(found, dict(np.load(NEW / f"{writer}-{form}.npz")))


def start_ranks(backend, folder):
    """Two processes that train, or continue, with a folder ``run``. Returns
    what `train` gives, with the statistics of all three devices."""
    jobs.start(folder, len(RANKS), __file__, backend, folder).said()
    first, second = (dict(np.load(folder / f"rank-{i}.npz"))
                     for i in range(len(RANKS)))
    return {name: np.concatenate([x, second[name][None]])
            if "running" in name else x for name, x in first.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_processes_continue(backend, tmp_path):
    shutil.copytree(NEW / f"{backend}-ranks", tmp_path / "run")
    assert_close(start_ranks(backend, tmp_path),
                 dict(np.load(NEW / f"{backend}-ranks.npz")))


def run_rank(backend, folder):
    """The program of one of the two processes."""
    warnings.simplefilter("error", RuntimeWarning)
    mgpu.set_backend(backend)
    mgpu.distributed.init(timeout=60)
    rank = mgpu.distributed.rank()
    run = begin_norm(mgpu.get_backend(), on(*range(RANKS[rank])))
    found = train(run, Path(folder, "run"))
    np.savez(Path(folder, f"rank-{rank}.npz"), **found)


# -- 0.2: weights -------------------------------------------------------------

@pytest.mark.parametrize("writer", WRITERS)
def test_weights(backend, writer):
    """Of `Replicas.save`, `save_parameters` and ``np.savez``: the predictions
    of the network that was saved."""
    expected = np.load(NEW / f"{writer}-predictions.npy")
    for ending in "safetensors", "params", "npz":
        replicas = begin_norm(backend, on(0))[0]
        file = NEW / f"{writer}-weights.{ending}"
        if ending == "npz":
            replicas.import_numpy(np.load(file))
        else:
            (replicas.load if ending == "safetensors"
             else replicas.load_parameters)(file)
        assert relative_difference(replicas.predict(EXAMPLES),
                                   expected) < LIMIT, ending


SYMBOL = FILES / "gluon" / "training" / "net-symbol.json"
PICTURES = np.random.default_rng(2).normal(size=(4, 2, 6, 6))


def test_converted_parameters(backend):
    """Of `to_gluon_params`, on both backends."""
    net = mgpu.from_gluon(SYMBOL, NEW / "converted.params")
    replicas = mgpu.initialize(net, on(0), dtype="float64")
    expected = np.load(NEW / "converted.npy")
    assert relative_difference(replicas.predict(PICTURES), expected) < LIMIT


@pytest.mark.parametrize("backend", ["torch"] * ("torch" in BACKENDS),
                         indirect=True)
def test_converted_source(backend):
    """The program of `gluon_source`, with the weights of that and of
    `to_safetensors`."""
    import safetensors.torch
    path = NEW / "converted" / "net.py"
    spec = importlib.util.spec_from_file_location("converted_0_2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    replicas = mgpu.initialize(module.load(path.with_suffix(".safetensors")),
                               on(0), dtype="float64")
    assert relative_difference(
        replicas.predict(PICTURES),
        np.load(NEW / "converted" / "net.npy")) < LIMIT
    net = mgpu.from_gluon(SYMBOL, NEW / "converted.params")
    for x in net.state_dict().values():
        x.zero_()
    safetensors.torch.load_model(net, NEW / "converted.safetensors")
    assert relative_difference(
        mgpu.initialize(net, on(0), dtype="float64").predict(PICTURES),
        np.load(NEW / "converted.npy")) < LIMIT


# -- traces of 0.1 and 0.2 ----------------------------------------------------

@pytest.mark.parametrize("folder", [OLD, NEW], ids=["0.1", "0.2"])
@pytest.mark.parametrize("writer", WRITERS)
def test_traces(backend, writer, folder):
    """0.1's: batch norm and momentum. 0.2's of MXNet: dropout too, on two
    devices; of PyTorch: Adam with a schedule and without batch norm."""
    def compare(**options):
        return parity.compare_trace(
            folder / f"{writer}.trace", lambda: network(backend.name)
            if folder is OLD else traced(writer, backend), **options)
    result = compare()
    assert result.same and result.plan.confirmed, str(result)
    assert max(gap.relative for gap in result.gaps) < 1e-10
    if writer == backend.name:
        wrong = compare(optimizer="sgd",
                        optimizer_params={"learning_rate": 0.25})
        assert wrong.verdict == "different" and wrong.first.stage == "weight"


def traced(writer, backend):
    """The network of a trace."""
    return network(backend.name, 0.5) if writer == "mxnet" \
        else mlp(backend, (3, 4, 2))


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
