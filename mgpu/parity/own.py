"""The run of a training step that the user has written."""
import contextlib
import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends import using_backend
from mgpu.backends.probing import AVERAGE, Observed
from mgpu.checkpoints.trainer_states import TrainerStates
from mgpu.collectives.host_memory import HOST_OPS
from mgpu.data.nested import leaves
from mgpu.optim import RULES, Optimizer
from mgpu.parity.live import LiveRun, rows_of_shards
from mgpu.parity.masks import Masks
from mgpu.parity.run import (Arrays, Calls, LayerCall, OwnStep, State,
                             StepResult, UpdateRule, join_devices)
from mgpu.utils.arguments import is_number

#: the name of an optimizer that mgpu has no rule for
UNKNOWN = "unknown"


class _Seen(NamedTuple):
    """What one call of the user's step has shown."""

    outputs: list[np.ndarray]
    value: Any
    observed: Observed
    ran: dict[str, bool]    # by path of a layer: in training mode
    counts: dict[str, int]  # by statistic: values of a channel in the batch
    calls: Calls


class Update(NamedTuple):
    """One update that an optimizer of the user's own makes.

    Attributes
    ----------
    before : State
        Values and memory before it.
    gradients : dict of str -> ndarray
        As the optimizer gets them, divided as it divides them.
    rates, last : dict of str -> float
        The rates of this update and of the one before in the same step.
    """

    before: State
    gradients: Arrays
    rates: dict[str, float]
    last: dict[str, float]


class OwnRun(LiveRun):
    """A `Side` with a `step`: the user's code takes the steps, on one device.

    The network is prepared as for mgpu; then ``side.step(net)`` returns
    ``(step, parts)``. Nothing of mgpu runs in a step: it is watched.

    Attributes
    ----------
    parts : mgpu.backends.probing.OwnParts
    instead : callable or None
        What makes of an `Update` the state that takes the place of what the
        optimizer has computed.
    """

    instead: Callable[[Update], State] | None = None

    def __init__(self, side: Any, sample: Any, dtype: str, masks: Masks):
        super().__init__(side, sample, dtype, masks)
        try:
            self._prepare(side)
        except BaseException:
            self.restore()
            raise

    def _prepare(self, side: Any) -> None:
        if len(self.devices) != 1:
            raise ValueError(
                "a step of the user's own runs on one device; received "
                f"{len(self.devices)}. Give that side devices=1.")
        with using_backend(self.name):
            for parameter in self.replicas.params():
                if parameter.grad_req == "write":   # as without mgpu
                    parameter.grad_req = self.backend.plain_request
            made = side.step(self.net)
            self.replaces = False   # by the user's code
            if not isinstance(made, tuple) or len(made) != 2 \
                    or not callable(made[0]):
                raise TypeError(
                    "the function of a step returns (step, parts), where "
                    "step(x, y) takes one step; received "
                    f"{type(made).__name__}. Return for example (step, "
                    "[optimizer]).")
            self._own, parts = made
            self.parts = self.network.own_parts(
                list(parts) if isinstance(parts, (list, tuple)) else [parts])
            self._rule = self._known_rule(self.parts.rule)
            if self._rule is None:
                self.parts.rule = None
        self._rates: dict[int, dict[str, float]] = {}
        self._at, self._put_back = -1, self._keep()
        #: by step: what puts back the state before it
        self._before_step: dict[int, Callable[[], None]] = {}
        self.updates = self._own_rule()

    def _known_rule(self, rule: Any) -> Optimizer | None:
        """What the parts' optimizers compute, as one of mgpu."""
        if rule is None:
            return None
        family, options = rule
        try:
            kind = RULES[self.backend.semantics][family]
            known = {f.name for f in fields(kind)}
            return kind(**{k: v for k, v in options.items() if k in known})
        except (KeyError, TypeError, ValueError):
            return None

    def _own_rule(self) -> UpdateRule:
        parts, rule = self.parts, self._rule
        names = [p.name for p in self.replicas.params()]
        return UpdateRule(
            rule or Optimizer(),
            sorted(rule.create_state(np.zeros(1), HOST_OPS)) if rule
            else [f"those of {parts.text}"],
            {n: parts.lr_mult.get(n, 0.0) for n in names},
            {n: parts.wd_mult.get(n, 0.0) for n in names}, names,
            self._moved_by)

    def _moved_by(self, name: str, num_update: int) -> float:
        """That of an update which is known, of this one or one before."""
        known = max((n for n in self._rates if n <= num_update), default=None)
        if known is not None:
            return self._rates[known].get(name, 0.0)
        return self._rule.learning_rate * self.parts.lr_mult.get(name, 0.0) \
            if self._rule else 0.0

    def options(self) -> dict[str, Any]:
        own = f"the step's own: {self.parts.text}"
        return {**super().options(), "optimizer": own,
                "loss": "the step's own", "batch_norm": "the framework's own"}

    def drops(self) -> bool:        # F.dropout is no layer
        return super().drops() or self.masks.drawn

    # -- states -------------------------------------------------------------

    def state(self) -> State:
        slots, counts = self.parts.memory()
        rule = self._rule
        last = max(counts.values(), default=0)
        return State(super().state().values, TrainerStates(
            type(rule).__name__ if rule else UNKNOWN, last, 0.0,
            {n: t for n, t in counts.items() if t}, slots))

    def load(self, state: State, memory: bool = True) -> None:
        super().load(state, memory)
        if not memory:      # but the average is nobody's memory
            slots, counts = self.parts.memory()
            self.parts.load({**slots, **{
                key: value for key, value in state.optimizer.slots.items()
                if key[1] == AVERAGE}}, counts)

    def load_memory(self, states: TrainerStates) -> None:
        self.parts.load(states.slots, states.counts)

    # -- steps --------------------------------------------------------------

    def predict(self, X: Any, y: Any) -> list[np.ndarray]:
        try:
            return super().predict(X, y)
        except TypeError as error:
            if "missing" not in str(error.__cause__):
                raise
            raise TypeError(
                "the network of a step of the user's own can be called with "
                "X of a batch alone, which shows that parameters match; "
                f"received a network on {self.name} that needs more "
                f"({error.__cause__}). Give its other inputs a default, such "
                "as forward(self, x, state=None), which a layer begins "
                "with.") from error

    def _around(self, observed: Observed, names: list[str]
                ) -> Callable[[], None]:
        """What is called after an update of weights by their optimizer."""
        if self.instead is None:
            return lambda: None
        before, last, instead = self.state(), dict(observed.rates), \
            self.instead

        def after() -> None:
            state = instead(Update(
                before, {n: observed.applied[n] for n in names},
                dict(observed.rates), last))
            for p in self.replicas.params():
                if p.name in names:
                    p.set_data(state.values[p.name])
            self.load_memory(state.optimizer)
        return after

    def _begin(self, step: int) -> None:
        """Schedules and whatever else is not loaded are as they were before
        this step, also where it is taken once more."""
        if step == self._at:
            self._put_back()
        else:
            self._at, self._put_back = step, self._keep()

    def _keep(self) -> Callable[[], None]:
        """A function that puts back what the parts and the step remember."""
        undo = [self.parts.keep(), *_kept(self._own)]

        def put_back() -> None:
            for again in undo:
                again()
        return put_back

    def _take(self, X: Any, y: Any, step: int, watch: bool = False) -> _Seen:
        """Call the user's step."""
        (x,), (label,) = self.shards(X, y)
        outputs: list[Any] = []
        ran: dict[str, bool] = {}
        norms = {layer.path: layer for layer in self.layers
                 if layer.kind == "batch_norm"}
        counts: dict[str, int] = {}
        calls: list[Calls] = [[]]

        places: list[list[int]] = []    # of the rows of each call
        known: dict[bytes, list[int]] = {}
        for rows in self.copies(x)[:1]:
            for i, row in enumerate(rows):
                known.setdefault(row.tobytes(), []).append(i)
        met: Counter[bytes] = Counter()

        def place(row: np.ndarray) -> int:
            """Where a row is in the batch; equal ones have their turns."""
            key = row.tobytes()
            met[key] += 1
            return known[key][(met[key] - 1) % len(known[key])] \
                if key in known else -1

        def begins(inputs: Any) -> None:
            # Half a batch gets its rows of the masks of a whole one.
            places.append([place(row) for rows in self.copies(inputs)[:1]
                           for row in rows])
            self.masks.take(places[-1])

        def seen(output: Any) -> None:
            outputs.append(output)
            calls.append([])

        def told(path: str, inputs: Any, output: Any, index: int) -> None:
            trains = self.network.trains(path)
            if trains is None:
                return
            if path in norms:
                x, axis = inputs[0], norms[path].options["axis"]
                counts.update(dict.fromkeys(
                    norms[path].parameters, 0 if path in ran
                    else int(np.prod(x.shape)) // x.shape[axis]))
            ran[path] = trains and ran.get(path, True)
            if watch:
                calls[-1].append(LayerCall(path, self.copies(inputs),
                                           self.copies(output)))
        self.masks.begin(step, rows_of_shards([x]))
        with self.network.watch_layers(told), \
                self.network.natively(self.masks, begins, seen), \
                self.parts.observe(lambda names: self._around(
                    observed, names)) as observed:
            value = self._own(x, label)
        order = _order(places)
        return _Seen([_in_order(z, order) for z in self.returned(outputs)],
                     value, observed, ran, counts,
                     [call._replace(inputs=[
                         _in_order(z, order) for z in call.inputs], outputs=[
                         _in_order(z, order) for z in call.outputs])
                      for call in join_devices(calls[:-1])])

    def step(self, X: Any, y: Any, step: int = 0, predict: bool = True
             ) -> StepResult:
        with using_backend(self.name):
            self._begin(step)
            before = self.parts.memory()[1]
            predictions = self.predict(X, y) if predict else None
            seen = self._take(X, y, step)
            rows = len(next(iter(leaves(y))))
            after = self.state()
            observed = seen.observed
            if observed.rates:
                self._rates[after.optimizer.num_update] = observed.rates
            rate = next(iter(observed.rates.values()), 0.0)
            if rate:        # and options, which a schedule may move too
                rule = self._known_rule(observed.rule)
                self.updates = self.updates._replace(
                    optimizer=rule or self.updates.optimizer, lr_mult={
                        n: observed.rates.get(n, 0.0) / rate
                        for n in self.updates.lr_mult})

            def known(grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
                return {n: g * rows for n, g in grads.items()
                        if n in self.names}
            return StepResult(
                seen.outputs, self._losses(seen.value),
                known(observed.applied), after, {}, rate, [rows], rows,
                predictions, [p for p, trains in seen.ran.items() if trains],
                OwnStep(known(observed.left or observed.applied),
                        observed.scale, observed.loss_scale,
                        [p for p, trains in seen.ran.items() if not trains],
                        seen.counts,
                        after.optimizer.num_update
                        - max(before.values(), default=0),
                        observed.scales, observed.updates))

    def _losses(self, value: Any) -> np.ndarray:
        if isinstance(value, dict) and value:
            value = value.get("loss", next(iter(value.values())))
        if isinstance(value, (tuple, list)) and value:
            value = value[0]
        if value is None:
            return np.zeros(0)
        if self.backend.is_native(value):
            return np.atleast_1d(self.backend.to_numpy(value))
        if not is_number(value) and not isinstance(value, np.ndarray):
            raise TypeError(
                "a step returns its loss, one number or one for each "
                "example, or nothing; received "
                f"{type(value).__name__}. Return loss.")
        return np.atleast_1d(np.asarray(value, np.float64))

    @contextlib.contextmanager
    def _once(self) -> Iterator[None]:
        """What happens in the block leaves the parts as they are."""
        state, again = self.state(), self._keep()
        try:
            yield
        finally:
            again()
            self.load(state)

    def local_gradients(self, X: Any, y: Any, step: int) -> list[Arrays]:
        return self.refuse("gradients of single devices")

    def forward(self, X: Any, y: Any, step: int = 0) -> list[np.ndarray]:
        with using_backend(self.name), self._once():
            if step == self._at:
                self._put_back()
            return self._take(X, y, step).outputs

    def calls(self, X: Any, y: Any, step: int, *, predict: bool = False,
              first: bool = False) -> list[Calls]:
        if predict:
            return super().calls(X, y, step, predict=True, first=first)
        with using_backend(self.name):
            if step == self._at:    # asked for again after other steps
                self._before_step = {step: self._put_back}
            with self._once():
                self._before_step.get(step, lambda: None)()
                return [self._take(X, y, step, True).calls]


def _kept(step: Any, met: frozenset[int] = frozenset()
          ) -> list[Callable[[], None]]:
    """Functions that put back the numbers and the collections that a step
    remembers in variables of the function around it, or, a method, in its
    object. Arrays are taken for values that are replaced, not changed."""
    found: list[Callable[[], None]] = []
    for cell in getattr(step, "__closure__", None) or ():
        with contextlib.suppress(ValueError):       # empty as yet
            value = cell.cell_contents
            if inspect.isroutine(value):
                if inspect.isfunction(value) and id(value) not in met:
                    found += _kept(value, met | {id(step)})
                continue
            found += _kept_value(value, partial(setattr, cell,
                                                "cell_contents"))
    owner = getattr(step, "__self__", None)
    for name, value in (getattr(owner, "__dict__", None) or {}).items():
        found += _kept_value(value, partial(setattr, owner, name))
    return found


def _kept_value(value: Any, put: Callable[[Any], None]
                ) -> Iterator[Callable[[], None]]:
    if isinstance(value, (list, set, dict)):
        inside = value.values() if isinstance(value, dict) else value
        for x in inside:
            if isinstance(x, (list, set, dict)):
                yield from _kept_value(x, lambda _: None)
        yield partial(_refill, value, copy.copy(value))
    elif not hasattr(value, "__dict__") or hasattr(value, "shape"):
        yield partial(put, value)


def _refill(value: Any, now: Any) -> None:
    if isinstance(value, list):
        value[:] = now
    else:
        value.clear()
        value.update(now)


def _order(places: list[list[int]]) -> np.ndarray | None:
    """Where each row of the batch is among those that the calls of the
    network got; None if that is not clear, or there was one call."""
    found = [i for own in places for i in own]
    if len(places) < 2 or sorted(found) != list(range(len(found))):
        return None
    return np.argsort(found)


def _in_order(x: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    return x if order is None or not x.ndim or len(x) != len(order) \
        else x[order]
