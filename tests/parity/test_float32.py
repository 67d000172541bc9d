"""What depends on the dtype, and what MXNet computes in float32 inside of a
float64 network."""
from functools import partial

import numpy as np
import pytest

from mgpu import parity
from nets import gluon as gluon_of
from nets import gluon_block, torch_block, torch_layer, two_dense
from nets import torch as torch_of
from parity.batches import pictures

#: float64, a handful of small layers: rounding of some hundred terms
EXACT = 1e-12

# -- what depends on the dtype ------------------------------------------------

def of_dtype(kind):
    """A network that does something else in float32, or in no dtype."""
    import torch

    class Net(torch.nn.Sequential):
        def forward(self, x):
            if kind == "autocast":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return super().forward(x)
            if kind == "dropout" and x.dtype != torch.float32:
                return torch.nn.Sequential.forward([*self][:-1], x)
            y = super().forward(x)
            if x.dtype != torch.float32:
                return y
            return y.detach() + 0.1 * (y - y.detach()) \
                if kind == "gradient" else y * 1.001 if kind == "output" \
                and self.training or kind == "prediction" \
                and not self.training else y
    torch.manual_seed(0)
    return Net(torch.nn.Flatten(), torch.nn.Linear(64, 5), torch.nn.ReLU(),
               torch.nn.Linear(5, 3), *[torch.nn.Dropout(0.25)]
               * (kind == "dropout"))


@pytest.mark.parametrize("kind, side", [
    ("autocast", "b"), ("output", "a"), ("prediction", "b"),
    ("gradient", "a"), ("dropout", "a"), ("dropout", "b"), ("none", "a")])
def test_what_depends_on_the_dtype_is_a_difference(kind, side, devices):
    """Which float64 does not show. The user's network stays as it was."""
    import torch
    net = of_dtype(kind)
    before = {n: x.clone() for n, x in net.state_dict().items()}
    pair = {"a": of_dtype("none"), "b": of_dtype("none"), side: net}
    result = parity.compare(**pair, batches=pictures(), devices=devices,
                            dropout="off")
    assert result.first is None
    assert result.verdict == ("same" if kind == "none" else "different")
    if kind != "none":
        assert f"in float32, {side} " + (
            "drops out at other places" if kind == "dropout" else
            "computes something else") in result.reason
        assert result.reason in " ".join(str(result).split())
    for name, x in net.state_dict().items():
        assert x.dtype == torch.float32 and x.equal(before[name])


def test_both_sides_may_depend_on_the_dtype_alike():
    assert parity.compare(of_dtype("output"), of_dtype("output"),
                          batches=pictures()).same
    assert parity.compare(of_dtype("none").double(), of_dtype("output")
                          .double(), batches=pictures()).same


@pytest.mark.parametrize("moved", [True, False])
def test_running_statistics_of_float32_are_compared(moved):
    import torch

    class Net(torch.nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            if moved and self.training and x.dtype == torch.float32:
                self[2].running_mean.data.add_(0.01)
            return y

    def make(kind):
        torch.manual_seed(0)
        return kind(torch.nn.Flatten(), torch.nn.Linear(64, 3),
                    torch.nn.BatchNorm1d(3))
    result = parity.compare(make(torch.nn.Sequential), make(Net),
                            batches=pictures())
    assert result.same == (not moved)
    assert not moved or "statistic 2.running_mean" in result.reason


@pytest.mark.parametrize("sides", ["a", "b", "ab"])
def test_a_side_that_float32_does_not_suit_is_named(sides):
    """Where the first one alone runs there, the second one is another
    network."""
    import torch
    result = parity.compare(*(
        partial(two_dense, torch_layer(
            lambda x, wrong=side in sides:
            x @ torch.eye(5, dtype=torch.float64) if wrong else x))
        for side in "ab"), batches=pictures())
    assert result.same == (sides != "b")
    assert result.same or "b does not run in float32" in result.reason
    assert len([x for x in result.notes if "not run in float32" in x]) \
        == len(sides) * result.same


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_loss_that_refuses_the_outputs_of_a_side(side):
    pair = dict.fromkeys("ab", two_dense)
    pair[side] = lambda: two_dense().append(torch_layer(lambda x: (x, x)))
    with pytest.raises(ValueError, match=r"\(a\) that returns {} and .*"
                       r"\(b\) that returns {}, .* TypeError".format(*(
                           "2 arrays" if side == x else "1 array"
                           for x in "ab"))):
        parity.compare(**pair, batches=pictures())


# -- MXNet's float32 in float64 networks --------------------------------------

def layered_g(make, *behind):
    """Dense layers with the layer ``make(nn)`` behind the first one."""
    return gluon_of(lambda nn: [
        nn.Dense(6, in_units=64), make(nn), nn.Dense(5),
        nn.Activation("tanh"), nn.Dense(3), *(f(nn) for f in behind)])


def layered_t(make, *behind):
    """The same in torch."""
    return torch_of(lambda nn: [
        nn.Flatten(), nn.Linear(64, 6), make(nn), nn.Linear(6, 5), nn.Tanh(),
        nn.Linear(5, 3), *(f(nn) for f in behind)])


def calls_g(function):
    """Makes a layer of ``function(F, x)``."""
    return lambda nn: nn.HybridLambda(function)


def calls_t(function):
    """Makes a layer of ``function(nn.functional, x)``."""
    return lambda nn: torch_layer(lambda x: function(nn.functional, x))


def leaky(slope=0.01, **options):
    return lambda nn: nn.LeakyReLU(slope, **options)


def selu_g(nn):
    """With the gradient of the formula; MXNet's own layer has another."""
    alpha, scale = (float(np.float32(v)) for v in (
        1.6732632423543772, 1.0507009873554805))
    return gluon_block(lambda nn: {}, lambda net, F, x: scale * F.where(
        x > 0, x, alpha * F.expm1(x)))()


clip = calls_g(lambda F, x: F.clip(x, -0.3, 0.3))
resized_g = gluon_of(lambda nn: [
    nn.HybridLambda(lambda F, x: F.contrib.BilinearResize2D(
        x, height=13, width=11)),
    nn.Conv2D(2, 3), nn.Flatten(), nn.Dense(3)])
resized_t = torch_of(lambda nn: [
    nn.Upsample((13, 11), mode="bilinear", align_corners=True),
    nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(198, 3)])
#: by the function of MXNet's: a layer of Gluon's and one of torch's, or a
#: layer that calls a function
LAYERS = {
    "leaky_relu": (leaky(), leaky()),
    "leaky_relu, in place": (leaky(0.25), leaky(0.25, inplace=True)),
    "prelu": (lambda nn: nn.PReLU(), lambda nn: nn.PReLU()),
    "elu": (lambda nn: nn.ELU(0.3), lambda nn: nn.ELU(0.3)),
    "gelu": (lambda nn: nn.GELU(), lambda nn: nn.GELU()),
    "selu": (selu_g, lambda nn: nn.SELU()),
    "clip": (clip, calls_t(lambda F, x: x.clamp(min=-0.3, max=0.3))),
    "clip, in place": (clip, calls_t(lambda F, x: x.clamp_(-0.3, 0.3))),
    "clip, hardtanh": (clip, lambda nn: nn.Hardtanh(-0.3, 0.3)),
    "hard_sigmoid": (calls_g(lambda F, x: F.hard_sigmoid(x, alpha=1 / 6)),
                     calls_t(lambda F, x: F.hardsigmoid(x))),
    "hard_sigmoid, hardswish": (
        calls_g(lambda F, x: x * F.hard_sigmoid(x, alpha=1 / 6)),
        calls_t(lambda F, x: F.hardswish(x))),
    "hard_sigmoid, by hand": (
        calls_g(lambda F, x: F.hard_sigmoid(x)),
        calls_t(lambda F, x: (0.2 * x + 0.5).clamp(0, 1))),
    "hard_sigmoid, by another": (
        calls_g(lambda F, x: F.hard_sigmoid(x, beta=0.3)),
        calls_t(lambda F, x: ((x + 1.5) / 5).clamp(0, 1))),
    "erf": (calls_g(lambda F, x: F.erf(x)), calls_t(lambda F, x: x.erf())),
    "erf, in place": (calls_g(lambda F, x: F.erf(x)),
                      calls_t(lambda F, x: x.clone().erf_())),
    "erf, GELU by hand": (
        calls_g(lambda F, x: x * 0.5 * (1 + F.erf(x / 2 ** 0.5))),
        calls_t(lambda F, x: F.gelu(x))),
    "hardsigmoid, in place": (calls_g(lambda F, x: F.clip(x + 3, 0, 6) / 6),
                              lambda nn: nn.Hardsigmoid(inplace=True))}
FLOAT32 = {"interpolate": (resized_g, resized_t)} | {
    name: (layered_g(ours), layered_t(theirs))
    for name, (ours, theirs) in LAYERS.items()}
SAME_BUT = "same but for MXNet's float32"


@pytest.mark.parametrize("case", FLOAT32)
def test_mxnets_float32_is_a_verdict_of_its_own(case, devices):
    """It is put into the torch network, whichever side that is (every second
    case has it as a): what is left is rounding of float64."""
    swapped = list(FLOAT32).index(case) % 2
    pair = FLOAT32[case][::-1] if swapped else FLOAT32[case]
    result = parity.compare(*pair, batches=pictures(), devices=devices,
                            optimizer_params={"learning_rate": 0.1,
                                              "momentum": 0.9})
    assert (result.verdict, result.same) == (SAME_BUT, False), str(result)
    assert max(g.relative for g in result.gaps) < EXACT
    found, = result.float32
    name = case.partition(",")[0]
    assert found["function"] == name
    assert 1e-10 < found["size"] < 1e-5
    assert len(found["layers"]) == (case in (
        "leaky_relu", "leaky_relu, in place", "prelu", "elu", "gelu", "selu",
        "clip, hardtanh", "hardsigmoid, in place"))
    who = "torch" if name == "hardsigmoid" else "MXNet"
    assert f"{who}'s float32: {who} " in str(result)
    assert found["text"] in str(result)
    assert result.to_dict()["float32"] == result.float32
    assert result.first is None and not result.causes


@pytest.mark.parametrize("kind, of", [("layer_norm", 16), ("group_norm", 4)])
def test_epsilon_is_one_of_float32(kind, of):
    """Next to a variance of 1e-5 the last digits of epsilon count."""
    original = gluon_of(lambda nn: [
        nn.LayerNorm(in_channels=of, epsilon=3e-3)
        if kind == "layer_norm" else nn.GroupNorm(of, epsilon=3e-3),
        nn.Dense(3)])
    ported = torch_of(lambda nn: [
        nn.LayerNorm(of, eps=3e-3) if kind == "layer_norm"
        else nn.GroupNorm(of, of, eps=3e-3), nn.Flatten(), nn.Linear(64, 3)])
    small = [(1e-4 * X.reshape(len(X), 4, 16), y) for X, y in pictures()]
    result = parity.compare(original, ported, batches=small)
    assert result.verdict == SAME_BUT
    assert [f["function"] for f in result.float32] == [kind]


def test_a_line_that_is_changed_is_none():
    """What is a line by its name alone is computed as it is."""
    import torch
    from mgpu.backends._torch.float32 import AsMXNet
    from mgpu.backends.probing import Float32Functions

    def function(x):
        y = 0.2 * x + 0.5
        y.add_(0.1)
        return y.clamp(0, 1)
    x = torch.linspace(-5, 5, 9, dtype=torch.float64)
    right = function(x)
    with AsMXNet(Float32Functions(frozenset(["hard_sigmoid"]))):
        assert function(x).equal(right)


@pytest.mark.parametrize("size", [1e-7, 1e-2])
def test_float32_explains_no_more_than_it_rounds(size, monkeypatch):
    """What is gone when a step is taken once more may have been something
    else."""
    from mgpu.parity import comparison
    check, once = comparison.check_deterministic, []

    def checked(run, *batch):
        check(run, *batch)
        once[:] = [run.name] * (run.name == "torch")
    monkeypatch.setattr(comparison, "check_deterministic", checked)

    ported = layered_t(leaky(), lambda nn: torch_block(
        lambda nn: {}, lambda net, x: x * (1 + size)
        if net.training and once and once.pop() else x)())
    result = parity.compare(layered_g(leaky()), ported,
                            batches=pictures(count=1))
    assert not once
    assert result.verdict == (SAME_BUT if size < 1e-5 else "different")
    assert bool(result.float32) == (size < 1e-5)


def test_the_search_goes_on_past_float32():
    """To a fault behind a difference of float32, which it hides."""
    original = layered_g(leaky(), lambda nn: nn.LayerNorm(epsilon=1e-5))
    ported = layered_t(leaky(), lambda nn: nn.LayerNorm(3, eps=1.001e-5))
    result = parity.compare(original, ported, batches=pictures())
    assert result.verdict == "different"
    assert [f["function"] for f in result.float32] == ["leaky_relu"]
    assert result.location["b"]["path"] == "6"
    assert result.causes[0].name == "normalization epsilon"
    assert "LeakyReLU" in str(result)


@pytest.mark.parametrize("far", [False, True])
def test_a_last_bit_of_float32_is_rounding(far):
    """Between two numbers of float32 the last bit of float64 says which one
    it is; not further than that."""
    rng = np.random.default_rng(0)
    ties = (1 + (2 * np.arange(1, 4000) + 1) * 2.0 ** -24) / 0.07
    ties = ties[np.float32(ties * 0.7 * 0.1) != np.float32(ties * 0.07)]
    X = np.where(rng.random((8, 64)) < 0.5, rng.choice(ties, (8, 64)),
                 -rng.random((8, 64)))

    original = gluon_of(lambda nn: [
        nn.LeakyReLU(0.1), nn.HybridLambda(lambda F, x: x * -0.7 * 0.1),
        nn.LeakyReLU(0.1), nn.Dense(3, in_units=64)])
    ported = torch_of(lambda nn: [
        nn.LeakyReLU(0.1), torch_layer(
            lambda x: x * (-0.07 * (1 + 1e-5 * far * (x[:, :1] < 0)))),
        nn.LeakyReLU(0.1), nn.Linear(64, 3)])
    result = parity.compare(original, ported, batches=[(X, np.arange(8) % 3)])
    assert [f["function"] for f in result.float32] == ["leaky_relu"]
    assert result.verdict == ("different" if far else SAME_BUT), str(result)
    assert far or any(g.status == "rounding" for g in result.gaps)


def test_what_gluon_computes_in_float64_stays():
    """A LeakyReLU of the user's own is one of float64: float32 put into the
    other side would be a difference."""
    own = layered_g(lambda nn: gluon_block(
        lambda nn: {}, lambda net, F, x: F.where(x > 0, x, 0.01 * x))())
    for slope, verdict in ((0.01, "same"), (0.02, "different")):
        result = parity.compare(own, layered_t(leaky(slope)),
                                batches=pictures())
        assert result.verdict == verdict and not result.float32


def test_float32_is_put_in_beside_a_trace(tmp_path):
    original, ported = FLOAT32["leaky_relu"]
    parity.record(original, batches=pictures(), file=tmp_path / "a.trace")
    result = parity.compare_trace(tmp_path / "a.trace", ported)
    assert result.verdict == SAME_BUT
    assert [f["function"] for f in result.float32] == ["leaky_relu"]
    assert max(g.relative for g in result.gaps) < EXACT


def test_a_dead_network_is_no_proof_with_float32_either():
    result = parity.compare(*FLOAT32["prelu"], batches=pictures(),
                            optimizer_params={"learning_rate": 0.0})
    assert result.verdict == "no proof" and result.float32
