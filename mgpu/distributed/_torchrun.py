"""torchrun's agent: it starts the processes of this machine, watches them,
and starts all again where one fails."""
import contextlib
import errno
import fcntl
import io
import logging
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (RunResult, WorkerGroup,
                                                        WorkerSpec)
from torch.distributed.elastic.agent.server.local_elastic_agent import (
    LocalElasticAgent)
from torch.distributed.elastic.multiprocessing import (LogsDest, LogsSpecs,
                                                       SignalException)
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler, RendezvousTimeout)

from mgpu.distributed._gloo import listening, own_address
from mgpu.distributed.launch import Job, verdict
from mgpu.distributed.world import UNJOINED, in_words

#: seconds that the other ranks have to notice a failure, and to end
_NOTICE = 3.0
#: seconds from SIGTERM to SIGKILL: after a failure, and after a signal
_END, _END_BY_SIGNAL = 3, 8
#: seconds that the machine with the store waits for the others to leave it
_LEAVE = 3.0
#: seconds between the signs of life of a machine; after three it is lost
_ALIVE = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

#: A process runs this first: where the launcher dies, the system ends it.
#: That lasts over execv.
_BEGIN = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)      # PR_SET_PDEATHSIG
if os.getppid() != int(parent):
    sys.exit("the launcher has ended")
os.execv(command[0], command)
"""


def run(job: Job) -> int:
    """Run the processes of `job` on this machine; the status."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    agent, stays = None, False
    with _settings():
        try:
            agent = _Agent(job, _rendezvous(job))
            result = agent.run()
            # None: the requested machines are complete without this one.
            return 1 if result is None or result.is_failed() \
                or not job.joined() else 0
        except SignalException as error:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            job.say(f"ended by {signal.Signals(error.sigval).name}")
            # After SIGTERM another machine may take the place of this one.
            stays = error.sigval != signal.SIGINT
            return 128 + int(error.sigval)
        except (RendezvousError, dist.DistError) as error:
            job.say(f"{job.machines} machines must connect at "
                    f"{':'.join(map(str, job.rdzv or ()))} within "
                    f"{job.start_timeout:g} s, and stay; they did not "
                    f"({' '.join(in_words(error).split())[:200]}). Start "
                    "them again, all with the same --nnodes and "
                    "--rdzv-endpoint.")
            return 1
        finally:
            if agent is not None:
                agent.leave(stays)
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Workers find each other by a store of their own, which a restart makes
    anew: in that of the agent they would find addresses of the last time. The
    agent's own log is silent; `_Agent` says what it says, in order. What it
    copies from rank 0 is shown at once."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with mock.patch.dict(os.environ,
                             TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"):
            yield
    finally:
        logging.disable(level)


class _Rendezvous(DynamicRendezvousHandler):
    """The machines connect to a store on one of them. That machine leaves
    last: the others need its store."""

    #: number of machines that leave before this one
    waits_for = 0

    def shutdown(self) -> bool:
        done = super().shutdown()
        with contextlib.suppress(dist.DistError):
            left = self._store.add("mgpu/left", 1)
            end = time.monotonic() + _LEAVE
            while left <= self.waits_for and time.monotonic() < end:
                time.sleep(0.02)
                left = self._store.add("mgpu/left", 0)
        return done


def _rendezvous(job: Job) -> _Rendezvous:
    """Connect the machines of the job at the address of one of them, which
    listens there and nowhere else. A single machine uses loopback."""
    host, port = job.rdzv or ("127.0.0.1", 0)
    more: dict[str, Any] = {}
    try:
        own = own_address(host)
        with listening(host, port) as server:
            port = server.getsockname()[1]
            more["master_listen_fd"] = server.detach()
    except socket.gaierror as error:
        raise ValueError("--rdzv-endpoint names a machine; "
                         f"{host!r} is not known here ({error}).") from error
    except OSError as error:
        # another machine's address, or this one listens there already
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
    store = dist.TCPStore(host, port, None, bool(more),
                          timedelta(seconds=job.start_timeout),
                          wait_for_workers=False, **more)
    interface = _interface(own)
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        # else gloo takes that of the machine's name, perhaps loopback
        job.variables["GLOO_SOCKET_IFNAME"] = interface
    found = _Rendezvous.from_backend(
        "mgpu", store, C10dRendezvousBackend(store, "mgpu"), job.machines,
        job.machines, own, RendezvousTimeout(
            timedelta(seconds=job.start_timeout)),
        keep_alive_interval=_ALIVE)
    found.waits_for = job.machines - 1 if more else 0
    return found


def _interface(address: str) -> str | None:
    """The name of the network interface with this IPv4 address."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):      # it has none
                found = fcntl.ioctl(probe, 0x8915, struct.pack(
                    "256s", name.encode()[:15]))    # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


class _Logs(LogsSpecs):
    """The files of each rank, by its number among all, of which those of rank
    0 are shown; and what else its environment has."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job, self._starts = job, 0

    @property
    def root_log_dir(self) -> str:
        return str(self._job.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        more = f".restart-{self._starts}" if self._starts else ""
        files: dict[str, dict[int, str]] = {}
        for local, env in envs.items():
            env.update(self._job.variables)
            name = f"rank-{env['RANK']}"
            if int(env["WORLD_SIZE"]) > 1:
                mark = self._job.folder / f"{name}.unjoined"
                mark.touch()
                env[UNJOINED] = str(mark)
                self._job.unjoined.add(mark)
            if not more:    # an earlier job may have had this folder
                for old in self._job.folder.glob(f"{name}.restart-*.*"):
                    old.unlink()
            for end in ("out", "err"):
                files.setdefault(end, {})[local] = str(
                    self._job.folder / f"{name}{more}.{end}")
        self._starts += 1
        self._job.errors = {int(env["RANK"]): files["err"][local]
                            for local, env in envs.items()}
        shown = [{local: path for local, path in one.items()
                  if envs[local]["RANK"] == "0"} for one in files.values()]
        return LogsDest(files["out"], files["err"], *shown,
                        dict.fromkeys(envs, os.devnull))


class _Agent(LocalElasticAgent):
    """torchrun's agent. Where a rank fails, the others have time to notice,
    so that their logs tell; then all are ended."""

    def __init__(self, job: Job, rendezvous: RendezvousHandler) -> None:
        self._job, self._rendezvous_handler = job, rendezvous
        # The agent replaces $ in arguments.
        command = [str(os.getpid()), sys.executable, "-u", job.script,
                   *job.arguments]
        # A line of rank 0 is shown behind its role, which is "".
        super().__init__(WorkerSpec(
            role="", local_world_size=job.processes,
            entrypoint=sys.executable, args=(
                "-I", "-S", "-c", _BEGIN,
                *(text.replace("$", "$$") for text in command)),
            rdzv_handler=rendezvous, max_restarts=job.max_restarts,
            monitor_interval=0.1), _Logs(job),
            log_line_prefix_template="${role_name}",
            shutdown_timeout=_END_BY_SIGNAL)

    def _processes(self) -> dict[int, Any]:
        """The process of each rank."""
        handlers: dict[int, Any] = getattr(
            self._pcontext, "subprocess_handlers", {})
        return {worker.global_rank: handlers[worker.local_rank].proc
                for worker in self._worker_group.workers
                if worker.local_rank in handlers}

    def _statuses(self) -> dict[int, int | None]:
        return {rank: process.poll()
                for rank, process in self._processes().items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        statuses, end = self._statuses(), time.monotonic() + _NOTICE
        if any(statuses.values()):
            while None in statuses.values() and time.monotonic() < end:
                time.sleep(0.05)
                statuses = self._statuses()
            self._end(signal.SIGTERM, _END)
            for line in verdict(statuses, self._job.errors):
                self._job.say(line)
            if self._remaining_restarts:
                self._job.say(
                    "all processes start again, restart "
                    f"{1 + self._job.max_restarts - self._remaining_restarts}"
                    f" of {self._job.max_restarts}")
        return super()._monitor_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM,
                  timeout: int = _END) -> None:
        self._end(death_sig, min(timeout, _END_BY_SIGNAL))
        super()._shutdown(death_sig, 1)

    def _end(self, how: signal.Signals, seconds: int) -> None:
        """End all processes, and those that they have started."""
        if self._pcontext is None:
            return
        self._pcontext.close(how, seconds)
        for process in self._processes().values():
            # The group has its number from a process that has ended. While
            # it has members, no other process gets that number.
            if os.path.exists("/proc/self") and not os.path.exists(
                    f"/proc/{process.pid}"):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def leave(self, stays: bool) -> None:
        """End what is left and, unless the job `stays`, end it on the other
        machines."""
        self._end(signal.SIGKILL, 1)
        if not stays:
            with contextlib.suppress(RendezvousError):
                self._rendezvous_handler.shutdown()
