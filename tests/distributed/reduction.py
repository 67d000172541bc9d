"""Sums of arrays over two ranks with two devices each, against NumPy: a part
of `two_ranks`."""
import numpy as np

import mgpu
from mgpu.collectives import allreduce_many, over_processes as strategy
from mgpu.collectives.strategies import strategy_of

#: around the length from which an array goes by itself, and two dtypes
SHAPES = [(3,), (600, 500), (7, 5), (262_144,), (262_143,), (513, 512), (2,)]
DTYPES = ["float32", "float32", "float64", "float32", "float32", "float64",
          "float32"]


def values(j, device):
    """Array j on a device, numbered over all ranks; sums of it are exact."""
    rng = np.random.default_rng([j, device])
    return rng.integers(-64, 64, SHAPES[j]).astype(DTYPES[j])


def reduced(world, op):
    """Whether every device has what NumPy finds."""
    lists = [[mgpu.put(values(j, 2 * world.rank + i), mgpu.cpu(i))
              for i in range(2)] for j in range(len(SHAPES))]
    allreduce_many(lists, op=op, algorithm=strategy.over_processes(
        strategy_of("auto"), world.span(2)))
    expected = [{"sum": np.sum, "mean": np.mean, "max": np.max}[op](
        [values(j, i) for i in range(4)], axis=0) for j in range(len(SHAPES))]
    return all(np.array_equal(mgpu.to_numpy(x), one) for arrays, one
               in zip(lists, expected) for x in arrays)


def report(rank):
    """What is right, and how many arrays each message had."""
    world, messages, found = mgpu.distributed.current(), [], {}
    carried, bucket = world._comm.allreduce, strategy.BUCKET

    def counted(arrays, op):
        messages.append(len(arrays))
        carried(arrays, op)
    world._comm.allreduce = counted
    try:
        for op in ("sum", "mean", "max"):
            found[op] = reduced(world, op)
        found["messages"] = messages[:]
        strategy.BUCKET, messages[:] = 400_000, []
        found["in small messages"] = reduced(world, "sum")
        found["small buckets"] = messages
    finally:
        world._comm.allreduce, strategy.BUCKET = carried, bucket
    return found
