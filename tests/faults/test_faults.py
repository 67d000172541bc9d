"""What goes wrong in a job is seen, named, and changes no number.

``scripts/faults.sh`` runs all cases, also those of studies/faults.
``-m "not faults"`` leaves them out.
"""
import sys

import pytest

import mgpu
from conftest import BACKENDS
from faults import cases, driver
from faults.program import late_failure

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The digests of a training of two processes without a fault."""
    pytest.importorskip("torch")
    return cases.reference("torch", 2, 1, "torch",
                           tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("case", cases.CASES,
                         ids=lambda x: f"{x.row} {x.name}")
def test_a_fault(case, reference, tmp_path):
    assert case.size == 2 or not case.faults
    outcome = driver.run(case, "torch", "torch", tmp_path)
    assert driver.problems(case, outcome, reference) == [], outcome.texts


# -- one process --------------------------------------------------------------

@pytest.fixture
def training(backend):
    """Replicas on two devices and a batch of theirs."""
    from nets import convnet
    rows = mgpu.datasets.synthetic(8, num_train=8, num_test=8,
                                   shape=(1, 8, 8), dtype="float64")[0]
    X, y = next(iter(rows))
    replicas = mgpu.initialize(
        convnet(backend, channels=1, classes=10), mgpu.list_devices(2),
        init="xavier", seed=1, dtype="float64")
    return replicas, X, y


def values(params):
    return [mgpu.to_numpy(x).copy() for p in params for x in p.list_data()]


def same(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def spoilt(pred, label):
    return LOSS(pred, label) * float("nan")


@pytest.mark.parametrize("nonfinite", ["skip", "ignore", None])
def test_a_gradient_that_is_not_finite(training, nonfinite):
    replicas, X, y = training
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1},
                           nonfinite=nonfinite)
    before, skips = values(replicas.params()), nonfinite == "skip"
    mgpu.train_batch(X, y, replicas, spoilt, trainer)
    assert same(before, values(replicas.params())) is skips
    assert trainer.num_update == int(not skips)
    assert trainer.skipped_steps == int(skips)
    assert trainer.loss_scale == 1


def test_a_gradient_that_is_not_finite_raises(training):
    replicas, X, y = training
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1},
                           nonfinite="raise")
    before = values(replicas.params())
    with pytest.raises(mgpu.errors.NonFiniteGradient,
                       match="0.weight.*step 1"):
        mgpu.train_batch(X, y, replicas, spoilt, trainer)
    # These gradients are not applied later.
    with pytest.raises(RuntimeError, match="allreduce_grads"):
        trainer.update(8)
    assert same(before, values(replicas.params()))
    mgpu.train_batch(X, y, replicas, LOSS, trainer)
    assert (trainer.num_update, trainer.skipped_steps) == (1, 0)


def test_nonfinite_is_one_of_three(training):
    with pytest.raises(ValueError, match="nonfinite"):
        mgpu.Trainer(training[0], "sgd", nonfinite="never")
    with pytest.raises(ValueError, match="dynamic"):
        mgpu.Trainer(training[0], "sgd", nonfinite="raise",
                     loss_scale="dynamic")


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="MXNet was left out")
@pytest.mark.parametrize("backend", ["mxnet"], indirect=True)
@pytest.mark.parametrize("failing", [0])
def test_work_that_fails_on_a_device(training, failing):
    """MXNet tells of it once, when the result is read; torch at once."""
    replicas, X, y = training
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    mgpu.train_batch(X, y, replicas, LOSS, trainer)
    before = values(replicas.params())

    def late(pred, label):
        return LOSS(pred, label) * late_failure(pred, failing)
    with pytest.raises(mgpu.errors.DeviceError,
                       match=rf"cpu\({failing}\).*step 2") as caught:
        mgpu.train_batch(X, y, replicas, late, trainer)
    assert (caught.value.device, caught.value.step) == (mgpu.cpu(failing), 2)
    assert same(before, values(replicas.params()))
    assert trainer.num_update == 1
    with pytest.raises(mgpu.errors.StaleGradientError):
        trainer.step(8)
    mgpu.train_batch(X, y, replicas, LOSS, trainer)     # goes on
    assert trainer.num_update == 2


# -- the driver sees what is wrong --------------------------------------------

FALSE = '''
import json, os, subprocess, sys, time
plan, rank = json.loads(sys.argv[1]), int(os.environ["RANK"])
what = plan["deed"]
def write(name, value):
    path = f"{plan['folder']}/{name}-{rank}"
    with open(path, "w") as file:
        json.dump(value, file)
    os.replace(path, path + ".json")
write("begun", "a")
write("fault", time.time())
write("steps", ["b", "x" if what == "steps" and rank == 0 else "c"])
if what == "hang" and rank == 0:
    time.sleep(600)
if what == "orphan" and rank == 0:
    subprocess.Popen(["sleep", "600"])
write("end", {"error": "WorkerLost", "family": True, "told": {},
              "digest": "d" if what == "after" else
              "x" if what == "steps" and rank == 0 else "c",
              "at": time.time(), "skipped": 0, "message": {
    "culprit": "all ranks meet in step 3; rank 0 has ended. Start again.",
    "rank": "all meet in step 3; one has ended. Start again.",
    "place": "rank 1 has ended. Start again.",
    "remedy": "all ranks meet in step 3; rank 1 has ended.",
}.get(what, "all ranks meet in step 3; rank 1 has ended. Start again.")})
sys.exit(0 if what == "status" else 1)
'''


@pytest.mark.parametrize(("deed", "complaint"), [
    ("nothing", None), ("hang", "hung: rank 0"),
    ("steps", "wrong number: rank 0, its steps"),
    ("after", "wrong number: rank 0, after the error"),
    ("orphan", "left behind: process"), ("culprit", "wrong culprit: rank 0"),
    ("rank", "poor message: no rank"), ("place", "poor message: not where"),
    ("remedy", "poor message: no remedy"), ("class", "wrong class: Worker"),
    ("status", "wrong status: the whole job")])
def test_the_driver_sees(deed, complaint, tmp_path):
    program = tmp_path / "false.py"
    program.write_text(FALSE)
    case = driver.Case(1, deed, ((1, 2, "before", ""),), {
        0: "UnevenWork" if deed == "class" else "WorkerLost", 1: "-"}, 1,
        limit=1 if deed == "hang" else 20, options={"deed": deed})
    outcome = driver.run(case, "torch", "torch", tmp_path / "job", program,
                         patience=1)
    found = driver.problems(case, outcome, ["a", "b", "c", "d"])
    assert (not found) if complaint is None else any(
        text.startswith(complaint) for text in found), found
    assert driver.survivors(set(outcome.left)) == []


def test_every_error_has_a_class_of_the_family():
    names = mgpu.errors.__all__
    assert all(issubclass(getattr(mgpu.errors, name), mgpu.errors.MgpuError)
               for name in names)
    # where they were before, with the bases that they had
    for place, name, base in (
            ("mgpu.trainer", "StaleGradientError", RuntimeError),
            ("mgpu.replicas", "ReplicaMismatchError", RuntimeError),
            ("mgpu.training", "NonFiniteLoss", FloatingPointError),
            ("mgpu.losses", "LabelError", ValueError),
            ("mgpu.strict", "CrossDeviceError", RuntimeError),
            ("mgpu.backends", "BackendNotAvailable", ImportError),
            ("mgpu.gluon_io", "UnreadableParams", ValueError),
            ("mgpu.gluon_io", "UnreadableSymbol", ValueError),
            ("mgpu.gluon_io", "MissingOperator", NotImplementedError),
            ("mgpu.parity", "MatchError", ValueError),
            ("mgpu.parity.run", "CannotRun", RuntimeError),
            ("mgpu.testing", "ParityError", AssertionError)):
        __import__(place)
        error = getattr(sys.modules[place], name)
        assert error is getattr(mgpu.errors, name) and name in names
        assert issubclass(error, base)
