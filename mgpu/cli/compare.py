"""`mgpu compare`, `mgpu trace` and `mgpu lint`.

The exit status of a verdict: `mgpu.cli.errors.STATUS`. `mgpu lint` exits with
1 if it lists anything, else with 0. What could not be compared exits with 2,
and a line on standard error says what to do.
"""
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from click import Choice, IntRange, option
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from mgpu.cli import find, options as shared
from mgpu.cli.errors import Command, Group, exit_status
from mgpu.cli.options import Parsed
from mgpu.gluon_io.script import ScriptLine, lint_script
from mgpu.training.progress import ProgressBar
from mgpu.utils import files

if TYPE_CHECKING:
    from mgpu import parity as api
    from mgpu.parity import report
else:
    class _OnUse:
        """A module that is loaded when it is used: ``--help`` needs none."""

        def __init__(self, name):
            self._name = name

        def __getattr__(self, attribute):
            return getattr(importlib.import_module(self._name), attribute)

    api, report = _OnUse("mgpu.parity"), _OnUse("mgpu.parity.report")

@contextlib.contextmanager
def _ready() -> Iterator[Callable[[int, int], None]]:
    """Load the backends. Yields a function that shows progress on standard
    error, if that is a terminal."""
    with find.engines(), ProgressBar(sys.stderr.isatty(), "steps") as bar:
        yield bar.reach


# -- mgpu compare -------------------------------------------------------------

@click.command(cls=Command)
@click.argument("a", metavar="MODULE:FACTORY|TRACE")
@click.argument("b", metavar="MODULE:FACTORY", required=False)
@shared.kwargs("first ", "--kwargs-a")
@shared.kwargs("second ", "--kwargs-b")
@shared.declare(*shared.NETWORK)
@option("--devices", default="1", metavar="N|cpu:0,cpu:1",
        help="The number of devices, or their names.")
@shared.declare(*shared.TRAINING, dtype="float64")
@option("--invariance", is_flag=True, help="Compare one network with itself "
        "on several numbers of devices, which --devices names: 1,2,4,8.")
@option("--tolerance", type=float, help="The largest relative difference "
        "that counts as the same. Default: 1e-10 in float64, 1e-5 in "
        "float32.")
@shared.declare("--allow-mxnet-float32")
@option("--allow-formulas", is_flag=True, help="Exit with 0 too where "
        "nothing differs but formulas that the frameworks have in different "
        "forms (see --step-b).")
@option("--strict", is_flag=True, help="Options of layers that differ count "
        "as different, also where this data does not reach the difference.")
@option("--weights", type=Choice(["a", "b", "own"]), default="a",
        help="The network whose initial parameters both start from; with "
        "own, each starts from its own.")
@option("--map", metavar="FILE", type=Parsed(shared.read_map),
        help="A JSON file that says which parameter of a is which of b.")
@shared.declare("--semantics", "--optimizer", "--optimizer-params",
                "--devices", second=True)
@option("--step-a", metavar="MODULE:FUNCTION", help="Code of your own that "
        "takes the steps of a. FUNCTION(net) returns (step, parts): step(x, "
        "y) takes one step, and parts are its optimizers, schedules, loss "
        "scalers and averages of the weights.")
@option("--step-b", metavar="MODULE:FUNCTION",
        help="The same for b.")
@shared.outputs("json", "page")
@option("--details", is_flag=True, help="Also print the sides, the largest "
        "difference of each stage, all causes and all notes.")
@option("--plan", is_flag=True,
        help="Also print which parameter was matched with which.")
@click.pass_context
def compare(ctx: click.Context, a: str, b: str | None, *,
            outputs: shared.Outputs, details: bool, plan: bool,
            invariance: bool, **options: Any) -> None:
    """Compare how two networks train.

    Both networks get the same state before each step. Each is of MXNet/Gluon
    or of PyTorch. MODULE:FACTORY is a function that makes a network, in a
    module of the current folder or an installed one. FILE.py:FACTORY works
    too. TRACE is a file of `mgpu trace record` in place of the first network.

    Exit status: 0, they train the same; 1, they do not (also: the same but
    for MXNet's float32, or for named formulas); 2, they could not be
    compared, or the comparison is inconclusive.
    """
    if (b is None) is not invariance:
        raise ValueError(
            "two networks are compared, or with --invariance one; received "
            f"{a}{'' if b is None else ' and ' + b}. Write MODULE:FACTORY "
            f"{'once' if invariance else 'twice'}.")
    if outputs.page is not None:
        if invariance:
            raise ValueError("--invariance has no page; received --output "
                             f"{outputs.page!r}. Name a file *.json.")
        report.check_page(outputs.page)
    run = _invariance if invariance else _compare \
        if ":" in a and not os.path.isfile(a) else _compare_trace
    with _ready() as progress:
        found = run(a, b, shared.given(ctx), options, progress)
    outputs.show(report.json_data(found), lambda: click.echo(str(found))
                 if invariance else report.print_result(
                     found, Console(), details=details, plan=plan))
    if outputs.page is not None:
        report.write_html(found, outputs.page,
                          command=ctx.meta["mgpu.command"])
    outputs.say_written()
    ctx.exit(exit_status(
        found, allow_mxnet_float32=options["allow_mxnet_float32"],
        allow_formulas=options["allow_formulas"]))


_SETTINGS = ("optimizer", "optimizer_params", "semantics", "batch_norm",
             "native", "dtype", "dropout", "seed", "tolerance")


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """What every kind of comparison takes."""
    return {**{name: options[name] for name in _SETTINGS if name in options},
            "loss": find.find_loss(options["loss"])}


def _training(options: dict[str, Any]) -> dict[str, Any]:
    """What every training takes."""
    settings, steps = _settings(options), options["steps"]
    data = find.find_data(
        options["data"], options["input"], options["classes"],
        options["batch_size"], steps, settings["loss"], options["seed"],
        options["dtype"], options["limit"])
    return {**settings, "batches": data.batches, "steps": steps}


def _refuse(wrong: set[str], why: str) -> None:
    if wrong:
        names = ", ".join(f"--{name.replace('_', '-')}"
                          for name in sorted(wrong))
        raise ValueError(f"{why}; received {names}. Leave that out.")


def _compare(a: str, b: Any, given: set[str], options: dict[str, Any],
             progress: Any) -> Any:
    other = api.Side(find.factory(b, options["kwargs_b"]), **{
        name: options[f"b_{name}"] for name in (
            "semantics", "optimizer", "optimizer_params", "devices")})
    steps: dict[str, Any] = {
        name: find.factory(options[name], {})
        for name in ("step_a", "step_b") if options[name]}
    if len(steps) == 2:
        _refuse(given & {"optimizer", "optimizer_params", "semantics"},
                "steps of your own have optimizers of their own")
    return api.compare(
        find.factory(a, options["kwargs_a"]), other,
        devices=shared.one_run(options["devices"]), progress=progress,
        weights=options["weights"], strict=options["strict"], **steps,
        **options["map"] or {}, **_training(options))


def _compare_trace(file: str, b: Any, given: set[str],
                   options: dict[str, Any], progress: Any) -> Any:
    if not os.path.isfile(file):
        raise FileNotFoundError(
            f"there is no file {file!r}. Name a file that `mgpu trace record`"
            " has written, or a network, as MODULE:FACTORY or "
            "FILE.py:FACTORY.")
    ours = {"loss", "optimizer", "optimizer_params", "semantics", "devices",
            "batch_norm", "native", "tolerance", "strict"}
    _refuse(given & set(options) - ours - {"kwargs_b", "map",
                                           "allow_mxnet_float32",
                                           "allow_formulas"},
            "a trace says itself what was done")
    settings = {**_settings(options), "strict": options["strict"],
                "devices": shared.one_run(options["devices"])}
    return api.compare_trace(
        file, find.factory(b, options["kwargs_b"]), progress=progress,
        **options["map"] or {},
        **{name: settings[name] for name in ours & given})


def _invariance(a: str, b: Any, given: set[str], options: dict[str, Any],
                progress: Any) -> Any:
    _refuse({name for name in given if name.startswith("b_")}
            | given & {"kwargs_b", "map", "weights", "strict",
                       "allow_mxnet_float32", "allow_formulas", "step_a",
                       "step_b"},
            "--invariance compares one network with itself")
    devices = shared.parse_counts(
        options["devices"] if "devices" in given else "1,2,4,8", "--devices")
    return api.invariance(find.factory(a, options["kwargs_a"]),
                          devices=devices, progress=progress,
                          **_training(options))


# -- mgpu trace ---------------------------------------------------------------

@click.group(cls=Group)
def trace() -> None:
    """Record a training for a later comparison.

    `mgpu compare FILE MODULE:FACTORY` compares with the file, also on another
    machine."""


@trace.command(cls=Command)
@click.argument("net", metavar="MODULE:FACTORY")
@option("-o", "--output", "file", required=True, metavar="FILE",
        type=click.Path(dir_okay=False), help="The file to write.")
@shared.kwargs()
@option("--keep", metavar="1,5,20", type=Parsed(shared.parse_counts),
        help="Numbers of the steps to keep. Default: the first, the last, "
        "and those at which the rate changes.")
@shared.declare(*shared.NETWORK, "--devices", *shared.TRAINING,
                dtype="float64")
def record(net: str, file: str, kwargs: dict[str, Any],
           keep: list[int] | None, devices: Any, **options: Any) -> None:
    """Train a network and record its steps in a file."""
    files.check_folder(file, "--output")
    with _ready() as progress:
        done = api.record(
            find.factory(net, kwargs), file=file, keep=keep, devices=devices,
            progress=progress, **_training(options))
    click.echo(f"written: {done.file} ({done.size / 1e6:.1f} MB, {done.steps}"
               f" steps, kept: {', '.join(map(str, done.kept))})")


# -- mgpu lint ----------------------------------------------------------------

@click.command(cls=Command)
@click.argument("net", metavar="MODULE:FACTORY|SCRIPT.py")
@shared.kwargs()
@shared.declare(*shared.NETWORK)
@option("--examples", type=IntRange(1), metavar="N",
        help="The number of examples in the training set.")
@click.pass_context
def lint(ctx: click.Context, net: str, kwargs: dict[str, Any],
         input: tuple[int, ...] | None, batch_size: int, loss: str,
         classes: int | None, **options: Any) -> None:
    """List the differences between Gluon and PyTorch.

    Checks one network and its training, with --input also the rules that
    depend on shapes. SCRIPT.py, without a colon, is a training script: lists
    its lines of Gluon, with the same in mgpu and in plain PyTorch. Nothing in
    the script is imported or run.

    Exit status: 1 if anything is listed, else 0."""
    if net.endswith(".py") and ":" not in net:
        _refuse(shared.given(ctx) - {"net"}, "a script says itself what is "
                "trained")
        lines = lint_script(net)
        print_script(lines, Console())
        ctx.exit(1 if lines else 0)
    draw = np.random.default_rng(0).standard_normal
    rows = batch_size if "batch_size" in shared.given(ctx) else None
    with find.engines():
        findings = list(api.lint(
            find.factory(net, kwargs), loss=find.find_loss(loss),
            sample=None if input is None else draw((batch_size, *input)),
            batch_size=rows, **options))
    print_findings(findings, Console())
    ctx.exit(1 if findings else 0)


def print_findings(findings: "Iterable[api.Finding]", console: Console
                   ) -> None:
    """A paragraph for each finding, nothing shortened."""
    findings = list(findings)
    for finding in findings:
        console.print(Text(f"{finding.rule}: {finding.where}", "bold"))
        for text in (finding.text, f"torch: {finding.torch}"):
            console.print(Padding(Text(text), (0, 0, 0, 2)))
    click.echo(f"{len(findings)} difference"
               f"{'s' * (len(findings) != 1)} to PyTorch")


def print_script(lines: Iterable[ScriptLine], console: Console) -> None:
    """A paragraph for each line of a script that becomes another."""
    lines = list(lines)
    for number, source, line in lines:
        console.print(Text(f"{number}: {source}", "bold"))
        cells = {text: f"{name}: " for name, text in (
            ("mgpu", line.mgpu), ("torch", line.torch))}
        for text, name in cells.items():
            name *= len(cells) > 1      # else it refers to a row
            console.print(Padding(Text(name + text.replace("`", "")),
                                  (0, 0, 0, 2)))
    click.echo(f"{len(lines)} replacement{'s' * (len(lines) != 1)}; the guide "
               "has them in a table: docs/guide/migrating.md")
