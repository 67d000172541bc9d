"""`mgpu.parity.gluonize`: a plain PyTorch loop with Gluon's batch norm."""
import copy

import numpy as np
import pytest

import mgpu
from mgpu import parity
from parity.steps import trained_batch_norm


@pytest.fixture
def torch():
    with mgpu.using_backend("torch"):
        import torch
        return torch


def net(torch, dims=2):
    nn = torch.nn
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return nn.Sequential(conv(2, 3, 1), norm(3), nn.ReLU()).double()


def data(dims, rows=4):
    return np.random.default_rng(0).normal(size=(rows, 2) + (3,) * dims)


@pytest.mark.parametrize("dims", (1, 2, 3))
def test_plain_training_keeps_gluons_statistics(torch, dims):
    """Against MXNet itself, in a plain PyTorch pass."""
    module = parity.gluonize(net(torch, dims))
    module.train()
    x = data(dims)
    module(torch.tensor(x)).sum().backward()
    inside = module[0](torch.tensor(x)).detach().numpy()
    with mgpu.using_backend("mxnet"):
        layer = trained_batch_norm(inside)
    for ours, gluons in ((module[1].running_mean, layer.running_mean),
                         (module[1].running_var, layer.running_var)):
        gluons = gluons.data().asnumpy()
        # a mean and a variance over at most 108 float64 numbers
        assert np.abs(ours.numpy() - gluons).max() < 1e-14
    native = net(torch, dims)
    native.load_state_dict(parity.gluonize(native, inplace=False)
                           .state_dict())
    native(torch.tensor(x))
    assert np.abs(native[1].running_var.numpy()
                  - gluons).max() > 1e-4      # the unbiased one is another


def test_state_dict_and_gradients_stay(torch):
    module = net(torch)
    before = copy.deepcopy(module.state_dict())
    module[1].marker = object()
    same = parity.gluonize(module)
    assert same is module and hasattr(module[1], "marker")
    assert list(module.state_dict()) == list(before)
    assert all(torch.equal(v, before[k])
               for k, v in module.state_dict().items())
    other = parity.gluonize(net(torch), undo=True)
    other.load_state_dict(before)
    x = torch.tensor(data(2))
    grads = []
    for one in (module, other):
        one(x).square().sum().backward()
        grads.append([p.grad.clone() for p in one.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*grads))
    assert int(module[1].num_batches_tracked) == 1


def test_undo_and_copy(torch):
    module = net(torch)
    changed = parity.gluonize(module, inplace=False)
    assert type(module[1]) is torch.nn.BatchNorm2d
    assert changed is not module and type(changed[1]) is not type(module[1])
    assert isinstance(changed[1], torch.nn.BatchNorm2d)
    assert parity.gluonize(changed) is changed      # twice is once
    parity.gluonize(changed, undo=True)
    assert type(changed[1]) is torch.nn.BatchNorm2d
    assert type(parity.gluonize(changed, undo=True)[1]) \
        is torch.nn.BatchNorm2d


def test_prediction_moves_nothing(torch):
    module = parity.gluonize(net(torch))
    before = module[1].running_var.clone()
    module.eval()
    module(torch.tensor(data(2)))
    assert torch.equal(module[1].running_var, before)


def test_statistics_can_be_recalibrated(torch):
    """As for stochastic weight averaging, without gradients."""
    found = []
    for recalibrate in (
            lambda m: torch.optim.swa_utils.update_bn(
                [torch.tensor(data(2))], m),
            lambda m: m.train() and [m[1].reset_running_stats()]
            and setattr(m[1], "momentum", None) or m(torch.tensor(data(2)))):
        torch.manual_seed(0)
        module = parity.gluonize(net(torch))
        recalibrate(module)
        found.append(module[1].running_var)
    assert torch.equal(*found) and (found[0] != 1).all()


def test_it_survives_a_copy_and_a_file(torch, tmp_path):
    import pickle
    module = pickle.loads(pickle.dumps(parity.gluonize(net(torch))))
    assert type(copy.deepcopy(module)[1]) is type(module[1])
    assert type(module[1]) is not torch.nn.BatchNorm2d


def test_what_is_refused(torch):
    class Own(torch.nn.BatchNorm2d):
        pass
    module = torch.nn.Sequential(torch.nn.BatchNorm2d(2), Own(2))
    with pytest.raises(TypeError, match="received a network with .'Own'."):
        parity.gluonize(module)
    assert type(module[0]) is torch.nn.BatchNorm2d      # nothing changed
    with pytest.raises(TypeError, match="function without arguments"):
        parity.gluonize(3)


def test_a_gluon_network_is_gluons_already():
    with mgpu.using_backend("mxnet"):
        from mxnet.gluon import nn
    block = nn.BatchNorm()
    assert parity.gluonize(block) is block
