"""What a network computes itself and does not train is compared as it was
before one side got the other's values."""
import numpy as np
import pytest

from mgpu import parity
from nets import torch_block
from parity.tables import in_gluon, in_torch

RNG = np.random.default_rng(0)
BATCHES = [(RNG.normal(size=(6, 4, 6)), RNG.integers(0, 3, 6).astype("int32"))
           for _ in range(2)]
TABLE = np.sin(np.arange(24.0).reshape(4, 6) / 3)
WRONG = np.cos(TABLE)


MAKE = {"mxnet": in_gluon, "torch": in_torch}


def is_named(result):
    assert result.verdict == "different"
    cause, gap = result.causes[0], result.first
    assert gap.stage == "initial" and gap.name == "pe"
    assert [c.name for c in result.causes] == ["constant"]
    assert cause.residual == 0.0 and "pe" in cause.text
    # its first number is sin(0) or the cosine of that
    assert " is 0 on " in cause.text and "and 1 on" in cause.text \
        or " is 1 on " in cause.text and "and 0 on" in cause.text
    assert "at [0, 0]" in cause.text and "compute it alike" in cause.text


@pytest.mark.parametrize("a, kind_a, b, kind_b, options", [
    ("mxnet", "constant", "torch", "buffer", {"devices": 3}),
    ("mxnet", "constant", "torch", "temporary", {"strict": True}),
    ("mxnet", "null", "torch", "frozen", {"weights": "b"}),
    ("mxnet", "null", "mxnet", "constant", {}),
    ("torch", "buffer", "mxnet", "constant", {"devices": 3}),
    ("torch", "frozen", "torch", "temporary", {"devices": 2})])
def test_a_wrong_constant_differs(a, kind_a, b, kind_b, options):
    one = MAKE[a]({"pe": TABLE}, kind_a)
    right, wrong = (parity.compare(
        one, MAKE[b]({"table": table}, kind_b), batches=BATCHES, **options)
        for table in (TABLE, WRONG))
    assert right.same
    is_named(wrong)


def test_a_wrong_constant_differs_from_a_trace(backend, tmp_path):
    backend = backend.name
    file = str(tmp_path / "a.trace")
    parity.record(MAKE[backend]({"pe": TABLE}), file=file, batches=BATCHES)
    assert parity.compare_trace(file, in_torch({"pe": TABLE})).same
    is_named(parity.compare_trace(file, in_torch({"pe": WRONG})))
    is_named(parity.compare_trace(file, in_gluon({"pe": WRONG})))


def test_a_constant_in_another_order_is_no_gate():
    """Means of three colours, from blue to red."""
    mean, rows = np.array([0.485, 0.5, 0.456, 0.25, 0.406, 0.125]), [
        (X[:, :1], y) for X, y in BATCHES]
    result = parity.compare(in_gluon({"mean": mean}),
                            in_torch({"mean": mean[[4, 5, 2, 3, 0, 1]]}),
                            batches=rows)
    assert [c.name for c in result.causes] == ["constant"], result
    assert ", the same numbers in another order: " in result.causes[0].text


def test_own_weights_have_constants_beside_them():
    one, two = in_torch({"pe": TABLE}), in_torch({"pe": WRONG})
    result = parity.compare(one, two, batches=BATCHES, weights="own")
    assert "constant" in [c.name for c in result.causes]


@pytest.mark.parametrize("shape", [(4, 6), (1, 4, 6)])
def test_constants_in_float32_are_equal_up_to_its_rounding(shape):
    rounded = {"table": TABLE.astype("float32").astype("float64"
                                                       ).reshape(shape)}
    for a, b in ((in_gluon({"pe": TABLE}), in_torch(rounded)),
                 (in_gluon(rounded), in_torch({"pe": TABLE}))):
        result = parity.compare(a, b, batches=BATCHES)
        assert result.same and not result.notes, result


def test_constants_in_another_order_are_partners_by_value():
    result = parity.compare(
        in_gluon({"one": TABLE, "two": WRONG}),
        in_torch({"second": TABLE, "first": WRONG}), batches=BATCHES)
    assert result.same
    # registered in another order, used in that of `a`
    names = {"x": TABLE, "y": WRONG}
    turned = in_torch(names)

    def other_order():
        net = turned()
        values = net._buffers.pop("x")
        net._buffers["x"] = values
        return net
    result = parity.compare(in_gluon({"one": TABLE, "two": WRONG}),
                            other_order, batches=BATCHES)
    assert result.same and not result.causes


def test_constants_that_are_used_in_other_ways_are_left_alone():
    scale = np.full((1, 6), 4.0)
    result = parity.compare(
        in_gluon({"scale": scale}, use="broadcast_mul"),
        in_torch({"scale": 1 / scale}, use="div"), batches=BATCHES)
    assert result.same and result.plan.left == {"a": ["scale"],
                                                "b": ["scale"]}


STD = np.array([[0.229, 0.224, 0.225, 0.3, 0.7, 0.123]])


@pytest.mark.parametrize("a", MAKE)
def test_forms_of_a_constant_in_float32_are_a_cause(a, devices):
    """A divisor and a factor that float32 has rounded; not what is as small
    and comes from elsewhere."""
    divide = {"mxnet": "broadcast_div", "torch": "div"}[a]

    def compared(dtype, change=lambda net: net):
        factor = in_torch({"s": (1 / STD).astype(dtype).astype(float)},
                          use="mul")
        return parity.compare(
            MAKE[a]({"s": STD.astype(dtype).astype(float)}, use=divide),
            lambda: change(factor()), batches=BATCHES, devices=devices)

    def louder(net):
        net.hidden.register_forward_hook(lambda m, x, y: y * (1 + 1e-7))
        return net
    assert compared("float64").same
    result = compared("float32")
    assert result.verdict == "different"
    assert [c.name for c in result.causes] == ["constant in float32"]
    assert result.causes[0].confirmed and "holds s in float32" \
        in result.causes[0].text
    assert "constant in float32" not in {
        c.name for c in compared("float32", louder).causes}


def test_a_number_in_float32_is_no_constant_factor():
    one, other = (np.array(x, "float32").astype(float) for x in (0.3, 1 / 0.3))
    result = parity.compare(in_torch({"s": one}, use="div"),
                            in_torch({"s": other}, use="mul"), batches=BATCHES)
    assert [c.name for c in result.causes] == ["constant in float32"]


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_frozen_beside_weights_is_noted(strict, backend):
    backend = backend.name
    one = MAKE[backend]({"pe": TABLE}, freeze=True,
                        **({"kind": "frozen"} if backend == "torch" else {}))
    result = parity.compare(
        one, in_torch({"pe": WRONG}, "frozen", freeze=True), batches=BATCHES,
        strict=strict)
    assert result.same is not strict
    if strict:
        assert result.causes[0].name == "constant"
        assert result.causes[0].text.startswith("pe is not trained")
    else:
        note, = result.notes
        assert "not trained had other values in b" in note and "more" in note


def test_the_memory_of_a_layer_is_no_constant():
    import torch

    def forward(net, x):
        if net.training:
            net.level = net.level * 0.5 + x.detach().mean() / 2
        return net.out(x.mean(1) * net.level)

    def counting(start):
        net = torch_block(lambda nn: {"out": nn.Linear(6, 3)}, forward)()
        net.register_buffer("level", torch.tensor(start))
        return net
    result = parity.compare(lambda: counting([0.5, 0.25] * 3),
                            lambda: counting([1.0] * 6), batches=BATCHES)
    assert result.same, result
    assert "level, at [" in result.notes[0]
