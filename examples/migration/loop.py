"""The loop of the legacy script in mgpu, for either backend."""
import mgpu

DEVICES = [mgpu.cpu(0), mgpu.cpu(1)]


def start(net, schedule):
    replicas = mgpu.initialize(net, DEVICES)    # its values stay
    return replicas, mgpu.Trainer(replicas, "sgd", {
        "momentum": 0.5, "wd": 0.001, "lr_scheduler": schedule})


def train(replicas, trainer, batches, test, epochs):
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    for epoch in range(epochs):
        total = 0
        for X, y in batches:
            X_shards, y_shards = mgpu.split_batch(X, y, DEVICES)
            with mgpu.record():
                losses = mgpu.parallel(loss, replicas(X_shards), y_shards)
            mgpu.backward(losses)
            trainer.step(len(X))
            total += sum(float(mgpu.to_numpy(x).sum()) for x in losses)
        right = mgpu.evaluate_accuracy_gpus(replicas, test)
        print(f"epoch {epoch}: loss {total / 256:.4f}, accuracy {right:.3f}")


def schedule():
    return mgpu.lr_scheduler.MultiFactorScheduler([4], 0.5, base_lr=0.125)


def digits():
    return mgpu.datasets.digits(64, resize=16, limit=256, shuffle=False)
