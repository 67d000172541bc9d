"""The run of a network."""
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.backends import Backend, using_backend
from mgpu.backends.device import list_devices
from mgpu.backends.network import BUFFERS
from mgpu.backends.probing import AVERAGE, Layer
from mgpu.backends.types import ContextManager
from mgpu.checkpoints.trainer_states import TrainerStates
from mgpu.data.nested import as_inputs, cast_floats, leaves, rows_of
from mgpu.data.split import split_batch
from mgpu.parity.batches import Batch
from mgpu.parity.keys import in_order_of, paths
from mgpu.parity.masks import Masks
from mgpu.parity.matching import Entry, RunWith
from mgpu.parity.measure import summary
from mgpu.parity.run import (Arrays, Calls, LayerCall, Put, Run, State,
                             StepResult, UpdateRule, at_one_device)
from mgpu.parity.side import network_of
from mgpu.parity.spill import spilled
from mgpu.training.functions import backward, parallel, record
from mgpu.training.replicas import initialize
from mgpu.training.trainer import Trainer

# A counter of torch's batch norm; Gluon has none.
_COUNTER = "num_batches_tracked"


class LiveRun(Run):
    """A `Side` whose network is initialized and ready to train.

    Parameters
    ----------
    side : Side
        Complete: nothing but optional fields is None.
    sample : NumPy array, or nested ones
        What the network is called with.
    dtype : str
    masks : Masks

    Attributes
    ----------
    side : Side
    net : gluon.Block or torch.nn.Module
    replicas : Replicas
    trainer : Trainer
    names : set of str
        Of `entries`.
    own_dtypes : set of str
        In which the user's network was.
    refused : bool
        Whether the loss has raised an exception.
    """

    refused = False

    def __init__(self, side: Any, sample: Any, dtype: str, masks: Masks):
        if side.step is not None and type(self) is LiveRun:
            raise ValueError(
                "steps of the user's own are compared by compare(step_a=, "
                "step_b=) only; received a side with a step. Leave it out.")
        self.net, self.name = network_of(side.net)
        self.side, self.dtype, self.masks = side, dtype, masks
        self.batch_norm, self.keys = side.batch_norm, {}
        with using_backend(self.name) as backend:
            self.backend = backend
            network = backend.network(self.net)
            if type(self) is LiveRun:
                network.check_visible()
            dtypes = {s.dtype for s in network.specs() if "float" in s.dtype}
            values = network.values()
            self._before = values and spilled(values), dtypes
            self.own_dtypes = dtypes
            devices = side.devices if not isinstance(side.devices, int) \
                else list_devices(side.devices)
            init = side.init
            if init is None and not network.missing():
                init = "keep"
            self.replicas = initialize(
                self.net, devices, init=init,
                seed=None if init == "keep" else side.seed, dtype=dtype,
                batch_norm=side.batch_norm, force_reinit=True,
                sample=cast_floats(sample, dtype))
            self.network, self.devices = (self.replicas.network,
                                          self.replicas.devices)
            self.network.own_arithmetic = bool(side.native)
            self.float32 = self.network.float32
            self.replaces = self.network.replaces
            self.trainer = Trainer(
                self.replicas, side.optimizer, dict(side.optimizer_params
                                                    or {}),
                semantics=side.semantics, lr_scheduler=side.lr_scheduler,
                lr_mult=side.lr_mult, wd_mult=side.wd_mult)
            self.updates = self._update_rule(backend)
        self.layers = self.network.layers()
        aliases = self.network.aliases()
        self.entries = [
            Entry(p.name, _kind(p), tuple(p.shape or ()), p.grad_req != "null",
                  tuple(n for n in aliases.get(p.name, ())
                        if n != p.name), p.kind in BUFFERS)
            for p in (*self.replicas.params(), *self.replicas.buffers())
            if not p.name.endswith(_COUNTER) and "float" in p.dtype]
        self.names = {e.name for e in self.entries}

    def _update_rule(self, backend: Backend) -> UpdateRule:
        trainer, params = self.trainer, self.replicas.params()
        rule = trainer.rule()
        if not params:
            raise ValueError(
                "a comparison trains; received a network on "
                f"{self.name} without parameters. Compare its outputs.")
        factors = {p.name: trainer.multipliers(p) for p in params}

        def last_rate(name: str, num_update: int) -> float:
            return trainer.rate(num_update) * factors[name][0]
        return UpdateRule(
            rule, sorted(rule.create_state(params[0].data(), backend.ops)),
            {name: lr for name, (lr, _) in factors.items()},
            {name: wd for name, (_, wd) in factors.items()},
            list(trainer.update_order), last_rate)

    def options(self) -> dict[str, Any]:
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

    def by_path(self) -> dict[str, Layer]:
        return super().by_path() | self.network.functions

    def restore(self) -> None:
        values, dtypes = self._before
        if values is None:
            return
        with using_backend(self.name):
            for parameter in self.replicas.all_parameters():
                parameter.set_data(values[parameter.name])
            if len(dtypes) == 1:
                self.network.cast(*dtypes)

    # -- states -------------------------------------------------------------

    def state(self) -> State:
        values = self.replicas.export_numpy(all_devices=True)
        one = len(self.devices) == 1
        return State({e.name: values[e.name][None] if one and e.is_statistic
                      else values[e.name] for e in self.entries},
                     self.trainer.export_states())

    def load(self, state: State, memory: bool = True) -> None:
        k, values = len(self.devices), {}
        for e in self.entries:
            if e.name not in state.values:
                continue
            value = state.values[e.name]
            if e.is_statistic:
                if len(value) != k:
                    value = np.repeat(value.mean(0, keepdims=True), k, 0)
                value = value[0] if k == 1 else value
            values[e.name] = value
        self._write(values)
        if memory:
            self.load_memory(state.optimizer)

    def load_memory(self, states: TrainerStates) -> None:
        """Set the optimizer's memory, but not the class and the rate of the
        other side."""
        own = self.trainer.rule()
        self.trainer.import_states(states._replace(
            optimizer=type(own).__name__, learning_rate=own.learning_rate,
            schedule=None,
            slots={key: value for key, value in states.slots.items()
                   if key[1] != AVERAGE}))

    def _write(self, values: Mapping[str, np.ndarray]) -> None:
        missing = any(p.name not in values and p.kind != "other"
                      for p in self.replicas.all_parameters())
        now = self.replicas.export_numpy(all_devices=True) if missing else {}
        self.replicas.import_numpy({**now, **values})

    # -- passes -------------------------------------------------------------

    def prepared(self, X: Any, y: Any) -> Batch:
        return (X, y) if self.side.prepare is None else self.side.prepare(X, y)

    def shards(self, X: Any, y: Any) -> tuple[list[Any], list[Any]]:
        """The batch on the devices, in the dtype of the comparison."""
        return self._split(*self.prepared(X, y))

    def _split(self, X: Any, y: Any) -> tuple[list[Any], list[Any]]:
        return split_batch(cast_floats(X, self.dtype),
                           cast_floats(y, self.dtype), self.devices)

    @contextlib.contextmanager
    def _running(self, rows: Sequence[int], step: int, training: bool = True
                 ) -> Iterator[None]:
        """With the masks of step `step`, and recorded if `training`."""
        self.masks.begin(step, rows)
        with using_backend(self.name), self._dropping(), \
                self.network.use_masks(self.masks):
            with record() if training else contextlib.nullcontext():
                yield

    def _dropping(self) -> ContextManager:
        return self.network.without_inner_dropout() if self.masks.off \
            else contextlib.nullcontext()

    def draws_in(self, thunk: Callable[[], Any]) -> tuple[Any, bool]:
        """What `thunk` returns, and whether it took random numbers from a
        stream of the engine, of NumPy or of Python, or set one. The streams
        of the process are then where they were."""
        numpy, python = np.random.get_state(legacy=False), random.getstate()
        # To where no pass before it has set them.
        np.random.random(), random.random()
        before = _streams()
        try:
            with using_backend(self.name):
                made, drew = self.backend.draws(thunk, self.devices)
            return made, drew or _streams() != before
        finally:
            np.random.set_state(numpy)
            random.setstate(python)

    def forward(self, X: Any, y: Any, step: int = 0) -> list[np.ndarray]:
        with using_backend(self.name):
            Xs, _ = self._split(X, y)
            with self._running(rows_of_shards(Xs), step):
                outputs = self.replicas(Xs)
            return self.returned(outputs)

    def predict(self, X: Any, y: Any) -> list[np.ndarray]:
        """The outputs in prediction mode."""
        with using_backend(self.name), self._dropping():
            return self.returned(self.replicas(self.shards(X, y)[0]),
                                 "prediction")

    def returned(self, outputs: Sequence[Any], stage: str = "output"
                 ) -> list[np.ndarray]:
        """What the network has returned, `joined`, in the order of `like`."""
        own = next((paths(x) for x in outputs if x is not None), [])
        self.keys[stage] = own
        return in_order_of(self.joined(outputs), own,
                           self.like.get(stage, own))

    def joined(self, outputs: Sequence[Any]) -> list[np.ndarray]:
        """All devices' outputs, one array for each leaf."""
        rows = [[self.backend.to_numpy(x) for x in leaves(output)]
                for output in outputs if output is not None]
        return [np.concatenate([np.atleast_1d(x) for x in column])
                for column in zip(*rows)]

    def calls(self, X: Any, y: Any, step: int, *, predict: bool = False,
              first: bool = False) -> list[Calls]:
        return self._watched(X, y, step, predict, first)[0]

    def forced(self, X: Any, y: Any, step: int, put: Sequence[Put]
               ) -> tuple[list[Calls], list[np.ndarray], np.ndarray]:
        calls, outputs, labels = self._watched(X, y, step, False, False, put)
        with using_backend(self.name):
            losses = parallel(self._loss, outputs, labels)
            return calls, self.returned(outputs), self.joined(losses)[0]

    def _watched(self, X: Any, y: Any, step: int, predict: bool, first: bool,
                 put: Sequence[Put] = ()
                 ) -> tuple[list[Calls], list[Any], list[Any]]:
        """The calls of a pass, with outputs and labels by device. `put`: by
        device with rows, what takes the place of a call's outputs."""
        with using_backend(self.name):
            Xs, ys = self.shards(X, y)
            rows = rows_of_shards(Xs)
            busy = [i for i, n in enumerate(rows) if n]
            calls: dict[int, Calls] = {
                i: [] for i in (busy[:1] if first else busy)}

            def watch(path: str, inputs: Any, outputs: Any, index: int
                      ) -> Any:
                if index not in calls:
                    return None
                calls[index].append(LayerCall(
                    path, self.copies(inputs), self.copies(outputs)))
                values = put and put[busy.index(index)].get(
                    len(calls[index]) - 1)
                return None if not values else [
                    self.backend.put(x, self.devices[index], dtype=self.dtype)
                    for x in values]
            with self._running(rows, step, training=not predict), \
                    self.network.watch_layers(watch):
                outputs = self.replicas(Xs)
        return list(calls.values()), outputs, ys

    def copies(self, tree: Any) -> list[np.ndarray]:
        """The arrays in nested ones, in NumPy."""
        return [self.backend.to_numpy(x) for x in leaves(tree)
                if self.backend.is_native(x)]

    # -- steps --------------------------------------------------------------

    def _backward(self, X: Any, y: Any, step: int, only: int | None = None
                  ) -> tuple[list[Any], list[Any], list[int]]:
        """A forward and a backward pass, of the loss of one device or of all.
        Returns outputs, losses and the number of rows, each by device."""
        Xs, ys = self.shards(X, y)
        rows = rows_of_shards(Xs)
        with self._running(rows, step):
            outputs = self.replicas(Xs)
            losses = parallel(self._loss, outputs, ys)
            if self.nudge is not None:
                losses = [x if x is None else x * self.backend.put(
                    self.nudge(np.ones(x.shape)), device, dtype=self.dtype)
                    for x, device in zip(losses, self.devices)]
        heads = [x for i, x in enumerate(losses)
                 if x is not None and only in (None, i)]
        if heads:
            backward(heads)
        return outputs, losses, rows

    def step(self, X: Any, y: Any, step: int = 0, predict: bool = True
             ) -> StepResult:
        ran: dict[str, None] = {}
        with using_backend(self.name):
            predictions = self.predict(X, y) if predict else None
            with self.network.watch_layers(
                    lambda path, *_: ran.setdefault(path)):
                outputs, losses, rows = self._backward(X, y, step)
            self.trainer.allreduce_grads(ignore_stale_grad=True)
            gradients = {p.name: self.backend.to_numpy(p.grad())
                         for p in self.trainer.summed()
                         if p.name in self.names}
            divisor = self.side.divisor or sum(rows)
            self.trainer.update(divisor)
            after = self.state()
            return StepResult(
                self.returned(outputs), self.joined(losses)[0], gradients,
                after, {},
                self.trainer.learning_rate, rows, divisor, predictions,
                list(ran))

    def _loss(self, output: Any, y: Any) -> Any:
        if output is None:
            return None
        try:
            values = self.side.loss(output, y)
        except Exception:
            self.refused = True
            raise
        shape = tuple(getattr(values, "shape", (0,)))
        if shape not in ((), (1,), (rows_of(y),)):
            raise ValueError(
                "the loss must return one value per example, or one number; "
                f"received shape {shape} for {rows_of(y)} examples on "
                f"{self.name}. Use a loss of mgpu.losses.")
        return values

    def probe(self, X: Any) -> RunWith:
        y = np.zeros(rows_of(X) or 0, "int32")
        parameters = {layer.path: layer.parameters for layer in self.layers}

        def run(values: Mapping[str, np.ndarray], traced: bool
                ) -> tuple[list, list]:
            self._write(values)
            if not traced:
                return self.predict(X, y), []
            calls, = self.calls(X, y, 0, predict=True, first=True)
            return [], [(parameters[call.path], summary(call.inputs[0]))
                        for call in calls
                        if parameters.get(call.path) and call.inputs]
        return run

    # -- for the causes -----------------------------------------------------

    def local_gradients(self, X: Any, y: Any, step: int) -> list[Arrays]:
        with using_backend(self.name):
            found = []
            for i in range(len(self.devices)):
                self.replicas.zero_grad()
                self._backward(X, y, step, only=i)
                found.append({p.name: self.backend.to_numpy(p.grad())
                              for p in self.replicas.params()
                              if p.grad_req != "null"})
            return found

    def begin_alone(self, dtype: str, values: Arrays) -> None:
        """Go on in `dtype` on the first device, from these values; no steps
        are taken any more."""
        with using_backend(self.name):
            if dtype != self.dtype or len(self.devices) > 1:
                self.devices, self.dtype = self.devices[:1], dtype
                self.replicas = initialize(
                    self.net, self.devices, init="keep", dtype=dtype,
                    batch_norm=self.batch_norm, force_reinit=True)
                self.network = self.replicas.network
                self.network.own_arithmetic = bool(self.side.native)
            self._write(values)

    def whole_pass(self, X: Any, y: Any
                   ) -> dict[tuple[str, str], np.ndarray]:
        """Predictions, outputs, gradients, and running statistics after
        them, by stage and name."""
        statistics = {e.name for e in self.entries if e.is_statistic}
        predictions = self.predict(X, y)
        with using_backend(self.name), self.backend.full_precision():
            self.replicas.zero_grad()
            outputs, _, _ = self._backward(X, y, 0)
            found = {("prediction", str(i)): x
                     for i, x in enumerate(predictions)}
            found |= {("output", str(i)): x
                      for i, x in enumerate(self.returned(outputs))}
            found |= {
                ("statistic", name): x for name, x in at_one_device(
                    self.state(), self.entries).items()
                if name in statistics}
            return found | {
                ("gradient", p.name): self.backend.to_numpy(p.grad())
                for p in self.replicas.params() if p.grad_req != "null"}


def refuse_draws(run: LiveRun, drew: bool, differs: bool = False) -> None:
    """Refuse a network that `drew`, or whose passes from one state differ
    (ValueError)."""
    if not drew and not differs:
        return
    raise ValueError(
        "both sides must draw the same random numbers; received a "
        f"network on {run.name} that draws its own outside its "
        "dropout layers" + (
            " (a pass takes numbers from a random stream, or sets "
            "one)" if drew else
            ", or that keeps something from pass to pass (two "
            "passes from one state differ)") + ". Use dropout "
        "layers (nn.Dropout in the place of F.dropout), or switch the other "
        "random parts off, such as the dropout of nn.LSTM, an argument of "
        "its own (dropout='off' of the comparison does), and of "
        "nn.MultiheadAttention. Gluon's "
        "SymbolBlock, which reads an exported graph, draws inside: "
        "take the block itself, or a copy of the graph whose "
        "Dropout nodes have p 0. A step of your "
        "own names what it carries on in its parts.")


def _kind(p: Any) -> str:
    """The kind of a parameter. A constant of the network's own is "other",
    whether the engine keeps it as a buffer or as a frozen parameter."""
    constant = p.grad_req == "null" and p.kind in ("weight", "unknown") \
        and not p.name.endswith("weight")
    return "other" if constant else p.kind


def _streams() -> tuple[Any, ...]:
    """Where the streams are that every program has."""
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    return (random.getstate(), numpy["state"]["key"].tobytes(),
            numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"])


def rows_of_shards(shards: Sequence[Any]) -> list[int]:
    """The number of rows of each device."""
    return [0 if s is None else rows_of(as_inputs(s)[0]) or 0 for s in shards]
