"""Initializers: Gluon's formulas and rules, drawn from NumPy."""
import inspect
import json

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from mgpu.nn import initializers
from mgpu.nn.initializers import (Bilinear, Constant, Initializer, LSTMBias,
                                  MSRAPrelu, Normal, One, Orthogonal, Uniform,
                                  Xavier, Zero, create, draw_parameter, fans)


def rng():
    return np.random.default_rng(0)


# Standard deviations by the formulas: the averages of fan-in and fan-out
# are 192 (dense) and 432 (convolution).


@pytest.mark.parametrize("init, shape, expected", [
    (Constant(-2), (), np.array(-2.0)),
    (Constant([[1, 2], [3, 4]]), (2, 2), np.array([[1., 2.], [3., 4.]])),
    (Constant(np.arange(3)), (2, 3), np.array([[0., 1., 2.]] * 2)),
], ids=str)
def test_deterministic_values(init, shape, expected):
    values = init.draw(shape, rng())
    assert values.dtype == np.float64 and values.flags.writeable
    np.testing.assert_array_equal(values, expected, strict=True)


ALL = [Zero(), One(), Constant(0.1), Constant([[1.5, 2], [3, 4]]), Uniform(),
       Uniform(0.1), Normal(), Normal(np.float32(0.1)), Orthogonal(),
       Orthogonal(2, "normal"), Xavier(), Xavier("gaussian", "in", 2.34),
       MSRAPrelu(), MSRAPrelu("out", 0), Bilinear(), LSTMBias(2)]


def test_repr_and_equality():
    for i, init in enumerate(ALL):
        again = eval(repr(init), vars(initializers))
        assert again == init and hash(again) == hash(init)
        assert [init == other for other in ALL].index(True) == i
    assert repr(Xavier(magnitude=2)) == ("Xavier(rnd_type='uniform', "
                                         "factor_type='avg', magnitude=2.0)")
    assert Constant([1, 2]) != Constant([1, 3]) and Zero() != 0
    assert len(repr(Constant(np.zeros((200, 300))))) < 100


def test_constant_keeps_a_copy():
    given = np.zeros(3)
    init = Constant(given)
    given[:] = 7
    drawn = init.draw((3,), rng())
    drawn[:] = 8
    assert init.draw((3,), rng()).tolist() == [0, 0, 0]


def test_create():
    init = Normal(0.3)
    assert create(init) is init
    assert create("normal") == Normal() and create("NORMAL") == Normal()
    assert create("zeros") == create("Zero") == Zero()
    assert create("ones") == create("one") == One()
    assert create("xavier", magnitude=2.0, factor_type="in") \
        == Xavier("uniform", "in", 2)
    assert create("MSRAPrelu", slope=0) == MSRAPrelu(slope=0)
    assert create("orthogonal", rand_type="normal").rand_type == "normal"
    assert create("constant", value=3) == Constant(3)
    assert create('["normal", {"sigma": 0.5}]') == Normal(0.5)


def test_a_user_defined_initializer():
    class Eye(Initializer):
        def sample(self, shape, rng):
            return np.eye(*shape, dtype=np.float32)

    class Wrong(Initializer):
        def sample(self, shape, rng):
            return np.full(shape[:1], np.nan)

    assert draw_parameter("weight", (2, 2), "float64", Eye(), seed=0,
                          index=0).tolist() == [[1, 0], [0, 1]]
    for shape in ((2, 2), (2,)):
        with pytest.raises(ValueError, match=r"; Wrong drew .* \(2,\). Use"):
            Wrong().draw(shape, rng())


def draw(kind="weight", shape=(20, 30), dtype="float64", init=None, seed=3,
         index=5, own=None):
    return draw_parameter(kind, shape, dtype, init, seed=seed, index=index,
                          own=own)


def test_the_layers_own_initializer_wins():
    own = ("constant", {"value": 2})
    for kind in ("weight", "bias", "gamma", "beta", "running_mean",
                 "running_var"):
        assert (draw(kind, init=Normal(), own=own) == 2).all()
        np.testing.assert_array_equal(
            draw(kind, init=One(), own=("normal", {"sigma": 0.2})),
            draw("weight", init=Normal(0.2)))


class TestAgainstGluon:
    """Compared with Gluon's initializers and with its networks."""

    __test__ = "mxnet" in BACKENDS      # else there is nothing to compare to

    @pytest.fixture
    def mx(self):
        with mgpu.using_backend("mxnet"):
            import mxnet
            yield mxnet

    def test_names(self, mx):
        theirs = mx.registry.get_registry(mx.init.Initializer)
        for name, kind in initializers._NAMES.items():
            assert theirs[name].__name__ == kind.__name__

    def test_arguments(self, mx):
        def arguments(module, kind):
            return [(p.name, p.default) for p in inspect.signature(
                getattr(module, kind.__name__)).parameters.values()]
        for kind in set(initializers._NAMES.values()):
            assert arguments(initializers, kind) == arguments(mx.init, kind)

    def test_gluons_own_objects_are_taken(self, mx):
        for init in ALL:
            theirs = eval(repr(init).replace("[[", "array([[").replace(
                "]]", "]])"), {**vars(mx.init), "array": mx.nd.array})
            assert create(theirs) == create(theirs.dumps()) == init
        assert Constant(mx.nd.array([1, 2])) == Constant([1, 2])

        with pytest.raises(ValueError, match="sigma with it"):
            create(mx.init.Normal(), sigma=1)

    @pytest.mark.parametrize("init, shape", [
        (Zero(), (2, 3)), (One(), (2, 3)), (Constant(0.1), (2, 3)),
        (Bilinear(), (2, 3, 4, 4)), (Bilinear(), (3, 1, 5, 5)),
        (LSTMBias(0.7), (12,)), (LSTMBias(), (8, 3)),
    ], ids=str)
    def test_deterministic_ones_are_equal(self, mx, init, shape):
        theirs = mx.nd.zeros(shape)
        eval(repr(init), vars(mx.init))(mx.init.InitDesc("weight"), theirs)
        np.testing.assert_array_equal(
            draw(shape=shape, dtype="float32", init=init), theirs.asnumpy(),
            strict=True)

    @staticmethod
    def own(parameter):
        """A parameter's initializer as (name, options), or None."""
        init = parameter.init
        if init is None:
            return None
        return (init, {}) if isinstance(init, str) \
            else tuple(json.loads(init.dumps()))

    @staticmethod
    def kind(name):
        for kind in ("bias", "gamma", "beta", "running_mean", "running_var"):
            if name.endswith(kind):
                return kind
        return "weight"

    @pytest.mark.parametrize("init", [Constant(0.3), Normal(), Xavier(),
                                      None], ids=str)
    def test_a_network_starts_as_in_gluon(self, mx, init):
        nn, rnn = mx.gluon.nn, mx.gluon.rnn
        net = nn.Sequential()
        net.add(nn.Conv2D(4, 3, in_channels=2), nn.BatchNorm(in_channels=4),
                nn.BatchNorm(in_channels=4, gamma_initializer="zeros",
                             running_mean_initializer=mx.init.Constant(5)),
                nn.Conv2DTranspose(4, 4, in_channels=4,
                                   weight_initializer="bilinear"),
                nn.Dense(5, in_units=6, bias_initializer=mx.init.One()),
                nn.Dense(5, in_units=6,
                         weight_initializer=mx.init.Normal(2)),
                nn.Embedding(7, 3), nn.LayerNorm(in_channels=3),
                nn.GroupNorm(2), nn.PReLU(),
                rnn.LSTM(4, input_size=3),
                rnn.LSTMCell(4, input_size=3, i2h_bias_initializer=mx.init
                             .LSTMBias(2.0)))
        net.initialize(eval(repr(init), vars(mx.init)) or mx.init.Uniform())
        random = 0
        for index, (name, parameter) in enumerate(
                net.collect_params().items()):
            theirs = parameter.data().asnumpy()
            ours = draw(self.kind(name), theirs.shape, "float32", init,
                        index=index, own=self.own(parameter))
            if len(np.unique(theirs)) < max(theirs.size / 2, 2) \
                    or name.endswith("bias"):       # not random
                np.testing.assert_array_equal(ours, theirs, err_msg=name,
                                              strict=True)
            else:
                random += 1
                # Weights of 21 values and more; a spread three times too
                # large or small is far outside what chance gives.
                assert 1 / 3 < ours.std() / theirs.std() < 3, name
        assert random == (1 if init == Constant(0.3) else 8)

    def test_a_bias_without_initializer(self, mx):
        """Gluon draws it as a weight, and it is to be described as one."""
        layer = mx.gluon.nn.Dense(3, in_units=2, bias_initializer=None)
        layer.initialize(mx.init.Constant(0.5))
        assert layer.bias.data().asnumpy().tolist() \
            == draw("weight", (3,), init=Constant(0.5)).tolist()


@pytest.mark.parametrize("error, make_bad, message", [
    (ValueError, lambda: Normal(-0.1), "sigma of Normal .*0 or more.*-0.1"),
    (ValueError, lambda: Orthogonal(rand_type="gaussian"),
     "rand_type.*'gaussian'.*'uniform', 'normal'"),
    (ValueError, lambda: Xavier("normal"),
     "rnd_type.*'normal'.*'uniform', 'gaussian'"),
    (ValueError, lambda: Constant("many"), "string to float: 'many'"),
    (ValueError, lambda: Constant([1, 2]).draw((2, 3), rng()),
     r"broadcast.*\(2, ?3\)"),
    (ValueError, lambda: Bilinear().draw((2, 3), rng()), r"4 axes.*\(2, 3\)"),
    (ValueError, lambda: Normal().draw((2, 0), rng()), r"known.*\(2, 0\)"),
    (ValueError, lambda: fans((3,)), r"2 axes.*\(3,\)"),
    (ValueError, lambda: create("glorot"), "'glorot'.*'zeros'.*'xavier'"),
    (ValueError, lambda: create("normal", scale=1),
     "options of Normal.*sigma.*scale"),
    (ValueError, lambda: create("constant"),
     "options of Constant.*missing.*value"),
    (ValueError, lambda: create("[normal"), "char 1"),
    (TypeError, lambda: create(0.01), "0.01 of type float.*'normal'"),
    (TypeError, lambda: create(Normal), "Normal'> of type .*not the class"),
    (ValueError, lambda: draw("other"), "kind; received 'other'"),
    (ValueError, lambda: draw(dtype="int32"), "floating.* 'int32'"),
    (ValueError, lambda: draw(dtype="float16", init=Constant(1e6)),
     "finite in float16"),
    (ValueError, lambda: draw(seed=-1), "seed must .* -1"),
])
def test_bad_input_is_refused(error, make_bad, message):
    with pytest.raises(error, match=message):
        make_bad()
