"""What objects of PyTorch's own are in mgpu's terms."""
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as torch_optimizer

from mgpu.backends import base
from mgpu.backends._torch import initial
from mgpu.backends._torch.names import arrays_of, joined, suffix_of, walk
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


class _Refusal:
    """A hook on an optimiser that a trainer has, as long as there is one."""

    def __init__(self, of: "TorchOptimizer", received: str, cure: str):
        self._of, self._text = weakref.ref(of), (
            "an optimiser object that a Trainer has is moved by it, and "
            f"remembers nothing itself; received its {received}. {cure}")

    def __call__(self, *_: Any) -> None:
        if self._of() is not None:
            raise RuntimeError(self._text)


class TorchOptimizer(base.GivenOptimizer):
    """A `torch.optim.Optimizer` of a class of torch's own."""

    semantics = "torch"
    takes_schedule = False

    def __init__(self, x: Any, network: base.Network):
        if type(x) not in FAMILIES:
            raise ValueError(
                "an optimiser object is of a class whose formula mgpu has; "
                f"received {type(x).__module__}.{type(x).__name__}. Use one "
                f"of torch.optim.{', '.join(c.__name__ for c in FAMILIES)}, "
                "or write your rule as a class of mgpu.optimizers.Optimizer.")
        if not isinstance(network.net, nn.Module):
            raise ValueError(
                "an optimiser object is of the network's own framework; "
                f"received torch.optim.{type(x).__name__}, which has no "
                f"parameters of {type(network.net).__name__}. Pass the name, "
                f"{FAMILIES[type(x)]!r}, with semantics='torch'.")
        super().__init__(x)
        self._network = network
        #: its parameters by group, and what the network calls them
        self._groups: list[list[Any]] = []
        self._names: list[frozenset[str]] = []
        self._arrays: list[Any] = []    # the network's, when they were named
        self.read()
        x.register_step_pre_hook(_Refusal(
            self, "step()", "Call trainer.step(batch_size) in its place."))
        x.register_state_dict_pre_hook(_Refusal(
            self, "state_dict()", "Save trainer.state_dict(), which has its "
            "groups too."))
        x.register_load_state_dict_pre_hook(_Refusal(
            self, "load_state_dict()", "Load what trainer.state_dict() gave "
            "with trainer.load_state_dict()."))

    # -- reading ------------------------------------------------------------

    def read(self) -> list[base.GivenGroup]:
        self._check_unused()
        self._name()
        return self._translated(self.object.param_groups, self._names)

    def _check_unused(self) -> None:
        x = self.object
        used = any(float(state.get("step", 1)) for state in x.state.values()
                   if state)
        if used or self.taken():
            raise ValueError(
                "a Trainer begins with an optimiser object that has updated "
                f"nothing, and remembers all itself; received a {_name(x)} "
                + ("with a state of its own" if used
                   else "that another Trainer has stepped with")
                + ". Make a new object, and a new Trainer; a state is loaded "
                "with trainer.load_state_dict.")
        patched = vars(x).get("step")
        hooked = [hook for table in (
            x._optimizer_step_pre_hooks, x._optimizer_step_post_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks)
                  for hook in table.values()
                  if not isinstance(hook, _Refusal)]
        if hooked or not type(x).step.__module__.startswith("torch.optim.") \
                or patched is not None \
                and not hasattr(patched, "_wrapped_by_lr_sched"):
            raise ValueError(
                "a Trainer does not call an optimiser's step; received a "
                f"{_name(x)} with " + ("hooks on its step" if hooked else
                                       "a step put in the place of its own")
                + ". Write them behind trainer.step.")

    def _name(self) -> None:
        """Look the names up, if other parameters are there."""
        groups = [list(group["params"]) for group in self.object.param_groups]
        arrays = _arrays(self._network)
        if _same(arrays, self._arrays) and len(groups) == len(self._groups) \
                and all(map(_same, groups, self._groups)):
            return
        if len(groups) < len(self._groups) \
                or not all(map(_same, groups, self._groups)):
            raise ValueError(
                "the parameters of a group stay in it, and a new group comes "
                "last (add_param_group); received a "
                f"{_name(self.object)} whose groups have others than before. "
                "Make a new object, and a new Trainer.")
        names = {id(p): joined(path, suffix_of(module, name))
                 for path, module, name, p in walk(self._network.net,
                                                   "_parameters")}
        strange = [f"group {i}, number {j}" + (
            "" if is_lazy(p) else f", of shape {tuple(p.shape)}")
                   for i, group in enumerate(groups)
                   for j, p in enumerate(group) if id(p) not in names]
        if strange:
            raise ValueError(
                "a Trainer's optimiser has parameters of its network, "
                f"{type(self._network.net).__name__}; received others: "
                f"{'; '.join(strange[:4])}"
                + (f", and {len(strange) - 4} more" if strange[4:] else "")
                + ". Make the object from replicas.net.parameters(); what "
                "has no gradient of the network's passes needs a step of "
                "your own.")
        self._names = [frozenset(names[id(p)] for p in group)
                       for group in groups]
        self._groups, self._arrays = groups, arrays

    def _translated(self, groups: Sequence[Mapping[str, Any]],
                    names: Sequence[frozenset[str]]
                    ) -> list[base.GivenGroup]:
        x, found = self.object, []
        for group, own in zip(groups, names, strict=True):
            family = FAMILIES[type(x)]
            for option in ("maximize", "differentiable"):
                if group.get(option):
                    raise ValueError(
                        "a Trainer minimises, and records nothing of an "
                        f"update; received {option}=True in a {_name(x)}. "
                        "Leave it out" + (", and give the loss the other "
                                          "sign." if option == "maximize"
                                          else "."))
            if family in ("adam", "adamw"):     # torch's update asks this
                family = "adamw" if group.get(
                    "decoupled_weight_decay", family == "adamw") else "adam"
            options = {"learning_rate": group["lr"],
                       "wd": group["weight_decay"],
                       **{name: group[name] for name in _OPTIONS[family]}}
            if family == "adagrad":     # read by its constructor
                options["initial_accumulator_value"] = \
                    x.defaults["initial_accumulator_value"]
            found.append(base.GivenGroup(own, family, options))
        if len({group.family for group in found}) > 1:
            raise ValueError(
                "the groups of an optimiser object have one formula; received"
                f" decoupled_weight_decay=True in some groups of an {_name(x)}"
                " and not in all. Make an Adam and an AdamW, each with a "
                "Trainer.")
        return found

    # -- what a trainer tells -----------------------------------------------

    def updated(self) -> None:
        super().updated()
        # Else a schedule warns that it has been stepped before this.
        self.object._opt_called = True

    def set_learning_rate(self, rate: float) -> None:
        groups = self.object.param_groups
        if len({group["lr"] for group in groups}) > 1:
            raise ValueError(
                "the groups of this optimiser object have rates of their own;"
                f" received one rate, {rate!r}. Write to its param_groups: "
                "for group in optimizer.param_groups: group['lr'] = ...")
        for group in groups:
            group["lr"] = rate

    def export(self) -> list[dict[str, Any]]:
        self.read()
        return [{"names": sorted(names), "options": {
            key: _plain(x) for key, x in group.items()
            if key not in _PARAMETERS and _is_plain(x)}}
            for group, names in zip(self.object.param_groups, self._names)]

    def fit(self, saved: Sequence[Mapping[str, Any]] | None, rate: float
            ) -> tuple[list[base.GivenGroup], Callable[[], None]]:
        self.read()
        groups = self.object.param_groups
        if saved is None:
            if len(groups) > 1:
                raise ValueError(
                    "states are loaded into as many groups of parameters as "
                    f"they are of; received those of one, for {len(groups)} "
                    f"of a {_name(self.object)}. Make an object with one "
                    "group.")
            saved = [{"names": self._names[0], "options": {"lr": rate}}]
        if [frozenset(group["names"]) for group in saved] != self._names:
            raise ValueError(
                "states are loaded into the same groups of parameters, in "
                "the same order; received those of groups with "
                f"{[len(group['names']) for group in saved]} parameters, for "
                f"a {_name(self.object)} with "
                f"{[len(names) for names in self._names]}, or with others. "
                "Make the groups that were saved.")
        options = [{key: tuple(x) if isinstance(x, list) else x
                    for key, x in group["options"].items()
                    if key not in _PARAMETERS} for group in saved]
        found = self._translated(
            [{**group, **new} for group, new in zip(groups, options)],
            self._names)
        return found, partial(_write, self.object, options)


def _write(x: Any, options: Sequence[Mapping[str, Any]]) -> None:
    for group, new in zip(x.param_groups, options, strict=True):
        group.update(new)


def _name(x: Any) -> str:
    return f"torch.optim.{type(x).__name__}"


def _plain(x: Any) -> Any:
    """Scalars of NumPy as Python's, which JSON takes."""
    return type(x)(map(_plain, x)) if isinstance(x, (list, tuple)) \
        else x.item() if isinstance(x, np.generic) else x


def _is_plain(x: Any) -> bool:
    x = _plain(x)
    return x is None or isinstance(x, (bool, int, float, str)) or isinstance(
        x, (list, tuple)) and all(isinstance(one, (int, float)) for one in x)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _arrays(network: Any) -> list[Any]:
    """The network's parameters, as they are now."""
    return arrays_of(network.net)


class PyTorchGiven(base.Given):
    """Optimisers, schedules and initialisers of PyTorch."""

    def optimizer(self, x: Any, network: base.Network
                  ) -> base.GivenOptimizer | None:
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
