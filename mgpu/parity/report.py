"""A comparison for people and for programs: terminal, HTML, JSON."""
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.parity.measure import STAGES
from mgpu.parity.page import check_packages, check_page, to_html, write_html
from mgpu.parity.result import SHORT, Result
from mgpu.parity.tables import (Rows, Table, first_rows, layer_table,
                                location_rows, plan_table, sentence,
                                short_rows, side_table, stage_table, text,
                                versions)
from mgpu.utils import environment, files

__all__ = ["STAGES", "check_packages", "check_page", "first_rows",
           "layer_table", "location_rows", "plan_table", "print_result",
           "sentence", "short_rows", "side_table", "stage_table", "to_html",
           "versions", "write_html", "write_json"]


def print_result(result: Result, console: Any = None, *,
                 details: bool = False, plan: bool = False) -> None:
    """Print a result: what fits one screen, or all of it as tables. No value
    is shortened; long ones wrap.

    Parameters
    ----------
    result : Result
    console : rich.console.Console, optional
        Default: standard output.
    details : bool
        Also print the sides, the largest difference of each stage, all
        causes and all notes.
    plan : bool
        Also print which parameter was matched with which.

    Raises
    ------
    ImportError
        The package rich is not installed.
    """
    environment.package("rich", "a table in the terminal")
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text
    console = console or Console()

    def show(*parts: Any, **options: Any) -> None:
        console.print(*parts, markup=False, highlight=False, **options)

    def grid(table: Table, numbers: Sequence[str] = ()) -> None:
        drawn = Grid()
        for name in table[0]:
            drawn.add_column(name, overflow="fold", justify="right"
                             if name in numbers else "left")
        for row in table[1]:
            drawn.add_row(*map(Text, row))      # names have square brackets
        show(drawn)

    def pairs(title: str, rows: Rows) -> None:
        if not rows:
            return
        show(title, style="bold")
        drawn = Grid.grid(padding=(0, 2))
        drawn.add_column(no_wrap=True)
        drawn.add_column(overflow="fold")
        for name, value in rows:
            drawn.add_row("  " + name, Text(value))
        show(drawn)

    def items(title: str, lines: Sequence[str]) -> None:
        if lines:
            show(title, style="bold")
        for line in lines:
            show(Padding(Text(line), (0, 0, 0, 2), expand=False))

    most = None if details else SHORT
    trial = result.on_trial(most)
    show(f"{result.verdict.upper()} (lock-step)",
         style="bold green" if result.agrees else "bold red")
    show(sentence(result))
    keys = ("network", "engine", "devices", "optimizer", "batch_norm")
    sides = [f"{name}: " + ", ".join(
        text(side[key]) for key in keys[:None if details else 2]
        if side.get(key)) for name, side in result.sides.items()]
    show(("\n" if details else "; ").join(sides))
    for line in trial[:1]:
        show(line)
    if details:
        pairs("First difference", first_rows(result.first)
              if result.first is not None else [])
        pairs("First layer whose output differs",
              location_rows(result.location) if result.location else [])
        items("Likely causes", [f"{number}. {cause}" for number, cause
                                in enumerate(result.causes, 1)])
        items("Also different", result.further_lines())
    else:
        pairs("First difference", short_rows(result))
        items("Likely cause", result.likely())
        items("Also different", result.further_lines(SHORT))
    for line in trial[1:]:
        show(line)
    if details and result.gaps:
        show("The worst of each stage", style="bold")
        grid(stage_table(result), ("relative", "step"))
    # With a cause, the matching is not in doubt.
    if result.plan.pairs and (details or plan or not result.causes):
        show(result.plan.lines()[0],
             style="red" if result.plan.confirmed is False else "")
    if plan and result.plan.pairs:
        grid(plan_table(result))
    for note in [f"note: {note}" for note in dict.fromkeys(
            (*result.plan.notes, *result.notes))] if details \
            else result.short_notes():
        show(note)
    if not details:
        show("--details shows the sides, each stage and all notes" + (
            "; --plan the matching." if result.plan.pairs and not plan
            else "."), style="dim")


def write_json(result: Any, file: files.FilePath) -> None:
    """Write ``result.to_dict()``, of a `Result` or another report, whole or
    not at all.

    JSON has no number for infinity or NaN: they become the strings
    "Infinity", "-Infinity" and "NaN". Tuples become lists.
    """
    files.write_json(file, json_data(result))


def json_data(result: Any) -> Any:
    """What `write_json` writes."""
    return _plain(result.to_dict())


def _plain(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {str(key): _plain(value) for key, value in x.items()}
    if hasattr(x, "_asdict"):
        return _plain(x._asdict())
    if isinstance(x, (list, tuple, set, range)):
        return [_plain(value) for value in x]
    if isinstance(x, (np.ndarray, np.generic)):
        return _plain(x.tolist())
    if isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    return x if isinstance(x, (str, int, float, type(None))) else str(x)
