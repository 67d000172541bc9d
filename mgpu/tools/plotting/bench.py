"""The figure of `mgpu bench`."""
from collections.abc import Mapping
from typing import Any

from mgpu.tools.plotting import style
from mgpu.utils.files import FilePath

#: colours of the palette that do not stand for a backend
_COLOURS = {"dispatch": style.AMBER, "copy": style.PURPLE,
            "compute": style.SKY, "reduce": style.GREEN,
            "update": style.GREY, "other": "#d0d0d0"}


def plot_bench(report: Mapping[str, Any], file: FilePath) -> Any:
    """Draw what `mgpu.tools.bench.run` returned: throughput with its spread
    and, where there is one, its prediction; and the parts of a step.

    Parameters
    ----------
    report : dict
        The report that `mgpu.tools.bench.run` returned.
    file : str or path
        ``.png`` (1800 pixels wide) or ``.svg``.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        `file` has another ending.
    FileNotFoundError
        The folder of `file` does not exist.
    ImportError
        Matplotlib is not installed.
    """
    path, rows = style.checked_file(file), report["contenders"]
    colours = style.backend_colours(
        list(dict.fromkeys(row["backend"] for row in rows)))
    figure, (speed, times) = style.wide_figure(2.6 + 0.5 * len(rows), 2)
    for i, row in enumerate(rows):
        _speed_bar(speed, i, row, colours[row["backend"]])
        left = 0.0
        for part, colour in _COLOURS.items():
            width = 1000 * max(0.0, row["parts"][part])
            times.barh(i, width, 0.7, left=left, color=colour,
                       label=part if i == 0 else None)
            left += width
    for axes in (speed, times):
        style.name_rows(axes, [f"{row['backend']}, {len(row['devices'])}"
                               for row in rows])
    speed.set_ylabel("backend, number of devices")
    speed.set_xlabel("images per second (line: slowest to fastest round;\n"
                     "in the bars: times the first)")
    times.set_xlabel("milliseconds of a step, by what the host waits for")
    if rows[0]["predicted"] is not None:
        speed.legend(loc="best", frameon=False)
    figure.legend(*times.get_legend_handles_labels(), frameon=False,
                  loc="outside lower right", ncols=len(_COLOURS))
    return style.finished(
        figure, path, f"{report['model']}, batch {report['batch_size']}, "
        f"{report['dtype']}, {report['cpu_cores']} cores")


def _speed_bar(axes: Any, y: int, row: Mapping[str, Any], colour: str) -> None:
    """Median, slowest and fastest round, prediction, and times the first."""
    rate = row["images_per_second"]
    axes.barh(y, rate["median"], 0.7, color=colour)
    axes.plot([rate["min"], rate["max"]], [y, y], "|-", linewidth=1.6,
              color=style.INK, markersize=9, solid_capstyle="butt")
    if row["predicted"] is not None:
        mark, = axes.plot(
            row["predicted"]["images_per_second"], y, "D", markersize=7,
            markerfacecolor="white", markeredgecolor=style.INK,
            linestyle="none")
        mark.set_label("predicted" if y == 0 else None)
    axes.annotate(f"{row['ratio']['median']:.2f}×", (0, y), (6, 0),
                  textcoords="offset points", va="center", color="white",
                  fontweight="bold")
