"""`faults.driver` finds what is wrong in a job."""
import pytest

from faults import driver

SAID = "all ranks exchange in step 3; rank 1 has ended. Start again."


def outcome(message=SAID, digests=("b", "c"), digest="c", status=1):
    """Of a job whose rank 1 was lost in the third step, as it must be."""
    end = {"error": "WorkerLost", "family": True, "digest": digest,
           "message": message}
    return driver.Outcome(
        [status, status], [end, None], [list(digests), ["b", "c"]],
        ["a", "a"], ["", ""], [], [], 1.0, 1.0)


def problems(found, expected="WorkerLost"):
    return driver.problems(driver.Case(
        1, "lost", expect={0: expected, 1: "-"}, culprit=1), found, [*"abcd"])


@pytest.mark.parametrize("wrong, complaint", [
    ({"digests": ("b", "x"), "digest": "x"},
     "wrong number: rank 0, its steps"),
    ({"digest": "d"}, "wrong number: rank 0, after the error"),
    ({"message": SAID.replace("1", "0")}, "wrong culprit: rank 0"),
    ({"message": "all exchange in step 3; one has ended. Start again."},
     "poor message: no rank"),
    ({"message": "rank 1 has ended. Start again."}, "poor message: not where"),
    ({"message": SAID[:-len(" Start again.")]}, "poor message: no remedy"),
    ({"status": 0}, "wrong status: the whole job")])
def test_the_driver_finds_wrong_outcomes(wrong, complaint):
    assert problems(outcome()) == []
    assert problems(outcome(), "UnevenWork")[0].startswith("wrong class: W")
    assert complaint in " ".join(problems(outcome(**wrong)))


def test_the_driver_finds_late_errors():
    """Only where the limit itself is asked for (studies/faults)."""
    case = driver.Case(1, "late", right=False, limit=0.5)
    assert driver.problems(case, outcome(), None) == []
    assert driver.problems(case, outcome(), None, late=True) \
        == ["late: 1.0 s, limit 0.5"]


STAYS = """
import json, os, subprocess, sys, time
folder, rank = json.loads(sys.argv[1])["folder"], os.environ["RANK"]
with open(f"{folder}/fault-{rank}", "w") as file:
    json.dump(time.time(), file)
os.replace(file.name, file.name + ".json")
if rank == "0":
    time.sleep(600)
subprocess.Popen(["sleep", "600"])
"""


@pytest.mark.faults
def test_the_driver_finds_remaining_processes(tmp_path):
    program = tmp_path / "stays.py"
    program.write_text(STAYS)
    case = driver.Case(1, "stays", limit=1)
    outcome = driver.run(case, "torch", "gloo", tmp_path / "job", program,
                         patience=1)
    hung, left = driver.problems(case, outcome, None)
    assert hung == "hung: rank 0" and left.startswith("left behind: process")
    assert driver.survivors(set(outcome.left)) == []
