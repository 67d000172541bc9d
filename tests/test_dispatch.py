"""MXNet queues long passes of several CPU devices from several threads, and
nothing else changes by that: values, random numbers, or what blocks keep."""
import threading

import numpy as np
import pytest

import mgpu
from mgpu import probes
from conftest import BACKENDS, ENGINES
from helpers import using_engine

pytestmark = pytest.mark.crosses_devices(
    "inside strict_devices all passes are queued in turn")

if "mxnet" in BACKENDS:
    with mgpu.using_backend("mxnet"):
        import mgpu.backends._mxnet.backend as package
        from mgpu.backends._mxnet.framework import mx
    from mxnet.gluon import nn

    class Compilable(nn.HybridBlock):
        """A user's layer that can be compiled."""

        def hybrid_forward(self, F, x):
            return x * 2

    class Overrides(nn.HybridBlock):
        """`hybridize` says that it is compiled, and its Python code runs in
        each pass."""

        def forward(self, x):
            self.last = x       # two threads would share it
            for _ in range(100):
                self.last = self.last * 1
            return super().forward(self.last)

        def hybrid_forward(self, F, x):
            return x + 1

    class Two(nn.HybridBlock):
        """A network with two results."""

        def __init__(self, last=None):
            super().__init__()
            self.body, self.head = deep(last), nn.Dense(3, in_units=8)

        def hybrid_forward(self, F, x):
            x = self.body(x)
            return x, [self.head(x)]

    class Skips(nn.Block):
        """State that is gone again when a pass ends."""

        def __init__(self):
            super().__init__()
            self.skips = []

        def forward(self, x):
            self.skips.append(x)
            return self.skips.pop() + x

    class Noise(nn.Block):
        def forward(self, x):
            make = mx.np.random.normal if mx.npx.is_np_array() \
                else mx.nd.random.normal
            # Of one context: the engine's stream is for all of them.
            with x.ctx:
                if mx.npx.is_np_array():
                    return x + make(size=x.shape)
                return x + make(shape=x.shape)

    def dropout():
        return nn.Dropout(0.5)

    def function():
        return nn.HybridLambda(lambda F, x: x * 2)


def deep(middle=None, depth=18):
    net = nn.HybridSequential() if middle is None or isinstance(
        middle, nn.HybridBlock) and not isinstance(middle, Overrides) \
        else nn.Sequential()
    for i in range(depth):
        net.add(nn.Dense(8, in_units=8))
        net.add(nn.LayerNorm(in_channels=8))
        if middle is not None and i == depth // 2:
            net.add(middle)
    return net


@pytest.fixture(params=[e for e in ENGINES if e != "torch"])
def family(request, monkeypatch):
    monkeypatch.setattr(package, "cpu_cores", lambda: 2)
    with using_engine(request.param) as backend:
        yield backend


@pytest.fixture
def threaded(monkeypatch):
    """Names of the threads that thunks ran in."""
    found = []
    run = package.MXNetBackend.in_threads

    def in_threads(self, thunks, *workers):
        def told(thunk):
            def call():
                found.append(threading.current_thread().name)
                return thunk()
            return call
        return run(self, [told(thunk) for thunk in thunks], *workers)
    monkeypatch.setattr(package.MXNetBackend, "in_threads", in_threads)
    return found


def trained(net, k, steps=3, rows=12, **options):
    devices = [mgpu.cpu(i) for i in range(k)]
    rng = np.random.default_rng(0)
    X = rng.random((rows, 8)).astype("float32")
    y = rng.random((rows, 8)).astype("float32")
    mgpu.seed(1)
    replicas = mgpu.initialize(net, devices, "xavier", seed=3, **options)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    losses = [[mgpu.to_numpy(x) for x in mgpu.train_batch(
        X, y, replicas, mgpu.losses.L2Loss(), trainer)] for _ in range(steps)]
    return replicas, losses, [mgpu.to_numpy(p.list_data()[0])
                              for p in replicas.params()]


def same(a, b):
    (_, losses, weights), (_, others, values) = a, b
    for x, y in zip([z for step in losses for z in step] + weights,
                    [z for step in others for z in step] + values):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("hybridize", (False, True))
@pytest.mark.parametrize("k", (2, 3, 4))
def test_numbers_are_those_of_one_thread(family, threaded, monkeypatch, k,
                                         hybridize):
    fast = trained(deep(), k, hybridize=hybridize)
    # The first forward pass is in turn; three steps of k devices.
    assert len(threaded) == 3 * k + 2 * k
    assert len(set(threaded)) == 2 * 2      # forward and backward
    threaded.clear()
    monkeypatch.setattr(package, "cpu_cores", lambda: 1)
    slow = trained(deep(), k, hybridize=hybridize)
    assert not threaded
    same(fast, slow)


def test_prediction_too(family, threaded):
    replicas, _, _ = trained(deep(), 2)
    shards = mgpu.split_and_load(np.ones((4, 8), "float32"), replicas.devices)
    first = [mgpu.to_numpy(x) for x in replicas(shards)]
    threaded.clear()
    again = [mgpu.to_numpy(x) for x in replicas(shards)]
    assert len(threaded) == 2
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("kind, hybridize, forward", (
    *((kind, hybridize, 0) for hybridize in (False, True)
      for kind in ("Skips", "Overrides", "Noise", "dropout")),
    ("Compilable", False, 0), ("Compilable", True, 2 * 2),
    ("function", False, 0), ("function", True, 2 * 2)))
def test_code_that_is_not_known_stays_in_one_thread(
        family, threaded, monkeypatch, kind, hybridize, forward):
    """Threads would share what a block keeps, and draw in another order in
    each run; backward passes are the engine's own."""
    def net():
        made = deep(globals()[kind]())
        if hybridize:
            # In a container that cannot be, each layer is compiled by itself.
            made.hybridize()
        return made
    first = trained(net(), 2)
    assert len(threaded) == 3 * 2 + forward
    monkeypatch.setattr(package, "cpu_cores", lambda: 1)
    same(first, trained(net(), 2))


def test_dropout_stays_in_one_thread_whatever_its_rate(family, threaded):
    """It may be given another one later."""
    trained(deep(nn.Dropout(0)), 2)
    assert len(threaded) == 3 * 2       # backward


@pytest.mark.parametrize("k", (2, 3))
def test_operations_that_the_caller_holds_back(family, threaded, monkeypatch,
                                               k):
    """Those that `mx.engine.bulk` collects come before what the threads
    queue."""
    def run():
        with mx.engine.bulk(16):
            return trained(deep(), k, steps=6)
    fast = run()
    assert threaded
    monkeypatch.setattr(package, "cpu_cores", lambda: 1)
    same(fast, run())


def test_profiles_wait_for_what_threads_queue(family, threaded):
    """A device's time does not end when its work is queued."""
    replicas, _, _ = trained(deep(), 2)
    seen = []
    with mgpu.Profile(plain=False) as profile:
        with probes.step(replicas.devices, []), probes.stage(
                "compute", "forward", replicas.devices, lambda: []):
            family.in_threads(
                [lambda: seen.append(probes.open_stage.get())] * 2)
            assert probes.open_stage.get() is not None
        trainer = mgpu.Trainer(replicas, "sgd")
        mgpu.train_batch(np.ones((4, 8), "float32"), np.ones((4, 8)),
                         replicas, mgpu.losses.L2Loss(), trainer)
    assert seen == [None, None]
    found = {(span.name, str(span.device)) for span in profile.spans}
    assert {(name, f"cpu({i})") for i in (0, 1)
            for name in ("forward", "forward and backward")} <= found


@pytest.mark.parametrize("last, expected", ((None, 2), ("dropout", 0)))
def test_several_results(family, threaded, last, expected):
    net = Two(last and globals()[last]())
    net.hybridize()
    devices = [mgpu.cpu(0), mgpu.cpu(1)]
    replicas = mgpu.initialize(net, devices, "xavier")
    shards = mgpu.split_and_load(np.ones((4, 8), "float32"), devices)
    for _ in range(2):
        with mgpu.record():
            replicas(shards)
    assert len(threaded) == expected


def test_short_passes_stay_in_one_thread(family, threaded):
    trained(deep(depth=2), 2)
    assert not threaded


def test_a_hook_is_the_users_code(family, threaded):
    seen = []
    net = deep()
    replicas, _, _ = trained(net, 2)
    handle = net[3].register_forward_hook(
        lambda *_: seen.append(threading.current_thread()))
    threaded.clear()
    shards = mgpu.split_and_load(np.ones((4, 8), "float32"), replicas.devices)
    for _ in range(3):
        with mgpu.record():
            replicas(shards)
    assert not threaded
    assert set(seen) == {threading.current_thread()} and len(seen) == 6
    handle.detach()
    for _ in range(2):      # judged anew, then in threads
        with mgpu.record():
            replicas(shards)
    assert len(threaded) == 2


def test_hybridize_later_is_compiled_in_one_thread(family, threaded):
    net = deep()
    replicas, _, _ = trained(net, 2)
    net.hybridize()
    threaded.clear()
    shards = mgpu.split_and_load(np.ones((4, 8), "float32"), replicas.devices)
    for expected in (0, 2):
        with mgpu.record():
            replicas(shards)
        assert len(threaded) == expected


def test_losses_that_share_a_leaf_are_summed(family, threaded):
    """A leaf that the losses of both devices reach gets the sum, not what
    the last thread wrote."""
    def total(share):
        x = mgpu.put(np.full((2, 8), 2.0, "float32"), mgpu.cpu(0))
        mgpu.attach_grad(x)
        leaves = [mgpu.put(np.ones((8,), "float32"), mgpu.cpu(i))
                  for i in (0, 1) for _ in range(40)]
        for leaf in leaves:
            mgpu.attach_grad(leaf)
        with mgpu.record():
            losses = []
            for i in (0, 1):
                y = mgpu.put(x, mgpu.cpu(i)) if share else mgpu.put(
                    np.ones((2, 8), "float32"), mgpu.cpu(i))
                for leaf in leaves[40 * i:40 * i + 40]:
                    y = y * leaf
                losses.append(y)
        mgpu.backward(losses)
        return mgpu.to_numpy(mgpu.grad(x)), \
            [mgpu.to_numpy(mgpu.grad(leaf)) for leaf in leaves]
    gradient, others = total(share=True)
    assert not threaded
    np.testing.assert_array_equal(gradient, np.full((2, 8), 2.0))
    np.testing.assert_array_equal(others, np.full((80, 8), 4.0))
    _, others = total(share=False)
    assert len(threaded) == 2
    np.testing.assert_array_equal(others, np.full((80, 8), 2.0))


def test_a_loss_that_was_not_recorded(family):
    replicas, _, _ = trained(deep(), 2)
    shards = mgpu.split_and_load(np.ones((4, 8), "float32"), replicas.devices)
    with mgpu.record():
        good, _ = replicas(shards)
    before = [mgpu.to_numpy(p.list_grad()[0]) for p in replicas.params()]
    with pytest.raises(RuntimeError, match="inside mgpu.record"):
        mgpu.backward([good, replicas(shards)[1]])
    after = [mgpu.to_numpy(p.list_grad()[0]) for p in replicas.params()]
    for x, y in zip(before, after):
        np.testing.assert_array_equal(x, y)


def test_the_first_error_by_number(family):
    def fails(i):
        def thunk():
            raise ValueError(str(i))
        return thunk
    ran = []
    with pytest.raises(ValueError, match="^1$"):
        family.in_threads([lambda: ran.append(0), fails(1), fails(2),
                           lambda: ran.append(3)])
    assert sorted(ran) == [0, 3]
