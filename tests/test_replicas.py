"""`initialize`, `Replicas`, `Parameter` and `get_params`, with the users' own
native networks."""
import contextlib
import copy
import gc
import pickle
import threading
import types
import warnings
import weakref

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import (ENGINES, assert_bit_equal, bricks, convnet,
                     foreign_array, mlp, on, refusal_of_foreign,
                     relative_difference, using_engine, worst)
from mgpu import initializers

MXNET = [engine for engine in ENGINES if engine.startswith("mxnet")]
TORCH = [engine for engine in ENGINES if engine == "torch"]
#: names, kinds and shapes of `helpers.convnet`, in the order of the layers
CONVNET = [
    ("0.weight", "weight", (4, 2, 3, 3)), ("0.bias", "bias", (4,)),
    ("1.gamma", "gamma", (4,)), ("1.beta", "beta", (4,)),
    ("4.weight", "weight", (5, 4, 3, 3)), ("4.bias", "bias", (5,)),
    ("5.gamma", "gamma", (5,)), ("5.beta", "beta", (5,)),
    ("9.weight", "weight", (3, 5)), ("9.bias", "bias", (3,)),
    ("1.running_mean", "running_mean", (4,)),
    ("1.running_var", "running_var", (4,)),
    ("5.running_mean", "running_mean", (5,)),
    ("5.running_var", "running_var", (5,))]


def images(n, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 2, 6, 6)).astype(dtype)


def table(n, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=(n, 6)).astype(dtype)


def shards_of(x, replicas):
    return mgpu.split_and_load(x, replicas.devices, even_split=False)


def train(replicas, x, steps=1, **options):
    """A few steps on the sum of squares of the outputs."""
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125,
                                             **options})
    for _ in range(steps):
        with mgpu.record():
            losses = [(out * out).reshape((len(out), -1)).sum(1)
                      for out in replicas(shards_of(x, replicas))
                      if out is not None]
        mgpu.backward(losses)
        trainer.step(len(x))


def on_each(replicas):
    """Name -> the values on every device, as NumPy arrays."""
    return {p.name: [mgpu.to_numpy(x) for x in p.list_data()]
            for p in (*replicas.params(), *replicas.statistics())}


def assert_all_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert_bit_equal(a[name], b[name])


# -- initialize: values -------------------------------------------------------

@pytest.mark.parametrize("init", [
    "uniform", initializers.Normal(0.5), "xavier", initializers.MSRAPrelu(),
    initializers.Orthogonal()], ids=str)
def test_every_device_and_engine_start_from_the_drawn_bits(
        engine, devices, init):
    """What NumPy draws for (seed, number) is what stands on every device: so
    any two devices, and any two engines, have the same bits."""
    replicas = mgpu.initialize(convnet(engine), devices, init, seed=3)
    found = on_each(replicas)
    assert list(found) == [name for name, *_ in CONVNET]
    by_kind = {"bias": 0, "gamma": 1, "beta": 0, "running_mean": 0,
               "running_var": 1}
    for number, (name, kind, shape) in enumerate(CONVNET):
        wanted = initializers.draw_parameter(
            kind, shape, "float32", init, seed=3, index=number)
        assert len(found[name]) == len(devices)
        for value in found[name]:
            assert_bit_equal(value, wanted)
        if kind in by_kind:
            assert (wanted == by_kind[kind]).all()
        else:
            assert len(np.unique(wanted)) > shape[0]    # truly drawn
    assert [p.kind for p in replicas.params() + replicas.statistics()] \
        == [kind for _, kind, _ in CONVNET]
    assert len(replicas) == len(devices) and replicas.devices == devices


def test_devices_do_not_share_memory(engine):
    """Two logical devices share one RAM, and their values must not."""
    replicas = mgpu.initialize(convnet(engine), on(0, 1, 2), "uniform")
    for p in replicas.params() + replicas.statistics():
        with mgpu.no_grad():
            p.list_data()[1][:] = 7
        for i, value in enumerate(map(mgpu.to_numpy, p.list_data())):
            assert (value == 7).all() == (i == 1), (p.name, i)


@pytest.mark.parametrize("units, times, most", [
    ((6, 5, 3), 60, 17), ((4096, 4097), 2, 1)], ids=["small", "large"])
def test_networks_that_nobody_has_are_freed(engine, units, times, most,
                                            monkeypatch):
    """Their replicas are in cycles. Python looks for these after hundreds of
    networks, however much memory they hold."""
    gc.collect()
    alive = len(mgpu.replicas._initialized)     # other tests' own
    monkeypatch.setattr("mgpu.replicas._left", alive)
    most += alive if times > 2 else 0
    dropped = []
    with contextlib.ExitStack() as stack:
        gc.disable()
        stack.callback(gc.enable)
        for _ in range(times):
            replicas = mgpu.initialize(mlp(engine, units), on(0), "zeros")
            dropped.append(weakref.ref(replicas))
            del replicas
            assert sum(ref() is not None for ref in dropped) <= most


def test_the_users_network_is_the_one_that_is_trained(engine):
    net = mlp(engine)
    replicas = mgpu.initialize(net, on(0, 1), "uniform")
    assert replicas.net is net
    train(replicas, table(4))
    x = mgpu.put(table(3), mgpu.cpu(0))
    # A native call: what the user's own code would do with the network.
    assert_bit_equal(engine.to_numpy(net(x)),
                     mgpu.to_numpy(replicas[0](x)))


# -- initialize: unknown shapes -----------------------------------------------

@pytest.mark.parametrize("build, x", [(mlp, table(4)), (convnet, images(4))],
                         ids=["mlp", "convnet"])
def test_a_sample_completes_unknown_shapes(engine, devices, build, x):
    wanted = on_each(mgpu.initialize(build(engine), devices,
                                     "uniform", seed=5))
    for sample in (x[:1], mgpu.put(x[:1], devices[0])):
        replicas = mgpu.initialize(build(engine, deferred=True), devices,
                                   "uniform",
                                   seed=5, sample=sample)
        assert_all_equal(on_each(replicas), wanted)


@pytest.mark.parametrize("build, x", [(mlp, table(4)), (convnet, images(4))],
                         ids=["mlp", "convnet"])
@pytest.mark.parametrize("recording", [True, False])
def test_the_first_forward_completes_unknown_shapes(
        engine, devices, build, x, recording):
    explicit = mgpu.initialize(build(engine), devices, "uniform", seed=5)
    replicas = mgpu.initialize(build(engine, deferred=True), devices,
                               "uniform", seed=5)
    early = replicas.params()
    assert early[0].shape is None
    for read in (early[0].data, early[0].list_grad, replicas.export_numpy,
                 replicas[0].arrays, lambda: early[0].set_data(0),
                 lambda: replicas.import_numpy({})):
        with pytest.raises(RuntimeError, match="a shape is unknown until the "
                           "first forward pass. Run one, replicas."):
            read()
    with engine.scope(recording=recording):
        outputs = replicas(shards_of(x, replicas))
        expected = explicit(shards_of(x, explicit))
    for a, b in zip(outputs, expected):
        assert_bit_equal(mgpu.to_numpy(a), mgpu.to_numpy(b))
    assert_all_equal(on_each(replicas), on_each(explicit))
    assert early[0].shape == replicas.params()[0].shape
    assert_bit_equal(mgpu.to_numpy(early[0].data()),
                     mgpu.to_numpy(explicit.params()[0].data()))
    train(replicas, x)      # and not drawn again by the next forward pass
    assert (on_each(replicas)["0.weight"][0]
            != on_each(explicit)["0.weight"][0]).any()


@pytest.mark.filterwarnings("error:numbers were drawn")
def test_replicas_that_first_run_in_threads_are_drawn_once(engine, devices):
    """`parallel` calls each of them at the same time. What torch draws while
    it completes lazy layers is no number that threads shared."""
    explicit = on_each(mgpu.initialize(convnet(engine), devices, "uniform"))
    for _ in range(5):
        replicas = mgpu.initialize(convnet(engine, deferred=True), devices,
                                   "uniform")
        mgpu.parallel(lambda replica, x: replica(x), replicas,
                      shards_of(images(4), replicas))
        assert_all_equal(on_each(replicas), explicit)


# -- initialize: whose values -------------------------------------------------

def test_values_that_are_there_stay(engine, devices):
    """On every device, running statistics too; the repr says so."""
    for init in (None, "keep"):
        net = with_values(engine, convnet(engine))
        own = native_values(engine, net)
        replicas = mgpu.initialize(net, devices, init)
        assert_all_equal(native_values(engine, net), own)
        for p in replicas.all_parameters():
            name = p.name if engine.name == "mxnet" else \
                p.name.replace("gamma", "weight").replace("beta", "bias")
            for value in p.list_data():
                assert_bit_equal(mgpu.to_numpy(value), own[name])
        assert repr(replicas).endswith("; 10 parameters kept, 0 drawn)")


def test_an_initialiser_and_force_reinit_draw_everything(engine):
    wanted = on_each(mgpu.initialize(convnet(engine), on(0), "uniform"))
    for net, options in ((with_values(engine, convnet(engine)),
                          dict(init="uniform", seed=0)),
                         (with_values(engine, convnet(engine)),
                          dict(force_reinit=True))):
        replicas = mgpu.initialize(net, on(0), **options)
        assert_all_equal(on_each(replicas), wanted)
        assert repr(replicas).endswith(
            "; 0 parameters kept, 10 drawn by Uniform(scale=0.07))")


def test_what_has_no_value_is_drawn(engine, devices):
    """One layer of mgpu's own network is given values; the others draw
    theirs by their numbers."""
    net = mgpu.models.lenet()
    with_values(engine, net[0])
    own = native_values(engine, net[0])
    replicas = mgpu.initialize(net, devices, seed=2)
    for number, p in enumerate(replicas.params()):
        wanted = own[p.name[2:]] if number < 2 else \
            initializers.draw_parameter(p.kind, p.shape, "float32", None,
                                        seed=2, index=number)
        for value in p.list_data():
            assert_bit_equal(mgpu.to_numpy(value), wanted)
    assert "2 parameters kept, 6 drawn" in repr(replicas)


def test_a_seed_where_nothing_is_drawn(engine):
    for init in (None, "keep"):
        net = with_values(engine, mlp(engine))
        before = native_values(engine, net)
        with pytest.raises(ValueError, match="a seed is for values that are "
                           "drawn; received seed=3 .* Pass init="):
            mgpu.initialize(net, on(1), init, seed=3, dtype="float64")
        assert_all_equal(native_values(engine, net), before)


def test_keep_wants_a_value_for_each_parameter(engine):
    net = mgpu.models.lenet()
    with_values(engine, net[0])
    with pytest.raises(RuntimeError, match="init='keep' needs a network that "
                       "has values; received none of .*'9.bias'.*. Load or "
                       "initialize these first"):
        mgpu.initialize(net, on(0), "keep")


def written_by_load(net):
    other = torch_lenet()
    net.load_state_dict(other.state_dict())
    return net


def written_through_data(net):
    for p in net.parameters():
        p.data[...] = 0.5
    return net


def written_and_copied(net):
    return copy.deepcopy(written_through_data(net))


def torch_lenet():
    from mgpu.backends._torch.models import MODELS
    return MODELS["lenet"](10, 1)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("write", [written_by_load, written_through_data,
                                   written_and_copied])
def test_a_model_has_values_when_something_is_written_to_it(name, write):
    with using_engine(name) as engine:
        net = write(mgpu.models.lenet())
        own = native_values(engine, net)
        found = mgpu.initialize(net, on(0, 1)).export_numpy()
        assert_all_equal(found, own)


@pytest.mark.parametrize("name", TORCH)
def test_a_model_without_values_has_none_after_copies_and_casts(name):
    with using_engine(name):
        wanted = mgpu.initialize(mgpu.models.lenet(), on(0), "uniform",
                                 dtype="float64").export_numpy()
        net = copy.deepcopy(mgpu.models.lenet()).double()
        assert_all_equal(mgpu.initialize(net, on(0, 1)).export_numpy(),
                         wanted)


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("init", [None, "keep"])
def test_a_deferred_initialize_is_carried_out_by_gluon(name, init, devices):
    with using_engine(name) as engine:
        import mxnet as mx

        class Own(mx.init.Initializer):     # that NumPy does not have
            def _init_weight(self, _, arr):
                arr[:] = mx.nd.random.normal(shape=arr.shape).asnumpy()

        def build():
            net = convnet(engine, deferred=True)
            net.initialize(Own())
            net[-1].weight.lr_mult = 2.0
            mx.random.seed(7)
            return net
        plain = build()
        plain(engine.put(images(1), mgpu.cpu(0)))
        wanted = native_values(engine, plain)
        for sample in (images(1), None):
            net = build()
            replicas = mgpu.initialize(net, devices, init, sample=sample)
            if sample is None:
                replicas(shards_of(images(4), replicas))
            for found, *others in on_each(replicas).values():
                for other in others:
                    assert_bit_equal(found, other)
            assert_all_equal(native_values(engine, net), wanted)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("init", [None, "keep"])
def test_lazy_layers_keep_what_torch_gives_them(name, init, devices):
    with using_engine(name) as engine:
        import torch
        torch.manual_seed(5)
        plain = convnet(engine, deferred=True)
        plain.eval()(torch.zeros(1, 2, 6, 6))
        for sample in (images(1), None):
            torch.manual_seed(5)
            net = convnet(engine, deferred=True)
            replicas = mgpu.initialize(net, devices, init, sample=sample)
            if sample is None:
                replicas(shards_of(images(4), replicas))
            assert_all_equal(native_values(engine, replicas.net),
                             native_values(engine, plain))
            assert "10 parameters kept" in repr(replicas)


def test_a_native_call_completes_unknown_shapes(engine, devices):
    """As ``net(x)`` after ``net.initialize()`` does in Gluon."""
    wanted = on_each(mgpu.initialize(convnet(engine), devices, "uniform",
                                     seed=5))
    net = convnet(engine, deferred=True)
    replicas = mgpu.initialize(net, devices, "uniform", seed=5)
    if engine.name == "torch":
        net.eval()      # a pass in training moves the statistics
    net(mgpu.put(images(2), devices[-1]))
    assert_all_equal(on_each(replicas), wanted)
    if engine.name == "torch":
        net.train()
    train(replicas, images(4))


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("when", ["initialize", "first pass"])
def test_what_inference_mode_completes_is_trained(name, devices, when):
    with using_engine(name) as engine:
        import torch

        def made(net):
            return mgpu.initialize(net, devices, "uniform", dtype="float64")
        net = mlp(engine, deferred=when != "initialize")
        if when == "initialize":
            with torch.inference_mode():
                replicas = made(net)
        else:
            replicas = made(net)
            with torch.inference_mode():
                replicas(shards_of(table(8).astype("float64"), replicas))
        wanted = made(mlp(engine))
        for each in (replicas, wanted):
            train(each, table(8).astype("float64"))
        assert_all_equal(on_each(replicas), on_each(wanted))


@pytest.mark.parametrize("init", [None, "uniform"])
def test_what_is_loaded_before_the_first_pass_stays(engine, devices, init):
    """Also where shapes are not known yet; the last layer is not loaded."""
    net, source = convnet(engine, deferred=True), convnet(engine)
    with_values(engine, source)
    own = native_values(engine, source)
    replicas = mgpu.initialize(net, devices, init)
    loaded = [name for name in own if not name.startswith("9")]
    if engine.name == "mxnet":
        parameters = net._collect_params_with_prefix()
        for name in loaded:
            parameters[name].set_data(engine.put(own[name], mgpu.cpu(0)))
    else:
        state = source.state_dict()
        net.load_state_dict({name: state[name] for name in loaded},
                            strict=False)
    replicas(shards_of(images(4), replicas))
    found = native_values(engine, net)
    assert_all_equal({name: found[name] for name in loaded},
                     {name: own[name] for name in loaded})
    if init is not None:
        assert_bit_equal(found["9.weight"], initializers.draw_parameter(
            "weight", (3, 5), "float32", init, seed=0, index=8))


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("init", [None, "keep"])
@pytest.mark.parametrize("ran", [False, True])
def test_a_symbol_block_keeps_the_values_that_were_loaded(
        name, init, ran, devices, tmp_path):
    """Its parameters have values and no shapes."""
    with using_engine(name) as engine:
        import mxnet as mx
        net = with_values(engine, convnet(engine))
        net.hybridize()
        x = engine.put(images(4), mgpu.cpu(0))
        wanted = mgpu.to_numpy(net(x))
        net.export(str(tmp_path / "net"))
        block = mx.gluon.SymbolBlock.imports(
            str(tmp_path / "net-symbol.json"), ["data"],
            str(tmp_path / "net-0000.params"))
        if ran:
            assert_bit_equal(mgpu.to_numpy(block(x)), wanted)
        replicas = mgpu.initialize(block, devices, init)
        for i, device in enumerate(devices):
            assert_bit_equal(mgpu.to_numpy(replicas[i](mgpu.put(
                images(4), device))), wanted)
        train(replicas, images(4))


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_what_gluon_saves_are_the_bits_of_replica_0(name, count, tmp_path):
    """Gluon's own mean over 3 contexts changes last bits."""
    with using_engine(name) as engine:
        from mxnet import gluon
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(30, in_units=30))
        mgpu.initialize(net, on(*range(count)), "uniform", dtype="float64")
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


def test_a_sample_that_does_not_fit_leaves_the_network(engine):
    """The first layers know their shapes when the last one refuses; the
    network forgets them."""
    net = convnet(engine, deferred=True)
    before = engine.network(net).specs(), [*map(type, net)]

    def refuse(*_):
        raise ZeroDivisionError
    hook = net[9].register_forward_pre_hook(refuse)
    for init in (None, "uniform"):
        with pytest.raises(ZeroDivisionError):
            mgpu.initialize(net, on(0), init, dtype="float64",
                            sample=np.ones((1, 7, 6, 6)))
        assert (engine.network(net).specs(), [*map(type, net)]) == before
    getattr(hook, "detach" if engine.name == "mxnet" else "remove")()
    found = mgpu.initialize(net, on(0, 1), "uniform", sample=images(1))
    assert_all_equal(on_each(found), on_each(mgpu.initialize(
        convnet(engine), on(0, 1), "uniform")))


def scaled_net(engine):
    """A dense layer, and vectors that scale it."""
    if engine.name == "mxnet":
        from mxnet import gluon

        class Net(gluon.HybridBlock):
            def __init__(self):
                super().__init__()
                self.dense = gluon.nn.Dense(5, in_units=6)
                for name in ("gamma", "weight", "layer_scale"):
                    setattr(self, name, self.params.get(name, shape=(5,)))
                self.logit_scale = self.params.get("logit_scale", shape=(1,))

            def hybrid_forward(self, F, x, gamma, weight, layer_scale,
                               logit_scale):
                scale = gamma * weight * layer_scale * logit_scale
                return self.dense(x) * scale
        return Net()
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(6, 5)
            self.norm = torch.nn.RMSNorm((1, 5))
            for name in ("gamma", "weight", "layer_scale"):
                setattr(self, name, torch.nn.Parameter(torch.ones(5)))
            self.logit_scale = torch.nn.Parameter(torch.tensor(2.0))
            self.class_token = torch.nn.Parameter(torch.ones(1, 5))

        def forward(self, x):
            x = self.norm(self.dense(x)[:, None])[:, 0] + self.class_token
            return x * self.gamma * self.weight * self.layer_scale \
                * self.logit_scale
    return Net()


@pytest.mark.parametrize("options", [
    dict(init="xavier"), dict(init="orthogonal"), dict(init="uniform"),
    dict(force_reinit=True)], ids=str)
def test_parameters_of_unknown_kinds_keep_their_values(
        engine, devices, options):
    """No framework draws the scale of a layer as it does weights."""
    net = with_values(engine, scaled_net(engine))
    own = native_values(engine, net)
    replicas = mgpu.initialize(net, devices, **options)
    for number, p in enumerate(replicas.params()):
        if p.name.startswith("dense"):
            wanted = initializers.draw_parameter(
                p.kind, p.shape, "float32", options.get("init"), seed=0,
                index=number)
        else:
            wanted = own[p.name]
            assert p.kind == "unknown"
        for value in p.list_data():
            assert_bit_equal(mgpu.to_numpy(value), wanted)
    assert "2 drawn by" in repr(replicas)
    train(replicas, table(4))


@pytest.mark.parametrize("name", TORCH)
def test_weights_of_torchs_layers_are_drawn(name):
    """Those that have another name, too; the parts of a weight norm are
    not weights."""
    with using_engine(name):
        from torch import nn
        from torch.nn.utils import parametrizations
        net = nn.ModuleList([
            nn.Embedding(3, 4), nn.LSTM(4, 4, 2, proj_size=2),
            nn.GRUCell(4, 4), nn.MultiheadAttention(4, 2, add_bias_kv=True),
            nn.Bilinear(2, 3, 4), parametrizations.weight_norm(
                nn.Linear(3, 4))])
        kinds = {p.name: p.kind
                 for p in mgpu.initialize(net, on(0), "xavier").params()}
        unknown = {n for n, kind in kinds.items() if kind == "unknown"}
        assert unknown == {f"5.parametrizations.weight.original{i}"
                           for i in (0, 1)}
        assert all(kind == ("bias" if "bias" in n else "weight")
                   for n, kind in kinds.items() if n not in unknown)


# -- initialize: "keep", dtype, again -----------------------------------------

def with_values(engine, net, seed=1):
    """Give a native network values of its own, by the engine's own means."""
    rng = np.random.default_rng(seed)
    if engine.name == "mxnet":
        net.initialize()
        for p in net.collect_params().values():
            p.set_data(engine.put(
                rng.uniform(1, 9, p.shape).astype("float32"), mgpu.cpu(0)))
    else:
        for tensor in net.state_dict().values():
            tensor.copy_(engine.put(np.array(
                rng.uniform(1, 9, tensor.shape)), mgpu.cpu(0)))
    return net


def native_values(engine, net):
    if engine.name == "mxnet":
        return {name: p.data(p.list_ctx()[0]).asnumpy() for name, p
                in net._collect_params_with_prefix().items()}
    return {name: engine.to_numpy(t) for name, t in net.state_dict().items()}


def test_keep_goes_on_from_a_trained_network(engine):
    """Elsewhere, with more devices and in float64."""
    replicas = mgpu.initialize(mlp(engine), on(0), "uniform")
    train(replicas, table(4))
    trained = replicas.export_numpy()
    again = mgpu.initialize(replicas.net, on(1, 2), "keep",
                            force_reinit=True, dtype="float64")
    assert again.devices == on(1, 2)
    for name, values in on_each(again).items():
        for value in values:
            assert_bit_equal(value, trained[name].astype("float64"))


@pytest.mark.parametrize("lazy", [False, True])
def test_dtype_casts_parameters_and_statistics(engine, devices, lazy):
    replicas = mgpu.initialize(convnet(engine, deferred=lazy), devices,
                               "uniform",
                               seed=2, dtype="float64", sample=images(2))
    for p in replicas.params() + replicas.statistics():
        assert p.dtype == "float64"
        assert p.list_data()[-1].dtype == replicas[0].arrays()[0].dtype
        assert mgpu.to_numpy(p.data()).dtype == np.float64
    # float32 is the float64 draw, rounded once
    rounded = on_each(mgpu.initialize(convnet(engine), devices,
                                      "uniform", seed=2))
    for name, values in on_each(replicas).items():
        assert_bit_equal(np.float32(values[0]), rounded[name][0])
    outputs = replicas(shards_of(images(4, "float64"), replicas))
    assert mgpu.to_numpy(outputs[0]).dtype == np.float64


def test_a_second_initialize_is_refused_and_changes_nothing(engine):
    net = mlp(engine)
    replicas = mgpu.initialize(net, on(1, 2), "uniform")
    train(replicas, table(4))
    before = on_each(replicas)
    with pytest.raises(RuntimeError, match=(
            r"the network is initialized already, on \[cpu\(1\), cpu\(2\)\]; "
            "pass force_reinit=True to draw it again, and init='keep' with it"
            " to keep its values")):
        mgpu.initialize(net, on(0), "uniform", dtype="float64")
    assert_all_equal(on_each(replicas), before)


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("anew", [False, True])
def test_values_that_gluon_has_moved_are_asked_for(name, anew):
    with using_engine(name) as engine:
        import mxnet as mx
        net = mlp(engine)
        replicas = mgpu.initialize(net, on(0, 1), "uniform")
        if anew:
            net.initialize(force_reinit=True)
        else:
            net.collect_params().reset_ctx(mx.cpu())
        with pytest.raises(RuntimeError, match="'.*weight' without a value on "
                           r"cpu\(1\).*force_reinit=True"):
            replicas.export_numpy()
        again = mgpu.initialize(net, on(0, 1), init="keep", force_reinit=True)
        again.export_numpy()


def test_a_layer_without_a_shape_that_is_never_called(engine, devices):
    base, _ = bricks(engine)
    if engine.name == "mxnet":
        from mxnet.gluon.nn import Dense as lazy
    else:
        from torch.nn import LazyLinear as lazy

    class Net(base):
        def __init__(self):
            super().__init__()
            self.used, self.idle = lazy(3), lazy(4)

        def forward(self, x):
            return self.used(x)
    replicas = mgpu.initialize(Net(), devices, "uniform")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"calls no layer of \['idle.weig"
                           r"ht.*\]. Give these layers their input size"):
            train(replicas, table(8))
        assert not replicas.complete


def test_force_reinit_redraws_a_trained_network(engine, devices):
    """Weights and running statistics, as if it had never been trained."""
    net = convnet(engine)
    replicas = mgpu.initialize(net, on(0, 1), "uniform", seed=4)
    fresh = replicas.export_numpy()
    train(replicas, images(6), steps=2)
    with warnings.catch_warnings():     # the devices' statistics differ
        warnings.simplefilter("ignore", UserWarning)
        trained = replicas.export_numpy()
    for name in ("0.weight", "5.running_mean", "1.running_var"):
        assert (trained[name] != fresh[name]).any()
    again = mgpu.initialize(net, devices, "uniform", seed=4, force_reinit=True)
    assert again.net is net and again.devices == devices
    redrawn = again.export_numpy()
    assert_all_equal(redrawn, fresh)    # torch's batch counters too
    train(again, images(6))
    assert (again.export_numpy(device=devices[0])["0.weight"]
            != fresh["0.weight"]).any()


@pytest.mark.parametrize("name", MXNET)
def test_a_layers_own_gluon_initialiser_wins(name, devices):
    with using_engine(name):
        import mxnet as mx
        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.Dense(
            5, in_units=6, bias_initializer="ones",
            weight_initializer=mx.init.Xavier(magnitude=2)),
            mx.gluon.nn.Dense(
                3, in_units=5, bias_initializer=mx.init.Constant(0.5),
                weight_initializer=mx.init.Normal(0.25)),
            mx.gluon.nn.PReLU())
        found = on_each(mgpu.initialize(net, devices, "orthogonal", seed=1))
    own = [("0.weight", ("xavier", {"magnitude": 2})),
           ("0.bias", ("ones", {})), ("1.weight", ("normal", {"sigma": .25})),
           ("1.bias", ("constant", {"value": 0.5})),
           ("2.alpha", ("constant", {"value": 0.25}))]
    assert list(found) == [name for name, _ in own]
    for number, (name, init) in enumerate(own):
        wanted = initializers.draw_parameter(
            "weight", found[name][0].shape, "float32", None, seed=1,
            index=number, own=init)
        for value in found[name]:
            assert_bit_equal(value, wanted)
    assert (found["0.bias"][0] == 1).all()


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("options", [{}, {"f": len}], ids=str)
def test_a_layers_own_initialiser_that_numpy_does_not_have(name, options):
    """Is refused, before a change: silence would draw something else."""
    with using_engine(name) as engine:
        import mxnet as mx

        class Own(mx.init.Initializer):
            def _init_weight(self, _, arr):
                arr[:] = 5
        net = mx.gluon.nn.Dense(3, in_units=6,
                                weight_initializer=Own(**options))
        with_values(engine, net)
        before = native_values(engine, net)
        text = ("parameter 'weight': unknown initialiser; received 'own'.* "
                "initialize the network first, and pass no init=")
        with pytest.raises(ValueError, match=text):
            mgpu.initialize(net, on(0, 1), "uniform")
        assert_all_equal(native_values(engine, net), before)
        net = mx.gluon.nn.Dense(3, weight_initializer=Own(**options))
        with pytest.raises(ValueError, match=text):     # at once, not late
            mgpu.initialize(net, on(0, 1), "uniform")


def with_buffer(engine):
    """Adds to its input a number that is neither trained nor drawn: 7."""
    if engine.name == "mxnet":
        from mxnet import gluon

        class Net(gluon.HybridBlock):
            def __init__(self):
                super().__init__()
                self.dense = gluon.nn.Dense(3, in_units=6)
                self.offset = self.params.get(
                    "offset", shape=(1,), grad_req="null", init="zeros")

            def forward(self, x):
                return self.dense(x) + self.offset.data(x.ctx)
        net = Net()
        net.initialize()
        net.offset.set_data(engine.put(np.float32([7]), mgpu.cpu(0)))
        return net
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(6, 3)
            self.register_buffer("offset", torch.tensor([7.0]))

        def forward(self, x):
            return self.dense(x) + self.offset
    return Net()


def test_other_buffers_are_copied_as_they_are(engine, devices):
    replicas = mgpu.initialize(with_buffer(engine), devices, "zeros")
    offset, = replicas.buffers()
    assert (offset.name, offset.kind, offset.grad_req) \
        == ("offset", "other", "null")
    for i, device in enumerate(devices):
        found = mgpu.to_numpy(replicas[i](mgpu.put(table(2), device)))
        assert_bit_equal(found, np.full((2, 3), 7, "float32"))
    train(replicas, table(4))
    for value in offset.list_data():
        assert mgpu.to_numpy(value).tolist() == [7]
    values = replicas.export_numpy()
    assert values.pop("offset").tolist() == [7]
    replicas.import_numpy(values)       # the other engine may not have it


@pytest.mark.parametrize("name", TORCH)
def test_a_parameter_without_axes(name, devices):
    with using_engine(name):
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = torch.nn.Parameter(torch.tensor(2.0))

            def forward(self, x):
                return x * self.scale
        replicas = mgpu.initialize(Net(), devices, "keep")
        train(replicas, np.ones((2, 6), "float32"))     # idle devices too
        for value in replicas.params()[0].list_data():
            # 2 - 0.125 * (2 rows * 6 numbers * 2 * 2) / 2
            assert mgpu.to_numpy(value) == -1.0
        replicas.zero_grad()
        replicas.params()[0].set_data(4.0)
        assert replicas.export_numpy() == {"scale": np.float32(4)}


@pytest.mark.parametrize("name", TORCH)
def test_prelu_starts_as_in_gluon(name):
    with using_engine(name):
        import torch
        replicas = mgpu.initialize(torch.nn.PReLU(), on(0), "normal")
        assert replicas.export_numpy() == {"weight": np.float32(0.25)}


@pytest.mark.parametrize("wrong, error, text", [
    (dict(batch_norm="joint"), ValueError,
     "unknown batch_norm; received 'joint'. Use one of 'per_device', "
     "'average', 'sync'."),
    (dict(dtype="int32"), ValueError,
     "unknown dtype; received 'int32'. Use one of 'float16', 'float32', "
     "'float64'."),
    (dict(seed=-1), ValueError,
     "seed must be an integer of 0 or more; received -1."),
    (dict(seed=1.5), ValueError,
     "seed must be an integer of 0 or more; received 1.5."),
    (dict(init="kaiming"), ValueError, "'kaiming'"),
    (dict(init=0.01), TypeError, "0.01"),
    (dict(init="bilinear", dtype="float64"), ValueError,
     "Bilinear needs a weight of four axes"),
    (dict(devices=[]), ValueError, "at least one device is needed"),
    (dict(devices=["cpu:1", "cpu:0", "cpu:1"]), ValueError,
     "each device may be named once; received [cpu(1), cpu(0), cpu(1)]"),
    (dict(devices=["cpu:0", "gpu:99"]), ValueError, "gpu(99) is not there"),
    (dict(devices="tpu"), ValueError, "unknown device; received 'tpu'"),
], ids=str)
def test_wrong_arguments_are_refused_before_a_change(
        engine, wrong, error, text):
    net = with_values(engine, mlp(engine))
    before = native_values(engine, net)
    with pytest.raises(error) as caught:
        mgpu.initialize(**{"net": net, "devices": on(0, 1), **wrong})
    assert text in str(caught.value)
    assert_all_equal(native_values(engine, net), before)
    mgpu.initialize(net, on(0, 1), "uniform")      # it was not initialised


@pytest.mark.parametrize("ours, other", [(a, b) for a in BACKENDS
                                         for b in BACKENDS if a != b])
def test_the_other_frameworks_network_is_refused(ours, other):
    with mgpu.using_backend(other) as backend:
        net = mlp(backend)
    with mgpu.using_backend(ours), pytest.raises(TypeError, match=(
            f"the {ours} backend takes a .*; received {other}.*Sequential. "
            "Choose the engine with mgpu.set_backend")):
        mgpu.initialize(net, on(0), "uniform")


# -- native networks of all kinds ---------------------------------------------

@pytest.mark.parametrize("name", MXNET)
def test_gluon_code_of_each_array_family(name, devices):
    """A legacy `hybrid_forward` (which breaks in NumPy mode) and one of
    `mx.np` (which breaks outside of it), each in its own mode, which stays
    as it is."""
    with using_engine(name):
        import mxnet as mx
        numpy_mode = mx.npx.is_np_array(), mx.npx.is_np_shape()

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
        net = (Modern if name == "mxnet-np" else Legacy)()
        replicas = mgpu.initialize(net, devices, "xavier", dtype="float64")
        x = table(4, "float64").reshape(4, 2, 3)
        before = on_each(replicas)["dense.weight"][0]
        outputs = replicas(shards_of(x, replicas))
        assert all(type(out) is type(mgpu.put(x, mgpu.cpu(0)))
                   for out in outputs if out is not None)
        flat = x.reshape(4, 6)
        wanted = (np.maximum(flat, 0) + flat) @ before.T
        found = np.concatenate([mgpu.to_numpy(out) for out in outputs
                                if out is not None])
        # float64 and sums of six products
        assert relative_difference(found, wanted) < 1e-14
        train(replicas, x)
        after = on_each(replicas)["dense.weight"]
        assert (after[0] != before).any()
        for value in after:
            assert_bit_equal(value, after[0])
        assert (mx.npx.is_np_array(), mx.npx.is_np_shape()) == numpy_mode
    assert not mx.npx.is_np_array()


@pytest.mark.parametrize("name", MXNET)
def test_a_network_runs_in_the_family_of_its_input(name):
    """Whatever mode the calling thread is in."""
    with using_engine(name):
        replicas = mgpu.initialize(convnet(mgpu.get_backend()), on(0, 1),
                                   "uniform")
        shards = shards_of(images(4), replicas)
        wanted = [mgpu.to_numpy(out) for out in replicas(shards)]
    for other in MXNET:
        with using_engine(other):
            for a, b in zip(replicas(shards), wanted):
                assert type(a) is type(shards[0])
                assert_bit_equal(mgpu.to_numpy(a), b)


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("lazy", [False, True])
def test_hybridized_networks(name, devices, lazy):
    with using_engine(name) as engine:
        results = []
        for hybridize in (False, True):
            net = convnet(engine, deferred=lazy)
            if hybridize:
                net.hybridize()
            replicas = mgpu.initialize(net, devices, "xavier", seed=6,
                                       dtype="float64")
            x = images(5, "float64")
            train(replicas, x, steps=2)
            results.append(on_each(replicas))
            again = mgpu.initialize(net, devices, "xavier", seed=6,
                                    force_reinit=True)
            train(again, x, steps=2)
            assert_all_equal(on_each(again), results[-1])
        for label in results[0]:
            for a, b in zip(results[0][label], results[1][label]):
                # The compiled graph may add in another order: float64.
                assert relative_difference(a, b, floor=1e-3) < 1e-12, label


def tied(engine, tie):
    """Two dense layers (4, 4) that share weight and bias, or not."""
    if engine.name == "mxnet":
        from mxnet.gluon import nn
        net = nn.HybridSequential()
        first = nn.Dense(4, in_units=4)
        net.add(first, nn.Activation("relu"), nn.Dense(
            4, in_units=4, params=first.params if tie else None))
        return net
    from torch import nn
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    if tie:
        net[2].weight, net[2].bias = net[0].weight, net[0].bias
    return net


def test_shared_parameters(engine, devices):
    """One entry, whose gradient is the sum over both uses, moved once."""
    x = table(5, "float64")[:, :4]
    both = []
    for tie in (True, False):
        replicas = mgpu.initialize(tied(engine, tie), devices, "xavier",
                                   dtype="float64")
        if not tie:     # the same values in both layers
            values = replicas.export_numpy()
            for kind in ("weight", "bias"):
                values[f"2.{kind}"] = values[f"0.{kind}"]
            replicas.import_numpy(values)
        start = on_each(replicas)
        train(replicas, x)
        both.append((start, on_each(replicas)))
    (start, tied_now), (_, apart) = both
    assert list(tied_now) == ["0.weight", "0.bias"]
    for kind in ("weight", "bias"):
        for i in range(len(devices)):
            moves = [apart[f"{layer}.{kind}"][i] - start[f"0.{kind}"][i]
                     for layer in (0, 2)]
            move = tied_now[f"0.{kind}"][i] - start[f"0.{kind}"][i]
            assert np.abs(move).max() > 0
            # float64; the differences cancel three digits
            assert relative_difference(move, moves[0] + moves[1]) < 1e-12


def test_a_shared_parameter_may_come_under_each_name(engine, devices):
    """As the network's own state has it."""
    replicas = mgpu.initialize(tied(engine, True), devices, "xavier",
                               dtype="float64")
    values = replicas.export_numpy()
    new = {name: x + 1 for name, x in values.items()}
    for change in (lambda x: x.update({"2.weight": x["0.weight"],
                                       "2.bias": x["0.bias"]}),
                   lambda x: x.update({"2.weight": x.pop("0.weight")})):
        given = dict(new)
        change(given)
        replicas.import_numpy(given)
        for name, x in new.items():
            for i in range(len(devices)):
                assert_bit_equal(on_each(replicas)[name][i], x)
        replicas.import_numpy(values)
    with pytest.raises(ValueError, match="other values of 2.bias than of "
                       "0.bias"):
        replicas.import_numpy({**new, "2.bias": values["0.bias"]})
    assert_bit_equal(replicas.export_numpy()["0.bias"], values["0.bias"])
    if engine.name == "torch":
        replicas.import_numpy({
            name: x.numpy() + 1
            for name, x in replicas.net.state_dict().items()})
        assert_bit_equal(replicas.export_numpy()["0.bias"], new["0.bias"])


@pytest.mark.parametrize("name", TORCH)
def test_nothing_of_a_torch_users_module_is_changed(name):
    with using_engine(name):
        import torch
        from torch import nn

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.bn, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
                self.calls, self.fail = 0, False

            def forward(self, x):
                self.calls += 1
                if self.fail:
                    raise KeyError("the user's own")
                return self.drop(self.bn(x))
        net = nn.Sequential(Block(), nn.Linear(6, 3))
        net[0].bn.eval()        # a mixture of flags
        hooked = []
        net[1].register_forward_hook(lambda *_: hooked.append(1))
        keys = list(net.state_dict())
        flags = [m.training for m in net.modules()]
        members = [sorted(vars(m)) for m in net.modules()]
        kinds = [type(m) for m in net.modules()]
        forwards = [m.forward.__func__ for m in net.modules()]
        replicas = mgpu.initialize(net, on(0, 1), "uniform")
        train(replicas, table(5))
        replicas(shards_of(table(5), replicas))
        mgpu.evaluate_accuracy_gpus(replicas, [(table(5), np.zeros(5))])
        assert net[0].calls == 3 and len(hooked) == 6   # hooks on replicas
        net[0].fail = True
        for scope in (mgpu.record, mgpu.no_grad):
            with scope(), pytest.raises(KeyError, match="the user's own"):
                replicas(shards_of(table(5), replicas))
        assert list(net.state_dict()) == keys
        assert [m.training for m in net.modules()] == flags
        assert [sorted(vars(m)) for m in net.modules()] == members
        assert [type(m) for m in net.modules()] == kinds
        assert [m.forward.__func__ for m in net.modules()] == forwards
        net[0].fail = False
        twin = copy.deepcopy(net)       # still an ordinary module
        twin.load_state_dict(net.state_dict())
        assert torch.equal(twin.eval()(torch.ones(2, 6)),
                           net.eval()(torch.ones(2, 6)))


# -- dropout ------------------------------------------------------------------

def dropout(engine, rate):
    if engine.name == "mxnet":
        from mxnet.gluon import nn
        return nn.Dropout(rate)
    from torch import nn
    return nn.Dropout(rate)


def masks(replicas, seed, passes=2, rows=200):
    """What dropout makes of ones: an array per pass and device."""
    mgpu.seed(seed)
    found = []
    for _ in range(passes):
        x = [mgpu.put(np.ones((rows, 10), "float32"), d)
             for d in replicas.devices]
        with mgpu.record():
            found += [mgpu.to_numpy(out) for out in replicas(x)]
    return found


def test_dropout_is_reproducible_and_differs_between_devices(
        engine, devices):
    replicas = mgpu.initialize(dropout(engine, 0.25), devices, "uniform")
    first = masks(replicas, 5)
    for a, b in zip(first, masks(replicas, 5)):
        assert_bit_equal(a, b)
    assert all((a != b).any() for a, b in zip(first, masks(replicas, 6)))
    for i, a in enumerate(first):
        assert set(np.unique(a)) == {np.float32(0), np.float32(1 / 0.75)}
        # 2000 draws: the kept share is 0.75 +- 5 standard deviations
        assert abs((a > 0).mean() - 0.75) < 5 * (0.75 * 0.25 / 2000) ** 0.5
        for b in first[:i]:     # other devices, and the pass before
            assert (a != b).any()
    x = np.ones((3, 10), "float32")     # prediction leaves it as it is
    for i, device in enumerate(devices):
        assert_bit_equal(mgpu.to_numpy(replicas[i](mgpu.put(x, device))), x)


def test_dropout_masks_do_not_depend_on_how_threads_interleave(engine):
    replicas = mgpu.initialize(dropout(engine, 0.5), on(0, 1, 2, 3), "uniform")
    first = masks(replicas, 1, passes=1, rows=2000)
    for _ in range(20):
        for a, b in zip(first, masks(replicas, 1, passes=1, rows=2000)):
            assert_bit_equal(a, b)


@pytest.mark.parametrize("batch_norm", ["per_device", "sync"])
@pytest.mark.parametrize("name", TORCH)
def test_functional_dropout_is_reproducible_too(name, batch_norm):
    """It draws from the one stream that all of torch's threads share; joint
    statistics let the replicas wait for each other in between."""
    with using_engine(name):
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = torch.nn.BatchNorm1d(10)

            def forward(self, x):
                for _ in range(2):
                    x = self.norm(torch.nn.functional.dropout(
                        x, 0.5, self.training))
                return x
        replicas = mgpu.initialize(Net(), on(0, 1, 2, 3), "uniform",
                                   batch_norm=batch_norm)
        first = masks(replicas, 2)
        assert all((a != b).any() for i, a in enumerate(first)
                   for b in first[:i])
        for _ in range(20):
            torch.rand(3)       # what the user draws in between
            for a, b in zip(first, masks(replicas, 2)):
                assert_bit_equal(a, b)


@pytest.mark.parametrize("name", TORCH)
def test_channel_dropout_drops_channels(name):
    with using_engine(name):
        from torch import nn
        replicas = mgpu.initialize(nn.Dropout2d(0.5), on(0, 1), "uniform")
        mgpu.seed(0)
        with mgpu.record():
            outputs = replicas(shards_of(np.ones((8, 16, 3, 3), "float32"),
                                         replicas))
        for out in map(mgpu.to_numpy, outputs):
            assert (out == out[:, :, :1, :1]).all()
            assert set(np.unique(out)) == {0, 2}


# -- calls --------------------------------------------------------------------

def two_inputs(engine):
    """``dense(a) + b``, also of one dict {"a": a, "b": b}; b may be
    None."""
    base, dense = bricks(engine)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.dense = dense(6, 3)

        def forward(self, a, b=None):
            if isinstance(a, dict):
                a, b = a["a"], a["b"]
            return self.dense(a) if b is None else self.dense(a) + b
    return Net()


def test_replicas_without_rows_do_not_run(engine, devices):
    replicas = mgpu.initialize(convnet(engine), devices, "uniform")
    k = len(devices)
    for shards in (shards_of(images(1), replicas),
                   [mgpu.put(images(1), devices[0])] + [None] * (k - 1),
                   [None] * (k - 1) + [mgpu.put(images(1), devices[-1])]):
        with mgpu.record():
            outputs = replicas(shards)
        for shard, out in zip(shards, outputs):
            runs = shard is not None and len(shard) > 0
            assert (out is not None) == runs
            assert out is None or tuple(out.shape) == (1, 3)


def test_several_inputs(engine, devices):
    replicas = mgpu.initialize(two_inputs(engine), devices, "xavier")
    a, b = table(5), table(5, seed=1)[:, :3].copy()
    a_shards, b_shards = shards_of(a, replicas), shards_of(b, replicas)
    want = [None if out is None else mgpu.to_numpy(out)
            for out in replicas(a_shards, b_shards)]
    assert np.concatenate([w for w in want if w is not None]).shape == (5, 3)
    for form in ((a, b), [a, b], {"a": a, "b": b}):
        shards = shards_of(form, replicas)
        assert type(shards[0]) is type(form)
        for i, (out, w) in enumerate(zip(replicas(shards), want)):
            assert (out is None) == (w is None)
            if out is not None:
                assert_bit_equal(mgpu.to_numpy(out), w)
                assert_bit_equal(mgpu.to_numpy(replicas[i](shards[i])), w)
        accuracy = mgpu.evaluate_accuracy_gpus(
            replicas, [(form, np.concatenate([w for w in want if w is not
                                              None]).argmax(1))])
        assert accuracy == 1
    out = replicas[0](a_shards[0], b_shards[0])
    assert_bit_equal(mgpu.to_numpy(out), want[0])


def test_an_optional_input(engine, devices):
    replicas = mgpu.initialize(two_inputs(engine), devices, "xavier")
    a, b = table(5), np.zeros((5, 3), "float32")
    for form in ((a, None), [a, None]):
        for i, (out, want) in enumerate(zip(
                replicas(shards_of(form, replicas)),
                replicas(shards_of((a, b), replicas)))):
            assert (out is None) == (want is None)
            if out is not None:
                assert_bit_equal(mgpu.to_numpy(out), mgpu.to_numpy(want))
                assert_bit_equal(mgpu.to_numpy(replicas[i](
                    shards_of(form, replicas)[i][0], None)),
                    mgpu.to_numpy(want))


def test_a_shard_without_elements_has_no_rows(engine, devices):
    """Cut along another axis, as sequences of words are."""
    replicas = mgpu.initialize(mlp(engine), devices, "uniform")
    shards = mgpu.split_and_load(np.ones((6, 1), "float32"), devices, 1,
                                 even_split=False)
    shards = [x.reshape((x.shape[1], 6)) if x.shape[1] else x
              for x in shards]
    assert [out is None for out in replicas(shards)] \
        == [i > 0 for i in range(len(devices))]
    assert [out is None for out in replicas(
        [shards[0]] + [[]] * (len(devices) - 1))] \
        == [i > 0 for i in range(len(devices))]


def test_a_first_input_without_rows_and_a_second_with_some(engine, devices):
    """Of a text without words and where its sentences begin, perhaps."""
    replicas = mgpu.initialize(two_inputs(engine), devices, "xavier")
    a, b = shards_of((table(8), table(8)[:, :3]), replicas)[-1]
    others = shards_of((table(8), table(8)[:, :3]), replicas)[:-1]
    for call in (lambda: replicas([*others, (a[:0], b)]),
                 lambda: replicas([*others, ([], b)]),
                 lambda: replicas[len(others)](a[:0], b)):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == (
            "the first array of a device's inputs says whether it has rows; "
            f"received an empty one, and {tuple(b.shape)} after it, on "
            f"{devices[-1]}. Let the array with a row for each example come "
            "first, or give a device without rows None.")
    assert replicas([*others, (None, b)])[-1] is None if others else True


def test_a_frameworks_names_say_what_mgpu_calls(engine):
    replicas = mgpu.initialize(mlp(engine), on(0, 1), "uniform")
    trainer = mgpu.Trainer(replicas, "sgd")
    for thing, name, use in (
            (replicas[0], "train", "the method of the same name of the Repl"),
            (replicas, "modules", "the same method of replicas.net"),
            (replicas[0], "collect_params", "Replicas.collect_params"),
            (replicas, "cast", "mgpu.initialize("),
            (trainer.optimizer, "lr", "Trainer.learning_rate"),
            (trainer.optimizer, "lr_scheduler", "Trainer(..., "),
            (replicas, "to", "mgpu.initialize("),
            (trainer, "param_groups", "set_learning_rate")):
        with pytest.raises(AttributeError) as caught:
            getattr(thing, name)
        assert str(caught.value).startswith(
            f"{type(thing).__name__!r} object has no attribute {name!r}. Use "
            + use)
    with pytest.raises(AttributeError) as caught:
        replicas.typo
    assert str(caught.value) == "'Replicas' object has no attribute 'typo'"
    assert not hasattr(trainer, "typo")


def test_wrong_calls_are_refused(engine):
    replicas = mgpu.initialize(mlp(engine), on(0, 1), "uniform")
    x = mgpu.put(table(4), mgpu.cpu(0))
    kind = type(x).__name__

    def refused(error, text, call):
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == text
    for bare, what in ((x, kind), (table(4), "ndarray"), (3.0, "float")):
        refused(TypeError, "replicas take a list with one shard per device; "
                f"received {what}. Use replicas(split_and_load(x, "
                "replicas.devices)), or replicas[i](x) for the replica on "
                "device i.", lambda: replicas(bare))
    refused(ValueError, "2 replicas take 2 shards; received 1. Use "
            "mgpu.split_batch, which always makes one per device.",
            lambda: replicas([x]))
    for shards in ([None, None], [x[:0], None]):
        refused(ValueError, "at least one shard must hold rows; received 2 "
                "empty ones. Leave an empty batch out.",
                lambda: replicas(shards))
    refused(ValueError, "a network runs on one row or more; replica 0 on "
            "cpu(0) received none. Leave it out, or use replicas(shards), "
            "which passes empty shards over.",
            lambda: replicas[0](mgpu.put(table(4)[:0], mgpu.cpu(0))))
    for wrong, what in ((table(4), "ndarray"), (None, "NoneType"),
                        (1.5, "float"), ({}, "dict")):
        refused(TypeError, "replica 1 on cpu(1) takes arrays of the "
                f"{engine.name} backend; received {what}. Use mgpu.put(x, "
                "cpu(1)).", lambda: replicas[1](wrong))
        if wrong is not None:
            refused(TypeError, "replica 1 on cpu(1) takes arrays of the "
                    f"{engine.name} backend; received {what}. Use "
                    "mgpu.put(x, cpu(1)).", lambda: replicas([x, wrong]))
    refused(TypeError, "replica 1 on cpu(1) takes arrays of the "
            f"{engine.name} backend; received no input, which says what "
            "is on this device: let a network without inputs take one that "
            "it does not use. Use mgpu.put(x, cpu(1)).", lambda: replicas[1]())
    graph = types.SimpleNamespace(x=x)
    refused(TypeError, "replica 0 on cpu(0) takes arrays of the "
            f"{engine.name} backend; received SimpleNamespace. Give it a dict "
            "or tuple of the arrays that it holds (split_f makes one for each "
            "device), and make the object in the network's forward.",
            lambda: replicas([graph, graph]))


def test_the_other_frameworks_arrays_are_refused(engine):
    foreign, name = foreign_array(engine)
    replicas = mgpu.initialize(mlp(engine), on(0, 1), "uniform")
    own = mgpu.put(table(4), mgpu.cpu(0))
    bias = mgpu.initialize(mlp(engine, units=(6, 3)), on(0),
                           "uniform").params()[1]
    for call in (lambda: replicas(foreign),
                 lambda: replicas([foreign, foreign]),
                 lambda: replicas([own, (foreign,)]),
                 lambda: replicas([own, own], [own, {"x": foreign}]),
                 lambda: replicas[0](foreign),
                 lambda: bias.set_data(foreign),
                 lambda: mgpu.initialize(mlp(engine, deferred=True), on(0),
                                         "uniform",
                                         sample=foreign),
                 lambda: mgpu.get_params([foreign], mgpu.cpu(0))):
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == refusal_of_foreign(engine, name)


# -- modes --------------------------------------------------------------------

def test_outside_of_record_a_replica_predicts_without_a_graph(
        engine, devices):
    """Whatever the user's own flags say, and whatever ran before."""
    replicas = mgpu.initialize(convnet(engine), devices, "xavier",
                               dtype="float64")
    x = images(6, "float64")
    train(replicas, x)
    before = on_each(replicas)

    def outputs(*scopes):
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope())
            return replicas([mgpu.put(x, d) for d in devices])

    def numbers(outs):
        return [mgpu.to_numpy(out) for out in outs]
    predicted = outputs()
    for outs in (outputs(mgpu.no_grad), outputs(mgpu.record, mgpu.no_grad),
                 outputs(lambda: mgpu.record(train_mode=False))):
        for a, b in zip(numbers(outs), numbers(predicted)):
            assert_bit_equal(a, b)
    with pytest.raises(RuntimeError, match="backward needs losses that were "
                       r"computed inside mgpu.record\(\)"):
        mgpu.backward(predicted)
    assert_all_equal(on_each(replicas), before)
    # Training normalises by the batch instead, and builds a graph.
    trained = outputs(mgpu.record)
    assert (numbers(trained)[0] != numbers(predicted)[0]).any()
    mgpu.backward(trained)
    # A recorded prediction has a graph too.
    mgpu.backward(outputs(lambda: mgpu.record(train_mode=False)))


# -- Parameter ----------------------------------------------------------------

def test_reading_a_parameter(engine):
    replicas = mgpu.initialize(mlp(engine), on(1, 3), "xavier")
    p = replicas.params()[0]
    assert (p.name, p.kind, p.shape, p.dtype, p.grad_req) \
        == ("0.weight", "weight", (5, 6), "float32", "write")
    assert repr(p) == "Parameter 0.weight (shape=(5, 6), dtype=float32)"
    assert p.list_devices() == on(1, 3)
    assert_bit_equal(mgpu.to_numpy(p.data()), mgpu.to_numpy(p.data("cpu:3")))
    with mgpu.no_grad():    # the array itself, of that device only
        p.data(mgpu.cpu(3))[:] = 2
    assert (mgpu.to_numpy(p.list_data()[1]) == 2).all()
    assert (mgpu.to_numpy(replicas[1].arrays()[0]) == 2).all()
    assert (mgpu.to_numpy(p.data()) != 2).all()
    assert not mgpu.to_numpy(p.grad("cpu:1")).any()
    for read in (p.data, p.grad, lambda device: replicas.export_numpy(
            device=device)):
        with pytest.raises(RuntimeError, match=(
                r"parameter '0.weight' is not initialized on cpu\(0\); it "
                r"lives on \[cpu\(1\), cpu\(3\)\]. Read it there, or")):
            read(mgpu.cpu(0))


def test_writing_a_parameter(engine, devices):
    replicas = mgpu.initialize(mlp(engine), devices, "uniform")
    p = replicas.params()[0]
    value = np.arange(30.0).reshape(5, 6)
    for given in (value, mgpu.put(value, devices[-1])):
        p.set_data(0 * value)
        p.set_data(given)
        for x in p.list_data():
            assert_bit_equal(mgpu.to_numpy(x), value.astype("float32"))
    with pytest.raises(ValueError, match=r"parameter '0.weight' has shape "
                       r"\(5, 6\); received \(6, 5\). Reshape the value."):
        p.set_data(value.T)
    with mgpu.record():         # inside a recorded block too
        p.set_data(value)
        outputs = replicas([mgpu.put(table(4), d) for d in devices])
    mgpu.backward(outputs)
    assert all(mgpu.to_numpy(g).any() for g in p.list_grad())


def test_zero_grad(engine, devices):
    replicas = mgpu.initialize(convnet(engine), devices, "xavier")
    replicas.params()[1].grad_req = "null"
    with mgpu.record():
        outputs = replicas([mgpu.put(images(2), d) for d in devices])
    mgpu.backward(outputs)
    first, *rest = [p for p in replicas.params() if p.grad_req != "null"]
    held = first.list_grad()
    first.zero_grad()
    for g in held:              # in place
        assert not mgpu.to_numpy(g).any()
    assert all(mgpu.to_numpy(g).any() for g in rest[-1].list_grad())
    replicas.zero_grad()
    for p in rest:
        for g in p.list_grad():
            assert not mgpu.to_numpy(g).any()


def test_freezing_and_unfreezing(engine, devices):
    replicas = mgpu.initialize(mlp(engine), devices, "xavier")
    weight, bias = replicas.params()[:2]
    start = on_each(replicas)
    weight.grad_req = "null"
    assert weight.grad_req == "null" and bias.grad_req == "write"
    assert replicas.grad_reqs() == {"0.weight": "null", "0.bias": "write",
                                    "2.weight": "write", "2.bias": "write"}
    assert weight in replicas.params()
    train(replicas, table(8))
    frozen = on_each(replicas)
    for i in range(len(devices)):
        assert_bit_equal(frozen["0.weight"][i], start["0.weight"][i])
        assert (frozen["2.weight"][i] != start["2.weight"][i]).any()
    with pytest.raises(ValueError, match="parameter '0.weight' has no "
                       "gradient; its grad_req is 'null'"):
        weight.list_grad()
    weight.zero_grad()          # nothing to do, and no error
    weight.grad_req = "write"
    train(replicas, table(8))
    for i in range(len(devices)):
        now = on_each(replicas)["0.weight"][i]
        assert (now != start["0.weight"][i]).any()
        assert_bit_equal(now, on_each(replicas)["0.weight"][0])


@pytest.mark.parametrize("call", ["zero_grad", "check_equal", "list_grad"])
def test_gradients_of_what_the_user_has_unfrozen(engine, devices, call):
    """Before the next pass, on all devices."""
    net = mlp(engine)
    weight = net[0].weight
    if engine.name == "mxnet":
        weight.grad_req = "null"
    else:
        weight.requires_grad = False
    replicas = mgpu.initialize(net, devices, "xavier")
    train(replicas, table(8))
    if engine.name == "mxnet":
        weight.grad_req = "write"
    else:
        weight.requires_grad = True
    for p in replicas.params():
        p.list_grad() if call == "list_grad" else getattr(replicas, call)()
    assert all(not mgpu.to_numpy(g).any()
               for g in replicas.params()[0].list_grad())
    before = on_each(replicas)["0.weight"]
    train(replicas, table(8))
    now = on_each(replicas)["0.weight"]
    for x, y in zip(before, now):
        assert (x != y).any()
        assert_bit_equal(y, now[0])


def test_wrong_grad_reqs_are_refused(engine):
    replicas = mgpu.initialize(convnet(engine), on(0, 1), "uniform")
    with pytest.raises(ValueError, match="unknown grad_req; received 'no'. "
                       "Use 'write', 'add' or 'null'."):
        replicas.params()[0].grad_req = "no"
    mean = replicas.statistics()[0]
    with pytest.raises(ValueError, match="a buffer has no gradient; received "
                       "grad_req='write' for '1.running_mean'"):
        mean.grad_req = "write"
    assert mean.grad_req == "null"
    train(replicas, images(4))      # and the network still trains


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_bias_learns_while_its_weight_is_frozen(engine, devices, dtype):
    """Frozen before `initialize`, by the framework's own means. (Gluon's own
    Dense layer in float32 leaves the gradient of such a bias at zero: the
    oneDNN kernel computes it only together with that of the weight.)"""
    net = mlp(engine)
    if engine.name == "mxnet":
        net[0].weight.grad_req = "null"
    else:
        net[0].weight.requires_grad = False
    replicas = mgpu.initialize(net, devices, "xavier", seed=1, dtype=dtype)
    start = on_each(replicas)
    other = mgpu.initialize(mlp(engine), devices, "xavier", seed=1,
                            dtype=dtype)
    assert_all_equal(start, on_each(other))     # drawn all the same
    train(replicas, table(8, dtype))
    train(other, table(8, dtype))
    now, wanted = on_each(replicas), on_each(other)
    for i in range(len(devices)):
        assert_bit_equal(now["0.weight"][i], start["0.weight"][i])
        for name in ("0.bias", "2.weight", "2.bias"):
            assert (now[name][i] != start[name][i]).any()
            # Another kernel without the weight: rounding of the dtype.
            assert relative_difference(now[name][i], wanted[name][i]) \
                < {"float32": 1e-6, "float64": 1e-14}[dtype], name


def freeze_weights(replicas, own):
    """By the framework's own means, or mgpu's."""
    for p in replicas.params()[:-2]:    # not of the last layer
        if "weight" not in p.name:
            continue
        if not own:
            p.grad_req = "null"
        elif replicas.backend.name == "mxnet":
            replicas.net.collect_params(f".*{p.name.split('.')[-1]}").setattr(
                "grad_req", "null")
        else:
            p.data().requires_grad_(False)


def with_cell(engine):
    """Two matrices, each with a bias, in one layer."""
    base, dense = bricks(engine)
    if engine.name == "mxnet":
        from mxnet import gluon as layers
        cell = layers.rnn.RNNCell(4, input_size=6)
    else:
        from torch import nn as layers
        cell = layers.RNNCell(6, 4)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.cell, self.end = cell, dense(4, 3)

        def forward(self, x):
            state = 0 * x[:, :4]
            return self.end(self.cell(x, [state])[0] if engine.name == "mxnet"
                            else self.cell(x, state))
    return Net()


@pytest.mark.parametrize("name, make", [
    *((name, mlp) for name in ENGINES),
    # Gluon's cells do not take the arrays of mx.np.
    *((name, with_cell) for name in ENGINES if name != "mxnet-np")])
@pytest.mark.parametrize("own", [True, False])
def test_a_bias_learns_once_its_weight_is_frozen(name, devices, make, own):
    """In the middle of a training, in float32: an old gradient must not be
    applied again."""
    found = []
    with using_engine(name) as engine:
        for dtype, places in (("float64", on(0)), ("float32", devices)):
            replicas = mgpu.initialize(make(engine), places, "xavier", seed=1,
                                       dtype=dtype)
            train(replicas, table(8, dtype))
            freeze_weights(replicas, own)
            for seed in (1, 2, 3):
                train(replicas, table(8, dtype, seed))
            found.append(on_each(replicas))
    for name, arrays in found[1].items():
        for x in arrays:        # four steps in float32
            assert relative_difference(x, found[0][name][0]) < 1e-5, name


MXNET = [name for name in ENGINES if name.startswith("mxnet")]


def loose(way, dtype="float64"):
    """A Gluon network with parameters that are no attributes of a block."""
    import mxnet as mx
    nn = mx.gluon.nn

    class Net(nn.Block):
        def __init__(self):
            super().__init__()
            if way == "list":
                self.own = [self.params.get("w", shape=(4, 4))]
            elif way == "dict":
                self.own = {"w": self.params.get("w", shape=(4, 4))}
            elif way == "fetched":
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
            if way in ("taken in", "collected"):
                return self.end(self.own[0](x))
            w = self.params.get("w") if way == "fetched" else \
                self.own[0 if way == "list" else "w"]
            dot = mx.np.dot if mx.util.is_np_array() else mx.nd.dot
            return self.end(dot(x, w.data(x.context)))
    return Net()


@pytest.mark.filterwarnings("ignore:.*unregistered container with Blocks")
@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("way", ["list", "dict", "fetched", "taken in",
                                 "collected"])
@pytest.mark.parametrize("values", ["there", "drawn"])
def test_all_that_gluons_own_trainer_trains_is_trained(
        name, devices, way, values):
    """``net.collect_params()``, also what is no attribute of a block."""
    with using_engine(name) as engine:
        from mxnet import autograd
        first, L2 = on(0)[0], mgpu.losses.L2Loss()
        net, plain = loose(way), loose(way)
        if values == "there":
            net.initialize()
        replicas = mgpu.initialize(net, devices, dtype="float64", init=None if
                                   values == "there" else "xavier")
        names = sorted(p.name for p in replicas.params())
        own = "dense_weight" if way in ("taken in", "collected") else "w"
        assert names == sorted([own, "end.bias", "end.weight"])
        assert (replicas.export_numpy()[own] != 0).all()
        plain.initialize()
        plain.cast("float64")
        pairs = list(zip(net.collect_params().values(),
                         plain.collect_params().values()))
        for p, q in pairs:
            q.set_data(engine.put(p.list_data()[0].asnumpy(), first))
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
        for seed in range(3):
            X = np.random.default_rng(seed).normal(size=(8, 4))
            y = np.random.default_rng(seed + 9).normal(size=(8, 3))
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
        for p in (net.params.get("late", shape=(2,)),):
            p.initialize()
        if way != "collected":
            with pytest.raises(RuntimeError, match="received others under "
                               "'late'"):
                replicas[0](engine.put(np.ones((2, 4)), devices[0]))


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("way", ["standalone", "overridden"])
def test_what_gluons_own_trainer_leaves_out_is_refused(name, devices, way):
    """Unless it is frozen."""
    with using_engine(name):
        import mxnet as mx

        class Net(mx.gluon.nn.Block):
            def __init__(self):
                super().__init__()
                if way == "standalone":
                    self.scale = mx.gluon.Parameter("scale", shape=(3,))
                    self.scale.initialize(mx.init.One())
                else:
                    self.scale = self.params.get("scale", shape=(3,))
                self.end = mx.gluon.nn.Dense(3, in_units=6)

            def collect_params(self, select=None):
                return self.end.collect_params(select)

            def forward(self, x):
                return self.end(x) * self.scale.data(x.context)
        net = Net()
        net.initialize()
        if way == "overridden":
            net.params.initialize()
        for wanted in ("xavier", "keep"):
            with pytest.raises(ValueError, match="parameters that it leaves "
                               "out: 'scale'. Make a parameter with self"):
                mgpu.initialize(net, devices, wanted)
        before = net.scale.data().asnumpy()
        net.scale.grad_req = "null"
        replicas = mgpu.initialize(net, devices, "keep")
        train(replicas, table(8, "float32"))
        assert (net.scale.list_data()[-1].asnumpy() == before).all()


@pytest.mark.parametrize("where", ["weight", "bias", "layer"])
@pytest.mark.parametrize("name", MXNET)
def test_a_bias_learns_where_its_weight_belongs_to_another_block(
        name, devices, where):
    """In float32 MXNet computes no gradient of a bias whose weight has
    none."""
    with using_engine(name) as engine:
        import mxnet as mx
        Block, L2 = mx.gluon.nn.Block, mgpu.losses.L2Loss()

        class Holder(Block):
            def __init__(self, name, shape):
                super().__init__()
                self.own = self.params.get(name, shape=shape)

        class Net(Block):
            def __init__(self):
                super().__init__()
                self.b = self.w = None
                self.c = Holder("bias", (3,)) if where == "bias" else None
                if where == "layer":
                    self.d = mx.gluon.nn.Dense(3, in_units=4)
                elif where == "weight":
                    self.d = Holder("weight", (3, 4))
                else:
                    self.v = self.params.get("v", shape=(3, 4))
                if where != "bias":
                    self.k = self.params.get("k", shape=(3,))

            def forward(self, x):
                w = self.v if where == "bias" else \
                    self.d.own if where == "weight" else self.d.weight
                k = self.c.own if where == "bias" else self.k
                dense = mx.npx.fully_connected if name == "mxnet-np" \
                    else mx.nd.FullyConnected
                return dense(x, w.data(x.context), k.data(x.context),
                             num_hidden=3)
        found = []
        for dtype, places in (("float64", on(0)), ("float32", devices)):
            net = Net()
            for p in net.collect_params().values():
                if len(p.shape) == 2 or p.name.endswith("dense0_bias"):
                    p.grad_req = "null"
            if where == "layer":
                net.d.bias.grad_req = "null"
            net.initialize(mx.init.Constant(0.5))
            replicas = mgpu.initialize(net, places, dtype=dtype)
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
            X, y = np.random.default_rng(0).normal(size=(2, 8, 4))
            mgpu.train_batch(X.astype(dtype), y[:, :3].astype(dtype),
                             replicas, L2, trainer)
            found.append(replicas.export_numpy())
        assert engine.name == "mxnet" and worst(*found[::-1])[0] < 1e-5


def test_a_part_of_an_initialized_network_is_refused(engine, devices):
    """Its replicas would be others than those of the whole."""
    net = mlp(engine)
    replicas = mgpu.initialize(net, devices, "xavier", seed=1)
    with pytest.raises(ValueError, match="belongs to one network that is "
                       "initialized; received 'weight', 'bias'"):
        mgpu.initialize(net[0], devices, "xavier")
    train(replicas, table(8))
    part = net[0]
    net.cycle = replicas
    gc.disable()        # nobody has it, but it is there
    try:
        del net, replicas
        mgpu.initialize(part, devices)
    finally:
        gc.enable()


def test_a_later_network_on_trained_layers(engine, devices):
    """Fine-tuning: `force_reinit` makes the earlier replicas void, and the
    later ones train as on copies of the layers."""
    found = []
    for copied in (False, True):
        net = mlp(engine)
        old = mgpu.initialize(net, devices, "xavier", seed=1)
        trainer = mgpu.Trainer(old, "sgd")
        train(old, table(8))
        values = on_each(old)
        layers = list(net)[:-1]
        later = with_head(engine, copy.deepcopy(layers) if copied else layers)
        if copied:
            replicas = mgpu.initialize(later, devices, "keep")
            train(old, table(8))
        else:
            with pytest.raises(ValueError, match="Pass force_reinit=True if .*"
                               " or give the new one copy.deepcopy of the "
                               "layers"):
                mgpu.initialize(later, devices, "keep")
            train(old, table(8))        # nothing has changed
            old.import_numpy({name: x for name, (x, *_) in values.items()})
            replicas = mgpu.initialize(later, devices, "keep",
                                       force_reinit=True)
            for call in (lambda: trainer.step(1), lambda: old[0](mgpu.put(
                    table(2), devices[0]))):
                with pytest.raises(RuntimeError, match="these replicas are "
                                   "void: the network, or one with parameters"
                                   " of it, was initialized again"):
                    call()
        for name in ("0.weight", "0.bias"):
            assert_bit_equal(on_each(replicas)[name][0], values[name][0])
        train(replicas, table(8), steps=2)
        found.append(on_each(replicas))
    for name, arrays in found[0].items():
        for x, y in zip(arrays, found[1][name], strict=True):
            assert_bit_equal(x, y)


def with_head(engine, layers):
    """`layers`, and behind them a dense layer with values."""
    head = bricks(engine)[1](5, 4)
    mgpu.initialize(head, on(0), mgpu.initializers.Constant(0.25))
    head = copy.deepcopy(head)
    if engine.name == "torch":
        from torch import nn
        return nn.Sequential(*layers, head)
    from mxnet.gluon import nn
    net = nn.Sequential()
    net.add(*layers, head)
    return net


# -- values through NumPy -----------------------------------------------------

@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("target", ENGINES)
def test_values_cross_engines_and_device_counts(source, target):
    with using_engine(source) as engine:
        a = mgpu.initialize(convnet(engine), on(0, 1), "xavier",
                            batch_norm="average", dtype="float64")
        train(a, images(6, "float64"))
        values = a.export_numpy()
        x = images(3, "float64")
        wanted = mgpu.to_numpy(a[0](mgpu.put(x, mgpu.cpu(0))))
    with using_engine(target) as engine:
        b = mgpu.initialize(convnet(engine), on(2, 3, 4),
                            "uniform", dtype="float64")
        b.import_numpy(values)
        for p in b.params() + b.statistics():
            for value in p.list_data():
                assert_bit_equal(mgpu.to_numpy(value), values[p.name])
        for i, device in enumerate(b.devices):
            found = mgpu.to_numpy(b[i](mgpu.put(x, device)))
            # float64, and two engines' own convolutions
            assert relative_difference(found, wanted) < 1e-13
        # A copy on both ways: nothing is shared with what was handed over.
        values["0.weight"][:] = 0
        assert mgpu.to_numpy(b.params()[0].data()).any()


def bare_norm(backend, kind):
    """A norm layer that learns no gamma, or no beta, between two others."""
    no = {"center": False} if kind == "bias" \
        else {"center": False, "scale": False}
    if backend.name == "mxnet":
        from mxnet.gluon import nn
        norm = {"batch": nn.BatchNorm, "instance": nn.InstanceNorm}.get(
            kind, nn.LayerNorm)     # over the last axis, of 4 columns
        net = nn.HybridSequential()
        net.add(nn.Conv2D(4, 3, in_channels=2), norm(in_channels=4, **no),
                nn.Conv2D(3, 1, in_channels=4), nn.Flatten())
        return net
    from torch import nn
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4, affine=False) if kind == "batch" else
        nn.InstanceNorm2d(4) if kind == "instance" else
        nn.LayerNorm(4, bias=False) if kind == "bias" else
        nn.LayerNorm(4, elementwise_affine=False),
        nn.Conv2d(4, 3, 1), nn.Flatten())


@pytest.mark.parametrize("kind", ["batch", "instance", "layer", "bias"])
def test_a_norm_layer_without_gamma_and_beta_is_one_network(devices, kind):
    """Gluon's layer keeps them as frozen parameters, torch's has none: the
    draws behind them are the same, and values cross."""
    found, kept, after = {}, {}, {}
    for name in BACKENDS:
        with using_engine(name) as engine:
            replicas = mgpu.initialize(bare_norm(engine, kind), devices,
                                       "xavier", seed=3)
            found[name] = replicas.export_numpy()
            train(replicas, images(6))
            kept[name] = replicas.export_numpy(device=devices[0])
            after[name] = replicas
    weights = [p.name for p in after[BACKENDS[0]].params()
               if p.kind == "weight"]
    for name in BACKENDS:
        assert "; 0 parameters kept, " in repr(after[name])
        assert len({repr(r).partition("; ")[2] for r in after.values()}) == 1
        for weight in weights:
            assert_bit_equal(found[name][weight], found[BACKENDS[0]][weight])
        for other in BACKENDS:
            with using_engine(other):
                after[other].import_numpy(kept[name])
                values = after[other].export_numpy(device=devices[0])
                for shared in kept[name].keys() & values.keys():
                    assert_bit_equal(values[shared], kept[name][shared])
                for constant in values.keys() - kept[name].keys():
                    if constant.endswith(("gamma", "beta")):
                        assert (values[constant]
                                == constant.endswith("gamma")).all()


@pytest.mark.parametrize("engine_name", TORCH)
@pytest.mark.parametrize("name, value", [
    ("1.gamma", np.full(4, 2.0)), ("1.beta", np.ones(4)),
    ("0.gamma", np.ones(4)), ("9.gamma", np.ones(4))])
def test_a_gamma_that_a_layer_does_not_have_is_refused(
        engine_name, name, value):
    """Unless it changes nothing."""
    with using_engine(engine_name) as engine:
        replicas = mgpu.initialize(bare_norm(engine, "batch"), on(0, 1))
        with pytest.raises(ValueError, match=f"received unknown {name}"):
            replicas.import_numpy({**replicas.export_numpy(), name: value})


def test_every_devices_statistics_survive(engine, devices):
    replicas = mgpu.initialize(convnet(engine), devices, "uniform")
    k = len(devices)
    for i in range(k):
        for p in replicas.statistics():
            p.list_data()[i][:] = i + 1
    if k == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert replicas.export_numpy()["1.running_var"].tolist() \
                == [1] * 4
    else:
        with pytest.warns(UserWarning, match="4 running statistics differ "
                          "between devices .* Pass all_devices=True"):
            mean = replicas.export_numpy()
        assert mean["1.running_var"].tolist() == [(k + 1) / 2] * 4
    every = replicas.export_numpy(all_devices=True)
    for i, device in enumerate(devices):
        one = replicas.export_numpy(device=device)
        assert one["1.running_mean"].tolist() == [i + 1] * 4
        row = every["1.running_mean"] if k == 1 else every["1.running_mean"][i]
        assert_bit_equal(row, one["1.running_mean"])
    for p in replicas.statistics():
        p.set_data(np.zeros(p.shape))
    replicas.import_numpy(every)
    assert_all_equal(replicas.export_numpy(all_devices=True), every)
    with pytest.raises(ValueError, match="one device's statistics or those "
                       "of all are exported; received device="):
        replicas.export_numpy(device=devices[0], all_devices=True)


def test_native_arrays_are_values_too(engine, devices):
    """What the framework has read from a file of its own, for example."""
    replicas = mgpu.initialize(convnet(engine), devices, "xavier")
    wanted = {name: x + 1 for name, x in replicas.export_numpy().items()}
    replicas.import_numpy({name: engine.put(x, devices[-1])
                           for name, x in wanted.items()})
    assert_all_equal(replicas.export_numpy(), wanted)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("dtype", ["int16", "uint16", "int32"])
def test_buffers_of_other_integers_come_back(name, dtype, devices, tmp_path):
    """Also those of a dtype that no data has."""
    with using_engine(name):
        import torch
        from torch import nn
        net = nn.Linear(6, 3)
        net.register_buffer("table", torch.arange(4).to(getattr(torch, dtype)))
        replicas = mgpu.initialize(net, devices)
        trainer = mgpu.Trainer(replicas, "sgd")
        mgpu.save_checkpoint(tmp_path / "saved", replicas, trainer)
        wanted = replicas.export_numpy()
        replicas.import_numpy({**wanted, "table": wanted["table"] + 1})
        assert replicas.export_numpy()["table"].tolist() == [1, 2, 3, 4]
        mgpu.load_checkpoint(tmp_path / "saved", replicas, trainer)
        assert_all_equal(replicas.export_numpy(), wanted)


@pytest.mark.parametrize("change, text", [
    (lambda v: v.pop("0.bias"), "missing 0.bias"),
    (lambda v: v.update(extra=np.ones(1)), "unknown extra"),
    (lambda v: v.update({"0.bias": np.ones(3)}),
     "0.bias: shape (3,) instead of (4,)"),
    (lambda v: v.update({"0.bias": np.array(["a"] * 4)}), "0.bias: dtype <U1"),
    (lambda v: v.update({"1.running_var": np.ones((3, 4))}),
     "1.running_var: shape (3, 4) instead of (4,)"),
], ids=["missing", "unknown", "shape", "dtype", "devices"])
def test_values_that_do_not_fit_are_refused(engine, change, text):
    replicas = mgpu.initialize(convnet(engine), on(0, 1), "xavier")
    before = on_each(replicas)
    values = {name: value + 1 for name, value
              in replicas.export_numpy().items()}
    change(values)
    with pytest.raises(ValueError) as caught:
        replicas.import_numpy(values)
    assert str(caught.value) == (
        f"the values must be those of this network; received {text}. Use "
        "what export_numpy of a network with the same layers gave.")
    assert_all_equal(on_each(replicas), before)


# -- get_params ---------------------------------------------------------------

def test_get_params(engine, devices):
    host = [np.arange(6.0).reshape(2, 3), np.arange(3, dtype="float32")]
    native = [mgpu.put(x, mgpu.cpu(0)) for x in host]
    for source in (host, native, tuple(host)):
        for device in devices:
            params = mgpu.get_params(source, device)
            assert type(params) is list
            for p, x in zip(params, host):
                assert_bit_equal(mgpu.to_numpy(p), x)
                assert_bit_equal(mgpu.to_numpy(mgpu.grad(p)), 0 * x)
                with mgpu.no_grad():
                    p[:] = 9
    for x, y in zip(native, host):      # not shared
        assert_bit_equal(mgpu.to_numpy(x), y)
    named = mgpu.get_params({"W": host[0]}, "cpu:1", grad_req="add")
    assert list(named) == ["W"]
    for _ in range(2):
        with mgpu.record():
            loss = named["W"] * named["W"]
        mgpu.backward(loss)
    assert_bit_equal(mgpu.to_numpy(mgpu.grad(named["W"])), 4 * host[0])


@pytest.mark.parametrize("arguments, error, text", [
    ((np.ones((2, 3)), "cpu:0"), TypeError,
     "params must be a list, or a dict, of arrays; received one ndarray"),
    (([np.ones(2)], "cpu:0", "no"), ValueError, "unknown grad_req; received"),
    (([np.ones(2)], "gpu:99"), ValueError, "gpu(99) is not there"),
    (([np.ones(2)], ["cpu:0", "cpu:1"]), TypeError, "expected a device"),
], ids=["bare", "grad_req", "gpu", "devices"])
def test_wrong_get_params(engine, arguments, error, text):
    with pytest.raises(error) as caught:
        mgpu.get_params(*arguments)
    assert text in str(caught.value)


# -- replica 0 is the user's network ------------------------------------------

def edits(engine):
    """Ways to write to the first parameter of replica 0: the user's network.
    Each takes the network and an array of its shape and writes that."""
    if engine.name == "mxnet":
        import mxnet as mx

        def data(net, context=None):
            p = next(iter(net.collect_params().values()))
            return p.data(context or mx.cpu(0))

        def in_place(net, value):
            data(net)[:] = mgpu.put(value, mgpu.cpu())

        def set_data(net, value):
            next(iter(net.collect_params().values())).set_data(
                mgpu.put(value, mgpu.cpu()))
        return {"in place": in_place, "set_data": set_data}
    import torch

    def in_place(net, value):
        with torch.no_grad():
            net[0].weight.copy_(torch.from_numpy(value))

    def through_data(net, value):
        net[0].weight.data.copy_(torch.from_numpy(value))

    def in_another_order(net, value):
        weight = net[0].weight
        if weight.is_contiguous():
            weight.data = weight.data.t().contiguous().t()
        weight.data.copy_(torch.from_numpy(value))

    def through_numpy(net, value):
        net[0].weight.detach().numpy()[:] = value

    def load(net, value, assign=False):
        net.load_state_dict({**net.state_dict(),
                             "0.weight": torch.from_numpy(value.copy())},
                            assign=assign)

    def assign(net, value):
        load(net, value, assign=True)

    def replace(net, value):
        net[0].weight = torch.nn.Parameter(torch.from_numpy(value.copy()))
    return {edit.__name__: edit for edit in (
        in_place, through_data, in_another_order, through_numpy, load,
        assign, replace)}


def all_edits():
    return [(engine, name) for engine, names in (
        ("mxnet-nd", ("in place", "set_data")),
        ("mxnet-np", ("in place", "set_data")),
        ("torch", ("in_place", "through_data", "in_another_order",
                   "through_numpy", "load", "assign", "replace")))
            for name in names]


@pytest.mark.filterwarnings("ignore:'0.weight' differed")
@pytest.mark.parametrize("passes", ["together", "one by one"])
@pytest.mark.parametrize("engine_name, how", all_edits())
def test_what_is_written_to_the_network_reaches_all(
        engine_name, how, passes, devices):
    """Between steps, as averages of weights and clamps are: K devices train
    as one that is edited alike."""
    found = []
    with using_engine(engine_name) as engine:
        for places in (on(0), devices):
            net = mlp(engine)
            replicas = mgpu.initialize(net, places, "xavier",
                                       dtype="float64")
            trainer = mgpu.Trainer(replicas, "sgd", {
                "learning_rate": 0.125, "momentum": 0.5})
            for step in range(3):
                shards = shards_of(table(7, "float64", step), replicas)
                with mgpu.record():
                    outputs = replicas(shards) if passes == "together" \
                        else [r(x) for r, x in zip(replicas, shards)]
                    losses = [(out * out).sum() for out in outputs]
                mgpu.backward(losses)
                trainer.step(7)
                value = np.random.default_rng(step).normal(size=(5, 6))
                edits(engine)[how](net, value)
            shards = shards_of(table(8, "float64"), replicas)
            outputs = replicas(shards) if passes == "together" \
                else [r(x) for r, x in zip(replicas, shards)]
            replicas.check_equal()
            found.append((on_each(replicas), np.concatenate(
                [mgpu.to_numpy(x) for x in outputs])))
    for name, (first, *_) in found[0][0].items():
        assert relative_difference(found[1][0][name][0], first) < 1e-12
    assert relative_difference(found[1][1], found[0][1]) < 1e-12


@pytest.mark.parametrize("engine_name", TORCH)
@pytest.mark.filterwarnings("ignore:'weight' differed")
def test_what_is_written_in_bfloat16_reaches_all(engine_name, devices):
    import torch
    with using_engine(engine_name):
        replicas = mgpu.initialize(torch.nn.Linear(6, 3).bfloat16(), devices)
        replicas.net.weight.data.mul_(2)
        replicas(shards_of(torch.ones(8, 6).bfloat16(), replicas))
        replicas.check_equal()


@pytest.mark.parametrize("engine_name", TORCH)
def test_what_is_written_between_two_replicas_calls(engine_name, devices):
    """Each replica is called by itself, and the network is loaded in
    between."""
    import torch
    with using_engine(engine_name):
        net = torch.nn.BatchNorm1d(6)
        replicas = mgpu.initialize(net, devices, "xavier")
        shards = shards_of(np.ones((8, 6), "float32"), replicas)
        for step, (replica, x) in enumerate(zip(replicas, shards)):
            net.load_state_dict({**net.state_dict(), **{
                "running_mean": torch.full((6,), float(step)),
                "bias": torch.full((6,), float(step))}})
            out = mgpu.to_numpy(replica(x))
            # (1 - step) / sqrt(1 + 1e-5) + step, in float32
            assert np.abs(out - 1.0).max() < 1e-4
        replicas.check_equal()


def test_a_difference_without_a_reason_is_told_once(engine, devices):
    """What leaves no trace but the values: replica 0's win, with one
    warning for all."""
    replicas = mgpu.initialize(mlp(engine), devices, "xavier")
    shards = shards_of(table(8), replicas)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x = replicas.params()[1].list_data()[-1]
            (x.data if engine.name == "torch" else x)[:] = 7.0
            replicas(shards)
    told = [str(w.message) for w in caught if "had other values" in
            str(w.message)]
    assert len(told) == (len(devices) > 1)
    replicas.check_equal()


@pytest.mark.parametrize("engine_name", TORCH)
def test_a_write_to_another_replica_only_is_an_error(engine_name, devices):
    import torch
    with using_engine(engine_name):
        replicas = mgpu.initialize(
            torch.nn.Linear(6, 3), devices, "xavier")
        shards = shards_of(table(8), replicas)
        with torch.no_grad():
            replicas.params()[0].list_data()[-1].add_(1.0)
        if len(devices) == 1:
            replicas(shards)
            return
        with pytest.raises(RuntimeError, match=r"'weight' only on cpu\(\d\)"):
            replicas(shards)
        replicas.params()[0].set_data(np.ones((3, 6), "float32"))
        replicas(shards)
        replicas.check_equal()


@pytest.mark.parametrize("engine_name", TORCH)
def test_a_parameter_in_the_place_of_a_frozen_one_trains(
        engine_name, devices):
    import torch
    with using_engine(engine_name):
        net = torch.nn.Linear(6, 3)
        net.weight.requires_grad_(False)
        replicas = mgpu.initialize(net, devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 1.0})
        net.weight = torch.nn.Parameter(torch.zeros(3, 6))
        with mgpu.record():
            losses = replicas(shards_of(np.ones((8, 6), "float32"), replicas))
        mgpu.backward(losses)
        trainer.step(8)
        assert replicas.params()[0].grad_req == "write"
        for x in replicas.params()[0].list_data():
            assert (mgpu.to_numpy(x) == -1.0).all()


@pytest.mark.parametrize("engine_name", TORCH)
def test_an_array_of_another_form_is_refused(engine_name, devices):
    import torch
    with using_engine(engine_name):
        net = torch.nn.Linear(6, 3)
        replicas = mgpu.initialize(net, devices, "xavier")
        net.weight = torch.nn.Parameter(torch.zeros(4, 6))
        with pytest.raises(ValueError, match=r"received .*\(4, 6\)"):
            replicas(shards_of(table(8), replicas))


@pytest.mark.parametrize("how", ["in place", "replaced", "assigned",
                                 "through .data", "NumPy", "own forward"])
@pytest.mark.parametrize("engine_name", TORCH)
def test_buffers_follow_only_where_the_user_wrote_replica_0s(
        engine_name, how, devices):
    """Statistics differ by device, and stay so; what the user writes to the
    network's reaches all."""
    import torch
    with using_engine(engine_name):
        net = torch.nn.BatchNorm1d(6)
        replicas = mgpu.initialize(net, devices, "xavier")
        shards = shards_of(table(8), replicas)
        with mgpu.record():
            replicas(shards)
        mean = replicas.statistics()[0]
        own = [mgpu.to_numpy(x) for x in mean.list_data()]
        replicas(shards)
        for x, before in zip(mean.list_data(), own):
            assert_bit_equal(mgpu.to_numpy(x), before)
        for value in (3.0, 4.0):
            new = torch.full((6,), value)
            if how == "in place":
                net.running_mean.copy_(new)
            elif how == "replaced":
                net.running_mean = new
            elif how == "through .data":
                net.running_mean.data.copy_(new)
            elif how == "NumPy":
                net.running_mean.numpy()[:] = new
            elif how == "own forward":      # torch counts no write there
                net.train()
                net(torch.full((8, 6), value))
                new = net.running_mean.clone()
            else:
                net.load_state_dict({**net.state_dict(), "running_mean": new},
                                    assign=True)
            replicas(shards)
            for x in mean.list_data():
                assert_bit_equal(mgpu.to_numpy(x), new.numpy())


@pytest.mark.parametrize("how", ["no_grad", "set_grad_enabled"])
@pytest.mark.parametrize("engine_name", TORCH)
def test_no_graph_where_the_user_wants_none(engine_name, how, devices):
    """The target of a consistency loss, inside `record`."""
    import torch
    with using_engine(engine_name):
        scope = torch.no_grad if how == "no_grad" \
            else lambda: torch.set_grad_enabled(False)
        x, z = (torch.from_numpy(table(8, "float64", seed)) for seed in (0, 1))
        net = torch.nn.Linear(6, 3).double()
        weight = net.weight.detach().clone().requires_grad_()
        target = (x @ weight.T + net.bias).detach()
        ((z @ weight.T + net.bias.detach() - target) ** 2).sum().backward()
        replicas = mgpu.initialize(net, devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        before = net.weight.detach().clone()
        for each in (lambda xs: replicas(xs), lambda xs: [
                replica(shard) for replica, shard in zip(replicas, xs)]):
            with mgpu.record():
                with scope():
                    targets = each(shards_of(x, replicas))
                outputs = replicas(shards_of(z, replicas))
                losses = [((a - b) ** 2).sum(1)
                          for a, b in zip(outputs, targets)]
            assert not any(t.requires_grad for t in targets)
            mgpu.backward(losses)
        trainer.step(8)
        assert relative_difference(net.weight.detach(),
                                   before - 0.125 * weight.grad / 8) < 1e-12


def initialised_by_data():
    """ActNorm of Glow: its first pass writes its weights."""
    import torch

    class ActNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros(6))
            self.there = False

        def forward(self, x):
            if not self.there:
                with torch.no_grad():
                    self.shift.copy_(-x.mean(0))
                self.there = True
            return x + self.shift
    return ActNorm()


@pytest.mark.parametrize("engine_name", TORCH)
def test_weights_that_a_pass_makes_of_its_rows_are_refused(
        engine_name, devices):
    with using_engine(engine_name):
        replicas = mgpu.initialize(initialised_by_data(), devices)
        if len(devices) == 1:
            train(replicas, table(8))
            return
        with pytest.raises(RuntimeError, match="writes the same values.*"
                           "others of 'shift' on .*0.* and on .*1"):
            train(replicas, table(8))


def constrained(way):
    """Its forward pass writes its weights, from nothing else."""
    import torch

    class MaxNorm(torch.nn.Linear):
        def forward(self, x):
            new = torch.renorm(self.weight.data, 2, 0, 0.5)
            if way == "data":
                self.weight.data = new
            elif way == "copy":
                with torch.no_grad():
                    self.weight.copy_(new)
            else:
                with torch.no_grad():
                    self.average.mul_(0.5).add_(self.weight, alpha=0.5)
                return super().forward(x) + x @ self.average.T
            return super().forward(x)
    torch.manual_seed(3)
    net = MaxNorm(6, 3).double()
    net.average = torch.nn.Parameter(torch.ones(
        3, 6, dtype=torch.float64), requires_grad=False)
    return net


@pytest.mark.parametrize("engine_name", TORCH)
@pytest.mark.parametrize("last", ["prediction", "one row", "one by one",
                                  "given up", "the network itself"])
@pytest.mark.parametrize("way", ["data", "copy", "average"])
def test_weights_that_a_prediction_writes_are_no_edit_of_the_users(
        engine_name, devices, way, last):
    """Such as the best ones, which come back."""
    import torch
    if way == "average" and last in ("one by one", "one row"):
        pytest.skip("a pass of one device, or of each, is one more")
    x, rows = torch.randn(8, 6).double(), 1 if last == "one row" else 8

    def loss(output):
        return output.square().sum(1)
    with using_engine(engine_name):
        net, plain = constrained(way), constrained(way)
        replicas = mgpu.initialize(net, devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        best = {name: t.clone() for name, t in net.state_dict().items()}
        for number in range(3):
            if last == "given up":
                with mgpu.record():
                    replicas(shards_of(x, replicas))
            elif last == "one by one":
                for replica, shard in zip(replicas, shards_of(x, replicas)):
                    replica(shard)
            else:
                replicas(mgpu.split_and_load(x[:rows], devices,
                                             even_split=False))
            plain(x[:rows])
            for one in (net, plain):
                if last == "the network itself":
                    one(x)
                elif number == 1:
                    one.load_state_dict(best)
                else:
                    with torch.no_grad():
                        one.weight.mul_(3)
            mgpu.train_batch(x, torch.zeros(8), replicas,
                             lambda o, y: loss(o), trainer)
            plain.zero_grad()
            loss(plain(x)).sum().backward()
            with torch.no_grad():
                for p in plain.parameters():
                    if p.requires_grad:
                        p -= 0.125 / 8 * p.grad
        replicas.check_equal()
        found = replicas.export_numpy()
    for name, p in plain.state_dict().items():
        assert relative_difference(found[name], p) < 1e-12


@pytest.mark.parametrize("engine_name", TORCH)
def test_weights_that_a_prediction_makes_of_its_rows_are_refused(
        engine_name, devices):
    """Also where the user has written to them since."""
    import torch
    with using_engine(engine_name):
        net = initialised_by_data()
        replicas = mgpu.initialize(net, devices)
        shards = shards_of(table(8), replicas)
        replicas(shards)
        with torch.no_grad():
            net.shift.mul_(2)
        if len(devices) == 1:
            replicas(shards)
            return
        with pytest.raises(RuntimeError, match="writes the same values"):
            replicas(shards)


@pytest.mark.parametrize("engine_name", TORCH)
def test_attributes_of_parameters_reach_all(engine_name, devices):
    import torch

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * getattr(self.weight, "factor", 1.0)
    with using_engine(engine_name):
        net = Scaled(6, 3)
        net.weight.factor = 0.5
        replicas = mgpu.initialize(net, devices)
        for factor in (0.5, 0.25, None):
            if factor is None:
                del net.weight.factor
            else:
                net.weight.factor = factor
            x = table(8)
            found = np.concatenate([mgpu.to_numpy(out) for out in
                                    replicas(shards_of(x, replicas))])
            want = mgpu.to_numpy(net(torch.from_numpy(x)).detach())
            assert relative_difference(found, want) < 1e-6
        net.weight.kept = torch.ones(1)
        if len(devices) > 1:
            with pytest.raises(ValueError, match="no attributes that are "
                               "tensors; received 'kept'"):
                replicas(shards_of(x, replicas))


@pytest.mark.parametrize("engine_name", TORCH)
def test_a_train_of_the_users_own_freezes_a_fresh_network(
        engine_name, devices):
    """As ``net.train()`` would, which scripts begin with."""
    import torch

    class Frozen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(6)
            self.end = torch.nn.Linear(6, 3)

        def forward(self, x):
            return self.end(self.norm(x))

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self
    with using_engine(engine_name):
        net = Frozen()
        train(mgpu.initialize(net, devices), table(8))
        assert_bit_equal(mgpu.to_numpy(net.norm.running_mean), np.zeros(
            6, "float32"))


@pytest.mark.parametrize("engine_name", TORCH)
def test_an_export_names_buffers_that_differ(engine_name, devices):
    import torch

    class Centred(torch.nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("centre", torch.zeros(6))

        def forward(self, x):
            with torch.no_grad():
                self.centre.lerp_(x.mean(0), 0.5)
            return super().forward(x - self.centre)
    with using_engine(engine_name):
        replicas = mgpu.initialize(Centred(), devices)
        train(replicas, table(8))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            values = replicas.export_numpy()
            replicas.export_numpy(device=devices[0])
        assert [str(w.message)[:50] for w in said] == (len(devices) > 1) * [
            "1 buffers that forward passes write differ between"]
        assert_bit_equal(values["centre"],
                         mgpu.to_numpy(replicas.net.centre))
        # of each device, back on each
        every = replicas.export_numpy(all_devices=True)
        before = [mgpu.to_numpy(x) for x in replicas.buffers()[0].list_data()]
        train(replicas, table(8))
        replicas.import_numpy(every)
        for x, old in zip(replicas.buffers()[0].list_data(), before):
            assert_bit_equal(mgpu.to_numpy(x), old)


@pytest.mark.parametrize("engine_name", TORCH)
def test_what_cannot_be_copied_is_shared(engine_name, devices):
    import torch
    with using_engine(engine_name):
        net = torch.nn.Sequential(torch.nn.Linear(6, 3))
        net.lock, net.names = threading.Lock(), ["a"]
        replicas = mgpu.initialize(net, devices, "xavier")
        for replica in replicas.of_engine()[1:]:
            assert replica.module.lock is net.lock
            assert replica.module.names is not net.names
        net = torch.nn.Linear(6, 3)
        net.seen = [net(torch.ones(1, 6))]
        if len(devices) > 1:
            with pytest.raises(ValueError, match="received 'seen', which was "
                               "computed before"):
                mgpu.initialize(net, devices)


@pytest.mark.parametrize("between", ["backward", "allreduce_grads"])
@pytest.mark.parametrize("engine_name", TORCH)
def test_what_is_written_before_the_update_reaches_all(
        engine_name, between, devices):
    import torch
    with using_engine(engine_name):
        net = torch.nn.BatchNorm1d(6)
        replicas = mgpu.initialize(net, devices, "xavier")
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.0})
        with mgpu.record():
            losses = replicas(shards_of(table(8), replicas))
        mgpu.backward(losses)
        if between == "allreduce_grads":
            trainer.allreduce_grads()
        with torch.no_grad():
            for x in (net.weight, net.running_mean):
                x.fill_(3.0)
        if between == "backward":
            trainer.allreduce_grads()
        trainer.update(8)
        for p in (replicas.params()[0], replicas.statistics()[0]):
            for x in p.list_data():
                assert mgpu.to_numpy(x).tolist() == [3.0] * 6


@pytest.mark.parametrize("engine_name", TORCH)
def test_what_is_written_to_the_network_is_exported(engine_name, devices):
    """Before it has reached the other devices."""
    import torch
    with using_engine(engine_name):
        net = torch.nn.BatchNorm1d(6)
        replicas = mgpu.initialize(net, devices, "xavier")
        with torch.no_grad():
            for x in (net.weight, net.running_mean):
                x.fill_(3.0)
        for options in ({}, {"device": devices[-1]}, {"all_devices": True}):
            values = replicas.export_numpy(**options)
            for p in (replicas.params()[0], replicas.statistics()[0]):
                assert (values[p.name] == 3.0).all()


@pytest.mark.parametrize("engine_name", TORCH)
def test_a_buffer_that_a_pass_replaces_is_its_devices(engine_name, devices):
    import torch

    class Last(torch.nn.Linear):
        def forward(self, x):
            if self.training:
                self.last = x[:1].clone()
            return super().forward(x)
    with using_engine(engine_name):
        net = Last(6, 3)
        net.register_buffer("last", torch.zeros(1, 6))
        replicas = mgpu.initialize(net, devices, "xavier")
        shards = shards_of(table(8), replicas)
        with mgpu.record():
            replicas(shards)
        for _ in range(2):
            replicas(shards)
            for x, shard in zip(replicas.buffers()[0].list_data(), shards):
                assert_bit_equal(mgpu.to_numpy(x), mgpu.to_numpy(shard[:1]))


# -- what a network cannot be trained with ------------------------------------

def layers_of(engine, gluon, torch):
    """A network of the layers that one of the two functions makes."""
    if engine.name == "mxnet":
        import mxnet as mx
        net = mx.gluon.nn.Sequential()
        net.add(*gluon(mx.gluon))
        return net
    from torch import nn
    return nn.Sequential(*torch(nn))


@pytest.mark.parametrize("k", [1, 2])
def test_sparse_gradients_are_refused(engine, k):
    net = layers_of(
        engine, lambda gluon: [gluon.nn.Embedding(4, 3, sparse_grad=True)],
        lambda nn: [nn.Embedding(4, 3, sparse=True)])
    with pytest.raises(ValueError, match="gradients must hold all rows of a "
                       "parameter; received sparse ones for '0.weight'. "):
        mgpu.initialize(net, on(*range(k)), dtype="float64")
    assert "float32" in str((net[0].weight).dtype)


def scripted(nn):
    import torch
    return torch.jit.script(nn.Linear(4, 3))


def proxy(nn):
    layer = nn.Linear(4, 3)
    layer.itself = weakref.proxy(layer)
    return layer


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


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("make, words, single", [
    (scripted, r"received TorchScript in \['0'\]", False),
    (proxy, r"weakref.proxy as \['0.itself'\]. Keep .* in a list", False),
    (sparse_buffer, r"sparse, complex or float8 ones: \['0.graph'\]", False),
    (complex_weight, r"sparse, complex or float8 ones: \['0.factor'\]", False),
    (lambda nn: nn.Embedding(4, 3, scale_grad_by_freq=True),
     r"received scale_grad_by_freq=True in \['0'\]", True),
    (lambda nn: nn.Embedding(4, 3, max_norm=1.0),
     r"received max_norm in \['0'\]", True)])
@pytest.mark.parametrize("k", [1, 2])
def test_layers_that_do_not_fit_are_refused(name, make, words, single, k):
    with using_engine(name):
        from torch import nn
        net = nn.Sequential(make(nn))
        if single and k == 1:
            mgpu.initialize(net, on(0))
            return
        with pytest.raises(ValueError, match=words):
            mgpu.initialize(net, on(*range(k)))


def _slopes(kind):
    """A Gluon network with a PReLU between two layers, and a batch."""
    import mxnet as mx
    from mxnet.gluon import nn

    class Called(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.first = nn.Dense(3, in_units=2)
                self.alpha = self.params.get("alpha", shape=(1,))
                self.last = nn.Dense(2, in_units=3)

        def hybrid_forward(self, F, x, alpha):
            return self.last(F.LeakyReLU(self.first(x), alpha,
                                         act_type="prelu"))
    net = Called() if kind == "operator" else nn.HybridSequential()
    if kind != "operator":
        with net.name_scope():
            net.add(nn.Dense(3, in_units=2), nn.PReLU(),
                    nn.Dense(2, in_units=3))
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
    ("operator", True), ("symbol", True)])
def test_slopes_that_mxnet_computes_wrongly_are_refused(name, kind, wrong):
    """Against differences of MXNet's own outputs; where these agree one day,
    nothing need be refused."""
    with using_engine(name):
        import mxnet as mx
        net, x = _slopes(kind)
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
        if not wrong:
            mgpu.initialize(net, on(0, 1))
            with pytest.raises(ValueError, match="PReLU in a compiled"):
                mgpu.initialize(_slopes(kind)[0], on(0), hybridize=True)
            return
        with pytest.raises(ValueError, match="slope of a PReLU in a compiled "
                           "network.*hybridize.False"):
            mgpu.initialize(net, on(0, 1))


@pytest.mark.parametrize("name", MXNET[:1])
@pytest.mark.parametrize("kind", ["layer", "symbol", "operator"])
@pytest.mark.parametrize("options, dtype, wrong", [
    ({"ceil_mode": True}, "float32", True),
    ({"ceil_mode": True}, "float64", False), ({}, "float32", False),
    ({"ceil_mode": True, "count_include_pad": False}, "float32", False)])
def test_windows_that_mxnet_computes_wrongly_are_refused(name, kind, options,
                                                         dtype, wrong):
    """Against differences of MXNet's own outputs, which are linear; where
    these agree one day, nothing need be refused."""
    with using_engine(name):
        import mxnet as mx
        net = mx.gluon.nn.HybridSequential()
        pool = mx.gluon.nn.AvgPool2D(2, 2, **options)
        net.add(pool if kind != "operator" else mx.gluon.nn.HybridLambda(
            lambda F, x: F.Pooling(x, **pool._kwargs)),
                mx.gluon.nn.Dense(1, in_units=16 if options else 9))
        net.initialize(mx.init.One())
        if kind == "symbol":
            net = mx.gluon.SymbolBlock(net(mx.sym.var("data")),
                                       mx.sym.var("data"),
                                       net.collect_params())
        elif kind == "operator":
            net.hybridize()
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
        if not wrong:
            mgpu.initialize(net, on(0, 1))
            return
        with pytest.raises(ValueError, match="wrong float32 gradient of "
                           "average pooling.*count_include_pad=False"):
            mgpu.initialize(net, on(0, 1))


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_recurrent_layers_of_mxnet_are_refused_in_float64(name, kind):
    """Their gradients there are wrong, without mgpu too."""
    with using_engine(name) as engine:
        def make(dtype="float32"):
            net = layers_of(engine, lambda gluon: [
                gluon.nn.Dense(3, flatten=False),
                getattr(gluon.rnn, kind)(4, layout="NTC", dtype=dtype)], None)
            return net
        for net, dtype in ((make(), "float64"), (make("float64"), None)):
            with pytest.raises(ValueError, match=r"received float64 for "
                               r"\['1'\]. Use dtype='float32'"):
                mgpu.initialize(net, on(0, 1), dtype=dtype)
        mgpu.initialize(make("float64"), on(0, 1), dtype="float32")


@pytest.mark.parametrize("kind", ["float64", "int64"])
def test_the_first_state_of_a_cell_has_the_dtype_of_its_weights(kind,
                                                                devices):
    with mgpu.using_backend("mxnet"):
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
        with pytest.raises(TypeError, match=(
                r"received \['cell'\] and MXNet's default, float32. Pass "
                r"begin_state= in that dtype to unroll: cell.begin_state\("
                r"batch_size=n, ctx=x.context, dtype='float64'\)")):
            wrong(shards_of(x, wrong))
        assert all(y.dtype == np.float64 for y in right(shards_of(x, right)))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("build, x", [(mlp, table(4)), (convnet, images(4))],
                         ids=["dense", "conv"])
@pytest.mark.parametrize("dtype", ["uint8", "float64", "int64", "bool"])
def test_inputs_of_another_dtype_are_named(engine, build, x, dtype, deferred):
    """Where the framework's layers refuse them, in one text for both."""
    replicas = mgpu.initialize(build(engine, deferred=deferred), on(0, 1))
    shards = shards_of(x.astype(dtype), replicas)
    text = ("a layer takes inputs of its own dtype, float32; received "
            f"{dtype}. Convert the data first: X.astype('float32') in NumPy, "
            "or mgpu.put(x, device, dtype='float32').")
    for call in (lambda: replicas(shards), lambda: replicas[1](shards[1])):
        with mgpu.record(), pytest.raises(TypeError) as refused:
            call()
        assert str(refused.value) == text
    replicas(shards_of(x, replicas))


@pytest.mark.parametrize("name", ["torch", "mxnet-nd"])
def test_arrays_that_a_network_makes_in_another_dtype_are_named(name):
    """Its inputs are right as they are."""
    with using_engine(name) as engine:
        if engine.name == "mxnet":
            import mxnet as mx
            base, own = mx.gluon.Block, mx.gluon.nn.Embedding(5, 4)
        else:
            import torch
            base, own = torch.nn.Module, torch.nn.Embedding(5, 4)

        def forward(self, x):
            if engine.name == "mxnet":
                return mx.nd.dot(self.own(x), mx.nd.ones(
                    (4, 4), dtype="float64"))
            return self.own(x) @ torch.ones(4, 4, dtype=torch.float64)
        net = type("Net", (base,), {"forward": forward})()
        net.own = own
        replicas = mgpu.initialize(net, on(0, 1))
        with mgpu.record(), pytest.raises(TypeError, match=(
                "makes its own arrays in its own dtype, float32; received "
                r"float64 from its code \(its inputs are int64\)")):
            replicas(shards_of(np.array([1, 2, 3, 4]), replicas))


def test_a_network_may_convert_its_inputs_itself(engine):
    net = layers_of(
        engine, lambda gluon: [
            gluon.nn.Lambda(lambda x: x.astype("float32")),
            gluon.nn.Dense(3)],
        lambda nn: [type("Float", (nn.Module,), {
            "forward": lambda self, x: x.float()})(), nn.LazyLinear(3)])
    replicas = mgpu.initialize(net, on(0, 1))
    replicas(shards_of(table(4).astype("uint8"), replicas))


@pytest.mark.parametrize("name", TORCH)
def test_a_sparse_gradient_of_the_networks_own_code(name, devices):
    """It is seen in the first step, which changes nothing; one device has
    nothing to add up."""
    import torch
    with using_engine(name):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(5, 3))

            def forward(self, x):
                return torch.nn.functional.embedding(
                    x, self.weight, sparse=True)
        replicas = mgpu.initialize(Net(), devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        with contextlib.nullcontext() if len(devices) == 1 else pytest.raises(
                ValueError, match="received a sparse tensor. Use x.to_dense"):
            mgpu.train_batch(np.arange(4), np.zeros(4, "int64"), replicas,
                             mgpu.losses.SoftmaxCrossEntropyLoss(), trainer)
        replicas.check_equal()
        moved = (replicas.export_numpy()["weight"] != 1).any(axis=1)
        assert moved.tolist() == [len(devices) == 1] * 4 + [False]


@pytest.mark.parametrize("name", TORCH)
def test_a_parameter_without_elements(name, devices):
    import torch
    with using_engine(name) as engine:
        net = mlp(engine)
        net.register_parameter("none", torch.nn.Parameter(torch.zeros(0, 3)))
        replicas = mgpu.initialize(net, devices, "xavier")
        trainer = mgpu.Trainer(replicas, "sgd", {"momentum": 0.5})
        with mgpu.record():
            losses = [(out * out).sum() + replica.arrays()[0].sum()
                      for replica, out in zip(replicas, replicas(
                          shards_of(table(8), replicas)))]
        mgpu.backward(losses)
        trainer.step(8)
        replicas.check_equal()
        assert replicas.export_numpy()["none"].shape == (0, 3)


def test_a_network_that_nobody_uses_ends(engine, devices):
    """mgpu's own tables keep none, nor its memory."""
    replicas = mgpu.initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd")
    mgpu.train_batch(np.ones((4, 6), "float32"), np.zeros(4, "int32"),
                     replicas, mgpu.losses.SoftmaxCrossEntropyLoss(), trainer)
    alive = weakref.ref(replicas), weakref.ref(replicas.net)
    del replicas, trainer
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_replicas_are_not_copied(backend, copied):
    """A copy would share devices, and leave the trainer behind."""
    replicas = mgpu.initialize(mlp(backend), on(0, 1))
    for thing in (replicas, {"model": replicas}):
        if copied is copy.copy and thing is not replicas:
            continue
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            copied(thing)


class Changing(dict):
    """Each value is another one when it is read again."""

    def __getitem__(self, name):
        value = super().__getitem__(name)
        self[name] = np.full(99, "gone")
        return value


def test_values_are_read_once(engine):
    """And before anything is written."""
    replicas = mgpu.initialize(mlp(engine), on(0, 1), "xavier")
    wanted = {name: x + 1 for name, x in replicas.export_numpy().items()}
    replicas.import_numpy(Changing(wanted))
    assert_all_equal(replicas.export_numpy(), wanted)
    for dtype in ("complex64", "uint16", np.longdouble):    # no engine's
        with pytest.raises(ValueError, match="2.bias: dtype"):
            replicas.import_numpy({
                **{name: x * 0 for name, x in wanted.items()},
                "2.bias": np.zeros(3, dtype)})
    assert_all_equal(replicas.export_numpy(), wanted)


def spectral_norm(mx):
    """As in MXNet's example sn_gan: a pass keeps the vector of the power
    iteration by ``set_data``."""
    numpy = mx.util.is_np_array()

    def dot(a, b):
        return mx.np.dot(a, b) if numpy else mx.nd.dot(a, b)

    class Net(mx.gluon.Block):
        def __init__(self):
            super().__init__()
            self.weight = self.params.get("weight", shape=(3, 4))
            self.u = self.params.get("u", shape=(1, 3), grad_req="null")

        def forward(self, x):
            w, u = self.weight.data(x.ctx), self.u.data(x.ctx)
            v = dot(u, w)
            v = v / (v * v).sum() ** 0.5
            u = dot(v, w.T)
            u = u / (u * u).sum() ** 0.5
            with mx.autograd.pause():
                self.u.set_data(u)
            return dot(x, (w / (dot(u, w) * v).sum()).T)
    return Net()


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("rows", [6, 1])
def test_what_a_pass_sets_is_set_once_a_step(name, devices, rows):
    """Not once per device, on devices without rows too; outside of passes
    ``set_data`` writes to all, as in Gluon."""
    import mxnet as mx
    rng, found = np.random.default_rng(0), []
    start = {"weight": rng.normal(size=(3, 4)), "u": rng.normal(size=(1, 3))}
    X, y = rng.normal(size=(rows, 4)), np.arange(rows) % 3
    with using_engine(name) as engine:
        for some in (devices[:1], devices):
            net = spectral_norm(mx)
            replicas = mgpu.initialize(net, some, "uniform", dtype="float64")
            for key, value in start.items():
                getattr(net, key).set_data(engine.put(value, mgpu.cpu(0)))
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
            for _ in range(3):
                mgpu.train_batch(X, y, replicas, mgpu.losses.
                                 SoftmaxCrossEntropyLoss(), trainer)
            found.append({p.name: list(map(mgpu.to_numpy, p.list_data()))
                          for p in replicas.all_parameters()})
        for key, (one,) in found[0].items():
            for copies in found[1][key]:
                assert relative_difference(copies, one) < 1e-12


@pytest.mark.parametrize("name", MXNET)
def test_what_a_pass_sets_reaches_idle_devices(name):
    import mxnet as mx
    with using_engine(name) as engine:
        net = spectral_norm(mx)
        replicas = mgpu.initialize(net, on(0, 1, 2), "uniform")
        shards = [mgpu.put(np.ones((2, 4), "float32"), mgpu.cpu(i))
                  for i in (0, 1)] + [None]
        replicas(shards)
        with engine.scope(recording=False):
            replicas([None, None, mgpu.put(np.ones((1, 4), "float32"),
                                           mgpu.cpu(2))])
        first, second, third = map(mgpu.to_numpy, replicas.buffers()[0]
                                   .list_data())
        assert_bit_equal(first, second)
        assert (first != third).any()       # one pass further


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("policy", ["per_device", "average", "sync"])
def test_gluons_own_joint_batch_norm_is_refused(name, policy):
    """It waits for all devices, also for those without rows."""
    with using_engine(name):
        from mxnet.gluon.contrib.nn import SyncBatchNorm
        for k in (1, 2):
            net = SyncBatchNorm(in_channels=3, num_devices=k)
            with contextlib.nullcontext() if k == 1 else pytest.raises(
                    ValueError, match="SyncBatchNorm of Gluon waits for ever "
                    ".*Use gluon.nn.BatchNorm and batch_norm='sync'"):
                mgpu.initialize(net, on(*range(k)), batch_norm=policy)


def test_inputs_by_other_names_are_refused(engine, devices):
    """A dict goes to a forward that takes one input."""
    base, _ = bricks(engine)

    class Around(base):
        def __init__(self):
            super().__init__()
            self.model = mlp(engine)

        def forward(self, batch):
            # Gluon's own blocks take no names.
            return self.model(*batch.values()) if engine.name == "mxnet" \
                else self.model(**batch)
    replicas = mgpu.initialize(Around(), devices)
    name = "input" if engine.name == "torch" else "x"
    shards = mgpu.split_and_load(table(4), devices, even_split=False)
    for call in (lambda: replicas(**{name: shards}),
                 lambda: replicas[0](**{name: shards[0]})):
        with pytest.raises(TypeError, match="inputs by name are parameters "
                           f"of the network's forward.*{name}"):
            call()
    outputs = replicas([{name: shard} for shard in shards])
    assert sum(len(x) for x in outputs if x is not None) == 4


@pytest.mark.parametrize("deferred", [False, True])
def test_one_input_that_is_a_tuple_is_named(engine, devices, deferred):
    """Tuples and lists are several inputs; ``((a, b),)`` is one."""
    base, dense = bricks(engine)
    layer = mlp(engine, (6, 3), deferred)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, pair):
            a, b = pair
            return self.layer(a) - self.layer(b)
    replicas = mgpu.initialize(Net(), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    pair, y = (table(4), table(4, seed=1)), np.arange(4) % 3
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    with pytest.raises(TypeError, match="a tuple or list of arrays stands for "
                       r"several inputs of a network; received 2: .*forward\("
                       r"\) takes 2 .*is written \(\(a, b\),\), or is a"):
        mgpu.train_batch(pair, y, replicas, loss, trainer)
    mgpu.train_batch((pair,), y, replicas, loss, trainer)
    assert trainer.num_update == 1
