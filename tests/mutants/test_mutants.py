"""Each wrong implementation is rejected by the tests that it names.

One of those tests at least fails with it, by an assertion or by an error of
mgpu's own, and passes without it. A mutant that does not
fit the code any more, or one whose own text is broken, is no success.
"""
import pytest

from mutants.controls import CONTROLS
from mutants.planting import NotPlanted, all_mutants, edit


@pytest.mark.timeout(1000)      # the first one runs them all
@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda m: m.name)
def test_is_killed(mutant, verdict):
    found, why = verdict
    assert found == "killed", (
        f"mutant {mutant.name!r} ({mutant.breaks}): {found}: {why}. The tests "
        f"that must reject it: {', '.join(mutant.tests)}")


@pytest.mark.parametrize("expected, mutant", [
    pytest.param(expected, mutant, id=mutant.name)
    for expected, mutants in CONTROLS.items() for mutant in mutants])
def test_the_harness_tells_mutants_apart(expected, mutant, verdict):
    assert verdict[0] == expected, verdict


def _scaled(k):
    def scaled(x):
        return x * k
    return scaled


class Base:
    @property
    def value(self):
        return 1


class Derived(Base):
    @property
    def value(self):
        return super().value + 1

    @staticmethod
    def double(x, by=2):
        return x * by


double_by_another_name = Derived.double


def test_an_edit_holds_inside_its_block_alone():
    with edit(f"{__name__}:Derived.value", "+ 1", "+ 10")():
        assert Derived().value == 11
    assert Derived().value == 2
    with pytest.raises(KeyError):
        with edit(f"{__name__}:Derived.double", "x * by", "x + by")():
            assert double_by_another_name(5) == 7
            raise KeyError
    assert double_by_another_name(5) == 10


def test_what_does_not_fit_is_not_planted():
    with pytest.raises(NotPlanted, match="0 times instead of once"):
        edit(f"{__name__}:Derived.double", "y * by", "y")().__enter__()
    with pytest.raises(NotPlanted, match="2 times instead of once"):
        edit(f"{__name__}:_scaled", "return ", "yield ")().__enter__()
    with pytest.raises(NotPlanted, match="there is no"):
        edit(f"{__name__}:Derived.treble", "x", "y")().__enter__()
    with pytest.raises(NotPlanted, match="is no function"):
        edit(f"{__name__}:Derived", "x", "y")().__enter__()
    with pytest.raises(NotPlanted, match="outer names"):
        edit(f"{__name__}:Derived.value", "super()", "self")().__enter__()
