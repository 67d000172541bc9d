"""What torch keeps for each thread acts on passes that run in the devices'
threads: modes around a step that see its operations, hooks on what is saved,
the default device. Networks are in float64; the reference is a plain loop.
"""
import contextlib
import copy
import itertools
import threading

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import assert_all_equal, mlp, on

pytestmark = pytest.mark.parametrize("name", [
    name for name in BACKENDS if name == "torch"])


@pytest.fixture(autouse=True)
def engine(name):
    with mgpu.using_backend(name) as backend:
        yield backend


def scaling():
    """A mode that changes what a function returns, and counts its calls."""
    import torch
    from torch.nn import functional as F
    from torch.overrides import TorchFunctionMode

    class Scale(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            y = function(*args, **(kwargs or {}))
            if function is F.linear:
                self.calls += 1
                y = (1 + torch.sin(torch.tensor(self.calls % 2))) * y
            return y
    return Scale()


def rounding():
    """Hooks that change what is saved for the backward pass."""
    import torch
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.detach() * 1.5 if x.is_floating_point() else x,
        lambda x: x)


def on_the_host():
    import torch
    return torch.autograd.graph.save_on_cpu()


def trained(engine, devices, around, batches=(8, 7, 1)):
    """The weights after plain SGD: by mgpu, or without `devices`."""
    import torch
    from torch.nn.functional import cross_entropy
    net = mlp(engine).double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape) / (i+1))
    replicas = mgpu.initialize(net, devices) if devices else None
    trainer = replicas and mgpu.Trainer(replicas, "sgd",
                                        {"learning_rate": 0.1})
    for rows in batches:
        rng = np.random.default_rng(rows)
        X = torch.from_numpy(rng.normal(size=(rows, 6)))
        y = torch.from_numpy(rng.integers(0, 3, rows))
        if devices:
            with around():
                mgpu.train_batch(X, y, replicas, lambda o, y: cross_entropy(
                    o, y, reduction="none"), trainer)
            continue
        net.zero_grad()
        with around():
            loss = cross_entropy(net(X), y, reduction="none")
        loss.sum().backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad / rows
    return [p.detach().numpy() for p in net.parameters()]


@pytest.mark.parametrize("around", [scaling, rounding, on_the_host])
def test_modes_around_a_step_act_in_its_passes(engine, devices, around):
    for ours, plain in zip(trained(engine, devices, around),
                           trained(engine, None, around)):
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-12)


def test_what_a_mode_counts_is_that_of_the_whole_batch(engine, devices):
    """Operations of all devices, one at a time: nothing is lost."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    found = []
    for k in (len(devices), 1):
        modes = []

        def around(modes=modes):
            modes.append(FlopCounterMode(display=False))
            return modes[-1]
        trained(engine, on(*range(k)), around)
        found.append([mode.flop_counts["Global"] for mode in modes])
    assert found[0] == found[1] and found[0][0]
    # two threads would wait for each other in a hook; one waits in vain
    meeting, met = threading.Barrier(2), []

    def pack(x):
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)
            met.append(x)
        return x
    replicas = mgpu.initialize(mlp(engine), devices)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), \
            mgpu.record():
        mgpu.parallel(lambda x: (x * x).sum(1), replicas(
            [mgpu.put(np.ones((2, 6), "float32"), d) for d in devices]))
    assert meeting.broken and not met


def test_the_default_device_is_that_of_the_calling_thread(devices):
    import torch
    with torch.device("meta"):
        found = mgpu.parallel(lambda _: torch.zeros(()).device.type, devices)
    assert found == ["meta"] * len(devices)
    assert mgpu.parallel(lambda _: torch.zeros(()).device.type, devices) \
        == ["cpu"] * len(devices)


def test_dropout_inside_hooks_draws_the_same_masks(devices):
    """The user's hooks around a step are no checkpoint."""
    import torch
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5))
    found = []
    for around in (contextlib.nullcontext, on_the_host):
        replicas = mgpu.initialize(copy.deepcopy(net), devices)
        mgpu.seed(1)
        shards = [mgpu.put(np.ones((2, 6), "float32"), d) for d in devices]
        for _ in range(2):
            with around(), mgpu.record():
                found.append([x.detach().numpy() for x in replicas(shards)])
    np.testing.assert_array_equal(found[:2], found[2:])


@pytest.mark.parametrize("around", [scaling, rounding])
def test_modes_around_synchronized_devices_raise(around, devices):
    import torch
    X = np.ones((8, 6), "float32")
    replicas = mgpu.initialize(torch.nn.Sequential(
        torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3)), devices,
        batch_norm="sync")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    before = replicas.export_numpy()

    def step():
        mgpu.train_batch(X, X[:, 0], replicas, lambda o, y: o.sum(1), trainer)
    with around(), pytest.raises(RuntimeError,
                                 match="does not support a mode or hook"):
        step()
    assert_all_equal(replicas.export_numpy(), before)
    step()


@pytest.mark.parametrize("parallel", [False, True])
def test_small_layers_run_in_turn_and_give_the_same_bits(
        engine, parallel, monkeypatch):
    """By a clock that ticks a step each time it is read, all devices one
    after the other take less than at the same time."""
    import torch
    from mgpu.backends._torch import streams
    ran = []

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8),
                torch.nn.Dropout(0.5) if not parallel else torch.nn.Tanh(),
                torch.nn.Linear(8, 3))
            self.last = torch.zeros(1, 3)

        def forward(self, x):
            ran.append(threading.current_thread())
            y = self.layers(x)
            self.last = y.detach()
            return y + torch.get_num_threads()

    def trained(clock):
        monkeypatch.setattr(streams.time, "perf_counter", clock)
        ran.clear()
        torch.manual_seed(0)
        mgpu.seed(0)
        net, devices = Net(), on(0, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        loss = torch.nn.CrossEntropyLoss()
        model = mgpu.DataParallel(net, devices) if parallel \
            else mgpu.initialize(net, devices)
        trainer = None if parallel else mgpu.Trainer(model, optimizer)
        shown = []
        for _ in range(2 * streams.PASSES):
            X, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
            if trainer is None:
                optimizer.zero_grad()
                loss(model(X), y).backward()
                optimizer.step()
            else:
                mgpu.train_batch(X, y, model, loss, trainer)
            shown.append(net.last.clone())
        return [*net.parameters(), *net.buffers(), *shown], ran[-2:]
    before, ticks = torch.get_num_threads(), itertools.count()
    torch.set_num_threads(before + 1)
    in_turn, threads = trained(lambda: next(ticks))
    assert threads == [threading.current_thread()] * 2
    together, threads = trained(lambda: 0)
    assert threading.current_thread() not in threads
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)
    for a, b in zip(in_turn, together, strict=True):
        assert torch.equal(a, b)
