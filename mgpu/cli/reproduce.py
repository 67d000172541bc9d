"""`mgpu reproduce`: the book's chapters."""
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from click import IntRange, option

import mgpu
from mgpu.backends.device import Device
from mgpu.cli import options as shared
from mgpu.cli.errors import Command
from mgpu.cli.options import Parsed
from mgpu.cli.tables import print_table
from mgpu.data import datasets
from mgpu.tools import bench, chapters, doctor, plotting
from mgpu.tools.plotting.charts import mean_rate
from mgpu.tools.plotting.style import check_figure
from mgpu.utils import files
from mgpu.utils.arguments import number

CHAPTERS: dict[str, Callable[..., chapters.Run]] = {
    "auto-parallelism": chapters.auto_parallelism,
    "lenet": chapters.lenet,
    "resnet18": chapters.resnet18}


@click.command(cls=Command)
@click.argument("chapter", type=click.Choice(list(CHAPTERS)))
@shared.declare("--backend", "--batch-size", "--limit", "--seed", "--dtype",
                batch_size=256)
@option("--devices", metavar="1,2|cpu:0,cpu:1",
        type=Parsed(shared.parse_runs), help="Numbers of devices, a run for "
        "each, or the devices of one run. Default: 1,2 (auto-parallelism: "
        "2).")
@option("--epochs", type=IntRange(1), default=10, help="The number of epochs.")
@option("--lr", type=float, help="The learning rate. Default: 0.2 for lenet, "
        "0.1 for resnet18.")
@option("--data", metavar="digits|fashion-mnist|synthetic|PATH",
        default="digits", help="The data set; PATH is a folder with IDX "
        "files. digits needs no download.")
@option("--init-scale", type=float, default=0.01, help="Standard deviation "
        "of the initial weights, 0.01 in the book.")
@option("--size", type=int, help="Rows of the matrix of auto-parallelism. "
        "Default: 1024 on CPUs, 4000 on GPUs.")
@option("--repeat", type=int, help="The number of products of "
        "auto-parallelism. Default: 20 on CPUs, 50 on GPUs.")
@shared.outputs("json", "figure")
@click.pass_context
def reproduce(ctx: click.Context, chapter: str, backend: str | None,
              devices: list[Any] | None, outputs: shared.Outputs,
              **options: Any) -> None:
    """Run a chapter of the book.

    The book is Dive into Deep Learning (d2l.ai); the chapters are "Automatic
    Parallelism", "Training on Multiple GPUs" (lenet) and "Concise
    Implementation for Multiple GPUs" (resnet18). Every training ends with the
    book's line. At the end a table is printed, and with both backends the
    largest difference between them.
    """
    times_only = chapter == "auto-parallelism"
    own = {"seed", "dtype", *(("size", "repeat") if times_only else (
        "epochs", "batch_size", "lr", "data", "limit", "init_scale"))}
    for name in sorted(shared.given(ctx) & set(options) - own):
        raise ValueError(f"--{name.replace('_', '-')} is not an option of "
                         f"{chapter}; leave it out.")
    options = {name: options[name] for name in own
               if options[name] is not None}
    # before the run is announced
    if not 0 < options.get("lr", 1) < math.inf:
        raise ValueError("lr must be a positive number; received "
                         f"{options['lr']}. Write for example 0.1.")
    number("init_scale", options.get("init_scale", 0), 0)
    plan = bench.plan(shared.engines(backend),
                      devices or ([2] if times_only else [1, 2]))
    if outputs.figure is not None:
        check_figure(outputs.figure)
    runs: list[chapters.Run] = []
    for name, places in plan:
        with mgpu.using_backend(name):
            run = CHAPTERS[chapter] if times_only else \
                functools.partial(training, chapter)
            runs.append(run(places, **options))
        found = {"chapter": chapter, "versions": doctor.versions(
            r["backend"] for r in runs), "runs": runs}
        if outputs.json is not None:    # a later run may fail
            files.write_json(outputs.json, found)
    show, draw = (_show_timings, _draw_timings) if times_only else (
        show_trainings, draw_trainings)
    outputs.show(found, lambda: show(runs))
    if outputs.figure is not None:
        draw(chapter, runs, outputs.figure)
    outputs.say_written()


def training(chapter: str, devices: list[Device], *, batch_size: int,
             data: str, limit: int | None = None, **options: Any
             ) -> chapters.Run:
    """Train as a chapter does, on the backend in use, and print its line."""
    # Loaded for each run: all begin with the same order of batches.
    load = functools.partial(
        datasets.load, data, batch_size, limit, options["seed"],
        dtype=options["dtype"])
    train_iter, test_iter = load()
    info = train_iter.info or {}
    if info["shape"][-2:] != [28, 28]:   # a folder of other images
        train_iter, test_iter = load(resize=28)
    click.echo(f"{chapter} on {mgpu.get_backend().name}, {info['name']}: "
               f"{info['train']} + {info['test']} examples, batch "
               f"{batch_size}, {options['dtype']}, seed {options['seed']}")
    run = CHAPTERS[chapter](
        devices, train_iter=train_iter, test_iter=test_iter,
        progress=sys.stderr.isatty(), **options)
    click.echo(chapters.summary(run))
    return run


# -- results ------------------------------------------------------------------

def show_trainings(runs: list[chapters.Run]) -> None:
    """Print a table, and how far the backends are apart."""
    rates = [mean_rate([run]) or 0.0 for run in runs]
    single = {run["backend"]: rate for run, rate in zip(runs, rates)
              if len(run["devices"]) == 1}
    print_table(
        ("backend", "devices", "train loss", "test acc", "s/epoch",
         "images/s", "speed-up"), [
            (run["backend"], str(len(run["devices"])),
             f"{run['train_loss'][-1]:.3f}", f"{run['test_acc'][-1]:.3f}",
             f"{np.mean(run['seconds']):.2f}", f"{rate:.0f}",
             f"{rate / single[run['backend']]:.2f}x"
             if run["backend"] in single else "-")
            for run, rate in zip(runs, rates)])
    for line in chapters.differences(runs):
        click.echo(line)


def draw_trainings(chapter: str, runs: list[chapters.Run], file: str
                   ) -> None:
    """Draw the curves of the runs."""
    first = runs[0]
    plotting.plot_runs(
        runs, file, title=f"{chapter} on {first['data']['name']}, batch "
        f"{first['batch_size']}, rate {first['lr']:g}, {first['dtype']}")


def _show_timings(runs: list[chapters.Run]) -> None:
    if len(runs) > 1:
        print_table(
            ("seconds", *(run["backend"] for run in runs)),
            [(rows[0]["name"], *(f"{row['seconds']:.4f}" for row in rows))
             for rows in zip(*(run["timings"] for run in runs))])


def _draw_timings(chapter: str, runs: list[chapters.Run], file: str) -> None:
    first = runs[0]
    plotting.plot_timings(
        [row for run in runs for row in run["timings"]], file,
        title=f"{first['repeat']} products of {first['size']} x "
        f"{first['size']}, {first['dtype']}")
