"""All of mgpu's own errors: one family, under `MgpuError`.

Each message says the rule, what was received and where (rank, device, step,
parameter), and what to do. An error of Python's own for a wrong argument
(ValueError, TypeError) is none of them.
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
    """The base of mgpu's own errors."""


# -- several processes --------------------------------------------------------

class WorkerError(MgpuError, RuntimeError):
    """Another process of the job is the cause. All processes raise."""


class WorkerLost(WorkerError):
    """Another process of the job has ended, or does not answer. No further
    work with it is possible: leave, and start the job again."""


class WorkerFailed(WorkerError):
    """Another process could not do its part of a step. Nothing has changed
    in this one."""


class UnevenWork(WorkerError):
    """Processes do different work at the same time, such as different
    numbers of steps."""


class ModelMismatch(WorkerError):
    """Processes hold other parameters, options or versions of packages."""


# -- a step -------------------------------------------------------------------

class DeviceError(MgpuError, RuntimeError):
    """A device could not do what was queued on it, which is known only when
    its result is read. Raised before gradients are summed: no parameter has
    changed, and the gradients of the batch are void.

    Attributes
    ----------
    device : Device
    step : int
        The number of the update that was to come, from 1.
    """

    def __init__(self, message: str, device: Any = None,
                 step: int | None = None):
        super().__init__(message)
        self.device, self.step = device, step


class StaleGradientError(MgpuError, RuntimeError):
    """No backward pass has written a parameter's gradient since the last
    step."""


class NonFiniteGradient(MgpuError, FloatingPointError):
    """A gradient, summed over all devices, is NaN or infinite. No parameter
    has changed, and the gradients of the batch are void."""


class NonFiniteLoss(MgpuError, FloatingPointError):
    """A loss, or after an epoch a weight, is NaN or infinite.

    Attributes
    ----------
    history : History
        Of the finished epochs; where it was a loss, `loss_per_step` ends with
        it.
    """

    history: Any


class LabelError(MgpuError, ValueError):
    """A label that is not the number of a class.

    Attributes
    ----------
    row : int
        Of the labels that a loss was given; from `mgpu.train_batch`, of the
        whole batch, its shards in the order of the devices.
    """

    def __init__(self, label: Any, row: int, classes: int):
        super().__init__(label, row, classes)
        self.label, self.row, self.classes = label, row, classes

    def __str__(self) -> str:
        return (f"labels must be class numbers 0 to {self.classes - 1}; "
                f"received {self.label} in row {self.row}. Check the data, or "
                "give the network as many outputs as there are classes.")


class ReplicaMismatchError(MgpuError, RuntimeError):
    """Processes that should hold the same network do not."""


# -- backends -----------------------------------------------------------------

class BackendNotAvailable(MgpuError, ImportError):
    """A backend was asked for and its framework cannot be loaded."""


class CrossDeviceError(MgpuError, RuntimeError):
    """An operation received arrays of several devices."""


# -- files --------------------------------------------------------------------

class CheckpointCorrupt(MgpuError, ValueError):
    """A file that was saved is damaged, or is another one than it should
    be. Nothing of it was taken over."""


class UnreadableParams(MgpuError, ValueError):
    """A file that is not what MXNet writes, or is damaged."""


class UnreadableSymbol(MgpuError, ValueError):
    """A file that is not what MXNet exports, or is damaged."""


class MissingOperator(MgpuError, NotImplementedError):
    """What a rule raises for attributes that it does not know."""


# -- comparisons --------------------------------------------------------------

class MatchError(MgpuError, ValueError):
    """The parameters of two networks cannot be matched, or in several ways.

    Attributes
    ----------
    candidates : dict of str -> list of str
        For each parameter of `a` without a partner, those of `b` that it
        could be; under ``""`` those of `b` that are left.
    """

    def __init__(self, message: str, candidates: dict[str, list[str]]):
        super().__init__(message)
        self.candidates = candidates


class CannotRun(MgpuError, RuntimeError):
    """A recorded run was asked for what only a network can compute."""


class ParityError(MgpuError, AssertionError):
    """Two networks do not train the same.

    Attributes
    ----------
    parity_result : mgpu.parity.Result
    """

    def __init__(self, result: Any):
        super().__init__(str(result))
        self.parity_result = result
