"""What all figures have in common: colours, axes, and how they are written."""
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu.utils import environment, files
from mgpu.utils.files import FilePath

# Okabe and Ito's palette, which people with any colour vision can tell
# apart. The backends have fixed colours, so that figures can be compared.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
PURPLE, SKY, AMBER = "#CC79A7", "#56B4E9", "#E69F00"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER)
INK, GREY, GRID = "#262626", "#767676", "#e6e6e6"
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
_ENGINES = {"mxnet": BLUE, "torch": ORANGE}


def backend_colours(engines: Sequence[str]) -> dict[str, str]:
    """A colour for each backend: its own one, or one that no backend has."""
    spare = [c for c in PALETTE if c not in _ENGINES.values()]
    others = [e for e in engines if e not in _ENGINES]
    found = {e: spare[i % len(spare)] for i, e in enumerate(others)}
    return {e: _ENGINES.get(e) or found[e] for e in engines}


def tint(colour: str, white: float) -> tuple[float, ...]:
    """`colour` mixed with a share `white` (0 to 1) of white, as RGB."""
    from matplotlib.colors import to_rgb
    return tuple(c + (1 - c) * white for c in to_rgb(colour))


def new_figure(figsize: tuple[float, float], dpi: int = 100,
               layout: Any = None) -> Any:
    """An empty matplotlib figure on a canvas of its own, outside pyplot.

    Parameters
    ----------
    figsize : (float, float)
        Width and height in inches.
    dpi : int
        Pixels per inch.
    layout : str, optional
        A layout engine of matplotlib, for example ``"constrained"``.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    """
    environment.package("matplotlib", "a figure")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=figsize, dpi=dpi, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def wide_figure(height: float, columns: int) -> tuple[Any, list[Any]]:
    """A figure of 1800 pixels by `height` inches of 150 pixels, and its
    `columns` panels from left to right."""
    figure = new_figure((12.0, height), 150, "constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    return figure, [plain_axes(axes) for axes in
                    figure.subplots(1, columns, squeeze=False)[0]]


def plain_axes(axes: Any) -> Any:
    """The same axes without a box and with a quiet grid under the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(color=GREY, labelcolor=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def whole_numbers(axes: Any) -> None:
    """Let the x axis have its ticks at whole numbers only: epochs."""
    from matplotlib.ticker import MaxNLocator
    axes.xaxis.set_major_locator(
        MaxNLocator("auto", integer=True, min_n_ticks=1))


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Horizontal bars: a name for each, the first one on top."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")


def checked_file(file: FilePath) -> Path:
    """`file` as an absolute path, so that a script may change its directory.
    Raises before the work for a wrong one.

    Raises
    ------
    ValueError
        The name does not end in ``.png`` or ``.svg``.
    FileNotFoundError
        Its folder does not exist.
    """
    path = Path(file).absolute()
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"a figure is written as PNG or SVG; received "
                         f"{str(file)!r}. End the name in .png or .svg.")
    files.check_folder(str(file), "a figure")
    return path


def check_figure(file: FilePath) -> None:
    """Raise before the work if drawing into `file` would: see `checked_file`
    and `new_figure`."""
    checked_file(file)
    new_figure((1.0, 1.0))


def write_figure(figure: Any, path: Path) -> None:
    """Write to a file next to `path` and move it there: a viewer that
    watches the file never reads an incomplete image."""
    with files.part_of(path) as part:
        figure.savefig(part, format=path.suffix[1:].lower())


def finished(figure: Any, path: Path, title: str | None) -> Any:
    """Give the figure its title, if it has one, write it and return it."""
    if title:
        figure.suptitle(title, color=INK, fontsize=13)
    write_figure(figure, path)
    return figure


def show(figure: Any, shown: Any = None) -> Any:
    """Display the figure in a notebook, in the place of what an earlier call
    has `shown`; returns what the next call takes."""
    from IPython.display import Image, display
    data = io.BytesIO()
    figure.savefig(data, format="png")
    image = Image(data=data.getvalue())
    if shown is None:
        return display(image, display_id=True)
    shown.update(image)
    return shown
