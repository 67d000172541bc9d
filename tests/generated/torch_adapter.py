"""What PyTorch spells in its own way, and its plain loop on one device."""
import copy
import sys
import warnings
from functools import partial

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, parametrizations, weight_norm
from torch.utils import checkpoint as checkpoints

from .networks import find_layers, network
from .programs import WIDTH, WORDS, Network, Program

SELF = sys.modules[__name__]
Module, join, semantics = nn.Module, torch.cat, "torch"


def linear():
    return nn.Linear(WIDTH, WIDTH)


def dense():
    return [linear(), nn.Tanh()]


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


#: the others are `dense`
LEAVES = {
    "tied": tied, "frozen_norm": frozen_norm,
    "weight_norm": lambda: [legacy_weight_norm(), nn.Tanh(),
                            parametrizations.weight_norm(linear())],
    "layer_norm": lambda: [nn.LayerNorm(WIDTH)],
    "batch_norm": lambda: [nn.BatchNorm1d(WIDTH, momentum=0.25)],
    "conv": lambda: [nn.Conv1d(1, 2, 3, 2, padding=1), nn.GroupNorm(1, 2)],
    "dropout": lambda: [nn.Dropout(0.5)],
    "embedding": lambda: [nn.Embedding(WORDS, WIDTH)],
    "sparse": lambda: [nn.Embedding(WORDS, WIDTH, sparse=True)],
    "rnn": lambda: [nn.RNN(2, WIDTH, batch_first=True)],
    "gru": lambda: [nn.GRU(2, WIDTH, batch_first=True)],
    "lstm": lambda: [nn.LSTM(2, WIDTH, batch_first=True)]}
head = linear


def add(module, name, layer):
    module.add_module(name, layer)


def children(module):
    return list(module._modules.values())


def host(x):
    return x.detach().numpy()


def array(x, like=None):
    return torch.tensor(x, dtype=None if like is None else like.dtype)


def take(x, rows):
    return x[torch.from_numpy(rows)]


def checkpoint(forward, h, x, words, reentrant):
    if not torch.is_grad_enabled():
        return forward(h, x, words)
    return checkpoints.checkpoint(forward, h, x, words,
                                  use_reentrant=reentrant)


def ready(net, dtype):
    return net.to(getattr(torch, dtype))


def freeze(p, adds, frozen=True):
    p.requires_grad_(not frozen)
    if frozen:      # as zero_grad of torch's own loop does before a clip
        p.grad = None


def add_hooks(kind, layer):
    """A pruning mask, a hook on the gradient, one on a layer's output."""
    weight = next(layer.parameters(), None)
    if kind == "mask_hook":
        mask = torch.arange(WIDTH, dtype=weight.dtype) % 2
        weight.register_hook(lambda g: g * mask)
    elif kind == "grad_hook":
        weight.register_post_accumulate_grad_hook(
            lambda p: setattr(p, "grad", p.grad / 2))
    elif kind == "output_hook":
        layer.register_forward_pre_hook(
            lambda layer, inputs: (inputs[0] / 2, *inputs[1:]))
        layer.register_forward_hook(lambda layer, inputs, out: out * 2)


def is_training(layer):
    return layer.training


def parameters(net):
    return list(net.parameters())


def export(net):
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


def clip(parameters, max_norm):
    clip_grad_norm_(parameters, max_norm)


def own_step(parameters, n):
    """The user's own optimizer, after a backward pass of `n` rows."""
    torch.optim.SGD(parameters, 0.125 / n).step()


RULES = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam,
         "nag": partial(torch.optim.SGD, nesterov=True),
         "adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad,
         "adadelta": torch.optim.Adadelta, "adamax": torch.optim.Adamax,
         "rmsprop": torch.optim.RMSprop}
LOSSES = {"SoftmaxCrossEntropyLoss": lambda out, y: nn.functional
          .cross_entropy(out, y.long(), reduction="none"),
          "L2Loss": lambda out, y: ((out - y) ** 2).mean(1) / 2}


def optimizer(config: Network, parameters):
    """An optimizer of `config`, and its schedules."""
    options = {{"learning_rate": "lr", "wd": "weight_decay"}.get(name, name): x
               for name, x in config.options.items()}
    if config.trainer == "object":
        parameters = [{"params": parameters[:2], "lr": options["lr"] / 2},
                      {"params": parameters[2:]}]
    found = RULES[config.optimizer](parameters, **options)
    return found, [torch.optim.lr_scheduler.StepLR(
        found, *config.schedule)] if config.schedule else []


def set_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


def own_states(optimizer):
    """The optimizer's own, as one dict."""
    return {f"{i} {name}": float(x.sum())
            for i, slots in optimizer.state_dict()["state"].items()
            for name, x in slots.items()}


class Reference:
    """The loop without mgpu. Checkpoints, which change nothing, are left
    out; batch norm keeps the biased variance, which is mgpu's meaning on both
    backends."""

    def __init__(self, program: Program, number: int):
        self.config, self.loss = program.networks[number], program.loss
        self.net = network(SELF, program, number)
        for layer in find_layers(SELF, self.net, "reference"):
            layer.reference = True
        for m in self.net.modules():
            if isinstance(m, nn.BatchNorm1d) and m.training:
                m.register_forward_hook(_keep_biased_variance)
        made = [optimizer(self.config, some)
                for some in self.config.split(parameters(self.net))]
        self.optimizers = [found for found, _ in made]
        self.schedules = [one for _, some in made for one in some]

    def forward(self, data):
        return self.net(*map(torch.from_numpy, data))

    def backward(self, data, y, other=None):
        if not self.config.adds:
            self.zero_grad()
        x, *words = map(torch.from_numpy, data)
        out = self.net(x, *words)
        if other is not None:
            out = other.net(out + x, *words)
        losses = LOSSES[self.loss](out, torch.from_numpy(y))
        losses.sum().backward()
        return host(losses)

    def zero_grad(self):
        self.net.zero_grad(set_to_none=True)

    def predict(self, data):
        trains = [m for m in self.net.modules() if m.training]
        self.net.eval()
        with torch.no_grad():
            out = self.forward(data).numpy()
        for m in trains:
            m.training = True
        return out

    def trained(self):
        return [p for optimizer in self.optimizers
                for group in optimizer.param_groups for p in group["params"]
                if p.requires_grad]

    def gradients(self):
        """Those that a backward pass has reached, and whether all were."""
        trained = self.trained()
        found = [p.grad for p in trained if p.grad is not None]
        for p in self.net.parameters():
            if not p.requires_grad:
                p.grad = None       # frozen since
        return found, len(found) == len(trained)

    def step(self, n):
        """On the gradients of a sum over `n` rows."""
        for g in self.gradients()[0]:
            g /= n
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # of torch's schedules
            for x in (*self.optimizers, *self.schedules):
                x.step()

    def set_rate(self, rate):
        for optimizer in self.optimizers:
            set_rate(optimizer, rate)

    def save(self):
        return copy.deepcopy([x.state_dict() for x in self._parts()])

    def restore(self, saved):
        for x, state in zip(self._parts(), copy.deepcopy(saved)):
            x.load_state_dict(state)

    def _parts(self):
        return self.net, *self.optimizers, *self.schedules


def _keep_biased_variance(m, inputs, output):
    if m.training:
        x = inputs[0].detach()
        m.running_var.data -= m.momentum * (
            x.var(0) - x.var(0, unbiased=False))
