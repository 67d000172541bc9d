# %% [markdown]
# # Training on several devices, from scratch
#
# This example follows the chapter "Training on Multiple GPUs" of *Dive into
# Deep Learning* (d2l.ai).
#
# Everything that training on several devices needs is written out here:
# copying the parameters, splitting the batch, adding up gradients, updating.
# In the next example, `multiple_gpus_concise.py`, the library does it. The
# network is a small LeNet. No GPU is needed: logical CPU devices take their
# place. Logical CPU devices, `cpu(0)`, `cpu(1)`, ..., share one processor.
# Each has its own arrays, which are copied to it as to a GPU.
#
# These are the settings:

# %%
backend = None          # mxnet or torch; None: the installed backend
devices = [1, 2]        # numbers of devices, a run for each
epochs = 10             # passes over the training data
batch_size = 256        # global batch size, over all devices
lr = 0.2                # learning rate
data = "digits"         # digits, fashion-mnist, synthetic, or an IDX folder
limit = None            # keep only so many examples; None: all
init_scale = 0.0        # standard deviation of the initial weights; 0: below
out = "out"             # folder for the curves

# %%
import pathlib
import sys

import numpy as np

import mgpu
from mgpu import functional as F

if "ipykernel" not in sys.modules:  # a script: its options replace settings
    import command_line
    command_line.read(globals())

if backend:
    mgpu.set_backend(backend)
engine = mgpu.get_backend().name
out = pathlib.Path(out)
out.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Three ways to share the work
#
# **By network.** Each device keeps some of the layers and hands its results
# to the next device. A network that is too large for one device can be
# trained like this. But devices wait for each other, layers with equal
# amounts of work are hard to find, and the activations and gradients that
# pass between the devices can be large.
#
# **By layer.** Every layer is cut into pieces: each device computes some of
# the channels of a convolution, or some of the units of a dense layer.
# AlexNet was trained like that when two GPUs had too little memory each. The
# memory divides well. But after every layer all devices must exchange their
# results, so there is a barrier per layer.
#
# **By data.** Each device holds the whole model and gets a shard (a slice)
# of every batch. The devices synchronize once per batch, to sum gradients.
# It is the simplest of the three and works for any network. It does not help
# when the model itself is too large. This example does it this way.
#
# One step of it, on k devices:
#
# 1. cut the batch into k shards, one for each device;
# 2. each device computes the loss and the gradients of its shard;
# 3. the k gradients are added up, and every device gets the sum;
# 4. each device updates its own full copy of the parameters.
#
# All copies begin equal and receive the same sum, so they stay equal. In
# practice the batch grows k-fold, so that each device keeps as much to do as
# before, and the learning rate grows with it. A network with batch
# normalization would keep separate statistics on each device.

# %% [markdown]
# ## A small network
#
# The parameters are eight plain arrays: two convolutions and two dense
# layers. A network written like this hides nothing, and we see how its
# parameters get from device to device. They are initialized once, in NumPy,
# so every run below starts from the same values on either backend.
#
# The book's standard deviation, 0.01, suits thousands of steps: for the first
# 250 or so the loss hardly moves. The digits that come with mgpu have 6
# batches an epoch. They get 0.1, to leave that plateau within ten epochs.

# %%
scale = init_scale or (0.1 if data == "digits" else 0.01)
params = mgpu.models.lenet_params(scale)    # Normal(scale), biases zero
for name, p in zip(["W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4"], params):
    print(name, p.shape)
print(f"LeNet: {sum(p.size for p in params):,} parameters, backend {engine}")


def lenet(X, params):
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1 = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), 2)   # 28 -> 26 -> 13
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, W2, b2)), 2)  # 13 -> 9 -> 4
    h2 = h2.reshape((len(X), 800))                      # 50 x 4 x 4
    h3 = F.relu(F.dot(h2, W3) + b3)
    return F.dot(h3, W4) + b4


loss = mgpu.losses.SoftmaxCrossEntropyLoss()            # one per example

# %% [markdown]
# ## From device to device
#
# `get_params` copies parameters to a device and attaches a gradient to each,
# which is zero until a backward pass writes it.

# %%
new_params = mgpu.get_params(params, mgpu.try_gpu(0))
print("b1:", mgpu.to_numpy(new_params[1]))
print("b1 grad:", mgpu.to_numpy(mgpu.grad(new_params[1])))

# %% [markdown]
# Each device has computed the gradient of its examples. `allreduce` adds
# everything up on one device and copies the sum back to every other, in
# place. Two vectors on two devices:

# %%
pair = mgpu.list_devices(2)
xs = [mgpu.put(np.full((1, 2), i + 1.0, dtype=np.float32), device)
      for i, device in enumerate(pair)]
print("before allreduce:", *(mgpu.to_numpy(x) for x in xs))
mgpu.allreduce(xs)
print("after allreduce:", *(mgpu.to_numpy(x) for x in xs))

# %% [markdown]
# ## Splitting the data
#
# `split_and_load` cuts an array along its first axis and copies shard i to
# device i.

# %%
table = np.arange(20, dtype=np.float32).reshape(4, 5)
shards = mgpu.split_and_load(table, pair)
print("input:", table, "goes to:", pair, sep="\n")
print("output:", *(mgpu.to_numpy(shard) for shard in shards), sep="\n")

# %% [markdown]
# A batch has examples and labels, which must be cut in the same places.
# `split_batch` cuts both, and raises an error for different lengths. It cuts
# the last, odd batch of an epoch unevenly: the first shards get one more.

# %%
X_shards, y_shards = mgpu.split_batch(table[:3], np.arange(3), pair)
print("3 rows on 2 devices:", [shard.shape[0] for shard in X_shards])


# %% [markdown]
# ## One batch
#
# Now the step from above. All forward passes come first and then all
# backward passes, so that the devices work at the same time. Nothing here
# waits for one device before it gives work to the next. `sgd` divides by the
# global batch size. So the summed gradient becomes the gradient of the mean
# loss, on any number of devices, and however unevenly the batch was cut.
# `sgd` also sets gradients back to zero. That is why a device without
# examples of a very short batch need not run: it adds zero.

# %%
def forward(X, y, params):
    return loss(lenet(X, params), y) if len(X) else None


def train_batch(X, y, device_params, devices, lr):
    X_shards, y_shards = mgpu.split_batch(X, y, devices)
    with mgpu.record():
        losses = mgpu.parallel(forward, X_shards, y_shards, device_params)
    mgpu.backward(losses)
    for i in range(len(device_params[0])):
        mgpu.allreduce([mgpu.grad(params[i]) for params in device_params])
    for params in device_params:
        mgpu.sgd(params, lr, X.shape[0])
    return losses


# %% [markdown]
# ## All epochs
#
# The rest looks like any training loop. The parameters are copied to all
# devices once. The time is that of training only, without evaluation. The
# accuracy is computed on the first device; all copies are equal.

# %%
def train(num_devices, batch_size, lr):
    train_iter, test_iter = mgpu.datasets.load(data, batch_size, limit)
    devices = mgpu.list_devices(num_devices)
    device_params = [mgpu.get_params(params, device) for device in devices]
    animator = mgpu.Animator(
        "epoch", legend=["train loss", "test acc"],
        file=out / f"lenet-{engine}-{num_devices}.png")
    timer = mgpu.Timer()
    with animator:
        for epoch in range(epochs):
            metric = mgpu.Accumulator(2)    # sum of losses, examples
            timer.start()
            for X, y in train_iter:
                losses = train_batch(X, y, device_params, devices, lr)
                mgpu.synchronize(devices)
                metric.add(sum(mgpu.to_numpy(part).sum() for part in losses
                               if part is not None), len(X))
            timer.stop()
            accuracy = mgpu.evaluate_accuracy_gpu(
                [lambda X: lenet(X, device_params[0])], test_iter, devices[0])
            animator.add(epoch + 1, [metric[0] / metric[1], accuracy])
    print(f"{devices}, batch {batch_size}, rate {lr}: train loss "
          f"{animator.Y[0][-1]:.3f}, curve in {animator.file}")
    print(f"test acc: {animator.Y[1][-1]:.2f}, {timer.avg():.1f} sec/epoch "
          f"on {devices}")
    return animator.Y[1][-1], timer.avg()


# %% [markdown]
# First on one device, then on two with the same batch size and the same
# learning rate.

# %%
results = {count: train(count, batch_size, lr) for count in devices}

# %%
accuracies = [accuracy for accuracy, _ in results.values()]
print(f"accuracies differ by {max(accuracies) - min(accuracies):.3f}")
if 1 in results:
    for count, (_, seconds) in results.items():
        print(f"{count} device{'s' * (count > 1)}: "
              f"{results[1][1] / seconds:.2f} times as fast as one")

# %% [markdown]
# The accuracy should be about the same: both runs add up the same gradients,
# only in another order. Rounding then grows with every step, so the last
# digits differ.
#
# The time is another matter. LeNet is small, and on GPUs two devices gain
# next to nothing: the arithmetic of a batch takes less time than the Python
# code that asks for it. Logical CPU devices are slow enough that Python does
# not matter, and two of them on two free cores can come near a factor of two.
# The next example trains a network with far more work in each step.
