"""What torch keeps for each thread and the user may have set: modes that see
operations, and hooks on what a forward pass saves."""
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import overrides
from torch.overrides import _get_current_function_mode_stack as _functions
from torch.utils import _python_dispatch as dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack as _operations)

from mgpu.backends import base
from mgpu.backends._torch import strict
from mgpu.backends._torch.streams import Draws


def saving() -> Any:
    """The hooks that decide what this thread saves for the backward pass, or
    None. Checkpoints that are not reentrant have theirs, also when they
    recompute."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def watching() -> str | None:
    """The name of what sees this thread's operations by code of the user's,
    which may count them: devices must not call it at the same time."""
    modes = [mode for mode in (*_functions(), *_operations())
             if not isinstance(mode, (DeviceContext, strict.Mode, Draws))]
    if modes:
        return type(modes[0]).__name__
    hooks = saving()
    # Those of torch (save_on_cpu) keep nothing.
    return None if hooks is None or all(
        getattr(hook, "__module__", None) == torch.autograd.graph.__name__
        for hook in hooks) else "saved_tensors_hooks"


def carried() -> Callable[[], base.ContextManager]:
    """For another thread: the default device, what looks for draws or for
    other devices' arrays, and torch's own hooks on what is saved."""
    # Pushed, not entered: what a mode does when its block begins and ends is
    # done, and counts for one thread.
    functions = [x for x in _functions() if isinstance(x, DeviceContext)]
    operations = [*strict.carried(), *(
        mode for mode in _operations() if isinstance(mode, Draws))]
    saved = None if watching() else saving()
    if not (functions or operations or saved):
        return contextlib.nullcontext

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if saved is not None:
                stack.enter_context(
                    torch.autograd.graph.saved_tensors_hooks(*saved))
            for mode in operations:
                dispatch._push_mode(mode)
                stack.callback(dispatch._pop_mode,
                               getattr(mode, "_mode_key", None))
            for mode in functions:
                overrides._push_mode(mode)
                stack.callback(overrides._pop_mode)
            yield
    return modes
