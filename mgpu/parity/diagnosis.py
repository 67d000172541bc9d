"""Why do two runs differ? Causes, ranked, from the first difference.

Each cause is a hypothesis that *predicts* one side's tensors from what is
known of the other: the state before the step, gradients, rates, the batch,
the inputs of the first layer that differs. The share of the difference that
the prediction leaves unexplained is the cause's residual, the largest one of
all tensors of the stage, so that no coincidence in one tensor names a cause.
A cause whose residual is not small is not named: where no prediction fits,
the difference has no cause.

The causes are functions in the modules of `mgpu.parity.causes`, grouped by
subject. `mgpu.parity.causes.registry.cause` adds one.
"""
import contextlib

import numpy as np

# The order of these modules, and of the functions in them, is that of causes
# which explain a difference equally well.
from mgpu.parity.causes import (  # noqa: F401  isort: skip
    own, data, forward, norms, pooling, recurrent, structure, layers, scale,
    gradients, update, initial, statistics, float32)
from mgpu.parity.causes.difference import ROWS, Difference
from mgpu.parity.causes.registry import LIMIT, RULES, Cause
from mgpu.parity.causes.update_search import explain_update
from mgpu.parity.result import Evidence, Result
from mgpu.parity.run import CannotRun

__all__ = ["CAUSES", "LIMIT", "ROWS", "Cause", "diagnose"]

#: every name that a `Cause` can have; of causes that explain a difference
#: equally well, the one that stands first here comes first
CAUSES = tuple(dict.fromkeys(rule.name for rule in RULES))


#: what the frameworks' own optimizers do
_FORMULAS = {"float32 hyper-parameters", "rate inside the velocity",
             "Adam epsilon"}
#: the stages of `measure` that one of the registry's stands for
_PARTS = {"forward": ["layer", "output"], "update": ["weight", "memory"]}


def diagnose(result: Result) -> list[Cause]:
    """The likely causes of the first difference of a lock-step.

    Stages that cannot be consequences of one another (the update, and the
    running statistics) are explained separately, so several causes that act
    at once are all named.

    Parameters
    ----------
    result : Result
        With `evidence`. The step is taken again on its runs, in parts.

    Returns
    -------
    list of Cause
        The best first, one for each name: causes that leave next to nothing
        unexplained before the others, then in the order of `CAUSES`. Empty
        where nothing explains the difference.
    """
    if result.evidence is None:
        return []
    best: dict[str, Cause] = {}
    with np.errstate(all="ignore"):
        for evidence in (result.evidence, *result.evidence.later):
            try:
                difference = Difference(result, evidence)
                causes = [cause for stage in _stages(difference)
                          for cause in _causes(difference, stage)]
            except Exception as error:
                _stopped(result, error)
                continue
            for cause in causes:
                if cause.name in _FORMULAS and (
                        evidence.a.own or evidence.b.own):
                    continue    # no fault of a port
                known = best.setdefault(cause.name, cause)
                if cause.residual < known.residual:
                    best[cause.name] = cause
    return sorted(best.values(), key=_rank)


def causes_of(result: Result, evidence: Evidence) -> list[Cause]:
    """The likely causes of a further difference, of a layer or of the loss,
    the best first."""
    stage = "loss" if evidence.location is None else "forward"
    try:
        with np.errstate(all="ignore"):
            found = _causes(Difference(result, evidence), stage)
    except Exception as error:
        _stopped(result, error)
        return []
    return sorted({cause.name: cause for cause in sorted(
        found, key=_rank, reverse=True)}.values(), key=_rank)


def _rank(cause: Cause) -> tuple:
    return (not cause.confirmed, cause.residual > LIMIT,
            CAUSES.index(cause.name), cause.residual)


def _stopped(result: Result, error: Exception) -> None:
    # The comparison stands without a diagnosis, which runs parts of the
    # user's own code again.
    result.notes.append("the search for causes stopped: "
                        f"{type(error).__name__}: {error}")


def _stages(difference: Difference) -> list[str]:
    """The stages whose differences are not consequences of others."""
    wrong = difference.wrong
    stages = ["initial"] if wrong("initial") else []
    if wrong("layer") or wrong("output"):
        return [*stages, "forward", "update"]
    stages += [stage for stage in ("loss", "gradient", "devices", "clipping",
                                   "rate") if wrong(stage)][:1]
    if not (wrong("clipping") or wrong("rate")):
        stages.append("update")
    return [*stages, *["statistic"] * bool(wrong("statistic"))]


def _causes(difference: Difference, stage: str) -> list[Cause]:
    """The causes of a stage, of the first resort that finds any; none where
    one side has overflowed, since nothing predicts that."""
    if any(not np.isfinite((gap.a, gap.b)).all()
           for part in _PARTS.get(stage, [stage])
           for gap in difference.wrong(part)):
        return []
    if stage == "update":
        return explain_update(difference)
    found: list[Cause] = []
    resort = 0
    for rule in sorted(RULES, key=lambda rule: rule.resort):
        if rule.stage != stage or rule.kinds \
                and difference.kind not in rule.kinds:
            continue
        if found and rule.resort > resort:
            break
        resort = rule.resort
        with contextlib.suppress(CannotRun):    # a recorded side
            found += [Cause(rule.name, text, 1.0 if residual is None
                            else residual)
                      for text, residual in rule.find(difference)
                      if residual is None or residual < difference.limit]
    return found
