"""Processes that differ in what a step depends on are refused by name."""
import json

import pytest

from conftest import BACKENDS
from distributed import jobs

#: the error of both ranks: its class and a part of its text; or of each
EXPECTED = {
    "rate": "ModelMismatch: .* learning rate 0.1 on rank 0 and 0.2 on rank 1",
    "schedule": "ModelMismatch: .* learning rate 0.1 on rank 0 and 0.2 on",
    "schedule_that_fails": (
        "WorkerFailed: rank 1 failed .*OSError: no such rate",
        "OSError: no such rate"),
    "multiplier": "ModelMismatch: .*wd_mult and grad_req 0.weight",
    "option": "ModelMismatch: .*options of the optimiser wd",
    "group": "ModelMismatch: .*options of (group 1 of )?the optimiser wd",
    "frozen": "ModelMismatch: .*'write' on rank 0 and 'null' on rank 1",
    "norm": "ModelMismatch: .*max_norm 0.002 on rank 0 and 0.001 on rank 1",
    "clip_norm": "ModelMismatch: .*clip_norm 0.002 on rank 0 and 0.001 on",
    "accumulate": "ModelMismatch: .*accumulate 2 on rank 0 and 3 on rank 1",
    "gradient": "ModelMismatch: .*summed gradient 0.weight",
    "weight": "ReplicaMismatchError: .*'0.weight' on rank 1 than on rank 0",
    "order": "UnevenWork: .*seed=0, .* on rank 0 and .*seed=1, .* on rank 1",
    **dict.fromkeys(
        ("rows", "subset", "some_labels"),
        "UnevenWork: .*batch 0 of epoch 0 .*checksum.*Give every rank the "
        "same examples"),
    "zeroed": "ModelMismatch: .*gradient before this step .zero_grad .*"
              "0.weight",
    "no_size_added": (
        "WorkerFailed: rank 1 failed .*received 0 on rank 1 of 2",
        "ValueError: a process gives the size of its own part"),
    "no_sizes": "ValueError: .*received 0",
    "no_size": (
        "WorkerFailed: rank 1 failed .*received 0 on rank 1 of 2.*of its "
        "rows. No parameter", "ValueError: a process gives the size of its"),
    "no_size_of_sums": (
        "WorkerFailed: rank 1 failed .*received 0 on rank 1 of 2",
        "ValueError: a process gives the size of its own part"),
    "layer": "ModelMismatch: .*layers.*1e-05.* on rank 0 and .*0.001",
    "evaluated": "ModelMismatch: .*evaluate .* accuracy '0.0' on rank 0 and "
                 "'1.0' on rank 1",
    "evaluated_data": "ValueError: all processes evaluate on one order .*"
                      "seed=0.* on rank 0 and .*seed=1.* on rank 1",
    "fewer_tests": "ValueError: all processes evaluate .* 16 examples .* on "
                   "rank 0 and .* 15 examples",
    "last_batch": "ValueError: all processes train on one order .*drop_last="
                  "False.* on rank 0 and .*drop_last=True",
    "loss": "ModelMismatch: .*loss.*SoftmaxCrossEntropyLoss.* on rank 0 and "
            ".*L2Loss",
    **dict.fromkeys(("setting", "mode"), "ReplicaMismatchError: .*options of "
                    "'layer .*' on rank 1 than on rank 0"),
    "no_pass": (
        "WorkerFailed: rank 1 failed .*received 8 on rank 1 of 2",
        "ValueError: a process gives the size of its own part.*no backward"),
    "labels_without_rows": (
        "WorkerFailed: rank 1 failed .*ValueError: X and y must have",
        "ValueError: X and y must have equally many rows"),
}


@pytest.fixture(scope="module", params=BACKENDS)
def told(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    program = jobs.ROOT / "tests" / "distributed" / "differing.py"
    jobs.start(folder, 2, program, request.param, folder).said()
    return [json.loads((folder / f"{rank}.json").read_text())
            for rank in range(2)]


@pytest.mark.parametrize("name", EXPECTED)
def test_what_differs_is_refused_by_name(told, name):
    expected = EXPECTED[name]
    for rank, text in enumerate([expected] * 2 if isinstance(expected, str)
                                else expected):
        with pytest.raises(AssertionError, match="(?s)" + text):
            raise AssertionError(told[rank][name])
        # Rank 1 has itself written to its weight.
        assert told[rank][f"{name}: unchanged"] == (
            (name, rank) != ("weight", 1))


def test_all_cases_are_expected(told):
    assert {name for name in told[0] if ":" not in name} == {
        *EXPECTED, "changing_labels"}


def test_labels_that_change_at_each_look_are_no_difference(told):
    assert [one["changing_labels"] for one in told] == [None, None]
    assert not told[0]["changing_labels: unchanged"]
