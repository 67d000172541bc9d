"""The gradients of leaves, and what a backward pass of the user's does there.

torch cuts such a pass into graph tasks: a reentrant checkpoint starts another
one inside it, and several losses may have one each, in threads. Here a pass
is what the user calls one: "write" forgets the old gradient once in it, and
adds up what arrives in pieces.
"""
import functools
import itertools
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mgpu.backends import messages
from mgpu.backends.base import Watch
from mgpu.backends._torch.ops import name_of_dtype
from mgpu.backends._torch.weak import WeakTable

_here = threading.local()       # .start: weak reference to a `_Start`
_numbers = itertools.count(1)
_nothing: Callable[[], Any] = lambda: None      # noqa: E731
_BEFORE, _AFTER = "_backward_hooks", "_post_accumulate_grad_hooks"


# -- passes -------------------------------------------------------------------

def _at_end(callback: Callable[[], Any]) -> None:
    """Call `callback` when the running graph task is done; an error in it
    drops the callback."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class _Start:
    """Lives as long as a graph task of a pass that has a number."""

    def __init__(self, number: int):
        self.number = number

    def __call__(self) -> None:
        _here.start = _nothing


def together() -> Callable[[Any], None]:
    """A function that makes the backward passes from all tensors that it is
    called with count as one."""
    number = -next(_numbers)        # graph tasks count from 0

    def begin(_: Any) -> None:
        start = _Start(number)
        _here.start = weakref.ref(start)
        _at_end(start)
    return lambda root: root.register_hook(begin)


def _pass_number() -> int:
    start = getattr(_here, "start", _nothing)()
    return torch._C._current_graph_task_id() if start is None \
        else start.number


class _Group(Watch):
    """All devices of one network."""

    def __init__(self, *places: "Place") -> None:
        super().__init__()
        self.places: Sequence[Place] = places
        self.lock = threading.Lock()

    def holding(self) -> list[int]:
        """The devices with fresh gradients of "write"."""
        return [i for i, place in enumerate(self.places)
                if any(leaf.fresh and leaf.request == "write"
                       for leaf in place.leaves)]


class Place:
    """The leaves of one network on one device."""

    def __init__(self) -> None:
        self.group, self.leaves = _Group(self), list[_Leaf]()
        self.index = 0      # of the device
        #: whether a graph was recorded here, and what it gave used
        self.recorded = self.used = False
        #: whether an output of such a graph holds no tensor that was found
        self.unseen = False
        self._number: int | None = None     # of the last pass
        self.under_way: Callable[[], Pass | None] = _nothing

    def running(self) -> "Pass":
        """The backward pass that is under way here; it begins now, if none
        is."""
        return self.under_way() or Pass(self)

    @property
    def leads(self) -> bool:
        """Whether it is the first of several: the user's own network."""
        return self.index == 0 and len(self.group.places) > 1

    def record(self) -> None:
        """A graph is recorded here."""
        with self.group.lock:
            if any(place.used for place in self.group.places):
                for place in self.group.places:
                    place.recorded = place.used = place.unseen = False
            self.recorded = True

    def has_part(self) -> bool:
        """Whether a pass through what was recorded here gives a part of the
        gradients: others have theirs."""
        return self.group.wide or any(
            place.recorded for place in self.group.places if place is not self)

    def reached(self, number: int) -> None:
        """The pass `number` writes here: see `Backend.watch_gradients`."""
        if number == self._number:
            return
        with self.group.lock:
            self.group.passes.reached(number, [self.index],
                                      self.group.holding)
        self._number = number
        for leaf in self.leaves:
            if leaf.request == "write":
                leaf.fresh = False


class Pass:
    """A backward pass of the user's through one `Place`, up to its end or to
    an error in it.

    Attributes
    ----------
    undo : callable or None
        Called when the pass ends.
    is_part : bool
        Whether its gradients are those of one device's rows: see
        `Place.has_part`.
    """

    def __init__(self, place: Place):
        self.undo: Callable[[], Any] | None = None
        self.is_part = place.group.wide or place.unseen and place.has_part()
        self._place, self._number = place, _pass_number()
        self._old: dict[_Leaf, Any] = {}    # gradients, until new ones come
        self._edited: set[_Leaf] = set()
        self._written: set[_Leaf] = set()
        place.under_way = weakref.ref(self)
        _at_end(self)       # torch holds the only reference

    def arrives(self, leaf: "_Leaf", x: Any) -> None:
        """A piece of the gradient of `x` is there. It may not be added:
        ``torch.autograd.grad`` gives it to its caller."""
        leaf.gave_part |= self.is_part
        if leaf.number == self._number:
            return      # a later piece
        if leaf.request == "add":
            if leaf.fresh and leaf.edited():
                self._edited.add(leaf)
        elif x.grad is not None:
            self._old[leaf], x.grad = x.grad, None

    def added(self, leaf: "_Leaf", x: Any) -> None:
        """A piece was added to the gradient of `x`."""
        if not x.requires_grad:
            return      # frozen since the forward pass: nothing was added
        old, new = self._old.pop(leaf, None), x.grad
        if old is not None and old.layout is torch.strided \
                and not new.requires_grad:      # create_graph
            # In place: the caller may hold it.
            x.grad = old.copy_(new) if new.layout is old.layout \
                else old.zero_().add_(new)
        if leaf not in self._written:
            self._written.add(leaf)
            self._place.reached(self._number)
            if leaf.number != self._number:
                leaf.is_part = leaf.request == "add" \
                    and (leaf.is_part or leaf.gave_part)
            # After an error in this pass the gradient is of no use.
            leaf.number, leaf.fresh = self._number, False
        leaf.is_part |= self.is_part
        leaf.gave_part = False

    def __call__(self) -> None:
        for leaf in self._written:
            leaf.fresh = True
            if leaf not in self._edited:
                leaf.settle()
        self._end()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        while self._old:
            leaf, gradient = self._old.popitem()
            x = leaf.tensor()
            if x is not None and x.grad is None:
                x.grad = gradient
        undo, self.undo = self.undo, None
        if undo is not None:
            undo()
        self._place.under_way = _nothing


# -- leaves -------------------------------------------------------------------

_BLOCK, _HALF = 1 << 14, np.uint64(32)      # words of 8 bytes
#: odd numbers, drawn once
_FACTORS = np.random.default_rng(0).integers(
    1 << 63, size=_BLOCK, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def _contents(gradient: Any) -> Any:
    """What changes with the contents of a gradient in the host's memory, for
    writes that no version counts; None elsewhere."""
    if not gradient.is_cpu or gradient.layout is not torch.strided:
        return None
    storage = gradient.untyped_storage()
    if storage.nbytes() != gradient.nbytes:
        return None     # others' too
    raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    if raw.nbytes % 8 or raw.nbytes < 1 << 14:
        return zlib.crc32(raw)
    # Faster: sums of the words, and of their upper halves, whose top bits
    # would overflow, each word times another factor: one in 2**32 changes
    # that are not meant to hide leaves both. In blocks, for the cache.
    words, total, upper = raw.view(np.uint64), 0, 0
    halves = np.empty(min(words.size, _BLOCK), np.uint64)
    for at in range(0, words.size, _BLOCK):
        block = words[at:at + _BLOCK]
        factors, half = _FACTORS[:block.size], halves[:block.size]
        np.right_shift(block, _HALF, half)
        # the place of the block counts too
        total = hash((total, int(np.dot(block, factors))))
        upper = hash((upper, int(np.dot(half, factors))))
    return total, upper


@dataclass(slots=True, eq=False)
class _Leaf:
    """The state of the gradient of one tensor."""

    tensor: Callable[[], Any]       # weak: a hook must not keep it alive
    place: Place
    request: str = "null"
    trained: str = "write"  # the last request but "null"
    fresh: bool = False     # written by a backward pass since `mark_used`
    number: int | None = None       # of the last pass that wrote it
    #: whether a pass came by that has no gradient for it: see `_Through`
    passed_by: bool = False
    #: whether the gradient is a part (`Place.has_part`), and whether a caller
    #: has received one, who may have put it there
    is_part: bool = False
    gave_part: bool = False
    #: the gradient, its version and its contents when it was last known
    seen: tuple[Callable[[], Any] | None, int, Any] | None = None
    hooks: tuple[Any, ...] = ()
    #: the parameter on all devices
    everywhere: Sequence["_Leaf"] = ()
    #: on other devices than the first: the hooks that the user has put on the
    #: tensor of the first one, by the name of torch's table
    borrowed: Callable[[str], Sequence[Any]] | None = None

    def is_fresh(self) -> bool:
        return self.fresh and (
            self.request == "add"
            or self.place.index not in self.place.group.passes.void)

    def edited(self) -> bool:
        if self.seen is None:
            return False
        gradient, (known, version, contents) = self.tensor().grad, self.seen
        if known is None:
            return gradient is not None
        return gradient is None or gradient is not known() \
            or gradient._version != version \
            or contents is not None and contents != _contents(gradient)

    def has_part(self) -> bool:
        """Whether the gradient may be that of one device's rows."""
        return self.tensor().grad is not None and (
            self.is_part
            or self.gave_part and (self.seen is None or self.edited()))

    def is_fresh_elsewhere(self) -> bool:
        """Whether other devices have a gradient of this parameter."""
        return any(leaf.is_fresh() for leaf in self.everywhere
                   if leaf is not self)

    def settle(self) -> None:
        gradient = self.tensor().grad
        self.seen = (None, 0, None) if gradient is None else (
            weakref.ref(gradient), gradient._version,
            # `.data` and NumPy write to the user's network, if to any.
            _contents(gradient) if self.place.leads
            and self.place.group.observed else None)

    def arrived(self, gradient: Any) -> Any:
        """Called by torch for each piece, before it is added."""
        self.passed_by = gradient is None
        if self.passed_by:
            return None
        # No name for the pass: an error in a hook keeps this frame, and its
        # pass would not end.
        self.place.running().arrives(self, self.tensor())
        if self.borrowed is None:
            return None
        for hook in self.borrowed(_BEFORE):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def added(self, x: Any) -> None:
        """Called by torch for each piece, after it was added."""
        if self.passed_by:
            return
        self.place.running().added(self, x)
        for hook in self.borrowed(_AFTER) if self.borrowed else ():
            hook(x)


def users_hooks(x: Any, table: str) -> list[Any]:
    """The hooks in a table of torch's that the user has put on a leaf."""
    return [hook for hook in (getattr(x, table) or {}).values()
            if getattr(hook, "__func__", None) not in (
                _Leaf.arrived, _Leaf.added)]


def has_hooks(x: Any) -> bool:
    """Whether the user has put hooks on a leaf."""
    return any(users_hooks(x, table) for table in (_BEFORE, _AFTER))


class Parts:
    """A hook on the steps of all `torch.optim` objects: none moves a network
    by the gradients of one device's rows."""

    def __init__(self, leaves: "Leaves"):
        self._leaves = weakref.ref(leaves)

    def __call__(self, optimizer: Any, args: tuple[Any, ...],
                 kwargs: dict[str, Any]) -> Any:
        own = self._own(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not own or not callable(closure) \
                or isinstance(closure, torch.nn.Module):
            self._check(optimizer, own)
            return None

        @functools.wraps(closure)
        def checked(*given: Any, **named: Any) -> Any:
            loss = closure(*given, **named)     # with a backward pass
            self._check(optimizer, own)
            return loss
        return ((args[0], checked, *args[2:]), kwargs) if len(args) > 1 \
            else (args, {**kwargs, "closure": checked})

    def _own(self, optimizer: Any) -> list[_Leaf]:
        """The leaves that it moves, of networks on several devices."""
        leaves = self._leaves()
        return [] if leaves is None else [
            leaf for group in optimizer.param_groups for x in group["params"]
            if (leaf := leaves.known(x)) and (
                len(leaf.everywhere) > 1 or leaf.place.group.wide)]

    def _check(self, optimizer: Any, own: Sequence[_Leaf]) -> None:
        for group in {leaf.place.group for leaf in own
                      if leaf.has_part() or leaf.is_fresh_elsewhere()}:
            raise RuntimeError(
                "a network on several devices is moved by the gradients of "
                "all of them; received step() of a torch.optim."
                f"{type(optimizer).__name__}, which has those of one, after "
                "a backward pass on "
                + ("several processes" if group.wide
                   else f"{len(group.places)} devices")
                + ". Call trainer.step(batch_size) of mgpu.Trainer(replicas, "
                "optimizer), with a new object; or first "
                "trainer.allreduce_grads(), for sums.")


class Leaves:
    """What a `Backend` says of gradients."""

    def __init__(self) -> None:
        self._leaves = WeakTable()      # of `_Leaf` by tensor
        self._hook: Any = None

    def known(self, x: Any) -> _Leaf | None:
        """What is known of the tensor `x`."""
        return self._leaves.get(id(x))

    def _leaf(self, x: Any) -> _Leaf:
        leaf = self._leaves.get(id(x))
        if leaf is None:
            leaf = _Leaf(weakref.ref(x), Place())
            leaf.place.leaves.append(leaf)
            self._leaves.put(id(x), torch._C._WeakTensorRef(x), leaf)
        return leaf

    def place_of(self, x: Any) -> Place:
        """The place of the leaf `x`."""
        return self._leaf(x).place

    def owner_of(self, x: Any) -> Any:
        """What may be in one backward pass at a time: the place of a known
        leaf, or the leaf."""
        leaf = self._leaves.get(id(x))
        return id(x) if leaf is None else leaf.place

    def watch_gradients(self, leaves: Sequence[Sequence[Any]],
                        requests: Sequence[str]) -> Watch:
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(Parts(self))
        # Their own ones, if they were announced before.
        places = [self._leaf(arrays[0]).place for arrays in leaves]
        group = _Group(*places)
        for i, (place, arrays) in enumerate(zip(places, leaves)):
            place.group, place.index = group, i
            place.leaves = [self._leaf(x) for x in arrays]
            for leaf in place.leaves:
                leaf.place = place
        for everywhere in zip(*(place.leaves for place in places)):
            for leaf in everywhere:
                leaf.everywhere = everywhere
        return group

    def attach_grad(self, x: Any, grad_req: str = "write") -> None:
        messages.check_grad_req(grad_req)
        if not x.dtype.is_floating_point:
            raise messages.no_float(name_of_dtype(x))
        leaf = self._leaf(x)
        for hook in leaf.hooks:
            hook.remove()
        if not x.is_leaf:
            x.detach_()     # a result becomes a leaf, as on MXNet
        x.grad = leaf.seen = None
        leaf.request, leaf.fresh, leaf.hooks = grad_req, False, ()
        x.requires_grad_(grad_req != "null")
        if grad_req != "null":
            leaf.trained = grad_req
            leaf.hooks = (
                x.register_hook(leaf.arrived),
                x.register_post_accumulate_grad_hook(leaf.added))

    def turned(self, x: Any) -> bool:
        """Whether the user has frozen or thawed `x` since `attach_grad`."""
        leaf = self._leaves.get(id(x))
        return x.requires_grad is not (
            leaf is not None and leaf.request != "null")

    def borrow_hooks(self, x: Any, borrowed: Callable[[str], Sequence[Any]]
                     ) -> None:
        """Let the hooks that ``borrowed(table)`` returns act on the leaf `x`
        as if they were its own."""
        self._leaf(x).borrowed = borrowed

    def grad_req(self, x: Any) -> str:
        """What `backward` does to the gradient of `x`."""
        return self.trained_req(x) if x.requires_grad else "null"

    def trained_req(self, x: Any) -> str:
        """What `backward` does to the gradient of `x`, or did until `x` was
        frozen."""
        leaf = self._leaves.get(id(x))
        # Without hooks it was frozen, and torch knows nothing of "add".
        return "write" if leaf is None else leaf.trained

    def grad(self, x: Any) -> Any:
        if not x.requires_grad or not x.is_leaf:
            raise messages.no_gradient()
        if x.grad is None:
            x.grad = torch.zeros_like(x, requires_grad=False)
            leaf = self._leaves.get(id(x))
            if leaf is not None and leaf.seen and leaf.seen[0] is None:
                leaf.settle()       # no edit of the user's
        return x.grad

    def is_fresh(self, x: Any) -> bool:
        leaf = self._leaves.get(id(x))
        return leaf is not None and leaf.is_fresh()

    def mark_used(self, x: Any) -> None:
        leaf = self._leaves.get(id(x))
        if leaf is not None:
            leaf.fresh = leaf.is_part = leaf.gave_part = False
            leaf.place.used = True

    def has_gradient(self, x: Any) -> bool:
        return x.grad is not None

    def edited(self, x: Any) -> bool:
        leaf = self._leaves.get(id(x))
        return leaf is not None and leaf.edited()

    def settle(self, x: Any) -> None:
        leaf = self._leaves.get(id(x))
        if leaf is not None:
            leaf.settle()
