"""Inputs by name, batches that are dicts, and MXNet's data iterators."""
from collections import UserDict

import numpy as np
import pytest

import mgpu
from batches import rows
from conftest import BACKENDS
from helpers import assert_all_equal, assert_bit_equal, bricks, on, worst
from nets import shards_of

if set(BACKENDS) < {"mxnet", "torch"}:
    pytest.skip("they need both backends", allow_module_level=True)

import torch                                        # noqa: E402

mx = mgpu.mxnet_compat()

X, M = rows(7, 4, "float64"), rows(7, 3, "float64", seed=1)
Y = np.arange(7) % 3
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


class GluonNet(mx.gluon.HybridBlock):
    """Gluon's own way: parameters are inputs of `hybrid_forward`."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.layer = mx.gluon.nn.Dense(3, in_units=4)
            self.scale = self.params.get("scale", shape=(1,), init="one")

    def hybrid_forward(self, F, ids, mask=None, extra=None, scale=None):
        out = F.broadcast_mul(self.layer(ids), scale)
        return out if mask is None else out * mask


def forward(self, ids, mask=None, extra=None):
    out = self.layer(ids)
    return out if mask is None else out * mask


def plain(backend, function=forward):
    """A network whose forward is `function`; ``self.layer`` is dense."""
    base, dense = bricks(backend)
    net = type("Net", (base,), {"forward": function})()
    net.layer = dense(4, 3)
    return net


def start(backend, k, net=None, **options):
    if net is None:
        net = plain(backend) if backend.name == "torch" else GluonNet()
    replicas = mgpu.initialize(net, on(*range(k)), init="xavier",
                               dtype="float64", **options)
    return replicas, mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})


def loss_of(output, batch):
    return LOSS(output, batch["labels"])


def trained(backend, k, X, y, loss=LOSS, net=None, **options):
    """The values after two steps on a batch."""
    replicas, trainer = start(backend, k, net, **options)
    for _ in range(2):
        mgpu.train_batch(X, y, replicas, loss, trainer)
    return replicas.export_numpy()


def assert_same(a, b):
    assert worst(a, b)[0] < 1e-12


class Batch(UserDict):
    """As a tokenizer gives: its entries are attributes too."""

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


FORMS = [
    (mgpu.Kwargs(mask=M, ids=X), Y, LOSS),
    ((X, mgpu.Kwargs(mask=M)), Y, LOSS),
    ({"ids": X, "mask": M, "labels": Y}, None, loss_of),
    (Batch(labels=Y, ids=X, mask=M, text=list("abcdefg")), None,
     lambda output, batch: LOSS(output, batch.labels if batch.text else 0))]


@pytest.mark.parametrize("k, form", [(1, 2), (3, 0), (3, 1), (3, 2), (3, 3)])
def test_names_give_the_numbers_of_places(backend, k, form):
    assert_same(trained(backend, k, *FORMS[form]),
                trained(backend, 1, (X, M), Y))


def test_gluons_blocks_take_names():
    """With a forward of their own, and compiled."""
    with mgpu.using_backend("mxnet") as backend:
        for make, options in ((plain, {}),
                              (lambda _: GluonNet(), {"hybridize": True})):
            assert_same(*(trained(backend, 2, batch, Y, net=make(backend),
                                  **options)
                          for batch in (mgpu.Kwargs(mask=M, ids=X), (X, M))))


def test_plain_calls_take_names(backend):
    replicas, _ = start(backend, 2)
    xs, ms = shards_of(X, replicas), shards_of(M, replicas)
    expected = replicas(xs, ms)
    for found in (
            replicas(ids=xs, mask=ms), replicas(xs, mask=ms),
            replicas([mgpu.Kwargs(ids=x, mask=m) for x, m in zip(xs, ms)]),
            [replicas[i](ids=xs[i], mask=ms[i]) for i in range(2)],
            [replicas[i](xs[i], mgpu.Kwargs(mask=ms[i])) for i in range(2)]):
        for a, b in zip(found, expected, strict=True):
            assert_bit_equal(mgpu.to_numpy(a), mgpu.to_numpy(b))
    assert replicas(ids=[xs[0], None], mask=[ms[0], None])[1] is None


def test_wrong_calls_by_name_are_refused(backend):
    replicas, _ = start(backend, 2)
    xs, ms = shards_of(X, replicas), shards_of(M, replicas)
    with pytest.raises(TypeError, match="maske|parameters of the network's"):
        replicas[0](ids=xs[0], maske=ms[0])
    with pytest.raises(TypeError, match="one shard per device"):
        replicas(ids=xs[0])
    for option in ((2.0, 3.0), [True, False], ("a", "b")):
        with pytest.raises(TypeError, match="one option for all"):
            replicas(xs, mask=option)
    with pytest.raises(ValueError, match="2 replicas expect 2 shards"):
        replicas(ids=xs[:1])


def test_a_dict_is_named_where_forward_takes_names_only():
    def names_only(self, *, ids, mask):
        return forward(self, ids, mask)

    def of_a_dict(self, batch):
        return forward(self, batch["ids"], batch["mask"])
    with mgpu.using_backend("torch") as backend:
        expected = trained(backend, 1, (X, M), Y)
        for function in (names_only, of_a_dict):
            net = plain(backend, function)
            assert_same(trained(backend, 2, {"ids": X, "mask": M}, Y,
                                net=net), expected)
            score = mgpu.evaluate_accuracy_gpus(
                net, [({"ids": X, "mask": M}, Y)], devices=[mgpu.cpu(0)])
            assert score == mgpu.evaluate_accuracy_gpus(
                net, [{"ids": X, "mask": M, "label": Y}])
        assert_same(trained(
            backend, 2, {"ids": X, "mask": M, "labels": Y}, None, loss_of,
            net=plain(backend, of_a_dict)), expected)


def test_sync_batch_norm_takes_names():
    def normed(self, ids, mask=None):
        return self.norm(forward(self, ids, mask))
    found = []
    with mgpu.using_backend("torch") as backend:
        for k in (1, 3):
            net = plain(backend, normed)
            net.norm = torch.nn.BatchNorm1d(3)
            found.append(trained(backend, k, mgpu.Kwargs(ids=X, mask=M), Y,
                                 net=net, batch_norm="sync"))
    assert_same(*found)


def test_gluon_takes_no_names_that_have_no_place():
    with mgpu.using_backend("mxnet") as backend:
        for function in (lambda self, ids, *, mask: self.layer(ids),
                         lambda self, ids, **rest: self.layer(ids)):
            replicas, trainer = start(backend, 1, plain(backend, function))
            with pytest.raises(TypeError, match="take positional inputs"):
                mgpu.train_batch(mgpu.Kwargs(ids=X, mask=M), Y, replicas,
                                 LOSS, trainer)


def mask_needed(self, ids, mask, extra=None):
    return self.layer(ids) * mask


@pytest.mark.parametrize("batch, words", [
    ({"ids": X, "labels": Y, "msk": M}, "received 'msk', which is neither"),
    ({"labels": Y, "mask": M}, "could be both"),
    ({"ids": X, "labels": Y, "mask": M[:5]}, "same number of examples"),
    ({"ids": X, "labels": Y}, "without 'mask'")])
def test_a_dict_that_does_not_fit_is_refused(backend, batch, words):
    replicas, trainer = start(backend, 2, plain(
        backend, mask_needed if "without" in words else forward))
    before = replicas.export_numpy()
    with pytest.raises((ValueError, TypeError), match=words):
        mgpu.train_batch(batch, None, replicas, loss_of, trainer)
    assert_all_equal(replicas.export_numpy(), before)


def test_what_the_loss_reads_is_no_misspelt_input():
    with mgpu.using_backend("torch") as backend:
        wanted = trained(backend, 1, X, Y)
        for read in (
                lambda b: b["msk"], lambda b: b.get("msk"), dict,
                lambda b: dict(**b), lambda b: [*b], lambda b: b.pop("msk"),
                lambda b: b | {}, lambda b: b.copy(),
                lambda b: list(b.values())):
            def loss(output, batch, read=read):
                read(batch)
                return loss_of(output, batch)
            for kind in (dict, Batch):
                batch = kind(ids=X, labels=Y, msk=M)
                assert_same(trained(backend, 1, batch, None, loss), wanted)
                assert [*batch] == ["ids", "labels", "msk"]


def test_loaders_of_dicts_train_and_evaluate(backend):
    batches = [{"ids": X[i:j], "mask": M[i:j], "labels": Y[i:j]}
               for i, j in ((0, 4), (4, 7))]
    pairs = [((b["ids"], b["mask"]), b["labels"]) for b in batches]
    found = []
    for data, loss in ((batches, loss_of), (pairs, LOSS)):
        replicas, trainer = start(backend, 2)
        history = mgpu.train(replicas, data, data, loss, trainer, 2,
                             progress=False, prefetch=1)
        found.append((replicas.export_numpy(), history.test_acc,
                      history.loss_per_step))
    assert_same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    x, m = (mgpu.put(a, mgpu.cpu(0)) for a in (X, M))
    one, _ = start(backend, 1)      # and a native network, by name
    assert mgpu.evaluate_accuracy_gpus(one.net, [
        {"ids": x, "mask": m, "label": Y}]) == mgpu.evaluate_accuracy_gpus(
            one, [((X, M), Y)])


def test_a_dict_without_labels_is_not_evaluated(backend):
    replicas, _ = start(backend, 2)
    with pytest.raises(ValueError, match="'labels' or 'label'"):
        mgpu.evaluate_accuracy_gpus(replicas, [{"ids": X, "mask": M}])
    with pytest.raises(ValueError, match="'msk', which is neither"):
        mgpu.evaluate_accuracy_gpus(replicas, [{"ids": X, "msk": M,
                                                "label": Y}])
    with pytest.raises(ValueError, match="'masks', which is neither"):
        replicas.predict({"ids": X, "masks": M})


def test_a_prediction_of_a_dict_is_that_of_its_names(backend, devices):
    replicas, _ = start(backend, len(devices))
    expected = replicas.predict(X) * M
    for batch in ({"ids": X, "mask": M}, {"mask": M, "labels": Y, "ids": X}):
        np.testing.assert_allclose(replicas.predict(batch), expected,
                                   rtol=1e-12)


# -- MXNet's data iterators ---------------------------------------------------

def iterator(how="pad"):
    return mx.io.NDArrayIter({"a": X, "b": M}, Y, 3, last_batch_handle=how)


def test_a_data_iterator_trains_its_rows_once_in_each_epoch():
    pairs = [((X[i:i + 3].astype("float32"), M[i:i + 3].astype("float32")),
              Y[i:i + 3]) for i in (0, 3, 6)]
    with mgpu.using_backend("mxnet"):
        found = []
        for data, prefetch in ((iterator(), 2), (mx.io.PrefetchingIter(
                iterator()), 0), (pairs, 0)):
            replicas = mgpu.initialize(GluonNet(), on(0, 1), "xavier")
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
            history = mgpu.train(replicas, data, data, LOSS, trainer, 3,
                                 progress=False, prefetch=prefetch)
            assert len(history.loss_per_step) == 9
            found.append((replicas.export_numpy(), history.test_acc))
    for values, accuracy in found[:2]:
        assert_all_equal(values, found[2][0])
        assert accuracy == found[2][1]


def test_rows_that_roll_over_are_no_filling():
    from mgpu.data.inputs import as_rounds
    rounds = as_rounds(iterator("roll_over"))
    seen = [row for _ in range(3) for _, y in rounds for row in y.asnumpy()]
    assert seen == [*Y, *Y, *Y]


def test_iterators_that_hide_their_filling_are_refused(tmp_path, backend):
    path = str(tmp_path / "x.csv")
    np.savetxt(path, X, delimiter=",")
    data = mx.io.CSVIter(data_csv=path, data_shape=(4,), batch_size=3)
    replicas, trainer = start(backend, 1)
    with pytest.raises(ValueError, match="each example once"):
        mgpu.train(replicas, data, None, LOSS, trainer, 1, progress=False)
    with pytest.raises(ValueError, match="each example once"):
        mgpu.evaluate_accuracy_gpus(replicas, data)


@pytest.mark.parametrize("name, make, error, words", [
    ("mxnet", lambda: mx.io.NDArrayIter(X, None, 3), ValueError,
     "without labels"),
    ("mxnet", lambda: mx.io.NDArrayIter(X.T, Y, 2, layout="TN"), ValueError,
     "first axis"),
    ("torch", iterator, TypeError, "mxnet")])
def test_other_iterators_are_refused(name, make, error, words):
    with mgpu.using_backend(name) as backend:
        replicas, trainer = start(backend, 1)
        with pytest.raises(error, match=words):
            mgpu.train(replicas, make(), None, LOSS, trainer, 1,
                       progress=False)
