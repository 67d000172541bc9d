"""What objects of MXNet's own are in mgpu's terms."""
import copy
import random
import re
from typing import Any

import numpy as np

from mgpu.backends import base, messages
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.own_step import FAMILIES

#: by family, the options besides the rate, wd and clip_gradient: MXNet's
#: attribute and mgpu's name, where that is another
_OPTIONS: dict[str, dict[str, str]] = {
    family: {name: name for name in names.split()} for family, names in {
        "sgd": "momentum", "nag": "momentum", "signum": "momentum wd_lh",
        "adam": "beta1 beta2 epsilon", "adamax": "beta1 beta2",
        "nadam": "beta1 beta2 epsilon schedule_decay",
        "rmsprop": "gamma1 gamma2 epsilon centered clip_weights",
        "adadelta": "rho epsilon", "ftrl": "lamda1 beta",
        "lamb": "beta1 beta2 epsilon lower_bound upper_bound bias_correction",
        "lars": "momentum eta eps momentum_correction",
        "ftml": "beta1 beta2 epsilon", "dcasgd": "lamda", "sgld": ""}.items()}
_OPTIONS["adagrad"] = _OPTIONS["groupadagrad"] = {"float_stable_eps": "eps"}
#: the classes of `FAMILIES`, whose steps parity knows, and others
_FAMILIES = {**FAMILIES, **{getattr(mx.optimizer, name): name.lower()
                            for name in ("LAMB", "LARS", "FTML", "DCASGD",
                                         "SGLD")},
             mx.optimizer.contrib.GroupAdaGrad: "groupadagrad"}


class MXNetOptimizer(base.GivenOptimizer):
    """An `mx.optimizer.Optimizer` of a class of MXNet's own."""

    semantics = "gluon"

    def __init__(self, x: Any, network: base.Network):
        if _FAMILIES.get(type(x)) not in _OPTIONS:
            known = [cls.__name__ for cls, family in _FAMILIES.items()
                     if family in _OPTIONS]
            raise ValueError(
                "an optimiser object is of a class whose formula mgpu has; "
                f"received {type(x).__module__}.{type(x).__name__}. Use one "
                f"of {', '.join(known)}, or write your rule as a class of "
                "mgpu.optimizers.Optimizer.")
        if x.num_update != x.begin_num_update or any(
                x._all_index_update_counts.values()):
            raise ValueError(
                "a Trainer begins with an optimiser that has updated "
                f"nothing; received one after {x.num_update} updates. Make a "
                "new one (mgpu.resume_from_gluon reads saved states).")
        messages.check_precision(x.multi_precision, {
            spec.name: spec.dtype for spec in network.specs()
            if spec.kind not in base.BUFFERS})
        super().__init__(x)
        self._family = _FAMILIES[type(x)]
        self.schedule, self.scale = x.lr_scheduler, float(x.rescale_grad)
        if not 0 < self.scale < float("inf"):
            raise ValueError("rescale_grad must be a finite number above 0; "
                             f"received {x.rescale_grad!r}.")
        self.read()

    def read(self) -> list[base.GivenGroup]:
        x = self.object
        if self.taken():
            raise ValueError(
                "an optimiser object is that of one Trainer, whose updates it "
                "counts; received one that another Trainer has stepped with. "
                "Make a new object for each.")
        if x.lr_mult or x.wd_mult:
            raise ValueError(
                "a Trainer, Gluon's too, multiplies rates by what parameters "
                "say; received an optimiser with "
                f"{'lr_mult' if x.lr_mult else 'wd_mult'} "
                f"{dict(x.lr_mult or x.wd_mult)!r} (set_lr_mult, set_wd_mult "
                "or param_idx2name). Use mgpu.Trainer(..., lr_mult=, "
                "wd_mult=), or those of the Parameters.")
        if self._family == "dcasgd" and x.momentum:
            raise ValueError(
                "dcasgd has no momentum, with which MXNet's rule fails; "
                f"received momentum={x.momentum!r}. Leave it out.")
        if x.begin_num_update:
            raise ValueError(
                "a Trainer counts updates from 1; received begin_num_update="
                f"{x.begin_num_update!r}. Load states with "
                "Trainer.load_states, or let lr_scheduler add to its number.")
        if x.lr_scheduler is not self.schedule:
            raise ValueError(
                "the schedule of an optimiser object stays; received another "
                "lr_scheduler than when the Trainer was made. Make a new "
                "Trainer, or set Trainer.lr_scheduler.")
        rate = x.lr if x.lr is not None else getattr(
            x.lr_scheduler, "base_lr", 0.01)    # a function has none
        return [base.GivenGroup(None, self._family, {
            "learning_rate": rate, "wd": x.wd,
            "clip_gradient": x.clip_gradient, **{
                own: getattr(x, name)
                for name, own in _OPTIONS[self._family].items()}})]

    def set_learning_rate(self, rate: float) -> None:
        self.object.set_learning_rate(rate)

    def load_learning_rate(self, rate: float) -> None:
        self.object.set_learning_rate(rate)


def _content(x: Any, seen: set[int]) -> Any:
    """What an attribute holds, as something that compares."""
    if isinstance(x, mx.nd.NDArray):
        x = x.asnumpy()
    if isinstance(x, np.ndarray):
        return x.shape, str(x.dtype), x.tobytes()
    if x is None or isinstance(x, (bool, int, float, str, bytes)):
        return x
    if id(x) in seen:
        return None
    seen.add(id(x))
    state = getattr(x, "get_state", None) or getattr(x, "getstate", None)
    if callable(state):     # of a stream of random numbers
        return _content(state(), seen)
    if hasattr(x, "bit_generator"):
        return repr(x.bit_generator.state)
    if isinstance(x, dict):
        return {repr(key): _content(one, seen) for key, one in x.items()}
    if isinstance(x, (list, tuple, set)):
        return [_content(one, seen) for one in x]
    return type(x), _content(vars(x), seen) if hasattr(x, "__dict__") else None


class MXNetDraws(base.GivenInitializer):
    """An `mx.init.Initializer` of a class of the user's own."""

    def __init__(self, x: Any):
        self._x = x
        self.text = f"{type(x).__name__}, a class of the user's"

    def draw(self, name, shape, rng):
        seed = int(rng.integers(2 ** 31))
        # The stream of the user goes on from what is its own.
        later = int(mx.nd.random.randint(0, 2 ** 31 - 1, shape=1, ctx=mx.cpu(
            )).asscalar())
        states = random.getstate(), np.random.get_state()
        mx.random.seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        array = mx.nd.zeros(shape, mx.cpu(), dtype="float64")
        try:
            with mx.Context(mx.cpu()), mx.autograd.pause():
                # As Gluon calls it for a weight. A copy: see below.
                x = copy.deepcopy(self._x)
                x(mx.init.InitDesc(name, {"__init__": x}), array)
                self._check_unchanged(x)
            return array.asnumpy()
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            mx.random.seed(later)

    def _check_unchanged(self, used: Any) -> None:
        """Gluon calls one object for all networks, in the order of their
        weights; here each draw is by itself."""
        old, new = ({key: _content(x, set()) for key, x in vars(one).items()}
                    for one in (self._x, used))
        changed = [key for key in new if new[key] != old.get(key)]
        if changed:
            raise ValueError(
                "an initialiser gives a weight by its name and shape, and "
                "remembers nothing; received "
                f"{type(self._x).__name__}, whose call changes {changed}. "
                "Draw from mx.nd.random, or from NumPy's or Python's own "
                "stream, which are seeded anew for each weight.")


class MXNetGiven(base.Given):
    """Optimisers, schedules and initialisers of MXNet."""

    def optimizer(self, x: Any, network: base.Network
                  ) -> base.GivenOptimizer | None:
        return MXNetOptimizer(x, network) \
            if isinstance(x, mx.optimizer.Optimizer) else None

    def initializer(self, x: Any) -> base.GivenInitializer | list[
            tuple[re.Pattern[str], Any]] | None:
        if isinstance(x, mx.init.Load):
            raise ValueError(
                "an initialiser draws weights, and Gluon's initialize takes "
                "no mx.init.Load either; received one. Call Replicas."
                "load_parameters(file), or Replicas.import_numpy, after "
                "mgpu.initialize.")
        if isinstance(x, mx.init.Mixed):
            return list(x.map)
        if isinstance(x, mx.init.Initializer) \
                and type(x).__module__ != mx.init.Initializer.__module__:
            return MXNetDraws(x)
        return None


GIVEN = MXNetGiven()
