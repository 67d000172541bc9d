"""Two processes, of which rank 1 does something else than rank 0: all that is
done in one job for each backend, `two_ranks`."""
import json
import re

import numpy as np
import pytest

from conftest import BACKENDS
from distributed import differing, jobs
from mgpu.data.iterators import BatchIterator

PROGRAM = jobs.ROOT / "tests" / "distributed" / "two_ranks.py"


@pytest.fixture(scope="module", params=BACKENDS)
def job(request, tmp_path_factory):
    """The folder of the job, the status and output of each rank, and the
    backend."""
    folder = tmp_path_factory.mktemp("job")
    return folder, jobs.start(folder, 2, PROGRAM, request.param,
                              folder).wait(600), request.param


def reports(job, part):
    """What each rank has found in a part of the job."""
    folder, ends, _ = job
    files = [folder / f"{part}-{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), ends
    return [json.loads(file.read_text()) for file in files]


# -- data ---------------------------------------------------------------------

def test_the_same_rows_in_two_processes_are_refused(job):
    for rank in reports(job, "copies"):
        for kind in ("list", "loader", "ahead"):
            assert "same first batch on ranks 0 and 1" in rank[kind]
            assert "IndexedIterator" in rank[kind]
        assert rank["after"] == rank["before"] != rank["changed"]


def test_rows_of_any_data_set_are_shared_out_in_one_order(job):
    told = reports(job, "copies")
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


def test_large_and_small_arrays_are_summed_as_numpy_does(job):
    for rank in reports(job, "reduction"):
        assert all(rank[op] for op in ("sum", "mean", "max",
                                       "in small messages"))
        # Three large ones, and small ones: of two dtypes, and in buckets.
        assert rank["messages"] == [5] * 3
        assert rank["small buckets"] == [7]


def test_rank_0_writes_what_all_ranks_have_measured(job):
    first, second = reports(job, "logs")
    assert first["files"] == ["events", "log.csv"] and not second["files"]
    history = first["history"]
    assert first["steps"] == history["loss_per_step"] \
        == second["history"]["loss_per_step"]
    header, *rows = first["lines"]
    assert [float(row[header.index("train_loss")]) for row in rows] \
        == history["train_loss"]


# -- what differs -------------------------------------------------------------

#: the error of both ranks: its class and a part of its text; or of each
EXPECTED = {
    "rate": "ModelMismatch: .* learning rate 0.1 on rank 0 and 0.2 on rank 1",
    "schedule_that_fails": (
        "WorkerFailed: rank 1 failed .*OSError: no such rate",
        "OSError: no such rate"),
    "multiplier": "ModelMismatch: .*wd_mult and grad_req 0.weight",
    "group": "ModelMismatch: .*options of group . of the optimizer wd",
    "frozen": "ModelMismatch: .*'write' on rank 0 and 'null' on rank 1",
    "clip_norm": "ModelMismatch: .*clip_norm 0.002 on rank 0 and 0.001 on",
    "gradient": "ModelMismatch: .*summed gradient 0.weight",
    "weight": "ReplicaMismatchError: .*'0.weight' on rank 1 than on rank 0",
    "order": "UnevenWork: .*seed=0, .* on rank 0 and .*seed=1, .* on rank 1",
    **dict.fromkeys(
        ("rows", "some_labels"),
        "UnevenWork: .*batch 0 of epoch 0 .*checksum.*Give every rank the "
        "same examples"),
    "zeroed": "ModelMismatch: .*gradient before this step .zero_grad .*"
              "0.weight",
    "no_sizes": "ValueError: .*received 0",
    "no_size": (
        "WorkerFailed: rank 1 failed .*received 0 on rank 1 of 2.*of its "
        "examples. No parameter", "ValueError: batch_size must be that of"),
    "layer": "ModelMismatch: .*layers.*1e-05.* on rank 0 and .*0.001",
    "evaluated": "ModelMismatch: .*evaluate .* accuracy '0.0' on rank 0 and "
                 "'1.0' on rank 1",
    "evaluated_data": "ValueError: all ranks must evaluate on one order .*"
                      "seed=0.* on rank 0 and .*seed=1.* on rank 1",
    "last_batch": "ValueError: all ranks must train on one order .*drop_last="
                  "False.* on rank 0 and .*drop_last=True",
    "loss": "ModelMismatch: .*loss.*SoftmaxCrossEntropyLoss.* on rank 0 and "
            ".*L2Loss",
    "setting": "ReplicaMismatchError: .*options of 'layer .*' on rank 1 than "
               "on rank 0",
    "no_pass": (
        "WorkerFailed: rank 1 failed .*received 8 on rank 1 of 2",
        "ValueError: batch_size must be that of the rank's part.*no backward"),
    "labels_without_rows": (
        "WorkerFailed: rank 1 failed .*ValueError: X and y must have",
        "ValueError: X and y must have the same number"),
    "label": ("WorkerFailed: rank 1 failed .*LabelError", "LabelError: "),
    "two_trainers": "UnevenWork: ",
    "device": ("WorkerFailed: rank 1 failed .*DeviceError",
               "DeviceError: .*step 2"),
    **dict.fromkeys([f"other {what}" for what in differing.OTHER],
                    "ModelMismatch: .*rank 1"),
}


def test_differences_between_ranks_are_named(job):
    """Without a change of parameters."""
    told, wrong = reports(job, "differing"), []
    for name, expected in EXPECTED.items():
        if job[2] != getattr(differing.CASES[name], "on", job[2]):
            continue
        for rank, text in enumerate([expected] * 2 if isinstance(expected, str)
                                    else expected):
            # Rank 1 has itself written to its weight.
            unchanged = (name, rank) != ("weight", 1)
            if not re.match("(?s)" + text, str(told[rank][name])) \
                    or told[rank][f"{name}: unchanged"] != unchanged:
                wrong.append((name, rank, told[rank][name],
                              told[rank][f"{name}: unchanged"]))
    assert not wrong


def test_all_cases_are_expected():
    assert differing.CASES.keys() == {*EXPECTED, "changing_labels"}


def test_labels_that_change_at_each_look_are_no_difference(job):
    told = reports(job, "differing")
    assert [one["changing_labels"] for one in told] == [None, None]
    assert not told[0]["changing_labels: unchanged"]


# -- batch_norm="sync" --------------------------------------------------------

#: the error of rank 1, of which the other one hears
HEARD = {
    "error between layers": "a layer rejects its input",
    "error in the loss": "an error on one rank",
    "error in backward": "an error on one rank",
    "other loop": "a layer rejects its input",
    "no rows in a custom loop": "a network needs at least one example"}


def test_an_error_reaches_all_ranks(job):
    found = reports(job, "sync_faults")
    for case, own in HEARD.items():
        (kind, message), (own_kind, own_message) = (one[case]
                                                    for one in found)
        if own_kind == "MXNetError":        # it prints what failed
            own = own_kind
        else:
            assert own_kind == "ValueError" and own in own_message
        assert kind == "WorkerFailed" and own in message \
            and "rank 1" in message, case


def test_other_layers_and_single_replicas_are_refused_on_all_ranks(job):
    said = {**dict.fromkeys(
        ("other order", "fewer layers"), "needs the same layers in the same "
        "order on every rank.*'1.second' .float64 .1, 4, 1, 1.. on rank"),
        "one replica": "all replicas must run together"}
    for one in reports(job, "sync_faults"):
        for case, text in said.items():
            kind, message = one[case]
            assert kind == "RuntimeError" and re.search(
                "(?s)" + text, message), (case, message)


def test_nothing_has_changed_and_the_next_step_is_right(job):
    for one in reports(job, "sync_faults"):
        assert one["equal"]
        # On torch the forward pass of a custom loop updated statistics.
        assert not [name for name, changed in one.items() if changed
                    if name.startswith("changed") and "other loop" not in
                    name]


def test_a_rank_that_ends_in_a_pass(job):
    (status, text), (own, _) = job[1]
    assert (status, own) == (1, 3), text
    assert "on rank 0, rank 1 has ended" in text and "WorkerLost" in text
