"""A run: one side of a comparison, taken a step at a time.

`Run` is what a comparison and the causes ask of a side. `mgpu.parity.live`
has the run of a network, `mgpu.parity.recorded` that of a file.
"""
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mgpu.backends.probing import Float32Functions, Layer
from mgpu.checkpoints.trainer_states import TrainerStates
from mgpu.errors import CannotRun as CannotRun
from mgpu.optim import Optimizer, counterpart
from mgpu.parity.batches import Batch
from mgpu.parity.forms import take
from mgpu.parity.keys import Path
from mgpu.parity.matching import Entry, Pair, Plan, RunWith

#: NumPy arrays by the name of a parameter
Arrays = dict[str, np.ndarray]


class State(NamedTuple):
    """What a step starts from: values by name (a running statistic has a
    leading axis with one entry per device) and the optimizer's memory."""

    values: Arrays
    optimizer: TrainerStates


class OwnStep(NamedTuple):
    """What is known besides of a step that the user has written.

    Attributes
    ----------
    left : dict of str -> ndarray
        Gradients as the backward pass left them, before the user's code or
        its parts changed them; on the scale of `StepResult.gradients`.
    scale : float
        What the optimizer multiplied the gradients by.
    loss_scale : float
        What the loss was multiplied by before the backward pass.
    predicted : list of str
        The paths of layers that ran in prediction mode.
    counts : dict of str -> int
        By running statistic: how many values of each channel the batch had;
        0 where the layer was called more than once.
    updates : int
        How many updates the step made.
    scales : dict of str -> float
        `scale` by weight, where they are known to differ.
    passes : int
        How many times an optimizer made an update. After the first one, what
        follows starts from other weights.
    """

    left: Arrays
    scale: float
    loss_scale: float
    predicted: list[str]
    counts: dict[str, int]
    updates: int
    scales: dict[str, float]
    passes: int


@dataclass
class StepResult:
    """What one step computed. Arrays are NumPy, by the names of the side.

    Attributes
    ----------
    outputs : list of ndarray
        What the network returned: the rows of all devices, in order.
    losses : ndarray
        One value per example, or one per device where the loss reduces.
    gradients : dict of str -> ndarray
        Summed over devices, not divided. A parameter that no backward pass
        reached is not there.
    after : State
    apart : dict of str -> float
        For parameters whose copies or gradients differ between devices after
        the step: the largest difference.
    rate : float
        The learning rate of the update.
    rows : list of int
        The number of rows of each device.
    divisor : int
        The number that the gradients were divided by.
    predictions : list of ndarray or None
        What the network returned in prediction mode, from the state before
        the step. None where it was not recorded.
    ran : list of str
        The paths of the innermost layers that ran in training mode, in the
        order of their first calls.
    own : OwnStep or None
    """

    outputs: list[np.ndarray]
    losses: np.ndarray
    gradients: Arrays
    after: State
    apart: dict[str, float] = field(default_factory=dict)
    rate: float = 0.0
    rows: list[int] = field(default_factory=list)
    divisor: int = 1
    predictions: list[np.ndarray] | None = None
    ran: list[str] = field(default_factory=list)
    own: OwnStep | None = None


class LayerCall(NamedTuple):
    """One call of an innermost layer on one device."""

    path: str
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


Calls = list[LayerCall]

#: by the number of a call, what takes the place of its outputs
Put = Mapping[int, list[np.ndarray]]


class UpdateRule(NamedTuple):
    """How a side updates its weights.

    Attributes
    ----------
    optimizer : Optimizer
        A plain `Optimizer`, without a formula, where the class of a recorded
        one is not known.
    slots : list of str
        What it remembers of a weight.
    lr_mult, wd_mult : dict of str -> float
        For every parameter of the network.
    order : list of str
        The parameters in the order in which the optimizer gets them.
    last_rate : callable
        ``last_rate(name, num_update)``: the rate with which update
        `num_update` moved a parameter, its multiplier included.
    """

    optimizer: Optimizer
    slots: list[str]
    lr_mult: dict[str, float]
    wd_mult: dict[str, float]
    order: list[str]
    last_rate: Callable[[str, int], float]

    def by_element(self) -> bool:
        """Whether the update is the same however the parameters are
        divided: element by element, and without a look at the others."""
        rule = type(self.optimizer)
        return self.optimizer.elementwise \
            and rule.begin_step is Optimizer.begin_step


class Run(ABC):
    """One side of a comparison, a step at a time.

    A recorded run raises `CannotRun` where only a network can answer; so do
    the defaults here. `X` and `y` are a batch as it comes, before
    `Side.prepare`, but for `forward`.

    Attributes
    ----------
    name : str
        The engine's.
    dtype : str
    devices : list
        Devices, or their names where the run is recorded.
    entries : list of Entry
        Parameters and running statistics.
    layers : list of mgpu.backends.probing.Layer
    batch_norm : str
        The policy of `mgpu.initialize`.
    updates : UpdateRule
    float32 : Float32Functions or None
        Of a network that can compute as MXNet does.
    replaces : bool
        Whether it answers `forced`.
    nudge : callable or None
        Where mgpu takes the steps, by what the losses of a device are
        multiplied before the backward pass, from ones.
    draws : bool
        Whether code of the user's own was seen to draw random numbers.
    keys : dict of str -> list of Path
        Of the last outputs, in stages "output" and "prediction".
    like : mapping of str -> list of Path
        The `keys` of another run, in whose order the outputs are.
    """

    name: str
    dtype: str
    devices: Sequence[Any]
    entries: list[Entry]
    layers: list[Layer]
    batch_norm: str
    updates: UpdateRule
    float32: Float32Functions | None = None
    replaces: bool = False
    nudge: Callable[[np.ndarray], np.ndarray] | None = None
    draws: bool = False
    keys: dict[str, list[Path]]
    like: Mapping[str, Sequence[Path]] = MappingProxyType({})

    def by_path(self) -> dict[str, Layer]:
        """The layers, and the functions between them that have been seen, by
        path."""
        return {layer.path: layer for layer in self.layers}

    def drops(self) -> bool:
        """Whether there is anything that may drop elements."""
        return self.draws or any(x.kind == "dropout" for x in self.layers)

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """How this side trains, for a report."""

    @abstractmethod
    def state(self) -> State:
        """The values and the optimizer's memory now, as copies."""

    @abstractmethod
    def load(self, state: State, memory: bool = True) -> None:
        """Start from `state`. If the number of devices differs, each device
        gets the mean of the statistics. ``memory=False`` leaves the optimizer
        as it is."""

    @abstractmethod
    def restore(self) -> None:
        """Give the user's network its values and dtype back."""

    @abstractmethod
    def step(self, X: Any, y: Any, step: int = 0, predict: bool = True
             ) -> StepResult:
        """Take one step of training.

        Parameters
        ----------
        X, y : NumPy arrays with one row per example, or nested ones
        step : int
            Chooses the dropout masks.
        predict : bool
            Whether the predictions are asked for.
        """

    @abstractmethod
    def probe(self, X: Any) -> RunWith:
        """A function for `matching.Probe`, with the input `X`."""

    @abstractmethod
    def prepared(self, X: Any, y: Any) -> Batch:
        """The batch after `Side.prepare`."""

    def forward(self, X: Any, y: Any, step: int = 0) -> list[np.ndarray]:
        """The outputs of a training pass, which is then forgotten, from a
        batch as `prepared` returns it. Running statistics may move."""
        self.refuse("forward pass")

    def calls(self, X: Any, y: Any, step: int, *, predict: bool = False,
              first: bool = False) -> list[Calls]:
        """For each device with rows, the calls of all innermost layers in a
        training pass (`predict`: in a prediction). `first`: only for the
        first of these devices."""
        self.refuse("calls of layers")

    def forced(self, X: Any, y: Any, step: int, put: Sequence[Put]
               ) -> tuple[list[Calls], list[np.ndarray], np.ndarray]:
        """The calls of all innermost layers in a training pass, by device
        with rows, its outputs and its losses. After each call, what it says
        in `put` takes the place of the outputs; those of the call are what
        the layer computed."""
        self.refuse("pass of other values")

    def local_gradients(self, X: Any, y: Any, step: int) -> list[Arrays]:
        """Each device's own gradients, before they are summed."""
        self.refuse("gradients of single devices")

    def shares_memory(self) -> bool:
        """Whether parameters of two devices are known to share memory."""
        return False

    @staticmethod
    def refuse(what: str) -> NoReturn:
        raise CannotRun(f"this side is a trace, which has no {what}")


def translate(state: State, plan: Plan, source: Run, target: Run) -> State:
    """A state of `source` in the names and terms of `target`.

    Where Gluon's momentum (rate inside the velocity) meets torch's (rate
    outside), ``b = -v / rate`` with the rate of the last update. Tensors
    that become one have been updated equally often, or a step before has
    differed in their gradients.
    """
    memory = state.optimizer
    slots: dict[tuple[str, str], np.ndarray] = {}
    counts: dict[str, int] = {}
    inside = type(source.updates.optimizer).rate_in_velocity
    for pair in plan.pairs:
        for slot in {s: None for n, s in memory.slots if n in pair.a}:
            known = [memory.slots[n, slot] for n in pair.a
                     if (n, slot) in memory.slots]
            if not np.ndim(known[0]):   # a number: the last, if they differ
                slots.update({(n, slot): known[-1] for n in pair.b})
                continue
            own = [_slot(state, n, slot, pair) for n in pair.a]
            if slot == "momentum" and inside:
                own = [_scaled(x, velocity_factor(
                    source.updates, target.updates, n, pair.b[0],
                    memory.num_update)) for n, x in zip(pair.a, own)]
            for n, x in zip(pair.b, take(pair.steps, own)):
                if slot == "momentum" and not inside:
                    x = x * velocity_factor(
                        source.updates, target.updates, pair.a[0], n,
                        memory.num_update)
                slots[n, slot] = x
        times = [memory.counts[n] for n in pair.a if n in memory.counts]
        counts.update({n: max(times) for n in pair.b if times})
    return State(plan.to_b(state.values), memory._replace(
        slots=slots, counts=counts))


def _scaled(x: np.ndarray, factor: float) -> np.ndarray:
    if not factor and x.any():
        raise ValueError(
            "Gluon's velocity holds the rate and PyTorch's does not, so that "
            "one becomes the other by the rate of the last update; received "
            "an update with a rate of 0 after others. Let the schedule stay "
            "above 0, or compare without momentum.")
    return x * factor


def _slot(state: State, name: str, slot: str, pair: Pair) -> np.ndarray:
    """What the optimizer remembers of a parameter: zeros where it has not
    moved yet, as its partners have."""
    shape = state.values[name].shape
    value = state.optimizer.slots.get((name, slot), np.zeros(()))
    if pair.steps and value.ndim and value.shape != shape:
        raise ValueError(
            "a parameter of another form has an optimizer whose memory has "
            f"the parameter's shape; received {slot} {value.shape} of "
            f"{name} {shape}. Use an optimizer of mgpu.")
    return value if value.ndim else np.broadcast_to(value, shape)


def common_factor(left: Arrays, applied: Arrays) -> float | None:
    """The one number that all gradients were multiplied by, if it is one."""
    names = [n for n in left if n in applied]
    square = sum(float(np.vdot(left[n], left[n])) for n in names)
    if not square:
        return None
    factor = sum(float(np.vdot(left[n], applied[n])) for n in names) / square
    near = all(np.allclose(applied[n], left[n] * factor, rtol=1e-9,
                           atol=1e-12 * np.abs(left[n]).max(initial=0.0))
               for n in names)
    return factor if near else None


def gradients_left(step: StepResult) -> Arrays:
    """The gradients as the backward pass left them."""
    return step.own.left if step.own else step.gradients


def norms_left(step: StepResult) -> list[float]:
    """The norm of all of them, and of those that the optimizer gets, divided
    as it divides them."""
    return [float(np.sqrt(sum(float(np.vdot(g, g)) for g in own)))
            / step.divisor for left in [gradients_left(step)] for own in (
                left.values(), [left[n] for n in left
                                if n in step.gradients])]


def velocity_factor(source: UpdateRule, target: UpdateRule, name: str,
                    other: str, num_update: int) -> float:
    """The factor that turns a velocity of `source` into one of `target`,
    which calls the weight `other`."""
    one, two = type(source.optimizer), type(target.optimizer)
    if one.rate_in_velocity and rate_outside_velocity(two):
        rate = source.last_rate(name, num_update)
        return -1 / rate if rate else 0.0
    if rate_outside_velocity(one) and two.rate_in_velocity:
        return -target.last_rate(other, num_update)
    return 1.0


def rate_outside_velocity(rule: type[Optimizer]) -> bool:
    """Whether `rule` is torch's form of a Gluon rule with the rate inside
    the velocity."""
    gluons = counterpart(rule, "gluon")
    return gluons is not None and gluons.rate_in_velocity \
        and not rule.rate_in_velocity


def at_one_device(state: State, entries: Sequence[Entry]) -> Arrays:
    """The values of a state, with the statistics of the first device."""
    return {e.name: state.values[e.name][0] if e.is_statistic
            else state.values[e.name] for e in entries}


def join_devices(calls: Sequence[Calls]) -> Calls:
    """The calls of all devices as if one device had had all rows."""
    def join(columns: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        return [np.concatenate([np.atleast_1d(x) for x in xs])
                for xs in zip(*columns)]
    return [LayerCall(same[0].path, join([c.inputs for c in same]),
                      join([c.outputs for c in same]))
            for same in zip(*calls)]
