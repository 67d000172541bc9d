"""Accuracy by integer counts, on one or on all devices."""
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
    """The *number* of correct predictions (the book's function).

    Parameters
    ----------
    y_hat : array (n, classes) of scores, or (n,) of class numbers
        Of equal scores the first class wins, on both backends.
    y : array (n,)
        Native or NumPy, of any number dtype. Waits for both.

    Raises
    ------
    ValueError
        Other shapes, different numbers of rows, labels such as 1.5, or
        outputs such as 1.5 in the place of class numbers: scores of a single
        output are none. Threshold those: ``accuracy(y_hat > 0, y)``.
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
                f"{shapes[1]}. Cut or reshape them.")
    return metrics.count_equal(y_hat, y)


def check_scores(output: Any) -> None:
    """Refuse what a network in training gives, if `accuracy` would refuse it
    in the end. A tuple may be one array in prediction."""
    shape = tuple(output.shape) if get_backend().is_native(output) else None
    if isinstance(output, Mapping) or dataclasses.is_dataclass(output) \
            or shape is not None and (len(shape) != 2 or shape[1] < 2):
        raise ValueError(
            "the accuracy on test_iter is that of one array of scores (n, "
            f"classes); received an output of shape {shape}, a "
            f"{type(output).__name__}. Pass test_iter=None, and a measure of "
            "your own as evaluate=: see the guide on training.")


def evaluate_accuracy_gpu(net: Any, data_iter: DataIter,
                          device: Any = None) -> float:
    """The accuracy of `net` on one device, in prediction mode.

    Parameters
    ----------
    net : see `evaluate_accuracy_gpus`, or a function
        A function, as ``lambda X: lenet(X, params)``, needs `device`.
    device : device, optional
        Default: the first that the network lives on.
    """
    if device is None:
        device = _places(net, None)[0]
    return evaluate_accuracy_gpus(net, data_iter, device=device)


def evaluate_accuracy_gpus(net: Any, data_iter: DataIter,
                           split_f: Callable = split_batch, *,
                           devices: Any = None, device: Any = None) -> float:
    """The accuracy of `net`, each batch split over its devices.

    Correct predictions are counted as integers over all shards and divided
    once. All devices use the network's weights and running statistics, so
    the result is that of one device, exactly. With several processes each
    gives its rows of the data, and all receive the accuracy over all of
    them: call it on every rank.

    Parameters
    ----------
    net : Replicas, gluon.Block, torch.nn.Module, or list of callables
        A Block runs on the contexts that it was initialized on; a list
        holds one callable per entry of `devices`.
    data_iter : iterable of (X, y)
        Batches of any size, also smaller than the number of devices; or
        dicts, as in `train_batch`, with the class numbers as 'labels' or
        'label'; or a data iterator of MXNet's.
    split_f : callable
        ``split_f(X, y, devices) -> (X_shards, y_shards)``.
    devices : sequence of devices, optional
        Use these; for a torch module each gets a copy of it.
    device : device, optional
        Use only this one.

    Returns
    -------
    float
        Between 0 and 1. Training flags and statistics are left as they were.

    Raises
    ------
    ValueError
        No data; `device` and `devices` together; a device that the network
        is not on; another number of callables than devices.
    TypeError
        None of these networks.
    """
    if device is not None and devices is not None:
        raise ValueError("device= names one device and devices= all; "
                         f"received {device!r} and {devices!r}.")
    return _evaluated(
        "evaluate_accuracy_gpus", net, data_iter, _Correct("accuracy"),
        devices if device is None else [device], split_f)[1]


class _Correct(metrics.EvalMetric):
    """The share of correct predictions, by `accuracy`."""

    def measure(self, labels: Any, preds: Any) -> tuple[int, list[int]]:
        return len(labels), [accuracy(preds, labels)]


def _evaluated(name: str, net: Any, data: DataIter,
               metric: metrics.EvalMetric, wanted: Any, split_f: Callable,
               batch_axis: int = 0,
               loss: Callable[[Any, Any], Any] | None = None
               ) -> tuple[Any, Any]:
    """``metric.get()`` of all batches, of all processes, in prediction
    mode."""
    rows, world = 0, distributed.current()
    own = net if isinstance(net, Replicas) else None
    metric.reset()
    with using_backend((own.backend if own else backend_for(net)).name) \
            as backend, world.guard(), backend.scope(recording=False,
                                                     training=False):
        places = _places(net, wanted)
        network, functions = _network(net), _functions(net, places)
        place = place_of(data) if world.size > 1 else None
        for X, y in map(as_pair, as_rounds(data)):
            X_shards, y_shards, judge = split_inputs(
                X, y, places, split_f, batch_axis,
                lambda: () if network is None else network.inputs(), loss)
            # Of replicas one pass, which leaves all devices what it keeps.
            outputs = run_on(functions, X_shards) \
                if own is None or places != own.devices else own(X_shards)
            rows += sum(rows_of(labels, batch_axis) or 0
                        for output, labels in zip(outputs, y_shards)
                        if output is not None)
            if judge is not None:
                outputs = backend.parallel([
                    partial(_loss, judge, batch_axis, *pair)
                    for pair in zip(outputs, y_shards)])
            for output in outputs:
                _check_single(output)
            metric.update(y_shards, outputs)
    # of all processes: each has its rows of the data
    told = world.gather(name, [rows, place, own and own.digest()])
    world.batch_taken()     # one that a loop was left with
    world.check_orders([place for _, place, _ in told],
                       "evaluate on one order of batches")
    if own is not None:
        own.check_digests([digest for *_, digest in told])
    if not any(rows for rows, *_ in told):
        raise ValueError("an evaluation needs one example or more; received "
                         "none. Use a data iterator that can be gone through "
                         "again, such as a list.")
    return metric.get()


def _network(net: Any) -> Any:
    """The network of replicas, or one of the framework; None for functions,
    which run where their caller says."""
    if isinstance(net, Replicas):
        return net.network
    try:
        return None if isinstance(net, (list, tuple)) \
            else get_backend().network(net)
    except TypeError:
        if callable(net):
            return None
        raise


def _places(net: Any, wanted: Any) -> list[Device]:
    """The devices that `net` is evaluated on."""
    if isinstance(net, Replicas):
        return devices_of(net, wanted)
    network = _network(net)
    return as_devices(wanted) if wanted is not None or network is None \
        else [as_device(d) for d in network.devices()]


def _functions(net: Any, places: list[Device]) -> list[Any]:
    """What each device calls."""
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
    """A metric of a network over all of `data`, in prediction mode.

    With several processes each gives its rows of the data, and all receive
    the value over all of them: call it on every rank.

    Parameters
    ----------
    replicas : Replicas, or another `net` of `evaluate_accuracy_gpus`
    data : iterable of (X, y)
    metric : metric of `mgpu.metrics`, its name, or a list of them
        Reset first, so it may be used again.
    loss : callable, optional
        For `mgpu.metrics.Loss`: ``loss(output, y)`` for the rows of each
        device, whose mean it is. Needed by that metric alone.
    split_f : callable
        ``split_f(X, y, devices) -> (X_shards, y_shards)``.
    device : device, optional
        Use only this one: see `evaluate_accuracy_gpus`.
    batch_axis : int
        As in `train_batch`.

    Returns
    -------
    (str, float), or lists of them
        What ``metric.get()`` returns. Training flags and statistics are left
        as they were.

    Raises
    ------
    ValueError
        No data; a device that the network is not on; what
        `EvalMetric.update` refuses.
    TypeError
        No network, or no metric; `loss` without a metric of losses, or the
        other way round.
    """
    metric = metrics.create(metric)
    if metric.of_outputs != (loss is None):
        raise TypeError(
            "loss= belongs to the metric Loss, and the outputs to all others; "
            f"received {metric!r} and loss={loss!r}. Evaluate each kind by "
            "itself.")
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
    """The inputs and the labels of each device, as `split_f` gives them, and
    the loss for them; None for each where this process has no rows of a batch
    that other processes have. Of a dict the network gets the entries that its
    `parameters` name, and the loss the whole dict, or (without a loss) its
    entry of labels counts."""
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


def check_place(replicas: Replicas, device: Any) -> None:
    """Refuse a device that the replicas are not on (ValueError), as an
    evaluation on it would."""
    with using_backend(replicas.backend.name):
        devices_of(replicas, [device])


def _check_single(output: Any) -> None:
    if output is not None and not any(x is output for x in leaves(output)):
        raise TypeError(
            "a measure is of one array of scores; received a network whose "
            f"output is a {type(output).__name__} of {len(leaves(output))} "
            "arrays. Choose one: pass devices= and a list of functions, "
            "lambda x: replicas[i](x)[0] for device i, or update a metric.")
