"""Traversal of torch's autograd graph."""
from collections.abc import Sequence
from typing import Any

import torch

_Accumulate = torch._C._functions.AccumulateGrad


def read(losses: Sequence[Any]) -> tuple[list[Any], bool, bool]:
    """Read the graph of `losses`.

    Returns the tensors whose gradients a backward pass writes; whether there
    may be others, inside reentrant checkpoints; and whether the graphs of the
    losses are disjoint."""
    leaves, hides = [loss for loss in losses if loss.is_leaf], False
    apart = not leaves
    found, shared = nodes(losses)
    for node in found:
        kind = type(node)
        if kind is _Accumulate:
            leaves.append(node.variable)
        hides |= kind.__name__ == "CheckpointFunctionBackward"
    return leaves, hides, apart and not shared


def nodes(losses: Sequence[Any]) -> tuple[list[Any], bool]:
    """All nodes in the graphs of the losses, and whether graphs share
    nodes."""
    first: dict[Any, int] = {}      # node -> the number of a loss
    shared = False
    for number, loss in enumerate(losses):
        waiting = [] if loss.is_leaf else [loss.grad_fn]
        for node in waiting:
            if node in first:
                shared |= first[node] != number
                continue
            first[node] = number
            waiting += [following for following, _ in node.next_functions
                        if following is not None]
    return list(first), shared


def total(loss: Any) -> Any:
    """The sum of a loss, as the start of a backward pass."""
    # Not backward(loss, ones): torch imports SymPy to check the ones, and the
    # first step takes three times as long.
    if torch.is_grad_enabled():
        return loss.sum()
    with torch.enable_grad():
        return loss.sum()


def recomputing() -> bool:
    """Whether this thread is inside a backward pass, so that a network
    recomputes a forward pass."""
    return torch._C._current_graph_task_id() != -1
