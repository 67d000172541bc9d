"""The processes of a job, as one of them sees them.

All processes run the same program. They meet in `World.gather`: each gives a
small value with the name of the work that it is about to do, and receives the
values of all. What they decide from these values they decide alike. Between
two of these meetings they add up arrays, in the order that the first fixes.
"""
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from mgpu.distributed.sums import Sums
from mgpu.errors import (ModelMismatch, UnevenWork, WorkerError,
                         WorkerFailed, WorkerLost)

#: what a process gives in the place of its value
_FAILED, _LEAVES = "failed", "leaves"


class Engine(Protocol):
    """What carries bytes and sums between processes. A method raises
    `WorkerLost` where another process ends, or is silent for longer than the
    time-out."""

    name: str
    rank: int
    size: int
    timeout: float
    #: the dtypes that sums are computed in; None: each in its own
    dtypes: tuple[str, ...] | None

    def allgather(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, in their order."""

    def allreduce(self, arrays: Sequence[np.ndarray], op: str) -> None:
        """Reduce each of the one-dimensional arrays over all ranks, in
        place; the same bits on each. `op`: "sum", "max" or "min". All are
        done when it returns or raises, and until then they may all be under
        way."""

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        """Copy the array of rank `root` into that of all others."""

    def allreduce_native(self, x: Any, op: str) -> bool:
        """As `allreduce`, on an array of the engine that holds it. False
        where this one cannot, and nothing was done."""

    def close(self, alike: bool) -> None:
        """End the connections. `alike`: all ranks do; else nobody is waited
        for, and the process may end here."""


class World:
    """The processes of this job.

    Attributes
    ----------
    rank, size : int
        The number of this process, from 0, and how many there are.
    restarts : int
        How often the job was started again.
    devices : list of int, or None
        The number of devices of each rank, as `mgpu.initialize` was last
        told; None before.
    """

    def __init__(self, engine: Engine | None = None, restarts: int = 0
                 ) -> None:
        self.engine = engine
        self.rank, self.size = (engine.rank, engine.size) if engine else (0, 1)
        self.restarts = restarts
        self.devices: list[int] | None = None
        #: in the middle of passes
        self.sums = Sums(self)
        #: meetings so far
        self.serial = 0
        #: why this process wishes to stop; and what all ranks have learnt,
        #: in the same meeting
        self.wish: int | None = None
        self._agreed: int | None = None
        self._dead: WorkerLost | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and draws."""
        return self.rank == 0

    # -- meetings -----------------------------------------------------------

    def gather(self, work: str, value: Any = None) -> list[Any]:
        """The `value` of every rank, in their order. Each is fit for JSON.

        Raises
        ------
        WorkerFailed
            Another rank has failed in the work that leads here.
        UnevenWork
            Another rank is about to do other work than `work`.
        WorkerLost
            Another rank has ended, or is silent.
        """
        if self.size == 1:
            return [value]
        self.sums.settle()
        return self.meet(work, value)

    def meet(self, work: str, value: Any) -> list[Any]:
        """`gather`, while passes may be under way."""
        told = self._meet({"work": work, "value": value,
                           **({} if self.wish is None
                              else {"stop": self.wish})})
        self._agreed = next((one["stop"] for one in told if "stop" in one),
                            self._agreed)
        for rank, one in enumerate(told):
            if one["work"] == _FAILED:
                raise WorkerFailed(
                    f"rank {rank} failed before {work!r}: {one['value']}. "
                    f"Nothing has changed on rank {self.rank}. Correct what "
                    "that rank reports; its log has the traceback.")
        left = {rank: one["value"] for rank, one in enumerate(told)
                if one["work"] == _LEAVES}
        if left:
            rank, why = min(left.items())
            if why:
                self._dead = WorkerLost(
                    f"rank {rank} has ended: {why}. Rank {self.rank} stops "
                    f"at {work!r}. Correct what that rank reports, and start "
                    "the job again.")
                raise self._dead
            self._dead = WorkerLost(f"rank {rank} has ended")
            raise UnevenWork(
                "all ranks do the same number of steps; received the end of "
                f"rank {rank} while rank {self.rank} is at {work!r}, meeting "
                f"{self.serial}. Give every rank as many batches: shard one "
                "order of batches (mgpu.datasets), where a rank may also get "
                "an empty part.")
        works = {rank: one["work"] for rank, one in enumerate(told)}
        if len(set(works.values())) > 1:
            raise UnevenWork(
                "all ranks do the same work in the same order; received "
                + ", ".join(f"{w!r} on rank {r}" for r, w in works.items())
                + f" at meeting {self.serial}. Call the functions of mgpu on "
                "every rank, not inside `if rank == 0`, and give every rank "
                "as many batches.")
        return [one["value"] for one in told]

    @property
    def stopping(self) -> int | None:
        """The wish of a rank to stop, which all ranks know of: the same
        between two meetings."""
        return self.wish if self.size == 1 else self._agreed

    def go_on(self) -> None:
        """Forget the wish, after all ranks have stopped or before they
        begin."""
        self.wish = self._agreed = None

    def _meet(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        if self._dead is not None:
            raise self._dead
        assert self.engine is not None
        with self._carried():
            self.serial += 1
            return [json.loads(x) for x in self.engine.allgather(
                json.dumps(message).encode())]

    @contextlib.contextmanager
    def _carried(self) -> Iterator[None]:
        """One exchange at a time; one that fails is the last."""
        if self._dead is not None:
            raise self._dead
        with self._lock:
            try:
                yield
            except WorkerLost as error:
                self._dead = error
                raise

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """The block leads to a meeting. Where it fails before that, the
        others are told, and raise `WorkerFailed` there."""
        before = self.serial
        try:
            yield
        except BaseException as error:
            if self.serial == before:
                self.tell(error)
            raise

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """What ends the block early, wherever in it, ends it for all: the
        others raise `WorkerFailed` in their next meeting."""
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise

    def tell(self, error: BaseException) -> None:
        """Let the others raise `WorkerFailed` in their next meeting, unless
        they know of `error`. Where all ranks tell, all go on alike."""
        if self.size == 1 or isinstance(error, WorkerError) \
                or getattr(error, "told", False) or self._dead is not None:
            return
        if self._settled():
            with contextlib.suppress(WorkerLost):
                self._meet({"work": _FAILED, "value": in_words(error)})
        with contextlib.suppress(AttributeError, TypeError):
            error.told = True       # type: ignore[attr-defined]

    def _settled(self) -> bool:
        """Wait for passes that are under way. False where they have brought
        the error of another rank, which knows that all fail now."""
        try:
            self.sums.settle()
        except WorkerError:
            return False
        except Exception:       # it is this rank's own
            pass
        return True

    def leave(self, why: str | None) -> bool:
        """Tell the others that this process ends. Returns whether all do
        now; `why`: the error that ends it."""
        if self.engine is None:
            return True
        alike = False
        if self._dead is None:
            self._settled()
        try:
            if self._dead is None:
                alike = all(one["work"] == _LEAVES for one in self._meet(
                    {"work": _LEAVES, "value": why}))
        except WorkerLost:
            pass
        self.engine.close(alike)
        return alike

    def agree(self, work: str, facts: dict[str, Any], cure: str) -> None:
        """Raise `ModelMismatch` on every rank, naming the first difference,
        unless all give the same `facts`."""
        first, *others = self.gather(work, facts)
        for rank, other in enumerate(others, 1):
            if other != first:
                where, ours, theirs = _difference(first, other)
                raise ModelMismatch(
                    f"{work} takes the same on every rank; received "
                    f"{where} {ours!r} on rank 0 and {theirs!r} on rank "
                    f"{rank}. {cure}")

    # -- arrays -------------------------------------------------------------

    def reduce(self, flat: np.ndarray, op: str = "sum") -> None:
        """Reduce a one-dimensional array over all ranks, in place."""
        self.reduce_all([flat], op)

    def reduce_all(self, arrays: Sequence[np.ndarray], op: str = "sum"
                   ) -> None:
        """`reduce` each of `arrays`, which are as many and as long on all
        ranks."""
        if self.engine is not None:
            with self._carried():
                self.engine.allreduce(arrays, op)

    def reduce_native(self, x: Any, op: str = "sum") -> bool:
        """As `reduce`, on an array of a framework; False: not done."""
        if self.engine is None:
            return True
        with self._carried():
            return self.engine.allreduce_native(x, op)

    def broadcast(self, flat: np.ndarray, root: int = 0) -> None:
        """Copy rank `root`'s array into that of the others."""
        if self.engine is not None:
            with self._carried():
                self.engine.broadcast(flat, root)

    def check_dtypes(self, dtypes: dict[str, str]) -> None:
        """Refuse parameters, whose dtypes are given by name, that the engine
        does not add up in their own dtype (ValueError)."""
        fit = None if self.engine is None else self.engine.dtypes
        wrong = [f"{name} of {dtype}" for name, dtype in dtypes.items()
                 if fit is not None and dtype not in fit]
        if wrong:
            raise ValueError(
                f"the engine {self.engine.name!r} adds up in "       # type: ignore[union-attr]
                f"{' and '.join(fit or ())}; received {wrong[0]}"
                + (f" and {len(wrong) - 1} others" if wrong[1:] else "")
                + ". Use engine='torch' (mgpu launch --engine torch), or "
                "another dtype.")

    # -- places -------------------------------------------------------------

    def span(self, k: int) -> "Span":
        """Where `k` devices of this rank are among those of all ranks. A
        meeting."""
        counts = [int(n) for n in self.gather("initialize", k)]
        self.devices = counts
        return Span(self, counts)

    def shares(self, bounds: Callable[[int, int], Any]
               ) -> Callable[[int], tuple[int, int]]:
        """A function of the number of rows of a batch: from where to where
        they are this rank's, which are those that its devices would have in
        one process. `bounds`: `shard_bounds`."""
        if self.size == 1:
            return lambda rows: (0, rows)
        if self.devices is None:
            raise RuntimeError(
                "the rows of a batch go to the devices of all ranks; "
                "received a loop over batches before mgpu.initialize, so "
                "these are not known. Call mgpu.initialize first.")
        first, total = sum(self.devices[:self.rank]), sum(self.devices)
        last = first + self.devices[self.rank] - 1

        def share(rows: int) -> tuple[int, int]:
            cuts = bounds(rows, total)
            return cuts[first][0], cuts[last][1]
        return share


class Span:
    """The devices of one network, over all ranks.

    Attributes
    ----------
    first : int
        The number of this rank's first device, over all ranks.
    total : int
        The number of devices of all ranks.
    """

    def __init__(self, world: World, counts: Sequence[int]) -> None:
        self.world, self.counts = world, list(counts)
        self.first = sum(counts[:world.rank])
        self.total = sum(counts)

    @property
    def wide(self) -> bool:
        """Whether there are other processes."""
        return self.world.size > 1


def in_words(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _difference(a: Any, b: Any, where: str = "") -> tuple[str, Any, Any]:
    """The first place at which two values of JSON differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in (*a, *(key for key in b if key not in a)):
            if a.get(key) != b.get(key):
                return _difference(a.get(key), b.get(key),
                                   f"{where} {key}".strip())
    if isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip(a, b)):
            if x != y:
                return _difference(x, y, f"{where}[{i}]")
        if len(a) != len(b):
            return f"the number of {where}", len(a), len(b)
    return where, a, b


_current = World()


def current() -> World:
    """The world of this process: of one process, until `init`."""
    return _current


def enter(world: World) -> None:
    """Make `world` the current one."""
    global _current
    _current = world
