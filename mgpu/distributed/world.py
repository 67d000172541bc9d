"""The group of processes of a job, as seen from one of them.

All processes run the same program. `World.gather` exchanges a small value
with the name of the work that follows, and returns the values of all ranks,
so that they take the same decisions. Between two of these exchanges they sum
arrays, in the order that the first one fixes.

A rank that fails joins the next exchange and reports its error there
(`World.guard`). If the others are within an exchange of arrays, or the
process ends, it aborts (`World.abort`), and they find its error in the store
of the job.
"""
import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu.distributed.sums import Sums
from mgpu.errors import (ModelMismatch, UnevenWork, WorkerError,
                         WorkerFailed, WorkerLost)

if TYPE_CHECKING:
    from mgpu.distributed._gloo import Gloo

#: the variable that names a file of `mgpu launch`, which `init` removes
UNJOINED = "_MGPU_UNJOINED"
#: values that replace the name of the work
_FAILED, _LEAVES = "failed", "the end of the program"


class World:
    """The group of processes of this job.

    Attributes
    ----------
    rank, size : int
        The index of this process, and the number of processes.
    restarts : int
        Number of restarts of the job.
    devices : list of int, or None
        The number of devices of each rank in the last `mgpu.initialize`; None
        before.
    """

    def __init__(self, comm: "Gloo | None" = None, restarts: int = 0) -> None:
        self._comm = comm
        self.rank, self.size = (comm.rank, comm.size) if comm else (0, 1)
        self.restarts = restarts
        self.devices: list[int] | None = None
        #: sums within passes
        self.sums = Sums(self)
        #: number of exchanges so far
        self.serial = 0
        #: number of networks and trainers so far
        self._made = 0
        self._batch: list[Any] | None = None
        #: the work of the last exchange
        self._work = "the beginning"
        #: the signal that stops this process, and the one that all ranks have
        #: learned of in the same exchange
        self.stop_signal: int | None = None
        self._agreed: int | None = None
        #: the error that ended all exchanges
        self._lost: WorkerError | None = None
        self._lock = threading.Lock()
        #: the error that the last exchange reported
        self._reported: BaseException | None = None
        self._process, self._together = os.getpid(), 0

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and draws progress bars."""
        return self.rank == 0

    @property
    def pending(self) -> bool:
        """Whether an exchange was left before its end."""
        return self._comm is not None and self._comm.pending

    # -- exchanges ----------------------------------------------------------

    def gather(self, work: str, value: Any = None) -> list[Any]:
        """Gather the JSON-serializable `value` of every rank, in their order.

        Raises
        ------
        WorkerFailed
            Another rank has failed before this exchange.
        UnevenWork
            Another rank is about to do other work than `work`.
        WorkerLost
            Another rank has ended, or does not respond.
        """
        if self.size == 1:
            return [value]
        self.sums.synchronize()
        return self.all_gather(work, value)

    def all_gather(self, work: str, value: Any) -> list[Any]:
        """`gather` that may run within passes."""
        self._work = work
        every = self._exchange_work(work, value)
        works = [one["work"] for one in every]
        if _FAILED in works:
            rank = works.index(_FAILED)
            raise WorkerFailed(
                f"rank {rank} failed before {work!r}: "
                f"{every[rank]['value'].rstrip('.')}. "
                f"No parameter of rank {self.rank} has changed. Correct what "
                "that rank reports; its log has the traceback.")
        if works.count(work) < self.size:
            error = UnevenWork(
                "all ranks must do the same work in the same order; received "
                + ", ".join(f"{w!r} on rank {r}" for r, w in enumerate(works))
                + f" at exchange {self.serial}. Call the functions of mgpu on "
                "every rank, not inside `if rank == 0`; and give every rank "
                "the same number of batches: mgpu.datasets yields them, and "
                "empty ones for a rank without examples.")
            self._lost = error if _LEAVES in works else None
            raise error
        return [one["value"] for one in every]

    @property
    def stopping(self) -> int | None:
        """The stop signal that all ranks know of: the same between two
        exchanges."""
        return self.stop_signal if self.size == 1 else self._agreed

    def clear_stop(self) -> None:
        """Clear the stop signal, after all ranks have stopped or before they
        begin."""
        self.stop_signal = self._agreed = None

    def _exchange_work(self, work: str, value: Any) -> list[dict[str, Any]]:
        with self._exchange() as comm:
            self.serial, self._reported = self.serial + 1, None
            every = [json.loads(x) for x in comm.allgather(json.dumps(
                dict(work=work, value=value, stop=self.stop_signal)).encode())]
        self._agreed = next((one["stop"] for one in every
                             if one["stop"] is not None), self._agreed)
        return every

    @contextlib.contextmanager
    def _exchange(self) -> "Iterator[Gloo]":
        """One exchange at a time; after an error there are no more."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"rank {self.rank} is the process that called "
                "mgpu.distributed.init; received a call in a forked "
                "process. Let such a process only read data.")
        if self._lost is not None:
            raise self._lost
        assert self._comm is not None
        # A second Ctrl-C may have left a thread within an exchange.
        if not self._lock.acquire(timeout=self._comm.timeout):
            self._lost = WorkerLost(
                f"only one thread of rank {self.rank} may exchange; another "
                f"one has done so for {self._comm.timeout:g} s, at "
                f"{self._work!r}. Start the job again.")
            raise self._lost
        try:
            yield self._comm
        except WorkerLost as error:
            self._lost = self._cause(self._comm.notes(), error)
            raise self._lost from error
        except BaseException as error:      # Ctrl-C, within an exchange
            self.abort(error)
            raise
        finally:
            self._lock.release()

    def _cause(self, notes: dict[int, str], error: WorkerLost) -> WorkerLost:
        """The reason why an exchange did not end: the note of another rank,
        else the local error."""
        if notes:
            rank, why = min(notes.items())
            return WorkerLost(
                f"rank {rank} has ended: {why}. Rank {self.rank} stops "
                f"at {self._work!r}. Correct what that rank reports, and "
                "start the job again.")
        return WorkerLost(
            f"all {self.size} ranks must join {self._work!r}, exchange "
            f"{self.serial}; on rank {self.rank}, {error}. Check its log, "
            "and start the job again (mgpu launch --max-restarts does), from "
            "a checkpoint.")

    # -- failures -----------------------------------------------------------

    @property
    def _alone(self) -> bool:
        """Whether no other rank can receive a report."""
        return self._comm is None or self._lost is not None \
            or self._process != os.getpid()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Report an error in the block to the other ranks, which raise
        `WorkerFailed` in their next exchange."""
        try:
            yield
        except BaseException as error:
            self.report_error(error)
            raise

    def report_error(self, error: BaseException) -> None:
        """Join the next exchange of the others and report `error`, unless the
        last exchange did. If all ranks report an error, all of them
        continue."""
        if self._alone or isinstance(error, WorkerError) \
                or self._reported is not None \
                and self._reported in (error, error.__cause__) \
                or not self._flush():
            return
        if self._together or self._lock.locked():
            # A second Ctrl-C has left a thread within an exchange.
            self.abort(error)
            return
        with contextlib.suppress(WorkerError):
            self._exchange_work(_FAILED, in_words(error))
        self._reported = error

    def _flush(self) -> bool:
        """Wait for the current passes. Returns False if one of them raised
        the error of another rank, which knows that all fail now."""
        try:
            self.sums.synchronize()
        except WorkerError:
            return False
        except Exception:       # it is this rank's own
            pass
        return True

    def abort(self, error: BaseException | str) -> None:
        """Abort the exchanges with the others. They raise `WorkerLost`, with
        `error`, at any point."""
        if self._alone:
            return
        assert self._comm is not None
        why = error if isinstance(error, str) else in_words(error)
        self._lost = WorkerLost(
            f"rank {self.rank} has left the others at {self._work!r}: "
            f"{why}. Start the job again.")
        self._comm.post(f"{why} (its last work was {self._work!r})")
        self._comm.close(False)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block with the same exchanges of arrays on all ranks, in the same
        order, after a `gather`. An error in it on this rank ends the job: the
        others are within an exchange."""
        self._together += 1
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            self._together -= 1

    def leave(self, why: str | None) -> bool:
        """Leave the job. Returns whether no other rank continues; `why`: the
        error that ends this process."""
        if self._comm is None or self._process != os.getpid():
            return True
        alike = False
        if why:
            self.abort(why)
        elif self._lost is None:
            self._flush()
            with contextlib.suppress(WorkerError):  # ended before, or busy
                alike = all(one["work"] == _LEAVES
                            for one in self._exchange_work(_LEAVES, None))
        self._comm.close(alike, stays=self._lost is not None)
        return alike or self._lost is not None

    def agree(self, work: str, facts: dict[str, Any], cure: str) -> None:
        """Raise `ModelMismatch` on every rank, with the first difference,
        unless `facts` are equal on all ranks."""
        first, *others = self.gather(work, facts)
        for rank, other in enumerate(others, 1):
            if other != first:
                where, ours, theirs = _difference(first, other)
                raise ModelMismatch(
                    f"{work} takes the same on every rank; received "
                    f"{where} {ours!r} on rank 0 and {theirs!r} on rank "
                    f"{rank}. {cure}")

    # -- arrays -------------------------------------------------------------

    def reduce(self, flat: np.ndarray, op: str = "sum",
               work: str = "a reduction") -> None:
        """Reduce a one-dimensional array over all ranks, in place. `work`
        names the operation, and is equal on all ranks."""
        self.reduce_all([flat], op, work)

    def reduce_all(self, arrays: Sequence[np.ndarray], op: str = "sum",
                   work: str = "a reduction") -> None:
        """`reduce` each of `arrays`, whose number and lengths are equal on
        all ranks."""
        if self._comm is not None:
            with self._arrays(work, op, *arrays) as comm:
                comm.allreduce(arrays, op)

    def reduce_native(self, x: Any, op: str = "sum",
                      work: str = "a reduction") -> bool:
        """`reduce` an array of a framework; False: not supported, not done."""
        if self._comm is None:
            return True
        with self._arrays(work, op, x) as comm:
            return comm.allreduce_native(x, op)

    def broadcast(self, flat: np.ndarray, root: int = 0,
                  work: str = "a broadcast") -> None:
        """Copy the array of rank `root` to the other ranks."""
        if self._comm is not None:
            with self._arrays(work, str(root), flat) as comm:
                comm.broadcast(flat, root)

    @contextlib.contextmanager
    def _arrays(self, work: str, how: str, *arrays: Any) -> "Iterator[Gloo]":
        """An exchange of arrays. Outside `together` the ranks compare dtypes
        and shapes first, so that only matching arrays are combined."""
        if not self._together:
            self.agree(work, {"call": [how, *(
                [str(x.dtype), list(x.shape)] for x in arrays)]},
                "Call it alike on every rank.")
        with self._exchange() as comm:
            yield comm

    # -- positions ----------------------------------------------------------

    def number(self) -> int:
        """A number for a network or a trainer, equal on all ranks if they
        make them in the same order."""
        self._made += 1
        return self._made

    def note_batch(self, batch: list[Any] | None) -> None:
        """Remember the position of the loop's batch in the order of all
        ranks. None: there is no batch."""
        self._batch = batch

    def batch_taken(self) -> list[Any] | None:
        """Return and clear the position of the current batch, if any."""
        batch, self._batch = self._batch, None
        return batch

    def check_batches(self, batches: Sequence[list[Any] | None]) -> None:
        """Raise `UnevenWork` if ranks hold parts of different batches."""
        known = [(rank, batch) for rank, batch in enumerate(batches) if batch]
        for rank, batch in known[1:]:
            first, other = known[0]
            if not same_batch(batch, other) and batch[0] == other[0]:
                raise UnevenWork(
                    "all ranks must take examples of the same batch; received "
                    f"{batch_in_words(other)} on rank {first} and "
                    f"{batch_in_words(batch)} on rank {rank}. Give every rank "
                    "the same examples in the same order: pass a seed to a "
                    "random split; and begin an epoch on all "
                    "ranks: one that only some ranks begin, for a look at "
                    "the data, counts.")

    @staticmethod
    def check_orders(places: Sequence[list[Any] | None], work: str) -> None:
        """Raise ValueError if ranks begin at different positions in their
        data."""
        first = places[0]
        for rank, place in enumerate(places):
            if first == place or first and place and same_batch(first, place):
                continue
            said = [batch_in_words(x) if x else "data of another kind"
                    for x in (first, place)]
            raise ValueError(
                f"all ranks must {work}; received {said[0]} on rank 0 and "
                f"{said[1]} on rank {rank}. Use the same data on every "
                "rank: with one seed, order, file and split.")

    def span(self, k: int) -> "Span":
        """The position of `k` devices of this rank among those of all ranks.
        Synchronizes."""
        _check_joined()
        counts = [int(n) for n in self.gather("initialize", k)]
        self.devices = counts
        return Span(self, counts)

    def shares(self, bounds: Callable[[int, int], Any]
               ) -> Callable[[int], tuple[int, int]]:
        """A function of a batch size that returns the begin and end of this
        rank's examples: those that its devices would have in one process.
        `bounds`: `shard_bounds`."""
        if self.size == 1:
            return lambda rows: (0, rows)
        if self.devices is None:
            raise RuntimeError(
                "batches are split over the devices of all ranks; "
                "received a loop over batches before mgpu.initialize, so "
                "these are unknown. Call mgpu.initialize first; for a "
                "look at the data, and for its sample=, use train_iter.X, "
                "such as X[:1].")
        span = Span(self, self.devices)
        last = span.first + self.devices[self.rank] - 1

        def share(rows: int) -> tuple[int, int]:
            cuts = bounds(rows, span.total)
            return cuts[span.first][0], cuts[last][1]
        return share


@dataclass(frozen=True)
class Span:
    """The devices of one network, over all ranks.

    Attributes
    ----------
    counts : list of int
        The number of devices of each rank.
    first : int
        The index of this rank's first device, over all ranks.
    total : int
        The number of devices of all ranks.
    wide : bool
        Whether there are other ranks.
    """

    world: World
    counts: list[int]

    @property
    def first(self) -> int:
        return sum(self.counts[:self.world.rank])

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def wide(self) -> bool:
        return self.world.size > 1


def join() -> None:
    """Tell `mgpu launch`, if it has started this process, that the script
    calls `init`."""
    if UNJOINED in os.environ:
        with contextlib.suppress(FileNotFoundError):    # a second call
            os.unlink(os.environ[UNJOINED])


def _check_joined() -> None:
    """RuntimeError where `mgpu launch` has started several processes, and
    this one has not joined the others: each would train by itself."""
    if os.path.exists(os.environ.get(UNJOINED, "")):
        raise RuntimeError(
            "mgpu launch has started several processes; received a network "
            "before mgpu.distributed.init(), so each process would train by "
            "itself. Call mgpu.distributed.init() before the first network.")


def same_batch(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two positions in data are equal."""
    return a[:-1] == b[:-1] and same_examples(a[-1], b[-1])


def same_examples(a: Sequence[int | None], b: Sequence[int | None]) -> bool:
    """Whether checksums (`BatchIterator.contents`) can be those of the same
    examples; None matches everything."""
    return all(x == y or x is None or y is None for x, y in zip(a, b))


def batch_in_words(batch: Sequence[Any]) -> str:
    """Describe the position of a batch: `BatchIterator.place`."""
    (examples, size), seed, shuffle, drop_last, epoch, number, known = batch
    return (f"batch {number} of epoch {epoch} of {examples} examples by "
            f"{size} (seed={seed}, shuffle={shuffle}, drop_last={drop_last}, "
            "checksum " + "-".join(map(str, known)) + ")")


def in_words(error: BaseException) -> str:
    """Format an error in one line, without source positions of a backend."""
    text = re.sub(r"\[?/\S+\.(cc|cpp|h):\d+\]? ?", "", str(error))
    return f"{type(error).__name__}: {text}".rstrip(": ")


def _difference(a: Any, b: Any, where: str = "") -> tuple[str, Any, Any]:
    """The first difference of two JSON values."""
    if type(a) is type(b) and isinstance(a, (dict, list)):
        form = "{}[{}]" if isinstance(a, list) else "{} {}"
        a, b = (x if isinstance(x, dict) else dict(enumerate(x))
                for x in (a, b))
        for key in (*a, *b):
            if a.get(key) != b.get(key):
                return _difference(a.get(key), b.get(key),
                                   form.format(where, key).strip())
    return where, a, b


_current = World()


def current() -> World:
    """The group of this process: a single process until `init`."""
    return _current


def enter(world: World) -> None:
    """Make `world` the current group."""
    global _current
    _current = world
