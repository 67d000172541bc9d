"""Where do two networks differ first?"""
import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mgpu.backends.base import Layer
from mgpu.parity.matching import Plan, close
from mgpu.parity.run import LayerCall


#: kinds of layers that a port may take for one another
POOLS = {f"{size}{kind}_pool": "pool" for kind in ("avg", "max")
         for size in ("", "global_", "adaptive_")}
#: the kinds of activations, in Gluon's words
ACTIVATIONS = {"elu", "gelu", "hardsigmoid", "hardswish", "hardtanh",
               "leaky_relu", "relu", "relu6", "selu", "sigmoid", "softrelu",
               "softsign", "swish", "tanh"}
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
    a, b : mgpu.backends.base.Layer or None
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


def pairs(paths_a: Sequence[str], paths_b: Sequence[str],
          layers_a: Mapping[str, Layer], layers_b: Mapping[str, Layer],
          plan: Plan) -> Iterator[tuple[int, int]]:
    """The numbers of the calls of two sides that belong together.

    A layer with parameters is paired with the layer of their partners,
    others by kind, in the order of the calls between those.
    """
    def key(path: str, layers: Mapping[str, Layer],
            names: Mapping[str, str]) -> str:
        layer, kind = layers.get(path), kind_of(path, layers)
        return next((names[n] for n in (layer.parameters if layer else ())
                     if n in names), POOLS.get(
                         kind, "activation" if kind in ACTIVATIONS else kind))
    for block in difflib.SequenceMatcher(
            None, [key(path, layers_a, {p.a: p.a for p in plan.pairs})
                   for path in paths_a],
            [key(path, layers_b, {p.b: p.a for p in plan.pairs})
             for path in paths_b], autojunk=False).get_matching_blocks():
        for k in range(block.size):
            yield block.a + k, block.b + k


def locate(calls_a: Sequence[LayerCall], calls_b: Sequence[LayerCall],
           of_a: Mapping[str, Layer], of_b: Mapping[str, Layer], plan: Plan,
           tolerance: float) -> Location | None:
    """The first layer whose output differs, or None. `pairs` says which
    belong together."""
    def activated(calls: Sequence[LayerCall], i: int,
                  layers: Mapping[str, Layer], other: Layer | None
                  ) -> LayerCall:
        """The call, with the output behind the activation that follows it
        where the other side's layer has one inside."""
        inside = other.options.get("activation") if other else None
        if inside and calls[i + 1:] and kind_of(
                calls[i + 1].path, layers) in ACTIVATIONS:
            return calls[i]._replace(outputs=calls[i + 1].outputs)
        return calls[i]
    for i, j in pairs([c.path for c in calls_a], [c.path for c in calls_b],
                      of_a, of_b, plan):
        one, two = calls_a[i], calls_b[j]
        layers = of_a.get(one.path), of_b.get(two.path)
        # First, since tanh of small numbers nearly is these numbers.
        one, two = (activated(calls_a, i, of_a, layers[1]),
                    activated(calls_b, j, of_b, layers[0]))
        if not _agree(one.outputs, two.outputs, tolerance) \
                and not _turned(one, two, tolerance):
            return Location(
                *layers, _agree(one.inputs, two.inputs, tolerance), one, two,
                (i, j), [call.outputs[0] for call, now in (
                    (calls_a[i], one), (calls_b[j], two))
                    if now is not call and call.outputs])
    return None


def _agree(x: Sequence[np.ndarray], z: Sequence[np.ndarray],
           tolerance: float) -> bool:
    """Whether the numbers are equal, in whatever shapes. What only one side
    gives (the states of torch's LSTM) is left out."""
    return bool(x) == bool(z) and all(
        p.size == q.size and close(p.reshape(-1), q.reshape(-1), tolerance)
        for p, q in zip(x, z))


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
