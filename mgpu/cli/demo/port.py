"""A network of Gluon, and its port to PyTorch with a bug."""
from typing import Any


def original() -> Any:
    """Two convolutions with batch norm."""
    from mxnet.gluon import nn
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, padding=1), nn.BatchNorm(momentum=0.9),
            nn.Activation("relu"), nn.MaxPool2D(2),
            nn.Conv2D(16, 3, padding=1), nn.BatchNorm(momentum=0.9),
            nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Flatten(),
            nn.Dense(10))
    return net


def port() -> Any:
    """Gluon's momentum is the share of the old statistic, torch's that of
    the new one: the second layer should have 0.1."""
    from torch import nn
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=0.1),
        nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16, momentum=0.9),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
