# %% [markdown]
# # Automatic parallelism
#
# An engine that knows which operation needs which result also knows which
# operations do not need each other, and may run those at the same time. You
# write plain code, one line after the other, and name no thread and no lock.
#
# This chapter makes two devices work together, then lets copying overlap
# with computing, with a clock beside it. It needs no GPU: logical CPU
# devices take their place.

# %%
import argparse
import pathlib
import queue
import sys

import numpy as np

import mgpu
from mgpu import functional as F

parser = argparse.ArgumentParser(description="Automatic parallelism.")
parser.add_argument("--backend", help="mxnet or torch (default: that of "
                    "MGPU_BACKEND, else mxnet)")
parser.add_argument("--devices", help="two, such as cpu:0,cpu:1 (default: "
                    "two GPUs, else two logical CPU devices)")
parser.add_argument("--size", type=int, help="rows and columns of the "
                    "matrices (default: 4000 on GPUs, 1024 on CPUs)")
parser.add_argument("--repeat", type=int, help="products in one run "
                    "(default: 50 on GPUs, 20 on CPUs)")
parser.add_argument("--out", default="out", help="folder for the figure")
args, unknown = parser.parse_known_args()
in_notebook = "ipykernel" in sys.modules    # its arguments are not ours
if unknown and not in_notebook:
    parser.error(f"unknown arguments: {' '.join(unknown)}")

if args.backend:
    mgpu.set_backend(args.backend)
backend = mgpu.get_backend().name
devices = (mgpu.device.as_devices(args.devices.split(","))
           if args.devices else mgpu.list_devices(2))
if len(devices) != 2:
    parser.error(f"this chapter compares two devices, not {len(devices)}")
on_gpus = all(device.kind == "gpu" for device in devices)
size = args.size or (4000 if on_gpus else 1024)
repeat = args.repeat or (50 if on_gpus else 20)
print(f"GPU1 is {devices[0]}, GPU2 is {devices[1]}: {repeat} products of "
      f"{size} x {size} matrices each, backend {backend}")

# %% [markdown]
# ## Two devices at once
#
# The work is a list of matrix products. No product uses another one's
# result, so nothing but the hardware says how many may run together. Each
# device gets a matrix of its own, with entries between 0 and 1.

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
# computes on a CPU in the thread that calls it, so there each device has a
# thread of its own. One line, the same meaning.
#
# The first use of a device pays for libraries and memory that later uses
# find ready. That must not be timed, so both devices run once before. Then
# each clock below waits for its device before it is read, at the start and
# at the end; otherwise it would measure how fast work can be queued.

# %%
mgpu.parallel(run, [x_gpu1, x_gpu2])
mgpu.synchronize(devices)

with mgpu.Benchmark("GPU1 time", devices[0]) as first:
    mgpu.parallel(run, [x_gpu1])

with mgpu.Benchmark("GPU2 time", devices[1]) as second:
    mgpu.parallel(run, [x_gpu2])

# %% [markdown]
# Now both are started with no wait in between, and one wait stands at the
# end.

# %%
with mgpu.Benchmark("GPU1 & GPU2", devices) as both:
    mgpu.parallel(run, [x_gpu1, x_gpu2])

# %%
def verdict(together, separate, shared):
    laps = [lap.seconds for lap in separate]
    ratio, least = together.seconds / sum(laps), max(laps) / sum(laps)
    if ratio < 0.95 * least:    # no overlap can do that
        outcome = "less than the longer part alone, so other work on this " \
            "machine disturbed a clock: run it again"
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
# core: on a busy machine, or one with a single core, the sum comes back.
#
# ## Computing and copying
#
# Results often have to leave the device: to the host, or to another device.
# The first result can travel while the second is computed, if whoever
# fetches does not wait for all of them first. For comparison, the two parts
# one after the other:

# %%
def copy_to_cpu(ys):
    return [mgpu.to_numpy(y) for y in ys]


with mgpu.Benchmark("Run on GPU1", devices[0]) as running:
    ys, = mgpu.parallel(run, [x_gpu1])

with mgpu.Benchmark("Copy to CPU", devices[0]) as copying:
    copy_to_cpu(ys)

# %% [markdown]
# For the overlap there are two tasks: one computes and hands over every
# product as soon as it is there (or queued), the other fetches whatever
# arrives. `to_numpy` waits for its own array alone, so the copy of product i
# needs product i and nothing that comes after it.

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
# How much there is to gain is bounded by the smaller of the two parts. A GPU
# has hardware for copies beside its arithmetic, and the copies cross a bus:
# there the smaller part can vanish, where the engine queues copies apart
# from products (MXNet does; PyTorch keeps one queue for both unless told
# otherwise). On a CPU a copy is a loop over memory that the products want
# too, and it is short: expect a small gain, or noise.
#
# ## What depends on what
#
# Training has far more structure than a list of products. Below is one step
# of a perceptron with two layers on one CPU and two GPUs. Boxes that no path
# of arrows connects may run at the same time: the gradient of the second
# layer is on its way to the CPU while the first layer is still going
# backwards. Nobody wants to schedule that by hand, and with an engine that
# knows the graph, nobody has to.

# %%
graph = None if in_notebook else pathlib.Path(args.out) / "graph.png"
if graph:
    graph.parent.mkdir(parents=True, exist_ok=True)
mgpu.plotting.plot_graph(graph)
print(f"the graph: {graph or 'above'}")

# %% [markdown]
# `exercises.py` goes on from here: independent operations on one device,
# many small ones, compute on two devices with copies between them, a look at
# how many cores were busy, and a graph with more dependencies.
