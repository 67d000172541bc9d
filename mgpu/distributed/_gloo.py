"""``torch.distributed`` as the engine: gloo on CPUs, NCCL on CUDA cards."""
import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mgpu.errors import ModelMismatch, WorkerError, WorkerLost

#: bytes of a message that go in one exchange
_ROOM = 1024
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN}
#: seconds that a rank waits for the others to say that they are there too
_ROLL_CALL = 0.6
#: seconds that a rank waits for an answer of the store
_ANSWER = 1.0
#: seconds of waiting after which a rank looks for notes of the others, and
#: for Ctrl-C
_SLICE = 0.5
#: seconds that who serves the store stays for the others to read there why
#: it ends, and that another one is missing
_STAYS, _STAYS_LOST = 5.0, 1.0


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` alone (torch's store itself listens on
    all addresses of the machine)."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(found[0], socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(found[4])
        server.listen(2048)
    except BaseException:
        server.close()
        raise
    return server


def _open_store(host: str, port: int, rank: int, size: int, timeout: float,
                agent: bool) -> Any:
    """The store by which ranks find each other; rank 0 serves it, unless an
    agent of torchrun does."""
    limit = timedelta(seconds=timeout)
    if agent or rank:
        return dist.TCPStore(host, port, size, False, limit)
    server = listening(host, port)
    # The store closes the descriptor that it is given.
    return dist.TCPStore(host, port, size, True, limit,
                         wait_for_workers=False,
                         master_listen_fd=server.detach())


def join(timeout: float, start_timeout: float, *, rank: int, size: int,
         host: str, port: int, restarts: int) -> "Gloo":
    """The process group of all ranks. Raises as `mgpu.distributed.init`."""
    agent = _agent()
    if rank == 0 and not restarts:
        _say_once(agent, _is_loopback(host))
    if _is_loopback(host):      # else gloo takes that of the machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    end = time.monotonic() + start_timeout
    try:
        store = _within(start_timeout, lambda: _open_store(
            host, port, rank, size, start_timeout, agent))
    except Exception as error:
        raise WorkerLost(
            f"rank {rank} {'finds' if agent or rank else 'serves'} the store "
            f"of the job at {host}:{port} within {start_timeout:g} s; it "
            f"does not ({_short(error)}). Start rank 0, and give all ranks "
            "its address and a free port.") from error
    return Gloo(rank, size, store, timeout, start_timeout, end,
                serves=not (agent or rank))


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns or raises; TimeoutError after `seconds`, where it
    goes on in a thread of its own."""
    done: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            done.append((True, call()))
        except BaseException as error:
            done.append((False, error))
    thread = threading.Thread(target=run, daemon=True, name="mgpu-asks")
    thread.start()
    thread.join(max(0.0, seconds))
    if not done:
        raise TimeoutError(f"no answer in {seconds:.3g} s")
    good, found = done[0]
    if not good:
        raise found
    return found


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _say_once(agent: bool, loopback: bool) -> None:
    if not loopback:
        print("mgpu: processes exchange over the network. The connections "
              "are neither encrypted nor authenticated: use a network that "
              "only you can reach.", file=sys.stderr, flush=True)
    if agent and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        print("mgpu: torchrun shares its store with the workers. Restarts "
              "may then read addresses of the last attempt, and hang. Set "
              "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or use mgpu launch.",
              file=sys.stderr, flush=True)


class Gloo:
    """A process group of ``torch.distributed``."""

    name = "torch"
    dtypes = None       # each in its own

    def __init__(self, rank: int, size: int, store: Any, timeout: float,
                 start_timeout: float, end: float, serves: bool) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.stops: Callable[[dict[int, Any]], bool] = bool
        self.pending = False
        self._store, self._serves = store, serves
        self.closed = self._posted = False
        self._asking: threading.Thread | None = None
        self._gone: list[int] = []      # ranks that do not answer
        self._seen = 0      # notes, as they were last read
        self._notes: dict[int, Any] = {}
        self._rooms: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        wanted = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() \
            and dist.is_nccl_available() else "gloo"
        self._key = "mgpu"
        self._meet(start_timeout, end)
        try:
            _within(end - time.monotonic() + _ANSWER,
                    lambda: dist.init_process_group(
                        wanted, store=store, rank=rank, world_size=size,
                        timeout=timedelta(seconds=timeout)))
        except Exception as error:
            self.closed = True
            raise WorkerLost(
                f"all {size} ranks connect within {start_timeout:g} s; on "
                f"rank {rank} it fails ({_short(error)}). Where ranks are on "
                "several machines, set GLOO_SOCKET_IFNAME to the interface "
                "that connects them; look at the logs of the others, and "
                "start the job again.") from error
        # A store that outlives the job has notes of an earlier one.
        self._key = "mgpu/" + self.allgather(uuid.uuid4().hex.encode()
                                             )[0].decode()

    # -- the store: what ranks know of each other without an exchange -------

    def _ask(self, question: Callable[[], Any], default: Any = None) -> Any:
        """What the store answers. `default` where it does not, as its process
        has ended or stands still."""
        end = time.monotonic() + _ANSWER
        if self._asking is not None:    # an older question holds its lock
            self._asking.join(0.02)
            if self._asking.is_alive():
                return default
        answer: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(Exception):
                answer.append(question())
        self._asking = threading.Thread(target=ask, daemon=True,
                                        name="mgpu-asks")
        self._asking.start()
        self._asking.join(max(0.0, end - time.monotonic()))
        if not self._asking.is_alive():
            self._asking = None
        return answer[0] if answer else default

    def _meet(self, limit: float, end: float) -> None:
        """Wait for all ranks to be there, and name those that are not. Rank
        0 decides for all."""
        store = self._store

        def arrive() -> int:
            store.set(f"mgpu/here/{self.rank}", str(self.size))
            return int(store.add(f"mgpu/arrivals/{self.rank}", 1))
        twice = (self._ask(arrive) or 0) > 1 and not _agent()
        while True:
            sizes, missing, verdict = self._ask(self._present, (
                {}, [0], None))
            other = next((r for r, n in sizes.items() if n != self.size), None)
            error: WorkerError | None = None
            if twice:
                error = ModelMismatch(
                    "each rank is one process; received a second process "
                    f"with RANK {self.rank}, on rank {self.rank}. Give each a "
                    "number of its own.")
            elif verdict is not None:
                name, text = json.loads(verdict)
                raise (ModelMismatch if name == "ModelMismatch"
                       else WorkerLost)(text)
            elif other is not None:
                error = ModelMismatch(
                    "all ranks are told the same number of ranks; received "
                    f"{self.size} on rank {self.rank} and {sizes[other]} on "
                    f"rank {other}. Give every rank the same WORLD_SIZE.")
            elif not missing:
                return
            elif time.monotonic() > end:
                error = WorkerLost(
                    f"all {self.size} ranks start within {limit:g} s; "
                    f"received no sign of {_ranks(missing)} on rank "
                    f"{self.rank}. Start them, with the same address, port "
                    "and number of ranks (start_timeout= of "
                    "mgpu.distributed.init gives them longer).")
            if error is not None:
                if self._serves or isinstance(error, ModelMismatch):
                    self._ask(partial(store.set, "mgpu/verdict", json.dumps(
                        [type(error).__name__, str(error)])))
                    time.sleep(_ANSWER)     # for the others to read it
                raise error
            time.sleep(0.05)

    def _present(self) -> tuple[dict[int, int], list[int], str | None]:
        missing = self._absent("mgpu/here")
        verdict = None
        if not _agent() and self._store.check(["mgpu/verdict"]):
            verdict = self._store.get("mgpu/verdict").decode()
        sizes = {r: int(self._store.get(f"mgpu/here/{r}"))
                 for r in range(self.size) if r not in missing}
        return sizes, missing, verdict

    def _absent(self, key: str) -> list[int]:
        return [rank for rank in range(self.size)
                if not self._store.check([f"{key}/{rank}"])]

    def post(self, note: Any) -> None:
        text, rank = json.dumps(note), self.rank

        def post() -> None:
            self._store.set(f"{self._key}/note/{rank}", text)
            self._store.add(f"{self._key}/notes", 1)
        self._posted = True
        self._ask(post)

    def notes(self) -> dict[int, Any]:
        def read() -> dict[int, Any]:
            count = int(self._store.add(f"{self._key}/notes", 0))
            if count != self._seen:
                here = [rank for rank in range(self.size)
                        if rank != self.rank and self._store.check(
                            [f"{self._key}/note/{rank}"])]
                self._notes = {rank: json.loads(self._store.get(
                    f"{self._key}/note/{rank}")) for rank in here}
                self._seen = count
                self._store.set(f"{self._key}/read/{self.rank}", b"1")
            return self._notes
        return dict(self._ask(read, self._notes))

    # -- exchanges ----------------------------------------------------------

    def _finish(self, work: Any) -> None:
        """Wait for an exchange that has begun; not longer than the time-out,
        nor where the others say that it will not end."""
        end = time.monotonic() + self.timeout + _ROLL_CALL / 2
        self.pending = True
        while True:
            try:
                work.wait(timedelta(seconds=_SLICE))
                break
            except RuntimeError as error:
                text = _short(error)
            if work.is_completed():     # in the meantime, or it has failed
                self.pending = False
                try:
                    work.wait()
                    return
                except RuntimeError as error:
                    raise self._lost(_short(error)) from error
            if self.closed:
                raise WorkerLost("this process has left the job")
            if time.monotonic() > end:
                raise self._lost(text)
            if self.stops(self.notes()):
                raise WorkerLost("other ranks have left the job")
        self.pending = False

    def _begin(self, exchange: Callable[..., Any], *arguments: Any) -> None:
        if self.closed:
            raise WorkerLost("this process has left the job")
        try:
            work = exchange(*arguments, async_op=True)
        except RuntimeError as error:   # a connection that has broken before
            raise self._lost(_short(error)) from error
        self._finish(work)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """For exchanges that are waited for to their end, whatever becomes of
        the job: they write to memory that is the caller's."""
        if self.closed:
            raise WorkerLost("this process has left the job")
        try:
            yield
        except RuntimeError as error:
            raise self._lost(_short(error)) from error

    def _lost(self, text: str) -> WorkerLost:
        """The error that says who does not take part. All who notice say so,
        which leaves those that do not."""
        key, absent = f"{self._key}/waits", [0]
        self._ask(lambda: self._store.set(f"{key}/{self.rank}", b"1"))
        end = time.monotonic() + _ROLL_CALL
        while time.monotonic() < end:
            if self.stops(self.notes()):
                break
            absent = self._ask(lambda: self._absent(key), [0])
            if not absent:
                break
            time.sleep(0.02)
        self._gone = absent
        slow = "timed out" in text.lower()
        return WorkerLost(
            f"{_ranks(absent) if absent else 'one of the others'} "
            + (f"did not answer within {self.timeout:g} s" if slow
               else "has ended") + f" ({text})")

    def allgather(self, payload: bytes) -> list[bytes]:
        found = self._exchange(payload, _ROOM)
        longest = max(n for n, _ in found)
        if longest > _ROOM - 8:
            found = self._exchange(payload, longest + 8)
        return [bytes(x) for _, x in found]

    def _exchange(self, payload: bytes, room: int
                  ) -> list[tuple[int, Any]]:
        if room not in self._rooms:
            self._rooms[room] = (
                torch.zeros(room, dtype=torch.uint8),
                [torch.zeros(room, dtype=torch.uint8)
                 for _ in range(self.size)])
        own, others = self._rooms[room]
        if room != _ROOM:       # of this size only once
            del self._rooms[room]
        data = np.frombuffer(len(payload).to_bytes(8, "little")
                             + payload[:room - 8], np.uint8)
        own.numpy()[:len(data)] = data
        self._begin(dist.all_gather, others, own)
        every = [x.numpy().tobytes() for x in others]
        sizes = [int.from_bytes(x[:8], "little") for x in every]
        return [(n, x[8:8 + n]) for n, x in zip(sizes, every)]

    def allreduce(self, arrays: Sequence[np.ndarray], op: str) -> None:
        tensors = [torch.from_numpy(x) for x in arrays]
        with self._explained():
            if len(tensors) == 1:
                dist.all_reduce(tensors[0], _OPS[op])
                return
            # While one waits for the other ranks, another is added up. All
            # have ended, as `tensors` may lie in the caller's memory, before
            # the first error is raised.
            under_way, errors = [], []
            for x in tensors:
                try:
                    under_way.append(dist.all_reduce(
                        x, _OPS[op], async_op=True))
                except RuntimeError as error:
                    errors.append(error)
                    break
            for work in under_way:
                try:
                    work.wait()
                except RuntimeError as error:
                    errors.append(error)
            if errors:
                raise errors[0]

    def allreduce_native(self, x: Any, op: str) -> bool:
        if not isinstance(x, torch.Tensor) or not x.is_contiguous():
            return False
        with self._explained():
            dist.all_reduce(x.detach(), _OPS[op])
        return True

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        self._begin(dist.broadcast, torch.from_numpy(flat), root)

    def close(self, alike: bool, stays: bool = False) -> None:
        self.closed = True
        if not self.pending:    # destroying would wait for its end
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        if stays and self._serves:
            end = time.monotonic() + (_STAYS if self._posted else _STAYS_LOST)
            while time.monotonic() < end and self._ask(self._unread):
                time.sleep(0.05)
        # A thread that comes back from the library while the interpreter ends
        # aborts the process.
        if self._asking is not None:
            self._asking.join(_ANSWER)
            self.pending |= self._asking.is_alive()

    def _unread(self) -> list[int]:
        """Who may still want to know what the store has."""
        found = self._absent(f"{self._key}/read")
        for key in ("note",) if self._posted else ("note", "waits"):
            found = [rank for rank in found
                     if rank not in (self.rank, *self._gone)
                     and not self._store.check([f"{self._key}/{key}/{rank}"])]
        return found


def _agent() -> bool:
    """Whether an agent of torchrun serves the store, and keeps it from one
    attempt to the next."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _ranks(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") \
        + ", ".join(map(str, numbers))


def _is_loopback(host: str) -> bool:
    """Whether `host` is this machine alone."""
    return host == "localhost" or host.startswith("127.") or host == "::1"
