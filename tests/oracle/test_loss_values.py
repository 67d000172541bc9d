"""Losses and initial values: the same on every backend and number of devices,
and those of the oracle."""
import itertools

import numpy as np
import pytest

import mgpu
import oracle
from helpers import convnet, mlp, on
from mgpu.nn import initializers, losses
from threeway import (EXACT, ROUNDING, agree, compare, covers, host, joined,
                      split_state)

RNG = np.random.default_rng(2)
ROWS = 5        # 2, 2, 1 on three devices; 2, 1, 1, 1 on four
SHAPE = (ROWS, 4, 3)
PRED = 3 * RNG.normal(size=SHAPE)
TARGET = RNG.normal(size=SHAPE)
UNIT = RNG.uniform(0.05, 0.95, SHAPE)
CLASSES = RNG.integers(0, 3, (ROWS, 4))
CHANNELS = RNG.integers(0, 4, (ROWS, 3))
WEIGHTS = RNG.uniform(0.5, 2, (ROWS, 1, 1))
EACH = RNG.uniform(0.5, 2, SHAPE)
BIT = RNG.integers(0, 2, SHAPE).astype(float)
COUNTS = RNG.integers(0, 5, SHAPE)
# first and last class, scores that overflow a naive exponential
EDGE = np.array([[800.0, -800, 0], [0, 0, 0], [-800, -801, -900],
                 [1e-300, -1e-300, 0], [5, 5, -800]])
CE, BCE = "SoftmaxCrossEntropyLoss", "SigmoidBinaryCrossEntropyLoss"
KL = oracle.log_softmax(PRED)

#: (class, predictions, labels, weights of the examples, options)
CASES = [
    (CE, PRED[:, 0], CLASSES[:, 0], None, {}),
    (CE, PRED[:, 0], CLASSES[:, 0].astype("int32"), WEIGHTS[:, 0], {}),
    (CE, PRED, CLASSES, WEIGHTS, {"weight": 2.5}),
    (CE, PRED, CHANNELS.astype(float), WEIGHTS, {"axis": 1}),
    (CE, PRED, UNIT, None, {"sparse_label": False}),
    (CE, KL, CLASSES, WEIGHTS, {"from_logits": True}),
    (CE, EDGE, np.array([0, 2, 0, 1, 2]), None, {}),
    ("L2Loss", PRED, TARGET, WEIGHTS, {}),
    ("L2Loss", PRED[:, 0, 0], TARGET[:, 0, 0], None, {"weight": 3.0}),
    ("L1Loss", PRED, TARGET, EACH, {}),
    ("L1Loss", PRED, np.where(BIT, PRED, TARGET), None, {"weight": 0.5}),
    ("HuberLoss", PRED, TARGET, WEIGHTS, {"rho": 0.5}),
    ("HuberLoss", np.round(PRED), np.round(TARGET), None, {}),  # |d| = rho
    (BCE, PRED, UNIT, WEIGHTS, {}),
    (BCE, PRED, BIT, EACH, {"pos_weight": 2.5, "weight": 0.5}),
    (BCE, EDGE + 1e-3, BIT[:, 0], None, {}),
    (BCE, UNIT, BIT, WEIGHTS, {"from_sigmoid": True}),
    (BCE, UNIT, TARGET, None, {"from_sigmoid": True, "pos_weight": 2.5}),
    ("KLDivLoss", KL, UNIT, WEIGHTS, {}),
    ("KLDivLoss", PRED, BIT, None, {"from_logits": False}),     # 0 log 0
    ("KLDivLoss", PRED, UNIT, WEIGHTS, {"from_logits": False, "axis": 1,
                                        "weight": 0.5}),
    ("HingeLoss", PRED, 2 * BIT - 1, WEIGHTS, {"margin": 0.4}),
    ("SquaredHingeLoss", PRED, 2 * BIT - 1, EACH, {"margin": 2.0}),
    ("LogisticLoss", PRED, 2 * BIT - 1, WEIGHTS, {"weight": 0.5}),
    ("LogisticLoss", EDGE + 1e-3, BIT[:, 0], None,
     {"label_format": "binary"}),
    ("PoissonNLLLoss", PRED, COUNTS, WEIGHTS, {"compute_full": True}),
    ("PoissonNLLLoss", 9 * UNIT, COUNTS, EACH,
     {"from_logits": False, "weight": 0.5}),
]


def on_devices(loss, devices, pred, label, weights=None):
    """Values of all rows, gradient of their sum."""
    shards = [mgpu.split_and_load(x, devices, even_split=False)
              for x in (pred, label, *([] if weights is None else [weights]))]
    for x in shards[0]:
        mgpu.attach_grad(x)
    with mgpu.record():
        values = mgpu.parallel(lambda *row: loss(*row), *shards)
    mgpu.backward(values)
    return [joined(values), joined([mgpu.grad(x) for x in shards[0]])]


@covers(*(f"losses.{case[0]}" for case in CASES))
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: "-".join(
    [str(i), CASES[i][0], *map(str, CASES[i][4])]))
def test_losses(number, devices):
    name, pred, label, weights, options = CASES[number]
    wanted = list(oracle.loss(name, pred, label, weights, **options))
    agree(lambda backend: on_devices(getattr(losses, name)(**options),
                                     devices, pred, label, weights),
          wanted, ROUNDING)
    # twice the weight, and no option, are other answers
    others = [oracle.loss(name, pred, label, weights, **{
        **options, "weight": 2 * options.get("weight", 1.0)})]
    if set(options) - {"weight", "from_logits", "sparse_label", "axis"}:
        others.append(oracle.loss(name, pred, label, weights))
    if weights is not None:
        others.append(oracle.loss(name, pred, label, None, **options))
    for other in others:
        with pytest.raises(AssertionError):
            compare(wanted, list(other), 1e-3)


def test_gluons_slope_at_a_logit_of_zero(devices):
    """Its formula adds ``max(x, 0)`` and a function of ``|x|``, whose slopes
    at 0 are both taken as 0: the loss is right there, the gradient is -label
    and not 1/2 - label."""
    x, label = np.zeros(ROWS), np.array([0.0, 1, 1, 0, 1])
    values, slope = oracle.loss(BCE, x, label)
    agree(lambda backend: on_devices(losses.SigmoidBCELoss(), devices, x,
                                     label), [values, slope - 0.5], ROUNDING)


@covers("losses.SoftmaxCELoss", "losses.SigmoidBCELoss")
def test_short_names():
    assert losses.SoftmaxCELoss is losses.SoftmaxCrossEntropyLoss
    assert losses.SigmoidBCELoss is losses.SigmoidBinaryCrossEntropyLoss


class Mean:
    """A loss in torch's manner."""
    reduction = "mean"

    def __call__(self, pred, label):
        d = pred - label
        values = d * d * d
        return values if self.reduction == "none" else mgpu.functional.mean(
            values)


@pytest.mark.parametrize("make", (Mean, lambda: Mean().__call__))
def test_losses_that_average(make, devices):
    """Per example where the loss can tell them apart, else the mean over
    each device's rows in each of them; the gradients are the same."""
    loss, d = losses.per_example(make()), PRED - TARGET
    rows = (d ** 3).mean((1, 2))
    if make is not Mean:
        rows = np.concatenate([np.full(len(r), r.mean()) for r in
                               oracle.pieces(rows, len(devices))])
    agree(lambda backend: on_devices(loss, devices, PRED, TARGET),
          [rows, 3 * d ** 2 / 12], ROUNDING)


# -- initial values -----------------------------------------------------------

#: (name for `create`, class, options)
RULES = [("zeros", "Zero", {}), ("ones", "One", {}),
         ("constant", "Constant", {"value": 0.3}),
         ("uniform", "Uniform", {}), ("uniform", "Uniform", {"scale": 0.5}),
         ("normal", "Normal", {}), ("normal", "Normal", {"sigma": 2.0}),
         ("orthogonal", "Orthogonal", {}),
         ("orthogonal", "Orthogonal", {"scale": 1.0, "rand_type": "normal"}),
         ("xavier", "Xavier", {}),
         *(("xavier", "Xavier", {"rnd_type": r, "factor_type": f,
                                 "magnitude": 2.0})
           for r, f in itertools.product(("uniform", "gaussian"),
                                         ("avg", "in", "out"))),
         ("msraprelu", "MSRAPrelu", {}),
         ("msraprelu", "MSRAPrelu", {"factor_type": "in", "slope": 0.0})]
#: what belongs to one kind of weight
SPECIAL = [("bilinear", "Bilinear", {}, (3, 2, 4, 4)),
           ("bilinear", "Bilinear", {}, (1, 1, 5, 5)),
           ("lstmbias", "LSTMBias", {}, (12,)),
           ("lstmbias", "LSTMBias", {"forget_bias": 2.0}, (8,))]


def judged(kind, shape, seed, number, options):
    """The oracle's weight, or what the other kinds start from."""
    if kind != "weight":
        return np.full(shape, float(kind in ("gamma", "running_var")))
    return oracle.drawn(options[0], shape, seed, number, **options[1])


@covers(*(f"initializers.{rule}" for _, rule, _ in RULES))
@pytest.mark.parametrize("name, rule, options", RULES)
@pytest.mark.parametrize("dtype", ("float64", "float32"))
def test_initial_values(name, rule, options, dtype):
    """Bit for bit on every device: a draw in float64 from (seed, number of
    the parameter), rounded once."""
    devices, key = on(0, 1), {"zeros": "zero", "ones": "one"}.get(name, name)
    made = initializers.create(name, **options)
    assert made == getattr(initializers, rule)(**options)

    def run(backend):
        replicas = mgpu.initialize(convnet(backend), devices, made, seed=7,
                                   dtype=dtype)
        return [host(p.list_data()) for p in (*replicas.params(),
                                              *replicas.statistics())]

    names = ["0.weight", "0.bias", "1.gamma", "1.beta", "4.weight", "4.bias",
             "5.gamma", "5.beta", "9.weight", "9.bias"]
    kinds = [n.split(".")[1] for n in names] \
        + ["running_mean", "running_var"] * 2
    shapes = [(4, 2, 3, 3), *[(4,)] * 3, (5, 4, 3, 3), *[(5,)] * 3, (3, 5),
              (3,), *[(4,)] * 2, *[(5,)] * 2]
    wanted = [[judged(kind, shape, 7, i, (key, options)).astype(dtype)]
              * len(devices)
              for i, (kind, shape) in enumerate(zip(kinds, shapes))]
    agree(run, wanted, EXACT)


@covers(*(f"initializers.{rule}" for _, rule, *_ in SPECIAL))
@pytest.mark.parametrize("name, rule, options, shape", SPECIAL)
def test_initial_values_of_special_weights(name, rule, options, shape):
    made = initializers.create(name, **options)
    assert made == getattr(initializers, rule)(**options)
    compare(initializers.draw_parameter("weight", shape, "float64", made,
                                        seed=3, index=1),
            oracle.drawn(name, shape, 3, 1, **options), EXACT)


@pytest.mark.parametrize("shape", [(3, 5), (4, 2, 3, 3), (6, 1, 7)])
def test_fans(shape):
    assert initializers.fans(shape) == oracle.fans(shape)


def test_the_default_is_gluons(devices):
    """No initializer: uniform within 0.07, biases zero; as in Gluon."""
    agree(lambda backend: split_state(mgpu.initialize(
        mlp(backend), devices, "uniform", dtype="float64"))[0], {
        "0.weight": oracle.drawn("uniform", (5, 6), 0, 0),
        "0.bias": np.zeros(5),
        "2.weight": oracle.drawn("uniform", (3, 5), 0, 2),
        "2.bias": np.zeros(3)}, EXACT)
