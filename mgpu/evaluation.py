"""Accuracy by integer counts, on one or on all devices."""
from functools import partial
from typing import Any, Callable, Iterable, List, Optional, Tuple

import numpy as np

from mgpu.backends import get_backend, using_backend
from mgpu.device import Device, as_device, as_devices
from mgpu.replicas import Replicas
from mgpu.split import rows_of, split_batch

DataIter = Iterable[Tuple[Any, Any]]


def _host(x: Any) -> np.ndarray:
    backend = get_backend()
    return backend.to_numpy(x) if backend.is_native(x) else np.asarray(x)


def accuracy(y_hat: Any, y: Any) -> int:
    """The *number* of correct predictions (the text's function).

    Parameters
    ----------
    y_hat : array (n, classes) of scores, or (n,) of class numbers
        Of equal scores the first class wins, on both engines.
    y : array (n,)
        Native or NumPy, of any number dtype. Waits for both.
    """
    y_hat, y = _host(y_hat), _host(y)
    if len(y_hat) != len(y):
        raise ValueError(f"y_hat and y must have equally many rows; received "
                         f"{len(y_hat)} and {len(y)}.")
    if y_hat.ndim > 1 and y_hat.shape[1] > 1:
        y_hat = y_hat.argmax(axis=1)
    return int((y_hat.reshape(len(y), -1) == y.reshape(len(y), -1)
                ).all(axis=1).sum())


def evaluate_accuracy_gpu(net: Any, data_iter: DataIter,
                          device: Any = None) -> float:
    """The accuracy of `net` on one device, in prediction mode.

    Parameters
    ----------
    net : see `evaluate_accuracy_gpus`
    device : device, optional
        Default: the first that the network lives on.
    """
    if device is None:
        device = _devices_of(net, None)[0]
    return evaluate_accuracy_gpus(net, data_iter, device=device)


def evaluate_accuracy_gpus(net: Any, data_iter: DataIter,
                           split_f: Callable = split_batch, *,
                           devices: Any = None, device: Any = None) -> float:
    """The accuracy of `net`, each batch split over its devices.

    Correct predictions are counted as integers over all shards and divided
    once, so the result is that of one device, exactly, when the replicas
    hold equal state (with ``batch_norm="per_device"`` they do not: pass
    ``device=``).

    Parameters
    ----------
    net : Replicas, gluon.Block, torch.nn.Module, or list of callables
        A Block runs on the contexts that it was initialised on; a list
        holds one callable per entry of `devices`.
    data_iter : iterable of (X, y)
        Batches of any size, also smaller than the number of devices.
    split_f : callable
        ``split_f(X, y, devices) -> (X_shards, y_shards)``.
    devices : sequence of devices, optional
        Use these; for a torch module each gets a copy of it.
    device : device, optional
        Use this one alone.

    Returns
    -------
    float
        Between 0 and 1. Training flags and statistics are left as they were.

    Raises
    ------
    ValueError
        No data; `device` and `devices` together; a device that the network
        is not on.
    """
    if device is not None and devices is not None:
        raise ValueError("give device= or devices=, not both.")
    name = net.backend.name if isinstance(net, Replicas) \
        else get_backend().name
    with using_backend(name) as backend:
        wanted = device if device is not None else devices
        places = _devices_of(net, wanted)
        runners = _runners(net, places)
        correct = total = 0
        with backend.scope(recording=False, training=False):
            for X, y in data_iter:
                X_shards, y_shards = split_f(X, y, places)
                outputs = backend.parallel([
                    partial(_run, run, shard)
                    for run, shard in zip(runners, X_shards)])
                for output, labels in zip(outputs, y_shards):
                    if output is not None:
                        correct += accuracy(output, labels)
                        total += rows_of(labels) or 0
    if not total:
        raise ValueError("the data iterator gave no examples; an accuracy "
                         "needs at least one.")
    return correct / total


def _run(run: Callable[[Any], Any], shard: Any) -> Any:
    return run(shard) if rows_of(shard) else None


def _devices_of(net: Any, wanted: Any) -> List[Device]:
    if wanted is not None:
        return as_devices(wanted)
    if isinstance(net, Replicas):
        return net.devices
    if isinstance(net, (list, tuple)):
        raise ValueError("a list of callables needs devices=, one for each.")
    return [as_device(d) for d in get_backend().network(net).devices()]


def _runners(net: Any, places: List[Device]) -> List[Callable[[Any], Any]]:
    if isinstance(net, Replicas):
        absent = [d for d in places if d not in net.devices]
        if absent:
            raise ValueError(f"the network is on {net.devices}; received "
                             f"{absent}. Evaluate where it is.")
        return [net[net.devices.index(d)] for d in places]
    if isinstance(net, (list, tuple)):
        if len(net) != len(places):
            raise ValueError(f"one callable per device is wanted; received "
                             f"{len(net)} for {len(places)} devices.")
        return list(net)
    return get_backend().network(net).predictors(places)
