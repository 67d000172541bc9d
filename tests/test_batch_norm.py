"""The three meanings of batch normalization on several devices.

Float64 throughout, so that two ways to compute the same sum agree to about
1e-15 and a limit of 1e-12 excludes any other formula: a momentum of
0.9 instead of float32(0.9) is off by 2e-8, an unbiased variance by 1 / n.
"""

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import (ENGINES, assert_bit_equal, bricks, convnet,
                     relative_difference, using_engine, worst)
from nets import functional_norm

MXNET = [engine for engine in ENGINES if engine.startswith("mxnet")]
TORCH = [engine for engine in ENGINES if engine == "torch"]
#: what Gluon keeps of 0.9, and how far a running statistic moves
KEEP = float(np.float32(0.9))


#: with both families of MXNet's arrays
ALL = pytest.mark.parametrize("engine", ENGINES, indirect=True)


@pytest.fixture(params=BACKENDS)
def engine(request):
    with using_engine(request.param) as backend:
        yield backend


def on(k):
    return [mgpu.cpu(i) for i in range(k)]


def images(n, seed=0):
    """With a mean and a variance of their own in every row."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 2, 6, 6)) * rng.uniform(
        0.5, 2, (n, 2, 1, 1)) + rng.normal(size=(n, 2, 1, 1))


def labels(n):
    return np.arange(n) % 3


def batch_norm(engine, channels=2, **options):
    """One batch-norm layer, whose statistics are those of the input."""
    if engine.name == "mxnet":
        from mxnet.gluon import nn
        net = nn.HybridSequential()
        net.add(nn.BatchNorm(in_channels=channels, **options))
        return net
    from torch import nn
    return nn.Sequential(nn.BatchNorm2d(channels, **options))


def initialize(net, devices, policy, **options):
    return mgpu.initialize(net, devices, "xavier", seed=1, dtype="float64",
                           batch_norm=policy, **options)


def run(replicas, trainer, X, y):
    """One step; the outputs of all rows, and the summed gradients."""
    Xs, ys = mgpu.split_batch(X, y, replicas.devices)
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    with mgpu.record():
        outputs = replicas(Xs)
        losses = mgpu.parallel(lambda out, label: None if out is None
                               else loss(out, label), outputs, ys)
    mgpu.backward(losses)
    trainer.allreduce_grads()
    gradients = {p.name: [mgpu.to_numpy(g) for g in p.list_grad()]
                 for p in replicas.params()}
    trainer.update(len(X))
    outputs = np.concatenate([mgpu.to_numpy(out) for out in outputs
                              if out is not None])
    return outputs, gradients


def pass_through(replicas, X):
    """Outputs of a recorded pass and a backward pass: what moves the running
    statistics on either backend. `X`: a batch, or a list of shards."""
    shards = X if isinstance(X, list) else mgpu.split_and_load(
        X, replicas.devices, even_split=False)
    with mgpu.record():
        outputs = replicas(shards)
    mgpu.backward(outputs)
    return [None if out is None else mgpu.to_numpy(out) for out in outputs]


def values_on(replicas, i):
    return {p.name: mgpu.to_numpy(p.list_data()[i])
            for p in (*replicas.params(), *replicas.statistics())}


def assert_predicts(replicas, X):
    """By running mean 0 and variance 1, which stay."""
    outputs = np.concatenate(pass_through(replicas, X))
    assert relative_difference(outputs, X / np.sqrt(1 + 1e-5)) < 1e-12
    for name, values in statistics(replicas).items():
        assert_bit_equal(values[0], np.full(2, float("var" in name)))


def statistics(replicas):
    """Name -> one array per device."""
    return {p.name: [mgpu.to_numpy(x) for x in p.list_data()]
            for p in replicas.statistics()}


def moved(shard, steps=1):
    """The running mean and variance after `steps` passes over `shard`."""
    mean, var = np.zeros(shard.shape[1]), np.ones(shard.shape[1])
    for _ in range(steps):
        mean = KEEP * mean + (1 - KEEP) * shard.mean((0, 2, 3))
        var = KEEP * var + (1 - KEEP) * shard.var((0, 2, 3))
    return mean, var


def normalized(X, axes=(0, 2, 3)):
    """By the mean and the biased variance of all rows."""
    return (X - X.mean(axes, keepdims=True)) / np.sqrt(
        X.var(axes, keepdims=True) + 1e-5)


def shards_of(X, k):
    return [X[begin:end] for begin, end in mgpu.shard_bounds(len(X), k)]


# -- per device ---------------------------------------------------------------

@ALL
@pytest.mark.parametrize("rows", [7, 2])
def test_per_device_keeps_a_set_per_device(engine, devices, rows):
    """Each device normalizes by its own rows and remembers them, biased as
    Gluon on a CPU does; at the end of a step a device without rows has all
    buffers of the first one that ran."""
    replicas = mgpu.initialize(batch_norm(engine), devices,
                               "uniform", dtype="float64")
    assert replicas.batch_norm == "per_device"      # the default
    X = images(rows)
    for steps in (1, 2):
        outputs = pass_through(replicas, X)
        replicas.after_step()
        found, shards = statistics(replicas), shards_of(X, len(devices))
        for p in replicas.buffers():
            assert p.kind != "other" or all(
                int(x) == steps for x in p.list_data())
        for i, shard in enumerate(shards):
            mean, var = moved(shard if len(shard) else shards[0], steps)
            if not len(shard):
                assert outputs[i] is None
            else:
                assert relative_difference(outputs[i],
                                           normalized(shard)) < 1e-12
            for name, value in (("0.running_mean", mean),
                                ("0.running_var", var)):
                assert relative_difference(found[name][i], value) < 1e-12


@pytest.mark.parametrize("moves", [0.125, 0.0])
def test_the_layers_own_momentum(engine, moves):
    """Gluon's 0.875 and torch's 0.125 are the same rule, and exact; with 1
    and 0 statistics stay to the bit, in float32 too."""
    options = {"momentum": 1 - moves if engine.name == "mxnet" else moves}
    dtype = "float64" if moves else "float32"
    replicas = mgpu.initialize(batch_norm(engine, **options), on(1), "uniform",
                               dtype=dtype)
    mean, var = np.array([[0.5, -2], [0.7, 3.1]], dtype)
    for p, start in zip(replicas.statistics(), (mean, var)):
        p.set_data(start)
    X = images(3).astype(dtype)
    for _ in range(1 if moves else 50):
        pass_through(replicas, X)
    found = statistics(replicas)
    for name, start, batch in (("running_mean", mean, X.mean((0, 2, 3))),
                               ("running_var", var, X.var((0, 2, 3)))):
        wanted = (1 - moves) * start + moves * batch if moves else start
        assert relative_difference(found[f"0.{name}"][0], wanted) <= (
            1e-15 if moves else 0)


def test_a_forward_pass_without_recording_moves_nothing(engine, devices):
    for policy in ("per_device", "average", "sync"):
        replicas = initialize(batch_norm(engine), devices, policy)
        for training in (False, True):
            with engine.scope(recording=False, training=training):
                replicas(mgpu.split_and_load(images(4), devices,
                                             even_split=False))
        for name, values in statistics(replicas).items():
            for value in values:
                assert_bit_equal(value, np.full(2, float("var" in name)))


@pytest.mark.parametrize("mode", ["per_device", "sync"])
def test_statistics_without_examples_on_the_first_device(engine, mode):
    """The network has those of the device with examples."""
    found = []
    for shards in ((images(4), None), (None, images(4))):
        replicas = initialize(batch_norm(engine), on(2), mode)
        start = replicas.export_numpy()
        with mgpu.record():
            losses = [x.sum() for x in replicas([
                None if x is None else mgpu.put(x, device)
                for x, device in zip(shards, replicas.devices)])
                if x is not None]
        mgpu.backward(losses)
        found.append([replicas.export_numpy()[f"0.running_{name}"]
                      for name in ("mean", "var")])
    for first, second, before in zip(*found, [
            start[f"0.running_{name}"] for name in ("mean", "var")]):
        assert_bit_equal(first, second)
        assert (first != before).all()


def test_frozen_gamma_and_beta(engine, devices):
    """``scale=False, center=False``, and ``affine=False``."""
    options = {"scale": False, "center": False} if engine.name == "mxnet" \
        else {"affine": False}
    X = images(8)
    replicas = initialize(batch_norm(engine, **options), devices, "sync")
    shards = mgpu.split_and_load(X, devices, even_split=False)
    with mgpu.record():
        outputs = np.concatenate(list(map(mgpu.to_numpy, replicas(shards))))
    assert relative_difference(outputs, normalized(X)) < 1e-12


@pytest.mark.parametrize("policy", ["per_device", "average", "sync"])
def test_a_single_value_is_normalized_to_beta(engine, devices, policy):
    """Exactly, whatever the value: rounding errors of any sign in the place
    of 0 would pass a ReLU at random."""
    replicas = initialize(batch_norm(engine), devices, policy)
    rows = 1 if policy == "sync" else len(devices)
    beta, = (p for p in replicas.params() if p.kind == "beta")
    for value in (0.0, -0.1):
        beta.set_data(np.full(2, value))
        for seed in range(3):
            for output in pass_through(replicas, images(
                    rows, seed=seed)[:, :, :1, :1]):
                assert output is None or (output == value).all()


# -- sync ---------------------------------------------------------------------

@ALL
@pytest.mark.parametrize("rows", [7, 1])
def test_sync_equals_one_device_on_the_whole_batch(engine, devices, rows):
    """Outputs, gradients, updated weights and running statistics over three
    steps, also where devices have no rows."""
    one = initialize(convnet(engine), on(1), "per_device")
    many = initialize(convnet(engine), devices, "sync")
    trainers = [mgpu.Trainer(r, "sgd", {"learning_rate": 0.125,
                                        "momentum": 0.5})
                for r in (one, many)]
    start = one.export_numpy()
    for step in range(3):
        X, y = images(rows, seed=step), labels(rows)
        wanted, wanted_gradients = run(one, trainers[0], X, y)
        found, gradients = run(many, trainers[1], X, y)
        assert relative_difference(found, wanted) < 1e-12
        for i in range(len(devices)):
            gap = worst({n: g[i] for n, g in gradients.items()},
                        {n: g[0] for n, g in wanted_gradients.items()})
            assert gap[0] < 1e-12, (step, i, gap)
            gap = worst(values_on(many, i), values_on(one, 0))
            assert gap[0] < 1e-12, (step, i, gap)
        for values in statistics(many).values():
            for value in values:
                assert_bit_equal(value, values[0])
    end = many.export_numpy()       # and something happened
    for name in ("0.weight", "1.running_mean", "5.running_var", "9.bias"):
        assert (end[name] != start[name]).any()


@pytest.mark.parametrize("way", ["inside", "between", "two", "no step"])
def test_sync_reaches_devices_without_rows(engine, devices, way):
    """A prediction between a pass of one row and its backward pass, inside
    of `record` or not; a second pass before it; no step after it. Later
    predictions, by each replica too, are those of one device."""
    def train(k):
        replicas = initialize(convnet(engine), on(k), "sync")
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})

        def shards(n, seed=0):
            return mgpu.split_and_load(images(n, seed), replicas.devices,
                                       even_split=False)

        def predict():
            return np.concatenate([mgpu.to_numpy(x) for x
                                   in replicas(shards(6)) if x is not None])
        found = []
        for rows in (1, 6):
            with mgpu.record():
                outputs = replicas(shards(rows, 1))
                if way == "two":
                    outputs += replicas(shards(6, 2))
                if way == "inside":
                    with mgpu.no_grad():
                        found.append(predict())
            if way == "between":
                found.append(predict())
            mgpu.backward(outputs)
            if way != "no step":
                trainer.step(rows)
            found.append(mgpu.to_numpy(replicas[k - 1](
                mgpu.put(images(6), replicas.devices[-1]))))
            found += [replicas.export_numpy()[p.name]
                      for p in replicas.statistics()]
            found.append(predict())
        return found
    for x, y in zip(train(len(devices)), train(1), strict=True):
        assert relative_difference(x, y) < 1e-12


def test_the_work_of_sync_grows_with_the_devices(engine, monkeypatch):
    """Not with their square: each gives its sums once and gets the total."""
    def copies(k):
        replicas = initialize(batch_norm(engine), on(k), "sync")
        shards = mgpu.split_and_load(images(k), replicas.devices)
        put, made = engine.put, []
        with monkeypatch.context() as patch, mgpu.record():
            patch.setattr(engine, "put", lambda *a, **options: (
                made.append(a), put(*a, **options))[1])
            replicas(shards)
        return len(made)
    assert 0 < copies(12) < 4 * copies(4)


def test_inputs_of_another_dtype_are_refused(engine, devices):
    """256 values, the number that uint8 has as 0: MXNet would divide by it,
    which ends the process."""
    replicas = mgpu.initialize(batch_norm(engine), devices, batch_norm="sync")
    shards = mgpu.split_and_load(np.ones((4, 2, 8, 8), "uint8"), devices,
                                 even_split=False)
    text = "a layer takes inputs of its own dtype, float32; received uint8"
    with mgpu.record(), pytest.raises(TypeError, match=text):
        replicas(shards)


def test_sync_of_tables_and_of_the_last_axis(engine):
    """Rows of numbers, and channels that come last (Gluon's `axis`)."""
    rng = np.random.default_rng(0)
    tables = [(rng.normal(size=(7, 3)), {})]
    if engine.name == "mxnet":
        from mxnet.gluon.nn import BatchNorm as kind
        tables.append((rng.normal(size=(7, 2, 3)), {"axis": -1}))
        sizes = {"in_channels": 3}
    else:
        from torch.nn import BatchNorm1d as kind
        sizes = {"num_features": 3}
    for X, options in tables:
        axes = tuple(i for i in range(X.ndim)
                     if i != options.get("axis", 1) % X.ndim)
        replicas = initialize(kind(**sizes, **options), on(3), "sync")
        found = np.concatenate(pass_through(replicas, X))
        assert relative_difference(found, normalized(X, axes)) < 1e-12
        for value in statistics(replicas)["running_var"]:
            assert relative_difference(
                value, KEEP + (1 - KEEP) * X.var(axes)) < 1e-12


def test_one_replica_alone_cannot_train_in_sync(engine):
    replicas = initialize(convnet(engine), on(2), "sync")
    x = mgpu.put(images(2), mgpu.cpu(1))
    with mgpu.record(), pytest.raises(RuntimeError, match=(
            "all replicas must run together; received inputs for replica 1")):
        replicas[1](x)
    replicas[1](x)                          # one replica may predict


@pytest.mark.parametrize("name", MXNET)
def test_a_hybridized_network_cannot_train_in_sync(name):
    with using_engine(name) as engine:
        net = convnet(engine)
        net.hybridize()
        replicas = initialize(net, on(2), "sync")
        shards = mgpu.split_and_load(images(4), on(2))
        replicas(shards)                    # it may predict
        with mgpu.record(), pytest.raises(
                ValueError, match="does not support hybridized networks"):
            replicas(shards)
        net.hybridize(False)
        with mgpu.record():
            replicas(shards)


def branching(engine, forward):
    """A network with the layers bn1, bn2, bn3; ``forward(net, x, largest)``
    knows the largest value of its input, and thereby whose shard it is."""
    base, _ = bricks(engine)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.bn1, self.bn2, self.bn3 = (
                batch_norm(engine)[0] for _ in range(3))

        def forward(self, x):
            return forward(self, x, mgpu.to_numpy(x).max())
    return Net()


def marked(k, last):
    """A shard per device whose largest values are 1, 2, ...; `last` for the
    last device."""
    shards = []
    for i in range(k):
        x = images(2, seed=i).clip(-1, 0)
        x[0, 0, 0, 0] = last if i == k - 1 else i + 1
        shards.append(mgpu.put(x, mgpu.cpu(i)))
    return shards


class Trouble(Exception):
    """An error in the user's network."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy, middle", [
    ("average", False), ("sync", False), ("sync", True)])
def test_an_error_in_one_replica_is_raised_and_nothing_hangs(
        engine, devices, policy, middle):
    """The others wait for it at the second layer, or before any layer.
    Afterwards all devices have equal buffers, torch's counters too, which
    other devices had increased."""
    def forward(net, x, largest):
        x = net.bn1(x) if middle else x
        if largest == 99:
            raise Trouble("of one")
        return net.bn2(x if middle else net.bn1(x))
    replicas = initialize(branching(engine, forward), devices, policy)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    for alone in (False, policy == "average"):
        shards = marked(3, last=99)
        with mgpu.record(), pytest.raises(Trouble, match="of one"):
            if alone:
                replicas[0](shards[0])
                replicas[2](shards[-1])
            replicas(shards)
        for output in pass_through(replicas, marked(3, last=3)):
            assert np.isfinite(output).all()
        trainer.step(6, ignore_stale_grad=True)
        for p in replicas.buffers():
            for x in p.list_data()[1:]:
                assert_bit_equal(mgpu.to_numpy(x), mgpu.to_numpy(p.data()))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("forward, received", [
    (lambda net, x, largest: (net.bn2 if largest == 99 else net.bn1)(x),
     "{0: 'bn1', "),
    (lambda net, x, largest: net.bn1(x) if largest == 99
     else net.bn2(net.bn1(x)), "2: 'the end'}"),
], ids=["other", "fewer"])
def test_replicas_that_run_different_layers(engine, devices, forward,
                                            received):
    """An error, and no replica that waits for ever."""
    replicas = initialize(branching(engine, forward), devices, "sync")
    for _ in range(2):
        with mgpu.record(), pytest.raises(RuntimeError, match=(
                "the same layers in the same order on every device; "
                f"received .*{received}")):
            replicas(marked(3, last=99))


def blocked(engine, x):
    if engine.name == "torch":
        return x.detach()
    import mxnet as mx
    y = mx.nd.BlockGrad(x.as_nd_ndarray())
    return y.as_np_ndarray() if isinstance(x, mx.np.ndarray) else y


def features(engine, forward):
    """A network with the layers a, norm, b; ``forward(net, x)``."""
    base, dense = bricks(engine)
    if engine.name == "mxnet":
        from mxnet.gluon import nn
        norm = nn.BatchNorm(in_channels=4, momentum=0.5)
    else:
        from torch import nn
        norm = nn.BatchNorm1d(4, momentum=0.5)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = dense(4, 4), norm, dense(4, 3)

        def forward(self, x):
            return forward(self, x)
    return Net()


FORWARDS = {
    "frozen": lambda engine, net, x: net.b(net.norm(net.a(x))),
    "first": lambda engine, net, x: net.b(net.a(net.norm(x))),
    "blocked": lambda engine, net, x: net.b(
        blocked(engine, net.norm(net.a(x))) + net.a(x)),
    "twice in a row": lambda engine, net, x: net.b(
        net.norm(net.norm(net.a(x)) * 2 + 1)),
}


def test_what_a_pass_keeps_in_an_attribute_is_its_devices(engine, devices):
    """In the attribute itself, and in a user's list."""
    def kept(net, x):
        net.kept = net.a(x)
        net.several.append(net.norm(x))
        return net.b(net.several.pop() + net.kept)

    def plain(net, x):
        return net.b(net.norm(x) + net.a(x))
    found = []
    for count, forward in ((devices[:1], plain), (devices, kept)):
        net = features(engine, forward)
        net.several = own = []
        replicas = initialize(net, count, "sync")
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        for step in range(2):
            run(replicas, trainer, images(8, seed=step)[:, :, 0, 0].repeat(
                2, axis=1), labels(8))
        found.append(replicas.export_numpy())
        assert net.several is own and net.several == []
    assert worst(*found)[0] < 1e-12


@pytest.mark.parametrize("how", FORWARDS)
def test_sync_moves_statistics_when_one_device_does(engine, devices, how):
    """In Gluon a backward pass moves them, if one goes through the layer; in
    torch the forward pass."""
    frozen = {"frozen": ("a", "norm"), "first": ("norm",)}.get(how, ())
    found = []
    for k, policy in ((1, "per_device"), (len(devices), "sync")):
        replicas = initialize(
            features(engine, lambda net, x: FORWARDS[how](engine, net, x)),
            on(k), policy)
        for p in replicas.params():
            if p.name.startswith(frozen):
                p.grad_req = "null"
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        for step in range(2):
            X = np.random.default_rng(step).normal(1, 2, (7, 4))
            mgpu.train_batch(X, labels(7), replicas,
                             mgpu.losses.SoftmaxCrossEntropyLoss(), trainer,
                             ignore_stale_grad=how == "blocked")
        found.append([values_on(replicas, i) for i in range(k)])
    for one in found[1]:
        gap = worst(one, found[0][0])
        assert gap[0] < 1e-12, gap
    stay = engine.name == "mxnet" and frozen != ()
    assert found[0][0]["norm.running_mean"].any() == (not stay)


@pytest.mark.parametrize("name", MXNET)
def test_global_statistics_are_never_those_of_a_batch(name):
    """A Gluon layer with ``use_global_stats`` predicts in training too."""
    with using_engine(name) as engine:
        replicas = initialize(
            batch_norm(engine, use_global_stats=True), on(2), "sync")
        assert_predicts(replicas, images(4))


def predicted(engine, norm, x):
    """A batch norm that the network's own code calls in prediction mode."""
    if engine.name == "torch":
        return norm.eval()(x)
    from mxnet import autograd
    with autograd.predict_mode():
        return norm(x)


@pytest.mark.parametrize("policy", ["per_device", "average", "sync"])
def test_the_network_may_end_the_training_mode_of_a_layer(
        engine, devices, policy):
    def forward(net, x, largest):
        return predicted(engine, net.bn1, x)
    assert_predicts(initialize(branching(engine, forward), devices, policy),
                    images(4))


@pytest.mark.parametrize("name", MXNET)
def test_sync_refuses_a_layer_that_trains_in_a_prediction(name, devices):
    """It would be normalized by the examples of each device."""
    with using_engine(name) as engine:
        from mxnet import autograd

        def forward(net, x, largest):
            with autograd.train_mode():
                return net.bn1(x)
        replicas = initialize(branching(engine, forward), devices, "sync")
        shards, _ = mgpu.split_batch(images(6), labels(6), devices)
        with pytest.raises(ValueError, match="supports training passes; "
                           "received 'batchnorm.*Run the pass inside mgpu"
                           r".record\(\)"):
            replicas(shards)
        with mgpu.record():
            replicas(shards)


@pytest.mark.parametrize("how, policy", [
    ("plain", "per_device"), ("compiled", "sync"), ("one layer", "sync")])
def test_gradients_of_a_pass_that_predicts(engine, devices, policy, how):
    """``record(train_mode=False)``, or the network's own code for a layer:
    running statistics are constants, so the gradients are those of fixed
    scales and shifts, and sums over rows."""
    X = images(7)
    if how == "one layer":
        net = features(engine, lambda net, x: net.b(
            predicted(engine, net.norm, net.a(x))))
        X = X[:, :, 0, 0].repeat(2, axis=1)
    else:
        net = convnet(engine)
    if how == "compiled" and engine.name == "mxnet":
        net.hybridize()
    replicas = initialize(net, devices, policy)
    shards = mgpu.split_and_load(X, devices, even_split=False)
    start = replicas.export_numpy()
    for p in replicas.statistics():
        start[p.name] = start[p.name] + 0.5
    rng = np.random.default_rng(1)
    direction = {p.name: rng.normal(size=p.shape) for p in replicas.params()}

    def loss(step):
        replicas.import_numpy({name: value + step * direction.get(name, 0)
                               for name, value in start.items()})
        return sum((mgpu.to_numpy(out) ** 2).sum()
                   for out in replicas(shards) if out is not None)
    slope = (loss(2.0 ** -20) - loss(-2.0 ** -20)) * 2.0 ** 19
    loss(0)
    with mgpu.record(train_mode=how == "one layer"):
        losses = [None if out is None else out * out
                  for out in replicas(shards)]
    mgpu.backward(losses)
    mgpu.Trainer(replicas, "sgd").allreduce_grads()
    found = sum((mgpu.to_numpy(p.grad()) * direction[p.name]).sum()
                for p in replicas.params())
    assert relative_difference(found, slope) < 1e-6
    if how == "plain":
        pass_through(replicas, X)       # this one trains again
        for name, arrays in statistics(replicas).items():
            assert (arrays[0] != start[name]).any()


@pytest.mark.parametrize("name", MXNET)
def test_batch_norms_that_are_no_layers(name, devices):
    """A block that calls F.BatchNorm itself, as a SymbolBlock does: an error
    where mgpu would have to compute it."""
    with using_engine(name) as engine:
        from mxnet.gluon import HybridBlock

        class Net(HybridBlock):
            def __init__(self):
                super().__init__()
                for kind in ("gamma", "beta", "running_mean", "running_var"):
                    setattr(self, kind, self.params.get(
                        kind, shape=(2,),
                        differentiable=not kind.startswith("running")))

            def hybrid_forward(self, F, x, **arrays):
                norm = F.npx.batch_norm if name == "mxnet-np" else F.BatchNorm
                return norm(x, *(arrays[kind] for kind in (
                    "gamma", "beta", "running_mean", "running_var")))
        loose = r"\['running_mean', 'running_var'\]"
        replicas = mgpu.initialize(Net(), devices, dtype="float64",
                                   batch_norm="sync")
        with pytest.raises(ValueError, match="-defined forward in " + loose):
            pass_through(replicas, images(4))
        shards = mgpu.split_and_load(images(4), devices,
                                     even_split=False)
        with mgpu.record(train_mode=False), pytest.raises(
                ValueError, match="running statistics of others: " + loose):
            replicas(shards)
        with engine.scope(recording=False):
            replicas(shards)


def doubling(engine):
    """A layer with a user-defined forward pass."""
    net = batch_norm(engine)
    kind = type(net[0])
    name = "hybrid_forward" if engine.name == "mxnet" else "forward"
    net[0].__class__ = type("Doubling", (kind,), {
        name: lambda self, *args, **given: 2 * getattr(kind, name)(
            self, *args, **given)})
    return net


def test_a_layer_with_a_forward_pass_of_its_own(engine, devices):
    """Is not joined."""
    replicas = initialize(doubling(engine), devices, "per_device")
    X = images(4)
    for shard, output in zip(shards_of(X, len(devices)),
                             pass_through(replicas, X)):
        assert relative_difference(output, 2 * normalized(shard)) < 1e-12
    replicas = initialize(doubling(engine), devices, "sync")
    with pytest.raises(ValueError, match=r"-defined forward in \['0'\]"):
        pass_through(replicas, X)


@pytest.mark.parametrize("kind", ["instance norm", "function"])
def test_sync_refuses_what_it_cannot_join(kind):
    with mgpu.using_backend("torch"):
        from torch import nn
        layer, words = (functional_norm(4), "F.batch_norm") \
            if kind == "function" else (
                nn.InstanceNorm2d(4, track_running_stats=True), "1")
        net = nn.Sequential(nn.Conv2d(2, 4, 3), layer)
        replicas = mgpu.initialize(net, on(2), batch_norm="sync")
        before = replicas.export_numpy()
        x = mgpu.split_and_load(np.ones((4, 2, 5, 5), "float32"),
                                replicas.devices)
        with mgpu.record(), pytest.raises(
                ValueError, match=rf"running statistics: \['{words}'\]"):
            replicas(x)
        for name, value in replicas.export_numpy().items():
            np.testing.assert_array_equal(value, before[name])
        replicas(x)     # a prediction has nothing to join


@pytest.mark.parametrize("name", TORCH)
def test_layers_without_running_statistics_are_synchronized_too(name):
    with using_engine(name) as engine:
        X = images(7)
        found = []
        for k in (1, 3):
            replicas = initialize(
                batch_norm(engine, track_running_stats=False), on(k), "sync")
            found.append(np.concatenate(pass_through(replicas, X)))
        assert relative_difference(found[1], found[0]) < 1e-12
        net = batch_norm(engine)
        net[0].running_mean = net[0].running_var = None
        pass_through(initialize(net, on(3), "sync"), X)
        assert int(net[0].num_batches_tracked) == 1


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("policy, k", [
    ("per_device", 1), ("average", 1), ("sync", 2)])
def test_torchs_flag_of_tracking_decides_in_each_pass(name, policy, k):
    """Set after the layer was made: training leaves its statistics."""
    def kept(replicas):
        return np.array(list(statistics(replicas).values()))
    with using_engine(name) as engine:
        X, net = images(6), batch_norm(engine)
        replicas = initialize(net, on(k), policy)
        pass_through(replicas, X)
        before, (scale, shift) = kept(replicas), [
            mgpu.to_numpy(p.data())[:, None, None] for p in replicas.params()]
        net[0].track_running_stats = False
        found = np.concatenate(pass_through(replicas, X))
        np.testing.assert_array_equal(kept(replicas), before)
        assert relative_difference(
            found, normalized(X) * scale + shift) < 1e-6
        net[0].track_running_stats = True
        pass_through(replicas, X)
        assert (kept(replicas) != before).all()


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("policy", ["per_device", "sync"])
def test_torchs_cumulative_average(name, policy):
    """``momentum=None``: the plain mean over all batches so far; after
    `force_reinit` it starts again."""
    with using_engine(name) as engine:
        net = batch_norm(engine, momentum=None)
        for again in (False, True):
            replicas = initialize(net, on(2), policy, force_reinit=again)
            batches = [images(4, seed) for seed in range(3)]
            for X in batches:
                pass_through(replicas, X)
            half = slice(0, 2) if policy == "per_device" else slice(0, 4)
            wanted = np.mean([X[half].mean((0, 2, 3)) for X in batches], 0)
            # The momentum passes through float32, Gluon's own precision.
            assert relative_difference(
                statistics(replicas)["0.running_mean"][0], wanted) < 1e-6
