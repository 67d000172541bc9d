"""Where the time of a train step goes: spans by stage and by device.

Nothing is measured until a `Profile` is on. Until then each stage of a step
costs one look at a context variable, and so does each call of
`mgpu.parallel` (`docs/profiling.md` says how long that takes).
"""
import contextlib
import os
import threading
import time
from contextvars import ContextVar
from functools import partial, wraps
from math import ceil
from typing import (Any, Callable, ContextManager, Dict, Iterator, List,
                    NamedTuple, Optional, Sequence, Tuple)

import numpy as np

from mgpu import files
from mgpu.arguments import is_integer
from mgpu.backends import get_backend
from mgpu.device import Device, as_devices, cpu_cores

#: the columns of the table, in the order of a step
STAGES = ("dispatch", "copy", "compute", "reduce", "update", "wait")
#: what a stage of the program can be; the other two are found by measuring
_OPENED = ("copy", "compute", "reduce", "update")
HOST = "host"


class Span(NamedTuple):
    """A piece of one step, on one device or on the host."""

    step: int           # its number, from 0
    stage: str          # one of `STAGES`
    name: str           # split, forward, loss, backward, all-reduce, update
    during: str         # copy, compute, reduce or update: what a dispatch
    #                     was for, or a wait; else the stage itself
    device: str         # "cpu(0)", or "host"
    begin: float        # seconds since the Profile was first entered
    seconds: float


class Step(NamedTuple):
    """One train step, all devices waited for before and after it."""

    number: int         # from 0
    rows: Optional[int]
    begin: float        # seconds since the Profile was first entered
    seconds: float
    staged: bool        # whether it was measured stage by stage


class _Mark(NamedTuple):
    """A call that worked for one device, or for all (None)."""

    device: Optional[int]
    begin: float
    end: float
    thread: int
    done: bool          # the work, when the call returned: see `at_once`


_Interval = Tuple[float, float]
_profile: "ContextVar[Optional[Profile]]" = ContextVar("mgpu_profile",
                                                       default=None)
_open: "ContextVar[Optional[_Stage]]" = ContextVar("mgpu_stage",
                                                   default=None)
_NOTHING: ContextManager[None] = contextlib.nullcontext()
_here = threading.local()       # .at_once: what this thread runs is done
#                                 when it returns


# -- what a program says ------------------------------------------------------

def step(devices: Sequence[Device], batch: Any = None
         ) -> ContextManager[None]:
    """A train step on `devices`: what a `Profile` measures. `train_batch`
    is one; a loop of one's own puts each of its steps inside this.

    Parameters
    ----------
    devices : sequence of Device
        All devices of the step. Waited for before and after it, while a
        Profile is on.
    batch : int, array or nested arrays, optional
        How many rows it has, or the data whose rows are counted.

    Notes
    -----
    A step that raises is not kept. Steps inside a step, and those of other
    threads than the one that entered the Profile, are not seen.
    """
    profile = _profile.get()
    return _NOTHING if profile is None else profile._begin(devices, batch)


def stage(kind: str, name: str, devices: Optional[Sequence[Device]] = None,
          results: Optional[Callable[[], Sequence[Any]]] = None,
          numbers: Optional[Sequence[int]] = None) -> ContextManager[None]:
    """A stage of a step. `split_and_load`, ``replicas(shards)``, `backward`
    and the two halves of `Trainer.step` are stages already.

    While a Profile is on, the end of the block waits for the devices, so
    that stages do not overlap. A stage inside a stage is a part of it.

    Parameters
    ----------
    kind : {"copy", "compute", "reduce", "update"}
    name : str
        Says more: "forward".
    devices : sequence of Device, optional
        That work in it (default: those of the step).
    results : callable, optional
        Called at the end: for each device the arrays that it then has to
        have computed (nested, or None). Each device is waited for through
        its own, which tells when it was done; without them all are done
        when the last one is.
    numbers : sequence of int, optional
        Places in `devices` of those that have work to do (default: all).

    Raises
    ------
    ValueError
        Another kind. (Checked while a Profile is on.)
    """
    profile = _profile.get()
    return _NOTHING if profile is None else profile._stage(
        kind, name, devices, results, numbers)


def on() -> bool:
    """Whether a Profile measures what is done here."""
    return _profile.get() is not None


def mark(device: Device) -> ContextManager[None]:
    """Inside a stage: what this block does is done for `device`."""
    opened = _open.get()
    return _NOTHING if opened is None else opened.mark(device)


def at_once() -> None:
    """In a function that `mgpu.parallel` runs: it does its work itself, so
    that nothing is left to wait for when it returns."""
    _here.at_once = True


def staged(kind: str, name: str,
           results: Callable[[Any], Sequence[Any]]) -> Callable:
    """A `stage` around each call of a method of an object that has
    ``self.replicas``; `results` gets these."""
    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def wrapped(self: Any, *args: Any, **options: Any) -> Any:
            if _profile.get() is None:
                return method(self, *args, **options)
            with stage(kind, name, self.replicas.devices,
                       partial(results, self.replicas)):
                return method(self, *args, **options)
        return wrapped
    return decorate


def gradients(replicas: Any) -> List[List[Any]]:
    """Each device's gradients, not copies; nothing before the first forward
    pass has completed the shapes."""
    return _columns(replicas, lambda p: p.list_grad())


def weights(replicas: Any) -> List[List[Any]]:
    """Each device's trained parameters, not copies."""
    return _columns(replicas, lambda p: p.list_data())


def _columns(replicas: Any, read: Callable[[Any], List[Any]]
             ) -> List[List[Any]]:
    requests = replicas.grad_reqs()
    rows = [read(p) for p in replicas.params() if requests[p.name] != "null"]
    return [[row[i] for row in rows] for i in range(len(replicas))]


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """No stage is open in this block: thunks that queue work for devices say
    nothing of when it is done, which the end of the stage then waits for."""
    token = _open.set(None)
    try:
        yield
    finally:
        _open.reset(token)


def watched(thunks: Sequence[Callable[[], Any]]
            ) -> Sequence[Callable[[], Any]]:
    """What an engine calls instead of `thunks`, of which number i is for
    device i: the same, timed where a stage is open."""
    opened = _open.get()
    return thunks if opened is None else opened.wrapped(thunks)


# -- one stage ----------------------------------------------------------------

class _Stage:
    """An open stage: collects marks, waits at its end, makes spans."""

    def __init__(self, profile: "Profile", kind: str, name: str,
                 devices: Sequence[Device],
                 results: Optional[Callable[[], Sequence[Any]]],
                 numbers: Optional[Sequence[int]]) -> None:
        self.profile, self.kind, self.name = profile, kind, name
        self.devices, self.results = list(devices), results
        self.numbers = list(range(len(devices)) if numbers is None
                            else numbers)
        self.marks: List[_Mark] = []    # threads append to it

    def __enter__(self) -> None:
        self.profile._current = self
        self._token = _open.set(self)
        self._thread = threading.get_ident()
        self._begin = time.perf_counter()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        returned = time.perf_counter()
        # Before the wait, which uses the engine's threads too.
        _open.reset(self._token)
        self.profile._current = None
        if kind is None:
            arrived, end = self._wait()
            self._add_spans(returned, arrived, end)

    @contextlib.contextmanager
    def mark(self, device: Device) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if device in self.devices:
            self._mark(self.devices.index(device), begin)

    def _mark(self, number: Optional[int], begin: float, done: bool = False
              ) -> None:
        self.marks.append(_Mark(number, begin, time.perf_counter(),
                                threading.get_ident(), done))

    def wrapped(self, thunks: Sequence[Callable[[], Any]]
                ) -> Sequence[Callable[[], Any]]:
        if len(thunks) == len(self.devices):
            numbers: Sequence[Optional[int]] = range(len(thunks))
        elif len(thunks) == len(self.numbers):
            numbers = self.numbers
        elif len(thunks) == 1:
            numbers = [None]        # a joint backward pass
        else:
            return thunks           # parts of no device in particular
        return [partial(self._timed, n, thunk)
                for n, thunk in zip(numbers, thunks)]

    def _timed(self, number: Optional[int], thunk: Callable[[], Any]) -> Any:
        token = _open.set(None)     # a call inside a call belongs to it
        _here.at_once = False
        begin = time.perf_counter()
        try:
            return thunk()
        finally:
            self._mark(number, begin, _here.at_once)
            _open.reset(token)

    def _wait(self) -> Tuple[List[float], float]:
        """When the results of each device were there, and when all were."""
        backend, arrived = get_backend(), []
        if self.results is not None:
            arrived = backend.parallel(
                [partial(_wait_for, x) for x in self.results()],
                rendezvous=True)    # at the same time, on every engine
        backend.synchronize(self.devices)
        end = time.perf_counter()
        return arrived or [end] * len(self.devices), end

    def _is_issued(self, m: _Mark, device: Device) -> bool:
        """Whether the call only issued work. What a CPU device's own thread
        did was done when it returned."""
        return not m.done and (m.thread == self._thread
                               or device.kind == "gpu")

    def _add_spans(self, returned: float, arrived: List[float],
                   end: float) -> None:
        idle: List[_Interval] = [(returned, end)]       # of the host
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

    def _add(self, device: str, kind: str, intervals: List[_Interval]
             ) -> None:
        profile = self.profile
        profile.spans += [
            Span(len(profile.steps), kind, self.name, self.kind, device,
                 begin - profile._origin, end - begin)
            for begin, end in intervals]


def _wait_for(arrays: Any) -> float:
    from mgpu.split import map_leaves   # which imports this module
    backend = get_backend()

    def wait(x: Any) -> List[None]:
        if backend.is_native(x):
            backend.memory(x)
        return [None]
    map_leaves(wait, arrays, 1)
    return time.perf_counter()


def _union(intervals: List[_Interval]) -> List[_Interval]:
    """The same times, as intervals in order that do not meet."""
    found: List[_Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _gaps(intervals: List[_Interval], begin: float, end: float
          ) -> List[_Interval]:
    """The rest of `begin` to `end`, of intervals in order."""
    edges = [begin, *(t for pair in intervals for t in pair), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2]) if b > a]


# -- the profile --------------------------------------------------------------

class Profile:
    """Measures the train steps inside a ``with`` block, stage by stage.

    Parameters
    ----------
    devices : one device, or a sequence of devices, optional
        Those that the table shows. None: all that worked.
    plain : bool
        Every second step (numbers 1, 3, ...) runs as it would without a
        Profile and is only timed as a whole, so that `cost` can tell what
        measuring costs. False: every step is measured.

    Attributes
    ----------
    spans : list of Span
    steps : list of Step

    Raises
    ------
    RuntimeError
        Another Profile is on (when the block is entered).
    ValueError, TypeError
        What `as_devices` refuses.

    Notes
    -----
    An asynchronous engine (MXNet, CUDA) returns before its work is done, so
    a span means nothing unless somebody waits: while a Profile is on, each
    stage ends when its devices are done. Stages do not overlap then, and a
    step takes longer than without. Numbers are what they are without, bit
    for bit.

    In each stage, a device's span begins with the first call that works for
    it and ends when it is done; before and after that it waits, for the
    host or for the other devices. The host dispatches while it is inside
    calls that issue work ("copy" if that work is copies), and waits while
    CPU devices compute in threads of their own and at the end of a stage.
    Where a device computes in a thread of its own, what its thread spends
    in Python is part of its compute.

    Steps are those of `train_batch` (and of what calls it), and `step`
    blocks; the same Profile may be entered again. Belongs to the thread
    that entered it.

    Examples
    --------
    >>> with mgpu.Profile() as profile:
    ...     for X, y in batches:
    ...         mgpu.train_batch(X, y, replicas, loss, trainer)
    >>> print(profile)
    >>> print(profile.verdict())
    """

    def __init__(self, devices: Any = None, *, plain: bool = True) -> None:
        self.devices = None if devices is None else as_devices(devices)
        self.plain = plain
        self.spans: List[Span] = []
        self.steps: List[Step] = []
        self._origin: Optional[float] = None
        self._in_step, self._staged = False, False
        self._current: Optional[_Stage] = None

    def __enter__(self) -> "Profile":
        if _profile.get() is not None:
            raise RuntimeError(
                "one Profile can be on at a time; received another one "
                "inside its block. Leave the outer one first, or use it for "
                "all steps.")
        if self._origin is None:
            self._origin = time.perf_counter()
        self._thread = threading.get_ident()
        _profile.set(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _profile.set(None)

    # -- recording ----------------------------------------------------------

    def _begin(self, devices: Sequence[Device], batch: Any
               ) -> ContextManager[None]:
        if self._in_step or threading.get_ident() != self._thread:
            return _NOTHING
        return self._step(list(devices), batch)

    @contextlib.contextmanager
    def _step(self, devices: List[Device], batch: Any) -> Iterator[None]:
        from mgpu.split import rows_of      # which imports this module
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
                number, rows, begin - self._origin,
                time.perf_counter() - begin, self._staged))
        except BaseException:
            del self.spans[first:]      # half a step would spoil the means
            raise
        finally:
            self._in_step = self._staged = False

    def _stage(self, kind: str, name: str,
               devices: Optional[Sequence[Device]],
               results: Optional[Callable[[], Sequence[Any]]],
               numbers: Optional[Sequence[int]]) -> ContextManager[None]:
        if kind not in _OPENED:
            raise ValueError(f"unknown stage; received {kind!r}. Use one of "
                             f"{', '.join(map(repr, _OPENED))}.")
        if not self._staged or self._current is not None \
                or threading.get_ident() != self._thread:
            return _NOTHING
        return _Stage(self, kind, name,
                      self._devices if devices is None else devices,
                      results, numbers)

    # -- what was measured --------------------------------------------------

    def _places(self) -> List[str]:
        found = dict.fromkeys(s.device for s in self.spans)
        found.pop(HOST, None)
        return [HOST, *(found if self.devices is None
                        else map(str, self.devices))]

    def _measured(self) -> List[Step]:
        """Those by stage, of the largest batch."""
        found = [s for s in self.steps if s.staged]
        most = max((s.rows or 0 for s in found), default=0)
        return [s for s in found if (s.rows or 0) == most]

    def table(self) -> List[Dict[str, Any]]:
        """Means over the steps that were measured by stage; where batches
        differ, over those with most rows.

        Returns
        -------
        list of dict
            First the host, then a row per device: ``"device"``; for each
            of `STAGES`, and for ``"other"`` (outside of all stages),
            ``"..._ms"``, milliseconds per step, and ``"..._share"`` of the
            step; ``"step_ms"``. Nothing without such a step.
        """
        measured = {s.number: s.seconds for s in self._measured()}
        whole = list(measured.values())
        if not whole:
            return []
        rows = []
        for place in self._places():
            seconds = {name: sum(
                s.seconds for s in self.spans if s.step in measured
                and (s.device, s.stage) == (place, name)) for name in STAGES}
            seconds["other"] = sum(whole) - sum(seconds.values())
            row: Dict[str, Any] = {"device": place}
            for name, total in seconds.items():
                row[f"{name}_ms"] = 1000 * total / len(whole)
                row[f"{name}_share"] = total / sum(whole)
            row["step_ms"] = 1000 * sum(whole) / len(whole)
            rows.append(row)
        return rows

    def parts(self) -> List[Dict[str, Any]]:
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
        found = {s.number: {
            "step": s.number, "rows": s.rows, "seconds": s.seconds,
            **dict.fromkeys(("dispatch", *_OPENED), 0.0),
            "other": s.seconds} for s in self.steps if s.staged}
        for s in self.spans:
            if s.device == HOST and s.step in found:
                part = s.during if s.stage == "wait" else s.stage
                found[s.step][part] += s.seconds
                found[s.step]["other"] -= s.seconds
        return list(found.values())

    def cost(self) -> Optional[float]:
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
        count, n = len(self._measured()), self._measured()[0].rows
        last = (f"{count} step{'s' * (count != 1)} of "
                f"{rows[0]['step_ms']:.2f} ms" + (f", batch {n}" if n else ""))
        cost = self.cost()
        if cost is not None:
            last += f"; measuring makes them {cost:.2f} times as long"
        return "\n".join([*lines, last])

    def chrome_trace(self, file: Any) -> None:
        """Write the spans for ``chrome://tracing`` or ui.perfetto.dev.

        A row (thread) for the host and one per device; times in
        microseconds. Format: "Trace Event Format" (Google), complete events
        ``"X"`` and metadata ``"M"``. The file is written whole or not at
        all.

        Raises
        ------
        FileNotFoundError
            The folder of `file` is not there.
        """
        write_trace(file, {"mgpu": self})

    def verdict(self) -> str:
        """In words: what bounds a step, and what would help.

        The rules, on the means of `parts` over the steps with most rows:

        - *X-bound*, for the largest of dispatch, copy, compute, reduce and
          update.
        - compute-bound on k devices: 2 k devices could at best take
          ``step + dispatch - compute * (1 - 1/f)``, since each device is
          issued its own work and nothing but compute is divided. `f` is 2,
          or on CPUs ``min(2 k, c) / min(k, c)`` with room for `c` devices
          on the cores (`MGPU_THREADS_PER_DEVICE` cores each). It is said if
          that gains 5 % or more.
        - Steps of several batch sizes: the line ``fixed + per_row * rows``
          (`fit`) through their median seconds; those of steps without
          stages, where there are some of every size. Below ``fixed /
          per_row`` rows the part that no further device takes a share of
          is the larger one.
        - The slowest device computes 1.25 times as long as the fastest one
          or longer: the shards are uneven for these devices.

        Raises
        ------
        ValueError
            No step was measured.
        """
        steps = {s.number: s.rows for s in self._measured()}
        if not steps:
            raise ValueError("a verdict needs a measured step; received "
                             "none. Train a batch inside the Profile.")
        most = max(n or 0 for n in steps.values())
        parts = [p for p in self.parts() if p["step"] in steps]
        mean = {name: sum(p[name] for p in parts) / len(parts)
                for name in ("seconds", "dispatch", *_OPENED)}
        bound = max(("dispatch", *_OPENED), key=mean.__getitem__)
        devices = self._places()[1:]
        said = [f"{bound}-bound: {_WHAT[bound]} "
                f"{mean[bound] / mean['seconds']:.0%} of a step of "
                f"{1000 * mean['seconds']:.1f} ms on {_count(len(devices))}"
                + (f", batch {most}." if most else "."),
                _gain(mean, devices) if bound == "compute"
                else _ADVICE[bound], self._by_batch(), self._balance(parts)]
        return " ".join(filter(None, said))

    def _by_batch(self) -> str:
        known = [s for s in self.steps if s.rows]
        sizes = sorted({s.rows for s in known})
        if len(sizes) < 2:
            return ""
        for kind in (False, True):
            found = [s for s in known if s.staged is kind]
            if {s.rows for s in found} == set(sizes):
                known = found
                break
        fixed, per_row = fit(sizes, [float(np.median(
            [s.seconds for s in known if s.rows == n])) for n in sizes])
        line = (f"(batches of {', '.join(map(str, sizes))}: "
                f"{1000 * fixed:.2f} ms + {1e6 * per_row:.1f} us per row)")
        if not fixed:
            return f"No cost per step is seen beside the rows {line}."
        if not per_row:
            return (f"Dispatch-bound at all of these batches {line}: more "
                    "devices will not help.")
        equal = ceil(fixed / per_row - 1e-9)    # rounding is no row
        return (f"Dispatch-bound below batch {equal} "
                f"{line}: there more devices will not help.")

    def _balance(self, parts: List[Dict[str, Any]]) -> str:
        steps = {p["step"] for p in parts}
        total: Dict[str, float] = {}
        for s in self.spans:
            if s.stage == "compute" and s.step in steps:
                total[s.device] = total.get(s.device, 0.0) + s.seconds
        if not total:
            return ""
        slow, fast = (choose(total, key=total.__getitem__)
                      for choose in (max, min))
        if total[slow] < 1.25 * total[fast]:
            return ""
        a, b = (f"{d} computes {1000 * total[d] / len(parts):.1f} ms"
                for d in (slow, fast))
        return (f"Uneven: {a} a step, {b}; split_batch takes weights for "
                "devices of unequal power.")


_WHAT = {"dispatch": "issuing work takes the host",
         "copy": "copying the batch to the devices takes",
         "compute": "forward and backward take",
         "reduce": "summing the gradients takes",
         "update": "the optimiser's update takes"}
_ADVICE = {
    "dispatch": "More devices will not help, each adds its own; larger "
                "batches or a compiled (hybridized) network will.",
    "copy": "More devices will not help; a smaller dtype, or data that are "
            "on the device, will.",
    "reduce": "Fewer devices or larger batches help: it is the same for any "
              "number of rows.",
    "update": "More devices will not help; larger batches need fewer "
              "updates for the same rows."}


def _count(k: int) -> str:
    return f"{k} device{'s' * (k != 1)}"


def _gain(mean: Dict[str, float], devices: List[str]) -> str:
    k, factor = len(devices), 2.0
    on_cpus = all(d.startswith("cpu") for d in devices)
    if on_cpus:
        room = room_for_cpus()
        factor = min(2 * k, room) / min(k, room)
        if factor == 1:
            return (f"More devices will not help: the cores have room for "
                    f"{room}, which compute already.")
    gain = mean["seconds"] / (mean["seconds"] + mean["dispatch"]
                              - mean["compute"] * (1 - 1 / factor))
    more = f"{_count(2 * k)} can give up to {gain:.1f}x" if gain >= 1.05 \
        else f"Even so {_count(2 * k)} gain nothing to speak of"
    return more + (f" (room for {room} on the cores)."
                   if on_cpus and factor < 2 else ".")


def room_for_cpus() -> int:
    """How many logical CPU devices the cores have room for: the cores that
    this process may use, by ``MGPU_THREADS_PER_DEVICE``."""
    text = os.environ.get("MGPU_THREADS_PER_DEVICE", "1")
    threads = int(text) if text.isdecimal() else 1
    return max(1, cpu_cores() // max(1, threads))


def fit(rows: Sequence[float], seconds: Sequence[float]
        ) -> Tuple[float, float]:
    """The line ``fixed + per_row * rows`` with the least squares; neither
    number is negative (of a line and its two bounds the best one).

    Raises
    ------
    ValueError
        Fewer than two numbers of rows.
    """
    x, y = np.asarray(rows, np.float64), np.asarray(seconds, np.float64)
    if len(set(x.tolist())) < 2:
        raise ValueError("a line needs two batch sizes; received "
                         f"{sorted(set(x.tolist()))}. Measure another one.")
    slope, level = np.polyfit(x, y, 1)
    nothing = 1e-9 * np.abs(y).max()    # what rounding may leave
    if slope * x.max() <= nothing:
        return float(max(y.mean(), 0)), 0.0
    if level <= nothing:
        return 0.0, float((x @ y) / (x @ x))
    return float(level), float(slope)


# -- Chrome's trace format ----------------------------------------------------

def write_trace(file: Any, profiles: Dict[str, Profile]) -> None:
    """Profiles in one trace file, a process for each name; see
    `Profile.chrome_trace`."""
    files.check_folder(os.fspath(file), "the trace")
    events: List[Dict[str, Any]] = []
    for pid, (name, profile) in enumerate(profiles.items()):
        events.append({"ph": "M", "pid": pid, "tid": 0,
                       "name": "process_name", "args": {"name": name}})
        threads = {place: tid for tid, place in enumerate(dict.fromkeys(
            [HOST, *(s.device for s in profile.spans)]))}
        for place, tid in threads.items():
            events.append({"ph": "M", "pid": pid, "tid": tid,
                           "name": "thread_name", "args": {"name": place}})
            events.append({"ph": "M", "pid": pid, "tid": tid,
                           "name": "thread_sort_index",
                           "args": {"sort_index": tid}})
        for s in profile.spans:
            own = s.stage == s.during
            events.append({
                "ph": "X", "pid": pid, "tid": threads[s.device],
                "name": s.name if own else f"{s.stage}: {s.name}",
                "cat": s.stage, "ts": 1e6 * s.begin, "dur": 1e6 * s.seconds,
                "args": {"step": s.step}})
    files.write_json(file, {"traceEvents": events, "displayTimeUnit": "ms"})
