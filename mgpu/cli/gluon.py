"""`mgpu inspect` and `mgpu convert`."""
import json
from collections import Counter
from typing import Any

import click
from click import argument, option

from mgpu import inspection
from mgpu.cli.errors import Command
from mgpu.cli.tables import print_table, print_text

_FILE = click.Path(dir_okay=False)


# -- mgpu inspect -------------------------------------------------------------

@click.command(cls=Command)
@argument("file", type=_FILE)
@argument("params", type=_FILE, required=False)
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(file: str, params: str | None, as_json: bool) -> None:
    """Show what is in a file.

    FILE is one of .params, -symbol.json and trainer states of MXNet, a
    checkpoint or trainer states of mgpu, or safetensors. With a -symbol.json
    its PARAMS may be given: then operators are judged by their attributes
    too. Needs no MXNet; nothing in the file is executed.
    """
    found = inspection.inspect_file(file, params)
    if as_json:
        click.echo(json.dumps(found, indent=1, default=str))
        return
    print_text(f"{file}: {found['kind']}, {size(found['bytes'])}")
    for key, show in _SHOWN.items():
        if found.get(key) is not None:
            show(found[key])
    if "missing" in found:
        _say_missing(found["missing"], judged=params is not None)
    if "values" in found:
        entries = found.get("arrays") or [
            entry for state in found.get("states", ())
            for entry in state["arrays"]]
        print_text(f"{len(entries)} arrays, {found['values']:,} values, "
                   f"{size(sum(entry['bytes'] for entry in entries))}")


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            break
        count /= 1000
    else:
        unit = "GB"
    return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"


def _shape(shape: list[int]) -> str:
    return "x".join(map(str, shape)) or "()"


def _show_arrays(entries: list[dict[str, Any]]) -> None:
    print_table(("name", "dtype", "shape", "size"), [
        (entry["name"], entry["dtype"] + (
            "" if entry["storage"] == "dense" else f" {entry['storage']}"),
         _shape(entry["shape"]), size(entry["bytes"]))
        for entry in entries], left=2, fold=True)


def _show_states(states: list[dict[str, Any]]) -> None:
    print_table(("parameter", "updates", "arrays"), [
        (str(state["index"]), "-" if state["updates"] is None
         else str(state["updates"]),
         ", ".join(f"{x['dtype']} {_shape(x['shape'])}"
                   for x in state["arrays"]) or "none")
        for state in states], left=3, fold=True)


def _show_operators(counts: dict[str, int]) -> None:
    print_table(("operator", "count"), [
        (op, str(count)) for op, count in counts.items()], fold=True)


def _names(title: str) -> Any:
    return lambda names: print_text(
        f"{title}: {', '.join(names) or 'none'}")


def _pairs(title: str) -> Any:
    return lambda found: print_text(f"{title}: " + (
        ", ".join(f"{key} {x}" for key, x in found.items()) or "none"))


#: how the entries of `inspect_file` are shown, in this order
_SHOWN: dict[str, Any] = {
    "engine": lambda name: print_text(f"engine: {name}"),
    "devices": _names("devices"),
    "optimizer": lambda name: print_text(f"optimiser: {name}"),
    "settings": _pairs("settings"),
    "schedule": _pairs("schedule"),
    "num_update": lambda count: print_text(f"updates: {count}"),
    "states": _show_states,
    "metadata": _pairs("metadata"),
    "inputs": _names("inputs"),
    "outputs": _names("outputs"),
    "parameters": lambda names: print_text(
        f"arrays that are given in .params: {len(names)}"),
    "operators": _show_operators,
    "arrays": _show_arrays}


def _say_missing(missing: list[dict[str, Any]] | None, judged: bool) -> None:
    if missing is None:
        print_text("Which of them PyTorch has is not known: it is not "
                   "installed.")
    elif missing:
        print_text(missing_text(missing))
    else:
        print_text("Each has a rule on PyTorch." if judged else
                   "Each has a rule on PyTorch; give the .params too, and "
                   "attributes are looked at.")


def missing_text(missing: list[dict[str, Any]]) -> str:
    """A line for each reason, with how often there is it and one node."""
    counts = Counter((x["op"], x["why"]) for x in missing)
    first = {(x["op"], x["why"]): x["node"] for x in reversed(missing)}
    lines = [f"  {op}: {why} ({count} node{'s' * (count > 1)}, such as "
             f"{first[op, why]})" for (op, why), count in counts.items()]
    return "\n".join([f"{len(missing)} operators have no rule on PyTorch:",
                      *lines, "Add rules with mgpu.register_op."])
