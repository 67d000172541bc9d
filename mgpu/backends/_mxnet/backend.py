"""The MXNet backend."""
import contextlib
import ctypes
import functools
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.backends import messages
from mgpu.backends._mxnet import strict
from mgpu.backends._mxnet.block_tree import is_recorded
from mgpu.backends._mxnet.data_parallel import Arrays, DataParallel
from mgpu.backends._mxnet.framework import (findings, mx, native_context,
                                            one_thread)
from mgpu.backends._mxnet.limits import check_layers
from mgpu.backends._mxnet.network import MXNetNetwork
from mgpu.backends._mxnet.ops import MXNetOps, dtype_of, is_np
from mgpu.backends._mxnet.states import flush_all
from mgpu.backends._workers import Workers, inside_worker, run_in_turn
from mgpu.backends.base import Backend
from mgpu.backends.ledger import Ledger
from mgpu.backends.scope import Scope
from mgpu.backends.types import ContextManager
from mgpu.gluon_io.graph import (SOFTMAX, Node, check_fit, constants,
                                 dense_arrays, entries, fixed_gammas,
                                 load_graph, symbol_of_dtype)
from mgpu.utils import environment
from mgpu.utils.arguments import integer
from mgpu.utils.files import path_of
from mgpu.utils.signals import uninterrupted

autograd, npx = mx.autograd, mx.npx

_here = threading.local()       # .drawers: of the seed of its streams


@contextlib.contextmanager
def _numpy_mode(array: bool, shape: bool) -> Iterator[None]:
    """Context manager that sets MXNet's NumPy array and shape flags of this
    thread."""
    modes = [mx.util.np_shape(shape), mx.util.np_array(array)]
    # The array flag requires the shape flag.
    with contextlib.ExitStack() as stack:
        for mode in modes if array else reversed(modes):
            stack.enter_context(mode)
        yield


def _read_flags() -> tuple[bool, bool]:
    return autograd.is_recording(), autograd.is_training()


def _write_flags(recording: bool | None, training: bool | None) -> None:
    if recording is not None:
        autograd.set_recording(recording)
    if training is not None:
        autograd.set_training(training)


def _address(array: Any) -> int:
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(
        array.handle, ctypes.byref(pointer)))
    return pointer.value or 0


#: a C function without effects, which does not need the GIL
_NOTHING = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p)
#: MXNet's FnProperty::kAsync: run by the queueing thread if no dependency is
#: pending
_AT_ONCE = ctypes.c_int(4)


def _flush(arrays: Sequence[Any]) -> None:
    """Block until the operations queued on `arrays` are done.

    Not for all work, because an error of another thread's work would be
    raised here. Equivalent to MXNDArrayWaitToWrite of each array, at half of
    the cost: queue an operation that writes to the array without effect, and
    wait for it.
    """
    for x in arrays:
        mx.base.check_call(mx.base._LIB.MXEnginePushSyncND(
            _NOTHING, None, None, native_context(1, 0), None, 0,
            (ctypes.c_void_p * 1)(x.handle.value), 1,
            ctypes.byref(_AT_ONCE), 0, b"mgpu: flush"))
    # Twice: while it runs, a pass that reads the weight of a convolution may
    # queue its conversion to another memory layout.
    for x in (*arrays, *arrays):
        x.wait_to_read()


#: the dtype of an array; four times as fast as the property of mx.np
_dtype = mx.nd.NDArray.dtype.fget


@functools.lru_cache(maxsize=1 << 16)
def _host_view(address: int, size: int, dtype: Any) -> np.ndarray:
    """An array over the memory, which it does not keep alive."""
    raw: Any = (ctypes.c_char * (size * np.dtype(dtype).itemsize)
           ).from_address(address)
    return np.frombuffer(raw, dtype, size)


def _fill(array: Any, x: np.ndarray) -> None:
    """Copy host data into a new array on a CPU context, synchronously.

    MXNet would queue the copy on the context and wait for all work queued
    there. A new array does not need the queue.
    """
    if x.nbytes:
        ctypes.memmove(_address(array), x.ctypes.data, x.nbytes)


_LOSSES = {*SOFTMAX, "LinearRegressionOutput", "MAERegressionOutput",
           "LogisticRegressionOutput"}


def _prediction(output: Any, node: Node, softmax: bool) -> Any:
    """The prediction of an output that is a loss with a label."""
    if node.op not in _LOSSES:
        return output
    x, a = output.get_children()[0], node.attributes
    if node.op == "LogisticRegressionOutput":
        return mx.sym.sigmoid(x)
    if node.op not in SOFTMAX or not softmax:
        return x
    if a["multi_output"] or a["preserve_shape"]:
        return mx.sym.softmax(x, axis=1 if a["multi_output"] else -1)
    return mx.sym.reshape_like(mx.sym.softmax(mx.sym.Flatten(x)), x)


class _Through(mx.autograd.Function):
    """See `mgpu.backends.base.Backend.through`.

    In backward passes MXNet calls such functions in threads, as soon as their
    inputs are ready. Their order is fixed because all write to one array, the
    gradient of their second input: writes to an array take place in the order
    in which the backward pass queues them.
    """

    def __init__(self, backend: Backend, result: Any, back: Any) -> None:
        super().__init__()
        self._backend, self._result, self._back = backend, result, back

    def forward(self, x: Any, turn: Any) -> Any:
        result, self._result = self._result, None
        return result

    def backward(self, gradient: Any) -> Any:
        found = self._back(self._backend.to_numpy(gradient))
        return self._backend.put(found, gradient), mx.nd.zeros(
            1, gradient.ctx)


class MXNetBackend(Backend):
    """MXNet as a backend of mgpu."""

    name = "mxnet"
    semantics = "gluon"
    finds_failed = "MXNET_ENGINE_TYPE=NaiveEngine"
    version = mx.__version__
    batch_arrays = Arrays

    def __init__(self) -> None:
        self.ops = MXNetOps()
        self._seed, self._drawers = 0, itertools.count(2)
        self._first = 0
        self._turns: dict[Any, Any] = {}        # see `_Through`
        # MXNet runs contexts in parallel, for any thread that queues the
        # work; threads are for thunks that wait for each other.
        self._workers = Workers("mgpu-mxnet", lambda: None, self.carry)

    # -- devices and arrays -------------------------------------------------

    def num_gpus(self) -> int:
        try:
            return mx.context.num_gpus()
        except mx.MXNetError:   # a CUDA build without a driver
            return 0

    def handle(self, device: Any) -> Any:
        """The MXNet context of a `Device`."""
        if device.kind == "cpu":
            one_thread(device.index)
        return mx.Context(device.kind, device.index)

    def family_of(self, x: Any) -> ContextManager:
        """Context manager that sets the thread's NumPy mode, which selects
        the array family of layers, to that of the array `x`."""
        if not isinstance(x, mx.nd.NDArray) or is_np(x) == npx.is_np_array():
            return contextlib.nullcontext()
        return _numpy_mode(is_np(x), is_np(x))

    def put(self, x: Any, where: Any, *, dtype: str | None = None) -> Any:
        context = where.ctx if isinstance(where, mx.nd.NDArray) \
            else self.handle(where)
        want = None if dtype is None else dtype_of(dtype)
        if isinstance(x, mx.nd.NDArray):
            if 0 in x.shape:        # legacy operators reject such arrays
                copy = mx.nd.empty(x.shape, ctx=context, dtype=x.dtype)
                copy = copy.as_np_ndarray() if is_np(x) else copy
            else:
                if autograd.is_recording():
                    # The gradient of a copy overwrites even with
                    # grad_req="add"; that of a view accumulates.
                    x = x.reshape(x.shape)
                copy = x.copyto(context)
            return copy if want is None else copy.astype(want)
        messages.refuse_foreign(x, self.name)
        x = messages.host_array(x)
        x = x.astype(dtype_of(want or x.dtype), copy=False)
        array = mx.nd.empty(x.shape, ctx=context, dtype=x.dtype)
        if context.device_type == "cpu":
            _fill(array, x)
            strict.filled(array)
        else:
            array[:] = x
        new = is_np(where) if isinstance(where, mx.nd.NDArray) \
            else npx.is_np_array()
        return array.as_np_ndarray() if new else array

    def to_numpy(self, x: Any) -> np.ndarray:
        if not isinstance(x, mx.nd.NDArray):
            raise messages.not_native(x, self.name)
        return x.asnumpy()

    def is_native(self, x: Any) -> bool:
        return isinstance(x, mx.nd.NDArray)

    def synchronize(self, devices: Sequence[Any]) -> None:
        # MXNet can only wait for an array or for all work.
        mx.nd.waitall()

    # -- host memory --------------------------------------------------------

    def host_views(self, arrays: Sequence[Any], *, to_read: bool = False
                   ) -> list[np.ndarray] | None:
        if strict.on() and not to_read:
            return None
        if any(x.ctx.device_type != "cpu" or x.stype != "default"
               for x in arrays):
            return None
        _flush(arrays)
        return [_host_view(_address(x), x.size, _dtype(x)) for x in arrays]

    def run_on_host_views(self, thunks, written) -> None:
        uninterrupted(lambda: self._workers.run(thunks, carry=False))

    def library_allreduce(self, arrays: Sequence[Any], op: str) -> None:
        if op != "sum":
            raise ValueError("MXNet's kvstore supports sums only; received "
                             f"op={op!r}. Use another algorithm.")
        store = mx.kvstore.create("device" if any(
            x.ctx.device_type == "gpu" for x in arrays) else "local")
        # The store takes legacy arrays; these are views of that family.
        legacy = [x.as_nd_ndarray() for x in arrays]
        store.init(0, legacy[0])
        store.pushpull(0, legacy, out=legacy)

    # -- gradients ----------------------------------------------------------

    def attach_grad(self, x: Any, grad_req: str = "write") -> None:
        messages.check_grad_req(grad_req)
        dtype = np.dtype(x.dtype)
        if dtype.kind != "f":
            raise messages.no_float(dtype)
        if grad_req != "null" or x.grad is not None:
            x.attach_grad(grad_req)

    def grad(self, x: Any) -> Any:
        gradient = x.grad
        if gradient is None:
            raise messages.no_gradient()
        return gradient

    def is_fresh(self, x: Any) -> bool:
        return bool(x._fresh_grad)

    def mark_used(self, x: Any, used: bool = True) -> None:
        x._fresh_grad = not used

    def scope(self, recording=None, training=None) -> ContextManager:
        return Scope(_read_flags, _write_flags, (recording, training))

    def is_recording(self) -> bool:
        return autograd.is_recording()

    def is_training(self) -> bool:
        return autograd.is_training()

    def backward(self, losses: Sequence[Any]) -> None:
        heads = list({id(x): x for x in losses}.values())
        seeds = None
        if len(heads) < len(losses):
            # MXNet would count a repeated loss once.
            seeds = [self.ops.zeros_like(x) + sum(y is x for y in losses)
                     for x in heads]
        try:
            autograd.backward(heads, seeds)
        except mx.MXNetError as error:
            if "There are no inputs in computation graph" in str(error):
                raise RuntimeError(
                    "backward needs losses that depend on an array with a "
                    "gradient; got one that does not, or one whose backward "
                    "pass has run before. Call mgpu.backward once with the "
                    "losses of all devices.") from error
            if not any(words in str(error) for words in (
                    "Cannot differentiate node",
                    "not part of a computation graph")):
                raise
            raise messages.not_recorded() from None
        flush_all()

    def mean_on(self, loss: Any) -> Any:
        if loss.size != 1 or not is_recorded(loss):
            return None
        graph = json.loads(autograd.get_symbol(loss).tojson())
        last = graph["nodes"][graph["heads"][0][0]]
        # With an axis it may be the loss of one example.
        return loss.ctx if last["op"] in ("mean", "_npi_mean") \
            and last.get("attrs", {}).get("axis", "None") in (
                "None", "()") else None

    def through(self, x, forth, back, after=None):
        result = self.put(forth(self.to_numpy(x)), x)
        if not autograd.is_recording() or not is_recorded(x):
            return result, None
        turn = mx.nd.zeros(1, x.ctx)
        autograd.mark_variables([turn], [self._turns.setdefault(
            x.ctx, mx.nd.zeros(1, x.ctx))])
        return _Through(self, result, back)(x, turn), None

    def move_statistics(self, call, mean, var, through) -> Any:
        # Gluon's layer updates them in its backward pass, which runs if a
        # gradient reaches the layer and the input, gamma or beta needs one.
        # So a Gluon layer updates each, as the mean of a batch of one example
        # that adds zero to the output and to the gradients.
        norm = npx.batch_norm if is_np(mean) else mx.nd.BatchNorm
        zeros = self.ops.zeros_like(call.running_mean)
        for running, value in ((call.running_mean, mean),
                               (call.running_var, var)):
            through = through + 0 * norm(
                value, zeros if call.gamma is None else call.gamma,
                zeros if call.beta is None else call.beta, running,
                self.ops.zeros_like(running), eps=1.0, fix_gamma=False,
                momentum=call.momentum, axis=call.axis)
        return through

    # -- running on several devices -----------------------------------------

    def data_parallel(self, net, devices, split, remake, synchronize):
        network = MXNetNetwork(self, net)
        if len(devices) > 1:
            check_layers(net, network.entries, None, devices)
        return DataParallel(network, [self.handle(d) for d in devices],
                            split, remake, synchronize)

    def parallel(self, thunks, *, rendezvous=False) -> list[Any]:
        if not rendezvous or len(thunks) < 2:
            return run_in_turn(thunks)
        if inside_worker():
            raise messages.nested_rendezvous()
        drawers = self._drawers

        def seeded(thunk: Callable[[], Any]) -> Any:
            if getattr(_here, "drawers", None) is not drawers:
                _here.drawers = drawers
                mx.random.seed(self._child(1))
            return thunk()
        return self._workers.run([functools.partial(seeded, thunk)
                                  for thunk in thunks])

    def carry(self) -> Callable[[], ContextManager]:
        # Inside mx.engine.bulk the thread delays operations whose results
        # other threads need: setting the size queues them.
        mx.engine.set_bulk_size(mx.engine.set_bulk_size(0))
        numpy_mode = npx.is_np_array(), npx.is_np_shape()
        recording, training = autograd.is_recording(), autograd.is_training()
        context = mx.context.current_context()

        @contextlib.contextmanager
        def modes() -> Iterator[None]:
            # A new Context object, which stores the thread's previous one.
            with mx.Context(context), _numpy_mode(*numpy_mode), \
                    self.scope(recording, training):
                yield
        return modes

    def seed(self, seed: int) -> None:
        # One number for all devices: MXNet combines it with the context. The
        # streams belong to the thread that queues an operation; other threads
        # start new ones with their first draw after this.
        self._seed, self._drawers = seed, itertools.count(2)
        mx.random.seed(self._child(0) if self._first else seed & 0x7FFFFFFF)

    def number_devices(self, first: int) -> None:
        if first != self._first:
            self._first = first
            self.seed(self._seed)

    def _child(self, number: int) -> int:
        """Seed of derived streams. 0: after a save; 1: the devices' threads;
        from 2: data-loading threads."""
        # Processes have different streams, by their first device.
        entropy = [self._seed, number, self._first]
        child, = np.random.SeedSequence(
            entropy[:3 if self._first else 2]).generate_state(1)
        return int(child) & 0x7FFFFFFF

    def drawing(self, stop: Sequence[Any]
                ) -> Callable[[], ContextManager]:
        number = next(self._drawers)

        @functools.cache        # once, in the data-loading thread
        def block() -> ContextManager:
            mx.random.seed(self._child(number))
            return contextlib.nullcontext()
        return block

    def export_streams(self) -> dict[str, np.ndarray]:
        # MXNet does not expose the state of a stream: both runs start a new
        # one here.
        self.seed(self._child(0))
        return {"seed": np.array(str(self._seed))}

    def draws(self, thunk, devices):
        # The numbers after a seed show whether any were drawn. MXNet has a
        # second stream, for `shuffle` and others.
        def following() -> list[bytes]:
            return [x.asnumpy().tobytes() for context in map(
                self.handle, devices) for x in (
                mx.nd.random.uniform(shape=1, ctx=context),
                mx.nd.shuffle(mx.nd.arange(32, ctx=context)))]
        with self.scope(recording=False):
            seed = int(mx.nd.random.randint(0, 2 ** 31 - 1).asscalar())
            self.seed(seed)
            expected = following()
        self.seed(seed)
        made, found = thunk(), following()
        self.seed(self._child(0))
        return made, found != expected

    def fit_streams(self, streams: Mapping[str, np.ndarray]
                    ) -> Callable[[], None]:
        return functools.partial(self.seed, integer(
            "seed", int(str(streams["seed"])), 0))

    # -- debugging ----------------------------------------------------------

    def strict(self, ledger: Any) -> ContextManager:
        return strict.strict(ledger)

    def wait_for(self, x: Any) -> None:
        x.wait_to_read()

    def failures(self, arrays):
        errors = []
        for x in arrays:
            try:
                if x.ctx.device_type == "cpu":
                    x.wait_to_read()
            except Exception as failed:
                errors.append(failed)
        return errors

    def memory(self, x: Any) -> tuple[Any, int, int]:
        x.wait_to_read()
        space = "cpu" if x.ctx.device_type.startswith("cpu") else str(x.ctx)
        begin = _address(x)
        return space, begin, begin + x.size * np.dtype(x.dtype).itemsize

    def check_writable(self, x: Any) -> None:
        if isinstance(x, mx.nd.sparse.BaseSparseNDArray):
            raise messages.no_places(f"a {x.stype} array",
                                     "x.tostype('default')")

    def is_dense(self, x: Any) -> bool:
        return x.stype == "default"

    # -- networks -----------------------------------------------------------

    def network(self, net: Any) -> MXNetNetwork:
        if not isinstance(net, mx.gluon.Block):
            raise messages.not_a_network(net, self.name, "gluon.Block")
        return MXNetNetwork(self, net)

    def parts(self, x: Any) -> list[tuple[str, Any]] | None:
        return list(x._children.items()) if isinstance(x, mx.gluon.Block) \
            else None

    def model(self, name: str, **options: int) -> Any:
        from mgpu.backends._mxnet.models import MODELS
        return MODELS[name](**options)

    def from_gluon(self, symbol, params, dtype, softmax, frozen=()):
        graph, arrays = load_graph(symbol), dense_arrays(params)
        check_fit(graph, arrays)
        others = {x.dtype.name for x in arrays.values()
                  if x.dtype.kind == "f" and dtype} - {dtype}
        outputs = mx.sym.load_json(symbol_of_dtype(symbol, others, dtype))
        ends = [graph.nodes[i] for i, _ in graph.heads]
        if any(node.op in _LOSSES for node in ends):    # without labels
            outputs = mx.sym.Group([_prediction(outputs[i], node, softmax)
                                    for i, node in enumerate(ends)])
        needed = outputs.list_inputs()
        inputs = [mx.sym.var(name) for name in entries(graph, arrays)
                  if name in needed]
        if npx.is_np_array():
            outputs = outputs.as_np_ndarray()
            inputs = [x.as_np_ndarray() for x in inputs]
        net = mx.gluon.SymbolBlock(outputs, inputs)
        net.load_parameters(path_of(params), mx.cpu(0), cast_dtype=True,
                            dtype_source="saved")
        if dtype is not None:
            net.cast(dtype)
        gammas = fixed_gammas(graph)
        still = {*frozen, *gammas, *constants(graph)}
        for name, p in net.collect_params().items():
            if name in still:
                p.grad_req = "null"
            if name in gammas:
                p.data()[:] = 1
        return net

    # -- advice -------------------------------------------------------------

    def doctor(self) -> list[tuple[str, str]]:
        return findings()


if environment.strict_devices():
    strict.always(Ledger())

BACKEND = MXNetBackend
