"""Registry of backends, which are loaded on first use.

Importing `mgpu` imports no framework; only the modules of a backend do.
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
from mgpu.backends.base import Backend
from mgpu.backends.native_objects import Given
from mgpu.errors import BackendNotAvailable
from mgpu.utils import environment


class Entry(NamedTuple):
    """Module and requirements of a backend."""

    module: str         # its attribute BACKEND is the Backend class
    framework: str      # package of the framework
    packages: str       # arguments of pip install
    newest_python: tuple[int, int] | None = None    # with wheels
    cpu_only: str = ""      # the command for a build without CUDA

    def has_wheels(self) -> bool:
        """Whether pip can install the framework on this Python."""
        return not self.newest_python \
            or sys.version_info[:2] <= self.newest_python

    def cure(self) -> str:
        """The command that installs the framework, or the reason why pip
        cannot."""
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
_chosen: str | None = None      # by set_backend, for all threads
_installed: str | None = None   # the first installed one; cached
_seed: int | None = None        # of backends that are loaded later
_inferred: str | None = None    # of the last network, if none is chosen
_scoped: ContextVar[str | None] = ContextVar("mgpu_backend", default=None)


def canonical(name: str) -> str:
    """The canonical name of the backend `name`, which may be an alias. Raises
    ValueError for unknown names."""
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
            if _seed is not None:
                _instances[name].seed(_seed)
        return _instances[name]


def set_backend(name: str) -> None:
    """Set the backend for all threads.

    Loads the framework.

    Parameters
    ----------
    name : str
        ``"mxnet"`` (alias ``"gluon"``) or ``"torch"`` (alias ``"pytorch"``).

    Raises
    ------
    ValueError
        `name` is unknown.
    BackendNotAvailable
        The framework is not installed or cannot be imported.
    """
    global _chosen
    name = canonical(name)
    _load(name)
    _chosen = name


@contextlib.contextmanager
def using_backend(name: str) -> Iterator[Backend]:
    """Context manager that sets the backend in the current context.

    The setting applies to the current `contextvars` context, which threads of
    `mgpu.parallel` inherit. The previous backend is restored at the end of
    the block, also after an error. Raises the errors of `set_backend`.
    """
    name = canonical(name)
    backend = _load(name)
    token = _scoped.set(name)
    try:
        yield backend
    finally:
        _scoped.reset(token)


def seed_all(seed: int) -> None:
    """Seed the current backend, all others that are loaded, and those that
    will be: a network may decide the backend later."""
    global _seed
    get_backend()       # loads it
    _seed = seed
    for backend in loaded_backends():
        backend.seed(seed)


def in_use(backend: Backend) -> contextlib.AbstractContextManager[Backend]:
    """`using_backend`, unless it is already in effect."""
    return contextlib.nullcontext(backend) if _scoped.get() == backend.name \
        else using_backend(backend.name)


def default_backend() -> str:
    """The name of the default backend. Loads nothing.

    The first of these that is available: the environment variable
    ``MGPU_BACKEND``; the backend of the last network passed to `initialize`
    or `DataParallel`; the installed backend, ``"mxnet"`` if both are; the
    backend that can be installed on this Python, ``"mxnet"`` first. Raises
    ValueError for an unknown ``MGPU_BACKEND``.
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
    """The current backend: of the innermost `using_backend`, of
    `set_backend`, or `default_backend`. Loads it on first use.

    Raises
    ------
    BackendNotAvailable
        The framework is not installed or cannot be imported. mgpu never falls
        back to another backend than the selected one.
    """
    name = _scoped.get() or _chosen or default_backend()
    return _instances.get(name) or _load(name)


def backend_of(net: Any) -> str:
    """The name of the backend of a native network. Loads nothing.

    Raises
    ------
    TypeError
        `net` is not a network of either framework.
    """
    roots = {cls.__module__.partition(".")[0] for cls in type(net).__mro__}
    for name, entry in ENTRIES.items():
        if entry.framework in roots:
            return name
    raise TypeError(
        "expected a gluon.Block or a torch.nn.Module; received "
        f"{type(net).__module__}.{type(net).__name__}. Pass the network "
        "itself, or a function without arguments that returns it.")


def backend_for(net: Any) -> Backend:
    """The current backend. If neither the script nor ``MGPU_BACKEND`` has set
    one, the backend of `net` becomes the current one."""
    global _inferred
    if not (_scoped.get() or _chosen or environment.backend()):
        with contextlib.suppress(TypeError):    # not a network
            _inferred = backend_of(net)
    return get_backend()


def given(x: Any) -> Given | None:
    """The `Given` of the backend whose framework defines `x`, an object, a
    function, or a `functools.partial` of one. None for other objects. Loads
    the `given` module of that backend only."""
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
    """Import MXNet 1.9.1 with NumPy 1.24 or newer.

    With these versions of NumPy, ``import mxnet`` raises *AttributeError:
    module 'numpy' has no attribute 'bool'*, because MXNet uses aliases that
    NumPy has removed. After this call, ``import mxnet`` works, in all
    modules::

        mgpu.mxnet_compat()
        import mxnet as mx

    The call also works after a failed ``import mxnet``. The aliases exist
    only during the import; NumPy is unchanged afterwards. Loading the MXNet
    backend, for example with ``mgpu.set_backend("mxnet")``, has the same
    effect. MXNet gets mgpu's settings: one OpenMP thread for each CPU context.

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
    does not, or None. Operations of `backend` would not be recorded."""
    if backend.is_recording():
        return None
    return next((name for name, other in _instances.items()
                 if other is not backend and other.is_recording()), None)


def available_backends() -> list[str]:
    """Names of the backends whose framework is installed. Imports nothing;
    ``mgpu doctor`` checks whether a framework can be imported."""
    found = []
    for name, entry in ENTRIES.items():
        # An error: the framework is hidden, or replaced by a mock.
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(entry.framework) is not None:
                found.append(name)
    return found


def loaded_backends() -> list[Backend]:
    """The backends loaded by this process."""
    return list(_instances.values())
