"""Network inputs from batches that are dicts, and MXNet's data iterators."""
import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu.backends.network import Kwargs
from mgpu.data.nested import as_inputs, as_pair, unpadded

Parameters = Sequence[inspect.Parameter]

_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def inputs_for(shard: Any, parameters: Callable[[], Parameters]
               ) -> tuple[Any, ...]:
    """`as_inputs`, for a network whose forward has `parameters`. A dict
    becomes `Kwargs` if all parameters are keyword-only."""
    inputs = as_inputs(shard)
    if len(inputs) == 1 and isinstance(inputs[0], Mapping) \
            and not isinstance(inputs[0], Kwargs):
        known = parameters()
        if known and all(p.kind in _NAMED for p in known):
            return (Kwargs(inputs[0]),)
    return inputs


@dataclass
class InputSelection:
    """Entries of a dict batch that are passed to a network by name."""

    #: parameters of forward; empty: the dict is the only input
    names: Collection[str]
    #: entries that forward does not take, if `open` is not empty
    doubtful: Collection[str] = ()
    #: parameters of forward without an entry
    open: Collection[str] = ()

    def take(self, shard: Any) -> Any:
        """The inputs of the network."""
        if shard is None:
            return None
        if not self.names:
            return copy.copy(shard)     # forward may pop from it
        return Kwargs({key: shard[key] for key in shard if key in self.names})

    def checked(self, loss: Callable[[Any, Any], Any]
                ) -> Callable[[Any, Any], Any]:
        """`loss`, checked to read the entries that the network does not
        take."""
        def loss_fn(output: Any, batch: Any) -> Any:
            read: set[Any] = set()
            losses = loss(output, watched(batch, read))
            self.check(read, "the loss")
            return losses
        return loss_fn if self.doubtful else loss

    def check(self, read: Collection[str], by: str) -> None:
        """Raise ValueError for an entry that is not in `read`."""
        unread = [key for key in self.doubtful if key not in read]
        if unread:
            raise ValueError(
                "each entry of a dict batch must be a parameter of forward or "
                f"be read by {by}; received {', '.join(map(repr, unread))}, "
                "which is neither, and no entry for "
                f"{', '.join(map(repr, self.open))} of forward. Rename the "
                "entry, or remove it from the batch.")


def choose(batch: Mapping[Any, Any], parameters: Parameters) -> InputSelection:
    """Select the entries of `batch` for a network whose forward has
    `parameters`.

    The network receives the entries named like a parameter, or all entries if
    it has ``**kwargs``. If forward has exactly one parameter without a
    default, and no entry has its name, the network receives the dict.

    Raises
    ------
    ValueError
        Entries are missing for parameters without a default, no entry has the
        name of a parameter, or the batch is ambiguous.
    """
    plain = [p for p in parameters if p.kind not in _STARS]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    needed = [p.name for p in plain if p.default is p.empty]
    given = [p.name for p in plain if p.name in batch
             and p.kind is not p.POSITIONAL_ONLY]
    missing = [name for name in needed if name not in given]
    keys, names = list(batch), [p.name for p in plain]
    one_input = missing == needed and len(needed) == 1 \
        and plain[0].name in needed and plain[0].kind not in _NAMED
    if one_input and not (given or takes_all):
        return InputSelection(())
    if missing or not (given or takes_all or not names):
        why = ", which could be both" if one_input else \
            f", without {', '.join(map(repr, missing))}" if missing else ""
        raise ValueError(
            "the entries of a dict batch must be named like the parameters of "
            "forward, or forward must have one parameter, which is no entry; "
            f"received entries {keys} for "
            f"forward({', '.join(names)}{', **' * takes_all}){why}. Rename "
            "the entries, or pass pairs: (mgpu.Kwargs(name=...), labels) for "
            "inputs by name, (batch, labels) for one input.")
    if takes_all:
        return InputSelection(keys)
    if not names:
        return InputSelection(())       # *args
    left = [name for name in names if name not in given]
    return InputSelection(given, [key for key in keys if key not in given]
                          if left else (), left)


class _Watched(dict[Any, Any]):
    """A dict that records the keys of entries that are read in `read`."""

    def __init__(self, entries: Mapping[Any, Any], read: set[Any]) -> None:
        super().__init__(entries)
        self.read = read


def _watch(name: str, one: bool) -> Callable[..., Any]:
    """Wrap a method of dict that reads one entry, or all."""
    method = getattr(dict, name)

    def watched(self: _Watched, *args: Any) -> Any:
        self.read.update(args[:1] if one else dict.keys(self))
        return method(self, *args)
    return watched


for _name in ("__getitem__", "get", "pop"):
    setattr(_Watched, _name, _watch(_name, one=True))
for _name in ("__iter__", "keys", "values", "items", "copy", "__or__"):
    setattr(_Watched, _name, _watch(_name, one=False))


def watched(batch: Any, read: set[Any]) -> Any:
    """A shallow copy of the dict `batch` that records in `read` the keys of
    entries that are read."""
    if isinstance(batch, UserDict):
        one = copy.copy(batch)
        one.data = _Watched(batch.data, read)
        return one
    return _Watched(batch, read)


def labels_of(batch: Mapping[str, Any]) -> str:
    """Name of the entry with the class numbers: "label" or "labels".

    Raises
    ------
    ValueError
        The batch has neither, or both.
    """
    found = [name for name in ("label", "labels") if name in batch]
    if len(found) != 1:
        raise ValueError(
            "the accuracy needs the entry 'labels' or 'label' of a dict "
            f"batch; received entries {list(batch)}. Pass pairs: "
            "(mgpu.Kwargs(name=...), labels).")
    return found[0]


class Rounds:
    """An iterable of pairs (X, y) over a data iterator of MXNet.

    Each ``iter()`` resets the data iterator. Padding examples of the last
    batch (``batch.pad``) are dropped, except with "roll_over", where they
    belong to the previous epoch.

    Raises
    ------
    ValueError
        The examples are not on the first axis, or the data iterator is one of
        MXNet's C++ library.
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        filled = self._begin()
        return (as_pair(batch, filled) for batch in self.data)

    def inputs(self) -> Iterator[Any]:
        """Iterate over X of each batch. Labels may be missing."""
        filled = self._begin()
        return (unpadded(batch.data, batch.pad if filled else 0)
                for batch in self.data)

    def _begin(self) -> bool:
        """Reset the data iterator. Returns whether the examples in `pad` are
        padding."""
        _check(self.data)
        self.data.reset()
        return all(getattr(one, "last_batch_handle", None) != "roll_over"
                   for one in _inner(self.data))


def as_rounds(data: Any) -> Any:
    """`data`, or `Rounds` of it if it is a data iterator of MXNet, with
    `reset` and `provide_data`."""
    return Rounds(data) if hasattr(data, "reset") \
        and hasattr(data, "provide_data") else data


def _inner(data: Any) -> list[Any]:
    """A data iterator, and those that it reads from."""
    others = [getattr(data, "data_iter", None), *getattr(data, "iters", ())]
    return [data, *(one for other in others if other is not None
                    for one in _inner(other))]


def _check(data: Any) -> None:
    if any(hasattr(one, "handle") for one in _inner(data)):
        raise ValueError(
            "an epoch must have each example once; received a "
            f"{type(data).__name__} of MXNet's library, which may pad its "
            "last batch with examples of the next epoch (round_batch). Use a "
            "DataLoader or mx.io.NDArrayIter, or pass pairs in each epoch: "
            "((b.data[0], b.label[0]) for b in data).")
    for place in [*data.provide_data, *(data.provide_label or ())]:
        axis = (getattr(place, "layout", None) or "N").find("N")
        if axis > 0:
            raise ValueError(
                "the first axis of a batch must be that of the examples; "
                f"received a data iterator of layout {place.layout!r} for "
                f"{place[0]!r}. Create it with a layout 'N...'.")
