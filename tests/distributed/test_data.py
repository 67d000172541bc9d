"""Each process has its own rows: of any data set by `IndexedIterator`, and
data that all would train on alike are refused."""
import json

import numpy as np
import pytest

from conftest import BACKENDS
from distributed import jobs
from mgpu.datasets import BatchIterator

PROGRAM = jobs.ROOT / "tests" / "distributed" / "copies.py"


@pytest.fixture(scope="module", params=BACKENDS)
def told(request, tmp_path_factory):
    """What each of two ranks says."""
    job = jobs.start(tmp_path_factory.mktemp("job"), 2, PROGRAM,
                     request.param)
    return [json.loads(text.splitlines()[-1]) for text in job.said()]


def test_the_same_rows_in_two_processes_are_refused(told):
    for rank in told:
        for kind in ("list", "loader", "ahead"):
            assert "same first batch on ranks 0 and 1" in rank[kind]
            assert "IndexedIterator" in rank[kind]
        assert rank["after"] == rank["before"] != rank["changed"]


def test_rows_of_any_data_set_are_shared_out_in_one_order(told):
    X = np.random.default_rng(0).random((10, 1, 8, 8)).astype("float32")
    y = (np.arange(10) % 3).astype("int32")
    alone = list(BatchIterator(X, y, 3, seed=2))
    for i, (expected_X, expected_y) in enumerate(alone):
        parts = [rank["rows"][i] for rank in told]
        assert len(parts[1][1]) == len(expected_y) // 2     # 1, or 0 of 1
        rows = [row for part, _ in parts for row in part]
        labels = [label for _, part in parts for label in part]
        np.testing.assert_array_equal(np.float32(rows), expected_X)
        np.testing.assert_array_equal(labels, expected_y)
