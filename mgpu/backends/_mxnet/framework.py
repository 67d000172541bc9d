"""Imports MXNet 1.9.1 under a newer NumPy, with settings under which several
CPU contexts compute at the same time and never hang.

Two facts, measured (docs/internals): operators that need temporary space queue
for one of ``MXNET_CPU_TEMP_COPY`` (4) buffers; two contexts whose workers run
more than one OpenMP thread each can spin for ever inside the bundled OpenBLAS.
`one_thread` sets each worker to one thread through the engine itself, so it
works however MXNet was imported.
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

#: whether MXNet was imported before mgpu could choose its OpenMP threads
IMPORTED_EARLIER = "mxnet" in sys.modules

_ALIASES = {"bool": np.bool_, "int": int, "float": float, "object": object,
            "str": str, "complex": complex}

#: buffers for the temporary space of operations, which all CPU contexts share;
#: not more, because each grows to the largest need
BUFFERS = 96

# The engine reads them at its first operation, after the import.
_SETTINGS = {"MXNET_CPU_TEMP_COPY": str(BUFFERS),
             "MXNET_EXEC_BULK_EXEC_TRAIN": "0"}


class _EarlierNumPy(types.ModuleType):
    """NumPy with the aliases that MXNet's modules read."""

    def __getattr__(self, name):
        return _ALIASES[name] if name in _ALIASES else getattr(np, name)

    def __setattr__(self, name, value):     # modules of it that are imported
        setattr(np, name, value)


@contextlib.contextmanager
def _import_settings() -> Iterator[None]:
    """Inside the block modules import a NumPy that has its removed aliases,
    and workers get one OpenMP thread."""
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
    # Before the engine starts its threads, which have heaps of their own.
    keep_freed_memory()
    if not IMPORTED_EARLIER:    # left behind by an import that failed
        for name in [n for n in sys.modules if n.startswith("mxnet.")]:
            del sys.modules[name]
    with _import_settings():
        try:
            import mxnet
        except (AttributeError, OSError) as error:
            raise ImportError(f"mxnet does not load: {error}") from error
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        # The first operation: the engine reads its settings now.
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
    # OpenBLAS asks the calling thread's OpenMP setting how many to use.
    _openmp().omp_set_num_threads(1)


@functools.cache
def _openmp() -> ctypes.CDLL:
    return ctypes.CDLL("libgomp.so.1")


@functools.cache
def native_context(kind: int, index: int) -> Any:
    """A pointer to an mxnet::Context; `kind`: ``Context.device_typeid``."""
    return ctypes.byref((ctypes.c_int32 * 4)(kind, index))


@functools.cache
def one_thread(index: int) -> None:
    """Make the worker of ``mx.cpu(index)`` compute on one core from now on.

    It queues a function on that context, whose own thread runs it before any
    later work.
    """
    try:
        _openmp()
    except OSError:     # built against another OpenMP (macOS)
        return
    mx.base.check_call(mx.base._LIB.MXEnginePushSync(
        _set_one_thread, None, None, native_context(1, index), None, 0, None,
        0, None, 0, b"mgpu: one thread"))


# After a fork MXNet starts its workers anew, in the parent too.
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
            f" is {omp or 'not set'}), so it computes with a number of OpenMP "
            "threads that mgpu did not choose, and several CPU devices are "
            "slower. Call mgpu.set_backend first, or start with "
            "MXNET_OMP_MAX_THREADS=1 and without OMP_NUM_THREADS."))
    names = {name for name in os.environ if name.startswith("MXNET_")}
    for name in sorted(names - {"MXNET_OMP_MAX_THREADS"} | {*_SETTINGS}):
        value, chosen = os.environ.get(name), _SETTINGS.get(name)
        if value != chosen:
            found.append(("warning", f"{name} is {value!r}; mgpu's own "
                          f"choice, {chosen}, lets CPU devices compute at "
                          "the same time. Unset it." if chosen else
                          f"{name} is set to {value!r}; mgpu is tested "
                          "without it."))
    return found


mx: Any = _load()
