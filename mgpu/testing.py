"""Assertions for test suites: `assert_parity`.

The pytest plugin `pytest_mgpu` is installed with it. It lists failed
comparisons at the end of a run, and ``--parity-report DIR`` writes a page for
each, also for networks that could not be compared.
"""
import contextlib
import inspect
from dataclasses import fields
from typing import Any

from mgpu.backends import using_backend
from mgpu.errors import ParityError
from mgpu.parity.comparison import Result, compare
from mgpu.parity.matching import MatchError, Plan
from mgpu.parity.result import joined
from mgpu.parity.side import Side, network_of

__all__ = ["ParityError", "assert_parity"]


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
        They could not be compared: see `mgpu.parity.compare`. Its
        `parity_result` has the verdict "not compared".

    Examples
    --------
    >>> def test_the_port():
    ...     assert_parity(gluon_net, torch_net, batches=batches, devices=2)
    """
    __tracebackhide__ = True        # pytest shows the test's own line
    inspect.signature(compare).bind(a, b, **options)    # TypeError
    try:
        result = compare(a, b, **options)
    except Exception as error:
        error.parity_result = _not_compared(     # type: ignore[attr-defined]
            a, b, options, error)
        raise
    if not result.proves(allow_mxnet_float32, allow_formulas):
        raise ParityError(result)
    return result


def _not_compared(a: Any, b: Any, options: dict[str, Any], error: Exception
             ) -> Result:
    """The result of a comparison that raised."""
    if isinstance(error, MatchError):
        notes = [
            f"left in b: {joined(names, 8) or 'nothing'}" if not name else
            f"{name} of a could be {joined(names, 8)}" if names else
            f"{name} of a is like nothing in b"
            for name, names in error.candidates.items()]
    elif isinstance(error, ValueError):
        notes = []      # the text says what to do
    else:
        notes = ["To see where the error comes from, give the first batch to "
                 "each network by itself."]
    return Result(
        "not compared", [], Plan("", []),
        {"a": _described(a), "b": _described(b)}, {},
        {name: value if isinstance(value, (str, int, float, list, tuple))
         else repr(value) for name, value in options.items()
         if name != "batches"}, notes=notes,
        reason=str(error) if isinstance(error, ValueError)
        else f"{type(error).__name__}: {error}")


def _described(side: Any) -> dict[str, Any]:
    """A side as far as it is known before the first step."""
    side = side if isinstance(side, Side) else Side(side)
    known = {f.name: str(getattr(side, f.name)) for f in fields(side)
             if f.name != "net" and getattr(side, f.name) is not None}
    known["network"] = getattr(side.net, "__qualname__",
                               type(side.net).__name__)
    with contextlib.suppress(Exception):    # perhaps it is what has failed
        net, name = network_of(side.net)
        known["network"] = type(net).__name__
        with using_backend(name) as backend:
            known["engine"] = f"{name} {backend.version}"
    return known
