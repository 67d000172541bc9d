"""`mgpu.DataParallel` in scripts of torch and Gluon: what the script computes
with the plain network on one device."""
import copy
import pickle
import re
import warnings

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import bricks, on
from mgpu import parity
from parity.steps import gluon_step, torch_step

#: batch sizes: even, uneven, one example, fewer than devices
SIZES = (8, 7, 3, 1, 8)


def numbers(size, seed, columns=6):
    rng = np.random.default_rng([size, seed])
    return rng.normal(size=(size, columns)), rng.integers(0, 3, size)


def same(script, devices, tolerance=1e-12):
    """Asserts that ``script(wrap)``, a list of numbers, is the same with the
    network and with a `DataParallel` of it."""
    plain = script(lambda net, **options: net)
    found = script(lambda net, **options: mgpu.DataParallel(net, devices,
                                                       **options))
    np.testing.assert_allclose(np.hstack(found), np.hstack(plain), rtol=0,
                               atol=tolerance)


ON_TORCH, ON_MXNET = (pytest.mark.parametrize(
    "backend", {name} & set(BACKENDS), indirect=True)
    for name in ("torch", "mxnet"))


# -- both ---------------------------------------------------------------------

def networks(backend):
    """Networks of (n, 6) -> (n, 3), by name."""
    base, dense = bricks(backend)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = dense(6, 6), dense(6, 6), dense(6, 3)

        def forward(self, x):
            return self.out(self.b(self.a(x).relu()).tanh())

    class Counting(Net):
        count = 0

        def forward(self, x):
            self.count += 1
            return super().forward(x) / self.count

    class Hidden(Net):
        """Carries a state from batch to batch, with its graph cut."""

        state = None

        def forward(self, x):
            z = self.a(x)
            if self.state is not None and len(self.state) == len(z):
                z = z + self.state
            self.state = z.detach().tanh()
            return self.out(self.b(z))

    class InLists(Net):
        """Layers in a list, a closure and a bound method."""

        def __init__(self):
            super().__init__()
            layer, self.layers = self.b, [self.a]
            self.inner = lambda x: layer(x)
            self.last = self.out.forward

        def forward(self, x):
            return self.last(self.inner(self.layers[0](x).relu()))

    class Auxiliary(Net):
        total = False

        def forward(self, x):
            z = super().forward(x)
            self.extra = [(z ** 2).mean() if self.total else (z ** 2).sum(1)]
            return z
    return {cls.__name__: cls for cls in (Net, Counting, Hidden, InLists,
                                          Auxiliary)}


def made(backend, name="Net"):
    return (torch_net if backend.name == "torch" else gluon_net)(name)


def loop(backend, net, *args, **options):
    return (torch_loop if backend.name == "torch" else gluon_loop)(
        net, *args, **options)


@pytest.mark.parametrize("name", ["Net", "Counting", "InLists"])
def test_a_training_loop(backend, devices, name):
    same(lambda wrap: loop(backend, wrap(made(backend, name))), devices)


@pytest.mark.device_counts(1, 3)
def test_a_carried_state(backend, devices):
    """It begins anew with each batch of another size: also where a device
    has as many examples as before. Afterwards the network has that of all
    examples; the user may set another one, or write to it."""
    def script(wrap):
        net = wrap(made(backend, "Hidden"))
        found = loop(backend, net, sizes=[8, 8, 7, 8, 8, 6, 6])
        found.append(mgpu.to_numpy(net.state).ravel())
        net.state = mgpu.put(np.arange(36.).reshape(6, 6), mgpu.cpu(0))
        found += loop(backend, net, sizes=[6, 6])
        net.state[:] = net.state * 2
        return found + loop(backend, net, sizes=[6])
    same(script, devices)


def test_what_forward_leaves_for_a_loss(backend, devices):
    """A value for each example is joined; one number is an error."""
    def script(wrap, total=False):
        net = made(backend, "Auxiliary")
        net.total = total
        net = wrap(net)
        return loop(backend, net, lambda z, y: (z ** 2).sum(1).mean()
                    + net.extra[0].mean(), sizes=(8, 6, 7))
    same(script, devices)
    with pytest.raises((RuntimeError, ValueError),
                       match="Auxiliary.extra, which "):
        script(lambda net: mgpu.DataParallel(net, devices), total=True)


def test_an_optimizer_of_the_framework(backend, devices):
    # Adam divides by roots of sums of the smallest gradients.
    same(lambda wrap: loop(backend, wrap(made(backend)), optimizer="adam"),
         devices, 1e-10)


# -- torch --------------------------------------------------------------------

def torch_networks():
    import torch
    from torch import nn
    from torch.nn.utils import prune
    from torch.utils.checkpoint import checkpoint
    with mgpu.using_backend("torch") as backend:
        found = networks(backend)
    Net = found["Net"]

    class Reentrant(Net):
        def forward(self, x):
            return self.out(checkpoint(self.a, x.requires_grad_(),
                                       use_reentrant=True))

    class Buffer(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            self.total += 1
            return super().forward(x) / self.total

    class InPlace(Net):
        def forward(self, x):
            x.mul_(2)
            return super().forward(x)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(2, 2, batch_first=True)
            self.more = nn.ParameterList([torch.randn(6, 3)])

        def forward(self, x):
            x = x.reshape(-1, 3, 2)
            return self.attention(x, x, x)[0].flatten(1) @ self.more[0]

    def SpectralNorm():
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(
            nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))

    def Pruned():
        return nn.Sequential(prune.l1_unstructured(
            nn.Linear(6, 8), "weight", 0.5), nn.Linear(8, 3))

    def Tied():
        net = Net()
        net.b.weight = net.a.weight
        return net
    return {**found, **{make.__name__: make for make in (
        Reentrant, Buffer, InPlace, Attention, SpectralNorm, Pruned, Tied)}}


def torch_batch(size, seed):
    import torch
    X, y = numbers(size, seed)
    return torch.from_numpy(X), torch.from_numpy(y)


def torch_net(name="Net"):
    import torch
    torch.manual_seed(0)
    return torch_networks()[name]().double()


def torch_loop(net, loss=None, optimizer="sgd", sizes=SIZES):
    """The losses and the last values of a plain training loop."""
    import torch
    loss = loss or torch.nn.functional.cross_entropy
    optimizer = torch.optim.Adam(net.parameters(), 0.01) \
        if optimizer == "adam" else torch.optim.SGD(net.parameters(), 0.1,
                                                    momentum=0.9)
    found = []
    for seed, size in enumerate(sizes):
        X, y = torch_batch(size, seed)
        optimizer.zero_grad()
        value = loss(net(X), y)
        value.backward()
        optimizer.step()
        found.append(value.item())
    return [found, *(x.detach().double().numpy().ravel().copy()
                     for x in net.state_dict().values())]


@ON_TORCH
@pytest.mark.parametrize("name", ["Reentrant", "Buffer", "InPlace",
                                  "Attention", "SpectralNorm", "Pruned",
                                  "Tied"])
def test_a_torch_loop(backend, devices, name):
    same(lambda wrap: torch_loop(wrap(torch_net(name))), devices)


@ON_TORCH
def test_losses_of_a_whole_batch(backend, devices):
    """With class weights; with ignored labels; of all pairs of examples."""
    import torch
    from torch.nn import functional as F
    weights = torch.tensor([1., 2., 4.], dtype=torch.float64)
    for loss in (lambda z, y: F.cross_entropy(z, y, weights),
                 lambda z, y: F.cross_entropy(z, y, ignore_index=1),
                 lambda z, y: (z @ z.T).logsumexp(1).mean()):
        same(lambda wrap: torch_loop(wrap(torch_net()), loss), devices)


@ON_TORCH
def test_an_optimizer_that_calls_a_closure(backend, devices):
    import torch

    def script(wrap):
        net, (X, y) = wrap(torch_net()), torch_batch(8, 0)
        optimizer = torch.optim.LBFGS(net.parameters(), 0.01, max_iter=4)

        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(X), y)
            loss.backward()
            return loss
        return [[optimizer.step(closure).item() for _ in range(3)]]
    same(script, devices, 1e-10)


@ON_TORCH
def test_derivatives_of_derivatives(backend, devices):
    """A gradient penalty on the inputs, a penalty on the weights."""
    import torch

    def script(wrap):
        net = wrap(torch_net())
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for seed in range(2):
            X, y = torch_batch(8, seed)
            loss = torch.nn.functional.cross_entropy(
                net(X.requires_grad_()), y)
            g, = torch.autograd.grad(loss, X, create_graph=True)
            total = loss + (g ** 2).sum() + sum(
                (p ** 2).sum() for p in net.parameters())
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        return [total.item(), X.grad.numpy().ravel(), *(
            p.detach().numpy().ravel() for p in net.parameters())]
    same(script, devices)


@ON_TORCH
def test_two_backward_passes(backend, devices):
    """``retain_graph``; without it the second one is torch's own error."""
    import torch

    def script(wrap):
        net, (X, y) = wrap(torch_net()), torch_batch(8, 0)
        loss = torch.nn.functional.cross_entropy(net(X), y)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a "
                           "second time"):
            loss.backward()
        return [p.grad.numpy().ravel() for p in net.parameters()]
    same(script, devices)


@ON_TORCH
@pytest.mark.parametrize("lengths", [(5, 4, 4, 2), (2, 4, 5, 3, 4)],
                         ids=["sorted", "unsorted"])
def test_packed_sequences_are_split_by_their_examples(backend, devices,
                                                      lengths):
    import torch
    from torch import nn
    from torch.nn.utils import rnn

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out = nn.LSTM(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            y, (h, _) = self.layer(x)
            return y, h, self.out(h[-1])

    def script(wrap):
        torch.manual_seed(1)
        net = Tagger().double()
        net, layer = wrap(net), net.layer
        x = rnn.pack_sequence([
            torch.randn(n, 3).double().requires_grad_() for n in lengths],
            enforce_sorted=lengths[0] == 5)
        y, h, out = net(x)
        assert isinstance(y, rnn.PackedSequence)
        (y.data.square().sum() + h.sum() + out.square().mean()).backward()
        return [*(z.detach().numpy().ravel() for z in (
            y.data, y.batch_sizes, h, out, layer.weight_ih_l0.grad))]
    same(script, devices)


@ON_TORCH
def test_hooks_on_parameters_see_the_sum_once(backend, devices):
    import torch

    def script(wrap):
        plain, seen = torch_net(), []
        plain.unused = torch.nn.Linear(2, 2)
        net = wrap(plain)
        for p in net.parameters():
            p.register_hook(lambda g: (seen.append(g.abs().sum().item()),
                                       g * 2)[1])
            p.register_post_accumulate_grad_hook(
                lambda p: seen.append(p.grad.abs().sum().item()))
        found = torch_loop(net)
        return [*found, sorted(seen)]
    same(script, devices)


@ON_TORCH
def test_torch_compile_leaves_it_on_its_devices(backend, devices):
    import torch
    seen = []

    def forward(x, y):
        seen.append(len(x))
        return x * 2
    net = mgpu.DataParallel(network(backend, forward), devices)
    compiled = torch.compile(net, backend="eager")
    assert torch.equal(compiled(ones(8, 3)), 2 * ones(8, 3))
    assert sorted(set(seen)) == [2, 3]


@ON_TORCH
def test_writes_to_the_network(backend, devices):
    """``.data``, `load_state_dict`, freezing and thawing, another layer."""
    import torch

    def script(wrap):
        net = wrap(torch_net())
        found = torch_loop(net, sizes=[7])
        net.a.weight.data.mul_(0.5)
        found += torch_loop(net, sizes=[7])
        net.load_state_dict({name: x * 0.9
                             for name, x in net.state_dict().items()})
        net.b.weight.requires_grad_(False)
        found += torch_loop(net, sizes=[7])
        net.b.weight.requires_grad_(True)
        torch.manual_seed(1)
        net.out = torch.nn.Linear(6, 3).double()
        return found + torch_loop(net, sizes=[7, 8])
    same(script, devices)


@ON_TORCH
def test_nested_arguments_and_outputs(backend, devices):
    """A dict with a list of arrays, a list with an item for each example, an
    array for all devices; an axis of the output that is not the first."""
    import torch

    class Nested(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(6, 3)

        def forward(self, batch, *, scale, table, names):
            z = self.a(batch["x"] * batch["more"][0]) * scale @ table
            return {"z": z, "pair": (z.T, "text"), "names": names}

    def script(wrap):
        torch.manual_seed(0)
        net = wrap(Nested().double(), whole="table",
                   batch_axis={"names": list})
        found = []
        for size in (9, 7):
            X, y = torch_batch(size, 0)
            names = [str(n) for n in range(size)]
            out = net({"x": X, "more": [X + 1]}, scale=2.0, names=names,
                      table=torch.eye(3).double() + 1)
            assert out["names"] == names and out["pair"][1] == "text"
            (out["z"].sum() + out["pair"][0].sum()).backward()
            found += [out["pair"][0].detach().numpy().ravel(),
                      net.a.weight.grad.numpy().ravel().copy()]
        return found
    same(script, devices)


@ON_TORCH
def test_evaluation_uses_the_networks_statistics(backend, devices):
    import torch
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    parallel = mgpu.DataParallel(net.double(), devices)
    torch_loop(parallel, sizes=[8, 7])
    X, _ = torch_batch(8, 9)
    net.eval()
    assert not parallel.training
    torch.testing.assert_close(parallel(X), net(X), rtol=0, atol=1e-15)


@ON_TORCH
def test_batch_statistics_of_all_devices(backend, devices):
    """``batch_norm="sync"``: those of one device, running ones too."""
    import torch
    from torch import nn

    def script(wrap):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.ReLU(),
            nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2, affine=False),
            nn.Flatten(), nn.Linear(4, 3)).double()
        return torch_loop(wrap(net, batch_norm="sync"), sizes=(8, 7, 3, 8))
    same(script, devices)


@ON_TORCH
def test_dropout_between_batch_statistics_of_all_devices(backend, devices):
    """Draws the same masks in every run, from the stream that all threads
    share; each device its own."""
    import torch
    from torch import nn

    def outputs():
        net = mgpu.DataParallel(nn.Sequential(
            nn.Dropout(), nn.BatchNorm1d(6), nn.Dropout()).double(), devices,
            batch_norm="sync")
        torch.manual_seed(3)
        return torch.stack([net(torch.ones(8, 6).double())
                            for _ in range(4)])
    first = outputs()
    torch.testing.assert_close(outputs(), first, rtol=0, atol=0)
    rows = first.reshape(-1, 6).unique(dim=0)
    assert len(rows) > 16       # of 32: no mask is that of all devices


@ON_TORCH
def test_batch_statistics_of_all_devices_have_no_second_derivatives(backend):
    import torch
    from torch import nn
    net = mgpu.DataParallel(nn.Sequential(
        nn.BatchNorm1d(6), nn.Linear(6, 3)).double(), on(0, 1),
        batch_norm="sync")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(net(torch_batch(8, 0)[0]).sum(),
                            list(net.parameters()), create_graph=True)


@ON_TORCH
def test_it_has_the_networks_names_and_is_copied_like_it(backend, devices):
    net = torch_net()
    parallel = mgpu.DataParallel(net, devices)
    for other in (parallel, copy.deepcopy(parallel),
                  pickle.loads(pickle.dumps(mgpu.DataParallel(
                      net.a, devices)))):
        plain = other.module
        assert list(other.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in other.named_parameters()] == [
            name for name, _ in plain.named_parameters()]
        assert all(p is q for p, q in zip(other.parameters(),
                                          plain.parameters(), strict=True))
    assert parallel.a is net.a and parallel.train(False) is parallel
    assert not net.training
    copied = copy.deepcopy(net)     # of a network that was trained
    torch_loop(mgpu.DataParallel(net, devices))
    assert list(copied.state_dict()) == list(copy.deepcopy(net).state_dict())


# -- Gluon --------------------------------------------------------------------

def gluon_networks():
    import mxnet as mx
    from mxnet import gluon
    from mxnet.gluon import nn
    with mgpu.using_backend("mxnet") as backend:
        found = networks(backend)

    class Constant(gluon.HybridBlock):
        """A parameter of its own, frozen ones, a constant."""

        def __init__(self):
            super().__init__()
            self.w = self.params.get("w", shape=(6, 3))
            self.c = self.params.get_constant("c", mx.nd.ones((3,)))
            self.d = nn.Dense(3, in_units=3)
            self.d.bias.grad_req = "null"

        def hybrid_forward(self, F, x, w, c):
            return self.d(F.dot(x, w) * c)

    def hybrid(**flags):
        net = nn.HybridSequential()
        net.add(nn.Dense(8, activation="tanh"), nn.Dense(3))
        net.hybridize(**flags)
        return net
    return {**found, "Constant": Constant, "Hybrid": hybrid,
            "Static": lambda: hybrid(static_alloc=True, static_shape=True)}


def gluon_net(name="Net", made=None):
    import mxnet as mx
    mx.random.seed(0)
    np.random.seed(0)
    net = (made or gluon_networks()[name])()
    net.initialize(mx.init.Xavier(), ctx=mx.cpu(0))
    net.cast("float64")
    return net


def gluon_loop(net, loss=None, optimizer="sgd", sizes=SIZES):
    import mxnet as mx
    from mxnet import autograd, gluon
    loss = loss or gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), optimizer,
                            {"learning_rate": 0.1})
    found = []
    for seed, size in enumerate(sizes):
        X, y = (mx.nd.array(x, dtype="float64") for x in numbers(size, seed))
        with autograd.record():
            value = loss(net(X), y)
        value.backward()
        trainer.step(size)
        found.append(value.sum().asscalar())
    return [found, *(p.data().asnumpy().ravel()
                     for p in net.collect_params().values())]


@ON_MXNET
@pytest.mark.parametrize("name", ["Hybrid", "Constant"])
def test_a_gluon_loop(backend, devices, name):
    same(lambda wrap: gluon_loop(wrap(gluon_net(name))), devices)


@ON_MXNET
@pytest.mark.parametrize("deferred", [False, True])
def test_batch_statistics_of_all_contexts(backend, devices, deferred):
    """``batch_norm="sync"``: those of one device, running ones too, and in
    predictions; where shapes are `deferred`, from the first pass on."""
    import mxnet as mx
    from mxnet.gluon import nn

    def script(wrap):
        mx.random.seed(0)
        net = nn.Sequential()
        six, four = (0, 0) if deferred else (6, 4)      # 0: not known
        net.add(nn.Dense(4, in_units=six), nn.BatchNorm(in_channels=four),
                nn.Activation("relu"), nn.BatchNorm(
                    in_channels=four, center=False, scale=False),
                nn.Dense(3, in_units=four))
        net.initialize(mx.init.Xavier())
        net.cast("float64")
        wrapped = wrap(net, batch_norm="sync")
        found = gluon_loop(wrapped, sizes=(8, 7, 3, 8))
        X, _ = numbers(9, 9)
        return [*found, wrapped(mx.nd.array(X, dtype="float64"))
                .asnumpy().ravel()]
    same(script, devices)


@ON_MXNET
def test_static_shapes(backend, devices):
    """Of other sizes; a batch on fewer devices would have wrong gradients."""
    same(lambda wrap: gluon_loop(wrap(gluon_net("Static")),
                                 sizes=[8, 7, 8]), devices)
    with pytest.raises(ValueError, match=r"1 device\(s\) after one on 3.*"
                       "static_shape=True"):
        gluon_loop(mgpu.DataParallel(gluon_net("Static"), devices),
                   sizes=[8, 1])


@ON_MXNET
def test_two_passes_of_one_size_have_a_backward_pass_each(backend, devices):
    from mxnet import autograd

    def script(wrap):
        net = wrap(made(backend))
        for p in net.collect_params().values():
            p.grad_req = "add"
        X = backend.put(np.arange(48.).reshape(8, 6) / 50, mgpu.cpu(0))
        with autograd.record():
            losses = [(net(x) ** 2).sum() for x in (X, X + 1)]
        for loss in losses:
            loss.backward()
        return [p.grad().asnumpy().ravel()
                for p in net.collect_params().values()
                if p.grad_req != "null"]
    same(script, devices)


@ON_MXNET
def test_a_loss_of_a_whole_batch_in_gluon(backend, devices):
    import mxnet as mx
    same(lambda wrap: gluon_loop(wrap(gluon_net()), lambda z, y: mx.nd.dot(
        z, z.T).exp().sum().log()), devices)


@ON_MXNET
def test_second_derivatives_in_gluon(backend, devices):
    import mxnet as mx
    from mxnet import autograd
    from mxnet.gluon import nn

    def script(wrap):
        net = wrap(gluon_net(made=lambda: nn.Dense(
            3, in_units=6, use_bias=False)))
        x = mx.nd.array(numbers(8, 0)[0], dtype="float64")
        x.attach_grad()
        with autograd.record():
            z = mx.nd.square(net(x))
            g, = autograd.grad(z, [x], head_grads=mx.nd.ones_like(z),
                               create_graph=True, retain_graph=True)
            total = g * g
        total.backward()
        return [x.grad.asnumpy().ravel(), net.weight.grad().asnumpy().ravel()]
    same(script, devices)


@ON_MXNET
def test_writes_to_a_block(backend, devices):
    """Written values, freezing, and gradients that add up."""
    def script(wrap):
        net = wrap(gluon_net())
        first, second, *_ = every = [*net.collect_params().values()]
        found = gluon_loop(net, sizes=[7])
        first.grad_req = "null"
        second.set_data(second.data() * 2)
        found += gluon_loop(net, sizes=[3])
        first.grad_req = "write"
        first.data()[:] = 0.1
        found += gluon_loop(net, sizes=[8])
        for p in every:
            p.grad_req = "add"
        found += gluon_loop(net, sizes=[7, 1])
        for p in every:
            p.zero_grad()
        return found + gluon_loop(net, sizes=[8])
    same(script, devices)


@ON_MXNET
def test_files_of_a_block(backend, devices, tmp_path):
    net = gluon_net()
    parallel = mgpu.DataParallel(net, devices)
    before = gluon_loop(parallel)[1:]
    parallel.save_parameters(str(tmp_path / "saved"))
    other = gluon_net()
    other.load_parameters(str(tmp_path / "saved"))
    for one in (other, copy.deepcopy(net)):
        for x, p in zip(before, one.collect_params().values(), strict=True):
            p = pickle.loads(pickle.dumps(p))
            assert (p.data().asnumpy().ravel() == x).all()
    assert "set_data" not in vars(net.a.weight)
    assert net.a.weight.list_ctx() == [mgpu.get_backend().handle(mgpu.cpu(0))]
    assert parallel.a is net.a and parallel.module is net


def test_parity_compares_it_with_the_plain_network(backend, devices):
    step = torch_step(lr=0.125) if backend.name == "torch" \
        else gluon_step(learning_rate=0.125)
    result = parity.compare(
        made(backend), made(backend), batches=[
            (np.ones((5, 6)) * np.arange(5)[:, None], np.arange(5) % 3)],
        step_a=lambda net: step(mgpu.DataParallel(net, devices)), step_b=step)
    assert result.same, result


# -- arguments and outputs ----------------------------------------------------

def network(backend, function):
    """A network without parameters."""
    class Function(bricks(backend)[0]):
        def forward(self, x, y=None):
            return function(x, y)
    return Function()


def ones(*shape):
    return mgpu.put(np.ones(shape), mgpu.cpu(0))


@pytest.mark.parametrize("function, shapes, error", [
    (lambda x, y: x.sum(), [(6, 3)], "a scalar on each device|no axis fits"),
    (lambda x, y: x.reshape((-1,)), [(6, 2)], "no axis fits"),
    (lambda x, y: x.shape[0], [(7, 2)], "depends on the examples"),
    (lambda x, y: x, [(6, 3), (6,)], r"argument 'y' has shape \(6,\) in a "
     r"batch of 6 examples.*Pass batch_axis=\{'y': 0\} to split it, or "
     r"whole=\('y',\)"),
    (lambda x, y: x, [(6, 3), (6, 6)], r"argument 'y' has shape \(6, 6\)")])
def test_what_is_ambiguous_raises(backend, devices, function, shapes, error):
    net = mgpu.DataParallel(network(backend, function), devices)
    with pytest.raises(ValueError, match=error):
        net(*(ones(*shape) for shape in shapes))


def test_outputs_are_compared_with_one_device(backend, devices, monkeypatch):
    """``MGPU_DEBUG=1``: what looks across examples is named, what does not
    is not."""
    monkeypatch.setenv("MGPU_DEBUG", "1")
    x = mgpu.put(numbers(6, 0)[0], mgpu.cpu(0))
    for function, matches in ((lambda x, y: {"z": x * 2}, ()), (
            lambda x, y: {"same": x, "z": x - x.mean()},
            [r"the output\['z'\] on several devices differs from one"])):
        net = mgpu.DataParallel(network(backend, function), devices)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            net(x)
        found = [str(w.message) for w in caught if "MGPU_DEBUG" in str(
            w.message)]
        assert len(found) == len(matches)
        assert all(re.search(*pair) for pair in zip(matches, found))


@ON_TORCH
def test_a_forward_that_writes_to_its_parameters_raises(backend, devices):
    import torch
    net = mgpu.DataParallel(torch.nn.Embedding(9, 6, max_norm=0.5), devices)
    with pytest.raises(RuntimeError, match="writes to the parameter weight"):
        net(torch.arange(6)[:, None])


def test_a_size_that_agrees_by_chance_decides_nothing(backend, devices):
    """Each device's (2, 2) has its 2 examples on axis 1."""
    net = mgpu.DataParallel(network(
        backend, lambda x, y: x.reshape((-1, 2)).swapaxes(0, 1)), devices)
    assert tuple(net(ones(6, 2)).shape) == (2, 6)


def test_an_option_of_forward_may_choose_the_axis(backend, devices):
    net = mgpu.DataParallel(network(
        backend, lambda x, y: x.swapaxes(0, 1) if y else x + 1), devices)
    for option in (False, True, False):
        shape = (2, 6) if option else (6, 2)
        assert tuple(net(ones(6, 2), option).shape) == shape


def test_an_argument_is_named(backend, devices):
    net = network(backend, lambda x, y: x * y)
    split = mgpu.DataParallel(net, devices, batch_axis={"y": 0})
    assert tuple(split(ones(5, 1), ones(5)[:, None]).shape) == (5, 1)
    whole = mgpu.DataParallel(net, devices, whole="y")
    assert tuple(whole(ones(6, 6), ones(6)).shape) == (6, 6)
    columns = mgpu.DataParallel(net, devices, batch_axis=1)
    assert tuple(columns(ones(3, 7), ones(3, 7)).shape) == (3, 7)
    with pytest.raises(TypeError, match="no argument 'z'.*x, y"):
        mgpu.DataParallel(net, devices, whole=["z"])(ones(6, 3))


def test_an_earlier_batch_decides_for_a_square_array(backend, devices):
    """A mask (examples, time), where batch and time have one size."""
    seen = []

    def forward(x, y):
        seen.append(y.shape[0])
        return x
    net = mgpu.DataParallel(network(backend, forward), devices)
    net(ones(6, 2), ones(6, 3))
    seen.clear()
    net(ones(5, 2), ones(5, 5))
    assert sorted(seen) == [1, 2, 2]


def test_arrays_of_one_argument_are_decided_each(backend, devices):
    """Class weights that a batch of another size passed whole, besides a mask
    that is split."""
    seen = []

    def forward(x, y):
        seen.append((y["mask"].shape[0], y["weights"].shape[0]))
        return x
    net = mgpu.DataParallel(network(backend, forward), devices)
    net(ones(6, 2), {"mask": ones(6, 2), "weights": ones(4)})
    seen.clear()
    net(ones(4, 2), {"mask": ones(4, 2), "weights": ones(4)})
    assert sorted(seen) == [(1, 4), (1, 4), (2, 4)]
    with pytest.raises(ValueError, match=r"'y' has shape \(5,\) in a batch"):
        net(ones(5, 2), {"mask": ones(5, 2), "weights": ones(5)})


def test_another_argument_may_hold_the_examples(backend, devices):
    """Scores of images (10, 4) for classes (6, 4): the first argument would
    be split, and softmax see the classes of one device."""
    def forward(classes, images):
        return (images[:, None] * classes[None]).sum(2) \
            / classes.sum(1).sum(0)
    arguments, net = (ones(6, 4), ones(10, 4)), network(backend, forward)
    with pytest.raises(ValueError, match="6 examples on axis 1; got 10 "
                       "entries on axis 0, as many as argument 'y'.*whole="):
        mgpu.DataParallel(net, devices)(*arguments)
    right = mgpu.DataParallel(net, devices, whole=("x",))(*arguments)
    np.testing.assert_allclose(backend.to_numpy(right),
                               np.full((10, 6), 1 / 6))
    split = mgpu.DataParallel(network(backend, lambda x, y: y[:, None]
                                      + x.sum(1)), devices, whole=("y",))
    assert tuple(split(ones(6, 4), ones(10)).shape) == (10, 6)


@ON_TORCH
def test_an_argument_by_keyword_only_names_no_other(backend, devices):
    import torch

    class Scaled(torch.nn.Module):
        def forward(self, *xs, scale):
            return xs[0] * scale
    net = mgpu.DataParallel(Scaled(), devices, whole=("scale",))
    assert torch.equal(net(ones(3, 3), scale=ones(3)), ones(3, 3))


@pytest.mark.parametrize("batch_axis, error", [
    (-1, "batch_axis must be an integer of 0 or more; received -1"),
    ({"x": "0"}, "batch_axis must be an integer of 0 or more; received '0'"),
    (2, r"no argument has the axis batch_axis=2; received shapes "
     r"\[\(6, 3\)\]")])
def test_a_wrong_batch_axis_raises(backend, devices, batch_axis, error):
    with pytest.raises(ValueError, match=error):
        mgpu.DataParallel(network(backend, lambda x, y: x), devices,
                          batch_axis=batch_axis)(ones(6, 3))


def test_an_argument_that_was_split_and_is_not_raises(backend, devices):
    net = mgpu.DataParallel(network(backend, lambda x, y: x), devices)
    net(ones(6, 3), ones(6, 2))
    with pytest.raises(ValueError, match="'y' was split in an earlier batch"):
        net(ones(5, 3), ones(6, 2))


def test_other_policies_of_batch_norm(backend):
    net = network(backend, lambda x, y: x)
    with pytest.raises(ValueError, match="'per_device' or 'sync'; got 'all'"):
        mgpu.DataParallel(net, on(0, 1), batch_norm="all")


def test_a_list_of_as_many_items_as_examples_is_named(backend, devices):
    net = network(backend, lambda x, y: x * y[0] if y else x)
    parallel = mgpu.DataParallel(net, devices)
    for given in ([2.0] * 6, [{"boxes": ones(n + 1, 4)} for n in range(6)]):
        with pytest.raises(ValueError, match="list of 6 items.*'y': list"):
            parallel(ones(6, 3), given)
    assert tuple(parallel(ones(5, 3), [2.0] * 6).shape) == (5, 3)
    split = mgpu.DataParallel(net, devices, batch_axis={"y": list})
    assert tuple(split(ones(6, 3), [2.0] * 6).shape) == (6, 3)


def test_a_number_that_depends_on_the_examples_raises(backend, devices):
    net = mgpu.DataParallel(network(backend, lambda x, y: (x, len(x))),
                            devices)
    for size in (6, 5):
        with pytest.raises(ValueError, match=r"output\[1\] depends on the ex"):
            net(ones(size, 3))
    constant = mgpu.DataParallel(network(
        backend, lambda x, y: (x, 7, x.shape[1:])), devices)
    assert constant(ones(6, 3))[1:] == (7, (3,))


def test_an_optional_argument_is_there_in_some_batches(backend, devices):
    net = mgpu.DataParallel(network(
        backend, lambda x, y: x if y is None else x + y), devices)
    for given in (None, ones(6, 3), None):
        assert tuple(net(ones(6, 3), given).shape) == (6, 3)


@ON_TORCH
def test_joint_statistics_in_a_network_whose_axes_agree_by_chance(
        backend, devices):
    """The pass that finds the axis of the examples has one device."""
    import torch
    from torch import nn

    def script(wrap):
        torch.manual_seed(1)
        net = wrap(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(
            4, 5)).double(), batch_norm="sync")
        X = torch.from_numpy(numbers(5 * len(devices), 1)[0])
        return [net(X).detach().numpy().ravel()]
    same(script, devices)


@ON_TORCH
def test_named_results_of_torch_are_joined(backend, devices):
    import torch
    net = mgpu.DataParallel(network(backend, lambda x, y: x.max(1)), devices)
    x = torch.from_numpy(numbers(7, 1)[0])
    assert type(net(x)) is type(x.max(1))
    assert torch.equal(net(x).indices, x.max(1).indices)


@ON_TORCH
def test_one_inside_of_another_network_is_refused(backend, devices):
    from torch import nn
    inner = mgpu.DataParallel(nn.Linear(6, 5), devices)
    with pytest.raises(TypeError, match="a DataParallel cannot be copied"):
        mgpu.DataParallel(nn.Sequential(inner), devices)(ones(6, 6))


@ON_TORCH
def test_further_arguments_have_numbers(backend, devices):
    from torch import nn

    class Net(nn.Module):
        def forward(self, *args):
            return args[0] * args[1][:, None]
    with pytest.raises(ValueError, match="{'argument 1': 0}"):
        mgpu.DataParallel(Net(), devices)(ones(6, 3), ones(6))
    net = mgpu.DataParallel(Net(), devices, batch_axis={"argument 1": 0})
    assert tuple(net(ones(6, 3), ones(6)).shape) == (6, 3)


def test_the_axis_of_a_time_major_layer_is_named(backend, devices):
    """Of an input (time, examples, features), no shape tells the axes."""
    layer = lstm(backend)
    x = mgpu.put(np.ones((6, 4, 3), np.float32), mgpu.cpu(0))
    with pytest.raises(ValueError, match="batch_axis= must be given for"):
        mgpu.DataParallel(layer, devices)(x)
    found = mgpu.DataParallel(layer, devices, batch_axis=1)(x)
    plain = layer(x)
    for a, b in zip(*([y] if backend.is_native(y) else [y[0], *y[1]]
                      for y in (found, plain))):
        np.testing.assert_allclose(*map(backend.to_numpy, (a, b)), rtol=1e-6)


def lstm(backend):
    """A recurrent layer of the framework, with its default layout."""
    if backend.name == "torch":
        import torch
        return torch.nn.LSTM(3, 2)
    import mxnet as mx
    layer = mx.gluon.rnn.LSTM(2, input_size=3)
    layer.initialize()
    return layer
