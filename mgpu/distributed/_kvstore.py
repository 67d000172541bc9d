"""MXNet's KVStore as the engine of sums: a parameter server (Li et al.,
"Scaling Distributed Machine Learning with the Parameter Server", 2014).

Gradients are added up by a server of ``dist_sync``, in float32; all else goes
by gloo, which tells when a process is lost: the store itself waits for ever.
Rank 0 starts the scheduler and the server. They end with it.
"""
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mgpu.backends import mxnet_compat
from mgpu.distributed import _gloo
from mgpu.errors import WorkerLost

#: what a scheduler or a server runs: to import MXNet is to serve
_ROLE = "import mgpu; mgpu.mxnet_compat()"
#: seconds between two looks at the scheduler and the server
_LOOK = 0.05
#: seconds of waiting after which notes of other ranks are looked for
_NOTES = 0.5
#: seconds that a process waits for the store to end
_LEAVING = 5


def join(timeout: float, start_timeout: float, **place: Any) -> "KVStore":
    """The store of all ranks. Raises as `mgpu.distributed.init`."""
    control = _gloo.join(timeout, start_timeout, **place)
    return KVStore(control, place["host"], start_timeout)


class KVStore:
    """``dist_sync`` with ``update_on_kvstore=False``."""

    name = "kvstore"
    #: the dtypes in which sums are those of the dtype: the server adds all
    #: others in float32
    dtypes = ("float32",)

    def __init__(self, control: _gloo.Gloo, host: str, start_timeout: float
                 ) -> None:
        self._control = control
        self.rank, self.size = control.rank, control.size
        self.timeout = control.timeout
        self._held = True       # which the end of the process waits for
        self._roles: dict[str, subprocess.Popen] = {}
        self._keys: dict[int, tuple[int, Any]] = {}     # by length
        own = _own_address(host)
        port = control.allgather(str(_free_port(own)).encode())[0].decode()
        os.environ.update({
            "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port,
            "DMLC_NODE_HOST": own, "DMLC_NUM_SERVER": "1",
            "DMLC_NUM_WORKER": str(self.size), "DMLC_ROLE": "worker"})
        if self.rank == 0:
            self._roles = {role: _start(role)
                           for role in ("scheduler", "server")}
        mx = mxnet_compat()
        self._mx = mx
        self._store = self._limited(
            lambda: mx.kvstore.create("dist_sync"), start_timeout)

    @property
    def stops(self) -> Callable[[dict[int, Any]], bool]:
        return self._control.stops

    @stops.setter
    def stops(self, value: Callable[[dict[int, Any]], bool]) -> None:
        self._control.stops = value

    @property
    def pending(self) -> bool:
        return self._held or self._control.pending

    def post(self, note: Any) -> None:
        self._control.post(note)

    def notes(self) -> dict[int, Any]:
        return self._control.notes()

    def allgather(self, payload: bytes) -> list[bytes]:
        return self._control.allgather(payload)

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        self._control.broadcast(flat, root)

    def allreduce_native(self, x: Any, op: str) -> bool:
        return False

    def allreduce(self, arrays: Sequence[np.ndarray], op: str) -> None:
        for flat in arrays:
            self._allreduce(flat, op)

    def _allreduce(self, flat: np.ndarray, op: str) -> None:
        if op != "sum" or flat.dtype != np.float32:
            self._control.allreduce([flat], op)
            return

        def exchange() -> None:
            key, pulled = self._key(len(flat))
            # A copy: a pull on a CPU writes to the array that was pushed.
            self._store.push(key, self._mx.nd.array(flat, dtype="float32"))
            self._store.pull(key, out=pulled)
            flat[...] = pulled.asnumpy()
        self._limited(exchange, self.timeout)

    def _key(self, length: int) -> tuple[int, Any]:
        """The key of arrays of this length, and the array that a pull fills;
        made by all ranks in one order."""
        if length not in self._keys:
            key, empty = len(self._keys), self._mx.nd.zeros(length)
            self._store.init(key, empty)
            self._keys[length] = key, empty
        return self._keys[length]

    def _limited(self, call: Callable[[], Any], seconds: float,
                 leaving: bool = False) -> Any:
        """``call()``, in a thread that is left behind where it takes longer:
        no signal reaches a call that waits for the store. `leaving`: the
        scheduler and the server may end."""
        found: list[Any] = []
        done = threading.Event()

        def run() -> None:
            try:
                found.append((call(), None))
            except BaseException as error:
                found.append((None, error))
            done.set()
        threading.Thread(target=run, daemon=True).start()
        looked = time.monotonic()
        end = looked + seconds
        while True:
            answered = done.wait(_LOOK)
            ended = [name for name, role in self._roles.items()
                     if role.poll() is not None]
            if ended and not leaving:
                raise self._lost(f"the {' and the '.join(ended)} of the "
                                 "store has ended")
            if answered:
                break
            if self._control.closed:
                raise WorkerLost("this process has left the job")
            if time.monotonic() > looked + _NOTES and not leaving:
                looked = time.monotonic()
                if self.stops(self.notes()):
                    raise WorkerLost("other ranks have left the job")
            if time.monotonic() > end:
                raise self._lost(f"the store did not answer within "
                                 f"{seconds:g} s")
        result, error = found[0]
        if error is not None:
            raise error
        return result

    @staticmethod
    def _lost(what: str) -> WorkerLost:
        return WorkerLost(f"{what} (gradients are added up in a KVStore)")

    def close(self, alike: bool, stays: bool = False) -> None:
        """`alike`: all ranks close now, and wait for each other, as the store
        does. Else this process must not wait for it."""
        if alike:
            try:        # the store's own barrier, which may last for ever
                self._limited(self._let_go, _LEAVING, leaving=True)
                self._held = False
            except WorkerLost as error:
                print(f"mgpu: {error}", file=sys.stderr)
                alike = False
        self._control.close(alike, stays)
        for role in self._roles.values():
            try:
                role.wait(_LEAVING if alike else 0)
            except subprocess.TimeoutExpired:
                role.kill()
                role.wait()

    def _let_go(self) -> None:
        self._store = None


def _start(role: str) -> subprocess.Popen:
    def with_this_process() -> None:        # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return subprocess.Popen(
        [sys.executable, "-c", _ROLE, role], preexec_fn=with_this_process,
        env={**os.environ, "DMLC_ROLE": role})


def _own_address(host: str) -> str:
    """The address of this machine towards `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))        # sends nothing
        return str(probe.getsockname()[0])


def _free_port(address: str) -> int:
    with socket.socket() as server:
        server.bind((address, 0))
        return int(server.getsockname()[1])
