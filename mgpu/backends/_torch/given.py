"""What objects of PyTorch's own are in mgpu's terms."""
from typing import Any

from mgpu.backends import base
from mgpu.backends._torch import initial


class PyTorchGiven(base.Given):
    """Optimisers, schedules and initialisers of PyTorch."""

    def initializer(self, x: Any) -> base.GivenInitializer | None:
        return initial.initializer(x)


GIVEN = PyTorchGiven()
