"""Some of the generated programs, and tests that they find faults.

The number of programs depends on the tier: five for each item where the marker
expression has the word "fast", else ten.
"""
import collections

import pytest

from conftest import BACKENDS

from . import Action, Failure, Network, Program, programs, run, search
from .programs import EDITS


@pytest.mark.filterwarnings("ignore")       # of what users do
@pytest.mark.parametrize("several", [False, True],
                         ids=["one network", "several networks"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_programs_equal_the_framework_on_one_device(request, backend, several):
    """Or mgpu raises a documented error; see the package. A failure is shrunk,
    and its program is in the output as code."""
    def fails(program):
        try:
            return run(program) is None
        except Failure:
            return True
    fast = "fast" in request.config.option.markexpr.split()
    small = search(programs(backend, several), fails, 5 if fast else 10)
    if small is not None:
        print(small)
        run(small)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_action_is_in_five_percent_of_the_programs(backend):
    """Counted without running them."""
    found: collections.Counter = collections.Counter()
    for several in (False, True):
        search(programs(backend, several), lambda program: found.update(
            {part for action in program.actions for part in _parts(action)}),
            60)
    expected = {
        "load", "load by_mgpu", "freeze", "freeze by_mgpu", "freeze unfreeze",
        "save", "restore", "resume", "resume checkpoint", "rate", "predict",
        "reset", "fail", "fail by_hand", "train_batch", "by_hand",
        "critic", "teacher", "before", "trainer", "0", "skip",
        "look", "error", "own step", *EDITS[backend],
        *(["own_states"] if backend == "torch" else ["lr_mult", "wd_mult"])}
    assert {name: found[name] for name in expected if found[name] < 6} == {}


def _parts(action):
    """What an action is, in words of the test."""
    yield action.name
    for name, x in action.arguments.items():
        if x is True:
            yield f"{action.name} {name}"
        elif isinstance(x, str):
            yield x


# -- planted faults are found -------------------------------------------------

def scaled(replicas, moment):
    """Gradients are too large by a factor of 1 + 1e-9."""
    for p in replicas.params() if moment == "reduced" else ():
        for g in p.list_grad():
            g *= 1 + 1e-9


def statistics_moved(replicas, moment):
    for p in replicas.statistics() if moment == "updated" else ():
        x = p.data()
        x += 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_planted_fault_is_found(backend):
    program = Program(
        backend, networks=(Network(("dense", "batch_norm"),
                                  batch_norm="sync"),), k=3,
        actions=tuple(Action("by_hand", rows=(5,)) for _ in range(4)))
    assert run(program) == []
    for fault, words in ((scaled, "weights differ"),
                         (statistics_moved, "weights differ.*running_")):
        with pytest.raises(Failure, match=words):
            run(program, fault)


@pytest.mark.parametrize("backend", BACKENDS[-1:])   # one backend is enough
def test_a_program_that_fails_shrinks_to_what_it_needs(backend):
    def fails(program):
        if "layer_norm" not in program.kinds:
            return False
        try:
            return run(program, scaled) is None
        except Failure as failure:
            return failure.kind == "weights differ"
    small = search(programs(backend), fails, 100)
    assert small.k == 1
    assert small.networks[0].layers == ("dense", "layer_norm")
    step, = small.actions
    assert step.name in ("train_batch", "by_hand")
    again = eval(repr(small))       # it is printed as code
    with pytest.raises(Failure, match="weights differ"):
        run(again, scaled)
    assert run(again) == []
