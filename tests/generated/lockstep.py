"""Takes a case step by step with mgpu and without it, and compares."""
import contextlib
import importlib
import re
import tempfile
import traceback
from pathlib import Path

import numpy as np

import mgpu

from .cases import CLASSES, WIDTH, WORDS, Case, Step
from .networks import network, watch_dropout

PACKAGE = str(Path(mgpu.__file__).parent)
MAX_NORM = 0.5

#: what mgpu may refuse, in whose words
REFUSALS = {"clip": "(?s)(?=.*allreduce_grads)(?=.*clip_global_norm)",
            "stale": "has no new gradient", "batch_size": "batch_size must",
            "rnn": "float64 gradients.*float32",
            "sparse": "hold all rows.*sparse",
            "checkpoint": "a checkpoint holds no gradients",
            "again": "Run this step again", "sync": "meet in the forward pass"}


class Failure(AssertionError):
    """mgpu is neither equal nor did it refuse by name."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Boom(Exception):
    """An error in the user's loss."""


def run(case: Case, tamper=None) -> list[str]:
    """Take the steps of `case`; what mgpu refused, as keys of `REFUSALS`.

    ``tamper(replicas, moment)`` is called when gradients are "reduced" and
    when the weights are "updated"; it plants faults, to judge the judge.

    Raises
    ------
    Failure
        Something differs, or another error than a refusal.
    """
    with mgpu.using_backend(case.engine):
        side = importlib.import_module(
            {"torch": ".torch_side", "mxnet": ".gluon_side"}[case.engine],
            __package__)
        return _Lockstep(case, side, tamper).run()


def gap(a, b) -> float:
    """The largest difference, relative to the larger of 1 and `b`."""
    a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
    if a.shape != b.shape or not np.isfinite([a.sum(), b.sum()]).all():
        return float("inf")
    return float(abs(a - b).max() / max(1.0, abs(b).max())) if a.size else 0.0


def tolerance(case: Case) -> float:
    # Gluon's Adam takes the rate with the bias correction as a float32.
    return 1e-5 if case.dtype == "float32" or (
        case.engine, case.optimizer) == ("mxnet", "adam") else 1e-12


class _Lockstep:
    def __init__(self, case: Case, side, tamper):
        self.case, self.side, self.tamper = case, side, tamper
        self.refused, self.masks, self.saved = [], {}, None
        self.trainer, self.where = None, "at the start"
        self.done = True        # no gradient waits
        #: whether running statistics are those of one device
        self.promised = "batch_norm" not in case.kinds() or case.k == 1 \
            or case.batch_norm == "sync"

    def run(self) -> list[str]:
        case, side = self.case, self.side
        if case.refused():
            with self.refusal(case.refused(), required=True):
                self.initialize(network(side, case), case.k)
            return self.refused
        self.plain = side.Plain(case)
        self.set_up(case.k)
        for number, step in enumerate(case.steps):
            self.rng = np.random.default_rng(step.seed)
            for action in step.before:
                self.where = f"step {number}, {' '.join(map(str, action))}"
                with self.ours():
                    getattr(self, action[0])(*action[1:])
            self.where = f"step {number}"
            if not self.tried(step):
                return self.refused
        self.where = "at the end"
        self.predict()
        return self.refused

    def tried(self, step: Step) -> bool:
        """Take a step. A checkpoint may be refused in its pass: for good
        around synchronised batch norm (False), or until the next try."""
        try:
            self.step(step)
        except Failure as failure:
            why = [why for why in ("again", "sync") if re.search(
                       REFUSALS[why], str(failure.__cause__))]
            if not why or not self.case.kinds() & {"checkpoint", "reentrant"}:
                raise
            self.refused += why
            self.promised = self.promised and \
                "batch_norm" not in self.case.kinds()
            self.abandon()
            return why == ["again"] and self.tried(step)
        return True

    def initialize(self, net, k: int):
        return mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)],
                               self.case.init, batch_norm=self.case.batch_norm)

    def set_up(self, k: int) -> None:
        """The user's network on `k` devices, with a trainer."""
        case, side = self.case, self.side
        net = network(side, case)
        watch_dropout(side, net, self.masks.setdefault)
        with self.ours():
            self.replicas = self.initialize(net, k)
            self.trainer = mgpu.Trainer(
                self.replicas, case.optimizer, case.options,
                semantics=side.semantics, allreduce=case.allreduce,
                lr_scheduler=case.schedule and mgpu.lr_scheduler
                .FactorScheduler(*case.schedule))
            self.adding = {p.number for p in self.replicas.params()
                           if case.adds and p.grad_req != "null"}
            for number in self.adding:
                self.replicas.params()[number].grad_req = "add"
        self.loss = getattr(mgpu.losses, case.loss)()
        if self.tamper:
            update = self.trainer.update

            def tampered(n: int) -> None:
                self.tamper(self.replicas, "reduced")
                update(n)
                self.tamper(self.replicas, "updated")
            self.trainer.update = tampered

    # -- errors and differences ---------------------------------------------

    @contextlib.contextmanager
    def ours(self):
        """Any error of mgpu inside the block is a failure."""
        try:
            yield
        except Failure:
            raise
        except Exception as error:
            raise Failure(f"raised {type(error).__name__}", f"{self.where}: "
                          + "".join(traceback.format_exception(error)[-4:])) \
                from error

    @contextlib.contextmanager
    def refusal(self, why: str | None, required: bool = False):
        """mgpu may (`required`: must) refuse what the block does, for the
        reason `why`; weights and states stay then."""
        before = why and self.trainer and self.state()
        try:
            with self.ours():
                yield
        except Failure as failure:
            error = failure.__cause__
            if why is None or not re.search(REFUSALS[why], str(error)) \
                    or not traceback.extract_tb(
                        error.__traceback__)[-1].filename.startswith(PACKAGE):
                raise
            self.refused.append(why)
            if before:
                self.same("a refused call changed", self.state(), before, 0)
        else:
            if required:
                raise Failure(f"not refused: {why}", self.where)

    def state(self):
        """The weights of the user's own network, and the trainer's state."""
        states = self.trainer.export_states()
        return {**{p.name: mgpu.to_numpy(p.list_data()[0])
                   for p in self.replicas.params()},
                "counts": [states.num_update, *states.counts.values()],
                **{" ".join(key): x for key, x in states.slots.items()}}

    def same(self, what: str, ours, wanted, limit: float | None = None):
        limit = tolerance(self.case) if limit is None else limit
        gaps = {name: gap(ours[name], wanted[name]) if name in wanted
                else float("inf") for name in ours}
        name = max(gaps, key=gaps.__getitem__)
        if gaps[name] > limit or ours.keys() != wanted.keys():
            raise Failure(what, f"{self.where}: {name} by {gaps[name]:.3g}"
                          f"\nmgpu:  {ours.get(name)}"
                          f"\nplain: {wanted.get(name)}")

    def compare(self) -> None:
        nets = self.replicas.net, self.plain.net
        ours, wanted = map(self.side.values, nets)
        for name in () if self.promised else self.side.statistics(nets[1]):
            del ours[name], wanted[name]
        self.same("weights differ", ours, wanted)

    # -- what users do between steps ----------------------------------------

    def edit(self, number: int, way: str) -> None:
        ours, theirs = map(self.side.parameters,
                           (self.replicas.net, self.plain.net))
        number %= len(ours)
        value = self.rng.normal(0, 0.5, ours[number].shape)
        self.side.edit(theirs[number], way, value)
        if way == "set_data":
            self.replicas.params()[number].set_data(value)
        else:
            self.side.edit(ours[number], way, value)

    def load(self) -> None:
        buffers = self.side.statistics(self.plain.net)
        new, tied = {}, {}
        for name, x in self.side.values(self.plain.net).items():
            other = x + 0.25 if name in buffers else tied.setdefault(
                x.tobytes(), self.rng.normal(0, 0.5, x.shape))
            new[name] = np.array(other, x.dtype)
        for net in (self.replicas.net, self.plain.net):
            self.side.load(net, new)

    def freeze(self, number: int, where: str, frozen: bool = True) -> None:
        # Not the first layer, nor the last one.
        count = len(self.replicas.params()) - 4
        if count > 0:
            number = 2 + number % count
            nets = [self.plain.net, self.replicas.net]
            # On torch, the flag of what was frozen at first means "write".
            if where == "mgpu" or self.case.adds and not frozen \
                    and number not in self.adding:
                self.adding.add(number)
                self.replicas.params()[number].grad_req = "null" \
                    if frozen else "add" if self.case.adds else "write"
                nets.pop()
            for net in nets:
                self.side.freeze(self.side.parameters(net)[number],
                                 self.case, frozen)

    def unfreeze(self, number: int, where: str) -> None:
        self.freeze(number, where, False)

    def rate(self, rate: float) -> None:
        self.trainer.set_learning_rate(rate)
        self.plain.set_rate(rate)

    def save(self) -> None:
        self.saved = (self.export(), self.trainer.export_states(),
                      self.plain.save())

    def export(self):
        # Statistics of one device, for any number of devices.
        return self.replicas.export_numpy(device=mgpu.cpu(0))

    def restore(self) -> None:
        if self.saved is not None:
            self.replicas.import_numpy(self.saved[0])
            self.trainer.import_states(self.saved[1])
            self.plain.restore(self.saved[2])

    def resume(self, k: int, how: str) -> None:
        """In a network of its own, as in another process."""
        values, before = self.export(), self.replicas
        with tempfile.TemporaryDirectory() as folder:
            file, refused = Path(folder) / "file", len(self.refused)
            if how == "checkpoint":
                with self.refusal(None if self.done else "checkpoint"):
                    mgpu.save_checkpoint(file, before, self.trainer)
            if how == "states" or len(self.refused) > refused:
                how = "states"
                self.trainer.save_states(file)
            self.set_up(k)
            if how == "states":
                self.replicas.import_numpy(values)
                self.trainer.load_states(file)
            else:
                mgpu.load_checkpoint(file, self.replicas, self.trainer,
                                     seed=None if k == len(before) else 1)
        for p, old in zip(self.replicas.params(), before.params()):
            p.grad_req = old.grad_req
        for p, old in zip(*map(self.side.parameters, (self.replicas.net,
                                                      before.net))):
            for factor in ("lr_mult", "wd_mult"):
                if hasattr(old, factor):
                    setattr(p, factor, getattr(old, factor))

    def multiply(self, number: int, factor: str) -> None:
        for net in (self.replicas.net, self.plain.net):
            found = self.side.parameters(net)
            setattr(found[number % len(found)], factor, 2.0)

    def predict(self) -> None:
        """On every device."""
        data, _ = self.batch(3)
        wanted = self.plain.predict(data)
        for one in self.replicas if self.promised else ():
            with self.ours():
                out = one(*(mgpu.put(x, one.device) for x in data))
            self.same("predictions differ", {str(one): mgpu.to_numpy(out)},
                      {str(one): wanted})

    # -- a step -------------------------------------------------------------

    def batch(self, n: int):
        case, rng = self.case, self.rng
        x = rng.normal(size=(n, WIDTH)).astype(case.dtype)
        x[:, 3] = rng.choice([-1, 1])       # what the whole batch says
        data = [x] + [rng.integers(0, WORDS, n, "int32")] * case.words
        y = rng.integers(0, CLASSES, n, "int32") if case.loss != "L2Loss" \
            else rng.normal(size=(n, CLASSES)).astype(case.dtype)
        return data, y

    def step(self, step: Step) -> None:
        batches = [self.batch(n) for n in step.rows]
        if step.fate == "retry":
            self.fail(step.how, *batches[0])
        if step.how == "train_batch":
            self.whole(*batches[0])
            return
        for data, y in batches:
            self.masks.clear()
            with self.ours():
                losses = self.passes(step.how, data, y, self.loss)
            self.plainly(data, y, losses)
        if step.fate == "look":
            with self.ours(), contextlib.ExitStack() as stack:
                if "batch_norm" not in self.case.kinds():
                    stack.enter_context(mgpu.record())
                self.replicas(mgpu.split_batch(_inputs(data), y,
                                               self.replicas.devices)[0])
        if step.fate == "refused":
            with self.refusal("batch_size", required=True):
                self.trainer.step(0)
        if step.fate == "skip":
            self.abandon()
        else:
            self.by_hand(step.clip, sum(step.rows))

    def whole(self, data, y) -> None:
        """`train_batch`, which refuses what the batch does not reach."""
        self.masks.clear()
        losses, refused = [], len(self.refused)
        with self.refusal("stale" if self.case.kinds() & {"experts", "switch"}
                          else None):
            losses = mgpu.train_batch(_inputs(data), y, self.replicas,
                                      self.loss, self.trainer)
        self.plainly(data, y, losses)
        refused = len(self.refused) > refused
        if refused == self.plain.gradients()[1]:
            raise Failure("stale", f"{self.where}: of all gradients that the "
                          "batch should reach, none is stale" if refused else
                          f"{self.where}: a stale gradient is not refused")
        self.abandon() if refused else self.taken(len(y))

    def by_hand(self, clip: str, n: int) -> None:
        """The step after the backward passes, with a clip somewhere."""
        found, every = self.plain.gradients()
        skips, refused = self.case.skips, len(self.refused)
        why = None if every or skips else "stale"
        if clip == "before":
            with self.ours():
                self.side.clip(self.replicas.net, MAX_NORM)
            with self.refusal("clip" if len(self.replicas) > 1 else why):
                self.trainer.step(n, ignore_stale_grad=skips)
        else:
            with self.refusal(why, required=why is not None):
                self.trainer.allreduce_grads(ignore_stale_grad=skips)
                if clip == "trainer":
                    self.trainer.clip_global_norm(MAX_NORM)
                elif clip:
                    self.side.clip(self.replicas.net, MAX_NORM)
                self.trainer.update(n)
        if len(self.refused) > refused:
            self.abandon()
            return
        if clip == "trainer":       # Gluon's formula
            norm = sum((mgpu.to_numpy(g) ** 2).sum() for g in found) ** 0.5
            for g in found:
                g *= min(1.0, MAX_NORM / (norm + 1e-8))
        elif clip:
            self.side.clip(self.plain.net, MAX_NORM)
        self.taken(n)

    def abandon(self, done: bool = False) -> None:
        """The batch is given up (or `done`); what accumulates is cleared by
        the user."""
        self.done = done or self.case.adds
        if self.case.adds:
            self.plain.zero_grad()
            self.replicas.zero_grad()
        self.compare()

    def taken(self, n: int) -> None:
        for g in self.plain.gradients()[0]:
            g /= n      # by itself: Gluon's rescale_grad is a float32
        self.plain.step()
        self.abandon(done=True)
        with self.ours():
            self.replicas.check_equal()

    def passes(self, how: str, data, y, loss):
        """Forward and backward passes by hand; the losses by device."""
        shards, labels = mgpu.split_batch(_inputs(data), y,
                                          self.replicas.devices)
        if how == "one by one":
            losses = []
            for one, x, label in zip(self.replicas, shards, labels):
                if len(label):
                    with mgpu.record():
                        losses.append(loss(one(x), label))
                    mgpu.backward(losses[-1])
            return losses
        with mgpu.record():
            losses = [None if out is None else loss(out, label) for out, label
                      in zip(self.replicas(shards), labels)]
        mgpu.backward(losses)
        return losses

    def plainly(self, data, y, losses) -> None:
        """The plain pass, with the masks of mgpu's; compares the losses."""
        places, found = self.side.places(self.replicas), {}
        for key in sorted(self.masks, key=lambda key: places[key][1]):
            found.setdefault(places[key][0], []).append(self.masks[key])
        self.plain.masks = {path: np.concatenate(parts)
                            for path, parts in found.items()}
        wanted = self.plain.backward(data, y)
        parts = [mgpu.to_numpy(x) for x in losses if x is not None]
        if parts:
            self.same("losses differ", {"loss": np.concatenate(parts)},
                      {"loss": wanted})

    def fail(self, how: str, data, y) -> None:
        """An error in the loss, for the rows like one of the batch, drawn;
        the step comes again."""
        row = y[self.rng.integers(0, len(y))]

        def loss(out, label):
            if (mgpu.to_numpy(label) == row).any():
                raise Boom
            return self.loss(out, label)
        try:
            if how == "train_batch":
                mgpu.train_batch(_inputs(data), y, self.replicas, loss,
                                 self.trainer)
            else:
                self.passes(how, data, y, loss)
        except Boom:
            if "batch_norm" in self.case.kinds():
                self.promised = False       # statistics may have moved
            if self.case.adds:
                self.replicas.zero_grad()


def _inputs(data):
    return tuple(data) if len(data) > 1 else data[0]
