"""The accepted differences of docs/internals/divergences.md, measured with
the real frameworks: each row of the page names a function here."""
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from parity.steps import trained_batch_norm

if set(BACKENDS) < {"mxnet", "torch"}:
    pytest.skip("they need two engines", allow_module_level=True)

import torch                                        # noqa: E402

mx = mgpu.mxnet_compat()

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "divergences.md"
#: name of the function and bounds of the expected size
ROWS = re.findall(r"^\| `(\w+)` \|.*\| (\S+?)(?: to (\S+))? \| [^|]* \|$",
                  PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name, low, high", ROWS,
                         ids=[name for name, *_ in ROWS])
def test_the_difference_has_the_expected_size(name, low, high):
    low, high = float(low), float(high or low)
    assert 0 < low <= high
    assert low <= globals()[name]() <= high


def test_each_measure_has_a_row():
    """And each row one of these."""
    assert [name for name, *_ in ROWS] == [f.__name__ for f in MEASURES]


# -- between the engines, under mgpu ------------------------------------------

def nan_in_relu():
    layer = mx.gluon.nn.Activation("relu")
    ours = layer(mx.nd.array([np.nan])).asnumpy()
    assert np.isnan(torch.relu(torch.tensor([np.nan])).numpy()).all()
    return float(np.isfinite(ours).sum())


def dropout_masks():
    masks = []
    for name, net in (("mxnet", mx.gluon.nn.Dropout(0.5)),
                      ("torch", torch.nn.Dropout(0.5))):
        with mgpu.using_backend(name):
            mgpu.seed(0)
            replicas = mgpu.initialize(net, [mgpu.cpu(0)], "uniform")
            with mgpu.record():
                out, = replicas([mgpu.put(np.ones((64, 64), "float32"),
                                          mgpu.cpu(0))])
            masks.append(mgpu.to_numpy(out) > 0)
    return float((masks[0] != masks[1]).mean())


def float32_softmax():
    x = np.random.default_rng(0).normal(size=(64, 100)).astype("float32")
    found = []
    for name in ("mxnet", "torch"):
        with mgpu.using_backend(name):
            found.append(mgpu.to_numpy(mgpu.functional.log_softmax(
                mgpu.put(x, mgpu.cpu(0)), -1)))
    return float(np.abs(found[0] - found[1]).max() / np.abs(found[0]).max())


# -- native Gluon against mgpu ------------------------------------------------

def native_gluon(optimizer, gradients, weight, dtype="float32", rates=(),
                 **options):
    """Weights after updates by MXNet's own optimizer (those written in
    Python take float32 alone), with these rates one after the other."""
    rule = mx.optimizer.create(optimizer, **options)
    update = mx.optimizer.get_updater(rule)
    w = mx.nd.array(weight, dtype=dtype)
    for g, rate in itertools.zip_longest(gradients, rates):
        if rate:
            rule.set_learning_rate(rate)
        update(0, mx.nd.array(g, dtype=dtype), w)
    return w.asnumpy()


def native_torch(rule, gradients, weight, rates=()):
    """Weights after updates by `rule`, a function that makes one of
    torch.optim."""
    w = torch.tensor(weight, requires_grad=True)
    optimizer = rule(torch.optim, [w])
    for g, rate in itertools.zip_longest(gradients, rates):
        if rate:
            optimizer.param_groups[0]["lr"] = rate
        w.grad = torch.tensor(g)
        optimizer.step()
    return w.detach().numpy()


def moves(optimizer, rule, scale=1.0, rates=(), **options):
    """The difference of two results, as part of Gluon's way."""
    given = gradients(scale)
    gluon = native_gluon(optimizer, given, W, rates=rates, **options)
    return float(np.abs(gluon - native_torch(rule, given, W, rates)).max()
                 / np.abs(gluon - W).max())


def gradients(scale=1.0, count=6):
    rng = np.random.default_rng(0)
    return [scale * rng.normal(size=5) for _ in range(count)]


W = np.linspace(0.5, 1.5, 5)


def hyperparameters_as_float32():
    given = gradients(count=1)
    way = -0.1 * given[0]
    found = native_gluon("sgd", given, W, "float64", learning_rate=0.1)
    return float(np.abs(found - W - way).max() / np.abs(found - W).max())


def momentum_as_float32():
    kept = float(np.float32(0.9))
    x = np.random.default_rng(0).normal(size=(8, 3)) + 5
    layer = trained_batch_norm(x)
    mean = layer.running_mean.data().asnumpy()
    assert np.allclose(mean, (1 - kept) * x.mean(0), rtol=1e-12)
    return float(np.abs(mean / (0.1 * x.mean(0)) - 1).max())


def uneven_batches():
    try:
        mx.gluon.utils.split_and_load(mx.nd.zeros((5, 1)),
                                      [mx.cpu(0), mx.cpu(1)])
    except ValueError:
        return 5.0
    return 0.0


# -- native torch against Gluon -----------------------------------------------

def unbiased_variance():
    x = np.random.default_rng(0).normal(size=(8, 3))
    layer = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    layer(torch.tensor(x))
    kept = layer.running_var.numpy() - 0.9
    return float((kept / (0.1 * x.var(0)) - 1).max())


def statistics_in_forward():
    x = np.random.default_rng(0).normal(size=(8, 3)) + 5
    layer = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    layer(torch.tensor(x))
    return float((layer.running_mean.numpy() / x.mean(0)).max())


def statistics_of_two_calls():
    a = np.random.default_rng(0).normal(size=(8, 1)) + 5
    ours = mx.gluon.nn.BatchNorm(in_channels=1)
    ours.initialize()
    ours.cast("float64")
    b = a - 10
    with mx.autograd.record():
        one, two = (ours(mx.nd.array(x, dtype="float64")) for x in (a, b))
        y = one * two
    y.backward()
    theirs = torch.nn.BatchNorm1d(1, dtype=torch.float64)
    theirs(torch.tensor(a))
    theirs(torch.tensor(b))
    found = ours.running_mean.data().asscalar()
    # Gluon's momentum is of float32
    assert abs(found - 0.9 * 0.1 * b.mean() - 0.1 * a.mean()) < 1e-6
    return abs(found - theirs.running_mean.item()) / abs(a.mean()) / 0.2


def statistics_without_a_gradient():
    x = np.random.default_rng(0).normal(size=(8, 3)) + 5
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.BatchNorm(scale=False, center=False),
            mx.gluon.nn.Dense(2))
    net.initialize()
    with mx.autograd.record():
        y = net(mx.nd.array(x))
    y.backward()
    assert not net[0].running_mean.data().asnumpy().any()
    layers = torch.nn.Sequential(torch.nn.BatchNorm1d(3, affine=False),
                                 torch.nn.Linear(3, 2)).double()
    layers(torch.tensor(x)).sum().backward()
    return float((layers[0].running_mean.numpy() / x.mean(0)).max())


def momentum_at_a_rate_change():
    return moves("sgd", lambda o, w: o.SGD(w, 0.1, momentum=0.9),
                 rates=[0.1] * 3 + [0.01] * 3, learning_rate=0.1,
                 momentum=0.9)


def adam_epsilon():
    return moves("adam", lambda o, w: o.Adam(w, 1e-3), 1e-7,
                 learning_rate=1e-3)


def adagrad_weight_decay():
    return moves("adagrad", lambda o, w: o.Adagrad(
        w, 0.1, weight_decay=0.01, eps=1e-7), learning_rate=0.1, wd=0.01)


def rmsprop_defaults():
    return moves("rmsprop", lambda o, w: o.RMSprop(w, 0.01),
                 learning_rate=0.01)


def adadelta_weight_decay():
    return moves("adadelta", lambda o, w: o.Adadelta(
        w, 1.0, rho=0.9, eps=1e-5, weight_decay=0.01), wd=0.01)


def adamax_epsilon():
    w = native_gluon("adamax", [np.zeros(1)], np.ones(1))
    theirs = native_torch(lambda o, w: o.Adamax(w), [np.zeros(1)],
                          np.ones(1))
    assert (theirs == 1).all()
    return float(np.isnan(w).sum())


def l2_loss():
    a, b = np.arange(4.0).reshape(1, 4), np.ones((1, 4))
    ours = mx.gluon.loss.L2Loss()(mx.nd.array(a), mx.nd.array(b)).asscalar()
    return float(torch.nn.functional.mse_loss(
        torch.tensor(a), torch.tensor(b))) / float(ours)


def huber_loss():
    a, b = np.array([[0.5, 5.0]]), np.zeros((1, 2))
    ours = mx.gluon.loss.HuberLoss(rho=2)(
        mx.nd.array(a), mx.nd.array(b)).asscalar()
    return float(torch.nn.functional.huber_loss(
        torch.tensor(a), torch.tensor(b), delta=2.0)) / float(ours)


def label_clipping():
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    values = loss(mx.nd.zeros((2, 5)), mx.nd.array([-1, 7])).asnumpy()
    for label in (-1, 7):
        try:
            torch.nn.functional.cross_entropy(torch.zeros(1, 5),
                                              torch.tensor([label]))
        except (IndexError, RuntimeError):
            continue
        return 0.0
    return float(np.isfinite(values).sum())


def default_weights():
    mx.random.seed(0)
    torch.manual_seed(0)
    layer = mx.gluon.nn.Dense(512, in_units=128)
    layer.initialize()
    theirs = torch.nn.Linear(128, 512).weight.detach().numpy()
    return float(theirs.std() / layer.weight.data().asnumpy().std())


def default_biases():
    torch.manual_seed(0)
    layer = mx.gluon.nn.Dense(512, in_units=128)
    layer.initialize()
    assert not layer.bias.data().asnumpy().any()
    theirs = torch.nn.Linear(128, 512).bias.detach().numpy()
    return float(abs(theirs).max()) * 128 ** 0.5


def gelu_in_float64():
    x = np.linspace(-3, 3, 101)
    layer = mx.gluon.nn.GELU()
    ours = layer(mx.nd.array(x, dtype="float64")).asnumpy()
    return float(np.abs(ours - torch.nn.functional.gelu(
        torch.tensor(x)).numpy()).max())


def gradients_of_a_layer_that_predicts():
    layer = mx.gluon.nn.BatchNorm(epsilon=0, in_channels=1)
    layer.initialize()
    x = mx.nd.array([[-1.0], [1.0]])
    x.attach_grad()
    with mx.autograd.record():
        with mx.autograd.predict_mode():
            y = layer(x)
    assert (y.asnumpy() == x.asnumpy()).all()   # so each gradient is 1
    y.backward()
    return float(abs(1 - x.grad.asnumpy()).max())


def ceil_mode_in_the_padding():
    ours = mx.gluon.nn.MaxPool2D(2, 2, 1, ceil_mode=True)(
        mx.nd.ones((1, 1, 7, 7)))
    theirs = torch.nn.MaxPool2d(2, 2, 1, ceil_mode=True)(
        torch.ones(1, 1, 7, 7))
    return float(ours.shape[2] - theirs.shape[2])


def dense_flattens():
    layer = mx.gluon.nn.Dense(5)
    layer.initialize()
    ours = layer(mx.nd.ones((2, 3, 7, 7)))
    return float(torch.nn.Linear(7, 5)(torch.ones(2, 3, 7, 7)).dim()
                 - len(ours.shape))


def gradient_through_whole_numbers():
    ours = mx.nd.array([2.5])
    ours.attach_grad()
    with mx.autograd.record():
        y = ours.astype("int32").astype("float32")
    y.backward()
    theirs = torch.tensor([2.5], requires_grad=True)
    assert not theirs.int().float().requires_grad
    return ours.grad.asscalar()


MEASURES = [
    nan_in_relu, dropout_masks, float32_softmax, hyperparameters_as_float32,
    momentum_as_float32, uneven_batches, unbiased_variance,
    statistics_in_forward, statistics_of_two_calls,
    statistics_without_a_gradient, momentum_at_a_rate_change, adam_epsilon,
    adagrad_weight_decay, rmsprop_defaults, adadelta_weight_decay,
    adamax_epsilon, l2_loss, huber_loss, label_clipping, default_weights,
    default_biases, gelu_in_float64, gradients_of_a_layer_that_predicts,
    ceil_mode_in_the_padding, dense_flattens, gradient_through_whole_numbers]
