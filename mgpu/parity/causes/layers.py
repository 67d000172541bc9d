"""Causes in the shape of a layer's input and in its other options."""
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.parity.causes.difference import (ROWS, Difference, distance,
                                           unexplained)
from mgpu.parity.causes.forward import ACTIVATIONS
from mgpu.parity.causes.pooling import KINDS, rules
from mgpu.parity.causes.registry import Found, cause
from mgpu.parity.causes.structure import channels_last

#: kinds of layers whose other causes leave nothing to guess
COMPUTED = {"", "batch_norm", "dropout", "layer_norm", "instance_norm",
            "conv", "leaky_relu", "dense", "embedding"}
#: torch's words for NumPy's modes
_PADDINGS = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@cause("dense flatten", "forward", resort=2)
def flattened(d: Difference) -> Found:
    """Equal numbers, another shape."""
    if d.place is not None and not d.place.inputs_agree:
        return
    for u, v, *_ in d.tensors():
        if u.shape != v.shape and u.size == v.size:
            yield (f"equal numbers of shape {u.shape} on {d.a} and {v.shape} "
                   f"on {d.b}: Gluon's Dense flattens, torch's Linear acts "
                   "on the last axis. Use Dense(flatten=False), or "
                   "nn.Flatten before Linear"), distance(
                       u.reshape(-1), v.reshape(-1)) / (
                           float(np.abs(u).max(initial=0.0)) or 1.0)


@cause("dense flatten", "forward", resort=5)
def other_columns(d: Difference) -> Found:
    for u, v, where, _ in d.tensors():
        if u.ndim == 2 and u.size == v.size and len(u) == len(v):
            yield (f"{where}: the columns of {d.b} are those of {d.a} in "
                   "another order, as with channels last: permute to one "
                   "layout before Flatten"), channels_last(
                       u, v.reshape(u.shape))


def _differences(d: Difference, names: Sequence[str]) -> str:
    return "; ".join(
        f"{name} is {one!r} on {d.a} and {two!r} on {d.b}" for name in names
        for one, two in [d.options(name)]) + ". Make them equal"


@cause("layer options", "forward", resort=1, kinds=["conv"])
def convolution(d: Difference) -> Found:
    options, weight = d.place.b.options, d.parameter("weight")
    differ = [name for name in ("stride", "padding", "dilation", "groups")
              if len(set(d.options(name))) > 1]
    if len({mode or "zeros" for mode in d.options("padding_mode")}) > 1:
        differ.append("padding_mode")
    act = ACTIVATIONS.get(options.get("activation") or "no activation")
    if differ and weight is not None and act is not None \
            and not isinstance(options["padding"], str):
        x, u, v = d.rows_of_layer(ROWS)
        yield f"{d.layer}: {_differences(d, differ)}", unexplained(
            u, v, act(_convolve(x, weight, d.parameter("bias"), options)))


def _convolve(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None,
              options: Mapping[str, Any]) -> np.ndarray:
    """A convolution of any number of dimensions, (rows, channels, ...)."""
    pads, dilation = options["padding"], options["dilation"]
    mode: Any = _PADDINGS.get(
        options.get("padding_mode", "zeros"), "constant")
    x = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in pads)], mode)
    dims = len(pads)
    size = tuple((k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilation))
    windows: Any = np.lib.stride_tricks.sliding_window_view(
        x, size, list(range(2, 2 + dims)))  # type: ignore[call-overload]
    windows = windows[(slice(None), slice(None),
                       *(slice(None, None, s) for s in options["stride"]),
                       *(slice(None, None, d) for d in dilation))]
    groups = options["groups"]
    parts = []
    for xs, ws in zip(np.split(windows, groups, 1),
                      np.split(weight, groups, 0)):
        axes = [1, *range(2 + dims, 2 + 2 * dims)]
        y = np.tensordot(xs, ws, (axes, [1, *range(2, 2 + dims)]))
        parts.append(np.moveaxis(y, -1, 1))
    y = np.concatenate(parts, 1)
    return y if bias is None else y + bias.reshape(-1, *[1] * dims)


@cause("transposed weight", "forward", resort=1, kinds=["dense"])
def transposed(d: Difference) -> Found:
    weight, bias = d.parameter("weight"), d.parameter("bias")
    act = ACTIVATIONS.get(d.place.b.options.get("activation")
                          or "no activation")
    if weight is not None and act and len(set(weight.shape)) == 1:
        x, u, v = d.rows_of_layer(ROWS)
        yield (f"{d.layer}: {d.b} multiplies by the transposed weight: copy "
               "Gluon's weights as they are, (out, in) on both"), unexplained(
                   u, v, act(x @ weight + (0 if bias is None else bias)))


@cause("layer options", "forward", resort=1, kinds=KINDS)
def pooling_windows(d: Difference) -> Found:
    found = rules(d)
    for field in ("kernel", "stride", "padding") if found else ():
        one, two = (getattr(rule, field) for rule in found[:2])
        if one != two:
            yield f"{d.layer}: {field} is {one} on {d.a} and {two} on {d.b}", \
                found[2]


@cause("layer options", "forward", resort=6)
def other_options(d: Difference) -> Found:
    """The last resort: options that differ, without a computation."""
    if d.kind not in COMPUTED:
        differ = [name for name, value in d.place.a.options.items()
                  if name in d.place.b.options and name != "flatten"
                  # an older trace counts axes from the first
                  and not (name == "axis" and (value or 0) >= 0)
                  and value != d.place.b.options[name]]
        if differ:
            yield (f"{d.layer}: {_differences(d, differ)}; the effect was "
                   "not computed"), None


#: exchanges of values that are tried
_EXCHANGES = 32


@cause("order of parameters", "forward", resort=5)
def exchanged(d: Difference) -> Found:
    """Does the network of a, with the values of equal layers exchanged, do
    what b does?"""
    ev, run, before = d.evidence, d.a.run, d.a.before()
    first = set(d.place.a.parameters) if d.place and d.place.a else set()
    for places in itertools.islice((
            p for p in _exchanges(d) if not first or first & {
                n for names in p for n in names}), _EXCHANGES):
        moved = {n: before.values[m] for one, other in places.items()
                 for n, m in zip(one, other)}
        if all(np.array_equal(v, before.values[n]) for n, v in moved.items()):
            continue        # of ones, or of zeros
        run.load(before._replace(values={**before.values, **moved}),
                 memory=False)
        outputs = run.forward(*run.prepared(ev.X, ev.y), ev.step)
        words = ", ".join(f"{m} in {n}" for n, m in [
            (n, m) for one, other in places.items()
            for n, m in zip(one, other)][:4])
        yield (f"{d.b} computes as {d.a} with its values in other layers "
               f"({words}): layers are registered, matched, loaded or "
               "called in another order. Load values by name, or correct map="
               ), max(map(unexplained, ev.a.outputs, ev.b.outputs, outputs))


def _exchanges(d: Difference
               ) -> Iterator[dict[tuple[str, ...], tuple[str, ...]]]:
    """Ways to exchange the values of equal-shaped layers, and of their
    weights alone: the names that get others, with those others."""
    alike: dict[Any, list[tuple[str, ...]]] = {}
    for layer in d.a.run.layers:
        names = tuple(n for n in layer.parameters if n in d.kinds)
        for own in dict.fromkeys((names, names[:1])) if names else ():
            alike.setdefault(tuple(
                d.evidence.before.values[n].shape for n in own), []
                ).append(own)
    for same in sorted(alike.values(), key=lambda own: -len(own[0])):
        for one, two in itertools.combinations(same, 2):
            yield {one: two, two: one}
        for other in ([same[1:] + same[:1], same[-1:] + same[:-1],
                       same[::-1]] if len(same) > 2 else []):
            yield dict(zip(same, other))
