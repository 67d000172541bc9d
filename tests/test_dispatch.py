"""MXNet queues long passes of several CPU devices from several threads, and
nothing else changes by that: values, random numbers, or what blocks keep."""
import threading

import numpy as np
import pytest

import mgpu
from batches import rows
from conftest import BACKENDS, ENGINES
from helpers import on, using_engine
from nets import shards_of

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


def deep(middle=None):
    """36 layers: a pass that is long enough for a thread of its own."""
    net = nn.HybridSequential() if middle is None or isinstance(
        middle, nn.HybridBlock) and not isinstance(middle, Overrides) \
        else nn.Sequential()
    for i in range(18):
        net.add(nn.Dense(8, in_units=8))
        net.add(nn.LayerNorm(in_channels=8))
        if middle is not None and i == 9:
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


def trained(net, steps=3, **options):
    """Losses and weights of some steps on three devices."""
    mgpu.seed(1)
    replicas = mgpu.initialize(net, on(0, 1, 2), "xavier", seed=3, **options)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    found = [mgpu.to_numpy(x) for _ in range(steps) for x in mgpu.train_batch(
        rows(12, 8), rows(12, 8, seed=1), replicas, mgpu.losses.L2Loss(),
        trainer)]
    return found + [mgpu.to_numpy(p.list_data()[0])
                    for p in replicas.params()]


def same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("hybridize", (False, True))
def test_numbers_are_those_of_one_thread(family, threaded, monkeypatch,
                                         hybridize):
    fast = trained(deep(), hybridize=hybridize)
    # The first forward pass is in turn; three steps of three devices.
    assert len(threaded) == 3 * 3 + 2 * 3
    threaded.clear()
    monkeypatch.setattr(package, "cpu_cores", lambda: 1)
    same(fast, trained(deep(), hybridize=hybridize))
    assert not threaded


@pytest.mark.parametrize("kind, hybridize, forward", (
    ("Skips", False, 0), ("Noise", False, 0), ("Overrides", True, 0),
    ("dropout", False, 0), ("dropout", True, 0), ("Compilable", False, 0),
    ("Compilable", True, 2 * 3), ("function", True, 2 * 3)))
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
    first = trained(net())
    assert len(threaded) == 3 * 3 + forward
    monkeypatch.setattr(package, "cpu_cores", lambda: 1)
    same(first, trained(net()))


def test_operations_that_the_caller_holds_back(family, threaded, monkeypatch):
    """Those that `mx.engine.bulk` collects come before what the threads
    queue."""
    def run():
        with mx.engine.bulk(16):
            return trained(deep(), steps=6)
    fast = run()
    assert threaded
    monkeypatch.setattr(package, "cpu_cores", lambda: 1)
    same(fast, run())


def test_a_hook_is_the_users_code(family, threaded):
    seen, net = [], deep()
    replicas = mgpu.initialize(net, on(0, 1), "xavier")
    handle = net[3].register_forward_hook(
        lambda *_: seen.append(threading.current_thread()))
    shards = shards_of(rows(4, 8), replicas)
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
