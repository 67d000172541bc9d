"""What Gluon spells in its own way, and its plain loop on one device."""
import os
import sys
import tempfile
from functools import partial

import mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn

from .networks import network
from .programs import WIDTH, WORDS, Network, Program

SELF = sys.modules[__name__]
Module, semantics = gluon.Block, "gluon"


def dense():
    return [nn.Dense(WIDTH, "tanh", in_units=WIDTH)]


def recurrent(kind):
    return [kind(WIDTH, layout="NTC", input_size=2)]


#: the others are `dense`
LEAVES = {
    "layer_norm": lambda: [nn.LayerNorm(in_channels=WIDTH)],
    "batch_norm": lambda: [nn.BatchNorm(momentum=0.75, in_channels=WIDTH)],
    "frozen_norm": lambda: [nn.BatchNorm(
        in_channels=WIDTH, use_global_stats=True,
        running_mean_initializer=mx.init.Constant(0.5),
        running_variance_initializer=mx.init.Constant(2))],
    "conv": lambda: [nn.Conv1D(2, 3, 2, padding=1, in_channels=1),
                     nn.GroupNorm(1)],
    "dropout": lambda: [nn.Dropout(0.5)],
    "embedding": lambda: [nn.Embedding(WORDS, WIDTH)],
    "sparse": lambda: [nn.Embedding(WORDS, WIDTH, sparse_grad=True)],
    "rnn": partial(recurrent, rnn.RNN), "gru": partial(recurrent, rnn.GRU),
    "lstm": partial(recurrent, rnn.LSTM)}


def head():
    return nn.Dense(WIDTH, in_units=WIDTH)


def add(block, name, layer):
    block.register_child(layer, name)


def children(block):
    return list(block._children.values())


def host(x):
    return x.asnumpy()


def array(x, like=None):
    return nd.array(x, mx.cpu(0), x.dtype if like is None else like.dtype)


def take(x, rows):
    return nd.take(x, nd.array(rows, x.ctx, "int32"))


def join(parts):
    return nd.concat(*parts, dim=0)


def ready(net, dtype):
    net.initialize(ctx=mx.cpu(0))
    net.cast(dtype)
    return net


def _all(net):
    return net._collect_params_with_prefix()


def freeze(p, adds, frozen=True):
    p.grad_req = "null" if frozen else "add" if adds else "write"


def add_hooks(kind, layer):
    """Gluon ignores what a hook returns, and parameters have none."""


def is_training(layer):
    return autograd.is_training()


def statistics(net):
    return {name for name in _all(net) if "running_" in name}


def parameters(net):
    found, buffers = _all(net), statistics(net)
    return list({id(p): p for name, p in found.items()
                 if name not in buffers}.values())


def export(net):
    return {name: p.data(mx.cpu(0)).asnumpy() for name, p in _all(net).items()}


def load(net, new):
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "net.params")
        nd.save(file, {name: array(x) for name, x in new.items()})
        net.load_parameters(file)


def edit(p, way, new):
    """Give the user's own parameter other values, in one of several ways."""
    x, new = p.data(mx.cpu(0)), array(new.astype(p.dtype))
    if way == "gluon":
        p.set_data(new)
    elif way == "in place":
        x *= 0.5
    elif way == "part":
        x[:1] = 0.5
    else:
        x[:] = new


def clip(parameters, max_norm):
    found = [p.grad(mx.cpu(0)) for p in parameters if p.grad_req != "null"]
    # Gluon's clip_global_norm fails with float64; this is its formula.
    norm = sum((host(g) ** 2).sum() for g in found) ** 0.5
    for g in found:
        g *= min(1.0, max_norm / (norm + 1e-8))


def own_step(parameters, n):
    """The user's own trainer, after a backward pass of `n` rows."""
    gluon.Trainer(parameters, "sgd", {"learning_rate": 0.125}).step(n)


def optimizer(config: Network, parameters):
    """An optimizer of `config`; its schedule is inside of it."""
    options = dict(config.options)
    if config.schedule:
        options["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(
            *config.schedule, base_lr=options["learning_rate"])
    return mx.optimizer.create(config.optimizer, **options), []


def set_rate(optimizer, rate):
    optimizer.set_learning_rate(rate)


class Reference:
    """The loop without mgpu. A gradient of an earlier batch is not applied,
    as Gluon itself would."""

    def __init__(self, program: Program, number: int):
        self.config = program.networks[number]
        self.net = network(SELF, program, number)
        for p in parameters(self.net):
            if p.grad_req != "null":
                freeze(p, self.config.adds, False)
        self.trainers = [
            gluon.Trainer(some, optimizer(self.config, some)[0], kvstore=None)
            for some in self.config.split(parameters(self.net))]
        self.loss = getattr(gluon.loss, program.loss)()

    def trained(self):
        return [p for trainer in self.trainers for p in trainer._params
                if p.grad_req != "null"]

    def forward(self, data):
        with autograd.train_mode():
            return self.net(*map(array, data))

    def backward(self, data, y, other=None):
        if not self.config.adds:
            self.zero_grad()
        with autograd.record():
            x, *words = map(array, data)
            out = self.net(x, *words)
            if other is not None:
                out = other.net(out + x, *words)
            losses = self.loss(out, array(y))
        losses.backward()
        return losses.asnumpy()

    def zero_grad(self):
        for p in parameters(self.net):
            if p.grad_req != "null":
                p.zero_grad()
                p.data()._fresh_grad = False

    def predict(self, data):
        return self.net(*map(array, data)).asnumpy()

    def gradients(self):
        """Those that a backward pass has reached, and whether all were."""
        trained = self.trained()
        found = [p.grad() for p in trained if p.data()._fresh_grad]
        return found, len(found) == len(trained)

    def step(self, n):
        """On the gradients of a sum over `n` rows."""
        if self.config.trainer != "object":
            for g in self.gradients()[0]:
                g /= n      # by itself: Gluon's rescale_grad is a float32
            n = 1
        for trainer in self.trainers:
            # Gluon itself takes the rate of the step before for parameters
            # that have had fewer updates and come before the others.
            trainer.optimizer.num_update += 1
            trainer.step(n, ignore_stale_grad=True)

    def set_rate(self, rate):
        for trainer in self.trainers:
            trainer.set_learning_rate(rate)

    def save(self):
        states = []
        for trainer in self.trainers:
            with tempfile.NamedTemporaryFile() as file:
                trainer.save_states(file.name)
                states.append(file.read())
        return export(self.net), states

    def restore(self, saved):
        load(self.net, saved[0])
        for trainer, states in zip(self.trainers, saved[1]):
            with tempfile.NamedTemporaryFile() as file:
                file.write(states)
                file.flush()
                trainer.load_states(file.name)
