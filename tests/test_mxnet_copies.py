"""The MXNet network of the backend on several contexts: what plain Gluon
computes on one, with the gradients in the network's own parameters."""
import copy
import pickle

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from mgpu.backends.containers import Batch

if "mxnet" in BACKENDS:
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
    from mxnet import autograd, gluon
    from mxnet.gluon import nn

pytestmark = [pytest.mark.skipif("mxnet" not in BACKENDS, reason="no MXNet"),
              pytest.mark.parametrize("backend", ["mxnet"], indirect=True)]
COUNTS = pytest.mark.device_counts(1, 3)
#: examples of each device, of three; the second device's come last
SIZES = [(3, 2, 3), (1, 4, 2), (2, 2, 0), (3, 2, 3), (0, 3, 2), (0, 0, 4)]


def made(*layers, dtype="float64", init=None):
    mx.random.seed(0)
    np.random.seed(0)
    net = nn.HybridSequential(prefix="n_")
    net.add(*layers)
    net.initialize(init or mx.init.Xavier(), ctx=mx.cpu(0))
    net.cast(dtype)
    return net


def mixed():
    return made(nn.Conv2D(4, 2, activation="tanh"), nn.Flatten(),
                nn.Dense(5, activation="tanh"), nn.Dense(3))


def no_join(values, name, place):
    raise ValueError


class Run:
    """A network of the backend on devices."""

    def __init__(self, backend, net, devices, x=None, options=None):
        self.backend, self.net, self.devices = backend, net, devices
        self.network = backend.network(net)
        if options is not None:
            self.network.prepare(options, devices)
        if x is not None:
            self.network.infer_shapes((backend.put(x[:1], devices[0]),),
                                      devices[0])
        self.network.place(devices)

    def __call__(self, shards, join=no_join, split_like=None):
        """Outputs by device; `shards`: NumPy arrays."""
        calls = {i: ((self.backend.put(x, self.devices[i]),), {})
                 for i, x in enumerate(shards) if len(x)}
        ends = np.cumsum([0] + [len(shards[i]) for i in calls]).tolist()
        return self.network.run(calls, Batch(
            list(zip(ends, ends[1:])), join, split_like))

    def number(self, suffix):
        return next(i for i, spec in enumerate(self.network.specs())
                    if spec.name.endswith(suffix))


def batches(count, sizes=SIZES, shape=(1, 4, 3), seed=0):
    """Each batch as one shard for each of `count` devices."""
    rng = np.random.default_rng(seed)
    found = []
    for size in sizes:
        size = (*size[:count - 1], sum(size[count - 1:]))
        if count == 1 or any(size):
            x = rng.normal(size=(sum(size), *shape))
            found.append(np.split(x, np.cumsum(size)[:-1]))
    return found


def loss_of(z):
    return (z * z * z + z).sum()


def values(net):
    return [p.data().asnumpy().copy() for p in net.collect_params().values()]


def plain_training(net, count=3, between=lambda net, n: None, **options):
    trainer = gluon.Trainer(net.collect_params(), "sgd",
                            {"learning_rate": 0.01, "momentum": 0.5})
    for n, shards in enumerate(batches(count, **options)):
        between(net, n)
        with autograd.record():
            loss = loss_of(net(mx.nd.array(np.concatenate(shards),
                                           dtype="float64")))
        loss.backward()
        trainer.step(10)
    return values(net)


def training(backend, net, devices, between=lambda net, n: None, **options):
    """The same on devices, with Gluon's own Trainer on the network."""
    trainer = gluon.Trainer(net.collect_params(), "sgd",
                            {"learning_rate": 0.01, "momentum": 0.5})
    run = None
    for n, shards in enumerate(batches(len(devices), **options)):
        run = run or Run(backend, net, devices, np.concatenate(shards))
        between(net, n)
        with backend.scope(recording=True, training=True):
            losses = [loss_of(z) for z in run(shards).values()]
        backend.backward(losses)
        trainer.step(10)
    return values(net)


def close(found, expected, tolerance=1e-12):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


def hybridized(**flags):
    net = mixed()
    net.hybridize(**flags)
    return net


@COUNTS
@pytest.mark.parametrize("flags", [None, {}, {"static_alloc": True}])
def test_training(backend, devices, flags):
    """Uneven numbers of examples, none on some devices, shapes that the first
    batch gives."""
    make = mixed if flags is None else lambda: hybridized(**flags)
    close(training(backend, make(), devices),
          plain_training(make(), len(devices)))


@COUNTS
def test_edits_between_the_steps(backend, devices):
    """Written values, freezing, and gradients that add up."""
    def edit(net, n):
        first, second, *_ = net.collect_params().values()
        if n == 1:
            first.grad_req = "null"
            second.set_data(second.data() * 2)
        if n == 2:
            first.grad_req = "write"
            first.data()[:] = 0.1
        for p in net.collect_params().values():
            if n == 3:
                p.grad_req = "add"
            if n == 4:
                p.zero_grad()
    close(training(backend, mixed(), devices, edit),
          plain_training(mixed(), len(devices), edit))


@COUNTS
def test_a_frozen_weight_with_a_trained_bias(backend, devices):
    """MXNet's float32 kernel would leave the bias where it is."""
    net = made(nn.Dense(3, in_units=6), dtype="float32")
    net[0].weight.grad_req = "null"
    run = Run(backend, net, devices)
    shards = batches(len(devices), [(2, 2, 2)], (6,))[0]
    with backend.scope(recording=True, training=True):
        losses = [z.sum() for z in run(
            [x.astype("float32") for x in shards]).values()]
    backend.backward(losses)
    assert (net[0].bias.grad().asnumpy() == 6).all()


def test_losses_one_by_one_raise(backend, devices):
    """Each would overwrite the gradient of the one before."""
    for net in (mixed(), hybridized()):
        shards = batches(len(devices))[0]
        run = Run(backend, net, devices, shards[0])
        with autograd.record():
            first, second, *_ = map(loss_of, run(shards).values())
        first.backward()
        before = net[0].weight.grad().asnumpy()
        with pytest.raises(mx.MXNetError, match="no inputs in computation"):
            second.backward()
        with pytest.raises(RuntimeError, match="once with the losses of all"):
            backend.backward([second])
        assert (net[0].weight.grad().asnumpy() == before).all()


def test_second_derivatives(backend, devices):
    """A penalty on the gradients of the inputs."""
    net = made(nn.Dense(3, in_units=6, use_bias=False))
    run, shards = Run(backend, net, devices), batches(3, [(2, 1, 2)], (6,))[0]

    def script(outputs, xs):
        zs = [mx.nd.square(z) for z in outputs]
        gs = autograd.grad(zs, xs, head_grads=list(map(mx.nd.ones_like, zs)),
                           create_graph=True, retain_graph=True)
        return [g * g for g in gs]

    def leaf(x, i):
        x = mx.nd.array(x, dtype="float64", ctx=mx.cpu(i))
        x.attach_grad()
        return x
    whole, xs = leaf(np.concatenate(shards), 0), list(map(
        leaf, shards, range(3)))
    with autograd.record():
        total, = script([net(whole)], [whole])
    total.backward()
    expected = net[0].weight.grad().asnumpy()
    with autograd.record():
        outputs = run.network.run({i: ((x,), {}) for i, x in enumerate(xs)},
                                  Batch([(0, 2), (2, 3), (3, 5)], no_join,
                                        None))
        totals = script(list(outputs.values()), xs)
    backend.backward(totals)
    close([net[0].weight.grad().asnumpy()], [expected])
    assert np.abs(expected).max() > 1


# -- running statistics -------------------------------------------------------

def normed():
    return made(nn.BatchNorm(in_channels=2), nn.Dense(3, in_units=2))


def plain_statistics(shards, start):
    """(mean, variance) after passes of plain Gluon over `shards`."""
    net = normed()
    for p, x in zip((net[0].running_mean, net[0].running_var), start):
        p.set_data(mx.nd.array(x, dtype="float64"))
    for x in shards:
        with autograd.record():
            loss = net(mx.nd.array(x, dtype="float64")).sum()
        loss.backward()
    return [p.data().asnumpy() for p in (net[0].running_mean,
                                         net[0].running_var)]


@pytest.mark.parametrize("hybridize", [False, True])
def test_each_device_has_its_own_statistics(backend, devices, hybridize):
    """In passes that train; a device without examples, and all in
    predictions, follow the network. What somebody writes goes to all."""
    net = normed()
    if hybridize:
        net.hybridize(static_alloc=True)
    run = Run(backend, net, devices)
    numbers = [run.number(f"running_{name}") for name in ("mean", "var")]

    def train(*sizes):
        shards = batches(3, [sizes], (2,), sum(sizes))[0]
        with backend.scope(recording=True, training=True):
            losses = [z.sum() for z in run(shards).values()]
        backend.backward(losses)
        return shards

    def own(i):
        return [run.network.arrays(n)[i].asnumpy() for n in numbers]
    start = own(0)
    first, second = train(3, 4, 5), train(2, 3, 4)
    for i in range(3):
        close(own(i), plain_statistics([first[i], second[i]], start))
    close(own(0), [net[0].running_mean.data().asnumpy(),
                   net[0].running_var.data().asnumpy()], 0)
    # predictions: the network's; the devices' own stay
    before = [own(i) for i in range(3)]
    x = batches(3, [(2, 2, 2)], (2,))[0]
    with backend.scope(recording=False, training=False):
        found = run([x[0], x[0], x[0]])
    assert len({z.asnumpy().tobytes() for z in found.values()}) == 1
    close(sum((own(i) for i in range(3)), []), sum(before, []), 0)
    # device 2 has no examples, and follows
    third = train(3, 4, 0)
    close(own(1), plain_statistics([third[1]], before[1]))
    close(own(2), own(0), 0)
    # device 0 has none: the network takes the second device's
    before = own(1)
    fourth = train(0, 3, 4)
    close(own(1), plain_statistics([fourth[1]], before))
    close([p.data().asnumpy() for p in (net[0].running_mean,
                                        net[0].running_var)], own(1), 0)
    # what somebody writes
    net[0].running_mean.set_data(mx.nd.zeros(2))
    assert not any(own(i)[0].any() for i in range(3))
    run.network.array(numbers[1])[:] = 2
    run.network.written(numbers[1])
    assert all((own(i)[1] == 2).all() for i in range(3))
    run.network.write_statistics(numbers[0], [
        mx.nd.ones(2, dtype="float64", ctx=mx.cpu(i)) * i for i in range(3)])
    assert [own(i)[0][0] for i in range(3)] == [0, 1, 2]
    before = [own(i) for i in range(3)]
    fifth = train(3, 4, 5)
    for i in range(3):
        close(own(i), plain_statistics([fifth[i]], before[i]))


# -- attributes ---------------------------------------------------------------

if "mxnet" in BACKENDS:
    class Carrying(nn.HybridBlock):
        """Has a state of its rows, and a number of calls."""

        def __init__(self):
            super().__init__()
            self.dense, self.state = nn.Dense(3, in_units=3), None
            self.count, self.counts, self.keeps = 0, np.zeros(2), True

        def forward(self, x):
            self.count += 1
            self.counts += 1
            z = self.dense(x)
            if self.state is not None:
                z = z + self.state
            if self.keeps:
                self.state = mx.nd.tanh(z).detach()
            return z / (self.count + self.counts[0])


def carried(backend, devices, shards):
    """(outputs, the state that the network shows) after some passes."""
    def join(values, name, place):
        return mx.nd.concat(*(v.as_in_context(mx.cpu(0)) for v in values),
                            dim=0)

    def split_like(x, part, start, stop, context):
        return x[start:stop].as_in_context(context)
    net = made(Carrying())
    run = Run(backend, net, devices)
    for n in range(3):
        with backend.scope(recording=True, training=True):
            z = run(shards, join, split_like).values()
        if n == 1:
            net[0].state = net[0].state * 2
            net[0].keeps = False    # only read from now on
    assert net[0].count == net[0].counts[0] == 3
    return [np.concatenate([x.asnumpy() for x in z]), net[0].state.asnumpy()]


def test_what_forward_carries_between_passes(backend, devices):
    """Each device goes on with its part; so do devices without the first."""
    expected = carried(backend, devices[:1], [
        np.concatenate(batches(3, [(2, 1, 3)], (3,))[0])])
    for shards in batches(3, [(2, 1, 3)], (3,)), batches(
            3, [(0, 2, 4)], (3,)):
        close(carried(backend, devices, shards[0]), expected)


def test_writes_to_parameters_raise(backend, devices):
    class Writes(nn.Dense):
        def forward(self, x):
            with autograd.pause():
                self.weight.set_data(self.weight.data() * 2)
            return super().forward(x)
    run = Run(backend, made(Writes(3, in_units=6)), devices)
    with autograd.record(), pytest.raises(RuntimeError, match="forward "
                                          "writes to the parameter writes"):
        run(batches(3, [(2, 1, 2)], (6,))[0])


# -- parity's view ------------------------------------------------------------

def test_masks_and_layers_know_their_device(backend, devices):
    net = made(nn.Dense(4, in_units=6, activation="relu"), nn.Dropout(0.5),
               nn.Dense(3, in_units=4))
    net.hybridize()
    run = Run(backend, net, devices)
    shards, seen, drawn = batches(len(devices), [(2, 1, 2)], (6,))[0], [], []

    def draw(x, rate, axes, index):
        drawn.append(index)
        return mx.nd.ones_like(x) * index
    with run.network.watch_layers(lambda path, x, y, i: seen.append(
            (path, i, x[0].ctx))), run.network.use_masks(draw), \
            backend.scope(recording=True, training=True):
        outputs = run(shards)
    count = len(devices)
    assert drawn == list(range(count))
    assert [(path, i) for path, i, _ in seen] == [
        (path, i) for i in range(count) for path in ("0", "1", "2")]
    assert all(ctx == mx.cpu(i) for _, i, ctx in seen)
    x, bias = mx.nd.array(shards[0], dtype="float64"), net[2].bias.data()
    close([outputs[0].asnumpy()], [(x[:, :3] * 0 + bias).asnumpy()])
    assert net._active and "forward" not in vars(net[1])


# -- the network stays Gluon's own --------------------------------------------

def test_a_network_is_copied_and_saved_as_a_plain_one(backend, devices,
                                                      tmp_path):
    net = mixed()
    training(backend, net, devices)
    net.save_parameters(str(tmp_path / "saved"))
    loaded = mixed()
    loaded.load_parameters(str(tmp_path / "saved"))
    loaded(mx.nd.zeros((1, 1, 4, 3), dtype="float64"))
    for other in (copy.deepcopy(net), loaded):
        close(values(other), values(net), 0)
    p = pickle.loads(pickle.dumps(net[0].weight))
    assert (p.data().asnumpy() == net[0].weight.data().asnumpy()).all()
    assert "set_data" not in vars(net[0].weight)
    assert net[0].weight.list_ctx() == [mx.cpu(0)]


def test_the_first_contexts_values_count(backend, devices):
    net = made(nn.Dense(3, in_units=6))
    net.collect_params().reset_ctx([mx.cpu(0), mx.cpu(1)])
    net[0].weight.list_data()[1][:] = 7
    expected = net[0].weight.data(mx.cpu(0)).asnumpy()
    Run(backend, net, devices)
    assert net[0].weight.list_ctx() == [mx.cpu(0)]
    assert (net[0].weight.data().asnumpy() == expected).all()
