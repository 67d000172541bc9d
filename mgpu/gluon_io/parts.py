"""What an operator of MXNet becomes in PyTorch: a layer or a function call.

A part says it in data: which class or function, called with what. So one
description of an operator serves both who builds the network and who writes
it down as source.
"""
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from mgpu.errors import MissingOperator
from mgpu.gluon_io.graph import LOSSES, Graph, Node, constants
from mgpu.gluon_io.whole import FLOATING, KEPT, STILL, Cut, cuts

Shape = tuple[int, ...]


class Slot(NamedTuple):
    """Stands for an input of the operator where a call takes it."""

    number: int


#: operators whose result has as many axes as their first input
_KEEPS_RANK = frozenset(
    "Activation LeakyReLU BatchNorm LayerNorm InstanceNorm Dropout LRN "
    "L2Normalization softmax log_softmax Cast clip identity _copy relu "
    "sigmoid tanh exp log sqrt square abs negative Concat concat slice "
    "slice_axis slice_like SwapAxis swapaxes elemwise_add elemwise_sub "
    "elemwise_mul elemwise_div broadcast_add broadcast_sub broadcast_mul "
    "broadcast_div _plus_scalar _minus_scalar _rminus_scalar _mul_scalar "
    "_div_scalar _rdiv_scalar _power_scalar _maximum_scalar _minimum_scalar "
    "_equal_scalar _not_equal_scalar _greater_scalar _lesser_scalar "
    "UpSampling _contrib_BilinearResize2D "
    "_contrib_AdaptiveAvgPooling2D".split())


class Source:
    """What enters an operator: an array of the file, an input of the network,
    or what another operator computes.

    Attributes
    ----------
    node : Node
        Who makes it; an array or an input is a node of `op` "null".
    output : int
        Which of the outputs of `node`.
    shape : tuple of int or None
        Of an array of the file; None for all else.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, Shape] | None,
                 number: int, output: int) -> None:
        self._graph, self._shapes = graph, shapes
        self.node, self.output = graph.nodes[number], output

    @property
    def shape(self) -> Shape | None:
        if self.node.op != "null":
            return None
        if self._shapes is None:
            raise _NotKnown
        return self._shapes.get(self.node.name)

    @property
    def inputs(self) -> "list[Source]":
        """What enters `node` itself."""
        return [Source(self._graph, self._shapes, j, k)
                for j, k in self.node.inputs]

    @property
    def name(self) -> str:
        """Of the array. MissingOperator if it is none of the file."""
        if self._shapes is not None:
            self.sizes()
        return self.node.name

    @property
    def rank(self) -> int | None:
        """How many axes it has; None where the graph does not say."""
        more, source = 0, self
        while source.shape is None:
            op, a = source.node.op, source.node.attributes
            if op in _KEEPS_RANK:
                pass
            elif op in ("expand_dims", "_npi_expand_dims"):
                more += 1
            elif op in ("Convolution", "Deconvolution", "Pooling") \
                    and a["kernel"]:
                return more + 2 + len(a["kernel"])
            elif op in ("FullyConnected", "_npx_fully_connected"):
                if a["flatten"]:
                    return more + 2
            elif op in ("Flatten", "flatten", "_npx_batch_flatten"):
                return more + 2
            elif op == "transpose" and a["axes"]:
                return more + len(a["axes"])
            elif op in ("Reshape", "reshape") and a["shape"] \
                    and min(a["shape"]) > -2:
                return more + len(a["shape"])
            else:
                return None
            source = source.inputs[0]
        return more + len(source.shape)

    def sizes(self) -> Shape:
        """The shape. MissingOperator if it is no array of the file."""
        if self.shape is None:
            raise MissingOperator(
                f"the file has no array {self.node.name!r}: a layer has "
                "parameters where it is an input of the network"
                if self.node.op == "null" else
                f"{self.node.name!r} is computed, and no array of the file")
        return self.shape


class Layer(NamedTuple):
    """A module with the parameters of the operator.

    Attributes
    ----------
    kind : str
        Where its class is: ``"torch.nn.Conv2d"``.
    arguments : dict
        What the class is called with.
    tensors : dict of str to str
        Its parameters and buffers: the name in the module, and that of the
        array in the file (`Source.name`).
    inputs : tuple
        What it is called with: `Slot`, `Call`, numbers.
    frozen : tuple of str
        Names of `tensors` that are not trained.
    values : dict of str to float
        Names of `tensors` whose values are this number, whatever the file
        has.
    outputs : int
        How many the operator has, where it has several; the layer returns
        them as a tuple.
    returns : tuple
        Where it returns them in another form: that form, with the numbers of
        the operator's outputs. ``(0, (1, 2))`` of an LSTM.
    """

    kind: str
    arguments: dict[str, Any]
    tensors: dict[str, str] = {}
    inputs: tuple[Any, ...] = (Slot(0),)
    frozen: tuple[str, ...] = ()
    values: dict[str, float] = {}
    outputs: int = 1
    returns: tuple[Any, ...] = ()


class Call(NamedTuple):
    """A call of a function or of a tensor's method.

    ``Call("torch.cat", ((Slot(0), Slot(1)), 1))`` is ``torch.cat((a, b), 1)``;
    ``Call("torch.Tensor.reshape", (Slot(0), -1))`` is ``a.reshape(-1)``. An
    argument may be a `Call` too. With several `outputs` it returns a tuple.
    """

    function: str
    arguments: tuple[Any, ...]
    named: dict[str, Any] = {}
    outputs: int = 1


Part = Layer | Call
#: ``rule(node, inputs)``
Rule = Callable[[Node, Sequence[Source]], Part]

_rules: dict[str, Rule] = {}


class _NotKnown(MissingOperator):
    """A rule looks at a shape, and no file of arrays was given."""


def operator(*names: str) -> Callable[[Rule], Rule]:
    """Decorator: the rule for these operators of MXNet."""
    def add(rule: Rule) -> Rule:
        for name in names:
            assert name not in _rules, f"{name} has two rules"
            _rules[name] = rule
        return rule
    return add


def register_op(name: str, rule: Rule) -> None:
    """Say what the operator `name` of MXNet becomes: ``rule(node, inputs)``
    returns a `Layer` or a `Call`. It counts from then on, also in the place
    of mgpu's own. For an attribute that it does not know it raises
    NotImplementedError."""
    _rules[name] = rule


def rule_of(name: str) -> Rule:
    """The rule for an operator. MissingOperator if it has none."""
    if name not in _rules:
        raise MissingOperator("no rule")
    return _rules[name]


def number(x: float) -> float:
    """As a person writes it: 2 for 2.0."""
    return int(x) if abs(x) < 1e15 and x == int(x) else x


def form_of(part: Part) -> Any:
    """What its part returns, with the numbers of the operator's outputs in
    their places."""
    if isinstance(part, Layer) and part.returns:
        return part.returns
    return 0 if part.outputs == 1 else tuple(range(part.outputs))


def slots_of(part: Part) -> set[int]:
    """The inputs of the operator that its part is called with."""
    found: set[int] = set()

    def look(x: Any) -> None:
        if isinstance(x, Slot):
            found.add(x.number)
        elif isinstance(x, Call):
            look(x.arguments)
            look(tuple(x.named.values()))
        elif isinstance(x, (tuple, list)):
            for inner in x:
                look(inner)
    look(part.inputs if isinstance(part, Layer) else part)
    return found


class Missing(NamedTuple):
    """A node of a graph that has no rule, or none for its attributes."""

    op: str
    why: str
    node: str

    def __str__(self) -> str:
        return f"{self.op}: {self.why} (node {self.node!r})"


def parts_of(graph: Graph, shapes: Mapping[str, Shape],
             whole: Collection[str] = ()) -> dict[int, Part]:
    """The part of each operator, by the number of its node, in the order in
    which they are computed. What no output needs has none: a label, or what a
    part makes by itself.

    `shapes`: of the arrays of the file, by their names; `whole`: the names
    of those of whole numbers.
    NotImplementedError naming all operators and attributes without a rule.
    """
    found, missing = _parts(graph, shapes, whole)
    if missing:
        more = f"; and {len(missing) - 12} more" if len(missing) > 12 else ""
        raise MissingOperator(
            f"every operator of a network needs a rule; received "
            f"{len(missing)} without one: "
            f"{'; '.join(map(str, missing[:12]))}{more}."
            " Add rules with mgpu.register_op.")
    return found


def missing_in(graph: Graph, shapes: Mapping[str, Shape] | None,
               whole: Collection[str] = ()) -> list[Missing]:
    """What `parts_of` would refuse, in the order of the graph. Without
    `shapes` what no shape would change: operators without a rule, and
    attributes that a rule refuses before it looks at one."""
    return _parts(graph, shapes, whole)[1]


def _parts(graph: Graph, shapes: Mapping[str, Shape] | None,
           whole: Collection[str] = ()
           ) -> tuple[dict[int, Part], list[Missing]]:
    found: dict[int, Part] = {}
    missing = []
    cutting = {} if shapes is None else cuts(graph, shapes, whole)
    needed, still = {i for i, _ in graph.heads}, constants(graph)
    for i in reversed(range(len(graph.nodes))):
        node = graph.nodes[i]
        if i not in needed or node.op == "null":
            continue
        try:
            found[i] = rule_of(node.op)(node, [Source(graph, shapes, *x)
                                               for x in node.inputs])
            found[i] = _frozen(found[i], still)
            if i in cutting:
                found[i] = _guarded(found[i], node, cutting[i])
            enters = {node.inputs[slot][0] for slot in slots_of(found[i])}
            needed |= enters
            missing += [Missing(
                graph.nodes[j].op, f"its gradient ignores what follows, here "
                f"{node.op}", graph.nodes[j].name) for j in enters
                if graph.nodes[j].op in LOSSES
                and node.op not in ("BlockGrad", "stop_gradient")]
        except NotImplementedError as error:
            every = [j for j, _ in node.inputs]
            if isinstance(error, _NotKnown):
                # it may make by itself what enters it, but for its data
                needed |= set(every[:1])
            else:
                missing.append(Missing(node.op, str(error), node.name))
                needed |= set(every)
        except (ArithmeticError, LookupError, TypeError, ValueError,
                AttributeError) as error:
            # what the operator cannot have, or its rule did not expect
            missing.append(Missing(
                node.op, "attributes or inputs that do not fit it "
                f"({type(error).__name__}: {error})", node.name))
            needed |= {j for j, _ in node.inputs}
    return dict(sorted(found.items())), missing[::-1]


def _frozen(part: Part, arrays: Collection[str]) -> Part:
    """The part, which does not train these arrays."""
    if isinstance(part, Layer):
        part = part._replace(frozen=(*part.frozen, *(
            key for key, array in part.tensors.items()
            if array in arrays and key not in part.frozen)))
    return part


def _guarded(part: Part, node: Node, cut: Cut) -> Part:
    """The part, which refuses whole numbers as it runs, or computes of them
    what MXNet does."""
    if cut.surely and cut.what == FLOATING:
        raise MissingOperator("of whole numbers, which MXNet cuts to whole "
                              "numbers")
    if cut.what in (KEPT, STILL):
        guard = rule_of(f"mgpu.{cut.what}")(node, [])
    elif cut.surely:    # MXNet converts them, and this does so too
        guard = rule_of("Cast")(node._replace(attributes={
            "dtype": cut.what}), [])
    else:
        guard = rule_of(f"mgpu.{FLOATING}")(node, [])
    assert isinstance(guard, Call)
    if cut.what == KEPT:
        return guard._replace(arguments=(part, Slot(0)))

    def wrapped(x: Any) -> Any:
        if isinstance(x, Slot) and x.number in cut.inputs:
            return guard._replace(arguments=(x, *guard.arguments[1:]))
        if isinstance(x, Call):
            return x._replace(arguments=wrapped(x.arguments), named={
                key: wrapped(value) for key, value in x.named.items()})
        return tuple(map(wrapped, x)) if type(x) is tuple else x
    if isinstance(part, Layer):
        return part._replace(inputs=wrapped(part.inputs))
    return part._replace(arguments=wrapped(part.arguments))


def only(node: Node, **allowed: Any) -> None:
    """MissingOperator if an attribute of the node has another value than
    these; a tuple holds several."""
    for key, values in allowed.items():
        if node.attributes[key] not in (
                values if isinstance(values, tuple) else (values,)):
            raise MissingOperator(f"{key}={node.attributes[key]!r}")
