"""A progress bar for trainings, benchmarks and comparisons."""
import sys
from typing import Any

from mgpu import distributed
from mgpu.utils.notebook import in_notebook


def _on_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed \
        and sys.stderr.isatty()


class ProgressBar:
    """A progress bar on standard error; in a notebook, below the cell.

    Use it in a ``with`` block. Without the package tqdm nothing is drawn, nor
    where standard error is no terminal (a file, a pipe). In distributed
    training rank 0 alone draws.

    Parameters
    ----------
    shown : bool
        False: draw nothing.
    description : str
        The label in front of the bar.
    total : int, optional
        The number of units; None if unknown.
    unit : str
        The name of a unit.
    """

    def __init__(self, shown: bool, description: str,
                 total: int | None = None, unit: str = "step") -> None:
        self._bar: Any = None
        if shown and distributed.is_main() and (_on_terminal()
                                                or in_notebook()):
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=description, unit=unit,
                             leave=False)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self) -> None:
        """Count one more unit."""
        if self._bar is not None:
            self._bar.update()

    def reach(self, done: int, total: int) -> None:
        """Set the progress to `done` of `total` units."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)

    def note(self, text: str) -> None:
        """Show a text behind the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)
