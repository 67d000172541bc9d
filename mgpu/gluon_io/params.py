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
under NumPy's shapes (``mx.npx.set_np``), where a shape may have 0 dimensions
and storage is dense. A file that it writes is of one version.
"""
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mgpu.errors import UnreadableParams
from mgpu.utils.files import FilePath, npy_members, part_of, path_of

_LIST = 0x112
#: how a file begins
MAGIC = struct.pack("<QQ", _LIST, 0)
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
#: as many elements no array of MXNet 1.9.1 has, as it is built for PyPI
_ELEMENTS = 2 ** 31 - 1
#: bytes from which on an array is mapped from its file, not read
_MAPPED = 1 << 20


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


#: what a file holds under one name
Array = np.ndarray | RowSparse | CSR


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
        A list where the file has no names: MXNet writes the same for no
        arrays and for none with names. NumPy arrays of the dtype and shape
        of the file; `RowSparse` and `CSR` for sparse ones. An array of 1 MB
        or more is mapped from the file where its memory is aligned there:
        the file must stay as it is while the array is in use. Writing to it
        changes the array alone.

    Raises
    ------
    UnreadableParams
        If the file is damaged, or another kind of file, or one that MXNet
        1.9.1 does not read. Nothing larger than the file is allocated.
    OSError
        If it cannot be opened.
    """
    path = path_of(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise UnreadableParams(
            f"expected a file of MXNet's arrays; received {path!r}, which is "
            "no ordinary file. Copy it to one.")
    with open(path, "rb") as file:
        if file.read(4) in (b"PK\x03\x04", b"PK\x05\x06"):
            return _load_zip(file, path)
        if not os.fstat(file.fileno()).st_size:
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
        Whether to write version 3, which ``mx.npx.load`` reads under
        ``npx.set_np()``, or version 2, which ``mx.nd.load`` reads without.
        ``load_parameters`` reads version 2 in both modes. Default: version
        2, unless an array has no dimensions or no elements.

    Raises
    ------
    TypeError, ValueError
        If MXNet has no such array or name. Nothing is written.
    """
    named = isinstance(arrays, Mapping)
    if isinstance(arrays, (str, np.ndarray, RowSparse, CSR)) \
            or not hasattr(arrays, "__iter__"):
        raise TypeError("a file holds arrays in a dict or a list; received "
                        f"{type(arrays).__name__}. Pass for example "
                        "{'weight': array}, or [array].")
    names = list(arrays) if isinstance(arrays, Mapping) else []
    every = list(arrays.values() if isinstance(arrays, Mapping) else arrays)
    for name in names:
        if not isinstance(name, str):
            raise TypeError("names of arrays are texts; received "
                            f"{name!r}.")
        if "\0" in name:
            raise ValueError("MXNet ends a name at its first zero character; "
                             f"received {name!r}. Take another name.")
        if any("\ud800" <= x <= "\udfff" for x in name):
            raise ValueError("a name is written in UTF-8, which has no lone "
                             f"surrogates; received {name!r}. Take another "
                             "name.")
    keys: Sequence[str | int] = names if named else range(len(every))
    for key, x in zip(keys, every):
        _check(key, x)
    small = [key for key, x in zip(keys, every) if isinstance(x, np.ndarray)
             and not (x.ndim and x.size)]
    sparse = [key for key, x in zip(keys, every)
              if not isinstance(x, np.ndarray)]
    if numpy_shapes is None:
        numpy_shapes = bool(small)
    if small and (sparse or not numpy_shapes):
        raise ValueError(
            "version 2 has no arrays without dimensions or elements, and "
            f"version 3 no sparse ones; received {small[0]!r}"
            f"{f' and {sparse[0]!r}' if sparse else ''}. Write them to "
            "different files, and leave numpy_shapes out.")
    if sparse and numpy_shapes:
        raise ValueError("version 3 has no sparse arrays; received "
                         f"{sparse[0]!r}. Leave numpy_shapes out.")
    with part_of(path) as part, open(part, "wb") as file:
        file.write(struct.pack("<QQQ", _LIST, 0, len(every)))
        for x in every:
            _write(file, x, _V3 if numpy_shapes else _V2)
        file.write(struct.pack("<Q", len(names)))
        for name in names:
            text = name.encode()
            file.write(struct.pack("<Q", len(text)) + text)


def _check(key: str | int, x: Any) -> None:
    """TypeError, ValueError for what MXNet's files cannot hold."""
    sparse = isinstance(x, (RowSparse, CSR))
    values = x.data if sparse else x
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError("MXNet's arrays have no masks; received a masked "
                        f"array for {key!r}. Pass its .filled() or its .data.")
    if not isinstance(values, np.ndarray) or _code(values.dtype) is None:
        array = isinstance(values, np.ndarray)
        kind = values.dtype if array else f"an object {type(values).__name__}"
        raise TypeError(
            "MXNet's files hold NumPy arrays of "
            f"{', '.join(d.name for d in _DTYPES)}; received {kind} for "
            f"{key!r}. Convert it first, "
            + ("for example with .astype." if array else
               "with numpy.asarray, or an engine's array with mgpu.to_numpy."))
    fault = _fault(x) if sparse else ""
    if values.ndim > _DIMENSIONS:
        fault = f"an array has {values.ndim} dimensions"
    if fault:
        raise ValueError(f"an array is not as MXNet has them: {fault}; "
                         f"received it for {key!r}. Make another array.")


def _code(dtype: np.dtype) -> int | None:
    dtype = dtype.newbyteorder("<")
    return _DTYPES.index(dtype) if dtype in _DTYPES else None


def _fault(x: RowSparse | CSR) -> str:
    """What is wrong with a sparse array, or nothing: MXNet looks at none of
    it, and reads and writes outside of the array."""
    indices = (x.indices,) if isinstance(x, RowSparse) \
        else (x.indptr, x.indices)
    for i in indices:
        if not isinstance(i, np.ndarray) or i.ndim != 1 \
                or i.dtype.newbyteorder("<") != np.dtype("<i8"):
            return "the indices of a sparse array are not int64 in a row"
    if isinstance(x, RowSparse):
        rows = x.indices
        fits = bool(x.shape) and x.data.shape == (len(rows), *x.shape[1:]) \
            and bool((np.diff(rows) > 0).all()) \
            and (not len(rows) or 0 <= rows[0] and rows[-1] < x.shape[0])
    else:
        starts, of = x.indptr, x.indices
        fits = len(x.shape) == 2 and x.data.shape == of.shape \
            and len(starts) == x.shape[0] + 1 and starts[0] == 0 \
            and starts[-1] == len(of) and bool((np.diff(starts) >= 0).all()) \
            and (not len(of) or 0 <= of.min() and of.max() < x.shape[1])
    if fits and math.prod(x.shape) >= _ELEMENTS:
        return f"a sparse array has the shape {x.shape}"
    return "" if fits else "the values of a sparse array are not in it"


def _write(file: BinaryIO, x: Array, version: int) -> None:
    def shape(sizes: Sequence[int]) -> bytes:
        return struct.pack(f"<i{len(sizes)}q", len(sizes), *sizes)

    def of(values: np.ndarray) -> bytes:
        return struct.pack("<i", _code(values.dtype))

    def raw(values: np.ndarray) -> Any:
        return np.ascontiguousarray(
            values, values.dtype.newbyteorder("<")).reshape(-1).view("u1").data
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


def _load_zip(file: BinaryIO, path: str) -> dict[str, Array]:
    """What MXNet 2 writes: a zip of npy, as np.savez does."""
    found: dict[str, Array] = {}
    try:
        for name, x in npy_members(file):
            if name in found or x.dtype.kind not in "fiub":
                raise ValueError(f"{name!r} is there twice, or no array of "
                                 "numbers")
            found[name] = x.astype(x.dtype.newbyteorder("="), "C")
        return found
    except Exception as error:      # zip, NumPy: each has its own
        raise UnreadableParams(
            "expected a zip of arrays, as MXNet 2 writes it; "
            f"{path!r} is not one, or is damaged ({error}). Use a whole "
            "file.") from error


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
        self._before: int | None = None

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
        data = bytes(self._bytes(self.number("Q")))
        if b"\0" in data:       # where MXNet ends it
            raise self.error("a name has a zero character")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.error("a name is not UTF-8") from error

    def end(self) -> None:
        if self._at != len(self._data):
            raise self.error("more bytes follow its end")

    def _sizes(self, count: int, kind: str) -> tuple[int, ...]:
        if count > _DIMENSIONS:
            raise self.error(f"an array has {count} dimensions")
        sizes = tuple(self.number(kind) for _ in range(count))
        if any(not 0 <= size <= _ELEMENTS for size in sizes):
            raise self.error(f"an array has the shape {sizes}")
        return sizes

    def _sized(self) -> tuple[int, ...]:
        count = self.number("i")
        if count < 0:
            raise self.error(f"an array has {count} dimensions")
        return self._sizes(count, "q")

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
        if dtype.kind == "b" and size and flat.view("u1").max() > 1:
            raise self.error("a bool is neither true nor false")
        # torch takes no memory that does not begin at a multiple of an item.
        if size < self._mapped or not flat.flags.aligned:
            flat = flat.copy()
        try:
            return flat.astype(dtype.newbyteorder("="),
                               copy=False).reshape(shape)
        except ValueError as error:     # no elements, but large sizes
            raise self.error(f"an array has the shape {shape}") from error

    def array(self) -> Array:
        version = self.number("I")
        # MXNet reads V3 in one of its modes, and all others in the other.
        if self._before not in (None, version) and _V3 in (
                self._before, version):
            raise self.error("its arrays are of two versions")
        self._before = version
        if version not in (_V2, _V3):
            return self._old_array(version)
        storage = self.number("i")
        if storage not in _INDICES or storage and version == _V3:
            raise self.error(f"no storage has the number {storage}")
        stored = self._sized() if storage else ()
        shape = self._sized()
        if version == _V2 and not shape:
            raise self.error("an array has no shape")
        self._context()
        dtype = self._dtype()
        indices = [(self._dtype(), self._sized())
                   for _ in range(_INDICES[storage])]
        if not storage:
            return self._values(shape, dtype)
        values = self._values(stored, dtype)
        columns = [self._values(sizes, of) for of, sizes in indices]
        found = RowSparse(shape, values, *columns) \
            if storage == _ROW_SPARSE else CSR(shape, values, *columns)
        fault = _fault(found)
        if fault:
            raise self.error(fault)
        return found

    def _old_array(self, version: int) -> np.ndarray:
        if version == _V1:
            shape = self._sizes(self.number("I"), "q")
        elif version <= _DIMENSIONS:
            shape = self._sizes(version, "I")
        else:
            raise self.error("an array begins with the number "
                             f"{version:#x}, which no version has")
        if not shape:
            raise self.error("an array has no shape")
        self._context()
        return self._values(shape, self._dtype())
