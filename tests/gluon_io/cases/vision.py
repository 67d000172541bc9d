"""The operators of gluoncv2's classification networks, and their like."""
import numpy as np

from gluon_io.grid import Input, below, grid, positive

_IMAGE = Input((2, 3, 6, 5))


def _of(rows):
    """Values that occur several times."""
    return lambda rng, shape: rng.integers(0, rows, shape).astype(float)


def inside(rng, shape):
    """Numbers between -0.9 and 0.9."""
    return rng.uniform(-0.9, 0.9, shape)


def _halves(rng, shape):
    return rng.integers(-8, 9, shape) / 2


def _not_zero(rng, shape):
    return rng.choice([-3, -2.5, -1, 0.5, 1, 2], shape)


def _above(rng, shape):
    return rng.uniform(1.1, 2, shape)


def _indices(*shape, low=-3, high=9, kept=""):
    return Input(shape, lambda rng, s: rng.uniform(low, high, s), kept, False)


def _each(names, *inputs, **options):
    return grid(names, {}, list(inputs), **options)


def _weighted(*shapes):
    """Data, and arrays of the file."""
    return tuple(Input(shape, kept="arg" if i else "")
                 for i, shape in enumerate(shapes))


ARITHMETIC = [
    *_each("exp expm1 square negative abs sign floor ceil trunc fix sin cos "
           "tan arctan sinh cosh tanh arcsinh relu sigmoid softsign "
           "zeros_like ones_like", (Input((3, 4)),)),
    # halves, and what is next to them
    *_each("round rint trunc fix", (Input((8, 4), lambda rng, shape: np.where(
        rng.random(shape) < 0.5, rng.integers(-6, 7, shape) / 2,
        np.nextafter(0.5, rng.integers(0, 2, shape)))),)),
    *_each("_mod broadcast_mod _npi_mod", (
        Input((6, 4), _halves), Input((6, 4), _not_zero))),
    *_each("broadcast_mod", (Input((6, 4)), Input((1, 4))),
           (Input((6, 4)), Input((6, 4), lambda rng, shape: rng.integers(
               -1, 2, shape), moves=False))),
    *grid("_mod_scalar _rmod_scalar _npi_mod_scalar _npi_rmod_scalar",
          {"scalar": [3.0, -3.0, 0.7, -1.5]}, [(Input((6, 4), _not_zero),),
          (Input((3, 4)),)]),
    *_each("logical_not", (Input((3, 4), _of(2)),)),
    *_each("_logical_and _logical_or _logical_xor broadcast_logical_and "
           "broadcast_logical_or broadcast_logical_xor",
           (Input((5, 4), _of(2)), Input((5, 4), _of(2)))),
    *grid("_logical_and_scalar _logical_or_scalar _logical_xor_scalar",
          {"scalar": [0, 2.0]}, [(Input((3, 4), _of(2)),)]),
    *grid("smooth_l1 _npx_smooth_l1", {"scalar": [None, 1.0, 2.0, 0.5]},
          [(Input((5, 4)),), (Input((5, 4), _halves),)]),
    *_each("log log2 log10 log1p sqrt rsqrt reciprocal",
           (Input((3, 4), positive),)),
    *_each("arcsin arccos arctanh", (Input((3, 4), inside),)),
    # MXNet computes it in float32
    *_each("erf", (Input((3, 4)),), tolerance=1e-7),
    *_each("arccosh", (Input((3, 4), _above),)),
    *_each("relu abs sign", (Input((5, 4), _of(2)),)),
    *_each("elemwise_add elemwise_sub elemwise_mul elemwise_div _maximum "
           "_minimum _hypot _equal _not_equal _greater _greater_equal _lesser "
           "_lesser_equal", (Input((3, 4)), Input((3, 4))),
           (Input((3, 4)), Input((3, 4), kept="arg"))),
    *_each("_power", (Input((3, 4), positive), Input((3, 4)))),
    *_each("broadcast_add broadcast_sub broadcast_mul broadcast_div "
           "broadcast_maximum broadcast_minimum broadcast_hypot",
           (Input((2, 3, 4)), Input((2, 1, 4))),
           (Input((2, 1, 1)), Input((2, 3, 4), kept="arg"))),
    *_each("broadcast_power", (Input((2, 3), positive), Input((1, 3)))),
    # the same numbers on both sides
    *_each("_maximum _minimum broadcast_maximum broadcast_minimum _equal "
           "_not_equal _greater _greater_equal _lesser _lesser_equal "
           "broadcast_equal broadcast_not_equal broadcast_greater "
           "broadcast_greater_equal broadcast_lesser broadcast_lesser_equal",
           (Input((5, 6), _of(3)), Input((5, 6), _of(3)))),
    *grid("plus minus rminus mul div rdiv maximum minimum",
          {"scalar": [1, 0.1, "-2.5"]}, [(Input((3, 4), positive),)],
          "_{}_scalar"),
    *grid("maximum minimum equal not_equal greater greater_equal lesser "
          "lesser_equal", {"scalar": [1, None]}, [(Input((3, 4), _of(3)),)],
          "_{}_scalar"),
    *grid("_power_scalar", {"scalar": [2, 0.5, -1, "0.1"]},
          [(Input((3, 4), positive),)]),
    *grid("_rpower_scalar", {"scalar": [2, 0.1]}, [(Input((3, 4)),)]),
    *grid("_rpower_scalar", {"scalar": [-2, 0, -0.5]},
          [(Input((3, 4), _of(3), moves=False),)]),
    *(case for n in (1, 3) for case in grid(
        "add_n", {"num_args": [n]}, [(Input((3, 4)),) * n])),
    *_each("where", (Input((3, 4), _of(3)), Input((3, 4)), Input((3, 4)))),
    # one for each row
    *_each("where", (Input((3,), _of(2)), Input((3, 3)), Input((3, 3))),
           (Input((3,), _of(2)), Input((3, 2, 4)), Input((3, 2, 4))),
           (Input((3,), _of(2), "arg", False), Input((3, 4)),
            Input((3, 4)))),
    *grid("_mul_scalar _plus_scalar _maximum_scalar _greater_scalar",
          {"scalar": ["-1e+30", "inf"]}, [(Input((3, 4), positive),)]),
    *grid("Cast", {"dtype": ["float32", "float64"]},
          [(Input((3, 4)),)]),
]

ACTIVATIONS = [
    *grid("LeakyReLU", {"act_type": [None, "leaky", "elu"],
                        "slope": [None, 0.1, 1.0, 0.01]},
          [(Input((3, 4)),)]),
    # MXNet's constants are of float32
    *grid("LeakyReLU", {"act_type": ["selu"]}, [(Input((3, 4)),)],
          tolerance=1e-7),
    *grid("LeakyReLU", {"act_type": ["gelu"]}, [(Input((3, 4)),)],
          tolerance=1e-7),
    *grid("LeakyReLU", {"act_type": ["prelu"]},
          [_weighted((2, 3), (3,)), _weighted((2, 3, 4, 2), (3,)),
           _weighted((2, 3, 4, 2), (1,)), _weighted((2, 3), (1,))]),
    *grid("hard_sigmoid", {"alpha": [None, 0.3], "beta": [None, 0.25]},
          [(Input((5, 4), lambda rng, shape: 3 * rng.normal(size=shape)),),
           # at the bounds
           (Input((8, 4), lambda rng, shape: rng.choice([-2.5, 2.5, 0.5],
                                                        shape)),)]),
    *grid("softmax log_softmax softmin", {"axis": [None, 1, 0, -2],
          "temperature": [None, 1.0, 2.5]},
          [(Input((2, 3, 4)),), (Input((2, 3)),)]),
    *(case for axis, n in ((1, 4), (2, 3), (-1, 3)) for case in grid(
        "softmax", {"axis": [axis], "use_length": [True],
                    "temperature": [None, 2.5]}, [
            (Input((2, 3, 4)), Input((2, n), below(4), "", False,
                                     "int32"))])),
    # which MXNet computes in float32
    *grid("softmax log_softmax", {"dtype": ["float32", "float64"]},
          [(Input((2, 3)),)], tolerance=1e-6),
    *grid("SoftmaxActivation", {"mode": ["channel"]}, [
        (Input((2, 3, 4)),), (Input((2, 3, 2, 2)),)],
        dtype="float32", tolerance=1e-6),      # MXNet has no other
]

NORMS = [
    *grid("L2Normalization", {"mode": [None, "instance", "channel",
                                       "spatial"], "eps": [None, 0.1]},
          [(Input((2, 3, 4)),), (Input((2, 3, 2, 2)),)]),
    # MXNet has these two in float32 alone. It adds up the gradient of a bias
    # number by number there: twice the tolerance of the others.
    *grid("LRN", {"nsize": [1, 5], "alpha": [None, 0.5], "beta": [None, 0.5],
                  "knorm": [None, 1]},
          [(Input((2, 6, 3, 2)),)], dtype="float32", tolerance=1e-6),
    *grid("InstanceNorm", {"eps": [None, 1e-5, 0.1]},
          [_weighted((2, 3, 4), (3,), (3,)),
           _weighted((2, 3, 4, 5), (3,), (3,))],
          dtype="float32", tolerance=2e-6),
]

IMAGES = [
    *grid("_contrib_AdaptiveAvgPooling2D", {
        "output_size": [None, 1, "(1,)", 2, "(3, 4)", "(4, 2)"]},
        [(_IMAGE,)]),
    *grid("_contrib_BilinearResize2D", {
        "height": [3, 6, 11, 1], "width": [8],
        "align_corners": [None, True, False]}, [(_IMAGE,)]),
    *grid("_contrib_BilinearResize2D", {
        "height": [3, 11], "width": [8], "align_corners": [True, False]},
        [(_IMAGE,)], dtype="float32", tolerance=1e-6),
    *grid("UpSampling", {"scale": [1, 2, 3], "sample_type": ["nearest"],
                         "num_args": [1]}, [(_IMAGE,)]),
    *(case for scale in (1, 2, 3, 4) for case in grid(
        "UpSampling", {"scale": [scale], "sample_type": ["bilinear"],
                       "num_args": [2], "num_filter": [3]},
        [_weighted(_IMAGE.shape, (3, 1, *(2 * scale - scale % 2,) * 2))])),
    *grid("Pad", {"mode": ["constant", "edge", "reflect"], "pad_width": [
        "(0, 0, 0, 0, 1, 2, 0, 3)", "(0, 0, 0, 0, 1, 1, 1, 1)"],
        "constant_value": [None, 0, 0.1]}, [(_IMAGE,)]),
    *grid("Pad", {"mode": ["constant", "edge", "reflect"], "pad_width": [
        "(0, 0, 0, 0, 1, 0, 0, 1, 1, 1)"]}, [(Input((2, 2, 3, 4, 3)),)]),
    *grid("Deconvolution", {
        "kernel": ["(3, 2)"], "num_filter": [4], "no_bias": [None, False],
        "stride": [None, "(2, 3)"], "pad": [None, "(1, 0)"],
        "dilate": [None, "(2, 1)"]},
        [_weighted((2, 2, 5, 4), (2, 4, 3, 2), (4,))]),
    *grid("Deconvolution", {
        "kernel": ["(3, 3)"], "num_filter": [4], "stride": ["(2, 2)"],
        "adj": [None, "(1, 0)", "(1, 1)"], "num_group": [1, 2],
        "layout": [None, "NCHW"]},
        [_weighted((2, 4, 5, 4), (4, 4, 3, 3))]),
    *grid("Deconvolution", {"kernel": ["(3,)"], "num_filter": [3],
                            "stride": ["(2,)"], "pad": ["(1,)"]},
          [_weighted((2, 2, 5), (2, 3, 3))]),
    *grid("depth_to_space", {"block_size": [2]}, [(Input((2, 8, 2, 3)),)]),
]
# those grids that a number of groups or a bias does not fit
IMAGES = [case._replace(inputs=case.inputs[:2])
          if case.op == "Deconvolution"
          and case.attributes.get("no_bias", "True") == "True" else case
          for case in IMAGES]
# MXNet's own kernel, which float64 has, is wrong with strides and dilation
IMAGES = [case._replace(dtype="float32", tolerance=1e-6)
          if {"stride", "dilate"} <= case.attributes.keys() else case
          for case in IMAGES]
IMAGES = [case._replace(inputs=_weighted((2, 4, 5, 4), (4, 2, 3, 3)))
          if case.attributes.get("num_group") == "2" else case
          for case in IMAGES]

_CODES = ["(0, -1)", "(-1, 0)", "(0, 0, -1)", "(-1,)", "(0, -3, -2)",
          "(-3, -2)", "(0, -4, 2, -1, -2)", "(0, -4, -1, 3, -2)",
          "(-4, 1, -1, -2)", "(0, -3, 0)", "(0, 0, -3)", "(-3, -3)",
          "(-3, -1)", "(0, 2, -1, 1, 1)", "(0, 1, 2, -1)", "(-2,)",
          "(0, -2)", "(0, 6, -2)", "(0, -4, 3, 2, 0, 0)", "(2, 6, 20)",
          "(0, -4, -1, 2, 20)", "(-4, 2, 1, -3, 0)", "(-1, 2, 0, 0)"]

SHAPES = [
    *grid("Reshape", {"shape": _CODES, "reverse": [None, False]},
          [(Input((2, 6, 4, 5)),)]),
    *grid("Reshape", {"shape": ["(-1, 0)", "(0, -1)", "(-1, 0, 0)",
                                "(-3, 0, 0)", "(-2, 0)", "(-2, -3)", "(-2,)",
                                "(-1,)", "(3, -1, 0, 0)", "(6, 2, -3)",
                                "(-2, 10, 2)"], "reverse": [True]},
          [(Input((2, 6, 4, 5)),)]),
    *_each("reshape_like", (Input((2, 6)), Input((3, 4)))),
    *grid("transpose", {"axes": [None, "()", "(0, 2, 1)", "(2, 0, 1)",
                                 "(0, 1, 2)", "(1, 0, 2)"]},
          [(Input((2, 3, 4)),)]),
    *grid("transpose", {}, [(Input((2, 3)),)]),
    *grid("SwapAxis", {"dim1": [None, 1, -1], "dim2": [None, 2]},
          [(Input((2, 3, 4)),)]),
    *grid("expand_dims", {"axis": [0, 1, 2, -1, -2]}, [(Input((2, 3)),)]),
    *grid("squeeze", {"axis": [1, "(1,)", "(1, 3)", -1]},
          [(Input((2, 1, 3, 1)),)]),
    *grid("squeeze", {"axis": ["(0, 1)"]}, [(Input((1, 1)),)]),
    *_each("broadcast_like", (Input((2, 1, 1)), Input((2, 3, 4)))),
    *grid("broadcast_to", {"shape": ["(2, 3, 4)", "(0, 3, 4)", "(0, 0, 4)"]},
          [(Input((2, 3, 1)),)]),
    *grid("broadcast_axis", {"axis": ["(0,)", "(0, 2)"], "size": ["(2, 3)"]},
          [(Input((1, 3, 1)),)]),
    *grid("tile", {"reps": ["(2,)", "(1, 2)", "(2, 1, 3)", "(2, 1, 1, 2)"]},
          [(Input((2, 3)),), (Input((2, 1, 3)),)]),
    *grid("repeat", {"repeats": [1, 3], "axis": [None, 0, 1, -1]},
          [(Input((2, 3)),)]),
    *grid("stack", {"axis": [None, 0, 1, 2, -1], "num_args": [3]},
          [(Input((2, 3)),) * 3]),
    *grid("reverse", {"axis": [0, "(1, 2)"]}, [(Input((2, 3, 4)),)]),
]
# a size for each axis
SHAPES = [case._replace(attributes={**case.attributes, "size": "(2,)"})
          if case.attributes.get("axis") == "(0,)"
          and case.op == "broadcast_axis" else case for case in SHAPES]

PARTS = [
    *grid("slice_axis", {"axis": [0, 1, -1, -2], "begin": [0, 1, -3],
                         "end": ["None", 3, -1]}, [(Input((3, 4, 5)),)]),
    *grid("slice", {"begin": ["(0, 1)", "(None, 1)", "(None, -3)"],
                    "end": ["(2, 3)", "(None, None)", "(3, -1)"],
                    "step": [None, "()", "(1, 2)", "(None, 1)"]},
          [(Input((3, 4, 2)),), (Input((3, 4, 2), kept="arg"),)]),
    *(case for begin, end in (("-1", "-2"), ("2", "None"), ("None", "0"),
                              ("-1", "-4"), ("3", "1"), ("None", "None"))
      for case in grid("slice", {
          "begin": [f"(None, {begin})"], "end": [f"(None, {end})"],
          "step": ["(None, -1)"]}, [(Input((3, 4, 2)),)])),
    *grid("slice_like", {"axes": [None, "(0, 1, 2)", "(1,)", "(2, 1)",
                                  "(-1,)"]},
          [(Input((3, 4, 5)), Input((2, 3, 4)))]),
    *(case._replace(outputs=int(case.attributes["num_outputs"]))
      for case in [
          *grid("SliceChannel", {"num_outputs": [1, 2, 4],
                                 "axis": [None, 1, 2, -1],
                                 "squeeze_axis": [None, False]},
                [(Input((2, 4, 8)),)]),
          *grid("SliceChannel", {"num_outputs": [4], "axis": [None, 1],
                                 "squeeze_axis": [True]},
                [(Input((2, 4, 3)),)]),
          *grid("SliceChannel", {"num_outputs": [1], "axis": [2],
                                 "squeeze_axis": [True]},
                [(Input((2, 4, 1)),)])]),
    *grid("take", {"axis": [None, 0, 1, -1], "mode": [None, "clip", "wrap"]},
          [(Input((4, 5, 6)), _indices(3)),
           (Input((4, 5, 6), kept="arg"), _indices(2, 3)),
           (Input((4, 5, 6)), _indices(3, low=0, high=3, kept="arg"))]),
    *grid("take", {"axis": [None, 1], "mode": ["raise"]}, [
        (Input((4, 5, 6)), Input((3,), below(4), moves=False))]),
    *_each("gather_nd _npi_gather_nd _npx_gather_nd", *(
        (Input((3, 3, 4)), Input((n, *more), below(3), moves=False))
        for n in (1, 2, 3) for more in ((5,), (2, 2)))),
    *(case for begin, end in (("-1, -1", "-4, -3"), ("2, None", "0, None"))
      for case in grid("slice", {
          "begin": [f"(None, {begin})"], "end": [f"(None, {end})"],
          "step": ["(None, -1, -1)"]}, [(Input((3, 4, 3)),)])),
]

_CUBE = [(Input((2, 3, 4)),)]
REDUCTIONS = [
    *grid("sum mean max min", {"axis": [0, 1, -1, "(1, 2)", "(0,)", "(-1, 0)"],
          "keepdims": [None, False, True]}, [(Input((2, 3, 4)),)]),
    *(case for op in ("sum", "mean", "max", "min")
      for case in [*grid(op, {"axis": [None, "()", "None"]},
                         [(Input((2, 3, 4)),), (Input((4,)),)]),
                   *grid(op, {"axis": [0], "exclude": [True]},
                         [(Input((2, 3, 4)),)])]),
    # which leave no axis
    *(case for op in ("sum", "mean", "max", "min", "norm")
      for case in [*grid(op, {"axis": [0]}, [(Input((4,)),)]),
                   *grid(op, {"axis": ["(0, 1)"]}, [(Input((3, 4)),)])]),
    *grid("argmax", {"axis": [0, -1]}, [(Input((4,)),)]),
    *grid("sum mean max min nansum norm", {"keepdims": [True]}, _CUBE),
    *(case for op in ("sum", "mean", "max", "prod", "nansum")
      for case in grid(op, {"axis": [1, "(0, 2)", "(-1, -2)"],
                            "exclude": [True], "keepdims": [None, True]},
                       [(Input((2, 3, 4), kept="arg"),)])
      if not (op == "prod" and case.attributes["axis"] == "1")),
    *grid("prod", {"axis": [None, 0, -1, "(1,)"], "keepdims": [None]}, _CUBE),
    *grid("nansum", {"axis": [None, 0, "(1, 2)"], "keepdims": [None]},
          [(Input((2, 3, 4), lambda rng, shape: np.where(
              rng.random(shape) < 0.3, np.nan, rng.normal(size=shape))),)]),
    *grid("argmin", {"axis": [0, 1, -1], "keepdims": [None, True]}, _CUBE),
    *grid("argmin argmax", {}, [(Input((5, 6), _of(3)),), (Input((4,)),)]),
    *grid("argmin", {"axis": [0, 1]}, [(Input((5, 6), _of(3)),)]),
    *grid("sort _npi_sort", {"axis": [0, 1, -1], "is_ascend": [None, False]},
          [(Input((5, 6)),)]),
    *grid("argsort _npi_argsort", {"axis": [0, -1], "is_ascend": [None, False],
          "dtype": [None, "int64"]},
          [(Input((5, 6), moves=False),),
           (Input((5, 6), _of(3), moves=False),)]),
    # the largest several times
    *grid("max min argmax", {"axis": [0, 1]}, [(Input((5, 6), _of(3)),)]),
    *grid("norm", {"ord": [None, 1, 2], "axis": [None, 1, "(1, 2)"],
                   "keepdims": [None, False]}, [(Input((2, 3, 4)),)]),
    *grid("norm", {"axis": [1], "keepdims": [True]}, [(Input((2, 3, 4)),)]),
    *grid("argmax", {"axis": [0, 1, -1], "keepdims": [None, True]},
          [(Input((2, 3, 4)),)]),
]

CASES = [*ARITHMETIC, *ACTIVATIONS, *NORMS, *IMAGES, *SHAPES, *PARTS,
         *REDUCTIONS]
