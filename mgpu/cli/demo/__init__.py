"""`mgpu demo`."""
from itertools import combinations
from pathlib import Path

import click
import numpy as np

import mgpu
from mgpu import backends
from mgpu.cli import reproduce
from mgpu.cli.demo import programs
from mgpu.cli.errors import Command
from mgpu.tools import chapters, doctor
from mgpu.utils import files

#: of a float64 loss, between backends and between numbers of devices
_LARGEST = 1e-10


@click.command(cls=Command)
@click.option("--full", is_flag=True, help="Train ResNet-18 too, some "
              "minutes.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR",
              default="out", help="The folder for the results.")
@click.pass_context
def demo(ctx: click.Context, full: bool, output: Path) -> None:
    """Show in half a minute what mgpu does.

    LeNet on both backends, on one device and on two, with the same numbers; a
    plain PyTorch script on two devices with one changed line; and a bug in a
    port from Gluon to PyTorch, found by its place and cause. With one backend
    only the parts that run with it. Exit status 1 if the numbers differ.
    """
    output.mkdir(parents=True, exist_ok=True)
    names = backends.available_backends()
    wrong = lenet(names, output)
    if "torch" in names:
        wrong += one_changed_line(output)
    if len(names) > 1:
        wrong += bug_in_a_port()
    else:
        click.echo("\nThe comparison of a port needs both backends: "
                   "pip install 'mgpu-gluon[all]'.")
    if full:
        wrong += resnet(names, output)
    for line in wrong:
        click.echo(f"wrong: {line}", err=True)
    ctx.exit(bool(wrong))


def lenet(names: list[str], output: Path, epochs: int = 4,
          limit: int | None = None) -> list[str]:
    """Part 1. Returns what is wrong."""
    click.secho("1. The same training on each backend, on one device and on "
                "two", bold=True)
    # float64, in which the curves of the backends coincide; the book's
    # initial weights of 0.01 would stay on a plateau for 250 steps.
    runs = _trainings("lenet", names, output, epochs=epochs, limit=limit,
                      batch_size=64, lr=0.0625, init_scale=0.1)
    return [*_apart(runs, _LARGEST, same_devices=False), *(
        f"LeNet's accuracy on {run['backend']} is {run['test_acc'][-1]:.3f}; "
        "0.8 or more was expected" for run in runs
        if limit is None and not run["test_acc"][-1] >= 0.8)]


def one_changed_line(output: Path) -> list[str]:
    """Part 2. Returns what is wrong."""
    click.secho("\n2. A plain PyTorch script on two devices: one changed line",
                bold=True)
    plain, changed = programs.write_scripts(output)
    click.echo("\n".join(programs.changed_lines(plain, changed)))
    a, b = map(programs.losses_of, (plain, changed))
    apart = float(np.abs(a - b).max())
    click.echo(f"{len(a)} steps, the last loss {a[-1]:.6f} and {b[-1]:.6f}; "
               f"largest difference of a loss {apart:.1e}\n"
               f"scripts: {plain}, {changed}")
    return [] if apart <= _LARGEST else [
        f"the losses of {plain} and {changed} differ by {apart:.1e}"]


def bug_in_a_port() -> list[str]:
    """Part 3. Returns what is wrong."""
    click.secho("\n3. A port from Gluon to PyTorch with a bug: where and why",
                bold=True)
    result = programs.compared_port()
    click.echo("\n".join(str(result).splitlines()[:3]))
    return [] if "momentum" in str(result.likely()) else [
        "the comparison has not found the bug of the port"]


def resnet(names: list[str], output: Path) -> list[str]:
    """ResNet-18, trained for some minutes. Returns what is wrong."""
    click.secho("\n4. ResNet-18", bold=True)
    runs = _trainings("resnet18", names, output, epochs=6, limit=192,
                      batch_size=16, lr=0.03125, init_scale=0.05)
    click.echo("One device and two differ: batch norm normalizes by the "
               "examples of its device (batch_norm='sync' by the batch). The "
               "backends are compared in the first ten steps: rounding grows "
               "with each step.")
    return [*_apart(runs, 1e-6, same_devices=True, steps=10), *(
        f"ResNet-18's accuracy on {run['backend']} is "
        f"{run['test_acc'][-1]:.3f}; 0.5 or more was expected"
        for run in runs if not run["test_acc"][-1] >= 0.5)]


def _trainings(chapter: str, names: list[str], output: Path, *,
               epochs: int, limit: int | None, batch_size: int, lr: float,
               init_scale: float) -> list[chapters.Run]:
    """Train on each backend, on one device and on two, print and draw."""
    runs = []
    for name in names:
        for count in (1, 2):
            with mgpu.using_backend(name):
                runs.append(reproduce.training(
                    chapter, mgpu.list_devices(count), data="digits", seed=0,
                    dtype="float64", epochs=epochs, limit=limit, lr=lr,
                    batch_size=batch_size, init_scale=init_scale))
    table, figure = (output / f"demo-{chapter}.{end}"
                     for end in ("json", "png"))
    files.write_json(str(table), {"chapter": chapter, "runs": runs,
                                  "versions": doctor.versions(names)})
    reproduce.show_trainings(runs)
    reproduce.draw_trainings(chapter, runs, str(figure))
    click.echo(f"figure: {figure}; numbers: {table}")
    return runs


def _apart(runs: list[chapters.Run], largest: float, same_devices: bool,
           steps: int | None = None) -> list[str]:
    """Pairs of runs whose losses differ by more than `largest` in the first
    `steps`."""
    found = []
    for a, b in combinations(runs, 2):
        if same_devices and a["devices"] != b["devices"]:
            continue
        gap = np.abs(np.subtract(a["loss_per_step"][:steps],
                                 b["loss_per_step"][:steps])).max()
        if not gap <= largest:
            found.append(f"losses differ by {gap:.1e}: {a['backend']} on "
                         f"{a['devices']}, {b['backend']} on {b['devices']}")
    return found
