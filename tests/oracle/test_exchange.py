"""What moves between devices: collectives and splitting; and masks."""
import numpy as np
import pytest

import mgpu
import oracle
from mgpu import collectives
from mgpu.nn import functional as F
from threeway import (EXACT, ROUNDING, agree, compare, covers, host, on_each,
                      scatter)

RNG = np.random.default_rng(3)
#: shorter than, not a multiple of, longer than four devices
SHAPES = ((1,), (3, 5), (6, 2, 3))


def arrays(k, shape, dtype="float64", seed=0):
    rng = np.random.default_rng([seed, k, *shape])
    return [(100 * rng.normal(size=shape)).astype(dtype) for _ in range(k)]


# -- collectives --------------------------------------------------------------

OURS = [a for a in collectives.ALGORITHMS if a != "native"]


@covers(*(f"collectives.{a}" for a in OURS))
@pytest.mark.parametrize("op", collectives.OPS)
@pytest.mark.parametrize("algorithm", OURS)
def test_allreduce(op, algorithm, devices):
    """The bits of a sum in the algorithm's own order of additions."""
    k = len(devices)
    for shape in SHAPES:
        for dtype in ("float64", "float32"):
            parts = arrays(k, shape, dtype)
            root = k - 1 if algorithm in ("naive", "tree") else 0

            def run(backend):
                data = scatter(parts, devices)
                mgpu.allreduce(data, op=op, algorithm=algorithm, root=root)
                return host(data)
            total = oracle.reduced(parts, op, algorithm, root)
            agree(run, [total] * k, EXACT)


def test_another_order_is_another_sum():
    """The bits tell the algorithms apart."""
    parts = arrays(4, (50,))
    sums = [oracle.reduced(parts, "sum", a) for a in
            ("naive", "tree", "ring", "sharded")]
    for i, a in enumerate(sums):
        for b in sums[:i]:
            compare(a, b, ROUNDING)
            with pytest.raises(AssertionError):
                compare(a, b, EXACT)


@pytest.mark.parametrize("op", collectives.OPS)
def test_the_other_collectives(op, devices):
    k = len(devices)
    for shape in SHAPES:
        parts, root = arrays(k, shape), k // 2
        uneven = [np.repeat(x, i + 1, 0) for i, x in enumerate(parts)]
        lists = [arrays(k, s) for s in SHAPES]

        def run(backend):
            reduced, sent = (scatter(parts, devices) for _ in range(2))
            mgpu.reduce(reduced, op=op, root=root)
            mgpu.broadcast(sent, root=root)
            many = [scatter(x, devices) for x in lists]
            mgpu.allreduce_many(many, op=op)
            return [host(x) for x in (
                reduced, sent, mgpu.allgather(scatter(uneven, devices)),
                mgpu.reducescatter(scatter(parts, devices), op=op), many)]

        left = list(parts)
        left[root] = oracle.reduced(parts, op, root=root)
        wanted = [left, [parts[root]] * k, [np.concatenate(uneven)] * k,
                  [oracle.chain(oracle.first([oracle.pieces(x, k)[i]
                                              for x in parts], i), op)
                   for i in range(k)],
                  [[oracle.reduced(x, op)] * k for x in lists]]
        agree(run, wanted, EXACT)


@pytest.mark.parametrize("sizes", [(5,) * 7, (9, 5, 4, 3, 3), (1, 2, 3, 4),
                                   (0, 7, 0)])
def test_assign_roots(sizes, devices):
    k = len(devices)
    assert mgpu.assign_roots(sizes, k) == oracle.roots(sizes, k)


@covers("functional.allreduce", "functional.allgather")
@pytest.mark.parametrize("op", ("sum", "mean"))
def test_differentiable_collectives(op, devices):
    """The gradient of a sum is a sum of gradients, that of a concatenation
    their slices."""
    k = len(devices)
    parts, coefficients = (arrays(k, (3, 2), seed=i) for i in (0, 1))
    wide = arrays(k, (3, 2 * k))

    def run(backend):
        x = scatter(parts, devices)
        for leaf in x:
            mgpu.attach_grad(leaf)
        with mgpu.record():
            total = F.allreduce(x, op=op)
            row = F.allgather(x, axis=1)
            losses = [F.sum(t * c) + F.sum(r * w) for t, c, r, w in zip(
                total, scatter(coefficients, devices), row,
                scatter(wide, devices))]
        mgpu.backward(losses)
        return [host(x) for x in (total, row, [mgpu.grad(v) for v in x])]
    share = oracle.chain(coefficients, op)
    slices = np.split(sum(wide), k, 1)
    agree(run, [[oracle.chain(parts, op)] * k,
                [np.concatenate(parts, 1)] * k,
                [share + s for s in slices]], ROUNDING)


# -- splitting ----------------------------------------------------------------

WEIGHTS = ([1, 1, 1, 1], [2, 1, 3, 1], [0.1, 0.7, 0.1, 0.1], [1, 2, 2, 1])


def test_shard_bounds(devices):
    k = len(devices)
    for n in range(71):
        for weights in (None, *WEIGHTS):
            sizes = [len(p) for p in oracle.pieces(np.zeros(n), k)] \
                if weights is None else oracle.weighted_sizes(n, weights[:k])
            ends = np.cumsum(sizes).tolist()
            bounds = mgpu.shard_bounds(
                n, k, None if weights is None else weights[:k])
            assert bounds == list(zip([0, *ends[:-1]], ends))


def test_masks_are_zero_or_scaled(devices):
    """Dropout masks are random: no two backends agree in them. Each keeps
    about a share 1 - p, scaled by 1 / (1 - p) (which MXNet rounds to float32:
    here it is 2), and prediction keeps all."""
    p, n = 0.5, 4000

    def run(backend):
        if backend.name == "mxnet":
            from mxnet.gluon import nn
            net = nn.HybridSequential()
            net.add(nn.Dropout(p))
        else:
            from torch import nn
            net = nn.Sequential(nn.Dropout(p))
        replicas = mgpu.initialize(net, devices, "uniform", dtype="float64")
        shards = scatter([np.ones((1, n))] * len(devices), devices)
        masks = []
        for seed in (1, 1, 2):
            mgpu.seed(seed)
            with mgpu.record():
                masks.append(np.concatenate(host(replicas(shards))))
        compare(host(replicas(shards)), host(shards), EXACT)
        return masks
    for first, again, other in on_each(run).values():
        assert set(first.ravel()) == {0.0, 1 / (1 - p)}
        compare(first, again, EXACT)
        assert (first != other).any()
        # six standard deviations of the share of n draws
        assert (abs((first > 0).mean(1) - (1 - p))
                < 6 * (p * (1 - p) / n) ** 0.5).all()
        for a, b in zip(first, first[1:]):      # a stream for each device
            assert (a != b).any()
