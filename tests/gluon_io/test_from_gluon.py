"""Networks that real MXNet exports, and what mgpu makes of them."""
import contextlib
import copy
import json
from pathlib import Path

import numpy as np
import pytest

import mgpu
import mgpu.testing
from conftest import BACKENDS
from helpers import relative_difference
from nets import gluon

from . import samples
from .conftest import export, files_in, imported
from .grid import Input, by_mxnet, by_net, difference, summed
from .mutations import graph_mutation

if set(BACKENDS) < {"mxnet", "torch"}:
    pytest.skip("these compare two engines", allow_module_level=True)


lenet = gluon(lambda nn: [
    nn.Conv2D(4, 3, padding=1), nn.Activation("tanh"), nn.MaxPool2D(),
    nn.Conv2D(6, (3, 2), strides=(2, 1), use_bias=False),
    nn.BatchNorm(epsilon=1e-3, momentum=0.7), nn.Activation("sigmoid"),
    nn.Dense(5, use_bias=False), nn.Activation("softrelu"), nn.Dense(3)])
fixed_gamma = gluon(lambda nn: [
    nn.Conv2D(4, 3, groups=2), nn.BatchNorm(scale=False), nn.GlobalMaxPool2D(),
    nn.Flatten(), nn.Dense(3, flatten=False)])
#: of other axes, of groups, and with statistics that stay
norms = gluon(lambda nn: [
    nn.Conv2D(6, 3), nn.GroupNorm(3),
    nn.BatchNorm(axis=-1, use_global_stats=True),
    nn.BatchNorm(use_global_stats=True), nn.Conv2D(2, 1),
    nn.BatchNorm(axis=2, use_global_stats=True, scale=False)])


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


def encoder():
    """A block of BERT: attention of two heads."""
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
            def heads(y):
                y = F.transpose(F.reshape(y, (0, 0, 2, -1)), (0, 2, 1, 3))
                return F.reshape(y, (-1, 0, 0), reverse=True)
            q, k, v = (heads(layer(x)) for layer in (self.query, self.key,
                                                     self.value))
            scores = F.batch_dot(q, k, transpose_b=True) / 3 ** 0.5
            scores = F.transpose(F.SequenceMask(
                F.transpose(scores, (0, 2, 1)), F.repeat(lengths, 2, axis=0),
                use_sequence_length=True, value=-1e6, axis=1), (0, 2, 1))
            y = F.batch_dot(self.dropout(F.softmax(scores)), v)
            y = F.reshape(y, (-1, 2, 0, 0), reverse=True)
            y = F.reshape(F.transpose(y, (0, 2, 1, 3)), (0, 0, -1))
            x = self.norms[0](x + self.out(y))
            return self.norms[1](x + self.narrow(self.gelu(self.wide(x))))
    return Encoder()


def mixer():
    import mxnet as mx
    return samples.NETWORKS["mixer"][0](mx)


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


class Whole(tuple):
    """The shape of an input of whole numbers, from 1 on."""


def resnet18():
    """With fewer channels."""
    from mxnet.gluon.model_zoo import vision
    return vision.ResNetV1(vision.BasicBlockV1, [2] * 4, [4, 4, 6, 8, 10],
                           classes=3, thumbnail=True)


NETWORKS = {"lenet": (lenet, (2, 2, 9, 8)),
            "fixed gamma": (fixed_gamma, (2, 2, 6, 6)),
            "joined": (joined, (4, 6)),
            "lstm": (words("LSTM", num_layers=2), Whole((4, 3))),
            "lstm with states": (words("LSTM", num_layers=2),
                                 Whole((4, 3)), (2, 3, 5), (2, 3, 5)),
            "gru both ways": (words("GRU", "NTC", bidirectional=True),
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
            "encoder": (encoder, (3, 4, 6), Whole((3,))),
            "np mixer": (mixer, (3, 4, 5)),
            "resnet18": (resnet18, (2, 3, 32, 32))}


class Exported:
    """A Gluon network with values, and its files: a case of `grid`."""

    train = True

    def __init__(self, name, folder):
        import mxnet as mx
        make, *shapes = NETWORKS[name]
        # the interface of the network, nd or np
        self.op = "_np" if name.startswith("np ") else ""
        # MXNet's GELU is computed in float32
        self.tolerance = 1e-6 if name == "encoder" else 1e-10
        rng = np.random.default_rng(0)
        entering = [rng.integers(1, 4, shape).astype(float)
                    if isinstance(shape, Whole) else rng.normal(size=shape)
                    for shape in shapes]
        with self.interface():
            array = (mx.np if self.op else mx.nd).array
            self.entering = [array(x, dtype="float64") for x in entering]
            net = make()
            net.cast("float64")
            # np draws no float64
            net.initialize(mx.init.Zero())
            net.hybridize()
            net(*self.entering)
            for key, p in net.collect_params().items():
                fan = np.prod(p.shape[1:]) if key.endswith("weight") else 4
                value = rng.normal(size=p.shape) / np.sqrt(fan)
                if key.endswith(("gamma", "running_var")):
                    value = 0.5 + abs(value)
                p.set_data(array(value, dtype="float64"))
            net.export(str(folder / "net"))
        self.symbol, self.params = files_in(folder)
        names = [f"data{i}" for i in range(len(shapes))] \
            if len(shapes) > 1 else ["data"]
        self.inputs = [Input(x.shape, moves=not isinstance(shape, Whole))
                       for x, shape in zip(entering, shapes)]
        self.given = dict(zip(names, entering))
        for key, x in mgpu.gluon_io.load_params(self.params).items():
            kind, _, name = key.partition(":")
            self.given[name] = x
            self.inputs.append(Input(x.shape, kept=kind))

    @contextlib.contextmanager
    def interface(self):
        import mxnet as mx
        with mx.util.np_shape(bool(self.op)), mx.util.np_array(bool(self.op)):
            yield

    def names(self):
        return list(self.given)

    def arrays(self):
        return list(self.given.values())

    def graph(self):
        return self.symbol.read_text()

    def predicting(self):
        other = copy.copy(self)
        other.train = False
        return other


@pytest.fixture
def exported(request, tmp_path):
    with mgpu.using_backend("mxnet"):
        return Exported(request.param, tmp_path)


def on(*names):
    """A decorator of a test on these `NETWORKS`."""
    return pytest.mark.parametrize("exported", names, indirect=True)


def assert_same(found, expected, tolerance=1e-10):
    """Of those whose numbers are not zero but for rounding."""
    largest = max(x[-1] for x in expected)
    found, expected = zip(*(
        pair for pair in zip(found, expected, strict=True)
        if pair[1][-1] > 1e-12 * largest))
    assert difference(found, expected) < tolerance


@on(*NETWORKS)
def test_a_network_computes_as_gluons(exported, tmp_path):
    """Predictions, gradients of all parameters and of the input, and what a
    training pass leaves in running statistics. Once it is trained it is
    written for MXNet, which predicts the same."""
    cases = exported.predicting(), exported
    with mgpu.using_backend("torch"):
        import torch
        net = mgpu.from_gluon(exported.symbol, exported.params)
        found = [by_net(case, net) for case in cases]
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.125 * p.grad
        mgpu.to_gluon_params(net, tmp_path / "back.params")
        trained = by_net(cases[0], net)
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        for case, x in zip(cases, found):
            assert_same(x, by_mxnet(case), exported.tolerance)
        with exported.interface():
            block = mgpu.from_gluon(exported.symbol, tmp_path / "back.params")
            assert isinstance(block, mx.gluon.SymbolBlock)
            outputs = block(*exported.entering)
    first = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
    assert_same([summed(first.asnumpy())], trained[:1], exported.tolerance)


def from_symbol(folder, symbol, arrays):
    """What `from_gluon` makes of a symbol of MXNet's."""
    import mxnet as mx
    symbol.save(str(folder / "net-symbol.json"))
    mx.nd.save(str(folder / "net-0000.params"), {
        f"arg:{name}": mx.nd.array(x, dtype=x.dtype)
        for name, x in arrays.items()})
    with mgpu.using_backend("torch"):
        return mgpu.from_gluon(*files_in(folder))


def from_text(folder, text, arrays=None, **names):
    """Of an expression, or several, of `F` and variables, whose names are
    given where they are others."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        found = eval(text, {"F": mx.sym, **{
            x: mx.sym.var(names.get(x, x)) for x in "xya"}})
        return from_symbol(folder, mx.sym.Group(found) if isinstance(
            found, tuple) else found, arrays or {})


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


def compare_live(net, shape, **options):
    """Compares the training of a network with that of what `from_gluon` makes
    of it, which is returned."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        net.initialize(mx.init.Xavier())
        net.hybridize()
        net(mx.nd.ones(shape))
    with mgpu.using_backend("torch"):
        other = mgpu.from_gluon(net)
    rng = np.random.default_rng(0)
    mgpu.testing.assert_parity(net, other, batches=[
        (rng.normal(size=shape), rng.integers(2, size=shape[0]))], **options)
    return other


def test_dropout_takes_the_masks_of_gluon_or_is_off():
    """And on again. There are none between recurrent layers."""
    def around(make):
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import rnn
        return gluon(lambda nn: [nn.Dense(5, flatten=False), make(nn, rnn),
                                 nn.Dense(2)])()
    compare_live(around(lambda nn, rnn: nn.Dropout(0.5, axes=(1,))),
                 (6, 3, 4), dropout="masks", dtype="float64")
    recurrent = around(lambda nn, rnn: rnn.LSTM(3, 2, layout="NTC",
                                                dropout=0.3))
    other = compare_live(recurrent, (6, 3, 4), dropout="off", dtype="float32")
    assert recurrent[1]._dropout == 0.3
    assert 0.3 in [getattr(m, "dropout", 0) for m in other.modules()]
    with pytest.raises(ValueError, match="dropout='off'"):
        compare_live(recurrent, (6, 3, 4), dropout="masks", dtype="float32")


def test_equal_blocks_with_a_fixed_gamma_match():
    """Their order is told by what arrives at them, where the value of a gamma
    that is fixed counts on no side."""
    with mgpu.using_backend("mxnet"):
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
    compare_live(gluon(lambda nn: [Block(), Block(), nn.GlobalAvgPool2D(),
                                   nn.Dense(3)])(), (6, 3, 6, 6))


@pytest.mark.parametrize("text", [
    "F.zeros((0, 4))", "F.FullyConnected(F.zeros((0, 4)), a, num_hidden=4, "
    "no_bias=True)", "F.broadcast_add(x, F.zeros((0, 4)))",
    "F.elemwise_add(F.slice_axis(x, axis=0, begin=0, end=1), "
    "F.zeros((0, 4)))"])
def test_a_size_that_nothing_says_is_refused(tmp_path, text):
    """MXNet finds it by the shapes of all arrays; PyTorch has those of the
    inputs."""
    arrays = {"a": np.ones((4, 4), "float32")} if ", a," in text else {}
    with pytest.raises(NotImplementedError, match="_zeros: shape="):
        from_text(tmp_path, f"({text}, x * 2)", arrays)


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


@pytest.mark.parametrize("numpy, texts", [
    (False, IN_SYM), (True, IN_NP)], ids=["sym", "np"])
def test_whole_numbers(tmp_path, numpy, texts):
    """As MXNet, dtype of fractions included, or refused where MXNet cuts
    them."""
    for text, computes in texts.items():
        expected, found = of_whole_numbers(tmp_path, text, numpy)
        if not computes:
            with pytest.raises((TypeError, NotImplementedError),
                               match="whole numbers"):
                pytest.fail(f"{text}: {found()}")
            continue
        y = found()
        assert y.dtype.kind == expected.dtype.kind, text
        assert y.shape == expected.shape, text
        assert relative_difference(y, expected) < 1e-6, text
        if y.dtype.kind != "f" or not numpy:
            assert y.dtype == expected.dtype, text


#: of which MXNet hands a gradient on, through a cast to whole numbers
THROUGH_WHOLE = (
    "F.cast(F.cast(x * 4, 'int32'), 'float32')",
    "F.cast(F.reshape(F.cast(x, 'int32') * 2, (-1,)), 'float32')",
    "F.cast(F.sum(F.cast(x, 'int32'), axis=0), 'float32')")
NOT_THROUGH = (
    "F.cast(F.cast(x, 'int32') > 0, 'float32') * x",
    "F.take(x, F.cast(x, 'int32'))", "F.one_hot(F.cast(x, 'int32'), 4)",
    "F.cast(F.cast(F.stop_gradient(x), 'int32'), 'float32')")


@pytest.mark.parametrize("text", THROUGH_WHOLE + NOT_THROUGH)
def test_whole_numbers_inside_predict_and_train_as_mxnets(tmp_path, text):
    """Or are refused in training: PyTorch has no gradient there."""
    import torch
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        net = from_text(tmp_path, text)
        block = mx.gluon.SymbolBlock.imports(
            str(tmp_path / "net-symbol.json"), ["x"])
        x = mx.nd.array([0.3, 1.2, 2.6])
        x.attach_grad()
        with mx.autograd.record():
            expected = block(x)
        expected.backward()
        grad = x.grad.asnumpy()
    with mgpu.using_backend("torch"):
        x = torch.tensor([0.3, 1.2, 2.6], requires_grad=True)
        with torch.no_grad():
            assert (net(x).numpy() == expected.asnumpy()).all()
        if text in THROUGH_WHOLE:
            assert grad.any()
            with pytest.raises(TypeError, match="hands a gradient on"):
                net(x)
            return
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
    with pytest.raises(NotImplementedError, match="ignores what follows"
                       ) if refused else contextlib.nullcontext():
        from_text(tmp_path, text)


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


@pytest.mark.parametrize("axis, squeeze, size", [
    (0, False, 3), (1, True, 3), (1, True, 4), (-1, True, 4)])
def test_pieces_are_refused_where_mxnet_refuses(tmp_path, axis, squeeze,
                                                size):
    """Also where the network uses the first of them alone."""
    import torch
    net = from_text(tmp_path, f"F.split(x, num_outputs=2, axis={axis}, "
                    f"squeeze_axis={squeeze})[0] * 2")
    shape = [4, 4, 4]
    shape[axis] = size
    with pytest.raises((RuntimeError, ValueError)):
        net(torch.ones(shape))


def kept(*source):
    """Replicas of `from_gluon` with the values of the file, the names of
    Gluon by those of parameters, and the names of what is trained."""
    replicas = mgpu.initialize(mgpu.from_gluon(*source), [mgpu.cpu(0)],
                               init="keep")
    names = replicas.network.gluon_names()
    return replicas, names, {names[p.name] for p in replicas.params()
                             if p.grad_req != "null"}


def trained(block):
    return {name for name, p in block.collect_params().items()
            if p.grad_req != "null"}


@pytest.mark.parametrize("text, trains", [
    ("F.take(x, a, axis=1)", False), ("F.pick(x, a)", False),
    ("F.take(x, a, axis=1) + F.sum(a)", True)])
def test_an_array_of_indices_is_not_trained(tmp_path, backend, text, trains):
    from_text(tmp_path, text, {"a": np.ones(2, "float32")})
    with mgpu.using_backend(backend.name):
        assert bool(kept(*files_in(tmp_path))[2]) == trains


@on("fixed gamma")
def test_a_fixed_gamma_is_1_and_not_trained(exported, backend):
    """Whatever the file has: so does MXNet in the first pass."""
    replicas, names, trains = kept(exported.symbol, exported.params)
    key, = (key for key, name in names.items() if name.endswith("gamma"))
    assert (replicas.export_numpy()[key] == 1).all()
    assert trains and names[key] not in trains


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
    assert kept(*files)[2] == trained(net)
    if backend.name == "torch":
        names = mgpu.gluon_source(*files, tmp_path / "net.py")
        written = imported(tmp_path / "net.py").Net()
        assert {names[key].removeprefix("arg:")
                for key, p in written.named_parameters() if p.requires_grad
                } == trained(net)


def test_a_live_block(backend):
    """Its values of now, its names, and what it has frozen. What the new
    network does is no business of the block."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        x = mx.nd.ones((2, 4, 6, 6), dtype="float64")
        net = fixed_gamma()
        net.cast("float64")
        net.initialize(mx.init.Xavier())
        net[0].bias.grad_req = "null"
        for hybridize, words in ((True, "Call hybridize"),
                                 (False, "is not hybridized")):
            net.hybridize(hybridize)
            with pytest.raises(ValueError, match=words):
                mgpu.from_gluon(net)
            net(x)
        net.hybridize()
        net(x)
        net[0].bias.set_data(mx.nd.arange(4, dtype="float64"))

    def values():
        with mgpu.using_backend("mxnet"):
            return {name: p.data().asnumpy()
                    for name, p in net.collect_params().items()}

    expected = values()
    replicas, names, trains = kept(net)
    assert trains == trained(net)
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


@on("joined")
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


@on("lenet")
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


@on("joined", "encoder")
def test_a_damaged_graph_is_read_or_refused(exported, tmp_path):
    """No other error, whatever is missing or of another type."""
    graph = json.loads(Path(exported.symbol).read_text())
    file, outcomes = tmp_path / "x.json", set()
    for seed in range(100):
        file.write_text(json.dumps(graph_mutation(graph, seed)))
        try:
            with mgpu.using_backend("torch"):
                mgpu.from_gluon(file, exported.params)
            outcomes.add("read")
        except (ValueError, NotImplementedError) as error:
            outcomes.add(type(error).__name__)
    assert outcomes >= {"read", "UnreadableSymbol", "MissingOperator"}


@on("lenet")
def test_a_user_adds_a_rule(exported, monkeypatch):
    from mgpu.gluon_io import parts
    monkeypatch.setattr(parts, "_rules", dict(parts._rules))
    with mgpu.using_backend("mxnet"):
        expected = by_mxnet(exported)
    edited(exported.symbol, lambda n: _layer(n, "Activation").update(
        op="_made_up", attrs={}))
    with mgpu.using_backend("torch"):
        mgpu.register_op("_made_up", lambda node, inputs: parts.Call(
            "torch.tanh", (parts.Slot(0),)))
        net = mgpu.from_gluon(exported.symbol, exported.params)
        assert_same(by_net(exported, net), expected)


def _prune(net):
    from torch.nn.utils import prune
    prune.l1_unstructured(net.dense1, "weight", 0.5)


def _replace(*args, **options):
    def change(net):
        import torch
        net.dense1 = torch.nn.Linear(*args, **options)
    return change


@pytest.mark.parametrize("change, error, match", [
    (_prune, ValueError, "dense1.weight missing where Gluon has .3, 4."),
    (_replace(4, 9), ValueError, r"dense1.weight \(9, 4\) where .*\(3, 4\)"),
    (_replace(4, 3, bias=False), ValueError, "dense1.bias missing"),
    (lambda net: net.dense0.register_parameter("bias", net.dense1.bias),
     ValueError, r"dense0.bias \(3,\) where Gluon has none"),
    (lambda net: net.bfloat16(), TypeError, "no bfloat16; .*net.float"),
    (lambda net: net.to("meta"), ValueError, "without values"),
], ids=["pruned", "another head", "no bias", "a bias",
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
