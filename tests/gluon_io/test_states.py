"""`load_trainer_states` against MXNet 1.9.1, and pickles that would harm."""
import json
import os
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import BACKENDS
from helpers import assert_bit_equal
from mgpu.checkpoints import resuming
from mgpu.gluon_io import (CSR, Record, RowSparse, UnreadableParams,
                           load_trainer_states)

from . import samples
from .mutations import FILES, memory_below, mutation, summary

live = pytest.mark.skipif("mxnet" not in BACKENDS, reason="asks MXNet")


def loaded(data, path):
    Path(path).write_bytes(data)
    return load_trainer_states(path)


def assert_same(ours, theirs):
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(ours, tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs):
            assert_same(a, b)
    elif ours is not None:
        assert_bit_equal(ours, theirs)


# -- with MXNet ---------------------------------------------------------------

@live
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", samples.STATES)
def test_states_and_optimizer_of_a_saved_file(mx, path, variant):
    """Arrays, class, numbers, update counts and schedule equal those of the
    live trainer."""
    trainer = samples.STATES[variant](mx, path)
    found, theirs = load_trainer_states(path), samples.kept(trainer)
    assert list(found.states) == list(theirs)
    for i, x in theirs.items():
        assert_same(found.states[i], x)
    optimizer, ours = trainer.optimizer, found.optimizer
    assert ours.kind == f"{type(optimizer).__module__}." \
                        f"{type(optimizer).__qualname__}"
    for name, value in vars(optimizer).items():
        if isinstance(value, (int, float, bool, str, type(None))):
            assert ours.state[name] == value, name
    assert ours.state["_all_index_update_counts"] == \
        optimizer._all_index_update_counts
    if optimizer.lr_scheduler is not None:
        schedule = ours.state["lr_scheduler"]
        assert schedule.state == vars(optimizer.lr_scheduler)
        assert schedule.kind.endswith(type(optimizer.lr_scheduler).__name__)
    if variant.endswith("-float16"):
        # where the copy of a parameter is, as `TrainerStates` says
        at = int(variant.partition("-")[0] in ("sgd", "nag", "lars"))
        state = found.states[2]
        assert len(state) == 2 and state[at].dtype == "float32"
        assert_bit_equal(state[at].astype("float16"),
                         trainer._params[2].data().asnumpy())


def test_every_optimizer_has_a_sample():
    assert {name.partition("-")[0] for name in samples.STATES} >= set(
        resuming.FAMILIES)


@live
@pytest.mark.parametrize("devices, keys", [
    (1, [0, 1]), (2, ["fc_weight", "fc_bias"])])
def test_states_of_a_module(mx, path, devices, keys):
    """A Module saves no optimizer; keys are indices, or names where the
    key-value store updates."""
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(
        mx.sym.var("data"), num_hidden=2, name="fc"), name="softmax")
    module = mx.mod.Module(net, context=[mx.cpu(i) for i in range(devices)])
    module.fit(mx.io.NDArrayIter(np.ones((4, 3), "f"), np.zeros(4, "f"), 2),
               num_epoch=1, optimizer="sgd",
               optimizer_params={"momentum": 0.9, "learning_rate": 0.1})
    module.save_optimizer_states(path)
    found = load_trainer_states(path)
    assert found.optimizer is None and list(found.states) == keys
    with open(path, "rb") as file:
        theirs = pickle.load(file)
    for key in keys:
        assert_bit_equal(found.states[key], theirs[key].asnumpy())
        assert found.states[key].any()


@live
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_all_protocols(mx, path, protocol):
    """Pickle's protocols, with sparse states and a rate that is a NumPy
    scalar."""
    arrays = samples.sparse(mx)
    optimizer = mx.optimizer.SGD(learning_rate=np.float64(0.1),
                                 wd=np.float32(0.25))
    found = loaded(pickle.dumps(({0: arrays["rows"], 1: (
        arrays["columns"], None)}, optimizer), protocol), path)
    assert isinstance(found.states[0], RowSparse)
    assert isinstance(found.states[1][0], CSR)
    assert_bit_equal(found.states[0].to_dense(), arrays["rows"].asnumpy())
    assert_bit_equal(found.states[1][0].to_dense(),
                     arrays["columns"].asnumpy())
    assert found.states[1][1] is None
    assert found.optimizer.state["lr"] == 0.1
    assert found.optimizer.state["wd"] == 0.25


# -- without MXNet ------------------------------------------------------------

EXPECTED = json.loads((FILES / "expected.json").read_text())
GOLDEN = sorted(name for name in EXPECTED if name.endswith(".states"))


def test_files_of_mxnet():
    """Stored files against `expected.json`, which MXNet has written."""
    def nested(x):
        return None if x is None else list(map(nested, x)) \
            if isinstance(x, tuple) else summary([x])[0]
    for name in GOLDEN:
        found, expected = load_trainer_states(FILES / name), EXPECTED[name]
        assert {str(i): nested(x) for i, x in found.states.items()} \
            == expected["states"], name
        assert found.optimizer.kind == expected["kind"], name
        assert found.optimizer.state["num_update"] \
            == expected["num_update"], name


# -- pickles that would harm --------------------------------------------------

class Calls:
    """What a pickle calls where it is read."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


def array(shape=(2,), handle=None):
    """The pickle of an array of zeros, without the protocol's first byte."""
    data = struct.pack(f"<Iii{len(shape)}qiii", 0xF993FAC9, 0, len(shape),
                       *shape, 1, 0, 0) + b"\0" * 4 * int(np.prod(shape)) \
        if handle is None else handle
    return (b"cmxnet.ndarray.ndarray\nNDArray\n(Nt\x81"
            b"}\x8c\x06handleB" + struct.pack("<I", len(data)) + data + b"sb")


def in_states(x):
    """`x`, the code of one object, as the state of parameter 0."""
    return b"\x80\x04}K\x00" + x + b"s."


def bomb(inner, levels=60):
    """A tuple that has the one below it twice."""
    return inner + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86"
                            for i in range(levels))


def test_valid_pickle_codes_are_read(path):
    """`array` makes valid codes, to which the tests below add one fault."""
    assert loaded(in_states(array()), path).states[0].tolist() == [0, 0]
    assert loaded(in_states(b"N" + array() + b"\x86"),
                  path).states[0][0] is None


def test_a_large_memo_index_allocates_nothing(path):
    with memory_below(2 ** 20):
        found = loaded(in_states(b"Nr\xff\xff\xff\xff"), path)
    assert found.states == {0: None}


def test_functions_in_a_pickle_are_not_called(path, tmp_path):
    """A call in the place of the optimizer is loaded as a Record, any other is
    refused."""
    for function, *arguments in ((os.system, f"touch {tmp_path}/ran"),
                                 (open, f"{tmp_path}/ran", "w"),
                                 (exec, f"open('{tmp_path}/ran', 'w')"),
                                 (eval, "1 / 0"), (getattr, "a", "b")):
        for x in ({0: Calls(function, *arguments)},
                  (Calls(function, *arguments), None)):
            with pytest.raises(UnreadableParams):
                loaded(pickle.dumps(x), path)
        found = loaded(pickle.dumps(({}, Calls(function, *arguments))), path)
        assert isinstance(found.optimizer, Record)
        assert found.optimizer.arguments == tuple(arguments)
    assert os.listdir(tmp_path) == ["file"]


def test_modules_in_a_pickle_are_not_imported(path):
    data = b"\x80\x04}cthis\nanything\n\x86."
    found = loaded(data.replace(b"\n\x86", b"\n)\x81\x86"), path)
    assert found.optimizer.kind == "this.anything"
    assert "this" not in sys.modules
    with pytest.raises(UnreadableParams, match="the optimizer is no object"):
        loaded(data, path)


MUCH = 10 ** 12
HARMFUL = {
    "bytearray": pickle.dumps({0: Calls(bytearray, MUCH)}),
    "bytes": pickle.dumps({0: Calls(bytes, MUCH)}),
    "handle": in_states(
        b"cmxnet.ndarray.ndarray\nNDArray\n)\x81}\x8c\x06handle"
        b"\x8a\x06" + MUCH.to_bytes(6, "little") + b"sb"),
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2 ** 40) + b"}",
    "bytearray8": in_states(b"\x96" + struct.pack("<Q", 2 ** 40) + b"a"),
    "binbytes8": in_states(b"\x8e" + struct.pack("<Q", 2 ** 40) + b"a"),
    "unicode8": in_states(b"\x8d" + struct.pack("<Q", 2 ** 40) + b"a"),
    "long4": in_states(b"\x8b" + struct.pack("<i", 2 ** 31 - 1) + b"a"),
    "array": in_states(array(handle=struct.pack(
        "<Iii2qiii", 0xF993FAC9, 0, 2, 2 ** 30, 2 ** 20, 1, 0, 0))),
    "tuples": in_states(bomb(array())),
    "a key of tuples": b"\x80\x04}" + bomb(b"N") + b"Ns.",
    "keys of tuples": b"\x80\x04}(" + bomb(b"N") + b"Nu.",
    "a dictionary of tuples": b"\x80\x04(" + bomb(b"N") + b"Nd.",
    "a set of tuples": b"\x80\x04}\x8f(" + bomb(b"N") + b"\x90\x86.",
    "a frozen set": b"\x80\x04}(" + bomb(b"N") + b"\x91\x86.",
    "one array many times": b"\x80\x04}(B" + struct.pack("<I", 100032)
        + struct.pack("<IiiqiiI", 0xF993FAC9, 0, 1, 10 ** 5, 1, 0, 3)
        + b"\0" * 10 ** 5 + b"q\x000" + b"".join(
            b"M" + struct.pack("<H", i) + b"cmxnet.ndarray.ndarray\nNDArray\n"
            b")\x81}\x8c\x06handleh\x00sb" for i in range(2000)) + b"u.",
    "one text many times": b"\x80\x04X" + struct.pack("<I", 10 ** 5)
        + b"a" * 10 ** 5 + b"q\x00" + b"cbuiltins\nbytearray\nh\x00\x85R"
        * 2000 + b".",
    "classes": b"\x80\x04}" + b"".join(
        f"cm\nC{i}\n".encode() for i in range(20000)) + b"\x86.",
    "a number of tuples": b"\x80\x04}" + b"cnumpy.core.multiarray\nscalar\n"
        + b"cnumpy\ndtype\n" + bomb(b"N") + b"\x85\x81C\x01a\x86R\x86.",
    "an extension": b"\x80\x04}\x82\x01\x86.",
    "an object outside": b"\x80\x04}\x8c\x01aQ\x86.",
    "nothing": b"", "no end": in_states(array())[:-1],
    "itself": b"\x80\x04}K\x00]q\x00h\x00as.",
    "a function's state": b"\x80\x04}cbuiltins\nbytearray\n"
        b"N}\x8c\x0c__defaults__Ns\x86b\x86.",
    "a negative number": b"\x80\x04}J\xff\xff\xff\xffNs.",
    "a float": b"\x80\x04}G" + struct.pack(">d", 1.5) + b"Ns.",
    "a list": pickle.dumps([1, 2]), "three": pickle.dumps((1, 2, 3)),
    "a number as a state": pickle.dumps({0: 1.5}),
    "an array that is not told": in_states(
        b"cmxnet.ndarray.ndarray\nNDArray\n)\x81"),
    "an array of None": in_states(
        b"cmxnet.ndarray.ndarray\nNDArray\n)\x81}\x8c\x06handleNsb"),
    "an array of NumPy": pickle.dumps({0: np.ones(2)}),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_refused_with_little_memory(path, name):
    """The peak is below 12 times the size of the file plus 4 MiB."""
    data = HARMFUL[name]
    with memory_below(12 * len(data) + 2 ** 22), pytest.raises(
            UnreadableParams, match="expected what Trainer.save_states"):
        loaded(data, path)


def test_a_pickle_sets_no_state_of_a_function(path):
    """A pickle that sets `__defaults__` or an attribute of a known function is
    refused."""
    for state in (b"N}\x8c\x0c__defaults__Ns\x86", b"}\x8c\x01aK\x01s"):
        for name in (b"copyreg\n_reconstructor", b"builtins\nbytearray",
                     b"numpy.core.multiarray\nscalar"):
            with pytest.raises(UnreadableParams, match="state of no object"):
                loaded(b"\x80\x04}c" + name + b"\n" + state + b"b\x86.", path)


def test_damaged_files(path):
    """A damaged file is refused, or its states have keys of the right types;
    there is no other error."""
    refused = 0
    for i in range(500):
        data = mutation((FILES / GOLDEN[i % len(GOLDEN)]).read_bytes(), i)
        with memory_below(2 ** 20):
            try:
                kinds = set(map(type, loaded(data, path).states))
            except UnreadableParams:
                kinds, refused = set(), refused + 1
        assert kinds <= {int, str}, f"mutation {i}"
    assert 100 < refused < 500


@pytest.mark.parametrize("data, why", [
    (samples.by_hand(1, {"a": np.ones(2, "f4")}), "see load_params"),
    (b"\x12", "no pickle has the code 18")])
def test_another_kind_of_file(path, data, why):
    with pytest.raises(UnreadableParams, match=why):
        loaded(data, path)


def test_a_missing_file_and_a_wrong_path(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_trainer_states(tmp_path / "no.states")
    with pytest.raises(TypeError, match="a path names a file"):
        load_trainer_states(3)


def test_a_pickle_of_python_2(path):
    """Its texts are bytes, its objects made by copy_reg."""
    data = (b"\x80\x02}K\x00cmxnet.ndarray\nNDArray\nNU\x00" +
            b"0\x85\x81}U\x06handlec__builtin__\nbytearray\nX")
    handle = struct.pack("<IiIiii", 2, 1, 2, 1, 0, 3) + b"\x01\xfe"
    text = handle.decode("latin1").encode()
    data += struct.pack("<I", len(text)) + text + \
        b"U\x07latin-1\x86Rsbs" \
        b"ccopy_reg\n_reconstructor\ncmxnet.optimizer\nSGD\n" \
        b"c__builtin__\nobject\nN\x87R}U\x02lrG?\xe0\0\0\0\0\0\0sb\x86."
    found = loaded(data, path)
    assert_bit_equal(found.states[0], np.array([[1, 254]], "uint8"))
    assert found.optimizer.kind == "mxnet.optimizer.SGD"
    assert found.optimizer.state == {"lr": 0.5}
