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
    return cases.reference("torch", 2, 1, "gloo",
                           tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("case", cases.CASES,
                         ids=lambda x: f"{x.row} {x.name}")
def test_a_fault(case, reference, tmp_path):
    assert case.size == 2 or not case.faults
    outcome = driver.run(case, "torch", "gloo", tmp_path)
    assert driver.problems(case, outcome, reference) == [], outcome.texts


# -- one process --------------------------------------------------------------

@pytest.fixture
def training(backend):
    """Replicas on two devices, and a batch."""
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


def test_an_unknown_nonfinite_raises(training):
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
    mgpu.train_batch(X, y, replicas, LOSS, trainer)     # continues
    assert trainer.num_update == 2


# -- the driver sees what is wrong --------------------------------------------

SAID = "all ranks meet in step 3; rank 1 has ended. Start again."


def outcome(message=SAID, digests=("b", "c"), digest="c", status=1):
    """Of a job whose rank 1 was lost in the third step, as it must be."""
    end = {"error": "WorkerLost", "family": True, "digest": digest,
           "message": message}
    return driver.Outcome(
        [status, status], [end, None], [list(digests), ["b", "c"]],
        ["a", "a"], ["", ""], [], [], 1.0, 1.0)


def problems(found, expected="WorkerLost"):
    return driver.problems(driver.Case(
        1, "lost", expect={0: expected, 1: "-"}, culprit=1), found, [*"abcd"])


@pytest.mark.parametrize("wrong, complaint", [
    ({"digests": ("b", "x"), "digest": "x"},
     "wrong number: rank 0, its steps"),
    ({"digest": "d"}, "wrong number: rank 0, after the error"),
    ({"message": SAID.replace("1", "0")}, "wrong culprit: rank 0"),
    ({"message": "all meet in step 3; one has ended. Start again."},
     "poor message: no rank"),
    ({"message": "rank 1 has ended. Start again."}, "poor message: not where"),
    ({"message": SAID[:-len(" Start again.")]}, "poor message: no remedy"),
    ({"status": 0}, "wrong status: the whole job")])
def test_the_driver_finds_wrong_outcomes(wrong, complaint):
    assert problems(outcome()) == []
    assert problems(outcome(), "UnevenWork")[0].startswith("wrong class: W")
    assert complaint in " ".join(problems(outcome(**wrong)))


STAYS = """
import json, os, subprocess, sys, time
folder, rank = json.loads(sys.argv[1])["folder"], os.environ["RANK"]
with open(f"{folder}/fault-{rank}", "w") as file:
    json.dump(time.time(), file)
os.replace(file.name, file.name + ".json")
if rank == "0":
    time.sleep(600)
subprocess.Popen(["sleep", "600"])
"""


def test_the_driver_finds_remaining_processes(tmp_path):
    program = tmp_path / "stays.py"
    program.write_text(STAYS)
    case = driver.Case(1, "stays", limit=1)
    outcome = driver.run(case, "torch", "gloo", tmp_path / "job", program,
                         patience=1)
    hung, left = driver.problems(case, outcome, None)
    assert hung == "hung: rank 0" and left.startswith("left behind: process")
    assert driver.survivors(set(outcome.left)) == []


def test_every_error_has_a_class_of_the_family():
    names = mgpu.errors.__all__
    assert all(issubclass(getattr(mgpu.errors, name), mgpu.errors.MgpuError)
               for name in names)
    # where they were before, with the bases that they had
    for place, name, base in (
            ("mgpu.training.trainer", "StaleGradientError", RuntimeError),
            ("mgpu.training.replicas", "ReplicaMismatchError", RuntimeError),
            ("mgpu.training", "NonFiniteLoss", FloatingPointError),
            ("mgpu.losses", "LabelError", ValueError),
            ("mgpu.backends.strict", "CrossDeviceError", RuntimeError),
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
