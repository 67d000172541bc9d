"""Why do two runs differ? Causes, ranked, from the first difference."""
from typing import Any, List, NamedTuple


class Cause(NamedTuple):
    """A likely cause.

    Attributes
    ----------
    name : str
        One of `CAUSES`.
    text : str
        What it is and what to change.
    residual : float
        How much of the difference the cause leaves unexplained, from 0
        (none) to 1.
    """

    name: str
    text: str
    residual: float

    def __str__(self) -> str:
        return f"{self.text} (unexplained: {self.residual:.1e})"


def diagnose(result: Any) -> List[Cause]:
    return []
