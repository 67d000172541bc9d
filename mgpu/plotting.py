"""Figures: a curve that grows while a network trains, and finished plots.

Everything is drawn through matplotlib's object interface (`Figure` on an
Agg canvas). `pyplot` is never imported: no window opens and the backend of
the user's own plots stays what it is. Matplotlib is loaded when the first
figure is made, not when this module is imported.
"""
import io
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mgpu.files import FilePath
from mgpu.timing import number


# Okabe and Ito's palette, which people with any colour vision can tell
# apart. The engines have fixed colours, so that figures can be compared.
_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"
_PURPLE, _SKY, _AMBER = "#CC79A7", "#56B4E9", "#E69F00"
_PALETTE = (_BLUE, _ORANGE, _GREEN, _PURPLE, _SKY, _AMBER)
_ENGINE_COLOURS = {"mxnet": _BLUE, "torch": _ORANGE}
_INK, _GREY = "#262626", "#767676"
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))


# -- what all figures share -------------------------------------------------

def _new_figure(figsize: tuple[float, float], dpi: int = 100) -> Any:
    """An empty figure on a canvas of its own, outside pyplot."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"a figure needs matplotlib ({error}). Run "
                          "pip install 'mgpu[plot]'.") from error
    figure = Figure(figsize=figsize, dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _checked_file(file: FilePath) -> Path:
    """`file` as an absolute path, refused now and not after an hour's
    training. Absolute, because a script may change its folder meanwhile."""
    path = Path(file).absolute()
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"a figure is written as PNG or SVG; received "
                         f"{str(file)!r}. End the name in .png or .svg.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"the folder of a figure must exist; received {str(file)!r}. "
            f"Make {str(path.parent)!r} first.")
    return path


def _rendered(figure: Any, kind: str) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format=kind)
    return data.getvalue()


def _write(figure: Any, path: Path) -> None:
    """Write beside the file and then move: who watches it never reads half
    a picture."""
    data = _rendered(figure, path.suffix[1:].lower())
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _in_notebook() -> bool:
    """Whether this code runs in a Jupyter kernel. IPython is only looked
    for: in a notebook it has been imported long before."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _image(figure: Any) -> Any:
    from IPython.display import Image
    return Image(data=_rendered(figure, "png"))


def _plain(axes: Any) -> Any:
    """No box and a quiet grid, under the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(color=_GREY, labelcolor=_INK)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


# -- the live curve ---------------------------------------------------------

def _items(x: Any) -> list[Any]:
    """The entries of a sequence, or one number as a list. An array without
    dimensions has a length on some engines, and means one number."""
    if isinstance(x, (str, bytes)) or getattr(x, "shape", None) == ():
        return [x]
    try:
        return list(x)
    except TypeError:
        return [x]


def _point(x: Any) -> float | None:
    try:
        return None if x is None else number(x)
    except (TypeError, ValueError) as error:
        raise TypeError("a point needs a number, or None to leave it out; "
                        f"received {x!r}.") from error


class Animator:
    """Curves that are redrawn at every point: live in a notebook, a picture
    file in a script.

    In a Jupyter notebook the figure appears under the cell at the first
    `add` and is replaced in place from then on, without touching the cell's
    other output. With `file`, the file is written at the first `add`, then
    at most once a second (open it in a viewer that reloads), and always at
    `save` and at the end of a ``with`` block that added a point, also after
    an error: the curve up to there is what one wants to see.

    Parameters
    ----------
    xlabel, ylabel : str, optional
        Labels of the axes.
    legend : str or sequence of str, optional
        The name of each line.
    xlim, ylim : (float, float), optional
        Fixed limits; otherwise the axis follows the data.
    xscale, yscale : str
        ``"linear"``, ``"log"`` or another scale of matplotlib.
    fmts : sequence of str, optional
        Matplotlib's format strings (``"m--"``), used in turn. By default
        colours that colour-blind people can tell apart, and dashes.
    figsize : (float, float)
        Inches, at 100 pixels an inch.
    file : str or path, optional
        Where to write, ``.png`` or ``.svg``.

    Attributes
    ----------
    X, Y : list of list of float
        The points so far, one list per line; empty before the first `add`.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    ValueError
        `file` ends in something else, or matplotlib refuses a setting.
    FileNotFoundError
        The folder of `file` is not there.

    Examples
    --------
    >>> with Animator("epoch", "loss", file="loss.png") as animator:
    ...     animator.add(1, 2.3)
    ...     animator.add(2, 0.9)
    """

    def __init__(self, xlabel: str | None = None,
                 ylabel: str | None = None,
                 legend: None | str | Sequence[str] = None,
                 xlim: tuple[float, float] | None = None,
                 ylim: tuple[float, float] | None = None,
                 xscale: str = "linear", yscale: str = "linear",
                 fmts: Sequence[str] | None = None,
                 figsize: tuple[float, float] = (4.5, 3.0),
                 file: FilePath | None = None) -> None:
        self.file = None if file is None else _checked_file(file)
        self.legend = None if legend is None else _items(legend)
        self.fmts = None if fmts is None else _items(fmts)
        self.X: list[list[float]] = []
        self.Y: list[list[float]] = []
        self.figure = _new_figure(figsize)
        self.figure.set_layout_engine("constrained")
        self.axes = _plain(self.figure.add_subplot())
        self.axes.set(xlabel=xlabel, ylabel=ylabel, xscale=xscale,
                      yscale=yscale)
        if xlim is not None:
            self.axes.set_xlim(xlim)
        if ylim is not None:
            self.axes.set_ylim(ylim)
        for fmt in self.fmts or ():         # a wrong one is refused here
            self.axes.plot([], [], fmt)[0].remove()
        self.axes.set_prop_cycle(color=_PALETTE)
        self._lines: list[Any] = []
        self._handle: Any = None
        self._written = -float("inf")

    def add(self, x: Any, y: Any) -> None:
        """Add a point to every line and redraw.

        Parameters
        ----------
        x : number, or a sequence of one number per line
        y : number, or a sequence of one number per line
            Where `x` or `y` has None, that line gets no point. Arrays of
            one element count as numbers, and are waited for.

        Raises
        ------
        ValueError
            Another number of entries than there are lines (names in the
            legend, if there is one); nothing is added.
        TypeError
            An entry that is no number; nothing is added.
        """
        ys = [_point(v) for v in _items(y)]
        xs = [_point(v) for v in _items(x)]
        count = len(self.Y or self.legend or ys)
        if not count or len(ys) != count or len(xs) not in (1, count):
            raise ValueError(
                f"add needs one y per line, and one x or one per line; "
                f"received {len(xs)} x and {len(ys)} y for {count} "
                f"line{'s' * (count != 1)}. Put None where a line has no "
                "point.")
        if not self._lines:
            self._start(count)
        xs = xs * count if len(xs) == 1 else xs
        for i, (a, b) in enumerate(zip(xs, ys)):
            if a is not None and b is not None:
                self.X[i].append(a)
                self.Y[i].append(b)
        self._redraw()

    def _start(self, count: int) -> None:
        self.X = [[] for _ in range(count)]
        self.Y = [[] for _ in range(count)]
        for i in range(count):
            if self.fmts:
                line, = self.axes.plot([], [], self.fmts[i % len(self.fmts)])
            else:
                line, = self.axes.plot(
                    [], [], color=_PALETTE[i % len(_PALETTE)], linewidth=1.8,
                    linestyle=_DASHES[i % len(_DASHES)], markersize=4)
            self._lines.append(line)
        if self.legend:
            self.axes.legend(self._lines, self.legend, frameon=False)

    def _redraw(self) -> None:
        for line, x, y in zip(self._lines, self.X, self.Y):
            line.set_data(x, y)
            if not self.fmts:       # one point alone draws no line
                line.set_marker("o" if len(x) <= 20 else "")
        self.axes.relim()
        self.axes.autoscale_view()
        if _in_notebook():
            if self._handle is None:
                from IPython.display import display
                self._handle = display(_image(self.figure), display_id=True)
            else:
                self._handle.update(_image(self.figure))
        if self.file is not None and time.monotonic() - self._written >= 1:
            self.save()

    def save(self, file: FilePath | None = None) -> None:
        """Write the figure.

        Parameters
        ----------
        file : str or path, optional
            ``.png`` or ``.svg``; None: the `file` of the constructor.

        Raises
        ------
        ValueError
            No file here and none in the constructor, or another ending.
        FileNotFoundError
            The folder is not there.
        """
        if file is None and self.file is None:
            raise ValueError("save needs a file; received none here and none "
                             "when the Animator was made. Use "
                             "save('curve.png').")
        path = self.file if file is None else _checked_file(file)
        _write(self.figure, path)
        if path == self.file:
            self._written = time.monotonic()

    def __enter__(self) -> "Animator":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.file is not None and self.Y:
            self.save()


# -- runs of a chapter ------------------------------------------------------

def _field(row: dict[str, Any], name: str, what: str) -> Any:
    if name not in row:
        raise ValueError(f"{what} needs the field {name!r}; received one "
                         f"with {sorted(row)}.")
    return row[name]


def _engine_colours(engines: Sequence[str]) -> dict[str, str]:
    spare = [c for c in _PALETTE if c not in _ENGINE_COLOURS.values()]
    others = [e for e in engines if e not in _ENGINE_COLOURS]
    found = {e: spare[i % len(spare)] for i, e in enumerate(others)}
    return {e: _ENGINE_COLOURS.get(e) or found[e] for e in engines}


def _tint(colour: str, white: float) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb
    return tuple(c + (1 - c) * white for c in to_rgb(colour))


def _devices_label(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def _grouped(runs: Iterable[dict[str, Any]]
             ) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The runs by (backend, number of devices), which differ in the seed
    alone: anything else must not be averaged."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in runs:
        for name in ("train_loss", "test_acc", "images_per_second"):
            _field(run, name, "a run")
        key = (_field(run, "backend", "a run"),
               len(_field(run, "devices", "a run")))
        groups.setdefault(key, []).append(run)
    for (engine, count), members in groups.items():
        for name in ("batch_size", "lr", "dtype"):
            values = sorted({repr(m.get(name)) for m in members})
            if len(values) > 1:
                raise ValueError(
                    f"runs on one backend and {_devices_label(count)} may "
                    f"differ in the seed alone; those on {engine} have "
                    f"{name} {' and '.join(values)}. Plot them apart.")
    if not groups:
        raise ValueError("a plot needs a run; received none.")
    return groups


def _rate(runs: Sequence[dict[str, Any]]) -> float | None:
    """All images over all seconds. Epochs hold equally many images, so that
    is the harmonic mean of the rates of the epochs."""
    rates = [r for run in runs for r in run["images_per_second"]]
    return len(rates) / sum(1 / r for r in rates) if rates else None


def plot_runs(runs: Sequence[dict[str, Any]], file: FilePath,
              title: str | None = None) -> Any:
    """Draw trainings: test accuracy and training loss by epoch, and speed.

    One line per backend (colour) and number of devices (shade and dashes).
    Several seeds are thin lines, with their mean in bold. The bars show all
    images over all seconds, evaluation not counted, with the speed-up over
    one device of the same backend above them.

    Parameters
    ----------
    runs : sequence of dict
        The ``"runs"`` of the JSON that ``mgpu reproduce`` writes. Used:
        ``backend``, ``devices`` (their number counts), and the lists by
        epoch ``train_loss``, ``test_acc`` (None where not evaluated) and
        ``images_per_second``; any of the three may be empty.
    file : str or path
        ``.png`` (1800 pixels wide) or ``.svg``.
    title : str, optional
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        No run, a field that is missing, another ending of `file`, or runs
        on the same backend and number of devices that differ in batch size,
        rate or dtype: they are no repetitions.
    FileNotFoundError
        The folder of `file` is not there.
    ImportError
        Matplotlib is not installed.
    """
    path, groups = _checked_file(file), _grouped(runs)
    engines = list(dict.fromkeys(engine for engine, _ in groups))
    counts = sorted({count for _, count in groups})
    colours = _engine_colours(engines)

    def shade(engine: str, count: int) -> tuple[float, ...]:
        # The fewer devices, the lighter: where runs agree to the last
        # digit, a dark dashed line still shows on a light full one.
        rank = counts.index(count) / max(1, len(counts) - 1)
        return _tint(colours[engine], 0.5 * (1 - rank) * (len(counts) > 1))

    figure = _new_figure((12.0, 4.8), dpi=150)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    panels = [_plain(axes) for axes in figure.subplots(1, 3)]
    handles = {}
    for engine in engines:
        # Engines that give the same numbers would hide each other too: the
        # first is a broad line and shows on both sides of the next.
        width = 3.0 if engine == engines[0] and len(engines) > 1 else 1.6
        for count in counts:
            members = groups.get((engine, count))
            if members is None:
                continue
            style = dict(color=shade(engine, count), linestyle=_DASHES[
                counts.index(count) % len(_DASHES)])
            for axes, name in zip(panels, ("test_acc", "train_loss")):
                line = _curves(axes, [m[name] for m in members], width, style)
            line.set_label(f"{engine}, {_devices_label(count)}")
            handles[count, engines.index(engine)] = line
    _epoch_axes(panels[0], "test accuracy")
    _epoch_axes(panels[1], "training loss")
    _speed_bars(panels[2], groups, engines, counts, shade)
    # The legend fills column by column: a row per backend, if it needs two.
    seeds = max(map(len, groups.values()))
    figure.legend(
        handles=[handles[key] for key in sorted(handles)], handlelength=3.2,
        loc="outside lower center", frameon=False,
        ncols=len(handles) if len(handles) <= 4 else len(counts),
        title=f"thin: one seed, bold: the mean of {seeds} seeds"
        if seeds > 1 else None)
    if title:
        figure.suptitle(title, color=_INK, fontsize=13)
    _write(figure, path)
    return figure


def _curves(axes: Any, seeds: Sequence[Sequence[float | None]],
            width: float, style: dict[str, Any]) -> Any:
    """One thin line per seed and their mean, up to the shortest; returns
    the line for the legend."""
    values = [np.array(s, dtype=float) for s in seeds]      # None is nan
    if len(values) > 1:
        for v in values:
            there = np.isfinite(v)
            axes.plot(np.arange(1, len(v) + 1)[there], v[there],
                      linewidth=0.7, alpha=0.45, color=style["color"])
    length = min(map(len, values))
    mean = np.mean([v[:length] for v in values], axis=0)
    there = np.isfinite(mean)       # not evaluated: the line passes over it
    marker = "o" if there.sum() <= 12 else ""
    line, = axes.plot(np.arange(1, length + 1)[there], mean[there],
                      linewidth=width, marker=marker, markersize=width + 2,
                      **style)
    return line


def _epoch_axes(axes: Any, ylabel: str) -> None:
    from matplotlib.ticker import MaxNLocator
    last = max((x for line in axes.lines for x in line.get_xdata()), default=1)
    margin = min(max(0.03 * (last - 1), 0.3), 0.9)      # never down to 0
    axes.set(xlabel="epoch", ylabel=ylabel, xlim=(1 - margin, last + margin))
    axes.xaxis.set_major_locator(
        MaxNLocator("auto", integer=True, min_n_ticks=1))


def _speed_bars(axes: Any, groups: Any, engines: Sequence[str],
                counts: Sequence[int], shade: Any) -> None:
    width = min(0.8 / len(engines), 0.5)
    crowded = len(engines) * len(counts) > 6
    for e, engine in enumerate(engines):
        single = _rate(groups.get((engine, 1), []))
        for c, count in enumerate(counts):
            rate = _rate(groups.get((engine, count), []))
            if rate is None:
                continue
            x = c + (e - (len(engines) - 1) / 2) * width
            axes.bar(x, rate, 0.92 * width, color=shade(engine, count))
            if single:
                axes.annotate(f"{rate / single:.2f}×", (x, rate), (0, 3),
                              textcoords="offset points", ha="center",
                              color=_INK, fontsize=9 if crowded else 10,
                              rotation=90 if crowded else 0)
    axes.set_xticks(range(len(counts)), map(str, counts))
    axes.set(xlabel="number of devices\n(above the bars: speed-up over one)",
             ylabel="images per second", xlim=(-0.6, len(counts) - 0.4))
    axes.margins(y=0.18 if crowded else 0.1)
    axes.grid(False, axis="x")


# -- timings of the chapter on automatic parallelism ------------------------

def _parts(names: Sequence[str]) -> list[list[int]]:
    """For each name the earlier ones that it does together: the chapter
    prints a joint block, "A & B" or "A and B", after its separate ones."""
    parts: list[list[int]] = []
    waiting: list[int] = []
    for i, name in enumerate(names):
        joint = " & " in name or " and " in name
        parts.append(waiting if joint else [])
        waiting = [] if joint else waiting + [i]
    return parts


def plot_timings(rows: Sequence[dict[str, Any]], file: FilePath,
                 title: str | None = None) -> Any:
    """Draw named timings as horizontal bars, in the order given.

    A joint timing, one whose name has " & " or " and " in it, gets a mark
    where the separate ones before it (on the same backend, back to the last
    joint one) add up: a bar that ends before its mark has gained.

    Parameters
    ----------
    rows : sequence of dict
        ``{"backend": str, "name": str, "seconds": float}``, as
        ``mgpu reproduce auto-parallelism`` measures them.
    file : str or path
        ``.png`` (1800 pixels wide) or ``.svg``.
    title : str, optional
        Above the bars.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        No row, a field that is missing, or another ending of `file`.
    FileNotFoundError
        The folder of `file` is not there.
    ImportError
        Matplotlib is not installed.
    """
    path = _checked_file(file)
    engines: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        engines.setdefault(_field(row, "backend", "a timing"), []).append(
            (_field(row, "name", "a timing"),
             float(_field(row, "seconds", "a timing"))))
    if not engines:
        raise ValueError("a plot needs a timing; received none.")
    names = list(dict.fromkeys(n for bars in engines.values()
                               for n, _ in bars))
    colours = _engine_colours(list(engines))

    height = 0.8 / len(engines)
    figure = _new_figure(
        (12.0, 1.5 + len(names) * (0.2 + 0.25 * len(engines))), dpi=150)
    figure.set_layout_engine("constrained")
    axes = _plain(figure.add_subplot())
    for e, (engine, bars) in enumerate(engines.items()):
        parts = _parts([name for name, _ in bars])
        for (name, seconds), separate in zip(bars, parts):
            y = names.index(name) + (e - (len(engines) - 1) / 2) * height
            axes.barh(y, seconds, 0.9 * height, color=colours[engine],
                      label=engine if name == bars[0][0] else None)
            text, end = f"{seconds:.4f} sec", seconds
            if separate:
                total = sum(bars[i][1] for i in separate)
                axes.barh(y, total, 0.9 * height, fill=False, hatch="////",
                          edgecolor=_GREY, linewidth=0, zorder=0.9)
                mark = [y - 0.45 * height, y + 0.45 * height]
                axes.plot([total] * 2, mark, color="white", linewidth=5)
                axes.plot([total] * 2, mark, color=_INK, linewidth=2.5)
                text += f" (sum {total:.4f})"
                end = max(total, seconds)
            axes.annotate(text, (end, y), (5, 0), va="center", color=_INK,
                          textcoords="offset points", fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel("seconds (black mark: the sum of the separate timings)")
    axes.set_xlim(0, 1.2 * axes.dataLim.xmax)       # room for the numbers
    figure.legend(loc="outside lower center", frameon=False,
                  ncols=len(engines))
    if title:
        axes.set_title(title, color=_INK, fontsize=13)
    _write(figure, path)
    return figure


# -- the graph of the chapter on automatic parallelism ----------------------

_FILLS = {"data and weights": "#ececec", "forward pass": "#cfe6f5",
          "backward pass": "#fbdcc4", "copy between devices": "#f9ecb8",
          "sum and update": "#c9ead9"}
_DATA, _FORWARD, _BACKWARD, _COPY, _HOST = _FILLS

# The nodes: text, kind, column, first row, last row. Columns count from the
# CPU outwards: CPU, copies, weights, work. Rows follow the time. The nodes
# of a GPU are drawn twice, {k} is its number.
_HOST_NODES = {
    "batch": ("minibatch $X, y$", _DATA, 0, 0, 0),
    "sum2": ("add up $\\partial W_2$", _HOST, 0, 4, 4),
    "step2": ("update $W_2$", _HOST, 0, 5, 5),
    "sum1": ("add up $\\partial W_1$", _HOST, 0, 6, 6),
    "step1": ("update $W_1$", _HOST, 0, 7, 7),
}
_GPU_NODES = {
    "put": ("copy slice {k}", _COPY, 1, 0, 0),
    "slice": ("slice $X_{k}, y_{k}$", _DATA, 3, 0, 0),
    "w1": ("$W_1$", _DATA, 2, 1, 1),
    "layer1": ("layer 1", _FORWARD, 3, 1, 1),
    "w2": ("$W_2$", _DATA, 2, 2, 2),
    "layer2": ("layer 2", _FORWARD, 3, 2, 2),
    "loss": ("loss", _FORWARD, 3, 3, 3),
    "back2": ("layer 2 backward", _BACKWARD, 3, 4, 4),
    "get2": ("copy $\\partial W_2$", _COPY, 1, 4, 4),
    "set2": ("copy $W_2$", _COPY, 1, 5, 5),
    "new2": ("new $W_2$", _DATA, 2, 5, 5),
    "back1": ("layer 1 backward", _BACKWARD, 3, 5, 6),
    "get1": ("copy $\\partial W_1$", _COPY, 1, 6, 6),
    "set1": ("copy $W_1$", _COPY, 1, 7, 7),
    "new1": ("new $W_1$", _DATA, 2, 7, 7),
}
# What waits for what; an edge that follows from others is left out (layer 2
# backward uses what layer 1 computed, but waits for the loss anyway).
_EDGES = [
    ("batch", "put"), ("put", "slice"), ("slice", "layer1"),
    ("w1", "layer1"), ("layer1", "layer2"), ("w2", "layer2"),
    ("layer2", "loss"), ("loss", "back2"), ("back2", "get2"),
    ("get2", "sum2"), ("sum2", "step2"), ("step2", "set2"),
    ("set2", "new2"), ("back2", "back1"), ("back1", "get1"),
    ("get1", "sum1"), ("sum1", "step1"), ("step1", "set1"),
    ("set1", "new1"),
]
_COLUMN_X = (0.0, 1.9, 3.35, 4.85)          # inches from the middle
_COLUMN_WIDTH = (1.6, 1.25, 0.9, 1.6)
_ROW, _BOX = 0.78, 0.44                     # inches: a row, a box in it


def plot_graph(file: FilePath | None = None) -> Any:
    """Draw one training step of a two-layer perceptron on a CPU and two
    GPUs as the graph of its operations.

    Every box is an operation or a value, every arrow says what must be done
    before what. Time runs downwards; boxes that no path of arrows joins may
    run at the same time, and an engine that knows the graph lets them.

    Parameters
    ----------
    file : str or path, optional
        ``.png`` (1800 pixels wide) or ``.svg``. None: the figure is shown
        in a notebook, and only returned elsewhere.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        Another ending of `file`.
    FileNotFoundError
        The folder of `file` is not there.
    ImportError
        Matplotlib is not installed.
    """
    path = None if file is None else _checked_file(file)
    figure = _new_figure((12.0, 7.6), dpi=150)
    from matplotlib.patches import FancyBboxPatch, Patch

    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-6, 6), ylim=(-6.75, 0.85))      # one unit is one inch
    axes.axis("off")
    for label, left, right in (("GPU 1", -5.85, -2.7), ("CPU", -1, 1),
                               ("GPU 2", 2.7, 5.85)):
        axes.add_patch(FancyBboxPatch(
            (left, -5.85), right - left, 6.25, linewidth=0, zorder=0,
            facecolor="#f5f6f8", boxstyle="round,pad=0,rounding_size=0.12"))
        axes.text((left + right) / 2, 0.6, label, ha="center", va="center",
                  fontsize=14, fontweight="bold", color=_INK)
    boxes: dict[str, _Box] = {}
    for k, side, nodes in ((1, -1, {**_HOST_NODES, **_GPU_NODES}),
                           (2, 1, _GPU_NODES)):
        for name, (text, kind, *place) in nodes.items():
            boxes[name] = x, y, width, height = _box(*place, side=side)
            axes.add_patch(FancyBboxPatch(
                (x - width / 2, y - height / 2), width, height, zorder=3,
                facecolor=_FILLS[kind], edgecolor=_GREY, linewidth=0.9,
                boxstyle="round,pad=0,rounding_size=0.08"))
            axes.text(x, y, text.replace("{k}", str(k)), ha="center",
                      va="center", fontsize=11, color=_INK, zorder=4)
        for first, then in _EDGES:
            if first in nodes or then in nodes:     # the CPU's own: once
                start, end = _ends(boxes[first], boxes[then])
                axes.annotate("", end, start, arrowprops=dict(
                    arrowstyle="-|>", color=_INK, linewidth=1.3, shrinkA=0,
                    shrinkB=0.5, mutation_scale=12))
    figure.legend(
        handles=[Patch(facecolor=fill, edgecolor=_GREY, label=kind)
                 for kind, fill in _FILLS.items()],
        loc="lower center", bbox_to_anchor=(0.5, 0.045), frameon=False,
        ncols=len(_FILLS), fontsize=11)
    axes.text(0, -6.55, "Time runs downwards. Boxes that no path of arrows "
              "joins may run at the same time.", ha="center", va="center",
              fontsize=11, color=_INK)
    if path is not None:
        _write(figure, path)
    elif _in_notebook():
        from IPython.display import display
        display(_image(figure))
    return figure


_Box = tuple[float, float, float, float]    # centre x and y, width, height


def _box(column: int, first: int, last: int, side: int) -> _Box:
    return (side * _COLUMN_X[column], -(first + last) / 2 * _ROW,
            _COLUMN_WIDTH[column], (last - first) * _ROW + _BOX)


def _ends(start: _Box, end: _Box
          ) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where the arrow between two boxes begins and ends: level, at the
    height of the lower one, or straight down inside a column."""
    (x0, y0, w0, h0), (x1, y1, w1, h1) = start, end
    if x0 == x1:
        return (x0, y0 - h0 / 2), (x1, y1 + h1 / 2)
    y, right = (y0 if h0 < h1 else y1), (1 if x1 > x0 else -1)
    return (x0 + right * w0 / 2, y), (x1 - right * w1 / 2, y)
