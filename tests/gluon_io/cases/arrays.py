"""The operators of MXNet's NumPy interface, and those on indices."""
from gluon_io.cases import recurrent, vision, zoo
from gluon_io.grid import Input, below, grid, positive


def _beyond(n):
    """Whole numbers, also below 0 and from `n` on."""
    return lambda rng, shape: rng.integers(-2, n + 3, shape).astype(float)


def _more(rng, shape):
    """Numbers from 1.1 on."""
    return rng.uniform(1.1, 3, shape)


def _few(rng, shape):
    """Numbers of which some are equal."""
    return rng.integers(-1, 2, shape).astype(float)


def _still(*shape, draw=_few):
    return Input(shape, draw, moves=False)


def _as(name, op):
    """The cases of the same operators of the other family."""
    return [case._replace(op=name)
            for case in (*zoo.CASES, *vision.CASES, *recurrent.CASES)
            # there no batch is unknown
            if case.op == op and ("_zeros", (), ()) not in [
                (x, (), ()) for x, *_ in case.before]]


_PAIRS = [(Input((2, 3)),) * 2, (Input((2, 3, 4)), Input((3, 1))),
          (Input((3,)), Input((2, 3), kept="arg")), (Input(()), Input((2,)))]
_POSITIVE = [(Input((2, 3), positive),) * 2,
             (Input((2, 3, 4), positive), Input((3, 1), positive))]
_EQUAL = [(Input((3, 4), _few),) * 2, (Input((2, 3)), Input((3,)))]
_ANY, _CUBE = [(Input((3, 4)),)], [(Input((2, 3, 4)),)]
_ORDERS = "equal not_equal greater greater_equal less less_equal"
_SPLIT, _TOPK = "_split_v2 _npi_split", "topk _npx_topk"
_AXES = {"axis": [None, "None", 0, 1, -1, "(0, 2)", "(0, 1, 2)"]}


def _reductions(ops, **attributes):
    """Without the axes that are refused to keep."""
    return [*grid(ops, {**_AXES, "keepdims": [None, False], **attributes},
                  _CUBE),
            *grid(ops, {"axis": [1, "(0, 2)"], "keepdims": [True],
                        **attributes}, _CUBE)]


_CONSTANTS = [
    (f"{family}_{name}", own) for family in ("", "_npi") for name, own in (
        ("zeros", {"shape": "(3, 1)"}), ("ones", {"shape": "(1, 4)"}),
        ("full", {"shape": "(3, 4)", "value": "2.5"}),
        *(("arange", dict(zip(("start", "stop", "step", "repeat"), given)))
          for given in (("0", "4"), ("4",), ("4", "None"),
                        ("1", "3", "0.5"), ("0", "2", "1", "2"),
                        ("3", "-1", "-1"))),
        ("eye", {"N": "3", "M": "4"}), ("eye", {"N": "3", "M": "4",
                                                "k": "1"}),
        ("eye", {"N": "1"}),
        ("eye", {"N": "3", "M": "4", "k": "-2"}),
        ("linspace", {"start": "0", "stop": "3", "num": "4"}),
        ("linspace", {"start": "1", "stop": "-1", "num": "4",
                      "endpoint": "False"}))
    if family == "" or "repeat" not in own
] + [("_npi_identity", {"shape": "(1, 1)"}), ("_npi_zeros", {"shape": "()"})]


CASES = [
    *grid("_npi_add _npi_subtract _npi_multiply", {}, _PAIRS),
    *grid("_npi_true_divide _npi_power _npi_hypot", {}, _POSITIVE),
    *grid("_npi_maximum _npi_minimum", {}, _EQUAL),
    *grid(_ORDERS, {}, [(_still(3, 4),) * 2, (_still(2, 3), _still(3))],
          "_npi_{}"),
    *grid(_ORDERS, {"scalar": [0.0, 1], "is_int": [None, False]},
          [(_still(3, 4),)], "_npi_{}_scalar"),
    *grid("add subtract rsubtract multiply true_divide maximum minimum",
          {"scalar": [2.0, -0.3], "is_int": [None, False]}, _ANY,
          "_npi_{}_scalar"),
    *grid("rtrue_divide power rpower",
          {"scalar": [2.0, 0.3], "is_int": [None, False]},
          [(Input((3, 4), positive),)], "_npi_{}_scalar"),
    *grid("_npi_rpower_scalar", {"scalar": [-2.0], "is_int": [False]},
          [(_still(3, 4),)]),
    *grid("_npi_maximum_scalar _npi_minimum_scalar", {"scalar": [0, 1.0]},
          [(Input((3, 4), _few),)]),
    *grid("abs absolute exp expm1 square reciprocal negative sign floor ceil "
          "trunc fix sin cos tan arctan sinh cosh tanh arcsinh", {}, _ANY,
          "_npi_{}"),
    *grid("log log2 log10 log1p sqrt", {}, [(Input((3, 4), positive),)],
          "_npi_{}"),
    *grid("arcsin arccos arctanh", {}, [(Input((3, 4), vision.inside),)],
          "_npi_{}"),
    *grid("_npi_arccosh", {}, [(Input((3, 4), _more),)]),
    *grid("_npx_relu _npx_sigmoid", {}, _ANY),
    # which MXNet computes in float32
    *grid("_npx_erf", {}, _ANY, tolerance=1e-6),
    *grid("_npi_logical_not _npi_isnan _npi_isinf _npi_isfinite", {},
          [(_still(3, 4),)]),
    *grid("_npi_where", {}, [
        (_still(3, 4), Input((3, 4)), Input((3, 4))),
        (_still(3, 1), Input((4,)), Input((2, 3, 4)))]),
    # MXNet's gradient is that of the other branch
    *grid("_npi_where_lscalar _npi_where_rscalar", {"scalar": [2.5]},
          [(_still(3, 4), Input((3, 4))), (_still(3, 1), Input((2, 3, 4)))],
          train=False),
    *(case._replace(before=(("_npi_greater_scalar", {"scalar": "0.0"},
                             (0,)),), takes=(3, 1, 2))
      for case in grid("_npi_where", {}, [(_still(3, 4), Input((3, 4)),
                                           Input((3, 4)))])),
    *grid("_npi_matmul", {}, [
        (Input((2, 3)), Input((3, 4))), (Input((3,)), Input((3,))),
        (Input((2, 5, 3)), Input((3, 4))),
        (Input((2, 3)), Input((3,)))]),
    # MXNet's gradient of an inner axis of 1 is wrong
    *grid("_npi_matmul", {}, [(Input((2, 1, 5, 3)), Input((4, 3, 2)))],
          train=False),
    *grid("_np_dot", {}, [
        (Input((2, 3)), Input((3, 4))), (Input((3,)), Input((3,))),
        (Input((2, 5, 3)), Input((3,))), (Input(()), Input((3,))),
        (Input((2, 4)), Input((4, 3), kept="arg")),
        (Input((2, 5, 3)), Input((3, 4)))]),
    *grid("_npi_tensordot_int_axes", {"axes": [1, 2]},
          [(Input((2, 3, 3)), Input((3, 3, 4)))]),
    *grid("_npi_tensordot", {"a_axes_summed": ["(0,)", "[-1]"],
                             "b_axes_summed": ["(1,)"]},
          [(Input((3, 2, 3)), Input((4, 3)))]),
    *grid("_npi_einsum", {"num_args": [2], "optimize": [None, 0],
                          "subscripts": ["bij,bjk->bik", "bij,bjk->bki",
                                         "...ij,...jk->...ik"]},
          [(Input((2, 3, 4)), Input((2, 4, 5)))]),
    *grid("_npi_einsum", {"num_args": [1], "subscripts": ["ij->ji",
                                                          "ij->", "ij->j"]},
          _ANY),
    *_reductions("_np_sum _npi_mean"),
    *_reductions("_npi_std _npi_var", ddof=[None, 1]),
    *_reductions("_np_max _np_min _np_amax _np_amin"),
    *grid("_np_max _np_min _np_amax _np_amin", {"axis": [None, 1]},
          [(Input((3, 4), _few),)]),
    *grid("_np_prod", {"axis": [None, 0, -1], "keepdims": [None, False]},
          _CUBE),
    *grid("_npi_argmax _npi_argmin", {"axis": [None, 0, 1, -1],
          "keepdims": [None, False]}, [(_still(2, 3, 4, draw=vision.inside),),
          (_still(2, 4, 5),)]),
    *grid("_np_sum _npi_mean", {"keepdims": [True], "axis": [None],
          "dtype": [None, "float64"]}, _CUBE),
    *grid("_np_all _np_any", {"axis": [0, "(1, 2)"], "keepdims": [None, True]},
          [(_still(2, 3, 4),)]),
    *grid("_np_all _np_any", {}, [(_still(2, 3),)]),
    *grid("_npi_diff", {"n": [None, 2], "axis": [None, 0, 1]}, _CUBE),
    *grid("_npi_rint", {}, [(_still(8, 4, draw=vision._halves),)]),
    *grid("_npi_around", {"decimals": [None, 0, 1, -1]},
          [(_still(8, 4, draw=vision._halves),), (_still(8, 4, draw=lambda
            rng, shape: rng.normal(scale=30, size=shape)),)]),
    # constants
    *(case._replace(before=((made, {"dtype": "float64", **own}, ()),),
                    takes=(0, 1))
      for made, own in _CONSTANTS for case in grid(
          "_npi_add" if made.startswith("_np") else "broadcast_add", {},
          [(Input((3, 4)),)])),
    *grid("_np_cumsum", {"axis": [None, 0, 1]}, _CUBE),
    *grid("_npi_norm", {"axis": ["(1,)", "(-1,)"], "ord": [2], "flag": [1],
                        "keepdims": [False, True]}, _CUBE),
    *grid("_np_reshape", {"newshape": ["(-1,)", "(4, 6)", "(2, -1)",
                                       "(2, 1, -1, 4)"], "order": ["C"]},
          _CUBE),
    *grid("_npx_reshape", {"newshape": [
        "(-1,)", "(-2, -1)", "(-2, -2, -1)", "(-4,)", "(-2, -4)", "(-5, -4)",
        "(-2, -5, -4)", "(-2, 3, -1)", "(-6, 1, 2, -4)",
        "(-2, -6, -1, 1, -4)",        "(-5, -2)"]}, _CUBE),
    *grid("_npx_reshape", {"newshape": [
        "(-1, -2, -2)", "(-2, -1)", "(-1, 2, -2, -2)", "(-4, -5)",
        "(-5, -2)"], "reverse": [True]},
        [(Input((4, 3, 4)),)]),
    *grid("_npx_reshape", {"newshape": ["(-2, -3, -4)", "(-2, -3, -2, -4)",
                                        "(-2, -3, -2, -3, -4)"]},
          [(Input((2, 1, 3, 1)),)]),
    *grid("_np_transpose", {"axes": [None, "None", "(0, 2, 1)",
                                     "(0, -2, -1)", "(-1, 1, 0)",
                                     "(2, 0, 1)"]}, _CUBE),
    *grid("_npi_swapaxes", {"dim1": [0, 1], "dim2": [2, -1]}, _CUBE),
    *grid("_npi_expand_dims", {"axis": [0, 1, -1]}, _CUBE),
    *grid("_np_squeeze", {"axis": [None, "None", 1, -1, "(1, 3)"]},
          [(Input((2, 1, 3, 1)),)]),
    *grid("_np_moveaxis", {"source": ["(0,)"], "destination": ["(2,)",
                                                               "(-1,)"]},
          _CUBE),
    *grid("_np_moveaxis", {"source": ["(0, 1)"], "destination": ["(2, 0)"]},
          _CUBE),
    *grid("_np_roll", {"shift": ["(1,)", "(-2,)"],
                       "axis": [None, "(1,)", "(0, 2)"]}, _CUBE),
    *grid("_npi_broadcast_to", {"shape": ["(2, 3, 4)"]},
          [(Input((3, 1)),), (Input((2, 3, 4)),)]),
    *grid("_npi_pad", {"pad_width": ["((0, 0), (1, 2))", "((2, 0), (0, 1))"],
                       "mode": ["constant"], "constant_value": [None, 1.5]},
          [(Input((3, 4)),)]),
    *grid("_npi_tril", {"k": [None, 0, 1, -1]}, [(Input((4, 4)),),
                                                (Input((2, 3, 4)),)]),
    *grid("_npi_full_like", {"fill_value": [0, 1, 2.5], "ctx": ["cpu(0)"]},
          [(_still(2, 3),)]),
    *grid("_npi_concatenate", {"num_args": [3],
                               "axis": [None, "None", 0, 1, -1]},
          [(Input((2, 3)),) * 3]),
    *grid("_npi_vstack _npi_hstack _npi_dstack _npi_column_stack",
          {"num_args": [2]}, [(Input((2, 3)),) * 2, (Input((3,)),) * 2]),
    *grid("_npi_stack", {"num_args": [2], "axis": [None, 0, 1, -1]},
          [(Input((2, 3)),) * 2]),
    *grid(_SPLIT, {"indices": ["[]"], "axis": [1, -1], "sections": [2],
                   "squeeze_axis": [False]}, [(Input((3, 4)),)], outputs=2),
    *grid(_SPLIT, {"indices": ["[0, 1, 3]"], "axis": [1], "sections": [0]},
          [(Input((3, 4)),)], outputs=3),
    *grid(_SPLIT, {"indices": ["[]"], "axis": [0], "sections": [1]},
          [(Input((3, 4)),)]),
    # parts that are not equal, or empty
    *grid(_SPLIT, {"indices": ["[]"], "axis": [0, 1], "sections": [3]},
          [(Input((5, 7)),)], outputs=3),
    *grid(_SPLIT, {"indices": ["[]"], "axis": [1], "sections": [3]},
          [(Input((4, 2)),)], outputs=3, train=False),
    *grid("pick _npx_pick", {"axis": [None, 1, -1], "keepdims": [None, True],
                             "mode": [None, "wrap"]},
          [(Input((4, 3)), _still(4, draw=_beyond(3)))]),
    *grid("pick", {"axis": [1]}, [
        (Input((2, 3, 4)), _still(2, 4, draw=below(3))),
        (Input((2, 3, 4)), _still(2, 1, 4, draw=below(3)))]),
    *grid("one_hot _npx_one_hot", {"depth": [3], "on_value": [None, 2],
          "off_value": [None, -1], "dtype": [None, "float64"]},
          [(_still(2, 3, draw=_beyond(3)),)]),
    *grid(_TOPK, {"k": [None, 2], "axis": [None, 0, 1],
                  "is_ascend": [None, True], "ret_typ": [None, "indices"]},
          [(_still(3, 4, draw=vision.inside),), (_still(4, 5),)]),
    *grid(_TOPK, {"k": [2], "is_ascend": [None, True], "ret_typ": ["value"]},
          [(Input((3, 4)),)]),
    *grid(_TOPK, {"k": [2], "axis": [0], "ret_typ": ["both"]},
          [(_still(3, 4, draw=vision.inside),)], outputs=2),
    *grid("_contrib_arange_like _npx_arange_like", {"start": [None, 2],
          "step": [None, 0.5], "axis": [None, 1, -1]}, [(_still(3, 4),)]),
    *grid("_npi_clip", {"a_min": [-0.5], "a_max": [0.5, 1]}, _ANY),
    *grid("_npi_tile", {"reps": ["(2, 1, 1)", "(1, 2)", "(2, 1, 1, 1)"]},
          _CUBE),
    *grid("_np_repeat", {"repeats": [2], "axis": [None, 0, -1]}, _CUBE),
    *grid("_npi_flip", {"axis": ["(1,)", "(0, 2)"]}, _CUBE),
    *grid("_npi_take", {"axis": [0, 1, -1], "mode": [None, "wrap"]},
          [(Input((3, 4)), _still(2, 2, draw=_beyond(3)))]),
    *grid("_npx_slice", {"begin": ["[None, 0]", "(0, 1)"],
                         "end": ["[None, 1]", "(2, 3)"],
                         "step": [None, "[None, 1]"]}, _CUBE),
    *grid("_np_copy", {}, _ANY),
    *(case for name, op in {
        "convolution": "Convolution", "pooling": "Pooling",
        "fully_connected": "FullyConnected", "batch_norm": "BatchNorm",
        "activation": "Activation", "batch_flatten": "Flatten",
        "leaky_relu": "LeakyReLU", "softmax": "softmax",
        "log_softmax": "log_softmax", "deconvolution": "Deconvolution",
        "dropout": "Dropout"}.items()
      for case in _as(f"_npx_{name}", op)[::7]),
    *(case for name, op in {"rnn": "RNN", "embedding": "Embedding",
                            "layer_norm": "LayerNorm",
                            "batch_dot": "batch_dot",
                            "sequence_mask": "SequenceMask"}.items()
      for case in _as(f"_npx_{name}", op)[::3]),
]
