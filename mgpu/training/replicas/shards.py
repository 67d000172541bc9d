"""Check the inputs of replicas."""
from collections.abc import Mapping, Sequence
from typing import Any

from mgpu.backends import Backend, messages
from mgpu.backends.device import Device
from mgpu.backends.network import Kwargs
from mgpu.data.nested import arrays_in, as_inputs, is_empty, leaves, shapes_of


def check_column(column: Any, k: int, backend: Backend, place: str = ""
                 ) -> None:
    """Raise unless `column` is a list of `k` shards. `place`: where the
    column is, for the message."""
    if not isinstance(column, (list, tuple)):
        if not backend.is_native(column):
            messages.refuse_foreign(column, backend.name)
        raise TypeError(
            "replicas expect a list with one shard per device; "
            f"received {type(column).__name__}{place}. Use "
            "replicas(split_and_load(x, replicas.devices)), or "
            "replicas[i](x) for the replica on device i.")
    if len(column) != k:
        raise ValueError(
            f"{k} replicas expect {k} shards; received {len(column)}"
            f"{place}. Use mgpu.split_batch, which returns one per "
            "device.")


def by_device(named: Mapping[str, Any], k: int, backend: Backend
              ) -> list[Kwargs]:
    """Transpose columns of shards by name into one column of `Kwargs`."""
    for name, column in named.items():
        check_column(column, k, backend, f" as {name}")
        given = leaves(column)
        if given and not any(hasattr(x, "shape") for x in given):
            raise TypeError(
                "replicas expect a list with one array per device "
                f"for each name; received {name}={column!r}, which "
                "may be one option for all. Put it into each shard: "
                f"(shard, mgpu.Kwargs({name}=...)).")
    return [Kwargs(zip(named, row, strict=True))
            for row in zip(*named.values(), strict=True)]


def are_empty(columns: Sequence[Any], k: int) -> bool:
    """Whether these are lists of `k` shards without examples."""
    return bool(columns) and all(
        isinstance(column, (list, tuple)) and len(column) == k
        and all(is_empty(as_inputs(shard)) for shard in column)
        for column in columns)


def check_native(inputs: tuple[Any, ...], i: int, device: Device,
                 backend: Backend) -> None:
    """Raise for inputs of replica `i` that hold no array of this backend. The
    backend checks on which devices arrays are."""
    found = arrays_in(inputs)
    others = [x for x in found if not backend.is_native(x)]
    for x in others:
        messages.refuse_foreign(x, backend.name)
    if others or not found:
        what = type((others or inputs or (None,))[0]).__name__
        raise TypeError(
            f"replica {i} on {device} expects arrays of the {backend.name} "
            f"backend; received {what}. Use mgpu.put(x, {device}).")


def check_empty(inputs: tuple[Any, ...], device: Device) -> None:
    """Raise ValueError for inputs of which only the first is empty: the
    number of examples is ambiguous."""
    rows = [shape for shape in shapes_of(inputs) if shape and 0 not in shape]
    if rows and inputs[0] is not None:
        raise ValueError(
            "the first array of a device's inputs determines the number of "
            f"examples; received an empty one, and {rows[0]} after it, on "
            f"{device}. Pass an array with a batch dimension "
            "first, or None for a device without examples.")
