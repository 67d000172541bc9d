"""Files that are written whole or not at all, and files of arrays."""
import contextlib
import errno
import fcntl
import filecmp
import io
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from mgpu.errors import CheckpointCorrupt
from mgpu.utils import tensor_files

#: what names a file
FilePath = str | os.PathLike[str]


def check_folder(file: str, option: str) -> None:
    """Refuse a `file` whose folder does not exist (FileNotFoundError), before
    the work and not after it. `option`: what the error calls the file."""
    folder = os.path.dirname(os.path.abspath(file))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"the folder of {option} must exist; received "
                                f"{file!r}. Make {folder!r} first.")


def path_of(file: FilePath) -> str:
    """The text of a path. TypeError for anything else: `open` would take a
    number for the descriptor of an open file, and close that."""
    if not isinstance(file, (str, os.PathLike)):
        raise TypeError("a path names a file; received "
                        f"{type(file).__name__}. Pass a text or a Path.")
    path = os.fsdecode(file)
    if "\0" in path:
        raise ValueError("a path has no null character; received "
                         f"{path!r}. Correct it.")
    return path


def check_not_read(file: FilePath, *read: FilePath | None) -> None:
    """Refuse to write a `file` that is one of those that are `read`
    (ValueError)."""
    for path in read:
        if path is not None and os.path.exists(file) \
                and os.path.exists(path) and os.path.samefile(file, path):
            raise ValueError(f"received {path_of(file)!r} to read and to "
                             "write. Name another file to write.")


def check_not_other(part: str, file: FilePath,
                    cure: str = "Name another file, or remove it.") -> None:
    """Refuse to let `part` replace a `file` of other contents
    (FileExistsError), such as a person's edits."""
    if os.path.isfile(file) and not filecmp.cmp(part, file, shallow=False):
        raise FileExistsError(f"{path_of(file)!r} is there, with other "
                              f"contents. {cure}")


def check_file(file: FilePath) -> str:
    """The real path of `file`. IsADirectoryError for a folder."""
    path = os.path.realpath(path_of(file))
    if os.path.isdir(path):
        raise IsADirectoryError(f"expected the name of a file; received the "
                                f"folder {file!r}. Name a file in it.")
    return path


@contextlib.contextmanager
def part_of(file: Any, end: str = ".part") -> Iterator[str]:
    """The path of a file to make, which becomes `file` when the block ends
    without an error, and else disappears, also after Ctrl-C.

    Each call has a path of its own, so several processes may write one
    `file`: it is that of the last. A file that was there keeps its mode, a
    new one has what the umask leaves. A link stays, and the file that it
    names is replaced. What is not an ordinary file, such as a pipe or
    /dev/null, is written to directly. IsADirectoryError for a folder,
    FileNotFoundError where its folder is missing; other errors of the system
    name `file` too. `end`: of the part's name.
    """
    path = check_file(file)
    if os.path.exists(path) and not os.path.isfile(path):
        yield path
        return
    check_folder(path, "a file")
    # A name, not a file: Ctrl-C finds nothing here that it could leave.
    part = os.path.join(os.path.dirname(path), os.urandom(8).hex() + end)
    handled = sys.exc_info()[1]
    try:
        yield part
        with contextlib.suppress(FileNotFoundError):    # it is new
            os.chmod(part, os.stat(path).st_mode & 0o777)
        os.replace(part, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno \
                and error.filename in (None, part):
            error.filename = path_of(file)
        with contextlib.suppress(FileNotFoundError):    # not made, or moved
            os.unlink(part)
        interrupt = _interrupt_behind(error, handled)
        if interrupt is not None:
            raise interrupt from error
        raise


def _interrupt_behind(error: BaseException, handled: BaseException | None
                      ) -> BaseException | None:
    """Ctrl-C, where code that it met (an archive that is closed) has made
    another error of it. `handled`: what was being handled before."""
    found: BaseException | None = error
    while isinstance(found, Exception) and found is not handled:
        found = found.__context__
    return None if found is error or found is handled else found


@contextlib.contextmanager
def replacing(file: Any) -> Iterator[Any]:
    """A text file to write to, that becomes `file` as `part_of` says."""
    with part_of(file) as path, open(path, "w", encoding="utf-8") as part:
        yield part


def json_text(data: Any) -> str:
    """`data` as JSON, with a line end. A NaN, which JSON does not know, is an
    error (ValueError)."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def write_json(file: Any, data: Any) -> None:
    """Write `json_text`, whole or not at all."""
    text = json_text(data)
    with replacing(file) as part:
        part.write(text)


def write_arrays(file: FilePath, header: Mapping[str, Any],
                 arrays: Mapping[str, np.ndarray]) -> None:
    """Write a `tensor_files` with `header`, which is fit for JSON, whole or
    not at all. Returns when it is on the disk. Removes the parts that killed
    processes have left in its folder. FileExistsError where `file` is a link:
    who can write to its folder could have made it, to any file of yours."""
    path = path_of(file)
    if os.path.islink(path):
        raise FileExistsError(
            "a checkpoint does not replace a link; received "
            f"{path!r}, a link to {os.readlink(path)!r}. Pass the name of "
            "that file, or remove the link.")
    parts = tensor_files.parts(header, arrays)
    with contextlib.ExitStack() as held:    # the lock is kept until the end
        with part_of(path, _SAVED) as part:
            stream = held.enter_context(_open_locked(part))
            for data in parts:
                while data:
                    data = data[stream.write(data):]
            if os.path.isfile(part):
                os.fsync(stream.fileno())
        folder = os.path.dirname(os.path.abspath(path))
        if os.path.isfile(path):
            _sync_folder(folder)
            sweep(folder)


#: how the name of a part ends that `write_arrays` makes
_SAVED = ".saving"
_LEFT = re.compile("[0-9a-f]{16}" + re.escape(_SAVED))


def _open_locked(part: str) -> Any:
    """`part`, open to write, and locked as long as it is open: `sweep`
    removes only what is not locked."""
    while True:
        stream = open(part, "wb", buffering=0)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(stream, fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink:
            return stream
        stream.close()      # swept before it was locked


def _sync_folder(folder: str) -> None:
    """Wait until the names in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:    # not every file system can
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sweep(folder: str) -> None:
    """Remove the parts that killed writers have left in `folder`. Those of
    other writers are locked."""
    for entry in os.scandir(folder):
        if _LEFT.fullmatch(entry.name) \
                and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(OSError), open(entry.path, "rb") as part:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)


def opened(file: FilePath) -> Any:
    """`file`, open to read bytes. A pipe is not waited for."""
    return open(path_of(file), "rb", opener=lambda path, flags: os.open(
        path, flags | os.O_NONBLOCK))


def read_arrays(file: FilePath, forms: Collection[str] | None, expected: str,
                unpack: Callable[[dict[str, Any], dict[str, np.ndarray]], Any]
                ) -> Any:
    """``unpack(header, arrays)`` of a file of `write_arrays`, or of the npz
    files that older versions of mgpu have written.

    Nothing in it is executed, and its arrays take as much memory as it has
    bytes. OSError for a file that cannot be opened; CheckpointCorrupt, saying
    what was `expected`, for one that is damaged, whose header has a "format"
    that is not in `forms` (None: any safetensors file, also without a
    header), or that `unpack` raises an Exception for.
    """
    with opened(file) as stream:
        try:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ValueError("it is no regular file")
            if stream.read(4) == b"PK\3\4":     # no header is as long
                arrays = dict(npy_members(stream))
                header = json.loads(str(arrays.pop("header")))
            else:
                stream.seek(0)
                header, arrays = tensor_files.read(stream, about.st_size)
            if forms is not None and header.get("format") not in forms:
                raise ValueError(f"its format is {header.get('format')!r}")
            return unpack(header, arrays)
        except Exception as error:  # zip, NumPy, JSON: each has its own
            raise corrupt(file, expected, error) from error


def corrupt(file: FilePath, expected: str, why: Exception
            ) -> CheckpointCorrupt:
    """The error of a `file` that is not what is `expected`."""
    return CheckpointCorrupt(
        f"expected {expected}; {os.fspath(file)!r} is not one, or is damaged "
        f"({why}). Use a whole file.")


def npy_members(stream: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of each npy in an open zip file, in its order. As much
    memory as the file has bytes. Errors are those of zip and of NumPy, and
    ValueError."""
    import zipfile
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        size = os.fstat(stream.fileno()).st_size
        if max(sum(m.file_size for m in members),
               sum(m.compress_size for m in members)) > size:
            raise ValueError("its arrays are larger than it is: they are "
                             "compressed, or in one place")
        for m in members:
            with archive.open(m) as part:   # which may hold more than it says
                data = part.read(m.file_size)
            if len(data) != m.file_size:
                raise ValueError(f"{m.filename!r} ends too soon")
            yield m.filename.removesuffix(".npy"), _array(data)


def _array(data: bytes) -> np.ndarray:
    """The array of an npy file, in the memory of `data`: what its header says
    about size allocates nothing, as in NumPy's own reader."""
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("its arrays are not in version 1.0 of npy")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    flat = np.frombuffer(data, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if fortran else "C")
