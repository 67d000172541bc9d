"""Wrong all-reduces."""
from mutants.planting import Mutant, edit, together

_TEST = "test_collectives.py::test_allreduce_is_exact_and_in_place[torch-"
_STRATEGIES = "mgpu.collectives.strategies:"
_COMBINE, _REDUCE = _STRATEGIES + "combine", _STRATEGIES + "reduce_to"
_BROADCAST = _STRATEGIES + "broadcast_from"
_ALL = _STRATEGIES + "allreduce_by"
_SHARED = ("test_collectives.py::test_arrays_that_share_memory_are_refused"
           "[torch-")
_BLOCKS = "mgpu.host_memory:reduce_blocks"
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
           edit(_REDUCE, "combine(op, data[root], x)",
                "combine(op, data[root], x), combine(op, data[root], x)"),
           (_TEST + "naive-sum-2]",)),
    Mutant("reduce-skips-a-device", "the one after the root does not count",
           edit(_REDUCE, "i != root", "i not in (root, root + 1)"),
           (_TEST + "naive-sum-3]",)),
    Mutant("reduce-drops-the-last", "the last device does not count",
           edit(_REDUCE, "enumerate(data)", "enumerate(data[:-1])"),
           (_TEST + "naive-sum-2]",)),
    Mutant("nothing-broadcast", "only the root holds the sum",
           edit(_STRATEGIES + "Naive.allreduce_list",
                "broadcast_from(data, root)", "pass"),
           (_TEST + "naive-sum-2]",)),
    Mutant("broadcast-misses-the-last", "the last device keeps its own",
           edit(_BROADCAST, "enumerate(data)", "enumerate(data[:-1])"),
           ("test_collectives.py::test_broadcast[torch-2dev]",)),
    Mutant("root-ignored", "everything is collected on device 0",
           edit("mgpu.collectives:reduce", "lists[0]), op, root)",
                "lists[0]), op, 0)"),
           ("test_collectives.py::test_reduce_leaves_the_others[torch-*",)),
    Mutant("mean-is-a-sum", "the mean is not divided",
           edit(_ALL, "x /= len(data)", "pass"),
           (_TEST + "naive-mean-2]",)),
    Mutant("mean-divides-at-the-root", "the others keep the sum",
           edit(_ALL, "for x in data:", "for x in data[:1]:"),
           (_TEST + "naive-mean-2]",)),
    Mutant("average-of-averages", "each addition halves: later devices weigh "
           "more", together(
               edit(_COMBINE, "into += other", "into[:] = (into + other) / 2"),
               edit(_ALL, 'op != "mean" or strategy.divides', "True")),
           (_TEST + "naive-mean-3]",)),
    Mutant("max-is-min", "the largest value is lost",
           edit(_COMBINE, "ops.maximum", "ops.minimum"),
           (_TEST + "naive-max-2]",)),
    Mutant("order-of-additions", "the naive sum is taken from the last device "
           "on", edit(_REDUCE, "enumerate(data)",
                      "reversed(list(enumerate(data)))"),
           ("oracle/test_exchange.py::test_allreduce[3dev-naive-sum]",)),
    Mutant("ring-loses-the-remainder", "what does not divide by K stays",
           edit(_STRATEGIES + "chunks_of",
                "bounds = shard_bounds(len(flat[0]), len(data))",
                "n = len(flat[0]) // len(data)\n"
                "    bounds = [(c * n, c * n + n) for c in range(len(data))]"),
           (_TEST + "ring-sum-*",)),
    Mutant("ring-one-step-short", "the last step of passing on is left out",
           edit(_STRATEGIES + "Ring.allreduce_list",
                "for step in range(k - 1):\n"
                "        for i in range(k):\n            c = (i + 1 - step)",
                "for step in range(k - 2):\n"
                "        for i in range(k):\n            c = (i + 1 - step)"),
           (_TEST + "ring-sum-3]",)),
    Mutant("tree-needs-a-power-of-two", "a device without a partner is left "
           "out", edit(_STRATEGIES + "Tree.allreduce_list", "while gap < k",
                       "while 2 * gap <= k"), (_TEST + "tree-sum-3]",)),
    Mutant("sharded-without-gather", "each slice is complete only on "
           "its owner", edit(_STRATEGIES + "Sharded.allreduce_list",
                         "broadcast_from(column, c)", "pass"),
           (_TEST + "sharded-sum-2]",)),
    Mutant("many-forgets-a-root", "arrays collected on the last device are "
           "not reduced", edit(_STRATEGIES + "Balanced.allreduce",
                               "root == device", "root == device == 0"),
           ("test_collectives.py::test_many_lists_are_reduced_alike"
            "[torch-2dev-strict]",)),
    Mutant("block-not-written-back", "only device 0 holds the sum",
           edit(_BLOCKS, "x[...] = first", "pass"), (_CUT + "2dev-sum]",)),
    Mutant("blocks-overlap", "the last block of a share reaches into the next "
           "one", edit("mgpu.host_memory:_blocks", "min(at + step, high)",
                       "at + step"),
           (_CUT + "2dev-sum]",)),
    Mutant("a-share-is-lost", "the last thread's share is not reduced",
           edit("mgpu.host_memory:allreduce", "shard_bounds(total, threads)]",
                "shard_bounds(total, threads)[:max(1, threads - 1)]]"),
           (_CUT + "3dev-sum]",)),
    Mutant("block-drops-the-last", "the last device does not count",
           edit(_BLOCKS, "for x in others:\n                function",
                "for x in others[:-1]:\n                function"),
           (_CUT + "2dev-sum]",)),
    Mutant("scatter-without-reduce", "device i keeps its own slice",
           edit("mgpu.collectives:reducescatter", "reduce_to(slices, op, i)",
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
    Mutant("memory-unchecked", "a part of an array is added to the whole",
           edit(_ALL, "not strategy.checks_memory", "False"),
           (_SHARED + "naive]",)),
    Mutant("host-memory-unchecked", "the same in the host's memory",
           edit("mgpu.backends.messages:check_apart", "begin < end", "False"),
           (_SHARED + "auto]",)),
    Mutant("expanded-written", "an element is added as often as it is "
           "repeated", edit("mgpu.collectives.checks:check_apart",
                            "backend.check_writable(x)", "pass"),
           ("test_collectives.py::test_arrays_without_a_place_for_each_"
            "element_are_refused[torch-*",)),
]
