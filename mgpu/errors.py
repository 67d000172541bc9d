"""Errors of work on several devices and processes: one family.

Each message says the rule, what was received and where (rank, device, step,
parameter), and what to do.
"""

__all__ = ["CheckpointCorrupt", "ModelMismatch", "MgpuError", "UnevenWork",
           "WorkerFailed", "WorkerLost"]


class MgpuError(Exception):
    """The base of mgpu's own errors."""


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


class CheckpointCorrupt(MgpuError, ValueError):
    """A file that was saved is damaged, or is another one than it should
    be. Nothing of it was taken over."""
