"""What a map says of the parameters of two networks."""
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu.errors import MatchError
from mgpu.parity.forms import (Blocks, Each, Join, Shape, Step, Turn, View,
                               undone)
from mgpu.parity.plan import Entry, Pair
from mgpu.utils.arguments import is_integer

#: what an explicit map may say of a parameter of `a`: its name in `b`, or a
#: dict of what `Wish` has
Target = str | Mapping[str, Any]


class Wish(NamedTuple):
    """What a map says of a tensor of `a`.

    In this order, the tensor

    - has equal `blocks` along axis 0 that are reordered: block
      ``blocks[i]`` comes to place i;
    - is transposed: see `numpy.transpose`;
    - is split along `axis` into the tensors `to`, or is part i of n, along
      `axis`, of the one tensor `to` (`part` is (i, n));
    - gets the shape of `to` (`reshape`; several are joined as flat ones).
    """

    to: tuple[str, ...]
    part: tuple[int, ...] | None = None
    axis: int = 0
    transpose: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None
    reshape: bool = False

    @classmethod
    def read(cls, target: Any) -> "Wish":
        """ValueError for what is no wish."""
        if isinstance(target, str):
            return cls((target,))
        if not isinstance(target, Mapping) or "to" not in target:
            raise ValueError('write a name of b, or {"to": name, ...}')
        odd = sorted(map(str, target.keys() - set(cls._fields)))
        if odd:
            raise ValueError(f"{', '.join(odd)} is none of "
                             f"{', '.join(cls._fields)}")
        to = target["to"]
        to = (to,) if isinstance(to, str) else to
        if not isinstance(to, (list, tuple)) or not to or not all(
                isinstance(name, str) for name in to):
            raise ValueError('"to" is a name of b, or a list of names')
        read: dict[str, Any] = {}
        for key in ("part", "transpose", "blocks"):
            value = target.get(key)
            if value is not None:
                value = tuple(value) if isinstance(value, Iterable) else ("",)
                if not all(is_integer(i, 0) for i in value):
                    raise ValueError(f'"{key}" is a list of numbers from 0')
                value = tuple(map(int, value))
            read[key] = value
        read["axis"] = target.get("axis", 0)
        read["reshape"] = target.get("reshape", False)
        if not is_integer(read["axis"], 0):
            raise ValueError('"axis" is a number from 0')
        if not isinstance(read["reshape"], bool):
            raise ValueError('"reshape" is true or false')
        if read["part"] and len(to) > 1:
            raise ValueError('"part" is of one tensor: write one name in '
                             '"to"')
        return cls(tuple(to), **read)

    def own(self, entry: Entry) -> tuple[tuple[Step, ...], Shape]:
        """The steps that the tensor of `a` takes by itself, and its shape
        after them."""
        shape, steps = entry.shape, list[Step]()
        if self.blocks is not None:
            n = len(self.blocks)
            if sorted(self.blocks) != list(range(n)) or not n:
                raise ValueError(f"blocks {self.blocks} are no order of {n}")
            if not shape or shape[0] % n:
                raise ValueError(f"axis 0 of {entry} has no {n} equal blocks")
            steps.append(Blocks(len(shape), self.blocks))
        if self.transpose is not None:
            if sorted(self.transpose) != list(range(len(shape))):
                raise ValueError(
                    f"{self.transpose} are not the axes of {entry}")
            steps.append(Turn(self.transpose))
            shape = tuple(shape[i] for i in self.transpose)
        return tuple(steps), shape


def pair_of(ones: Sequence[tuple[Entry, Wish]], others: Sequence[Entry]
          ) -> Pair:
    """The pair of one or several tensors of `a`, and one or several of `b`;
    ValueError where the shapes do not fit."""
    entries = [entry for entry, _ in ones]
    if len({e.is_statistic for e in (*entries, *others)}) > 1:
        raise ValueError("a running statistic and a parameter")
    wish, flat = ones[0][1], any(wish.reshape for _, wish in ones)
    taken = [wish.own(entry) for entry, wish in ones]
    own, shapes = [t[0] for t in taken], tuple(t[1] for t in taken)
    targets = tuple(e.shape for e in others)
    many = len(ones) > 1
    parts, whole = (shapes, targets[0]) if many else (targets, shapes[0])
    join = Join(parts, None if flat else wish.axis) if len(parts) > 1 \
        else None
    if join is not None and not flat and not _side_by_side(parts, wish.axis):
        raise ValueError(f"shapes {', '.join(map(str, parts))} are not side "
                         f"by side along axis {wish.axis}")
    joined = join.shape() if join is not None else parts[0]
    if np.prod(whole) != np.prod(joined) or whole != joined and not flat:
        hint = None if len(parts) > 1 \
            else next(alternatives(shapes, targets), None)
        raise ValueError(
            f"another shape: {' + '.join(map(str, entries))} -> "
            f"{' + '.join(map(str, others))}"
            + (f"; add {json.dumps(hint)[1:-1]}" if hint else ""))
    joins: list[Step] = [] if join is None else [join]
    views: list[Step] = [] if whole == joined else [View(joined, whole)]
    if many:
        steps = [*([Each(tuple(own))] if any(own) else []), *joins, *views]
    else:
        steps = [*own[0], *undone([*joins, *views])]
    return Pair(tuple(e.name for e in entries),
                tuple(e.name for e in others), tuple(steps))


def _side_by_side(shapes: Sequence[Shape], axis: int) -> bool:
    """Whether arrays of the shapes can be joined along the axis."""
    return all(axis < len(s) for s in shapes) \
        and len({s[:axis] + (0,) + s[axis + 1:] for s in shapes}) == 1


def _turned(one: Shape, other: Shape) -> Iterator[dict[str, Any]]:
    """How a kernel of another number of axes may stand: (channels, width) of
    the one is (1, width, channels) of the other."""
    long = [n for n in other if n != 1]
    if len(one) == len(other) or not 2 < len(one) < 5 \
            or [n for n in one if n != 1] == long:
        return
    for axes in itertools.permutations(range(1, len(one))):
        shape = [one[i] for i in (0, *axes)]
        if [n for n in shape if n != 1] == long:
            yield {"transpose": [0, *axes], "reshape": True}


def alternatives(ones: Sequence[Shape], others: Sequence[Shape]
          ) -> Iterator[dict[str, Any]]:
    """What a map may say so that tensors of the shapes `ones` become those
    of the shapes `others`, the likeliest first. On one side there is only
    one tensor."""
    if len(ones) == len(others) == 1:
        (one,), (other,) = ones, others
        if one == other:
            yield {}
        if len(one) == 2 and one[::-1] == other:
            yield {"transpose": [1, 0]}
        if one != other and np.prod(one) == np.prod(other):
            yield from _turned(one, other)
            yield {"reshape": True}
        return
    parts, (whole,) = (ones, others) if len(ones) > 1 else (others, ones)
    for turned in (False, True):
        # a tensor of a is turned before it is joined or split
        if turned and {len(s) for s in (*parts, whole)} != {2}:
            continue
        own, goal = parts, whole
        if turned and len(ones) > 1:
            own = [shape[::-1] for shape in parts]
        elif turned:
            goal = whole[::-1]
        for axis in range(len(goal)):
            if _side_by_side(own, axis) \
                    and Join(tuple(own), axis).shape() == goal:
                yield {**({"axis": axis} if axis else {}),
                       **({"transpose": [1, 0]} if turned else {})}


def as_map(ones: Sequence[Entry], others: Sequence[Entry],
           said: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a map under which tensors of `a` are those of `b`, with
    what `alternatives` says."""
    to: Any = [e.name for e in others]
    to = to if len(to) > 1 else to[0]
    if len(ones) > 1:
        return {e.name: {"to": to, "part": [i, len(ones)], **said}
                for i, e in enumerate(ones)}
    return {ones[0].name: {"to": to, **said}
            if said or len(others) > 1 else to}


def read_map(a: Sequence[Entry], b: Sequence[Entry],
             given: Mapping[str, Target]) -> list[Pair]:
    """The pairs that a map names; MatchError for one that does not fit."""
    of_a, of_b = ({name: e for e in side for name in (e.name, *e.aliases)}
                  for side in (a, b))
    groups: dict[Any, list[tuple[Entry, Wish]]] = {}
    wrong = []
    for name, target in given.items():
        try:
            wish = Wish.read(target)
            for missing in {name} - of_a.keys():
                raise ValueError(f"no such name in a: {missing!r}")
            for missing in set(wish.to) - of_b.keys():
                raise ValueError(f"no such name in b: {missing!r}")
            to = tuple(of_b[n].name for n in wish.to)
            groups.setdefault(to if wish.part else (to, name), []).append(
                (of_a[name], wish._replace(to=to)))
        except ValueError as error:
            wrong.append(f"{name!r}: {error}")
    claims = {(tuple(e.name for e, _ in members), members[0][1].to)
              for members in groups.values()}
    for side, which in enumerate("ab"):
        names = [n for claim in claims for n in claim[side]]
        wrong += [f"{twice!r} of {which} is named twice" for twice in
                  sorted({n for n in names if names.count(n) > 1})]
    pairs: dict[Pair, None] = {}
    for members in groups.values():
        first = members[0][1]
        try:
            parts = [wish.part for _, wish in members if wish.part]
            if sorted(parts) != [(i, len(parts)) for i in range(len(parts))]:
                raise ValueError(
                    f"{len(parts)} entries are parts {[*map(list, parts)]} "
                    "of it: write one for each part, [0, n] to [n - 1, n]")
            members.sort(key=lambda member: member[1].part or ())
            if len({wish.axis for _, wish in members}) > 1:
                raise ValueError('its parts need one "axis"')
            pairs[pair_of(members, [of_b[n] for n in first.to])] = None
        except ValueError as error:
            ones = ", ".join(repr(entry.name) for entry, _ in members)
            wrong.append(f"{ones} -> {', '.join(first.to)}: {error}")
    if wrong:
        raise MatchError("a map pairs each name of a with one of b, of equal "
                         "shape; received " + "; ".join(wrong) + ". Correct "
                         "these entries.", {})
    return list(pairs)
