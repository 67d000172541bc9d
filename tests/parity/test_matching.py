"""Parameters that one side splits, joins, turns or reshapes."""
import json
import re

import numpy as np
import pytest

import mgpu
from mgpu import parity
from mgpu.parity import forms, matching, trace
from mgpu.parity.matching import Entry, MatchError, Pair, Plan
from nets import dense_pair, gluon, gluon_block, torch_block, torch_layer
from nets import torch as stack
from parity.batches import vectors

#: float64, sums of some dozen terms
EXACT = 1e-12
UNITS, LENGTH = 4, 3
SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-2})
ADAM = ("adam", {"learning_rate": 0.01, "wd": 1e-2})


def batches(shape=(LENGTH, UNITS)):
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(6, *shape)), rng.integers(0, 3, 6))
            for _ in range(2)]


# -- networks -----------------------------------------------------------------

def attention(layers, forward):
    """A torch network of the layers that ``layers(nn)`` names:
    ``forward(net, x)`` attends, and a layer scores the mean."""
    return torch_block(
        lambda nn: {**layers(nn), "scores": nn.Linear(UNITS, 3)},
        lambda net, x: net.scores(forward(net, x).mean(1)))()


def attend(q, k, v, factor=1.0):
    weights = q @ k.transpose(-1, -2) * (UNITS ** -0.5 * factor)
    return weights.softmax(-1) @ v


def separate(names="qkv", factor=1.0):
    return attention(
        lambda nn: {n: nn.Linear(UNITS, UNITS) for n in [*names, "out"]},
        lambda net, x: net.out(attend(net.q(x), net.k(x), net.v(x), factor)))


def fused(order="qkv", factor=1.0):
    def forward(net, x):
        parts = dict(zip(order, net.all(x).chunk(3, -1)))
        return net.out(attend(*map(parts.get, "qkv"), factor=factor))
    return attention(lambda nn: {"all": nn.Linear(UNITS, 3 * UNITS),
                                 "out": nn.Linear(UNITS, UNITS)}, forward)


def multihead(heads=1):
    return attention(
        lambda nn: {"attention": nn.MultiheadAttention(
            UNITS, heads, batch_first=True)},
        lambda net, x: net.attention(x, x, x, need_weights=False)[0])


def times(inputs, units):
    """A layer that keeps its weight as (inputs, units)."""
    import torch
    return torch_block(lambda nn: {
        "weight": nn.Parameter(torch.randn(inputs, units) / 2),
        "bias": nn.Parameter(torch.randn(units))},
        lambda net, x: x @ net.weight + net.bias)()


def gpt():
    """As GPT-2 keeps it: (inputs, 3 units)."""
    return attention(
        lambda nn: {"all": times(UNITS, 3 * UNITS),
                    "out": times(UNITS, UNITS)},
        lambda net, x: net.out(attend(*net.all(x).chunk(3, -1))))


def gluon_separate():
    def forward(net, F, x):
        q, k, v = (layer(x) for layer in (net.q, net.k, net.v))
        w = F.softmax(F.batch_dot(q, k, transpose_b=True) * UNITS ** -0.5)
        return net.scores(net.out(F.batch_dot(w, v)).mean(axis=1))
    return gluon_block(lambda nn: {
        **{name: nn.Dense(UNITS, flatten=False, in_units=UNITS)
           for name in ("q", "k", "v", "out")},
        "scores": nn.Dense(3, in_units=UNITS)}, forward)()


def gluon_packed():
    """All parameters of an LSTM in one vector, as MXNet's operator wants
    them."""
    def forward(net, F, x, packed_weight):
        x = F.transpose(x, axes=(1, 0, 2))
        zero = 0 * F.slice(F.tile(x, reps=(1, 1, 2)), begin=(0, 0, 0),
                           end=(1, None, 5))
        y = F.RNN(x, packed_weight, zero, zero, state_size=5, num_layers=1,
                  mode="lstm")
        return net.scores(F.mean(y, axis=0))
    return gluon_block(lambda nn: {
        "packed_weight": {"shape": (4 * 5 * (UNITS + 5 + 2),),
                          "init": "normal"},
        "scores": nn.Dense(3, in_units=5)}, forward)()


lstm = torch_block(
    lambda nn: {"rnn": nn.LSTM(UNITS, 5, batch_first=True),
                "scores": nn.Linear(5, 3)},
    lambda net, x: net.scores(net.rnn(x)[0].mean(1)))


def convolved(joined, factor=1.0):
    """Two convolutions side by side, an activation behind each."""
    sizes = {"all": 7} if joined else {"one": 3, "two": 4}

    def forward(net, x):
        import torch
        return net.scores(torch.cat([
            (getattr(net, name)(x) * factor).relu() for name in sizes], 1
            ).flatten(1))
    return torch_block(lambda nn: {
        **{name: nn.Conv1d(LENGTH, n, 1) for name, n in sizes.items()},
        "scores": nn.Linear(7 * UNITS, 3)}, forward)


def gated(swapped):
    def gate(x):
        one, two = x.chunk(2, -1)
        return (two * one.sigmoid()) if swapped else (one * two.sigmoid())
    return stack(lambda nn: [nn.Flatten(), nn.Linear(12, 8), torch_layer(gate),
                             nn.Linear(4, 3)])


def norms(split):
    def forward(net, x):
        import torch
        x = x.flatten(1)
        return net.scores(torch.cat([net.one(x[:, :6]), net.two(x[:, 6:])], 1)
                          if split else net.both(x))
    return torch_block(lambda nn: {
        **({"one": nn.BatchNorm1d(6), "two": nn.BatchNorm1d(6)} if split
           else {"both": nn.BatchNorm1d(12)}),
        "scores": nn.Linear(12, 3)}, forward)


def parts(to, names, kinds=("weight", "bias"), **options):
    return {f"{name}.{kind}": {"to": to.format(kind),
                               "part": [i, len(names)], **options}
            for i, name in enumerate(names) for kind in kinds}


OUT = {"out.weight": "attention.out_proj.weight",
       "out.bias": "attention.out_proj.bias"}
JOINED = {f"all.{kind}": {"to": [f"{n}.{kind}" for n in "qkv"]}
          for kind in ("weight", "bias")}
RNN = [f"rnn.{n}_l0" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
TURNED = {"to": "1.weight", "transpose": [1, 0]}
#: a, b, the map
CASES = {
    "joined": (separate, fused, parts("all.{}", "qkv")),
    "split": (fused, separate, JOINED),
    "attention": (lambda: separate("vqk"), multihead, {
        **parts("attention.in_proj_{}", "qkv"), **OUT}),
    "turned and joined": (separate, gpt, {
        **parts("all.{}", "qkv", ["weight"], axis=1, transpose=[1, 0]),
        **parts("all.{}", "qkv", ["bias"]),
        "out.weight": {"to": "out.weight", "transpose": [1, 0]}}),
    "turned": (stack(lambda nn: [nn.Flatten(), nn.Linear(12, 3)]),
               stack(lambda nn: [nn.Flatten(), times(12, 3)]),
               {"1.weight": TURNED}),
    "convolution": (
        stack(lambda nn: [nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 3)]),
        stack(lambda nn: [nn.Flatten(), nn.Unflatten(1, (12, 1, 1)),
                          nn.Conv2d(12, 5, 1), nn.Flatten(),
                          nn.Linear(5, 3)]),
        {"1.weight": {"to": "2.weight", "reshape": True}}),
    "blocks": (gated(False), gated(True), {
        f"1.{kind}": {"to": f"1.{kind}", "blocks": [1, 0]}
        for kind in ("weight", "bias")}),
    "statistics": (norms(True), norms(False), parts(
        "both.{}", ["one", "two"],
        ("gamma", "beta", "running_mean", "running_var"))),
    "gluon and torch": (gluon_separate, fused, parts("all.{}", "qkv")),
    "packed": (gluon_packed, lstm, {
        "packed_weight": {"to": RNN, "reshape": True}}),
    "unpacked": (lstm, gluon_packed, {
        name: {"to": "packed_weight", "part": [i, 4], "reshape": True}
        for i, name in enumerate(RNN)}),
}


# -- a given map --------------------------------------------------------------

@pytest.mark.parametrize("case", CASES)
def test_a_given_map(case):
    """With Adam on one device, or, every second one, SGD on two."""
    a, b, given = CASES[case]
    second = list(CASES).index(case) % 2
    optimizer, options = (ADAM, SGD)[second]
    result = parity.compare(
        a, b, batches=batches(), map=given, devices=1 + second,
        optimizer=optimizer, optimizer_params=options)
    assert result.same and result.plan.confirmed, str(result)
    assert max(g.relative for g in result.gaps) < EXACT
    moved, trained = result.coverage["parameters"]
    assert moved == trained and not result.coverage["not_on_trial"]
    assert {g.stage for g in result.gaps} >= {"gradient", "weight", "memory"}
    assert result.plan.left == {"a": [], "b": []}


@pytest.mark.parametrize("case", ("joined", "packed"))
def test_whose_values(case):
    a, b, given = CASES[case]
    of_b, own = (parity.compare(a, b, batches=batches(), map=given,
                                weights=weights, optimizer_params=SGD[1])
                 for weights in ("b", "own"))
    assert of_b.same, str(of_b)
    assert own.first.stage == "initial"     # two draws


@pytest.mark.parametrize("case", ("joined", "split"))
def test_a_trace(case, tmp_path):
    a, b, given = CASES[case]
    trace.record(a, batches=batches(), file=tmp_path / "a.trace",
                 optimizer_params=SGD[1], devices=2)
    result = trace.compare_trace(tmp_path / "a.trace", b, map=given)
    assert result.same and result.plan.confirmed, str(result)
    wrong = trace.compare_trace(
        tmp_path / "a.trace", b, map=given, optimizer="sgd",
        optimizer_params={**SGD[1], "momentum": 0.5})
    assert wrong.verdict == "different" and wrong.first.stage == "weight"
    if case == "joined":
        wrong = trace.compare_trace(tmp_path / "a.trace", lambda: fused(
            factor=1.001), map=given)
        assert wrong.first.name == "F.softmax after v"
        assert not wrong.location["inputs_agree"]


def test_a_rate_that_changes():
    """Gluon's velocity holds the rate of each parameter, torch's none."""
    def rates(names):
        return {f"{name}.{kind}": 0.5 for name in names
                for kind in ("weight", "bias")}
    sides = [parity.Side(
        make, semantics=semantics, lr_scheduler=lambda n: 0.1 / n,
        lr_mult=rates(names)) for make, semantics, names in (
            (separate, "gluon", "qkv"), (fused, "torch", ["all"]))]
    for a, b, case in ((*sides, "joined"), (*sides[::-1], "split")):
        result = parity.compare(a, b, batches=batches(),
                                map=CASES[case][2], optimizer_params={
                                    "learning_rate": 0.1, "momentum": 0.9})
        # by design the formulas differ where the rate changes
        assert {c.name for c in result.causes} <= {
            "rate inside the velocity"}
        assert not [g for g in result.gaps if g.step == 1
                    and g.status == "different"]


def broken(make, name, factor=1.001):
    """The network with a layer that computes something else."""
    def broken():
        net = make()
        getattr(net, name).register_forward_hook(
            lambda layer, inputs, output: output * factor)
        return net
    return broken


@pytest.mark.parametrize("b, layer, agree", [
    (convolved(True, 1.001), "scores", False),
    (broken(convolved(True), "all"), "one + two", True),
    (broken(convolved(True), "scores"), "scores", True)])
def test_a_fault_behind_convolutions_side_by_side(b, layer, agree, tmp_path):
    given = parts("all.{}", ["one", "two"])
    result = parity.compare(convolved(False), b, batches=batches(), map=given)
    assert (result.first.stage, result.first.name) == ("layer", layer)
    assert result.location["inputs_agree"] is agree
    trace.record(convolved(False), batches=batches(), file=tmp_path / "x")
    result = trace.compare_trace(tmp_path / "x", b, map=given)
    # summaries of two layers are none of both
    assert (result.first.stage, result.first.name) == ("layer", "scores")
    assert result.location["inputs_agree"] is (agree and layer == "scores")


@pytest.mark.parametrize("a, b, given, layer, agree", [
    ("qkv", lambda: fused(factor=1.001), "joined", "F.softmax after v",
     False),
    ("qkv", broken(fused, "all"), "joined", "q + k + v", True),
    ("qkv", broken(fused, "out"), "joined", "out", True),
    ("vqk", lambda: multihead(2), "attention", "q + k + v + out", True),
    ("vqk", broken(multihead, "scores"), "attention", "scores", True)])
def test_a_fault_has_its_place(a, b, given, layer, agree):
    result = parity.compare(lambda: separate(a), b, batches=batches(),
                            map=CASES[given][2])
    assert (result.first.stage, result.first.name) == ("layer", layer)
    assert result.location["inputs_agree"] is agree
    assert not result.causes or agree is False \
        or result.causes[0].name == "constant factor"


@pytest.mark.parametrize("a, given", [
    ("joined", parts("all.{}", "qvk")),
    ("joined", parts("all.{}", "qkv", blocks=[1, 0, 3, 2])),
    ("joined", {**CASES["joined"][2], "out.weight": {
        "to": "out.weight", "transpose": [1, 0]}}),
    ("blocks", {"1.weight": "1.weight", "1.bias": "1.bias"}),
    ("packed", {"packed_weight": {"to": [*RNN[:2], RNN[3], RNN[2]],
                                  "reshape": True, "blocks": [1, 0]}})])
def test_a_wrong_permutation_is_not_the_same(a, given):
    one, two, _ = CASES[a]
    result = parity.compare(one, two, batches=batches(), map=given)
    assert result.verdict == "different" and result.plan.confirmed is False


# -- found by itself ----------------------------------------------------------

def mixed(square):
    """Square weights, some of which one side keeps turned."""
    return stack(lambda nn: [nn.Flatten(), *(
        layer for turned in square for layer in (
            (times if turned else nn.Linear)(12, 12), nn.Tanh()))])


#: a convolution over the whole picture
covering = stack(lambda nn: [nn.Unflatten(2, (2, 2)), nn.Conv2d(3, 5, 2),
                             nn.Flatten(), nn.Linear(5, 3)])


def encoder():
    """torch's own layer, whose prediction has a path without its parts."""
    from torch import nn
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(UNITS, 1, 6, dropout=0.0,
                                     batch_first=True) for _ in range(2)),
        nn.Flatten(), nn.Linear(LENGTH * UNITS, 3))


def blocks():
    from torch import nn

    def forward(net, x):
        x = net.one(x + net.out(attend(net.q(x), net.k(x), net.v(x))))
        return net.two(x + net.back(net.wide(x).relu()))
    block = torch_block(lambda nn: {
        **{name: nn.Linear(UNITS, UNITS) for name in ("k", "q", "v", "out")},
        "one": nn.LayerNorm(UNITS), "two": nn.LayerNorm(UNITS),
        "wide": nn.Linear(UNITS, 6), "back": nn.Linear(6, UNITS)}, forward)
    return nn.Sequential(block(), block(), nn.Flatten(),
                         nn.Linear(LENGTH * UNITS, 3))


def tall(make):
    """Another order of registration, and of the calls."""
    def net():
        made = make()
        layers = dict(made.named_children())
        for name in layers:
            delattr(made, name)
        for name in reversed(layers):
            setattr(made, name, layers[name])
        return made
    return net


FOUND = {name: CASES[name][:2] for name in CASES if name != "blocks"} | {
    "squares": (mixed([0, 0, 0]), mixed([1, 0, 1])),
    "encoder": (blocks, encoder),
    "convolutions": (convolved(False), convolved(True)),
    "squares, the last": (mixed([0, 0, 0]), mixed([0, 0, 1])),
    "three to three": (separate, tall(separate)),
    "another order": (lambda: separate("kvq"), tall(fused)),
    "covered": (stack(lambda nn: [nn.Flatten(), nn.Linear(12, 5),
                                  nn.Linear(5, 3)]), covering)}


@pytest.mark.parametrize("case", FOUND)
def test_found_by_itself(case):
    a, b = FOUND[case]
    for sides in ((a, b), (b, a)):
        result = parity.compare(*sides, batches=batches()[:1],
                                optimizer_params=SGD[1])
        assert result.same and result.plan.confirmed, str(result)
        assert result.plan.left == {"a": [], "b": []}
        assert result.plan.how == "form and position" \
            or case == "three to three"


def test_found_beside_a_given_map():
    a, b, given = CASES["joined"]
    first = {name: given[name] for name in given if "weight" in name}
    result = parity.compare(a, b, batches=batches(), map=first)
    assert result.same, str(result)
    assert result.plan.how == "given map and form and position"


@pytest.mark.parametrize("a, b", [
    (separate, lambda: fused(factor=1.001)),
    (separate, broken(fused, "all")),
    (CASES["convolution"][0], lambda: covering().append(torch_layer(abs)))])
def test_a_form_that_no_pass_confirms_is_not_taken(a, b):
    with pytest.raises(MatchError):
        parity.compare(a, b, batches=batches())


def pasted(message):
    """The entries of a map that a message holds."""
    return json.loads("{" + ", ".join(
        re.findall(r'\): (".*)$', message, re.MULTILINE)) + "}")


@pytest.mark.parametrize("a, b, place", [
    (separate, lambda: fused(factor=1.001), "F.softmax after v"),
    (fused, broken(separate, "out"), "out"),
    (separate, broken(gpt, "scores"), "scores"),
    (CASES["packed"][0], broken(lstm, "scores"), "scores")])
def test_a_message_holds_the_map_to_use(a, b, place):
    """A port with a fault has no match that a pass confirms."""
    with pytest.raises(MatchError) as error:
        parity.compare(a, b, batches=batches())
    result = parity.compare(a, b, batches=batches(),
                            map=pasted(str(error.value)))
    assert result.first.stage == "layer" and result.first.name == place


@pytest.mark.parametrize("a, b, lines", [
    ({"x": (2, 3), "q": (2, 4), "k": (2, 4), "extra": (7, 7)},
     {"x": (3, 2), "qk": (4, 4)},
     ["extra (7, 7): nothing like it in b",
      'x (2, 3) and x (3, 2): "x": {"to": "x", "transpose": [1, 0]}',
      'q (2, 4), k (2, 4) and qk (4, 4): "q": {"to": "qk", "part": [0, 2]}, '
      '"k": {"to": "qk", "part": [1, 2]}']),
    ({"qk": (4, 4), "o": (5, 2)}, {"q": (2, 4), "k": (2, 4), "o": (5, 3)},
     ["o (5, 2): nothing like it in b, nearest is o (5, 3)",
      'qk (4, 4) and q (2, 4), k (2, 4): "qk": {"to": ["q", "k"]}',
      "left in b: o (5, 3)"]),
    ({f"l{i}": (i + 2, i + 3) for i in range(40)},
     {f"l{i}": (i + 3, i + 2) for i in range(39)},
     ["l39 (41, 42): nothing like it in b",
      'l0 (2, 3) and l0 (3, 2): "l0": {"to": "l0", "transpose": [1, 0]}'])])
def test_a_message_names_the_misfits_first(a, b, lines):
    shared = Entry("tied", "bias", (2,), True, ("other",))
    with pytest.raises(MatchError) as error:
        matching.match([*entries(**a), shared], [*entries(**b), shared])
    said = str(error.value).splitlines()
    assert len(said) <= 15
    assert [line.strip() for line in said[1:len(lines) + 1]] == lines
    if len(a) > 9:
        assert len(said) == 15 and "  and 30 more" in said
    assert "  shared in a: tied = other" in said
    assert set(error.value.candidates) == {*a, ""}


# -- by position --------------------------------------------------------------

def test_match_by_position_in_the_graph():
    """The same layers, registered in another order under other names."""
    straight = torch_block(
        lambda nn: {n: nn.Linear(4, 4) for n in ("one", "two", "three")},
        lambda net, x: net.three(net.two(net.one(x).tanh()).tanh()))
    shuffled = torch_block(
        lambda nn: {n: nn.Linear(4, 4) for n in ("last", "first", "middle")},
        lambda net, x: net.last(net.middle(net.first(x).tanh()).tanh()))
    result = parity.compare(straight, shuffled, batches=vectors(4))
    assert result.plan.how == "position in the graph"
    assert {(*p.a, *p.b) for p in result.plan.pairs} >= {
        ("one.weight", "first.weight"), ("three.bias", "last.bias")}
    assert result.same and result.plan.confirmed


def test_a_layer_with_two_parameters_of_one_shape_matches_by_position():
    """The biases of a recurrent layer, and its square weights."""
    def net(order):
        def parts(nn):
            layers = {"head": nn.Linear(4, 3),
                      "rnn": nn.GRU(4, 4, batch_first=True)}
            return {name: layers[name] for name in order}
        return torch_block(parts, lambda net, x: net.head(
            net.rnn(x)[0][:, -1]))
    result = parity.compare(
        net(("head", "rnn")), net(("rnn", "head")), batches=batches(),
        rules=[("^rnn", "other")])
    assert result.plan.how == "position in the graph"
    assert result.same and result.plan.confirmed
    assert len(result.plan.pairs) == 6


def test_two_ways_to_match_and_none_confirmed():
    """Which of two equal layers is which cannot be told when the outputs
    differ under both plans."""
    one = torch_block(lambda nn: {n: nn.Linear(3, 3) for n in "ab"},
                      lambda net, x: net.b(net.a(x).tanh()).tanh())
    two = torch_block(lambda nn: {n: nn.Linear(3, 3) for n in "cd"},
                      lambda net, x: 2 * net.c(net.d(x).tanh()).tanh())
    with pytest.raises(MatchError, match="disagree") as error:
        parity.compare(one, two, batches=vectors(3))
    assert error.value.candidates["a.weight"] == ["c.weight", "d.weight"]
    given = {"a.weight": "d.weight", "a.bias": "d.bias"}
    result = parity.compare(one, two, batches=vectors(3), map=given)
    assert not result.same and result.plan.how.startswith("given map")


def test_a_shared_tensor_is_one(backend):
    def tied():
        return dense_pair(backend, tie=True)
    result = parity.compare(tied, tied, batches=vectors(4))
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
    result = parity.compare(lambda: port(1), port, batches=vectors(3),
                            dtype=dtype)
    assert result.same and result.plan.confirmed, result


# -- gradients, memory --------------------------------------------------------

def frozen(make, *names):
    def frozen():
        net = make()
        for name, p in net.named_parameters():
            if name in names:
                p.requires_grad_(False)
        return net
    return frozen


QKV = [f"{n}.weight" for n in "qkv"]


@pytest.mark.parametrize("case, a, b, named", [
    ("joined", ["k.weight"], [], ["k.weight"]),
    ("joined", [], ["all.weight"], QKV),
    ("split", ["all.weight"], [], ["all.weight"]),
    ("split", [], ["k.weight"], ["all.weight"]),
    ("joined", QKV, ["all.weight"], [])])
def test_a_frozen_part_is_a_difference(case, a, b, named, devices):
    """Where the one side trains what the other does not."""
    one, two, given = CASES[case]
    result = parity.compare(frozen(one, *a), frozen(two, *b), map=given,
                            batches=batches(), devices=devices,
                            optimizer=ADAM[0], optimizer_params=ADAM[1])
    assert result.same is not bool(named), result
    if named:
        assert result.first.stage == "gradient" and result.first.step == 1
        assert result.first.name in named
        assert result.causes[0].name == "frozen parameter"


def test_multipliers_of_parts():
    """One tensor has one rate: of parts with other rates, it trains
    differently."""
    one, two, given = CASES["joined"]
    for rate, same in ((2.0, True), (1.0, False)):
        result = parity.compare(
            parity.Side(one, lr_mult=dict.fromkeys(QKV, 2.0)),
            parity.Side(two, lr_mult={"all.weight": rate}),
            batches=batches(), map=given, optimizer_params=SGD[1])
        assert result.same is same
    assert result.causes[0].name == "multipliers"


@pytest.mark.parametrize("optimizer, semantics, noted", [
    ("nadam", "gluon", True), ("nadam", "torch", False)])
def test_optimisers_that_see_all_parameters_are_noted(optimizer, semantics,
                                                      noted):
    """Gluon's Nadam multiplies its schedule once for each parameter."""
    one, two, given = CASES["joined"]
    result = parity.compare(one, two, batches=batches(), map=given,
                            optimizer=optimizer, semantics=semantics)
    assert result.same is not noted
    assert any("how parameters are divided" in note
               for note in result.notes) is noted


def test_memory_of_another_shape_is_refused():
    class Rows(mgpu.optimizers.Optimizer):
        """Remembers a number for each row."""

        def create_state(self, weight, ops):
            return {"sum": ops.zeros_like(weight)[:1]}

        def update(self, weight, grad, state, *, lr, wd, t, ops):
            weight -= lr * grad
    one, two, given = CASES["joined"]
    with pytest.raises(ValueError, match="another form.*sum"):
        parity.compare(one, two, batches=batches(), map=given,
                       optimizer=Rows(learning_rate=0.1))


# -- what a map may say -------------------------------------------------------

def entries(prefix="", **shapes):
    return [Entry(prefix + name, kind_of(name), shape, True)
            for name, shape in shapes.items()]


def kind_of(name):
    return "running_mean" if name == "mean" else "weight"


def random_plan(rng):
    """A plan of one pair of each form, and values for it."""
    pairs, values = [], {}
    for number in range(6):
        name = str(number)
        shape = tuple(2 * rng.integers(1, 4, rng.integers(1, 4)))
        order = tuple(map(int, rng.permutation(len(shape))))
        turned = tuple(int(shape[i]) for i in order)
        own = (forms.Blocks(len(shape), (1, 0)), forms.Turn(order))
        count = int(rng.integers(1, 4))
        axis = None if rng.random() < 0.3 else int(rng.integers(len(shape)))
        join = forms.Join((turned,) * count, axis)
        flat = (int(np.prod(join.shape())),)
        pair = Pair(tuple(name + "abc"[i] for i in range(count)), (name,), (
            forms.Each((own,) * count), join,
            forms.View(join.shape(), flat)))
        lead = (2,) * int(rng.integers(2))      # devices
        found = {n: rng.normal(size=lead + shape) for n in pair.a}
        if rng.random() < 0.5:
            found = dict(zip(pair.b, forms.take(pair.steps,
                                                list(found.values()))))
            pair = pair.inverse()
        pairs.append(pair)
        values.update(found)
    return Plan("", pairs), values


def test_there_and_back():
    for seed in range(20):
        plan, values = random_plan(np.random.default_rng(seed))
        assert plan.inverse().inverse() == plan
        there = plan.to_b(values)
        assert there.keys() == plan.inverse().names().keys()
        back = plan.to_a(there)
        assert back.keys() == values.keys()
        for name, value in values.items():
            np.testing.assert_array_equal(back[name], value)


#: maps that are refused, and in which words
WRONG_MAPS = [
    ({"w": {"to": "qkv", "transposed": [1, 0]}}, "transposed is none of to, "),
    ({"w": {"transpose": [1, 0]}}, 'write a name of b, or {"to"'),
    ({"w": {"to": 3}}, '"to" is a name of b, or a list'),
    ({"w": {"to": "w", "transpose": "10"}}, '"transpose" is a list'),
    ({"w": {"to": "w", "blocks": [0.5]}}, '"blocks" is a list'),
    ({"w": {"to": "w", "axis": -1}}, '"axis" is a number from 0'),
    ({"w": {"to": "w", "reshape": 1}}, '"reshape" is true or false'),
    ({"w": {"to": ["w", "v"], "part": [0, 2]}}, "write one name"),
    ({"w": {"to": "w", "blocks": [0, 0]}}, "are no order of 2"),
    ({"w": {"to": "w", "blocks": [0, 2, 1, 3]}}, "no 4 equal blocks"),
    ({"t": "w"}, 'another shape.*add "transpose": \\[1, 0\\]'),
    ({"c": "w"}, 'another shape.*add "reshape": true'),
    ({"w": {"to": ["v", "t"]}}, "not side by side along axis 0"),
    ({"q": {"to": "qkv", "part": [0, 3]}, "k": {"to": "qkv", "part": [1, 3]}},
     r"2 entries are parts \[\[0, 3\], \[1, 3\]\]"),
    ({"q": {"to": "qkv", "part": [0, 2]},
      "k": {"to": "qkv", "part": [1, 2], "axis": 1}}, 'need one "axis"'),
    ({"q": {"to": "qkv", "part": [0]}}, "1 entries are parts"),
    ({"w": "w", "v": {"to": ["w", "v"]}}, "'w' of b is named twice"),
    ({"m": "mean"}, "a running statistic and a parameter"),
    ({"q": {"to": "nothing", "part": [0, 3]}}, "no such name in b"),
    ({"none": "w"}, "no such name in a")]


def test_a_wrong_map():
    a = entries(w=(6, 2), v=(6, 2), t=(2, 6), c=(6, 2, 1), q=(2, 2),
                k=(2, 2), m=(3,))
    b = entries(w=(6, 2), v=(6, 2), t=(2, 6), qkv=(6, 2), mean=(3,))
    for given, words in WRONG_MAPS:
        with pytest.raises(MatchError, match=words):
            matching.match(a, b, given=given)


def test_match_by_order_or_by_rules():
    a = entries(w=(2, 2), v=(2, 2))
    b = entries("x", w=(2, 2), v=(2, 2))
    assert matching.match(a, b).how == "order and shape"
    plan = matching.match(a, b, rules=[("^x", "")])
    assert plan.how == "equal names"
    assert [(*p.a, *p.b) for p in plan.pairs] == [("w", "xw"), ("v", "xv")]


def test_match_by_a_map_with_axes():
    """Also by an order of axes that is not its own inverse."""
    for shape, order in (((2, 3), [1, 0]), ((2, 2, 2), [1, 2, 0])):
        turned = tuple(shape[i] for i in order)
        plan = matching.match(entries(w=shape), entries("x", w=turned), given={
            "w": {"to": "xw", "transpose": order}})
        value = np.arange(float(np.prod(shape))).reshape(shape)
        there = plan.to_b({"w": value})["xw"]
        assert (there == value.transpose(order)).all()
        assert (plan.to_a({"xw": there})["w"] == value).all()
        devices = np.stack([value, -value])     # a leading axis stays
        there = plan.to_b({"w": devices})["xw"]
        assert (there[1] == -value.transpose(order)).all()


def test_parts_of_unequal_size_and_the_text_of_a_plan():
    plan = matching.match(
        entries(x=(2, 3), y=(4, 3)), entries(z=(3, 6)), given={
            "y": {"to": "z", "part": [0, 2], "axis": 1, "transpose": [1, 0]},
            "x": {"to": "z", "part": [1, 2], "axis": 1, "transpose": [1, 0]}})
    x, y = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(plan.to_b({"x": x, "y": y})["z"],
                                  np.concatenate([y, x]).T)
    assert "  y, x <- z transposed to (1, 0), joined along axis 1" \
        in plan.lines()
    assert plan.pairs[0].to_dict() == {
        "a": ["y", "x"], "b": "z", "axes": None,
        "layout": "transposed to (1, 0), joined along axis 1"}


@pytest.mark.parametrize("listed, mistake", [(False, True), (True, False)])
def test_names_that_tell_no_kind_match_by_order_and_shape(listed, mistake,
                                                          devices):
    def own(nn):
        import torch
        made = [nn.Parameter(torch.zeros(shape))
                for shape in ((5, 6), (5,), (3, 5), (3,))]
        return {"given": nn.ParameterList(made)} if listed \
            else dict(zip(("W1", "B1", "W2", "B2"), made))

    def forward(net, x):
        from torch.nn.functional import linear
        w1, b1, w2, b2 = net.parameters()
        x = linear(x, w1, b1)
        return linear(x if mistake else x.tanh(), w2, b2)
    result = parity.compare(
        gluon(lambda nn: [nn.Dense(5, activation="tanh", in_units=6),
                          nn.Dense(3, in_units=5)]),
        torch_block(own, forward), devices=devices, batches=vectors(6))
    assert result.same is not mistake
    assert result.plan.how == "order and shape"
    assert [pair.a[0] for pair in result.plan.pairs] == [
        "0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_kernel_of_another_number_of_axes_is_found(wrong):
    """A convolution over (channels, width), and over (1, width, channels)."""
    def forward(net, x):
        x = net.conv(x.unsqueeze(1)).squeeze(3)
        return net.out((x.tanh() if wrong else x.relu()).amax(2))
    sides = (torch_block(
        lambda nn: {"conv": nn.Conv1d(4, 3, 2), "out": nn.Linear(3, 3)},
        lambda net, x: net.out(net.conv(x.mT).relu().amax(2))), torch_block(
            lambda nn: {"conv": nn.Conv2d(1, 3, (2, 4)),
                        "out": nn.Linear(3, 3)}, forward))
    data = batches((6, 4))
    if wrong:
        with pytest.raises(parity.MatchError, match="are guesses"):
            parity.compare(*sides, batches=data)
    else:
        result = parity.compare(*sides, batches=data, strict=True)
        assert result.same, result
        assert "transposed to (0, 2, 1)" in "".join(result.plan.lines())
