"""The networks of the Gluon scripts in PyTorch, and their data."""
from collections import OrderedDict

import numpy as np
import torch
from torch import nn

import mgpu


def digits(train, size=8):
    """256 images of digits to train on, or 100 to test on, in NumPy."""
    X, y = (np.concatenate(parts) for parts in zip(*mgpu.datasets.digits(
        64, resize=size, limit=256, shuffle=False)[not train]))
    return (X, y) if train else (X[:100], y[:100])


def mlp(dtype):
    return nn.Sequential(OrderedDict([      # under the names of Gluon's layers
        ("0", nn.Linear(64, 128)), ("relu0", nn.ReLU()),
        ("1", nn.Linear(128, 64)), ("relu1", nn.ReLU()),
        ("2", nn.Linear(64, 10))])).to(getattr(torch, dtype))


def convnet(dtype):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
        ).to(getattr(torch, dtype))
