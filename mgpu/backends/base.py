"""The contract of a backend: what MXNet and PyTorch do differently.

What is the same on both backends is written once, in the other modules of
`mgpu`. A backend writes three classes:

- `Ops`: functions of arrays whose names or arguments differ;
- `Network`: a user's network, and its passes on several devices;
- `Backend`: arrays, gradients, recording, work on several devices.

A method without a body is required; `tests/test_contract.py` checks that both
backends write it. Every other one is optional: its default works on any
backend, or raises NotImplementedError. What parity asks of a network besides
is in `probing`. The registry (`mgpu/backends/__init__.py`) finds the `Backend`
class as ``BACKEND`` in the backend's module.

Neutral code may use these directly on native arrays of either backend:
``+ - * /`` and ``+= -= *= /=`` with arrays and Python floats, ``** p``,
``-x``, ``abs(x)``, ``x[i:j]`` on axis 0 (a view that writes through),
``x[:] = v`` (`v` may live on another device), ``x.shape``,
``x.reshape(shape)`` (a tuple), ``len(x)``. Everything else goes through
`Ops`; not ``x.clip``, whose bounds MXNet rounds to float32.
"""
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import _signal      # `signal` makes enums in each call
import inspect
import random
import re
import threading

import numpy as np

from mgpu.backends import messages
from mgpu.backends.containers import Batch, Call, Probed
from mgpu.backends.probing import (AVERAGE, Array, AroundUpdate,  # noqa: F401
                                   ContextManager, DrawMask,
                                   Float32Functions, Layer, LayerCallback,
                                   Observed, OwnParts, Probe, clipping,
                                   may_look_inside, named, own_kind)
from mgpu.utils.files import FilePath


# -- the vocabulary -----------------------------------------------------------

class Device(NamedTuple):
    """One device: ``Device("gpu", 1)`` is the second GPU.

    Prints as Gluon prints a context, ``gpu(1)``. Equal devices compare and
    hash equal, so a device can be a dictionary's key.
    """

    kind: str               # "cpu" or "gpu"
    index: int = 0          # type: ignore[assignment]  # tuple has a method

    def __repr__(self) -> str:
        return f"{self.kind}({self.index})"

    @property
    def device_type(self) -> str:
        """`kind`, as MXNet's contexts call it, which takes a device for
        one."""
        return self.kind

    @property
    def device_typeid(self) -> int:
        """MXNet's number of `kind`."""
        return {"cpu": 1, "gpu": 2}[self.kind]

    @property
    def device_id(self) -> int:
        """`index`, as MXNet calls it."""
        return self.index

    def __hash__(self) -> int:      # that of the context that it equals
        return hash((self.device_typeid, self.index))


#: values of `Spec.kind`: running statistics, and all without a gradient
STATISTICS = ("running_mean", "running_var")
BUFFERS = (*STATISTICS, "other")


class Spec(NamedTuple):
    """One parameter or buffer of a network; the same on every device."""

    name: str               # "layers.0.weight": path and Gluon's own suffix
    kind: str               # weight bias gamma beta running_mean running_var;
    #                         "unknown": trained, drawn only where the network
    #                         has no value; "other": not trained, never drawn
    shape: tuple[int, ...] | None       # None: not known before a forward
    dtype: str
    grad_req: str           # write, add, null
    #: the layer's own initializer, by name or as an object, and its options
    init: tuple[Any, dict[str, Any]] | None = None
    lr_mult: float = 1.0
    wd_mult: float = 1.0
    #: what a gamma or beta that its layer does not learn starts from; where
    #: one backend's layer keeps it, the other's has none
    constant: float | None = None


class Options(NamedTuple):
    """How replicas compute; `mgpu.initialize` describes each option."""

    hybridize: bool = False
    channels_last: bool = False
    autocast: str | None = None         # "bfloat16", "float16"
    sync: bool = False          # joint batch statistics of several devices


class BatchNormCall(NamedTuple):
    """What a batch-norm layer is called with, in Gluon's terms."""

    x: Array
    gamma: Array | None         # None: the layer has none, or it is fixed
    beta: Array | None
    running_mean: Array | None          # None: the layer keeps none
    running_var: Array          # None where running_mean is
    epsilon: float
    momentum: float             # r <- momentum r + (1 - momentum) statistic
    axis: int
    layer: str                  # its path in the network


#: ``normalize(call, index)`` computes the output of a batch-norm layer in
#: training for the replica `index`, and updates the running statistics.
Normalize = Callable[[BatchNormCall, int], Array]


#: ``run(thunks)``: the results of thunks, one for each device that runs
Runner = Callable[[Sequence[Callable[[], Any]]], list[Any]]


# -- functions of arrays ------------------------------------------------------

class Ops(Protocol):
    """Functions of native arrays, differentiable while recording.

    Each takes and returns arrays of the backend, on one device, and allocates
    its result. `axis` counts as in NumPy.
    """

    def abs(self, x: Array) -> Array:
        """The absolute value, elementwise."""

    def sign(self, x: Array) -> Array:
        """-1, 0 or 1, elementwise."""

    def sqrt(self, x: Array) -> Array:
        """The square root, elementwise."""

    def exp(self, x: Array) -> Array:
        """``e**x``, elementwise."""

    def log(self, x: Array) -> Array:
        """The natural logarithm, elementwise."""

    def maximum(self, x: Array, y: Array | float) -> Array:
        """The larger of `x` and `y`, elementwise."""

    def minimum(self, x: Array, y: Array | float) -> Array:
        """The smaller of `x` and `y`, elementwise."""

    def relu(self, x: Array) -> Array:
        """``max(x, 0)``, elementwise."""

    def log_softmax(self, x: Array, axis: int = -1) -> Array:
        """The logarithm of the softmax of `x` along `axis`."""

    def pick(self, x: Array, index: Array, axis: int = -1) -> Array:
        """``x[..., index[...], ...]`` along `axis`, which disappears. `index`
        has the shape of `x` without `axis`, of any number dtype."""

    def sum(self, x: Array, axis: None | int | tuple[int, ...] = None,
            keepdims: bool = False) -> Array:
        """The sum along `axis`; None: over all elements."""

    def mean(self, x: Array, axis: None | int | tuple[int, ...] = None,
             keepdims: bool = False) -> Array:
        """The mean along `axis`; None: over all elements."""

    def dot(self, x: Array, y: Array) -> Array:
        """The matrix product of (n, k) and (k, m)."""

    def conv2d(self, x: Array, weight: Array, bias: Array | None = None,
               stride: int = 1, padding: int = 0) -> Array:
        """Cross-correlate `x` (n, c, h, w) with `weight` (o, c, kh, kw), and
        add `bias` (o)."""

    def avg_pool2d(self, x: Array, size: int,
                   stride: int | None = None) -> Array:
        """Mean of `size` x `size` windows; `stride` is `size` if not given."""

    def max_pool2d(self, x: Array, size: int,
                   stride: int | None = None) -> Array:
        """Maximum of `size` x `size` windows; `stride` as above."""

    def concat(self, xs: Sequence[Array], axis: int = 0) -> Array:
        """Join arrays along an axis that they have."""

    def slice_axis(self, x: Array, axis: int, begin: int, end: int) -> Array:
        """The elements from `begin` to before `end` along `axis`."""

    def flat_view(self, x: Array) -> Array:
        """`x` as one dimension; writing to it writes to `x`."""

    def zeros_like(self, x: Array) -> Array:
        """Zeros on the device of `x`; no gradient."""

    def from_host(self, values: np.ndarray, like: Array) -> Array:
        """`values`, of the shape of `like`, in its dtype and on its device;
        a copy."""
        x = self.zeros_like(like)
        x[...] = values
        return x

    def astype(self, x: Array, dtype: str | np.dtype) -> Array:
        """A copy of `x` with another dtype."""

    def stop_gradient(self, x: Array) -> Array:
        """`x` without its history; shares memory where the backend can."""

    # optional: a backend's own function may be faster, or more exact

    def sigmoid(self, x: Array) -> Array:
        """``1 / (1 + exp(-x))``."""
        return 1.0 / (1.0 + self.exp(-x))

    def softplus(self, x: Array) -> Array:
        """``log(1 + exp(x))``, without overflow."""

    def nll(self, x: Array, index: Array, axis: int = -1) -> Array:
        """``-pick(x, index, axis)``: the negative log-likelihood of class
        numbers within range, for log-probabilities `x`."""
        return -self.pick(x, index, axis)


# -- a user's network ---------------------------------------------------------


class Kwargs(dict[str, Any]):
    """Inputs of a network by the names of its forward's parameters.

    ``replicas[i](Kwargs(input_ids=x, attention_mask=m))`` calls ``net(
    input_ids=x, attention_mask=m)``, and a batch that is one is cut, entry by
    entry, as a dict is. In a tuple, as its last entry, it follows inputs
    without names: ``(x, Kwargs(mask=m))``. Gluon's Blocks take no names: their
    inputs go by the place that forward (or hybrid_forward) gives each name.
    What is in it is not copied.
    """


def apart(inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of a network without names, and those with names: of a `Kwargs`
    at the end."""
    if inputs and isinstance(inputs[-1], Kwargs):
        return tuple(inputs[:-1]), dict(inputs[-1])
    return tuple(inputs), {}


class OptimizerGroup(NamedTuple):
    """Some parameters, and how an optimizer object moves them now."""

    #: `Spec.name` of each; None: all that the trainer has
    names: frozenset[str] | None
    #: a name of `mgpu.optimizers`, such as "sgd"; None: a formula that mgpu
    #: does not have
    family: str | None
    #: under mgpu's names, learning_rate and wd too
    options: dict[str, Any]


#: what an optimizer remembers: by parameter and slot, and updates by parameter
Memory = tuple[dict[tuple[str, str], np.ndarray], dict[str, int]]


class Step(NamedTuple):
    """One step of an optimizer. Its mappings have `Spec.name` as keys."""

    arrays: Mapping[str, Array]     # what is updated, by its own gradients
    #: what the rate and the weight decay are multiplied by
    factors: Mapping[str, tuple[float, float]]
    counts: Mapping[str, int]       # updates of each, this one included
    number: int                     # of this step, from 1
    scale: float                    # what gradients are multiplied by
    loss_scale: float               # and divided by


class OptimizerObject(Protocol):
    """An optimizer of a framework, or of mgpu, which a `Trainer` steps.

    Its options, its memory and its schedule are its own. Programs and
    schedules may change them at any time."""

    object: Any
    #: whose formulas
    semantics: str
    #: what the gradients are multiplied by, besides the division by the batch
    scale: float = 1.0
    #: whether `schedule` may be set
    takes_schedule: bool = True
    #: all parameters of the network, in Gluon's order
    order: Sequence[str] = ()

    def __init__(self, x: Any) -> None:
        self.object = x

    #: ``rate = schedule(number of the update)``, where it has one
    schedule: Callable[[int], float] | None = None

    @property
    def learning_rate(self) -> float:
        """Of the first group, without a schedule."""

    def set_learning_rate(self, rate: float) -> None:
        """ValueError for groups with different rates."""

    def names(self) -> frozenset[str] | None:
        """The network's parameters that it moves now; None: all that the
        trainer has."""
        return None

    def others(self) -> list[Array]:
        """What it moves besides: the parameters of a loss, for example."""
        return []

    def gradients_of_others(self) -> list[Array]:
        """Of each of `others`; zeros where there was none."""
        return []

    def step(self, step: Step) -> None:
        """Update the arrays of `step`. Gradients stay as they are; those of
        `others` are cleared."""

    def count(self, number: int) -> int:
        """The number of updates behind step `number`."""
        return number

    def groups(self) -> list[OptimizerGroup]:
        """Its groups with the options that they have now."""

    def memory(self) -> Memory:
        """Copies. Slots are those of `mgpu.optimizers` where mgpu has the
        formula."""

    def load(self, memory: Memory, arrays: Mapping[str, Array]) -> None:
        """Put `memory` back."""

    def export(self) -> list[dict[str, Any]] | None:
        """For each group its names and all its options, as JSON has them;
        None where the rate is all that states hold."""
        return None

    def fit(self, saved: Sequence[Mapping[str, Any]] | None, rate: float
            ) -> Callable[[], None]:
        """A function that puts `export` back (None: the rate of the first
        group is all that is known). ValueError for other groups."""
        return partial(self.set_learning_rate, rate)


class GivenInitializer(Protocol):
    """An initializer of a framework's own, of a class that mgpu does not
    know."""

    #: what it is, in words
    text: str

    def draw(self, name: str, shape: tuple[int, ...],
             rng: np.random.Generator) -> np.ndarray:
        """The values of the parameter `name`, a function of these and of
        what `rng` gives only."""


class Given(Protocol):
    """What objects of a framework's own are in mgpu's terms. Each method
    returns None for an object of another kind, and refuses by name one of its
    kind that has no counterpart. See `mgpu.backends.given`."""

    def optimizer(self, x: Any, network: "Network"
                  ) -> OptimizerObject | None:
        """An optimizer, for a trainer of `network`."""

    def initializer(self, x: Any) -> GivenInitializer | list[
            tuple[re.Pattern[str], Any]] | None:
        """What draws weights: the `init` of `mgpu.initialize`; where names
        decide, those initializers with the patterns of the names."""


class Network(Probe, Protocol):
    """The user's own network, made ready to live on several devices."""

    backend: "Backend"
    net: Any

    def specs(self) -> list[Spec]:
        """Parameters first, in the order of the layers, then buffers; one
        entry for a parameter that several layers share."""

    def grad_req(self, number: int) -> str:
        """`Spec.grad_req` of one entry as it is now; cheap."""

    def names_of(self, parameters: Sequence[Any]) -> list[str | None]:
        """`Spec.name` of each of the framework's own parameters; None for
        one that is not of this network."""

    def multipliers(self, number: int) -> tuple[float, float]:
        """What the framework's own object multiplies the learning rate and
        the weight decay of one entry by, as it is now."""
        return 1.0, 1.0

    def hybridize(self, active: bool, devices: Sequence[Device]) -> None:
        """Compile the passes to come, or no longer; raises as `prepare`."""

    # the framework's own names

    def own_names(self) -> list[str]:
        """What the framework calls each entry of `specs`."""
        return [spec.name for spec in self.specs()]

    def state(self) -> dict[str, Any]:
        """All values by the framework's own names, as its own files have
        them; no copies."""
        names = self.own_names()
        found = {name: self.array(i) for i, name in enumerate(names)}
        for name, *others in self.aliases().values():
            found.update(dict.fromkeys(others, found[name]))
        return found

    def load_state(self, values: Mapping[str, Any], strict: bool
                   ) -> tuple[list[str], list[str]]:
        """Write what `state` of a network gave; return the names that miss,
        and those that are unknown. RuntimeError, which lists them all, for
        other shapes and, with `strict`, for such names; arrays are as before
        then."""
        own = self.state()
        missing = [name for name in own if name not in values]
        unknown = [name for name in values if name not in own]
        wrong = [f"{name} {getattr(x, 'shape', type(x).__name__)}"
                 for name, x in values.items() if name in own
                 and getattr(x, "shape", None) != own[name].shape]
        if wrong or strict and (missing or unknown):
            raise RuntimeError(
                "a state_dict is that of a network with the same layers; "
                f"received other shapes of {wrong}, unknown {unknown}, and "
                f"none of {missing}. Use what state_dict of such a network "
                "gave, or strict=False for names.")
        # Copies first: these may be the network's own arrays.
        copies = {name: self.backend.put(x, own[name])
                  for name, x in values.items() if name in own}
        aliases = self.aliases()
        for number, first in enumerate(self.own_names()):
            for name in aliases.get(first, [first]):
                if name in copies:
                    own[name][...] = copies[name]
                    self.written(number)
        return missing, unknown

    def set_mode(self, training: bool) -> None:
        """Set the network's own flags: whether its layers train inside
        ``scope(training=True)``."""
        if not training:
            raise messages.not_supported(
                self.backend.name, "eval mode of a network's own", "layers "
                "predict outside of mgpu.record() and in "
                "mgpu.record(train_mode=False).")

    def inputs(self) -> Sequence[inspect.Parameter]:
        """The parameters of the network's forward, without self."""
        try:
            return [*inspect.signature(self.net.forward).parameters.values()]
        except (TypeError, ValueError):     # written in C
            return [inspect.Parameter("inputs",
                                      inspect.Parameter.VAR_POSITIONAL)]

    def gluon_names(self) -> dict[str, str]:
        """For a network of `Backend.from_gluon`: by `Spec.name`, the name in
        Gluon's graph. TypeError for another network."""

    def set_grad_req(self, number: int, grad_req: str) -> None:
        """Freeze or unfreeze one entry."""

    def extra_names(self) -> list[str]:
        """Which of its layers have a state besides arrays: see
        `extra_states`."""
        return []

    def extra_states(self) -> dict[str, Any]:
        """By name, what layers give of themselves to be saved, besides the
        arrays of `specs`. ValueError for what they could not take back."""
        return {}

    def set_extra_states(self, states: Mapping[str, Any]) -> None:
        """Give it back to the layers."""
        return

    def predicts(self) -> bool:
        """Whether a pass that is to train predicts instead, since the user
        has said so to the network. ValueError where that is not clear."""
        return False

    def devices(self) -> list[Any]:
        """Native handles of the devices that the network is on now."""

    def predictors(self, devices: Sequence[Device]
                   ) -> Sequence[Callable[..., Any]]:
        """For a network that did not come from `initialize`: one function
        per device that predicts there, safe to call at the same time."""

    def cast(self, dtype: str) -> None:
        """Change the dtype of all floating parameters and buffers."""

    def infer_shapes(self, inputs: tuple[Array, ...], device: Device) -> None:
        """Complete deferred (lazy) shapes by one prediction-mode forward
        pass on `device`, of inputs as `apart` takes them; afterwards no
        `Spec.shape` is None. Values that are there stay, and what the
        framework was told to draw, it draws. After an error the network is as
        it was before."""

    def give_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Entries of unknown shapes that are named have these now: values of
        such shapes come from a file. ValueError for one that cannot be, and
        nothing has changed. By default they stay unknown until a pass."""
        return

    def values(self) -> dict[str, np.ndarray] | None:
        """The network's own values, by name, or None if it has none yet."""

    def missing(self) -> set[str]:
        """Names of the entries that have no value, and that get none from
        the framework when their shapes are completed."""

    def shares(self, other: Any) -> list[str]:
        """Names of the parameters that are also the network `other`'s."""

    def defer(self, devices: Sequence[Device],
              draws: dict[int, Callable[[tuple[int, ...]], np.ndarray]]
              ) -> bool:
        """Shapes are unknown: let the framework take ``draws[number](shape)``
        as the value of an entry as soon as it knows the shape, in a native
        call too. What is loaded before stays.

        Returns whether it does; by default no, and the values are written
        after `place`."""

    # on several devices

    def place(self, devices: Sequence[Device]) -> None:
        """Move the network to the first of `devices`, and let `run` run it on
        all of them. Shapes are known. Values stay; an entry without one is
        undefined until it is written through `array`. Gradients are attached
        as `specs` say."""

    def array(self, number: int) -> Array:
        """The network's own parameter or buffer `number`, counted as in
        `specs`; not a copy."""

    def arrays(self, number: int) -> list[Array]:
        """`array`, then each other device's copy.

        A copy has the network's value; of a running statistic, the device's
        own. The next pass overwrites what is written to a copy."""

    def write_statistics(self, number: int, values: Sequence[Array]) -> None:
        """Running statistics: ``values[0]`` is written to the network, and
        ``values[i]`` is device i's own from now on."""

    def written(self, number: int) -> None:
        """Somebody has written to `array`: all devices follow it again."""

    def run(self, calls: Mapping[int, Call], batch: Batch) -> dict[int, Any]:
        """Call the network on several devices at the same time.

        Layers train inside ``scope(training=True)`` and predict otherwise;
        without ``scope(recording=True)`` nothing is recorded. In a recorded
        pass that trains, each device moves its own running statistics; a
        device without a call follows the network, and so do all devices in
        prediction. If device 0 has no call, the network's buffers are those
        of the first that has one.

        Parameters
        ----------
        calls : mapping of int -> (args, kwargs)
            The arguments for each device that has examples.
        batch : Batch
            What the calls are parts of.

        Returns
        -------
        dict
            What forward returns on each device, connected with the network's
            own parameters.

        Raises
        ------
        ValueError
            `messages.wrong_device`: an array that is known to lie elsewhere.
        TypeError
            `messages.refuse_foreign`: an array of the other framework.
        """

    def probe(self, call: Call, device: int) -> Probed | None:
        """Call the network on one device without gradients, and leave nothing
        behind in it or in random streams. None where forward raises."""

    # optional: ways to compute (`Options`)

    def check(self, dtype: str | None, devices: Sequence[Device]) -> None:
        """Refuse a network that would be trained wrongly on `devices`, cast
        to `dtype` (None: as it is). ValueError; nothing has changed then."""

    def prepare(self, options: Options, devices: Sequence[Device]) -> None:
        """Announce that `place` is to put the network on `devices` with
        `options`.

        ``hybridize``: passes run as compiled code, with the meaning of the
        network's layers: the same streams of dropout masks, the same running
        statistics. The first training pass and the first prediction pass are
        compiled for each shape of inputs, one at a time. Inside
        `watch_layers`, `use_masks` and `Backend.strict` the
        network runs layer by layer. ``channels_last``: 4-d parameters and
        inputs keep their values and lie in memory with the channels last,
        where the backend has such an order. ``autocast``: passes run with that
        dtype where the backend holds it to be safe; parameters, gradients and
        running statistics keep theirs, and outputs are float32.

        Raises
        ------
        ValueError
            The backend cannot run this network so.
        RuntimeError
            It lacks a compiler.
        """

    def autocast(self, devices: Sequence[Device]) -> ContextManager:
        """Inside the block this thread, and what `parallel` runs for it,
        computes with the dtype of `Options.autocast`. Without that option
        nothing changes."""
        return nullcontext()

    # optional: a look at single layers, for joint batch norm and parity


    def aliases(self) -> dict[str, list[str]]:
        """All names of each `Spec` that several layers share."""


    def use_batch_norm(self, normalize: Normalize, run: Runner
                       ) -> ContextManager:
        """Inside the block, `Network.run` in training computes every
        batch-norm layer by `normalize`, and calls the devices' passes by
        `run`, in which they may wait for each other.

        Raises
        ------
        ValueError
            The network is compiled (hybridized), so that its layers cannot
            be reached.
        """


def forward_call(function: Callable[..., Any], inputs: Sequence[Any]
                 ) -> Callable[[], Any]:
    """`function` of these inputs, as `apart` takes them."""
    args, kwargs = apart(inputs)
    return partial(function, *args, **kwargs)


# -- the backend --------------------------------------------------------------

class Backend(Protocol):
    """A backend; the docstrings of the methods are the contract."""

    #: canonical name: "mxnet" or "torch"
    name: ClassVar[str]
    #: the `Spec.grad_req` with which arrays do what they do without mgpu
    plain_request: ClassVar[str] = "write"
    #: whose layers its networks are made of, and whose defaults those layers
    #: have: "gluon" or "torch"
    semantics: ClassVar[str]
    #: what to set so that late errors come where their work is queued
    finds_failed: ClassVar[str] = "a run on one device"
    #: version of the framework, for `mgpu doctor` and reports
    version: ClassVar[str]
    ops: Ops
    #: what a `BatchSplit` needs: a class with the functions of
    #: `mgpu.data.examples.Arrays`
    batch_arrays: ClassVar[Any]

    # devices and arrays

    def num_gpus(self) -> int:
        """GPUs visible now (logical ones on torch: ``MGPU_LOGICAL_GPUS``)."""

    def handle(self, device: Device) -> Any:
        """The framework's own device that `device` stands for."""

    def put(self, x: Any, where: Device | Array, *,
            dtype: str | None = None) -> Array:
        """A fresh copy of `x` on a device.

        Always a copy, also on the device where `x` is already; dtype kept
        unless `dtype` is given (integers and float64 too); differentiable
        while recording, so that a gradient flows back to the device of `x`.

        Parameters
        ----------
        x : native array, NumPy array, or numbers
        where : Device, or a native array whose device is meant

        Raises
        ------
        TypeError
            `x` is an array of the other framework: nothing is converted
            silently.
        """

    def to_numpy(self, x: Array) -> np.ndarray:
        """A fresh copy on the host; waits for pending work on `x` and raises
        the errors of that work."""

    def is_native(self, x: Any) -> bool:
        """Whether `x` is an array of this backend."""

    def synchronize(self, devices: Sequence[Device]) -> None:
        """Return when all work queued on all of `devices` is done."""

    # gradients

    def attach_grad(self, x: Array, grad_req: str = "write") -> None:
        """Make `x` a leaf whose gradient `backward` writes ("write"), adds
        to ("add") or does not touch ("null"). The gradient starts as zeros."""

    def grad(self, x: Array) -> Array:
        """The gradient of a leaf, itself, not a copy; zeros before the first
        `backward`. ValueError if no gradient is attached."""

    def is_fresh(self, x: Array) -> bool:
        """Whether a backward pass has written the gradient of the leaf `x`
        since `mark_used`."""

    def mark_used(self, x: Array, used: bool = True) -> None:
        """The gradient of `x` has been applied: it is stale from now on. Not
        `used`: as if a backward pass had written it."""

    def has_gradient(self, x: Array) -> bool:
        """Whether the gradient of the leaf `x`, which a backward pass or
        `grad` has made, is still there. One that the user has taken away
        (``p.grad = None`` in torch) is not applied."""
        return True

    def scope(self, recording: bool | None = None,
              training: bool | None = None) -> ContextManager:
        """Record for `backward`, or not; run layers in training mode, or
        not. None leaves a flag as it is.

        The earlier state comes back at the end of the block, also after an
        error, and also where Ctrl-C kept a scope inside it from restoring its
        own. The scope belongs to the calling thread and to what `parallel`
        runs for it.
        """

    def is_recording(self) -> bool:
        """Whether this thread records for `backward`."""

    def is_training(self) -> bool:
        """Whether layers run in training mode in this thread."""

    def backward(self, losses: Sequence[Array]) -> None:
        """Sum each loss over its elements, and write the gradients of all
        leaves that any loss depends on: overwrite them where their grad_req
        is "write", add to them where it is "add".

        One backward pass for all losses. It may return before the work is
        done (MXNet).
        """

    def mean_on(self, loss: Array) -> Any:
        """The device whose outputs a recorded loss is the mean of: its last
        operation is ``mean()``, or a loss function with
        ``reduction="mean"``. None for other losses: where another operation
        follows, such as a division, or outputs of all devices are joined."""

    # work on several devices

    def parallel(self, thunks: Sequence[Callable[[], Any]], *,
                 rendezvous: bool = False) -> list[Any]:
        """Call all `thunks` (functions without arguments), number i for
        device i, at the same time; return their results, in order.

        Waits until every one has returned; then the first exception, by
        number, is raised. `rendezvous=True` promises that the thunks may wait
        for each other. Context variables, recording and training flags, and
        the framework's own per-thread modes are those of the caller. Inside a
        thunk, another `parallel` runs one thunk after the other.
        """

    def seed(self, seed: int) -> None:
        """Restart the backend's random streams (dropout masks): one for each
        device, from (seed, device)."""

    # optional: several processes

    def number_devices(self, first: int) -> None:   # noqa: B027
        """The devices of this process have the numbers from `first` among
        those of all processes: random streams go by it. Where the number is
        another one than before, they start again."""

    def data_parallel(self, net: Any, devices: Sequence[Device], split: Any,
                      remake: Callable[[Any], Any],
                      synchronize: Callable[[Sequence[int]], Any] | None
                      ) -> Any:
        """`mgpu.DataParallel`. `split` is its `BatchSplit`; ``remake(net)``
        makes the same of another network, and can be pickled.
        ``synchronize(active)`` begins a pass with joint batch statistics, and
        returns a `SyncBatchNorm` and the function that runs the devices'
        thunks."""

    def through(self, x: Array, forth: Callable[[np.ndarray], np.ndarray],
                back: Callable[[np.ndarray | None], np.ndarray | None],
                after: Any = None) -> tuple[Array, Any]:
        """``forth`` of `x`, whose gradient is ``back`` of that of the result;
        and what the next call of the pass is to be given as `after`.

        Both get a copy on the host and return one of its shape, and may wait
        for other processes; `forth` is called at once. A backward pass calls
        one `back` at a time, in whatever thread. The order depends on what
        the loss is computed of, and neither on the number of devices nor on
        time. Where the loss does not depend on a result, its `back` is not
        called; or it gets None, and may return None. `back` raises nothing.
        """

    # optional: bits that depend on no history

    def fan_out(self, x: Array, count: int) -> list[Array]:
        """`x`, `count` times. Gradients of all are added in their order, in
        whatever order threads have recorded what follows."""
        return [x] * count

    # optional: when running statistics move

    def move_statistics(self, call: BatchNormCall, mean: Array, var: Array,
                        through: Array) -> Array:
        """Let the running statistics of `call` take in `mean` and `var`: at
        once, or when a gradient passes what is returned, which equals
        `through`. As the framework's own layer does. While recording."""
        moved: list[tuple[Any, Array]] = [(call.running_mean, mean),
                                          (call.running_var, var)]
        with self.scope(recording=False):
            for running, value in moved:
                running *= call.momentum
                running += (1 - call.momentum) * self.ops.stop_gradient(
                    value).reshape(running.shape)
        return through

    def once(self, known: dict[Any, Any], key: Any, part: Array,
             compute: Callable[[], tuple[int, Array]]) -> tuple[int, Array]:
        """``compute()``, of `part` and of other devices'. In a backward pass
        that computes a forward pass again: what was computed then, which
        `known` keeps by `key`."""
        return compute()

    def full_precision(self) -> ContextManager:
        """Inside the block, float32 is that on every device: no fewer bits
        are multiplied."""
        return nullcontext()

    # optional: random streams in a checkpoint

    def export_streams(self) -> dict[str, np.ndarray]:
        """The random streams as arrays by name. A run that goes on from here
        draws what another one draws after `fit_streams`. A backend that
        cannot read its streams starts new ones here, from a seed that the
        ones before determine."""

    def draws(self, thunk: Callable[[], Any], devices: Sequence[Device]
              ) -> tuple[Any, bool]:
        """What `thunk` returns, and whether it has taken numbers from the
        streams that `export_streams` has, on these devices, or has set one.
        A backend that cannot read its streams starts new ones here."""

    def fit_streams(self, streams: Mapping[str, np.ndarray]
                    ) -> Callable[[], None]:
        """A function that puts `export_streams` back and raises nothing. An
        Exception, with nothing changed, for other arrays."""

    def kept_streams(self) -> Callable[[], None]:
        """A function that puts the random streams of this process, NumPy's
        and Python's global ones too, back as they are now. Those of a backend
        that cannot read them stay."""
        engine = self._kept_streams()
        numpy, python = np.random.get_state(), random.getstate()

        def put_back() -> None:
            engine()
            random.setstate(python)
            np.random.set_state(numpy)
        return put_back

    def _kept_streams(self) -> Callable[[], None]:
        return lambda: None

    def drawing(self, stop: Sequence[Any]) -> Callable[[], ContextManager]:
        """For a thread that draws data: a function that makes a block for
        each batch. In it, code of the user's draws from the framework's own
        streams the same numbers in every run, whatever networks draw
        meanwhile. It may wait for replicas; once `stop` holds something,
        with an InterruptedError instead."""

    def device_threads(self) -> ContextManager:
        """A block in which an operation of this thread uses as many cores as
        one of several CPU devices does."""
        return nullcontext()

    def aside(self) -> ContextManager:
        """A block in which such a thread waits for other threads, which may
        draw, or run replicas, until it ends."""
        return nullcontext()

    # networks

    def network(self, net: Any) -> Network:
        """Wrap a `gluon.Block` or a `torch.nn.Module`; TypeError for
        anything else."""

    # optional: what a loss keeps

    def parts(self, x: Any) -> list[tuple[str, Any]] | None:
        """The layers and arrays right in `x`, a network or a layer, by name;
        None for anything else."""

    def uninterrupted(self, thunk: Callable[[], Any]) -> Any:
        """Call `thunk` and return its result. Ctrl-C and SIGTERM wait for its
        end, if the program handles them; a second one does not."""
        if self._waits or threading.current_thread() \
                is not threading.main_thread():
            return thunk()
        before = {number: handler for number in (
            _signal.SIGINT, _signal.SIGTERM)
                  if callable(handler := _signal.getsignal(number))}
        waiting: list[tuple[Any, ...]] = []

        def wait(number: int, frame: Any) -> None:
            if waiting:
                before[number](number, frame)
            waiting.append((number, frame))
        for number in before:
            _signal.signal(number, wait)
        self._waits = True
        try:
            return thunk()
        finally:
            self._waits = False
            for number, handler in before.items():
                _signal.signal(number, handler)
            if waiting:
                number, frame = waiting[0]
                before[number](number, frame)

    #: whether signals wait
    _waits: bool = False

    # optional: threads that the user starts, and data for GPUs

    def carry(self) -> Callable[[], ContextManager]:
        """A function that makes a context manager, which gives another thread
        the modes of the calling one: recording, training, MXNet's NumPy mode;
        all that is not in context variables."""

    def pinner(self, devices: Sequence[Device]) -> Callable[[Any], Any] | None:
        """A function of one array that copies host data to page-locked
        (pinned) memory, so that a `put` on `devices` does not block.

        It returns everything else as it is, and may be called in any thread.
        None: there is nothing to gain.
        """
        return None

    def wait_for(self, x: Array) -> None:
        """Return when pending work on `x` is done."""

    def failures(self, arrays: Sequence[Array]) -> list[Exception]:
        """What failed of the work that was queued on `arrays`, on CPUs; waits
        for it."""
        return []

    # optional: fast reductions and updates

    def host_views(self, arrays: Sequence[Array], *, to_read: bool = False
                   ) -> list[np.ndarray] | None:
        """One-dimensional NumPy views, each in its array's order of memory,
        to be read and written inside `run_on_host_views` only; `to_read`:
        to be read at once, and not written. Those may be copies in another
        order, the same for all, or bits as whole numbers.

        None unless every array has one, in the same order: not on a GPU, not
        in a dtype that NumPy lacks, not with gaps, and not inside
        `mgpu.strict_devices`, which could not see what is written to them.
        May wait for what is queued on the arrays, and raises its errors, not
        those of other work. Nothing may be queued on them between this call
        and `run_on_host_views`.
        """

    def run_on_host_views(self, thunks: Sequence[Callable[[], Any]],
                          written: Sequence[Array]) -> None:
        """Run `parallel`, on the memory of arrays with `host_views`.

        The thunks change only the `written` arrays. After Ctrl-C all thunks
        have run, or none.
        """

    def library_reduces(self, arrays: Sequence[Array]) -> bool:
        """Whether `library_allreduce` is the fastest way to sum `arrays`:
        each lies on a card of its own, which the library connects."""
        return False

    def library_allreduce(self, arrays: Sequence[Array], op: str) -> None:
        """Write the sum, maximum or minimum of all arrays to each of them,
        by the framework's own collective. ValueError where it has none for
        these devices or this `op`; nothing has changed then."""

    # optional: debugging

    def strict(self, ledger: Any) -> ContextManager:
        """Inside the block, report what crosses devices to `ledger`: see
        `mgpu.strict_devices`.

        In this thread and in what `parallel` runs for it, an operation on
        arrays of several devices calls ``ledger.refuse``, also where devices
        are logical, and each copy from device to device calls
        ``ledger.copy``. Blocks may be nested, with a ledger each.
        """

    def memory(self, x: Array) -> tuple[Any, int, int]:
        """Where `x` lies: (address space, first byte, end), with the gaps in
        between.

        All logical CPU devices have one address space. May wait for pending
        work on `x`. The default gives every array an address space of its own.
        """

    def check_writable(self, x: Array) -> None:
        """ValueError (`messages.no_places`) unless each element of `x` has a
        place of its own in memory."""

    def is_dense(self, x: Array) -> bool:
        """Whether `x` has rows that can be cut off: no sparse array."""

    # optional: networks that mgpu brings, and Gluon's arithmetic for good

    def gluonize(self, net: Any, on: bool = True) -> Any:
        """Give `net` Gluon's arithmetic for good, or take it away again; in
        place. Returns `net`. See `mgpu.parity.gluonize`."""
        return net

    def model(self, name: str, **options: int) -> Any:
        """Make the native network `name` of `mgpu.models`, without values."""

    # optional: networks that Gluon has exported

    def from_gluon(self, symbol: FilePath, params: FilePath,
                   dtype: str | None, softmax: bool,
                   frozen: Sequence[str] = ()) -> Any:
        """A native network from two files; see `mgpu.from_gluon`. `frozen`:
        names of arrays that are not trained."""

    def converter(self, name: str) -> Callable[..., Any]:
        """The function of this name that `mgpu.compat.conversion`
        describes, which reads or writes networks for PyTorch."""
        raise messages.not_supported(
            self.name, name, "call mgpu.set_backend('torch') before (a Block "
            "has export and save_parameters).")

    # optional: advice

    def doctor(self) -> list[tuple[str, str]]:
        """What `mgpu doctor` should say about this backend's settings: pairs
        (level, text), where level is "info", "warning" or "error"."""
