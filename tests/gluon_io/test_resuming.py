"""Trainings that real MXNet has begun and saved, and how mgpu goes on.

In lock-step: each step begins with MXNet's own weights and states, so what is
compared is one step, however long the training was.
"""
import json
import subprocess
import sys

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import relative_difference
from mgpu.gluon_io import load_params, load_trainer_states

from .mutations import FILES

live = pytest.mark.skipif(set(BACKENDS) < {"mxnet", "torch"},
                          reason="these compare two engines")

#: dyadic numbers, which MXNet's float32 options hold
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.125, "wd": 2 ** -6},
    "sgd-momentum": {"learning_rate": 0.125, "momentum": 0.5, "wd": 2 ** -6,
                     "clip_gradient": 2 ** -5},
    "nag": {"learning_rate": 0.125, "momentum": 0.5, "wd": 2 ** -6},
    # the bias correction of adam reaches its kernel as float32
    "adam": {"learning_rate": 2 ** -12, "beta1": 0.5, "beta2": 0.75,
             "epsilon": 2 ** -10, "wd": 2 ** -6},
    "adamax": {"learning_rate": 2 ** -8},
    "nadam": {"learning_rate": 2 ** -6, "wd": 2 ** -6},
    "rmsprop": {"learning_rate": 2 ** -8, "gamma1": 0.75,
                "epsilon": 2 ** -10},
    "rmsprop-centered": {"learning_rate": 2 ** -8, "gamma1": 0.75,
                         "gamma2": 0.5, "epsilon": 2 ** -10,
                         "centered": True},
    "adagrad": {"learning_rate": 2 ** -6, "eps": 2 ** -10, "wd": 2 ** -6},
    "adadelta": {"epsilon": 2 ** -10, "wd": 2 ** -6},
    "ftrl": {"learning_rate": 2 ** -4, "lamda1": 2 ** -10},
    "signum": {"learning_rate": 2 ** -8, "momentum": 0.5, "wd_lh": 2 ** -6},
}


def small():
    from mxnet.gluon import nn
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, use_bias=False), nn.BatchNorm(epsilon=2 ** -10),
            nn.Activation("tanh"), nn.Dense(5, activation="tanh"),
            nn.Dense(3))
    net[4].weight.lr_mult, net[3].bias.wd_mult = 0.5, 2.0
    return net


def mlp():
    """Names whose order as texts is not that of the layers."""
    from mxnet.gluon import nn
    net = nn.HybridSequential(prefix="mlp_")
    with net.name_scope():
        for _ in range(10):
            net.add(nn.Dense(4, activation="tanh"))
        net.add(nn.Dense(3))
    return net


def resnet18():
    from mxnet.gluon.model_zoo import vision
    return vision.resnet18_v1(classes=3, thumbnail=True)


NETWORKS = {"small": (small, (8, 2, 6, 6)), "mlp": (mlp, (8, 6)),
            "resnet18": (resnet18, (2, 3, 32, 32))}


class Training:
    """Of Gluon, in float64, on one device."""

    def __init__(self, folder, network="small", optimizer="sgd-momentum",
                 sorted_names=True, **options):
        import mxnet as mx
        make, shape = NETWORKS[network]
        rng = np.random.default_rng(0)
        self.x, self.y = rng.normal(size=shape), rng.integers(0, 3, shape[0])
        self.net, self.folder = make(), folder
        self.net.cast("float64")
        mx.random.seed(0)
        self.net.initialize(mx.init.Xavier())
        self.net.hybridize()
        self.net(self.array(self.x))
        every = self.net.collect_params()
        self.list = list(every)
        self.trainer = mx.gluon.Trainer(
            every if sorted_names else list(every.values()),
            optimizer.partition("-")[0],
            {**OPTIMIZERS[optimizer], **options}, kvstore=None)
        self.loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def array(self, x):
        import mxnet as mx
        return mx.nd.array(x, dtype="float64")

    def step(self, count=1):
        from mxnet import autograd
        for _ in range(count):
            with autograd.record():
                loss = self.loss(self.net(self.array(self.x)),
                                 self.array(self.y))
            loss.backward()
            self.trainer.step(len(self.y))

    def save(self):
        self.net.export(str(self.folder / "net"))
        self.trainer.save_states(str(self.folder / "net.states"))
        return [self.folder / name for name in (
            "net-symbol.json", "net-0000.params", "net.states")]

    def values(self):
        return {name: p.data().asnumpy()
                for name, p in self.net.collect_params().items()}


@pytest.fixture
def training(tmp_path):
    def make(*arguments, **options):
        with mgpu.using_backend("mxnet"):
            return Training(tmp_path, *arguments, **options)
    return make


def values_of(replicas):
    names = replicas.network.gluon_names()
    return {names[key]: x for key, x in replicas.export_numpy().items()
            if key in names}


def difference(replicas, expected):
    """Of the farthest parameter, by its size."""
    return max(relative_difference(x, expected[name]) for name, x in
               values_of(replicas).items())


def one_step(training, resumed):
    mgpu.train_batch(training.x, training.y, resumed.replicas,
                     mgpu.losses.SoftmaxCrossEntropyLoss(), resumed.trainer)


def lock_step(training, steps, devices, **options):
    """The largest difference after a step of both from MXNet's files."""
    worst = 0.0
    for _ in range(steps):
        with mgpu.using_backend("mxnet"):
            files = training.save()
            training.step()
            expected = training.values()
        with mgpu.using_backend("torch"):
            resumed = mgpu.resume_from_gluon(*files, devices, **options)
            one_step(training, resumed)
            worst = max(worst, difference(resumed.replicas, expected))
    return worst


@live
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on(training, optimizer):
    one = training("small", optimizer)
    with mgpu.using_backend("mxnet"):
        one.step(3)
    assert lock_step(one, 3, [mgpu.cpu(0)]) < 1e-10


@live
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adam", "nadam"])
def test_on_devices(training, devices, optimizer):
    one = training("small", optimizer)
    with mgpu.using_backend("mxnet"):
        one.step(3)
    assert lock_step(one, 2, devices, batch_norm="sync") < 1e-10


@live
@pytest.mark.parametrize("network", ["resnet18", "mlp"])
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adam"])
def test_twenty_steps_and_twenty_more(training, network, optimizer):
    one = training(network, optimizer)
    with mgpu.using_backend("mxnet"):
        one.step(20)
    assert lock_step(one, 20, [mgpu.cpu(0)]) < 1e-10


@live
def test_it_goes_on_alone(training, tmp_path):
    """Several steps after one another, and its own files of states."""
    one = training("small", "nadam")
    with mgpu.using_backend("mxnet"):
        one.step(3)
        files = one.save()
        one.step(4)
        expected = one.values()
    with mgpu.using_backend("torch"):
        resumed = mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
        for _ in range(4):
            one_step(one, resumed)
        assert difference(resumed.replicas, expected) < 1e-9
        assert resumed.trainer.num_update == 7


@live
def test_on_mxnet_itself(training):
    one = training("small", "adam")
    with mgpu.using_backend("mxnet"):
        one.step(3)
        resumed = mgpu.resume_from_gluon(*one.save(), [mgpu.cpu(0)])
        one.step()
        one_step(one, resumed)
        assert difference(resumed.replicas, one.values()) < 1e-10


@live
@pytest.mark.parametrize("options", [
    {"learning_rate": 0.25}, {}], ids=["given", "own"])
@pytest.mark.parametrize("name, arguments", [
    ("FactorScheduler", {"step": 2, "factor": 0.5}),
    ("FactorScheduler", {"step": 1, "factor": 0.5, "warmup_steps": 6}),
    ("MultiFactorScheduler", {"step": [1, 4], "factor": 0.5}),
    ("PolyScheduler", {"max_update": 8, "warmup_steps": 2}),
    ("PolyScheduler", {"max_update": 2, "final_lr": 2 ** -6}),
    ("CosineScheduler", {"max_update": 8, "final_lr": 2 ** -6})])
def test_schedules_go_on(training, name, arguments, options):
    """Their rates; weights where MXNet's float32 holds them."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        schedule = getattr(mx.lr_scheduler, name)(base_lr=0.5, **arguments)
    one = training("small", "sgd", lr_scheduler=schedule,
                   **{"learning_rate": None, **options})
    with mgpu.using_backend("mxnet"):
        one.step(3)
        files = one.save()
        expected = [schedule(n) for n in range(4, 12)]
    with mgpu.using_backend("torch"):
        trainer = mgpu.resume_from_gluon(*files, [mgpu.cpu(0)]).trainer
        assert [trainer.rate(n) for n in range(4, 12)] == expected


# -- what the files do not say ------------------------------------------------

@live
def test_a_list_is_refused_or_given(training):
    """Where a trainer has the parameters as they are made, not sorted."""
    one = training("small", sorted_names=False)
    with mgpu.using_backend("mxnet"):
        one.step(3)
        files = one.save()
    with mgpu.using_backend("torch"), pytest.raises(
            ValueError, match="do not fit the sorted names: number"):
        mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
    assert lock_step(one, 1, [mgpu.cpu(0)], order=one.list) < 1e-10


@live
def test_another_order_is_another_training(training):
    """Two parameters of one shape that are exchanged: the proof above sees
    it."""
    one = training("mlp")
    with mgpu.using_backend("mxnet"):
        one.step(3)
    order = sorted(one.list)
    a, b = order.index("mlp_dense2_weight"), order.index("mlp_dense7_weight")
    order[a], order[b] = order[b], order[a]
    assert lock_step(one, 1, [mgpu.cpu(0)], order=order) > 1e-6


@live
def test_shapes_that_do_not_decide_are_refused(training, monkeypatch):
    def alike():
        from mxnet.gluon import nn
        net = nn.HybridSequential(prefix="alike_")
        with net.name_scope():
            net.add(*(nn.Dense(6, use_bias=False) for _ in range(11)))
        return net
    monkeypatch.setitem(NETWORKS, "alike", (alike, (8, 6)))
    one = training("alike")
    with mgpu.using_backend("mxnet"):
        one.step(2)
        files = one.save()
    with mgpu.using_backend("torch"):
        with pytest.raises(ValueError, match="shapes do not decide"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
        with pytest.raises(ValueError, match="order= without .'alike_dense9"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)],
                                   order=sorted(one.list)[:-1])
    assert lock_step(one, 1, [mgpu.cpu(0)], order=sorted(one.list)) < 1e-10


@live
def test_frozen_parameters_and_multipliers(training):
    one = training("small")
    with mgpu.using_backend("mxnet"):
        frozen = one.list[0]
        one.net.collect_params()[frozen].grad_req = "null"
        one.step(3)
        files = one.save()
    with mgpu.using_backend("torch"):
        replicas, trainer, notes = mgpu.resume_from_gluon(*files,
                                                          [mgpu.cpu(0)])
        names = replicas.network.gluon_names()
        assert [names[p.name] for p in replicas.params()
                if p.grad_req == "null"] == [frozen]
        assert [x for x in notes if "so they are frozen" in x]
        assert [x for x in notes if "lr_mult as in the graph" in x]
        assert [x for x in notes if "running statistics are those" in x]
        assert set(trainer.lr_mult.values()) == {1.0, 0.5}
        again = mgpu.resume_from_gluon(
            *files, [mgpu.cpu(0)], grad_req={frozen: "write"},
            lr_mult={frozen: 0.25})
        assert all(p.grad_req == "write" for p in again.replicas.params())
        assert set(again.trainer.lr_mult.values()) == {1.0, 0.5, 0.25}
    assert lock_step(one, 1, [mgpu.cpu(0)]) < 1e-10


@live
def test_options_that_float32_does_not_hold_are_reported(training):
    one = training("small", learning_rate=0.1)
    with mgpu.using_backend("mxnet"):
        one.step(3)
        files = one.save()
    with mgpu.using_backend("torch"):
        notes = mgpu.resume_from_gluon(*files, [mgpu.cpu(0)]).notes
        assert [x for x in notes if "learning_rate=0.1 by 1.5e-08" in x]
    assert 1e-12 < lock_step(one, 1, [mgpu.cpu(0)]) < 1e-7


# -- a Module's ---------------------------------------------------------------

def module(mx, folder, stores):
    """A checkpoint of the symbol API after 3 steps, and a step more. The
    names of its weights, batches, and values then."""
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, name="fc1")
    x = mx.sym.Activation(x, act_type="tanh")
    x = mx.sym.FullyConnected(x, num_hidden=3, name="fc2")
    x = mx.sym.SoftmaxOutput(x, name="softmax")
    rng = np.random.default_rng(0)
    data, label = rng.normal(size=(8, 4)), rng.integers(0, 3, 8)
    batch = mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(label)])
    mod = mx.mod.Module(x, context=[mx.cpu(0), mx.cpu(1)])
    mod.bind([("data", (8, 4))], [("softmax_label", (8,))])
    mx.random.seed(0)
    mod.init_params(mx.init.Xavier())
    mod.init_optimizer(stores, "sgd", {"learning_rate": 0.125,
                                       "momentum": 0.5, "wd": 2 ** -6})
    for i in range(4):
        if i == 3:
            mod.save_checkpoint(str(folder / "net"), 10,
                                save_optimizer_states=True)
            predicted = mod.predict(mx.io.NDArrayIter(data, batch_size=8))
        mod.forward_backward(batch)
        mod.update()
    values = {name: x.asnumpy() for name, x in mod.get_params()[0].items()}
    return data, label, values, predicted.asnumpy(), [
        folder / name for name in ("net-symbol.json", "net-0010.params",
                                   "net-0010.states")]


@live
@pytest.mark.parametrize("engine", ["torch", "mxnet"])
@pytest.mark.parametrize("stores", [None, "local"])
def test_a_module_goes_on(tmp_path, engine, stores):
    """It trains in float32. Its end predicts, or gives what enters it."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        data, label, expected, predicted, files = module(mx, tmp_path, stores)
    with mgpu.using_backend(engine):
        net = mgpu.from_gluon(*files[:2])
        view = mgpu.initialize(net, [mgpu.cpu(0)])
        found = mgpu.to_numpy(view[0](mgpu.put(np.float32(data), mgpu.cpu(0))))
        assert relative_difference(found, predicted) < 1e-6
        with pytest.raises(ValueError, match="without an optimiser"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
        resumed = mgpu.resume_from_gluon(
            *files, [mgpu.cpu(0)], optimizer="sgd", optimizer_params={
                "learning_rate": 0.125, "momentum": 0.5, "wd": 2 ** -6,
                "begin_num_update": 3})
        mgpu.train_batch(np.float32(data), label, resumed.replicas,
                         mgpu.losses.SoftmaxCrossEntropyLoss(),
                         resumed.trainer)
        assert resumed.trainer.num_update == 4
        assert difference(resumed.replicas, expected) < 1e-6
