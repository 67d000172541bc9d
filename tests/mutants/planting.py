"""What a mutant is, how it is planted, and where all of them are."""
import ast
import contextlib
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

#: modules of this package that hold no mutants
_MACHINERY = ("conftest", "controls", "planting", "runner", "test_mutants")


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
    plant : callable
        Gives a context manager; the code is wrong inside of it.
    tests : tuple of str
        Which tests reject it, the fastest that must: ``"test_x.py::test_y"``
        for all cases of a test, ``"test_x.py::test_y[torch-2dev]"`` for one,
        ``"test_x.py::test_y[torch-*"`` for those that begin so.
    """

    name: str
    breaks: str
    plant: Callable[[], AbstractContextManager[Any]]
    tests: tuple[str, ...]


def edit(where: str, *texts: str
         ) -> Callable[[], AbstractContextManager[None]]:
    """A function with other source text.

    Parameters
    ----------
    where : str
        ``"mgpu.trainer:Trainer.update"``.
    *texts : str
        Old, new, old, new, ... Each old one stands in the function's source
        (without its outer indentation) exactly once.

    Notes
    -----
    The function keeps its identity and gets another code object, so that
    whoever imported it by its name runs the mutant too.
    """
    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        function = _function(where)
        before = function.__code__
        function.__code__ = _code(function, where, texts)
        try:
            yield
        finally:
            function.__code__ = before
    return planted


def together(*plants: Callable[[], AbstractContextManager[Any]]
             ) -> Callable[[], AbstractContextManager[None]]:
    """Several changes at once."""
    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for plant in plants:
                stack.enter_context(plant())
            yield
    return planted


def _function(where: str) -> FunctionType:
    module, _, path = where.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = inspect.getattr_static(found, name)
    except (ImportError, AttributeError) as error:
        raise NotPlanted(f"there is no {where} ({error})") from error
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(getattr(found, "__func__", found))
    if not isinstance(found, FunctionType):
        raise NotPlanted(f"{where} is no function")
    return found


def _code(function: FunctionType, where: str, texts: tuple[str, ...]) -> Any:
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        if source.count(old) != 1:
            raise NotPlanted(f"{where} holds {old!r} {source.count(old)} "
                             "times instead of once")
        source = source.replace(old, new)
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise NotPlanted(f"{where} does not parse: {error}") from error
    definition = tree.body[0]
    # Run when a function is made: not wanted here.
    definition.decorator_list, definition.returns = [], None
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    definition.args.defaults = []
    definition.args.kw_defaults = [None] * len(definition.args.kwonlyargs)
    # Inside a function that has the outer names, so that they are free in
    # the new code as they were in the old.
    free = function.__code__.co_freevars
    outer = ast.parse("def outer():\n" + "".join(
        f"    {name} = None\n" for name in free)
        + f"    return {function.__name__}")
    outer.body[0].body.insert(-1, definition)
    space: dict = {}
    exec(compile(ast.fix_missing_locations(outer), f"<mutant of {where}>",
                 "exec", dont_inherit=True), space)
    code = space["outer"]().__code__
    if code.co_freevars != free:
        raise NotPlanted(f"{where} has the outer names {free}; received "
                         f"{code.co_freevars}")
    return code


def all_mutants() -> list[Mutant]:
    """Those of all areas, and no name twice."""
    package = importlib.import_module(__package__)
    found: list[Mutant] = []
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in _MACHINERY:
            found += importlib.import_module(
                f"{__package__}.{module.name}").MUTANTS
    names = [mutant.name for mutant in found]
    assert len(set(names)) == len(names), sorted(
        name for name in names if names.count(name) > 1)
    return found
