"""The arithmetic of `python -m benchmarks`, and that its contenders train."""
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as benchmarks   # noqa: E402
from benchmarks import contenders               # noqa: E402
from benchmarks import memory                   # noqa: E402
from benchmarks import processes                # noqa: E402
from benchmarks import scaling_model            # noqa: E402
import forked                                   # noqa: E402
from conftest import BACKENDS                   # noqa: E402
from helpers import relative_difference         # noqa: E402


def test_a_ratio_is_the_median_of_the_rounds():
    row = benchmarks.ratio_row("a", [(1, 2), (2, 2), (1, 4)], 1.5, 1.9, [])
    assert (row["ratio"], row["low"], row["high"]) == (2, 1, 4)
    assert row["seconds"] == [1, 2] and row["rounds"] == 3


@pytest.mark.parametrize("ratio, at_most, expected", [
    (1.4, False, "not met"), (1.5, False, "met"), (1.9, False, "stretch"),
    (1.4, True, "met"), (1.6, True, "not met")])
def test_verdicts(ratio, at_most, expected):
    row = {"ratio": ratio, "target": 1.5, "at_most": at_most,
           "stretch": None if at_most else 1.9}
    assert benchmarks.verdict(row) == expected


def test_every_row_has_a_name_of_its_own():
    names = [name for section in benchmarks.SECTIONS
             for name, _ in section(lambda name: True, 1)]
    assert len(set(names)) == len(names) > 25


LOOPS = [{"loop": loop, "backend": name} for name in BACKENDS
         for loop in ("mgpu", "halves")] \
    + [{"loop": loop} for name, loops in (
        ("torch", ("torch", "book", "ddp")), ("mxnet", ("gluon",)))
       if name in BACKENDS for loop in loops]


def sgd(weights, X, y, steps):
    """The weights of the network "tiny" after plain SGD, in NumPy."""
    for _ in range(steps):
        w, b, v, c = weights
        hidden = np.maximum(X @ w.T + b, 0)
        p = np.exp(hidden @ v.T + c)
        p /= p.sum(1, keepdims=True)
        p[range(len(y)), y] -= 1
        p /= len(y)
        back = p @ v * (hidden > 0)
        weights = [x - contenders.RATE * grad for x, grad in zip(weights, (
            back.T @ X, back.sum(0), p.T @ hidden, p.sum(0)))]
    return weights


@pytest.mark.parametrize("loop", LOOPS, ids=lambda x: "-".join(x.values()))
def test_contenders_train_the_steps_they_read(loop):
    """The first one, then 2 and 1: the weights are those of plain SGD."""
    spec = {**loop, "model": "tiny", "batch": 8, "devices": 2,
            "weights": True}
    out = subprocess.run(
        [forked.python(), "-m", "benchmarks.contenders", json.dumps(spec)],
        cwd=ROOT, input="2\n1\n", text=True, timeout=100, check=True,
        stdout=subprocess.PIPE).stdout.splitlines()
    *times, weights = map(json.loads, out)
    assert [sorted(line) for line in times] == [
        ["first", "prepared"], *[["host", "seconds"]] * 2]
    before, after = ([*map(np.array, arrays)] for arrays in weights)
    batch = contenders.batch_of("tiny", 4 if spec["loop"] == "halves" else 8)
    for start, found, expected in zip(before, after, sgd(before, *batch, 4),
                                      strict=True):
        # relative to the change: float32 after four steps
        assert relative_difference(found - start, expected - start) < 1e-3


def test_memory_grows_by_parameters_and_gradients(backend):
    """K devices take what one takes, and K - 1 times parameters, gradients
    and a shard with its outputs; 10 % more is an error."""
    found = memory.counted(backend, (1024, 2048, 1024), (1, 2, 4))
    parameters = found["parameters"]
    assert 16e6 < parameters < 17e6
    assert found[1]["bytes"] >= 2 * parameters      # it does see them
    for k in (2, 4):
        assert found[k]["bytes"] <= 1.1 * found[k]["bound"], found
        assert found[k]["bytes"] >= 2 * k * parameters


@pytest.mark.parametrize("spec, contenders", [
    (spec, contenders) for name, spec, contenders in (
        ("torch", {"what": "steps"}, ["mgpu", "ddp"]),
        ("torch", {"what": "steps", "who": "ddp"}, ["ddp"]),
        ("mxnet", {"what": "gradients"}, ["mgpu", "kvstore", "gloo"]))
    if name in BACKENDS])
def test_two_processes_do_the_same_work_as_others(spec, contenders,
                                                  monkeypatch):
    """It raises where their results differ."""
    monkeypatch.setattr(sys, "executable", forked.python())
    found = processes.job({**spec, "model": "tiny", "batch": 8,
                           "rounds": 2, "round": 0.1, "limit": 100})
    assert list(found) == contenders
    assert all(len(x) == 2 and min(x) > 0 for x in found.values())


def test_the_model_of_a_step():
    # two hosts send each other half of the bytes, twice
    assert scaling_model.ring(2, 1000, 0.25, 100) == 2 * (500 / 100 + 0.25)
    assert scaling_model.ring(4, 1000, 0, 100) == 6 * 2.5
    assert scaling_model.step(1, 0.5, 1000, 1, 100) == 0.5
    assert scaling_model.step(2, 0.5, 0, 0.25, 1024) == 0.5 + 1.25 + 0.5
    lines = scaling_model.table(0.5, 0, [("fast", 0, 1e99)]).splitlines()
    assert lines[2] == "| 1 | 0.50 s, 100% |"
    assert lines[-1] == "| 1024 | 0.50 s, 100% |"
