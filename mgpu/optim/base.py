"""What every optimizer has in common: its options and its interface."""
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from mgpu.backends.ops import Ops
from mgpu.backends.types import Array
from mgpu.utils.arguments import Hints, finite

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:
    def dataclass_transform(**_):
        """Return a decorator that does nothing; only type checkers need it."""
        return lambda function: function

#: arrays and Python floats by name
State = dict[str, Any]


# -- options ----------------------------------------------------------------

# ranges of an option: in words, and as a function
_AT_LEAST_0 = ", 0 or more", lambda x: x >= 0
_BELOW_1 = " from 0 to below 1", lambda x: 0 <= x < 1
_UP_TO_1 = " from 0 to 1", lambda x: 0 <= x <= 1
_ABOVE_0 = " above 0", lambda x: x > 0
#: the range of an option; for those that are not named here, `_AT_LEAST_0`
_RANGES = {"beta1": _BELOW_1, "beta2": _BELOW_1, "betas": _BELOW_1,
           "gamma1": _UP_TO_1, "gamma2": _UP_TO_1, "rho": _UP_TO_1,
           "alpha": _UP_TO_1, "clip_gradient": _ABOVE_0,
           "clip_weights": _ABOVE_0, "seed": (
               ", a whole number, 0 or more", lambda x: x >= 0 and x % 1 == 0)}


def _checked(name: str, kind: Any, value: Any) -> Any:
    """The option's value as Python floats or a bool, or an error."""
    if kind is bool:
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False; received "
                            f"{value!r}.")
        return bool(value)
    if kind == tuple[float, float]:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise TypeError(f"{name} must be two numbers; received {value!r}. "
                            "Use for example betas=(0.9, 0.999).")
        return tuple(_checked(name, float, one) for one in value)
    if value is None and kind == float | None:
        return None
    finite(name, value, *_RANGES.get(name, _AT_LEAST_0))
    return float(value)


# -- the interface ----------------------------------------------------------

#: the classes of this package by semantics, then by family
RULES: dict[str, dict[str, type["Optimizer"]]] = {"gluon": {}, "torch": {}}

_Rule = TypeVar("_Rule", bound=type)


@dataclass_transform(eq_default=False, kw_only_default=True)
def rule(semantics: str, family: str) -> Callable[[_Rule], _Rule]:
    """Make a class an update rule: a dataclass of its options, in `RULES`."""
    def decorate(cls: Any) -> Any:
        cls = dataclass(eq=False, kw_only=True)(cls)
        cls.semantics, cls.family = semantics, family
        RULES[semantics][family] = cls
        return cls
    return decorate


@dataclass(eq=False, kw_only=True)
class Optimizer(Hints):
    """A rule that moves one weight; one object serves every device.

    It holds options only. What an update remembers is in the state of that
    weight on that device, so devices may be updated at the same time.

    Parameters
    ----------
    learning_rate : float
    wd : float
        Weight decay.
    clip_gradient : float, optional
        Limit of each gradient element's absolute value. None: no limit.

    Attributes
    ----------
    family : str
        The name under which `create` finds the class: "sgd", "adam", ...;
        the same with both semantics. "" for a class of no family.
    semantics : str
        Whose formula it is: "gluon" or "torch". "" for neither.
    rate_in_velocity : bool
        Whether the velocity (the state's ``"momentum"``) contains the
        learning rate, as in Gluon's sgd and nag. Then steps taken before a
        change of the rate keep their size.
    clips_before_decay : bool
        Whether the gradient is clipped before weight decay is added, or
        clipped with the decay in it.
    decoupled_decay : bool
        Whether weight decay acts on the weight only, as in adamw. Otherwise
        it is added to the gradient, so that the state contains it too.
        False where an option decides (torch's nadam).
    arrays : tuple of str
        The names of the arrays that `create_state` makes. One that is called
        as an option is made where the option is not 0. Where they depend on
        the options otherwise, the class overrides `slots`.
    divides_by_rate : bool
        Whether `update` divides by the rate, which is then above 0.
    needs_whole : bool
        Whether `update` needs a weight as a whole, for its norm or its rows.

    Raises
    ------
    TypeError
        An option of another type: not a number, or not a bool for a switch.
    ValueError
        An option out of its range, or options that exclude each other.
    """

    family: ClassVar[str] = ""
    semantics: ClassVar[str] = ""
    rate_in_velocity: ClassVar[bool] = False
    clips_before_decay: ClassVar[bool] = True
    decoupled_decay: ClassVar[bool] = False
    arrays: ClassVar[tuple[str, ...]] = ()
    divides_by_rate: ClassVar[bool] = False
    needs_whole: ClassVar[bool] = False

    learning_rate: float = 0.01
    wd: float = 0.0
    clip_gradient: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            setattr(self, field.name, _checked(
                field.name, field.type, getattr(self, field.name)))
        self.check_rate(self.learning_rate)

    def check_rate(self, lr: float) -> None:
        """ValueError for a rate of 0, where the rule divides by it."""
        if self.divides_by_rate and not lr > 0:
            raise ValueError(
                f"{self.family or type(self).__name__} divides by the "
                f"learning rate, which must be above 0; received {lr!r}. To "
                "keep a parameter as it is, freeze it.")

    def __setattr__(self, name: str, value: Any) -> None:
        if self.built_in and name not in self.__dataclass_fields__:
            raise AttributeError(
                f"{type(self).__name__} has the options "
                f"{[field.name for field in fields(self)]}; received "
                f"{name!r}. Trainer.set_learning_rate sets a rate.")
        super().__setattr__(name, value)

    @property
    def built_in(self) -> bool:
        """Whether it is of a class of this package."""
        return RULES.get(self.semantics, {}).get(self.family) is type(self)

    @property
    def elementwise(self) -> bool:
        """Whether `update` treats each element by itself.

        Then it may be given a weight piece by piece, as NumPy arrays. True
        for the classes of this package, but for those that need a weight as
        a whole. A class derived from them is asked again: it may define
        ``elementwise = True``.
        """
        return self.built_in and not self.needs_whole

    def create_state(self, weight: Array, ops: Ops) -> State:
        """What the rule remembers of `weight` before the first update.

        Returns
        -------
        dict
            Named slots, {} for a rule without memory: arrays of the shape,
            dtype and device of `weight`, or Python floats. `update` changes
            the arrays in place and may replace the floats.
        """
        return {name: ops.zeros_like(weight) for name in self.slots()}

    def begin_step(self, states: Sequence[State],
                   counts: Sequence[int | None]) -> None:
        """Prepare the updates of one step; called once for each device.

        Only `nadam` and `sgld` with Gluon's semantics need it: see there. It
        does nothing in the other classes.

        Parameters
        ----------
        states : sequence of dict
            The device's states, one per parameter of the network, in the
            parameters' order; {} where this trainer has none.
        counts : sequence of int or None
            For each state the `t` of the coming `update`, or None if that
            parameter is not updated in this step; -t if it is updated in
            Gluon alone, to no effect of its own.
        """

    def update(self, weight: Array, grad: Array, state: State, *, lr: float,
               wd: float, t: int, ops: Ops) -> None:
        """Move `weight`, in place; to be called inside
        ``scope(recording=False)``.

        Nothing is copied to the host and nothing blocks. `grad` is left as
        it is.

        Parameters
        ----------
        weight, grad : arrays of one shape, dtype and device
            `grad` is already divided by the batch size.
        state : dict
            From `create_state` of this weight; updated.
        lr, wd : float
            This parameter's rate and weight decay: multipliers and schedule
            are applied, `learning_rate` and `wd` of the object are not read.
        t : int
            1 at the first update of this parameter, then 2, 3, ...
        ops : Ops
            The functions of the backend that the arrays belong to.
        """
        decay = wd if self.decoupled_decay else 0.0
        step = self.compute_step(
            self.decayed(weight, grad, wd - decay, ops), state, lr, t, ops)
        weight -= step + weight * (lr * decay) if decay else step

    def compute_step(self, grad: Array, state: State, lr: float, t: int,
                     ops: Ops) -> Array:
        """What the weight loses by G = grad, without decoupled decay; called
        by `update`, unless a class has its own. It is not written to."""
        raise NotImplementedError

    def slots(self) -> tuple[str, ...]:
        """The names of the arrays that `create_state` makes."""
        return tuple(x for x in self.arrays if getattr(self, x, True))

    def clipped(self, x: Array, ops: Ops) -> Array:
        """`x` with every element within +-`clip_gradient`."""
        limit = self.clip_gradient
        return x if limit is None else limited(x, limit, ops)

    def decayed(self, weight: Array, grad: Array, wd: float,
                ops: Ops) -> Array:
        """G: the gradient, clipped and with weight decay added, in the order
        of `clips_before_decay`."""
        if self.clips_before_decay:
            grad = self.clipped(grad, ops)
        if wd:
            grad = grad + weight * wd
        return grad if self.clips_before_decay else self.clipped(grad, ops)


# -- what several rules compute ---------------------------------------------

def limited(x: Array, limit: float, ops: Ops) -> Array:
    """`x` with every element brought within +-limit.

    Not ``x.clip``: MXNet rounds its bounds to float32, and the backends would
    differ in the ninth digit.
    """
    return ops.minimum(ops.maximum(x, -limit), limit)


def move_average(average: Array, x: Array, keep: float) -> None:
    """``average <- keep average + (1 - keep) x``, in place."""
    average *= keep
    average += x * (1 - keep)


def nadam_momentum(beta1: float, decay: float, t: int) -> float:
    """Nadam's schedule: ``beta1 (1 - 0.96^(t decay) / 2)``."""
    return beta1 * (1 - 0.5 * 0.96 ** (t * decay))


# Of both libraries, as methods of their classes.

def averages(self, grad, state):
    """Adam's m and v, moved by G = grad."""
    move_average(state["mean"], grad, self.beta1)
    move_average(state["variance"], grad * grad, self.beta2)
    return state["mean"], state["variance"]


def adam_step(self, grad, state, lr, t, ops):
    """`compute_step` of Adam; with the largest v so far in the place of v
    where the state has a ``"max_variance"``."""
    mean, variance = averages(self, grad, state)
    if "max_variance" in state:
        largest = state["max_variance"]
        largest[:] = ops.maximum(largest, variance)
        variance = largest
    root = math.sqrt(1 - self.beta2 ** t)
    # Gluon's epsilon is outside the bias correction.
    epsilon = self.epsilon * (root if self.semantics == "torch" else 1.0)
    return mean * (lr * root / (1 - self.beta1 ** t)) / (
        ops.sqrt(variance) + epsilon)


def adamax_step(self, grad, state, lr, t, ops):
    """`compute_step` of Adamax, with epsilon added to the size of G."""
    mean, norm = state["mean"], state["norm"]
    move_average(mean, grad, self.beta1)
    norm[:] = ops.maximum(norm * self.beta2, ops.abs(grad) + self.epsilon)
    return mean * (lr / (1 - self.beta1 ** t)) / norm


def nadam_step(self, grad, state, lr, t, ops):
    """`compute_step` of Nadam."""
    now = nadam_momentum(self.beta1, self.schedule_decay, t)
    later = nadam_momentum(self.beta1, self.schedule_decay, t + 1)
    product = state["schedule"] = float(state["schedule"]) * now
    mean, variance = averages(self, grad, state)
    step = grad * (lr * (1 - now) / (1 - product))
    step += mean * (lr * later / (1 - product * later))
    return step / (ops.sqrt(variance / (1 - self.beta2 ** t)) + self.epsilon)


def adadelta_step(self, grad, state, lr, t, ops):
    """`compute_step` of AdaDelta."""
    variance, past = state["variance"], state["delta_variance"]
    move_average(variance, grad * grad, self.rho)
    step = ops.sqrt((past + self.epsilon) / (variance + self.epsilon)) * grad
    move_average(past, step * step, self.rho)
    return step * lr


def mean_square(grad: Array, state: State, keep: float) -> Array:
    """The average of G^2 that RMSProp keeps, moved by G = grad; minus the
    square of the average of G where the state has a ``"mean"``."""
    move_average(state["variance"], grad * grad, keep)
    if "mean" not in state:
        return state["variance"]
    move_average(state["mean"], grad, keep)
    return state["variance"] - state["mean"] * state["mean"]
