"""The registry of engines: which backend is meant now, loaded on first use.

Nothing here, and nothing in `mgpu` outside this package, imports a framework
when it is imported.
"""
import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from mgpu import environment
from mgpu.backends.base import Backend


class BackendNotAvailable(ImportError):
    """A backend was asked for and its framework cannot be loaded."""


class Entry(NamedTuple):
    """Where a backend lives, and what it needs."""

    module: str         # where the Backend class lives, as BACKEND
    framework: str      # the package that it needs
    packages: str       # what pip installs for it
    newest_python: tuple[int, int] | None = None    # with wheels

    def cure(self) -> str:
        """What makes the framework available to this Python."""
        if self.newest_python and sys.version_info[:2] > self.newest_python:
            newest = ".".join(map(str, self.newest_python))
            return (f"{self.framework} has no wheels for Python "
                    f"{sys.version_info[0]}.{sys.version_info[1]}; use "
                    f"Python 3.10 to {newest}, then pip install "
                    f"{self.packages}")
        return f"pip install {self.packages}"


ENTRIES: dict[str, Entry] = {
    "mxnet": Entry("mgpu.backends._mxnet.backend", "mxnet",
                   "mxnet==1.9.1 'numpy<2' setuptools", (3, 12)),
    "torch": Entry("mgpu.backends._torch.backend", "torch", "torch"),
}
ALIASES = {"gluon": "mxnet", "pytorch": "torch"}
NAMES = tuple(ENTRIES)

_instances: dict[str, Backend] = {}
_loading = threading.Lock()
_chosen: str | None = None      # by set_backend: all threads, all cells
_installed: str | None = None   # the first that is; looked for once
_scoped: ContextVar[str | None] = ContextVar("mgpu_backend", default=None)


def canonical(name: str) -> str:
    """The backend that `name` or an alias means; ValueError if none."""
    found = ALIASES.get(name, name) if isinstance(name, str) else None
    if found not in ENTRIES:
        raise ValueError(
            f"unknown backend; received {name!r}. Use one of "
            f"{', '.join(map(repr, [*ENTRIES, *ALIASES]))}.")
    return found


def _load(name: str) -> Backend:
    with _loading:
        if name not in _instances:
            entry = ENTRIES[name]
            try:
                module = importlib.import_module(entry.module)
            except (ImportError, OSError) as error:
                others = [n for n in available_backends() if n != name]
                switch = f", or switch with mgpu.set_backend({others[0]!r})" \
                    if others else ""
                cure = entry.cure()
                cure = cure if cure.startswith(entry.framework) \
                    else f"Run {cure}"
                raise BackendNotAvailable(
                    f"the {name!r} backend cannot be loaded ({error}). "
                    f"{cure}{switch}.") from error
            _instances[name] = module.BACKEND()
        return _instances[name]


def set_backend(name: str) -> None:
    """Choose the engine for every thread, until the next `set_backend`.

    Loads the framework now, so that a missing one is an error here.

    Parameters
    ----------
    name : str
        ``"mxnet"`` (alias ``"gluon"``) or ``"torch"`` (alias ``"pytorch"``).

    Raises
    ------
    ValueError
        Another name.
    BackendNotAvailable
        The framework is not installed or does not load.
    """
    global _chosen
    name = canonical(name)
    _load(name)
    _chosen = name


@contextlib.contextmanager
def using_backend(name: str) -> Iterator[Backend]:
    """Use the engine `name` inside a ``with`` block, in this context only
    (a `contextvars` context: threads started by `mgpu.parallel` inherit
    it). Raises as `set_backend` does. The earlier choice comes back at the
    end of the block, also after an error."""
    name = canonical(name)
    backend = _load(name)
    token = _scoped.set(name)
    try:
        yield backend
    finally:
        _scoped.reset(token)


def default_backend() -> str:
    """The name of the engine of a script that chooses none: the environment
    variable ``MGPU_BACKEND``, else the one that is installed, else (both, or
    neither) ``"mxnet"``. Loads nothing; ValueError for an unknown
    ``MGPU_BACKEND``."""
    global _installed
    named = environment.backend()
    if named is not None:
        return canonical(named)
    if _installed is None:
        _installed = next(iter(available_backends()), None)
    return _installed or NAMES[0]


def get_backend() -> Backend:
    """The engine in use: that of the innermost `using_backend`, else of
    `set_backend`, else `default_backend`. Loads it on first use.

    Raises
    ------
    BackendNotAvailable
        That framework is not installed or does not load. mgpu never falls
        back to another engine than the one that was named.
    """
    name = _scoped.get() or _chosen or default_backend()
    return _instances.get(name) or _load(name)


def backend_of(net: Any) -> str:
    """The name of the backend that a native network belongs to. Loads
    nothing.

    Raises
    ------
    TypeError
        It is no network of either framework.
    """
    roots = {cls.__module__.partition(".")[0] for cls in type(net).__mro__}
    for name, entry in ENTRIES.items():
        if entry.framework in roots:
            return name
    raise TypeError(
        "expected a gluon.Block or a torch.nn.Module; received "
        f"{type(net).__module__}.{type(net).__name__}. Pass the network "
        "itself, or a function without arguments that makes it.")


def recording_elsewhere(backend: Backend) -> str | None:
    """The name of another engine that records here while `backend` does
    not: what it should record would be lost."""
    if backend.is_recording():
        return None
    return next((name for name, other in _instances.items()
                 if other is not backend and other.is_recording()), None)


def available_backends() -> list[str]:
    """The names of the backends whose framework is installed. Imports
    nothing; `mgpu doctor` tells whether an installed one also loads."""
    return [name for name, entry in ENTRIES.items()
            if importlib.util.find_spec(entry.framework) is not None]


def loaded_backends() -> list[Backend]:
    """Every engine that this process has loaded so far."""
    return list(_instances.values())
