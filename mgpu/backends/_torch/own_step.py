"""State of custom training steps with torch's optimizers."""
import contextlib
import copy
from collections.abc import (Callable, Iterator, Mapping, MutableMapping,
                             Sequence)
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from mgpu.backends import messages
from mgpu.backends._torch.arithmetic import take_number
from mgpu.backends.native_objects import Memory
from mgpu.backends.probing import (AVERAGE, AroundUpdate, DrawMask, Observed,
                                   OwnParts)

#: class -> rule of mgpu; exact classes, as a subclass may differ
FAMILIES = {getattr(torch.optim, name): name.lower() for name in (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RMSprop", "Adagrad",
    "Adadelta")}
#: torch's option names -> those of `mgpu.optimizers`, if they differ
_OPTIONS = {"lr": "learning_rate", "weight_decay": "wd"}
#: torch's names in ``optimizer.state`` -> slots of `mgpu.optimizers`
_SLOTS = {"momentum_buffer": "momentum", "exp_avg": "mean",
          "exp_avg_sq": "variance", "max_exp_avg_sq": "max_variance",
          "exp_inf": "norm", "square_avg": "variance", "grad_avg": "mean",
          "acc_delta": "delta_variance", "sum": "history",
          "mu_product": "schedule"}
_KEYS = {"sgd": ("momentum_buffer",), "nag": ("momentum_buffer",),
         "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
         "adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
         "adamax": ("exp_avg", "exp_inf"),
         "nadam": ("exp_avg", "exp_avg_sq", "mu_product"),
         "rmsprop": ("square_avg", "grad_avg", "momentum_buffer"),
         "adagrad": ("sum",), "adadelta": ("square_avg", "acc_delta")}


class TorchParts(OwnParts):
    """See `mgpu.backends.probing.OwnParts`.

    Parameters
    ----------
    named : mapping of str -> Parameter
        Parameters of the network.
    paths : mapping of str -> str
        Torch's names of parameters and buffers -> mgpu's.
    modules : sequence of Module
        Modules of the network, whose modes the step may change.
    """

    clip_epsilon = 1e-6

    def __init__(self, named: Mapping[str, Any], paths: Mapping[str, str],
                 parts: Sequence[Any], modules: Sequence[nn.Module]):
        self._named, self._switched = dict(named), list(modules)
        self._names = {id(p): name for name, p in named.items()}
        self._optimizers: list[Any] = []
        self._others: list[Any] = []
        averages: list[Mapping[str, Any]] = []
        for part in parts:
            if isinstance(part, torch.optim.LBFGS):
                raise messages.unknown_part(part)   # several passes per step
            if isinstance(part, torch.optim.Optimizer):
                self._optimizers.append(part)
                continue
            if isinstance(part, nn.Module):
                averages.append({**dict(part.named_parameters()),
                                 **dict(part.named_buffers())})
                if not self._in_average(averages[-1], paths):
                    raise messages.unknown_part(part)
            elif isinstance(part, Mapping) and part.keys() & paths.keys():
                averages.append(part)
            elif not isinstance(part, MutableMapping) and not (
                    hasattr(part, "state_dict")
                    and hasattr(part, "load_state_dict")):
                raise messages.unknown_part(part)
            self._others.append(part)
        messages.check_parts(parts, self._optimizers, averages, sum(
            id(p) not in self._names for _, group in self._groups()
            for p in group["params"]))
        #: (dictionary, key), as user code may replace the tensors in it
        self._average = {name: (own, key) for own in averages for name, key
                         in self._in_average(own, paths).items()}
        self.averaged = bool(self._average)
        self._scalers = [x for x in parts
                         if isinstance(x, torch.amp.GradScaler)]
        self.text = ", ".join(type(part).__name__ for part in parts)
        self.rule, self.lr_mult, self.wd_mult = self._read()
        #: number of updates, which SGD does not store
        self._counts = {
            name: int(state.get("step", 1))
            for optimizer, group in self._groups() for name in self._of(group)
            if (state := optimizer.state.get(self._named[name]))}

    @staticmethod
    def _in_average(own: Mapping[str, Any], paths: Mapping[str, str]
                    ) -> dict[str, str]:
        """Names of weights in mgpu -> in an average."""
        return {paths[path]: key for key in own for path in
                {key, key.removeprefix("module.")} & paths.keys()}

    def _groups(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield optimizer, group

    def _read(self) -> tuple[tuple[str, dict[str, Any]] | None,
                             dict[str, float], dict[str, float]]:
        rules = [_rule(optimizer, group)
                 for optimizer, group in self._groups()]
        same = len({repr(rule and (rule[0], {
            k: v for k, v in sorted(rule[1].items())
            if k not in ("learning_rate", "wd", "initial_lr")}))
            for rule in rules}) == 1
        rule = max(rules, key=lambda rule: rule[1]["wd"] if rule else 0.0) \
            if same else None
        rate = next(float(group["lr"]) for _, group in self._groups())
        decay = max(float(group.get("weight_decay", 0.0))
                    for _, group in self._groups())
        lr_mult, wd_mult = {}, {}
        for _, group in self._groups():
            for name in self._of(group):
                lr_mult[name] = float(group["lr"]) / rate if rate else 1.0
                wd_mult[name] = float(group.get("weight_decay", 0.0)) \
                    / decay if decay else 1.0
        return rule, lr_mult, wd_mult

    def _of(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[id(p)] for p in group["params"]
                if id(p) in self._names]

    # -- memory -------------------------------------------------------------

    def memory(self) -> tuple[dict[tuple[str, str], np.ndarray],
                              dict[str, int]]:
        slots = {(name, AVERAGE): _to_numpy(own[key])
                 for name, (own, key) in self._average.items()}
        for optimizer in self._optimizers if self.rule else ():
            own, counts = read_memory(optimizer, self._moved_by(optimizer))
            slots |= own
            self._counts |= counts
        return slots, dict(self._counts)

    def _moved_by(self, optimizer: Any) -> dict[str, Any]:
        return {name: self._named[name] for group in optimizer.param_groups
                for name in self._of(group)}

    def load(self, slots, counts) -> None:
        self._counts = dict(counts)
        with torch.no_grad():
            for name, (own, key) in self._average.items():
                if (name, AVERAGE) in slots:
                    own[key].copy_(torch.from_numpy(slots[name, AVERAGE]))
        for optimizer in self._optimizers if self.rule else ():
            write_memory(optimizer, self._moved_by(optimizer), slots, counts)

    def keep(self) -> Callable[[], None]:
        groups = [{k: copy.deepcopy(v) for k, v in group.items()
                   if k != "params"} for _, group in self._groups()]
        memory = [] if self.rule else [
            {p: copy.deepcopy(state) for p, state in optimizer.state.items()}
            for optimizer in self._optimizers]
        others = [_kept(part) for part in self._others]
        grads = {p: _copied(p.grad) for p in self._named.values()}
        modes = [(module, module.training) for module in self._switched]

        def put_back() -> None:
            for p, grad in grads.items():
                p.grad = _copied(grad)
            for module, mode in modes:
                module.training = mode
            for (_, group), own in zip(self._groups(), groups):
                group.update(copy.deepcopy(own))
            for optimizer, states in zip(self._optimizers, memory):
                optimizer.state.clear()
                for p, state in states.items():
                    optimizer.state[p] = copy.deepcopy(state)
            for again in others:
                again()
        return put_back

    # -- a step -------------------------------------------------------------

    @contextlib.contextmanager
    def observe(self, around: AroundUpdate | None = None
                ) -> Iterator[Observed]:
        scale = float(self._scalers[0].get_scale()) if self._scalers else 1.0
        seen = Observed(loss_scale=scale)
        #: gradients by weight, before their update
        waiting: dict[str, np.ndarray] = {}
        after: list[Callable[[], None]] = []

        def left(name: str, p: Any) -> None:
            if p.grad is not None:      # unless a hook has applied it
                waiting[name] = _to_numpy(p.grad) / scale

        def begins(optimizer: Any, args: Any, kwargs: Any) -> Any:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                updates(optimizer)
                return None

            def observed() -> Any:      # includes the backward pass
                result = closure()
                updates(optimizer)
                return result
            return (optimizer, observed), {}

        def updates(optimizer: Any) -> None:
            seen.rule = self._read()[0]
            seen.updates += 1
            if around is not None:
                after.append(around([
                    name for group in optimizer.param_groups
                    for name in self._of(group)
                    if self._named[name].grad is not None]))
            for group in optimizer.param_groups:
                for name in self._of(group):
                    grad = self._named[name].grad
                    if grad is not None:
                        seen.applied[name] = _to_numpy(grad)
                        if name in waiting:
                            seen.left[name] = waiting.pop(name)
                        seen.rates[name] = float(group["lr"])
                        self._counts[name] = self._counts.get(name, 0) + 1
        with contextlib.ExitStack() as stack:
            for name, p in self._named.items():
                if p.requires_grad:
                    stack.callback(p.register_post_accumulate_grad_hook(
                        partial(left, name)).remove)
            for optimizer in self._optimizers:
                stack.callback(
                    optimizer.register_step_pre_hook(begins).remove)
                stack.callback(optimizer.register_step_post_hook(
                    lambda *_: after and after.pop()()).remove)
            yield seen
        seen.left = {**waiting, **seen.left}


def read_memory(optimizer: Any, arrays: Mapping[str, Any]) -> Memory:
    """State of `optimizer` for `arrays`. Slots are named as in
    `mgpu.optimizers` for the classes in `FAMILIES`, as in torch for others."""
    slots: dict[tuple[str, str], np.ndarray] = {}
    counts: dict[str, int] = {}
    names = _SLOTS if type(optimizer) in FAMILIES else None
    for name, x in arrays.items():
        state = optimizer.state.get(x, {})
        if "step" in state:
            counts[name] = int(state["step"])
        slots |= {(name, key if names is None else names[key]):
                  _to_numpy(value) for key, value in state.items()
                  if value is not None and (names is None or key in names)}
    return slots, counts


def write_memory(optimizer: Any, arrays: Mapping[str, Any],
                 slots: Mapping[tuple[str, str], np.ndarray],
                 counts: Mapping[str, int]) -> None:
    """Restore the state returned by `read_memory`."""
    family = FAMILIES.get(type(optimizer))
    keys = {_SLOTS[key]: key for key in _KEYS[family]} if family else None
    found: dict[str, dict[str, Any]] = {name: {} for name in arrays}
    for (name, slot), value in slots.items():
        if name in found and (keys is None or slot in keys):
            found[name][slot if keys is None else keys[slot]] = value
    for name, x in arrays.items():
        optimizer.state.pop(x, None)
        # Before the first step, SGD has no buffer; Adagrad has its sums.
        if not found[name] or family == "sgd" and not counts.get(name):
            continue
        state = optimizer.state[x]
        if family and family != "sgd":
            state["step"] = torch.tensor(
                float(counts.get(name, 0)), dtype=torch.get_default_dtype())
        for key, value in found[name].items():
            state[key] = torch.as_tensor(
                value, dtype=x.dtype if np.ndim(value) else None,
                device=x.device if np.ndim(value) else None).clone()


def _to_numpy(x: Any) -> np.ndarray:
    return x.detach().cpu().numpy().copy() if isinstance(x, torch.Tensor) \
        else np.array(x)


def _kept(part: Any) -> Callable[[], None]:
    """Return a function that restores the current state of a part."""
    if isinstance(part, nn.Module):     # `load` sets the weights
        own = [(x, x.detach().clone()) for x in part.buffers()]

        def put_back() -> None:
            for x, value in own:
                x.detach().copy_(value)
    elif isinstance(part, MutableMapping):
        values = {k: _copied(v) for k, v in part.items()}

        def put_back() -> None:
            part.clear()
            part.update({k: _copied(v) for k, v in values.items()})
    else:
        state = copy.deepcopy(part.state_dict())

        def put_back() -> None:
            part.load_state_dict(copy.deepcopy(state))
    return put_back


def _copied(tree: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(
        x, torch.Tensor) else copy.deepcopy(x), tree)


def _rule(optimizer: Any, group: Mapping[str, Any]
          ) -> tuple[str, dict[str, Any]] | None:
    """The update rule of a parameter group, see `OwnParts`."""
    family = FAMILIES.get(type(optimizer))
    if family is None or group.get("maximize"):
        return None
    if family == "adam" and group.get("decoupled_weight_decay"):
        family = "adamw"
    if family == "sgd" and group.get("nesterov"):
        family = "nag"
    return family, {
        "wd": 0.0, **{_OPTIONS.get(k, k): float(v) if isinstance(
            v, torch.Tensor) else v for k, v in group.items()
            if k != "params"}}


class MaskedFunctions(TorchFunctionMode):
    """Mode in which ``F.dropout`` takes masks from `draw`. Recomputed calls
    in a checkpoint have the same mask."""

    def __init__(self, draw: DrawMask, again: dict[int, Any]):
        super().__init__()
        self._draw, self._again = draw, again

    def __torch_function__(self, function: Any, types: Any,
                           args: tuple[Any, ...] = (), kwargs: Any = None
                           ) -> Any:
        kwargs = kwargs or {}
        if function is not F.dropout:
            return function(*args, **kwargs)
        given = dict(zip(("input", "p", "training", "inplace"), args)) | kwargs
        x, rate = given["input"], given.get("p", 0.5)
        if not given.get("training", True):
            return x
        number = take_number(torch.device("cpu"))
        if number not in self._again:
            self._again[number] = self._draw(x, rate, (), 0)
        return x * self._again[number]
