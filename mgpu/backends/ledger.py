"""Records of `mgpu.strict_devices`: copies between devices, and operations
that mix devices."""
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from mgpu.backends.types import Device
from mgpu.errors import CrossDeviceError

#: location of arrays that are on no device
HOST = "host"
Place = Device | str        # a device, or `HOST`


class Ledger:
    """Counts the bytes copied between devices.

    Attributes
    ----------
    copied : collections.Counter
        Bytes received, by ``(source, destination)``, each a `Device` or
        ``"host"``. Copies within a device are not counted.
    """

    def __init__(self) -> None:
        self.copied: Counter[tuple[Place, Place]] = Counter()
        self._lock = threading.Lock()       # devices work in threads

    def __repr__(self) -> str:
        return "; ".join(f"{source} -> {target}: {n} bytes" for
                         (source, target), n in self.copied.items()) \
            or "nothing copied"

    def copy(self, source: Device | None, target: Device | None,
             nbytes: int) -> None:
        """Count a copy of `nbytes`. None: the host."""
        pair = source or HOST, target or HOST
        if pair[0] != pair[1] and nbytes:
            with self._lock:
                self.copied[pair] += nbytes

    def reject(self, operation: str, received: Sequence[
            tuple[Device | None, tuple[int, ...]]]) -> None:
        """Raise CrossDeviceError for `operation`. `received` holds the device
        and shape of each argument."""
        arrays = [(device or HOST, tuple(shape)) for device, shape in received]
        first = arrays[0][0]
        other = next(place for place, _ in arrays if place != first)
        raise CrossDeviceError(
            "an operation takes arrays of one device, as on GPUs; "
            f"{operation} received arrays of {first} and {other} ("
            + ", ".join(f"{shape} on {place}" for place, shape in arrays)
            + f"). Copy one first: mgpu.put(x, {first}), or x[:] = v into an "
            "array that is there.")


class Ledgers:
    """The active ledgers of a backend in the current context."""

    def __init__(self) -> None:
        self._context: ContextVar[tuple[Ledger, ...]] = ContextVar(
            "mgpu_ledgers", default=())
        self._process: list[Ledger] = []

    def active(self) -> tuple[Ledger, ...]:
        """The ledgers of the process, then those of enclosing blocks."""
        return (*self._process, *self._context.get())

    def add(self, ledger: Ledger) -> None:
        """Report to `ledger` permanently, in all threads."""
        self._process.append(ledger)

    @contextlib.contextmanager
    def using(self, ledger: Ledger) -> Iterator[None]:
        """Context manager that reports to `ledger`."""
        token = self._context.set((*self._context.get(), ledger))
        try:
            yield
        finally:
            self._context.reset(token)
