"""Mutants with a known verdict, which check the harness."""
from mutants.planting import Mutant, mutant

_EXACT = "test_collectives.py::test_allreduce_is_exact_and_in_place"
_BOUNDS = "test_split.py::test_bounds"
_ADDED = "A += B"


def _combine(name: str, breaks: str, *texts: str, killer: str = _EXACT
             ) -> Mutant:
    return mutant("control: " + name, breaks, "strategies:combine", *texts,
                  killer=killer)


#: by the verdict that they must get from their killer alone
CONTROLS = {
    "survived": [
        _combine("no-op", "nothing", _ADDED, _ADDED),
        _combine("seen elsewhere", "sums, which a test of bounds cannot see",
                 _ADDED, "A -= B", killer=_BOUNDS)],
    "killed": [
        _combine("subtracts", "the sum is a difference", _ADDED, "A -= B"),
        mutant("control: raises", "an error of mgpu's own without a "
               "cause", "messages:check_apart", "begin < end", "True",
               killer=_EXACT)],
    "not planted": [
        _combine("no place", "nothing", "A -= B", _ADDED),
        _combine("several places", "nothing", "A", "B"),
        mutant("control: no function", "nothing", "gone", "A", "B",
               killer=_EXACT),
        _combine("no syntax", "nothing", _ADDED, "A +=")],
    "crashed": [
        _combine("unknown name", "a typing mistake", _ADDED, "A += othr"),
        _combine("unknown method", "an error of Python", _ADDED,
                 "A.no_such_method()")],
    "no such test": [
        _combine("lost test", "sums", _ADDED, "A -= B",
                 killer="test_collectives.py::test_that_is_gone"),
        _combine("lost file", "sums", _ADDED, "A -= B",
                 killer="test_that_is_gone.py::test_bounds")],
}
