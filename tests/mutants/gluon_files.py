"""Gluon's files, read or written as something else."""
from mutants.planting import Mutant, edit

_READER = "mgpu.gluon_io.params:_Reader."
_STATES = "mgpu.gluon_io.states:"
_PARAMS = "gluon_io/test_params.py::"
_CLI = "gluon_io/test_cli.py::"
_FILES = "mgpu.backends._torch.gluon.files:"
_TRAINER = "gluon_io/test_states.py::"
_RESUMED = "gluon_io/test_resuming.py::"
_OPERATORS = "gluon_io/test_operators.py::"
_LAYERS = "mgpu.backends._torch.gluon.layers:"
_OPERATOR = "gluon_io/test_operators.py::test_an_operator_computes_as_mxnets"

_WRONG = _CLI + "test_a_check_sees_what_is_wrong"

MUTANTS = [
    Mutant("check-rows", "indices of a check hit two rows of a table", edit(
        "mgpu.cli.gluon:_draw", "(rows or {}).get(k, 2)", "2"),
           (_WRONG + "[change_row]",)),
    Mutant("check-dropout", "a check does not look at rates of dropout", edit(
        "mgpu.cli.gluon:_checked", "if found != rates:", "if False:"),
           (_WRONG + "[change_dropout]",)),
    Mutant("check-values", "a check begins with MXNet's values, not with "
           "those that were written", edit(
               "mgpu.cli.gluon:_checked", 'weights="own"', 'weights="a"'),
           (_WRONG + "[change_weight]",
            _WRONG + "[change_statistics]")),
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
               "mgpu.cli.gluon:_safetensors", "library.torch.load_model",
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
