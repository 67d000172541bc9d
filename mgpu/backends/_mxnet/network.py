"""A user's `gluon.Block`, which runs on several contexts."""
import contextlib
import copy
import inspect
import json
import os
import re
import threading
from collections.abc import (Callable, Iterable, Iterator, Mapping,
                             Sequence)
from functools import partial
from typing import Any

import numpy as np

from mgpu.backends import base, containers, messages
from mgpu.backends._mxnet.block_tree import is_array, state_of, view_of
from mgpu.backends._mxnet.copies import Call, ContextCopies
from mgpu.backends._mxnet.dispatch import Passes, is_known
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.layers import (BATCH_NORM, Between, all_stored,
                                         constants, describe, is_layer)
from mgpu.backends._mxnet.ops import is_np
from mgpu.backends._mxnet.own_step import MXNetParts, any_dtype_clipped
from mgpu.backends._mxnet.states import set_states
from mgpu.backends._mxnet.statistics import DeviceStatistics
from mgpu.backends._workers import run_in_turn
from mgpu.backends.containers import Batch

_FUSED = (mx.gluon.rnn.RNN, mx.gluon.rnn.LSTM, mx.gluon.rnn.GRU)

_KINDS = ("weight", "bias", "gamma", "beta", *base.STATISTICS)


def _kind(name: str, parameter: Any) -> str:
    kind = next((kind for kind in _KINDS if name.replace(
        "moving_", "running_").endswith(kind)), None)
    if kind is None and parameter.grad_req == "null":
        return "other"
    if kind in base.STATISTICS:
        return kind
    if parameter.init is not None:      # a rule of its own
        return kind or "weight"
    # Gluon draws all these as weights, also what scales or shifts a layer.
    matrix = kind == "weight" and len(_shape(parameter) or (0, 0)) > 1
    return "weight" if matrix else "unknown"


def _value(parameter: Any) -> Any | None:
    """The array on the first context, or None before there is one."""
    try:
        return all_stored(parameter)[0]
    except RuntimeError:        # not initialised, or deferred
        return None


def _shape(parameter: Any) -> tuple[int, ...] | None:
    # What was loaded without a layer's description has only its array's.
    value = _value(parameter)
    shape = parameter.shape if value is None else value.shape
    # 0 (legacy shapes) and -1 (NumPy shapes) stand for unknown.
    known = shape is not None and all(n > 0 for n in shape)
    return tuple(shape) if known else None


def _own_init(parameter: Any) -> Any | None:
    """The layer's own initialiser as (name, options)."""
    init = parameter.init
    if init is None or isinstance(init, str):
        return init and (init, {})
    try:
        # A copy: dumps() of a Constant array changes the object itself.
        name, options = json.loads(copy.deepcopy(init).dumps())
    except (TypeError, ValueError):     # a user's own class
        return type(init).__name__.lower(), {}
    return name, options


def _blocks(block: Any, path: str = "", into_layers: bool = True
            ) -> Iterator[tuple[str, Any]]:
    """Yield (path, block) for `block` and all blocks in it."""
    yield path, block
    if into_layers or not is_layer(block):
        for name, child in block._children.items():
            yield from _blocks(child, f"{path}.{name}" if path else name,
                               into_layers)


def _compiled_slopes(block: Any, path: str = "", inside: bool = False
                     ) -> Iterator[str]:
    """Yield the PReLUs whose input a compiled graph computes. `inside`:
    whether `block` is part of such a graph."""
    graph = getattr(block, "_cached_graph", ())
    if graph and not inside and (block._active or isinstance(
            block, mx.gluon.SymbolBlock)):
        nodes = json.loads(graph[1].tojson())["nodes"]
        yield from (node["name"] for node in nodes
                    if node["op"] == "LeakyReLU"
                    and node.get("attrs", {}).get("act_type") == "prelu"
                    and nodes[node["inputs"][0][0]]["op"] != "null")
        return
    if inside and isinstance(block, mx.gluon.nn.PReLU):
        yield path
    for name, child in block._children.items():
        yield from _compiled_slopes(child, f"{path}.{name}" if path else name,
                                    inside or getattr(block, "_active", False))


def _last_windows(net: Any) -> Iterator[str]:
    """Yield the average poolings that count what is beyond the edge: layers,
    and operators of graphs, which a call leaves."""
    for path, block in _blocks(net):
        graph = getattr(block, "_cached_graph", ())
        nodes = json.loads(graph[1].tojson())["nodes"] if graph else ()
        for name, options in [(path, getattr(block, "_kwargs", None)), *(
                (node["name"], node.get("attrs")) for node in nodes
                if node["op"] == "Pooling")]:
            own = {key: str(x) for key, x in (options or {}).items()}
            if own.get("pooling_convention") == "full" \
                    and own.get("pool_type") == "avg" \
                    and own.get("count_include_pad") != "False" \
                    and own.get("global_pool") != "True":
                yield name


def _own(block: Any) -> list[Any]:
    """The parameters of `block` itself: its attributes, then those that it
    made or took in otherwise."""
    return list({id(p): p for p in (*block._reg_params.values(),
                                    *block._params._params.values())}.values())


def _named(net: Any) -> dict[str, Any]:
    """What Gluon's own Trainer takes of `net`, ``net.collect_params()``, and
    the attributes of its blocks. Those that are no attribute (in a list, say)
    are called by the path of their block and Gluon's name in it."""
    found = net._collect_params_with_prefix()
    known, collected = set(map(id, found.values())), net.collect_params()

    def add(path: str, prefix: str, parameters: Iterable[Any]) -> None:
        for p in parameters:
            if id(p) in known or collected._params.get(p.name) is not p:
                continue
            known.add(id(p))
            # Of a block that is not in this one: without its number, which
            # grows with every network that is made.
            short = p.name[len(prefix):] if p.name.startswith(prefix) \
                else re.sub(r"\d+_", "_", p.name, count=1)
            name = short = f"{path}.{short}".lstrip(".")
            number = 1
            while name in found:
                number += 1
                name = f"{short}_{number}"
            found[name] = p
    for path, block in _blocks(net):
        add(path, block._prefix, block._params._params.values())
    add("", net._prefix, list(collected.values()))
    return found


def _held(blocks: Iterable[Any]) -> list[list[Any]]:
    """The parameters that each block holds now; quick."""
    return [[*block._params._params.values(), *block._reg_params.values()]
            for block in blocks]


class MXNetNetwork(base.Network):
    """A user's Block, and its copies on several contexts."""

    backend: Any
    replicate = None    # type: ignore[assignment]  # of an earlier contract

    def __init__(self, backend: Any, net: Any):
        self.backend, self.net = backend, net
        self._devices: list[Any] = []
        self._contexts: list[Any] = []      # of `place`
        self.functions: dict[str, base.Layer] = {}
        self._deferred: list[Any] = []      # where Gluon has made the arrays
        self._options = base.Options()
        self._passes = Passes(net)
        self._copies = ContextCopies(net, [])
        self._statistics = DeviceStatistics([], [])
        #: runs the thunks of devices, which meet in `use_batch_norm`
        self._meet: Callable[[list[Any]], list[Any]] | None = None
        self._one_predicts = threading.RLock()      # threads share the layers
        blocks = [block for _, block in _blocks(net)]
        #: batch norms that code of the user's may call in predict_mode
        self._may_predict = [] if all(map(is_known, blocks)) else [
            block for block in blocks if isinstance(block, BATCH_NORM)]
        found: dict[int, Any] = {}
        self._named, self._held = _named(net), _held(blocks)
        for name, p in self._named.items():
            found.setdefault(id(p), (name, p, _kind(name, p)))
        self._constants = {id(p): start for _, block in _blocks(net)
                           for p, start in constants(block)}
        # Parameters first, then buffers, each in the order of the layers.
        self.entries = sorted(
            found.values(), key=lambda entry: entry[2] in base.BUFFERS)

    def _batch_norm_layers(self) -> list[tuple[str, Any]]:
        """Refuses those that compute something else."""
        # A layer with use_global_stats predicts in training too.
        found = [(path, block) for path, block in _blocks(self.net)
                 if isinstance(block, BATCH_NORM)
                 and not block._kwargs["use_global_stats"]]
        plain = mx.gluon.nn.BatchNorm
        own = [path for path, block in found
               if not isinstance(block, plain)      # BatchNormReLU
               or type(block).hybrid_forward is not plain.hybrid_forward
               or type(block).forward is not plain.forward]
        own += self._loose_statistics()
        if own:
            raise messages.own_batch_norm(own)
        return found

    def _loose_statistics(self) -> list[str]:
        """Running statistics that are no batch-norm layer's: those of a
        SymbolBlock, or of a block that calls F.BatchNorm itself."""
        held = {id(p) for _, block in _blocks(self.net)
                if isinstance(block, BATCH_NORM)
                for p in _own(block)}
        return [name for name, p, kind in self.entries
                if kind in base.STATISTICS and id(p) not in held]

    def specs(self) -> list[base.Spec]:
        found = []
        for name, p, kind in self.entries:
            found.append(base.Spec(
                name, kind, _shape(p), np.dtype(p.dtype).name, p.grad_req,
                _own_init(p), p.lr_mult, p.wd_mult,
                self._constants.get(id(p))))
        return found

    def gluon_names(self) -> dict[str, str]:
        return {name: p.name for name, p, _ in self.entries}

    def grad_req(self, number: int) -> str:
        return self.entries[number][1].grad_req

    def names_of(self, parameters) -> list[str | None]:
        names = {id(p): name for name, p, _ in self.entries}
        return [names.get(id(p)) for p in parameters]

    def multipliers(self, number: int) -> tuple[float, float]:
        parameter = self.entries[number][1]
        return parameter.lr_mult, parameter.wd_mult

    def set_grad_req(self, number, grad_req) -> None:
        messages.check_grad_req(grad_req)
        self.entries[number][1].grad_req = grad_req
        self._mend_frozen()

    def _mend_frozen(self) -> None:
        # MXNet's float32 kernel of a Dense layer, which cells and blocks of
        # the user's use too, computes the gradient of the bias together with
        # that of the weight: where the weight is frozen the bias would not
        # learn. So the weight's arrays get a gradient, which Gluon does not
        # see. A block of the user's may have one of the two, and any other
        # block the other.
        found = [(is_known(block), _own(block), {
            p.shape[0] for p in _own(block)
            if p.grad_req != "null" and len(p.shape or ()) == 1})
            for _, block in _blocks(self.net)]
        users = {n for known, _, ns in found for n in ns if not known}
        everywhere = {n for _, _, ns in found for n in ns}
        for known, own, biases in found:
            for p in own:
                if p.grad_req == "null" and len(p.shape or ()) == 2 \
                        and np.dtype(p.dtype) == np.float32 \
                        and p.shape[0] in (biases | users if known
                                           else everywhere) \
                        and _value(p) is not None:
                    for x in all_stored(p):
                        x.attach_grad()

    def devices(self) -> list[Any]:
        if not self.entries:
            raise ValueError("the network has no parameters, so nothing "
                             "says where it is; pass devices=.")
        try:
            return self.entries[0][1].list_ctx()
        except RuntimeError as error:
            raise RuntimeError(
                "the network must have values; received one that is not "
                "initialized. Call mgpu.initialize first.") from error

    def predictors(self, devices) -> list[Any]:
        holders = self.devices()
        contexts = [self.backend.handle(d) for d in devices]
        if any(c not in holders for c in contexts):
            raise ValueError(f"the network is on {holders}; received "
                             f"{list(devices)}. Evaluate where it is.")

        def predict(context: Any, *inputs: Any, **named: Any) -> Any:
            with mx.Context(context), self._predicting():
                return self._call(self.net, self.in_order(inputs, named))
        return [partial(predict, context) for context in contexts]

    def cast(self, dtype: str) -> None:
        self.net.cast(dtype)
        for _, p, _ in self.entries:    # values that wait, which Gluon forgets
            *how, data = p._deferred_init or (None,)
            if data is not None:
                p._deferred_init = (*how, data.astype(dtype))

    def _allocate(self, contexts: Sequence[Any]) -> None:
        """Arrays on one context, with the values that are there; what Gluon
        was told to draw is drawn as soon as its shape is known."""
        contexts = list(contexts)
        for _, p, _ in self.entries:
            value = _value(p)
            if value is not None and contexts == p.list_ctx() \
                    and is_np(value) == mx.util.is_np_array():
                continue
            if value is not None:       # maybe of the other family
                value = value.as_np_ndarray() if mx.util.is_np_array() \
                    else value.as_nd_ndarray()
                p._shape = value.shape
                with mx.autograd.pause():
                    p._init_impl(value, contexts)
            elif p._deferred_init:
                p.reset_ctx(contexts)
                if _shape(p) is not None:
                    p._finish_deferred_init()
            else:
                p.initialize(ctx=contexts, default_init=mx.init.Zero())

    @contextlib.contextmanager
    def _undone_by_errors(self) -> Iterator[None]:
        before = [_keep(parameter) for _, parameter, _ in self.entries]
        try:
            yield
        except BaseException:
            for put_back in before:
                put_back()
            raise

    def infer_shapes(self, inputs, device) -> None:
        self._deferred = []
        inputs = self.in_order(*base.apart(inputs))
        context = self.backend.handle(device)
        view = view_of(self.net)
        before = {key: dict(own) for key, own in view.items()}
        with self._undone_by_errors():      # an input that does not fit
            self._allocate([context])
            # What this pass keeps is not the user's.
            set_states(self.net, {place: _spare(x) for place, x
                                  in state_of(view).items()})
            try:
                with mx.autograd.pause(train_mode=False), mx.Context(context):
                    _wait(self._call(self.net, inputs))
            finally:
                states = state_of(before)
                for key, own in view.items():
                    for _, name in state_of({key: own}):
                        if name not in before[key]:
                            del own[name]
                set_states(self.net, states)

    def give_shapes(self, shapes) -> None:
        unknown = {name: p for name, p, _ in self.entries
                   if _shape(p) is None and name in shapes}
        with self._undone_by_errors():
            for name, p in unknown.items():
                try:
                    p.shape = shapes[name]
                except AssertionError:
                    raise ValueError(
                        "the shape of a parameter fits what is known of it; "
                        f"received {shapes[name]} for {name!r}, of shape "
                        f"{p.shape} (0: not known yet). Load a file of this "
                        "network's.") from None

    def inputs(self) -> Sequence[inspect.Parameter]:
        own = type(self.net)
        if not (isinstance(self.net, mx.gluon.HybridBlock)
                and own.forward is mx.gluon.HybridBlock.forward):
            return super().inputs()
        # Gluon gives the module of operators, and the block's parameters.
        _, *found = inspect.signature(
            self.net.hybrid_forward).parameters.values()
        return [p for p in found if p.name not in self.net._reg_params
                and p.kind is not p.VAR_KEYWORD]

    def in_order(self, inputs: tuple[Any, ...], named: dict[str, Any]
                 ) -> tuple[Any, ...]:
        """All inputs without names, as Blocks take them."""
        if not named:
            return inputs
        known = self.inputs()
        only = [p.name for p in known if p.kind is p.KEYWORD_ONLY]
        if only or any(p.kind is p.VAR_KEYWORD for p in known):
            raise messages.nameless_blocks(type(self.net), only)
        try:
            bound = inspect.Signature(known).bind(*inputs, **named)
        except TypeError as error:
            raise messages.wrong_names(
                type(self.net), [p.name for p in known], len(inputs), named,
                error) from None
        last = max(i for i, p in enumerate(known) if p.name in named)
        bound.apply_defaults()
        return bound.args[:max(last + 1, len(inputs))]

    def _call(self, net: Any, inputs: tuple[Any, ...],
              named: Mapping[str, Any] | None = None) -> Any:
        """The outputs of the network or of a copy, in the array family of
        the inputs."""
        with self.backend.family_of(next(
                (x for x in inputs if x is not None), None)):
            try:
                return net(*inputs)
            except mx.MXNetError as error:
                words = r"type|expected (\w+\d|unknown), got \w"     # bool
                given = [np.dtype(x.dtype).name for x in inputs
                         if isinstance(x, mx.nd.NDArray)]
                own = {spec.dtype for spec in self.specs()}
                self._explain_state(error, given, own)
                messages.explain_dtype(error, words, given, own)
                self._explain_states(error, inputs)
                raise
            except (RuntimeError, ValueError) as error:
                self._explain_states(error, inputs)
                raise

    def _explain_states(self, error: Exception, inputs: Sequence[Any]
                        ) -> None:
        """See `messages.explain_states`."""
        paths = {id(block): path for path, block in _blocks(self.net)}
        rows = next((x.shape[0] for x in inputs if getattr(x, "shape", ())),
                    0)
        messages.explain_states(error, [
            (f"{paths[key]}.{name}".lstrip("."), a.shape)
            for (key, name), x in state_of(view_of(self.net)).items()
            for a in containers.arrays_in(x, is_array)],
            rows, len(self._contexts))

    def _explain_state(self, error: Exception, given: Sequence[str],
                       own: Iterable[str]) -> None:
        """TypeError if it is the first state of cells that has another
        dtype."""
        cells = [path for path, block in _blocks(self.net)
                 if isinstance(block, mx.gluon.rnn.RecurrentCell)]
        floats = sorted({x for x in own if "float" in x} - {"float32"})
        if cells and floats and all(
                x in floats for x in given if "float" in x) \
                and "expected float32, got" in str(error):
            raise TypeError(
                "the first state of a recurrent cell has the dtype of its "
                f"weights, {floats[0]}; received {cells} and MXNet's "
                "default, float32. Pass begin_state= in that dtype to "
                "unroll: cell.begin_state(batch_size=n, ctx=x.context, "
                f"dtype='{floats[0]}').") from error

    def values(self) -> dict[str, np.ndarray] | None:
        found = {}
        self._statistics.settle()
        for name, parameter, _ in self.entries:
            value = _value(parameter)
            if value is None:
                return None
            found[name] = self.backend.to_numpy(value)
        return found

    def missing(self) -> set[str]:
        return {name for name, p, _ in self.entries
                if not p._deferred_init and _value(p) is None}

    def shares(self, other: Any) -> list[str]:
        theirs = {id(p) for _, block in _blocks(other) for p in _own(block)} \
            if isinstance(other, mx.gluon.Block) else set()
        return [name for name, p, _ in self.entries if id(p) in theirs]

    def defer(self, devices, draws) -> bool:
        contexts = [self.backend.handle(d) for d in devices[:1]]
        with self._undone_by_errors():
            self._allocate(contexts)
            for number, draw in draws.items():
                self.entries[number][1].initialize(
                    _Drawn(draw), contexts, force_reinit=True)
        self._deferred = contexts
        return True

    def check(self, dtype, devices) -> None:
        sparse = [name for name, p, _ in self.entries
                  if {p._stype, p._grad_stype} != {"default"}]
        if sparse:
            raise messages.sparse_gradient(sparse)
        collected = set(map(id, self.net.collect_params().values()))
        left_out = [name for name, p, _ in self.entries
                    if id(p) not in collected and p.grad_req != "null"]
        if left_out:
            raise ValueError(
                "mgpu trains what Gluon's own Trainer trains, "
                "net.collect_params(); received parameters that it leaves "
                f"out: {', '.join(map(repr, left_out))}. Make a parameter "
                "with self.params.get(name, shape=...) if it is to learn; "
                "set its grad_req = 'null' if not.")
        joined = [path for path, block in _blocks(self.net)
                  if isinstance(block, mx.gluon.contrib.nn.SyncBatchNorm)]
        if joined and len(devices) > 1:
            raise ValueError(
                "SyncBatchNorm of Gluon waits for ever for a device without "
                f"rows, and weighs all devices alike; received {joined} on "
                f"{len(devices)} devices. Use gluon.nn.BatchNorm and "
                "batch_norm='sync'.")
        wide = [path for path, block in _blocks(self.net)
                if isinstance(block, _FUSED)
                and np.dtype(dtype or block.l0_i2h_weight.dtype) == np.float64]
        if wide and any(d.kind == "cpu" for d in devices):
            raise ValueError(
                "MXNet computes wrong float64 gradients of its recurrent "
                f"layers on CPUs; received float64 for {wide}. Use "
                "dtype='float32', or cells (gluon.rnn.LSTMCell) with "
                "begin_state= in float64.")
        self._check_slopes(devices)
        kinds = {np.dtype(dtype or p.dtype) for _, p, _ in self.entries}
        if np.dtype("float32") in kinds \
                and any(d.kind == "cpu" for d in devices) \
                and os.environ.get("MXNET_MKLDNN_ENABLED") != "0" \
                and (wrong := [*dict.fromkeys(_last_windows(self.net))]):
            raise ValueError(
                "MXNet computes a wrong float32 gradient of average pooling "
                "on CPUs where the last window goes beyond the edge; received "
                f"{wrong} with ceil_mode=True. Use count_include_pad=False, "
                "dtype='float64', or the environment variable "
                "MXNET_MKLDNN_ENABLED=0.")

    def _check_slopes(self, devices: Sequence[Any], all_of: bool = False
                      ) -> None:
        wrong = list(_compiled_slopes(self.net, inside=all_of))
        if wrong and any(d.kind == "cpu" for d in devices):
            raise ValueError(
                "MXNet computes a wrong gradient of the slope of a PReLU in a "
                f"compiled network on CPUs; received {wrong}. Call "
                "net.hybridize(False), and leave hybridize=True out; a "
                "SymbolBlock trains on torch, by mgpu.from_gluon.")

    def prepare(self, options: base.Options, devices: Sequence[Any]) -> None:
        if options.autocast is not None:
            raise ValueError(
                "autocast works on torch only; received "
                f"autocast={options.autocast!r} with the mxnet backend. Use "
                "autocast=None, or dtype='float16' for the whole network.")
        if options.hybridize:
            self._check_slopes(devices, True)
        self._options = options     # channels_last: MXNet has no such switch

    def hybridize(self, active, devices) -> None:
        self.prepare(self._options._replace(hybridize=active), devices)
        if self._contexts:
            self.net.hybridize(active, static_alloc=active)

    def place(self, devices: Sequence[Any]) -> None:
        self._devices = list(devices)
        self._contexts = [self.backend.handle(d) for d in devices]
        self._allocate(self._contexts[:1])
        self._mend_frozen()
        for _, p, _ in self.entries:
            for x in all_stored(p):
                if x.grad is not None:
                    self.backend.mark_used(x)
        if self._options.hybridize:
            # Not static_shape, which is for one shape in all passes: shards
            # have two lengths, and the last batch is shorter.
            self.net.hybridize(static_alloc=True)
        self._statistics = DeviceStatistics(
            [p for _, p, kind in self.entries if kind in base.STATISTICS
             and not self._options.sync], self._contexts)
        self._copies = ContextCopies(
            self.net, self._contexts, call=self._call, run=self._run,
            one_backward=True, statistics=self._statistics,
            buffers=[p for _, p, kind in self.entries
                     if kind in base.BUFFERS])

    # -- arrays ---------------------------------------------------------------

    def array(self, number: int) -> Any:
        self._statistics.settle()
        _, parameter, _ = self.entries[number]
        x = _value(parameter)
        if x is None or self._contexts and x.ctx != self._contexts[0]:
            raise RuntimeError(
                "the values of a network stay on the device that "
                f"mgpu.initialize has put them on; received "
                f"{parameter.name!r} without a value there, as after "
                "reset_ctx, or a second initialize, of the network or of one "
                "that shares its parameters. Call mgpu.initialize(net, "
                "devices, init='keep', force_reinit=True).")
        return x

    def arrays(self, number: int) -> list[Any]:
        _, p, _ = self.entries[number]
        found = [self.array(number)]
        for i in range(1, len(self._contexts)):
            own = self._statistics.own(i, p)
            found.append(self._copies.refreshed(i, p) if own is None else own)
        return found

    def write_statistics(self, number: int, values: Sequence[Any]) -> None:
        self._statistics.write(self.entries[number][1], values)

    def written(self, number: int) -> None:
        self._statistics.written(self.entries[number][1])

    # -- passes ---------------------------------------------------------------

    def run(self, calls: Mapping[int, Call], batch: Batch) -> dict[int, Any]:
        self._check_layers()
        inputs = {i: self._inputs(call) for i, call in calls.items()}
        for i, (own, _) in inputs.items():
            self.backend.check_inputs(own, self._devices[i])
        with self._predicting():
            return self._copies.run(inputs, batch)

    def probe(self, call: Call) -> Any:
        return self._copies.probe(self._inputs(call))

    def _inputs(self, call: Call) -> Call:
        return self.in_order(*call), {}

    def _run(self, thunks: list[Any], active: list[int]) -> list[Any]:
        """Call the thunks of the devices `active`."""
        if self._meet is not None:
            by_device = dict(zip(active, thunks, strict=True))
            found = self._meet([by_device.get(i)
                                for i in range(len(self._contexts))])
            return [found[i] for i in active]
        if self.backend.side_by_side([self._contexts[i] for i in active]):
            if self._passes.apart():
                return self.backend.in_threads(thunks)
            outputs = run_in_turn(thunks)
            self._passes.ended()
            return outputs
        return run_in_turn(thunks)

    def _check_layers(self) -> None:
        """RuntimeError where the network has got other parameters."""
        held = _held(block for _, block in _blocks(self.net))
        if held == self._held:
            return
        now = _named(self.net)
        if now != self._named:
            raise messages.changed_layers(
                name for name in {**self._named, **now}
                if self._named.get(name) is not now.get(name))
        self._held = held

    # -- layers ---------------------------------------------------------------

    def layers(self) -> list[base.Layer]:
        names = {id(p): name for name, p, _ in self.entries}
        return [base.Layer(path, *describe(block), tuple(
                    names[id(p)] for p in _own(block) if id(p) in names))
                for path, block in self._leaves()]

    def _leaves(self) -> list[Any]:
        """Pairs (path, block) of the innermost blocks, each block once."""
        found: dict[int, Any] = {}
        for path, block in _blocks(self.net, into_layers=False):
            if is_layer(block):
                found.setdefault(id(block), (path, block))
        return list(found.values())

    def settings(self) -> dict[str, str]:
        return {path: repr(block) for path, block in self._leaves()
                if type(block).__module__.startswith("mxnet.gluon.")}

    def aliases(self) -> dict[str, list[str]]:
        found: dict[int, list[str]] = {}
        for name, p in self.net._collect_params_with_prefix().items():
            found.setdefault(id(p), []).append(name)
        return {names[0]: names for names in found.values() if len(names) > 1}

    @contextlib.contextmanager
    def _predicting(self) -> Iterator[None]:
        """Inside the block, if it is recorded, batch norms that predict use
        their global statistics by name. MXNet's backward pass takes all
        others for layers in training, whatever their forward pass was."""
        if not mx.autograd.is_recording():
            with _computed_by([(layer, partial(_not_joined, layer))
                               for layer in self._may_predict]
                              if self._options.sync and not
                              mx.autograd.is_training() else ()):
                yield
            return
        if mx.autograd.is_training():
            # The network's own code may end that for a layer.
            with _computed_by([(layer, None) for layer in self._may_predict
                               if "forward" not in vars(layer)]):
                yield
            return
        loose = self._loose_statistics()
        if loose:
            raise ValueError(
                "a pass that predicts and is recorded takes batch norms from "
                f"gluon.nn; received running statistics of others: {loose}. "
                "Use gluon.nn.BatchNorm(use_global_stats=True) in their "
                "place, or record() in training mode.")
        with self._one_predicts, self._layer_by_layer(), _by_global_statistics(
                block for _, block in _blocks(self.net)):
            yield

    @contextlib.contextmanager
    def _layer_by_layer(self) -> Iterator[None]:
        compiled = self._hybridized()
        for block in compiled:
            block._active = False
        try:
            yield
        finally:
            for block in compiled:
                block._active = True

    def _hybridized(self) -> list[Any]:
        return [block for _, block in _blocks(self.net)
                if getattr(block, "_active", False)]

    def _index(self, x: Any) -> int:
        """The device whose context `x` is on."""
        return self._contexts.index(x.ctx)

    @contextlib.contextmanager
    def watch_layers(self, seen: base.LayerCallback) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._layer_by_layer())
            for path, block in self._leaves():
                def told(_, inputs, outputs, path=path):
                    first = next((x for x in inputs
                                  if isinstance(x, mx.nd.NDArray)), None)
                    if first is not None:
                        seen(path, tuple(inputs), outputs, self._index(first))
                handle = block.register_forward_hook(told)
                stack.callback(handle.detach)
            stack.enter_context(Between(
                self.net, lambda path, x, output: seen(
                    path, (x,), output, self._index(x)),
                self.functions).watching(self._leaves()))
            yield

    @contextlib.contextmanager
    def use_masks(self, draw: base.DrawMask) -> Iterator[None]:
        def forward(layer: Any, x: Any) -> Any:
            return x * draw(x, layer._rate, tuple(layer._axes),
                            self._index(x))
        with self._layer_by_layer(), _computed_by([
                (layer, partial(forward, layer)) for _, layer in self._leaves()
                if type(layer) is mx.gluon.nn.Dropout]):
            yield

    def inner_dropout(self):
        return [(path, layer, "_dropout") for path, layer in self._leaves()
                if isinstance(layer, mx.gluon.rnn.rnn_layer._RNNLayer)
                and layer._num_layers > 1 and layer._dropout]

    @contextlib.contextmanager
    def natively(self, draw, begins, seen) -> Iterator[None]:
        def before(_: Any, inputs: Any) -> None:
            if mx.autograd.is_recording():
                begins(inputs)

        def told(_: Any, inputs: Any, outputs: Any) -> None:
            if mx.autograd.is_recording():
                seen(outputs)
        handles = (self.net.register_forward_pre_hook(before),
                   self.net.register_forward_hook(told))
        try:
            with self.use_masks(draw), any_dtype_clipped():
                yield
        finally:
            for handle in handles:
                handle.detach()

    def trains(self, path) -> bool | None:
        return mx.autograd.is_training() if mx.autograd.is_recording() \
            else None

    def own_parts(self, parts) -> MXNetParts:
        return MXNetParts(
            {name: p for name, p, kind in self.entries
             if kind not in base.BUFFERS},
            {name: p for name, p, kind in self.entries
             if kind in base.BUFFERS},
            parts)

    @contextlib.contextmanager
    def use_batch_norm(self, normalise) -> Iterator[None]:
        if normalise is None:
            yield
            return
        if any(not isinstance(block, mx.gluon.nn.BatchNorm)
               for block in self._hybridized()):
            raise ValueError(
                "synchronised batch normalisation needs the layers of the "
                "network one by one; received a hybridized network. Call "
                "net.hybridize(False) first.")

        def forward(path: str, layer: Any, x: Any) -> Any:
            kwargs = layer._kwargs
            gamma, beta, mean, var = (p.data(x.ctx) for p in (
                layer.gamma, layer.beta, layer.running_mean,
                layer.running_var))
            y = normalise(base.BatchNormCall(
                x, None if kwargs["fix_gamma"] else gamma, beta, mean, var,
                kwargs["eps"], float(np.float32(kwargs["momentum"])),
                kwargs["axis"], path), self._index(x))
            # Before F.BlockGrad elementwise functions would hand a gradient
            # without an array back to a layer, which ends the process.
            y = mx.nd.concat(y.as_nd_ndarray(), dim=0)
            return y.as_np_ndarray() if is_np(x) else y
        before, self._meet = self._meet, getattr(
            normalise, "run", partial(self.backend.parallel,
                                      rendezvous=True))
        try:
            with _computed_by([(layer, partial(forward, path, layer))
                               for path, layer in self._batch_norm_layers()]):
                yield
        finally:
            self._meet = before


@contextlib.contextmanager
def _by_global_statistics(blocks: Iterable[Any]) -> Iterator[None]:
    norms = [(block, block._active) for block in blocks
             if isinstance(block, BATCH_NORM)
             and block._kwargs.get("use_global_stats") is False]
    for block, _ in norms:
        block._kwargs["use_global_stats"], block._active = True, False
    try:
        yield
    finally:
        for block, active in norms:
            block._kwargs["use_global_stats"], block._active = False, active


@contextlib.contextmanager
def _computed_by(forwards: Sequence[
        tuple[Any, Callable[[Any], Any] | None]]) -> Iterator[None]:
    """Inside the block, layers compute by functions of mgpu (None: their
    own), but where the network's own code has ended the training mode."""
    def either(layer: Any, forward: Callable[[Any], Any] | None, x: Any
               ) -> Any:
        if mx.autograd.is_training():
            return type(layer).forward(layer, x) if forward is None \
                else forward(x)
        # Symbols are what all passes of a compiled network are made of.
        with _by_global_statistics([layer] * isinstance(x, mx.nd.NDArray)):
            return type(layer).forward(layer, x)
    try:
        for layer, forward in forwards:
            layer.__dict__["forward"] = partial(either, layer, forward)
        yield
    finally:
        for layer, _ in forwards:
            layer.__dict__.pop("forward", None)


def _not_joined(layer: Any, _: Any) -> Any:
    raise ValueError(
        "batch_norm='sync' joins the statistics of passes that train; "
        f"received {layer.name!r}, which the network's own code has put into "
        "training mode in a prediction, on several devices. Run the pass "
        "inside mgpu.record(), or use one device.")


class _Drawn(mx.init.Initializer):
    """An initialiser for one parameter: a function of its shape."""

    def __init__(self, draw: Callable[[tuple[int, ...]], np.ndarray]):
        super().__init__()
        self._draw = draw

    def _init_weight(self, _: Any, arr: Any) -> None:
        arr[:] = self._draw(arr.shape)


def _spare(x: Any) -> Any:
    """A copy of an attribute, and of the arrays and containers in it."""
    if isinstance(x, (mx.nd.NDArray, np.ndarray, set, bytearray)):
        return x.copy()
    found = containers.parts(x)
    return x if found is None else containers.rebuild(
        x, found[0], list(map(_spare, found[1])))


def _wait(outputs: Any) -> None:
    """Until they are computed; their errors would come up in a later call."""
    if isinstance(outputs, mx.nd.NDArray):
        outputs.wait_to_read()
    elif isinstance(outputs, (list, tuple)):
        for x in outputs:
            _wait(x)


def _keep(parameter: Any) -> Callable[[], None]:
    """A function that restores the present state of `parameter`, whose arrays
    ``initialize`` replaces and does not change."""
    names = ("_data", "_grad", "_deferred_init", "_shape", "_ctx_list",
             "_ctx_map")
    state = {name: getattr(parameter, name) for name in names
             if hasattr(parameter, name)}
    return lambda: parameter.__dict__.update(state)

