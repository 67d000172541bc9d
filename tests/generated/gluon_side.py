"""What Gluon spells in its own way, and its plain loop on one device."""
import os
import sys
import tempfile
from functools import partial

import mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn

from .cases import CLASSES, WIDTH, WORDS, Case
from .networks import dropouts, network

SELF = sys.modules[__name__]
Module, Dropout, semantics = gluon.Block, nn.Dropout, "gluon"


def dense():
    return [nn.Dense(WIDTH, "tanh", in_units=WIDTH)]


def recurrent(kind):
    return [kind(WIDTH, layout="NTC", input_size=2)]


LEAVES = {
    "dense": dense, "frozen": dense,
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
    return nn.Dense(CLASSES, in_units=WIDTH)


def add(block, name, layer):
    block.register_child(layer, name)


def children(block):
    return list(block._children.values())


def host(x):
    return x.asnumpy()


def take(x, rows):
    return nd.take(x, nd.array(rows, x.ctx, "int32"))


def join(parts):
    return nd.concat(*parts, dim=0)


def ready(net, dtype):
    net.initialize(ctx=mx.cpu(0))
    net.cast(dtype)
    return net


def _array(x):
    return nd.array(x, mx.cpu(0), x.dtype)


def _all(net):
    return net._collect_params_with_prefix()


def freeze(p, case, frozen=True):
    p.grad_req = "null" if frozen else "add" if case.adds else "write"


def is_training(layer):
    return autograd.is_training()


def place(x):
    return x.ctx.device_id


def places(replicas):
    """Where a key of `watch_dropout` is: (path, number of the replica)."""
    return {(id(layer), device.index): (path, i)
            for i, device in enumerate(replicas.devices)
            for path, layer in dropouts(SELF, replicas.net)}


def statistics(net):
    return {name for name in _all(net) if "running_" in name}


def parameters(net):
    found, buffers = _all(net), statistics(net)
    return list({id(p): p for name, p in found.items()
                 if name not in buffers}.values())


def values(net):
    return {name: p.data(mx.cpu(0)).asnumpy() for name, p in _all(net).items()}


def load(net, new):
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "net.params")
        nd.save(file, {name: _array(x) for name, x in new.items()})
        net.load_parameters(file)


def edit(p, way, new):
    """Give the user's own parameter other values, in one of several ways."""
    x, new = p.data(mx.cpu(0)), _array(new.astype(p.dtype))
    if way == "gluon":
        p.set_data(new)
    elif way == "in place":
        x *= 0.5
    elif way == "part":
        x[:1] = 0.5
    else:
        x[:] = new


def clip(net, max_norm):
    """The user's habit, on the user's own parameters."""
    found = [p.grad(mx.cpu(0)) for p in parameters(net)
             if p.grad_req != "null"]
    # Gluon's clip_global_norm fails with float64; this is its formula.
    norm = sum((host(g) ** 2).sum() for g in found) ** 0.5
    for g in found:
        g *= min(1.0, max_norm / (norm + 1e-8))


class Plain:
    """The loop without mgpu. Dropout layers take the masks that mgpu drew. A
    gradient of an earlier batch is not applied, as Gluon itself would."""

    def __init__(self, case: Case):
        self.case, self.net, self.masks = case, network(SELF, case), {}
        for path, layer in dropouts(SELF, self.net):
            layer.forward = lambda h, path=path: h * _array(
                self.masks[path].astype(h.dtype)) \
                if autograd.is_training() else h
        for p in self._trained():
            p.grad_req = "add" if case.adds else "write"
        options = dict(case.options)
        if case.schedule:
            options["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(
                *case.schedule, base_lr=options["learning_rate"])
        self.trainer = gluon.Trainer(self.net.collect_params(),
                                     case.optimizer, options, kvstore=None)
        self.loss = getattr(gluon.loss, case.loss)()

    def _trained(self):
        return [p for p in parameters(self.net) if p.grad_req != "null"]

    def backward(self, data, y):
        if not self.case.adds:
            self.zero_grad()
        with autograd.record():
            losses = self.loss(self.net(*map(_array, data)), _array(y))
        losses.backward()
        return losses.asnumpy()

    def zero_grad(self):
        for p in self._trained():
            p.zero_grad()
            p.data()._fresh_grad = False

    def predict(self, data):
        return self.net(*map(_array, data)).asnumpy()

    def gradients(self):
        """Those that a backward pass has reached, and whether it were all."""
        found = [p.grad() for p in self._trained() if p.data()._fresh_grad]
        return found, len(found) == len(self._trained())

    def step(self):
        # Gluon itself takes the rate of the step before for parameters that
        # have had fewer updates and come before the others.
        self.trainer.optimizer.num_update += 1
        self.trainer.step(1, ignore_stale_grad=True)

    def set_rate(self, rate):
        self.trainer.set_learning_rate(rate)

    def save(self):
        with tempfile.NamedTemporaryFile() as file:
            self.trainer.save_states(file.name)
            return values(self.net), file.read()

    def restore(self, saved):
        load(self.net, saved[0])
        with tempfile.NamedTemporaryFile() as file:
            file.write(saved[1])
            file.flush()
            self.trainer.load_states(file.name)
