"""Networks that real MXNet exports, and what mgpu makes of them."""
import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

import mgpu
import mgpu.testing
from conftest import BACKENDS
from helpers import relative_difference

from .conftest import export, files_in
from .mutations import graph_mutation

if set(BACKENDS) < {"mxnet", "torch"}:
    pytest.skip("these compare two engines", allow_module_level=True)


def _sequential(*layers):
    from mxnet.gluon import nn
    net = nn.HybridSequential()
    net.add(*layers)
    return net


def lenet():
    from mxnet.gluon import nn
    return _sequential(
        nn.Conv2D(4, 3, padding=1), nn.Activation("tanh"), nn.MaxPool2D(),
        nn.Conv2D(6, (3, 2), strides=(2, 1), use_bias=False),
        nn.BatchNorm(epsilon=1e-3, momentum=0.7), nn.Activation("sigmoid"),
        nn.Dense(5, use_bias=False), nn.Activation("softrelu"), nn.Dense(3))


def pools():
    from mxnet.gluon import nn
    return _sequential(
        nn.AvgPool2D(3, 2, 1, count_include_pad=False), nn.Conv2D(4, 1),
        nn.AvgPool2D(3, 1, 1), nn.MaxPool2D(3, 2, 1, ceil_mode=True),
        nn.MaxPool2D(2, 3, 1, ceil_mode=True), nn.Activation("softsign"),
        nn.GlobalAvgPool2D(), nn.Dense(3))


def fixed_gamma():
    from mxnet.gluon import nn
    return _sequential(
        nn.Conv2D(4, 3, groups=2), nn.BatchNorm(scale=False),
        nn.GlobalMaxPool2D(), nn.Flatten(), nn.Dense(3, flatten=False))


def joined():
    """A weight that two layers share, and a constant array."""
    from mxnet.gluon import HybridBlock, nn

    class Joined(HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.a = nn.Dense(6, in_units=6, flatten=False)
                self.b = nn.Dense(6, in_units=6, flatten=False,
                                  use_bias=False, params=self.a.params)
                self.shift = self.params.get("shift", shape=(1, 6))

        def hybrid_forward(self, F, x, shift):
            x = F.broadcast_add(x, shift)
            return F.concat(self.a(x), F.clip(self.b(self.a(x)), -0.5, 0.5),
                            dim=1)
    return Joined()


def words(kind, layout="TNC", states=0, **options):
    """A language model; with states that are given, it returns them too."""
    def make():
        from mxnet.gluon import HybridBlock, nn, rnn

        class Words(HybridBlock):
            def __init__(self):
                super().__init__()
                with self.name_scope():
                    self.embedding = nn.Embedding(7, 4)
                    self.rnn = getattr(rnn, kind)(5, layout=layout, **options)
                    self.dense = nn.Dense(7, flatten=False)

            def hybrid_forward(self, F, x, *states):
                x = self.embedding(x)
                if not states:
                    return self.dense(self.rnn(x))
                x, states = self.rnn(x, list(states))
                return (self.dense(x), *states)
        return Words()
    return make


def encoder(numpy):
    """A block of BERT: attention of two heads, in either interface."""
    def make():
        return _encoder(numpy)
    return make


def _encoder(numpy):
    from mxnet.gluon import HybridBlock, nn

    class Encoder(HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                for name in ("query", "key", "value", "out"):
                    setattr(self, name, nn.Dense(6, flatten=False,
                                                 use_bias=name == "out"))
                self.norms = [nn.LayerNorm(), nn.LayerNorm(epsilon=1e-12)]
                self.register_child(self.norms[0])
                self.register_child(self.norms[1])
                self.wide = nn.Dense(8, flatten=False)
                self.gelu = nn.GELU()
                self.narrow = nn.Dense(6, flatten=False)
                self.dropout = nn.Dropout(0)

        def hybrid_forward(self, F, x, lengths):
            if numpy:
                np, npx, keep = F.np, F.npx, -2
                mask = npx.sequence_mask
            else:
                np, npx, keep, mask = F, F, 0, F.SequenceMask
            reshape, transpose = npx.reshape, np.transpose

            def heads(y):
                y = transpose(reshape(y, (keep, keep, 2, -1)), (0, 2, 1, 3))
                return reshape(y, (-1, keep, keep), reverse=True)
            q, k, v = (heads(layer(x)) for layer in (self.query, self.key,
                                                     self.value))
            scores = npx.batch_dot(q, k, transpose_b=True) / 3 ** 0.5
            scores = transpose(mask(
                transpose(scores, (0, 2, 1)), np.repeat(lengths, 2, axis=0),
                use_sequence_length=True, value=-1e6, axis=1), (0, 2, 1))
            y = npx.batch_dot(self.dropout(npx.softmax(scores)), v)
            y = reshape(y, (-1, 2, keep, keep), reverse=True)
            y = reshape(transpose(y, (0, 2, 1, 3)), (keep, keep, -1))
            x = self.norms[0](x + self.out(y))
            return self.norms[1](x + self.narrow(self.gelu(self.wide(x))))
    return Encoder()


def unrolled(layout, *names, embeds=False):
    """Cells without a begin state, of which the graph knows no batch."""
    def make():
        from mxnet.gluon import HybridBlock, nn, rnn

        class Unrolled(HybridBlock):
            def __init__(self):
                super().__init__()
                kinds = {"lstm": rnn.LSTMCell, "gru": rnn.GRUCell,
                         "rnn": rnn.RNNCell}
                with self.name_scope():
                    self.embed = nn.Embedding(4, 5) if embeds else None
                    self.cells = rnn.HybridSequentialRNNCell()
                    for name in names:
                        self.cells.add(
                            rnn.BidirectionalCell(rnn.GRUCell(2),
                                                  rnn.RNNCell(3))
                            if name == "both ways" else
                            rnn.ResidualCell(rnn.GRUCell(5))
                            if name == "residual" else kinds[name](5))
                    self.dense = nn.Dense(2)

            def hybrid_forward(self, F, x):
                x = x if self.embed is None else self.embed(x)
                # MXNet's default is float32, which no float64 takes
                states = self.cells.begin_state(
                    batch_size=0, func=F.zeros, dtype="float64")
                y, states = self.cells.unroll(3, x, states, layout,
                                              merge_outputs=True)
                return self.dense(y if layout == "NTC" else F.mean(y, 0)), \
                    *states
        return Unrolled()
    return make


def norms():
    """Of other axes, of groups, and with statistics that stay."""
    from mxnet.gluon import nn
    return _sequential(
        nn.Conv2D(6, 3), nn.GroupNorm(3), nn.BatchNorm(
            axis=-1, use_global_stats=True),
        nn.BatchNorm(use_global_stats=True), nn.Conv2D(2, 1),
        nn.BatchNorm(axis=2, use_global_stats=True, scale=False))


class Whole(tuple):
    """The shape of an input of whole numbers, from 1 on."""


def zoo(name):
    def make():
        from mxnet.gluon.model_zoo import vision
        return vision.get_model(name, classes=3)
    return make


NETWORKS = {"lenet": (lenet, (2, 2, 9, 8)), "pools": (pools, (2, 2, 15, 15)),
            "fixed gamma": (fixed_gamma, (2, 2, 6, 6)),
            "joined": (joined, (4, 6)),
            "lstm": (words("LSTM", num_layers=2), Whole((4, 3))),
            "lstm with states": (words("LSTM", num_layers=2),
                                 Whole((4, 3)), (2, 3, 5), (2, 3, 5)),
            "gru both ways": (words("GRU", "NTC", bidirectional=True),
                              Whole((4, 3))),
            "lstm by batch": (words("LSTM", "NTC", num_layers=2),
                              Whole((4, 3))),
            "rnn": (words("RNN", activation="tanh"), Whole((4, 3))),
            "norms": (norms, (2, 2, 7, 6)),
            "unrolled": (unrolled("NTC", "lstm", "residual", "both ways"),
                         (4, 3, 5)),
            "unrolled by time": (unrolled("TNC", "rnn", "lstm"), (3, 4, 5)),
            "unrolled words": (unrolled("NTC", "gru", embeds=True),
                               Whole((4, 3))),
            "np gru with states": (words("GRU", num_layers=2),
                                   Whole((4, 3)), (2, 3, 5)),
            "encoder": (encoder(False), (3, 4, 6), Whole((3,))),
            "np encoder": (encoder(True), (3, 4, 6), Whole((3,))),
            "resnet18_v1": (zoo("resnet18_v1"), (2, 3, 64, 64)),
            "resnet18_v2": (zoo("resnet18_v2"), (2, 3, 64, 64)),
            "mobilenetv2_0.25": (zoo("mobilenetv2_0.25"), (2, 3, 64, 64))}


def _listed(outputs):
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]


class Exported:
    """A Gluon network with values, and its files."""

    def __init__(self, name, folder):
        import mxnet as mx
        make, *shapes = NETWORKS[name]
        self.numpy = name.startswith("np ")
        # MXNet's GELU is computed in float32
        self.tolerance = 1e-6 if name.endswith("encoder") else 1e-10
        self.rng = np.random.default_rng(0)
        self.inputs = [
            self.rng.integers(1, 4, shape).astype(float)
            if isinstance(shape, Whole) else self.rng.normal(size=shape)
            for shape in shapes]
        self.moves = [not isinstance(shape, Whole) for shape in shapes]
        self.x = self.inputs[0]
        with self.interface():
            self._export(make, folder, mx)
        self.symbol, self.params = files_in(folder)

    @contextlib.contextmanager
    def interface(self):
        """That of the network, nd or np."""
        import mxnet as mx
        with mx.util.np_shape(self.numpy), mx.util.np_array(self.numpy):
            yield

    def entering(self):
        import mxnet as mx
        array = mx.np.array if self.numpy else mx.nd.array
        return [array(x, dtype="float64") for x in self.inputs]

    def _export(self, make, folder, mx):
        self.net = make()
        self.net.cast("float64")
        # np draws no float64
        self.net.initialize(mx.init.Zero())
        self.net.hybridize()
        self.net(*self.entering())
        for key, p in self.net.collect_params().items():
            fan = np.prod(p.shape[1:]) if key.endswith("weight") else 4
            value = self.rng.normal(size=p.shape) / np.sqrt(fan)
            if key.endswith(("gamma", "running_var")):
                value = 0.5 + abs(value)
            p.set_data((mx.np if self.numpy else mx.nd).array(
                value, dtype="float64"))
        self.net.export(str(folder / "net"))

    def gluon(self, net=None):
        """Prediction, then by name gradients and statistics of a step."""
        with self.interface():
            return self._gluon(net or self.net)

    def _gluon(self, net):
        import mxnet as mx
        entering = self.entering()
        for x, moves in zip(entering, self.moves):
            if moves:
                x.attach_grad()
        predicted = [y.asnumpy() for y in _listed(net(*entering))]
        with mx.autograd.record():
            loss = sum((y * self.weights(p, type(y), mx)).sum() for y, p in
                       zip(_listed(net(*entering)), predicted))
        loss.backward()
        found = {f"x{i}": x.grad.asnumpy() for i, x in enumerate(entering)
                 if self.moves[i]}
        found |= {f"y{i}": y for i, y in enumerate(predicted)}
        for key, p in net.collect_params().items():
            if p.grad_req != "null":
                found[key] = p.grad().asnumpy()
            elif "running_" in key:
                found[key] = p.data().asnumpy()
        return found

    def weights(self, like, kind=None, mx=None):
        found = np.cos(np.arange(like.size)).reshape(like.shape)
        if kind is None:
            return found
        return (mx.np if kind is mx.np.ndarray else mx.nd).array(
            found, dtype="float64")

    def torch(self, net):
        import torch
        entering = [torch.from_numpy(x).requires_grad_(moves)
                    for x, moves in zip(self.inputs, self.moves)]
        with torch.no_grad():
            predicted = [y.numpy() for y in _listed(net.eval()(*entering))]
        sum((y * torch.from_numpy(self.weights(p))).sum() for y, p in
            zip(_listed(net.train()(*entering)), predicted)).backward()
        found = {f"x{i}": x.grad.numpy() for i, x in enumerate(entering)
                 if self.moves[i]}
        found |= {f"y{i}": y for i, y in enumerate(predicted)}
        parameters = dict(net.named_parameters(remove_duplicate=False))
        state = net.state_dict()
        for key, name in net.gluon_names.items():
            if key not in parameters:
                found[name.removeprefix("aux:")] = state[key].numpy()
            elif parameters[key].requires_grad:
                found[name.removeprefix("arg:")] = parameters[key].grad.numpy()
        return found


@pytest.fixture
def exported(request, tmp_path):
    with mgpu.using_backend("mxnet"):
        return Exported(request.param, tmp_path)


every = pytest.mark.parametrize("exported", NETWORKS, indirect=True)
small = pytest.mark.parametrize("exported", ["lenet", "joined"],
                                indirect=True)
trained = pytest.mark.parametrize(
    "exported", ["lenet", "joined", "norms", "gru both ways", "lstm by batch"],
    indirect=True)


def assert_same(found, expected, tolerance=1e-10):
    """That a graph does not say which parameters are frozen is no
    difference."""
    assert found.keys() >= expected.keys()
    largest = max(abs(x).max() for x in expected.values())
    for key, x in expected.items():
        if abs(x).max() > 1e-12 * largest:      # not zero but for rounding
            assert relative_difference(found[key], x) < tolerance, key


@every
def test_a_network_computes_as_gluons(exported, tmp_path):
    """Predictions, gradients of all parameters and of the input, and what a
    training pass leaves in running statistics. Once it is trained it is
    written for MXNet, which predicts the same."""
    with mgpu.using_backend("mxnet"):
        expected = exported.gluon()
    with mgpu.using_backend("torch"):
        import torch
        net = mgpu.from_gluon(exported.symbol, exported.params)
        assert_same(exported.torch(net), expected, exported.tolerance)
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.125 * p.grad
        mgpu.to_gluon_params(net, tmp_path / "back.params")
        expected = exported.torch(net)["y0"]
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        with exported.interface():
            block = mgpu.from_gluon(exported.symbol, tmp_path / "back.params")
            assert isinstance(block, mx.gluon.SymbolBlock)
            # `expected` was computed before that pass moved any statistics
            found = _listed(block(*exported.entering()))[0].asnumpy()
    assert relative_difference(found, expected) < exported.tolerance


@trained
def test_it_trains_on_devices(exported, devices):
    """As on one device, by a plain loop."""
    import torch
    with mgpu.using_backend("torch"):
        nets = [mgpu.from_gluon(exported.symbol, exported.params)
                for _ in range(2)]
        replicas = mgpu.initialize(nets[0], devices, batch_norm="sync")
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        loss = mgpu.losses.L2Loss()
        y = exported.rng.normal(size=exported.torch(nets[1])["y0"].shape)
        nets[1] = mgpu.from_gluon(exported.symbol, exported.params)
        plain = torch.optim.SGD(nets[1].parameters(), 0.125)
        for _ in range(3):
            mgpu.train_batch(exported.x, y, replicas, loss, trainer)
            plain.zero_grad()
            out = nets[1](torch.from_numpy(exported.x))
            ((out - torch.from_numpy(y)) ** 2 / 2).mean(
                tuple(range(1, out.dim()))).mean().backward()
            plain.step()
        state = nets[1].state_dict()
        for key, x in nets[0].state_dict().items():
            assert relative_difference(x.numpy(), state[key].numpy()) < 1e-12


def from_symbol(folder, symbol, arrays):
    """What `from_gluon` makes of a symbol of MXNet's."""
    import mxnet as mx
    symbol.save(str(folder / "net-symbol.json"))
    mx.nd.save(str(folder / "net-0000.params"), {
        f"arg:{name}": mx.nd.array(x, dtype=x.dtype)
        for name, x in arrays.items()})
    with mgpu.using_backend("torch"):
        return mgpu.from_gluon(*files_in(folder))


@pytest.mark.parametrize("axes, mode", [
    ((), "training"), ((1,), "training"), ((0, 2), "always")])
def test_dropout(tmp_path, axes, mode):
    """As MXNet's: which values share a mask, what is left grows, and whether
    predictions drop out."""
    def seen(y):
        return [bool((y == y.take([0], k)).all()) for k in range(3)], \
            np.unique(y).tolist()

    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        symbol = mx.sym.Dropout(mx.sym.var("data"), p=0.25, mode=mode,
                                axes=axes)
        bound = symbol.bind(mx.cpu(), {"data": mx.nd.ones((40, 60, 5))})
        expected = [seen(bound.forward(is_train=training)[0].asnumpy())
                    for training in (True, False)]
        net = from_symbol(tmp_path, symbol, {})
    with mgpu.using_backend("torch"):
        import torch
        x = torch.ones(40, 60, 5)
        assert [seen(net.train(training)(x).numpy())
                for training in (True, False)] == expected


def compare_dropout(kind, dropout):
    """Compares a network that drops out with what `from_gluon` makes of it;
    both, their first layers."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        from mxnet.gluon import nn, rnn
        first = nn.Dropout(0.5, axes=(1,)) if kind == "axes" else \
            getattr(rnn, kind)(3, 2, layout="NTC", dropout=0.3)
        net = _sequential(nn.Dense(5, flatten=False), first, nn.Dense(2))
        net.initialize(mx.init.Xavier())
        net.hybridize()
        net(mx.nd.ones((2, 3, 4)))
    with mgpu.using_backend("torch"):
        other = mgpu.from_gluon(net)
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(6, 3, 4)), rng.integers(2, size=6))]
    mgpu.testing.assert_parity(
        net, other, batches=data, dropout=dropout,
        dtype="float64" if kind == "axes" else "float32")
    return first, other


def test_dropout_along_axes_takes_the_masks_of_gluon():
    compare_dropout("axes", "masks")


def test_dropout_between_recurrent_layers_is_off_and_on_again():
    first, other = compare_dropout("LSTM", "off")
    assert first._dropout == 0.3
    assert 0.3 in [getattr(m, "dropout", 0) for m in other.modules()]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_masks_between_recurrent_layers_are_refused(kind):
    with pytest.raises(ValueError, match="dropout='off'"):
        compare_dropout(kind, "masks")


def test_equal_blocks_with_a_fixed_gamma_match():
    """Their order is told by what arrives at them, where the value of a gamma
    that is fixed counts on no side."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        from mxnet.gluon import nn

        class Block(nn.HybridBlock):
            def __init__(self):
                super().__init__()
                self.deep, self.norm, self.short = (
                    nn.Conv2D(4, 3, padding=1), nn.BatchNorm(scale=False),
                    nn.Conv2D(4, 1))

            def hybrid_forward(self, F, x):
                y = self.short(x)
                return F.relu(y + self.norm(self.deep(x)))
        net = nn.HybridSequential()
        net.add(Block(), Block(), nn.GlobalAvgPool2D(), nn.Dense(3))
        net.initialize(mx.init.Xavier())
        net.hybridize()
        net(mx.nd.ones((2, 3, 6, 6)))
    with mgpu.using_backend("torch"):
        other = mgpu.from_gluon(net)
    rng = np.random.default_rng(0)
    mgpu.testing.assert_parity(net, other, batches=[
        (rng.normal(size=(6, 3, 6, 6)), rng.integers(2, size=6))])


@pytest.mark.parametrize("build", [
    lambda F, x: F.zeros((0, 4)), lambda F, x: F.FullyConnected(
        F.zeros((0, 4)), F.var("w"), num_hidden=4, no_bias=True),
    lambda F, x: F.broadcast_add(x, F.zeros((0, 4))),
    lambda F, x: F.elemwise_add(F.slice_axis(x, axis=0, begin=0, end=1),
                                F.zeros((0, 4)))])
def test_a_size_that_nothing_says_is_refused(tmp_path, build):
    """MXNet finds it by the shapes of all arrays; PyTorch has those of the
    inputs."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        symbol = mx.sym.Group([build(mx.sym, mx.sym.var("data")),
                               mx.sym.var("data") * 2])
        with pytest.raises(NotImplementedError, match="_zeros: shape="):
            from_symbol(tmp_path, symbol, {
                name: np.ones((4, 4), "float32")
                for name in symbol.list_arguments() if name == "w"})


WHOLE = np.array([[-7, -3, 0], [1, 5, 9]], "int32")
#: of whole numbers: in `sym`, and whether it computes
IN_SYM = {
    "x / 2": False, "20 / (x + 1)": False, "x + 0.5": False,
    "0.5 - x": False, "x * 1.5": False, "F.clip(x, -2.5, 2.5)": False,
    "F.exp(x)": False, "F.sqrt(F.abs(x))": False,
    "F.broadcast_div(x, x + 1)": False, "F.sigmoid(x)": False,
    "F.maximum(x, 0.5)": False, "F.cast(x, 'int64') / 2": False,
    "F.concat(x, x, dim=0) * 0.5": False,
    "F.reshape(x, (-1,)) / 2": False, "F.cast(x, 'float64') / 2": True,
    "F.mean(x, axis=1)": False, "F.norm(x, axis=1)": False,
    "x ** -1": False, "2 ** x": False,
    "F.sum(x, axis=1)": True, "F.max(x, axis=1)": True,
    "F.sum(F.cast(x, 'uint8'), axis=1)": True,
    "F.cumsum(F.cast(x * 20, 'int8'), axis=1)": True,
    "F.min(F.cast(x, 'uint8'), axis=1)": True,
    "x % 2.5": False, "F.smooth_l1(x, scalar=1)": False, "x % 3": True,
    "F.broadcast_mod(x, x * x + 1)": True, "F.sort(x, axis=1)": True,
    "F.argsort(x, axis=1) / 2": True, "F.prod(x, axis=1)": True,
    "F.logical_not(x)": True, "F.round(x)": True, "F.rint(x)": True,
    "F.nansum(x, axis=1)": True, "F.argmin(x, axis=1)": True,
    "F.broadcast_add(x, F.arange(0, 3, dtype='int32'))": True,
    "x + 2": True, "3 - x": True, "x * x": True, "F.clip(x, -2, 2)": True,
    "F.maximum(x, 1)": True, "x > 0": True, "F.abs(-x)": True,
    "F.one_hot(x, 4) / 2": True,
    "F.where(x > 0, x, F.zeros_like(x))": True}
#: the same of the NumPy interface
IN_NP = {
    "x + 1.0": False, "2 ** x": False, "-x": False, "F.np.exp(x)": False,
    "x * 1e9": False, "F.np.clip(x, -2.5, 2.5)": False,
    "F.np.maximum(x, 1.5)": False, "x.mean()": False,
    "F.np.where(x > 1, x, 0.5)": False, "F.np.std(x)": False,
    "x ** -1": False, "x.sum(axis=1)": True, "(x > 1).sum()": True,
    "F.np.prod(x.astype('int8'), axis=0)": True,
    "F.np.max(x > 1, axis=1)": True, "F.np.min(x > 1, axis=1)": True,
    "x / 2": True, "x / (x * x + 1)": True, "x + 2": True, "x ** 2": True,
    "(x > 1) * 2.0": True, "1 - (x > 1)": True, "(x > 1).mean()": True,
    "((x > 1) * 1.0).mean()": True, "(x > 1) * x": True,
    "F.np.where(x > 1, x, 2)": True, "F.np.argmax(x, axis=1) * 0.5": True}


def of_whole_numbers(folder, text, numpy):
    """What MXNet computes, and a function that does so by `from_gluon`."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx

        class Net(mx.gluon.HybridBlock):
            def hybrid_forward(self, F, x):
                return eval(text, {"F": F, "x": x})
        with mx.util.np_shape(numpy), mx.util.np_array(numpy):
            net = Net()
            net.hybridize()
            x = (mx.np if numpy else mx.nd).array(WHOLE, dtype="int32")
            expected = net(x).asnumpy()
            net.export(str(folder / "net"))

    def found():
        with mgpu.using_backend("torch"):
            import torch
            net = mgpu.from_gluon(*files_in(folder))
            return net(torch.tensor(WHOLE)).numpy()
    return expected, found


interfaces = pytest.mark.parametrize("numpy, texts", [
    (False, IN_SYM), (True, IN_NP)], ids=["sym", "np"])


@interfaces
def test_whole_numbers(tmp_path, numpy, texts):
    """As MXNet, dtype of fractions included."""
    for text in (text for text, computes in texts.items() if computes):
        expected, found = of_whole_numbers(tmp_path, text, numpy)
        y = found()
        assert y.dtype.kind == expected.dtype.kind, text
        assert y.shape == expected.shape, text
        assert relative_difference(y, expected) < 1e-6, text
        if y.dtype.kind != "f" or not numpy:
            assert y.dtype == expected.dtype, text


@interfaces
def test_whole_numbers_that_mxnet_cuts_are_refused(tmp_path, numpy, texts):
    for text in (text for text, computes in texts.items() if not computes):
        _, found = of_whole_numbers(tmp_path, text, numpy)
        with pytest.raises((TypeError, NotImplementedError),
                           match="whole numbers"):
            pytest.fail(f"{text}: {found()}")


#: of which MXNet hands a gradient on, through a cast to whole numbers
THROUGH_WHOLE = (
    "F.cast(F.cast(x * 4, 'int32'), 'float32')",
    "F.cast(F.reshape(F.cast(x, 'int32') * 2, (-1,)), 'float32')",
    "F.cast(F.sum(F.cast(x, 'int32'), axis=0), 'float32')")
NOT_THROUGH = (
    "F.cast(F.cast(x, 'int32') > 0, 'float32') * x",
    "F.take(x, F.cast(x, 'int32'))", "F.one_hot(F.cast(x, 'int32'), 4)",
    "F.cast(F.cast(F.stop_gradient(x), 'int32'), 'float32')")


def through_whole_numbers(folder, text):
    """MXNet's result and gradient, the network of torch and its input."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        symbol = eval(text, {"F": mx.sym, "x": mx.sym.var("data")})
        x = mx.nd.array([0.3, 1.2, 2.6])
        x.attach_grad()
        block = mx.gluon.SymbolBlock(symbol, mx.sym.var("data"))
        with mx.autograd.record():
            y = block(x)
        y.backward()
        net = from_symbol(folder, symbol, {})
    import torch
    return y.asnumpy(), x.grad.asnumpy(), net, torch.tensor(
        [0.3, 1.2, 2.6], requires_grad=True)


@pytest.mark.parametrize("text", THROUGH_WHOLE)
def test_a_gradient_through_whole_numbers_is_refused(tmp_path, text):
    """PyTorch has none there."""
    _, grad, net, x = through_whole_numbers(tmp_path, text)
    assert grad.any()
    with mgpu.using_backend("torch"), pytest.raises(
            TypeError, match="hands a gradient on"):
        net(x)


@pytest.mark.parametrize("text", THROUGH_WHOLE + NOT_THROUGH)
def test_whole_numbers_inside_predict_and_train_as_mxnets(tmp_path, text):
    import torch
    expected, grad, net, x = through_whole_numbers(tmp_path, text)
    with mgpu.using_backend("torch"):
        with torch.no_grad():
            assert (net(x).numpy() == expected).all()
        if text in NOT_THROUGH:
            found = net(x)
            if found.requires_grad:
                found.sum().backward()
            assert (grad == (0 if x.grad is None else x.grad.numpy())).all()


@pytest.mark.parametrize("text, refused", [
    ("F.make_loss(x * x)", False), ("F.make_loss(x * x) * 5", True),
    ("F.sum(F.MakeLoss(x * x))", True),
    ("F.stop_gradient(F.make_loss(x * x)) * 5", False)])
def test_nothing_follows_a_loss(tmp_path, text, refused):
    """MXNet's gradient would ignore it."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        symbol = eval(text, {"F": mx.sym, "x": mx.sym.var("data")})
        with pytest.raises(NotImplementedError, match="ignores what follows"
                           ) if refused else contextlib.nullcontext():
            from_symbol(tmp_path, symbol, {})


@pytest.mark.parametrize("names", [
    ("w.1", "w_1"), ("w-1", "w.1"), ("class", "_class"),
    ("training", "state_dict")])
def test_names_that_are_no_names_of_python(tmp_path, names):
    """Two that become one, and those that a torch network has itself."""
    arrays = {name: np.array([[i + 2.0, 1.0]]) for i, name in
              enumerate(names)}
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        x = mx.sym.var("self")
        for name in names:
            x = mx.sym.broadcast_mul(x, mx.sym.var(name)) + 1
        net = from_symbol(tmp_path, x, arrays)
    with mgpu.using_backend("torch"):
        import torch
        found = net(torch.tensor([[1.0, 2.0]]).double())
        assert found.tolist() == [[10.0, 4.0]]
        mgpu.to_gluon_params(net, tmp_path / "back.params")
    assert {name: x.tolist() for name, x in mgpu.gluon_io.load_params(
        tmp_path / "back.params").items()} == {
            f"arg:{name}": x.tolist() for name, x in arrays.items()}


@pytest.mark.parametrize("axis, squeeze", [(0, False), (1, True), (-1, True)])
def test_pieces_are_refused_where_mxnet_refuses(tmp_path, axis, squeeze):
    """Also where the network uses the first of them alone."""
    import torch
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        pieces = mx.sym.split(mx.sym.var("x"), num_outputs=2, axis=axis,
                              squeeze_axis=squeeze)
        net = from_symbol(tmp_path, pieces[0] + pieces[1], {})
        own = mx.gluon.SymbolBlock(pieces[0] + pieces[1], mx.sym.var("x"))
        for size in (2, 3, 4):
            shape = [4, 4, 4]
            shape[axis] = size
            x = np.arange(np.prod(shape), dtype="float32").reshape(shape)
            try:
                expected = own(mx.nd.array(x)).asnumpy()
            except (mx.MXNetError, ValueError):
                with pytest.raises((RuntimeError, ValueError)):
                    net(torch.from_numpy(x))
                assert size == 3 or squeeze
            else:
                np.testing.assert_array_equal(net(torch.from_numpy(x)),
                                              expected)


@pytest.mark.parametrize("text, trained", [
    ("F.take(x, a, axis=1)", False), ("F.pick(x, a)", False),
    ("F.take(x, a, axis=1) + F.sum(a)", True)])
def test_an_array_of_indices_is_not_trained(tmp_path, backend, text, trained):
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        symbol = eval(text, {"F": mx.sym, "x": mx.sym.var("x"),
                             "a": mx.sym.var("a")})
        with mgpu.using_backend("torch"):
            from_symbol(tmp_path, symbol, {"a": np.ones(2, "float32")})
    net = mgpu.from_gluon(*files_in(tmp_path))
    replicas = mgpu.initialize(net, [mgpu.cpu(0)], init="keep")
    assert any(p.grad_req != "null" for p in replicas.params()) == trained


@pytest.mark.parametrize("exported", ["fixed gamma"], indirect=True)
def test_a_fixed_gamma_is_1_and_not_trained(exported, backend):
    """Whatever the file has: so does MXNet in the first pass."""
    gamma, = (name for name in mgpu.gluon_io.load_params(exported.params)
              if name.endswith("gamma"))
    replicas = mgpu.initialize(
        mgpu.from_gluon(exported.symbol, exported.params), [mgpu.cpu(0)],
        init="keep")
    names = {array: key for key, array in
             replicas.network.gluon_names().items()}
    key = names[gamma.removeprefix("arg:")]
    assert (replicas.export_numpy()[key] == 1).all()
    assert {p.grad_req for p in replicas.params() if p.name == key} == {
        "null"}


def test_a_constant_is_not_trained(tmp_path, backend):
    """The graph marks it; used by itself or as the weight of a layer."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx

        class Net(mx.gluon.HybridBlock):
            def __init__(self):
                super().__init__()
                with self.name_scope():
                    self.dense = mx.gluon.nn.Dense(3, in_units=4)
                    self.factor = self.params.get_constant(
                        "factor", mx.nd.array([[1, 2, 3]]))
                    self.mix = self.params.get_constant(
                        "mix", mx.nd.ones((2, 3)))

            def hybrid_forward(self, F, x, factor, mix):
                x = F.broadcast_mul(self.dense(x), factor)
                return F.FullyConnected(x, mix, no_bias=True, num_hidden=2)
        net = Net()
        files = export(net, tmp_path, (2, 4))
        trained = {name for name, p in net.collect_params().items()
                   if p.grad_req != "null"}
    replicas = mgpu.initialize(mgpu.from_gluon(*files), [mgpu.cpu(0)],
                               init="keep")
    names = replicas.network.gluon_names()
    assert {names[p.name] for p in replicas.params()
            if p.grad_req != "null"} == trained
    if backend.name == "torch":
        names = mgpu.gluon_source(*files, tmp_path / "net.py")
        space = {}
        exec((tmp_path / "net.py").read_text(), space)
        assert {names[key].removeprefix("arg:") for key, p in
                space["Net"]().named_parameters() if p.requires_grad
                } == trained


@pytest.mark.parametrize("make, shape", [
    (lenet, (2, 3, 8, 8)), (fixed_gamma, (2, 4, 6, 6))])
def test_a_live_block(make, shape, backend):
    """Its values of now, its names, and what it has frozen. What the new
    network does is no business of the block."""
    x = np.random.default_rng(0).normal(size=shape)
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        net = make()
        net.cast("float64")
        net.initialize(mx.init.Xavier())
        net[0].bias.grad_req = "null"
        net.hybridize()
        with pytest.raises(ValueError, match="Call hybridize"):
            mgpu.from_gluon(net)
        net.hybridize(False)
        net(mx.nd.array(x, dtype="float64"))
        with pytest.raises(ValueError, match="is not hybridized"):
            mgpu.from_gluon(net)
        net.hybridize()
        net(mx.nd.array(x, dtype="float64"))
        net[0].bias.set_data(mx.nd.arange(4, dtype="float64"))

    def values():
        with mgpu.using_backend("mxnet"):
            return {name: p.data().asnumpy()
                    for name, p in net.collect_params().items()}

    expected = values()
    replicas = mgpu.initialize(mgpu.from_gluon(net), [mgpu.cpu(0)],
                               init="keep")
    names = replicas.network.gluon_names()
    assert {names[p.name] for p in replicas.params()
            if p.grad_req != "null"} == {
        name for name, p in net.collect_params().items()
        if p.grad_req != "null"}
    found = {names[key]: value
             for key, value in replicas.export_numpy().items() if key in names}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_difference(found[name], value) < 1e-14
    for p in replicas.params():
        p.set_data(np.zeros(p.shape))
    assert all((value == expected[name]).all()
               for name, value in values().items())


@pytest.mark.parametrize("one", ["net-symbol.json", object()])
def test_a_network_is_two_files_or_a_block(one):
    with pytest.raises(TypeError, match="two files, or"):
        mgpu.from_gluon(one)


def test_inputs_are_in_the_order_of_the_block(tmp_path):
    """The graph has them in the order in which they are used."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx

        class Net(mx.gluon.HybridBlock):
            def hybrid_forward(self, F, a, b, *more):
                return more[-1] * 100 + b * 10 - a
        net = Net()
        inputs = [mx.nd.array([float(i)]) for i in range(12)]
        files = export(net, tmp_path, *inputs)
        expected = net(*inputs).asscalar()
    for engine in BACKENDS:
        with mgpu.using_backend(engine):
            net = mgpu.from_gluon(*files)
            used = [mgpu.put(np.float32([i]), mgpu.cpu(0)) for i in (0, 1, 11)]
            y = mgpu.initialize(net, [mgpu.cpu(0)], init="keep")[0](*used)
            assert mgpu.to_numpy(y).tolist() == [expected]


def test_a_layer_that_is_called_twice_is_one_module(tmp_path):
    """Two would part their running statistics as soon as they move."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        from mxnet.gluon import nn

        class Twins(mx.gluon.HybridBlock):
            def __init__(self):
                super().__init__()
                with self.name_scope():
                    self.norm = nn.BatchNorm(in_channels=3)

            def hybrid_forward(self, F, a, b):
                return self.norm(a) - F.tanh(self.norm(b))
        files = export(Twins(), tmp_path, (2, 3), (2, 3))
    with mgpu.using_backend("torch"):
        with pytest.warns(UserWarning, match="statistics differ from MXNet"):
            net = mgpu.from_gluon(*files).double()
        assert len([x for x in net.modules() if not [*x.children()]]) == 1
        x = mgpu.put(np.eye(3), mgpu.cpu(0))
        net.train()(x, x)
        moved = next(v for k, v in net.state_dict().items()
                     if k.endswith("running_mean"))
        assert abs(moved.numpy() - (1 - 0.9 ** 2) / 3).max() < 1e-6


def test_a_dtype_is_that_of_what_the_graph_makes(tmp_path, backend):
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        x = mx.sym.broadcast_mul(mx.sym.one_hot(mx.sym.var("data"), 4),
                                 mx.sym.var("weight"))
        from_symbol(tmp_path, x, {"weight": np.ones((1, 4), "float32")})
    with mgpu.using_backend(backend.name):
        for dtype in ("float64", "float16"):
            net = mgpu.from_gluon(*files_in(tmp_path), dtype=dtype)
            y = net(mgpu.put(np.array([1, 2]), mgpu.cpu(0)))
            assert mgpu.to_numpy(y).dtype == dtype


@small
def test_a_dtype_is_that_of_all_parameters(exported, backend):
    net = mgpu.from_gluon(exported.symbol, exported.params, dtype="float32")
    with mgpu.using_backend(backend.name):
        replicas = mgpu.initialize(net, [mgpu.cpu(0)])
        assert {p.dtype for p in replicas.params()} == {"float32"}


# -- what is refused ----------------------------------------------------------

def edited(path, edit):
    """The graph, changed by ``edit(nodes)``."""
    graph = json.loads(path.read_text())
    edit(graph["nodes"])
    path.write_text(json.dumps(graph))


def _layer(nodes, op):
    return next(n for n in nodes if n["op"] == op)


@pytest.mark.parametrize("exported", ["lenet"], indirect=True)
@pytest.mark.parametrize("edit, error, match", [
    (lambda n: _layer(n, "Pooling").update(op="_made_up"),
     NotImplementedError, "_made_up: no rule .node .*Add rules with"),
    (lambda n: _layer(n, "BatchNorm")["attrs"].update(
        output_mean_var="True"),
     NotImplementedError, "BatchNorm: output_mean_var=True"),
    (lambda n: _layer(n, "Pooling")["attrs"].update(pad="(2, 2)"),
     NotImplementedError, "Pooling: pad=.* half a window at most"),
    (lambda n: _layer(n, "Convolution")["attrs"].update(strides="2"),
     ValueError, "attributes .'strides'.*does not know"),
    (lambda n: _layer(n, "Convolution")["attrs"].pop("kernel"),
     ValueError, "has no kernel"),
    (lambda n: _layer(n, "Convolution")["attrs"].update(num_filter="5"),
     ValueError, "belong together; received .*weight' of shape"),
    (lambda n: n[1].update(name="other_weight"),
     ValueError, "the arrays conv.*_weight, which the graph has not"),
    (lambda n: n[0].pop("name"), ValueError, "expected a graph"),
    (lambda n: _layer(n, "Convolution").update(inputs=[[99, 0, 0]]),
     ValueError, "come after it"),
], ids=lambda x: getattr(x, "__name__", str(x))[:20])
def test_what_does_not_fit_is_refused(exported, edit, error, match):
    edited(exported.symbol, edit)
    with mgpu.using_backend("torch"), pytest.raises(error, match=match):
        mgpu.from_gluon(exported.symbol, exported.params)


@pytest.mark.parametrize("exported", ["joined", "encoder"], indirect=True)
def test_a_damaged_graph_is_read_or_refused(exported, tmp_path):
    """No other error, whatever is missing or of another type."""
    graph = json.loads(Path(exported.symbol).read_text())
    file, outcomes = tmp_path / "x.json", set()
    for seed in range(200):
        file.write_text(json.dumps(graph_mutation(graph, seed)))
        try:
            with mgpu.using_backend("torch"):
                mgpu.from_gluon(file, exported.params)
            outcomes.add("read")
        except (ValueError, NotImplementedError) as error:
            outcomes.add(type(error).__name__)
    assert outcomes >= {"read", "UnreadableSymbol", "MissingOperator"}


@pytest.mark.parametrize("exported", ["lenet"], indirect=True)
def test_a_user_adds_a_rule(exported, monkeypatch):
    from mgpu.gluon_io import parts
    monkeypatch.setattr(parts, "_rules", dict(parts._rules))
    edited(exported.symbol, lambda n: _layer(n, "Activation").update(
        op="_made_up", attrs={}))
    with mgpu.using_backend("mxnet"):
        expected = exported.gluon()
    with mgpu.using_backend("torch"):
        mgpu.register_op("_made_up", lambda node, inputs: parts.Call(
            "torch.tanh", (parts.Slot(0),)))
        net = mgpu.from_gluon(exported.symbol, exported.params)
        assert_same(exported.torch(net), expected)


def _prune(net):
    from torch.nn.utils import prune
    prune.l1_unstructured(net.dense1, "weight", 0.5)


def _normalise(net):
    from torch.nn.utils import parametrizations
    parametrizations.weight_norm(net.dense1)


def _replace(*args, **options):
    def change(net):
        import torch
        net.dense1 = torch.nn.Linear(*args, **options)
    return change


@pytest.mark.parametrize("change, error, match", [
    (_prune, ValueError, "dense1.weight missing where Gluon has .3, 4."),
    (_normalise, ValueError, "dense1.weight missing"),
    (_replace(4, 9), ValueError, r"dense1.weight \(9, 4\) where .*\(3, 4\)"),
    (_replace(4, 3, bias=False), ValueError, "dense1.bias missing"),
    (lambda net: net.dense0.register_parameter("bias", net.dense1.bias),
     ValueError, r"dense0.bias \(3,\) where Gluon has none"),
    (lambda net: net.bfloat16(), TypeError, "no bfloat16; .*net.float"),
    (lambda net: net.to("meta"), ValueError, "without values"),
], ids=["pruned", "weight norm", "another head", "no bias", "a bias",
        "bfloat16", "meta"])
def test_a_network_that_was_changed_does_not_go_back(
        tmp_path, change, error, match):
    """What MXNet could not read, or would lose."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4,
                                  no_bias=True, name="dense0")
        x = mx.sym.FullyConnected(x, num_hidden=3, name="dense1")
        net = from_symbol(tmp_path, x, {
            "dense0_weight": np.ones((4, 2)), "dense1_bias": np.ones(3),
            "dense1_weight": np.ones((3, 4))})
    with mgpu.using_backend("torch"):
        import torch
        back = tmp_path / "back.params"
        mgpu.to_gluon_params(torch.compile(net, backend="eager"), back)
        assert len(mgpu.gluon_io.load_params(back)) == 3
        back.unlink()
        change(net)
        with pytest.raises(error, match=match):
            mgpu.to_gluon_params(net, back)
    assert not back.exists()


def test_only_networks_of_from_gluon_go_back(tmp_path):
    import torch
    with mgpu.using_backend("torch"), pytest.raises(
            TypeError, match="only a network of from_gluon"):
        mgpu.to_gluon_params(torch.nn.Linear(2, 2), tmp_path / "x.params")
    assert not list(tmp_path.iterdir())
