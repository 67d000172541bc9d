"""Bytes that training holds on K devices, counted, not measured.

    python -m benchmarks.memory '{"backend": "torch",
        "units": [4096, 8192, 4096]}'

"units" are the inputs, hidden units and outputs of a network of two dense
layers. Writes the bytes of its parameters, and for 1, 2 and 4 devices the
counted bytes and their bound (`counted`).
"""
import gc
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
ROWS = 64


def mlp(backend, units):
    if backend == "torch":
        from torch import nn
        return nn.Sequential(nn.Linear(*units[:2]), nn.ReLU(),
                             nn.Linear(*units[1:]))
    from mxnet.gluon import nn
    net = nn.HybridSequential()
    net.add(nn.Dense(units[1], activation="relu", in_units=units[0]),
            nn.Dense(units[2], in_units=units[1]))
    return net


def held(backend, parameters):
    """Bytes of all native arrays that Python can reach and that are not
    frozen (`gc.freeze`), and of `parameters` and their gradients, which a
    backend may hold itself: the union of what they span in memory, so that a
    view counts once."""
    arrays = [x for x in gc.get_objects() if backend.is_native(x)]
    for p in parameters:
        arrays += [*p.list_data(), *p.list_grad()]
    spans = sorted(backend.memory(x)[1:] for x in arrays)
    total = end = 0
    for first, last in spans:
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def most_held(backend, units, k):
    """The most bytes at the stations of a second step on `k` devices,
    without what was there before. Not seen, on one device as on many, are
    activations that only a backend's graph holds, out of Python's reach,
    NumPy arrays, and what is gone again when a call returns."""
    import mgpu
    devices = [mgpu.cpu(i) for i in range(k)]
    replicas = mgpu.initialize(mlp(backend.name, units), devices, "xavier")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 1e-3})
    ce = mgpu.losses.SoftmaxCrossEntropyLoss()
    rng = np.random.default_rng(0)
    X = rng.random((ROWS, units[0]), dtype="float32")
    y = rng.integers(0, units[-1], ROWS)
    counts = []

    def count():
        if trainer.num_update:
            counts.append(held(backend, replicas.params()))
    for _ in range(2):
        X_shards, y_shards = mgpu.split_batch(X, y, devices)
        with mgpu.record():
            outputs = replicas(X_shards)
            losses = mgpu.parallel(ce, outputs, y_shards)
        count()
        mgpu.backward(losses)
        count()
        trainer.allreduce_grads()
        count()
        trainer.update(ROWS)
        count()
    assert len(counts) == 5
    return max(counts)


def counted(backend, units, ks):
    """For each K the counted bytes and the bound: one device's, and K - 1
    times parameters, gradients and a shard with its outputs."""
    a, b, c = units
    parameters = 4 * (a * b + b + b * c + c)
    found = {}
    for k in ks:
        gc.collect()
        gc.freeze()
        gc.disable()    # what only a collection would free counts too
        try:
            found[k] = most_held(backend, units, k)
        finally:
            gc.enable()
            gc.unfreeze()
    return {"parameters": parameters, **{k: {
        "bytes": found[k], "bound": found[1] + (k - 1) * (
            2 * parameters + 4 * (ROWS // k) * (a + b + c))} for k in ks}}


def main():
    import mgpu
    spec = json.loads(sys.argv[1])
    mgpu.set_backend(spec["backend"])
    with mgpu.using_backend(spec["backend"]) as backend:
        print(json.dumps(counted(backend, spec["units"], (1, 2, 4))))


if __name__ == "__main__":
    main()
