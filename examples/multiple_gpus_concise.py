# %% [markdown]
# # Training on several devices, the concise way
#
# This example follows the chapter "Concise Implementation for Multiple GPUs"
# of *Dive into Deep Learning* (d2l.ai).
#
# The example `multiple_gpus.py` wrote out each step of training on several
# devices. The library does all of it: it puts a network on a list of devices,
# adds up gradients, updates every copy. Only the network and the loop are
# left to write. The network is a ResNet-18, with far more work per parameter
# than LeNet, so a second device pays. No GPU is needed: logical CPU devices
# take their place.
#
# These are the settings:

# %%
backend = None          # mxnet or torch; None: the installed backend
devices = [1, 2]        # devices of a process, a run for each; 1:2 by rank
epochs = 0              # passes over the data; 0: 10 on GPUs, 2 on CPUs
batch_size = 256        # examples per device
lr = 0.1                # learning rate per device
data = "digits"         # digits, fashion-mnist, synthetic, or an IDX folder
limit = None            # examples; 0: all; None: all on GPUs, 512 on CPUs
dtype = "float32"       # float32 or float64
weights = None          # file for the final weights, .npz
out = "out"             # folder for the curves

# %%
import pathlib
import sys

import numpy as np

import mgpu

if "ipykernel" not in sys.modules:  # a script: its options replace settings
    import command_line
    command_line.read(globals())

if backend:
    mgpu.set_backend(backend)
mgpu.distributed.init()     # several processes train one network
engine = mgpu.get_backend().name
has_gpu = mgpu.num_gpus() > 0
epochs = epochs or (10 if has_gpu else 2)
limit = (None if has_gpu else 512) if limit is None else limit or None
out = pathlib.Path(out)
out.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## The network
#
# ResNet-18, adapted to images of 28 x 28: the first convolution is 3 x 3
# with stride 1, and no pooling follows it. Then come four groups of two
# residual blocks each, with 64, 128, 256 and 512 channels. The last three
# groups begin by halving height and width, with a 1 x 1 convolution on the
# shortcut, so the sizes are 28, 28, 14, 7, 4. A global average pooling and a
# dense layer end the network.
#
# `resnet18` returns a network of the current backend, a `gluon.Block` or a
# `torch.nn.Module`. Your own network of either kind works as well.

# %%
net = mgpu.models.resnet18(num_classes=10)

# %% [markdown]
# ## Initial weights on all devices
#
# `initialize` puts the network on a list of devices. It initializes the
# weights once, here from a normal distribution with standard deviation 0.01,
# so that all devices hold the same bits. Biases start at zero. It returns
# replicas: the network itself on the first device, and copies of it on the
# others, which each pass overwrites.
#
# Without GPUs we take the logical devices 1 and 2. Device 0 stays free for
# the question below.

# %%
pair = ([mgpu.gpu(0), mgpu.gpu(1)] if mgpu.num_gpus() > 1
        else [mgpu.cpu(1), mgpu.cpu(2)])
replicas = mgpu.initialize(net, pair, init=mgpu.initializers.Normal(0.01),
                           dtype=dtype)
print(f"ResNet-18: {len(replicas.params())} trainable arrays, "
      f"{sum(np.prod(p.shape) for p in replicas.params()):,} values, "
      f"{len(replicas.statistics())} running statistics, backend {engine}")

# %% [markdown]
# Four random observations, two for each device. Replica i works on shard i;
# all of them work at the same time.

# %%
X = np.random.default_rng(0).random((4, 1, 28, 28), dtype=dtype)
X_shards = mgpu.split_and_load(X, pair)
for device, output in zip(pair, replicas(X_shards)):
    print(f"output on {device}: {tuple(output.shape)}, largest score "
          f"{abs(mgpu.to_numpy(output)).max():.0e}")

# %% [markdown]
# With weights that small and 18 layers the scores are almost zero. The
# parameters are on the two devices and nowhere else:

# %%
weight = replicas.params()[0]
try:
    weight.data(mgpu.cpu(0))
except RuntimeError as error:
    print(f"not initialized on cpu: {error}")

# %%
kernels = [mgpu.to_numpy(weight.data(device))[0, 0] for device in pair]
for device, kernel in zip(pair, kernels):
    print(f"first kernel of {weight.name} on {device}:", kernel, sep="\n")
print("equal, bit for bit:", kernels[0].tobytes() == kernels[1].tobytes())

# %% [markdown]
# ## A step
#
# One step of training, from batch to update. Compare it with the example
# from scratch: `backward` adds the gradients of all devices in the network,
# and `trainer.step` updates it once. Its argument is the number of examples
# of the whole batch, by which the sums are divided.

# %%
loss = mgpu.losses.SoftmaxCrossEntropyLoss()
trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": lr})
y_shards = mgpu.split_and_load(np.array([0, 1, 2, 3]), pair)
with mgpu.record():
    losses = mgpu.parallel(loss, replicas(X_shards), y_shards)
mgpu.backward(losses)
trainer.step(4)
print("losses:", *(mgpu.to_numpy(part) for part in losses))

# %% [markdown]
# `train_batch(X, y, replicas, loss, trainer)` splits the batch and then does
# the same. It divides by the size of this batch: 96 in the last batch of an
# epoch of 60,000 in steps of 256.
#
# ## Accuracy on all devices
#
# The test data can be split too: every replica predicts its shard of each
# batch. The correct predictions are counted as whole numbers, added, and
# divided once. All devices use the network's weights and running statistics,
# so the result is that of one device, exactly.

# %%
_, test_iter = mgpu.datasets.load(data, 64, limit=min(limit or 64, 64),
                                  dtype=dtype)
print("accuracy after one step:",
      mgpu.evaluate_accuracy_gpus(replicas, test_iter, mgpu.split_batch))


# %% [markdown]
# ## All epochs
#
# Each call of `train` starts anew: `force_reinit` initializes the weights
# again and resets the running statistics. Without it the second run would
# continue the first. All devices are waited for once per epoch, before the
# clock is read.
#
# The batch grows with the number of devices: 256 examples for each of them.
# The rate grows with the batch. `replicas.span.total` counts the devices of
# all processes: started by `mgpu launch -n 2`, this script trains on twice as
# many, and `gather` brings what each process measured to all. Each process
# receives its examples of every batch, perhaps none.

# %%
def train(num_devices):
    by_rank = str(num_devices).split(":")       # one number stands for all
    devices = mgpu.list_devices(
        int(by_rank[mgpu.distributed.rank() % len(by_rank)]))
    replicas = mgpu.initialize(
        net, devices, init=mgpu.initializers.Normal(0.01), force_reinit=True,
        dtype=dtype)
    total = replicas.span.total
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": lr * total})
    train_iter, test_iter = mgpu.datasets.load(
        data, batch_size * total, limit, dtype=dtype)
    animator = mgpu.Animator(
        "epoch", legend=["train loss", "test acc"],
        file=out / f"resnet18-{engine}-{total}.png")
    timer = mgpu.Timer(devices)     # waits for them, then reads the clock
    with animator:
        for epoch in range(epochs):
            timer.start()
            losses = [mgpu.train_batch(X, y, replicas, loss, trainer)
                      for X, y in train_iter]
            timer.stop()
            values = [mgpu.to_numpy(part) for batch in losses
                      for part in batch if part is not None]
            summed, rows = np.sum(mgpu.distributed.gather(
                [sum(float(x.sum()) for x in values), sum(map(len, values))]),
                axis=0)
            animator.add(epoch + 1, [
                summed / rows, mgpu.evaluate_accuracy_gpus(replicas,
                                                           test_iter)])
    where = f"{devices}" + (f", {total} devices in all" * (
        mgpu.distributed.world_size() > 1))
    print(f"{where}, batch {batch_size * total}, rate {lr * total:g}: train "
          f"loss {animator.Y[0][-1]:.3f} over {len(train_iter)} steps an "
          f"epoch, curve in {animator.file}")
    print(f"test acc: {animator.Y[1][-1]:.2f}, {timer.avg():.1f} sec/epoch "
          f"on {where}")
    if weights and mgpu.distributed.is_main():
        np.savez(weights, **{p.name: mgpu.to_numpy(p.data())
                             for p in replicas.params()})
    return timer.avg()


# %% [markdown]
# First on one device with batches of 256 and the rate 0.1; then on two with
# batches of 512 and 0.2.

# %%
seconds = {count: train(count) for count in devices}

# %%
if 1 in seconds:
    for count in devices:
        print(f"{count} device{'s' * (count != 1)}: "
              f"{seconds[1] / seconds[count]:.2f} times as fast as one")

# %% [markdown]
# In a step of this network computing takes far longer than exchanging
# gradients. That is why it gains from a second device where LeNet on GPUs does
# not. The arithmetic per parameter decides, not the number of parameters.
#
# By default a CPU trains here on 512 images for two epochs. That is four
# steps with one device and two with two: enough to compare times, and far too
# few for an accuracy that means anything. On GPUs, `--data fashion-mnist
# --limit 0 --epochs 10` is the full experiment of the book.
#
# The loop need not be written at all: `mgpu.train(replicas, train_iter,
# test_iter, loss, trainer, num_epochs)` draws a progress bar, stops with a
# clear error when the loss is no longer a number, and returns accuracies,
# losses and times.
