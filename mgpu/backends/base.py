"""What the two engines do differently, and nothing else.

`Backend` is the specification of an engine: everything that `mgpu` needs
and that MXNet and PyTorch spell, or mean, differently. All that can be said
once is said once, above it, in `mgpu`. Three small classes hold the parts:

- `Backend`: arrays, gradients, recording, running on several devices;
- `Ops`: functions of arrays whose names or arguments differ;
- `Network` and `Replica`: a user's own network, and its copy on one device.

Neutral code may use these directly on native arrays of either engine (the
*dialect*): ``+ - * /`` and ``+= -= *= /=`` with arrays and Python floats,
``** p``, ``-x``, ``abs(x)``, ``x[i:j]`` on axis 0 (a view
that writes through), ``x[:] = v`` (`v` may live on another device),
``x.shape``, ``x.reshape(shape)`` (a tuple), ``len(x)``. Everything else goes
through `Ops`; not ``x.clip``, whose bounds MXNet rounds to float32.
"""
from abc import ABC, abstractmethod
from contextlib import ContextDecorator
from functools import partial
from typing import (TYPE_CHECKING, Any, Callable, ContextManager, Dict, List,
                    NamedTuple, Optional, Sequence, Tuple, Union)

import numpy as np

if TYPE_CHECKING:
    from mgpu.device import Device

#: what host data may hold: the dtypes that both engines have
DTYPES = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64",
          "bool")

Array = Any     # mx.np.ndarray, mx.nd.NDArray or torch.Tensor


class Spec(NamedTuple):
    """One parameter or buffer of a network, whatever device it lives on."""

    name: str               # "layers.0.weight": path and Gluon's own suffix
    kind: str               # weight bias gamma beta running_mean running_var,
    #                         or "other" (never drawn, copied as it is)
    shape: Optional[Tuple[int, ...]]    # None: not known before a forward
    dtype: str
    grad_req: str           # write, add, null
    init: Optional[Tuple[str, Dict[str, Any]]] = None   # the layer's own
    lr_mult: float = 1.0
    wd_mult: float = 1.0


class Options(NamedTuple):
    """How replicas compute: `mgpu.initialize` says what each means."""

    hybridize: bool = False
    channels_last: bool = False
    autocast: Optional[str] = None      # "bfloat16", "float16"


class BatchNormCall(NamedTuple):
    """What a batch-norm layer is called with, in Gluon's terms."""

    x: Array
    gamma: Optional[Array]      # None: the layer has none, or it is fixed
    beta: Optional[Array]
    running_mean: Optional[Array]       # None: the layer keeps none
    running_var: Optional[Array]
    epsilon: float
    momentum: float             # r <- momentum r + (1 - momentum) statistic
    axis: int
    layer: str                  # its path in the network


class Layer(NamedTuple):
    """A layer that holds no other layers, in words of no framework."""

    path: str           # "features.3.bn1"; "" for a network of one layer
    kind: str           # dense conv batch_norm dropout max_pool ..., or the
    #                     class's own name in lower case
    options: Dict[str, Any]         # see `docs/parity.md`, "Layers"
    parameters: Tuple[str, ...]     # names of its `Spec`s, buffers too


#: ``rule(x, rate, axes, index)`` gives the mask of a dropout layer that is
#: called on `x` in training by the replica `index`: an array that broadcasts
#: to `x` (1 along `axes`), zeros and ``1 / (1 - rate)``.
DropoutRule = Callable[[Array, float, Tuple[int, ...], int], Array]

#: ``watch(path, inputs, outputs, index)`` is told of each layer's call
Watch = Callable[[str, Tuple[Any, ...], Any, int], None]

#: ``rule(call, index)`` computes the output of a batch-norm layer in training
#: for the replica `index` and updates the running statistics.
BatchNormRule = Callable[[BatchNormCall, int], Array]


class Ops(ABC):
    """Functions of native arrays, differentiable while recording.

    Each takes and returns arrays of the engine, on one device, and allocates
    its result. `axis` counts as in NumPy.
    """

    @abstractmethod
    def abs(self, x: Array) -> Array: ...

    @abstractmethod
    def sign(self, x: Array) -> Array:
        """-1, 0 or 1, elementwise."""

    @abstractmethod
    def sqrt(self, x: Array) -> Array: ...

    @abstractmethod
    def exp(self, x: Array) -> Array: ...

    @abstractmethod
    def log(self, x: Array) -> Array: ...

    @abstractmethod
    def maximum(self, x: Array, y: Union[Array, float]) -> Array: ...

    @abstractmethod
    def minimum(self, x: Array, y: Union[Array, float]) -> Array: ...

    @abstractmethod
    def relu(self, x: Array) -> Array: ...

    @abstractmethod
    def sigmoid(self, x: Array) -> Array: ...

    @abstractmethod
    def softplus(self, x: Array) -> Array:
        """``log(1 + exp(x))``, without overflow."""

    @abstractmethod
    def log_softmax(self, x: Array, axis: int = -1) -> Array: ...

    @abstractmethod
    def pick(self, x: Array, index: Array, axis: int = -1) -> Array:
        """``x[..., index[...], ...]`` along `axis`, which disappears; `index`
        has the shape of `x` without `axis`, of any number dtype."""

    @abstractmethod
    def nll(self, x: Array, index: Array, axis: int = -1) -> Array:
        """``-pick(x, index, axis)``: the negative log-likelihood of class
        numbers within range, for log-probabilities `x`."""

    @abstractmethod
    def sum(self, x: Array, axis: Union[None, int, Tuple[int, ...]] = None,
            keepdims: bool = False) -> Array: ...

    @abstractmethod
    def mean(self, x: Array, axis: Union[None, int, Tuple[int, ...]] = None,
             keepdims: bool = False) -> Array: ...

    @abstractmethod
    def dot(self, x: Array, y: Array) -> Array:
        """The matrix product of (n, k) and (k, m)."""

    @abstractmethod
    def conv2d(self, x: Array, weight: Array, bias: Optional[Array] = None,
               stride: int = 1, padding: int = 0) -> Array:
        """x (n, c, h, w), weight (o, c, kh, kw), bias (o)."""

    @abstractmethod
    def avg_pool2d(self, x: Array, size: int,
                   stride: Optional[int] = None) -> Array:
        """Mean of `size` x `size` windows; `stride` is `size` if not given."""

    @abstractmethod
    def max_pool2d(self, x: Array, size: int,
                   stride: Optional[int] = None) -> Array: ...

    @abstractmethod
    def concat(self, xs: Sequence[Array], axis: int = 0) -> Array: ...

    @abstractmethod
    def slice_axis(self, x: Array, axis: int, begin: int, end: int) -> Array:
        ...

    @abstractmethod
    def flat_view(self, x: Array) -> Array:
        """`x` as one dimension; writing to it writes to `x`."""

    @abstractmethod
    def zeros_like(self, x: Array) -> Array:
        """Zeros on the device of `x`; no gradient."""

    @abstractmethod
    def astype(self, x: Array, dtype: Union[str, np.dtype]) -> Array: ...

    @abstractmethod
    def stop_gradient(self, x: Array) -> Array:
        """`x` without its history; shares memory where the engine can."""


class Replica(ABC):
    """A network on one device.

    Attributes
    ----------
    device : Device
    index : int
        Its place in the list of devices.
    """

    device: "Device"
    index: int

    @abstractmethod
    def __call__(self, *inputs: Array) -> Any:
        """Run the network on this device's inputs. In training mode inside
        ``scope(training=True)``, in prediction mode and without a graph
        outside ``scope(recording=True)``, whatever the user's flags say;
        those are put back."""

    @abstractmethod
    def array(self, number: int) -> Array:
        """This device's own parameter or buffer `number`, counted as in
        `Network.specs`; not a copy."""


class Network(ABC):
    """The user's own network, made ready to live on several devices."""

    backend: "Backend"
    net: Any
    #: layers compute as they do without mgpu: on torch, batch norm keeps the
    #: unbiased variance (see `Backend.gluonize`). To be set before a call.
    native: bool = False

    @abstractmethod
    def specs(self) -> List[Spec]:
        """Parameters first, in the order of the layers, then buffers; one
        entry for a parameter that several layers share."""

    @abstractmethod
    def grad_req(self, number: int) -> str:
        """`Spec.grad_req` of one entry as it is now; cheap."""

    @abstractmethod
    def set_grad_req(self, number: int, grad_req: str,
                     arrays: Sequence[Array]) -> None:
        """Freeze or unfreeze one entry; `arrays`: it on every device."""

    @abstractmethod
    def devices(self) -> List[Any]:
        """Native handles of the devices that the network is on now."""

    @abstractmethod
    def predictors(self, devices: Sequence["Device"]
                   ) -> List[Callable[..., Any]]:
        """For a network that did not come from `initialize`: one function
        per device that predicts there, safe to call at the same time."""

    @abstractmethod
    def cast(self, dtype: str) -> None:
        """Change the dtype of all floating parameters and buffers."""

    @abstractmethod
    def infer_shapes(self, inputs: Tuple[Array, ...],
                     device: "Device") -> None:
        """Complete deferred (lazy) shapes by one prediction-mode forward
        pass on `device`; afterwards no `Spec.shape` is None."""

    @abstractmethod
    def values(self) -> Optional[Dict[str, np.ndarray]]:
        """The network's own values, by name, or None if it has none yet."""

    @abstractmethod
    def prepare(self, options: Options, devices: Sequence["Device"]) -> None:
        """What `replicate` is to make, said before it: replicas on `devices`
        with `options`.

        ``hybridize``: passes of the replicas run as compiled code, with the
        meaning of the network's layers: the same streams of dropout masks,
        the same running statistics. Compiled are a replica's first training
        and first prediction pass for each shape of inputs, one at a time.
        Inside `watch`, `dropout` and `Backend.strict` the network runs layer
        by layer. ``channels_last``: 4-d parameters and inputs keep their
        values and lie in memory with the channels last, where the engine has
        such an order. ``autocast``: passes run with that dtype where the
        engine holds it to be safe; parameters, gradients and running
        statistics keep theirs, and outputs are float32.

        Raises
        ------
        ValueError
            The engine cannot run this network so.
        RuntimeError
            It lacks a compiler.
        """

    @abstractmethod
    def autocast(self, devices: Sequence["Device"]) -> ContextManager[None]:
        """Inside the block this thread, and what `parallel` runs for it,
        computes with the dtype of `Options.autocast`; nothing without."""

    @abstractmethod
    def replicate(self, devices: Sequence["Device"]) -> List[Replica]:
        """One replica per device, each with storage of its own (also where
        two devices share memory) and gradients attached. Replica 0 is the
        user's own object. Values are undefined until they are written
        through `Replica.array`; shapes must be known."""

    def forward(self, replicas: Sequence["Replica"],
                inputs: Sequence[Optional[Sequence[Array]]]
                ) -> List[Optional[Array]]:
        """``replicas[i](*inputs[i])`` for each device, at the same time; None
        for a device whose entry is None."""
        return self.backend.parallel(self._thunks(replicas, inputs))

    def forward_backward(self, replicas: Sequence["Replica"],
                         inputs: Sequence[Optional[Sequence[Array]]],
                         head: Callable[[int, Array], Array],
                         leaves: Callable[[int], Sequence[Array]]) -> None:
        """`forward`, ``head(i, output)``, the loss of device i, and
        `Backend.backward`, inside ``scope(recording=True)``. No device has to
        wait for another in between, unless losses depend on other leaves
        than ``leaves(i)``, those of replica i.

        Raises
        ------
        RuntimeError
            A loss that was not recorded or, where devices do not wait, that
            depends on the leaves of another replica.
        """
        outputs = self.forward(replicas, inputs)
        self.backend.backward(self.backend.parallel([
            partial(head, i, outputs[i]) for i in range(len(outputs))
            if inputs[i] is not None]))

    @staticmethod
    def _thunks(replicas: Sequence["Replica"],
                inputs: Sequence[Optional[Sequence[Array]]]
                ) -> List[Callable[[], Optional[Array]]]:
        return [_nothing if x is None else partial(replica, *x)
                for replica, x in zip(replicas, inputs)]

    @abstractmethod
    def layers(self) -> List[Layer]:
        """The innermost layers, in the order in which they were made; a
        layer that is there under several names comes once."""

    @abstractmethod
    def aliases(self) -> Dict[str, List[str]]:
        """For each `Spec` that several layers share: all of its names."""

    @abstractmethod
    def watch(self, watch: Watch) -> ContextManager[None]:
        """Inside the block, `watch` is told of every call of an innermost
        layer, after it. A compiled (hybridized) network runs layer by layer
        for that time."""

    @abstractmethod
    def dropout(self, rule: DropoutRule) -> ContextManager[None]:
        """Inside the block, training passes take the masks of dropout
        layers from `rule`. Dropout *functions*, and the dropout inside
        recurrent and attention layers, are not reached. A compiled network
        runs layer by layer for that time."""

    @abstractmethod
    def batch_norm(self, rule: Optional[BatchNormRule]
                   ) -> ContextManager[None]:
        """Inside the block, training passes of the replicas compute every
        batch-norm layer by `rule` (None: the default, per device).

        Raises
        ------
        ValueError
            The network is compiled (hybridized), so that its layers cannot
            be reached.
        """


class Backend(ABC):
    """An engine. The contract is this docstring and those of the methods."""

    #: canonical name: "mxnet" or "torch"
    name: str
    #: name and version of the framework, for `mgpu doctor` and reports
    version: str
    ops: Ops

    # -- devices and arrays -------------------------------------------------

    @abstractmethod
    def num_gpus(self) -> int:
        """GPUs visible now (logical ones on torch: ``MGPU_LOGICAL_GPUS``)."""

    @abstractmethod
    def put(self, x: Any, where: Union["Device", Array], *,
            dtype: Optional[str] = None) -> Array:
        """A fresh copy of `x` on a device.

        Always a copy, also on the device where `x` is already; dtype kept
        unless `dtype` is given (integers and float64 too); differentiable
        while recording, so that a gradient flows back to the device of `x`.

        Parameters
        ----------
        x : native array, NumPy array, or numbers
        where : Device, or a native array to sit beside

        Raises
        ------
        TypeError
            `x` is an array of the other framework: nothing is converted
            silently.
        """

    def stage(self, devices: Sequence["Device"]
              ) -> Optional[Callable[[Any], Any]]:
        """A function of one array that makes host data ready for a `put` on
        `devices` that does not block, and leaves other things as they are;
        it may be called in any thread. None: there is nothing to gain."""
        return None

    @abstractmethod
    def to_numpy(self, x: Array) -> np.ndarray:
        """A fresh copy on the host; waits for pending work on `x` and raises
        the errors of that work."""

    @abstractmethod
    def is_native(self, x: Any) -> bool:
        """Whether `x` is an array of this engine."""

    @abstractmethod
    def synchronize(self, devices: Sequence["Device"]) -> None:
        """Return when all work queued on all of `devices` is done."""

    # -- the host's own memory ------------------------------------------------

    @abstractmethod
    def host_views(self, arrays: Sequence[Array]
                   ) -> Optional[List[np.ndarray]]:
        """One-dimensional NumPy views, each in its array's order of memory;
        to be read and written inside `on_host` alone. None unless every
        array has one, in the same order: not on a GPU, not in a dtype that
        NumPy lacks, not with gaps, and not inside `mgpu.strict_devices`,
        which could not see what is done to them. May wait for all queued
        work; what is queued between this and `on_host` may move an array
        (MXNet)."""

    @abstractmethod
    def on_host(self, thunks: Sequence[Callable[[], Any]],
                written: Sequence[Array]) -> None:
        """`parallel`, once all work that is queued on arrays with
        `host_views` is done. The thunks change none but the `written`
        arrays. After Ctrl-C all have run, or none."""

    @abstractmethod
    def native_allreduce(self, arrays: Sequence[Array], op: str) -> None:
        """Leave the sum, maximum or minimum of all in each, by the
        framework's own collective. ValueError where it has none for these
        devices or this `op`; nothing has changed then."""

    # -- gradients ----------------------------------------------------------

    @abstractmethod
    def attach_grad(self, x: Array, grad_req: str = "write") -> None:
        """Make `x` a leaf whose gradient `backward` writes ("write"), adds
        to ("add") or leaves alone ("null"). The gradient starts as zeros."""

    @abstractmethod
    def grad(self, x: Array) -> Array:
        """The gradient of a leaf, itself, not a copy; zeros before the first
        `backward`. ValueError if no gradient is attached."""

    @abstractmethod
    def is_fresh(self, x: Array) -> bool:
        """Whether a backward pass has written the gradient of the leaf `x`
        since `mark_used`."""

    @abstractmethod
    def mark_used(self, x: Array) -> None:
        """The gradient of `x` has been applied: it is stale from now on."""

    @abstractmethod
    def scope(self, recording: Optional[bool] = None,
              training: Optional[bool] = None) -> ContextManager[None]:
        """Record for `backward`, or not; run layers in training mode, or
        not. None leaves a flag as it is. The earlier state comes back at the
        end of the block, also after an error, and also where Ctrl-C kept a
        scope inside it from putting its own back. The scope belongs to the
        calling thread and to what `parallel` runs for it."""

    @abstractmethod
    def is_recording(self) -> bool: ...

    @abstractmethod
    def is_training(self) -> bool: ...

    @abstractmethod
    def backward(self, losses: Sequence[Array]) -> None:
        """Each loss is summed over its elements; gradients of all leaves
        that any loss depends on are written. Losses that share no leaf run
        at the same time. May return before the work is done (MXNet)."""

    # -- running on several devices -----------------------------------------

    @abstractmethod
    def parallel(self, thunks: Sequence[Callable[[], Any]], *,
                 rendezvous: bool = False) -> List[Any]:
        """Call all `thunks`, number i for device i, at the same time; their
        results, in order. Waits until every one has returned; then the
        first exception, by number, is raised. `rendezvous=True` promises
        that the thunks may wait for each other.

        Context variables, recording and training flags, and the framework's
        own per-thread modes are those of the caller. Inside a thunk,
        another `parallel` runs one thunk after the other.
        """

    @abstractmethod
    def carry(self) -> Callable[[], ContextManager[None]]:
        """The calling thread's modes beside context variables (recording,
        training, MXNet's NumPy mode, ...): a context manager that sets them
        in another thread."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Start the engine's random streams (dropout masks) again: one per
        device, each from (seed, device)."""

    # -- debugging ----------------------------------------------------------

    @abstractmethod
    def strict(self, ledger: Any) -> ContextManager[None]:
        """Inside the block, in this thread and in what `parallel` runs for
        it, an operation on arrays of several devices calls
        ``ledger.refuse``, also where devices are logical, and each copy
        from device to device calls ``ledger.copy``: see
        `mgpu.strict_devices`. Blocks may be nested, with a ledger each."""

    @abstractmethod
    def memory(self, x: Array) -> Tuple[Any, int, int]:
        """Where `x` lies: (address space, first byte, end). Logical CPU
        devices have one address space. Waits for pending work on `x`."""

    # -- networks -----------------------------------------------------------

    @abstractmethod
    def network(self, net: Any) -> Network:
        """Wrap a `gluon.Block` or a `torch.nn.Module`; TypeError for
        anything else."""

    @abstractmethod
    def gluonize(self, net: Any, on: bool = True) -> Any:
        """Give `net` Gluon's arithmetic for good, or take it away again; in
        place. See `mgpu.parity.gluonize`. `net` itself where the engine has
        nothing to change."""

    @abstractmethod
    def resnet18(self, num_classes: int, in_channels: int) -> Any:
        """The native ResNet-18 of the text (`mgpu.models.resnet18`)."""

    # -- advice -------------------------------------------------------------

    @abstractmethod
    def doctor(self) -> List[Tuple[str, str]]:
        """What `mgpu doctor` should say about this engine's settings:
        (level, text), level "info", "warning" or "error"."""


class Scope(ContextDecorator):
    """`Backend.scope`: writes flags, and at its end what they were.

    No generator: one whose end is cut short by Ctrl-C lives on in the
    traceback, and would put its flags back whenever that is dropped.

    Parameters
    ----------
    read : callable
        The flags of this thread, a tuple.
    write : callable
        Sets as many; None leaves one as it is.
    flags : tuple
    """

    def __init__(self, read: Callable[[], Tuple[Optional[bool], ...]],
                 write: Callable[..., None],
                 flags: Tuple[Optional[bool], ...]):
        self._read, self._write, self._flags = read, write, flags
        # A list: a block may be entered again inside itself.
        self._before: List[Tuple[Optional[bool], ...]] = []

    def _recreate_cm(self) -> "Scope":      # each call of a decorated function
        return Scope(self._read, self._write, self._flags)

    def __enter__(self) -> None:
        self._before.append(self._read())
        self._write(*self._flags)

    def __exit__(self, *_: Any) -> None:
        self._write(*self._before.pop())


def _nothing() -> None:
    return None


# -- what both engines check or say in the same words ------------------------

def host_array(x: Any) -> np.ndarray:
    """A fresh, contiguous NumPy copy of `x`; Python floats become float32,
    the default of both engines, arrays keep their dtype."""
    try:
        array = np.array(x, order="C")
    except ValueError:      # rows of different lengths
        array = np.array(None)
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"an array of numbers is wanted; received {type(x).__name__} "
            "that NumPy cannot make one of. Pass numbers, or rows of one "
            "length.")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.name not in DTYPES:
        raise unknown_dtype(array.dtype.name)
    if array.dtype == np.float64 and not isinstance(x, (np.ndarray,
                                                        np.generic)):
        array = array.astype(np.float32)
    return array


def refuse_foreign(x: Any, backend: str) -> None:
    """TypeError for an array of the other framework."""
    root = type(x).__module__.split(".")[0]
    if root in ("mxnet", "torch"):
        raise TypeError(
            f"an array of the {backend} backend is wanted; received "
            f"{type(x).__module__}.{type(x).__name__}. Nothing is converted "
            "between frameworks silently: use mgpu.to_numpy under the other "
            "backend, then mgpu.put.")


def wrong_device(device: "Device", actual: Any) -> ValueError:
    return ValueError(
        f"the replica on {device} takes arrays on {device}; received one on "
        f"{actual}. Use mgpu.put(x, {device}) or mgpu.split_and_load.")


def not_native(x: Any, backend: str) -> TypeError:
    refuse_foreign(x, backend)
    return TypeError(f"an array of the {backend} backend is wanted; received "
                     f"{type(x).__name__}. Use mgpu.put(x, device).")


def unknown_dtype(dtype: Any) -> ValueError:
    return ValueError(f"unknown dtype; received {dtype!r}. Use a name such "
                      "as 'float32' or 'float64'.")


def no_float(dtype: Any) -> ValueError:
    return ValueError(f"only arrays of floats have gradients; received "
                      f"{dtype}. Use mgpu.functional.astype(x, 'float32').")


def check_grad_req(grad_req: str) -> None:
    if grad_req not in ("write", "add", "null"):
        raise ValueError(f"unknown grad_req; received {grad_req!r}. Use "
                         "'write', 'add' or 'null'.")


def no_gradient() -> ValueError:
    return ValueError("the array has no gradient attached; use "
                      "mgpu.attach_grad(x) before the forward pass.")


def not_recorded() -> RuntimeError:
    return RuntimeError(
        "backward needs losses that were computed inside mgpu.record() from "
        "arrays with gradients attached; received one that was not. Put the "
        "forward pass inside `with mgpu.record():`.")


def foreign_leaf(own: int, other: int) -> RuntimeError:
    return RuntimeError(
        "the loss of a device depends on the parameters of its own replica; "
        f"received one of device number {own} that reaches those of number "
        f"{other}. Compute it from the replica's own parameters, or call "
        "replicas(shards), mgpu.backward and Trainer.step yourself.")


def nested_rendezvous() -> RuntimeError:
    return RuntimeError(
        "thunks that wait for each other cannot start inside a thunk of "
        "mgpu.parallel; call the replicas together, outside of it.")


def not_a_network(net: Any, backend: str, wanted: str) -> TypeError:
    return TypeError(
        f"the {backend} backend takes a {wanted}; received "
        f"{type(net).__module__}.{type(net).__name__}. Choose the engine "
        "with mgpu.set_backend before the network is made.")
