"""`mgpu inspect` and `mgpu convert`."""
import importlib.util
import json
import os
import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from click import Choice, argument, option
from rich.console import Console

import mgpu
from mgpu.cli import checking, options as shared
from mgpu.cli.errors import Command, CommandError, exit_status
from mgpu.cli.options import Parsed
from mgpu.cli.tables import print_table, print_text
from mgpu.data.nested import leaves
from mgpu.gluon_io import load_graph
from mgpu.gluon_io.graph import dense_arrays
from mgpu.tools import inspection
from mgpu.utils import environment, files

_FILE = click.Path(dir_okay=False)


# -- mgpu inspect -------------------------------------------------------------

@click.command(cls=Command)
@argument("file", type=_FILE)
@argument("params", type=_FILE, required=False)
@shared.outputs("json", flag=True)
def inspect(file: str, params: str | None, outputs: shared.Outputs) -> None:
    """Show the contents of a file.

    FILE is one of .params, -symbol.json and trainer states of MXNet, a
    checkpoint or trainer states of mgpu, or safetensors. With a -symbol.json
    its PARAMS may be given, so that operators are checked by their attributes
    too. Needs no MXNet. Executes nothing in the file.
    """
    found = inspection.inspect_file(file, params)
    outputs.show(json.loads(json.dumps(found, default=str)),
                 lambda: _show(file, found, params is not None))
    outputs.say_written()


def _show(file: str, found: dict[str, Any], judged: bool) -> None:
    print_text(f"{file}: {found['kind']}, {size(found['bytes'])}")
    for key, show in _SHOWN.items():
        if found.get(key) is not None:
            show(found[key])
    if "missing" in found:
        _say_missing(found["missing"], judged)
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
    "engine": lambda name: print_text(f"backend: {name}"),
    "devices": _names("devices"),
    "optimizer": lambda name: print_text(f"optimizer: {name}"),
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
@shared.outputs("network", "page")
@option("--force", is_flag=True, help="Replace existing files. Without it an "
        "existing file with other contents raises.")
@option("--dtype", type=Choice(["float32", "float64", "float16"]),
        help="Of the parameters. Default: the file's.")
@option("--plain", is_flag=True, help="Source that needs no mgpu, with "
        "PyTorch's own layers; comments say what differs.")
@option("--input", "inputs", multiple=True, metavar="3x224x224|16:int32",
        type=Parsed(_parse_input), help="The shape of one example, and its "
        "dtype where it is not that of the parameters; once for each input. "
        "For .pt2 and for --check.")
@option("--check", is_flag=True, help="Train what was written against MXNet, "
        f"in lock-step, for {checking.STEPS} steps on random data in float64, "
        f"{checking.LARGER:g} times as large in the last. Values are compared "
        "too, and dropout, which is off, by its rates and places. Exit "
        "status as for mgpu compare.")
@option("--trace", type=_FILE, metavar="FILE", help="Check against a file of "
        "mgpu trace record, and its first values, for which MXNet is not "
        "needed.")
@option("--check-only", is_flag=True, help="Write nothing, and check the "
        "FILE that is there: a source with edits of yours.")
@shared.declare("--allow-mxnet-float32")
@click.pass_context
def convert(ctx: click.Context, symbol: str, params: str | None,
            outputs: shared.Outputs, force: bool, dtype: str | None,
            plain: bool, inputs: Sequence[Any], check: bool,
            trace: str | None, check_only: bool,
            allow_mxnet_float32: bool) -> None:
    """Convert a network that Gluon has exported.

    \b
    -o net.py             its source, for PyTorch, and net.safetensors or
                          net.pt with its weights
    -o net.safetensors    its values, by the names of mgpu.from_gluon
    -o net.params         its values, for MXNet
    -o net.pt2            the network, to predict with (torch.export)

    SYMBOL is net-symbol.json, and PARAMS net-0000.params. MXNet is needed
    for --check alone. A file that cannot be checked is not written.
    """  # noqa: D301 (click reads the character itself)
    output, page = outputs.network, outputs.page
    if output is None:
        raise ValueError("convert writes a network; received --output "
                         f"{page!r}. Name a file that ends in "
                         f"{', '.join(_WRITERS)} too.")
    ending = os.path.splitext(output)[1]
    check = check or check_only and trace is None
    if params is None and (ending != ".py" or check or trace):
        raise ValueError(
            (f"a file {ending} holds values" if ending != ".py" else
             "a check compares values") + "; received no PARAMS. Name "
            "net-0000.params after net-symbol.json.")
    if (ending == ".pt2" or check) and not inputs:
        raise ValueError("the shapes of inputs are not in the files, and "
                         f"{'--check' if check else ending} needs them. Write "
                         "for example --input 3x224x224.")
    if plain and ending != ".py":
        raise ValueError("--plain is about source; received it for a file "
                         f"{ending}. Leave it out.")
    if check and dtype == "float16":
        raise ValueError("--check compares in float64; received --dtype "
                         "float16. Check a file of another dtype.")
    if check and trace:
        raise ValueError("--check compares with MXNet, and --trace with a "
                         "file; received both. Leave one out.")
    if page is not None and not (check or trace):
        raise ValueError("a page shows what was checked; received --output "
                         f"{page!r} without --check and --trace.")
    with open(symbol, "rb") as stream:
        if stream.read(64).lstrip()[:1] != b"{":
            raise ValueError(
                f"SYMBOL is a -symbol.json; received {symbol!r}, which is not "
                "JSON. Write net-symbol.json before net-0000.params.")
    if check:       # before anything is written
        _check_mxnet(symbol)
    files.check_not_read(output, symbol, params)
    if page is not None:
        from mgpu.parity import report
        report.check_page(page)
    job = _Job(symbol, params, dtype, inputs, plain)
    write, read = _WRITERS[ending]
    with mgpu.using_backend("torch"), tempfile.TemporaryDirectory() as folder:
        missing = mgpu.missing_operators(symbol, params)
        if missing:
            raise CommandError(missing_text([x._asdict() for x in missing]))
        if check or ending == ".pt2":
            _check_count(job)
        made = os.path.join(folder, os.path.basename(output))
        names = write(job, made)
        # what is written beside it too
        targets = {} if check_only else {
            os.path.join(folder, name): os.path.join(
                os.path.dirname(output), name)
            for name in sorted(os.listdir(folder))}
        for part, file in targets.items():
            files.check_not_read(file, symbol, params)
            if not force:
                files.check_not_other(part, file, "Name another file; --force "
                                      "replaces it; --check-only checks it.")
        found = None
        if check or trace:
            def net() -> Any:
                return read(job, output if check_only else made, names)
            found = checking.with_mxnet(symbol, str(params), net, inputs) \
                if trace is None else checking.with_trace(trace, symbol, net)
            if ending == ".pt2":
                _judge_pt2(found, job, output if check_only else made)
        for part, file in targets.items():
            with files.part_of(file) as path:
                shutil.copyfile(part, path)
    for file in targets.values():
        click.echo(f"written: {file}")
    if found is not None:
        from mgpu.parity import report
        report.print_result(found, Console())
        if page is not None:
            report.write_html(found, page, command=ctx.meta["mgpu.command"])
            click.echo(f"written: {page}")
        ctx.exit(exit_status(found,
                             allow_mxnet_float32=allow_mxnet_float32))


def _check_mxnet(symbol: str) -> None:
    try:
        with mgpu.using_backend("mxnet"):
            pass
    except mgpu.BackendNotAvailable as error:
        raise CommandError(
            "--check compares with MXNet, which cannot be loaded here "
            f"({error.__cause__ or error}). Install it (pip install "
            "mxnet==1.9.1 'numpy<2' setuptools), or compare by --trace with a "
            "file that mgpu trace record has written where it is.") from error
    if load_graph(symbol).numpy_shapes:
        raise CommandError(
            "--check runs MXNet in its legacy mode; received a network of its "
            "NumPy interface. Record a run of it with mgpu.parity.record "
            "after npx.set_np(), and pass that as --trace.")


class _Job(NamedTuple):
    """What is converted."""

    symbol: str
    params: str | None
    dtype: str | None
    inputs: checking.Inputs
    plain: bool = False

    def net(self) -> Any:
        return mgpu.from_gluon(self.symbol, self.params, self.dtype)

    def examples(self, seed: int) -> list[np.ndarray]:
        """Inputs of `net`, in the dtype of its parameters."""
        graph, arrays = load_graph(self.symbol), dense_arrays(
            str(self.params))
        own = self.dtype or next((x.dtype.name for x in arrays.values()
                                  if x.dtype.kind == "f"), "float32")
        return checking.draw(self.inputs, own, np.random.default_rng(seed),
                             checking.embedded(graph, arrays))


def _check_count(job: _Job) -> None:
    names = checking.inputs_of(load_graph(job.symbol), () if job.params is None
                               else dense_arrays(job.params))
    if job.params is not None and len(names) != len(job.inputs):
        raise ValueError(
            f"the network has the inputs {', '.join(names)}; received "
            f"--input {len(job.inputs)} times. Write it once for each of "
            "them, in this order.")


# For each kind of file what writes it, which returns the names of Gluon's
# parameters in it, if they are not those of `mgpu.from_gluon`; and what reads
# the network back, with the values that are in the file.

def _write_source(job: _Job, path: str) -> Any:
    if job.dtype is not None:
        raise ValueError("source has the dtype of its weights; received "
                         f"--dtype {job.dtype}. Leave --dtype out.")
    return mgpu.gluon_source(job.symbol, job.params, path, job.plain)


def _read_source(job: _Job, path: str, names: Any) -> Any:
    beside = Path(path).with_suffix("")
    weights = [file for file in (beside.with_suffix(".safetensors"),
                                 beside.with_suffix(".pt")) if file.exists()]
    if not weights:
        raise FileNotFoundError(f"the weights of {path!r} are beside it, in "
                                f"{beside.name}.safetensors or {beside.name}"
                                ".pt; neither exists. Write it again.")
    found = importlib.util.spec_from_file_location(beside.name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
        if not callable(getattr(module, "load", None)):
            raise CommandError(
                f"a source has a function load(path); {path!r} has none. Keep "
                "the one that was written.")
        net = module.load(weights[0])
    except (CommandError, ImportError):
        raise
    except Exception as error:      # of an edit
        lines = " ".join(str(error).split())
        raise CommandError(
            "a check loads the source with the weights beside it; received "
            f"{path!r}, which fails ({type(error).__name__}: {lines[:200]}). "
            "Correct it; layers keep the names that their weights have, so "
            "nn.Identity() takes the place of one that goes.") from error
    net.gluon_names = names
    return net


def _write_safetensors(job: _Job, path: str) -> None:
    mgpu.to_safetensors(job.net(), path)


def _read_safetensors(job: _Job, path: str, names: Any) -> Any:
    library = environment.package("safetensors", "--check",
                                  "safetensors.torch")
    net = job.net()
    for x in net.state_dict().values():
        x.zero_()       # so that its values come from the file
    library.torch.load_model(net, path)
    return net


def _write_params(job: _Job, path: str) -> None:
    mgpu.to_gluon_params(job.net(), path)


def _read_params(job: _Job, path: str, names: Any) -> Any:
    return mgpu.from_gluon(job.symbol, path)


def _write_pt2(job: _Job, path: str) -> None:
    mgpu.to_pt2(job.net(), path, job.examples(0))


def _program(path: str) -> Any:
    library = environment.package("torch", "--check", "torch.export")
    try:
        if os.path.isfile(path) and not zipfile.is_zipfile(path):
            raise ValueError("it is no zip")    # torch would log it
        with open(path, "rb") as file:
            return library.export.load(file)
    except OSError:
        raise
    except Exception as error:      # zip, JSON, pickle: each has its own
        line = str(error).strip().partition("\n")[0]
        raise ValueError(f"expected a file of torch.export; {path!r} is not "
                         f"one, or is damaged ({line}). Write it again."
                         ) from error


def _read_pt2(job: _Job, path: str, names: Any) -> Any:
    """A .pt2 does not train: its network does, with the values that it
    has."""
    net, values = job.net(), _program(path).state_dict
    own = net.state_dict()
    strange = sorted(name for name, x in values.items()
                     if name not in own or own[name].shape != x.shape)
    if strange:
        raise CommandError(f"{path!r} is of another network: it has "
                           f"{', '.join(strange[:5])}. Write it again.")
    for name, x in values.items():
        own[name].copy_(x.data)
    return net


def _judge_pt2(found: Any, job: _Job, path: str) -> None:
    """Compare what the file predicts with what its network does."""
    X = job.examples(1)
    net = job.net().eval()
    tensors = [mgpu.put(x, mgpu.cpu(0)) for x in X]
    program = _program(path).module()
    with mgpu.no_grad():
        try:
            predicted = program(*tensors)
        except Exception as error:      # a guard, or an operator of it
            line = str(error).strip().partition("\n")[0]
            raise CommandError(
                "a file .pt2 predicts for any number of rows; received "
                f"{path!r}, which raises for "
                f"{', '.join(str(x.shape) for x in X)} "
                f"({type(error).__name__}: {line[:200]}). Write it with mgpu "
                "convert, or with a dynamic first axis.") from error
        outputs = [predicted, net(*tensors)]
    pairs = [[mgpu.to_numpy(x).astype("float64") for x in leaves(output)]
             for output in outputs]
    far = max(float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30))
              if x.shape == y.shape else np.inf
              for x, y in zip(*pairs, strict=True))
    if far > 1e-5 and found.agrees:
        found.verdict = "different"
        found.reason = ("the file predicts otherwise than its network, by a "
                        f"relative {far:.1e}")
    found.notes.insert(0, "a file .pt2 does not train: its values were put "
                       "into its network, which did, and its predictions "
                       f"agree with that one's up to a relative {far:.1e}")


_WRITERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    ".py": (_write_source, _read_source),
    ".safetensors": (_write_safetensors, _read_safetensors),
    ".params": (_write_params, _read_params),
    ".pt2": (_write_pt2, _read_pt2)}
