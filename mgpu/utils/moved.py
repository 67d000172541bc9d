"""Lazy attributes of packages, and aliases of moved modules."""
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: package -> modules that were at the top of mgpu in 0.2
_PACKAGES = {
    "backends": "device strict",
    "checkpoints": "checkpoint checkpoint_folder extra_states resuming "
        "trainer_states weight_files",
    "collectives": "host_memory",
    "compat": "conversion",
    "data": "inputs nested prefetching split",
    "nn": "batch_norm functional models",
    "optim": "loss_scale lr_scheduler schedule_state",
    "tools": "bench chapters doctor inspection plotting profile_advice "
        "profiling timing",
    "training": "evaluation parameters prediction progress replicas "
        "rule_updates stopping trainer",
    "utils": "arguments environment files notebook probes tensor_files",
}
_PATHS = {"mgpu.background": "mgpu.data.prefetching", **{
    f"mgpu.{name}": f"mgpu.{package}.{name}"
    for package, names in _PACKAGES.items() for name in names.split()}}


#: by a name that users of other frameworks try: what to use
HINTS = {f"mgpu.{name}": f"module 'mgpu' has no attribute {name!r}. Use {use}."
         for name, use in {
    "compile": "mgpu.initialize(net, devices, hybridize=True)",
    "fit": "mgpu.train(replicas, train_iter, test_iter, loss, trainer, "
        "num_epochs)",
    "load": "replicas.load(file), or mgpu.load_checkpoint(file, replicas, "
        "trainer)",
    "predict": "replicas.predict(X)",
    "save": "replicas.save(file), or mgpu.save_checkpoint(file, replicas, "
        "trainer)",
}.items()}


def attributes_of(package: str, names: Mapping[str, str]
                  ) -> Callable[[str], Any]:
    """A ``__getattr__`` (PEP 562) that imports attributes of `package` on
    first use. `names` maps an attribute to its module."""
    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(names[name]), name)
    return __getattr__


class OldPaths(MetaPathFinder, Loader):
    """Importer for the module paths of mgpu 0.2. Returns the same module
    objects as the current paths. Raises ImportError for a name in `HINTS`:
    ``from mgpu import fit`` does not show the AttributeError of
    ``mgpu.fit``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None
                  ) -> ModuleSpec | None:
        if name in HINTS:
            raise ImportError(HINTS[name], name=name)
        old = next((old for old in (name, name.rpartition(".")[0])
                    if old in _PATHS), None)
        return ModuleSpec(name, self) if old else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        package, _, last = name.rpartition(".")
        sys.modules[name] = import_module(
            _PATHS.get(name) or f"{_PATHS[package]}.{last}")
