"""MXNet's KVStore as the backend of sums: a parameter server (Li et al.,
"Scaling Distributed Machine Learning with the Parameter Server", 2014).

Gradients are added up by a server of ``dist_sync``, in float32; all else goes
by gloo, which tells when a process is lost: the store itself waits for ever.
Rank 0 starts the scheduler and the server. They end with it.
"""
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from typing import Any

import numpy as np

from mgpu.backends import mxnet_compat
from mgpu.distributed._gloo import Gloo, in_thread, listening, own_address
from mgpu.errors import WorkerLost

#: what a scheduler or a server runs: to import MXNet is to serve
_ROLE = "import mgpu; mgpu.mxnet_compat()"
_STORE = "gradients are added up in a KVStore"
#: seconds between two looks at the scheduler, the server and the notes of
#: other ranks
_LOOK = 0.05
#: seconds that a process waits for the store to end
_LEAVING = 5


class KVStore(Gloo):
    """``dist_sync`` with ``update_on_kvstore=False``."""

    def __init__(self, timeout: float, start_timeout: float, **place: Any
                 ) -> None:
        super().__init__(timeout, start_timeout, **place)
        self._roles: dict[str, subprocess.Popen] = {}
        self._keys: dict[int, tuple[int, Any]] = {}     # by length
        own = own_address(place["host"])
        with listening(own, 0) as free:
            port = free.getsockname()[1]
        os.environ.update({
            "DMLC_PS_ROOT_URI": place["host"],
            "DMLC_PS_ROOT_PORT": self.allgather(b"%d" % port)[0].decode(),
            "DMLC_NODE_HOST": own, "DMLC_NUM_SERVER": "1",
            "DMLC_NUM_WORKER": str(self.size), "DMLC_ROLE": "worker"})
        if self.rank == 0:
            self._roles = {role: _start(role)
                           for role in ("scheduler", "server")}
        self._mx = mxnet_compat()
        self._kvstore = self._limited(
            lambda: self._mx.kvstore.create("dist_sync"), start_timeout)

    def allreduce(self, arrays: Sequence[np.ndarray], op: str) -> None:
        for flat in arrays:     # the server would round all other dtypes
            if op == "sum" and flat.dtype == np.float32:
                self._limited(partial(self._sum, flat), self.timeout)
            else:
                super().allreduce([flat], op)

    def _sum(self, flat: np.ndarray) -> None:
        # A key for each length; all ranks make them in one order.
        if len(flat) not in self._keys:
            key, pulled = len(self._keys), self._mx.nd.zeros(len(flat))
            self._kvstore.init(key, pulled)
            self._keys[len(flat)] = key, pulled
        key, pulled = self._keys[len(flat)]
        # A copy: a pull on a CPU writes to the array that was pushed.
        self._kvstore.push(key, self._mx.nd.array(flat, dtype="float32"))
        self._kvstore.pull(key, out=pulled)
        flat[...] = pulled.asnumpy()

    def _limited(self, call: Callable[[], Any], seconds: float,
                 leaving: bool = False) -> Any:
        """``call()``, which waits for the store, and is left behind where it
        takes longer. `leaving`: the scheduler and the server may end."""
        future = in_thread(call)

        def ready() -> bool:
            futures.wait([future], _LOOK)
            ended = [name for name, role in self._roles.items()
                     if role.poll() is not None]
            if ended and not leaving:
                raise WorkerLost(f"the {' and the '.join(ended)} of the store "
                                 f"has ended ({_STORE})")
            return future.done()
        self.wait(seconds, ready, "the store did not answer within "
                  f"{seconds:g} s ({_STORE})")
        return future.result()

    def close(self, alike: bool, stays: bool = False) -> None:
        """`alike`: all ranks close now, and wait for each other, as the store
        does. Else this process must not wait for it."""
        if alike:
            try:        # the store's own barrier, which may last for ever
                self._limited(self._let_go, _LEAVING, leaving=True)
            except WorkerLost as error:
                print(f"mgpu: {error}", file=sys.stderr)
                alike = False
        super().close(alike, stays)
        self.pending |= not alike
        for role in self._roles.values():
            try:
                role.wait(_LEAVING if alike else 0)
            except subprocess.TimeoutExpired:
                role.kill()
                role.wait()

    def _let_go(self) -> None:
        self._kvstore = None


def _start(role: str) -> subprocess.Popen:
    def with_this_process() -> None:        # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return subprocess.Popen(
        [sys.executable, "-c", _ROLE, role], preexec_fn=with_this_process,
        env={**os.environ, "DMLC_ROLE": role})
