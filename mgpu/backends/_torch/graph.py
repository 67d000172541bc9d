"""What a loss depends on, read from torch's graph."""
from collections.abc import Iterator
from typing import Any

import torch


def _nodes(*losses: Any) -> Iterator[Any]:
    """Yield each node of the losses' graphs once."""
    waiting, seen = [loss.grad_fn for loss in losses], {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            yield node


def leaves_of(*losses: Any) -> Iterator[Any]:
    """The tensors whose gradients a backward pass of `losses` writes."""
    yield from (loss for loss in losses if loss.is_leaf)
    for node in _nodes(*losses):
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable


def hides_leaves(*losses: Any) -> bool:
    """Whether the graphs hold reentrant checkpoints, which hide what is
    inside them."""
    return any(type(node).__name__ == "CheckpointFunctionBackward"
               for node in _nodes(*losses))


def total(loss: Any) -> Any:
    """The sum of a loss, from which a backward pass starts."""
    # Not backward(loss, ones): torch imports SymPy to look at the ones, and
    # the first step takes three times as long.
    with torch.enable_grad():
        return loss.sum()


def recomputing() -> bool:
    """Whether this thread is inside a backward pass: what a network computes
    there it has computed before."""
    return torch._C._current_graph_task_id() != -1
