"""Two hosts: network namespaces that a veth pair joins, with `tc ... tbf` to
slow the link. Needs the right to make them (root); without it the same jobs
run on loopback, and say so.

``python -m studies.faults.hosts BACKEND FOLDER [NAME ...]``: row 9, one line
of JSON for each case.
"""
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from distributed import jobs
from faults import driver

PROGRAM = Path(__file__).with_name("program.py")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
STEPS = 24


def command(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=20)


class Hosts:
    """Two hosts while the block lasts."""

    def __init__(self):
        mark = f"mg{os.getpid() % 100000}"
        self.names = [f"{mark}a", f"{mark}b"]
        self.real = False

    def __enter__(self):
        a, b = self.names
        steps = [f"ip netns add {a}", f"ip netns add {b}",
                 f"ip link add {a} netns {a} type veth peer name {b} "
                 f"netns {b}"]
        for name, address in zip(self.names, ADDRESSES):
            steps += [f"ip -n {name} addr add {address}/24 dev {name}",
                      f"ip -n {name} link set {name} up",
                      f"ip -n {name} link set lo up"]
        self.real = os.geteuid() == 0 and all(
            command(*step.split()).returncode == 0 for step in steps)
        return self

    def __exit__(self, *_):
        for name in self.names:
            with contextlib.suppress(Exception):
                command("ip", "netns", "del", name)

    def link(self, up):
        command("ip", "-n", self.names[1], "link", "set", self.names[1],
                "up" if up else "down")

    def slow(self, rate):
        """A burst far below the size of a message."""
        for name in self.names:
            done = command("tc", "-n", name, "qdisc", "add", "dev", name,
                           "root", "tbf", "rate", rate, "burst", "16kb",
                           "latency", "400ms")
            assert done.returncode == 0, done.stderr

    def start(self, host, words, file, **environment):
        inside = ["ip", "netns", "exec", self.names[host]] if self.real \
            else []
        if self.real:
            environment["GLOO_SOCKET_IFNAME"] = self.names[host]
        with open(file, "a") as out:
            return subprocess.Popen(
                [*inside, *words], stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, cwd=Path(file).parent, env={
                    **jobs.environment(host, 2, 29555),
                    "MASTER_ADDR": self.address(0), **environment})

    def address(self, host):
        return ADDRESSES[host] if self.real else "127.0.0.1"


def plan(backend, folder, **more):
    return {**driver.PLAN, "faults": [], "work": "train", "backend": backend,
            "comm": "gloo", "folder": str(folder), "steps": STEPS,
            "pause": 0.15, "batch_norm": False,
            "keep": str(folder), **more}


def workers(hosts, folder, settings):
    """Start a process on each host, without torchrun."""
    folder.mkdir(parents=True)
    settings = json.dumps({**settings, "folder": str(folder)})
    port = jobs.free_port()
    return [hosts.start(host, [
        sys.executable, "-W", "ignore", str(PROGRAM), settings],
        folder / f"rank-{host}.txt", MASTER_PORT=str(port))
        for host in range(2)]


def agent(hosts, host, folder, settings, port, nodes):
    """An agent of torchrun on a host, with one process."""
    words = [sys.executable, "-m", "torch.distributed.run",
             "--nnodes", nodes, "--nproc-per-node", "1",
             "--max-restarts", "3", "--rdzv-backend", "c10d",
             "--rdzv-id", "job", "--rdzv-endpoint",
             f"{hosts.address(0)}:{port}", "--rdzv-conf",
             f"is_host={1 - host},keep_alive_interval=1,"
             "keep_alive_max_attempt=3,last_call_timeout=2,join_timeout=60",
             "--local-addr", hosts.address(host),
             str(PROGRAM), json.dumps(settings)]
    return hosts.start(host, words, folder / f"agent-{host}.txt",
                       TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def children(pid):
    return [int(x) for x in command("pgrep", "-P", str(pid)).stdout.split()]


def below(pid):
    found = []
    for child in children(pid):
        found += [child, *below(child)]
    return found


def end(processes):
    """The processes that were left, which are ended."""
    left = driver.survivors({p.pid for p in processes})
    for process in processes:
        for pid in (process.pid, *below(process.pid)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return left


def wait(condition, seconds):
    """Seconds until `condition()`; None: not within `seconds`."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        if condition():
            return time.monotonic() - begin
        time.sleep(0.05)
    return None


def steps(folder, rank=0):
    found = driver.read(folder, "steps", 2)[rank]
    return len(found or ())


# -- the cases ----------------------------------------------------------------

def link_down(hosts, backend, folder, reference):
    """Both ranks say by name that the other does not answer."""
    if not hosts.real:
        return ["not done: needs network namespaces"], None
    processes = workers(hosts, folder, plan(backend, folder, keep=None))
    wait(lambda: steps(folder) > 2, 90)
    hosts.link(up=False)
    seconds = wait(lambda: all(p.poll() is not None for p in processes), 40)
    hosts.link(up=True)
    found = ["hung"] if seconds is None else []
    left = end(processes)
    for rank, last in enumerate(driver.read(folder, "end", 2)):
        if not last or last["error"] != "WorkerLost":
            found.append(f"wrong class: rank {rank}: {last}")
    return found + [f"left behind: {pid}" for pid in left], seconds


def slow_link(hosts, backend, folder, reference):
    """Slow is not lost, and changes no bit."""
    if not hosts.real:
        return ["not done: needs network namespaces"], None
    hosts.slow("1mbit")
    processes = workers(hosts, folder, plan(backend, folder, keep=None,
                                            pause=0))
    seconds = wait(lambda: all(p.poll() is not None for p in processes), 120)
    for name in hosts.names:
        command("tc", "-n", name, "qdisc", "del", "dev", name, "root")
    found = ["hung"] if seconds is None else []
    left = end(processes)
    found += same(folder, reference)
    return found + [f"left behind: {pid}" for pid in left], seconds


def lost(hosts, backend, folder, reference, replaced, nodes):
    folder.mkdir(parents=True)
    settings, port = plan(backend, folder), jobs.free_port()
    agents = [agent(hosts, host, folder, settings, port, nodes)
              for host in range(2)]
    if wait(lambda: steps(folder) > 3, 120) is None:
        end(agents)
        return ["did not begin: " + (folder / "agent-0.txt").read_text()[
            -600:]], None
    gone = agents[1]
    for pid in (gone.pid, *below(gone.pid)):    # the host and all on it
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    gone.wait()
    if replaced:
        agents[1] = agent(hosts, 1, folder, settings, port, nodes)
    running = agents if replaced else agents[:1]
    resumed = wait(lambda: (folder / "resumed.json").exists(), 60)
    seconds = wait(lambda: all(p.poll() is not None for p in running), 120)
    found = [] if seconds is not None else ["hung"]
    left = end(agents)
    if any(p.returncode for p in running):
        found.append(f"wrong status: {[p.returncode for p in running]}: "
                     + (folder / "agent-0.txt").read_text()[-900:])
    if resumed is None:
        found.append("did not resume")
    found += same(folder, reference if replaced or nodes == "2" else None)
    return found + [f"left behind: {pid}" for pid in left], resumed


def host_replaced(hosts, backend, folder, reference):
    """The same bits as without the fault."""
    return lost(hosts, backend, folder, reference, True, "2")


def host_not_replaced(hosts, backend, folder, reference):
    """One host continues with all examples and the same divisor: the same
    numbers up to rounding noise."""
    return lost(hosts, backend, folder, reference, False, "1:2")


def same(folder, reference):
    """`reference`: None where another number of processes adds in another
    order."""
    known = driver.read(folder, "steps", 2)[0] or []
    if len(known) != STEPS:
        return [f"wrong number: {len(known)} steps of {STEPS}"]
    if reference is not None and known != reference[1:]:
        return ["wrong number: other bits than without the fault"]
    if reference is None:
        import numpy as np
        ours, theirs = (np.load(Path(place) / "kept.npz") for place in (
            folder, Path(folder).parent / "reference"))
        names = [n for n in theirs.files if n.startswith("value ")]
        largest = max(np.abs(theirs[n]).max() for n in names)
        apart = max(np.abs(ours[n] - theirs[n]).max() for n in names)
        if not apart <= 1e-12 * largest:
            return [f"wrong number: {apart:.3g} of {largest:.3g}"]
    return []


CASES = (host_replaced, host_not_replaced, link_down, slow_link)


def reference_of(hosts, backend, folder):
    processes = workers(hosts, folder, plan(backend, folder, pause=0))
    seconds = wait(lambda: all(p.poll() is not None for p in processes), 120)
    end(processes)
    assert seconds is not None and not any(p.returncode for p in processes), \
        (folder / "rank-0.txt").read_text()[-2000:]
    return [driver.read(folder, "begun", 2)[0],
            *driver.read(folder, "steps", 2)[0]]


def run(backend, folder, names=()):
    """(name, problems, seconds, whether there were two hosts) of each."""
    folder = Path(folder)
    with Hosts() as hosts:
        reference = reference_of(hosts, backend, folder / "reference")
        for case in CASES:
            if not names or case.__name__ in names:
                found, seconds = case(hosts, backend, folder / case.__name__,
                                      reference)
                yield case.__name__, found, seconds, hosts.real


if __name__ == "__main__":
    for result in run(sys.argv[1], sys.argv[2], sys.argv[3:]):
        print(json.dumps(result), flush=True)
