"""`mgpu.parity.lint`: each rule has a finding where it applies, and none
elsewhere."""
import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import assert_all_equal
from mgpu.optim import lr_scheduler
from mgpu.parity.lint import RULES, lint
from nets import gluon

SAMPLE = np.zeros((4, 1, 9, 9), "float32")


def layers(*make):
    """A factory of a Gluon network: each of `make` is called with `nn`."""
    if "mxnet" not in BACKENDS:
        pytest.skip("needs MXNet")
    return gluon(lambda nn: [one(nn) for one in make])


def dense(nn):
    return nn.Dense(3, flatten=False)


def shared(nn):
    net, first = nn.HybridSequential(), nn.Dense(9, flatten=False)
    net.add(first, nn.Dense(9, flatten=False, in_units=9,
                            params=first.params))
    return net


def with_parameter(**options):
    def make(nn):
        layer = dense(nn)
        for name, value in options.items():
            setattr(layer.weight, name, value)
        return layer
    return make


# rule: (a layer with a finding, words of its text, a layer without one)
NETS = {
    "batch norm keeps the biased variance": (
        lambda nn: nn.BatchNorm(), "n is 324 at least: 3.1e-03",
        lambda nn: nn.BatchNorm(use_global_stats=True)),
    "batch norm momentum": (
        lambda nn: nn.BatchNorm(momentum=0.99), "momentum=0.01",
        lambda nn: nn.BatchNorm()),
    "epsilon": (
        lambda nn: nn.LayerNorm(epsilon=1e-3), "eps=0.001",
        lambda nn: nn.LayerNorm()),
    "fixed gamma or beta": (
        lambda nn: nn.BatchNorm(scale=False), "requires_grad_(False)",
        lambda nn: nn.BatchNorm()),
    "batch norm over another axis": (
        lambda nn: nn.BatchNorm(axis=3), "axis 3",
        lambda nn: nn.BatchNorm()),
    "batch norm with global statistics": (
        lambda nn: nn.BatchNorm(use_global_stats=True), "bn.eval()",
        lambda nn: nn.BatchNorm()),
    "statistics that no gradient passes": (
        lambda nn: nn.BatchNorm(scale=False, center=False),
        "bn.momentum = 0.0", lambda nn: nn.BatchNorm()),
    "dense layers flatten": (
        lambda nn: nn.Dense(3), "becomes (4, 81)", dense),
    "pooling windows in the padding": (
        lambda nn: nn.MaxPool2D(2, 2, 1, ceil_mode=True),
        "wholly in the padding", lambda nn: nn.MaxPool2D(2, 2, 1)),
    "average without the padding": (
        lambda nn: nn.AvgPool2D(2, 2, 1, count_include_pad=False),
        "count_include_pad=False", lambda nn: nn.AvgPool2D(2, 2, 1)),
    "dropout along axes": (
        lambda nn: nn.Dropout(0.5, axes=(2, 3)), "nn.Dropout2d (0.5)",
        lambda nn: nn.Dropout(0.5)),
    "slope of a leaky ReLU": (
        lambda nn: nn.LeakyReLU(0.2), "negative_slope=0.2",
        lambda nn: nn.LeakyReLU(0.01)),
    "initial values": (
        dense, "+-0.07 against +-0.333", lambda nn: nn.Activation("relu")),
    "shared parameters": (shared, "0.0.weight = 0.1.weight", dense),
    "frozen parameters": (
        with_parameter(grad_req="null"), "requires_grad_(False)", dense),
    "gradients that add up": (
        with_parameter(grad_req="add"), "zero_grad()", dense),
    "multipliers of a parameter": (
        with_parameter(lr_mult=2.0), "lr_mult=2", dense),
}
CEIL = lambda nn: nn.MaxPool2D(2, 2, ceil_mode=True)   # noqa: E731


@pytest.mark.parametrize("rule", NETS)
def test_rules_of_layers(rule):
    """The rule finds the first layer, in these words, and not the second."""
    bites, words, silent = NETS[rule]
    found = [f for f in lint(layers(bites), sample=SAMPLE) if f.rule == rule]
    assert found and words in str(found[0]), found
    assert rule not in [f.rule for f in lint(layers(silent), sample=SAMPLE)]


FAST = {"learning_rate": 0.1}
#: as NETS, of options of the training
TRAINING = {
    "momentum under a changing rate": (
        {"optimizer_params": {"momentum": 0.9},
         "lr_scheduler": lr_scheduler.FactorScheduler(3)},
        "old rate / new rate", {"optimizer_params": {"momentum": 0.9}}),
    "weight decay in Nesterov's velocity": (
        {"optimizer": "nag", "optimizer_params": {"momentum": 0.9,
                                                  "wd": 0.1}},
        "no such term", {"optimizer_params": {"momentum": 0.9, "wd": 0.1}}),
    "epsilon of the optimizer": (
        {"optimizer": "adam"}, "31.6 times", {"optimizer": "sgd"}),
    "options of the optimizer": (
        {"optimizer": "rmsprop"}, "alpha=0.9", {"optimizer": "adam"}),
    "weight decay": (
        {"optimizer": "adam", "optimizer_params": {"wd": 0.1}}, "AdamW",
        {"optimizer_params": {"wd": 0.1}}),
    "gradient clipping": (
        {"optimizer_params": {"clip_gradient": 2}}, "clip_grad_value_",
        {"optimizer_params": FAST}),
    "a short last batch": (
        {"batch_size": 64, "examples": 1000}, "40 rows",
        {"batch_size": 64, "examples": 640}),
    "the loss": (
        {"loss": mgpu.losses.L2Loss()}, "0.5 * F.mse_loss",
        {"loss": mgpu.losses.L1Loss()}),
}


@pytest.mark.parametrize("rule", TRAINING)
def test_rules_of_training(rule):
    """The rule finds the first options once, in these words, and not the
    second."""
    bites, words, silent = TRAINING[rule]
    net = layers(lambda nn: nn.Activation("relu"))
    found = [f for f in lint(net, **bites) if f.rule == rule]
    assert len(found) == 1 and words in str(found[0]), found
    assert rule not in [f.rule for f in lint(net, **silent)]


def test_every_rule_is_tested():
    assert {*NETS, *TRAINING} == set(RULES)


def test_findings_of_relu_and_of_rounded_up_pooling():
    """ReLU has none; pooling that rounds up has one, about the rounding
    alone."""
    net = layers(lambda nn: nn.Activation("relu"), CEIL)
    found = lint(net, sample=SAMPLE)
    assert [f.rule for f in found] == ["pooling windows in the padding"]
    assert "rounded up" in found[0].text        # and no window is outside
    assert lint(layers(lambda nn: nn.Activation("relu"))) == []


def test_findings_of_optimizers():
    """Of these, sgd and nag alone have the options and defaults of torch."""
    net = layers(lambda nn: nn.Activation("relu"))
    epsilon, options = "epsilon of the optimizer", "options of the optimizer"
    for optimizer, rules in {
            "sgd": [], "nag": [], "adam": [epsilon], "adamw": [epsilon],
            "adamax": [epsilon], "nadam": [options],
            "rmsprop": [epsilon, options], "adagrad": [epsilon],
            "adadelta": [options], "ftrl": [options],
            "signum": [options]}.items():
        found = [f.rule for f in lint(net, optimizer=optimizer)]
        assert found == rules, optimizer


@pytest.mark.parametrize("norm", ["BatchNorm", "LayerNorm"])
def test_a_frozen_norm_is_among_the_frozen_parameters(norm):
    """Frozen gamma and beta are not taken for those that a norm is made
    without."""
    net = layers(dense, lambda nn: getattr(nn, norm)(in_channels=3))()
    net[1].collect_params().setattr("grad_req", "null")
    found = {f.rule: f for f in lint(net, sample=SAMPLE[:, 0, 0, :3])}
    assert "fixed gamma or beta" not in found
    for name in ("gamma", "beta"):
        assert f"1.{name}" in found["frozen parameters"].where


def test_lint_leaves_the_values_of_a_network_unchanged():
    net = layers(dense)()
    with mgpu.using_backend("mxnet"):
        net.initialize()
        replicas = mgpu.initialize(net, [mgpu.cpu(0)],
                                   "uniform", sample=SAMPLE)
        before = replicas.export_numpy()
        lint(net, sample=SAMPLE)
        after = mgpu.get_backend().network(net).values()
    assert sorted(before) == ["0.bias", "0.weight"]
    assert_all_equal(after, before)
