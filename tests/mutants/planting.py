"""What a mutant is, and how it is planted.

A mutant changes one function of `mgpu` while its block runs. The function is
found by its qualified name, wherever its module lies, and the place in it by
a pattern: Python source in which single capital letters stand for any
expression. Neither line breaks nor names of variables that the pattern
leaves open pin the code.
"""
import ast
import contextlib
import copy
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import mgpu


class NotPlanted(Exception):
    """The mutant does not fit the code: no verdict on the tests."""


@dataclass(frozen=True)
class Mutant:
    """One wrong implementation.

    Attributes
    ----------
    name : str
    breaks : str
        What is wrong now, in a sentence.
    where : str
        Qualified name of the function: ``"L2Loss._values"``. A part of the
        module's name before a colon selects one of several:
        ``"functional:allreduce"``.
    changes : tuple of (str, str)
        Pattern and replacement, expressions or statements. Each pattern fits
        exactly one place of the function.
    killer : str
        A test that rejects it, tried first: ``"test_losses.py::test_x"``, or
        one case, ``"test_losses.py::test_x[torch]"``. Any other may do.
    """

    name: str
    breaks: str
    where: str
    changes: tuple[tuple[str, str], ...]
    killer: str

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The function has other code inside the block.

        It keeps its identity, so that whoever imported it runs the mutant.
        """
        function = find(self.where)
        before = function.__code__
        function.__code__ = _changed(function, self)
        try:
            yield
        finally:
            function.__code__ = before


def mutant(name: str, breaks: str, where: str, *texts: str,
           killer: str) -> Mutant:
    """`texts`: pattern, replacement, pattern, replacement, ..."""
    return Mutant(name, breaks, where,
                  tuple(zip(texts[::2], texts[1::2], strict=True)), killer)


def find(where: str) -> FunctionType:
    """The function of mgpu with this qualified name."""
    part, _, name = where.rpartition(":")
    found = {id(f): f for module, f in _functions().get(name, ())
             if part in module}
    if len(found) != 1:
        raise NotPlanted(f"mgpu has {len(found)} functions {where}")
    return next(iter(found.values()))


@functools.cache
def _functions() -> dict[str, list[tuple[str, FunctionType]]]:
    """(module, function) by qualified name, of the whole package."""
    found: dict[str, list[tuple[str, FunctionType]]] = {}
    for info in pkgutil.walk_packages(mgpu.__path__, "mgpu."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        owners = [module, *(x for x in vars(module).values()
                            if inspect.isclass(x)
                            and x.__module__ == info.name)]
        for x in [x for owner in owners for x in vars(owner).values()]:
            x = getattr(x, "fget", None) or getattr(x, "__func__", x)
            x = inspect.unwrap(x) if callable(x) else x
            if isinstance(x, FunctionType) and x.__module__ == info.name:
                found.setdefault(x.__qualname__, []).append((info.name, x))
    return found


def _changed(function: FunctionType, one: Mutant) -> Any:
    """The code object of the function with the changes of the mutant."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition: Any = tree.body[0]
    for pattern, replacement in one.changes:
        _replace(definition, _parsed(pattern), _parsed(replacement), one)
    # They run when a function is defined: not needed here.
    definition.decorator_list, definition.returns = [], None
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    definition.args.defaults = []
    definition.args.kw_defaults = [None] * len(definition.args.kwonlyargs)
    # Inside a function that has the outer names, so that they are free in
    # the new code as they were in the old.
    free = function.__code__.co_freevars
    outer: Any = ast.parse("def outer():\n" + "".join(
        f"    {name} = None\n" for name in free)
        + f"    return {function.__name__}")
    outer.body[0].body.insert(-1, definition)
    space: dict = {}
    exec(compile(ast.fix_missing_locations(outer), f"<mutant {one.name}>",
                 "exec", dont_inherit=True), space)
    code = space["outer"]().__code__
    if code.co_freevars != free:
        raise NotPlanted(f"{one.where} has the outer names {free}; received "
                         f"{code.co_freevars}")
    return code


def _parsed(text: str) -> list[Any]:
    """One expression, or statements."""
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise NotPlanted(f"{text!r} does not parse: {error}") from error
    alone = len(body) == 1 and isinstance(body[0], ast.Expr)
    return [body[0].value] if alone else body


def _replace(tree: ast.AST, pattern: list[Any], new: list[Any],
             one: Mutant) -> None:
    places = []
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            nodes = value if isinstance(value, list) else [value]
            for i in range(len(nodes) - len(pattern) + 1):
                bound: dict[str, Any] = {}
                if all(_fits(p, x, bound) for p, x
                       in zip(pattern, nodes[i:i + len(pattern)])):
                    places.append((node, field, value, i, bound))
    if len(places) != 1:
        raise NotPlanted(f"{one.where} has {len(places)} places that fit "
                         f"{ast.unparse(pattern)}, not one")
    node, field, value, i, bound = places[0]
    filled = [_Filling(bound).visit(copy.deepcopy(x)) for x in new]
    if isinstance(value, list):
        if isinstance(value[i], ast.stmt):
            filled = [x if isinstance(x, ast.stmt) else ast.Expr(x)
                      for x in filled]
        value[i:i + len(pattern)] = filled
    else:
        setattr(node, field, filled[0])


def _is_open(node: Any) -> bool:
    return isinstance(node, ast.Name) and bool(re.fullmatch("[A-Z]", node.id))


def _fits(pattern: Any, node: Any, bound: dict[str, Any]) -> bool:
    if _is_open(pattern):
        known = bound.setdefault(pattern.id, node)
        return isinstance(node, ast.expr) and \
            ast.unparse(known) == ast.unparse(node)
    if isinstance(pattern, list):
        return isinstance(node, list) and len(pattern) == len(node) and all(
            _fits(p, x, bound) for p, x in zip(pattern, node))
    if not isinstance(pattern, ast.AST):
        return pattern == node
    return type(pattern) is type(node) and all(
        _fits(value, getattr(node, name), bound)
        for name, value in ast.iter_fields(pattern) if name != "ctx")


class _Filling(ast.NodeTransformer):
    """Puts what the letters of a pattern stand for into a replacement."""

    def __init__(self, bound: dict[str, Any]):
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> Any:
        found = copy.deepcopy(self.bound.get(node.id, node))
        if hasattr(found, "ctx"):
            found.ctx = node.ctx
        return found


def all_mutants() -> list[Mutant]:
    """Those of all modules of this package, and no name twice."""
    package = importlib.import_module(__package__)
    found: list[Mutant] = []
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("of_"):
            found += importlib.import_module(
                f"{__package__}.{module.name}").MUTANTS
    names = [one.name for one in found]
    assert len(set(names)) == len(names), sorted(
        name for name in names if names.count(name) > 1)
    return found
