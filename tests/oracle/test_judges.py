"""The judges judged: the oracle is independent and its gradients are those of
its values; every comparison rejects a wrong answer."""
import ast
import itertools

import numpy as np
import pytest

import formulas
import oracle
from helpers import numerical_gradient, relative_difference
from threeway import COVERED, EXACT, LOCKSTEP, check, compare, covers

ALLOWED = {"fractions", "itertools", "math", "numpy"}
#: differences over five points, 1e-9 apart; logarithms near 0 and the batch
#: norm of two rows have fifth derivatives of some hundreds
NUMERICAL = 1e-7


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


def test_the_oracle_imports_nothing_that_it_judges():
    for module, allowed in ((oracle, ALLOWED | {"formulas"}),
                            (formulas, ALLOWED)):
        with open(module.__file__, encoding="utf-8") as file:
            assert imports(file.read()) <= allowed


@pytest.mark.parametrize("source", [
    "import mgpu", "from mgpu.losses import L2Loss", "import numpy, torch",
    "def f():\n    import mxnet as mx", "from . import helpers",
    "__import__('mgpu')", "from helpers import mlp"])
def test_another_import_is_seen(source):
    assert not imports(source) <= ALLOWED


# -- gradients ----------------------------------------------------------------



@pytest.mark.parametrize("name, options", [
    ("SoftmaxCrossEntropyLoss", {}), ("SoftmaxCrossEntropyLoss", {"axis": 1}),
    ("SoftmaxCrossEntropyLoss", {"sparse_label": False}),
    ("SoftmaxCrossEntropyLoss", {"from_logits": True}),
    ("L2Loss", {}), ("L1Loss", {}), ("HuberLoss", {"rho": 0.5}),
    ("SigmoidBinaryCrossEntropyLoss", {"pos_weight": 2.5}),
    ("SigmoidBinaryCrossEntropyLoss", {"from_sigmoid": True,
                                       "pos_weight": 2.5}),
    ("KLDivLoss", {}), ("KLDivLoss", {"from_logits": False})])
def test_slopes_of_losses(name, options):
    rng = np.random.default_rng(1)
    x = rng.uniform(0.1, 0.9, (3, 4, 4))
    # away from the kinks of |d|
    label = x + rng.choice([-1, 1], x.shape) * rng.uniform(0.02, 0.08,
                                                           x.shape)
    if name.startswith("Soft") and options.get("sparse_label", True):
        label = rng.integers(0, 4, (3, 4))
    weights = rng.uniform(0.5, 2, (3, 1, 1))
    arguments = dict(sample_weight=weights, weight=1.5, **options)
    _, slope = oracle.loss(name, x, label, **arguments)
    assert relative_difference(slope, numerical_gradient(
        lambda x: oracle.loss(name, x, label, **arguments)[0].sum(),
        x)) < NUMERICAL


@pytest.mark.parametrize("layer, arguments, options", [
    (oracle.relu, [(3, 5)], {}), (oracle.dense, [(3, 5), (4, 5), (4,)], {}),
    (oracle.dot, [(3, 5), (5, 4), (4,)], {}),
    (oracle.conv, [(2, 3, 6, 5), (4, 3, 3, 2), (4,)],
     {"stride": 2, "padding": 1}),
    (oracle.conv, [(2, 3, 6, 5), (4, 3, 3, 2), (4,)], {}),
    (oracle.avg_pool, [(2, 3, 5, 5)], {"size": 2, "stride": 1}),
    (oracle.avg_pool, [(2, 3, 6, 4)], {"size": 2}),
    (oracle.global_mean, [(2, 3, 5, 4)], {}),
    (oracle.flatten, [(2, 3, 5, 4)], {}),
    (oracle.batch_norm, [(5, 3), (3,), (3,)], {}),
    (oracle.batch_norm, [(2, 3, 3, 2), (3,), (3,)], {})])
def test_slopes_of_layers(layer, arguments, options):
    rng = np.random.default_rng(1)
    arguments = [rng.choice([-1, 1], s) * rng.uniform(0.1, 1, s)
                 for s in arguments]
    y, back, *_ = layer(*arguments, **options)
    u = rng.normal(size=y.shape)
    slopes = back(u)
    assert len(slopes) == len(arguments)
    for i, slope in enumerate(slopes):
        def value(x, i=i):
            given = [*arguments[:i], x, *arguments[i + 1:]]
            return (u * layer(*given, **options)[0]).sum()
        assert relative_difference(
            slope, numerical_gradient(value, arguments[i])) < NUMERICAL


@pytest.mark.parametrize("policy", ("per_device", "sync"))
def test_slopes_of_networks(policy):
    """Shards of 3, 2 and 2 rows, the batch norm between them or within."""
    rng = np.random.default_rng(1)
    layers = [(oracle.dense, ("0.weight", "0.bias")),
              (oracle.batch_norm, ("1.gamma", "1.beta")),
              (oracle.dense, ("2.weight", "2.bias"))]
    shapes = {"0.weight": (4, 5), "0.bias": (4,), "1.gamma": (4,),
              "1.beta": (4,), "2.weight": (3, 4), "2.bias": (3,)}
    values = {n: rng.normal(size=s) for n, s in shapes.items()}
    values.update({"1.running_mean": np.zeros(4), "1.running_var": np.ones(4)})
    X, y = rng.normal(size=(7, 5)), rng.integers(0, 3, 7)

    def total(**changed):
        return oracle.Network(layers, {**values, **changed}, 3,
                              policy).gradients(X, y)[0].sum()
    _, gradients = oracle.Network(layers, values, 3, policy).gradients(X, y)
    for name in shapes:
        numerical = numerical_gradient(lambda v: total(**{name: v}),
                                       values[name])
        # before a batch norm a bias has no gradient: the weight's scale
        assert relative_difference(gradients[name], numerical,
                                   floor=1e-2) < NUMERICAL


def test_the_policies_are_three():
    """On uneven shards they give three different states, on one device one
    and the same."""
    rng = np.random.default_rng(1)
    layers = [(oracle.batch_norm, ("0.gamma", "0.beta"))]
    values = {"0.gamma": np.ones(3), "0.beta": np.zeros(3),
              "0.running_mean": np.zeros(3), "0.running_var": np.ones(3)}
    X, y = rng.normal(size=(7, 3)), rng.integers(0, 3, 7)
    for k in (1, 3):
        states = []
        for policy in ("per_device", "average", "sync"):
            net = oracle.Network(layers, values, k, policy)
            net.step(X, y, oracle.Optimizer("gluon", "sgd"))
            states.append({n: np.broadcast_to(v, (k, 3))
                           for n, v in net.state().items()})
        for a, b in itertools.combinations(states, 2):
            if k == 1:
                compare(a, b, EXACT)
            else:
                with pytest.raises(AssertionError):
                    compare(a, b, 1e-3)


# -- the measure --------------------------------------------------------------

A = np.array([1.0, -2.0, 3.0])
RIGHT = {"0.weight": A, "0.bias": A / 4}


@pytest.mark.parametrize("ours, wanted", [
    (A + 1e-11, A), (A[:2], A), (A[::-1], A), (A * np.nan, A),
    (A, A * np.nan), (None, A), (A, None), ([A], [A, A]),
    ([A, None], [None, A]), ([A, A * 2], [A, A]), (A[None], A),
    ({"0.weight": A}, RIGHT), ({**RIGHT, "1.weight": A}, RIGHT),
    ({**RIGHT, "0.bias": A / 4 + 1e-11}, RIGHT),
    ({**RIGHT, "0.bias": A / 4 * np.nan}, RIGHT), ({}, {}),
    (A * 0 + 1e-300, A * 0), (1.0, 1.0 + 1e-11)])
def test_wrong_answers_are_rejected(ours, wanted):
    with pytest.raises(AssertionError):
        compare(ours, wanted, LOCKSTEP)


@pytest.mark.parametrize("ours, wanted", [
    (A + np.spacing(1), A), (A.astype("float32"), A), (A * 0.0, -A * 0.0),
    ({"a": A, "b": A + np.spacing(1)}, {"a": A, "b": A}), ({}, {"a": A}),
    (1, 1.0), (np.int32(1), np.int64(1))])
def test_exact_means_bits(ours, wanted):
    with pytest.raises(AssertionError):
        compare(ours, wanted, EXACT)


def test_right_answers_pass():
    for tolerance in (EXACT, LOCKSTEP):
        for value in (A, [A, None, 1.0], RIGHT, 3):
            compare(value, value, tolerance)
    compare(A + 1e-14, A, LOCKSTEP)


def test_one_wrong_engine_is_enough():
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


def test_covers_notes_the_test():
    def some_test():
        pass
    try:
        assert covers("a name", "another")(some_test) is some_test
        assert COVERED["a name"] == COVERED["another"] == [some_test]
    finally:
        del COVERED["a name"], COVERED["another"]
