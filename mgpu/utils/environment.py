"""Environment variables of mgpu, and optional packages.

`mgpu doctor`, README's table and the guide are generated from `VARIABLES`.
"""
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variable:
    """An environment variable. Calling it returns the current value.

    Attributes
    ----------
    name : str
    meaning : str
        The setting, and the behavior without the variable.
    parse : callable
        Converts the text to a value. Raises ValueError.
    rule : str
        Description of the accepted values.
    default : object
        Value of an unset or empty variable.
    former : str
        Name in an older version, read if `name` is unset.
    """

    name: str
    meaning: str
    parse: Callable[[str], Any] = str
    rule: str = "text"
    default: Any = None
    former: str = ""

    def read(self) -> Any:
        """The current value. Raises ValueError if it is invalid."""
        name = next(filter(os.environ.get, (self.name, self.former)), None)
        if name is None:
            return self.default
        text = os.environ[name]
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(f"{name} must be {self.rule}; received "
                             f"{text!r}. Correct it, or unset it.") from None

    __call__ = read


def flag(name: str) -> bool:
    """Whether the variable `name` is ``1``. Unset, empty and ``0`` are False;
    any other value raises ValueError."""
    return bool(_switch(name, "")())


def _one_of(*values: str) -> Callable[[str], str]:
    return lambda text: values[values.index(text)]


def _all_of(*values: str) -> Callable[[str], list[str]]:
    return lambda text: list(map(_one_of(*values), text.split(",")))


def _folder(text: str) -> str:
    if not os.path.isdir(text):
        raise ValueError
    return text


def _switch(name: str, meaning: str, default: bool = False) -> Variable:
    return Variable(name, meaning, lambda text: bool(("0", "1").index(text)),
                    "0 or 1", default)


def _number(name: str, meaning: str, parse: Callable[[str], float], rule: str,
            default: float | None = None) -> Variable:
    def positive(text: str) -> float:
        if not 0 < parse(text) < float("inf"):
            raise ValueError
        return parse(text)
    return Variable(name, meaning, positive, rule, default)


backend = Variable(
    "MGPU_BACKEND", "The backend of a script that chooses none: `mxnet` or "
    "`torch`. Without it: that of the network; where no network tells, the "
    "one that is installed, MXNet where both are.")
data_folder = Variable(
    "MGPU_DATA", "The folder with the IDX files of Fashion-MNIST. Without "
    "it: a folder in the user's cache.", _folder, "an existing folder")
threads_per_device = _number(
    "MGPU_THREADS_PER_DEVICE", "CPU cores of each of several logical CPU "
    "devices on torch. Without it: 1, as on MXNet.",
    int, "a whole number, 1 or more", 1)
logical_gpus = _number(
    "MGPU_LOGICAL_GPUS", "On torch: this many logical GPUs share the "
    "physical GPUs. Without it: the physical GPUs only.",
    int, "a whole number, 1 or more")
strict_devices = _switch(
    "MGPU_STRICT_DEVICES", "`1`: the whole process runs inside "
    "`mgpu.strict_devices`.")
debug = _switch(
    "MGPU_DEBUG", "`1`: after each step, compare the processes' parameters; "
    "compare the first outputs of a `DataParallel` with one device.")
keep_memory = _switch(
    "MGPU_KEEP_MEMORY", "`0`: leave the C library's allocator as it is. "
    "Without it: a process that has loaded a backend keeps the memory that "
    "it frees, until a training ends.", True)
comm = Variable(
    "MGPU_COMM", "The communication backend, which adds gradients over "
    "processes: `gloo` or `kvstore`. Without it: `gloo`.", _one_of(
        "gloo", "kvstore", "torch"), "gloo or kvstore", former="MGPU_ENGINE")
timeout = _number(
    "MGPU_TIMEOUT", "Seconds that a process may be silent, in a script that "
    "does not say. Without it: 300.", float, "a number above 0")

VARIABLES = (
    backend, data_folder, threads_per_device, logical_gpus, strict_devices,
    debug, keep_memory, comm, timeout, Variable(
        "MGPU_TEST_BACKENDS", "The backends that mgpu's own tests run on, "
        "with commas between them. Without it: both.", _all_of(
            "mxnet", "torch"), "mxnet, torch or mxnet,torch"))


def table() -> str:
    """`VARIABLES` as a Markdown table."""
    rows = ["| variable | meaning |", "|---|---|"]
    rows += [f"| `{v.name}` | {v.meaning} |" for v in VARIABLES]
    return "\n".join(rows) + "\n"


def package(name: str, user: str, *modules: str) -> Any:
    """Import the optional package `name` and its `modules`.

    Raises ImportError with install instructions. `user` names the feature
    that requires the package."""
    try:
        for module in (name, *modules):
            importlib.import_module(module)
        return sys.modules[name]
    except ImportError as error:
        raise ImportError(f"{user} needs {name} ({error}). Run pip install "
                          f"{name}.", name=error.name) from error


def cpu_cores() -> int:
    """Number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0))
