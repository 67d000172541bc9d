"""State of each device of a network: copies of its arrays, running statistics,
and attributes that forward sets.
"""
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from mgpu.backends import containers
from mgpu.backends._torch.tree import Tree, is_tensor, version
from mgpu.backends.containers import Batch
from mgpu.backends.other_batch import of_other_batch

#: key of an attribute: (id of a module, name)
Place = tuple[int, str]
#: value of an attribute that forward has deleted
MISSING = object()


class _Held(NamedTuple):
    """Array or attribute of a device.

    Valid while the network has `original` at that `version`, and, if it is a
    part of `original`, for batches of `size` examples.
    """

    original: Any
    version: Any
    value: Any
    size: int | None = None

    def is_valid(self, x: Any, batch: Batch | None = None) -> bool:
        """Whether it is valid for the network's value `x`; with a `batch`,
        also in that batch."""
        return self.original is x and self.version == version(x) \
            and (batch is None or self.size in (None, _size(batch)))


class Changes(NamedTuple):
    """Attributes and buffers set by a forward pass."""

    attributes: dict[Place, Any]
    buffers: dict[Place, Any]


def _size(batch: Batch) -> int:
    return batch.bounds[-1][1]


class DeviceArrays:
    """Copies of a network's arrays on other devices, and their own running
    statistics.

    Parameters
    ----------
    devices : sequence of torch.device
        The first one is that of the network.
    allocated : callable
        ``allocated(i, arrays)`` reports new arrays on device i.
    """

    def __init__(self, devices: Sequence[torch.device],
                 allocated: Callable[[int, Sequence[torch.Tensor]], None]
                 ) -> None:
        self._devices, self._allocated = devices, allocated
        self._copies: list[dict[int, _Held]] = [{} for _ in devices]
        #: running statistics
        self._own: list[dict[int, _Held]] = [{} for _ in devices]

    def overwrite(self, i: int, arrays: Mapping[int, torch.Tensor], own: bool,
                  some: bool = False) -> dict[int, torch.Tensor]:
        """Copy the values of `arrays`, by id, to device i, except, with
        `own`, valid statistics of its own. Returns the device's arrays.
        `some`: whether the network has other arrays."""
        statistics = self._own[i] if own else {}
        old = self._copies[i]
        new, found = dict(old) if some else {}, {}
        made: list[Any] = []
        same: tuple[list[Any], list[Any]] = [], []
        written: tuple[list[Any], list[Any]] = [], []
        for key, x in arrays.items():
            if key in statistics and statistics[key].is_valid(x):
                found[key] = statistics[key].value
                continue
            held, source, now = old.get(key), x.detach(), version(x)
            if held is None or held.original is not x \
                    or _layout(held.value) != _layout(x):
                found[key] = source.to(self._devices[i], copy=True)
                made.append(found[key])
            else:
                pair = same if held.version == now \
                    and not x.is_inference() else written
                found[key] = held.value
                pair[0].append(held.value)
                pair[1].append(source)
            new[key] = _Held(x, now, found[key])
        if written[0]:
            # torch raises in backward of a graph that needs the old values.
            torch._foreach_copy_(*written, non_blocking=True)
        if same[0]:     # ``p.data`` may have been written
            with torch.autograd._unsafe_preserve_version_counter(
                    tuple(same[0])):
                torch._foreach_copy_(*same, non_blocking=True)
        self._allocated(i, made)
        self._copies[i] = new
        return found

    def of(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The network's array `x`, then the value of each other device."""
        return [x, *(self.overwrite(i, {id(x): x}, True, True)[id(x)]
                     for i in range(1, len(self._devices)))]

    def keep(self, x: torch.Tensor, values: Mapping[int, torch.Tensor]
             ) -> None:
        """Set the running statistic `x` to ``values[i]`` on device i. Devices
        without a value copy that of the network."""
        for i in range(1, len(self._devices)):
            self._own[i].pop(id(x), None)
            if i in values:
                self._own[i][id(x)] = _Held(x, version(x), values[i])
                self._copies[i].pop(id(x), None)    # may be the same array


class DeviceAttributes:
    """Values of attributes that forward sets, on each device.

    Parameters
    ----------
    devices : sequence of torch.device
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._held: list[dict[Place, _Held]] = [{} for _ in devices]

    def copy_of(self, i: int) -> "DeviceAttributes":
        """A copy that shares no memory, of device i only."""
        new = DeviceAttributes(self._devices)
        new._held[i] = {
            key: one._replace(value=_clone(one.value, self._devices[i], {}))
            for key, one in self._held[i].items()}
        return new

    def begin(self, i: int, tree: Tree, batch: Batch | None, private: bool
              ) -> dict[Place, tuple[Any, Callable[[Any], Any] | None]]:
        """Values of attributes in a pass of device i: those that refer to
        modules or arrays, and its own. With `private`, also copies of mutable
        ones. Each with a function that replaces arrays which the device lacks
        in this batch."""
        found: dict[Place, Any] = {}
        clones: dict[int, Any] = {}
        held: dict[Place, _Held] = {}
        mutable = tree.values if private else {}
        for place in {**tree.references, **mutable, **self._held[i]}:
            module = tree.by_id.get(place[0])
            if module is None or place[1] not in vars(module):
                continue
            x, lacks = vars(module)[place[1]], None
            one = known = self._held[i].get(place)
            if one is not None and one.size is None and tree.shares(x):
                one = None      # a view of a parameter, without a version
            elif one is not None and not one.is_valid(x, batch):
                one = self._part(one, x, i, batch)
            if one is None and place in mutable:
                one = _Held(x, version(x), _clone(x, self._devices[i], clones))
            if known is not None and known.size and known.is_valid(x):
                held[place] = known     # possibly of another batch size
            elif one is not None:
                held[place] = one
            if one is None and known is not None and known.size \
                    and batch is not None \
                    and _is_of_other_batch(known, x, batch):
                start, stop = batch.bounds[i]
                lacks = partial(
                    of_other_batch, part=known.value, is_array=is_tensor,
                    name=f"{type(module).__name__}.{place[1]}",
                    sizes=(known.size, _size(batch), stop - start),
                    device=self._devices[i])
            found[place] = x if one is None else one.value, lacks
        self._held[i] = held
        return found

    def _part(self, one: _Held, x: Any, i: int, batch: Batch | None
              ) -> _Held | None:
        """A device's part of a value that the user has set instead of a
        joined one. None if the value is used by all devices."""
        if batch is None or one.size is None \
                or _is_of_other_batch(one, x, batch) \
                or not containers.have_form(x, one.original, is_tensor,
                                            one.size, _size(batch)):
            return None
        start, stop = batch.bounds[i]
        return _Held(x, version(x), batch.split_like(
            x, one.original, one.value, start, stop, self._devices[i]),
            _size(batch))

    def end(self, tree: Tree, changes: Mapping[int, Changes], batch: Batch
            ) -> None:
        """Set the attributes of the network: joined like outputs, or the
        value of device 0. Each device keeps its own value."""
        first = min(changes)
        places = {place: None for one in changes.values()
                  for place in one.attributes}
        for place in places:
            module, name = tree.by_id[place[0]], place[1]
            values = {i: c.attributes[place] for i, c in changes.items()
                      if place in c.attributes}
            shown, size = values.get(first), None
            if len(values) == len(changes) and len(self._devices) > 1 \
                    and not any(x is MISSING for x in values.values()) \
                    and containers.arrays_in(shown, is_tensor):
                with contextlib.suppress(ValueError):
                    shown = batch.join(
                        list(values.values()),
                        f"{type(module).__name__}.{name}", place)
                    size = _size(batch)
            if shown is MISSING:
                vars(module).pop(name, None)
            elif first in values:
                vars(module)[name] = shown
            for i, x in values.items():
                if x is not MISSING and (i or size is not None):
                    self._held[i][place] = _Held(
                        vars(module).get(name), 0, x, size)
        for (key, name), x in changes[first].buffers.items():
            tree.by_id[key]._buffers[name] = x
        for i, held in enumerate(self._held):
            for place, one in list(held.items()):
                now = version(one.original)
                if i and i not in changes and one.version != now:
                    del held[place]     # without examples
                else:       # written in place on device 0
                    held[place] = one._replace(version=now)


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.stride()


def _is_of_other_batch(one: _Held, x: Any, batch: Batch) -> bool:
    """Whether `x` was set by a batch of another size."""
    return one.original is x and one.size not in (None, _size(batch))


def _clone(x: Any, device: torch.device, memo: dict[int, Any]) -> Any:
    """Copy tensors, NumPy arrays and containers to a device. Other objects
    are shared."""
    if id(x) in memo:
        return memo[id(x)]
    if isinstance(x, torch.Tensor):
        new = x.detach().to(device, copy=True)
    elif isinstance(x, (np.ndarray, bytearray, set)):
        new = x.copy()
    else:
        found = containers.parts(x)
        if found is None:
            return x
        new = containers.rebuild(x, found[0], [
            _clone(value, device, memo) for value in found[1]])
    memo[id(x)] = new
    return new
