"""The networks of a program, once for both backends.

Layers take the features `h`, and the network's inputs `x` and `words`, by
whose rows some of them choose. An adapter says what a backend spells
differently: see `torch_adapter` and `gluon_adapter`.
"""
import numpy as np

from .programs import WIDTH, Program

#: the class of a leaf, where it is not `Leaf`
WRAPPERS = {"conv": "conv", "embedding": "embedded", "sparse": "embedded",
            "rnn": "recurrent", "gru": "recurrent", "lstm": "recurrent",
            "dropout": "dropout", "counter": "counter", "carry": "carry"}


def layer_classes(adapter):
    """The classes of layers over a backend's `Module`, by lowercase name."""
    children, host = adapter.children, adapter.host
    is_training = adapter.is_training

    class Leaf(adapter.Module):
        """The backend's own layers, one after the other, on `h`."""

        def __init__(self, layers):
            super().__init__()
            for i, layer in enumerate(layers):
                adapter.add(self, str(i), layer)

        def forward(self, h, x, words):
            for layer in children(self):
                h = layer(h)
            return h

    class Conv(Leaf):
        def forward(self, h, x, words):
            h = super().forward(h.reshape((-1, 1, WIDTH)), x, words)
            return h.reshape((-1, WIDTH))

    class Recurrent(Leaf):
        def forward(self, h, x, words):
            out = super().forward(h.reshape((-1, 2, 2)), x, words)
            return (out[0] if isinstance(out, tuple) else out).sum(1)

    class Embedded(Leaf):
        def forward(self, h, x, words):
            return h + super().forward(words, x, words)

    class Dropout(Leaf):
        """Applies `masks`, by row of the input, where they are set."""

        masks = None

        def forward(self, h, x, words):
            if self.masks is None or not is_training(self):
                return super().forward(h, x, words)
            return h * adapter.array(np.stack([
                self.masks[_row_key(self, row)] for row in host(x)]), h)

    class Counter(Leaf):
        """Divides by the number of its training passes so far."""

        def __init__(self, layers):
            super().__init__(layers)
            self.count = 0

        def forward(self, h, x, words):
            if is_training(self):
                self.count += 1
            return super().forward(h, x, words) / max(self.count, 1)

    class Carry(Leaf):
        """Adds the output of the last training pass, row by row."""

        def __init__(self, layers):
            super().__init__(layers)
            self.state = None

        def forward(self, h, x, words):
            h = super().forward(h, x, words)
            if is_training(self):
                h = h if self.state is None else h + self.state / 2
                self.state = h.detach()
            return h

    class Stack(Leaf):
        def forward(self, h, x, words):
            for layer in children(self):
                h = layer(h, x, words)
            return h

    class Block(Stack):
        def forward(self, h, x, words):
            return h + super().forward(h, x, words)

    class Switch(Stack):
        """Runs only if the last column of the batch is positive."""

        def forward(self, h, x, words):
            return super().forward(h, x, words) if host(x)[0, 3] > 0 else h

    class Experts(Leaf):
        """Each row takes one of two branches; a branch may get no row."""

        def forward(self, h, x, words):
            first = host(x)[:, 0] > 0
            rows = [np.flatnonzero(first), np.flatnonzero(~first)]
            parts = [branch(adapter.take(h, some), adapter.take(x, some),
                            None if words is None
                            else adapter.take(words, some))
                     for branch, some in zip(children(self), rows)
                     if len(some)]
            return adapter.take(adapter.join(parts),
                                np.argsort(np.concatenate(rows)))

    class Checkpoint(Stack):
        """Recomputed in the backward pass, but not in the reference."""

        reference, reentrant = False, False

        def forward(self, h, x, words):
            forward = super().forward
            return forward(h, x, words) if self.reference \
                else adapter.checkpoint(forward, h, x, words, self.reentrant)

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


def network(adapter, program: Program, number: int):
    """The user's network `number`, with the values of the program's seed."""
    classes, made = layer_classes(adapter), {}

    def make(layer):
        if not isinstance(layer, str):
            kind, *inside = layer
            parts = [list(map(make, some)) for some in inside]
            return classes[kind](parts[0] if len(parts) == 1 else list(map(
                classes["stack"], parts)))
        key = layer if layer.startswith("shared ") else len(made)
        if key not in made:
            kind = layer.removeprefix("shared ")
            made[key] = kind, classes[WRAPPERS.get(kind, "leaf")](
                adapter.LEAVES.get(kind, adapter.dense)())
        return made[key][1]
    config = program.networks[number]
    net = adapter.ready(classes["net"]([*map(make, config.layers),
                                        adapter.head()]), program.dtype)
    rng = np.random.default_rng([program.seed, number])
    for p in adapter.parameters(net):
        adapter.edit(p, "copy", rng.normal(0, 0.5, p.shape))
    for i, (kind, layer) in enumerate(made.values()):
        layer.path = f"{number}.{i}"
        if kind == "frozen":
            for p in adapter.parameters(layer):
                adapter.freeze(p, config.adds)
        adapter.add_hooks(kind, layer)
    return net


def find_layers(adapter, net, attribute: str):
    """The layers that have an attribute of this name."""
    if hasattr(net, attribute):
        yield net
    for layer in adapter.children(net):
        yield from find_layers(adapter, layer, attribute)


def record_masks(adapter, net, masks: dict) -> None:
    """Write to `masks` what each dropout layer does to each row.

    Rows are known by the network's input, on whichever device they are."""
    # A pass may run again; its last masks count.
    note = masks.__setitem__

    def hook(layer, inputs, output):
        if adapter.is_training(layer):
            for row, out in zip(*map(adapter.host, (inputs[1], output))):
                note(_row_key(layer, row), (out != 0) * 2.0)
    for layer in find_layers(adapter, net, "masks"):
        layer.register_forward_hook(hook)


def _row_key(layer, row):
    return layer.path, *np.round(row.astype("float64"), 6)
