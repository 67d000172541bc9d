"""The command line: `mgpu reproduce`, `bench` and `doctor`. The commands of
parity are in `mgpu.parity.commands`.

Needs the extra ``cli``; `mgpu.__main__` says so where it is missing.
"""
import functools
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import mgpu
from mgpu import backends, chapters, datasets, doctor, files, plotting
from mgpu.device import Device, as_devices, list_devices

_CHAPTERS: dict[str, Callable[..., chapters.Run]] = {
    "auto-parallelism": chapters.auto_parallelism,
    "lenet": chapters.lenet,
    "resnet18": chapters.resnet18}
_DEVICES = {"auto-parallelism": "2", "lenet": "1,2", "resnet18": "1,2"}
_OWN = {    # the options that only some chapters have
    "auto-parallelism": ("size", "repeat"),
    "lenet": ("epochs", "batch_size", "lr", "data", "limit", "init_scale")}
_OWN["resnet18"] = _OWN["lenet"]


# -- errors -------------------------------------------------------------------

class _Refused(click.ClickException):
    """One line on stderr, exit status 2."""

    exit_code = 2


def _one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Errors that tell a person what to change come without a traceback;
    all others are bugs and come with one."""
    @functools.wraps(command)
    def wrapped(**options: Any) -> None:
        try:
            command(**options)
        except (ValueError, ImportError, OSError, FloatingPointError) as error:
            raise _Refused(" ".join(str(error).split())) from error
    return wrapped


#: commands that are loaded when somebody asks for them
_ELSEWHERE = dict.fromkeys(("lint", "parity", "trace"), "mgpu.parity.commands")


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_ELSEWHERE})

    def get_command(self, ctx: click.Context, name: str
                    ) -> click.Command | None:
        if name in _ELSEWHERE:
            return getattr(importlib.import_module(_ELSEWHERE[name]), name)
        return super().get_command(ctx, name)


@click.group(cls=_Group,
             context_settings={"help_option_names": ["-h", "--help"],
                               "max_content_width": 100})
@click.version_option(mgpu.__version__, prog_name="mgpu")
def cli() -> None:
    """One multi-device training API over MXNet/Gluon and PyTorch that gives
    the same numbers on both."""


# -- mgpu reproduce -----------------------------------------------------------

def parse_devices(text: str) -> list[int] | list[str]:
    """What ``--devices`` says.

    Parameters
    ----------
    text : str
        ``"1,2"``: device counts, a run for each; ``"cpu:0,cpu:1"``: devices
        of one run.

    Returns
    -------
    list of int, or list of str

    Raises
    ------
    ValueError
        Nothing, an empty entry, counts and devices together, a count twice
        or 0. Whether the devices exist is checked when a backend is known.
    """
    entries = [entry.strip() for entry in text.split(",")]
    numbers = [int(entry) for entry in entries if entry.isdecimal()]
    usage = (f"; received {text!r}. Use numbers of devices, for example 1,2 "
             "(a run for each), or the devices of one run, for example "
             "cpu:0,cpu:1.")
    if not all(entries):
        raise ValueError("--devices has an empty entry" + usage)
    if not numbers:
        return entries
    if len(numbers) < len(entries):
        raise ValueError("--devices takes numbers or devices, not both"
                         + usage)
    if 0 in numbers or len(set(numbers)) < len(numbers):
        raise ValueError("--devices takes each number once, from 1 on" + usage)
    return numbers


def _plan(engines: list[str], text: str) -> list[tuple[str, list[Device]]]:
    """A (backend, devices) for every run; all are checked before the first
    one starts."""
    wanted, plan = parse_devices(text), []
    for name in engines:
        with mgpu.using_backend(name):
            if isinstance(wanted[0], int):
                plan += [(name, list_devices(k)) for k in wanted]
            else:
                plan.append((name, as_devices(wanted)))
    return plan


@cli.command()
@click.argument("chapter", type=click.Choice(list(_CHAPTERS)))
@click.option("--backend", type=click.Choice(
    [*backends.NAMES, *backends.ALIASES, "both"]),
    help="Default: $MGPU_BACKEND, else mxnet.")
@click.option("--devices", metavar="1,2|cpu:0,cpu:1",
              help="Numbers of devices, a run for each, or the devices of "
              "one run. Default: 1,2 (auto-parallelism: 2).")
@click.option("--epochs", type=int, help="Default: 10.")
@click.option("--batch-size", type=int, help="Default: 256.")
@click.option("--lr", type=float, help="Learning rate. Default: 0.2 for "
              "lenet, 0.1 for resnet18.")
@click.option("--data", metavar="digits|fashion-mnist|synthetic|PATH",
              help="Default: digits, which needs no download. PATH: a "
              "folder with IDX files.")
@click.option("--limit", type=int, metavar="N",
              help="Only the first N examples, of training and of test.")
@click.option("--seed", type=int, default=0, show_default=True,
              help="Of the initial weights and of the order of the data.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]),
              default="float32", show_default=True)
@click.option("--init-scale", type=float,
              help="Standard deviation of the initial weights. Default: "
              "0.01, the text's.")
@click.option("--size", type=int, help="auto-parallelism: rows of the "
              "matrix. Default: 1024 on CPUs, 4000 on GPUs.")
@click.option("--repeat", type=int, help="auto-parallelism: number of "
              "products. Default: 20 on CPUs, 50 on GPUs.")
@click.option("--json", "json_file", metavar="FILE", type=click.Path(
    dir_okay=False), help="Write settings and results, after every run.")
@click.option("--plot", metavar="FILE", type=click.Path(dir_okay=False),
              help="Draw the results, .png or .svg.")
@_one_line_errors
def reproduce(chapter: str, backend: str | None, devices: str | None,
              json_file: str | None, plot: str | None,
              **options: Any) -> None:
    """Run a chapter of the text, on one engine or on both.

    Every training ends with the text's line; then a table, and with both
    engines the largest difference between them, are printed.
    """
    options = {k: v for k, v in options.items() if v is not None}
    wrong = [k for k in options if k not in ("seed", "dtype", *_OWN[chapter])]
    if wrong:
        raise ValueError(f"--{wrong[0].replace('_', '-')} is no option of "
                         f"{chapter}; leave it out.")
    engines = list(backends.NAMES) if backend == "both" else \
        [_name_of(backend)]
    plan = _plan(engines, _DEVICES[chapter] if devices is None else devices)
    # Refused now, and not after an hour's training.
    if json_file is not None:
        files.check_folder(json_file, "--json")
    if plot is not None:
        plotting.Animator(file=plot)
    runs: list[chapters.Run] = []
    for name, places in plan:
        with mgpu.using_backend(name):
            run = _timings if chapter == "auto-parallelism" else _training
            runs.append(run(chapter, places, **options))
        if json_file is not None:
            files.write_json(json_file, {
                "chapter": chapter, "versions": doctor.versions(
                    _backend(n) for n in dict.fromkeys(
                        r["backend"] for r in runs)),
                "runs": runs})
    if chapter == "auto-parallelism":
        if len(runs) > 1:
            _print_timings(runs)
        if plot is not None:
            plotting.plot_timings(
                [row for r in runs for row in r["timings"]], plot,
                title=f"{runs[0]['repeat']} products of {runs[0]['size']} x "
                f"{runs[0]['size']}, {runs[0]['dtype']}")
    else:
        _print_runs(runs)
        if plot is not None:
            first = runs[0]
            plotting.plot_runs(
                runs, plot, title=f"{chapter} on {first['data']['name']}, "
                f"batch {first['batch_size']}, rate {first['lr']:g}, "
                f"{first['dtype']}")
    for file in (json_file, plot):
        if file is not None:
            click.echo(f"written: {file}")


def _name_of(backend: str | None) -> str:
    if backend is None:
        return mgpu.get_backend().name
    return _backend(backend).name


def _backend(name: str) -> Any:
    with mgpu.using_backend(name) as engine:
        return engine


def _timings(chapter: str, devices: list[Device], **options: Any
             ) -> chapters.Run:
    return chapters.auto_parallelism(devices, **options)


def _training(chapter: str, devices: list[Device], *, batch_size: int = 256,
              data: str = "digits", limit: int | None = None,
              **options: Any) -> chapters.Run:
    # Loaded for each run: all begin with the same order of batches.
    load = functools.partial(
        datasets.load, data, batch_size, limit, options["seed"],
        dtype=options["dtype"])
    train_iter, test_iter = load()
    if train_iter.info["shape"][-2:] != [28, 28]:   # a folder of others
        train_iter, test_iter = load(resize=28)
    info = train_iter.info
    click.echo(f"{chapter} on {mgpu.get_backend().name}, {info['name']}: "
               f"{info['train']} + {info['test']} examples, batch "
               f"{batch_size}, {options['dtype']}, seed {options['seed']}")
    run = _CHAPTERS[chapter](
        devices, train_iter=train_iter, test_iter=test_iter,
        progress=sys.stderr.isatty(), **options)
    click.echo(chapters.summary(run))
    return run


# -- tables -------------------------------------------------------------------

def _rate(run: chapters.Run) -> float:
    """All images over all seconds: epochs hold equally many images."""
    rates = run["images_per_second"]
    return len(rates) / sum(1 / rate for rate in rates)


def _print_runs(runs: list[chapters.Run]) -> None:
    single = {run["backend"]: _rate(run) for run in runs
              if len(run["devices"]) == 1}
    table = Table()
    for title in ("backend", "devices", "train loss", "test acc", "s/epoch",
                  "images/s", "speed-up"):
        table.add_column(title, justify="left" if title == "backend"
                         else "right")
    for run in runs:
        name, rate = run["backend"], _rate(run)
        table.add_row(
            name, str(len(run["devices"])), f"{run['train_loss'][-1]:.3f}",
            f"{run['test_acc'][-1]:.3f}", f"{np.mean(run['seconds']):.2f}",
            f"{rate:.0f}",
            f"{rate / single[name]:.2f}x" if name in single else "-")
    Console().print(table)
    for line in differences(runs):
        click.echo(line)


def differences(runs: list[chapters.Run]) -> list[str]:
    """A line for every two runs on the same devices and different engines:
    how far apart their losses and accuracies are."""
    lines = []
    for i, a in enumerate(runs):
        for b in runs[i + 1:]:
            if a["devices"] != b["devices"] or a["backend"] == b["backend"]:
                continue
            gap = np.abs(np.subtract(a["loss_per_step"], b["loss_per_step"]))
            acc = np.abs(np.subtract(a["test_acc"], b["test_acc"]))
            lines.append(
                f"{a['backend']} against {b['backend']} on "
                f"[{', '.join(a['devices'])}]: largest difference of the "
                f"loss {gap.max():.1e} (step {gap.argmax() + 1} of "
                f"{len(gap)}), of the test accuracy {acc.max():.4f}")
    if lines and runs[0]["dtype"] == "float32":
        lines.append("Training amplifies rounding: float32 runs part after "
                     "some steps, --dtype float64 far later.")
    return lines


def _print_timings(runs: list[chapters.Run]) -> None:
    table = Table("seconds")
    for run in runs:
        table.add_column(run["backend"], justify="right")
    for rows in zip(*(run["timings"] for run in runs)):
        table.add_row(rows[0]["name"],
                      *(f"{row['seconds']:.4f}" for row in rows))
    Console().print(table)


# -- mgpu bench ---------------------------------------------------------------

@cli.command("bench")
@click.option("--model", default="lenet", show_default=True,
              metavar="lenet|resnet18|MODULE:FACTORY",
              help="FACTORY: a function without arguments that makes a "
              "network of the engine in use.")
@click.option("--devices", default="1,2", show_default=True,
              metavar="1,2|cpu:0,cpu:1",
              help="Numbers of devices, a contender each, or the devices of "
              "one contender.")
@click.option("--batch-size", type=int, default=256, show_default=True,
              help="Rows of a step, over all devices.")
@click.option("--steps", type=int, default=5, show_default=True,
              help="Of a contender in a round.")
@click.option("--rounds", type=int, default=7, show_default=True,
              help="2 or more; the first is not counted.")
@click.option("--backend", type=click.Choice(
    [*backends.NAMES, *backends.ALIASES, "both"]),
    help="Default: $MGPU_BACKEND, else mxnet.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]),
              default="float32", show_default=True)
@click.option("--input", "shape", metavar="SHAPE", default="1x28x28",
              show_default=True, help="Of one example.")
@click.option("--classes", type=int, default=10, show_default=True)
@click.option("--predict", "predict_for", metavar="K,K",
              help="Predict so many devices too, from one.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "json_file", metavar="FILE", type=click.Path(
    dir_okay=False), help="Write settings and results.")
@click.option("--plot", metavar="FILE", type=click.Path(dir_okay=False),
              help="Draw the results, .png or .svg.")
@click.option("--trace", metavar="FILE", type=click.Path(dir_okay=False),
              help="Write the spans, for chrome://tracing or "
              "ui.perfetto.dev.")
@_one_line_errors
def bench_command(model: str, devices: str, backend: str | None,
                  shape: str, predict_for: str | None,
                  json_file: str | None, plot: str | None,
                  trace: str | None, **options: Any) -> None:
    """Train on random data: how fast, where the time goes, and what more
    devices would give. See docs/guide/profiling.md.

    Numbers of devices and engines take turns, round by round.
    """
    from mgpu import bench
    from mgpu.parity import commands
    wanted = parse_devices(devices)
    for file, option in ((json_file, "--json"), (trace, "--trace")):
        if file is not None:
            files.check_folder(file, option)
    if plot is not None:
        bench.check_plot(plot)
    report = bench.run(
        model if model in bench.MODELS else commands.find(model),
        wanted if isinstance(wanted[0], int) else [wanted], name=model,
        backends=list(backends.NAMES) if backend == "both"
        else [_name_of(backend)], shape=commands.parse_shape(shape),
        predict_for=_counts(predict_for), trace=trace,
        progress=sys.stderr.isatty(), **options)
    _print_bench(report)
    if json_file is not None:
        files.write_json(json_file, report)
    if plot is not None:
        bench.plot(report, plot)
    for written in (json_file, plot, trace):
        if written is not None:
            click.echo(f"written: {written}")


def _counts(text: str | None) -> list[int]:
    entries = [] if text is None else [e.strip() for e in text.split(",")]
    if not all(e.isdecimal() and int(e) for e in entries):
        raise ValueError("--predict takes numbers of devices, from 1 on; "
                         f"received {text!r}. Write for example 4,8.")
    return [int(e) for e in entries]


def _cell(ms: float, share: float) -> str:
    return f"{ms:.1f} {share:.0%}" if share >= 0.005 else "-"


def _error(error: float) -> str:
    """Of the throughput, from that of the seconds."""
    return f"{1 / (1 + error) - 1:+5.0%}"


def _print_bench(report: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False)
    console.print(
        f"{report['model']}, batch {report['batch_size']}, "
        f"{report['dtype']}, {report['cpu_cores']} cores; median of "
        f"{report['rounds'] - 1} x {report['steps']} steps, and the slowest "
        "and the fastest")
    table = Table("backend", "devices")
    for title in ("images/s", "times the first", "predicted, error"):
        table.add_column(title, justify="right", no_wrap=True)
    rows = report["contenders"]
    for row in rows:
        rate, ratio = row["images_per_second"], row["ratio"]
        guess, error = row["predicted"], row["error"]
        table.add_row(
            row["backend"], str(len(row["devices"])),
            f"{rate['median']:.0f} ({rate['min']:.0f}-{rate['max']:.0f})",
            f"{ratio['median']:.2f} ({ratio['min']:.2f}-"
            f"{ratio['max']:.2f})", "-" if guess is None else
            f"{guess['images_per_second']:.0f} {_error(error)}")
    for name, guesses in report["predictions"].items():
        for guess in guesses:
            table.add_row(name, str(guess["devices"]), "-", "-",
                          f"{guess['images_per_second']:.0f} {'':5}")
    console.print(table)
    for row in rows:
        console.print(f"{row['backend']} on [{', '.join(row['devices'])}], "
                      f"ms per step and share (profiled, which makes a step "
                      f"{row['profiling_cost']:.2f} times as long)")
        stages = [key[:-3] for key in row["table"][0]
                  if key.endswith("_ms") and key != "step_ms"]
        breakdown = Table("")
        for name in stages:
            breakdown.add_column(name, justify="right", no_wrap=True)
        for line in row["table"]:
            breakdown.add_row(line["device"], *(
                _cell(line[s + "_ms"], line[s + "_share"])
                for s in stages))
        console.print(breakdown)
        console.print(row["verdict"])
    notes = {guess["note"] for guess in [
        *(row["predicted"] for row in rows if row["predicted"]),
        *(g for found in report["predictions"].values() for g in found)]}
    for note in sorted(notes - {""}):
        console.print(f"predicted: {note}.")


# -- mgpu doctor --------------------------------------------------------------

@cli.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor_command(as_json: bool) -> None:
    """Tell whether this machine is fit: versions, engines and why one is
    missing, devices, threads, risky settings.

    Exit status 1 if no engine loads or a setting is wrong."""
    report = doctor.diagnose()
    if as_json:
        click.echo(json.dumps(report, indent=1, allow_nan=False))
    else:
        _print_report(report)
    if not doctor.healthy(report):
        sys.exit(1)


def _print_report(report: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False)
    console.print(", ".join(f"{name} {version or 'not installed'}" for
                            name, version in report["versions"].items()))
    table = Table("backend", "state", "GPUs", "what to do")
    for row in report["backends"]:
        default = " (default)" if row["name"] == report["default"] else ""
        table.add_row(
            row["name"] + default, "loads" if row["loads"] else
            f"does not load: {row['problem']}",
            "-" if row["gpus"] is None else str(row["gpus"]),
            row["cure"] or "-")
    console.print(table)
    console.print(f"{report['cpu_cores']} CPU cores, "
                  f"{report['threads_per_device']} thread(s) per logical CPU "
                  "device (MGPU_THREADS_PER_DEVICE); logical CPU devices are "
                  "unlimited")
    for name, variable in report["variables"].items():
        console.print(f"{name}={variable['value']}: {variable['meaning']}")
    styles = {"info": "", "warning": "yellow", "error": "bold red"}
    for finding in report["findings"]:
        console.print(f"{finding['level']}: {finding['text']}",
                      style=styles[finding["level"]])
