"""Import MXNet 1.9.1 with a newer NumPy, and with settings for parallel CPU
contexts.

Two measured facts (docs/internals): operators with temporary space wait for
one of ``MXNET_CPU_TEMP_COPY`` (4) buffers; two contexts whose workers have
more than one OpenMP thread each can hang in the bundled OpenBLAS. `one_thread`
sets each worker to one thread, by a function queued on its context, so it also
works if MXNet was imported before.
"""
import contextlib
import ctypes
import functools
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from mgpu.backends._allocator import keep_freed_memory

#: whether MXNet was imported before mgpu could set its OpenMP threads
IMPORTED_EARLIER = "mxnet" in sys.modules

_ALIASES = {"bool": np.bool_, "int": int, "float": float, "object": object,
            "str": str, "complex": complex}

#: buffers for temporary space, shared by all CPU contexts; not more, because
#: each grows to the largest operation
BUFFERS = 96

# MXNet reads them at its first operation, after the import.
_SETTINGS = {"MXNET_CPU_TEMP_COPY": str(BUFFERS),
             "MXNET_EXEC_BULK_EXEC_TRAIN": "0"}


class _EarlierNumPy(types.ModuleType):
    """NumPy with the removed aliases that MXNet uses."""

    def __getattr__(self, name):
        return _ALIASES[name] if name in _ALIASES else getattr(np, name)

    def __setattr__(self, name, value):     # for imported submodules
        setattr(np, name, value)


@contextlib.contextmanager
def _import_settings() -> Iterator[None]:
    """Context manager for the import: NumPy has its removed aliases, and
    workers get one OpenMP thread."""
    before = {name: os.environ.pop(name, None)
              for name in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS")}
    os.environ["MXNET_OMP_MAX_THREADS"] = "1"
    sys.modules["numpy"] = _EarlierNumPy("numpy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            sys.modules["numpy"] = np
            del os.environ["MXNET_OMP_MAX_THREADS"]
            os.environ.update({name: value for name, value in before.items()
                               if value is not None})


def _load() -> types.ModuleType:
    if int(np.__version__.split(".")[0]) >= 2 and not IMPORTED_EARLIER:
        raise ImportError(f"MXNet 1.9.1 needs numpy<2; found {np.__version__}")
    # Before MXNet starts its threads, which have separate heaps.
    keep_freed_memory()
    if not IMPORTED_EARLIER:    # modules of a failed import
        for name in [n for n in sys.modules if n.startswith("mxnet.")]:
            del sys.modules[name]
    with _import_settings():
        try:
            import mxnet
        except (AttributeError, OSError) as error:
            raise ImportError(f"mxnet does not load: {error}") from error
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        # The first operation, at which MXNet reads its settings.
        mxnet.nd.zeros((1,)).wait_to_read()
    _refuse_initializers(mxnet)
    return mxnet


def _refuse_initializers(mxnet: Any) -> None:
    """Name the call to make where Gluon's ``net.initialize`` gets one of
    mgpu's initializers, which MXNet cannot call."""
    own = mxnet.gluon.Parameter.initialize

    @functools.wraps(own)
    def initialize(*args: Any, **named: Any) -> None:
        for one in (*args, *named.values()):
            if type(one).__module__ == "mgpu.nn.initializers":
                raise TypeError(
                    "Gluon's initialize takes initializers of MXNet's; got "
                    f"mgpu's {one!r}. Call replicas = mgpu.initialize(net, "
                    "devices, init), or with mgpu.compat.mxnet net = "
                    "mx.initialize(net, init, ctx).")
        own(*args, **named)
    mxnet.gluon.Parameter.initialize = initialize


_EngineFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


@_EngineFunction
def _set_one_thread(_run: int, _argument: int) -> None:
    # OpenBLAS uses the OpenMP setting of the calling thread.
    _openmp().omp_set_num_threads(1)


@functools.cache
def _openmp() -> ctypes.CDLL:
    return ctypes.CDLL("libgomp.so.1")


@functools.cache
def native_context(kind: int, index: int) -> Any:
    """Pointer to an mxnet::Context. `kind`: ``Context.device_typeid``."""
    return ctypes.byref((ctypes.c_int32 * 4)(kind, index))


@functools.cache
def one_thread(index: int) -> None:
    """Limit the worker of ``mx.cpu(index)`` to one core.

    Queues a function on that context, whose thread runs it before later work.
    """
    try:
        _openmp()
    except OSError:     # built against another OpenMP (macOS)
        return
    mx.base.check_call(mx.base._LIB.MXEnginePushSync(
        _set_one_thread, None, None, native_context(1, index), None, 0, None,
        0, None, 0, b"mgpu: one thread"))


# After a fork MXNet restarts its workers, in the parent too.
os.register_at_fork(after_in_parent=one_thread.cache_clear,
                    after_in_child=one_thread.cache_clear)


def findings() -> list[tuple[str, str]]:
    """See `mgpu.backends.base.Backend.doctor`."""
    found = []
    omp = os.environ.get("OMP_NUM_THREADS")
    one = os.environ.get("MXNET_OMP_MAX_THREADS") == "1" and not omp
    if IMPORTED_EARLIER and not one:
        found.append((
            "warning", "mxnet was imported earlier than mgpu (OMP_NUM_THREADS"
            f" is {omp or 'not set'}), so mgpu did not set its number of "
            "OpenMP threads, and several CPU devices are slower. Call "
            "mgpu.set_backend first, or start with "
            "MXNET_OMP_MAX_THREADS=1 and without OMP_NUM_THREADS."))
    names = {name for name in os.environ if name.startswith("MXNET_")}
    for name in sorted(names - {"MXNET_OMP_MAX_THREADS"} | {*_SETTINGS}):
        value, chosen = os.environ.get(name), _SETTINGS.get(name)
        if value != chosen:
            found.append(("warning", f"{name} is {value!r}; with mgpu's "
                          f"value, {chosen}, CPU devices compute in "
                          "parallel. Unset it." if chosen else
                          f"{name} is set to {value!r}; mgpu is tested "
                          "without it."))
    return found


mx: Any = _load()
