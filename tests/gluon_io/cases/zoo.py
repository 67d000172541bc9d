"""The operators of Gluon's model zoo."""
from gluon_io.grid import Input, grid, positive


def _layer(*shapes):
    """Data, and parameters of the file."""
    return tuple(Input(shape, kept="arg" if i else "")
                 for i, shape in enumerate(shapes))


def _batch_norm(shape):
    c = (shape[1],)
    return (Input(shape), Input(c, positive, "arg"), Input(c, kept="arg"),
            Input(c, kept="aux"), Input(c, positive, "aux"))


def _channels_last(shape):
    c = shape[-1:]
    return (Input(shape), *_batch_norm((0, *c))[1:])


CASES = [
    *grid("Convolution", {"kernel": ["(3,)"], "num_filter": [4],
                          "stride": [None, "(2,)"], "pad": [None, "(1,)"],
                          "dilate": [None, "(2,)"], "layout": [None, "NCW"],
                          "no_bias": [True]},
          [_layer((2, 2, 8), (4, 2, 3))]),
    *grid("Convolution", {"kernel": ["(3, 2)"], "num_filter": [4],
                          "no_bias": [None, False], "num_group": [1],
                          "stride": [None, "(2, 1)", "(2, 2)"],
                          "pad": ["(0, 0)", "(1, 2)"],
                          "dilate": ["(1, 1)", "(2, 1)"]},
          [_layer((2, 4, 8, 7), (4, 4, 3, 2), (4,))]),
    *grid("Convolution", {"kernel": ["(2, 2)"], "num_filter": [4],
                          "num_group": [2], "stride": [None, "(2, 2)"]},
          [_layer((2, 4, 6, 5), (4, 2, 2, 2), (4,))]),
    *grid("Convolution", {"kernel": ["(2, 1, 2)"], "num_filter": [3]},
          [_layer((2, 2, 4, 3, 3), (3, 2, 2, 1, 2), (3,))]),
    *grid("FullyConnected", {"num_hidden": [3], "flatten": [None, True],
                             "no_bias": [None, False]},
          [_layer((2, 3, 4), (3, 12), (3,)), _layer((2, 5), (3, 5), (3,))]),
    *grid("FullyConnected", {"num_hidden": [3], "flatten": [False],
                             "no_bias": [True]},
          [_layer((2, 3, 4), (3, 4)), _layer((2, 5), (3, 5))]),
    *(case._replace(train=train)
      for case in grid("BatchNorm", {
          "eps": [None, 0.5], "momentum": [None, 0.75],
          "fix_gamma": [None, False], "axis": [None, 1]},
          [_batch_norm((4, 3)), _batch_norm((3, 2, 4, 2))])
      for train in (True, False)),
    *(case._replace(train=train)
      for case in (*grid("BatchNorm", {
          "fix_gamma": [None, False], "axis": [3, -1],
          "use_global_stats": [None, True]},
          [_channels_last((3, 2, 4, 3))]),
          *grid("BatchNorm", {
              "fix_gamma": [None, False], "eps": [None, 0.5],
              "use_global_stats": [True]}, [_batch_norm((3, 2, 4, 2))]))
      for train in (True, False)),
    *grid("Dropout", {"p": [0, 0.0]}, [(Input((2, 3)),)]),
    *grid("Dropout", {"p": [0.0], "axes": ["(1,)"],
                      "mode": [None, "always"]}, [(Input((2, 3)),)]),
    *grid("Dropout", {"p": [0.5], "axes": ["(1,)"]}, [(Input((2, 3)),)],
          train=False),
    *grid("Dropout", {"p": [0.5]}, [(Input((2, 3)),)], train=False),
    *grid("Pooling", {
        "kernel": ["(3, 2)"], "pool_type": ["max", "avg"],
        "stride": [None, "(2, 2)", "(1, 2)"], "pad": [None, "(1, 1)"],
        "count_include_pad": [None, True, False],
        "pooling_convention": [None, "valid", "full"]},
        [(Input((2, 3, 8, 8)),)]),
    # MXNet has it in float32 alone
    *(case._replace(train=train) for case in grid(
        "_contrib_SyncBatchNorm", {
            "fix_gamma": [None, False], "use_global_stats": [None, True],
            "key": ["a"], "ndev": [None, 1]}, [_batch_norm((3, 2, 4, 2))],
        dtype="float32", tolerance=2e-6) for train in (True, False)),
    *grid("Pooling", {"kernel": ["(2,)", "(3,)"], "stride": ["(2,)", "(1,)"],
                      "pool_type": ["max", "avg"],
                      "pooling_convention": ["valid", "full"]},
          [(Input((2, 3, 8)),)]),
    *grid("Pooling", {"kernel": ["(1, 1)"], "global_pool": [True],
                      "pool_type": ["max", "avg"],
                      "pooling_convention": [None, "full"]},
          [(Input((2, 3, 4, 5)),)]),
    *grid("Pooling", {"kernel": ["(3, 2)"], "pool_type": ["sum"],
                      "stride": [None, "(2, 2)"], "pad": [None, "(1, 1)"],
                      "pooling_convention": [None, "full"]},
          [(Input((2, 3, 7, 8)),)]),
    *grid("Activation", {"act_type": ["relu", "sigmoid", "tanh", "softrelu",
                                      "softsign"]},
          [(Input((3, 4)),), (Input((2, 3, 4)),)]),
    *grid("Flatten", {}, [(Input((2, 3, 4)),), (Input((2, 3)),)]),
    *grid("Concat", {"num_args": [3], "dim": [None, 0, 1, 2, -1]},
          [(Input((2, 3, 4)),) * 3]),
    *grid("Concat", {"num_args": [2]}, [(Input((2, 3)), Input((2, 1)))]),
    *grid("elemwise_add", {}, [(Input((2, 3)),) * 2]),
    *grid("broadcast_add", {}, [(Input((2, 3)), Input((1, 3))),
                                (Input((2, 3)), Input((1, 3), kept="arg"))]),
    *grid("clip", {"a_min": [-0.5, 0], "a_max": [0.5, 1]},
          [(Input((3, 4)),)]),
    *grid("_copy", {}, [(Input((3, 4)),)]),
]
