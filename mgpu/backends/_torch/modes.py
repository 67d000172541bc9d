"""Thread-local modes of torch that the user may have set: dispatch modes, and
saved-tensor hooks."""
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

from mgpu.backends._torch import strict
from mgpu.backends._torch.streams import Draws
from mgpu.backends.types import ContextManager


def saving() -> Any:
    """The saved-tensor hooks of this thread, or None. Non-reentrant
    checkpoints have hooks, also when they recompute."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def watching() -> str | None:
    """The name of a user-defined mode or hook that observes this thread's
    operations, or None. Devices must not call it concurrently."""
    modes = [mode for mode in (*_functions(), *_operations())
             if not isinstance(mode, (DeviceContext, strict.Mode, Draws))]
    if modes:
        return type(modes[0]).__name__
    hooks = saving()
    # Hooks of torch (save_on_cpu) have no state.
    return None if hooks is None or all(
        getattr(hook, "__module__", None) == torch.autograd.graph.__name__
        for hook in hooks) else "saved_tensors_hooks"


def carried() -> Callable[[], ContextManager]:
    """A function that returns a context manager with the modes of this thread
    for another one: the default device, modes of mgpu, and torch's own
    saved-tensor hooks."""
    # Pushed, not entered: entering and exiting a mode may have effects, for
    # one thread.
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
