"""`mgpu.initialize`: which values the users' own native networks start from,
on every device."""
import contextvars
import copy
import warnings

import numpy as np
import pytest

import mgpu
from batches import pictures, rows
from conftest import BACKENDS
from helpers import (ENGINES, assert_all_equal, assert_bit_equal, bricks,
                     convnet, mlp, on, on_mxnet, on_torch,
                     relative_difference, using_engine)
from mgpu.nn import initializers
from nets import (native_values, on_each, sequential, shards_of, train,
                  with_values)

MXNET = [engine for engine in ENGINES if engine.startswith("mxnet")]


# -- drawn values -------------------------------------------------------------

def test_devices_do_not_share_memory(engine):
    """Two logical devices share one RAM, and their values must not."""
    replicas = mgpu.initialize(convnet(engine), on(0, 1, 2), "uniform")
    for p in replicas.params() + replicas.statistics():
        with mgpu.no_grad():
            p.list_data()[1][:] = 7
        assert (mgpu.to_numpy(p.data()) != 7).all(), p.name


def test_dtype_casts_parameters_and_statistics(engine, devices):
    """float32 is the float64 draw, rounded once."""
    replicas = mgpu.initialize(
        convnet(engine, deferred=True), devices, "uniform", seed=2,
        dtype="float64", sample=pictures(2))
    assert {p.dtype for p in replicas.all_parameters()} >= {"float64"}
    rounded = on_each(mgpu.initialize(convnet(engine), devices,
                                      "uniform", seed=2))
    for name, values in on_each(replicas).items():
        assert values[0].dtype == np.float64
        assert_bit_equal(np.float32(values), np.stack(rounded[name]))
    outputs = replicas(shards_of(pictures(4, dtype="float64"), replicas))
    assert mgpu.to_numpy(outputs[0]).dtype == np.float64


@pytest.mark.parametrize("name", MXNET)
def test_a_layers_own_gluon_initializer_wins(name, devices):
    own = [("0.weight", ("xavier", {"magnitude": 2})),
           ("0.bias", ("constant", {"value": 0.5})),
           ("1.alpha", ("constant", {"value": 0.25}))]
    with using_engine(name):
        import mxnet as mx
        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.Dense(
            5, in_units=6, bias_initializer=mx.init.Constant(0.5),
            weight_initializer=mx.init.Xavier(magnitude=2)),
            mx.gluon.nn.PReLU())
        found = on_each(mgpu.initialize(net, devices, "orthogonal", seed=1))
    assert list(found) == [name for name, _ in own]
    for number, (name, init) in enumerate(own):
        wanted = initializers.draw_parameter(
            "weight", found[name][0].shape, "float32", None, seed=1,
            index=number, own=init)
        assert_bit_equal(found[name], [wanted] * len(devices))


@on_mxnet
@pytest.mark.parametrize("how", ["object", "name"])
def test_a_layers_own_user_defined_initializer(engine, devices,
                                                          how):
    """As Gluon calls it: an object, or the name of a registered class."""
    import mxnet as mx

    class Ramp(mx.init.Initializer):
        def _init_weight(self, _, arr):
            arr[:] = np.arange(float(arr.size)).reshape(arr.shape)
    mx.init.register(Ramp)

    def build(**shape):
        return mx.gluon.nn.Dense(3, **shape, weight_initializer=Ramp()
                                 if how == "object" else "ramp")
    plain = build(in_units=6)
    plain.initialize(mx.init.Xavier())
    wanted = native_values(engine, plain)
    for net in (build(in_units=6), build()):
        mgpu.initialize(net, devices, "uniform", sample=np.ones((2, 6)))
        assert_all_equal(native_values(engine, net), wanted)


@on_mxnet
def test_a_layers_own_unknown_initializer(engine):
    """Raises, before a change."""
    import mxnet as mx
    net = mx.gluon.nn.Dense(3, in_units=6)
    with_values(engine, net)
    net.weight.init = "ramps"
    before = native_values(engine, net)
    with pytest.raises(ValueError, match=(
            "parameter 'weight': unknown initializer; received 'ramps'")):
        mgpu.initialize(net, on(0, 1), "uniform")
    assert_all_equal(native_values(engine, net), before)


@on_torch
def test_prelu_starts_as_in_gluon(engine):
    import torch
    replicas = mgpu.initialize(torch.nn.PReLU(), on(0), "normal")
    assert replicas.export_numpy() == {"weight": np.float32(0.25)}


def scaled_net(engine):
    """A dense layer, and what scales it: a vector and a number."""
    base, dense = bricks(engine)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.dense = dense(6, 5)
            for name, shape in (("gamma", (5,)), ("logit_scale", (1,))):
                setattr(self, name, self.params.get(name, shape=shape) if
                        engine.name == "mxnet" else Parameter(ones(shape)))

        def forward(self, x):
            x = self.dense(x)
            if engine.name == "mxnet":
                return x * self.gamma.data(x.ctx) * self.logit_scale.data(
                    x.ctx)
            return x * self.gamma * self.logit_scale
    if engine.name == "torch":
        from torch import ones
        from torch.nn import Parameter
    return Net()


@pytest.mark.parametrize("options", [
    dict(init="xavier"), dict(force_reinit=True)], ids=str)
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


@on_torch
def test_weights_of_torchs_layers_are_drawn(engine):
    """Those that have another name, too; the parts of a weight norm are
    not weights."""
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


# -- unknown shapes -----------------------------------------------------------

def first_pass(replicas, x):
    replicas(shards_of(x, replicas))


def passes_in_threads(replicas, x):
    """What torch draws while it completes lazy layers is no number that
    threads share."""
    mgpu.parallel(lambda replica, shard: replica(shard), replicas,
                  shards_of(x, replicas))


def native_call(replicas, x):
    """As ``net(x)`` after ``net.initialize()`` does in Gluon; on torch a pass
    in training moves the statistics."""
    if replicas.backend.name == "torch":
        replicas.net.eval()
    replicas.net(mgpu.put(x, replicas.devices[0]))
    if replicas.backend.name == "torch":
        replicas.net.train()


@pytest.mark.filterwarnings("error:numbers were drawn")
@pytest.mark.parametrize("way", [
    "sample", "native sample", first_pass, passes_in_threads, native_call])
def test_unknown_shapes_are_completed_with_the_same_values(
        engine, devices, way):
    wanted = mgpu.initialize(convnet(engine), devices, "uniform", seed=5)
    sample, x = None, pictures(4)
    if isinstance(way, str):
        sample = x[:1] if way == "sample" else mgpu.put(x[:1], devices[0])
    replicas = mgpu.initialize(convnet(engine, deferred=True), devices,
                               "uniform", seed=5, sample=sample)
    if sample is None:
        early = replicas.params()[0]
        assert early.shape is None
        way(replicas, x)
    assert_all_equal(on_each(replicas), on_each(wanted))
    assert sample is not None or early.shape == (4, 2, 3, 3)
    for one in (replicas, wanted):      # and not drawn again
        train(one, x)
    assert_all_equal(on_each(replicas), on_each(wanted))


def test_values_of_unknown_shapes_are_not_available(engine):
    replicas = mgpu.initialize(mlp(engine, deferred=True), on(0, 1))
    early = replicas.params()[0]
    for read in (early.data, early.list_grad, replicas.export_numpy,
                 replicas[0].arrays, lambda: early.set_data(0),
                 lambda: replicas.import_numpy({})):
        with pytest.raises(RuntimeError, match="a shape is unknown until the "
                           "first forward pass. Run replicas."):
            read()


@on_torch
def test_what_inference_mode_completes_is_trained(engine, devices):
    import torch
    x, found = rows(8, dtype="float64"), []
    for mode in (torch.inference_mode, torch.no_grad):
        replicas = mgpu.initialize(mlp(engine, deferred=True), devices,
                                   "uniform", dtype="float64")
        with mode():
            replicas(shards_of(x, replicas))
        train(replicas, x)
        found.append(on_each(replicas))
    assert_all_equal(*found)


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
    replicas(shards_of(pictures(4), replicas))
    found = native_values(engine, net)
    assert_all_equal({name: found[name] for name in loaded},
                     {name: own[name] for name in loaded})
    if init is not None:
        assert_bit_equal(found["9.weight"], initializers.draw_parameter(
            "weight", (3, 5), "float32", init, seed=0, index=8))


def test_a_sample_that_does_not_fit_leaves_the_network(engine):
    """The first layers know their shapes when the last one raises; the
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
    found = mgpu.initialize(net, on(0, 1), "uniform", sample=pictures(1))
    assert_all_equal(on_each(found), on_each(mgpu.initialize(
        convnet(engine), on(0, 1), "uniform")))


def test_a_layer_without_a_shape_that_is_never_called(engine):
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
    replicas = mgpu.initialize(Net(), on(0, 1), "uniform")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"does not call \['idle.weight.*"
                           r"\]. Set their input sizes"):
            train(replicas, rows(8))
        assert not replicas.complete


# -- values that are there ----------------------------------------------------

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


def test_an_initializer_draws_everything(engine):
    wanted = on_each(mgpu.initialize(convnet(engine), on(0), "uniform"))
    replicas = mgpu.initialize(with_values(engine, convnet(engine)), on(0),
                               "uniform")
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
        with pytest.raises(ValueError, match="seed= requires parameters to "
                           "initialize; received seed=3 .* Pass init="):
            mgpu.initialize(net, on(1), init, seed=3, dtype="float64")
        assert_all_equal(native_values(engine, net), before)


def test_keep_wants_a_value_for_each_parameter(engine):
    net = mgpu.models.lenet()
    with_values(engine, net[0])
    with pytest.raises(RuntimeError, match="init='keep' requires a network "
                       "with values; received none for .*'9.bias'.*. Load or "
                       "initialize these first"):
        mgpu.initialize(net, on(0), "keep")


def written_through_data(net):
    for p in net.parameters():
        p.data[...] = 0.5
    return net


@on_torch
def test_a_model_has_values_when_something_is_written_to_it(engine):
    from mgpu.backends._torch.models import MODELS
    state = MODELS["lenet"](10, 1).state_dict()
    loaded = mgpu.models.lenet()
    loaded.load_state_dict(state)
    written = written_through_data(mgpu.models.lenet())
    for net in (loaded, written, copy.deepcopy(written)):
        own = native_values(engine, net)
        assert_all_equal(mgpu.initialize(net, on(0, 1)).export_numpy(),
                         own)


@on_torch
def test_a_model_without_values_has_none_after_copies_and_casts(engine):
    wanted = mgpu.initialize(mgpu.models.lenet(), on(0), "uniform",
                             dtype="float64").export_numpy()
    net = copy.deepcopy(mgpu.models.lenet()).double()
    assert_all_equal(mgpu.initialize(net, on(0, 1)).export_numpy(),
                     wanted)


@on_mxnet
def test_a_deferred_initialize_is_carried_out_by_gluon(engine, devices):
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
    plain(engine.put(pictures(1), mgpu.cpu(0)))
    wanted = native_values(engine, plain)
    for init, sample in ((None, pictures(1)), ("keep", None)):
        net = build()
        replicas = mgpu.initialize(net, devices, init, sample=sample)
        if sample is None:
            replicas(shards_of(pictures(4), replicas))
        for found, *others in on_each(replicas).values():
            for other in others:
                assert_bit_equal(found, other)
        assert_all_equal(native_values(engine, net), wanted)


@on_torch
def test_lazy_layers_keep_what_torch_gives_them(engine, devices):
    import torch
    torch.manual_seed(5)
    plain = convnet(engine, deferred=True)
    plain.eval()(torch.zeros(1, 2, 6, 6))
    for init, sample in ((None, pictures(1)), ("keep", None)):
        torch.manual_seed(5)
        net = convnet(engine, deferred=True)
        replicas = mgpu.initialize(net, devices, init, sample=sample)
        if sample is None:
            replicas(shards_of(pictures(4), replicas))
        assert_all_equal(native_values(engine, replicas.net),
                         native_values(engine, plain))
        assert "10 parameters kept" in repr(replicas)


@on_mxnet
@pytest.mark.parametrize("init, ran", [(None, True), ("keep", False)])
def test_a_symbol_block_keeps_the_values_that_were_loaded(
        engine, init, ran, devices, tmp_path):
    """Its parameters have values and no shapes."""
    import mxnet as mx
    net = with_values(engine, convnet(engine))
    net.hybridize()
    x = engine.put(pictures(4), mgpu.cpu(0))
    wanted = mgpu.to_numpy(net(x))
    net.export(str(tmp_path / "net"))
    block = mx.gluon.SymbolBlock.imports(
        str(tmp_path / "net-symbol.json"), ["data"],
        str(tmp_path / "net-0000.params"))
    if ran:
        assert_bit_equal(mgpu.to_numpy(block(x)), wanted)
    replicas = mgpu.initialize(block, devices, init)
    for replica in replicas:
        assert_bit_equal(mgpu.to_numpy(replica(mgpu.put(
            pictures(4), replica.device))), wanted)


def test_a_second_initialize_continues_from_trained_values(engine):
    """Elsewhere, with more devices and in float64."""
    replicas = mgpu.initialize(mlp(engine), on(0), "uniform")
    train(replicas, rows(4))
    trained = replicas.export_numpy()
    again = mgpu.initialize(replicas.net, on(1, 2), dtype="float64")
    assert again.devices == on(1, 2)
    for name, values in on_each(again).items():
        for value in values:
            assert_bit_equal(value, trained[name].astype("float64"))


# -- once more ----------------------------------------------------------------


def test_force_reinit_redraws_a_trained_network(engine, devices):
    """Weights and running statistics, as if it had never been trained."""
    net = convnet(engine)
    replicas = mgpu.initialize(net, on(0, 1), "uniform", seed=4)
    fresh = replicas.export_numpy()
    train(replicas, pictures(6), steps=2)
    with warnings.catch_warnings():     # the devices' statistics differ
        warnings.simplefilter("ignore", UserWarning)
        trained = replicas.export_numpy()
    for name in ("0.weight", "5.running_mean", "1.running_var"):
        assert (trained[name] != fresh[name]).any()
    again = mgpu.initialize(net, devices, "uniform", seed=4, force_reinit=True)
    assert again.net is net and again.devices == devices
    redrawn = again.export_numpy()
    assert_all_equal(redrawn, fresh)    # torch's batch counters too


@on_mxnet
def test_values_that_gluon_has_moved_are_asked_for(engine):
    net = mlp(engine)
    replicas = mgpu.initialize(net, on(1, 2), "uniform")
    net.initialize(force_reinit=True)
    with pytest.raises(RuntimeError, match="'.*weight' without a value there"):
        replicas.export_numpy()
    mgpu.initialize(net, on(1, 2)).export_numpy()


def test_networks_that_share_layers(engine, devices):
    """A part of one, and a later one on its layers: each trains what it has,
    as on one device, and the later one as on copies."""
    x, found = rows(8, dtype="float64"), []
    for places in (on(0), devices):
        net = mlp(engine)
        whole = mgpu.initialize(net, places, "xavier", seed=1,
                                dtype="float64")
        train(whole, x)
        for later in (net[0], sequential(engine, list(net)[:-1])):
            kept, values = copy.deepcopy(later), []
            for one in (kept, later):
                replicas = mgpu.initialize(one, places)
                train(replicas, x)
                values.append(on_each(replicas))
            assert_all_equal(*values)
            train(whole, x)
        found.append(on_each(whole))
    for name, (value, *_) in found[0].items():
        for other in found[1][name]:
            assert relative_difference(other, value) < 1e-12


# -- wrong arguments ----------------------------------------------------------

WRONG = [
    (dict(batch_norm="joint"), ValueError,
     "unknown batch_norm; received 'joint'. Use one of 'per_device', "
     "'average', 'sync'."),
    (dict(dtype="int32"), ValueError,
     "unknown dtype; received 'int32'. Use one of 'float16', 'float32', "
     "'float64'."),
    (dict(seed=-1), ValueError,
     "seed must be an integer of 0 or more; received -1."),
    (dict(init="kaiming"), ValueError, "'kaiming'"),
    (dict(init=0.01), TypeError, "0.01"),
    (dict(init="bilinear", dtype="float64"), ValueError,
     "needs a weight of 4 axes or more"),
    (dict(devices=["cpu:1", "cpu:0", "cpu:1"]), ValueError,
     "devices must be distinct; received [cpu(1), cpu(0), cpu(1)]")]


def test_wrong_arguments_are_refused_before_a_change(backend):
    net = with_values(backend, mlp(backend))
    before = native_values(backend, net)
    for wrong, error, text in WRONG:
        with pytest.raises(error) as caught:
            mgpu.initialize(**{"net": net, "devices": on(0, 1), **wrong})
        assert text in str(caught.value)
        assert_all_equal(native_values(backend, net), before)
    mgpu.initialize(net, on(0, 1), "uniform")      # it was not initialized


@pytest.mark.parametrize("name", BACKENDS)
def test_the_network_decides_the_backend(name):
    """Where nothing else has: in `initialize`, and in what follows."""
    def trained(net):
        replicas = mgpu.initialize(net, on(0, 1), "uniform")
        train(replicas, rows(7))
        return replicas.export_numpy()
    with mgpu.using_backend(name) as backend:
        nets = [mlp(backend) for _ in range(2)]
        expected = trained(nets[0])
    undecided = contextvars.Context()
    assert_all_equal(undecided.run(trained, nets[1]), expected)
    assert undecided.run(mgpu.get_backend) is backend
    undecided.run(mgpu.evaluate_accuracy_gpu, nets[1],
                  [(rows(4), np.zeros(4, int))])


@pytest.mark.parametrize("ours, other", [(a, b) for a in BACKENDS
                                         for b in BACKENDS if a != b])
def test_the_other_frameworks_network_is_refused(ours, other):
    with mgpu.using_backend(other) as backend:
        net = mlp(backend)
    with mgpu.using_backend(ours), pytest.raises(TypeError, match=(
            f"the {ours} backend takes a .*; received {other}.*Sequential. "
            rf"Call mgpu.set_backend\('{other}'\), or choose no backend")):
        mgpu.initialize(net, on(0), "uniform")
