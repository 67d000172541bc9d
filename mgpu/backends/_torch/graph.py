"""What a loss depends on: torch's graph, from its end."""
from collections.abc import Iterator, Sequence
from typing import Any

import torch


def leaves_of(loss: Any) -> Iterator[Any]:
    """The tensors whose gradients a backward pass of `loss` writes."""
    if loss.is_leaf:
        yield loss
    waiting, seen = [loss.grad_fn], {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            if type(node).__name__ == "AccumulateGrad":
                yield node.variable


def total(loss: Any) -> Any:
    """The sum of a loss, which a backward pass begins with."""
    # Not backward(loss, ones): torch imports SymPy to look at the ones, and
    # the first step takes three times as long.
    with torch.enable_grad():
        return loss.sum()


def disjoint(losses: Sequence[Any]) -> bool:
    """Whether no node of one loss's graph belongs to another's."""
    owner: dict[Any, int] = {}
    for i, loss in enumerate(losses):
        waiting = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or owner.get(node) == i:
                continue
            if node in owner:
                return False
            owner[node] = i
            waiting.extend(following for following, _ in node.next_functions)
    return True
