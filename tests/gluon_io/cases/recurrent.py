"""The operators of recurrent networks and of attention."""
from gluon_io.grid import Case, Input, below, grid, positive


def _rnn(mode, layers=1, bidirectional=False, states="", n=3, size=4,
         **options):
    """As Gluon exports its layers: arrays of the file, flattened and joined.
    `states`: of each whether it is given, or zeros of an unknown batch."""
    gates = {"lstm": 4, "gru": 3}.get(mode, 1)
    ways, batch = 1 + bidirectional, 2
    shapes = [(gates * n, columns) for i in range(layers)
              for _ in range(ways)
              for columns in (n * ways if i else size, n)]
    shapes += [(gates * n,)] * len(shapes)
    inputs = [Input((5, batch, size))]
    state = (layers * ways, batch, n)
    inputs += [Input(state) for given in states if given == "s"]
    first = len(inputs)
    inputs += [Input(shape, kept="arg") for shape in shapes]
    before = [("Reshape", {"shape": "-1"}, (first + i,))
              for i in range(len(shapes))]
    flat = range(len(inputs), len(inputs) + len(shapes))
    before.append(("_rnn_param_concat", {"dim": "0", "num_args":
                                         str(len(shapes))}, tuple(flat)))
    takes = [0, len(inputs) + len(shapes)]
    given = iter(range(1, first))
    for kind in states:
        takes.append(next(given) if kind == "s" else len(inputs) + len(before))
        if kind == "0":
            before.append(("_zeros", {"dtype": "float64", "shape": str(
                (state[0], 0, n))}, ()))
    attributes = {"mode": mode, "num_layers": str(layers), "state_size":
                  str(n), "state_outputs": "True", **options}
    if bidirectional:
        attributes["bidirectional"] = "True"
    outputs = 1 if attributes["state_outputs"] == "False" \
        else 2 + (mode == "lstm")
    # MXNet's relu rounds to float32
    return Case("RNN", attributes, tuple(inputs), outputs=outputs,
                before=tuple(before), takes=tuple(takes),
                tolerance=1e-6 if mode == "rnn_relu" else 1e-12)


def _lengths(batch, most):
    return Input((batch,), lambda rng, shape: rng.integers(
        1, most + 1, shape).astype(float), moves=False)


# MXNet's processor has these in float32 alone
_SINGLE = {"dtype": "float32", "tolerance": 1e-6}
_NORM = [(Input((2, 3, 4)), Input((4,), positive, "arg"),
          Input((4,), kept="arg"))]
_FLAGS = {"transpose_a": [None, True], "transpose_b": [None, True]}


def _fitting(make, op):
    """Each pair of flags with matrices that it fits."""
    for case in grid(op, _FLAGS, [()]):
        a, b = make(3, 4), make(4, 2)
        yield case._replace(inputs=(
            Input(a[:-2] + a[:-3:-1] if "transpose_a" in case.attributes
                  else a),
            Input(b[:-2] + b[:-3:-1] if "transpose_b" in case.attributes
                  else b)))


CASES = [
    *(_rnn(mode, layers, bidirectional, states)
      for mode in ("lstm", "gru", "rnn_tanh", "rnn_relu")
      for layers in (1, 2) for bidirectional in (False, True)
      for states in ("00", "ss", *(("0s", "s0") if mode == "lstm" and
                                   layers == 2 else ()))
      for states in ((states if mode == "lstm" else states[:1]),)),
    *(_rnn(mode, 2, states="00" if mode == "lstm" else "0",
           state_outputs="False") for mode in ("lstm", "gru", "rnn_tanh")),
    *(_rnn(mode, states="00" if mode == "lstm" else "0", p="0.5")
      for mode in ("lstm", "rnn_tanh")),
    _rnn("lstm", 2, states="00", p="0.5")._replace(train=False),
    *grid("Embedding", {"input_dim": [5], "output_dim": [3],
                        "dtype": [None, "float64"]},
          [(Input(shape, below(5), moves=False), Input((5, 3), kept="arg"))
           for shape in ((4,), (2, 3), (1, 2, 2))]),
    *grid("LayerNorm", {"axis": [None, -1, 2], "eps": [None, 0.5, 1e-3]},
          _NORM),
    *grid("LayerNorm", {"axis": [0, 1, -2]},
          [(Input((3, 3, 4)), Input((3,), positive, "arg"),
            Input((3,), kept="arg"))]),
    *(case for n in (1, 2, 3) for case in grid(
        "GroupNorm", {"num_groups": [n], "eps": [None, 0.5]},
        [(Input(shape), Input((n,), positive, "arg"),
          Input((n,), kept="arg")) for shape in ((2, 6, 4), (3, 6, 2, 3))])),
    *_fitting(lambda *n: (2, *n), "batch_dot"),
    *_fitting(lambda *n: n, "dot"),
    *grid("dot", {}, [(Input((3,)), Input((3,))),
                      (Input((2, 3)), Input((3,))),
                      (Input((2, 4, 3)), Input((3, 2), kept="arg")),
                      (Input((2, 3)), Input((3, 2, 4)))]),
    *grid("_contrib_div_sqrt_dim", {}, [(Input((2, 3)),)]),
    *grid("_contrib_interleaved_matmul_selfatt_qk", {"heads": [1, 2]},
          [(Input((4, 3, 12)),)],
          **_SINGLE),
    *grid("_contrib_interleaved_matmul_selfatt_valatt", {"heads": [2]},
          [(Input((4, 3, 12)), Input((6, 4, 4)))],
          **_SINGLE),
    *grid("_contrib_interleaved_matmul_encdec_qk", {"heads": [1, 2]},
          [(Input((4, 3, 4)), Input((5, 3, 8)))],
          **_SINGLE),
    *grid("_contrib_interleaved_matmul_encdec_valatt", {"heads": [2]},
          [(Input((5, 3, 8)), Input((6, 4, 5)))],
          **_SINGLE),
    *grid("SequenceMask", {"use_sequence_length": [True],
                           "value": [None, -1e6], "axis": [None, 0, 1]},
          [(Input((3, 3)), _lengths(3, 3)),
           (Input((3, 3, 2, 2)), _lengths(3, 3))]),
    # lengths that are no whole numbers
    *grid("SequenceMask", {"use_sequence_length": [True]}, [
        (Input((5, 2, 2)), Input((2,), lambda rng, shape: rng.uniform(
            1.1, 4.9, shape), "", False))]),
    *grid("SequenceMask", {"axis": [None, 1]}, [(Input((3, 2)),)]),
    *grid("SequenceLast", {"use_sequence_length": [True],
                           "axis": [None, 1]},
          [(Input((3, 3, 2)), _lengths(3, 3))]),
    *grid("SequenceLast", {"axis": [None, 1]}, [(Input((4, 3, 2)),)]),
    *grid("SequenceReverse", {"use_sequence_length": [True]},
          [(Input((4, 3)), _lengths(3, 4)),
           (Input((4, 3, 2)), _lengths(3, 4))]),
    *grid("SequenceReverse", {}, [(Input((4, 3)),)]),
]
