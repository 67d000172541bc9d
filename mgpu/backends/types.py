"""Types that all backends share."""
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

Array = Any     # mx.np.ndarray, mx.nd.NDArray or torch.Tensor
ContextManager = AbstractContextManager[None]


class Device(NamedTuple):
    """A device. ``Device("gpu", 1)`` is the second GPU.

    Its repr is that of a Gluon context, ``gpu(1)``. Devices are hashable.
    """

    kind: str               # "cpu" or "gpu"
    index: int = 0          # type: ignore[assignment]  # tuple has a method

    def __repr__(self) -> str:
        return f"{self.kind}({self.index})"
