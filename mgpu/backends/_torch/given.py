"""What objects of PyTorch's own are in mgpu's terms."""
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from mgpu.backends import base
from mgpu.backends._torch import initial, own_step
from mgpu.backends._torch.own_step import FAMILIES

#: by family, the options besides lr and weight_decay, which have the same
#: names here
_OPTIONS: dict[str, tuple[str, ...]] = {
    family: tuple(names.split()) for family, names in {
        "sgd": "momentum dampening nesterov", "adam": "betas eps amsgrad",
        "adamw": "betas eps amsgrad", "adamax": "betas eps",
        "nadam": "betas eps momentum_decay decoupled_weight_decay",
        "rmsprop": "alpha eps momentum centered",
        "adagrad": "lr_decay eps", "adadelta": "rho eps"}.items()}
#: what else is in a group
_PARAMETERS = ("params", "param_names")


class TorchOptimizer(base.OptimizerObject):
    """A `torch.optim.Optimizer` of any class, one of the user's too."""

    semantics = "torch"
    takes_schedule = False

    def __init__(self, x: Any, network: base.Network):
        if isinstance(x, torch.optim.LBFGS):
            raise ValueError(
                "a Trainer steps once for each backward pass; received an "
                "LBFGS, whose step computes the loss several times. Call its "
                "step(closure): the gradients of replicas.net are sums over "
                "the devices.")
        if not isinstance(network.net, nn.Module):
            raise ValueError(
                "an optimiser object is of the network's own framework; "
                f"received torch.optim.{type(x).__name__}, which has no "
                f"parameters of {type(network.net).__name__}. Pass the name, "
                f"{FAMILIES.get(type(x), 'adam')!r}, with semantics='torch'.")
        super().__init__(x)
        self._network = network
        if not self.names():
            raise ValueError(
                "a Trainer's optimiser has parameters of its network, "
                f"{type(network.net).__name__}; received a {_name(x)} that "
                "has none of them. Make it from replicas.net.parameters().")

    def _held(self) -> list[Any]:
        return [x for group in self.object.param_groups
                for x in group["params"]]

    def _named(self) -> list[tuple[Any, str | None]]:
        found = self._held()
        return [*zip(found, self._network.names_of(found), strict=True)]

    # -- what it moves ------------------------------------------------------

    def names(self) -> frozenset[str]:
        return frozenset(name for _, name in self._named() if name is not None)

    def others(self) -> list[Any]:
        return [x for x, name in self._named() if name is None]

    def gradients_of_others(self) -> list[Any]:
        others = [x for x in self.others() if x.requires_grad]
        for x in others:
            if x.grad is None:
                x.grad = torch.zeros_like(x)
        return [x.grad for x in others]

    def step(self, step) -> None:
        for name, factors in step.factors.items():
            if factors != (1.0, 1.0):
                raise ValueError(
                    "the groups of a torch.optim object have the rates and "
                    "weight decays; received an lr_mult or wd_mult of "
                    f"{name!r}. Make a group of its own for it.")
        named = self._named()
        gradients = [x.grad for x, _ in named]
        try:
            for (x, name), g in zip(named, gradients, strict=True):
                if name is not None and name not in step.arrays:
                    x.grad = None       # no new one
                elif g is not None:
                    if step.loss_scale != 1.0:
                        g = g / step.loss_scale
                    x.grad = g if step.scale == 1.0 else g * step.scale
            self.object.step()
        finally:
            for (x, _), g in zip(named, gradients, strict=True):
                x.grad = g
        for x, name in named:
            if name is None:
                x.grad = None

    # -- options ------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        return float(self.object.param_groups[0]["lr"])

    def set_learning_rate(self, rate: float) -> None:
        groups = self.object.param_groups
        if len({float(group["lr"]) for group in groups}) > 1:
            raise ValueError(
                "the groups of this optimiser object have rates of their own;"
                f" received one rate, {rate!r}. Write to its param_groups: "
                "for group in optimizer.param_groups: group['lr'] = ...")
        _write(self.object, [{"lr": rate}] * len(groups))

    def groups(self) -> list[base.OptimizerGroup]:
        return [base.OptimizerGroup(frozenset(names), *self._formula(group))
                for group, names in zip(self.object.param_groups,
                                        self._names_by_group(), strict=True)]

    def _formula(self, group: Mapping[str, Any]
                 ) -> tuple[str | None, dict[str, Any]]:
        x, family = self.object, FAMILIES.get(type(self.object))
        if family is None or group.get("maximize"):
            return None, {"learning_rate": group.get("lr", 0.0)}
        if family in ("adam", "adamw"):     # torch's update asks this
            family = "adamw" if group.get(
                "decoupled_weight_decay", family == "adamw") else "adam"
        options = {name: group[name] for name in _OPTIONS[family]}
        if family == "adagrad":     # read by its constructor
            options["initial_accumulator_value"] = \
                x.defaults["initial_accumulator_value"]
        return family, {"learning_rate": float(group["lr"]),
                        "wd": group["weight_decay"], **options}

    def _names_by_group(self) -> list[list[str]]:
        """Parameters of others are called by their places."""
        return [[name or f"group {i}, number {j}" for j, name in enumerate(
            self._network.names_of(group["params"]))]
                for i, group in enumerate(self.object.param_groups)]

    # -- states -------------------------------------------------------------

    def _arrays(self) -> dict[str, Any]:
        return {name: x for names, group in zip(
            self._names_by_group(), self.object.param_groups, strict=True)
            for name, x in zip(names, group["params"], strict=True)}

    def memory(self) -> base.Memory:
        return own_step.read_memory(self.object, self._arrays())

    def load(self, memory, arrays) -> None:
        own_step.write_memory(self.object, self._arrays(), *memory)

    def export(self) -> list[dict[str, Any]]:
        return [{"names": sorted(names), "options": {
            key: _plain(x) for key, x in group.items()
            if key not in _PARAMETERS and _is_plain(x)}}
            for group, names in zip(self.object.param_groups,
                                    self._names_by_group(), strict=True)]

    def fit(self, saved: Sequence[Mapping[str, Any]] | None, rate: float
            ) -> Callable[[], None]:
        groups, own = self.object.param_groups, self._names_by_group()
        if saved is None:
            if len(groups) > 1:
                raise ValueError(
                    "states are loaded into as many groups of parameters as "
                    f"they are of; received those of one, for {len(groups)} "
                    f"of a {_name(self.object)}. Make an object with one "
                    "group.")
            saved = [{"names": own[0], "options": {"lr": rate}}]
        if [sorted(group["names"]) for group in saved] != [*map(sorted, own)]:
            raise ValueError(
                "states are loaded into the same groups of parameters, in "
                "the same order; received those of groups with "
                f"{[len(group['names']) for group in saved]} parameters, for "
                f"a {_name(self.object)} with {[*map(len, own)]}, or with "
                "others. Make the groups that were saved.")
        return partial(_write, self.object, [
            {key: tuple(x) if isinstance(x, list) else x
             for key, x in group["options"].items()
             if key not in _PARAMETERS} for group in saved])


def _write(x: Any, options: Sequence[Mapping[str, Any]]) -> None:
    for group, new in zip(x.param_groups, options, strict=True):
        for key, value in new.items():
            if isinstance(group.get(key), torch.Tensor):    # graphs have it
                group[key].fill_(value)
            else:
                group[key] = value


def _name(x: Any) -> str:
    return f"torch.optim.{type(x).__name__}"


def _plain(x: Any) -> Any:
    """Scalars of NumPy and of torch as Python's, which JSON takes."""
    return type(x)(map(_plain, x)) if isinstance(x, (list, tuple)) \
        else x.item() if isinstance(x, np.generic) or isinstance(
            x, torch.Tensor) and x.ndim == 0 else x


def _is_plain(x: Any) -> bool:
    x = _plain(x)
    return x is None or isinstance(x, (bool, int, float, str)) or isinstance(
        x, (list, tuple)) and all(isinstance(one, (int, float)) for one in x)


class PyTorchGiven(base.Given):
    """Optimisers, schedules and initialisers of PyTorch."""

    def optimizer(self, x: Any, network: base.Network
                  ) -> base.OptimizerObject | None:
        if isinstance(x, type) and issubclass(x, torch.optim.Optimizer):
            raise TypeError(
                "an optimiser is an object, or a name; received the class "
                f"torch.optim.{x.__name__}. Pass {x.__name__}(net."
                "parameters(), ...), or its name and semantics='torch'.")
        return TorchOptimizer(x, network) \
            if isinstance(x, torch.optim.Optimizer) else None

    def schedule(self, x: Any) -> None:
        if isinstance(x, torch.optim.lr_scheduler.LRScheduler):
            raise TypeError(
                "a schedule of torch's changes the groups of its optimiser "
                f"object; received {type(x).__name__} as lr_scheduler. Give "
                "the Trainer that object, mgpu.Trainer(replicas, optimizer), "
                "without lr_scheduler, and call scheduler.step() after each "
                "step or epoch, as in torch.")

    def initializer(self, x: Any) -> base.GivenInitializer | None:
        return initial.initializer(x)


GIVEN = PyTorchGiven()
