"""The networks of the Gluon scripts, and their data."""
import numpy as np

import mgpu

mgpu.mxnet_compat()         # `import mxnet` on NumPy's of today
from mxnet.gluon import nn                          # noqa: E402


def digits(train, size=8):
    """256 images of digits to train on, or 100 to test on, in NumPy."""
    X, y = (np.concatenate(parts) for parts in zip(*mgpu.datasets.digits(
        64, resize=size, limit=256, shuffle=False)[not train]))
    return (X, y) if train else (X[:100], y[:100])


def mlp(dtype):
    net = nn.Sequential()
    net.add(nn.Dense(128, activation="relu"), nn.Dense(64, activation="relu"),
            nn.Dense(10))
    net.cast(dtype)
    return net


def convnet(dtype):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, padding=1, use_bias=False), nn.BatchNorm(),
            nn.Activation("relu"), nn.MaxPool2D(2), nn.Flatten(),
            nn.Dense(10))
    net.cast(dtype)
    return net
