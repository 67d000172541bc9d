"""The cases that the ordinary tests run, by the row of the table in
docs/reliability.md; studies/faults/cases.py has all. Rows 6 (roles of a
parameter server), 8, and 21 to 28 (checkpoints) have tests of their own; rows
10, 12, 14 and 16 are in distributed/differing.py, 11 and 15 in
distributed/equality.py, 29 in distributed/test_launch.py."""
from dataclasses import replace

from faults.driver import Case, problems, run


def lost(rank, size=2, others="WorkerLost", own="-"):
    return {r: own if r == rank else others for r in range(size)}


CASES = [
    Case(1, "rank 0 killed", ((0, 3, "before", "kill"),), lost(0), 0,
         limit=5),
    Case(2, "between steps", ((1, 3, "before", "raise"),),
         lost(1, 2, "WorkerLost", "ValueError"), 1),
    Case(3, "rank 1", ((1, 3, "before", "stop"),), lost(1), 1, limit=6.5),
    Case(4, "fewer steps", ((1, 0, "steps", "3"),),
         lost(1, 2, "UnevenWork", None), 1, status={1: 1}),
    Case(5, "rank 2 of 3 is missing", (), lost(2, 3), 2, size=3, limit=30,
         environment={2: None}, options={"start_timeout": 6}),
]
#: a training without a fault
REFERENCE = Case(0, "reference", expect={0: None, 1: None}, limit=60)


def reference(backend, size, devices, comm, folder):
    """The digests of a training without a fault, from before its first step
    on."""
    case = replace(REFERENCE, size=size, options={"devices": devices},
                   expect=dict.fromkeys(range(size)))
    outcome = run(case, backend, comm, folder)
    found = problems(case, outcome, None)
    assert not found and len(set(map(tuple, outcome.steps))) == 1, (
        found, outcome.texts)
    return [outcome.begun[0], *outcome.steps[0]]
