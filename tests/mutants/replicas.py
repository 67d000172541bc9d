"""Replicas that are not copies of one network."""
from mutants.planting import Mutant, edit

_REPLICAS = "mgpu.replicas:Replicas."

_KEPT = "test_kept.py::"
_NATIVE = _KEPT + "test_a_state_that_a_native_call_leaves_is_refused"
_ATTRIBUTES = "mgpu.backends._mxnet.attributes:"

MUTANTS = [
    Mutant("names-of-one-parameter-differ", "the first of two values wins",
           edit("mgpu.replicas:_under_one_name", "!= x.tobytes()",
                "is None"),
           ("test_replicas.py::test_a_shared_parameter_may_come_under_each_"
            "name*",)),
    Mutant("mxnet-attributes-of-all", "all devices count in one attribute",
           edit(_ATTRIBUTES + "Attributes.show", "index != self._shown",
                "False"),
           (_KEPT + "test_what_a_pass_keeps_is_as_on_one_device*",)),
    Mutant("mxnet-states-of-device-0", "states go on with the rows of another "
           "device", edit(_ATTRIBUTES + "_Block.follow",
                          "left.get(name) is x", "False"),
           (_KEPT + "test_what_a_pass_keeps_is_as_on_one_device*",)),
    Mutant("mxnet-lists-of-all", "devices share the lists of a block",
           edit(_ATTRIBUTES + "_Block.follow",
                "if isinstance(x, _Content):", "if False:"),
           (_KEPT + "test_what_a_pass_keeps_is_as_on_one_device*",)),
    Mutant("mxnet-counts-stay", "a device without rows counts no further",
           edit(_ATTRIBUTES + "_Block.follow", "isinstance(x, mx.nd.NDArray) "
                "and", "i in self.now(0) or"),
           (_KEPT + "test_a_short_batch_leaves_counts_as_on_one_device"
            "[mxnet-nd-4dev]",)),
    Mutant("mxnet-resets-stay", "a collection that the user empties stays on "
           "other devices", edit(_ATTRIBUTES + "_Block.follow",
                                 "left.get(name) == x and bool(", "bool("),
           (_KEPT + "test_what_the_user_resets_is_reset_on_every_device*",)),
    Mutant("torch-resets-stay", "what the user resets stays on other devices",
           edit("mgpu.backends._torch.attributes:Attributes.follow",
                "self._behind(number, known)", "set()"),
           (_KEPT + "test_what_the_user_resets_is_reset_on_every_device*",)),
    Mutant("mxnet-edited-states", "what the loop does to a state is done on "
           "device 0", edit(_ATTRIBUTES + "_Block.follow",
                            "if self._kept ", "if False "),
           (_KEPT + "test_what_the_loop_does_to_a_carried_state_is_done_on_"
            "every_device[mxnet-nd-2dev*",)),
    Mutant("mxnet-written-states", "a write into a state is not seen",
           edit("mgpu.backends._mxnet.places:wrote", "handle in _known",
                "False"),
           (_KEPT + "test_other_values_in_a_carried_state_are_refused"
            "[mxnet-nd-2dev*",)),
    Mutant("torch-edited-states", "what the loop does to a state is done on "
           "device 0", edit("mgpu.backends._torch.places:Places.follow",
                            "if not self._kept", "if True"),
           (_KEPT + "test_other_values_in_a_carried_state_are_refused"
            "[torch-2dev*",)),
    Mutant("torch-written-states", "a write into a state is not seen",
           edit("mgpu.backends._torch.places:Leaf.same",
                "self[1:] == other[1:]", "True"),
           (_KEPT + "test_other_values_in_a_carried_state_are_refused"
            "[torch-2dev*",)),
    Mutant("torch-unknown-states", "what a native call leaves is for all "
           "devices", edit("mgpu.backends._torch.places:Places._in_copies",
                           "self._unknown(error) if",
                           "leaf.tensor.detach().clone() if"),
           (_NATIVE + "[torch-2dev-per_device-step-<function "
            "_carried>]",)),
    Mutant("mxnet-unknown-states", "what a native call leaves is for all "
           "devices", edit(_ATTRIBUTES + "_Block._edited",
                           "unknown if other is None", "a if other is None"),
           (_NATIVE + "[mxnet-nd-2dev-per_device-step-<function "
            "_carried>]",)),
    Mutant("torch-caught-reads", "a network that catches the error goes on",
           edit("mgpu.backends._torch.replica:TorchReplica.__call__",
                "self._run(inputs, named, training)\n            "
                "network.check_read()", "self._run(inputs, named, training)"),
           (_NATIVE + "[torch-2dev-per_device-single-<function "
            "_carried_and_caught>]",)),
    Mutant("mxnet-caught-reads", "a network that catches the error goes on",
           edit("mgpu.backends._mxnet.network:MXNetReplica.__call__",
                "untold.check()\n                return",
                "untold\n                return"),
           (_NATIVE + "[mxnet-nd-2dev-per_device-single-<function "
            "_carried_and_caught>]",)),
    Mutant("torch-refused-states", "what a refused pass leaves is a state",
           edit("mgpu.backends._torch.places:Places.follow", "if again and",
                "if False and"),
           (_NATIVE + "[torch-2dev-per_device-single-<function "
            "_carried_and_caught>]",)),
    Mutant("mxnet-refused-states", "what a refused pass leaves is a state",
           edit(_ATTRIBUTES + "_Block._edited",
                "untold.again and name", "False and name"),
           (_NATIVE + "[mxnet-nd-2dev-per_device-single-<function "
            "_carried_and_caught>]",)),
    Mutant("torch-unknown-in-objects", "an object that cannot be copied is "
           "one for all devices", edit(
               "mgpu.backends._torch.attributes:Attributes.follow",
               "isinstance(x, Unknown)", "False"),
           (_NATIVE + "[torch-2dev-per_device-hand-<function "
            "_carried_beside_a_lock>]",)),
    Mutant("mxnet-unknown-in-objects", "an object that cannot be copied is "
           "one for all devices", edit(
               _ATTRIBUTES + "_twin", "unknown[0] if unknown else x", "x"),
           (_NATIVE + "[mxnet-nd-2dev-per_device-hand-<function "
            "_carried_beside_a_lock>]",)),
    Mutant("torch-unknown-detached", "what nobody knows is a number without "
           "its history", edit(
               "mgpu.backends._torch.places:Places._pair",
               "and not isinstance(each[j], Unknown) else", "else"),
           (_KEPT + "test_the_loop_changes_what_a_native_call_has_left"
            "[torch-2dev-True-False]",)),
    Mutant("torch-layers-keep-nothing", "what passes keep on layers of torch "
           "is not followed", edit(
               "mgpu.backends._torch.places:Places.scan",
               "len(attributes) == self._lengths[number]",
               "self._lengths[number]"),
           (_NATIVE + "[torch-2dev-per_device-step-<function "
            "_carried_on_a_layer>]",)),
    Mutant("mxnet-shapes-count", "the pass that completes shapes counts",
           edit("mgpu.backends._mxnet.network:MXNetNetwork.infer_shapes",
                "spare.of(1)", "spare.of(0)"),
           (_KEPT + "test_the_pass_that_completes_shapes_keeps_nothing"
            "[mxnet-nd]",)),
    Mutant("mxnet-losses-read-device-0", "a loss reads what the pass of "
           "another device has kept", edit(
               "mgpu.backends._mxnet.network:MXNetNetwork.forward_backward",
               "self.attributes.of(i)", "self.attributes.of(0)"),
           (_KEPT + "test_a_loss_reads_what_the_pass_of_its_device_has_kept"
            "[2-mxnet-nd]",)),
    Mutant("mxnet-counts-outside", "passes count in a global variable once "
           "for each device", edit(
               _ATTRIBUTES + "Attributes.check", "now.get(key, x) != x",
               "False"),
           (_KEPT + "test_what_devices_cannot_have_apart_is_refused"
            "[*",)),
    Mutant("mxnet-buffers-of-all", "passes write into one array",
           edit("mgpu.backends._mxnet.places:wrote", "if handle in _shared",
                "if False"),
           (_KEPT + "test_an_array_of_all_devices_stays_as_it_is_or_is_each_"
            "devices[mxnet-nd-2dev*",)),
    Mutant("mxnet-views-of-all", "passes write into a view of one array",
           edit("mgpu.backends._mxnet.places:_viewed", "if key in _shared",
                "if False"),
           (_KEPT + "test_an_array_of_all_devices_stays_as_it_is_or_is_each_"
            "devices[mxnet-nd-2dev-_through_a_new_view*",)),
    Mutant("mxnet-functional-norms", "passes move statistics of all devices",
           edit("mgpu.backends._mxnet.gradients:_operator", "in _NORMS",
                "in ()"),
           (_KEPT + "test_batch_norm_moves_no_statistics_that_devices_share"
            "[*",)),
    Mutant("mxnet-counts-in-attributes", "passes count in attributes of other "
           "objects once for each device", edit(
               _ATTRIBUTES + "_outside", "if attributes else ()",
               "if False else ()"),
           (_KEPT + "test_what_devices_cannot_have_apart_is_refused[*",)),
    Mutant("mxnet-counts-in-classes", "passes count in their class once for "
           "each device", edit(
               _ATTRIBUTES + "_outside", "in reversed(kinds)", "in ()"),
           (_KEPT + "test_what_devices_cannot_have_apart_is_refused[*",)),
    Mutant("mxnet-counts-in-methods", "what passes call counts once for each "
           "device", edit(
               _ATTRIBUTES + "_numbers", "any(_changes(x.__code__))",
               "False"),
           (_KEPT + "test_what_devices_cannot_have_apart_is_refused[*",)),
    Mutant("mxnet-sums-hide-edits", "a pass that adds to a changed gradient "
           "hides the change", edit(
               "mgpu.backends._mxnet.gradients:Watched.end_pass",
               'not (flag and request == "add")', "True"),
           ("test_trainer.py::test_a_gradient_that_is_changed_between_two_"
            "passes_of_a_step*",)),
    Mutant("mxnet-edits-stay", "a sum that the user changes is one of the "
           "next batch too", edit(
               "mgpu.backends._mxnet.gradients:Watched.end_pass",
               'not (flag and request == "add")', 'request == "write"'),
           ("test_trainer.py::test_a_sum_that_the_user_changes_goes_on*",)),
    Mutant("mxnet-changed-weights", "what a parameter gives to forward is "
           "taken for what it stores", edit(
               "mgpu.backends._mxnet.network:MXNetReplica.array",
               "stored(parameter, self._context)",
               "parameter.data(self._context)"),
           ("test_trainer.py::test_a_parameter_that_gives_forward_something_"
            "else_than_it_stores*",)),
    Mutant("mxnet-shapes-write", "the pass that completes shapes writes",
           edit(_ATTRIBUTES + "Attributes.put_back",
                "_bits(x) != _bits(own)", "False"),
           (_KEPT + "test_the_pass_that_completes_shapes_writes_nothing"
            "[*",)),
    Mutant("mxnet-hooks-share", "what hooks of Gluon keep in one place goes "
           "unseen", edit(
               "mgpu.backends._mxnet.network:MXNetNetwork.check_kept",
               "kept.check()", "pass"),
           ("test_network_hooks.py::test_a_hook_of_gluon_keeps_nothing_where_"
            "devices_share_it[per_device-closure-mxnet-nd]",)),
    Mutant("mxnet-context-of-the-thread", "p.data() is replica 0's",
           edit("mgpu.backends._mxnet.network:MXNetReplica.__call__",
                "mx.Context(self._context), ", ""),
           (_KEPT + "test_arrays_and_weights_without_a_context_are_the_"
            "devices*",)),
    Mutant("mxnet-attributes-only", "parameters in a list are not trained",
           edit("mgpu.backends._mxnet.network:_named",
                "found[name] = p", "pass"),
           ("test_replicas.py::test_all_that_gluons_own_trainer_trains_is_"
            "trained[1dev-there-list-mxnet-nd]",)),
    Mutant("mxnet-trains-more", "what Gluon's own Trainer leaves out is "
           "trained", edit("mgpu.backends._mxnet.network:MXNetNetwork.check",
                           "if left_out:", "if False:"),
           ("test_replicas.py::test_what_gluons_own_trainer_leaves_out_is_"
            "refused[1dev-standalone-mxnet-nd]",)),
    Mutant("mxnet-bias-elsewhere", "a bias whose frozen weight is another "
           "block's does not learn", edit(
               "mgpu.backends._mxnet.network:MXNetNetwork._mend_frozen",
               "biases | users if known", "biases if True"),
           ("test_replicas.py::test_a_bias_learns_where_its_weight_belongs_to_"
            "another_block[1dev-mxnet-nd-*",)),
    Mutant("values-read-twice", "a mapping that changes is not what was "
           "checked", edit("mgpu.replicas:Replicas.fit_numpy",
                           'by_name("values", values).items()}',
                           'by_name("values", values).items()} and values'),
           ("test_replicas.py::test_values_are_read_once[torch]",)),
    Mutant("set-data-once-per-device", "what a pass sets is set again on each "
           "device", edit("mgpu.backends._mxnet.network:_set_data",
                          "if context is None:", "if True:"),
           ("test_replicas.py::test_what_a_pass_sets_is_set_once_a_step"
            "[2dev-6-mxnet-nd]",)),
    Mutant("joint-batch-norm-of-gluon", "a device without rows hangs",
           edit("mgpu.backends._mxnet.network:MXNetNetwork.check",
                "joined and len", "False and len"),
           ("test_replicas.py::test_gluons_own_joint_batch_norm_is_refused"
            "[per_device-mxnet-nd]",)),
    Mutant("replica-aliased", "all devices hold the user's own module",
           edit("mgpu.backends._torch.network:TorchNetwork.replicate",
                "_copy(self.net)", "self.net"),
           ("test_replicas.py::test_devices_do_not_share_memory[torch]",)),
    Mutant("each-device-draws", "devices start from different weights",
           edit(_REPLICAS + "_complete", "self.backend.put(values[spec.name],",
                "self.backend.put(values[spec.name] if spec.kind != 'weight' "
                "else np.random.default_rng(replica.index).normal(0, 0.01, "
                "spec.shape),"),
           ("test_replicas.py::test_every_device_and_engine_start_from_the_"
            "drawn_bits[torch-2dev-uniform]",)),
    Mutant("edits-stay-on-one", "what the user writes to the network does not "
           "reach the other devices", edit(
               "mgpu.following:Following.follow",
               "arrays[i][...] = self._backend.put(arrays[0], arrays[i])",
               "pass"),
           ("test_replicas.py::test_what_is_written_to_the_network_reaches_"
            "all[2dev-torch-in_place-together]",)),
    Mutant("edits-without-a-count", "only writes that torch counts reach all",
           edit("mgpu.host_memory:differing",
                "if (first != x).any()", "if False"),
           ("test_replicas.py::test_what_is_written_to_the_network_reaches_"
            "all[2dev-torch-through_data-together]",)),
    Mutant("write-elsewhere-lost", "what is written to another replica is "
           "overwritten without a word", edit(
               "mgpu.following:Following._to_copy",
               "if written[i]:", "if False:"),
           ("test_replicas.py::test_a_write_to_another_replica_only_is_an_"
            "error[2dev-torch]",)),
    Mutant("torch-places-stay-frozen", "what takes the place of a frozen "
           "parameter is frozen", edit(
               "mgpu.backends._torch.network:TorchNetwork.adopt",
               "trained_req", "grad_req"),
           ("test_replicas.py::test_a_parameter_in_the_place_of_a_frozen_one_"
            "trains[1dev-torch]",)),
    Mutant("edits-before-the-update-stay", "what the user writes between "
           "backward and update stays on replica 0", edit(
               "mgpu.trainer:Trainer._update", "if written:", "if False:"),
           ("test_replicas.py::test_what_is_written_before_the_update_reaches_"
            "all[2dev-torch-backward]",)),
    Mutant("any-empty-array-empties", "an empty array anywhere in a shard "
           "means no rows", edit("mgpu.nested:is_empty", "0 in shapes[0]",
                                 "any(0 in x for x in shapes)"),
           ("test_training.py::test_rows_are_those_of_the_first_input[torch-"
            "*",)),
    Mutant("optional-inputs-empty", "an input that is None is a shard without "
           "rows", edit("mgpu.nested:is_empty", "    shapes:",
                        "    if None in data: return True\n    shapes:"),
           ("test_replicas.py::test_an_optional_input[torch-2dev]",)),
    Mutant("old-values-exported", "an export mixes the network's values with "
           "those that it had", edit(
               "mgpu.following:Following.standing", "written and not own",
               "False"),
           ("test_replicas.py::test_what_is_written_to_the_network_is_"
            "exported[2dev-torch]",)),
    Mutant("statistics-made-equal", "buffers follow replica 0 always",
           edit("mgpu.following:Following._writes",
                "return written", "return [True] * len(written)"),
           ("test_replicas.py::test_buffers_follow_only_where_the_user_wrote_"
            "replica_0s[2dev-torch-in place]",)),
    Mutant("buffers-by-counters", "what .data writes to a buffer stays on "
           "replica 0", edit("mgpu.following:Following._writes",
                             "is not None and", "is None and"),
           ("test_replicas.py::test_buffers_follow_only_where_the_user_wrote_"
            "replica_0s[2dev-torch-through .data]",)),
    Mutant("predictions-edit-weights", "what a prediction writes to weights "
           "counts as the user's edit of other replicas",
           edit("mgpu.following:Following.agreed", "for i in devices if",
                "for i in () if"),
           ("test_replicas.py::test_weights_that_a_prediction_writes_are_no_"
            "edit_of_the_users[2dev-data-prediction-torch]",)),
    Mutant("predictions-agree-unseen", "weights that a prediction makes of "
           "its rows are taken for equal ones",
           edit("mgpu.following:Following.agreed", "i not in differing",
                "i >= 0"),
           ("test_replicas.py::test_weights_that_a_prediction_makes_of_its_"
            "rows_are_refused[2dev-torch]",)),
    Mutant("weights-of-rows", "replica 0's weights win over those that other "
           "rows made", edit("mgpu.following:Following._to_copy",
                             "written[i] and written[0]", "False"),
           ("test_replicas.py::test_weights_that_a_pass_makes_of_its_rows_are_"
            "refused[2dev-torch]",)),
    Mutant("graph-everywhere", "no_grad means nothing in record",
           edit("mgpu.backends._torch.replica:TorchReplica.__call__",
                "stack.enter_context(torch.no_grad())", "pass",
                "self._graph = torch.is_grad_enabled()",
                "stack.enter_context(torch.set_grad_enabled(recording))"),
           ("test_replicas.py::test_no_graph_where_the_user_wants_none"
            "[2dev-torch-no_grad]",)),
    Mutant("functional-batch-norm", "a function keeps statistics of one "
           "device's rows under sync",
           edit("mgpu.backends._torch.replica:_NoFunctionalBatchNorm."
                "__torch_function__", "raise", "return function(*args, "
                "**kwargs); raise"),
           ("test_batch_norm.py::test_sync_refuses_what_it_cannot_join"
            "[function]",)),
    Mutant("other-buffers-stay", "a buffer in another one's place is replica "
           "0's only", edit("mgpu.following:Following.follow",
                            "replaced.append(p)", "self.settle([p])"),
           ("test_replicas.py::test_buffers_follow_only_where_the_user_wrote_"
            "replica_0s[2dev-torch-assigned]",)),
    Mutant("passes-are-the-users", "what a pass puts in a buffer's place "
           "reaches all", edit("mgpu.replicas:Replicas._passed",
                               "self.following.passed",
                               "(lambda *_: None)"),
           ("test_replicas.py::test_a_buffer_that_a_pass_replaces_is_its_"
            "devices[2dev-torch]",)),
    Mutant("values-drawn-over", "loaded weights are lost",
           edit("mgpu.replicas:initialize",
                "not keep and (init is not None or force_reinit)",
                "not keep"),
           ("test_replicas.py::test_values_that_are_there_stay[torch-2dev]",)),
    Mutant("constants-numbered", "a gamma that only one engine keeps takes a "
           "number of the draws",
           edit("mgpu.replicas:initialize",
                "key=lambda spec: spec.constant is not None",
                "key=lambda spec: 0"),
           ("test_replicas.py::test_a_norm_layer_without_gamma_and_beta_is_"
            "one_network[1dev-batch]",)),
    Mutant("any-gamma-taken", "values that a layer cannot hold are dropped",
           edit("mgpu.replicas:Replicas._changes_nothing",
                "bool(np.all(value == start))", "True"),
           ("test_replicas.py::test_a_gamma_that_a_layer_does_not_have_is_"
            "refused*",)),
    Mutant("scales-drawn", "what scales a layer is drawn as weights are",
           edit("mgpu.replicas:initialize",
                'everything and spec.kind != "unknown"',
                "everything"),
           ("test_replicas.py::test_parameters_of_unknown_kinds_keep_their_"
            "values",)),
    Mutant("seed-ignored", "a seed changes nothing, without a word",
           edit("mgpu.replicas:initialize",
                "if seed is not None and not (everything or missing):",
                "if False:"),
           ("test_replicas.py::test_a_seed_where_nothing_is_drawn[torch]",)),
    Mutant("deferred-drawn-over", "Gluon's own initialiser is not asked",
           edit("mgpu.backends._mxnet.network:MXNetNetwork.missing",
                "not p._deferred_init and ", ""),
           ("test_replicas.py::test_a_deferred_initialize_is_carried_out_by_"
            "gluon",)),
    Mutant("loaded-values-zeroed", "values without shapes become zeros",
           edit("mgpu.backends._mxnet.network:MXNetNetwork._allocate",
                "p._init_impl(value,", "p._init_impl(value * 0,"),
           ("test_replicas.py::test_a_symbol_block_keeps_the_values_that_"
            "were_loaded",)),
    Mutant("gluon-saves-the-mean", "what Gluon saves has other last bits",
           edit("mgpu.backends._mxnet.network:MXNetNetwork.replicate",
                "if kind not in base.BUFFERS:", "if False:"),
           ("test_replicas.py::test_what_gluon_saves_are_the_bits_of_"
            "replica_0[3-mxnet-nd]",)),
    Mutant("native-call-draws-zeros", "only mgpu draws values",
           edit("mgpu.backends._mxnet.network:_Drawn._init_weight",
                "self._draw(arr.shape)", "0"),
           ("test_replicas.py::test_a_native_call_completes_unknown_shapes"
            "[mxnet-nd-2dev]",)),
    Mutant("loaded-before-the-pass-lost", "the first pass draws over a load",
           edit("mgpu.backends._torch.network:TorchNetwork.defer",
                "arrays_of(module) if is_lazy(x)]", "arrays_of(module)]"),
           ("test_replicas.py::test_what_is_loaded_before_the_first_pass_"
            "stays",)),
    Mutant("wrong-shapes-stay", "lazy layers keep the shape of a wrong sample",
           edit("mgpu.backends._torch.network:TorchNetwork.infer_shapes",
                "make_lazy()", "pass"),
           ("test_replicas.py::test_a_sample_that_does_not_fit_leaves_the_"
            "network[torch]",)),
    Mutant("import-on-one-device", "the other devices keep their values",
           edit(_REPLICAS + "fit_numpy", "enumerate(own[name].list_data())",
                "enumerate(own[name].list_data()[:1])"),
           ("test_replicas.py::test_values_cross_engines_and_device_counts"
            "[torch-torch]",)),
    Mutant("set-data-on-one-device", "the other devices keep their values",
           edit("mgpu.parameters:Parameter.set_data", "for x in arrays:",
                "for x in arrays[:1]:"),
           ("test_replicas.py::test_writing_a_parameter[torch-2dev]",)),
    Mutant("zero-grad-on-one-device", "the other devices keep theirs",
           edit("mgpu.parameters:Parameter.zero_grad",
                "in zip(self.list_data(), self.list_grad())",
                "in zip(self.list_data()[:1], self.list_grad())"),
           ("test_replicas.py::test_zero_grad[torch-2dev]",)),
    Mutant("get-params-aliases", "the device trains the caller's arrays",
           edit("mgpu.parameters:get_params", "copies = every = "
                "[backend.put(p, device) for p in params]", "copies = every = "
                "[p if backend.is_native(p) else backend.put(p, device) "
                "for p in params]"),
           ("test_replicas.py::test_get_params[torch-2dev]",)),
    Mutant("export-of-device-0", "statistics of the other devices are "
           "dropped in silence", edit(_REPLICAS + "export_numpy",
                                      "every.mean(axis=0)", "every[0]"),
           ("test_replicas.py::test_every_devices_statistics_survive[torch-2dev]"
            ,)),
    Mutant("recording-forgotten", "a device that ran counts as one without "
           "rows", edit(_REPLICAS + "_note",
                        "[i in active for i in range(len(self.devices))]",
                        "[False] * len(self.devices)"),
           ("test_trainer.py::test_a_step_without_a_backward_pass[torch-2dev-*"
            ,)),
    Mutant("sparse-accepted", "gradients hold only the rows that were used",
           edit("mgpu.replicas:initialize", "network.check(dtype, devices)",
                "pass"),
           ("test_replicas.py::test_sparse_gradients_are_refused[torch-*",)),
    Mutant("recurrent-float64", "MXNet's wrong gradients go through",
           edit("mgpu.backends._mxnet.network:MXNetNetwork.check",
                "wide and any", "False and any"),
           ("test_replicas.py::test_recurrent_layers_of_mxnet_are_refused_in_"
            "float64[RNN-*",)),
    Mutant("dtype-misnamed", "the wrong dtype is said to be the right one",
           edit("mgpu.backends.messages:wrong_dtype", "', '.join(received)",
                "own"),
           ("test_replicas.py::test_inputs_of_another_dtype_are_named["
            "torch-*",)),
    Mutant("void-replicas-take-values", "values written to void replicas "
           "reach a part of the new ones",
           edit("mgpu.replicas:Replicas.fit_numpy", "self.check_valid()",
                "pass"),
           ("test_trainer.py::test_replicas_made_void_are_refused[*",)),
    Mutant("predictions-leave-buffers-behind", "devices without rows keep "
           "the buffers that a prediction has written on others",
           edit("mgpu.replicas:Replicas._note",
                "if not (self.backend.is_training()", "if () and not ("
                "self.backend.is_training()"),
           ("test_kept.py::test_buffers_that_predictions_write_reach_devices_"
            "without_rows[torch-2dev-prediction]",)),
    Mutant("mxnet-arrays-lag", "devices without rows go on from the arrays of "
           "an earlier pass",
           edit("mgpu.backends._mxnet.network:MXNetNetwork.catch_up",
                "for i in idle", "for i in ()"),
           ("test_kept.py::test_arrays_that_passes_keep_reach_devices_without_"
            "rows[mxnet-nd-2dev-*",)),
    Mutant("no-longer-buffer", "a buffer that a prediction has made longer "
           "ends the training", edit("mgpu.replicas:Replicas._adopt",
                                     "len(self) == 1 and p.kind in BUFFERS",
                                     "False"),
           ("test_network_hooks.py::test_a_buffer_that_a_longer_text_makes_"
            "longer[predicting]",)),
    Mutant("longer-buffer-unknown", "the values of a buffer that has become "
           "longer are refused", edit("mgpu.following:Following.settle",
                                      "p.refit()", "pass"),
           ("test_network_hooks.py::test_a_buffer_that_a_longer_text_makes_"
            "longer[training]",)),
]
