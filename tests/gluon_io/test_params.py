"""`load_params` and `save_params` against MXNet 1.9.1, and without it.

600 damaged files are read here, in a few seconds; ``python -m
tests.gluon_io --mutations 100000`` tries more.
"""
import io
import json
import os
import struct
import zipfile

import numpy as np
import pytest

from conftest import BACKENDS
from helpers import assert_bit_equal
from mgpu.gluon_io import (CSR, RowSparse, UnreadableParams, load_params,
                           save_params)

from . import samples
from .mutations import FILES, judge, memory_below, summary

def reason(x):
    """The id of a case: bytes say nothing."""
    return "bytes" if isinstance(x, bytes) else x


live = pytest.mark.skipif("mxnet" not in BACKENDS, reason="asks MXNet")


def bytes_of(path):
    with open(path, "rb") as file:
        return file.read()


def loaded(data, path):
    with open(path, "wb") as file:
        file.write(data)
    return load_params(path)


# -- with MXNet ---------------------------------------------------------------

@live
@pytest.mark.parametrize("dtype", samples.DTYPES)
def test_a_round_trip(mx, path, dtype):
    """MXNet loads the bits that were written; where it can write them too,
    the bytes are equal."""
    for shape in ((1,), (2, 3), (2, 1, 3, 1), (), (0, 2)):
        x = samples.values(f"{dtype}{shape}", shape, dtype)
        save_params(path, {"x": x})
        (theirs,) = samples.read_by_mxnet(mx, path)["x"]
        assert_bit_equal(theirs, x)
        assert_bit_equal(load_params(path)["x"], x)
        ours = bytes_of(path)
        if x.size and shape:
            mx.nd.save(path, {"x": mx.nd.array(x, dtype=dtype)})
        else:
            with samples.numpy_mode(mx):
                mx.npx.save(path, {"x": mx.np.array(x, dtype=dtype)})
        assert bytes_of(path) == ours


@live
def test_mxnet_loads_what_is_written_into_a_network(mx, path):
    """Both versions, in NumPy's mode; in the other one, version 2."""
    values = {name: samples.values(name, shape) for name, shape in (
        ("0.weight", (3, 3)), ("0.bias", (3,)), ("1.gamma", (3,)),
        ("1.beta", (3,)), ("1.running_mean", (3,)), ("1.running_var", (3,)),
        ("2.weight", (3, 3)), ("2.bias", (3,)))}
    values["2.weight"], values["2.bias"] = (values["0.weight"],
                                            values["0.bias"])

    def check():
        net = samples.network(mx)
        net.load_parameters(path)
        for name, p in net._collect_params_with_prefix().items():
            assert_bit_equal(p.data().asnumpy(), values[name])
    save_params(path, values)
    check()
    with samples.numpy_mode(mx):
        check()
        save_params(path, values, numpy_shapes=True)
        check()


@live
def test_damaged_files(mx):
    """Each is refused, or read as MXNet reads it; none takes memory that its
    file does not have."""
    refused, read, memory = judge(600)
    assert [case for case in read if case[2] != case[3]] == []
    assert refused > 400 and len(read) > 30 and memory < 2


# -- without MXNet ------------------------------------------------------------

EXPECTED = json.loads((FILES / "expected.json").read_text())
GOLDEN = sorted(name for name in EXPECTED if name.endswith(".params"))


@pytest.mark.parametrize("name", GOLDEN)
def test_files_of_mxnet(path, name):
    """The same names in the same order, the same bits; written again, the
    same bytes."""
    found = load_params(FILES / name)
    assert json.loads(json.dumps(summary(found))) == EXPECTED[name]
    if not name.startswith("by-hand"):      # of versions that are not written
        before = bytes_of(FILES / name)
        save_params(path, found,
                    numpy_shapes=b"\xca\xfa\x93\xf9" in before or None)
        assert bytes_of(path) == before


def test_all_files_are_expected():
    assert {path.name for path in FILES.iterdir()} - {
        "make.py", "expected.json", "operators.json", "training",
        "networks", "networks.zip",
        "__pycache__"} == set(EXPECTED)


def test_names_of_shared_parameters():
    """The last one of them, where each was to be written once."""
    twice = load_params(FILES / "save_parameters.params")
    assert list(twice)[-2:] == ["2.weight", "2.bias"]
    assert_bit_equal(twice["0.weight"], twice["2.weight"])
    assert sorted(load_params(FILES / "deduplicated.params")) == sorted(
        name for name in twice if not name.startswith("0."))
    assert {name[:8] for name in load_params(FILES / "export.params")} == {
        "arg:net_", "aux:net_"}


def test_a_large_array_is_mapped(path):
    """Where its memory is aligned; writing to it leaves the file."""
    x = np.arange(2 ** 18, dtype="float64").reshape(512, 512)
    arrays = {"a": x, "b": np.ones(3, "int8"), "c": x}
    save_params(path, arrays)
    with memory_below(1.2 * x.nbytes):      # c is not aligned
        found = load_params(path)
    for name, values in arrays.items():
        assert found[name].flags.aligned and found[name].flags.writeable
        assert_bit_equal(found[name], values)
    found["a"][:] = 0
    assert_bit_equal(load_params(path)["a"], x)


@pytest.mark.skipif("torch" not in BACKENDS, reason="about torch")
def test_torch_takes_all_arrays(path):
    """Also those that are at no multiple of their size in the file."""
    import torch
    arrays = {name: samples.values(name, (3,), name)
              for name in ("int8", *samples.DTYPES)}
    found = loaded(samples.by_hand(1, arrays), path)
    for name, x in arrays.items():
        assert_bit_equal(torch.from_numpy(found[name]).numpy(), x)


def test_arrays_in_other_orders(path):
    """Big-endian, transposed, strided, a mapping that is no dict."""
    import types
    x = samples.values("x", (4, 6))
    save_params(path, types.MappingProxyType(
        {"big": x.astype(">f4"), "turned": x.T, "every other": x[::2, ::3]}))
    found = load_params(path)
    for name, values in (("big", x), ("turned", x.T),
                         ("every other", x[::2, ::3])):
        assert_bit_equal(found[name], np.ascontiguousarray(values))
        assert found[name].flags.c_contiguous


def dense(shape=(2,), data=b"\0" * 8, dtype=0, version=0xF993FAC9, storage=0,
          context=1):
    return struct.pack(f"<Iii{len(shape)}qiii", version, storage, len(shape),
                       *shape, context, 0, dtype) + data


def listed(*arrays, names=(), n=None, head=(0x112, 0), k=None, end=b""):
    return b"".join((
        struct.pack("<QQQ", *head, len(arrays) if n is None else n), *arrays,
        struct.pack("<Q", len(names) if k is None else k),
        *(struct.pack("<Q", len(name)) + name for name in names), end))


def test_the_bytes_made_by_hand_are_read(path):
    assert loaded(listed(dense()), path)[0].tolist() == [0, 0]


@pytest.mark.parametrize("data, why", [
    (b"", "which is empty"),
    (b"\x12\x01", "it ends where 8 bytes should follow"),
    (listed(dense(), head=(0x113, 0)), "does not begin as one"),
    (listed(dense(), head=(0x112, 1)), "second number is not 0"),
    (listed(dense(), n=2 ** 62), "4611686018427387904 arrays"),
    (listed(dense(), n=2), "an array has no shape"),
    (listed(dense(), names=[b"a", b"b"]), "1 arrays and 2 names"),
    (listed(dense(), dense(), names=[b"a", b"a"]), "the same name"),
    (listed(dense(), names=[b"\xff"]), "not UTF-8"),
    (listed(dense(), names=[b"a\0b"]), "a zero character"),
    (listed(dense(), end=b"\0"), "more bytes follow"),
    (listed(dense(dtype=8)), "no dtype has the number 8"),
    (listed(dense(dtype=-1)), "no dtype has the number -1"),
    (listed(dense(context=9)), "no kind of device has the number 9"),
    (listed(dense(storage=-1)), "no storage has the number -1"),
    (listed(dense(storage=1, version=0xF993FACA)), "no storage has"),
    (listed(dense(), dense(version=0xF993FACA)), "of two versions"),
    (listed(dense((), b"\0" * 4)), "an array has no shape"),
    (listed(dense((-1, -2))), "the shape (-1, -2)"),
    (listed(dense((2 ** 32, 2 ** 32), b"")), "the shape (4294967296, "),
    (listed(dense((0, 2 ** 31 - 1, 2 ** 31 - 1, 2 ** 31 - 1), b"")),
     "the shape (0, 2147483647"),
    (listed(dense((2 ** 30,))), "it ends where 4294967296 bytes"),
    (listed(dense((1,) * 33, b"\0" * 4)), "33 dimensions"),
    (listed(dense(dtype=7, data=b"\1\2")), "neither true nor false"),
    (listed(struct.pack("<I", 0)), "an array has no shape"),
    (listed(struct.pack("<I", 33)), "number 0x21, which no version has"),
    (samples.by_hand(1, {"a": np.float32(1)}), "an array has no shape"),
], ids=reason)
def test_what_is_refused(path, data, why):
    with pytest.raises(UnreadableParams) as refusal:
        loaded(data, path)
    assert why in str(refusal.value) and path in str(refusal.value)


def test_the_error_says_where(path):
    with pytest.raises(UnreadableParams, match=r"\(array 1, byte 9[0-9]\)"):
        loaded(listed(dense(), dense(dtype=9)), path)


SPARSE = {
    "rows": RowSparse((4, 3), np.ones((2, 3), "f4"), np.array([0, 2])),
    "columns": CSR((2, 4), np.ones(3, "f8"), np.array([0, 1, 3]),
                   np.array([3, 0, 1]))}


#: indices that are not in the array, and those of another shape or dtype
OUTSIDE = {
    "rows": [{"indices": [0, 4]}, {"indices": [-1, 2]}, {"indices": [2, 0]},
             {"indices": [1, 1]}],
    "columns": [{"indices": [4, 0, 1]}, {"indices": [0, 1, -1]},
                {"indptr": [1, 2, 3]}, {"indptr": [0, 4, 3]},
                {"indptr": [0, 1, 2]}]}
OTHER = {
    "rows": [{"indices": [1]}, {"data": np.ones((2, 4), "f4")},
             {"indices": [[0, 2]]}, {"shape": (2 ** 30, 3)},
             {"indices": np.array([0, 2], "i4")}],
    "columns": [{"indices": [0, 1]}, {"indptr": [0, 3]},
                {"shape": (2, 4, 1)}, {"indptr": np.array([0., 1., 3.])}]}


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_array_whose_indices_are_not_in_it(path, name):
    """MXNet looks at none of them. Refused when it is written, and where a
    file has it."""
    whole = SPARSE[name]
    save_params(path, [whole])
    data = bytes_of(path)
    for number, fields in enumerate(OUTSIDE[name] + OTHER[name]):
        broken = whole._replace(**{
            name: np.array(x) if isinstance(x, list) else x
            for name, x in fields.items()})
        with pytest.raises(ValueError, match="a sparse array"):
            save_params(path, [broken])
        assert bytes_of(path) == data       # it is still the old one
        if number < len(OUTSIDE[name]):
            changed = data.replace(*(
                getattr(x, field).tobytes() for field in fields
                for x in (whole, broken)))
            assert changed != data
            with pytest.raises(UnreadableParams, match="a sparse array"):
                loaded(changed, path)
            save_params(path, [whole])


@pytest.mark.parametrize("arrays, error, why", [
    ([np.ones(2, "int16")], TypeError, "received int16 for 0"),
    ({"w": [1, 2]}, TypeError, "an object list for 'w'.*numpy.asarray"),
    ({"w": None}, TypeError, "received an object NoneType for 'w'"),
    ({"w": np.float32(3)}, TypeError, "an object float32 for 'w'"),
    ({"w": np.ma.array([1., 2.], mask=[0, 1])}, TypeError, "have no masks"),
    (np.ones(2), TypeError, "in a dict or a list; received ndarray"),
    (None, TypeError, "in a dict or a list; received NoneType"),
    ({"w": np.array(["a"])}, TypeError, "received <U1 for 'w'"),
    ({1: np.ones(2)}, TypeError, "texts; received 1"),
    ({"a\0": np.ones(2)}, ValueError, "zero character"),
    ({"\ud800": np.ones(2)}, ValueError, "no lone surrogates"),
    ({"a": np.ones((0, 2)), **SPARSE}, ValueError, "'a' and 'rows'"),
])
def test_what_is_not_written(path, arrays, error, why):
    with pytest.raises(error, match=why):
        save_params(path, arrays)
    assert os.listdir(os.path.dirname(path)) == []


def test_versions_that_do_not_fit(path):
    with pytest.raises(ValueError, match="version 2 has no arrays without"):
        save_params(path, [np.float32(1)[...]], numpy_shapes=False)
    with pytest.raises(ValueError, match="version 3 has no sparse"):
        save_params(path, SPARSE, numpy_shapes=True)
    save_params(path, [np.ones(2)], numpy_shapes=True)
    assert struct.unpack_from("<I", bytes_of(path), 24) == (0xF993FACA,)


# -- the zip of MXNet 2 -------------------------------------------------------

def test_a_zip_of_arrays(tmp_path):
    arrays = {"0.weight": samples.values("w", (2, 3)),
              "scalar": samples.values("s", ()), "none": np.ones((0, 2)),
              "turned": samples.values("t", (3, 4)).T,
              "big": samples.values("b", (3,)).astype(">f4")}
    np.savez(tmp_path / "a.npz", **arrays)
    os.rename(tmp_path / "a.npz", tmp_path / "a.params")
    found = load_params(tmp_path / "a.params")
    assert list(found) == list(arrays)
    for name, x in found.items():
        assert_bit_equal(x, np.ascontiguousarray(
            arrays[name], arrays[name].dtype.newbyteorder("=")
        ).reshape(arrays[name].shape))
        assert x.flags.writeable


def zipped(members, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def npy(x, shape=None):
    file = io.BytesIO()
    np.save(file, x)
    data = file.getvalue()
    return data if shape is None else data.replace(
        str(x.shape).encode(), shape)


def sized(data, compressed=None, uncompressed=None):
    """Another size in the list of the entries, which is at the end."""
    at = data.index(b"PK\x01\x02") + 20
    for size in (compressed, uncompressed):
        if size is not None:
            data = data[:at] + struct.pack("<I", size) + data[at + 4:]
        at += 4
    return data


@pytest.mark.parametrize("data, why", [
    (zipped([("a.npy", npy(np.ones(1))), ("a", npy(np.ones(1)))]),
     "there twice"),
    (zipped([("a.npy", npy(np.ones(3), b"(1000000000,)"))]), "buffer|size"),
    (zipped([("a.npy", npy(np.zeros(9999)))], zipfile.ZIP_DEFLATED),
     "larger than it is"),
    (zipped([("a.npy", npy(np.array([None])))]), "OBJECT array"),
    (zipped([("a.npy", npy(np.array(["a"])))]), "no array of numbers"),
    (zipped([("a.txt", b"text")]), "magic"),
    (zipped([("a.npy", npy(np.ones(3)))])[:-30], "zip"),
    (sized(zipped([("a.npy", npy(np.ones(3)))]), 2 ** 30), "larger than it"),
    (sized(zipped([("a.npy", npy(np.ones(3)) + bytes(2 ** 24))],
                  zipfile.ZIP_DEFLATED), uncompressed=152), "CRC"),
    (zipped([("a.npy", npy(np.ones(3)))]).replace(b"\xf0?", b"\xf1?", 1),
     "CRC"),
], ids=reason)
def test_a_zip_that_is_refused(path, data, why):
    with memory_below(2 ** 20), pytest.raises(UnreadableParams, match=why):
        loaded(data, path)


def test_paths(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableParams, match="no ordinary file"):
        load_params(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        load_params(tmp_path / "no.params")
    with pytest.raises(TypeError, match="a path names a file"):
        load_params(3)
    with pytest.raises(FileNotFoundError, match="folder"):
        save_params(tmp_path / "no" / "a.params", [np.ones(2)])
