"""Why do two runs differ? Causes, ranked, from the first difference.

Each cause is a hypothesis that *predicts* one side's tensors from what is
known of the other: the state before the step, gradients, rates, the batch,
the inputs of the first layer that differs. What the prediction leaves
unexplained of the difference is the cause's residual, the largest over all
tensors of the stage, so that no coincidence in one tensor names a cause. A
cause whose residual is not small is not named: a difference that nothing
here predicts has no cause.
"""
import contextlib
from typing import Any

import numpy as np

from mgpu.parity.causes import (forward, gradients, initial, loss, statistics,
                                update)
from mgpu.parity.causes.case import CAUSES, LIMIT, ROWS, Case, Cause, Found
from mgpu.parity.sides import CannotRun

__all__ = ["CAUSES", "LIMIT", "ROWS", "Cause", "diagnose"]


def diagnose(result: Any) -> list[Cause]:
    """The likely causes of the first difference of a lock-step.

    Stages that cannot be consequences of one another (the update, and the
    running statistics) are explained separately, so several causes that act
    at once are all named.

    Parameters
    ----------
    result : Result
        With `evidence`. Its runners run the step again, in parts.

    Returns
    -------
    list of Cause
        The best first, one for each name: those that leave next to nothing
        unexplained before the others, then in the order of `CAUSES`. Empty
        where nothing explains the difference.
    """
    if result.evidence is None:
        return []
    best: dict[str, Cause] = {}
    with np.errstate(all="ignore"):
        for evidence in (result.evidence, *result.evidence.later):
            try:
                causes = _explain(Case(result, evidence))
            except Exception as error:
                # The comparison stands without a diagnosis, which runs
                # parts of the user's own code again.
                result.notes.append("the search for causes stopped: "
                                    f"{type(error).__name__}: {error}")
                continue
            for cause in causes:
                known = best.setdefault(cause.name, cause)
                if cause.residual < known.residual:
                    best[cause.name] = cause
    return sorted(best.values(), key=lambda c: (
        c.residual > 1e-4, c.residual > LIMIT, CAUSES.index(c.name),
        c.residual))


def _explain(case: Case) -> Found:
    """The causes of one step's differences."""
    stages = [initial.causes] if case.wrong("initial") else []
    if case.wrong("layer") or case.wrong("output"):
        stages.append(forward.causes)
    else:
        if case.wrong("loss"):
            stages.append(loss.causes)
        elif case.wrong("gradient"):
            stages.append(gradients.causes)
        elif case.wrong("devices"):
            stages.append(gradients.device_causes)
        stages.append(update.causes)
        if case.wrong("statistic"):
            stages.append(statistics.causes)
    found: Found = []
    for causes in stages:
        with contextlib.suppress(CannotRun):    # a recorded side
            found += causes(case)
    return found
