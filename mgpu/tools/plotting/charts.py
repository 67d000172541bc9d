"""Charts of finished trainings and of timings."""
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.tools.plotting import style
from mgpu.utils.files import FilePath
from mgpu.utils.notebook import in_notebook

Rows = Sequence[dict[str, Any]]
_Groups = dict[tuple[str, int], list[dict[str, Any]]]


def _field(row: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in row:
        raise ValueError(f"{what} needs the field {name!r}; received one "
                         f"with {sorted(row)}.")
    return row[name]


# -- trainings --------------------------------------------------------------

def _devices_label(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def _grouped(runs: Iterable[dict[str, Any]]) -> _Groups:
    """The runs by (backend, number of devices). Those of one group may
    differ in the seed only: anything else must not be averaged."""
    groups: _Groups = {}
    for run in runs:
        for name in ("train_loss", "test_acc", "images_per_second"):
            _field(run, name, "a run")
        key = (_field(run, "backend", "a run"),
               len(_field(run, "devices", "a run")))
        groups.setdefault(key, []).append(run)
    for (backend, count), members in groups.items():
        for name in ("batch_size", "lr", "dtype"):
            values = sorted({repr(m.get(name)) for m in members})
            if len(values) > 1:
                raise ValueError(
                    f"runs on one backend and {_devices_label(count)} may "
                    f"differ in the seed only; those on {backend} have "
                    f"{name} {' and '.join(values)}. Plot them apart.")
    if not groups:
        raise ValueError("a plot needs a run; received none.")
    return groups


def mean_rate(runs: Rows) -> float | None:
    """Images per second: all images over all seconds. Epochs hold equally
    many images, so that is the harmonic mean of the rates of the epochs.
    None without an epoch."""
    rates = [r for run in runs for r in run["images_per_second"]]
    return len(rates) / sum(1 / r for r in rates) if rates else None


def plot_runs(runs: Rows, file: FilePath, title: str | None = None) -> Any:
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
        There is no run, a field is missing, `file` has another ending, or
        runs on the same backend and number of devices differ in batch size,
        rate or dtype, so that they do not repeat one training.
    FileNotFoundError
        The folder of `file` does not exist.
    ImportError
        Matplotlib is not installed.
    """
    path, groups = style.checked_file(file), _grouped(runs)
    backends = list(dict.fromkeys(backend for backend, _ in groups))
    counts = sorted({count for _, count in groups})
    colours = style.backend_colours(backends)

    def shade(backend: str, count: int) -> tuple[float, ...]:
        # The fewer devices, the lighter: where runs agree to the last
        # digit, a dark dashed line still shows on a light full one.
        rank = counts.index(count) / max(1, len(counts) - 1)
        return style.tint(colours[backend],
                          0.5 * (1 - rank) * (len(counts) > 1))

    figure, panels = style.wide_figure(4.8, 3)
    handles = {}
    for backend in backends:
        # Backends that give the same numbers would hide each other too: the
        # first is a broad line and shows on both sides of the next.
        width = 3.0 if backend == backends[0] and len(backends) > 1 else 1.6
        for count in counts:
            members = groups.get((backend, count))
            if members is None:
                continue
            look = dict(color=shade(backend, count), linestyle=style.DASHES[
                counts.index(count) % len(style.DASHES)])
            for axes, name in zip(panels, ("test_acc", "train_loss")):
                line = _curves(axes, [m[name] for m in members], width, look)
            line.set_label(f"{backend}, {_devices_label(count)}")
            handles[count, backends.index(backend)] = line
    _epoch_axes(panels[0], "test accuracy")
    _epoch_axes(panels[1], "training loss")
    _speed_bars(panels[2], groups, backends, counts, shade)
    # The legend fills column by column: a row per backend, if it needs two.
    seeds = max(map(len, groups.values()))
    figure.legend(
        handles=[handles[key] for key in sorted(handles)], handlelength=3.2,
        loc="outside lower center", frameon=False,
        ncols=len(handles) if len(handles) <= 4 else len(counts),
        title=f"thin: one seed, bold: the mean of {seeds} seeds"
        if seeds > 1 else None)
    return style.finished(figure, path, title)


def _curves(axes: Any, seeds: Sequence[Sequence[float | None]],
            width: float, look: dict[str, Any]) -> Any:
    """One thin line per seed and their mean, up to the shortest; returns
    the line for the legend."""
    def draw(values: np.ndarray, **options: Any) -> Any:
        there = np.isfinite(values)     # not evaluated: passed over
        line, = axes.plot(np.arange(1, len(values) + 1)[there],
                          values[there], **options)
        return line

    values = [np.array(s, dtype=float) for s in seeds]      # None is nan
    for v in values if len(values) > 1 else ():
        draw(v, linewidth=0.7, alpha=0.45, color=look["color"])
    length = min(map(len, values))
    mean = np.mean([v[:length] for v in values], axis=0)
    marker = "o" if np.isfinite(mean).sum() <= 12 else ""
    return draw(mean, linewidth=width, marker=marker, markersize=width + 2,
                **look)


def _epoch_axes(axes: Any, ylabel: str) -> None:
    last = max((x for line in axes.lines for x in line.get_xdata()), default=1)
    margin = min(max(0.03 * (last - 1), 0.3), 0.9)      # never down to 0
    axes.set(xlabel="epoch", ylabel=ylabel, xlim=(1 - margin, last + margin))
    style.whole_numbers(axes)


def _speed_bars(axes: Any, groups: _Groups, backends: Sequence[str],
                counts: Sequence[int],
                shade: Callable[[str, int], tuple[float, ...]]) -> None:
    width = min(0.8 / len(backends), 0.5)
    crowded = len(backends) * len(counts) > 6
    for e, backend in enumerate(backends):
        single = mean_rate(groups.get((backend, 1), []))
        for c, count in enumerate(counts):
            rate = mean_rate(groups.get((backend, count), []))
            if rate is None:
                continue
            x = c + (e - (len(backends) - 1) / 2) * width
            axes.bar(x, rate, 0.92 * width, color=shade(backend, count))
            if single:
                axes.annotate(f"{rate / single:.2f}×", (x, rate), (0, 3),
                              textcoords="offset points", ha="center",
                              color=style.INK, fontsize=9 if crowded else 10,
                              rotation=90 if crowded else 0)
    axes.set_xticks(range(len(counts)), map(str, counts))
    axes.set(xlabel="number of devices\n(above the bars: speed-up over one)",
             ylabel="images per second", xlim=(-0.6, len(counts) - 0.4))
    axes.margins(y=0.18 if crowded else 0.1)
    axes.grid(False, axis="x")


# -- one training -----------------------------------------------------------

def plot_history(history: Mapping[str, Any], file: FilePath | None = None
                 ) -> Any:
    """Draw one training: the loss of each step, the mean loss of each epoch,
    and the test accuracy where there is one.

    Parameters
    ----------
    history : mapping
        `mgpu.History.to_dict`.
    file : str or path, optional
        ``.png`` (1800 pixels wide) or ``.svg``. None: the figure is shown in
        a notebook, and only returned elsewhere.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        No step, or `file` has another ending.
    FileNotFoundError
        The folder of `file` does not exist.
    ImportError
        Matplotlib is not installed.
    """
    path = None if file is None else style.checked_file(file)
    steps, means, accuracies = (
        _field(history, name, "a history")
        for name in ("loss_per_step", "train_loss", "test_acc"))
    if not steps:
        raise ValueError("a plot needs a training step; got none.")
    by_epoch = [(name, values) for name, values in (
        ("training loss", means), ("test accuracy", accuracies)) if values]
    figure, (axes, *others) = style.wide_figure(4.8, 1 + len(by_epoch))
    axes.plot(range(1, len(steps) + 1), steps, color=style.BLUE, linewidth=1)
    axes.set(xlabel="step", ylabel="training loss")
    for panel, (name, values) in zip(others, by_epoch):
        _curves(panel, [values], 1.6, {"color": style.BLUE})
        _epoch_axes(panel, name)
    if path is not None:
        style.write_figure(figure, path)
    elif in_notebook():
        style.show(figure)
    return figure


# -- timings of the chapter on automatic parallelism ------------------------

def plot_timings(rows: Rows, file: FilePath, title: str | None = None) -> Any:
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
        There is no row, a field is missing, or `file` has another ending.
    FileNotFoundError
        The folder of `file` does not exist.
    ImportError
        Matplotlib is not installed.
    """
    path = style.checked_file(file)
    backends: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        backend, name, seconds = (_field(row, field, "a timing") for field in
                                  ("backend", "name", "seconds"))
        backends.setdefault(backend, []).append((name, float(seconds)))
    if not backends:
        raise ValueError("a plot needs a timing; received none.")
    names = list(dict.fromkeys(n for bars in backends.values()
                               for n, _ in bars))
    colours = style.backend_colours(list(backends))

    height = 0.8 / len(backends)
    figure, (axes,) = style.wide_figure(
        1.5 + len(names) * (0.2 + 0.25 * len(backends)), 1)
    for e, (backend, bars) in enumerate(backends.items()):
        separate: list[float] = []      # since the last joint timing
        for name, seconds in bars:
            y = names.index(name) + (e - (len(backends) - 1) / 2) * height
            axes.barh(y, seconds, 0.9 * height, color=colours[backend],
                      label=backend if name == bars[0][0] else None)
            text, end = f"{seconds:.4f} sec", seconds
            if not (" & " in name or " and " in name):
                separate.append(seconds)
            elif separate:
                total, separate = sum(separate), []
                _mark_sum(axes, y, height, total)
                text += f" (sum {total:.4f})"
                end = max(total, seconds)
            axes.annotate(text, (end, y), (5, 0), va="center",
                          color=style.INK, textcoords="offset points",
                          fontsize=9)
    style.name_rows(axes, names)
    axes.set_xlabel("seconds (black mark: the sum of the separate timings)")
    axes.set_xlim(0, 1.2 * axes.dataLim.xmax)       # space for the numbers
    figure.legend(loc="outside lower center", frameon=False,
                  ncols=len(backends))
    return style.finished(figure, path, title)


def _mark_sum(axes: Any, y: float, height: float, total: float) -> None:
    """A hatched bar up to `total`, behind the timing, and a mark there."""
    axes.barh(y, total, 0.9 * height, fill=False, hatch="////",
              edgecolor=style.GREY, linewidth=0, zorder=0.9)
    for colour, width in (("white", 5), (style.INK, 2.5)):
        axes.plot([total] * 2, [y - 0.45 * height, y + 0.45 * height],
                  color=colour, linewidth=width)
