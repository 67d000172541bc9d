"""What a loss depends on, read from torch's graph."""
from collections.abc import Callable, Iterator, Sequence
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


def total(loss: Any) -> Any:
    """The sum of a loss, from which a backward pass starts."""
    # Not backward(loss, ones): torch imports SymPy to look at the ones, and
    # the first step takes three times as long.
    with torch.enable_grad():
        return loss.sum()


def in_common(losses: Sequence[Any], owner: Callable[[Any], Any]
              ) -> list[Any] | None:
    """The leaves in the graphs of several losses, and those of an `owner`
    that is in several. None if the graphs share more, as far as can be seen:
    reentrant checkpoints hide what is inside them."""
    known, owners, shared = set[Any](), set[Any](), []
    for loss in losses:
        own, owned = set(), set()
        for node in _nodes(loss):
            name = type(node).__name__
            if name == "AccumulateGrad":
                x = node.variable
                whose = owner(x)
                owned.add(whose)
                if whose in owners:
                    shared.append(x)
            # At once: a graph may be of all devices. Passes that meet other
            # processes do so in one order, which one backward pass has.
            elif "Checkpoint" in name or name == "_ThroughBackward" \
                    or node in known:
                return None
            own.add(node)
        known |= own
        owners |= owned
    return shared


def recomputing() -> bool:
    """Whether this thread is inside a backward pass: what a network computes
    there it has computed before."""
    return torch._C._current_graph_task_id() != -1
