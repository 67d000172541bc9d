"""Arrays that a graph makes of nothing: zeros, ones, ranges.

PyTorch makes them where an input of the network is, so one enters them. A
size of 0 is one that MXNet finds out itself, as the batch of a cell's begin
state: it is that of an axis of an input which operators tie to it.
"""
from collections.abc import Collection, Iterator

from mgpu.gluon_io.graph import Graph, Node

CREATING = frozenset(
    "_zeros _ones _full _arange _eye _linspace _npi_zeros _npi_ones _npi_full "
    "_npi_arange _npi_eye _npi_identity _npi_linspace".split())
#: whose inputs and outputs have one shape
_SAME_SHAPE = frozenset(
    "elemwise_add elemwise_sub elemwise_mul elemwise_div _plus _Plus _minus "
    "_Minus _add _sub _mul _Mul _div _Div _grad_add _maximum _minimum add_n "
    "ElementWiseSum _plus_scalar _minus_scalar _rminus_scalar _mul_scalar "
    "_div_scalar _rdiv_scalar _power_scalar Activation Dropout Cast clip "
    "identity _copy relu sigmoid tanh softsign exp log sqrt square abs "
    "negative zeros_like ones_like BlockGrad stop_gradient".split())
#: of whose inputs the first has the shape of the output
_AS_FIRST = frozenset(
    "BatchNorm LayerNorm InstanceNorm GroupNorm LeakyReLU softmax log_softmax "
    "SequenceMask SequenceReverse".split())
#: the beginning axes that the output shares with the first input
_BEGINS = {"FullyConnected": 1, "Convolution": 1, "Pooling": 1,
           "Embedding": 1}
_AXES = range(6)

#: of a node one of its outputs, and an axis of that
_Axis = tuple[int, int, int]


def with_inputs(graph: Graph, arrays: Collection[str]) -> Graph:
    """The graph whose constants have an input of the network as their input,
    and as their attribute `tied` which of its axes has the size that they
    have as 0; None where nothing says it. `arrays`: the names of those of
    the file."""
    inputs = {i for i, node in enumerate(graph.nodes)
              if node.op == "null" and node.name not in arrays}
    # labels, which enter nothing in PyTorch, are the second input of a node
    first = min((j for node in graph.nodes for j, _ in node.inputs[:1]
                 if j in inputs), default=min(inputs, default=None))
    constants = [i for i, node in enumerate(graph.nodes)
                 if node.op in CREATING and not node.inputs]
    if first is None or not constants:
        return graph
    ties = _Ties(graph)
    nodes = list(graph.nodes)
    for i in constants:
        node = nodes[i]
        at: tuple[int, int | None] = (first, None)
        shape = node.attributes.get("shape") or ()
        if 0 in shape and not node.op.startswith("_np"):
            found = ties.of((i, 0, shape.index(0)))
            at = min(((j, axis) for j, k, axis in found if j in inputs),
                     default=at)
        nodes[i] = node._replace(inputs=((at[0], 0),), attributes={
            **node.attributes, "tied": at[1]})
    return graph._replace(nodes=tuple(nodes))


class _Ties:
    """Axes that have one size in whatever MXNet computes."""

    def __init__(self, graph: Graph) -> None:
        self._next: dict[_Axis, set[_Axis]] = {}
        outputs: dict[int, set[int]] = {}
        for j, k in (*(x for node in graph.nodes for x in node.inputs),
                     *graph.heads):
            outputs.setdefault(j, set()).add(k)
        for i, node in enumerate(graph.nodes):
            for number, own, theirs in _tied(node):
                for k in outputs.get(i, ()):
                    a, b = (i, k, own), (*node.inputs[number], theirs)
                    self._next.setdefault(a, set()).add(b)
                    self._next.setdefault(b, set()).add(a)

    def of(self, axis: _Axis) -> set[_Axis]:
        """Those that are tied to it."""
        found, new = {axis}, [axis]
        while new:
            more = self._next.get(new.pop(), set()) - found
            found |= more
            new += more
        return found


def _tied(node: Node) -> Iterator[tuple[int, int, int]]:
    """Number of an input, axis of every output, axis of the input."""
    op, a = node.op, node.attributes
    every = range(len(node.inputs))
    if op in _SAME_SHAPE:
        yield from ((n, k, k) for n in every for k in _AXES)
    elif op in _AS_FIRST:
        yield from ((0, k, k) for k in _AXES)
    elif op in _BEGINS:
        if a.get("flatten", True):
            yield from ((0, k, k) for k in range(_BEGINS[op]))
    elif op in ("SliceChannel", "split") and a["axis"] >= 0:
        taken = a["axis"]
        yield from ((0, k - (a["squeeze_axis"] and k > taken), k)
                    for k in _AXES if k != taken)
    elif op in ("Concat", "concat") and a["dim"] >= 0:
        yield from ((n, k, k) for n in every for k in _AXES if k != a["dim"])
    elif op == "stack" and a["axis"] >= 0:
        yield from ((n, k + (k >= a["axis"]), k) for n in every
                    for k in _AXES)
    elif op == "slice_axis" and a["axis"] >= 0:
        yield from ((0, k, k) for k in _AXES if k != a["axis"])
    elif op in ("SwapAxis", "swapaxes"):
        both = a["dim1"], a["dim2"]
        yield from ((0, both[1 - both.index(k)] if k in both else k, k)
                    for k in _AXES if min(both) >= 0)
