"""Networks, losses and data by their names on the command line."""
import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mgpu
from mgpu import backends
from mgpu.cli.options import LOSSES
from mgpu.data import datasets
from mgpu.nn import losses
from mgpu.utils.arguments import one_of


# -- MODULE:NAME --------------------------------------------------------------

def find(text: str) -> Any:
    """What ``MODULE:NAME`` or ``FILE.py:NAME`` stands for. Modules are
    searched in the current folder first; a file finds its neighbours.

    Raises
    ------
    ValueError
        There is no colon, no such file, or no such name in it.
    ImportError
        There is no such module, or one that it needs is missing.
    """
    place, _, name = text.rpartition(":")
    if not (place and name):
        raise ValueError("a network is given as MODULE:FACTORY or "
                         f"FILE.py:FACTORY; received {text!r}. Write for "
                         "example models.resnet:resnet18.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    thing = _module_of(Path(place)) if place.endswith(".py") \
        else _import(place)
    for part in name.split("."):
        if not hasattr(thing, part):
            known = [n for n, v in vars(thing).items() if callable(v)
                     and not n.startswith("_")]
            raise ValueError(f"{place} has no {name!r}; received {text!r}. "
                             "Use one of "
                             f"{', '.join(known[:20]) or 'its names'}.")
        thing = getattr(thing, part)
    return thing


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported ({error}). Run the "
                          "command in the folder that holds it, or install "
                          "what is missing.", name=error.name) from error


def _module_of(file: Path) -> Any:
    """A file as a module, under its full path: files of one name in two
    folders are two modules."""
    file = file.resolve()
    if str(file) in sys.modules:
        return sys.modules[str(file)]
    spec = importlib.util.spec_from_file_location(str(file), file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ValueError("there is no such file; received "
                         f"{str(file)!r}. Correct the path before the colon.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[str(file)] = module
    sys.path.insert(0, str(file.parent))    # as `python FILE.py` does
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(file)]
        raise
    return module


@contextlib.contextmanager
def engines() -> Iterator[None]:
    """Every backend that is installed is loaded, before a module of the
    user's imports it: MXNet needs NumPy's old names for that. An import that
    fails in the block says also why a backend was not loaded."""
    missing, there = {}, mgpu.available_backends()
    for name, entry in backends.ENTRIES.items():
        try:
            with mgpu.using_backend(name):
                pass
        except mgpu.BackendNotAvailable as error:
            missing[entry.framework] = name in there, (
                f"The {name} backend cannot be loaded ({error.__cause__}). "
                f"Install it: {entry.cure()}.")
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        why = [text for framework, (installed, text) in missing.items()
               if installed or framework == package]
        if why:
            raise ImportError(" ".join([f"{error}", *why])) from error
        raise


def factory(text: str, keywords: Mapping[str, Any]) -> Callable:
    """The function that makes a network, with its keyword arguments."""
    function = find(text)
    if not callable(function):
        raise ValueError(
            f"{text} must be a function that makes a network; received "
            f"{type(function).__name__}.")
    return functools.partial(function, **keywords)


def find_loss(text: str) -> Callable:
    """A loss by its name in mgpu, or ``MODULE:NAME``, which may be a class
    that needs no arguments."""
    if ":" not in text:
        one_of("loss", text, [*LOSSES, "MODULE:NAME"])
    loss: Any = LOSSES.get(text) or find(text)
    if inspect.isclass(loss):
        loss = loss()
    return loss


# -- data ---------------------------------------------------------------------

@dataclass
class RandomBatches:
    """Batches drawn from a seed, the same in every loop.

    Inputs are normal. Labels are class numbers for `SoftmaxCrossEntropyLoss`
    and for losses that are not mgpu's. For mgpu's others they are (rows,
    classes) values that the loss accepts: 0 or 1, shares that add up to 1,
    or normal ones.
    """

    shape: tuple[int, ...]
    classes: int
    batch_size: int
    count: int
    loss: Any
    seed: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number in range(self.count):
            rng = np.random.default_rng([self.seed, number])
            X = rng.standard_normal((self.batch_size, *self.shape))
            yield X, self._labels(rng)

    def _labels(self, rng: np.random.Generator) -> np.ndarray:
        size = self.batch_size, self.classes
        if isinstance(self.loss, losses.SigmoidBinaryCrossEntropyLoss):
            return rng.integers(0, 2, size).astype(float)
        if isinstance(self.loss, losses.KLDivLoss):
            return rng.dirichlet(np.ones(self.classes), self.batch_size)
        if isinstance(self.loss, (losses.L1Loss, losses.L2Loss,
                                  losses.HuberLoss)):
            return rng.standard_normal(size)
        return rng.integers(0, self.classes, self.batch_size).astype("int32")


class Data(NamedTuple):
    """Batches to train on, and to test on or None."""

    batches: Any
    test: Any


def find_data(name: str, shape: tuple[int, ...] | None,
              classes: int | None, batch_size: int, steps: int, loss: Any,
              seed: int, dtype: str, limit: int | None) -> Data:
    """The batches that ``--data`` stands for, and those to test on."""
    if name == "random":
        if shape is None or classes is None:
            raise ValueError("random data needs --input and --classes; "
                             f"received {shape} and {classes}. Write for "
                             "example --input 3x224x224 --classes 1000.")
        return Data(RandomBatches(shape, classes, batch_size, steps, loss,
                                  seed), None)
    if ":" in name and not os.path.isdir(name):
        data = find(name)
        data = data() if callable(data) else data
        is_pair = isinstance(data, tuple) and len(data) == 2
        return Data(*data) if is_pair else Data(data, None)
    known = name in ("digits", "fashion-mnist") or os.path.isdir(name)
    if known and shape is not None and (len(shape) != 3 or shape[0] != 1):
        raise ValueError(f"{name} has gray images; received --input "
                         f"{'x'.join(map(str, shape))}. Write 1xHxW.")
    size = (shape[1], shape[2]) if known and shape else None
    return Data(*datasets.load(name, batch_size, limit, seed, resize=size,
                               dtype=dtype))
