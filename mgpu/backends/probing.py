"""Interface for parity: access to layers, and custom training steps."""
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from mgpu.backends.types import Array, ContextManager



class Layer(NamedTuple):
    """Description of a layer without children, for both backends."""

    path: str           # "features.3.bn1"; "" for a network of one layer
    kind: str           # dense conv batch_norm dropout max_pool ..., or the
    #                     class name in lower case
    options: dict[str, Any]         # names as in `backends/_*/layers.py`
    parameters: tuple[str, ...]     # names of its `Spec`s, including buffers


#: activations that a class of the same name may compute with other functions
_COMPOSED = {"elu", "gelu", "hardsigmoid", "hardswish", "mish", "selu", "silu",
             "softplus", "softsign", "swish"}
#: kinds of functions that are reported
_OPS = {"activation", "clip", "hardtanh", "leaky_relu", "log_softmax", "relu",
        "relu6", "sigmoid", "softmax", "softrelu", "tanh", "upsample"}


def may_look_inside(layer: type, framework: str) -> bool:
    """Whether the functions called by an innermost layer without parameters
    are reported: if its class is user-defined and not named after an
    activation."""
    return not layer.__module__.startswith(framework + ".") \
        and layer.__name__.lower() not in _COMPOSED


def own_kind(layer: type) -> str:
    """The kind of a user-defined layer: its class name, with a prefix if that
    is the kind of a reported function."""
    name = layer.__name__.lower()
    return f"own {name}" if name in _OPS or name.endswith("pool") else name


def clipping(low: Any, high: Any) -> tuple[str, dict[str, Any]] | None:
    """(kind, options) of the layer that clips values to [`low`, `high`]. None
    if a bound is an array, or `low` is None. `high` None: unbounded."""
    high = math.inf if high is None else high
    if not all(isinstance(bound, (int, float)) for bound in (low, high)) \
            or math.isinf(low):
        return None
    kinds = {(0, math.inf): "relu", (0, 6): "relu6", (-1, 1): "hardtanh"}
    if (low, high) in kinds:
        return kinds[low, high], {}
    return "clip", {"low": float(low), "high": float(high)}


def named(known: dict[str, Layer], kind: str, options: dict[str, Any],
          after: str | None) -> str:
    """The path of a function in `known`, added if it is new: "F.relu after
    conv1", with a number to make it unique."""
    place = f"F.{kind}" + ("" if after is None else f" after {after}")
    path, number = place, 1
    while known.setdefault(path, Layer(path, kind, options, ())
                           ).options != options:
        number += 1
        path = f"{place} ({number})"
    return path


#: ``draw(x, rate, axes, index)`` returns the mask of a dropout layer that the
#: replica `index` applies to `x` in training: an array that broadcasts to `x`
#: (1 along `axes`) of zeros and ``1 / (1 - rate)``.
DrawMask = Callable[[Array, float, tuple[int, ...], int], Array]

#: ``seen(path, inputs, outputs, index)`` is called after each call of a layer
#: and, with a path of `Probe.functions`, of a function that has a layer, if it
#: is called between layers or in a user-defined one (`may_look_inside`). If
#: the backend supports it (`Probe.replaces`), a returned list of arrays
#: replaces the outputs.
LayerCallback = Callable[[str, tuple[Any, ...], Any, int],
                         "Sequence[Array] | None"]


@dataclass
class Float32Functions:
    """Functions of a float64 network that compute in float32, as MXNet's do.
    Set between calls.

    Attributes
    ----------
    names : frozenset of str
        Keys of `mgpu.parity.float32.WORDS`.
    gradients : bool
        Whether SELU has MXNet's gradient.
    watched : bool
        Whether calls are recorded.
    """

    names: frozenset[str] = frozenset()
    gradients: bool = False
    watched: bool = False
    #: functions called that could be in `names`, in order of the first calls
    met: dict[str, None] = field(default_factory=dict)


#: slot of the average of a weight, in a custom training step
AVERAGE = "average"


@dataclass
class Observed:
    """Record of a custom training step. Arrays are NumPy arrays by parameter
    name.

    Attributes
    ----------
    left : dict of str -> ndarray
        Gradients after the backward passes, on the scale of `applied`; of an
        updated weight, before its last update.
    applied : dict of str -> ndarray
        Gradients passed to the optimizers, divided by the divisor of these.
    rates : dict of str -> float
        Learning rate of each updated weight.
    scale : float
        Multiplier of the gradients in the optimizers.
    scales : dict of str -> float
        The same by weight, for optimizers with such multipliers.
    updates : int
        Number of optimizer updates.
    loss_scale : float
        Multiplier of the loss, of a loss scaler.
    rule : (str, dict) or None
        `OwnParts.rule` at the update.
    """

    left: dict[str, np.ndarray] = field(default_factory=dict)
    applied: dict[str, np.ndarray] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    scale: float = 1.0
    scales: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    loss_scale: float = 1.0
    rule: Any = None


#: called before an update with the names of the weights; returns a function
#: that is called after it
AroundUpdate = Callable[[list[str]], Callable[[], None]]


class OwnParts(Protocol):
    """State of a custom training step: optimizers, schedules, loss scalers,
    averages of the weights.

    Attributes
    ----------
    rule : (str, dict) or None
        Update rule: a name of `mgpu.optimizers` and its options. None if mgpu
        has no such rule, or if the optimizers have different rules.
    lr_mult, wd_mult : dict of str -> float
        Learning rate and weight decay of each weight of an optimizer, as
        multiples of those of `rule`.
    averaged : bool
        Whether an average of the weights exists, in slot `AVERAGE`.
    clip_epsilon : float
        Number that the backend's clipping adds to the global norm.
    text : str
        Description of the parts.
    """

    rule: tuple[str, dict[str, Any]] | None
    lr_mult: dict[str, float]
    wd_mult: dict[str, float]
    averaged: bool
    clip_epsilon: ClassVar[float]
    text: str

    def memory(self) -> tuple[dict[tuple[str, str], np.ndarray],
                              dict[str, int]]:
        """Copies of the optimizer state of `rule`, by (parameter, slot), and
        the number of updates by parameter."""

    def load(self, slots: Mapping[tuple[str, str], np.ndarray],
             counts: Mapping[str, int]) -> None:
        """Restore the state returned by `memory`. Other slots are
        unchanged."""

    def keep(self) -> Callable[[], None]:
        """Return a function that restores the state that `load` does not set:
        positions of schedules, learning rates, loss scales, and optimizer
        state that mgpu does not support."""

    def observe(self, around: AroundUpdate | None = None
                ) -> AbstractContextManager[Observed]:
        """Context manager around one step, which fills the `Observed` that it
        returns."""


class Probe(Protocol):
    """A network as parity observes it. `layers` and `settings` are also used
    to compare processes and to load values."""

    #: whether layers compute as without mgpu: on torch, batch norm stores the
    #: unbiased variance (see `Backend.gluonize`). Set before a call.
    own_arithmetic: bool = False
    #: None: the backend does not support it
    float32: Float32Functions | None = None
    #: whether the result of a `LayerCallback` replaces the outputs
    replaces: bool = False
    #: functions observed by `watch_layers`, see `LayerCallback`
    functions: dict[str, Layer]

    def layers(self) -> list[Layer]:
        """The innermost layers, in the order of creation. Shared layers are
        listed once."""

    def settings(self) -> dict[str, str]:
        """Options and mode, as text, of the framework's layers, by path.
        Equal in all processes."""

    def watch_layers(self, seen: LayerCallback) -> ContextManager:
        """Context manager in which `seen` is called after every call of an
        innermost layer. A compiled (hybridized) network runs layer by
        layer."""

    def use_masks(self, draw: DrawMask) -> ContextManager:
        """Context manager in which training passes take the masks of dropout
        layers from `draw`. Dropout *functions*, `inner_dropout`, and dropout
        inside attention layers are not affected. A compiled network runs
        layer by layer."""

    def inner_dropout(self) -> Sequence[tuple[str, Any, str]]:
        """Innermost layers with dropout that masks do not affect, as (path,
        layer, attribute of the rate): recurrent layers, and dropout that is
        active in prediction."""

    def natively(self, draw: DrawMask, begins: Callable[[Any], None],
                 seen: Callable[[Any], None]) -> ContextManager:
        """Context manager, inside `watch_layers`, in which user code calls
        `net` on one device. Training passes take dropout masks from `draw`.
        ``begins(inputs)`` and ``seen(outputs)`` are called before and after
        each recorded pass."""

    def trains(self, path: str) -> bool | None:
        """Inside `natively`: whether the innermost layer (or function)
        `path`, which is being called, is in training mode. None if no
        gradients are recorded."""

    def own_parts(self, parts: Sequence[Any]) -> OwnParts:
        """The state of a custom training step. Raises TypeError for an object
        whose state cannot be set."""

    # -- optional -----------------------------------------------------------

    def check_visible(self) -> None:
        """Raise ValueError if user code has compiled layers."""
        return None

    @contextmanager
    def without_inner_dropout(self) -> Iterator[None]:
        """Context manager, inside `use_masks`, that disables the dropout of
        `inner_dropout`."""
        with ExitStack() as stack:
            for _, layer, name in self.inner_dropout():
                stack.callback(setattr, layer, name, getattr(layer, name))
                setattr(layer, name, 0.0)
            yield
