"""A comparison for people and for programs: terminal, HTML, JSON."""
import html
import importlib.util
import io
import math
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mgpu import doctor, files, plotting
from mgpu.parity.comparison import Result
from mgpu.parity.measure import STAGES, Gap, layer_of

Table = tuple[list[str], list[list[str]]]

_STAGE_WORDS = {
    "initial": "initial values", "layer": "output of a layer",
    "output": "outputs", "loss": "loss of each example",
    "gradient": "gradients", "devices": "copies on the devices",
    "weight": "updated weights", "memory": "the optimiser's memory",
    "statistic": "running statistics"}
_TEST_WORDS = {
    "means": "means of a and b", "deviations": "standard deviations",
    "statistic": "Welch's t", "df": "degrees of freedom",
    "p": "p-value (Welch)", "mann_whitney_p": "p-value (Mann and Whitney)",
    "alpha": "different below a p-value of",
    "detectable": "difference that is found",
    "power": "with a probability of", "rows": "test examples"}
_FIRST = {
    "initial": "the initial value of", "layer": "the output of layer",
    "output": "the output", "loss": "the loss of an example",
    "gradient": "the gradient of", "devices": "what the devices hold of",
    "weight": "the updated weight", "memory": "the optimiser's memory",
    "statistic": "the running statistic"}
_STATUS = ("different", "rounding", "zero", "same")     # the worst first
_MODES = {"lockstep": "lock-step", "free": "free run",
          "accuracy": "accuracies"}
# In a chart a stage has its colour and its marker, whatever else is there.
_COLOURS = (plotting._INK, plotting._INK, *plotting._PALETTE[:3],
            plotting._GREY, *plotting._PALETTE[3:])
_MARKERS = "*Xos^Pv<D"
#: the colours that matplotlib draws with, as variables of the style sheet,
#: which has other values for dark screens
_VARIABLES = {
    plotting._INK: "ink", plotting._GREY: "grey", "#e6e6e6": "grid",
    **dict(zip(plotting._PALETTE,
               ("blue", "orange", "green", "purple", "sky", "amber")))}


# -- what every form of the report says ---------------------------------------

def sentence(result: Result) -> str:
    """The verdict, in a sentence."""
    steps, tolerance = result.settings.get("steps"), \
        result.settings.get("tolerance")
    times = f"{steps} step{'s' * (steps != 1)}" if steps else "all steps"
    each = "the one step" if steps == 1 else f"each of {times}"
    if result.mode == "accuracy":
        seeds = len(result.curves.get("a", ()))
        return f"Over {seeds} seeds of each side, the test accuracies " + (
            "differ by no more than chance explains." if result.same
            else "differ by more than chance explains.")
    if result.mode == "free":
        return f"Left alone for {times}, the sides part " + (
            "no further than rounding alone takes them." if result.same
            else "further than rounding alone takes them.")
    if result.first is not None:
        gap = result.first
        what = f"{_FIRST[gap.stage]} {gap.name}".rstrip()
        return (f"Started alike before {each}, the sides first "
                f"differ in step {gap.step}, in {what}.")
    worst = max((g.relative for g in result.gaps
                 if g.status != "rounding"), default=0.0)
    larger = sum(g.status == "rounding" for g in result.gaps)
    return (f"Started alike before {each}, the sides computed the "
            f"same, up to a relative {worst:.1e} ({tolerance:g} is "
            "tolerated)" + (f" and {larger} larger difference"
                            f"{'s' * (larger != 1)} that rounding explains."
                            if larger else "."))


def first_rows(gap: Gap) -> list[tuple[str, str]]:
    """The first difference, as (name, value)."""
    rows = [("step", str(gap.step)), ("stage", _STAGE_WORDS[gap.stage])]
    if gap.stage not in ("output", "loss"):
        rows.append(("layer", _layer(gap) or "(the network)"))
    if gap.name and gap.stage != "layer":
        rows.append(("tensor", gap.name))
    rows.append(("index", _index(gap)))
    rows += [("a", f"{gap.a:.17g}"), ("b", f"{gap.b:.17g}"),
             ("absolute difference", f"{gap.absolute:.3e}"),
             ("relative difference", f"{gap.relative:.3e} (of "
              f"{gap.scale:.3e}, the largest value)")]
    if gap.own is not None:
        rows.append(("rounding alone", f"{gap.own:.3e} (what a change of the "
                     "last bits does to a, relative)"))
    return rows


def location_rows(location: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The first layer whose output differs, as (name, value)."""
    rows, layers = [], [location.get("a"), location.get("b")]
    for side, layer in zip("ab", layers):
        rows.append((f"layer of {side}", "none" if layer is None else
                     f"{layer['path'] or '(the network)'}, {layer['kind']}"))
    if None not in layers:
        one, two = (layer["options"] for layer in layers)
        for name in {**one, **two}:
            x, z = one.get(name), two.get(name)
            if x != z:
                rows.append((f"its {name}", f"{x!r} in a, {z!r} in b"))
    rows.append(("its input", "agrees: the layer itself makes the difference"
                 if location.get("inputs_agree") else
                 "differs already: a function before the layer makes the "
                 "difference"))
    return rows


def stage_table(result: Result) -> Table:
    """The largest relative difference of each stage."""
    rows = []
    for stage, gap in result.worst.items():
        counts = {status: sum(g.stage == stage and g.status == status
                              for g in result.gaps) for status in _STATUS}
        rows.append([stage, f"{gap.relative:.1e}", gap.name or "-",
                     str(gap.step), ", ".join(
                         f"{n} {status}" for status, n in counts.items()
                         if n)])
    return ["stage", "relative", "tensor", "step", "status"], rows


def layer_table(result: Result) -> Table:
    """The largest relative difference of each layer and stage, over all
    steps, in the order of the layers."""
    order, worst, stages = _by_layer(result)
    rows = [[str(i), name or "(the network)", *(
        f"{worst[name, stage]:.1e}" if (name, stage) in worst else "-"
        for stage in stages)] for i, name in enumerate(order, 1)]
    return ["number", "layer", *stages], rows


def plan_table(result: Result) -> Table:
    plan = result.plan
    rows = [[p.a, p.b, "as it is" if p.axes is None else
             f"transposed to {p.axes}"] for p in plan.pairs]
    for side, names in plan.left.items():
        rows += [[name, "-", "left alone"] if side == "a"
                 else ["-", name, "left alone"] for name in names]
    return ["a", "b", "layout"], rows


def side_table(result: Result) -> Table:
    a, b = result.sides.get("a", {}), result.sides.get("b", {})
    return ["setting", "a", "b"], [
        [name.replace("_", " "), _text(a.get(name)), _text(b.get(name))]
        for name in {**a, **b}]


def accuracy_rows(result: Result) -> list[tuple[str, str]]:
    """The test of the accuracies, as (name, value)."""
    test = result.curves.get("test") or {}
    test = test._asdict() if hasattr(test, "_asdict") else test
    rows = [(f"each seed of {side}", _text(list(result.curves[side])))
            for side in "ab" if result.mode == "accuracy"
            and side in result.curves]
    return rows + [
        (_TEST_WORDS.get(name, name.replace("_", " ")), _text(value))
        for name, value in dict(test).items()]


def versions(result: Result) -> list[tuple[str, str]]:
    """The software that made the result, as far as it is running now."""
    engines = dict.fromkeys(side["engine"] for side in result.sides.values()
                            if "engine" in side)
    return [*doctor.versions().items(),
            *(tuple(f"{engine} ".split(" ", 1)) for engine in engines),
            ("platform", platform.platform())]


def _layer(gap: Gap) -> str:
    if gap.stage == "layer":
        return gap.name
    name = layer_of(gap.name)
    return layer_of(name) if gap.stage == "memory" else name


def _index(gap: Gap) -> str:
    return str(list(gap.index)) if gap.index else "the value"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _by_layer(result: Result
              ) -> tuple[list[str], dict[tuple[str, str], float], list[str]]:
    worst: dict[tuple[str, str], float] = {}
    for gap in result.gaps:
        if gap.name and gap.stage not in ("output", "layer"):
            key = _layer(gap), gap.stage
            worst[key] = max(worst.get(key, 0.0), gap.relative)
    named = {name for name, _ in worst}
    order = [name for name in dict.fromkeys(
        layer_of(pair.a) for pair in result.plan.pairs) if name in named]
    order += sorted(named - set(order))
    return order, worst, [s for s in STAGES if any(
        stage == s for _, stage in worst)]


# -- the terminal -------------------------------------------------------------

def print_result(result: Result, console: Any = None, *,
                 plan: bool = False) -> None:
    """Print a result as tables; no value is shortened, long ones wrap.

    Parameters
    ----------
    result : Result
    console : rich.console.Console, optional
        Default: standard output.
    plan : bool
        Which parameter was matched with which, all of them.

    Raises
    ------
    ImportError
        The package rich is not installed.
    """
    try:
        from rich.console import Console
        from rich.table import Table as Grid
        from rich.text import Text
    except ImportError as error:
        raise ImportError(f"a table in the terminal needs rich ({error}). "
                          "Run pip install 'mgpu[cli]', or print(result)."
                          ) from error
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

    def pairs(title: str, rows: Sequence[tuple[str, str]]) -> None:
        show(title, style="bold")
        drawn = Grid.grid(padding=(0, 2))
        drawn.add_column(no_wrap=True)
        drawn.add_column(overflow="fold")
        for name, value in rows:
            drawn.add_row("  " + name, Text(value))
        show(drawn)

    show(f"{result.verdict.upper()} ({_MODES[result.mode]})",
         style="bold green" if result.same else "bold red")
    show(sentence(result))
    for name, side in result.sides.items():
        show(f"{name}: " + ", ".join(_text(side[key]) for key in (
            "network", "engine", "devices", "optimizer", "batch_norm")
            if side.get(key)))
    if result.first is not None:
        pairs("First difference", first_rows(result.first))
    if result.location:
        pairs("First layer whose output differs",
              location_rows(result.location))
    if result.causes:
        show("Likely causes", style="bold")
        for number, cause in enumerate(result.causes, 1):
            show(f"  {number}. {cause}")
    if accuracy_rows(result):
        pairs("Test accuracy", accuracy_rows(result))
    if result.gaps:
        show("The worst of each stage", style="bold")
        grid(stage_table(result), ("relative", "step"))
    lines = result.plan.lines()
    if result.plan.pairs:
        show(lines[0] + ("" if plan else "; --plan shows them"), style="red"
             if result.plan.confirmed is False else "")
        if plan:
            grid(plan_table(result))
    for note in dict.fromkeys((*result.plan.notes, *result.notes)):
        show(f"note: {note}")


# -- JSON ---------------------------------------------------------------------

def write_json(result: Any, file: files.FilePath) -> None:
    """Write ``result.to_dict()``, of a `Result` or another report, whole or
    not at all.

    JSON has no number for infinity or NaN: they are the strings "Infinity",
    "-Infinity" and "NaN". Tuples become lists.
    """
    files.write_json(file, _plain(result.to_dict()))


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


# -- HTML ---------------------------------------------------------------------

def write_html(result: Result, file: files.FilePath, *,
               command: str | None = None) -> None:
    """Write a page that needs nothing else: no network, no other file.

    Parameters
    ----------
    result : Result
    file : str or path
        Replaced when the page is complete.
    command : str, optional
        What made the result, for the reader to repeat.

    Raises
    ------
    ImportError
        Jinja2 or matplotlib is not installed.
    """
    page = to_html(result, command=command)
    with files.replacing(file) as part:
        part.write(page)


def check_packages() -> None:
    """ImportError where a page could not be made, before the work."""
    missing = [name for name in ("jinja2", "matplotlib")
               if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"an HTML report needs {' and '.join(missing)}. "
                          "Run pip install 'mgpu[report]'.")


def to_html(result: Result, *, command: str | None = None) -> str:
    """The page of `write_html`."""
    check_packages()
    from importlib.resources import files as resources

    import jinja2
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        resources("mgpu.parity").joinpath("report.html.j2").read_text(
            encoding="utf-8"))
    return template.render(
        result=result, mode=_MODES[result.mode], sentence=sentence(result),
        first=first_rows(result.first) if result.first else [],
        location=location_rows(result.location) if result.location else [],
        charts=_charts(result), accuracy=accuracy_rows(result),
        stages=stage_table(result), layers=layer_table(result),
        plan=plan_table(result), sides=side_table(result),
        words={stage: _STAGE_WORDS[stage] for stage in result.worst},
        settings=[(k.replace("_", " "), _text(v))
                  for k, v in result.settings.items()],
        versions=versions(result), command=command)


def _charts(result: Result) -> list[dict[str, str]]:
    """The charts of the mode: title, SVG."""
    charts = []
    if result.mode == "accuracy":
        charts.append(("Test accuracy of each seed", _draw_accuracies(result)))
    if result.mode == "free" and result.curves:
        charts.append(("Distance, and the chaos floor", _draw_free(result)))
    if result.gaps and result.mode != "accuracy":
        charts.append(("Largest difference in each step", _draw_steps(result)))
        if _by_layer(result)[0]:
            charts.append(("Largest difference in each layer",
                           _draw_layers(result)))
    if any(map(len, result.losses.values())):
        charts.append(("Loss", _draw_losses(result)))
    return [{"title": title, "svg": svg} for title, svg in charts]


class _LogAxis:
    """Relative differences on a log scale, which has no place for 0 and for
    infinity: they lie on its ends, which say so."""

    def __init__(self, values: Sequence[float], *marks: float):
        finite = [v for v in (*values, *marks) if v and math.isfinite(v)]
        self.zero = any(v == 0 for v in values)
        self.infinite = any(not math.isfinite(v) for v in values)
        low, high = (math.floor(math.log10(min(finite, default=1e-16))),
                     math.ceil(math.log10(max(finite, default=1.0))))
        self.low, self.high = low - self.zero, max(high, low + 1) \
            + self.infinite

    def place(self, values: Sequence[float]) -> list[float]:
        return [10.0 ** self.low if v == 0 else v if math.isfinite(v)
                else 10.0 ** self.high for v in values]

    def apply(self, axes: Any) -> None:
        first, last = self.low + self.zero, self.high - self.infinite
        stride = max(1, math.ceil((last - first) / 6))
        ticks = list(range(first, last + 1, stride))
        names = [f"1e{t}" if t else "1" for t in ticks]
        if self.zero:
            ticks, names = [self.low, *ticks], ["0", *names]
        if self.infinite:
            ticks, names = [*ticks, self.high], [*names, "infinite"]
        axes.set_yscale("log")
        axes.set_yticks([10.0 ** t for t in ticks], names)
        axes.minorticks_off()
        # Half a power of ten of air, so that a marker on an end is whole.
        axes.set_ylim(10.0 ** (self.low - 0.5), 10.0 ** (self.high + 0.5))


def _figure(xlabel: str, ylabel: str) -> tuple[Any, Any]:
    """An empty chart that fills a phone's width at its own size."""
    figure = plotting._new_figure((4.4, 3.2))
    figure.set_layout_engine("constrained")
    axes = plotting._plain(figure.add_subplot())
    axes.set_xlabel(xlabel, color=plotting._INK)
    axes.set_ylabel(ylabel, color=plotting._INK)
    return figure, axes


def _steps_on(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _tolerance_line(axes: Any, result: Result) -> list[float]:
    tolerance = result.settings.get("tolerance")
    if not tolerance:
        return []
    axes.axhline(tolerance, color=plotting._INK, linewidth=1,
                 linestyle=(0, (2, 2)), label=f"tolerance {tolerance:g}")
    return [tolerance]


def _stage_style(stage: str, count: int) -> dict[str, Any]:
    i = STAGES.index(stage)
    return dict(color=_COLOURS[i], marker=_MARKERS[i], markersize=4.5,
                markeredgewidth=0, label=stage,
                markevery=max(1, count // 20))


def _draw_steps(result: Result) -> str:
    worst: dict[str, dict[int, float]] = {}
    for gap in result.gaps:
        line = worst.setdefault(gap.stage, {})
        line[gap.step] = max(line.get(gap.step, 0.0), gap.relative)
    figure, axes = _figure("step", "relative difference")
    marks = _tolerance_line(axes, result)
    scale = _LogAxis([v for line in worst.values() for v in line.values()],
                     *marks)
    for stage in STAGES:
        if stage in worst:
            steps = sorted(worst[stage])
            axes.plot(steps, scale.place([worst[stage][s] for s in steps]),
                      linewidth=1.3, **_stage_style(stage, len(steps)))
    scale.apply(axes)
    _steps_on(axes)
    return _svg(figure, "Line chart: the largest relative difference of "
                "each stage in every step. " + "; ".join(
                    f"{stage}: at most {gap.relative:.1e}, in step {gap.step}"
                    for stage, gap in result.worst.items()) + ".")


def _draw_layers(result: Result) -> str:
    order, worst, stages = _by_layer(result)
    figure, axes = _figure("number of the layer, from the input on",
                           "relative difference")
    scale = _LogAxis(list(worst.values()), *_tolerance_line(axes, result))
    for k, stage in enumerate(stages):
        aside = 0.5 * (k / len(stages) - 0.5)   # or stages hide each other
        points = [(i + aside, worst[name, stage]) for i, name
                  in enumerate(order, 1) if (name, stage) in worst]
        style = {**_stage_style(stage, 0), "linestyle": "none"}
        axes.plot([i for i, _ in points],
                  scale.place([v for _, v in points]), **style)
    scale.apply(axes)
    _steps_on(axes)
    axes.set_xlim(0.5, len(order) + 0.5)
    top = sorted(worst, key=worst.get)[:-4:-1]
    return _svg(figure, "Dot chart: the largest relative difference of each "
                f"stage in each of {len(order)} layers, over all steps. "
                "Largest: " + "; ".join(
                    f"{name or 'the network'}, {stage}: "
                    f"{worst[name, stage]:.1e}" for name, stage in top)
                + ". The table below has all.")


def _two(axes: Any, x: Sequence[float], a: Sequence[float],
         b: Sequence[float], names: Sequence[str]) -> None:
    """Curves that may lie on each other: the first shows on both sides of
    the second."""
    dots = {"marker": "o"} if len(x) <= 20 else {}
    axes.plot(x[:len(a)], a, color=plotting._BLUE, linewidth=4.5,
              alpha=0.5, markersize=7, label=names[0], **dots)
    axes.plot(x[:len(b)], b, color=plotting._ORANGE, linewidth=1.6,
              markersize=3.5, linestyle=(0, (5, 2)), label=names[1], **dots)


def _draw_losses(result: Result) -> str:
    a, b = (list(result.losses.get(side, ())) for side in "ab")
    figure, axes = _figure("step", "mean loss")
    steps = sorted({g.step for g in result.gaps if g.stage == "loss"})
    if len(steps) != len(a):    # those of a trace have holes
        steps = range(1, max(len(a), len(b)) + 1)
    _two(axes, steps, a, b, ("a", "b"))
    _steps_on(axes)
    return _svg(figure, "Line chart: the mean loss of both sides in every "
                "step. " + " ".join(
                    f"{side}: from {line[0]:.6g} to {line[-1]:.6g}."
                    for side, line in (("a", a), ("b", b)) if line))


def _draw_free(result: Result) -> str:
    distance, floor = result.curves["distance"], result.curves["floor"]
    figure, axes = _figure("step", "relative distance")
    scale = _LogAxis([*distance, *floor], *_tolerance_line(axes, result))
    _two(axes, range(1, len(distance) + 1), scale.place(floor),
         scale.place(distance), ("chaos floor: a from a nudged a",
                                 "distance: a from b"))
    scale.apply(axes)
    _steps_on(axes)
    return _svg(figure, "Line chart: the distance of b from a, at the end "
                f"{distance[-1]:.1e}, and that of a from itself after a "
                f"change of the last bits, at the end {floor[-1]:.1e}.", 1)


def _draw_accuracies(result: Result) -> str:
    a, b = (list(result.curves.get(side, ())) for side in "ab")
    figure, axes = _figure("side", "test accuracy")
    for place, values, colour in ((0, a, plotting._BLUE),
                                  (1, b, plotting._ORANGE)):
        # side by side: seeds of the same accuracy hide each other
        spread = np.linspace(-0.2, 0.2, len(values)) \
            if len(values) > 1 else [0.0]
        axes.plot([place + s for s in spread], values, "o", color=colour,
                  markersize=6)
        if values:
            axes.hlines(np.mean(values), place - 0.3, place + 0.3,
                        color=colour, linewidth=1.5)
    axes.set_xticks([0, 1], ["a", "b"])
    axes.set_xlim(-0.6, 1.6)
    return _svg(figure, "Dot chart: the test accuracy of each seed, and the "
                "mean as a line. " + " ".join(
                    f"{side}: {', '.join(f'{v:.4f}' for v in values)}."
                    for side, values in (("a", a), ("b", b))))


def _svg(figure: Any, alt: str, columns: int = 3) -> str:
    """A figure as an ``<svg>`` element for a page with several: without
    addresses, sizes and colours of its own."""
    import matplotlib
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center",
                      ncols=min(columns, len(labels)), frameon=False,
                      fontsize=9, labelcolor=plotting._INK)
    data = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none",
                                "svg.hashsalt": "mgpu"}):
        figure.savefig(data, format="svg", transparent=True,
                       metadata=dict.fromkeys(
                           ("Date", "Creator", "Format", "Type")))
    text = data.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head).group()
    prefix = re.sub(r"\W+", "-", alt.partition(".")[0].lower())[:60]
    rest = re.sub(r'\bid="', f'id="{prefix}-', rest)
    rest = re.sub(r'(xlink:href="|url\()#', rf"\1#{prefix}-", rest)
    for colour, name in _VARIABLES.items():
        rest = re.sub(colour, f"var(--{name})", rest, flags=re.IGNORECASE)
    return f'<svg {box} role="img" aria-label="{html.escape(alt)}">{rest}'
