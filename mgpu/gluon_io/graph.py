"""A network that Gluon has exported: the graph in ``model-symbol.json``.

The file writes an operator's attributes as texts, and leaves out those that
nobody has given. What they are then, and of which type, stands in
``operators.json``, which ``studies/gluon_operators.py`` makes from MXNet.
"""
import ast
import functools
import json
import re
from collections.abc import Collection, Container, Mapping
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from mgpu.errors import UnreadableSymbol
from mgpu.gluon_io.params import load_params
from mgpu.utils.files import FilePath, path_of

#: whose gradient is 1, whatever follows
LOSSES = ("MakeLoss", "make_loss")
#: a softmax that takes a label, and has the gradient of the loss
SOFTMAX = ("SoftmaxOutput", "Softmax")


class Node(NamedTuple):
    """One operator of a graph, or one array that enters it (`op` "null").

    Attributes
    ----------
    name : str
    op : str
    attributes : dict
        Those of the operator, all of them where `operators.json` knows it, as
        numbers, tuples, texts, booleans or None. Texts elsewhere.
    marks : dict of str to str
        What stands between underscores: ``__lr_mult__``, ``__shape__``.
    inputs : tuple of (int, int)
        For each input the number of a node, and which of its outputs.
    """

    name: str
    op: str
    attributes: dict[str, Any]
    marks: dict[str, str]
    inputs: tuple[tuple[int, int], ...]


class Graph(NamedTuple):
    """Nodes in an order in which they can be computed; `heads` are the
    outputs, in the form of `Node.inputs`. `numpy_shapes`: whether it is of
    the NumPy interface."""

    nodes: tuple[Node, ...]
    heads: tuple[tuple[int, int], ...]
    numpy_shapes: bool = False


def load_graph(path: FilePath) -> Graph:
    """The graph of a ``-symbol.json`` of MXNet, of any version from 0.9 on.

    Raises
    ------
    UnreadableSymbol
        If the file is another one, or names an attribute or a value that the
        operator does not have.
    OSError
        If it cannot be opened.
    """
    path = path_of(path)
    with open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
            nodes = tuple(map(_node, found["nodes"]))
            heads = tuple((int(i), int(k)) for i, k, *_ in found["heads"])
            numpy_shapes = bool(found.get("attrs", {}).get(
                "is_np_shape", (0, 0))[1])
            for i, node in enumerate(nodes):
                if not all(0 <= j < i and k >= 0 for j, k in node.inputs):
                    raise ValueError(f"node {node.name!r} has inputs that "
                                     "come after it")
            if not heads or not all(0 <= i < len(nodes) for i, _ in heads):
                raise ValueError("its outputs are not in it")
        except (ValueError, TypeError, LookupError, AttributeError,
                ArithmeticError, SyntaxError, RecursionError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else error
            raise UnreadableSymbol(
                "expected a graph that MXNet has exported; "
                f"{path!r} is not one, or is damaged ({why}). Export the "
                "network again, or use a whole file.") from error
    return Graph(nodes, heads, numpy_shapes)


def _node(found: Any) -> Node:
    # Before MXNet 1.0 they stood under "attr", those of operators before
    # 0.9.3 under "param".
    texts = {**found.get("param", {}), **found.get("attr", {}),
             **found.get("attrs", {})}
    marks = {k: str(v) for k, v in texts.items()
             if k.startswith("__") and k.endswith("__")}
    name, op = str(found["name"]), str(found["op"])
    own = {k: str(v) for k, v in texts.items() if k not in marks}
    return Node(name, op, own if op == "null" else _attributes(op, name, own),
                marks, tuple((int(i), int(k)) for i, k, *_ in
                             found["inputs"]))


def dense_arrays(path: FilePath) -> dict[str, np.ndarray]:
    """The arrays of a network by the names of its graph: those of a
    ``.params`` without ``arg:`` and ``aux:``. ValueError for a file without
    names, or with sparse arrays."""
    # MXNet writes no names where there are no arrays.
    found = load_params(path) or {}
    if not isinstance(found, dict):
        raise ValueError("the arrays of a network have names; received a file "
                         "without. Use what HybridBlock.export writes.")
    arrays = {}
    for key, x in found.items():
        name = key.removeprefix("arg:").removeprefix("aux:")
        if not isinstance(x, np.ndarray):
            raise ValueError("the arrays of a network are dense; received "
                             f"{type(x).__name__} for {key!r}.")
        if name in arrays:
            raise ValueError("an array of a network has one value; received "
                             f"{name!r} twice.")
        arrays[name] = x
    return arrays


def check_fit(graph: Graph, arrays: Collection[str]) -> None:
    """ValueError unless these are the names of the arrays of this graph.
    Gluon marks its parameters in the graph, and no inputs."""
    names = {node.name for node in graph.nodes}
    strange = [name for name in sorted(arrays) if name not in names]
    if strange:
        raise ValueError(
            "the graph and the arrays belong together; received the arrays "
            f"{', '.join(strange[:5])}, which the graph has not. Use the two "
            "files of one export.")
    for node in graph.nodes:
        if node.op == "null" and "__lr_mult__" in node.marks \
                and node.name not in arrays:
            raise ValueError(
                f"the graph has the array {node.name!r}; the file of arrays "
                "has not. Use the two files of one export.")


def entries(graph: Graph, arrays: Container[str]) -> list[str]:
    """The inputs of a network: what enters its graph and is no array of the
    file. Those that ``HybridBlock.export`` has numbered (``data0``,
    ``data1``) are in that order, which is that of the block's arguments;
    others in the order of the graph."""
    found = [node.name for node in graph.nodes
             if node.op == "null" and node.name not in arrays]
    numbers = [re.fullmatch(r"data(\d+)", name) for name in found]
    if all(numbers):
        found.sort(key=lambda name: int(name.removeprefix("data")))
    return found


def fixed_gammas(graph: Graph) -> set[str]:
    """The arrays that batch norm takes as 1, whatever the file has: MXNet
    writes 1 into them in the first pass."""
    return {graph.nodes[node.inputs[1][0]].name for node in graph.nodes
            if node.attributes.get("fix_gamma") is True
            and len(node.inputs) > 1}


#: the input of an operator that holds numbers of rows, by its name without
#: what stands before it in other interfaces
_INDICES = {"take": 1, "pick": 1, "gather_nd": 1, "one_hot": 0,
            "Embedding": 0, "embedding": 0}


def constants(graph: Graph) -> set[str]:
    """The arrays that nothing trains: those that a block got by
    ``get_constant``, which MXNet marks by the initializer that it registers
    for each; and those that are nothing but indices."""
    uses: dict[int, set[bool]] = {}
    for node in graph.nodes:
        own = node.op.removeprefix("_npi_").removeprefix("_npx_")
        for slot, (i, _) in enumerate(node.inputs):
            uses.setdefault(i, set()).add(_INDICES.get(own) == slot)
    return {node.name for i, node in enumerate(graph.nodes)
            if node.op == "null" and (uses.get(i) == {True} or node.marks.get(
                "__init__", "").startswith("Constant_"))}


def without_softmax(graph: Graph) -> Graph:
    """The graph with what enters a ``SoftmaxOutput`` at its end in the place
    of the probabilities."""
    return Graph(graph.nodes, tuple(
        graph.nodes[i].inputs[0] if graph.nodes[i].op in SOFTMAX else (i, k)
        for i, k in graph.heads))


def with_dtype(graph: Graph, before: Container[str], dtype: str) -> Graph:
    """The graph whose operators make arrays of `dtype` where they made those
    of the dtypes `before`: those of its parameters."""
    return graph._replace(nodes=tuple(
        node._replace(attributes={**node.attributes, "dtype": dtype})
        if node.attributes.get("dtype") in before else node
        for node in graph.nodes))


def symbol_of_dtype(path: FilePath, before: Container[str], dtype: str) -> str:
    """The file of a graph as `with_dtype` changes it."""
    graph = load_graph(path)
    with open(path_of(path), encoding="utf-8") as file:
        found = json.load(file)
    for given, old, new in zip(found["nodes"], graph.nodes, with_dtype(
            graph, before, dtype).nodes):
        if old != new:
            where = [k for k in ("attrs", "param", "attr") if k in given]
            given.setdefault(*where[:1] or ["attrs"], {})["dtype"] = dtype
    return json.dumps(found)


@functools.cache
def operators() -> dict[str, dict[str, list[Any]]]:
    """For each known operator the types and defaults of its attributes:
    ``{"axis": ["int", "-1"]}``; a default of None is no default."""
    text = resources.files("mgpu.gluon_io").joinpath("operators.json")
    return dict(json.loads(text.read_text(encoding="utf-8")))


def _attributes(op: str, name: str, texts: Mapping[str, str]
                ) -> dict[str, Any]:
    known = operators().get(op)
    if known is None:
        return dict(texts)
    # A node carries what its scope had set: context, a group of devices; and
    # how many inputs it has.
    strange = sorted(texts.keys() - known.keys() - {
        "ctx_group", "lr_mult", "wd_mult", "num_args"})
    if strange:
        raise ValueError(f"{op} {name!r} has the attributes {strange}, which "
                         "MXNet 1.9.1 does not know")
    found = {}
    for key, (kind, default) in known.items():
        if key not in texts and default is None:
            raise ValueError(f"{op} {name!r} has no {key}")
        found[key] = _value(kind, texts.get(key, default))
    return found


def _value(kind: str, text: str) -> Any:
    """The value of an attribute, as MXNet reads its text."""
    if text == "None":
        return None
    if kind == "str":
        return text
    if kind == "bool":
        return {"True": True, "1": True, "true": True, "False": False,
                "0": False, "false": False}[text]
    if kind in ("float", "double") and text.strip("+-") in ("inf", "nan"):
        return float(text)
    value = ast.literal_eval(text.replace("L", ""))
    if kind == "shape":
        return _shape(value)
    if kind == "shapes":
        return tuple(map(_shape, value))
    if kind == "floats":
        return tuple(map(float, value)) \
            if isinstance(value, (tuple, list)) else (float(value),)
    if kind == "int":
        return int(value)
    with np.errstate(over="ignore"):
        return float(np.float32(value)) if kind == "float" else float(value)


def _shape(value: Any) -> tuple[int | None, ...]:
    return tuple(None if x is None else int(x) for x in value) \
        if isinstance(value, (tuple, list)) else (int(value),)
