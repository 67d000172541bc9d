"""The search for parameters of other forms: what shapes allow, a forward pass
decides."""
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu.parity.maps import Wish, alternatives, as_map, pair_of
from mgpu.parity.measure import layer_of
from mgpu.parity.plan import Entry, Pair

#: so many tensors of a may be so many of b
SIZES = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 4))
#: forward passes that a search takes at most
_PASSES = 200

#: tensors of a and of b; on one side there is only one
Group = tuple[tuple[Entry, ...], tuple[Entry, ...]]


class Choice(NamedTuple):
    """The tensors of some layers of a that belong to those of some layers
    of b. An option is an order of the several ones, and what a map would say
    of each group."""

    groups: list[Group]
    options: list[tuple[tuple[int, ...], tuple[dict[str, Any], ...]]]

    def take(self, option: int) -> list[tuple[Group, dict[str, Any]]]:
        """The groups under an option, each with what a map would say."""
        order, says = self.options[option]
        return [((tuple(ones[i] for i in order) if len(ones) > 1 else ones,
                  tuple(others[i] for i in order) if len(others) > 1
                  else others), said)
                for (ones, others), said in zip(self.groups, says)]

    def pairs(self, option: int) -> list[Pair]:
        """The pairs under an option."""
        found = []
        for (ones, others), said in self.take(option):
            wish = Wish.read({**said, "to": [e.name for e in others]})
            found.append(pair_of([(e, wish) for e in ones], others))
        return found

    def misfits(self, option: int) -> list[tuple[Group, dict[str, Any]]]:
        """The groups of tensors in other forms, each with the entries of a
        map."""
        return [(group, as_map(*group, said))
                for group, said in self.take(option)
                if said or len(group[0]) > 1 or len(group[1]) > 1]


def alignments(a: Sequence[Entry], b: Sequence[Entry],
               kinds: Sequence[Mapping[str, str]] = ({}, {}),
               called: Sequence[Sequence[str]] = ()) -> Iterator[list[Choice]]:
    """Ways to assign all tensors, where shapes allow it: in the order in
    which they stand in the networks, and in that of the calls of layers.

    Parameters
    ----------
    kinds : (dict, dict)
        The kind of the layer of each parameter.
    called : (sequence, sequence)
        Names of parameters in the order of the calls.
    """
    for places in ((), [{name: i for i, name in enumerate(names)}
                        for names in called]) if called else ((),):
        one, two = ([*side] for side in (a, b))
        for side, place in zip((one, two), places):
            side.sort(key=lambda e: place.get(e.name, len(place)))
        packed = _packed(one, two)
        done = [{e.name for group in packed for e in group[i]}
                for i in (0, 1)]
        groups = aligned([e for e in one if e.name not in done[0]],
                         [e for e in two if e.name not in done[1]], _in_order)
        if groups is not None:
            order = list(called[0]) if called else []
            yield sorted(
                _choices([*packed, *groups], kinds), key=lambda c: min(
                    order.index(e.name) if e.name in order else len(order)
                    for e in c.groups[0][0]))


def _packed(a: Sequence[Entry], b: Sequence[Entry]) -> list[Group]:
    """A vector that has as many elements as all tensors of a layer of the
    other side, weights before biases."""
    found: list[Group] = []
    for side, (ones, others) in enumerate(((a, b), (b, a))):
        layers: dict[str, list[Entry]] = {}
        for e in sorted(others, key=lambda e: e.kind == "bias"):
            layers.setdefault(layer_of(e.name), []).append(e)
        for e in ones:
            for members in layers.values():
                if len(e.shape) == 1 and len(members) > 1 and max(
                        len(m.shape) for m in members) > 1 and e.shape[0] \
                        == sum(int(np.prod(m.shape)) for m in members):
                    found.append(((e,), tuple(members)) if not side
                                 else (tuple(members), (e,)))
                    break
    names = [e.name for group in found for side in group for e in side]
    return found if len(names) == len(set(names)) else []


def aligned(a: Sequence[Entry], b: Sequence[Entry], in_order: Callable[
            [Sequence[Entry], Sequence[Entry]], list[Group] | None]
            ) -> list[Group] | None:
    """All tensors of both sides, or None. One kind is aligned after the
    other: Gluon and torch mix them differently."""
    found: list[Group] = []
    for kind in dict.fromkeys(e.kind for e in (*a, *b)):
        ones, others = ([e for e in side if e.kind == kind]
                        for side in (a, b))
        groups = in_order(ones, others)
        if groups is None and kind != "other":
            # Gluon keeps a gamma and a beta that it does not use; torch none.
            groups = in_order([e for e in ones if e.trained],
                              [e for e in others if e.trained])
            if groups is None:
                return None
        found += groups or []
    return found


def equal_shapes(a: Sequence[Entry], b: Sequence[Entry]
                 ) -> list[Group] | None:
    """Each tensor with that in the same place."""
    return [((x,), (y,)) for x, y in zip(a, b)] \
        if [e.shape for e in a] == [e.shape for e in b] else None


def _in_order(a: Sequence[Entry], b: Sequence[Entry]) -> list[Group] | None:
    """Both sequences cut into groups that shapes allow, or None."""
    dead: set[tuple[int, int]] = set()
    path: list[tuple[int, int, Iterator[tuple[int, int]]]] = [
        (0, 0, iter(SIZES))]
    while path:
        i, j, left = path[-1]
        if i == len(a) and j == len(b):
            return [(tuple(a[i:p]), tuple(b[j:q])) for (i, j, _), (p, q, _)
                    in itertools.pairwise(path)]
        for n, m in left:
            ones, others = a[i:i + n], b[j:j + m]
            if len(ones) == n and len(others) == m \
                    and (i + n, j + m) not in dead and next(alternatives(
                        [e.shape for e in ones], [e.shape for e in others]),
                        None) is not None:
                path.append((i + n, j + m, iter(SIZES)))
                break
        else:
            dead.add((i, j))
            path.pop()
    return None


def _choices(groups: Sequence[Group], kinds: Sequence[Mapping[str, str]]
             ) -> list[Choice]:
    """One choice for all tensors of the same layers, so that a weight and
    its bias are split in one order."""
    layers: dict[Any, list[Group]] = {}
    for group in groups:
        layers.setdefault(tuple(tuple(
            layer_of(e.name) for e in side) for side in group), []).append(
            group)
    found = []
    for members in layers.values():
        says = [_says(*group, kinds) for group in members]
        several = max((max(group, key=len) for group in members), key=len)
        orders = [tuple(range(len(several)))]
        if len({e.shape for e in several}) == 1:
            orders = list(itertools.permutations(orders[0]))
        found.append(Choice(members, [
            (order, said) for said in itertools.product(*says)
            for order in orders]))
    return found


def _says(ones: Sequence[Entry], others: Sequence[Entry],
          kinds: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """What a map could say of a group. Layers of one kind keep their weights
    in one way: a square weight is not turned there."""
    found = list(alternatives([e.shape for e in ones],
                              [e.shape for e in others]))
    known = [{own.get(e.name) for e in side}
             for own, side in zip(kinds, (ones, others))]
    if not found:       # see `_packed`
        return [{"reshape": True}]
    if known[0] == known[1] and None not in known[0]:
        found = [said for said in found if "transpose" not in said
                 or "reshape" in said] or found
    return found


def decide(choices: Sequence[Choice], agreement: Callable[[list[Pair]], int],
           confirmed: Callable[[list[Pair]], bool]) -> tuple[list[int], bool]:
    """The option of each choice under which the networks compute the same.
    Without one, the likeliest options, and False.

    Choice after choice, in the order of the calls, takes the option with
    which equal inputs arrive at the most layers, and so do all later ones
    that have the same options. What no layer shows, such as the form of the
    last one, the outputs decide.

    Parameters
    ----------
    agreement : callable
        The number of layers at which equal inputs arrive.
    confirmed : callable
        Whether the outputs are equal.
    """
    taken, passes = [0] * len(choices), 0

    def pairs(options: Sequence[int]) -> list[Pair]:
        return [pair for choice, option in zip(choices, options)
                for pair in choice.pairs(option)]

    def others(i: int) -> Iterator[list[int]]:
        """With each other option of choice `i`."""
        nonlocal passes
        now = taken[:]
        for option in range(len(choices[i].options)):
            if option != now[i] and passes < _PASSES:
                passes += 1
                yield [*now[:i], option, *now[i + 1:]]
    if confirmed(pairs(taken)):
        return taken, True
    best = agreement(pairs(taken))
    for i, choice in enumerate(choices):
        before = taken
        for tried in others(i):
            if (now := agreement(pairs(tried))) > best:
                best, taken = now, tried
        if taken is not before:     # layers of the same forms are alike
            taken = taken[:i] + [
                taken[i] if later.options == choice.options else option
                for later, option in zip(choices[i:], taken[i:])]
            best = agreement(pairs(taken))
            if confirmed(pairs(taken)):
                return taken, True
    for i in reversed(range(len(choices))):
        for tried in others(i):
            if confirmed(pairs(tried)):
                return tried, True
    return taken, False
