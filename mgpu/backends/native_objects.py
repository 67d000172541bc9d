"""Optimizers and initializers that a framework has: `Given`, a part of the
contract in `base`.
"""
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from mgpu.backends.network import Network
from mgpu.backends.types import Array


class OptimizerGroup(NamedTuple):
    """A parameter group of an optimizer object, with its current options."""

    #: `Spec.name` of each parameter; None: all parameters of the trainer
    names: frozenset[str] | None
    #: a name of `mgpu.optimizers`, such as "sgd"; None: mgpu has no such rule
    family: str | None
    #: under mgpu's names, including learning_rate and wd
    options: dict[str, Any]


#: optimizer state: arrays by (parameter, slot), number of updates by parameter
Memory = tuple[dict[tuple[str, str], np.ndarray], dict[str, int]]


class Step(NamedTuple):
    """A step of an optimizer. Mappings have `Spec.name` as keys."""

    arrays: Mapping[str, Array]     # parameters to update
    #: multipliers of the learning rate and the weight decay
    factors: Mapping[str, tuple[float, float]]
    counts: Mapping[str, int]       # updates of each, including this one
    number: int                     # number of this step, from 1
    scale: float                    # multiplier of gradients
    loss_scale: float               # divisor of gradients


class OptimizerObject(Protocol):
    """An optimizer of a framework, or of mgpu, that a `Trainer` steps.

    It owns its options, state and schedule. User code and schedules may
    change them at any time."""

    object: Any
    #: framework whose update formulas it uses
    semantics: str
    #: multiplier of gradients, besides the division by the batch size
    scale: float = 1.0
    #: whether `schedule` may be set
    takes_schedule: bool = True
    #: all parameters of the network, in Gluon's order
    order: Sequence[str] = ()

    def __init__(self, x: Any) -> None:
        self.object = x

    #: ``rate = schedule(number of the update)``, if any
    schedule: Callable[[int], float] | None = None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first group, without a schedule."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of all groups. Raises ValueError if their
        learning rates differ."""

    def names(self) -> frozenset[str] | None:
        """Names of the network's parameters that it updates. None: all
        parameters of the trainer."""
        return None

    def others(self) -> list[Array]:
        """Other parameters that it updates, for example of a loss."""
        return []

    def gradients_of_others(self) -> list[Array]:
        """Gradients of `others`; zeros for missing ones."""
        return []

    def step(self, step: Step) -> None:
        """Update the arrays of `step`. Their gradients are unchanged; those
        of `others` are cleared."""

    def count(self, number: int) -> int:
        """Number of updates after step `number`."""
        return number

    def groups(self) -> list[OptimizerGroup]:
        """Parameter groups with their current options."""

    def memory(self) -> Memory:
        """Copy of the optimizer state. Slots are named as in
        `mgpu.optimizers` if mgpu has the rule."""

    def load(self, memory: Memory, arrays: Mapping[str, Array]) -> None:
        """Restore the state returned by `memory`."""

    def export(self) -> list[dict[str, Any]] | None:
        """Names and options of each group, serializable as JSON. None: only
        the learning rate is saved."""
        return None

    def fit(self, saved: Sequence[Mapping[str, Any]] | None, rate: float
            ) -> Callable[[], None]:
        """Return a function that restores the result of `export`; None: only
        the learning `rate` of the first group. Raises ValueError if the
        groups differ."""
        return partial(self.set_learning_rate, rate)


class GivenInitializer(Protocol):
    """A framework's initializer of a class that mgpu does not implement."""

    #: description for messages
    text: str

    def draw(self, name: str, shape: tuple[int, ...],
             rng: np.random.Generator) -> np.ndarray:
        """Initial values of the parameter `name`. They depend on the
        arguments only."""


class Given(Protocol):
    """Converts objects of a framework to mgpu's.

    The methods return None for an object of another kind, and raise an error
    with its name for an object without a counterpart. See
    `mgpu.backends.given`."""

    def optimizer(self, x: Any, network: Network
                  ) -> OptimizerObject | None:
        """Convert an optimizer, for a trainer of `network`."""

    def initializer(self, x: Any) -> GivenInitializer | list[
            tuple[re.Pattern[str], Any]] | None:
        """Convert an initializer, for `init` of `mgpu.initialize`. One that
        depends on names becomes a list of (pattern, initializer)."""
