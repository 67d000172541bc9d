"""What PyTorch spells in its own way, and its plain loop on one device."""
import copy
import sys
import warnings
from functools import partial

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, parametrizations, weight_norm
from torch.utils import checkpoint as checkpoints

from .cases import CLASSES, WIDTH, WORDS, Case
from .networks import dropouts, network

SELF = sys.modules[__name__]
Module, Dropout, join, semantics = nn.Module, nn.Dropout, torch.cat, "torch"


def linear(outputs=WIDTH):
    return nn.Linear(WIDTH, outputs)


def legacy_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return weight_norm(linear())


def tied():
    """Two layers with one weight and a bias each."""
    a, b = linear(), linear()
    b.weight = a.weight
    return [a, nn.Tanh(), b]


def frozen_norm():
    """In eval mode, under a root that trains."""
    norm = nn.BatchNorm1d(WIDTH).eval()
    norm.running_mean.fill_(0.5)
    norm.running_var.fill_(2.0)
    return [norm]


LEAVES = {
    "dense": lambda: [linear(), nn.Tanh()], "tied": tied,
    "frozen": lambda: [linear(), nn.Tanh()],
    "hook": lambda: [linear(), nn.Tanh()],
    "weight_norm": lambda: [legacy_weight_norm(), nn.Tanh(),
                            parametrizations.weight_norm(linear())],
    "layer_norm": lambda: [nn.LayerNorm(WIDTH)],
    "batch_norm": lambda: [nn.BatchNorm1d(WIDTH, momentum=0.25)],
    "frozen_norm": frozen_norm,
    "conv": lambda: [nn.Conv1d(1, 2, 3, 2, padding=1), nn.GroupNorm(1, 2)],
    "dropout": lambda: [nn.Dropout(0.5)],
    "embedding": lambda: [nn.Embedding(WORDS, WIDTH)],
    "sparse": lambda: [nn.Embedding(WORDS, WIDTH, sparse=True)],
    "rnn": lambda: [nn.RNN(2, WIDTH, batch_first=True)],
    "gru": lambda: [nn.GRU(2, WIDTH, batch_first=True)],
    "lstm": lambda: [nn.LSTM(2, WIDTH, batch_first=True)]}
head = partial(linear, CLASSES)


def add(module, name, layer):
    module.add_module(name, layer)


def children(module):
    return list(module._modules.values())


def host(x):
    return x.detach().numpy()


def take(x, rows):
    return x[torch.from_numpy(rows)]


def checkpoint(forward, h, x, words, reentrant):
    if not torch.is_grad_enabled():
        return forward(h, x, words)
    return checkpoints.checkpoint(forward, h, x, words,
                                  use_reentrant=reentrant)


def ready(net, dtype):
    return net.to(getattr(torch, dtype))


def freeze(p, case, frozen=True):
    p.requires_grad_(not frozen)


def hook(layer):
    """A pruning mask."""
    weight, _ = parameters(layer)
    mask = torch.arange(WIDTH, dtype=weight.dtype) % 2
    weight.register_hook(lambda g: g * mask)


def is_training(layer):
    return layer.training


def place(x):
    return 0


def places(replicas):
    """Where a key of `watch_dropout` is: (path, number of the replica)."""
    return {(id(layer), 0): (path, i)
            for i, replica in enumerate(replicas.of_engine())
            for path, layer in dropouts(SELF, replica.module)}


def parameters(net):
    return list(net.parameters())


def values(net):
    return {name: host(x).copy() for name, x in net.state_dict().items()}


def statistics(net):
    return {name for name, _ in net.named_buffers()}


def load(net, new):
    net.load_state_dict({n: torch.from_numpy(x) for n, x in new.items()})


def edit(p, way, new):
    """Give the user's own parameter other values, in one of several ways."""
    x = torch.tensor(new, dtype=p.dtype)
    if way == "data":
        p.data.mul_(0.5)
    elif way == "numpy":
        host(p)[...] = new
    elif way == "assign":
        p.data = x
    else:
        with torch.no_grad():
            p.mul_(0.5) if way == "in place" else p.copy_(x)


def clip(net, max_norm):
    """The user's habit, on the user's own parameters."""
    clip_grad_norm_(net.parameters(), max_norm)


RULES = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam,
         "nag": partial(torch.optim.SGD, nesterov=True),
         "adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad,
         "adadelta": torch.optim.Adadelta, "adamax": torch.optim.Adamax,
         "rmsprop": torch.optim.RMSprop}
LOSSES = {"SoftmaxCrossEntropyLoss": lambda out, y: nn.functional
          .cross_entropy(out, y.long(), reduction="none"),
          "L2Loss": lambda out, y: ((out - y) ** 2).mean(1) / 2}


class Plain:
    """The loop without mgpu. Checkpoints, which change nothing, are left
    out; dropout layers take the masks that mgpu drew; batch norm keeps the
    biased variance, which is mgpu's meaning on both engines."""

    def __init__(self, case: Case):
        self.case, self.net, self.masks = case, network(SELF, case), {}
        for path, layer in dropouts(SELF, self.net):
            layer.forward = lambda h, path=path, layer=layer: \
                h * torch.from_numpy(
                self.masks[path]).to(h.dtype) if layer.training else h
        for m in self.net.modules():
            m.plain = True
            if isinstance(m, nn.BatchNorm1d) and m.training:
                m.register_forward_hook(_biased)
        self.optimizer = RULES[case.optimizer](self.net.parameters(), **{
            {"learning_rate": "lr", "wd": "weight_decay"}.get(name, name): x
            for name, x in case.options.items()})
        self.schedule = case.schedule and torch.optim.lr_scheduler.StepLR(
            self.optimizer, *case.schedule)

    def backward(self, data, y):
        if not self.case.adds:
            self.zero_grad()
        losses = LOSSES[self.case.loss](self.net(*map(torch.from_numpy, data)),
                                        torch.from_numpy(y))
        losses.sum().backward()
        return host(losses)

    def zero_grad(self):
        self.optimizer.zero_grad(set_to_none=True)

    def predict(self, data):
        trains = [m for m in self.net.modules() if m.training]
        self.net.eval()
        with torch.no_grad():
            out = self.net(*map(torch.from_numpy, data)).numpy()
        for m in trains:
            m.training = True
        return out

    def gradients(self):
        """Those that a backward pass has reached, and whether it were all."""
        trained = [p for p in self.net.parameters() if p.requires_grad]
        found = [p.grad for p in trained if p.grad is not None]
        for p in self.net.parameters():
            if not p.requires_grad:
                p.grad = None       # frozen since
        return found, len(found) == len(trained)

    def step(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # of torch's schedules
            self.optimizer.step()
            if self.schedule:
                self.schedule.step()

    def set_rate(self, rate):
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def save(self):
        return copy.deepcopy([x and x.state_dict() for x in self._parts()])

    def restore(self, saved):
        for x, state in zip(self._parts(), copy.deepcopy(saved)):
            if x:
                x.load_state_dict(state)

    def _parts(self):
        return self.net, self.optimizer, self.schedule


def _biased(m, inputs, output):
    if m.training:
        x = inputs[0].detach()
        m.running_var.data -= m.momentum * (
            x.var(0) - x.var(0, unbiased=False))
