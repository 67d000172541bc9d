"""`mgpu.DataParallel` of a Gluon block.

The network's parameters stay on one context, where device 0 runs the network
itself. The other devices run copies whose parameters are recorded copies, and
the outputs are joined inside the recording: one graph, so that everything
after it is Gluon's own.
"""
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends import containers
from mgpu.backends._mxnet.block_tree import (BlockTree, blocks_of,
                                             is_array, state_of)
from mgpu.backends._mxnet.framework import mx
from mgpu.backends.wrapper import Wrapper, delegate

autograd, gluon = mx.autograd, mx.gluon


class Arrays:
    """See `mgpu.data.examples.Arrays`.

    Of MXNet's operators that select or join, gather_nd, scatter_nd and add_n
    have second derivatives; slices, take and concat have none.
    """

    @staticmethod
    def is_array(x: Any) -> bool:
        return isinstance(x, (mx.nd.NDArray, np.ndarray))

    @classmethod
    def take(cls, x: Any, axis: int, start: int, stop: int, device: Any
             ) -> Any:
        if isinstance(x, np.ndarray):
            return x.take(range(start, stop), axis)
        if not cls._is_recorded(x):
            return x[(slice(None),) * axis + (slice(start, stop),)
                     ].as_in_context(device)
        part = mx.nd.gather_nd(_axis_first(x.as_nd_ndarray(), axis),
                               _indices(start, stop, x.context))
        return _like(_axis_first(part, axis), x).as_in_context(device)

    @staticmethod
    def to(x: Any, device: Any) -> Any:
        return x if isinstance(x, np.ndarray) else x.as_in_context(device)

    @classmethod
    def concat(cls, arrays: Sequence[Any], axis: int, device: Any) -> Any:
        arrays = [x.as_in_context(device) for x in arrays]
        if not cls._is_recorded(arrays[0]):
            return mx.np.concatenate(arrays, axis=axis) if isinstance(
                arrays[0], mx.np.ndarray) else mx.nd.concat(
                *arrays, dim=axis)
        ends = np.cumsum([0] + [x.shape[axis] for x in arrays]).tolist()
        spread = []
        for x, start, stop in zip(arrays, ends, ends[1:], strict=False):
            x = _axis_first(x.as_nd_ndarray(), axis)
            spread.append(mx.nd.scatter_nd(
                x, _indices(start, stop, device),
                shape=(ends[-1], *x.shape[1:])))
        return _like(_axis_first(mx.nd.add_n(*spread), axis), arrays[0])

    @staticmethod
    def to_numpy(x: Any) -> np.ndarray:
        return x if isinstance(x, np.ndarray) else x.asnumpy()

    @staticmethod
    def _is_recorded(x: Any) -> bool:
        return autograd.is_recording() and np.dtype(x.dtype).kind == "f"


def _axis_first(x: Any, axis: int) -> Any:
    """`x` with `axis` and axis 0 swapped."""
    return x.swapaxes(0, axis) if axis else x


def _indices(start: int, stop: int, context: Any) -> Any:
    return mx.nd.arange(start, stop, dtype="int64", ctx=context
                        ).reshape((1, -1))


def _like(x: Any, other: Any) -> Any:
    """`x` in the array family of `other`."""
    return x.as_np_ndarray() if isinstance(other, mx.np.ndarray) else x


class _State(NamedTuple):
    """An attribute that forward has set.

    It is valid while the network has `shown`, with the content `seen`.
    """

    block: Any
    shown: Any
    seen: Any
    values: list[Any]       # of the devices
    is_joined: bool
    size: int               # of the batch


class DataParallel(Wrapper, gluon.Block):  # type: ignore[name-defined]
    """See `mgpu.training.data_parallel.DataParallel`.

    Its parameters, children and attributes are the network's own.
    """

    _contexts: list[Any]
    _split: Any                         # a BatchSplit
    _arrays: list[dict[int, Any]]       # by context: see `BlockTree`
    _states: dict[tuple[int, str], _State]
    _count: int                         # of devices in the last batch

    def __init__(self, net: Any, contexts: Sequence[Any], split: Any,
                 remake: Callable[[Any], Any]) -> None:
        self.__dict__.update({name: vars(net)[name] for name in (
            "_empty_prefix", "_prefix", "_params", "_name", "_scope",
            "_children", "_reg_params")})
        self.__dict__.update(
            module=net, _forward_hooks=type(net._forward_hooks)(),
            _forward_pre_hooks=type(net._forward_pre_hooks)(),
            _contexts=list(contexts), _split=split, _remake=remake,
            _arrays=[{} for _ in contexts], _states={}, _count=0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError("a Gluon block takes no arguments by name; got "
                            f"{', '.join(kwargs)}.")
        return super().__call__(*args)

    def forward(self, *args: Any) -> Any:
        net, split = self.module, self._split
        size = split.size(args, {})
        contexts = self._contexts[:size or 1]
        if size is None or len(self._contexts) == 1:
            return net(*args)
        bounds = split.bounds(size, len(contexts))
        calls = split.split(args, {}, size, contexts, bounds)
        self._check_count(len(contexts))
        if len(contexts) == 1:
            return net(*calls[0][0])
        expected = split.expected(lambda: self._alone(args))
        before = self._put_states(bounds, contexts)
        # Copies are queued before device 0's pass, which keeps it busy.
        trees = [BlockTree(net, context, self._arrays[i + 1], states)
                 for i, (context, states) in enumerate(
                     zip(contexts[1:], before[1:], strict=True))]
        try:
            with contexts[0]:
                outputs = [net(*calls[0][0])]
            for tree, (values, _) in zip(trees, calls[1:], strict=True):
                tree.update()
                with tree.context:
                    outputs.append(tree.net(*values))
                tree.give_back()
        except BaseException:
            _set_states(net, before[0])
            raise
        probed: list[Any] = []

        def probe(place: tuple[int, str] | None = None) -> Any:
            if not probed:
                probed.append(self._probe(args, size, bounds, before[-1]))
            if probed[0] is None:
                return None
            tree, output, count = probed[0]
            return (output if place is None else next(
                vars(new)[place[1]] for block, new in tree.blocks
                if id(block) == place[0])), count
        sizes = [stop - start for start, stop in bounds]
        mode = autograd.is_training(), autograd.is_recording()
        self._keep_states(trees, before[0], sizes, mode, probe)
        return split.compared(split.join(outputs, sizes, contexts[0], mode,
                                         probe), expected)

    def _alone(self, args: Any) -> Any:
        """What a deep copy of the network returns on one device, without
        gradients; None where it cannot be copied."""
        with autograd.pause(train_mode=autograd.is_training()):
            try:
                return copy.deepcopy(self.module)(*args)
            except Exception:
                return None

    def _check_count(self, count: int) -> None:
        """Refuse another number of devices with static shapes.

        MXNet then runs the backward pass of an earlier batch, whether the
        gradients of several devices are added to the weights' or not.
        """
        if self._count not in (0, count) and any(
                ("static_shape", True) in vars(block).get("_flags", ())
                for block in blocks_of(self.module)):
            raise ValueError(
                f"a batch on {count} device(s) after one on {self._count}, "
                "in a network with static_shape=True: MXNet would compute "
                "wrong gradients. Use hybridize(static_alloc=True), or drop "
                "the last batch.")
        self.__dict__["_count"] = count

    def _probe(self, args: Any, size: int, bounds: Any,
               states: dict[tuple[int, str], Any]) -> Any:
        """(copy, output, number of examples) of a pass of the last device
        that nothing else sees; None where it raises."""
        context = self._contexts[len(bounds) - 1]
        part = self._split.probe_bounds(bounds)
        with autograd.pause(), context:
            tree = BlockTree(self.module, context, {}, {
                place: copy.deepcopy(x) if not is_array(x) else x.copy()
                for place, x in states.items()})
            for _, new in tree.blocks:
                new.__dict__.update(_forward_hooks={}, _forward_pre_hooks={})
            (values, _), = self._split.split(args, {}, size, [context],
                                             [part])
            try:
                return tree, tree.net(*values), part[1] - part[0]
            except Exception:
                return None

    # -- what forward sets ----------------------------------------------------

    def _put_states(self, bounds: Any, contexts: Sequence[Any]
                    ) -> list[dict[tuple[int, str], Any]]:
        """The attributes that each device's pass begins with; device 0's are
        set."""
        found: list[dict[tuple[int, str], Any]] = [{} for _ in contexts]
        for place, state in list(self._states.items()):
            now = vars(state.block).get(place[1])
            values = state.values
            fits = not state.is_joined or state.size == bounds[-1][1]
            if not fits or not _is_same(now, state.shown, state.seen):
                # The user's, or of another batch size: for all devices, as
                # it is; a new value of the same form is split again.
                del self._states[place]
                if not fits or not state.is_joined or _shapes(now) != \
                        _shapes(state.shown):
                    continue
                with autograd.pause():
                    values = [self._split.split_like(
                        now, part, start, stop, context)
                        for part, context, (start, stop) in zip(
                            values, contexts, bounds, strict=True)]
            for i in range(min(len(contexts), len(values))):
                found[i][place] = values[i]
        before = {**state_of(self.module), **found[0]}
        _set_states(self.module, found[0])
        found[0] = before
        return found

    def _keep_states(self, trees: list[BlockTree],
                     before: dict[tuple[int, str], Any], sizes: list[int],
                     mode: Any, probe: Any) -> None:
        """Join what forward has set, like an output."""
        copies = [{id(block): new for block, new in tree.blocks}
                  for tree in trees]
        after = state_of(self.module)
        for block, _ in trees[0].blocks:
            for name, x in list(vars(block).items()):
                place = id(block), name
                if place not in after:
                    continue
                values = [x] + [vars(c[id(block)]).get(name) for c in copies]
                is_set = x is not before.get(place, values)
                if not (is_set or is_array(x) or containers.parts(x)):
                    continue
                shown, is_joined = x, False
                if is_set and containers.arrays_in(x, is_array):
                    shown, is_joined = self._join_state(
                        values, f"{type(block).__name__}.{name}", sizes,
                        (mode, place), lambda p=place: probe(p))
                block.__dict__[name] = shown
                self._states[place] = _State(block, shown, _content(shown),
                                             values, is_joined, sum(sizes))

    def _join_state(self, values: list[Any], name: str, sizes: list[int],
                    mode: Any, probe: Any) -> tuple[Any, bool]:
        try:
            return self._split.join(values, sizes, self._contexts[0], mode,
                                    probe), True
        except ValueError as error:
            with autograd.pause():
                contents = [_content(x) for x in values]
            if all(_is_equal(x, contents[0]) for x in contents) \
                    or not autograd.is_recording():
                return values[0], False
            raise ValueError(
                f"forward has set {name}, which differs between devices and "
                "has no entry for each example. Return it from forward."
            ) from error


delegate(DataParallel, gluon.Block, (
    "collect_params", "save_parameters", "load_parameters", "initialize",
    "hybridize", "cast", "apply", "summary", "register_child", "save", "load",
    "setattr", "share_parameters"))


def _set_states(net: Any, states: Mapping[tuple[int, str], Any]) -> None:
    for block in blocks_of(net):
        block.__dict__.update({name: x for (key, name), x in states.items()
                               if key == id(block)})


def _content(x: Any) -> Any:
    """What `_is_same` compares with: of arrays the values."""
    if is_array(x):
        return x.asnumpy()
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
