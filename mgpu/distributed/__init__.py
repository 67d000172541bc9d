"""Several processes, on one machine or on several, that train one network.

The same script runs in every process. One line is new, before the first
network: ``mgpu.distributed.init()``. Then `Trainer`, `train`, `train_batch`,
`evaluate_accuracy_gpus` and the batch-norm policies work over all devices of
all processes, and the data sets of `mgpu.datasets` give each process its rows
of every batch. Start the processes by ``mgpu launch -n 2 script.py`` or by
torchrun. A script that is started alone has one process, and `init` changes
nothing.

The processes exchange by ``torch.distributed`` (gloo on CPUs, NCCL on CUDA
cards), for networks of both frameworks.
"""
import atexit
import importlib
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any, NoReturn

from mgpu.distributed.world import (Span, World, current, enter, in_words,
                                    join)
from mgpu.errors import (ModelMismatch, UnevenWork, WorkerError, WorkerFailed,
                         WorkerLost)
from mgpu.utils import environment
from mgpu.utils.arguments import number, one_of

__all__ = ["ModelMismatch", "Span", "UnevenWork", "World", "WorkerError",
           "WorkerFailed", "WorkerLost", "barrier", "current", "gather",
           "init", "is_main", "local_rank", "rank", "shutdown", "world_size"]

#: the module and the class of each communication backend
COMMS = {"gloo": ("mgpu.distributed._gloo", "Gloo"),
         "kvstore": ("mgpu.distributed._kvstore", "KVStore")}
#: names of an older version
FORMER_COMMS = {"torch": "gloo"}


def rank() -> int:
    """The number of this process, from 0."""
    return current().rank


def world_size() -> int:
    """The number of processes; 1 without `init`."""
    return current().size


def local_rank() -> int:
    """The number of this process among those of its machine, from 0: which
    card to use, for example."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_main() -> bool:
    """Whether this is the process that writes files and prints: rank 0."""
    return current().is_main


def barrier() -> None:
    """Wait until all processes are here. Raises as `init` says."""
    current().gather("barrier")


def gather(value: Any) -> list[Any]:
    """Gather `value` from every rank, in the order of ranks, on all of them:
    numbers, text, lists and dicts that JSON can represent. Raises as `init`
    describes."""
    return current().gather("gather", value)


def init(*, timeout: float | None = None, start_timeout: float = 60.0,
         comm: str | None = None, engine: str | None = None) -> World:
    """Join the other processes of the job.

    Reads what torchrun and ``mgpu launch`` put into the environment: RANK,
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Without RANK there is one process,
    and nothing happens. A second call returns what the first one made.

    Parameters
    ----------
    timeout : float, optional
        Seconds that a process may be silent. Then the others raise
        `WorkerLost`. Default: as ``mgpu launch --timeout`` says, else 300.
    start_timeout : float
        Seconds within which all processes have to be there.
    comm : {"gloo", "kvstore"}, optional
        The communication backend, which adds gradients over processes: gloo
        of ``torch.distributed`` (NCCL on CUDA cards), or MXNet's KVStore for
        those of float32. Default: that of ``mgpu launch --comm``, else
        "gloo".
    engine : str, optional
        The former name of `comm`, for one version.

    Returns
    -------
    World

    Raises
    ------
    WorkerLost
        Not all processes have started; names those that are missing.
    ValueError
        An environment that is not whole, or a wrong argument.
    """
    timeout = number("timeout", environment.timeout() or 300.0
                     if timeout is None else timeout, 0)
    number("start_timeout", start_timeout, 0)
    comm = comm or engine or environment.comm() or "gloo"
    comm = one_of("comm", FORMER_COMMS.get(comm, comm), COMMS)
    join()
    if current().size > 1 or "RANK" not in os.environ:
        return current()
    own = _environment()
    if own["size"] == 1:
        return current()
    module, kind = COMMS[comm]
    world = World(getattr(importlib.import_module(module), kind)(
        timeout, start_timeout, **own), own["restarts"])
    enter(world)
    _leave_at_exit(world)
    world.agree("mgpu.distributed.init", {
        "mgpu": sys.modules["mgpu"].__version__, "timeout": timeout,
        "comm": comm}, "Use one version, and the same arguments, on every "
        "rank.")
    return world


def _environment() -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ValueError(
            "a process of a job finds RANK, WORLD_SIZE, MASTER_ADDR and "
            f"MASTER_PORT in its environment; {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing. Start it by "
            "mgpu launch or by torchrun.")
    rank, size, port = (int(os.environ[name]) for name in (
        "RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 0 <= rank < size:
        raise ValueError(f"RANK is from 0 to WORLD_SIZE - 1; received {rank} "
                         f"of {size}. Start the processes by mgpu launch.")
    return {"rank": rank, "size": size, "host": os.environ["MASTER_ADDR"],
            "port": port, "restarts": int(os.environ.get(
                "TORCHELASTIC_RESTART_COUNT", "0"))}


#: the error that ends this process, and its status, as far as they are known
_ending = SimpleNamespace(error=None, status=0)


def _leave_at_exit(world: World) -> None:
    hook, thread_hook, leave = sys.excepthook, threading.excepthook, sys.exit

    def excepthook(kind: Any, error: Any, trace: Any) -> None:
        _ending.error = in_words(error)
        _ending.status = 130 if kind is KeyboardInterrupt else 1
        hook(kind, error, trace)
        # A thread may wait for others in the place of this one.
        current().abort(error)

    def excepthook_of_thread(arguments: Any) -> None:
        if arguments.exc_value is not None:
            name = getattr(arguments.thread, "name", None)
            _ending.error = f"in the thread {name!r}, " \
                + in_words(arguments.exc_value)
        thread_hook(arguments)

    def exit_with(status: Any = None) -> NoReturn:
        _ending.status = status if isinstance(status, int) \
            else int(status is not None)
        if _ending.status:
            _ending.error = f"sys.exit({status!r})"
        leave(status)
    sys.excepthook, sys.exit = excepthook, exit_with
    threading.excepthook = excepthook_of_thread
    atexit.register(_end, world)


def _end(world: World) -> None:
    """Report to the others before the interpreter ends. A process that ends
    while others continue has done less work: exit status 1."""
    alike = shutdown() if current() is world else True
    if not alike:
        print(f"mgpu: rank {world.rank} has ended while other ranks continue: "
              "all ranks must do the same number of steps.", file=sys.stderr)
        _ending.status = _ending.status or 1
    if not alike or world.pending:
        # Else the interpreter would wait for the end of the exchange.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_ending.status)


def shutdown() -> bool:
    """Leave the job; also called at the end of a process. Returns whether no
    other rank continues. Ranks that do raise `UnevenWork`, or `WorkerLost`
    if an error ends this one."""
    world = current()
    enter(World())
    return world.leave(_ending.error)
