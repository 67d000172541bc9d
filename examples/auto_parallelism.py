# %% [markdown]
# # Automatic parallelism
#
# This example follows the chapter "Automatic Parallelism" of *Dive into Deep
# Learning* (d2l.ai).
#
# A framework that tracks the dependencies of operations can run independent
# operations at the same time. You write plain code, one line after the other,
# without threads and locks.
#
# Here two devices work together, and then copying overlaps with computing. A
# clock measures both. No GPU is needed: logical CPU devices take their place.
# Logical CPU devices, `cpu(0)`, `cpu(1)`, ..., share one processor. Each has
# its own arrays, which are copied to it as to a GPU.
#
# These are the settings:

# %%
backend = None      # mxnet or torch; None: the installed backend
devices = "auto"    # two, such as cpu:0,cpu:1; auto: GPUs, else logical CPUs
size = 0            # rows of a matrix; 0: 4000 on GPUs, 1024 on CPUs
repeat = 0          # products in one run; 0: 50 on GPUs, 20 on CPUs
out = "out"         # folder for the figure

# %%
import pathlib
import queue
import sys

import numpy as np

import mgpu
from mgpu import functional as F

if "ipykernel" not in sys.modules:  # a script: its options replace settings
    import command_line
    command_line.read(globals())

if backend:
    mgpu.set_backend(backend)
devices = mgpu.list_devices(2) if devices == "auto" else \
    mgpu.device.as_devices(devices.split(","))
if len(devices) != 2:
    sys.exit(f"error: expected two devices; received {len(devices)}")
on_gpus = all(device.kind == "gpu" for device in devices)
size = size or (4000 if on_gpus else 1024)
repeat = repeat or (50 if on_gpus else 20)
print(f"GPU1 is {devices[0]}, GPU2 is {devices[1]}: {repeat} products of "
      f"{size} x {size} matrices each, backend {mgpu.get_backend().name}")

# %% [markdown]
# ## Two devices at once
#
# The work is a list of matrix products. No product uses the result of another
# one, so only the hardware decides how many may run together. Each device
# gets a matrix of its own, with entries between 0 and 1.

# %%
def run(x):
    return [F.dot(x, x) for _ in range(repeat)]


rng = np.random.default_rng(0)
x_gpu1, x_gpu2 = (
    mgpu.put(rng.random((size, size), dtype=np.float32), device)
    for device in devices)

# %% [markdown]
# `mgpu.parallel(run, [x])` calls `run` once per entry of the list, entry i
# for device i. On MXNet, and on a GPU, the call only queues the work. PyTorch
# computes on a CPU in the thread that calls it, so there each device has its
# own thread. The line means the same on both backends.
#
# The first use of a device takes longer: libraries are loaded and memory is
# allocated. That must not be timed, so both devices run once before. Each
# clock below waits for its device before it is read, at the start and at the
# end. Otherwise it would measure how fast work can be queued.

# %%
mgpu.parallel(run, [x_gpu1, x_gpu2])
mgpu.synchronize(devices)

with mgpu.Benchmark("GPU1 time", devices[0]) as first:
    mgpu.parallel(run, [x_gpu1])

with mgpu.Benchmark("GPU2 time", devices[1]) as second:
    mgpu.parallel(run, [x_gpu2])

# %% [markdown]
# Now both are started with no wait in between. There is one wait, at the
# end.

# %%
with mgpu.Benchmark("GPU1 & GPU2", devices) as both:
    mgpu.parallel(run, [x_gpu1, x_gpu2])

# %%
def verdict(together, separate, shared):
    laps = [lap.seconds for lap in separate]
    ratio, least = together.seconds / sum(laps), max(laps) / sum(laps)
    if ratio < 0.95 * least:    # no overlap can do that
        outcome = "less than the longer task took by itself, so other " \
            "programs disturbed a clock: run it again"
    elif ratio < 0.9:
        outcome = "the two overlapped"
    else:
        outcome = "the two gained little or nothing from each other"
    print(f"    {ratio:.2f} of the sum {sum(laps):.4f}: {outcome} (they "
          f"share {shared}; perfect: {least:.2f})")


verdict(both, [first, second], "nothing but the host" if on_gpus else
        "the cores and the memory of one CPU")

# %% [markdown]
# Logical CPU devices come close to a half only while each finds a free
# core. On a busy machine, or one with a single core, both together take as
# long as one after the other.
#
# ## Computing and copying
#
# Results often have to leave the device, for the host or for another device.
# The first result can be copied while the second is computed, unless the copy
# waits for all of them. For comparison, here are the two tasks one after the
# other:

# %%
def copy_to_cpu(ys):
    return [mgpu.to_numpy(y) for y in ys]


with mgpu.Benchmark("Run on GPU1", devices[0]) as running:
    ys, = mgpu.parallel(run, [x_gpu1])

with mgpu.Benchmark("Copy to CPU", devices[0]) as copying:
    copy_to_cpu(ys)

# %% [markdown]
# For the overlap the two tasks run at the same time. One computes and hands
# over every product as soon as it is there (or queued). The other fetches
# what arrives. `to_numpy` waits for its own array only, so the copy of
# product i needs product i and nothing that comes after it.

# %%
del ys
handed_over = queue.SimpleQueue()


def compute():
    for _ in range(repeat):
        handed_over.put(F.dot(x_gpu1, x_gpu1))


def fetch():
    return [mgpu.to_numpy(handed_over.get()) for _ in range(repeat)]


with mgpu.Benchmark("Run on GPU1 and copy to CPU", devices[0]) as overlap:
    mgpu.parallel(lambda task: task(), [compute, fetch])

verdict(overlap, [running, copying], "the link between GPU and host"
        if on_gpus else "the memory of the CPU, which both tasks use")

# %% [markdown]
# The gain is at most the time of the shorter task. A GPU has separate
# hardware for copies, and the copies cross a bus. There the shorter task can
# be hidden completely, if the framework queues copies and products separately.
# MXNet does. PyTorch uses one queue for both by default. On a CPU a copy is a
# short loop over memory that the products use too: expect a small gain, or
# noise.
#
# ## What depends on what
#
# Training has far more structure than a list of products. The figure shows
# one step of a perceptron with two layers on one CPU and two GPUs. Boxes that
# no path of arrows connects may run at the same time. For example, the
# gradient of the second layer is copied to the CPU while the backward pass of
# the first layer still runs. The framework schedules that from the graph.

# %%
graph = None    # in a notebook it is shown here
if "ipykernel" not in sys.modules:
    graph = pathlib.Path(out) / "graph.png"
    graph.parent.mkdir(parents=True, exist_ok=True)
mgpu.plotting.plot_graph(graph)
print(f"the graph: {graph or 'above'}")

# %% [markdown]
# `exercises.py` continues: independent operations on one device, many small
# ones, computing on two devices with copies between them, how many cores were
# busy, and a graph with more dependencies.
