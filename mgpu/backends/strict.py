"""Logical CPU devices that are as strict as GPUs.

Logical CPU devices share one memory, so a backend lets through what would
stop a program on GPUs: torch has one CPU device only, and MXNet's CPU
contexts may be mixed. `strict_devices` refuses it on any machine.
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
    """Inside the block, logical CPU devices refuse what GPUs would.

    An operation on arrays of two devices, a replica that shares another
    one's memory, an array that was handed to a device without being copied
    there: on logical CPU devices these go unnoticed, and inside this block
    they are errors. Results stay what they are, to the last bit but for
    optimizers that take roots (NumPy rounds them otherwise than torch);
    operations get slower, and it is meant for tests. The environment
    variable ``MGPU_STRICT_DEVICES=1`` turns it on for the whole of a process.

    Legal are: `mgpu.put` and what is built on it (`split_and_load`, the
    collectives, `initialize`), and ``x[:] = v``, ``x.copy_(v)`` (torch),
    ``v.copyto(x)`` (MXNet) from one device to another.

    Holds for the backend in use and for every other one that is loaded, in
    the calling thread and in what `mgpu.parallel` and the replicas run for
    it, until the end of the block, also after an error. Threads that the
    user starts are not covered. Blocks may be nested; each counts what is
    copied inside it.

    Yields
    ------
    Ledger
        ``ledger.copied[source, destination]`` counts bytes; where an array
        came from, or went to, the host, that is ``"host"``.

    Raises
    ------
    CrossDeviceError
        Inside the block, by the operation: names the two devices. A
        `RuntimeError`, as torch raises on GPUs. (A replica that is called
        with another device's array raises its ValueError, as on GPUs.)

    Notes
    -----
    *torch.* A memory block belongs to the device that `put`, or a replica,
    gave it; views share it, results inherit it. Arrays that come from
    elsewhere (``torch.zeros`` in a forward pass, where ``x.device`` says
    ``cpu``; anything older than the block) belong to the first device
    whose arrays they meet in an operation. 0-dim arrays of the host may be
    combined with anything and stay on the host, as with CUDA; so do index
    arrays. The backward pass is checked too. Not seen: memory that leaves
    torch and comes back (``torch.from_numpy(x.numpy())``), two arrays of
    unknown origin; ``x.cpu()`` is no copy where `x` is on a CPU, so the
    result still belongs to its logical device: use `mgpu.to_numpy`.

    *MXNet.* Arrays have contexts; every call into the library from the
    covered threads is checked (``mx.nd``, ``mx.np``, hybridized networks:
    there the inputs and parameters of the whole). Not seen, because no
    Python runs there: the operations of a backward pass, and the inside of
    a hybridized network; their copies are not counted. Gluon's own
    ``initialize`` fills parameters on ``cpu(0)`` and copies them; those
    bytes are counted.
    """
    registry.get_backend()      # loads it
    ledger = Ledger()
    with contextlib.ExitStack() as stack:
        for backend in registry.loaded_backends():
            stack.enter_context(backend.strict(ledger))
        yield ledger
