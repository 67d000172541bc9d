"""Arrays of whole numbers in a graph, of which MXNet makes no fractions.

``x / 2`` and ``exp(x)`` of whole numbers are cut to whole numbers in MXNet.
PyTorch answers with fractions. In graphs of the NumPy interface a number that
is no integer of Python's makes float64 of them, in PyTorch float32. A sum has
the dtype of what it sums in MXNet, and wraps in it; PyTorch's is int64. And
MXNet hands a gradient through whole numbers, which PyTorch does not.
"""
import math
from collections.abc import Collection
from typing import NamedTuple

from mgpu.gluon_io.created import CREATING
from mgpu.gluon_io.graph import Graph, Node

#: those inputs of the network of which all have to be whole numbers for an
#: array to be; None: it never is
Kind = frozenset[str] | None
_WHOLE: Kind = frozenset()

_FUNCTIONS = set(
    "exp log log2 log10 log1p expm1 sqrt rsqrt cbrt rcbrt reciprocal sin cos "
    "tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh erf "
    "sigmoid softsign hard_sigmoid power hypot leakyrelu leaky_relu norm std "
    "var rpower_scalar rpowerscalar smooth_l1".split())
_DIVISIONS = set("div rdiv divide div_scalar rdiv_scalar divscalar "
                 "rdivscalar".split())
_NUMPY_DIVISIONS = set("true_divide true_divide_scalar rtrue_divide_scalar "
                       "mean".split())
_SUMS = set("sum sum_axis nansum prod product nanprod cumsum".split())
_ANSWERS = set("equal not_equal greater greater_equal less less_equal "
               "logical_not logical_and logical_or logical_xor isnan isinf "
               "isfinite all any".split())
#: whose first input alone says what the result is
_CHOICES = set("take pick gather_nd sequencemask sequence_mask sequencelast "
               "sequencereverse slice_like reshape_like broadcast_like "
               "index_add index_update".split())
#: through which no gradient passes
_STEPS = _ANSWERS | set(
    "argmax argmin argmax_channel argsort one_hot sign floor ceil trunc fix "
    "rint round zeros_like ones_like full_like shape_array size_array "
    "arange_like blockgrad stop_gradient lesser lesser_equal".split())


class Cut(NamedTuple):
    """An operator whose answer for whole numbers is of another type.

    Attributes
    ----------
    inputs : tuple of int
        Which of its inputs may be whole numbers.
    surely : bool
        Whether they are, whatever the network gets.
    what : str
        What stands around it in PyTorch: FLOATING lets fractions alone in,
        KEPT gives the answer the dtype of the input, STILL lets nothing in
        that has a gradient. Or the dtype to which MXNet converts them first.
    """

    inputs: tuple[int, ...]
    surely: bool
    what: str


FLOATING, KEPT, STILL = "floating", "kept", "still"


def cuts(graph: Graph, arrays: Collection[str],
         whole: Collection[str] = ()) -> dict[int, Cut]:
    """By the number of their nodes, the operators that answer otherwise in
    PyTorch where their inputs are whole numbers; and those that make whole
    numbers, of which a gradient would come back.

    `arrays`: the names of those of the file; `whole`: of these, the ones of
    whole numbers.
    """
    kinds: list[Kind] = []
    # the casts to whole numbers that a gradient of this array reaches
    casts: list[set[int]] = []
    found: dict[int, Cut] = {}
    for i, node in enumerate(graph.nodes):
        casts.append(set())
        if node.op == "null":
            kinds.append(frozenset([node.name]) if node.name not in arrays
                         else _WHOLE if node.name in whole else None)
            continue
        # what enters a constant says only where it is
        inputs = () if node.op in CREATING else node.inputs
        own = [kinds[j] if k == 0 or graph.nodes[j].op != "topk" else
               _of_dtype(graph.nodes[j]) for j, k in inputs]
        name = _plain(node.op)
        kinds.append(_result(node, name, own))
        if name.removesuffix("_scalar") not in _STEPS:
            # an index gets none, nor what gives a shape alone
            passing = slice(name.startswith(("where", "embedding")),
                            1 if name in _CHOICES else None)
            casts[i] = set().union(*(casts[j] for j, _ in inputs[passing]))
        if kinds[i] != _WHOLE:
            found |= {j: Cut((0,), False, STILL) for j in casts[i]}
            casts[i] = set()
        elif name in ("cast", "amp_cast") and own[0] != _WHOLE:
            casts[i].add(i)
        first = int(name.startswith("where"))   # behind the condition
        every = tuple(range(first, len(own)))
        if every and None not in own[first:]:
            what = KEPT if name in _SUMS else _converts(node, name) or (
                FLOATING if _makes_fractions(node, name) else "")
            if what:
                found[i] = Cut(every, not any(own[k] for k in every), what)
    return found


def _plain(op: str) -> str:
    for prefix in ("_npi_", "_npx_", "_np_", "broadcast_", "elemwise_", "_"):
        op = op.removeprefix(prefix)
    return op.lower()


def _of_dtype(node: Node) -> Kind:
    dtype = node.attributes.get("dtype")
    return _WHOLE if str(dtype).startswith(("int", "uint", "bool")) else None


def _result(node: Node, name: str, own: list[Kind]) -> Kind:
    is_numpy = node.op.startswith("_np")
    if name in ("argmax", "argmin") and is_numpy \
            or name.removesuffix("_scalar") in _ANSWERS and is_numpy \
            or name in ("shape_array", "size_array"):
        return _WHOLE
    if name in ("cast", "one_hot", "amp_cast", "argsort") or not own:
        return _of_dtype(node)
    if name == "topk" and node.attributes["ret_typ"] == "indices":
        return _of_dtype(node)
    if name == "embedding":
        return own[1]
    if name in _CHOICES:
        return own[0]
    if name.startswith("where"):
        own = own[1:]
    if None in own or _converts(node, name) \
            or name in _NUMPY_DIVISIONS and is_numpy:
        return None
    return frozenset().union(*(kind for kind in own if kind is not None))


def _converts(node: Node, name: str) -> str:
    if name == "mean" and node.op.startswith("_np"):
        return "float32"
    if node.attributes.get("is_int", True) or name in _NUMPY_DIVISIONS \
            or name.removesuffix("_scalar") in _ANSWERS:
        return ""
    return "float64"


def _makes_fractions(node: Node, name: str) -> bool:
    if name in _FUNCTIONS:
        return True
    if name in _DIVISIONS | {"mean"} and not node.op.startswith("_np"):
        return True
    if name in ("power_scalar", "powerscalar") \
            and node.attributes["scalar"] < 0:
        return True
    if name == "activation":
        return node.attributes["act_type"] != "relu"
    return any(isinstance(x, float) and not (math.isinf(x) or x.is_integer())
               for key in ("scalar", "a_min", "a_max")
               for x in [node.attributes.get(key)])
