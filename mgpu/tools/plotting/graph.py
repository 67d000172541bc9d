"""The graph of one training step, of the chapter "Automatic Parallelism"."""
from itertools import pairwise
from typing import Any

from mgpu.tools.plotting import style
from mgpu.utils.files import FilePath
from mgpu.utils.notebook import in_notebook

_FILLS = {"data and weights": "#ececec", "forward pass": "#cfe6f5",
          "backward pass": "#fbdcc4", "copy between devices": "#f9ecb8",
          "sum and update": "#c9ead9"}
_DATA, _FORWARD, _BACKWARD, _COPY, _HOST = _FILLS

# The nodes: text, kind, column, first row, last row. Columns count from the
# CPU outwards: CPU, copies, weights, work. Rows follow the time. The nodes
# of a GPU are drawn twice, {k} is its number.
HOST_NODES = {
    "batch": ("minibatch $X, y$", _DATA, 0, 0, 0),
    "sum2": ("add up $\\partial W_2$", _HOST, 0, 4, 4),
    "step2": ("update $W_2$", _HOST, 0, 5, 5),
    "sum1": ("add up $\\partial W_1$", _HOST, 0, 6, 6),
    "step1": ("update $W_1$", _HOST, 0, 7, 7),
}
GPU_NODES = {
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
EDGES = [edge for path in (
    "batch put slice layer1 layer2 loss back2 back1 get1 sum1 step1 set1 new1",
    "w1 layer1", "w2 layer2", "back2 get2 sum2 step2 set2 new2")
    for edge in pairwise(path.split())]
_COLUMN_X = (0.0, 1.9, 3.35, 4.85)          # inches from the middle
_COLUMN_WIDTH = (1.6, 1.25, 0.9, 1.6)
_ROW, _BOX = 0.78, 0.44                     # inches: a row, a box in it


def plot_graph(file: FilePath | None = None) -> Any:
    """Draw one training step of a two-layer perceptron on a CPU and two
    GPUs as the graph of its operations.

    Every box is an operation or a value, every arrow says what must be done
    before what. Time runs downwards; boxes that no path of arrows joins may
    run at the same time, and a backend that knows the graph lets them.

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
        `file` has another ending.
    FileNotFoundError
        The folder of `file` does not exist.
    ImportError
        Matplotlib is not installed.
    """
    path = None if file is None else style.checked_file(file)
    figure = style.new_figure((12.0, 7.6), dpi=150)
    from matplotlib.patches import FancyBboxPatch, Patch

    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-6, 6), ylim=(-6.75, 0.85))      # one unit is one inch
    axes.axis("off")

    def rounded(corner: Any, width: float, height: float, **look: Any) -> None:
        axes.add_patch(FancyBboxPatch(
            corner, width, height, boxstyle="round,pad=0,rounding_size=0.1",
            **look))

    centred = dict(ha="center", va="center", color=style.INK)
    for label, left, right in (("GPU 1", -5.85, -2.7), ("CPU", -1, 1),
                               ("GPU 2", 2.7, 5.85)):
        rounded((left, -5.85), right - left, 6.25, linewidth=0, zorder=0,
                facecolor="#f5f6f8")
        axes.text((left + right) / 2, 0.6, label, fontsize=14,
                  fontweight="bold", **centred)
    boxes: dict[str, _Box] = {}
    for k, side, nodes in ((1, -1, {**HOST_NODES, **GPU_NODES}),
                           (2, 1, GPU_NODES)):
        for name, (text, kind, column, first, last) in nodes.items():
            boxes[name] = x, y, width, height = (
                side * _COLUMN_X[column], -(first + last) / 2 * _ROW,
                _COLUMN_WIDTH[column], (last - first) * _ROW + _BOX)
            rounded((x - width / 2, y - height / 2), width, height, zorder=3,
                    facecolor=_FILLS[kind], edgecolor=style.GREY,
                    linewidth=0.9)
            axes.text(x, y, text.replace("{k}", str(k)), fontsize=11,
                      zorder=4, **centred)
        for before, then in EDGES:
            if before in nodes or then in nodes:    # the CPU's own: once
                start, end = _ends(boxes[before], boxes[then])
                axes.annotate("", end, start, arrowprops=dict(
                    arrowstyle="-|>", color=style.INK, linewidth=1.3,
                    shrinkA=0, shrinkB=0.5, mutation_scale=12))
    figure.legend(
        handles=[Patch(facecolor=fill, edgecolor=style.GREY, label=kind)
                 for kind, fill in _FILLS.items()],
        loc="lower center", bbox_to_anchor=(0.5, 0.045), frameon=False,
        ncols=len(_FILLS), fontsize=11)
    axes.text(0, -6.55, "Time runs downwards. Boxes that no path of arrows "
              "joins may run at the same time.", fontsize=11, **centred)
    if path is not None:
        style.write_figure(figure, path)
    elif in_notebook():
        style.show(figure)
    return figure


_Box = tuple[float, float, float, float]    # centre x and y, width, height


def _ends(start: _Box, end: _Box
          ) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where the arrow between two boxes begins and ends: level, at the
    height of the lower one, or straight down inside a column."""
    (x0, y0, w0, h0), (x1, y1, w1, h1) = start, end
    if x0 == x1:
        return (x0, y0 - h0 / 2), (x1, y1 + h1 / 2)
    y, right = (y0 if h0 < h1 else y1), (1 if x1 > x0 else -1)
    return (x0 + right * w0 / 2, y), (x1 - right * w1 / 2, y)
