"""`mgpu.parity.compare`: what it finds, what it refuses, what it leaves."""
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import mgpu
from mgpu import parity
from mgpu.parity import matching, measure, spill
from mgpu.parity.matching import Entry, MatchError
from nets import bricks
from nets import two_convs_gluon as gluon
from nets import two_convs_torch as port

#: float64, a handful of small layers: rounding of some hundred terms
EXACT = 1e-12
MAKE = {"mxnet": gluon, "torch": port}


def batches(rows=8, count=2, seed=0, classes=3, dtype="float64"):
    rng = np.random.default_rng(seed)
    return [(rng.random((rows, 1, 8, 8)).astype(dtype),
             rng.integers(0, classes, rows).astype("int32"))
            for _ in range(count)]


# -- same ---------------------------------------------------------------------

@pytest.mark.parametrize("policy", ("per_device", "average", "sync"))
@pytest.mark.parametrize("rows", (3, 8))
def test_a_faithful_port_is_the_same(policy, rows, devices):
    result = parity.compare(
        gluon, port, batches=batches(rows), devices=devices,
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


@pytest.mark.parametrize("optimizer", (
    "sgd", "nag", "adam", "adamw", "adamax", "nadam", "rmsprop", "adagrad",
    "adadelta", "ftrl", "signum"))
def test_every_optimiser(optimizer):
    # No ReLU: Gluon's Adamax divides by a gradient that is exactly zero.
    def original():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn
        net = nn.HybridSequential()
        net.add(nn.Dense(5, activation="tanh"), nn.Dense(3))
        return net

    def ported():
        from torch import nn
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(),
                             nn.Linear(5, 3))
    result = parity.compare(original, ported, batches=batches(count=3),
                            devices=2, optimizer=optimizer)
    assert result.same, str(result)


@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_network_may_be_written_for_so_many_rows(scale, swapped):
    """Parameters are matched with fewer rows, where that can be done."""
    def original():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn
        net = nn.HybridSequential()
        net.add(nn.Dense(6, activation="tanh", in_units=64),
                nn.Dense(3, in_units=6))
        return net

    def ported():
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = nn.Linear(64, 6), nn.Linear(6, 3)

            def forward(self, x):
                x = self.one(x.view(8, 64)).tanh()
                return self.two(x.view(8, 2, 3).view(8, 6)) * scale
        return Net()
    a, b = (ported, original) if swapped else (original, ported)
    result = parity.compare(a, b, batches=batches())
    assert result.same is (scale == 1.0), result
    assert result.plan.confirmed is (scale == 1.0)
    with pytest.raises(RuntimeError, match="8, 64"):
        parity.compare(a, b, batches=batches(rows=5))


def test_an_engine_with_itself(backend):
    make = MAKE[backend.name]
    result = parity.compare(make, make, batches=batches())
    assert result.same and not any(g.absolute for g in result.gaps)


def test_float32():
    result = parity.compare(gluon, port, batches=batches(), dtype="float32")
    assert result.same and 0 < result.worst["gradient"].relative < 1e-5
    assert result.settings["tolerance"] == 1e-5


def test_a_side_of_other_devices(backend, devices):
    """K-invariance of a network without batch norm's statistics of a
    shard: dropout masks follow the rows."""
    make = MAKE[backend.name]
    result = parity.compare(
        make, parity.Side(make, devices=devices), batch_norm="sync",
        batches=batches(7), devices=1)
    assert result.same, str(result)
    assert max(g.relative for g in result.gaps) < EXACT


# -- different ----------------------------------------------------------------

def test_the_first_difference_is_the_layer():
    result = parity.compare(gluon, lambda: port(eps=1e-3),
                            batches=batches())
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
                         ids=["same", "different"])
def test_a_large_network_lies_in_files(options, monkeypatch):
    """And the result is the same to the bit. A process may not have many
    files open: arrays of one mapping lie in one."""
    options = dict(options)
    results, nets = [], (port(), port(eps=options.pop("eps", 1e-5)))
    for least in (spill.LEAST, 0):
        monkeypatch.setattr(spill, "LEAST", least)
        results.append(parity.compare(*nets, batches=batches(), devices=2,
                                      weights="own", **options))
    small, large = results
    assert small.to_dict() == large.to_dict()
    for result, kind in zip(results, (np.ndarray, np.memmap)):
        if result.evidence is not None:
            for arrays in (result.evidence.a.gradients,
                           result.evidence.before.values,
                           result.evidence.initial[0]):
                assert {type(x) for x in arrays.values()} == {kind}
                assert kind is np.ndarray or \
                    len({id(x._mmap) for x in arrays.values()}) == 1


def test_a_function_between_layers_is_told_from_a_layer():
    import torch

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (torch.nn.Linear(4, 4)
                                       for _ in range(2))
            self.factor = 1.0

        def forward(self, x):
            return self.second(self.first(x) * self.factor)
    wrong = Scaled()
    wrong.factor = 1.001
    rng = np.random.default_rng(0)
    data = [(rng.random((4, 4)), np.array([0, 1, 2, 3]))]
    result = parity.compare(Scaled, wrong, batches=data)
    assert result.first.stage == "layer" and result.first.name == "second"
    assert result.location["inputs_agree"] is False


def test_native_batch_norm_is_seen_in_the_statistics():
    result = parity.compare(gluon, port, batches=batches(), native=True)
    wrong = {g.stage for g in result.gaps if g.status == "different"}
    assert wrong == {"statistic"}
    assert "framework's own" in result.sides["b"]["batch_norm"]


# -- what SAME means ----------------------------------------------------------

def torch_net(*layers):
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), *layers,
                         nn.Linear(5, 3))


def when_training(training):
    """A layer that does something in one of the two modes only."""
    from torch import nn

    class Sometimes(nn.Module):
        def forward(self, x):
            return x * 2 if self.training is training else x
    return Sometimes()


@pytest.mark.parametrize("training, stage", [(True, "layer"),
                                             (False, "prediction")])
def test_predictions_are_compared_too(devices, training, stage):
    from torch import nn
    result = parity.compare(
        lambda: torch_net(nn.Identity()),
        lambda: torch_net(when_training(training)), batches=batches(),
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
def test_dead_runs_prove_nothing(case, reason):
    data = batches()
    if case == "nan":
        data = [(X * np.nan, y) for X, y in data]
    result = parity.compare(
        torch_net, torch_net, batches=data, optimizer_params={
            "learning_rate": 0.0 if case == "rate" else 0.1})
    assert result.verdict == "no proof" and not result.same
    assert reason in result.reason and reason in str(result)


def test_what_was_not_on_trial_is_named():
    """A branch not taken, rows of an embedding, a layer that gets zeros."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.rare = nn.Embedding(9, 4), nn.Linear(4, 4)
            self.dead, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            x = self.words(x.long()).mean(1)
            if len(x) > 100:
                x = self.rare(x)
            return self.out(x + torch.relu(self.dead(x) - 1e3))
    data = [(np.array([[0, 3], [3, 5]]), np.array([0, 1]))]
    result = parity.compare(Net, Net, batches=data)
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
    from torch import nn
    return nn.Sequential(nn.AvgPool2d(2, **options), nn.Flatten(),
                         nn.Linear(16, 3))


def activated(layer):
    from torch import nn
    return nn.Sequential(nn.Conv2d(1, 3, 3), layer, nn.MaxPool2d(6),
                         nn.Flatten(), nn.Linear(3, 3))


def convolved(**options):
    def make():
        from torch import nn
        return nn.Sequential(nn.Conv2d(1, 3, **options), nn.Flatten(),
                             nn.Linear(192, 3))
    return make


def relu6():
    from torch import nn
    return activated(nn.ReLU6())


def relu():
    from torch import nn
    return activated(nn.ReLU())


def adaptive():
    from torch import nn
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(),
                         nn.Linear(16, 3))


def fused():
    with mgpu.using_backend("mxnet"):
        from mxnet.gluon import nn
    net = nn.HybridSequential()
    net.add(nn.Conv2D(3, 3, activation="relu"), nn.MaxPool2D(6),
            nn.Flatten(), nn.Dense(3))
    return net


def alike(name, one, two, words=None):
    """A function of Gluon and one of torch that give the same here."""
    def gluon_net():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn

        class Net(nn.HybridBlock):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Dense(6), nn.Dense(3)

            def hybrid_forward(self, F, x):
                return self.b(one(F, self.a(x)))
        return Net()

    def torch_net():
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(64, 6), nn.Linear(6, 3)

            def forward(self, x):
                return self.b(two(torch, self.a(x.flatten(1))))
        return Net()
    return pytest.param(gluon_net, torch_net, words, id=name)


@pytest.mark.parametrize("one, two, words", [
    alike("silu", lambda F, x: x * F.sigmoid(x),
          lambda t, x: t.nn.functional.silu(x)),
    alike("gelu", lambda F, x: 0.5 * x * (1 + F.tanh(
        (2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x))),
        lambda t, x: t.nn.functional.gelu(x, approximate="tanh")),
    alike("tanh", lambda F, x: F.tanh(x), lambda t, x: 2 * t.sigmoid(
        2 * x) - 1),
    alike("hardswish", lambda F, x: x * F.clip(x + 3, 0, 6) / 6,
          lambda t, x: t.nn.functional.hardswish(x)),
    alike("module", lambda F, x: x * F.sigmoid(x),
          lambda t, x: t.nn.SiLU()(x)),
    alike("relu6", lambda F, x: F.clip(x, 0, 6),
          lambda t, x: t.nn.functional.relu6(x)),
    alike("clamp", lambda F, x: F.clip(x, -50, 20),
          lambda t, x: t.nn.functional.hardtanh(x, -50, 20)),
    # mistakes
    alike("relu for relu6", lambda F, x: F.clip(x, 0, 6),
          lambda t, x: t.relu(x), "relu6 and relu"),
    alike("relu6 for relu", lambda F, x: F.relu(x),
          lambda t, x: x.clamp(0, 6), "relu and relu6"),
    alike("another bound", lambda F, x: F.clip(x, 0, 20),
          lambda t, x: t.clamp(x, min=0, max=25),
          "clip with high 20.0 and 25.0"),
    alike("no bound", lambda F, x: F.clip(x, 0, 20),
          lambda t, x: x.clamp_min(0), "clip (low 0.0, high 20.0) and relu"),
    alike("hardtanh", lambda F, x: F.clip(x, 0, 20),
          lambda t, x: t.nn.Hardtanh(0, 25)(x), "high 20.0 and 25.0")])
@pytest.mark.parametrize("strict", (False, True))
def test_functions_that_agree_are_no_options_unless_data_would_tell(
        one, two, words, strict):
    """Two functions at one place are partners if they give the same."""
    result = parity.compare(one, two, batches=batches(), strict=strict)
    assert result.verdict == (
        "different" if strict and words else "same"), str(result)
    assert len(result.coverage["options"]) == (words is not None), result
    assert (words or "") in "".join(result.coverage["options"])


def in_blocks(name, one, two, words=None, block="own"):
    """As `alike`, in layers of their own; `block`: how Gluon's is made."""
    def gluon_net():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn

        class RELU6(nn.HybridBlock):
            def hybrid_forward(self, F, x):
                return one(F, x)
        net = nn.HybridSequential()
        net.add(nn.Conv2D(3, 3, in_channels=1), RELU6() if block == "own"
                else nn.HybridLambda(one), nn.Flatten(), nn.Dense(3))
        return net

    def torch_net():
        import torch
        from torch import nn

        class ReLU6(nn.Module):
            def forward(self, x):
                return two(torch, x)
        return nn.Sequential(nn.Conv2d(1, 3, 3), ReLU6() if callable(two)
                             else getattr(nn, two)(), nn.Flatten(),
                             nn.LazyLinear(3))
    return pytest.param(gluon_net, torch_net, words, id=f"{name}-{block}")


def clip6(F, x):
    return F.clip(x, 0, 6)


def full(F, x, kind="full"):
    return F.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max",
                     pooling_convention=kind)


@pytest.mark.parametrize("one, two, words", [
    in_blocks("right", clip6, "ReLU6"),
    in_blocks("right", clip6, lambda t, x: t.clamp(x, 0, 6), block="lambda"),
    in_blocks("hardswish", lambda F, x: x * F.clip(x + 3, 0, 6) / 6,
              "Hardswish"),
    in_blocks("silu", lambda F, x: x * F.sigmoid(x), "SiLU"),
    # mistakes
    in_blocks("relu", clip6, "ReLU", "relu6 and relu"),
    in_blocks("relu", clip6, "ReLU", "relu6 and relu", "lambda"),
    in_blocks("function", clip6, lambda t, x: t.relu(x), "relu6 and relu"),
    in_blocks("parts", lambda F, x: x * F.clip(x + 9, 0, 60),
              lambda t, x: x * t.relu(x + 9),
              "clip (low 0.0, high 60.0) and relu"),
    in_blocks("ceil", full, lambda t, x: t.nn.functional.max_pool2d(x, 2),
              "ceil True and False")])
@pytest.mark.parametrize("strict", (False, True))
def test_functions_in_layers_of_ones_own_are_options_too(one, two, words,
                                                         strict):
    result = parity.compare(one, two, batches=batches(), strict=strict)
    assert result.verdict == (
        "different" if strict and words else "same"), str(result)
    assert len(result.coverage["options"]) == (words is not None), result
    assert (words or "") in "".join(result.coverage["options"])


@pytest.mark.parametrize("one, two, words", [
    (pooled, lambda: pooled(ceil_mode=True), "ceil False and True"),
    (pooled, adaptive, "adaptive_avg_pool (size 4)"),
    (relu, relu6, "relu and relu6"),
    (fused, relu6, "relu and relu6"),
    (fused, relu, None),
    # no effect for any data
    (convolved(kernel_size=1), convolved(kernel_size=1, dilation=2), None),
    (convolved(kernel_size=3, padding=1),
     convolved(kernel_size=3, padding="same"), None),
    (pooled, lambda: pooled(count_include_pad=False), None)],
    ids=["ceil", "adaptive", "relu6", "fused", "fused_alike", "dilation",
         "same", "count_include_pad"])
@pytest.mark.parametrize("strict", (False, True))
def test_options_that_no_data_reaches_are_named(one, two, words, strict,
                                                devices):
    result = parity.compare(one, two, batches=batches(), devices=devices,
                            strict=strict)
    assert result.verdict == (
        "different" if strict and words else "same"), str(result)
    assert [g for g in result.gaps if g.status == "different"] == []
    if words is None:
        assert result.coverage["options"] == []
    else:
        text, = result.coverage["options"]
        assert words in text
        assert f"warning: not reached by this data: {text}" in str(result)


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
            if where == "torch, set":
                torch.manual_seed(0)
            elif where == "numpy, set":
                np.random.seed(0)
            elif where == "python, set":
                random.seed(0)
            if where == "torch" or where == "torch, later" \
                    and self.passes > 3 or where == "torch, float32" \
                    and x.dtype == torch.float32:
                torch.rand(())
            elif where == "torch, put back":
                with torch.random.fork_rng():
                    torch.rand(())
            elif where == "numpy":
                np.random.rand()
            elif where == "python":
                random.random()
            return Backward.apply(x) if where == "torch, backward" else x
    return torch_net(Draws())


def mxnet_draws(where):
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        from mxnet.gluon import nn

    def layer(F, x):
        if where == "mxnet, shuffle":
            return x + 0 * F.shuffle(x)
        if where == "mxnet, none":
            return x
        if where == "mxnet, set":
            return mx.random.seed(0) or x
        return x + 0 * F.random.uniform(shape=(1, 5), dtype="float64")
    net = nn.HybridSequential()
    net.add(nn.Dense(5), nn.HybridLambda(layer), nn.Dense(3))
    return net


@pytest.mark.parametrize("where", [
    "torch", "torch, backward", "torch, later", "torch, set",
    "torch, put back", "torch, float32", "numpy", "numpy, set", "python",
    "python, set", "mxnet, uniform", "mxnet, shuffle", "mxnet, set", "none",
    "mxnet, none"])
@pytest.mark.parametrize("count", [1, 2])
def test_random_numbers_are_seen_where_they_change_nothing(where, count):
    """In one pass of a hundred they may. A pass that sets a seed draws the
    same numbers as the one before, and the same masks. The streams of the
    process stay where they were."""
    make = partial(mxnet_draws if "mxnet" in where else torch_draws, where)
    if where.endswith("none"):
        streams = random.getstate(), np.random.get_state()[1].tolist()
        assert parity.compare(make, make, batches=batches(),
                              devices=count).same
        assert (random.getstate(),
                np.random.get_state()[1].tolist()) == streams
        return
    with pytest.raises(ValueError, match="takes numbers from a random stream"):
        parity.compare(make, make, batches=batches(), devices=count)


def test_a_pass_may_move_a_buffer():
    """That is no random number."""
    def make():
        import torch
        from torch import nn
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.utils.parametrizations.
                             spectral_norm(nn.Linear(64, 3)))
    assert parity.compare(make, make, batches=batches()).same
    assert parity.invariance(make, batches=batches(),
                             devices=(1, 2, 3)).verdict == "exact"


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


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("kind", ["autocast", "output", "prediction",
                                  "gradient", "dropout", "none"])
def test_what_depends_on_the_dtype_is_a_difference(kind, side, devices):
    """Which float64 does not show. The user's network stays as it was."""
    import torch
    net = of_dtype(kind)
    before = {n: x.clone() for n, x in net.state_dict().items()}
    pair = {"a": of_dtype("none"), "b": of_dtype("none"), side: net}
    result = parity.compare(**pair, batches=batches(), devices=devices,
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
                          batches=batches()).same
    assert parity.compare(of_dtype("none").double(), of_dtype("output")
                          .double(), batches=batches()).same


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
                            batches=batches())
    assert result.same == (not moved)
    assert not moved or "statistic 2.running_mean" in result.reason


@pytest.mark.parametrize("sides", ["a", "b", "ab"])
def test_a_side_that_float32_does_not_suit_is_named(sides):
    """Where the first one alone runs there, the second one is another
    network."""
    import torch

    class Double(torch.nn.Module):
        def forward(self, x):
            return x @ torch.eye(5, dtype=torch.float64)
    result = parity.compare(*(
        partial(torch_net, Double() if side in sides else torch.nn.Identity())
        for side in "ab"), batches=batches())
    assert result.same == (sides != "b")
    assert result.same or "b does not run in float32" in result.reason
    assert len([x for x in result.notes if "not run in float32" in x]) \
        == len(sides) * result.same


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_loss_that_refuses_the_outputs_of_a_side(side):
    import torch

    class Twice(torch.nn.Module):
        def forward(self, x):
            return x, x
    pair = dict.fromkeys("ab", lambda: torch_net(torch.nn.Identity()))
    pair[side] = lambda: torch.nn.Sequential(*torch_net(torch.nn.Identity()),
                                             Twice())
    with pytest.raises(ValueError, match=r"\(a\) that returns {} and .*"
                       r"\(b\) that returns {}, .* TypeError".format(*(
                           "2 arrays" if side == x else "1 array"
                           for x in "ab"))):
        parity.compare(**pair, batches=batches())


# -- MXNet's float32 in float64 networks --------------------------------------

def layered_g(make, units=6, last=None):
    """Dense layers with the layer ``make(nn)`` behind the first one."""
    def build():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn
        net = nn.HybridSequential()
        net.add(nn.Dense(units, in_units=64), make(nn), nn.Dense(5),
                nn.Activation("tanh"), nn.Dense(3))
        return net
    return build


def layered_t(make, units=6):
    def build():
        import torch
        from torch import nn

        class Own(nn.Module):       # of a function of torch
            def __init__(self, function):
                super().__init__()
                self.function = function

            def forward(self, x):
                return self.function(x)
        made = make(torch)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, units),
            made if isinstance(made, nn.Module) else Own(made),
            nn.Linear(units, 5), nn.Tanh(), nn.Linear(5, 3))
    return build


def resized_g():
    with mgpu.using_backend("mxnet"):
        from mxnet.gluon import nn

    class Net(nn.HybridSequential):
        def forward(self, x):
            from mxnet import nd
            return super().forward(nd.contrib.BilinearResize2D(
                x, height=13, width=11))
    net = Net()
    net.add(nn.Conv2D(2, 3), nn.Flatten(), nn.Dense(3))
    return net


def resized_t():
    from torch import nn
    return nn.Sequential(
        nn.Upsample((13, 11), mode="bilinear", align_corners=True),
        nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(198, 3))


def called_g(function):
    """Gluon's side of a function."""
    return layered_g(lambda nn: nn.HybridLambda(function))


def selu_g(nn):
    """With the gradient of the formula; MXNet's own layer has another."""
    class SELU(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            alpha, scale = (float(np.float32(v)) for v in (
                1.6732632423543772, 1.0507009873554805))
            return scale * F.where(x > 0, x, alpha * F.expm1(x))
    return SELU()


FLOAT32 = {
    "leaky_relu": (layered_g(lambda nn: nn.LeakyReLU(0.01)),
                   layered_t(lambda t: t.nn.LeakyReLU(0.01))),
    "in place": (layered_g(lambda nn: nn.LeakyReLU(0.25)),
                 layered_t(lambda t: t.nn.LeakyReLU(0.25, inplace=True))),
    "function": (layered_g(lambda nn: nn.LeakyReLU(0.1)), layered_t(
        lambda t: lambda x: t.nn.functional.leaky_relu(x, 0.1))),
    "prelu": (layered_g(lambda nn: nn.PReLU()),
              layered_t(lambda t: t.nn.PReLU())),
    "elu": (layered_g(lambda nn: nn.ELU(0.3)),
            layered_t(lambda t: t.nn.ELU(0.3))),
    "gelu": (layered_g(lambda nn: nn.GELU()),
             layered_t(lambda t: t.nn.GELU())),
    "selu": (layered_g(selu_g), layered_t(lambda t: t.nn.SELU())),
    "interpolate": (resized_g, resized_t),
    "clip": (called_g(lambda F, x: F.clip(x, -0.3, 0.3)),
             layered_t(lambda t: lambda x: x.clamp(-0.3, 0.3))),
    "clip, torch.clamp": (
        called_g(lambda F, x: F.clip(x, -0.3, 0.3)),
        layered_t(lambda t: lambda x: t.clamp(x, min=-0.3, max=0.3))),
    "clip, in place": (called_g(lambda F, x: F.clip(x, -0.3, 0.3)),
                       layered_t(lambda t: lambda x: x.clamp_(-0.3, 0.3))),
    "clip, hardtanh": (
        called_g(lambda F, x: F.clip(x, -0.3, 0.3)),
        layered_t(lambda t: t.nn.Hardtanh(-0.3, 0.3))),
    "hard_sigmoid": (
        called_g(lambda F, x: F.hard_sigmoid(x, alpha=1 / 6)),
        layered_t(lambda t: t.nn.functional.hardsigmoid)),
    "hard_sigmoid, hardswish": (
        called_g(lambda F, x: x * F.hard_sigmoid(x, alpha=1 / 6)),
        layered_t(lambda t: t.nn.functional.hardswish)),
    "hard_sigmoid, by hand": (
        called_g(lambda F, x: F.hard_sigmoid(x)),
        layered_t(lambda t: lambda x: (0.2 * x + 0.5).clamp(0, 1))),
    "hard_sigmoid, by another": (
        called_g(lambda F, x: F.hard_sigmoid(x, beta=0.3)),
        layered_t(lambda t: lambda x: t.clamp((x + 1.5) / 5, 0, 1))),
    "erf": (called_g(lambda F, x: F.erf(x)), layered_t(lambda t: t.erf)),
    "erf, in place": (called_g(lambda F, x: F.erf(x)),
                      layered_t(lambda t: lambda x: x.clone().erf_())),
    "erf, GELU by hand": (
        called_g(lambda F, x: x * 0.5 * (1 + F.erf(x / 2 ** 0.5))),
        layered_t(lambda t: t.nn.functional.gelu)),
    "hardsigmoid": (called_g(lambda F, x: F.clip(x + 3, 0, 6) / 6),
                    layered_t(lambda t: t.nn.functional.hardsigmoid)),
    "hardsigmoid, in place": (
        called_g(lambda F, x: F.clip(x + 3, 0, 6) / 6),
        layered_t(lambda t: t.nn.Hardsigmoid(inplace=True)))}
SAME_BUT = "same but for MXNet's float32"


@pytest.mark.parametrize("swap", (False, True))
@pytest.mark.parametrize("case", FLOAT32)
def test_mxnets_float32_is_a_verdict_of_its_own(case, swap, devices):
    """It is put into the torch network, whichever side that is: what is left
    is rounding of float64."""
    pair = FLOAT32[case][::-1] if swap else FLOAT32[case]
    result = parity.compare(*pair, batches=batches(), devices=devices,
                            optimizer_params={"learning_rate": 0.1,
                                              "momentum": 0.9})
    assert (result.verdict, result.same) == (SAME_BUT, False), str(result)
    assert max(g.relative for g in result.gaps) < EXACT
    found, = result.float32
    name = {"in place": "leaky_relu", "function": "leaky_relu"}.get(
        case, case.partition(",")[0])
    assert found["function"] == name
    assert 1e-10 < found["size"] < 1e-5
    assert len(found["layers"]) == (case in (
        "leaky_relu", "in place", "prelu", "elu", "gelu", "selu",
        "clip, hardtanh", "hardsigmoid, in place"))
    who = "torch" if name == "hardsigmoid" else "MXNet"
    assert f"{who}'s float32: {who} " in str(result)
    assert found["text"] in str(result)
    assert result.to_dict()["float32"] == result.float32
    assert result.first is None and not result.causes


@pytest.mark.parametrize("kind, of", [("layer_norm", 16), ("group_norm", 4)])
def test_epsilon_is_one_of_float32(kind, of):
    """Next to a variance of 1e-5 the last digits of epsilon count."""
    def original():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn
        net = nn.HybridSequential()
        net.add(nn.LayerNorm(in_channels=of, epsilon=3e-3)
                if kind == "layer_norm" else nn.GroupNorm(of, epsilon=3e-3),
                nn.Dense(3))
        return net

    def ported():
        from torch import nn
        return nn.Sequential(
            nn.LayerNorm(of, eps=3e-3) if kind == "layer_norm"
            else nn.GroupNorm(of, of, eps=3e-3),
            nn.Flatten(), nn.Linear(64, 3))
    small = [(1e-4 * X.reshape(len(X), 4, 16), y) for X, y in batches()]
    result = parity.compare(original, ported, batches=small)
    assert result.verdict == SAME_BUT
    assert [f["function"] for f in result.float32] == [kind]


def test_a_line_that_is_changed_is_none():
    """What is a line by its name alone is computed as it is."""
    import torch
    from mgpu.backends._torch.float32 import AsMXNet
    from mgpu.backends.base import Float32Functions

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

    def ported():
        from torch import nn

        class Once(nn.Module):
            def forward(self, x):
                return x * (1 + size) if self.training and once \
                    and once.pop() else x
        net = layered_t(lambda t: nn.LeakyReLU(0.01))()
        net.append(Once())
        return net
    result = parity.compare(layered_g(lambda nn: nn.LeakyReLU(0.01)), ported,
                            batches=batches(count=1))
    assert not once
    assert result.verdict == (SAME_BUT if size < 1e-5 else "different")
    assert bool(result.float32) == (size < 1e-5)


def test_the_search_goes_on_past_float32():
    """To a fault behind a difference of float32, which it hides."""
    def original():
        net = layered_g(lambda nn: nn.LeakyReLU(0.01))()
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn
        net.add(nn.LayerNorm(epsilon=1e-5))
        return net

    def ported():
        from torch import nn
        net = layered_t(lambda t: nn.LeakyReLU(0.01))()
        net.append(nn.LayerNorm(3, eps=1.001e-5))
        return net
    result = parity.compare(original, ported, batches=batches())
    assert result.verdict == "different"
    assert [f["function"] for f in result.float32] == ["leaky_relu"]
    assert result.location["b"]["path"] == "6"
    assert result.causes[0].name == "normalisation epsilon"
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

    def original():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn
        net = nn.HybridSequential()
        net.add(nn.LeakyReLU(0.1),
                nn.HybridLambda(lambda F, x: x * -0.7 * 0.1),
                nn.LeakyReLU(0.1), nn.Dense(3, in_units=64))
        return net

    def ported():
        from torch import nn

        class Scaled(nn.Module):
            def forward(self, x):
                return x * (-0.07 * (1 + 1e-5 * far * (x[:, :1] < 0)))
        return nn.Sequential(nn.LeakyReLU(0.1), Scaled(), nn.LeakyReLU(0.1),
                             nn.Linear(64, 3))
    result = parity.compare(original, ported, batches=[(X, np.arange(8) % 3)])
    assert [f["function"] for f in result.float32] == ["leaky_relu"]
    assert result.verdict == ("different" if far else SAME_BUT), str(result)
    assert far or any(g.status == "rounding" for g in result.gaps)


def test_what_gluon_computes_in_float64_stays():
    """A LeakyReLU of the user's own is one of float64: float32 put into the
    other side would be a difference."""
    def own(nn):
        class Own(nn.HybridBlock):
            def hybrid_forward(self, F, x):
                return F.where(x > 0, x, 0.01 * x)
        return Own()
    result = parity.compare(
        layered_g(own), layered_t(lambda t: t.nn.LeakyReLU(0.01)),
        batches=batches())
    assert result.same and not result.float32
    result = parity.compare(
        layered_g(own), layered_t(lambda t: t.nn.LeakyReLU(0.02)),
        batches=batches())
    assert result.verdict == "different" and not result.float32


def test_float32_is_put_in_beside_a_trace(tmp_path):
    original, ported = FLOAT32["leaky_relu"]
    parity.record(original, batches=batches(), file=tmp_path / "a.trace")
    result = parity.compare_trace(tmp_path / "a.trace", ported)
    assert result.verdict == SAME_BUT
    assert [f["function"] for f in result.float32] == ["leaky_relu"]
    assert max(g.relative for g in result.gaps) < EXACT


def test_every_function_has_words():
    from mgpu.backends._torch import float32 as functions
    from mgpu.parity import float32
    assert float32.WORDS.keys() == functions.KNOWN.keys()


def test_a_dead_network_is_no_proof_with_float32_either():
    result = parity.compare(*FLOAT32["prelu"], batches=batches(),
                            optimizer_params={"learning_rate": 0.0})
    assert result.verdict == "no proof" and result.float32


def test_gluonized_and_native_is_the_same():
    net = parity.gluonize(port())
    assert parity.compare(gluon, net, batches=batches(), native=True,
                          devices=2).same


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
    result = parity.compare(gluon, wrong, batches=batches(),
                            dropout="off")
    assert result.first.stage == "gradient"
    assert result.first.name.startswith("4.")   # not 7, and before 1 and 0


def test_a_fault_in_a_gradient_that_is_zero():
    """The bias of a convolution before a batch norm: noise is "zero", and
    a fault of the layer's scale is seen."""
    result = parity.compare(gluon, port, batches=batches(count=1))
    zero = [g for g in result.gaps if g.status == "zero"]
    assert {(g.stage, g.name) for g in zero} == {
        ("gradient", "0.bias"), ("weight", "0.bias")}   # from 0 and by noise

    def shifted():
        net = port()
        net[0].bias.register_hook(lambda g: g + 1e-9)
        return net
    result = parity.compare(gluon, shifted, batches=batches(count=1))
    assert (result.first.stage, result.first.name) == ("gradient", "0.bias")


def test_rounding_is_told_from_a_difference():
    """Adam divides noise by noise: the bias before a batch norm moves by
    the full rate in a direction that rounding decides."""
    result = parity.compare(
        gluon, port, batches=batches(rows=32, count=2), optimizer="adam",
        optimizer_params={"epsilon": 1e-30})
    statuses = {(g.name, g.status) for g in result.gaps
                if g.stage == "weight" and g.relative > 1e-10}
    assert result.same and statuses == {("0.bias", "rounding")}
    assert all(g.own > 0 for g in result.gaps if g.status == "rounding")


def indexed_gluon():
    """Of whole numbers in floats: ids in the input, and an order of columns
    in a constant."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        from mxnet.gluon import nn

    class Indexed(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.embed = nn.Embedding(7, 4)
                self.hidden = nn.Dense(5, in_units=4)
                self.norm = nn.BatchNorm(in_channels=5)
                self.out = nn.Dense(3, in_units=5)
                self.order = self.params.get_constant(
                    "order", mx.nd.array([2, 0, 1, 3]))

        def hybrid_forward(self, F, x, order):
            h = F.take(F.mean(self.embed(x), axis=1), order, axis=1)
            return self.out(F.tanh(self.norm(self.hidden(h))))
    return Indexed()


def indexed_torch():
    import torch
    from torch import nn

    class Indexed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.hidden, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
            self.out = nn.Linear(5, 3)
            self.register_buffer("order", torch.tensor([2., 0, 1, 3]))

        def forward(self, x):
            h = self.embed(x.long()).mean(1)[:, self.order.long()]
            return self.out(torch.tanh(self.norm(self.hidden(h))))
    return Indexed()


@pytest.mark.parametrize("dtype", ("float64", "float32"))
def test_no_rounding_moves_a_whole_number(dtype, backend, devices):
    """Other rows of a table are no rounding, and what is rounding is found
    beside them."""
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
    from torch import nn

    class Deciding(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(6, 3)
            self.at = nn.Parameter(torch.full((6,), 0.5))
            self.table = nn.Parameter(torch.linspace(-1, 1, 6))
            self.gain = nn.Parameter(torch.tensor(1.5))
            self.register_buffer("tenths", torch.arange(6) / 8)
            for p in (self.at, self.table):
                p.register_hook(lambda g: fault * g)

        def forward(self, x):
            x = {"threshold": lambda: (x >= 0.5) * self.table,
                 "index": lambda: x * self.table[(self.tenths * 8).long()],
                 "kink": lambda: torch.relu(x - self.at)}[kind]()
            return self.out(self.gain * x)
    return Deciding()


@pytest.mark.parametrize("kind", ("threshold", "index", "kink"))
def test_a_jump_is_no_rounding(kind):
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


def towers(engine, exchanged=False):
    """Two layers of one shape, which may be used in each other's place."""
    base, dense = bricks(SimpleNamespace(name=engine))

    class Towers(base):
        def __init__(self):
            super().__init__()
            self.left, self.right = dense(6, 3), dense(6, 3)

        def forward(self, x):
            left, right = (self.right, self.left) if exchanged \
                else (self.left, self.right)
            return left(x) ** 2 + right(x)
    return Towers()


def test_layers_with_each_others_names_are_noted(backend):
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(8, 6)), rng.integers(0, 3, 8))]

    def compared(b, **options):
        found = parity.compare(lambda: towers(backend.name), b, batches=data,
                               **options)
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


def renamed_towers(style, exchanged=False):
    """The same with other names, or in one layer whose halves they are."""
    from torch import nn

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            if style == "fused":
                self.both = nn.Linear(6, 6)
            else:
                self.x, self.y = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            if style == "fused":
                parts = self.both(x).chunk(2, 1)
                left, right = parts[::-1] if exchanged else parts
            else:
                layers = [self.x, self.y]
                left, right = (layer(x) for layer in (
                    layers[::-1] if exchanged else layers))
            return left ** 2 + right
    return Towers()


@pytest.mark.parametrize("style", ["named", "fused"])
def test_layers_in_each_others_place_are_noted_whatever_their_names(
        style, backend):
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(8, 6)), rng.integers(0, 3, 8))]
    for exchanged in (False, True):
        found = parity.compare(
            lambda: towers(backend.name),
            lambda exchanged=exchanged: renamed_towers(style, exchanged),
            batches=data)
        assert found.same
        assert len([note for note in found.notes if "in this order" in note]
                   ) == exchanged, found.notes


def test_own_weights_are_compared_as_they_are():
    init = mgpu.initializers.Xavier()
    same = parity.compare(
        parity.Side(gluon, init=init), parity.Side(port, init=init),
        batches=batches(), weights="own")
    assert same.same and same.worst["initial"].absolute == 0
    other = parity.compare(
        parity.Side(gluon, init=init),
        parity.Side(port, init=mgpu.initializers.Normal(0.1)),
        batches=batches(), weights="own")
    assert other.first.stage == "initial"


def test_weights_from_the_port():
    net = port()
    before = {n: v.detach().numpy().copy()
              for n, v in net.named_parameters()}
    result = parity.compare(gluon, net, batches=batches(count=1),
                            weights="b")
    assert result.same
    after = {n: v.detach().numpy() for n, v in net.named_parameters()}
    for name, value in before.items():
        assert (after[name] == value).all() and value.dtype == "float32"


def test_the_networks_are_given_back(backend):
    """Values and dtype of a user's network are what they were."""
    net = MAKE[backend.name]()
    replicas = mgpu.initialize(net, [mgpu.cpu(0)],
                               "uniform", force_reinit=True,
                               sample=np.zeros((1, 1, 8, 8), "float32"))
    before = replicas.export_numpy()
    parity.compare(net, MAKE[backend.name], batches=batches())
    with mgpu.using_backend(backend.name):
        after = backend.network(net).values()
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        assert (after[name] == value).all(), name


# -- refused ------------------------------------------------------------------

def test_random_numbers_of_a_networks_own_are_refused():
    import torch

    class Noisy(torch.nn.Linear):
        def forward(self, x):
            return super().forward(torch.nn.functional.dropout(
                x, 0.5, self.training))
    data = [(np.ones((4, 6)), np.array([0, 1, 2, 0]))]
    with pytest.raises(ValueError, match="outside its dropout layers"):
        parity.compare(lambda: Noisy(6, 3), lambda: Noisy(6, 3),
                       batches=data)


@pytest.mark.parametrize("option, value", [
    ("weights", "c"), ("dropout", "on"), ("dtype", "float16")])
def test_unknown_options(option, value):
    with pytest.raises(ValueError, match=f"unknown {option}"):
        parity.compare(gluon, port, batches=batches(), **{option: value})


@pytest.mark.parametrize("tolerance", [-1e-10, float("nan"), 1, "1e-5"])
def test_a_wrong_tolerance(tolerance):
    with pytest.raises(ValueError, match="tolerance is .*; received"):
        parity.compare(gluon, port, batches=batches(), tolerance=tolerance)


def test_no_batch():
    with pytest.raises(ValueError, match="received none"):
        parity.compare(gluon, port, batches=[])


def test_what_is_no_network():
    with pytest.raises(TypeError, match="function without arguments"):
        parity.compare(3, port, batches=batches())


# -- matching -----------------------------------------------------------------

def entries(*forms, prefix=""):
    return [Entry(f"{prefix}{i}.weight", "weight", shape, True)
            for i, shape in enumerate(forms)]


def test_match_by_order_where_names_differ():
    plan = matching.match(entries((2, 3), (3,)),
                          entries((2, 3), (3,), prefix="x"))
    assert plan.how == "order and shape"
    assert [(*p.a, *p.b) for p in plan.pairs] == [
        ("0.weight", "x0.weight"), ("1.weight", "x1.weight")]


def test_match_by_rules():
    plan = matching.match(entries((2, 2), (2, 2)),
                          entries((2, 2), (2, 2), prefix="x"),
                          rules=[("^x", "")])
    assert plan.how == "equal names"


def test_match_by_a_map_with_axes():
    plan = matching.match(entries((2, 3), (4,)),
                          entries((3, 2), (4,), prefix="x"),
                          given={"0.weight": {"to": "x0.weight",
                                              "transpose": [1, 0]}})
    value = np.arange(6.0).reshape(2, 3)
    there = plan.to_b({"0.weight": value})["x0.weight"]
    assert (there == value.T).all()
    assert (plan.to_a({"x0.weight": there})["0.weight"] == value).all()
    # an order of axes that is not its own inverse
    plan = matching.match(entries((2, 2, 2)), entries((2, 2, 2), prefix="x"),
                          given={"0.weight": {"to": "x0.weight",
                                              "transpose": [1, 2, 0]}})
    value = np.arange(8.0).reshape(2, 2, 2)
    there = plan.to_b({"0.weight": value})["x0.weight"]
    assert (there == value.transpose(1, 2, 0)).all()
    assert (plan.to_a({"x0.weight": there})["0.weight"] == value).all()
    devices = np.stack([value, -value])     # a leading axis stays
    there = plan.to_b({"0.weight": devices})["x0.weight"]
    assert (there[1] == -value.transpose(1, 2, 0)).all()


@pytest.mark.parametrize("given, words", [
    ({"9.weight": "x0.weight"}, "no such name in a"),
    ({"0.weight": "y"}, "no such name in b"),
    ({"0.weight": "x1.weight"}, "another shape"),
    ({"0.weight": "x0.weight", "1.weight": "x0.weight"}, "named twice"),
    ({"0.weight": {"to": "x0.weight", "transpose": [0, 0]}}, "not the axes")])
def test_a_wrong_map(given, words):
    with pytest.raises(MatchError, match=words):
        matching.match(entries((2, 3), (3,)),
                       entries((2, 3), (3,), prefix="x"), given=given)


def test_an_incomplete_match_lists_candidates():
    with pytest.raises(MatchError) as error:
        matching.match(entries((2, 3), (2, 3), (4,)),
                       entries((2, 3), (4,), (5,), prefix="x"))
    assert error.value.candidates["0.weight"] == ["x0.weight"]
    assert error.value.candidates[""] == ["x2.weight"]
    assert "x2.weight (5,)" in str(error.value)


def test_match_by_position_in_the_graph():
    """The same layers, registered in another order under other names."""
    import torch

    class Straight(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = (torch.nn.Linear(4, 4)
                                              for _ in range(3))

        def forward(self, x):
            return self.three(torch.tanh(self.two(torch.tanh(self.one(x)))))

    class Shuffled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first, self.middle = (torch.nn.Linear(4, 4)
                                                  for _ in range(3))

        def forward(self, x):
            return self.last(torch.tanh(self.middle(torch.tanh(
                self.first(x)))))
    rng = np.random.default_rng(0)
    data = [(rng.random((4, 4)), np.array([0, 1, 2, 3]))]
    result = parity.compare(Straight, Shuffled, batches=data)
    assert result.plan.how == "position in the graph"
    assert {(*p.a, *p.b) for p in result.plan.pairs} >= {
        ("one.weight", "first.weight"), ("three.bias", "last.bias")}
    assert result.same and result.plan.confirmed


def test_a_layer_with_two_parameters_of_one_shape_matches_by_position():
    """The biases of a recurrent layer, and its square weights."""
    import torch

    def net(head_first):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                for name in ("head", "rnn")[::1 if head_first else -1]:
                    setattr(self, name, {
                        "head": lambda: torch.nn.Linear(4, 3),
                        "rnn": lambda: torch.nn.GRU(4, 4, batch_first=True)
                        }[name]())

            def forward(self, x):
                return self.head(self.rnn(x)[0][:, -1])
        return Net
    rng = np.random.default_rng(0)
    result = parity.compare(net(True), net(False), batches=[
        (rng.random((4, 2, 4)), np.array([0, 1, 2, 0]))], rules=[
            ("^rnn", "other")])
    assert result.plan.how == "position in the graph"
    assert result.same and result.plan.confirmed
    assert len(result.plan.pairs) == 6


def test_two_ways_to_match_and_none_confirmed():
    """Which of two equal layers is which cannot be told when the outputs
    differ under both plans."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self, swap, factor):
            super().__init__()
            self.names = ("a", "b") if not swap else ("d", "c")
            for name in sorted(self.names):
                setattr(self, name, torch.nn.Linear(3, 3))
            self.factor = factor

        def forward(self, x):
            for name in self.names:
                x = torch.tanh(getattr(self, name)(x))
            return x * self.factor
    data = [(np.random.default_rng(0).random((4, 3)), np.zeros(4, int))]
    with pytest.raises(MatchError, match="disagree") as error:
        parity.compare(Net(False, 1.0), Net(True, 2.0), batches=data)
    assert error.value.candidates["a.weight"] == ["c.weight", "d.weight"]
    given = {"a.weight": "d.weight", "a.bias": "d.bias"}
    result = parity.compare(Net(False, 1.0), Net(True, 2.0), batches=data,
                            map=given)
    assert not result.same and result.plan.how.startswith("given map")


def test_a_shared_tensor_is_one(backend):
    def tied():
        if backend.name == "torch":
            import torch
            net = torch.nn.Sequential(torch.nn.Linear(3, 3),
                                      torch.nn.Tanh(),
                                      torch.nn.Linear(3, 3))
            net[2].weight, net[2].bias = net[0].weight, net[0].bias
            return net
        from mxnet.gluon import nn
        net, first = nn.HybridSequential(), nn.Dense(3, in_units=3)
        net.add(first, nn.Activation("tanh"),
                nn.Dense(3, in_units=3, params=first.params))
        return net
    data = [(np.random.default_rng(0).random((4, 3)), np.zeros(4, int))]
    result = parity.compare(tied, tied, batches=data)
    assert result.same and len(result.plan.pairs) == 2
    assert any("shared in a: 0.weight = 2.weight" in note
               for note in result.plan.notes)


@pytest.mark.parametrize("dtype, factor", [
    ("float32", 1 + 2 ** -18), ("float64", 1 + 2 ** -36)])
def test_a_match_is_confirmed_as_far_as_the_dtype_rounds(dtype, factor):
    """Outputs within the tolerance are equal, in the match too."""
    def port(factor=factor):
        import torch
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
        net.register_forward_hook(lambda net, x, output: factor * output)
        return net
    data = [(np.random.default_rng(0).random((4, 3)), np.zeros(4, int))]
    result = parity.compare(lambda: port(1), port, batches=data, dtype=dtype)
    assert result.same and result.plan.confirmed, result


# -- the measure --------------------------------------------------------------

def gaps(a, b, tolerance=1e-6):
    return {g.name: g for g in measure.compare_tensors(
        1, "gradient", a, b, tolerance, 2.0 ** -52)}


def test_the_measure_is_that_of_the_tensor():
    a = {"l.weight": np.array([1.0, 1e-9])}
    found, = gaps(a, {"l.weight": np.array([1.0, 2e-9])}).values()
    assert found.relative == pytest.approx(1e-9) and found.index == (1,)
    assert (found.a, found.b, found.status) == (1e-9, 2e-9, "same")


def test_a_small_tensor_above_the_floor_keeps_its_own_scale():
    a = {"l.weight": np.ones(2), "l.bias": np.array([0.01])}
    b = {"l.weight": np.ones(2), "l.bias": np.array([0.01 + 1e-7])}
    found = gaps(a, b)["l.bias"]
    assert found.status == "different" and found.scale < 0.011


def test_a_tensor_under_the_floor_has_its_layers_scale():
    a = {"l.weight": np.ones(2), "l.bias": np.array([1e-17]),
         "m.bias": np.array([1e-17])}
    b = {"l.weight": np.ones(2), "l.bias": np.array([-3e-17]),
         "m.bias": np.array([1e-17])}
    found = gaps(a, b)
    assert found["l.bias"].status == "zero" and found["l.bias"].scale == 1
    assert found["m.bias"].status == "same"
    b["l.bias"] = np.array([2e-6])
    assert gaps(a, b)["l.bias"].status == "different"


def test_a_layer_has_the_size_of_what_one_side_alone_has():
    a = {"l.weight": np.ones(2), "l.bias": np.array([1e-17])}
    for one, two in ((a, {"l.bias": -a["l.bias"]}),
                     ({"l.bias": -a["l.bias"]}, a)):
        found = gaps(one, two)
        assert found.keys() == {"l.bias"}
        assert found["l.bias"].status == "zero"


@pytest.mark.parametrize("value, status", [
    (np.nan, "different"), (np.inf, "different"), (1.0, "same")])
def test_what_is_not_finite_differs(value, status):
    found = gaps({"x": np.ones(2)}, {"x": np.array([1.0, value])})["x"]
    assert found.status == status


def test_nan_on_both_sides_is_equal_and_another_shape_is_not():
    x = np.array([np.nan, np.inf, 1.0])
    assert gaps({"x": x}, {"x": x.copy()})["x"].status == "same"
    assert gaps({"x": x}, {"x": x[:2]})["x"].status == "different"
