"""Words of Gluon and PyTorch, measures, callbacks, predictions."""
from mutants.planting import Mutant, edit

_ROWS = "mgpu.compat.mxnet:Rows"
_GIVEN = "mgpu.backends._torch.given:TorchOptimizer"

MUTANTS = [
    Mutant("rows-are-devices", "the length of a batch is its contexts",
           edit(_ROWS + ".__len__",
                "sum(len(x) for x in self.shards if x is not None)",
                "len(self.shards)"),
           ("test_gluon_names.py::test_a_script_with_rows_has_the_step_of_one_"
            "array[torch-2dev-len]",)),
    Mutant("rows-join-any-shapes", "a column times a row is a table",
           edit(_ROWS + "._with", "(len(x), x.ndim)", "len(x)"),
           ("test_gluon_names.py::test_rows_compute_as_one_array[torch-2dev]",
            )),
    Mutant("rows-on-any-context", "a batch is taken for one elsewhere",
           edit(_ROWS + ".as_in_context", "!= self.context", "== None"),
           ("test_gluon_names.py::test_rows_are_a_batch_on_all_contexts["
            "torch-2dev]",)),
    Mutant("outputs-by-device", "two outputs are those of two devices",
           edit(_ROWS + ".like", "self.like([None if x is None else x[i] for "
                "x in results])", "Rows(list(results[i]), self.context)"),
           ("test_gluon_names.py::test_outputs_of_a_network_are_rows_each["
            "torch-3dev]",)),
    Mutant("counts-of-half-a-batch", "a metric counts what another refuses",
           edit("mgpu.metrics:CompositeEvalMetric.read",
                "[one.read(labels, preds)\n",
                "[(one.update(labels, preds), int)[1]\n"),
           ("test_metrics.py::test_what_has_another_meaning_is_refused[torch-"
            "<lambda>-labels*",)),
    Mutant("labels-without-scores", "they are left out in silence",
           edit("mgpu.metrics:_pairs",
                "alone is not None and", "False and"),
           ("test_metrics.py::test_labels_without_predictions_are_refused["
            "torch-*",)),
    Mutant("accuracy-of-any-labels", "a label that is no class is wrong",
           edit("mgpu.metrics:Accuracy._of", "_classes(labels, classes)",
                "labels"),
           ("test_metrics.py::test_what_has_another_meaning_is_refused[torch-"
            "Accuracy-labels1-*",)),
    Mutant("nan-scores-lose", "the smallest score is NaN",
           edit("mgpu.metrics:TopKAccuracy._of", "odd & ~own_odd | (", "("),
           ("test_metrics.py::test_scores_that_are_nan_count_as_the_largest["
            "torch]",)),
    Mutant("best-after-a-wait-only", "a stop keeps half an epoch",
           edit("mgpu.callbacks:EarlyStopping.on_end", "if self._values:",
                "if self._values and self.waited:"),
           ("test_callbacks.py::test_the_best_epoch_is_restored_after_a_stop_"
            "in_the_next[torch]",)),
    Mutant("best-buffers-of-one", "all devices get those of the first",
           edit("mgpu.replicas:Replicas.export_numpy",
                "every if own and all_devices else every[0]", "every[0]"),
           ("test_replicas.py::test_an_export_names_buffers_that_differ*",)),
    Mutant("rate-of-the-next-step", "the log has what callbacks have set",
           edit("mgpu.callbacks:LearningRateLog.on_step",
                "event.learning_rate", "event.trainer.learning_rate"),
           ("test_callbacks.py::test_the_rate_of_a_step_is_logged_in_any_"
            "order[torch-False]",)),
    Mutant("refused-but-begun", "a refused training resets callbacks",
           edit("mgpu.callbacks:Calls.__init__",
                "one.fit(replicas, evaluates, saves)",
                "(one.fit(replicas, evaluates, saves), one.begin(replicas))"),
           ("test_callbacks.py::test_a_refused_training_leaves_the_callbacks["
            "torch]",)),
    Mutant("last-signal-unheard", "a signal in on_end is nobody's",
           edit("mgpu.training:_epochs",
                'call("on_end")\n            stop.check()', 'call("on_end")'),
           ("test_callbacks.py::test_a_signal_at_the_end_is_heard[torch-"
            "on_end]",)),
    Mutant("refilled-batches", "a step has its last batch several times",
           edit("mgpu.training:_grouped", "_mark(one) != mark", "False"),
           ("test_callbacks.py::test_what_is_filled_anew_is_not_accumulated["
            "torch-rows-<lambda>0]",)),
    Mutant("refused-losses-pass", "what was refused often enough is taken",
           edit("mgpu.losses:_averages", "_called[key] = 0    #", "pass  #"),
           ("test_losses.py::test_per_example_refuses_again[torch]",)),
    Mutant("texts-of-all-rows", "a batch of predictions has all texts",
           edit("mgpu.split:cut_rows", "len(bounds), cut, partial(",
                "len(bounds), None, partial("),
           ("test_prediction.py::test_lists_are_cut_with_the_rows[2dev-5]",)),
    Mutant("rows-of-the-first-device", "what is no array is that of one",
           edit("mgpu.prediction:_on_host", "if odd:", "if False:"),
           ("test_prediction.py::test_outputs_that_are_no_arrays_are_refused"
            "[None]",)),
    Mutant("decay-of-the-class", "a group's decoupled decay is not read",
           edit(_GIVEN + "._translated", '"adamw" if group.get(',
                'family if True or group.get('),
           ("test_given_torch.py::test_the_decay_is_that_of_the_group[2dev-"
            "True-Adam]",)),
    Mutant("numpys-options-lost", "a rate of NumPy's is in no state",
           edit("mgpu.backends._torch.given:_is_plain", "x = _plain(x)", "0"),
           ("test_given_torch.py::test_options_of_numpy_are_in_the_states",)),
    Mutant("steps-of-one-device", "an optimiser of the user's own moves a "
           "network by the gradients of the first device",
           edit("mgpu.backends._torch.leaves:Parts._check",
                "leaf.has_part() or leaf.is_fresh_elsewhere()", "False"),
           ("test_given_torch.py::test_a_step_by_the_gradients_of_one_device_"
            "is_refused[2dev]",)),
    Mutant("loaded-without-layers", "what layers do when they load is lost",
           edit("mgpu.backends._torch.network:TorchNetwork.load_state",
                "self.net.load_state_dict(values, strict)", "pass"),
           ("test_torch_names.py::test_load_state_dict_does_what_layers_do_"
            "with_it[Flagged-2]",)),
    Mutant("options-as-shards", "each device has a part of an option",
           edit("mgpu.replicas:Replicas.__call__",
                'any(hasattr(x, "shape") for x in given)', "True"),
           ("test_keyword_inputs.py::test_plain_calls_take_names[torch]",)),
    Mutant("initialisers-remember", "a weight depends on those before it",
           edit("mgpu.backends._mxnet.given:MXNetDraws.draw",
                "self._check_unchanged(x)", "pass"),
           ("test_gluon_names.py::test_an_initialiser_that_remembers_is_"
            "refused[torch-counts]",)),
    Mutant("one-count-for-two-trainers", "an optimiser object is shared",
           edit("mgpu.backends._mxnet.given:MXNetOptimizer.read",
                "if self.taken():", "if False:"),
           ("test_gluon_names.py::test_an_optimiser_object_is_that_of_one_"
            "trainer[torch]",)),
    Mutant("parts-known-at-the-end", "a step in a hook moves by a part",
           edit("mgpu.backends._torch.replica:TorchReplica._backward_begins",
                "running.is_part |= place.has_part()", "pass"),
           ("test_given_torch.py::test_no_way_to_step_by_the_gradients_of_one_"
            "device[2dev-by_hand]",)),
    Mutant("parts-put-there-by-hand", "what a caller got is no part",
           edit("mgpu.backends._torch.leaves:Pass.arrives",
                "leaf.gave_part |= self.is_part", "pass"),
           ("test_given_torch.py::test_no_way_to_step_by_the_gradients_of_one_"
            "device[2dev-by_hand]",)),
    Mutant("parts-of-the-first-only", "what others have is not missed",
           edit("mgpu.backends._torch.leaves:Parts._check",
                "or leaf.is_fresh_elsewhere()", ""),
           ("test_given_torch.py::test_no_way_to_step_by_the_gradients_of_one_"
            "device[2dev-on_the_last_device]",)),
    Mutant("graphs-forgotten-too-soon", "zero_grad ends what was recorded",
           edit("mgpu.backends._torch.leaves:Leaves.mark_used",
                "leaf.place.used = True", "leaf.place.recorded = False"),
           ("test_given_torch.py::test_no_way_to_step_by_the_gradients_of_one_"
            "device[2dev-by_inputs]",)),
    Mutant("new-parameters-loaded", "a rule may replace what devices know",
           edit("mgpu.backends._torch.network:TorchNetwork.fit_state",
                "if made:", "if False:"),
           ("test_torch_names.py::test_after_a_rule_that_is_refused_or_fails_"
            "arrays_are_as_before[Assigned*",)),
    Mutant("half-loaded", "what a rule wrote before its error stays",
           edit("mgpu.backends._torch.network:TorchNetwork._arrays_kept",
                "x.copy_(old)", "old"),
           ("test_torch_names.py::test_after_a_rule_that_is_refused_or_fails_"
            "arrays_are_as_before[Once*",)),
    Mutant("values-that-change", "the network's own is read when written",
           edit("mgpu.compat.pytorch:TorchNames._check_apart",
                "begin < stop and start < end", "False"),
           ("test_torch_names.py::test_values_that_change_while_they_are_read_"
            "are_refused[torch]",)),
    Mutant("texts-filled-anew", "a list may change before its step",
           edit("mgpu.training:_mark", "one if isinstance", "0 if isinstance"),
           ("test_callbacks.py::test_what_is_filled_anew_is_not_accumulated["
            "torch-beside-<lambda>0]",)),
    Mutant("constants-are-rows", "an output with as many rows by chance",
           edit("mgpu.prediction:_check_follow",
                "_on_host(output, row_counts(other)[0], backend)", "pass"),
           ("test_prediction.py::test_an_output_that_has_as_many_rows_by_"
            "chance_is_refused[torch-2-4-None]",)),
    Mutant("names-become-texts", "an array by a number comes back by a text",
           edit("mgpu.callbacks:Calls._packed", "not isinstance(name, str)",
                "False"),
           ("test_callbacks.py::test_a_state_of_a_callback_comes_back_as_it_"
            "was[torch]",)),
    Mutant("begun-too-soon", "a refused training ends what callbacks knew",
           edit("mgpu.training:_epochs",
                "        found = resume() if resume else None\n",
                "        begin_calls()\n"
                "        found = resume() if resume else None\n"),
           ("test_callbacks.py::test_a_training_that_is_refused_with_its_"
            "first_batch_has_not_begun[torch]",)),
    Mutant("restored-as-written", "what is put back counts as the user's",
           edit("mgpu.backends._torch.network:TorchNetwork._arrays_kept",
                "version.__exit__()", "pass"),
           ("test_torch_names.py::test_a_refused_state_is_not_taken_for_the_"
            "users_writes[torch-wrong0]",)),
    Mutant("whole-numbers-scaled", "clipping cuts whole numbers",
           edit("mgpu.compat.gluon:clip_global_norm",
                '"float" not in str(x.dtype)', "False"),
           ("test_gluon_names.py::test_only_floats_are_scaled[mxnet]",)),
    Mutant("states-seen-late", "a state that cannot be saved costs an epoch",
           edit("mgpu.callbacks:Calls.__init__", "if saves else ()",
                "if False else ()"),
           ("test_callbacks.py::test_a_state_of_a_callback_comes_back_as_it_"
            "was[torch]",)),
    Mutant("zeros-without-a-pass", "devices without rows make gradients",
           edit("mgpu.replicas:Replicas._empty",
                "if self.backend.has_gradient(arrays[i]):", "if True:"),
           ("test_given_torch.py::test_without_a_backward_pass_there_is_no_"
            "gradient[3dev-write]",)),
]
