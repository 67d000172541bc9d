"""A user's `gluon.Block`, which runs on several contexts."""
import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mgpu.backends import base, containers, messages
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


class MXNetNetwork(NetworkLayers):
    """A user's Block, and its copies on several contexts."""

    def __init__(self, backend: Any, net: Any):
        super().__init__(backend, net)
        self._options = base.Options()
        self._copies = ContextCopies(net, [])
        self._deferred = False      # a call of Gluon's makes the arrays
        self._named = named_parameters(net)
        self._held = self._block_parameters()
        self._constants = {id(p): start for _, block in named_blocks(net)
                           for p, start in constants(block)}

    def specs(self) -> list[base.Spec]:
        return [base.Spec(
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
        # MXNet's float32 kernel of a Dense layer, which cells and blocks of
        # the user's use too, computes the gradient of the bias together with
        # that of the weight: where the weight is frozen the bias would not
        # learn. So the weight's array gets a gradient, which Gluon does not
        # see.
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
            raise ValueError("the network has no parameters, so nothing "
                             "says where it is; pass devices=.")
        return self.entries[0][1].list_ctx()

    def predictors(self, devices) -> list[Any]:
        holders = self.devices()
        contexts = [self.backend.handle(d) for d in devices]
        if any(c not in holders for c in contexts):
            raise ValueError(f"the network is on {holders}; received "
                             f"{list(devices)}. Evaluate where it is.")

        def predict(context: Any, *inputs: Any, **named: Any) -> Any:
            with mx.Context(context), self.predicting(self._options.sync):
                return self._call(self.net, self.in_order(inputs, named))
        return [partial(predict, context) for context in contexts]

    def cast(self, dtype: str) -> None:
        self.net.cast(dtype)
        for _, p, _ in self.entries:    # values that wait, which Gluon forgets
            *how, data = p._deferred_init or (None,)
            if data is not None:
                p._deferred_init = (*how, data.astype(dtype))

    def _allocate(self, context: Any) -> None:
        """Arrays on one context, with the values that are there; what Gluon
        was told to draw is drawn as soon as its shape is known."""
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
                p._init_grad()      # copy.deepcopy leaves it out

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
        inputs = self.in_order(*base.apart(inputs))
        context = self.backend.handle(device)
        with self._undone_by_errors():      # an input that does not fit
            self._allocate(context)
            tree, outputs = run_aside(self.net, context, partial(
                self._call, inputs=inputs), {}, hooks=True)
            for x in containers.arrays_in(outputs, is_array):
                x.wait_to_read()        # its errors would come later
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
        try:
            bound = inspect.Signature(known).bind(*inputs, **named)
        except TypeError as error:
            raise TypeError(f"forward() {error}") from None
        if bound.kwargs:
            raise TypeError(
                "Gluon calls a Block with inputs by their place, so a name "
                "stands for the place that forward gives it; received "
                f"{list(bound.kwargs)}, which have none. Write each input as "
                "a parameter of forward, without a star before it.")
        last = max(i for i, p in enumerate(known) if p.name in named)
        bound.apply_defaults()
        return bound.args[:max(last + 1, len(inputs))]

    def _call(self, net: Any, inputs: tuple[Any, ...]) -> Any:
        """The outputs of the network or of a copy, in the array family of
        the inputs."""
        with self.backend.family_of(next(
                (x for x in inputs if x is not None), None)):
            return net(*inputs)

    def values(self) -> dict[str, np.ndarray] | None:
        self._copies.statistics.settle()
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

    def prepare(self, options: base.Options, devices: Sequence[Any]) -> None:
        if options.autocast is not None:
            raise ValueError(
                "autocast works on torch only; received "
                f"autocast={options.autocast!r} with the mxnet backend. Use "
                "autocast=None, or dtype='float16' for the whole network.")
        if options.hybridize:
            check_slopes(self.net, devices, True)
        self._options = options     # channels_last: MXNet has no such switch

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
            # Not static_shape, which is for one shape in all passes: shards
            # have two lengths, and the last batch is shorter.
            self.net.hybridize(static_alloc=True)
        self._copies = ContextCopies(
            self.net, self.contexts, call=self._call,
            run=lambda thunks: self.runner(thunks), one_backward=True,
            statistics=[p for _, p, kind in self.entries
                        if kind in base.STATISTICS],
            buffers=[p for _, p, kind in self.entries
                     if kind in base.BUFFERS])

    # -- arrays ---------------------------------------------------------------

    def array(self, number: int) -> Any:
        self._copies.statistics.settle()
        _, parameter, _ = self.entries[number]
        x = value_of(parameter)
        if x is None or self.contexts and x.ctx != self.contexts[0]:
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
        """The parameters that each block holds now; quick."""
        return [parameters_of(block) for _, block in named_blocks(self.net)]

    def _check_layers(self) -> None:
        """RuntimeError where the network has got other parameters."""
        if self._held == (held := self._block_parameters()):
            return
        now = named_parameters(self.net)
        if now != self._named:
            raise messages.changed_layers(
                name for name in {**self._named, **now}
                if self._named.get(name) is not now.get(name))
        self._held = held


class _Drawn(mx.init.Initializer):
    """An initializer for one parameter: a function of its shape."""

    def __init__(self, draw: Callable[[tuple[int, ...]], np.ndarray]):
        super().__init__()
        self._draw = draw

    def _init_weight(self, _: Any, arr: Any) -> None:
        arr[:] = self._draw(arr.shape)
