"""Training steps of the user's own, on one side or on both."""
import numpy as np
import pytest

from mgpu import parity
from mgpu.parity import Side
from networks import gluon
from networks import torch as torch_
from parity.steps import gluon_step, torch_step

RNG = np.random.default_rng(0)
#: of 8 rows: float32 holds an eighth
BATCHES = [(RNG.normal(size=(8, 5)), RNG.integers(0, 3, 8).astype("int32"))
           for _ in range(5)]
A = gluon(lambda nn: [nn.Dense(4, activation="relu", in_units=5),
                      nn.Dropout(0.5), nn.Dense(3, in_units=4)])
B = torch_(lambda nn: [nn.Linear(5, 4), nn.ReLU(), nn.Dropout(0.5),
                       nn.Linear(4, 3)])
#: the words that a formula begins with, by the options of both loops
FORMULAS = {
    "none": ({"learning_rate": 0.125}, {"lr": 0.125}, []),
    "float32": ({"learning_rate": 0.1}, {"lr": 0.1}, ["MXNet's"]),
    "momentum": ({"learning_rate": 0.125, "momentum": 0.5, "wd": 0.25},
                 {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}, []),
    "momentum and schedule": (
        {"learning_rate": 0.125, "momentum": 0.5, "schedule": "gluon"},
        {"lr": 0.125, "momentum": 0.5, "schedule": "torch"}, ["momentum:"]),
    "adam": ({"optimizer": "adam", "learning_rate": 0.125},
             {"optimizer": "Adam", "lr": 0.125}, ["Adam's", "MXNet's"]),
    "clipping": ({"learning_rate": 0.125, "clip": 0.0625},
                 {"lr": 0.125, "clip": 0.0625}, ["clipping"]),
    "scaler and clipping": (
        {"learning_rate": 0.125, "clip": 0.0625},
        {"lr": 0.125, "clip": 0.0625, "scaler": 256.0}, ["clipping"]),
    "two parts": ({"learning_rate": 0.125}, {"lr": 0.125, "parts": 2}, []),
}


def schedules(options, engine):
    import mxnet as mx
    import torch
    if "schedule" in options:
        options = {**options, "schedule": {
            "gluon": lambda: mx.lr_scheduler.FactorScheduler(
                2, 0.5, base_lr=0.125),
            "torch": lambda optimizer: torch.optim.lr_scheduler.StepLR(
                optimizer, 2, 0.5)}[options["schedule"]]}
    return (gluon_step if engine == "mxnet" else torch_step)(**options)


@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_loop_and_its_port_are_the_same_but_for_named_formulas(
        name, swapped):
    """And the formulas are those that act, in either order of the sides."""
    options_a, options_b, words = FORMULAS[name]
    sides = [(A, schedules(options_a, "mxnet")),
             (B, schedules(options_b, "torch"))][::-1 if swapped else 1]
    (a, step_a), (b, step_b) = sides
    result = parity.compare(a, b, batches=BATCHES, step_a=step_a,
                            step_b=step_b)
    assert result.proves(formulas=True), result
    assert [f["text"].split()[0] for f in result.formulas] == words, result
    assert result.same is not bool(words)
    assert all(1e-10 < f["size"] < 1 for f in result.formulas)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_one_side_may_be_mgpus(devices):
    for side, net, step in ((A, B, torch_step(lr=0.125)),
                            (B, A, gluon_step(learning_rate=0.125))):
        result = parity.compare(
            Side(side, devices=devices), net, batches=BATCHES, step_b=step,
            optimizer_params={"learning_rate": 0.125})
        assert result.same, result


def test_a_loop_equals_itself_with_whatever_optimiser():
    for optimizer in ("Adamax", "NAdam", "RMSprop", "Adagrad", "Adadelta",
                      "AdamW", "RAdam", "Rprop"):
        step = torch_step(optimizer, lr=0.01)
        result = parity.compare(B, B, batches=BATCHES, step_a=step,
                                step_b=step)
        assert result.same, (optimizer, result)
