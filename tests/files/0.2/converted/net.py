"""net, converted from Gluon."""

import torch

# Gluon's running variance is biased; PyTorch's is n / (n - 1) times as large.
from mgpu.backends.gluon_layers import GluonBatchNorm
from safetensors.torch import load_file
from torch import nn


class Net(nn.Module):
    """net."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            GluonBatchNorm(4, eps=0.0009765625),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.output = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.features(x))


def load(path: str) -> Net:
    """The network with the weights in a file."""
    net = Net()
    net.load_state_dict(load_file(path), assign=True)
    return net
