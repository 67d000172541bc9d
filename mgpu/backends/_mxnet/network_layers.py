"""Access to the layers of a network, for batch norm in prediction,
synchronized batch norm, and parity."""
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mgpu.backends import messages
from mgpu.backends._mxnet.blocks import (is_known, kind_of, named_blocks,
                                         named_parameters, parameters_of)
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.layers import (BATCH_NORM, Between, describe,
                                         is_layer)
from mgpu.backends._mxnet.ops import is_np
from mgpu.backends._mxnet.own_step import (MXNetParts, any_dtype_clipped,
                                           replaced)
from mgpu.backends._workers import run_in_turn
from mgpu.backends.network import (BUFFERS, STATISTICS, BatchNormCall, Network,
                                   Runner)
from mgpu.backends.probing import DrawMask, Layer, LayerCallback


class NetworkLayers(Network):
    """The methods of `Network` that access layers."""

    backend: Any

    def __init__(self, backend: Any, net: Any):
        self.backend, self.net = backend, net
        self.functions: dict[str, Layer] = {}
        self.contexts: list[Any] = []       # of the devices
        #: runs the thunks of devices, which synchronize in `use_batch_norm`
        self.runner: Runner = run_in_turn
        found: dict[int, Any] = {}
        for name, p in named_parameters(net).items():
            found.setdefault(id(p), (name, p, kind_of(name, p)))
        # Parameters first, then buffers, each in the order of the layers.
        self.entries = sorted(
            found.values(), key=lambda entry: entry[2] in BUFFERS)
        self._predicts = threading.RLock()      # threads share the layers
        blocks = [block for _, block in named_blocks(net)]
        self._norms = [x for x in blocks if isinstance(x, BATCH_NORM)]
        #: those that user code may call in predict_mode
        self._may_predict = [] if all(map(is_known, blocks)) else self._norms

    def layers(self) -> list[Layer]:
        names = {id(p): name for name, p, _ in self.entries}
        return [Layer(path, *describe(block), tuple(
                    names[id(p)] for p in parameters_of(block)
                    if id(p) in names))
                for path, block in self._leaves()]

    def _leaves(self) -> list[Any]:
        """Pairs (path, block) of the innermost blocks, each block once."""
        found: dict[int, Any] = {}
        for path, block in named_blocks(self.net, into_layers=False):
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

    def index(self, x: Any) -> int:
        """The device index of the context of `x`; 0 for an unknown context,
        as of a DataParallel."""
        return self.contexts.index(x.ctx) if x.ctx in self.contexts else 0

    @contextlib.contextmanager
    def watch_layers(self, seen: LayerCallback) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(layer_by_layer(self.net))
            for path, block in self._leaves():
                def report(_, inputs, outputs, path=path):
                    first = next((x for x in inputs
                                  if isinstance(x, mx.nd.NDArray)), None)
                    if first is not None:
                        seen(path, tuple(inputs), outputs, self.index(first))
                handle = block.register_forward_hook(report)
                stack.callback(handle.detach)
            stack.enter_context(Between(
                self.net, lambda path, x, output: seen(
                    path, (x,), output, self.index(x)),
                self.functions).watching(self._leaves()))
            yield

    @contextlib.contextmanager
    def use_masks(self, draw: DrawMask) -> Iterator[None]:
        def forward(layer: Any, x: Any) -> Any:
            return x * draw(x, layer._rate, tuple(layer._axes),
                            self.index(x))
        with layer_by_layer(self.net), computing_by([
                (layer, partial(forward, layer)) for _, layer in self._leaves()
                if type(layer) is mx.gluon.nn.Dropout]):
            yield

    def inner_dropout(self):
        return [(path, layer, "_dropout") for path, layer in self._leaves()
                if isinstance(layer, mx.gluon.rnn.rnn_layer._RNNLayer)
                and layer._num_layers > 1 and layer._dropout]

    @contextlib.contextmanager
    def natively(self, draw, begins, seen) -> Iterator[None]:
        def hook(call: Any) -> Any:     # called with inputs, or outputs
            return lambda *arguments: call(arguments[-1]) \
                if mx.autograd.is_recording() else None
        with contextlib.ExitStack() as stack:
            for handle in (self.net.register_forward_pre_hook(hook(begins)),
                           self.net.register_forward_hook(hook(seen))):
                stack.callback(handle.detach)
            stack.enter_context(self.use_masks(draw))
            stack.enter_context(any_dtype_clipped())
            yield

    def trains(self, path) -> bool | None:
        return mx.autograd.is_training() if mx.autograd.is_recording() \
            else None

    def own_parts(self, parts) -> MXNetParts:
        trained, buffers = ({
            name: p for name, p, kind in self.entries
            if (kind in BUFFERS) == is_buffer}
            for is_buffer in (False, True))
        return MXNetParts(trained, buffers, parts)

    # -- batch norms ----------------------------------------------------------

    def _loose(self) -> list[str]:
        """Running statistics outside of batch-norm layers: of a SymbolBlock,
        or of a block that calls F.BatchNorm."""
        held = {id(p) for block in self._norms for p in parameters_of(block)}
        return [name for name, p, kind in self.entries
                if kind in STATISTICS and id(p) not in held]

    @contextlib.contextmanager
    def predicting(self, sync: bool) -> Iterator[None]:
        """Context manager in which batch norms of recorded predictions have
        use_global_stats. Without it, MXNet's backward pass treats them as in
        training mode."""
        recording, training = mx.autograd.is_recording(), \
            mx.autograd.is_training()
        if not recording or training:
            # User code may change the mode for a layer.
            with computing_by([
                    (layer, None if recording else partial(_not_joined, layer))
                    for layer in self._may_predict
                    if recording or sync and not training]):
                yield
            return
        loose = self._loose()
        if loose:
            raise ValueError(
                "a recorded prediction supports batch norms of gluon.nn; "
                f"received running statistics of others: {loose}. "
                "Use gluon.nn.BatchNorm(use_global_stats=True) in their "
                "place, or record() in training mode.")
        with self._predicts, layer_by_layer(self.net), computing_by(
                [(layer, None) for layer in self._norms]):
            yield

    @contextlib.contextmanager
    def use_batch_norm(self, normalize, run) -> Iterator[None]:
        plain = mx.gluon.nn.BatchNorm
        if any(not isinstance(block, plain) for block in hybridized(self.net)):
            raise ValueError(
                "batch_norm='sync' does not support hybridized networks; "
                "received one. Call net.hybridize(False) first.")
        # A layer with use_global_stats predicts in training too.
        found = [(path, block) for path, block in named_blocks(self.net)
                 if isinstance(block, BATCH_NORM)
                 and not block._kwargs["use_global_stats"]]
        own = [path for path, block in found
               if not isinstance(block, plain)      # BatchNormReLU
               or type(block).hybrid_forward is not plain.hybrid_forward
               or type(block).forward is not plain.forward]
        if own or self._loose():
            raise messages.own_batch_norm(own + self._loose())

        def forward(path: str, layer: Any, x: Any) -> Any:
            kwargs = layer._kwargs
            gamma, beta, mean, var = (p.data(x.ctx) for p in (
                layer.gamma, layer.beta, layer.running_mean,
                layer.running_var))
            y = normalize(BatchNormCall(
                x, None if kwargs["fix_gamma"] else gamma, beta, mean, var,
                kwargs["eps"], float(np.float32(kwargs["momentum"])),
                kwargs["axis"], path), self.index(x))
            # Before F.BlockGrad, elementwise functions would pass a gradient
            # without an array to a layer, which aborts the process.
            y = mx.nd.concat(y.as_nd_ndarray(), dim=0)
            return y.as_np_ndarray() if is_np(x) else y
        with replaced(self, "runner", run), computing_by([
                (layer, partial(forward, path, layer))
                for path, layer in found]):
            yield


def hybridized(net: Any) -> list[Any]:
    """The blocks of `net` that run as compiled graphs."""
    return [block for _, block in named_blocks(net)
            if getattr(block, "_active", False)]


@contextlib.contextmanager
def layer_by_layer(net: Any) -> Iterator[None]:
    """Context manager in which no block of `net` runs as a compiled
    graph."""
    with contextlib.ExitStack() as stack:
        for block in hybridized(net):
            stack.enter_context(replaced(block, "_active", False))
        yield


@contextlib.contextmanager
def computing_by(forwards: Sequence[
        tuple[Any, Callable[[Any], Any] | None]]) -> Iterator[None]:
    """Context manager in which training layers compute with functions of mgpu
    (None: with their own), and predicting batch norms have
    use_global_stats."""
    with contextlib.ExitStack() as stack:
        for layer, forward in forwards:
            stack.enter_context(replaced(layer, "forward", partial(
                _by_mode, layer, layer.forward, forward)))
        yield


def _by_mode(layer: Any, own: Callable[[Any], Any],
             forward: Callable[[Any], Any] | None, x: Any) -> Any:
    if mx.autograd.is_training():
        return (forward or own)(x)
    # A symbol traces all passes of a compiled network.
    if not isinstance(layer, BATCH_NORM) or not isinstance(x, mx.nd.NDArray):
        return own(x)
    with replaced(layer, "_active", False), replaced(layer, "_kwargs", {
            **layer._kwargs, "use_global_stats": True}):
        return own(x)


def _not_joined(layer: Any, _: Any) -> Any:
    raise ValueError(
        "batch_norm='sync' supports training passes; received "
        f"{layer.name!r}, which the network has set to training mode in a "
        "prediction, on several devices. Run the pass inside mgpu.record(), "
        "or use one device.")
