"""`mgpu.parity.invariance`: one step on several numbers of devices."""
import itertools
import json

import numpy as np
import pytest

import mgpu
from mgpu import parity
from mgpu.parity import live
from nets import conv_gluon, conv_torch

#: float64, a handful of small layers: rounding of some hundred terms
EXACT = 1e-12
MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}


def network(backend, batch_norm=True):
    make = conv_gluon if backend.name == "mxnet" else conv_torch
    return make(batch_norm=batch_norm)


def batches(*rows):
    rng = np.random.default_rng(0)
    return [(rng.random((n, 1, 6, 6)), rng.integers(0, 3, n).astype("int32"))
            for n in rows]


def by_path(report):
    return {x.path.split(".")[0]: x for x in report.layers
            if x.kind != "flatten"}


# -- exact --------------------------------------------------------------------

def test_synchronized_training_is_that_of_one_device(backend):
    """Uneven rows; fewer rows than devices; masks follow the rows."""
    report = parity.invariance(
        lambda: network(backend), batches=batches(11, 3),
        devices=(1, 3, 8), batch_norm="sync",
        optimizer_params=MOMENTUM)
    assert report.exact and report.verdict == "exact" and not report.synced
    assert list(report.results) == [3, 8]
    layers = by_path(report)
    assert list(layers) == ["0", "1", "2", "3", "5", "(output and loss)"]
    for layer in layers.values():
        assert set(layer.status.values()) == {"exact"}
        assert max(layer.worst.values()) < EXACT and not layer.origin
    for result in report.results.values():
        assert any("dropout: masks" in note for note in result.notes)
        assert {g.stage for g in result.gaps} == {
            "output", "loss", "gradient", "weight", "memory", "statistic",
            "prediction"}


def test_a_schedule_is_that_of_each_run(backend):
    """One object would count the updates of all runs together."""
    class Schedule:         # Gluon's own schedules do not go back either
        last = 0

        def __call__(self, num_update):
            self.last = max(self.last, num_update)
            return 0.5 ** self.last
    schedule = Schedule()
    report = parity.invariance(
        parity.Side(lambda: network(backend), lr_scheduler=schedule),
        batches=batches(4), steps=3, devices=(1, 2, 3), batch_norm="sync")
    assert report.exact, str(report)
    one, two = report.results.values()      # both beside one device
    assert one.losses["a"] == two.losses["a"] and schedule.last == 0


# -- not exact ----------------------------------------------------------------

@pytest.mark.parametrize("policy", ("per_device", "average"))
def test_batch_statistics(backend, policy):
    report = parity.invariance(
        lambda: network(backend), batches=batches(8), devices=(1, 2, 3),
        batch_norm=policy)
    assert report.verdict == "batch statistics" and not report.exact
    layers = by_path(report)
    for k in (2, 3):
        assert all(x.status[k] == "batch statistics"
                   for x in layers.values())
        assert report.synced[k].same and not report.results[k].same
    # that of the batch norm arises there, the others are consequences
    assert {p: x.origin for p, x in layers.items() if x.origin} \
        == {"1": [2, 3]}
    assert layers["0"].worst[2] > 1e-3      # through the gradient
    text = str(report)
    assert "with batch_norm='sync' it is exact" in text
    assert "1 batch_norm" in text and " *" in text


@pytest.mark.parametrize("policy", ("per_device", "sync"))
def test_a_replica_that_drops_rows(backend, monkeypatch, policy):
    def split_batch(X, y, devices):
        Xs, ys = mgpu.split_batch(X, y, devices)
        if len(devices) > 2:
            Xs[1], ys[1] = Xs[1][:-1], ys[1][:-1]
        return Xs, ys
    monkeypatch.setattr(live, "split_batch", split_batch)
    report = parity.invariance(
        lambda: network(backend), batches=batches(8), devices=(1, 2, 3),
        batch_norm=policy)
    assert report.verdict == "wrong"
    for layer in report.layers:
        assert layer.status[3] == "wrong"
        assert layer.status[2] == ("exact" if policy == "sync"
                                   else "batch statistics")
    assert "3 devices: step 1" in str(report)


# -- the report ---------------------------------------------------------------

def test_the_report_is_text_and_json(backend):
    seen = []
    report = parity.invariance(
        lambda: network(backend), batches=batches(4, 4), devices=(1, 2, 3),
        dtype="float32", progress=lambda done, total: seen.append(
            (done, total)))
    assert seen == [(i, 4) for i in range(1, 5)]
    assert report.verdict == "batch statistics"
    data = json.loads(json.dumps(report.to_dict()))
    assert data["verdict"] == report.verdict and data["devices"] == [1, 2, 3]
    assert [x["path"] for x in data["layers"]] == [x.path for x
                                                   in report.layers]
    assert data["layers"][0]["status"] == {"2": "batch statistics",
                                           "3": "batch statistics"}
    assert data["results"]["3"]["verdict"] == "different"
    assert data["synced"]["3"]["verdict"] == "same"
    lines = str(report).splitlines()
    assert "2 devices / 1" in lines[1] and "3 devices / 1" in lines[1]
    assert len(lines) >= 2 + len(report.layers)


def test_batches_may_be_an_iterator(backend):
    report = parity.invariance(
        lambda: network(backend, False), devices=(1, 2, 3), steps=2,
        batches=(batch for batch in itertools.cycle(batches(4))))
    assert report.exact and report.settings["steps"] == 2


# -- refused ------------------------------------------------------------------

def never():
    raise AssertionError("a network was made")


def test_numbers_of_devices():
    for numbers in ((1,), (), (1, 1), (0, 1), (1, True), (1, 2.0)):
        with pytest.raises(ValueError, match="different numbers of devices"):
            parity.invariance(never, batches=batches(2), devices=numbers)


def test_a_network_is_no_factory(backend):
    with pytest.raises(TypeError, match="a function that makes"):
        parity.invariance(network(backend), batches=batches(2))


def test_options_are_those_of_compare():
    for option in ("dtype", "dropout"):
        with pytest.raises(ValueError, match=f"unknown {option}"):
            parity.invariance(never, batches=batches(2), **{option: "some"})
    with pytest.raises(ValueError, match="received none"):
        parity.invariance(never, batches=[])
