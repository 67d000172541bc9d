"""HTML output for Jupyter notebooks."""
import sys
from collections.abc import Iterable, Sequence
from typing import Any

#: maximum number of rows displayed
MOST = 60


def table(title: str, header: Sequence[str],
          rows: Iterable[Sequence[Any]]) -> str:
    """HTML of a table with a title. Displays the first `MOST` rows, and the
    number of the others."""
    from html import escape     # 3 ms of `import mgpu`
    rows = list(rows)
    lines = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row)
             for row in rows[:MOST]]
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    more = f"<p>and {len(rows) - MOST} more rows</p>" \
        if len(rows) > MOST else ""
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (f"<p>{escape(title)}</p><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>{more}")


def in_notebook() -> bool:
    """Whether this code runs in a Jupyter kernel. IPython is not imported
    for that: in a notebook it has been imported long before."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
