"""torchrun's agent: it starts the processes of this machine, watches them,
and starts all again where one fails."""
import contextlib
import errno
import fcntl
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

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (RunResult, WorkerGroup,
                                                        WorkerSpec,
                                                        WorkerState)
from torch.distributed.elastic.agent.server.local_elastic_agent import (
    LocalElasticAgent)
from torch.distributed.elastic.multiprocessing import (LogsDest, LogsSpecs,
                                                       SignalException)
from torch.distributed.elastic.rendezvous import (RendezvousHandler,
                                                  RendezvousInfo,
                                                  RendezvousStoreInfo)
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler, RendezvousTimeout)

from mgpu.distributed._gloo import listening
from mgpu.distributed.launch import Job
from mgpu.distributed.world import in_words

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
    own = {signal_: signal.getsignal(signal_) for signal_ in _SIGNALS}
    agent, stays = None, False
    with _settings():
        try:
            agent = _Agent(job, _meeting(job) if job.rdzv else _Alone())
            result = agent.run()
            # None: the machines that were wanted are there without this one.
            status = 1 if result is None or result.is_failed() else 0
        except SignalException as error:
            for signal_ in _SIGNALS:
                signal.signal(signal_, signal.SIG_IGN)
            job.say(f"ended by {signal.Signals(error.sigval).name}")
            # After SIGTERM another machine may take the place of this one.
            stays = error.sigval != signal.SIGINT
            return 128 + int(error.sigval)
        except (RendezvousError, dist.DistError) as error:
            job.say(f"{job.machines} machines meet at "
                    f"{':'.join(map(str, job.rdzv or ()))} within "
                    f"{job.start_timeout:g} s, and stay; they do not "
                    f"({' '.join(in_words(error).split())[:200]}). Start "
                    "them again, all with the same --nnodes and --rdzv.")
            status = 1
        finally:
            if agent is not None:
                agent.leave(stays)
            for signal_, handler in own.items():
                signal.signal(signal_, handler)
    return status


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Workers find each other by a store of their own, which a restart makes
    anew: in that of the agent they would find addresses of the last time. The
    agent's own log is silent; `Job.failed` says what it says, in order."""
    name, value = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"
    before = os.environ.get(name)
    os.environ[name] = value
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(level)
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


class _Alone(RendezvousHandler):
    """One machine: it has nobody to meet, and needs no socket for it."""

    def __init__(self) -> None:
        self._store, self._round = dist.HashStore(), 0

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        with listening("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        return RendezvousInfo(
            dist.PrefixStore(str(self._round), self._store), 0, 1,
            RendezvousStoreInfo("127.0.0.1", port))

    use_agent_store = False

    def get_backend(self) -> str:
        return "mgpu"

    def get_run_id(self) -> str:
        return "mgpu"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class _Meeting(DynamicRendezvousHandler):
    """Several machines, which meet at a store that one of them has. That one
    leaves last: the others would find their store gone."""

    #: keys of the store: how many machines have come, and have left
    _CAME, _LEFT = "mgpu/came", "mgpu/left"

    _has_store = False

    def come(self, has_store: bool) -> None:
        self._has_store = has_store
        self._store.add(self._CAME, 1)

    def shutdown(self) -> bool:
        done = super().shutdown()
        with contextlib.suppress(dist.DistError):
            left = self._store.add(self._LEFT, 1)
            end = time.monotonic() + _LEAVE
            while self._has_store and left < self._store.add(self._CAME, 0) \
                    and time.monotonic() < end:
                time.sleep(0.02)
                left = self._store.add(self._LEFT, 0)
        return done


def _meeting(job: Job) -> RendezvousHandler:
    """Several machines: they meet at an address of one of them, which listens
    there and nowhere else."""
    assert job.rdzv is not None
    host, port = job.rdzv
    try:
        server = listening(host, port).detach()
    except socket.gaierror as error:
        raise ValueError(f"--rdzv names a machine; {host!r} is not known "
                         f"here ({error}).") from error
    except OSError as error:
        # another machine's address, or this one listens there already
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
        server = None
    more = {} if server is None else {"master_listen_fd": server}
    store = dist.TCPStore(host, port, None, server is not None,
                          timedelta(seconds=job.start_timeout),
                          wait_for_workers=False, **more)
    own = _own_address(host, port)
    interface = _interface(own)
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        # else gloo takes that of the machine's name, perhaps loopback
        job.variables["GLOO_SOCKET_IFNAME"] = interface
    meeting = _Meeting.from_backend(
        "mgpu", store, C10dRendezvousBackend(store, "mgpu"), job.machines,
        job.machines, own, RendezvousTimeout(
            timedelta(seconds=job.start_timeout)),
        keep_alive_interval=_ALIVE)
    meeting.come(server is not None)
    return meeting


def _own_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)      # sends nothing
        return str(probe.getsockname()[0])


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
    """The files of each rank, by its number among all; and what else its
    environment has."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    @property
    def root_log_dir(self) -> str:
        return str(self._job.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env.update(self._job.variables)
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        self._job.begin(list(ranks.values()))
        files = {local: self._job.files[rank]
                 for local, rank in ranks.items()}
        return LogsDest({i: out for i, (out, _) in files.items()},
                        {i: err for i, (_, err) in files.items()}, {}, {},
                        dict.fromkeys(files, os.devnull))


class _Agent(LocalElasticAgent):
    """torchrun's agent. Where a rank fails, the others have time to notice,
    so that their logs tell; then all are ended."""

    def __init__(self, job: Job, meeting: RendezvousHandler) -> None:
        self._job, self._meeting = job, meeting
        self._failed_at: float | None = None
        # The agent replaces $ in arguments.
        command = [str(os.getpid()), sys.executable, "-u", job.script,
                   *job.arguments]
        super().__init__(WorkerSpec(
            role="mgpu", local_world_size=job.processes,
            entrypoint=sys.executable, args=(
                "-I", "-S", "-c", _BEGIN,
                *(text.replace("$", "$$") for text in command)),
            rdzv_handler=meeting, max_restarts=job.max_restarts,
            monitor_interval=0.1), _Logs(job),
            shutdown_timeout=_END_BY_SIGNAL)

    def _processes(self) -> dict[int, Any]:
        """The process of each rank."""
        handlers: dict[int, Any] = getattr(
            self._pcontext, "subprocess_handlers", {})
        return {worker.global_rank: handlers[worker.local_rank].proc
                for worker in self._worker_group.workers
                if worker.local_rank in handlers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        statuses = {rank: process.poll()
                    for rank, process in self._processes().items()}
        if not any(statuses.values()):
            self._failed_at = None
        else:
            now = time.monotonic()
            self._failed_at = self._failed_at or now
            if None in statuses.values() \
                    and now - self._failed_at < _NOTICE:
                return RunResult(WorkerState.HEALTHY)
            self._end(signal.SIGTERM, _END)
            self._job.failed(statuses)
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
                self._meeting.shutdown()
