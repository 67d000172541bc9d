"""What the numbers should be: NumPy in float64, and nothing else.

Written from the papers, the documentation and the sources of MXNet 1.9.1 and
PyTorch 2.13 and the book; it does not import mgpu or a framework
(`test_oracle.py` checks that). Plain formulas, one after the other, without a
thought for speed or memory.

Gradients are analytic; `test_oracle.py` compares them with differences of
the values.
"""
import itertools
import math
from fractions import Fraction

import formulas
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

# -- batches ------------------------------------------------------------------


def pieces(x, k, axis=0):
    """Gluon's uneven split: the first ``n % k`` pieces get one row more."""
    return np.array_split(x, k, axis)


def weighted_sizes(n, weights):
    """Largest remainders (Hamilton's method of apportionment)."""
    total = sum(map(Fraction, weights))
    quotas = [n * Fraction(w) / total for w in weights]
    sizes = [math.floor(q) for q in quotas]
    by_remainder = sorted(range(len(quotas)),
                          key=lambda i: quotas[i] - sizes[i], reverse=True)
    for i in by_remainder[:n - sum(sizes)]:     # a stable sort: earlier first
        sizes[i] += 1
    return sizes


# -- reductions over devices, in a stated order of additions ------------------

COMBINE = {"sum": np.add, "mean": np.add, "max": np.maximum,
           "min": np.minimum}


def chain(parts, op):
    total = parts[0]
    for part in parts[1:]:
        total = COMBINE[op](total, part)
    return total / len(parts) if op == "mean" else total


def first(parts, i):
    """`parts` with number i in front."""
    return [parts[i], *parts[:i], *parts[i + 1:]]


def pairs(parts, op):
    """Neighbours, then neighbours of those."""
    while len(parts) > 1:
        parts = [COMBINE[op](*parts[i:i + 2]) if len(parts) - i > 1
                 else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def reduced(parts, op, algorithm="naive", root=0):
    """The reduction of all parts, as the algorithm adds."""
    k = len(parts)
    if algorithm in ("naive", "auto"):
        return chain(first(parts, root), op)
    if algorithm == "tree":
        total = pairs(parts[root:] + parts[:root], op)
        return total / k if op == "mean" else total
    chunks = [pieces(part.ravel(), k) for part in parts]
    columns = [[chunks[i][c] for i in range(k)] for c in range(k)]
    order = {"ring": lambda col, c: col[c:] + col[:c], "sharded": first}
    return np.concatenate([
        chain(order[algorithm](column, c), op)
        for c, column in enumerate(columns)]).reshape(parts[0].shape)


def roots(sizes, k):
    """Longest processing time first (Graham 1969)."""
    load, where = [0] * k, {}
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        where[i] = load.index(min(load))
        load[where[i]] += sizes[i]
    return [where[i] for i in range(len(sizes))]


# -- losses -------------------------------------------------------------------
# Each: (values, slope). `slope(u)` is the gradient of ``sum(u * values)``
# with respect to the predictions, for u of the shape of the values.

def log_softmax(x, axis=-1):
    x = x - x.max(axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


def _cross_entropy(x, label, axis=-1, sparse_label=True, from_logits=False):
    if sparse_label:        # one row of the unit matrix for each class
        label = np.moveaxis(np.eye(x.shape[axis])[label.astype(int)], -1,
                            axis)
    logs = x if from_logits else log_softmax(x, axis)

    def slope(u):
        if from_logits:
            return -u * label
        return u * (np.exp(logs) * label.sum(axis, keepdims=True) - label)
    return -(label * logs).sum(axis, keepdims=True), slope


def _l2(x, label):
    return (x - label) ** 2 / 2, lambda u: u * (x - label)


def _l1(x, label):
    return abs(x - label), lambda u: u * np.sign(x - label)


def _huber(x, label, rho=1.0):
    d = x - label
    return (np.where(abs(d) > rho, abs(d) - rho / 2, d * d / (2 * rho)),
            lambda u: u * np.clip(d / rho, -1, 1))


def _bce(x, label, from_sigmoid=False, pos_weight=1.0):
    if from_sigmoid:
        return (-(pos_weight * label * np.log(x + 1e-12)
                  + (1 - label) * np.log(1 - x + 1e-12)),
                lambda u: u * ((1 - label) / (1 - x + 1e-12)
                               - pos_weight * label / (x + 1e-12)))
    p = np.exp(-np.logaddexp(0, -x))
    return (pos_weight * label * np.logaddexp(0, -x)
            + (1 - label) * np.logaddexp(0, x),
            lambda u: u * ((1 - label) * p - pos_weight * label * (1 - p)))


def _kl(x, label, from_logits=True, axis=-1):
    logs = x if from_logits else log_softmax(x, axis)

    def slope(u):
        if from_logits:
            return -u * label
        return np.exp(logs) * (u * label).sum(axis, keepdims=True) - u * label
    return label * (np.log(label + 1e-12) - logs), slope


def _hinge(x, label, margin=1.0):
    gap = np.maximum(margin - x * label, 0)
    return gap, lambda u: -u * label * (gap > 0)


def _squared_hinge(x, label, margin=1.0):
    gap = np.maximum(margin - x * label, 0)
    return gap ** 2, lambda u: -2 * u * label * gap


def _logistic(x, label, label_format="signed"):
    return _bce(x, label if label_format == "binary" else (label + 1) / 2)


def _poisson(x, label, from_logits=True, compute_full=False):
    rate = np.exp(x) if from_logits else x
    log = x if from_logits else np.log(x + 1e-8)
    many = np.maximum(label, 2)
    full = many * np.log(many) - many + np.log(2 * np.pi * many) / 2
    return (rate - label * log + compute_full * full * (label > 1),
            lambda u: u * (rate - label if from_logits
                           else 1 - label / (x + 1e-8)))


LOSSES = {"SoftmaxCrossEntropyLoss": _cross_entropy, "L2Loss": _l2,
          "L1Loss": _l1, "HuberLoss": _huber,
          "SigmoidBinaryCrossEntropyLoss": _bce, "KLDivLoss": _kl,
          "HingeLoss": _hinge, "SquaredHingeLoss": _squared_hinge,
          "LogisticLoss": _logistic, "PoissonNLLLoss": _poisson}


def loss(name, x, label, sample_weight=None, weight=1.0, **options):
    """Gluon's value per example, and the gradient of their sum: the mean
    over all axes but the first (KLDivLoss of 1.9.1: the sum)."""
    values, slope = LOSSES[name](x, label, **options)
    factor = np.full(values.shape, weight, dtype=float)
    if sample_weight is not None:
        factor = factor * sample_weight
    if name != "KLDivLoss":
        factor /= math.prod(values.shape[1:])
    rest = tuple(range(1, values.ndim))
    return (factor * values).sum(rest), slope(factor)


# -- initial values -----------------------------------------------------------

def fans(shape):
    kernel = math.prod(shape[2:])
    return shape[1] * kernel, shape[0] * kernel


def _scale(shape, magnitude, factor_type):
    fan_in, fan_out = fans(shape)
    return math.sqrt(magnitude / {"in": fan_in, "out": fan_out,
                                  "avg": (fan_in + fan_out) / 2}[factor_type])


def _xavier(rng, shape, rnd_type="uniform", factor_type="avg", magnitude=3):
    c = _scale(shape, magnitude, factor_type)
    return rng.uniform(-c, c, shape) if rnd_type == "uniform" \
        else rng.normal(0, c, shape)


def _orthogonal(rng, shape, scale=1.414, rand_type="uniform"):
    rows, columns = shape[0], math.prod(shape[1:])
    a = rng.uniform(-1, 1, (rows, columns)) if rand_type == "uniform" \
        else rng.normal(0, 1, (rows, columns))
    u, _, v = np.linalg.svd(a, full_matrices=False)
    return scale * (v if rows < columns else u).reshape(shape)


def _bilinear(rng, shape):
    """Gluon: the product of two triangles, element by element."""
    f = math.ceil(shape[3] / 2)
    c = (2 * f - 1 - f % 2) / (2 * f)
    values = np.empty(shape)
    for *front, y, x in np.ndindex(*shape):
        values[(*front, y, x)] = (1 - abs(y / f - c)) * (1 - abs(x / f - c))
    return values


def _lstm_bias(rng, shape, forget_bias=1.0):
    """Gates in the order input, forget, cell, output."""
    gates = np.zeros((4, shape[0] // 4))
    gates[1] = forget_bias
    return gates.reshape(shape)


INITIALIZERS = {
    "zero": lambda rng, shape: np.zeros(shape),
    "one": lambda rng, shape: np.ones(shape),
    "constant": lambda rng, shape, value: np.zeros(shape) + value,
    "uniform": lambda rng, shape, scale=0.07: rng.uniform(-scale, scale,
                                                          shape),
    "normal": lambda rng, shape, sigma=0.01: rng.normal(0, sigma, shape),
    "orthogonal": _orthogonal, "xavier": _xavier, "bilinear": _bilinear,
    "lstmbias": _lstm_bias,
    "msraprelu": lambda rng, shape, factor_type="avg", slope=0.25:
        rng.normal(0, _scale(shape, 2 / (1 + slope ** 2), factor_type),
                   shape)}


def drawn(name, shape, seed, number, **options):
    """A weight: each parameter has a generator of its own, from the seed of
    the network and its place in it."""
    return INITIALIZERS[name](np.random.default_rng([seed, number]), shape,
                              **options)


# -- update rules: the formulas are in `formulas.py` --------------------------

def gluon_order(names):
    """Layer after layer, and inside a layer by name: how a Gluon Trainer
    goes through a stack of layers that it is given as a dictionary."""
    layers = list(dict.fromkeys(n.rpartition(".")[0] for n in names))
    return sorted(names, key=lambda n: (layers.index(n.rpartition(".")[0]),
                                        n))


class Optimizer:
    """Moves the weights of a dict, with gradients of the whole batch."""

    def __init__(self, semantics, name, options=(), lr_mult=(), wd_mult=(),
                 rates=None):
        self.rule, self.options = formulas.rule(semantics, name), dict(options)
        self.lr, self.wd = formulas.base_rates(semantics, name, self.options)
        self.limit = self.options.get("clip_gradient") or math.inf
        self.shared = {}
        self.lr_mult, self.wd_mult = dict(lr_mult), dict(wd_mult)
        self.rates, self.t, self.memory = rates, 0, {}

    def step(self, weights, gradients, rows):
        self.t += 1
        lr = self.lr if self.rates is None else self.rates[self.t]
        moved = {}
        for name in gluon_order(weights):
            memory = self.memory.setdefault(name, {"shared": self.shared})
            moved[name] = self.rule(
                weights[name], gradients[name] / rows, memory,
                lr * self.lr_mult.get(name, 1.0),
                self.wd * self.wd_mult.get(name, 1.0), self.t, self.options,
                float, lambda x: np.clip(x, -self.limit, self.limit))
        return {name: moved[name] for name in weights}


# -- layers: (output, back), where back(d output) is the gradients of the
# arguments, in order ---------------------------------------------------------

def relu(x):
    return np.maximum(x, 0), lambda d: (d * (x > 0),)


def dense(x, w, b):
    """w is (out, in)."""
    return x @ w.T + b, lambda d: (d @ w, d.T @ x, d.sum(0))


def dot(x, w, b):
    """w is (in, out), as in the book's LeNet."""
    return x @ w + b, lambda d: (d @ w.T, x.T @ d, d.sum(0))


def _windows(x, height, width, stride):
    return sliding_window_view(x, (height, width), (2, 3))[
        :, :, ::stride, ::stride]


def _scatter(d_windows, shape, height, width, stride):
    """Add what each window gets, (height, width) -> (n, c, h, w) of one
    offset, to where the window came from."""
    total = np.zeros(shape)
    for i, j in itertools.product(range(height), range(width)):
        part = d_windows(i, j)
        total[:, :, i:i + stride * part.shape[2]:stride,
              j:j + stride * part.shape[3]:stride] += part
    return total


def conv(x, w, b, stride=1, padding=0):
    """Cross-correlation, as every framework's convolution."""
    kh, kw = w.shape[2:]
    p = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = _windows(p, kh, kw, stride)
    y = np.tensordot(windows, w, ((1, 4, 5), (1, 2, 3)))

    def back(d):
        dp = _scatter(lambda i, j: np.moveaxis(
            np.tensordot(d, w[:, :, i, j], (1, 0)), -1, 1),
            p.shape, kh, kw, stride)
        h, v = x.shape[2:]
        return (dp[:, :, padding:padding + h, padding:padding + v],
                np.tensordot(d, windows, ((0, 2, 3), (0, 2, 3))),
                d.sum((0, 2, 3)))
    return np.moveaxis(y, -1, 1) + b.reshape(-1, 1, 1), back


def avg_pool(x, size, stride=None):
    stride = stride or size
    return _windows(x, size, size, stride).mean((4, 5)), lambda d: (
        _scatter(lambda i, j: d / size ** 2, x.shape, size, size, stride),)


def global_mean(x):
    n, c, h, w = x.shape
    return x.mean((2, 3)), lambda d: (
        np.broadcast_to(d[:, :, None, None] / (h * w), x.shape),)


def flatten(x):
    return x.reshape(len(x), -1), lambda d: (d.reshape(x.shape),)


EPSILON = 1e-5
#: MXNet keeps the momentum 0.9 as a float32
MOMENTUM = float(np.float32(0.9))


def batch_norm(x, gamma, beta):
    """Ioffe and Szegedy 2015, algorithm 1 and the gradients of section 3;
    also the mean and the biased variance. Channels are axis 1."""
    axes = tuple(i for i in range(x.ndim) if i != 1)
    wide = (1, -1) + (1,) * (x.ndim - 2)
    mean, var = x.mean(axes), x.var(axes)
    root = np.sqrt(var + EPSILON).reshape(wide)
    hat = (x - mean.reshape(wide)) / root

    def back(d):
        dhat = d * gamma.reshape(wide)
        dx = (dhat - dhat.mean(axes, keepdims=True)
              - hat * (dhat * hat).mean(axes, keepdims=True)) / root
        return dx, (d * hat).sum(axes), d.sum(axes)
    return gamma.reshape(wide) * hat + beta.reshape(wide), back, mean, var


def batch_norm_predict(x, gamma, beta, mean, var):
    wide = (1, -1) + (1,) * (x.ndim - 2)
    g, b, m, v = (p.reshape(wide) for p in (gamma, beta, mean, var))
    return g * (x - m) / np.sqrt(v + EPSILON) + b


class Network:
    """A stack of layers on `k` devices, with softmax cross-entropy.

    `layers` are (function, names of its parameters[, options]); `values`
    its parameters and, named after the batch-norm layer, ``running_mean``
    and ``running_var``. The policies of batch normalization: statistics per
    device; those, averaged over the devices after each step; of all rows.
    """

    def __init__(self, layers, values, k=1, policy="per_device"):
        self.layers, self.k, self.policy = layers, k, policy
        self.weights = {name: v for name, v in values.items()
                        if "running_" not in name}
        self.running = {name: np.stack([v] * k) for name, v in values.items()
                        if "running_" in name}

    def state(self):
        return {**self.weights, **self.running}

    def _remember(self, layer, device, mean, var):
        for what, value in (("mean", mean), ("var", var)):
            r = self.running[f"{layer}.running_{what}"]
            r[device] = MOMENTUM * r[device] + (1 - MOMENTUM) * value

    def _batch_norm(self, xs, names, active):
        """All rows together under "sync", else shard by shard. Under "sync"
        every device remembers the same, also one without rows."""
        layer = names[0].rpartition(".")[0]
        arguments = [self.weights[name] for name in names]
        joint = self.policy == "sync"
        ends = np.cumsum([len(x) for x in xs])[:-1]
        results = [batch_norm(x, *arguments)
                   for x in ([np.concatenate(xs)] if joint else xs)]
        for i in range(self.k) if joint else active:
            _, _, mean, var = results[0 if joint else active.index(i)]
            self._remember(layer, i, mean, var)
        ys = np.split(results[0][0], ends) if joint \
            else [y for y, *_ in results]

        def back(ds):
            backs = [b(d) for (_, b, *_), d in zip(
                results, [np.concatenate(ds)] if joint else ds)]
            dxs = np.split(backs[0][0], ends) if joint \
                else [dx for dx, *_ in backs]
            return dxs, [sum(column) for column in list(zip(*backs))[1:]]
        return ys, back

    def _each(self, function, xs, names, options):
        results = [function(x, *(self.weights[n] for n in names), **options)
                   for x in xs]

        def back(ds):
            backs = [b(d) for (_, b), d in zip(results, ds)]
            columns = list(zip(*backs))
            return columns[0], [sum(column) for column in columns[1:]]
        return [y for y, _ in results], back

    def gradients(self, X, y):
        """The loss of every row and the gradients of their sum; running
        statistics move."""
        shards = pieces(X, self.k)
        active = [i for i, x in enumerate(shards) if len(x)]
        xs, backs = [shards[i] for i in active], []
        for function, names, *options in self.layers:
            if function is batch_norm:
                xs, back = self._batch_norm(xs, names, active)
            else:
                xs, back = self._each(function, xs, names, *options or [{}])
            backs.append((names, back))
        losses, slopes = zip(*(
            loss("SoftmaxCrossEntropyLoss", x, label)
            for x, label in zip(xs, (pieces(y, self.k)[i] for i in active))))
        found, ds = {}, slopes
        for names, back in reversed(backs):
            ds, own = back(ds)
            found.update(zip(names, own))
        for r in self.running.values():     # devices without rows follow
            r[[i for i in range(self.k) if i not in active]] = r[active[0]]
        return np.concatenate(losses), {n: found[n] for n in self.weights}

    def step(self, X, y, optimizer):
        """One step; the losses and the gradients."""
        losses, gradients = self.gradients(X, y)
        self.weights = optimizer.step(self.weights, gradients, len(X))
        if self.policy == "average":
            for r in self.running.values():
                r[:] = r.mean(0)
        return losses, gradients

    def predict(self, x, device=0):
        for function, names, *options in self.layers:
            arguments = [self.weights[n] for n in names]
            if function is batch_norm:
                layer = names[0].rpartition(".")[0]
                x = batch_norm_predict(x, *arguments, *(
                    self.running[f"{layer}.running_{what}"][device]
                    for what in ("mean", "var")))
            else:
                x, _ = function(x, *arguments, *[], **(options or [{}])[0])
        return x


#: the book's LeNet ("Training on Multiple GPUs")
LENET = [(conv, ("W1", "b1")), (relu, ()), (avg_pool, (), {"size": 2}),
         (conv, ("W2", "b2")), (relu, ()), (avg_pool, (), {"size": 2}),
         (flatten, ()), (dot, ("W3", "b3")), (relu, ()),
         (dot, ("W4", "b4"))]
