"""What Gluon's trainer saves of its optimiser: a pickle, read as data."""
import io
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mgpu.files import FilePath, path_of
from mgpu.gluon_io.params import Array, UnreadableParams, read_array


class Record:
    """An object of the file, of a class that is not imported and not called.

    Attributes
    ----------
    kind : str
        Module and name of its class: ``mxnet.optimizer.optimizer.SGD``.
    arguments : tuple
        What its class would have been called with.
    state : any
        Its attributes, by name, in most cases.
    """

    kind = ""
    arguments: tuple[Any, ...]
    state: Any
    items: list[Any]            # of a class that is a list or a dictionary

    def __new__(cls, *arguments: Any, **named: Any) -> "Record":
        self = object.__new__(cls)
        self.arguments = (*arguments, named) if named else arguments
        self.state, self.items = {}, []
        return self

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass        # a pickle may call either of the two

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __repr__(self) -> str:
        return f"<record of {self.kind}>"


class TrainerStates(NamedTuple):
    """The contents of a file of ``Trainer.save_states``.

    The file has no names. A number counts all parameters of the trainer, in
    its order, frozen ones and running statistics too, which have no entry.
    ``gluon.Trainer(net.collect_params())`` sorts names as texts, so
    ``dense10_weight`` comes before ``dense9_weight``; a list stays as given.
    """

    #: what the optimiser keeps for each parameter that it has updated, by
    #: its number: None, an array, or a tuple of these
    states: dict[int, Any]
    #: the optimiser, with its rate, counts and schedule in `state`; None
    #: where only the states were saved (``Module.save_optimizer_states``)
    optimizer: Record | None


def load_trainer_states(path: FilePath) -> TrainerStates:
    """What ``gluon.Trainer.save_states`` has written, without MXNet.

    Nothing in the file is imported or called: the optimiser, its schedule
    and a user's own classes become `Record`.

    Parameters
    ----------
    path : str or os.PathLike

    Raises
    ------
    UnreadableParams
        If the file is damaged, or no file of trainer states.
    OSError
        If it cannot be opened.
    """
    path = path_of(path)
    with open(path, "rb") as file:
        data = file.read()
    try:
        found = _Reader(io.BytesIO(data), encoding="latin1").load()
        states, optimizer = found if isinstance(found, tuple) \
            else (found, None)
        return TrainerStates(
            {_number(k): _state(x) for k, x in _items(states)},
            _optimizer(optimizer))
    # A pickle that is damaged raises anything.
    except Exception as error:
        raise UnreadableParams(
            "expected what Trainer.save_states of Gluon writes; "
            f"{path!r} is not that, or is damaged ({error}). Use a whole "
            "file.") from error


def _bytearray(data: bytes | str = b"", *encoding: str) -> bytearray:
    """Not of a number, which is how many bytes to allocate."""
    return bytearray(_encoded(data, *encoding))


def _encoded(data: bytes | str, encoding: str = "latin1") -> bytes:
    """How Python 2, and protocol 2, write bytes."""
    if isinstance(data, bytes):
        return data
    if not isinstance(data, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("its bytes are no bytes")
    return data.encode("latin1")


def _scalar(dtype: Record, data: bytes | str) -> Any:
    """A number of NumPy's, such as a rate that was computed."""
    kind = np.dtype(str(dtype.arguments[0]))
    if kind.kind not in "fiub":
        raise pickle.UnpicklingError(f"it has a number of dtype {kind}")
    return np.frombuffer(_encoded(data), kind)[0].item()


def _rebuilt(kind: type[Record], *_: Any) -> Record:
    return kind()


#: all that is called; whatever else a file names becomes a `Record`
_KNOWN = {
    f"{module}.{name}": function for modules, name, function in (
        (("builtins", "__builtin__"), "bytearray", _bytearray),
        (("_codecs",), "encode", _encoded),
        (("copyreg", "copy_reg"), "_reconstructor", _rebuilt),
        (("numpy.core.multiarray", "numpy._core.multiarray"), "scalar",
         _scalar))
    for module in modules}


class _NDArray(Record):
    def __setstate__(self, state: Any) -> None:
        handle = state["handle"]
        self.array: Array = None if handle is None \
            else read_array(bytes(handle))


class _Reader(pickle._Unpickler):
    """Python's reader that is written in Python: that in C gives a damaged
    file as much memory as it asks for."""

    dispatch: ClassVar[Any] = dict(pickle._Unpickler.dispatch)
    read: Any       # which it makes itself
    append: Any

    def find_class(self, module: str, name: str) -> Any:
        kind = f"{module}.{name}"
        if kind in _KNOWN:
            return _KNOWN[kind]
        is_array = kind.endswith((
            ".ndarray.NDArray", ".multiarray.ndarray",
            ".sparse.RowSparseNDArray", ".sparse.CSRNDArray"))
        return type("Record", (_NDArray if is_array else Record,),
                    {"kind": kind})

    def _load_bytearray8(self) -> None:
        size = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(size)))     # not bytearray(size)

    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray8

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it names an object outside of it")


def _items(states: Any) -> Any:
    if not isinstance(states, Mapping):
        raise ValueError("the states are no dictionary")
    return states.items()


def _number(key: Any) -> int:
    if type(key) is not int or key < 0:
        raise ValueError(f"a state has the number {key!r}")
    return key


def _state(x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return tuple(map(_state, x))
    if x is not None and not isinstance(x, _NDArray):
        raise ValueError(f"a state is {type(x).__name__}")
    return None if x is None else x.array


def _optimizer(x: Any) -> Record | None:
    if x is not None and not (isinstance(x, Record)
                              and isinstance(x.state, dict)):
        raise ValueError("the optimiser is no object")
    return x
