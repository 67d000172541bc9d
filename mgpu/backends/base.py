"""The contract of a backend.

The other modules of `mgpu` contain one implementation for both backends. A
backend implements four classes, each in a module of the same subject as its
contract:

=========================  ===================================================
`base.Backend`             arrays, gradients, recording, execution on several
                           devices
`network.Network`          a network, and its passes on several devices
`ops.Ops`                  functions of arrays whose names or arguments differ
`native_objects.Given`     the framework's own optimizers and initializers
=========================  ===================================================

Methods without a body are required; they come first in each class, and
`tests/test_contract.py` checks that both backends implement them. Other
methods are optional: the default works on any backend, or raises
NotImplementedError. `probing.Probe`, a base of `Network`, has the methods that
parity needs. The registry (`mgpu/backends/__init__.py`) loads the `Backend`
class as ``BACKEND`` from the backend's module.

Neutral code may use these on native arrays of either backend: ``+ - * /`` and
``+= -= *= /=`` with arrays and Python floats, ``** p``, ``-x``, ``abs(x)``,
``x[i:j]`` on axis 0 (a view), ``x[:] = v`` (`v` may be on another device),
``x.shape``, ``x.reshape(shape)`` (a tuple), ``len(x)``. Other functions belong
to `Ops`, also ``clip``, because MXNet rounds the bounds of ``x.clip`` to
float32.
"""
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np

from mgpu.backends import messages
from mgpu.backends.network import BatchNormCall, Network
from mgpu.backends.network import Options as Options    # public in 0.2
from mgpu.backends.network import Spec as Spec      # public in 0.2
from mgpu.backends.ops import Ops
from mgpu.backends.probing import Layer as Layer    # public in 0.2
from mgpu.backends.types import Array, ContextManager, Device
from mgpu.utils.files import FilePath


class Backend(Protocol):
    """Interface of a backend. The docstrings of the methods specify it.

    Required methods first, then the optional ones.
    """

    #: canonical name: "mxnet" or "torch"
    name: ClassVar[str]
    #: the `Spec.grad_req` of the framework without mgpu
    plain_request: ClassVar[str] = "write"
    #: the framework whose layers and defaults its networks have: "gluon" or
    #: "torch"
    semantics: ClassVar[str]
    #: setting with which asynchronous errors are raised where work is queued
    finds_failed: ClassVar[str] = "a run on one device"
    #: whether the state of a random stream can be read
    reads_streams: ClassVar[bool] = False
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

    def is_dense(self, x: Array) -> bool:
        """Whether `x` is a dense array, which can be sliced."""

    def synchronize(self, devices: Sequence[Device]) -> None:
        """Block until all work queued on `devices` is done."""

    def wait_for(self, x: Array) -> None:
        """Block until pending work on `x` is done."""

    # memory of arrays

    def memory(self, x: Array) -> tuple[Any, int, int]:
        """Memory range of `x`, including gaps: (address space, start, stop).

        All logical CPU devices have one address space. May block until
        pending work on `x` is done. By default, every array has a different
        address space.
        """

    def check_writable(self, x: Array) -> None:
        """Raise ValueError (`messages.no_places`) if elements of `x` share
        memory."""

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

    def library_allreduce(self, arrays: Sequence[Array], op: str) -> None:
        """Allreduce `arrays` in place with the framework's collective; `op`
        is "sum", "max" or "min". Raises ValueError if the framework does not
        support the devices or `op`; nothing has changed."""

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

    def carry(self) -> Callable[[], ContextManager]:
        """Capture the thread-local modes of the calling thread (recording,
        training, MXNet's NumPy mode). Returns a function that returns a
        context manager, which sets them in another thread."""

    def strict(self, ledger: Any) -> ContextManager:
        """Context manager that reports operations across devices to `ledger`,
        see `mgpu.strict_devices`.

        In this thread and in `parallel` called by it, an operation on arrays
        of different devices, including logical ones, calls ``ledger.reject``,
        and each copy between devices calls ``ledger.copy``. Blocks may be
        nested.
        """

    # random streams

    def seed(self, seed: int) -> None:
        """Seed the backend's random streams (dropout masks), one for each
        device, with (seed, device)."""

    def number_devices(self, first: int) -> None:
        """Number the devices of this process from `first` among those of all
        processes. Random streams depend on the number; they restart if it
        changes."""

    def export_streams(self) -> dict[str, np.ndarray]:
        """State of the random streams, as arrays by name.

        The following random numbers are those after `fit_streams` of this
        state. Without `reads_streams`, it starts new ones, from a seed that
        the old ones determine."""

    def fit_streams(self, streams: Mapping[str, np.ndarray]
                    ) -> Callable[[], None]:
        """Return a function that restores the result of `export_streams` and
        does not raise. Raises an Exception for invalid arrays; nothing has
        changed."""

    def draws(self, thunk: Callable[[], Any], devices: Sequence[Device]
              ) -> tuple[Any, bool]:
        """Call `thunk`. Returns its result, and whether it has used or set
        the streams of `export_streams` on these devices. A backend that
        cannot read its streams starts new ones."""

    def drawing(self, stop: Sequence[Any]) -> Callable[[], ContextManager]:
        """For a data-loading thread: a function that returns a context
        manager for each batch.

        In it, user code draws the same numbers from the framework's streams
        in every run, independent of networks that run concurrently. Entering
        may wait for replicas; it raises InterruptedError once `stop` is not
        empty."""

    # networks

    def network(self, net: Any) -> Network:
        """Wrap a `gluon.Block` or a `torch.nn.Module`. Raises TypeError for
        other types."""

    def data_parallel(self, net: Any, devices: Sequence[Device], split: Any,
                      remake: Callable[[Any], Any],
                      synchronize: Callable[[Sequence[int]], Any] | None
                      ) -> Any:
        """Create a `mgpu.DataParallel`.

        `split` is its `BatchSplit`. ``remake(net)`` wraps another network
        with the same options, and can be pickled. ``synchronize(active)``
        starts a pass with synchronized batch statistics, and returns a
        `SyncBatchNorm` and a function that runs the devices' thunks."""

    def parts(self, x: Any) -> list[tuple[str, Any]] | None:
        """The direct children and arrays of `x`, a network or a layer, by
        name. None for other types."""

    def model(self, name: str, **options: int) -> Any:
        """Create the network `name` of `mgpu.models`, uninitialized."""

    def from_gluon(self, symbol: FilePath, params: FilePath,
                   dtype: str | None, softmax: bool,
                   frozen: Sequence[str] = ()) -> Any:
        """Load a network from two files, see `mgpu.from_gluon`. `frozen`:
        names of arrays that are not trained."""

    # environment checks

    def doctor(self) -> list[tuple[str, str]]:
        """Findings of `mgpu doctor` about the backend's settings: (level,
        text), with level "info", "warning" or "error"."""

    # -- optional ---------------------------------------------------------

    def library_reduces(self, arrays: Sequence[Array]) -> bool:
        """Whether `library_allreduce` is the fastest way to sum `arrays`:
        each is on a different card that the library supports."""
        return False

    def pinner(self, devices: Sequence[Device]) -> Callable[[Any], Any] | None:
        """A function that copies an array to page-locked (pinned) memory, so
        that `put` on `devices` does not block.

        It returns other objects unchanged and is thread-safe. None if pinned
        memory has no advantage for `devices`.
        """
        return None

    def failures(self, arrays: Sequence[Array]) -> list[Exception]:
        """Errors of the work queued on `arrays`, on CPUs. Blocks until it is
        done."""
        return []

    def has_gradient(self, x: Array) -> bool:
        """Whether the leaf `x` has the gradient of a backward pass or of
        `grad`. A gradient that the user has deleted (``p.grad = None`` in
        torch) is not applied."""
        return True

    def full_precision(self) -> ContextManager:
        """Context manager in which float32 is not reduced in precision (TF32)
        on any device."""
        return nullcontext()

    def gluonize(self, net: Any, on: bool = True) -> Any:
        """Set or reset Gluon's arithmetic in `net`, in place. Returns `net`.
        See `mgpu.parity.gluonize`."""
        return net

    def converter(self, name: str) -> Callable[..., Any]:
        """The function `name` of `mgpu.compat.conversion`, which reads or
        writes networks for PyTorch."""
        raise messages.not_supported(
            self.name, name, "call mgpu.set_backend('torch') before (a Block "
            "has export and save_parameters).")

    # joint batch statistics

    def fan_out(self, x: Array, count: int) -> list[Array]:
        """`count` references to `x`. Their gradients are added in order,
        independent of the order in which threads record."""
        return [x] * count

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

    # threads and random streams of data loading

    def kept_streams(self) -> Callable[[], None]:
        """Return a function that restores the current random streams of this
        process, including the global ones of NumPy and Python. Without
        `reads_streams`, those of the backend are not restored."""
        parts: list[Callable[[], Any]] = [
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state())]
        if self.reads_streams:
            parts.append(self.fit_streams(self.export_streams()))

        def put_back() -> None:
            for part in parts:
                part()
        return put_back

    def device_threads(self) -> ContextManager:
        """Context manager in which an operation of this thread uses as many
        cores as one of several CPU devices."""
        return nullcontext()

    def aside(self) -> ContextManager:
        """Context manager in which such a thread waits for others, which may
        draw random numbers or run replicas."""
        return nullcontext()
