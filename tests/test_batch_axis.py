"""Batches of layout (time, batch), and losses with several values for each
example, against the plain framework on one device."""
import numpy as np
import pytest

import mgpu
from helpers import on, relative_difference

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 9, (5, 6))         # (time, batch)
LABELS = RNG.integers(0, 9, (5, 6))
CLASSES = RNG.integers(0, 9, 6)
# gradients summed in another order
SAME = {"float64": 1e-13, "float32": 1e-6}


def put(x):
    return mgpu.put(x, mgpu.cpu(0))


class TorchCase:
    dtype = "float64"

    def network(self, kind):
        import torch
        from torch import nn
        torch.manual_seed(0)

        class LSTM(nn.LSTM):
            def forward(self, x):
                return super().forward(x)[0]
        return nn.Sequential(
            nn.Embedding(9, 8), nn.Identity() if kind == "head"
            else LSTM(8, 8), nn.Linear(8, 9)).double()

    def loss(self, output, label):
        from torch.nn import functional as F
        return F.cross_entropy(output.movedim(-1, 1), label,
                               reduction="none")

    def weights(self, net):
        return [p.detach().numpy() for p in net.parameters()]

    def plain_steps(self, net, loss, X, y, steps):
        import torch
        optimizer = torch.optim.SGD(net.parameters(), 0.25)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(net(X), y).mean().backward()
            optimizer.step()


class MxnetCase:
    dtype = "float32"       # MXNet's LSTM is wrong in float64

    def network(self, kind):
        import mxnet as mx
        from mxnet.gluon import nn, rnn
        net = nn.Sequential()
        net.add(nn.Embedding(9, 8))
        if kind != "head":
            net.add(rnn.LSTM(8, input_size=8))
        net.add(nn.Dense(9, flatten=False, in_units=8))
        net.initialize()
        rng = np.random.default_rng(1)
        for p in net.collect_params().values():
            p.set_data(mx.nd.array(rng.uniform(-0.5, 0.5, p.shape)))
        return net

    def loss(self, output, label):
        return -output.log_softmax(axis=-1).pick(label, axis=-1)

    def weights(self, net):
        import mxnet as mx
        return [p.data(mx.cpu(0)).asnumpy()
                for p in net.collect_params().values()]

    def plain_steps(self, net, loss, X, y, steps):
        from mxnet import autograd, gluon
        trainer = gluon.Trainer(net.collect_params(), "sgd",
                                {"learning_rate": 0.25})
        for _ in range(steps):
            with autograd.record():
                value = loss(net(X), y).mean()
            value.backward()
            trainer.step(1)


@pytest.fixture
def case(backend):
    return TorchCase() if backend.name == "torch" else MxnetCase()


def trained(case, kind, devices, step):
    """The weights after two calls of ``step(replicas, trainer)``."""
    net = case.network(kind)
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.25})
    for _ in range(2):
        step(replicas, trainer)
    return case.weights(net)


def check(case, kind, devices, step, loss, y, X=TOKENS):
    plain = case.network(kind)
    case.plain_steps(plain, loss, put(X), put(y), 2)
    for ours, theirs in zip(trained(case, kind, devices, step),
                            case.weights(plain), strict=True):
        assert relative_difference(ours, theirs) < SAME[case.dtype]


def test_the_batch_is_the_second_axis(case, devices):
    """Values of the loss (time, batch), or one for each example; labels
    (batch,); a mean of all; passes of two parts; a custom loop."""
    X, y = put(TOKENS), put(LABELS)

    def step(replicas, trainer, loss=case.loss, y=y, **options):
        return mgpu.train_batch(X, y, replicas, loss, trainer, batch_axis=1,
                                **options)

    def by_example(output, label):
        return case.loss(output, label).mean(0)

    def number(output, label):
        return case.loss(output, label).mean()

    def last(output, label):
        return case.loss(output[-1], label)

    def own(replicas, trainer):
        Xs, ys = mgpu.split_batch(X, y, replicas.devices, batch_axis=1)
        with mgpu.record():
            losses = mgpu.parallel(by_example, replicas(Xs), ys)
        mgpu.backward(losses)
        trainer.step(TOKENS.shape[1])

    def by_train(replicas, trainer):
        history = mgpu.train(replicas, [(X, y)], None, case.loss, trainer, 1,
                             progress=False, batch_axis=1)
        assert len(history.loss_per_step) == 1
    for one in (step, own, by_train,
                lambda *a: step(*a, loss=by_example),
                lambda *a: step(*a, loss=number),
                lambda *a: step(*a, accumulate=2)):
        check(case, "lstm", devices, one, case.loss, LABELS)
    check(case, "lstm", devices,
          lambda *a: step(*a, loss=last, y=put(CLASSES)), last, CLASSES)


def test_an_evaluation_along_the_second_axis(case, devices):
    X, y = put(TOKENS), put(LABELS)
    found = [mgpu.evaluate(
        mgpu.initialize(case.network("lstm"), d), [(X, y)], "loss",
        loss=case.loss, batch_axis=1)[1] for d in (on(0), devices)]
    with mgpu.no_grad():
        plain = case.loss(case.network("lstm")(X), y).mean()
    for value in found:
        assert value == pytest.approx(mgpu.to_numpy(plain).item(),
                                      rel=SAME[case.dtype])


@pytest.mark.parametrize("rows", [5, 6])
def test_several_values_for_each_example(case, devices, rows):
    """Losses (batch, time) count by the mean of all, also where there are as
    many steps as examples."""
    X, y = TOKENS.T[:rows], LABELS.T[:rows]

    def step(replicas, trainer):
        losses = mgpu.train_batch(put(X), put(y), replicas,
                                  case.loss, trainer)
        assert sum(len(x) for x in losses if x is not None) == rows
    check(case, "head", devices, step, case.loss, y, X)


def test_a_loss_of_all_pairs_is_refused(case, devices):
    """(n, n), where outputs (n, 1) broadcast with labels (n,)."""
    def loss(output, label):
        return (output[:, 0, :1] - output[:, 0, 0]) ** 2

    def step(replicas, trainer):
        mgpu.train_batch(put(TOKENS.T), put(CLASSES), replicas, loss,
                         trainer)
    with pytest.raises(ValueError, match=r"received shape \(6, 6\)"):
        trained(case, "head", devices, step)
