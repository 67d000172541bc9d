"""What test_data.py runs in two processes: ``copies.py BACKEND``. Prints a
line of JSON for each kind of data."""
import json
import sys

import numpy as np

import mgpu
from nets import convnet

backend = sys.argv[1]
mgpu.set_backend(backend)
mgpu.distributed.init(timeout=30)
rank = mgpu.distributed.rank()
X = np.random.default_rng(0).random((10, 1, 8, 8)).astype("float32")
y = (np.arange(10) % 3).astype("int32")
if backend == "torch":
    import torch
    from torch.utils import data
    dataset = data.TensorDataset(torch.from_numpy(X), torch.from_numpy(y))
    loader = data.DataLoader(dataset, 4)
    sharded = data.DataLoader(dataset, 4, sampler=data.DistributedSampler(
        dataset, 2, rank, shuffle=False))
else:
    from mxnet import gluon, np as mxnp
    dataset = gluon.data.ArrayDataset(mxnp.array(X), mxnp.array(y))
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(X, y), 4)
    sharded = gluon.data.DataLoader(gluon.data.ArrayDataset(
        X[rank::2], y[rank::2]), 4)
net = convnet(mgpu.get_backend(), channels=1, classes=3)
replicas = mgpu.initialize(net, [mgpu.cpu(0)], init="xavier", seed=1)
trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
loss = mgpu.losses.SoftmaxCrossEntropyLoss()


def value():
    return float(sum(mgpu.to_numpy(p.data()).sum()
                     for p in replicas.params()))


found = {"before": value()}
for name, batches in {
        "list": [(X[:4], y[:4]), (X[4:], y[4:])], "loader": loader,
        "ahead": mgpu.prefetch(loader)}.items():
    try:
        mgpu.train(replicas, batches, None, loss, trainer, 1, progress=False)
        found[name] = "trained"
    except ValueError as error:
        found[name] = str(error)
found["after"] = value()
mgpu.train(replicas, sharded, None, loss, trainer, 1, progress=False)
found["changed"] = value()
# Rows that are equal in all examples are no sign where mgpu shards.
same = [(X[0], 0)] * 10
mgpu.train(replicas, mgpu.prefetch(mgpu.datasets.IndexedIterator(same, 4)),
           None, loss, trainer, 1, progress=False)
indexed = mgpu.datasets.IndexedIterator(dataset, 3, seed=2)
found["rows"] = [[a.tolist(), b.tolist()] for a, b in indexed]
print(json.dumps(found))
