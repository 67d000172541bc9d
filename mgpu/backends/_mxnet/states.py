"""Per-device state: attributes of blocks set by forward, and running
statistics."""
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends import containers
from mgpu.backends._mxnet.block_tree import (AttributeKey, blocks_of, is_array,
                                             is_recorded, on_context,
                                             state_of, view_of)
from mgpu.backends._mxnet.framework import mx
from mgpu.backends.containers import Batch
from mgpu.backends.other_batch import OtherBatch

autograd, gluon = mx.autograd, mx.gluon


class _State(NamedTuple):
    """An attribute set by forward.

    Valid while the network has the object `shown` with the content `seen`.
    """

    block: Any
    shown: Any
    seen: Any
    values: dict[int, Any]              # by device
    bounds: list[tuple[int, int]] | None    # of the examples, if joined


class DeviceStates:
    """Attributes of a network's blocks on several contexts.

    Arrays, and containers of arrays, have a value for each device. On the
    network, attributes with an entry for each example are joined like
    outputs; others have the value of the first device.

    Parameters
    ----------
    net : Block
    contexts : list of Context
        The first one is that of the network.
    """

    def __init__(self, net: Any, contexts: Sequence[Any]) -> None:
        self._net, self._contexts = net, list(contexts)
        self._states: dict[AttributeKey, _State] = {}

    def begin(self, active: Sequence[int], batch: Batch
              ) -> dict[int, dict[AttributeKey, Any]]:
        """The attributes at the start of the pass, by device, except copies
        of the network's."""
        found: dict[int, dict[AttributeKey, Any]] = {i: {} for i in active}
        bounds = list(batch.bounds)
        for place, state in list(self._states.items()):
            now = vars(state.block).get(place[1])
            values, known = state.values, state.bounds
            is_same = now is state.shown and _content(now) == state.seen
            if not is_same:     # set by the user
                del self._states[place]
            if is_same and known is not None \
                    and known[-1][1] != bounds[-1][1]:
                name = f"{type(state.block).__name__}.{place[1]}"
                for i in active:
                    found[i][place] = containers.replace(
                        now, is_array, partial(OtherBatch, name=name))
                continue
            # Set by the user in another form: used by all devices.
            if not is_same and (known is None or not containers.have_form(
                    now, state.shown, is_array, known[-1][1], bounds[-1][1])):
                continue
            if known is not None and (not is_same or known != bounds
                                      or list(values) != list(active)):
                like = next(iter(values.values()))
                values = {i: batch.split_like(
                    now, values.get(i, like), start, stop, self._contexts[i])
                    for i, (start, stop) in zip(active, bounds, strict=True)}
                self._states[place] = _State(
                    state.block, now, _content(now), values, bounds)
            elif not any(map(is_recorded, containers.arrays_in(
                    now, is_array))):       # the user may have detached it
                values = {i: containers.replace(
                    x, is_array, lambda a: a.detach() if is_recorded(a)
                    else a) for i, x in values.items()}
            for i in found.keys() & values.keys():
                found[i][place] = values[i]
        return found

    def end(self, before: Mapping[AttributeKey, Any],
            views: Mapping[int, Mapping[int, dict[str, Any]]], batch: Batch
            ) -> None:
        """Set the attributes of the network to those set by forward.

        Parameters
        ----------
        before : dict
            Attributes of the first device before its pass.
        views : dict
            Device -> id of a block -> attributes there.
        batch : Batch

        Raises
        ------
        ValueError
            Recorded values differ between devices and have no entry for each
            example.
        """
        first = next(iter(views))
        blocks = {id(block): block for block in blocks_of(self._net)}
        for place, x in state_of(views[first]).items():
            if place[0] not in blocks:
                continue
            block, name = blocks[place[0]], place[1]
            values = {i: view.get(place[0], {}).get(name)
                      for i, view in views.items()}
            is_set = x is not before.get(place, values)
            state = self._states.get(place)
            if state is not None and state.bounds is not None and not is_set:
                if x is state.shown or state.bounds != list(batch.bounds):
                    block.__dict__[name] = state.shown
                    continue    # of another batch size
                is_set = True   # possibly in place
            if not (is_set or is_array(x) or containers.parts(x)
                    or first and isinstance(x, np.ndarray)):
                continue
            if first and not is_set and _content(x) == _content(
                    vars(block).get(name)):
                continue
            shown, bounds = None, None
            if is_set and len(views) > 1 \
                    and containers.arrays_in(x, is_array):
                shown, bounds = _joined(
                    list(values.values()), f"{type(block).__name__}.{name}",
                    place, batch), list(batch.bounds)
            if shown is None:       # use the value of the first device
                shown, bounds = containers.replace(
                    x, is_array, partial(on_context,
                                         context=self._contexts[0])), None
            block.__dict__[name] = shown
            self._states[place] = _State(block, shown, _content(shown),
                                         values, bounds)


def _joined(values: list[Any], name: str, place: AttributeKey, batch: Batch
            ) -> Any:
    """Join the values of the devices. None: use that of the first device."""
    try:
        return batch.join(values, name, place)
    except ValueError as error:
        contents = list(map(_content, values))
        if any(map(is_recorded, containers.arrays_in(values, is_array))) \
                and not all(x == contents[0] for x in contents):
            raise ValueError(
                f"forward has set {name}, which differs between devices and "
                "has no entry for each example. Return it from forward."
            ) from error
        return None


def set_states(net: Any, states: Mapping[AttributeKey, Any]) -> None:
    """Set attributes of the blocks of `net`."""
    view = view_of(net)
    for (key, name), x in states.items():
        if key in view:
            view[key][name] = x


def _content(x: Any) -> Any:
    """Value for comparisons: shape and bytes of arrays."""
    if is_array(x) or isinstance(x, np.ndarray):
        values = x.asnumpy() if is_array(x) else x
        return values.shape, values.tobytes()
    found = containers.parts(x)
    return x if found is None else list(map(_content, found[1]))


# -- running statistics -------------------------------------------------------

#: number of ``set_data`` calls by Parameter; MXNet does not count writes
_sets: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
_set_data = gluon.Parameter.set_data


def _counted_set_data(self: Any, data: Any) -> None:
    """Set this parameter's value on all contexts."""
    _set_data(self, data)
    _sets[self] = sets_of(self) + 1


gluon.Parameter.set_data = _counted_set_data


def sets_of(parameter: Any) -> int:
    """Number of ``set_data`` calls of a Parameter."""
    return _sets.get(parameter, 0)


#: those whose network takes the values of another device
_waiting: "weakref.WeakSet[DeviceStatistics]" = weakref.WeakSet()


def flush_all() -> None:
    """After a backward pass, in which MXNet updates running statistics: copy
    those of the first device with examples to the networks."""
    for one in list(_waiting):
        one.flush()


class _Own(NamedTuple):
    """Values of a parameter on one device.

    Valid while the network has the array `source`, after `sets` calls of
    ``set_data``. Otherwise the device copies the network's values.
    """

    source: Any
    sets: int
    values: Any


class DeviceStatistics:
    """Running statistics of each device, from training passes.

    Parameters
    ----------
    parameters : list of gluon.Parameter
        Running means and variances of the network.
    contexts : list of Context
        The first one is that of the network.
    """

    def __init__(self, parameters: Sequence[Any], contexts: Sequence[Any]
                 ) -> None:
        self.parameters, self._contexts = list(parameters), list(contexts)
        self._own: list[dict[Any, _Own]] = [{} for _ in contexts]
        #: by parameter: the device whose values the network takes
        self._sources: dict[Any, int] = {}

    def own(self, i: int, p: Any) -> Any:
        """The array of device `i`. None: a copy of the network's."""
        one, arrays = self._own[i].get(p), vars(p)["_data"]
        return one.values if one is not None and arrays \
            and one.source is arrays[0] and one.sets == sets_of(p) else None

    def begin(self, i: int) -> dict[Any, Any]:
        """Arrays of device `i` by parameter, which a training pass writes."""
        return {p: self._values(i, p) for p in self.parameters
                if vars(p)["_data"]}

    def _values(self, i: int, p: Any) -> Any:
        values = self.own(i, p)
        if values is None:
            array = vars(p)["_data"][0]
            with autograd.pause():
                values = array.copyto(self._contexts[i])
            self._own[i][p] = _Own(array, sets_of(p), values)
        return values

    def end(self, active: Sequence[int]) -> None:
        """End a training pass of the devices `active`. Other devices copy the
        network. ``set_data`` calls of forward do not count as writes of the
        user."""
        for i, own in enumerate(self._own):
            if i not in active:
                own.clear()
            for p, one in own.items():
                own[p] = one._replace(sets=sets_of(p))
        self._sources = {} if 0 in active else dict.fromkeys(
            self.parameters, active[0])
        (_waiting.add if self._sources else _waiting.discard)(self)

    def flush(self) -> None:
        """Copy the statistics of another device to the network, if its first
        device has no examples. Called after each backward pass, until the
        next training pass."""
        for p, i in self._sources.items():
            values = self.own(i, p)
            if values is not None:
                with autograd.pause():
                    values.copyto(vars(p)["_data"][0])

    def write(self, p: Any, values: Sequence[Any]) -> None:
        """Write ``values[i]`` to device i, and ``values[0]`` to the
        network."""
        self._sources.pop(p, None)
        with autograd.pause():
            for i, value in enumerate(values):
                array = self._values(i, p) if i else vars(p)["_data"][0]
                if value is not array:
                    array[:] = value

    def written(self, p: Any) -> None:
        """Report a write to the network's values, which all devices copy."""
        self._sources.pop(p, None)
        for own in self._own:
            own.pop(p, None)
