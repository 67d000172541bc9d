"""Steps that are not those of the whole batch."""
from mutants.planting import Mutant, edit, together

_REDUCE = "mgpu.trainer:Trainer._allreduce"
_SUM = "mgpu.trainer:Trainer._sum"
_UPDATE = "mgpu.trainer:Trainer._update"
_WORK, _FACTORS = "mgpu.trainer:Trainer._work", "mgpu.trainer:" \
    "Trainer.multipliers"
_APPLY, _BLOCKS = "mgpu.host_memory:update", "mgpu.host_memory:update_blocks"
_ONE = ("test_trainer.py::test_k_devices_are_one_device[torch-sgd-2]",)
_GLUON = ("test_trainer.py::test_the_real_gluon_trainer_on_one_device"
          "[torch-1dev-sgd]",)
_GOES_ON = "test_checkpoint.py::test_a_resumed_run_is_the_uninterrupted_one"
_RESUMED = "test_trainer.py::test_a_resumed_training_is_the_uninterrupted_one"

MUTANTS = [
    Mutant("native-gradients-lost", "completed shapes void the gradients of "
           "the call that completed them", edit(
               "mgpu.backends._mxnet.network:MXNetNetwork._allocate",
               "contexts == self._deferred", "[] == self._deferred"),
           ("test_trainer.py::test_gluons_own_loop_completes_shapes"
            "[1dev-mxnet-nd]",)),
    Mutant("native-requests-of-old", "Gluon's own loop keeps the grad_req of "
           "initialize", edit("mgpu.replicas:Replicas._renew",
                              "self._trained() != self._leaves", "False"),
           ("test_trainer.py::test_gluons_own_loop_follows_another_grad_req"
            "[2dev-add-mxnet-nd]",)),
    Mutant("native-layers-untrained", "Gluon's own loop leaves a new layer "
           "as it is", edit("mgpu.replicas:Replicas.check_native",
                            "self.network.follow()", "pass"),
           ("test_trainer.py::test_gluons_own_loop_refuses_new_layers"
            "[1dev-mxnet-nd]",)),
    Mutant("stale-gradient-passed-over", "a layer that nothing reached is "
           "skipped without a word", edit(
               "mgpu.trainer:Trainer._check_reached",
               "if j not in reached and not ignore_stale_grad:", "if False:"),
           ("test_trainer.py::test_a_stale_gradient_is_an_error_that_names_it"
            "[torch-*",)),
    Mutant("weights-part-in-a-native-loop", "gradients of other weights than "
           "the device's own are summed", edit(
               "mgpu.trainer:Trainer._check_passes",
               "replicas.check_native(backward)", "pass"),
           ("test_trainer.py::test_gradients_of_the_network_itself["
            "torch-2dev-True]",)),
    Mutant("gradient-stays-fresh", "a second step without a backward pass "
           "goes through", edit(
               "mgpu.trainer:Trainer._void",
               "self.replicas.backend.mark_used(x)", "pass"),
           ("test_trainer.py::test_gradients_are_summed_once[torch-2dev]",)),
    Mutant("idle-device-counts", "the old gradient of a device without rows "
           "is added", edit(_SUM, "g[...] = 0", "pass"),
           ("test_trainer.py::test_a_layer_that_only_some_devices_rows_reach*",
            )),
    Mutant("old-batch-applied", "an abandoned batch counts with the next one",
           edit("mgpu.backends.base:_History.judged", "void | self.old",
                "self.old"),
           ("test_trainer.py::test_a_step_applies_one_batch[mxnet-nd-2dev-"
            "native]",)),
    Mutant("sums-grow-k-times", "in Gluon's own loop each device keeps a sum "
           "that the next pass adds to", edit("mgpu.replicas:Replicas._renew",
                                              "self._carry()", "pass"),
           ("test_trainer.py::test_sums_that_grow_are_summed_once[mxnet-nd-"
            "2dev-native]",)),
    Mutant("passes-in-doubt", "gradients of an earlier batch may be applied",
           edit("mgpu.replicas:Replicas.check_native", "if doubt:",
                "if False:"),
           ("test_trainer.py::test_passes_that_do_not_tell_their_batch_are_"
            "refused[torch]",)),
    Mutant("part-clipped", "one device's part of the sum may be clipped",
           edit("mgpu.trainer:Trainer._check_unedited",
                "any(edited) and not all(edited)", "False"),
           ("test_trainer.py::test_clipping_one_devices_part_is_refused"
            "[mxnet-nd-2dev]",)),
    Mutant("idle-edits-dropped", "what is written to the gradient of a device "
           "without rows is lost",
           edit(_SUM, "i not in emptied", "True"),
           ("test_trainer.py::test_what_is_added_on_a_device_without_rows_"
            "counts[mxnet-nd-2dev]",)),
    Mutant("gradients-emptied", "a forward pass voids gradients that wait for "
           "a step", edit("mgpu.replicas:Replicas._empty",
                                       "and not self._is_fresh(i)", ""),
           ("test_trainer.py::test_what_is_added_on_a_device_without_rows_"
            "counts[mxnet-nd-2dev]",)),
    Mutant("address-asked-for-at-once", "memory that is not there yet",
           edit("mgpu.backends._mxnet.gradients:_wrote",
                "calls.wait_for(handle)", "0"),
           ("test_contract.py::test_an_address_is_asked_for_when_the_memory_"
            "is_there[mxnet-*",)),
    Mutant("users-functions-edit", "a pass that runs late is an edit",
           together(
               edit("mgpu.backends._mxnet.gradients:_wrote",
                    "threading.current_thread()", "None",
                    "calls.wait_for(handle)", "0"),
               # Or it would wait for what waits for it.
               edit("mgpu.backends._mxnet.gradients:_extent",
                    "gradient.wait_to_read()", "pass")),
           ("test_contract.py::test_a_function_of_the_users_is_part_of_the_"
            "pass[mxnet-*",)),
    Mutant("late-errors-passed-over", "what fails late in a pass is passed "
           "over", edit("mgpu.trainer:Trainer._check_done",
                        "errors.append((i, error))", "pass"),
           ("test_trainer.py::test_a_pass_that_fails_late_updates_nothing["
            "1dev-mxnet-nd]",)),
    Mutant("overrides-passed-by", "a step calls no method of a subclass",
           edit("mgpu.trainer:Trainer.step",
                'self._overrides("allreduce_grads", "update")', "False"),
           ("test_trainer.py::test_a_step_calls_what_a_subclass_overrides["
            "torch-2dev-train_batch-update]",)),
    Mutant("overrides-unobserved", "nobody looks what an override writes to "
           "gradients", edit("mgpu.training:_train_batches",
                             "trainer.observed", "False"),
           ("test_trainer.py::test_a_step_calls_what_a_subclass_overrides["
            "torch-2dev-train_batch-update]",)),
    Mutant("edits-after-an-error", "nobody looks after a refused step",
           edit("mgpu.replicas:Replicas.unobserved",
                "if self.complete:", "if False:"),
           ("test_trainer.py::test_after_a_refused_step_gradients_are_the_"
            "users*",)),
    Mutant("sums-without-places", "a permutation changes no sum",
           edit("mgpu.backends._torch.leaves:_contents",
                "np.dot(block, factors)", "block.sum()",
                "np.dot(half, factors)", "half.sum()"),
           ("test_trainer.py::test_writes_that_change_no_plain_sum_are_seen"
            "*",)),
    Mutant("set-for-nothing", "a trainer takes any attribute",
           edit("mgpu.trainer:Trainer.__setattr__",
                "if name in", "if 0 and name in"),
           ("test_trainer.py::test_a_frameworks_attribute_is_not_set_for_"
            "nothing[torch-lr-*",)),
    Mutant("looks-move", "a look at a rate moves its schedule",
           edit("mgpu.schedule_state:ScheduleState.ask",
                "if self._keeps", "if True"),
           ("test_trainer.py::test_a_schedule_goes_back_with_the_states["
            "torch-2dev-file-halving]",)),
    Mutant("schedules-stay", "states go back, the schedule does not",
           edit("mgpu.schedule_state:ScheduleState.restore",
                "saved is None", "True"),
           ("test_trainer.py::test_a_schedule_goes_back_with_the_states["
            "torch-2dev-file-halving]",)),
    Mutant("any-schedule", "the state of a schedule goes into another one",
           edit("mgpu.schedule_state:ScheduleState.restore",
                'alike = saved["kind"]', 'alike = True or saved["kind"]'),
           ("test_trainer.py::test_options_of_a_schedule_stay_with_the_"
            "program[torch]",)),
    Mutant("refused-moves", "a refused update moves the schedule",
           edit("mgpu.schedule_state:ScheduleState.moving",
                "self._put(*self._undo)", "pass"),
           ("test_trainer.py::test_a_refused_update_moves_no_schedule[torch]",
            )),
    Mutant("any-rate", "a schedule may return what it likes",
           edit("mgpu.trainer:Trainer.rate", 'returns", rate', 'returns", 0'),
           ("test_trainer.py::test_a_wrong_rate_of_a_schedule_changes_"
            "nothing*",)),
    Mutant("any-multiplier", "a multiplier may be no number",
           edit("mgpu.trainer:Trainer._work",
                "of {name!r}\", lr_mult", "of {name!r}\", 0",
                "of {name!r}\", wd_mult", "of {name!r}\", 0"),
           ("test_trainer.py::test_a_multiplier_that_is_no_number_changes_"
            "nothing*",)),
    Mutant("any-option", "options change in the middle of a training",
           edit("mgpu.trainer:Trainer._check_options",
                "optimizer.__post_init__()", "pass"),
           ("test_trainer.py::test_a_wrong_option_in_the_middle_of_a_training"
            "_changes_nothing*",)),
    Mutant("anybodys-sums", "sums that another trainer has applied",
           edit("mgpu.trainer:Trainer.summed",
                "last is not self", "False"),
           ("test_trainer.py::test_sums_that_another_trainer_has_applied_are_"
            "not_applied_again*",)),
    Mutant("contents-not-looked-at", "writes that no version counts",
           edit("mgpu.backends._torch.leaves:_Leaf.edited",
                "contents != _contents(gradient)", "False"),
           ("test_trainer.py::test_writes_that_torch_does_not_count_are_seen"
            "*",)),
    Mutant("sum-edit-lost", "what is written to replica 0's sum stays there",
           edit("mgpu.trainer:Trainer._share_edits",
                "broadcast(p.list_grad())", "pass"),
           ("test_trainer.py::test_a_change_of_replica_0s_sum_reaches_all"
            "[mxnet-nd-2dev]",)),
    Mutant("taken-away-is-zero", "a gradient that the user took away is zero",
           edit(_REDUCE, "backend.has_gradient(x)", "True"),
           ("test_trainer.py::test_a_gradient_that_the_user_takes_away_is_not_"
            "applied[1dev-before the sum]",)),
    Mutant("taken-away-afterwards", "a sum that the user took away is zero",
           edit("mgpu.trainer:Trainer.summed",
                "return backend.has_gradient(p.data())", "return True"),
           ("test_trainer.py::test_a_gradient_that_the_user_takes_away_is_not_"
            "applied[2dev-after the sum]",)),
    Mutant("sums-summed-again", "a sum that grows is counted on each device",
           edit("mgpu.replicas:Replicas._carry",
                "self.backend.grad(x)[...] = 0", "pass"),
           ("test_trainer.py::test_sums_that_grow_are_summed_once"
            "[torch-2dev-replicas]",)),
    Mutant("passes-after-the-sum", "gradients that are no sums are applied",
           edit("mgpu.trainer:Trainer._share_edits",
                "any(backend.is_fresh(x) for x in arrays)", "False"),
           ("test_trainer.py::test_a_backward_pass_after_the_sum_is_refused"
            "[torch-2dev]",)),
    Mutant("torn-and-silent", "an update that failed midway is forgotten",
           edit(_UPDATE, "self._torn, replicas.torn = True, repr(error)",
                "pass"),
           ("test_trainer.py::test_an_update_that_fails_midway_breaks_the_"
            "trainer[torch-2dev]",)),
    Mutant("two-threads", "two threads may train the same replicas",
           edit("mgpu.replicas:Replicas._check_usable",
                "other is not me", "False"),
           ("test_trainer.py::test_one_thread_at_a_time[torch-2dev]",)),
    Mutant("void-replicas-train", "replicas of an earlier initialize go on",
           edit("mgpu.replicas:Replicas.check_valid",
                "_initialized.get(self.net) is not self.devices", "False"),
           ("test_trainer.py::test_replicas_made_void_are_refused"
            "[torch-2dev]",)),
    Mutant("earlier-networks-train", "layers of a later network are trained "
           "by an earlier one", edit("mgpu.replicas:initialize",
                                  "_initialized.pop(other, None)", "pass"),
           ("test_replicas.py::test_a_later_network_on_trained_layers"
            "[torch-2dev]",)),
    Mutant("gradients-averaged", "the mean over devices instead of the sum",
           edit(_SUM, "algorithm=self._strategy",
                'op="mean"'), _ONE),
    Mutant("no-allreduce", "each device follows its own gradient",
           edit(_SUM, "allreduce_many(gradients, algorithm=self._strategy)",
                "pass"), _ONE),
    Mutant("divisor-truncated", "fractions of a divisor are lost",
           edit("mgpu.trainer:check_batch_size", "return float(x)",
                "return int(x) or 1"),
           ("test_trainer.py::test_a_step_divides_by_any_number_above_0["
            "torch-2dev-2.5]",)),
    Mutant("divided-by-a-shard", "the divisor is the rows of one device",
           edit(_UPDATE, "self._rescale / batch_size",
                "len(replicas) / batch_size"),
           _ONE),
    Mutant("not-divided", "the sum of the gradients is applied",
           edit(_UPDATE, "self._rescale / batch_size", "1.0"), _GLUON),
    Mutant("divided-twice", "the batch size counts twice",
           edit(_UPDATE, "self._rescale / batch_size",
                "1.0 / batch_size ** 2"), _GLUON),
    Mutant("one-device-updated", "the others keep their weights",
           edit(_APPLY, "views[i::threads]", "views[i:1:threads]"),
           _ONE),
    Mutant("a-block-is-lost", "the last block of a weight stays",
           edit(_BLOCKS, "len(weight), step", "len(weight) - step, step"),
           ("test_trainer.py::test_blocks_of_a_weight_are_the_whole"
            "[torch-gluon-sgd]",)),
    Mutant("a-number-stands", "what a rule keeps as a number is not renewed",
           edit(_BLOCKS, "state.update(", "dict().update("),
           ("test_trainer.py::test_blocks_of_a_weight_are_the_whole"
            "[torch-gluon-nadam]",)),
    Mutant("decay-multiplier-ignored", "wd_mult is not read",
           edit(_FACTORS, "self.wd_mult.get(p.name, p.wd_mult)", "1.0"),
           ("test_trainer.py::test_multipliers_by_name[torch-2dev]",)),
    Mutant("rate-multiplier-ignored", "lr_mult is not read",
           edit(_FACTORS, "self.lr_mult.get(p.name, p.lr_mult)", "1.0"),
           ("test_trainer.py::test_multipliers_by_name[torch-2dev]",)),
    Mutant("schedule-one-step-behind", "update n gets the rate of n - 1",
           edit(_UPDATE, "self.rate(number)", "self.rate(number - 1)"),
           ("test_trainer.py::test_a_schedule[torch]",)),
    Mutant("update-count-stands", "every update is the first",
           edit(_WORK, "self._counts.get(name, 0) + 1", "1"),
           ("test_trainer.py::test_the_real_gluon_trainer_on_one_device"
            "[torch-1dev-adam]",)),
    Mutant("torch-clips-as-gluon", "clip_grad_norm_ by Gluon's formula",
           edit("mgpu.trainer:Trainer.clip_grad_norm_", " 1e-6)\n",
                " 1e-8)\n"),
           ("test_given_torch.py::test_clip_grad_norm_is_torchs_*",)),
    Mutant("groups-unread", "rates that a torch schedule sets are not read",
           edit("mgpu.trainer:Trainer._read_given",
                "vars(rule).update(vars(now))", "pass"),
           ("test_given_torch.py::test_a_schedule_that_is_stepped_as_in_torch"
            "_gives_torchs_numbers[step-*",)),
    Mutant("schedule-warns", "torch thinks that its optimiser never steps",
           edit("mgpu.backends._torch.given:TorchOptimizer.updated",
                "self.object._opt_called = True", "pass"),
           ("test_given_torch.py::test_a_schedule_that_is_stepped_as_in_torch"
            "_gives_torchs_numbers[step-*",)),
    Mutant("rest-is-trained", "what is in no group is moved, too",
           edit("mgpu.trainer:Trainer._read_given", "self._own = None if",
                "self._own = None if True or"),
           ("test_given_torch.py::test_what_is_in_no_group_is_not_moved*",)),
    Mutant("groups-as-made", "options of groups do not go back with states",
           edit("mgpu.trainer:Trainer._take", "put()", "pass"),
           ("test_given_torch.py::test_a_resumed_run_has_rates_and_momenta*",
            )),
    Mutant("object-steps", "the object may move replica 0 by its own part",
           edit("mgpu.backends._torch.given:_Refusal.__call__",
                "is not None", "is None"),
           ("test_given_torch.py::test_the_objects_own_step_and_states_are_"
            "refused*",)),
    Mutant("norm-counts-devices", "each parameter counts once per device",
           edit("mgpu.trainer:Trainer._clip", "norm /= divisor",
                "norm *= len(self.replicas) ** 0.5 / divisor"),
           ("test_trainer.py::test_clip_global_norm[torch-2dev-0.25]",)),
    Mutant("clips-one-device", "the other devices' gradients stay",
           edit("mgpu.trainer:Trainer._clip",
                "in zip(p.list_data(), copies)",
                "in zip(p.list_data()[:1], copies)"),
           ("test_trainer.py::test_clip_global_norm[torch-2dev-0.25]",)),
    Mutant("slot-not-saved", "the last slot of each state is lost",
           edit("mgpu.trainer_states:export_slots", "in slots.items()}",
                "in list(slots.items())[:-1]}"),
           (_RESUMED + "[torch-2dev-adam]",)),
    Mutant("streams-not-restored", "masks after a checkpoint are others",
           edit("mgpu.checkpoint:load",
                "        put()", "        pass"),
           (_GOES_ON + "[torch-2dev-in an epoch]",
            _GOES_ON + "[mxnet-nd-2dev-in an epoch]")),
    Mutant("buffers-of-one-device", "all devices get those of the first",
           edit("mgpu.checkpoint:_of_all_ranks", "np.stack(every)",
                "np.stack([every[0]] * len(every))"),
           (_GOES_ON + "[torch-2dev-in an epoch]",)),
    Mutant("impossible-states", "a rate of NaN is loaded",
           edit("mgpu.trainer_states:_impossible", "return wrong",
                "return []"),
           ("test_checkpoint.py::test_hostile_numbers_are_refused_and_nothing_"
            "changes[torch-rate]",)),
    Mutant("negative-variance", "a variance below 0 is loaded",
           edit("mgpu.trainer_states:fit", "slot in NEVER_NEGATIVE", "False"),
           ("test_checkpoint.py::test_hostile_numbers_are_refused_and_nothing_"
            "changes[torch-variance]",)),
    Mutant("size-bomb", "an array is believed to be as large as it says",
           edit("mgpu.files:npy_members", "raise ValueError(\"its arrays",
                "ValueError(\"its arrays"),
           ("test_tensor_files.py::test_npz_takes_as_much_memory_as_it_has_"
            "bytes",)),
    Mutant("array-unchecked", "the digest of an array is not looked at",
           edit("mgpu.tensor_files:read", "!= digests[name]", "== 0"),
           ("test_tensor_files.py::test_every_byte_counts",)),
    Mutant("header-unchecked", "the digest of the header is not looked at",
           edit("mgpu.tensor_files:read", "!= stream.read(32)",
                "== stream.read(32)[:0]"),
           ("test_tensor_files.py::test_every_byte_counts",)),
    Mutant("hole-in-a-file", "bytes that no array has are passed over",
           edit("mgpu.tensor_files:_read_head", "begin != end",
                "begin < end"),
           ("test_tensor_files.py::test_hostile_headers_are_refused_before_"
            "they_cost[hole]",)),
    Mutant("values-uncounted", "a header may take any memory",
           edit("mgpu.tensor_files:_json", "values * _VALUE > size + _BESIDE",
                "False"),
           ("test_tensor_files.py::test_hostile_headers_are_refused_before_"
            "they_cost[many objects]",)),
    Mutant("living-parts-swept", "a part that is being written is taken away",
           edit("mgpu.files:sweep", "fcntl.flock(part, fcntl.LOCK_EX | "
                "fcntl.LOCK_NB)", "pass"),
           ("test_tensor_files.py::test_parts_of_the_dead_are_swept_and_those_"
            "of_the_living_stay",)),
    Mutant("written-through-links", "what a link names is replaced",
           edit("mgpu.files:write_arrays", "os.path.islink(path)", "False"),
           ("test_tensor_files.py::test_no_file_behind_a_link_is_written",)),
    Mutant("open-epoch-lost", "an epoch that is resumed lacks its first "
           "losses", edit("mgpu.training:_epochs", "found[\"sizes\"]", "[]"),
           ("test_resuming_train.py::test_a_killed_run_ends_as_the_"
            "uninterrupted_one[torch]",)),
    Mutant("signal-mid-step", "a signal ends a step in its middle",
           edit("mgpu.stopping:Stop._handle", "if self._free:", "if True:"),
           ("test_resuming_train.py::test_a_signal_ends_the_step_first"
            "[torch-15-SystemExit]",)),
    Mutant("extra-states-lost", "what layers add to a state is not loaded",
           edit("mgpu.backends._torch.network:TorchNetwork.set_extra_states",
                "m.set_extra_state(states[name][i])", "pass"),
           ("test_checkpoint.py::test_what_layers_add_to_a_state_goes_on[2dev-"
            "torch]",)),
    Mutant("extra-states-alike", "all devices get the first one's state",
           edit("mgpu.extra_states:pack", "len(bits) == 1", "True"),
           ("test_checkpoint.py::test_what_layers_add_to_a_state_goes_on[2dev-"
            "torch]",)),
    Mutant("extra-states-of-others", "a state of layers that there are not",
           edit("mgpu.checkpoint:_check_extra", "set(extra) != set(names)",
                "False"),
           ("test_checkpoint.py::test_a_state_that_does_not_go_back_is_"
            "refused*",)),
    Mutant("half-a-step-saved", "a gradient that waits is forgotten",
           edit("mgpu.checkpoint:_check_between_steps", "trainer.pending or "
                "any(map(backend.is_fresh, p.list_data()))", "False"),
           ("test_checkpoint.py::test_a_save_between_the_halves_of_a_step_is_"
            "refused[torch]",)),
    Mutant("counts-not-loaded", "Adam corrects its bias from the start again",
           edit("mgpu.trainer:Trainer._take", "dict(saved.counts)", "{}"),
           (_RESUMED + "[torch-2dev-adam]",)),
    Mutant("loaded-on-one-device", "the other devices forget their state",
           edit("mgpu.trainer_states:fit",
                "zip(states, arrays[name], strict=True)",
                "zip(states[:1], arrays[name])"),
           (_RESUMED + "[torch-2dev-momentum]",)),
    Mutant("written-gradients-are-skipped", "what the user writes in the "
           "place of a gradient that was passed over is not applied",
           edit("mgpu.trainer:Trainer.summed", "and self._has_values(p)",
                "and False"),
           ("test_trainer.py::test_a_skipped_gradient_is_zero_until_the_user_"
            "writes_it[torch-1dev]",)),
    Mutant("skipped-gradients-stay", "those of an earlier batch are clipped "
           "along", edit("mgpu.trainer:Trainer.allreduce_grads",
                         'if request == "write"', 'if request == ""'),
           ("test_trainer.py::test_a_skipped_gradient_is_zero_until_the_user_"
            "writes_it[torch-2dev]",)),
    Mutant("clipped-zeros-count", "what a batch did not use moves where "
           "gradients are clipped by hand",
           edit("mgpu.trainer:Trainer.summed", "and self._has_values(p)", ""),
           ("test_trainer.py::test_an_edit_that_leaves_zeros_is_none"
            "[torch-2dev-by hand-write]",)),
    Mutant("skipped-none-is-zero", "an optimiser of the user's own moves what "
           "a batch did not use",
           edit("mgpu.trainer:Trainer.allreduce_grads",
                "if backend.has_gradient(x):", "if True:"),
           ("test_trainer.py::test_an_own_optimiser_skips_what_was_skipped"
            "[2dev]",)),
]
