"""What an engine reports inside `mgpu.strict_devices`: copies between
devices, and operations that mix them."""
import threading
from collections import Counter
from collections.abc import Sequence

from mgpu.backends.base import Device

#: where an array lies that is on no device
HOST = "host"
Place = Device | str        # a device, or `HOST`


class CrossDeviceError(RuntimeError):
    """An operation received arrays of several devices."""


class Ledger:
    """Counts what is copied between devices.

    Attributes
    ----------
    copied : collections.Counter
        Bytes by ``(source, destination)``, each a `Device` or ``"host"``.
        Counted are the bytes that arrive. Copies inside one device are not
        counted.
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
        """Count one copy. None stands for the host."""
        pair = source or HOST, target or HOST
        if pair[0] != pair[1] and nbytes:
            with self._lock:
                self.copied[pair] += nbytes

    def refuse(self, operation: str, received: Sequence[
            tuple[Device | None, tuple[int, ...]]]) -> None:
        """Raise CrossDeviceError: `operation` received arrays of several
        devices. `received` holds the device and the shape of each."""
        arrays = [(device or HOST, tuple(shape)) for device, shape in received]
        first = arrays[0][0]
        other = next(place for place, _ in arrays if place != first)
        raise CrossDeviceError(
            f"an operation takes arrays of one device, as on GPUs; "
            f"{operation} received arrays of {first} and {other} ("
            + ", ".join(f"{shape} on {place}" for place, shape in arrays)
            + f"). Copy one first: mgpu.put(x, {first}), or x[:] = v into an "
            "array that is there.")
