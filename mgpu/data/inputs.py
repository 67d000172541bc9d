"""What goes to the network of a batch that is a dict, and what MXNet's data
iterators give."""
import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu.backends.base import Kwargs
from mgpu.data.nested import as_inputs, as_pair, unpadded

Parameters = Sequence[inspect.Parameter]

_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def inputs_for(shard: Any, parameters: Callable[[], Parameters]
               ) -> tuple[Any, ...]:
    """`as_inputs`, for a network whose forward has `parameters`: a dict is
    `Kwargs` where these take names only.
    """
    inputs = as_inputs(shard)
    if len(inputs) == 1 and isinstance(inputs[0], Mapping) \
            and not isinstance(inputs[0], Kwargs):
        known = parameters()
        if known and all(p.kind in _NAMED for p in known):
            return (Kwargs(inputs[0]),)
    return inputs


@dataclass
class Choice:
    """Which entries of a batch, a dict, go to a network by name."""

    #: of forward; empty: the dict is the network's one input
    names: Collection[str]
    #: entries that the network does not take, while `open` is not empty
    doubtful: Collection[str] = ()
    #: parameters of forward that no entry gives
    open: Collection[str] = ()

    def take(self, shard: Any) -> Any:
        """The network's inputs."""
        if shard is None:
            return None
        if not self.names:
            return copy.copy(shard)     # forward may pop from it
        return Kwargs({key: shard[key] for key in shard if key in self.names})

    def told(self, loss: Callable[[Any, Any], Any]
             ) -> Callable[[Any, Any], Any]:
        """`loss` of such a batch, which is to read what the network does
        not."""
        def judge(output: Any, batch: Any) -> Any:
            read: set[Any] = set()
            losses = loss(output, watched(batch, read))
            self.check(read, "the loss")
            return losses
        return judge if self.doubtful else loss

    def check(self, read: Collection[str], by: str) -> None:
        """Raise ValueError for an entry that nobody has read."""
        unread = [key for key in self.doubtful if key not in read]
        if unread:
            raise ValueError(
                "an entry of a batch that is a dict goes to the network where "
                f"forward has its name, and is read by {by} otherwise; "
                f"received {', '.join(map(repr, unread))}, which nobody "
                f"reads, while nothing gives {', '.join(map(repr, self.open))}"
                " of forward. Give the entry that name, or leave it out of "
                "the batch.")


def choose(batch: Mapping[Any, Any], parameters: Parameters) -> Choice:
    """Which entries of `batch` go to a network whose forward has
    `parameters`: those that it names, or all if it has ``**kwargs``. A
    forward with one parameter without a default, whose name is no entry's,
    takes the dict as its one input.

    Raises
    ------
    ValueError
        Entries miss for parameters without a default, none has a
        parameter's name, or the dict could be both.
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
        return Choice(())
    if missing or not (given or takes_all or not names):
        why = ", which could be both" if one_input else \
            f", without {', '.join(map(repr, missing))}" if missing else ""
        raise ValueError(
            "a batch that is a dict goes to the network by the names of "
            "forward's parameters, or is its one input where forward has one "
            f"parameter that no entry names; received entries {keys} for "
            f"forward({', '.join(names)}{', **' * takes_all}){why}. Rename "
            "the entries, or give pairs: (mgpu.Kwargs(name=...), labels) for "
            "inputs by name, (batch, labels) for one input.")
    if takes_all:
        return Choice(keys)
    if not names:
        return Choice(())       # *args
    left = [name for name in names if name not in given]
    return Choice(given, [key for key in keys if key not in given]
                  if left else (), left)


class _Watched(dict[Any, Any]):
    """A dict that adds the keys of the entries that are read to `read`."""

    def __init__(self, entries: Mapping[Any, Any], read: set[Any]) -> None:
        super().__init__(entries)
        self.read = read


def _watch(name: str, one: bool) -> Callable[..., Any]:
    """A method of dict that reads one entry, or all."""
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
    """A shallow copy of `batch`, a dict; `read` gets the keys of the entries
    that are read from it."""
    if isinstance(batch, UserDict):
        one = copy.copy(batch)
        one.data = _Watched(batch.data, read)
        return one
    return _Watched(batch, read)


def labels_of(batch: Mapping[str, Any]) -> str:
    """The name of the entry that holds the class numbers.

    Raises
    ------
    ValueError
        None, or two.
    """
    found = [name for name in ("label", "labels") if name in batch]
    if len(found) != 1:
        raise ValueError(
            "the accuracy compares with 'labels' or 'label' of a batch that "
            f"is a dict; received entries {list(batch)}. Give pairs: "
            "(mgpu.Kwargs(name=...), labels).")
    return found[0]


class Rounds:
    """A data iterator of MXNet's kind as an iterable of pairs, (X, y), that
    can be gone through again: each ``iter()`` resets it. Rows that fill up
    the last batch (``batch.pad``) are left out, but for those of the epoch
    before ("roll_over").

    ValueError for examples on another axis than the first, and for an
    iterator of MXNet's library."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        filled = self._begin()
        return (as_pair(batch, filled) for batch in self.data)

    def inputs(self) -> Iterator[Any]:
        """X of each batch, which may have no labels."""
        filled = self._begin()
        return (unpadded(batch.data, batch.pad if filled else 0)
                for batch in self.data)

    def _begin(self) -> bool:
        """Reset the iterator; whether rows in `pad` are filling."""
        _check(self.data)
        self.data.reset()
        return all(getattr(one, "last_batch_handle", None) != "roll_over"
                   for one in _inner(self.data))


def as_rounds(data: Any) -> Any:
    """`data`, or `Rounds` of it if it is a data iterator of MXNet's kind:
    one with `reset` and `provide_data`."""
    return Rounds(data) if hasattr(data, "reset") \
        and hasattr(data, "provide_data") else data


def _inner(data: Any) -> list[Any]:
    """An iterator, and those that it takes its batches from."""
    others = [getattr(data, "data_iter", None), *getattr(data, "iters", ())]
    return [data, *(one for other in others if other is not None
                    for one in _inner(other))]


def _check(data: Any) -> None:
    if any(hasattr(one, "handle") for one in _inner(data)):
        raise ValueError(
            "an epoch has each example once; received a "
            f"{type(data).__name__} of MXNet's library, which may fill up its "
            "last batch from the next epoch (round_batch), begins that one "
            "elsewhere then, and does not tell. Use a DataLoader, or "
            "mx.io.NDArrayIter; or give pairs: ((b.data[0], b.label[0]) for b "
            "in data), each epoch.")
    for place in [*data.provide_data, *(data.provide_label or ())]:
        axis = (getattr(place, "layout", None) or "N").find("N")
        if axis > 0:
            raise ValueError(
                "the first axis of a batch has the examples; received a data "
                f"iterator of layout {place.layout!r} for {place[0]!r}. Make "
                "it with the examples first ('N...').")
