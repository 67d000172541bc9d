"""Arrays and a header in one file: safetensors, with a SHA-256 of every part.

The format is safetensors, which other programs read: eight bytes with the
length of a JSON header, the header, the bytes of the arrays without a gap.
Its ``__metadata__`` holds a digest of each array, and the last array, named
``sha256``, is the digest of all that stands before the arrays. So no byte can
change unseen. A header is looked through before anything is allocated for
what it says.
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
_ABOUT = "__metadata__"
#: bytes of the longest header: of 30,000 arrays, perhaps
_LONGEST = 8 << 20
#: bytes that a value of JSON takes in Python, at most, and those that a
#: header may take beside the bytes of its file
_VALUE, _BESIDE = 256, 24 << 20
_MOST_DIMENSIONS = 32


class Damaged(ValueError):
    """Why a file is not whole."""


def head_of(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
            ) -> tuple[bytes, list[np.ndarray]]:
    """What stands before the arrays, and all arrays in their order, to be
    written one after the other. `header`: fit for JSON; its "format" names
    the kind of the file. ValueError for an array that safetensors has no
    dtype for."""
    for name in (DIGEST, _ABOUT):
        if name in arrays:
            raise ValueError(f"the name {name!r} is taken in every file; "
                             "received an array of that name. Rename it.")
    every = {name: _plain(name, x) for name, x in arrays.items()}
    # The largest items first: all arrays are aligned then.
    order = sorted(every, key=lambda name: -every[name].itemsize)
    every = {name: every[name] for name in order}
    entries: dict[str, Any] = {_ABOUT: {
        "format": str(header["format"]), "header": json.dumps(header),
        "digests": json.dumps({name: hashlib.sha256(_bytes(x)).hexdigest()
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
    return head, [*every.values(),
                  np.frombuffer(hashlib.sha256(head).digest(), np.uint8)]


def _plain(name: str, x: Any) -> np.ndarray:
    x = np.asarray(x, order="C")
    if x.dtype.name not in _CODES:
        raise ValueError(f"safetensors holds arrays of {', '.join(_CODES)}; "
                         f"received {name!r} of {x.dtype}. Convert it.")
    return x.astype(x.dtype.newbyteorder("<"), copy=False)


def _bytes(x: np.ndarray) -> memoryview:
    return x.reshape(-1).view(np.uint8).data


def parts(head: bytes, arrays: list[np.ndarray]) -> Iterator[memoryview]:
    """The bytes of a file, one part after the other."""
    yield memoryview(head)
    yield from map(_bytes, arrays)


def _read_head(stream: Any, size: int
               ) -> tuple[bytes, dict[str, str], dict[str, Any]]:
    """What stands before the arrays of an open safetensors file of `size`
    bytes; its metadata; by name, the entry of each array, in the order of
    their bytes. `Damaged` unless the entries fit the file and each other."""
    first = stream.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > size - 8:
        raise Damaged("it ends inside of its header")
    if length > _LONGEST:
        raise Damaged(f"its header of {length} bytes is longer than "
                      f"{_LONGEST}")
    head = stream.read(length)
    entries = _json(head, size)
    about = entries.pop(_ABOUT, {})
    if type(about) is not dict or not all(
            type(x) is str for x in about.values()):
        raise Damaged("its metadata is no text")
    end = 0
    order = sorted(entries, key=lambda name: _extent(name, entries[name]))
    for name in order:
        begin, stop = _extent(name, entries[name])
        if begin != end:
            raise Damaged(f"array {name!r} begins at byte {begin} of the "
                          f"data and not at {end}, where the one before it "
                          "ends")
        end = stop
    if end != size - 8 - length:
        raise Damaged(f"its arrays have {end} bytes, and {size - 8 - length} "
                      f"are there; the last array is "
                      f"{(order or ['none'])[-1]!r}")
    return first + head, about, {name: entries[name] for name in order}


def _extent(name: str, entry: Any) -> tuple[int, int]:
    """Where the bytes of an array are."""
    try:
        code, shape, (begin, end) = (
            entry["dtype"], entry["shape"], entry["data_offsets"])
        fits = code in DTYPES and all(
            type(n) is int and 0 <= n < 2 ** 63
            for n in (*shape, begin, end)) \
            and len(shape) <= _MOST_DIMENSIONS \
            and math.prod(shape) * np.dtype(DTYPES[code]).itemsize \
            == end - begin
    except (TypeError, KeyError, ValueError):
        fits = False
    if not fits:
        raise Damaged(f"array {name[:200]!r} has the entry "
                      f"{repr(entry)[:200]}")
    return begin, end


def _json(text: bytes | str, size: int) -> dict[str, Any]:
    """A JSON object without a name that stands twice in it, or in an object
    inside of it. Refused unread where it would take more memory than `size`
    and a little more."""
    marks = (b",", b"[", b"{", b":") if isinstance(text, bytes) \
        else (",", "[", "{", ":")
    values = sum(map(text.count, marks))    # type: ignore[arg-type]
    if values * _VALUE > size + _BESIDE:
        raise Damaged(f"its header of {len(text)} bytes has {values} values")
    found = json.loads(text.decode("ascii") if isinstance(text, bytes)
                       else text, object_pairs_hook=_object)
    if type(found) is not dict:
        raise Damaged("its header is no object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        met = set[str]()
        for name, _ in pairs:
            if name in met:
                raise Damaged(f"the name {name[:200]!r} stands twice in its "
                              "header")
            met.add(name)
    return found


def read(stream: Any, size: int) -> tuple[dict[str, Any],
                                          dict[str, np.ndarray]]:
    """The header and the arrays that `head_of` was given, from an open file
    of `size` bytes. No more memory than the file has bytes, and a few MB.
    `Damaged`, or another Exception, for what is not whole."""
    head, about, entries = _read_head(stream, size)
    if list(entries)[-1:] != [DIGEST] or entries[DIGEST]["shape"] != [32] \
            or entries[DIGEST]["dtype"] != "U8":
        raise Damaged("it has no digest of mgpu, or is cut")
    stream.seek(size - 32)
    if hashlib.sha256(head).digest() != stream.read(32):
        raise Damaged("its header does not fit its digest")
    stream.seek(len(head))
    del entries[DIGEST], head
    digests = _json(about.pop("digests"), size)
    header = _json(about.pop("header"), size)
    if digests.keys() != entries.keys():
        raise Damaged("its digests are those of other arrays")
    arrays = {}
    for name, data, array in _arrays(stream, entries):
        if hashlib.sha256(data.data).hexdigest() != digests[name]:
            raise Damaged(f"array {name!r} does not fit its digest")
        arrays[name] = array
    return header, arrays


def _arrays(stream: Any, entries: Mapping[str, Any]
            ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The name of each array, its bytes, and itself."""
    for name, entry in entries.items():
        begin, end = _extent(name, entry)
        data = np.empty(end - begin, np.uint8)
        if stream.readinto(data) != len(data):
            raise Damaged(f"it ends inside of array {name!r}")
        yield name, data, data.view(DTYPES[entry["dtype"]]).reshape(
            entry["shape"])


def read_any(stream: Any, size: int) -> tuple[dict[str, Any],
                                              dict[str, np.ndarray]]:
    """As `read`; a file of another program has an empty header, and no
    digests."""
    _, about, entries = _read_head(stream, size)
    if DIGEST in entries or "digests" in about:
        stream.seek(0)
        return read(stream, size)
    return {}, {name: x for name, _, x in _arrays(stream, entries)}
