"""What a loss depends on, read from torch's graph."""
from collections.abc import Sequence
from typing import Any

import torch

_Accumulate = torch._C._functions.AccumulateGrad


def read(losses: Sequence[Any]) -> tuple[list[Any], bool]:
    """The tensors whose gradients a backward pass of `losses` writes, and
    whether there may be more: reentrant checkpoints hide what is inside
    them."""
    leaves, hides = [loss for loss in losses if loss.is_leaf], False
    for node in nodes(losses):
        kind = type(node)
        if kind is _Accumulate:
            leaves.append(node.variable)
        hides |= kind.__name__ == "CheckpointFunctionBackward"
    return leaves, hides


def nodes(losses: Sequence[Any]) -> list[Any]:
    """All nodes that the losses depend on."""
    seen = {loss.grad_fn for loss in losses if not loss.is_leaf}
    found = list(seen)
    for node in found:
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                found.append(following)
    return found


def are_apart(losses: Sequence[Any]) -> bool:
    """Whether no two of the losses depend on the same node."""
    seen: set[Any] = set()
    for loss in losses:
        found = nodes([loss])
        if loss.is_leaf or not seen.isdisjoint(found):
            return False
        seen.update(found)
    return True


def total(loss: Any) -> Any:
    """The sum of a loss, from which a backward pass starts."""
    # Not backward(loss, ones): torch imports SymPy to look at the ones, and
    # the first step takes three times as long.
    if torch.is_grad_enabled():
        return loss.sum()
    with torch.enable_grad():
        return loss.sum()


def recomputing() -> bool:
    """Whether this thread is inside a backward pass: what a network computes
    there it has computed before."""
    return torch._C._current_graph_task_id() != -1
