"""Which parts of a network become a class, and with which arguments.

Blocks of one structure become one class; what differs between them are its
arguments, as few as say it. A chain that occurs again and again becomes one
too, from border to border: it does not begin with the activation of the
layer before.
"""
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from mgpu.backends._torch.gluon.source.structure import (Arg, Block, Leaf,
                                                         Step,
                                                         block_leaves,
                                                         chain_signature,
                                                         copied, is_size,
                                                         leaves)
from mgpu.gluon_io.parts import Call, Slot

MOST_ARGUMENTS = 6

_CHANNELS = "channels"
_FAMILIES = {"in_channels": _CHANNELS, "out_channels": _CHANNELS,
             "num_features": _CHANNELS, "in_features": _CHANNELS,
             "out_features": _CHANNELS, "kernel_size": "kernel_size"}
_GATES = ("Gate", "HardSwish")
_FACTORS = ("operator.mul", "operator.truediv")
_INTO = ("in_channels", "in_features", "num_features")
_OUT_OF = ("out_channels", "out_features")


class Parameter(NamedTuple):
    """Of a class."""

    name: str
    family: str
    hint: str
    default: Any = None         # as text; None for none


class Class:
    """A class of the source.

    Attributes
    ----------
    name : str
    parameters : list of Parameter
    body : Block or list of items
        A template; sizes that differ are `Arg`.
    places : int
        How often it is used.
    leaves : list of Leaf
        Of the template, through all classes in it, in their order.
    packed : tuple of str
        Names for what the argument `channels`, a tuple, holds.
    flag : str or None
        When an optional join is made: an expression, or "residual" for an
        argument.
    shortcut : str or None
        The same for an optional shortcut.
    inline : str
        What to write in its place, where a class would say no more.
    """

    def __init__(self, body: Any, places: int) -> None:
        self.name, self.body, self.places = "", body, places
        self.parameters: list[Parameter] = []
        self.leaves: list[Leaf] = []
        self.packed: tuple[str, ...] = ()
        self.flag: str | None = None
        self.shortcut: str | None = None
        self.paths: list[str] = []
        self.base = self.inline = ""

    def __deepcopy__(self, memo: Any) -> "Class":
        return self

    @property
    def joined(self) -> tuple[list[list[Any]], int] | None:
        """The branches, and along which axis, if it is no more than branches
        side by side."""
        if not isinstance(self.body, Block) or len(self.body.ins) != 1:
            return None
        *steps, last = self.body.steps
        chains = [s.chain for s in steps]
        outs = tuple(s.outs[0] for s in steps)
        if last.call is None or last.call.function != "torch.cat" \
                or last.call.named or last.outs != self.body.outs \
                or outs != last.ins or not all(chains) \
                or any(s.ins != self.body.ins for s in steps) \
                or last.call.arguments[0] != tuple(
                    map(Slot, range(len(outs)))):
            return None
        return [c for c in chains if c], last.call.arguments[1]

    @property
    def items(self) -> list[Any]:
        """What has arguments."""
        return list(block_leaves(self.body) if isinstance(self.body, Block)
                    else leaves(self.body))

    def family(self, name: str) -> str:
        """Of an argument."""
        return next(p.family for p in self.parameters if p.name == name)


class Instance:
    """A class that is used. `leaves`: what its own stand for here, in their
    order; None for those that are not there."""

    def __init__(self, cls: Class, arguments: dict[str, Any],
                 own: list[Leaf | None]) -> None:
        self.cls, self.arguments, self.leaves = cls, arguments, own
        self.is_norm = False
        self.is_weighted = any(leaf.tensors for leaf in cls.leaves
                               if leaf is not None)
        self.is_activation = not self.is_weighted and cls.base in _GATES

    @property
    def signature(self) -> Any:
        """The same for instances of one class."""
        return ("instance", id(self.cls), tuple(self.arguments),
                tuple(v for v in self.arguments.values()
                      if type(v) is bool))


# -- forms of a block ---------------------------------------------------------

def normalize(block: Block) -> None:
    """Draw the borders of blocks, in place: a join and its activation, a
    shortcut that not all have, what stands before both branches."""
    for chain in _all_chains(block):
        _swishes(chain)
        _shuffles(chain)
    _endings(block)
    blocks = list(_blocks(block))
    for inner in blocks:
        _residual(inner)
    _linear(block, blocks)
    _before(block)
    groups: dict[Any, list[Block]] = {}
    for inner in _blocks(block):
        if _shortcut(inner) is not None:
            groups.setdefault(_without_shortcut(inner), []).append(inner)
    for members in groups.values():
        _alike(members)


def _shuffles(chain: list[Any]) -> None:
    """Three functions that shuffle channels become PyTorch's layer."""
    for i in range(len(chain) - 2):
        calls = [x.call if isinstance(x, Leaf) else None
                 for x in chain[i:i + 3]]
        first = calls[0]
        if first is None or first.function != "torch.Tensor.unflatten" \
                or len(first.arguments) != 3:
            continue
        _, axis, sizes = first.arguments
        if axis == 1 and len(sizes) == 2 and sizes[1] == -1 and calls[1:] == [
                Call("torch.transpose", (Slot(0), 1, 2)),
                Call("torch.flatten", (Slot(0), 1, 2))]:
            chain[i:i + 3] = [Leaf("torch.nn.ChannelShuffle",
                                   {"groups": sizes[0]})]
            _shuffles(chain)
            return


def _swishes(chain: list[Any]) -> None:
    """A value times its sigmoid becomes PyTorch's layer."""
    for i, item in enumerate(chain):
        if not isinstance(item, Block) or len(item.steps) != 2:
            continue
        first, last = item.steps
        inner = [isinstance(x, Leaf) and x.kind for x in first.chain or []]
        if inner == ["torch.nn.Sigmoid"] \
                and last.call == Call("operator.mul", (Slot(0), Slot(1))) \
                and {*last.ins} == {*item.ins, *first.outs} \
                and last.outs == item.outs:
            chain[i] = Leaf("torch.nn.SiLU")


def _blocks(block: Block) -> Iterator[Block]:
    """Those in it, the innermost first."""
    for chain in _chains(block):
        for item in chain:
            if isinstance(item, Block):
                yield from _blocks(item)
                yield item


def _chains(block: Block) -> Iterator[list[Any]]:
    for step in block.steps:
        if step.chain is not None:
            yield step.chain


def _all_chains(block: Block) -> Iterator[list[Any]]:
    for chain in _chains(block):
        yield chain
        for item in chain:
            if isinstance(item, Block):
                yield from _all_chains(item)


def _endings(block: Block) -> None:
    """The activation of a sum belongs to the block that makes the sum, the
    shuffle of channels to the one that joins them, and the factor of a
    product to the one that multiplies."""
    for chain in _all_chains(block):
        for i in reversed(range(len(chain) - 1)):
            item, after = chain[i], chain[i + 1]
            if not isinstance(item, Block) or not isinstance(after, Leaf) \
                    or not item.steps[-1].call:
                continue
            join = item.steps[-1].call.function
            if join == "operator.add" and after.is_activation or (
                    join == "torch.cat"
                    and after.kind == "torch.nn.ChannelShuffle") or (
                    join == "operator.mul" and after.call is not None
                    and after.call.function in _FACTORS):
                value = ("ending", item.outs[0])
                item.steps.append(Step((value,), item.outs, [after]))
                item.outs = (value,)
                del chain[i + 1]


def _join(block: Block) -> Step | None:
    """The sum of two branches."""
    found = [s for s in block.steps if s.call is not None]
    if len(found) == 1 and found[0].call == Call(
            "operator.add", (Slot(0), Slot(1))) and len(block.ins) == 1:
        return found[0]
    return None


def _shortcut(block: Block) -> Step | None:
    return next((s for s in block.steps if s.optional), None)


def _main(block: Block) -> Step:
    join = _join(block)
    assert join is not None
    return next(s for s in block.steps if s.outs[0] in join.ins
                and not s.optional)


def _residual(block: Block) -> None:
    """Mark the shorter branch of a sum as a shortcut that may be absent."""
    join = _join(block)
    if join is None:
        return
    x = block.ins[0]
    made = {s.outs[0]: s for s in block.steps}
    branches = [made.get(v) for v in join.ins]
    if any(b is not None and b.ins != (x,) for b in branches):
        return
    if None in branches:
        at = branches.index(None)
        if join.ins.count(x) == 2:
            return
        step = Step((("shortcut", x),), (x,), [])
        step.absent = True
        join.ins = tuple(step.outs[0] if i == at else v
                         for i, v in enumerate(join.ins))
        block.steps.insert(block.steps.index(join) if at else 0, step)
    else:
        sizes = [sum(1 for _ in leaves(b.chain or [])) for b in branches if b]
        shorter = branches[sizes.index(min(sizes))]
        if sizes[0] == sizes[1] or shorter is None:
            return
        step = shorter
    step.optional, step.otherwise = True, x


def _without_shortcut(block: Block) -> Any:
    """The signature but for the shortcut's layers."""
    shortcut = _shortcut(block)
    assert shortcut is not None
    kept, shortcut.chain = shortcut.chain, []
    found = block.signature
    shortcut.chain = kept
    return found


def _alike(members: list[Block]) -> None:
    """Give absent shortcuts the layers of the others, without any size."""
    there = [s for b in members if (s := _shortcut(b)) and not s.absent]
    for block in members:
        step = _shortcut(block)
        assert step is not None
        if step.absent and there:
            step.chain = copied(there[0].chain)
            assert step.chain is not None
            for item in leaves(step.chain):
                for leaf in item.leaves:
                    leaf.tensors = {}
        elif step.absent:                       # nobody has one
            x, own = step.ins[0], step.outs[0]
            block.steps.remove(step)
            for s in block.steps:
                s.ins = tuple(x if v == own else v for v in s.ins)


def _linear(block: Block, blocks: list[Block]) -> None:
    """A chain that others have a shortcut around is one of them."""
    bodies: dict[Any, list[Block]] = {}
    for b in blocks:
        step = _shortcut(b)
        if step is not None and step.absent and b.outs == _outs(_join(b)):
            chain = _main(b).chain or []
            if sum(i.is_weighted for i in chain if isinstance(i, Leaf)) > 1:
                bodies.setdefault(chain_signature(chain), []).append(b)
    for sign, members in bodies.items():
        n, found = len(sign), False
        own = [id(_main(b).chain) for b in members]
        for chain in [*_all_chains(block)]:
            i = 0
            while id(chain) not in own and i + n <= len(chain):
                after = chain[i + n] if i + n < len(chain) else None
                if chain_signature(chain[i:i + n]) == sign and not (
                        after is not None and not isinstance(after, Block)
                        and (after.is_activation or after.is_norm)) \
                        and _same_kernels(chain[i:i + n], members):
                    new = copied(members[0])
                    _main(new).chain = chain[i:i + n]
                    new.flag, found = False, True
                    chain[i:i + n] = [new]
                i += 1
        for b in members:
            if found:
                b.flag = True


def _same_kernels(chain: list[Any], members: list[Block]) -> bool:
    """Whether the windows of a chain are those of the blocks, where these
    have the same."""
    for own, *others in zip(leaves(chain), *(
            leaves(_main(b).chain or []) for b in members)):
        for key in ("kernel_size", "padding", "dilation"):
            theirs = {repr(x.arguments.get(key)) for x in others}
            if len(theirs) == 1 and repr(own.arguments.get(key)) \
                    not in theirs:
                return False
    return True


def _outs(step: Step | None) -> tuple[Any, ...]:
    return step.outs if step is not None else ()


def _before(block: Block) -> None:
    """Layers in front of a block whose shortcut has layers, which stand in
    the branch where it has none (residual networks of the second kind)."""
    for chain in [*_all_chains(block)]:
        for i in reversed(range(len(chain))):
            b = chain[i]
            step = _shortcut(b) if isinstance(b, Block) else None
            if step is None or step.absent:
                continue
            for n in (4, 3, 2, 1):
                first = chain[i - n:i]
                if i < n or any(isinstance(x, Block) for x in first):
                    continue
                sign = chain_signature([*first, *(_main(b).chain or [])])
                twins = [t for t in _blocks(block)
                         if (s := _shortcut(t)) is not None and s.absent
                         and chain_signature(_main(t).chain or []) == sign
                         and _order(t) == _order(b)]
                if twins:
                    _pull(b, first)
                    del chain[i - n:i]
                    for t in twins:
                        main = _main(t)
                        assert main.chain is not None
                        head, main.chain = main.chain[:n], main.chain[n:]
                        _pull(t, head)
                    break
                if any(_main(t).ins != t.ins and chain_signature(
                        [*(t.steps[0].chain or []),
                         *(_main(t).chain or [])]) == sign
                        for t in _blocks(block) if _join(t)
                        and _shortcut(t) is not None):
                    _pull(b, first)
                    del chain[i - n:i]
                    break


def _order(block: Block) -> tuple[bool, ...]:
    join = _join(block)
    assert join is not None
    return tuple(v == _main(block).outs[0] for v in join.ins)


def _pull(block: Block, first: list[Any]) -> None:
    x = block.ins[0]
    value = ("before", x)
    for s in block.steps:
        s.ins = tuple(value if v == x else v for v in s.ins)
    block.steps.insert(0, Step((value,), (x,), first))


# -- classes ------------------------------------------------------------------

def classes_of(top: Block) -> list[Class]:
    """Make instances of what repeats in the network, in place. The classes,
    those that others use first."""
    found: list[Class] = []
    while True:
        groups: dict[Any, list[tuple[list[Any], int]]] = {}
        for chain in _all_chains(top):
            for i, item in enumerate(chain):
                if isinstance(item, Block) and next(_blocks(item), None) \
                        is None:
                    groups.setdefault(item.signature, []).append((chain, i))
        if not groups:
            break
        for places in groups.values():
            bodies = [chain[i] for chain, i in places]
            for cls, which, instances in make(bodies, [1] * len(bodies)):
                found.append(cls)
                for k, instance in zip(which, instances):
                    chain, i = places[k]
                    chain[i] = instance
    while (best := _best(top, found)) is not None:
        found.append(best)
    return found


def raws(value: Any, places: int) -> tuple[Any, ...]:
    """The numbers behind an argument."""
    return value.raws if isinstance(value, Arg) else (value,) * places


def _items(body: Any) -> list[Any]:
    """What has arguments; None for what is absent."""
    if not isinstance(body, Block):
        return list(leaves(body))
    found: list[Any] = []
    for step in body.steps:
        own = list(leaves(step.chain or []))
        if step.layer is not None:
            own.append(step.layer)
        found += [None] * len(own) if step.absent else own
    return found


class _Group:
    """Columns of arguments that are the same in all places."""

    def __init__(self, family: str, values: list[Any]) -> None:
        self.family, self.values = family, values
        self.columns: list[tuple[int, str]] = []
        self.text = ""

    def takes(self, family: str, values: list[Any]) -> bool:
        """Join them if the columns agree where both have a number."""
        if family != self.family and not (
                family == "groups" and self.family == _CHANNELS):
            return False
        pairs = list(zip(self.values, values))
        if any(a != b for a, b in pairs if a is not None and b is not None) \
                or not any(a is not None and b is not None for a, b in pairs):
            return False
        self.values = [b if a is None else a for a, b in pairs]
        return True


def make(bodies: list[Any], places: list[int]
         ) -> list[tuple[Class, list[int], list[Instance]]]:
    """Classes for bodies of one signature: one if it has few arguments. With
    each, which of the bodies are of it, and what stands in their place."""
    return [_make(bodies, places, which) for which in
            _split(bodies, places, list(range(len(bodies))))]


def _columns(bodies: list[Any], places: list[int], which: list[int]
             ) -> tuple[list[list[Any]], list[_Group], int]:
    rows = [_items(bodies[k]) for k in which]
    best = next((k for k, row in enumerate(rows) if None not in row), 0)
    groups: list[_Group] = []
    alike: list[tuple[int, str, str, list[Any]]] = []
    for at, item in enumerate(rows[best]):
        if item is None:
            continue
        for key, value in item.arguments.items():
            if not is_size(value):
                continue
            values = [x for k, row in zip(which, rows) for x in
                      ((None,) * places[k] if row[at] is None else
                       raws(row[at].arguments[key], places[k]))]
            family = _family(item, key)
            if len(set(values) - {None}) < 2:
                if None in values and family in ("stride", _CHANNELS):
                    alike.append((at, key, family, values))
                continue
            for group in groups:
                if group.takes(family, values):
                    break
            else:
                group = _Group(family, values)
                groups.append(group)
            group.columns.append((at, key))
    # The sizes of a shortcut are those of the block, even where all are alike.
    for at, key, family, values in alike:
        for group in groups:
            if group.takes(family, values):
                group.columns.append((at, key))
                break
    return rows, groups, best


def _family(item: Any, key: str) -> str:
    return item.cls.family(key) if isinstance(item, Instance) \
        else _FAMILIES.get(key, key)


def _split(bodies: list[Any], places: list[int], which: list[int]
           ) -> list[list[int]]:
    """Bodies with the same kernels and so on, where one class would have too
    many arguments."""
    rows, groups, best = _columns(bodies, places, which)
    _name(groups, rows[best])
    free = [g for g in groups if g.text.isidentifier()]
    if len(free) <= MOST_ARGUMENTS - 1 or len(which) == 1:
        return [which]
    for family in ("kernel_size", "padding", "dilation", "groups", "stride"):
        parts: dict[Any, list[int]] = {}
        start = 0
        for k in which:
            end = start + places[k]
            parts.setdefault(repr([g.values[start:end] for g in groups
                                   if g.family == family]), []).append(k)
            start = end
        if 1 < len(parts) < len(which) or len(parts) == 2:
            return [x for part in parts.values()
                    for x in _split(bodies, places, part)]
    return [which]


def _at_end(groups: list[_Group], items: list[Any], keys: tuple[str, ...],
            end: Callable[..., int]) -> _Group | None:
    """The group of the channels that enter the first layer, or leave the
    last one; None where these are a number."""
    at = end((i for i, item in enumerate(items) if item is not None
              and any(key in item.arguments for key in keys)), default=-1)
    return next((g for g in groups
                 if any(i == at and key in keys for i, key in g.columns)),
                None)


def _name(groups: list[_Group], items: list[Any]) -> None:
    """Give each group its expression: a name, or what it follows from.
    `items`: what has arguments in one of the bodies."""
    taken: set[str] = set()

    def unique(name: str) -> str:
        n = next(n for n in itertools.count(1)
                 if (name if n == 1 else f"{name}{n}") not in taken)
        taken.add(name if n == 1 else f"{name}{n}")
        return name if n == 1 else f"{name}{n}"
    inner = [g for g in groups if g.family == _CHANNELS]
    first = _at_end(inner, items, (*_INTO, "channels"), min)
    last = _at_end(inner, items, (*_OUT_OF, "channels"), max)
    order = [g for g in (first, *inner, last, *groups) if g is not None]
    done: list[_Group] = []
    for g in sorted(dict.fromkeys(order), key=lambda g: (
            g.family != _CHANNELS, g is not first, g is last)):
        g.text = _follows(g, done)
        if not g.text:
            if g.family != _CHANNELS:
                name = g.columns[0][1].rstrip("0123456789")
            elif g is first and g is last:
                name = "channels"
            elif g is first:
                name = "in_channels"
            elif g is last:
                name = "out_channels"
            elif any(key == "hidden_channels" for _, key in g.columns) \
                    or first is last is not None:
                name = "hidden_channels"
            else:
                name = "channels"
            g.text = unique(name)
        done.append(g)


def _follows(group: _Group, done: list[_Group]) -> str:
    """An expression for it in those that have a name."""
    for other in done:
        if not other.text.isidentifier():
            continue
        pairs = [(a, b) for a, b in zip(group.values, other.values)
                 if a is not None]
        if any(b is None for _, b in pairs) or not all(
                type(a) is int and type(b) is int for a, b in pairs) \
                or len({a for a, _ in pairs}) < 2:
            continue
        if group.family == "padding" and other.family == "kernel_size" \
                and all(a == b // 2 for a, b in pairs):
            return f"{other.text} // 2"
        if not group.family == other.family == _CHANNELS:
            continue
        ratios = {(a // b, a % b) for a, b in pairs if b}
        if len(ratios) == 1 and (r := ratios.pop())[1] == 0 and r[0] > 1:
            return f"{r[0]} * {other.text}"
        ratios = {(b // a, b % a) for a, b in pairs if a}
        if len(ratios) == 1 and (r := ratios.pop())[1] == 0 and r[0] > 1:
            return f"{other.text} // {r[0]}"
    return ""


def _make(bodies: list[Any], places: list[int], which: list[int]
          ) -> tuple[Class, list[int], list[Instance]]:
    rows, groups, best = _columns(bodies, places, which)
    _name(groups, rows[best])
    cls = Class(copied(bodies[which[best]]), sum(places[k] for k in which))
    cls.base = _base(bodies[which[best]])
    own = cls.items
    cls.leaves = [leaf for item in own for leaf in item.leaves]
    free = [g for g in groups if g.text.isidentifier()]
    packed: list[_Group] = []
    if len(free) > MOST_ARGUMENTS - 1:
        packed = [g for g in free if g.family == _CHANNELS][1:]
        for n, g in enumerate(packed):
            g.text = f"c{n + 1}"
        cls.packed = tuple(g.text for g in packed)
        for g in groups:
            if g not in packed and not g.text.isidentifier():
                g.text = _follows(g, [x for x in groups if x is not g
                                      and x.text.isidentifier()]) or g.text
    for g in groups:
        for at, key in g.columns:
            own[at].arguments[key] = Arg(g.text, tuple(g.values))
    arguments: list[dict[str, Any]] = [{} for _ in which]

    def value(g: _Group, n: int) -> Any:
        for at, key in g.columns:
            if rows[n][at] is not None:
                return rows[n][at].arguments[key]
        return None
    parameters = []
    for g in free:
        if g in packed:
            continue
        kinds = {type(v) for v in g.values if v is not None}
        hint = "int" if kinds == {int} else "tuple[int, ...]" \
            if int not in kinds else "int | tuple[int, ...]"
        given = [value(g, n) for n in range(len(which))]
        default = None
        if g.family != _CHANNELS:
            texts = Counter(repr(v) for v in given if v is not None
                            and not isinstance(v, Arg))
            if g.family in ("stride", "dilation", "groups") and "1" in texts:
                default = "1"
            elif g.family == "padding" and "0" in texts:
                default = "0"
            elif texts and (top := texts.most_common(1)[0])[1] * 2 > len(
                    given):
                default = top[0]
        parameters.append(Parameter(g.text, g.family, hint, default))
        for a, v in zip(arguments, given):
            if v is None:
                v = default if default is None else int(default)
            a[g.text] = v
    if packed:
        parameters.append(Parameter("channels", "packed", "tuple[int, ...]"))
        for n, a in enumerate(arguments):
            a["channels"] = tuple(value(g, n) for g in packed)
    cls.parameters = parameters
    _options(cls, [bodies[k] for k in which], arguments, groups)
    cls.parameters.sort(key=lambda p: (p.default is not None,
                                       p.hint == "bool"))
    instances = [Instance(cls, {p.name: a[p.name] for p in cls.parameters},
                          [leaf if item is not None else None
                           for item, mine in zip(row, own)
                           for leaf in (item or mine).leaves])
                 for a, row in zip(arguments, rows)]
    return cls, which, instances


def _options(cls: Class, bodies: list[Any], arguments: list[dict[str, Any]],
             groups: list[_Group]) -> None:
    """When a shortcut has layers, and when there is one at all."""
    if not isinstance(cls.body, Block):
        return
    step = _shortcut(cls.body)
    if step is not None:
        there = [s is not None and not s.absent
                 for s in map(_shortcut, bodies)]
        if all(there):
            step.optional = False
        else:
            cls.shortcut = _condition(cls, there, arguments, groups, False) \
                or "downsample"
            if cls.shortcut == "downsample":
                cls.parameters.append(Parameter("downsample", "flag", "bool",
                                                "False"))
                for a, yes in zip(arguments, there):
                    a["downsample"] = yes
    if cls.body.flag is not None:
        there = [bool(b.flag) for b in bodies]
        if all(there):
            cls.body.flag = None
            return
        cls.flag = _condition(cls, there, arguments, groups, True) \
            or "residual"
        if cls.flag == "residual":
            cls.parameters.append(Parameter("residual", "flag", "bool",
                                            "True"))
            for a, yes in zip(arguments, there):
                a["residual"] = yes


def _condition(cls: Class, there: list[bool], arguments:
               list[dict[str, Any]], groups: list[_Group], same: bool) -> str:
    """An expression of the arguments that says where; "" for none."""
    channels = [g.text for g in groups if g.family == _CHANNELS
                and "//" not in g.text]
    into = next((t for t in channels if t == "in_channels"), None)
    stride = next((p.name for p in cls.parameters if p.family == "stride"),
                  None)
    outs = [g for g in groups if g.family == _CHANNELS]
    last = max(outs, key=lambda g: max(
        [at for at, k in g.columns if k in _OUT_OF], default=-1),
        default=None)
    if into is None or last is None or last.text == into:
        return ""
    start = [g for g in groups if g.text == into][0].values
    differs = [a != b for a, b in zip(start, last.values)]
    op, word = ("==", "and") if same else ("!=", "or")
    if [x != same for x in differs] == there:
        return f"{into} {op} {last.text}"
    if stride is not None:
        moved = [a[stride] not in (1, (1, 1)) for a in arguments]
        if [(x or y) != same for x, y in zip(differs, moved)] == there:
            return f"stride {op} 1 {word} {into} {op} {last.text}"
    return ""


# -- chains that repeat -------------------------------------------------------

def _sequences(top: Block, found: list[Class]
               ) -> Iterator[tuple[list[Any], int]]:
    """All chains of the source, and in how many places each stands."""
    for chain in _chains(top):
        yield chain, 1
    for cls in found:
        if isinstance(cls.body, Block):
            for chain in _chains(cls.body):
                yield chain, cls.places
        else:
            yield cls.body, cls.places


def _border(chain: list[Any], start: int, end: int) -> bool:
    first, last = chain[start], chain[end - 1]
    before = chain[start - 1] if start else None
    after = chain[end] if end < len(chain) else None
    if first.is_activation or first.is_norm and before is not None and (
            isinstance(before, Leaf) and before.is_weighted):
        return False
    if after is not None and (after.is_activation or after.is_norm
                              and isinstance(last, Leaf)
                              and last.is_weighted):
        return False
    if isinstance(last, Instance) and isinstance(after, Instance) \
            and last.cls is after.cls or isinstance(first, Instance) \
            and isinstance(before, Instance) and first.cls is before.cls:
        return False
    if _depthwise(last):
        return False
    inside = chain[start:end]
    signs = [x.signature for x in inside]
    if any(signs == signs[:d] * (len(signs) // d)
           for d in range(1, len(signs) // 2 + 1)):
        return False
    return any(x.is_weighted for x in inside) and not all(
        isinstance(x, Instance) and x.cls is inside[0].cls
        for x in inside) and len({x.signature for x in inside}) > 1


def _best(top: Block, found: list[Class]) -> Class | None:
    """Make the class that saves most lines, in place; None for none."""
    seen: dict[Any, list[tuple[list[Any], int, int]]] = {}
    for chain, places in _sequences(top, found):
        signs = [item.signature for item in chain]
        for n in range(2, 10):
            last: dict[Any, int] = {}
            for i in range(len(chain) - n + 1):
                key = tuple(signs[i:i + n])
                if last.get(key, -n) + n > i or not _border(chain, i, i + n):
                    continue
                last[key] = i
                seen.setdefault(key, []).append((chain, i, places))
    keys = list(seen)
    ranked = []
    for number, (key, at) in enumerate(seen.items()):
        saved = (len(key) - 1) * len(at) - (len(key) + 5)
        chain, i, _ = at[0]
        # first what is around one layer: classes of others are made of it
        layers = sum(x.is_weighted for x in chain[i:i + len(key)])
        one = layers == 1
        if saved > 0 and (one or layers < 4 and len(at) > 2):
            ranked.append((one, saved, -len(key), number))
    for _, _, short, number in sorted(ranked, reverse=True):
        at, n = seen[keys[number]], -short
        made = make([chain[i:i + n] for chain, i, _ in at],
                    [p for _, _, p in at])
        if len(made) != 1 or made[0][0].packed:
            continue
        cls, _, instances = made[0]
        # from the end, so that places before stay where they are
        for (chain, i, _), new in sorted(zip(at, instances), key=lambda x:
                                         -x[0][1]):
            chain[i:i + n] = [new]
        return cls
    return None


# -- names --------------------------------------------------------------------

def _kernels(chain: Iterable[Any]) -> list[Any]:
    found = []
    for item in chain:
        if isinstance(item, Leaf) and ".Conv" in item.kind:
            found.append(item.arguments["kernel_size"])
    return found


def _depthwise(item: Any) -> bool:
    return item.cls.base == "DepthwiseConv" if isinstance(item, Instance) \
        else isinstance(item, Leaf) and item.is_depthwise


def _base(body: Any) -> str:
    """What to call a class, by what is inside."""
    if not isinstance(body, Block):
        return _chain_name(body)
    calls = [s.call.function for s in body.steps if s.call is not None]
    chains = [s.chain for s in body.steps if s.chain]
    longest = max(chains, key=len, default=[])
    join = calls[-1] if calls else ""
    if len(calls) == 1 and join == "operator.add":
        if len(chains) > 3:
            return "SumBlock"
        layers = [x for x in longest if x.is_weighted and not (
            isinstance(x, Instance) and x.cls.base == "SqueezeExcitation")]
        if len(layers) == 3 and _depthwise(layers[1]):
            return "InvertedResidual"
        kernels = [k.raws[0] if isinstance(k, Arg) else k
                   for k in _kernels(longest)]
        return "Bottleneck" if len(kernels) == 3 and kernels[0] == 1 \
            and kernels[2] == 1 else "ResidualBlock"
    if len(calls) == 1 and join == "operator.mul":
        if any(isinstance(x, Leaf) and "AdaptiveAvgPool" in x.kind
               for x in longest):
            return "SqueezeExcitation"
        return "HardSwish" if _is_hard_swish(body) else "Gate"
    if len(calls) == 2 and join == "torch.cat" and calls[0] in (
            "torch.hsplit", "torch.split"):
        return "SplitBlock"
    if len(calls) == 1 and join == "torch.cat":
        own = [s for s in body.steps if s.chain and s.ins == body.ins]
        join_ins = next(s for s in body.steps if s.call is not None).ins
        if len(own) == 1 and body.ins[0] in join_ins:
            return "DenseLayer"
        return "Branches" if all(sum(x.is_weighted for x in c) < 2
                                 for c in chains) else "InceptionBlock"
    return "Block"


def _is_hard_swish(body: Block) -> bool:
    """Whether it is x times clamp(x + 3, 0, 6) / 6."""
    calls = [x.call for s in body.steps for x in s.chain or []
             if isinstance(x, Leaf)]
    return calls == [Call("operator.add", (Slot(0), 3)),
                     Call("torch.clamp", (Slot(0), 0, 6)),
                     Call("operator.truediv", (Slot(0), 6))]


def _chain_name(chain: list[Any]) -> str:
    weighted = [x for x in chain if x.is_weighted]
    own = [x for x in weighted if isinstance(x, Leaf)]
    inner = [x for x in weighted if isinstance(x, Instance)]
    convs = [x for x in own if ".Conv" in x.kind]
    pools = any(isinstance(x, Leaf) and "Pool" in x.kind for x in chain)
    if any(x.cls.base == "Branches" for x in inner):
        return "SqueezeExpand"
    if len(convs) == 2 and _depthwise(convs[0]) or any(
            x.cls.base == "DepthwiseConv" for x in inner):
        return "SeparableConv"
    if convs and pools and chain[0].is_norm:
        return "Transition"
    if len(convs) == len(own) == 1 and not inner:
        if chain[0].is_norm:
            return "NormConv"
        return "DepthwiseConv" if _depthwise(convs[0]) else "ConvBlock"
    if own and "Linear" in own[0].kind:
        return "DenseBlock"
    return "LayerBlock" if not (convs or inner) else "ConvLayers"


def name(found: list[Class]) -> None:
    """Names that differ: with a letter where several have the same."""
    bases = Counter(cls.base for cls in found)
    letters: Counter[str] = Counter()
    for cls in found:
        cls.name = cls.base
        if bases[cls.base] > 1:
            cls.name += chr(ord("A") + letters[cls.base] % 26)
            if letters[cls.base] >= 26:
                cls.name += str(letters[cls.base] // 26)
            letters[cls.base] += 1
