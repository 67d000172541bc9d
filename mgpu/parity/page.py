"""A result as an HTML page with figures."""
import html
import io
import math
import os
import re
from collections.abc import Sequence
from typing import Any


from mgpu.parity import tables
from mgpu.parity.measure import STAGES
from mgpu.parity.result import Result
from mgpu.tools.plotting import style
from mgpu.utils import environment, files

# In a chart a stage has its colour and its marker, whatever else is there.
_COLOURS = (style.INK, style.INK, *style.PALETTE[:3], style.GREY,
            style.GREY, style.INK, *style.PALETTE[3:], style.GREY)
_MARKERS = "*Xos^P>pv<Dh"
#: the colours that matplotlib draws with, as variables of the style sheet,
#: which has other values for dark screens
VARIABLES = {
    style.INK: "ink", style.GREY: "grey", style.GRID: "grid",
    **dict(zip(style.PALETTE,
               ("blue", "orange", "green", "purple", "sky", "amber")))}


# -- the page -----------------------------------------------------------------

def write_html(result: Result, file: files.FilePath, *,
               command: str | None = None) -> None:
    """Write a page that needs no network and no other file.

    Parameters
    ----------
    result : Result
    file : str or path
        Ends in .html or .htm; replaced when the page is complete.
    command : str, optional
        What made the result, for the reader to repeat.

    Raises
    ------
    ValueError
        Another ending of `file`.
    ImportError
        Jinja2 or matplotlib is not installed.
    """
    check_page(file)
    page = to_html(result, command=command)
    with files.replacing(file) as part:
        part.write(page)


def check_page(file: files.FilePath) -> None:
    """Refuse a page that could not be written, before the work: see
    `write_html`."""
    if not os.fspath(file).lower().endswith((".html", ".htm")):
        raise ValueError("a report is an HTML page; received "
                         f"{os.fspath(file)!r}. End the name in .html.")
    check_packages()


def check_packages() -> None:
    """ImportError where a page could not be made, before the work."""
    for name in ("jinja2", "matplotlib"):
        environment.package(name, "an HTML report")


def to_html(result: Result, *, command: str | None = None) -> str:
    """The page of `write_html`."""
    check_packages()
    import jinja2
    template = jinja2.Environment(
        loader=jinja2.PackageLoader("mgpu.parity", ""), autoescape=True,
        trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined).get_template("report.html.j2")
    return template.render(
        result=result, tables=tables, charts=_charts(result),
        stages=tables.stage_table(result), layers=tables.layer_table(result),
        command=command)


# -- the charts ---------------------------------------------------------------

def _charts(result: Result) -> list[dict[str, str]]:
    """The charts: title, SVG."""
    charts = []
    if result.gaps:
        charts.append(("Largest difference in each step", _draw_steps(result)))
        if tables.by_layer(result)[0]:
            charts.append(("Largest difference in each layer",
                           _draw_layers(result)))
    if any(map(len, result.losses.values())):
        charts.append(("Loss", _draw_losses(result)))
    return [{"title": title, "svg": svg} for title, svg in charts]


class LogAxis:
    """Relative differences on a log scale. It has no place for 0 and for
    infinity, so they lie on its ends, which say so."""

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
    figure = style.new_figure((4.4, 3.2), layout="constrained")
    axes = style.plain_axes(figure.add_subplot())
    axes.set_xlabel(xlabel, color=style.INK)
    axes.set_ylabel(ylabel, color=style.INK)
    style.whole_numbers(axes)
    return figure, axes


def _tolerance_line(axes: Any, result: Result) -> list[float]:
    tolerance = result.settings.get("tolerance")
    if not tolerance:
        return []
    axes.axhline(tolerance, color=style.INK, linewidth=1,
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
    scale = LogAxis([v for line in worst.values() for v in line.values()],
                    *marks)
    for stage in STAGES:
        if stage in worst:
            steps = sorted(worst[stage])
            axes.plot(steps, scale.place([worst[stage][s] for s in steps]),
                      linewidth=1.3, **_stage_style(stage, len(steps)))
    scale.apply(axes)
    return _svg(figure, "Line chart: the largest relative difference of "
                "each stage in every step. The table by stage has the "
                "largest of all.")


def _draw_layers(result: Result) -> str:
    order, worst, stages = tables.by_layer(result)
    figure, axes = _figure("number of the layer, from the input on",
                           "relative difference")
    scale = LogAxis(list(worst.values()), *_tolerance_line(axes, result))
    for k, stage in enumerate(stages):
        aside = 0.5 * (k / len(stages) - 0.5)   # or stages hide each other
        points = [(i + aside, worst[name, stage]) for i, name
                  in enumerate(order, 1) if (name, stage) in worst]
        axes.plot([i for i, _ in points],
                  scale.place([v for _, v in points]),
                  **{**_stage_style(stage, 0), "linestyle": "none"})
    scale.apply(axes)
    axes.set_xlim(0.5, len(order) + 0.5)
    return _svg(figure, "Dot chart: the largest relative difference of each "
                f"stage in each of {len(order)} layers, over all steps. The "
                "table below has all.")


def _two(axes: Any, x: Sequence[float], a: Sequence[float],
         b: Sequence[float], names: Sequence[str]) -> None:
    """Curves that may lie on each other: the first shows on both sides of
    the second."""
    dots = {"marker": "o"} if len(x) <= 20 else {}
    axes.plot(x[:len(a)], a, color=style.BLUE, linewidth=4.5,
              alpha=0.5, markersize=7, label=names[0], **dots)
    axes.plot(x[:len(b)], b, color=style.ORANGE, linewidth=1.6,
              markersize=3.5, linestyle=(0, (5, 2)), label=names[1], **dots)


def _draw_losses(result: Result) -> str:
    a, b = (list(result.losses.get(side, ())) for side in "ab")
    figure, axes = _figure("step", "mean loss")
    steps: Sequence[int] = sorted({g.step for g in result.gaps
                                   if g.stage == "loss"})
    if len(steps) != len(a):    # those of a trace have holes
        steps = range(1, max(len(a), len(b)) + 1)
    _two(axes, steps, a, b, ("a", "b"))
    return _svg(figure, "Line chart: the mean loss of both sides in every "
                "step. " + " ".join(
                    f"{side}: from {line[0]:.6g} to {line[-1]:.6g}."
                    for side, line in (("a", a), ("b", b)) if line))


def _svg(figure: Any, alt: str, columns: int = 3) -> str:
    """A figure as an ``<svg>`` element for a page with several: without
    addresses, sizes and colours of its own."""
    import matplotlib
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center",
                      ncols=min(columns, len(labels)), frameon=False,
                      fontsize=9, labelcolor=style.INK)
    data = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none",
                                "svg.hashsalt": "mgpu"}):
        figure.savefig(data, format="svg", transparent=True,
                       metadata=dict.fromkeys(
                           ("Date", "Creator", "Format", "Type")))
    text = data.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*", "", text,
                  flags=re.DOTALL)
    head, rest = text.split(">", 1)
    box, = re.findall(r'viewBox="[^"]*"', head)
    prefix = re.sub(r"\W+", "-", alt.partition(".")[0].lower())[:60]
    rest = re.sub(r'\bid="', f'id="{prefix}-', rest)
    rest = re.sub(r'(xlink:href="|url\()#', rf"\1#{prefix}-", rest)
    for colour, name in VARIABLES.items():
        rest = re.sub(colour, f"var(--{name})", rest, flags=re.IGNORECASE)
    return f'<svg {box} role="img" aria-label="{html.escape(alt)}">{rest}'
