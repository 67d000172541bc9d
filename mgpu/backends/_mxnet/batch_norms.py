"""Batch-norm layers in passes that MXNet would take for others."""
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mgpu.backends import base, messages
from mgpu.backends._mxnet.blocks import is_known, named_blocks, parameters_of
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.layers import BATCH_NORM
from mgpu.backends._mxnet.ops import is_np


class BatchNorms:
    """The batch norms of a network.

    Parameters
    ----------
    net : Block
    entries : list of (name, Parameter, kind)
        Its parameters.
    """

    def __init__(self, net: Any, entries: Sequence[Any]) -> None:
        self.net, self._entries = net, list(entries)
        self._one_predicts = threading.RLock()      # threads share the layers
        blocks = [block for _, block in named_blocks(net)]
        #: those that code of the user's may call in predict_mode
        self._may_predict = [] if all(map(is_known, blocks)) else [
            block for block in blocks if isinstance(block, BATCH_NORM)]

    def layers(self) -> list[tuple[str, Any]]:
        """Refuses those that compute something else."""
        # A layer with use_global_stats predicts in training too.
        found = [(path, block) for path, block in named_blocks(self.net)
                 if isinstance(block, BATCH_NORM)
                 and not block._kwargs["use_global_stats"]]
        plain = mx.gluon.nn.BatchNorm
        own = [path for path, block in found
               if not isinstance(block, plain)      # BatchNormReLU
               or type(block).hybrid_forward is not plain.hybrid_forward
               or type(block).forward is not plain.forward]
        own += self.loose()
        if own:
            raise messages.own_batch_norm(own)
        return found

    def loose(self) -> list[str]:
        """Running statistics that are no batch-norm layer's: those of a
        SymbolBlock, or of a block that calls F.BatchNorm itself."""
        held = {id(p) for _, block in named_blocks(self.net)
                if isinstance(block, BATCH_NORM)
                for p in parameters_of(block)}
        return [name for name, p, kind in self._entries
                if kind in base.STATISTICS and id(p) not in held]

    @contextlib.contextmanager
    def predicting(self, sync: bool) -> Iterator[None]:
        """Inside the block, if it is recorded, batch norms that predict use
        their global statistics by name. MXNet's backward pass takes all
        others for layers in training, whatever their forward pass was."""
        if not mx.autograd.is_recording():
            with computing_by([(layer, partial(_not_joined, layer))
                               for layer in self._may_predict]
                              if sync and not
                              mx.autograd.is_training() else ()):
                yield
            return
        if mx.autograd.is_training():
            # The network's own code may end that for a layer.
            with computing_by([(layer, None) for layer in self._may_predict
                               if "forward" not in vars(layer)]):
                yield
            return
        loose = self.loose()
        if loose:
            raise ValueError(
                "a pass that predicts and is recorded takes batch norms from "
                f"gluon.nn; received running statistics of others: {loose}. "
                "Use gluon.nn.BatchNorm(use_global_stats=True) in their "
                "place, or record() in training mode.")
        with self._one_predicts, layer_by_layer(self.net), \
                by_global_statistics(
                    block for _, block in named_blocks(self.net)):
            yield

    @contextlib.contextmanager
    def computed_by(self, normalise: base.Normalise,
                    index: Callable[[Any], int]) -> Iterator[None]:
        """Inside the block layers that train compute by `normalise`, on the
        device ``index(x)``."""
        if any(not isinstance(block, mx.gluon.nn.BatchNorm)
               for block in hybridized(self.net)):
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
                kwargs["axis"], path), index(x))
            # Before F.BlockGrad elementwise functions would hand a gradient
            # without an array back to a layer, which ends the process.
            y = mx.nd.concat(y.as_nd_ndarray(), dim=0)
            return y.as_np_ndarray() if is_np(x) else y
        with computing_by([(layer, partial(forward, path, layer))
                           for path, layer in self.layers()]):
            yield


def hybridized(net: Any) -> list[Any]:
    """The blocks of `net` that run as compiled graphs."""
    return [block for _, block in named_blocks(net)
            if getattr(block, "_active", False)]


@contextlib.contextmanager
def layer_by_layer(net: Any) -> Iterator[None]:
    """Inside the block nothing of `net` runs as a compiled graph."""
    compiled = hybridized(net)
    for block in compiled:
        block._active = False
    try:
        yield
    finally:
        for block in compiled:
            block._active = True


@contextlib.contextmanager
def by_global_statistics(blocks: Iterable[Any]) -> Iterator[None]:
    """Inside the block batch norms use their running statistics by name."""
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
def computing_by(forwards: Sequence[
        tuple[Any, Callable[[Any], Any] | None]]) -> Iterator[None]:
    """Inside the block, layers compute by functions of mgpu (None: their
    own), but where the network's own code has ended the training mode."""
    def either(layer: Any, forward: Callable[[Any], Any] | None, x: Any
               ) -> Any:
        if mx.autograd.is_training():
            return type(layer).forward(layer, x) if forward is None \
                else forward(x)
        # Symbols are what all passes of a compiled network are made of.
        with by_global_statistics([layer] * isinstance(x, mx.nd.NDArray)):
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
