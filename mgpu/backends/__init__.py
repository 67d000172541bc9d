"""The registry of engines: which backend is meant now, loaded on first use.

Nothing here, and nothing in `mgpu` outside this package, imports a framework
at import time.
"""
import contextlib
import importlib
import importlib.util
import os
import threading
from contextvars import ContextVar
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from mgpu.backends._host import HostOps
from mgpu.backends.base import Backend


class BackendNotAvailable(ImportError):
    """A backend was asked for and its framework cannot be loaded."""


class _Entry(NamedTuple):
    module: str         # where the Backend class lives
    framework: str      # the package that it needs
    install: str


_BACKENDS: Dict[str, _Entry] = {
    "mxnet": _Entry("mgpu.backends._mxnet", "mxnet",
                    "pip install 'mgpu[mxnet]' (Python 3.10 to 3.12)"),
    "torch": _Entry("mgpu.backends._torch", "torch",
                    "pip install 'mgpu[torch]'"),
}
ALIASES = {"gluon": "mxnet", "pytorch": "torch"}
NAMES = tuple(_BACKENDS)
_DEFAULT = "mxnet"

HOST_OPS = HostOps()

_instances: Dict[str, Backend] = {}
_loading = threading.Lock()
_chosen: Optional[str] = None       # by set_backend: all threads, all cells
_scoped: ContextVar[Optional[str]] = ContextVar("mgpu_backend", default=None)


def _canonical(name: str) -> str:
    found = ALIASES.get(name, name) if isinstance(name, str) else None
    if found not in _BACKENDS:
        raise ValueError(
            f"unknown backend; received {name!r}. Use one of "
            f"{', '.join(map(repr, [*_BACKENDS, *ALIASES]))}.")
    return found


def _load(name: str) -> Backend:
    with _loading:
        if name not in _instances:
            entry = _BACKENDS[name]
            try:
                module = importlib.import_module(entry.module)
            except (ImportError, OSError) as error:
                others = [n for n in available_backends() if n != name]
                switch = f", or switch with mgpu.set_backend({others[0]!r})" \
                    if others else ""
                raise BackendNotAvailable(
                    f"the {name!r} backend cannot be loaded ({error}). Run "
                    f"{entry.install}{switch}.") from error
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
    name = _canonical(name)
    _load(name)
    _chosen = name


@contextlib.contextmanager
def using_backend(name: str) -> Iterator[Backend]:
    """Use the engine `name` inside a ``with`` block, in this context only
    (a `contextvars` context: threads started by `mgpu.parallel` inherit
    it). Raises as `set_backend` does; the earlier choice comes back at the
    end of the block, also after an error."""
    name = _canonical(name)
    backend = _load(name)
    token = _scoped.set(name)
    try:
        yield backend
    finally:
        _scoped.reset(token)


def get_backend() -> Backend:
    """The engine in use: that of the innermost `using_backend`, else of
    `set_backend`, else of the environment variable ``MGPU_BACKEND``, else
    ``"mxnet"``. Loads it on first use.

    Raises
    ------
    BackendNotAvailable
        That framework is not installed or does not load. There is no
        fallback to the other one.
    """
    name = _scoped.get() or _chosen
    if name is None:
        name = _canonical(os.environ.get("MGPU_BACKEND") or _DEFAULT)
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
    for name, entry in _BACKENDS.items():
        if entry.framework in roots:
            return name
    raise TypeError(
        "a gluon.Block or a torch.nn.Module is wanted; received "
        f"{type(net).__module__}.{type(net).__name__}. Pass the network "
        "itself, or a function without arguments that makes it.")


def recording_elsewhere(backend: Backend) -> Optional[str]:
    """The name of another engine that records here while `backend` does
    not: what it should record would be lost."""
    if backend.is_recording():
        return None
    return next((name for name, other in _instances.items()
                 if other is not backend and other.is_recording()), None)


def available_backends() -> List[str]:
    """The names of the backends whose framework is installed. Imports
    nothing: whether an installed one also loads, `mgpu doctor` tells."""
    return [name for name, entry in _BACKENDS.items()
            if importlib.util.find_spec(entry.framework) is not None]
