"""What a loss depends on, read from torch's graph."""
from collections.abc import Iterator, Sequence
from typing import Any

import torch


def _nodes(loss: Any) -> Iterator[Any]:
    """Yield each node of the loss's graph once."""
    waiting, seen = [loss.grad_fn], {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            yield node


def leaves_of(loss: Any) -> Iterator[Any]:
    """The tensors whose gradients a backward pass of `loss` writes."""
    if loss.is_leaf:
        yield loss
    for node in _nodes(loss):
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable


def total(loss: Any) -> Any:
    """The sum of a loss, from which a backward pass starts."""
    # Not backward(loss, ones): torch imports SymPy to look at the ones, and
    # the first step takes three times as long.
    with torch.enable_grad():
        return loss.sum()


def disjoint(losses: Sequence[Any]) -> bool:
    """Whether no node of one loss's graph belongs to another's, as far as
    can be seen: reentrant checkpoints hide what is inside them."""
    known: set[Any] = set()
    for loss in losses:
        own = set()
        for node in _nodes(loss):
            # at once: a graph may be of all devices
            if node in known or "Checkpoint" in type(node).__name__:
                return False
            own.add(node)
        known |= own
    return True


def recomputing() -> bool:
    """Whether this thread is inside a backward pass: what a network computes
    there it has computed before."""
    return torch._C._current_graph_task_id() != -1
