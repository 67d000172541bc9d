"""Batches, sums and statistics that are not those of one device."""
from mutants.planting import mutant

MUTANTS = [
    mutant("rows-lost",
           "what does not divide is in no shard",
           "shard_bounds",
           "n // k + (i < n % k)",
           "n // k",
           killer="test_split.py::test_bounds"),
    mutant("rest-on-the-last",
           "the last shards get the rows left over",
           "shard_bounds",
           "A < n % k",
           "A >= k - n % k",
           killer="test_split.py::test_bounds"),
    mutant("labels-of-other-rows",
           "labels go to the devices in reverse",
           "split_batch",
           "load(y)",
           "load(y)[::-1]",
           killer="test_split.py::test_lists_of_text_are_split_by_rows"),
    mutant("shards-alias-the-batch",
           "a change of a shard changes the batch",
           "_split_and_load",
           "backend.put(A, devices[i])",
           "A if backend.is_native(x) else backend.put(A, devices[i])",
           killer="test_split.py::test_the_dtype_is_kept_and_shards_are_copi"
                  "es"),
    mutant("reduce-rebinds",
           "the sum is a new array that nobody else holds",
           "combine",
           "A += B",
           "A = A + B",
           killer="test_collectives.py::test_allreduce_is_exact_and_in_plac"
                  "e"),
    mutant("reduce-skips-a-device",
           "the one after the root does not count",
           "reduce_to",
           "i != root",
           "i not in (root, root + 1)",
           killer="test_collectives.py::test_allreduce_is_exact_and_in_plac"
                  "e"),
    mutant("broadcast-misses-the-last",
           "the last device keeps its own",
           "broadcast_from",
           "enumerate(A)",
           "enumerate(A[:-1])",
           killer="test_collectives.py::test_allreduce_is_exact_and_in_place"),
    mutant("mean-is-a-sum",
           "the mean is not divided",
           "allreduce_by",
           "A /= B",
           "pass",
           killer="test_collectives.py::test_allreduce_is_exact_and_in_plac"
                  "e"),
    mutant("order-of-additions",
           "the naive sum is taken from the last device on",
           "reduce_to",
           "enumerate(data)",
           "reversed(list(enumerate(data)))",
           killer="oracle/test_exchange.py::test_allreduce"),
    mutant("ring-one-step-short",
           "the last step of passing on is left out",
           "Ring.allreduce_list",
           (
            'for A in range(k - 1):\n'
            '    for B in range(k):\n'
            '        C = (B + 1 - A) % k\n'
            '        if D:\n'
            '            E = F\n'),
           (
            'for A in range(k - 2):\n'
            '    for B in range(k):\n'
            '        C = (B + 1 - A) % k\n'
            '        if D:\n'
            '            E = F\n'),
           killer="test_collectives.py::test_allreduce_is_exact_and_in_plac"
                  "e"),
    mutant("tree-needs-a-power-of-two",
           "a device without a partner is left out",
           "Tree.allreduce_list",
           "A < k",
           "2 * A <= k",
           killer="test_collectives.py::test_allreduce_is_exact_and_in_plac"
                  "e"),
    mutant("sharded-without-gather",
           "each slice is complete only on its owner",
           "Sharded.allreduce_list",
           "broadcast_from(A, B)",
           "None",
           killer="test_collectives.py::test_allreduce_is_exact_and_in_plac"
                  "e"),
    mutant("gradient-of-one-device",
           "what the other devices gave has no gradient",
           "functional:allreduce",
           "A + B.put(C, D)",
           "A + B.ops.stop_gradient(B.put(C, D))",
           killer="test_functional.py::test_allreduce_gradients"),
    mutant("running-variance-unbiased",
           "torch's n / (n - 1) stays",
           "gluon_batch_norm",
           "A / (A - 1) if A > 1 else 1.0",
           "1.0",
           killer="test_batch_norm.py::test_per_device_keeps_a_set_per_devi"
                  "ce"),
    mutant("momentum-swapped",
           "m and 1 - m change places",
           "gluon_batch_norm",
           "torch.batch_norm(A, B, C, D, E, True, 1 - F, G, H)",
           "torch.batch_norm(A, B, C, D, E, True, F, G, H)",
           killer="test_batch_norm.py::test_per_device_keeps_a_set_per_devi"
                  "ce"),
    mutant("sync-epsilon-outside",
           "epsilon is added to the root",
           "SyncBatchNorm.__call__",
           "(A + B.epsilon) ** -0.5",
           "1 / (A ** 0.5 + B.epsilon)",
           killer="test_batch_norm.py::test_sync_equals_one_device_on_the_w"
                  "hole_batch"),
    mutant("sync-mean-of-variances",
           "the variance of the means is lost",
           "SyncBatchNorm.__call__",
           "ops.sum(A * A, B, keepdims=True)",
           "ops.sum((x - ops.mean(x, B, keepdims=True)) ** 2, B, "
           "keepdims=True)",
           killer="test_batch_norm.py::test_sync_equals_one_device_on_the_w"
                  "hole_batch"),
    mutant("sync-not-weighted",
           "a short shard's mean counts like a long one's",
           "SyncBatchNorm.__call__",
           "self.mean(A, B, C, ops.sum(x, D, keepdims=True), E)",
           "self.mean(A, B, 1, ops.mean(x, D, keepdims=True), E)",
           killer="test_batch_norm.py::test_sync_equals_one_device_on_the_w"
                  "hole_batch"),
    mutant("sync-without-gradient",
           "the joint statistics are constants for the gradient",
           "SyncBatchNorm.mean",
           "totals[self._meeting.place(index)]",
           "self._backend.ops.stop_gradient(totals[self._meeting.place(inde"
           "x)])",
           killer="test_batch_norm.py::test_sync_equals_one_device_on_the_w"
                  "hole_batch"),
    mutant("torch-dropout-unscaled",
           "what is kept is not divided by its probability",
           "dropout_forward",
           "x * mask.div_(keep) if keep else x * mask",
           "x * mask",
           killer="test_replicas.py::test_channel_dropout_drops_channels"),
]
