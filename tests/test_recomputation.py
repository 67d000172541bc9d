"""Activation checkpoints (torch): what a backward pass computes again is what
the forward pass has computed, and the gradients are those without them.
Networks are in float64.
"""
import contextlib

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import on, relative_difference, using_engine
from mgpu.parity.masks import Masks

pytestmark = [pytest.mark.parametrize("name", [
    name for name in BACKENDS if name == "torch"]),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")]

REENTRANT = pytest.mark.parametrize("reentrant", [True, False])


@pytest.fixture(autouse=True)
def engine(name):
    with using_engine(name) as backend:
        yield backend


#: the masks of a step, by what they are for
DROPPED = {}


def network(reentrant, *, rate=0.5, functional=False, first=False):
    """A network whose middle is called twice, inside checkpoints."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.end = nn.Linear(6, 8), nn.Linear(8, 4)
            self.shared, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.drop = nn.Dropout(rate)
            self.checkpointed = True

        def middle(self, x):
            y = self.norm(self.shared(x).tanh())
            z = nn.functional.dropout(y, rate, self.training) \
                if functional else self.drop(y)
            mask = (z == 0).numpy().tobytes()
            # the same numbers: computed again
            assert DROPPED.setdefault(y.detach().numpy().tobytes(),
                                      mask) == mask
            return z

        def call(self, function, x):
            return checkpoint(function, x, use_reentrant=reentrant) \
                if self.checkpointed else function(x)

        def forward(self, x):
            x = self.call(self.start, x) if first else self.start(x)
            return self.end(self.call(self.middle, self.call(self.middle, x)))
    torch.manual_seed(0)
    return Network().double()


def start(net, k, **options):
    replicas = mgpu.initialize(net, on(*range(k)), **options)
    return replicas, mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})


def batch(k, rows=19):
    rng = np.random.default_rng(0)
    return mgpu.split_batch(rng.normal(size=(rows, 6)),
                            rng.integers(0, 4, rows), on(*range(k)))


def loss_of(output, y):
    from torch.nn.functional import cross_entropy
    return cross_entropy(output, y, reduction="none")


def forward_backward(replicas, shards, apart):
    DROPPED.clear()
    X, y = shards
    with mgpu.record():
        if apart:
            replicas.compute_gradients(X, lambda i, out: loss_of(out, y[i]))
        else:
            losses = [loss_of(out, labels)
                      for out, labels in zip(replicas(X), y)]
    if not apart:
        mgpu.backward(losses)


@REENTRANT
@pytest.mark.parametrize("options, apart, k", [
    (dict(rate=0.0), True, 3), (dict(rate=0.0), False, 1), (dict(), False, 3),
    (dict(functional=True), True, 3), (dict(first=True), True, 3)], ids=str)
def test_gradients_and_statistics_are_those_without_checkpoints(
        reentrant, options, apart, k):
    """Also where layers move into checkpoints later. Functional dropout, too:
    all threads share torch's default stream, which checkpoints set. (Dropout
    layers draw other masks there, but the same ones again.)"""
    import torch
    found, drops = [], "rate" not in options and not options.get("functional")
    for begin in (3, 0, 1):     # without; with; from the second step on
        replicas, trainer = start(network(reentrant, **options), k)
        X, y = batch(k)
        for x in X if options.get("first") else ():
            x.requires_grad_(reentrant)     # which torch needs then
        mgpu.seed(1)
        torch.manual_seed(2)
        own = []
        for step in range(3):
            replicas.net.checkpointed = step >= begin
            forward_backward(replicas, (X, y), apart)
            own += [mgpu.to_numpy(p.grad()) for p in replicas.params()]
            trainer.step(11)
        found.append(own + [mgpu.to_numpy(x) for p in
                            replicas.all_parameters() for x in p.list_data()])
    for expected, *others in zip(*found, strict=True):
        for x in others if not drops else ():
            assert relative_difference(x, expected) < 1e-12


def synchronized(once, reentrant=False):
    """`network`, whose middle is called once or twice in a checkpoint."""
    net = network(reentrant)
    net.forward = lambda x: net.end(net.call(
        net.middle if once else lambda x: net.middle(net.middle(x)),
        net.start(x)))
    return net


def test_joint_statistics_and_masks_are_those_of_the_forward_pass(devices):
    """As without a checkpoint, with the same masks."""
    found = []
    for checkpointed in (True, False):
        replicas, trainer = start(synchronized(True), len(devices),
                                  batch_norm="sync")
        replicas.net.checkpointed = checkpointed
        mgpu.seed(1)
        for _ in range(3):
            forward_backward(replicas, batch(len(devices)), False)
            trainer.step(11)
        found.append(replicas.export_numpy())
    for name, x in found[0].items():
        assert relative_difference(x, found[1][name]) < 1e-12


def test_data_parallel_computes_joint_statistics_again(devices):
    """As plain torch on one device, which moves running statistics twice."""
    import torch
    found = []
    for wrap in (lambda net: net, lambda net: mgpu.DataParallel(
            net, devices, batch_norm="sync")):
        net = synchronized(True)
        net.drop.p = 0.0
        model = wrap(net)
        (X, y), = zip(*batch(1))
        for _ in range(3):
            DROPPED.clear()
            loss_of(model(X), y).mean().backward()
        found.append({**net.state_dict(), "gradient": net.shared.weight.grad})
    for name, x in found[0].items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [dict(once=False), dict(
    once=True, reentrant=True)], ids=["two calls", "reentrant"])
def test_reentrant_checkpoints_with_sync_raise(options, devices):
    replicas, _ = start(synchronized(**options), len(devices),
                        batch_norm="sync")
    with pytest.raises(RuntimeError, match="Use use_reentrant=False"):
        forward_backward(replicas, batch(len(devices)), False)


@REENTRANT
def test_given_masks_are_used_again(reentrant):
    """Those that `mgpu.parity` gives to both networks."""
    found, shards = [], batch(2)
    for checkpointed in (True, False):
        replicas, _ = start(network(reentrant), 2)
        masks = Masks(seed=0)
        masks.begin(0, [len(x) for x in shards[0]])
        replicas.net.checkpointed = checkpointed
        with replicas.network.use_masks(masks):
            forward_backward(replicas, shards, False)
        found.append([g for p in replicas.params() for g in p.list_grad()])
    for g, h in zip(*found):
        assert relative_difference(g, h) < 1e-12


def test_outputs_in_a_user_defined_object(devices):
    """The backward pass finds the tensors there: it counts no batch again."""
    from types import SimpleNamespace

    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))

        def forward(self, x):
            return SimpleNamespace(out=checkpoint(
                self.body, x, use_reentrant=False))
    net = Network().double()
    replicas, _ = start(net, len(devices))
    with mgpu.record():
        losses = [output.out.sum(1) for output in replicas(batch(3)[0])]
    mgpu.backward(losses)
    assert net.body[1].num_batches_tracked == 1


@REENTRANT
def test_flags_are_as_they_were_after_a_pass(reentrant):
    """Also after an error in the backward pass."""
    net = network(reentrant)
    net.norm.eval()
    modes = [m.training for m in net.modules()]
    replicas, trainer = start(net, 2)
    for fails in (False, True, False):
        handle = net.start.weight.register_hook(
            lambda g, fails=fails: 1 / (1 - fails) and None)
        with contextlib.suppress(ZeroDivisionError):
            forward_backward(replicas, batch(2), False)
            trainer.step(11)
        handle.remove()
        assert [m.training for m in net.modules()] == modes
    assert trainer.num_update == 2
