"""Device checks for logical CPU devices.

Logical CPU devices share memory, so operations that mix them do not raise, as
they would on GPUs: torch has one CPU device, and MXNet's CPU contexts can be
mixed. Inside `strict_devices` they raise.
"""
import contextlib
from collections.abc import Iterator

from mgpu import backends as registry
from mgpu.backends.ledger import HOST, CrossDeviceError, Ledger, Place
from mgpu.utils.environment import flag

__all__ = ["HOST", "CrossDeviceError", "Ledger", "Place", "flag",
           "strict_devices"]


@contextlib.contextmanager
def strict_devices() -> Iterator[Ledger]:
    """Context manager that raises for operations across logical devices.

    Inside the block, operations on arrays of different devices, replicas that
    share memory, and arrays used on a device without a copy raise, as on
    GPUs. Results are bit-identical, except for optimizers with square roots,
    which NumPy and torch round differently. Operations are slower; use it in
    tests. ``MGPU_STRICT_DEVICES=1`` enables it for a whole process.

    Allowed are `mgpu.put` and functions that use it (`split_and_load`, the
    collectives, `initialize`), and ``x[:] = v``, ``x.copy_(v)`` (torch) and
    ``v.copyto(x)`` (MXNet) between devices.

    The block applies to all loaded backends, in the calling thread and in
    `mgpu.parallel` and replicas called by it. Threads started by user code
    are not checked. Blocks may be nested; each counts its copies.

    Yields
    ------
    Ledger
        ``ledger.copied[source, destination]``: bytes copied between devices.
        The host is ``"host"``.

    Raises
    ------
    CrossDeviceError
        Raised in the block by an operation on arrays of two devices; a
        `RuntimeError`, as torch raises on GPUs. A replica called with an
        array of another device raises ValueError, as on GPUs.

    Notes
    -----
    *torch.* A memory block belongs to the device of the `put` or replica that
    allocated it; views share the device, results inherit it. Other arrays
    (``torch.zeros`` in a forward pass, arrays created before the block)
    belong to the device of the first operation that combines them with arrays
    of a device. 0-dim host arrays and index arrays may be combined with any
    device and stay on the host, as with CUDA. The backward pass is checked.
    Not detected: memory that is converted to another library and back
    (``torch.from_numpy(x.numpy())``), and operations on two arrays without a
    device. ``x.cpu()`` does not copy a CPU array, so the result belongs to
    the logical device of `x`; use `mgpu.to_numpy`.

    *MXNet.* Every call into the library from the checked threads is checked
    (``mx.nd``, ``mx.np``, and the inputs and parameters of hybridized
    networks). Operations of the backward pass and inside hybridized networks
    are not checked, and their copies not counted, because they run outside of
    Python. ``initialize`` of Gluon fills parameters on ``cpu(0)`` and copies
    them; those bytes are counted.
    """
    registry.get_backend()      # loads it
    ledger = Ledger()
    with contextlib.ExitStack() as stack:
        for backend in registry.loaded_backends():
            stack.enter_context(backend.strict(ledger))
        yield ledger
