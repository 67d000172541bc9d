"""``parity.compare(mode="accuracy")``: do two networks learn as much?"""
import itertools
import json
import sys

import numpy as np
import pytest

import mgpu
from mgpu import parity
from mgpu.parity import accuracy
from nets import rows_gluon as gluon
from nets import rows_torch as port

RATE = {"learning_rate": 0.2, "momentum": 0.9}
XAVIER = mgpu.initializers.Xavier()
MAKE = {"mxnet": gluon, "torch": port}


def data(count, rows=24, seed=1):
    """Three overlapping clouds."""
    rng = np.random.default_rng(seed)
    labels = [rng.integers(0, 3, rows).astype("int32") for _ in range(count)]
    return [(np.eye(3, 6)[y] * 1.5 + rng.normal(0, 1, (rows, 6)), y)
            for y in labels]


TRAIN, TEST = data(12), data(3, rows=50, seed=2)


def sides(a=gluon, b=port, **options_of_b):
    return (parity.Side(a, init=XAVIER),
            parity.Side(b, init=XAVIER, **options_of_b))


def compare(*pair, **options):
    return parity.compare(*pair, **{
        "batches": TRAIN, "test": TEST, "mode": "accuracy",
        "optimizer_params": RATE, "seeds": range(4), **options})


# -- verdicts -----------------------------------------------------------------

def test_a_port_learns_as_much():
    seen = []
    result = compare(*sides(), devices=2,
                     progress=lambda *done: seen.append(done))
    assert result.same and result.mode == "accuracy", str(result)
    assert seen == [(i, 96) for i in range(1, 97)]      # 2 * 4 * 12
    rows = 150
    for side in "ab":
        curve = result.curves[side]
        assert len(curve) == 4 and len(set(curve)) > 1  # seeds differ
        assert min(curve) > 0.5     # chance is a third: it has learned
        counts = np.array(curve) * rows
        # counted as integers, divided once
        assert [c / rows for c in counts.round().astype(int)] == curve
        assert len(result.losses[side]) == 12
        assert result.losses[side][-1] < result.losses[side][0]
    test = result.curves["test"]
    assert test["p"] >= 0.05 and test["rows"] == rows
    assert 0 < test["detectable"] < 0.5
    assert not result.gaps and result.first is None
    assert result.settings["seeds"] == [0, 1, 2, 3]
    assert result.sides["b"]["engine"].startswith("torch")
    back = json.loads(json.dumps(result.to_dict()))
    assert back["curves"]["test"]["p"] == test["p"]
    text = str(result)
    assert text.startswith("same (accuracy, 12 steps, float64)")
    assert "with probability 0.8; 'same' says nothing of smaller" in text


def test_without_any_spread_a_difference_is_no_proof(monkeypatch):
    """One example of 32 is no difference, though Welch's p is then 0."""
    counted = itertools.cycle([3 / 32, 4 / 32])
    monkeypatch.setattr(accuracy, "_accuracy", lambda *_: next(counted))
    result = compare(*sides(port, port), seeds=range(2))
    assert result.verdict == "no proof" and not result.same
    assert "there is no spread to judge" in result.reason
    monkeypatch.setattr(accuracy, "_accuracy", lambda *_: 0.5)
    assert compare(*sides(port, port), seeds=range(2)).same


def test_a_broken_side_is_seen(backend):
    """Its examples come with the labels of others."""
    make = MAKE[backend.name]
    result = compare(*sides(make, make, prepare=lambda X, y: (X[::-1], y)))
    # the test data go through `prepare` too: nothing was learned
    assert result.verdict == "different" and not result.same
    assert np.mean(result.curves["b"]) < 0.5 < np.mean(result.curves["a"])
    assert result.curves["test"]["p"] < 0.01


def test_runs_are_a_function_of_their_seeds(backend):
    make = MAKE[backend.name]
    one, two = (compare(*sides(make, make), batches=TRAIN[:4], seeds=s)
                for s in ([0, 1], [1, 0]))
    for side in "ab":
        assert one.curves[side] == two.curves[side][::-1]
    # both sides are the same network, and yet not the same draw
    assert one.losses["a"] != one.losses["b"]


def test_a_schedule_is_that_of_each_run():
    """One object would have counted the updates of the run before."""
    class Schedule:         # Gluon's own schedules do not go back either
        last = 0

        def __call__(self, num_update):
            self.last = max(self.last, num_update)
            return 0.25 * 0.8 ** self.last
    one = compare(*sides(gluon, gluon, lr_scheduler=Schedule()),
                  seeds=[0, 1])
    two = compare(*sides(gluon, gluon, lr_scheduler=Schedule()),
                  seeds=[1, 0])
    assert one.losses["b"] == two.losses["b"]   # means of two, in any order
    assert one.curves["b"] == two.curves["b"][::-1]


# -- the test -----------------------------------------------------------------

def test_the_statistics_are_scipys():
    from scipy import stats
    a, b = [0.91, 0.93, 0.9, 0.95], [0.85, 0.9, 0.88]
    found = accuracy.two_samples(a, b)
    welch = stats.ttest_ind(a, b, equal_var=False)
    assert found["p"] == welch.pvalue
    assert found["statistic"] == welch.statistic
    assert found["df"] == pytest.approx(welch.df)
    assert found["mann_whitney_p"] == stats.mannwhitneyu(a, b).pvalue
    assert found["means"] == [np.mean(a), np.mean(b)]
    assert found["deviations"] == [np.std(a, ddof=1), np.std(b, ddof=1)]


@pytest.mark.parametrize("a, b, p", [
    ([0.7] * 3, [0.7] * 3, 1.0), ([0.7] * 3, [0.8] * 3, 0.0),
    # the mean of three times 0.1 is not 0.1 in floating point
    ([0.1] * 3, [0.1] * 3, 1.0)])
def test_no_spread_at_all(a, b, p):
    found = accuracy.two_samples(a, b)
    assert found["p"] == p and found["deviations"] == [0.0, 0.0]
    assert found["statistic"] is None and found["detectable"] is None
    json.dumps({**found, "rows": 10}, allow_nan=False)
    assert "no spread" in accuracy._notes({**found, "rows": 10}, 3)[1]


@pytest.mark.parametrize("n", (2, 5, 12))
def test_what_could_have_been_shown(n):
    """Samples that are this far apart are told apart in 80% of draws."""
    from scipy import stats
    apart = accuracy.detectable([1.0, 0.4], [n, n])
    rng = np.random.default_rng(7)
    x = rng.normal(0, 1.0, (20000, n))
    z = rng.normal(apart, 0.4, (20000, n))
    p = stats.ttest_ind(x, z, axis=1, equal_var=False).pvalue
    # 4 standard errors of both estimates: 4 * sqrt(2 * 0.16 / 20000)
    assert np.mean(p < accuracy.ALPHA) == pytest.approx(accuracy.POWER,
                                                        abs=0.016)
    # it is measured in units of the spread
    assert accuracy.detectable([2.0, 0.8], [n, n]) == pytest.approx(
        2 * apart)


# -- refused ------------------------------------------------------------------

def never():
    raise AssertionError("a network was made")


@pytest.mark.parametrize("seeds", ([], [0], [1, 1], [0, -1], [0, 0.5]),
                         ids=str)
def test_seeds(seeds):
    with pytest.raises(ValueError, match="two or more different seeds"):
        compare(never, never, seeds=seeds)


def test_no_test_data():
    with pytest.raises(ValueError, match="Pass test="):
        compare(never, never, test=None)


def test_a_network_is_no_factory(backend):
    with pytest.raises(TypeError, match="a function that makes"):
        compare(never, MAKE[backend.name]())


def test_scipy_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match="pip install scipy"):
        compare(never, never)
