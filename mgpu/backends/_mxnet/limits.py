"""Checks for networks whose gradients MXNet computes wrongly."""
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mgpu.backends import messages
from mgpu.backends._mxnet.blocks import named_blocks
from mgpu.backends._mxnet.framework import mx

_FUSED = (mx.gluon.rnn.RNN, mx.gluon.rnn.LSTM, mx.gluon.rnn.GRU)


def _nodes(block: Any) -> list[Any]:
    """The operators in the cached graph of a block."""
    graph = getattr(block, "_cached_graph", ())
    return json.loads(graph[1].tojson())["nodes"] if graph else []


def _last_windows(net: Any) -> Iterator[str]:
    """Yield the average poolings whose last window exceeds the input."""
    for path, block in named_blocks(net):
        for name, options in [(path, getattr(block, "_kwargs", None)), *(
                (node["name"], node.get("attrs")) for node in _nodes(block)
                if node["op"] == "Pooling")]:
            own = {key: str(x) for key, x in (options or {}).items()}
            if (own.get("pooling_convention"), own.get("pool_type")) == (
                    "full", "avg") and own.get("global_pool") != "True" \
                    and own.get("count_include_pad") != "False":
                yield name


def check_parameters(net: Any, entries: Sequence[Any]) -> None:
    """Raise ValueError for sparse parameters, and for trainable ones outside
    of ``net.collect_params()``."""
    sparse = [name for name, p, _ in entries
              if {p._stype, p._grad_stype} != {"default"}]
    if sparse:
        raise messages.sparse_gradient(sparse)
    collected = set(map(id, net.collect_params().values()))
    left_out = [name for name, p, _ in entries
                if id(p) not in collected and p.grad_req != "null"]
    if left_out:
        raise ValueError(
            "trainable parameters must be in net.collect_params(), as for "
            "Gluon's Trainer; received others: "
            f"{', '.join(map(repr, left_out))}. Create a parameter with "
            "self.params.get(name, shape=...) to train it, or set "
            "grad_req = 'null'.")


def check_layers(net: Any, entries: Sequence[Any], dtype: str | None,
                 devices: Sequence[Any]) -> None:
    """Raise ValueError for layers whose gradients MXNet computes wrongly on
    `devices`, cast to `dtype`."""
    blocks, count = list(named_blocks(net)), len(devices)
    on_cpu = any(d.kind == "cpu" for d in devices)
    # Whether MXNet uses oneDNN, for float32 on CPUs.
    library = on_cpu and os.environ.get("MXNET_MKLDNN_ENABLED") != "0" \
        and np.dtype("float32") in {np.dtype(dtype or p.dtype)
                                    for _, p, _ in entries}
    for applies, wrong, text in (
            (count > 1, [path for path, block in blocks if isinstance(
                block, mx.gluon.contrib.nn.SyncBatchNorm)],
             "Gluon's SyncBatchNorm is not supported, because it hangs if a "
             "device has no examples, and weights all devices equally; "
             "received {} on {} devices. Use gluon.nn.BatchNorm and "
             "batch_norm='sync'."),
            (on_cpu, [path for path, block in blocks
                      if isinstance(block, _FUSED) and np.dtype(
                          dtype or block.l0_i2h_weight.dtype) == np.float64],
             "MXNet computes wrong float64 gradients of its recurrent "
             "layers on CPUs; received float64 for {}. Use "
             "dtype='float32', or cells (gluon.rnn.LSTMCell) with "
             "begin_state= in float64."),
            (library and count > 1, [
                path for path, block in blocks
                if getattr(block, "_op_name", "") == "Deconvolution"],
             "MXNet has no float32 gradient of a transposed convolution on "
             "several CPU devices; received {} on {} devices. Use float64, "
             "one device, or the environment variable "
             "MXNET_MKLDNN_ENABLED=0."),
            (library, [*dict.fromkeys(_last_windows(net))],
             "MXNet computes a wrong float32 gradient of average pooling "
             "on CPUs if the last window exceeds the input; received "
             "{} with ceil_mode=True. Use count_include_pad=False, "
             "dtype='float64', or the environment variable "
             "MXNET_MKLDNN_ENABLED=0.")):
        if applies and wrong:
            raise ValueError(text.format(wrong, count))
    check_slopes(net, devices)


def check_slopes(net: Any, devices: Sequence[Any], all_of: bool = False
                 ) -> None:
    """Raise ValueError for PReLUs whose input is computed by a compiled
    graph. `all_of`: the whole network will be compiled."""
    blocks = list(named_blocks(net))
    compiled = tuple(path and path + "." for path, block in blocks
                     if all_of or getattr(block, "_active", False))
    wrong = [path for path, block in blocks
             if path and isinstance(block, mx.gluon.nn.PReLU)
             and path.startswith(compiled)]
    for _, block in blocks:
        nodes = _nodes(block) if isinstance(block, mx.gluon.SymbolBlock) \
            or getattr(block, "_active", False) else []
        wrong += [node["name"] for node in nodes
                  if node["op"] == "LeakyReLU"
                  and node.get("attrs", {}).get("act_type") == "prelu"
                  and nodes[node["inputs"][0][0]]["op"] != "null"]
    if wrong and any(d.kind == "cpu" for d in devices):
        raise ValueError(
            "MXNet computes a wrong gradient of the slope of a PReLU in a "
            f"compiled network on CPUs; received {wrong}. Call "
            "net.hybridize(False), and omit hybridize=True; train a "
            "SymbolBlock on torch, with mgpu.from_gluon.")
