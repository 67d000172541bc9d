"""Engines that do not keep the contract."""
from mutants.planting import Mutant, edit

_TORCH = "mgpu.backends._torch.backend:TorchBackend."
_HISTORY = "mgpu.backends.base:_History."
_LEAVES = "mgpu.backends._torch.leaves:"
_REPLICA = "mgpu.backends._torch.replica:TorchReplica."
_ATTRIBUTES = "mgpu.backends._torch.attributes:"
_FOLLOW = ("test_network_hooks.py::test_attributes_and_hooks_of_layers_"
           "follow_replica_0[2-")
_RECOMPUTED = ("test_recomputation.py::test_gradients_and_statistics_are_"
               "those_without_checkpoints[1dev-")
_MXNET = "mgpu.backends._mxnet.backend:MXNetBackend."
_COPIES = "test_contract.py::test_put_always_copies["
_DROPOUT = "mgpu.backends._torch.arithmetic:dropout_forward"

_DISPATCH = "mgpu.backends._mxnet.dispatch:"
_KNOWN = "test_dispatch.py::test_code_that_is_not_known_stays_in_one_thread["

MUTANTS = [
    Mutant("modes-stay-behind", "a mode around a step sees nothing of it",
           edit(_TORCH + "_carried", "modes.carried(watching)",
                "modes.carried(False)"),
           ("test_thread_modes.py::test_modes_around_a_step_act_in_its_passes"
            "[1dev-scaling-torch]",)),
    Mutant("modes-at-the-same-time", "devices call a mode of the user's at "
           "the same time", edit(_TORCH + "_run",
                                 "modes.watching()", "False"),
           ("test_thread_modes.py::test_what_a_mode_counts_is_that_of_the_"
            "whole_batch*",)),
    Mutant("hooks-are-checkpoints", "dropout takes hooks of the user's for a "
           "checkpoint", edit(_REPLICA + "generator",
                              "saving() == self._saving", "not saving()"),
           ("test_thread_modes.py::test_dropout_inside_hooks_draws_the_same_"
            "masks*",)),
    Mutant("default-device-stays-behind", "devices' threads have their own",
           edit("mgpu.backends._torch.modes:carried",
                "functions or operations", "operations"),
           ("test_thread_modes.py::test_the_default_device_is_that_of_the_"
            "calling_thread*",)),
    Mutant("torch-put-aliases", "a tensor that is there already is not copied",
           edit(_TORCH + "_put", "copy=True", "copy=False"),
           (_COPIES + "torch-native-target0-None]",)),
    Mutant("torch-put-shares-numpy", "a NumPy array and its tensor are one",
           edit(_TORCH + "_put", "messages.host_array(x)", "np.asarray(x)"),
           (_COPIES + "torch-numpy-target0-None]",)),
    Mutant("torch-to-numpy-aliases", "the host sees later changes",
           edit(_TORCH + "to_numpy", ".clone(", ".to("),
           ("test_contract.py::test_to_numpy_gives_a_fresh_copy[torch]",)),
    Mutant("mxnet-waits-for-all", "another thread's error is raised here",
           edit(_MXNET + "host_views", "_settle(arrays, places)",
                "mx.base._LIB.MXNDArrayWaitAll()"),
           ("test_contract.py::test_an_error_stays_with_its_arrays[*",)),
    Mutant("torch-add-overwrites", "grad_req='add' forgets the old gradient",
           edit(_LEAVES + "Pass.arrives", 'leaf.request == "add"', "False"),
           ("test_contract.py::test_backward_writes_or_adds[torch-*",)),
    Mutant("torch-write-adds", "grad_req='write' keeps the old gradient",
           edit(_LEAVES + "Pass.arrives", "elif x.grad is not None:",
                "elif False:"),
           ("test_contract.py::test_backward_writes_or_adds[torch-*",)),
    Mutant("torch-never-fresh", "nobody notes that a gradient arrived",
           edit(_LEAVES + "Pass.__call__", "leaf.fresh = True", "pass"),
           ("test_contract.py::test_fresh_until_used[torch]",)),
    Mutant("torch-batches-mix", "a second pass on a device is the same batch",
           edit(_LEAVES + "Place.reached", "leaf.fresh = False", "pass"),
           ("test_contract.py::test_a_new_batch_voids_what_its_pass_does_not_"
            "reach[torch]",)),
    Mutant("a-second-pass-voids", "a device's second pass voids the others'",
           edit(_HISTORY + "then", " and this != self.last", ""),
           ("test_trainer.py::test_of_several_passes_the_last_of_each_device_"
            "counts[torch-2dev-device by device-False]",)),
    Mutant("rows-of-one-device-lost", "what may be of the latest batch is "
           "void", edit(_HISTORY + "judged", "not equal and", ""),
           ("test_contract.py::test_passes_tell_the_latest_batch[torch-0 1 1 "
            "1 0 0-None]",)),
    Mutant("torch-losses-apart", "losses that are given together are batches",
           edit(_LEAVES + "_pass_number", "start is None", "True"),
           ("test_contract.py::test_losses_that_are_given_together_are_one_"
            "batch[torch-abandoned*",)),
    Mutant("torch-edits-unseen", "a write to a gradient is not noticed",
           edit(_LEAVES + "_Leaf.edited", "gradient._version != version",
                "False"),
           ("test_contract.py::test_a_gradient_that_something_else_wrote_is_"
            "edited[write-*",)),
    Mutant("torch-asking-writes", "torch.autograd.grad changes gradients",
           edit(_LEAVES + "Pass._end", "while self._old:", "while False:"),
           ("test_contract.py::test_asking_for_gradients_changes_none["
            "write-torch]",)),
    Mutant("torch-attributes-stay", "attributes are those of replica 0 only",
           edit(_ATTRIBUTES + "Attributes.follow", "known.holds(layer, met)",
                "True"), (_FOLLOW + "as_temperature-torch]",)),
    Mutant("torch-contents-unseen", "a change inside an array is not noticed",
           edit(_ATTRIBUTES + "_Seen.holds",
                "_read(name, x, met) == content", "True"),
           (_FOLLOW + "in_an_array-torch]",)),
    Mutant("torch-objects-unseen", "a change inside an object is not noticed",
           edit("mgpu.backends._kept:pickled", "x.__reduce_ex__(4)", "''"),
           (_FOLLOW + "deep_in_an_object-torch]",)),
    Mutant("torch-hooks-with-tensors", "a hook that holds a tensor is replica "
           "0's only", edit(_ATTRIBUTES + "_read",
                            "name in _TABLES", "False"),
           (_FOLLOW + "as_hook_with_a_tensor-torch]",)),
    Mutant("torch-added-hooks-unseen", "a first hook is not noticed",
           edit(_ATTRIBUTES + "_Seen.holds", "not any(self._empty)", "True"),
           (_FOLLOW + "as_forward_hook-torch]",)),
    Mutant("torch-edits-inside-stay", "a tensor that the user changes in an "
           "attribute has the new values on the first device only", edit(
               "mgpu.backends._torch.places:Places.edited",
               "found[where] = ", "_ = "),
           ("test_kept.py::test_arrays_in_attributes_that_the_user_changes["
            "torch-2dev-in place-list]",)),
    Mutant("torch-weights-hide-edits", "a weight in an attribute, which steps "
           "move, hides what the user changes beside it", edit(
               "mgpu.backends._torch.places:Places.edited",
               "self._leaves_of(copied, where), copied)",
               "self._leaves_of(copied, where), ())"),
           ("test_kept.py::test_arrays_in_attributes_that_the_user_changes["
            "torch-2dev-in place-beside a weight]",)),
    Mutant("torch-leaves-are-copied", "a leaf in an attribute gets the "
           "gradient of the first device's rows",
           edit(_ATTRIBUTES + "copied", "if not leaves:", "if True:"),
           ("test_kept.py::test_a_leaf_in_an_attribute_gets_the_gradient_of_"
            "all_rows[2dev-attribute-step-_zeroed-torch]",)),
    Mutant("torch-leaves-in-any-order", "gradients of a leaf that devices "
           "share are added as threads end",
           edit("mgpu.backends._torch.backend:TorchBackend.run_backward",
                "elif shared:", "elif False:"),
           ("test_kept.py::test_a_leaf_in_an_attribute_has_the_same_bits_in_"
            "every_run",)),
    Mutant("torch-hooks-see-parts", "a hook on such a leaf sees the gradient "
           "of one device",
           edit("mgpu.backends._torch.backend:TorchBackend.run_backward",
                "shared is None or any(map(has_hooks, shared))",
                "shared is None"),
           ("test_kept.py::test_a_leaf_in_an_attribute_gets_the_gradient_of_"
            "all_rows[2dev-attribute-step-_hooked-torch]",)),
    Mutant("torch-idle-leaf-copied", "a device without rows gets a leaf of "
           "its own",
           edit(_ATTRIBUTES + "_take", "if is_trained(t)}", "if False}"),
           ("test_kept.py::test_a_leaf_in_an_attribute_where_devices_have_no_"
            "rows[4dev-dict-torch]",)),
    Mutant("torch-shared-leaf-written", "a pass may write to such a leaf once "
           "for each device", edit(
               "mgpu.backends._torch.network:TorchNetwork.guarded",
               "self._attributes.check_shared(before)", "pass"),
           ("test_kept.py::test_a_forward_pass_leaves_such_a_leaf_as_it_is["
            "2dev-prediction-torch]",)),
    Mutant("torch-weak-references-stay", "a layer holds the first device's "
           "network weakly",
           edit("mgpu.backends._torch.network:_copy",
                "follow_weak(net, made)", "pass"),
           ("test_kept.py::test_a_weak_reference_to_a_layer_is_one_to_that_of_"
            "its_device[2dev-list-False-torch]",)),
    Mutant("torch-later-references-stay", "a weak reference that comes later "
           "is one to the first device's network",
           edit(_ATTRIBUTES + "_twins", "if weakref.getweakrefcount(m):",
                "if False:"),
           ("test_kept.py::test_a_weak_reference_to_a_layer_is_one_to_that_of_"
            "its_device[2dev-attribute-True-torch]",)),
    Mutant("torch-compressed-stay", "a write to a sparse matrix in an "
           "attribute is on the first device only",
           edit("mgpu.backends._torch.network:_copy",
                "id(t): t for", "id(t): t.clone() for"),
           ("test_kept.py::test_sparse_matrices_in_attributes[2dev-csr-"
            "torch]",)),
    Mutant("torch-data-inside-stays", "a write through .data to such a tensor "
           "is not seen", edit(
               "mgpu.backends._torch.places:_content",
               'if x.device.type != "cpu" or', "if True or"),
           ("test_kept.py::test_arrays_in_attributes_that_the_user_changes["
            "torch-2dev-data-list]",)),
    Mutant("torch-kept-tensors-follow", "what a pass keeps is replica 0's",
           edit(_ATTRIBUTES + "Attributes.follow",
                "content is not _ARRAYS", "True"),
           ("test_network_hooks.py::test_tensors_that_a_pass_keeps_stay_with_"
            "their_device[torch]",)),
    Mutant("torch-kept-tensors-alone", "what a pass of replica 0 alone keeps "
           "counts as the user's",
           edit(_ATTRIBUTES + "Attributes._is_the_users",
                "self._kept.add((number, name))", "return False"),
           ("test_network_hooks.py::test_tensors_that_a_pass_keeps_stay_with_"
            "their_device[torch]",)),
    Mutant("torch-two-of-one-name", "a norm's weight takes the name of the "
           "user's own gamma",
           edit("mgpu.backends._torch.names:suffix_of",
                "gluon in module._parameters", "False"),
           ("test_network_hooks.py::test_no_two_parameters_have_one_name*",)),
    Mutant("torch-late-buffers", "a new buffer on replica 0 only",
           edit(_ATTRIBUTES + "Attributes.check_layers",
                "and name in made", ""),
           ("test_network_hooks.py::test_buffers_that_passes_make_belong_to_"
            "their_device*",)),
    Mutant("torch-buffers-grow", "a buffer of another shape",
           edit("mgpu.following:Following._check_shapes",
                "tuple(x.shape) != p.shape", "False"),
           ("test_network_hooks.py::test_buffers_that_passes_make_belong_to_"
            "their_device*",)),
    Mutant("torch-eval-in-forward", "a layer that the network has put into "
           "eval mode trains", edit(
               "mgpu.backends._torch.arithmetic:_in_training",
               "if layer.training", "if True"),
           ("test_batch_norm.py::test_the_network_may_end_the_training_mode_"
            "of_a_layer*",)),
    Mutant("mxnet-predict-mode-in-forward", "a layer called in predict_mode "
           "trains", edit("mgpu.backends._mxnet.network:_computed_by",
                          "if mx.autograd.is_training()", "if True"),
           ("test_batch_norm.py::test_the_network_may_end_the_training_mode_"
            "of_a_layer*",)),
    Mutant("torch-own-forward-lost", "the user's forward of a batch norm is "
           "not called", edit(
               "mgpu.backends._torch.arithmetic:computes_itself",
               "type(layer).forward not in FORWARDS", "False"),
           ("test_batch_norm.py::test_a_layer_with_a_forward_pass_of_its_own"
            "*",)),
    Mutant("mxnet-own-forward-lost", "the user's forward of a batch norm is "
           "not called under sync", edit(
               "mgpu.backends._mxnet.network:MXNetNetwork._batch_norm_layers",
               "if own:", "if False:"),
           ("test_batch_norm.py::test_a_layer_with_a_forward_pass_of_its_own"
            "*",)),
    Mutant("torch-tensors-in-objects", "tensors in an object of the user's "
           "are not found", edit(
               _REPLICA + "__call__", "list(_tensors(result, set()))",
               "list(filter(torch.is_tensor, tree_leaves(result)))"),
           ("test_recomputation.py::test_outputs_in_an_object_of_the_users"
            "*",)),
    Mutant("torch-max-norm", "a forward pass writes to the weights of its "
           "device", edit("mgpu.backends._torch.network:TorchNetwork.check",
                          "if written and", "if False and"),
           ("test_replicas.py::test_layers_that_do_not_fit_are_refused*",)),
    Mutant("parts-of-a-network", "a part gets replicas of its own",
           edit("mgpu.replicas:_check_alone", "not give_up", "False"),
           ("test_replicas.py::test_a_part_of_an_initialized_network_is_"
            "refused*",)),
    Mutant("mxnet-frozen-cells", "a bias of a cell learns from old gradients",
           edit("mgpu.backends._mxnet.network:MXNetNetwork._mend_frozen",
                "len(p.shape or ()) == 2", "known"),
           ("test_replicas.py::test_a_bias_learns_once_its_weight_is_frozen"
            "*",)),
    Mutant("torch-layers-change", "other layers on replica 0 only",
           edit(_ATTRIBUTES + "Attributes.check_layers", "if not all(",
                "if False and all("),
           ("test_network_hooks.py::test_other_layers_are_refused_until_the_"
            "network_is_made_anew[2-replace_layer-1-torch]",)),
    Mutant("mxnet-layers-change", "other layers that no trainer trains",
           edit("mgpu.backends._mxnet.network:MXNetNetwork.follow",
                "now != self._named", "False"),
           ("test_network_hooks.py::test_other_parameters_are_refused_until_"
            "the_network_is_made_anew[2-append_dense-2.weight-mxnet]",)),
    Mutant("torch-orders-apart", "a write to a weight in another order of "
           "memory is lost", edit(
               "mgpu.backends._torch.backend:TorchBackend.host_views",
               "for x in arrays] if to_read else None",
               "for x in arrays] if False else None"),
           ("test_replicas.py::test_what_is_written_to_the_network_reaches_"
            "all[2dev-torch-in_another_order-together]",)),
    Mutant("torch-compiled-hooks-stay", "compiled code keeps its hooks",
           edit("mgpu.backends._torch.compiled:_options",
                "skip_nnmodule_hook_guards=False",
                "skip_nnmodule_hook_guards=True"),
           ("test_options.py::test_hooks_of_a_compiled_network_may_"
            "change[torch]",)),
    Mutant("torch-frozen-meanwhile", "what is frozen after the forward pass "
           "has a gradient on the other devices", edit(
               _REPLICA + "_backward_begins",
               "not theirs[name].requires_grad", "False"),
           ("test_network_hooks.py::test_what_is_frozen_after_the_forward_pass"
            "_has_no_gradient[add-2-torch]",)),
    Mutant("torch-pieces-overwrite", "what arrives later in a pass overwrites",
           edit(_LEAVES + "Pass.arrives",
                "leaf.number == self._number", "False"),
           (_RECOMPUTED + "0.0-False-True-True-torch]",)),
    Mutant("torch-recomputes-undressed", "a checkpoint computes again by "
           "torch's own layers", edit(
               _REPLICA + "_backward_begins",
               "stack.callback(self._dress(modes, forwards))", "pass"),
           (_RECOMPUTED + "0.5-False-True-True-torch]",)),
    Mutant("torch-statistics-move-twice", "a checkpoint moves them again",
           edit(_REPLICA + "_keeps_statistics", "not self._again() and ", ""),
           (_RECOMPUTED + "0.0-False-True-False-torch]",)),
    Mutant("torch-masks-drawn-anew", "a checkpoint draws other masks",
           edit(_REPLICA + "generator", "self._again()", "False"),
           (_RECOMPUTED + "0.5-False-True-True-torch]",)),
    Mutant("torch-frozen-layers-train", "eval mode of a layer is not heeded",
           edit(_REPLICA + "_modes", "return list(users)",
                "return [True] * len(users)"),
           ("test_network_hooks.py::test_a_layer_in_eval_mode_is_frozen*",)),
    Mutant("torch-hooks-share", "what forward hooks keep in one place goes "
           "unseen", edit("mgpu.backends._kept:Kept.check",
                          "ref() is not x", "False"),
           ("test_network_hooks.py::test_a_hook_keeps_nothing_where_devices_"
            "share_it*",)),
    Mutant("torch-teachers-train", "a network in eval mode trains under "
           "no_grad", edit(
               "mgpu.backends._torch.network:TorchNetwork.predicts",
               "    return True", "    return False"),
           ("test_network_hooks.py::test_a_network_in_eval_mode_predicts_"
            "while_others_train*",)),
    Mutant("torch-eval-mode-trains", "a network in eval mode trains", edit(
               "mgpu.backends._torch.network:TorchNetwork.predicts",
               "if torch.is_grad_enabled():", "if False:"),
           ("test_network_hooks.py::test_a_network_in_eval_mode_is_not_"
            "trained*",)),
    Mutant("torch-backward-hooks-share", "what backward hooks keep in one "
           "place goes unseen", edit(
               "mgpu.backends._torch.network:TorchNetwork.check_kept",
               "if several or not backward:", "if not backward:"),
           ("test_network_hooks.py::test_a_backward_hook_keeps_nothing_where_"
            "devices_share_it[2-full-torch]",)),
    Mutant("torch-hooks-in-forward-share", "what hooks that forward makes "
           "keep in one place goes unseen", edit(
               _ATTRIBUTES + "makers_of_hooks", "_makes_hooks(f.__code__)",
               "False"),
           ("test_network_hooks.py::test_a_backward_hook_keeps_nothing_where_"
            "devices_share_it[2-made in forward-torch]",)),
    Mutant("torch-one-at-a-time", "a user cannot read what hooks keep "
           "between devices", edit(
               "mgpu.backends._torch.network:TorchNetwork.check_kept",
               "len(self.reached) > 1", "True"),
           ("test_network_hooks.py::test_a_backward_hook_keeps_nothing_where_"
            "devices_share_it[2-full-torch]",)),
    Mutant("torch-multi-grad-hook", "a hook counts gradients of the first "
           "device", edit(
               _ATTRIBUTES + "_check_hooks",
               "code.co_filename == graph.__file__", "False"),
           ("test_network_hooks.py::test_a_hook_on_several_parameters_is_"
            "refused_on_several_devices*",)),
    Mutant("torch-dtypes-part", "a network in half precision on one device",
           edit("mgpu.backends._torch.network:TorchNetwork._check_forms",
                "here.dtype is not there.dtype or", "False or"),
           ("test_network_hooks.py::test_another_dtype_or_shape_is_refused"
            "[2-pass-half-torch]",)),
    Mutant("torch-shapes-part", "a transposed weight on one device",
           edit("mgpu.backends._torch.network:TorchNetwork._check_forms",
                "here.shape != there.shape", "False"),
           ("test_network_hooks.py::test_another_dtype_or_shape_is_refused"
            "[2-pass-shape-torch]",)),
    Mutant("torch-cached-weights", "the weights of one device are those of "
           "all", edit("mgpu.backends._torch.network:TorchNetwork.follow",
                       "if parametrize._cache_enabled:", "if False:"),
           ("test_network_hooks.py::test_a_cache_of_weights_is_of_one_device"
            "[2-torch]",)),
    Mutant("torch-attributes-lag", "a device without rows has attributes of "
           "an earlier pass", edit(
               _ATTRIBUTES + "Attributes.catch_up", "_lags(found.get(name),",
               "False and _lags(found.get(name),"),
           ("test_network_hooks.py::test_devices_without_rows_have_what_a_"
            "pass_keeps[2-attribute-torch]",)),
    Mutant("torch-prediction-ends-states", "a device without rows in a "
           "prediction takes another one's state of training", edit(
               _ATTRIBUTES + "_moved", "return before is None or",
               "return True or"),
           ("test_kept.py::test_a_prediction_keeps_the_state_of_training["
            "torch-2dev-attribute-1]",)),
    Mutant("torch-predictions-are-edits", "what predictions write to buffers "
           "counts as the user's", edit(
               "mgpu.replicas:Replicas._passed",
               "self.following.passed(self.buffers(), training)",
               "training and self.following.passed(self.buffers(), "
               "training)"),
           ("test_kept.py::test_buffers_that_predictions_write_are_each_"
            "devices[torch-2dev-prediction]",)),
    Mutant("torch-load-hides-edits", "what is set before a checkpoint is "
           "loaded stays on the first device", edit(
               "mgpu.checkpoint:load",
               "replicas.network.follow()", "pass"),
           ("test_checkpoint.py::test_what_is_set_before_a_file_is_loaded_is_"
            "on_all_devices[torch-2dev]",)),
    Mutant("torch-late-buffers-lag", "a device without rows lacks buffers "
           "that passes make", edit(
               _ATTRIBUTES + "Attributes.catch_up",
               "if name not in self._ready[number]", "if False"),
           ("test_network_hooks.py::test_devices_without_rows_have_what_a_"
            "pass_keeps[2-buffer of a pass-torch]",)),
    Mutant("torch-first-device-lags", "a number that the last device has "
           "counted is not replica 0's", edit(
               _ATTRIBUTES + "_lags", "not follows and", "False and"),
           ("test_network_hooks.py::test_devices_without_rows_have_what_a_"
            "pass_keeps[2-number-torch]",)),
    Mutant("predictions-lag", "what a prediction keeps is lost on devices "
           "without rows", edit("mgpu.replicas:Replicas._note",
                                "if idle:", "if ():"),
           ("test_network_hooks.py::test_devices_without_rows_have_what_a_"
            "pass_keeps[2-attribute-torch]",)),
    Mutant("torch-seeds-of-one", "a generator is seeded on replica 0 only",
           edit(_ATTRIBUTES + "Attributes._follow_streams",
                "other.set_state(state)", "pass"),
           ("test_network_hooks.py::test_a_generator_that_the_user_seeds_is_"
            "seeded_on_every_device[2-seeds1-torch]",)),
    Mutant("torch-dicts-shared", "a dict that copy.deepcopy fails with is one "
           "for all devices", edit("mgpu.backends._kept:_own_attributes",
                                   "found.append((one, False))", "pass"),
           ("test_kept.py::test_what_the_user_resets_is_reset_on_every_device"
            "[torch-2dev-ItemsAsAttributes]",)),
    Mutant("torch-copies-part", "a view of a parameter has memory of its own "
           "in a copy", edit(
               "mgpu.backends._torch.network:_copy",
               "copies[id(p)] =", "_ ="),
           ("test_network_hooks.py::test_what_shares_memory_does_so_on_every_"
            "device[2-buffer-torch]",)),
    Mutant("torch-later-views-part", "a view that the user makes later has "
           "memory of its own on other devices",
           edit(_ATTRIBUTES + "_twins", "memory[space._cdata] = other",
                "pass"),
           ("test_network_hooks.py::test_what_shares_memory_does_so_on_every_"
            "device[2-attribute-torch]",)),
    Mutant("torch-parts-predict", "a layer in training mode predicts with a "
           "network in eval mode", edit(_REPLICA + "_modes",
                                        "not users[0] and True in users",
                                        "False"),
           ("test_network_hooks.py::test_a_layer_in_training_mode_trains_in_"
            "predictions*",)),
    Mutant("torch-parts-move-statistics", "a prediction normalises by the "
           "rows of a device", edit(_REPLICA + "_check_predicting",
                                    "if found:", "if False:"),
           ("test_network_hooks.py::test_a_layer_in_training_mode_trains_in_"
            "predictions*",)),
    Mutant("torch-draws-out-of-turn", "a layer that trains later draws from "
           "the stream of all", edit(_REPLICA + "_may_draw",
                                     "self._quiet != modes", "False"),
           ("test_network_hooks.py::test_a_layer_that_trains_later_draws_in_"
            "turn*",)),
    Mutant("torch-draws-unnamed", "what begins to draw later draws from the "
           "stream of all", edit(_REPLICA + "__call__",
                                 "network.draws[draws]", "False"),
           ("test_network_hooks.py::test_what_begins_to_draw_later_draws_the_"
            "same_in_every_run[function-2-torch]",)),
    Mutant("torch-attributes-unread", "what an attribute holds draws from the "
           "stream of all", edit("mgpu.backends._torch.draws:code_of",
                                 "name not in _OWN", "False"),
           ("test_network_hooks.py::test_what_begins_to_draw_later_draws_the_"
            "same_in_every_run[attribute prediction-2-torch]",)),
    Mutant("torch-backward-draws", "backward passes draw from the stream of "
           "all", edit(_REPLICA + "_backward_begins",
                       "if draws and not watch.inside", "if False"),
           ("test_network_hooks.py::test_backward_passes_that_draw_take_turns["
            "True-function-1-torch]",)),
    Mutant("torch-backward-unlearned", "a backward pass that is not read "
           "draws from the stream of all",
           edit(_REPLICA + "_backward_begins", "draws is None", "False"),
           ("test_network_hooks.py::test_backward_passes_that_draw_take_turns["
            "True-unread-1-torch]",)),
    Mutant("torch-first-prediction-draws", "it draws from the stream of all",
           edit("mgpu.backends._torch.draws:named_draws",
                "always or (None if code", "always or (None if False"),
           ("test_network_hooks.py::test_the_first_prediction_of_code_that_is_"
            "not_read_takes_turns*",)),
    Mutant("torch-loss-draws", "a loss draws from the stream of all",
           edit(_REPLICA + "around_loss", "self._loss_draws is False",
                "True"),
           ("test_network_hooks.py::test_what_begins_to_draw_later_draws_the_"
            "same_in_every_run[loss-2-torch]",)),
    Mutant("torch-draws-unsaid", "threads draw from one stream in silence",
           edit("mgpu.backends._torch.backend:TorchBackend._run",
                "watch.check(before)", "pass"),
           ("test_network_hooks.py::test_draws_that_no_name_tells_of_are_said"
            "[torch]",)),
    Mutant("torch-train-not-called", "the user's own train is passed over",
           edit(_REPLICA + "_set_modes", "layers[number].train(mode)", "pass"),
           ("test_network_hooks.py::test_the_users_own_train_is_called_where_"
            "the_mode_changes*",)),
    Mutant("torch-hooks-lost", "hooks act on the first device only",
           edit("mgpu.backends._torch.network:TorchNetwork.replicate",
                "if i:", "if False:"),
           ("test_network_hooks.py::test_hooks_on_parameters_act_on_every_"
            "device*",)),
    Mutant("torch-losses-averaged", "a loss is averaged over its rows",
           edit("mgpu.backends._torch.graph:total", "loss.sum()",
                "loss.mean()"),
           ("test_contract.py::test_each_loss_is_summed[torch-1dev-*",)),
    Mutant("torch-dropout-unscaled", "what is kept is not divided by its "
           "probability", edit(_DROPOUT, "x * mask.div_(keep) if keep else "
                               "x * mask", "x * mask"),
           ("test_replicas.py::test_channel_dropout_drops_channels[torch]",
            "test_replicas.py::test_dropout_is_reproducible_and_differs_"
            "between_devices[torch-2dev]")),
    Mutant("torch-dropout-alike", "all devices draw the same mask",
           edit(_TORCH + "generator", "self._first + device.index", "0"),
           ("test_replicas.py::test_dropout_is_reproducible_and_differs_"
            "between_devices[torch-2dev]",)),
    Mutant("torch-seed-ignored", "masks go on after a seed",
           edit(_TORCH + "seed", "self._generators.clear()", "pass"),
           ("test_replicas.py::test_dropout_is_reproducible_and_differs_"
            "between_devices[torch-2dev]",)),
    Mutant("a-block-awaits", "a task computes under another's flags",
           edit("mgpu.backends.scope:check_task", "raise RuntimeError(",
                "RuntimeError("),
           ("test_contract.py::test_a_scope_holds_no_await[torch]",)),
    Mutant("torch-hooks-keep-replicas", "no network of torch ends",
           edit("mgpu.backends._torch.replica:TorchReplica.borrow_hooks",
                "weakref.WeakMethod(self._hooks)", "lambda: self._hooks"),
           ("test_replicas.py::test_a_network_that_nobody_uses_ends[torch-"
            "2dev]",)),
    Mutant("torch-data-draws-from-replicas", "data is drawn while a replica's "
           "stream stands in for torch's default one",
           edit("mgpu.prefetching:_draw", "with drawing():", "if True:"),
           ("test_prefetch.py::test_data_and_functional_dropout_draw_the_same_"
            "numbers_in_every_run[torch]",)),
    Mutant("torch-waits-in-its-turn", "data that runs networks keeps the turn "
           "that a step waits for",
           edit("mgpu.backends._torch.replica:aside", "_give_turn()", "None"),
           ("test_prefetch.py::test_who_waits_in_its_turn_to_draw_leaves_it_"
            "to_others[torch]",)),
    Mutant("torch-turn-not-taken-again", "data draws without a turn",
           edit("mgpu.backends._torch.replica:aside", "_take_turn(stop)",
                "pass"),
           ("test_prefetch.py::test_who_waits_in_its_turn_to_draw_leaves_it_"
            "to_others[torch]",)),
    Mutant("threads-that-drew-are-lost", "each epoch of data has a new thread",
           edit("mgpu.prefetching:_Threads.hand_out", "self._idle.pop()",
                "[].pop()"),
           ("test_prefetch.py::test_a_thread_that_has_drawn_draws_again",)),
    Mutant("mxnet-threads-not-seeded", "the threads of devices draw on",
           edit(_MXNET + "parallel", "self._begin_streams(1)", "pass"),
           ("test_checkpoint.py::test_a_resumed_run_under_sync[mxnet-nd]",)),
    Mutant("torch-results-in-no-order", "results of devices change places",
           edit("mgpu.backends._workers:_Call.outcome",
                "first_error_or(results, errors)",
                "first_error_or(results[::-1], errors)"),
           ("test_training.py::test_parallel[torch-2dev]",)),
    Mutant("an-error-is-swallowed", "what a device raised is lost",
           edit("mgpu.backends._workers:first_error_or", "error is not None",
                "False"),
           ("test_contract.py::test_the_first_exception_is_raised_after_all_"
            "have_run",)),
    Mutant("mxnet-threads-share-blocks", "forward passes of blocks with code "
           "of the user's run side by side",
           edit(_DISPATCH + "_is_plain", "kind.forward is Hybrid.forward",
                "True"),
           (_KNOWN + "mxnet-nd-Overrides-True-0]",)),
    Mutant("mxnet-threads-draw", "dropout draws in the order of threads",
           edit(_DISPATCH + "_operations", "_NOT_FIXED", "()",
                "any(map(_DRAWS.search, words))", "False"),
           (_KNOWN + "mxnet-nd-dropout-False-0]",
            _KNOWN + "mxnet-nd-dropout-True-0]")),
    Mutant("mxnet-threads-run-hooks", "hooks are called in several threads",
           edit(_DISPATCH + "touched", "block._forward_hooks or", ""),
           ("test_dispatch.py::test_a_hook_is_the_users_code[mxnet-nd]",)),
    Mutant("mxnet-bulk-held-back", "threads go before what the caller has "
           "queued", edit(_MXNET + "carry",
                          "mx.engine.set_bulk_size(mx.engine."
                          "set_bulk_size(0))", "pass"),
           ("test_dispatch.py::test_operations_that_the_caller_holds_back["
            "mxnet-nd-2]",)),
    Mutant("mxnet-common-leaf", "the last thread's gradient is not added",
           edit(_DISPATCH + "disjoint",
                "names & leaves", "False"),
           ("test_dispatch.py::test_losses_that_share_a_leaf_are_summed["
            "mxnet-nd]",)),
    Mutant("mxnet-put-aliases", "an array that is there already is not copied",
           edit(_MXNET + "put", "x.copyto(context)",
                "x.as_in_context(context)"),
           (_COPIES + "mxnet-nd-native-target0-None]",)),
    Mutant("mxnet-loss-counts-once", "the same loss twice counts once",
           edit(_MXNET + "backward", "len(heads) < len(losses)", "False"),
           ("test_contract.py::test_the_same_loss_twice_counts_twice"
            "[mxnet-nd]",)),
    Mutant("mxnet-softplus-overflows", "large scores are infinite",
           edit("mgpu.backends._mxnet.ops:MXNetOps.softplus",
                "self.relu(x) + self._log1p(self.exp(-self.abs(x)))",
                "self._log1p(self.exp(x))"),
           ("test_contract.py::test_softplus_does_not_overflow_and_keeps_"
            "small_values[mxnet-nd]",)),
    Mutant("mxnet-pool-overlaps", "pooling moves by 1",
           edit("mgpu.backends._mxnet.ops:MXNetOps._pool",
                "size if stride is None else stride",
                "1 if stride is None else stride"),
           ("test_contract.py::test_ops_compute_as_numpy_does",)),
    Mutant("mxnet-bias-frozen-with-its-weight", "a bias does not learn where "
           "the weight is frozen", edit(
               "mgpu.backends._mxnet.network:MXNetNetwork._mend_frozen",
               "x.attach_grad()", "pass"),
           ("test_replicas.py::test_a_bias_learns_while_its_weight_is_frozen",
            )),
]
