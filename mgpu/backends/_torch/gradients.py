"""Gradients of leaves: grad_req, and whether a step has used them."""
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mgpu.backends import messages
from mgpu.backends._torch.boundary import devices_of
from mgpu.backends._torch.graph import read, total
from mgpu.backends._torch.ops import name_of_dtype


@dataclass(slots=True)
class _State:
    """State of a leaf's gradient.

    Attributes
    ----------
    tensor : weak reference
    request : str
        The grad_req, if the leaf requires a gradient.
    fresh : bool
        Whether a backward pass has written the gradient since `mark_used`.
    hook : object
        Handle of the hook that sets `fresh`, or None.
    """

    tensor: Any
    request: str = "write"
    fresh: bool = False
    hook: Any = None
    _last: tuple[Any, int] | None = None    # gradient, version

    def written(self, x: torch.Tensor) -> None:
        """Hook: torch has reached the leaf `x`, possibly without a
        gradient."""
        last = self._last
        if x.grad is not None and (
                last is None or last[0]() is not x.grad
                or last[1] != x.grad._version):
            self.note(x, True)

    def note(self, x: torch.Tensor, fresh: bool) -> None:
        self.fresh = fresh
        self._last = None if x.grad is None else (
            weakref.ref(x.grad), x.grad._version)


class Gradients:
    """The methods of `mgpu.backends.base.Backend` for gradients."""

    run: Any        # `TorchBackend.run`

    def __init__(self) -> None:
        #: by id of a living tensor; ten times as fast as a
        #: `WeakTensorKeyDictionary`
        self._states: dict[int, _State] = {}

    def _state(self, x: torch.Tensor) -> _State:
        key = id(x)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = _State(weakref.ref(
                x, lambda _: self._states.pop(key, None)))
        if found.hook is None and x.requires_grad and x.is_leaf:
            found.hook = x.register_post_accumulate_grad_hook(found.written)
        return found

    def attach_grad(self, x: Any, grad_req: str = "write") -> None:
        messages.check_grad_req(grad_req)
        if not x.is_floating_point():
            raise messages.no_float(name_of_dtype(x))
        if not x.is_leaf:
            x.detach_()     # a result becomes a leaf, as on MXNet
        x.grad = None
        x.requires_grad_(grad_req != "null")
        state = self._state(x)
        state.fresh = False
        if grad_req != "null":
            state.request = grad_req

    def grad_req(self, x: Any) -> str:
        """write, add or null."""
        if not x.requires_grad:
            return "null"
        known = self._states.get(id(x))
        return "write" if known is None else known.request

    def grad(self, x: Any) -> Any:
        if not x.requires_grad or not x.is_leaf:
            raise messages.no_gradient()
        if x.grad is None:
            with torch.inference_mode(False):
                x.grad = torch.zeros_like(x)
            self.mark_used(x)
        return x.grad

    def is_fresh(self, x: Any) -> bool:
        known = self._states.get(id(x))
        # Unknown: it was frozen or replaced since the last check.
        return x.grad is not None if known is None or known.hook is None \
            else known.fresh

    def mark_used(self, x: Any, used: bool = True) -> None:
        self._state(x).note(x, not used)

    def has_gradient(self, x: Any) -> bool:
        return x.grad is not None

    def backward(self, losses: Sequence[Any]) -> None:
        if not all(loss.requires_grad for loss in losses):
            raise messages.not_recorded()
        totals = [total(loss) for loss in losses]
        leaves, hides, apart = read(losses)
        if hides:
            leaves = [x for state in list(self._states.values())
                      if (x := state.tensor()) is not None]
        # Separate networks of the user, one per device. On GPUs, autograd
        # runs them in parallel.
        at_once = apart and not hides and len(losses) > 1 and all(
            loss.device.type == "cpu" for loss in losses)
        self._overwrite(totals, leaves, at_once)

    def mean_on(self, loss: Any) -> int | None:
        node = loss.grad_fn if loss.dim() == 0 else None
        # Loss functions that are one operation save the reduction; 1: mean.
        if type(node).__name__ != "MeanBackward0" \
                and getattr(node, "_saved_reduction", None) != 1:
            return None
        devices = devices_of(loss)
        return devices.pop() if len(devices) == 1 else None

    def _overwrite(self, totals: Sequence[Any], leaves: Sequence[Any],
                   at_once: bool) -> None:
        """Run a backward pass, or with `at_once` one for each of `totals` in
        parallel, which overwrites the gradients of `leaves` whose request is
        "write". Gradients are restored after an error."""
        before = []
        for x in leaves:
            known = self._states.get(id(x))
            if known is not None and known.request == "write" \
                    and x.requires_grad:
                before.append((x, x.grad))
                x.grad = None
        done = False
        try:
            if at_once:
                self.run([partial(torch.autograd.backward, x)
                          for x in totals])
            else:
                torch.autograd.backward(totals)
            done = True
        finally:
            for x, gradient in before:
                if not done or x.grad is None:      # not reached
                    x.grad = gradient
