"""The book's networks as torch modules: see `mgpu.models`."""
import torch
from torch import nn

# Gluon's arithmetic also outside a replica, in a plain PyTorch loop.
from mgpu.backends._torch.gluonize import GluonBatchNorm2d as BatchNorm2d


class Residual(nn.Module):
    """A residual block: conv 3x3 - BN - ReLU - conv 3x3 - BN, plus the input
    (through a 1x1 convolution where `strides` or channels change), ReLU."""

    def __init__(self, in_channels, channels, use_1x1conv=False, strides=1):
        super().__init__()
        # The order of attributes is that of parameters, as in Gluon's block.
        self.conv1 = nn.Conv2d(in_channels, channels, 3, strides, 1)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1)
        self.conv3 = nn.Conv2d(in_channels, channels, 1, strides) \
            if use_1x1conv else None
        self.bn1 = BatchNorm2d(channels)
        self.bn2 = BatchNorm2d(channels)

    def forward(self, x):
        """The block's output."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.conv3 is not None:
            x = self.conv3(x)
        return torch.relu(y + x)


def lenet(num_classes, in_channels):
    """`mgpu.models.lenet` as layers."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 20, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, num_classes))


def resnet18(num_classes, in_channels):
    """See `mgpu.models.resnet18`."""
    layers = [nn.Conv2d(in_channels, 64, 3, 1, 1), BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for number, width in enumerate((64, 128, 256, 512)):
        blocks = []
        for block in range(2):
            down = number > 0 and block == 0
            blocks.append(Residual(channels, width, down, 2 if down else 1))
            channels = width
        layers.append(nn.Sequential(*blocks))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(512, num_classes))


MODELS = {"lenet": lenet, "resnet18": resnet18}
