"""Names of Gluon on `Replicas` and `Trainer`, and its functions."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mgpu.replicas import Replicas  # noqa: F401
    from mgpu.trainer import Trainer    # noqa: F401


class GluonNames:
    """Methods of a Gluon Block that `mgpu.Replicas` has too."""


class GluonTrainerNames:
    """What a Gluon Trainer takes and has, on `mgpu.Trainer`."""
