"""How gradients travel between processes."""
import pytest

from conftest import BACKENDS
from distributed import jobs

PROGRAM = jobs.ROOT / "tests" / "distributed" / "reduction.py"


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_and_small_arrays_are_summed_alike(backend, tmp_path):
    for status, text in jobs.start(tmp_path, 2, PROGRAM, backend).wait():
        assert status == 0 and "alike" in text, text
