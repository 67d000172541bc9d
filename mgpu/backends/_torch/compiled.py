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

from mgpu.backends._torch.arithmetic import draw_mask, mask_shape

if TYPE_CHECKING:
    from mgpu.backends._torch.replica import TorchReplica

_numbers = itertools.count()
_by_number: "weakref.WeakValueDictionary[int, TorchReplica]" = \
    weakref.WeakValueDictionary()


def ticket_for(replica: "TorchReplica") -> torch.Tensor:
    """What stands for `replica` in compiled code: (its number, the masks
    that compiled code has drawn for it)."""
    number = next(_numbers)
    _by_number[number] = replica
    return torch.tensor([number, 0])


class _Compiling:
    """Compiled networks run at the same time; one that may have to be
    compiled runs alone. While torch traces, calls of compiled functions in
    other threads are errors to it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running, self._alone = 0, False

    @contextlib.contextmanager
    def __call__(self, alone: bool) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not (
                alone and self._running))
            self._running += 1
            self._alone = alone
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._alone = False
                self._changed.notify_all()


compiling = _Compiling()


@contextlib.contextmanager
def threads(wanted: int) -> Iterator[None]:
    """Cores for this thread, which may be the user's own: compiled code is
    made for a number of them."""
    before = torch.get_num_threads()
    if before != wanted:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if before != wanted:
            torch.set_num_threads(before)


#: shapes of inputs (and other conditions) of one replica, training or
#: predicting, that are compiled; after these torch runs layer by layer
_SHAPES = 32


def compile_module(module: nn.Module, cores: int) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        return module(*inputs)
    # Replicas share their source code, on which torch counts compilations.
    return torch.compile(
        run, dynamic=False, isolate_recompiles=True, recompile_limit=_SHAPES,
        # torch's own random streams, which `_in_turn` looks after
        options={"cpp.threads": cores, "fallback_random": True})


@cache
def define_mask() -> None:
    """Make the drawing of a mask one operation to the compiler. That it
    writes to the ticket keeps it from being left out, done twice, put in
    another order or made one with another."""
    @torch.library.custom_op("mgpu::dropout_mask", mutates_args={"ticket"})
    def dropout_mask(x: torch.Tensor, leading: int, keep: float,
                     ticket: torch.Tensor) -> torch.Tensor:
        ticket[1] += 1
        return draw_mask(x, leading, keep,
                         _by_number[int(ticket[0])].generator())

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
