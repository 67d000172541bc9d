"""Running statistics of the devices other than the first."""
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from mgpu.backends._mxnet.framework import mx

autograd, gluon = mx.autograd, mx.gluon

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
        self.parameters = list(parameters)
        self._contexts = list(contexts)
        #: statistics are joint: all devices follow the network
        self.joint = False
        self._own: list[dict[int, _Own]] = [{} for _ in contexts]
        #: by id: the device whose values the network takes
        self._sources: dict[int, int] = {}

    def own(self, i: int, p: Any) -> Any:
        """Device `i`'s own array; None: it follows the network."""
        return None if self.joint else self._valid(i, p)

    def _valid(self, i: int, p: Any) -> Any:
        one, arrays = self._own[i].get(id(p)), vars(p)["_data"]
        return one.values if one is not None and arrays \
            and one.source is arrays[0] and one.sets == sets_of(p) else None

    def begin(self, i: int) -> dict[int, Any]:
        """By id of the parameter, device `i`'s arrays for a pass that trains,
        which writes to them."""
        return {id(p): self._values(i, p) for p in self.parameters
                if vars(p)["_data"]}

    def _values(self, i: int, p: Any) -> Any:
        values = self.own(i, p)
        if values is None:
            array, held = vars(p)["_data"][0], self._own[i].get(id(p))
            values = None if held is None else held.values
            with autograd.pause():
                if values is None or values.shape != array.shape \
                        or values.dtype != array.dtype \
                        or type(values) is not type(array):
                    values = array.copyto(self._contexts[i])
                else:
                    array.copyto(values)
            self._own[i][id(p)] = _Own(array, sets_of(p), values)
        return values

    def end(self, active: Sequence[int]) -> None:
        """The devices `active` have trained. What forward has set does not
        count as the user's; other devices follow the network."""
        for i in range(1, len(self._own)):
            for key, p in ((id(p), p) for p in self.parameters):
                if key in self._own[i]:
                    self._own[i][key] = self._own[i][key]._replace(
                        sets=sets_of(p) if i in active else -1)
        self._sources = {} if 0 in active else {
            id(p): active[0] for p in self.parameters}
        (_waiting.add if self._sources else _waiting.discard)(self)

    def settle(self) -> None:
        """Copy to the network what it takes of another device; again after
        each backward pass, until the next pass that trains."""
        if not self._sources:
            return
        with autograd.pause():
            for p in self.parameters:
                i = self._sources.get(id(p))
                values = None if i is None else self._valid(i, p)
                if values is not None:
                    values.copyto(vars(p)["_data"][0])

    def write(self, p: Any, values: Sequence[Any]) -> None:
        """``values[i]`` are device i's own, and ``values[0]`` the
        network's."""
        self._sources.pop(id(p), None)
        with autograd.pause():
            for i, value in enumerate(values):
                array = self._values(i, p) if i else vars(p)["_data"][0]
                if value is not array:
                    array[:] = value

    def written(self, p: Any) -> None:
        """All devices follow the network, whose values somebody has
        written."""
        self._sources.pop(id(p), None)
        for own in self._own:
            if id(p) in own:
                own[id(p)] = own[id(p)]._replace(sets=-1)
