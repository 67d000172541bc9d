"""Names of PyTorch on `Replicas` and `Trainer`."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mgpu.replicas import Replicas  # noqa: F401
    from mgpu.trainer import Trainer    # noqa: F401


class TorchNames:
    """Methods of a torch Module that `mgpu.Replicas` has too."""


class TorchTrainerNames:
    """Methods of a torch Optimizer that `mgpu.Trainer` has too."""

    if TYPE_CHECKING:
        replicas: Replicas

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`Replicas.zero_grad`: every gradient is zero on all devices, and
        what has been cleared is not applied. Only ``grad_req="add"`` needs
        it. `set_to_none` is torch's, and changes nothing: gradients stay
        arrays."""
        self.replicas.zero_grad()
