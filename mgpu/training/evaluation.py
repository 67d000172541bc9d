"""Evaluate metrics and accuracy on one or several devices."""
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mgpu import distributed
from mgpu.backends import backend_for, get_backend, using_backend
from mgpu.backends.device import Device, as_device, as_devices
from mgpu.data.inputs import as_rounds, choose, inputs_for, labels_of
from mgpu.data.nested import (as_inputs, as_pair, examples_of, is_empty,
                              is_whole, leaves, rows_of)
from mgpu.data.prefetching import place_of
from mgpu.data.split import split_batch
from mgpu.nn import metrics
from mgpu.nn.losses import check_per_example
from mgpu.training.prediction import devices_of, run_on
from mgpu.training.replicas import Replicas
from mgpu.utils.arguments import batches as as_batches, integer

DataIter = Iterable[tuple[Any, Any]]


def accuracy(y_hat: Any, y: Any) -> int:
    """Count the correct predictions (the book's function).

    Parameters
    ----------
    y_hat : array (n, classes) of scores, or (n,) of class numbers
        Ties go to the first class, on both backends.
    y : array (n,)
        Native or NumPy, of any number dtype. Waits for both.

    Returns
    -------
    int
        The number of correct predictions, not their fraction.

    Raises
    ------
    ValueError
        Other shapes, different numbers of examples, or class numbers such as
        1.5. For scores of a single output pass a comparison:
        ``accuracy(y_hat > 0, y)``.
    TypeError
        An array of the other framework.
    """
    y_hat, y = metrics.on_host(y_hat), metrics.on_host(y)
    shapes = y_hat.shape, y.shape
    if y_hat.ndim == 2 and y_hat.shape[1] > 1:
        y_hat = y_hat.argmax(axis=1)
    for x in (y_hat, y):
        if not x.ndim or x.size != len(x) or len(x) != len(y):
            raise ValueError(
                "accuracy compares scores (n, classes) or class numbers (n,) "
                f"with class numbers (n,); received shapes {shapes[0]} and "
                f"{shapes[1]}. Reshape the arrays.")
    return metrics.count_equal(y_hat, y)


def check_scores(output: Any) -> None:
    """Raise ValueError for an output in training mode that `accuracy` does
    not support. Accepts tuples: in prediction mode they may be one array."""
    shape = tuple(output.shape) if get_backend().is_native(output) else None
    if isinstance(output, Mapping) or dataclasses.is_dataclass(output) \
            or shape is not None and (len(shape) != 2 or shape[1] < 2):
        raise ValueError(
            "test_iter expects a network with one output array of scores (n, "
            f"classes); received an output of shape {shape}, a "
            f"{type(output).__name__}. Pass test_iter=None, and your metric "
            "as evaluate=: see the guide on training.")


def evaluate_accuracy_gpu(net: Any, data_iter: DataIter,
                          device: Any = None) -> float:
    """Compute the accuracy of `net` on one device, in prediction mode.

    Parameters
    ----------
    net : see `evaluate_accuracy_gpus`, or a function
        A function, as ``lambda X: lenet(X, params)``, needs `device`.
    device : device, optional
        Default: the network's first device.
    """
    if device is None:
        device = _places(net, None)[0]
    return evaluate_accuracy_gpus(net, data_iter, device=device)


def evaluate_accuracy_gpus(net: Any, data_iter: DataIter,
                           split_f: Callable = split_batch, *,
                           devices: Any = None, device: Any = None) -> float:
    """Compute the accuracy of `net`, each batch split over its devices.

    Correct predictions are counted as integers over all shards and divided
    once. All devices use the network's parameters and running statistics, so
    the result equals that of one device exactly. In distributed training each
    rank evaluates its own examples, and every rank receives the accuracy over
    all ranks: call it on every rank.

    Parameters
    ----------
    net : Replicas, gluon.Block, torch.nn.Module, or list of callables
        A Block runs on the contexts that it was initialized on; a list
        holds one callable per entry of `devices`.
    data_iter : iterable of (X, y), or of dicts
        A batch may be smaller than the number of devices. A dict, as in
        `train_batch`, has the class numbers under 'labels' or 'label'. Data
        iterators of MXNet are supported.
    split_f : callable
        ``split_f(X, y, devices) -> (X_shards, y_shards)``.
    devices : sequence of devices, optional
        Devices to use; each gets a copy of a torch module.
    device : device, optional
        The only device to use.

    Returns
    -------
    float
        Between 0 and 1. Training modes and running statistics are unchanged.

    Raises
    ------
    ValueError
        `data_iter` is empty; `device` and `devices` are both given; the
        network is not on a device; the numbers of callables and devices
        differ.
    TypeError
        `net` is of another type.
    """
    if device is not None and devices is not None:
        raise ValueError("device= names one device and devices= all; "
                         f"received {device!r} and {devices!r}.")
    return _evaluated(
        "evaluate_accuracy_gpus", net, data_iter, _Correct("accuracy"),
        devices if device is None else [device], split_f)[1]


class _Correct(metrics.EvalMetric):
    """The fraction of correct predictions, by `accuracy`."""

    def measure(self, labels: Any, preds: Any) -> tuple[int, list[int]]:
        return len(labels), [accuracy(preds, labels)]


def _evaluated(name: str, net: Any, data: DataIter,
               metric: metrics.EvalMetric, requested: Any, split_f: Callable,
               batch_axis: int = 0,
               loss: Callable[[Any, Any], Any] | None = None
               ) -> tuple[Any, Any]:
    """Compute ``metric.get()`` over all batches of all ranks, in prediction
    mode."""
    rows, world = 0, distributed.current()
    own = net if isinstance(net, Replicas) else None
    metric.reset()
    with using_backend((own.backend if own else backend_for(net)).name) \
            as backend, world.guard(), backend.scope(recording=False,
                                                     training=False):
        places = _places(net, requested)
        network, functions = _network(net), _functions(net, places)
        place = place_of(data) if world.size > 1 else None
        for X, y in map(as_pair, as_rounds(data)):
            X_shards, y_shards, loss_fn = split_inputs(
                X, y, places, split_f, batch_axis,
                lambda: () if network is None else network.inputs(), loss)
            # One pass for replicas: it updates the copies of all devices.
            outputs = run_on(functions, X_shards) \
                if own is None or places != own.devices else own(X_shards)
            rows += sum(rows_of(labels, batch_axis) or 0
                        for output, labels in zip(outputs, y_shards)
                        if output is not None)
            if loss_fn is not None:
                outputs = backend.parallel([
                    partial(_loss, loss_fn, batch_axis, *pair)
                    for pair in zip(outputs, y_shards)])
            for output in outputs:
                _check_single(output)
            metric.update(y_shards, outputs)
    # over all ranks: each has its own examples
    reports = world.gather(name, [rows, place, own and own.digest()])
    world.batch_taken()     # left by a loop that ended early
    world.check_orders([place for _, place, _ in reports],
                       "evaluate on one order of batches")
    if own is not None:
        own.check_digests([digest for *_, digest in reports])
    if not any(rows for rows, *_ in reports):
        raise ValueError("an evaluation needs at least one example; received "
                         "none. Use a data iterator that can be iterated "
                         "again, such as a list.")
    return metric.get()


def _network(net: Any) -> Any:
    """The network of `Replicas`, or `net` wrapped by its backend; None for
    functions, which run on the caller's devices."""
    if isinstance(net, Replicas):
        return net.network
    try:
        return None if isinstance(net, (list, tuple)) \
            else backend_for(net).network(net)
    except TypeError:
        if callable(net):
            return None
        raise


def _places(net: Any, requested: Any) -> list[Device]:
    """The devices that `net` is evaluated on."""
    if isinstance(net, Replicas):
        return devices_of(net, requested)
    network = _network(net)
    return as_devices(requested) if requested is not None or network is None \
        else [as_device(d) for d in network.devices()]


def _functions(net: Any, places: list[Device]) -> list[Any]:
    """The callable of each device."""
    if isinstance(net, Replicas):
        return [net[net.devices.index(d)] for d in places]
    if isinstance(net, (list, tuple)):
        return [_functions(entry, [place])[0]
                for entry, place in zip(net, places, strict=True)]
    network = _network(net)
    return [net] * len(places) if network is None \
        else network.predictors(places)


def evaluate(replicas: Any, data: DataIter, metric: Any, *,
             loss: Callable[[Any, Any], Any] | None = None,
             split_f: Callable = split_batch, device: Any = None,
             batch_axis: int = 0) -> tuple[Any, Any]:
    """Compute a metric of a network over `data`, in prediction mode.

    In distributed training each rank evaluates its own examples, and every
    rank receives the value over all ranks: call it on every rank.

    Parameters
    ----------
    replicas : Replicas, or another `net` of `evaluate_accuracy_gpus`
    data : iterable of (X, y)
    metric : metric of `mgpu.metrics`, its name, or a list of them
        Reset first: it may be reused.
    loss : callable, optional
        Required by `mgpu.metrics.Loss` alone: ``loss(output, y)`` for the
        examples of each device. The metric is the mean over all examples.
    split_f : callable
        ``split_f(X, y, devices) -> (X_shards, y_shards)``.
    device : device, optional
        The only device to use: see `evaluate_accuracy_gpus`.
    batch_axis : int
        As in `train_batch`.

    Returns
    -------
    (str, float), or lists of them
        What ``metric.get()`` returns. Training modes and running statistics
        are unchanged.

    Raises
    ------
    ValueError
        `data` is empty; the network is not on `device`; errors of
        `EvalMetric.update`.
    TypeError
        `replicas` or `metric` is of another type; `loss` is given without a
        metric of losses, or missing for one.
    """
    metric = metrics.create(metric)
    if metric.of_outputs != (loss is None):
        raise TypeError(
            "loss= is for the metric Loss, and all others take outputs; "
            f"received {metric!r} and loss={loss!r}. Evaluate each kind in a "
            "separate call.")
    return _evaluated(
        "evaluate", replicas, as_batches("data", data), metric,
        None if device is None else [device], split_f, integer(
            "batch_axis", batch_axis, 0), loss)


def _loss(loss: Callable[[Any, Any], Any], batch_axis: int, output: Any,
          labels: Any) -> Any:
    return None if output is None else check_per_example(
        loss(output, labels), *examples_of(labels, batch_axis),
        batch_axis=batch_axis, arrays=[output, labels])


def split_inputs(X: Any, y: Any, devices: Sequence[Device], split_f: Callable,
                 batch_axis: int, parameters: Callable[[], Any],
                 loss: Callable[[Any, Any], Any] | None = None
                 ) -> tuple[list[Any], list[Any], Any]:
    """Split a batch with `split_f`. Returns the inputs and the labels of each
    device, and the loss to call. A shard is None where this rank has no
    examples of a batch that other ranks have. Of a dict the network gets the
    entries that its `parameters` name. The loss gets the whole dict; without
    a loss the entry with the labels is the label."""
    whole = is_whole(X, y)
    if distributed.current().size > 1 and is_empty(as_inputs(X)) \
            and (y is None or is_empty(y)):
        X_shards, y_shards = [None] * len(devices), [None] * len(devices)
    else:
        if split_f is split_batch:
            split_f = partial(split_batch, batch_axis=batch_axis)
        X_shards, y_shards = split_f(X, y, devices)
    if whole:
        choice, label = choose(X, parameters()), None
        if loss is None:
            label = labels_of(X)
            choice.check([label], "the accuracy")
        y_shards = [shard if label is None or shard is None else shard[label]
                    for shard in X_shards]
        X_shards = list(map(choice.take, X_shards))
        loss = loss and choice.checked(loss)
    elif loss is None and isinstance(X, Mapping):
        X_shards = [shard if shard is None else inputs_for(shard, parameters)
                    for shard in X_shards]
    return X_shards, y_shards, loss


def check_device(replicas: Replicas, device: Any) -> None:
    """Raise ValueError for a device that the network is not on, as an
    evaluation on it would."""
    with using_backend(replicas.backend.name):
        devices_of(replicas, [device])


def _check_single(output: Any) -> None:
    if output is not None and not any(x is output for x in leaves(output)):
        raise TypeError(
            "a metric expects one array of scores; received a network whose "
            f"output is a {type(output).__name__} of {len(leaves(output))} "
            "arrays. Select one: pass devices= and a list of functions, "
            "lambda x: replicas[i](x)[0] for device i, or update a metric.")
