"""mgpu: one multi-device training API over two live backends, MXNet/Gluon and
PyTorch, that give the same numbers.

``mgpu.set_backend("mxnet")`` or ``mgpu.set_backend("torch")``, and the same
script splits batches, all-reduces gradients, initializes a network on a list
of devices, steps a trainer and evaluates on all devices. Importing `mgpu`
imports neither framework, and no module of mgpu until one of its names is
used (PEP 562).
"""
import importlib as _importlib
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

from mgpu.utils.moved import HINTS as _HINTS, OldPaths as _OldPaths

if _TYPE_CHECKING:
    from mgpu import parity, testing  # noqa: F401
    from mgpu._api import *  # noqa: F403

__version__ = "0.2.0"

_sys.meta_path.insert(0, _OldPaths())


if not _TYPE_CHECKING:
    def __getattr__(name: str) -> object:
        """A module of mgpu, or a public name of one."""
        if f"mgpu.{name}" in _HINTS:
            raise AttributeError(_HINTS[f"mgpu.{name}"])
        try:
            return _importlib.import_module(f"mgpu.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"mgpu.{name}":
                raise
        value = getattr(_importlib.import_module("mgpu._api"), name, None)
        if value is None:
            raise AttributeError(f"module 'mgpu' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*_importlib.import_module("mgpu._api").LISTED]
