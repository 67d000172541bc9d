"""Whether networks that agree in float64 depend on the dtype.

A comparison in float64 does not run what looks at the dtype, as
``torch.autocast`` does, which leaves float64 alone. So each network is called
once more in float32, and compared with itself.
"""
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mgpu.data.nested import map_leaves
from mgpu.parity.batches import first_rows
from mgpu.parity.live import LiveRun, refuse_draws
from mgpu.parity.own import OwnRun
from mgpu.parity.run import Run, at_one_device

#: rows of the batch that are taken
ROWS = 8
#: rounding to float32 is less, where the network does not enlarge it;
#: rounding to bfloat16 is some 3e-3, to float16 some 4e-4, an operation.
#: A value next to a kink may move gradients by some 1e-2
FAR = {"prediction": 1e-4, "output": 1e-4, "gradient": 1e-1,
       "statistic": 1e-4}
#: so many times what rounding does to the other network, or to the values
#: that this one starts from, is no rounding
TIMES = 64.0
#: below this share of the largest gradient, one counts on the scale of it
FLOOR = 1e-2
#: changes of the starting values that are tried
NUDGES = 3

Pass = Mapping[tuple[str, str], np.ndarray]
Apart = dict[tuple[str, str], float]


class _InFloat32:
    """A network in float32, against itself in float64.

    Attributes
    ----------
    apart : dict
        Relative differences, of the lengths of arrays: some elements may lie
        next to a kink.
    masks : tuple
        What dropout takes in float64, and in float32.
    drew : bool
        Whether float32 has drawn numbers of the network's own.
    """

    drew = False

    def __init__(self, run: LiveRun, X: Any, y: Any) -> None:
        self.run = run
        self._values = at_one_device(run.state(), run.entries)
        self._batch = first_rows(X, ROWS), first_rows(y, ROWS)
        try:
            self._exact = self._pass("float64")
        except Exception:       # a network may be written for so many rows
            self._batch = X, y
            self._exact = self._pass("float64")
        masks = run.masks.taken
        try:
            self.apart = _apart(self._pass("float32"), self._exact)
            self.masks = masks, run.masks.taken
        except BaseException:
            run.begin_alone("float64", self._values)
            raise

    def _pass(self, dtype: str, nudge: Any = lambda x: x) -> Pass:
        X, y = self._batch
        self.run.begin_alone(dtype, {
            name: nudge(x) for name, x in self._values.items()})
        found, drew = self.run.draws_in(
            lambda: self.run.whole_pass(map_leaves(nudge, X), y))
        self.drew |= drew and dtype == "float32"    # steps are in float64
        return found

    def by_rounding(self) -> Apart:
        """How far float64 is moved by other last bits of float32 in what the
        pass starts from."""
        found: Apart = {}
        signs = np.random.default_rng(0)

        def nudge(x: Any) -> Any:
            return x if x.dtype.kind != "f" else x * (
                1 + 2.0 ** -24 * signs.choice((-1.0, 1.0), x.shape))
        for _ in range(NUDGES):
            for key, far in _apart(self._pass("float64", nudge),
                                   self._exact).items():
                found[key] = max(far, found.get(key, 0.0))
        return found


def _apart(one: Pass, two: Pass) -> Apart:
    sizes: dict[str, float] = {}
    for (stage, _), x in two.items():
        sizes[stage] = max(sizes.get(stage, 0.0), _length(x))
    found: Apart = {}
    for key, x in two.items():
        scale = max(_length(x), FLOOR * sizes[key[0]])
        if x.dtype.kind == "f" and 0 < scale < np.inf:
            z = one.get(key)
            found[key] = np.inf if z is None or z.shape != x.shape \
                else _length(z.astype("float64") - x) / scale
    return found


def _length(x: np.ndarray) -> float:
    found = float(np.linalg.norm(x.ravel()))
    return found if np.isfinite(found) else np.inf


def by_dtype(runs: Mapping[str, Run], X: Any, y: Any, notes: list[str]
             ) -> str | None:
    """What to say of networks that compute something else in float32 than in
    float64, or of a second one that does not run there where the first does;
    `notes` gets what else could not be run. The runs take no steps any
    more."""
    found: dict[str, _InFloat32] = {}
    failed: dict[str, str] = {}
    for side, run in runs.items():
        if not isinstance(run, LiveRun) or isinstance(run, OwnRun) \
                or "float32" not in run.own_dtypes:
            continue
        try:
            found[side] = _InFloat32(run, X, y)
        except Exception as error:      # of the network, in this dtype
            line = str(error).strip().partition("\n")[0][:100]
            failed[side] = (f"{side} does not run in float32 "
                            f"({type(error).__name__}: {line})")
    for one in found.values():
        refuse_draws(one.run, one.drew)
    if [*failed] == ["b"] and ("a" in found
                               or not isinstance(runs["a"], LiveRun)):
        return (failed["b"] + ", the dtype that it has outside of the "
                "comparison. Look for what depends on the dtype, such as "
                "arrays of float64 that a pass makes")
    notes += [f"{text}: what depends on the dtype there was not compared"
              for text in failed.values()]
    for side, one in found.items():
        if one.masks[0] != one.masks[1] and all(
                x.masks != one.masks for x in found.values()
                if x is not one):
            return (f"in float32, {side} drops out at other places, or with "
                    "other rates, than in float64, where the sides agree. "
                    "Look for what depends on the dtype")
        far = dict(_far(one, [x for x in found.values() if x is not one]))
        if far:
            (stage, name), size = max(far.items(), key=lambda x: x[1])
            return (f"in float32, {side} computes something else than in "
                    f"float64, where the sides agree: {stage} {name}".rstrip()
                    + f" is off by a relative {size:.1e}, which is no "
                    "rounding. Look for what depends on the dtype, as "
                    "torch.autocast does")
    return None


def _far(one: _InFloat32, others: list[_InFloat32]
         ) -> Iterator[tuple[tuple[str, str], float]]:
    """What no rounding explains."""
    rounded: dict[str, float] = {}
    for other in others:
        for (stage, _), size in other.apart.items():
            rounded[stage] = max(size, rounded.get(stage, 0.0))
    far = {key: size for key, size in one.apart.items()
           if size > max(FAR[key[0]], TIMES * rounded.get(key[0], 0.0))}
    own = one.by_rounding() if far else {}
    for key, size in far.items():
        # alone, numbers that float32 has not may be meant
        if size > TIMES * own[key] and (others or size < np.inf):
            yield key, size
