"""The ledger of accepted differences, as data.

``python tests/parity/divergences.py`` writes `docs/internals/divergences.md`
from it, and `test_divergences.py` measures each entry with the real
frameworks. One that disappears, or changes its size, fails.
"""
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import mgpu

DOCUMENT = pathlib.Path(__file__).parents[2] \
    / "docs" / "internals" / "divergences.md"


class Divergence(NamedTuple):
    """An accepted difference; `low` and `high` bound what `measure` gives,
    `unit` says of what."""

    name: str
    area: str
    what: str
    reason: str
    mgpu: str
    unit: str
    low: float
    high: float
    measure: Callable[[], float]


LEDGER: dict[str, Divergence] = {}


def divergence(area, what, reason, mgpu, unit, low, high):
    def register(measure):
        name = measure.__name__.replace("_", " ")
        LEDGER[name] = Divergence(name, area, what, reason, mgpu, unit, low,
                                  high, lambda: measure(*frameworks()))
        return measure
    return register


def frameworks():
    """(mxnet, torch); mgpu's backends import them as they need to be."""
    for name in ("mxnet", "torch"):
        with mgpu.using_backend(name):
            pass
    import mxnet
    import torch
    return mxnet, torch


BOTH = "Gluon's meaning on both engines"
GLUON = "Gluon's by default, torch's with semantics='torch'; both engines"


# -- between the engines, under mgpu ------------------------------------------

@divergence("engines", "MXNet's ReLU layer turns NaN into 0, torch's keeps "
            "it", "inside the frameworks' kernels; a pass over every "
            "activation would be the price",
            "`train` checks the loss of each step, and the weights after "
            "each epoch", "NaNs that are lost of 1", 1, 1)
def nan_in_relu(mx, torch):
    layer = mx.gluon.nn.Activation("relu")
    ours = layer(mx.nd.array([np.nan])).asnumpy()
    assert np.isnan(torch.relu(torch.tensor([np.nan])).numpy()).all()
    return float(np.isfinite(ours).sum())


@divergence("engines", "dropout masks of two engines are different draws of "
            "one distribution", "each engine has generators of its own, and "
            "drawing in NumPy would cost a transfer at every layer",
            "`mgpu.parity` draws masks in NumPy for both",
            "share of the values that differ (p = 0.5)", 0.4, 0.6)
def dropout_masks(mx, torch):
    masks = []
    for name in ("mxnet", "torch"):
        with mgpu.using_backend(name):
            mgpu.seed(0)
            if name == "torch":
                import torch
                net = torch.nn.Sequential(torch.nn.Dropout(0.5))
            else:
                from mxnet.gluon import nn
                net = nn.HybridSequential()
                net.add(nn.Dropout(0.5))
            replicas = mgpu.initialize(net, [mgpu.cpu(0)], "uniform")
            with mgpu.record():
                out, = replicas([mgpu.put(np.ones((64, 64), "float32"),
                                          mgpu.cpu(0))])
            masks.append(mgpu.to_numpy(out) > 0)
    return float((masks[0] != masks[1]).mean())


@divergence("engines", "float32 log-softmax: another order of additions and "
            "other approximations of exp", "rounding, in kernels of the "
            "frameworks; parity is proved in float64",
            "float32 comparisons use 1e-5", "largest difference, relative",
            1e-8, 1e-5)
def float32_softmax(mx, torch):
    x = np.random.default_rng(0).normal(size=(64, 100)).astype("float32")
    found = []
    for name in ("mxnet", "torch"):
        with mgpu.using_backend(name):
            found.append(mgpu.to_numpy(mgpu.functional.log_softmax(
                mgpu.put(x, mgpu.cpu(0)), -1)))
    return float(np.abs(found[0] - found[1]).max() / np.abs(found[0]).max())


# -- native Gluon against mgpu ------------------------------------------------

def native_gluon(optimizer, gradients, weight, dtype="float32", **options):
    """Weights after updates by MXNet's own optimiser (those written in
    Python take float32 alone)."""
    mx, _ = frameworks()
    rule = mx.optimizer.create(optimizer, **options)
    update = mx.optimizer.get_updater(rule)
    w = mx.nd.array(weight, dtype=dtype)
    for g in gradients:
        if isinstance(g, tuple):
            rule.set_learning_rate(g[1])
            g = g[0]
        update(0, mx.nd.array(g, dtype=dtype), w)
    return w.asnumpy()


def native_torch(rule, gradients, weight):
    """Weights after updates by `rule`, a function that makes one of
    torch.optim."""
    _, torch = frameworks()
    w = torch.tensor(weight, requires_grad=True)
    optimizer = rule(torch.optim, [w])
    for g in gradients:
        if isinstance(g, tuple):
            optimizer.param_groups[0]["lr"] = g[1]
            g = g[0]
        w.grad = torch.tensor(g)
        optimizer.step()
    return w.detach().numpy()


def moves(optimizer, rule, given, **options):
    """The difference of two results, as part of Gluon's way."""
    gluon = native_gluon(optimizer, given, W, **options)
    return float(np.abs(gluon - native_torch(rule, given, W)).max()
                 / np.abs(gluon - W).max())


def gradients(scale=1.0, count=6):
    rng = np.random.default_rng(0)
    return [scale * rng.normal(size=5) for _ in range(count)]


W = np.linspace(0.5, 1.5, 5)


@divergence("Gluon", "MXNet's compiled updates read their scalars as "
            "float32: a rate of 0.1 is 0.1000000015",
            "part of MXNet's interface; more exact is closer to the formula",
            "double precision on both engines",
            "relative difference of one step", 1e-9, 1e-7)
def hyperparameters_as_float32(mx, torch):
    given = gradients(count=1)
    way = -0.1 * given[0]
    found = native_gluon("sgd", given, W, "float64", learning_rate=0.1)
    return float(np.abs(found - W - way).max() / np.abs(found - W).max())


@divergence("Gluon", "batch norm stores its momentum as float32",
            "it is what a Gluon network computes", BOTH,
            "relative difference of the running mean after one step", 1e-8,
            1e-6)
def momentum_as_float32(mx, torch):
    kept = float(np.float32(0.9))
    x = np.random.default_rng(0).normal(size=(8, 3)) + 5
    layer = mx.gluon.nn.BatchNorm(in_channels=3)
    layer.cast("float64")
    layer.initialize()
    with mx.autograd.record():
        y = layer(mx.nd.array(x, dtype="float64"))
    y.backward()
    mean = layer.running_mean.data().asnumpy()
    assert np.allclose(mean, (1 - kept) * x.mean(0), rtol=1e-12)
    return float(np.abs(mean / (0.1 * x.mean(0)) - 1).max())


@divergence("Gluon", "native Gluon splits evenly or refuses",
            "a short last batch is ordinary", "`split_batch` is uneven by "
            "default; `split_and_load` is Gluon's",
            "rows that Gluon refuses of 5 on 2 devices", 5, 5)
def uneven_batches(mx, torch):
    try:
        mx.gluon.utils.split_and_load(mx.nd.zeros((5, 1)),
                                      [mx.cpu(0), mx.cpu(1)])
    except ValueError:
        return 5.0
    return 0.0


# -- native torch against Gluon -----------------------------------------------

@divergence("batch norm", "torch keeps the unbiased variance, n / (n - 1) "
            "larger", "a port must choose; Gluon's trains the same everywhere",
            BOTH + "; `gluonize` for plain PyTorch",
            "relative difference of the batch's part, n = 8", 0.14, 0.15)
def unbiased_variance(mx, torch):
    x = np.random.default_rng(0).normal(size=(8, 3))
    layer = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    layer(torch.tensor(x))
    kept = layer.running_var.numpy() - 0.9
    return float((kept / (0.1 * x.var(0)) - 1).max())


@divergence("batch norm", "torch moves running statistics in the forward "
            "pass, Gluon in the backward pass", "the same at the end of a "
            "step that calls the layer once", "only while recording, on "
            "torch too", "share of the mean that one forward pass takes in",
            0.09, 0.11)
def statistics_in_forward(mx, torch):
    x = np.random.default_rng(0).normal(size=(8, 3)) + 5
    layer = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    layer(torch.tensor(x))
    return float((layer.running_mean.numpy() / x.mean(0)).max())


@divergence("batch norm", "a layer that one pass calls several times (a "
            "siamese network): Gluon takes the last call in first, torch the "
            "first", "the order of a backward pass is not known in the "
            "forward pass", "each engine's own",
            "relative difference of the running mean after two calls", 0.09,
            0.11)
def statistics_of_two_calls(mx, torch):
    a = np.random.default_rng(0).normal(size=(8, 1)) + 5
    ours = mx.gluon.nn.BatchNorm(in_channels=1)
    ours.initialize()
    ours.cast("float64")
    b, first, second = a - 10, mx.nd.array(a, dtype="float64"), mx.nd.array(
        a - 10, dtype="float64")
    with mx.autograd.record():
        y = (ours(first) * ours(second)).sum()
    y.backward()
    theirs = torch.nn.BatchNorm1d(1, dtype=torch.float64)
    theirs(torch.tensor(a))
    theirs(torch.tensor(b))
    found = ours.running_mean.data().asscalar()
    # Gluon's momentum is of float32
    assert abs(found - 0.9 * 0.1 * b.mean() - 0.1 * a.mean()) < 1e-6
    return abs(found - theirs.running_mean.item()) / abs(a.mean()) / 0.2


@divergence("batch norm", "torch moves the running statistics of a layer "
            "that no gradient passes, as in frozen features; Gluon does not",
            "whether a gradient will pass is not known in the forward pass",
            "each engine's own; `mgpu lint` names the first layers of a "
            "network", "share of the mean that torch takes in", 0.09, 0.11)
def statistics_without_a_gradient(mx, torch):
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


@divergence("optimisers", "SGD with momentum: Gluon's velocity holds the "
            "rate, torch's buffer does not", "a change of rate rescales old "
            "steps in torch", GLUON,
            "part of the whole way, rate 0.1 to 0.01 after 3 steps", 0.05,
            1.0)
def momentum_at_a_rate_change(mx, torch):
    mixed = [(x, 0.1 if i < 3 else 0.01) for i, x in enumerate(gradients())]
    return moves("sgd", lambda o, w: o.SGD(w, 0.1, momentum=0.9), mixed,
                 learning_rate=0.1, momentum=0.9)


@divergence("optimisers", "Adam's epsilon: outside the bias correction in "
            "Gluon", "Kingma and Ba have both forms", GLUON,
            "part of the whole way, gradients of 1e-7", 0.3, 5.0)
def adam_epsilon(mx, torch):
    return moves("adam", lambda o, w: o.Adam(w, 1e-3), gradients(1e-7),
                 learning_rate=1e-3)


@divergence("optimisers", "AdaGrad: decoupled weight decay, epsilon inside "
            "the root", "as published, or not", GLUON,
            "part of the whole way, wd = 0.01", 0.005, 0.5)
def adagrad_weight_decay(mx, torch):
    return moves("adagrad", lambda o, w: o.Adagrad(
        w, 0.1, weight_decay=0.01, eps=1e-7), gradients(), learning_rate=0.1,
        wd=0.01)


@divergence("optimisers", "RMSProp: decay 0.9 and epsilon inside the root "
            "in Gluon, 0.99 and outside in torch", "defaults", GLUON,
            "part of the whole way", 0.3, 5.0)
def rmsprop_defaults(mx, torch):
    return moves("rmsprop", lambda o, w: o.RMSprop(w, 0.01), gradients(),
                 learning_rate=0.01)


@divergence("optimisers", "AdaDelta: Gluon ignores the rate and decouples "
            "the weight decay", "as published, or not", GLUON,
            "part of the whole way, wd = 0.01", 0.1, 5.0)
def adadelta_weight_decay(mx, torch):
    return moves("adadelta", lambda o, w: o.Adadelta(
        w, 1.0, rho=0.9, eps=1e-5, weight_decay=0.01), gradients(), wd=0.01)


@divergence("optimisers", "Adamax: Gluon has no epsilon", "0 / 0 for a "
            "gradient that has always been 0", GLUON,
            "NaNs of 1", 1, 1)
def adamax_epsilon(mx, torch):
    w = native_gluon("adamax", [np.zeros(1)], np.ones(1))
    theirs = native_torch(lambda o, w: o.Adamax(w), [np.zeros(1)],
                          np.ones(1))
    assert (theirs == 1).all()
    return float(np.isnan(w).sum())


@divergence("losses", "Gluon's L2 loss has a factor 1/2", "its gradient is "
            "the error itself", "`mgpu.losses.L2Loss` is Gluon's",
            "torch's over Gluon's", 2, 2)
def l2_loss(mx, torch):
    a, b = np.arange(4.0).reshape(1, 4), np.ones((1, 4))
    ours = mx.gluon.loss.L2Loss()(mx.nd.array(a), mx.nd.array(b)).asscalar()
    return float(torch.nn.functional.mse_loss(
        torch.tensor(a), torch.tensor(b))) / float(ours)


@divergence("losses", "Gluon's Huber loss is torch's smooth L1 loss",
            "two definitions of one name", "`mgpu.losses.HuberLoss` is "
            "Gluon's", "torch's huber over Gluon's, rho = 2", 2, 2)
def huber_loss(mx, torch):
    a, b = np.array([[0.5, 5.0]]), np.zeros((1, 2))
    ours = mx.gluon.loss.HuberLoss(rho=2)(
        mx.nd.array(a), mx.nd.array(b)).asscalar()
    return float(torch.nn.functional.huber_loss(
        torch.tensor(a), torch.tensor(b), delta=2.0)) / float(ours)


@divergence("losses", "labels out of range: Gluon takes the nearest class, "
            "torch raises", "a silent wrong gradient", "`mgpu` raises and "
            "names the label", "labels that Gluon accepts of 2", 2, 2)
def label_clipping(mx, torch):
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


@divergence("initialisation", "default weights: Uniform(0.07) in Gluon, "
            "+-1/sqrt(fan in) in torch", "each library's habit",
            "`init=` draws, in NumPy, for both engines; without it each "
            "network keeps its own",
            "ratio of the standard deviations, fan in 128", 1.2, 1.3)
def default_weights(mx, torch):
    mx.random.seed(0)
    torch.manual_seed(0)
    layer = mx.gluon.nn.Dense(512, in_units=128)
    layer.initialize()
    theirs = torch.nn.Linear(128, 512).weight.detach().numpy()
    return float(theirs.std() / layer.weight.data().asnumpy().std())


@divergence("initialisation", "default biases: 0 in Gluon, random in torch",
            "each library's habit", "0 on both engines with `init=`",
            "largest bias times sqrt(fan in)", 0.9, 1.0)
def default_biases(mx, torch):
    torch.manual_seed(0)
    layer = mx.gluon.nn.Dense(512, in_units=128)
    layer.initialize()
    assert not layer.bias.data().asnumpy().any()
    theirs = torch.nn.Linear(128, 512).bias.detach().numpy()
    return float(abs(theirs).max()) * 128 ** 0.5


@divergence("layers", "MXNet's GELU computes with a constant of float32 in "
            "float64 too", "inside MXNet's kernel", "a float64 network with "
            "GELU agrees to this; `mgpu.parity` says *same but for MXNet's "
            "float32*",
            "largest difference", 1e-8, 1e-6)
def gelu_in_float64(mx, torch):
    x = np.linspace(-3, 3, 101)
    layer = mx.gluon.nn.GELU()
    ours = layer(mx.nd.array(x, dtype="float64")).asnumpy()
    return float(np.abs(ours - torch.nn.functional.gelu(
        torch.tensor(x)).numpy()).max())


@divergence("layers", "a batch norm that a forward pass puts into "
            "autograd.predict_mode() while it is recorded: Gluon's backward "
            "pass is that of training", "finite differences of the forward "
            "pass agree with mgpu's", "gradients of a prediction, on any "
            "number of devices; Gluon's own in its own loop",
            "of 1 in the gradient of one input", 0.9, 1.1)
def gradients_of_a_layer_that_predicts(mx, torch):
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


@divergence("layers", "pooling with ceil_mode: Gluon keeps a last window "
            "that lies wholly in the padding", "the frameworks' own layers "
            "are used as they are", "`mgpu.parity` names it; `lint` warns",
            "windows more along one axis (7 values, kernel 2, stride 2, "
            "padding 1)", 1, 1)
def ceil_mode_in_the_padding(mx, torch):
    ours = mx.gluon.nn.MaxPool2D(2, 2, 1, ceil_mode=True)(
        mx.nd.ones((1, 1, 7, 7)))
    theirs = torch.nn.MaxPool2d(2, 2, 1, ceil_mode=True)(
        torch.ones(1, 1, 7, 7))
    return float(ours.shape[2] - theirs.shape[2])


@divergence("layers", "Dense flattens its input, Linear acts on the last "
            "axis", "the frameworks' own layers are used as they are",
            "`lint` warns", "dimensions more in torch's output", 2, 2)
def dense_flattens(mx, torch):
    layer = mx.gluon.nn.Dense(5)
    layer.initialize()
    ours = layer(mx.nd.ones((2, 3, 7, 7)))
    return float(torch.nn.Linear(7, 5)(torch.ones(2, 3, 7, 7)).dim()
                 - len(ours.shape))


@divergence("layers", "Gluon's cast of fractions to whole numbers and back "
            "passes the gradient on as if it had not cut them; torch's has "
            "none", "the gradient of the function is none", "each engine's "
            "own; on torch a network of `from_gluon` that needs a gradient "
            "there is refused as it runs", "of 1 in the gradient", 1, 1)
def gradient_through_whole_numbers(mx, torch):
    ours = mx.nd.array([2.5])
    ours.attach_grad()
    with mx.autograd.record():
        y = ours.astype("int32").astype("float32")
    y.backward()
    theirs = torch.tensor([2.5], requires_grad=True)
    assert not theirs.int().float().requires_grad
    return ours.grad.asscalar()


def document() -> str:
    """The text of docs/internals/divergences.md."""
    lines = [
        "# Accepted differences", "",
        "Written by `python tests/parity/divergences.py` from the data that "
        "`tests/parity/test_divergences.py` measures",
        "with the real frameworks: a "
        "difference that disappears, or changes its size, fails the suite.",
        "The expected size is a closed interval, in the unit of its row.", ""]
    for area in dict.fromkeys(d.area for d in LEDGER.values()):
        lines += [f"## {area[0].upper() + area[1:]}", "",
                  "| difference | why it is accepted | what mgpu does | "
                  "expected size | of what |", "|---|---|---|---|---|"]
        for d in LEDGER.values():
            if d.area == area:
                size = f"{d.low:g}" if d.low == d.high \
                    else f"{d.low:g} to {d.high:g}"
                lines.append(f"| {d.what} | {d.reason} | {d.mgpu} | {size} "
                             f"| {d.unit} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
    print(DOCUMENT, file=sys.stderr)
