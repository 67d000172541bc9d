"""Where the time of a train step goes: spans by stage and by device.

Running code tells a `Profile` what it does through `mgpu.utils.probes`.
Nothing is measured until a Profile is on (docs/guide/profiling.md).
"""
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends import get_backend
from mgpu.backends.device import Device, as_devices
from mgpu.data.nested import map_leaves, rows_of
from mgpu.tools.profile_advice import (HOST, PARTS, STAGES, Span, Step, advice,
                                       cpu_capacity, fit)
from mgpu.utils import files, notebook, probes
from mgpu.utils.arguments import is_integer, one_of
from mgpu.utils.probes import (at_once, gradients, mark, stage, staged, step,
                               weights)

__all__ = ["HOST", "PARTS", "STAGES", "Profile", "Span", "Step", "at_once",
           "cpu_capacity", "fit", "gradients", "mark", "on", "stage",
           "staged", "step", "unwatched", "watched", "weights",
           "write_chrome_trace", "write_trace"]

watched, unwatched = probes.timed, probes.only_queueing     # older names


def on() -> bool:
    """Whether a Profile measures what is done here."""
    return probes.listener.get() is not None


class _Mark(NamedTuple):
    """A call that worked for one device, or for all (None)."""

    device: int | None
    begin: float
    end: float
    thread: int
    done: bool          # the work, when the call returned: `probes.at_once`


_Interval = tuple[float, float]
_NOTHING: AbstractContextManager[None] = nullcontext()


# -- one stage ----------------------------------------------------------------

class _Stage:
    """An open stage: collects marks, waits at its end, makes spans."""

    def __init__(self, profile: "Profile", kind: str, name: str,
                 devices: Sequence[Device],
                 results: Callable[[], Sequence[Any]] | None,
                 numbers: Sequence[int] | None) -> None:
        self.profile, self.kind, self.name = profile, kind, name
        self.devices, self.results = list(devices), results
        self.numbers = list(range(len(devices)) if numbers is None
                            else numbers)
        self.marks: list[_Mark] = []    # threads append to it

    def __enter__(self) -> None:
        self.profile.current = self
        self._token = probes.open_stage.set(self)
        self._thread = threading.get_ident()
        self._begin = time.perf_counter()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        returned = time.perf_counter()
        # Before the wait, which uses the backend's threads too.
        probes.open_stage.reset(self._token)
        self.profile.current = None
        if kind is None:
            arrived, end = self._wait()
            self._add_spans(returned, arrived, end)

    @contextlib.contextmanager
    def mark(self, device: Device) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if device in self.devices:
            self._mark(self.devices.index(device), begin)

    def _mark(self, number: int | None, begin: float, done: bool = False
              ) -> None:
        self.marks.append(_Mark(number, begin, time.perf_counter(),
                                threading.get_ident(), done))

    def timed(self, thunks: Sequence[Callable[[], Any]]
              ) -> Sequence[Callable[[], Any]]:
        if len(thunks) == len(self.devices):
            numbers: Sequence[int | None] = range(len(thunks))
        elif len(thunks) == len(self.numbers):
            numbers = self.numbers
        elif len(thunks) == 1:
            numbers = [None]        # a joint backward pass
        else:
            return thunks           # parts of no device in particular
        return [partial(self._run, n, thunk)
                for n, thunk in zip(numbers, thunks)]

    def _run(self, number: int | None, thunk: Callable[[], Any]) -> Any:
        # A call inside a call belongs to it.
        token = probes.open_stage.set(None)
        probes.begin_thunk()
        begin = time.perf_counter()
        try:
            return thunk()
        finally:
            self._mark(number, begin, probes.was_at_once())
            probes.open_stage.reset(token)

    def _wait(self) -> tuple[list[float], float]:
        """When the results of each device were there, and when all were."""
        backend, arrived = get_backend(), []
        if self.results is not None:
            arrived = backend.parallel(
                [partial(_wait_for, x) for x in self.results()],
                rendezvous=True)    # at the same time, on every backend
        backend.synchronize(self.devices)
        end = time.perf_counter()
        return arrived or [end] * len(self.devices), end

    def _is_issued(self, m: _Mark, device: Device) -> bool:
        """Whether the call only issued work. What a CPU device's own thread
        did was done when it returned."""
        return not m.done and (m.thread == self._thread
                               or device.kind == "gpu")

    def _add_spans(self, returned: float, arrived: list[float],
                   end: float) -> None:
        idle: list[_Interval] = [(returned, end)]       # of the host
        for i, device in enumerate(self.devices):
            marks = [m for m in self.marks if m.device in (i, None)]
            busy = [(m.begin, m.end) for m in marks]
            if i not in self.numbers:
                busy = []
            elif not marks:
                busy = [(self._begin, arrived[i])]
            elif any(self._is_issued(m, device) for m in marks):
                begin, last = max(busy)
                busy.append((begin, max(last, arrived[i])))
            idle += [(m.begin, m.end) for m in marks
                     if not self._is_issued(m, device)]
            self._add(str(device), self.kind, _union(busy))
            self._add(str(device), "wait",
                      _gaps(_union(busy), self._begin, end))
        idle = _union(idle)
        self._add(HOST, "wait", idle)
        self._add(HOST, "copy" if self.kind == "copy" else "dispatch",
                  _gaps(idle, self._begin, end))

    def _add(self, device: str, kind: str, intervals: list[_Interval]) -> None:
        profile = self.profile
        profile.spans += [
            Span(len(profile.steps), kind, self.name, self.kind, device,
                 begin - profile.origin, end - begin)
            for begin, end in intervals]


def _wait_for(arrays: Any) -> float:
    backend = get_backend()

    def wait(x: Any) -> None:
        if backend.is_native(x):
            backend.wait_for(x)
    map_leaves(wait, arrays)
    return time.perf_counter()


def _union(intervals: list[_Interval]) -> list[_Interval]:
    """The union of intervals, as ordered intervals without overlap."""
    found: list[_Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _gaps(intervals: list[_Interval], begin: float, end: float
          ) -> list[_Interval]:
    """The complement of ordered intervals in `begin` to `end`."""
    edges = [begin, *(t for pair in intervals for t in pair), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2]) if b > a]


# -- the profile --------------------------------------------------------------

class Profile:
    """Measure the training steps inside a ``with`` block, stage by stage.

    Parameters
    ----------
    devices : one device, or a sequence of devices, optional
        The devices in the table. None: all that worked.
    plain : bool
        True: every second step (numbers 1, 3, ...) runs without measurements
        of stages, and only its total time is taken, so that `cost` shows the
        overhead. False: every step is measured.

    Attributes
    ----------
    spans : list of Span
    steps : list of Step

    Raises
    ------
    RuntimeError
        Another Profile is active (when the block is entered).
    ValueError, TypeError
        `devices` are not devices; see `mgpu.backends.device.as_devices`.

    Notes
    -----
    An asynchronous backend (MXNet, CUDA) returns before its work is done, so
    a span requires a wait at its end. While a Profile is active, each
    stage ends when its devices are done. So stages do not overlap, and a step
    takes longer than without a Profile. Its results are the same, bit for
    bit.

    In each stage, a device's span begins with the first call that works for
    it and ends when it is done. Before and after that it waits, for the host
    or for the other devices. The host dispatches while it is inside calls
    that issue work ("copy" if that work is copies). It waits at the end of a
    stage, and while CPU devices compute in threads of their own. The time
    that such a thread spends in Python counts as compute.

    Steps are those of `train_batch`, also inside `train`, and `step` blocks.
    The same Profile may be entered again. It measures only the thread that
    entered it.

    Examples
    --------
    >>> replicas = mgpu.initialize(mgpu.models.lenet(),
    ...                            mgpu.list_devices(2),
    ...                            init="uniform")
    >>> trainer = mgpu.Trainer(replicas, "sgd")
    >>> loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    >>> batches, _ = mgpu.datasets.digits(64, limit=256)
    >>> with mgpu.Profile() as profile:
    ...     for X, y in batches:
    ...         losses = mgpu.train_batch(X, y, replicas, loss, trainer)
    >>> print(profile)
    >>> print(profile.verdict())
    """

    def __init__(self, devices: Any = None, *, plain: bool = True) -> None:
        self.devices = None if devices is None else as_devices(devices)
        self.plain = plain
        self.spans: list[Span] = []
        self.steps: list[Step] = []
        self.origin = 0.0
        self._in_step, self._staged = False, False
        self.current: _Stage | None = None

    def __enter__(self) -> "Profile":
        if probes.listener.get() is not None:
            raise RuntimeError(
                "one Profile can be on at a time; received another one "
                "inside its block. Leave the outer one first, or use it for "
                "all steps.")
        if not self.origin:
            self.origin = time.perf_counter()
        self._thread = threading.get_ident()
        probes.listener.set(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        probes.listener.set(None)

    # -- recording ----------------------------------------------------------

    def begin_step(self, devices: Sequence[Device], batch: Any
                   ) -> AbstractContextManager[None]:
        """What `mgpu.utils.probes.step` calls; users call that."""
        if self._in_step or threading.get_ident() != self._thread:
            return _NOTHING
        return self._step(list(devices), batch)

    @contextlib.contextmanager
    def _step(self, devices: list[Device], batch: Any) -> Iterator[None]:
        backend, number, first = get_backend(), len(self.steps), \
            len(self.spans)
        rows = int(batch) if is_integer(batch, 0) else rows_of(batch)
        self._in_step, self._devices = True, devices
        self._staged = not self.plain or number % 2 == 0
        try:
            backend.synchronize(devices)
            begin = time.perf_counter()
            yield
            backend.synchronize(devices)
            self.steps.append(Step(
                number, rows, begin - self.origin,
                time.perf_counter() - begin, self._staged))
        except BaseException:
            del self.spans[first:]      # half a step would spoil the means
            raise
        finally:
            self._in_step = self._staged = False

    def begin_stage(self, kind: str, name: str,
                    devices: Sequence[Device] | None,
                    results: Callable[[], Sequence[Any]] | None,
                    numbers: Sequence[int] | None
                    ) -> AbstractContextManager[None]:
        """What `mgpu.utils.probes.stage` calls; users call that."""
        one_of("stage", kind, PARTS)
        if not self._staged or self.current is not None \
                or threading.get_ident() != self._thread:
            return _NOTHING
        return _Stage(self, kind, name,
                      self._devices if devices is None else devices,
                      results, numbers)

    # -- what was measured --------------------------------------------------

    def _places(self) -> list[str]:
        found = dict.fromkeys(s.device for s in self.spans)
        found.pop(HOST, None)
        return [HOST, *(found if self.devices is None
                        else map(str, self.devices))]

    def measured(self) -> list[Step]:
        """The steps that were measured stage by stage; where batches differ,
        those with most rows."""
        found = [s for s in self.steps if s.staged]
        most = max((s.rows or 0 for s in found), default=0)
        return [s for s in found if (s.rows or 0) == most]

    def table(self) -> list[dict[str, Any]]:
        """Means over the steps that were measured by stage; where batches
        differ, over those with most rows.

        Returns
        -------
        list of dict
            First the host, then a row per device: ``"device"``; for each
            of `STAGES`, and for ``"other"`` (outside of all stages),
            ``"..._ms"``, milliseconds per step, and ``"..._share"``, the
            share of the step, 0 to 1; ``"step_ms"``, milliseconds of the
            whole step. An empty list where no step was measured.
        """
        measured = {s.number: s.seconds for s in self.measured()}
        whole = list(measured.values())
        if not whole:
            return []
        rows = []
        for place in self._places():
            seconds = {name: sum(
                s.seconds for s in self.spans if s.step in measured
                and (s.device, s.stage) == (place, name)) for name in STAGES}
            seconds["other"] = sum(whole) - sum(seconds.values())
            row: dict[str, Any] = {"device": place}
            for name, total in seconds.items():
                row[f"{name}_ms"] = 1000 * total / len(whole)
                row[f"{name}_share"] = total / sum(whole)
            row["step_ms"] = 1000 * sum(whole) / len(whole)
            rows.append(row)
        return rows

    def parts(self) -> list[dict[str, Any]]:
        """Each measured step as the host saw it: what it waited for, and
        what it did itself. The parts of a step add up to it.

        Returns
        -------
        list of dict
            ``"step"``, ``"rows"``, ``"seconds"``, and in seconds:
            ``"dispatch"`` (issuing work, for all devices one after the
            other), ``"copy"`` (host to devices), ``"compute"``,
            ``"reduce"``, ``"update"`` (waiting for them), ``"other"``.
        """
        found: dict[int, dict[str, Any]] = {s.number: {
            "step": s.number, "rows": s.rows, "seconds": s.seconds,
            **dict.fromkeys(("dispatch", *PARTS), 0.0),
            "other": s.seconds} for s in self.steps if s.staged}
        for s in self.spans:
            if s.device == HOST and s.step in found:
                part = s.during if s.stage == "wait" else s.stage
                found[s.step][part] += s.seconds
                found[s.step]["other"] -= s.seconds
        return list(found.values())

    def cost(self) -> float | None:
        """How many times as long a step takes with its stages measured:
        median by median, of the steps with most rows. None without steps of
        both kinds."""
        most = max((s.rows or 0 for s in self.steps), default=0)
        with_, without = ([s.seconds for s in self.steps
                           if s.staged is kind and (s.rows or 0) == most]
                          for kind in (True, False))
        if not with_ or not without:
            return None
        return float(np.median(with_) / np.median(without))

    def __str__(self) -> str:
        rows = self.table()
        if not rows:
            return "no step was measured"
        cells = [["ms per step", *STAGES, "other"]]
        for row in rows:
            cells.append([row["device"], *(
                f"{row[name + '_ms']:.2f} {row[name + '_share']:4.0%}"
                for name in (*STAGES, "other"))])
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  ".join([line[0].ljust(widths[0]), *(
            cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))])
            for line in cells]
        count, n = len(self.measured()), self.measured()[0].rows
        last = (f"{count} step{'s' * (count != 1)} of "
                f"{rows[0]['step_ms']:.2f} ms" + (f", batch {n}" if n else ""))
        cost = self.cost()
        if cost is not None:
            last += f"; measuring makes them {cost:.2f} times as long"
        return "\n".join([*lines, last])

    def _repr_html_(self) -> str:
        names = (*STAGES, "other")
        return notebook.table(
            str(self).splitlines()[-1], ("ms per step", *names), [
                (row["device"], *(
                    f"{row[n + '_ms']:.2f} ({row[n + '_share']:.0%})"
                    for n in names)) for row in self.table()])

    def __repr__(self) -> str:
        count = len(self.steps)
        return f"Profile of {count} step{'s' * (count != 1)}"

    def chrome_trace(self, file: Any) -> None:
        """Write the spans for ``chrome://tracing`` or ui.perfetto.dev.

        There is a row (thread) for the host and one per device; times are in
        microseconds. Format: "Trace Event Format" (Google), complete events
        ``"X"`` and metadata ``"M"``. The file is written whole or not at
        all.

        Raises
        ------
        FileNotFoundError
            The folder of `file` does not exist.
        """
        write_chrome_trace(file, {"mgpu": self})

    def verdict(self) -> str:
        """What bounds a step, in words, and what would help.

        The rules, on the means of `parts` over the steps with most rows:

        - A step is *X-bound* where X, one of dispatch, copy, compute,
          reduce, update and other, takes half of it or more.
        - A compute-bound step on k devices would at best take ``step +
          dispatch - compute * (1 - 1/f)`` on 2 k devices, because each
          each device gets its own work and only compute is divided. `f` is
          2; on CPUs it is ``min(2 k, c) / min(k, c)``, where the cores run
          `c` devices in parallel (`MGPU_THREADS_PER_DEVICE` cores each). The
          verdict states the gain if it is 5 % or more.
        - For steps of several batch sizes, the verdict names the line
          ``fixed + per_row * rows`` (`fit`) through their median seconds. It
          uses the steps that were not measured by stage, where there are
          some of every size. Below ``fixed / per_row`` rows, the part that
          more devices do not divide is the larger one.
        - Devices are *uneven* where one computes 1.25 times as long as
          another one or longer.

        Raises
        ------
        ValueError
            No step was measured.
        """
        return advice(self.measured(), self.parts(), self.steps, self.spans,
                      self._places()[1:])


# -- Chrome's trace format ----------------------------------------------------

def write_chrome_trace(file: Any, profiles: dict[str, Profile]) -> None:
    """Profiles in one trace file, a process for each name; see
    `Profile.chrome_trace`."""
    files.check_folder(os.fspath(file), "the trace")
    events: list[dict[str, Any]] = []
    for pid, (name, profile) in enumerate(profiles.items()):
        events.append({"ph": "M", "pid": pid, "tid": 0,
                       "name": "process_name", "args": {"name": name}})
        threads = {place: tid for tid, place in enumerate(dict.fromkeys(
            [HOST, *(s.device for s in profile.spans)]))}
        for place, tid in threads.items():
            about = {"thread_name": {"name": place},
                     "thread_sort_index": {"sort_index": tid}}
            events += [{"ph": "M", "pid": pid, "tid": tid, "name": name,
                        "args": args} for name, args in about.items()]
        for s in profile.spans:
            own = s.stage == s.during
            events.append({
                "ph": "X", "pid": pid, "tid": threads[s.device],
                "name": s.name if own else f"{s.stage}: {s.name}",
                "cat": s.stage, "ts": 1e6 * s.begin, "dur": 1e6 * s.seconds,
                "args": {"step": s.step}})
    files.write_json(file, {"traceEvents": events, "displayTimeUnit": "ms"})


write_trace = write_chrome_trace        # its older name
