"""Data parallelism behind the network's own interface."""
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mgpu import distributed
from mgpu.backends import backend_for
from mgpu.backends.device import as_devices
from mgpu.data.examples import BatchSplit
from mgpu.nn.batch_norm import DeviceThreads, SyncBatchNorm
from mgpu.utils.arguments import hinting


@hinting(device_ids="devices=mgpu.list_devices(2), or mgpu.gpu(i) for each i",
         output_device="the first of devices, which joins the outputs",
         dim="batch_axis", ctx="devices")
def DataParallel(net: Any, devices: Sequence[Any], *,
                 batch_norm: str = "per_device",
                 batch_axis: int | Mapping[str, Any] | None = None,
                 whole: Sequence[str] = ()) -> Any:
    """Run a network on several devices: one changed line in a script.

    A call splits its arguments along the batch dimension, runs forward on all
    devices in parallel, and concatenates the outputs on the first device. The
    backward pass runs on all devices in parallel and accumulates the summed
    gradients into the network's own parameters. Loss, optimizer, schedule,
    clipping and checkpoints remain the framework's.

    Parameters
    ----------
    net : nn.Module or gluon.Block
        Not copied: parameters and optimizer states exist once. Each forward
        pass overwrites the other devices' copies.
    devices : sequence of Device
        The network is on the first one.
    batch_norm : {"per_device", "sync"}
        Normalize by the statistics of each device's examples, or of the whole
        batch. The first device updates the running statistics, and in eval
        mode all devices use them.
    batch_axis : int or dict, optional
        The batch dimension: one for all arguments, or by argument name.
        Default: 0. A network with recurrent layers that have inputs (time,
        batch, features), the default of both frameworks, needs it.
        ``list`` stands for a list with one item per example. A torch
        ``PackedSequence`` is split by sequences.
    whole : sequence of str
        Names of arguments that are passed to every device unsplit.

    Returns
    -------
    nn.Module
        Its parameters, buffers, names and attributes are those of `net`,
        which is its attribute `module`.

    Raises
    ------
    TypeError
        The network cannot be copied (ScriptModule, DDP, FSDP), or belongs to
        another backend than the selected one (`mgpu.initialize`).
    ValueError
        A device is not available. In a call: whether an argument has a batch
        dimension is ambiguous; an output has no batch dimension.
    NotImplementedError
        The backend or the option is not supported.
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
        threads = DeviceThreads(active)
        return SyncBatchNorm(backend, threads), partial(threads.run, backend)
    return backend.data_parallel(
        net, devices, BatchSplit(
            backend.network(net).inputs(), batch_axis, whole, backend,
            backend.batch_arrays.time_major(net)),
        partial(DataParallel, devices=devices, batch_norm=batch_norm,
                batch_axis=batch_axis, whole=whole),
        synchronize if batch_norm == "sync" else None)
