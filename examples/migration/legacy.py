"""Step 1: a Gluon project as MXNet's example/gluon/image_classification.py
does it: a network of the zoo, contexts, a Trainer, a schedule, a metric."""
import numpy as np

import mgpu

mx = mgpu.mxnet_compat()        # `import mxnet as mx`, on NumPy's of today
from mxnet import autograd, gluon                           # noqa: E402
from mxnet.gluon.model_zoo.vision import BasicBlockV1, ResNetV1  # noqa: E402

CONTEXTS = [mx.cpu(0), mx.cpu(1)]
EPOCHS, BATCH = 2, 64


def digits():
    """256 digits to train on and 128 to test on, of 16 x 16 pixels."""
    return [[np.concatenate(parts) for parts in zip(*batches)]
            for batches in mgpu.datasets.digits(
                BATCH, resize=16, limit=256, shuffle=False)]


def resnet():
    """ResNet-18 with a quarter of its channels, for small images."""
    mx.random.seed(1)
    net = ResNetV1(BasicBlockV1, [2, 2, 2, 2], [16, 16, 32, 64, 128],
                   classes=10, thumbnail=True)
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 1, 16, 16)))
    return net


def schedule():
    return mx.lr_scheduler.MultiFactorScheduler([4], 0.5, base_lr=0.125)


def main():
    train, test = [gluon.data.DataLoader(gluon.data.ArrayDataset(*pair), BATCH)
                   for pair in digits()]
    net = resnet()
    net.collect_params().reset_ctx(CONTEXTS)
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {
        "momentum": 0.5, "wd": 0.001, "lr_scheduler": schedule()})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(EPOCHS):
        total = 0
        for X, y in train:
            X_shards = gluon.utils.split_and_load(X, CONTEXTS)
            y_shards = gluon.utils.split_and_load(y, CONTEXTS)
            with autograd.record():
                losses = [loss(net(a), b) for a, b in zip(X_shards, y_shards)]
            for x in losses:
                x.backward()
            trainer.step(len(X))
            total += sum(float(x.sum().asscalar()) for x in losses)
        metric = mx.metric.Accuracy()
        for X, y in test:
            metric.update(y, net(X.as_in_context(CONTEXTS[0])))
        print(f"epoch {epoch}: loss {total / 256:.4f}, accuracy "
              f"{metric.get()[1]:.3f}")
    net.export("net")
    trainer.save_states("net.states")


if __name__ == "__main__":
    main()
