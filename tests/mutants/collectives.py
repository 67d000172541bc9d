"""Wrong all-reduces."""
from mutants.planting import Mutant, edit, together

_TEST = "test_collectives.py::test_allreduce_is_exact_and_in_place[torch-"
_COMBINE, _REDUCE = "mgpu.collectives:_combine", "mgpu.collectives:_reduce"
_BROADCAST = "mgpu.collectives:_broadcast"
_BLOCKS = "mgpu.collectives:_reduce_blocks"
_CUT = "test_collectives.py::test_arrays_are_cut_between_threads[torch-"

MUTANTS = [
    Mutant("reduce-rebinds", "the sum is a new array that nobody else holds",
           edit(_COMBINE, "into += other", "into = into + other"),
           (_TEST + "naive-sum-2]",)),
    Mutant("broadcast-rebinds",
           "list entries are replaced instead of written in place",
           edit(_BROADCAST, "x[:] = data[root]", "data[i] = data[root]"),
           (_TEST + "naive-sum-2]",)),
    Mutant("broadcast-adds", "the sum is added to what the others held",
           edit(_BROADCAST, "x[:] =", "x +="), (_TEST + "naive-sum-2]",)),
    Mutant("reduce-adds-twice", "each device counts twice",
           edit(_REDUCE, "_combine(op, data[root], x)",
                "_combine(op, data[root], x), _combine(op, data[root], x)"),
           (_TEST + "naive-sum-2]",)),
    Mutant("reduce-skips-a-device", "the one after the root does not count",
           edit(_REDUCE, "i != root", "i not in (root, root + 1)"),
           (_TEST + "naive-sum-3]",)),
    Mutant("reduce-drops-the-last", "the last device does not count",
           edit(_REDUCE, "enumerate(data)", "enumerate(data[:-1])"),
           (_TEST + "naive-sum-2]",)),
    Mutant("nothing-broadcast", "only the root holds the sum",
           edit("mgpu.collectives:_naive", "_broadcast(data, op, root)",
                "pass"), (_TEST + "naive-sum-2]",)),
    Mutant("broadcast-misses-the-last", "the last device keeps its own",
           edit(_BROADCAST, "enumerate(data)", "enumerate(data[:-1])"),
           ("test_collectives.py::test_broadcast[torch-2dev]",)),
    Mutant("root-ignored", "everything is collected on device 0",
           edit("mgpu.collectives:_in_place", "algorithm(data, op, root)",
                "algorithm(data, op, 0)"),
           ("test_collectives.py::test_reduce_leaves_the_others[torch-*",)),
    Mutant("mean-is-a-sum", "the mean is not divided",
           edit("mgpu.collectives:_in_place", 'op == "mean"', "False"),
           (_TEST + "naive-mean-2]",)),
    Mutant("mean-divides-at-the-root", "the others keep the sum",
           edit("mgpu.collectives:_in_place", "data if everywhere else",
                "[data[root]] if everywhere else"),
           (_TEST + "naive-mean-2]",)),
    Mutant("average-of-averages", "each addition halves: later devices weigh "
           "more", together(
               edit(_COMBINE, "into += other", "into[:] = (into + other) / 2 "
                    'if op == "mean" else into + other'),
               edit("mgpu.collectives:_in_place", 'op == "mean"', "False")),
           (_TEST + "naive-mean-3]",)),
    Mutant("max-is-min", "the largest value is lost",
           edit(_COMBINE, "ops.maximum", "ops.minimum"),
           (_TEST + "naive-max-2]",)),
    Mutant("order-of-additions", "the naive sum is taken from the last device "
           "on", edit(_REDUCE, "enumerate(data)",
                      "reversed(list(enumerate(data)))"),
           ("test_collectives.py::test_sums_are_taken_in_the_documented_order"
            "[torch-naive-*",)),
    Mutant("ring-loses-the-remainder", "what does not divide by K stays",
           edit("mgpu.collectives:_chunks",
                "bounds = shard_bounds(len(flat[0]), len(data))",
                "n = len(flat[0]) // len(data)\n"
                "    bounds = [(c * n, c * n + n) for c in range(len(data))]"),
           (_TEST + "ring-sum-*",)),
    Mutant("ring-one-step-short", "the last step of passing on is left out",
           edit("mgpu.collectives:_ring", "for step in range(k - 1):\n"
                "        for i in range(k):\n            c = (i + 1 - step)",
                "for step in range(k - 2):\n"
                "        for i in range(k):\n            c = (i + 1 - step)"),
           (_TEST + "ring-sum-3]",)),
    Mutant("tree-needs-a-power-of-two", "a device without a partner is left "
           "out", edit("mgpu.collectives:_tree", "while gap < k",
                       "while 2 * gap <= k"), (_TEST + "tree-sum-3]",)),
    Mutant("sharded-without-gather", "each slice is complete on its owner "
           "alone", edit("mgpu.collectives:_sharded", "_naive(", "_reduce("),
           (_TEST + "sharded-sum-2]",)),
    Mutant("many-forgets-a-root", "arrays collected on the last device are "
           "not reduced", edit("mgpu.collectives:allreduce_many", "at == root",
                               "at == root < k - 1"),
           ("test_collectives.py::test_many_lists_are_reduced_alike"
            "[torch-2dev-strict]",)),
    Mutant("many-sums-a-mean", "the mean is not divided",
           edit(_BLOCKS, 'op == "mean"', "False"), (_CUT + "2dev-mean]",)),
    Mutant("block-not-written-back", "only device 0 holds the sum",
           edit(_BLOCKS, "x[...] = first", "pass"), (_CUT + "2dev-sum]",)),
    Mutant("blocks-overlap", "the last block of a share reaches into the next "
           "one", edit(_BLOCKS, "min(at + step, high)", "at + step"),
           (_CUT + "2dev-sum]",)),
    Mutant("a-share-is-lost", "the last thread's share is not reduced",
           edit("mgpu.collectives:_on_host", "for i in range(threads)]",
                "for i in range(max(1, threads - 1))]"),
           (_CUT + "3dev-sum]",)),
    Mutant("block-drops-the-last", "the last device does not count",
           edit(_BLOCKS, "for x in others:\n                    function",
                "for x in others[:-1]:\n                    function"),
           (_CUT + "2dev-sum]",)),
    Mutant("scatter-without-reduce", "device i keeps its own slice",
           edit("mgpu.collectives:reducescatter", "_reduce(slices, op, i)",
                "pass"),
           ("test_collectives.py::test_reducescatter[torch-2dev-sum]",)),
    Mutant("gather-reversed", "the last device's rows come first",
           edit("mgpu.collectives:gathered", "for x in data]",
                "for x in data[::-1]]"),
           ("test_collectives.py::test_allgather[torch-3dev-0]",)),
    Mutant("gradient-of-one-device", "what the other devices gave has no "
           "gradient", edit("mgpu.functional:allreduce",
                            "backend.put(x, arrays[0])",
                            "backend.ops.stop_gradient(backend.put(x, "
                            "arrays[0]))"),
           ("test_functional.py::test_allreduce_gradients[torch-2dev-sum]",)),
    Mutant("all-roots-alike", "every array is collected on device 0",
           edit("mgpu.collectives:assign_roots",
                "min(range(k), key=lambda d: (load[d], d))", "0"),
           ("test_collectives.py::test_equal_sizes_go_round[2]",)),
]
