"""Faults for `test_diagnosis`: pairs of networks and how they train, with
the cause that the diagnosis must name; and pairs that train the same."""
import numpy as np

import mgpu
from mgpu.nn import losses
from mgpu.parity import Side
from nets import gluon, gluon_block, torch_block, torch_layer
from nets import torch as torch_
from parity.steps import gluon_step, torch_step

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


DROPS_G, DROPS_T = (dense(lambda nn: nn.Dropout(0.5))
                    for dense in (dense_g, dense_t))


def half_at_zero(nn):
    """ReLU, with a derivative of 1/2 at 0."""
    return torch_layer(lambda x: x.maximum(x.new_zeros(())))


def images_g(layer, kernel=3, pooled=False):
    """A convolution, a layer under test, and a dense layer."""
    return gluon(lambda nn: [
        nn.Conv2D(4, kernel, in_channels=2), layer(nn),
        *[nn.GlobalAvgPool2D()] * pooled, nn.Flatten(), nn.Dense(3)])


def images_t(layer, kernel=3, pooled=False):
    return torch_(lambda nn: [
        nn.Conv2d(2, 4, kernel), layer(nn),
        *[nn.AdaptiveAvgPool2d(1)] * pooled, nn.Flatten(), nn.LazyLinear(3)])


def of_images(layer_g, layer_t, *how):
    return pair(images_g(layer_g, *how), images_t(layer_t, *how), IMAGES)


def enlarge(layer=False, **options):
    """Doubles the size of pictures, by a layer of torch's or a function."""
    def make(nn):
        return nn.Upsample(scale_factor=2, **options) if layer \
            else torch_layer(lambda x: nn.functional.interpolate(
                x, scale_factor=2, **options))
    return make


def repeated(nn):
    """The same in Gluon, by the nearest pixel."""
    return nn.HybridLambda(lambda F, x: F.UpSampling(
        x, scale=2, sample_type="nearest"))


def attention(scale, pooled="mean", skip="x", wide=False, turned=False,
              mask=0.0):
    """A block of a transformer, in torch."""
    def parts(nn):
        class Norm(nn.LayerNorm):
            def forward(self, x):
                return nn.functional.layer_norm(
                    x, x.shape[1:]) * self.weight + self.bias \
                    if wide else super().forward(x)
        return {**{name: nn.Linear(4, 4) for name in "qkv"}, "norm": Norm(4),
                "act": nn.Tanh(), "head": nn.Linear(8, 3)}

    def forward(net, x):
        import torch
        q, k, v = net.q(x), net.k(x), net.v(x)
        later = torch.ones(5, 5, dtype=x.dtype).triu(1)
        y = torch.softmax(scale * q @ k.mT - mask * later, 2) @ v
        y = net.norm(y) + x if skip == "behind" else net.norm(
            y + x * bool(skip))
        y = net.act(y)
        found = [getattr(y, pooled)(1), y[:, 0]]
        return net.head(torch.cat(found[::-1] if turned else found, 1))
    return torch_block(parts, forward)


def of_heads(scale, among_rows=False, mask=0.0):
    """Attention of two heads, which may stand among the rows."""
    def forward(net, x):
        import torch
        later = torch.ones(5, 5, dtype=x.dtype).triu(1)
        q, k, v = (f(x).unflatten(2, (2, 2)).transpose(1, 2)
                   for f in (net.q, net.k, net.v))
        if among_rows:
            q, k, v = (z.flatten(0, 1) for z in (q, k, v))
        y = torch.softmax(scale * q @ k.mT - mask * later, -1) @ v
        return net.head(y.reshape(len(x), 20))
    return torch_block(lambda nn: {
        **{name: nn.Linear(4, 4) for name in "qkv"},
        "head": nn.Linear(20, 3)}, forward)


def one_score(axis):
    """Attention with one score for each time, and a softmax along `axis`."""
    return torch_block(
        lambda nn: {"score": nn.Linear(4, 1), "head": nn.Linear(4, 3)},
        lambda net, x: net.head((net.score(x).softmax(axis) * x).sum(1)))


def padded(mode, dropout=0.0):
    """A convolution of what ``F.pad`` has made larger."""
    def forward(net, x):
        from torch.nn.functional import pad
        how = mode
        if mode in ("first", "last"):   # column, that is cut off
            x = pad(x[..., 1:], (1, 0)) if mode == "first" \
                else pad(x[..., :-1], (0, 1))
            how = "constant"
        x = net.conv(pad(x, (1,) * 4, mode=how))
        return net.head(net.dropout(x.tanh().flatten(1)))
    return torch_block(lambda nn: {
        "conv": nn.Conv2d(2, 4, 5), "head": nn.Linear(144, 3),
        "dropout": nn.Dropout(dropout) if dropout else nn.Identity()},
        forward)


def joined_heads(order):
    """Four heads in two sizes, as of a detector, with the channels last."""
    def forward(net, x):
        import torch
        fine = net.fine(x).tanh()
        maps = [fine, net.coarse(fine)]
        return torch.cat([
            net.heads[i](maps[i % 2]).permute(0, 2, 3, 1).flatten(1)
            for i in order], 1)
    return torch_block(lambda nn: {
        "fine": nn.Conv2d(2, 4, 3), "coarse": nn.Conv2d(4, 4, 3),
        "heads": nn.ModuleList(nn.Conv2d(4, n, 1) for n in (2, 3, 2, 3))},
        forward)


def features_g():
    """A last layer is trained, behind a batch norm in training mode."""
    net = dense_g(lambda nn: nn.BatchNorm(in_channels=5))()
    for layer in list(net)[:-1]:
        layer.collect_params().setattr("grad_req", "null")
    return net


def features_t():
    net = dense_t(lambda nn: nn.BatchNorm1d(5))()
    for layer in list(net)[:-1]:
        layer.requires_grad_(False)
    return net


def rate(n):
    """A schedule with a jump at the third update."""
    return 0.125 if n < 3 else 0.0625


def cross_entropy(**options):
    """torch's own, which has 64-bit labels."""
    def loss(output, y):
        from torch.nn import functional
        return functional.cross_entropy(output, y.long(), **options)
    return loss


EACH = cross_entropy(reduction="none")


def weighted(output, y):
    return cross_entropy(reduction="none", weight=output.new_tensor(
        [0.5, 1.0, 2.0]))(output, y)


def times(nn, number):
    return torch_layer(lambda x: number * x)


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
    return torch_layer(lambda x: x.float().to(x.dtype))


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


def patch_sum(patch, wrong):
    """On torch the sums of gradients go through ``wrong(sums, devices)``,
    which changes them."""
    right = mgpu.Trainer._allreduce

    def reduce(self, *args, **kwargs):
        found = right(self, *args, **kwargs)
        if mgpu.get_backend().name == "torch":
            wrong([p.grad() for p in self._summed], len(self.replicas))
        return found
    patch.setattr("mgpu.training.trainer.Trainer._allreduce", reduce)


def average(sums, devices):
    for gradient in sums:
        gradient /= devices


def halved(sums, devices):
    for gradient in sums:
        gradient *= 0.375


def stale_once():
    """Later steps apply the gradients of the first."""
    kept = []

    def wrong(sums, devices):
        kept.extend(x.clone() for x in sums[len(kept):])
        for gradient, old in zip(sums, kept):
            gradient.copy_(old)
    return wrong


def accumulated():
    """No step sets the gradient to zero."""
    kept = []

    def wrong(sums, devices):
        for gradient, old in zip(sums, kept):
            gradient += old
        kept[:] = [x.clone() for x in sums]
    return wrong


def accumulating():
    net = dense_g()()
    net.initialize()
    net.collect_params().setattr("grad_req", "add")
    return net


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
    from mgpu.backends._torch import meaning
    right = meaning.gluon_batch_norm

    def wrong(call, index=0):
        return right(call._replace(
            running_mean=call.running_mean.clone(),
            running_var=call.running_var.clone()), index)
    patch.setattr(meaning, "gluon_batch_norm", wrong)


def with_gamma():
    """A torch network whose stored gamma is not 1."""
    net = conv_t()()
    net[1].weight.data.fill_(2.0)
    return net


def shuffled(X, y):
    order = np.random.default_rng(1).permutation(len(X))
    return X[order], y[order]


def labels_shuffled(X, y):
    return X, np.roll(y, 1)


def channels_last(nn):
    """Flattens (rows, channels, height, width) with channels last."""
    return torch_layer(lambda x: x.permute(0, 2, 3, 1).flatten(1))


def recurrent(kind, head=None, **options):
    """Gluon's layer, on sequences; `head`: the activation of the last."""
    def make():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn, rnn
        layer = getattr(rnn, kind)(4, layout="NTC", input_size=3, **options)
        net = nn.HybridSequential()
        net.add(layer, nn.Flatten(), nn.Dense(
            3, activation=head, in_units=2 * 4 * layer._dir))
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
        from mxnet.gluon import rnn

    def forward(net, F, x):
        zero = 0 * F.slice_axis(x, axis=1, begin=0, end=5)
        return net.head(net.cell(x, [zero, zero])[0])
    return gluon_block(lambda nn: {
        "cell": rnn.LSTMCell(5, input_size=6),
        "head": nn.Dense(3, in_units=5)}, forward)()


def cell_port():
    """As a sum of forget, input, output gates and new value."""
    import torch
    from torch import nn

    class Cell(nn.LSTMCell):
        def forward(self, x):
            y = x @ self.weight_ih.T + self.bias_ih + self.bias_hh
            _, i, o, new = y.chunk(4, 1)
            return o.sigmoid() * (i.sigmoid() * new.tanh()).tanh()

    torch.manual_seed(0)
    return torch_block(
        lambda nn: {"cell": Cell(6, 5), "head": nn.Linear(5, 3)},
        lambda net, x: net.head(net.cell(x)))()


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


def three_g():
    return gluon(lambda nn: [
        nn.Dense(6, in_units=6, activation="relu"),
        nn.Dense(6, in_units=6, activation="tanh"),
        nn.Dense(3, in_units=6)])()


#: `dense_t`, the last layer registered first
reordered_t = torch_block(
    lambda nn: {"b": nn.Linear(5, 3), "a": nn.Linear(6, 5)},
    lambda net, x: net.b(net.a(x).relu()))


def frozen(activation="ReLU"):
    net = dense_t(activation=activation)()
    net[0].bias.requires_grad_(False)
    return net


def frozen_g():
    """Its biases are zero: a ReLU's kink is near, and not at fault."""
    net = dense_g()()
    net[0].weight.grad_req = "null"
    return net


#: labels of which some are none
OUT_OF_RANGE = [(X, np.where(np.arange(N) % 3 == 1, -1, y)) for X, y in ROWS]
SGD_WD = {"learning_rate": 0.125, "wd": 0.125}
BARE = {"1.gamma": 0.0, "1.beta": 0.0, "0.bias": 0.0, "5.bias": 0.0}

def pair(a, b, batches=ROWS, sums=None, **options):
    """Both sides and how they are compared; `sums`: how gradients are
    reduced on torch."""
    def plant(patch):
        if sums:
            patch_sum(patch, sums)
        return a, b, batches, options
    return plant


def entropies(loss, batches=ROWS):
    """Gluon's own loss, and one of torch."""
    return pair(Side(dense_g(), loss=gluon_cross_entropy),
                Side(dense_t(), loss=loss), batches)


def steps(port, batches=ROWS, **options):
    """A loop of Gluon's with `options`, and one of PyTorch's with `port`;
    rates and options that float32 holds, for MXNet rounds them."""
    def plant(patch):
        return DROPS_G, DROPS_T, batches, {
            "step_a": gluon_step(**options), "step_b": torch_step(**port)}
    return plant


#: name: (cause, plant); ``plant(patch)`` -> a, b, batches, options of compare
FAULTS = {
    "relu before batch norm": ("order of layers", pair(conv_g(), torch_(
            lambda nn: [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.BatchNorm2d(4),
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]),
        IMAGES)),
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
    "unbiased variance": ("unbiased variance", pair(conv_g(momentum=0.875),
        conv_t(momentum=0.125), IMAGES, native=True)),
    "unbiased in a": ("unbiased variance", pair(Side(conv_t(), native=True),
        Side(conv_t(), native=False), IMAGES)),
    "momentum": ("statistics momentum", pair(conv_g(momentum=0.9),
        conv_t(momentum=0.9), IMAGES)),
    "cumulative statistics": ("cumulative statistics", pair(
        conv_g(momentum=0.9), conv_t(momentum=None), IMAGES)),
    "cumulative statistics in a": ("cumulative statistics", pair(
        Side(conv_t(momentum=None), native=True),
        Side(conv_t(momentum=0.5), native=True), IMAGES)),
    "statistics frozen": ("statistics updates", lambda patch: (
        still(patch) or conv_g(), conv_t(), IMAGES, {})),
    "frozen features": ("statistics updates", pair(features_g, features_t)),
    "frozen features in b": ("statistics updates", pair(
        features_t, features_g)),
    "epsilon": ("normalization epsilon", pair(conv_g(), conv_t(eps=1e-3),
        IMAGES)),
    "fix_gamma": ("fix_gamma", pair(conv_g(scale=False), with_gamma, IMAGES,
        weights="b")),
    "fix_gamma, gamma still 1": ("fix_gamma", pair(conv_g(scale=False),
        conv_t(), IMAGES)),
    "policy": ("batch-norm policy", pair(conv_g(),
        Side(conv_t(), batch_norm="average"), IMAGES, devices=2)),
    "1 and 2 devices": ("batch-norm policy", pair(Side(conv_g(), devices=1),
        Side(conv_t(), devices=2), IMAGES)),
    "global statistics": ("batch-norm mode", pair(
        conv_g(use_global_stats=True), conv_t(), IMAGES)),
    # other layers
    "window in the padding": ("windows in the padding", of_images(
        lambda nn: nn.AvgPool2D(2, 2, 1, ceil_mode=True),
        lambda nn: nn.AvgPool2d(2, 2, 1, ceil_mode=True), 2, True)),
    "ceil_mode": ("pooling ceil_mode", of_images(
        lambda nn: nn.MaxPool2D(2, 2, ceil_mode=True),
        lambda nn: nn.MaxPool2d(2, 2), 2, True)),
    "count_include_pad": ("count_include_pad", of_images(
        lambda nn: nn.AvgPool2D(2, 2, 1, count_include_pad=False),
        lambda nn: nn.AvgPool2d(2, 2, 1))),
    "padding of a convolution": ("layer options", of_images(
        lambda nn: nn.Conv2D(4, 3, padding=1, in_channels=4),
        lambda nn: nn.Conv2d(4, 4, 3), 3, True)),
    "flatten order": ("dense flatten", of_images(
        lambda nn: nn.Flatten(), channels_last, 7)),
    "flatten": ("dense flatten", pair(
        gluon(lambda nn: [nn.Dense(5, in_units=6), nn.Dense(1, in_units=5)]),
        torch_(lambda nn: [nn.Unflatten(1, (1, 6)), nn.Linear(6, 5),
                nn.Linear(5, 1)]), [(X, y[:, :1]) for X, y in TARGETS],
        loss=losses.L2Loss())),
    "selu": ("SELU's gradient", pair(
        dense_g(lambda nn: nn.SELU(), activation=None),
        dense_t(lambda nn: nn.SELU(), activation=None))),
    "twice a layer": ("constant factor", pair(dense_g(),
        dense_t(lambda nn: times(nn, 2)))),
    "twice what is negative": ("constant factor", pair(
        dense_t(lambda nn: nn.LogSigmoid(), activation=None), dense_t(
            lambda nn: nn.LogSigmoid(), lambda nn: times(nn, 2),
            activation=None))),
    "transposed weight": ("transposed weight", pair(
        gluon(lambda nn: [nn.Dense(6, in_units=6), nn.Dense(3, in_units=6)]),
        torch_(lambda nn: [transposed(nn), nn.Linear(6, 3)]))),
    "another pooling": ("kind of pooling", of_images(
        lambda nn: nn.MaxPool2D(2), lambda nn: nn.AvgPool2d(2))),
    "global pooling": ("kind of pooling", of_images(
        lambda nn: nn.GlobalAvgPool2D(), lambda nn: nn.AdaptiveMaxPool2d(1))),
    "a layer in float16, then tanh": ("dtype", pair(dense_g(activation="tanh"),
        single("half", "Tanh"))),
    "in bfloat16 within float32": ("dtype", pair(dense_g(), single("bfloat16"),
        dtype="float32")),
    "a cast between layers, in a": ("dtype", pair(dense_t(cast), dense_t())),
    "the loss in float32": ("dtype", entropies(
        lambda output, y: EACH(output.float(), y).double())),
    "attention scale": ("attention scale", pair(attention(0.5), attention(1.0),
        ATTENDED)),
    "attention scale beside a mask": ("attention scale", pair(
        of_heads(0.5, mask=1e18), of_heads(0.75, mask=1e18), ATTENDED)),
    "attention scale, heads among rows": ("attention scale", pair(
        of_heads(0.5, True), of_heads(1.0), ATTENDED)),
    "no mask, heads among rows": ("attention mask", pair(
        of_heads(0.5, True, 1e9), of_heads(0.5), ATTENDED)),
    "a mask of 8": ("attention mask", pair(attention(0.5),
        attention(0.5, mask=8.0), ATTENDED)),
    "softmax along an axis of one": ("softmax axis", pair(one_score(1),
        one_score(2), ATTENDED)),
    "a mean for a maximum": ("kind of pooling", pair(attention(0.5),
        attention(0.5, "amax"), ATTENDED)),
    "no skip": ("residual connection", pair(attention(0.5),
        attention(0.5, skip=None), ATTENDED)),
    "norm before the sum": ("order of layers", pair(attention(0.5),
        attention(0.5, skip="behind"), ATTENDED)),
    "norm over all axes": ("normalization axis", pair(attention(0.5),
        attention(0.5, wide=True), ATTENDED)),
    "columns": ("order of columns", pair(attention(0.5),
        attention(0.5, turned=True), ATTENDED)),
    "heads": ("order of columns", lambda patch: (
        joined_heads((0, 1, 2, 3)), joined_heads((0, 2, 1, 3)),
        [(X, np.random.default_rng(0).normal(size=(N, 240)))
         for X, _ in IMAGES],
        {"loss": losses.L2Loss()})),
    "groups": ("layer options", of_images(
        lambda nn: nn.GroupNorm(4), lambda nn: nn.GroupNorm(2, 4), 7)),
    "alpha": ("activation", pair(
        dense_g(lambda nn: nn.ELU(1.0), activation=None),
        dense_t(lambda nn: nn.ELU(0.5), activation=None))),
    "bilinear": ("interpolation", of_images(
        repeated, enlarge(mode="bilinear"), 7)),
    "align_corners of a layer": ("interpolation", pair(
        images_t(enlarge(True, mode="bilinear"), 7),
        images_t(enlarge(True, mode="bilinear", align_corners=True), 7),
        IMAGES)),
    "padding mode": ("layer options", of_images(
        lambda nn: nn.Conv2D(4, 3, padding=1, in_channels=4),
        lambda nn: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"))),
    "gates of a GRU in a": ("permuted gates", pair(
        recurrent_port("GRU", (1, 0, 2)), recurrent("GRU"), SERIES,
        dtype="float32")),
    "gates of stacked layers": ("permuted gates", pair(
        recurrent("LSTM", num_layers=2, bidirectional=True),
        recurrent_port("LSTM", (1, 0, 3, 2), num_layers=2, bidirectional=True),
        SERIES, dtype="float32")),
    "gates of a cell": ("permuted gates", pair(one_cell, cell_port)),
    "gates of the values": ("permuted gates", pair(
        permuted_values((0, 1, 2, 3)), permuted_values((0, 2, 1, 3)), SERIES,
        weights="own")),
    "reset gate": ("GRU variant", pair(recurrent("GRU"), gru_port("before"),
        SERIES, dtype="float32")),
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
    "maximum": ("derivative at a kink", pair(dense_g(),
        dense_t(half_at_zero, activation=None),
        [(x * (np.arange(len(x)) > 1)[:, None], y) for x, y in ROWS])),
    "maximum in a": ("derivative at a kink", pair(
        dense_t(half_at_zero, activation=None), dense_g(),
        [(0 * x, y) for x, y in ROWS], weights="b")),
    "dropout masks": ("dropout masks", lambda patch: (
        other_masks(patch) or dense_g(lambda nn: nn.Dropout(0.5),
                                      activation=None),
        dense_t(lambda nn: nn.Dropout(0.5), activation=None), ROWS, {})),
    "dropout rate": ("dropout rate", pair(dense_g(lambda nn: nn.Dropout(0.5)),
        dense_t(lambda nn: nn.Dropout(0.25)))),
    # data
    "data order": ("data order", pair(conv_g(),
        Side(conv_t(), prepare=shuffled), IMAGES)),
    "labels shuffled": ("data order", pair(dense_g(),
        Side(dense_t(), prepare=labels_shuffled))),
    "preparation": ("input preparation", pair(conv_g(),
        Side(conv_t(), prepare=lambda X, y: (255 * X, y)), IMAGES)),
    "label clipping": ("labels out of range", entropies(
        cross_entropy(reduction="none", ignore_index=-1), OUT_OF_RANGE)),
    "label smoothing": ("label smoothing", entropies(
        cross_entropy(reduction="none", label_smoothing=0.1))),
    "class weights": ("class weights", entropies(weighted)),
    "shifted labels": ("shifted labels", entropies(
        lambda output, y: EACH(output, y.roll(1)))),
    "ignored class": ("ignore_index", entropies(
        cross_entropy(reduction="none", ignore_index=1))),
    "softmax twice": ("softmax in the loss", entropies(
        lambda output, y: EACH(output.softmax(1), y))),
    "L1 for L2": ("loss formula", pair(dense_g(),
        Side(dense_t(), loss=losses.L1Loss()), TARGETS, loss=losses.L2Loss())),
    "twice the entropy": ("loss weight", entropies(
        lambda output, y: 2 * EACH(output, y))),
    # losses
    "L2 loss": ("L2 loss", pair(dense_g(), Side(dense_t(), loss=mean_square),
        TARGETS, loss=losses.L2Loss())),
    "Huber": ("loss weight", pair(
        Side(dense_g(), loss=losses.HuberLoss(rho=2)),
        Side(dense_t(), loss=huber), [(X, 4 * y) for X, y in TARGETS])),
    "mean": ("loss reduction", pair(dense_g(),
        Side(dense_t(), loss=cross_entropy()))),
    "mean square, one number": ("loss reduction", pair(dense_g(),
        Side(dense_t(), loss=lambda o, y: ((o - y) ** 2).mean()), TARGETS,
        loss=losses.L2Loss())),
    "weight": ("loss weight", pair(dense_g(),
        Side(dense_t(), loss=losses.SoftmaxCELoss(weight=0.75)))),
    # devices
    "mean over devices": ("sum or mean over devices", pair(dense_g(),
        dense_t(), sums=average, devices=3)),
    # gradients
    "stale": ("stale gradient", lambda patch: (
        patch_sum(patch, stale_once()) or dense_g(), dense_t(),
        ROWS, {"devices": 2})),
    "accumulated": ("stale gradient", lambda patch: (
        patch_sum(patch, accumulated()) or dense_g(), dense_t(),
        ROWS, {})),
    "accumulated in a": ("stale gradient", pair(accumulating, dense_t())),
    "frozen, of zeros": ("frozen parameter", pair(dense_g(), frozen,
        [(X * (np.arange(N) > 1)[:, None], y) for X, y in ROWS])),
    "frozen in a linear network": ("frozen parameter", pair(
        dense_g(activation=None), lambda: frozen(None))),
    "frozen in Gluon, in b": ("frozen parameter", pair(dense_t(), frozen_g,
        weights="b")),
    "scaled": ("gradient scale", pair(dense_g(), dense_t(), sums=halved)),
    "mean over devices, against 1": ("sum or mean over devices", pair(
        Side(dense_g(), devices=1), Side(dense_t(), devices=3), sums=average)),
    # updates
    "Adam": ("Adam epsilon", pair(dense_g(),
        Side(dense_t(), semantics="torch"), optimizer="adam",
        optimizer_params={})),
    "velocity": ("rate inside the velocity", pair(
        Side(dense_g(), lr_scheduler=rate),
        Side(dense_t(), lr_scheduler=rate, semantics="torch"),
        optimizer_params={"momentum": 0.5})),
    "decay of biases": ("weight decay on biases", pair(conv_g(),
        Side(conv_t(), wd_mult=BARE), IMAGES, optimizer_params=SGD_WD)),
    "decay of biases in b": ("weight decay on biases", pair(
        Side(conv_g(), wd_mult=BARE), conv_t(), IMAGES,
        optimizer_params=SGD_WD)),
    "decoupled": ("coupled weight decay", pair(dense_g(),
        Side(dense_t(), optimizer="adamw"), optimizer="adam",
        optimizer_params=SGD_WD)),
    "short batch": ("batch divisor", pair(dense_g(),
        Side(dense_t(), divisor=N), FULL_THEN_SHORT, optimizer_params=SLOW)),
    "learning rate": ("learning rate", pair(dense_g(),
        Side(dense_t(), optimizer_params={"learning_rate": 0.25}),
        optimizer_params=SLOW)),
    "float32 rate": ("float32 hyper-parameters", pair(dense_g(), Side(
            dense_t(),
            optimizer_params={"learning_rate": float(np.float32(0.1))}),
        optimizer_params={"learning_rate": 0.1})),
    "multiplier": ("multipliers", pair(
        Side(dense_g(), lr_mult={"0.weight": 2.0}), dense_t(),
        optimizer_params=SLOW)),
    "beta": ("optimizer options", pair(dense_g(),
        Side(dense_t(), optimizer_params={"beta1": 0.5}), optimizer="adam",
        optimizer_params={})),
    "RMSProp": ("optimizer formula", pair(dense_g(), Side(dense_t(),
            semantics="torch", optimizer_params={"alpha": 0.9, "lr": 0.001}),
        optimizer="rmsprop", optimizer_params={})),
    "NAG with decay": ("optimizer formula", pair(dense_g(),
        Side(dense_t(), semantics="torch"), optimizer="nag",
        optimizer_params={**SGD_WD, "momentum": 0.5})),
    "another optimizer": ("optimizer formula", pair(dense_g(),
        Side(dense_t(), optimizer="adam"), optimizer_params=SLOW)),
    "order of Nadam": ("order of parameters", pair(dense_g(), reordered_t,
        optimizer="nadam", optimizer_params=SLOW)),
    # the start
    "values by position": ("order of parameters", pair(
        three(), three(swapped=True), weights="own")),
    "initializer": ("initializer", pair(conv_g(), conv_t(), IMAGES,
        weights="own")),
    "biases": ("initializer", pair(Side(conv_g(), init="xavier"), conv_t(),
        IMAGES, weights="own")),
    "other draw": ("initial draw", pair(Side(dense_g(), init="xavier", seed=1),
        Side(dense_t(), init="xavier", seed=2), weights="own")),
}

#: networks that train the same
CONTROLS = {
    "nearest": of_images(repeated, enlarge(), 7),
    "bilinear": pair(images_g(
        lambda nn: nn.HybridLambda(lambda F, x: F.contrib.BilinearResize2D(
            x, height=4, width=4, align_corners=False)), 7),
        images_t(enlarge(mode="bilinear"), 7), IMAGES, strict=True),
    "layer norm": lambda patch: (
        # MXNet keeps this epsilon as float32: one that float32 holds
        dense_g(lambda nn: nn.LayerNorm(epsilon=2 ** -17, in_channels=5)),
        dense_t(lambda nn: nn.LayerNorm(5, eps=2 ** -17)), ROWS,
        {"devices": 2}),
    "float32": pair(conv_g(), conv_t(), IMAGES, dtype="float32"),
    "torch's momentum, one rate": pair(dense_g(),
        Side(dense_t(), semantics="torch"),
        optimizer_params={"learning_rate": 0.125, "momentum": 0.5}),
}
