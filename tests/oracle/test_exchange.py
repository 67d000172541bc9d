"""What moves between devices and what is computed on one: collectives,
splitting, counting, and the functions of an engine."""
import numpy as np
import pytest

import mgpu
import oracle
from helpers import mlp, numerical_gradient
from mgpu import collectives
from mgpu import functional as F
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


@covers("allreduce", *(f"collectives.{a}" for a in OURS))
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


@covers("reduce", "broadcast", "allgather", "reducescatter", "allreduce_many")
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


@covers("assign_roots")
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


@covers("shard_bounds")
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


@covers("split_and_load", "split_batch", "put", "to_numpy")
@pytest.mark.parametrize("rows", (1, 3, 8))
@pytest.mark.parametrize("axis", (0, 1, -1))
def test_splitting(rows, axis, devices):
    k = len(devices)
    shape = [4, 5, 3]
    shape[axis] = rows
    rng = np.random.default_rng(1)
    data = [rng.normal(size=shape), rng.integers(0, 9, shape),
            rng.normal(size=shape).astype("float32")]

    def run(backend):
        native = [mgpu.put(x, devices[-1]) for x in data]
        found = [host(mgpu.split_and_load(x, devices, axis, even_split=False))
                 for x in (*data, *native)]
        return [*found, host(mgpu.split_and_load(
            data[0], devices, axis, weights=WEIGHTS[1][:k]))]
    even = [oracle.pieces(x, k, axis) for x in data]
    ends = np.cumsum(oracle.weighted_sizes(rows, WEIGHTS[1][:k]))[:-1]
    agree(run, [*even, *even, np.split(data[0], ends, axis)], EXACT)
    if axis == 0:
        X, y = data[0], data[1][:, 0, 0]
        agree(lambda backend: [host(x) for x in mgpu.split_batch(
            X, y, devices)], [oracle.pieces(X, k), oracle.pieces(y, k)],
            EXACT)


# -- counting -----------------------------------------------------------------

@covers("accuracy", "evaluate_accuracy_gpu", "evaluate_accuracy_gpus")
def test_accuracy(devices):
    """Ties among few integers, batches of any size; the same fraction of
    integers everywhere."""
    rng = np.random.default_rng(4)
    values = {"0.weight": rng.integers(-2, 3, (5, 6)).astype(float),
              "0.bias": rng.integers(-1, 2, 5).astype(float),
              "2.weight": rng.integers(-1, 2, (3, 5)).astype(float),
              "2.bias": np.zeros(3)}
    values["2.weight"][2] = values["2.weight"][1]       # always a tie
    layers = [(oracle.dense, ("0.weight", "0.bias")), (oracle.relu, ()),
              (oracle.dense, ("2.weight", "2.bias"))]
    batches = [(rng.integers(-2, 3, (n, 6)).astype(float),
                rng.integers(0, 3, n)) for n in (7, 8, 1, 2)]
    net = oracle.Network(layers, values)
    scores = [net.predict(X) for X, _ in batches]
    counts = [oracle.correct(s, y) for s, (_, y) in zip(scores, batches)]
    assert 0 < sum(counts) < 18

    def run(backend):
        replicas = mgpu.initialize(mlp(backend), devices,
                                   "uniform", dtype="float64")
        replicas.import_numpy(values)
        return [mgpu.evaluate_accuracy_gpus(replicas, batches),
                mgpu.evaluate_accuracy_gpu(replicas, batches, devices[-1]),
                [mgpu.accuracy(mgpu.put(s, devices[0]),
                               mgpu.put(y, devices[0]))
                 for s, (_, y) in zip(scores, batches)]]
    whole = sum(counts) / sum(len(y) for _, y in batches)
    agree(run, [whole, whole, counts], EXACT)


# -- functions of an engine ---------------------------------------------------

def _away(shape, low=0.1, high=1.5):
    """Not near the kinks of |x|, relu, maximum and the like."""
    return RNG.choice([-1, 1], shape) * RNG.uniform(low, high, shape)


X, Y, P = _away((3, 4)), _away((3, 4)), RNG.uniform(0.2, 2, (3, 4))
Y = np.where(abs(X - Y) < 0.05, Y + 0.1, Y)
PICTURES, KERNEL, BIAS = _away((2, 3, 7, 6)), _away((4, 3, 3, 3)), _away((4,))
INDEX = np.array([[0, 2, 1, 2]])
#: with room between the largest and the next
DISTINCT = RNG.permutation(2 * 3 * 6 * 6).reshape(2, 3, 6, 6) / 40.0


def _wide(x, y):
    return np.concatenate([x, y], 1)


#: (name, function of F, the same in NumPy, arguments); every argument gets a
#: gradient, which is the numerical one of the NumPy function
OPS = [
    ("abs", lambda F, x: F.abs(x), np.abs, [X]),
    ("sign", lambda F, x: F.sign(x) * x, np.abs, [X]),
    ("sqrt", lambda F, x: F.sqrt(x), np.sqrt, [P]),
    ("exp", lambda F, x: F.exp(x), np.exp, [X]),
    ("log", lambda F, x: F.log(x), np.log, [P]),
    ("maximum", lambda F, x, y: F.maximum(x, y), np.maximum, [X, Y]),
    ("maximum", lambda F, x: F.maximum(x, 0.3),
     lambda x: np.maximum(x, 0.3), [np.where(abs(X - 0.3) < 0.05, 1, X)]),
    ("minimum", lambda F, x, y: F.minimum(x, y), np.minimum, [X, Y]),
    ("minimum", lambda F, x: F.minimum(x, 0.3),
     lambda x: np.minimum(x, 0.3), [np.where(abs(X - 0.3) < 0.05, 1, X)]),
    ("relu", lambda F, x: F.relu(x), lambda x: x * (x > 0), [X]),
    ("sigmoid", lambda F, x: F.sigmoid(x), lambda x: 1 / (1 + np.exp(-x)),
     [X]),
    ("softplus", lambda F, x: F.softplus(x), lambda x: np.logaddexp(0, x),
     [X * 20]),
    ("log_softmax", lambda F, x: F.log_softmax(x), oracle.log_softmax, [X]),
    ("log_softmax", lambda F, x: F.log_softmax(x, 0),
     lambda x: oracle.log_softmax(x, 0), [X]),
    ("pick", lambda F, x: F.pick(x, mgpu.put(INDEX[0], x), 0),
     lambda x: np.take_along_axis(x, INDEX, 0)[0], [X]),
    ("nll", lambda F, x: F.nll(x, mgpu.put(INDEX[0], x), 0),
     lambda x: -np.take_along_axis(x, INDEX, 0)[0], [X]),
    ("nll", lambda F, x: F.nll(x, mgpu.put(INDEX[0], x)),
     lambda x: -np.take_along_axis(x, INDEX.T, 1)[:, 0], [X.T.copy()]),
    ("sum", lambda F, x: F.sum(x), np.sum, [X]),
    ("sum", lambda F, x: F.sum(x, (0, 2), keepdims=True),
     lambda x: x.sum((0, 2), keepdims=True), [PICTURES]),
    ("mean", lambda F, x: F.mean(x), np.mean, [X]),
    ("mean", lambda F, x: F.mean(x, -1), lambda x: x.mean(-1), [X]),
    ("dot", lambda F, x, y: F.dot(x, y), np.dot, [X, Y.T.copy()]),
    ("conv2d", lambda F, x, w, b: F.conv2d(x, w, b),
     lambda x, w, b: oracle.conv(x, w, b)[0], [PICTURES, KERNEL, BIAS]),
    ("conv2d", lambda F, x, w: F.conv2d(x, w, stride=2, padding=1),
     lambda x, w: oracle.conv(x, w, np.zeros(4), 2, 1)[0],
     [PICTURES, KERNEL]),
    ("avg_pool2d", lambda F, x: F.avg_pool2d(x, 2),
     lambda x: oracle.avg_pool(x, 2)[0], [PICTURES]),
    ("avg_pool2d", lambda F, x: F.avg_pool2d(x, 3, 2),
     lambda x: oracle.avg_pool(x, 3, 2)[0], [PICTURES]),
    ("max_pool2d", lambda F, x: F.max_pool2d(x, 2),
     lambda x: oracle.max_pool(x, 2), [DISTINCT]),
    ("max_pool2d", lambda F, x: F.max_pool2d(x, 3, 1),
     lambda x: oracle.max_pool(x, 3, 1), [DISTINCT]),
    ("concat", lambda F, x, y: F.concat([x, y], 1), _wide, [X, Y]),
    ("slice_axis", lambda F, x: F.slice_axis(x, 1, 1, 3),
     lambda x: x[:, 1:3], [X]),
    ("flat_view", lambda F, x: F.flat_view(x), np.ravel, [X]),
    ("zeros_like", lambda F, x: x + F.zeros_like(x), lambda x: x, [X]),
    ("stop_gradient", lambda F, x: F.stop_gradient(x) * x, lambda x: X * x,
     [X]),
]


@covers(*(f"Ops.{case[0]}" for case in OPS), "attach_grad", "grad", "record",
        "backward", "parallel")
@pytest.mark.parametrize("number", range(len(OPS)),
                         ids=lambda i: f"{i}-{OPS[i][0]}")
def test_functions_of_the_engine(number, devices):
    """Values and gradients on each device, from `mgpu.functional`."""
    name, function, numpy_function, arguments = OPS[number]
    assert callable(getattr(F, name))
    value = numpy_function(*arguments)
    u = np.random.default_rng(number).uniform(0.5, 1, np.shape(value))

    def run(backend):
        def one(device):
            leaves = [mgpu.put(x, device) for x in arguments]
            for x in leaves:
                mgpu.attach_grad(x)
            y = function(F, *leaves)
            return y, F.sum(y * mgpu.put(u, device).reshape(y.shape)), leaves
        with mgpu.record():
            rows = mgpu.parallel(one, devices)
        mgpu.backward([loss for _, loss, _ in rows])
        return [[mgpu.to_numpy(y).reshape(np.shape(value)),
                 *(mgpu.to_numpy(mgpu.grad(x)) for x in leaves)]
                for y, _, leaves in rows]
    slopes = []
    for i in range(len(arguments)):
        slopes.append(numerical_gradient(lambda x: (u * numpy_function(
            *arguments[:i], x, *arguments[i + 1:])).sum(), arguments[i]))
    results = on_each(run)
    for engine, found in results.items():
        compare(found, next(iter(results.values())), ROUNDING, engine)
        for value_here, *slopes_here in found:
            compare(value_here, value, ROUNDING, engine)
            # five-point differences of sums of a hundred terms
            compare(slopes_here, slopes, 1e-9, engine)
            with pytest.raises(AssertionError):
                compare(slopes_here, [s * (1 + 1e-6) for s in slopes], 1e-9)


@covers("Ops.astype", "no_grad")
def test_functions_without_a_gradient(devices):
    """Kinds of numbers, what is written to a flat view, and nothing recorded
    under `no_grad`."""
    def run(backend):
        found = []
        for device in devices:
            x = mgpu.put(X, device)
            y = mgpu.put(X, device)
            F.flat_view(y)[2:5] = 7.0
            mgpu.attach_grad(x)
            with mgpu.record():
                z = x * x
                with mgpu.no_grad():
                    w = x * x
            mgpu.backward(z)
            found.append([F.astype(x, "float32"), F.astype(x * 9, "int32"),
                          F.zeros_like(x), F.sign(x), y, w, mgpu.grad(x)])
        return [host(x) for x in found]
    written = X.copy()
    written.reshape(-1)[2:5] = 7
    agree(run, [[X.astype("float32"), (X * 9).astype("int32"), X * 0 + 0,
                 np.sign(X), written, X * X, 2 * X]] * len(devices), EXACT)


@covers("seed")
def test_masks_are_zero_or_scaled(devices):
    """Dropout masks are random: no two engines agree in them. Each keeps
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
