"""Timers wait for their devices, and add up right."""
from types import SimpleNamespace

import numpy as np
import pytest

from mgpu.backends.device import cpu
from mgpu.tools import timing
from mgpu.tools.timing import (Accumulator, Benchmark, Timer, number,
                               synchronize)


@pytest.fixture
def log(monkeypatch):
    """What happens, in order: ("wait", devices) and "read" of a clock that
    shows 0, 0.5, 1.5, 3, 5, ...: laps of known length, exact in binary."""
    events, now = [], [0.0, 0.5, 1.5, 3.0, 5.0, 7.5]

    def read():
        events.append("read")
        return now[events.count("read") - 1]

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=read))
    monkeypatch.setattr(timing, "synchronize",
                        lambda devices: events.append(("wait", devices)))
    return events


# -- synchronize ------------------------------------------------------------

def test_work_is_done_after_synchronize(backend, devices):
    x = np.arange(64.0 * 64).reshape(64, 64) / 4096
    products = [backend.ops.dot(a, a)
                for a in (backend.put(x, d) for d in devices)]
    assert synchronize(devices) is None
    assert synchronize() is None
    for y in products:
        # Sums of 64 products of float64 numbers below 1, in any order.
        np.testing.assert_allclose(backend.to_numpy(y), x @ x, rtol=1e-13)


# -- Timer ------------------------------------------------------------------

def test_timer_waits_before_it_reads_the_clock(devices, log):
    timer = Timer([str(d) for d in devices])
    timer.start()
    timer.stop()
    assert log == [("wait", devices), "read"] * 3


def test_timer_laps(log):
    timer = Timer()                         # at 0
    assert timer.stop() == 0.5              # at 0.5
    timer.start()                           # at 1.5
    assert timer.stop() == 1.5              # at 3
    assert timer.stop() == 3.5              # at 5, from the same start
    assert timer.times == [0.5, 1.5, 3.5]
    assert timer.sum() == 5.5
    assert timer.avg() == 5.5 / 3
    assert timer.cumsum() == [0.5, 2.0, 5.5]


def test_timer_before_the_first_lap():
    timer = Timer()
    assert timer.times == [] and timer.sum() == 0.0 and timer.cumsum() == []
    with pytest.raises(ValueError, match="needs a lap; received none"):
        timer.avg()


# -- Benchmark --------------------------------------------------------------

def test_benchmark_waits_on_entry_and_exit(devices, log, capsys):
    with Benchmark(devices=devices):
        log.append("body")
    assert log == [("wait", devices), "read", "body",
                   ("wait", devices), "read"]
    assert capsys.readouterr().out == "Done: 0.5000 sec\n"


def test_benchmark_lets_an_error_through_and_prints_nothing(log, capsys):
    benchmark = Benchmark("work", cpu(0))
    with benchmark:
        pass
    assert capsys.readouterr().out == "work: 0.5000 sec\n"
    with pytest.raises(KeyError, match="mine"):
        with benchmark:
            raise KeyError("mine")
    assert capsys.readouterr().out == ""
    assert benchmark.seconds is None        # not that of the block before


# -- Accumulator ------------------------------------------------------------

def test_accumulator_sums():
    metric = Accumulator(3)
    assert len(metric) == 3 and list(metric) == [0.0, 0.0, 0.0]
    metric.add(1, 0.25, np.float32(2))
    metric.add(2, True, np.array(0.5))
    assert list(metric) == [3.0, 1.25, 2.5]
    assert metric[0] == 3.0 and metric[-1] == 2.5
    assert repr(metric) == "Accumulator(3.0, 1.25, 2.5)"
    metric.reset()
    assert list(metric) == [0.0, 0.0, 0.0]


def test_accumulator_takes_arrays_of_one_element(backend):
    metric = Accumulator(1)
    metric.add(backend.put(np.array([2.5]), cpu(1)))
    assert metric[0] == 2.5 and type(metric[0]) is float


@pytest.mark.parametrize("values, error", [
    ((), ValueError), ((1,), ValueError), ((1, 2, 3), ValueError),
    ((1, "two"), ValueError), ((1, None), TypeError)])
def test_accumulator_refuses_before_it_adds(values, error):
    metric = Accumulator(2)
    metric.add(1, 2)
    with pytest.raises(error):
        metric.add(*values)
    assert list(metric) == [1.0, 2.0]


def test_accumulator_needs_a_count():
    for n in (0, -1, 1.5, "2", True, None):
        with pytest.raises(ValueError, match="integer of 1 or more"):
            Accumulator(n)


# -- number -----------------------------------------------------------------

def test_number_reads_numbers_and_arrays(backend):
    x = backend.put(np.array([[0.5]]), cpu(1))
    other_family = [x.as_np_ndarray()] if backend.name == "mxnet" else []
    for one in (0.5, "0.5", np.float32(0.5), np.array(0.5),
                np.array([[0.5]]), x, backend.put(np.array(0.5), cpu(0)),
                *other_family):
        assert number(one) == 0.5 and type(number(one)) is float
    assert number(7) == 7.0


def test_number_refuses_the_rest(backend):
    for many in (np.ones(2), np.ones((1, 0)),
                 backend.put(np.ones(2), cpu(0))):
        with pytest.raises(ValueError, match="expected one number"):
            number(many)
    for other in (None, [1.0], 1j):
        with pytest.raises(TypeError):
            number(other)
