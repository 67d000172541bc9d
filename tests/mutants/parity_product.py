"""Comparisons that do not see what they should."""
from mutants.planting import Mutant, edit

_LOCKSTEP = "mgpu.parity.comparison:Comparison.lockstep"
_RESULTS = "mgpu.parity.comparison:Comparison.compare_results"
_SAME = ("parity/test_compare.py::test_a_faithful_port_is_the_same[1dev-8-"
         "per_device]",)
_KEYS = "parity/test_keys.py::test_outputs_are_compared_by_key"
_FOLLOWS = ("parity/test_own_step.py::test_what_follows_an_update_in_a_step_"
            "is_explained_by_its_formula")
_HIDES = ("parity/test_own_step.py::test_a_formula_of_an_update_hides_no_"
          "fault_of_a_step")

MUTANTS = [
    Mutant("statistics-are-not-compared", "running statistics may differ",
           edit(_RESULTS, '("statistic", True)', '("statistic", None)'),
           ("parity/test_compare.py::test_native_batch_norm_is_seen_in_the_"
            "statistics",)),
    Mutant("options-are-not-compared", "what the data does not reach is "
           "equal", edit("mgpu.parity.coverage:_differences", "if x != z",
                         "if False"),
           ("parity/test_compare.py::test_options_that_no_data_reaches_are_"
            "named[*",)),
    Mutant("draws-of-a-pass", "what draws to no effect is not refused",
           edit("mgpu.parity.live:refuse_draws", "not drew and",
                "True and"),
           ("parity/test_compare.py::test_random_numbers_are_seen_where_they_"
            "change_nothing[1-torch]",)),
    Mutant("values-of-a-fixed-gamma", "a gamma that counts on no side gets "
           "values of its own for matching",
           edit("mgpu.parity.matching:_is_fixed", 'entry.kind == "gamma"',
                "False"),
           ("gluon_io/test_from_gluon.py::test_equal_blocks_with_a_fixed_"
            "gamma_match",)),
    Mutant("seeds-of-a-pass", "a pass begins where the last one has set the "
           "stream", edit(
               "mgpu.backends._torch.backend:TorchBackend.draws",
               "torch.rand((), generator=generator, "
               "device=generator.device)", "pass"),
           ("parity/test_compare.py::test_random_numbers_are_seen_where_they_"
            "change_nothing[1-torch, set]",)),
    Mutant("seeds-for-a-while", "where a layer drops out is not looked at",
           edit("mgpu.backends._torch.backend:TorchBackend.draws",
                "for state in met)", "for state in met[:0])"),
           ("gluon_io/test_cli.py::test_a_source_that_uses_a_random_stream"
            "[with*",)),
    Mutant("draws-put-back", "a stream that is put back was not used",
           edit("mgpu.backends._torch.backend:TorchBackend.draws",
                "seen.found or any(", "any("),
           ("parity/test_compare.py::test_random_numbers_are_seen_where_they_"
            "change_nothing[1-torch, put back]",)),
    Mutant("draws-of-float32", "a pass in float32 may draw",
           edit("mgpu.parity.precision:_InFloat32._pass",
                "self.drew |= drew and", "self.drew |= False and"),
           ("parity/test_compare.py::test_random_numbers_are_seen_where_they_"
            "change_nothing[1-torch, float32]",)),
    Mutant("float32-statistics", "running statistics of float32 are not "
           "looked at", edit("mgpu.parity.live:LiveRun.whole_pass",
                             "if name in statistics", "if False"),
           ("parity/test_compare.py::test_running_statistics_of_float32_are_"
            "compared[True]",)),
    Mutant("float32-does-not-run", "a second side need not run in float32",
           edit("mgpu.parity.precision:by_dtype", '[*failed] == ["b"]',
                "False"),
           ("parity/test_compare.py::test_a_side_that_float32_does_not_suit_"
            "is_named[b]",)),
    Mutant("dropout-of-float32", "dropout in float32 is not looked at",
           edit("mgpu.parity.precision:by_dtype",
                "one.masks[0] != one.masks[1]", "False"),
           ("parity/test_compare.py::test_what_depends_on_the_dtype_is_a_"
            "difference[1dev-dropout-a]",)),
    Mutant("draws-of-mxnet", "MXNet's streams are not looked at",
           edit("mgpu.backends._mxnet.backend:MXNetBackend.draws",
                "not np.array_equal(x, z)", "False"),
           ("parity/test_compare.py::test_random_numbers_are_seen_where_they_"
            "change_nothing[1-mxnet, uniform]",)),
    Mutant("draws-of-a-step", "a backward pass may draw",
           edit("mgpu.parity.comparison:_stepped", "refuse_draws(run, drew)",
                "pass"),
           ("parity/test_compare.py::test_random_numbers_are_seen_where_they_"
            "change_nothing[1-torch, backward]",)),
    Mutant("float32-explains-all", "whatever is gone is put down to float32",
           edit("mgpu.parity.float32:Float32._too_far", "if not gone:",
                "if True:"),
           ("parity/test_compare.py::test_float32_explains_no_more_than_it_"
            "rounds[0.01]",)),
    Mutant("dtype-is-not-looked-at", "a branch on the dtype is not seen",
           edit("mgpu.parity.precision:_far", "if size > TIMES * own",
                "if size > 1e9 + own"),
           ("parity/test_compare.py::test_what_depends_on_the_dtype_is_a_"
            "difference[1dev-autocast-b]",)),
    Mutant("strict-is-not", "--strict tolerates what no step reached",
           edit("mgpu.parity.comparison:Comparison._judge",
                "if self.strict and", "if False and"),
           ("parity/test_cli_parity.py::test_strict",)),
    Mutant("functions-unseen", "an activation inside a layer of Gluon's is a "
           "difference where the port calls a function",
           edit("mgpu.backends._torch.layers:Between.__torch_function__",
                "_FUNCTIONS.get(function)", "None"),
           ("parity/test_diagnosis.py::test_functions_between_layers_are_seen"
            "[function]",)),
    Mutant("operators-are-not-seen", "a function of MXNet's between layers "
           "is no layer",
           edit("mgpu.backends._mxnet.layers:Between.watching",
                "self._handles.get(handle)", "None"),
           ("parity/test_diagnosis.py::test_the_options_of_functions_between_"
            "layers_are_known[False-slope]",)),
    Mutant("scores-agree-under-a-mask", "a wrong attention scale is none "
           "beside a mask of -1e18",
           edit("mgpu.parity.location:unmasked", "(np.abs(x) < size / 2)",
                "(size > 0)"),
           ("parity/test_diagnosis.py::test_a_planted_fault_is_named"
            "[attention scale beside a mask]",)),
    Mutant("other-sizes-are-a-place", "a layer whose outputs have other sizes "
           "is the first difference although what follows agrees",
           edit("mgpu.parity.location:differences",
                "(reached or not waiting.sure)", "False"),
           ("parity/test_location.py::test_other_sizes_on_the_way_are_no_place"
            "[in_pieces-sum-head-False-False]",)),
    Mutant("gates-are-partners", "a gate in other words is a difference",
           edit("mgpu.parity.location:_parts", "return _agree(",
                "return False and _agree("),
           ("parity/test_location.py::test_one_gate_in_other_words_is_no_place"
            "[acts0]",)),
    Mutant("small-layers-are-closed", "what a layer of the user's own calls "
           "has no options",
           edit("mgpu.backends._torch.layers:is_open",
                "not module._parameters", "False"),
           ("parity/test_compare.py::test_functions_in_layers_of_ones_own_are_"
            "options_too[True-function-own]",)),
    Mutant("inputs-overwritten", "a layer in place seems to get what it "
           "returns", edit("mgpu.backends._torch.network:_watch",
                           "tree_map(_cloned, inputs)", "inputs"),
           ("parity/test_diagnosis.py::test_inputs_that_a_layer_overwrites_are_"
            "those_that_it_got",)),
    Mutant("float32-is-same", "what MXNet does in float32 is no difference",
           edit("mgpu.parity.comparison:Comparison.lockstep",
                "if result.same and (result.float32", "if False and (result"
                ".float32"),
           ("parity/test_compare.py::test_mxnets_float32_is_a_verdict_of_its_"
            "own[1dev-prelu-False]",)),
    Mutant("float32-everywhere", "a function stays in float32 where it does "
           "not help", edit("mgpu.parity.float32:_Try.is_closer",
                            "return False", "return True",
                            "return new < old", "return True"),
           ("parity/test_compare.py::test_what_gluon_computes_in_float64_"
            "stays",)),
    Mutant("slope-of-double", "LeakyReLU in torch as MXNet never computes it",
           edit("mgpu.backends._torch.float32:_leaky_relu",
                "_single(negative_slope)", "negative_slope"),
           ("parity/test_compare.py::test_mxnets_float32_is_a_verdict_of_its_"
            "own[1dev-leaky_relu-False]",)),
    Mutant("hard-sigmoid-of-another", "a line that was changed in place is "
           "still one", edit("mgpu.backends._torch.float32:_line_of",
                             "version == x._version", "True"),
           ("parity/test_compare.py::test_a_line_that_is_changed_is_none",)),
    Mutant("parts-at-one-place", "functions at one place are partners, "
           "whatever they give", edit("mgpu.parity.location:apart",
                                      "return found[False] - found[True]",
                                      "return set()"),
           ("parity/test_compare.py::test_functions_that_agree_are_no_options_"
            "unless_data_would_tell[False-silu]",)),
    Mutant("fault-is-a-kink", "what the pass that is repeated does not show "
           "is a derivative at a kink",
           edit("mgpu.parity.causes.gradients:kink",
                "d.a.gradients[n] + two[n] - one[n] - off",
                "d.b.gradients[n] - off"),
           ("parity/test_diagnosis.py::test_a_planted_fault_is_named[scaled]",
            )),
    Mutant("kernels-of-double", "MXNet's own Adam has betas of double",
           edit("mgpu.parity.causes.update_search:_Search._as_it_does",
                "(False, True)", "(False,)"),
           ("parity/test_diagnosis.py::test_a_planted_fault_is_named[AdamW in "
            "the step]",)),
    Mutant("any-factor-is-of-squares", "a loss of twice the values is L2",
           edit("mgpu.parity.causes.scale:_squares",
                "return bool(np.allclose", "return True or bool(np.allclose"),
           ("parity/test_diagnosis.py::test_a_planted_fault_is_named[Huber]",
            )),
    Mutant("equal-values-are-exchanged", "ones have another order than ones",
           edit("mgpu.parity.causes.layers:exchanged",
                "if all(np.array_equal", "if False and all(np.array_equal"),
           ("parity/test_diagnosis.py::test_values_that_are_equal_have_no_"
            "other_order",)),
    Mutant("bounds-of-double", "clamp in torch as MXNet never computes it",
           edit("mgpu.backends._torch.float32:_clamp",
                "isinstance(bound, float)", "False"),
           ("parity/test_compare.py::test_mxnets_float32_is_a_verdict_of_its_"
            "own[1dev-clip-False]",)),
    Mutant("states-are-not-made-equal", "the port trains on from its own "
           "state", edit(_LOCKSTEP, "self.load_b(before)", "pass"), _SAME),
    Mutant("nothing-is-rounding", "the chaos of one side is ignored",
           edit("mgpu.parity.comparison:Comparison._against_rounding",
                "g.relative <= CHAOS", "g.relative < 0 * CHAOS"),
           ("parity/test_compare.py::test_rounding_is_told_from_a_difference",)),
    Mutant("everything-is-rounding", "any difference counts as rounding",
           edit("mgpu.parity.comparison:Comparison._against_rounding",
                '"rounding" if g.relative <=',
                '"rounding" if 0 * g.relative <='),
           ("parity/test_compare.py::test_the_first_difference_is_the_layer",)),
    Mutant("constants-move-in-double", "float32 rounds constants by less "
           "than its units",
           edit("mgpu.parity.causes.float32:_constants",
                '* _STEPS["float32"]', '* 1e-3 * _STEPS["float32"]'),
           ("parity/test_constants.py::test_forms_of_a_constant_in_float32_are_"
            "a_cause[1dev-mxnet]",)),
    Mutant("next-to-zero-is-explained", "what predicts 0 explains numbers "
           "that are small next to the other side's",
           edit("mgpu.parity.causes.difference:unexplained",
                "min(apart, distance(a, b))", "distance(a, b)"),
           ("parity/test_diagnosis.py::test_what_predicts_zero_explains_no_"
            "small_numbers",)),
    Mutant("towers-exchange-quietly", "layers of each other's names are "
           "paired without a word",
           edit("mgpu.parity.plan:Plan.crossed",
                "if n != m and returns(n)", "if n != m and not returns(n)"),
           ("parity/test_compare.py::test_layers_with_each_others_names_are_"
            "noted[torch]",)),
    Mutant("halves-exchange-quietly", "halves of a layer are exchanged "
           "without a word",
           edit("mgpu.parity.plan:Plan.turned", "entries != sorted(entries)",
                "False"),
           ("parity/test_compare.py::test_layers_in_each_others_place_are_"
            "noted_whatever_their_names[torch-fused]",)),
    Mutant("kernels-are-not-turned", "a kernel of another number of axes is "
           "not found", edit("mgpu.parity.maps:alternatives",
                             "yield from _turned(one, other)", "pass"),
           ("parity/test_matching.py::test_a_kernel_of_another_number_of_axes_"
            "is_found[False]",)),
    Mutant("whole-numbers-round", "the last bits of an index change it",
           edit("mgpu.parity.comparison:Comparison._nudged",
                "if not whole:", "if False:"),
           ("parity/test_compare.py::test_no_rounding_moves_a_whole_number"
            "[mxnet-1dev-float64]",)),
    Mutant("a-jump-is-rounding", "what does not grow with a change of the "
           "last bits is an effect of it",
           edit("mgpu.parity.comparison:Comparison._by_rounding",
                "if any(farther.get(key, 0.0) <",
                "if any(0 * farther.get(key, 0.0) > 1 +"),
           ("parity/test_compare.py::test_a_jump_is_no_rounding[threshold]",)),
    Mutant("float32-jumps-are-decisions", "the last bit of what MXNet rounds "
           "to float32 is a difference",
           edit("mgpu.parity.comparison:Comparison._by_rounding",
                '"float32" if self._float32.found else ', ""),
           ("parity/test_compare.py::test_a_last_bit_of_float32_is_rounding"
            "[False]",)),
    Mutant("updates-have-the-kinks-of-gradients", "an update may differ as "
           "far as a kink moves its gradient",
           edit("mgpu.parity.comparison:Comparison._by_rounding",
                'name if stage == "weight" else', '"" if stage else'),
           ("parity/test_compare.py::test_a_jump_is_no_rounding[kink]",)),
    Mutant("updates-do-not-follow-rounding", "an update must be equal where "
           "its gradient is so but for rounding",
           edit("mgpu.parity.comparison:Comparison._by_rounding",
                "2 * g.relative", "0 * g.relative"),
           ("parity/test_compare.py::test_a_jump_is_no_rounding[kink]",)),
    Mutant("large-rounding-proves", "gradients that rounding makes others "
           "are the same",
           edit("mgpu.parity.comparison:_blurred",
                "g.relative > LARGE", "g.relative > 1e9 * LARGE"),
           ("parity/test_compare.py::test_a_jump_is_no_rounding[kink]",)),
    Mutant("gradients-in-forward-order", "the first wrong gradient is that "
           "of the first layer",
           edit("mgpu.parity.comparison:Comparison._result",
                '-layer if g.stage == "gradient" else layer', "layer"),
           ("parity/test_compare.py::test_the_gradient_pass_runs_backwards",)),
    Mutant("elementwise-floor-of-the-layer", "every tensor has the scale of "
           "its layer", edit("mgpu.parity.measure:scales",
                             "size >= FLOOR * largest[layer(name)]",
                             "size > 2 * largest[layer(name)]"),
           ("parity/test_compare.py::test_a_small_tensor_above_the_floor_keeps_its_"
            "own_scale",)),
    Mutant("nan-is-equal", "a NaN on one side passes",
           edit("mgpu.parity.measure:_apart", "np.where(finite, np.abs(",
                "np.where(finite | True, np.abs("),
           ("parity/test_compare.py::test_what_is_not_finite_differs[nan-*",)),
    Mutant("masks-per-device", "each device draws masks of its own",
           edit("mgpu.parity.masks:Masks._draw",
                "begin = sum(self._rows[:index]) * per_row",
                "begin = 0 * per_row"),
           ("parity/test_compare.py::test_a_side_of_other_devices[torch-2dev]",)),
    Mutant("axes-forward-both-ways", "a transposed map is not undone",
           edit("mgpu.parity.forms:Turn.inverse",
                "np.argsort(self.axes)", "self.axes"),
           ("parity/test_compare.py::test_match_by_a_map_with_axes",)),
    Mutant("guesses-unconfirmed", "what shapes allow is taken, whatever the "
           "outputs", edit("mgpu.parity.matching:_by_form",
                           "if sure:", "if True:"),
           ("parity/test_matching.py::test_a_form_that_no_pass_confirms_is_"
            "not_taken[*",)),
    Mutant("misfits-last", "a message begins with what an entry can help",
           edit("mgpu.parity.matching:_misfits", "alone + pairs",
                "pairs + alone"),
           ("parity/test_matching.py::test_a_message_names_the_misfits_first[*"
            ,)),
    Mutant("squares-turn", "a transposed weight of a dense layer is taken for "
           "its layout", edit("mgpu.parity.search:_says",
                              "if known[0] == known[1]", "if False"),
           ("parity/test_matching.py::test_layers_of_one_kind_keep_their_"
            "weights_alike",)),
    Mutant("memory-stays", "the memory of joined tensors is that of the "
           "first", edit("mgpu.parity.run:translate",
                         "_slot(state, n, slot, pair) for n in pair.a",
                         "_slot(state, pair.a[0], slot, pair) for n in "
                         "pair.a"),
           ("parity/test_matching.py::test_a_given_map[1dev-joined-sgd]",)),
    Mutant("parts-are-partners", "a layer is compared with one that has more "
           "parameters", edit("mgpu.parity.location:together",
                              "elif pair.whole:", "elif True:"),
           ("parity/test_matching.py::test_a_fault_has_its_place[*",)),
    Mutant("constants-are-copied", "a port that computes a constant wrongly "
           "is the same", edit("mgpu.parity.comparison:Comparison._constants",
                               "return found.wrong\n", "return []\n"),
           ("parity/test_constants.py::test_a_wrong_constant_differs[constant-"
            "buffer-pe-options0]",)),
    Mutant("constants-by-name", "constants of other names are none of "
           "each other's, and float32's rounding of one a difference",
           edit("mgpu.parity.matching:match",
                "probe is not None and probe.values_b:", "False:"),
           ("parity/test_constants.py::test_constants_in_float32_are_equal_"
            "up_to_its_rounding[shape0]",)),
    Mutant("memory-is-constant", "the memory of a layer is taken for a "
           "constant", edit("mgpu.parity.constants:Constants.moved",
                            "g.name not in values or", "True or"),
           ("parity/test_constants.py::test_the_memory_of_a_layer_is_no_"
            "constant",)),
    Mutant("parts-of-attention", "a layer is compared with a part of it",
           edit("mgpu.parity.location:together", "if count > 1", "if False"),
           ("parity/test_location.py::test_an_attention_is_compared_with_all_"
            "its_parts[1dev-heads-*",)),
    Mutant("steps-are-places", "a step of a series is compared with all",
           edit("mgpu.parity.location:_met",
                "counts[0][one.path] == counts[1][two.path]", "True"),
           ("parity/test_location.py::test_a_layer_that_is_called_for_each_"
            "step_is_no_place",)),
    Mutant("states-twice", "what a cell returns twice is compared with its "
           "states", edit("mgpu.parity.location:outputs_of",
                          "len(one.outputs) == len(two.outputs):", "True:"),
           ("parity/test_location.py::test_a_state_that_is_lost_is_what_the_"
            "next_call_gets[False]",)),
    Mutant("kinds-by-name", "names that tell no kind match in no way",
           edit("mgpu.parity.matching:_by_order", "forms[0] == forms[1]",
                "False"),
           ("parity/test_matching.py::test_names_that_tell_no_kind_match_by_"
            "order_and_shape[1dev-False-*",)),
    Mutant("parts-without-gradients", "what one side does not train is left "
           "out", edit("mgpu.parity.comparison:Comparison._tensors",
                       "self.plan.names().keys()",
                       "{p.a[0] for p in self.plan.pairs if p.whole}"),
           ("parity/test_matching.py::test_a_frozen_part_is_a_difference[*",)),
    Mutant("first-plan-wins", "a match that no forward pass confirms is "
           "taken before one that it does",
           edit("mgpu.parity.matching:match",
                "plan.confirmed is not False", "True"),
           ("parity/test_compare.py::test_match_by_position_in_the_graph",)),
    Mutant("alike-parameters", "two parameters of one layer and one shape "
           "get one partner",
           edit("mgpu.parity.matching:_by_position", ".pop(0)", "[0]"),
           ("parity/test_compare.py::test_a_layer_with_two_parameters_of_one_"
            "shape_matches_by_position",)),
    Mutant("states-are-outputs", "a recurrent layer that returns its states "
           "on one side only differs",
           edit("mgpu.parity.location:_agree", "bool(x) == bool(z)",
                "len(x) == len(z)"),
           ("parity/test_diagnosis.py::test_a_layer_that_returns_its_states_"
            "on_one_side_only",)),
    Mutant("sum-is-mean-of-means", "equal shards whose means add up to the "
           "sum explain everything",
           edit("mgpu.parity.causes.scale:mean_of_means",
                "abs(f - 1) > 1e-6", "True"),
           ("parity/test_diagnosis.py::test_clipped_gradients[2-6]",)),
    Mutant("users-weights-trained", "the compared networks keep what the "
           "comparison made of them",
           edit("mgpu.parity.live:LiveRun.restore",
                "if values is None:", "if True:"),
           ("parity/test_compare.py::test_the_networks_are_given_back[torch]",)),
    Mutant("gluonize-keeps-the-unbiased", "gluonized layers keep torch's "
           "variance",
           edit("mgpu.backends._torch.gluonize:_GluonArithmetic.forward",
                "not self.training or", "True or"),
           ("parity/test_gluonize.py::test_plain_training_keeps_gluons_statistics"
            "[2]",)),
    Mutant("formulas-drop-options", "an option that the other framework does "
           "not have is a formula",
           edit("mgpu.parity.formulas:Formulas._ways",
                "or lost_options(rules[1], ways[0].kind)", "",
                "or lost_options(rules[0], ways[1].kind)", ""),
           ("parity/test_own_step.py::test_a_formula_hides_no_other_option_"
            "and_no_memory[dampening-]",)),
    Mutant("memory-may-be-thrown-away", "what one side has no memory of is "
           "not compared",
           edit("mgpu.parity.comparison:Comparison.compare_results",
                "n in mine else np.zeros_like(yours[n])",
                "n in mine else yours[n]"),
           ("parity/test_own_step.py::test_a_formula_hides_no_other_option_"
            "and_no_memory[memory thrown away-]",)),
    Mutant("any-count-is-unbiased", "a variance of any number of values is "
           "that of the batch",
           edit("mgpu.parity.formulas:_unbiased", "step.own.counts.get(name, "
                "0)", "16"),
           ("parity/test_own_step.py::test_an_unbiased_variance_is_that_of_"
            "the_batch*",)),
    Mutant("layouts-are-differences", "a layer that is called on (rows x "
           "time, channels) differs",
           edit("mgpu.parity.location:_met",
                "two if summarised else in_layout(one, two, tolerance)",
                "two"),
           ("parity/test_location.py::test_layouts_hide_no_place[flat-rows]",
            )),
    Mutant("any-order-is-a-flatten", "columns in any other order are those "
           "of channels last",
           edit("mgpu.parity.causes.structure:channels_last",
                "default=math.inf) if", "default=math.inf) * 0 if"),
           ("parity/test_diagnosis.py::test_a_planted_fault_is_named[heads]",
            )),
    Mutant("constants-have-gates", "a constant in another order has permuted "
           "gates",
           edit("mgpu.parity.causes.recurrent:permuted_values",
                "not all(map(d.trained.get, wrong))", "False"),
           ("parity/test_constants.py::test_a_constant_in_another_order_is_no_"
            "gate",)),
    Mutant("statistics-stay-unseen", "statistics of a that do not move have "
           "no cause",
           edit("mgpu.parity.causes.statistics:updates", "(d.a, d.b)",
                "(d.b,)"),
           ("parity/test_diagnosis.py::test_a_planted_fault_is_named[frozen "
            "features]",)),
    Mutant("zeros-are-dropped", "zeros at other places are dropped ones "
           "where nothing drops",
           edit("mgpu.parity.causes.forward:_masked", "if not (",
                "if not (True or "),
           ("parity/test_diagnosis.py::test_zeros_of_padding_are_no_dropped_"
            "elements[first-last-0.0]",)),
    Mutant("zeros-of-one-side-are-dropped", "zeros of one side alone are "
           "dropped ones",
           edit("mgpu.parity.causes.forward:_mask_factor",
                "if abs(factor - 1) < _EQUAL and not", "if False and not"),
           ("parity/test_diagnosis.py::test_zeros_of_padding_are_no_dropped_"
            "elements[constant-replicate-0.5]",)),
    Mutant("a-mask-hides-all", "what is small next to a mask is explained",
           edit("mgpu.parity.causes.forward:_activations", "_elsewhere(",
                "True or _elsewhere(", "> 10 *", "> -1 *"),
           ("parity/test_diagnosis.py::test_next_to_a_mask_not_everything_is_"
            "an_activation",)),
    Mutant("a-mask-and-anything", "scores that differ elsewhere too are "
           "masked",
           edit("mgpu.parity.causes.forward:attention_mask",
                "<= d.tolerance * size", "<= most"),
           ("parity/test_diagnosis.py::test_next_to_a_mask_not_everything_is_"
            "an_activation",)),
    Mutant("gradients-that-nobody-applies", "gradients of weights that no "
           "optimiser has are compared",
           edit("mgpu.parity.comparison:Comparison._own_gaps",
                "if n in held", "if held or True"),
           ("parity/test_own_step.py::test_gradients_of_weights_that_no_"
            "optimiser_has_do_not_count[frozen-]",)),
    Mutant("the-norm-is-of-all", "a limit is always one of all gradients",
           edit("mgpu.parity.run:norms_left", "if n in step.gradients",
                "if True"),
           ("parity/test_own_step.py::test_gradients_of_weights_that_no_"
            "optimiser_has_do_not_count[clips the head-]",)),
    Mutant("any-norm-is-one", "clipping by the norm of some gradients and "
           "of all to one limit is a formula",
           edit("mgpu.parity.formulas:Formulas._clip_alike",
                "np.isclose(norm, other, rtol=1e-6, atol=0)", "True"),
           ("parity/test_own_step.py::test_gradients_of_weights_that_no_"
            "optimiser_has_do_not_count[both clip-]",)),
    Mutant("what-is-not-updated-is-clipped", "a weight that one side does "
           "not update hides behind a formula of clipping",
           edit("mgpu.parity.formulas:Formulas._clip_alike",
                "if n not in other.gradients", "if False"),
           ("parity/test_own_step.py::test_gradients_of_weights_that_no_"
            "optimiser_has_do_not_count[trains the bias-]",)),
    Mutant("formulas-explain-any-average", "an average with another decay "
           "is explained with its weights",
           edit("mgpu.parity.formulas:Formulas._follow",
                "<= self._work.tolerance", "<= 1"),
           ("parity/test_own_step.py::test_an_average_of_what_a_formula_explains_"
            "is_explained_with_it[float32-*",)),
    Mutant("formulas-leave-averages", "an average of weights that a formula "
           "explains is a difference",
           edit("mgpu.parity.formulas:Formulas._follow",
                "not in own", "in own"),
           ("parity/test_own_step.py::test_an_average_of_what_a_formula_explains_"
            "is_explained_with_it[float32-*",)),
    Mutant("averages-by-one-kind-of-names", "an average by the names of "
           "collect_params() is no average",
           edit("mgpu.backends._mxnet.own_step:MXNetParts.__init__",
                "{p.name: name for", "{name: name for"),
           ("parity/test_own_step.py::test_an_average_of_what_a_formula_explains_"
            "is_explained_with_it[none-collect_params]",)),
    Mutant("averages-may-be-missing", "a port without the average of the "
           "weights is the same",
           edit("mgpu.parity.comparison:Comparison.compare_results",
                "(self._averages or not", "(not"),
           ("parity/test_own_step.py::test_an_average_that_one_side_does_not_"
            "keep_is_a_difference",)),
    Mutant("layers-get-their-own-inputs", "what differs behind the first "
           "difference is not seen",
           edit("mgpu.backends._torch.network:_watch",
                "in_place_of(outputs, put)", "None"),
           ("parity/test_diagnosis.py::test_faults_behind_the_first_are_found"
            "[1dev-gluon-]",)),
    Mutant("float32-is-a-further-fault", "MXNet's float32 behind a fault is "
           "another fault", edit("mgpu.parity.further:further",
                                 "_place(e) in also", "True"),
           ("parity/test_diagnosis.py::test_the_float32_of_mxnet_is_no_"
            "further_fault[*",)),
    Mutant("masks-that-moved-are-a-fault", "a dropout layer too many makes "
           "faults of all behind it",
           edit("mgpu.parity.further:_places", "and not shifted", ""),
           ("parity/test_diagnosis.py::test_one_fault_is_one",)),
    Mutant("what-a-function-gives-twice", "a function before two layers is "
           "two faults",
           edit("mgpu.parity.further:_places", "between |= not "
                "place.inputs_agree", "pass"),
           ("parity/test_diagnosis.py::test_one_fault_is_one",)),
    Mutant("averages-of-one-side-are-left-out", "running statistics that one "
           "side alone averages are the same",
           edit("mgpu.parity.averages:Averages.left_out",
                "elif (name", "elif True or (name"),
           ("parity/test_own_step.py::test_running_statistics_that_one_average_"
            "alone_holds_follow_the_network[averaged-]",)),
    Mutant("averages-left-at-the-start", "a copy of the network whose running "
           "statistics nobody moves is proved",
           edit("mgpu.parity.averages:Averages.left_out",
                "self._still.setdefault(side, name)", "pass"),
           ("parity/test_own_step.py::test_running_statistics_that_one_average_"
            "alone_holds_follow_the_network[left-]",)),
    Mutant("outputs-in-order", "outputs with keys are compared in the order "
           "in which they are returned",
           edit("mgpu.parity.keys:in_order_of", "if list(own)",
                "if True or list(own)"),
           (_KEYS + "[torch-1dev-another order]",
            _KEYS + "[torch-1dev-each other's in another order]")),
    Mutant("keys-of-another-mode", "a prediction is ordered by the keys of "
           "the training pass",
           edit("mgpu.parity.live:LiveRun.predict",
                '"prediction")', '"output")'),
           ("parity/test_keys.py::test_keys_of_a_pass_are_those_of_its_mode",)),
    Mutant("no-note-on-keys", "nobody says that outputs with other keys are "
           "compared in order",
           edit("mgpu.parity.comparison:Comparison._note_keys",
                "self.notes +=", "_ ="),
           (_KEYS + "[torch-1dev-other keys]",)),
    Mutant("traces-without-keys", "outputs in a trace have no keys",
           edit("mgpu.parity.recorded:describe", "run.keys", "{}"),
           (_KEYS + "[torch-2dev-another order]",)),
    Mutant("rates-switch-clipping-off", "a wrong rate is called clipping",
           edit("mgpu.parity.formulas:Formulas.explain",
                '"gradient" not in wrong', 'not wrong & {"gradient", "rate"}'),
           ("parity/test_own_step.py::test_a_wrong_rate_is_no_fault_of_clipping"
            "[]",)),
    Mutant("trainers-of-two-rates-are-two-rules", "two trainers with other "
           "rates remember things that are not compared",
           edit("mgpu.backends._mxnet.own_step:MXNetParts._read",
                'if k not in ("learning_rate", "wd")', ""),
           (_FOLLOWS + "[sgd--]",)),
    Mutant("formulas-of-updates-only", "what follows an update in a step is a "
           "difference where the update is another formula",
           edit("mgpu.parity.formulas:Formulas.explain",
                "step.own.passes > 1", "step.own.passes > 2"),
           (_FOLLOWS + "[adam--parts]",)),
    Mutant("a-step-need-not-come-out", "a formula explains whatever follows "
           "an update, however it comes out",
           edit("mgpu.parity.formulas:Formulas._by_replay",
                "((two, same), (one, other))", "((two, same), (one, one))"),
           (_HIDES + "*",)),
    Mutant("the-formula-of-b-again", "a step is taken again with its own "
           "formula, which explains nothing",
           edit("mgpu.parity.formulas:Formulas._replayed",
                "b.instead = instead", "b.instead = None"),
           (_FOLLOWS + "[adam--]",)),
    Mutant("states-are-not-asked-for", "a network that needs a state is "
           "refused in words of other things",
           edit("mgpu.parity.own:OwnRun.predict", "if \"missing\" not in",
                "if \"\" in"),
           ("parity/test_own_step.py::test_a_network_that_needs_more_than_a_"
            "batch_is_refused_with_the_cure",)),
]
