"""When the work of several contexts may be queued from several threads.

MXNet gives all CPU contexts one ring of buffers for temporary space
(`framework.BUFFERS`, handed out in the order in which operations are queued).
If one thread queues everything, the pass of the second device stands behind
the whole pass of the first. Where that has more operations than there are
buffers, the second device waits for buffers that the first one frees late: two
contexts ran ResNet-18 only 1.6 times as fast as one. If two threads queue the
passes side by side, both advance together and need few buffers
(docs/internals/performance.md).

But all contexts share the Python code of a block, and random numbers are drawn
in the order of the queue. So forward passes are queued side by side where that
code is known: the layers of MXNet and mgpu, and what `hybridize` has compiled.
A first pass, which compiles and completes shapes, never is.
"""
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from mgpu.backends._mxnet.framework import BUFFERS, mx

nn = mx.gluon.nn

# Packages whose blocks keep nothing from one call to the next. (Not
# gluon.rnn and gluon.contrib.)
_OWN = ("mxnet.gluon.nn.", "mxnet.gluon.model_zoo.", "mgpu.")
# Except those that call the user's functions or draw random numbers.
_FUNCTIONS = (nn.Lambda, nn.HybridLambda)
_NOT_FIXED = (*_FUNCTIONS, nn.Dropout)
# Operators that may draw random numbers, and those whose code is the user's.
_DRAWS = re.compile(
    "dropout|random|sample|shuffle|multinomial|bernoulli|gumbel|uniform|"
    "normal(_n)?\"|choice|exponential|pareto|rayleigh|weibull|_npi_gamma|"
    "_npi_logistic|laplace|rrelu|rnn|custom", re.IGNORECASE)


class Passes:
    """Whether the forward passes of a network may be queued side by side, and
    are long enough to become faster.

    Parameters
    ----------
    net : gluon.Block
    """

    def __init__(self, net: Any):
        self._net = net
        self._form: list[tuple[Any, ...]] = []
        self._apart = False

    def apart(self) -> bool:
        """Whether the next passes may. Not if the network has changed since
        `ended`: its blocks, their hooks, what is compiled."""
        return self._apart and _form(self._net) == self._form

    def ended(self) -> None:
        """Passes one after the other have ended; they may have compiled the
        network."""
        form = _form(self._net)
        if form != self._form:
            self._form = form
            self._apart = _operations(self._net) > BUFFERS


def is_known(block: Any) -> bool:
    """Whether `block` is of MXNet or mgpu and keeps nothing between calls."""
    return type(block).__module__.startswith(_OWN)


def _compiled(block: Any) -> bool:
    """Whether a call of `block` runs no Python code of the network."""
    return getattr(block, "_active", False) \
        and getattr(block, "_cached_op", None) is not None


def _called(block: Any) -> Iterator[Any]:
    """Yield `block` and the blocks in it that its Python code calls."""
    yield block
    if not _compiled(block):
        for child in block._children.values():
            yield from _called(child)


def _form(net: Any) -> list[tuple[Any, ...]]:
    # The objects themselves: their addresses may be reused.
    return [(block, getattr(block, "_active", False),
             getattr(block, "_cached_op", None), touched(block))
            for block in _called(net)]


def touched(block: Any) -> bool:
    """Whether the user has put code of their own into calls of `block`."""
    return bool(block._forward_hooks or block._forward_pre_hooks
                or getattr(block, "_callback", None)
                or not {"forward", "hybrid_forward"}.isdisjoint(vars(block)))


def runs_users_code(net: Any) -> bool:
    """Whether a pass runs Python code that is not of MXNet or mgpu."""
    return any(not _is_fixed(block.__class__) and not (
        _compiled(block) and _is_plain(type(block))) or touched(block)
        for block in _called(net))


@cache
def _is_fixed(kind: Any) -> bool:
    return kind.__module__.startswith(_OWN) \
        and not issubclass(kind, _FUNCTIONS)


def _is_plain(kind: Any) -> bool:
    """Whether all that blocks of this type compute is compiled."""
    Hybrid = mx.gluon.HybridBlock
    return kind.forward is Hybrid.forward and kind.__call__ is Hybrid.__call__


def _operations(net: Any) -> int:
    """About how many operations a pass has; 0 if it may draw random numbers
    or run code that is not known."""
    count = 0
    for block in _called(net):
        kind = type(block)
        own = is_known(block)
        if touched(block) or any(
                type(p).data is not mx.gluon.Parameter.data
                for p in block._reg_params.values()):
            return 0
        if _compiled(block) and (own or _is_plain(kind)):
            words = re.findall(r'"op": "(?!null)[^"]*"|"act_type": "[^"]*"',
                               block._cached_graph[1].tojson())
            if any(map(_DRAWS.search, words)):
                return 0
            count += len(words)
        elif not own or isinstance(block, _NOT_FIXED):
            return 0
        else:
            count += not block._children
    return count
