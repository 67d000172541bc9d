"""What a user of another framework types first: it works, or the error names
the call to make. What `dir` lists."""
import numpy as np
import pytest

import mgpu
from batches import rows
from conftest import BACKENDS
from helpers import bricks, mlp, on
from mgpu.training import callbacks

X, LABELS = rows(7, dtype="float64"), np.arange(7) % 3
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()
GLUON = pytest.mark.skipif("mxnet" not in BACKENDS, reason="a user of Gluon")


def made(backend, net=None):
    replicas = mgpu.initialize(net or mlp(backend, units=(6, 4, 3)),
                               on(0, 1), "uniform", seed=3, dtype="float64")
    return replicas, mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})


# -- what dir lists -----------------------------------------------------------

def test_dir_lists_what_a_user_calls(backend):
    replicas, trainer = made(backend)
    assert len(dir(replicas)) <= 35 and len(dir(trainer)) <= 25
    for name, thing in (("predict", replicas), ("save", replicas),
                        ("net", replicas), ("step", trainer),
                        ("learning_rate", trainer)):
        assert name in dir(thing)
    for thing in (replicas, trainer):
        assert all(hasattr(thing, name) for name in dir(thing))
        # what the list leaves out exists, and no more is left out
        assert {*type(thing)._internal} <= {*object.__dir__(thing)}
        assert not {*type(thing)._internal} & {*dir(thing)}

    class Own(mgpu.Trainer):
        def warm_up(self):
            ...
    assert "warm_up" in dir(Own(replicas, "sgd", {"learning_rate": 0.5}))


# -- hints --------------------------------------------------------------------

def test_a_keyword_of_another_framework_names_the_right_one(backend):
    replicas, trainer = made(backend)
    before = replicas.export_numpy()
    data = [(X, LABELS)]
    for call, text in (
            (lambda: mgpu.train(replicas, data, None, LOSS, trainer,
                                epochs=3), "train.. has no argument "
             "'epochs'. Use num_epochs"),
            (lambda: mgpu.Trainer(replicas, "adam", lr=0.1),
             r"Trainer\(\) has no argument 'lr'. Use .*'learning_rate'"),
            (lambda: mgpu.Trainer(replicas, "adam", weight_decay=0.1),
             "semantics='torch'"),
            (lambda: mgpu.DataParallel(replicas.net, device_ids=[0, 1]),
             r"'device_ids'. Use devices=mgpu.list_devices\(2\)"),
            (lambda: mgpu.train(replicas, data, None, LOSS, trainer, 1,
                                nonsense=3), "unexpected keyword")):
        with pytest.raises(TypeError, match=text):
            call()
    for name, value in replicas.export_numpy().items():
        np.testing.assert_array_equal(value, before[name])


def test_the_options_that_hints_name_are_taken(backend):
    replicas, _ = made(backend)
    for options in ({"learning_rate": 0.001}, {"lr": 0.001}):
        trainer = mgpu.Trainer(replicas, "adam", options, semantics="torch"
                               if "lr" in options else "gluon")
        assert trainer.learning_rate == 0.001


@pytest.mark.parametrize("name, use", [
    ("fit", "mgpu.train("), ("save", "replicas.save("),
    ("load", "replicas.load("), ("predict", "replicas.predict("),
    ("compile", "hybridize=True")])
def test_a_name_of_another_framework_has_a_hint(name, use):
    assert not hasattr(mgpu, name)
    with pytest.raises(AttributeError) as caught:
        getattr(mgpu, name)
    assert use in str(caught.value)
    with pytest.raises(ImportError) as caught:
        exec(f"from mgpu import {name}")
    assert use in str(caught.value)


def test_a_trainer_of_a_network_names_initialize(backend):
    replicas, _ = made(backend)
    with pytest.raises(TypeError, match="received the network, a .*Call "
                       "replicas = mgpu.initialize"):
        mgpu.Trainer(replicas.net, "sgd", {"learning_rate": 0.5})


# -- saving -------------------------------------------------------------------

def test_an_ending_of_another_format_is_refused(backend, tmp_path):
    replicas, trainer = made(backend)
    for ending in ("pt", "pth", "params", "npz", "PT"):
        with pytest.raises(ValueError, match=r"\.safetensors, or "
                           r"replicas\.save_parameters for Gluon's \.params"):
            replicas.save(tmp_path / f"w.{ending}")
        with pytest.raises(ValueError, match="safetensors"):
            mgpu.train(replicas, [(X, LABELS)], None, LOSS, trainer, 1,
                       callbacks=[callbacks.Checkpoint(
                           tmp_path / f"w.{ending}")])
    assert trainer.num_update == 0 and not [*tmp_path.iterdir()]
    # what the message says works
    replicas.save(tmp_path / "w.safetensors")
    replicas.save_parameters(tmp_path / "w.params")
    before = replicas.export_numpy()
    for load, file in ((replicas.load, "w.safetensors"),
                       (replicas.load_parameters, "w.params")):
        replicas.import_numpy({name: 0 * x for name, x in before.items()})
        load(tmp_path / file)
        for name, value in replicas.export_numpy().items():
            np.testing.assert_array_equal(value, before[name])


# -- predictions of a loader --------------------------------------------------

def loader(backend):
    """The framework's own, with labels."""
    if backend.name == "torch":
        import torch
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(
            torch.from_numpy(X), torch.from_numpy(LABELS)), batch_size=3)
    from mxnet import gluon
    return gluon.data.DataLoader(gluon.data.ArrayDataset(X, LABELS), 3)


def test_the_labels_of_a_loader_are_not_used(backend):
    replicas, _ = made(backend)
    expected = replicas.predict(X)
    parts = [(X[:3], LABELS[:3]), (X[3:], LABELS[3:])]
    for batches in (iter(parts), iter([[x, None] for x, _ in parts]),
                    iter([((x,), y) for x, y in parts]),
                    iter([[x] for x, _ in parts])):
        np.testing.assert_allclose(replicas.predict(batches), expected,
                                   atol=1e-13)
    np.testing.assert_allclose(replicas.predict(loader(backend)), expected,
                               atol=1e-13)


def plain(backend, forward):
    """A network with this forward and a dense layer (6, 2)."""
    base, dense = bricks(backend)
    net = type("Net", (base,), {"forward": forward})()
    net.layer = dense(6, 2)
    return net


def test_two_arrays_are_two_inputs_where_forward_needs_two(backend):
    def forward(self, a, b):
        return self.layer(a) + b
    replicas, _ = made(backend, plain(backend, forward))
    a, b = X, 2 * X[:, :2]
    expected = replicas.predict((a, b))
    for batches in ([(a, b)], [((a, b), LABELS)], [((a, b), None)]):
        np.testing.assert_array_equal(replicas.predict(iter(batches)),
                                      expected)


def test_labels_that_may_be_an_input_are_refused(backend):
    def forward(self, a, b=None):
        return self.layer(a) if b is None else self.layer(a) + b
    replicas, _ = made(backend, plain(backend, forward))
    a, b = X, 2 * X[:, :2]
    with pytest.raises(ValueError, match=r"forward\(.*which may take both. "
                       r"Pass batches \(inputs, None\)"):
        replicas.predict(iter([(a, b)]))
    np.testing.assert_array_equal(replicas.predict(iter([(a, None)])),
                                  replicas.predict(a))
    np.testing.assert_array_equal(replicas.predict(iter([((a, b), None)])),
                                  replicas.predict((a, b)))


# -- initializers in Gluon's own calls ----------------------------------------

@GLUON
@pytest.mark.parametrize("units", [0, 6])
def test_gluon_with_an_initializer_of_mgpu_names_the_call(units):
    """At once, also where Gluon would draw in the first pass."""
    mx = mgpu.mxnet_compat()
    net = mx.gluon.nn.Dense(3, in_units=units)
    for arguments in ([mgpu.initializers.Xavier(), mx.cpu(0)], []):
        with pytest.raises(TypeError, match="got mgpu's Xavier.*Call "
                           "replicas = mgpu.initialize"):
            net.initialize(*arguments, **{} if arguments else {
                "init": mgpu.initializers.Xavier()})
    net.initialize(mx.init.Xavier(), mx.cpu(0))
