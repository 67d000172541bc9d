"""How fast mgpu is, against what people use now.

\b
    python -m benchmarks                  # every row, about 40 minutes
    python -m benchmarks --rows lenet     # rows with that in their name
    python -m benchmarks --list           # the names of all rows

A row is a ratio within one run. Its contenders, each in a process of its own
(`contenders.py`), take turns, a round each; the first round is not counted.
Each round starts new processes: whether plain PyTorch gives its memory back
to the system in every step (12,000 page faults, a fifth of its time) is
decided by chance when a process starts, and stays so.

For each row the median of the rounds' ratios is printed, the smallest and the
largest, the target ratio, and the command of each contender. Nothing else
should run on the machine.
"""
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

#: seconds of a round, about
ROUND = 1.5
LENET, RESNET = ({"model": "lenet", "batch": 256},
                 {"model": "resnet18", "batch": 64})


def installed(package):
    """Its version, or None. Imports nothing: this process loads no backend."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)


def ours(backend, k, **more):
    return {"loop": "mgpu", "backend": backend, "devices": k, **more}


def _races():
    """(row, contender, against, target, stretch): the ratio is the rate of the
    first contender over that of the second; `stretch` is a higher target."""
    for model, batch in (("LeNet", LENET), ("ResNet-18", RESNET)):
        for backend, target in (("torch", 1.95 if model == "LeNet" else 1.9),
                                ("mxnet", 1.85 if model == "LeNet" else 1.9)):
            yield (f"{model}, {backend}: 2 devices against 1",
                   ours(backend, 2, **batch), ours(backend, 1, **batch),
                   target, None)
            yield (f"{model}, {backend}: the machine's limit, 2 separate "
                   "halves against 1",
                   {"loop": "halves", "backend": backend, "devices": 2,
                    **batch}, ours(backend, 1, **batch), None, None)
        two = {"devices": 2, **batch}
        yield (f"{model}, torch: 2 devices against DDP (gloo)",
               ours("torch", 2, **batch), {"loop": "ddp", **two}, 1.05,
               1.1 if model == "LeNet" else None)
        if importlib.util.find_spec("lightning_fabric"):
            yield (f"{model}, torch: 2 devices against Lightning Fabric (DDP)",
                   ours("torch", 2, **batch),
                   {"loop": "ddp", "fabric": True, **two}, None, None)
        yield (f"{model}, torch: 2 devices against plain PyTorch, 2 threads",
               ours("torch", 2, **batch), {"loop": "torch", **two},
               1.1 if model == "LeNet" else 1.03,
               1.2 if model == "LeNet" else None)
        yield (f"{model}, torch: 2 devices against the book's loop",
               ours("torch", 2, **batch), {"loop": "book", **two}, None,
               None)
        yield (f"{model}, mxnet: 2 devices against Gluon's own loop",
               ours("mxnet", 2, **batch), {"loop": "gluon", **two},
               1.8 if model == "LeNet" else 1.45, None)
        yield (f"{model}, mxnet: 2 devices, hybridized, against Gluon "
               "hybridized, 1 context, 2 threads",
               ours("mxnet", 2, hybridize=True, **batch),
               {"loop": "gluon", "devices": 1, "threads": 2,
                "hybridize": True, **batch}, 1.0, 1.03)
        one = {"devices": 1, **batch}
        yield (f"{model}, torch: 1 device against a plain loop",
               ours("torch", 1, **batch), {"loop": "torch", **one}, 0.98,
               None)
        yield (f"{model}, mxnet: 1 device against Gluon's loop, 1 thread",
               ours("mxnet", 1, **batch),
               {"loop": "gluon", "threads": 1, **one}, 0.98, None)


class Contender:
    """A process that trains as many steps as it reads from its stdin."""

    def __init__(self, spec):
        self.child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contenders",
             json.dumps(spec)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._start = None

    def ready(self):
        """Wait until it is ready; what it reports of its preparations."""
        self._start = self._start or self._answer()
        return self._start

    def _answer(self):
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError("a contender ended")
        return json.loads(line)

    def run(self, steps):
        self.ready()
        self.child.stdin.write(f"{steps}\n")
        self.child.stdin.flush()
        self.answer = self._answer()
        return self.answer["seconds"]

    def close(self):
        self.child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(20)
        self.child.kill()


def race(first, second, rounds):
    """Seconds per step of both contenders, a pair for each round."""
    laps, steps = [], [None, None]
    for number in range(rounds + 1):
        with contextlib.ExitStack() as stack:
            runners = [stack.enter_context(contextlib.closing(
                Contender(spec))) for spec in (first, second)]
            for runner in runners:      # which start at the same time
                runner.ready()
            # The second goes first in every other round.
            lap = [None, None]
            for i in (0, 1) if number % 2 else (1, 0):
                warm = runners[i].run(2) / 2
                steps[i] = steps[i] or max(1, round(ROUND / warm))
                lap[i] = runners[i].run(steps[i]) / steps[i]
            laps.append(lap)
    return laps[1:]


def ratio_row(name, laps, target, stretch, commands, inverse=False):
    ratios = sorted(b / a for a, b in laps)
    return {"row": name, "ratio": statistics.median(ratios),
            "low": ratios[0], "high": ratios[-1], "target": target,
            "stretch": stretch, "at_most": inverse,
            "seconds": [statistics.median(x) for x in zip(*laps)],
            "rounds": len(laps), "commands": commands}


def command(spec):
    return f"python -m benchmarks.contenders '{json.dumps(spec)}'"


def race_row(name, first, second, target, stretch, rounds):
    return ratio_row(name, race(first, second, rounds), target, stretch,
                     [command(first), command(second)])


def race_rows(selected, rounds):
    for name, first, second, target, stretch in _races():
        if selected(name):
            yield name, partial(race_row, name, first, second, target, stretch,
                                rounds)


def first_rows(selected, rounds):
    """Seconds of the first step, in fresh processes."""
    for backend, other in (("torch", {"loop": "torch"}),
                          ("mxnet", {"loop": "gluon", "threads": 1})):
        name = f"LeNet, {backend}: first step against the plain loop's"
        specs = (ours(backend, 1, **LENET), {**other, "devices": 1, **LENET})

        def measure(name=name, specs=specs):
            laps = []
            for _ in range(rounds):
                lap = []
                for spec in specs:
                    runner = Contender(spec)
                    lap.append(runner.ready()["first"])
                    runner.close()
                laps.append(lap)
            return ratio_row(name, laps, 1 / 1.1, None,
                             [command(s) for s in specs])
        if selected(name):
            yield name, measure


_WHAT = {"buffer": "one 45 MB buffer", "list": "76 gradients"}
_OTHER = {"copy": "the bound", "book": "the book's loop",
          "gloo": "gloo, 2 processes"}


def collective_rows(selected, rounds):
    """Against the bound (a copy of K buffers), the book's loop, gloo."""
    for backend in ("torch", "mxnet"):
        for k in (2, 4, 8):
            name = f"all-reduce, {backend}, {k} devices"
            targets = {"copy": 0.9, "book": {2: 1.0, 8: 1.3}.get(k),
                    "gloo": 3.0}

            def measure(name=name, backend=backend, k=k, targets=targets):
                spec = json.dumps({"backend": backend, "k": k,
                                   "rounds": rounds})
                line = subprocess.run(
                    [sys.executable, "-m", "benchmarks.collectives", spec],
                    cwd=ROOT, text=True, check=True, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL).stdout
                return [ratio_row(
                    f"{name}, {_WHAT[what]}, against {_OTHER[other]}",
                    list(zip(times["mgpu"], times[other])), targets[other],
                    None, [f"python -m benchmarks.collectives '{spec}'"])
                    for what, times in json.loads(line).items()
                    for other in times if other != "mgpu"]
            if selected(name):
                yield name, measure


def tiny_rows(selected, rounds):
    """Time per step and device on one core, of all that is computed there: it
    is meant to be small, and the same for any K. And the share of it that the
    thread of the loop computed: on torch the devices' threads do the rest, on
    MXNet it is what queues their work."""
    for backend in ("torch", "mxnet"):
        name = f"tiny network, {backend}: time per step and device, K to 64"

        def measure(name=name, backend=backend):
            counts = (2, 4, 8, 16, 32, 64)
            allowed = os.sched_getaffinity(0)
            runners = []
            laps = {k: [] for k in counts}      # (all, the host's share)
            os.sched_setaffinity(0, {min(allowed)})     # children inherit it
            try:
                specs = [ours(backend, k, model="tiny", batch=2 * k)
                         for k in counts]
                runners = [Contender(spec) for spec in specs]
                for _ in range(rounds + 1):
                    for k, runner in zip(counts, runners):
                        steps = max(2, 512 // k)
                        runner.run(steps)
                        laps[k].append([runner.answer[x] * 1e6 / steps / k
                                        for x in ("seconds", "host")])
            finally:
                os.sched_setaffinity(0, allowed)
                for runner in runners:
                    runner.close()
            common = {"stretch": None, "at_most": True, "rounds": rounds,
                      "commands": [f"taskset -c {min(allowed)} {command(s)}"
                                   for s in specs]}
            totals, hosts = ({k: [lap[i] for lap in x[1:]]
                              for k, x in laps.items()} for i in (0, 1))

            def worst(what, found, target):
                by_k = {k: statistics.median(x) for k, x in found.items()}
                most = found[max(by_k, key=by_k.get)]
                return {"row": f"{name}: {what}", "target": target,
                        "by_k": by_k, "ratio": max(by_k.values()),
                        "low": min(most), "high": max(most), **common}
            first = worst("microseconds, the worst K", totals, 150)
            spread = sorted(max(lap) / min(lap)
                            for lap in zip(*totals.values()))
            return [{"row": name + ": largest over smallest", "target": 1.2,
                     "ratio": first["ratio"] / min(first["by_k"].values()),
                     "low": spread[0], "high": spread[-1], **common},
                    first, worst("microseconds of the loop's own thread, "
                                 "the worst K", hosts, None)]
        if selected(name):
            yield name, measure


def memory_rows(selected, rounds):
    """Counted bytes over the bound, between the calls of a step; the same in
    every round."""
    for backend in ("torch", "mxnet"):
        name = f"memory, {backend}, 268 MB of parameters, native arrays"

        def measure(name=name, backend=backend):
            spec = json.dumps(dict(backend=backend, units=[4096, 8192, 4096]))
            found = json.loads(subprocess.run(
                [sys.executable, "-m", "benchmarks.memory", spec], cwd=ROOT,
                text=True, check=True, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL).stdout)
            rows = []
            for k in (2, 4):
                ratio = found[str(k)]["bytes"] / found[str(k)]["bound"]
                rows.append({
                    "row": f"{name}: {k} devices, bytes over the bound",
                    "ratio": ratio, "low": ratio, "high": ratio, "target": 1.1,
                    "stretch": None, "at_most": True, "rounds": 1,
                    "bytes": found[str(k)]["bytes"],
                    "commands": [f"python -m benchmarks.memory '{spec}'"]})
            return rows
        if selected(name):
            yield name, measure


def process_rows(selected, rounds):
    """Two processes, one device and one thread each, against what people
    use."""
    for model, batch in (("LeNet", LENET), ("ResNet-18", RESNET)):
        name = f"2 processes, {model}, torch: a step against DDP"
        if selected(name):
            yield name, partial(_against_ddp, name, batch, rounds)
        name = f"2 processes, {model}, mxnet: gradients over gloo"
        if selected(name):
            yield name, partial(_of_gradients, name, batch, rounds)


def _of_processes(spec):
    return json.loads(subprocess.run(
        [sys.executable, "-m", "benchmarks.processes", json.dumps(spec)],
        cwd=ROOT, text=True, check=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL).stdout), \
        f"python -m benchmarks.processes '{json.dumps(spec)}'"


def _against_ddp(name, batch, rounds):
    """A job of each in every round, in turn: one of DDP has not the settings
    that mgpu makes, and processes differ by chance. For comparison, both in
    the same processes too."""
    laps = []
    specs = {who: {"what": "steps", "who": who, "rounds": 1, **batch}
             for who in ("mgpu", "ddp")}
    for number in range(rounds):
        found, commands = {}, []
        for who in list(specs)[::1 if number % 2 else -1]:
            of_one, line = _of_processes(specs[who])
            found[who] = of_one[who][0]
            commands.append(line)
        laps.append([found["mgpu"], found["ddp"]])
    rows = [ratio_row(name, laps, 0.97, 1.0, sorted(commands))]
    found, line = _of_processes({"what": "steps", "rounds": rounds, **batch})
    rows.append(ratio_row(
        f"{name}, in the same processes",
        list(zip(found["mgpu"], found["ddp"])), None, None, [line]))
    return rows


def _of_gradients(name, batch, rounds):
    """In one job: all take turns in it."""
    found, line = _of_processes({"what": "gradients", "rounds": rounds,
                                 **batch})
    return [ratio_row(f"{name} against {what}",
                      list(zip(found["mgpu"], found[other])), target, stretch,
                      [line])
            for other, what, target, stretch in (
                ("kvstore", "KVStore dist_sync", 3.0, 5.0),
                ("gloo", "gloo itself, the bound", None, None))]


_IMPORT = ("import time, sys; b = time.perf_counter(); import {}; "
           "print(time.perf_counter() - b, 'torch' in sys.modules "
           "or 'mxnet' in sys.modules)")


def import_rows(selected, rounds):
    name = "import mgpu, seconds"

    def measure():
        found = {"mgpu": [], "numpy": []}
        for _ in range(rounds):
            for module, times in found.items():
                seconds, framework = subprocess.run(
                    [sys.executable, "-c", _IMPORT.format(module)], cwd=ROOT,
                    text=True, check=True,
                    stdout=subprocess.PIPE).stdout.split()
                assert framework == "False", "a framework was imported"
                times.append(float(seconds))
        times = sorted(found["mgpu"])
        return {"row": name, "ratio": statistics.median(times),
                "low": times[0], "high": times[-1], "target": 0.2,
                "stretch": None, "at_most": True, "rounds": rounds,
                "numpy": statistics.median(found["numpy"]),
                "commands": [f'python -c "{_IMPORT.format("mgpu")}"']}
    if selected(name):
        yield name, measure


SECTIONS = (race_rows, first_rows, collective_rows, process_rows, tiny_rows,
            memory_rows, import_rows)


def verdict(row):
    if row["target"] is None:
        return ""
    met = row["ratio"] <= row["target"] if row["at_most"] \
        else row["ratio"] >= row["target"]
    if not met:
        return "not met"
    return "stretch" if row["stretch"] and row["ratio"] >= row["stretch"] \
        else "met"


def draw(rows, file):
    """A line for each row: median and spread, as a multiple of its target."""
    from mgpu.tools.plotting import style
    rows = [r for r in rows if r["target"]]
    figure = style.new_figure((11, 0.26 * len(rows) + 1.2),
                              layout="constrained")
    axes = style.plain_axes(figure.subplots())
    for y, row in enumerate(rows):
        # above 1 is better, whichever way the target points
        points = [row[x] / row["target"] for x in ("low", "ratio", "high")]
        if row["at_most"]:
            points = sorted(1 / p for p in points)
        colour = style.BLUE if points[1] >= 1 else style.ORANGE
        axes.plot([points[0], points[2]], [y, y], color=colour, linewidth=2)
        axes.plot([points[1]], [y], "o", color=colour)
    axes.axvline(1, color=style.INK, linewidth=1)
    axes.set_yticks(range(len(rows)), [r["row"] for r in rows], fontsize=8)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    axes.minorticks_off()
    axes.set_ylim(len(rows) - 0.3, -0.7)
    axes.set_xlabel("measured over target: median and all rounds (right of "
                    "the line: target met)")
    style.write_figure(figure, Path(file))


def main():
    import click
    from rich.console import Console
    from rich.table import Table

    @click.command(help=__doc__)
    @click.option("--rows", "names", multiple=True, help="Measure the rows "
                  "with these words in their names only. May be given "
                  "several times.")
    @click.option("--rounds", type=click.IntRange(1), default=7,
                  show_default=True, help="How many rounds to count.")
    @click.option("--json", "json_file", default="out/benchmarks.json",
                  show_default=True, help="Write all rows to this file.")
    @click.option("--plot", default="out/benchmarks.png", show_default=True,
                  help="Draw all rows into this PNG or SVG file.")
    @click.option("--list", "listing", is_flag=True,
                  help="Print the names of the rows and measure nothing.")
    def run(names, rounds, json_file, plot, listing):
        from mgpu.tools import doctor
        from mgpu.utils import files
        from mgpu.backends import NAMES
        console = Console()

        def choose(name):
            return not names or any(n.lower() in name.lower() for n in names)
        jobs = [job for section in SECTIONS for job in section(choose, rounds)]
        if listing:
            return [console.print(name) for name, _ in jobs]
        for file in (json_file, plot):
            Path(file).resolve().parent.mkdir(parents=True, exist_ok=True)
        done = []
        for name, measure in jobs:
            begin = time.perf_counter()
            try:
                found = measure()
            except (RuntimeError, subprocess.CalledProcessError) as error:
                console.print(f"{name}: failed ({error})", style="red")
                continue
            for row in found if isinstance(found, list) else [found]:
                row["result"] = verdict(row)
                done.append(row)
                console.print(
                    f"{row['row']}: {row['ratio']:.3g} ({row['low']:.3g} to "
                    f"{row['high']:.3g}), target {row['target']} "
                    f"{row['result']} [{time.perf_counter() - begin:.0f} s]",
                    *(f"    {one}" for one in row["commands"]), sep="\n",
                    highlight=False, markup=False, soft_wrap=True)
            files.write_json(json_file, {
                "machine": {"processor": platform.processor(),
                            "cores": os.cpu_count(),
                            "load": os.getloadavg()},
                "versions": {**doctor.versions(), **{
                    name: installed(name) for name in NAMES}},
                "rows": done})
        table = Table(title="a ratio is the median of the rounds")
        for column in ("row", "measured", "spread", "target", "stretch", ""):
            table.add_column(column)
        for row in done:
            table.add_row(
                row["row"], f"{row['ratio']:.3g}",
                f"{row['low']:.3g} to {row['high']:.3g}",
                "" if row["target"] is None else
                f"{'at most ' if row['at_most'] else ''}{row['target']:.3g}",
                f"{row['stretch'] or ''}", row["result"])
        console.print(table)
        if done:
            draw(done, plot)
    run()


if __name__ == "__main__":
    main()
