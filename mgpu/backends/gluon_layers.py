"""Layers of PyTorch with Gluon's arithmetic, for source that
`mgpu.gluon_source` has written. They need torch."""
from mgpu.backends._torch.gluon.layers import GluonAvgPool2d, GluonMaxPool2d
from mgpu.backends._torch.gluonize import GluonBatchNorm

__all__ = ["GluonAvgPool2d", "GluonBatchNorm", "GluonMaxPool2d"]
