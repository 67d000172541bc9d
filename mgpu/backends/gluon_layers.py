"""Layers and functions of PyTorch with Gluon's arithmetic, for source that
`mgpu.gluon_source` has written. They need torch, which this module loads with
the first of them."""
import importlib
from typing import Any

_MODULES = ("gluonize", "gluon.layers", "gluon.functions")


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for module in _MODULES:
            found = importlib.import_module(f"mgpu.backends._torch.{module}")
            if name in vars(found):
                return vars(found)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
