"""What an operator of MXNet becomes in PyTorch: a layer or a function call.

A part says it in data: which class or function, called with what. So one
description of an operator serves both who builds the network and who writes
it down as source.
"""
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mgpu.gluon_io.graph import Graph, Node


class Slot(NamedTuple):
    """Stands for an input of the operator where a call takes it."""

    number: int


class Layer(NamedTuple):
    """A module with the parameters of the operator.

    Attributes
    ----------
    kind : str
        Where its class is: ``"torch.nn.Conv2d"``.
    arguments : dict
        What the class is called with.
    tensors : dict of str to int
        The inputs that are its parameters and buffers, by their names in the
        module.
    inputs : tuple of Slot
        What it is called with.
    frozen : tuple of str
        Names of `tensors` that are not trained.
    values : dict of str to float
        Names of `tensors` whose values are this number, whatever the file
        has.
    """

    kind: str
    arguments: dict[str, Any]
    tensors: dict[str, int] = {}
    inputs: tuple[Any, ...] = (Slot(0),)
    frozen: tuple[str, ...] = ()
    values: dict[str, float] = {}


class Call(NamedTuple):
    """A call of a function: ``Call("torch.cat", ((Slot(0), Slot(1)), 1))``.
    An argument may be a `Call` too."""

    function: str
    arguments: tuple[Any, ...]
    named: dict[str, Any] = {}


Part = Layer | Call
Shape = tuple[int, ...]
#: ``rule(node, shapes)``; shapes of the inputs that are arrays of the file,
#: None for the others
Rule = Callable[[Node, list[Shape | None]], Part]

_rules: dict[str, Rule] = {}


class MissingOperator(NotImplementedError):
    """What a rule raises for attributes that it does not know."""


def operator(*names: str) -> Callable[[Rule], Rule]:
    """Decorator: the rule for these operators of MXNet."""
    def add(rule: Rule) -> Rule:
        for name in names:
            _rules[name] = rule
        return rule
    return add


def register_op(name: str, rule: Rule) -> None:
    """Say what the operator `name` of MXNet becomes: ``rule(node, shapes)``
    returns a `Layer` or a `Call`. It counts from then on, also in the place
    of mgpu's own. For an attribute that it does not know it raises
    NotImplementedError."""
    _rules[name] = rule


def parts_of(graph: Graph, shapes: Mapping[str, Shape]) -> dict[int, Part]:
    """The part of each operator, by the number of its node.

    `shapes`: of the arrays of the file, by their names.
    NotImplementedError naming all operators and attributes without a rule.
    """
    found, missing = {}, []
    for i, node in enumerate(graph.nodes):
        if node.op == "null":
            continue
        rule = _rules.get(node.op)
        try:
            if rule is None:
                raise MissingOperator("no rule")
            found[i] = rule(node, [
                shapes.get(graph.nodes[j].name) if graph.nodes[j].op == "null"
                else None for j, _ in node.inputs])
        except NotImplementedError as error:
            missing.append(f"{node.op}: {error} (node {node.name!r})")
    if missing:
        more = f"; and {len(missing) - 12} more" if len(missing) > 12 else ""
        raise MissingOperator(
            f"every operator of a network needs a rule; received "
            f"{len(missing)} without one: {'; '.join(missing[:12])}{more}. "
            "Add rules with mgpu.register_op.")
    return found


def only(node: Node, **allowed: Any) -> None:
    """MissingOperator if an attribute of the node has another value than
    these; a tuple holds several."""
    for key, values in allowed.items():
        if node.attributes[key] not in (
                values if isinstance(values, tuple) else (values,)):
            raise MissingOperator(f"{key}={node.attributes[key]!r}")
