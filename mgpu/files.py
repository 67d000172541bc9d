"""Files that are written whole or not at all."""
import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

#: what names a file
FilePath = str | os.PathLike[str]


def check_folder(file: str, option: str) -> None:
    """Refuse a `file` whose folder does not exist (FileNotFoundError), before
    the work and not after it. `option`: what the error calls the file."""
    folder = os.path.dirname(os.path.abspath(file))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"the folder of {option} must exist; received "
                                f"{file!r}. Make {folder!r} first.")


@contextlib.contextmanager
def part_of(file: Any) -> Iterator[str]:
    """The path of an empty file to fill, which becomes `file` when the block
    ends without an error, and else disappears.

    A link stays, and the file that it names is replaced. What is not an
    ordinary file, such as a pipe or /dev/null, is written to directly.
    IsADirectoryError for a folder.
    """
    path = os.path.realpath(file)
    if os.path.isdir(path):
        raise IsADirectoryError(f"expected the name of a file; received the "
                                f"folder {file!r}. Name a file in it.")
    if os.path.exists(path) and not os.path.isfile(path):
        yield path
        return
    import tempfile     # of no use to `import mgpu`, which it slows down
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path),
                                         suffix=".part")
    os.close(handle)
    try:
        yield temporary
        os.chmod(temporary, 0o644)      # only the owner reads mkstemp's
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def replacing(file: Any) -> Iterator[Any]:
    """A text file to write to, that becomes `file` as `part_of` says."""
    with part_of(file) as path, open(path, "w", encoding="utf-8") as part:
        yield part


def write_json(file: Any, data: Any) -> None:
    """Write `data` as JSON, whole or not at all. A NaN, which JSON does not
    know, is an error (ValueError)."""
    text = json.dumps(data, indent=1, allow_nan=False)
    with replacing(file) as part:
        part.write(text + "\n")
