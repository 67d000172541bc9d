"""One side of a comparison: a network, its trainer, and a step at a time."""
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

import mgpu
from mgpu.backends import backend_of, base, get_backend, using_backend
from mgpu.device import Device, list_devices
from mgpu.parity.matching import Entry, Plan
from mgpu.nested import as_inputs, cast_floats, leaves, rows_of
from mgpu.trainer_states import TrainerStates

_STATISTICS = ("running_mean", "running_var")
_COUNTER = "num_batches_tracked"


class CannotRun(AttributeError):
    """Something was asked of a trace that only a network can do."""


@dataclass
class Side:
    """A network and how it trains. What is None here is that of `compare`.

    Parameters
    ----------
    net : gluon.Block or torch.nn.Module, or a function that makes one
    devices : int or sequence of devices, optional
        A number stands for that many, from `mgpu.list_devices`.
    loss : callable, optional
        ``loss(pred, label)`` with one value per example; or one number per
        shard, as losses of torch with a reduction give.
    optimizer, optimizer_params, semantics, lr_scheduler, lr_mult, wd_mult
        As for `mgpu.Trainer`. A `lr_scheduler` object counts updates: give
        each side its own.
    batch_norm : str, optional
        As for `mgpu.initialize`.
    native : bool, optional
        Layers compute as the framework computes them without mgpu. Matters
        for batch norm on torch, which keeps the unbiased variance.
    divisor : int, optional
        What summed gradients are divided by; None: the rows of the batch.
    prepare : callable, optional
        ``prepare(X, y) -> (X, y)``, NumPy to NumPy, of this side's own data
        path.
    init, seed : optional
        As for `mgpu.initialize`. None keeps the network's own values, and
        draws Gluon's default where it has none.
    """

    net: Any
    devices: Any = None
    loss: Callable | None = None
    optimizer: Any = None
    optimizer_params: Mapping[str, Any] | None = None
    semantics: str | None = None
    lr_scheduler: Callable[[int], float] | None = None
    lr_mult: Mapping[str, float] | None = None
    wd_mult: Mapping[str, float] | None = None
    batch_norm: str | None = None
    native: bool | None = None
    divisor: int | None = None
    prepare: Callable | None = None
    init: Any = None
    seed: int | None = None

    def over(self, defaults: "Side") -> "Side":
        """This side, with the values of `defaults` where it has none."""
        return Side(**{f.name: getattr(defaults, f.name)
                       if getattr(self, f.name) is None
                       else getattr(self, f.name) for f in fields(Side)})


class State(NamedTuple):
    """What a step starts from: values by name (a running statistic has a
    leading axis of one entry per device) and the optimiser's memory."""

    values: dict[str, np.ndarray]
    optimizer: TrainerStates


@dataclass
class Record:
    """What one step showed; every array is NumPy, by the names of the side.

    Attributes
    ----------
    outputs : list of ndarray
        What the network returned, all devices' rows in order.
    losses : ndarray
        One value per example, or one per device where the loss reduces.
    gradients : dict
        Summed over devices, not divided; a parameter that no backward pass
        reached is not there.
    after : State
    apart : dict of str -> float
        Parameters whose copies differ between devices after the step.
    rate : float
        The learning rate of the update.
    rows : list of int
        Of each device.
    divisor : int
    """

    outputs: list[np.ndarray]
    losses: np.ndarray
    gradients: dict[str, np.ndarray]
    after: State
    apart: dict[str, float] = field(default_factory=dict)
    rate: float = 0.0
    rows: list[int] = field(default_factory=list)
    divisor: int = 1


class Call(NamedTuple):
    """A call of an innermost layer on the first device that had rows."""

    path: str
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


class Masks:
    """Dropout masks, drawn in NumPy: a function of (seed, step, number of
    the call, row of the whole batch), so neither the engine nor the number
    of devices matters. ``off=True``: nothing is dropped.

    Source of the form: inverted dropout, kept values are divided by
    ``1 - rate``, as both frameworks do.
    """

    def __init__(self, seed: int, off: bool = False):
        self._seed, self.off = seed, off
        self._lock = threading.Lock()
        self.used = 0

    def begin(self, step: int, rows: Sequence[int]) -> None:
        self._step, self._rows = step, list(rows)
        self._calls = [0] * len(rows)

    def __call__(self, x: Any, rate: float, axes: tuple[int, ...], index: int
                 ) -> Any:
        backend = get_backend()
        with self._lock:
            number = self._calls[index]
            self._calls[index] += 1
            self.used += 1
        shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
        if self.off:
            mask = np.ones((1,) * len(shape))
        else:
            mask = self._draw(shape, rate, number, index)
        with backend.scope(recording=False):
            return backend.ops.astype(backend.put(mask, x), x.dtype)

    def _draw(self, shape: tuple[int, ...], rate: float, number: int,
              index: int) -> np.ndarray:
        rows, total = self._rows[index], sum(self._rows)
        entropy = [self._seed, self._step, number]
        if rows and shape and shape[0] % rows == 0:
            per_row = shape[0] // rows      # a reshape may fold axes into 0
            begin = sum(self._rows[:index]) * per_row
            whole = (total * per_row, *shape[1:])
            part = slice(begin, begin + shape[0])
        else:
            whole, part = shape, slice(None)
            entropy.append(index)
        keep = np.random.default_rng(entropy).random(whole) >= rate
        return keep[part] / (1 - rate) if rate < 1 else keep[part] * 0.0


class Runner:
    """A side that is ready to run.

    Attributes
    ----------
    name : str
        The engine's.
    entries : list of Entry
    layers : list of base.Layer
    """

    def __init__(self, side: Side, sample: Any, dtype: str, masks: Masks):
        net = side.net
        try:
            self.name = backend_of(net)
        except TypeError:
            if not callable(net):
                raise
            net = net()
            self.name = backend_of(net)
        self.side, self.dtype, self.masks = side, dtype, masks
        self.net = net
        with using_backend(self.name) as backend:
            self.backend = backend
            network = backend.network(net)
            dtypes = {s.dtype for s in network.specs() if "float" in s.dtype}
            self._users = network.values(), dtypes
            devices = side.devices if not isinstance(side.devices, int) \
                else list_devices(side.devices)
            init = side.init
            if init is None and self._users[0] is not None:
                init = "keep"
            self.replicas = mgpu.initialize(
                net, devices, init=init, seed=side.seed or 0, dtype=dtype,
                batch_norm=side.batch_norm, force_reinit=True,
                sample=cast_floats(sample, dtype))
            self.replicas.network.own_arithmetic = bool(side.native)
            self.trainer = mgpu.Trainer(
                self.replicas, side.optimizer, dict(side.optimizer_params
                                                    or {}),
                semantics=side.semantics, lr_scheduler=side.lr_scheduler,
                lr_mult=side.lr_mult, wd_mult=side.wd_mult)
        network = self.replicas.network
        self.layers: list[base.Layer] = network.layers()
        aliases = network.aliases()
        self.entries = [
            Entry(p.name, _kind(p), tuple(p.shape), p.grad_req != "null",
                  tuple(n for n in aliases.get(p.name, ())
                        if n != p.name))
            for p in (*self.replicas.params(), *self.replicas.buffers())
            if not p.name.endswith(_COUNTER) and "float" in p.dtype]
        self._names = {e.name for e in self.entries}

    @property
    def devices(self) -> list[Device]:
        return self.replicas.devices

    @property
    def rule(self) -> str:
        """The class of the optimiser."""
        return type(self.trainer.optimizer).__name__

    def options(self) -> dict[str, Any]:
        """How this side trains, for a report."""
        return {"engine": f"{self.name} {self.backend.version}",
                "network": type(self.net).__name__,
                "devices": [str(d) for d in self.devices],
                "optimizer": repr(self.trainer.optimizer),
                "loss": getattr(self.side.loss, "__name__",
                                repr(self.side.loss)),
                "batch_norm": self.side.batch_norm
                + (", the framework's own arithmetic" if self.side.native
                   else ", Gluon's arithmetic"),
                "dtype": self.dtype}

    def restore(self) -> None:
        """Give the user's network its values and dtype back."""
        values, dtypes = self._users
        if values is None:
            return
        with using_backend(self.name):
            for parameter in self.replicas.all_parameters():
                parameter.set_data(values[parameter.name])
            if len(dtypes) == 1:
                self.replicas.network.cast(*dtypes)

    # -- states -------------------------------------------------------------

    def state(self) -> State:
        """The values and the optimiser's memory now, as copies."""
        values = self.replicas.export_numpy(all_devices=True)
        k, own = len(self.devices), {}
        for e in self.entries:
            value = values[e.name]
            if e.kind in _STATISTICS and k == 1:
                value = value[None]
            own[e.name] = value
        return State(own, self.trainer.export_states())

    def load(self, state: State, memory: bool = True) -> None:
        """Start from `state`. Statistics of another number of devices: their
        mean goes to each. ``memory=False`` leaves the optimiser alone."""
        k, values = len(self.devices), {}
        for e in self.entries:
            if e.name not in state.values:
                continue
            value = state.values[e.name]
            if e.kind in _STATISTICS:
                if len(value) != k:
                    value = np.repeat(value.mean(0, keepdims=True), k, 0)
                value = value[0] if k == 1 else value
            values[e.name] = value
        now = self.replicas.export_numpy(all_devices=True)
        self.replicas.import_numpy({**now, **values})
        if not memory:
            return
        self.trainer.import_states(state.optimizer._replace(
            optimizer=self.rule,    # whose own rate stays
            learning_rate=self.trainer.optimizer.learning_rate))

    def last_rate(self, name: str, num_update: int) -> float:
        """The rate that update `num_update` moved a parameter with."""
        own, = (p for p in self.replicas.params() if p.name == name)
        return self.trainer.rate(num_update) * self.trainer.multipliers(own)[0]

    def slots(self) -> list[str]:
        """What the optimiser remembers of a weight."""
        with using_backend(self.name):
            weight = self.replicas.params()[0].data()
            return sorted(self.trainer.optimizer.create_state(
                weight, self.backend.ops))

    # -- steps --------------------------------------------------------------

    def _shards(self, X: Any, y: Any) -> tuple[list[Any], list[Any]]:
        if self.side.prepare is not None:
            X, y = self.side.prepare(X, y)
        return mgpu.split_batch(cast_floats(X, self.dtype), cast_floats(y, self.dtype),
                                self.devices)

    @contextlib.contextmanager
    def _running(self, rows: Sequence[int], step: int) -> Iterator[None]:
        self.masks.begin(step, rows)
        with using_backend(self.name), \
                self.replicas.network.use_masks(self.masks):
            yield

    def forward(self, X: Any, y: Any, step: int = 0) -> list[np.ndarray]:
        """The outputs of a training pass, which is then forgotten; running
        statistics may move."""
        with using_backend(self.name):
            Xs, _ = self._shards(X, y)
            with self._running(_rows(Xs), step), mgpu.record():
                outputs = self.replicas(Xs)
            self.replicas.recorded = [False] * len(self.devices)
            return self._joined(outputs)

    def predict(self, X: Any, y: Any) -> list[np.ndarray]:
        """The outputs in prediction mode."""
        with using_backend(self.name):
            return self._joined(self.replicas(self._shards(X, y)[0]))

    def _joined(self, outputs: Sequence[Any]) -> list[np.ndarray]:
        """All devices' outputs, one array for each leaf."""
        parts = []
        for output in outputs:
            if output is not None:
                parts.append([self.backend.to_numpy(x)
                              for x in leaves(output)])
        return [np.concatenate([np.atleast_1d(x) for x in column])
                for column in zip(*parts)]

    def trace(self, X: Any, y: Any, step: int, predict: bool = False
              ) -> list[Call]:
        """The calls of all innermost layers in a training pass (or in a
        prediction), on the first device with rows."""
        return self.traces(X, y, step, predict, first=True)[0]

    def traces(self, X: Any, y: Any, step: int, predict: bool = False,
               first: bool = False) -> list[list[Call]]:
        """`trace` of each device with rows (`first`: of that one alone)."""

        def copies(tree: Any) -> list[np.ndarray]:
            return [self.backend.to_numpy(x) for x in leaves(tree)
                    if self.backend.is_native(x)]
        with using_backend(self.name):
            Xs, _ = self._shards(X, y)
            busy = [i for i, n in enumerate(_rows(Xs)) if n]
            calls: dict[int, list[Call]] = {
                i: [] for i in (busy[:1] if first else busy)}

            def watch(path: str, inputs: Any, outputs: Any, index: int
                      ) -> None:
                if index in calls:
                    calls[index].append(
                        Call(path, copies(inputs), copies(outputs)))
            with self._running(_rows(Xs), step), \
                    self.replicas.network.watch_layers(watch):
                if predict:
                    self.replicas(Xs)
                else:
                    with mgpu.record():
                        self.replicas(Xs)
            self.replicas.recorded = [False] * len(self.devices)
        return list(calls.values())

    def _backward(self, X: Any, y: Any, step: int
                  ) -> tuple[list[Any], list[Any], list[int]]:
        """Forward, backward and the sum of gradients; outputs and losses by
        device, and its rows."""
        Xs, ys = self._shards(X, y)
        rows = _rows(Xs)
        with self._running(rows, step), mgpu.record():
            outputs = self.replicas(Xs)
            losses = mgpu.parallel(self._loss, outputs, ys)
        mgpu.backward([x for x in losses if x is not None])
        self.trainer.allreduce_grads(ignore_stale_grad=True)
        return outputs, losses, rows

    def _values(self, losses: Sequence[Any]) -> np.ndarray:
        return np.concatenate([np.atleast_1d(self.backend.to_numpy(x))
                               for x in losses if x is not None])

    def train(self, X: Any, y: Any, step: int = 0) -> np.ndarray:
        """`step` without its record: the losses alone."""
        with using_backend(self.name):
            _, losses, rows = self._backward(X, y, step)
            self.trainer.update(self.side.divisor or sum(rows))
            return self._values(losses)

    def step(self, X: Any, y: Any, step: int = 0) -> Record:
        """Take one step of training and tell all of it.

        Parameters
        ----------
        X, y : NumPy arrays of n rows, or nested tuples of them
        step : int
            Chooses the dropout masks.
        """
        with using_backend(self.name):
            outputs, losses, rows = self._backward(X, y, step)
            collected = self.trainer.summed()
            gradients, apart = {}, {}
            for p in collected:
                if p.name not in self._names:
                    continue
                copies = [self.backend.to_numpy(g) for g in p.list_grad()]
                gradients[p.name] = copies[0]
                apart[p.name] = _spread(copies)
            divisor = self.side.divisor or sum(rows)
            self.trainer.update(divisor)
            after = self.state()
            for p in self.replicas.params():
                if p.name in self._names and len(self.devices) > 1:
                    apart[p.name] = max(apart.get(p.name, 0.0), _spread(
                        [self.backend.to_numpy(x) for x in p.list_data()]))
            return Record(
                self._joined(outputs), self._values(losses), gradients,
                after, {n: d for n, d in apart.items() if d},
                self.trainer.learning_rate, rows, divisor)

    def _loss(self, output: Any, y: Any) -> Any:
        if output is None:
            return None
        values = self.side.loss(output, y)
        shape = tuple(getattr(values, "shape", (0,)))
        if shape not in ((), (1,), (rows_of(y),)):
            raise ValueError(
                "the loss must return one value per example, or one number; "
                f"received shape {shape} for {rows_of(y)} examples on "
                f"{self.name}. Use a loss of mgpu.losses.")
        return values

    def probe(self, X: Any) -> Callable:
        """What `matching.Probe` runs: see there."""
        y = np.zeros(rows_of(X), "int32")
        parameters = {layer.path: layer.parameters for layer in self.layers}

        def run(values: Mapping[str, np.ndarray], traced: bool
                ) -> tuple[Any, Any]:
            now = self.replicas.export_numpy(all_devices=True)
            self.replicas.import_numpy({**now, **values})
            if not traced:
                return self.predict(X, y), []
            outputs: list[np.ndarray] = []
            calls = [(parameters[call.path], call.inputs[0])
                     for call in self.trace(X, y, 0, predict=True)
                     if parameters.get(call.path) and call.inputs]
            return outputs, calls
        return run


def _kind(p: Any) -> str:
    """A constant of the network's own is "other", whether the engine keeps
    it as a buffer or as a parameter that is not trained."""
    constant = p.grad_req == "null" and p.kind == "weight" \
        and not p.name.endswith("weight")
    return "other" if constant else p.kind


def _rows(shards: Sequence[Any]) -> list[int]:
    return [0 if s is None else rows_of(as_inputs(s)[0]) or 0 for s in shards]


def _spread(copies: Sequence[np.ndarray]) -> float:
    """How far the copies of one tensor are from the first."""
    with np.errstate(invalid="ignore"):
        return max((float(np.abs(x - copies[0]).max(initial=0.0))
                    for x in copies[1:]
                    if not np.array_equal(x, copies[0], equal_nan=True)),
                   default=0.0)


def translate(state: State, plan: Plan, source: Runner, target: Runner
              ) -> State:
    """A state of `source` in the names and terms of `target`, or back.

    Where Gluon's momentum (rate inside the velocity) meets torch's (rate
    outside), ``b = -v / rate`` with the rate of the last update.
    """
    names = {pair.a: pair.b for pair in plan.pairs}
    slots = {}
    for (name, slot), value in state.optimizer.slots.items():
        if name not in names:
            continue
        if slot == "momentum":
            value = value * _momentum_factor(source, target, name,
                                             names[name], state.optimizer)
        moved = plan.to_b({name: value})[names[name]] if np.ndim(value) \
            else value
        slots[names[name], slot] = moved
    counts = {names[name]: t for name, t in state.optimizer.counts.items()
              if name in names}
    return State(plan.to_b(state.values), state.optimizer._replace(
        slots=slots, counts=counts))


def _momentum_factor(source: Runner, target: Runner, name: str, other: str,
                     states: TrainerStates) -> float:
    """What a velocity of `source` is multiplied by for `target`, which calls
    the weight `other`."""
    kinds = [source.rule, target.rule]
    inside = [kind in ("SGD", "NAG") for kind in kinds]
    outside = [kind in ("TorchSGD", "TorchNAG") for kind in kinds]
    if inside[0] and outside[1]:
        return -1 / source.last_rate(name, states.num_update)
    if outside[0] and inside[1]:
        return -target.last_rate(other, states.num_update)
    return 1.0
