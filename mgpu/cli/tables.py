"""Text and tables in the terminal, as wide as it is."""
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def print_text(text: str) -> None:
    """Print text that is broken at words where a line is full."""
    Console(highlight=False, markup=False).print(text)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]],
                left: int = 1, tight: bool = False, fold: bool = False
                ) -> None:
    """Print a table. Its columns after the first `left` ones are numbers.
    `tight` saves two characters; `fold` breaks what is too long in the first
    ones, where it would be cut."""
    table = Table(pad_edge=not tight)
    for i, title in enumerate(header):
        table.add_column(title, justify="left" if i < left else "right",
                         no_wrap=not fold or i >= left, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
