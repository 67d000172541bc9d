"""Names of PyTorch on `Replicas` and `Trainer`."""
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mgpu.replicas import Replicas  # noqa: F401
    from mgpu.trainer import Trainer    # noqa: F401


class TorchNames:
    """Methods of a torch Module that `mgpu.Replicas` has too."""


class TorchTrainerNames:
    """Methods of a torch Optimizer that `mgpu.Trainer` has too."""

    if TYPE_CHECKING:
        replicas: Replicas
        trains: Callable[[Any], bool]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`Replicas.zero_grad`: every gradient is zero on all devices, and
        what has been cleared is not applied. Only ``grad_req="add"`` needs
        it. `set_to_none` is torch's, and changes nothing: gradients stay
        arrays. ValueError where another trainer's gradients grow: torch's
        clears those of its own parameters."""
        kept = [p.name for p in self.replicas.params()
                if p.grad_req == "add" and not self.trains(p)]
        if kept:
            raise ValueError(
                "zero_grad is of all gradients of the network; received "
                f"grad_req='add' of {kept[0]!r}, which this trainer does not "
                "move. Call Replicas.zero_grad(), or p.zero_grad() of each "
                "parameter.")
        self.replicas.zero_grad()
