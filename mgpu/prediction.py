"""Predictions of a network on several devices: rows in, rows out."""
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu import arguments
from mgpu.backends import using_backend
from mgpu.backends.base import Kwargs, forward_call
from mgpu.device import as_devices
from mgpu.inputs import Rounds, as_rounds, choose
from mgpu.nested import (as_inputs, is_empty, leaves, map_leaves, row_counts,
                         shapes_of)
from mgpu.split import check_lists, cut_rows, split_and_load

if TYPE_CHECKING:
    from mgpu.replicas import Replicas


def predict(replicas: "Replicas", X: Any, batch_size: int | None = None,
            device: Any = None) -> Any:
    """See `Replicas.predict`."""
    places = replicas.devices if device is None else as_devices([device])
    absent = [place for place in places if place not in replicas.devices]
    if absent:
        raise ValueError(f"the network is on {replicas.devices}; received "
                         f"{absent[0]}. Predict where it is.")
    if batch_size is not None:
        batch_size = arguments.batch_size(batch_size)
    found: list[Any] = []
    first: tuple[Any, Any, Any] | None = None
    with using_backend(replicas.backend.name) as backend, \
            backend.scope(recording=False, training=False):
        for batch in _batches(X, batch_size):
            rows = sorted(set(row_counts(batch)))
            if rows == [0] and replicas.span.wide:
                continue    # other processes have rows of this batch
            if len(rows) != 1 or not rows[0] or is_empty(as_inputs(batch)):
                raise ValueError(
                    "a prediction is of arrays with one row or more, as many "
                    "in each; received "
                    f"{' or '.join(map(str, rows)) or 'none'}. Pass an array, "
                    "a tuple or dict of arrays, or batches of them.")
            check_lists(batch, None, rows[0])
            if isinstance(batch, Mapping) and not isinstance(batch, Kwargs):
                # As in `evaluate`: what forward names goes to it.
                choice = choose(batch, replicas.network.inputs())
                choice.check(["label", "labels"], "a measure")
                batch = choice.take(batch)
            shards = split_and_load(batch, places, 0, False)
            run = replicas[replicas.devices.index(places[0])]
            outputs = replicas(shards) if places == replicas.devices \
                else [forward_call(run, as_inputs(shards[0]))()]
            for shard, output in zip(shards, outputs):
                if output is not None:
                    found.append(_on_host(output, row_counts(shard)[0],
                                          backend))
            first = first or (run, shards[0], batch)
        if len(found) > 1 and first is not None:
            _check_follow(found, *first, places[:1], backend)
    if not found:
        raise ValueError("a prediction needs one row or more; received no "
                         "batch. Use an iterable that can be gone through "
                         "again, such as a list.")
    return _joined(found)


def _batches(X: Any, batch_size: int | None) -> Iterator[Any]:
    """What the network is called with, one after the other."""
    if isinstance(rounds := as_rounds(X), Rounds):
        X = rounds.inputs()
    if not hasattr(X, "shape") and not isinstance(X, (list, tuple, dict)) \
            and not row_counts(X):
        if batch_size is not None or not hasattr(X, "__iter__"):
            raise TypeError(
                "predict takes arrays, which batch_size cuts, or an iterable "
                f"of batches as they are; received {type(X).__name__}"
                + ("" if batch_size is None else " and batch_size")
                + ". Pass one or the other.")
        yield from X
        return
    rows = row_counts(X)
    if batch_size is None or len(set(rows)) != 1:
        yield X
        return
    check_lists(X, None, rows[0])
    bounds = [(begin, min(begin + batch_size, rows[0]))
              for begin in range(0, rows[0], batch_size)]
    # Row by row as batches come: no copy of all.
    for bound in bounds or [(0, 0)]:
        yield cut_rows(X, [bound])[0]


def _on_host(output: Any, rows: int, backend: Any) -> Any:
    """`output` of a device in NumPy, which has a row for each of `rows`."""
    odd = [x for x in leaves(output) if not backend.is_native(x)]
    if odd:
        raise TypeError(
            "a prediction is an array, or arrays in tuples, lists and dicts; "
            f"received a {type(odd[0]).__name__} in the output. Return arrays"
            " in prediction mode, or call replicas(shards).")
    for shape in shapes_of(output):
        if shape[:1] != (rows,):
            raise ValueError(
                "a prediction has a row for each row of the input; received "
                f"an output of shape {shape} for {rows} rows. Return such "
                "arrays in prediction mode, or call replicas(shards).")
    return map_leaves(backend.to_numpy, output)


def _check_follow(parts: Sequence[Any], run: Any, shard: Any, batch: Any,
                  place: Sequence[Any], backend: Any) -> None:
    """Refuse an array that has as many rows as each part by chance: one that
    is the same in all of them, or whose rows are on another axis. `run` is
    asked about other rows than the first `shard` has, of which `batch` may
    have more."""
    rows = row_counts(shard)[0]
    if not any(rows in own[0].shape[1:] or all(
            np.array_equal(own[0], x) for x in own[1:])
               for own in _columns(parts)):
        return
    other = cut_rows(shard, [(0, rows - 1)])[0] if rows > 2 \
        else split_and_load(batch, place, 0, False)[0]
    if row_counts(other)[0] == rows > 1:
        other = cut_rows(shard, [(0, rows - 1)])[0]
    try:
        output = forward_call(run, as_inputs(other))()
    except Exception:   # it is written for so many rows
        return
    _on_host(output, row_counts(other)[0], backend)


def _columns(parts: Sequence[Any]) -> list[list[np.ndarray]]:
    """The arrays of each place in a structure, one of each part."""
    every: list[list[np.ndarray]] = []
    for part in parts:
        every.append([])
        map_leaves(every[-1].append, part)
    return [list(own) for own in zip(*every, strict=True)]


def _joined(parts: Sequence[Any]) -> Any:
    """One structure of arrays like each of `parts`, with all rows."""
    rows = map(np.concatenate, _columns(parts))
    return map_leaves(lambda x: next(rows), parts[0])
