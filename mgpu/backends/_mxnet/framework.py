"""Imports MXNet 1.9.1 on today's NumPy, with settings under which several
CPU contexts compute at the same time and never hang.

Measured (`docs/design.md`, "MXNet on CPU contexts"): operators that need
temporary space queue for one of ``MXNET_CPU_TEMP_COPY`` (4) buffers; two
contexts whose workers run more than one OpenMP thread each can spin for
ever inside the bundled OpenBLAS.
"""
import contextlib
import os
import sys
import types
import warnings
from typing import Iterator

import numpy as np

#: MXNet was imported before mgpu could choose its number of OpenMP threads.
IMPORTED_EARLIER = "mxnet" in sys.modules

_ALIASES = {"bool": np.bool_, "int": int, "float": float, "object": object,
            "str": str, "complex": complex}

# Read by the engine at its first operation, so also in time after an import.
os.environ.setdefault("MXNET_CPU_TEMP_COPY", "64")
os.environ.setdefault("MXNET_EXEC_BULK_EXEC_TRAIN", "0")


@contextlib.contextmanager
def _import_settings() -> Iterator[None]:
    """NumPy's removed aliases, and one OpenMP thread a worker, put back."""
    added = [name for name in _ALIASES if name not in np.__dict__]
    omp = os.environ.pop("OMP_NUM_THREADS", None)
    most = os.environ.get("MXNET_OMP_MAX_THREADS")
    os.environ["MXNET_OMP_MAX_THREADS"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name in added:
                setattr(np, name, _ALIASES[name])
            yield
        finally:
            for name in added:
                delattr(np, name)
            for name, value in (("OMP_NUM_THREADS", omp),
                                ("MXNET_OMP_MAX_THREADS", most)):
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


class _EarlierNumPy(types.ModuleType):
    """NumPy with the aliases that MXNet's modules still read at run time."""

    def __getattr__(self, name):
        return _ALIASES[name] if name in _ALIASES else getattr(np, name)


def _load() -> types.ModuleType:
    if int(np.__version__.split(".")[0]) >= 2 and not IMPORTED_EARLIER:
        raise ImportError(f"MXNet 1.9.1 needs numpy<2; found {np.__version__}")
    with _import_settings():
        try:
            import mxnet
        except (AttributeError, OSError) as error:
            raise ImportError(f"mxnet does not load: {error}") from error
        # The engine reads its settings now, while they are in force.
        mxnet.nd.zeros((1,)).wait_to_read()
    if "bool" not in np.__dict__:
        for name in ("numpy.multiarray", "ndarray.numpy._op",
                     "symbol.numpy._symbol"):
            module = sys.modules[f"mxnet.{name}"]
            if getattr(module, "_np", None) is np:
                module._np = _EarlierNumPy("numpy")
    return mxnet


mx = _load()
