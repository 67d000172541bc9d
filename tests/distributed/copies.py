"""Data that all processes would train on alike, and data that each has its
own part of: a part of `two_ranks`."""
import numpy as np

import mgpu
from nets import convnet

LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def loaders(X, y, rank):
    """A data set of the backend, a loader of all of it, and a loader of this
    rank's part."""
    if mgpu.get_backend().name == "torch":
        import torch
        from torch.utils import data
        dataset = data.TensorDataset(torch.from_numpy(X), torch.from_numpy(y))
        return dataset, data.DataLoader(dataset, 4), data.DataLoader(
            dataset, 4, sampler=data.DistributedSampler(
                dataset, 2, rank, shuffle=False))
    from mxnet import gluon, np as mxnp
    data = gluon.data
    return data.ArrayDataset(mxnp.array(X), mxnp.array(y)), data.DataLoader(
        data.ArrayDataset(X, y), 4), data.DataLoader(
            data.ArrayDataset(X[rank::2], y[rank::2]), 4)


def report(rank):
    X = np.random.default_rng(0).random((10, 1, 8, 8)).astype("float32")
    y = (np.arange(10) % 3).astype("int32")
    dataset, loader, sharded = loaders(X, y, rank)
    net = convnet(mgpu.get_backend(), channels=1, classes=3)
    replicas = mgpu.initialize(net, [mgpu.cpu(0)], init="xavier", seed=1)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})

    def train(batches):
        mgpu.train(replicas, batches, None, LOSS, trainer, 1, progress=False)

    def value():
        return float(sum(mgpu.to_numpy(p.data()).sum()
                         for p in replicas.params()))

    found = {"before": value()}
    for name, batches in {
            "list": [(X[:4], y[:4]), (X[4:], y[4:])], "loader": loader,
            "ahead": mgpu.prefetch(loader)}.items():
        try:
            train(batches)
            found[name] = "trained"
        except ValueError as error:
            found[name] = str(error)
    found["after"] = value()
    train(sharded)
    found["changed"] = value()
    # Rows that are equal in all examples are no sign where mgpu shards.
    train(mgpu.prefetch(mgpu.datasets.IndexedIterator([(X[0], 0)] * 10, 4)))
    indexed = mgpu.datasets.IndexedIterator(dataset, 3, seed=2)
    found["rows"] = [[a.tolist(), b.tolist()] for a, b in indexed]
    return found
