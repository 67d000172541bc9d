"""Draws programs, and shrinks one that fails."""
import contextlib
import random
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample

from .programs import Program

#: The same programs in every run. The health checks are off, as an example
#: takes as long as a training does. Ten examples in a run of hypothesis:
#: later ones are mostly mutations of those before, with the same actions.
SETTINGS = settings(max_examples=10, database=None, deadline=None,
                    derandomize=True, suppress_health_check=list(HealthCheck),
                    phases=[Phase.generate, Phase.shrink])


def search(strategy, fails: Callable[[Program], object], count: int,
           first: int = 0) -> Program | None:
    """The smallest program for which `fails` is true, from the first ten that
    have one; None where it is false for `count` programs."""
    for number in range(first, first + -(-count // 10)):
        with contextlib.suppress(NoSuchExample):
            return find(strategy, fails, settings=SETTINGS,
                        random=random.Random(number))
    return None
