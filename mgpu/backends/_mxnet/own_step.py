"""State of custom training steps with Gluon's Trainer."""
import contextlib
import copy
from collections.abc import (Callable, Iterator, Mapping, MutableMapping,
                             Sequence)
from typing import Any

import numpy as np

from mgpu.backends import messages
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.layers import stored
from mgpu.backends.probing import AVERAGE, AroundUpdate, Observed, OwnParts

FAMILIES = {getattr(mx.optimizer, name): name.lower() for name in (
    "SGD", "NAG", "Adam", "Adamax", "Nadam", "RMSProp", "AdaGrad", "AdaDelta",
    "Ftrl", "Signum")}
#: Gluon's attribute names -> those of `mgpu.optimizers`
OPTIONS = {"lr": "learning_rate", "float_stable_eps": "eps"}
#: names of the arrays of an optimizer state, in Gluon's order
SLOTS: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum",), "nag": ("momentum",), "signum": ("momentum",),
    "adam": ("mean", "variance"), "nadam": ("mean", "variance"),
    "adamax": ("mean", "norm"), "rmsprop": ("variance", "mean", "delta"),
    "adagrad": ("history",), "adadelta": ("variance", "delta_variance"),
    "ftrl": ("z", "n"), "lamb": ("mean", "variance"), "lars": ("momentum",),
    "ftml": ("d", "variance", "z"), "dcasgd": ("momentum", "previous"),
    "groupadagrad": ("row_history",)}


class MXNetParts(OwnParts):
    """See `mgpu.backends.probing.OwnParts`.

    Parameters
    ----------
    named : mapping of str -> gluon.Parameter
        Parameters of the network.
    buffers : mapping of str -> gluon.Parameter
        Running statistics of the network.
    """

    clip_epsilon = 1e-8

    def __init__(self, named: Mapping[str, Any], buffers: Mapping[str, Any],
                 parts: Sequence[Any]):
        self._named = dict(named)
        #: names in an average, of collect_params() or of mgpu -> mgpu's name
        known = {p.name: name for name, p in {**buffers, **named}.items()} \
            | {name: name for name in (*buffers, *named)}
        self._names = {id(p): name for name, p in named.items()}
        self._trainers: list[Any] = []
        self._others: list[Any] = []
        averages: list[Mapping[str, Any]] = []
        for part in parts:
            if isinstance(part, mx.gluon.Trainer):
                self._check(part)
                self._trainers.append(part)
                continue
            if isinstance(part, mx.gluon.Block):
                averages.append({
                    name: stored(p) for name, p
                    in part._collect_params_with_prefix().items()})
                if not averages[-1].keys() & known.keys():
                    raise messages.unknown_part(part)
            elif isinstance(part, Mapping) and part.keys() & known.keys():
                averages.append(part)
            elif isinstance(part, mx.lr_scheduler.LRScheduler) \
                    or isinstance(part, MutableMapping):
                self._others.append(part)
            else:
                raise messages.unknown_part(part)
        messages.check_parts(parts, self._trainers, averages, sum(
            id(p) not in self._names and p.grad_req != "null"
            for trainer in self._trainers for p in trainer._params))
        #: (dictionary, key), as user code may replace the arrays in it
        self._average = {known[key]: (own, key) for own in averages
                         for key in own.keys() & known.keys()}
        self.averaged = bool(self._average)
        self.text = ", ".join(
            f"Trainer ({type(part.optimizer).__name__})"
            if isinstance(part, mx.gluon.Trainer) else type(part).__name__
            for part in parts)
        self.rule, self.lr_mult, self.wd_mult = self._read()

    @staticmethod
    def _check(trainer: Any) -> None:
        if trainer._kvstore_params["update_on_kvstore"] or "dist" in str(
                trainer._kvstore_params["kvstore"]) \
                or trainer.optimizer.multi_precision:
            raise ValueError(
                "a distributed kvstore, update_on_kvstore and multi_precision "
                "are not supported in a compared step; received a trainer "
                "with one of them. Omit it.")

    def _weights(self) -> Iterator[tuple[Any, int, str]]:
        """(trainer, index there, name) of each weight."""
        for trainer in self._trainers:
            for index, p in enumerate(trainer._params):
                if id(p) in self._names:
                    yield trainer, index, self._names[id(p)]

    def _read(self) -> tuple[tuple[str, dict[str, Any]] | None,
                             dict[str, float], dict[str, float]]:
        rules = [_rule(trainer.optimizer) for trainer in self._trainers]
        same = len({repr(rule and (rule[0], {
            k: v for k, v in rule[1].items()
            if k not in ("learning_rate", "wd")})) for rule in rules}) == 1
        rule = max(rules, key=lambda rule: rule[1]["wd"] if rule else 0.0) \
            if same else None
        rate, decay = (rule[1].get(key, 0.0) if rule else 0.0
                       for key in ("learning_rate", "wd"))
        factors: list[dict[str, float]] = [{}, {}]
        for trainer, index, name in self._weights():
            p, optimizer = trainer._params[index], trainer.optimizer
            # lr is None with a schedule
            factors[0][name] = p.lr_mult * (
                optimizer.lr / rate if rate and optimizer.lr else 1.0)
            factors[1][name] = p.wd_mult * (optimizer.wd / decay
                                            if decay else 1.0)
        return rule, factors[0], factors[1]

    # -- memory -------------------------------------------------------------

    def memory(self) -> tuple[dict[tuple[str, str], np.ndarray],
                              dict[str, int]]:
        slots = {(name, AVERAGE): own[key].asnumpy()
                 for name, (own, key) in self._average.items()}
        counts = {}
        for trainer, index, name in self._weights():
            times = trainer.optimizer._all_index_update_counts[0].get(index)
            if times:
                counts[name] = times
            if index in trainer._updaters[0].states and self.rule is not None:
                slots |= {(name, slot): x for slot, x in read_state(
                    trainer._updaters[0], index, self.rule[0]).items()}
        return slots, counts

    def load(self, slots, counts) -> None:
        for name, (own, key) in self._average.items():
            if (name, AVERAGE) in slots:
                own[key][:] = _array(slots[name, AVERAGE], own[key])
        for trainer, index, name in self._weights():
            optimizer, updater = trainer.optimizer, trainer._updaters[0]
            own = optimizer._all_index_update_counts[0]
            own.pop(index, None)
            if counts.get(name):
                own[index] = counts[name]
            if self.rule is None:
                continue
            updater.states.pop(index, None)
            if counts.get(name):
                write_state(updater, index, stored(self._named[name]),
                            self.rule[0], {slot: x for (own_name, slot), x
                                           in slots.items()
                                           if own_name == name})
        for trainer in self._trainers:
            optimizer = trainer.optimizer
            optimizer.num_update = max(
                optimizer._all_index_update_counts[0].values(),
                default=optimizer.begin_num_update)

    def keep(self) -> Callable[[], None]:
        puts = [_kept(part) for part in self._others]
        for trainer in self._trainers:
            puts.append(_kept_trainer(trainer, self.rule is None))
        # a step may accumulate gradients of the previous one
        grads = [(p.grad(), p.grad().copy()) for p in self._named.values()
                 if p.grad_req != "null"]

        def put_back() -> None:
            for grad, own in grads:
                grad[:] = own
            for put in puts:
                put()
        return put_back

    # -- a step -------------------------------------------------------------

    @contextlib.contextmanager
    def observe(self, around: AroundUpdate | None = None
                ) -> Iterator[Observed]:
        seen = Observed()
        #: gradients by weight, before their update
        waiting: dict[str, np.ndarray] = {}
        backward, function = mx.nd.NDArray.backward, mx.autograd.backward

        trained = {name: p for name, p in self._named.items()
                   if p.grad_req != "null"}
        for name in trained.keys() - {name for *_, name in self._weights()}:
            stored(trained[name])._fresh_grad = False   # without a trainer

        def gradients() -> Iterator[tuple[str, np.ndarray]]:
            for name, p in trained.items():
                if stored(p)._fresh_grad:
                    yield name, p.grad().asnumpy()

        def watched(call: Callable[..., Any]) -> Callable[..., Any]:
            def passed(*args: Any, **options: Any) -> Any:
                result = call(*args, **options)
                waiting.update(gradients())
                return result
            return passed

        def updates(names: list[str], scale: float) -> Callable[[], None]:
            seen.rule, seen.scale = self._read()[0], scale
            seen.updates += 1
            seen.scales |= dict.fromkeys(names, scale)
            seen.left |= {n: waiting.pop(n) * scale for n in names
                          if n in waiting}
            return around(names) if around is not None else lambda: None

        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(
                mx.nd.NDArray, "backward", watched(backward)))
            stack.enter_context(replaced(
                mx.autograd, "backward", watched(function)))
            for trainer in self._trainers:
                own = trainer._updaters[0]
                trainer._updaters[0] = _Updater(
                    own, [self._names.get(id(p)) for p in trainer._params],
                    seen, updates)
                stack.callback(trainer._updaters.__setitem__, 0, own)
            yield seen
        seen.left = {n: g * seen.scale for n, g in waiting.items()
                     } | seen.left


class _Updater:
    """A Gluon updater that reports to `seen` and `updates`."""

    def __init__(self, own: Any, names: list[str | None], seen: Observed,
                 updates: Callable[[list[str], float], Callable[[], None]]):
        self._own, self._names, self._seen = own, names, seen
        self._updates = updates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, indices: Any, grads: Any, weights: Any) -> None:
        seen, optimizer = self._seen, self._own.optimizer
        rates: dict[int, float] = {}
        after = self._updates([name for i in indices if (
            name := self._names[i]) is not None], optimizer.rescale_grad)
        for index, grad in zip(indices, grads):
            name = self._names[index]
            if name is not None:
                seen.applied[name] = grad.asnumpy() * seen.scale
        with replaced(optimizer, "_get_lrs", _recording(
                optimizer._get_lrs, rates)):
            try:
                self._own(indices, grads, weights)
            except mx.MXNetError as error:
                if grads[0].dtype != np.float64:
                    raise
                raise ValueError(
                    f"{type(optimizer).__name__} of MXNet does not support "
                    "float64. Compare with dtype='float32'.") from error
        # AdaDelta has no learning rate.
        seen.rates |= {name: rates.get(index, 1.0) for index in indices
                       if (name := self._names[index]) is not None}
        after()


class _AnyDtype:
    """`mxnet.ndarray` for `gluon.utils`: in float64, ``clip_global_norm`` of
    MXNet 1.9.1 combines float64 and float32 norms, which raises."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mx.nd, name)

    @staticmethod
    def concat(*arrays: Any, **options: Any) -> Any:
        return mx.nd.concat(*(x.astype(arrays[0].dtype) for x in arrays),
                            **options)


def any_dtype_clipped() -> contextlib.AbstractContextManager[None]:
    """Context manager in which ``gluon.utils.clip_global_norm`` supports
    float64."""
    return replaced(mx.gluon.utils, "ndarray", _AnyDtype())


def _recording(rates_of: Callable[..., Any], found: dict[int, float]
          ) -> Callable[..., Any]:
    def lrs(indices: Any) -> Any:
        rates = rates_of(indices)
        found.update(zip(indices, rates))
        return rates
    return lrs


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager that sets an attribute of an object and restores it."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _slots(state: Any, family: str | None) -> list[tuple[str, Any]]:
    """Names and arrays of a weight's optimizer state."""
    parts = state if isinstance(state, (tuple, list)) else (state,)
    names = SLOTS.get(family or "", [*map(str, range(len(parts)))])
    return [(slot, x) for slot, x in zip(names, parts) if x is not None]


def read_state(updater: Any, index: int, family: str | None
               ) -> dict[str, np.ndarray]:
    """Optimizer state of a weight in a Gluon updater, by slot."""
    slots = {slot: x.asnumpy()
             for slot, x in _slots(updater.states[index], family)}
    return slots if family != "nadam" else {
        **slots, "schedule": np.array(updater.optimizer.m_schedule)}


def write_state(updater: Any, index: int, weight: Any, family: str | None,
                slots: Mapping[str, np.ndarray]) -> None:
    """Create the state of a weight in a Gluon updater, with the values
    `slots`."""
    optimizer = updater.optimizer
    state = optimizer.create_state_multi_precision(index, weight)
    for slot, x in _slots(state, family):
        if slot in slots:
            x[:] = _array(slots[slot], x)
    updater.states[index], updater.states_synced[index] = state, True
    if "schedule" in slots:
        optimizer.m_schedule = float(slots["schedule"])


def _array(value: np.ndarray, like: Any) -> Any:
    family = mx.np if isinstance(like, mx.np.ndarray) else mx.nd
    return family.array(value, ctx=like.ctx, dtype=like.dtype)


def _kept(part: Any) -> Callable[[], None]:
    """Return a function that restores the current state of a part."""
    values = {k: _copied(v) for k, v in _items(part).items()}

    def put_back() -> None:
        now = _items(part)
        now.clear()
        now.update({k: _copied(v) for k, v in values.items()})
    return put_back


def _items(part: Any) -> Any:
    return part if isinstance(part, MutableMapping) else vars(part)


def _copied(x: Any) -> Any:
    if isinstance(x, mx.nd.NDArray):
        return x.copy()
    if isinstance(x, (list, tuple)):
        return type(x)(map(_copied, x))
    return copy.deepcopy(x)


def _kept_trainer(trainer: Any, memory: bool) -> Callable[[], None]:
    """Return a function that restores options and schedule of a trainer; with
    `memory` also the optimizer state."""
    optimizer, updater = trainer.optimizer, trainer._updaters[0]
    numbers = {k: v for k, v in vars(optimizer).items()
               if isinstance(v, (int, float, type(None)))}
    schedule = optimizer.lr_scheduler
    again = _kept(schedule) if hasattr(schedule, "__dict__") else None
    states = {i: _copied(state) for i, state in updater.states.items()} \
        if memory else None

    def put_back() -> None:
        vars(optimizer).update(numbers)
        if again is not None:
            again()
        if states is not None:
            updater.states.clear()
            updater.states.update({i: _copied(s) for i, s in states.items()})
            updater.states_synced.update(dict.fromkeys(states, True))
    return put_back


def _rule(optimizer: Any) -> tuple[str, dict[str, Any]] | None:
    """The update rule of a Gluon optimizer, see `OwnParts`."""
    family = FAMILIES.get(type(optimizer))
    return None if family is None else (family, {
        OPTIONS.get(k, k): v for k, v in vars(optimizer).items()
        if isinstance(v, (int, float)) and k not in (
            "num_update", "begin_num_update", "rescale_grad", "m_schedule")})
