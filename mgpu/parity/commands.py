"""`mgpu parity`, `mgpu trace` and `mgpu lint`, commands of `mgpu.cli`.

Exit status: 0, the sides train the same; 1, they do not; 2, they could not be
compared, and a line on standard error says what to do.
"""
import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from click.core import ParameterSource
from rich.console import Console

import mgpu
from mgpu import datasets, files, losses
from mgpu.parity import comparison, report
from mgpu.parity.matching import MatchError
from mgpu.parity.sides import Side

_LOSSES = {
    "softmax-ce": losses.SoftmaxCrossEntropyLoss, "l2": losses.L2Loss,
    "l1": losses.L1Loss, "huber": losses.HuberLoss,
    "sigmoid-bce": losses.SigmoidBinaryCrossEntropyLoss,
    "kl-div": losses.KLDivLoss}
_STEPS = 20


# -- errors -------------------------------------------------------------------

class _Status2(click.ClickException):
    exit_code = 2


def _one_line(error: Exception) -> str:
    """What to tell of an error: mgpu's own say what to do; of a framework's,
    which may be pages, the line that says what is wrong."""
    text = str(error)
    if not isinstance(error, (ValueError, ImportError, OSError)):
        lines = [line for line in text.splitlines() if line.strip()] or [""]
        line = next((line for line in lines
                     if line.startswith(type(error).__name__)), lines[-1])
        text = line if line.startswith(type(error).__name__) \
            else f"{type(error).__name__}: {line}"
        text += " (--traceback shows where)"
    return " ".join(text.split())


class _Command(click.Command):
    """Every error ends with status 2, as 1 means "different"; and the
    context knows the arguments as they were typed, for the report."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["mgpu.command"] = f"{ctx.command_path} {shlex.join(args)}"
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if ctx.params.get("traceback"):
                import traceback
                traceback.print_exc()
            message = _one_line(error)
            if isinstance(error, MatchError):
                message += "".join(
                    f"\n  {name or 'left in b'}: {', '.join(names) or 'none'}"
                    for name, names in error.candidates.items())
            raise _Status2(message) from error


# -- what the user names ------------------------------------------------------

def _load_engines() -> dict[str, str]:
    """Load every engine that is there, before a module of the user's imports
    it: MXNet needs NumPy's old names for that. The others, and why not."""
    missing = {}
    for name in mgpu.available_backends():
        try:
            with mgpu.using_backend(name):
                pass
        except mgpu.BackendNotAvailable as error:
            missing[name] = str(error)
    return missing


def find(text: str) -> Any:
    """What ``MODULE:NAME`` or ``FILE.py:NAME`` stands for; the current
    folder is searched first, and for a file its own.

    Raises
    ------
    ValueError
        No colon, no such file, or no such name in it.
    ImportError
        No such module, or one that it needs.
    """
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise ValueError("a network is given as MODULE:FACTORY or "
                         f"FILE.py:FACTORY; received {text!r}. Write for "
                         "example models.resnet:resnet18.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    thing = _module_of(Path(place)) if place.endswith(".py") \
        else _import(place)
    for part in name.split("."):
        if not hasattr(thing, part):
            known = [n for n, v in vars(thing).items() if callable(v)
                     and not n.startswith("_")]
            raise ValueError(f"{place} has no {name!r}; received {text!r}. "
                             "Use one of "
                             f"{', '.join(known[:20]) or 'its names'}.")
        thing = getattr(thing, part)
    return thing


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported ({error}). Run the "
                          "command in the folder that holds it, or install "
                          "what is missing.") from error


def _module_of(file: Path) -> Any:
    """A file as a module, under its full path: files of one name in two
    folders are two modules."""
    file = file.resolve()
    if str(file) in sys.modules:
        return sys.modules[str(file)]
    if not file.is_file():
        raise ValueError(f"no such file; received {str(file)!r}. Correct the "
                         "path before the colon.")
    spec = importlib.util.spec_from_file_location(str(file), file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[str(file)] = module
    sys.path.insert(0, str(file.parent))    # as `python FILE.py` does
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(file)]
        raise
    return module


def factory(text: str, arguments: str | None, option: str) -> Callable:
    """The function that makes a network, with its keyword arguments."""
    function, keywords = find(text), _json(arguments, option)
    if not callable(function) or not isinstance(keywords, dict):
        raise ValueError(
            f"{text} must be a function that makes a network, and {option} a "
            f"JSON object; received {type(function).__name__} and "
            f"{arguments!r}. Write for example "
            f"{option} '{{\"classes\": 10}}'.")
    return functools.partial(function, **keywords)


def _json(text: str | None, option: str) -> Any:
    if text is None:
        return {}
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} takes JSON; received {text!r} ({error}). "
                         "Quote names with \" and the whole with '."
                         ) from error


def parse_params(text: str | None, option: str = "--optimizer-params"
                 ) -> dict[str, Any] | None:
    """``"learning_rate=0.1,momentum=0.9"`` or a JSON object, as a dict.
    Values are JSON, and text where they are none."""
    if text is None:
        return None
    if text.lstrip().startswith("{"):
        return _json(text, option)
    found = {}
    for entry in filter(None, text.split(",")):
        name, equals, value = entry.partition("=")
        if not equals or not name.strip():
            raise ValueError(
                f"{option} takes NAME=VALUE,NAME=VALUE or a JSON object; "
                f"received {text!r}. Write a list of values as JSON.")
        try:
            found[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            found[name.strip()] = value.strip()
    return found


def parse_devices(text: str) -> int | list[str]:
    """``"2"``: two devices; ``"cpu:0,cpu:1"``: these."""
    entries = [entry.strip() for entry in text.split(",")]
    if len(entries) == 1 and entries[0].isdecimal() and int(entries[0]):
        return int(entries[0])
    if all(entries) and not any(e.isdecimal() for e in entries):
        return entries
    raise ValueError(f"--devices takes a number or devices; received "
                     f"{text!r}. Write for example 2 or cpu:0,cpu:1.")


def parse_shape(text: str) -> tuple[int, ...]:
    """``"3x224x224"`` as (3, 224, 224)."""
    parts = text.lower().split("x")
    if not all(p.isdecimal() and int(p) for p in parts):
        raise ValueError("--input takes the shape of one example; received "
                         f"{text!r}. Write for example 3x224x224.")
    return tuple(map(int, parts))


def read_map(file: str | None) -> dict[str, Any]:
    """Options `map` and `rules` of `compare` from a JSON file."""
    if file is None:
        return {}
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        given = dict(found)
        rules = [(str(x), str(y)) for x, y in given.pop("rules", [])]
    except (ValueError, TypeError) as error:
        raise ValueError(
            "--map takes a JSON file, {\"name in a\": \"name in b\"} or "
            "{\"to\": name, \"transpose\": axes}, with \"rules\": [[pattern, "
            f"replacement], ...] beside; received {file!r} ({error})."
            ) from error
    return {"map": given, "rules": rules}


def find_loss(text: str) -> Callable:
    """A loss by its name in mgpu, or ``MODULE:NAME``; of a class an instance
    is made."""
    if text not in _LOSSES and ":" not in text:
        raise ValueError(f"unknown loss; received {text!r}. Use one of "
                         f"{', '.join(_LOSSES)}, or MODULE:NAME.")
    loss = _LOSSES.get(text) or find(text)
    return loss() if inspect.isclass(loss) else loss


# -- data ---------------------------------------------------------------------

class RandomBatches:
    """Batches drawn from a seed, again the same in every loop.

    Inputs are normal; labels are class numbers for `SoftmaxCrossEntropyLoss`
    and for losses that are not mgpu's, else (rows, classes) values that the
    loss accepts: 0 or 1, shares that add up to 1, or normal ones.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, batch_size: int,
                 count: int, loss: Any, seed: int):
        self.shape, self.classes, self.rows = shape, classes, batch_size
        self.count, self.loss, self.seed = count, loss, seed

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number in range(self.count):
            rng = np.random.default_rng([self.seed, number])
            X = rng.standard_normal((self.rows, *self.shape))
            yield X, self._labels(rng)

    def _labels(self, rng: np.random.Generator) -> np.ndarray:
        if isinstance(self.loss, losses.SigmoidBinaryCrossEntropyLoss):
            return rng.integers(0, 2, (self.rows, self.classes)).astype(float)
        if isinstance(self.loss, losses.KLDivLoss):
            return rng.dirichlet(np.ones(self.classes), self.rows)
        if isinstance(self.loss, (losses.L1Loss, losses.L2Loss,
                                  losses.HuberLoss)):
            return rng.standard_normal((self.rows, self.classes))
        return rng.integers(0, self.classes, self.rows).astype("int32")


class Data(NamedTuple):
    batches: Any
    test: Any


def find_data(name: str, shape: tuple[int, ...] | None,
              classes: int | None, batch_size: int, steps: int, loss: Any,
              seed: int, dtype: str, limit: int | None) -> Data:
    """The batches that ``--data`` stands for, and those to test on."""
    if name == "random":
        if shape is None or classes is None:
            raise ValueError("random data needs --input and --classes; "
                             f"received {shape} and {classes}. Write for "
                             "example --input 3x224x224 --classes 1000.")
        return Data(RandomBatches(shape, classes, batch_size, steps, loss,
                                  seed), None)
    if ":" in name and not os.path.isdir(name):
        data = find(name)
        data = data() if callable(data) else data
        is_pair = isinstance(data, tuple) and len(data) == 2
        return Data(*data) if is_pair else Data(data, None)
    known = name in ("digits", "fashion-mnist") or os.path.isdir(name)
    if known and shape is not None and (len(shape) != 3 or shape[0] != 1):
        raise ValueError(f"{name} has grey pictures; received --input "
                         f"{'x'.join(map(str, shape))}. Write 1xHxW.")
    return Data(*datasets.load(name, batch_size, limit, seed,
                               resize=shape[1:] if known and shape else None,
                               dtype=dtype))


# -- mgpu parity --------------------------------------------------------------

def _options(*wanted: Any) -> Callable:
    """Several options at once."""
    def decorate(command: Callable) -> Callable:
        for option in reversed(wanted):
            command = option(command)
        return command
    return decorate


_NETWORKS = _options(
    click.option("--input", "shape", metavar="3x224x224",
                 help="Shape of one example."),
    click.option("--classes", type=click.IntRange(1), metavar="N",
                 help="Number of classes, or of outputs."),
    click.option("--batch-size", type=click.IntRange(1), default=8,
                 show_default=True),
    click.option("--loss", default="softmax-ce", show_default=True,
                 metavar="|".join(_LOSSES) + "|MODULE:NAME"),
    click.option("--optimizer", default="sgd", show_default=True,
                 help="As for mgpu.Trainer."),
    click.option("--optimizer-params", metavar="NAME=VALUE,...|JSON",
                 help="For example learning_rate=0.1,momentum=0.9."),
    click.option("--traceback", is_flag=True,
                 help="Show where an error comes from."))


_TRAINING = _options(
    click.option("--devices", default="1", show_default=True,
                 metavar="N|cpu:0,cpu:1"),
    click.option("--steps", type=click.IntRange(1),
                 help=f"Default: {_STEPS}; for accuracies all batches."),
    click.option("--dtype", default="float64", show_default=True,
                 type=click.Choice(["float64", "float32"])),
    click.option("--batch-norm", default="per_device", show_default=True,
                 type=click.Choice(["per_device", "average", "sync"])),
    click.option("--native", is_flag=True, help="Layers with their "
                 "framework's own arithmetic: torch's batch norm as without "
                 "mgpu."),
    click.option("--semantics", type=click.Choice(["gluon", "torch"]),
                 default="gluon", show_default=True,
                 help="Whose update rules."),
    click.option("--dropout", type=click.Choice(["masks", "off"]),
                 default="masks", show_default=True,
                 help="The same masks for both sides, or none at all."),
    click.option("--data", metavar="random|digits|fashion-mnist|FOLDER|"
                 "MODULE:NAME", help="Default: random; for accuracies "
                 "digits. MODULE:NAME: batches (X, y), or a function that "
                 "returns them, or (training, test) batches."),
    click.option("--limit", type=click.IntRange(1), metavar="N",
                 help="Only the first N examples of a data set."),
    click.option("--seed", type=click.IntRange(0), default=0,
                 show_default=True,
                 help="Of the weights, the data and the masks."))


@click.command(cls=_Command)
@click.argument("a", metavar="MODULE:FACTORY|TRACE")
@click.argument("b", metavar="MODULE:FACTORY", required=False)
@click.option("--kwargs-a", metavar="JSON", help="Keyword arguments of the "
              "first factory.")
@click.option("--kwargs-b", metavar="JSON", help="Of the second.")
@_NETWORKS
@_TRAINING
@click.option("--mode", type=click.Choice(comparison.MODES),
              default="lockstep", show_default=True,
              help="lockstep: the proof, step by step; free: both run on "
              "their own; accuracy: several seeds, by their test accuracy.")
@click.option("--invariance", is_flag=True, help="Compare one network with "
              "itself on several numbers of devices, --devices 1,2,4.")
@click.option("--tolerance", type=float, help="Largest relative difference "
              "that is the same. Default: 1e-10 in float64, 1e-5 in float32.")
@click.option("--weights", type=click.Choice(["a", "b", "own"]), default="a",
              show_default=True, help="Whose values both start from.")
@click.option("--map", "map_file", metavar="FILE", type=click.Path(
    exists=True, dir_okay=False), help="JSON: which parameter of a is which "
    "of b.")
@click.option("--b-semantics", type=click.Choice(["gluon", "torch"]),
              help="Other update rules for the second side.")
@click.option("--b-optimizer", help="Another optimiser for the second side.")
@click.option("--b-optimizer-params", metavar="NAME=VALUE,...|JSON")
@click.option("--b-devices", metavar="N|cpu:0,cpu:1")
@click.option("--seeds", type=click.IntRange(1), default=5,
              show_default=True, metavar="N",
              help="Accuracy mode: trainings of each side.")
@click.option("--report", "report_file", metavar="FILE", type=click.Path(
    dir_okay=False), help="Write a page for the browser, .html.")
@click.option("--json", "json_file", metavar="FILE", type=click.Path(
    dir_okay=False), help="Write all differences.")
@click.option("--plan", is_flag=True,
              help="Print which parameter was matched with which.")
@click.pass_context
def parity(ctx: click.Context, a: str, b: str | None, *,
           report_file: str | None, json_file: str | None, plan: bool,
           invariance: bool, traceback: bool, **options: Any) -> None:
    """Compare how two networks train, of MXNet/Gluon, of PyTorch, or one of
    each.

    MODULE:FACTORY is a function that makes a network, in a module of the
    current folder or an installed one; FILE.py:FACTORY works too. TRACE is a
    file of `mgpu trace record`, which stands for the first network.

    Exit status: 0, they train the same; 1, they do not; 2, they could not be
    compared.
    """
    for file, option in ((report_file, "--report"), (json_file, "--json")):
        if file is not None:
            files.check_folder(file, option)
    if report_file is not None:
        report.check_packages()
    given = {name for name in options if ctx.get_parameter_source(name)
             is ParameterSource.COMMANDLINE}
    if (b is None) is not invariance:
        raise ValueError(
            "two networks are compared, or with --invariance one; received "
            f"{a}{'' if b is None else ' and ' + b}. Write MODULE:FACTORY "
            f"{'once' if invariance else 'twice'}.")
    if invariance:
        if report_file is not None:
            raise ValueError("--invariance has no page; received --report. "
                             "Use --json.")
        found = _invariance(a, given, options)
        click.echo(str(found))
        same = found.exact
    else:
        found = _compare_trace(a, b, given, options) \
            if os.path.isfile(a) else _compare(a, b, options)
        report.print_result(found, Console(), plan=plan)
        same = found.same
    if report_file is not None:
        report.write_html(found, report_file, command=ctx.meta["mgpu.command"])
        click.echo(f"written: {report_file}")
    if json_file is not None:
        report.write_json(found, json_file)
        click.echo(f"written: {json_file}")
    ctx.exit(0 if same else 1)


_COMMON = ("optimizer", "semantics", "batch_norm", "native", "dtype",
           "dropout", "seed", "tolerance", "weights", "mode")


def _common(options: dict[str, Any]) -> dict[str, Any]:
    """What every kind of comparison takes, parsed."""
    return {**{name: options[name] for name in _COMMON if name in options},
            "optimizer_params": parse_params(options["optimizer_params"]),
            "loss": find_loss(options["loss"])}


def _data(options: dict[str, Any], loss: Any) -> Data:
    accuracy = options.get("mode") == "accuracy"
    shape = options["shape"] and parse_shape(options["shape"])
    name = options["data"] or ("digits" if accuracy else "random")
    found = find_data(name, shape, options["classes"], options["batch_size"],
                      options["steps"] or _STEPS, loss, options["seed"],
                      options["dtype"], options["limit"])
    if accuracy and found.test is None:
        raise ValueError(
            f"accuracies need examples to test on; received --data {name}. "
            "Use a data set, or MODULE:NAME of a function that returns "
            "(training, test) batches.")
    return found


def _steps(options: dict[str, Any]) -> int | None:
    return options["steps"] or (
        None if options.get("mode") == "accuracy" else _STEPS)


def _compare(a: str, b: str, options: dict[str, Any]) -> comparison.Result:
    other: dict[str, Any] = {
        "semantics": options["b_semantics"],
        "optimizer": options["b_optimizer"],
        "optimizer_params": parse_params(options["b_optimizer_params"],
                                         "--b-optimizer-params"),
        "devices": options["b_devices"]
        and parse_devices(options["b_devices"])}
    devices = parse_devices(options["devices"])
    mapping = read_map(options["map_file"])
    with _engines():
        nets = factory(a, options["kwargs_a"], "--kwargs-a"), \
            factory(b, options["kwargs_b"], "--kwargs-b")
        common = _common(options)
        data = _data(options, common["loss"])
        with _progress() as progress:
            return comparison.compare(
                nets[0], Side(nets[1], **other), batches=data.batches,
                test=data.test, devices=devices, steps=_steps(options),
                seeds=range(options["seeds"]), progress=progress, **mapping,
                **common)


def _refuse(given: Iterable[str], known: Iterable[str], why: str) -> None:
    wrong = sorted(set(given) - set(known))
    if wrong:
        names = {"shape": "input", "map_file": "map"}
        raise ValueError(f"{why}; received --" + ", --".join(
            names.get(n, n).replace("_", "-") for n in wrong)
            + ". Leave that out.")


def _compare_trace(file: str, b: str, given: Iterable[str],
                   options: dict[str, Any]) -> comparison.Result:
    from mgpu.parity import trace
    ours = {"loss", "optimizer", "optimizer_params", "semantics", "devices",
            "batch_norm", "native", "tolerance"}
    _refuse(given, ours | {"kwargs_b", "map_file"},
            "a trace says itself what was done")
    with _engines():
        net = factory(b, options["kwargs_b"], "--kwargs-b")
        wanted = {**_common(options),
                  "devices": parse_devices(options["devices"])}
        with _progress() as progress:
            return trace.compare_trace(
                file, net, progress=progress, **read_map(options["map_file"]),
                **{name: wanted[name] for name in ours & set(given)})


def _invariance(a: str, given: Iterable[str], options: dict[str, Any]) -> Any:
    from mgpu.parity.invariance import invariance
    _refuse({name for name in given if name.startswith("b_")}
            | set(given) & {"kwargs_b", "map_file", "mode", "weights",
                            "seeds"}, (),
            "--invariance compares one network with itself")
    text = options["devices"] if "devices" in given else "1,2,4,8"
    try:
        devices = [int(entry) for entry in text.split(",")]
    except ValueError:
        raise ValueError("--invariance takes numbers of devices; received "
                         f"--devices {text}. Write for example 1,2,4."
                         ) from None
    with _engines():
        net = factory(a, options["kwargs_a"], "--kwargs-a")
        common = _common(options)
        del common["mode"], common["weights"]
        with _progress() as progress:
            return invariance(
                net, batches=_data(options, common["loss"]).batches,
                devices=devices, steps=_steps(options), progress=progress,
                **common)


@contextlib.contextmanager
def _engines() -> Iterator[None]:
    """The engines are loaded; an import that fails in the block says also
    why one of them was not."""
    missing = _load_engines()
    try:
        yield
    except ImportError as error:
        if missing:
            raise ImportError(f"{error} {' '.join(missing.values())}"
                              ) from error
        raise


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error, if somebody looks at it."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm
    with tqdm(total=0, desc="steps", leave=False) as bar:
        def progress(done: int, steps: int) -> None:
            bar.total = steps
            bar.update(done - bar.n)
        yield progress


# -- mgpu trace ---------------------------------------------------------------

@click.group()
def trace() -> None:
    """Keep one side of a comparison in a file, to compare with it later or
    on another machine: `mgpu parity FILE MODULE:FACTORY`."""


@trace.command(cls=_Command)
@click.argument("net", metavar="MODULE:FACTORY")
@click.option("-o", "--output", "file", required=True, metavar="FILE",
              type=click.Path(dir_okay=False))
@click.option("--kwargs", metavar="JSON", help="Keyword arguments of the "
              "factory.")
@click.option("--keep", metavar="1,5,20", help="Numbers of the steps to "
              "keep. Default: the first, the last, and those at which the "
              "rate changes.")
@_NETWORKS
@_TRAINING
def record(net: str, file: str, kwargs: str | None, keep: str | None,
           traceback: bool, **options: Any) -> None:
    """Train a network and keep what its steps show."""
    from mgpu.parity import trace as traces
    try:
        kept = None if keep is None else [int(x) for x in keep.split(",")]
    except ValueError:
        raise ValueError("--keep takes numbers of steps; received "
                         f"{keep!r}. Write for example 1,5,20.") from None
    files.check_folder(file, "--output")
    with _engines():
        network = factory(net, kwargs, "--kwargs")
        common = _common(options)
        with _progress() as progress:
            done = traces.record(
                network, batches=_data(options, common["loss"]).batches,
                file=file, keep=kept, steps=_steps(options),
                devices=parse_devices(options["devices"]), progress=progress,
                **common)
    click.echo(f"written: {done.file} ({done.size / 1e6:.1f} MB, {done.steps}"
               f" steps, kept: {', '.join(map(str, done.kept))})")


# -- mgpu lint ----------------------------------------------------------------

@click.command(cls=_Command)
@click.argument("net", metavar="MODULE:FACTORY")
@click.option("--kwargs", metavar="JSON", help="Keyword arguments of the "
              "factory.")
@_NETWORKS
@click.option("--examples", type=click.IntRange(1), metavar="N",
              help="Size of the training set.")
@click.pass_context
def lint(ctx: click.Context, net: str, kwargs: str | None,
         shape: str | None, classes: int | None, batch_size: int,
         loss: str, optimizer: str, optimizer_params: str | None,
         examples: int | None, traceback: bool) -> None:
    """Tell what differs between Gluon and PyTorch for one Gluon network and
    its training: with --input also what depends on shapes."""
    given = ctx.get_parameter_source("batch_size") \
        is ParameterSource.COMMANDLINE
    sample = None if shape is None else np.random.default_rng(0) \
        .standard_normal((batch_size, *parse_shape(shape)))
    with _engines():
        module = importlib.import_module("mgpu.parity.lint")
        findings = module.lint(
            factory(net, kwargs, "--kwargs"), sample=sample,
            optimizer=optimizer,
            optimizer_params=parse_params(optimizer_params),
            loss=find_loss(loss), examples=examples,
            batch_size=batch_size if given else None)
    print_findings(findings, Console())


def print_findings(findings: Iterable[Any], console: Console) -> None:
    """A paragraph for each `lint.Finding`, nothing shortened."""
    from rich.padding import Padding
    from rich.text import Text
    findings = list(findings)
    for finding in findings:
        console.print(Text(f"{finding.rule}: {finding.where}", "bold"))
        console.print(Padding(Text(finding.text), (0, 0, 0, 2)))
        console.print(Padding(Text(f"torch: {finding.torch}"), (0, 0, 0, 2)))
    click.echo(f"{len(findings)} difference"
               f"{'s' * (len(findings) != 1)} to PyTorch")
