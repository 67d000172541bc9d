"""A hundred of the generated cases, forty interrupts, and their judges
judged."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import BACKENDS

from . import Case, Failure, Step, draw, run
from .cases import kinds, legal, shrink

STEPS = tuple(Step(i, (5,), how="replicas") for i in range(4))
PLAIN = {"k": 3, "optimizer": "sgd", "steps": STEPS}


@pytest.mark.filterwarnings("ignore")       # of what users do
@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("engine", BACKENDS)
def test_equal_to_the_plain_loop_or_refused(engine, seed):
    """The same as one device, whatever the user does; see the package.
    ``python -m tests.generated --engine torch --seed 17`` shrinks a case."""
    case = draw(engine, seed)
    assert legal(case)
    run(case)


@pytest.mark.parametrize("engine", BACKENDS)
def test_the_cases_hold_what_they_promise(engine):
    """All layers and actions come among the hundred, on 1 to 4 devices."""
    cases = [draw(engine, seed) for seed in range(50)]
    assert {case.k for case in cases} == {1, 2, 3, 4}
    layers = {kind for case in cases for kind in kinds(case.layers)}
    wanted = {"dense", "frozen", "layer_norm", "batch_norm", "conv",
              "dropout", "embedding", "block", "experts", "switch"}
    assert layers >= wanted | ({"checkpoint", "reentrant", "hook", "tied",
                                "weight_norm"} if engine == "torch" else set())
    steps = [step for case in cases for step in case.steps]
    assert {step.how for step in steps} == {
        "train_batch", "replicas", "one by one"}
    assert {step.clip for step in steps} == {"", "before", "trainer", "0"}
    assert {step.fate for step in steps} == {
        "step", "skip", "retry", "look", "refused"}
    assert {action[0] for step in steps for action in step.before} == {
        "edit", "load", "freeze", "unfreeze", "save", "restore", "resume",
        "rate", "predict", *["multiply"] * (engine == "mxnet")}


# -- the judge judged ---------------------------------------------------------

def scaled(replicas, moment):
    """Gradients a billionth too large."""
    for p in replicas.params() if moment == "reduced" else ():
        for g in p.list_grad():
            g *= 1 + 1e-9


def one_edited(replicas, moment):
    """The last replica's weights are its own."""
    if moment == "updated":
        with replicas.backend.scope(recording=False):
            replicas.params()[0].list_data()[-1][:] += 1e-9


class Stale:
    """The gradients of the step before."""

    def __init__(self):
        self.last = None

    def __call__(self, replicas, moment):
        if moment == "reduced":
            now = [replicas.backend.to_numpy(p.grad())
                   for p in replicas.params()]
            for p, old in zip(replicas.params(), self.last or now):
                for g in p.list_grad():
                    g[:] = replicas.backend.put(old, g)
            self.last = now


def twice(replicas, moment):
    """One step of a parameter is taken twice."""
    if moment == "updated":
        p = replicas.params()[1]
        for x, g in zip(p.list_data(), p.list_grad()):
            with replicas.backend.scope(recording=False):
                x -= g * 1e-9


def statistics_moved(replicas, moment):
    for p in replicas.statistics() if moment == "updated" else ():
        for x in p.list_data():
            x += 1e-9


@pytest.mark.parametrize("fault, kind, options", [
    (scaled, "weights differ", {}), (Stale, "weights differ", {}),
    (one_edited, "raised ReplicaMismatchError", {}),
    (twice, "weights differ", {}),
    (statistics_moved, "weights differ", {
        "layers": (("dense", 0), ("batch_norm", 1)), "batch_norm": "sync"})],
    ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("engine", BACKENDS)
def test_a_planted_fault_is_seen(engine, fault, kind, options):
    case = Case(engine, **{**PLAIN, **options})
    assert run(case) == []
    with pytest.raises(Failure) as found:
        run(case, fault() if isinstance(fault, type) else fault)
    assert found.value.kind == kind


@pytest.mark.parametrize("engine", BACKENDS)
def test_a_failing_case_is_made_small(engine):
    """To the one layer and the one step that it needs."""
    def fails(case):
        return legal(case) and "layer_norm" in case.kinds() and any(
            ("load",) in step.before for step in case.steps)
    seed = next(n for n in range(1000) if fails(draw(engine, n)))
    small = shrink(draw(engine, seed), fails)
    assert small == eval(repr(small), {"Case": Case, "Step": Step})
    assert [kind for kind in kinds(small.layers)] == ["dense", "layer_norm"]
    assert [step.before for step in small.steps] == [(("load",),)]
    assert small.k == 1 and run(small) == []


# -- Ctrl-C -------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]

#: weights that are moved in two halves
TORN = """
import time
import mgpu
from tests.generated import interrupts

class Torn(interrupts.Training):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        step = self.trainer.step

        def torn(n, *options):
            x = self.replicas.params()[0].list_data()[0]
            with self.replicas.backend.scope(recording=False):
                x[:] = x * 2
                time.sleep(0.1)     # most of a step, on a busy machine too
                x[:] = x / 2
            step(n, *options)
        self.trainer.step = torn

interrupts.Training = Torn
with mgpu.using_backend("{engine}") as backend:
    print(any(list(interrupts.interrupted(backend, 10, 0))))
"""


def python(*arguments):
    """What a process of its own prints: Ctrl-C may come anywhere in it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], cwd=ROOT, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True)
    return done.stdout + done.stderr * bool(done.returncode)


@pytest.mark.parametrize("engine", BACKENDS)
def test_ctrl_c_leaves_a_step_whole_or_not_begun(engine):
    """Twenty times; half of them on strict devices."""
    out = python("-m", "tests.generated.interrupts", "--count", "20",
                 "--engine", engine)
    assert out == (f"{engine}: 0 of 10 wrong\n"
                   f"{engine}, strict devices: 0 of 10 wrong\n")


@pytest.mark.parametrize("engine", BACKENDS)
def test_a_torn_step_is_seen(engine):
    assert python("-c", TORN.format(engine=engine)) == "True\n"
