"""Training and eval modes of torch's layers: those that the user sets."""
import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from nets import (normalized, perceptron, plain_or_replicated,
                  trains_as_plain)

pytestmark = pytest.mark.parametrize("backend", [
    name for name in BACKENDS if name == "torch"], indirect=True)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_layer_in_eval_mode_is_frozen(backend, devices, when):
    """Under a network in training mode; it normalizes by its statistics,
    which stay. Evaluation leaves the modes as they are."""
    made = []

    def make():
        made.append(normalized())
        made[-1][1].running_mean += 0.5
        if when == "before":
            made[-1][1].eval()
        return made[-1]
    trains_as_plain(make, devices, lambda net: net[1].eval())
    for net in made:
        assert [m.training for m in net] == [True, False, True]
        assert (net[1].running_mean == 0.5).all()


@pytest.mark.parametrize("batch_norm", ["per_device", "sync"])
def test_a_network_in_eval_mode_predicts_while_others_train(
        backend, devices, batch_norm):
    """A teacher next to its student; gradients of its predictions."""
    import torch
    net, x = normalized().eval(), np.random.default_rng(0).normal(size=(7, 6))
    net[1].running_mean += 0.5
    expected = net(torch.from_numpy(x)).detach().numpy()
    replicas = mgpu.initialize(net, devices, batch_norm=batch_norm)
    shards, _ = mgpu.split_batch(x, x, replicas.devices)
    with mgpu.record():
        with torch.no_grad():
            found = replicas(shards)
            one = replicas[0](shards[0])
        assert mgpu.get_backend().is_training() and torch.is_grad_enabled()
    found = np.concatenate([mgpu.to_numpy(out) for out in found])
    assert np.abs(found - expected).max() < 1e-12
    assert not one.requires_grad
    assert (net[1].running_mean == 0.5).all()
    assert not any(m.training for m in net.modules())
    shards = [shard.requires_grad_() for shard in shards]
    with mgpu.record(train_mode=False):
        mgpu.backward([out.sum() for out in replicas(shards)])
    x = torch.from_numpy(x).requires_grad_()
    net(x).sum().backward()
    assert np.abs(np.concatenate([mgpu.to_numpy(shard.grad)
                                  for shard in shards])
                  - x.grad.numpy()).max() < 1e-12


def test_a_network_in_eval_mode_is_not_trained(backend, devices):
    net = normalized().eval()
    before = [x.clone() for x in net.state_dict().values()]
    with pytest.raises(ValueError) as caught:
        plain_or_replicated(net, devices)
    assert str(caught.value) == (
        "a network in eval mode does not train; received Sequential, which "
        "is, inside record(). Call net.train() to train it; use "
        "mgpu.record(train_mode=False) for gradients of its predictions, and "
        "torch.no_grad() for predictions without them.")
    assert all((x == y).all()
               for x, y in zip(net.state_dict().values(), before))
    net = normalized().eval()
    net[2].train()
    with pytest.raises(ValueError, match="received '2' in training mode"):
        plain_or_replicated(net, devices)


def partly(*flagged):
    """In eval mode, with a layer that adds in training mode."""
    import torch
    from torch import nn

    class Flagged(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(3 * x, 1.0) + x * 5 \
                if self.training else x
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), Flagged(), nn.Dropout(0.5),
                        nn.BatchNorm1d(4), Flagged()).double().eval()
    for number in flagged:
        net[number].train()
    return net


def rows_of(replicas, x):
    """The outputs of all rows of `x`."""
    shards, _ = mgpu.split_batch(x, x, replicas.devices)
    return np.concatenate([mgpu.to_numpy(out) for out in replicas(shards)])


X = np.random.default_rng(0).normal(size=(9, 6))


def test_a_layer_in_training_mode_trains_in_predictions(backend, devices):
    """Under a network in eval mode: Monte Carlo dropout. By itself and in
    gradients of predictions."""
    import torch
    net, plain = partly(1), partly(1)
    replicas = mgpu.initialize(net, devices)
    for mode in (True, False):
        given = torch.from_numpy(X).requires_grad_()
        expected = plain(given)
        assert np.abs(rows_of(replicas, X)
                      - expected.detach().numpy()).max() < 1e-12
        expected.sum().backward()
        shards, _ = mgpu.split_batch(X, X, devices)
        shards = [shard.requires_grad_() for shard in shards]
        with mgpu.record(train_mode=False):
            mgpu.backward([out.sum() for out in replicas(shards)])
        assert np.abs(np.concatenate([mgpu.to_numpy(shard.grad)
                                      for shard in shards])
                      - given.grad.numpy()).max() < 1e-12
        assert [m.training for m in net.modules()] \
            == [m.training for m in plain.modules()]
        for one in (net, plain):
            one[1].train(not mode)
            one[4].train(mode)


def test_dropout_in_training_mode_draws_in_predictions(backend, devices):
    """By mgpu's seed, other numbers in each prediction."""
    net = partly()
    replicas = mgpu.initialize(net, devices)
    once = rows_of(replicas, X)
    assert (once == rows_of(replicas, X)).all()
    net[2].train()
    drawn = []
    for _ in range(2):
        mgpu.seed(3)
        drawn += [rows_of(replicas, X), rows_of(replicas, X)]
    assert (drawn[0] != drawn[1]).any() and (drawn[0] != once).any()
    assert (drawn[0] == drawn[2]).all() and (drawn[1] == drawn[3]).all()


def test_a_batch_norm_in_training_mode_is_refused_in_predictions(
        backend, devices):
    """The statistics move where the user calls the network itself."""
    net = partly(3)
    replicas = mgpu.initialize(net, devices)
    with pytest.raises(ValueError, match=r"received \['3'\], in a network in "
                       r"eval mode.*replicas\.net itself"):
        rows_of(replicas, X)
    net(mgpu.put(X, devices[0]))
    net[3].eval()
    assert (net[3].running_mean != 0).all()
    rows_of(replicas, X)
    for p in replicas.statistics():
        assert all((y == p.data()).all() for y in p.list_data())


@pytest.mark.parametrize("told", [True, False])
def test_the_users_own_train_is_called_where_the_mode_changes(
        backend, devices, told):
    """It may freeze layers, or change more than flags."""
    from torch import nn

    class Frozen(nn.Sequential):
        calls = 0

        def train(self, mode=True):
            super().train(mode)
            self.calls += 1
            self[1].eval()
            return self

    def made():
        return Frozen(*normalized()).double()
    plain = plain_or_replicated(made().train())
    net = made().train() if told else made()
    calls = net.calls
    found = plain_or_replicated(net, devices)
    for name, value in plain.items():
        assert np.abs(found[name] - value).max() < 1e-12, name
    assert (net.calls > calls) is not told
    net = made().train()
    replicas = mgpu.initialize(net, devices)
    calls = net.calls
    replicas[0](mgpu.put(np.ones((2, 6)), mgpu.cpu(0)))     # it predicts
    assert net.calls == calls
    assert [m.training for m in net] == [True, False, True]


def test_what_is_frozen_after_the_forward_pass_has_no_gradient(
        backend, devices):
    """As in plain torch, and it is not updated: as in plain torch, where the
    gradient was set to None."""
    import torch
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(7, 6))), torch.arange(7) % 3

    def loss(pred, label):
        return torch.nn.functional.cross_entropy(pred, label, reduction="none")
    plain, net = perceptron(), perceptron()
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    replicas = mgpu.initialize(net, devices)
    for p in replicas.params():
        p.grad_req = "add"
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
    for frozen in (False, True, False):
        optimizer.zero_grad()
        values = loss(plain(x), y).mean()
        plain[0].requires_grad_(not frozen)
        values.backward()
        optimizer.step()
        shards, labels = mgpu.split_batch(x, y, replicas.devices)
        with mgpu.record():
            losses = mgpu.parallel(loss, replicas(shards), labels)
        net[0].requires_grad_(not frozen)
        mgpu.backward(losses)
        trainer.step(7)
        replicas.zero_grad()
        for p in (plain, net):
            p[0].requires_grad_(True)
    for p, wanted in zip(replicas.params(), plain.parameters()):
        for found in p.list_data():
            assert abs(found - wanted).max() < 1e-12
