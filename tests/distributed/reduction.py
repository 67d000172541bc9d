"""Sums of arrays over two ranks with two devices each, against NumPy."""
import sys

import numpy as np

import mgpu
from mgpu.collectives import allreduce_many
from mgpu.collectives.strategies import strategy_of
from mgpu.distributed import strategy

#: around the length from which an array goes by itself, and two dtypes
SHAPES = [(3,), (600, 500), (7, 5), (262_144,), (262_143,), (513, 512), (2,)]
DTYPES = ["float32", "float32", "float64", "float32", "float32", "float64",
          "float32"]


def values(j, device):
    """Array j on a device, numbered over all ranks; sums of it are exact."""
    rng = np.random.default_rng([j, device])
    return rng.integers(-64, 64, SHAPES[j]).astype(DTYPES[j])


def check(world, backend, op):
    """Every device has what NumPy finds."""
    device = [mgpu.cpu(i) for i in range(2)]
    lists = [[backend.put(values(j, 2 * world.rank + i), device[i])
              for i in range(2)] for j in range(len(SHAPES))]
    allreduce_many(lists, op=op, algorithm=strategy.over_processes(
        strategy_of("auto"), world.span(2)))
    reduced = {"sum": np.sum, "mean": np.mean, "max": np.max}[op]
    for j, arrays in enumerate(lists):
        wanted = reduced([values(j, i) for i in range(4)], axis=0)
        for x in arrays:
            np.testing.assert_array_equal(mgpu.to_numpy(x), wanted)


def main():
    mgpu.set_backend(sys.argv[1])
    world, backend = mgpu.distributed.init(), mgpu.get_backend()
    messages, carried = [], world.engine.allreduce

    def counted(arrays, op):
        messages.append([x.nbytes for x in arrays])
        carried(arrays, op)
    world.engine.allreduce = counted
    for op in ("sum", "mean", "max"):
        check(world, backend, op)
    # The large ones go with the first of the two messages of small ones.
    assert [len(x) for x in messages] == [4, 1] * 3, messages
    strategy.BUCKET, messages[:] = 400_000, []
    check(world, backend, "sum")
    assert len(messages) > 2, messages
    print("alike")


if __name__ == "__main__":
    main()
