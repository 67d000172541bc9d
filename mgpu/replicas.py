"""A network, or a list of parameters, on several devices."""
import warnings
import weakref
from collections import abc
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from mgpu import initializers
from mgpu.backends import base, get_backend
from mgpu.batch_norm import Meeting, SyncBatchNorm
from mgpu.collectives import allreduce
from mgpu.device import Device, as_device, as_devices

BATCH_NORM = ("per_device", "average", "sync")
_STATISTICS = ("running_mean", "running_var")
_DTYPES = ("float16", "bfloat16", "float32", "float64")

# "Initialised" means: has been through `initialize`. A torch module has
# values from the start, so the engine cannot tell.
_initialized: "weakref.WeakKeyDictionary[Any, List[Device]]" = \
    weakref.WeakKeyDictionary()


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
    """
    backend, (device,) = get_backend(), as_devices(device)
    base.check_grad_req(grad_req)
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
        ``"write"``, ``"add"`` or ``"null"`` (frozen). May be set: on all
        devices, from the next forward pass on.
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
        return self._replicas._network.grad_reqs()[self._number]

    @grad_req.setter
    def grad_req(self, grad_req: str) -> None:
        self._replicas._network.set_grad_req(
            self._number, grad_req, self.list_data())

    def list_devices(self) -> List[Device]:
        return list(self._replicas.devices)

    def list_data(self) -> List[Any]:
        """The native arrays themselves, one per device, not copies."""
        return [arrays[self._number] for arrays in self._replicas._arrays(
            self.name)]

    def list_grad(self) -> List[Any]:
        """The gradients themselves, one per device."""
        backend = self._replicas.backend
        return [backend.grad(x) for x in self.list_data()]

    def data(self, device: Any = None) -> Any:
        """The array on `device` (default: the first of the replicas').

        Raises
        ------
        RuntimeError
            The parameter is not on that device, or has no values yet.
        """
        return self.list_data()[self._place(device)]

    def grad(self, device: Any = None) -> Any:
        """The gradient on `device`; raises as `data` does."""
        return self._replicas.backend.grad(self.data(device))

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
        """Write `value` (NumPy or native, of this shape) on all devices; the
        next `Trainer.step` goes on from it."""
        shape = tuple(np.shape(value) if not hasattr(value, "shape")
                      else value.shape)
        if shape != self.shape:
            raise ValueError(f"parameter {self.name!r} has shape "
                             f"{self.shape}; received {shape}.")
        backend = self._replicas.backend
        with backend.scope(recording=False):
            for x in self.list_data():
                x[:] = backend.put(value, x)

    def zero_grad(self) -> None:
        """Set the gradient to zero on all devices."""
        if self.grad_req != "null":
            with self._replicas.backend.scope(recording=False):
                for g in self.list_grad():
                    g[:] = 0


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
        return self._replicas._arrays("the parameters")[self._index]


class Replicas(abc.Sequence):
    """A network on a list of devices. Made by `initialize`.

    ``replicas[i](x)`` runs the network on device i; ``replicas(shards)``
    takes a list with one shard per device (several lists for a network with
    several inputs), runs all replicas at the same time and returns a list.
    Where a shard is empty or None the network does not run and the result
    is None. Training mode holds inside `mgpu.record`; outside it a replica
    predicts and builds no graph, whatever the user's own flags say.

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
        self._replicas: List[base.Replica] = []
        self._views = [ReplicaView(self, i) for i in range(len(devices))]
        #: which replicas have run inside `record` since the last step
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
        if self._draw is None:
            return
        if any(spec.shape is None for spec in self._network.specs()):
            if inputs is None:
                return
            self._network.infer_shapes(inputs, device)
        specs = self._network.specs()
        values = self._draw(specs)
        with self.backend.scope(recording=False):
            self._replicas = self._network.replicate(self.devices)
            for replica in self._replicas:
                for spec, x in zip(specs, replica.arrays()):
                    if spec.name in values:
                        x[:] = self.backend.put(values[spec.name], x)
        self._draw, self._parameters = None, None

    def _arrays(self, what: str) -> List[List[Any]]:
        if self._draw is not None:
            raise RuntimeError(
                f"{what!r} has no values yet: a shape is unknown until the "
                "first forward pass. Run one, or pass sample= to "
                "mgpu.initialize.")
        return [replica.arrays() for replica in self._replicas]

    def _all(self) -> List[Parameter]:
        if self._parameters is None:
            self._parameters = [
                Parameter(self, i, spec)
                for i, spec in enumerate(self._network.specs())]
        return self._parameters

    def params(self) -> List[Parameter]:
        """All parameters, frozen ones too, in the order of the layers."""
        return [p for p in self._all()
                if p.kind not in (*_STATISTICS, "other")]

    def buffers(self) -> List[Parameter]:
        """Running statistics and other state without a gradient."""
        return [p for p in self._all() if p.kind in (*_STATISTICS, "other")]

    def statistics(self) -> List[Parameter]:
        """The running means and variances among `buffers`."""
        return [p for p in self._all() if p.kind in _STATISTICS]

    def grad_reqs(self) -> Dict[str, str]:
        """`Parameter.grad_req` by name, as it is now."""
        return dict(zip((p.name for p in self._all()),
                        self._network.grad_reqs()))

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
            Keep every device's statistics: their arrays get a leading axis
            of length K. What a checkpoint of a run with
            ``batch_norm="per_device"`` needs.

        Returns
        -------
        dict of str -> ndarray
            By default running statistics are the mean over devices, with a
            UserWarning where they differ: the variance of the means is lost.
        """
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
            Missing or unknown names, or other shapes, all of them listed.
            Nothing has changed then.
        """
        own = {p.name: p for p in self._all()}
        k = len(self.devices)
        wrong = [f"missing {name}" for name, p in own.items()
                 if name not in values and p.kind != "other"]
        # The other engine counts other things beside its statistics.
        known = [name for name in values if name in own]
        wrong += [f"unknown {name}" for name in values if name not in own
                  and not name.endswith("num_batches_tracked")]
        for name in known:
            shape, p = np.shape(values[name]), own[name]
            each = p.kind in _STATISTICS and shape == (k, *(p.shape or ()))
            if shape != p.shape and not each:
                wrong.append(f"{name}: shape {shape} instead of {p.shape}")
        if wrong:
            raise ValueError("the values do not fit the network: "
                             + "; ".join(wrong) + ".")
        with self.backend.scope(recording=False):
            for name in known:
                value = np.asarray(values[name])
                for i, x in enumerate(own[name].list_data()):
                    one = value if value.shape == own[name].shape \
                        else value[i]
                    x[...] = self.backend.put(one, x)

    # -- running ------------------------------------------------------------

    def _prepare(self, i: int, inputs: Tuple[Any, ...]) -> None:
        for x in inputs:
            if not self.backend.is_native(x):
                base.refuse_foreign(x, self.backend.name)
                if isinstance(x, (np.ndarray, list, tuple)) or x is None:
                    raise TypeError(
                        f"replica {i} on {self.devices[i]} takes arrays of "
                        f"the {self.backend.name} backend; received "
                        f"{type(x).__name__}. Use mgpu.put(x, "
                        f"{self.devices[i]}).")
        if self._draw is not None:
            self._complete(inputs, self.devices[i])
        if self.backend.is_recording():
            self.recorded[i] = True

    def _run_one(self, i: int, inputs: Tuple[Any, ...]) -> Any:
        if self._syncs():
            raise RuntimeError(
                "with batch_norm='sync' all replicas train together; call "
                "replicas(shards) instead of replicas[i](x).")
        self._prepare(i, inputs)
        return self._replicas[i](*inputs)

    def _syncs(self) -> bool:
        return self.batch_norm == "sync" and len(self.devices) > 1 \
            and self.backend.is_training()

    def __call__(self, *inputs: Sequence[Any]) -> List[Any]:
        k = len(self.devices)
        for column in inputs:
            if self.backend.is_native(column) \
                    or not isinstance(column, (list, tuple)):
                base.refuse_foreign(column, self.backend.name)
                raise TypeError(
                    "replicas take a list with one shard per device; "
                    f"received {type(column).__name__}. Use "
                    "replicas(split_and_load(x, replicas.devices)), or "
                    "replicas[i](x) for the replica on device i.")
            if len(column) != k:
                raise ValueError(f"{k} replicas take {k} shards; received "
                                 f"{len(column)}.")
        rows = list(zip(*inputs))
        active = [i for i, row in enumerate(rows) if _holds_rows(row)]
        if not active:
            raise ValueError("at least one shard must hold rows; received "
                             f"{k} empty ones.")
        for i in active:
            self._prepare(i, rows[i])
        if self._syncs():
            return self._run_synchronised(rows, active)
        return self.backend.parallel([
            partial(self._replicas[i], *rows[i]) if i in active else _nothing
            for i in range(k)])

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
                for p in self.statistics():
                    arrays = p.list_data()
                    for i in idle:
                        arrays[i][:] = arrays[active[0]]
        return results

    def after_step(self) -> None:
        """What `Trainer` calls when a step is done: ``"average"`` replaces
        the statistics by their means over devices."""
        self.recorded = [False] * len(self.devices)
        if self.batch_norm == "average":
            for p in self.statistics():
                allreduce(p.list_data(), op="mean")


def _nothing() -> None:
    return None


def _holds_rows(row: Tuple[Any, ...]) -> bool:
    return all(x is not None and (not getattr(x, "shape", ()) or len(x))
               for x in row)


def initialize(net: Any, devices: Any, init: Any = None, seed: int = 0,
               sample: Any = None, force_reinit: bool = False,
               dtype: Optional[str] = None, *,
               batch_norm: str = "per_device") -> Replicas:
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
    sample : array or tuple of arrays, optional
        An input, for deferred or lazy shapes. Without it they are completed
        once, at the first forward pass.
    force_reinit : bool
        Draw again a network that has been through `initialize`.
    dtype : str, optional
        Cast the network, for example to ``"float64"``.
    batch_norm : {"per_device", "average", "sync"}
        One set of running statistics per device; their plain mean after
        each step; or joint statistics of the whole batch, weighted by rows.

    Raises
    ------
    TypeError
        Not a network of the current backend.
    RuntimeError
        The network was initialised before and `force_reinit` is False, or
        "keep" and it has no values.
    ValueError
        A wrong option or device. Nothing has changed then.
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

    if dtype is not None:
        network.cast(dtype)

    def draw(specs: List[base.Spec]) -> Dict[str, np.ndarray]:
        if keep:
            return network.values() or {}
        # Parameters come first, so their numbers are those of the layers.
        return {spec.name: initializers.draw_parameter(
            spec.kind, spec.shape, _drawn_dtype(spec.dtype), rule,
            seed=int(seed), index=number, own=spec.init)
            for number, spec in enumerate(specs) if spec.kind != "other"}

    replicas = Replicas(network, backend, devices, batch_norm, draw)
    if sample is not None:
        inputs = sample if isinstance(sample, tuple) else (sample,)
        floats = [s.dtype for s in network.specs() if "float" in s.dtype]
        replicas._complete(tuple(
            backend.put(x, devices[0], dtype=floats[0])
            if isinstance(x, np.ndarray) and x.dtype.kind == "f" and floats
            else backend.put(x, devices[0]) for x in inputs), devices[0])
    else:
        replicas._complete()
    _initialized[net] = devices
    return replicas


def _drawn_dtype(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype     # not in NumPy
