"""Digits by a small network, as MXNet's example/gluon/mnist has them."""
import argparse

import numpy as np
from gluon_networks import digits, mlp

import mgpu.compat.mxnet as mx
from mgpu.compat.mxnet import autograd, gluon

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=50)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--log-interval", type=int, default=2)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--start", help="weights to begin with")
parser.add_argument("--out", default="mnist.params")
opt = parser.parse_args()

net = mlp(opt.dtype)


def transformer(data, label):
    return data.reshape((-1,)).astype(opt.dtype), label


train_data = gluon.data.DataLoader(
    gluon.data.ArrayDataset(*digits(train=True)).transform(transformer),
    batch_size=opt.batch_size, shuffle=True, last_batch="discard")
val_data = gluon.data.DataLoader(
    gluon.data.ArrayDataset(*digits(train=False)).transform(transformer),
    batch_size=opt.batch_size, shuffle=False)


def test(ctx):
    metric = mx.metric.Accuracy()
    for data, label in val_data:
        data = data.as_in_context(ctx)
        label = label.as_in_context(ctx)
        output = net(data)
        metric.update([label], [output])
    return metric.get()


def train(epochs, ctx):
    global net
    net = mx.initialize(net, mx.init.Xavier(magnitude=2.24), ctx)
    if opt.start:
        net.load_parameters(opt.start, ctx=ctx)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {
        "learning_rate": opt.lr, "momentum": opt.momentum})
    metric = mx.metric.Accuracy()
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(epochs):
        metric.reset()
        for i, (data, label) in enumerate(train_data):
            data = data.as_in_context(ctx)
            label = label.as_in_context(ctx)
            with autograd.record():
                output = net(data)
                L = loss(output, label)
                L.backward()
            trainer.step(data.shape[0])
            metric.update([label], [output])
            if i % opt.log_interval == 0 and i > 0:
                name, acc = metric.get()
                print(f"[Epoch {epoch} Batch {i}] Training: {name}={acc:f}, "
                      f"loss {L.asnumpy().mean():.12f}")
        name, acc = metric.get()
        print(f"[Epoch {epoch}] Training: {name}={acc:f}")
        name, acc = test(ctx)
        print(f"[Epoch {epoch}] Validation: {name}={acc:f}")
    net.save_parameters(opt.out)


np.random.seed(1)           # of the order of the rows
train(opt.epochs, [mx.cpu(i) for i in range(opt.devices)])
