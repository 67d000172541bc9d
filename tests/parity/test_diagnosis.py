"""Faults planted in real networks are named, and nothing else is."""
import numpy as np
import pytest
import test_own_step

from mgpu import parity
from mgpu.parity import Side, diagnosis
from mgpu.parity.causes.difference import unexplained
from nets import gluon, gluon_block, torch_block
from nets import torch as torch_
from parity.faults import (ATTENDED, BARE, CONTROLS, FAULTS, IMAGES, N, ROWS,
                           SERIES, SGD_WD, attention, conv_g, conv_t, dense_g,
                           dense_t, padded, patch_sum, rate, recurrent, times)

def compared(a, b, batches, options):
    result = parity.compare(a, b, batches=batches, **options)
    assert not any("stopped" in note for note in result.notes), result.notes
    return result


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name, monkeypatch):
    import torch
    torch.manual_seed(0)    # a few weights may look like any formula
    cause, plant = FAULTS[name]
    result = compared(*plant(monkeypatch))
    assert result.verdict == "different"
    named = [c.name for c in result.causes]
    assert set(named) <= set(diagnosis.CAUSES)
    assert named and named[0] == cause, result
    # one fault: nothing else differs, but for its own traces
    assert {f["causes"][0].name if f["causes"] else "unknown"
            for f in result.further} <= {named[0]}, result
    found = result.causes[named.index(cause)]
    assert 0 <= found.residual <= diagnosis.LIMIT
    # which side it speaks of
    assert "(mxnet)" in found.text or "(torch)" in found.text \
        or cause in ("initial draw", "multipliers")


def between(function, slope=None):
    """A port that calls `function` of torch between its layers."""
    def forward(net, x):
        import torch
        act = function(torch)
        return net.c(net.third(act(net.b(act(net.a(x))))))
    return torch_block(lambda nn: {
        "a": nn.Linear(6, 5), "b": nn.Linear(5, 5),
        "third": nn.LeakyReLU(slope, inplace=True) if slope
        else nn.LayerNorm(5, eps=1e-3), "c": nn.Linear(5, 3)}, forward)


def fused(activation, slope=None):
    return gluon(lambda nn: [
        nn.Dense(5, in_units=6, activation=activation),
        nn.Dense(5, in_units=5, activation=activation),
        nn.LeakyReLU(slope) if slope else nn.LayerNorm(in_channels=5),
        nn.Dense(3, in_units=5)])


@pytest.mark.parametrize("activation, function, path, words", [
    ("relu", lambda t: t.nn.functional.relu, "2", "epsilon 1e-05 on a"),
    ("relu", lambda t: lambda x: x.relu_(), "2", "epsilon 1e-05 on a"),
    ("tanh", lambda t: t.tanh, "2", "epsilon 1e-05 on a"),
    ("relu", lambda t: t.tanh, "0", "applies relu, b (torch) tanh"),
    ("relu", lambda t: lambda x: x, "0", "b (torch) no activation")],
    ids=["function", "in place", "tanh", "another", "none"])
def test_functions_between_layers_are_seen(activation, function, path, words):
    """An activation inside a layer of Gluon's, a function on torch."""
    result = compared(fused(activation), between(function), ROWS, {})
    assert result.location["a"]["path"] == path
    assert words in str(result.causes[0]), result


def calls(function):
    """A Gluon network that calls ``function(F, x)`` between its layers."""
    return gluon_block(
        lambda nn: {"a": nn.Conv2D(4, 3, in_channels=2),
                    "b": nn.Dense(3, in_units=144)},
        lambda net, F, x: net.b(function(F, net.a(x))))


def calls_port(function):
    """The same in torch: ``function(nn.functional, x)``."""
    def forward(net, x):
        from torch.nn import functional
        return net.b(function(functional, net.a(x)).flatten(1))
    return torch_block(lambda nn: {
        "a": nn.Conv2d(2, 4, 3), "b": nn.Linear(144, 3)}, forward)


@pytest.mark.parametrize("one, other, kind, words", [
    (lambda F, x: F.LeakyReLU(x, act_type="leaky", slope=0.125),
     lambda F, x: F.leaky_relu(x, 0.5),
     "leaky_relu", "slope 0.125 on a (mxnet), 0.5 on b (torch)"),
    (lambda F, x: F.LeakyReLU(x, act_type="elu", slope=0.5),
     lambda F, x: F.elu(x), "elu", "alpha 0.5 on a (mxnet), 1 on b (torch)"),
    (lambda F, x: F.LeakyReLU(x, act_type="gelu"),
     lambda F, x: F.gelu(x, approximate="tanh"),
     "gelu", "applies gelu, b (torch) gelu with tanh"),
    (lambda F, x: F.softmax(x, axis=1), lambda F, x: F.softmax(x, 3),
     "softmax", "along axis 1 on a (mxnet), 3 on b (torch)"),
    (lambda F, x: F.Pooling(x, kernel=(3, 3), pool_type="avg", pad=(1, 1)),
     lambda F, x: F.avg_pool2d(x, 3, 1, padding=1, count_include_pad=False),
     "avg_pool", "count in the mean on a (mxnet)"),
    (lambda F, x: F.Pooling(x, kernel=(3, 3), pool_type="max", pad=(1, 1)),
     lambda F, x: F.avg_pool2d(x, 3, 1, padding=1),
     "max_pool", "max_pool on a (mxnet) and avg_pool on b"),
    (lambda F, x: F.contrib.BilinearResize2D(
        F.slice(x, (0, 0, 0, 0), (None, None, 3, 3)), height=6, width=6),
     lambda F, x: F.interpolate(x[:, :, :3, :3], size=6, mode="bilinear"),
     "upsample", "align_corners=True on a (mxnet), bilinear with"),
    (lambda F, x: F.clip(32 * x, 0, 6), lambda F, x: F.relu(32 * x),
     "relu6", "applies relu6, b (torch) relu"),
    (lambda F, x: F.clip(32 * x, -1, 6),
     lambda F, x: F.hardtanh(32 * x, -1, 2),
     "clip", "high is 6.0 on a (mxnet) and 2.0 on b (torch)")],
    ids=["slope", "alpha", "gelu", "axis", "padding", "kind", "corners",
         "relu6", "clip"])
def test_the_options_of_functions_between_layers_are_known(
        one, other, kind, words):
    a, b = calls(one), calls_port(other)
    # so large that MXNet's float32 in GELU is small against the fault
    images = [(16 * X, y) for X, y in IMAGES]
    result = compared(a, b, images, {})
    assert result.location["a"]["path"] == f"F.{kind} after a", result
    assert words in str(result.causes[0]), result
    swapped = compared(b, a, images, {})
    assert swapped.location["b"]["path"] == f"F.{kind} after a", swapped


def test_inputs_that_a_layer_overwrites_are_those_that_it_got():
    result = compared(fused(None, 0.25),
                      between(lambda t: lambda x: x, 0.125), ROWS, {})
    assert (result.location["a"]["path"],
            result.location["inputs_agree"]) == ("2", True)
    assert "slope 0.25 on a" in str(result.causes[0]), result


def test_a_layer_that_returns_its_states_on_one_side_only():
    """torch's recurrent layers always do, Gluon's on request. What comes
    behind them is not blamed on them, nor on the order of equal rows."""
    gluon_net = recurrent("GRU", head="tanh")

    def port(activation):
        return torch_block(
            lambda nn: {"rnn": nn.GRU(3, 4, batch_first=True),
                        "head": nn.Linear(8, 3)},
            lambda net, x: activation(net.head(net.rnn(x)[0].flatten(1))))
    options = {"dtype": "float32"}      # of MXNet's fused layer
    right = compared(gluon_net, port(lambda x: x.tanh()), SERIES, options)
    assert right.verdict == "same"
    wrong = compared(gluon_net, port(lambda x: x.sigmoid()), SERIES,
                     options)
    assert wrong.location and wrong.location["a"]["path"] == "2", str(wrong)
    assert [c.name for c in wrong.causes] == ["activation"], wrong


def test_what_is_made_of_other_functions_is_not_at_fault():
    """The place is that of the fault behind it, and the only one; also where
    there is a fault before."""
    def on_gluon(net, F, x):
        x = net.m(net.a(x))
        x = net.b(x * F.sigmoid(x))
        return net.c(net.n(x * F.clip(x + 3, 0, 6) / 6))
    right = gluon_block(lambda nn: {
        "a": nn.Dense(5, in_units=6), "b": nn.Dense(5, in_units=5),
        "n": nn.LayerNorm(in_channels=5), "m": nn.LayerNorm(in_channels=5),
        "c": nn.Dense(3, in_units=5)}, on_gluon)

    def on_torch(net, x):
        from torch.nn import functional
        x = functional.silu(net.m(net.a(x)))
        return net.c(net.n(functional.hardswish(net.b(x))))

    def port(first, eps):
        return torch_block(lambda nn: {
            "a": nn.Linear(6, 5), "b": nn.Linear(5, 5),
            "n": nn.LayerNorm(5, eps=eps), "m": nn.LayerNorm(5, eps=first),
            "c": nn.Linear(5, 3)}, on_torch)
    result = compared(right, port(1e-5, 1e-3), ROWS, {})
    assert result.location["b"]["path"] == "n", result
    assert result.causes[0].name == "normalization epsilon"
    assert result.further == [], result
    result = compared(right, port(1e-3, 1e-3), ROWS, {})
    assert result.location["b"]["path"] == "m", result
    assert [f["place"] for f in result.further] == [
        "layer n of b, from equal inputs"], result


def test_a_trace_sees_functions_between_layers(tmp_path):
    parity.record(fused("relu"), batches=ROWS, file=tmp_path / "a")
    for function, path, words in (
            (lambda t: t.relu, "2", "epsilon 1e-05 on a"),
            (lambda t: t.tanh, "0", "applies relu, b (torch) tanh")):
        result = parity.compare_trace(tmp_path / "a", between(function))
        assert result.location["a"]["path"] == path
        assert words in str(result.causes[0]), result
    parity.record(between(lambda t: t.tanh), batches=ROWS, file=tmp_path / "b")
    result = parity.compare_trace(tmp_path / "b", fused("relu"))
    assert "applies tanh, b (mxnet) relu" in str(result.causes[0]), result


# -- several faults -----------------------------------------------------------

def pictures_g():
    return gluon(lambda nn: [
        nn.Conv2D(4, 3, padding=1, in_channels=2, activation="relu"),
        nn.BatchNorm(in_channels=4), nn.MaxPool2D(2), nn.Dropout(0.25),
        nn.Conv2D(4, 3, in_channels=4), nn.LeakyReLU(0.25), nn.Flatten(),
        nn.Dense(5, in_units=4, activation="tanh"), nn.Dropout(0.5),
        nn.Dense(3, in_units=5)])


def pictures_t(eps=1e-5, pool="Max", slope=0.25, act="Tanh", double=False):
    return torch_(lambda nn: [
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(4, eps),
        getattr(nn, f"{pool}Pool2d")(2), nn.Dropout(0.25),
        nn.Conv2d(4, 4, 3), nn.LeakyReLU(slope), nn.Flatten(),
        nn.Linear(4, 5), getattr(nn, act)(),
        *([times(nn, 2)] if double else []), nn.Dropout(0.5),
        nn.Linear(5, 3)])


def smoothed(output, y):
    from torch.nn import functional
    return functional.cross_entropy(output, y.long(), reduction="none",
                                    label_smoothing=0.125)


@pytest.mark.parametrize(("own", "other", "cause"), [
    (("lamb", {"wd": 0.125}), ("lamb", {"wd": 0.25}), "optimizer options"),
    (("lars", {"eta": 0.5}), ("sgd", {}), "optimizer formula"),
    (("sgld", {}), ("sgld", {"learning_rate": 0.5}), "learning rate"),
    (("groupadagrad", {}), ("adagrad", {}), "optimizer formula")],
    ids=lambda x: x[0] if isinstance(x, tuple) else "")
def test_updates_by_rules_of_whole_weights_are_explained(own, other, cause):
    """Of a weight with more elements than other rules are tried on."""
    nets = (gluon(lambda nn: [
        nn.Dense(200, in_units=6, use_bias=False, activation="tanh"),
        nn.Dense(3, in_units=200, use_bias=False)]), torch_(lambda nn: [
            nn.Linear(6, 200, bias=False), nn.Tanh(),
            nn.Linear(200, 3, bias=False)]))
    found = parity.compare(*(
        Side(net, optimizer=name, optimizer_params=options)
        for net, (name, options) in zip(nets, (own, other))),
        batches=ROWS[:2])
    assert [c.name for c in found.causes] == [cause], found


@pytest.mark.parametrize("right, swapped", [("gluon", False),
                                            ("torch", True)])
def test_faults_behind_the_first_are_found(right, swapped, devices):
    """Each with its place and its cause, whatever side is right."""
    import torch
    torch.manual_seed(0)    # weights with which every layer shows its fault
    one = pictures_g() if right == "gluon" else pictures_t()
    data = [(X[..., :6, :6], y) for X, y in IMAGES]
    faults = {"eps": 1e-3, "pool": "Avg", "slope": 0.125, "act": "Sigmoid",
              "double": True}
    sides = [one, parity.Side(
        pictures_t(**faults), loss=smoothed,
        optimizer_params={"learning_rate": 0.125, "wd": 0.125})]
    result = parity.compare(
        *sides[::-1 if swapped else 1], batches=data, devices=len(devices),
        optimizer_params={"learning_rate": 0.125, "wd": 0.25})
    assert [c.name for c in result.causes] == [
        "normalization epsilon", "optimizer options"], result
    assert [c.name for f in result.further for c in f["causes"][:1]] == [
        "kind of pooling", "activation", "activation", "constant factor",
        "label smoothing"], result
    assert [f["place"].split()[-1] for f in result.further] == [
        *["inputs"] * 3, "gets", "outputs"]
    assert all(f["causes"][0].residual < 1e-6 for f in result.further)
    assert result.to_dict()["further"][0]["causes"][0]["name"] == \
        "kind of pooling"
    # three of them are printed
    assert str(result).count("also different: ") == 4
    assert "also different: 2 more places" in str(result)


def forked(function, dropout=False):
    """Two layers get what `function` makes of a layer."""
    def forward(net, x):
        import torch
        x = function(torch, net.a(x))
        z = net.first(x) if dropout else x
        return net.out(net.second(net.b(z)) + net.c(x))
    return torch_block(lambda nn: {
        **{name: nn.Linear(6, 6) for name in "abc"},
        **({"first": nn.Dropout(0.5)} if dropout else {}),
        "second": nn.Dropout(0.25), "out": nn.Linear(6, 3)}, forward)


def test_one_fault_is_one():
    """What a function gives reaches two layers; a dropout layer more moves
    the masks of those behind it."""
    right = forked(lambda torch, x: x.cos())
    for wrong, path in ((forked(lambda torch, x: x.sin()), "b"),
                        (forked(lambda torch, x: x.cos(), True), "b")):
        result = parity.compare(right, wrong, batches=ROWS)
        assert result.location["b"]["path"] == path
        assert result.further == [], result


def test_the_float32_of_mxnet_is_no_further_fault():
    """It is not looked for where something differs before."""
    one = gluon(lambda nn: [
        nn.Dense(6, in_units=6), nn.BatchNorm(in_channels=6),
        nn.LeakyReLU(0.3), nn.Dense(6, in_units=6), nn.GELU(),
        nn.Dense(3, in_units=6)])
    two = torch_(lambda nn: [
        nn.Linear(6, 6), nn.BatchNorm1d(6, eps=1e-3), nn.LeakyReLU(0.3),
        nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3)])
    result = parity.compare(two, one, batches=ROWS)
    assert result.causes[0].name == "normalization epsilon"
    assert result.further == [], result


def test_values_that_are_equal_have_no_other_order():
    """Ones and zeros in each other's places are the same network."""
    def net(kind):
        return torch_(lambda nn: [
            nn.Linear(6, 6), nn.LayerNorm(6), getattr(nn, kind)(),
            nn.Linear(6, 6), nn.LayerNorm(6), getattr(nn, kind)(),
            nn.Linear(6, 3)])
    result = parity.compare(net("Hardswish"), net("Hardsigmoid"),
                            batches=ROWS)
    assert result.location["b"]["path"] == "2" and result.further, result
    assert not [c.name for c in result.causes] + [
        c.name for f in result.further for c in f["causes"]], result


def test_a_cause_that_predicts_little_is_not_confirmed():
    """A setting differs, and its effect was not computed."""
    port = torch_(lambda nn: [nn.Linear(6, 4), nn.Softshrink(0.25),
                              nn.Linear(4, 3)])
    other = torch_(lambda nn: [nn.Linear(6, 4), nn.Hardshrink(0.25),
                               nn.Linear(4, 3)])
    result = parity.compare(port, other, batches=ROWS)
    assert not [c for c in result.causes if c.confirmed], result
    cause = diagnosis.Cause("layer options", "x is 1 on a", 1.0)
    assert str(cause).endswith("(unexplained: 1.0e+00, not confirmed)")
    sure = cause._replace(residual=1e-5)
    assert sure.confirmed and "not confirmed" not in str(sure)


@pytest.mark.parametrize("lost", [1.0, np.nan, np.inf])
def test_what_has_overflowed_has_no_cause(lost):
    """What predicts the rest does not predict that."""
    import torch

    def network(hooked):
        net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        if hooked:
            for p in net.parameters():
                p.register_hook(lambda g: g * 0.5)
            net[0].bias.register_hook(lambda g: g * lost)
        return net.double()
    result = parity.compare(lambda: network(False), lambda: network(True),
                            batches=ROWS[:2], steps=1)
    assert not result.same and result.first.stage == "gradient"
    assert bool(result.causes) is (lost == 1.0), result.causes


def test_what_predicts_zero_explains_no_small_numbers():
    large, small = np.arange(1.0, 5.0), np.arange(1.0, 5.0) / 1e5
    assert unexplained(large, small, 0 * large) == 1.0
    assert unexplained(large, small, small * (1 + 1e-6)) < 1e-5
    assert unexplained(large, 0 * large, 0 * large) == 0.0


def test_every_cause_has_a_planted_fault():
    """But for those of copies that part, which no side of mgpu's has.
    Constants have theirs in `test_constants`, the user's own steps in
    `test_own_step`."""
    steps = {str(cause).partition(":")[0]
             for *_, cause in test_own_step.FAULTS.values()}
    assert {cause for cause, _ in FAULTS.values()} | steps >= {
        name for name in diagnosis.CAUSES if name not in (
            "gradient clipping", "float32 statistics momentum",
            "aliased replicas", "missing broadcast", "device left out",
            "constant", "constant in float32")}


@pytest.mark.parametrize("name", CONTROLS)
def test_nothing_is_named_without_a_fault(name):
    result = compared(*CONTROLS[name](None))
    assert result.verdict == "same", result
    assert result.causes == []


def noisy(place):
    """A network that adds fixed noise to its weights in the forward pass
    (place 0), its gradients, or its updated weights."""
    def net():
        import torch

        class Noisy(torch.nn.Linear):
            def forward(self, x):
                noise = torch.sin(1e3 * self.weight) * 1e-3
                return torch.nn.functional.linear(
                    x, self.weight + noise, self.bias)
        made = dense_t()()
        made[place] = Noisy(*made[place].weight.shape[::-1])
        return made
    return net


@pytest.mark.parametrize("mode, other, dropout", [
    ("constant", "replicate", 0.5), ("replicate", "constant", 0.5),
    ("reflect", "constant", 0.0), ("first", "last", 0.0)])
def test_zeros_of_padding_are_no_dropped_elements(mode, other, dropout):
    result = compared(padded(mode, dropout), padded(other, dropout), IMAGES,
                      {})
    assert result.verdict == "different"
    assert result.causes == []


def test_next_to_a_mask_not_everything_is_an_activation():
    """The mask of one side, and other scores: what is left is small next to
    the mask, and yet no activation."""
    for scale in (0.5, 0.25):
        result = compared(attention(0.5, mask=1e9), attention(scale),
                          ATTENDED, {})
        assert [c.name for c in result.causes] == [
            "attention mask"] * (scale == 0.5), result


@pytest.mark.parametrize("place", (0, 2))
def test_noise_in_the_forward_pass_has_no_cause(place):
    result = compared(dense_g(), noisy(place), ROWS, {})
    assert result.verdict == "different"
    assert result.causes == []


def test_two_faults_at_once_are_both_named():
    """In the update and in the running statistics."""
    result = compared(conv_g(), Side(conv_t(), wd_mult=BARE), IMAGES, {
        "native": True, "optimizer_params": SGD_WD})
    named = [c.name for c in result.causes]
    assert {"weight decay on biases", "unbiased variance",
            "float32 statistics momentum"} <= set(named)
    # what hardly matters comes last
    assert named[-1] == "float32 statistics momentum"


@pytest.mark.parametrize("devices, rows", ((1, N), (2, 6)))
def test_clipped_gradients(devices, rows, monkeypatch):
    """Also where sums and means over equal shards are in one proportion."""
    def clip(sums, devices):
        for gradient in sums:
            gradient.clamp_(-0.5, 0.5)
    patch_sum(monkeypatch, clip)
    result = compared(dense_g(), dense_t(), [
        (X[:rows], y[:rows]) for X, y in ROWS], {"devices": devices})
    assert [c.name for c in result.causes] == ["gradient clipping"]


def test_a_fault_that_shows_in_a_later_step_is_named_too():
    """The statistics differ from the first step on, the weights only where
    the rate changes."""
    result = compared(
        Side(conv_g(), lr_scheduler=rate),
        Side(conv_t(), lr_scheduler=rate, semantics="torch"), IMAGES,
        {"native": True, "optimizer_params": {"momentum": 0.5}})
    assert (result.first.step, result.first.stage) == (1, "statistic")
    assert [c.name for c in result.causes] == [
        "rate inside the velocity", "unbiased variance",
        "float32 statistics momentum"]
