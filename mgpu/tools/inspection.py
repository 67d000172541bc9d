"""What is in a file that MXNet, mgpu or safetensors has written.

Nothing in the file is executed. `mgpu inspect` prints what `inspect_file`
finds.
"""
import json
import math
import os
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mgpu import backends
from mgpu.checkpoints import checkpoint, trainer_states
from mgpu.compat import conversion
from mgpu.gluon_io import (CSR, Graph, Record, RowSparse, load_graph,
                           load_params, load_trainer_states)
from mgpu.gluon_io.graph import check_fit, dense_arrays
from mgpu.utils import files
from mgpu.utils.files import FilePath, path_of

#: how the names of Gluon's and Symbol's parameters end, where a graph of
#: Symbol's marks nothing
_ENDINGS = ("_weight", "_bias", "_gamma", "_beta", "_mean", "_var",
            "_parameters")
#: what safetensors calls NumPy's types
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16",
           "BF16": "bfloat16", "BOOL": "bool", "U8": "uint8",
           **{f"I{n}": f"int{n}" for n in (8, 16, 32, 64)}}
_EXPECTED = ("expected .params, -symbol.json or trainer states of MXNet, a "
             "checkpoint or trainer states of mgpu, or safetensors")


def inspect_file(file: FilePath, params: FilePath | None = None
                 ) -> dict[str, Any]:
    """Describe the contents of a file, as data for JSON.

    The contents determine the kind of the file, not its name.

    Parameters
    ----------
    file : str or os.PathLike
    params : str or os.PathLike, optional
        The ``.params`` that belong to a graph: with them its missing
        operators are judged by their attributes too.

    Returns
    -------
    dict
        "file", "kind", "bytes", and what the kind has: "arrays" (each with
        name, shape, dtype, bytes, storage) and "values", how many numbers
        they hold in all; of a graph "inputs", "outputs", "parameters",
        "operators" and "missing" (None where torch is not installed); of
        states "optimizer", "settings", "schedule", "num_update" and
        "states"; "metadata" of safetensors. A file of torch has its kind
        alone.

    Raises
    ------
    ValueError
        If it is damaged, or of a kind that is not known.
    OSError
        If it cannot be opened.
    """
    path = path_of(file)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError("what is in a file is known from its size too; "
                         f"received {path!r}, which is no ordinary file. "
                         "Copy its contents into one.")
    with open(path, "rb") as stream:
        start = stream.read(64)
    found = {"file": path, "kind": "", "bytes": os.path.getsize(path)}
    if params is not None and start.lstrip()[:1] != b"{":
        raise ValueError("arrays belong to a graph; received two files, the "
                         f"first of which, {path!r}, is no -symbol.json.")
    if start.lstrip()[:1] == b"{":
        found |= _graph(path, params)
    elif start[:2] == b"PK":
        found |= _zip(path)
    elif start[8:9] == b"{":
        found |= _safetensors(path)
    elif start[:1] == b"\x80" or path.endswith(".states"):
        found |= _states(path)
    else:
        found |= _params(path, start)
    return found


# -- arrays -------------------------------------------------------------------

def _entry(name: str, x: Any) -> dict[str, Any]:
    parts = [x] if isinstance(x, np.ndarray) else [
        y for y in x if isinstance(y, np.ndarray)]
    storage = {RowSparse: "row-sparse", CSR: "csr"}.get(type(x), "dense")
    return {"name": name, "shape": list(x.shape), "dtype": parts[0].dtype.name,
            "bytes": sum(y.nbytes for y in parts), "storage": storage}


def _of_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    entries = [_entry(name, x) for name, x in arrays.items()]
    return {"arrays": entries, "values": _values(entries)}


def _values(entries: Iterable[Mapping[str, Any]]) -> int:
    return sum(math.prod(entry["shape"]) for entry in entries)


def _params(path: str, start: bytes) -> dict[str, Any]:
    try:
        found = load_params(path)
    except ValueError as error:
        # what begins so, or is called so, was meant as one
        if start[:2] == b"\x12\x01" or path.endswith(".params"):
            raise
        raise ValueError(f"{_EXPECTED}; {path!r} is none of them.") from error
    if not isinstance(found, dict):
        found = {str(i): x for i, x in enumerate(found)}
    return {"kind": "parameters of MXNet", **_of_arrays(found)}


def _not_npz(stream: Any) -> str | None:
    """What a zip is that holds no arrays of NumPy; None for one that may."""
    try:
        with zipfile.ZipFile(stream) as archive:
            inside = {name.rpartition("/")[2] for name in archive.namelist()}
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return None
    if "archive_format" in inside:
        return "network to predict with, of torch.export"
    return "file of torch.save" if "data.pkl" in inside else None


def _zip(path: str) -> dict[str, Any]:
    with open(path, "rb") as stream:
        other = _not_npz(stream)
        if other is not None:
            return {"kind": other}
        try:
            arrays = dict(files.npy_members(stream))
            header = json.loads(str(arrays.pop("header"))) \
                if "header" in arrays else None
        except Exception as error:      # zip, NumPy, JSON: each has its own
            raise ValueError(f"{_EXPECTED}; {path!r} is none of them, or is "
                             f"damaged ({error}).") from error
    if header is None:
        found: Any = load_params(path)
        return {"kind": "arrays of NumPy (npz), as MXNet 2 writes too",
                **_of_arrays(found)}
    form = header.get("format") if isinstance(header, dict) else None
    if form not in _KINDS:
        raise ValueError(f"{_EXPECTED}; {path!r} has the format {form!r}. "
                         "Read it with the version of mgpu that wrote it.")
    return _of_training(header, arrays)


_KINDS = {**dict.fromkeys(checkpoint.FORMATS, "checkpoint of mgpu"),
          **dict.fromkeys(trainer_states.FORMATS, "trainer states of mgpu")}


def _of_training(header: dict[str, Any], arrays: dict[str, Any]
                 ) -> dict[str, Any]:
    """Describe a file of `save_checkpoint` or of `Trainer.save_states`."""
    states = header.get("states", header)
    return {"kind": _KINDS[header["format"]], **{
        key: x for key, x in header.items() if key in ("engine", "devices")},
        "optimizer": states.get("optimizer"),
        "settings": {"learning_rate": states.get("learning_rate")},
        "num_update": states.get("num_update"),
        "schedule": states.get("schedule"), **_of_arrays(arrays)}


def _safetensors(path: str) -> dict[str, Any]:
    """Read here, for its header is JSON and needs no package."""
    size = os.path.getsize(path)
    try:
        with open(path, "rb") as stream:
            length, = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise ValueError("its header is longer than it is")
            header = json.loads(stream.read(length))
        about = header.pop("__metadata__", {})
        entries = [{"name": name, "shape": [int(n) for n in x["shape"]],
                    "dtype": _DTYPES.get(x["dtype"], str(x["dtype"])),
                    "storage": "dense",
                    "bytes": x["data_offsets"][1] - x["data_offsets"][0]}
                   for name, x in header.items()]
        if sum(entry["bytes"] for entry in entries) != size - 8 - length:
            raise ValueError("its arrays are not as long as it is")
    except (ValueError, TypeError, KeyError, AttributeError, IndexError,
            RecursionError, struct.error) as error:
        raise ValueError(f"{_EXPECTED}; {path!r} begins as safetensors, and "
                         f"is damaged ({error}). Use a whole file.") from error
    form = about.get("format", "")
    if form in _KINDS:
        return files.read_arrays(path, _KINDS, f"a {_KINDS[form]}",
                                 _of_training)
    return {"kind": form if form.startswith("mgpu ") else "safetensors",
            "arrays": entries, "values": _values(entries),
            "metadata": {key: text for key, text in about.items()
                         if key != "trace"}}


# -- graphs -------------------------------------------------------------------

def _graph(path: str, params: FilePath | None) -> dict[str, Any]:
    graph = load_graph(path)
    names = [node.name for node in graph.nodes if node.op == "null"]
    own = _parameters(graph, names)
    if params is not None:
        own = set(dense_arrays(params))
        check_fit(graph, own)
    missing = _missing(path, params)
    return {"kind": "graph of MXNet",
            "inputs": [name for name in names if name not in own],
            "outputs": [graph.nodes[i].name + (f"[{k}]" if k else "")
                        for i, k in graph.heads],
            "parameters": [name for name in names if name in own],
            "operators": dict(sorted(Counter(
                node.op for node in graph.nodes
                if node.op != "null").items())),
            "missing": None if missing is None else [
                x._asdict() for x in missing]}


def _parameters(graph: Graph, names: Iterable[str]) -> set[str]:
    """Gluon marks its parameters; those of Symbol have known names."""
    marked = {node.name for node in graph.nodes
              if node.op == "null" and node.marks}
    return marked or {name for name in names if name.endswith(_ENDINGS)}


def _missing(path: str, params: FilePath | None) -> Any:
    try:
        with backends.using_backend("torch"):
            return conversion.missing_operators(path, params)
    except backends.BackendNotAvailable:
        return None


# -- states of a trainer ------------------------------------------------------

def _states(path: str) -> dict[str, Any]:
    found = load_trainer_states(path)
    state = found.optimizer.state if found.optimizer is not None else {}
    counts = state.get("_index_update_count") or {}
    if not isinstance(counts, Mapping):
        raise ValueError(
            "expected what Trainer.save_states of Gluon writes; "
            f"{path!r} is damaged (its counts are no dictionary). Use a "
            "whole file.")
    entries = {key: _flat(key, x) for key, x in found.states.items()}
    schedule = state.get("lr_scheduler")
    return {"kind": "trainer states of Gluon" if found.optimizer is not None
            else "optimizer states of a Module of MXNet",
            "optimizer": found.optimizer.kind if found.optimizer else None,
            "settings": _plain(state, but=("num_update", "begin_num_update",
                                           "sym_info", "allow_np_array")),
            "num_update": state.get("num_update"),
            "schedule": {"kind": schedule.kind, **_plain(schedule.state)}
            if isinstance(schedule, Record) else None,
            "states": [{"index": key, "updates": counts.get(key),
                        "arrays": entry} for key, entry in entries.items()],
            "values": sum(map(_values, entries.values()))}


def _flat(key: Any, x: Any) -> list[dict[str, Any]]:
    if isinstance(x, tuple):
        return [entry for y in x for entry in _flat(key, y)]
    return [] if x is None else [_entry(str(key), x)]


def _plain(state: Any, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """What is a number or a text, or a dictionary or list of these that has
    any."""
    return {key: x for key, x in (
        state.items() if isinstance(state, Mapping) else ())
        if isinstance(key, str) and key[:1] != "_" and key not in but
        and _is_plain(x) and x not in ({}, [])}


def _is_plain(x: Any) -> bool:
    if isinstance(x, dict):
        return all(isinstance(y, (int, float, str)) for y in (*x, *x.values()))
    if isinstance(x, list):
        return all(isinstance(y, (int, float, str)) for y in x)
    return x is None or isinstance(x, (bool, int, float, str))
