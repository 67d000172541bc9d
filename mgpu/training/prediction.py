"""Predictions of a network on several devices."""
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu.backends import get_backend, using_backend
from mgpu.backends.device import Device, as_devices
from mgpu.backends.network import Kwargs, forward_call
from mgpu.data.inputs import Rounds, as_rounds, choose
from mgpu.data.nested import (as_inputs, is_empty, leaves, map_leaves,
                              row_counts)
from mgpu.data.split import check_lists, cut_rows, split_and_load
from mgpu.utils import arguments

if TYPE_CHECKING:
    from mgpu.training.replicas import Replicas


def devices_of(replicas: "Replicas", requested: Sequence[Any] | None
               ) -> list[Device]:
    """The devices of `replicas`, or the `requested` ones. Raises ValueError
    if the network is not on one of them."""
    devices = replicas.devices if requested is None else as_devices(requested)
    absent = [place for place in devices if place not in replicas.devices]
    if absent:
        raise ValueError(f"the network is on {replicas.devices}; received "
                         f"{absent}. Pass one of its devices.")
    return devices


def run_on(functions: Sequence[Callable[..., Any]], shards: Sequence[Any]
           ) -> list[Any]:
    """Call each function with the shard of its device; None for a shard
    without examples."""
    calls = [(lambda: None) if is_empty(inputs) else forward_call(run, inputs)
             for run, inputs in zip(functions, map(as_inputs, shards))]
    return get_backend().parallel(calls)


def predict(replicas: "Replicas", X: Any, batch_size: int | None = None,
            device: Any = None) -> Any:
    """See `Replicas.predict`."""
    places = devices_of(replicas, None if device is None else [device])
    if batch_size is not None:
        batch_size = arguments.batch_size(batch_size)
    run, parts = replicas[replicas.devices.index(places[0])], []
    first: tuple[Any, Any] | None = None
    with using_backend(replicas.backend.name) as backend, \
            backend.scope(recording=False, training=False):
        for batch in _batches(X, batch_size, replicas.network.inputs):
            rows = sorted(set(row_counts(batch)))
            if rows == [0] and replicas.span.wide:
                continue    # other ranks have examples of this batch
            if len(rows) != 1 or not rows[0] or is_empty(as_inputs(batch)):
                raise ValueError(
                    "predict expects arrays with the same number of examples, "
                    "at least one; received "
                    f"{' or '.join(map(str, rows)) or 'none'}. Pass an array, "
                    "a tuple or dict of arrays, or batches of them.")
            check_lists(batch, None, rows[0])
            if isinstance(batch, Mapping) and not isinstance(batch, Kwargs):
                # As in `evaluate`: forward gets the entries that it names.
                choice = choose(batch, replicas.network.inputs())
                choice.check(["label", "labels"], "a metric")
                batch = choice.take(batch)
            shards = split_and_load(batch, places, 0, False)
            outputs = replicas(shards) if places == replicas.devices \
                else run_on([run], shards)
            parts += [_on_host(output, row_counts(shard)[0])
                      for shard, output in zip(shards, outputs)
                      if output is not None]
            first = first or (shards[0], batch)
        columns = list(zip(*map(leaves, parts), strict=True))
        if len(parts) > 1 and first is not None:
            _check_rows(run, *first, columns, places[:1])
    if not parts:
        raise ValueError("predict needs at least one example; received no "
                         "batch. Use an iterable that can be iterated "
                         "again, such as a list.")
    joined = map(np.concatenate, columns)
    return map_leaves(lambda _: next(joined), parts[0])


def _inputs(batch: Any, parameters: Callable[[], Any]) -> Any:
    """A batch of a loader without its labels. ValueError where two arrays may
    be (inputs, labels) or two inputs of a forward with these
    `parameters`."""
    if not isinstance(batch, (list, tuple)) or hasattr(batch, "_fields") \
            or len(batch) != 2:
        return batch
    inputs, labels = batch
    if labels is None or isinstance(inputs, (list, tuple, dict)):
        return inputs
    takes = [p for p in parameters() if p.kind is not p.VAR_KEYWORD]
    if sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL
           for p in takes) > 1:
        return batch
    if len(takes) == 1 and takes[0].kind is not takes[0].VAR_POSITIONAL:
        return inputs
    raise ValueError(
        "a batch of two arrays is (inputs, labels) or two inputs; got one for "
        f"forward({', '.join(map(str, takes))}), which may take both. Pass "
        "batches (inputs, None), or ((first, second), None).")


def _batches(X: Any, batch_size: int | None, parameters: Callable[[], Any]
             ) -> Iterator[Any]:
    """The inputs of each pass; `parameters`: those of forward."""
    if isinstance(rounds := as_rounds(X), Rounds):
        X = rounds.inputs()
    rows = row_counts(X)
    if not rows and not isinstance(X, (list, tuple, dict)):
        if batch_size is not None or not hasattr(X, "__iter__"):
            raise TypeError(
                "predict expects arrays, or an iterable of batches without "
                f"batch_size; received {type(X).__name__} and "
                f"batch_size={batch_size}. Pass one or the other.")
        for batch in X:
            yield _inputs(batch, parameters)
    elif batch_size is None or len(set(rows)) != 1:
        yield X
    else:
        check_lists(X, None, rows[0])
        # One batch at a time, without a copy of all.
        for begin in range(0, max(rows[0], 1), batch_size):
            end = min(begin + batch_size, rows[0])
            yield cut_rows(X, [(begin, end)])[0]


def _on_host(output: Any, rows: int) -> Any:
    """Copy `output` of a device to NumPy; it has `rows` examples."""
    backend = get_backend()
    for x in leaves(output):
        if not backend.is_native(x):
            raise TypeError(
                "predict expects outputs that are arrays, or tuples, lists or "
                f"dicts of arrays; received a {type(x).__name__}. Return "
                "arrays in prediction mode, or call replicas(shards).")
        if tuple(x.shape[:1]) != (rows,):
            raise ValueError(
                "predict expects an output for each example; received "
                f"shape {tuple(x.shape)} for batch size {rows}. Return "
                "such arrays in prediction mode, or call replicas(shards).")
    return map_leaves(backend.to_numpy, output)


def _check_rows(run: Callable[..., Any], shard: Any, batch: Any,
                columns: Sequence[Sequence[np.ndarray]],
                place: Sequence[Any]) -> None:
    """Raise ValueError for an output whose first axis has the length of the
    batch by chance: a constant, or one with the examples on another axis.
    Calls `run` with another number of examples than `shard` has; `batch` may
    have more."""
    rows = row_counts(shard)[0]
    if any(rows in own[0].shape[1:] or all(
            np.array_equal(own[0], x) for x in own) for own in columns):
        other = cut_rows(shard, [(0, rows - 1)])[0] if rows > 1 \
            else split_and_load(batch, place, 0, False)[0]
        try:
            output = forward_call(run, as_inputs(other))()
        except Exception:   # the network requires this batch size
            return
        _on_host(output, row_counts(other)[0])
