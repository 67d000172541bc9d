"""Every optimizer with both meanings through `Trainer`.

Six steps from given gradients, whose sums over devices are exact in float64
(multiples of 2^-20 of their scale), so that the order of addition and the
number of devices cannot show. One weight has gradients of 1e-7, where the
place of epsilon shows, one has elements that are clipped.
"""
import functools

import numpy as np
import pytest

import mgpu
import oracle
from helpers import mlp, on
from mgpu import optim
from mgpu.nn import functional as F
from mgpu.optim import lr_scheduler
from threeway import (EXACT, ROUNDING, agree, assert_equal_copies, compare,
                      covers)

STEPS, ROWS, LR = 6, 8, 2.0 ** -4
SHAPES = {"0.weight": (5, 6), "0.bias": (5,), "2.weight": (3, 5),
          "2.bias": (3,)}
SCALES = dict(zip(SHAPES, (2.0 ** -23, 1, 1, 2.0 ** -10)))
LR_MULT, WD_MULT = {"0.bias": 0.5, "2.weight": 2.0}, {"2.weight": 4.0}
SCHEDULE = {"step": [2, 4], "factor": 0.5}


def rates(lr):
    """Of `SCHEDULE`, for updates 0 to `STEPS`."""
    return [lr * 0.5 ** sum(n > step for step in SCHEDULE["step"])
            for n in range(STEPS + 1)]


def _dyadic(rng, shape, scale):
    return np.round(rng.normal(size=shape) * 2 ** 20) / 2 ** 20 * scale


RNG = np.random.default_rng(0)
WEIGHTS = {n: RNG.normal(size=s) for n, s in SHAPES.items()}
GRADIENTS = [{n: ROWS * _dyadic(RNG, s, SCALES[n]) for n, s in SHAPES.items()}
             for _ in range(STEPS)]


def parts(gradient, k, seed):
    """What `k` devices contribute, adding up to `gradient` exactly."""
    rng = np.random.default_rng(seed)
    scale = abs(gradient).max() * 2.0 ** -30
    others = [rng.integers(-2 ** 29, 2 ** 29, gradient.shape)
              * 2.0 ** np.round(np.log2(scale)) for _ in range(k - 1)]
    return [*others, gradient - sum(others)]


def replicas_on(backend, k):
    """On `k` devices with the weights of this module."""
    replicas = mgpu.initialize(mlp(backend),
                               on(*range(k)), "uniform", dtype="float64")
    replicas.import_numpy(WEIGHTS)
    return replicas


def give(replicas, gradients, seed=0):
    """Make these the gradients, summed over the devices: the loss is
    ``sum(weight * part)``."""
    devices = replicas.devices
    shares = {p.name: parts(gradients[p.name], len(devices), seed)
              for p in replicas.params()}
    with mgpu.record():
        losses = [functools.reduce(lambda a, b: a + b, [
            F.sum(p.data() * mgpu.put(share, devices[0]))
            for p, share in zip(replicas.params(), row)])
            for row in zip(*(shares[p.name] for p in replicas.params()))]
    mgpu.backward(losses)


def trained(backend, k, make_trainer, steps=GRADIENTS):
    """The weights after every step."""
    replicas = replicas_on(backend, k)
    trainer, path = make_trainer(replicas), []
    for step, gradients in enumerate(steps):
        give(replicas, gradients, step)
        trainer.step(ROWS)
        path.append(replicas.export_numpy())
    assert_equal_copies(replicas)
    return path


def expected(optimizer, steps=GRADIENTS):
    weights, path = WEIGHTS, []
    for gradients in steps:
        weights = optimizer.step(weights, gradients, ROWS)
        path.append(weights)
    return path


ADAM = {"beta1": 0.75, "beta2": 0.9, "epsilon": 1e-8}
TORCH_ADAM = {"betas": (0.75, 0.9), "eps": 1e-8}
VARIANTS = {
    ("gluon", "sgd"): [{}, {"momentum": 0.875}],
    ("gluon", "nag"): [{}, {"momentum": 0.875}],
    ("gluon", "adam"): [ADAM], ("gluon", "adamw"): [ADAM],
    ("gluon", "adamax"): [{"beta1": 0.75, "beta2": 0.9}],
    ("gluon", "nadam"): [{**ADAM, "schedule_decay": 0.5}],
    ("gluon", "rmsprop"): [
        {"gamma1": 0.8, "epsilon": 1e-8, "clip_weights": 1.5},
        {"gamma1": 0.8, "gamma2": 0.5, "epsilon": 1e-8, "centered": True}],
    ("gluon", "adagrad"): [{"eps": 1e-12}],
    ("gluon", "adadelta"): [{"rho": 0.8, "epsilon": 1e-6}],
    ("gluon", "ftrl"): [{"lamda1": 0.25, "beta": 0.5}],
    ("gluon", "signum"): [{"momentum": 0.0}, {"momentum": 0.875,
                                              "wd_lh": 0.25}],
    ("gluon", "lamb"): [{**ADAM, "lower_bound": 0.5}],
    ("gluon", "lars"): [{"eta": 0.5, "momentum": 0.875,
                         "momentum_correction": False}],
    ("gluon", "ftml"): [ADAM], ("gluon", "dcasgd"): [{"lamda": 0.5}],
    ("torch", "sgd"): [{}, {"momentum": 0.875, "dampening": 0.25},
                       {"momentum": 0.875, "nesterov": True}],
    ("torch", "nag"): [{"momentum": 0.875}],
    ("torch", "adam"): [TORCH_ADAM, {**TORCH_ADAM, "amsgrad": True}],
    ("torch", "adamw"): [TORCH_ADAM, {**TORCH_ADAM, "amsgrad": True}],
    ("torch", "adamax"): [TORCH_ADAM],
    ("torch", "nadam"): [
        {**TORCH_ADAM, "momentum_decay": 0.5},
        {**TORCH_ADAM, "decoupled_weight_decay": True}],
    ("torch", "rmsprop"): [
        {"alpha": 0.8, "eps": 1e-8, "momentum": 0.5},
        {"alpha": 0.8, "eps": 1e-8, "centered": True}],
    ("torch", "adagrad"): [
        {"lr_decay": 0.5, "initial_accumulator_value": 0.25, "eps": 1e-6}],
    ("torch", "adadelta"): [{"rho": 0.8, "eps": 1e-6}],
}


def _cases():
    """(semantics, name, options, whether rates and factors vary): all at
    once, only the rule, and the library's defaults."""
    for (semantics, name), variants in VARIANTS.items():
        rate, decay = ("learning_rate", "wd") if semantics == "gluon" \
            else ("lr", "weight_decay")
        for variant in variants:
            yield semantics, name, {rate: LR, decay: 0.125,
                                    "clip_gradient": 0.75, **variant}, True
            yield semantics, name, {rate: LR, **variant}, False
        yield semantics, name, {"momentum": 0.875} if (
            semantics, name) == ("torch", "nag") else {}, False


def _id(case):
    semantics, name, options, varying = case
    return "-".join([semantics, name, *(f"{k}={v}" for k, v in
                                        options.items())]) \
        + "-varying" * varying


CASES = list(_cases())


@functools.cache
def expected_of(number):
    semantics, name, options, varying = CASES[number]
    return expected(judge(semantics, name, options, varying))


def judge(semantics, name, options, varying):
    if not varying:
        return oracle.Optimizer(semantics, name, options)
    lr = options["learning_rate" if semantics == "gluon" else "lr"]
    if name == "ftrl":      # MXNet's hands no rate on to its schedule
        lr = 0.01
    return oracle.Optimizer(semantics, name, options, LR_MULT, WD_MULT,
                            rates(lr))


def trainer_of(case):
    semantics, name, options, varying = case
    extra = {"lr_mult": LR_MULT, "wd_mult": WD_MULT, "lr_scheduler":
             lr_scheduler.MultiFactorScheduler(**SCHEDULE)} if varying else {}
    return lambda replicas: mgpu.Trainer(replicas, name, options,
                                         semantics=semantics, **extra)


def numbered(keep=lambda case: True):
    return [pytest.param(i, id=_id(case)) for i, case in enumerate(CASES)
            if keep(case)]


def between(case):
    """The backends do the same operations, and the same bits come out, where
    every scalar is a binary fraction. Of the others MXNet's reader of
    numbers misses the last bit of one in ten."""
    return EXACT if case[1] in ("sgd", "nag", "signum") else ROUNDING


# To the oracle 1e-13: it rounds in another order.
@covers(*(f"optimizers.{s}.{n}" for s, n in VARIANTS))
@pytest.mark.parametrize("number", numbered(lambda case: case[3]))
def test_all_options_at_once(number):
    """On three devices: a rule gets their sum, whatever their number."""
    agree(lambda backend: trained(backend, 3, trainer_of(CASES[number])),
          expected_of(number), ROUNDING, between(CASES[number]))


@pytest.mark.parametrize("number", numbered(lambda case: not case[3]))
def test_the_rule_alone_and_the_defaults(number):
    """As an object of the caller's, which two trainers may share."""
    semantics, name, options, _ = CASES[number]
    rule = optim.create(name, semantics, **options)
    agree(lambda backend: trained(
        backend, 1, lambda replicas: mgpu.Trainer(replicas, rule)),
        expected_of(number), ROUNDING)


def test_the_two_meanings_differ():
    for semantics, name in VARIANTS:
        if semantics == "torch" and ("gluon", name) in VARIANTS:
            lr, wd = {"learning_rate": LR}, {"wd": 0.125}
            gluon = {**lr, **wd, "momentum": 0.875} if name in ("sgd", "nag") \
                else {**lr, **wd}
            torch = {"lr": LR, "weight_decay": 0.125, **(
                {"momentum": 0.875} if name in ("sgd", "nag") else {})}
            with pytest.raises(AssertionError):
                compare(expected(judge("torch", name, torch, True)),
                        expected(judge("gluon", name, gluon, True)),
                        ROUNDING)
