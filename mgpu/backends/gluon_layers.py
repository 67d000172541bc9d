"""Layers of PyTorch with Gluon's arithmetic, for source that
`mgpu.gluon_source` has written: `GluonBatchNorm`, `GluonMaxPool2d`,
`GluonAvgPool2d`. They need torch, which this module loads with the first."""
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "GluonBatchNorm":
        from mgpu.backends._torch.gluonize import GluonBatchNorm
        return GluonBatchNorm
    if name in ("GluonAvgPool2d", "GluonMaxPool2d"):
        from mgpu.backends._torch.gluon import layers
        return getattr(layers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
