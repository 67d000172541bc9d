"""Where do two networks differ first?"""
import difflib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends.probing import Layer
from mgpu.parity.matching import Plan, close
from mgpu.parity.run import LayerCall


#: the kinds of activations, in Gluon's words
ACTIVATIONS = {"clip", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh",
               "leaky_relu", "relu", "relu6", "selu", "sigmoid", "softrelu",
               "softsign", "swish", "tanh"}
#: kinds of layers that a port may take for one another
_ALIKE = {**dict.fromkeys(ACTIVATIONS, "activation"), **{
    f"{size}{kind}_pool": "pool" for kind in ("avg", "max")
    for size in ("", "global_", "adaptive_")}}
#: of which either may come first
_TURNS = {"activation", "pool"}
#: scores as large as that are those of a mask
_MASK = 1e4
#: layers that compute one thing, whatever a port makes of them
_PLAIN = {"activation", "pool", "dense", "conv", "conv_transpose",
          "embedding"}
#: Gluon's names of activations
NAMES = {"silu": "swish", "softplus": "softrelu"}


def kind_of(path: str, layers: Mapping[str, Layer]) -> str:
    """The kind of a layer, or of a function: "F.relu after conv1"."""
    layer = layers.get(path)
    kind = path.removeprefix("F.").partition(" ")[0] if layer is None \
        else layer.kind
    return NAMES.get(kind, kind)


class Location(NamedTuple):
    """The first layer whose output differs.

    Attributes
    ----------
    a, b : mgpu.backends.probing.Layer or None
        None where a layer has no counterpart.
    inputs_agree : bool
        False: its input differs already, although all layers before it
        agree. The cause is a function between the layers.
    call_a, call_b : LayerCall
        With the output behind the activation that follows, where the other
        side's layer has one inside.
    at : (int, int)
        The places of the calls among those of each side.
    inner : list of ndarray
        The outputs of the layers themselves, where those above are others.
    """

    a: Layer | None
    b: Layer | None
    inputs_agree: bool
    call_a: LayerCall
    call_b: LayerCall
    at: tuple[int, int] = (0, 0)
    inner: list[np.ndarray] = []


def together(layers_a: Iterable[Layer], layers_b: Iterable[Layer],
             plan: Plan) -> list[tuple[set[str], set[str]]]:
    """Layers of a and of b (paths) that have parameters in pieces of one
    another, or whose parameters belong to several layers of the other side
    (those of an attention): only together they are partners."""
    owners: list[dict[str, set[str]]] = [{}, {}]
    for own, layers in zip(owners, (layers_a, layers_b)):
        for layer in layers:
            for name in layer.parameters:
                own.setdefault(name, set()).add(layer.path)
    links = [[{path for n in names for path in own.get(n, ())}
              for own, names in zip(owners, (pair.a, pair.b))]
             for pair in plan.pairs]
    found: list[tuple[set[str], set[str]]] = []
    # a tied weight has several layers by itself
    alone = {(*one, *two) for one, two in links if len(one) == len(two) == 1}
    several = {(side, path) for side in (0, 1) for path, count in Counter(
        both[side] for both in alone).items() if count > 1}
    for pair, (one, two) in zip(plan.pairs, links):
        if len(one) == len(two) == 1:
            if not {(0, *one), (1, *two)} & several:
                continue
        elif pair.whole:
            continue
        size = 0
        while size < len(one) + len(two):   # what they share with others
            size = len(one) + len(two)
            for x, z in links:
                if x & one or z & two:
                    one, two = one | x, two | z
        if (one, two) not in found:
            found.append((one, two))
    return found


def pairs(paths_a: Sequence[str], paths_b: Sequence[str],
          layers_a: Mapping[str, Layer], layers_b: Mapping[str, Layer],
          plan: Plan, groups: bool = False) -> Iterator[tuple[int, int]]:
    """The numbers of the calls of two sides that belong together.

    A layer with parameters is paired with the layer of their partners,
    others by kind, in the order of the calls between those. Layers that are
    partners only `together` are left out; `groups`: their last calls are
    paired.
    """
    joint = together(layers_a.values(), layers_b.values(), plan)

    def keys(paths: Sequence[str], layers: Mapping[str, Layer], side: int
             ) -> Iterator[str]:
        names = {n: p.a[0] for p in plan.pairs for n in (p.a, p.b)[side]}
        members = {path: i for i, group in enumerate(joint)
                   for path in group[side]}
        # by its group, the layer that is called last
        last = {members[path]: path for path in paths if path in members}
        for path in paths:
            layer, kind = layers.get(path), kind_of(path, layers)
            if path in members:
                number = members[path]
                yield f"group {number}" if groups and last[number] == path \
                    else f"{side} {path}"
            else:
                yield next((names[n] for n in (
                    layer.parameters if layer else ()) if n in names),
                    _ALIKE.get(kind, kind))
    for block in difflib.SequenceMatcher(
            None, [*keys(paths_a, layers_a, 0)],
            [*keys(paths_b, layers_b, 1)], autojunk=False
            ).get_matching_blocks():
        for k in range(block.size):
            yield block.a + k, block.b + k


def ends(calls: tuple[Sequence[LayerCall], Sequence[LayerCall]],
         at: tuple[int, int],
         layers: tuple[Mapping[str, Layer], Mapping[str, Layer]]
         ) -> tuple[int, int]:
    """The numbers of the calls whose outputs are those of the pair `at`:
    behind the activation that follows, where the other side's layer has one
    inside."""
    def end(side: int) -> int:
        i = at[side]
        other = layers[1 - side].get(calls[1 - side][at[1 - side]].path)
        inside = other.options.get("activation") if other else None
        return i + 1 if inside and calls[side][i + 1:] and kind_of(
            calls[side][i + 1].path, layers[side]) in ACTIVATIONS else i
    return end(0), end(1)


def locate(*arguments: Any, **options: Any) -> Location | None:
    """The first of the `differences`, or None."""
    return next(differences(*arguments, **options), None)


def differences(calls_a: Sequence[LayerCall], calls_b: Sequence[LayerCall],
                of_a: Mapping[str, Layer], of_b: Mapping[str, Layer],
                plan: Plan, tolerance: float, summarised: bool = False
                ) -> Iterator[Location]:
    """The layers whose outputs differ, in their order. `pairs` says which
    belong together. Those of `summarised` calls cannot be joined. A layer
    whose outputs have other sizes is the place of what differs behind it,
    unless a layer that follows gets the same on both sides."""
    waiting: _Waiting | None = None
    yielded = False
    for at, place in _met(calls_a, calls_b, of_a, of_b, plan, tolerance,
                          summarised):
        reached = waiting is not None and waiting.reaches(at)
        if waiting is not None and (place is None or place.inputs_agree) \
                and (reached or not waiting.sure):
            waiting = None
        if place is None:
            continue
        one, two = place.call_a, place.call_b
        given, returned = (
            _sizes(x, summarised)[:1] == _sizes(z, summarised)[:1]
            for x, z in ((one.inputs, two.inputs), (one.outputs, two.outputs)))
        sure = place.inputs_agree or all(
            layer and layer.parameters for layer in (place.a, place.b))
        turn = returned and not place.inputs_agree and {
            _ALIKE.get(kind_of(call.path, of)) for call, of in (
                (one, of_a), (two, of_b))} <= _TURNS
        if turn and waiting is None:
            # the one before the other on one side, behind it on the other
            waiting = _Waiting(place, True, (calls_a, calls_b))
            if waiting.is_read():
                continue
            waiting = None
        if returned or given and not place.inputs_agree:
            if waiting is not None and waiting.sure and not place.inputs_agree:
                yield waiting.place
                waiting = None
            yield place
            yielded = True
        elif waiting is not None and reached and not place.inputs_agree:
            waiting.goes_on(place)
            waiting.sure |= sure
        elif waiting is None or sure and not waiting.sure:
            waiting = _Waiting(place, sure, (calls_a, calls_b))
    if waiting is not None and (not yielded or waiting.compared):
        yield waiting.place


class _Waiting:
    """A layer whose outputs have other sizes, or that gets something else,
    until it is known whether what follows differs.

    Attributes
    ----------
    place : Location
    sure : bool
        Whether it is one if what follows differs. Layers that get other sizes
        too are not: functions may be called in another order.
    """

    def __init__(self, place: Location, sure: bool,
                 calls: tuple[Sequence[LayerCall], Sequence[LayerCall]]):
        self.place, self.sure, self._calls = place, sure, calls
        self.compared = len({x.size for call in (place.call_a, place.call_b)
                             for x in call.outputs[:1]}) == 1
        self.goes_on(place)

    def goes_on(self, last: Location) -> None:
        """`last` has other sizes because of it."""
        self._readers = [
            _readers(calls, k, call) for calls, k, call in zip(
                self._calls, last.at, (last.call_a, last.call_b))]

    def is_read(self) -> bool:
        """Whether a call is known to get what it gives."""
        return any(self._readers)

    def reaches(self, at: tuple[int, int]) -> bool:
        """Whether the calls `at` may get what comes from it: no others do, as
        far as is known."""
        return not self.is_read() or any(
            k in readers for k, readers in zip(at, self._readers))


def _readers(calls: Sequence[LayerCall], number: int, call: LayerCall
             ) -> set[int]:
    """The calls behind `number` that get what `call` returned."""
    return {n for n in range(number + 1, len(calls)) if any(
        x.size == z.size and np.array_equal(x.reshape(-1), z.reshape(-1))
        for x in calls[n].inputs[:1] for z in call.outputs[:1])}


def read_elsewhere(calls_a: Sequence[LayerCall], calls_b: Sequence[LayerCall],
                   of_a: Mapping[str, Layer], of_b: Mapping[str, Layer],
                   at: tuple[int, int], met: Iterable[tuple[int, int]]
                   ) -> bool:
    """Whether what the calls `at` give, of layers without parameters, goes to
    calls that do not belong together: a pooling before the activation, and
    behind it."""
    def turns(call: LayerCall, of: Mapping[str, Layer]) -> bool:
        return _ALIKE.get(kind_of(call.path, of)) in _TURNS
    sides = (calls_a, of_a), (calls_b, of_b)
    if not all(turns(calls[k], of) for k, (calls, of) in zip(at, sides)):
        return False
    found = [_readers(calls, k, calls[k]) for k, (calls, _) in zip(at, sides)]
    return all(found) and not any(
        i in found[0] and j in found[1] for i, j in met) and any(
            turns(calls[n], of) for readers, (calls, of) in zip(found, sides)
            for n in readers)


def _met(calls_a: Sequence[LayerCall], calls_b: Sequence[LayerCall],
         of_a: Mapping[str, Layer], of_b: Mapping[str, Layer],
         plan: Plan, tolerance: float, summarised: bool
         ) -> Iterator[tuple[tuple[int, int], Location | None]]:
    """The calls that belong together, with the place of those whose outputs
    differ, and None for those whose outputs are equal."""
    groups = together(of_a.values(), of_b.values(), plan)
    counts = [Counter(c.path for c in calls) for calls in (calls_a, calls_b)]
    met = [*pairs([c.path for c in calls_a], [c.path for c in calls_b],
                  of_a, of_b, plan, groups=not summarised)]
    for number, (i, j) in enumerate(met):
        one, two = calls_a[i], calls_b[j]
        group = next((g for g in groups if one.path in g[0]
                      and two.path in g[1]), None)
        if group is not None:
            place = _locate_group(
                _of_group(calls_a[:i + 1], group[0], of_a),
                _of_group(calls_b[:j + 1], group[1], of_b), (i, j), tolerance)
            if place is not None:
                yield (i, j), place
            continue
        layers = of_a.get(one.path), of_b.get(two.path)
        # First, since tanh of small numbers nearly is these numbers.
        m, n = ends((calls_a, calls_b), (i, j), (of_a, of_b))
        one = one._replace(outputs=calls_a[m].outputs)
        two = two._replace(outputs=calls_b[n].outputs)
        if _agree(*outputs_of(one, two, summarised), tolerance) \
                or _turned(one, two, tolerance):
            yield (i, j), None
            continue
        lined = two if summarised else in_layout(one, two, tolerance)
        if lined is not two and _agree(one.outputs[:1], lined.outputs[:1],
                                       tolerance):
            yield (i, j), None
            continue
        if not _no_partners(one, two, lined, (of_a, of_b), [
                (calls_a[k], calls_b[n]) for k, n in met[number + 1:]],
                tolerance) and not (
                    other_functions(one, two, (of_a, of_b))
                    and _parts(calls_a, calls_b, (m, n), met[number + 1:],
                               tolerance)):
            two = lined
            kinds = {_ALIKE.get(kind, kind) for kind in (
                kind_of(one.path, of_a), kind_of(two.path, of_b))}
            often = counts[0][one.path] == counts[1][two.path]
            if all(x and x.parameters for x in layers) \
                    and not (often and (len(kinds) == 1 or kinds <= _PLAIN)) \
                    and _sizes(one.outputs, summarised)[:1] \
                    != _sizes(two.outputs, summarised)[:1]:
                continue    # a step of a series, or a part of a layer
            agree = _agree(one.inputs, two.inputs, tolerance) and not (
                {"softmax", "log_softmax"} & kinds and _scores_differ(
                    one.inputs, two.inputs, tolerance))
            if not agree and not summarised:
                two = _in_shapes(one, two)
            inner = [calls[k].outputs[0] for calls, k, end in (
                (calls_a, i, m), (calls_b, j, n))
                if k != end and calls[k].outputs]
            yield (i, j), Location(*layers, agree, one, two, (i, j), inner)


def unmasked(x: np.ndarray) -> np.ndarray:
    """The places of scores that no mask of -1e9 or -inf has taken out."""
    size = np.abs(x).max(where=np.isfinite(x), initial=0.0)
    return np.isfinite(x) & ((np.abs(x) < size / 2) | (size < _MASK))


def _scores_differ(xs: Sequence[np.ndarray], zs: Sequence[np.ndarray],
                   tolerance: float) -> bool:
    """Whether scores that are equal as far as their mask tells differ
    beside it."""
    return any(not close(x[both], z.reshape(x.shape)[both], tolerance)
               for x, z in zip(xs[:1], zs)
               for both in [unmasked(x) & unmasked(z).reshape(x.shape)])


def _in_shapes(one: LayerCall, two: LayerCall) -> LayerCall:
    """`two` in the shapes of `one`, where those differ in neighbouring axes
    that are joined: (rows x heads, ...) and (rows, heads, ...)."""
    def shaped(own: Sequence[np.ndarray], other: Sequence[np.ndarray]
               ) -> list[np.ndarray]:
        found = list(other)
        for i, (x, z) in enumerate(zip(own, other)):
            ends = [set(np.cumprod(v.shape).tolist()) for v in (x, z)]
            if x.size == z.size and (
                    ends[0] <= ends[1] or ends[1] <= ends[0]):
                found[i] = z.reshape(x.shape)
        return found
    return two._replace(inputs=shaped(one.inputs, two.inputs),
                        outputs=shaped(one.outputs, two.outputs))


def _no_partners(one: LayerCall, two: LayerCall, lined: LayerCall,
                 layers: tuple[Mapping[str, Layer], Mapping[str, Layer]],
                 later: Sequence[tuple[LayerCall, LayerCall]],
                 tolerance: float) -> bool:
    """Whether two calls with other outputs only have the same place: each
    side makes the same by other operators, as ``x * sigmoid(x)`` and
    ``silu(x)``. What one of them gives is then what a later layer gets on
    both sides. Other functions that get something else are compared by what
    they reach. `lined` is `two` in the layout of `one`."""
    return other_functions(one, two, layers) and (
        not _agree(one.inputs, lined.inputs, tolerance) or any(
            bool(call.outputs and got.inputs)
            and call.outputs[0].size == got.inputs[0].size
            and np.array_equal(call.outputs[0].reshape(-1),
                               got.inputs[0].reshape(-1))
            and _agree(x.inputs[:1], in_layout(x, z, tolerance).inputs[:1],
                       tolerance)
            for x, z in later for call, got in ((one, x), (two, z))))


def _parts(calls_a: Sequence[LayerCall], calls_b: Sequence[LayerCall],
           at: tuple[int, int], later: Sequence[tuple[int, int]],
           tolerance: float) -> bool:
    """Whether two functions that get the same and give something else are
    parts of one computation: what other operators make of them reaches the
    next layer, and is equal there. A layer that gets what an earlier one
    returned, or got too, is none that they reach."""
    if all(_readers(calls, k, calls[k]) for calls, k in zip(
            (calls_a, calls_b), at)):
        return False
    for i, j in later:
        if all(any(call.inputs and x.size == call.inputs[0].size
                   and np.array_equal(x.reshape(-1),
                                      call.inputs[0].reshape(-1))
                   for before in calls[:k]
                   for x in (*before.inputs[:1], *before.outputs[:1]))
               for calls, k, call in ((calls_a, i, calls_a[i]),
                                      (calls_b, j, calls_b[j]))):
            continue
        return _agree(calls_a[i].inputs[:1], in_layout(
            calls_a[i], calls_b[j], tolerance).inputs[:1], tolerance)
    return False


def other_functions(one: LayerCall, two: LayerCall,
                    layers: tuple[Mapping[str, Layer], Mapping[str, Layer]]
                    ) -> bool:
    """Whether the calls are of two kinds, and one is of a function between
    layers: it may be a part of what the other does."""
    return any(call.path.startswith("F.") for call in (one, two)) \
        and kind_of(one.path, layers[0]) != kind_of(two.path, layers[1])


def apart(calls_a: Sequence[LayerCall], calls_b: Sequence[LayerCall],
          of_a: Mapping[str, Layer], of_b: Mapping[str, Layer], plan: Plan,
          tolerance: float) -> set[tuple[str, str]]:
    """The paths of calls that belong together and whose outputs differ."""
    found: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}
    for i, j in pairs([c.path for c in calls_a], [c.path for c in calls_b],
                      of_a, of_b, plan):
        m, n = ends((calls_a, calls_b), (i, j), (of_a, of_b))
        one, two = (call._replace(outputs=end.outputs) for call, end in (
            (calls_a[i], calls_a[m]), (calls_b[j], calls_b[n])))
        agrees = _agree(one.outputs, two.outputs, tolerance) \
            or _turned(one, two, tolerance) or _agree(
                one.outputs[:1], in_layout(one, two, tolerance).outputs[:1],
                tolerance)
        found[agrees].add((one.path, two.path))
    return found[False] - found[True]


def outputs_of(one: LayerCall, two: LayerCall, summarised: bool = False
               ) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The outputs of two calls. A cell of Gluon returns its output once more
    among its states: where one call gives more than the other, each array is
    there once."""
    if len(one.outputs) == len(two.outputs):
        return one.outputs, two.outputs

    def once(given: list[np.ndarray]) -> list[np.ndarray]:
        arrays = given[:-1] if summarised else given
        own = [i for i, x in enumerate(arrays) if not any(
            np.array_equal(x, y) for y in arrays[:i])]
        return [*(arrays[i] for i in own),
                *(x[own] for x in given[len(arrays):])]
    return once(one.outputs), once(two.outputs)


def _sizes(arrays: Sequence[np.ndarray], summarised: bool) -> list[float]:
    """The numbers of elements of the inputs or the outputs of a call."""
    return [float(n) for n in arrays[-1]] if summarised \
        else [x.size for x in arrays]


def _of_group(calls: Sequence[LayerCall], paths: set[str],
              layers: Mapping[str, Layer]) -> list[tuple[Layer, LayerCall]]:
    """The last call of each layer of a group, in their order."""
    found = {call.path: call for call in reversed(calls)
             if call.path in paths and call.outputs}
    return [(layers[path], found[path]) for path in reversed(found)]


def _locate_group(one: list[tuple[Layer, LayerCall]],
                  two: list[tuple[Layer, LayerCall]], at: tuple[int, int],
                  tolerance: float) -> Location | None:
    """The place, where layers that get the same together return something
    else: the last of them, or all side by side."""
    if not one or not two:
        return None
    (layer_a, call_a), (layer_b, call_b) = one[0], two[0]
    if not call_a.inputs or not call_b.inputs \
            or call_a.inputs[0].size != call_b.inputs[0].size:
        return None
    if not _agree(call_a.inputs[:1], call_b.inputs[:1], tolerance):
        return Location(layer_a, layer_b, False, call_a, call_b, at)
    ends = [side[-1][1].outputs[0] for side in (one, two)]
    if ends[0].size != ends[1].size:
        try:
            ends = [np.concatenate([
                call.outputs[0] for _, call in side],
                1 if side[0][0].kind.startswith("conv") else -1)
                for side in (one, two)]
        except ValueError:      # not side by side
            return None
    if ends[0].size != ends[1].size or _agree(ends[:1], ends[1:], tolerance):
        return None
    layers = [Layer(" + ".join(layer.path for layer, _ in side),
                    " + ".join(layer.kind for layer, _ in side), {}, ())
              for side in (one, two)]
    calls = [LayerCall(layer.path, side[0][1].inputs, [end])
             for layer, side, end in zip(layers, (one, two), ends)]
    return Location(layers[0], layers[1], True, calls[0], calls[1], at)


def _agree(x: Sequence[np.ndarray], z: Sequence[np.ndarray],
           tolerance: float) -> bool:
    """Whether the numbers are equal, in whatever shapes. What only one side
    gives (the states of torch's LSTM) is left out."""
    return bool(x) == bool(z) and all(
        p.size == q.size and close(p.reshape(-1), q.reshape(-1), tolerance)
        for p, q in zip(x, z))


def in_layout(one: LayerCall, two: LayerCall, tolerance: float) -> LayerCall:
    """`two` with its first input and output in the layout of `one`, where the
    first inputs agree so: (rows, time, channels) on one side, (time, rows,
    channels), (rows, channels, time) or (rows x time, channels) on the other.
    Of several layouts, one in which the outputs agree too."""
    if not (one.inputs and two.inputs and one.outputs and two.outputs):
        return two
    (x, u), (z, v) = ((call.inputs[0], call.outputs[0])
                      for call in (one, two))
    larger = (x, u) if x.ndim > z.ndim else (z, v)
    if x.size != z.size or u.size != v.size or x.shape == z.shape \
            and u.shape == v.shape and close(x, z, tolerance) \
            or larger[0].ndim > 5 or larger[0].ndim != larger[1].ndim:
        return two

    def turned(own: np.ndarray, other: np.ndarray, axes: tuple[int, ...]
               ) -> np.ndarray:
        """`other` in the layout of `own`."""
        if larger[0] is z:
            return other.transpose(axes).reshape(own.shape)
        shape = own.transpose(axes).shape
        return other.reshape(shape).transpose(np.argsort(axes))
    found = two
    for axes in itertools.permutations(range(larger[0].ndim)):
        given = turned(x, z, axes)
        if close(given, x, tolerance):
            call = two._replace(
                inputs=[given, *two.inputs[1:]],
                outputs=[turned(u, v, axes), *two.outputs[1:]])
            if close(call.outputs[0], u, tolerance):
                return call
            found = call if found is two else found
    return found


def _turned(one: LayerCall, two: LayerCall, tolerance: float) -> bool:
    """Whether both have the same first input and output but for one order of
    the axes: (rows, time, channels) and (time, rows, channels)."""
    x, z = ([*call.inputs[:1], *call.outputs[:1]] for call in (one, two))
    if len(x) < 2 or len(z) < 2 or len({t.ndim for t in (*x, *z)}) > 1 \
            or x[0].ndim > 5:
        return False
    orders = itertools.permutations(range(x[0].ndim))
    next(orders)        # as they are
    return any(all(p.transpose(axes).shape == q.shape
                   and close(p.transpose(axes), q, tolerance)
                   for p, q in zip(x, z)) for axes in orders)
