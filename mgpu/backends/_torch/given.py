"""What objects of PyTorch's own are in mgpu's terms."""
from mgpu.backends import base


class PyTorchGiven(base.Given):
    """Optimisers, schedules and initialisers of PyTorch."""


GIVEN = PyTorchGiven()
