"""Image classification: warm-up, a cosine schedule, smoothed labels and a
metric, on a list of contexts."""
import argparse

import numpy as np
from gluon_networks import convnet, digits

import mgpu.compat.mxnet as mx
from mgpu.compat.mxnet import autograd, gluon

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--wd", type=float, default=1e-4)
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--kvstore", default="device")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--start", help="weights to begin with")
parser.add_argument("--out", default="images.params")
opt = parser.parse_args()

CLASSES = 10
context = [mx.cpu(i) for i in range(opt.devices)]


def smooth(label):
    """One-hot labels of which a part is spread over all classes."""
    off = opt.smoothing / CLASSES
    return np.where(np.arange(CLASSES) == label, 1 - opt.smoothing + off, off
                    ).astype(opt.dtype)


def batches(train):
    X, y = digits(train)
    y = np.stack([smooth(label) for label in y]) if train else y
    return gluon.data.DataLoader(
        gluon.data.ArrayDataset(X.astype(opt.dtype), y), opt.batch_size,
        shuffle=train, last_batch="discard" if train else "keep")


def split(batch):
    return [gluon.utils.split_and_load(x, ctx_list=context, batch_axis=0,
                                       even_split=False) for x in batch]


def test(net, val_data):
    metric = mx.metric.CompositeEvalMetric([
        mx.metric.Accuracy(), mx.metric.TopKAccuracy(3)])
    for batch in val_data:
        data, label = split(batch)
        outputs = net(data)
        metric.update(label, outputs)
    return metric.get_name_value()


def train(net):
    train_data, val_data = batches(train=True), batches(train=False)
    net = mx.initialize(net, mx.init.MSRAPrelu(), context)
    if opt.start:
        net.load_parameters(opt.start, ctx=context)
    steps = len(train_data)
    schedule = mx.lr_scheduler.CosineScheduler(
        opt.epochs * steps, base_lr=opt.lr, final_lr=0,
        warmup_steps=opt.warmup_epochs * steps, warmup_begin_lr=0)
    trainer = gluon.Trainer(
        net.collect_params(), "adamax",
        {"wd": opt.wd, "lr_scheduler": schedule}, kvstore=opt.kvstore)
    loss = gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False)
    total = mx.metric.Loss("cross-entropy")
    for epoch in range(opt.epochs):
        total.reset()
        for batch in train_data:
            data, label = split(batch)
            with autograd.record():
                outputs = net(data)
                losses = [loss(z, y) for z, y in zip(outputs, label)]
            autograd.backward(losses)
            trainer.step(len(batch[0]))
            total.update(None, losses)
        name, mean = total.get()
        print(f"epoch {epoch}: {name} {mean:.12f}, rate "
              f"{trainer.learning_rate:.6f}, {test(net, val_data)}")
    net.save_parameters(opt.out)


np.random.seed(1)           # of the order of the rows
train(convnet(opt.dtype))
