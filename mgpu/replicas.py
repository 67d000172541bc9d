"""A network, or a list of parameters, on several devices."""
import threading
import warnings
import weakref
from collections import abc
from functools import partial
from typing import (Any, Callable, ContextManager, Dict, List, Mapping,
                    NamedTuple, Optional, Sequence, Tuple)

import numpy as np

from mgpu import initializers, profiling
from mgpu.backends import base, get_backend, recording_elsewhere
from mgpu.batch_norm import Meeting, SyncBatchNorm
from mgpu.collectives import allreduce_many
from mgpu.device import Device, as_device, as_devices
from mgpu.split import map_leaves, rows_of

BATCH_NORM = ("per_device", "average", "sync")
_STATISTICS = ("running_mean", "running_var")
_BUFFERS = (*_STATISTICS, "other")
_DTYPES = ("float16", "float32", "float64")
# A counter of torch's batch norm; Gluon has none.
_COUNTER = "num_batches_tracked"

# "Initialised" means: has been through `initialize`. A torch module has
# values from the start, so the engine cannot tell.
_initialized: "weakref.WeakKeyDictionary[Any, List[Device]]" = \
    weakref.WeakKeyDictionary()


class ReplicaMismatchError(RuntimeError):
    """Replicas that should hold the same values, each in memory of its own,
    do not."""


def get_params(params: Any, device: Any, grad_req: str = "write") -> Any:
    """Copy parameters to a device, each with a zero gradient attached.

    The text's function ("Training on Multiple GPUs"), for networks written
    by hand.

    Parameters
    ----------
    params : sequence of arrays, or dict of them
        Native or NumPy; dtypes are kept. Not changed, not shared.
    device : device
    grad_req : {"write", "add", "null"}

    Returns
    -------
    list (or dict with the same keys) of native arrays

    Raises
    ------
    TypeError
        `params` is one array, or an array of the other framework.
    ValueError
        A device that is not there, or another `grad_req`.
    """
    backend, (device,) = get_backend(), as_devices([device])
    base.check_grad_req(grad_req)
    if hasattr(params, "shape"):
        raise TypeError("params must be a list, or a dict, of arrays; "
                        f"received one {type(params).__name__}. Put it in a "
                        "list.")
    with backend.scope(recording=False):
        if isinstance(params, dict):
            copies = {name: backend.put(p, device)
                      for name, p in params.items()}
            every = list(copies.values())
        else:
            copies = every = [backend.put(p, device) for p in params]
        for p in every:
            backend.attach_grad(p, grad_req)
    return copies


class Parameter:
    """One parameter or buffer of a `Replicas`, on all its devices.

    The methods are those of Gluon's `Parameter`.

    Attributes
    ----------
    name : str
        Its path in the network with Gluon's suffix: ``"3.0.bn1.gamma"``.
    kind : str
        weight, bias, gamma, beta, running_mean, running_var or other.
    grad_req : str
        ``"write"``, ``"add"`` or ``"null"`` (frozen). May be set, once the
        parameter has values: on all devices, from the next forward pass on.
        ValueError for another word, or for a buffer.
    """

    def __init__(self, replicas: "Replicas", number: int, spec: base.Spec):
        self._replicas, self._number = replicas, number
        self.name, self.kind = spec.name, spec.kind
        self.lr_mult, self.wd_mult = spec.lr_mult, spec.wd_mult
        self._spec = spec

    def __repr__(self) -> str:
        return (f"Parameter {self.name} (shape={self.shape}, "
                f"dtype={self.dtype})")

    @property
    def shape(self) -> Optional[Tuple[int, ...]]:
        """None until it is known (deferred or lazy layers)."""
        return self._spec.shape

    @property
    def dtype(self) -> str:
        return self._spec.dtype

    @property
    def grad_req(self) -> str:
        return self._replicas._network.grad_req(self._number)

    @grad_req.setter
    def grad_req(self, grad_req: str) -> None:
        base.check_grad_req(grad_req)
        if self.kind in _BUFFERS and grad_req != "null":
            raise ValueError(
                f"a buffer has no gradient; received grad_req={grad_req!r} "
                f"for {self.name!r} ({self.kind}). Set it for parameters: "
                "see Replicas.params().")
        self._replicas._network.set_grad_req(
            self._number, grad_req, self.list_data())

    def list_devices(self) -> List[Device]:
        return list(self._replicas.devices)

    def list_data(self) -> List[Any]:
        """The native arrays themselves, one per device, not copies."""
        return [replica.array(self._number)
                for replica in self._replicas._filled()]

    def list_grad(self) -> List[Any]:
        """The gradients themselves, one per device. ValueError for a frozen
        parameter or a buffer: they have none."""
        if self.grad_req == "null":
            raise ValueError(
                f"parameter {self.name!r} has no gradient; its grad_req is "
                "'null' (a frozen parameter or a buffer). Set grad_req = "
                "'write' on a parameter before the forward pass.")
        backend = self._replicas.backend
        return [backend.grad(x) for x in self.list_data()]

    def data(self, device: Any = None) -> Any:
        """The array on `device` (default: the first one), not a copy.

        Raises
        ------
        RuntimeError
            The parameter is not on that device, or has no values yet.
        """
        place = self._place(device)
        return self.list_data()[place]

    def grad(self, device: Any = None) -> Any:
        """The gradient on `device`; raises as `data` and `list_grad` do."""
        place = self._place(device)
        return self.list_grad()[place]

    def _place(self, device: Any) -> int:
        if device is None:
            return 0
        device, holders = as_device(device), self._replicas.devices
        if device not in holders:
            raise RuntimeError(
                f"parameter {self.name!r} is not initialized on {device}; it "
                f"lives on {holders}. Read it there, or initialize the "
                f"network on a list with {device}.")
        return holders.index(device)

    def set_data(self, value: Any) -> None:
        """Write `value` (NumPy or native, of this shape) on all devices,
        rounded to the parameter's dtype; the next `Trainer.step` goes on
        from it. ValueError for another shape; nothing has changed then."""
        arrays = self.list_data()
        shape = tuple(np.shape(value) if not hasattr(value, "shape")
                      else value.shape)
        if shape != self.shape:
            raise ValueError(f"parameter {self.name!r} has shape "
                             f"{self.shape}; received {shape}. Reshape the "
                             "value.")
        backend = self._replicas.backend
        with backend.scope(recording=False):
            for x in arrays:
                x[...] = backend.put(value, x)

    def zero_grad(self) -> None:
        """Set the gradient to zero on all devices."""
        if self.grad_req != "null":
            with self._replicas.backend.scope(recording=False):
                for g in self.list_grad():
                    g[...] = 0


class ReplicaView:
    """One replica of a `Replicas`: ``replicas[i](x)`` runs it.

    Attributes
    ----------
    device : Device
    """

    def __init__(self, replicas: "Replicas", index: int):
        self._replicas, self._index = replicas, index
        self.device = replicas.devices[index]

    def __call__(self, *inputs: Any) -> Any:
        return self._replicas._run_one(self._index, inputs)

    def __repr__(self) -> str:
        return f"replica {self._index} on {self.device}"

    def arrays(self) -> List[Any]:
        """The native parameters, then buffers, of this device."""
        replica = self._replicas._filled()[self._index]
        return [replica.array(p._number) for p in self._replicas._all()]


class Replicas(abc.Sequence):
    """A network on a list of devices. Made by `initialize`.

    ``replicas[i](x)`` runs the network on device i; ``replicas(shards)``
    takes a list with one shard per device, runs all replicas at the same
    time and returns a list. Where a shard is empty or None the network does
    not run and the result is None. Training mode holds inside `mgpu.record`;
    outside it a replica predicts and builds no graph, whatever the user's
    own flags say.

    A network with several inputs takes ``replicas[i](a, b)``, and either
    ``replicas(a_shards, b_shards)`` or shards that are tuples or lists of
    arrays. A dict or a named tuple of arrays is one input.

    Attributes
    ----------
    devices : list of Device
    net : gluon.Block or torch.nn.Module
        The user's own network. On torch it is replica 0, on MXNet the one
        Block that all replicas are views of: training trains it in place.
    backend : Backend
        The engine that was in use when the network was initialised.
    batch_norm : str
    """

    def __init__(self, network: base.Network, backend: base.Backend,
                 devices: List[Device], batch_norm: str,
                 draw: Any) -> None:
        self._network, self.backend = network, backend
        self.devices, self.batch_norm = devices, batch_norm
        self._draw = draw           # specs -> values; None once complete
        self._completing = threading.Lock()
        self._replicas: List[base.Replica] = []
        self._views = [ReplicaView(self, i) for i in range(len(devices))]
        #: which replicas had rows when they were last called in `record`;
        #: `Trainer` clears it with every step
        self.recorded = [False] * len(devices)
        self._parameters: Optional[List[Parameter]] = None

    @property
    def net(self) -> Any:
        return self._network.net

    def __len__(self) -> int:
        return len(self.devices)

    def __getitem__(self, i: Any) -> Any:
        return self._views[i]

    def __repr__(self) -> str:
        return (f"Replicas of {type(self.net).__name__} on {self.devices} "
                f"({self.backend.name}, batch_norm={self.batch_norm!r})")

    # -- values -------------------------------------------------------------

    def _complete(self, inputs: Optional[Tuple[Any, ...]] = None,
                  device: Optional[Device] = None) -> None:
        """Draw the values, once shapes are known."""
        with self._completing:      # replicas may run in threads
            if self._draw is None:
                return
            if any(spec.shape is None for spec in self._network.specs()):
                if inputs is None:
                    return
                self._network.infer_shapes(inputs, device)
            specs = self._network.specs()
            values = self._draw(specs)
            with self.backend.scope(recording=False):
                replicas = self._network.replicate(self.devices)
                for replica in replicas:
                    for number, spec in enumerate(specs):
                        if spec.name in values:
                            x = replica.array(number)
                            x[...] = self.backend.put(values[spec.name], x)
            for p, spec in zip(self._parameters or (), specs):
                p._spec = spec
            self._replicas, self._draw = replicas, None

    def _filled(self) -> List[base.Replica]:
        """The engine's replicas, once they have values."""
        if self._draw is not None:
            raise RuntimeError(
                "the parameters have no values yet: a shape is unknown until "
                "the first forward pass. Run one, or pass sample= to "
                "mgpu.initialize.")
        return self._replicas

    def _all(self) -> List[Parameter]:
        if self._parameters is None:
            self._parameters = [
                Parameter(self, i, spec)
                for i, spec in enumerate(self._network.specs())]
        return self._parameters

    def params(self) -> List[Parameter]:
        """All parameters, frozen ones too, in the order of the layers."""
        return [p for p in self._all()
                if p.kind not in _BUFFERS]

    def buffers(self) -> List[Parameter]:
        """Running statistics and other state without a gradient."""
        return [p for p in self._all() if p.kind in _BUFFERS]

    def statistics(self) -> List[Parameter]:
        """The running means and variances among `buffers`."""
        return [p for p in self._all() if p.kind in _STATISTICS]

    def grad_reqs(self) -> Dict[str, str]:
        """`Parameter.grad_req` by name, as it is now."""
        return {p.name: p.grad_req for p in self._all()}

    def zero_grad(self) -> None:
        """Set every gradient to zero on all devices (``grad_req="add"``)."""
        for p in self.params():
            p.zero_grad()

    def export_numpy(self, *, device: Any = None, all_devices: bool = False
                     ) -> Dict[str, np.ndarray]:
        """All values by name, as NumPy copies; waits for pending work.

        Parameters
        ----------
        device : device, optional
            Take the running statistics of this device.
        all_devices : bool
            Keep every device's statistics: with more than one device their
            arrays get a leading axis of length K. What a checkpoint of a
            run with ``batch_norm="per_device"`` needs. Not with `device`.

        Returns
        -------
        dict of str -> ndarray
            By default running statistics are the mean over devices, with a
            UserWarning where they differ: the variance of the means is lost.

        Raises
        ------
        ValueError
            `device` and `all_devices` together.
        RuntimeError
            A device where the network is not, or no values yet.
        """
        if device is not None and all_devices:
            raise ValueError("one device's statistics or those of all are "
                             f"exported; received device={device!r} and "
                             "all_devices=True. Give one of them.")
        values, differ = {}, []
        for p in self._all():
            arrays = p.list_data()
            place = p._place(device)
            if p.kind not in _STATISTICS or len(self.devices) == 1 \
                    or device is not None:
                values[p.name] = self.backend.to_numpy(arrays[place])
                continue
            every = np.stack([self.backend.to_numpy(x) for x in arrays])
            if all_devices:
                values[p.name] = every
                continue
            if (every != every[:1]).any():
                differ.append(p.name)
                values[p.name] = every.mean(axis=0)
            else:
                values[p.name] = every[0]
        if differ:
            warnings.warn(
                f"{len(differ)} running statistics differ between devices "
                f"({differ[0]}, ...); their mean was exported. Pass "
                "all_devices=True to keep every device's.", stacklevel=2)
        return values

    def import_numpy(self, values: Mapping[str, np.ndarray]) -> None:
        """Write values by name on all devices: what `export_numpy` gave, of
        this engine or of the other one. Statistics may have a leading axis
        of length K. Buffers of kind "other" may be missing.

        Raises
        ------
        ValueError
            Missing or unknown names, other shapes, or what is no number,
            all of them listed. Nothing has changed then.
        """
        self._filled()
        own = {p.name: p for p in self._all()}
        k = len(self.devices)
        wrong = [f"missing {name}" for name, p in own.items()
                 if name not in values and p.kind != "other"]
        # The other engine counts other things beside its statistics.
        known = [name for name in values if name in own]
        wrong += [f"unknown {name}" for name in values
                  if name not in own and not name.endswith(_COUNTER)]
        for name in known:
            value, p = np.asarray(values[name]), own[name]
            each = p.kind in _STATISTICS and value.shape == (k, *p.shape)
            if value.shape != p.shape and not each:
                wrong.append(f"{name}: shape {value.shape} instead of "
                             f"{p.shape}")
            elif value.dtype.kind not in "fiub":
                wrong.append(f"{name}: dtype {value.dtype}")
        if wrong:
            raise ValueError(
                "the values must be those of this network; received "
                + "; ".join(wrong) + ". Use what export_numpy of a network "
                "with the same layers gave.")
        with self.backend.scope(recording=False):
            for name in known:
                value = np.asarray(values[name])
                for i, x in enumerate(own[name].list_data()):
                    one = value if value.shape == own[name].shape \
                        else value[i]
                    x[...] = self.backend.put(one, x)

    # -- checking -----------------------------------------------------------

    def check_equal(self) -> None:
        """Check that all replicas hold the same bits, each in memory of its
        own. `Trainer` does it after each update under ``MGPU_DEBUG=1``.

        Compared are all parameters, frozen ones too, and the running
        statistics where `batch_norm` promises that they agree ("average"
        and "sync", at the end of a step). Memory: parameters, buffers and
        gradients. Reads everything, and waits for pending work.

        Raises
        ------
        ReplicaMismatchError
            Names the first parameter, the devices, the largest difference.
        RuntimeError
            The parameters have no values yet.
        """
        self._check_memory()
        promised = _STATISTICS if self.batch_norm != "per_device" else ()
        for p in self._all():
            if p.kind in _BUFFERS and p.kind not in promised:
                continue
            first, *others = map(self.backend.to_numpy, p.list_data())
            for device, other in zip(self.devices[1:], others):
                if first.tobytes() != other.tobytes():
                    raise _different(p, self.devices[0], device, first,
                                     other)

    def _check_memory(self) -> None:
        found: List[_Extent] = []

        def look(name: str, arrays: List[Any]) -> None:
            for device, x in zip(self.devices, arrays):
                space, begin, end = self.backend.memory(x)
                if begin < end:
                    found.append(_Extent(str(space), begin, end, device,
                                         name))
        for p in self._all():
            look(p.name, p.list_data())
        _check_apart(found)
        # An array in another one's place may have no gradient: first those.
        for p in self._all():
            if p.grad_req != "null":
                look(f"the gradient of {p.name}", p.list_grad())
        _check_apart(found)

    # -- running ------------------------------------------------------------

    def autocast(self) -> ContextManager[None]:
        """Inside the block, arithmetic of this thread and of `mgpu.parallel`
        follows the `autocast` of `initialize`: for a loss that is not
        computed by `train_batch`. Without that option, nothing."""
        return self._network.autocast(self.devices)

    def _check_inputs(self, i: int, inputs: Tuple[Any, ...]) -> None:
        """Refuse what is not for replica `i`."""
        found: List[Any] = []

        def check(x: Any) -> List[Any]:
            found.append(x)
            if not self.backend.is_native(x):
                base.refuse_foreign(x, self.backend.name)
                raise self._no_array(i, x)
            return [None]
        for x in inputs:
            map_leaves(check, x, 1)
        if not found:
            raise self._no_array(i, *inputs[:1])

    def _no_array(self, i: int, *received: Any) -> TypeError:
        what = type(received[0]).__name__ if received else "no input"
        return TypeError(
            f"replica {i} on {self.devices[i]} takes arrays of the "
            f"{self.backend.name} backend; received {what}. Use "
            f"mgpu.put(x, {self.devices[i]}).")

    def _check_recording(self) -> None:
        elsewhere = recording_elsewhere(self.backend)
        if elsewhere:
            raise RuntimeError(
                f"replicas of the {self.backend.name} backend run inside a "
                f"record() of theirs; received one of {elsewhere!r}. Choose "
                "the backend with mgpu.using_backend before record().")

    def _run_one(self, i: int, inputs: Tuple[Any, ...]) -> Any:
        self._check_recording()
        if len(inputs) == 1:
            inputs = as_inputs(inputs[0])
        if self._syncs():
            raise RuntimeError(
                "with batch_norm='sync' all replicas train together; "
                f"received inputs for replica {i} alone. Call "
                "replicas(shards) instead of replicas[i](x).")
        self._check_inputs(i, inputs)
        if any(map(_is_empty, inputs)):
            raise ValueError(
                f"a network runs on one row or more; replica {i} on "
                f"{self.devices[i]} received none. Leave it out, or use "
                "replicas(shards), which passes empty shards over.")
        self._complete(inputs, self.devices[i])
        result = self._replicas[i](*inputs)
        if self.backend.is_recording():
            self.recorded[i] = True
        return result

    def independent(self) -> bool:
        """Whether each replica may go through its forward and its backward
        pass by itself: none waits for another's statistics, and gradients
        that are written in vain, as another device refuses its rows, are
        overwritten by the next pass."""
        return not (self.batch_norm == "sync" and len(self.devices) > 1) \
            and "add" not in self.grad_reqs().values()

    def _syncs(self) -> bool:
        return self.batch_norm == "sync" and len(self.devices) > 1 \
            and self.backend.is_training()

    def __call__(self, *inputs: Sequence[Any]) -> List[Any]:
        rows, active = self._prepared(inputs)
        with profiling.stage("compute", "forward", self.devices,
                             lambda: results, active):
            if self._syncs():
                results = self._run_synchronised(rows, active)
            else:
                results = self._network.forward(
                    self._replicas, _of(active, rows))
        self._note(active)
        return results

    def forward_backward(self, shards: Sequence[Any],
                         head: Callable[[int, Any], Any]) -> None:
        """``replicas(shards)``, then ``head(i, output)`` for each device with
        rows, a native array, and its backward pass; inside `record`. No
        device waits for another in between, if the engine can do that. Not
        with ``batch_norm="sync"``."""
        rows, active = self._prepared((shards,))
        self._note(active)
        self._network.forward_backward(
            self._replicas, _of(active, rows), head,
            lambda i: self._views[i].arrays())

    def _note(self, active: List[int]) -> None:
        if self.backend.is_recording():
            self.recorded = [i in active for i in range(len(self.devices))]

    def _prepared(self, inputs: Tuple[Sequence[Any], ...]
                  ) -> Tuple[List[Tuple[Any, ...]], List[int]]:
        """Each device's inputs, checked, and the numbers of the devices that
        have rows; the parameters have values then."""
        self._check_recording()
        k = len(self.devices)
        for column in inputs:
            if not isinstance(column, (list, tuple)):
                if not self.backend.is_native(column):
                    base.refuse_foreign(column, self.backend.name)
                raise TypeError(
                    "replicas take a list with one shard per device; "
                    f"received {type(column).__name__}. Use "
                    "replicas(split_and_load(x, replicas.devices)), or "
                    "replicas[i](x) for the replica on device i.")
            if len(column) != k:
                raise ValueError(
                    f"{k} replicas take {k} shards; received {len(column)}. "
                    "Use mgpu.split_batch, which always makes one per "
                    "device.")
        rows = list(map(as_inputs, inputs[0])) if len(inputs) == 1 \
            else list(zip(*inputs))
        active = [i for i, row in enumerate(rows)
                  if not any(map(_is_empty, row))]
        if not active:
            raise ValueError("at least one shard must hold rows; received "
                             f"{k} empty ones. Leave an empty batch out.")
        for i in active:
            self._check_inputs(i, rows[i])
        self._complete(rows[active[0]], self.devices[active[0]])
        return rows, active

    def _run_synchronised(self, rows: List[Tuple[Any, ...]],
                          active: List[int]) -> List[Any]:
        meeting = Meeting(active)
        rule = SyncBatchNorm(self.backend, meeting)
        with self._network.batch_norm(rule):
            results = meeting.run(self.backend, [
                partial(self._replicas[i], *rows[i]) if i in active
                else None for i in range(len(rows))])
        idle = [i for i in range(len(rows)) if i not in active]
        if idle and self.backend.is_recording():
            with self.backend.scope(recording=False):
                for arrays in [p.list_data() for p in self.statistics()]:
                    for i in idle:
                        arrays[i][:] = arrays[active[0]]
        return results

    def after_step(self) -> None:
        """What `Trainer` calls when a step is done: ``"average"`` replaces
        the statistics by their means over devices."""
        if self.batch_norm == "average":
            allreduce_many([p.list_data() for p in self.statistics()],
                           op="mean")


class _Extent(NamedTuple):
    """What an array occupies."""

    space: str
    begin: int
    end: int
    device: Device
    name: str


def _check_apart(extents: List[_Extent]) -> None:
    last: Optional[_Extent] = None      # the one that reaches furthest so far
    for here in sorted(extents):
        if last is None or here.space != last.space \
                or here.begin >= last.end:
            last = here
        elif here.device != last.device:
            raise ReplicaMismatchError(
                f"each replica must have memory of its own; {last.name!r} on "
                f"{last.device} and {here.name!r} on {here.device} share "
                "theirs, so what one device writes changes the other. Copy "
                "arrays with mgpu.put or x[:] = v; do not put one device's "
                "array in another one's place.")
        elif here.end > last.end:
            last = here


def _different(p: Parameter, a: Device, b: Device, x: np.ndarray,
               y: np.ndarray) -> ReplicaMismatchError:
    if x.shape != y.shape or x.dtype != y.dtype:
        how = f"they are {x.shape} {x.dtype} and {y.shape} {y.dtype}"
    else:
        with np.errstate(invalid="ignore"):     # infinity minus infinity
            gaps = np.abs(x.astype(np.float64) - y.astype(np.float64))
        # A NaN on one side alone is as far away as can be.
        gaps[np.isnan(gaps)] = np.inf
        gaps[(x == y) | (np.isnan(x) & np.isnan(y))] = 0
        how = (f"{np.count_nonzero(gaps)} of {gaps.size} elements differ, "
               f"by {gaps.max():.6g} at most") if gaps.any() else \
            "they are equal numbers with other bits (signs of zeros, NaNs)"
    return ReplicaMismatchError(
        f"all replicas must hold the same values; {p.name!r} on {a} and on "
        f"{b} does not: {how}. Something wrote to one replica alone, or "
        "gradients were not all-reduced: write with Parameter.set_data or "
        "Replicas.import_numpy, which reach all, and step with Trainer.")


def _of(active: List[int], rows: Sequence[Any]) -> List[Any]:
    return [row if i in active else None for i, row in enumerate(rows)]


def as_inputs(shard: Any) -> Tuple[Any, ...]:
    """What a network is called with: a tuple or list of arrays (a batch of a
    torch or Gluon DataLoader is a list) stands for several inputs."""
    return tuple(shard) if type(shard) in (tuple, list) else (shard,)


def _is_empty(x: Any) -> bool:
    return x is None or rows_of(x) == 0


def _options(network: base.Network, batch_norm: str, dtype: Optional[str],
             hybridize: Any, channels_last: Any, autocast: Any
             ) -> base.Options:
    for name, value in (("hybridize", hybridize),
                        ("channels_last", channels_last)):
        if not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"{name} must be True or False; received "
                             f"{value!r}.")
    if autocast not in (None, "bfloat16", "float16"):
        raise ValueError(f"unknown autocast; received {autocast!r}. Use "
                         "None, 'bfloat16' or 'float16'.")
    if hybridize and batch_norm == "sync":
        raise ValueError(
            "synchronised batch normalisation needs the layers of the "
            "network one by one; received batch_norm='sync' with "
            "hybridize=True. Use one of them.")
    if autocast is not None:
        others = sorted({dtype or spec.dtype for spec in network.specs()
                         if "float" in spec.dtype} - {"float32"})
        if others:
            raise ValueError(
                "autocast narrows the passes of a float32 network; received "
                f"autocast={autocast!r} with {', '.join(others)}. Use "
                "dtype='float32', or autocast=None.")
    return base.Options(bool(hybridize), bool(channels_last), autocast)


def initialize(net: Any, devices: Any, init: Any = None, seed: int = 0,
               sample: Any = None, force_reinit: bool = False,
               dtype: Optional[str] = None, *,
               batch_norm: str = "per_device", hybridize: bool = False,
               channels_last: bool = False, autocast: Optional[str] = None
               ) -> Replicas:
    """Put a network on a list of devices, all with the same values.

    Parameters
    ----------
    net : gluon.Block or torch.nn.Module
        Trained in place: see `Replicas.net`.
    devices : sequence of distinct devices
    init : Initializer, str, "keep" or None
        Weights are drawn once, in NumPy, from (`seed`, number of the
        parameter): bit-identical on all devices and, for the same layers in
        the same order, on both backends. None is Gluon's default,
        ``Uniform(0.07)``; "keep" keeps the network's own values. Biases,
        gammas, betas and running statistics follow Gluon's rules (0, 1, 0,
        0 and 1), and a layer's own Gluon initialiser wins.
    seed : int
    sample : array, or tuple or list of arrays, optional
        What the network is called with, for deferred or lazy shapes; floats
        from NumPy take the dtype of the network. Without it the shapes are
        completed once, at the first forward pass.
    force_reinit : bool
        Draw again a network that has been through `initialize`, running
        statistics included. Replicas from the earlier call are void.
    dtype : str, optional
        Cast the network, for example to ``"float64"``.
    batch_norm : {"per_device", "average", "sync"}
        One set of running statistics per device; their plain mean after
        each step; or joint statistics of the whole batch, weighted by rows.
    hybridize : bool
        Compile the network: Gluon's ``hybridize(static_alloc=True)``,
        ``torch.compile`` with static shapes. A new shape of inputs (a short
        last batch) is compiled when it first comes, on torch for many
        seconds. Numbers are those without it to rounding (on MXNet: to the
        last bit); dropout masks are the same. Not with "sync".
    channels_last : bool
        Let 4-d weights and inputs lie in memory with the channels last
        (torch; results agree to rounding). MXNet has no such switch: nothing
        changes there.
    autocast : {None, "bfloat16", "float16"}
        Torch alone: run the forward pass, and in `train_batch` the loss,
        under ``torch.autocast`` of that dtype. Weights, gradients, running
        statistics and the network's outputs are float32; bfloat16 rounds to
        2**-8 relative, float16 to 2**-11, and may need the `loss_scale` of
        `Trainer`.

    See docs/options.md for the last three.

    Raises
    ------
    TypeError
        Not a network of the current backend.
    RuntimeError
        The network was initialised before and `force_reinit` is False, or
        "keep" and it has no values; or `hybridize` without a compiler.
    ValueError
        A wrong option or device, or an option that the engine cannot give
        this network. Nothing has changed then.
    """
    backend = get_backend()
    devices = as_devices(devices)
    network = backend.network(net)
    if batch_norm not in BATCH_NORM:
        raise ValueError(f"unknown batch_norm; received {batch_norm!r}. Use "
                         f"one of {', '.join(map(repr, BATCH_NORM))}.")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"unknown dtype; received {dtype!r}. Use one of "
                         f"{', '.join(map(repr, _DTYPES))}.")
    options = _options(network, batch_norm, dtype, hybridize, channels_last,
                       autocast)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) \
            or seed < 0:
        raise ValueError(f"seed must be a whole number, 0 or more; received "
                         f"{seed!r}.")
    keep = isinstance(init, str) and init == "keep"
    rule = None if keep else initializers.create(
        initializers.Uniform(0.07) if init is None else init)
    if net in _initialized and not force_reinit:
        raise RuntimeError(
            f"the network is initialized already, on {_initialized[net]}; "
            "pass force_reinit=True to draw it again.")
    if keep and network.values() is None:
        raise RuntimeError(
            "init='keep' wants a network that has values; received one whose "
            "parameters are not initialized yet. Load or initialize it "
            "first, or choose an initialiser.")

    values: Dict[str, np.ndarray] = {}

    def draw(specs: List[base.Spec]) -> Dict[str, np.ndarray]:
        if keep:
            return network.values() or {}
        # Parameters come first, so their numbers are those of the layers.
        for number, spec in enumerate(specs):
            if spec.shape is None or spec.name in values:
                continue
            if spec.kind != "other":
                values[spec.name] = initializers.draw_parameter(
                    spec.kind, spec.shape, dtype or spec.dtype, rule,
                    seed=int(seed), index=number, own=spec.init)
            elif spec.name.endswith(_COUNTER):
                values[spec.name] = np.zeros(spec.shape, spec.dtype)
        return values

    network.prepare(options, devices)
    if not keep:    # what cannot be drawn is refused before a change
        draw(network.specs())
    before = {s.dtype for s in network.specs() if "float" in s.dtype}
    if dtype is not None:
        network.cast(dtype)
    replicas = Replicas(network, backend, devices, batch_norm, draw)
    try:
        if sample is not None:
            floats = dtype or min(before, default=None)

            def place(x: Any) -> List[Any]:
                cast = isinstance(x, np.ndarray) and x.dtype.kind == "f"
                return [backend.put(x, devices[0],
                                    dtype=floats if cast else None)]
            sample, = map_leaves(place, sample, 1)
            replicas._complete(as_inputs(sample), devices[0])
        else:
            replicas._complete()
    except BaseException:       # a sample that does not fit
        if dtype is not None and len(before) == 1:
            network.cast(*before)
        raise
    _initialized[net] = devices
    return replicas
