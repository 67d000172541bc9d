"""Gluon's files, read or written as something else."""
from mutants.planting import Mutant, edit

_READER = "mgpu.gluon_io.params:_Reader."
_STATES = "mgpu.gluon_io.states:"
_PARAMS = "gluon_io/test_params.py::"
_CLI = "gluon_io/test_cli.py::"
_FILES = "mgpu.backends._torch.gluon.files:"
_TRAINER = "gluon_io/test_states.py::"
_RESUMED = "gluon_io/test_resuming.py::"
_FUNCTIONS = "mgpu.backends._torch.gluon.functions:"
_OPERATORS = "gluon_io/test_operators.py::"
_LAYERS = "mgpu.backends._torch.gluon.layers:"
_OPERATOR = "gluon_io/test_operators.py::test_an_operator_computes_as_mxnets"

_EDITED = _CLI + "test_a_check_of_an_edited_source"
_WRONG = _CLI + "test_a_check_sees_what_is_wrong"
_WHOLE = "mgpu.gluon_io.whole:"
_BUILD = "mgpu.backends._torch.gluon.build:"
_BUILT = "gluon_io/test_from_gluon.py::"
_SOURCE = "mgpu.backends._torch.gluon.source."
_SOURCES = "gluon_io/test_source.py::"

MUTANTS = [
    Mutant("resumed-part", "fewer states than parameters of a shape are those "
           "of the first", edit(
               "mgpu.gluon_io.order:Order._by_shapes",
               "not alike or len(names) != len(keys)", "not alike"),
           (_RESUMED + "test_a_trainer_of_a_part[sgd-1-4]",)),
    Mutant("resumed-alike", "states of one shape are in the sorted order",
           edit("mgpu.gluon_io.order:Order._by_shapes", "if not alike or",
                "if"),
           (_RESUMED + "test_an_order_that_shapes_do_not_decide[reversed-few]",
            )),
    Mutant("resumed-in-turn", "nadam's parameters have the network's order",
           edit("mgpu.gluon_io.order:Order._named", "self.updates = ",
                "updates = "),
           (_RESUMED + "test_states_that_are_all_the_same_need_no_order",)),
    Mutant("resumed-fixed", "nadam does not move at a gamma that is 1", edit(
        "mgpu.resuming:_freeze", "if nadam and request != ",
        "if False and request != "),
           (_RESUMED + "test_nadam_moves_at_a_gamma_that_is_1"
            "[scaled in symbols-torch]",)),
    Mutant("resumed-fixed-once", "nadam moves at a gamma that is 1 in the "
           "first step alone", edit(
               "mgpu.optimizers.gluon_rules:Nadam.begin_step", "if t < 0:",
               "if False:"),
           (_RESUMED + "test_nadam_moves_at_a_gamma_that_is_1"
            "[scaled in symbols-torch]",)),
    Mutant("resumed-constant", "a constant that was trained is frozen", edit(
        "mgpu.resuming:_freeze",
        'in saved.slots and p.grad_req == "null"', "in ()"),
           (_RESUMED + "test_a_constant_that_a_block_of_symbols_trains",)),
    Mutant("resumed-unsaid", "what is frozen before a first step is guessed",
           edit("mgpu.resuming:_check_said", "if unsaid:", "if False:"),
           (_RESUMED + "test_what_is_trained_before_the_first_step_is_asked_"
            "for[scaled]",)),
    Mutant("resumed-devices", "a Module's states are of one device", edit(
        "mgpu.gluon_io.order:Order.of_module",
        "fitting = list(self._on_devices())",
        "fitting = list(self._on_devices())[:1]"),
           (_RESUMED + "test_a_module_with_fixed_parameters[fc2]",)),
    Mutant("resumed-loss", "options of the loss in the graph are dropped",
           edit("mgpu.resuming:_check_losses", "node.op not in _LOSSES",
                "True"),
           (_RESUMED + "test_options_of_the_loss_in_the_graph[grad_scale]",
            )),
    Mutant("resumed-object", "a Module's object is taken for a name", edit(
        "mgpu.resuming:_multipliers", "if others and not", "if False and not"),
           (_RESUMED + "test_multipliers_of_a_module[True]",)),
    Mutant("resumed-object-scale", "a Module's object divides by the batch",
           edit("mgpu.resuming:_multipliers", "saved.module.scale is None and",
                "False and"),
           (_RESUMED + "test_multipliers_of_a_module[True]",)),
    Mutant("resumed-apart", "devices that differ are those of one training",
           edit("mgpu.gluon_io.order:Order._on_devices", "if all(_same(",
                "if True or all(_same("),
           (_RESUMED + "test_a_module_whose_devices_differ_is_refused",)),
    Mutant("resumed-rounding", "the note is of the rate of one update", edit(
        "mgpu.resuming:_remarks",
        'corrected rate of an update"] = _ROUNDED',
        'corrected rate of an update"] = 3.3e-9'),
           (_RESUMED + "test_what_float32_does_not_hold_is_reported"
            "[adam-8-options5-the corrected rate of an update]",)),
    Mutant("resumed-own-rate", "a schedule begins at its own rate, not at "
           "Adam's", edit("mgpu.resuming:_given", "name not in _OWN_RATE",
                          "True"),
           (_RESUMED + "test_options_of_a_module_as_they_were[adam-options2]",
            )),
    Mutant("resumed-frozen-for-a-time", "fewer updates are no matter", edit(
        "mgpu.resuming:_freeze", "if behind:", "if False:"),
           (_RESUMED + "test_what_was_frozen_for_a_time[null]",)),
    Mutant("resumed-rate-of-the-last", "a first layer with fewer updates gets "
           "the rate of the others", edit(
               "mgpu.resuming:_check_rates", "if counts and", "if False and"),
           (_RESUMED + "test_a_schedule_at_what_was_frozen[adam]",)),
    Mutant("resumed-factor", "a factor of gradients is not seen", edit(
        "mgpu.resuming:_divisor", "if rows < 1 or abs", "if rows < 0 and abs"),
           (_RESUMED + "test_a_factor_of_gradients[0.75-None]",)),
    Mutant("whole-scalars", "half is added to whole numbers", edit(
        _WHOLE + "_makes_fractions", 'for key in ("scalar",',
        'for key in ("skalar",'),
           (_BUILT + "test_whole_numbers[sym x + 0.5]",)),
    Mutant("whole-divisions", "whole numbers are divided as fractions", edit(
        _WHOLE + "_makes_fractions", "if name in _DIVISIONS",
        "if False and name in _DIVISIONS"),
           (_BUILT + "test_whole_numbers[sym x / 2]",)),
    Mutant("whole-numpy", "a mask times a number has not MXNet's dtype", edit(
        _WHOLE + "_converts", 'return "float64"', 'return ""'),
           (_BUILT + "test_whole_numbers[np (x > 1) * 2.0]",)),
    Mutant("whole-sums", "a sum of bytes does not wrap", edit(
        _WHOLE + "cuts", "KEPT if name in _SUMS else", ""),
           (_BUILT + "test_whole_numbers[sym F.sum(F.cast(x, 'uint8'), "
            "axis=1)]",)),
    Mutant("whole-gradients", "a cast to whole numbers ends a gradient", edit(
        "mgpu.backends._torch.gluon.functions:still", "if x.requires_grad",
        "if False and x.requires_grad"),
           (_BUILT + "test_a_gradient_through_whole_numbers_is_refused"
            "[F.cast(F.cast(x * 4, 'int32'), 'float32')]",)),
    Mutant("negative-base", "-2 ** x stands for (-2) ** x", edit(
        _BUILD + "_Builder._call", "if function is operator.pow", "if False"),
           (_OPERATOR + "[_rpower_scalar]",
            _OPERATOR + "[_npi_rpower_scalar]")),
    Mutant("constants-trained", "what get_constant made is trained", edit(
        "mgpu.gluon_io.graph:constants", '"Constant_"', '"constant_"'),
           (_BUILT + "test_a_constant_is_not_trained",)),
    Mutant("loss-inside", "what follows a loss has its gradient", edit(
        "mgpu.gluon_io.parts:_parts", "if graph.nodes[j].op in LOSSES",
        "if False"),
           (_BUILT + "test_nothing_follows_a_loss[F.make_loss(x * x) * 5"
            "-True]",)),
    Mutant("back-changed", "a network with another head is written for MXNet",
           edit(_BUILD + "to_gluon_params", "if changed:", "if False:"),
           (_BUILT + "test_a_network_that_was_changed_does_not_go_back"
            "[another head]",)),
    Mutant("inputs-as-used", "inputs are in the order of the graph", edit(
        "mgpu.gluon_io.graph:entries", "if all(numbers):", "if False:"),
           (_BUILT + "test_inputs_are_in_the_order_of_the_block",)),
    Mutant("inputs-as-texts", "data11 stands before data2", edit(
        "mgpu.gluon_io.graph:entries",
        'found.sort(key=lambda name: int(name.removeprefix("data")))',
        "found.sort(reverse=True)"),
           (_BUILT + "test_inputs_are_in_the_order_of_the_block",)),
    Mutant("layers-in-two", "a layer that is called twice is two", edit(
        _BUILD + "_Builder._layer", "if key not in self._layers or",
        "if True or"),
           (_BUILT + "test_a_layer_that_is_called_twice_is_one_module",)),
    Mutant("names-in-one", "an array takes the name of another", edit(
        _BUILD + "_Builder._own_name", "name in self._taken or hasattr("
        "self._root, name)", "name == 'self'"),
           (_BUILT + "test_names_that_are_no_names_of_python[names0]",)),
    Mutant("where-by-row", "a condition for each row is turned round", edit(
        "mgpu.backends._torch.gluon.functions:by_row",
        "condition.reshape(-1,", "condition.flip(0).reshape(-1,"),
           (_OPERATOR + "[where]",)),
    Mutant("mask-fractions", "a length that is no whole number keeps a step "
           "more", edit("mgpu.backends._torch.gluon.functions:sequence_mask",
                        ".long()[:, None]", "[:, None]"),
           (_OPERATOR + "[SequenceMask]",)),
    Mutant("transpose-from-behind", "negative axes are moved", edit(
        "mgpu.backends._torch.gluon.vision:_transpose",
        "axes = tuple(k % len(axes) for k in axes)", "pass"),
           (_OPERATOR + "[_np_transpose]",)),
    Mutant("slice-forwards", "a part that is taken backwards is not turned",
           edit("mgpu.backends._torch.gluon.vision:_slice",
                "if turned else part", "if False else part"),
           (_OPERATOR + "[slice]",)),
    Mutant("mod-sign", "a remainder has the sign of what is divided", edit(
        _FUNCTIONS + "mod", "torch.remainder", "torch.fmod"),
           (_OPERATOR + "[broadcast_mod]",)),
    Mutant("round-halves", "halves are rounded up", edit(
        _FUNCTIONS + "round_half_down", "x - low <= high", "x - low < high"),
           (_OPERATOR + "[rint]",)),
    Mutant("smooth-l1-scale", "the scale of a smooth l1 is not squared", edit(
        "mgpu.backends._torch.gluon.vision:_smooth_l1", "scalar ** 2",
        "scalar"), (_OPERATOR + "[smooth_l1]",)),
    Mutant("softmax-length", "a softmax takes in one value more", edit(
        _FUNCTIONS + "softmax_of_lengths", ") < lengths", ") <= lengths"),
           (_OPERATOR + "[softmax]",)),
    Mutant("group-norm-order", "groups have the scale of other ones", edit(
        _LAYERS + "GluonGroupNorm.forward",
        "self.weight.repeat_interleave(count)", "self.weight.repeat(count)"),
           (_OPERATOR + "[GroupNorm]",)),
    Mutant("global-statistics", "fixed statistics are those of the batch",
           edit("mgpu.backends._torch.gluonize:GluonBatchNormOf.forward",
                "if self.moves", "if True"), (_OPERATOR + "[BatchNorm]",)),
    Mutant("dropout-axes", "values along an axis have masks of their own",
           edit(_LAYERS + "GluonDropout.forward", "1 if i in self.axes", "1 "
                "if False"), (_BUILT + "test_dropout[axes1-training-True]",)),
    Mutant("linspace-end", "a range that stops before its end reaches it",
           edit("mgpu.backends._torch.gluon.arrays:_range",
                'if not a["endpoint"]', "if False"),
           (_OPERATOR + "[broadcast_add]",)),
    Mutant("begin-state-of-a-part", "a begin state has the rows of what is "
           "cut", edit("mgpu.gluon_io.created:_tied", 'for k in _AXES if k '
                       '!= a["axis"])', "for k in _AXES)"),
           (_BUILT + "test_a_size_that_nothing_says_is_refused*",)),
    Mutant("fixed-statistics-joined", "statistics that stay need others of "
           "other devices", edit(
               "mgpu.backends._torch.replica:TorchReplica.__init__",
               'and not has_fixed_statistics(m)', ""),
           (_BUILT + "test_it_trains_on_devices[2dev-norms]",)),
    Mutant("source-index", "a step of an index is left out", edit(
        _SOURCE + "writing:_indexed", "if x.step in (None, 1)", "if True"),
           (_SOURCES + "test_source_of_expressions[names0-an index with a "
            "step]",)),
    Mutant("source-inputs", "inputs are in the order of their use", edit(
        _SOURCE + "structure:_steps", "order = entries(graph, shapes)",
        "order = [node.name for node in graph.nodes]"),
           (_SOURCES + "test_source_of_expressions[names0-the second input "
            "first]",)),
    Mutant("source-states", "the states of an LSTM change places", edit(
        _SOURCE + "writing:_unpacked",
        "parts = [written(y) for y in inner]",
        "parts = [written(y) for y in inner[::-1]]"),
           (_SOURCES + "test_source_computes_as_from_gluon[own-lstm with "
            "states]",)),
    Mutant("check-rows", "indices of a check hit two rows of a table", edit(
        "mgpu.cli.checking:draw", "(rows or {}).get(k, 2)", "2"),
           (_WRONG + "[change_row]",)),
    Mutant("check-dropout", "a check does not look at rates of dropout", edit(
        "mgpu.cli.checking:Place.like",
        "round(self.rate - other.rate, 6)", "False"),
           (_WRONG + "[change_dropout]",
            _EDITED + "[another rate of an LSTM]")),
    Mutant("check-unused", "a check does not look at what comes out of "
           "dropout", edit("mgpu.cli.checking:with_mxnet",
                           "places and wrong is None", "False"),
           (_EDITED + "[a result that is not used]",)),
    Mutant("check-axes", "a check does not look at axes of dropout", edit(
        "mgpu.cli.checking:Place._sums", "self.axes", "()"),
           (_EDITED + "[whole rows]", _EDITED + "[other axes]")),
    Mutant("dropout-of-one-example", "torch's dropout of channels has a mask "
           "for each value of a matrix", edit(
               "mgpu.backends._torch.arithmetic:_leading",
               "_ROWS.get(type(layer), 0)", "0"),
           (_EDITED + "[whole rows]",)),
    Mutant("check-places", "a check does not look at places of dropout", edit(
        "mgpu.cli.checking:_paired", "if graphs[k].like(",
        "if graphs[k].rate == place.rate or graphs[k].like("),
           (_EDITED + "[rates exchanged]",)),
    Mutant("check-arithmetic", "a source computes with mgpu's batch norm",
           edit("mgpu.cli.checking:with_mxnet", "native=True",
                "native=False"),
           (_EDITED + "[a batch norm of torch's]",)),
    Mutant("check-small-inputs", "no inputs of a check are larger", edit(
        "mgpu.cli.checking:_batches", "type(LARGER)", "type(1)"),
           (_EDITED + "[a clipped relu]",)),
    Mutant("check-pt2", "the values of a .pt2 are not read back", edit(
        "mgpu.cli.gluon:_read_pt2", "own[name].copy_(x.data)", "pass"),
           (_CLI + "test_a_pt2_is_read_back[values]",)),
    Mutant("check-predictions", "the predictions of a .pt2 are not compared",
           edit("mgpu.cli.gluon:_judge_pt2", "far > 1e-5", "False"),
           (_CLI + "test_a_pt2_is_read_back[function]",)),
    Mutant("trace-values", "a trace lends its values", edit(
        "mgpu.cli.checking:with_trace", 'weights="own"', 'weights="a"'),
           (_CLI + "test_a_check_against_a_trace",)),
    Mutant("check-values", "a check begins with MXNet's values, not with "
           "those that were written", edit(
               "mgpu.cli.checking:with_mxnet", 'weights="own"',
               'weights="a"'),
           (_WRONG + "[change_weight]",
            _WRONG + "[change_statistics]")),
    Mutant("zip-size", "a part of a zip is believed to be as large as it says",
           edit("mgpu.files:npy_members",
                "sum(m.compress_size for m in members)", "0"),
           (_PARAMS + "test_a_zip_that_is_refused",)),
    Mutant("params-order-of-bytes", "numbers of big-endian arrays are written "
           "as they lie", edit(
               "mgpu.gluon_io.params:_write",
               'values, values.dtype.newbyteorder("<"))', "values)"),
           (_PARAMS + "test_arrays_in_other_orders",)),
    Mutant("params-order-of-elements", "a transposed array is written as its "
           "memory lies", edit(
               "mgpu.gluon_io.params:_write", ".reshape(-1)",
               '.reshape(-1, order="F")'),
           (_PARAMS + "test_a_round_trip[float32-(2, 3)]",
            _PARAMS + "test_arrays_in_other_orders")),
    Mutant("params-dtype", "signed and unsigned bytes are confused", edit(
        _READER + "_dtype", "return _DTYPES[code]",
        "return _DTYPES[{3: 5, 5: 3}.get(code, code)]"),
           (_PARAMS + "test_files_of_mxnet[nd.save.params]",)),
    Mutant("params-shape", "the sizes of an array are turned round", edit(
        _READER + "_sizes", "return sizes", "return sizes[::-1]"),
           (_PARAMS + "test_files_of_mxnet[by-hand-0.params]",)),
    Mutant("params-names", "a parameter has the values of another", edit(
        "mgpu.gluon_io.params:_load", "dict(zip(names, arrays))",
        "dict(zip(sorted(names), arrays))"),
           (_PARAMS + "test_files_of_mxnet[collect_params.params]",)),
    Mutant("params-names-order", "what is written is in the order of names",
           edit("mgpu.gluon_io.params:save_params",
                "named = isinstance(arrays, Mapping)",
                "named = isinstance(arrays, Mapping)\n"
                "    arrays = dict(sorted(arrays.items())) if named "
                "else arrays"),
           (_PARAMS + "test_what_mxnet_writes[save_parameters]",)),
    Mutant("params-sparse-indices", "columns and beginnings of rows are "
           "confused", edit(
               _READER + "array", "CSR(shape, values, *columns)",
               "CSR(shape, values, *columns[::-1])"),
           (_PARAMS + "test_files_of_mxnet[sparse.params]",)),
    Mutant("params-sparse-rows", "rows are the first ones", edit(
        "mgpu.gluon_io.params:RowSparse.to_dense", "dense[self.indices]",
        "dense[:len(self.indices)]"),
           (_PARAMS + "test_sparse_arrays_are_what_mxnet_makes_of_them",)),
    Mutant("params-not-aligned", "torch gets memory that it does not take",
           edit(_READER + "_values", "or not flat.flags.aligned", ""),
           (_PARAMS + "test_a_large_array_is_mapped",)),
    Mutant("params-modes-mixed", "what MXNet reads in no mode is read", edit(
        _READER + "array", "if self._before not in (None, version)",
        "if False"), (_PARAMS + "test_what_is_refused",)),
    Mutant("states-order", "a parameter has the state of another", edit(
        _STATES + "load_trainer_states",
        "{_key(k): _state(x, known) for k, x in _items(states)}",
        "dict(enumerate(_state(x, known) for _, x in _items(states)))"),
           (_TRAINER + "test_files_of_mxnet[adam.states]",)),
    Mutant("states-order-of-two", "the mean and the variance are confused, or "
           "the state and the copy of a parameter", edit(
               _STATES + "load_trainer_states", "_state(x, known)",
               "_state(x[::-1], {})"),
           (_TRAINER + "test_files_of_mxnet[adam.states]",
            _TRAINER + "test_files_of_mxnet[nag-float16.states]")),
    Mutant("states-shared", "every parameter has the state of the first",
           edit(_STATES + "load_trainer_states", "_state(x, known)",
                "_state([*states.values()][0], known)"),
           (_TRAINER + "test_files_of_mxnet[adam.states]",)),
    Mutant("resumed-order", "states go to parameters in the order of the "
           "graph", edit("mgpu.gluon_io.order:Order.of_trainer",
                         "names = sorted(self._all)", "names = self._all"),
           (_RESUMED + "test_every_optimizer_goes_on[sgd-momentum]",)),
    Mutant("resumed-signum", "the momentum of signum runs uphill", edit(
        "mgpu.resuming:_parted", "tuple(-x for x in found)", "found"),
           (_RESUMED + "test_every_optimizer_goes_on[signum]",)),
    Mutant("resumed-counts", "updates are counted from the start", edit(
        "mgpu.resuming:_states", "saved.counts.get(name, saved.begin)", "0"),
           (_RESUMED + "test_every_optimizer_goes_on[adam]",)),
    Mutant("resumed-product", "nadam's product of momenta begins anew", edit(
        "mgpu.resuming:_states", "np.array(saved.product)", "np.array(1.0)"),
           (_RESUMED + "test_every_optimizer_goes_on[nadam]",)),
    Mutant("resumed-multipliers", "multipliers of the graph are dropped",
           edit("mgpu.resuming:_multipliers", "return found | ", "return "),
           (_RESUMED + "test_every_optimizer_goes_on[sgd]",)),
    Mutant("safetensors-alias", "a shared tensor is called the first of all",
           edit(_FILES + "to_safetensors", "about[name] = kept",
                "about[name] = next(iter(values))"),
           (_CLI + "test_safetensors_have_shared_tensors_once",)),
    Mutant("pt2-trains", "batch norm takes the statistics of the batch where "
           "it predicts", edit(_FILES + "to_pt2", "net.eval()",
                               "net.train()"),
           (_CLI + "test_pt2_predicts_for_any_number_of_rows",)),
    Mutant("inspect-values", "the sizes of an array are added up", edit(
        "mgpu.inspection:_values", "math.prod(", "sum("),
           (_CLI + "test_json_has_every_array",)),
    Mutant("convert-check-own-values", "what was written is compared with the "
           "other side's values", edit(
               "mgpu.cli.gluon:_read_safetensors", "library.torch.load_model",
               "(lambda *_: None)"),
           (_CLI + "test_what_is_written_trains_as_mxnets[safetensors]",)),
    Mutant("rnn-one-state", "the states of an LSTM are confused", edit(
        "mgpu.backends._torch.gluon.recurrent:_rnn",
        "Slot(2 + i)", "Slot(3 - i if lstm else 2)"),
           (_OPERATORS + "test_an_operator_computes_as_mxnets[RNN]",)),
    Mutant("sequence-mask-length", "a step too many counts", edit(
        "mgpu.backends._torch.gluon.functions:sequence_mask",
        "steps < lengths", "steps <= lengths"),
           (_OPERATORS
            + "test_an_operator_computes_as_mxnets[SequenceMask]",)),
    Mutant("one-hot-out-of-range", "an index out of range is the nearest",
           edit("mgpu.backends._torch.gluon.functions:one_hot",
                "index.long()[", "index.long().clamp(0, depth - 1)["),
           (_OPERATORS + "test_an_operator_computes_as_mxnets[one_hot]",)),
    Mutant("var-has-a-gradient", "a variance of np passes a gradient on",
           edit("mgpu.backends._torch.gluon.arrays:_reduce",
                'x = Call("torch.Tensor.detach", (_X,))', "pass"),
           (_OPERATORS + "test_an_operator_computes_as_mxnets[_npi_var]",)),
    Mutant("operator-ties", "of several that are the largest each gets a part "
           "of the gradient", edit(_LAYERS + "amax", "(ties - 1)", "0"),
           (_OPERATOR + "[max]", _OPERATOR + "[min]")),
    Mutant("operator-equal", "of two that are equal the second gets the "
           "gradient", edit(_LAYERS + "maximum", "x >= y", "x > y"),
           (_OPERATOR + "[_maximum]", _OPERATOR + "[broadcast_maximum]")),
    Mutant("operator-bilinear", "weights of interpolation are exact", edit(
        _LAYERS + "GluonBilinear._ends", ".clamp(min=0)).float()",
        ".clamp(min=0))"),
           (_OPERATOR + "[_contrib_BilinearResize2D]",)),
    Mutant("operator-wrap", "an index out of range is cut where it counts on",
           edit(_LAYERS + "take", 'mode == "wrap"', "False"),
           (_OPERATOR + "[take]",)),
]
