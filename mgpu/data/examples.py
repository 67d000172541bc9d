"""Split the arguments of a network by examples, and join its outputs."""
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from mgpu import environment
from mgpu.backends import containers
from mgpu.backends.containers import Batch, Call, Probed
from mgpu.nested import axis_in
from mgpu.split import shard_bounds

#: calls that ``MGPU_DEBUG=1`` compares with one device
_COMPARED = 3


class Arrays(Protocol):
    """What `BatchSplit` needs of a backend."""

    def is_array(self, x: Any) -> bool:
        """Whether `x` is a native or a NumPy array."""

    def take(self, x: Any, axis: int, start: int, stop: int, device: Any
             ) -> Any:
        """A copy of a slice on `device`; its gradient is that of `x`."""

    def to(self, x: Any, device: Any) -> Any:
        """`x` on `device`; its gradient is that of `x`."""

    def device(self, x: Any) -> Any:
        """Where `x` lies."""

    def concat(self, arrays: Sequence[Any], axis: int, device: Any) -> Any:
        """The arrays joined on `device`."""

    def to_numpy(self, x: Any) -> np.ndarray:
        """A copy on the host."""

    def sequences(self, x: Any) -> list[Any] | None:
        """The examples of a packed batch of sequences; None for all else."""

    def packed(self, sequences: Sequence[Any], like: Any) -> Any:
        """A packed batch of them, in order of length if `like` is."""


class _Argument(NamedTuple):
    name: str
    value: Any
    axis: Any           # of its examples; `list`: an item each; None: whole
    explicit: bool      # the user has named it
    packed: Any = None  # the packed batch that `value` has been


class BatchSplit:
    """How a network's arguments are split by examples.

    Parameters
    ----------
    names : sequence of str
        Of forward's parameters: what positional arguments are called.
    batch_axis : int or dict
        The axis of the examples; by argument name, an axis or `list` for a
        list with an item for each example (default 0).
    whole : sequence of str
        Arguments that each device gets as they are.
    arrays : Arrays
    """

    def __init__(self, names: Sequence[str],
                 batch_axis: int | Mapping[str, Any], whole: Sequence[str],
                 arrays: Arrays) -> None:
        self._names, self._arrays = list(names), arrays
        self._axis_of: Mapping[str, Any] = {}
        self._default: Any = batch_axis
        if isinstance(batch_axis, Mapping):
            self._axis_of, self._default = batch_axis, 0
        self._whole = tuple(whole)
        self._was_split: dict[str, bool] = {}
        self._compared = 0
        #: of the outputs, where they are known
        self._known_axes: dict[Any, Any] = {}

    def expected(self, alone: Callable[[], Any]) -> Any:
        """``alone()``, the output of one device, in the first calls under
        ``MGPU_DEBUG=1``; else None."""
        if self._compared == _COMPARED or not environment.debug():
            return None
        self._compared += 1
        return alone()

    def compared(self, output: Any, expected: Any) -> Any:
        """`output`; warns where it differs from `expected`, if that is not
        None."""
        if expected is None:
            return output
        arrays, to_numpy = self._arrays, self._arrays.to_numpy
        for (name, x), (_, y) in zip(_named(output, arrays.is_array),
                                     _named(expected, arrays.is_array)):
            a, b = (np.asarray(to_numpy(z), "float64") for z in (x, y))
            apart = np.inf if a.shape != b.shape \
                else float(np.abs(a - b).max(initial=0))
            bound = 1e-10 if str(x.dtype).endswith("64") else 1e-4
            if not apart <= bound * max(1.0, np.abs(b).max(initial=0)):
                warnings.warn(
                    f"MGPU_DEBUG: {name} on several devices differs from one "
                    f"device by {apart:.2g}. Forward looks across examples "
                    "(batch norm per device, a mean over the batch), or "
                    "batch_axis= or whole= does not fit an argument.",
                    RuntimeWarning, stacklevel=3)
                break
        return output

    def joining(self, bounds: Sequence[tuple[int, int]], device: Any,
                mode: Any, probe: Callable[[], tuple[Probed | None, int]]
                ) -> "Joining":
        """See `Joining`."""
        return Joining(self._arrays, self._known_axes, self.split_like,
                       bounds, device, mode, probe)

    def size(self, args: Sequence[Any], kwargs: Mapping[str, Any]
             ) -> int | None:
        """The number of examples: the size of the first array along its
        batch axis. None without arrays."""
        return self._first(self._arguments(args, kwargs))[0]

    def _first(self, arguments: Sequence[_Argument]
               ) -> tuple[int | None, Any]:
        """The number of examples, and the array that tells it, if one
        does."""
        for one in arguments:
            if one.axis is list:
                return len(one.value), None
            if one.axis is not None:
                for x in containers.arrays_in(one.value,
                                              self._arrays.is_array):
                    if len(x.shape) > one.axis:
                        return int(x.shape[one.axis]), x
        return None, None

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any], size: int,
              devices: Sequence[Any], bounds: Sequence[tuple[int, int]]
              ) -> list[Call]:
        """The arguments for each device: its examples, (start, stop).

        An array that has `size` entries on its batch axis is split. Others
        go to every device.

        Raises
        ------
        ValueError
            An array of which its shape does not tell whether it has an entry
            for each example, or one that was split before and is not now.
        """
        arguments = self._arguments(args, kwargs)
        _, first = self._first(arguments)
        columns = [self._parts(one, first, size, devices, bounds)
                   for one in arguments]
        count = len(args)
        return [(tuple(row[:count]), dict(zip(kwargs, row[count:])))
                for row in zip(*columns, strict=True)]

    def split_like(self, x: Any, part: Any, start: int, stop: int, device: Any
                   ) -> Any:
        """The examples from `start` to `stop` of `x`, which has the form of
        what `join` has made of `part` and other parts: its arrays are split
        on the axis where those of `part` have another size."""
        like = iter(containers.arrays_in(part, self._arrays.is_array))

        def take(array: Any) -> Any:
            shape = next(like).shape
            for axis, (n, m) in enumerate(zip(array.shape, shape,
                                              strict=True)):
                if n != m:
                    return self._arrays.take(array, axis, start, stop, device)
            return self._arrays.to(array, device)
        return containers.replace(x, self._arrays.is_array, take)

    def with_one_more(self, call: Call, fewer_axes: bool = False) -> Call:
        """`call` with its first example once more at the end. `fewer_axes`:
        the last axis of an array without the batch axis has the examples."""
        args, kwargs = call
        size, array = self.size(args, kwargs), self._arrays
        if args and isinstance(args[0], list):      # an entry each, perhaps
            args = ([*args[0], args[0][0]], *args[1:])

        def more(axis: int, x: Any) -> Any:
            if fewer_axes:
                axis = axis_in(x.shape, axis)
            if len(x.shape) <= axis or x.shape[axis] != size:
                return x
            device = array.device(x)
            return array.concat([x, array.take(x, axis, 0, 1, device)], axis,
                                device)
        values = [one.value if one.axis is None
                  else self._of_entries(one, [*one.value, one.value[0]])
                  if one.axis is list
                  else containers.replace(one.value, array.is_array,
                                          partial(more, one.axis))
                  for one in self._arguments(args, kwargs)]
        return tuple(values[:len(args)]), dict(zip(kwargs,
                                                   values[len(args):]))

    @staticmethod
    def bounds(size: int, devices: int) -> list[tuple[int, int]]:
        """Each device's examples, as (start, stop)."""
        return list(shard_bounds(size, devices))

    @staticmethod
    def probe_bounds(bounds: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """The last device's examples and one more: with fewer, states of
        earlier batches might broadcast."""
        start, stop = bounds[-1]
        return start - 1, stop

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]
                   ) -> list[_Argument]:
        further = [f"argument {n}" for n in range(len(self._names),
                                                  len(args))]
        unknown = {*self._axis_of, *self._whole} - {
            *self._names, *further, *kwargs}
        if unknown:
            raise TypeError(f"forward has no argument {min(unknown)!r}; got "
                            "it in batch_axis or whole. Its arguments are "
                            f"{', '.join(self._names)}.")
        names = [*self._names[:len(args)], *further, *kwargs]
        return list(map(self._argument, names, (*args, *kwargs.values())))

    def _argument(self, name: str, x: Any) -> _Argument:
        if name in self._whole:
            return _Argument(name, x, None, False)
        if (items := self._arrays.sequences(x)) is not None:
            return _Argument(name, items, list, True, x)
        return _Argument(name, x, self._axis_of.get(name, self._default),
                         name in self._axis_of)

    def _of_entries(self, one: _Argument, entries: Any) -> Any:
        """Some entries of an argument, in the form that it has."""
        return entries if one.packed is None \
            else self._arrays.packed(entries, one.packed)

    def _parts(self, one: _Argument, first: Any, size: int,
               devices: Sequence[Any], bounds: Sequence[tuple[int, int]]
               ) -> list[Any]:
        arrays, split = self._arrays, False
        if one.axis not in (None, list) and not one.explicit:
            self._check_lists(one, size)

        def part(device: Any, start: int, stop: int, x: Any) -> Any:
            nonlocal split
            if one.axis is None or len(x.shape) <= one.axis \
                    or x.shape[one.axis] != size:
                return arrays.to(x, device)
            if not one.explicit and x is not first and (
                    len(x.shape) == 1 or len(set(x.shape)) == 1):
                raise ValueError(
                    f"argument {one.name!r} has shape {tuple(x.shape)} in a "
                    f"batch of {size} examples, which does not tell whether "
                    "it has an entry for each example. Pass batch_axis="
                    f"{{{one.name!r}: {one.axis}}} to split it, or "
                    f"whole=({one.name!r},).")
            split = True
            return arrays.take(x, one.axis, start, stop, device)
        if one.axis is list:
            items = [containers.replace(
                one.value[start:stop], arrays.is_array,
                partial(arrays.to, device=device))
                for device, (start, stop) in zip(devices, bounds,
                                                 strict=True)]
            return [self._of_entries(one, own) for own in items]
        parts = [containers.replace(one.value, arrays.is_array,
                                    partial(part, device, start, stop))
                 for device, (start, stop) in zip(devices, bounds,
                                                  strict=True)]
        there = bool(containers.arrays_in(one.value, arrays.is_array))
        if there and not one.explicit and self._was_split.setdefault(
                one.name, split) != split:
            raise ValueError(
                f"argument {one.name!r} was {'' if not split else 'not '}"
                f"split in an earlier batch. Pass batch_axis={{{one.name!r}: "
                f"{one.axis}}} to split it, or whole=({one.name!r},).")
        return parts

    def _check_lists(self, one: _Argument, size: int) -> None:
        """Refuse a list that may have an item for each example."""
        for found in _lists(one.value):
            if len(found) == size and not all(
                    self._arrays.is_array(x) and x.shape[one.axis:][:1]
                    == (size,) for x in found):
                raise ValueError(
                    f"argument {one.name!r} has a list of {size} items in a "
                    f"batch of {size} examples, which does not tell whether "
                    "it has an item for each example. Pass batch_axis="
                    f"{{{one.name!r}: list}} to split it, or "
                    f"whole=({one.name!r},).")


class Joining:
    """Joins what the devices give for the parts of one batch.

    Parameters
    ----------
    arrays : Arrays
    known : dict
        The axes of the outputs by mode and place, which is added to.
    split_like : callable
        See `BatchSplit.split_like`.
    bounds : list of (start, stop)
        The examples of each device.
    device : device
        Where the result lies.
    mode : hashable
        Outputs of another mode may have other axes.
    probe : callable
        Returns what a pass of another number of examples gives, and that
        number; called once at most. None: there is none.
    """

    def __init__(self, arrays: Arrays, known: dict[Any, Any],
                 split_like: Callable[..., Any],
                 bounds: Sequence[tuple[int, int]], device: Any, mode: Any,
                 probe: Callable[[], tuple[Probed | None, int]]) -> None:
        self._arrays, self._known, self._split_like = arrays, known, split_like
        self._device, self._mode = device, mode
        self.bounds = list(bounds)
        #: the number of examples of each device
        self.sizes = [stop - start for start, stop in bounds]
        self._probe = cache(probe)

    def output(self, outputs: Sequence[Any]) -> Any:
        """The devices' outputs as one.

        Raises
        ------
        ValueError
            An array without an axis for the examples, or with several.
        """
        return self._join(list(outputs), "the output", (self._mode,),
                          lambda probed: probed.output)

    def attribute(self, values: Sequence[Any], name: str,
                  place: tuple[int, str]) -> Any:
        """An attribute's values on the devices as one."""
        return self._join(list(values), name, (self._mode, place),
                          lambda probed: probed.attribute(place))

    def batch(self) -> Batch:
        return Batch(self.bounds, self.attribute, self._split_like)

    def _join(self, xs: list[Any], name: str, place: tuple[Any, ...],
              get: Callable[[Probed], Any]) -> Any:
        """`get` takes what is at `place` out of what the probe gave."""
        x, arrays, device = xs[0], self._arrays, self._device
        if arrays.is_array(x) and not isinstance(x, np.ndarray):
            return arrays.concat(xs, self._axis(xs, name, place, get), device)
        if any(type(other) is not type(x) for other in xs):
            raise ValueError(f"{name} has other types on other devices: "
                             f"{', '.join(type(x).__name__ for x in xs)}.")
        items = list(map(arrays.sequences, xs))
        if items[0] is not None:
            return arrays.packed([arrays.to(item, device) for own in items
                                  for item in own or ()], x)
        found = containers.parts(x)
        if found is None:
            if not all(other is x or np.all(other == x) for other in xs) \
                    or not self._is_constant(x, place, get):
                raise ValueError(
                    f"{name} depends on the examples of a device: "
                    f"{str(xs)[:80]}. Return a value for each example.")
            return x
        if type(x) is list and self._is_list(xs, place, get):
            return [containers.replace(item, arrays.is_array, partial(
                arrays.to, device=device)) for part in xs for item in part]
        columns = [containers.parts(other) or ((), ()) for other in xs]
        if any(keys != found[0] for keys, _ in columns):
            raise ValueError(f"{name} has other entries on other devices.")
        return containers.rebuild(x, found[0], [
            self._join([values[n] for _, values in columns],
                       f"{name}[{key!r}]", (*place, n),
                       partial(_entry, get, n))
            for n, key in enumerate(found[0])])

    def _is_constant(self, x: Any, place: tuple[Any, ...],
                     get: Callable[[Probed], Any]) -> bool:
        """Whether a number, or a shape, is the same for other examples."""
        if isinstance(x, (bool, str)) \
                or not isinstance(x, (int, float, complex, tuple)):
            return True
        if place not in self._known:
            other = self._seen(get)[0] if len(set(self.sizes)) == 1 else x
            self._known[place] = other is None or other == x
        return bool(self._known[place])

    def _seen(self, get: Callable[[Probed], Any]) -> tuple[Any, int]:
        """What the probe gave at a place, or None, for how many examples."""
        probed, size = self._probe()
        return None if probed is None else get(probed), size

    def _axis(self, xs: list[Any], name: str, place: tuple[Any, ...],
              get: Callable[[Probed], Any]) -> int:
        shapes = [tuple(x.shape) for x in xs]
        if not shapes[0]:
            raise ValueError(f"{name} is one number on each device. Return a "
                             "value for each example.")
        key, sizes = (*place, len(shapes[0])), self.sizes
        fits = [axis for axis in range(len(shapes[0]))
                if _is_batch_axis(shapes, sizes, axis)]
        if self._known.get(key) in fits:
            return self._known[key]
        if len(set(sizes)) == 1:
            other, size = self._seen(get)
            if self._arrays.is_array(other):
                fits = [axis for axis in fits if _is_batch_axis(
                    [shapes[-1], tuple(other.shape)], [sizes[-1], size],
                    axis)]
        if len(fits) != 1:
            raise ValueError(
                f"{name} has shapes {shapes} on devices with {sizes} "
                f"examples: {'several axes fit' if fits else 'no axis fits'} "
                "them. Return arrays with an entry for each example.")
        self._known[key] = fits[0]
        return fits[0]

    def _is_list(self, xs: list[list[Any]], place: tuple[Any, ...],
                 get: Callable[[Probed], Any]) -> bool:
        """Whether a list has an item for each example."""
        if [len(x) for x in xs] != self.sizes:
            return False
        key = (*place, list)
        if key not in self._known:
            self._known[key] = len(set(self.sizes)) > 1
            if not self._known[key]:
                other, size = self._seen(get)
                self._known[key] = isinstance(other, list) \
                    and len(other) == size
        return bool(self._known[key])


def _lists(x: Any) -> Iterator[list[Any]]:
    """The outermost lists in `x`."""
    if type(x) is list:
        yield x
        return
    for value in (containers.parts(x) or ((), ()))[1]:
        yield from _lists(value)


def _entry(get: Callable[[Probed], Any], n: int, probed: Probed) -> Any:
    """Entry `n` of the container that `get` takes out of `probed`, or
    None."""
    found = containers.parts(get(probed))
    return found[1][n] if found and n < len(found[1]) else None


def _named(x: Any, is_array: Callable[[Any], bool], name: str = "the output"
           ) -> Iterator[tuple[str, Any]]:
    """The arrays in `x`, with names."""
    if is_array(x):
        yield name, x
    for key, value in zip(*(containers.parts(x) or ((), ()))):
        yield from _named(value, is_array, f"{name}[{key!r}]")


def _is_batch_axis(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int],
                   axis: int) -> bool:
    """Whether `axis` has `sizes`, and all else is equal."""
    return all(len(shape) > axis and shape[axis] == size
               for shape, size in zip(shapes, sizes)) and len(
        {shape[:axis] + shape[axis + 1:] for shape in shapes}) == 1
