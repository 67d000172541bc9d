"""Layers of a network, one by one: for joint batch norm and parity."""
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from mgpu.backends import base
from mgpu.backends._mxnet.batch_norms import (BatchNorms, computing_by,
                                              layer_by_layer)
from mgpu.backends._mxnet.blocks import (named_blocks, named_parameters,
                                         kind_of, parameters_of)
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.layers import Between, describe, is_layer
from mgpu.backends._mxnet.own_step import MXNetParts, any_dtype_clipped
from mgpu.backends._mxnet.statistics import DeviceStatistics


class NetworkLayers(base.Network):
    """What `base.Network` gives of single layers."""

    backend: Any
    statistics: DeviceStatistics

    def __init__(self, backend: Any, net: Any):
        self.backend, self.net = backend, net
        self.functions: dict[str, base.Layer] = {}
        self._contexts: list[Any] = []      # of `place`
        #: runs the thunks of devices, which meet in `use_batch_norm`
        self.runner: base.Runner | None = None
        found: dict[int, Any] = {}
        for name, p in named_parameters(net).items():
            found.setdefault(id(p), (name, p, kind_of(name, p)))
        # Parameters first, then buffers, each in the order of the layers.
        self.entries = sorted(
            found.values(), key=lambda entry: entry[2] in base.BUFFERS)
        self.batch_norms = BatchNorms(net, self.entries)

    def layers(self) -> list[base.Layer]:
        names = {id(p): name for name, p, _ in self.entries}
        return [base.Layer(path, *describe(block), tuple(
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

    def _index(self, x: Any) -> int:
        """The device whose context `x` is on."""
        return self._contexts.index(x.ctx)

    @contextlib.contextmanager
    def watch_layers(self, seen: base.LayerCallback) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(layer_by_layer(self.net))
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
    def use_batch_norm(self, normalise, run) -> Iterator[None]:
        before, self.runner = self.runner, run
        self.statistics.joint = True
        try:
            with self.batch_norms.computed_by(normalise, self._index):
                yield
        finally:
            self.runner = before
