"""`mgpu.strict_devices` on torch: logical devices by memory block.

All logical CPU devices are torch's one ``cpu``, so what a tensor's device is
has to be remembered beside it. It is remembered by *storage*: views of an
array are on its device. Several logical GPUs on one card are told apart in
the same way.
"""
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu.backends import messages

_ledgers: ContextVar[tuple[Any, ...]] = ContextVar(
    "mgpu_torch_ledgers", default=())

_always: list[Any] = []     # ledgers of the process

# By the address of the storage, which is not used again while a weak
# reference to it is held.
_labels: dict[int, tuple[StorageWeakRef, Any]] = {}
_writing = threading.Lock()
_limit = 1000

#: their other tensor arguments may lie on the host, as with CUDA
_HOST_ARGUMENTS = {
    "aten::index", "aten::_unsafe_index", "aten::index_put",
    "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index_put", "aten::_pack_padded_sequence"}


# -- which device a tensor is on ----------------------------------------------

def _storage(x: torch.Tensor) -> Any:
    try:
        return x.untyped_storage()
    except NotImplementedError:     # sparse tensors have none
        return None


def device_of(x: torch.Tensor) -> Any:
    """The logical `Device` of `x`; None: not known."""
    storage = _storage(x)
    found = None if storage is None else _labels.get(storage._cdata)
    return None if found is None else found[1]


def _label(x: torch.Tensor, device: Any) -> None:
    global _limit
    storage = _storage(x)
    if storage is None:
        return
    with _writing:
        if device is None:
            _labels.pop(storage._cdata, None)
            return
        _labels[storage._cdata] = StorageWeakRef(storage), device
        if len(_labels) > _limit:
            for address, (reference, _) in list(_labels.items()):
                if reference.expired():
                    del _labels[address]
            _limit = 1000 + 2 * len(_labels)


def on() -> bool:
    """Whether the mode holds here."""
    return bool(_active())


def _active() -> tuple[Any, ...]:
    return (*_always, *_ledgers.get())


def place(tensors: Any, device: Any) -> None:
    """`tensors` are on `device` from now on."""
    if on():
        for x in tensors:
            _label(x, device)


def check(x: torch.Tensor, device: Any) -> None:
    """`x` is an input of the replica on `device`."""
    if on():
        actual = device_of(x)
        if actual is None:
            if x.dim():
                _label(x, device)
        elif actual != device:
            raise messages.wrong_device(device, actual)


# -- copies -------------------------------------------------------------------

def _count(ledgers: tuple[Any, ...], source: Any, target: Any,
           x: torch.Tensor) -> None:
    for ledger in ledgers:
        ledger.copy(source, target, x.numel() * x.element_size())


class _Put(torch.autograd.Function):
    """`TorchBackend.put`, whose gradient goes back to the device of `x`.
    torch's own copy knows one CPU device, and could hand the gradient on
    without copying it."""

    @staticmethod
    def forward(ctx, x, copy, source, target):
        ctx.source, ctx.target, ctx.ledgers = source, target, _active()
        ctx.form = x.device, x.dtype
        y = copy(x)
        _label(y, target)
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
    """``copy(x)``, whose result is on `where`: a Device or a tensor."""
    target = device_of(where) if isinstance(where, torch.Tensor) else where
    source = device_of(x) if isinstance(x, torch.Tensor) else None
    if isinstance(x, torch.Tensor) and x.requires_grad \
            and torch.is_grad_enabled():
        return _Put.apply(x, copy, source, target)
    y = copy(x)
    _label(y, target)
    if target is not None:
        _count(_active(), source, target, y)
    return y


def fetched(x: torch.Tensor) -> None:
    """`x` has been copied to the host."""
    if on():
        _count(_active(), device_of(x), None, x)


# -- the mode -----------------------------------------------------------------

class Mode(TorchDispatchMode):
    """Checks every operation of this thread, backward passes included, below
    autograd. One per thread and ledger."""

    def __init__(self, ledger: Any):
        super().__init__()
        self._ledger = ledger

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import torch's compiler, for seconds, with an
        # environment variable left behind.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::copy_":
            self._copy(*args[:2])
            return func(*args, **kwargs)
        if name.startswith(("aten::_foreach_", "aten::_fused_")):
            # Lists with an entry per tensor, of any devices: row by row.
            lists = [a for a in (*args, *kwargs.values())
                     if isinstance(a, (list, tuple)) and a
                     and isinstance(a[0], torch.Tensor)]
            homes = [self._home(name, row) for row in zip(*lists)]
            result = func(*args, **kwargs)
            for x, home in zip(result or (), homes):
                self._inherit(x, home)
            return result
        home = self._home(name, tree_leaves((args, kwargs)))
        result = func(*args, **kwargs)
        if home is not None:
            for x in tree_leaves(result):
                self._inherit(x, home)
        return result

    @staticmethod
    def _inherit(x: Any, home: Any) -> None:
        if home is not None and isinstance(x, torch.Tensor) \
                and device_of(x) is None:
            _label(x, home)

    def _home(self, name: str, inputs: Any) -> Any:
        """The one device of `inputs`; None: none of them has any."""
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        devices = [device_of(x) for x in tensors]
        home = next((d for d in devices if d is not None), None)
        if home is None:
            return None
        if any(d is not None and d != home for d in devices):
            self._ledger.refuse(name.replace("aten::", ""), [
                (d, x.shape) for x, d in zip(tensors, devices)
                if d is not None])
        if name not in _HOST_ARGUMENTS:
            for x, d in zip(tensors, devices):
                if d is None and x.dim():
                    _label(x, home)
        return home

    def _copy(self, into: torch.Tensor, x: torch.Tensor) -> None:
        source, target = device_of(x), device_of(into)
        if target is None:
            if source is not None and into.dim():
                _label(into, source)
        elif source is not None or x.dim():
            self._ledger.copy(source, target, x.numel() * into.element_size())


def always(ledger: Any) -> None:
    """From now on, in this thread and in workers that it gives work to:
    torch has its modes thread by thread."""
    Mode(ledger).__enter__()
    _always.append(ledger)


@contextlib.contextmanager
def strict(ledger: Any) -> Iterator[None]:
    token = _ledgers.set((*_ledgers.get(), ledger))
    try:
        with Mode(ledger):
            yield
    finally:
        _ledgers.reset(token)


def carried() -> list[Mode]:
    """New modes for a worker that works for the calling thread."""
    return [Mode(ledger) for ledger in _active()]
