"""`mgpu.DataParallel` of a Gluon block, see `mgpu.backends._mxnet.copies`.

The outputs are joined in the recorded graph, so the loss and the backward
pass are Gluon's.
"""
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

from mgpu.backends._mxnet.block_tree import on_context
from mgpu.backends._mxnet.copies import ContextCopies, run_aside
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.network_layers import NetworkLayers
from mgpu.backends.containers import Batch, Call
from mgpu.backends.types import Device
from mgpu.backends.wrapper import Wrapper, delegate

autograd, gluon = mx.autograd, mx.gluon


class Arrays:
    """See `mgpu.data.examples.Arrays`.

    Uses MXNet's operators with second derivatives: gather_nd, scatter_nd and
    add_n. Slices, take and concat have none.
    """

    @staticmethod
    def sequences(x: Any) -> None:
        """MXNet has no packed batches."""

    @staticmethod
    def time_major(net: Any) -> list[str]:
        found: list[str] = []
        net.apply(lambda block: found.append(block.name) if getattr(
            block, "_layout", "")[:1] == "T" else None)
        return found

    @classmethod
    def take(cls, x: Any, axis: int, start: int, stop: int, device: Any
             ) -> Any:
        if not cls._is_recorded(x):
            return on_context(
                x[(slice(None),) * axis + (slice(start, stop),)], device)
        part = mx.nd.gather_nd(_axis_first(x.as_nd_ndarray(), axis),
                               cls._indices(start, stop, x.ctx))
        return on_context(_like(_axis_first(part, axis), x), device)

    to = staticmethod(on_context)

    @classmethod
    def concat(cls, arrays: Sequence[Any], axis: int, device: Any) -> Any:
        arrays = [on_context(x, device) for x in arrays]
        if not cls._is_recorded(arrays[0]):
            return mx.np.concatenate(arrays, axis=axis) if isinstance(
                arrays[0], mx.np.ndarray) else mx.nd.concat(
                *arrays, dim=axis)
        ends = np.cumsum([0] + [x.shape[axis] for x in arrays]).tolist()
        spread = []
        for x, start, stop in zip(arrays, ends, ends[1:], strict=False):
            x = _axis_first(x.as_nd_ndarray(), axis)
            spread.append(mx.nd.scatter_nd(
                x, cls._indices(start, stop, device),
                shape=(ends[-1], *x.shape[1:])))
        return _like(_axis_first(mx.nd.add_n(*spread), axis), arrays[0])

    @staticmethod
    def _indices(start: int, stop: int, context: Any) -> Any:
        # Detached: MXNet frees a graph together with its constants.
        return _arange(start, stop, context).detach()

    @staticmethod
    def _is_recorded(x: Any) -> bool:
        return autograd.is_recording() and np.dtype(x.dtype).kind == "f"


def _axis_first(x: Any, axis: int) -> Any:
    """`x` with `axis` and axis 0 swapped."""
    return x.swapaxes(0, axis) if axis else x


@lru_cache(maxsize=64)
def _arange(start: int, stop: int, context: Any) -> Any:
    return mx.nd.arange(start, stop, dtype="int64", ctx=context
                        ).reshape((1, -1))


def _like(x: Any, other: Any) -> Any:
    """`x` in the array family of `other`."""
    return x.as_np_ndarray() if isinstance(other, mx.np.ndarray) else x


class DataParallel(Wrapper, gluon.Block):  # type: ignore[name-defined]
    """See `mgpu.training.data_parallel.DataParallel`.

    Parameters, children and attributes are those of the network.
    """

    _copies: ContextCopies
    _split: Any                         # a BatchSplit
    _layers: NetworkLayers
    _synchronize: Callable[[Sequence[int]], Any] | None

    def __init__(self, layers: NetworkLayers, contexts: Sequence[Any],
                 split: Any, remake: Callable[[Any], Any],
                 synchronize: Callable[[Sequence[int]], Any] | None) -> None:
        net, layers.contexts = layers.net, list(contexts)
        self.__dict__.update({name: vars(net)[name] for name in (
            "_empty_prefix", "_prefix", "_params", "_name", "_scope",
            "_children", "_reg_params")})
        self.__dict__.update(
            module=net, _forward_hooks=type(net._forward_hooks)(),
            _forward_pre_hooks=type(net._forward_pre_hooks)(),
            _copies=ContextCopies(
                net, contexts, run=lambda thunks: layers.runner(thunks)),
            _split=split, _remake=remake, _layers=layers,
            _synchronize=synchronize)

    def forward(self, *args: Any) -> Any:
        copies, split = self._copies, self._split
        size = split.size(args, {})
        contexts = copies.contexts[:size or 1]
        if len(contexts) == 1:
            copies.check_count(1)
            return self.module(*args)

        def run(calls: dict[int, Call], batch: Batch) -> dict[int, Any]:
            with self._joint(list(calls), calls[0][0]):
                return copies.run({i: inputs for i, (inputs, _)
                                   in calls.items()}, batch)

        def probe(call: Callable[[], Call], n: int) -> Any:
            with autograd.pause():
                inputs, _ = call()
            return copies.probe(inputs, n)
        return split.run(
            args, {}, size, contexts,
            (autograd.is_training(), autograd.is_recording()), run, probe,
            lambda: run_aside(self.module, contexts[0],
                              lambda net: net(*args), {},
                              autograd.is_training())[1])

    def _joint(self, active: Sequence[int], inputs: tuple[Any, ...]
               ) -> AbstractContextManager[None]:
        """Context manager in which training batch norms have joint
        statistics, if requested."""
        if self._synchronize is None:
            return nullcontext()
        if any(p._deferred_init for p in self.collect_params().values()):
            home = self._copies.contexts[0]     # shapes, before the barriers
            self._layers.infer_shapes(inputs, Device(
                home.device_type, home.device_id))
        if autograd.is_recording() and autograd.is_training():
            return self._layers.use_batch_norm(*self._synchronize(active))
        return self._layers.predicting(True)


delegate(DataParallel, gluon.Block, (
    "collect_params", "save_parameters", "load_parameters", "initialize",
    "hybridize", "cast", "apply", "summary", "register_child", "save", "load",
    "setattr", "share_parameters"))
