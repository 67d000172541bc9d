"""How modules of `mgpu.compat.mxnet` are found, and what is said of names that
it does not have."""
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from mgpu.backends import mxnet_compat

ROOT = __package__
#: modules that are others under a name of MXNet's
_OTHERS = {f"{ROOT}.init": "mgpu.nn.initializers",
           f"{ROOT}.initializer": "mgpu.nn.initializers",
           f"{ROOT}.lr_scheduler": "mgpu.optim.lr_scheduler",
           f"{ROOT}.gluon.metric": f"{ROOT}.metric"}
#: MXNet's own modules
_NATIVE = tuple(f"{ROOT}.gluon.{name}" for name in ("nn", "rnn", "model_zoo"))


def _text(name: str) -> str:
    return (f"mgpu.compat.mxnet has no {name.removeprefix(ROOT + '.')!r}. "
            "Networks are those of mxnet.gluon or torch.nn, arrays are "
            "NumPy's on the host or mgpu.put(x, device); "
            "docs/guide/habits.md has the other names.")


def missing(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module: AttributeError with what to use."""
    # Python then asks the `Finder` for what ``from`` does not find.
    vars(sys.modules[package]).setdefault("__path__", [])

    def __getattr__(name: str) -> Any:
        raise AttributeError(_text(f"{package}.{name}"))
    return __getattr__


def module(package: str, name: str) -> ModuleType | None:
    """The module of that name, if it is another one's or MXNet's own."""
    path = f"{package}.{name}"
    return import_module(path) if path in (*_OTHERS, *_NATIVE) else None


class Finder(MetaPathFinder, Loader):
    """Imports modules of `mgpu.compat.mxnet`. For a name that it does not
    have ``from mgpu.compat.mxnet import np`` raises ImportError with what to
    use; Python would not show the AttributeError."""

    def find_spec(self, name: str, path: Any = None, target: Any = None
                  ) -> ModuleSpec | None:
        if not name.startswith(f"{ROOT}."):
            return None
        if name in _OTHERS or f"{name}.".startswith(
                tuple(f"{one}." for one in _NATIVE)):
            return ModuleSpec(name, self)
        found = PathFinder.find_spec(name, path, target)
        if found is None:
            raise ImportError(_text(name), name=name)
        return found

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = import_module(_OTHERS.get(name) or name.replace(
            ROOT, mxnet_compat().__name__, 1))
