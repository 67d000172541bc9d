"""One progress bar for trainings, benchmarks and comparisons."""
import sys
from typing import Any

from mgpu import distributed
from mgpu.utils.notebook import in_notebook


def _on_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed \
        and sys.stderr.isatty()


class ProgressBar:
    """A bar on standard error; in a notebook, under the cell.

    Use it in a ``with`` block. Without the package tqdm nothing is drawn, nor
    where standard error is no terminal (a file, a pipe). With several
    processes (`mgpu.distributed`) rank 0 alone draws.

    Parameters
    ----------
    shown : bool
        False: draw nothing.
    description : str
        What the bar counts, in front of it.
    total : int, optional
        How many units there will be; None where nobody knows.
    unit : str
        What one unit is called.
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
        """One more unit is done."""
        if self._bar is not None:
            self._bar.update()

    def reach(self, done: int, total: int) -> None:
        """`done` units of `total` are done."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)

    def note(self, text: str) -> None:
        """Say something behind the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)
