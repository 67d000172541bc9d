"""The file of a recorded run: safetensors with a JSON header and a digest.

A file holds arrays and text. Nothing in it is executed when it is read.
"""
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.backends import messages
from mgpu.checkpoints.trainer_states import TrainerStates
from mgpu.parity.run import LayerCall, State
from mgpu.utils import environment, files

FORMAT = "mgpu trace 1"


def safetensors() -> Any:
    """The library. ImportError with the cure where it is missing."""
    return environment.package("safetensors", "a trace", "safetensors.numpy")


class Writer:
    """Collects arrays, and names them in nodes for the JSON header."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._known: dict[bytes, str] = {}

    def put(self, x: Any) -> dict[str, Any]:
        """The node of an array. Nothing is lost: an array of one value is
        kept as that value, and float64 as float32 if all its values are
        float32 numbers. Equal arrays are kept once."""
        x = np.asarray(x)
        if x.dtype.name not in messages.DTYPES:
            raise TypeError(f"a trace holds {', '.join(messages.DTYPES)}; "
                            f"received an array of {x.dtype}. Give numbers.")
        node = {"shape": list(x.shape), "dtype": x.dtype.name}
        flat = np.ascontiguousarray(x).reshape(-1)
        bits = flat.view(f"u{flat.itemsize}")
        if flat.size and (bits == bits[0]).all():
            flat = flat[:1]
        elif flat.dtype == np.float64:
            with np.errstate(over="ignore", invalid="ignore"):
                small = flat.astype(np.float32)
            if np.array_equal(small.astype(np.float64), flat, equal_nan=True):
                flat = small
        key = hashlib.sha256(flat.dtype.str.encode() + flat.tobytes()).digest()
        if key not in self._known:
            self._known[key] = str(len(self.arrays))
            self.arrays[self._known[key]] = flat
        return {**node, "array": self._known[key]}

    def put_all(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        return {name: self.put(x) for name, x in values.items()}

    def batch(self, data: Any) -> Any:
        """Arrays in tuples, lists and dicts."""
        if isinstance(data, dict):
            return {"dict": {str(k): self.batch(v) for k, v in data.items()}}
        if isinstance(data, tuple) or isinstance(data, list) and any(
                hasattr(v, "shape") for v in data):
            kind = "list" if isinstance(data, list) else "tuple"
            return {kind: [self.batch(v) for v in data]}
        return self.put(messages.host_array(data) if isinstance(data, list)
                        else data)

    def state(self, state: State) -> dict[str, Any]:
        memory = state.optimizer
        return {"values": self.put_all(state.values), "optimizer": {
            **memory._asdict(), "slots": [
                [name, slot, self.put(x)]
                for (name, slot), x in memory.slots.items()]}}

    def calls(self, calls: Sequence[LayerCall]) -> list[Any]:
        return [[call.path, *([self.put(x) for x in xs] for xs in call[1:])]
                for call in calls]

    def write(self, file: str, header: dict[str, Any]) -> str:
        """Write the file, whole or not at all; returns the digest."""
        text = json.dumps(header, default=repr)
        digest = _digest(text, sorted(self.arrays), self.arrays.__getitem__)
        with files.part_of(file) as part:
            safetensors().numpy.save_file(self.arrays, part, {
                "format": FORMAT, "trace": text, "sha256": digest})
        return digest


def _digest(text: str, names: Sequence[str],
            read: Callable[[str], np.ndarray]) -> str:
    """The SHA-256 of the text and of all arrays."""
    total = hashlib.sha256(text.encode())
    for name in names:
        x = read(name)
        total.update(f"|{name} {x.dtype.str} {x.shape}|".encode())
        total.update(x.tobytes())
    return total.hexdigest()


class Reader:
    """A file that has been checked. Arrays are read when they are asked for.

    Attributes
    ----------
    header : dict
    sha256 : str

    Raises
    ------
    ValueError
        The file is not a trace, is damaged, or has another version.
    OSError
        The file cannot be opened.
    """

    def __init__(self, file: str):
        library = safetensors()
        with open(file, "rb"):      # its own error for a missing file
            pass
        try:
            self._open = library.safe_open(file, "numpy")
            about = self._open.metadata() or {}
        except library.SafetensorError as error:
            raise self._refused(file, error) from error
        found = about.get("format")
        if found != FORMAT:
            raise ValueError(
                f"expected a trace of the format {FORMAT!r}; {file!r} has "
                f"{found!r}. Record it again with this version of mgpu, or "
                "read it with the version that wrote it.")
        text, self.sha256 = about.get("trace", ""), about.get("sha256")
        if _digest(text, sorted(self._open.keys()),
                   self._open.get_tensor) != self.sha256:
            raise self._refused(file, "its contents do not have the SHA-256 "
                                      "that it names")
        self.header = json.loads(text)

    @staticmethod
    def _refused(file: str, why: Any) -> ValueError:
        return ValueError(f"expected a whole file of mgpu.parity.record; "
                          f"{file!r} is not one, or is damaged ({why}). Copy "
                          "or record it again.")

    def get(self, node: Mapping[str, Any]) -> np.ndarray:
        flat, shape = self._open.get_tensor(node["array"]), node["shape"]
        flat = flat.astype(node["dtype"])
        return np.full(shape, flat[0]) if flat.size == 1 \
            else flat.reshape(shape)

    def get_all(self, nodes: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: self.get(node) for name, node in nodes.items()}

    def batch(self, node: Mapping[str, Any]) -> Any:
        if "dict" in node:
            return {k: self.batch(v) for k, v in node["dict"].items()}
        for kind in (list, tuple):
            if kind.__name__ in node:
                return kind(map(self.batch, node[kind.__name__]))
        return self.get(node)

    def state(self, node: Mapping[str, Any]) -> State:
        memory = node["optimizer"]
        return State(self.get_all(node["values"]), TrainerStates(**{
            **memory, "slots": {(name, slot): self.get(x)
                                for name, slot, x in memory["slots"]}}))

    def calls(self, nodes: Sequence[Any]) -> list[LayerCall]:
        return [LayerCall(path, *([self.get(x) for x in xs] for xs in rest))
                for path, *rest in nodes]
