"""Two engines, one step at a time from the same state.

The measure is the tensor-scale one of docs/design.md: ``max|a - b|`` over the
largest value of the tensor. A tensor below a floor, a thousandth of the
largest value in its layer, is compared on the scale of the layer: some
gradients are zero in exact arithmetic (a convolution bias before a batch
norm) and what is computed for them is noise of that scale.
"""
import numpy as np

import mgpu
from helpers import relative_difference

#: of the largest value of the layer, weight and bias together
FLOOR = 1e-3


def scales(tensors):
    """What each tensor's difference is measured against, by name."""
    own = {name: float(np.abs(value).max(initial=0.0))
           for name, value in tensors.items()}
    layer = {}
    for name, size in own.items():
        key = name.rpartition(".")[0]       # "3.0.conv1.bias" -> 3.0.conv1
        layer[key] = max(layer.get(key, 0.0), size)
    return {name: size if size >= FLOOR * layer[name.rpartition(".")[0]]
            else layer[name.rpartition(".")[0]]
            for name, size in own.items()}


def worst(ours, reference):
    """The largest relative difference of two dicts of arrays, and where."""
    assert ours and ours.keys() == reference.keys(), (
        ours.keys() ^ reference.keys())
    gaps = {name: relative_difference(ours[name], reference[name], scale)
            for name, scale in scales(reference).items()}
    name = max(gaps, key=gaps.get)
    return gaps[name], name


class Side:
    """One engine's network, trainer and loss."""

    def __init__(self, backend, build, k, optimizer="sgd", options=None,
                 init=None, dtype="float64", **initialize):
        self.name = backend
        with mgpu.using_backend(backend):
            self.replicas = mgpu.initialize(
                build(), [mgpu.cpu(i) for i in range(k)], init=init,
                dtype=dtype, **initialize)
        self.trainer = mgpu.Trainer(self.replicas, optimizer,
                                    options or {"learning_rate": 2.0 ** -5})
        self.loss = mgpu.losses.SoftmaxCrossEntropyLoss()

    def state(self):
        """Values on every device; a running statistic has a leading axis."""
        values = self.replicas.export_numpy(all_devices=True)
        return {name: value for name, value in values.items()
                if not name.endswith("num_batches_tracked")}

    def step(self, X, y):
        """Take one step; losses, summed gradients and the new state."""
        with mgpu.using_backend(self.name):
            Xs, ys = mgpu.split_batch(X, y, self.replicas.devices)
            with mgpu.record():
                losses = mgpu.parallel(
                    lambda out, label: None if out is None
                    else self.loss(out, label), self.replicas(Xs), ys)
            mgpu.backward(losses)
            self.trainer.allreduce_grads()
            gradients = {p.name: mgpu.to_numpy(p.grad())
                         for p in self.replicas.params()}
            self.trainer.update(len(X))
            values = np.concatenate([mgpu.to_numpy(loss) for loss in losses
                                     if loss is not None])
        return values, gradients, self.state()


def compare_step(a, b, X, y):
    """One lock-step step of two sides; worst relative differences by stage.

    `b` is first set to the state of `a`.
    """
    b.replicas.import_numpy(a.state())
    losses, gradients, state = a.step(X, y)
    losses_b, gradients_b, state_b = b.step(X, y)
    statistics = {n for n in state if n.endswith(("running_mean",
                                                  "running_var"))}
    weights, weights_b = ({n: v for n, v in s.items() if n not in statistics}
                          for s in (state, state_b))
    return {
        "loss": (relative_difference(losses_b, losses), ""),
        "gradient": worst(gradients_b, gradients),
        "weight": worst(weights_b, weights),
        "statistic": worst({n: state_b[n] for n in statistics},
                           {n: state[n] for n in statistics})
        if statistics else (0.0, ""),
    }, float(losses.mean())
