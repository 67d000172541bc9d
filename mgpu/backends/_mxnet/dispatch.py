"""When the work of several contexts may be queued from several threads.

MXNet gives all CPU contexts one ring of buffers for temporary space
(`framework.BUFFERS`, handed out in the order in which operations are queued).
Queued by one thread, the pass of a second device comes behind the whole one of
the first, and where that has more operations than there are buffers, waits for
some that the first device frees late: two contexts ran ResNet-18 1.6 times as
fast as one. Queued side by side they advance together, with few buffers
(docs/performance.md).

The Python code of a block is one object for all contexts, though, and random
numbers are drawn in the order of the queue. So long passes go side by side
after one in turn has shown that neither is touched.
"""
import re
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from mgpu.backends._mxnet.framework import BUFFERS, mx

_State = List[Tuple[Any, str, Tuple[Any, ...]]]

# Operators that may draw random numbers, and those whose code is the user's.
_DRAWS = re.compile(
    "dropout|random|sample|shuffle|multinomial|bernoulli|gumbel|uniform|"
    "normal(_n)?\"|choice|exponential|pareto|rayleigh|weibull|_npi_gamma|"
    "_npi_logistic|laplace|rrelu|rnn|custom", re.IGNORECASE)


def blocks(net: Any) -> Iterator[Any]:
    yield net
    for child in net._children.values():
        yield from blocks(child)


class Passes:
    """What is known of the forward passes of a network: whether they may be
    queued side by side, and are long enough to gain by it.

    Parameters
    ----------
    net : gluon.Block
    """

    def __init__(self, net: Any):
        self._net = net
        self._form: Tuple[Any, ...] = ()
        self._apart: Dict[bool, bool] = {}      # recorded: may be in threads

    def apart(self, recording: bool) -> bool:
        """Whether passes are known to be so; forgotten when blocks, hooks
        or `hybridize` have changed."""
        form = tuple(_form(block) for block in blocks(self._net))
        if form != self._form:
            self._form, self._apart = form, {}
        return self._apart.get(recording, False)

    def undecided(self, recording: bool) -> bool:
        # Draws are seen in a recorded pass alone.
        return recording not in self._apart and \
            (recording or True in self._apart)

    def state(self) -> _State:
        """What Python code could have changed in a pass."""
        return list(_state(self._net))

    def judge(self, recording: bool, before: _State, constants: int,
              outputs: Sequence[Any]) -> None:
        """After passes in turn: `state` before them, and what they returned;
        `constants`: so many inputs have no gradient."""
        hooks = any(block._forward_hooks or block._forward_pre_hooks
                    or getattr(block, "_callback", None)
                    for block in blocks(self._net))
        apart = not hooks and _same(before, self.state()) and (
            _long_and_fixed(self._net, constants, outputs) if recording
            else self._apart[True])
        # A first pass may have compiled the network.
        self.apart(recording)
        self._apart[recording] = apart


def disjoint(losses: Sequence[Any]) -> bool:
    """Whether each loss is on a context of its own, no two depend on a common
    leaf, and their backward passes are long. MXNetError if one was not
    recorded."""
    if len({x.ctx for x in losses}) < len(losses):
        return False
    leaves: List[str] = []
    for x in losses:
        names = set(mx.autograd.get_symbol(x).list_arguments())
        if len(names) < BUFFERS:    # hardly more operations than that
            return False
        leaves += [name for name in names
                   if name.startswith("var")]       # "null": a constant
    return len(set(leaves)) == len(leaves)


def _form(block: Any) -> Tuple[Any, ...]:
    return (id(block), getattr(block, "_active", False),
            id(getattr(block, "_cached_op", None)),
            len(block._forward_hooks), len(block._forward_pre_hooks),
            "forward" in vars(block))


def _state(block: Any) -> Iterator[Tuple[Any, str, Tuple[Any, ...]]]:
    if getattr(block, "_active", False):
        return      # its Python code runs once, to compile it
    for name, value in vars(block).items():
        items = [value]     # kept: an address may be used again
        if isinstance(value, dict):
            items += [x for item in value.items() for x in item]
        elif isinstance(value, (list, tuple, set)):
            items += value
        yield block, name, tuple(items)
    for child in block._children.values():
        yield from _state(child)


def _same(before: _State, after: _State) -> bool:
    return len(before) == len(after) and all(
        b is d and m == n and len(v) == len(w)
        and all(x is y for x, y in zip(v, w))
        for (b, m, v), (d, n, w) in zip(before, after))


def _long_and_fixed(net: Any, constants: int, outputs: Sequence[Any]) -> bool:
    """Whether a recorded pass has more operations than there are buffers,
    draws no random numbers, and runs no code but MXNet's own."""
    arrays = list(_flat(outputs))
    if not all(isinstance(x, mx.nd.NDArray) for x in arrays):
        return False
    try:
        recorded = [mx.autograd.get_symbol(x) for x in arrays]
        compiled = [block._cached_graph[1] for block in blocks(net)
                    if getattr(block, "_active", False)
                    and block._cached_graph]
        # What a layer makes without the help of its inputs (noise, a mask) is
        # a constant of the graph, as inputs and frozen parameters are.
        made = [sum(name.startswith("null") for name in graph.list_inputs())
                > constants for graph in recorded]
        words = [re.findall(r'"op": "(?!null)[^"]*"|"act_type": "[^"]*"',
                            graph.tojson()) for graph in recorded + compiled]
    except mx.MXNetError:       # not recorded, or not to be written out
        return False
    longest = max(map(len, words[:len(recorded)])) \
        + sum(map(len, words[len(recorded):]))
    return longest > BUFFERS and not any(made) \
        and not any(map(_DRAWS.search, sum(words, [])))


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, (list, tuple)):
        for item in x:
            yield from _flat(item)
    else:
        yield x
