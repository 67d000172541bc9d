"""Predictions: rows in, rows out. Weights in a file that other programs read
and write."""
import collections
import dataclasses
import struct

import numpy as np
import pytest

import mgpu
from batches import pictures, rows
from conftest import BACKENDS
from helpers import (assert_all_equal, assert_bit_equal, convnet,
                     foreign_array, mlp, on)
from nets import on_each, several_inputs

X = rows(23, dtype="float64")
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def made(backend, devices, net=None):
    return mgpu.initialize(net or mlp(backend, units=(6, 4, 3)), devices,
                           "uniform", seed=3, dtype="float64")


def expected(replicas, X=X):
    """Of the values alone, in NumPy."""
    w0, b0, w1, b1 = replicas.export_numpy().values()
    return np.maximum(X @ w0.T + b0, 0) @ w1.T + b1


def test_rows_come_out_in_their_order(engine, devices):
    """Also of fewer rows than devices."""
    replicas = made(engine, devices)
    for batch_size in (None, 1, 5, 99):
        found = replicas.predict(X, batch_size)
        assert type(found) is np.ndarray
        np.testing.assert_allclose(found, expected(replicas), atol=1e-13)
    native = mgpu.put(X, devices[-1])
    assert_bit_equal(replicas.predict(native, batch_size), found)
    assert replicas.predict(X[:1]).shape == (1, 3)


def batches_of(backend):
    yield iter([X[:16], X[16:17], X[17:]])
    yield (x[None] for x in X)
    if backend.name == "mxnet":
        mx = mgpu.mxnet_compat()
        data = mx.io.NDArrayIter(mx.nd.array(X, dtype="float64"), None, 5)
        yield data
        yield data      # once more


def test_batches_of_an_iterable(backend):
    replicas = made(backend, on(0, 1, 2))
    for batches in batches_of(backend):
        np.testing.assert_allclose(replicas.predict(batches),
                                   expected(replicas), atol=1e-13)


def several(backend, forward):
    return several_inputs(backend, forward, (6, 2))


Pair = collections.namedtuple("Pair", "left right")


def test_inputs_and_outputs_are_nested(backend):
    replicas = made(backend, on(0, 1), several(
        backend, lambda one, a, b: {"sum": one(a) + b["x"],
                                    "pair": Pair(one(a), (a,))}))
    found = replicas.predict((X, {"x": X[:, :2]}), 7)
    assert found.keys() == {"sum", "pair"} and type(found["pair"]) is Pair
    w, b = replicas.export_numpy().values()
    np.testing.assert_allclose(found["sum"], X @ w.T + b + X[:, :2],
                               atol=1e-13)
    np.testing.assert_allclose(found["pair"].left, X @ w.T + b, atol=1e-13)
    np.testing.assert_array_equal(found["pair"].right[0], X)


def test_nothing_else_changes(backend):
    """It predicts, in `record` too: no dropout, no statistics, no graph, no
    gradient of the step that waits."""
    images = pictures(7)
    replicas = mgpu.initialize(convnet(backend), on(0, 1), "uniform")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    mgpu.train_batch(images, np.arange(7) % 3, replicas, LOSS, trainer)
    before = replicas.export_numpy(all_devices=True)
    first = replicas.predict(images, device=mgpu.cpu(1))
    with mgpu.record():
        assert_bit_equal(replicas.predict(images, device=mgpu.cpu(1)),
                         first)
    after = replicas.export_numpy(all_devices=True)
    assert_all_equal(after, before)
    # each device normalizes with its own statistics
    both = replicas.predict(images)
    assert_bit_equal(both[4:], replicas.predict(images[4:],
                                                device=mgpu.cpu(1)))


def test_what_is_no_rows_is_refused(backend):
    replicas = made(backend, on(0, 1))
    for wrong, options, kind, words in (
            (X[:0], {}, ValueError, "at least one"),
            ([], {}, ValueError, "at least one|no batch"),
            (iter([]), {}, ValueError, "received no batch"),
            ((X, X[:3]), {}, ValueError, "received 3 or 23"),
            (3, {}, TypeError, "an iterable of batches"),
            (iter([X]), {"batch_size": 3}, TypeError,
             "iterator and batch_size=3"),
            (X, {"batch_size": 0}, ValueError, "batch_size must be an int"),
            (X, {"device": mgpu.cpu(5)}, ValueError, "one of its devices")):
        with pytest.raises(kind, match=words):
            replicas.predict(wrong, **options)


def test_foreign_rows_and_outputs_without_rows_are_refused(backend):
    x, name = foreign_array(backend)
    with pytest.raises(TypeError, match=f"received {name}"):
        made(backend, on(0)).predict(x)
    replicas = made(backend, on(0, 1), several(
        backend, lambda one, a: one(a).sum()))
    with pytest.raises(ValueError, match="an output for each example"):
        replicas.predict(X)


@pytest.mark.parametrize("k, size, batch_size", [
    (2, 4, None), (1, 4, 2), (2, 8, 4), (3, 6, None)])
def test_an_output_that_has_as_many_rows_by_chance_is_refused(
        backend, k, size, batch_size):
    """A constant beside the rows, or rows on another axis."""
    for forward, words in (
            (lambda one, a: (one(a), one(a[:1] * 0).reshape((2,))),
             r"shape \(2,\) for batch size \d"),
            (lambda one, a: one(a).T, r"shape \(2, \d\) for batch size \d")):
        replicas = made(backend, on(*range(k)), several(backend, forward))
        with pytest.raises(ValueError, match=words):
            replicas.predict(X[:size], batch_size)


def test_one_row_beside_the_rows_is_refused(backend):
    """Not where there is one row: these are the outputs themselves."""
    def forward(one, a):
        return one(a), one(a[:1] * 0)
    assert made(backend, on(0), several(backend, forward)).predict(
        X[:1])[1].shape == (1, 2)
    with pytest.raises(ValueError, match=r"shape \(1, 2\) for batch size 2"):
        made(backend, on(0, 1), several(backend, forward)).predict(X[:2])


def test_equal_rows_are_rows(backend):
    replicas, same = made(backend, on(0, 1)), np.ones((8, 6))
    np.testing.assert_allclose(replicas.predict(same, 4),
                               expected(replicas, same), atol=1e-13)


@pytest.mark.skipif("torch" not in BACKENDS, reason="torch's outputs")
def test_outputs_that_are_no_arrays_are_refused():
    """Else the rows of the first device would be all."""
    from torch import nn

    class Net(nn.Linear):
        def __init__(self, wrap):
            super().__init__(6, 3)
            self.wrap = wrap

        def forward(self, x):
            return self.wrap(super().forward(x))
    Output = dataclasses.make_dataclass("Output", ["scores"])
    inputs, labels = X.astype("float32"), np.zeros(23, "int32")
    with mgpu.using_backend("torch"):
        for wrap, name in ((lambda x: (x, 0.5), "float"),
                           (lambda x: (x, ["a"] * len(x)), "str"),
                           (Output, "Output")):
            replicas = mgpu.initialize(Net(wrap), on(0, 1))
            for batch_size in (None, 3):
                with pytest.raises(TypeError,
                                   match=f"received a {name}\\. "):
                    replicas.predict(inputs, batch_size)
        with pytest.raises(TypeError, match="of numbers; received Output"):
            mgpu.evaluate_accuracy_gpus(replicas, [(inputs, labels)])
        with pytest.raises(ValueError, match="example.*received Output"):
            mgpu.train_batch(inputs, labels, replicas, lambda out, _: out,
                             mgpu.Trainer(replicas, "sgd"))
        with pytest.raises(TypeError, match="received bool as flag"):
            replicas([inputs, inputs], flag=True)


@pytest.mark.skipif("torch" not in BACKENDS, reason="lists go to forward")
def test_lists_are_cut_with_the_rows(devices):
    import torch

    class Net(torch.nn.Linear):
        def forward(self, x, names):
            return super().forward(x) * torch.tensor(
                [[float(len(name))] for name in names])
    texts = ["a" * (i + 1) for i in range(len(X))]
    with mgpu.using_backend("torch"):
        net = Net(6, 3).double()
        expected = net(torch.tensor(X), texts).detach().numpy()
        replicas = mgpu.initialize(net, devices, init="keep")
        for batch_size in (None, 5):
            np.testing.assert_allclose(replicas.predict(
                (X, texts), batch_size), expected, rtol=1e-12)
        for wrong in (tuple(texts), texts[1:], texts + ["b"]):
            with pytest.raises(ValueError, match=(
                    "entry for each example|as many as the batch")):
                replicas.predict((X, wrong))


# -- files --------------------------------------------------------------------

def test_a_file_has_the_same_bits_on_any_devices(backend, tmp_path):
    """And on the other backend."""
    replicas = made(backend, on(0, 1, 2))
    values = replicas.export_numpy()
    replicas.save(tmp_path / "net")
    for name in BACKENDS:
        with mgpu.using_backend(name) as other:
            again = mgpu.initialize(mlp(other, units=(6, 4, 3)), on(0, 1),
                                    "uniform", seed=9, dtype="float64")
            again.load(tmp_path / "net")
            for key, copies in on_each(again).items():
                assert_bit_equal(copies, [values[key]] * 2)


def test_other_programs_read_and_write_it(backend, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    replicas = mgpu.initialize(convnet(backend), on(0, 1), "uniform")
    replicas.save(tmp_path / "net")
    found = safetensors.load_file(tmp_path / "net")
    assert found.pop("sha256").shape == (32,)
    assert found.keys() == replicas.export_numpy().keys()
    # a norm's weight and bias, and other values
    names = {name: name.replace("gamma", "weight").replace("beta", "bias")
             for name in found}
    assert names.keys() != set(names.values())
    changed = {name: np.asarray(x + 1) for name, x in found.items()}
    safetensors.save_file({names[name]: x for name, x in changed.items()},
                          tmp_path / "other")
    replicas.load(tmp_path / "other")
    for name, copies in on_each(replicas).items():
        assert_bit_equal(copies, [changed[name]] * 2)


def test_what_does_not_fit_is_refused_whole(backend, tmp_path):
    replicas = made(backend, on(0, 1))
    before = replicas.export_numpy()
    made(backend, on(0), mlp(backend, units=(6, 5, 3, 2))).save(
        tmp_path / "other")
    with pytest.raises(ValueError, match=r"unknown 4.weight.*0.weight: shape"):
        replicas.load(tmp_path / "other")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    mgpu.save_checkpoint(tmp_path / "whole", replicas, trainer)
    with pytest.raises(ValueError, match="mgpu.load_checkpoint"):
        replicas.load(tmp_path / "whole")
    data = bytearray((tmp_path / "other").read_bytes())
    data[-50] ^= 1
    head = b'{"0.weight":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    for damaged in (data, struct.pack("<Q", len(head)) + head + b"\0\0"):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(mgpu.errors.CheckpointCorrupt,
                           match="digest of .* does not match|BF16"):
            replicas.load(tmp_path / "damaged")
    with pytest.raises(FileNotFoundError):
        replicas.load(tmp_path / "nothing")
    assert_all_equal(replicas.export_numpy(), before)
