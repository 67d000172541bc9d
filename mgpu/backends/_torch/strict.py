"""`mgpu.strict_devices` on torch: a logical device for each memory block.

All logical CPU devices are torch's one ``cpu``, so the device of a tensor has
to be remembered apart from the tensor. It is remembered by *storage*: views
of an array are on its device. Several logical GPUs on one card are told apart
in the same way.
"""
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu.backends import messages
from mgpu.backends._torch.weak import WeakTable
from mgpu.backends.ledger import Ledgers

_ledgers = Ledgers()

# Devices by storage. Its address is not reused while there is a weak reference
# to it.
_labels = WeakTable()
_writing = threading.Lock()

#: operations whose other tensor arguments may lie on the host, as with CUDA
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
    """The logical `Device` of `x`, or None if it is not known."""
    storage = _storage(x)
    return None if storage is None else _labels.get(storage._cdata)


def _label(x: torch.Tensor, device: Any) -> None:
    storage = _storage(x)
    if storage is not None:
        with _writing:
            if device is None:
                _labels.pop(storage._cdata)
            else:
                _labels.put(storage._cdata, StorageWeakRef(storage), device)


def on() -> bool:
    """Whether this thread is inside `mgpu.strict_devices`."""
    return bool(_ledgers.active())


def place(tensors: Any, device: Any) -> None:
    """Remember that `tensors` are on `device`."""
    if on():
        for x in tensors:
            _label(x, device)


def check(x: torch.Tensor, device: Any) -> None:
    """Refuse `x` as an input of the replica on `device` if it is elsewhere."""
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

    torch's own copy knows one CPU device, and could pass the gradient on
    without copying it.
    """

    @staticmethod
    def forward(ctx, x, copy, source, target):
        ctx.source, ctx.target, ctx.ledgers = source, target, _ledgers.active()
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
    """Call ``copy(x)``, whose result is on `where`: a Device or a tensor."""
    target = device_of(where) if isinstance(where, torch.Tensor) else where
    source = device_of(x) if isinstance(x, torch.Tensor) else None
    if isinstance(x, torch.Tensor) and x.requires_grad \
            and torch.is_grad_enabled():
        return _Put.apply(x, copy, source, target)
    y = copy(x)
    _label(y, target)
    if target is not None:
        _count(_ledgers.active(), source, target, y)
    return y


def moved(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`x` on the device of `like`."""
    if not on() or device_of(x) == device_of(like):
        return x.to(like.device)
    return put(lambda x: x.to(like.device, copy=True), x, like)


def fetched(x: torch.Tensor) -> None:
    """Count that `x` has been copied to the host."""
    if on():
        _count(_ledgers.active(), device_of(x), None, x)


# -- the mode -----------------------------------------------------------------

class Mode(TorchDispatchMode):
    """Checks every operation of this thread, including backward passes, below
    autograd. There is one for each thread and ledger."""

    def __init__(self, ledger: Any):
        super().__init__()
        self._ledger = ledger

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import torch's compiler, which takes seconds and leaves
        # an environment variable behind.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::copy_":
            self._copy(*args[:2])
            return func(*args, **kwargs)
        if name == "aten::_foreach_copy_":
            for pair in zip(*args[:2], strict=True):
                self._copy(*pair)
            return func(*args, **kwargs)
        if name.startswith(("aten::_foreach_", "aten::_fused_")):
            # Lists with one entry per tensor, of any devices: row by row.
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
        """The one device of `inputs`, or None if no device is known."""
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
    """Turn the mode on for good in this thread, and in workers that it gives
    work to: torch has its modes thread by thread."""
    Mode(ledger).__enter__()
    _ledgers.add(ledger)


@contextlib.contextmanager
def strict(ledger: Any) -> Iterator[None]:
    """See `mgpu.backends.base.Backend.strict`."""
    with _ledgers.using(ledger), Mode(ledger):
        yield


def carried() -> list[Mode]:
    """New modes for a worker that the calling thread gives work to."""
    return [Mode(ledger) for ledger in _ledgers.active()]
