"""Initial values of parameters, drawn in NumPy.

The formulas, names and arguments are those of Gluon 1.9.1
(`mxnet/initializer.py`); the random numbers are NumPy's. So both engines,
and every device, start from the same bits, which no seeding of the two
frameworks could give.

`initialize` takes an initialiser object or a name::

    Normal(sigma=0.01)      "normal"        create("normal", sigma=0.01)

An initialiser draws *weights*. What a bias, or the gamma of a batch norm,
starts from is a rule of its own: `draw_parameter`.
"""
import copy
import dataclasses
import json
import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mgpu.arguments import integer, number, one_of
from mgpu.backends import base, given

__all__ = ["Initializer", "Zero", "One", "Constant", "Uniform", "Normal",
           "Orthogonal", "Xavier", "MSRAPrelu", "Bilinear", "LSTMBias",
           "create", "draw_parameter", "fans"]

_FACTOR_TYPES = ("avg", "in", "out")


def _known_shape(shape: Any, axes: int = 0) -> tuple[int, ...]:
    """`shape` as a tuple of positive ints, of so many `axes` or more;
    ValueError for anything else."""
    try:
        known = tuple(operator.index(n) for n in shape)
    except TypeError:
        known = (0,)
    if any(n < 1 for n in known):
        raise ValueError(
            "values are drawn for a known shape without empty axes; received "
            f"{shape!r}. Give the layer its input size, or pass a sample "
            "batch so that the shapes can be inferred.")
    if len(known) < axes:
        raise ValueError(
            f"this initialiser needs a weight of {axes} axes or more; "
            f"received the shape {shape}. Use Normal, Uniform or Constant.")
    return known


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
            Of the parameter; read by initialisers of the frameworks' own.
        dtype : str or numpy.dtype
            What the float64 values are rounded to.

        Returns
        -------
        numpy.ndarray
            A new array.

        Raises
        ------
        ValueError
            An unknown or empty shape, a shape that this initialiser cannot
            serve, or values that are not finite in `dtype`.
        """
        shape = _known_shape(shape)
        values = np.asarray(self._named(name, shape, rng), np.float64)
        if values.shape != shape:
            raise ValueError(
                f"{type(self).__name__}.sample must return the shape that it "
                f"is asked for, {shape}; received {values.shape}.")
        with np.errstate(over="ignore"):        # refused below, in words
            values = values.astype(dtype)
        if not np.isfinite(values).all():
            raise ValueError(
                f"initial values must be finite in {values.dtype}; "
                f"{type(self).__name__} drew others for the shape {shape}. "
                "Use a smaller scale or a wider dtype.")
        return values

    def _named(self, name: str, shape: tuple[int, ...],
               rng: np.random.Generator) -> np.ndarray:
        return self.sample(shape, rng)

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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Constant(Initializer):
    """A given value.

    Parameters
    ----------
    value : number or array_like
        Copied, as float64. An array must broadcast to the parameter's
        shape. (`repr` spells arrays of up to 1000 numbers out.)
    """

    value: Any

    def __post_init__(self):
        # MXNet's arrays do not convert through np.asarray.
        value = getattr(self.value, "asnumpy", lambda: self.value)()
        try:
            value = np.array(value, dtype=np.float64)
        except (TypeError, ValueError):
            value = np.array(np.nan)
        if not np.isfinite(value).all():
            raise ValueError(
                "value of Constant must be a finite number, or an array of "
                f"them; received {self.value!r}.")
        value.setflags(write=False)
        object.__setattr__(self, "value", value if value.ndim else
                           float(value))

    def sample(self, shape, rng):
        return np.broadcast_to(self.value, shape)

    def __eq__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        return np.array_equal(self.value, other.value)

    def __hash__(self):
        return hash((type(self), np.shape(self.value)))

    def __repr__(self):
        value = self.value
        if np.size(value) > 1000:
            return f"Constant(value=<array of shape {value.shape}>)"
        return f"Constant(value={np.asarray(value).tolist()!r})"


@dataclasses.dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform on [-`scale`, `scale`]; Gluon's default for weights."""

    scale: float = 0.07
    _options = {"scale": 0}

    def sample(self, shape, rng):
        return rng.uniform(-self.scale, self.scale, shape)


@dataclasses.dataclass(frozen=True)
class Normal(Initializer):
    """Normal with mean 0 and standard deviation `sigma`."""

    sigma: float = 0.01
    _options = {"sigma": 0}

    def sample(self, shape, rng):
        return rng.normal(0.0, self.sigma, shape)


@dataclasses.dataclass(frozen=True)
class Orthogonal(Initializer):
    """`scale` times a matrix with orthonormal rows, or columns where there
    are more rows than columns.

    The matrix is (shape[0], all other axes); it is a factor of the singular
    value decomposition of a random matrix, uniform on [-1, 1] or standard
    normal (`rand_type` "uniform" or "normal"). The default scale is Gluon's
    1.414, which is not quite the square root of 2.

    The decomposition is LAPACK's: the last bits may change with the NumPy
    build, but not with the engine or the device.

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
        if self.rand_type == "uniform":
            start = rng.uniform(-1.0, 1.0, matrix)
        else:
            start = rng.normal(0.0, 1.0, matrix)
        u, _, v = np.linalg.svd(start, full_matrices=False)
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
        c = math.sqrt(self.magnitude / factor)
        if self.rnd_type == "uniform":
            return rng.uniform(-c, c, shape)
        return rng.normal(0.0, c, shape)


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
        if not shape or shape[0] % 4:
            raise ValueError(
                "LSTMBias needs four blocks of equal size on axis 0; "
                f"received the shape {shape}.")
        values = np.zeros(shape)
        hidden = shape[0] // 4
        values[hidden:2 * hidden] = self.forget_bias
        return values


class _Foreign(Initializer):
    """One of a framework's own, of a class that the user has written."""

    def __init__(self, given: base.GivenInitializer) -> None:
        self._given = given

    def __repr__(self):
        return self._given.text

    def sample(self, shape, rng):
        return self._named("weight", shape, rng)

    def _named(self, name, shape, rng):
        return self._given.draw(name, shape, rng)


class _ByName(Initializer):
    """MXNet's Mixed: the first whose pattern a name matches."""

    def __init__(self, choices: list[tuple[re.Pattern[str], Initializer]]
                 ) -> None:
        self._choices = choices

    def __repr__(self):
        return f"Mixed({[(p.pattern, rule) for p, rule in self._choices]!r})"

    def check_names(self, names, weights):
        for pattern, _ in self._choices:
            if not any(map(pattern.match, names)):
                raise ValueError(
                    "patterns of mx.init.Mixed match names from their "
                    f"beginning; received {pattern.pattern!r}, which matches "
                    f"none of {list(names)}. These are paths, as in "
                    "'0.weight', not Gluon's 'dense0_weight'.")
        for name in weights:
            self._choose(name)

    def sample(self, shape, rng):
        return self._named("weight", shape, rng)

    def _named(self, name, shape, rng):
        return self._choose(name).draw(shape, rng, name)

    def _choose(self, name: str) -> Initializer:
        for pattern, rule in self._choices:
            if pattern.match(name):
                return rule
        raise ValueError(
            "a weight has the first initialiser of mx.init.Mixed whose "
            f"pattern its name matches; received {name!r} and "
            f"{[pattern.pattern for pattern, _ in self._choices]}. Add '.*' "
            "with a default at the end.")


#: Gluon's registered names, lower case.
_NAMES: dict[str, type[Initializer]] = {
    "zero": Zero, "zeros": Zero, "one": One, "ones": One,
    "constant": Constant, "uniform": Uniform, "normal": Normal,
    "orthogonal": Orthogonal, "xavier": Xavier, "msraprelu": MSRAPrelu,
    "bilinear": Bilinear, "lstmbias": LSTMBias,
}


def create(init: Any, /, **options: Any) -> Initializer:
    """The initialiser that `init` names.

    Parameters
    ----------
    init : Initializer, str, or a Gluon initialiser
        An `Initializer` is returned as it is. A name is one of Gluon's, in
        any case: "zeros", "normal", "xavier", ... `mx.init.Normal(0.1)` and
        what its `dumps()` gives, ``'["normal", {"sigma": 0.1}]'``, become
        the initialiser of this module. One of a class of the user's, derived
        from `mx.init.Initializer`, is called by its ``_init_weight`` with
        mgpu's name of each weight, on either engine. With
        ``mx.init.Mixed`` the patterns see these names, such as
        ``"0.weight"``; it says what draws weights, and biases, gammas and
        betas are as always. `mx.init.Load` is refused.
    **options
        Of the initialiser that is named: ``create("normal", sigma=0.1)``.

    Raises
    ------
    ValueError
        An unknown name or option; the message lists what there is. Options
        together with an initialiser that has its own.
    TypeError
        Something that names no initialiser.
    """
    name = init
    if not isinstance(init, (Initializer, str, type)):
        engine = given(init)
        own = engine.initializer(init) if engine is not None else None
        if isinstance(own, list):
            return _ByName([(pattern, create(x)) for pattern, x in own])
        if own is not None:
            return _Foreign(own)
    if not isinstance(init, (Initializer, str, type)) \
            and hasattr(init, "dumps"):
        # A copy: Gluon's Constant changes itself, and cannot do it twice.
        name = copy.deepcopy(init).dumps()
    if not isinstance(name, (Initializer, str)):
        raise TypeError(
            f"expected an initialiser; received {init!r} of type "
            f"{type(init).__name__}. Use for example Normal(0.01), an object "
            "and not the class, or one of the names "
            f"{', '.join(map(repr, _NAMES))}. Call a function of your own on "
            "the network before mgpu.initialize, which keeps its values.")
    is_json = isinstance(name, str) and name.startswith("[")
    if options and (is_json or not isinstance(init, str)):
        raise ValueError(
            "options go with a name; received the initialiser "
            f"{init!r} and {', '.join(options)} with it. Set the options "
            "where the initialiser is made.")
    if isinstance(name, Initializer):
        return name
    if is_json:
        name, options = json.loads(name)
    kind: Any = _NAMES.get(str(name).lower())
    if kind is None:
        raise ValueError(
            f"unknown initialiser; received {name!r}. Use one of "
            f"{', '.join(map(repr, _NAMES))}, or an object of a class of "
            "mgpu.initializers.Initializer. What the framework draws stays: "
            "initialize the network first, and pass no init=.")
    try:
        made: Initializer = kind(**options)
    except TypeError as error:
        raise ValueError(
            f"wrong options of {kind.__name__}: {error}. They are "
            f"{[field.name for field in dataclasses.fields(kind)]}."
            ) from None
    return made


#: What the kinds other than weights start from (Gluon gives the layers'
#: biases, gammas and so on these initialisers).
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

    The layer's own initialiser comes first; then the rule of the kind (bias
    0, gamma 1, beta 0, running mean 0, running variance 1); `init` is for
    weights. That is what Gluon's layers do, where the rules are the default
    initialisers of their parameters.

    Each parameter has a generator of its own, so that its value depends on
    `seed`, `index`, `shape` and the initialiser only: not on the engine,
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
        The layer's own initialiser, in Gluon's terms.

    Returns
    -------
    numpy.ndarray
        A new array of `dtype`.

    Raises
    ------
    ValueError
        A kind that is never drawn ("other": such values are copied as they
        are), an unknown or empty shape, another dtype, a negative seed or
        index, a bad initialiser, or values that are not finite in `dtype`.
    """
    if kind != "weight" and kind not in _BY_KIND:
        raise ValueError(
            "only a weight, "
            f"{', '.join(_BY_KIND)} can be drawn; received the kind "
            f"{kind!r}. Other values are copied from the network as they "
            "are.")
    if own is not None:
        rule = create(own[0], **own[1])
    elif kind != "weight":
        rule = _BY_KIND[kind]
    else:
        rule = Uniform() if init is None else create(init)
    try:        # NumPy would take None for float64
        wanted = np.dtype("unknown" if dtype is None else dtype)
    except TypeError:
        wanted = np.dtype(bool)
    if wanted.kind != "f":
        raise ValueError(
            "initial values are drawn in a floating-point dtype that NumPy "
            f"has; received {dtype!r}. Use 'float32' or 'float64'.")
    return rule.draw(shape, np.random.default_rng(
        [integer("seed", seed, 0), integer("index", index, 0)]), name, wanted)
