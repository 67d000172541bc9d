"""A network on devices: `Network`, a part of the contract in `base`."""
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mgpu.backends import messages
from mgpu.backends.containers import Batch, Call, Probed
from mgpu.backends.probing import Probe
from mgpu.backends.types import Array, ContextManager, Device

if TYPE_CHECKING:
    from mgpu.backends.base import Backend

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


# -- arguments of forward -----------------------------------------------------

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


def forward_call(function: Callable[..., Any], inputs: Sequence[Any]
                 ) -> Callable[[], Any]:
    """Bind `function` to the inputs of `apart`."""
    args, kwargs = apart(inputs)
    return partial(function, *args, **kwargs)


# -- networks -----------------------------------------------------------------

class Network(Probe, Protocol):
    """A network of the framework, prepared for several devices.

    Required methods first, then the optional ones. `Probe` has those for
    parity.
    """

    backend: "Backend"
    net: Any

    # parameters and buffers

    def specs(self) -> list[Spec]:
        """Parameters in the order of the layers, then buffers. Shared
        parameters have one entry."""

    def grad_req(self, number: int) -> str:
        """Current `Spec.grad_req` of an entry. Faster than `specs`."""

    def set_grad_req(self, number: int, grad_req: str) -> None:
        """Freeze or unfreeze an entry."""

    def names_of(self, parameters: Sequence[Any]) -> list[str | None]:
        """`Spec.name` of each parameter object of the framework; None for a
        parameter of another network."""

    def aliases(self) -> dict[str, list[str]]:
        """All names of each `Spec` that several layers share."""

    def gluon_names(self) -> dict[str, str]:
        """Names in Gluon's graph by `Spec.name`, for a network of
        `Backend.from_gluon`. Raises TypeError for other networks."""

    def shares(self, other: Any) -> list[str]:
        """Names of parameters shared with the network `other`."""

    def devices(self) -> list[Any]:
        """Native handles of the devices of the network."""

    # values

    def values(self) -> dict[str, np.ndarray] | None:
        """The network's values by name, or None if it has no values."""

    def missing(self) -> set[str]:
        """Names of entries without a value that the framework does not
        initialize when their shapes are completed."""

    def cast(self, dtype: str) -> None:
        """Cast all floating-point parameters and buffers to `dtype`."""

    def infer_shapes(self, inputs: tuple[Array, ...], device: Device) -> None:
        """Complete deferred (lazy) shapes with one forward pass in prediction
        mode on `device`.

        `inputs` are those of `apart`. Afterwards no `Spec.shape` is None.
        Existing values are kept; the framework initializes entries with an
        initializer of the framework. After an error the network is
        unchanged."""

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

    def predictors(self, devices: Sequence[Device]
                   ) -> Sequence[Callable[..., Any]]:
        """Prediction functions, one per device, for a network without
        `initialize`. They may run concurrently."""

    # options of a pass

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

    def hybridize(self, active: bool, devices: Sequence[Device]) -> None:
        """Turn compilation on or off. Raises the errors of `prepare`."""

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

    # -- optional ---------------------------------------------------------

    def multipliers(self, number: int) -> tuple[float, float]:
        """Current lr_mult and wd_mult of the framework's parameter."""
        return 1.0, 1.0

    def give_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Set unknown shapes, by name, for values from a file. Raises
        ValueError for an impossible shape; nothing has changed. By default,
        shapes stay unknown until a pass."""
        return

    def inputs(self) -> Sequence[inspect.Parameter]:
        """The parameters of forward, without self."""
        try:
            return [*inspect.signature(self.net.forward).parameters.values()]
        except (TypeError, ValueError):     # implemented in C
            return [inspect.Parameter("inputs",
                                      inspect.Parameter.VAR_POSITIONAL)]

    def autocast(self, devices: Sequence[Device]) -> ContextManager:
        """Context manager in which this thread, and `parallel` called by it,
        computes in the dtype of `Options.autocast`, if set."""
        return nullcontext()

    # the framework's names and modes

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

    def predicts(self) -> bool:
        """Whether the user has put the network in eval mode, so that training
        passes predict. Raises ValueError if the layers' modes differ."""
        return False

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
