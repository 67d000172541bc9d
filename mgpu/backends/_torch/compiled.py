"""Compiled replicas: `torch.compile` under mgpu's threads and streams."""
import contextlib
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._functorch import config as functorch

from mgpu.backends._torch.arithmetic import draw_mask, mask_shape

if TYPE_CHECKING:
    from mgpu.backends._torch.network import TorchNetwork

_numbers = itertools.count()
_by_number: "weakref.WeakValueDictionary[int, Any]" = \
    weakref.WeakValueDictionary()


def ticket_for(replica: Any) -> torch.Tensor:
    """A tensor that represents `replica` in compiled code: (the number of the
    replica, the number of masks that compiled code has drawn for it)."""
    number = next(_numbers)
    _by_number[number] = replica
    return torch.tensor([number, 0])


class _Compiling:
    """Compiled networks run at the same time, but while one may have to be
    compiled no other runs: while torch traces, it takes calls of compiled
    functions in other threads for errors."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running, self._exclusive = 0, False

    @contextlib.contextmanager
    def __call__(self, exclusive: bool) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive and not (
                exclusive and self._running))
            self._running += 1
            self._exclusive = exclusive
        try:
            with _options() if exclusive else contextlib.nullcontext():
                yield
        finally:
            with self._changed:
                self._running -= 1
                self._exclusive = False
                self._changed.notify_all()


compiling = _Compiling()


@contextlib.contextmanager
def _options() -> Iterator[None]:
    """How torch compiles inside the block."""
    from torch._dynamo import config as dynamo      # takes a second
    # Backward passes too are compiled now, not when they first run:
    # meanwhile torch sets its random state, which replicas share.
    with functorch.patch(force_non_lazy_backward_lowering=True), \
            dynamo.patch(skip_nnmodule_hook_guards=False):  # hooks may change
        yield


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside the block, this thread computes on `count` cores, the number
    that compiled code is made for. The thread may be the user's own."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)


#: for how many shapes of inputs (and other conditions) a replica's training
#: or prediction pass is compiled; for more, torch runs it layer by layer
_SHAPES = 32


def compile_module(module: nn.Module, cores: int) -> Callable[..., Any]:
    """`module` as a compiled function, for that number of cores."""
    def run(*inputs: Any, **named: Any) -> Any:
        return module(*inputs, **named)
    # Torch counts compilations by source code, which replicas share.
    return torch.compile(
        run, dynamic=False, isolate_recompiles=True, recompile_limit=_SHAPES,
        # fallback_random: torch's own random streams, which replicas use in
        # turn (`TorchReplica`)
        options={"cpp.threads": cores, "fallback_random": True})


@cache
def define_mask() -> None:
    """Make drawing a mask one operation to the compiler.

    It writes to the ticket, so the compiler does not leave it out, repeat it,
    reorder it or merge it with another one.
    """
    @torch.library.custom_op("mgpu::dropout_mask", mutates_args={"ticket"})
    def dropout_mask(x: torch.Tensor, leading: int, keep: float,
                     ticket: torch.Tensor) -> torch.Tensor:
        ticket[1] += 1
        return draw_mask(x, leading, keep,
                         _by_number[int(ticket[0])].own_generator())

    @dropout_mask.register_fake
    def _(x, leading, keep, ticket):
        return torch.empty(mask_shape(x, leading), dtype=x.dtype,
                           device=x.device)


def check_compiler(devices: Sequence[Any]) -> None:
    """RuntimeError where torch cannot compile."""
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        raise RuntimeError(
            "hybridize=True needs a torch whose torch.compile has "
            f"isolate_recompiles; received {torch.__version__}. Upgrade "
            "torch, or use hybridize=False.")
    if any(device.kind == "gpu" for device in devices):
        from torch.utils._triton import has_triton
        if not has_triton():
            raise RuntimeError(
                "hybridize=True on a GPU needs the compiler Triton; found "
                "none that works. Install triton, or use hybridize=False.")
    if any(device.kind == "cpu" for device in devices):
        from torch._inductor.cpp_builder import get_cpp_compiler
        try:
            get_cpp_compiler()
        except Exception as error:
            raise RuntimeError(
                "hybridize=True on a CPU needs a C++ compiler; found none "
                "that works. Install g++, set the environment variable CXX "
                "to one before the program starts, or use "
                "hybridize=False.") from error
