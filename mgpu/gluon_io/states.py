"""What Gluon's trainer saves of its optimizer: a pickle, read as data."""
import io
import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mgpu.gluon_io.params import MAGIC, Array, UnreadableParams, read_array
from mgpu.utils.files import FilePath, path_of


class Record:
    """An object of the file, of a class that is not imported and not called.

    A class or function of the file stands in it as a subclass of this one.

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


def name_in(module: str, x: Any) -> str:
    """The name of the class of `x`, a `Record` of that module of MXNet's or
    of one inside it; "" for all else."""
    where, _, name = getattr(x, "kind", "").rpartition(".")
    return name if f"{where}.".startswith(f"mxnet.{module}.") else ""


class TrainerStates(NamedTuple):
    """The contents of a file of ``Trainer.save_states``.

    The file has no names. A number counts all parameters of the trainer, in
    its order, frozen ones and running statistics too, which have no entry.
    ``gluon.Trainer(net.collect_params())`` sorts names as texts, so
    ``dense10_weight`` comes before ``dense9_weight``; a list stays as given.
    """

    #: what the optimizer keeps for each parameter that it has updated, by
    #: its number: None, an array, or a tuple of these. With
    #: ``multi_precision``, a float16 parameter has a float32 copy: (state,
    #: copy) of sgd, nag and lars, (copy, state) of all others. Names instead
    #: of numbers where a Module left its updates to a key-value store.
    states: dict[int | str, Any]
    #: the optimizer, with its rate, counts and schedule in `state`; None
    #: where only the states were saved (``Module.save_optimizer_states``)
    optimizer: Record | None


def load_trainer_states(path: FilePath) -> TrainerStates:
    """What ``gluon.Trainer.save_states`` has written, without MXNet.

    Nothing in the file is imported or called: the optimizer, its schedule
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
        found = _Reader(data).load()
        states, optimizer = found if isinstance(found, tuple) \
            else (found, None)
        known: dict[int, Any] = {}
        return TrainerStates(
            {_key(k): _state(x, known) for k, x in _items(states)},
            _optimizer(optimizer))
    # A pickle that is damaged raises anything.
    except Exception as error:
        why = str(error)[:200] or "it ends too soon"
        if isinstance(error, KeyError):     # of the table of codes
            why = f"no pickle has the code {why}"
        if data.startswith(MAGIC):
            why = "it holds arrays by name: see load_params"
        raise UnreadableParams(
            "expected what Trainer.save_states of Gluon writes; "
            f"{path!r} is not that, or is damaged ({why}). Use a whole "
            "file.") from error


#: what MXNet's arrays are called, in the versions of it that there were
_ARRAYS = {f"mxnet.{name}" for name in (
    "ndarray.NDArray", "ndarray.ndarray.NDArray", "numpy.ndarray",
    "numpy.multiarray.ndarray", "ndarray.sparse.RowSparseNDArray",
    "ndarray.sparse.CSRNDArray")}

#: classes that a file may name
_KINDS = 1000


class _NDArray(Record):
    array: Array


def _plain(key: Any) -> bool:
    """Whether its hash is found at once: that of a tuple whose parts are one
    tuple, and so on, takes forever."""
    if type(key) is tuple:
        return len(key) < 9 and all(
            _plain(x) and type(x) is not tuple for x in key)
    if isinstance(key, int):
        return key.bit_length() <= 64
    return key is None or isinstance(key, (str, bytes, float, Record, type))


def _rebuilt(kind: type[Record], *_: Any) -> Record:
    return kind()


class _Reader(pickle._Unpickler):
    """Python's reader that is written in Python: that in C gives a damaged
    file as much memory as it asks for.

    All that a file can call is Record and the three functions of `_known`.
    """

    dispatch: ClassVar[Any] = dict(pickle._Unpickler.dispatch)
    read: Any       # which it makes itself
    append: Any
    stack: Any

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        # A file may have its bytes made into many arrays.
        self._left = 2 * len(data)
        self._kinds: dict[str, Any] = {
            f"{module}.{name}": function for modules, name, function in (
                (("builtins", "__builtin__"), "bytearray", self._encoded),
                (("_codecs",), "encode", self._encoded),
                (("copyreg", "copy_reg"), "_reconstructor", _rebuilt),
                (("numpy.core.multiarray", "numpy._core.multiarray"),
                 "scalar", self._scalar))
            for module in modules}

    def find_class(self, module: str, name: str) -> Any:
        kind = f"{module}.{name}"
        if kind not in self._kinds:
            if len(self._kinds) > _KINDS:
                raise pickle.UnpicklingError("it names too many classes")
            self._kinds[kind] = type("Record", (
                _NDArray if kind in _ARRAYS else Record,), {"kind": kind})
        return self._kinds[kind]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it names an object outside of it")

    def get_extension(self, code: int) -> Any:
        raise pickle.UnpicklingError("it names a class by a number")

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise pickle.UnpicklingError("it has the same bytes many times")

    def _encoded(self, data: bytes | str = b"", encoding: str = "latin1"
                 ) -> bytes:
        """Bytes, as protocol 2 writes them, and bytearray; not of a number,
        which is how many bytes to allocate."""
        if isinstance(data, bytes):
            return data
        if not isinstance(data, str) or encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError("its bytes are no bytes")
        self._take(len(data))
        return data.encode("latin1")

    def _scalar(self, dtype: Record, data: bytes | str) -> Any:
        """A number of NumPy's, such as a rate that was computed."""
        name = dtype.arguments[0]
        if not isinstance(name, str) or len(name) > 4 \
                or np.dtype(name).kind not in "fiub":
            raise pickle.UnpicklingError("it has a number that is none")
        return np.frombuffer(self._encoded(data), np.dtype(name))[0].item()

    def _load_bytearray8(self) -> None:
        size = int.from_bytes(self.read(8), "little")
        self.append(bytes(self.read(size)))     # not bytearray(size)

    def _load_build(self) -> None:
        target, state = self.stack[-2:]
        if not isinstance(target, Record):      # a function of Python's
            raise pickle.UnpicklingError("it has a state of no object")
        if isinstance(target, _NDArray):
            handle = state["handle"]
            if not isinstance(handle, bytes):
                raise pickle.UnpicklingError("an array has no bytes")
            self._take(len(handle))
            target.array = read_array(handle)
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)   # type: ignore

    def _load_keyed(self, code: int, keys: slice) -> None:
        if not all(map(_plain, self.stack[keys])):
            raise pickle.UnpicklingError("a key of a dictionary is no number "
                                         "and no name")
        pickle._Unpickler.dispatch[code](self)              # type: ignore

    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray8
    dispatch[pickle.BUILD[0]] = _load_build
    for _code, _keys in ((pickle.SETITEM, slice(-2, -1)),
                         (pickle.SETITEMS, slice(0, None, 2)),
                         (pickle.DICT, slice(0, None, 2)),
                         (pickle.ADDITEMS, slice(None)),
                         (pickle.FROZENSET, slice(None))):
        dispatch[_code[0]] = partial(_load_keyed, code=_code[0], keys=_keys)


def _items(states: Any) -> Any:
    if not isinstance(states, Mapping):
        raise ValueError("the states are no dictionary")
    return states.items()


def _key(key: Any) -> int | str:
    if type(key) is not str and (type(key) is not int or key < 0):
        raise ValueError(f"a state has the number {key!r}")
    return key


def _state(x: Any, known: dict[int, Any], depth: int = 0) -> Any:
    """`known`: what has been made, by the identity of what it was made of. A
    file may hold one tuple many times in another."""
    if isinstance(x, (tuple, list)):
        if depth > 2:
            raise ValueError("a state is a tuple of tuples of tuples")
        if id(x) not in known:
            known[id(x)] = tuple(_state(y, known, depth + 1) for y in x)
        return known[id(x)]
    if x is not None and not isinstance(x, _NDArray):
        raise ValueError(f"a state is {type(x).__name__}")
    return None if x is None else x.array


def _optimizer(x: Any) -> Record | None:
    if x is not None and not (isinstance(x, Record)
                              and isinstance(x.state, dict)):
        raise ValueError("the optimizer is no object")
    return x
