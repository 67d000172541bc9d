"""Atomic file writes, and files of arrays."""
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

#: the path of a file
FilePath = str | os.PathLike[str]


def check_folder(file: str, option: str) -> None:
    """Raise FileNotFoundError if the folder of `file` does not exist.

    Called before a long computation, not after it. `option` names the file in
    the message."""
    folder = os.path.dirname(os.path.abspath(file))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"the folder of {option} must exist; received "
                                f"{file!r}. Make {folder!r} first.")


def path_of(file: FilePath) -> str:
    """`file` as a str. Raises TypeError for other types: `open` would treat
    an int as an open file descriptor, and close it."""
    if not isinstance(file, (str, os.PathLike)):
        raise TypeError("a path names a file; received "
                        f"{type(file).__name__}. Pass a str or a Path.")
    path = os.fsdecode(file)
    if "\0" in path:
        raise ValueError("a path must not contain a null character; received "
                         f"{path!r}. Remove it.")
    return path


def check_not_read(file: FilePath, *read: FilePath | None) -> None:
    """Raise ValueError if the output `file` is one of the inputs `read`."""
    for path in read:
        if path is not None and os.path.exists(file) \
                and os.path.exists(path) and os.path.samefile(file, path):
            raise ValueError(f"received {path_of(file)!r} to read and to "
                             "write. Name another output file.")


def check_not_other(part: str, file: FilePath,
                    cure: str = "Name another file, or remove it.") -> None:
    """Raise FileExistsError if `part` would overwrite a `file` of different
    contents, which may hold edits."""
    if os.path.isfile(file) and not filecmp.cmp(part, file, shallow=False):
        raise FileExistsError(f"{path_of(file)!r} exists, with other "
                              f"contents. {cure}")


def check_file(file: FilePath) -> str:
    """The real path of `file`. Raises IsADirectoryError for a folder."""
    path = os.path.realpath(path_of(file))
    if os.path.isdir(path):
        raise IsADirectoryError(f"expected a file name; received the folder "
                                f"{file!r}. Name a file in it.")
    return path


@contextlib.contextmanager
def part_of(file: Any, end: str = ".part") -> Iterator[str]:
    """Path of a temporary file that replaces `file` at the end of the block.

    The temporary file is deleted if the block raises, also after Ctrl-C. Its
    name is unique, so several processes may write the same `file`; the last
    one wins. An existing file keeps its mode; a new one gets the umask's. A
    link is kept, and its target replaced. Pipes and devices such as /dev/null
    are written directly.

    Parameters
    ----------
    file : path
    end : str
        Suffix of the temporary file.

    Raises
    ------
    IsADirectoryError
        `file` is a folder.
    FileNotFoundError
        The folder of `file` does not exist.
    OSError
        Errors of the operating system, with the name of `file`.
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
    """The KeyboardInterrupt in the context of `error`, or None.

    Code that is interrupted (closing an archive) may raise another error
    instead. `handled`: the exception handled before the block."""
    found: BaseException | None = error
    while isinstance(found, Exception) and found is not handled:
        found = found.__context__
    return None if found is error or found is handled else found


@contextlib.contextmanager
def replacing(file: Any) -> Iterator[Any]:
    """A text file open for writing that replaces `file` as in `part_of`."""
    with part_of(file) as path, open(path, "w", encoding="utf-8") as part:
        yield part


def json_text(data: Any) -> str:
    """`data` as JSON, with a line end. A NaN, which JSON does not know, is an
    error (ValueError)."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def write_json(file: Any, data: Any) -> None:
    """Write `data` to `file` as JSON, atomically. Raises ValueError for NaN
    and infinity, which JSON lacks."""
    text = json_text(data)
    with replacing(file) as part:
        part.write(text)


def write_arrays(file: FilePath, header: Mapping[str, Any],
                 arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file of `tensor_files`, atomically. Blocks until it is on disk.

    Temporary files of killed processes in the same folder are removed.

    Parameters
    ----------
    header : dict
        Serializable as JSON.
    arrays : dict of str -> ndarray

    Raises
    ------
    FileExistsError
        `file` is a link. Others with write access to the folder could have
        created it, with any of your files as its target.
    """
    path = path_of(file)
    if os.path.islink(path):
        raise FileExistsError(
            "a checkpoint must not be a link; received "
            f"{path!r}, a link to {os.readlink(path)!r}. Pass the name of "
            "that file, or remove the link.")
    parts = tensor_files.parts(header, arrays)
    with contextlib.ExitStack() as held:    # holds the lock until the end
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


#: suffix of the temporary files of `write_arrays`
_SAVED = ".saving"
_LEFT = re.compile("[0-9a-f]{16}" + re.escape(_SAVED))


def _open_locked(part: str) -> Any:
    """Open `part` for writing, locked while it is open: `sweep` removes
    unlocked files only."""
    while True:
        stream = open(part, "wb", buffering=0)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(stream, fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink:
            return stream
        stream.close()      # swept before it was locked


def _sync_folder(folder: str) -> None:
    """Block until the entries of `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:    # some file systems do not support it
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sweep(folder: str) -> None:
    """Remove temporary files of killed processes from `folder`. The files of
    running processes are locked, and stay."""
    for entry in os.scandir(folder):
        if _LEFT.fullmatch(entry.name) \
                and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(OSError), open(entry.path, "rb") as part:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)


def opened(file: FilePath) -> Any:
    """Open `file` for reading bytes. Does not block on a pipe."""
    return open(path_of(file), "rb", opener=lambda path, flags: os.open(
        path, flags | os.O_NONBLOCK))


def read_arrays(file: FilePath, forms: Collection[str] | None, expected: str,
                unpack: Callable[[dict[str, Any], dict[str, np.ndarray]], Any]
                ) -> Any:
    """Read a file of `write_arrays`, or an npz file of older mgpu versions.

    Nothing in the file is executed. Its arrays take at most as much memory as
    the file has bytes.

    Parameters
    ----------
    forms : collection of str, optional
        Accepted values of "format" in the header. None: any safetensors file,
        also without a header.
    expected : str
        Description of the expected file, for the error message.
    unpack : callable
        ``unpack(header, arrays)``

    Returns
    -------
    object
        The result of `unpack`.

    Raises
    ------
    OSError
        The file cannot be opened.
    CheckpointCorrupt
        The file is corrupt, has another format, or `unpack` raises an
        Exception.
    """
    with opened(file) as stream:
        try:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ValueError("not a regular file")
            if stream.read(4) == b"PK\3\4":     # no header is as long
                arrays = dict(npy_members(stream))
                header = json.loads(str(arrays.pop("header")))
            else:
                stream.seek(0)
                header, arrays = tensor_files.read(stream, about.st_size)
            if forms is not None and header.get("format") not in forms:
                raise ValueError(f"the format is {header.get('format')!r}")
            return unpack(header, arrays)
        except Exception as error:  # of zip, NumPy or JSON
            raise corrupt(file, expected, error) from error


def corrupt(file: FilePath, expected: str, why: Exception
            ) -> CheckpointCorrupt:
    """The error for a `file` that is corrupt or not the `expected` one."""
    return CheckpointCorrupt(
        f"expected {expected}; {os.fspath(file)!r} is not one, or is damaged "
        f"({why}). Use a whole file.")


def npy_members(stream: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of each npy member of an open zip file, in file order.

    The arrays take at most as much memory as the file has bytes. Raises the
    errors of zipfile and NumPy, and ValueError."""
    import zipfile
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        size = os.fstat(stream.fileno()).st_size
        if max(sum(m.file_size for m in members),
               sum(m.compress_size for m in members)) > size:
            raise ValueError("its arrays are larger than it is: they are "
                             "compressed or overlap")
        for m in members:
            with archive.open(m) as part:   # may be longer than its header
                data = part.read(m.file_size)
            if len(data) != m.file_size:
                raise ValueError(f"{m.filename!r} is truncated")
            yield m.filename.removesuffix(".npy"), _array(data)


def _array(data: bytes) -> np.ndarray:
    """The array of an npy file, in the memory of `data`. Unlike in NumPy's
    reader, the size in the header allocates nothing."""
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("the npy version is not 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    flat = np.frombuffer(data, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if fortran else "C")
