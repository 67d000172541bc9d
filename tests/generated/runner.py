"""Runs a program with mgpu and with the framework alone, and compares."""
import contextlib
import importlib
import re
import tempfile
import traceback
from pathlib import Path

import numpy as np

import mgpu

from .networks import find_layers, network, record_masks
from .programs import STATEFUL, WIDTH, WORDS, Action, Network, Program

FOLDER = str(Path(__file__).parent)
#: layers that some examples do not reach
PARTIAL = {"experts", "switch"}
MAX_NORM = 0.5

#: what mgpu does not support, and the message that says so
REFUSALS = {"clip": "(?s)(?=.*allreduce_grads)(?=.*clip_global_norm)",
            "stale": "has no new gradient", "batch_size": "batch_size must",
            "rnn": "float64 gradients.*float32",
            "sparse": "sparse gradients are not supported",
            "own step": "those of one, after a backward pass on",
            "own states": "trainer.state_dict"}

#: the same, in any pass through a checkpoint
CHECKPOINTS = {"again": "Run this step again",
               "sync": "in a checkpoint that is reentrant"}

#: errors that are to be mended. "buffer written": on torch, after an
#: abandoned batch of fewer rows than devices, with a layer in eval mode next
#: to synchronized batch norm
KNOWN = {"buffer written": "needed for gradient computation has been modified"}


class Failure(AssertionError):
    """Different numbers, or an error that is not in `REFUSALS`."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class UserError(Exception):
    """An error in the user's loss."""


def run(program: Program, tamper=None) -> list[str]:
    """Run a program; return the errors that mgpu raised, as `REFUSALS` keys.

    ``tamper(replicas, moment)`` is called when gradients are "reduced" and
    when the weights are "updated"; it plants faults, to test the comparison.

    Raises
    ------
    Failure
        Numbers differ, or mgpu raised an error that is not in `REFUSALS`.
    """
    with mgpu.using_backend(program.backend):
        return Run(program, adapter_of(program.backend), tamper).run()


def adapter_of(backend: str):
    return importlib.import_module({
        "torch": ".torch_adapter", "mxnet": ".gluon_adapter"}[backend],
        __package__)


def difference(a, b) -> float:
    """The largest difference, relative to the larger of 1 and `b`."""
    a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
    if a.shape != b.shape or not np.isfinite([a.sum(), b.sum()]).all():
        return float("inf")
    return float(abs(a - b).max() / max(1.0, abs(b).max())) if a.size else 0.0


def tolerance(program: Program) -> float:
    if program.dtype == "float32":
        # Batch norm divides by the spread of few rows, which enlarges the
        # rounding of float32 tenfold.
        return 1e-4 if "batch_norm" in program.kinds else 1e-5
    optimizers = {net.optimizer for net in program.networks}
    # Gluon's Adam takes the rate with the bias correction as a float32.
    if program.backend == "mxnet" and "adam" in optimizers:
        return 1e-5
    # These divide by the size of past gradients, which may be small.
    return 1e-10 if optimizers & {
        "adam", "adamw", "adamax", "rmsprop", "adagrad"} else 1e-12


class Pair:
    """A network under mgpu, and its reference without."""

    def __init__(self, program: Program, number: int, adapter, masks, tamper):
        self.program, self.number, self.adapter = program, number, adapter
        self.config: Network = program.networks[number]
        self.masks, self.tamper = masks, tamper
        self.reference = adapter.Reference(program, number)
        for layer in find_layers(adapter, self.reference.net, "masks"):
            layer.masks = masks
        self.pending = False    # whether a gradient waits for a step
        #: whether running statistics are equal to those of one device
        self.statistics = True
        self.set_up(program.k)
        self.save()

    def set_up(self, k: int) -> None:
        """The user's network on `k` devices, with its trainers."""
        config, adapter = self.config, self.adapter
        self.net = network(adapter, self.program, self.number)
        record_masks(adapter, self.net, self.masks)
        self.replicas = mgpu.initialize(
            self.net, [mgpu.cpu(i) for i in range(k)],
            batch_norm=config.batch_norm)
        if config.hybridize:
            self.net.hybridize()
        own, self.schedules = adapter.parameters(self.net), []
        if config.trainer == "object":
            self.optimizer, self.schedules = adapter.optimizer(config, own)
            self.trainers = [mgpu.Trainer(self.replicas, self.optimizer,
                                          allreduce=config.allreduce)]
        else:
            self.trainers = [mgpu.Trainer(
                self.replicas if config.trainer == "replicas" else some,
                config.optimizer, config.options,
                semantics=adapter.semantics, allreduce=config.allreduce,
                lr_scheduler=config.schedule
                and mgpu.lr_scheduler.FactorScheduler(*config.schedule))
                for some in config.split(own)]
        self.adding = {i for i, p in enumerate(self.replicas.params())
                       if config.adds and p.grad_req != "null"}
        for i in self.adding:
            self.replicas.params()[i].grad_req = "add"
        for trainer in self.trainers if self.tamper else ():
            self.plant(trainer, trainer.update)

    def plant(self, trainer, update) -> None:
        def tampered(n: int) -> None:
            self.tamper(self.replicas, "reduced")
            update(n)
            self.tamper(self.replicas, "updated")
        trainer.update = tampered

    @property
    def nets(self):
        """The user's network, and the reference's."""
        return self.net, self.reference.net

    def parameters(self):
        return map(self.adapter.parameters, self.nets)

    def values(self):
        ours, expected = map(self.adapter.export, self.nets)
        for name in () if self.statistics else self.adapter.statistics(
                self.reference.net):
            del ours[name], expected[name]
        return ours, expected

    def state(self):
        """The network's weights, and the trainers' states."""
        found = self.adapter.export(self.net)
        for i, trainer in enumerate(self.trainers):
            states = trainer.export_states()
            found[f"{i} counts"] = [states.num_update, *states.counts.values()]
            found.update({f"{i} {' '.join(key)}": x
                          for key, x in states.slots.items()})
        return found

    def export(self):
        """Statistics of one device, for any number of devices."""
        return (self.replicas.export_numpy(device=mgpu.cpu(0)),
                [x.export_states() for x in self.trainers],
                [x.state_dict() for x in self.schedules])

    def take_over(self, exported) -> None:
        values, states, schedules = exported
        if values:
            self.replicas.import_numpy(values)
        for trainer, one in zip(self.trainers, states):
            trainer.import_states(one)
        for schedule, one in zip(self.schedules, schedules):
            schedule.load_state_dict(one)

    def save(self) -> None:
        self.saved = self.export(), self.reference.save()

    def restore(self) -> None:
        """What was saved last, or at the start."""
        self.take_over(self.saved[0])
        self.reference.restore(self.saved[1])

    def reset(self) -> None:
        """The user writes what layers keep in attributes."""
        for net in self.nets:
            for name, value in (("count", 0), ("state", None)):
                for layer in find_layers(self.adapter, net, name):
                    setattr(layer, name, value)

    def clear(self) -> None:
        """The user clears the gradients that accumulate, and those of a batch
        that is given up, which the next one may not overwrite."""
        if self.config.adds or self.config.kinds & PARTIAL:
            self.reference.zero_grad()
            self.replicas.zero_grad()


class Run:
    """A program under way. Its actions are the methods without "_", and
    those of `Pair`."""

    def __init__(self, program: Program, adapter, tamper=None):
        self.program, self.adapter, self.tamper = program, adapter, tamper
        self.refused, self.masks, self.pairs = [], {}, []

    def run(self) -> list[str]:
        calls = [(0, self._set_up), *((action.arguments.get("net", 0), action)
                                      for action in self.program.actions)]
        calls += [(i, Action("predict"))
                  for i in range(len(self.program.networks))]
        for number, (i, action) in enumerate(calls):
            self.where = f"action {number - 1}, {action}"
            self.rng = np.random.default_rng([self.program.seed, number])
            self.pair = self.pairs[i] if self.pairs else None
            if not self._try(action):
                break
        return self.refused

    def _set_up(self) -> None:
        program, why = self.program, self.program.refused
        mgpu.seed(program.seed)     # of dropout
        self.loss = getattr(mgpu.losses, program.loss)()

        def make() -> None:
            self.pairs = [Pair(program, i, self.adapter, self.masks,
                               self.tamper)
                          for i in range(len(program.networks))]
        self._refuses(why, make, required=why is not None)

    def _try(self, action) -> bool:
        """Run the action; False where the program ends. A pass with a
        checkpoint may raise: always around synchronized batch norm, else
        until it is repeated."""
        try:
            if action == self._set_up:
                self._set_up()
            else:
                act = getattr(self, action.name, None) or getattr(
                    self.pair, action.name)
                act(**{name: x for name, x in action.arguments.items()
                       if name != "net"})
        except Failure:
            raise
        except Exception as error:
            known = KNOWN | (CHECKPOINTS if self.program.kinds & {
                "checkpoint", "reentrant"} else {})
            why = next((why for why, text in known.items()
                        if re.search(text, str(error))), None)
            if why is None:
                raise Failure(
                    f"raised {type(error).__name__}", f"{self.where}: "
                    + "".join(traceback.format_exception(error)[-4:])) \
                    from error
            self.refused.append(why)
            for pair in self.pairs:
                pair.statistics &= "batch_norm" not in pair.config.kinds
            if why == "again":
                self._abandon()
                return self._try(action)
            return False
        return bool(self.pairs)

    def _refuses(self, why: str | None, call, *arguments,
                 required: bool = False) -> bool:
        """Return whether the call raises, as it may (`required`: must) for
        the reason `why`, and check that weights and states are unchanged."""
        before = why and self.pair and self.pair.state()
        try:
            call(*arguments)
        except Exception as error:
            if why is None or not re.search(REFUSALS[why], str(error)) \
                    or traceback.extract_tb(
                        error.__traceback__)[-1].filename.startswith(FOLDER):
                raise
            self.refused.append(why)
            if before:      # a pass has moved the running statistics
                after, moved = self.pair.state(), self.adapter.statistics(
                    self.pair.reference.net)
                self._same("a failed call changed", *(
                    {name: x for name, x in state.items()
                     if name not in moved} for state in (after, before)), 0)
            return True
        if required:
            raise Failure(f"no error: {why}", self.where)
        return False

    def _same(self, what: str, ours, expected, limit: float | None = None):
        limit = tolerance(self.program) if limit is None else limit
        found = {name: difference(ours[name], expected[name])
                 if name in expected else float("inf") for name in ours}
        name = max(found, key=found.__getitem__, default=None)
        if ours.keys() != expected.keys() or name and found[name] > limit:
            raise Failure(what, f"{self.where}: {name} by {found[name]:.3g}"
                          f"\nmgpu:      {ours.get(name)}"
                          f"\nreference: {expected.get(name)}")

    # -- actions between steps ----------------------------------------------

    def edit(self, way: str, parameter: int = 0) -> None:
        ours, expected = self.pair.parameters()
        parameter %= len(ours)
        value = self.rng.normal(0, 0.5, ours[parameter].shape)
        self.adapter.edit(expected[parameter], way, value)
        if way == "set_data":
            self.pair.replicas.params()[parameter].set_data(value)
        else:
            self.adapter.edit(ours[parameter], way, value)

    def load(self, by_mgpu: bool = False) -> None:
        """By the framework's function, or by `Replicas.load_state_dict`."""
        net, expected = self.pair.nets
        buffers, new, tied = self.adapter.statistics(expected), {}, {}
        for name, x in self.adapter.export(expected).items():
            other = x + 0.25 if name in buffers else tied.setdefault(
                x.tobytes(), self.rng.normal(0, 0.5, x.shape))
            new[name] = np.array(other, x.dtype)
        self.adapter.load(expected, new)
        if by_mgpu:
            self.pair.replicas.load_state_dict({
                name: self.adapter.array(x) for name, x in new.items()})
        else:
            self.adapter.load(net, new)

    def freeze(self, parameter: int = 0, by_mgpu: bool = False,
               unfreeze: bool = False) -> None:
        """By the network's own flag, or by `Parameter.grad_req`."""
        frozen, pair, adds = not unfreeze, self.pair, self.pair.config.adds
        parameters = pair.replicas.params()
        # Not the first layer, nor the last one.
        if len(parameters) <= 4:
            return
        parameter = 2 + parameter % (len(parameters) - 4)
        nets = [pair.reference.net, pair.net]
        # On torch, the flag of what was frozen at first means "write".
        if by_mgpu or adds and not frozen and parameter not in pair.adding:
            pair.adding.add(parameter)
            parameters[parameter].grad_req = "null" if frozen \
                else "add" if adds else "write"
            nets.pop()
        for net in nets:
            self.adapter.freeze(self.adapter.parameters(net)[parameter], adds,
                                frozen)

    def rate(self, rate: float) -> None:
        pair = self.pair
        pair.reference.set_rate(rate)
        if pair.config.trainer == "object":
            self.adapter.set_rate(pair.optimizer, rate)
        else:
            for trainer in pair.trainers:
                trainer.set_learning_rate(rate)

    def own_states(self) -> None:
        """``optimizer.state_dict()`` of the framework's own object."""
        one, (other,) = self.pair.optimizer, self.pair.reference.optimizers
        self._refuses("own states", lambda: self._same(
            "states differ", *map(self.adapter.own_states, (one, other))))

    def resume(self, k: int, checkpoint: bool = False) -> None:
        """In networks of their own, as in another process."""
        for pair in self.pairs:
            self.pair, exported, before = pair, pair.export(), pair.replicas
            old = self.adapter.parameters(pair.net)
            with tempfile.NamedTemporaryFile() as file:
                by_file = checkpoint and len(pair.trainers) == 1
                if by_file:
                    mgpu.save_checkpoint(file.name, before, pair.trainers[0])
                pair.set_up(k)
                if by_file:
                    mgpu.load_checkpoint(
                        file.name, pair.replicas, pair.trainers[0],
                        seed=None if k == len(before) else 1)
            pair.take_over(({}, [], exported[2]) if by_file else exported)
            for p, q in zip(pair.replicas.params(), before.params()):
                p.grad_req = q.grad_req
            for p, q in zip(self.adapter.parameters(pair.net), old):
                for factor in {"lr_mult", "wd_mult"} & set(dir(q)):
                    setattr(p, factor, getattr(q, factor))
            pair.pending &= by_file
            pair.reset()

    def multiply(self, factor: str, parameter: int = 0) -> None:
        for found in self.pair.parameters():
            setattr(found[parameter % len(found)], factor, 2.0)

    def predict(self) -> None:
        """On every device."""
        data, _ = self._batch(3)
        expected = self.pair.reference.predict(data)
        for one in self.pair.replicas if self.pair.statistics else ():
            out = one(*(mgpu.put(x, one.device) for x in data))
            self._same("predictions differ", {str(one): mgpu.to_numpy(out)},
                       {str(one): expected})

    def fail(self, rows: int, by_hand: bool = False) -> None:
        """An error in the loss, for the examples like one that is drawn."""
        data, y = self._batch(rows)
        one = y[self.rng.integers(0, rows)]

        def loss(out, label):
            if (mgpu.to_numpy(label) == one).any():
                raise UserError
            return self.loss(out, label)
        pair = self.pair
        with contextlib.suppress(UserError):
            if by_hand or len(pair.trainers) > 1:
                self._passes(data, y, loss)
            else:
                mgpu.train_batch(_inputs(data), y, pair.replicas, loss,
                                 pair.trainers[0])
        if "batch_norm" in pair.config.kinds:
            pair.statistics = False     # they may have moved
        if pair.config.kinds & STATEFUL:
            pair.reference.forward(data)
        pair.clear()

    # -- steps --------------------------------------------------------------

    def _batch(self, n: int):
        program, rng = self.program, self.rng
        x = rng.normal(size=(n, WIDTH)).astype(program.dtype)
        x[:, 3] = rng.choice([-1, 1])       # the same for the whole batch
        data = [x] + [rng.integers(0, WORDS, n, "int32")] * program.words
        y = rng.integers(0, WIDTH, n, "int32") if program.loss != "L2Loss" \
            else rng.normal(size=(n, WIDTH)).astype(program.dtype)
        return data, y

    def train_batch(self, rows: int = 3) -> None:
        """`mgpu.train_batch`, which raises where no gradient is computed."""
        pair, (data, y) = self.pair, self._batch(rows)
        self.masks.clear()
        losses: list = []
        refused = self._refuses(
            "stale" if pair.config.kinds & PARTIAL else None,
            lambda: losses.extend(mgpu.train_batch(
                _inputs(data), y, pair.replicas, self.loss,
                pair.trainers[0])))
        self._reference(data, y, losses)
        if refused == pair.reference.gradients()[1]:
            raise Failure("stale", f"{self.where}: of all gradients that the "
                          "batch should reach, none is stale" if refused else
                          f"{self.where}: a stale gradient does not raise")
        if refused:     # the pass has moved them
            pair.statistics &= "batch_norm" not in pair.config.kinds
            self._abandon()
        else:
            self._finish(len(y))

    def by_hand(self, rows=(3,), other: str = "",
                clip: str = "", end: str = "") -> None:
        """A custom step: passes, sums and updates as separate calls.

        Parameters
        ----------
        rows : tuple of int
            Of each micro-batch; several where gradients accumulate.
        other : str
            The second network: its predictions are the labels ("teacher"),
            or it takes outputs + inputs, and the loss its own ("critic").
        clip : str
            "before" the all-reduce on the user's own gradients, by the
            "trainer" after it, on replica "0" after it.
        end : str
            "" takes the step, "skip" does not. Before it, "look" is a
            forward pass, "error" a wrong batch size. "own step" is that of
            a user-defined optimizer.
        """
        replicas = self.pair.replicas
        other_pair = self.pairs[1 - self.pairs.index(self.pair)] \
            if other else None
        if other == "teacher" and not other_pair.statistics:
            other = ""
        for n in rows:
            data, y = self._batch(n)
            self.masks.clear()
            self._reference(data, y, self._passes(
                data, y, self.loss, other, other_pair), other, other_pair)
        if other == "critic":
            other_pair.pending = not other_pair.config.adds
        if end == "look":       # in training mode
            self.masks.clear()
            with mgpu.record():
                replicas(mgpu.split_and_load(
                    _inputs(data), replicas.devices, even_split=False))
            self.pair.reference.forward(data)
        if end == "error":
            for trainer in self.pair.trainers:
                self._refuses("batch_size", trainer.step, 0, required=True)
        if end == "skip":
            self._abandon()
        elif end == "own step":
            ours, expected = self.pair.parameters()
            # Gluon's trainer raises midway where a device has no gradient.
            if max(rows) >= len(replicas) and not self._refuses(
                    "own step", self.adapter.own_step, ours, sum(rows)):
                self.adapter.own_step(expected, sum(rows))
            self._abandon()
        else:
            self._update(clip, sum(rows))

    def _passes(self, data, y, loss, other="", other_pair=None):
        """Run forward and backward passes; return the losses by device."""
        replicas = self.pair.replicas
        shards, labels = mgpu.split_batch(_inputs(data), y, replicas.devices)
        if other == "teacher":
            labels = other_pair.replicas(shards)

        with mgpu.record():
            outputs = replicas(shards)
            if other == "critic":
                outputs = other_pair.replicas([
                    out if out is None else (out + shard[0], *shard[1:])
                    if isinstance(shard, tuple) else out + shard
                    for out, shard in zip(outputs, shards)])
            losses = [None if out is None else loss(out, label)
                      for out, label in zip(outputs, labels)]
        mgpu.backward(losses)
        return losses

    def _reference(self, data, y, losses, other="", other_pair=None) -> None:
        """The passes of the reference; compares the losses."""
        reference = self.pair.reference
        if other == "teacher":
            y = other_pair.reference.predict(data)
        expected = reference.backward(
            data, y, other_pair.reference if other == "critic" else None)
        parts = [mgpu.to_numpy(x) for x in losses if x is not None]
        if parts:
            self._same("losses differ", {"loss": np.concatenate(parts)},
                       {"loss": expected})

    def _update(self, clip: str, n: int) -> None:
        """The step after the backward passes, with a clip somewhere."""
        pair, reference = self.pair, self.pair.reference
        ours, expected = pair.parameters()
        own, theirs = (sum(pair.config.split(list(some)), [])
                       for some in (ours, expected))
        found, every = reference.gradients()
        skips = pair.config.skips
        why = None if every or skips else "stale"

        def step() -> None:
            # Each may raise for a batch: before one of them has stepped.
            for trainer in pair.trainers:
                trainer.allreduce_grads(ignore_stale_grad=skips)
            for trainer in pair.trainers:
                if clip == "trainer":
                    trainer.clip_global_norm(MAX_NORM)
                elif clip:
                    self.adapter.clip(own, MAX_NORM)
                trainer.update(n)
        if clip == "before":
            self.adapter.clip(own, MAX_NORM)
            refused = self._refuses(
                "clip" if len(pair.replicas) > 1 else why,
                lambda: pair.trainers[0].step(n, ignore_stale_grad=skips))
        else:
            refused = self._refuses(why, step, required=why is not None)
        if refused:
            self._abandon()
            return
        if clip == "trainer":       # Gluon's formula
            norm = sum((mgpu.to_numpy(g) ** 2).sum() for g in found) ** 0.5
            for g in found:
                g *= min(1.0, MAX_NORM / (norm + 1e-8))
        elif clip:
            self.adapter.clip(theirs, MAX_NORM)
        self._finish(n)

    def _abandon(self, done: bool = False) -> None:
        """The batch is given up, or `done`."""
        self.pair.pending = not (done or self.pair.config.adds)
        for pair in self.pairs:
            pair.clear()
            self._same("weights differ", *pair.values())

    def _finish(self, n: int) -> None:
        pair = self.pair
        pair.reference.step(n)
        for schedule in pair.schedules:
            schedule.step()
        self._abandon(done=True)
        pair.replicas.check_equal()


def _inputs(data):
    return tuple(data) if len(data) > 1 else data[0]
