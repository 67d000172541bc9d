"""What devices have of their own: attributes of blocks that forward sets, and
running statistics."""
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends import containers
from mgpu.backends._mxnet.block_tree import (Place, blocks_of, is_array,
                                             is_recorded, on_context,
                                             state_of, view_of)
from mgpu.backends._mxnet.framework import mx
from mgpu.backends.containers import Batch
from mgpu.backends.other_batch import OtherBatch

autograd, gluon = mx.autograd, mx.gluon


class _State(NamedTuple):
    """An attribute that forward has set.

    It is valid while the network has `shown`, with the content `seen`.
    """

    block: Any
    shown: Any
    seen: Any
    values: dict[int, Any]              # by device
    bounds: list[tuple[int, int]] | None    # of the examples, if it is joined


class DeviceStates:
    """The attributes of a network's blocks on several contexts.

    Arrays and containers of them are each device's own. The network shows
    what has an entry for each example joined like an output, and of all else
    the first device's.

    Parameters
    ----------
    net : Block
    contexts : list of Context
        The first one is the network's.
    """

    def __init__(self, net: Any, contexts: Sequence[Any]) -> None:
        self._net, self._contexts = net, list(contexts)
        self._states: dict[Place, _State] = {}

    def begin(self, active: Sequence[int], batch: Batch
              ) -> dict[int, dict[Place, Any]]:
        """By device, the attributes that its pass begins with, where they are
        not copies of the network's."""
        found: dict[int, dict[Place, Any]] = {i: {} for i in active}
        bounds = list(batch.bounds)
        for place, state in list(self._states.items()):
            now = vars(state.block).get(place[1])
            values, known = state.values, state.bounds
            is_same = now is state.shown and _content(now) == state.seen
            if not is_same:     # the user's
                del self._states[place]
            if is_same and known is not None \
                    and known[-1][1] != bounds[-1][1]:
                name = f"{type(state.block).__name__}.{place[1]}"
                for i in active:
                    found[i][place] = containers.replace(
                        now, is_array, partial(OtherBatch, name=name))
                continue
            # Of the user's in another form: as it is, for all devices.
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
                    now, is_array))):       # the user may have cut it off
                values = {i: containers.replace(
                    x, is_array, lambda a: a.detach() if is_recorded(a)
                    else a) for i, x in values.items()}
            for i in found.keys() & values.keys():
                found[i][place] = values[i]
        return found

    def end(self, before: Mapping[Place, Any],
            views: Mapping[int, Mapping[int, dict[str, Any]]], batch: Batch
            ) -> None:
        """Show on the network what forward has set.

        Parameters
        ----------
        before : dict
            The attributes of the first device before its pass.
        views : dict
            Device -> id of a block -> the attributes that it has there.
        batch : Batch

        Raises
        ------
        ValueError
            Values with a gradient that differ between devices and have no
            entry for each example.
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
                is_set = True   # perhaps in place
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
            if shown is None:       # the first device's stands for all
                shown, bounds = containers.replace(
                    x, is_array, partial(on_context,
                                         context=self._contexts[0])), None
            block.__dict__[name] = shown
            self._states[place] = _State(block, shown, _content(shown),
                                         values, bounds)


def _joined(values: list[Any], name: str, place: Place, batch: Batch) -> Any:
    """The devices' values as one; None where the first device's stands for
    all."""
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


def set_states(net: Any, states: Mapping[Place, Any]) -> None:
    """Set attributes of the blocks of `net`."""
    view = view_of(net)
    for (key, name), x in states.items():
        if key in view:
            view[key][name] = x


def _content(x: Any) -> Any:
    """What to compare: of arrays the shape and the bytes."""
    if is_array(x) or isinstance(x, np.ndarray):
        values = x.asnumpy() if is_array(x) else x
        return values.shape, values.tobytes()
    found = containers.parts(x)
    return x if found is None else list(map(_content, found[1]))


# -- running statistics -------------------------------------------------------

#: by Parameter: the calls of its ``set_data``; MXNet counts no writes
_sets: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
_set_data = gluon.Parameter.set_data


def _counted_set_data(self: Any, data: Any) -> None:
    """Sets this parameter's value on all contexts."""
    _set_data(self, data)
    _sets[self] = sets_of(self) + 1


gluon.Parameter.set_data = _counted_set_data


def sets_of(parameter: Any) -> int:
    """How many times ``set_data`` of a Parameter was called."""
    return _sets.get(parameter, 0)


#: those whose network waits for a device's values
_waiting: "weakref.WeakSet[DeviceStatistics]" = weakref.WeakSet()


def settle_all() -> None:
    """A backward pass, in which MXNet moves running statistics, has ended:
    networks take those of the first device that had examples."""
    for one in list(_waiting):
        one.settle()


class _Own(NamedTuple):
    """A device's own values of a parameter.

    They are valid while the network has `source` in it, after `sets` calls
    of its ``set_data``. Otherwise the device follows the network.
    """

    source: Any
    sets: int
    values: Any


class DeviceStatistics:
    """Each device's own running statistics, from passes that train.

    Parameters
    ----------
    parameters : list of gluon.Parameter
        The network's running means and variances.
    contexts : list of Context
        The first one is the network's.
    """

    def __init__(self, parameters: Sequence[Any], contexts: Sequence[Any]
                 ) -> None:
        self.parameters, self._contexts = list(parameters), list(contexts)
        self._own: list[dict[Any, _Own]] = [{} for _ in contexts]
        #: by parameter: the device whose values the network takes
        self._sources: dict[Any, int] = {}

    def own(self, i: int, p: Any) -> Any:
        """Device `i`'s own array; None: it follows the network."""
        one, arrays = self._own[i].get(p), vars(p)["_data"]
        return one.values if one is not None and arrays \
            and one.source is arrays[0] and one.sets == sets_of(p) else None

    def begin(self, i: int) -> dict[Any, Any]:
        """By parameter, device `i`'s arrays for a pass that trains, which
        writes to them."""
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
        """The devices `active` have trained. What forward has set does not
        count as the user's; other devices follow the network."""
        for i, own in enumerate(self._own):
            if i not in active:
                own.clear()
            for p, one in own.items():
                own[p] = one._replace(sets=sets_of(p))
        self._sources = {} if 0 in active else dict.fromkeys(
            self.parameters, active[0])
        (_waiting.add if self._sources else _waiting.discard)(self)

    def settle(self) -> None:
        """Copy to the network what it takes of another device; again after
        each backward pass, until the next pass that trains."""
        for p, i in self._sources.items():
            values = self.own(i, p)
            if values is not None:
                with autograd.pause():
                    values.copyto(vars(p)["_data"][0])

    def write(self, p: Any, values: Sequence[Any]) -> None:
        """``values[i]`` are device i's own, and ``values[0]`` the
        network's."""
        self._sources.pop(p, None)
        with autograd.pause():
            for i, value in enumerate(values):
                array = self._values(i, p) if i else vars(p)["_data"][0]
                if value is not array:
                    array[:] = value

    def written(self, p: Any) -> None:
        """All devices follow the network, whose values somebody has
        written."""
        self._sources.pop(p, None)
        for own in self._own:
            own.pop(p, None)
