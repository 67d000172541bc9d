"""For test suites: `assert_parity`.

The pytest plugin `pytest_mgpu` comes with it: it lists failed comparisons at
the end of a run, and ``--parity-report DIR`` writes a page for each.
"""
import inspect
from typing import Any

from mgpu.parity.comparison import Result, compare

__all__ = ["ParityError", "assert_parity"]


class ParityError(AssertionError):
    """Two networks do not train the same.

    Attributes
    ----------
    parity_result : Result
    """

    def __init__(self, result: Result):
        super().__init__(_message(result))
        self.parity_result = result


def assert_parity(a: Any, b: Any, *, allow_mxnet_float32: bool = False,
                  allow_formulas: bool = False, **options: Any) -> Result:
    """Assert that two networks train the same.

    Parameters
    ----------
    a, b, **options
        As for `mgpu.parity.compare`; `batches` is needed.
    allow_mxnet_float32 : bool
        Whether they may differ by what MXNet computes in float32 in a float64
        network.
    allow_formulas : bool
        Whether they may differ by formulas that the frameworks have in
        different forms: see `formulas` of `mgpu.parity.Result`.

    Returns
    -------
    Result

    Raises
    ------
    ParityError
        They do not; an AssertionError whose text has the verdict, the first
        difference and its likely causes, and whose `parity_result` has all.
    MatchError, ValueError
        They could not be compared: see `mgpu.parity.compare`.

    Examples
    --------
    >>> def test_the_port():
    ...     assert_parity(gluon_net, torch_net, batches=batches, devices=2)
    """
    __tracebackhide__ = True        # pytest shows the test's own line
    known = list(inspect.signature(compare).parameters)[2:]
    for name in options:
        if name not in known:
            raise TypeError(
                "assert_parity takes the options of mgpu.parity.compare; "
                f"received {name!r}. Use {', '.join(known)}.")
    result = compare(a, b, **options)
    if not result.proves(allow_mxnet_float32, allow_formulas):
        raise ParityError(result)
    return result


def _message(result: Result) -> str:
    lines = [str(result)]
    if result.plan.confirmed is False:      # perhaps it is the matching
        lines += result.plan.lines()
    return "\n".join(lines)
