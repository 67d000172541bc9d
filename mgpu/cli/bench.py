"""`mgpu bench`: the speed of this machine."""
import sys
from typing import Any

import click
from click import option

from mgpu.cli import options as shared
from mgpu.cli.errors import Command
from mgpu.cli.find import find
from mgpu.cli.options import Parsed
from mgpu.cli.tables import print_table, print_text
from mgpu.tools import bench as benchmark


@click.command(cls=Command)
@option("--model", default="lenet", metavar="lenet|resnet18|MODULE:FACTORY",
        help="The network. FACTORY is a function without arguments that "
        "makes a network of the backend in use.")
@option("--devices", default="1,2", metavar="1,2|cpu:0,cpu:1",
        type=Parsed(shared.parse_runs),
        help="Numbers of devices to compare, or the devices of one run.")
@option("--steps", type=int, default=5, help="The number of steps in a turn.")
@option("--rounds", type=int, default=7, help="The number of turns that each "
        "one has, 2 or more; the first is not counted.")
@shared.declare("--backend", "--batch-size", "--dtype", "--input",
                "--classes", "--seed", batch_size=256, input="1x28x28",
                classes=10)
@option("--predict", "predict_for", metavar="K,K", default=(),
        type=Parsed(shared.parse_counts), help="Predict the speed on these "
        "numbers of devices too, from what was measured on one.")
@shared.outputs("json", "figure", "timeline")
def bench(model: str, devices: list[Any], backend: str | None,
          outputs: shared.Outputs, input: tuple[int, ...],
          **options: Any) -> None:
    """Measure the speed of training here.

    Trains a network on random data. Reports examples per second, the time of
    each stage of a step, and with --predict the speed on other numbers of
    devices. Backends and numbers of devices take turns.
    See docs/guide/profiling.md.
    """
    if outputs.figure is not None:
        benchmark.check_plot(outputs.figure)
    report = benchmark.run(
        model if model in benchmark.MODELS else find(model), devices,
        name=model,
        backends=shared.engines(backend), shape=input,
        timeline=outputs.timeline, progress=sys.stderr.isatty(), **options)
    outputs.show(report, lambda: _print_report(report))
    if outputs.figure is not None:
        benchmark.plot(report, outputs.figure)
    outputs.say_written()


def _print_report(report: dict[str, Any]) -> None:
    print_text(
        f"{report['model']}, batch {report['batch_size']}, "
        f"{report['dtype']}, {report['cpu_cores']} cores; median of "
        f"{report['rounds'] - 1} x {report['steps']} steps, and the slowest "
        "and the fastest")
    rows = report["contenders"]
    guesses = [(name, guess) for name, found in report["predictions"].items()
               for guess in found]
    print_table(
        ("backend", "devices", "images/s", "times the first",
         "predicted, error"), [*map(_speed, rows), *(
             (name, str(guess["devices"]), "-", "-",
              f"{guess['images_per_second']:.0f} {'':5}")
             for name, guess in guesses)], left=2)
    for row in rows:
        print_text(f"{row['backend']} on [{', '.join(row['devices'])}], "
                   f"ms per step and share (profiled, which makes a step "
                   f"{row['profiling_cost']:.2f} times as long)")
        stages = [key[:-3] for key in row["table"][0]
                  if key.endswith("_ms") and key != "step_ms"]
        print_table(("", *stages), [
            (line["device"], *(
                f"{line[s + '_ms']:.1f} {line[s + '_share']:.0%}"
                if line[s + "_share"] >= 0.005 else "-" for s in stages))
            for line in row["table"]], tight=True)
        print_text(row["verdict"])
    guesses += [(row["backend"], row["predicted"]) for row in rows
                if row["predicted"]]
    for note in sorted({guess["note"] for _, guess in guesses} - {""}):
        print_text(f"predicted: {note}.")


def _speed(row: dict[str, Any]) -> tuple[str, ...]:
    rate, ratio = row["images_per_second"], row["ratio"]
    guess = "-"
    if row["predicted"] is not None:
        # the error of the throughput, from that of the seconds
        guess = (f"{row['predicted']['images_per_second']:.0f} "
                 f"{1 / (1 + row['error']) - 1:+5.0%}")
    return (row["backend"], str(len(row["devices"])),
            f"{rate['median']:.0f} ({rate['min']:.0f}-{rate['max']:.0f})",
            f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})",
            guess)
