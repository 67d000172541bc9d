"""A network on several devices that stands where the network stood."""
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mgpu import distributed
from mgpu.backends import backend_for
from mgpu.backends.device import as_devices
from mgpu.data.examples import BatchSplit
from mgpu.nn.batch_norm import Meeting, SyncBatchNorm
from mgpu.utils.arguments import hinting


@hinting(device_ids="devices=mgpu.list_devices(2), or mgpu.gpu(i) for each i",
         output_device="the first of devices, which joins the outputs",
         dim="batch_axis", ctx="devices")
def DataParallel(net: Any, devices: Sequence[Any], *,
                 batch_norm: str = "per_device",
                 batch_axis: int | Mapping[str, Any] = 0,
                 whole: Sequence[str] = ()) -> Any:
    """Run a network on several devices: one changed line in a script.

    A call splits its arguments by examples, runs forward on all devices at
    the same time, and joins the outputs on the first one. The result's
    backward pass runs on all devices at the same time and adds the sum of
    the gradients to the network's own parameters. Loss, optimizer, schedule,
    clipping and checkpoint stay the framework's.

    Parameters
    ----------
    net : nn.Module or gluon.Block
        Not copied. It stays the only holder of parameters and optimizer
        states; the other devices' copies are overwritten in each pass.
    devices : sequence of Device
        The first one is the network's.
    batch_norm : {"per_device", "sync"}
        Batch statistics of each device's examples, or of the whole batch. The
        network's running statistics are updated by the first device's, and in
        eval mode all devices use them.
    batch_axis : int or dict
        The axis of the examples: one for all arguments, or by argument name.
        ``list`` as an axis stands for a list with an item for each example.
        A torch ``PackedSequence`` is split by its sequences.
    whole : sequence of str
        Names of arguments that every device gets as they are.

    Returns
    -------
    nn.Module
        Its parameters, buffers, names and attributes are those of `net`,
        which is its attribute `module`.

    Raises
    ------
    TypeError
        A network that cannot be copied: ScriptModule, DDP, FSDP. One of
        another backend than was chosen (`mgpu.initialize`).
    ValueError
        A device that is not available. In a call: an argument that may or
        may not have an entry for each example; an output without an axis for
        the examples.
    NotImplementedError
        A backend or an option that is not supported yet.
    """
    if batch_norm not in ("per_device", "sync"):
        raise ValueError("batch_norm is 'per_device' or 'sync'; got "
                         f"{batch_norm!r}.")
    if batch_norm == "sync" and distributed.current().size > 1:
        raise NotImplementedError(
            "DataParallel supports batch_norm='sync' in one process. Use "
            "mgpu.initialize.")
    backend, devices = backend_for(net), as_devices(devices)
    whole = (whole,) if isinstance(whole, str) else tuple(whole)

    def synchronize(active: Sequence[int]) -> Any:
        meeting = Meeting(active)
        return SyncBatchNorm(backend, meeting), partial(meeting.run, backend)
    names = [p.name for p in backend.network(net).inputs()
             if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return backend.data_parallel(
        net, devices, BatchSplit(names, batch_axis, whole, backend),
        partial(DataParallel, devices=devices, batch_norm=batch_norm,
                batch_axis=batch_axis, whole=whole),
        synchronize if batch_norm == "sync" else None)
