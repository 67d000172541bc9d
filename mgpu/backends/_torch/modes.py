"""What torch keeps for each thread and the user may have set: modes that see
operations, and hooks on what a forward pass saves."""
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch
from torch.utils._device import DeviceContext

from mgpu.backends import base
from mgpu.backends._torch import strict
from mgpu.backends._torch.streams import Draws


def saving() -> Any:
    """The hooks that decide what this thread saves for the backward pass, or
    None. Checkpoints that are not reentrant have theirs, also when they
    recompute."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _functions() -> list[Any]:
    return overrides._get_current_function_mode_stack() \
        if torch._C._len_torch_function_stack() else []


def _operations() -> list[Any]:
    return [mode for mode in dispatch._get_current_dispatch_mode_stack()
            if not isinstance(mode, (strict.Mode, Draws))] \
        if torch._C._len_torch_dispatch_stack() else []


def _draws() -> list[Any]:
    return [mode for mode in dispatch._get_current_dispatch_mode_stack()
            if isinstance(mode, Draws)] \
        if torch._C._len_torch_dispatch_stack() else []


def watching() -> str | None:
    """The name of what sees this thread's operations by code of the user's,
    which may count them: devices must not call it at the same time."""
    modes = [mode for mode in _functions()
             if not isinstance(mode, DeviceContext)] + _operations()
    if modes:
        return type(modes[0]).__name__
    hooks = saving()
    # Those of torch (save_on_cpu) keep nothing.
    return None if hooks is None or all(
        getattr(hook, "__module__", None) == torch.autograd.graph.__name__
        for hook in hooks) else "saved_tensors_hooks"


def carried(others: bool) -> Callable[[], base.ContextManager]:
    """What `watching` tells, and the default device, for another thread;
    without `others`: that device alone. What looks for draws goes along."""
    # Pushed, not entered: what a mode does when its block begins and ends is
    # done, and counts for one thread.
    functions = _functions()
    if not others:
        functions = [x for x in functions if isinstance(x, DeviceContext)]
    operations = [*strict.carried(), *(_operations() if others else ()),
                  *_draws()]
    hooks = saving() if others else None
    if not (functions or operations or hooks):
        return contextlib.nullcontext

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if hooks is not None:
                stack.enter_context(
                    torch.autograd.graph.saved_tensors_hooks(*hooks))
            for mode in operations:
                dispatch._push_mode(mode)
                stack.callback(dispatch._pop_mode,
                               getattr(mode, "_mode_key", None))
            for mode in functions:
                overrides._push_mode(mode)
                stack.callback(overrides._pop_mode)
            yield
    return modes
