"""Memory that parameters, buffers and attributes of a torch network share,
and buffers that its passes make or replace."""
import copy

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from nets import perceptron, trains_as_plain

pytestmark = pytest.mark.parametrize("backend", [
    name for name in BACKENDS if name == "torch"], indirect=True)


def sharing(how):
    """A network whose forward pass reads the memory of a parameter under
    another name."""
    import torch
    from torch import nn

    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = perceptron(), nn.Linear(6, 4).double()
            weight = self.b.weight.data
            if how == "buffer":
                self.register_buffer("proto", weight)
            elif how == "attribute":
                self.proto = self.b.weight.detach()
            elif how == "list":
                self.protos = [[weight.t()]]
            elif how == "parameter":
                self.c = nn.Linear(6, 4, bias=False).double()
                self.c.weight.data = weight

        def forward(self, x):
            y = self.a(x)
            if hasattr(self, "protos"):
                proto = self.protos[0][0].t()
            else:
                proto = self.c.weight if hasattr(self, "c") else self.proto
            return y + self.b(x) + nn.functional.linear(x, proto.clone())
    torch.manual_seed(0)
    return Sharing()


@pytest.mark.filterwarnings("error:.*had other values")
@pytest.mark.parametrize("how, later", [
    ("buffer", False), ("attribute", False), ("attribute", True),
    ("list", False), ("parameter", False)])
def test_what_shares_memory_does_so_on_every_device(backend, devices, how,
                                                    later):
    """A buffer, an attribute or a parameter that is a view of another
    parameter; also one that is set `later`."""
    def share(net):
        if later:
            net.proto = net.b.weight.detach()
    trains_as_plain(lambda: sharing(how), devices, share, 4)


def orthogonal(cache):
    """A network that uses an orthogonal weight twice, from a `cache`."""
    import torch
    from torch import nn
    from torch.nn.utils import parametrizations, parametrize

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = parametrizations.orthogonal(nn.Linear(6, 6))
            self.o = nn.Linear(6, 4)

        def forward(self, x):
            if not cache:
                return self.o(self.l(self.l(x)))
            with parametrize.cached():
                return self.o(self.l(self.l(x)))
    torch.manual_seed(0)
    return Twice().double()


def test_a_cache_of_weights_is_of_one_device(backend, devices):
    trains_as_plain(lambda: orthogonal(True), devices, steps=4)


def caching():
    import torch
    from torch import nn

    class Caching(nn.Linear):
        def __init__(self):
            super().__init__(6, 4, dtype=torch.float64)
            self.register_buffer("cache", None)

        def forward(self, x):
            if self.cache is None:
                self.register_buffer("cache", torch.ones(1))
            return super().forward(x) + self.cache.sum()
    torch.manual_seed(0)
    return Caching()


def test_buffers_that_passes_make_belong_to_their_device(backend, devices):
    """All devices have them then, and those that the user makes."""
    import torch
    net, x = caching(), np.eye(6)[:4]
    expected = copy.deepcopy(net)(torch.from_numpy(x)).detach().numpy()
    replicas = mgpu.initialize(net, devices)
    shards = mgpu.split_and_load(x, devices, even_split=False)
    for late in (False, False, True):
        if late:
            net.register_buffer("cache", torch.ones(1) * 3)
        found = np.concatenate(
            [mgpu.to_numpy(out) for out in replicas(shards)])
        assert np.abs(found - expected - 2 * late).max() < 1e-12


def rotating(length=3):
    """A network that makes its table of angles longer when a longer text
    comes."""
    import torch
    from torch import nn

    class Rotating(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 3).double()
            self.make(length)

        def make(self, length):
            self.register_buffer("cos", torch.arange(length).double().cos()[
                :, None].repeat(1, 4), persistent=False)

        def forward(self, text):
            if text.shape[1] > len(self.cos):
                self.make(text.shape[1])
            return self.out((text * self.cos[:text.shape[1]]).mean(1))
    return Rotating()


def texts(length):
    return (np.random.default_rng(length).normal(size=(4, length, 4)),
            np.arange(4) % 3)


@pytest.mark.parametrize("grows_in", ["training", "predicting"])
@pytest.mark.device_counts(1, 3)
def test_a_buffer_that_a_longer_text_makes_longer(
        backend, devices, grows_in, tmp_path):
    """Training continues as in plain PyTorch, and the values of the longer one
    are saved and loaded; loading raises before it exists."""
    import torch
    plain = rotating()
    replicas = mgpu.initialize(copy.deepcopy(plain), devices)
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    own = torch.optim.SGD(plain.parameters(), 0.125)
    short, path = replicas.export_numpy(), tmp_path / "one.npz"
    for length in (3, 5, 3, 7, 3):
        X, y = texts(length)
        if length > 3 and grows_in == "predicting":
            replicas(mgpu.split_and_load(X, devices, even_split=False))
        else:
            own.zero_grad()
            torch.nn.functional.cross_entropy(
                plain(torch.from_numpy(X)), torch.from_numpy(y)).backward()
            own.step()
            mgpu.train_batch(X, y, replicas, loss, trainer)
            assert replicas.all_parameters()[-1].shape == tuple(
                replicas.net.cos.shape)
        if length > 3:
            before = replicas.net.out.weight.detach().clone()
            with pytest.raises(ValueError, match=r"cos: shape \(3, 4\)"):
                replicas.import_numpy(short)
            assert bool((before == replicas.net.out.weight).all())
        mgpu.save_checkpoint(path, replicas, trainer)
        mgpu.load_checkpoint(path, replicas, trainer)
    assert replicas.export_numpy()["cos"].shape == (7, 4)
    for p, q in zip(plain.parameters(), replicas.net.parameters()):
        assert bool(((p - q).abs() < 1e-12).all())
