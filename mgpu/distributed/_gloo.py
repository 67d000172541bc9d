"""``torch.distributed`` as the backend: gloo on CPUs, NCCL on CUDA cards."""
import contextlib
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mgpu.errors import WorkerLost

#: bytes of a message that go in one exchange
_ROOM = 1024
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN}
#: seconds that a rank waits for the others to say that they are there too
_ROLL_CALL = 0.6
#: seconds that a rank waits for an answer of the store
_ANSWER = 1.0
#: what a rank waits before it looks for notes of the others, and for Ctrl-C
_SLICE = timedelta(seconds=0.5)
#: seconds that who serves the store stays for the others to read there why
#: it ends, and that another one is missing
_STAYS, _STAYS_LOST = 5.0, 1.0


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` alone (torch's store itself listens on
    all addresses of the machine)."""
    return socket.create_server((host, port), family=socket.AF_INET6
                                if ":" in host else socket.AF_INET,
                                backlog=2048)


def own_address(host: str) -> str:
    """The address of this machine from which `host` is reached."""
    family, *_, address = socket.getaddrinfo(
        host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)      # sends nothing
        return str(probe.getsockname()[0])


def in_thread(call: Callable[[], Any]) -> "Future[Any]":
    """The future result of ``call()``, in a thread that may be left behind:
    no signal reaches a call that waits inside a library."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
    threading.Thread(target=run, daemon=True, name="mgpu-asks").start()
    return future


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


class Gloo:
    """A process group of ``torch.distributed``. Raises as
    `mgpu.distributed.init`. What carries sums otherwise overrides
    `allreduce`.

    An exchange raises `WorkerLost` where another process ends, or is silent
    for longer than the time-out, or has posted why it leaves; the message
    says only who, and what was seen. Whoever waits can be interrupted.

    Attributes
    ----------
    pending : bool
        Whether an exchange, or a question to the store, was left before its
        end, for which the end of the process would wait, or which it would
        not outlive.
    """

    def __init__(self, timeout: float, start_timeout: float, *, rank: int,
                 size: int, host: str, port: int, restarts: int) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.pending = self.closed = self._posted = False
        self._asking: Future[Any] | None = None
        self._gone: list[int] = []      # ranks that do not answer
        self._notes: dict[int, str] = {}
        self._key = "mgpu"
        # An agent of torchrun may serve the store.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._serves = not (agent or rank)
        loopback = host == "localhost" or host.startswith("127.") \
            or host == "::1"
        if loopback:        # else gloo takes that of the machine's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if rank == 0 and not restarts and not loopback:
            print("mgpu: processes exchange over the network. The connections "
                  "are neither encrypted nor authenticated: use a network "
                  "that only you can reach.", file=sys.stderr, flush=True)
        if rank == 0 and agent and not restarts and os.environ.get(
                "TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            print("mgpu: torchrun shares its store with the workers. Restarts "
                  "may then read addresses of the last attempt, and hang. Set "
                  "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or use mgpu launch.",
                  file=sys.stderr, flush=True)
        end = time.monotonic() + start_timeout
        try:
            self.store = in_thread(lambda: self._open_store(
                host, port, start_timeout)).result(start_timeout)
        except Exception as error:
            raise WorkerLost(
                f"rank {rank} {'serves' if self._serves else 'finds'} the "
                f"store of the job at {host}:{port} within {start_timeout:g} "
                f"s; it does not ({_short(error)}). Start rank 0, and give "
                "all ranks its address and a free port.") from error
        self._call_roll(start_timeout, end)
        cuda = torch.cuda.is_available() and dist.is_nccl_available()
        try:
            in_thread(lambda: dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo", store=self.store,
                rank=rank, world_size=size, timeout=timedelta(
                    seconds=timeout))).result(
                        max(0.0, end - time.monotonic()) + _ANSWER)
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

    def _open_store(self, host: str, port: int, seconds: float) -> Any:
        more: dict[str, Any] = {}
        if self._serves:    # the store closes the descriptor
            more = {"wait_for_workers": False,
                    "master_listen_fd": listening(host, port).detach()}
        return dist.TCPStore(host, port, self.size, self._serves,
                             timedelta(seconds=seconds), **more)

    def _call_roll(self, limit: float, end: float) -> None:
        """Wait for all ranks to be there, and name those that are not."""
        self._ask(lambda: self.store.set(f"mgpu/here/{self.rank}", b"1"))
        absent = [0]        # while the store, which rank 0 has, is silent
        while absent := self._ask(lambda: self._absent("mgpu/here"), absent):
            if time.monotonic() > end:
                raise WorkerLost(
                    f"all {self.size} ranks start within {limit:g} s; "
                    f"received no sign of {_ranks(absent)} on rank "
                    f"{self.rank}. Start them, with the same address, port "
                    "and number of ranks (start_timeout= of "
                    "mgpu.distributed.init gives them longer).")
            time.sleep(0.05)

    # -- the store: what ranks know of each other without an exchange -------

    def _ask(self, question: Callable[[], Any], default: Any = None) -> Any:
        """What the store answers. `default` where it does not, as its process
        has ended or stands still."""
        # An older question holds its lock.
        if self._asking is None or self._asking.done():
            self._asking = in_thread(question)
            with contextlib.suppress(Exception):
                return self._asking.result(_ANSWER)
        return default

    def _absent(self, key: str) -> list[int]:
        return [rank for rank in range(self.size)
                if not self.store.check([f"{key}/{rank}"])]

    def post(self, why: str) -> None:
        """Post the reason why this rank leaves, for the other ranks. Does not
        wait."""
        def post() -> None:
            self.store.set(f"{self._key}/note/{self.rank}", why)
            self.store.add(f"{self._key}/notes", 1)
        self._posted = True
        self._ask(post)

    def notes(self) -> dict[int, str]:
        """The notes of other ranks, as far as they can be read now."""
        def read() -> None:
            if self.store.add(f"{self._key}/notes", 0) > len(self._notes):
                absent = self._absent(f"{self._key}/note")
                self._notes = {
                    rank: self.store.get(f"{self._key}/note/{rank}").decode()
                    for rank in range(self.size) if rank not in absent}
                self.store.set(f"{self._key}/noticed/{self.rank}", b"1")
        self._ask(read)
        return {rank: why for rank, why in self._notes.items()
                if rank != self.rank}

    # -- exchanges ----------------------------------------------------------

    def wait(self, seconds: float, ready: Callable[[], bool],
             late: str = "") -> None:
        """Wait until ``ready()``, which itself waits a moment; not longer
        than `seconds`, nor where another rank has left. `late`: what has not
        come in time, where that is not the work of another rank."""
        end = time.monotonic() + seconds
        self.pending = True
        while not ready():
            self.check_open()
            if self.notes():
                raise WorkerLost("other ranks have left the job")
            if time.monotonic() > end:
                raise WorkerLost(late) if late else self._lost("timed out")
        self.pending = False

    def _finish(self, work: Any) -> None:
        """Wait for an exchange that has begun."""
        def ready() -> bool:
            with contextlib.suppress(RuntimeError):     # `_SLICE` is over
                work.wait(_SLICE)
            return bool(work.is_completed())
        self.wait(self.timeout + _ROLL_CALL / 2, ready)
        work.wait()     # raises what has failed

    def check_open(self) -> None:
        if self.closed:
            raise WorkerLost("this process has left the job")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Exchanges, and who does not take part where one fails. One that is
        not left to `_finish` is waited for to its end, whatever becomes of
        the job: it writes to memory that is the caller's."""
        self.check_open()
        try:
            yield
        except WorkerLost:
            raise
        except RuntimeError as error:
            raise self._lost(_short(error)) from error

    def _lost(self, text: str) -> WorkerLost:
        """The error that says who does not take part. All who notice say so,
        which leaves those that do not."""
        key, absent = f"{self._key}/noticed", [0]
        if not self.notes():    # else who serves the store need not stay
            self._ask(lambda: self.store.set(f"{key}/{self.rank}", b"1"))
        end = time.monotonic() + _ROLL_CALL
        while absent and not self.notes() and time.monotonic() < end:
            time.sleep(0.02)
            absent = self._ask(lambda: self._absent(key), [0])
        self._gone = absent
        slow = "timed out" in text.lower()
        return WorkerLost(
            f"{_ranks(absent) if absent else 'one of the others'} "
            + (f"did not answer within {self.timeout:g} s" if slow
               else "has ended") + f" ({text})")

    def allgather(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, in their order."""
        room, data = _ROOM, len(payload).to_bytes(8, "little") + payload
        while True:
            own = torch.zeros(room, dtype=torch.uint8)
            own.numpy()[:len(data)] = np.frombuffer(data, np.uint8)[:room]
            every = torch.empty(self.size, room, dtype=torch.uint8)
            with self._explained():
                self._finish(dist.all_gather(list(every), own, async_op=True))
            found = [x.numpy().tobytes() for x in every]
            ends = [8 + int.from_bytes(x[:8], "little") for x in found]
            if max(ends) <= room:
                return [x[8:end] for x, end in zip(found, ends)]
            room = max(ends)

    def allreduce(self, arrays: Sequence[np.ndarray], op: str) -> None:
        """Reduce each of the one-dimensional arrays over all ranks, in
        place; the same bits on each. `op`: "sum", "max" or "min". All are
        done when it returns or raises, and until then they may all be under
        way."""
        # While one waits for the other ranks, another is added up. The stack
        # waits for all, as they may lie in the caller's memory, before it
        # raises an error.
        with self._explained(), contextlib.ExitStack() as stack:
            for x in arrays:
                stack.callback(dist.all_reduce(
                    torch.from_numpy(x), _OPS[op], async_op=True).wait)

    def allreduce_native(self, x: Any, op: str) -> bool:
        """As `allreduce`, on a tensor. False where it cannot, and nothing
        was done."""
        if not isinstance(x, torch.Tensor) or not x.is_contiguous():
            return False
        with self._explained():
            dist.all_reduce(x.detach(), _OPS[op])
        return True

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        """Copy the array of rank `root` into that of all others."""
        with self._explained():
            self._finish(dist.broadcast(torch.from_numpy(flat), root,
                                        async_op=True))

    def close(self, alike: bool, stays: bool = False) -> None:
        """Close the connections. `alike`: all ranks do. Otherwise no rank is
        waited for, except, if it `stays`, some seconds in which the others
        read the notes that only it stores."""
        self.closed = True
        if not self.pending:    # destroying would wait for its end
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        if stays and self._serves:
            end = time.monotonic() + (_STAYS if self._posted else _STAYS_LOST)
            while time.monotonic() < end and {*self._ask(
                    lambda: self._absent(f"{self._key}/noticed"), ())} - {
                        self.rank, *self._gone}:
                time.sleep(0.05)
        # A thread that comes back from the library while the interpreter ends
        # aborts the process.
        if self._asking is not None:
            with contextlib.suppress(Exception):
                self._asking.result(_ANSWER)
            self.pending |= not self._asking.done()


def _ranks(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") \
        + ", ".join(map(str, numbers))
