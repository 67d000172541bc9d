"""Put a network on devices, and initialize its parameters."""
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mgpu import distributed
from mgpu.backends import Backend, backend_for, give_back, messages
from mgpu.backends.device import Device, as_devices
from mgpu.backends.network import Network, Options, Spec
from mgpu.data.inputs import inputs_for
from mgpu.data.nested import map_leaves
from mgpu.nn import initializers
from mgpu.training.parameters import BUFFERS
from mgpu.training.replicas.replicas import Replicas, initialized, keep
from mgpu.utils.arguments import integer, one_given, one_of

BATCH_NORM = ("per_device", "average", "sync")
_DTYPES = ("float16", "float32", "float64")

#: how many networks existed when `_collect` last looked
_left = 0


class Drawing:
    """The initial values of a network, by the arguments of `initialize`.

    Raises what `initialize` does of its arguments `init` and `seed`.
    """

    def __init__(self, network: Network, init: Any, seed: int | None,
                 force_reinit: bool, dtype: str | None) -> None:
        self._network, self._dtype = network, dtype
        self._seed = 0 if seed is None else integer("seed", seed, 0)
        keep = isinstance(init, str) and init == "keep"
        self._rule = initializers.create(
            initializers.Uniform(0.07) if init is None or keep else init)
        self._everything = not keep and (init is not None or force_reinit)
        self._missing = network.missing()
        self._values: dict[str, np.ndarray] = {}
        specs = network.specs()
        if keep and self._missing:
            raise RuntimeError(
                "init='keep' requires a network with values; received none "
                f"for {[s.name for s in specs if s.name in self._missing]}. "
                "Load or initialize these first, or choose an initializer "
                "for all parameters.")
        if seed is not None and not (self._everything or self._missing):
            raise ValueError(
                "seed= requires parameters to initialize; received "
                f"seed={seed} for a network that has all values. Pass init= "
                "('uniform' is Gluon's default) to initialize, or no seed.")
        # Parameters come first, so that their indices follow the layers;
        # parameters that the other backend does not have come last.
        self._numbers = {spec.name: number for number, spec in enumerate(
            sorted(specs, key=lambda spec: spec.constant is not None))}
        self._rule.check_names([spec.name for spec in specs], [
            spec.name for _, spec in self._drawn()
            if spec.kind in ("weight", "unknown") and spec.init is None])
        # Raise for an unknown initializer before anything changes.
        for _, spec in self._drawn():
            name, own = spec.init or ("zero", {})
            try:
                initializers.create(name, **own)
            except ValueError as error:
                raise ValueError(
                    f"parameter {spec.name!r}: {error}") from None
        self.known()
        trained = [s for s in specs
                   if s.kind not in BUFFERS and s.constant is None]
        count = sum(map(self._is_drawn, trained))
        #: description of the values for ``repr(replicas)``
        self.origin = (f"{len(trained) - count} parameters kept, {count} "
                       "drawn") + (f" by {self._rule!r}" if count else "")

    def _is_drawn(self, spec: Spec) -> bool:
        if spec.kind == "other":        # a counter restarts
            return self._everything \
                and spec.name.endswith("num_batches_tracked")
        return spec.name in self._missing \
            or self._everything and spec.kind != "unknown"

    def _drawn(self) -> Iterator[tuple[int, Spec]]:
        return ((number, spec)
                for number, spec in enumerate(self._network.specs())
                if self._is_drawn(spec))

    def _draw(self, spec: Spec, shape: tuple[int, ...]) -> np.ndarray:
        if spec.kind == "other":
            return np.zeros(shape, spec.dtype)
        return initializers.draw_parameter(
            "weight" if spec.kind == "unknown" else spec.kind, shape,
            self._dtype or spec.dtype, self._rule, seed=self._seed,
            index=self._numbers[spec.name], name=spec.name, own=spec.init)

    def known(self) -> dict[str, np.ndarray]:
        """The initial values of all parameters of known shape, by name."""
        for _, spec in self._drawn():
            if spec.shape is not None and spec.name not in self._values:
                self._values[spec.name] = self._draw(spec, spec.shape)
        return self._values

    def by_shape(self) -> dict[int, Callable[[tuple[int, ...]], np.ndarray]]:
        """By index of each initialized parameter, a function of its shape."""
        return {number: partial(self._draw, spec)
                for number, spec in self._drawn()}


def _options(network: Network, batch_norm: str, dtype: str | None,
             hybridize: Any, channels_last: Any, autocast: Any,
             several: bool) -> Options:
    one_of("batch_norm", batch_norm, BATCH_NORM)
    if dtype is not None:
        one_of("dtype", dtype, _DTYPES)
    one_of("hybridize", hybridize, (True, False))
    one_of("channels_last", channels_last, (True, False))
    one_of("autocast", autocast, (None, "bfloat16", "float16"))
    messages.check_by_layer(hybridize, batch_norm)
    others = sorted({dtype or spec.dtype for spec in network.specs()
                     if "float" in spec.dtype} - {"float32"})
    if autocast is not None and others:
        raise ValueError(
            "autocast requires a float32 network; received "
            f"autocast={autocast!r} with {', '.join(others)}. Use "
            "dtype='float32', or autocast=None.")
    return Options(bool(hybridize), bool(channels_last), autocast,
                   several and batch_norm == "sync")


def _collect(size: int) -> None:
    """Free unreferenced networks before allocating one of `size` bytes.

    They are in reference cycles, which Python itself collects only after
    hundreds of networks, large ones too. A collection takes 0.1 to 0.4 s.
    """
    global _left
    if initialized and (size >= 64 << 20
                        or len(initialized) > 2 * _left + 16):
        gc.collect()
        _left = len(initialized)
    if not initialized:
        give_back()


def _span(backend: Backend, devices: Sequence[Device],
          options: dict[str, Any]) -> distributed.Span:
    """The position of `devices` among those of all ranks. Raises
    `mgpu.errors.ModelMismatch` unless packages and `options` agree."""
    world = distributed.current()
    if world.size > 1:
        world.agree("mgpu.initialize", {
            "versions": {"numpy": np.__version__,
                         backend.name: backend.version}, **options},
            "Use the same packages, and the same arguments, on every rank.")
    return world.span(len(devices))


def initialize(net: Any, devices: Any = None, init: Any = None,
               seed: int | None = None, sample: Any = None,
               force_reinit: bool = False,
               dtype: str | None = None, *,
               batch_norm: str = "per_device", hybridize: bool = False,
               channels_last: bool = False, autocast: str | None = None,
               ctx: Any = None) -> Replicas:
    """Put a network on a list of devices, with the same values on each.

    The network's values are kept. Parameters without values are initialized:
    those of `mgpu.models`, and of Gluon networks without
    ``net.initialize()``. Gluon completes a deferred ``net.initialize(X)``
    when shapes are known, and torch initializes its lazy layers. `init`
    initializes all parameters. ``repr(replicas)`` shows how many were kept
    and how many were initialized ("drawn").

    Parameters
    ----------
    net : gluon.Block or torch.nn.Module
        Trained in place: see `Replicas.net`.
    devices, ctx : device, or sequence of distinct devices
        Pass one of them: `ctx` is Gluon's name.
    init : Initializer, str, function of ``torch.nn.init``, "keep" or None
        Initializes all weights, once, in NumPy, from (`seed`, index of the
        parameter): bit-identical on all devices and, for the same layers in
        the same order, on both backends. Biases, gammas, betas and running
        statistics follow Gluon's rules (0, 1, 0, 0 and 1), and a layer's own
        Gluon initializer takes precedence. Parameters of unknown kind (a
        vector that scales a layer, user-defined names) keep their values.
        None initializes only parameters without values, by Gluon's default
        ``Uniform(0.07)``. "keep" raises if a value is missing. A function of
        ``torch.nn.init``, or `functools.partial` of one with options, has
        torch's formula, fans and defaults, with NumPy's random numbers, on
        either backend; it initializes weights, and biases are 0 as above. For
        user-defined functions, or biases, call ``net.apply(f)`` before
        ``initialize``, and pass no `init`.
    seed : int, optional
        Of the initial values; 0 by default.
    sample : array, tuple or list of arrays, or Kwargs, optional
        An input of the network, to complete deferred or lazy shapes; NumPy
        floats are cast to the dtype of the network. Without it the first
        forward pass completes the shapes.
    force_reinit : bool
        Initialize everything again, running statistics included; with
        ``init="keep"``: keep the values. (A second `initialize` of a network
        invalidates the replicas of the first one.)
    dtype : str, optional
        Cast the network, for example to ``"float64"``.
    batch_norm : {"per_device", "average", "sync"}
        "per_device": running statistics of each device. "average": their
        mean after each step. "sync": statistics of the whole batch, over the
        devices of all ranks.
    hybridize : bool
        Compile the network: Gluon's ``hybridize(static_alloc=True)``,
        ``torch.compile`` with static shapes. A new input shape (a short last
        batch) is compiled at its first use, which takes many seconds on
        torch. Results agree to rounding (on MXNet bit for bit); dropout masks
        are the same. Not supported with "sync".
    channels_last : bool
        Store 4-d weights and inputs with the channels last (torch; results
        agree to rounding). No effect on MXNet, which does not support it.
    autocast : {None, "bfloat16", "float16"}
        Torch only: run the forward pass, and in `train_batch` the loss,
        under ``torch.autocast`` of that dtype. Weights, gradients, running
        statistics and the network's outputs are float32. bfloat16 rounds to
        2**-8 relative, float16 to 2**-11, and may need the `loss_scale` of
        `Trainer`.

        See docs/guide/options.md for the last three options.

    Raises
    ------
    TypeError
        `net` is not a network, or of another backend than the one selected by
        `mgpu.set_backend`, `mgpu.using_backend` or ``MGPU_BACKEND``. Without
        a selection the network determines the backend.
    RuntimeError
        "keep" and the network has no values; or `hybridize` without a
        compiler.
    ValueError
        An invalid option or device, or an option that the backend does not
        support for this network; a `seed` without parameters to initialize.
        Nothing has changed.
    """
    backend = backend_for(net)
    devices = as_devices(one_given(devices=devices, ctx=ctx))
    network = backend.network(net)
    options = _options(network, batch_norm, dtype, hybridize, channels_last,
                       autocast, len(devices) * distributed.current().size > 1)
    network.check(dtype, devices)
    _collect(4 * len(devices) * sum(
        math.prod(spec.shape) for spec in network.specs() if spec.shape))
    drawing = Drawing(network, init, seed, force_reinit, dtype)
    network.prepare(options, devices)
    before = {s.dtype for s in network.specs() if "float" in s.dtype}
    if dtype is not None:
        network.cast(dtype)
    span = _span(backend, devices, {
        "batch_norm": batch_norm, "dtype": dtype, "hybridize": bool(hybridize),
        "autocast": autocast})
    deferred = sample is None and any(
        spec.shape is None for spec in network.specs()) \
        and network.defer(devices, drawing.by_shape())
    # The backend initializes deferred parameters.
    replicas = Replicas(network, backend, devices, batch_norm,
                        dict if deferred else drawing.known, drawing.origin,
                        span)
    floats = dtype or min(before, default=None)

    def place(x: Any) -> Any:
        cast = isinstance(x, np.ndarray) and x.dtype.kind == "f"
        return backend.put(x, devices[0], dtype=floats if cast else None)
    try:
        replicas.complete_values(None if sample is None else inputs_for(
            map_leaves(place, sample), network.inputs), devices[0])
    except BaseException:       # a sample that does not fit
        if dtype is not None and len(before) == 1:
            network.cast(*before)
        raise
    keep(replicas)
    backend.number_devices(span.first)
    return replicas
