"""`mgpu inspect` and `mgpu convert`."""
import importlib.util
import json
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from click import Choice, argument, option
from rich.console import Console

import mgpu
from mgpu import environment, inspection
from mgpu.cli import find
from mgpu.cli import options as shared
from mgpu.cli.errors import Command, Refused
from mgpu.cli.options import Parsed
from mgpu.cli.tables import print_table, print_text
from mgpu.gluon_io import Graph, load_graph
from mgpu.gluon_io.graph import dense_arrays, entries

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
    if count < 1000:
        return f"{count:.0f} bytes"
    power = 3 if count >= 1e9 else 2 if count >= 1e6 else 1
    return f"{count / 1000 ** power:.1f} {('kB', 'MB', 'GB')[power - 1]}"


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
                   "their shapes are looked at.")


def missing_text(missing: list[dict[str, Any]]) -> str:
    """A line for each reason, with how often there is it and one node."""
    counts = Counter((x["op"], x["why"]) for x in missing)
    first = {(x["op"], x["why"]): x["node"] for x in reversed(missing)}
    lines = [f"  {op}: {why} ({count} node{'s' * (count > 1)}, such as "
             f"{first[op, why]})" for (op, why), count in counts.items()]
    return "\n".join([f"{len(missing)} operators have no rule on PyTorch:",
                      *lines, "Add rules with mgpu.register_op."])


# -- mgpu convert -------------------------------------------------------------

#: rows, and steps, of what `--check` compares
_ROWS, _STEPS = 4, 3


def _parse_input(text: str, name: str) -> tuple[tuple[int, ...], str | None]:
    """``"3x224x224"`` or ``"16:int32"``: shape, and dtype where given."""
    shape, _, dtype = text.partition(":")
    if dtype and dtype not in ("float32", "float64", "int32", "int64"):
        raise ValueError(f"{name} takes a shape, and perhaps a dtype; "
                         f"received {text!r}. Write for example 3x224x224 or "
                         "16:int32.")
    if shape == "()":       # one number for each row
        return (), dtype or None
    return shared.parse_shape(shape, name), dtype or None


@click.command(cls=Command)
@argument("symbol", type=_FILE)
@argument("params", type=_FILE, required=False)
@option("-o", "--output", "output", required=True, type=_FILE, metavar="FILE",
        help="The file to write; what it is called says what it is.")
@option("--dtype", type=Choice(["float32", "float64", "float16"]),
        help="Of the parameters. Default: the file's.")
@option("--input", "inputs", multiple=True, metavar="3x224x224|16:int32",
        type=Parsed(_parse_input), help="The shape of one example, and its "
        "dtype where it is not that of the parameters; once for each input. "
        "For .pt2 and for --check.")
@option("--check", is_flag=True, help="Train what was written against MXNet, "
        f"in lock-step, for {_STEPS} steps on random data in float64. Exit "
        "status 1 if they differ.")
@option("--trace", type=_FILE, metavar="FILE", help="Check against a file of "
        "mgpu trace record, for which MXNet is not needed.")
@shared.output("--report", "Write a page of what was checked, .html.")
@click.pass_context
def convert(ctx: click.Context, symbol: str, params: str | None, output: str,
            dtype: str | None, inputs: Sequence[Any], check: bool,
            trace: str | None, report_file: str | None) -> None:
    r"""Write a network that Gluon has exported as something else.

    \b
    -o net.py             its source, for PyTorch
    -o net.safetensors    its values, by the names of mgpu.from_gluon
    -o net.params         its values, for MXNet
    -o net.pt2            the network, to predict with (torch.export)

    SYMBOL is net-symbol.json, and PARAMS net-0000.params. MXNet is needed
    for --check alone.
    """
    ending = os.path.splitext(output)[1]
    if ending not in _WRITERS:
        raise ValueError("the name of the file to write ends in "
                         f"{', '.join(_WRITERS)}; received {output!r}.")
    if params is None and ending != ".py":
        raise ValueError(f"a file {ending} holds values; received no PARAMS. "
                         "Name net-0000.params after net-symbol.json.")
    if (ending == ".pt2" or check) and not inputs:
        raise ValueError("the shapes of inputs are not in the files, and "
                         f"{'--check' if check else ending} needs them. Write "
                         "for example --input 3x224x224.")
    if check and dtype == "float16":
        raise ValueError("--check compares in float64; received --dtype "
                         "float16. Check a file of another dtype.")
    if check and trace:
        raise ValueError("--check compares with MXNet, and --trace with a "
                         "file; received both. Leave one out.")
    if check:       # before anything is written
        with mgpu.using_backend("mxnet"):
            pass
        if load_graph(symbol).numpy_shapes:
            raise Refused("--check runs MXNet in its legacy mode; received a "
                          "network of its NumPy interface. Record a run of it "
                          "with mgpu.parity.record after npx.set_np(), and "
                          "pass that as --trace.")
    if report_file is not None and not (check or trace):
        raise ValueError("a page shows what was checked; received --report "
                         "without --check and --trace.")
    shared.check_folders(output=output, report=report_file)
    if report_file is not None:
        from mgpu.parity import report
        report.check_page(report_file)
    with mgpu.using_backend("torch"):
        missing = mgpu.missing_operators(symbol, params)
        if missing:
            raise Refused(missing_text([x._asdict() for x in missing]))
        read = _WRITERS[ending](symbol, params, output, dtype, inputs)
    shared.say_written(output)
    if check or trace:
        from mgpu.parity import report
        found = _checked(symbol, params, read, inputs) if trace is None \
            else _compared(trace, read)
        report.print_result(found, Console())
        if report_file is not None:
            report.write_html(found, report_file,
                              command=ctx.meta["mgpu.command"])
            shared.say_written(report_file)
        ctx.exit(0 if found.verdict in ("exact", "same")
                 or found.proves(True, False) else 1)


# Each writes a file, and returns a function that makes the network of what
# was written, for `--check`.

def _source(symbol: str, params: str | None, output: str, dtype: str | None,
            inputs: Any) -> Callable[[], Any]:
    if dtype is not None:
        raise ValueError("source has the dtype of its weights; received "
                         f"--dtype {dtype}. Leave --dtype out.")
    names = mgpu.gluon_source(symbol, params, output)

    def read() -> Any:
        beside = Path(output).with_suffix("")
        weights = next(path for path in (beside.with_suffix(".safetensors"),
                                         beside.with_suffix(".pt"))
                       if path.exists())
        found = importlib.util.spec_from_file_location(beside.name, output)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        net = module.load(weights)
        net.gluon_names = names
        return net
    return read


def _safetensors(symbol: str, params: str, output: str, dtype: str | None,
                 inputs: Any) -> Callable[[], Any]:
    mgpu.to_safetensors(mgpu.from_gluon(symbol, params, dtype), output)

    def read() -> Any:
        library = environment.package("safetensors", "--check",
                                      "safetensors.torch")
        net = mgpu.from_gluon(symbol, params, dtype)
        for x in net.state_dict().values():
            x.zero_()       # so that its values come from the file
        library.torch.load_model(net, output)
        return net
    return read


def _params(symbol: str, params: str, output: str, dtype: str | None,
            inputs: Any) -> Callable[[], Any]:
    mgpu.to_gluon_params(mgpu.from_gluon(symbol, params, dtype), output)
    return lambda: mgpu.from_gluon(symbol, output)


def _pt2(symbol: str, params: str, output: str, dtype: str | None,
         inputs: Any) -> Callable[[], Any]:
    def make() -> Any:
        return mgpu.from_gluon(symbol, params, dtype)
    net = make()
    own = next((name for name in (str(mgpu.to_numpy(p).dtype)
                                  for p in net.parameters())
                if "float" in name), "float32")
    mgpu.to_pt2(net, output, _draw(inputs, own, np.random.default_rng(0)))
    return make         # a .pt2 does not train: what it was made of does


_WRITERS: dict[str, Callable[..., Callable[[], Any]]] = {
    ".py": _source, ".safetensors": _safetensors, ".params": _params,
    ".pt2": _pt2}


def _draw(inputs: Sequence[Any], dtype: str, rng: np.random.Generator,
          rows: Mapping[int, int] | None = None) -> list[np.ndarray]:
    """An array of `_ROWS` rows for each input: normal, or whole numbers below
    `rows` of it, 0 and 1 where that has none."""
    drawn = []
    for k, (shape, own) in enumerate(inputs):
        size, kind = (_ROWS, *shape), own or dtype
        if "float" in kind and k not in (rows or {}):
            drawn.append(rng.standard_normal(size).astype(kind))
        else:
            drawn.append(rng.integers(0, (rows or {}).get(k, 2), size
                                      ).astype(kind))
    return drawn


def _compared(trace: str, read: Callable[[], Any]) -> Any:
    """What `mgpu.parity` says of a recorded run and of what was written."""
    from mgpu import parity

    def written() -> Any:
        with mgpu.using_backend("torch"):
            return read()
    return parity.compare_trace(trace, written)


def _checked(symbol: str, params: Any, read: Callable[[], Any],
             inputs: Sequence[Any]) -> Any:
    """What it says of MXNet's network and of what was written."""
    from mgpu import parity

    def live(symbol: str = symbol) -> Any:
        with mgpu.using_backend("mxnet"), warnings.catch_warnings():
            # that it does not know the types of inputs
            warnings.simplefilter("ignore", UserWarning)
            return mgpu.from_gluon(symbol, params)

    def written() -> Any:
        with mgpu.using_backend("torch"):
            return read()
    graph, arrays = load_graph(symbol), dense_arrays(params)
    # MXNet's gradients of lower layers are wrong in float64
    dtype = "float32" if any(
        node.op in ("RNN", "_npx_rnn") and node.attributes["num_layers"] > 1
        for node in graph.nodes) else "float64"
    with find.engines(), tempfile.TemporaryDirectory() as folder:
        quiet, rates = _without_dropout(symbol, folder)
        with mgpu.using_backend("mxnet") as engine:
            a = [x.name for x in engine.network(live()).specs()]
        net = written()
        found = {m.p for m in net.modules() if type(m).__name__ == "Dropout"}
        if found != rates:
            raise Refused(f"the graph drops out with rates {sorted(rates)}, "
                          f"what was written with {sorted(found)}.")
        with mgpu.using_backend("torch") as engine:
            b = {x.name for x in engine.network(net).specs()}
        return parity.compare(
            lambda: live(quiet), written, loss=_loss, weights="own",
            dtype=dtype, dropout="off",
            batches=_batches(net, inputs, _embedded(graph, arrays), dtype),
            optimizer_params={"learning_rate": 0.125, "momentum": 0.5},
            map=_matched(a, b, net.gluon_names))


def _without_dropout(symbol: str, folder: str) -> tuple[str, set[float]]:
    """A copy of the graph that drops nothing out, for MXNet draws masks
    inside it that no one else knows; and the rates that were there."""
    with open(symbol, encoding="utf-8") as file:
        graph = json.load(file)
    rates = set()
    for node, read in zip(graph["nodes"], load_graph(symbol).nodes):
        if read.op in ("Dropout", "_npx_dropout") \
                and read.attributes["mode"] == "training":
            rates.add(round(read.attributes["p"], 7))
            for key in ("param", "attr", "attrs"):
                node.pop(key, None)
            node["attrs"] = {"p": "0"}
    path = os.path.join(folder, "net-symbol.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(graph, file)
    return path, rates


def _loss(outputs: Any, targets: Any) -> Any:
    """`L2Loss` of each output, each with another weight, so that outputs
    that are exchanged do not go unseen in their sum."""
    if not isinstance(outputs, (tuple, list)):
        return mgpu.losses.L2Loss()(outputs, targets)
    losses = [mgpu.losses.L2Loss(2.0 ** -i)(y, target) for i, (y, target)
              in enumerate(zip(outputs, targets, strict=True))]
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def _batches(net: Any, inputs: Sequence[Any], rows: Mapping[int, int],
             dtype: str) -> list[Any]:
    """Random inputs, and targets of the shapes of the outputs."""
    rng = np.random.default_rng(0)
    drawn = [_draw(inputs, dtype, rng, rows) for _ in range(_STEPS)]
    X = [tuple(arrays) if len(arrays) > 1 else arrays[0] for arrays in drawn]
    with mgpu.using_backend("torch"):
        replicas = mgpu.initialize(net, [mgpu.cpu(0)], dtype=dtype)
        out = replicas(mgpu.split_and_load(X[0], replicas.devices))[0]
        several = isinstance(out, (tuple, list))
        shapes = [mgpu.to_numpy(y).shape for y in (out if several else [out])]
    made = []
    for x in X:
        targets = tuple(rng.standard_normal(shape) for shape in shapes)
        made.append((x, targets if several else targets[0]))
    return made


def _embedded(graph: Graph, arrays: Container[str]) -> dict[int, int]:
    """How many rows the smallest embedding has that an input enters, by the
    number of the input: its indices are all of these."""
    names = entries(graph, arrays)
    found: dict[int, int] = {}
    for node in graph.nodes:
        if "Embedding" not in node.op and node.op != "_npx_embedding":
            continue
        i = node.inputs[0][0]
        while len(graph.nodes[i].inputs) == 1:      # a cast, a reshape
            i = graph.nodes[i].inputs[0][0]
        if graph.nodes[i].name in names:
            k = names.index(graph.nodes[i].name)
            size = node.attributes["input_dim"]
            found[k] = min(size, found.get(k, size))
    return found


def _matched(a: Sequence[str], b: set[str], gluon_names: Mapping[str, str]
             ) -> dict[str, str]:
    """Which parameter of a block is which of the torch network. The names of
    a block are those of the file without what all of them begin with."""
    found: dict[str, str] = {}
    for own, name in gluon_names.items():
        place, _, kind = own.rpartition(".")
        scale = {"weight": "gamma", "bias": "beta"}.get(kind, kind)
        for known in (own, f"{place}.{scale}"):
            if known in b:
                found.setdefault(name.partition(":")[2], known)
    for name in found:
        prefix = name.removesuffix(a[0]) if a else name
        if prefix != name and all(prefix + x in found for x in a):
            return {x: found[prefix + x] for x in a}
    return {x: found[x] for x in a if x in found}
