"""Random numbers in a user's torch network: the same in every run, although
the devices' threads share torch's default generator."""
import threading
import time

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS

pytestmark = pytest.mark.parametrize("backend", [
    name for name in BACKENDS if name == "torch"], indirect=True)


def rows_and_classes():
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, 6)), rng.integers(0, 3, 8)


def cross_entropy(pred, label):
    import torch
    return torch.nn.functional.cross_entropy(pred, label.long(),
                                             reduction="none")


def alone(h):
    """Noise, and an error where another device draws at this time."""
    import torch
    assert _turn.acquire(blocking=False), "another device runs"
    time.sleep(0.001)
    _turn.release()
    return torch.randn_like(h)


_turn = threading.Lock()


def noise_like(x):
    import torch
    return torch.randn_like(x)


def unread_noise(h):
    """By a name that no text of the code has."""
    import torch
    return getattr(torch, "_".join(("randn", "like")))(h)


def _dropped(net, h):
    from torch.nn import functional
    return functional.dropout(h, net.share, training=True)


def _seeded(net, h):
    import torch
    torch.manual_seed(4)
    return h * torch.rand(300)


#: how a network of `noisy` draws, by name: ``function(net, h)``
NOISES = {
    "attribute": lambda net, h: h + net.share * net.held["noise"][0](h),
    "function": lambda net, h: h + net.share * noise_like(h),
    "unread": lambda net, h: h + net.share * unread_noise(h),
    "mc dropout": _dropped,
    "seeded": _seeded}


def noisy(how):
    """A network of torch that begins to draw when ``net.share`` is set."""
    import torch
    from torch import nn

    class Net(nn.Module):
        share = 0.0
        change = NOISES.get(how, lambda net, h: h)

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 300), nn.Linear(300, 3)
            self.held = {"noise": [alone]} if how == "attribute" else None

        def forward(self, x):
            h = self.first(x)
            return self.last(self.change(h) if self.share else h)
    torch.manual_seed(3)
    return Net().double()


def drawn(how, predicts, devices, steps=5):
    """What a network gives that draws in each pass, or its loss."""
    import torch
    net = noisy(how)
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.01})
    X, y = rows_and_classes()

    def loss(pred, label):
        values = cross_entropy(pred, label)
        for _ in range(20 if how == "loss" and net.share else 0):
            values = values + torch.rand_like(values)
        return values
    mgpu.seed(5)
    torch.manual_seed(7)    # the loss runs once, in this thread
    before = torch.get_rng_state()
    net.share, found = 0.25, []
    for _ in range(steps):
        if predicts:
            net.eval()
            found += map(mgpu.to_numpy, replicas(mgpu.split_and_load(
                X, devices, even_split=False)))
        else:
            found += [mgpu.to_numpy(x) for x in mgpu.train_batch(
                X, y, replicas, loss, trainer)]
    assert (torch.get_rng_state() == before).all() or how == "loss"
    return np.concatenate(found, axis=None)


@pytest.mark.parametrize("how, predicts", [
    ("function", False), ("loss", False), ("attribute", True),
    ("mc dropout", True)])
def test_what_draws_draws_the_same_in_every_run(
        backend, how, predicts, devices):
    """From torch's default stream, which the threads of all devices
    share."""
    runs = [drawn(how, predicts, devices) for _ in range(2)]
    assert (runs[0] == runs[1]).all()
    assert (runs[0][-8:] != runs[0][-16:-8]).all()


def noisy_backward(noise):
    """A network of torch whose backward passes draw."""
    import torch
    from torch import nn

    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.view_as(x)

        @staticmethod
        def backward(context, gradient):
            return gradient + noise(gradient)

    class Noisy(nn.Module):
        def forward(self, x):
            return Noise.apply(x)
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), Noisy(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("noise, own", [(unread_noise, True), (alone, False)])
def test_backward_passes_that_draw_take_turns(backend, noise, devices, own):
    """In the user's `own` loop, and in `train_batch`."""
    import torch
    found = []
    X, y = rows_and_classes()
    for _ in range(2):
        net = noisy_backward(noise)
        replicas = mgpu.initialize(net, devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
        mgpu.seed(5)
        before = torch.get_rng_state()
        for _ in range(4):
            if own:
                shards, labels = mgpu.split_batch(X, y, devices)
                with mgpu.record():
                    losses = mgpu.parallel(cross_entropy, replicas(shards),
                                           labels)
                mgpu.backward(losses)
                trainer.step(8)
            else:
                mgpu.train_batch(X, y, replicas, cross_entropy, trainer)
        assert (torch.get_rng_state() == before).all()
        found.append(mgpu.to_numpy(net[0].weight))
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("predicting", (False, True))
def test_a_network_that_seeds_itself_draws_the_same_on_all_devices(
        backend, devices, predicting):
    import torch
    net = noisy("seeded")
    net.share = 1.0
    net.train(not predicting)
    x = np.random.default_rng(0).normal(size=(9, 6))
    wanted = net(torch.from_numpy(x)).detach().numpy()
    replicas = mgpu.initialize(net, devices)
    shards = mgpu.split_and_load(x, devices, even_split=False)
    with mgpu.record(train_mode=not predicting):
        for _ in range(4):
            found = np.concatenate([mgpu.to_numpy(y) for y in
                                    replicas(shards)])
            assert abs(found - wanted).max() < 1e-12


@pytest.mark.device_counts(4)
def test_a_layer_that_trains_later_draws_in_turn(backend, devices):
    """The same numbers in every run, where layers have other modes."""
    import torch
    from torch import nn
    torch.manual_seed(0)

    class Functional(nn.Module):
        def forward(self, x):       # no name of one that draws
            function = getattr(nn.functional, "".join(("drop", "out")))
            return function(x, 0.5, self.training)
    x = np.ones((40, 50))
    found = []
    for _ in range(2):
        net = nn.Sequential(Functional())
        net[0].eval()
        replicas = mgpu.initialize(net, devices)
        shards = mgpu.split_and_load(x, replicas.devices)
        with mgpu.record():
            replicas(shards)
            net[0].train()
            mgpu.seed(5)
            torch.manual_seed(7)
            before = torch.get_rng_state()
            found.append(np.concatenate(
                [mgpu.to_numpy(out) for out in replicas(shards)]))
        assert (torch.get_rng_state() == before).all()
    assert (found[0] == found[1]).all() and set(np.unique(found)) == {0, 2}


@pytest.mark.device_counts(4)
def test_draws_that_no_name_tells_of_are_said(backend, devices, monkeypatch):
    """Once; from then on the devices take turns."""
    from mgpu.backends._torch import streams
    monkeypatch.setattr(streams.watch, "_warned", False)
    import torch
    torch.manual_seed(0)
    net = noisy("unread")
    replicas = mgpu.initialize(net, devices)
    shards = mgpu.split_and_load(np.ones((8, 6)), replicas.devices)
    with mgpu.record():
        replicas(shards)
        net.share = 0.25
        with pytest.warns(UserWarning, match="torch's default generator in "
                          "parallel"):
            replicas(shards)
        found = []
        for _ in range(2):
            mgpu.seed(5)
            before = torch.get_rng_state()
            found.append([mgpu.to_numpy(x) for _ in range(4)
                          for x in replicas(shards)])
            assert (torch.get_rng_state() == before).all()
    assert np.array_equal(*found)
