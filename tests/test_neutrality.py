"""Neutral code names no framework, and `mgpu` imports with NumPy alone."""
import ast
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import mgpu
from conftest import BACKENDS
from mgpu.backends.base import Backend
from mgpu.backends.ops import Ops

PACKAGE = Path(mgpu.__file__).parent
#: `mgpu/distributed/_*.py` carry bytes between processes with a framework,
#: and are no neutral code
NEUTRAL = sorted(path for path in PACKAGE.rglob("*.py")
                 if "backends" not in path.relative_to(PACKAGE).parts
                 and path.parent.name != "demo"     # programs of one framework
                 and not path.match("distributed/_[a-z]*.py"))
FRAMEWORKS = {"mxnet", "torch"}
NAMES = FRAMEWORKS | {"gluon", "pytorch"}


# -- what the source says -----------------------------------------------------

def _names_engines(node):
    """Whether an expression is a backend's name, or a collection of them."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(map(_names_engines, node.elts))
    return isinstance(node, ast.Constant) and node.value in NAMES


def _is_backend_name(node):
    """``backend.name``, ``get_backend().name``, ``self.backend.name``..."""
    return ast.unparse(node).lower().endswith(
        ("backend.name", "backend().name", "engine.name"))


def offences(source):
    """Lines of neutral code that import a framework, or ask which backend is
    in use."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            bad = any(a.name.split(".")[0] in FRAMEWORKS for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            path = ("" if node.level else node.module).split(".")
            bad = path[0] in FRAMEWORKS or path[:2] == ["mgpu", "backends"] \
                and any(part.startswith("_") for part in path)
        elif isinstance(node, ast.Call):    # import_module, startswith, ...
            bad = ast.unparse(node.func).split(".")[-1] in (
                "import_module", "__import__", "startswith", "get") and any(
                isinstance(a, ast.Constant) and isinstance(a.value, str)
                and a.value.split(".")[0] in FRAMEWORKS for a in node.args)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            # "gluon" and "torch" are also the two semantics of `Trainer`.
            bad = any(map(_is_backend_name, sides)) or (
                any(map(_names_engines, sides))
                and not any("semantics" in ast.unparse(x) for x in sides))
        elif isinstance(node, ast.MatchValue):
            bad = _names_engines(node.value)
        else:
            bad = False
        if bad:
            found.append((node.lineno if hasattr(node, "lineno")
                          else node.value.lineno, ast.unparse(node)))
    return found


def test_neutral_code_names_no_backend():
    found = {str(path): offences(path.read_text(encoding="utf-8"))
             for path in NEUTRAL}
    assert not any(found.values()), {k: v for k, v in found.items() if v}


OFFENCES = [
    "import torch", "import numpy, mxnet as mx", "from torch import nn",
    "from mxnet.gluon import nn", "def f():\n    import torch.nn as nn",
    "if True:\n    def f():\n        from torch.nn import functional",
    "importlib.import_module('torch.nn')", "__import__('mxnet')",
    "sys.modules.get('torch')", "from mgpu.backends._torch import TorchOps",
    "from mgpu.backends._mxnet.ops import is_np",
    "x = 1 if backend.name == 'torch' else 2",
    "if get_backend().name != other: pass",
    "if self.backend.name in ('mxnet',): pass", "if name == 'pytorch': pass",
    "if backend == 'torch': pass", "y = kind in {'torch', 'numpy'}",
    "type(x).__module__.startswith('mxnet')",
    "match backend.name:\n    case 'torch': pass"]


def test_an_offence_is_seen():
    assert [source for source in OFFENCES if not offences(source)] == []


def test_innocent_code_is_left_alone():
    assert offences("""
import numpy as np
from mgpu.backends import base, get_backend
from mgpu.backends.base import Backend
from . import split
print(f'the {backend.name} backend')
set_backend('torch')
if p.name == name or kind == 'cpu' or backend == 'both': pass
if semantics == 'torch': pass
""") == []


def test_neutral_modules_are_found():
    """`NEUTRAL` has the modules of mgpu, so that the tests of it compare
    something."""
    names = {path.stem for path in NEUTRAL}
    assert {"split", "strategies", "losses", "replicas", "trainer",
            "data_parallel", "evaluation"} <= names and len(names) > 15


def _engine_names(node):
    """The class of the specification that ``node.value`` is of, if any."""
    text = ast.unparse(node.value)
    if text.endswith(("backend", "get_backend()")):
        return Backend
    return Ops if text.endswith("backend.ops") or text == "ops" else None


def test_neutral_code_uses_what_the_specification_has():
    """Each attribute of a backend and of its `ops` is in its class."""
    for path in NEUTRAL:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = _engine_names(node)
                assert owner is None or node.attr in {
                    *vars(owner), *owner.__annotations__}, (
                        f"{path}:{node.lineno}: {ast.unparse(node)}")


# -- the public names ---------------------------------------------------------

def test_all_lists_the_public_names():
    """`__all__` lists all names of `mgpu` once, and each has a docstring.
    `dir` lists those that are not in a package as well."""
    assert len(set(mgpu.__all__)) == len(mgpu.__all__)
    public = {name for name, value in vars(mgpu).items()
              # pytest puts "@" names into the packages of its plugins
              if not name.startswith(("_", "@"))
              and not inspect.ismodule(value)}
    assert public <= set(mgpu.__all__)
    for name in mgpu.__all__:
        thing = getattr(mgpu, name)
        assert thing.__doc__, f"mgpu.{name} has no docstring"
    assert set(dir(mgpu)) - {"__version__", "parity"} < set(mgpu.__all__)


# -- fresh processes ----------------------------------------------------------

WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] not in MISSING:
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def run(code, *missing, **environment):
    """Output of a fresh process in which some packages are missing."""
    env = {k: v for k, v in os.environ.items() if k != "MGPU_BACKEND"}
    env.update(environment, PYTHONPATH=str(PACKAGE.parent))
    done = subprocess.run(
        [sys.executable, "-c", f"MISSING = {missing}" + WITHOUT
         + textwrap.dedent(code)],
        capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_framework():
    out = run("""
        import mgpu
        print(mgpu.available_backends())
        print(sorted({m.split('.')[0] for m in sys.modules}
                     & {'mxnet', 'torch', 'matplotlib', 'tqdm', 'rich',
                        'click', 'scipy'}))
        """)
    available, loaded = out.splitlines()
    assert [name for name in BACKENDS if name not in available] == []
    assert loaded == "[]"


def test_every_module_imports_with_numpy_alone():
    """Functions import optional packages when called; only the command lines
    need theirs as a whole."""
    out = run("""
        import importlib, pkgutil, mgpu
        for module in pkgutil.walk_packages(mgpu.__path__, 'mgpu.'):
            if '._' not in module.name and module.name not in (
                    'mgpu.cli', 'mgpu.parity.commands'):
                importlib.import_module(module.name)
                print(module.name)
        """, "mxnet", "torch", "matplotlib", "tqdm", "rich", "click", "scipy",
        "sklearn", "PIL", "IPython", "tenacity", "tabulate", "pandas",
        "jinja2", "safetensors")
    assert {"mgpu.data.split", "mgpu.losses", "mgpu.backends.base",
            "mgpu.training.replicas"} <= set(out.split())


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="about MXNet")
@pytest.mark.parametrize("first", ["", "import mxnet"])
def test_mxnet_compat(first):
    """Imports MXNet where NumPy has no `bool`, also after an import that has
    failed, and adds nothing to NumPy."""
    out = run(f"""
        try:
            {first or 'print()'}
        except AttributeError as error:
            print(str(error).partition('.')[0])
        import numpy, mgpu
        given = mgpu.mxnet_compat()
        import mxnet
        from mxnet.gluon import nn
        print(mxnet is given, 'bool' in vars(numpy),
              mxnet.np.ones(2, dtype=bool).dtype)
        """)
    found = "module 'numpy' has no attribute 'bool'" if first else ""
    assert out.splitlines() == [found, "True False bool"]


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="about MXNet")
def test_mxnet_compat_without_mxnet():
    out = run("""
        import mgpu
        try:
            mgpu.mxnet_compat()
        except mgpu.BackendNotAvailable as error:
            print(error)
        """, "mxnet")
    assert "Run pip install mxnet==1.9.1" in out


@pytest.mark.parametrize("name", BACKENDS)
def test_loading_a_backend_leaves_the_process_unchanged(name):
    """NumPy has no new names; environment variables (one that loading MXNet
    replaces meanwhile is set, one is not) and the framework's modes are the
    same."""
    out = run(f"""
        import os, sys
        import numpy as np

        def state():
            return [{{n: v for n, v in vars(np).items()
                     if not isinstance(v, type(sys))}},
                    {{k: v for k, v in os.environ.items() if k not in (
                        'MXNET_CPU_TEMP_COPY',
                        'MXNET_EXEC_BULK_EXEC_TRAIN')}}]
        import mgpu
        before = state()
        mgpu.set_backend({name!r})
        x = mgpu.put(np.ones(3), mgpu.cpu(1))
        assert mgpu.to_numpy(x + x).tolist() == [2, 2, 2]
        after = state()
        for old, new in zip(before, after):
            for key in old.keys() | new.keys():
                if old.get(key) is not new.get(key) \\
                        and old.get(key) != new.get(key):
                    print(key, old.get(key), new.get(key))
        if {name!r} == 'mxnet':
            from mxnet import npx
            print(npx.is_np_array(), npx.is_np_shape())
        else:
            import torch
            print(torch.is_grad_enabled(), torch.get_default_dtype())
        """, OMP_NUM_THREADS="2")
    wanted = {"mxnet": "False False", "torch": "True torch.float32"}
    assert out.splitlines() == [wanted[name]]
