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
    seen = {loss.grad_fn for loss in losses if not loss.is_leaf}
    waiting = list(seen)
    for node in waiting:
        kind = type(node)
        if kind is _Accumulate:
            leaves.append(node.variable)
            continue
        hides |= kind.__name__ == "CheckpointFunctionBackward"
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return leaves, hides


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
