"""Do two networks reach the same accuracy? ``compare(mode="accuracy")``."""
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mgpu import environment
from mgpu.arguments import is_integer
from mgpu.backends import using_backend
from mgpu.evaluation import evaluate_accuracy_gpus
from mgpu.nested import rows_of
from mgpu.parity.batches import Batch, Batches, endless
from mgpu.parity.live import LiveRun
from mgpu.parity.masks import Masks
from mgpu.parity.matching import Plan
from mgpu.parity.result import Result
from mgpu.parity.side import Side, factory, fresh

#: the level of the tests: two means differ if p is below it
ALPHA = 0.05
#: the probability with which the smallest difference that is named as
#: detectable is detected
POWER = 0.8


def _stats() -> Any:
    return environment.package("scipy", "accuracy mode", "scipy.stats").stats


def compare_accuracy(side_a: Side, side_b: Side, *, batches: Batches,
                     test: Batches | None, seeds: Sequence[int],
                     steps: int | None, dtype: str,
                     progress: Callable[[int, int], None] | None = None
                     ) -> Result:
    """Train both sides from several seeds and compare their accuracies.

    Each run starts from weights of its own: seed s gives ``2 s`` to `a` and
    ``2 s + 1`` to `b`, for the initialiser and the dropout masks. The order
    of the batches is the same in all runs. A torch network without an
    initialiser (`Side.init`) keeps the values that it drew when it was made.

    Parameters
    ----------
    side_a, side_b : Side
        Complete; their nets are functions.
    batches : iterable of (X, y)
    test : iterable of (X, y)
        Correct predictions are counted on all devices, as integers.
    seeds : sequence of int
        Two or more different ones.
    steps : int, optional
        Of each run. Default: all batches once.
    dtype : str
    progress : callable, optional
        ``progress(done, all)``, in steps of all runs.

    Returns
    -------
    Result
        ``curves``: "a" and "b", the accuracies by seed, and "test", see
        `two_samples`; "same" if Welch's p is 0.05 or more. Different means
        without any spread prove nothing. ``losses``: of each step, the mean
        over seeds.

    Raises
    ------
    ImportError
        SciPy is not installed.
    ValueError
        Fewer than two seeds, or no `test`.
    TypeError
        A network instead of a function that makes one.
    """
    _stats()
    seeds = list(seeds)
    if not len(seeds) == len(set(seeds)) > 1 \
            or not all(is_integer(s, 0) for s in seeds):
        raise ValueError(
            "accuracies are compared over two or more different seeds, whole "
            f"numbers from 0; received seeds={seeds!r}. Use for example "
            "range(5).")
    if test is None:
        raise ValueError("mode='accuracy' counts on data that the networks "
                         "were not trained on; received none. Pass "
                         "test=[(X, y), ...].")
    sides = {"a": side_a, "b": side_b}
    makers = {name: factory(side.net) for name, side in sides.items()}
    first, ahead, steps = endless(batches, steps)
    taken, test = list(ahead), list(test)
    done = itertools.count(1)
    accuracies: dict[str, list[float]] = {"a": [], "b": []}
    losses: dict[str, list[np.ndarray]] = {"a": [], "b": []}
    options: dict[str, dict[str, Any]] = {}
    for seed in seeds:
        for which, name in enumerate(sides):
            own = 2 * int(seed) + which
            run = LiveRun(fresh(sides[name], makers[name], seed=own),
                          first[0], dtype, Masks(own))
            means = []
            for number, (X, y) in enumerate(taken, 1):
                means.append(float(np.mean(run.train(X, y, number))))
                if progress is not None:
                    progress(next(done), 2 * len(seeds) * steps)
            losses[name].append(np.array(means))
            accuracies[name].append(_accuracy(run, test))
            options[name] = run.options()
    found = {**two_samples(accuracies["a"], accuracies["b"]),
             "rows": sum(rows_of(y) or 0 for _, y in test)}
    apart, judged = found["p"] < ALPHA, found["detectable"] is not None
    result = Result(
        "accuracy", "different" if apart and judged else "same", [],
        Plan("nothing: each side draws its own values", [],
             {"a": [], "b": []}, None, []), options,
        {name: np.mean(runs, axis=0).tolist()
         for name, runs in losses.items()},
        {"steps": steps, "dtype": dtype, "tolerance": None,
         "seed": None, "seeds": [int(s) for s in seeds], "weights": "own",
         "dropout": "masks drawn in NumPy"},
        notes=_notes(found, len(seeds)), curves={**accuracies, "test": found})
    if not np.isfinite([*losses.values()]).all():
        result.prove_nothing("a loss is not finite")
    elif apart and not judged:
        result.prove_nothing(
            "no accuracy differs between the seeds of a side, so there is no "
            "spread to judge the difference of the sides by. Use more seeds, "
            "more test data or more steps")
    return result


def _accuracy(run: LiveRun, test: Sequence[Batch]) -> float:
    with using_backend(run.name):
        return evaluate_accuracy_gpus(
            run.replicas, test, lambda X, y, _: run.shards(X, y))


def two_samples(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    """Welch's test of two means, Mann and Whitney's test of two
    distributions, and the difference that they could have shown.

    Returns
    -------
    dict
        means, deviations : [of a, of b], deviations with n - 1
        statistic, df, p : of Welch's test (Welch, 1947), two-sided
        mann_whitney_p
        detectable : the smallest difference of means that Welch's test
            shows with probability `POWER`, if accuracies are normal with
            the spread that was seen; see `detectable`. None where both
            samples have no spread.
        alpha, power

    Notes
    -----
    Without any spread the test has no statistic. Then p is 1 for equal means
    and 0 for others.
    """
    stats = _stats()
    x, z = np.asarray(a, float), np.asarray(b, float)
    # The mean of equal numbers may be a last bit off.
    deviations = [float(v.std(ddof=1)) if np.ptp(v) else 0.0 for v in (x, z)]
    means = [float(v.mean()) for v in (x, z)]
    found: dict[str, Any] = {"means": means, "deviations": deviations,
                             "alpha": ALPHA, "power": POWER}
    if not any(deviations):
        same = bool(x[0] == z[0])
        return {**found, "statistic": None, "df": None,
                "p": 1.0 if same else 0.0,
                "mann_whitney_p": 1.0 if same else float(stats.mannwhitneyu(
                    x, z, alternative="two-sided").pvalue),
                "detectable": None}
    with warnings.catch_warnings():
        # SciPy warns about nearly equal numbers in one sample.
        warnings.simplefilter("ignore", RuntimeWarning)
        welch = stats.ttest_ind(x, z, equal_var=False)
        ranks = stats.mannwhitneyu(x, z, alternative="two-sided")
    return {**found, "statistic": float(welch.statistic),
            "df": float(_welch([d ** 2 for d in deviations],
                               (len(x), len(z)))[1]),
            "p": float(welch.pvalue), "mann_whitney_p": float(ranks.pvalue),
            "detectable": detectable(deviations, (len(x), len(z)))}


def _welch(variances: Sequence[Any], counts: Sequence[int]) -> tuple[Any, Any]:
    """The standard error of a difference of means, and its degrees of
    freedom (Welch, 1947)."""
    shares = [v / n for v, n in zip(variances, counts)]
    square = shares[0] + shares[1]
    return square ** 0.5, square ** 2 / sum(
        s ** 2 / (n - 1) for s, n in zip(shares, counts))


def detectable(deviations: Sequence[float], counts: Sequence[int],
               draws: int = 20000) -> float:
    """The smallest difference of means that Welch's test shows with
    probability `POWER` at level `ALPHA`.

    It is drawn, not approximated: the usual formula takes the degrees of
    freedom for known, which promises too much for a handful of seeds. The
    test tells a pair of samples with a difference D apart if the difference
    of their means without D, plus D, exceeds the test's limit for that pair.
    So the result is the quantile of (limit - difference without D). The
    draws are the same in each call; 20000 draws are exact to 2%.
    """
    rng = np.random.default_rng(0)
    samples = [rng.normal(0.0, d, (draws, n))
               for d, n in zip(deviations, counts)]
    error, df = _welch([s.var(axis=1, ddof=1) for s in samples], counts)
    apart = samples[0].mean(axis=1) - samples[1].mean(axis=1)
    limit = _stats().t.ppf(1 - ALPHA / 2, df) * error
    return float(np.quantile(limit - apart, POWER))


def _notes(found: dict[str, Any], seeds: int) -> list[str]:
    notes = ["accuracy " + ", ".join(
        f"{name}: {mean:.4f} +- {deviation:.4f}" for name, mean, deviation
        in zip("ab", found["means"], found["deviations"]))
        + f" over {seeds} seeds a side, {found['rows']} examples; Welch's "
        f"test: p = {found['p']:.3g}, Mann and Whitney's: "
        f"p = {found['mann_whitney_p']:.3g}"]
    if found["detectable"] is None:
        notes.append("no accuracy differs between the seeds of a side: "
                     "there is no spread to judge a difference by")
    else:
        notes.append(
            f"{seeds} seeds a side show a difference of means of "
            f"{found['detectable']:.4f} with probability {found['power']}; "
            "'same' says nothing of smaller ones")
    return notes
