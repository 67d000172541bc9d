"""Tensors that passes of the user's module have left, and what its copies have
in their places, for as long as anyone holds them or their memory."""
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from mgpu.backends import messages
from mgpu.backends._kept import Untold, version
from mgpu.backends._torch.names import joined

_LARGE = 1000       # a collection with more items is data
_SMALL = 4096       # elements of a tensor that are compared
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_NO_PARTS = (*_PLAIN, type, ModuleType, FunctionType,
             BuiltinFunctionType, np.ndarray, torch.Generator)

F = TypeVar("F", bound=Callable[..., Any])
Where = tuple[int, str]     # the number of a layer, and an attribute of it


class Leaf(NamedTuple):
    """A tensor as it is now."""

    tensor: torch.Tensor
    version: int | None         # the number of writes that torch has counted
    content: bytes | None       # see `_content`
    trained: bool = False

    def same(self, other: "Leaf") -> bool:
        return self.tensor is other.tensor and self[1:] == other[1:]


class Unknown(torch.Tensor):
    """Stands in a copy of a module for a tensor that nobody knows there:
    whoever reads it gets `error`. Where torch does not ask, it is NaN."""

    untold: Untold
    error: Exception

    @classmethod
    def __torch_function__(cls, function: Any, types: Any,
                           args: tuple[Any, ...] = (), kwargs: Any = None
                           ) -> Any:
        x = next(x for x in tree_leaves((args, kwargs))
                 if isinstance(x, Unknown))
        raise x.untold.read(x.error)

    def __getattr__(self, name: str) -> Any:
        # Perhaps it stands for an object that a tensor is in.
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.untold.read(self.error)

    def __deepcopy__(self, memo: Any) -> "Unknown":
        return self


def unread(function: F) -> F:
    """`function`, in which no look at an `Unknown` tensor is an error."""
    @wraps(function)
    def quiet(*args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args)
    return quiet    # type: ignore[return-value]


class _Place:
    """A tensor that was left, its memory, and those of the copies."""

    def __init__(self, leaf: Leaf) -> None:
        x, self.version, *_ = leaf
        self.itself = weakref.ref(x)
        self.storage = StorageWeakRef(x.untyped_storage())
        self.form = _form(x)
        self.others: list[torch.Tensor | None] = []


class Places:
    """What passes of a module have left in the attributes of its layers.

    Parameters
    ----------
    layers : list of list of nn.Module
        As of `Attributes`.
    own : set of str
        Attributes of every module, where no pass keeps tensors.
    """

    def __init__(self, layers: Sequence[list[nn.Module]], own: set[str]
                 ) -> None:
        self._first, *self._copies = layers
        self._own = own
        #: the numbers of attributes of torch's layers that hold no tensors
        self._lengths = [
            len(vars(m)) if type(m).__module__.startswith("torch.")
            else None for m in self._first]
        self._places: dict[int, list[_Place]] = {}      # by storage
        self._kept: set[Where] = set()
        self._backward: set[Where] = set()  # where backward passes keep some
        self.untold = Untold()
        self.settle()

    def settle(self) -> None:
        """What there is now is the user's, or no news."""
        self._registered = set(map(id, self._first))
        self._shared = set[int]()       # of `shared`, by `id`
        self._given = self.scan()
        self._of_copies = [{where: self._leaves(copied, where)
                            for where in self._given}
                           for copied in self._copies]
        self._shared = {
            id(x.tensor) for where, leaves in self._given.items()
            for x in leaves if x.trained and any(
                x.tensor is y.tensor for y in self._of_copies[0][where])}
        if self._shared:
            self._given = self.scan()
            self._of_copies = [{where: self._leaves_of(copied, where)
                                for where in self._given}
                               for copied in self._copies]
        self._left = self._given

    def shared(self) -> list[Leaf]:
        """The user's leaves that all copies hold: see `copied`."""
        return [Leaf(x.tensor, version(x.tensor), _content(x.tensor))
                for leaves in self._given.values() for x in leaves
                if id(x.tensor) in self._shared] if self._shared else []

    def check_shared(self, before: Sequence[Leaf]) -> None:
        """ValueError where a pass of a copy has written to `shared`, which
        were `before` it."""
        now = {id(x.tensor): x for x in self.shared()} if before else {}
        for leaf in before:
            if not leaf.same(now.get(id(leaf.tensor), leaf)):
                raise messages.written_leaf(next(
                    self._name(where) for where, leaves in self._given.items()
                    if any(x.tensor is leaf.tensor for x in leaves)))

    @unread
    def leave(self) -> None:
        """A pass of the module has ended."""
        if not self._copies:
            return
        self._left = self.scan()
        for where, leaves in self._left.items():
            given = {id(x): rest for x, *rest in self._given.get(where, ())}
            if any(given.get(id(x)) != rest for x, *rest in leaves):
                self._kept.add(where)

    def follow(self, now: dict[Where, list[Leaf]]
               ) -> dict[Where, list[dict[int, torch.Tensor]]]:
        """What the user, or a call of the module itself, has changed where
        passes leave tensors: for each copy what it is to have in the place of
        each tensor, by `id`. `now`: of `scan`."""
        again, self.untold.again = self.untold.again, False
        if not self._kept:
            return {}
        self._pair()
        found = dict[Where, list[list[torch.Tensor] | None]]()
        for where in self._kept & now.keys():
            old = self._left.get(where, [])
            if _all_same(old, now[where], self._first):
                if again and any(isinstance(x.tensor, Unknown)
                                 for copied in self._of_copies
                                 for x in copied.get(where, ())):
                    found[where] = [None] * len(old)
            else:
                found[where] = [self._elsewhere(
                    x, old[j] if j < len(old) else None)
                    for j, x in enumerate(now[where])]
        names = [self._name(where) for where, columns in found.items()
                 if None in columns]
        return {where: self._in_copies(now[where], columns, partial(
                    messages.untold_array, self._name(where), names))
                for where, columns in found.items()}

    def _in_copies(self, leaves: Sequence[Leaf],
                   columns: Sequence[list[torch.Tensor] | None],
                   error: Callable[[], Exception]
                   ) -> list[dict[int, torch.Tensor]]:
        """By the `id` of each of `leaves` what each copy is to have in its
        place; None: what nobody knows, and to read it is an error."""
        return [{id(leaf.tensor): self._unknown(error) if column is None
                 else column[i] for leaf, column in zip(leaves, columns)}
                for i in range(len(self._copies))]

    def _unknown(self, error: Callable[[], Exception]) -> Unknown:
        x = torch.full((), math.nan).as_subclass(Unknown)
        x.untold, x.error = self.untold, error()
        return x

    def edited(self, now: dict[Where, list[Leaf]]
               ) -> dict[Where, list[dict[int, torch.Tensor]]]:
        """Where the user has changed tensors, or put others, that no pass
        keeps there, and what each copy is to have in the place of those with
        a history. `now`: of `scan`."""
        found = {}
        for where in {**self._left, **now}:
            if where in self._kept | self._backward \
                    or _all_same(self._left.get(where, []),
                                 now.get(where, []), self._first):
                continue
            if any(not _all_same(given.get(where, []),
                                 self._leaves_of(copied, where), copied)
                   for given, copied in zip(self._of_copies, self._copies)):
                self._backward.add(where)
                continue
            computed = [x for x in now.get(where, ())
                        if not x.tensor.is_leaf]
            found[where] = self._in_copies(
                computed, [None] * len(computed),
                partial(messages.no_history, self._name(where)))
        return found

    def _name(self, where: Where) -> str:
        path = next(path for path, m in self._first[0].named_modules()
                    if m is self._first[where[0]])
        return joined(path, where[1])

    def _leaves(self, layers: Sequence[nn.Module], where: Where
                ) -> list[Leaf]:
        return [Leaf(x, None, None, is_trained(x)) if id(x) in self._shared
                else Leaf(x, version(x), _content(x), is_trained(x))
                for x in _tensors(vars(layers[where[0]]).get(where[1]),
                                  self._registered)]

    def _leaves_of(self, copied: list[nn.Module], where: Where
                   ) -> list[Leaf]:
        """The leaves of a copy that are its own."""
        return [x for x in self._leaves(copied, where)
                if id(x.tensor) not in self._shared]

    def scan(self) -> dict[Where, list[Leaf]]:
        """What the attributes hold now; nothing where there are no copies."""
        found: dict[Where, list[Leaf]] = {}
        for number, layer in enumerate(self._first if self._copies else ()):
            attributes = vars(layer)
            if len(attributes) == self._lengths[number] \
                    and not layer._forward_hooks \
                    and not layer._forward_pre_hooks:
                continue
            for name, x in attributes.items():
                if name not in self._own and not isinstance(x, _PLAIN):
                    leaves = self._leaves(self._first, (number, name))
                    if leaves:
                        found[number, name] = leaves
        return found

    def _pair(self) -> None:
        """Note what the copies have in the places of what was left."""
        for key in [key for key, places in self._places.items()
                    if places[0].storage.expired()]:
            del self._places[key]
        for where in self._kept & self._left.keys():
            number, name = where
            leaves = self._left[where]
            others = [_tensors(vars(copied[number]).get(name),
                               self._registered) for copied in self._copies]
            for j, leaf in enumerate(leaves):
                x, n, *_ = leaf
                place = self._find(x)
                if place is None or place.itself() is not x:
                    place = _Place(leaf)
                    self._places.setdefault(place.storage.cdata,
                                            []).append(place)
                place.version = n
                place.others = [
                    each[j] if len(each) == len(leaves)
                    and not isinstance(each[j], Unknown) else None
                    for each in others]

    def _find(self, x: torch.Tensor) -> _Place | None:
        """The place of `x`, or of the tensor that it is without its
        history."""
        places = [place for place in self._places.get(
            x.untyped_storage()._cdata, ()) if place.form == _form(x)]
        return next((p for p in places if p.itself() is x), None) \
            or next((p for p in places if x.grad_fn is None), None)

    def _elsewhere(self, leaf: Leaf, left: Leaf | None
                   ) -> list[torch.Tensor] | None:
        """What the copies are to have where the user has put `x`: what they
        had, perhaps without a history, or zeros; or `x`, if what they had was
        the same. None if that is not certain."""
        x, count, content, _ = leaf
        place = self._find(x)
        if place is not None and all(y is x for y in place.others):
            return [x for _ in self._copies]    # one for all
        if place is not None and place.version == count is not None \
                and None not in place.others and (
                    left is None or left.tensor is not x
                    or left.content == content):
            return [y if place.itself() is x
                    else y.detach().requires_grad_(x.requires_grad)
                    for y in place.others if y is not None]
        had = self._find(left.tensor) if left is not None else None
        others = [] if had is None else [
            y for y in had.others if y is not None]
        whole = len(others) == len(self._copies)
        if not x.any():
            same = whole and left is not None \
                and left.tensor.shape == x.shape
            return [torch.zeros_like(others[i] if same else x,
                                     requires_grad=x.requires_grad
                                     and x.is_leaf)
                    for i in range(len(self._copies))]
        if whole and left is not None \
                and left.version == version(left.tensor) \
                and all(torch.equal(y, left.tensor) for y in others):
            return [x.detach().clone() for _ in others]
        return None


def is_trained(x: torch.Tensor) -> bool:
    """Whether a backward pass writes to the gradient of `x`."""
    return x.requires_grad and x.is_leaf


def _all_same(xs: Sequence[Leaf], ys: Sequence[Leaf],
              layers: Sequence[nn.Module]) -> bool:
    """Whether these are the same tensors, and were not written to but for
    parameters and buffers of `layers`, which follow by themselves."""
    return len(xs) == len(ys) and all(
        x.same(y) or x.tensor is y.tensor and _is_data(x.tensor, layers)
        for x, y in zip(xs, ys))


def _is_data(x: torch.Tensor, layers: Sequence[nn.Module]) -> bool:
    """Whether `x` shares memory with a parameter or buffer."""
    return any(_memory(y) == _memory(x) for m in layers
               for y in (*m._parameters.values(), *m._buffers.values())
               if y is not None)


def _tensors(x: Any, registered: set[int], depth: int = 5,
             met: set[int] | None = None) -> list[torch.Tensor]:
    """The dense ones in an attribute, but not in functions, nor in layers
    that are `registered`."""
    if isinstance(x, torch.Tensor):
        return [x] if x.layout is torch.strided else []
    met = set() if met is None else met
    if isinstance(x, _NO_PARTS) or not depth or id(x) in met:
        return []
    met.add(id(x))
    if isinstance(x, nn.Module):
        return [] if id(x) in registered else [
            t for m in x.modules() for table in (m._parameters, m._buffers)
            for t in table.values() if t is not None]
    if isinstance(x, (dict, list, tuple, set, frozenset, deque)):
        parts = x.values() if isinstance(x, dict) else x
        return [] if len(x) > _LARGE else [
            t for part in parts
            for t in _tensors(part, registered, depth - 1, met)]
    return [t for part in list(getattr(x, "__dict__", {}).values())
            for t in _tensors(part, registered, depth - 1, met)]


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _content(x: torch.Tensor) -> bytes | None:
    """The values of a small tensor, and a sample of those of a large one:
    writes through ``.data`` and NumPy leave no other trace."""
    if x.device.type != "cpu" or not x.is_contiguous():
        return None
    step = -(-x.numel() // _SMALL) or 1
    some = x.detach().view(-1)[::step].contiguous()
    return some.view(torch.uint8).numpy().tobytes()


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype
