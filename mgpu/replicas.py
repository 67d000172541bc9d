"""A network on a list of devices."""
import contextlib
import gc
import math
import re
import threading
import warnings
import weakref
import zlib
from collections import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np

from mgpu import initializers, notebook, probes, weight_files
from mgpu.arguments import Hints, by_name, integer, one_given, one_of
from mgpu.backends import (base, get_backend, give_back, given, messages,
                           recording_elsewhere)
from mgpu.backends.containers import Call
from mgpu.backends.scope import check_task
from mgpu.batch_norm import Joint, Meeting, SyncBatchNorm
from mgpu import distributed
from mgpu.collectives import allreduce_many
from mgpu.collectives.strategies import strategy_of
from mgpu.compat.gluon import GLUON_HINTS, VIEW_HINTS, GluonNames
from mgpu.compat.pytorch import (TORCH_HINTS, TORCH_VIEW_HINTS,
                                 TorchNames)
from mgpu.data.examples import BatchSplit, Joining
from mgpu.device import Device, as_devices
from mgpu.distributed.strategy import over_processes, share_values
from mgpu.errors import ReplicaMismatchError
from mgpu.files import FilePath
from mgpu.inputs import inputs_for
from mgpu.nested import (NoRows, OnDevices, as_inputs, examples_of,
                         is_empty, leaves, map_leaves, shards_of)
from mgpu.parameters import BUFFERS, STATISTICS, Parameter, get_params
from mgpu.prediction import predict

__all__ = ["BATCH_NORM", "Parameter", "ReplicaMismatchError", "ReplicaView",
           "Replicas", "as_inputs", "get_params", "initialize"]

BATCH_NORM = ("per_device", "average", "sync")
_DTYPES = ("float16", "float32", "float64")
# A counter of torch's batch norm; Gluon has none.
_COUNTER = "num_batches_tracked"

# Stands for the thread that a call comes from, also in the threads that
# engines start for it.
_thread: ContextVar[Any] = ContextVar("mgpu_thread", default=None)

#: by network, the devices of the last `initialize`
_initialized: "weakref.WeakKeyDictionary[Any, list[Device]]" = \
    weakref.WeakKeyDictionary()
#: where a network keeps its `Replicas`
_OWNED = "_mgpu_replicas"
#: how many networks were there when `_collect` last looked
_left = 0

_HINTS = {**TORCH_HINTS, **GLUON_HINTS}


class _Owned:
    """A network's `Replicas`; a copy of the network has none."""

    def __init__(self, replicas: "Replicas | None" = None) -> None:
        self.replicas = replicas

    def __reduce__(self) -> Any:
        return dict, ()     # a pickle needs no mgpu

    def __deepcopy__(self, memo: Any) -> "_Owned":
        return _Owned()


class _Claim:
    """The block of `Replicas.owned`."""

    def __init__(self, replicas: "Replicas") -> None:
        self._replicas = weakref.proxy(replicas)
        self._owner: list[Any] = []
        self._claiming = threading.Lock()

    def __enter__(self) -> None:
        with self._claiming:
            me = _thread.get()
            if me is None:
                me = object()
                _thread.set(me)
            if self._owner and self._owner[-1] is not me:
                raise RuntimeError(
                    "one thread at a time uses the replicas of a network; "
                    "received a call while another thread runs or trains "
                    "them. Give each thread a network of its own.")
            self._replicas.check_valid()
            self._owner.append(me)

    def __exit__(self, *_: Any) -> None:
        self._owner.pop()


class ReplicaView(Hints):
    """A network on one device of a `Replicas`: ``replicas[i](x)``.

    Attributes
    ----------
    device : Device
    """

    _hints = {**VIEW_HINTS, **TORCH_VIEW_HINTS, **_HINTS}

    def __init__(self, replicas: "Replicas", index: int) -> None:
        self._replicas, self._index = replicas, index
        self.device = replicas.devices[index]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if named:
            inputs = *inputs, base.Kwargs(named)
        return self._replicas.run_one(self._index, inputs)

    def __repr__(self) -> str:
        return f"replica {self._index} on {self.device}"

    def arrays(self) -> list[Any]:
        """The native parameters, then buffers, of this device."""
        return [p.list_data()[self._index]
                for p in self._replicas.all_parameters()]


class Replicas(GluonNames, TorchNames, Hints, abc.Sequence):
    """A network on a list of devices. Made by `initialize`.

    The network itself is the only state. ``replicas(shards)`` takes a list
    with one shard for each device, runs the network on all of them at the
    same time, and returns a list; ``replicas[i](x)`` runs it on device i.
    Where a shard is empty or None the result is None. Other devices than the
    first run copies, which each pass overwrites from the network; the
    gradients of all devices are added up in the network's own parameters.

    Layers train inside `mgpu.record`. Outside it they predict and nothing is
    recorded, whatever their own flags say; but layers of a torch network in
    eval mode that were put into training mode again, such as dropout, train
    there. Such a network in eval mode predicts in `record` too, under
    ``torch.no_grad()``; with gradients it is refused (`mgpu.record` has
    ``train_mode=False`` for them).

    A network with several inputs takes ``replicas[i](a, b)``, and either
    ``replicas(a_shards, b_shards)`` or shards that are tuples or lists of
    arrays. A named tuple of arrays is one input, so is a tuple in a tuple,
    ``((a, b),)``, and so is a dict, unless forward takes names only. Names are
    ``replicas[i](x, mask=m)``, ``replicas(shards, mask=mask_shards)``, or
    `mgpu.Kwargs` at the end of a shard.

    Attributes
    ----------
    devices : list of Device
    net : gluon.Block or torch.nn.Module
        The user's own network, on the first device. Training changes it in
        place. Methods other than forward run on it.
    backend : Backend
        The engine that was in use when the network was initialised.
    batch_norm : str
    network : mgpu.backends.base.Network
        What the engine knows of `net`: its layers, for example.
    """

    _hints = _HINTS

    def __init__(self, network: base.Network, backend: base.Backend,
                 devices: list[Device], batch_norm: str,
                 draw: Any, origin: str, span: distributed.Span) -> None:
        self.network, self.backend = network, backend
        self.devices, self.batch_norm = devices, batch_norm
        #: these devices among those of all processes
        self.span = span
        self._draw = draw           # gives values; None once complete
        self._origin = origin       # of the values, in words
        self._completing = threading.Lock()
        self._views = [ReplicaView(self, i) for i in range(len(devices))]
        self._found: list[Parameter] | None = None
        self._claim = _Claim(self)          # see `owned`
        names = [p.name for p in network.inputs()]
        #: by batch axis
        self._split = cache(lambda batch_axis: BatchSplit(
            names, batch_axis, (), backend.batch_arrays))
        #: over processes: parameters whose gradients hold the sum of all
        #: ranks, to which the next backward pass adds
        self.carried: list[Parameter] = []
        self._kept: dict[str, int] = {}
        #: since the last step: the devices whose passes have trained, and
        #: whether this rank had no examples of a batch
        self._trained: list[int] = []
        self._missed = False
        #: `moved` of each rank, in a step
        self.moved_by_rank: list[list[int]] | None = None
        # whether other processes, without rows, take part in this pass
        self._served = False

    @property
    def net(self) -> Any:
        return self.network.net

    @property
    def complete(self) -> bool:
        """Whether all shapes are known and all parameters have values."""
        return self._draw is None

    def __len__(self) -> int:
        return len(self.devices)

    def __getitem__(self, i: Any) -> Any:
        return self._views[i]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "replicas are tied to their devices and to one network, so they "
            f"are neither copied nor pickled; received {self!r}. Copy or "
            "pickle replicas.net, or keep Replicas.export_numpy.")

    def __repr__(self) -> str:
        return (f"Replicas of {type(self.net).__name__} on {self.devices} "
                f"({self.backend.name}, batch_norm={self.batch_norm!r}; "
                f"{self._origin})")

    def _repr_html_(self) -> str:
        return notebook.table(repr(self), ("parameter", "shape", "dtype"), [
            (p.name, p.shape or "not known yet", p.dtype)
            for p in self.all_parameters()])

    # -- values -------------------------------------------------------------

    def _complete(self, inputs: tuple[Any, ...] | None = None,
                  device: Device | None = None) -> None:
        """Draw what has no value, once shapes are known."""
        with self._completing:
            if self._draw is None:
                return
            if any(spec.shape is None for spec in self.network.specs()):
                if inputs is None:
                    return
                with _Explained([inputs]):
                    self.network.infer_shapes(
                        inputs, device or self.devices[0])
            specs = self.network.specs()
            unknown = [spec.name for spec in specs if spec.shape is None]
            if unknown:
                raise ValueError(
                    "a forward pass completes the shapes of all layers; "
                    f"received a network that calls no layer of {unknown}. "
                    "Give these layers their input size, or take them out.")
            values = self._draw()
            with self.backend.scope(recording=False):
                self.network.place(self.devices)
                for number, spec in enumerate(specs):
                    if spec.name in values:
                        x = self.network.array(number)
                        x[...] = self.backend.put(values[spec.name], x)
            for p, spec in zip(self._found or (), specs, strict=False):
                p.spec = spec
            self._draw = None
            self._agree()

    def complete_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Place the network where only shapes of parameters have missed, by
        name, if the engine can. Raises as `base.Network.give_shapes`."""
        if not self.complete:
            self.network.give_shapes(shapes)
            self._complete()

    def _agree(self) -> None:
        """All processes hold the same parameters, with the values of rank
        0. Raises `mgpu.errors.ModelMismatch`."""
        if not self.span.wide:
            return
        self.span.world.agree("the network", {"parameters": [
            [p.name, p.kind, list(p.shape or ()), p.dtype, p.grad_req]
            for p in self.all_parameters()], "layers": [
                line.strip() for line in
                _without_addresses(repr(self.net)).splitlines()]},
            "Make the same network on every rank.")
        share_values([[p.data()] for p in self.all_parameters()], self.span)

    def owned(self) -> AbstractContextManager[None]:
        """Inside the block, no other thread may use these replicas, but for
        the threads that `mgpu.parallel` starts. It does not wait.

        Raises
        ------
        RuntimeError
            Another thread uses them, or another `initialize` of the network
            has made them void.
        """
        return self._claim

    def check_valid(self) -> None:
        """Raise RuntimeError if another `initialize` has made them void."""
        if self._draw is None \
                and vars(self.network.net)[_OWNED].replicas is not self:
            raise RuntimeError(
                "these replicas are void: the network was initialized again. "
                "Use what that call returned.")

    def check_complete(self) -> None:
        """RuntimeError before the parameters have values."""
        if self._draw is not None:
            self._complete()        # a native call may have found the shapes
        if self._draw is not None:
            raise RuntimeError(
                "the parameters have no values yet: a shape is unknown until "
                "the first forward pass. Run one, replicas(shards), or pass "
                "sample= to mgpu.initialize.")

    def all_parameters(self) -> list[Parameter]:
        """`params`, then `buffers`, as the engine counts them."""
        if self._found is None:
            self._found = [
                Parameter(self, i, spec)
                for i, spec in enumerate(self.network.specs())]
        return self._found

    def params(self) -> list[Parameter]:
        """All parameters, frozen ones too, in the order of the layers."""
        return [p for p in self.all_parameters() if p.kind not in BUFFERS]

    def buffers(self) -> list[Parameter]:
        """Running statistics and other state without a gradient."""
        return [p for p in self.all_parameters() if p.kind in BUFFERS]

    def statistics(self) -> list[Parameter]:
        """The running means and variances among `buffers`."""
        return [p for p in self.all_parameters() if p.kind in STATISTICS]

    def grad_reqs(self) -> dict[str, str]:
        """`Parameter.grad_req` by name, as it is now."""
        return {p.name: p.grad_req for p in self.all_parameters()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set every gradient to zero. They are no new ones any more: what has
        been cleared is not applied, and no step is due. `set_to_none` is
        torch's word: gradients stay arrays here, of zeros."""
        self.check_valid()
        for p in self.params():
            p.zero_grad()

    def export_numpy(self, *, device: Any = None, all_devices: bool = False
                     ) -> dict[str, np.ndarray]:
        """All values by name, as NumPy copies; waits for pending work.

        Parameters
        ----------
        device : device, optional
            Take the running statistics of this device.
        all_devices : bool
            Keep every device's running statistics: with more than one device
            their arrays get a leading axis of length K. What a checkpoint of
            a run with ``batch_norm="per_device"`` needs. Not with `device`.

        Returns
        -------
        dict of str -> ndarray
            By default the network's own values.

        Raises
        ------
        ValueError
            `device` and `all_devices` together.
        RuntimeError
            A device where the network is not, no values yet, or replicas
            that another `initialize` has made void.
        """
        self.check_valid()
        if self.span.wide and self.batch_norm == "per_device" \
                and self.statistics():
            warnings.warn(
                "with batch_norm='per_device' each process exports the "
                "running statistics of its own devices; this is "
                f"{self.span.world!r}. mgpu.save_checkpoint keeps those of "
                "all.", stacklevel=2)
        if device is not None and all_devices:
            raise ValueError("one device's statistics or those of all are "
                             f"exported; received device={device!r} and "
                             "all_devices=True. Give one of them.")
        values = {}
        for p in self.all_parameters():
            every = p.list_data() if all_devices and len(self) > 1 \
                and p.kind in STATISTICS else [p.data(device)]
            found = [self.backend.to_numpy(x) for x in every]
            values[p.name] = np.stack(found) if len(found) > 1 else found[0]
        return values

    def import_numpy(self, values: Mapping[str, np.ndarray]) -> None:
        """Write values by name to the network: what `export_numpy` gave, of
        this engine or of the other one, each read once. Buffers may have a
        leading axis of length K. A parameter of several layers may come under
        each of its names. Those of kind "other" may be missing, and
        the gamma and beta of a norm layer that learns none: ones and zeros.

        Raises
        ------
        ValueError
            Missing or unknown names, other shapes, values that are not
            numbers, or finite ones that the parameter's dtype would make
            infinite; all of them are listed. Nothing has changed then.
        RuntimeError
            Replicas that another `initialize` has made void.
        """
        self.fit_numpy(values)()

    def fit_numpy(self, values: Mapping[str, np.ndarray]
                  ) -> Callable[[], None]:
        """A function that does what `import_numpy` of `values` would do now,
        and refuses nothing; raises as that does."""
        self.check_complete()
        self.check_valid()
        # Copies: a mapping may read them anew each time, or change.
        values = {name: self.backend.to_numpy(x)
                  if self.backend.is_native(x) else np.array(x)
                  for name, x in by_name("values", values).items()}
        for p in self.buffers():    # a pass may have made some larger
            p.refit()
        own = {p.name: p for p in self.all_parameters()}
        apart = _under_one_name(values, self.network.aliases()) \
            if values.keys() - own.keys() else []
        for name, p in own.items():
            if p.spec.constant is not None and name not in values:
                values[name] = np.full(p.shape or (), p.spec.constant)
        k = len(self.devices)
        wrong = [f"missing {name}" for name, p in own.items()
                 if name not in values and p.kind != "other"]
        # The other engine may count steps where this one does not.
        known = [name for name in values if name in own]
        wrong += apart + [f"unknown {name}" for name, x in values.items()
                  if name not in own and not name.endswith(_COUNTER)
                  and not self._changes_nothing(name, x)]
        for name in known:
            value, p = values[name], own[name]
            each = p.kind in BUFFERS \
                and value.shape == (k, *(p.shape or ()))
            if value.shape != p.shape and not each:
                wrong.append(f"{name}: shape {value.shape} instead of "
                             f"{p.shape}")
            elif value.dtype.name == p.dtype and value.dtype.kind in "iu":
                values[name] = value.astype("int64")    # uint16, for example
            elif value.dtype.name not in messages.DTYPES:
                wrong.append(f"{name}: dtype {value.dtype}")
            elif _overflows(value, p.dtype):
                wrong.append(f"{name}: values beyond the range of {p.dtype}")
        if wrong:
            raise ValueError(
                "the values must be those of this network; received "
                + "; ".join(wrong) + ". Use what export_numpy of a network "
                "with the same layers gave.")

        def write() -> None:
            with self.backend.scope(recording=False):
                for name in known:
                    own[name].write(values[name])
        return write

    def save(self, file: FilePath) -> None:
        """Write weights and buffers to `file` (safetensors with digests),
        whole or not at all: what `export_numpy` gives. The same file loads on
        either engine and any number of devices, and other programs read it;
        they find one array more, "sha256". With
        several processes rank 0 writes, and all call it. Waits for pending
        work. OSError as `mgpu.save_checkpoint`."""
        weight_files.save(self, file)

    def load(self, file: FilePath) -> None:
        """Read what `save` wrote, or a safetensors file of another program
        with these names, onto all devices, each rounded to its dtype. A norm's
        gamma and beta may be called weight and bias, as torch does. With
        several processes each reads the file.

        Raises
        ------
        ValueError
            As `import_numpy`; a checkpoint, or a trainer's states. Nothing
            has changed then.
        CheckpointCorrupt
            A ValueError: a damaged file, no safetensors, or dtypes that
            NumPy does not have. Nothing has changed then.
        OSError
            The file cannot be opened.
        RuntimeError
            The parameters have no values yet.
        """
        weight_files.load(self, file)

    def predict(self, X: Any, batch_size: int | None = None, *,
                device: Any = None) -> Any:
        """The outputs for all rows of `X`, as NumPy arrays, in their order.

        Runs in prediction mode, and builds no graph; training flags and
        statistics are left as they were. With several processes each gives
        its own rows, and gets their outputs.

        Parameters
        ----------
        X : array, tuple, list or dict of arrays, or iterable of batches
            What the network is called with, split over the devices: native
            or NumPy; of fewer rows than devices too. A tuple or list stands
            for several inputs; of a dict forward gets the entries that it
            names, or the dict if it is one input. Anything else that can be
            gone through gives batches of inputs, without labels (of a list of
            batches, ``iter(batches)``).
        batch_size : int, optional
            Rows of one pass over all devices, of arrays; by default all.
        device : device, optional
            Run only there. All devices use the network's own running
            statistics.

        Returns
        -------
        array, or tuple, list or dict of arrays as the network returns

        Raises
        ------
        ValueError
            No rows; arrays of other numbers of rows; an output without a row
            for each row of the input; a device that the network is not on.
        TypeError
            Neither arrays nor an iterable; an iterable and `batch_size`; an
            array of the other framework.
        """
        return predict(self, X, batch_size, device)
    def write(self, values: Mapping[int, Any]) -> None:
        """Write values, by number of the parameter or buffer; their shapes
        fit."""
        with self.owned(), self.backend.scope(recording=False):
            for number, x in values.items():
                self.all_parameters()[number].write(x)

    def _changes_nothing(self, name: str, value: np.ndarray) -> bool:
        """Whether it is a gamma of ones, or a beta of zeros, of a norm layer
        that has none here."""
        path, _, kind = name.rpartition(".")
        start = {"gamma": 1, "beta": 0}.get(kind)
        return start is not None and bool(np.all(value == start)) and any(
            layer.path == path and layer.kind.endswith("_norm")
            for layer in self.network.layers())

    # -- checking -----------------------------------------------------------

    def digest(self) -> dict[str, int] | None:
        """A checksum of each parameter, with several processes; None: there
        is one, or no values yet. Reads all of them."""
        if not (self.span.wide and self.complete):
            return None
        return {**{f"layer {path or 'of the whole network'}": zlib.crc32(
            _without_addresses(text).encode())
            for path, text in self.network.settings().items()}, **{
                p.name: zlib.crc32(np.ascontiguousarray(
                    self.backend.to_numpy(p.data())).tobytes())
                for p in self.params()}}

    def check_digests(self, digests: Sequence[dict[str, int] | None]) -> None:
        """Refuse processes whose parameters differ (`digest` of each), as
        after a write on one of them (ReplicaMismatchError)."""
        for rank, digest in enumerate(digests):
            for name, own in (digest or {}).items():
                if (digests[0] or {}).get(name) != own:
                    raise ReplicaMismatchError(
                        "all processes hold the same network; received other "
                        f"values or options of {name!r} on rank {rank} than "
                        f"on rank 0 (this is {self.span.world!r}). Change a "
                        "network on every rank alike, or load a checkpoint.")

    def check_equal(self) -> None:
        """With several processes, check that all hold the same parameters:
        call it on every rank. `Trainer` does it after each update under
        ``MGPU_DEBUG=1``. (The devices of one process have them by
        construction.) Reads everything, and waits for pending work.

        Raises
        ------
        ReplicaMismatchError
            Names the first parameter that differs.
        RuntimeError
            The parameters have no values yet.
        """
        self.check_complete()
        if self.span.wide:
            self.check_digests(self.span.world.gather("check_equal",
                                                      self.digest()))

    # -- running ------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[None]:
        """Inside the block, arithmetic of this thread and of `mgpu.parallel`
        follows the `autocast` of `initialize`: for a loss that is not
        computed by `train_batch`. Without that option, nothing."""
        return self.network.autocast(self.devices)

    def _check_native(self, i: int, inputs: tuple[Any, ...]) -> None:
        """Refuse inputs of replica `i` that hold no array of this engine. The
        device is checked by the engine's replica."""
        found: list[Any] = []

        def check(x: Any) -> None:
            found.append(x)
            if not self.backend.is_native(x):
                messages.refuse_foreign(x, self.backend.name)
                raise self._no_array(i, x)
        for x in inputs:
            map_leaves(check, x)
        if not found:
            raise self._no_array(i, *inputs[:1])

    def _check_empty(self, i: int, inputs: tuple[Any, ...]) -> None:
        """Refuse inputs of replica `i` of which only the first is empty: it
        is not known whether there are rows."""
        shapes: list[tuple[int, ...]] = []
        map_leaves(lambda x: shapes.append(tuple(x.shape)), inputs)
        rows = [shape for shape in shapes if shape and 0 not in shape]
        if rows and inputs[0] is not None:
            raise ValueError(
                "the first array of a device's inputs says whether it has "
                f"rows; received an empty one, and {rows[0]} after it, on "
                f"{self.devices[i]}. Let the array with a row for each "
                "example come first, or give a device without rows None.")

    def _no_array(self, i: int, *received: Any) -> TypeError:
        what = type(received[0]).__name__ if received else \
            "no input, which says what is on this device: let a network " \
            "without inputs take one that it does not use"
        cure = f"Use mgpu.put(x, {self.devices[i]})."
        if received and hasattr(received[0], "__dict__"):
            cure = "Give it a dict or tuple of the arrays that it holds " \
                "(split_f makes one for each device), and make the object " \
                "in the network's forward."
        return TypeError(
            f"replica {i} on {self.devices[i]} takes arrays of the "
            f"{self.backend.name} backend; received {what}. {cure}")

    def _check_recording(self) -> None:
        check_task()
        elsewhere = recording_elsewhere(self.backend)
        if elsewhere:
            raise RuntimeError(
                f"replicas of the {self.backend.name} backend run inside a "
                f"record() of theirs; received one of {elsewhere!r}. Choose "
                "the backend with mgpu.using_backend before record().")

    def _mode(self) -> AbstractContextManager[None]:
        """Inside the block replicas predict, if the user has told the network
        to."""
        if self.backend.is_training() and self.network.predicts():
            return self.backend.scope(recording=False, training=False)
        return contextlib.nullcontext()

    def run_one(self, i: int, inputs: tuple[Any, ...]) -> Any:
        """Run the network on device `i`: ``replicas[i](*inputs)``."""
        self.check_valid()
        self._check_recording()
        with self._mode():
            if self._syncs():
                raise RuntimeError(
                    "with batch_norm='sync' all replicas train together; "
                    f"received inputs for replica {i} only. Call "
                    "replicas(shards) instead of replicas[i](x).")
            row = inputs_for(inputs[0] if len(inputs) == 1 else inputs,
                             self.network.inputs)
            self._check_native(i, row)
            if is_empty(row):
                self._check_empty(i, row)
                raise ValueError(
                    f"a network runs on one row or more; replica {i} on "
                    f"{self.devices[i]} received none. Leave it out, or use "
                    "replicas(shards), which passes empty shards over.")
            self._complete(row, self.devices[i])
            self._begin([i])
            calls = {i: base.apart(row)}
            with _Explained([row]):
                return self.network.run(
                    calls, self._joining(calls).batch())[i]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        for x in (*inputs, *named.values()):
            if isinstance(x, OnDevices):
                return x.like(self(*map(shards_of, inputs), **{
                    name: shards_of(one) for name, one in named.items()}))
        if named:
            inputs = *inputs, self._by_device(named)
        with self.owned(), self._mode():
            if self._without_rows(inputs):
                if self.backend.is_recording():
                    self.pass_over()
                return NoRows([None] * len(self))
            outputs, _ = self._pass(inputs)
            return [outputs.get(i) for i in range(len(self))]

    def joined(self, shards: Sequence[Any], labels: Sequence[Any] = (),
               batch_axis: int = 0) -> tuple[Any, list[int]]:
        """``replicas(shards)``, joined on the first device: arrays with an
        entry for each example, in the order of the devices; and the number
        of examples on each device that has some. `labels`: those of each
        device, which may tell that a list has an entry for each example.
        `batch_axis`: where the inputs have the examples; the axis of the
        outputs is found.

        Raises
        ------
        ValueError
            An output without an axis for the examples.
        """
        with self.owned(), self._mode():
            outputs, joining = self._pass((shards,), labels, batch_axis)
            found = list(outputs.values())
            return (found[0] if len(found) == 1 and 0 in outputs
                    else joining.output(found)), joining.sizes

    def _by_device(self, named: Mapping[str, Any]) -> list[base.Kwargs]:
        """Columns of shards by name as one column of `Kwargs`."""
        for name, column in named.items():
            self._check_column(column, f" as {name}")
            given = leaves(column)
            if given and not any(hasattr(x, "shape") for x in given):
                raise TypeError(
                    "replicas take a list with an array for each device "
                    f"under a name; received {name}={column!r}, which "
                    "may be one option for all. Put it into each shard: "
                    f"(shard, mgpu.Kwargs({name}=...)).")
        return [base.Kwargs(zip(named, row, strict=True))
                for row in zip(*named.values(), strict=True)]

    def _pass(self, inputs: tuple[Sequence[Any], ...],
              labels: Sequence[Any] = (), batch_axis: int = 0
              ) -> tuple[dict[int, Any], Joining]:
        with self.told() if self._syncs() else contextlib.nullcontext():
            return self._run(inputs, labels, batch_axis)

    def _run(self, inputs: tuple[Sequence[Any], ...], labels: Sequence[Any],
             batch_axis: int) -> tuple[dict[int, Any], Joining]:
        rows = self._prepared(inputs)
        calls = {i: base.apart(row) for i, row in rows.items()}
        joining = self._joining(calls, labels, batch_axis)
        run = partial(self.network.run, calls, joining.batch())
        outputs: dict[int, Any] = {}
        with _Explained(list(rows.values())), probes.stage(
                "compute", "forward", self.devices,
                lambda: [outputs.get(i) for i in range(len(self))],
                list(rows)):
            outputs = self._run_synchronised(list(calls), run) \
                if self._syncs() else run()
        return outputs, joining

    def _joining(self, calls: Mapping[int, Call],
                 labels: Sequence[Any] = (), batch_axis: int = 0) -> Joining:
        """How what the devices give is joined."""
        split = self._split(batch_axis)
        sizes = [
            len(args[0]) if labels and args and isinstance(args[0], list)
            and len(args[0]) in examples_of(labels[i], batch_axis)
            else split.size(args, kwargs) or 1
            for i, (args, kwargs) in calls.items()]
        ends = list(accumulate(sizes))
        last, call = list(calls.items())[-1]

        def probe() -> tuple[Any, int]:
            return self.network.probe(split.with_one_more(call, True),
                                      last), sizes[-1] + 1
        return split.joining(
            list(zip([0, *ends], ends)),
            self.backend.handle(self.devices[0]),
            (self.backend.is_training(), self.backend.is_recording()), probe)

    def _prepared(self, inputs: tuple[Sequence[Any], ...]
                  ) -> dict[int, tuple[Any, ...]]:
        """The inputs of each device that has rows, checked; the parameters
        have values then."""
        self._check_recording()
        for column in inputs:
            self._check_column(column)
        rows = [inputs_for(row[0] if len(row) == 1 else row,
                           self.network.inputs) for row in zip(*inputs)]
        found = {i: row for i, row in enumerate(rows) if not is_empty(row)}
        for i, row in enumerate(rows):
            if i not in found:
                self._check_empty(i, row)
        if not found:
            raise ValueError("at least one shard must hold rows; received "
                             f"{len(self)} empty ones. Leave an empty batch "
                             "out.")
        for i, row in found.items():
            self._check_native(i, row)
        first = next(iter(found))
        self._complete(found[first], self.devices[first])
        self._begin(list(found))
        return found

    def _begin(self, active: Sequence[int]) -> None:
        """A pass of these devices begins."""
        if not self.backend.is_recording():
            return
        if self.backend.is_training():
            self._trained += [i for i in active if i not in self._trained]
        self._kept, carried = self.kept_sums(), self.carried
        self.carried = []
        if carried and not self.span.world.is_main:
            with self.backend.scope(recording=False):
                for p in carried:
                    if p.grad_req == "add" \
                            and self.backend.has_gradient(p.data()):
                        self.backend.grad(p.data())[...] = 0

    def kept_sums(self) -> dict[str, int]:
        """With several processes: by name a checksum of each sum that the
        passes of this step have added to, as it was before them."""
        return {p.name: zlib.crc32(np.ascontiguousarray(self.backend.to_numpy(
            self.backend.grad(p.data()))).tobytes()) for p in self.carried
            if p.grad_req == "add"} if self.carried else self._kept

    def _run_synchronised(self, active: list[int], run: Callable[[], Any]
                          ) -> Any:
        meeting, joint = Meeting(active), None
        if self.span.wide:
            self._served = not all(self._begin_pass(True))
            joint = Joint(self.backend, self.span.world.sums)
        rule = SyncBatchNorm(self.backend, meeting, joint)
        with self.network.use_batch_norm(
                rule, partial(meeting.run, self.backend)):
            return run()

    def compute_gradients(self, shards: Sequence[Any],
                          head: Callable[[int, Any], Any]) -> None:
        """``replicas(shards)``, then ``head(i, output)``, a native array, for
        each device with rows, and one backward pass; inside `record`."""
        outputs = self(shards)
        self.backend.backward(self.backend.parallel([
            partial(head, i, x) for i, x in enumerate(outputs)
            if x is not None]))

    #: the name in version 0.1
    forward_backward = compute_gradients

    def _check_column(self, column: Any, place: str = "") -> None:
        k = len(self.devices)
        if not isinstance(column, (list, tuple)):
            if not self.backend.is_native(column):
                messages.refuse_foreign(column, self.backend.name)
            raise TypeError(
                "replicas take a list with one shard per device; "
                f"received {type(column).__name__}{place}. Use "
                "replicas(split_and_load(x, replicas.devices)), or "
                "replicas[i](x) for the replica on device i.")
        if len(column) != k:
            raise ValueError(
                f"{k} replicas take {k} shards; received {len(column)}"
                f"{place}. Use mgpu.split_batch, which always makes one per "
                "device.")

    # -- other processes ------------------------------------------------------

    def _without_rows(self, inputs: Sequence[Any]) -> bool:
        """Whether other processes have the rows of this batch."""
        return self.span.wide and not self._syncs() and bool(inputs) and all(
            isinstance(column, (list, tuple)) and len(column) == len(self)
            and all(is_empty(as_inputs(shard)) for shard in column)
            for column in inputs)

    def pass_over(self) -> None:
        """No device of this process has rows of a batch that others have.
        RuntimeError where the shapes of the network are not known yet: no
        rows tell them."""
        if not self.complete:
            raise RuntimeError(
                "the first batch completes the shapes of the network on every "
                f"rank; received none of its rows on {self.span.world!r}. "
                "Pass sample= to mgpu.initialize, or begin with a batch that "
                "has a row for every device.")
        self._missed = True
        for p in self.params():     # of an earlier batch
            if p.grad_req == "write":
                self.backend.mark_used(p.data())
        if self.joint and any(self._begin_pass(False)):
            self.span.world.sums.serve()

    @property
    def joint(self) -> bool:
        """Whether training passes share batch statistics over devices."""
        return self.batch_norm == "sync" and self.span.total > 1

    def _syncs(self) -> bool:
        return self.joint and self.backend.is_training()

    @property
    def moved(self) -> list[int]:
        """The devices whose buffers are those of the passes since the last
        step."""
        return [] if self.joint and self._missed else self._trained

    def told(self) -> AbstractContextManager[None]:
        """Passes in the block meet those of other processes: these hear of an
        error in it. Buffers are as before it then, as on those that the
        error kept from their backward pass."""
        return self._told() if self.joint else contextlib.nullcontext()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        before = [(p, self.backend.to_numpy(p.data()))
                  for p in (self.buffers() if self.span.wide
                            and self.complete else ())]
        try:
            yield
        except BaseException as error:
            self.span.world.report_error(error)
            with self.backend.scope(recording=False):
                for p, value in before:
                    p.write(value)
            raise

    def _begin_pass(self, rows: bool) -> list[bool]:
        """All processes begin a pass together; which of them have rows."""
        return self.span.world.sums.begin(
            rows, self.backend.name,
            partial(self.backend.synchronize, self.devices))

    def end_pass(self) -> None:
        """The backward passes of a batch have ended on this process."""
        if self._served:
            self._served = False
            self.span.world.sums.end()

    def after_step(self) -> None:
        """What `Trainer` calls when a step is done: ranks without examples
        take the buffers of the first that had some, then ``"average"``
        replaces the statistics by their means over devices."""
        ranks, self.moved_by_rank = self.moved_by_rank, None
        self._trained, self._missed, self._kept = [], False, {}
        columns = {p: p.list_data() for p in self.buffers()} \
            if ranks is not None or self.batch_norm == "average" else {}
        if ranks is not None and any(ranks) \
                and sum(map(len, ranks)) < self.span.total:
            own = self.span.world.rank
            root = next(rank for rank, moved in enumerate(ranks) if moved)
            share_values(list(columns.values()), self.span, root,
                         ranks[root][0] if root == own else 0,
                         [i for i in range(len(self)) if i not in ranks[own]])
            for p in columns if not ranks[own] else ():
                self.network.written(p.number)
        if self.batch_norm == "average" and self.span.total > 1:
            allreduce_many(
                [columns[p] for p in self.statistics()], op="mean",
                algorithm="auto" if ranks is None else over_processes(
                    strategy_of("auto"), self.span))
            for p in self.statistics():
                self.network.written(p.number)


def replicas_of(parameters: Any) -> tuple[Replicas, frozenset[str] | None]:
    """The replicas of the network that has `parameters`, and the names of
    these; None: all that it has.

    Parameters
    ----------
    parameters : Replicas, or a list, an iterator or a dict of parameters
        `Parameter` objects or the framework's own, such as
        ``net.collect_params()`` or ``net.parameters()``.

    Raises
    ------
    TypeError
        Something else.
    ValueError
        No parameter; parameters of no network that mgpu has initialized, or
        of several; one of them twice.
    """
    if isinstance(parameters, Replicas):
        return parameters, None
    groups = isinstance(parameters, (list, tuple)) and bool(parameters) \
        and all(isinstance(x, abc.Mapping) and "params" in x
                for x in parameters)
    if groups:
        raise TypeError(
            "a Trainer has one rule for all its parameters; received groups "
            "of parameters with options of their own. Use lr_mult and "
            "wd_mult, or one Trainer for each group.")
    every = None
    if all(hasattr(parameters, name) for name in ("keys", "items", "values")):
        every = list(parameters.values())
    elif isinstance(parameters, (list, tuple, abc.Iterator)):
        every = [x[1] if isinstance(x, tuple) and len(x) == 2
                 and isinstance(x[0], str) else x for x in parameters]
    if every is None or not all(
            isinstance(x, Parameter) or given(x) is not None for x in every):
        raise TypeError(
            "a Trainer takes the Replicas that mgpu.initialize returns; "
            f"received {type(parameters).__name__}. Use Trainer(replicas, "
            "...) or Trainer(net.collect_params(), ...) of a network that "
            "mgpu.initialize has put on devices, and for lists of arrays "
            "mgpu.sgd.")
    if not every:
        raise ValueError("a Trainer trains one parameter or more; received "
                         "none. Pass replicas, or check the pattern that "
                         "selects the parameters.")
    for net in list(_initialized):
        replicas = vars(net)[_OWNED].replicas
        native = iter(replicas.network.names_of(
            [x for x in every if not isinstance(x, Parameter)]))
        names = [(x.name if x.replicas is replicas else None)
                 if isinstance(x, Parameter) else next(native) for x in every]
        if any(name is not None for name in names):
            return replicas, _only(replicas, every, names)
    raise ValueError(
        "a Trainer trains a network that mgpu.initialize has put on devices; "
        f"received {len(every)} parameters of none. Call replicas = "
        "mgpu.initialize(net, devices) first, keep what it returns, and pass "
        "that.")


def _only(replicas: Replicas, every: Sequence[Any],
          names: Sequence[str | None]) -> frozenset[str] | None:
    """`names` without those of buffers; None for all of the network's."""
    if None in names:
        raise ValueError(
            "a Trainer trains one network; received "
            f"{names.count(None)} of {len(names)} parameters that are not "
            f"{type(replicas.net).__name__}'s. Make a Trainer for each "
            "network, or initialize the network that holds them all.")
    if len(set(names)) < len(names):
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        raise ValueError(f"a Trainer takes each parameter once; received "
                         f"{twice} more than once. Name it once.")
    own = {p.name for p in replicas.params()}
    found = own.intersection(map(str, names))
    if not found:
        raise ValueError("a Trainer trains one parameter or more; received "
                         f"buffers only: {sorted(map(str, names))}.")
    return None if found == own else frozenset(found)


def _without_addresses(text: str) -> str:
    """A function of the user's is printed with its address."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _overflows(x: np.ndarray, dtype: str) -> bool:
    """Whether `dtype` makes a finite value of `x` infinite."""
    if dtype not in ("float16", "float32"):
        return False
    with np.errstate(over="ignore"):
        return bool((np.isfinite(x) & ~np.isfinite(x.astype(dtype))).any())


def _under_one_name(values: dict[str, np.ndarray],
                    aliases: Mapping[str, Sequence[str]]) -> list[str]:
    """Leave of `values` one for each parameter that several layers share.
    Returns those that have others, in words."""
    wrong = []
    for first, *others in aliases.values():
        for name in others:
            x = values.pop(name, None)
            if x is not None and values.setdefault(
                    first, x).tobytes() != x.tobytes():
                wrong.append(f"other values of {name} than of {first}, "
                             "which are one parameter")
    return wrong


class _Explained:
    """A block that calls a network with `rows`, the inputs of devices."""

    def __init__(self, rows: Sequence[tuple[Any, ...]]) -> None:
        self._rows = rows

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, TypeError):
            messages.explain_inputs(error, max(map(len, self._rows)), any(
                isinstance(row[-1], base.Kwargs) for row in self._rows if row))


def _options(network: base.Network, batch_norm: str, dtype: str | None,
             hybridize: Any, channels_last: Any, autocast: Any,
             several: bool) -> base.Options:
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
    return base.Options(bool(hybridize), bool(channels_last), autocast,
                        several and batch_norm == "sync")


def _collect(size: int) -> None:
    """Free the networks that nobody has, before one of `size` bytes.

    They are in cycles, which Python itself looks for after hundreds of small
    networks, and after as many large ones. Looking takes 0.1 to 0.4 s.
    """
    global _left
    if _initialized and (size >= 64 << 20
                         or len(_initialized) > 2 * _left + 16):
        gc.collect()
        _left = len(_initialized)
    if not _initialized:
        give_back()


def _span(backend: base.Backend, devices: Sequence[Device],
          options: dict[str, Any]) -> distributed.Span:
    """Where `devices` are among those of all processes, which have the same
    packages and `options` (`mgpu.errors.ModelMismatch`)."""
    world = distributed.current()
    if world.size > 1:
        world.agree("mgpu.initialize", {
            "versions": {"numpy": np.__version__,
                         backend.name: backend.version}, **options},
            "Use the same packages, and the same arguments, on every rank.")
    return world.span(len(devices))


def initialize(net: Any, devices: Any = None, init: Any = None,
               seed: int | None = None, sample: Any = None,
               force_reinit: bool = False,
               dtype: str | None = None, *,
               batch_norm: str = "per_device", hybridize: bool = False,
               channels_last: bool = False, autocast: str | None = None,
               ctx: Any = None) -> Replicas:
    """Put a network on a list of devices, all with the same values.

    The network's own values stay. What has none is drawn: networks of
    `mgpu.models`, and Gluon networks without ``net.initialize()``. A
    deferred ``net.initialize(X)`` is carried out by Gluon when shapes are
    known, and lazy torch layers get what torch gives them. `init` draws
    everything. ``repr(replicas)`` says what was kept and what was drawn.

    Parameters
    ----------
    net : gluon.Block or torch.nn.Module
        Trained in place: see `Replicas.net`.
    devices, ctx : device, or sequence of distinct devices
        One of them: the second is Gluon's word.
    init : Initializer, str, function of ``torch.nn.init``, "keep" or None
        Draws all weights, once, in NumPy, from (`seed`, number of the
        parameter): bit-identical on all devices and, for the same layers in
        the same order, on both backends. Biases, gammas, betas and running
        statistics follow Gluon's rules then (0, 1, 0, 0 and 1), and a
        layer's own Gluon initialiser wins. Parameters that mgpu does not
        know (a vector that scales a layer, names of the user's own) keep
        the network's values. None draws only what has no value, by Gluon's
        default, ``Uniform(0.07)``; "keep" refuses to draw. A function of
        ``torch.nn.init``, or `functools.partial` of one with options, has
        torch's formula, fans and defaults, and NumPy's random numbers, on
        either engine; it draws weights, and biases are 0 as above. To draw by
        functions of your own, or biases, call them before ``initialize``
        (``net.apply(f)``), and pass no init.
    seed : int, optional
        Of what is drawn; 0 if not given.
    sample : array, tuple or list of arrays, or Kwargs, optional
        What the network is called with, for deferred or lazy shapes; floats
        from NumPy take the dtype of the network. Without it the shapes are
        completed once, at the first forward pass.
    force_reinit : bool
        Draw everything again, running statistics included; with
        ``init="keep"``: the same values. (A second `initialize` of a network
        makes the replicas of the first one void.)
    dtype : str, optional
        Cast the network, for example to ``"float64"``.
    batch_norm : {"per_device", "average", "sync"}
        One set of running statistics per device; their plain mean after
        each step; or joint statistics of the whole batch, weighted by rows.
        Over the devices of all processes.
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
        Torch only: run the forward pass, and in `train_batch` the loss,
        under ``torch.autocast`` of that dtype. Weights, gradients, running
        statistics and the network's outputs are float32; bfloat16 rounds to
        2**-8 relative, float16 to 2**-11, and may need the `loss_scale` of
        `Trainer`.

        See docs/guide/options.md for the last three options.

    Raises
    ------
    TypeError
        Not a network of the current backend.
    RuntimeError
        "keep" and the network has no values; or `hybridize` without a
        compiler.
    ValueError
        A wrong option or device, or an option that the engine cannot give
        this network; a `seed` where nothing is drawn. Nothing has changed
        then.
    """
    backend = get_backend()
    devices = as_devices(one_given(devices=devices, ctx=ctx))
    network = backend.network(net)
    one_of("batch_norm", batch_norm, BATCH_NORM)
    if dtype is not None:
        one_of("dtype", dtype, _DTYPES)
    network.check(dtype, devices)
    options = _options(network, batch_norm, dtype, hybridize, channels_last,
                       autocast, len(devices) * distributed.current().size > 1)
    start = 0 if seed is None else integer("seed", seed, 0)
    keep = isinstance(init, str) and init == "keep"
    rule = initializers.create(
        initializers.Uniform(0.07) if init is None or keep else init)
    everything = not keep and (init is not None or force_reinit)
    missing = network.missing()
    if keep and missing:
        raise RuntimeError(
            "init='keep' needs a network that has values; received none of "
            f"{[s.name for s in network.specs() if s.name in missing]}. Load "
            "or initialize these first, or choose an initialiser, which "
            "draws all.")

    def is_drawn(spec: base.Spec) -> bool:
        return spec.kind != "other" and (
            spec.name in missing or everything and spec.kind != "unknown")

    trained = [s for s in network.specs()
               if s.kind not in BUFFERS and s.constant is None]
    drawn = sum(map(is_drawn, trained))
    if seed is not None and not (everything or missing):
        raise ValueError(
            "a seed is for values that are drawn; received "
            f"seed={seed} for a network whose values stay. Pass init= "
            "('uniform' is Gluon's default) to draw them, or no seed.")
    origin = f"{len(trained) - drawn} parameters kept, {drawn} drawn" \
        + (f" by {rule!r}" if drawn else "")
    _collect(4 * len(devices) * sum(
        math.prod(spec.shape) for spec in network.specs() if spec.shape))
    values: dict[str, np.ndarray] = {}
    # Parameters come first, so their numbers are those of the layers; last
    # what the other engine does not have.
    numbers = {spec.name: number for number, spec in enumerate(sorted(
        network.specs(), key=lambda spec: spec.constant is not None))}

    def draw(spec: base.Spec, shape: tuple[int, ...]) -> np.ndarray:
        if spec.kind == "other":
            return np.zeros(shape, spec.dtype)      # a counter
        return initializers.draw_parameter(
            "weight" if spec.kind == "unknown" else spec.kind, shape,
            dtype or spec.dtype, rule, seed=start,
            index=numbers[spec.name], name=spec.name, own=spec.init)

    def to_draw() -> Iterator[tuple[int, base.Spec]]:
        return ((number, spec) for number, spec in enumerate(network.specs())
                if is_drawn(spec)
                or everything and spec.name.endswith(_COUNTER))

    def draw_known() -> dict[str, np.ndarray]:
        for _, spec in to_draw():
            if spec.shape is not None and spec.name not in values:
                values[spec.name] = draw(spec, spec.shape)
        return values

    rule.check_names([spec.name for spec in network.specs()], [
        spec.name for _, spec in to_draw()
        if spec.kind in ("weight", "unknown") and spec.init is None])
    network.prepare(options, devices)
    # What cannot be drawn is refused before a change.
    for _, spec in to_draw():       # draw_known passes unknown shapes over
        name, own = spec.init or ("zero", {})
        try:
            initializers.create(name, **own)
        except ValueError as error:
            raise ValueError(f"parameter {spec.name!r}: {error}") from None
    draw_known()
    before = {s.dtype for s in network.specs() if "float" in s.dtype}
    if dtype is not None:
        network.cast(dtype)
    span = _span(backend, devices, {
        "batch_norm": batch_norm, "dtype": dtype, "hybridize": bool(hybridize),
        "autocast": autocast})
    replicas = Replicas(network, backend, devices, batch_norm, draw_known,
                        origin, span)
    try:
        if sample is not None:
            floats = dtype or min(before, default=None)

            def place(x: Any) -> Any:
                cast = isinstance(x, np.ndarray) and x.dtype.kind == "f"
                return backend.put(x, devices[0],
                                   dtype=floats if cast else None)
            sample = map_leaves(place, sample)
            replicas._complete(inputs_for(sample, network.inputs), devices[0])
        else:
            replicas._complete()
            if not replicas.complete and network.defer(devices, {
                    number: partial(draw, spec)
                    for number, spec in to_draw()}):
                replicas._draw = dict       # the engine draws
    except BaseException:       # a sample that does not fit
        if dtype is not None and len(before) == 1:
            network.cast(*before)
        raise
    _initialized[net] = devices
    vars(net)[_OWNED] = _Owned(replicas)
    backend.number_devices(span.first)
    return replicas
