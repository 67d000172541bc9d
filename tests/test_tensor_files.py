"""Files of arrays: safetensors with digests. A file holds what was written, or
reading raises before memory is allocated."""
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import resource
import signal
import time
import tracemalloc
import zipfile

import numpy as np
import pytest

from helpers import assert_bit_equal
from mgpu.errors import CheckpointCorrupt, MgpuError
from mgpu.utils import files, tensor_files

FORM = "test 1"
ARRAYS = {
    "a": np.arange(6, dtype="float32").reshape(2, 3),
    "b": np.array(2.5), "c": np.zeros((0, 4), "int8"),
    "d": np.array([True, False]), "e": np.asfortranarray(np.ones((3, 2))),
    "f": np.arange(4, dtype=">i4"), "g": np.float16([1, np.nan]),
    "h": np.array(2 ** 63, "uint64")}


def write(file, arrays=ARRAYS, **header):
    files.write_arrays(file, {"format": FORM, **header}, arrays)


def read(file, forms=(FORM,)):
    return files.read_arrays(file, forms, "a file of this test",
                             lambda header, arrays: (header, arrays))


def test_what_is_written_is_read(tmp_path):
    write(tmp_path / "x", text="ä", number=[1, None, float("inf")])
    header, arrays = read(tmp_path / "x")
    assert header == {"format": FORM, "text": "ä",
                      "number": [1, None, float("inf")]}
    assert arrays.keys() == ARRAYS.keys()
    for name, x in ARRAYS.items():
        assert_bit_equal(arrays[name], x.astype(x.dtype.newbyteorder("=")))
        assert arrays[name].flags.writeable and arrays[name].shape == x.shape
    write(tmp_path / "x", {})
    assert read(tmp_path / "x") == ({"format": FORM}, {})
    assert os.listdir(tmp_path) == ["x"]


def test_other_programs_read_it(tmp_path):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    write(tmp_path / "x")
    found = load_file(tmp_path / "x")
    assert len(found.pop("sha256")) == 32
    assert found.keys() == ARRAYS.keys()
    for name, x in ARRAYS.items():
        assert_bit_equal(found[name], x.astype(x.dtype.newbyteorder("=")))


@pytest.mark.parametrize("arrays, match", [
    ({"x": np.array("text")}, "received 'x' of <U4"),
    ({"x": np.ones(2, complex)}, "received 'x' of complex128"),
    ({"x": np.array([object()])}, "received 'x' of object"),
    ({"sha256": np.ones(2)}, "the name 'sha256' is reserved"),
    ({f"{i:0>9000}": np.ones(1) for i in range(500)},
     "a header must have at most 8388608 bytes")],
    ids=["text", "complex", "object", "digest", "header"])
def test_what_does_not_fit_is_refused(tmp_path, arrays, match):
    with pytest.raises(ValueError, match=match):
        write(tmp_path / "x", arrays)
    assert not os.listdir(tmp_path)


# -- damage -------------------------------------------------------------------

def test_every_byte_counts(tmp_path):
    """A bit flipped, at any place, and each length that is too short: the
    array is named."""
    file = tmp_path / "x"
    write(file, {"first": np.arange(5.0), "second": np.ones(3, "int16")})
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for at in (*range(0, begin, 3), *range(begin, len(whole))):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8])
                         + whole[at + 1:])
        with pytest.raises(CheckpointCorrupt) as seen:
            read(file)
        if begin <= at < begin + 46:
            name = "first" if at < begin + 40 else "second"
            assert f"the digest of array '{name}' does not match" in str(
                seen.value)
        if at % 7 == 0:
            file.write_bytes(whole[:at])
            with pytest.raises(CheckpointCorrupt):
                read(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointCorrupt, match="the arrays have 78 bytes; "
                       "the file has 79"):
        read(file)
    file.write_bytes(whole)
    read(file)
    with pytest.raises(CheckpointCorrupt, match="format is 'test 1'"):
        read(file, ("test 2",))
    assert issubclass(CheckpointCorrupt, MgpuError)
    assert issubclass(CheckpointCorrupt, ValueError)


def raw(entries, data=b"", about=None, text=None, length=None):
    """A file whose digest fits whatever its header says."""
    header = {"__metadata__": {
        "format": FORM, "header": json.dumps({"format": FORM}),
        "digests": json.dumps({name: hashlib.sha256(
            data[slice(*entry["data_offsets"])]).hexdigest()
            for name, entry in entries.items()
            if isinstance(entry, dict)
            and isinstance(entry.get("data_offsets"), list)
            and all(isinstance(n, int) for n in entry["data_offsets"])}),
        **(about or {})}, **entries, "sha256": {
            "dtype": "U8", "shape": [32],
            "data_offsets": [len(data), len(data) + 32]}}
    head = json.dumps(header).encode() if text is None else text
    head = (len(head) if length is None else length).to_bytes(
        8, "little") + head
    return head + data + hashlib.sha256(head).digest()


def entry(begin, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - begin] if shape is None
            else shape, "data_offsets": [begin, end]}


LONG = tensor_files._LONGEST
EIGHT = bytes(8)
HOSTILE = {
    "short": b"\1\0\0", "long header": raw({}, length=LONG + 1),
    "not JSON": raw({}, text=b"{nonsense"), "no object": raw({}, text=b"[1]"),
    "deep": raw({}, text=b"[" * 99_999),
    "many values": raw({}, text=b'{"a":[' + b"0," * (LONG // 2 - 9)
                       + b"0]}"),
    "many values inside": raw({}, about={
        "header": "[" + "0," * (LONG // 2 - 999) + "0]"}),
    "no entry": raw({"a": 1}, EIGHT),
    "dtype": raw({"a": entry(0, 8, dtype="F128")}, EIGHT),
    "negative": raw({"a": entry(0, 8, [-8])}, EIGHT),
    "huge": raw({"a": entry(0, 2 ** 40)}, EIGHT),
    "backwards": raw({"a": {"dtype": "U8", "shape": [8],
                            "data_offsets": [8, 0]}}, EIGHT),
    "overlap": raw({"a": entry(0, 8), "b": entry(0, 8)}, EIGHT),
    "hole": raw({"a": entry(0, 2), "b": entry(4, 8)}, EIGHT),
    "digests of others": raw({"a": entry(0, 8)}, EIGHT,
                             about={"digests": "{}"}),
    "another format": raw({}, about={"header": '{"format": ["x"]}'}),
    "zip": b"PK\3\4" + bytes(99),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_headers_are_refused_before_they_cost(tmp_path, kind):
    """No more memory than the file has bytes and 64 MiB, whatever it says."""
    (tmp_path / "x").write_bytes(HOSTILE[kind])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorrupt, match="expected a file of this "
                           "test; .* is not one, or is damaged"):
            read(tmp_path / "x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= len(HOSTILE[kind]) + (64 << 20)


def test_the_hostile_headers_are_hostile(tmp_path):
    """What they are made with makes whole files too."""
    (tmp_path / "x").write_bytes(raw({"a": entry(0, 8, [2, 1], "F32")},
                                     EIGHT))
    header, arrays = read(tmp_path / "x")
    assert arrays["a"].shape == (2, 1) and header == {"format": FORM}


def test_npz_takes_as_much_memory_as_it_has_bytes(tmp_path):
    """Files of older versions: no array that is compressed, and none whose
    header promises more."""
    file = tmp_path / "x"
    header = np.array(json.dumps({"format": FORM}))
    with open(file, "wb") as stream:
        np.savez(stream, header=header, a=np.ones(3))
    assert read(file)[1]["a"].tolist() == [1, 1, 1]
    with open(file, "wb") as stream:
        np.savez_compressed(stream, header=header, a=np.zeros(1 << 21))
    with pytest.raises(CheckpointCorrupt, match="larger than it is"):
        read(file)
    text = b"{'descr': '<f8', 'fortran_order': False, " \
        b"'shape': (1099511627776,), }"
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("x.npy", b"\x93NUMPY\x01\x00" + bytes([118, 0])
                     + text.ljust(117) + b"\n" + bytes(80))
    with pytest.raises(CheckpointCorrupt, match="cannot reshape"):
        read(file)


# -- names and places ---------------------------------------------------------

NAMES = ["../x", "/tmp/x", "", "..", "a\0b", "~/x", "x" * 10_000, "\ud800",
         "\n", "a|b|c", ":", "header", "digests", "format", "$(touch x)"]


def test_names_are_data(tmp_path):
    """Whatever an array is called, there is one file, in its folder."""
    folder = tmp_path / "inner"
    folder.mkdir()
    arrays = {name: np.array([i]) for i, name in enumerate(NAMES)}
    write(folder / "x", arrays)
    assert {name: int(x[0]) for name, x in read(folder / "x")[1].items()} \
        == {name: i for i, name in enumerate(NAMES)}
    assert [path.name for path in tmp_path.rglob("*")] == ["inner", "x"]
    for wrong in ("a\0b", "\0"):
        with pytest.raises(ValueError, match="null character"):
            write(folder / wrong)
    with pytest.raises(ValueError, match="__metadata__"):
        write(folder / "x", {"__metadata__": np.ones(1)})
    assert [path.name for path in tmp_path.rglob("*")] == ["inner", "x"]


def test_no_file_behind_a_link_is_written(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    for _ in range(2):      # a missing file, and an existing one
        link.symlink_to(target)
        with pytest.raises(FileExistsError, match="a link to .*target"):
            write(link)
        assert link.is_symlink()
        link.unlink()
        target.write_text("a person's")
    assert target.read_text() == "a person's"
    (tmp_path / "folder").mkdir()
    (tmp_path / "way").symlink_to(tmp_path / "folder")
    write(tmp_path / "way" / "x")       # a folder that the user has moved
    read(tmp_path / "folder" / "x")


def test_parts_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path):
    dead, living = (tmp_path / (digit * 16 + ".saving") for digit in "ab")
    others = [tmp_path / name for name in (
        "c" * 16 + ".part", "mine.saving", "D" * 16 + ".saving",
        "e" * 16 + ".saving.txt")]
    for path in (dead, living, *others):
        path.touch()
    (tmp_path / ("f" * 16 + ".saving")).symlink_to(others[0])
    (tmp_path / ("0" * 16 + ".saving")).mkdir()
    with open(living) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        write(tmp_path / "x")
        assert not dead.exists() and living.exists()
        assert all(path.exists() for path in others)
    files.sweep(str(tmp_path))
    assert not living.exists()
    assert len(os.listdir(tmp_path)) == len(others) + 3


# -- faults of the system -----------------------------------------------------

@contextlib.contextmanager
def file_size(limit):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("fault", ["full", "rename", "sync", "read only"])
def test_a_file_that_cannot_be_written_leaves_the_old_one(
        tmp_path, monkeypatch, fault):
    file = tmp_path / "x"
    write(file, {"a": np.zeros(9)})

    def fails(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    with contextlib.ExitStack() as stack:
        if fault == "full":
            stack.enter_context(file_size(4096))
        elif fault == "read only":      # root may write to any folder
            monkeypatch.setattr(files, "_open_locked", fails)
        else:
            monkeypatch.setattr(os, {"rename": "replace",
                                     "sync": "fsync"}[fault], fails)
        with pytest.raises(OSError, match=str(file)):
            write(file, {"a": np.ones(99_999)})
    assert os.listdir(tmp_path) == ["x"]
    assert read(file)[1]["a"].tolist() == [0] * 9


def test_it_is_on_the_disk_when_the_call_returns(tmp_path, monkeypatch):
    """The file before it has its name, and the name after it."""
    order = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append(
        "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}")
        else "file"))

    def replace(*names, really=os.replace):
        order.append("rename")
        really(*names)
    monkeypatch.setattr(os, "replace", replace)
    write(tmp_path / "x")
    assert order == ["file", "rename", "folder"]


def test_two_writers(tmp_path):
    """The file is that of one of them, whole."""
    file = tmp_path / "x"
    children = []
    for number in (1, 2):
        child = os.fork()
        if child == 0:
            try:
                for _ in range(10):
                    write(file, {"a": np.full(9999, number),
                                 "b": np.full(99, number)})
            finally:
                os._exit(0)
        children.append(child)
    end = time.monotonic() + 60
    while children and time.monotonic() < end:
        if file.exists():
            arrays = read(file)[1]
            assert len({*arrays["a"], *arrays["b"]}) == 1
        children = [child for child in children
                    if os.waitpid(child, os.WNOHANG) == (0, 0)]
    assert not children and os.listdir(tmp_path) == ["x"]
