"""The originals, in Gluon: what `torch_nets.py` is a port of."""
from mxnet.gluon import nn


def lenet():
    """LeNet as in "Training on Multiple GPUs"."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, 3, in_channels=1, activation="relu"),
            nn.AvgPool2D(2, 2),
            nn.Conv2D(50, 5, in_channels=20, activation="relu"),
            nn.AvgPool2D(2, 2),
            nn.Dense(128, in_units=800, activation="relu"),
            nn.Dense(10, in_units=128))
    return net


def convnet():
    """Two convolutions with batch norm, and dropout."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, padding=1), nn.BatchNorm(),
            nn.Activation("relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(32, 3, padding=1), nn.BatchNorm(),
            nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Flatten(),
            nn.Dropout(0.25), nn.Dense(10))
    return net
