"""What objects of MXNet's own are in mgpu's terms."""
from mgpu.backends import base


class MXNetGiven(base.Given):
    """Optimisers, schedules and initialisers of MXNet."""


GIVEN = MXNetGiven()
