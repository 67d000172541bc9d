"""`mgpu.strict_devices` on torch: a logical device for each memory block.

All logical CPU devices are torch's single ``cpu``, so the logical device of a
tensor is stored separately, with its *storage*: views of an array are on its
device. Logical GPUs on one card are distinguished in the same way.
"""
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu.backends import messages
from mgpu.backends.ledger import Ledgers

_ledgers = Ledgers()

#: operations with tensor arguments that may be on the host, as with CUDA
_HOST_ARGUMENTS = {
    "aten::index", "aten::_unsafe_index", "aten::index_put",
    "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index_put", "aten::_pack_padded_sequence"}


# -- devices of tensors -------------------------------------------------------

def device_of(x: torch.Tensor) -> Any:
    """The logical `Device` of `x`, or None if unknown."""
    with contextlib.suppress(NotImplementedError):      # sparse: no storage
        # torch keeps this object alive with the memory.
        return getattr(x.untyped_storage(), "mgpu_device", None)


def _label(x: torch.Tensor, device: Any) -> None:
    with contextlib.suppress(NotImplementedError):
        x.untyped_storage().mgpu_device = device


def on() -> bool:
    """Whether this thread is inside `mgpu.strict_devices`."""
    return bool(_ledgers.active())


def place(tensors: Any, device: Any) -> None:
    """Set the logical device of `tensors`."""
    if on():
        for x in tensors:
            _label(x, device)


def check(x: torch.Tensor, device: Any) -> None:
    """Raise ValueError if `x`, an input of the replica on `device`, is on
    another device."""
    if on():
        _give(x, device)
        if (device_of(x) or device) != device:
            raise messages.wrong_device(device, device_of(x))


def _give(x: torch.Tensor, device: Any) -> None:
    """Set the device of an array without one. 0-dim arrays stay on the
    host."""
    if device is not None and x.dim() and device_of(x) is None:
        _label(x, device)


# -- copies -------------------------------------------------------------------

def _count(ledgers: tuple[Any, ...], source: Any, target: Any,
           x: torch.Tensor) -> None:
    for ledger in ledgers:
        ledger.copy(source, target, x.numel() * x.element_size())


class _Put(torch.autograd.Function):
    """`TorchBackend.put`, whose gradient is copied to the device of `x`.

    For torch's copy all CPU devices are one, so it could pass the gradient
    without a copy.
    """

    @staticmethod
    def forward(ctx, x, copy, source, target):
        ctx.source, ctx.target, ctx.ledgers = source, target, _ledgers.active()
        y = copy(x)
        ctx.form = getattr(x, "device", None), getattr(x, "dtype", None)
        _label(y, target)
        if target is not None:
            _count(ctx.ledgers, source, target, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        device, dtype = ctx.form
        back = gradient.to(device=device, dtype=dtype, copy=True)
        _label(back, ctx.source)
        if ctx.target is not None:
            _count(ctx.ledgers, ctx.target, ctx.source, back)
        return back, None, None, None


def put(copy: Callable[[Any], torch.Tensor], x: Any, where: Any
        ) -> torch.Tensor:
    """Call ``copy(x)``, whose result is on `where`: a Device or a tensor."""
    target = device_of(where) if isinstance(where, torch.Tensor) else where
    source = device_of(x) if isinstance(x, torch.Tensor) else None
    return _Put.apply(x, copy, source, target)


def moved(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy `x` to the device of `like`, if it is on another one."""
    if not on() or device_of(x) == device_of(like):
        return x.to(like.device)
    return put(lambda x: x.to(like.device, copy=True), x, like)


def fetched(x: torch.Tensor) -> None:
    """Count a copy of `x` to the host."""
    if on():
        _count(_ledgers.active(), device_of(x), None, x)


# -- the mode -----------------------------------------------------------------

class Mode(TorchDispatchMode):
    """Dispatch mode that checks every operation of this thread, including
    backward passes, below autograd. One for each thread and ledger."""

    def __init__(self, ledger: Any):
        super().__init__()
        self._ledger = ledger

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import torch's compiler, which takes seconds and sets an
        # environment variable.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name
        if name in ("aten::copy_", "aten::_foreach_copy_"):
            pairs = [args[:2]] if name == "aten::copy_" else zip(*args[:2])
            for into, x in pairs:
                self._copy(into, x)
            return func(*args, **kwargs)
        each = name.startswith(("aten::_foreach_", "aten::_fused_"))
        # Lists with one entry per tensor, of any devices: check each entry.
        rows = list(zip(*(a for a in (*args, *kwargs.values())
                          if isinstance(a, (list, tuple)) and a
                          and isinstance(a[0], torch.Tensor)))) \
            if each else [tree_leaves((args, kwargs))]
        homes = [self._home(name, row) for row in rows]
        result = func(*args, **kwargs)
        made = (result or ()) if each else tree_leaves(result)
        for x, home in zip(made, homes if each else homes * len(made)):
            if home is not None and isinstance(x, torch.Tensor) \
                    and device_of(x) is None:
                _label(x, home)
        return result

    def _home(self, name: str, inputs: Any) -> Any:
        """The one device of `inputs`, or None if no device is known."""
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        known = [(d, x.shape) for x in tensors if (d := device_of(x))]
        home = known[0][0] if known else None
        if any(d != home for d, _ in known):
            self._ledger.reject(name.replace("aten::", ""), known)
        for x in () if name in _HOST_ARGUMENTS else tensors:
            _give(x, home)
        return home

    def _copy(self, into: torch.Tensor, x: torch.Tensor) -> None:
        source, target = device_of(x), device_of(into)
        if target is None:
            _give(into, source)
        elif source is not None or x.dim():
            self._ledger.copy(source, target, x.numel() * into.element_size())


def always(ledger: Any) -> None:
    """Enable the mode permanently in this thread and in its workers: torch's
    modes are thread-local."""
    Mode(ledger).__enter__()
    _ledgers.add(ledger)


@contextlib.contextmanager
def strict(ledger: Any) -> Iterator[None]:
    """See `mgpu.backends.base.Backend.strict`."""
    with _ledgers.using(ledger), Mode(ledger):
        yield


def carried() -> list[Mode]:
    """New modes for a worker of the calling thread."""
    return [Mode(ledger) for ledger in _ledgers.active()]
