"""Batch statistics that are not Gluon's, or not those of the whole batch."""
from mutants.planting import Mutant, edit

_CALL = "mgpu.batch_norm:SyncBatchNorm.__call__"
_MEAN = "mgpu.batch_norm:SyncBatchNorm._mean"
_SYNC = "test_batch_norm.py::test_sync_equals_one_device_on_the_whole_batch"
_TORCH = "mgpu.backends._torch.arithmetic:gluon_batch_norm"
_OWN = ("test_batch_norm.py::test_per_device_keeps_a_set_per_device"
        "[torch-2dev-8]",)

MUTANTS = [
    Mutant("torch-sync-order-of-threads", "the gradients of joint statistics "
           "are added in an order that depends on what ran before",
           edit("mgpu.backends._torch.backend:TorchBackend.fan_out",
                "list(x.expand(count, *x.shape).unbind())", "[x] * count"),
           ("test_checkpoint.py::test_a_resumed_run_under_sync[torch]",)),
    Mutant("sync-statistics-late", "a device without rows keeps statistics "
           "that a backward pass has moved elsewhere",
           edit("mgpu.backends._mxnet.gradients:one_pass",
                "if moved is not None:", "if False:"),
           ("test_batch_norm.py::test_sync_reaches_devices_without_rows["
            "mxnet-nd-2dev-no step]",)),
    Mutant("sync-of-one-pass", "a device that had no rows in one of two "
           "passes is not told of it", edit(
               "mgpu.replicas:Replicas._passed",
               "self._whole &= set(devices)", "self._whole = set(devices)"),
           ("test_batch_norm.py::test_sync_reaches_devices_without_rows["
            "mxnet-nd-2dev-two]",)),
    Mutant("sync-waits-for-a-step", "statistics of a pass without a step "
           "do not reach devices without rows", edit(
               "mgpu.replicas:Replicas._passed",
               "if training and self._syncs():", "if False:"),
           ("test_batch_norm.py::test_sync_reaches_devices_without_rows["
            "torch-2dev-no step]",)),
    Mutant("sync-shares-attributes", "a replica reads what another one's pass "
           "keeps in an attribute",
           edit("mgpu.backends._mxnet.attributes:Turns.begin",
                "self._attributes.show(index)", "pass"),
           # in each of them with some luck of the threads
           ("test_batch_norm.py::test_what_a_pass_keeps_in_an_attribute_is_its_"
            "devices[mxnet-nd*",)),
    Mutant("sync-predicts-apart", "a layer that trains in a prediction is "
           "normalised by each device's rows",
           edit("mgpu.backends._mxnet.network:MXNetNetwork._predicting",
                "self._options.sync and not", "False and not"),
           ("test_batch_norm.py::test_sync_refuses_a_layer_that_trains_in_a_"
            "prediction[2-mxnet-nd]",)),
    Mutant("sync-without-turns", "replicas that draw from one stream and meet "
           "draw in the order in which threads run",
           edit("mgpu.backends._torch.replica:TorchReplica.__call__",
                "may_draw or self._caches",
                "may_draw and network.normalise is None"),
           ("test_replicas.py::test_functional_dropout_is_reproducible_too"
            "[torch-sync]",)),
    Mutant("idle-buffers-lag", "a device without rows keeps its buffers",
           edit("mgpu.replicas:Replicas._catch_up", "if moved and idle:",
                "if False:"),
           ("test_batch_norm.py::test_per_device_keeps_a_set_per_device"
            "[torch-3dev-2]",)),
    Mutant("running-variance-unbiased", "torch's n / (n - 1) stays",
           edit(_TORCH, "count / (count - 1) if count > 1 else 1.0", "1.0"),
           _OWN),
    Mutant("single-value-by-rounding", "the only value of a channel is "
           "normalised to a rounding error",
           edit(_TORCH, "x if count > 1 else x - x", "x"),
           ("test_batch_norm.py::test_a_single_value_is_normalised_to_beta["
            "torch-2dev-per_device]",)),
    Mutant("momentum-swapped", "m and 1 - m change places",
           edit(_TORCH, "1 - call.momentum, call.eps",
                "call.momentum, call.eps"), _OWN),
    Mutant("predicting-moves-statistics", "a pass that is not recorded "
           "updates them", edit("mgpu.backends._torch.replica:TorchReplica."
                               "_keeps_statistics", " and self._network."
                               "backend.is_recording()", ""),
           ("test_batch_norm.py::test_a_forward_pass_without_recording_moves_"
            "nothing[torch-1dev]",)),
    Mutant("sync-momentum-swapped", "m and 1 - m change places",
           edit("mgpu.backends.base:Backend.move_statistics",
                "running *= call.momentum",
                "running *= 1 - call.momentum",
                "(1 - call.momentum) * self", "call.momentum * self"),
           (_SYNC + "[torch-2dev-8]",)),
    Mutant("sync-moves-in-the-forward-pass", "statistics of a layer that no "
           "gradient passes move on MXNet",
           edit(_CALL, "self._backend.move_statistics(",
                "base.Backend.move_statistics(self._backend, "),
           ("test_batch_norm.py::test_sync_moves_statistics_when_one_device_"
            "does[mxnet-nd-2dev-frozen]",)),
    Mutant("sync-of-the-network-itself", "each device normalises by its own "
           "rows in Gluon's own loop",
           edit("mgpu.replicas:Replicas.check_native",
                "self.joint", "False"),
           ("test_batch_norm.py::test_the_network_itself_cannot_train_in_sync"
            "[2dev-7-mxnet-nd]",)),
    Mutant("statistics-without-a-layer", "a batch norm that is no layer "
           "normalises by each device's own rows",
           edit("mgpu.backends._mxnet.network:MXNetNetwork."
                "_batch_norm_layers", "own += self._loose_statistics()",
                "pass"),
           ("test_batch_norm.py::test_batch_norms_that_are_no_layers[2dev-"
            "mxnet-nd]",)),
    Mutant("predicted-and-trained", "the backward pass of a pass that "
           "predicts takes batch norms for those of training",
           edit("mgpu.backends._mxnet.network:_by_global_statistics",
                '"use_global_stats"], block._active = True',
                '"use_global_stats"], block._active = False'),
           ("test_batch_norm.py::test_gradients_of_a_pass_that_predicts["
            "mxnet-nd-2dev-plain-per_device]",)),
    Mutant("one-layer-predicts", "a layer that the network's code calls in "
           "predict_mode is taken for one in training",
           edit("mgpu.backends._mxnet.network:_computed_by",
                "[layer] *", "[] *"),
           ("test_batch_norm.py::test_gradients_of_a_pass_that_predicts["
            "mxnet-nd-2dev-one layer-per_device]",
            "test_batch_norm.py::test_gradients_of_a_pass_that_predicts["
            "mxnet-nd-2dev-one layer-sync]")),
    Mutant("sync-epsilon-outside", "epsilon is added to the root",
           edit(_CALL, "(var + call.epsilon) ** -0.5",
                "1 / (var ** 0.5 + call.epsilon)"),
           (_SYNC + "[torch-2dev-8]",)),
    Mutant("sync-mean-of-variances", "the variance of the means is lost",
           edit(_CALL, "centred * centred, axes",
                "(x - ops.mean(x, axes, keepdims=True)) ** 2, axes"),
           (_SYNC + "[torch-2dev-8]",)),
    Mutant("sync-not-weighted", "a short shard's mean counts like a long one's"
           , edit(_CALL, "count,\n                      ops.sum(x",
                  "1,\n                      ops.mean(x"),
           (_SYNC + "[torch-2dev-7]",)),
    Mutant("sync-of-own-rows", "each device normalises by its own count",
           edit(_MEAN, "count, totals =", "_, totals ="),
           (_SYNC + "[torch-2dev-8]",)),
    Mutant("sync-without-gradient", "the joint statistics are constants for "
           "the gradient", edit(
               _MEAN, "totals[self._meeting.place(index)]",
               "self._backend.ops.stop_gradient("
               "totals[self._meeting.place(index)])"),
           (_SYNC + "[torch-2dev-8]",)),
    Mutant("sync-everyone-adds", "the work grows with the square of the "
           "number of devices",
           edit("mgpu.batch_norm:Meeting.exchange", "return here.result",
                "return join(self._values(here))"),
           ("test_batch_norm.py::test_the_work_of_sync_grows_with_the_devices"
            "[torch]",)),
    Mutant("sync-of-integers", "their sums overflow",
           edit("mgpu.batch_norm:_check_dtype", "\"float\" not in given or ",
                "False and "),
           ("test_batch_norm.py::test_inputs_of_another_dtype_are_refused["
            "torch-2dev-sync-uint8]",)),
    Mutant("sync-without-beta", "the shift is left out",
           edit(_CALL, "call.beta is not None", "False"),
           (_SYNC + "[torch-2dev-8]",)),
    Mutant("counters-apart", "devices count apart after an error in one",
           edit("mgpu.replicas:Replicas._settle_buffers", "and failed",
                "and False"),
           ("test_batch_norm.py::test_devices_have_equal_buffers_after_an_"
            "error_in_one[torch-2-average]",)),
    Mutant("given-up-apart", "statistics stay apart after a failed batch",
           edit("mgpu.replicas:Replicas.give_up", "self._moved or",
                "False or"),
           ("test_batch_norm.py::test_a_batch_that_is_given_up_leaves_equal_"
            "statistics[torch-3dev-loss-average-8]",)),
    Mutant("failed-pass-apart", "statistics stay apart after a failed pass",
           edit("mgpu.replicas:Replicas._settle_buffers",
                "p.kind in kinds or", ""),
           ("test_batch_norm.py::test_a_batch_that_is_given_up_leaves_equal_"
            "statistics[torch-3dev-pass-sync-2]",)),
    Mutant("statistics-of-no-step", "running statistics of a step that was "
           "not done stay", edit("mgpu.replicas:Replicas._prepared",
                                 "self._before == []", "False"),
           ("test_batch_norm.py::test_a_step_is_done_whole_or_not_at_all["
            "torch-2dev-loss-sync-7]",)),
    Mutant("step-without-statistics", "running statistics do not move in a "
           "step that an update has completed",
           edit("mgpu.replicas:Replicas.after_step", "if self._undone:",
                "if False:"),
           ("test_batch_norm.py::test_a_step_is_done_whole_or_not_at_all["
            "torch-2dev-goes on-sync-7]",)),
    Mutant("average-of-nothing", "the policy 'average' does nothing",
           edit("mgpu.replicas:Replicas._settle_buffers",
                'self.batch_norm == "average"', "False"),
           ("test_batch_norm.py::test_average_is_the_plain_mean_after_each_"
            "step[torch-2dev-7]",)),
    Mutant("average-is-a-sum", "the policy 'average' adds",
           edit("mgpu.replicas:Replicas._settle_buffers", 'op="mean"',
                'op="sum"'),
           ("test_batch_norm.py::test_average_is_the_plain_mean_after_each_"
            "step[torch-2dev-7]",)),
]
