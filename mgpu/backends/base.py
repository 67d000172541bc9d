"""Interface of a backend.

The other modules of `mgpu` contain one implementation for both backends. A
backend implements three classes:

- `Ops`: functions of arrays whose names or arguments differ;
- `Network`: a network, and its passes on several devices;
- `Backend`: arrays, gradients, recording, execution on several devices.

Methods without a body are required; `tests/test_contract.py` checks that both
backends implement them. Other methods are optional: the default works on any
backend, or raises NotImplementedError. `probing` has the methods of a network
that parity needs. The registry (`mgpu/backends/__init__.py`) loads the
`Backend` class as ``BACKEND`` from the backend's module.

Neutral code may use these on native arrays of either backend: ``+ - * /`` and
``+= -= *= /=`` with arrays and Python floats, ``** p``, ``-x``, ``abs(x)``,
``x[i:j]`` on axis 0 (a view), ``x[:] = v`` (`v` may be on another device),
``x.shape``, ``x.reshape(shape)`` (a tuple), ``len(x)``. Other functions belong
to `Ops`, also ``clip``, because MXNet rounds the bounds of ``x.clip`` to
float32.
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


# -- data types ---------------------------------------------------------------

class Device(NamedTuple):
    """A device. ``Device("gpu", 1)`` is the second GPU.

    Its repr is that of a Gluon context, ``gpu(1)``. Devices are hashable.
    """

    kind: str               # "cpu" or "gpu"
    index: int = 0          # type: ignore[assignment]  # tuple has a method

    def __repr__(self) -> str:
        return f"{self.kind}({self.index})"


#: values of `Spec.kind` for running statistics, and for all buffers
STATISTICS = ("running_mean", "running_var")
BUFFERS = (*STATISTICS, "other")


class Spec(NamedTuple):
    """Description of a parameter or buffer of a network, for all devices."""

    name: str               # "layers.0.weight": path and Gluon's suffix
    kind: str               # weight bias gamma beta running_mean running_var;
    #                         "unknown": trainable, initialized only if the
    #                         network has no value; "other": not trainable,
    #                         never initialized
    shape: tuple[int, ...] | None       # None: unknown before a forward pass
    dtype: str
    grad_req: str           # write, add, null
    #: initializer of the layer, by name or as an object, and its options
    init: tuple[Any, dict[str, Any]] | None = None
    lr_mult: float = 1.0
    wd_mult: float = 1.0
    #: initial value of a gamma or beta that is not trainable; only one of the
    #: backends' layers may have this parameter
    constant: float | None = None


class Options(NamedTuple):
    """Options of replicas, see `mgpu.initialize`."""

    hybridize: bool = False
    channels_last: bool = False
    autocast: str | None = None         # "bfloat16", "float16"
    sync: bool = False          # synchronized batch normalization


class BatchNormCall(NamedTuple):
    """Arguments of a batch-norm layer, under Gluon's names."""

    x: Array
    gamma: Array | None         # None: no gamma, or a fixed one
    beta: Array | None
    running_mean: Array | None          # None: no running statistics
    running_var: Array          # None if running_mean is
    epsilon: float
    momentum: float             # r <- momentum r + (1 - momentum) statistic
    axis: int
    layer: str                  # path in the network


#: ``normalize(call, index)`` computes the output of a batch-norm layer in
#: training for the replica `index`, and updates the running statistics.
Normalize = Callable[[BatchNormCall, int], Array]


#: ``run(thunks)`` returns the results of thunks, one per active device
Runner = Callable[[Sequence[Callable[[], Any]]], list[Any]]


# -- functions of arrays ------------------------------------------------------

class Ops(Protocol):
    """Differentiable functions of native arrays.

    The arguments are arrays on one device; the result is a new array there.
    `axis` is counted as in NumPy.
    """

    def abs(self, x: Array) -> Array:
        """Absolute value, elementwise."""

    def sign(self, x: Array) -> Array:
        """-1, 0 or 1, elementwise."""

    def sqrt(self, x: Array) -> Array:
        """Square root, elementwise."""

    def exp(self, x: Array) -> Array:
        """``e**x``, elementwise."""

    def log(self, x: Array) -> Array:
        """Natural logarithm, elementwise."""

    def maximum(self, x: Array, y: Array | float) -> Array:
        """Maximum of `x` and `y`, elementwise."""

    def minimum(self, x: Array, y: Array | float) -> Array:
        """Minimum of `x` and `y`, elementwise."""

    def relu(self, x: Array) -> Array:
        """``max(x, 0)``, elementwise."""

    def log_softmax(self, x: Array, axis: int = -1) -> Array:
        """Logarithm of the softmax of `x` along `axis`."""

    def pick(self, x: Array, index: Array, axis: int = -1) -> Array:
        """Pick ``x[..., index[...], ...]`` along `axis`, which is removed.
        `index` has the shape of `x` without `axis`, and any numeric dtype."""

    def sum(self, x: Array, axis: None | int | tuple[int, ...] = None,
            keepdims: bool = False) -> Array:
        """Sum along `axis`. None: over all elements."""

    def mean(self, x: Array, axis: None | int | tuple[int, ...] = None,
             keepdims: bool = False) -> Array:
        """Mean along `axis`. None: over all elements."""

    def dot(self, x: Array, y: Array) -> Array:
        """Matrix product of `x` (n, k) and `y` (k, m)."""

    def conv2d(self, x: Array, weight: Array, bias: Array | None = None,
               stride: int = 1, padding: int = 0) -> Array:
        """Cross-correlate `x` (n, c, h, w) with `weight` (o, c, kh, kw), and
        add `bias` (o)."""

    def avg_pool2d(self, x: Array, size: int,
                   stride: int | None = None) -> Array:
        """Mean of `size` x `size` windows. `stride` defaults to `size`."""

    def max_pool2d(self, x: Array, size: int,
                   stride: int | None = None) -> Array:
        """Maximum of `size` x `size` windows. `stride` defaults to `size`."""

    def concat(self, xs: Sequence[Array], axis: int = 0) -> Array:
        """Concatenate arrays along an existing axis."""

    def slice_axis(self, x: Array, axis: int, begin: int, end: int) -> Array:
        """Slice the elements [`begin`, `end`) along `axis`."""

    def flat_view(self, x: Array) -> Array:
        """One-dimensional view of `x`."""

    def zeros_like(self, x: Array) -> Array:
        """Zeros on the device of `x`, without a gradient."""

    def from_host(self, values: np.ndarray, like: Array) -> Array:
        """Copy `values` to the device of `like`, in its dtype. The shapes are
        equal."""
        x = self.zeros_like(like)
        x[...] = values
        return x

    def astype(self, x: Array, dtype: str | np.dtype) -> Array:
        """Copy `x` to another dtype."""

    def stop_gradient(self, x: Array) -> Array:
        """`x`, detached from the graph. Shares memory if the backend supports
        it."""

    # optional: a backend's function may be faster, or more accurate

    def sigmoid(self, x: Array) -> Array:
        """``1 / (1 + exp(-x))``."""
        return 1.0 / (1.0 + self.exp(-x))

    def softplus(self, x: Array) -> Array:
        """``log(1 + exp(x))``, without overflow."""

    def nll(self, x: Array, index: Array, axis: int = -1) -> Array:
        """``-pick(x, index, axis)``: negative log-likelihood of class numbers
        `index`, which are in range, for log-probabilities `x`."""
        return -self.pick(x, index, axis)


# -- networks -----------------------------------------------------------------


class Kwargs(dict[str, Any]):
    """Keyword arguments of a network's forward.

    ``replicas[i](Kwargs(input_ids=x, attention_mask=m))`` calls
    ``net(input_ids=x, attention_mask=m)``. A batch may be a `Kwargs`; its
    entries are split over devices as those of a dict. As the last entry of a
    tuple, it follows positional inputs: ``(x, Kwargs(mask=m))``. Gluon Blocks
    do not accept keyword arguments, so mgpu passes them by their position in
    forward (or hybrid_forward). Entries are not copied.
    """


def apart(inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split inputs into positional and keyword arguments, those of a `Kwargs`
    at the end."""
    if inputs and isinstance(inputs[-1], Kwargs):
        return tuple(inputs[:-1]), dict(inputs[-1])
    return tuple(inputs), {}


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

    def optimizer(self, x: Any, network: "Network"
                  ) -> OptimizerObject | None:
        """Convert an optimizer, for a trainer of `network`."""

    def initializer(self, x: Any) -> GivenInitializer | list[
            tuple[re.Pattern[str], Any]] | None:
        """Convert an initializer, for `init` of `mgpu.initialize`. One that
        depends on names becomes a list of (pattern, initializer)."""


class Network(Probe, Protocol):
    """A network of the framework, prepared for several devices."""

    backend: "Backend"
    net: Any

    def specs(self) -> list[Spec]:
        """Parameters in the order of the layers, then buffers. Shared
        parameters have one entry."""

    def grad_req(self, number: int) -> str:
        """Current `Spec.grad_req` of an entry. Faster than `specs`."""

    def names_of(self, parameters: Sequence[Any]) -> list[str | None]:
        """`Spec.name` of each parameter object of the framework; None for a
        parameter of another network."""

    def multipliers(self, number: int) -> tuple[float, float]:
        """Current lr_mult and wd_mult of the framework's parameter."""
        return 1.0, 1.0

    def hybridize(self, active: bool, devices: Sequence[Device]) -> None:
        """Turn compilation on or off. Raises the errors of `prepare`."""

    # the framework's names

    def own_names(self) -> list[str]:
        """The framework's name of each entry of `specs`."""
        return [spec.name for spec in self.specs()]

    def state(self) -> dict[str, Any]:
        """Parameters and buffers by the framework's names, as in its files.
        Not copies."""
        names = self.own_names()
        found = {name: self.array(i) for i, name in enumerate(names)}
        for name, *others in self.aliases().values():
            found.update(dict.fromkeys(others, found[name]))
        return found

    def load_state(self, values: Mapping[str, Any], strict: bool
                   ) -> tuple[list[str], list[str]]:
        """Copy the values of a `state` into the network.

        Returns missing and unexpected names. Raises RuntimeError for
        different shapes and, with `strict`, for missing or unexpected names;
        no array has changed."""
        own = self.state()
        missing = [name for name in own if name not in values]
        unknown = [name for name in values if name not in own]
        wrong = [f"{name} {getattr(x, 'shape', type(x).__name__)}"
                 for name, x in values.items() if name in own
                 and getattr(x, "shape", None) != own[name].shape]
        if wrong or strict and (missing or unknown):
            raise RuntimeError(
                "a state_dict must be that of a network with the same layers; "
                f"received other shapes of {wrong}, unknown {unknown}, and "
                f"none of {missing}. Use the state_dict of such a network, or "
                "strict=False to ignore names.")
        # Copy first: the values may be the network's arrays.
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
        """Set the training flags of the layers. They apply inside
        ``scope(training=True)``."""
        if not training:
            raise messages.not_supported(
                self.backend.name, "eval mode of a network", "layers "
                "predict outside of mgpu.record() and in "
                "mgpu.record(train_mode=False).")

    def inputs(self) -> Sequence[inspect.Parameter]:
        """The parameters of forward, without self."""
        try:
            return [*inspect.signature(self.net.forward).parameters.values()]
        except (TypeError, ValueError):     # implemented in C
            return [inspect.Parameter("inputs",
                                      inspect.Parameter.VAR_POSITIONAL)]

    def gluon_names(self) -> dict[str, str]:
        """Names in Gluon's graph by `Spec.name`, for a network of
        `Backend.from_gluon`. Raises TypeError for other networks."""

    def set_grad_req(self, number: int, grad_req: str) -> None:
        """Freeze or unfreeze an entry."""

    def extra_names(self) -> list[str]:
        """Names of layers with extra state, see `extra_states`."""
        return []

    def extra_states(self) -> dict[str, Any]:
        """State of layers to save besides the arrays of `specs`, by name.
        Raises ValueError for a state that cannot be restored."""
        return {}

    def set_extra_states(self, states: Mapping[str, Any]) -> None:
        """Restore the state returned by `extra_states`."""
        return

    def predicts(self) -> bool:
        """Whether the user has put the network in eval mode, so that training
        passes predict. Raises ValueError if the layers' modes differ."""
        return False

    def devices(self) -> list[Any]:
        """Native handles of the devices of the network."""

    def predictors(self, devices: Sequence[Device]
                   ) -> Sequence[Callable[..., Any]]:
        """Prediction functions, one per device, for a network without
        `initialize`. They may run concurrently."""

    def cast(self, dtype: str) -> None:
        """Cast all floating-point parameters and buffers to `dtype`."""

    def infer_shapes(self, inputs: tuple[Array, ...], device: Device) -> None:
        """Complete deferred (lazy) shapes with one forward pass in prediction
        mode on `device`.

        `inputs` are those of `apart`. Afterwards no `Spec.shape` is None.
        Existing values are kept; the framework initializes entries with an
        initializer of the framework. After an error the network is
        unchanged."""

    def give_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Set unknown shapes, by name, for values from a file. Raises
        ValueError for an impossible shape; nothing has changed. By default,
        shapes stay unknown until a pass."""
        return

    def values(self) -> dict[str, np.ndarray] | None:
        """The network's values by name, or None if it has no values."""

    def missing(self) -> set[str]:
        """Names of entries without a value that the framework does not
        initialize when their shapes are completed."""

    def shares(self, other: Any) -> list[str]:
        """Names of parameters shared with the network `other`."""

    def defer(self, devices: Sequence[Device],
              draws: dict[int, Callable[[tuple[int, ...]], np.ndarray]]
              ) -> bool:
        """For unknown shapes: set an entry to ``draws[number](shape)`` once
        the framework has its shape, also in a native call. Values loaded
        before are kept.

        Returns whether the backend supports this. By default it does not, and
        the values are written after `place`."""

    # on several devices

    def place(self, devices: Sequence[Device]) -> None:
        """Move the network to the first of `devices`, and prepare `run` for
        all of them. Shapes are known. Values are kept; an entry without a
        value is undefined until it is written through `array`. Gradients are
        attached as in `specs`."""

    def array(self, number: int) -> Array:
        """The network's parameter or buffer `number`, in the order of
        `specs`. Not a copy."""

    def arrays(self, number: int) -> list[Array]:
        """`array`, then the copies of the other devices.

        Copies have the value of the network; those of running statistics, a
        value for each device. The next pass overwrites copies."""

    def write_statistics(self, number: int, values: Sequence[Array]) -> None:
        """Write running statistics: ``values[0]`` to the network,
        ``values[i]`` to device i."""

    def written(self, number: int) -> None:
        """Report that `array` was written. All devices copy its value."""

    def run(self, calls: Mapping[int, Call], batch: Batch) -> dict[int, Any]:
        """Call the network on several devices in parallel.

        Layers train inside ``scope(training=True)`` and predict otherwise.
        Gradients are recorded inside ``scope(recording=True)``. In a recorded
        training pass, each device updates its running statistics; a device
        without a call, and all devices in prediction, copy those of the
        network. The network has the buffers of the first device with a call.

        Parameters
        ----------
        calls : mapping of int -> (args, kwargs)
            Arguments for each device that has examples.
        batch : Batch
            The batch that the calls are parts of.

        Returns
        -------
        dict
            Results of forward on each device. Gradients flow to the network's
            parameters.

        Raises
        ------
        ValueError
            `messages.wrong_device`: an array is on another device.
        TypeError
            `messages.refuse_foreign`: an array of the other framework.
        """

    def probe(self, call: Call, device: int) -> Probed | None:
        """Call the network on one device without gradients and without side
        effects on the network and on random streams. None if forward
        raises."""

    # optional: execution modes (`Options`)

    def check(self, dtype: str | None, devices: Sequence[Device]) -> None:
        """Raise ValueError if training on `devices` is not supported, cast to
        `dtype` (None: uncast). Nothing has changed."""

    def prepare(self, options: Options, devices: Sequence[Device]) -> None:
        """Set the options of the following `place` on `devices`.

        ``hybridize``: compile the passes, with the same streams of dropout
        masks and the same running statistics. The first training pass and the
        first prediction pass are compiled for each shape of inputs, one at a
        time. Inside `watch_layers`, `use_masks` and `Backend.strict` the
        network runs layer by layer. ``channels_last``: store 4-d parameters
        and inputs with the channels last in memory, if the backend supports
        it. ``autocast``: run passes in that dtype where the backend considers
        it safe; parameters, gradients and running statistics keep their
        dtype, and outputs are float32.

        Raises
        ------
        ValueError
            The backend does not support the options for this network.
        RuntimeError
            No compiler is available.
        """

    def autocast(self, devices: Sequence[Device]) -> ContextManager:
        """Context manager in which this thread, and `parallel` called by it,
        computes in the dtype of `Options.autocast`, if set."""
        return nullcontext()

    # optional: access to layers, for synchronized batch norm and parity


    def aliases(self) -> dict[str, list[str]]:
        """All names of each `Spec` that several layers share."""


    def use_batch_norm(self, normalize: Normalize, run: Runner
                       ) -> ContextManager:
        """Context manager in which training passes of `Network.run` compute
        batch-norm layers with `normalize`, and run the devices' passes with
        `run`, in which they may wait for each other.

        Raises
        ------
        ValueError
            The network is compiled (hybridized), so its layers are not
            accessible.
        """


def forward_call(function: Callable[..., Any], inputs: Sequence[Any]
                 ) -> Callable[[], Any]:
    """Bind `function` to the inputs of `apart`."""
    args, kwargs = apart(inputs)
    return partial(function, *args, **kwargs)


# -- the backend --------------------------------------------------------------

class Backend(Protocol):
    """Interface of a backend. The docstrings of the methods specify it."""

    #: canonical name: "mxnet" or "torch"
    name: ClassVar[str]
    #: the `Spec.grad_req` of the framework without mgpu
    plain_request: ClassVar[str] = "write"
    #: the framework whose layers and defaults its networks have: "gluon" or
    #: "torch"
    semantics: ClassVar[str]
    #: setting with which asynchronous errors are raised where work is queued
    finds_failed: ClassVar[str] = "a run on one device"
    #: version of the framework, for `mgpu doctor` and reports
    version: ClassVar[str]
    ops: Ops
    #: class with the functions of `mgpu.data.examples.Arrays`
    batch_arrays: ClassVar[Any]

    # devices and arrays

    def num_gpus(self) -> int:
        """Number of visible GPUs; logical ones on torch, with
        ``MGPU_LOGICAL_GPUS``."""

    def handle(self, device: Device) -> Any:
        """The framework's device object for `device`."""

    def put(self, x: Any, where: Device | Array, *,
            dtype: str | None = None) -> Array:
        """Copy `x` to a device.

        The result is always a copy. Differentiable: gradients flow back to
        the device of `x`.

        Parameters
        ----------
        x : native array, NumPy array, or numbers
        where : Device, or a native array on that device
        dtype : str, optional
            Default: the dtype of `x`, including integers and float64.

        Raises
        ------
        TypeError
            `x` is an array of the other framework, which is not converted
            implicitly.
        """

    def to_numpy(self, x: Array) -> np.ndarray:
        """Copy `x` to the host. Blocks until pending work on `x` is done, and
        raises its errors."""

    def is_native(self, x: Any) -> bool:
        """Whether `x` is an array of this backend."""

    def synchronize(self, devices: Sequence[Device]) -> None:
        """Block until all work queued on `devices` is done."""

    # gradients

    def attach_grad(self, x: Array, grad_req: str = "write") -> None:
        """Make `x` a leaf whose gradient `backward` overwrites ("write"),
        accumulates ("add") or ignores ("null"). Initially zeros."""

    def grad(self, x: Array) -> Array:
        """The gradient of a leaf; not a copy. Zeros before the first
        `backward`. Raises ValueError if no gradient is attached."""

    def is_fresh(self, x: Array) -> bool:
        """Whether a backward pass has written the gradient of the leaf `x`
        since `mark_used`."""

    def mark_used(self, x: Array, used: bool = True) -> None:
        """Mark the gradient of `x` as stale, because it was applied. Not
        `used`: mark it as fresh."""

    def has_gradient(self, x: Array) -> bool:
        """Whether the leaf `x` has the gradient of a backward pass or of
        `grad`. A gradient that the user has deleted (``p.grad = None`` in
        torch) is not applied."""
        return True

    def scope(self, recording: bool | None = None,
              training: bool | None = None) -> ContextManager:
        """Context manager that sets recording for `backward` and the training
        mode of layers. None: unchanged.

        The flags are restored at the end of the block, also after errors and
        Ctrl-C. They apply to the calling thread and to `parallel` called by
        it.
        """

    def is_recording(self) -> bool:
        """Whether this thread records for `backward`."""

    def is_training(self) -> bool:
        """Whether layers run in training mode in this thread."""

    def backward(self, losses: Sequence[Array]) -> None:
        """Compute the gradients of the sum of all elements of `losses`.

        Gradients of leaves are overwritten if their grad_req is "write", and
        accumulated if it is "add". There is one backward pass for all losses.
        It may return before the work is done (MXNet).
        """

    def mean_on(self, loss: Array) -> Any:
        """The device whose outputs a recorded loss averages.

        The last operation of the loss is ``mean()``, or a loss function with
        ``reduction="mean"``. None for other losses, for example if a division
        follows, or if outputs of several devices are joined."""

    # execution on several devices

    def parallel(self, thunks: Sequence[Callable[[], Any]], *,
                 rendezvous: bool = False) -> list[Any]:
        """Call `thunks` (functions without arguments) in parallel, number i
        for device i, and return their results in order.

        Blocks until all have returned, then raises the exception of the first
        one, by number, that failed. With `rendezvous=True` the thunks may
        wait for each other. Thunks have the context variables, the recording
        and training flags, and the thread-local modes of the caller. A nested
        `parallel` runs its thunks sequentially.
        """

    def seed(self, seed: int) -> None:
        """Seed the backend's random streams (dropout masks), one for each
        device, with (seed, device)."""

    # optional: distributed training

    def number_devices(self, first: int) -> None:   # noqa: B027
        """Number the devices of this process from `first` among those of all
        processes. Random streams depend on the number; they restart if it
        changes."""

    def data_parallel(self, net: Any, devices: Sequence[Device], split: Any,
                      remake: Callable[[Any], Any],
                      synchronize: Callable[[Sequence[int]], Any] | None
                      ) -> Any:
        """Create a `mgpu.DataParallel`.

        `split` is its `BatchSplit`. ``remake(net)`` wraps another network
        with the same options, and can be pickled. ``synchronize(active)``
        starts a pass with synchronized batch statistics, and returns a
        `SyncBatchNorm` and a function that runs the devices' thunks."""

    def through(self, x: Array, forth: Callable[[np.ndarray], np.ndarray],
                back: Callable[[np.ndarray | None], np.ndarray | None],
                after: Any = None) -> tuple[Array, Any]:
        """Apply `forth` to `x`, with `back` applied to the gradient.

        Returns the result, and the `after` of the next call in the pass. Both
        functions receive a host copy and return an array of its shape; they
        may wait for other processes. `forth` is called immediately. A
        backward pass calls one `back` at a time, in any thread. The order
        depends only on the computation of the loss, not on the number of
        devices or on timing. If the loss does not depend on the result,
        `back` is not called, or receives None and may return None. `back`
        does not raise.
        """

    # optional: reproducible gradients

    def fan_out(self, x: Array, count: int) -> list[Array]:
        """`count` references to `x`. Their gradients are added in order,
        independent of the order in which threads record."""
        return [x] * count

    # optional: update of running statistics

    def move_statistics(self, call: BatchNormCall, mean: Array, var: Array,
                        through: Array) -> Array:
        """Update the running statistics of `call` with `mean` and `var`.

        As in the framework's layer, the update takes place immediately, or
        when a gradient passes the result, which equals `through`. Called
        while recording."""
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
        """Return ``compute()``, a function of `part` and of other devices'
        parts; in a recomputed forward pass, the result stored in `known` under
        `key`."""
        return compute()

    def full_precision(self) -> ContextManager:
        """Context manager in which float32 is not reduced in precision (TF32)
        on any device."""
        return nullcontext()

    # optional: random streams in a checkpoint

    def export_streams(self) -> dict[str, np.ndarray]:
        """State of the random streams, as arrays by name.

        The following random numbers are those after `fit_streams` of this
        state. A backend that cannot read its streams starts new ones, from a
        seed that the old ones determine."""

    def draws(self, thunk: Callable[[], Any], devices: Sequence[Device]
              ) -> tuple[Any, bool]:
        """Call `thunk`. Returns its result, and whether it has used or set
        the streams of `export_streams` on these devices. A backend that
        cannot read its streams starts new ones."""

    def fit_streams(self, streams: Mapping[str, np.ndarray]
                    ) -> Callable[[], None]:
        """Return a function that restores the result of `export_streams` and
        does not raise. Raises an Exception for invalid arrays; nothing has
        changed."""

    def kept_streams(self) -> Callable[[], None]:
        """Return a function that restores the current random streams of this
        process, including the global ones of NumPy and Python. A backend that
        cannot read its streams does not restore them."""
        restore = self._kept_streams()
        numpy, python = np.random.get_state(), random.getstate()

        def put_back() -> None:
            restore()
            random.setstate(python)
            np.random.set_state(numpy)
        return put_back

    def _kept_streams(self) -> Callable[[], None]:
        return lambda: None

    def drawing(self, stop: Sequence[Any]) -> Callable[[], ContextManager]:
        """For a data-loading thread: a function that returns a context
        manager for each batch.

        In it, user code draws the same numbers from the framework's streams
        in every run, independent of networks that run concurrently. Entering
        may wait for replicas; it raises InterruptedError once `stop` is not
        empty."""

    def device_threads(self) -> ContextManager:
        """Context manager in which an operation of this thread uses as many
        cores as one of several CPU devices."""
        return nullcontext()

    def aside(self) -> ContextManager:
        """Context manager in which such a thread waits for others, which may
        draw random numbers or run replicas."""
        return nullcontext()

    # networks

    def network(self, net: Any) -> Network:
        """Wrap a `gluon.Block` or a `torch.nn.Module`. Raises TypeError for
        other types."""

    # optional: state of a loss

    def parts(self, x: Any) -> list[tuple[str, Any]] | None:
        """The direct children and arrays of `x`, a network or a layer, by
        name. None for other types."""

    def uninterrupted(self, thunk: Callable[[], Any]) -> Any:
        """Call `thunk` and return its result. SIGINT (Ctrl-C) and SIGTERM, if
        handled by the program, are deferred until it returns; a second one is
        not."""
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

    #: whether signals are deferred
    _waits: bool = False

    # optional: threads of the user, and data for GPUs

    def carry(self) -> Callable[[], ContextManager]:
        """Capture the thread-local modes of the calling thread (recording,
        training, MXNet's NumPy mode). Returns a function that returns a
        context manager, which sets them in another thread."""

    def pinner(self, devices: Sequence[Device]) -> Callable[[Any], Any] | None:
        """A function that copies an array to page-locked (pinned) memory, so
        that `put` on `devices` does not block.

        It returns other objects unchanged and is thread-safe. None if pinned
        memory has no advantage for `devices`.
        """
        return None

    def wait_for(self, x: Array) -> None:
        """Block until pending work on `x` is done."""

    def failures(self, arrays: Sequence[Array]) -> list[Exception]:
        """Errors of the work queued on `arrays`, on CPUs. Blocks until it is
        done."""
        return []

    # optional: fast reductions and updates

    def host_views(self, arrays: Sequence[Array], *, to_read: bool = False
                   ) -> list[np.ndarray] | None:
        """One-dimensional NumPy views of arrays, in memory order.

        They may be used inside `run_on_host_views` only. With `to_read` they
        are to be read immediately and must not be written; they may then be
        copies in another order, the same for all, or bits as integers.

        Returns None unless all arrays have views in the same order. Arrays on
        GPUs, of dtypes that NumPy lacks, and with gaps in memory have none;
        nor has any array inside `mgpu.strict_devices`, which could not track
        the writes. May block until work queued on the arrays is done, and
        raises its errors only. No work may be queued on the arrays between
        this call and `run_on_host_views`.
        """

    def run_on_host_views(self, thunks: Sequence[Callable[[], Any]],
                          written: Sequence[Array]) -> None:
        """Run `thunks` with `parallel`, on the memory of arrays with
        `host_views`.

        The thunks modify the `written` arrays only. After Ctrl-C, either all
        thunks have run or none.
        """

    def library_reduces(self, arrays: Sequence[Array]) -> bool:
        """Whether `library_allreduce` is the fastest way to sum `arrays`:
        each is on a different card that the library supports."""
        return False

    def library_allreduce(self, arrays: Sequence[Array], op: str) -> None:
        """Allreduce `arrays` in place with the framework's collective; `op`
        is "sum", "max" or "min". Raises ValueError if the framework does not
        support the devices or `op`; nothing has changed."""

    # optional: debugging

    def strict(self, ledger: Any) -> ContextManager:
        """Context manager that reports operations across devices to `ledger`,
        see `mgpu.strict_devices`.

        In this thread and in `parallel` called by it, an operation on arrays
        of different devices, including logical ones, calls ``ledger.reject``,
        and each copy between devices calls ``ledger.copy``. Blocks may be
        nested.
        """

    def memory(self, x: Array) -> tuple[Any, int, int]:
        """Memory range of `x`, including gaps: (address space, start, stop).

        All logical CPU devices have one address space. May block until
        pending work on `x` is done. By default, every array has a different
        address space.
        """

    def check_writable(self, x: Array) -> None:
        """Raise ValueError (`messages.no_places`) if elements of `x` share
        memory."""

    def is_dense(self, x: Array) -> bool:
        """Whether `x` is a dense array, which can be sliced."""

    # optional: models of mgpu, and Gluon's arithmetic

    def gluonize(self, net: Any, on: bool = True) -> Any:
        """Set or reset Gluon's arithmetic in `net`, in place. Returns `net`.
        See `mgpu.parity.gluonize`."""
        return net

    def model(self, name: str, **options: int) -> Any:
        """Create the network `name` of `mgpu.models`, uninitialized."""

    # optional: networks exported by Gluon

    def from_gluon(self, symbol: FilePath, params: FilePath,
                   dtype: str | None, softmax: bool,
                   frozen: Sequence[str] = ()) -> Any:
        """Load a network from two files, see `mgpu.from_gluon`. `frozen`:
        names of arrays that are not trained."""

    def converter(self, name: str) -> Callable[..., Any]:
        """The function `name` of `mgpu.compat.conversion`, which reads or
        writes networks for PyTorch."""
        raise messages.not_supported(
            self.name, name, "call mgpu.set_backend('torch') before (a Block "
            "has export and save_parameters).")

    # optional: environment checks

    def doctor(self) -> list[tuple[str, str]]:
        """Findings of `mgpu doctor` about the backend's settings: (level,
        text), with level "info", "warning" or "error"."""
