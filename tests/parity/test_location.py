"""Where a difference is: layers that do not compute the same thing are no
place of one."""
from functools import partial

import numpy as np
import pytest

from mgpu import parity
from nets import gluon, gluon_block, torch_block
from nets import torch as torch_

RNG = np.random.default_rng(0)
SERIES = [(RNG.normal(size=(6, 5, 4)), RNG.integers(0, 3, 6).astype("int32"))
          for _ in range(2)]
IMAGES = [(RNG.normal(size=(6, 2, 8, 8)), RNG.integers(0, 3, 6).astype(
    "int32")) for _ in range(2)]


def cells(layers=1):
    """A cell, called once for each step of a series."""
    def parts(nn):
        from mxnet.gluon import rnn
        found = rnn.HybridSequentialRNNCell()
        for i in range(layers):
            found.add(rnn.GRUCell(6, input_size=6 if i else 4))
        return {"cells": found, "out": nn.Dense(3, in_units=6)}

    def forward(net, F, x):
        zero = F.zeros_like(F.slice_axis(F.concat(x, x, dim=2), axis=2,
                                         begin=0, end=6))
        states = [F.reshape(F.slice_axis(zero, axis=1, begin=0, end=1),
                            (-1, 6))] * layers
        y, _ = net.cells.unroll(5, x, begin_state=states, layout="NTC",
                                merge_outputs=True)
        return net.out(F.mean(y, axis=1))
    return gluon_block(parts, forward)()


def series(mistake, layers=1):
    def forward(net, x):
        y = net.gru(x)[0]
        return net.out(y.sum(1) if mistake else y.mean(1))
    return torch_block(lambda nn: {
        "gru": nn.GRU(4, 6, layers, batch_first=True),
        "out": nn.Linear(6, 3)}, forward)()


def attention_by_hand():
    def forward(net, F, x):
        q, k, v = F.split(net.qkv(x), 3, axis=2)
        scores = F.softmax(F.batch_dot(q, k, transpose_b=True) / 2)
        x = x + net.proj(F.batch_dot(scores, v))
        return net.out(F.mean(F.relu(net.hidden(x)), axis=1))
    return gluon_block(lambda nn: {
        **{name: nn.Dense(units, in_units=4, flatten=False)
           for name, units in (("qkv", 12), ("proj", 4), ("hidden", 5))},
        "out": nn.Dense(3, in_units=5)}, forward)()


def attention(mistake):
    def forward(net, x):
        x = net.hidden(x + net.attention(x, x, x)[0])
        if mistake == "gelu":
            from torch.nn.functional import gelu
            x = gelu(x)
        else:
            x = x.relu()
        return net.out(x.sum(1) if mistake == "sum" else x.mean(1))
    return torch_block(lambda nn: {
        "attention": nn.MultiheadAttention(
            4, 2 if mistake == "heads" else 1, batch_first=True),
        "hidden": nn.Linear(4, 5), "out": nn.Linear(5, 3)}, forward)()


def compared(one, two, how, folder):
    """Their comparison on three devices, or one with a trace of the first."""
    if how == "traced":
        file = str(folder / "a.trace")
        parity.record(one, file=file, batches=SERIES)
        return parity.compare_trace(file, two)
    return parity.compare(*[one, two][::-1 if how == "swapped" else 1],
                          batches=SERIES, devices=3)


def stepwise(mistake):
    """A layer that is called for each step of a series."""
    def forward(net, x):
        import torch
        y = torch.stack([net.hidden(x[:, i]) for i in range(5)], 1)
        return net.out(y.sum(1) if mistake else y.mean(1))
    return torch_block(lambda nn: {"hidden": nn.Linear(4, 6),
                                   "out": nn.Linear(6, 3)}, forward)()


whole = gluon_block(
    lambda nn: {"hidden": nn.Dense(6, in_units=4, flatten=False),
                "out": nn.Dense(3, in_units=6)},
    lambda net, F, x: net.out(F.mean(net.hidden(x), axis=1)))


@pytest.mark.parametrize("one, port, how", [
    (cells, series, "swapped"), (cells, series, "traced"),
    (partial(cells, 2), partial(series, layers=2), ""),
    (whole, stepwise, "")],
    ids=["swapped", "traced", "two layers", "a layer for each step"])
def test_a_step_of_a_series_is_no_place(one, port, how, tmp_path):
    right, wrong = (compared(one, partial(port, mistake), how, tmp_path)
                    for mistake in (False, True))
    assert right.same
    assert wrong.first.name == "out" and np.isfinite(wrong.first.relative)
    assert how == "traced" or wrong.causes[0].name == "constant factor"


@pytest.mark.parametrize("mistake, place", [
    ("sum", "out"), ("gelu", "hidden"), ("heads", "qkv + proj")])
def test_an_attention_is_compared_with_all_its_parts(mistake, place, devices):
    options = {"batches": SERIES, "devices": devices}
    assert parity.compare(attention_by_hand, lambda: attention(""),
                          **options).same
    result = parity.compare(attention_by_hand, lambda: attention(mistake),
                            **options)
    assert place in result.first.name and np.isfinite(result.first.relative)
    if mistake != "heads":
        assert result.causes[0].name == {
            "sum": "constant factor", "gelu": "activation"}[mistake]


def convolutions(**change):
    return torch_(lambda nn: [
        nn.Conv2d(2, 4, 3, **change), nn.Conv2d(4, 4, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)])


@pytest.mark.parametrize("change", [{"padding": 1}, {"stride": 2}])
def test_another_shape_of_one_kind_of_layer_is_a_place(change, backend):
    original = convolutions() if backend.name == "torch" else gluon(
        lambda nn: [
            nn.Conv2D(4, 3, in_channels=2), nn.Conv2D(4, 3, in_channels=4),
            nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(3, in_units=4)])
    result = parity.compare(original, convolutions(**change), batches=IMAGES)
    assert result.first.stage == "layer" and result.first.name == "0"
    assert result.causes[0].name == "layer options"


def in_pieces(style, behind=None):
    """A convolution of a series that sees nothing later, and two halves.
    `style`: the convolution pads both ends, or the earlier one; the pooling
    comes behind the activation, or before it."""
    def forward(net, x):
        import torch
        from torch.nn import functional
        x = x.mT
        x = net.conv(x)[..., :5] if style \
            else net.conv(functional.pad(x, (2, 0)))
        x = net.norm(x)
        if behind == "chop":
            x = x.flip(2)
        for f in (torch.relu, lambda x: functional.max_pool1d(
                x, 2, 1))[::1 if style else -1]:
            x = f(x)
        x = net.next(x)
        return ended(net, x.sum(2) if behind == "sum" else x.amax(2), behind)
    return torch_block(lambda nn: {
        "conv": nn.Conv1d(4, 6, 3, padding=2 * style),
        "norm": nn.BatchNorm1d(6),
        "next": nn.Conv1d(6, 5, 2, stride=1 + (behind == "stride")),
        "head": nn.Linear(5, 4), "out": nn.Linear(4, 3)}, forward)


def ended(net, x, behind):
    """The last layers of both networks."""
    x = net.head(x)
    x = net.out(x.sigmoid() if behind == "act" else x.tanh())
    return x.tanh() if behind == "end" else x


def encoded(style, behind=None):
    """An encoder of two halves, called twice (`style`), or once."""
    def forward(net, x):
        import torch
        halves = [x.mT, x.mT.flip(2)]
        encodings = [net.next(net.pool(net.conv(z).tanh()).flatten(1))
                     for z in (halves if style else [torch.cat(halves)])]
        u, v = encodings if style else encodings[0].chunk(2)
        return ended(net, u + v if behind == "sum" else (u - v) ** 2, behind)
    return torch_block(lambda nn: {
        "conv": nn.Conv1d(4, 6, 2), "next": nn.Linear(12, 5),
        "pool": nn.MaxPool1d(2), "head": nn.Linear(5, 4),
        "out": nn.Linear(4, 3)}, forward)


@pytest.mark.parametrize("make, behind, place, inputs_agree", [
    (in_pieces, "chop", ("next", "F.relu after norm", "F.max_pool after norm"),
     False), (in_pieces, "stride", "next", True),
    *((make, *others) for make in (in_pieces, encoded) for others in (
        ("sum", "head", False), ("act", "F.tanh after head", True),
        ("end", None, None)))])
def test_other_sizes_on_the_way_are_no_place(make, behind, place,
                                             inputs_agree):
    """A port that is right may give layers other sizes."""
    assert parity.compare(make(True), make(False), batches=SERIES).same
    for style in (True, False):
        result = parity.compare(make(style), make(not style, behind),
                                batches=SERIES)
        assert result.verdict == "different"
        if place is None:
            assert result.location is None, result
        else:
            assert result.location["a"]["path"] in place, result
            assert result.location["inputs_agree"] is inputs_agree, result
        assert np.isfinite(result.first.absolute) or behind == "stride", \
            result
        assert not result.further, result


def gated(act, eps=1e-5, behind=0.0):
    def forward(net, x):
        x = net.norm(x.flatten(1))
        x = net.next(activated(act, net.g(x)) * net.u(x))
        return net.out(x.tanh() + behind)
    return torch_block(lambda nn: {
        "norm": nn.LayerNorm(20, eps), "g": nn.Linear(20, 5),
        "u": nn.Linear(20, 5), "next": nn.Linear(5, 5),
        "out": nn.Linear(5, 3)}, forward)


def activated(name, x):
    """A function of torch, or SiLU by hand."""
    import torch
    from torch.nn import functional
    if name == "by hand":
        return x * torch.sigmoid(x)
    return getattr(torch if name in ("tanh", "relu") else functional, name)(x)


@pytest.mark.parametrize("acts", [("by hand", "silu"), ("silu", "by hand")])
def test_one_gate_in_other_words_is_no_place(acts):
    def compared(*options, act=acts[1], **others):
        return parity.compare(gated(acts[0]), gated(act, *options, **others),
                              batches=SERIES)
    assert compared().same
    before = compared(1e-3)
    assert before.location["a"]["path"] == "norm"
    assert before.further == [], before
    behind = compared(behind=0.5)
    assert behind.location["a"]["path"] == "out", behind
    wrong = compared(act="gelu")
    assert wrong.location["a"]["path"].startswith("F.si"), wrong


def cell_gluon():
    def parts(nn):
        from mxnet.gluon import rnn
        return {"cell": rnn.LSTMCell(4, input_size=4),
                "out": nn.Dense(3, in_units=4)}

    def forward(net, F, x):
        zero = F.reshape(F.zeros_like(F.slice_axis(
            x, axis=1, begin=0, end=1)), (-1, 4))
        y, _ = net.cell.unroll(5, x, begin_state=[zero, zero], layout="NTC",
                               merge_outputs=True)
        return net.out(F.mean(y, axis=1))
    return gluon_block(parts, forward)()


def cell_torch(mistake):
    def forward(net, x):
        import torch
        h = c = torch.zeros_like(x[:, 0])
        seen = []
        for i in range(5):
            h, c = net.cell(x[:, i], (h, c * (not mistake)))
            seen.append(h)
        return net.out(torch.stack(seen, 1).mean(1))
    return torch_block(lambda nn: {"cell": nn.LSTMCell(4, 4),
                                   "out": nn.Linear(4, 3)}, forward)()


@pytest.mark.parametrize("how", ["", "traced"])
def test_a_state_that_is_lost_is_what_the_next_call_gets(how, tmp_path):
    right, wrong = (compared(cell_gluon, partial(cell_torch, mistake), how,
                             tmp_path) for mistake in (False, True))
    assert right.same
    assert wrong.first.name == "cell" and wrong.first.relative > 1e-3
    assert not wrong.location["inputs_agree"]
    if how != "traced":
        assert wrong.causes[0].name == "constant factor"
        assert "has 0 times the numbers" in wrong.causes[0].text


def in_layouts(layout, behind="mean", act="tanh"):
    """Layers that are called on (rows, time, channels), (time, rows,
    channels), (rows x time, channels) or (rows, channels, time)."""
    def forward(net, x):
        rows, time, _ = x.shape
        x = {"flat": x.reshape(-1, 4), "time": x.transpose(0, 1)
             }.get(layout, x)
        y = net.next(activated(act, net.dense(x)))
        y = y.transpose(0, 1) if layout == "time" else y.view(rows, time, 5)
        y = net.norm(y.mT).mT if layout != "flat" \
            else net.norm(y.reshape(-1, 5)).view(rows, time, 5)
        return net.out(getattr(y, behind)(1).sigmoid())
    return torch_block(lambda nn: {
        "dense": nn.Linear(4, 5), "norm": nn.BatchNorm1d(5),
        "next": nn.Linear(5, 5), "out": nn.Linear(5, 3)}, forward)


@pytest.mark.parametrize("one, two", [
    ("rows", "time"), ("flat", "time")])
def test_layouts_hide_no_place(one, two):
    """Of a mistake behind them, or in a layer that is called in another
    one."""
    assert parity.compare(in_layouts(one), in_layouts(two),
                          batches=SERIES).same
    for acts in (("silu", "by hand"), ("by hand", "silu")):
        result = parity.compare(in_layouts(one, act=acts[0]),
                                in_layouts(two, "sum", acts[1]),
                                batches=SERIES)
        assert result.location["a"]["path"] == "F.sigmoid after norm", result
    result = parity.compare(in_layouts(one), in_layouts(two, act="relu"),
                            batches=SERIES)
    assert result.location["a"]["path"] == "F.tanh after dense", result
    assert result.causes[0].name == "activation", result
    assert np.isfinite(result.first.absolute)
