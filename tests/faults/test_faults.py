"""What goes wrong in a job is seen, named, and changes no number.

``scripts/faults.sh`` runs all cases, also those of studies/faults.
``-m "not faults"`` leaves them out.
"""
import pytest

from faults import cases, driver

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The digests of a training of two processes without a fault."""
    pytest.importorskip("torch")
    return cases.reference("torch", 2, 1, "gloo",
                           tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("case", cases.CASES,
                         ids=lambda x: f"{x.row} {x.name}")
def test_a_fault(case, reference, tmp_path):
    assert case.size == 2 or not case.faults
    outcome = driver.run(case, "torch", "gloo", tmp_path)
    assert driver.problems(case, outcome, reference) == [], outcome.texts
