"""MXNet's ``.params``: files of named arrays.

The layout is that of ``NDArray::Save`` and ``NDArray::Load`` of MXNet 1.9.1
(src/ndarray/ndarray.cc), little-endian, without padding or a checksum::

    u64 0x112, u64 0, u64 n, n arrays, u64 k (0 or n), k names

A name is a u64 length and UTF-8. An array begins with a u32 that says its
version, and then has

- V2 and V3: i32 storage (0 dense, 1 row-sparse, 2 CSR); where sparse, the
  shape of the stored values; the shape; context (i32 type, i32 number); i32
  dtype; where sparse, dtype and shape of each index array; the values; the
  index arrays.
- V1: u32 dimensions, i64 sizes; context; dtype; the values.
- older: the first u32 is the number of dimensions, followed by u32 sizes.

A shape is an i32 number of dimensions and i64 sizes. V3 is what MXNet writes
under NumPy's shapes (``mx.npx.set_np``), where a shape may have 0 dimensions.
"""
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mgpu.files import FilePath, part_of, path_of

_LIST = 0x112
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_DTYPES = [np.dtype(name).newbyteorder("<") for name in (
    "float32", "float64", "float16", "uint8", "int32", "int8", "int64",
    "bool")]
_CPU = 1
#: CPU, GPU, pinned and shared memory: arrays come back on the CPU
_CONTEXTS = (1, 2, 3, 5)
_DENSE, _ROW_SPARSE, _CSR = range(3)
_INDICES = {_DENSE: 0, _ROW_SPARSE: 1, _CSR: 2}
#: more dimensions than MXNet's and NumPy's arrays have
_DIMENSIONS = 32
#: bytes from which on an array is mapped from its file, not read
_MAPPED = 1 << 20


class UnreadableParams(ValueError):
    """A file that is not what MXNet writes, or is damaged."""


class RowSparse(NamedTuple):
    """A matrix most of whose rows are zero, as MXNet stores it."""

    shape: tuple[int, ...]
    data: np.ndarray            # (rows that are stored, *shape[1:])
    indices: np.ndarray         # int64, which rows these are, ascending

    def to_dense(self) -> np.ndarray:
        """A new array of the whole matrix."""
        dense = np.zeros(self.shape, self.data.dtype)
        dense[self.indices] = self.data
        return dense


class CSR(NamedTuple):
    """A matrix in compressed sparse rows, as MXNet stores it."""

    shape: tuple[int, ...]
    data: np.ndarray            # (values that are stored,)
    indptr: np.ndarray          # int64, (rows + 1,): where each row begins
    indices: np.ndarray         # int64, the column of each value

    def to_dense(self) -> np.ndarray:
        """A new array of the whole matrix."""
        dense = np.zeros(self.shape, self.data.dtype)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.indptr))
        dense[rows, self.indices] = self.data
        return dense


#: what a file holds under one name; None: an NDArray that has no value
Array = np.ndarray | RowSparse | CSR | None


def load_params(path: FilePath) -> dict[str, Array] | list[Array]:
    """The arrays of a file that MXNet has written.

    Reads what ``save_parameters``, ``HybridBlock.export``,
    ``collect_params().save``, ``mx.nd.save``, ``mx.npx.save`` and
    ``mx.model.save_checkpoint`` write, in all versions of the format, and the
    zip of ``.npy`` of MXNet 2. Names are as they are in the file, with
    ``arg:`` and ``aux:`` where ``export`` wrote them.

    Parameters
    ----------
    path : str or os.PathLike

    Returns
    -------
    dict of str to array, or list of array
        A list where the file has no names. NumPy arrays of the dtype and
        shape of the file; `RowSparse` and `CSR` for sparse ones; None for an
        NDArray without a value. An array of 1 MB or more is mapped from the
        file where its memory is aligned there: the file must stay as it is
        while the array is in use. Writing to it changes the array alone.

    Raises
    ------
    UnreadableParams
        If the file is damaged, or another kind of file. Nothing larger than
        the file is allocated.
    OSError
        If it cannot be opened.
    """
    path = path_of(path)
    with open(path, "rb") as file:
        start = file.read(4)
        if start in (b"PK\x03\x04", b"PK\x05\x06"):
            return _load_zip(path)
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise UnreadableParams(f"expected a file of MXNet's arrays; "
                                   f"received {path!r}, which is empty.")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return _load(_Reader(mapped, repr(path), _MAPPED))


def read_array(data: bytes) -> Array:
    """One array, as NDArrays are pickled: in the format of ``.params``
    without its list. UnreadableParams."""
    reader = _Reader(data, "an array")
    found = reader.array()
    reader.end()
    return found


def save_params(path: FilePath, arrays: Mapping[str, Array] | Sequence[Array],
                *, numpy_shapes: bool | None = None) -> None:
    """Write arrays as MXNet 1.9.1 does, to the byte; whole or not at all.

    Parameters
    ----------
    path : str or os.PathLike
    arrays : mapping of str to array, or sequence of array
        NumPy arrays, `RowSparse` or `CSR`, of a dtype that MXNet has.
    numpy_shapes : bool, optional
        Whether to write version 3, which MXNet reads under ``npx.set_np()``
        alone, or version 2, which it reads there and elsewhere. Default:
        version 2, unless an array has no dimensions or no elements.

    Raises
    ------
    TypeError, ValueError
        If MXNet has no such array. Nothing is written.
    """
    named = isinstance(arrays, Mapping)
    names = list(arrays) if isinstance(arrays, Mapping) else []
    for name in names:
        if not isinstance(name, str):
            raise TypeError("names of arrays are texts; received "
                            f"{name!r}.")
    every = [_checked(names[i] if named else str(i), x) for i, x in enumerate(
        arrays.values() if isinstance(arrays, Mapping) else arrays)]
    small = [i for i, x in enumerate(every) if isinstance(x, np.ndarray)
             and not (x.ndim and x.size)]
    if numpy_shapes is None:
        numpy_shapes = bool(small)
    elif small and not numpy_shapes:
        raise ValueError(
            "version 2 has no arrays without dimensions or elements; received "
            f"{names[small[0]] if named else small[0]!r} of shape "
            f"{every[small[0]].shape}. Leave numpy_shapes out.")
    with part_of(path) as part, open(part, "wb") as file:
        file.write(struct.pack("<QQQ", _LIST, 0, len(every)))
        for x in every:
            _write(file, x, _V3 if numpy_shapes else _V2)
        file.write(struct.pack("<Q", len(names)))
        for name in names:
            text = name.encode()
            file.write(struct.pack("<Q", len(text)) + text)


def _checked(name: str, x: Any) -> Any:
    """`x` as it is written. TypeError for what MXNet has not."""
    values = x.data if isinstance(x, (RowSparse, CSR)) else x
    if x is not None and (not isinstance(values, np.ndarray)
                          or _code(values.dtype) is None):
        kind = values.dtype if isinstance(values, np.ndarray) \
            else type(x).__name__
        raise TypeError(
            "MXNet's files hold NumPy arrays of "
            f"{', '.join(d.name for d in _DTYPES)}; received {kind} for "
            f"{name!r}. Convert it first, for example with .astype.")
    return x


def _code(dtype: np.dtype) -> int | None:
    dtype = dtype.newbyteorder("<")
    return _DTYPES.index(dtype) if dtype in _DTYPES else None


def _write(file: BinaryIO, x: Any, version: int) -> None:
    def shape(sizes: Sequence[int]) -> bytes:
        return struct.pack(f"<i{len(sizes)}q", len(sizes), *sizes)

    def of(values: np.ndarray) -> bytes:
        return struct.pack("<i", _code(values.dtype))

    def raw(values: np.ndarray) -> Any:
        return np.ascontiguousarray(
            values, values.dtype.newbyteorder("<")).reshape(-1).view("u1").data
    if x is None:
        file.write(struct.pack("<Ii", version, _DENSE)
                   + struct.pack("<i", -1 if version == _V3 else 0))
        return
    context = struct.pack("<ii", _CPU, 0)
    if isinstance(x, np.ndarray):
        file.write(struct.pack("<Ii", version, _DENSE) + shape(x.shape)
                   + context + of(x))
        file.write(raw(x))
        return
    storage, indices = (_ROW_SPARSE, [x.indices]) \
        if isinstance(x, RowSparse) else (_CSR, [x.indptr, x.indices])
    file.write(struct.pack("<Ii", version, storage) + shape(x.data.shape)
               + shape(x.shape) + context + of(x.data)
               + b"".join(of(i) + shape(i.shape) for i in indices))
    for values in (x.data, *indices):
        file.write(raw(values))


def _load(reader: "_Reader") -> dict[str, Array] | list[Array]:
    reader.part = "the head"
    if reader.number("Q") != _LIST:
        raise reader.error("it does not begin as one")
    if reader.number("Q"):
        raise reader.error("its second number is not 0")
    n = reader.number("Q")
    if 4 * n > reader.size:
        raise reader.error(f"it says that it has {n} arrays")
    arrays = []
    for i in range(n):
        reader.part = f"array {i}"
        arrays.append(reader.array())
    reader.part = "the names"
    k = reader.number("Q")
    if k not in (0, n):
        raise reader.error(f"it has {n} arrays and {k} names")
    names = [reader.text() for _ in range(k)]
    reader.end()
    if len(set(names)) != len(names):
        raise reader.error("two arrays have the same name")
    return dict(zip(names, arrays)) if k else arrays


def _load_zip(path: str) -> dict[str, Array]:
    """What MXNet 2 writes: a zip of npy, as np.savez does."""
    import zipfile
    found: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if sum(m.file_size for m in members) > os.path.getsize(path):
                raise ValueError("its arrays are larger than it is")
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                found[name] = arrays[name]
    except (ValueError, OSError, EOFError, KeyError,
            zipfile.BadZipFile, NotImplementedError) as error:
        raise UnreadableParams(
            "expected a zip of arrays, as MXNet 2 writes it; "
            f"{path!r} is not one, or is damaged ({error}). Use a whole "
            "file.") from error
    return found


class _Reader:
    """Goes through the bytes of a file, and refuses to leave them."""

    def __init__(self, data: Any, file: str, mapped: float = math.inf
                 ) -> None:
        self._data, self._file = memoryview(data), file
        self.size = len(self._data)
        self._at = 0
        #: bytes from which on an array stays where it is
        self._mapped = mapped
        self.part = "the array"

    def error(self, why: str) -> UnreadableParams:
        return UnreadableParams(
            f"expected a file of MXNet's arrays; {self._file} is not one, or "
            f"is damaged: {why} ({self.part}, byte {self._at}). Use a whole "
            "file.")

    def _bytes(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise self.error(f"it ends where {count} bytes should follow")
        self._at += count
        return self._data[self._at - count:self._at]

    def number(self, kind: str) -> int:
        return struct.unpack("<" + kind, self._bytes(
            struct.calcsize("<" + kind)))[0]

    def text(self) -> str:
        try:
            return str(self._bytes(self.number("Q")), "utf-8")
        except UnicodeDecodeError as error:
            raise self.error("a name is not UTF-8") from error

    def end(self) -> None:
        if self._at != len(self._data):
            raise self.error("more bytes follow its end")

    def _sizes(self, count: int, kind: str) -> tuple[int, ...]:
        if count > _DIMENSIONS:
            raise self.error(f"an array has {count} dimensions")
        sizes = tuple(self.number(kind) for _ in range(count))
        if min(sizes, default=0) < 0:
            raise self.error(f"an array has the shape {sizes}")
        return sizes

    def _any_shape(self) -> tuple[int, ...] | None:
        """None: unknown."""
        count = self.number("i")
        if count < -1:
            raise self.error(f"an array has {count} dimensions")
        return None if count == -1 else self._sizes(count, "q")

    def _known_shape(self) -> tuple[int, ...]:
        shape = self._any_shape()
        if shape is None:
            raise self.error("a part of a sparse array has no shape")
        return shape

    def _dtype(self) -> np.dtype:
        code = self.number("i")
        if not 0 <= code < len(_DTYPES):
            raise self.error(f"no dtype has the number {code}")
        return _DTYPES[code]

    def _context(self) -> None:
        kind = self.number("i")
        self.number("i")
        if kind not in _CONTEXTS:
            raise self.error(f"no kind of device has the number {kind}")

    def _values(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        flat = np.frombuffer(self._bytes(size), dtype)
        # torch takes no memory that does not begin at a multiple of an item.
        if size < self._mapped or not flat.flags.aligned:
            flat = flat.copy()
        return flat.astype(dtype.newbyteorder("="), copy=False).reshape(shape)

    def array(self) -> Array:
        version = self.number("I")
        if version not in (_V2, _V3):
            return self._old_array(version)
        storage = self.number("i")
        if storage not in _INDICES:
            raise self.error(f"no storage has the number {storage}")
        stored = self._known_shape() if storage else ()
        shape = self._any_shape()
        if shape is None and version == _V2:
            raise self.error("an array has no shape")
        if shape is None or version == _V2 and not shape:
            return None
        self._context()
        dtype = self._dtype()
        indices = [(self._dtype(), self._known_shape())
                   for _ in range(_INDICES[storage])]
        if not storage:
            return self._values(shape, dtype)
        values = self._values(stored, dtype)
        columns = [self._values(sizes, of) for of, sizes in indices]
        return self._sparse(shape, values, columns)

    def _sparse(self, shape: tuple[int, ...], values: np.ndarray,
                columns: list[np.ndarray]) -> RowSparse | CSR:
        """Checked, since an index out of range is no array."""
        for column in columns:
            if column.dtype.kind != "i" or column.ndim != 1:
                raise self.error("the indices of a sparse array are "
                                 f"{column.dtype} of {column.shape}")
        if len(columns) == 1:
            rows = columns[0]
            if not shape or values.shape != (len(rows), *shape[1:]) \
                    or not _ascend(rows, shape[0]):
                raise self.error("the rows of a sparse array are not in it")
            return RowSparse(shape, values, rows)
        starts, of = columns
        if len(shape) != 2 or values.shape != of.shape \
                or len(starts) != shape[0] + 1 or starts[0] != 0 \
                or starts[-1] != len(of) or (np.diff(starts) < 0).any() \
                or len(of) and not 0 <= of.min() <= of.max() < shape[1]:
            raise self.error("the values of a sparse array are not in it")
        return CSR(shape, values, starts, of)

    def _old_array(self, version: int) -> Array:
        if version == _V1:
            shape = self._sizes(self.number("I"), "q")
        elif version <= _DIMENSIONS:
            shape = self._sizes(version, "I")
        else:
            raise self.error("an array begins with the number "
                             f"{version:#x}, which no version has")
        if not shape:
            return None
        self._context()
        return self._values(shape, self._dtype())


def _ascend(rows: np.ndarray, count: int) -> bool:
    return not len(rows) or bool(
        (np.diff(rows) > 0).all() and 0 <= rows[0] and rows[-1] < count)
