"""Options that several commands have, and what is written in them."""
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click import Choice, IntRange, option
from click.core import ParameterSource

import mgpu
from mgpu import backends
from mgpu.nn import losses
from mgpu.utils import files

#: losses of `--loss` by name
LOSSES = {
    "softmax-ce": losses.SoftmaxCrossEntropyLoss, "l2": losses.L2Loss,
    "l1": losses.L1Loss, "huber": losses.HuberLoss,
    "sigmoid-bce": losses.SigmoidBinaryCrossEntropyLoss,
    "kl-div": losses.KLDivLoss}
#: the largest number of devices
MOST = 1024
#: the default number of steps of a comparison
STEPS = 20


# -- what is written in an option ---------------------------------------------

def parse_devices(text: str, name: str = "--devices") -> list[int] | list[str]:
    """Parse an option that names devices.

    Parameters
    ----------
    text : str
        ``"1,2"``: device counts, a run for each; ``"cpu:0,cpu:1"``: devices
        of one run.
    name : str
        The name of the option, for errors.

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
        raise ValueError(f"{name} has an empty entry" + usage)
    if not numbers:
        return entries
    if len(numbers) < len(entries):
        raise ValueError(f"{name} takes numbers or devices, not both" + usage)
    if len(set(numbers)) < len(numbers) \
            or not all(0 < number <= MOST for number in numbers):
        raise ValueError(f"{name} takes each number once, from 1 to {MOST}"
                         + usage)
    return numbers


def parse_runs(text: str, name: str = "--devices") -> list[Any]:
    """`parse_devices` for a command of several runs: the number of devices,
    or the list of them, of each run."""
    found = parse_devices(text, name)
    return found if isinstance(found[0], int) else [found]


def one_run(text: str, name: str = "--devices") -> Any:
    """`parse_devices` for a command that runs once: ``"2"`` means two
    devices, an int, and ``"cpu:0,cpu:1"`` these, a list."""
    found = parse_devices(text, name)
    if isinstance(found[0], str) or len(found) == 1:
        return found if isinstance(found[0], str) else found[0]
    raise ValueError(f"{name} takes a number or devices here; received "
                     f"{text!r}. Write for example 2 or cpu:0,cpu:1.")


def parse_counts(text: str, name: str, separator: str = ",",
                 usage: str = "numbers, from 1 on", example: str = "1,2,4"
                 ) -> list[int]:
    """``"1,2,4"`` as [1, 2, 4]."""
    entries = [entry.strip() for entry in text.split(separator)]
    if not all(e.isdecimal() and int(e) for e in entries):
        raise ValueError(f"{name} takes {usage}; received {text!r}. Write "
                         f"for example {example}.")
    return [int(e) for e in entries]


def parse_shape(text: str, name: str = "--input") -> tuple[int, ...]:
    """``"3x224x224"`` as (3, 224, 224)."""
    return tuple(parse_counts(text.lower(), name, "x", "the shape of one "
                              "example", "3x224x224"))


def parse_object(text: str, name: str) -> dict[str, Any]:
    """The dict that a JSON object stands for."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} takes JSON; received {text!r} ({error}). "
                         "Quote names with \" and the whole with '."
                         ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} takes a JSON object; received {text!r}. "
                         f"Write for example {name} '{{\"classes\": 10}}'.")
    return found


def parse_params(text: str | None, name: str = "--optimizer-params"
                 ) -> dict[str, Any] | None:
    """``"learning_rate=0.1,momentum=0.9"`` or a JSON object, as a dict. A
    value that is not JSON is taken as text."""
    if text is None:
        return None
    if text.lstrip().startswith("{"):
        return parse_object(text, name)
    found = {}
    for entry in filter(None, text.split(",")):
        key, equals, value = map(str.strip, entry.partition("="))
        if not equals or not key:
            raise ValueError(
                f"{name} takes NAME=VALUE,NAME=VALUE or a JSON object; "
                f"received {text!r}. Write a list of values as JSON.")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def read_map(file: str | None, name: str = "--map") -> dict[str, Any]:
    """Options `map` and `rules` of `compare` from a JSON file."""
    if file is None:
        return {}
    try:
        given = dict(json.loads(Path(file).read_text(encoding="utf-8")))
        rules = [(str(x), str(y)) for x, y in given.pop("rules", [])]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{name} takes a JSON file with an object, {{\"name in a\": "
            "\"name in b\"} or {\"name in a\": {\"to\": name, ...}} (see "
            "docs/guide/parity-maps.md); its entry \"rules\" may be "
            "[[pattern, replacement], ...]; "
            f"received {file!r} ({error}).") from error
    return {"map": given, "rules": rules}


class Parsed(click.ParamType):
    """The type of an option whose text ``parse(text, option)`` reads."""

    name = "text"

    def __init__(self, parse: Callable[[str, str], Any]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None,
                ctx: click.Context | None) -> Any:
        if param is None or not isinstance(value, str):
            return value
        return self._parse(value, param.opts[-1])


class Renamed(click.Option):
    """An option whose `former` names still work, and are not shown."""

    def __init__(self, *names: Any, former: Sequence[str], **settings: Any
                 ) -> None:
        super().__init__(*names, **settings)
        self._former = former

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, *self._former]
        super().add_to_parser(parser, ctx)
        self.opts = shown


# -- declarations -------------------------------------------------------------

#: what `declare` declares: type, default value, metavar and help by name
_OPTIONS: dict[str, tuple[Any, Any, str | None, str]] = {
    "--backend": (
        Choice([*backends.NAMES, *backends.ALIASES, "both"]), None,
        "|".join([*backends.NAMES, "both"]), "The backend to run on. Default: "
        "$MGPU_BACKEND, else the one that is installed, mxnet where both "
        "are."),
    "--dtype": (Choice(["float32", "float64"]), "float32", None,
                "Type of the data and of the parameters."),
    "--seed": (IntRange(0), 0, None, "Seed of all random numbers: initial "
               "weights, data, their order, dropout masks."),
    "--limit": (IntRange(1), None, "N", "Use only the first N training and "
                "the first N test examples of a data set."),
    # the network of a comparison, its loss and its optimizer
    "--input": (Parsed(parse_shape), None, "3x224x224",
                "The shape of one example."),
    "--classes": (IntRange(1), None, "N",
                  "The number of classes, or of outputs."),
    "--batch-size": (IntRange(1), 8, None,
                     "Examples of a batch, over all devices."),
    "--loss": (str, "softmax-ce", "|".join(LOSSES) + "|MODULE:NAME",
               "The loss, by its name or as a function or class."),
    "--optimizer": (str, "sgd", None,
                    "The optimizer, by its name as for mgpu.Trainer."),
    "--optimizer-params": (
        Parsed(parse_params), None, "NAME=VALUE,...|JSON", "Settings of the "
        "optimizer, for example learning_rate=0.1,momentum=0.9."),
    "--devices": (Parsed(one_run), "1", "N|cpu:0,cpu:1",
                  "The number of devices, or their names."),
    # how it is trained
    "--steps": (IntRange(1), STEPS, None, "The number of training steps."),
    "--batch-norm": (Choice(["per_device", "average", "sync"]), "per_device",
                     None, "How batch statistics are made on several "
                     "devices."),
    "--native": (bool, False, None, "Let layers, such as torch's batch norm, "
                 "compute as their framework does without mgpu."),
    "--semantics": (Choice(["gluon", "torch"]), "gluon", None, "The framework "
                    "whose update rules the optimizer follows."),
    "--dropout": (Choice(["masks", "off"]), "masks", None, "masks gives both "
                  "networks the same dropout masks; off drops nothing."),
    "--data": (str, "random", "random|digits|fashion-mnist|FOLDER|MODULE:NAME",
               "The data. MODULE:NAME stands for batches (X, y), for a "
               "function that returns them, or for (training, test) "
               "batches."),
    # what a verdict means
    "--allow-mxnet-float32": (
        bool, False, None, "Exit with 0 too where nothing differs but what "
        "MXNet computes in float32."),
}
NETWORK = ("--input", "--classes", "--batch-size", "--loss", "--optimizer",
           "--optimizer-params")
TRAINING = ("--steps", "--dtype", "--batch-norm", "--native", "--semantics",
            "--dropout", "--data", "--limit", "--seed")


def declare(*names: str, second: bool = False, **defaults: Any) -> Callable:
    """The options with these names as one decorator. `defaults`: values of
    parameters that are others in this command. `second`: the options that
    hold for the second network only, ``--b-NAME``."""
    def decorate(command: Callable) -> Callable:
        for name in reversed(names):
            kind, default, metavar, text = _OPTIONS[name]
            default = defaults.get(name[2:].replace("-", "_"), default)
            declared = option(name, type=kind, is_flag=kind is bool,
                              default=default, metavar=metavar, help=text)
            if second:
                declared = option(
                    "--b-" + name[2:], type=kind, metavar=metavar,
                    help=f"What the second network has instead of {name}.")
            command = declared(command)
        return command
    return decorate


@dataclass
class Outputs:
    """The files that a command writes, by their form, or None."""

    json: str | None = None
    figure: str | None = None
    timeline: str | None = None
    page: str | None = None
    network: str | None = None
    #: where JSON goes instead of text; None: nowhere
    stdout: Any = None

    def show(self, data: Any, text: Callable[[], Any]) -> None:
        """Print ``text()``, or `data` as JSON; write the file of `data`."""
        if self.json is not None:
            files.write_json(self.json, data)
        if self.stdout is None:
            text()
        else:
            click.echo(files.json_text(data), self.stdout, nl=False)

    def say_written(self) -> None:
        """Print the names of the files that were written."""
        for path in (self.json, self.figure, self.timeline, self.page):
            if path is not None:
                click.echo(f"written: {path}")


#: the forms of `Outputs`: extensions, former option, what is in the file
_FORMS = {
    "json": ((".json",), "--json", "all results"),
    "figure": ((".png", ".svg"), "--plot", "a figure"),
    "timeline": ((".timeline.json",), "--trace",
                 "when each device did what, for ui.perfetto.dev"),
    "page": ((".html",), "--report", "a page for the browser"),
    "network": ((".py", ".safetensors", ".params", ".pt2"), "",
                "the network, see above")}


def _form_of(forms: Sequence[str]) -> Parsed:
    """The type of an option whose file has one of `forms`: (form, file)."""
    known = {end: form for form in forms for end in _FORMS[form][0]}

    def parse(text: str, name: str) -> tuple[str, str]:
        found = max(filter(text.endswith, known), key=len, default="")
        if not found:
            raise ValueError(f"{name} takes a file that ends in "
                             f"{', '.join(known)}; received {text!r}.")
        return known[found], text
    return Parsed(parse)


def outputs(*forms: str, flag: bool = False) -> Callable:
    """The options --output and --format, which the command gets as
    ``outputs``, an `Outputs`; and their former names, for one version.

    With ``--format json`` all that the command prints goes to standard error,
    so that standard output is JSON and nothing else. `flag`: the former
    ``--json`` was a flag.
    """
    endings = ", ".join(f"{' or '.join(_FORMS[form][0])} ({_FORMS[form][2]})"
                        for form in forms)
    declared = [option(
        "-o", "--output", "named", multiple=True, metavar="FILE",
        type=_form_of(forms), required="network" in forms, help="File to "
        f"write. The extension selects the format: {endings}."
        + " May be given once for each." * (len(forms) > 1))]
    if "json" in forms:
        declared.append(option(
            "--format", "printed", type=Choice(["text", "json"]),
            default="text", help="Form of standard output."))
    former = [(form, _FORMS[form][1]) for form in forms if _FORMS[form][1]
              and not (flag and form == "json")]
    declared += [option(name, f"former_{form}", hidden=True)
                 for form, name in former]
    if flag:
        declared.append(option("--json", "printed", flag_value="json",
                               hidden=True))

    def decorate(command: Callable) -> Callable:
        @functools.wraps(command)
        def run(*arguments: Any, named: Sequence[tuple[str, str]],
                printed: str = "text", **options: Any) -> Any:
            given = [*named, *(
                (form, file) for form, _ in former
                if (file := options.pop(f"former_{form}")) is not None)]
            wanted = Outputs(stdout=sys.stdout if printed == "json" else None)
            for form, file in given:
                if getattr(wanted, form) is not None:
                    raise ValueError(
                        f"--output takes one file with {_FORMS[form][2]}; "
                        f"received {getattr(wanted, form)!r} and {file!r}.")
                files.check_folder(file, "--output")
                setattr(wanted, form, file)
            with contextlib.redirect_stdout(sys.stderr) if wanted.stdout \
                    else contextlib.nullcontext():
                return command(*arguments, outputs=wanted, **options)
        for add in reversed(declared):
            run = add(run)
        return run
    return decorate


def kwargs(which: str = "", name: str = "--kwargs") -> Callable:
    """Keyword arguments of a factory."""
    return option(name, metavar="JSON", default="{}", show_default=False,
                  type=Parsed(parse_object),
                  help=f"Keyword arguments of the {which}factory.")


def given(ctx: click.Context) -> set[str]:
    """The parameters that the user has written."""
    return {name for name in ctx.params if ctx.get_parameter_source(name)
            is ParameterSource.COMMANDLINE}


def engines(backend: str | None) -> list[str]:
    """The names of the backends that ``--backend`` means; they are loaded."""
    if backend == "both":
        return list(backends.NAMES)
    if backend is None:
        return [mgpu.get_backend().name]
    with mgpu.using_backend(backend) as engine:
        return [engine.name]
