"""Trainings that real MXNet has begun and saved, and how mgpu resumes them.

In lock-step: each step begins with MXNet's own weights and states, so what is
compared is one step, however long the training was.
"""
import functools
from pathlib import Path

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import relative_difference

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


def alike(count=11):
    """Parameters of one shape. From ten on texts are sorted otherwise."""
    from mxnet.gluon import nn
    net = nn.HybridSequential(prefix="alike_")
    with net.name_scope():
        net.add(*(nn.Dense(6, use_bias=False) for _ in range(count)))
    return net


def distinct():
    """No two parameters of one shape."""
    from mxnet.gluon import nn
    net = nn.HybridSequential(prefix="distinct_")
    with net.name_scope():
        net.add(nn.Dense(5, activation="tanh"), nn.Dense(3))
    return net


def in_symbols(net):
    """As a block that reads an exported graph, which trains every array."""
    import mxnet as mx
    x = mx.sym.var("data")
    block = mx.gluon.SymbolBlock(net(x), x)
    for name, p in block.collect_params("^(?!.*weight)").items():
        p.init = mx.init.One()
        if "running" not in name:
            p.grad_req = "write"
    return block


def scaled(symbols):
    """The gamma of the second of two batch norms is taken as 1: Gluon's
    layer freezes it, and a block of symbols has updates of it."""
    from mxnet.gluon import nn
    net = nn.HybridSequential(prefix="scaled_")
    with net.name_scope():
        for scale in (True, False):     # its gamma is the last by name
            net.add(nn.Dense(5, use_bias=False), nn.BatchNorm(
                scale=scale, epsilon=2 ** -10, prefix=f"z{1 - scale}_"),
                nn.Activation("tanh"))
        net.add(nn.Dense(3))
    return in_symbols(net) if symbols else net


def constant():
    """A block of symbols trains what is a constant in Gluon's."""
    import mxnet as mx

    class Net(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__(prefix="net_")
            with self.name_scope():
                self.dense = mx.gluon.nn.Dense(3)
                self.factor = self.params.get_constant(
                    "factor", np.ones((1, 6)))

        def hybrid_forward(self, F, x, factor):
            return self.dense(F.broadcast_mul(x, factor))
    return in_symbols(Net())


NETWORKS = {"small": (small, (8, 2, 6, 6)), "mlp": (mlp, (8, 6)),
            "alike": (alike, (8, 6)),
            "few": (functools.partial(alike, 5), (8, 6)),
            "scaled": (functools.partial(scaled, False), (8, 6)),
            "scaled in symbols": (functools.partial(scaled, True), (8, 6)),
            "constant in symbols": (constant, (8, 6)),
            "distinct": (distinct, (8, 6))}


#: what a trainer is given of the parameters of a network
GIVEN = {
    "sorted": lambda every, net: every,
    "list": lambda every, net: list(every.values()),
    "reversed": lambda every, net: list(every.values())[::-1],
    "head first": lambda every, net: [
        *net[-1].collect_params().values(),
        *(p for block in net._children.values() if block is not net[-1]
          for p in block.collect_params().values())],
    "attributes": lambda every, net: {
        f"{9 - int(name[0])}{name[1:]}": p for name, p in
        net._collect_params_with_prefix().items()}}


#: a decorator of what MXNet does, whatever engine is in use
on_mxnet = mgpu.using_backend("mxnet")


@on_mxnet
def schedule_of(name, *arguments, **options):
    import mxnet as mx
    return getattr(mx.lr_scheduler, name)(*arguments, **options)


class Training:
    """Of Gluon, in float64. `network` is a name of `NETWORKS`, or such a
    pair, whose arrays are all drawn here. Several devices need a network
    without batch norm."""

    @on_mxnet
    def __init__(self, folder, network="small", optimizer="sgd-momentum",
                 given="sorted", part=None, contexts=1, store=None,
                 words=0, name="net", **options):
        import mxnet as mx
        drawn = not isinstance(network, str)
        make, shape = network if drawn else NETWORKS[network]
        rng = np.random.default_rng(0)
        self.x = rng.integers(0, words, shape) if words \
            else rng.normal(size=shape)
        self.y = rng.integers(0, 3, shape[0])
        self.net, self.file = make(), str(folder / name)
        self.net.cast("float64")
        mx.random.seed(0)
        self.contexts = [mx.cpu(i) for i in range(contexts)]
        # what draws is of float32
        self.net.initialize(mx.init.Zero() if drawn else mx.init.Xavier(),
                            ctx=self.contexts)
        self.net.hybridize()
        self.net(self.array(self.x))
        every = self.net.collect_params()
        for name, p in every.items():       # none of them are zero
            if drawn or name.endswith(("bias", "beta")):
                x = rng.normal(size=p.shape)
                p.set_data(self.array(abs(x) + 0.5 if name.endswith(
                    ("var", "gamma")) else x))
        self.list = list(every)
        if part is not None:
            every = self.net[part].collect_params()
        self.trainer = mx.gluon.Trainer(
            GIVEN[given](every, self.net),
            optimizer.partition("-")[0],
            {**OPTIMIZERS[optimizer], **options},
            kvstore=None if contexts == 1 else "device",
            update_on_kvstore=store)
        self.order = [p.name for p in self.trainer._params]
        self.loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        self.trainer._init_kvstore()
        store = self.trainer._kvstore if self.trainer._update_on_kvstore \
            else None
        for updater, context in zip(
                self.trainer._updaters if store is None
                else [store._updater], self.contexts):
            for i, p in enumerate(self.trainer._params):
                # MXNet makes those of some optimizers in float32, and then
                # cannot update a float64 parameter.
                if p.grad_req != "null":
                    updater.states[i] = self.cast(
                        updater.optimizer.create_state(i, p.data(context)))
                    updater.states_synced[i] = True

    def cast(self, state):
        if isinstance(state, (list, tuple)):
            return tuple(map(self.cast, state))
        return None if state is None else state.astype("float64")

    def array(self, x):
        import mxnet as mx
        return (mx.np if mx.util.is_np_array() else mx.nd).array(
            x, dtype="float64")

    @on_mxnet
    def freeze(self, name, grad_req):
        self.net.collect_params()[name].grad_req = grad_req
        self.net(self.array(self.x))

    @on_mxnet
    def step(self, count=1):
        from mxnet import autograd
        for _ in range(count):
            rows = len(self.y) // len(self.contexts)
            with autograd.record():
                losses = []
                for i, context in enumerate(self.contexts):
                    x, y = (self.array(whole[i * rows:(i + 1) * rows])
                            .as_in_context(context)
                            for whole in (self.x, self.y))
                    losses.append(self.loss(self.net(x), y))
            autograd.backward(losses)
            self.trainer.step(len(self.y))

    @on_mxnet
    def save(self):
        self.net.export(self.file)
        self.trainer.save_states(self.file + ".states")
        return [Path(self.file + end) for end in (
            "-symbol.json", "-0000.params", ".states")]

    def requests(self):
        return {p.name: p.grad_req
                for p in self.net.collect_params().values()}

    @on_mxnet
    def values(self):
        return {name: p.list_data()[0].asnumpy()
                for name, p in self.net.collect_params().items()}


def values_of(replicas):
    names = replicas.network.gluon_names()
    return {names[key]: x for key, x in replicas.export_numpy().items()
            if key in names}


def difference(replicas, expected):
    """Of the farthest parameter, by its size."""
    return max(relative_difference(x, expected[name]) for name, x in
               values_of(replicas).items())


def one_step(training, resumed, loss=None):
    mgpu.train_batch(training.x, training.y, resumed.replicas,
                     loss or mgpu.losses.SoftmaxCrossEntropyLoss(),
                     resumed.trainer)


def go_on(files, devices=None, **options):
    """As of a trainer that was given the whole dictionary."""
    return mgpu.resume_from_gluon(*files, devices or [mgpu.cpu(0)],
                                  **{"order": "sorted", **options})


def lock_step(training, steps, devices=None, **options):
    """The largest difference after a step of both from MXNet's files."""
    worst = 0.0
    for _ in range(steps):
        files = training.save()
        training.step()
        resumed = go_on(files, devices, **options)
        one_step(training, resumed)
        worst = max(worst, difference(resumed.replicas, training.values()))
    return worst


@on_mxnet
def at_start(one):
    """A Gluon trainer has no states before its first step."""
    for updater in one.trainer._updaters:
        updater.states.clear()
