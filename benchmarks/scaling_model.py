"""The time of a step over several hosts: a model, and a check of it.

\b
    python -m benchmarks.scaling_model            # about 4 minutes, as root
    python -m benchmarks.scaling_model --links 1 --hosts 2

The hosts are network namespaces of this machine, joined by a bridge; `tc`
holds what each of them sends to the rate of a link. On each link the latency
of one exchange (alpha) and the bandwidth (B) are measured by messages from
one host to the next. Then the model predicts sums of gradients over two
devices a host and all hosts, and steps of `mgpu.Trainer` with one device a
host, and these are measured. docs/scaling.md has the model.
"""
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import answer, started      # noqa: E402

#: bytes that each process sends in an all-gather (mgpu.distributed._gloo)
GATHERED = 1024
#: bytes of the gradients of ResNet-18, as `mgpu.models.resnet18` has them
RESNET = 44_703_272
SIZES = (1 << 20, 8_000_000, 16_000_000, RESNET)
#: units of two layers: 16.8 MB
UNITS = 1448
TARGET = 0.15


# -- the model ----------------------------------------------------------------

def ring(hosts, size, alpha, bandwidth):
    """Seconds in which `hosts` add up `size` bytes: 2 (H - 1) exchanges of a
    1/H of them."""
    return 2 * (hosts - 1) * (size / hosts / bandwidth + alpha)


def all_gather(hosts, alpha, bandwidth):
    """Seconds of the all-gather at the beginning of a reduction."""
    return (hosts - 1) * (GATHERED / bandwidth + alpha)


def step(hosts, alone, size, alpha, bandwidth):
    """Seconds of a step, where one host by itself takes `alone`."""
    return alone + all_gather(hosts, alpha, bandwidth) \
        + ring(hosts, size, alpha, bandwidth)


def table(alone, size, links):
    """Markdown: seconds of a step, and the share of `alone` in it."""
    lines = ["| hosts | " + " | ".join(name for name, *_ in links) + " |",
             "|---|" + "---|" * len(links)]
    for hosts in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        times = [step(hosts, alone, size, alpha, bandwidth)
                 for _, alpha, bandwidth in links]
        lines.append(f"| {hosts} | " + " | ".join(
            f"{x:.2f} s, {alone / x:.0%}" for x in times) + " |")
    return "\n".join(lines)


#: (name, alpha, B) of links that were not measured
SUPPOSED = [("10 Gbit/s, supposed", 1e-4, 1.25e9),
            ("100 Gbit/s, supposed", 2e-5, 12.5e9)]


# -- one host -----------------------------------------------------------------

def laps(world, call, rounds):
    """The median of the seconds of `call`, the first one not counted."""
    found = []
    for _ in range(rounds + 1):
        world.gather("begin")
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def link_of(world):
    """Alpha and B: seconds of an exchange of 8 bytes between neighbours, and
    bytes per second of long messages, by their difference: what a link
    carries at once at first does not count."""
    import torch
    from torch import distributed

    def sent(size, rounds):
        there, back = (torch.zeros(n, dtype=torch.uint8) for n in (size, 8))

        def call():
            if world.rank == 0:
                distributed.send(there, 1)
                distributed.recv(back, 1)
            elif world.rank == 1:
                distributed.recv(there, 0)
                distributed.send(back, 0)
        return laps(world, call, rounds)
    alpha = sent(8, 51) / 2
    short, long = 2 << 20, 8 << 20
    return alpha, (long - short) / (sent(long, 5) - sent(short, 5))


def sums(world, size, rounds):
    """Seconds in which two devices a host and all hosts add up `size`
    bytes."""
    import torch
    from mgpu.collectives import allreduce_many
    from mgpu.collectives.strategies import strategy_of
    from mgpu.collectives.over_processes import over_processes
    parts = [size // 4 // 3] * 3        # as a network has several arrays
    columns = [[torch.zeros(n) for _ in range(2)] for n in parts]
    strategy = over_processes(strategy_of("auto"), world.span(2))
    return laps(world, lambda: allreduce_many(columns, algorithm=strategy),
                rounds)


def training(world, rounds):
    """Seconds of a step, and the bytes of its gradients."""
    import mgpu
    import numpy as np
    from torch import nn
    net = nn.Sequential(nn.Linear(UNITS, UNITS), nn.ReLU(),
                        nn.Linear(UNITS, UNITS))
    devices = [mgpu.cpu(0)]
    replicas = mgpu.initialize(net, devices, "xavier", seed=0)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 1e-3})
    loss = mgpu.losses.L2Loss()
    X = np.zeros((4, UNITS), "float32")

    def call():
        mgpu.train_batch(X, X, replicas, loss, trainer)
        mgpu.synchronize(devices)
    return laps(world, call, rounds), 4 * sum(
        x.numel() for x in net.parameters())


def host(spec):
    import mgpu
    import torch
    torch.set_num_threads(1)
    mgpu.set_backend("torch")
    world = mgpu.distributed.init()
    found = {}
    if world.size > 1:
        found["alpha"], found["bandwidth"] = world.gather(
            "link", link_of(world))[0]
    found["sums"] = {size: sums(world, size, spec["rounds"])
                     for size in SIZES}
    if world.size <= os.cpu_count():    # each computes as fast as one alone
        found["step"] = training(world, spec["rounds"])
    if world.is_main:
        print(json.dumps(found), flush=True)


# -- the hosts ----------------------------------------------------------------

def ip(*words):
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def hosts_of(count):
    """The names of `count` network namespaces that a bridge joins; number i
    has the address 10.77.0.(i + 1)."""
    names = [f"mgpu-{os.getpid()}-{i}" for i in range(count)]
    bridge = f"mgpu-{os.getpid()}-b"
    made = []
    try:
        for name in (*names, bridge):
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", bridge, "link", "add", "name", "bridge", "type",
           "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            ip("-n", name, "link", "add", "eth", "type", "veth", "peer",
               "name", f"to{i}", "netns", bridge)
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth")
            ip("-n", name, "link", "set", "eth", "up")
            ip("-n", bridge, "link", "set", f"to{i}", "master",
               "bridge", "up")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def slow_down(name, gbit):
    """Hold what host `name` sends to `gbit`. What may pass at once is far
    below a message, and enough for the clock of `tc` at this rate."""
    burst = int(32_000 * max(1, gbit / 0.1))
    subprocess.run(
        ["tc", "-n", name, "qdisc", "replace", "dev", "eth", "root", "tbf",
         "rate", f"{gbit * 1000:g}mbit", "burst", str(burst), "latency",
         "50ms"], check=True)


def job(spec, names):
    """What rank 0 found, of a rank in each of `names`; without: of one
    alone, in this namespace."""
    command = [sys.executable, "-m", "benchmarks.scaling_model", "--rank",
               json.dumps(spec)]
    with started() as children:
        for rank, name in enumerate(names or [None]):
            enter = ["ip", "netns", "exec", name] if name else []
            place = {"RANK": str(rank), "WORLD_SIZE": str(len(names)),
                     "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500",
                     "GLOO_SOCKET_IFNAME": "eth"} if name else {}
            children.append(subprocess.Popen(
                enter + command, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", **place}))
        return answer(children[0], children)


def check(links, counts, rounds):
    """A row for each figure that the model predicts."""
    alone = job({"rounds": 4 * rounds}, [])
    rows = []
    for count in counts:
        with hosts_of(count) as names:
            for gbit in links:
                for name in names:
                    slow_down(name, gbit)
                # The less the link takes, the more others on the machine do.
                found = job({"rounds": round(
                    rounds * min(4, max(1, gbit / 0.1)))}, names)
                link = found["alpha"], found["bandwidth"]
                print(f"link of {gbit:g} Gbit/s, {count} hosts: alpha "
                      f"{1e3 * link[0]:.3f} ms, B {link[1] / 1e6:.1f} MB/s",
                      flush=True)

                def row(what, size, predicted, measured, gbit=gbit,
                        count=count, link=link):
                    rows.append({
                        "what": what, "gbit": gbit, "hosts": count,
                        "alpha": link[0], "bandwidth": link[1], "bytes": size,
                        "predicted": predicted, "measured": measured})
                    print(f"  {what}, {size / 1e6:.1f} MB: model "
                          f"{1e3 * predicted:.0f} ms, measured "
                          f"{1e3 * measured:.0f} ms "
                          f"({predicted / measured - 1:+.1%})", flush=True)
                for size, measured in found["sums"].items():
                    row("sum", int(size), alone["sums"][size]
                        + ring(count, int(size), *link), measured)
                if "step" in found:
                    measured, size = found["step"]
                    row("step", size, step(count, alone["step"][0], size,
                                           *link), measured)
    return rows


def main():
    import click

    @click.command(help=__doc__)
    @click.option("--links", default="1,0.3,0.1", show_default=True,
                  help="Rates of the links, in Gbit/s.")
    @click.option("--hosts", default="2,4", show_default=True,
                  help="How many hosts, one after the other.")
    @click.option("--rounds", type=click.IntRange(1), default=5,
                  show_default=True, help="How many rounds to count.")
    @click.option("--json", "json_file", default="out/scaling.json",
                  show_default=True, help="Write all rows to this file.")
    @click.option("--alone", default=0.5, show_default=True,
                  help="Seconds of a step of one host, for the table.")
    @click.option("--rank", hidden=True)
    def run(links, hosts, rounds, json_file, alone, rank):
        if rank:
            return host(json.loads(rank))
        rows = check([float(x) for x in links.split(",")],
                     [int(x) for x in hosts.split(",")], rounds)
        Path(json_file).resolve().parent.mkdir(parents=True, exist_ok=True)
        Path(json_file).write_text(json.dumps(rows, indent=1))
        print(table(alone, RESNET, sorted({
            (f"{r['gbit']:g} Gbit/s", r["alpha"], r["bandwidth"])
            for r in rows if r["hosts"] == rows[0]["hosts"]},
            key=lambda link: link[2]) + SUPPOSED))
        large = [r for r in rows if r["bytes"] >= 8e6]
        for what in ("sum", "step"):
            errors = [abs(r["predicted"] / r["measured"] - 1)
                      for r in large if r["what"] == what]
            if not errors:
                continue
            print(f"the model against {len(errors)} measured {what}s of 8 MB "
                  f"and more: median error {statistics.median(errors):.1%}, "
                  f"worst {max(errors):.1%}, target {TARGET:.0%} "
                  + ("met" if max(errors) <= TARGET else "not met"))
    run()


if __name__ == "__main__":
    main()
