"""Optimizers and initializers of MXNet as objects of mgpu."""
import copy
import pickle
import random
import re
from contextlib import suppress
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends import messages
from mgpu.backends._mxnet.blocks import is_users
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.own_step import (FAMILIES, OPTIONS, read_state,
                                           write_state)
from mgpu.backends.native_objects import (Given, GivenInitializer, Memory,
                                          OptimizerGroup, OptimizerObject)
from mgpu.backends.network import BUFFERS, Network

#: the classes of `FAMILIES`, which parity supports, and others
_FAMILIES = {**FAMILIES, **{getattr(mx.optimizer, name): name.lower()
                            for name in ("LAMB", "LARS", "FTML", "DCASGD")},
             mx.optimizer.contrib.GroupAdaGrad: "groupadagrad"}


class MXNetOptimizer(OptimizerObject):
    """An `mx.optimizer.Optimizer` of any class, including user-defined ones,
    for a network of either backend. Arrays of the other backend are copied to
    MXNet's and back."""

    semantics = "gluon"

    def __init__(self, x: Any, network: Network):
        messages.check_precision(x.multi_precision, {
            spec.name: spec.dtype for spec in network.specs()
            if spec.kind not in BUFFERS})
        super().__init__(x)
        self._backend, self._updater = network.backend, \
            mx.optimizer.get_updater(x)
        self._family = _FAMILIES.get(type(x))
        #: name -> MXNet's index of a parameter, as in Gluon's Trainer
        self._index = {spec.name: i for i, spec in enumerate(network.specs())}
        self.scale = float(x.rescale_grad)
        if not 0 < self.scale < float("inf"):
            raise ValueError("rescale_grad must be a finite number above 0; "
                             f"received {x.rescale_grad!r}.")

    # -- options ------------------------------------------------------------

    @property
    def schedule(self) -> Any:
        return self.object.lr_scheduler

    @schedule.setter
    def schedule(self, schedule: Any) -> None:
        self.object.lr_scheduler = schedule

    @property
    def learning_rate(self) -> float:
        x = self.object
        return float(x.lr if x.lr is not None
                     else getattr(x.lr_scheduler, "base_lr", 0.01))

    def set_learning_rate(self, rate: float) -> None:
        if self.schedule is None:
            self.object.set_learning_rate(rate)

    def groups(self) -> list[OptimizerGroup]:
        options = {OPTIONS.get(key, key): x
                   for key, x in vars(self.object).items()
                   if isinstance(x, (bool, int, float, NoneType))}
        return [OptimizerGroup(None, self._family, {
            **options, "learning_rate": self.learning_rate})]

    # -- a step -------------------------------------------------------------

    def step(self, step) -> None:
        x, rescale = self.object, self.object.rescale_grad
        names = [name for name in self.order if name in step.arrays]
        arrays = [step.arrays[name] for name in names]
        weights = [*map(self._native, arrays)]
        x.param_dict = {self._index[name]: _Factors(*step.factors[name])
                        for name in names}
        x.rescale_grad = step.scale / step.loss_scale
        try:
            if names:
                self._updater(
                    [self._index[name] for name in names],
                    [self._native(self._backend.grad(a)) for a in arrays],
                    weights)
        finally:
            x.rescale_grad = rescale
        for a, w in zip(arrays, weights, strict=True):
            if a is not w:
                a[...] = self._backend.put(w.asnumpy(), a)

    def _native(self, x: Any) -> Any:
        if isinstance(x, mx.nd.NDArray):
            return x
        x = self._backend.to_numpy(x)
        return mx.nd.array(x, mx.cpu(), x.dtype)

    def count(self, number) -> int:
        return self.object.num_update

    # -- states -------------------------------------------------------------

    def memory(self) -> Memory:
        known = {name: i for name, i in self._index.items()
                 if i in self._updater.states}
        return {(name, slot): x for name, i in known.items()
                for slot, x in read_state(
                    self._updater, i, self._family).items()}, {
            name: self.object._index_update_count[i]
            for name, i in known.items()}

    def load(self, memory, arrays) -> None:
        x, (slots, counts) = self.object, memory
        weights = {name: self._native(arrays[name]) for name in counts}
        for weight in [*weights.values()][:1]:
            x._set_current_context(weight.context.device_id)
        x._index_update_count.clear()
        self._updater.states.clear()
        x.num_update = max(counts.values(), default=x.begin_num_update)
        for name, weight in weights.items():
            x._index_update_count[self._index[name]] = counts[name]
            write_state(self._updater, self._index[name], weight,
                        self._family, {slot: value for (own, slot), value
                                       in slots.items() if own == name})


class _Factors(NamedTuple):
    """Multipliers in the form of a Parameter."""

    lr_mult: float
    wd_mult: float


def _contents(x: Any) -> dict[str, bytes | None]:
    """The attributes, pickled; None if that is not possible."""
    found: dict[str, bytes | None] = dict.fromkeys(vars(x))
    for key, value in vars(x).items():
        with suppress(Exception):       # for example a local function
            found[key] = pickle.dumps(value)
    return found


class MXNetDraws(GivenInitializer):
    """A user-defined `mx.init.Initializer`."""

    def __init__(self, x: Any):
        self._x = x
        self.text = f"{type(x).__name__}, a user-defined class"

    def draw(self, name, shape, rng):
        seed = int(rng.integers(2 ** 31))
        # The user's stream continues from a number drawn from it.
        later = int(mx.nd.random.randint(0, 2 ** 31 - 1, shape=1, ctx=mx.cpu(
            )).asscalar())
        states = random.getstate(), np.random.get_state()
        mx.random.seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        array = mx.nd.zeros(shape, mx.cpu(), dtype="float64")
        try:
            # A copy: Gluon calls one object for all weights in order; here
            # each call is independent.
            x = copy.deepcopy(self._x)
            before = _contents(x)
            with mx.Context(mx.cpu()), mx.autograd.pause():
                # As Gluon calls it for a weight.
                x(mx.init.InitDesc(name, {"__init__": x}), array)
            changed = [key for key, value in _contents(x).items()
                       if before.get(key, "") != value]
            if changed:
                raise ValueError(
                    "an initializer must depend on the name and shape of a "
                    f"weight only; received {type(x).__name__}, whose call "
                    f"changes {changed}. Use mx.nd.random, or the global "
                    "random numbers of NumPy or Python, which are seeded for "
                    "each weight.")
            return array.asnumpy()
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            mx.random.seed(later)


class MXNetGiven(Given):
    """Optimizers and initializers of MXNet."""

    def optimizer(self, x: Any, network: Network
                  ) -> OptimizerObject | None:
        return MXNetOptimizer(x, network) \
            if isinstance(x, mx.optimizer.Optimizer) else None

    def initializer(self, x: Any) -> GivenInitializer | list[
            tuple[re.Pattern[str], Any]] | None:
        if isinstance(x, mx.init.Load):
            raise ValueError(
                "mx.init.Load is not supported, as in Gluon's initialize; "
                "received one. Call Replicas.load_parameters(file), or "
                "Replicas.import_numpy, after mgpu.initialize.")
        if isinstance(x, mx.init.Mixed):
            return list(x.map)
        if isinstance(x, mx.init.Initializer) and is_users(x):
            return MXNetDraws(x)
        return None


GIVEN = MXNetGiven()
