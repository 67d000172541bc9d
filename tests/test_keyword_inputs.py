"""Inputs by name, batches that are dicts, and MXNet's data iterators."""
from collections import UserDict

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import relative_difference

if set(BACKENDS) < {"mxnet", "torch"}:
    pytest.skip("they need two engines", allow_module_level=True)

import torch                                        # noqa: E402

mx = mgpu.mxnet_compat()

K = (1, 2, 4)
X = np.random.default_rng(0).normal(size=(7, 4))
M = np.random.default_rng(1).normal(size=(7, 3))
Y = np.arange(7) % 3


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, ids, mask=None, extra=None):
        out = self.layer(ids)
        return out if mask is None else out * mask


class GluonNet(mx.gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.layer = mx.gluon.nn.Dense(3, in_units=4)
            self.scale = self.params.get("scale", shape=(1,), init="one")

    def hybrid_forward(self, F, ids, mask=None, extra=None, scale=None):
        out = F.broadcast_mul(self.layer(ids), scale)
        return out if mask is None else out * mask


class PlainNet(mx.gluon.Block):
    def __init__(self):
        super().__init__()
        self.layer = mx.gluon.nn.Dense(3, in_units=4)

    def forward(self, ids, mask=None, extra=None):
        out = self.layer(ids)
        return out if mask is None else out * mask


def by_names(backend, forward):
    """A network whose forward is `forward`, after ``self.layer`` of a Dense
    layer."""
    base = PlainNet if backend.name == "mxnet" else TorchNet
    return type("Net", (base,), {"forward": forward})()


def start(backend, k, net=None, **options):
    if net is None:
        net = TorchNet() if backend.name == "torch" else GluonNet()
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)],
                               init="xavier", dtype="float64", **options)
    return replicas, mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})


LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def loss_of(output, batch):
    return LOSS(output, batch["labels"])


def trained(backend, k, X, y, loss=LOSS, **options):
    """The values after two steps on a batch."""
    replicas, trainer = start(backend, k, **options)
    for _ in range(2):
        mgpu.train_batch(X, y, replicas, loss, trainer)
    return replicas.export_numpy()


def same(a, b):
    return a.keys() == b.keys() and all(
        relative_difference(a[name], b[name]) < 1e-12 for name in a)


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


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("k", K)
def test_names_give_the_numbers_of_places(backend, k, form):
    assert same(trained(backend, k, *FORMS[form]),
                trained(backend, 1, (X, M), Y))


def test_a_block_with_a_forward_of_its_own_takes_names():
    with mgpu.using_backend("mxnet") as backend:
        values = [trained(backend, 2, batch, Y, net=PlainNet())
                  for batch in (mgpu.Kwargs(mask=M, ids=X), (X, M))]
    assert same(*values)


def test_a_hybridized_block_takes_names(backend):
    if backend.name == "mxnet":
        assert same(trained(backend, 2, mgpu.Kwargs(mask=M, ids=X), Y,
                            hybridize=True), trained(backend, 1, (X, M), Y))


def test_strict_devices_and_a_sample_by_name(backend):
    with mgpu.strict_devices():
        replicas, trainer = start(backend, 2, sample=mgpu.Kwargs(
            ids=X, mask=M))
        mgpu.train_batch(*FORMS[0][:2], replicas, LOSS, trainer)


def test_plain_calls_take_names(backend):
    replicas, _ = start(backend, 2)
    xs = mgpu.split_and_load(X, replicas.devices, even_split=False)
    ms = mgpu.split_and_load(M, replicas.devices, even_split=False)
    expected = [mgpu.to_numpy(out) for out in replicas(xs, ms)]
    every = [replicas(ids=xs, mask=ms), replicas(xs, mask=ms),
             replicas([mgpu.Kwargs(ids=x, mask=m)
                       for x, m in zip(xs, ms, strict=True)]),
             [replicas[i](ids=xs[i], mask=ms[i]) for i in range(2)],
             [replicas[i](xs[i], mgpu.Kwargs(mask=ms[i])) for i in range(2)]]
    for found in every:
        for a, b in zip(found, expected, strict=True):
            assert mgpu.to_numpy(a).tobytes() == b.tobytes()
    none, = {x is None for x in replicas(ids=[xs[0], None],
                                         mask=[ms[0], None])[1:]}
    assert none
    with pytest.raises(TypeError, match="parameters of the network's forward"):
        replicas[0](ids=xs[0], maske=ms[0])
    with pytest.raises(TypeError, match="come last"):
        replicas[0](mgpu.Kwargs(mask=ms[0]), xs[0])
    with pytest.raises(TypeError, match="one shard per device"):
        replicas(ids=xs[0])
    for option in ((2.0, 3.0), [2, 3], [True, False], ("a", "b")):
        with pytest.raises(TypeError, match="one option for all"):
            replicas(xs, mask=option)
    with pytest.raises(ValueError, match="2 replicas take 2 shards"):
        replicas(ids=xs[:1])


def test_a_dict_is_named_where_forward_takes_names_only():
    class Only(TorchNet):
        def forward(self, *, ids, mask):
            return super().forward(ids, mask)

    class Dict(TorchNet):
        def forward(self, batch):
            return super().forward(batch["ids"], batch["mask"])
    with mgpu.using_backend("torch") as backend:
        expected = trained(backend, 1, (X, M), Y)
        for net in (Only(), Dict()):
            assert same(expected, trained(
                backend, 2, {"ids": X, "mask": M}, Y, net=net))
            score = mgpu.evaluate_accuracy_gpus(
                net, [({"ids": X, "mask": M}, Y)], devices=[mgpu.cpu(0)])
            assert score == mgpu.evaluate_accuracy_gpus(
                net, [{"ids": X, "mask": M, "label": Y}])
        assert same(expected, trained(
            backend, 2, {"ids": X, "mask": M, "labels": Y}, None, loss_of,
            net=Dict()))


def test_sync_batch_norm_takes_names():
    class Normed(TorchNet):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)

        def forward(self, ids, mask=None):
            return self.norm(super().forward(ids, mask))
    with mgpu.using_backend("torch") as backend:
        values = [trained(backend, k, mgpu.Kwargs(ids=X, mask=M), Y,
                          net=Normed(), batch_norm="sync") for k in (1, 3)]
    assert same(*values)


def test_gluon_takes_no_names_that_have_no_place():
    with mgpu.using_backend("mxnet") as backend:
        for forward in (lambda self, ids, *, mask: self.layer(ids),
                        lambda self, ids, **rest: self.layer(ids)):
            replicas, trainer = start(backend, 1, by_names(backend, forward))
            with pytest.raises(TypeError, match="Gluon calls a Block"):
                mgpu.train_batch(mgpu.Kwargs(ids=X, mask=M), Y, replicas,
                                 LOSS, trainer)


@pytest.mark.parametrize("batch, words", [
    ({"ids": X, "labels": Y, "msk": M}, "received 'msk', which nobody reads"),
    ({"labels": Y, "mask": M}, "could be both"),
    ({"ids": X, "labels": Y, "mask": M[:5]}, "equally many rows")])
def test_a_dict_that_does_not_fit_is_refused(backend, batch, words):
    replicas, trainer = start(backend, 2)
    before = replicas.export_numpy()
    with pytest.raises((ValueError, TypeError), match=words):
        mgpu.train_batch(batch, None, replicas, loss_of, trainer)
    assert all((x == before[name]).all()
               for name, x in replicas.export_numpy().items())


def test_names_that_miss_are_refused(backend):
    def forward(self, ids, mask, extra=None):
        return self.layer(ids) * mask
    replicas, trainer = start(backend, 1, by_names(backend, forward))
    with pytest.raises(ValueError, match="without 'mask'"):
        mgpu.train_batch({"ids": X, "labels": Y}, None, replicas, loss_of,
                         trainer)


@pytest.mark.parametrize("read", [
    lambda b: b["msk"], lambda b: b.get("msk"), lambda b: dict(**b),
    lambda b: dict(b), lambda b: list(b.items()), lambda b: [*b],
    lambda b: b.pop("msk"), lambda b: b | {}, lambda b: b.copy(),
    lambda b: list(b.values())])
@pytest.mark.parametrize("kind", (dict, Batch))
def test_what_the_loss_reads_is_no_misspelt_input(read, kind):
    with mgpu.using_backend("torch") as backend:
        replicas, trainer = start(backend, 2)

        def loss(output, batch):
            read(batch)
            return loss_of(output, batch)
        batch = kind(ids=X, labels=Y, msk=M)
        mgpu.train_batch(batch, None, replicas, loss, trainer)
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
    assert same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    with pytest.raises(ValueError, match="'labels' or 'label'"):
        mgpu.evaluate_accuracy_gpus(replicas, [{"ids": X, "mask": M}])
    with pytest.raises(ValueError, match="'msk', which nobody reads"):
        mgpu.evaluate_accuracy_gpus(replicas, [{"ids": X, "msk": M,
                                                "label": Y}])


def test_a_native_network_is_evaluated_by_name(backend):
    replicas, _ = start(backend, 1)
    x, m = (mgpu.put(a, mgpu.cpu(0)) for a in (X, M))
    assert mgpu.evaluate_accuracy_gpus(replicas.net, [
        {"ids": x, "mask": m, "label": Y}]) == mgpu.evaluate_accuracy_gpus(
            replicas, [((X, M), Y)])


# -- MXNet's data iterators ---------------------------------------------------

def iterator(how="pad", rows=7, **options):
    return mx.io.NDArrayIter({"a": X[:rows], "b": M[:rows]}, Y[:rows], 3,
                             last_batch_handle=how, **options)


def in_pairs(data):
    return [((a.asnumpy(), b.asnumpy()), y.asnumpy()) for (a, b), y in data]


@pytest.mark.parametrize("prefetch", (0, 2))
def test_a_data_iterator_trains_its_rows_once_in_each_epoch(prefetch):
    with mgpu.using_backend("mxnet") as backend:
        found = []
        pairs = [((X[i:i + 3], M[i:i + 3]), Y[i:i + 3]) for i in (0, 3, 6)]
        for data in (iterator(), mx.io.PrefetchingIter(iterator()), pairs):
            replicas, trainer = start(backend, 2, net=GluonNet())
            replicas.net.cast("float32")
            replicas = mgpu.initialize(replicas.net, replicas.devices,
                                       init="xavier", force_reinit=True)
            if data is pairs:
                data = [(tuple(x.astype("float32") for x in xs), y)
                        for xs, y in pairs]
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
            history = mgpu.train(replicas, data, data, LOSS, trainer, 3,
                                 progress=False, prefetch=prefetch)
            assert len(history.loss_per_step) == 9
            found.append((replicas.export_numpy(), history.test_acc))
    for values, accuracy in found:
        assert all((x == found[-1][0][name]).all()
                   for name, x in values.items())
        assert accuracy == found[-1][1]


def test_rows_that_roll_over_are_no_filling():
    from mgpu.inputs import as_rounds
    rounds = as_rounds(iterator("roll_over"))
    seen = [row for _ in range(3) for _, y in in_pairs(rounds) for row in y]
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


def test_other_iterators_are_refused():
    with mgpu.using_backend("mxnet") as backend:
        replicas, trainer = start(backend, 1)

        def train(data):
            mgpu.train(replicas, data, None, LOSS, trainer, 1, progress=False)
        with pytest.raises(ValueError, match="without labels"):
            train(mx.io.NDArrayIter(X, None, 3))
        with pytest.raises(ValueError, match="first axis"):
            train(mx.io.NDArrayIter(X.T, Y, 2, layout="TN"))
    with mgpu.using_backend("torch") as backend:
        replicas, trainer = start(backend, 1)
        with pytest.raises(TypeError, match="mxnet"):
            train(iterator())


@pytest.mark.parametrize("k", K)
def test_a_prediction_of_a_dict_is_that_of_its_names(backend, k):
    replicas, _ = start(backend, k)
    expected = replicas.predict(X) * M
    for batch in ({"ids": X, "mask": M}, {"mask": M, "labels": Y, "ids": X}):
        assert relative_difference(replicas.predict(batch), expected) < 1e-12
    with pytest.raises(ValueError, match="'masks', which nobody"):
        replicas.predict({"ids": X, "masks": M})
