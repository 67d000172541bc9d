"""Mutants with a known verdict: they judge the harness."""
import contextlib

from mutants.planting import Mutant, edit

EXACT = ("test_collectives.py::"
         "test_allreduce_is_exact_and_in_place[torch-naive-sum-2]",)
WHERE, OLD = "mgpu.collectives.strategies:combine", "into += other"

_KEPT = []


def _for_good():
    _KEPT.append(edit(WHERE, OLD, "into -= other")())
    _KEPT[-1].__enter__()
    return contextlib.nullcontext()


#: by the verdict that they must get
CONTROLS = {
    "survived": [
        Mutant("no-op", "nothing: the code stays", contextlib.nullcontext,
               EXACT),
        Mutant("same code", "nothing: the same text compiled again",
               edit(WHERE, OLD, OLD), EXACT),
        Mutant("seen elsewhere", "sums, which a test of bounds cannot see",
               edit(WHERE, OLD, "into -= other"),
               ("test_split.py::test_bounds",)),
    ],
    "killed": [
        Mutant("subtracts", "the sum is a difference",
               edit(WHERE, OLD, "into -= other"), EXACT),
        Mutant("refuses", "an error of mgpu's own where there is none",
               edit("mgpu.backends.messages:check_apart", "begin < end",
                    "True"), EXACT),
    ],
    "not planted": [
        Mutant("old text", "the code has moved on",
               edit(WHERE, "into -= other", OLD), EXACT),
        Mutant("no function", "the function has moved on",
               edit("mgpu.collectives:_gone", OLD, OLD), EXACT),
        Mutant("no syntax", "the new text is no Python",
               edit(WHERE, OLD, "into +="), EXACT),
    ],
    "crashed": [
        Mutant("unknown name", "the new text has a typing mistake",
               edit(WHERE, OLD, "into += othr"), EXACT),
        Mutant("unknown function", "an error of Python in the new text",
               edit(WHERE, OLD, "into.no_such_method()"), EXACT),
    ],
    "no such test": [
        Mutant("lost test", "the test was renamed",
               edit(WHERE, OLD, "into -= other"),
               ("test_collectives.py::test_that_is_gone",)),
        Mutant("lost file", "the file was renamed",
               edit(WHERE, OLD, "into -= other"),
               ("test_that_is_gone.py::test_bounds",)),
    ],
    "fails without": [      # last, since it never ends
        Mutant("for good", "the sum is a difference from now on",
               _for_good, EXACT),
    ],
}
