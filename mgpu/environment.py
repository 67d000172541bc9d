"""What mgpu reads from the environment of its process, and the packages that
it can do without.

Each variable stands here once, with its meaning and its reader. `mgpu doctor`,
README's table and the guide are made from `VARIABLES`.
"""
import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple


class Variable(NamedTuple):
    """One environment variable.

    Attributes
    ----------
    name : str
    meaning : str
        What it sets, and what holds without it.
    read : callable
        ``read()`` returns its value now, checked; ValueError for a value
        that it cannot have.
    """

    name: str
    meaning: str
    read: Callable[[], Any]


def _text(name: str) -> str | None:
    return os.environ.get(name) or None


def flag(name: str) -> bool:
    """Whether the variable `name` is ``1`` now. Unset, empty and ``0`` mean
    no; ValueError for any other value."""
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{name} must be 0 or 1; received {text!r}. Unset "
                         "it, or set it to one of them.")
    return text == "1"


def _count(name: str) -> int | None:
    text = os.environ.get(name)
    if text and (not text.isdecimal() or int(text) < 1):
        raise ValueError(f"{name} must be a whole number, 1 or more; received "
                         f"{text!r}. Unset it, or set it to such a number.")
    return int(text) if text else None


#: the value of each variable now, checked; None where it is not set
backend = partial(_text, "MGPU_BACKEND")
data_folder = partial(_text, "MGPU_DATA")
debug = partial(flag, "MGPU_DEBUG")
engine = partial(_text, "MGPU_ENGINE")
logical_gpus = partial(_count, "MGPU_LOGICAL_GPUS")
strict_devices = partial(flag, "MGPU_STRICT_DEVICES")


def keep_memory() -> bool:
    """``MGPU_KEEP_MEMORY``: ``0`` says no, unset and empty yes."""
    return not os.environ.get("MGPU_KEEP_MEMORY") \
        or flag("MGPU_KEEP_MEMORY")


def timeout() -> float | None:
    """``MGPU_TIMEOUT``, or None. ValueError for another value than a number
    above 0."""
    text = os.environ.get("MGPU_TIMEOUT")
    if not text:
        return None
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ValueError("MGPU_TIMEOUT must be a number above 0; received "
                     f"{text!r}. Unset it, or set it to such a number.")


def threads_per_device() -> int:
    """``MGPU_THREADS_PER_DEVICE``: cores that one logical CPU device computes
    on. ValueError for another value than a whole number, 1 or more."""
    return _count("MGPU_THREADS_PER_DEVICE") or 1


VARIABLES = (
    Variable("MGPU_BACKEND", "The engine of a script that chooses none: "
             "`mxnet` or `torch`. Without it: the one that is installed, "
             "MXNet where both are.", backend),
    Variable("MGPU_DATA", "The folder with the IDX files of Fashion-MNIST. "
             "Without it: a folder in the user's cache.", data_folder),
    Variable("MGPU_THREADS_PER_DEVICE", "CPU cores of each of several logical "
             "CPU devices on torch. Without it: 1, as on MXNet.",
             threads_per_device),
    Variable("MGPU_LOGICAL_GPUS", "On torch: this many logical GPUs share the "
             "physical GPUs. Without it: the physical GPUs only.",
             logical_gpus),
    Variable("MGPU_STRICT_DEVICES", "`1`: the whole process runs inside "
             "`mgpu.strict_devices`.", strict_devices),
    Variable("MGPU_DEBUG", "`1`: after each step, compare the processes' "
             "parameters; compare the first outputs of a `DataParallel` with "
             "one device.", debug),
    Variable("MGPU_KEEP_MEMORY", "`0`: leave the C library's allocator as it "
             "is. Without it: a process that has loaded an engine keeps the "
             "memory that it frees, until a training ends.", keep_memory),
    Variable("MGPU_ENGINE", "What adds up gradients over processes: `torch` "
             "or `kvstore`. Without it: `torch`.", engine),
    Variable("MGPU_TIMEOUT", "Seconds that a process may be silent, in a "
             "script that does not say. Without it: 300.", timeout),
    Variable("MGPU_TEST_BACKENDS", "The engines that mgpu's own tests run on, "
             "with commas between them. Without it: both.",
             partial(_text, "MGPU_TEST_BACKENDS")),
)


def table() -> str:
    """`VARIABLES` as a Markdown table."""
    rows = ["| variable | meaning |", "|---|---|"]
    rows += [f"| `{v.name}` | {v.meaning} |" for v in VARIABLES]
    return "\n".join(rows) + "\n"


def package(name: str, user: str, *modules: str) -> Any:
    """The optional package `name`, with these modules of it loaded.
    ImportError with the cure where it is missing; `user`: what needs it."""
    try:
        for module in (name, *modules):
            importlib.import_module(module)
        return sys.modules[name]
    except ImportError as error:
        raise ImportError(f"{user} needs {name} ({error}). Run pip install "
                          f"{name}.", name=error.name) from error


def cpu_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
