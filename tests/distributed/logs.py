"""What `CSVLogger` and `TensorBoard` write in several processes: a part of
`two_ranks`."""
import sys
import tempfile
import types
from pathlib import Path

import numpy as np

import mgpu
from nets import convnet


class Writer:
    """Stands for `tensorboardX.SummaryWriter`."""

    steps = []

    def __init__(self, folder, **options):
        Path(folder, "events").touch()

    def add_scalar(self, tag, value, step):
        if tag == "loss_per_step":
            self.steps.append(value)

    def flush(self):
        pass

    close = flush


def report(rank):
    rng = np.random.default_rng(rank)
    X, y = rng.random((6, 1, 8, 8)).astype("float32"), [0, 1, 2] * 2
    data = [(X[:4], np.int32(y[:4])), (X[4:], np.int32(y[4:]))]
    replicas = mgpu.initialize(
        convnet(mgpu.get_backend(), channels=1, classes=3), [mgpu.cpu(0)],
        init="xavier", seed=1)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    sys.modules["tensorboardX"] = types.SimpleNamespace(SummaryWriter=Writer)
    folder = Path(tempfile.mkdtemp())
    history = mgpu.train(
        replicas, data, None, mgpu.losses.SoftmaxCrossEntropyLoss(), trainer,
        2, callbacks=[mgpu.callbacks.CSVLogger(folder / "log.csv"),
                      mgpu.callbacks.TensorBoard(folder)])
    del sys.modules["tensorboardX"]
    return {"files": sorted(path.name for path in folder.iterdir()),
            "lines": [line.split(",") for path in folder.glob("*.csv")
                      for line in path.read_text().splitlines()],
            "steps": Writer.steps, "history": history.to_dict()}
