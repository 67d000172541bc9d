"""A network on a list of devices."""
import contextlib
import re
import threading
import weakref
import zlib
from collections import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu import distributed
from mgpu.backends import Backend, recording_elsewhere
from mgpu.backends.containers import Call
from mgpu.backends.device import Device
from mgpu.backends.network import Kwargs, Network, apart
from mgpu.backends.scope import check_task
from mgpu.checkpoints import weight_files
from mgpu.collectives import allreduce_many
from mgpu.collectives.over_processes import over_processes, share_values
from mgpu.collectives.strategies import strategy_of
from mgpu.compat import gluon, pytorch
from mgpu.data.examples import BatchSplit, Joining
from mgpu.data.inputs import inputs_for
from mgpu.data.nested import (NoRows, OnDevices, examples_of, is_empty,
                              shards_of)
from mgpu.errors import ReplicaMismatchError
from mgpu.nn.batch_norm import Joint, DeviceThreads, SyncBatchNorm
from mgpu.training.parameters import BUFFERS, STATISTICS, Parameter
from mgpu.training.prediction import predict
from mgpu.training.replicas import shards, values
from mgpu.utils import notebook, probes
from mgpu.utils.arguments import Hints
from mgpu.utils.files import FilePath

# Stands for the thread that a call comes from, also in the threads that
# backends start for it.
_thread: ContextVar[Any] = ContextVar("mgpu_thread", default=None)

#: names of networks that `Replicas` do not support
_HINTS = {
    **dict.fromkeys(("cast", "half", "float", "double", "bfloat16", "type",
                     "to", "cuda", "cpu", "initialize", "reset_ctx"),
                    "mgpu.initialize(net, devices, dtype=...)"),
    "forward": "replicas(shards), or replicas[i](x)"}


class _OfNetwork(Hints):
    if not TYPE_CHECKING:
        def __getattr__(self, name):
            use = f"Replicas.{name}" if hasattr(Replicas, name) \
                else _HINTS.get(name, f"replicas.net.{name}")
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}. "
                f"Use {use}.", name=name, obj=self)


class Exclusive:
    """Exclusive use of replicas by one thread."""

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
                    "only one thread at a time may use the replicas of a "
                    "network; received a call while another thread uses "
                    "them. Give each thread a separate network.")
            self._replicas.check_valid()
            self._owner.append(me)

    def __exit__(self, *_: Any) -> None:
        self._owner.pop()


class ReplicaView(_OfNetwork):
    """A network on one device of a `Replicas`: ``replicas[i](x)``.

    Attributes
    ----------
    device : Device
    """

    def __init__(self, replicas: "Replicas", index: int) -> None:
        self._replicas, self._index = replicas, index
        self.device = replicas.devices[index]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if named:
            inputs = *inputs, Kwargs(named)
        return self._replicas.run_one(self._index, inputs)

    def __repr__(self) -> str:
        return f"replica {self._index} on {self.device}"

    def arrays(self) -> list[Any]:
        """The native parameters, then buffers, of this device."""
        return [p.list_data()[self._index]
                for p in self._replicas.all_parameters()]


class Replicas(_OfNetwork, abc.Sequence):
    """A network on a list of devices. Made by `initialize`.

    The network itself holds the only parameters. ``replicas(shards)`` takes a
    list with one shard for each device, runs the network on all devices in
    parallel, and returns a list; ``replicas[i](x)`` runs it on device i. The
    result for an empty shard or None is None. The other devices run copies,
    which each pass overwrites from the network; the gradients of all devices
    are summed in the network's own parameters.

    Layers train inside `mgpu.record`. Outside it they are in prediction mode
    without recording, whatever their own flags are. Exception: in a torch
    network in eval mode, layers that were set back to training mode, such as
    dropout, train there. Such a network in eval mode predicts in `record`
    too, under ``torch.no_grad()``; with gradients it raises (use
    ``mgpu.record(train_mode=False)``).

    A network with several inputs takes ``replicas[i](a, b)``, and either
    ``replicas(a_shards, b_shards)`` or shards that are tuples or lists of
    arrays. A named tuple of arrays is one input, so is a tuple in a tuple,
    ``((a, b),)``, and so is a dict, unless forward takes only keyword
    arguments. Pass keyword arguments as ``replicas[i](x, mask=m)``,
    ``replicas(shards, mask=mask_shards)``, or as `mgpu.Kwargs` at the end of
    a shard.

    Attributes
    ----------
    devices : list of Device
    net : gluon.Block or torch.nn.Module
        The user's own network, on the first device. Training changes it in
        place. Methods other than forward run on it.
    backend : Backend
        The backend in use when the network was initialized.
    batch_norm : str
    network : mgpu.backends.network.Network
        The backend's view of `net`: its layers, for example.
    """

    _internal = (
        "after_step", "all_parameters", "carried", "check_complete",
        "check_digests", "check_valid", "complete", "complete_values",
        "accumulated", "compute_gradients", "count", "digest",
        "discard_gradients", "end_pass", "exclusive", "fit_numpy",
        "grad_reqs", "index", "joined", "joint", "moved", "moved_by_rank",
        "network", "reporting", "run_one", "skip_pass", "span")

    def __init__(self, network: Network, backend: Backend,
                 devices: list[Device], batch_norm: str,
                 draw: Callable[[], Mapping[str, np.ndarray]], origin: str,
                 span: distributed.Span) -> None:
        self.network, self.backend = network, backend
        self.devices, self.batch_norm = devices, batch_norm
        #: the position of these devices among those of all ranks
        self.span = span
        #: returns the initial values; None once they are written
        self._draw: Callable[[], Mapping[str, np.ndarray]] | None = draw
        self._origin = origin       # description of the values
        self._completing = threading.Lock()
        self._views = [ReplicaView(self, i) for i in range(len(devices))]
        self._entries = [Parameter(self, i, spec)
                            for i, spec in enumerate(network.specs())]
        self._exclusive = Exclusive(self)           # see `exclusive`
        #: by batch axis
        self._split = cache(lambda batch_axis: BatchSplit(
            network.inputs(), batch_axis, (), backend))
        #: parameters whose gradients hold the sum over all ranks, to which
        #: the next backward pass adds
        self.carried: list[Parameter] = []
        self._accumulated: dict[str, int] = {}
        #: since the last step: the devices with training passes, and whether
        #: this rank had no examples of a batch
        self._trained: list[int] = []
        self._missed = False
        #: `moved` of each rank, in a step
        self.moved_by_rank: list[list[int]] | None = None
        # whether ranks without examples take part in this pass
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

    def __repr__(self) -> str:
        return (f"Replicas of {type(self.net).__name__} on {self.devices} "
                f"({self.backend.name}, batch_norm={self.batch_norm!r}; "
                f"{self._origin})")

    def _repr_html_(self) -> str:
        return notebook.table(repr(self), ("parameter", "shape", "dtype"), [
            (p.name, p.shape or "not known yet", p.dtype)
            for p in self.all_parameters()])

    # -- values -------------------------------------------------------------

    def complete_values(self, inputs: tuple[Any, ...] | None = None,
                        device: Device | None = None) -> None:
        """Initialize missing values when shapes are known; a pass of `inputs`
        on `device` infers unknown shapes."""
        with self._completing:
            if self._draw is None:
                return
            if any(spec.shape is None for spec in self.network.specs()):
                if inputs is None:
                    return
                self.network.infer_shapes(inputs, device or self.devices[0])
            specs = self.network.specs()
            unknown = [spec.name for spec in specs if spec.shape is None]
            if unknown:
                raise ValueError(
                    "the first forward pass must call all layers to complete "
                    f"their shapes; received a network that does not call "
                    f"{unknown}. Set their input sizes, or remove them.")
            drawn = self._draw()
            with self.backend.scope(recording=False):
                self.network.place(self.devices)
                for p, spec in zip(self._entries, specs, strict=True):
                    p.spec = spec
                    if p.name in drawn:
                        p.write(drawn[p.name])
            self._draw = None
            self._agree()

    def _agree(self) -> None:
        """Check that all ranks have the same parameters, and broadcast the
        values of rank 0. Raises `mgpu.errors.ModelMismatch`."""
        if not self.span.wide:
            return
        self.span.world.agree("the network", {"parameters": [
            [p.name, p.kind, list(p.shape or ()), p.dtype, p.grad_req]
            for p in self.all_parameters()], "layers": [
                line.strip() for line in
                _without_addresses(repr(self.net)).splitlines()]},
            "Make the same network on every rank.")
        share_values([[p.data()] for p in self.all_parameters()], self.span)

    def exclusive(self) -> AbstractContextManager[None]:
        """Acquire exclusive use of the replicas in a block: only this thread
        and those of `mgpu.parallel` in it may use them. Does not wait.

        Raises
        ------
        RuntimeError
            Another thread holds it, or another `initialize` of the network
            has invalidated the replicas.
        """
        return self._exclusive

    def check_valid(self) -> None:
        """Raise RuntimeError if another `initialize` has invalidated them."""
        if self._draw is None and replicas_on(self.net) is not self:
            raise RuntimeError(
                "these replicas are invalid: the network was initialized "
                "again. Use the result of the last mgpu.initialize.")

    def check_complete(self) -> None:
        """Raise RuntimeError if the parameters have no values yet."""
        if self._draw is not None:
            self.complete_values()  # a native call may have found the shapes
        if self._draw is not None:
            raise RuntimeError(
                "the parameters have no values yet: a shape is unknown until "
                "the first forward pass. Run replicas(shards), or pass "
                "sample= to mgpu.initialize.")

    def all_parameters(self) -> list[Parameter]:
        """`params`, then `buffers`, in the backend's order."""
        return self._entries

    def params(self) -> list[Parameter]:
        """Return all parameters, frozen ones included, in layer order."""
        return [p for p in self._entries if p.kind not in BUFFERS]

    def buffers(self) -> list[Parameter]:
        """Return running statistics and other state without a gradient."""
        return [p for p in self._entries if p.kind in BUFFERS]

    def statistics(self) -> list[Parameter]:
        """Return the running means and variances among `buffers`."""
        return [p for p in self._entries if p.kind in STATISTICS]

    def grad_reqs(self) -> dict[str, str]:
        """Return the current `Parameter.grad_req` by name."""
        return {p.name: p.grad_req for p in self._entries}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero, and mark them as used: the next step
        does not apply them. `set_to_none` is accepted for torch and has no
        effect: gradients remain arrays."""
        self.check_valid()
        for p in self.params():
            p.zero_grad()

    export_numpy = values.export_numpy
    import_numpy = values.import_numpy
    fit_numpy = values.fit_numpy

    def save(self, file: FilePath) -> None:
        """Write parameters and buffers to `file` (safetensors with digests),
        atomically: the values of `export_numpy`. The file loads on either
        backend and any number of devices, and in other programs, where it has
        one more array, "sha256". In distributed training rank 0 writes: call
        it on every rank. Waits for pending work. Raises OSError as
        `mgpu.save_checkpoint` does, and ValueError for an ending of another
        format, such as ``.pt``: use ``.safetensors``, or `save_parameters`
        for Gluon's ``.params``."""
        weight_files.save(self, file)

    def load(self, file: FilePath) -> None:
        """Load a file of `save`, or another safetensors file with these
        names, onto all devices, each value cast to the parameter's dtype.
        torch's names weight and bias are accepted for a norm's gamma and
        beta. In distributed training each rank reads the file.

        Raises
        ------
        ValueError
            As `import_numpy`; the file is a checkpoint, or holds a trainer's
            states. Nothing has changed.
        CheckpointCorrupt
            A ValueError: the file is corrupt, not safetensors, or has dtypes
            that NumPy does not have. Nothing has changed.
        OSError
            The file cannot be opened.
        RuntimeError
            The parameters have no values yet.
        """
        weight_files.load(self, file)

    # -- names of Gluon's Block and torch's Module ----------------------------

    module = net
    collect_params = gluon.collect_params
    save_parameters = gluon.save_parameters
    load_parameters = gluon.load_parameters
    hybridize = gluon.hybridize
    state_dict = pytorch.state_dict
    load_state_dict = pytorch.load_state_dict
    named_parameters = pytorch.named_parameters
    parameters = pytorch.parameters
    named_buffers = pytorch.named_buffers
    train = pytorch.train
    eval = pytorch.eval_

    # -- checking -----------------------------------------------------------

    def digest(self) -> dict[str, int] | None:
        """A checksum of each parameter in distributed training; None for a
        single process, or without values. Reads all parameters."""
        if not (self.span.wide and self.complete):
            return None
        return {**{f"layer {path or 'of the whole network'}": zlib.crc32(
            _without_addresses(text).encode())
            for path, text in self.network.settings().items()}, **{
                p.name: self._checksum(p.data()) for p in self.params()}}

    def _checksum(self, x: Any) -> int:
        return zlib.crc32(
            np.ascontiguousarray(self.backend.to_numpy(x)).tobytes())

    def check_digests(self, digests: Sequence[dict[str, int] | None]) -> None:
        """Raise ReplicaMismatchError if the parameters of ranks differ
        (`digest` of each), for example after a write on one of them."""
        for rank, digest in enumerate(digests):
            for name, own in (digest or {}).items():
                if (digests[0] or {}).get(name) != own:
                    raise ReplicaMismatchError(
                        "all ranks must hold the same network; received other "
                        f"values or options of {name!r} on rank {rank} than "
                        f"on rank 0 (this is {self.span.world!r}). Change the "
                        "network alike on every rank, or load a checkpoint.")

    def check_equal(self) -> None:
        """Check that all ranks hold the same parameters: call it on every
        rank. `Trainer` calls it after each update under ``MGPU_DEBUG=1``.
        (The devices of one process hold them by construction.) Reads all
        parameters, and waits for pending work.

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
        """Apply the `autocast` of `initialize` in a block, for this thread
        and `mgpu.parallel`: for a loss that is not computed by `train_batch`.
        Without that option it has no effect."""
        return self.network.autocast(self.devices)

    def predict(self, X: Any, batch_size: int | None = None, *,
                device: Any = None) -> Any:
        """Compute the outputs for all examples of `X`, as NumPy arrays.

        Runs in prediction mode without recording; training modes and running
        statistics are unchanged. The order of the examples is kept. In
        distributed training each rank passes its own examples, and gets their
        outputs.

        Parameters
        ----------
        X : array, tuple, list or dict of arrays, or iterable of batches
            Inputs of the network, native or NumPy, split over the devices;
            there may be fewer examples than devices. A tuple or list stands
            for several inputs. Of a dict forward gets the entries that it
            names, or the dict if it is one input. Another iterable is a
            loader (of a list of batches: ``iter(batches)``). Its batches are
            inputs, or (inputs, labels), whose labels are not used. Two arrays
            are two inputs if forward needs two.
        batch_size : int, optional
            Examples of one pass over all devices, for arrays. Default: all.
        device : device, optional
            The only device to use. All devices use the network's own running
            statistics.

        Returns
        -------
        array, or tuple, list or dict of arrays as the network returns

        Raises
        ------
        ValueError
            No examples; arrays of different lengths; an output without a
            batch dimension; the network is not on `device`; a
            batch of two arrays if the second input of forward is optional.
        TypeError
            `X` is neither arrays nor an iterable; an iterable and
            `batch_size`; an array of the other framework.
        """
        return predict(self, X, batch_size, device)

    def _mode(self) -> AbstractContextManager[None]:
        """A block in prediction mode, if the user has set the network to
        it."""
        if self.backend.is_training() and self.network.predicts():
            return self.backend.scope(recording=False, training=False)
        return contextlib.nullcontext()

    def run_one(self, i: int, inputs: tuple[Any, ...]) -> Any:
        """Run the network on device `i`: ``replicas[i](*inputs)``."""
        self.check_valid()
        with self._mode():
            if self._syncs():
                raise RuntimeError(
                    "with batch_norm='sync' all replicas must run together; "
                    f"received inputs for replica {i} only. Call "
                    "replicas(shards) instead of replicas[i](x).")
            return self._run_rows(self._rows({i: inputs}))[0][i]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        for x in (*inputs, *named.values()):
            if isinstance(x, OnDevices):
                return x.like(self(*map(shards_of, inputs), **{
                    name: shards_of(one) for name, one in named.items()}))
        if named:
            inputs = *inputs, shards.by_device(named, len(self), self.backend)
        with self.exclusive(), self._mode():
            if self.span.wide and not self._syncs() \
                    and shards.are_empty(inputs, len(self)):
                if self.backend.is_recording():
                    self.skip_pass()
                return NoRows([None] * len(self))
            outputs, _ = self._run(inputs)
            return [outputs.get(i) for i in range(len(self))]

    def joined(self, shards: Sequence[Any], labels: Sequence[Any] = (),
               batch_axis: int = 0) -> tuple[Any, list[int]]:
        """Run ``replicas(shards)`` and concatenate the outputs on the first
        device. Returns them in the order of the devices, and the number of
        examples on each device that has some. `labels`: the labels of each
        device; their lengths show whether a list has one item per example.
        `batch_axis`: the batch dimension of the inputs; that of the outputs
        is detected.

        Raises
        ------
        ValueError
            An output without a batch dimension.
        """
        with self.exclusive(), self._mode():
            outputs, joining = self._run((shards,), labels, batch_axis)
            found = list(outputs.values())
            return (found[0] if len(found) == 1 and 0 in outputs
                    else joining.output(found)), joining.sizes

    def _run(self, inputs: tuple[Sequence[Any], ...],
             labels: Sequence[Any] = (), batch_axis: int = 0
             ) -> tuple[dict[int, Any], Joining]:
        outputs: dict[int, Any] = {}
        with self.reporting() if self._syncs() else contextlib.nullcontext():
            for column in inputs:
                shards.check_column(column, len(self), self.backend)
            rows = self._rows(dict(enumerate(zip(*inputs))))
            with probes.stage(
                    "compute", "forward", self.devices,
                    lambda: [outputs.get(i) for i in range(len(self))],
                    list(rows)):
                outputs, joining = self._run_rows(rows, labels, batch_axis)
        return outputs, joining

    def _rows(self, given: Mapping[int, tuple[Any, ...]]
              ) -> dict[int, tuple[Any, ...]]:
        """The checked inputs of each device with examples."""
        check_task()
        elsewhere = recording_elsewhere(self.backend)
        if elsewhere:
            raise RuntimeError(
                f"replicas of the {self.backend.name} backend require its "
                f"own record(); received one of {elsewhere!r}. Select "
                "the backend with mgpu.using_backend before record().")
        rows = {}
        for i, row in given.items():
            row = inputs_for(row[0] if len(row) == 1 else row,
                             self.network.inputs)
            if is_empty(row):
                shards.check_empty(row, self.devices[i])
            else:
                shards.check_native(row, i, self.devices[i], self.backend)
                rows[i] = row
        if not rows:
            raise ValueError(
                "a network needs at least one example; received none on "
                f"{self.devices}. Skip empty batches.")
        return rows

    def _run_rows(self, rows: Mapping[int, tuple[Any, ...]],
                  labels: Sequence[Any] = (), batch_axis: int = 0
                  ) -> tuple[dict[int, Any], Joining]:
        first = next(iter(rows))
        self.complete_values(rows[first], self.devices[first])
        self._begin(list(rows))
        calls = {i: apart(row) for i, row in rows.items()}
        joining = self._joining(calls, labels, batch_axis)
        run = partial(self.network.run, calls, joining.batch())
        return (self._run_synchronized(list(calls), run) if self._syncs()
                else run()), joining

    def _joining(self, calls: Mapping[int, Call],
                 labels: Sequence[Any] = (), batch_axis: int = 0) -> Joining:
        """How the outputs of the devices are concatenated."""
        split = self._split(batch_axis)
        sizes = [
            len(args[0]) if labels and args and isinstance(args[0], list)
            and len(args[0]) in examples_of(labels[i], batch_axis)
            else split.size(args, kwargs) or 1
            for i, (args, kwargs) in calls.items()]
        ends = list(accumulate(sizes))
        last, call = list(calls.items())[-1]

        def probe() -> tuple[Any, int]:
            more = split.with_one_more(
                call, self.backend.handle(self.devices[last]))
            return self.network.probe(more, last), sizes[-1] + 1
        return Joining(
            split, list(zip([0, *ends], ends)),
            self.backend.handle(self.devices[0]),
            lambda: (self.backend.is_training(), self.backend.is_recording(),
                     split.form(*call)), probe)

    def _begin(self, active: Sequence[int]) -> None:
        """Begin a pass on these devices."""
        if not self.backend.is_recording():
            return
        if self.backend.is_training():
            self._trained += [i for i in active if i not in self._trained]
        self._accumulated, carried = self.accumulated(), self.carried
        self.carried = []
        if carried and not self.span.world.is_main:
            with self.backend.scope(recording=False):
                for p in carried:
                    if p.grad_req == "add" \
                            and self.backend.has_gradient(p.data()):
                        self.backend.grad(p.data())[...] = 0

    def accumulated(self) -> dict[str, int]:
        """In distributed training the checksums by name of gradients to which
        passes of this step have added, before these passes."""
        return {p.name: self._checksum(self.backend.grad(p.data()))
                for p in self.carried if p.grad_req == "add"} \
            if self.carried else self._accumulated

    def _run_synchronized(self, active: list[int], run: Callable[[], Any]
                          ) -> Any:
        threads, joint = DeviceThreads(active), None
        if self.span.wide:
            self._served = not all(self._begin_pass(True))
            joint = Joint(self.backend, self.span.world.sums)
        rule = SyncBatchNorm(self.backend, threads, joint)
        with self.network.use_batch_norm(
                rule, partial(threads.run, self.backend)):
            return run()

    def compute_gradients(self, shards: Sequence[Any],
                          loss_on_device: Callable[[int, Any], Any]) -> None:
        """Run ``replicas(shards)``, then ``loss_on_device(i, output)``, a
        native array, for each device with examples, and one backward pass;
        inside `record`."""
        outputs = self(shards)
        self.backend.backward(self.backend.parallel([
            partial(loss_on_device, i, x) for i, x in enumerate(outputs)
            if x is not None]))

    # -- other processes ------------------------------------------------------

    def skip_pass(self) -> None:
        """Skip a batch of which this rank has no examples, and others have.
        Raises RuntimeError if the shapes of the network are unknown: only
        examples can complete them."""
        if not self.complete:
            raise RuntimeError(
                "the first batch completes the shapes of the network on every "
                f"rank; received none of its examples on {self.span.world!r}. "
                "Pass sample= to mgpu.initialize, or begin with a batch that "
                "has an example for every device.")
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
        """The devices whose buffers passes since the last step have
        updated."""
        return [] if self.joint and self._missed else self._trained

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error in the block to the other ranks, whose passes
        synchronize with those of the block. Buffers are then restored, as on
        the ranks whose backward pass the error prevented."""
        if not (self.joint and self.span.wide):
            yield
            return
        with self.backend.scope(recording=False):
            before = [(p, self.backend.put(p.data(), p.data()))
                      for p in self.buffers() if self.complete]
        try:
            yield
        except BaseException as error:
            self.span.world.report_error(error)
            with self.backend.scope(recording=False):
                for p, value in before:
                    p.write(value)
            raise

    def _begin_pass(self, rows: bool) -> list[bool]:
        """Begin a pass on all ranks. Returns which of them have examples."""
        return self.span.world.sums.begin(
            rows, self.backend.name,
            partial(self.backend.synchronize, self.devices))

    def discard_gradients(self) -> None:
        """Mark the gradients of earlier backward passes as used, so that no
        step applies them, except those with ``grad_req="add"``."""
        for p in self.params():
            x = self.network.array(p.number)
            if self.backend.is_fresh(x) and p.grad_req == "write":
                self.backend.mark_used(x)

    def end_pass(self) -> None:
        """Note that the backward passes of a batch have ended on this rank."""
        if self._served:
            self._served = False
            self.span.world.sums.end()

    def after_step(self) -> None:
        """Finish a step for `Trainer`: ranks without examples take the
        buffers of the first rank with examples, then ``"average"`` replaces
        the statistics by their means over devices."""
        ranks, self.moved_by_rank = self.moved_by_rank, None
        self._trained, self._missed, self._accumulated = [], False, {}
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


def _without_addresses(text: str) -> str:
    """Remove addresses, as of a user-defined function, from a repr."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


#: the initialized networks, in order
initialized: "weakref.WeakKeyDictionary[Any, None]" = \
    weakref.WeakKeyDictionary()
#: the attribute of a network for its `Replicas`
_ATTRIBUTE = "_mgpu_replicas"


class _Reference:
    """A reference to a network's `Replicas`; a copied network has none."""

    def __init__(self, replicas: Replicas | None = None) -> None:
        self.replicas = replicas

    def __reduce__(self) -> Any:
        return dict, ()     # a pickle needs no mgpu

    def __deepcopy__(self, memo: Any) -> "_Reference":
        return _Reference()


def replicas_on(net: Any) -> Replicas:
    """The replicas of one of the `initialized` networks."""
    found: Replicas = vars(net)[_ATTRIBUTE].replicas
    return found


def keep(replicas: Replicas) -> None:
    """Attach `replicas` to their network; earlier ones become invalid."""
    vars(replicas.net)[_ATTRIBUTE] = _Reference(replicas)
    initialized[replicas.net] = None
