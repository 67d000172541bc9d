"""Arrays and a header in one safetensors file, with SHA-256 digests.

A safetensors file has the length of a JSON header (8 bytes), the header, and
the bytes of the arrays without gaps. ``__metadata__`` in the header holds a
digest of each array. The last array, ``sha256``, is the digest of all bytes
before the arrays. So a change of any byte is detected. Memory for arrays is
allocated only after the header has been checked against the size of the file.
"""
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

#: safetensors dtypes that NumPy supports
DTYPES = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16",
          "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64",
          "I64": "int64", "F16": "float16", "F32": "float32",
          "F64": "float64"}
_CODES = {name: code for code, name in DTYPES.items()}

#: name of the array with the digest of the header
DIGEST = "sha256"
_METADATA = "__metadata__"
#: maximum bytes of a header, about 30,000 arrays
_LONGEST = 8 << 20


class Damaged(ValueError):
    """The file is corrupt."""


def digest_of(x: np.ndarray) -> str:
    """SHA-256 digest of an array's bytes, in hexadecimal."""
    return hashlib.sha256(_bytes(x)).hexdigest()


def parts(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
          ) -> list[memoryview]:
    """The bytes of a file, as consecutive parts.

    `header` is serializable as JSON and has a "format". Raises ValueError for
    a dtype that safetensors does not support."""
    for name in {DIGEST, _METADATA} & arrays.keys():
        raise ValueError(f"the name {name!r} is reserved; received an array "
                         "of that name. Rename it.")
    # The largest items first, so that all arrays are aligned.
    every = {name: _checked(name, x) for name, x in sorted(
        arrays.items(), key=lambda item: -np.asarray(item[1]).itemsize)}
    entries: dict[str, Any] = {_METADATA: {
        "format": str(header["format"]), "header": json.dumps(header),
        "digests": json.dumps({name: digest_of(x)
                               for name, x in every.items()})}}
    end = 0
    for name, x in (*every.items(), (DIGEST, np.zeros(32, np.uint8))):
        begin, end = end, end + x.nbytes
        entries[name] = {"dtype": _CODES[x.dtype.name],
                         "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST:
        raise ValueError(f"a header must have at most {_LONGEST} bytes; "
                         f"received {len(text)} for {len(every)} arrays. "
                         "Save fewer arrays in one file.")
    head = len(text).to_bytes(8, "little") + text
    return [memoryview(head), *map(_bytes, every.values()),
            memoryview(hashlib.sha256(head).digest())]


def _checked(name: str, x: Any) -> np.ndarray:
    x = np.asarray(x, order="C")
    if x.dtype.name not in _CODES:
        raise ValueError(f"safetensors supports {', '.join(_CODES)}; "
                         f"received {name!r} of {x.dtype}. Convert it.")
    return x.astype(x.dtype.newbyteorder("<"), copy=False)


def _bytes(x: np.ndarray) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def read(stream: Any, size: int) -> tuple[dict[str, Any],
                                          dict[str, np.ndarray]]:
    """The header and the arrays of an open file of `size` bytes.

    Files of other programs have an empty header and no digests. Raises an
    Exception for a corrupt file, before memory for arrays is allocated."""
    first = stream.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, _LONGEST):
        raise Damaged("the header is truncated, or longer than "
                      f"{_LONGEST} bytes")
    head = first + stream.read(length)
    entries = _parse(head[8:].decode("ascii"), size)
    about = entries.pop(_METADATA, {})
    plan = list(_plan(entries, size - len(head)))
    arrays = {}
    for name, dtype, shape, count in plan:
        data = np.empty(count, np.uint8)
        if stream.readinto(data) != count:
            raise Damaged(f"array {name!r} is truncated")
        arrays[name] = data.view(dtype).reshape(shape)
    if DIGEST not in arrays and "digests" not in about:
        return {}, arrays
    if arrays.pop(DIGEST).tobytes() != hashlib.sha256(head).digest():
        raise Damaged("the digest of the header does not match")
    digests = _parse(about["digests"], size)
    if digests.keys() != arrays.keys():
        raise Damaged("the digests belong to other arrays")
    for name, x in arrays.items():
        if digest_of(x) != digests[name]:
            raise Damaged(f"the digest of array {name!r} does not match")
    return _parse(about["header"], size), arrays


def _parse(text: str, size: int) -> Any:
    """Parse JSON. Raises `Damaged` before parsing if the values, at 256 bytes
    each, would take much more memory than the `size` of the file."""
    if sum(map(text.count, ",:[{")) * 256 > size + (24 << 20):
        raise Damaged(f"the header of {len(text)} bytes has too many values")
    return json.loads(text)


def _plan(entries: Mapping[str, Any], size: int
          ) -> Iterator[tuple[str, str, list[int], int]]:
    """Name, dtype, shape and number of bytes of each array, in file order.
    Raises `Damaged` unless the arrays fill `size` bytes without gaps."""
    end = 0
    for name, entry in sorted(entries.items(),
                              key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in DTYPES:
            raise Damaged(f"array {name[:200]!r} has dtype {entry['dtype']}, "
                          "which NumPy does not support")
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        begin, stop = entry["data_offsets"]
        count = math.prod(shape) * np.dtype(dtype).itemsize
        if begin != end or stop - begin != count or count < 0:
            raise Damaged(f"array {name[:200]!r} has the entry "
                          f"{repr(entry)[:200]}; the arrays before it end at "
                          f"byte {end}")
        yield name, dtype, shape, count
        end = stop
    if end != size:
        raise Damaged(f"the arrays have {end} bytes; the file has {size}")
