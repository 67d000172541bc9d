"""Where a step's time goes: what is recorded, and what is made of it."""
import json
import math

import numpy as np
import pytest

import mgpu
from helpers import assert_bit_equal, convnet, mlp
from mgpu.tools import profiling
from mgpu.tools.profiling import HOST, STAGES, Profile, Span, Step
from mgpu.utils import probes

#: of a step whose devices need not wait for each other: what is measured is
#: the stages of a step; those of all devices first
PIECES = {"split": "copy", "forward": "compute", "backward": "compute",
          "loss": "compute", "all-reduce": "reduce", "update": "update"}
EVERYWHERE = ("split", "forward", "backward")
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def batch(n=8, shape=(6,), seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n, *shape)).astype("float32"),
            rng.integers(0, 3, n))


def trained(backend, devices, net=None, **options):
    replicas = mgpu.initialize(net or mlp(backend), devices, init="xavier",
                               **options)
    return replicas, mgpu.Trainer(replicas, "sgd", {
        "learning_rate": 0.125, "momentum": 0.5})


def is_off():
    return probes.listener.get() is None and probes.open_stage.get() is None


# -- what is recorded ---------------------------------------------------------

def test_every_stage_on_every_device(backend, devices):
    replicas, trainer = trained(backend, devices)
    X, y = batch()
    with Profile(plain=False) as profile:
        for _ in range(3):
            mgpu.train_batch(X, y, replicas, LOSS, trainer)
    assert [s.number for s in profile.steps] == [0, 1, 2]
    assert all(s.staged and s.rows == 8 and s.seconds > 0
               for s in profile.steps)
    places = [str(d) for d in devices]
    for step in profile.steps:
        spans = [s for s in profile.spans if s.step == step.number]
        for place in places:
            own = {s.name: s.stage for s in spans
                   if s.device == place and s.stage != "wait"}
            assert own == {name: stage for name, stage in PIECES.items()
                           if place == places[0] or name in EVERYWHERE}
        host = {(s.stage, s.name) for s in spans if s.device == HOST}
        assert {(("copy" if name == "split" else "dispatch"), name)
                for name in PIECES} <= host
        assert {s.stage for s in spans} == set(STAGES)
        for s in spans:
            assert s.seconds > 0 and s.during == PIECES[s.name]
            assert s.device in (HOST, *places)
        for place in (HOST, *places):
            ends = [(s.begin, s.begin + s.seconds)
                    for s in sorted(spans, key=lambda s: s.begin)
                    if s.device == place]
            ends = [(step.begin, step.begin), *ends,
                    (step.begin + step.seconds,) * 2]
            for (_, end), (begin, _) in zip(ends, ends[1:]):
                # A sum of two times, read off one clock, is rounded.
                assert begin >= end - 1e-9, "spans of one place overlap"


@pytest.mark.parametrize("policy", ["per_device", "sync"])
def test_numbers_do_not_change(backend, devices, policy):
    """The last of three batches has a row for one device only."""
    values = []
    for profiled in (False, True):
        replicas, trainer = trained(
            backend, devices, convnet(backend), batch_norm=policy,
            sample=np.zeros((1, 2, 4, 4), "float32"))
        losses = []

        def train():
            for i, n in enumerate((8, 7, 1)):
                found = mgpu.train_batch(*batch(n, (2, 4, 4), i), replicas,
                                         LOSS, trainer)
                losses.extend(mgpu.to_numpy(x) for x in found
                              if x is not None)
        if profiled:
            with Profile(plain=False):
                train()
        else:
            train()
        values.append([*losses, *replicas.export_numpy(
            all_devices=len(devices) > 1).values()])
    assert len(values[0]) == len(values[1])
    for plain, with_profile in zip(*values):
        assert_bit_equal(plain, with_profile)


def test_a_device_without_rows_computes_nothing(backend):
    replicas, trainer = trained(backend, [mgpu.cpu(i) for i in range(3)])
    with Profile() as profile:
        mgpu.train_batch(*batch(1), replicas, LOSS, trainer)
    working = {(s.device, s.name) for s in profile.spans
               if s.stage in ("compute", "update")}
    assert working == {("cpu(0)", name) for name in (
        "forward", "loss", "backward", "update")}


def test_a_custom_loop(backend, devices):
    """The pieces are stages inside a step, and nothing outside of it."""
    replicas, trainer = trained(backend, devices)
    X, y = batch()
    with Profile() as profile:
        mgpu.evaluate_accuracy_gpus(replicas, [(X, y)])
        with profiling.step(devices, len(X)):
            Xs, ys = mgpu.split_batch(X, y, devices)
            with mgpu.record():
                outputs = replicas(Xs)
                with profiling.stage("compute", "score"):
                    losses = mgpu.parallel(LOSS, outputs, ys)
            mgpu.backward(losses)
            trainer.step(8)
        mgpu.split_batch(X, y, devices)
    step, = profile.steps
    assert step.rows == 8 and {s.step for s in profile.spans} == {0}
    assert {s.name for s in profile.spans} == {
        "split", "forward", "score", "backward", "all-reduce", "update"}


def test_one_at_a_time(backend):
    replicas, trainer = trained(backend, [mgpu.cpu(0)])
    with Profile() as outer:
        with pytest.raises(RuntimeError, match="one Profile can be on at a "
                           "time"):
            with Profile():
                pass
        mgpu.train_batch(*batch(), replicas, LOSS, trainer)
    assert len(outer.steps) == 1 and is_off()
    with outer:                         # continues counting
        mgpu.train_batch(*batch(), replicas, LOSS, trainer)
    assert [s.number for s in outer.steps] == [0, 1]
    assert outer.steps[1].begin > outer.steps[0].begin


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_leaves_nothing_on(backend, devices, count):
    """Neither in a step that is not measured by stage nor in one that is:
    number 1 and number 2."""
    replicas, trainer = trained(backend, devices)

    def broken(output, label):
        raise ZeroDivisionError

    profile = Profile()
    with pytest.raises(ZeroDivisionError), profile:
        with pytest.raises(ValueError):     # in the first stage of all
            mgpu.train_batch([], [], replicas, LOSS, trainer)
        for _ in range(count):
            mgpu.train_batch(*batch(), replicas, LOSS, trainer)
        mgpu.train_batch(*batch(), replicas, broken, trainer)
    assert is_off()
    assert [s.number for s in profile.steps] == list(range(count))
    assert {s.step for s in profile.spans} == {0}
    mgpu.train_batch(*batch(), replicas, LOSS, trainer)
    assert len(profile.steps) == count
    with profile:                       # and it can be used again
        mgpu.train_batch(*batch(), replicas, LOSS, trainer)
    assert len(profile.steps) == count + 1


def test_off_is_off(backend):
    assert profiling.stage("reduce", "x") is profiling.step([mgpu.cpu(0)]) \
        is profiling.mark(mgpu.cpu(0))
    with Profile() as profile:
        with profiling.stage("reduce", "outside of a step"):
            mgpu.parallel(len, [[1], [2]])
        assert profile.spans == [] and str(profile) == "no step was measured"
        with pytest.raises(ValueError, match="needs a measured step"):
            profile.verdict()
        with pytest.raises(ValueError, match="unknown stage; received 'x'"):
            profiling.stage("x", "y")
    assert profile.table() == profile.parts() == []
    assert profile.cost() is None


# -- what is made of it -------------------------------------------------------

def made(*steps, devices=1, rows=8):
    """A Profile made from numbers. Each step: milliseconds of dispatch, copy,
    compute, reduce, update, other; the host waits for the last four but
    other, all devices compute and update as long."""
    profile, begin = Profile(), 0.0
    for number, (parts, n, staged) in enumerate(
            (s if isinstance(s[0], tuple) else (s, rows, True))
            for s in steps):
        dispatch, copy, compute, reduce, update, other = (
            x / 1000 for x in parts)
        at = begin
        for stage, name, seconds in (
                ("copy", "split", copy), ("compute", "forward", compute),
                ("reduce", "all-reduce", reduce), ("update", "update",
                                                   update)):
            if not staged:
                continue
            if stage == "compute":
                profile.spans.append(Span(number, "dispatch", name, stage,
                                          HOST, at, dispatch))
                at += dispatch
            profile.spans.append(Span(
                number, "copy" if stage == "copy" else "wait", name, stage,
                HOST, at, seconds))
            profile.spans += [Span(number, stage, name, stage, f"cpu({i})",
                                   at, seconds) for i in range(devices)]
            at += seconds
        total = sum(x / 1000 for x in parts)
        profile.steps.append(Step(number, n, begin, total, staged))
        begin += total
    return profile


def test_table_and_parts():
    profile = made((1, 2, 4, 0, 2, 1), (3, 2, 6, 2, 2, 1), devices=2)
    host, first, second = profile.table()
    assert (host["device"], first["device"], second["device"]) == (
        HOST, "cpu(0)", "cpu(1)")
    # Milliseconds: 10 and 16, so 13 a step; waits 6 and 10.
    expected = {"dispatch": 2, "copy": 2, "compute": 0, "reduce": 0,
                "update": 0, "wait": 8, "other": 1}
    for name, ms in expected.items():
        assert math.isclose(host[f"{name}_ms"], ms, abs_tol=1e-9)
        assert math.isclose(host[f"{name}_share"], ms / 13, abs_tol=1e-9)
    assert math.isclose(first["compute_ms"], 5)
    assert math.isclose(first["step_ms"], 13)
    assert {**first, "device": 0} == {**second, "device": 0}
    one, two = profile.parts()
    assert (one["step"], one["rows"]) == (0, 8)
    for name, a, b in (("dispatch", 1, 3), ("copy", 2, 2), ("compute", 4, 6),
                       ("reduce", 0, 2), ("update", 2, 2), ("other", 1, 1),
                       ("seconds", 10, 16)):
        assert math.isclose(one[name], a / 1000, abs_tol=1e-12)
        assert math.isclose(two[name], b / 1000, abs_tol=1e-12)
    lines = str(profile).splitlines()
    assert lines[0].split() == ["ms", "per", "step", *STAGES, "other"]
    assert lines[1].split()[:3] == [HOST, "2.00", "15%"]
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[4] == "2 steps of 13.00 ms, batch 8"
    assert repr(profile) == "Profile of 2 steps"
    assert "<tr><td>host</td><td>2.00 (15%)</td>" in profile._repr_html_()


def test_cost():
    profile = made(((2, 2, 2, 2, 2, 2), 8, True), ((1, 1, 2, 2, 2, 0), 8,
                                                   False),
                   ((1, 1, 1, 1, 1, 1), 4, True), ((9, 9, 9, 9, 9, 9), 4,
                                                   False))
    assert math.isclose(profile.cost(), 1.5)
    assert made((1, 1, 1, 1, 1, 1)).cost() is None


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.delenv("MGPU_THREADS_PER_DEVICE", raising=False)

    def are(count):
        monkeypatch.setattr(mgpu.utils.environment, "cpu_cores", lambda: count)
    return are


@pytest.mark.parametrize("parts, text", [
    ((6, 1, 2, 0, 1, 0), "dispatch-bound: issuing work takes the host 60% of "
     "a step of 10.0 ms on 1 device, batch 8. More devices will not help, "
     "because each adds work to issue; larger batches or a compiled "
     "(hybridized) network will."),
    ((1, 5, 2, 1, 1, 0), "copy-bound: copying the batch to the devices takes "
     "50% of a step of 10.0 ms on 1 device, batch 8. More devices will not "
     "help; a smaller dtype, or data that are on the device, will."),
    # 10 / (10 + 1 - 8 / 2) = 1.43
    ((1, 1, 8, 0, 0, 0), "compute-bound: the host waits for forward and "
     "backward for 80% of a step of 10.0 ms on 1 device, batch 8. 2 devices "
     "can give up to 1.4x."),
    # 10 / (10 + 4 - 5 / 2) = 0.87
    ((4, 1, 5, 0, 0, 0), "compute-bound: the host waits for forward and "
     "backward for 50% of a step of 10.0 ms on 1 device, batch 8. Even so 2 "
     "devices would gain less than 5%."),
    ((2, 1, 4, 0, 3, 0), "No part takes half of a step: the host waits for "
     "forward and backward for 40%, the optimizer's update takes 30% of a "
     "step of 10.0 ms on 1 device, batch 8.")])
def test_verdict(cores, parts, text):
    cores(8)
    assert made(parts).verdict() == text


def test_verdict_of_several_batches(cores):
    """6 ms and 0.5 ms a row: equal at 12 rows."""
    cores(1)
    steps = [((6, 0, n / 2, 0, 0, 0), n, True) for n in (8, 16, 32)]
    assert made(*steps).verdict().endswith(
        "Dispatch-bound below batch 12 (batches of 8, 16, 32: 6.00 ms + "
        "500.0 us per row): there more devices will not help.")
    # Steps without stages count, where there are some: 2 ms, so 4 rows.
    plain = [((2, 0, n / 2, 0, 0, 0), n, False) for n in (8, 16, 32)]
    assert "below batch 4 " in made(*steps, *plain).verdict()
    assert "below batch 12 " in made(*steps, *plain[:2]).verdict()
    same = [((6, 0, 1, 0, 0, 0), n, True) for n in (8, 16)]
    assert "Dispatch-bound at all of these batches" in made(*same).verdict()
    none = [((0, 0, n, 0, 0, 0), n, True) for n in (8, 16)]
    assert "is proportional to its rows" in made(*none).verdict()


# -- the trace ----------------------------------------------------------------

def test_chrome_trace(backend, devices, tmp_path):
    replicas, trainer = trained(backend, devices)
    with Profile() as profile:
        mgpu.train_batch(*batch(), replicas, LOSS, trainer)
    file = tmp_path / "trace.json"
    profile.chrome_trace(file)
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events
             if e["ph"] == "M" and e["name"] == "thread_name"}
    assert sorted(names.values()) == sorted([HOST, *map(str, devices)])
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(profile.spans) > 0
    assert {e["ph"] for e in events} == {"X", "M"}
    for event, span in zip(spans, profile.spans):
        assert names[event["tid"]] == span.device
        assert event["cat"] == span.stage and event["args"] == {"step": 0}
        assert event["ts"] == 1e6 * span.begin >= 0
        assert event["dur"] == 1e6 * span.seconds > 0
        assert event["name"] == span.name or event["name"] == (
            f"{span.stage}: {span.name}")
    with pytest.raises(FileNotFoundError, match="folder of the trace"):
        profile.chrome_trace(tmp_path / "none" / "trace.json")
