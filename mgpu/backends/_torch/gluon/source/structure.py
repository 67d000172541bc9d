"""The structure of a network: chains of layers, and blocks where they part.

A *value* is what an operator computes. Where all that leads from one value
to another passes through nothing else, that part of the graph is a block; so
blocks lie in each other, and between them are chains.
"""
import copy
import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from mgpu.backends._torch.gluon.build import find
from mgpu.gluon_io.graph import Graph, constants, entries
from mgpu.gluon_io.parts import (Call, Layer, Shape, Slot, form_of, parts_of,
                                 slots_of)

#: the node and its output, or a tuple of a word and another
Value = Any

_FLAT = Call("torch.flatten", (Slot(0), 1))
ACTIVATIONS = {"torch.nn.ReLU", "torch.nn.Sigmoid", "torch.nn.Tanh",
               "torch.nn.Softplus", "torch.nn.Softsign", "torch.nn.SiLU",
               "torch.nn.GELU", "torch.nn.LeakyReLU", "torch.nn.PReLU",
               "torch.nn.Hardtanh", "torch.nn.ReLU6", "torch.nn.ELU",
               "torch.nn.SELU"}


#: functions that are layers where they stand in a chain
_AS_LAYERS = {repr(Call(function, (Slot(0), *rest))): layer
              for layer, function, *rest in (
    ("torch.nn.Identity", "operator.mul", 1),
    ("torch.nn.ReLU", "torch.relu"), ("torch.nn.Tanh", "torch.tanh"),
    ("torch.nn.Sigmoid", "torch.sigmoid"))}


class Arg(NamedTuple):
    """An argument that stands for several numbers: `raws` has one for each
    place where the class that it stands in is used; None where the part of
    the class is not used there."""

    text: str
    raws: tuple[Any, ...]


class Leaf:
    """A layer of one input, or a function of one.

    Attributes
    ----------
    kind : str
        The class of the layer; "" for a function; "parameter" for an array.
    arguments : dict
        What the class is called with.
    call : Call or None
        The function.
    tensors : dict of str to str
        See `mgpu.gluon_io.Layer`; `values` and `frozen` too.
    """

    def __init__(self, kind: str, arguments: Mapping[str, Any] | None = None,
                 call: Call | None = None, layer: Layer | None = None,
                 rank: int | None = None) -> None:
        self.kind, self.call, self.rank = kind, call, rank
        self.returns = layer.returns if layer else ()
        self.arguments = dict(arguments or {})
        self.tensors = dict(layer.tensors) if layer else {}
        self.values = dict(layer.values) if layer else {}
        self.frozen = layer.frozen if layer else ()
        #: whether the network calls it several times
        self.shared = False

    @property
    def leaves(self) -> "list[Leaf]":
        """Itself; see `Instance`."""
        return [self]

    @property
    def signature(self) -> Any:
        """The same for leaves that differ in sizes alone."""
        return (self.kind, repr(self.call), self.frozen, self.is_depthwise,
                self.rank if self.frozen or self.is_norm else None,
                tuple((k, v) for k, v in self.arguments.items()
                      if not is_size(v)),
                tuple(k for k, v in self.arguments.items() if is_size(v)))

    @property
    def is_activation(self) -> bool:
        """Whether it is a non-linearity without parameters."""
        return self.kind in ACTIVATIONS and not self.tensors or (
            self.call is not None and self.call.function == "torch.clamp")

    @property
    def is_depthwise(self) -> bool:
        """Whether it is a convolution of each channel for itself."""
        groups = self.arguments.get("groups", 1)
        return ".Conv" in self.kind and groups != 1 and (
            groups == self.arguments["in_channels"])

    @property
    def is_norm(self) -> bool:
        """Whether it normalizes."""
        return "Norm" in self.kind

    @property
    def is_weighted(self) -> bool:
        """Whether it is a convolution or a dense layer, say."""
        return bool(self.tensors) and not self.is_norm


def is_size(x: Any) -> bool:
    """Whether an argument may be one of a class: a number of things, or
    several."""
    return type(x) is int or isinstance(x, Arg) or (
        type(x) is tuple and bool(x) and all(type(y) is int for y in x))


class Step:
    """One statement of a block: a chain that is applied, or a call.

    Attributes
    ----------
    outs, ins : tuple of values
    chain : list of items or None
    call : Call or None
        Its slots are numbers of `ins`.
    layer : Leaf or None
        A layer of several inputs, or of others than one value; `call` holds
        its arguments, as those of a function "".
    otherwise : value
        A shortcut that not all of a class have: what stands for it there.
    absent : bool
        Whether it is such a one.
    title : str
        What to call the chain, where that is known.
    """

    def __init__(self, outs: tuple[Value, ...], ins: tuple[Value, ...],
                 chain: list[Any] | None = None, call: Call | None = None,
                 layer: Leaf | None = None) -> None:
        self.outs, self.ins = outs, ins
        self.chain, self.call, self.layer = chain, call, layer
        self.title = ""
        self.otherwise: Value = None
        self.absent = False
        self.optional = False

    @property
    def signature(self) -> Any:
        """Without the values."""
        return (None if self.chain is None else chain_signature(self.chain),
                repr(self.call), self.layer and self.layer.signature)


class Block:
    """Steps from one value (or several) to one (or several)."""

    def __init__(self, ins: tuple[Value, ...], steps: list[Step],
                 outs: tuple[Value, ...]) -> None:
        self.ins, self.outs = ins, outs
        self.steps = steps
        self.pieces = 1
        self.flag: bool | None = None       # whether an optional join is made

    def ordered(self) -> None:
        """Steps in the order in which the outputs ask for them, which is the
        same for all blocks of one kind."""
        made = {v: s for s in self.steps for v in s.outs}
        order: list[Step] = []
        seen: set[int] = set()
        stack = [(v, False) for v in reversed(self.outs)]
        while stack:
            value, done = stack.pop()
            step = made.get(value)
            if step is None or (id(step) in seen and not done):
                continue
            if done:
                order.append(step)
                continue
            seen.add(id(step))
            stack.append((value, True))
            stack += [(v, False) for v in reversed(step.ins)]
        self.steps = order

    @property
    def signature(self) -> Any:
        """The same for blocks that differ in sizes alone."""
        number: dict[Value, int] = {v: i for i, v in enumerate(self.ins)}
        rows = []
        first: dict[Any, int] = {}      # that has these arrays
        for i, s in enumerate(self.steps):
            ins = tuple(number.setdefault(v, len(number)) for v in s.ins)
            outs = tuple(number.setdefault(v, len(number)) for v in s.outs)
            rows.append((ins, outs, s.signature, s.optional,
                         number.get(s.otherwise),
                         first.setdefault(arrays_of(s), i) != i))
        return ("block", self.flag is None, len(self.ins), tuple(rows),
                tuple(number[v] for v in self.outs))


def chain_signature(chain: list[Any]) -> Any:
    """The same for chains that differ in sizes alone."""
    return tuple(item.signature for item in chain)


def leaves(chain: list[Any]) -> Iterator[Any]:
    """What has arguments in a chain, in order, through its blocks."""
    for item in chain:
        if isinstance(item, Block):
            yield from block_leaves(item)
        else:
            yield item


def block_leaves(block: Block) -> Iterator[Any]:
    """The same of a block."""
    for step in block.steps:
        if step.chain is not None:
            yield from leaves(step.chain)
        if step.layer is not None:
            yield step.layer


def arrays_of(step: Step) -> Any:
    """What its layers hold: the same for steps that call the same ones. With
    arrays of its own, or none, no other step's."""
    found = [leaf for item in leaves(step.chain or []) for leaf in item.leaves]
    found += [step.layer] if step.layer is not None else []
    if not any(leaf is not None and leaf.shared for leaf in found):
        return step
    return (step.signature, tuple(tuple(leaf.tensors.items())
                                  for leaf in found if leaf is not None))


# -- from the graph -----------------------------------------------------------

def structure_of(graph: Graph, shapes: Mapping[str, Shape],
                 whole: Collection[str] = ()) -> Block:
    """The whole network as one block."""
    steps, ins = _steps(graph, parts_of(graph, shapes, whole), shapes)
    block = Block(ins, steps, tuple(graph.heads))
    block.ordered()
    _nest(block)
    return block


def _steps(graph: Graph, parts: Mapping[int, Any],
           shapes: Mapping[str, Shape]
           ) -> tuple[list[Step], tuple[Value, ...]]:
    """A step for each operator, and the inputs of the network."""
    ranks = _Ranks(graph, parts)
    steps: list[Step] = []
    ins: list[Value] = []
    arrays: set[Value] = set()
    calls = Counter(map(_module, parts.values()))
    still = constants(graph)
    for i, part in parts.items():
        node = graph.nodes[i]
        used = sorted(slots_of(part))
        for slot in used:
            j, k = node.inputs[slot]
            if graph.nodes[j].op != "null" or (j, k) in arrays or \
                    (j, k) in ins:
                continue
            name = graph.nodes[j].name
            if name in shapes:
                arrays.add((j, k))
                leaf = Leaf("parameter", {"size": shapes[name]})
                leaf.tensors = {"": name}
                leaf.frozen = ("",) if name in still else ()
                steps.append(Step(((j, k),), (), layer=leaf))
            else:
                ins.append((j, k))
        values = list(dict.fromkeys(node.inputs[s] for s in used))
        at = {s: values.index(node.inputs[s]) for s in used}
        outs = tuple((i, k) for k in range(part.outputs))
        data = [v for v in values if v not in arrays]
        one = len(values) == 1 == len(data) and part.outputs == 1 \
            and form_of(part) == 0
        if isinstance(part, Layer):
            leaf = Leaf(part.kind, _shortest(part), layer=part,
                        rank=ranks.of(node.inputs[0]))
            leaf.shared = bool(part.tensors) and calls[_module(part)] > 1
            inputs = _renumbered(part.inputs, at)
            if one and inputs == (Slot(0),):
                steps.append(Step(outs, tuple(values), [leaf]))
            elif one and inputs == (_FLAT,):
                flat = [] if ranks.of(node.inputs[0]) == 2 \
                    else [Leaf("torch.nn.Flatten")]
                steps.append(Step(outs, tuple(values), [*flat, leaf]))
            else:
                steps.append(Step(outs, tuple(values),
                                  call=Call("", inputs), layer=leaf))
        else:
            call = _renumbered(part, at)
            if one:
                layer = _AS_LAYERS.get(repr(call))
                steps.append(Step(outs, tuple(values), [
                    Leaf(layer) if layer else Leaf("", call=call)]))
            else:
                steps.append(Step(outs, tuple(values), call=call))
    ins += [h for h in graph.heads if graph.nodes[h[0]].op == "null"
            and h not in ins and h not in arrays]
    order = entries(graph, shapes)
    return steps, tuple(sorted(
        ins, key=lambda value: order.index(graph.nodes[value[0]].name)))


def _module(part: Any) -> str:
    """The same for parts that are one module."""
    return repr(part[:3]) if isinstance(part, Layer) else ""


def _renumbered(x: Any, at: Mapping[int, int]) -> Any:
    if isinstance(x, Slot):
        return Slot(at[x.number])
    if isinstance(x, Call):
        return x._replace(
            arguments=_renumbered(x.arguments, at),
            named={k: _renumbered(v, at) for k, v in x.named.items()})
    if type(x) in (tuple, list):
        return type(x)(_renumbered(y, at) for y in x)
    return x


def defaults_of(kind: str) -> dict[str, Any]:
    """What a class takes where nothing is given."""
    return {p.name: p.default for p in _parameters_of(kind)
            if p.default is not p.empty}


def arguments_of(kind: str) -> list[str]:
    """What it is called with, in order."""
    return [p.name for p in _parameters_of(kind)
            if p.kind is p.POSITIONAL_OR_KEYWORD]


def _parameters_of(kind: str) -> list[inspect.Parameter]:
    cls = find(kind)
    found = [*inspect.signature(cls).parameters.values()]
    if issubclass(cls, torch.nn.RNNBase):       # which say *args, **kwargs
        found = [p for p in inspect.signature(
            torch.nn.RNNBase).parameters.values() if p.name != "mode"]
        found.append(inspect.Parameter(
            "nonlinearity", inspect.Parameter.KEYWORD_ONLY, default="tanh"))
    return found


def _shortest(part: Layer) -> dict[str, Any]:
    """The arguments but for those that are PyTorch's defaults; sizes stay,
    since another layer of the class may have another."""
    usual = defaults_of(part.kind)
    own = {k: v for k, v in part.arguments.items()
           if k not in usual or v != usual[k] or is_size(usual[k])}
    for key in ("stride", "padding", "output_padding", "dilation", "groups"):
        if ".Conv" in part.kind and key in usual:
            own.setdefault(key, usual[key])
    order = [p.name for p in _parameters_of(part.kind)]
    return dict(sorted(own.items(), key=lambda x: order.index(x[0])
                       if x[0] in order else len(order)))


class _Ranks:
    """The number of axes of values, as far as layers tell."""

    def __init__(self, graph: Graph, parts: Mapping[int, Any]) -> None:
        self._found: dict[Value, int | None] = {}
        self._read(graph, parts)
        # What is known of an output tells of the input, and so on.
        for i, part in reversed([*parts.items()]):
            if isinstance(part, Layer) and part.inputs == (Slot(0),) and (
                    part.kind in ACTIVATIONS or any(
                        x in part.kind for x in ("Norm", "Dropout", "Pool"))):
                known = self._found.get((i, 0))
                if not self._found.get(graph.nodes[i].inputs[0]):
                    self._found[graph.nodes[i].inputs[0]] = known
        self._read(graph, parts)

    def _read(self, graph: Graph, parts: Mapping[int, Any]) -> None:
        rank: int | None
        for i, part in parts.items():
            node = graph.nodes[i]
            kind = part.kind if isinstance(part, Layer) else part.function
            last = kind[-2:]
            if last in ("1d", "2d", "3d") and (
                    "Conv" in kind or "Pool" in kind):
                rank = int(last[0]) + 2
                if not self._found.get(node.inputs[0]):
                    self._found[node.inputs[0]] = rank
            elif kind == "torch.nn.Flatten" or kind.endswith("Linear") \
                    and part.inputs == (_FLAT,):
                rank = 2
            elif isinstance(part, Layer) or kind in (
                    "torch.cat", "torch.clamp") or "operator." in kind:
                found = [self._found.get(x) for x in node.inputs]
                rank = next((r for r in found if r), None)
            else:
                rank = None
            for k in range(part.outputs):
                self._found[i, k] = rank or self._found.get((i, k))

    def of(self, value: tuple[int, int]) -> int | None:
        """None where it is not known."""
        return self._found.get(value)


# -- blocks in blocks ---------------------------------------------------------

def _consumers(steps: list[Step], outs: tuple[Value, ...]
               ) -> dict[Value, int]:
    return Counter([v for s in steps for v in s.ins] + list(outs))


def _nest(block: Block) -> None:
    """Make blocks of what lies between two values, and join chains."""
    _chains(block)
    changed = True
    while changed:
        changed = False
        for step, inner in _regions(block):
            gone = {id(s) for s in inner}
            at = next(i for i, s in enumerate(block.steps) if s is step)
            nested = Block((_entry(inner),), inner, step.outs)
            _chains(nested)
            nested.ordered()
            block.steps[at] = Step(step.outs, nested.ins, [nested])
            block.steps = [s for s in block.steps if id(s) not in gone]
            changed = True
            break
    _chains(block)


def _entry(inner: list[Step]) -> Value:
    made = {v for s in inner for v in s.outs}
    return next(v for s in inner for v in s.ins if v not in made)


def _regions(block: Block) -> Iterator[tuple[Step, list[Step]]]:
    """Each last step of a block of its own, with the steps of that."""
    made = {v: s for s in block.steps for v in s.outs}
    place = {id(s): i for i, s in enumerate(block.steps)}
    # the value through which all must pass, and how deep it lies
    above: dict[Value, Value] = {}
    depth: dict[Value, int] = {None: 0}
    for v in block.ins:
        above[v], depth[v] = None, 1
    users: dict[Value, list[Step]] = {}
    for s in block.steps:
        for v in s.ins:
            users.setdefault(v, []).append(s)
    for s in block.steps:
        ins = [v for v in s.ins if v in above]
        if not ins:                     # an array: from nowhere
            continue
        x = ins[0]
        for y in ins[1:]:
            while x != y:
                if depth[x] < depth[y]:
                    x, y = y, x
                x = above[x]
        for v in s.outs:
            above[v], depth[v] = x, depth[x] + 1
        if len(ins) < 2 or x is None or len(s.outs) != 1:
            continue
        inner: dict[int, Step] = {id(s): s}
        stack = list(s.ins)
        while stack:
            v = stack.pop()
            if v == x or v not in made or id(made[v]) in inner:
                continue
            inner[id(made[v])] = made[v]
            stack += made[v].ins
        if len(inner) == len(block.steps):
            continue
        if any(id(u) not in inner for t in inner.values() if t is not s
               for v in t.outs for u in users.get(v, ())) or any(
                v in block.outs for t in inner.values() if t is not s
                for v in t.outs):
            continue
        yield s, sorted(inner.values(), key=lambda t: place[id(t)])


def _chains(block: Block) -> None:
    """Steps of one input each that follow each other become one."""
    used = _consumers(block.steps, block.outs)
    made = {v: s for s in block.steps for v in s.outs}
    kept: list[Step] = []
    for step in block.steps:
        before = made.get(step.ins[0]) if step.chain is not None else None
        if before is not None and before.chain is not None \
                and used[step.ins[0]] == 1 \
                and not _parts_here(before.chain, step.chain or []):
            before.chain += step.chain or []
            before.outs = step.outs
            made[step.outs[0]] = before
        else:
            kept.append(step)
    for step in kept:
        if step.chain is not None and len(step.chain) > 1:
            step.chain = [item for item in step.chain if not (
                isinstance(item, Leaf) and item.kind == "torch.nn.Identity")
                ] or step.chain[:1]
    block.steps = kept


def _parts_here(chain: list[Any], after: list[Any]) -> bool:
    """Whether layers that the network calls several times end or begin
    between two chains: they are a module of their own."""
    def shared(part: list[Any]) -> list[bool]:
        return [leaf.shared for item in leaves(part) for leaf in item.leaves
                if leaf is not None and leaf.tensors]
    before, behind = shared(chain), shared(after)
    return behind != [] and all(behind) != (before != [] and before[-1])


def copied(x: Any) -> Any:
    """A copy for a class, whose arguments take the place of numbers."""
    return copy.deepcopy(x)
