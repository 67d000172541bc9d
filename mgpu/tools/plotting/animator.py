"""Curves that are redrawn at every point."""
import time
from collections.abc import Sequence
from typing import Any

from mgpu import distributed
from mgpu.tools.plotting import style
from mgpu.tools.timing import number
from mgpu.utils.files import FilePath
from mgpu.utils.notebook import in_notebook


def _items(x: Any) -> list[Any]:
    """The entries of a sequence, or one number as a list. An array without
    dimensions has a length on some backends, and means one number."""
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
    """Curves that are redrawn at every point: live in a notebook, an image
    file in a script.

    In a Jupyter notebook the figure appears under the cell at the first
    `add` and is replaced in place from then on, without touching the cell's
    other output. With `file`, the file is written at the first `add`, then
    at most once a second (open it in a viewer that reloads), and always by
    `save` and at the end of a ``with`` block that added a point. The end of
    the block writes after an error too, because the curve up to there helps
    to find its cause. With several processes (`mgpu.distributed`) rank 0
    alone draws and writes; the others keep the points.

    Parameters
    ----------
    xlabel, ylabel : str, optional
        Labels of the axes. A linear x axis labelled "epoch" has its ticks
        at whole epochs only.
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
        `file` has another extension, or matplotlib rejects a setting.
    FileNotFoundError
        The folder of `file` does not exist.

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
        self.file = None if file is None else style.checked_file(file)
        self.legend = None if legend is None else _items(legend)
        self.fmts = None if fmts is None else _items(fmts)
        self.X: list[list[float]] = []
        self.Y: list[list[float]] = []
        self.figure = style.new_figure(figsize, layout="constrained")
        self.axes = style.plain_axes(self.figure.add_subplot())
        self.axes.set(xlabel=xlabel, ylabel=ylabel, xscale=xscale,
                      yscale=yscale)
        if xlim is not None:
            self.axes.set_xlim(xlim)
        if ylim is not None:
            self.axes.set_ylim(ylim)
        if xscale == "linear" and xlabel in ("epoch", "epochs"):
            style.whole_numbers(self.axes)
        for fmt in self.fmts or ():         # a wrong one raises here
            self.axes.plot([], [], fmt)[0].remove()
        self.axes.set_prop_cycle(color=style.PALETTE)
        self._lines: list[Any] = []
        self._shown: Any = None
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
            An entry that is not a number; nothing is added.
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
                    [], [], color=style.PALETTE[i % len(style.PALETTE)],
                    linewidth=1.8, markersize=4,
                    linestyle=style.DASHES[i % len(style.DASHES)])
            self._lines.append(line)
        if self.legend:
            self.axes.legend(self._lines, self.legend, frameon=False)

    def _redraw(self) -> None:
        for line, x, y in zip(self._lines, self.X, self.Y):
            line.set_data(x, y)
            if not self.fmts:       # a line of one point is not visible
                line.set_marker("o" if len(x) <= 20 else "")
        self.axes.relim()
        self.axes.autoscale_view()
        if in_notebook() and distributed.is_main():
            self._shown = style.show(self.figure, self._shown)
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
            There is no file, neither here nor in the constructor, or it has
            another ending.
        FileNotFoundError
            The folder of `file` does not exist.
        """
        path = self.file if file is None else style.checked_file(file)
        if path is None:
            raise ValueError("save needs a file; received none here and none "
                             "when the Animator was made. Use "
                             "save('curve.png').")
        if distributed.is_main():
            style.write_figure(self.figure, path)
        if path == self.file:
            self._written = time.monotonic()

    def __enter__(self) -> "Animator":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.file is not None and self.Y:
            self.save()
