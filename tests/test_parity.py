"""MXNet against PyTorch, in lock-step, in float64."""
import numpy as np
import pytest

import mgpu
from helpers import convnet
from lockstep import Side, compare_step

#: DESIGN: lock-step holds to 1e-12 for LeNet-like networks; ResNet-18 sums
#: over 10^4 terms a layer, and its convolution biases are noise at the floor.
CONV, RESNET = 1e-12, 1e-10


def batch(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((n, 1, 28, 28)), rng.integers(0, 10, n).astype("int32")


def check(sides, batches, tolerance):
    a, b = sides
    means = []
    before = a.state()
    for X, y in batches:
        gaps, mean = compare_step(a, b, X, y)
        means.append(mean)
        for stage, (gap, where) in gaps.items():
            assert gap <= tolerance, f"{stage} {where}: {gap:.1e}"
    after = a.state()
    assert any((before[n] != after[n]).any() for n in before)
    return means


@pytest.mark.parametrize("k", (1, 2))
def test_resnet18(k):
    sides = [Side(name, mgpu.models.resnet18, k,
                  init=mgpu.initializers.Xavier())
             for name in ("mxnet", "torch")]
    for name, value in sides[0].state().items():
        assert (value == sides[1].state()[name]).all(), name
    check(sides, [batch(4)], RESNET)


@pytest.mark.parametrize("policy", ("per_device", "average", "sync"))
@pytest.mark.parametrize("rows", (5, 8))
def test_convnet(policy, rows, devices):
    """Batch norm under every policy, short and uneven batches included."""
    sides = [Side(name, lambda: convnet(mgpu.get_backend(), 1, 10),
                  len(devices), batch_norm=policy,
                  options={"learning_rate": 0.125, "momentum": 0.5,
                           "wd": 2.0 ** -10},
                  init=mgpu.initializers.Xavier())
             for name in ("mxnet", "torch")]
    X, y = batch(rows)
    # one batch again and again: the loss must fall
    means = check(sides, [(X, y)] * 6, CONV)
    assert means[-1] < means[0]


@pytest.mark.parametrize("fault", ("unbiased", "bias", "swap"))
def test_a_planted_fault_is_seen(fault, monkeypatch):
    """The measure rejects wrong arithmetic, at the floor too."""
    from mgpu.backends._torch import network
    right = network.gluon_batch_norm
    a, b = [Side(name, lambda: convnet(mgpu.get_backend(), 1, 10), 2,
                 init=mgpu.initializers.Xavier())
            for name in ("mxnet", "torch")]
    X, y = batch(8)
    assert max(g for g, _ in compare_step(a, b, X, y)[0].values()) <= CONV
    if fault == "unbiased":
        def unbiased(call, index):
            n = call.x.numel() // call.x.shape[1]
            before = call.running_var.clone()
            out = right(call, index)
            call.running_var.add_(
                (call.running_var - call.momentum * before) / (n - 1))
            return out
        monkeypatch.setattr(network, "gluon_batch_norm", unbiased)
        stage, least = "statistic", 1e-6
    elif fault == "bias":
        # in a gradient whose true value is zero
        step = b.trainer.allreduce_grads

        def wrong():
            step()
            p = next(p for p in b.replicas.params() if p.kind == "bias")
            for g in p.list_grad():
                g += 1e-9
        monkeypatch.setattr(b.trainer, "allreduce_grads", wrong)
        stage, least = "gradient", 1e-11
    else:
        monkeypatch.setattr(
            b, "step", lambda X, y, step=b.step: step(X[::-1].copy(), y))
        stage, least = "loss", 1e-3
    assert compare_step(a, b, X, y)[0][stage][0] > least
