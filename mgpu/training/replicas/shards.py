"""Checks of what replicas are called with."""
from collections.abc import Mapping, Sequence
from typing import Any

from mgpu.backends import base, messages
from mgpu.backends.device import Device
from mgpu.data.nested import arrays_in, as_inputs, is_empty, leaves, shapes_of


def check_column(column: Any, k: int, backend: base.Backend, place: str = ""
                 ) -> None:
    """Refuse what is no list of `k` shards. `place`: where it is, in
    words."""
    if not isinstance(column, (list, tuple)):
        if not backend.is_native(column):
            messages.refuse_foreign(column, backend.name)
        raise TypeError(
            "replicas take a list with one shard per device; "
            f"received {type(column).__name__}{place}. Use "
            "replicas(split_and_load(x, replicas.devices)), or "
            "replicas[i](x) for the replica on device i.")
    if len(column) != k:
        raise ValueError(
            f"{k} replicas take {k} shards; received {len(column)}"
            f"{place}. Use mgpu.split_batch, which always makes one per "
            "device.")


def by_device(named: Mapping[str, Any], k: int, backend: base.Backend
              ) -> list[base.Kwargs]:
    """Columns of shards by name as one column of `Kwargs`."""
    for name, column in named.items():
        check_column(column, k, backend, f" as {name}")
        given = leaves(column)
        if given and not any(hasattr(x, "shape") for x in given):
            raise TypeError(
                "replicas take a list with an array for each device "
                f"under a name; received {name}={column!r}, which "
                "may be one option for all. Put it into each shard: "
                f"(shard, mgpu.Kwargs({name}=...)).")
    return [base.Kwargs(zip(named, row, strict=True))
            for row in zip(*named.values(), strict=True)]


def are_empty(columns: Sequence[Any], k: int) -> bool:
    """Whether these are lists of `k` shards, all of them without rows."""
    return bool(columns) and all(
        isinstance(column, (list, tuple)) and len(column) == k
        and all(is_empty(as_inputs(shard)) for shard in column)
        for column in columns)


def check_native(inputs: tuple[Any, ...], i: int, device: Device,
                 backend: base.Backend) -> None:
    """Refuse inputs of replica `i` that hold no array of this backend. The
    backend checks where arrays are."""
    found = arrays_in(inputs)
    others = [x for x in found if not backend.is_native(x)]
    for x in others:
        messages.refuse_foreign(x, backend.name)
    if others or not found:
        what = type((others or inputs or (None,))[0]).__name__
        raise TypeError(
            f"replica {i} on {device} takes arrays of the {backend.name} "
            f"backend; received {what}. Use mgpu.put(x, {device}).")


def check_empty(inputs: tuple[Any, ...], device: Device) -> None:
    """Refuse inputs of which only the first is empty: it is not known
    whether there are rows."""
    rows = [shape for shape in shapes_of(inputs) if shape and 0 not in shape]
    if rows and inputs[0] is not None:
        raise ValueError(
            "the first array of a device's inputs says whether it has "
            f"rows; received an empty one, and {rows[0]} after it, on "
            f"{device}. Let the array with a row for each example come "
            "first, or give a device without rows None.")
