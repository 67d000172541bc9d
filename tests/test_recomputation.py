"""Activation checkpoints (torch): what a backward pass computes again is what
the forward pass has computed, and the gradients are those without them.

Networks are in float64, and the judge is plain torch without checkpoints,
with the masks of the forward pass.
"""
import contextlib
import copy

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


def network(reentrant, *, rate=0.5, functional=False, first=False):
    """A network whose middle is called twice, inside checkpoints; ``masks``
    are those of its dropout, ``masks_again`` those of the recomputation."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.end = nn.Linear(6, 8), nn.Linear(8, 4)
            self.shared, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.drop = nn.Dropout(rate)
            self.checkpointed, self.given = True, None
            self.masks, self.masks_again = [], []

        def middle(self, x):
            y = self.norm(self.shared(x).tanh())
            if self.given is not None:
                return y * self.given.pop(0)
            z = nn.functional.dropout(y, rate, self.training) if functional \
                else self.drop(y)
            masks = self.masks if torch._C._current_graph_task_id() == -1 \
                else self.masks_again
            masks.append((z / y).detach().nan_to_num())
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
    X, y = shards
    with mgpu.record():
        if apart:
            replicas.compute_gradients(X, lambda i, out: loss_of(out, y[i]))
        else:
            losses = [loss_of(out, labels)
                      for out, labels in zip(replicas(X), y)]
    if not apart:
        mgpu.backward(losses)


def judges(replicas):
    """A plain copy of each replica, without checkpoints."""
    found = []
    for replica in replicas.of_engine():
        judge = mgpu.parity.gluonize(copy.deepcopy(replica.module)).train()
        judge.checkpointed = False
        found.append(judge)
        replica.module.masks, replica.module.masks_again = [], []
    return found


@REENTRANT
@pytest.mark.parametrize("options, apart", [
    (dict(rate=0.0), True), (dict(rate=0.0), False), (dict(), False),
    (dict(functional=True), True), (dict(first=True), True)], ids=str)
@pytest.mark.device_counts(1, 3)
def test_gradients_and_statistics_are_those_without_checkpoints(
        devices, reentrant, options, apart):
    """Functional dropout, too: all threads share torch's default stream,
    which checkpoints set."""
    k = len(devices)
    replicas, trainer = start(network(reentrant, **options), k)
    X, y = batch(k)
    for x in X if options.get("first") else ():
        x.requires_grad_(reentrant)     # which torch needs then
    for _ in range(4):
        plain = judges(replicas)
        forward_backward(replicas, (X, y), apart)
        for i, (judge, replica) in enumerate(zip(plain, replicas.of_engine())):
            module = replica.module
            judge.given = list(module.masks)
            loss_of(judge(X[i].detach()), y[i]).sum().backward()
            for expected, p in zip(judge.parameters(), module.parameters()):
                assert relative_difference(p.grad, expected.grad) < 1e-12
            for expected, b in zip(judge.buffers(), module.buffers()):
                assert relative_difference(b, expected) < 1e-12
            if reentrant:       # others stop when they have what they need
                again = reversed(module.masks_again)
                for mask, other in zip(module.masks, again, strict=True):
                    assert (mask == other).all()
        trainer.step(11)


@REENTRANT
def test_given_masks_are_used_again(reentrant):
    """Those that `mgpu.parity` gives to both networks."""
    found, shards = [], batch(2)
    for checkpointed in (True, False):
        replicas, _ = start(network(reentrant), 2)
        masks = Masks(seed=0)
        masks.begin(0, [len(x) for x in shards[0]])
        for replica in replicas.of_engine():
            replica.module.checkpointed = checkpointed
        with replicas.network.use_masks(masks):
            forward_backward(replicas, shards, False)
        found.append([g for p in replicas.params() for g in p.list_grad()])
    for g, h in zip(*found):
        assert relative_difference(g, h) < 1e-12


@pytest.mark.parametrize("wrap", ["attribute", "mapping"])
def test_outputs_in_an_object_of_the_users(devices, wrap):
    """The backward pass finds the tensors there: it counts no batch again."""
    from collections import UserDict
    from types import SimpleNamespace

    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))

        def forward(self, x):
            y = checkpoint(self.body, x, use_reentrant=False)
            return SimpleNamespace(out=y) if wrap == "attribute" \
                else UserDict(out=y)
    net = Network().double()
    replicas, trainer = start(net, len(devices))
    mgpu.train_batch(
        np.random.default_rng(0).normal(size=(8, 6)), np.zeros(8), replicas,
        lambda output, y: (vars(output).get("out") if wrap == "attribute"
                           else output["out"]).sum(1), trainer)
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


def test_layers_that_meet_in_a_checkpoint_are_refused():
    for reentrant in (True, False):
        replicas, _ = start(network(reentrant, rate=0.0), 2,
                            batch_norm="sync")
        with pytest.raises(RuntimeError, match="Use batch_norm='per_device'"):
            forward_backward(replicas, batch(2), False)


@REENTRANT
def test_a_dropout_layer_may_not_move_into_a_checkpoint(reentrant):
    """For one step: the other replicas did not wait for this one."""
    net = network(reentrant)
    net.checkpointed = False
    replicas, trainer = start(net, 2)
    for _ in range(2):
        forward_backward(replicas, batch(2), False)
        trainer.step(11)
    for replica in replicas.of_engine():
        replica.module.checkpointed = True
    with pytest.raises(RuntimeError, match="Run this step again"):
        forward_backward(replicas, batch(2), False)
    forward_backward(replicas, batch(2), False)
    trainer.step(11)
    assert trainer.num_update == 3
