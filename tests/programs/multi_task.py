"""Gluon: one body, two heads, two losses."""
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn


class Model(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(8, activation="tanh", in_units=6)
            self.kind = nn.Dense(3, in_units=8)
            self.size = nn.Dense(1, in_units=8)

    def hybrid_forward(self, F, x):
        h = self.body(x)
        return self.kind(h), self.size(h)


results = []
net = Model()
net.initialize(mx.init.Xavier(), ctx=mx.cpu(0))
net.cast("float64")
net.hybridize()
trainer = gluon.Trainer(net.collect_params(), "adam", {
    "learning_rate": 0.01, "wd": 0.01})
classes, squares = gluon.loss.SoftmaxCELoss(), gluon.loss.L2Loss()
for size in (8, 7, 3, 8):
    x = mx.nd.random.normal(shape=(size, 6), dtype="float64")
    labels = mx.nd.random.randint(0, 3, shape=(size,)).astype("float64")
    with autograd.record():
        kind, width = net(x)
        loss = classes(kind, labels) + 0.5 * squares(width, x[:, :1])
    loss.backward()
    trainer.step(size)
    results.append(loss.sum())
