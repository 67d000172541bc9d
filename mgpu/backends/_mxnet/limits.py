"""Networks that MXNet would train wrongly, which mgpu does not take."""
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mgpu.backends import messages
from mgpu.backends._mxnet.blocks import named_blocks
from mgpu.backends._mxnet.framework import mx

_FUSED = (mx.gluon.rnn.RNN, mx.gluon.rnn.LSTM, mx.gluon.rnn.GRU)


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
    for path, block in named_blocks(net):
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


def check_parameters(net: Any, entries: Sequence[Any]) -> None:
    """ValueError for sparse parameters, and those that Gluon's own Trainer
    does not train."""
    sparse = [name for name, p, _ in entries
              if {p._stype, p._grad_stype} != {"default"}]
    if sparse:
        raise messages.sparse_gradient(sparse)
    collected = set(map(id, net.collect_params().values()))
    left_out = [name for name, p, _ in entries
                if id(p) not in collected and p.grad_req != "null"]
    if left_out:
        raise ValueError(
            "mgpu trains what Gluon's own Trainer trains, "
            "net.collect_params(); received parameters that it leaves "
            f"out: {', '.join(map(repr, left_out))}. Make a parameter "
            "with self.params.get(name, shape=...) if it is to learn; "
            "set its grad_req = 'null' if not.")


def check_layers(net: Any, entries: Sequence[Any], dtype: str | None,
                 devices: Sequence[Any]) -> None:
    """ValueError for layers whose gradients MXNet computes wrongly on
    `devices`, cast to `dtype`."""
    joined = [path for path, block in named_blocks(net)
              if isinstance(block, mx.gluon.contrib.nn.SyncBatchNorm)]
    if joined and len(devices) > 1:
        raise ValueError(
            "SyncBatchNorm of Gluon waits for ever for a device without "
            f"rows, and weighs all devices alike; received {joined} on "
            f"{len(devices)} devices. Use gluon.nn.BatchNorm and "
            "batch_norm='sync'.")
    wide = [path for path, block in named_blocks(net)
            if isinstance(block, _FUSED)
            and np.dtype(dtype or block.l0_i2h_weight.dtype) == np.float64]
    if wide and any(d.kind == "cpu" for d in devices):
        raise ValueError(
            "MXNet computes wrong float64 gradients of its recurrent "
            f"layers on CPUs; received float64 for {wide}. Use "
            "dtype='float32', or cells (gluon.rnn.LSTMCell) with "
            "begin_state= in float64.")
    check_slopes(net, devices)
    kinds = {np.dtype(dtype or p.dtype) for _, p, _ in entries}
    if np.dtype("float32") in kinds \
            and any(d.kind == "cpu" for d in devices) \
            and os.environ.get("MXNET_MKLDNN_ENABLED") != "0" \
            and (wrong := [*dict.fromkeys(_last_windows(net))]):
        raise ValueError(
            "MXNet computes a wrong float32 gradient of average pooling "
            "on CPUs where the last window goes beyond the edge; received "
            f"{wrong} with ceil_mode=True. Use count_include_pad=False, "
            "dtype='float64', or the environment variable "
            "MXNET_MKLDNN_ENABLED=0.")


def check_slopes(net: Any, devices: Sequence[Any], all_of: bool = False
                 ) -> None:
    """ValueError for PReLUs in compiled blocks; `all_of`: the whole network
    is to be compiled."""
    wrong = list(_compiled_slopes(net, inside=all_of))
    if wrong and any(d.kind == "cpu" for d in devices):
        raise ValueError(
            "MXNet computes a wrong gradient of the slope of a PReLU in a "
            f"compiled network on CPUs; received {wrong}. Call "
            "net.hybridize(False), and leave hybridize=True out; a "
            "SymbolBlock trains on torch, by mgpu.from_gluon.")
