"""Causes that are no larger than the rounding to a smaller dtype."""
from collections.abc import Iterator
from typing import Any

import numpy as np

from mgpu.parity.causes.difference import (Difference, View, as_single,
                                           distance, near_as_single, once)
from mgpu.parity.causes.registry import Found, cause
from mgpu.parity.causes.statistics import readings
from mgpu.parity.causes.update import other_options
from mgpu.parity.causes.update_search import (Changes, Update, options_of,
                                              replaced)
from mgpu.parity.measure import TOLERANCE


@cause("float32 hyper-parameters", "update")
def equal_options(d: Difference, rule: Update, other: Update) -> Changes:
    yield from other_options(rule, other, single=True)


@cause("float32 hyper-parameters", "update")
def kept_as_float32(d: Difference, rule: Update, other: Update) -> Changes:
    text = (f"{other.side} keeps its options as float32, as MXNet's own "
            f"kernels do, {rule.side} as double: use values that float32 "
            "holds, such as 0.125")
    rates = {as_single(rule.rate), other.rate} if near_as_single(
        rule.rate, other.rate) else {as_single(rule.rate)}
    for rate in sorted(rates):
        yield text, replaced(rate=rate)
    yield text, lambda r: r._replace(rate=as_single(r.rate)).with_options({
        n: as_single(v) for n, v in options_of(r.optimizer).items()})


@cause("float32 statistics momentum", "statistic")
def momentum(d: Difference) -> Found:
    for r, layer in readings(d):
        if r.rounded and not (r.changed and r.times):
            yield (f"{layer}: MXNet keeps the momentum as float32, "
                   f"{as_single(r.given[r.names[0]])!r}, torch as double: "
                   "use mgpu.parity.gluonize(net), native=False, or a "
                   "momentum that float32 holds, such as 0.875"), r.residual


# -- computed in a smaller dtype ----------------------------------------------

#: by dtype, the distance between 1 and the next number
_STEPS = {"float16": 2.0 ** -10, "bfloat16": 2.0 ** -7, "float32": 2.0 ** -23}
#: as many steps, a computation in that dtype may be off, and as many numbers
#: the other side must have that are not of it
_OFF, _OTHERS = 100, 4


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return x.astype(dtype).astype(float)
    bits = x.astype("float32").view("uint32")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(
        "uint32").view("float32").astype(float)


def _smaller(d: Difference, u: np.ndarray, v: np.ndarray, *inner: np.ndarray
             ) -> Iterator[tuple[View, str, float]]:
    """The side whose numbers are of a smaller dtype than the other's, that
    dtype, and the residual; `inner`: numbers that `u` or `v` is made from."""
    if u.shape != v.shape or u.dtype.kind != "f" or v.dtype.kind != "f":
        return
    for side, seen, other in ((d.b, v, u), (d.a, u, v)):
        for dtype, step in _STEPS.items():
            apart = distance(other.astype(float), seen.astype(float))
            near = apart <= min(0.05, _OFF * step) * np.abs(other).max(
                initial=0.0)
            more = other != _rounded(other, dtype)
            if dtype != d.a.run.dtype and near and more.sum() >= _OTHERS \
                    and any(np.array_equal(x, _rounded(x, dtype))
                            for x in (seen, *inner)):
                yield side, dtype, 0.0
                return


def _dtype(d: Difference, where: str, side: View, dtype: str) -> str:
    return (f"{where}: {side} computes in {dtype}, the other side in "
            f"{d.a.run.dtype}: drop .float(), .half(), astype() and autocast "
            "there, or use them on both sides")


@cause("dtype", "forward", resort=5)
def dtype_of_a_layer(d: Difference) -> Found:
    place = d.place
    inside = place is not None and place.inputs_agree and place.call_a.outputs
    where = f"layer {place.call_a.path}" if inside else ""
    pairs = [(*d.outputs(), where)] if inside and place.call_b.outputs \
        else [t[:3] for t in d.tensors()]
    for u, v, where in pairs:
        for side, dtype, residual in _smaller(
                d, u, v, *(place.inner if inside else ())):
            yield _dtype(d, where, side, dtype), residual


@cause("dtype", "loss")
def dtype_of_the_loss(d: Difference) -> Found:
    for side, dtype, residual in _smaller(
            d, d.a.step.losses, d.b.step.losses):
        yield _dtype(d, "the loss", side, dtype), residual


# -- constants that are held in float32 ---------------------------------------

#: so many numbers are moved, one by one, each by up to so many units
_NUMBERS, _UNITS = 64, 4


def _loose(x: np.ndarray) -> np.ndarray:
    """The places of numbers that float32 has rounded, if it has."""
    rounded = x == _rounded(x, "float32")
    return np.asarray(rounded.all() & (x != _rounded(x, "float16")))


def _outputs(side: View, name: str, far: Any) -> np.ndarray:
    """What `side` puts out with a constant moved by `far`."""
    side.run.load(side.before(), memory=False)
    state = side.run.state()
    kept = state.values[name]
    side.run.load(state._replace(values={
        **state.values, name: np.asarray(kept + far)}), memory=False)
    X, y = side.run.prepared(side.evidence.X, side.evidence.y)
    try:
        return side.run.forward(X, y, side.evidence.step)[0]
    finally:        # where no plan has it, nothing else puts it back
        side.run.load(state, memory=False)


@cause("constant in float32", "forward", resort=4)
def constant_in_float32(d: Difference) -> Found:
    yield from (found for found in _constants(d) if found[1] is not None)


@cause("constant in float32", "forward", resort=6)
def constant_of_many_numbers(d: Difference) -> Found:
    """There are too few outputs to tell."""
    yield from (found for found in _constants(d) if found[1] is None)


@once
def _constants(d: Difference) -> list[tuple[str, float | None]]:
    """Constants in float32 that the other side holds, or computes, in another
    form: moved by a few units of float32 they give what that side gives."""
    found: list[tuple[str, float | None]] = []
    u, v = d.a.step.outputs[0], d.b.step.outputs[0]
    if u.shape != v.shape or distance(u, v) > TOLERANCE["float32"] * float(
            np.abs(u).max(initial=0.0)):
        return found
    for (other, side), apart in zip(d.both_ways(), (u - v, v - u)):
        values = side.run.state().values
        held = {e.name: places for e in side.run.entries
                if e.kind == "other" and not e.trained
                and values[e.name].dtype.kind == "f"
                for places in [_loose(values[e.name])] if places.any()}
        count = sum(places.sum() for places in held.values())
        if not 0 < count <= _NUMBERS:
            continue
        effects = []
        for name, places in held.items():
            still = _outputs(side, name, 0.0)
            for place in filter(places.__getitem__,
                                np.ndindex(places.shape)):
                unit = np.zeros(places.shape)
                unit[place] = abs(values[name][place]) * _STEPS["float32"]
                effects.append((_outputs(side, name, unit) - still).ravel())
        units = np.linalg.lstsq(np.array(effects).T, apart.ravel(),
                                rcond=1e-9)[0]
        if np.abs(units).max() <= _UNITS:
            left = distance(units @ np.array(effects), apart.ravel())
            found.append((
                f"{side} holds {', '.join(held)} in float32, and {other} "
                "holds or computes it in another form (a factor for a "
                "divisor), which float32 rounds otherwise: hold it in float64 "
                "on both sides (dtype='float64' of mx.nd.array, "
                "dtype=torch.float64), or give a tolerance of 1e-6",
                None if apart.size < 2 * count else left / distance(u, v)))
    return found
