"""`mgpu.parity.compare`: what it finds, what it refuses, what it leaves."""
import contextlib
import pickle
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import mgpu
from mgpu import parity
from mgpu.parity import spill
from nets import (bricks, gluon_block, torch_block, torch_layer, two_dense)
from nets import gluon as gluon_of
from nets import torch as torch_of
from nets import two_convs_gluon as gluon
from nets import two_convs_torch as port
from parity.batches import pictures, vectors

#: float64, a handful of small layers: rounding of some hundred terms
EXACT = 1e-12
MAKE = {"mxnet": gluon, "torch": port}


# -- same ---------------------------------------------------------------------

@pytest.mark.parametrize("policy, rows", [
    ("per_device", 8), ("average", 3), ("sync", 3)])
def test_a_faithful_port_is_the_same(policy, rows, devices):
    """All stages differ by rounding only, and all parameters and layers are
    covered."""
    result = parity.compare(
        gluon, port, batches=pictures(rows), devices=devices,
        batch_norm=policy, optimizer_params={"learning_rate": 0.1,
                                             "momentum": 0.9, "wd": 1e-3})
    assert result.same and result.first is None and not result.causes
    assert max(g.relative for g in result.gaps) < EXACT
    assert set(result.worst) == {"output", "loss", "gradient", "weight",
                                 "memory", "statistic", "prediction"}
    assert result.coverage == {"parameters": [8, 8], "layers_a": [8, 8],
                               "layers_b": [8, 8], "not_on_trial": [],
                               "options": []}
    # every parameter of every stage, in every step
    assert sum(g.stage == "gradient" for g in result.gaps) == 2 * 8
    assert result.plan.confirmed is True
    assert "dropout: masks drawn in NumPy" in result.notes


@pytest.mark.parametrize("scale, swapped", [(1.0, False), (2.0, True)])
def test_a_network_with_a_fixed_batch_size(scale, swapped):
    """Code that reshapes to 8 examples is compared with batches of 8, equal or
    not, and raises torch's error with 5."""
    original = gluon_of(lambda nn: [
        nn.Dense(6, activation="tanh", in_units=64), nn.Dense(3, in_units=6)])
    ported = torch_block(
        lambda nn: {"one": nn.Linear(64, 6), "two": nn.Linear(6, 3)},
        lambda net, x: scale * net.two(
            net.one(x.view(8, 64)).tanh().view(8, 2, 3).view(8, 6)))
    a, b = (ported, original) if swapped else (original, ported)
    result = parity.compare(a, b, batches=pictures())
    assert result.same is (scale == 1.0), result
    assert result.plan.confirmed is (scale == 1.0)
    with pytest.raises(RuntimeError, match="8, 64"):
        parity.compare(a, b, batches=pictures(rows=5))


def test_a_side_of_other_devices(backend, devices):
    """A model on `devices` trains as on one device: statistics are
    synchronized, and dropout masks depend on the example."""
    make = MAKE[backend.name]
    result = parity.compare(
        make, parity.Side(make, devices=devices), batch_norm="sync",
        batches=pictures(7), devices=1)
    assert result.same, str(result)
    assert max(g.relative for g in result.gaps) < EXACT


# -- different ----------------------------------------------------------------

def test_the_first_difference_is_the_layer():
    """A batch norm with another epsilon and equal inputs is named."""
    result = parity.compare(gluon, lambda: port(eps=1e-3),
                            batches=pictures())
    assert result.verdict == "different" and not result.same
    assert (result.first.step, result.first.stage, result.first.name) \
        == (1, "layer", "1")
    assert result.location["inputs_agree"]
    assert result.location["b"]["options"]["epsilon"] == 1e-3
    assert "step 1, layer 1 at [" in str(result)
    # what follows from it is there too
    assert {g.stage for g in result.gaps if g.status == "different"} >= {
        "layer", "output", "loss", "gradient", "weight"}


@pytest.mark.parametrize("options", ({"optimizer": "adam"}, {"eps": 1e-3}),
                         ids=["weights", "epsilon"])
def test_a_large_network_lies_in_files(options, monkeypatch):
    """With files for all arrays the result is the same to the bit, and the
    arrays of one mapping share a file, since open files are limited."""
    options = dict(options)
    results, nets = [], (port(), port(eps=options.pop("eps", 1e-5)))
    for least in (spill.LEAST, 0):
        monkeypatch.setattr(spill, "LEAST", least)
        results.append(parity.compare(*nets, batches=pictures(), devices=2,
                                      weights="own", **options))
    small, large = results
    assert small.to_dict() == large.to_dict()
    for result, kind in zip(results, (np.ndarray, np.memmap)):
        assert (result.evidence is None) == result.same, result.verdict
        if result.evidence is not None:
            for arrays in (result.evidence.a.gradients,
                           result.evidence.before.values,
                           result.evidence.initial[0]):
                assert {type(x) for x in arrays.values()} == {kind}
                assert kind is np.ndarray or \
                    len({id(x._mmap) for x in arrays.values()}) == 1


def test_native_batch_norm_is_seen_in_the_statistics():
    """torch's own layer keeps another running variance than Gluon's, and
    trains the same."""
    result = parity.compare(gluon, port, batches=pictures(), native=True)
    wrong = {g.stage for g in result.gaps if g.status == "different"}
    assert wrong == {"statistic"}
    assert "framework's own" in result.sides["b"]["batch_norm"]


# -- what SAME means ----------------------------------------------------------

def when_training(training):
    """A layer that does something in one of the two modes only."""
    return torch_block(lambda nn: {}, lambda net, x: x * 2
                       if net.training is training else x)()


@pytest.mark.parametrize("training, stage", [(True, "layer"),
                                             (False, "prediction")])
def test_predictions_are_compared_too(devices, training, stage):
    """A layer that doubles its input in training alone, or in prediction
    alone, is found."""
    from torch import nn
    result = parity.compare(
        lambda: two_dense(nn.Identity()),
        lambda: two_dense(when_training(training)), batches=pictures(),
        devices=devices)
    assert result.verdict == "different" and result.first.stage == stage
    assert result.location["predicting"] is (stage == "prediction")
    assert result.location["b"]["path"] == "3"      # what it goes to
    assert not result.location["inputs_agree"]
    if stage == "prediction":
        assert {g.stage for g in result.gaps
                if g.status == "different"} == {stage}
        assert not result.causes


@pytest.mark.parametrize("case, reason", [
    ("rate", "no parameter moved"), ("nan", "no step had a finite loss")])
def test_a_comparison_without_training_is_inconclusive(case, reason):
    """A rate of 0, or batches of NaN: equal results are no proof."""
    data = pictures()
    if case == "nan":
        data = [(X * np.nan, y) for X, y in data]
    result = parity.compare(
        two_dense, two_dense, batches=data, optimizer_params={
            "learning_rate": 0.0 if case == "rate" else 0.1})
    assert result.verdict == "no proof" and not result.same
    assert reason in result.reason and reason in str(result)


def test_uncovered_parameters_and_layers_are_named():
    """A branch not taken, rows of an embedding, a layer that gets zeros."""
    def forward(net, x):
        x = net.words(x.long()).mean(1)
        if len(x) > 100:
            x = net.rare(x)
        return net.out(x + (net.dead(x) - 1e3).relu())
    net = torch_block(lambda nn: {
        "words": nn.Embedding(9, 4), "rare": nn.Linear(4, 4),
        "dead": nn.Linear(4, 4), "out": nn.Linear(4, 3)}, forward)
    data = [(np.array([[0, 3], [3, 5]]), np.array([0, 1]))]
    result = parity.compare(net, net, batches=data)
    assert result.same
    assert result.coverage["parameters"] == [3, 7]
    assert result.coverage["layers_a"] == [3, 4]
    text = "\n".join(result.on_trial())
    for line in ("on trial: 3 of 7 parameters; 3 of 4 layers of a and 3 of 4 "
                 "of b", "parameters 'rare.weight', 'rare.bias', 'dead."
                 "weight', 'dead.bias'", "a did not run layer "
                 "'rare'", "6 of 9 rows of 'words.weight' were not reached"):
        assert line in text and line in str(result)


def pooled(**options):
    return torch_of(lambda nn: [nn.AvgPool2d(2, **options), nn.Flatten(),
                                nn.Linear(16, 3)])


def activated(kind):
    return torch_of(lambda nn: [
        nn.Conv2d(1, 3, 3), getattr(nn, kind)(), nn.MaxPool2d(6),
        nn.Flatten(), nn.Linear(3, 3)])


def convolved(**options):
    return torch_of(lambda nn: [nn.Conv2d(1, 3, **options), nn.Flatten(),
                                nn.Linear(192, 3)])


adaptive = torch_of(lambda nn: [nn.AdaptiveAvgPool2d(4), nn.Flatten(),
                                nn.Linear(16, 3)])
relu6 = activated("ReLU6")
fused = gluon_of(lambda nn: [nn.Conv2D(3, 3, activation="relu"),
                             nn.MaxPool2D(6), nn.Flatten(), nn.Dense(3)])


def options_are_named(one, two, words, strict=True, **options):
    """Options that differ, in these words or not at all, are a difference
    where the comparison is strict; no number differs."""
    result = parity.compare(one, two, batches=pictures(), strict=strict,
                            **options)
    assert result.verdict == (
        "different" if strict and words else "same"), str(result)
    assert [g for g in result.gaps if g.status == "different"] == []
    named = result.coverage["options"]
    assert len(named) == (words is not None), result
    for text in named:
        assert words in text
        assert f"warning: not reached by this data: {text}" in str(result)


@pytest.mark.parametrize("one, two, words", [
    (pooled(), pooled(ceil_mode=True), "ceil False and True"),
    (pooled(), adaptive, "adaptive_avg_pool (size 4)"),
    (fused, relu6, "relu and relu6"),
    (fused, activated("ReLU"), None),
    # no effect for any data
    (convolved(kernel_size=1), convolved(kernel_size=1, dilation=2), None),
    (convolved(kernel_size=3, padding=1),
     convolved(kernel_size=3, padding="same"), None),
    (pooled(), pooled(count_include_pad=False), None)],
    ids=["ceil", "adaptive", "fused", "fused_alike", "dilation", "same",
         "count_include_pad"])
def test_options_that_no_data_reaches_are_named(one, two, words, devices):
    """Options without effect on any data are not named."""
    for strict in (True, False)[:1 if words is None else 2]:
        options_are_named(one, two, words, strict, devices=devices)


def silu(F, x):
    return x * F.sigmoid(x)


def clip6(F, x):
    return F.clip(x, 0, 6)


def hardswish(F, x):
    return x * F.clip(x + 3, 0, 6) / 6


@pytest.mark.parametrize("one, two, words", [
    (silu, lambda F, x: F.silu(x), None),
    (lambda F, x: 0.5 * x * (1 + F.tanh(
        (2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x))),
     lambda F, x: F.gelu(x, approximate="tanh"), None),
    (hardswish, lambda F, x: F.hardswish(x), None),
    (clip6, lambda F, x: F.relu6(x), None),
    (lambda F, x: F.clip(x, -50, 20), lambda F, x: F.hardtanh(x, -50, 20),
     None),
    # mistakes
    (clip6, lambda F, x: F.relu(x), "relu6 and relu"),
    (lambda F, x: F.relu(x), lambda F, x: x.clamp(0, 6), "relu and relu6"),
    (lambda F, x: F.clip(x, 0, 20), lambda F, x: x.clamp(min=0, max=25),
     "clip with high 20.0 and 25.0"),
    (lambda F, x: F.clip(x, 0, 20), lambda F, x: x.clamp_min(0),
     "clip (low 0.0, high 20.0) and relu")],
    ids=["silu", "gelu", "hardswish", "relu6", "clamp", "relu for relu6",
         "relu6 for relu", "another bound", "no bound"])
def test_functions_that_agree_on_this_data(one, two, words):
    """The verdict is "same"; options that other data would reach are named,
    and are a difference if `strict`."""
    def forward(net, x):
        from torch.nn import functional
        return net.b(two(functional, net.a(x.flatten(1))))
    options_are_named(
        gluon_block(lambda nn: {"a": nn.Dense(6), "b": nn.Dense(3)},
                    lambda net, F, x: net.b(one(F, net.a(x)))),
        torch_block(lambda nn: {"a": nn.Linear(64, 6), "b": nn.Linear(6, 3)},
                    forward), words)


def of_class(name, layer):
    """A layer whose class has this name, whatever it computes."""
    type(layer).__name__ = type(layer).__qualname__ = name
    return layer


def full(F, x):
    return F.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max",
                     pooling_convention="full")


@pytest.mark.parametrize("one, two, words", [
    (clip6, "ReLU6", None),
    (silu, "SiLU", None),
    # mistakes
    (clip6, "ReLU", "relu6 and relu"),
    (clip6, lambda F, x: F.relu(x), "relu6 and relu"),
    (lambda F, x: x * F.clip(x + 9, 0, 60), lambda F, x: x * F.relu(x + 9),
     "clip (low 0.0, high 60.0) and relu"),
    (full, lambda F, x: F.max_pool2d(x, 2), "ceil True and False")],
    ids=["right", "silu", "relu", "function", "parts", "ceil"])
def test_functions_in_custom_layers_that_agree_on_this_data(one, two, words):
    """Functions in a layer of the user's class, or in a lambda, are compared
    as those of the network's forward."""
    def ported(nn):
        if isinstance(two, str):
            return getattr(nn, two)()
        return of_class("ReLU6", torch_layer(
            lambda x: two(nn.functional, x)))
    blocks = [lambda nn: of_class("RELU6", gluon_block(
        lambda nn: {}, lambda net, F, x: one(F, x))())]
    if isinstance(two, str):
        blocks.append(lambda nn: nn.HybridLambda(one))
    for block in blocks:
        options_are_named(
            gluon_of(lambda nn, block=block: [
                nn.Conv2D(3, 3, in_channels=1), block(nn), nn.Flatten(),
                nn.Dense(3)]),
            torch_of(lambda nn: [nn.Conv2d(1, 3, 3), ported(nn),
                                 nn.Flatten(), nn.LazyLinear(3)]), words)


PLAIN = {"numpy": np.random.rand, "python": random.random,
         "numpy, set": lambda: np.random.seed(0),
         "python, set": lambda: random.seed(0)}


def torch_draws(where):
    import torch

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if gradient.dtype == torch.float64:     # in the steps alone
                torch.rand(())
            return gradient

    class Draws(torch.nn.Module):
        passes = 0

        def forward(self, x):
            self.passes += self.training
            if where == "torch, put back":
                with torch.random.fork_rng():
                    torch.rand(())
            elif where == "torch" or where == "torch, later" \
                    and self.passes > 3 or where == "torch, float32" \
                    and x.dtype == torch.float32:
                torch.rand(())
            elif where in PLAIN:
                PLAIN[where]()
            elif where == "torch, set":
                torch.manual_seed(0)
            return Backward.apply(x) if where == "torch, backward" else x
    return two_dense(Draws())


def mxnet_draws(where):
    def layer(F, x):
        import mxnet as mx
        if where == "mxnet, shuffle":
            return x + 0 * F.shuffle(x)
        if where == "mxnet, none":
            return x
        if where == "mxnet, set":
            return mx.random.seed(0) or x
        return x + 0 * F.random.uniform(shape=(1, 5), dtype="float64")
    return gluon_of(lambda nn: [nn.Dense(5), nn.HybridLambda(layer),
                                nn.Dense(3)])()


@pytest.mark.parametrize("where, count", [
    *((where, 1) for where in (
        "torch", "torch, backward", "torch, later", "torch, set",
        "torch, put back", "torch, float32", "numpy", "numpy, set", "python",
        "python, set", "mxnet, uniform", "mxnet, shuffle", "mxnet, set")),
    ("torch", 2), ("mxnet, uniform", 2)])
def test_random_numbers_are_seen_where_they_change_nothing(where, count):
    """A draw or a seed, in any pass, raises though no output depends on it."""
    make = partial(mxnet_draws if "mxnet" in where else torch_draws, where)
    with pytest.raises(ValueError, match="takes numbers from a random stream"):
        parity.compare(make, make, batches=pictures(), devices=count)


def test_a_comparison_leaves_the_random_streams_alone():
    """The streams of Python and of NumPy have the same state afterwards."""
    for make in (partial(mxnet_draws, "mxnet, none"),
                 partial(torch_draws, "none")):
        streams = random.getstate(), pickle.dumps(np.random.get_state())
        assert parity.compare(make, make, batches=pictures(), devices=2).same
        assert random.getstate() == streams[0]
        assert pickle.dumps(np.random.get_state()) == streams[1]


def test_a_pass_may_move_a_buffer():
    """Spectral norm changes one in each pass; it is not taken for a draw."""
    def make():
        import torch
        from torch import nn
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.utils.parametrizations.
                             spectral_norm(nn.Linear(64, 3)))
    assert parity.compare(make, make, batches=pictures()).same
    assert parity.invariance(make, batches=pictures(),
                             devices=(1, 2, 3)).verdict == "exact"


def test_the_gradient_pass_runs_backwards():
    """Of several wrong gradients the one nearest to the loss is first."""
    import torch

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, g):
            return g * 1.01
    make = port

    def wrong():
        net = make()
        net[6].register_forward_hook(lambda m, i, o: Wrong.apply(o))
        return net
    result = parity.compare(gluon, wrong, batches=pictures(),
                            dropout="off")
    assert result.first.stage == "gradient"
    assert result.first.name.startswith("4.")   # not 7, and before 1 and 0


def test_a_fault_in_a_gradient_that_is_zero():
    """The bias of a convolution before a batch norm: noise is "zero", and
    a fault of the layer's scale is seen."""
    result = parity.compare(gluon, port, batches=pictures(count=1))
    zero = [g for g in result.gaps if g.status == "zero"]
    assert {(g.stage, g.name) for g in zero} == {
        ("gradient", "0.bias"), ("weight", "0.bias")}   # from 0 and by noise

    def shifted():
        net = port()
        net[0].bias.register_hook(lambda g: g + 1e-9)
        return net
    result = parity.compare(gluon, shifted, batches=pictures(count=1))
    assert (result.first.stage, result.first.name) == ("gradient", "0.bias")


def test_rounding_is_told_from_a_difference():
    """Adam divides noise by noise: the bias before a batch norm moves by the
    full rate in a direction that depends on rounding."""
    result = parity.compare(
        gluon, port, batches=pictures(rows=32, count=2), optimizer="adam",
        optimizer_params={"epsilon": 1e-30})
    statuses = {(g.name, g.status) for g in result.gaps
                if g.stage == "weight" and g.relative > 1e-10}
    assert result.same and statuses == {("0.bias", "rounding")}
    assert min(g.own for g in result.gaps if g.status == "rounding") > 0


#: of whole numbers in floats: ids in the input, and an order of columns in a
#: constant
indexed_gluon = gluon_block(
    lambda nn: {
        "embed": nn.Embedding(7, 4), "hidden": nn.Dense(5, in_units=4),
        "norm": nn.BatchNorm(in_channels=5), "out": nn.Dense(3, in_units=5),
        "order": np.array([2, 0, 1, 3], "float32")},
    lambda net, F, x, order: net.out(F.tanh(net.norm(net.hidden(F.take(
        F.mean(net.embed(x), axis=1), order, axis=1))))))


def indexed_torch():
    import torch

    def forward(net, x):
        h = net.embed(x.long()).mean(1)[:, net.order.long()]
        return net.out(net.norm(net.hidden(h)).tanh())
    net = torch_block(lambda nn: {
        "embed": nn.Embedding(7, 4), "hidden": nn.Linear(4, 5),
        "norm": nn.BatchNorm1d(5), "out": nn.Linear(5, 3)}, forward)()
    net.register_buffer("order", torch.tensor([2., 0, 1, 3]))
    return net


@pytest.mark.parametrize("dtype", ("float64", "float32"))
def test_no_rounding_moves_a_whole_number(dtype, backend, devices):
    """Noise that measures rounding leaves indices as they are: a wrong rate is
    found, and the rounding of a bias is "rounding"."""
    make = {"mxnet": indexed_gluon, "torch": indexed_torch}[backend.name]
    rng = np.random.default_rng(0)
    data = [(rng.integers(0, 7, (32, 6)).astype(dtype),
             rng.integers(0, 3, 32)) for _ in range(2)]

    def compared(**other):
        sides = [parity.Side(net, optimizer="adam", optimizer_params={
            "epsilon": 1e-30, "learning_rate": 1e-3, **options})
            for net, options in ((make, {}), (indexed_torch, other))]
        return parity.compare(*sides, batches=data, devices=devices)
    wrong = compared(learning_rate=1.001e-3)
    assert wrong.verdict == "different" and wrong.first.stage == "weight"
    equal = compared()
    assert equal.same, str(equal)
    if backend.name == "mxnet":     # torch against torch has the same bits
        assert ("hidden.bias", "rounding") in {
            (g.name, g.status) for g in equal.gaps}


def deciding(kind, fault=1.0):
    """A network that decides by values that are no whole numbers, the same
    in both sides. `fault`: of the gradients of what it decides on."""
    import torch

    def forward(net, x):
        x = {"threshold": lambda: (x >= 0.5) * net.table,
             "index": lambda: x * net.table[(net.tenths * 8).long()],
             "kink": lambda: torch.relu(x - net.at)}[kind]()
        return net.out(net.gain * x)
    net = torch_block(lambda nn: {
        "out": nn.Linear(6, 3), "at": nn.Parameter(torch.full((6,), 0.5)),
        "table": nn.Parameter(torch.linspace(-1, 1, 6)),
        "gain": nn.Parameter(torch.tensor(1.5))}, forward)()
    net.register_buffer("tenths", torch.arange(6) / 8)
    for p in (net.at, net.table):
        p.register_hook(lambda g: fault * g)
    return net


@pytest.mark.parametrize("kind", ("threshold", "index", "kink"))
def test_a_jump_is_no_rounding(kind):
    """Values lie on a threshold, an index or the kink of ReLU: the jump there
    excuses no wrong rate or gradient; at the kink the verdict is "no
    proof"."""
    rng = np.random.default_rng(0)
    data = [(rng.integers(0, 3, (8, 6)) / 2, rng.integers(0, 3, 8))]

    def compared(b, rate=0.1):
        return parity.compare(
            *(parity.Side(net, optimizer_params={"learning_rate": r,
                                                 "momentum": 0.9})
              for net, r in ((lambda: deciding(kind), 0.1), (b, rate))),
            batches=data)
    assert compared(lambda: deciding(kind)).same
    if kind == "kink":      # an update differs as far as its gradient does
        near = compared(lambda: deciding(kind, 1 + 3e-10))
        assert near.same
        assert {g.stage for g in near.gaps if g.status == "rounding"
                and g.name.startswith("at")} >= {"gradient", "memory"}
    # gradients of both sides are equal, so that an update is judged by them
    rate = compared(lambda: deciding(kind), 0.1001)
    assert {g.status for g in rate.gaps if g.stage == "weight"
            and g.relative > 1e-10} == {"different"}
    fault = compared(lambda: deciding(kind, 1.5))
    if kind == "kink":      # only the gradients jump
        assert fault.verdict == "no proof"
        assert "rounding alone moves gradient at by" in fault.reason
    else:
        assert fault.verdict == "different"
        assert fault.first.stage == "gradient"


def towers(engine, exchanged=False, names=("left", "right")):
    """Two layers of one shape, which may be used in each other's place."""
    base, dense = bricks(SimpleNamespace(name=engine))

    class Towers(base):
        def __init__(self):
            super().__init__()
            for name in names:
                setattr(self, name, dense(6, 3))

        def forward(self, x):
            left, right = (getattr(self, name)(x) for name
                           in names[::-1 if exchanged else 1])
            return left ** 2 + right
    return Towers()


def halves(exchanged):
    """The same as halves of one layer."""
    def forward(net, x):
        left, right = net.both(x).chunk(2, 1)[::-1 if exchanged else 1]
        return left ** 2 + right
    return torch_block(lambda nn: {"both": nn.Linear(6, 6)}, forward)()


def test_layers_with_each_others_names_are_noted(backend):
    """A pair of left and right gives a note, unless `map` asks for it."""
    def compared(b, **options):
        found = parity.compare(lambda: towers(backend.name), b,
                               batches=vectors(6), **options)
        assert found.same
        return [note for note in found.notes if "although b has" in note]
    assert not compared(lambda: towers("torch"))
    notes = compared(lambda: towers("torch", exchanged=True))
    assert len(notes) == 1 and notes[0].startswith(
        "left of a is paired with right of b, although b has left too (2 such "
        "names)")
    assert not compared(lambda: towers("torch", exchanged=True), map={
        f"{one}.{part}": f"{other}.{part}" for part in ("weight", "bias")
        for one, other in (("left", "right"), ("right", "left"))})


@pytest.mark.parametrize("make", [
    partial(towers, "torch", names="xy"), halves], ids=["named", "fused"])
def test_layers_in_each_others_place_are_noted_whatever_their_names(
        make, backend):
    """Two layers of equal shape, each of which b uses in the other's place,
    give one note."""
    for exchanged in (False, True):
        found = parity.compare(
            lambda: towers(backend.name), partial(make, exchanged=exchanged),
            batches=vectors(6))
        assert found.same
        assert len([note for note in found.notes if "in this order" in note]
                   ) == exchanged, found.notes


def test_own_initial_weights_are_compared():
    """Equal initializers give equal values; test_diagnosis has different
    ones."""
    same = parity.compare(*(parity.Side(
        net, init=mgpu.initializers.Xavier()) for net in (gluon, port)),
        batches=pictures(), weights="own")
    assert same.same and same.worst["initial"].absolute == 0


def test_user_networks_are_unchanged(backend):
    """A comparison leaves the values and dtypes of a network as they were,
    also where it fails."""
    net = MAKE[backend.name]()
    replicas = mgpu.initialize(net, [mgpu.cpu(0)],
                               "uniform", force_reinit=True,
                               sample=np.zeros((1, 1, 8, 8), "float32"))
    before = replicas.export_numpy()

    def fails():
        other = MAKE[backend.name]()
        other.register_forward_pre_hook(lambda *_: 1 / 0)
        return other
    for other in (MAKE[backend.name], fails):
        with contextlib.suppress(ZeroDivisionError):
            parity.compare(net, other, batches=pictures())
        after = backend.network(net).values()
        for name, value in before.items():
            assert after[name].dtype == value.dtype
            assert (after[name] == value).all(), name


# -- refused ------------------------------------------------------------------

def test_dropout_outside_of_layers_is_refused():
    def forward(net, x):
        from torch.nn.functional import dropout
        return net.dense(dropout(x, 0.5, net.training))
    noisy = torch_block(lambda nn: {"dense": nn.Linear(6, 3)}, forward)
    with pytest.raises(ValueError, match="outside its dropout layers"):
        parity.compare(noisy, noisy, batches=vectors(6))


def test_wrong_options():
    for options, words in (
            ({"weights": "c"}, "unknown weights"),
            ({"dropout": "on"}, "unknown dropout"),
            ({"dtype": "float16"}, "unknown dtype"),
            *(({"tolerance": x}, "tolerance is .*; received")
              for x in (-1e-10, float("nan"), 1, "1e-5")),
            ({"batches": []}, "received none")):
        with pytest.raises(ValueError, match=words):
            parity.compare(gluon, port, **{"batches": pictures(), **options})
    with pytest.raises(TypeError, match="function without arguments"):
        parity.compare(3, port, batches=pictures())


