"""Causes that are no larger than the rounding to a smaller dtype."""
from collections.abc import Iterator

import numpy as np

from mgpu.parity.causes.difference import (Difference, View, as_single,
                                           distance, near_as_single)
from mgpu.parity.causes.registry import Found, cause
from mgpu.parity.causes.statistics import readings
from mgpu.parity.causes.update import other_options
from mgpu.parity.causes.update_search import (Changes, Update, options_of,
                                              replaced)


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
