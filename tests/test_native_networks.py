"""Native networks of all kinds: Gluon's array families, parameters that are no
attributes, buffers, saving; layers and data that cannot be trained raise."""
import contextlib
import copy

import numpy as np
import pytest

import mgpu
from batches import pictures, rows
from helpers import (ENGINES, assert_all_equal, assert_bit_equal, bricks,
                     convnet, on, on_mxnet, on_torch, relative_difference,
                     using_engine)
from nets import native_values, on_each, sequential, shards_of, train

MXNET = [engine for engine in ENGINES if engine.startswith("mxnet")]


# -- Gluon --------------------------------------------------------------------

@pytest.mark.parametrize("name", MXNET)
def test_gluon_code_of_each_array_family(name, devices):
    """A legacy `hybrid_forward` (which breaks in NumPy mode) and one of
    `mx.np` (which breaks outside of it), each in its own mode."""
    with using_engine(name):
        import mxnet as mx

        class Legacy(mx.gluon.HybridBlock):
            def __init__(self):
                super().__init__()
                self.dense = mx.gluon.nn.Dense(3, in_units=6)

            def hybrid_forward(self, F, x):
                # In legacy shapes 0 keeps an axis; elemwise_add is legacy.
                x = F.reshape(x, shape=(0, -1))
                return F.elemwise_add(self.dense(F.relu(x)), self.dense(x))

        class Modern(Legacy):
            def hybrid_forward(self, F, x):
                x = F.np.reshape(x, (-1, 6))
                return self.dense(F.npx.relu(x)) + self.dense(x)
        replicas = mgpu.initialize(
            (Modern if name == "mxnet-np" else Legacy)(), devices, "xavier",
            dtype="float64")
        x = pictures(4, (2, 3), "float64")
        train(replicas, x)
        flat, values = x.reshape(4, 6), on_each(replicas)
        for i, replica in enumerate(replicas):
            found = mgpu.to_numpy(replica(mgpu.put(x, replica.device)))
            wanted = (np.maximum(flat, 0) + flat) @ values["dense.weight"][
                i].T + 2 * values["dense.bias"][i]
            # float64 and sums of six products
            assert relative_difference(found, wanted) < 1e-14
    assert not mx.npx.is_np_array()


@pytest.mark.parametrize("name", MXNET)
def test_a_network_runs_in_the_family_of_its_input(name):
    """Whatever mode the calling thread is in."""
    with using_engine(name):
        replicas = mgpu.initialize(convnet(mgpu.get_backend()), on(0, 1),
                                   "uniform")
        shards = shards_of(pictures(4), replicas)
        wanted = [mgpu.to_numpy(out) for out in replicas(shards)]
    for other in MXNET:
        with using_engine(other):
            for a, b in zip(replicas(shards), wanted):
                assert type(a) is type(shards[0])
                assert_bit_equal(mgpu.to_numpy(a), b)


@on_mxnet
def test_what_gluon_saves_are_the_bits_of_replica_0(engine, devices, tmp_path):
    """Gluon's own mean over 3 contexts changes last bits."""
    from mxnet import gluon
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(30, in_units=30))
    mgpu.initialize(net, devices, "uniform", dtype="float64")
    net[0].bias.data()[:] = 4       # no pass has followed it
    apart = copy.deepcopy(net)
    apart[0].bias.data()[:] = 2
    for one in (net, apart):
        wanted = native_values(engine, one)
        one.save_parameters(str(tmp_path / "net"))
        for x in one.collect_params().values():
            x.set_data(x.data() * 0)
        one.load_parameters(str(tmp_path / "net"))
        assert_all_equal(native_values(engine, one), wanted)


def loose(way):
    """A Gluon network with parameters that are no attributes of a block."""
    import mxnet as mx
    nn = mx.gluon.nn

    class Net(nn.Block):
        def __init__(self):
            super().__init__()
            if way == "fetched":
                self.params.get("w", shape=(4, 4))
            else:
                self.own = [nn.Dense(4, in_units=4, use_bias=False)]
                self.params.update(self.own[0].params)
            self.end = nn.Dense(3, in_units=4)

        def collect_params(self, select=None):
            if way == "collected":      # not of the block's own
                found = mx.gluon.ParameterDict()
                found.update(self.own[0].collect_params())
                found.update(self.end.collect_params())
                return found
            return super().collect_params(select)

        def forward(self, x):
            if way != "fetched":
                return self.end(self.own[0](x))
            w = self.params.get("w")
            dot = mx.np.dot if mx.util.is_np_array() else mx.nd.dot
            return self.end(dot(x, w.data(x.context)))
    return Net()


no_warning = pytest.mark.filterwarnings(
    "ignore:.*unregistered container with Blocks")


@no_warning
@pytest.mark.parametrize("way", ["fetched", "taken in", "collected"])
@pytest.mark.parametrize("name", MXNET)
def test_all_that_gluons_own_trainer_trains_is_trained(name, devices, way):
    """``net.collect_params()``, also what is no attribute of a block: as in
    a loop of Gluon's own."""
    with using_engine(name) as engine:
        from mxnet import autograd
        first, L2 = on(0)[0], mgpu.losses.L2Loss()
        net, plain = loose(way), loose(way)
        if name == "mxnet-nd":
            net.initialize()
        replicas = mgpu.initialize(
            net, devices, dtype="float64",
            init=None if name == "mxnet-nd" else "xavier")
        own = "w" if way == "fetched" else "dense_weight"
        assert sorted(p.name for p in replicas.params()) \
            == sorted([own, "end.bias", "end.weight"])
        assert (replicas.export_numpy()[own] != 0).all()
        plain.initialize()
        plain.cast("float64")
        pairs = list(zip(net.collect_params().values(),
                         plain.collect_params().values()))
        for p, q in pairs:
            q.set_data(engine.put(p.list_data()[0].asnumpy(), first))
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
        for seed in range(3):
            X = rows(8, 4, "float64", seed)
            y = rows(8, 3, "float64", seed + 9)
            mgpu.train_batch(X, y, replicas, L2, trainer)
            with autograd.record():
                total = L2(plain(engine.put(X, first)), engine.put(y, first))
            total.backward()
            for _, q in pairs:
                q.set_data(engine.put(q.data().asnumpy() - 0.5 / 8
                                      * q.grad().asnumpy(), first))
        for p, q in pairs:
            for x in p.list_data():
                assert relative_difference(
                    x.asnumpy(), q.data().asnumpy()) < 1e-12, p.name


@no_warning
@on_mxnet
def test_a_parameter_that_comes_later_is_refused(engine):
    net = loose("fetched")
    replicas = mgpu.initialize(net, on(0, 1), "xavier")
    net.params.get("late", shape=(2,)).initialize()
    with pytest.raises(RuntimeError, match="received others under "
                       "'late'"):
        replicas[0](engine.put(np.ones((2, 4)), mgpu.cpu(0)))


@on_mxnet
def test_what_gluons_own_trainer_leaves_out_is_refused(engine):
    """Unless it is frozen."""
    import mxnet as mx

    class Net(mx.gluon.nn.Block):
        def __init__(self):
            super().__init__()
            self.scale = mx.gluon.Parameter("scale", shape=(3,))
            self.end = mx.gluon.nn.Dense(3, in_units=6)

        def forward(self, x):
            return self.end(x) * self.scale.data(x.ctx)
    net = Net()
    net.initialize()
    net.scale.initialize(mx.init.One())
    for wanted in ("xavier", "keep"):
        with pytest.raises(ValueError, match="received others: 'scale'. "
                           "Create a parameter with self"):
            mgpu.initialize(net, on(0, 1), wanted)
    net.scale.grad_req = "null"
    train(mgpu.initialize(net, on(0, 1), "keep"), rows(8))


# -- torch, and both ----------------------------------------------------------

def with_buffer(engine):
    """Adds to its input a number that is neither trained nor drawn: 7."""
    base, dense = bricks(engine)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.dense = dense(6, 3)

        def forward(self, x):
            return self.dense(x) + (self.params.get("offset").data(x.ctx) if
                                    engine.name == "mxnet" else self.offset)
    net, seven = Net(), engine.put(np.float32([7]), mgpu.cpu(0))
    if engine.name == "torch":
        net.register_buffer("offset", seven)
    else:
        net.offset = net.params.get("offset", shape=(1,), grad_req="null")
        net.initialize()
        net.offset.set_data(seven)
    return net


def test_other_buffers_are_copied_as_they_are(engine, devices):
    replicas = mgpu.initialize(with_buffer(engine), devices, "zeros")
    offset, = replicas.buffers()
    assert (offset.name, offset.kind, offset.grad_req) \
        == ("offset", "other", "null")
    for replica in replicas:
        found = mgpu.to_numpy(replica(mgpu.put(rows(2), replica.device)))
        assert_bit_equal(found, np.full((2, 3), 7, "float32"))
    train(replicas, rows(4))
    for value in offset.list_data():
        assert mgpu.to_numpy(value).tolist() == [7]
    values = replicas.export_numpy()
    assert values.pop("offset").tolist() == [7]
    replicas.import_numpy(values)       # the other backend may not have it


@on_torch
def test_a_torch_users_module_stays_an_ordinary_module(engine):
    """Its keys, flags, members, classes and hooks, after errors too."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
            self.fail = False

        def forward(self, x):
            if self.fail:
                raise KeyError("the user's own")
            return self.drop(self.bn(x))

    def outside():
        return [list(net.state_dict()), [
            (type(m), m.training, sorted(vars(m).keys() - {"_mgpu_replicas"}),
             m.forward.__func__) for m in net.modules()]]
    net = nn.Sequential(Block(), nn.Linear(6, 3))
    net[0].bn.eval()        # a mixture of flags
    hooked = []
    net[1].register_forward_hook(lambda *_: hooked.append(1))
    before = outside()
    replicas = mgpu.initialize(net, on(0, 1), "uniform")
    train(replicas, rows(5))
    replicas(shards_of(rows(5), replicas))
    mgpu.evaluate_accuracy_gpus(replicas, [(rows(5), np.zeros(5))])
    assert len(hooked) == 6             # hooks on replicas
    net[0].fail = True
    for scope in (mgpu.record, mgpu.no_grad):
        with scope(), contextlib.suppress(KeyError):
            replicas(shards_of(rows(5), replicas))
    assert outside() == before
    net[0].fail = False
    twin = copy.deepcopy(net)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin.eval()(torch.ones(2, 6)),
                       net.eval()(torch.ones(2, 6)))


# -- layers that cannot be trained --------------------------------------------

def layers_of(engine, gluon, torch):
    """A network of the layers that one of the two functions makes."""
    if engine.name == "mxnet":
        import mxnet as mx
        return sequential(engine, gluon(mx.gluon))
    from torch import nn
    return sequential(engine, torch(nn))


def test_sparse_gradients_are_refused(engine):
    for k in (1, 2):
        net = layers_of(
            engine, lambda gluon: [gluon.nn.Embedding(4, 3, sparse_grad=True)],
            lambda nn: [nn.Embedding(4, 3, sparse=True)])
        with pytest.raises(ValueError, match="sparse gradients are not "
                           "supported; received them for '0.weight'"):
            mgpu.initialize(net, on(*range(k)), dtype="float64")
        assert "float32" in str(net[0].weight.dtype)


def sparse_buffer(nn):
    import torch
    layer = nn.Linear(4, 3)
    layer.register_buffer("graph", torch.eye(3).to_sparse())
    return layer


def complex_weight(nn):
    import torch
    layer = nn.Linear(4, 3)
    layer.factor = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return layer


@on_torch
@pytest.mark.parametrize("make, words, single", [
    (sparse_buffer, r"sparse, complex or float8 ones: \['0.graph'\]", False),
    (complex_weight, r"sparse, complex or float8 ones: \['0.factor'\]", False),
    (lambda nn: nn.Embedding(4, 3, scale_grad_by_freq=True),
     r"received it in \['0'\]", True)])
def test_layers_that_do_not_fit_are_refused(engine, make, words, single):
    """`single`: one device has them."""
    from torch import nn
    for k in (1, 2):
        with contextlib.nullcontext() if single and k == 1 else \
                pytest.raises(ValueError, match=words):
            mgpu.initialize(nn.Sequential(make(nn)), on(*range(k)))


@on_torch
@pytest.mark.device_counts(1, 3)
def test_a_sparse_gradient_of_the_networks_own_code(engine, devices):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(5, 3))

        def forward(self, x):
            return torch.nn.functional.embedding(
                x, self.weight, sparse=True)
    replicas = mgpu.initialize(Net(), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    mgpu.train_batch(np.arange(4), np.zeros(4, "int64"), replicas,
                     mgpu.losses.SoftmaxCrossEntropyLoss(), trainer)
    for x in on_each(replicas)["weight"]:
        assert (x != 1).any(axis=1).tolist() == [True] * 4 + [False]


def slopes(kind):
    """A Gluon network with a PReLU between two layers, and a batch."""
    import mxnet as mx
    from mxnet.gluon import nn
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(nn.Dense(3, in_units=2), nn.PReLU(), nn.Dense(2, in_units=3))
    mx.random.seed(1)
    net.initialize(mx.init.Normal(1))
    if kind != "plain":
        net.hybridize()
    x = mx.nd.array([[1, 2], [3, -4], [-5, 6], [7, 8]])
    net(x)
    if kind == "children":      # each layer is a graph of its own
        net._active = False
    elif kind == "symbol":
        net = mx.gluon.SymbolBlock(net(mx.sym.var("data")),
                                   mx.sym.var("data"), net.collect_params())
    return net, x


@pytest.mark.parametrize("name", MXNET[:1])
@pytest.mark.parametrize("kind, wrong", [
    ("plain", False), ("children", False), ("hybridized", True),
    ("symbol", True)])
def test_slopes_that_mxnet_computes_wrongly_are_refused(name, kind, wrong):
    """Against differences of MXNet's own outputs; where these agree one day,
    no error is needed."""
    with using_engine(name):
        import mxnet as mx
        net, x = slopes(kind)
        alpha = next(p for name, p in net.collect_params().items()
                     if name.endswith("alpha"))
        with mx.autograd.record():
            y = net(x).sum()
        y.backward()
        found, at, sums = alpha.grad().asscalar(), alpha.data().copy(), []
        for step in (0.5, -0.5):        # the output is linear in the slope
            alpha.set_data(at + step)
            sums.append(net(x).sum().asscalar())
        assert (abs(found - (sums[0] - sums[1])) > 1e-2) == wrong
        for one, options in ((net, {}), (slopes("plain")[0],
                                         {"hybridize": True})):
            with pytest.raises(ValueError, match="slope of a PReLU in a compi"
                               "led network.*hybridize.False") \
                    if wrong or options else contextlib.nullcontext():
                mgpu.initialize(one, on(0, 1), **options)


@pytest.mark.parametrize("name", MXNET[:1])
@pytest.mark.parametrize("kind, options, dtype, wrong", [
    ("layer", {"ceil_mode": True}, "float32", True),
    ("symbol", {"ceil_mode": True}, "float32", True),
    ("layer", {"ceil_mode": True}, "float64", False),
    ("symbol", {}, "float32", False),
    ("layer", {"ceil_mode": True, "count_include_pad": False}, "float32",
     False)])
def test_windows_that_mxnet_computes_wrongly_are_refused(name, kind, options,
                                                         dtype, wrong):
    """Against differences of MXNet's own outputs, which are linear; where
    these agree one day, no error is needed."""
    with using_engine(name):
        import mxnet as mx
        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.AvgPool2D(2, 2, **options),
                mx.gluon.nn.Dense(1, in_units=16 if options else 9))
        net.initialize(mx.init.One())
        if kind == "symbol":
            net = mx.gluon.SymbolBlock(net(mx.sym.var("data")),
                                       mx.sym.var("data"),
                                       net.collect_params())
        net.cast(dtype)
        x = mx.nd.zeros((49, 1, 7, 7), dtype=dtype)
        x.reshape((49, 49))[:] = mx.nd.eye(49, dtype=dtype)
        at = x[:1] * 0
        at.attach_grad()
        with mx.autograd.record():
            y = net(at)
        y.backward()
        off = at.grad.reshape((49, 1)) - net(x) + y
        assert (abs(off).max().asscalar() > 1e-2) == wrong
        with contextlib.nullcontext() if not wrong else pytest.raises(
                ValueError, match="wrong float32 gradient of average pooling."
                "*count_include_pad=False"):
            mgpu.initialize(net, on(0, 1))


@on_mxnet
def test_recurrent_layers_of_mxnet_are_refused_in_float64(engine):
    """Their gradients there are wrong, without mgpu too."""
    def make(kind, dtype="float32"):
        return layers_of(engine, lambda gluon: [
            gluon.nn.Dense(3, flatten=False),
            getattr(gluon.rnn, kind)(4, layout="NTC", dtype=dtype)], None)
    for net, dtype in ((make("RNN"), "float64"), (make("GRU"), "float64"),
                       (make("LSTM", "float64"), None)):
        with pytest.raises(ValueError, match=r"received float64 for "
                           r"\['1'\]. Use dtype='float32'"):
            mgpu.initialize(net, on(0, 1), dtype=dtype)
    mgpu.initialize(make("LSTM", "float64"), on(0, 1), dtype="float32")


@on_mxnet
def test_gluons_own_joint_batch_norm_is_refused(engine):
    """It waits for all devices, also for those without rows."""
    from mxnet.gluon.contrib.nn import SyncBatchNorm
    for k in (1, 2):
        net = SyncBatchNorm(in_channels=3, num_devices=k)
        with contextlib.nullcontext() if k == 1 else pytest.raises(
                ValueError, match="SyncBatchNorm is not supported, because "
                "it hangs.*Use gluon.nn.BatchNorm and batch_norm='sync'"):
            mgpu.initialize(net, on(*range(k)))


# -- dtypes -------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["float64", "int64"])
def test_the_first_state_of_a_cell_has_the_dtype_of_its_weights(kind,
                                                                devices):
    with mgpu.using_backend("mxnet"):
        from mxnet.base import MXNetError
        from mxnet.gluon import nn, rnn

        class Net(nn.HybridBlock):
            def __init__(self, named):
                super().__init__()
                self.named = named
                self.embedding = nn.Embedding(4, 2)
                self.cell = rnn.GRUCell(3, input_size=2)

            def forward(self, x):
                state = self.cell.begin_state(
                    batch_size=len(x), ctx=x.context,
                    dtype="float64") if self.named else None
                return self.cell.unroll(2, self.embedding(x),
                                        begin_state=state)[0][-1]
        x = np.array([[0, 1], [2, 3], [1, 0], [3, 3]], kind)
        wrong, right = (mgpu.initialize(
            Net(named), devices, dtype="float64")
            for named in (False, True))
        with pytest.raises((TypeError, MXNetError), match="float32"):
            wrong(shards_of(x, wrong))
        assert all(y.dtype == np.float64 for y in right(shards_of(x, right)))


def test_a_network_may_convert_its_inputs_itself(engine):
    net = layers_of(
        engine, lambda gluon: [
            gluon.nn.Lambda(lambda x: x.astype("float32")),
            gluon.nn.Dense(3)],
        lambda nn: [type("Float", (nn.Module,), {
            "forward": lambda self, x: x.float()})(), nn.LazyLinear(3)])
    replicas = mgpu.initialize(net, on(0, 1))
    x = np.arange(24, dtype="uint8").reshape(4, 6)
    for found, wanted in zip(replicas(shards_of(x, replicas)), replicas(
            shards_of(x.astype("float32"), replicas))):
        assert_bit_equal(mgpu.to_numpy(found), mgpu.to_numpy(wanted))
