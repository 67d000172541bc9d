"""The registry of causes: `cause` adds one."""
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

#: a prediction that leaves more than this of a difference explains nothing;
#: in float32 rounding is part of a difference that is little above it
LIMIT, LIMIT_FLOAT32 = 1e-3, 0.02
#: one that leaves no more than this is confirmed
CONFIRMED = 1e-4

#: what a cause yields: (text, residual); None: the effect was not computed
Found = Iterator[tuple[str, float | None]]


class Cause(NamedTuple):
    """A likely cause.

    Attributes
    ----------
    name : str
        One of `mgpu.parity.diagnosis.CAUSES`.
    text : str
        What it is and what to change.
    residual : float
        The share of the difference that the cause leaves unexplained, from 0
        (none) to 1. 1: a setting differs, but its effect was not computed.
    """

    name: str
    text: str
    residual: float

    @property
    def confirmed(self) -> bool:
        """Whether it predicts the one side's numbers from the other's."""
        return self.residual <= CONFIRMED

    def __str__(self) -> str:
        doubt = "" if self.confirmed else ", not confirmed"
        return (f"{self.name}: {self.text} (unexplained: "
                f"{self.residual:.1e}{doubt})")


class Rule(NamedTuple):
    """A cause as `cause` registers it."""

    name: str
    stage: str
    find: Callable[..., Any]
    resort: int
    kinds: Sequence[str]


#: every rule, in the order of registration
RULES: list[Rule] = []


def cause(name: str, stage: str, resort: int = 0, kinds: Sequence[str] = ()
          ) -> Callable[[Callable], Callable]:
    """Register a function that looks for a cause.

    A cause that can show in several stages has a function for each. Where
    several causes explain a difference equally well, the one whose name was
    registered first comes first.

    Parameters
    ----------
    name : str
    stage : {"initial", "forward", "loss", "gradient", "devices", \
"clipping", "rate", "update", "statistic"}
        The stage of the first difference that it explains: one of
        `measure.STAGES`, or "forward" (layer or output) or "update" (weight
        or memory). In the stages but "update" the function takes a
        `Difference` and yields (text, residual) for each explanation, with
        the residual None where the effect was not computed. Explanations with
        a residual above the limit are dropped. For "update" see
        `mgpu.parity.causes.update_search`.
    resort : int
        The function is called only if no function of its stage with a lower
        number has found anything.
    kinds : sequence of str
        Stage "forward": only for a layer of one of these kinds that gets
        equal inputs on both sides and computes other outputs.
    """
    def register(find: Callable) -> Callable:
        RULES.append(Rule(name, stage, find, resort, kinds))
        return find
    return register
