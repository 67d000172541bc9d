"""The book's networks as Gluon blocks: see `mgpu.models`."""
from typing import Any

from mgpu.backends._mxnet.framework import mx

nn: Any = mx.gluon.nn


class Residual(nn.HybridBlock):
    """A residual block: conv 3x3 - BN - ReLU - conv 3x3 - BN, plus the input
    (through a 1x1 convolution where `strides` or channels change), ReLU."""

    def __init__(self, in_channels, channels, use_1x1conv=False, strides=1,
                 **kwargs):
        super().__init__(**kwargs)
        self.conv1 = nn.Conv2D(channels, 3, strides, 1,
                               in_channels=in_channels)
        self.conv2 = nn.Conv2D(channels, 3, 1, 1, in_channels=channels)
        self.conv3 = nn.Conv2D(channels, 1, strides, in_channels=in_channels) \
            if use_1x1conv else None
        self.bn1 = nn.BatchNorm(in_channels=channels)
        self.bn2 = nn.BatchNorm(in_channels=channels)
        # A layer, because F.relu does not take both mx.np and mx.nd arrays.
        self.relu1, self.relu2 = nn.Activation("relu"), nn.Activation("relu")

    def hybrid_forward(self, F, x):
        """The block's output."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.conv3 is not None:
            x = self.conv3(x)
        return self.relu2(y + x)


def lenet(num_classes, in_channels):
    """`mgpu.models.lenet` as layers."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, 3, in_channels=in_channels),
            nn.Activation("relu"), nn.AvgPool2D(2),
            nn.Conv2D(50, 5, in_channels=20),
            nn.Activation("relu"), nn.AvgPool2D(2), nn.Flatten(),
            nn.Dense(128, in_units=800), nn.Activation("relu"),
            nn.Dense(num_classes, in_units=128))
    return net


def resnet18(num_classes, in_channels):
    """See `mgpu.models.resnet18`."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(64, 3, 1, 1, in_channels=in_channels),
            nn.BatchNorm(in_channels=64), nn.Activation("relu"))
    channels = 64
    for number, width in enumerate((64, 128, 256, 512)):
        blocks = nn.HybridSequential()
        for block in range(2):
            down = number > 0 and block == 0
            blocks.add(Residual(channels, width, down, 2 if down else 1))
            channels = width
        net.add(blocks)
    net.add(nn.GlobalAvgPool2D(), nn.Flatten(),
            nn.Dense(num_classes, in_units=512))
    return net


MODELS = {"lenet": lenet, "resnet18": resnet18}
