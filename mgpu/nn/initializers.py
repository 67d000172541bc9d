"""Initial values of parameters, drawn in NumPy.

The formulas, names and arguments are those of Gluon 1.9.1
(`mxnet/initializer.py`); the random numbers are NumPy's. So both backends,
and every device, start from the same bits, which no seeding of the two
frameworks could give.

`initialize` takes an initializer object or a name::

    Normal(sigma=0.01)      "normal"        create("normal", sigma=0.01)

An initializer draws *weights*. What a bias, or the gamma of a batch norm,
starts from is a rule of its own: `draw_parameter`.
"""
import copy
import dataclasses
import inspect
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mgpu.backends import given
from mgpu.backends.native_objects import GivenInitializer
from mgpu.utils.arguments import integer, number, one_of

__all__ = ["Initializer", "Zero", "One", "Constant", "Uniform", "Normal",
           "Orthogonal", "Xavier", "MSRAPrelu", "Bilinear", "LSTMBias",
           "create", "draw_parameter", "fans"]

_FACTOR_TYPES = ("avg", "in", "out")


def _known_shape(shape: Sequence[int] | None, axes: int = 0
                 ) -> tuple[int, ...]:
    """`shape`, or ValueError if it is unknown or has fewer `axes`."""
    known = (0,) if shape is None else tuple(shape)
    if len(known) < axes or any(n < 1 for n in known):
        raise ValueError(
            f"the initializer needs a weight of {axes} axes or more, none of "
            f"them unknown or empty; received {shape!r}. Give the layer its "
            "input size, or pass a sample batch.")
    return known


def _random(kind: str, scale: float, shape: tuple[int, ...],
            rng: np.random.Generator) -> np.ndarray:
    """Uniform on [-scale, scale], or normal."""
    return rng.uniform(-scale, scale, shape) if kind == "uniform" \
        else rng.normal(0.0, scale, shape)


def fans(shape: Sequence[int]) -> tuple[int, int]:
    """Numbers of inputs and of outputs of one unit: ``(fan_in, fan_out)``.

    Gluon's rule: the axes after the second are the size of the kernel;
    ``fan_in = shape[1] * kernel`` and ``fan_out = shape[0] * kernel``. It
    reads only the shape. A transposed convolution stores (in, out, h, w),
    so there the two change places, in Gluon as well.

    Raises
    ------
    ValueError
        Fewer than two axes.
    """
    shape = _known_shape(shape, 2)
    kernel = math.prod(shape[2:])
    return shape[1] * kernel, shape[0] * kernel


class Initializer(ABC):
    """A rule that draws the initial values of a weight.

    A subclass defines `sample`. A frozen dataclass, as those of this module
    are, compares by its options and prints as the call that makes it.
    """

    @abstractmethod
    def sample(self, shape: tuple[int, ...],
               rng: np.random.Generator) -> np.ndarray:
        """Values of the shape `shape`, drawn from `rng` only. Called by
        `draw`, which checks what goes in and what comes out."""

    def draw(self, shape: Sequence[int] | None,
             rng: np.random.Generator, name: str = "weight",
             dtype: Any = np.float64) -> np.ndarray:
        """Draw a weight.

        Parameters
        ----------
        shape : sequence of int
            As the layer stores it: (out, in, ...).
        rng : numpy.random.Generator
            Advanced by the draw.
        name : str
            Of the parameter; read by initializers of the frameworks' own.
        dtype : str or numpy.dtype
            What the float64 values are rounded to.

        Returns
        -------
        numpy.ndarray
            A new array.

        Raises
        ------
        ValueError
            An unknown or empty shape, a shape that this initializer does not
            support, or values that are not finite in `dtype`.
        """
        shape = _known_shape(shape)
        rule = self._of(name)
        values = np.asarray(rule.sample(shape, rng), np.float64)
        with np.errstate(over="ignore"):        # raises below
            values = values.astype(dtype)
        if values.shape != shape or not np.isfinite(values).all():
            raise ValueError(
                f"initial values must be finite in {values.dtype}, and of the "
                f"shape {shape}; {type(rule).__name__} drew others, of shape "
                f"{values.shape}. Use a smaller scale or a wider dtype.")
        return values

    def _of(self, name: str) -> "Initializer":
        """What draws the parameter `name`."""
        return self

    def check_names(self, names: Sequence[str], weights: Sequence[str]
                    ) -> None:
        """Before a network with parameters `names` is drawn, of which it
        draws `weights`. ValueError where it cannot."""
        return

    #: what an option may be: a number of so much or more, or one of these
    _options: ClassVar[dict[str, float | tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for name, rule in self._options.items():
            check: Any = one_of if isinstance(rule, tuple) else number
            object.__setattr__(self, name, check(
                f"{name} of {type(self).__name__}", getattr(self, name),
                rule))


@dataclasses.dataclass(frozen=True)
class Zero(Initializer):
    """All zeros."""

    def sample(self, shape, rng):
        return np.zeros(shape)


@dataclasses.dataclass(frozen=True)
class One(Initializer):
    """All ones."""

    def sample(self, shape, rng):
        return np.ones(shape)


@dataclasses.dataclass(frozen=True, repr=False)
class Constant(Initializer):
    """A given value.

    Parameters
    ----------
    value : number or array_like
        Copied, as float64. An array must broadcast to the parameter's
        shape. (`repr` spells arrays of up to 1000 numbers out.)
    """

    value: Any = dataclasses.field(compare=False)
    _compared: Any = dataclasses.field(init=False)

    def __post_init__(self):
        # MXNet's arrays do not convert through np.asarray.
        value = getattr(self.value, "asnumpy", lambda: self.value)()
        value = np.array(value, dtype=np.float64)
        if not np.isfinite(value).all():
            raise ValueError(
                "value of Constant must be a finite number, or an array of "
                f"them; received {self.value!r}.")
        value.setflags(write=False)
        vars(self).update(value=value if value.ndim else float(value),
                          _compared=(value.shape, value.tobytes()))

    def sample(self, shape, rng):
        return np.broadcast_to(self.value, shape)

    def __repr__(self):
        value = np.asarray(self.value)
        return "Constant(value=" + (
            f"<array of shape {value.shape}>" if value.size > 1000
            else repr(value.tolist())) + ")"


@dataclasses.dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform on [-`scale`, `scale`]; Gluon's default for weights."""

    scale: float = 0.07
    _options = {"scale": 0}

    def sample(self, shape, rng):
        return _random("uniform", self.scale, shape, rng)


@dataclasses.dataclass(frozen=True)
class Normal(Initializer):
    """Normal with mean 0 and standard deviation `sigma`."""

    sigma: float = 0.01
    _options = {"sigma": 0}

    def sample(self, shape, rng):
        return _random("normal", self.sigma, shape, rng)


@dataclasses.dataclass(frozen=True)
class Orthogonal(Initializer):
    """`scale` times a matrix with orthonormal rows, or columns where there
    are more rows than columns.

    The matrix is (shape[0], all other axes); it is a factor of the singular
    value decomposition of a random matrix, uniform on [-1, 1] or standard
    normal (`rand_type` "uniform" or "normal"). The default scale is Gluon's
    1.414, which is not quite the square root of 2.

    The decomposition is LAPACK's: the last bits may change with the NumPy
    build, but not with the backend or the device.

    References
    ----------
    Saxe, McClelland, Ganguli, "Exact solutions to the nonlinear dynamics of
    learning in deep linear neural networks", arXiv:1312.6120.
    """

    scale: float = 1.414
    rand_type: str = "uniform"
    _options = {"scale": 0, "rand_type": ("uniform", "normal")}

    def sample(self, shape, rng):
        shape = _known_shape(shape, 2)
        matrix = (shape[0], math.prod(shape[1:]))
        u, _, v = np.linalg.svd(_random(self.rand_type, 1.0, matrix, rng),
                                full_matrices=False)
        return self.scale * (u if u.shape == matrix else v).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Xavier(Initializer):
    """Scaled by the size of the layer: c = sqrt(magnitude / factor).

    Parameters
    ----------
    rnd_type : {"uniform", "gaussian"}
        Uniform on [-c, c], or normal with standard deviation c.
    factor_type : {"avg", "in", "out"}
        `factor` is the mean of fan-in and fan-out, or one of them: `fans`.
    magnitude : float

    References
    ----------
    Glorot, Bengio, "Understanding the difficulty of training deep
    feedforward neural networks", AISTATS 2010.
    """

    rnd_type: str = "uniform"
    factor_type: str = "avg"
    magnitude: float = 3
    _options = {"rnd_type": ("uniform", "gaussian"),
                "factor_type": _FACTOR_TYPES, "magnitude": 0}

    def sample(self, shape, rng):
        fan_in, fan_out = fans(shape)
        factor = {"avg": (fan_in + fan_out) / 2, "in": fan_in,
                  "out": fan_out}[self.factor_type]
        return _random(self.rnd_type, math.sqrt(self.magnitude / factor),
                       shape, rng)


@dataclasses.dataclass(frozen=True)
class MSRAPrelu(Initializer):
    """For layers before a (leaky) ReLU of slope `slope`: normal with
    variance 2 / ((1 + slope^2) factor), `factor` as in `Xavier`.

    ``MSRAPrelu("in", 0)`` is what PyTorch calls `kaiming_normal_`.

    References
    ----------
    He, Zhang, Ren, Sun, "Delving deep into rectifiers", arXiv:1502.01852.
    """

    factor_type: str = "avg"
    slope: float = 0.25
    _options = {"factor_type": _FACTOR_TYPES, "slope": -math.inf}

    def sample(self, shape, rng):
        magnitude = 2.0 / (1 + self.slope ** 2)
        return Xavier("gaussian", self.factor_type,
                      magnitude).sample(shape, rng)


@dataclasses.dataclass(frozen=True)
class Bilinear(Initializer):
    """The kernel of bilinear upsampling, for a transposed convolution with
    a weight of four axes (Gluon's formula, made for square kernels)."""

    def sample(self, shape, rng):
        shape = _known_shape(shape, 4)
        half = math.ceil(shape[3] / 2)
        centre = (2 * half - 1 - half % 2) / (2 * half)
        y, x = (1 - abs(np.arange(n) / half - centre) for n in shape[2:])
        return np.broadcast_to(np.outer(y, x), shape)


@dataclasses.dataclass(frozen=True)
class LSTMBias(Initializer):
    """The bias of an LSTM: `forget_bias` for the forget gate, the second of
    the four blocks of axis 0, and 0 elsewhere."""

    forget_bias: float = 1.0
    _options = {"forget_bias": -math.inf}

    def sample(self, shape, rng):
        values = np.zeros(shape)
        np.split(values, 4)[1][:] = self.forget_bias
        return values


#: Gluon's registered names, lower case.
_NAMES: dict[str, Any] = {"zeros": Zero, "ones": One, **{
    rule.__name__.lower(): rule for rule in Initializer.__subclasses__()}}


@dataclasses.dataclass(frozen=True)
class _Foreign(Initializer):
    """One of a framework's own, of a class that the user has written."""

    given: GivenInitializer
    name: str = "weight"

    def __repr__(self):
        return self.given.text

    def _of(self, name):
        return dataclasses.replace(self, name=name)

    def sample(self, shape, rng):
        return self.given.draw(self.name, shape, rng)


@dataclasses.dataclass(frozen=True)
class _ByName(Initializer):
    """MXNet's Mixed: the first whose pattern a name matches."""

    choices: Sequence[tuple[re.Pattern[str], Initializer]]

    def __repr__(self):
        return f"Mixed({[(p.pattern, rule) for p, rule in self.choices]!r})"

    def check_names(self, names, weights):
        for pattern, _ in self.choices:
            if not any(map(pattern.match, names)):
                raise ValueError(
                    "patterns of mx.init.Mixed match names from their "
                    f"beginning; received {pattern.pattern!r}, which matches "
                    f"none of {list(names)}. These are paths, as in "
                    "'0.weight', not Gluon's 'dense0_weight'.")
        for name in weights:
            self._of(name)

    def sample(self, shape, rng):
        return self._of("weight").sample(shape, rng)

    def _of(self, name):
        for pattern, rule in self.choices:
            if pattern.match(name):
                return rule._of(name)
        raise ValueError(
            "a weight has the first initializer of mx.init.Mixed whose "
            f"pattern its name matches; received {name!r} and "
            f"{[pattern.pattern for pattern, _ in self.choices]}. Add '.*' "
            "with a default at the end.")


def create(init: Any, /, **options: Any) -> Initializer:
    """Make an initializer from a name or a Gluon initializer.

    Parameters
    ----------
    init : Initializer, str, or a Gluon initializer
        An `Initializer` is returned unchanged. A name is one of Gluon's, in
        any case: "zeros", "normal", "xavier", ... `mx.init.Normal(0.1)` and
        the result of its `dumps()`, ``'["normal", {"sigma": 0.1}]'``, become
        the initializer of this module. For a user-defined class derived
        from `mx.init.Initializer`, mgpu calls ``_init_weight`` with
        its own name of each weight, on either backend. The patterns of
        ``mx.init.Mixed`` match these names, such as ``"0.weight"``; it
        initializes weights, and not biases, gammas and betas. `mx.init.Load`
        is not supported.
    **options
        Options of the named initializer: ``create("normal", sigma=0.1)``.

    Raises
    ------
    ValueError
        An unknown name or option; the message lists what there is. Options
        together with an initializer that has its own.
    TypeError
        Something that names no initializer.
    """
    is_json = isinstance(init, str) and init.startswith("[")
    if options and (is_json or not isinstance(init, str)):
        raise ValueError(
            f"options go with a name; received {init!r} and "
            f"{', '.join(options)} with it. Set them where it is made.")
    if isinstance(init, Initializer):
        return init
    if isinstance(init, str):
        name, options = json.loads(init) if is_json else (init, options)
        kind = _NAMES[one_of("initializer", name.lower(), _NAMES)]
        try:
            return kind(**options)
        except TypeError as error:
            raise ValueError(f"wrong options of {kind.__name__}"
                             f"{inspect.signature(kind)}: {error}") from None
    engine = None if isinstance(init, type) else given(init)
    own = None if engine is None else engine.initializer(init)
    if isinstance(own, list):
        return _ByName([(pattern, create(x)) for pattern, x in own])
    if own is not None:
        return _Foreign(own)
    if isinstance(init, type) or not hasattr(init, "dumps"):
        raise TypeError(
            f"expected an initializer; received {init!r} of type "
            f"{type(init).__name__}. Use for example Normal(0.01), an object "
            f"and not the class, or one of the names {list(_NAMES)}.")
    # A copy: Gluon's Constant changes itself, and cannot do it twice.
    return create(copy.deepcopy(init).dumps())


#: What the kinds other than weights start from (Gluon gives the layers'
#: biases, gammas and so on these initializers).
_BY_KIND: dict[str, Initializer] = {
    "bias": Zero(), "gamma": One(), "beta": Zero(),
    "running_mean": Zero(), "running_var": One(),
}


def draw_parameter(kind: str, shape: Sequence[int] | None,
                   dtype: str | np.dtype,
                   init: Initializer | str | None, *, seed: int,
                   index: int, name: str = "weight",
                   own: tuple[str, dict[str, Any]] | None = None
                   ) -> np.ndarray:
    """The initial value of one parameter or buffer.

    The layer's own initializer comes first; then the rule of the kind (bias
    0, gamma 1, beta 0, running mean 0, running variance 1); `init` is for
    weights. That is what Gluon's layers do, where the rules are the default
    initializers of their parameters.

    Each parameter has a generator of its own, so that its value depends on
    `seed`, `index`, `shape` and the initializer only: not on the backend,
    the devices or what was drawn before. The draw is made in float64 and
    rounded to `dtype` once, so a float32 run starts from the rounded values
    of the float64 run.

    Parameters
    ----------
    kind : {"weight", "bias", "gamma", "beta", "running_mean", "running_var"}
    shape : sequence of int
    dtype : str or numpy.dtype
        A floating-point type that NumPy has.
    init : Initializer, str or None
        For weights, whatever `create` takes; None is ``Uniform(0.07)``.
    seed : int
        Of the network; 0 or more.
    index : int
        The parameter's place in the network; 0 or more.
    name : str
        What it is called there.
    own : (name, options), optional
        The layer's own initializer, in Gluon's terms.

    Returns
    -------
    numpy.ndarray
        A new array of `dtype`.

    Raises
    ------
    ValueError
        A kind that is never drawn ("other": such values are copied as they
        are), an unknown or empty shape, another dtype, a negative seed or
        index, a bad initializer, or values that are not finite in `dtype`.
    TypeError
        A dtype that NumPy does not have.
    """
    rules = {**_BY_KIND, "weight": Uniform() if init is None else init}
    rule = rules[one_of("kind", kind, rules)] if own is None else own[0]
    options = own[1] if own else {}
    # NumPy would take None for float64.
    wanted = np.dtype("None" if dtype is None else dtype)
    if wanted.kind != "f":
        raise ValueError(
            "initial values are drawn in a floating-point dtype; received "
            f"{dtype!r}. Use 'float32' or 'float64'.")
    return create(rule, **options).draw(shape, np.random.default_rng(
        [integer("seed", seed, 0), integer("index", index, 0)]), name, wanted)
