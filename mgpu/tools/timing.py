"""Clocks that wait for the devices, and running sums.

A backend may return before its work is done (MXNet always, PyTorch on a
GPU). A clock that is read then measures the queueing, not the work: `Timer`
and `Benchmark` wait for the given devices before they read it.
"""
import time
from itertools import accumulate
from typing import Any

import numpy as np

from mgpu.backends import get_backend
from mgpu.backends.device import as_devices, try_all_gpus
from mgpu.utils.arguments import integer


def synchronize(devices: Any = None) -> None:
    """Return when all work queued on all of `devices` is done.

    Parameters
    ----------
    devices : one device, or a sequence of devices, optional
        Whatever `mgpu.backends.device.as_devices` takes. None: all GPUs, or,
        where there is no GPU, the CPU with all its logical devices.

    Raises
    ------
    ValueError
        An empty list, the same device twice, a GPU that does not exist.
    TypeError
        Something that is not a device.
    Exception
        The error of work that failed after it was queued, as the backend
        raises it.

    Notes
    -----
    ``torch.cuda.synchronize()`` without an argument waits for the current
    GPU only; this waits for each one that is named. MXNet can wait for one
    array or for everything, so there it waits for the other devices too.
    """
    found = try_all_gpus() if devices is None else as_devices(devices)
    get_backend().synchronize(found)


def waitall() -> None:
    """Gluon's word for `synchronize` without an argument; raises as that."""
    synchronize()


def number(x: Any) -> float:
    """`x` as a Python float.

    Parameters
    ----------
    x : number, or an array of one element
        One of the backend is copied to the host, which waits for it.

    Raises
    ------
    ValueError
        An array of another size.
    TypeError
        Something that is not a number.
    """
    shape = tuple(getattr(x, "shape", ()))
    if any(n != 1 for n in shape):
        raise ValueError(f"expected one number; received an array of shape "
                         f"{shape}. Sum it, or take one element.")
    if isinstance(x, np.ndarray):
        return float(x.reshape(()))
    try:
        return float(x)
    except TypeError:       # MXNet's legacy arrays do not convert themselves
        if not get_backend().is_native(x):
            raise
        return number(get_backend().to_numpy(x))


class Timer:
    """A stopwatch over laps; it runs from the moment that it is made.

    Parameters
    ----------
    devices : one device, or a sequence of devices, optional
        Waited for (`synchronize`) at every start and stop, before the clock
        is read. None: the clock is read at once.

    Attributes
    ----------
    times : list of float
        The laps, in seconds (`time.perf_counter`).

    Raises
    ------
    ValueError, TypeError
        As `synchronize` does for `devices`.
    """

    def __init__(self, devices: Any = None) -> None:
        self.devices = None if devices is None else as_devices(devices)
        self.times: list[float] = []
        self.start()

    def _now(self) -> float:
        if self.devices is not None:
            synchronize(self.devices)
        return time.perf_counter()

    def start(self) -> None:
        """Begin a lap; one that is running is forgotten."""
        self._began = self._now()

    def stop(self) -> float:
        """Note the lap, from the last start to now, and return its seconds.
        A second stop notes a second lap from that same start."""
        self.times.append(self._now() - self._began)
        return self.times[-1]

    def avg(self) -> float:
        """Seconds per lap; ValueError before the first lap."""
        if not self.times:
            raise ValueError("an average needs a lap; received none. Call "
                             "stop() first.")
        return sum(self.times) / len(self.times)

    def sum(self) -> float:
        """Seconds of all laps together; 0.0 before the first."""
        return float(sum(self.times))

    def cumsum(self) -> list[float]:
        """After each lap the seconds so far; empty before the first."""
        return list(accumulate(self.times))


class Benchmark:
    """Time a ``with`` block and print, for example, ``GPU1 time: 0.4600 sec``.

    Parameters
    ----------
    description : str
        What was timed.
    devices : one device, or a sequence of devices, optional
        Waited for on entry and on exit, so that the time is that of the
        work begun inside, all of it and nothing else. None: no wait.

    Attributes
    ----------
    seconds : float or None
        How long the block took; None before its end, and after a block that
        raised: nothing is printed then, and the exception goes through.

    Raises
    ------
    ValueError, TypeError
        As `synchronize` does for `devices`.
    """

    def __init__(self, description: str = "Done", devices: Any = None) -> None:
        self.description = description
        self.devices = None if devices is None else as_devices(devices)
        self.seconds: float | None = None

    def __enter__(self) -> "Benchmark":
        self.seconds = None
        self._timer = Timer(self.devices)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.seconds = self._timer.stop()
            print(f"{self.description}: {self.seconds:.4f} sec", flush=True)


class Accumulator:
    """`n` running sums, read by index: ``Accumulator(2)[0]``.

    Parameters
    ----------
    n : int
        At least 1.

    Raises
    ------
    ValueError
        Another `n`.
    """

    def __init__(self, n: int) -> None:
        self._sums = [0.0] * integer("the number of sums", n, 1)

    def add(self, *values: Any) -> None:
        """Add one value to each sum.

        Parameters
        ----------
        *values : numbers, or arrays of one element
            Whatever `number` takes. An array of the backend is waited for.

        Raises
        ------
        ValueError
            Not one value per sum; nothing is added.
        TypeError
            A value that is not a number; nothing is added.
        """
        if len(values) != len(self):
            raise ValueError(
                f"add needs one value per sum; received {len(values)} for "
                f"{len(self)}. Pass {len(self)}, or make an "
                f"Accumulator({len(values)}).")
        self._sums = [s + number(v) for s, v in zip(self._sums, values)]

    def reset(self) -> None:
        """All sums to zero."""
        self._sums = [0.0] * len(self)

    def __getitem__(self, i: int) -> float:
        return self._sums[i]

    def __len__(self) -> int:
        return len(self._sums)

    def __repr__(self) -> str:
        return f"Accumulator({', '.join(map(str, self._sums))})"
