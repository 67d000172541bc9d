"""Source and weights as files."""
import ast
import contextlib
import importlib.util
import io
import os
from collections.abc import Mapping

import numpy as np
import torch

from mgpu.backends._torch.gluon.source.writing import Source, source_of
from mgpu.gluon_io.created import with_inputs
from mgpu.gluon_io.graph import Graph, check_fit, dense_arrays, load_graph
from mgpu.gluon_io.parts import Shape
from mgpu.utils.files import (FilePath, check_not_other, check_not_read,
                              part_of, path_of)


def gluon_source(symbol: FilePath, params: FilePath | None, path: FilePath,
                 plain: bool) -> dict[str, str]:
    """See `mgpu.gluon_source`."""
    graph = load_graph(symbol)
    arrays = None if params is None else dense_arrays(params)
    title = os.path.basename(path_of(symbol)).removesuffix(".json") \
        .removesuffix("-symbol")
    shapes = _marked(graph) if arrays is None else {
        k: x.shape for k, x in arrays.items()}
    if arrays is not None:
        check_fit(graph, arrays)
    else:
        unknown = [node.name for node in graph.nodes if node.op == "null"
                   and "__shape__" in node.marks and node.name not in shapes]
        if unknown:
            raise ValueError(
                "source needs the sizes of all arrays; received no file of "
                "them, and a graph without that of "
                f"{', '.join(map(repr, unknown[:5]))}. Pass net-0000.params.")
    safe = importlib.util.find_spec("safetensors") is not None
    graph = with_inputs(graph, shapes)
    source = source_of(graph, shapes, title, plain, safe, {
        k for k, x in (arrays or {}).items() if x.dtype.kind != "f"})
    written: dict[str, bytes] = {path_of(path): source.text.encode()}
    if arrays is not None:
        weights = weights_of(source, arrays)
        beside = os.path.splitext(path_of(path))[0]
        if safe and not source.shared:
            from safetensors.torch import save
            written[beside + ".safetensors"] = save(weights)
        else:
            memory = io.BytesIO()
            torch.save(weights, memory)
            written[beside + ".pt"] = memory.getvalue()
    for file in written:
        check_not_read(file, symbol, params)
    with contextlib.ExitStack() as stack:   # both, or none
        for file, data in written.items():
            part = stack.enter_context(part_of(file))
            with open(part, "wb") as stream:
                stream.write(data)
            check_not_other(part, file)
    return source.names


def weights_of(source: Source, arrays: Mapping[str, np.ndarray]
               ) -> dict[str, torch.Tensor]:
    """What the source's ``load`` reads."""
    found = {}
    for own, name in source.names.items():
        x = torch.from_numpy(np.array(arrays[name.partition(":")[2]]))
        found[own] = x.fill_(source.values[own]) \
            if own in source.values else x
    return {**found, **{own: torch.tensor(0) for own in source.counters}}


def _marked(graph: Graph) -> dict[str, Shape]:
    """Shapes that stand in the graph, which has them where the layers were
    made with the sizes of what enters them."""
    found = {}
    for node in graph.nodes:
        shape = ast.literal_eval(node.marks.get("__shape__", "()"))
        if node.op == "null" and shape and all(n > 0 for n in shape):
            found[node.name] = tuple(shape)
    return found
