"""What forward sets in attributes of blocks, on each device."""
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends import containers
from mgpu.backends._mxnet.block_tree import (Place, blocks_of, is_array,
                                             is_recorded, on_context,
                                             state_of)
from mgpu.backends._mxnet.framework import mx
from mgpu.backends.containers import Batch

autograd = mx.autograd


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
            is_same = _is_same(now, state.shown, state.seen)
            fits = known is None or known[-1][1] == bounds[-1][1]
            if not is_same:     # the user's
                del self._states[place]
            if not fits:        # of another batch size: as it is
                continue
            if not is_same or known is not None and (
                    known != bounds or list(values) != list(active)):
                # A value of the same form is split again; others go to all
                # devices as they are.
                if known is None or _shapes(now) != _shapes(state.shown):
                    continue
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
                    continue    # of another batch size
                is_set = True   # perhaps in place
            if not (is_set or is_array(x) or containers.parts(x)
                    or first and isinstance(x, np.ndarray)):
                continue
            shown, bounds = self._on_first(x), None
            if first and not is_set and _is_equal(
                    _content(x), _content(vars(block).get(name))):
                continue
            if is_set and len(views) > 1 \
                    and containers.arrays_in(x, is_array) \
                    and self._is_joined(values, place, block, batch):
                shown, bounds = vars(block)[name], list(batch.bounds)
            block.__dict__[name] = shown
            self._states[place] = _State(block, shown, _content(shown),
                                         values, bounds)

    def _is_joined(self, values: Mapping[int, Any], place: Place, block: Any,
                   batch: Batch) -> bool:
        """Join the devices' values, and set the attribute to that. False
        where the first device's stands for all."""
        name = f"{type(block).__name__}.{place[1]}"
        try:
            block.__dict__[place[1]] = batch.join(list(values.values()), name,
                                                  place)
            return True
        except ValueError as error:
            if not any(is_recorded(x) for x in containers.arrays_in(
                    list(values.values()), is_array)):
                return False
            contents = list(map(_content, values.values()))
            if all(_is_equal(x, contents[0]) for x in contents):
                return False
            raise ValueError(
                f"forward has set {name}, which differs between devices and "
                "has no entry for each example. Return it from forward."
            ) from error

    def _on_first(self, x: Any) -> Any:
        return containers.replace(x, is_array, lambda a: on_context(
            a, self._contexts[0]))


def set_states(net: Any, states: Mapping[Place, Any]) -> None:
    """Set attributes of the blocks of `net`."""
    for block in blocks_of(net):
        block.__dict__.update({name: x for (key, name), x in states.items()
                               if key == id(block)})


def _content(x: Any) -> Any:
    """What `_is_same` compares with: of arrays the values."""
    if is_array(x):
        return x.asnumpy()
    if isinstance(x, np.ndarray):
        return x.copy()
    found = containers.parts(x)
    return x if found is None else list(map(_content, found[1]))


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two results of `_content` are equal; NaN equals NaN."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b, equal_nan=True)
    return a is b or type(a) is type(b) and bool(a == b)


def _is_same(x: Any, shown: Any, seen: Any) -> bool:
    """Whether `x` is `shown`, and has the content that `shown` had."""
    return x is shown and _is_equal(_content(x), seen)


def _shapes(x: Any) -> list[tuple[int, ...]]:
    return [tuple(a.shape) for a in containers.arrays_in(x, is_array)]
