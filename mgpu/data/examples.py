"""Split the arguments of a network by examples, and join its outputs."""
import enum
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from inspect import Parameter
from typing import Any, NamedTuple, Protocol

import numpy as np

from mgpu.backends import Backend, containers
from mgpu.backends.containers import Batch, Call, Probed
from mgpu.data.nested import axis_in
from mgpu.data.split import shard_bounds
from mgpu.utils import environment
from mgpu.utils.arguments import integer

#: number of calls that ``MGPU_DEBUG=1`` compares with one device
_COMPARED = 3


class Arrays(Protocol):
    """Operations of a backend on native arrays: `Backend.batch_arrays`."""

    def take(self, x: Any, axis: int, start: int, stop: int, device: Any
             ) -> Any:
        """Copy a slice of `x` to `device`. Differentiable."""

    def to(self, x: Any, device: Any) -> Any:
        """Copy `x` to `device`. Differentiable."""

    def concat(self, arrays: Sequence[Any], axis: int, device: Any) -> Any:
        """Concatenate the arrays on `device`."""

    def sequences(self, x: Any) -> list[Any] | None:
        """The examples of a packed batch of sequences; None for other
        types."""

    def packed(self, sequences: Sequence[Any], like: Any) -> Any:
        """A packed batch of the sequences, sorted by length if `like` is."""

    def time_major(self, net: Any) -> list[str]:
        """Paths of recurrent layers with inputs (time, batch, features)."""


#: types of arguments that may select a branch of forward
_OPTIONS = (bool, int, str, type(None), enum.Enum)


class _Argument(NamedTuple):
    name: str
    value: Any
    axis: Any           # of the examples; `list`: an item each; None: whole
    explicit: bool      # named in batch_axis
    packed: Any = None  # the packed batch that `value` was unpacked from


class BatchSplit:
    """Split the arguments of a network by examples.

    Parameters
    ----------
    parameters : sequence of inspect.Parameter
        Those of forward.
    batch_axis : int, dict or None
        Axis of the examples. A dict maps argument names to an axis, or to
        `list` for a list with an item for each example (default 0). None: 0,
        but it must be given if there are `time_major` layers.
    whole : sequence of str
        Arguments passed unsplit to each device.
    backend : Backend
    time_major : sequence of str
        Paths of recurrent layers with inputs (time, batch, features).
    """

    def __init__(self, parameters: Sequence[Parameter],
                 batch_axis: int | Mapping[str, Any] | None,
                 whole: Sequence[str], backend: Backend,
                 time_major: Sequence[str] = ()) -> None:
        self._names = [p.name for p in parameters if p.kind in (
            p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._keywords = [p.name for p in parameters
                          if p.kind is p.KEYWORD_ONLY]
        self._backend = backend
        self.arrays: Arrays = backend.batch_arrays
        self._axis_of: Mapping[str, Any] = {}
        self.batch_axis: Any = 0 if batch_axis is None else batch_axis
        self._time_major = time_major if batch_axis is None else ()
        if isinstance(batch_axis, Mapping):
            self._axis_of, self.batch_axis = batch_axis, 0
        for axis in (self.batch_axis, *self._axis_of.values()):
            if axis is not list:
                integer("batch_axis", axis, 0)
        self._whole = tuple(whole)
        self._was_split: dict[str, bool] = {}
        #: shapes of arrays that earlier batches passed whole
        self._went_whole: dict[str, tuple[int, ...]] = {}
        #: by argument, sizes on the batch axis that were not equal to the
        #: batch size, so that the argument was passed whole
        self.other_sizes: dict[str, set[int]] = {}
        self._compared = 0
        #: (mode, position in the output) -> how the outputs are joined
        self.known: dict[Any, list[Any]] = {}

    def is_array(self, x: Any) -> bool:
        """Whether `x` is a native or NumPy array."""
        return isinstance(x, np.ndarray) or self._backend.is_native(x)

    def take(self, x: Any, axis: int, start: int, stop: int, device: Any
             ) -> Any:
        """Copy a slice of `x` to `device`; NumPy arrays stay on the host."""
        return x.take(range(start, stop), axis) if isinstance(x, np.ndarray) \
            else self.arrays.take(x, axis, start, stop, device)

    def to(self, x: Any, device: Any) -> Any:
        """Copy `x` to `device`; NumPy arrays stay on the host."""
        return x if isinstance(x, np.ndarray) else self.arrays.to(x, device)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], size: int,
            devices: Sequence[Any], mode: Any,
            run: Callable[[dict[int, Call], Batch], Mapping[int, Any]],
            probe: Callable[[Callable[[], Call], int], Probed | None],
            alone: Callable[[], Any]) -> Any:
        """Call the network on `size` examples.

        Parameters
        ----------
        devices : list of device
        mode : hashable
            The mode of the network.
        run : callable
            Runs the call of each device and returns the outputs.
        probe : callable
            ``probe(make_call, n)`` returns the output of ``make_call()`` on
            device n, in a pass without side effects.
        alone : callable
            Returns the output on one device, for ``MGPU_DEBUG=1``.
        """
        bounds = shard_bounds(size, len(devices))
        self.other_sizes = {}
        # With fewer examples, states of earlier batches might broadcast.
        start, stop = bounds[-1][0] - 1, bounds[-1][1]

        def one_more() -> Call:
            return self.split(args, kwargs, size, devices[-1:],
                              [(start, stop)])[0]
        calls = dict(enumerate(
            self.split(args, kwargs, size, devices, bounds)))
        joining = Joining(
            self, bounds, devices[0],
            lambda: (mode, self.form(args, kwargs)),
            lambda: (probe(one_more, len(devices) - 1), stop - start))
        compares = self._compared < _COMPARED and environment.debug()
        expected = alone() if compares else None
        output = joining.output([*run(calls, joining.batch()).values()])
        if compares:
            self._compare(output, expected)
        return output

    def _compare(self, output: Any, expected: Any) -> None:
        """Warn if `output` differs from `expected`, the output on one
        device."""
        self._compared += 1
        for (name, x), (_, y) in zip(self._named(output),
                                     self._named(expected)):
            a, b = (np.asarray(self._backend.to_numpy(z), "float64")
                    for z in (x, y))
            apart = np.inf if a.shape != b.shape \
                else float(np.abs(a - b).max(initial=0))
            bound = 1e-10 if str(x.dtype).endswith("64") else 1e-4
            if not apart <= bound * max(1.0, np.abs(b).max(initial=0)):
                return warnings.warn(
                    f"MGPU_DEBUG: {name} on several devices differs from one "
                    f"device by {apart:.2g}. Forward combines examples "
                    "(batch norm per device, a mean over the batch), or "
                    "batch_axis= or whole= is wrong for an argument.",
                    RuntimeWarning, stacklevel=4)

    def _named(self, x: Any, name: str = "the output"
               ) -> Iterator[tuple[str, Any]]:
        """Names and arrays in `x`."""
        if self.is_array(x):
            yield name, x
        for key, value in zip(*(containers.parts(x) or ((), ()))):
            yield from self._named(value, f"{name}[{key!r}]")

    def size(self, args: Sequence[Any], kwargs: Mapping[str, Any]
             ) -> int | None:
        """Number of examples: the size of the first array along its batch
        axis. None without arrays. Raises ValueError if no array has that
        axis."""
        arguments = self._arguments(args, kwargs)
        size, _ = self._first(arguments)
        if size is None and self.batch_axis and any(shapes := [
                tuple(x.shape) for one in arguments for x
                in containers.arrays_in(one.value, self.is_array)]):
            raise ValueError(
                f"no argument has the axis batch_axis={self.batch_axis}; "
                f"received shapes {shapes}. Correct batch_axis.")
        return size

    def _first(self, arguments: Sequence[_Argument]
               ) -> tuple[int | None, Any]:
        """The number of examples, and the array that determines it, or
        None."""
        for one in arguments:
            if one.axis is list:
                return len(one.value), None
            if one.axis is not None:
                for x in containers.arrays_in(one.value,
                                              self.is_array):
                    if len(x.shape) > one.axis:
                        return int(x.shape[one.axis]), x
        return None, None

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any], size: int,
              devices: Sequence[Any], bounds: Sequence[tuple[int, int]]
              ) -> list[Call]:
        """The arguments for each device, with its examples (start, stop).

        An array with `size` entries on its batch axis is split. Other arrays
        are copied to every device.

        Raises
        ------
        ValueError
            The shape of an array is ambiguous, or an array that was split in
            an earlier batch has another size.
        """
        arguments = self._arguments(args, kwargs)
        _, first = self._first(arguments)
        columns = [self._parts(one, first, size, devices, bounds)
                   for one in arguments]
        count = len(args)
        return [(tuple(row[:count]), dict(zip(kwargs, row[count:])))
                for row in zip(*columns, strict=True)]

    def split_like(self, size: int, x: Any, joined: Any, part: Any,
                   start: int, stop: int, device: Any) -> Any:
        """The examples from `start` to `stop` of `x`, an attribute in the
        place of `joined`, which was joined from `part` and others. An array
        is split along the axis where those two differ, if it has `size`
        entries there."""
        axes = containers.differing_axes(joined, part, self.is_array)

        def take(array: Any) -> Any:
            axis = next(axes, None)
            if axis is None or array.shape[axis:axis + 1] != (size,):
                return self.to(array, device)
            return self.take(array, axis, start, stop, device)
        return containers.replace(x, self.is_array, take)

    def with_one_more(self, call: Call, device: Any) -> Call:
        """`call`, on `device`, with its first example repeated at the end.
        Arrays without the batch axis have the examples on their last axis."""
        args, kwargs = call
        size = self.size(args, kwargs)
        if args and isinstance(args[0], list):      # possibly of examples
            args = ([*args[0], args[0][0]], *args[1:])

        def more(one: _Argument) -> Callable[[Any], Any]:
            paths = iter(self._paths(one))

            def of_array(x: Any) -> Any:
                axis = -1 if one.axis is None else axis_in(x.shape, one.axis)
                if self._went_whole.get(next(paths)) == tuple(x.shape) \
                        or axis < 0 or x.shape[axis] != size:
                    return x
                return self.arrays.concat(
                    [x, self.take(x, axis, 0, 1, device)], axis, device)
            return of_array
        values = [self._changed(one, more(one),
                                lambda items: [*items, items[0]])
                  for one in self._arguments(args, kwargs)]
        return tuple(values[:len(args)]), dict(zip(kwargs,
                                                   values[len(args):]))

    def form(self, args: Sequence[Any], kwargs: Mapping[str, Any]
             ) -> tuple[Any, ...]:
        """Key for the axes of an output: the names of the arguments, and the
        values of options."""
        return tuple((one.name, one.value if isinstance(one.value, _OPTIONS)
                      else len(getattr(one.value, "shape", ())))
                     for one in self._arguments(args, kwargs))

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]
                   ) -> list[_Argument]:
        further = [f"argument {n}" for n in range(len(self._names),
                                                  len(args))]
        unknown = {*self._axis_of, *self._whole} - {
            *self._names, *self._keywords, *further, *kwargs}
        if unknown:
            raise TypeError(f"forward has no argument {min(unknown)!r}; got "
                            "it in batch_axis or whole. Use one of "
                            f"{', '.join(self._names + self._keywords)}.")
        names = [*self._names[:len(args)], *further, *kwargs]
        return list(map(self._argument, names, (*args, *kwargs.values())))

    def _argument(self, name: str, x: Any) -> _Argument:
        if name in self._whole:
            return _Argument(name, x, None, False)
        if (items := self.arrays.sequences(x)) is not None:
            return _Argument(name, items, list, True, x)
        if self._time_major and list(
                containers.arrays_in(x, self.is_array)):
            raise ValueError(
                "batch_axis= must be given for a network with recurrent "
                "layers that have inputs (time, batch, features); got "
                f"{', '.join(self._time_major)}. Pass batch_axis=1, or 0 if "
                "forward swaps the axes.")
        return _Argument(name, x, self._axis_of.get(name, self.batch_axis),
                         name in self._axis_of)

    def _changed(self, one: _Argument, of_array: Callable[[Any], Any],
                 of_items: Callable[[Any], Any]) -> Any:
        """The argument's value with its arrays, or its items, replaced."""
        if one.axis is not list:
            return containers.replace(one.value, self.is_array,
                                      of_array)
        items = of_items(one.value)
        return items if one.packed is None \
            else self.arrays.packed(items, one.packed)

    def _paths(self, one: _Argument) -> list[str]:
        """Names of the arrays in an argument."""
        return [] if one.axis is list else [
            name for name, _ in self._named(one.value, one.name)]

    def _parts(self, one: _Argument, first: Any, size: int,
               devices: Sequence[Any], bounds: Sequence[tuple[int, int]]
               ) -> list[Any]:
        if one.axis not in (None, list) and not one.explicit:
            for found in _lists(one.value):
                if len(found) == size and not all(
                        self.is_array(x) and x.shape[one.axis:][:1]
                        == (size,) for x in found):
                    raise _ambiguous(
                        one.name, "list", f"has a list of {size} items in a "
                        f"batch of {size} examples, which may be one item "
                        "for each example or not")
        names = self._paths(one)
        split: dict[str, bool] = {}

        def part(device: Any, start: int, stop: int) -> Any:
            paths = iter(names)

            def of_array(x: Any) -> Any:
                path, shape = next(paths), tuple(x.shape)
                split[path] = one.axis is not None \
                    and shape[one.axis:one.axis + 1] == (size,) \
                    and self._went_whole.get(path) != shape
                if not split[path]:
                    if one.axis is not None and not one.explicit:
                        self._went_whole[path] = shape
                        self.other_sizes.setdefault(one.name, set()).update(
                            shape[one.axis:one.axis + 1])
                    return self.to(x, device)
                # An array that was split in an earlier batch stays so.
                if not (one.explicit or self._was_split.get(path)) \
                        and x is not first and (
                        len(shape) == 1 or len(set(shape)) == 1):
                    raise _ambiguous(
                        one.name, one.axis, f"has shape {shape} in a "
                        f"batch of {size} examples, which may be one entry "
                        "for each example or not")
                return self.take(x, one.axis, start, stop, device)
            return self._changed(one, of_array, lambda items:
                                 containers.replace(
                                     items[start:stop], self.is_array,
                                     partial(self.to, device=device)))
        parts = [part(device, *bound)
                 for device, bound in zip(devices, bounds, strict=True)]
        for path, now in () if one.explicit else split.items():
            if self._was_split.setdefault(path, now) != now:
                raise _ambiguous(one.name, one.axis, (
                    "was split" if not now else "had another size than the "
                    "batch") + " in an earlier batch")
        return parts


def _ambiguous(name: str, axis: Any, problem: str) -> ValueError:
    return ValueError(
        f"argument {name!r} {problem}. Pass batch_axis={{{name!r}: {axis}}} "
        f"to split it, or whole=({name!r},).")


class Joining:
    """Join the outputs of the devices for one batch.

    Parameters
    ----------
    split : BatchSplit
    bounds : list of (start, stop)
        The examples of each device.
    device : device
        Device of the result.
    mode : callable
        Returns a hashable key; the axes of outputs may depend on it.
    probe : callable
        Returns the result of a pass with another number of examples, or None,
        and that number. Called at most once.
    """

    def __init__(self, split: BatchSplit, bounds: Sequence[tuple[int, int]],
                 device: Any, mode: Callable[[], Any],
                 probe: Callable[[], tuple[Probed | None, int]]) -> None:
        self._split, self._known = split, split.known
        self._device, self._mode = device, cache(mode)
        self.bounds = list(bounds)
        #: number of examples of each device
        self.sizes = [stop - start for start, stop in bounds]
        self._probe = cache(probe)

    def output(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of the devices.

        Raises
        ------
        ValueError
            The axis of the examples in an array cannot be determined.
        """
        return self._join(list(outputs), "the output", (self._mode(),),
                          lambda probed: probed.output)

    def _check_examples(self, name: str, shape: Sequence[int], axis: int
                        ) -> None:
        """Raise ValueError if another argument may hold the examples: its
        size, not the batch size, is that of the output on the batch axis."""
        first = self._split.batch_axis
        if first is list or axis == first or first >= len(shape):
            return
        for other, sizes in self._split.other_sizes.items():
            if shape[first] in sizes:
                raise ValueError(
                    f"{name} has the {sum(self.sizes)} examples on axis "
                    f"{axis}; got {shape[first]} entries on axis {first}, as "
                    f"many as argument {other!r}, which is not split. Name "
                    "the arguments without examples in whole=: "
                    f"whole=({other!r},), or the other arguments.")

    def attribute(self, values: Sequence[Any], name: str,
                  place: tuple[int, str]) -> Any:
        """Join the values of an attribute on the devices."""
        return self._join(list(values), name, (self._mode(), place),
                          lambda probed: probed.attribute(place))

    def batch(self) -> Batch:
        return Batch(self.bounds, self.attribute, partial(
            self._split.split_like, self.bounds[-1][1]))

    def _join(self, xs: list[Any], name: str, place: tuple[Any, ...],
              get: Callable[[Probed], Any]) -> Any:
        """Join `xs`. `get` returns the value at `place` in a `Probed`."""
        x, split, arrays = xs[0], self._split, self._split.arrays
        to = partial(split.to, device=self._device)

        def fitting(options: Any, fits: Callable[[Any, Any, int], bool],
                    *key: Any) -> list[Any]:
            return self._fitting(xs, (*place, *key), get, options, fits)
        if split.is_array(x) and not isinstance(x, np.ndarray):
            return arrays.concat(xs, self._axis(xs, name, fitting),
                                 self._device)
        if any(type(other) is not type(x) for other in xs):
            raise ValueError(f"{name} has different types on the devices: "
                             f"{', '.join(type(x).__name__ for x in xs)}.")
        items = list(map(arrays.sequences, xs))
        if items[0] is not None:
            return arrays.packed([to(item) for own in items
                                  for item in own or ()], x)
        found = containers.parts(x)
        if found is None:
            if not all(other is x or np.all(other == x) for other in xs) \
                    or isinstance(x, (int, float, complex)) \
                    and not isinstance(x, bool) and not fitting(
                        [True], lambda _, y, n: y is None or y == x):
                raise ValueError(
                    f"{name} depends on the examples of a device: "
                    f"{str(xs)[:80]}. Return a value for each example.")
            return x
        if type(x) is list and fitting([list], lambda _, y, n: isinstance(
                y, list) and len(y) == n, list):    # an item for each example
            return [containers.replace(item, split.is_array, to)
                    for part in xs for item in part]
        columns = [containers.parts(other) or ((), ()) for other in xs]
        if any(keys != found[0] for keys, _ in columns):
            raise ValueError(f"{name} has different entries on the devices.")
        return containers.rebuild(x, found[0], [
            self._join([values[n] for _, values in columns],
                       f"{name}[{key!r}]", (*place, n),
                       partial(_entry, get, n))
            for n, key in enumerate(found[0])])

    def _fitting(self, xs: list[Any], place: tuple[Any, ...],
                 get: Callable[[Probed], Any], options: Sequence[Any],
                 fits: Callable[[Any, Any, int], bool]) -> list[Any]:
        """The `options` for which ``fits(option, value, size)`` holds for all
        values. If all devices have the same number of examples and the result
        is not cached, the probe provides a value for another number."""
        values = list(zip(xs, self.sizes))
        for step in range(2):
            options = [one for one in options
                       if all(fits(one, *value) for value in values)]
            if not step and set(self._known.get(place, [None])) <= {*options}:
                return self._known[place]
            if not options or len(set(self.sizes)) > 1:
                break
            probed, size = self._probe()
            values = [(None if probed is None else get(probed), size)]
        self._known[place] = found = list(options)
        return found

    def _axis(self, xs: list[Any], name: str,
              fitting: Callable[..., list[Any]]) -> int:
        shapes = [tuple(x.shape) for x in xs]
        count = len(shapes[0])
        if not count:
            raise ValueError(
                f"{name} must have a value for each example; got a scalar on "
                "each device. Compute a mean over the batch outside the "
                "network, from outputs for each example.")

        def fits(axis: int, x: Any, size: int) -> bool:
            if not self._split.is_array(x):     # of the probe
                return True
            return tuple(x.shape) == (*shapes[0][:axis], size,
                                      *shapes[0][axis + 1:])
        found = fitting(range(count), fits, count)
        if len(found) != 1:
            self._known.clear()     # the next batch may decide
            raise ValueError(
                f"{name} has shapes {shapes} on devices with {self.sizes} "
                f"examples: {'several axes fit' if found else 'no axis fits'} "
                "them. Return arrays with an entry for each example, and give "
                "batch_axis= where an argument has its examples on another "
                "axis than 0.")
        if name.startswith("the output"):
            self._check_examples(name, shapes[0], found[0])
        return found[0]


def _lists(x: Any) -> Iterator[list[Any]]:
    """Outermost lists in `x`."""
    if type(x) is list:
        yield x
        return
    for value in (containers.parts(x) or ((), ()))[1]:
        yield from _lists(value)


def _entry(get: Callable[[Probed], Any], n: int, probed: Probed) -> Any:
    """Entry `n` of the container ``get(probed)``, or None."""
    found = containers.parts(get(probed))
    return found[1][n] if found and n < len(found[1]) else None
