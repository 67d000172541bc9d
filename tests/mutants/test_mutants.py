"""Each wrong implementation is rejected by a test.

The test fails with it, by an assertion or by an error of mgpu's own, and
passes without it. A mutant that does not fit the code any more, or one whose
own text is broken, is no success.
"""
import pytest

from mutants.controls import CONTROLS
from mutants.planting import all_mutants, find, mutant

KILLER = "test_x.py::test_y"


@pytest.mark.timeout(1300)      # the first one runs them all
@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda m: m.name)
def test_is_killed(mutant, verdict):
    found, why = verdict
    assert found == "killed", (
        f"mutant {mutant.name!r} ({mutant.breaks}): {found}: {why}")


@pytest.mark.parametrize("expected, mutant", [
    pytest.param(expected, mutant, id=mutant.name)
    for expected, mutants in CONTROLS.items() for mutant in mutants])
def test_the_harness_tells_mutants_apart(expected, mutant, verdict):
    assert verdict[0] == expected, verdict


def test_a_change_holds_inside_its_block_alone():
    by_another_name = find("split:shard_bounds")
    one = mutant("shards", "all rows are in each shard", "shard_bounds",
                 "n // k + B", "n", killer=KILLER)
    with pytest.raises(KeyError):
        with one.planted():
            assert by_another_name(3, 3) == [(0, 3), (3, 6), (6, 9)]
            raise KeyError
    assert by_another_name(3, 3) == [(0, 1), (1, 2), (2, 3)]
