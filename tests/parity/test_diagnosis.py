"""Faults planted in real networks are named, and nothing else is."""
import numpy as np
import pytest

import mgpu
from mgpu import losses, parity
from mgpu.parity import Side, diagnosis
from mgpu.parity.causes.difference import unexplained
from nets import gluon
from nets import torch as torch_
from parity.steps import gluon_step, torch_step
from parity.tables import in_gluon, in_torch

RNG = np.random.default_rng(0)
#: rows that 2, 3 and 4 devices share unevenly or not, and whose factors
#: (rows, devices, powers of two) cannot be confused
N = 7
IMAGES = [(RNG.random((N, 2, 8, 8)), RNG.integers(0, 3, N).astype("int32"))
          for _ in range(3)]
ROWS = [(RNG.normal(size=(N, 6)), RNG.integers(0, 3, N).astype("int32"))
        for _ in range(3)]
TARGETS = [(X, RNG.normal(size=(N, 3))) for X, _ in ROWS]
SERIES = [(np.random.default_rng(i).normal(size=(N, 2, 3)), y)
          for i, (_, y) in enumerate(ROWS)]
ATTENDED = [(np.random.default_rng(i).normal(size=(N, 5, 4)), y)
            for i, (_, y) in enumerate(ROWS)]
FULL_THEN_SHORT = [ROWS[0], tuple(x[:5] for x in ROWS[1])]
SLOW = {"learning_rate": 0.125}


def conv_g(**bn):
    return gluon(lambda nn: [
        nn.Conv2D(4, 3, in_channels=2), nn.BatchNorm(in_channels=4, **bn),
        nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Flatten(),
        nn.Dense(3, in_units=4)])


def conv_t(**bn):
    return torch_(lambda nn: [
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, **bn), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)])


def dense_g(*middle, activation="relu"):
    def make(nn):
        return [nn.Dense(5, in_units=6, activation=activation),
                *(m(nn) for m in middle), nn.Dense(3, in_units=5)]
    return gluon(make)


def dense_t(*middle, activation="ReLU"):
    def make(nn):
        return [nn.Linear(6, 5),
                *([getattr(nn, activation)()] if activation else []),
                *(m(nn) for m in middle), nn.Linear(5, 3)]
    return torch_(make)


def half_at_zero(nn):
    """ReLU, with a derivative of 1/2 at 0."""
    class Maximum(nn.Module):
        def forward(self, x):
            return x.maximum(x.new_zeros(()))
    return Maximum()


def image_net(layers_g, layers_t, units):
    """Two networks around a layer under test."""
    return (gluon(lambda nn: [*layers_g(nn), nn.Flatten(),
                              nn.Dense(3, in_units=units)]),
            torch_(lambda nn: [*layers_t(nn), nn.Flatten(),
                               nn.Linear(units, 3)]))


def enlarged(function, layer=False, **options):
    """Networks that double the size of pictures, by a layer of torch's or a
    function."""
    def port(nn):
        class Double(nn.Module):
            def forward(self, x):
                return nn.functional.interpolate(
                    x, scale_factor=2, **options)
        double = Double() if not layer else nn.Upsample(
            scale_factor=2, **options)
        return [nn.Conv2d(2, 4, 7), double, nn.Conv2d(4, 4, 3)]
    return image_net(lambda nn: [
        nn.Conv2D(4, 7, in_channels=2), nn.HybridLambda(function),
        nn.Conv2D(4, 3, in_channels=4)], port, 16)


def attention(scale, pooled="mean", skip="x", wide=False, turned=False,
              mask=0.0):
    """A block of a transformer, in torch."""
    def make():
        import torch
        from torch import nn

        class Norm(nn.LayerNorm):
            def forward(self, x):
                return nn.functional.layer_norm(
                    x, x.shape[1:]) * self.weight + self.bias \
                    if wide else super().forward(x)

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.q, self.k, self.v = (nn.Linear(4, 4) for _ in "qkv")
                self.norm, self.act = Norm(4), nn.Tanh()
                self.head = nn.Linear(8, 3)

            def forward(self, x):
                q, k, v = self.q(x), self.k(x), self.v(x)
                later = torch.ones(5, 5, dtype=x.dtype).triu(1)
                y = torch.softmax(scale * q @ k.mT - mask * later, 2) @ v
                if skip == "behind":
                    y = self.norm(y) + x
                else:
                    y = self.norm(y + {"x": x, "v": v, None: 0 * x}[skip])
                y = self.act(y)
                parts = [getattr(y, pooled)(1), y[:, 0]]
                return self.head(torch.cat(parts[::-1] if turned else parts,
                                           1))
        return Block()
    return make


def of_heads(scale, among_rows=False, mask=0.0):
    """Attention of two heads, which may stand among the rows."""
    def make():
        import torch
        from torch import nn

        class Heads(nn.Module):
            def __init__(self):
                super().__init__()
                self.q, self.k, self.v = (nn.Linear(4, 4) for _ in "qkv")
                self.head = nn.Linear(20, 3)

            def forward(self, x):
                later = torch.ones(5, 5, dtype=x.dtype).triu(1)
                q, k, v = (f(x).unflatten(2, (2, 2)).transpose(1, 2)
                           for f in (self.q, self.k, self.v))
                if among_rows:
                    q, k, v = (z.flatten(0, 1) for z in (q, k, v))
                y = torch.softmax(scale * q @ k.mT - mask * later, -1) @ v
                return self.head(y.reshape(len(x), 20))
        return Heads()
    return make


def one_score(axis, squeezed=False):
    """Attention with one score for each time, and a softmax along `axis`."""
    def make():
        import torch
        from torch import nn

        class Pooling(nn.Module):
            def __init__(self):
                super().__init__()
                self.score, self.head = nn.Linear(4, 1), nn.Linear(4, 3)

            def forward(self, x):
                shares = self.score(x)
                if squeezed:
                    shares = torch.softmax(shares[..., 0], axis)[..., None]
                else:
                    shares = torch.softmax(shares, axis)
                return self.head((shares * x).sum(1))
        return Pooling()
    return make


def padded(mode, dropout=0.0):
    """A convolution of what ``F.pad`` has made larger."""
    def make():
        from torch import nn

        class Padded(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.head = nn.Conv2d(2, 4, 5), nn.Linear(144, 3)
                self.dropout = nn.Dropout(dropout) if dropout \
                    else nn.Identity()

            def forward(self, x):
                how = mode
                if mode in ("first", "last"):   # column, that is cut off
                    x = nn.functional.pad(*(
                        (x[..., 1:], (1, 0)) if mode == "first"
                        else (x[..., :-1], (0, 1))))
                    how = "constant"
                x = self.conv(nn.functional.pad(x, (1,) * 4, mode=how))
                return self.head(self.dropout(x.tanh().flatten(1)))
        return Padded()
    return make


def joined_heads(order):
    """Four heads in two sizes, as of a detector, with the channels last."""
    def make():
        import torch
        from torch import nn

        class Heads(nn.Module):
            def __init__(self):
                super().__init__()
                self.fine, self.coarse = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3)
                self.heads = nn.ModuleList(nn.Conv2d(4, n, 1)
                                           for n in (2, 3, 2, 3))

            def forward(self, x):
                fine = self.fine(x).tanh()
                maps = [fine, self.coarse(fine)]
                return torch.cat([
                    self.heads[i](maps[i % 2]).permute(0, 2, 3, 1).flatten(1)
                    for i in order], 1)
        return Heads()
    return make


def features(engine):
    """A last layer is trained, behind a batch norm in training mode."""
    def freeze(made):
        for layer in list(made._children.values() if engine == "mxnet"
                          else made.children())[:-1]:
            if engine == "mxnet":
                layer.collect_params().setattr("grad_req", "null")
            else:
                layer.requires_grad_(False)
        return made
    net = dense_g(lambda nn: nn.BatchNorm(in_channels=5)) \
        if engine == "mxnet" else dense_t(lambda nn: nn.BatchNorm1d(5))
    return lambda: freeze(net())


def rate(n):
    """A schedule with a jump at the third update."""
    return 0.125 if n < 3 else 0.0625


def cross_entropy(**options):
    """torch's own, which has 64-bit labels."""
    def loss(output, y):
        from torch.nn import functional
        return functional.cross_entropy(output, y.long(), **options)
    return loss


def weighted(output, y):
    return cross_entropy(reduction="none", weight=output.new_tensor(
        [0.5, 1.0, 2.0]))(output, y)


def times(nn, number):
    class Times(nn.Module):
        def forward(self, x):
            return number * x
    return Times()


def transposed(nn):
    class Transposed(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight.T, self.bias)
    return Transposed(6, 6)


def single(dtype, activation="ReLU"):
    """A network whose first layer computes in a smaller dtype."""
    def make():
        from torch import nn

        class Single(nn.Linear):
            def forward(self, x):
                own = [getattr(t, dtype)() for t in (
                    x, self.weight, self.bias)]
                return nn.functional.linear(*own).to(x.dtype)
        return nn.Sequential(Single(6, 5), getattr(nn, activation)(),
                             nn.Linear(5, 3))
    return make


def cast(nn):
    class Cast(nn.Module):
        def forward(self, x):
            return x.float().to(x.dtype)
    return Cast()


def mean_square(output, y):
    return ((output - y) ** 2).mean(1)


def huber(output, y):
    """torch's, which is rho times Gluon's."""
    from torch.nn import functional
    return functional.huber_loss(output, y, delta=2.0,
                                 reduction="none").mean(1)


def gluon_cross_entropy(output, y):
    import mxnet as mx
    return mx.gluon.loss.SoftmaxCrossEntropyLoss()(output, y)


def patch_sum(patch, engine, wrong):
    """On one engine gradients are reduced by ``wrong(columns, right)``."""
    right = mgpu.trainer.allreduce_many

    def reduce(columns, algorithm):
        if mgpu.get_backend().name == engine:
            wrong(columns, right)
        else:
            right(columns)
    patch.setattr("mgpu.trainer.allreduce_many", reduce)


def average(columns, right):
    right(columns, op="mean")


def aliased(columns, right):
    """The sum of the text's first listing, over a list that holds one array
    k times because nothing was copied."""
    right(columns)
    for column in columns:
        data = [column[0]] * len(column)
        for i in range(1, len(data)):
            data[0] += data[i]
        for copy in column[1:]:
            copy[:] = mgpu.backends.get_backend().put(data[0], copy)


def no_broadcast(columns, right):
    for column in columns:
        mgpu.reduce(column)


def left_out(columns, right):
    for column in columns:
        column[-1] *= 0.0
    right(columns)


def stale_once():
    """The second step applies the gradients of the first."""
    kept = []

    def wrong(columns, right):
        right(columns)
        backend = mgpu.get_backend()
        if not kept:
            kept.extend(backend.to_numpy(c[0]) for c in columns)
        elif len(kept) == len(columns):
            for column, old in zip(columns, kept):
                for copy in column:
                    copy[:] = backend.put(old, copy)
    return wrong


def accumulated():
    """No step sets the gradient to zero."""
    kept = {}

    def wrong(columns, right):
        right(columns)
        backend = mgpu.get_backend()
        for i, column in enumerate(columns):
            for copy in column:
                if i in kept:
                    copy += backend.put(kept[i], copy)
            kept[i] = backend.to_numpy(column[0])
    return wrong


def accumulating():
    net = dense_g()()
    net.initialize()
    net.collect_params().setattr("grad_req", "add")
    return net


def halved(columns, right):
    right(columns)
    for column in columns:
        for copy in column:
            copy *= 0.375


def other_masks(patch):
    """torch's dropout layers get the masks of other elements."""
    from mgpu.backends._torch.network import TorchNetwork as Network
    right = Network.use_masks

    def dropout(self, rule):
        return right(self, lambda x, rate, axes, index: rule(
            x, rate, axes, index).flip(-1))
    patch.setattr(Network, "use_masks", dropout)


def still(patch):
    """torch's batch norm leaves the running statistics alone."""
    from mgpu.backends._torch import replica
    right = replica.gluon_batch_norm

    def wrong(call, index=0):
        return right(call._replace(
            running_mean=call.running_mean.clone(),
            running_var=call.running_var.clone()), index)
    patch.setattr(replica, "gluon_batch_norm", wrong)


def fixed_gamma(patch, scale):
    """A torch network whose stored gamma is not 1."""
    def net():
        made = conv_t()()
        made[1].weight.data.fill_(2.0)
        return made
    return conv_g(scale=scale), net


def shuffled(X, y):
    order = np.random.default_rng(1).permutation(len(X))
    return X[order], y[order]


def labels_shuffled(X, y):
    return X, np.roll(y, 1)


class Channels:
    """Flattens (rows, channels, height, width) with channels last."""

    def __new__(cls, nn):
        class Flat(nn.Module):
            def forward(self, x):
                return x.permute(0, 2, 3, 1).flatten(1)
        return Flat()


def recurrent(kind, **options):
    """Gluon's layer, on sequences."""
    def make():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn, rnn
        layer = getattr(rnn, kind)(4, layout="NTC", input_size=3, **options)
        net = nn.HybridSequential()
        net.add(layer, nn.Flatten(), nn.Dense(3, in_units=2 * 4 * layer._dir))
        return net
    return make


def recurrent_port(kind, order, **options):
    """torch's layer, with the blocks of its weights in another order."""
    def make():
        import torch
        from torch import nn

        class Port(getattr(nn, kind)):
            def forward(self, x):
                own = self._flat_weights
                self._flat_weights = [torch.cat([
                    w.chunk(len(order))[k] for k in order]) for w in own]
                y, _ = super().forward(x)
                self._flat_weights = own
                return y
        layer = Port(3, 4, batch_first=True, **options)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(
            2 * 4 * (1 + layer.bidirectional), 3))
    return make


def permuted_values(order):
    """torch's layer, whose values are blocks in another order."""
    def make():
        import torch
        torch.manual_seed(0)
        net = recurrent_port("LSTM", range(4))()
        for p in net[0].parameters():
            p.data = torch.cat([p.data.chunk(4)[k] for k in order])
        return net
    return make


def one_cell():
    """Gluon's cell, one step of it."""
    with mgpu.using_backend("mxnet"):
        from mxnet.gluon import nn, rnn

    class Net(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            self.cell = rnn.LSTMCell(5, input_size=6)
            self.head = nn.Dense(3, in_units=5)

        def hybrid_forward(self, F, x):
            zero = 0 * F.slice_axis(x, axis=1, begin=0, end=5)
            return self.head(self.cell(x, [zero, zero])[0])
    return Net()


def cell_port():
    """As a sum of forget, input, output gates and new value."""
    import torch
    from torch import nn

    class Cell(nn.LSTMCell):
        def forward(self, x):
            y = x @ self.weight_ih.T + self.bias_ih + self.bias_hh
            _, i, o, new = y.chunk(4, 1)
            return o.sigmoid() * (i.sigmoid() * new.tanh()).tanh()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = Cell(6, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.cell(x))
    torch.manual_seed(0)
    return Net()


def gru_port(how):
    def make():
        from ports.nets import Node
        from ports.torch_side import HandGRU
        from torch import nn
        return nn.Sequential(
            HandGRU(3, Node("", "gru", (), {
                "hidden": 4, "inputs_": 3, "how": how})),
            nn.Flatten(), nn.Linear(8, 3))
    return make


def three(swapped=False):
    """Three dense layers, two of one shape, and those two exchanged."""
    def port():
        made = torch_(lambda nn: [
            nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(),
            nn.Linear(6, 3)], seed=1)()
        if swapped:
            one, two = ({n: v.clone() for n, v in made[i].state_dict().items()}
                        for i in (0, 2))
            made[0].load_state_dict(two)
            made[2].load_state_dict(one)
        return made
    return port


def of_torch(make):
    """The Gluon network with `three`'s values."""
    net, values = make(), three()().state_dict()
    with mgpu.using_backend("mxnet"):
        net.initialize()
        for (_, p), v in zip(net.collect_params().items(), values.values()):
            p.set_data(mgpu.put(v.numpy(), mgpu.cpu()))
    return net


def three_g():
    return gluon(lambda nn: [
        nn.Dense(6, in_units=6, activation="relu"),
        nn.Dense(6, in_units=6, activation="tanh"),
        nn.Dense(3, in_units=6)])()


def reordered_t():
    """`dense_t`, the last layer registered first."""
    from torch import nn

    class Port(nn.Module):
        def __init__(self):
            super().__init__()
            self.b, self.a = nn.Linear(5, 3), nn.Linear(6, 5)

        def forward(self, x):
            return self.b(self.a(x).relu())
    return Port()


def frozen(activation="ReLU"):
    net = dense_t(activation=activation)()
    net[0].bias.requires_grad_(False)
    return net


def frozen_g():
    """Its biases are zero: a ReLU's kink is near, and not at fault."""
    net = dense_g()()
    net[0].weight.grad_req = "null"
    return net


def out_of_range():
    X, y = ROWS[0]
    y = y.copy()
    y[[1, 4]] = -1
    return [(X, y)]


SGD_WD = {"learning_rate": 0.125, "wd": 0.125}
BARE = {"1.gamma": 0.0, "1.beta": 0.0, "0.bias": 0.0, "5.bias": 0.0}

#: name: (cause, plant); ``plant(patch)`` -> a, b, options of compare
def steps(port, batches=ROWS, **options):
    """A loop of Gluon's with `options`, and one of PyTorch's with `port`;
    rates and options that float32 holds, for MXNet rounds them."""
    def plant(patch):
        sides = (dense_g(lambda nn: nn.Dropout(0.5)),
                 dense_t(lambda nn: nn.Dropout(0.5)))
        return *sides, batches, {
            "step_a": gluon_step(learning_rate=0.125, **options),
            "step_b": torch_step(lr=0.125, **port)}
    return plant


def halving(optimizer):
    import torch
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def gluons_halving():
    import mxnet as mx
    return mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.125)


#: numbers that float32 has rounded
RATIOS = (np.arange(1.0, 7.0)[None] / 7).astype("float32").astype(float)

FAULTS = {
    # in the user's own steps
    "eval mode": ("training mode", steps({"mode": "eval"})),
    "no clipping": ("clipping", steps({}, clip=0.01)),
    "another norm": ("clipping", steps({"clip": 0.02}, clip=0.01)),
    "clips scaled gradients": ("clipping", steps(
        {"clip": 0.01, "scaler": 64.0, "unscale": False}, clip=0.01)),
    "schedule ahead": ("schedule", steps(
        {"schedule": halving, "before": True}, schedule=gluons_halving)),
    "no schedule": ("schedule", steps({}, schedule=gluons_halving)),
    "not divided by the parts": ("gradient scale", steps(
        {"parts": 3, "divide": False}, [tuple(x[:6] for x in ROWS[0])])),
    "two updates": ("updates in a step", steps({"updates": 2})),
    "no update": ("left out of the update", steps({"updates": 0})),
    "no decay in the step": ("optimizer options", steps({}, wd=0.0625)),
    "relu before batch norm": ("order of layers", lambda patch: (
        conv_g(), torch_(lambda nn: [
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.BatchNorm2d(4),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]),
        IMAGES, {})),
    # what is not trained
    "table of positions": ("constant", lambda patch: (
        in_gluon({"pe": np.ones((2, 6))}), in_torch({"pe": np.eye(2, 6)}),
        [(np.stack([X, X], 1), y) for X, y in ROWS], {})),
    "a factor for a divisor": ("constant in float32", lambda patch: (
        in_gluon({"s": RATIOS}, use="broadcast_div"), in_torch(
            {"s": (1 / RATIOS).astype("float32").astype(float)}, use="mul"),
        [(np.stack([X, X], 1), y) for X, y in ROWS], {})),
    "frozen table": ("constant", lambda patch: (
        in_gluon({"pe": np.ones((2, 6))}, freeze=True),
        in_torch({"pe": np.eye(2, 6)}, "frozen", freeze=True),
        [(np.stack([X, X], 1), y) for X, y in ROWS], {"strict": True})),
    "AdamW in the step": ("coupled weight decay", steps(
        {"optimizer": "AdamW", "weight_decay": 0.125}, optimizer="adam",
        wd=0.125)),
    "AdamW's own decay in the step": ("optimizer formula", steps(
        {"optimizer": "AdamW"}, optimizer="adam")),
    "epsilon in the step": ("optimizer options", steps(
        {"optimizer": "Adam", "eps": 1e-7}, optimizer="adam")),
    "dampening in the step": ("optimizer options", steps(
        {"momentum": 0.5, "dampening": 0.5},
        # rows whose inverse float32 holds
        [tuple(x[:4] for x in batch) for batch in ROWS], momentum=0.5)),
    # batch norm
    "unbiased variance": ("unbiased variance", lambda patch: (
        conv_g(momentum=0.875), conv_t(momentum=0.125), IMAGES,
        {"native": True})),
    "unbiased in a": ("unbiased variance", lambda patch: (
        Side(conv_t(), native=True), Side(conv_t(), native=False), IMAGES,
        {})),
    "momentum": ("statistics momentum", lambda patch: (
        conv_g(momentum=0.9), conv_t(momentum=0.9), IMAGES, {})),
    "cumulative statistics": ("cumulative statistics", lambda patch: (
        conv_g(momentum=0.9), conv_t(momentum=None), IMAGES, {})),
    "cumulative statistics in a": ("cumulative statistics", lambda patch: (
        Side(conv_t(momentum=None), native=True),
        Side(conv_t(momentum=0.5), native=True), IMAGES, {})),
    "statistics frozen": ("statistics updates", lambda patch: (
        still(patch) or conv_g(), conv_t(), IMAGES, {})),
    "frozen features": ("statistics updates", lambda patch: (
        features("mxnet"), features("torch"), ROWS, {})),
    "frozen features in b": ("statistics updates", lambda patch: (
        features("torch"), features("mxnet"), ROWS, {})),
    "epsilon": ("normalisation epsilon", lambda patch: (
        conv_g(), conv_t(eps=1e-3), IMAGES, {})),
    "epsilon in a, 3 devices": ("normalisation epsilon", lambda patch: (
        conv_g(epsilon=1e-3), conv_t(), IMAGES, {"devices": 3})),
    "layer norm epsilon": ("normalisation epsilon", lambda patch: (
        dense_g(lambda nn: nn.LayerNorm(in_channels=5)),
        dense_t(lambda nn: nn.LayerNorm(5, eps=1e-3)), ROWS, {})),
    "fix_gamma": ("fix_gamma", lambda patch: (
        *fixed_gamma(patch, False), IMAGES, {"weights": "b"})),
    "fix_gamma, gamma still 1": ("fix_gamma", lambda patch: (
        conv_g(scale=False), conv_t(), IMAGES, {})),
    "policy": ("batch-norm policy", lambda patch: (
        conv_g(), Side(conv_t(), batch_norm="average"), IMAGES,
        {"devices": 2})),
    "1 and 2 devices": ("batch-norm policy", lambda patch: (
        Side(conv_g(), devices=1), Side(conv_t(), devices=2), IMAGES, {})),
    "global statistics": ("batch-norm mode", lambda patch: (
        conv_g(use_global_stats=True), conv_t(), IMAGES, {})),
    # other layers
    "window in the padding": ("windows in the padding", lambda patch: (
        *image_net(lambda nn: [
            nn.Conv2D(4, 2, in_channels=2), nn.AvgPool2D(
                2, 2, 1, ceil_mode=True), nn.GlobalAvgPool2D()],
            lambda nn: [nn.Conv2d(2, 4, 2), nn.AvgPool2d(
                2, 2, 1, ceil_mode=True), nn.AdaptiveAvgPool2d(1)], 4),
        IMAGES, {})),
    "ceil_mode": ("pooling ceil_mode", lambda patch: (
        *image_net(lambda nn: [
            nn.Conv2D(4, 2, in_channels=2), nn.MaxPool2D(
                2, 2, ceil_mode=True), nn.GlobalAvgPool2D()],
            lambda nn: [nn.Conv2d(2, 4, 2), nn.MaxPool2d(2, 2),
                        nn.AdaptiveAvgPool2d(1)], 4), IMAGES, {})),
    "count_include_pad": ("count_include_pad", lambda patch: (
        *image_net(lambda nn: [
            nn.Conv2D(4, 3, in_channels=2),
            nn.AvgPool2D(2, 2, 1, count_include_pad=False)],
            lambda nn: [nn.Conv2d(2, 4, 3), nn.AvgPool2d(2, 2, 1)], 64),
        IMAGES, {})),
    "padding of a convolution": ("layer options", lambda patch: (
        *image_net(lambda nn: [
            nn.Conv2D(4, 3, padding=1, in_channels=2), nn.GlobalAvgPool2D()],
            lambda nn: [nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1)], 4),
        IMAGES, {})),
    "flatten order": ("dense flatten", lambda patch: (
        gluon(lambda nn: [nn.Conv2D(4, 7, in_channels=2), nn.Flatten(),
                          nn.Dense(3, in_units=16)]),
        torch_(lambda nn: [nn.Conv2d(2, 4, 7), Channels(nn),
                           nn.Linear(16, 3)]), IMAGES, {})),
    "flatten": ("dense flatten", lambda patch: (
        gluon(lambda nn: [nn.Dense(5, in_units=6), nn.Dense(1, in_units=5)]),
        torch_(lambda nn: [nn.Unflatten(1, (1, 6)), nn.Linear(6, 5),
                           nn.Linear(5, 1)]),
        [(X, y[:, :1]) for X, y in TARGETS], {"loss": losses.L2Loss()})),
    "missing activation": ("activation", lambda patch: (
        dense_g(), dense_t(activation=None), ROWS, {})),
    "slope": ("activation", lambda patch: (
        dense_g(lambda nn: nn.LeakyReLU(0.25), activation=None),
        dense_t(lambda nn: nn.LeakyReLU(0.125), activation=None),
        ROWS, {})),
    "gelu": ("activation", lambda patch: (
        dense_g(lambda nn: nn.GELU(), activation=None),
        dense_t(lambda nn: nn.GELU(approximate="tanh"), activation=None),
        # where the two part by more than MXNet's erf is off, about 1e-7
        [(20 * X, y) for X, y in ROWS], {})),
    "selu": ("SELU's gradient", lambda patch: (
        dense_g(lambda nn: nn.SELU(), activation=None),
        dense_t(lambda nn: nn.SELU(), activation=None), ROWS, {})),
    "softmax axis": ("softmax axis", lambda patch: (
        dense_g(lambda nn: nn.HybridLambda(
            lambda F, x: F.softmax(x, axis=1)), activation=None),
        dense_t(lambda nn: nn.Softmax(0), activation=None), ROWS, {})),
    "twice a layer": ("constant factor", lambda patch: (
        dense_g(), dense_t(lambda nn: times(nn, 2)), ROWS, {})),
    "twice what is negative": ("constant factor", lambda patch: (
        dense_t(lambda nn: nn.LogSigmoid(), activation=None),
        dense_t(lambda nn: nn.LogSigmoid(), lambda nn: times(nn, 2),
                activation=None), ROWS, {})),
    "transposed weight": ("transposed weight", lambda patch: (
        gluon(lambda nn: [nn.Dense(6, in_units=6), nn.Dense(3, in_units=6)]),
        torch_(lambda nn: [transposed(nn), nn.Linear(6, 3)]), ROWS, {})),
    "another pooling": ("kind of pooling", lambda patch: (
        *image_net(lambda nn: [nn.Conv2D(4, 3, in_channels=2),
                               nn.MaxPool2D(2)],
                   lambda nn: [nn.Conv2d(2, 4, 3), nn.AvgPool2d(2)], 36),
        IMAGES, {})),
    "global pooling": ("kind of pooling", lambda patch: (
        *image_net(lambda nn: [nn.Conv2D(4, 3, in_channels=2),
                               nn.GlobalAvgPool2D()],
                   lambda nn: [nn.Conv2d(2, 4, 3), nn.AdaptiveMaxPool2d(1)],
                   4), IMAGES, {})),
    "a layer in float32": ("dtype", lambda patch: (
        dense_g(), single("float"), ROWS, {})),
    "a layer in float16, then tanh": ("dtype", lambda patch: (
        dense_g(activation="tanh"), single("half", "Tanh"), ROWS, {})),
    "in bfloat16 within float32": ("dtype", lambda patch: (
        dense_g(), single("bfloat16"), ROWS, {"dtype": "float32"})),
    "a cast between layers, in a": ("dtype", lambda patch: (
        dense_t(cast), dense_t(), ROWS, {})),
    "the loss in float32": ("dtype", lambda patch: (
        Side(dense_g(), loss=gluon_cross_entropy), Side(
            dense_t(), loss=lambda output, y: cross_entropy(
                reduction="none")(output.float(), y).double()), ROWS, {})),
    "attention scale": ("attention scale", lambda patch: (
        attention(0.5), attention(1.0), ATTENDED, {})),
    "attention scale beside a mask": ("attention scale", lambda patch: (
        of_heads(0.5, mask=1e18), of_heads(0.75, mask=1e18), ATTENDED, {})),
    "attention scale, heads among rows": ("attention scale", lambda patch: (
        of_heads(0.5, True), of_heads(1.0), ATTENDED, {})),
    "attention scale, heads among rows of b": ("attention scale",
                                               lambda patch: (
        of_heads(0.5, mask=1e9), of_heads(0.25, True, 1e9), ATTENDED, {})),
    "no mask, heads among rows": ("attention mask", lambda patch: (
        of_heads(0.5, True, 1e9), of_heads(0.5), ATTENDED, {})),
    "no mask": ("attention mask", lambda patch: (
        attention(0.5, mask=1e9), attention(0.5), ATTENDED, {})),
    "a mask of 8": ("attention mask", lambda patch: (
        attention(0.5), attention(0.5, mask=8.0), ATTENDED, {})),
    "softmax along an axis of one": ("softmax axis", lambda patch: (
        one_score(1), one_score(2), ATTENDED, {})),
    "softmax along another axis, of one": ("softmax axis", lambda patch: (
        one_score(1, True), one_score(2), ATTENDED, {})),
    "a mean for a maximum": ("kind of pooling", lambda patch: (
        attention(0.5), attention(0.5, "amax"), ATTENDED, {})),
    "no skip": ("residual connection", lambda patch: (
        attention(0.5), attention(0.5, skip=None), ATTENDED, {})),
    "another skip": ("residual connection", lambda patch: (
        attention(0.5), attention(0.5, skip="v"), ATTENDED, {})),
    "norm before the sum": ("order of layers", lambda patch: (
        attention(0.5), attention(0.5, skip="behind"), ATTENDED, {})),
    "norm over all axes": ("normalisation axis", lambda patch: (
        attention(0.5), attention(0.5, wide=True), ATTENDED, {})),
    "columns": ("order of columns", lambda patch: (
        attention(0.5), attention(0.5, turned=True), ATTENDED, {})),
    "heads": ("order of columns", lambda patch: (
        joined_heads((0, 1, 2, 3)), joined_heads((0, 2, 1, 3)),
        [(X, np.random.default_rng(0).normal(size=(N, 240)))
         for X, _ in IMAGES],
        {"loss": losses.L2Loss()})),
    "groups": ("layer options", lambda patch: (
        *image_net(lambda nn: [nn.Conv2D(4, 7, in_channels=2),
                               nn.GroupNorm(4)],
                   lambda nn: [nn.Conv2d(2, 4, 7), nn.GroupNorm(2, 4)], 16),
        IMAGES, {})),
    "alpha": ("activation", lambda patch: (
        dense_g(lambda nn: nn.ELU(1.0), activation=None),
        dense_t(lambda nn: nn.ELU(0.5), activation=None), ROWS, {})),
    "bilinear": ("interpolation", lambda patch: (
        *enlarged(lambda F, x: F.UpSampling(
            x, scale=2, sample_type="nearest"), mode="bilinear"),
        IMAGES, {})),
    "align_corners": ("interpolation", lambda patch: (
        *enlarged(lambda F, x: F.contrib.BilinearResize2D(
            x, height=4, width=4), mode="bilinear"), IMAGES, {})),
    "align_corners of a layer": ("interpolation", lambda patch: (
        enlarged(None, mode="bilinear", layer=True)[1], enlarged(
            None, mode="bilinear", layer=True, align_corners=True)[1],
        IMAGES, {})),
    "padding mode": ("layer options", lambda patch: (
        *image_net(lambda nn: [nn.Conv2D(4, 3, padding=1, in_channels=2)],
                   lambda nn: [nn.Conv2d(2, 4, 3, padding=1,
                                         padding_mode="reflect")], 256),
        IMAGES, {})),
    "gates of an LSTM": ("permuted gates", lambda patch: (
        recurrent("LSTM"), recurrent_port("LSTM", (0, 2, 1, 3)), SERIES,
        {"dtype": "float32"})),
    "gates of a GRU in a": ("permuted gates", lambda patch: (
        recurrent_port("GRU", (1, 0, 2)), recurrent("GRU"), SERIES,
        {"dtype": "float32"})),
    "gates of stacked layers": ("permuted gates", lambda patch: (
        recurrent("LSTM", num_layers=2, bidirectional=True), recurrent_port(
            "LSTM", (1, 0, 3, 2), num_layers=2, bidirectional=True), SERIES,
        {"dtype": "float32"})),
    "gates of a cell": ("permuted gates", lambda patch: (
        one_cell, cell_port, ROWS, {})),
    "gates of the values": ("permuted gates", lambda patch: (
        permuted_values((0, 1, 2, 3)), permuted_values((0, 2, 1, 3)),
        SERIES, {"weights": "own"})),
    "reset gate": ("GRU variant", lambda patch: (
        recurrent("GRU"), gru_port("before"), SERIES, {"dtype": "float32"})),
    "values of another layer": ("order of parameters", lambda patch: (
        three_g, three(), ROWS, {"map": {
            "0.weight": "2.weight", "0.bias": "2.bias",
            "1.weight": "0.weight", "1.bias": "0.bias"}})),
    "padding_idx": ("padding_idx", lambda patch: (
        gluon(lambda nn: [nn.Embedding(9, 4), nn.Flatten(),
                          nn.Dense(3, in_units=12)]),
        torch_(lambda nn: [nn.Embedding(9, 4, padding_idx=2), nn.Flatten(),
                           nn.Linear(12, 3)]),
        [(RNG.integers(0, 9, (N, 3)), y) for _, y in ROWS], {})),
    "maximum": ("derivative at a kink", lambda patch: (
        dense_g(), dense_t(half_at_zero, activation=None), [
            (x * (np.arange(len(x)) > 1)[:, None], y) for x, y in ROWS], {})),
    "maximum in a": ("derivative at a kink", lambda patch: (
        dense_t(half_at_zero, activation=None), dense_g(), [
            (0 * x, y) for x, y in ROWS], {"weights": "b"})),
    "dropout masks": ("dropout masks", lambda patch: (
        other_masks(patch) or dense_g(lambda nn: nn.Dropout(0.5),
                                      activation=None),
        dense_t(lambda nn: nn.Dropout(0.5), activation=None), ROWS, {})),
    "dropout rate": ("dropout rate", lambda patch: (
        dense_g(lambda nn: nn.Dropout(0.5)),
        dense_t(lambda nn: nn.Dropout(0.25)), ROWS, {})),
    # data
    "data order": ("data order", lambda patch: (
        conv_g(), Side(conv_t(), prepare=shuffled), IMAGES, {})),
    "labels shuffled": ("data order", lambda patch: (
        dense_g(), Side(dense_t(), prepare=labels_shuffled), ROWS, {})),
    "preparation": ("input preparation", lambda patch: (
        conv_g(), Side(conv_t(), prepare=lambda X, y: (255 * X, y)), IMAGES,
        {})),
    "label clipping": ("labels out of range", lambda patch: (
        Side(dense_g(), loss=gluon_cross_entropy),
        Side(dense_t(), loss=cross_entropy(
            reduction="none", ignore_index=-1)), out_of_range(), {})),
    "label smoothing": ("label smoothing", lambda patch: (
        Side(dense_g(), loss=gluon_cross_entropy), Side(dense_t(),
        loss=cross_entropy(reduction="none", label_smoothing=0.1)), ROWS,
        {})),
    "class weights": ("class weights", lambda patch: (
        Side(dense_g(), loss=gluon_cross_entropy),
        Side(dense_t(), loss=weighted), ROWS, {})),
    "shifted labels": ("shifted labels", lambda patch: (
        Side(dense_g(), loss=gluon_cross_entropy), Side(
            dense_t(), loss=lambda output, y: cross_entropy(reduction="none")(
                output, y.roll(1))), ROWS, {})),
    "ignored class": ("ignore_index", lambda patch: (
        Side(dense_g(), loss=gluon_cross_entropy),
        Side(dense_t(), loss=cross_entropy(
            reduction="none", ignore_index=1)), ROWS, {})),
    "softmax twice": ("softmax in the loss", lambda patch: (
        Side(dense_g(), loss=gluon_cross_entropy), Side(
            dense_t(), loss=lambda output, y: cross_entropy(
                reduction="none")(output.softmax(1), y)), ROWS, {})),
    "L1 for L2": ("loss formula", lambda patch: (
        dense_g(), Side(dense_t(), loss=losses.L1Loss()), TARGETS,
        {"loss": losses.L2Loss()})),
    "twice the entropy": ("loss weight", lambda patch: (
        Side(dense_g(), loss=gluon_cross_entropy), Side(
            dense_t(), loss=lambda output, y: 2 * cross_entropy(
                reduction="none")(output, y)), ROWS, {})),
    # losses
    "L2 loss": ("L2 loss", lambda patch: (
        dense_g(), Side(dense_t(), loss=mean_square), TARGETS,
        {"loss": losses.L2Loss()})),
    "Huber": ("loss weight", lambda patch: (
        Side(dense_g(), loss=losses.HuberLoss(rho=2)), Side(
            dense_t(), loss=huber), [(X, 4 * y) for X, y in TARGETS], {})),
    "mean": ("loss reduction", lambda patch: (
        dense_g(), Side(dense_t(), loss=cross_entropy()), ROWS, {})),
    "mean, spread": ("loss reduction", lambda patch: (
        dense_g(), Side(dense_t(), loss=losses.per_example(
            lambda o, y: cross_entropy()(o, y))), ROWS, {})),
    "mean square, one number": ("loss reduction", lambda patch: (
        dense_g(), Side(dense_t(), loss=lambda o, y: ((o - y) ** 2).mean()),
        TARGETS, {"loss": losses.L2Loss()})),
    "weight": ("loss weight", lambda patch: (
        dense_g(), Side(dense_t(), loss=losses.SoftmaxCELoss(weight=0.75)),
        ROWS, {})),
    # devices
    "mean over devices": ("sum or mean over devices", lambda patch: (
        patch_sum(patch, "torch", average) or dense_g(), dense_t(), ROWS,
        {"devices": 3})),
    "aliased": ("aliased replicas", lambda patch: (
        patch_sum(patch, "torch", aliased) or dense_g(), dense_t(), ROWS,
        {"devices": 3})),
    # 2 devices: 2^(k-1) is k, and nothing can tell the two apart
    "aliased, 2 devices": ("aliased replicas", lambda patch: (
        patch_sum(patch, "torch", aliased) or dense_g(), dense_t(), ROWS,
        {"devices": 2})),
    "no broadcast": ("missing broadcast", lambda patch: (
        patch_sum(patch, "torch", no_broadcast) or dense_g(), dense_t(),
        ROWS, {"devices": 3})),
    "device left out": ("device left out", lambda patch: (
        patch_sum(patch, "torch", left_out) or dense_g(), dense_t(), ROWS,
        {"devices": 4})),
    # gradients
    "stale": ("stale gradient", lambda patch: (
        patch_sum(patch, "torch", stale_once()) or dense_g(), dense_t(),
        ROWS, {"devices": 2})),
    "accumulated": ("stale gradient", lambda patch: (
        patch_sum(patch, "torch", accumulated()) or dense_g(), dense_t(),
        ROWS, {})),
    "accumulated in a": ("stale gradient", lambda patch: (
        accumulating, dense_t(), ROWS, {})),
    "frozen": ("frozen parameter", lambda patch: (
        dense_g(), frozen, ROWS, {})),
    "frozen, of zeros": ("frozen parameter", lambda patch: (
        dense_g(), frozen, [(X * (np.arange(N) > 1)[:, None], y)
                            for X, y in ROWS], {})),
    "frozen in a linear network": ("frozen parameter", lambda patch: (
        dense_g(activation=None), lambda: frozen(None), ROWS, {})),
    "frozen in Gluon": ("frozen parameter", lambda patch: (
        frozen_g, dense_t(), ROWS, {})),
    "frozen in Gluon, in b": ("frozen parameter", lambda patch: (
        dense_t(), frozen_g, ROWS, {"weights": "b"})),
    "scaled": ("gradient scale", lambda patch: (
        patch_sum(patch, "torch", halved) or dense_g(), dense_t(), ROWS,
        {})),
    "mean over devices, against 1": (
        "sum or mean over devices", lambda patch: (
            patch_sum(patch, "torch", average) or Side(
                dense_g(), devices=1), Side(dense_t(), devices=3), ROWS,
            {})),
    # updates
    "Adam": ("Adam epsilon", lambda patch: (
        dense_g(), Side(dense_t(), semantics="torch"), ROWS,
        {"optimizer": "adam", "optimizer_params": {}})),
    "Adam, torch alone": ("Adam epsilon", lambda patch: (
        Side(dense_t(), semantics="torch"), dense_t(), ROWS,
        {"optimizer": "adam", "optimizer_params": {}})),
    "velocity": ("rate inside the velocity", lambda patch: (
        Side(dense_g(), lr_scheduler=rate), Side(
            dense_t(), lr_scheduler=rate, semantics="torch"), ROWS,
        {"optimizer_params": {"momentum": 0.5}})),
    "decay of biases": ("weight decay on biases", lambda patch: (
        conv_g(), Side(conv_t(), wd_mult=BARE), IMAGES,
        {"optimizer_params": SGD_WD})),
    "decay of biases in b": ("weight decay on biases", lambda patch: (
        Side(conv_g(), wd_mult=BARE), conv_t(), IMAGES,
        {"optimizer_params": SGD_WD})),
    "decoupled": ("coupled weight decay", lambda patch: (
        dense_g(), Side(dense_t(), optimizer="adamw"), ROWS,
        {"optimizer": "adam", "optimizer_params": SGD_WD})),
    "short batch": ("batch divisor", lambda patch: (
        dense_g(), Side(dense_t(), divisor=N), FULL_THEN_SHORT,
        {"optimizer_params": SLOW})),
    "learning rate": ("learning rate", lambda patch: (
        dense_g(), Side(dense_t(), optimizer_params={
            "learning_rate": 0.25}), ROWS, {"optimizer_params": SLOW})),
    "float32 rate": ("float32 hyper-parameters", lambda patch: (
        dense_g(), Side(dense_t(), optimizer_params={
            "learning_rate": float(np.float32(0.1))}), ROWS,
        {"optimizer_params": {"learning_rate": 0.1}})),
    "multiplier": ("multipliers", lambda patch: (
        Side(dense_g(), lr_mult={"0.weight": 2.0}), dense_t(), ROWS,
        {"optimizer_params": SLOW})),
    "beta": ("optimizer options", lambda patch: (
        dense_g(), Side(dense_t(), optimizer_params={"beta1": 0.5}), ROWS,
        {"optimizer": "adam", "optimizer_params": {}})),
    "RMSProp": ("optimizer formula", lambda patch: (
        dense_g(), Side(dense_t(), semantics="torch", optimizer_params={
            "alpha": 0.9, "lr": 0.001}), ROWS,
        {"optimizer": "rmsprop", "optimizer_params": {}})),
    "NAG with decay": ("optimizer formula", lambda patch: (
        dense_g(), Side(dense_t(), semantics="torch"), ROWS,
        {"optimizer": "nag", "optimizer_params": {
            **SGD_WD, "momentum": 0.5}})),
    "another optimiser": ("optimizer formula", lambda patch: (
        dense_g(), Side(dense_t(), optimizer="adam"), ROWS,
        {"optimizer_params": SLOW})),
    "not divided": ("batch divisor", lambda patch: (
        dense_g(), Side(dense_t(), divisor=1), ROWS,
        {"optimizer_params": SLOW})),
    "order of Nadam": ("order of parameters", lambda patch: (
        dense_g(), reordered_t, ROWS, {
            "optimizer": "nadam", "optimizer_params": SLOW})),
    # the start
    "values by position": ("order of parameters", lambda patch: (
        of_torch(three_g), three(swapped=True), ROWS, {"weights": "own"})),
    "initialiser": ("initialiser", lambda patch: (
        conv_g(), conv_t(), IMAGES, {"weights": "own"})),
    "biases": ("initialiser", lambda patch: (
        Side(conv_g(), init="xavier"), conv_t(), IMAGES,
        {"weights": "own"})),
    "other draw": ("initial draw", lambda patch: (
        Side(dense_g(), init="xavier", seed=1),
        Side(dense_t(), init="xavier", seed=2), ROWS, {"weights": "own"})),
}
#: the right cause is among the first three, not the first
NOT_FIRST = {"aliased, 2 devices"}


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
    if name in NOT_FIRST:
        assert cause in named[1:3]
    else:
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
    def make():
        import torch
        from torch import nn

        class Port(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 5)
                self.third = nn.LeakyReLU(slope, inplace=True) if slope \
                    else nn.LayerNorm(5, eps=1e-3)
                self.c = nn.Linear(5, 3)

            def forward(self, x):
                act = function(torch)
                return self.c(self.third(act(self.b(act(self.a(x))))))
        return Port()
    return make


def fused(activation, slope=None):
    return gluon(lambda nn: [
        nn.Dense(5, in_units=6, activation=activation),
        nn.Dense(5, in_units=5, activation=activation),
        nn.LeakyReLU(slope) if slope else nn.LayerNorm(in_channels=5),
        nn.Dense(3, in_units=5)])


@pytest.mark.parametrize("activation, function, path, words", [
    ("relu", lambda t: t.nn.functional.relu, "2", "epsilon 1e-05 on a"),
    ("relu", lambda t: lambda x: x.relu_(), "2", "epsilon 1e-05 on a"),
    ("softrelu", lambda t: t.nn.functional.softplus, "2", "epsilon 1e-05"),
    ("tanh", lambda t: t.tanh, "2", "epsilon 1e-05 on a"),
    ("relu", lambda t: t.tanh, "0", "applies relu, b (torch) tanh"),
    ("relu", lambda t: lambda x: x, "0", "b (torch) no activation")],
    ids=["function", "in place", "softplus", "tanh", "another", "none"])
def test_functions_between_layers_are_seen(activation, function, path, words):
    """An activation inside a layer of Gluon's, a function on torch."""
    result = compared(fused(activation), between(function), ROWS, {})
    assert result.location["a"]["path"] == path
    assert words in str(result.causes[0]), result


def calls(function):
    """On each engine, a network that calls ``function(F)`` between layers."""
    def on_gluon():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn

        class Net(nn.HybridBlock):
            def __init__(self):
                super().__init__()
                self.a = nn.Conv2D(4, 3, in_channels=2)
                self.b = nn.Dense(3, in_units=144)

            def hybrid_forward(self, F, x):
                return self.b(function(F)(self.a(x)))
        return Net()

    def on_torch():
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Conv2d(2, 4, 3), nn.Linear(144, 3)

            def forward(self, x):
                return self.b(function(torch)(self.a(x)).flatten(1))
        return Net()
    return {"mxnet": on_gluon, "torch": on_torch}


@pytest.mark.parametrize("one, other, kind, words", [
    (lambda F: lambda x: F.LeakyReLU(x, act_type="leaky", slope=0.125),
     lambda t: lambda x: t.nn.functional.leaky_relu(x, 0.5),
     "leaky_relu", "slope 0.125 on a (mxnet), 0.5 on b (torch)"),
    (lambda F: lambda x: F.LeakyReLU(x, act_type="elu", slope=0.5),
     lambda t: lambda x: t.nn.functional.elu(x),
     "elu", "alpha 0.5 on a (mxnet), 1 on b (torch)"),
    (lambda F: lambda x: F.LeakyReLU(x, act_type="gelu"),
     lambda t: lambda x: t.nn.functional.gelu(x, approximate="tanh"),
     "gelu", "applies gelu, b (torch) gelu with tanh"),
    (lambda F: lambda x: F.softmax(x, axis=1),
     lambda t: lambda x: t.softmax(x, 3),
     "softmax", "along axis 1 on a (mxnet), 3 on b (torch)"),
    (lambda F: lambda x: F.Pooling(x, kernel=(3, 3), pool_type="avg",
                                   pad=(1, 1)),
     lambda t: lambda x: t.nn.functional.avg_pool2d(
         x, 3, 1, padding=1, count_include_pad=False),
     "avg_pool", "count in the mean on a (mxnet)"),
    (lambda F: lambda x: F.Pooling(x, kernel=(3, 3), pool_type="max",
                                   pad=(1, 1)),
     lambda t: lambda x: t.nn.functional.avg_pool2d(x, 3, 1, padding=1),
     "max_pool", "max_pool on a (mxnet) and avg_pool on b"),
    (lambda F: lambda x: F.contrib.BilinearResize2D(
        F.slice(x, (0, 0, 0, 0), (None, None, 3, 3)), height=6, width=6),
     lambda t: lambda x: t.nn.functional.interpolate(
         x[:, :, :3, :3], size=6, mode="bilinear"),
     "upsample", "align_corners=True on a (mxnet), bilinear with"),
    (lambda F: lambda x: F.clip(32 * x, 0, 6),
     lambda t: lambda x: (32 * x).relu(),
     "relu6", "applies relu6, b (torch) relu"),
    (lambda F: lambda x: F.clip(32 * x, -1, 6),
     lambda t: lambda x: t.nn.functional.hardtanh(32 * x, -1, 2),
     "clip", "high is 6.0 on a (mxnet) and 2.0 on b (torch)")],
    ids=["slope", "alpha", "gelu", "axis", "padding", "kind", "corners",
         "relu6", "clip"])
@pytest.mark.parametrize("swapped", (False, True))
def test_the_options_of_functions_between_layers_are_known(
        one, other, kind, words, swapped):
    sides = [calls(one)["mxnet"], calls(other)["torch"]]
    if swapped:
        sides.reverse()
    # so large that MXNet's float32 in GELU is small against the fault
    images = [(16 * X, y) for X, y in IMAGES]
    result = compared(*sides, images, {})
    place = result.location["b" if swapped else "a"]
    assert place["path"] == f"F.{kind} after a", result
    if not swapped:
        assert words in str(result.causes[0]), result
    same = compared(sides[0], sides[0], IMAGES, {})
    assert same.same, same


def test_inputs_that_a_layer_overwrites_are_those_that_it_got():
    result = compared(fused(None, 0.25),
                      between(lambda t: lambda x: x, 0.125), ROWS, {})
    assert (result.location["a"]["path"],
            result.location["inputs_agree"]) == ("2", True)
    assert "slope 0.25 on a" in str(result.causes[0]), result


def test_a_layer_that_returns_its_states_on_one_side_only():
    """torch's recurrent layers always do, Gluon's on request. What comes
    behind them is not blamed on them, nor on the order of equal rows."""
    def gluon_net():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn, rnn
        net = nn.HybridSequential()
        net.add(rnn.GRU(4, layout="NTC", input_size=3), nn.Flatten(),
                nn.Dense(3, activation="tanh", in_units=8))
        return net

    def port(activation):
        def make():
            from torch import nn

            class Port(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.rnn = nn.GRU(3, 4, batch_first=True)
                    self.head = nn.Linear(8, 3)

                def forward(self, x):
                    return activation(self.head(self.rnn(x)[0].flatten(1)))
            return Port()
        return make
    data = [(RNG.normal(size=(N, 2, 3)), y) for _, y in ROWS]
    options = {"dtype": "float32"}      # of MXNet's fused layer
    right = compared(gluon_net, port(lambda x: x.tanh()), data, options)
    assert right.verdict == "same"
    wrong = compared(gluon_net, port(lambda x: x.sigmoid()), data, options)
    assert wrong.location and wrong.location["a"]["path"] == "2", str(wrong)
    assert [c.name for c in wrong.causes] == ["activation"], wrong


def test_what_is_made_of_other_functions_is_not_at_fault():
    """The place is that of the fault behind it, and the only one; also where
    there is a fault before."""
    def right():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn

        class Net(nn.HybridBlock):
            def __init__(self):
                super().__init__()
                self.a, self.b = (nn.Dense(5, in_units=n) for n in (6, 5))
                self.n, self.m = (nn.LayerNorm(in_channels=5) for _ in "nm")
                self.c = nn.Dense(3, in_units=5)

            def hybrid_forward(self, F, x):
                x = self.m(self.a(x))
                x = self.b(x * F.sigmoid(x))
                return self.c(self.n(x * F.clip(x + 3, 0, 6) / 6))
        return Net()

    def port(first, eps):
        def make():
            from torch import nn
            from torch.nn import functional

            class Port(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 5)
                    self.n = nn.LayerNorm(5, eps=eps)
                    self.m = nn.LayerNorm(5, eps=first)
                    self.c = nn.Linear(5, 3)

                def forward(self, x):
                    x = functional.silu(self.m(self.a(x)))
                    return self.c(self.n(functional.hardswish(self.b(x))))
            return Port()
        return make
    result = compared(right, port(1e-5, 1e-3), ROWS, {})
    assert result.location["b"]["path"] == "n", result
    assert result.causes[0].name == "normalisation epsilon"
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


def test_a_trace_of_layers_and_functions_between_them(tmp_path):
    parity.record(between(lambda t: t.tanh), batches=ROWS, file=tmp_path / "a")
    result = parity.compare_trace(tmp_path / "a", fused("relu"))
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
    same, found = (parity.compare(*(
        Side(net, optimizer=name, optimizer_params=options)
        for net, (name, options) in zip(nets, pair)), batches=ROWS[:2])
        for pair in ((own, own), (own, other)))
    assert same.verdict == "same", same
    assert [c.name for c in found.causes] == [cause], found


@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("right", ["gluon", "torch"])
def test_faults_behind_the_first_are_found(right, swapped, devices):
    """Each with its place and its cause, whatever side is right."""
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
        "normalisation epsilon", "optimizer options"], result
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
    def make():
        import torch
        from torch import nn

        class Forked(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.c = (nn.Linear(6, 6) for _ in "abc")
                if dropout:
                    self.first = nn.Dropout(0.5)
                self.second = nn.Dropout(0.25)
                self.out = nn.Linear(6, 3)

            def forward(self, x):
                x = function(torch, self.a(x))
                z = self.first(x) if dropout else x
                return self.out(self.second(self.b(z)) + self.c(x))
        return Forked()
    return make


def test_one_fault_is_one():
    """What a function gives reaches two layers; a dropout layer more moves
    the masks of those behind it."""
    right = forked(lambda torch, x: x.cos())
    for wrong, path in ((forked(lambda torch, x: x.sin()), "b"),
                        (forked(lambda torch, x: x.cos(), True), "b")):
        result = parity.compare(right, wrong, batches=ROWS)
        assert result.location["b"]["path"] == path
        assert result.further == [], result


@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_the_float32_of_mxnet_is_no_further_fault(swapped):
    """It is not looked for where something differs before."""
    one = gluon(lambda nn: [
        nn.Dense(6, in_units=6), nn.BatchNorm(in_channels=6),
        nn.LeakyReLU(0.3), nn.Dense(6, in_units=6), nn.GELU(),
        nn.Dense(3, in_units=6)])
    two = torch_(lambda nn: [
        nn.Linear(6, 6), nn.BatchNorm1d(6, eps=1e-3), nn.LeakyReLU(0.3),
        nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3)])
    result = parity.compare(*[one, two][::-1 if swapped else 1],
                            batches=ROWS)
    assert result.causes[0].name == "normalisation epsilon"
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


def test_summaries_cannot_take_the_place_of_outputs(tmp_path):
    data = [(X[..., :6, :6], y) for X, y in IMAGES]
    parity.record(pictures_g(), batches=data, file=tmp_path / "a")
    result = parity.compare_trace(tmp_path / "a",
                                  pictures_t(eps=1e-3, pool="Avg"))
    assert [c.name for c in result.causes] == ["normalisation epsilon"]
    assert result.further == []


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


def test_enough_faults_come_first():
    assert len(NOT_FIRST) <= 2
    assert {cause for cause, _ in FAULTS.values()} >= {
        name for name in diagnosis.CAUSES if name not in (
            "gradient clipping", "float32 statistics momentum")}


CONTROLS = {
    "conv": lambda: (conv_g(), conv_t(), IMAGES, {"devices": 1}),
    "conv, 2 devices": lambda: (conv_g(), conv_t(), IMAGES, {
        "devices": 2, "optimizer_params": {**SGD_WD, "momentum": 0.5}}),
    "conv, sync": lambda: (conv_g(), conv_t(), IMAGES, {
        "devices": 2, "batch_norm": "sync"}),
    "dyadic native mean": lambda: (
        dense_g(), dense_t(), ROWS, {"native": True}),
    "max pooling": lambda: (*image_net(
        lambda nn: [nn.Conv2D(4, 3, in_channels=2), nn.MaxPool2D(
            2, 2, ceil_mode=True)],
        lambda nn: [nn.Conv2d(2, 4, 3), nn.MaxPool2d(
            2, 2, ceil_mode=True)], 36), IMAGES, {}),
    "dense": lambda: (dense_g(), dense_t(), ROWS, {"devices": 4}),
    "nearest": lambda: (*enlarged(lambda F, x: F.UpSampling(
        x, scale=2, sample_type="nearest")), IMAGES, {}),
    "bilinear": lambda: (
        *enlarged(lambda F, x: F.contrib.BilinearResize2D(
            x, height=4, width=4, align_corners=False), mode="bilinear"),
        IMAGES, {"strict": True}),
    "embedding": lambda: (
        gluon(lambda nn: [nn.Embedding(9, 4), nn.Flatten(),
                          nn.Dense(3, in_units=12)]),
        torch_(lambda nn: [nn.Embedding(9, 4), nn.Flatten(),
                           nn.Linear(12, 3)]),
        [(RNG.integers(0, 9, (N, 3)), y) for _, y in ROWS],
        {"devices": 2, "optimizer": "adagrad", "optimizer_params": {}}),
    "layer norm": lambda: (
        # MXNet keeps this epsilon as float32: one that float32 holds
        dense_g(lambda nn: nn.LayerNorm(epsilon=2 ** -17, in_channels=5)),
        dense_t(lambda nn: nn.LayerNorm(5, eps=2 ** -17)), ROWS,
        {"devices": 2}),
    "dropout": lambda: (
        dense_g(lambda nn: nn.Dropout(0.5)),
        dense_t(lambda nn: nn.Dropout(0.5)), ROWS, {"devices": 3}),
    "short batch": lambda: (dense_g(), dense_t(), FULL_THEN_SHORT, {
        "devices": 2, "optimizer": "nag",
        "optimizer_params": {"momentum": 0.5}}),
    "schedule": lambda: (
        Side(dense_g(), lr_scheduler=rate), Side(
            dense_t(), lr_scheduler=rate), ROWS,
        {"optimizer_params": {"momentum": 0.5}}),
    "float32": lambda: (conv_g(), conv_t(), IMAGES, {"dtype": "float32"}),
    "torch's momentum, one rate": lambda: (
        dense_g(), Side(dense_t(), semantics="torch"), ROWS,
        {"optimizer_params": {"learning_rate": 0.125, "momentum": 0.5}}),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_nothing_is_named_without_a_fault(name):
    result = compared(*CONTROLS[name]())
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
    *[("constant", mode, rate) for mode in (
        "replicate", "reflect", "circular") for rate in (0.0, 0.5)],
    ("first", "last", 0.0)])
def test_zeros_of_padding_are_no_dropped_elements(mode, other, dropout):
    for sides in ((mode, other), (other, mode)):
        result = compared(*(padded(own, dropout) for own in sides), IMAGES,
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


@pytest.mark.parametrize("stage", ("gradient", "weight", "statistic"))
def test_noise_behind_it_has_no_cause(stage, monkeypatch):
    """In the gradients of every tensor, in the weights, in the running
    statistics."""
    def noise(array):
        rng = np.random.default_rng(array.shape[0])
        array += mgpu.get_backend().put(
            rng.normal(0, 1e-3, tuple(array.shape)), array)

    def gradients(columns, right):
        right(columns)
        for column in columns:
            for copy in column:
                noise(copy)
    if stage == "gradient":
        patch_sum(monkeypatch, "torch", gradients)
    else:
        right = mgpu.replicas.Replicas.after_step

        def after_step(self):
            right(self)
            if self.backend.name == "torch":
                for p in (self.params() if stage == "weight"
                          else self.buffers()):
                    if "tracked" not in p.name:
                        for x in p.list_data():
                            noise(x)
        monkeypatch.setattr(mgpu.replicas.Replicas, "after_step",
                            after_step)
    result = compared(conv_g(), conv_t(), IMAGES, {"devices": 2})
    assert result.verdict == "different"
    assert result.first.stage == stage
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


def test_float32_statistics_alone():
    result = compared(
        Side(conv_t(), native=False), Side(conv_t(), native=True),
        IMAGES, {})
    named = [c.name for c in result.causes]
    assert named == ["unbiased variance", "float32 statistics momentum"]


@pytest.mark.parametrize("devices, rows", ((1, N), (2, 6)))
def test_clipped_gradients(devices, rows, monkeypatch):
    """Also where sums and means over equal shards are in one proportion."""
    def clip(columns, right):
        right(columns)
        for column in columns:
            for copy in column:
                copy.clamp_(-0.5, 0.5)
    patch_sum(monkeypatch, "torch", clip)
    result = compared(dense_g(), dense_t(), [
        (X[:rows], y[:rows]) for X, y in ROWS], {"devices": devices})
    assert [c.name for c in result.causes] == ["gradient clipping"]


def test_the_advice_names_layer_and_side():
    result = compared(conv_g(), conv_t(eps=1e-3), IMAGES, {})
    text = str(result.causes[0])
    for part in ("batch_norm 1", "1e-05 on a (mxnet)", "0.001 on b (torch)",
                 "epsilon= in Gluon", "eps= on torch"):
        assert part in text
    assert f"likely cause: {text}" in str(result)


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
