"""A user's script, which mypy reads with the package (setup.cfg): what it
does with the public names must type-check. It runs on torch."""
import numpy as np
from torch import nn

import mgpu
from mgpu import parity
from mgpu.nn import functional

mgpu.set_backend("torch")


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))


devices: list[mgpu.Device] = [mgpu.cpu(0), mgpu.cpu(1)]
replicas: mgpu.Replicas = mgpu.initialize(
    network(), devices, init=mgpu.initializers.Xavier(), seed=1)
trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
data = [(np.ones((8, 4, 4), "float32"), np.arange(8) % 4)] * 2
loss = mgpu.losses.SoftmaxCrossEntropyLoss()
history: mgpu.History = mgpu.train(replicas, data, data, loss, trainer, 1,
                                   progress=False)
last: float = history.train_loss[-1]
accuracy: float = mgpu.evaluate_accuracy_gpus(replicas, data)
values: dict[str, np.ndarray] = replicas.export_numpy()
positive = functional.relu(mgpu.put([-1.0, 2.0], devices[0]))
result: parity.Result = parity.compare(network, network, batches=data,
                                       loss=loss, steps=1)
print(last, accuracy, sorted(values), mgpu.to_numpy(positive), result.same)
