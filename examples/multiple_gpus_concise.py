# %% [markdown]
# # Training on several devices, the concise way
#
# The previous chapter wrote out each step of training on several devices.
# The library has all of it: it puts a network on a list of devices, adds up
# gradients, updates every copy. What remains to write is the network and the
# loop. The network is a ResNet-18, with far more work per parameter than
# LeNet, so that it pays to share it.

# %%
import argparse
import pathlib
import sys

import numpy as np

import mgpu

parser = argparse.ArgumentParser(description="Training, the concise way.")
parser.add_argument("--backend", help="mxnet or torch (default: that of "
                    "MGPU_BACKEND, else mxnet)")
parser.add_argument("--devices", default="1,2",
                    help="numbers of devices, a run for each")
parser.add_argument("--epochs", type=int,
                    help="default: 10 on GPUs, 2 on CPUs")
parser.add_argument("--batch-size", type=int, default=256,
                    help="per device")
parser.add_argument("--lr", type=float, default=0.1, help="per device")
parser.add_argument("--data", default="digits", help="digits, fashion-mnist, "
                    "synthetic, or a folder of IDX files")
parser.add_argument("--limit", type=int, help="keep so many examples; 0: all "
                    "(default: all on GPUs, 512 on CPUs)")
parser.add_argument("--out", default="out", help="folder for the curves")
args, unknown = parser.parse_known_args()
if unknown and "ipykernel" not in sys.modules:  # a notebook's are not ours
    parser.error(f"unknown arguments: {' '.join(unknown)}")

if args.backend:
    mgpu.set_backend(args.backend)
backend = mgpu.get_backend().name
has_gpu = mgpu.num_gpus() > 0
device_counts = [int(count) for count in args.devices.split(",")]
num_epochs = args.epochs or (10 if has_gpu else 2)
limit = (0 if has_gpu else 512) if args.limit is None else args.limit
out = pathlib.Path(args.out)
out.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## The network
#
# ResNet-18, cut to the measure of 28 x 28 pictures: the first convolution is
# 3 x 3 with stride 1, and no pooling follows it. Then come four stages of
# two residual blocks each, with 64, 128, 256 and 512 channels. The last
# three stages begin by halving height and width, with a 1 x 1 convolution on
# the shortcut, so the sizes go 28, 28, 14, 7, 4. A mean over all places and
# a dense layer end it.
#
# `resnet18` returns a network of the engine in use, a `gluon.Block` or a
# `torch.nn.Module`. Your own network of either kind works just as well.

# %%
net = mgpu.models.resnet18(num_classes=10)

# %% [markdown]
# ## The first weights, on all devices
#
# `initialize` puts the network on a list of devices. Weights are drawn once,
# here from a normal distribution with standard deviation 0.01, so that all
# copies hold the same bits; biases start at zero. What comes back is a list
# of replicas, one per device.
#
# Without GPUs we take the logical devices 1 and 2, so that device 0 stays
# free for the question below.

# %%
devices = ([mgpu.gpu(0), mgpu.gpu(1)] if mgpu.num_gpus() > 1
           else [mgpu.cpu(1), mgpu.cpu(2)])
replicas = mgpu.initialize(net, devices, init=mgpu.initializers.Normal(0.01))
print(f"ResNet-18: {len(replicas.params())} trainable arrays, "
      f"{sum(np.prod(p.shape) for p in replicas.params()):,} values, "
      f"{len(replicas.statistics())} running statistics, backend {backend}")

# %% [markdown]
# Four random observations, two for each device. Replica i works on shard i;
# all of them work at the same time.

# %%
X = np.random.default_rng(0).random((4, 1, 28, 28), dtype=np.float32)
X_shards = mgpu.split_and_load(X, devices)
for device, output in zip(devices, replicas(X_shards)):
    print(f"output on {device}: {tuple(output.shape)}, largest score "
          f"{abs(mgpu.to_numpy(output)).max():.0e}")

# %% [markdown]
# With weights that small and 18 layers the scores are next to nothing. The
# parameters live on the two devices and nowhere else:

# %%
weight = replicas.params()[0]
try:
    weight.data(mgpu.cpu(0))
except RuntimeError as error:
    print(f"not initialized on cpu: {error}")

# %%
kernels = [mgpu.to_numpy(weight.data(device))[0, 0] for device in devices]
for device, kernel in zip(devices, kernels):
    print(f"first kernel of {weight.name} on {device}:", kernel, sep="\n")
print("equal, bit for bit:", kernels[0].tobytes() == kernels[1].tobytes())

# %% [markdown]
# ## A step
#
# One step of training, from batch to update. Compare it with the previous
# chapter: `trainer.step` stands for all of its all-reduces and updates. It
# is told how many rows the whole batch has, and divides the summed gradients
# by that once.

# %%
loss = mgpu.losses.SoftmaxCrossEntropyLoss()
trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": args.lr})
y_shards = mgpu.split_and_load(np.array([0, 1, 2, 3]), devices)
with mgpu.record():
    losses = mgpu.parallel(loss, replicas(X_shards), y_shards)
mgpu.backward(losses)
trainer.step(4)
print("losses:", *(mgpu.to_numpy(part) for part in losses))

# %% [markdown]
# `train_batch(X, y, replicas, loss, trainer)` is the same, with the
# splitting in front. It divides by the rows that are there: 96 in the last
# batch of an epoch of 60,000 in steps of 256.
#
# ## Accuracy on all devices
#
# The test data can be shared out too: each batch is split, every replica
# predicts its part, and the correct predictions are counted as whole
# numbers, added, and divided once. For equal replicas the result is that of
# one device, exactly. Here they are equal except for the running statistics
# of batch normalisation, which each device takes from its own rows.

# %%
_, test_iter = mgpu.datasets.load(args.data, 64, limit=min(limit or 64, 64))
print("accuracy after one step:",
      mgpu.evaluate_accuracy_gpus(replicas, test_iter, mgpu.split_batch))


# %% [markdown]
# ## All epochs
#
# Each call of `train` starts anew: `force_reinit` draws the weights again and
# sets the running statistics back, else the second run would go on from the
# first. All devices are waited for once per epoch, before the clock is read.

# %%
def train(num_devices, batch_size, lr):
    train_iter, test_iter = mgpu.datasets.load(args.data, batch_size,
                                               limit or None)
    devices = mgpu.list_devices(num_devices)
    replicas = mgpu.initialize(
        net, devices, init=mgpu.initializers.Normal(0.01), force_reinit=True)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": lr})
    animator = mgpu.Animator(
        "epoch", legend=["train loss", "test acc"],
        file=out / f"resnet18-{backend}-{num_devices}.png")
    timer = mgpu.Timer(devices)     # waits for them, then reads the clock
    with animator:
        for epoch in range(num_epochs):
            timer.start()
            losses = [mgpu.train_batch(X, y, replicas, loss, trainer)
                      for X, y in train_iter]
            timer.stop()
            values = np.concatenate([mgpu.to_numpy(part) for batch in losses
                                     for part in batch if part is not None])
            animator.add(epoch + 1, [
                values.mean(), mgpu.evaluate_accuracy_gpus(replicas,
                                                           test_iter)])
    print(f"{devices}, batch {batch_size}, rate {lr:g}: train loss "
          f"{animator.Y[0][-1]:.3f} over {len(train_iter)} steps an epoch, "
          f"curve in {animator.file}")
    print(f"test acc: {animator.Y[1][-1]:.2f}, {timer.avg():.1f} sec/epoch "
          f"on {devices}")
    return timer.avg()


# %% [markdown]
# On one device with batches of 256 and the rate 0.1; then on two with
# batches of 512 and 0.2. The batch grows with the number of devices, so that
# each keeps its 256 rows, and the rate grows with the batch.

# %%
seconds = {count: train(count, args.batch_size * count, args.lr * count)
           for count in device_counts}

# %%
if 1 in seconds:
    for count in device_counts:
        print(f"{count} device{'s' * (count > 1)}: "
              f"{seconds[1] / seconds[count]:.2f} times as fast as one")

# %% [markdown]
# Computing outweighs what is exchanged in a step, which is why this network
# gains from a second device where LeNet on GPUs does not. The arithmetic per
# parameter decides, not the number of parameters.
#
# By default a CPU trains here on 512 pictures for two epochs, which is four
# steps with one device and two with two: enough to compare times, and far
# too few for an accuracy that means anything. With `--data fashion-mnist
# --limit 0 --epochs 10` on GPUs it is the full experiment.
#
# The loop need not be written at all: `mgpu.train(replicas, train_iter,
# test_iter, loss, trainer, num_epochs)` draws a progress bar, stops with a
# clear error when the loss is no longer a number, and returns accuracies,
# losses and times.
