"""The layout of mgpu: few modules at the top, private names stay in their
module, public names have docstrings, and no file is executed. (Imports run
downwards: see the contracts of import-linter in pyproject.toml.)"""
import ast
import functools
import importlib
import inspect
import json
from pathlib import Path

import pytest

import mgpu

PACKAGE = Path(mgpu.__file__).parent


def sources():
    """The source of every module of mgpu, by its name."""
    return {".".join(("mgpu", *path.relative_to(PACKAGE).with_suffix("")
                      .parts)).removesuffix(".__init__"):
            path.read_text(encoding="utf-8")
            for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def nodes(source):
    """All nodes of a source's syntax tree."""
    return list(ast.walk(ast.parse(source)))


# -- the top of the package ---------------------------------------------------

def test_few_modules_are_at_the_top():
    """Packages hold the code; what is at the top is public."""
    assert {path.stem for path in PACKAGE.glob("*.py")} == {
        "__init__", "__main__", "_api", "callbacks", "d2l", "datasets",
        "errors", "initializers", "losses", "metrics", "optimizers",
        "testing"}
    assert len(dir(mgpu)) <= 45


# -- private names ------------------------------------------------------------

def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_members(source):
    """The private names that the classes of a module define."""
    found = set()
    for node in nodes(source):
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
                    found.add(inner.name)
                elif isinstance(inner, (ast.Assign, ast.AnnAssign)):
                    found |= {x.id for x in ast.walk(inner)
                              if isinstance(x, ast.Name)
                              and isinstance(x.ctx, ast.Store)}
        elif isinstance(node, ast.Attribute) \
                and isinstance(node.ctx, ast.Store) \
                and ast.unparse(node.value) in ("self", "cls"):
            found.add(node.attr)
    return set(filter(is_private, found))


def borrowed(sources):
    """Private names of one module that another one uses: (user, name).

    The frameworks' own private names are not ours: a member counts if a class
    of another module of mgpu defines it and none of this one does.
    """
    own = {name: private_members(source) for name, source in sources.items()}
    found = set()
    for name, source in sources.items():
        others = set().union(*(names for other, names in own.items()
                               if other != name)) - own[name]
        modules = set(sources)
        for node in nodes(source):
            if isinstance(node, ast.ImportFrom) \
                    and node.module.split(".")[0] == "mgpu":
                for alias in node.names:
                    if f"{node.module}.{alias.name}" in sources:
                        modules.add(alias.asname or alias.name)
                    elif is_private(alias.name):
                        found.add((name, alias.name))
        for node in nodes(source):
            if isinstance(node, ast.Attribute):
                owner, used = node.value, node.attr
            elif isinstance(node, ast.Call) and len(node.args) > 1 and \
                    ast.unparse(node.func) in ("getattr", "setattr",
                                               "hasattr", "delattr"):
                owner, used = node.args[0], ast.unparse(node.args[1])[1:-1]
            else:
                continue
            if used in others or is_private(used) \
                    and ast.unparse(owner) in modules:
                found.add((name, used))
    return sorted(found)


def test_private_names_stay_in_their_module():
    plugin = (PACKAGE.parent / "pytest_mgpu.py").read_text(encoding="utf-8")
    assert borrowed({**sources(), "pytest_mgpu": plugin}) == []


@pytest.mark.parametrize("source, name", [
    ("from mgpu.a import _f", "_f"), ("def g(x):\n    return x._y", "_y"),
    ("import mgpu.a\nmgpu.a._f()", "_f"), ("x = getattr(a, '_y', None)", "_y"),
    ("from mgpu import a as x\ny = x._f", "_f"), ("A._z = 1", "_z")])
def test_a_borrowed_private_name_is_seen(source, name):
    a = """
def _f(): ...
class A:
    _z = 1
    def __init__(self):
        self._y = 2
"""
    assert borrowed({"mgpu.a": a, "mgpu.b": source}) == [("mgpu.b", name)]
    # at home, of a framework, or of this module too
    for innocent in (a, "def g(net):\n    return net._f, net.__dict__",
                     "class B:\n    _y = 1\ndef g(b):\n    return b._y"):
        assert borrowed({"mgpu.a": a, "mgpu.b": innocent}) == []


# -- docstrings ---------------------------------------------------------------

#: the modules that were public in version 0.1
NAMES = json.loads((Path(__file__).parent / "files" / "0.1" / "names.json"
                    ).read_text(encoding="utf-8"))


def test_what_is_public_has_a_docstring():
    """Its own, or that of the method that it overrides."""
    def bare(owner, name, thing):
        if not inspect.getdoc(thing):
            yield f"{owner}.{name}"
        for inner, member in vars(thing).items() if inspect.isclass(thing) \
                else ():
            if inspect.isfunction(member) and not inner.startswith("_") \
                    and not inspect.getdoc(getattr(thing, inner)):
                yield f"{owner}.{name}.{inner}"
    found = []
    for module in map(importlib.import_module, NAMES):
        for name, thing in vars(module).items():
            if not name.startswith("_") and getattr(
                    thing, "__module__", None) == module.__name__ \
                    and (inspect.isclass(thing) or inspect.isfunction(thing)):
                found += bare(module.__name__, name, thing)
    assert found == []


# -- no pickle ----------------------------------------------------------------

#: what may name pickle: a reader that calls nothing; bytes to compare
PICKLES = {"mgpu.gluon_io.states": {"_Unpickler", "UnpicklingError", "BUILD"},
           "mgpu.backends._mxnet.given": {"dumps"}}
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
READS_PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle",
                 "joblib", "shelve", "marshal", "jsonpickle"}


def code_from_files(name, source):
    """Where a module could execute what a file says."""
    found, allowed = [], PICKLES.get(name, set())
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names
                      if alias.name.split(".")[0] in READS_PICKLES
                      and not allowed]
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in READS_PICKLES:
                found.append(node.module)
        elif isinstance(node, ast.Attribute) \
                and isinstance(node.value, ast.Name) \
                and node.value.id in READS_PICKLES \
                and node.attr not in allowed \
                and not (allowed and node.attr.isupper()):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in RUNS_CODE or called.endswith((
                    "torch.load", "jit.load", "load_pickle")) or any(
                    a.arg == "allow_pickle"
                    and ast.unparse(a.value) != "False"
                    or a.arg == "weights_only"
                    and ast.unparse(a.value) != "True"
                    for a in node.keywords):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Constant) and node.value in READS_PICKLES \
                and name != "mgpu.gluon_io.states":
            found.append(repr(node.value))
    return found


def test_no_file_is_executed():
    assert {name: found for name, source in sources().items()
            if (found := code_from_files(name, source))} == {}


def test_the_search_finds_what_could_be_executed():
    for source in (
            "import pickle", "import pickle as p", "from pickle import loads",
            "import marshal", "eval('1')", "exec(x)",
            "np.load(f, allow_pickle=True)", "np.load(f, allow_pickle=x)",
            "torch.load(f)", "torch.jit.load(f)",
            "torch.load(f, weights_only=False)",
            "importlib.import_module('pickle')"):
        assert code_from_files("mgpu.x", source), source
    for name in PICKLES:
        for call in ("load(f)", "loads(x)", "Unpickler(f)"):
            assert code_from_files(name, f"pickle.{call}")
    assert not code_from_files("mgpu.x", "np.load(f, allow_pickle=False)\n"
                               "net.eval()\nre.compile('x')")
