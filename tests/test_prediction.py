"""Predictions: rows in, rows out. Weights in a file that other programs read
and write."""
import collections
import dataclasses
import struct

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import assert_bit_equal, convnet, foreign_array, mlp, on

rng = np.random.default_rng(0)
X = rng.normal(size=(23, 6))
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def made(backend, devices, net=None):
    return mgpu.initialize(net or mlp(backend, units=(6, 4, 3)), devices,
                           "uniform", seed=3, dtype="float64")


def expected(replicas, rows=X):
    """Of the values alone, in NumPy."""
    w0, b0, w1, b1 = replicas.export_numpy().values()
    return np.maximum(rows @ w0.T + b0, 0) @ w1.T + b1


@pytest.mark.parametrize("batch_size", [None, 1, 5, 23, 99])
def test_rows_come_out_in_their_order(engine, devices, batch_size):
    """Also of fewer rows than devices."""
    replicas = made(engine, devices)
    found = replicas.predict(X, batch_size)
    assert type(found) is np.ndarray
    np.testing.assert_allclose(found, expected(replicas), atol=1e-13)
    native = mgpu.put(X, devices[-1])
    assert_bit_equal(replicas.predict(native, batch_size), found)
    assert replicas.predict(X[:1]).shape == (1, 3)


def test_batches_of_an_iterable(backend):
    replicas = made(backend, on(0, 1, 2))
    for batches in (iter([X[:16], X[16:17], X[17:]]), (x[None] for x in X)):
        np.testing.assert_allclose(replicas.predict(batches),
                                   expected(replicas), atol=1e-13)


def several(backend, make):
    """A network whose forward is ``make(first input, ...)``."""
    if backend.name == "mxnet":
        from mxnet import gluon

        class Net(gluon.Block):
            def __init__(self):
                super().__init__()
                with self.name_scope():
                    self.one = gluon.nn.Dense(2, in_units=6)

            def forward(self, *inputs):
                return make(self.one, *inputs)
    else:
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.one = nn.Linear(6, 2)

            def forward(self, *inputs):
                return make(self.one, *inputs)
    return Net()


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
    pictures = rng.normal(size=(7, 2, 8, 8)).astype("float32")
    replicas = mgpu.initialize(convnet(backend), on(0, 1), "uniform")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    mgpu.train_batch(pictures, np.arange(7) % 3, replicas, LOSS, trainer)
    before = replicas.export_numpy(all_devices=True)
    first = replicas.predict(pictures, device=mgpu.cpu(1))
    with mgpu.record():
        assert_bit_equal(replicas.predict(pictures, device=mgpu.cpu(1)),
                         first)
    after = replicas.export_numpy(all_devices=True)
    for name, x in before.items():
        assert_bit_equal(after[name], x)
    assert not any(replicas.recorded)
    # each device judges by its own statistics
    both = replicas.predict(pictures)
    assert_bit_equal(both[4:], replicas.predict(pictures[4:],
                                                device=mgpu.cpu(1)))


@pytest.mark.parametrize("X, options, kind, words", [
    (X[:0], {}, ValueError, "one row or more"),
    ([], {}, ValueError, "one row or more|no batch"),
    (iter([]), {}, ValueError, "received no batch"),
    ((X, X[:3]), {}, ValueError, "received 3 or 23"),
    (3, {}, TypeError, "an iterable of batches"),
    (iter([X]), {"batch_size": 3}, TypeError, "iterator and batch_size"),
    (X, {"batch_size": 0}, ValueError, "batch_size must be an integer"),
    (X, {"device": mgpu.cpu(5)}, ValueError, "Predict where it is")])
def test_what_is_no_rows_is_refused(backend, X, options, kind, words):
    with pytest.raises(kind, match=words):
        made(backend, on(0, 1)).predict(X, **options)


def test_foreign_rows_and_outputs_without_rows_are_refused(backend):
    x, name = foreign_array(backend)
    with pytest.raises(TypeError, match=f"received {name}"):
        made(backend, on(0)).predict(x)
    replicas = made(backend, on(0, 1), several(
        backend, lambda one, a: one(a).sum()))
    with pytest.raises(ValueError, match="a row for each row"):
        replicas.predict(X)


@pytest.mark.parametrize("k, rows, batch_size", [
    (2, 4, None), (1, 4, 2), (2, 8, 4), (3, 6, None), (1, 1, None)])
def test_an_output_that_has_as_many_rows_by_chance_is_refused(
        backend, k, rows, batch_size):
    """A constant beside the rows. Equal rows are rows."""
    first = 2 if rows > 1 else 1
    constant = several(backend, lambda one, a: (
        one(a), one(a[:1] * 0).reshape((2,) if first == 2 else (1, 2))))
    one = made(backend, on(*range(k)), constant)
    if rows == 1:       # these are the outputs themselves
        assert one.predict(X[:1])[1].shape == (1, 2)
        two = made(backend, on(0, 1), several(
            backend, lambda one, a: (one(a), one(a[:1] * 0))))
        with pytest.raises(ValueError, match=r"of shape \(1, 2\) for 2 rows"):
            two.predict(X[:2])
        return
    with pytest.raises(ValueError, match=r"of shape \(2,\) for \d rows"):
        one.predict(X[:rows], batch_size)
    turned = made(backend, on(*range(k)), several(
        backend, lambda one, a: one(a).T))
    with pytest.raises(ValueError, match=r"of shape \(2, \d\) for \d rows"):
        turned.predict(X[:rows], batch_size)
    replicas = made(backend, on(*range(k)))
    same = np.ones((rows, 6))
    np.testing.assert_allclose(replicas.predict(same, batch_size),
                               expected(replicas, same), atol=1e-13)


@pytest.mark.skipif("torch" not in BACKENDS, reason="torch's outputs")
@pytest.mark.parametrize("batch_size", [None, 3])
def test_outputs_that_are_no_arrays_are_refused(batch_size):
    """Else the rows of the first device would be all."""
    from torch import nn

    class Net(nn.Linear):
        def __init__(self, wrap):
            super().__init__(6, 3)
            self.wrap = wrap

        def forward(self, x):
            return self.wrap(super().forward(x))
    Output = dataclasses.make_dataclass("Output", ["scores"])
    with mgpu.using_backend("torch"):
        for wrap, name in ((Output, "Output"), (lambda x: (x, 0.5), "float"),
                           (lambda x: (x, ["a"] * len(x)), "str")):
            replicas = mgpu.initialize(Net(wrap), on(0, 1))
            with pytest.raises(TypeError, match=f"received a {name} in the"):
                replicas.predict(X.astype("float32"), batch_size)
        rows, labels = X.astype("float32"), np.zeros(23, "int32")
        replicas = mgpu.initialize(Net(Output), on(0, 1))
        with pytest.raises(TypeError, match="of numbers; received Output"):
            mgpu.evaluate_accuracy_gpus(replicas, [(rows, labels)])
        with pytest.raises(ValueError, match="example.*received a Output"):
            mgpu.train_batch(rows, labels, replicas, lambda out, _: out,
                             mgpu.Trainer(replicas, "sgd"))
        with pytest.raises(TypeError, match="received bool as flag"):
            replicas([rows, rows], flag=True)


@pytest.mark.skipif("torch" not in BACKENDS, reason="lists go to forward")
@pytest.mark.parametrize("batch_size", [None, 1, 5])
def test_lists_are_cut_with_the_rows(devices, batch_size):
    import torch

    class Net(torch.nn.Linear):
        def forward(self, x, names):
            return super().forward(x) * torch.tensor(
                [[float(len(name))] for name in names])
    texts = ["a" * (i + 1) for i in range(len(X))]
    with mgpu.using_backend("torch"):
        torch.manual_seed(0)
        net = Net(6, 3).double()
        expected = net(torch.tensor(X), texts).detach().numpy()
        replicas = mgpu.initialize(net, devices, init="keep")
        found = replicas.predict((X, texts), batch_size)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        for wrong in (tuple(texts), texts[1:], texts + ["b"]):
            with pytest.raises(ValueError, match="an entry for each row"):
                replicas.predict((X, wrong), batch_size)


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="MXNet's iterators")
def test_rows_of_a_data_iterator(backend):
    mx = mgpu.mxnet_compat()
    if backend.name != "mxnet":
        return
    replicas = made(backend, on(0, 1))
    data = mx.io.NDArrayIter(mx.nd.array(X, dtype="float64"), None, 5)
    for _ in range(2):
        np.testing.assert_allclose(replicas.predict(data), expected(replicas),
                                   atol=1e-13)


# -- files --------------------------------------------------------------------

def test_a_file_has_the_same_bits_on_any_devices(backend, tmp_path):
    """And on the other engine."""
    replicas = made(backend, on(0, 1, 2))
    values = replicas.export_numpy()
    replicas.save(tmp_path / "net")
    for name in BACKENDS:
        with mgpu.using_backend(name) as other:
            again = mgpu.initialize(mlp(other, units=(6, 4, 3)), on(0, 1),
                                    "uniform", seed=9, dtype="float64")
            again.load(tmp_path / "net")
            again.check_equal()
            for key, x in again.export_numpy().items():
                assert_bit_equal(x, values[key])


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
    replicas.check_equal()
    for name, x in replicas.export_numpy().items():
        assert_bit_equal(x, changed[name])


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
    (tmp_path / "damaged").write_bytes(data)
    for bits, dtype in ((data, "F64"), (b"", "BF16")):
        if not bits:
            head = (f'{{"0.weight":{{"dtype":"{dtype}","shape":[1],'
                    '"data_offsets":[0,2]}}}').replace("}}}", "}}").encode()
            bits = struct.pack("<Q", len(head)) + head + b"\0\0"
        (tmp_path / "damaged").write_bytes(bits)
        with pytest.raises(mgpu.errors.CheckpointCorrupt,
                           match="does not fit its digest|BF16"):
            replicas.load(tmp_path / "damaged")
    with pytest.raises(FileNotFoundError):
        replicas.load(tmp_path / "nothing")
    for name, x in replicas.export_numpy().items():
        assert_bit_equal(x, before[name])
