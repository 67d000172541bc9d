"""What parity asks of a backend: single layers, and training steps of the
user's own."""
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

Array = Any     # mx.np.ndarray, mx.nd.NDArray or torch.Tensor
ContextManager = AbstractContextManager[None]


class Layer(NamedTuple):
    """A layer that contains no other layers, described for both backends."""

    path: str           # "features.3.bn1"; "" for a network of one layer
    kind: str           # dense conv batch_norm dropout max_pool ..., or the
    #                     class's own name in lower case
    options: dict[str, Any]         # by the names of `backends/_*/layers.py`
    parameters: tuple[str, ...]     # names of its `Spec`s, buffers too


#: kinds of activations that a class may have the name of and compute by others
_COMPOSED = {"elu", "gelu", "hardsigmoid", "hardswish", "mish", "selu", "silu",
             "softplus", "softsign", "swish"}
#: kinds of functions that are told of
_TOLD = {"activation", "clip", "hardtanh", "leaky_relu", "log_softmax", "relu",
         "relu6", "sigmoid", "softmax", "softrelu", "tanh", "upsample"}


def may_look_inside(layer: type, engine: str) -> bool:
    """Whether the functions that an innermost layer without parameters calls
    are told one by one: those of a class that is not the backend's own, whose
    name says nothing of what it does."""
    return not layer.__module__.startswith(engine + ".") \
        and layer.__name__.lower() not in _COMPOSED


def own_kind(layer: type) -> str:
    """The kind of such a layer: the name of its class, marked where that
    could be one of the functions that are told."""
    name = layer.__name__.lower()
    return f"own {name}" if name in _TOLD or name.endswith("pool") else name


def clipping(low: Any, high: Any) -> tuple[str, dict[str, Any]] | None:
    """(kind, options) of the layer that keeps values between two numbers;
    None where a bound is none, or an array. No `high`: all above `low`."""
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
    """The path of a function in `known`, which gets it where it is new:
    "F.relu after conv1", and a number where others have been there."""
    place = f"F.{kind}" + ("" if after is None else f" after {after}")
    path, number = place, 1
    while known.setdefault(path, Layer(path, kind, options, ())
                           ).options != options:
        number += 1
        path = f"{place} ({number})"
    return path


#: ``draw(x, rate, axes, index)`` gives the mask of a dropout layer that the
#: replica `index` calls on `x` in training: an array that broadcasts to `x`
#: (1 along `axes`) of zeros and ``1 / (1 - rate)``.
DrawMask = Callable[[Array, float, tuple[int, ...], int], Array]

#: ``seen(path, inputs, outputs, index)`` is called after each layer's call,
#: and with a path of `Probe.functions` after that of a function that could
#: be a layer, between layers or in a small one of the user's own
#: (`may_look_inside`). Where the backend can (`Probe.replaces`), a
#: list of arrays that it returns takes the place of the outputs.
LayerCallback = Callable[[str, tuple[Any, ...], Any, int],
                         "Sequence[Array] | None"]


@dataclass
class Float32Functions:
    """Which functions of a network compute as MXNet does where it uses
    float32 in a float64 network. To be set between calls.

    Attributes
    ----------
    names : frozenset of str
        Keys of `mgpu.parity.float32.WORDS`.
    gradients : bool
        Whether SELU has MXNet's gradient too.
    watched : bool
        Whether calls are noted in `met`.
    met : dict of str -> None
        All functions that could be in `names`, in the order of their first
        calls.
    """

    names: frozenset[str] = frozenset()
    gradients: bool = False
    watched: bool = False
    met: dict[str, None] = field(default_factory=dict)


#: the slot of the average of a weight that a step of the user's own keeps
AVERAGE = "average"


@dataclass
class Observed:
    """What a training step of the user's own has done, as NumPy arrays by
    names of parameters.

    Attributes
    ----------
    left : dict of str -> ndarray
        The gradients as backward passes left them, on the scale of `applied`;
        of a weight that was updated, before its last update.
    applied : dict of str -> ndarray
        The gradients as the optimizers got them, divided by what they divide
        them by.
    rates : dict of str -> float
        The learning rate that each weight was moved with.
    scale : float
        What the optimizers multiplied the gradients by.
    scales : dict of str -> float
        The same by weight, where an optimizer does that.
    updates : int
        How many updates optimizers have made.
    loss_scale : float
        What a loss scaler multiplied the loss by.
    rule : (str, dict) or None
        `OwnParts.rule` as it was at the update.
    """

    left: dict[str, np.ndarray] = field(default_factory=dict)
    applied: dict[str, np.ndarray] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    scale: float = 1.0
    scales: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    loss_scale: float = 1.0
    rule: Any = None


#: it is called before an update with the names of the weights, and returns
#: what is called after it
AroundUpdate = Callable[[list[str]], Callable[[], None]]


class OwnParts(Protocol):
    """What a training step of the user's own works with: optimizers,
    schedules, loss scalers, averages of the weights.

    Attributes
    ----------
    rule : (str, dict) or None
        What the optimizers compute: the family of `mgpu.optimizers` and the
        options by the names there, others among them; None where mgpu has no
        such rule, or they compute different things.
    lr_mult, wd_mult : dict of str -> float
        Of each weight that an optimizer has: its learning rate and weight
        decay as multiples of those of `rule`.
    averaged : bool
        Whether there is an average of the weights: slot `AVERAGE`.
    clip_epsilon : float
        What the backend's own clipping by the global norm adds to the norm.
    text : str
        The parts in words.
    """

    rule: tuple[str, dict[str, Any]] | None
    lr_mult: dict[str, float]
    wd_mult: dict[str, float]
    averaged: bool
    clip_epsilon: ClassVar[float]
    text: str

    def memory(self) -> tuple[dict[tuple[str, str], np.ndarray],
                              dict[str, int]]:
        """The slots of `rule` by (parameter, slot) and the number of updates
        by parameter, as copies."""

    def load(self, slots: Mapping[tuple[str, str], np.ndarray],
             counts: Mapping[str, int]) -> None:
        """Set what `memory` returns. Other slots stay as they are."""

    def keep(self) -> Callable[[], None]:
        """A function that puts back what `load` does not set: positions of
        schedules, rates, loss scales, and memory that mgpu does not know."""

    def observe(self, around: AroundUpdate | None = None
                ) -> AbstractContextManager[Observed]:
        """For the block of one step, which fills what it gives."""


class Probe(Protocol):
    """A user's network as a comparison sees it. `layers` and `settings` are
    also read where processes are compared and values are loaded."""

    #: layers compute as they do without mgpu: on torch, batch norm keeps the
    #: unbiased variance (see `Backend.gluonize`). Set it before a call.
    own_arithmetic: bool = False
    #: None: the backend has no choice
    float32: Float32Functions | None = None
    #: whether what a `LayerCallback` returns takes the place of outputs
    replaces: bool = False
    #: what `watch_layers` has seen besides layers: see `LayerCallback`
    functions: dict[str, Layer]

    def layers(self) -> list[Layer]:
        """The innermost layers, in the order in which they were made. A
        layer that has several names comes once."""

    def settings(self) -> dict[str, str]:
        """By path, what the framework's own layers print of their options,
        and their mode where they have one: the same in all processes."""

    def watch_layers(self, seen: LayerCallback) -> ContextManager:
        """Inside the block, `seen` is called after every call of an innermost
        layer. A compiled (hybridized) network runs layer by layer for that
        time."""

    def use_masks(self, draw: DrawMask) -> ContextManager:
        """Inside the block, training passes take the masks of dropout
        layers from `draw`. Dropout *functions*, `inner_dropout`, and the
        dropout inside attention layers are not reached. A compiled network
        runs layer by layer for that time."""

    def check_visible(self) -> None:
        """ValueError where layers are hidden in code that the user has
        compiled."""
        return None

    def inner_dropout(self) -> Sequence[tuple[str, Any, str]]:
        """Innermost layers that drop out where no mask reaches, on every
        device, as (path, layer, attribute with the rate): recurrent ones
        between their layers, and what drops out in predictions too."""

    @contextmanager
    def without_inner_dropout(self) -> Iterator[None]:
        """Inside the block, and inside `use_masks`, these layers drop
        nothing out."""
        with ExitStack() as stack:
            for _, layer, name in self.inner_dropout():
                stack.callback(setattr, layer, name, getattr(layer, name))
                setattr(layer, name, 0.0)
            yield

    def natively(self, draw: DrawMask, begins: Callable[[Any], None],
                 seen: Callable[[Any], None]) -> ContextManager:
        """Inside the block, and inside `watch_layers`, the user's own code
        calls `net`, which is on one device: passes that train take the masks
        of dropout from `draw`. Around each that is recorded,
        ``begins(inputs)`` and ``seen(outputs)`` are called."""

    def trains(self, path: str) -> bool | None:
        """Inside `natively`: whether the innermost layer (or function)
        `path`, which runs now, is in training mode; None where no gradients
        are recorded."""

    def own_parts(self, parts: Sequence[Any]) -> OwnParts:
        """The parts of a training step of the user's own. TypeError for one
        whose state cannot be set."""
