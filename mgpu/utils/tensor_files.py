"""Arrays and a header in one file: safetensors, with a SHA-256 of every part.

The format is safetensors, which other programs read: eight bytes with the
length of a JSON header, the header, the bytes of the arrays without a gap.
Its ``__metadata__`` holds a digest of each array, and the last array, named
``sha256``, is the digest of all that stands before the arrays. So no byte can
change unseen. Nothing is allocated for an array before the header fits the
size of the file.
"""
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

#: the dtypes of safetensors that NumPy has
DTYPES = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16",
          "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64",
          "I64": "int64", "F16": "float16", "F32": "float32",
          "F64": "float64"}
_CODES = {name: code for code, name in DTYPES.items()}

#: the array that is the digest of the header
DIGEST = "sha256"
_METADATA = "__metadata__"
#: bytes of the longest header: of 30,000 arrays, perhaps
_LONGEST = 8 << 20


class Damaged(ValueError):
    """Why a file is not whole."""


def digest_of(x: np.ndarray) -> str:
    """The SHA-256 of the bytes of an array."""
    return hashlib.sha256(_bytes(x)).hexdigest()


def parts(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
          ) -> list[memoryview]:
    """The bytes of a file, one part after the other. `header`: fit for JSON;
    its "format" names the kind of the file. ValueError for an array that
    safetensors has no dtype for."""
    for name in {DIGEST, _METADATA} & arrays.keys():
        raise ValueError(f"the name {name!r} is taken in every file; "
                         "received an array of that name. Rename it.")
    # The largest items first: all arrays are aligned then.
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
        raise ValueError(f"a header has {_LONGEST} bytes at most; received "
                         f"{len(text)}, of {len(every)} arrays. Save fewer "
                         "arrays in one file.")
    head = len(text).to_bytes(8, "little") + text
    return [memoryview(head), *map(_bytes, every.values()),
            memoryview(hashlib.sha256(head).digest())]


def _checked(name: str, x: Any) -> np.ndarray:
    x = np.asarray(x, order="C")
    if x.dtype.name not in _CODES:
        raise ValueError(f"safetensors holds arrays of {', '.join(_CODES)}; "
                         f"received {name!r} of {x.dtype}. Convert it.")
    return x.astype(x.dtype.newbyteorder("<"), copy=False)


def _bytes(x: np.ndarray) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def read(stream: Any, size: int) -> tuple[dict[str, Any],
                                          dict[str, np.ndarray]]:
    """The header and the arrays of an open file of `size` bytes. A file of
    another program has an empty header, and no digests. An Exception for what
    is not whole, before memory is allocated for its arrays."""
    first = stream.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, _LONGEST):
        raise Damaged("it ends inside of its header, or that is longer than "
                      f"{_LONGEST} bytes")
    head = first + stream.read(length)
    entries = _parse(head[8:].decode("ascii"), size)
    about = entries.pop(_METADATA, {})
    plan = list(_plan(entries, size - len(head)))
    arrays = {}
    for name, dtype, shape, count in plan:
        data = np.empty(count, np.uint8)
        if stream.readinto(data) != count:
            raise Damaged(f"it ends inside of array {name!r}")
        arrays[name] = data.view(dtype).reshape(shape)
    if DIGEST not in arrays and "digests" not in about:
        return {}, arrays
    if arrays.pop(DIGEST).tobytes() != hashlib.sha256(head).digest():
        raise Damaged("its header does not fit its digest")
    digests = _parse(about["digests"], size)
    if digests.keys() != arrays.keys():
        raise Damaged("its digests are those of other arrays")
    for name, x in arrays.items():
        if digest_of(x) != digests[name]:
            raise Damaged(f"array {name!r} does not fit its digest")
    return _parse(about["header"], size), arrays


def _parse(text: str, size: int) -> Any:
    """What is in JSON; refused unread where it would take much more memory
    than the `size` of the file, at 256 bytes a value."""
    if sum(map(text.count, ",:[{")) * 256 > size + (24 << 20):
        raise Damaged(f"its header of {len(text)} bytes has too many values")
    return json.loads(text)


def _plan(entries: Mapping[str, Any], size: int
          ) -> Iterator[tuple[str, str, list[int], int]]:
    """Name, dtype, shape and bytes of each array, in the order of their
    `size` bytes; `Damaged` unless they fill these without a gap."""
    end = 0
    for name, entry in sorted(entries.items(),
                              key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in DTYPES:
            raise Damaged(f"array {name[:200]!r} is of {entry['dtype']}, "
                          "which NumPy does not have")
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        begin, stop = entry["data_offsets"]
        count = math.prod(shape) * np.dtype(dtype).itemsize
        if begin != end or stop - begin != count or count < 0:
            raise Damaged(f"array {name[:200]!r} has the entry "
                          f"{repr(entry)[:200]}, and the arrays before it "
                          f"end at byte {end}")
        yield name, dtype, shape, count
        end = stop
    if end != size:
        raise Damaged(f"its arrays have {end} bytes, and {size} are there")
