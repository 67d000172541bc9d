"""All cases, by the row of the table in docs/reliability.md. Rows 6 (roles of
a parameter server), 8, and 21 to 28 (checkpoints) have programs of their own.
"""
import re
import signal

from faults import cases
from faults.cases import lost
from faults.driver import Case

#: row -> (fault, guarantee)
ROWS = {
    1: ("a process is killed",
        "the other processes raise WorkerLost within 5 s and name its rank"),
    2: ("Python code fails in one process",
        "its traceback comes first; the others raise and name its error"),
    3: ("a process does not respond",
        "the others raise WorkerLost after `timeout` + 1 s and name its rank"),
    4: ("a process does fewer steps, or ends early",
        "UnevenWork names it; the job's exit status is not 0"),
    5: ("a process never starts; a wrong or taken port; other numbers of "
        "processes", "an error within `start_timeout` names missing ranks"),
    7: ("Ctrl-C, SIGTERM", "all processes end within 10 s"),
    9: ("a machine is lost, a link is down or slow",
        "replaced: the same bits; not replaced: an error, or the job "
        "continues with gradients divided by the examples present"),
    10: ("other parameters, dtypes, names or options in one process",
         "ModelMismatch in every process, before the first step"),
    11: ("other seeds", "all ranks begin with rank 0's values"),
    12: ("the same calls in another order", "UnevenWork names both calls"),
    13: ("random delays", "the same bits"),
    14: ("queued work fails on a device",
         "DeviceError names device and step; parameters are unchanged"),
    15: ("NaN in a gradient of one process",
         "`nonfinite`: all processes raise, skip or ignore"),
    16: ("a label out of range in one process",
         "LabelError there, WorkerFailed in the others"),
    17: ("a wrong list of devices in one process",
         "ValueError there, WorkerLost in the others"),
    29: ("who can connect", "local processes, unless an address is given"),
    30: ("messages", "name the rank, the step or call, and the fix"),
}


def check_models(outcome):
    return [f"wrong class: {what!r} is accepted on rank {rank}: {text}"
            for rank, end in enumerate(outcome.ends)
            for what, text in (end or {"found": {"?": "no end"}})[
                "found"].items()
            if not text.startswith("ModelMismatch: ")
            or "rank 1" not in text]


def check_sockets(outcome):
    # 127.0.0.1, in the order of bytes of /proc/net/tcp; ::1
    return [f"open to the network: {address} of rank {rank}"
            for rank, end in enumerate(outcome.ends)
            for address in (end or {"found": {}})["found"]
            if not re.match(r"0100007F:|0{24}01000000:|"
                            r"0{16}FFFF00000100007F:", address)]


def check_skipped(count):
    def check(outcome):
        found = [end["skipped"] for end in outcome.ends]
        return [] if found == [count] * len(found) else [
            f"wrong number: skipped steps {found}"]
    return check


def check_device(outcome):
    found = [end["message"] for end in outcome.ends
             if end and end["error"] == "DeviceError"]
    return [] if found and all("cpu(1)" in text and "step 3" in text
                               for text in found) else [
        f"wrong culprit: {found}"]


CASES = [
    *cases.CASES,
    Case(1, "killed", ((1, 3, "before", "kill"),), lost(1), 1, limit=5),
    Case(1, "killed in a pass", ((1, 3, "pass", "kill"),), lost(1), 1,
         limit=5),
    Case(1, "one of three killed", ((2, 3, "between", "kill"),), lost(2, 3),
         2, size=3, limit=5, options={"by_hand": True}),
    Case(2, "in a pass", ((1, 3, "pass", "raise"),),
         lost(1, 2, "WorkerFailed", "ValueError"), 1),
    Case(2, "rank 0 of three, between steps", ((0, 3, "before", "raise"),),
         lost(0, 3, "WorkerLost", "ValueError"), 0, size=3),
    Case(2, "between allreduce_grads and update",
         ((1, 3, "between", "raise"),),
         lost(1, 2, "WorkerLost", "ValueError"), 1,
         options={"by_hand": True}),
    Case(2, "sys.exit(3)", ((1, 3, "before", "exit 3"),),
         lost(1, 2, "WorkerLost", "SystemExit"), 1, status={1: 3}),
    Case(2, "in a thread", ((1, 3, "before", "thread"),),
         lost(1, 2, "WorkerLost", "SystemExit"), 1),
    Case(2, "in both", (("all", 3, "pass", "raise"),),
         {0: "ValueError", 1: "ValueError"}),
    Case(3, "rank 0", ((0, 3, "before", "stop"),), lost(0), 0, limit=6.5),
    Case(3, "in a pass, of three", ((2, 3, "pass", "stop"),), lost(2, 3), 2,
         size=3, limit=6.5),
    Case(4, "rank 0, fewer steps", ((0, 0, "steps", "3"),),
         lost(0, 2, "UnevenWork", None), 0, status={0: 1}),
    Case(4, "exit 0", ((1, 3, "before", "exit 0"),),
         lost(1, 2, "UnevenWork", "SystemExit"), 1, status={1: 1}),
    Case(4, "os._exit", ((1, 3, "before", "_exit"),), lost(1), 1),
    Case(5, "a closed port", (), {0: "WorkerLost", 1: "WorkerLost"},
         limit=30, environment={1: {"MASTER_PORT": "closed"}},
         options={"start_timeout": 6}),
    Case(5, "a taken port", (), {0: "WorkerLost", 1: "WorkerLost"}, 0,
         limit=30, environment={0: {"MASTER_PORT": "taken"}},
         options={"start_timeout": 6}),
    Case(5, "a port without an answer", (), {1: "WorkerLost"}, 0,
         limit=30, environment={0: None, 1: {"MASTER_PORT": "silent"}},
         options={"start_timeout": 6}),
    Case(5, "another WORLD_SIZE", (),
         {0: "WorkerLost", 1: "WorkerLost"}, limit=30,
         environment={1: {"WORLD_SIZE": "3"}},
         options={"start_timeout": 6}),
    Case(5, "two with one RANK", (), lost(2, 3), 2, size=3, limit=30,
         environment={2: {"RANK": "1"}}, options={"start_timeout": 6}),
    Case(7, "Ctrl-C", (), {0: "KeyboardInterrupt", 1: "KeyboardInterrupt"},
         signal=("all", signal.SIGINT), options={"pause": 0.3}),
    Case(7, "Ctrl-C in one process", (),
         {0: "WorkerLost", 1: "KeyboardInterrupt"}, 1,
         signal=(1, signal.SIGINT), options={"pause": 0.3}),
    Case(7, "SIGTERM of one process", (), lost(1), 1,
         signal=(1, signal.SIGTERM), options={"pause": 0.3}),
    Case(10, "six differences", (), {0: None, 1: None}, work="models",
         check=check_models, limit=30),
    Case(11, "another seed", ((1, 0, "model", "seed"),), {0: None, 1: None},
         limit=30),
    Case(12, "two trainers", ((1, 2, "order", ""),),
         {0: "UnevenWork", 1: "UnevenWork"}, right=False,
         options={"trainers": 2}),
    Case(13, "three processes", (), {0: None, 1: None, 2: None}, size=3,
         limit=30, options={"delay": 0.05}),
    Case(14, "one process", ((0, 3, "pass", "device"),),
         {0: "DeviceError"}, size=1, backends=("mxnet",),
         options={"devices": 2}, check=check_device),
    Case(14, "two processes", ((1, 3, "pass", "device"),),
         lost(1, 2, "WorkerFailed", "DeviceError"), 1, backends=("mxnet",),
         options={"devices": 2}, check=check_device),
    Case(15, "raise", ((1, 3, "pass", "nan"),),
         {0: "NonFiniteGradient", 1: "NonFiniteGradient"},
         options={"nonfinite": "raise"}),
    Case(15, "skip", ((1, 3, "pass", "nan"),), {0: None, 1: None},
         right=False, check=check_skipped(1), options={"nonfinite": "skip"}),
    Case(15, "ignore", ((1, 3, "pass", "nan"),), {0: None, 1: None},
         right=False, check=check_skipped(0),
         options={"nonfinite": "ignore"}),
    Case(16, "too large", ((1, 3, "labels", "10"),),
         lost(1, 2, "WorkerFailed", "LabelError"), 1),
    Case(16, "negative", ((0, 3, "labels", "-1"),),
         lost(0, 2, "WorkerFailed", "LabelError"), 0),
    Case(17, "a device twice", ((1, 0, "model", "twice"),),
         lost(1, 2, "WorkerLost", "ValueError"), 1),
    Case(17, "no device", ((1, 0, "model", "none"),),
         lost(1, 2, "WorkerLost", "ValueError"), 1),
    Case(29, "listening sockets", (), {0: None, 1: None}, work="sockets",
         check=check_sockets, limit=30),
]
