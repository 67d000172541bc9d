"""The networks of a case, once for both engines.

Layers take the features `h`, and the rows of the network's inputs, `x` and
`words`, by which some of them choose. An engine's module says what it spells
differently: see `torch_side` and `gluon_side`.
"""
import numpy as np

from .cases import WIDTH, Case


def layers_of(side):
    """The classes of layers over an engine's `Module`."""
    children, host = side.children, side.host

    class On(side.Module):
        """The engine's own layers, one after the other, on `h`."""

        def __init__(self, layers):
            super().__init__()
            for i, layer in enumerate(layers):
                side.add(self, str(i), layer)

        def forward(self, h, x, words):
            for layer in children(self):
                h = layer(h)
            return h

    class Conv(On):
        def forward(self, h, x, words):
            h = super().forward(h.reshape((-1, 1, WIDTH)), x, words)
            return h.reshape((-1, WIDTH))

    class Recurrent(On):
        def forward(self, h, x, words):
            out = super().forward(h.reshape((-1, 2, 2)), x, words)
            return (out[0] if isinstance(out, tuple) else out).sum(1)

    class Embedded(On):
        def forward(self, h, x, words):
            return h + super().forward(words, x, words)

    class Stack(On):
        def forward(self, h, x, words):
            for layer in children(self):
                h = layer(h, x, words)
            return h

    class Block(Stack):
        def forward(self, h, x, words):
            return h + super().forward(h, x, words)

    class Switch(Stack):
        """Left out where the whole batch says so."""

        def forward(self, h, x, words):
            return super().forward(h, x, words) if host(x)[0, 3] > 0 else h

    class Experts(On):
        """Each row goes one of two ways; it may be that no row goes one."""

        def forward(self, h, x, words):
            first = host(x)[:, 0] > 0
            rows = [np.flatnonzero(first), np.flatnonzero(~first)]
            parts = [way(side.take(h, some), side.take(x, some),
                         words if words is None else side.take(words, some))
                     for way, some in zip(children(self), rows) if len(some)]
            return side.take(side.join(parts),
                             np.argsort(np.concatenate(rows)))

    class Checkpoint(Stack):
        """Computed again in the backward pass, but not in the plain loop."""

        plain, reentrant = False, False

        def forward(self, h, x, words):
            forward = super().forward
            return forward(h, x, words) if self.plain else side.checkpoint(
                forward, h, x, words, self.reentrant)

    class Reentrant(Checkpoint):
        reentrant = True

    class Net(Stack):
        def forward(self, x, words=None):
            *layers, head = children(self)
            h = x
            for layer in layers:
                h = layer(h, x, words)
            return head(h)
    return {name.lower(): layer for name, layer in vars().items()
            if isinstance(layer, type)}


def network(side, case: Case):
    """The user's network, with the values of the case's seed."""
    classes, shared = layers_of(side), {}

    def make(layer):
        kind, _, *inner = layer
        if kind == "experts":
            return classes[kind]([classes["stack"](list(map(make, some)))
                                  for some in inner])
        if inner:
            return classes[kind](list(map(make, *inner)))
        if layer not in shared:     # layers that come twice
            of = {"conv": "conv", "embedding": "embedded",
                  "sparse": "embedded", "rnn": "recurrent",
                  "gru": "recurrent", "lstm": "recurrent"}.get(kind, "on")
            shared[layer] = classes[of](side.LEAVES[kind]())
        return shared[layer]
    net = side.ready(classes["net"]([*map(make, case.layers), side.head()]),
                     case.dtype)
    rng = np.random.default_rng(case.seed)
    for p in side.parameters(net):
        side.edit(p, "copy", rng.normal(0, 0.5, p.shape))
    for (kind, _), layer in shared.items():
        if kind == "frozen":
            for p in side.parameters(layer):
                side.freeze(p, case)
        if kind == "hook":
            side.hook(layer)
    return net


def dropouts(side, net, path=""):
    """Each dropout layer, and where it is."""
    for i, layer in enumerate(side.children(net)):
        if isinstance(layer, side.Dropout):
            yield f"{path}.{i}", layer
        yield from dropouts(side, layer, f"{path}.{i}")


def watch_dropout(side, net, seen):
    """Call ``seen((layer, device), mask)`` with each mask that is drawn."""
    def hook(layer, inputs, output):
        if side.is_training(layer):
            seen((id(layer), side.place(output)), (host(output) != 0) * 2.0)
    host = side.host
    for _, layer in dropouts(side, net):
        layer.register_forward_hook(hook)
