"""Checks of the checks: the oracle is independent, and its gradients are those
of its values; every comparison rejects a wrong answer."""
import ast

import numpy as np
import pytest

import formulas
import oracle
from threeway import EXACT, LOCKSTEP, check, compare

ALLOWED = {"fractions", "itertools", "math", "numpy"}


def imports(source):
    """The top-level packages that a module imports, however it says it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module.split(".")[0])
        elif isinstance(node, ast.Name) and node.id in (
                "__import__", "importlib", "exec", "eval"):
            found.add(node.id)
    return found


def test_the_oracle_imports_neither_mgpu_nor_frameworks():
    for module, allowed in ((oracle, ALLOWED | {"formulas"}),
                            (formulas, ALLOWED)):
        with open(module.__file__, encoding="utf-8") as file:
            assert imports(file.read()) <= allowed


@pytest.mark.parametrize("source", [
    "import mgpu", "from mgpu.losses import L2Loss", "import numpy, torch",
    "def f():\n    import mxnet as mx", "from . import helpers",
    "__import__('mgpu')", "from helpers import mlp"])
def test_a_forbidden_import_is_seen(source):
    assert not imports(source) <= ALLOWED


# -- the measure --------------------------------------------------------------

A = np.array([1.0, -2.0, 3.0])
RIGHT = {"0.weight": A, "0.bias": A / 4}


@pytest.mark.parametrize("ours, expected", [
    (A + 1e-11, A), (A[:2], A), (A[::-1], A), (A * np.nan, A),
    (A, A * np.nan), (None, A), (A, None), ([A], [A, A]),
    ([A, None], [None, A]), ([A, A * 2], [A, A]), (A[None], A),
    ({"0.weight": A}, RIGHT), ({**RIGHT, "1.weight": A}, RIGHT),
    ({**RIGHT, "0.bias": A / 4 + 1e-11}, RIGHT),
    ({**RIGHT, "0.bias": A / 4 * np.nan}, RIGHT), ({}, {}),
    (A * 0 + 1e-300, A * 0), (1.0, 1.0 + 1e-11)])
def test_wrong_answers_are_rejected(ours, expected):
    with pytest.raises(AssertionError):
        compare(ours, expected, LOCKSTEP)


@pytest.mark.parametrize("ours, expected", [
    (A + np.spacing(1), A), (A.astype("float32"), A), (A * 0.0, -A * 0.0),
    ({"a": A, "b": A + np.spacing(1)}, {"a": A, "b": A}), ({}, {"a": A}),
    (1, 1.0), (np.int32(1), np.int64(1))])
def test_exact_means_bits(ours, expected):
    with pytest.raises(AssertionError):
        compare(ours, expected, EXACT)


def test_right_answers_pass():
    for tolerance in (EXACT, LOCKSTEP):
        for value in (A, [A, None, 1.0], RIGHT, 3):
            compare(value, value, tolerance)
    compare(A + 1e-14, A, LOCKSTEP)


def test_one_wrong_backend_fails():
    right = {"a": A, "b": A, "c": A}
    check(right, A, EXACT)
    for wrong in right:
        with pytest.raises(AssertionError):
            check({**right, wrong: A * 1.01}, A, LOCKSTEP)
    # each near the oracle, but on its two sides
    check({"a": A * 1.001, "b": A * 1.002}, A, 1e-2)
    with pytest.raises(AssertionError, match="a and b"):
        check({"a": A * 1.008, "b": A * 0.992}, A, 1e-2)
    with pytest.raises(AssertionError, match="a and b"):
        check({"a": A * 1.001, "b": A}, A, 1e-2, between=EXACT)
    with pytest.raises(AssertionError):
        check({}, A, LOCKSTEP)
