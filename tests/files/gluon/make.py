"""Makes the files of this folder: ``python tests/files/gluon/make.py``, with
MXNet 1.9.1. `expected.json` says what MXNet itself has in them."""
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]

import mgpu  # noqa: E402

mgpu.set_backend("mxnet")

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from gluon_io import samples  # noqa: E402
from gluon_io.mutations import summary  # noqa: E402

from mgpu import parity  # noqa: E402


def nested(x):
    return None if x is None else list(map(nested, x)) \
        if isinstance(x, tuple) else summary([x])[0]


def record(folder):
    """A step of the live network, for ``mgpu convert --trace``."""
    files = [folder / f"resnet{end}" for end in ("-symbol.json",
                                                 "-0000.params")]
    steps = np.load(folder / "resnet-steps.npz")
    parity.record(lambda: mgpu.from_gluon(*files),
                  file=str(folder / "resnet.trace"),
                  batches=[(steps["x"], steps["label"])],
                  loss=mgpu.losses.SoftmaxCrossEntropyLoss(),
                  optimizer_params={"learning_rate": 0.125, "momentum": 0.5})


def main():
    for paths in HERE.glob("*.params"), HERE.glob("*.states"):
        for old in paths:
            old.unlink()
    expected = {}
    for name, write in samples.PARAMS.items():
        write(mx, str(HERE / f"{name}.params"))
    for version in 0, 1:
        (HERE / f"by-hand-{version}.params").write_bytes(samples.old(version))
    samples.write_training(mx, HERE / "training")
    samples.write_networks(mx, HERE / "networks")
    record(HERE / "networks")
    for path in sorted(HERE.glob("*.params")):
        expected[path.name] = summary(samples.read_by_mxnet(mx, str(path)))
    for name, write in samples.STATES.items():
        trainer = write(mx, str(HERE / f"{name}.states"))
        optimizer = trainer.optimizer
        expected[f"{name}.states"] = {
            "kind": f"{type(optimizer).__module__}."
                    f"{type(optimizer).__qualname__}",
            "num_update": optimizer.num_update, "lr": optimizer.lr,
            "states": {i: nested(x) for i, x in samples.kept(
                trainer).items()}}
    (HERE / "expected.json").write_text("{\n" + ",\n".join(
        f"{json.dumps(name)}: {json.dumps(what)}"
        for name, what in sorted(expected.items())) + "\n}\n")


if __name__ == "__main__":
    main()
