"""Where a difference is: layers that do not compute the same thing are no
place of one."""
import numpy as np
import pytest

import mgpu
from mgpu import parity
from nets import gluon
from nets import torch as torch_

RNG = np.random.default_rng(0)
SERIES = [(RNG.normal(size=(6, 5, 4)), RNG.integers(0, 3, 6).astype("int32"))
          for _ in range(2)]
IMAGES = [(RNG.normal(size=(6, 2, 8, 8)), RNG.integers(0, 3, 6).astype(
    "int32")) for _ in range(2)]


def cells(layers=1):
    """A cell, called once for each step of a series."""
    with mgpu.using_backend("mxnet"):
        from mxnet.gluon import nn, rnn

    class Net(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            self.cells = rnn.HybridSequentialRNNCell()
            for i in range(layers):
                self.cells.add(rnn.GRUCell(6, input_size=6 if i else 4))
            self.out = nn.Dense(3, in_units=6)

        def hybrid_forward(self, F, x):
            zero = F.zeros_like(F.slice_axis(F.concat(x, x, dim=2), axis=2,
                                             begin=0, end=6))
            states = [F.reshape(F.slice_axis(zero, axis=1, begin=0, end=1),
                                (-1, 6))] * layers
            y, _ = self.cells.unroll(5, x, begin_state=states, layout="NTC",
                                     merge_outputs=True)
            return self.out(F.mean(y, axis=1))
    return Net()


def series(mistake, layers=1):
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(4, 6, layers, batch_first=True)
            self.out = nn.Linear(6, 3)

        def forward(self, x):
            y = self.gru(x)[0]
            return self.out(y.sum(1) if mistake else y.mean(1))
    return Net()


def attention_by_hand():
    with mgpu.using_backend("mxnet"):
        from mxnet.gluon import nn

    class Net(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Dense(12, in_units=4, flatten=False)
            self.proj = nn.Dense(4, in_units=4, flatten=False)
            self.hidden = nn.Dense(5, in_units=4, flatten=False)
            self.out = nn.Dense(3, in_units=5)

        def hybrid_forward(self, F, x):
            q, k, v = F.split(self.qkv(x), 3, axis=2)
            scores = F.softmax(F.batch_dot(q, k, transpose_b=True) / 2)
            x = x + self.proj(F.batch_dot(scores, v))
            return self.out(F.mean(F.relu(self.hidden(x)), axis=1))
    return Net()


def attention(mistake):
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(
                4, 2 if mistake == "heads" else 1, batch_first=True)
            self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            x = x + self.attention(x, x, x)[0]
            x = self.hidden(x)
            x = nn.functional.gelu(x) if mistake == "gelu" else x.relu()
            return self.out(x.sum(1) if mistake == "sum" else x.mean(1))
    return Net()


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_step_of_a_series_is_no_place(layers, swap, devices):
    def compared(mistake):
        sides = [lambda: cells(layers), lambda: series(mistake, layers)]
        return parity.compare(*sides[::-1 if swap else 1], batches=SERIES,
                              devices=devices)
    assert compared(False).same
    result = compared(True)
    assert result.first.name == "out" and np.isfinite(result.first.relative)
    assert result.causes[0].name == "constant factor"


def test_a_layer_that_is_called_for_each_step_is_no_place():
    def steps(mistake):
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

            def forward(self, x):
                y = torch.stack([self.hidden(x[:, i]) for i in range(5)], 1)
                return self.out(y.sum(1) if mistake else y.mean(1))
        return Net()

    def whole():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn

        class Net(nn.HybridBlock):
            def __init__(self):
                super().__init__()
                self.hidden = nn.Dense(6, in_units=4, flatten=False)
                self.out = nn.Dense(3, in_units=6)

            def hybrid_forward(self, F, x):
                return self.out(F.mean(self.hidden(x), axis=1))
        return Net()
    assert parity.compare(whole, lambda: steps(False), batches=SERIES).same
    result = parity.compare(whole, lambda: steps(True), batches=SERIES)
    assert result.first.name == "out"
    assert result.causes[0].name == "constant factor"


def test_a_step_of_a_series_is_no_place_beside_a_trace(tmp_path):
    file = str(tmp_path / "a.trace")
    parity.record(cells, file=file, batches=SERIES)
    assert parity.compare_trace(file, lambda: series(False)).same
    assert parity.compare_trace(file, lambda: series(True)
                                ).first.name == "out"


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


@pytest.mark.parametrize("change", [{"padding": 1}, {"stride": 2}])
def test_another_shape_of_one_kind_of_layer_is_a_place(change, backend):
    end = {"mxnet": gluon(lambda nn: [
        nn.Conv2D(4, 3, in_channels=2), nn.Conv2D(4, 3, in_channels=4),
        nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(3, in_units=4)]),
        "torch": torch_(lambda nn: [
            nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(4, 3)])}
    port = torch_(lambda nn: [
        nn.Conv2d(2, 4, 3, **change), nn.Conv2d(4, 4, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)])
    result = parity.compare(end[backend.name], port, batches=IMAGES)
    assert result.first.stage == "layer" and result.first.name == "0"
    assert result.causes[0].name == "layer options"


def in_pieces(style, behind=None):
    """A convolution of a series that sees nothing later, and two halves.
    `style`: the convolution pads both ends, or the earlier one; the pooling
    comes behind the activation, or before it."""
    def make():
        import torch
        from torch import nn
        functional = nn.functional

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv1d(4, 6, 3, padding=2 * style)
                self.norm = nn.BatchNorm1d(6)
                self.next = nn.Conv1d(6, 5, 2, stride=1 + (
                    behind == "stride"))
                self.head, self.out = nn.Linear(5, 4), nn.Linear(4, 3)

            def forward(self, x):
                x = x.mT
                x = self.conv(x)[..., :5] if style \
                    else self.conv(functional.pad(x, (2, 0)))
                x = self.norm(x)
                if behind == "chop":
                    x = x.flip(2)
                for f in (torch.relu, lambda x: functional.max_pool1d(
                        x, 2, 1))[::1 if style else -1]:
                    x = f(x)
                x = self.next(x)
                x = x.sum(2) if behind == "sum" else x.amax(2)
                x = torch.sigmoid(self.head(x)) if behind == "act" \
                    else torch.tanh(self.head(x))
                x = self.out(x)
                return x.tanh() if behind == "end" else x
        return Net()
    return make


def encoded(style, behind=None):
    """An encoder of two halves, called twice (`style`), or once."""
    def make():
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.next = nn.Conv1d(4, 6, 2), nn.Linear(12, 5)
                self.pool = nn.MaxPool1d(2)
                self.head, self.out = nn.Linear(5, 4), nn.Linear(4, 3)

            def forward(self, x):
                x = x.mT
                halves = [x, x.flip(2)]
                encodings = [self.next(self.pool(self.conv(z).tanh()
                                                 ).flatten(1))
                             for z in (halves if style
                                       else [torch.cat(halves)])]
                u, v = encodings if style else encodings[0].chunk(2)
                x = u + v if behind == "sum" else (u - v) ** 2
                x = torch.sigmoid(self.head(x)) if behind == "act" \
                    else torch.tanh(self.head(x))
                x = self.out(x)
                return x.tanh() if behind == "end" else x
        return Net()
    return make


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("make, behind, place, inputs_agree", [
    (in_pieces, "chop", ("next", "F.relu after norm", "F.max_pool after norm"),
     False), (in_pieces, "stride", "next", True),
    *((make, *others) for make in (in_pieces, encoded) for others in (
        ("sum", "head", False), ("act", "F.tanh after head", True),
        ("end", None, None)))])
def test_other_sizes_on_the_way_are_no_place(make, behind, place, inputs_agree,
                                             swap):
    """A port that is right may give layers other sizes."""
    one, two = make(True), make(False)
    assert parity.compare(one, two, batches=SERIES).same
    sides = [one, make(False, behind)] if not swap \
        else [two, make(True, behind)]
    result = parity.compare(*sides, batches=SERIES)
    assert result.verdict == "different"
    if place is None:
        assert result.location is None, result
    else:
        assert result.location["a"]["path"] in place, result
        assert result.location["inputs_agree"] is inputs_agree, result
    assert np.isfinite(result.first.absolute) or behind == "stride", result
    assert not result.further, result


def gated(act, eps=1e-5, behind=0.0):
    def make():
        import torch
        from torch import nn
        acts = {"silu": nn.functional.silu, "gelu": nn.functional.gelu,
                "by hand": lambda y: y * torch.sigmoid(y)}

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(20, eps)
                self.g, self.u = nn.Linear(20, 5), nn.Linear(20, 5)
                self.next, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

            def forward(self, x):
                x = self.norm(x.flatten(1))
                x = self.next(acts[act](self.g(x)) * self.u(x))
                return self.out(torch.tanh(x) + behind)
        return Net()
    return make


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


@pytest.mark.parametrize("traced", [False, True])
def test_a_state_that_is_lost_is_what_the_next_call_gets(traced, tmp_path):
    def original():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn, rnn

        class Net(nn.HybridBlock):
            def __init__(self):
                super().__init__()
                self.cell = rnn.LSTMCell(4, input_size=4)
                self.out = nn.Dense(3, in_units=4)

            def hybrid_forward(self, F, x):
                zero = F.reshape(F.zeros_like(F.slice_axis(
                    x, axis=1, begin=0, end=1)), (-1, 4))
                y, _ = self.cell.unroll(5, x, begin_state=[zero, zero],
                                        layout="NTC", merge_outputs=True)
                return self.out(F.mean(y, axis=1))
        return Net()

    def port(mistake):
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.cell, self.out = nn.LSTMCell(4, 4), nn.Linear(4, 3)

            def forward(self, x):
                h = c = torch.zeros_like(x[:, 0])
                seen = []
                for i in range(5):
                    h, c = self.cell(x[:, i], (h, c * (not mistake)))
                    seen.append(h)
                return self.out(torch.stack(seen, 1).mean(1))
        return Net()

    def compared(mistake):
        if not traced:
            return parity.compare(original, lambda: port(mistake),
                                  batches=SERIES)
        file = str(tmp_path / "a.trace")
        parity.record(original, file=file, batches=SERIES)
        return parity.compare_trace(file, lambda: port(mistake))
    assert compared(False).same
    result = compared(True)
    assert result.first.name == "cell" and result.first.relative > 1e-3
    assert not result.location["inputs_agree"]
    if not traced:
        assert result.causes[0].name == "constant factor"
        assert "has 0 times the numbers" in result.causes[0].text


def in_layouts(layout, behind="mean", act="tanh"):
    """Layers that are called on (rows, time, channels), (time, rows,
    channels), (rows x time, channels) or (rows, channels, time)."""
    def make():
        import torch
        from torch import nn
        acts = {"tanh": torch.tanh, "relu": torch.relu,
                "silu": nn.functional.silu,
                "by hand": lambda y: y * torch.sigmoid(y)}

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.dense = nn.Linear(4, 5)
                self.norm = nn.BatchNorm1d(5)
                self.next, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

            def forward(self, x):
                rows, time, _ = x.shape
                x = {"flat": x.reshape(-1, 4), "time": x.transpose(0, 1)
                     }.get(layout, x)
                y = self.next(acts[act](self.dense(x)))
                y = y.transpose(0, 1) if layout == "time" \
                    else y.view(rows, time, 5)
                y = self.norm(y.mT).mT if layout != "flat" \
                    else self.norm(y.reshape(-1, 5)).view(rows, time, 5)
                return self.out(torch.sigmoid(getattr(y, behind)(1)))
        return Net()
    return make


@pytest.mark.parametrize("one, two", [
    ("rows", "time"), ("rows", "flat"), ("flat", "time"), ("flat", "rows"),
    ("time", "flat"), ("time", "rows")])
def test_layouts_hide_no_place(one, two):
    """Of a mistake behind them, or in a layer that is called in another
    one."""
    same = parity.compare(in_layouts(one), in_layouts(two), batches=SERIES)
    assert same.same, same
    for acts in (("tanh", "tanh"), ("silu", "by hand"), ("by hand", "silu")):
        result = parity.compare(in_layouts(one, act=acts[0]),
                                in_layouts(two, "sum", acts[1]),
                                batches=SERIES)
        assert result.location["a"]["path"] == "F.sigmoid after norm", result
    result = parity.compare(in_layouts(one), in_layouts(two, act="relu"),
                            batches=SERIES)
    assert result.location["a"]["path"] == "F.tanh after dense", result
    assert result.causes[0].name == "activation", result
    assert np.isfinite(result.first.absolute)
