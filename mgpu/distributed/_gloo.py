"""``torch.distributed`` as the engine: gloo on CPUs, NCCL on CUDA cards."""
import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
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
_ROLL_CALL = 1.0


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
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not restarts:
        _say_once(agent, _is_loopback(host))
    if _is_loopback(host):      # else gloo takes that of the machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = _open_store(host, port, rank, size, start_timeout, agent)
    except Exception as error:
        raise WorkerLost(
            f"rank {rank} finds the store of the job at {host}:{port} within "
            f"{start_timeout:g} s; it does not ({error}). Start rank 0, and "
            "give all ranks its address and a free port.") from error
    return Gloo(rank, size, store, timeout, start_timeout)


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
                 start_timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store = store
        self._rooms: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        wanted = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() \
            and dist.is_nccl_available() else "gloo"
        self._meet(start_timeout)
        dist.init_process_group(
            wanted, store=store, rank=rank, world_size=size,
            timeout=timedelta(seconds=timeout))

    def _meet(self, limit: float) -> None:
        """Wait for all ranks to be there, and name those that are not."""
        self._store.set(f"mgpu/here/{self.rank}", b"1")
        end = time.monotonic() + limit
        for rank in range(self.size):
            key = f"mgpu/here/{rank}"
            try:
                left = max(0.01, end - time.monotonic())
                self._store.wait([key], timedelta(seconds=left))
            except Exception as error:
                missing = self._absent("mgpu/here")
                raise WorkerLost(
                    f"all {self.size} ranks start within {limit:g} s; rank "
                    f"{self.rank} misses {_ranks(missing)}. Start them, with "
                    "the same address, port and number of ranks "
                    "(start_timeout= of mgpu.distributed.init gives them "
                    "longer).") from error

    def _absent(self, key: str) -> list[int]:
        try:
            return [rank for rank in range(self.size)
                    if not self._store.check([f"{key}/{rank}"])]
        except Exception:   # rank 0 served it, and has ended
            return [0]

    @contextlib.contextmanager
    def _explained(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> WorkerLost:
        key, absent = "mgpu/waits", [0]
        with contextlib.suppress(Exception):
            self._store.set(f"{key}/{self.rank}", b"1")
        end = time.monotonic() + _ROLL_CALL
        while time.monotonic() < end:
            absent = self._absent(key)
            if not absent or self.rank and absent == [0]:
                break
            time.sleep(0.02)
        text = " ".join(str(error).split())
        slow = "timed out" in text.lower()
        return WorkerLost(
            f"rank {self.rank} works with {self.size - 1} others; "
            f"{_ranks(absent) if absent else 'one of them'} "
            + (f"did not answer within {self.timeout:g} s" if slow
               else "has ended")
            + f" ({text[:200]}). Look at its log, and start the job again "
            "(mgpu launch --max-restarts does), from a checkpoint.")

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
        with self._explained():
            dist.all_gather(others, own)
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
        with self._explained():
            dist.broadcast(torch.from_numpy(flat), root)

    def close(self, alike: bool) -> None:
        # abort: destroying a group waits for ranks that may not be there.
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _ranks(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") \
        + ", ".join(map(str, numbers))


def _is_loopback(host: str) -> bool:
    """Whether `host` is this machine alone."""
    return host == "localhost" or host.startswith("127.") or host == "::1"
