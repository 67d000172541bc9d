"""Exceptions of mgpu, all derived from `MgpuError`.

A message states the rule, the value received, its location (rank, device,
step, parameter) and the fix. Wrong arguments raise Python's own ValueError or
TypeError instead.
"""
from typing import Any

__all__ = ["BackendNotAvailable", "CannotRun", "CheckpointCorrupt",
           "CrossDeviceError", "DeviceError", "LabelError", "MatchError",
           "MgpuError", "MissingOperator", "ModelMismatch",
           "NonFiniteGradient", "NonFiniteLoss", "ParityError",
           "ReplicaMismatchError", "StaleGradientError", "UnevenWork",
           "UnreadableParams", "UnreadableSymbol", "WorkerError",
           "WorkerFailed", "WorkerLost"]


class MgpuError(Exception):
    """Base class of mgpu's exceptions."""


# -- distributed training -----------------------------------------------------

class WorkerError(MgpuError, RuntimeError):
    """Another process of the job failed. Raised in all processes."""


class WorkerLost(WorkerError):
    """Another process of the job has exited or does not respond. The process
    group is unusable: exit, and restart the job."""


class WorkerFailed(WorkerError):
    """Another process could not complete a step. The state of this process is
    unchanged."""


class UnevenWork(WorkerError):
    """Processes run different operations, for example different numbers of
    steps."""


class ModelMismatch(WorkerError):
    """Processes differ in parameters, options or package versions."""


# -- a step -------------------------------------------------------------------

class DeviceError(MgpuError, RuntimeError):
    """Work queued on a device failed.

    Devices compute asynchronously, so the failure is raised when the result
    is read, and before gradients are summed: no parameter has changed, and
    the gradients of the batch are invalid.

    Attributes
    ----------
    device : Device
    step : int
        Number of the update that did not take place, counted from 1.
    """

    def __init__(self, message: str, device: Any = None,
                 step: int | None = None):
        super().__init__(message)
        self.device, self.step = device, step


class StaleGradientError(MgpuError, RuntimeError):
    """The gradient of a parameter has not been computed since the last
    step."""


class NonFiniteGradient(MgpuError, FloatingPointError):
    """A gradient, summed over all devices, is NaN or infinite. No parameter
    has changed; the gradients of the batch are invalid."""


class NonFiniteLoss(MgpuError, FloatingPointError):
    """A loss is NaN or infinite; or a parameter, checked after each epoch.

    Attributes
    ----------
    history : History
        Results of the completed epochs. `loss_per_step` ends with the loss
        that caused the error.
    """

    history: Any


class LabelError(MgpuError, ValueError):
    """A label is not a valid class number.

    Attributes
    ----------
    row : int
        Index of the example in the labels passed to the loss. If
        `mgpu.train_batch` raises: its index in the global batch.
    """

    def __init__(self, label: Any, row: int, classes: int):
        super().__init__(label, row, classes)
        self.label, self.row, self.classes = label, row, classes

    def __str__(self) -> str:
        return (f"labels must be class numbers 0 to {self.classes - 1}; "
                f"received {self.label} in row {self.row}. Check the data, or "
                "give the network as many outputs as there are classes.")


class ReplicaMismatchError(MgpuError, RuntimeError):
    """Network parameters differ between processes."""


# -- backends -----------------------------------------------------------------

class BackendNotAvailable(MgpuError, ImportError):
    """The framework of the requested backend cannot be imported."""


class CrossDeviceError(MgpuError, RuntimeError):
    """An operation received arrays on different devices."""


# -- files --------------------------------------------------------------------

class CheckpointCorrupt(MgpuError, ValueError):
    """A checkpoint is corrupt or has another format. Nothing was loaded."""


class UnreadableParams(MgpuError, ValueError):
    """A parameter file is corrupt or was not written by MXNet."""


class UnreadableSymbol(MgpuError, ValueError):
    """A symbol file is corrupt or was not exported by MXNet."""


class MissingOperator(MgpuError, NotImplementedError):
    """A conversion rule does not support an operator's attributes."""


# -- comparisons --------------------------------------------------------------

class MatchError(MgpuError, ValueError):
    """The parameters of two networks have no match, or several.

    Attributes
    ----------
    candidates : dict of str -> list of str
        Candidates in model b for each unmatched parameter of model a; the
        key ``""`` holds the other unmatched parameters of model b.
    """

    def __init__(self, message: str, candidates: dict[str, list[str]]):
        super().__init__(message)
        self.candidates = candidates


class CannotRun(MgpuError, RuntimeError):
    """The operation requires a network, not a recorded run."""


class ParityError(MgpuError, AssertionError):
    """Two networks do not train identically.

    Attributes
    ----------
    parity_result : mgpu.parity.Result
    """

    def __init__(self, result: Any):
        super().__init__(str(result))
        self.parity_result = result
