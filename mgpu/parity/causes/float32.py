"""Causes that are no larger than the rounding of a setting to float32."""
from mgpu.parity.causes.difference import Difference, as_single, near_as_single
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
