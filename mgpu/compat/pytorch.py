"""Names of PyTorch on `Replicas` and `Trainer`."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mgpu.replicas import Replicas  # noqa: F401
    from mgpu.trainer import Trainer    # noqa: F401


class TorchNames:
    """Methods of a torch Module that `mgpu.Replicas` has too."""


class TorchTrainerNames:
    """Methods of a torch Optimizer that `mgpu.Trainer` has too."""
