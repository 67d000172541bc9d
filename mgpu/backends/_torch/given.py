"""Optimizers and initializers of PyTorch as objects of mgpu."""
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mgpu.backends._torch import initial, own_step
from mgpu.backends._torch.own_step import FAMILIES
from mgpu.backends.native_objects import (Given, GivenInitializer, Memory,
                                          OptimizerGroup, OptimizerObject)
from mgpu.backends.network import Network

#: torch's option names -> those of `mgpu.optimizers`, if they differ
_OPTIONS = {"lr": "learning_rate", "weight_decay": "wd"}
#: entries of a group that are not options
_PARAMETERS = ("params", "param_names")


class TorchOptimizer(OptimizerObject):
    """A `torch.optim.Optimizer` of any class, including user-defined ones."""

    semantics = "torch"
    takes_schedule = False

    def __init__(self, x: Any, network: Network):
        super().__init__(x)
        self._network = network
        if not self.names():
            raise ValueError(
                "the optimizer of a Trainer must have parameters of its "
                f"network, {type(network.net).__name__}; received a "
                f"{_name(x)} that has none of them. Create it from "
                "replicas.net.parameters(), or pass its name, with "
                "semantics='torch'.")

    def _named(self) -> list[tuple[Any, str | None]]:
        found = [x for group in self.object.param_groups
                 for x in group["params"]]
        return [*zip(found, self._network.names_of(found), strict=True)]

    # -- parameters ---------------------------------------------------------

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
                    "lr_mult and wd_mult are not supported for torch.optim "
                    f"objects; received one of {name!r}. Create a parameter "
                    "group for it.")
        named = self._named()
        gradients = [x.grad for x, _ in named]
        try:
            for (x, name), g in zip(named, gradients, strict=True):
                if name is not None and name not in step.arrays:
                    x.grad = None       # no new gradient
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
                "the groups of this optimizer have different learning rates; "
                f"received one rate, {rate!r}. Write to its param_groups: "
                "for group in optimizer.param_groups: group['lr'] = ...")
        _write(self.object, [{"lr": rate}] * len(groups))

    def groups(self) -> list[OptimizerGroup]:
        return [OptimizerGroup(
            frozenset(names), _family(self.object, group),
            {_OPTIONS.get(key, key): x for key, x in _plain(group).items()})
            for group, names in zip(self.object.param_groups,
                                    self._names_by_group(), strict=True)]

    def _names_by_group(self) -> list[list[str]]:
        """Names of parameters. Those of other networks have their index."""
        return [[name or f"group {i}, number {j}" for j, name in enumerate(
            self._network.names_of(group["params"]))]
                for i, group in enumerate(self.object.param_groups)]

    # -- states -------------------------------------------------------------

    def _arrays(self) -> dict[str, Any]:
        return {name: x for names, group in zip(
            self._names_by_group(), self.object.param_groups, strict=True)
            for name, x in zip(names, group["params"], strict=True)}

    def memory(self) -> Memory:
        return own_step.read_memory(self.object, self._arrays())

    def load(self, memory, arrays) -> None:
        own_step.write_memory(self.object, self._arrays(), *memory)

    def export(self) -> list[dict[str, Any]]:
        return [{"names": sorted(names), "options": _plain(group)}
                for group, names in zip(self.object.param_groups,
                                        self._names_by_group(), strict=True)]

    def fit(self, saved: Sequence[Mapping[str, Any]] | None, rate: float
            ) -> Callable[[], None]:
        own = self._names_by_group()
        if saved is None and len(own) == 1:
            saved = [{"names": own[0], "options": {"lr": rate}}]
        if [sorted(group["names"]) for group in saved or ()] \
                != [*map(sorted, own)]:
            raise ValueError(
                "states must have the groups of parameters of the optimizer, "
                "in the same order; received groups with "
                f"{[len(group['names']) for group in saved or ()]} "
                f"parameters, for a {_name(self.object)} with "
                f"{[*map(len, own)]}, or with other parameters. Create the "
                "groups that were saved.")
        return partial(_write, self.object, [
            {key: tuple(x) if isinstance(x, list) else x
             for key, x in group["options"].items()
             if key not in _PARAMETERS} for group in saved or ()])


def _family(x: Any, group: Mapping[str, Any]) -> str | None:
    """The update rule of a group; None if mgpu does not have it."""
    family = FAMILIES.get(type(x))
    if group.get("maximize"):
        return None
    if family in ("adam", "adamw"):     # as torch's update does
        return "adamw" if group.get("decoupled_weight_decay",
                                    family == "adamw") else "adam"
    return family


def _write(x: Any, options: Sequence[Mapping[str, Any]]) -> None:
    for group, new in zip(x.param_groups, options, strict=True):
        for key, value in new.items():
            if isinstance(group.get(key), torch.Tensor):    # used in graphs
                group[key].fill_(value)
            else:
                group[key] = value


def _name(x: Any) -> str:
    return f"torch.optim.{type(x).__name__}"


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that JSON supports. Scalars of NumPy and torch become
    Python numbers."""
    found = {}
    for key, x in options.items():
        if key not in _PARAMETERS:
            with contextlib.suppress(Exception):
                found[key] = json.loads(json.dumps(
                    x, default=lambda scalar: scalar.item()))
    return found


class PyTorchGiven(Given):
    """Optimizers and initializers of PyTorch."""

    def optimizer(self, x: Any, network: Network
                  ) -> OptimizerObject | None:
        return TorchOptimizer(x, network) \
            if isinstance(x, torch.optim.Optimizer) else None

    def initializer(self, x: Any) -> GivenInitializer | None:
        return initial.initializer(x)


GIVEN = PyTorchGiven()
