"""The registry of backends: which one is in use; it is loaded on first use.

No module of `mgpu`, except the backends' own, imports a framework when it is
imported.
"""
import contextlib
import importlib
import functools
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple

from mgpu.backends._allocator import give_back as give_back
from mgpu.backends.base import Backend, Given
from mgpu.errors import BackendNotAvailable
from mgpu.utils import environment


class Entry(NamedTuple):
    """Where a backend lives, and what it needs."""

    module: str         # the module whose BACKEND is the Backend class
    framework: str      # the package that it needs
    packages: str       # what pip installs for it
    newest_python: tuple[int, int] | None = None    # that has wheels
    cpu_only: str = ""      # the command for a build without CUDA

    def has_wheels(self) -> bool:
        """Whether pip can install the framework on this Python."""
        return not self.newest_python \
            or sys.version_info[:2] <= self.newest_python

    def cure(self) -> str:
        """The command that installs the framework, or why there is none."""
        if not self.has_wheels():
            newest = ".".join(map(str, self.newest_python or ()))
            return (f"{self.framework} has no wheels for this Python; use "
                    f"3.10 to {newest}, then pip install {self.packages}")
        return f"pip install {self.packages}"


ENTRIES: dict[str, Entry] = {
    "mxnet": Entry("mgpu.backends._mxnet.backend", "mxnet",
                   "mxnet==1.9.1 'numpy<2' setuptools", (3, 12)),
    "torch": Entry("mgpu.backends._torch.backend", "torch", "torch", cpu_only=
                   "pip install torch --index-url "
                   "https://download.pytorch.org/whl/cpu"),
}
ALIASES = {"gluon": "mxnet", "pytorch": "torch"}
NAMES = tuple(ENTRIES)

_instances: dict[str, Backend] = {}
_loading = threading.Lock()
_chosen: str | None = None      # by set_backend: all threads, all cells
_installed: str | None = None   # the first one that is; looked up once
_inferred: str | None = None    # of the last network, where none is chosen
_scoped: ContextVar[str | None] = ContextVar("mgpu_backend", default=None)


def canonical(name: str) -> str:
    """The backend that `name`, or an alias, stands for; else ValueError."""
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
                cures = ["Run " * entry.has_wheels() + entry.cure(), *(
                    f"switch with mgpu.set_backend({other!r})"
                    for other in available_backends() if other != name)]
                raise BackendNotAvailable(
                    f"the {name!r} backend cannot be loaded ({error}). "
                    f"{', or '.join(cures)}.") from error
            _instances[name] = module.BACKEND()
        return _instances[name]


def set_backend(name: str) -> None:
    """Choose the backend for every thread, until the next `set_backend`.

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
    """Use the backend `name` inside a ``with`` block, in this context only.

    That is a `contextvars` context, which threads started by `mgpu.parallel`
    inherit. The earlier choice comes back at the end of the block, also after
    an error. Raises as `set_backend` does.
    """
    name = canonical(name)
    backend = _load(name)
    token = _scoped.set(name)
    try:
        yield backend
    finally:
        _scoped.reset(token)


def in_use(backend: Backend) -> contextlib.AbstractContextManager[Backend]:
    """`using_backend`, unless the code around does that."""
    return contextlib.nullcontext(backend) if _scoped.get() == backend.name \
        else using_backend(backend.name)


def default_backend() -> str:
    """The name of the backend that a script uses without choosing one.

    It is the environment variable ``MGPU_BACKEND``; without it, the backend
    of the last network that was given to `initialize` or `DataParallel`; the
    one that is installed, ``"mxnet"`` where both are; the one that can be
    installed on this Python, ``"mxnet"`` first. Loads nothing. ValueError for
    an unknown ``MGPU_BACKEND``.
    """
    global _installed
    named = environment.backend() or _inferred
    if named is not None:
        return canonical(named)
    if _installed is None:
        _installed = next(iter(available_backends()), None)
    return _installed or next(name for name, entry in ENTRIES.items()
                              if entry.has_wheels())


def get_backend() -> Backend:
    """The backend in use: that of the innermost `using_backend`, else of
    `set_backend`, else `default_backend`. Loads it on first use.

    Raises
    ------
    BackendNotAvailable
        Its framework is not installed or does not load. mgpu never falls
        back to another backend than the one that was named.
    """
    name = _scoped.get() or _chosen or default_backend()
    return _instances.get(name) or _load(name)


def backend_of(net: Any) -> str:
    """The name of the backend that a native network belongs to. Loads
    nothing.

    Raises
    ------
    TypeError
        It is not a network of either framework.
    """
    roots = {cls.__module__.partition(".")[0] for cls in type(net).__mro__}
    for name, entry in ENTRIES.items():
        if entry.framework in roots:
            return name
    raise TypeError(
        "expected a gluon.Block or a torch.nn.Module; received "
        f"{type(net).__module__}.{type(net).__name__}. Pass the network "
        "itself, or a function without arguments that makes it.")


def backend_for(net: Any) -> Backend:
    """The backend in use. Where neither the script nor ``MGPU_BACKEND`` has
    chosen one, that of `net` becomes it."""
    global _inferred
    if not (_scoped.get() or _chosen or environment.backend()):
        with contextlib.suppress(TypeError):    # not a network
            _inferred = backend_of(net)
    return get_backend()


def given(x: Any) -> Given | None:
    """Who knows what `x`, an object or a function, is in mgpu's terms: the
    backend of the framework that made its class, or that it stands in; None
    where that is neither. A `functools.partial` is what its function is. Loads
    that backend's `given` only."""
    while isinstance(x, functools.partial):
        x = x.func
    places = [cls.__module__ for cls in type(x).__mro__]
    places.append(getattr(x, "__module__", None) or "")
    roots = {place.partition(".")[0] for place in places}
    for entry in ENTRIES.values():
        if entry.framework in roots:
            module = importlib.import_module(
                entry.module.rpartition(".")[0] + ".given")
            known: Given = module.GIVEN
            return known
    return None


def mxnet_compat() -> ModuleType:
    """Import MXNet 1.9.1 under a NumPy that it was not written for.

    A plain ``import mxnet`` fails with NumPy 1.24 or newer: *AttributeError:
    module 'numpy' has no attribute 'bool'*. MXNet reads aliases that NumPy
    has removed. Write this line first, and ``import mxnet`` works, here and
    in every module that is imported later::

        mgpu.mxnet_compat()
        import mxnet as mx

    It also works after an ``import mxnet`` that has failed. The aliases exist
    only while MXNet is imported; NumPy is then as it was before. Choosing the
    backend (``mgpu.set_backend("mxnet")``, or any call that loads it) does the
    same. MXNet gets mgpu's settings: one OpenMP thread for each CPU context.

    Returns
    -------
    module
        ``mxnet``.

    Raises
    ------
    BackendNotAvailable
        MXNet is not installed, or NumPy is 2 or newer.
    """
    _load("mxnet")
    return sys.modules["mxnet"]


def recording_elsewhere(backend: Backend) -> str | None:
    """The name of another backend that records in this thread while `backend`
    does not, so that what `backend` computes would not be recorded; else
    None."""
    if backend.is_recording():
        return None
    return next((name for name, other in _instances.items()
                 if other is not backend and other.is_recording()), None)


def available_backends() -> list[str]:
    """The names of the backends whose framework is installed. Imports
    nothing; ``mgpu doctor`` tells whether an installed one also loads."""
    found = []
    for name, entry in ENTRIES.items():
        # An error: it is hidden, or there is a stand-in for it.
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(entry.framework) is not None:
                found.append(name)
    return found


def loaded_backends() -> list[Backend]:
    """The backends that this process has loaded so far."""
    return list(_instances.values())
