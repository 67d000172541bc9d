"""Where do two networks differ first?"""
import difflib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mgpu.backends.base import Layer
from mgpu.parity.matching import Plan, close
from mgpu.parity.run import LayerCall


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
    """

    a: Layer | None
    b: Layer | None
    inputs_agree: bool
    call_a: LayerCall
    call_b: LayerCall


def locate(calls_a: Sequence[LayerCall], calls_b: Sequence[LayerCall],
           layers_a: Sequence[Layer], layers_b: Sequence[Layer], plan: Plan,
           tolerance: float) -> Location | None:
    """The first layer whose output differs, or None.

    A layer with parameters is paired with the layer of their partners,
    others by kind, in the order of the calls between those.
    """
    of_a, of_b = ({layer.path: layer for layer in layers}
                  for layers in (layers_a, layers_b))

    def key(call: LayerCall, layers: Mapping[str, Layer],
            names: Mapping[str, str]) -> str:
        layer = layers.get(call.path)
        return "" if layer is None else next(
            (names[n] for n in layer.parameters if n in names), layer.kind)

    def activated(calls: Sequence[LayerCall], i: int,
                  layers: Mapping[str, Layer], other: Layer | None
                  ) -> list[np.ndarray]:
        """The output, behind the activation layer that follows it where the
        other side's layer has that activation inside."""
        inside = other.options.get("activation") if other else None
        follows = layers.get(calls[i + 1].path) if calls[i + 1:] else None
        if inside and follows is not None and follows.kind == inside:
            i += 1
        return calls[i].outputs
    for block in difflib.SequenceMatcher(
            None, [key(c, of_a, {p.a: p.a for p in plan.pairs})
                   for c in calls_a],
            [key(c, of_b, {p.b: p.a for p in plan.pairs}) for c in calls_b],
            autojunk=False).get_matching_blocks():
        for k in range(block.size):
            i, j = block.a + k, block.b + k
            one, two = calls_a[i], calls_b[j]
            layers = of_a.get(one.path), of_b.get(two.path)
            if not _agree(one.outputs, two.outputs, tolerance) and not _agree(
                    activated(calls_a, i, of_a, layers[1]),
                    activated(calls_b, j, of_b, layers[0]), tolerance):
                return Location(*layers, _agree(one.inputs, two.inputs,
                                                tolerance), one, two)
    return None


def _agree(x: Sequence[np.ndarray], z: Sequence[np.ndarray],
           tolerance: float) -> bool:
    """Whether the numbers are equal, in whatever shapes."""
    return len(x) == len(z) and all(
        p.size == q.size and close(p.reshape(-1), q.reshape(-1), tolerance)
        for p, q in zip(x, z))
