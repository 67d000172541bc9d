"""A `gluon.Block` on several contexts."""
import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mgpu.backends import containers, messages
from mgpu.backends._mxnet.block_tree import is_array
from mgpu.backends._mxnet.blocks import (named_blocks, named_parameters,
                                         own_init, parameters_of, shape_of,
                                         value_of)
from mgpu.backends._mxnet.copies import ContextCopies, run_aside
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.layers import constants
from mgpu.backends._mxnet.limits import (check_layers, check_parameters,
                                         check_slopes)
from mgpu.backends._mxnet.network_layers import NetworkLayers
from mgpu.backends._mxnet.ops import is_np
from mgpu.backends.containers import Batch, Call, Probed
from mgpu.backends.network import BUFFERS, STATISTICS, Options, Spec, apart


class MXNetNetwork(NetworkLayers):
    """A Block of the user, and its copies on several contexts."""

    def __init__(self, backend: Any, net: Any):
        super().__init__(backend, net)
        self._options = Options()
        self._copies = ContextCopies(net, [])
        self._deferred = False      # whether Gluon allocates in a call
        self._named = named_parameters(net)
        self._held = self._block_parameters()
        self._constants = {id(p): start for _, block in named_blocks(net)
                           for p, start in constants(block)}

    def specs(self) -> list[Spec]:
        return [Spec(
            name, kind, shape_of(p), np.dtype(p.dtype).name, p.grad_req,
            own_init(p), p.lr_mult, p.wd_mult, self._constants.get(id(p)))
            for name, p, kind in self.entries]

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

    def _mend_frozen(self) -> None:
        # MXNet's float32 kernel of a Dense layer, which cells and
        # user-defined blocks use too, computes the gradient of the bias
        # together with that of the weight: if the weight is frozen, the bias
        # would not be trained. So the array of the weight gets a gradient
        # that is hidden from Gluon.
        frozen = [p for _, p, _ in self.entries
                  if p.grad_req == "null" and len(p.shape or ()) == 2
                  and np.dtype(p.dtype) == np.float32]
        biases = {p.shape[0] for _, p, _ in self.entries if frozen
                  and p.grad_req != "null" and len(p.shape or ()) == 1}
        for p in frozen:
            if p.shape[0] in biases and value_of(p).grad is None:
                value_of(p).attach_grad()

    def devices(self) -> list[Any]:
        if not self.entries:
            raise ValueError("the network has no parameters, so its devices "
                             "cannot be determined; pass devices=.")
        return self.entries[0][1].list_ctx()

    def predictors(self, devices) -> list[Any]:
        holders = self.devices()
        contexts = [self.backend.handle(d) for d in devices]
        if any(c not in holders for c in contexts):
            raise ValueError(f"the network is on {holders}; received "
                             f"{list(devices)}. Evaluate on its devices.")

        def predict(context: Any, *inputs: Any, **named: Any) -> Any:
            with mx.Context(context), self.predicting(self._options.sync):
                return self._call(self.net, self.in_order(inputs, named))
        return [partial(predict, context) for context in contexts]

    def cast(self, dtype: str) -> None:
        self.net.cast(dtype)
        for _, p, _ in self.entries:    # deferred values, which Gluon ignores
            *how, data = p._deferred_init or (None,)
            if data is not None:
                p._deferred_init = (*how, data.astype(dtype))

    def _allocate(self, context: Any) -> None:
        """Allocate the arrays on one context and keep existing values. Gluon
        runs deferred initializers once the shape is known."""
        for _, p, _ in self.entries:
            value = value_of(p)
            if value is None and p._deferred_init:
                p.reset_ctx(context)
                if shape_of(p) is not None:
                    p._finish_deferred_init()
            elif value is None:
                p.initialize(ctx=context, default_init=mx.init.Zero())
            elif [context] != p.list_ctx() \
                    or is_np(value) != mx.util.is_np_array():
                value = value.as_np_ndarray() if mx.util.is_np_array() \
                    else value.as_nd_ndarray()
                p._shape = value.shape
                with mx.autograd.pause():
                    p._init_impl(value, [context])
            elif p.grad_req != "null" and value.grad is None:
                p._init_grad()      # missing after copy.deepcopy

    @contextlib.contextmanager
    def _undone_by_errors(self) -> Iterator[None]:
        before = [(vars(p), {**vars(p)}) for _, p, _ in self.entries]
        try:
            yield
        except BaseException:
            for own, state in before:
                own.clear()
                own.update(state)
            raise

    def infer_shapes(self, inputs, device) -> None:
        inputs = self.in_order(*apart(inputs))
        context = self.backend.handle(device)
        with self._undone_by_errors():      # for an input of wrong shape
            self._allocate(context)
            tree, outputs = run_aside(self.net, context, partial(
                self._call, inputs=inputs), {}, hooks=True)
            for x in containers.arrays_in(outputs, is_array):
                x.wait_to_read()        # raises errors here
            for p, new in tree.parameters.items():
                if value_of(p) is None:
                    vars(p).update((name, x) for name, x in vars(new).items()
                                   if name != "_trainer")

    def give_shapes(self, shapes) -> None:
        unknown = {name: p for name, p, _ in self.entries
                   if shape_of(p) is None and name in shapes}
        with self._undone_by_errors():
            for name, p in unknown.items():
                try:
                    p.shape = shapes[name]
                except AssertionError:
                    raise ValueError(
                        "the shape of a parameter must match its known axes; "
                        f"received {shapes[name]} for {name!r} of shape "
                        f"{p.shape} (0: unknown). Load a file of this "
                        "network.") from None

    def inputs(self) -> Sequence[inspect.Parameter]:
        own = type(self.net)
        if not (isinstance(self.net, mx.gluon.HybridBlock)
                and own.forward is mx.gluon.HybridBlock.forward):
            return super().inputs()
        # Gluon passes the operator module F, and the block's parameters.
        _, *found = inspect.signature(
            self.net.hybrid_forward).parameters.values()
        return [p for p in found if p.name not in self.net._reg_params
                and p.kind is not p.VAR_KEYWORD]

    def in_order(self, inputs: tuple[Any, ...], named: dict[str, Any]
                 ) -> tuple[Any, ...]:
        """All inputs as positional arguments, as Blocks require."""
        if not named:
            return inputs
        known = self.inputs()
        try:
            bound = inspect.Signature(known).bind(*inputs, **named)
        except TypeError as error:
            raise TypeError(f"forward() {error}") from None
        if bound.kwargs:
            raise TypeError(
                "Gluon Blocks take positional inputs only; received the names "
                f"{list(bound.kwargs)}, which have no position in forward. "
                "Write each input as a parameter of forward, without a star "
                "before it.")
        last = max(i for i, p in enumerate(known) if p.name in named)
        bound.apply_defaults()
        return bound.args[:max(last + 1, len(inputs))]

    def _call(self, net: Any, inputs: tuple[Any, ...]) -> Any:
        """Call the network or a copy, in the array family of the inputs."""
        with self.backend.family_of(next(
                (x for x in inputs if x is not None), None)):
            return net(*inputs)

    def values(self) -> dict[str, np.ndarray] | None:
        self._copies.statistics.flush()
        found = {name: value_of(p) for name, p, _ in self.entries}
        return None if any(x is None for x in found.values()) else {
            name: self.backend.to_numpy(x) for name, x in found.items()}

    def missing(self) -> set[str]:
        return {name for name, p, _ in self.entries
                if not p._deferred_init and value_of(p) is None}

    def shares(self, other: Any) -> list[str]:
        theirs = {id(p) for _, block in named_blocks(other)
                  for p in parameters_of(block)} \
            if isinstance(other, mx.gluon.Block) else set()
        return [name for name, p, _ in self.entries if id(p) in theirs]

    def defer(self, devices, draws) -> bool:
        context = self.backend.handle(devices[0])
        with self._undone_by_errors():
            self._allocate(context)
            for number, draw in draws.items():
                self.entries[number][1].initialize(
                    _Drawn(draw), context, force_reinit=True)
        self._deferred = True
        return True

    def check(self, dtype, devices) -> None:
        check_parameters(self.net, self.entries)
        check_layers(self.net, self.entries, dtype, devices)

    def prepare(self, options: Options, devices: Sequence[Any]) -> None:
        if options.autocast is not None:
            raise ValueError(
                "autocast is not supported by the mxnet backend; received "
                f"autocast={options.autocast!r}. Use autocast=None, or "
                "dtype='float16' for the whole network.")
        if options.hybridize:
            check_slopes(self.net, devices, True)
        self._options = options     # MXNet does not support channels_last

    def hybridize(self, active, devices) -> None:
        self.prepare(self._options._replace(hybridize=active), devices)
        if self.contexts:
            self.net.hybridize(active, static_alloc=active)

    def place(self, devices: Sequence[Any]) -> None:
        self.contexts = [self.backend.handle(d) for d in devices]
        self._allocate(self.contexts[0])
        for _, p, _ in () if self._deferred else self.entries:
            if value_of(p).grad is not None:
                self.backend.mark_used(value_of(p))
        if self._options.hybridize:
            # Not static_shape, which requires one shape in all passes:
            # shards have two lengths, and the last batch is smaller.
            self.net.hybridize(static_alloc=True)
        self._copies = ContextCopies(
            self.net, self.contexts, call=self._call,
            run=lambda thunks: self.runner(thunks), one_backward=True,
            statistics=[p for _, p, kind in self.entries
                        if kind in STATISTICS],
            buffers=[p for _, p, kind in self.entries
                     if kind in BUFFERS])

    # -- arrays ---------------------------------------------------------------

    def array(self, number: int) -> Any:
        self._copies.statistics.flush()
        _, parameter, _ = self.entries[number]
        x = value_of(parameter)
        if x is None or self.contexts and x.ctx != self.contexts[0]:
            raise RuntimeError(
                "parameters must stay on the device of mgpu.initialize; "
                f"received {parameter.name!r} without a value there, as after "
                "reset_ctx, or a second initialize, of the network or of one "
                "that shares its parameters. Call mgpu.initialize(net, "
                "devices, init='keep', force_reinit=True).")
        return x

    def arrays(self, number: int) -> list[Any]:
        _, p, _ = self.entries[number]
        found = [self.array(number)]
        for i in range(1, len(self.contexts)):
            own = self._copies.statistics.own(i, p)
            found.append(self._copies.refreshed(i, p) if own is None else own)
        return found

    def write_statistics(self, number: int, values: Sequence[Any]) -> None:
        self._copies.statistics.write(self.entries[number][1], values)

    def written(self, number: int) -> None:
        self._copies.statistics.written(self.entries[number][1])

    # -- passes ---------------------------------------------------------------

    def run(self, calls: Mapping[int, Call], batch: Batch) -> dict[int, Any]:
        self._check_layers()
        self._mend_frozen()
        inputs = {i: self.in_order(*call) for i, call in calls.items()}
        for i, own in inputs.items():
            for x in own:
                if not is_array(x):
                    messages.refuse_foreign(x, self.backend.name)
                elif x.ctx != self.contexts[i]:
                    raise messages.wrong_device(self.contexts[i], x.ctx)
        with self.predicting(self._options.sync):
            return self._copies.run(inputs, batch)

    def probe(self, call: Call, device: int) -> Probed | None:
        return self._copies.probe(self.in_order(*call), device)

    def _block_parameters(self) -> list[list[Any]]:
        """The current parameters of each block. Faster than
        `named_parameters`."""
        return [parameters_of(block) for _, block in named_blocks(self.net)]

    def _check_layers(self) -> None:
        """Raise RuntimeError if parameters were added or replaced."""
        if self._held == (held := self._block_parameters()):
            return
        now = named_parameters(self.net)
        if now != self._named:
            raise messages.changed_layers(
                name for name in {**self._named, **now}
                if self._named.get(name) is not now.get(name))
        self._held = held


class _Drawn(mx.init.Initializer):
    """Initializer of one parameter by a function of its shape."""

    def __init__(self, draw: Callable[[tuple[int, ...]], np.ndarray]):
        super().__init__()
        self._draw = draw

    def _init_weight(self, _: Any, arr: Any) -> None:
        arr[:] = self._draw(arr.shape)
