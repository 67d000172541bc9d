"""Passes, steps and the loop."""
from mutants.planting import Mutant, edit

_TRAINING = "mgpu.training:"

MUTANTS = [
    Mutant("first-loss-only", "the losses of the other devices have no "
           "gradient", edit(_TRAINING + "backward", "backend.backward(losses)",
                            "backend.backward(losses[:1])"),
           ("test_trainer.py::test_k_devices_are_one_device[torch-sgd-2]",)),
    Mutant("rows-of-one-shard", "the step divides by the rows of device 0",
           edit(_TRAINING + "_train_batches",
                "sum(len(x) for x in own if x is not None)",
                "len(own[0])"),
           ("test_training.py::test_train_batch_is_one_step_of_the_whole_batch"
            "[torch-2dev]",)),
    Mutant("losses-unwatched", "a loss may count its calls",
           edit(_TRAINING + "_shared", "if known.keeps", "if False"),
           ("test_training.py::test_a_loss_that_counts_its_calls_is_refused_"
            "on_several_devices[torch-2dev-annealed-False]",)),
    Mutant("globals-of-losses-unseen", "a loss may count in a global",
           edit("mgpu.loss_state:SharedLoss._of_function",
                "if name in x.__globals__", "if False"),
           ("test_training.py::test_a_loss_that_counts_its_calls_is_refused_"
            "on_several_devices[torch-2dev-counted-False]",)),
    Mutant("every-call-is-first", "what a loss keeps is never compared",
           edit("mgpu.loss_state:SharedLoss.__call__",
                "self._known is None", "True"),
           ("test_training.py::test_a_loss_that_counts_its_calls_is_refused_"
            "on_several_devices[torch-2dev-sums-True]",)),
    Mutant("arrays-of-losses-unread", "a loss may count in an array",
           edit("mgpu.loss_state:SharedLoss._content",
                "return _Content(mark)", "return _Content(0)"),
           ("test_training.py::test_a_loss_that_counts_its_calls_is_refused_"
            "on_several_devices[torch-2dev-in_an_array-False]",)),
    Mutant("iterators-of-losses-unseen", "a loss may draw from a generator",
           edit("mgpu.loss_state:_runs",
                "isinstance(x, Iterator)",
                "False"),
           ("test_training.py::test_a_loss_that_counts_its_calls_is_refused_"
            "on_several_devices[torch-2dev-cycle-False]",)),
    Mutant("layers-of-losses-unseen", "a loss may count on a layer",
           edit("mgpu.loss_state:SharedLoss._of_object",
                "self._named(space, not foreign)",
                "(() if foreign else self._named(space))"),
           ("test_training.py::test_a_loss_that_counts_its_calls_is_refused_"
            "on_several_devices[torch-2dev-layer-False]",)),
    Mutant("hidden-state-unseen", "a loss may count by a schedule",
           edit("mgpu.loss_state:SharedLoss._of_object",
                "if parts is None:",
                "if False:"),
           ("test_training.py::test_a_loss_that_counts_its_calls_is_refused_"
            "on_several_devices[torch-2dev-schedule-False]",)),
    Mutant("memory-of-losses-unread", "a loss may count in bytes",
           edit("mgpu.loss_state:_memory",
                "view.tobytes()",
                "b''"),
           ("test_training.py::test_a_loss_that_counts_its_calls_is_refused_"
            "on_several_devices[torch-2dev-bytes-False]",)),
    Mutant("imports-of-losses-unseen", "a loss may count in a module",
           edit("mgpu.loss_state:SharedLoss._of_function",
                "if full in sys.modules",
                "if False"),
           ("test_training.py::test_a_loss_that_counts_its_calls_is_refused_"
            "on_several_devices[torch-2dev-imports-False]",)),
    Mutant("python-random-unseen", "a loss may draw from global streams",
           edit("mgpu.loss_state:SharedLoss._parts",
                "x is random or x is np.random",
                "False"),
           ("test_training.py::test_a_loss_that_counts_its_calls_is_refused_"
            "on_several_devices[torch-2dev-numpy_random-False]",)),
    Mutant("row-of-the-shard", "a wrong label is named by its row in its "
           "shard", edit(_TRAINING + "_loss_of", "error.row += first",
                         "error.row += 0"),
           ("test_training.py::test_a_wrong_label_is_named_by_its_row_in_the_"
            "batch[torch-2dev-*",)),
    Mutant("sgd-not-divided", "sgd applies the sum",
           edit(_TRAINING + "sgd", "lr * g / batch_size", "lr * g"),
           ("test_training.py::test_sgd[torch-1dev]",)),
    Mutant("sgd-keeps-gradients", "sgd does not set them to zero",
           edit(_TRAINING + "sgd", "g[...] = 0", "pass"),
           ("test_training.py::test_sgd[torch-1dev]",)),
    Mutant("record-predicts", "layers predict while recording",
           edit(_TRAINING + "record", "training=train_mode",
                "training=False"),
           ("test_training.py::test_scopes_nest_and_come_back[torch]",)),
    Mutant("no-grad-records", "no_grad goes on recording",
           edit(_TRAINING + "no_grad", "recording=False", "recording=None"),
           ("test_training.py::test_scopes_nest_and_come_back[torch]",)),
    Mutant("put-asks-no-dtype", "the dtype that was asked for is ignored",
           edit(_TRAINING + "put", "dtype=dtype)", "dtype=None)"),
           ("test_training.py::test_put_and_back[torch-1dev]",)),
    Mutant("parallel-calls-with-none", "a function meets devices without rows",
           edit(_TRAINING + "parallel", "x is None", "False"),
           ("test_training.py::test_parallel_leaves_devices_without_rows_out"
            "[torch-2dev]",)),
    Mutant("parallel-loses-a-device", "device 0 runs for the last one too",
           edit(_TRAINING + "parallel", "zip(*per_device)",
                "[*zip(*per_device)][:-1] + [*zip(*per_device)][:1]"),
           ("test_training.py::test_parallel[torch-2dev]",)),
    Mutant("loss-of-unequal-batches", "an epoch's loss is the mean of its "
           "batches' means", edit(_TRAINING + "_epochs",
                                  ", weights=sizes", ""),
           ("test_training.py::test_train[torch-2dev]",)),
    Mutant("history-lost", "only some errors have the history",
           edit(_TRAINING + "_carried", "BaseException", "Exception"),
           ("test_training.py::test_what_ends_a_training_early_has_its_"
            "history[torch-1dev]",)),
    Mutant("nan-overlooked", "a loss that is not finite trains on",
           edit(_TRAINING + "_epochs", "not np.isfinite(total)", "False"),
           ("test_training.py::test_a_loss_that_is_not_finite_names_its_step"
            "[torch-*",)),
    Mutant("part-forgotten", "the gradients of the first part are lost",
           edit("mgpu.trainer:Trainer._add_held", "g += backend",
                "0 * backend"),
           ("test_callbacks.py::test_accumulated_batches_are_one_step_of_the_"
            "joined_batch[torch-2dev-plain]",)),
    Mutant("part-unreached-dropped", "what the last part does not reach stays",
           edit("mgpu.trainer:Trainer._add_held",
                "if p in summed or p in held]", "if p in summed]"),
           ("test_callbacks.py::test_what_one_batch_reaches_is_updated"
            "[torch-True]",)),
    Mutant("rows-of-last-part", "a step divides by the rows of its last part",
           edit("mgpu.trainer:Trainer.step_parts",
                "rows += self._allreduce", "rows = self._allreduce"),
           ("test_callbacks.py::test_accumulated_batches_are_one_step_of_the_"
            "joined_batch[torch-2dev-plain]",)),
    Mutant("early-stop-forgets", "a resumed run waits anew",
           edit("mgpu.callbacks:Calls.restore", 'one, "stopped", False',
                'one, "never", False'),
           ("test_callbacks.py::test_the_state_of_callbacks_is_in_checkpoints"
            "[torch]",)),
    Mutant("average-turned", "decay and 1 - decay change places",
           edit("mgpu.callbacks:EMA.update", "1.0 - self._decay",
                "self._decay"),
           ("test_callbacks.py::test_averages_are_those_of_torch[torch-0.9]",
            )),
    Mutant("sums-rounded", "a sum depends on its order",
           edit("mgpu.metrics:_exact", "math.fsum(left)", "sum(left)"),
           ("test_metrics.py::test_sums_are_exact_however_they_are_cut[torch-"
            "Loss]",)),
    Mutant("place-in-data-by-steps", "a run goes on after as many batches as "
           "steps", edit("mgpu.training:_epochs", "used * accumulate", "used"),
           ("test_callbacks.py::test_a_run_goes_on_between_accumulated_steps["
            "torch-True]",)),
]
