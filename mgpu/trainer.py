"""One optimizer step, of a network on several devices."""
import contextlib
import json
import math
import operator
import os
import zlib
from collections.abc import (Callable, Collection, Iterable, Iterator,
                             Mapping, Sequence)
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mgpu import (backends, datasets, environment, host_memory, optimizers,
                  probes, trainer_states)
from mgpu.arguments import Hints, by_name, is_integer, is_number, one_of
from mgpu.backends import in_use
from mgpu.backends.base import Memory, OptimizerObject
from mgpu.collectives import AllReduce, allreduce_many
from mgpu.collectives.strategies import strategy_of
from mgpu.compat.gluon import (GluonTrainerNames, check_store, global_norm,
                               replaces_base_lr, without_no_rule)
from mgpu.compat.pytorch import TorchTrainerNames
from mgpu.device import as_device
from mgpu.distributed.strategy import over_processes, share_values
from mgpu.errors import (DeviceError, NonFiniteGradient,
                         StaleGradientError)
from mgpu.files import FilePath
from mgpu.host_memory import Update
from mgpu.loss_scale import LossScale, all_finite
from mgpu.parameters import Parameter
from mgpu.replicas import Replicas, replicas_of
from mgpu.schedule_state import ScheduleState
from mgpu.trainer_states import DeviceState, TrainerStates

__all__ = ["StaleGradientError", "Trainer", "TrainerStates",
           "check_batch_size", "check_pair"]


class Trainer(GluonTrainerNames, TorchTrainerNames, Hints):
    """Updates a network on several devices.

    Gluon's `Trainer` with one meaning for any number of devices: gradients
    are sums over all devices (and processes), divided once by the number of
    rows. There is one state for each parameter, and one update, of the
    network itself; the other devices follow in the next pass.

    Parameters
    ----------
    replicas : Replicas, or parameters of its network
        What Gluon and torch take: ``net.collect_params()``,
        ``net.parameters()``, a list or dict of some of them, or of
        `Parameter`. Others are not moved: another trainer may step them,
        before the next pass, from the same gradients.
    optimizer : str, mgpu.optimizers.Optimizer or the framework's own object
        sgd, nag, adam, adamw, adamax, nadam, rmsprop, adagrad, adadelta,
        ftrl, signum, lamb, lars, ftml, dcasgd, sgld, groupadagrad. An object
        of any class of `torch.optim` or `mx.optimizer`, or of a class derived
        from one, updates the network itself: its ``step()`` runs, with its
        own groups, schedules, hooks and memory. What is in none of a torch
        object's groups is not moved. Parameters in them that are not the
        network's, such as those of a loss, are updated too. Their gradients
        are divided as the others are, and cleared. An object of MXNet's
        updates a network of either engine (torch's arrays are copied to
        MXNet and back).
    optimizer_params : dict, optional
        Options of the optimiser under Gluon's names (``learning_rate``,
        ``wd``, ``momentum``, ``clip_gradient``, ...), under torch's with
        ``semantics="torch"``. ``lr_scheduler`` may stand here too, and of
        Gluon's ``rescale_grad``, which multiplies the gradients, and
        ``multi_precision``, which changes nothing but in float16, where it
        is refused.
    semantics : {"gluon", "torch"}
        Whose formulas, on both engines. Not read where `optimizer` is an
        object.
    lr_scheduler : callable, optional
        ``rate = lr_scheduler(number of the update)``, from 1: those of
        `mgpu.lr_scheduler`, or any function. All parameters of a step have
        one rate. (Gluon asks the schedule for each: one that was frozen for
        some steps, and comes first, has the rate of the step before.) As in
        Gluon a rate that was given replaces the ``base_lr`` of a schedule
        (but not with ftrl), and so does the default rate of adam, adamw,
        adamax, nadam, rmsprop and signum.
    lr_mult, wd_mult : dict, optional
        Factors by parameter name, for example ``{"0.bias": 2.0}``. The
        gamma and beta of a norm may be called weight and bias, as torch does.
    loss_scale : float or "dynamic", optional
        What losses are multiplied by before the backward pass, so that small
        gradients do not vanish in float16; `update` divides by it.
        `train_batch` multiplies; other code multiplies its losses by
        `Trainer.loss_scale` itself. A power of two changes no bit of the
        result unless something overflows or vanishes. "dynamic" is the rule
        of ``torch.amp.GradScaler`` with its defaults, on both engines: 2**16
        at first; an update whose summed gradients are not all finite is
        skipped and halves the scale; 2000 updates in a row
        double it. Each update then waits for the gradients.
    nonfinite : {"raise", "skip", "ignore"}, optional
        What `update` does where a summed gradient has a NaN or an infinite
        element; the same in all processes. "raise":
        `mgpu.errors.NonFiniteGradient`; "skip": nothing, and counts it in
        `skipped_steps`; "ignore": applies it, and does not look. Looking
        waits for the gradients. Default: "skip" with a dynamic scale, which
        takes no other, else "ignore".
    allreduce : str or mgpu.collectives.AllReduce
        With several processes, how gradients are summed over them: the
        ``algorithm=`` of `mgpu.allreduce`.
    kvstore, update_on_kvstore
        Gluon's; they change nothing. (With None a Gluon trainer of several
        devices sums no gradients, so that these part; here it does.)
        "nccl", "dist_*" and ``compression_params`` are refused.

    Attributes
    ----------
    loss_scale : float
        The scale now; 1.0 without one. To be read, not set.
    lr_mult, wd_mult : dict of str -> float
        The factors that this trainer was given.
    skipped_steps : int
        Updates that were skipped so far, as a gradient was not finite; they
        are not in `num_update`.

    Raises
    ------
    ValueError
        An unknown optimiser, option or parameter name.
    TypeError
        `replicas` did not come from `initialize`, or an option of another
        type.
    """

    _hints: ClassVar[Mapping[str, str]] = {
        "lr": "learning_rate and set_learning_rate",
        **dict.fromkeys(("wd", "weight_decay"), "optimizer.wd, or wd_mult"),
        "_scale": "rescale_grad in optimizer_params, the batch_size of step "
                  "or update, or loss_scale",
        "param_groups": "set_learning_rate, lr_mult and wd_mult, or those of "
                        "the torch.optim object that the Trainer was given"}

    def __init__(self, replicas: Replicas,
                 optimizer: str | optimizers.Optimizer,
                 optimizer_params: Mapping[str, Any] | None = None,
                 semantics: str = "gluon",
                 lr_scheduler: Callable[[int], float] | None = None,
                 lr_mult: Mapping[str, float] | None = None,
                 wd_mult: Mapping[str, float] | None = None,
                 loss_scale: float | str | None = None,
                 allreduce: str | AllReduce = "auto",
                 nonfinite: str | None = None, *, kvstore: Any = "device",
                 update_on_kvstore: bool | None = None,
                 compression_params: Any = None):
        check_store(kvstore, update_on_kvstore, compression_params, semantics)
        #: the names of what is trained; None: all parameters
        self._own: frozenset[str] | None
        replicas, self._own = replicas_of(replicas)
        replicas.check_valid()
        options = dict(by_name("optimizer_params", optimizer_params))
        self._object = None
        if not isinstance(optimizer, (str, optimizers.Optimizer)):
            known = backends.given(optimizer)
            self._object = known and known.optimizer(
                optimizer, replicas.network)
        scheduler = options.pop("lr_scheduler", None)
        if scheduler is not None and lr_scheduler is not None:
            raise ValueError("expected one lr_scheduler; received one as an "
                             "argument and one in optimizer_params. Give one "
                             "of them.")
        scheduler = scheduler or lr_scheduler
        if scheduler is not None:
            known = backends.given(scheduler)
            scheduler = known and known.schedule(scheduler) or scheduler
        #: Gluon's rescale_grad
        self._rescale = 1.0
        if self._object is not None or isinstance(optimizer,
                                                  optimizers.Optimizer):
            if options:
                raise ValueError(
                    "optimizer_params go with an optimiser's name; received "
                    f"{sorted(options)} with an Optimizer object.")
            if self._object is not None:
                self._take_object(self._object, scheduler)
            rate_given = True
        else:
            if semantics == "gluon":
                self._rescale, options = without_no_rule(
                    optimizer, options, {p.name: p.dtype
                                         for p in replicas.params()})
            rate_given = "learning_rate" in options or "lr" in options
            optimizer = optimizers.create(optimizer, semantics=semantics,
                                          **options)
            if semantics == "gluon":
                rate_given = replaces_base_lr(optimizer.family, rate_given)
        self.replicas = replicas
        names = {p.name for p in replicas.params()}
        lr_mult, wd_mult = (
            {_own_name(name, names, names - set(factors or ())): factor
             for name, factor in by_name(what, factors).items()}
            for what, factors in (("lr_mult", lr_mult), ("wd_mult", wd_mult)))
        for what, factors in (("lr_mult", lr_mult), ("wd_mult", wd_mult)):
            unknown = sorted(set(factors) - names)
            if unknown:
                raise ValueError(
                    f"{what} names parameters of the network; received "
                    f"{unknown}. It has {sorted(names)}.")
            for name, factor in factors.items():
                _check_number(f"{what} of {name!r}", factor)
        if not (scheduler is None or callable(scheduler)):
            raise TypeError(
                "lr_scheduler is called with the number of an update; "
                f"received {type(scheduler).__name__}. Use mgpu.lr_scheduler,"
                " or a function: lambda n: 0.1 * 0.5 ** (n // 100).")
        self._loss_scale = LossScale(loss_scale)
        dynamic = self._loss_scale.dynamic
        if nonfinite is not None:
            one_of("nonfinite", nonfinite, ("raise", "skip", "ignore"))
            if dynamic and nonfinite != "skip":
                raise ValueError(
                    "a dynamic loss_scale skips updates whose gradients are "
                    f"not finite; received nonfinite={nonfinite!r}. Leave it "
                    "out, or give a fixed loss_scale.")
        self._nonfinite = nonfinite or ("skip" if dynamic else "ignore")
        self._strategy = over_processes(strategy_of(allreduce, "allreduce"),
                                        replicas.span)
        self.optimizer = optimizer
        self.semantics = (self._object or optimizer).semantics
        self.lr_mult, self.wd_mult = lr_mult, wd_mult
        self._lr_scheduler = scheduler
        if self._object is None and hasattr(scheduler, "base_lr"):
            # Gluon: a rate that was given replaces the schedule's own, and
            # so does the default rate of some optimisers.
            if rate_given:
                scheduler.base_lr = optimizer.learning_rate
            else:
                optimizer.learning_rate = scheduler.base_lr
        self._schedule = ScheduleState(replicas.backend)
        self._schedule.meet(self.lr_scheduler)
        #: updates so far (see `_next_update`), and by parameter (a skipped
        #: one is not counted)
        self.num_update = 0
        self._counts: dict[str, int] = {}
        self._states: DeviceState = {}
        #: in which nadam takes the parameters, by name; empty: `gluon_order`
        #: of an ordinary trainer
        self.update_order: Sequence[str] = ()
        #: of the rule, checked
        self._options: dict[str, Any] = {}
        #: whose gradients are summed and wait for `update`
        self._summed: list[Parameter] | None = None
        #: whether this process has a part in them, and has had a pass
        self._had_part = self._had_pass = False
        #: of the step under way: what all processes give alike
        self._compared: dict[str, Any] = {}
        self._number = replicas.span.world.number()
        self._agree()

    def _agree(self) -> None:
        """All processes apply the same rule. Raises
        `mgpu.errors.ModelMismatch`."""
        world = self.replicas.span.world
        if world.size == 1:
            return
        world.check_dtypes({p.name: p.dtype for p in self.replicas.params()})
        world.agree("mgpu.Trainer", {
            **self._rule_facts(), "parameters": sorted(self._own or ()),
            "semantics": self.semantics,
            "schedule": None if self.lr_scheduler is None
            else type(self.lr_scheduler).__name__,
            "lr_mult": self.lr_mult, "wd_mult": self.wd_mult,
            "rescale_grad": self._rescale,
            "loss_scale": [self.loss_scale, self._loss_scale.dynamic],
            "nonfinite": self._nonfinite, "number": self._number,
            "allreduce": repr(self._strategy),
            "grad_req": self.replicas.grad_reqs()},
            "Give every rank the same arguments.")
        if self._object is not None:
            share_values([[x] for x in self._object.others()],
                         self.replicas.span)

    def _rule_facts(self) -> dict[str, Any]:
        """What all processes have alike, by what it is called."""
        if self._object is None:
            return {"options of the optimiser": {
                "class": type(self.optimizer).__name__, **{
                    name: repr(x) for name, x
                    in vars(self.optimizer).items()}}}
        return {f"options of group {i} of the optimiser": {
            "names": sorted(names or ()), "formula": family or type(
                self.optimizer).__qualname__,
            **{name: repr(x) for name, x in options.items()}}
            for i, (names, family, options)
            in enumerate(self._object.groups())}

    def __repr__(self) -> str:
        return f"Trainer({self.optimizer!r}, {self.replicas!r})"

    if not TYPE_CHECKING:
        def __setattr__(self, name, value):
            # It would do nothing. (A subclass may declare it.)
            if name in self._hints and not hasattr(type(self), name):
                self.__getattr__(name)
            super().__setattr__(name, value)

    @property
    def loss_scale(self) -> float:
        return self._loss_scale.value

    @property
    def skipped_steps(self) -> int:
        return self._loss_scale.skipped_steps

    @property
    def pending(self) -> bool:
        """Whether summed gradients wait for `update`."""
        return self._summed is not None

    # -- an optimizer object of a framework ---------------------------------

    def _take_object(self, own: OptimizerObject, schedule: Any) -> None:
        """Raises ValueError for a schedule or parameters that are not those
        of the object."""
        if schedule is not None:
            if not own.takes_schedule:
                raise ValueError(
                    "the groups of this optimiser object have its rates; "
                    f"received lr_scheduler={schedule!r} too. Use a schedule "
                    "of its own framework, and call its step().")
            if own.schedule is not None:
                raise ValueError(
                    "expected one lr_scheduler; received one as an argument "
                    "and one in the optimiser object. Give one of them.")
            own.schedule = schedule
        self._rescale = own.scale
        names = own.names()
        if None not in (self._own, names) and self._own != names:
            raise ValueError(
                "a Trainer moves what is in the groups of its optimiser "
                f"object; received {len(self._own or ())} parameters besides,"
                " which are not those. Pass the replicas.")
        if names is not None:
            self._own = None    # groups may be added

    def rule(self) -> optimizers.Optimizer:
        """`optimizer` as a rule of mgpu's, with the options that it has now.
        ValueError for an optimizer object whose formula mgpu does not have,
        or whose groups have different ones."""
        if self._object is None:
            return self.optimizer
        groups = self._object.groups()
        if groups[0].family is None or any(
                group[1:] != groups[0][1:] for group in groups):
            raise ValueError(
                "expected an optimizer whose formula mgpu has, with one set "
                f"of options; received {self.optimizer!r}. Pass a name and "
                "optimizer_params.")
        return optimizers.create(groups[0].family, self.semantics,
                                 **groups[0].options)

    # -- rates --------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The rate of the last update (of the first one, before it). Of an
        optimizer object: that of its first group, now."""
        return self.rate(self.num_update)

    @property
    def lr_scheduler(self) -> Callable[[int], float] | None:
        """``rate = lr_scheduler(number of the update)``. It may be set."""
        return self._lr_scheduler if self._object is None \
            else self._object.schedule

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Callable[[int], float] | None) -> None:
        if self._object is None:
            self._lr_scheduler = schedule
        else:
            self._object.schedule = schedule

    def set_learning_rate(self, lr: float) -> None:
        """Use `lr` from the next step on. ValueError under a schedule, which
        would replace it, for groups with different rates, or for a negative
        or non-finite rate; TypeError for what is not a number. A schedule of
        torch's goes on from what it finds in its optimiser's groups."""
        if self.lr_scheduler is not None:
            raise ValueError("the learning rate follows the trainer's "
                             f"lr_scheduler; received {lr!r}. Change the "
                             "schedule instead.")
        _check_number("the learning rate", lr, ", 0 or more",
                      lambda x: x >= 0)
        if self._object is not None:
            self._object.set_learning_rate(float(lr))
        else:
            self.optimizer.learning_rate = float(lr)

    def rate(self, num_update: int) -> float:
        """The learning rate of update `num_update`, from 1, before any
        multiplier. A look: a schedule that changes as it is called is left
        as it was. ValueError or TypeError for a schedule that gives no
        finite number, 0 or more."""
        if self.lr_scheduler is None:
            return (self._object or self.optimizer).learning_rate
        rate = self._schedule.ask(self.lr_scheduler, max(1, num_update))
        _check_number("what a schedule returns", rate, ", 0 or more",
                      lambda x: x >= 0)
        return float(rate)

    def multipliers(self, p: Parameter) -> tuple[float, float]:
        """What a parameter's rate and weight decay are multiplied by: those
        of this trainer, else the parameter's own."""
        lr_mult, wd_mult = p.multipliers()
        return (self.lr_mult.get(p.name, lr_mult),
                self.wd_mult.get(p.name, wd_mult))

    # -- a step -------------------------------------------------------------

    def step(self, batch_size: float | None = None,
             ignore_stale_grad: bool = False) -> None:
        """`allreduce_grads`, then `update`.

        With ``grad_req="add"`` gradients go on growing until they are set to
        zero (`Replicas.zero_grad`); do it after each step, as in Gluon.
        Where a subclass has its own `allreduce_grads` or `update`, these are
        called, one after the other (Gluon's own `step` passes them by).

        Parameters
        ----------
        batch_size : float
            What the summed gradients are divided by: the rows of the whole
            batch, over all devices; or its tokens, the sum of its weights.
            With several processes: those of this process, perhaps 0. Their
            sum over all is what divides. ValueError without it, or for a
            closure, which torch's own step takes.
        ignore_stale_grad : bool
            Skip a parameter that no device's backward pass has reached since
            the last step. By default that is an error.

        Raises
        ------
        StaleGradientError
            No row of the batch has reached a parameter. Names the parameter;
            nothing has changed.
        mgpu.errors.DeviceError
            What was queued on a device has failed there. Nothing has
            changed, and the gradients are void.
        mgpu.errors.NonFiniteGradient
            With ``nonfinite="raise"``. No parameter has changed.
        RuntimeError
            Another thread uses the replicas, or they are void. Nothing has
            changed.
        ValueError
            A batch size that is no finite number above 0.
        """
        with self.replicas.span.world.guard():
            batch_size = self._checked(batch_size)
        if self._overrides("allreduce_grads", "update"):
            self.allreduce_grads(ignore_stale_grad)
            self.update(batch_size)
            return

        def both() -> None:
            self._update(self._allreduce(ignore_stale_grad, batch_size))
        self._whole(both)

    def step_parts(self, parts: Sequence[Callable[[], float]],
                   ignore_stale_grad: bool = False,
                   clip_norm: float | None = None) -> None:
        """One step of a batch whose `parts` pass one after the other.

        The gradients of the parts are added up, and divided by all their
        rows. Buffers are as after as many steps. Where a part fails no
        parameter has changed, and all gradients are void.

        Parameters
        ----------
        parts : sequence of callables
            Each runs the forward and backward passes of its part on all
            devices, and returns its rows. With several processes: as many
            on each, and 0 rows where a process has none.
        ignore_stale_grad : bool
            As in `step`, for what no part reached.
        clip_norm : float, optional
            The largest norm of the gradients divided by all rows and by the
            `loss_scale`. The factor is that of `clip_global_norm`;
            with an optimiser of torch's semantics that of torch's
            ``clip_grad_norm_``, ``clip_norm / (norm + 1e-6)`` where that is
            below 1.

        Raises
        ------
        Exception
            As `step` and `clip_global_norm` do.
        ValueError
            A trainer with a `step`, `allreduce_grads` or `update` of its
            own; several parts and a parameter with ``grad_req="add"``, or
            one with a gradient that the trainer does not move.
        """
        with self.replicas.span.world.guard():
            self.check_parts(len(parts), clip_norm)
        rows = 0.0
        held: dict[Parameter, Any] = {}
        backend = self.replicas.backend

        def hold() -> None:
            """Keep what this part has written, for the sum of all parts."""
            for p in self.replicas.params():
                x = p.data()
                if p.grad_req != "null" and backend.is_fresh(x) \
                        and backend.has_gradient(x):
                    g = backend.grad(x)
                    held[p] = backend.put(g, g) if p not in held \
                        else held[p] + g
                    backend.mark_used(x)

        def apply() -> None:
            self._add(held)
            whole = self._allreduce(ignore_stale_grad, rows, held)
            if clip_norm is not None:
                self._clip(self._summed or [], clip_norm,
                           whole / self._rescale,
                           1e-6 if self.semantics == "torch"
                           else 1e-8)
            self._update(whole)
        self._compared = {"accumulate": len(parts), "clip_norm": clip_norm}
        try:
            for number, part in enumerate(parts, 1):
                with self.replicas.span.world.guard():
                    rows += part()
                self._whole(apply if number == len(parts) else hold)
        except BaseException:
            self._summed = None
            raise
        finally:
            self._compared = {}

    def _add(self, held: Mapping[Parameter, Any]) -> None:
        """Add what earlier parts `held` to the gradients of the last one."""
        backend = self.replicas.backend
        for p, part in held.items():
            x = p.data()
            g = backend.grad(x)
            if backend.is_fresh(x):
                g += part
            else:       # the last part has not reached it
                g[...] = part

    def check_parts(self, count: int, clip_norm: float | None) -> None:
        """Raise ValueError or TypeError as `step_parts` would, of `count`
        parts."""
        if clip_norm is not None:
            _check_number("clip_norm", clip_norm, " above 0", lambda x: x > 0)
        if (count > 1 or clip_norm is not None) and self.observed:
            raise ValueError(
                "accumulate and clip_norm go with mgpu's own Trainer.step, "
                "allreduce_grads and update; received a "
                f"{type(self).__name__}, which has its own. Do it there, or "
                "use an mgpu.Trainer.")
        added = [p.name for p in self.replicas.params()
                 if p.grad_req == "add"] if count > 1 else []
        if added:
            raise ValueError(
                "accumulate adds up the gradients of its batches itself, "
                "and begins anew with each step; received grad_req='add' of "
                f"{added[0]!r}. Use grad_req='write', or accumulate=1.")

    def _checked(self, batch_size: Any) -> float:
        """A process may have no rows of a batch, or rows that count as
        nothing."""
        if self.replicas.span.wide and is_number(batch_size) \
                and batch_size == 0:
            return 0
        return check_batch_size(batch_size)

    def _check_part(self, batch_size: float | None) -> None:
        """Refuse no rows where this process has a part in the gradients, and
        rows without a pass."""
        if batch_size and self.replicas.span.wide and not self._had_pass:
            raise ValueError(
                "a process gives the size of its own part of the batch, 0 "
                f"where it has none; received {batch_size:g} on "
                f"{self.replicas.span.world!r}, which has had no backward "
                "pass since the last step. Pass 0, or run one inside "
                "record().")
        if batch_size == 0 and self._had_part:
            raise ValueError(
                "a process gives the size of its own part of the batch, 0 "
                "where it has none; received 0 on "
                f"{self.replicas.span.world!r}, whose backward pass has "
                "written gradients. Pass the number of its rows.")

    def _has_part(self, parameters: Sequence[Parameter]) -> bool:
        """Whether this process's last passes have written gradients other
        than zeros."""
        backend = self.replicas.backend
        return any(bool(np.any(backend.to_numpy(backend.grad(x))))
                   for x in (p.data() for p in parameters)
                   if backend.is_fresh(x) and backend.has_gradient(x))

    def _whole_batch(self, work: str, batch_size: Any, **more: Any) -> float:
        """The sum of `batch_size` over all processes; `more` has to be the
        same on all."""
        with self.replicas.span.world.guard():
            batch_size = self._checked(batch_size)
            self._check_part(batch_size)
            return check_batch_size(sum(self._gather(
                f"{work} of {self._next_step()}", batch_size, **more)))

    def _gather(self, work: str, value: Any, **more: Any) -> list[Any]:
        """A meeting of all processes, in which what an update depends on is
        compared. A rank's number in a list of parameters means another one on
        other ranks otherwise. Raises `mgpu.errors.ModelMismatch`."""
        replicas = self.replicas
        world = replicas.span.world
        if world.size == 1:
            return [value]
        facts = {
            **more, "learning rate": self.rate(self.num_update + 1),
            **self._rule_facts(),
            "lr_mult, wd_mult and grad_req": {
                p.name: [*map(float, self.multipliers(p)), p.grad_req]
                for p in replicas.params()}}
        if self._own is not None:
            facts["parameters"] = sorted(self._own)
        text = json.dumps(facts, sort_keys=True)
        # Short where all agree: a digest, and all facts only of those that
        # do not.
        told = world.gather(work, [value, zlib.crc32(text.encode()),
                                   world.batch_taken()])
        if len({digest for _, digest, _ in told}) > 1:
            world.agree(f"the trainer in {work}", facts,
                        "Set rates, options and grad_req alike on every "
                        "rank: what they depend on, such as a loss, is "
                        "another number on each.")
        world.check_batches([batch for *_, batch in told])
        return [own for own, *_ in told]

    def _next_step(self) -> str:
        """The step to come, in words that are the same on all ranks, and
        those of no other trainer."""
        return f"step {self.num_update + 1}" + (
            f" of trainer {self._number}" if self._number > 1 else "")

    def _overrides(self, *names: str) -> bool:
        """Whether one of these methods is the user's own."""
        return any(getattr(getattr(self, name), "__func__", None)
                   is not getattr(Trainer, name) for name in names)

    @property
    def observed(self) -> bool:
        """Whether code of the user's runs in a step, and may write to
        gradients there."""
        return self._overrides("step", "allreduce_grads", "update")

    def _whole(self, section: Callable[[], None]) -> None:
        """Call `section` whole, or after Ctrl-C perhaps not at all, while no
        other thread uses the replicas."""
        backend = self.replicas.backend

        def scoped() -> None:
            with in_use(backend), backend.scope(recording=False):
                section()
        with self.replicas.span.world.guard(), self.replicas.owned():
            backend.uninterrupted(scoped)

    def _trained(self) -> list[Parameter]:
        """The parameters that this trainer moves now."""
        self.replicas.check_complete()
        names = self._names()
        return [p for p in self.replicas.params()
                if (names is None or p.name in names) and p.grad_req != "null"]

    def _names(self) -> frozenset[str] | None:
        """What this trainer moves now; None: all parameters."""
        names = self._object and self._object.names()
        return self._own if names is None else names

    def _arrays(self, parameters: Sequence[Parameter]) -> list[Any]:
        """The network's own arrays of `parameters`."""
        self.replicas.check_complete()
        network = self.replicas.network
        return [network.array(p.number) for p in parameters]

    def trains(self, p: Parameter) -> bool:
        """Whether this trainer moves `p`, unless it is frozen."""
        names = self._names()
        return names is None or p.name in names

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over the processes, and take them for `update`.

        Over the devices of a process they are sums when a backward pass has
        returned. Between this call and `update` a gradient may be read,
        clipped or changed. The gradients are stale from now on: what a
        backward pass wrote is taken once. Raises as `step` does.
        """
        self._whole(partial(self._allreduce, ignore_stale_grad))

    @probes.staged("reduce", "all-reduce", probes.gradients)
    def _allreduce(self, ignore_stale_grad: bool,
                   batch_size: float | None = None,
                   held: Collection[Parameter] = ()) -> float:
        """Returns the sum of `batch_size` over all processes, which is then
        above 0. `held`: parameters that earlier parts of the batch have
        reached."""
        replicas, backend = self.replicas, self.replicas.backend
        parameters = self._trained()
        with self._voiding(parameters) if replicas.span.wide \
                else contextlib.nullcontext(), replicas.span.world.guard():
            arrays = self._arrays(parameters)
            fresh = {j for j, x in enumerate(arrays)
                     if parameters[j] in held or backend.is_fresh(x)}
            taken = {j for j in fresh
                     if not backend.has_gradient(arrays[j])}
            self._check_done([arrays[j] for j in fresh - taken])
            self._had_pass = bool(fresh)
            self._had_part = replicas.span.wide and not batch_size \
                and self._has_part(parameters)
            self._check_part(batch_size)
            reached, taken, whole = self._meet(fresh, taken, batch_size or 0)
        if batch_size is not None:
            check_batch_size(whole)
        self._check_reached(parameters, reached, ignore_stale_grad)
        used = sorted(reached - taken)
        self._summed = None
        if replicas.span.wide:
            # Where this fails, the other processes are in the middle of it.
            with replicas.span.world.together():
                self._sum([parameters[j] for j in used],
                          [j in fresh for j in used])
        for x in arrays:        # also those that were skipped
            backend.mark_used(x)
        self._summed = [parameters[j] for j in used]
        return whole

    @contextlib.contextmanager
    def _voiding(self, parameters: Sequence[Parameter]) -> Iterator[None]:
        """Where a process fails before gradients are summed, the batch is
        void in all: another call must not sum what some of them have."""
        try:
            yield
        except BaseException:
            for p in parameters:
                self.replicas.backend.mark_used(p.data())
            raise

    def _sum(self, parameters: Sequence[Parameter], fresh: Sequence[bool]
             ) -> None:
        """Sum the gradients of `parameters` over the processes; those that
        are not `fresh` count as zeros here."""
        replicas, backend = self.replicas, self.replicas.backend
        gradients = [backend.grad(p.data()) for p in parameters]
        for p, g, own in zip(parameters, gradients, fresh, strict=True):
            if not own and not (p.grad_req == "add"
                                and replicas.span.world.is_main):
                g[...] = 0
        if self._object is not None:
            gradients += self._object.gradients_of_others()
        allreduce_many([[g] for g in gradients], algorithm=self._strategy)
        replicas.carried = [p for p in parameters if p.grad_req == "add"]

    def _check_done(self, arrays: Sequence[Any]) -> None:
        """Wait for the gradients (not of cards). What has failed in a pass
        is an error here, before anything changes. Raises `DeviceError`."""
        replicas, backend = self.replicas, self.replicas.backend
        errors = backend.failures([*map(backend.grad, arrays)])
        if not errors:
            return
        self._summed = None
        for x in arrays:
            backend.mark_used(x)
        error = errors[0]
        last = (str(error).strip().splitlines() or [""])[-1]
        device, step = replicas.devices[0], self.num_update + 1
        place = f" of {replicas.span.world!r}" if replicas.span.wide else ""
        raise DeviceError(
            "a device does what was queued on it; in the passes on "
            f"{replicas.devices}{place}, in step {step}, it failed: "
            f"{type(error).__name__}: "
            f"{last.removeprefix(type(error).__name__ + ': ')[:300]}. No "
            "parameter has changed, and this batch's gradients are void. "
            "Correct the operation; "
            f"{backend.finds_failed} shows the line that queued it.", device,
            step) from error

    def _meet(self, reached: set[int], taken: set[int], batch_size: float
              ) -> tuple[set[int], set[int], float]:
        """What all processes know of a batch together: the parameters that
        any of its rows reached; those whose gradients were taken away; the
        sum of `batch_size`."""
        replicas = self.replicas
        if not replicas.span.wide:
            return reached, taken, batch_size
        told = self._gather(self._next_step(), [
            _bits(reached), _bits(taken), batch_size, replicas.moved],
            **self._compared, **{
                f"gradient before this step (zero_grad is for all) of {name}":
                x for name, x in replicas.kept_sums().items()})
        replicas.moved_by_rank = [one[3] for one in told]
        return (set().union(*(_numbers(one[0]) for one in told)),
                set().union(*(_numbers(one[1]) for one in told)),
                sum(one[2] for one in told))

    def _check_reached(self, parameters: Sequence[Parameter],
                       reached: Collection[int], ignore_stale_grad: bool
                       ) -> None:
        """Refuse a parameter that no row of the batch reached, unless it is
        to be ignored (StaleGradientError)."""
        for j, p in enumerate(parameters):
            if j not in reached and not ignore_stale_grad:
                raise StaleGradientError(
                    f"parameter {p.name!r} has no new gradient since the last "
                    "step: " + (
                        "the last backward pass did not reach it" if reached
                        else "no backward pass reached it")
                    + ". Run the forward pass inside record() and give the "
                    "losses of all devices to one mgpu.backward; freeze the "
                    "parameter (grad_req='null', requires_grad=False); or "
                    "pass ignore_stale_grad=True to skip it.")

    def summed(self, caller: str = "summed") -> list[Parameter]:
        """The parameters whose gradients `allreduce_grads` has taken since
        the last update, without those that the user has taken away since.
        RuntimeError naming `caller` if there was no `allreduce_grads`."""
        self.replicas.check_complete()
        if self._summed is None:
            raise RuntimeError(
                f"{caller} works on gradients that allreduce_grads has "
                "taken; received none since the last update. Call "
                "allreduce_grads first, or step for both.")
        backend = self.replicas.backend
        for p in self._summed:
            if backend.is_fresh(p.data()):
                raise RuntimeError(
                    f"{caller} works on gradients that allreduce_grads has "
                    f"taken; received one of {p.name!r} that a backward pass "
                    "has written since. Call allreduce_grads again.")
        return [p for p in self._summed if backend.has_gradient(p.data())]

    def update(self, batch_size: float) -> None:
        """Apply the gradients, divided by `batch_size`.

        Does not touch the gradients; waits on CPU devices. With several
        processes and ``MGPU_DEBUG=1`` it ends with `Replicas.check_equal`.
        With ``loss_scale="dynamic"`` it may skip the step (`skipped_steps`).

        Raises
        ------
        RuntimeError
            There was no `allreduce_grads` before it, so that an old gradient
            would be applied again; or a backward pass has written gradients
            since then.
        """
        batch_size = self._whole_batch("update", batch_size,
                                       **self._sums_held())
        self._summed = self.summed("update")
        self._whole(partial(self._update, batch_size))

    def _sums_held(self) -> dict[str, Any]:
        """A checksum of each sum, which the user may have changed: they are
        the same on all processes."""
        replicas = self.replicas
        if not replicas.span.wide:
            return {}
        with replicas.span.world.guard():
            return {"summed gradient": {
                p.name: zlib.crc32(np.ascontiguousarray(
                    replicas.backend.to_numpy(p.grad())).tobytes())
                for p in self.summed("update")}}

    @probes.staged("update", "update", probes.weights)
    def _update(self, batch_size: float) -> None:
        debug = environment.debug()     # first: a wrong value is refused
        replicas, scale = self.replicas, self._loss_scale
        backend = replicas.backend
        summed = self._summed or []
        work = {p: x for p, x in zip(summed, self._arrays(summed))
                if backend.has_gradient(x)}
        if self._nonfinite != "ignore" and not all_finite(
                backend, [*map(backend.grad, work.values())]):
            self._summed = None
            if self._nonfinite == "raise":
                raise self._not_finite([*work])
            scale.backoff()
        else:
            if self._object is None:
                self._apply_rule(work, self._rescale / batch_size)
            else:
                self._step_object(self._object, work,
                                  self._rescale / batch_size)
            self._summed = None
            scale.succeed()
        datasets.note_step()
        replicas.after_step()
        if debug:
            replicas.check_equal()

    def _not_finite(self, parameters: Sequence[Parameter]
                    ) -> NonFiniteGradient:
        name = next(p.name for p in parameters if not all_finite(
            self.replicas.backend, [p.grad()]))
        world, wide = self.replicas.span.world, self.replicas.span.wide
        return NonFiniteGradient(
            "summed gradients are finite (nonfinite='raise'); received NaN or "
            f"infinity in that of {name!r}, in step {self.num_update + 1}"
            + (f", as every rank does: {world!r}" if wide else "") + ". No "
            "parameter has changed. Lower the learning rate, look for bad "
            "data, or pass nonfinite='skip'.")

    def _step_object(self, own: OptimizerObject,
                     parameters: Mapping[Parameter, Any], scale: float
                     ) -> None:
        found = {p.name: p for p in parameters}
        with self._schedule.moving(own.schedule):
            own.step({name: parameters[found[name]] for name in sorted(
                found, key=self.gluon_order())},
                lambda name: self.multipliers(found[name]), scale,
                self.loss_scale)
        for name in found:
            self._counts[name] = self._counts.get(name, 0) + 1
        self.num_update = own.count(self.num_update)

    def _next_update(self, parameters: Iterable[Parameter]) -> int:
        """Gluon: the largest number of updates that any parameter has had,
        this one included. torch: one more than before."""
        if self.semantics == "torch":
            return self.num_update + 1
        return max([self.num_update, *(self._counts.get(p.name, 0) + 1
                                       for p in parameters)])

    def _work(self, parameters: Mapping[Parameter, Any], rate: float
              ) -> list[Update]:
        """What is to be done to each parameter; makes missing states."""
        backend, rule, work = self.replicas.backend, self.optimizer, []
        if rule.built_in and vars(rule) != self._options:
            self._check_options(rule)
        for p, weight in parameters.items():
            name = p.name
            if name not in self._states:
                self._states[name] = rule.create_state(weight, backend.ops)
            lr_mult, wd_mult = self.multipliers(p)
            for what, x in ("lr_mult", lr_mult), ("wd_mult", wd_mult):
                if type(x) is not float or x != 1.0:
                    _check_number(f"{what} of {name!r}", x)
            rule.check_rate(rate * lr_mult)
            work.append(Update(
                name, weight, backend.grad(weight), rate * lr_mult,
                rule.wd * wd_mult,
                self._counts.get(name, 0) + 1))
        return work

    def _check_options(self, rule: optimizers.Optimizer) -> None:
        """The user has changed options of the optimiser, or has put another
        one in its place."""
        rule.__post_init__()
        p = next((p for p in self.replicas.params()     # as of all others
                  if p.name in self._states), None)
        if p is not None:
            kept = self._states[p.name]
            x = p.data()    # a row is enough: rates may change in each step
            needed = rule.create_state(x[:1] if p.shape else x,
                                       self.replicas.backend.ops)
            if needed.keys() != kept.keys():
                raise ValueError(
                    "an optimiser remembers the same things from its first "
                    f"update on; received {rule!r}, which needs "
                    f"{sorted(needed)} of {p.name!r}, where {sorted(kept)} "
                    "is kept. Make a new Trainer.")
        self._options = dict(vars(rule))

    def _begin_step(self, counts: Mapping[str, int]) -> None:
        # All of the network: places must not depend on which a trainer has.
        order = sorted((p.name for p in self.replicas.params()),
                       key=self.gluon_order())
        self.optimizer.begin_step(
            [self._states.get(name, {}) for name in order],
            [counts.get(name) if name in self._states else None
             for name in order])

    def gluon_order(self) -> Callable[[str], Any]:
        """A sort key for names of parameters: see
        `mgpu.trainer_states.by_layer`; `update_order` where there is one."""
        if self.update_order:
            places = {name: i for i, name in enumerate(self.update_order)}
            return lambda name: places.get(name, len(places))
        return trainer_states.by_layer(
            [p.name for p in self.replicas.params()])

    def _apply_rule(self, parameters: Mapping[Parameter, Any], scale: float
                    ) -> None:
        """The optimiser's rule, for gradients times `scale` and divided by
        the loss scale. Nothing is counted before every state and rate is
        there."""
        number, optimizer = self._next_update(parameters), self.optimizer
        with self._schedule.moving(self.lr_scheduler):
            work = self._work(parameters, self.rate(number))
        counts = {one.name: one.t for one in work}
        if optimizer.has_begin_step:
            self._begin_step(counts)
        backend, loss_scale = self.replicas.backend, self.loss_scale
        if not (optimizer.elementwise and host_memory.update(
                backend, optimizer, work, self._states, scale, loss_scale)):
            for one in work:
                gradient = one.gradient
                if loss_scale != 1.0:
                    # A division of its own: MXNet reads numbers from text,
                    # and not every quotient of two to the last bit.
                    gradient = gradient / loss_scale
                optimizer.update(one.weight, gradient * scale,
                                 self._states[one.name], lr=one.lr,
                                 wd=one.wd, t=one.t, ops=backend.ops)
        self._counts.update(counts)
        self.num_update = number

    def clip_global_norm(self, max_norm: float,
                         batch_size: float | None = None) -> float:
        """Scale all gradients so that their joint norm is `max_norm` at most.

        Call it between `allreduce_grads` and `update` (RuntimeError
        elsewhere).
        Formula: Gluon's ``clip_global_norm``, ``scale = max_norm / (norm +
        1e-8)`` where that is below 1.

        Parameters
        ----------
        max_norm : float
        batch_size : float, optional
            The norm is that of the gradients divided by it and by the
            `loss_scale` (what `update` will apply: also times Gluon's
            ``rescale_grad``). Without both, of the
            summed gradients as they are. With several processes: as in
            `step`.

        Returns
        -------
        float
            The norm before clipping; reading it waits for the gradients.
            If it is not finite nothing is scaled and a FloatingPointError
            is raised; with a dynamic scale, or nonfinite="skip", it is
            returned, and `update` will skip the step.
        """
        _check_number("max_norm", max_norm, " above 0", lambda x: x > 0)
        more = {"max_norm": max_norm, **self._sums_held()}
        divisor: float = 1
        if batch_size is not None:
            divisor = self._whole_batch("clip_global_norm", batch_size,
                                        **more) / self._rescale
        else:
            with self.replicas.span.world.guard():
                self._gather(f"clip_global_norm of {self._next_step()}", 1,
                             **more)
        return self._clip(self.summed("clip_global_norm"), max_norm, divisor,
                          1e-8)

    def clip_grad_norm_(self, max_norm: float,
                        batch_size: float | None = None) -> float:
        """`clip_global_norm` by torch's formula, for gradients of the mean
        loss: ``scale = max_norm / (norm + 1e-6)`` where that is below 1.

        With `update` of the same `batch_size` the numbers are those of
        ``torch.nn.utils.clip_grad_norm_`` between ``backward`` of a mean loss
        and ``step``. The norm is that of the parameters of this trainer.

        Parameters
        ----------
        max_norm : float
        batch_size : float
            What `update` divides by. ValueError without it: in torch the
            gradients are divided already when they are clipped.

        Returns
        -------
        float
            The norm before clipping. Raises as `clip_global_norm` does: where
            it is not finite nothing is scaled (torch makes all of it NaN).
        """
        _check_number("max_norm", max_norm, " above 0", lambda x: x > 0)
        divisor = self._whole_batch("clip_grad_norm_", batch_size,
                                    max_norm=max_norm, **self._sums_held())
        return self._clip(self.summed("clip_grad_norm_"), max_norm,
                          divisor / self._rescale, 1e-6)

    def _clip(self, parameters: Sequence[Parameter], max_norm: float,
              divisor: float, eps: float) -> float:
        """`clip_global_norm` of summed gradients, to be divided by
        `divisor`."""
        backend = self.replicas.backend
        gradients = [p.grad() for p in parameters]
        with backend.scope(recording=False):
            norm = global_norm(backend, gradients)
            norm /= divisor * self.loss_scale
            if not np.isfinite(norm):
                if self._nonfinite == "skip":
                    return norm
                raise FloatingPointError(
                    f"the gradients have norm {norm}; they were not clipped. "
                    "Lower the learning rate, or find the step that made "
                    "them.")
            scale = max_norm / (norm + eps)
            if scale < 1.0:
                for g in gradients:
                    g *= scale
        return norm

    # -- states -------------------------------------------------------------

    def save_states(self, fname: FilePath) -> None:
        """Write the optimiser's state to `fname` (safetensors with digests,
        no pickle), whole or not at all. The same file loads on either engine
        and any number of devices. Weights are not in it: see
        `Replicas.export_numpy`, and `mgpu.save_checkpoint` for all in one
        file. Waits for pending updates."""
        trainer_states.write(self.export_states(), fname)

    def load_states(self, fname: FilePath) -> None:
        """Read what `save_states` wrote, onto all devices.

        The trainer keeps its own options, multipliers and schedule; into the
        groups of an optimiser object of torch's go all options of the file,
        as in torch. The
        learning rate is that of the file, and so is a dynamic loss scale
        where both have one, and what a schedule of the same class and
        options has changed in its attributes as it was called.

        Raises
        ------
        ValueError
            The file holds no states, those of another optimiser, or states
            that do not fit the network's parameters; all differences are
            listed and nothing has changed.
        OSError
            The file cannot be opened.
        """
        self.replicas.check_complete()
        self._load(trainer_states.read(fname), repr(os.fspath(fname)))

    def export_states(self) -> TrainerStates:
        """The optimiser's state as NumPy copies, whatever the engine and the
        number of devices. Waits for pending updates."""
        scale, own = self._loss_scale, self._object
        slots = trainer_states.export_slots(self.replicas.backend,
                                            self._states)
        counts, groups = self._counts, None
        if own is not None:
            slots, remembered = own.memory()
            counts, groups = {**counts, **remembered}, own.export()
        return TrainerStates(
            self._kind(), self.num_update,
            (own or self.optimizer).learning_rate, dict(counts), slots,
            scale.value if scale.dynamic else None, scale.good_steps,
            scale.skipped_steps, self._schedule.export(self.lr_scheduler),
            groups)

    def _kind(self) -> str:
        """The class whose states these are."""
        family = self._object and self._object.groups()[0].family
        return optimizers.RULES[self.semantics][family].__name__ \
            if family else type(self.optimizer).__name__

    def import_states(self, states: TrainerStates) -> None:
        """Put `export_states` of this or of another trainer back, on all
        devices; raises as `load_states` does."""
        self._load(states, "the states")

    def state_dict(self) -> dict[str, Any]:
        """`export_states` as a dict of numbers, text and native arrays on the
        CPU, all copies. ``torch.save`` writes it, and ``torch.load`` reads it
        with ``weights_only=True``, on that engine. It is no state_dict of a
        `torch.optim` object."""
        header, arrays = trainer_states.pack(self.export_states())
        backend, home = self.replicas.backend, as_device("cpu")
        return {"format": trainer_states.FORMAT, **header, "slots": {
            name: backend.put(x, home) for name, x in arrays.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put `state_dict` of this or of another trainer back, on all
        devices; raises as `load_states` does."""
        if not isinstance(state_dict, Mapping):
            raise TypeError("state_dict must be a dict; received "
                            f"{type(state_dict).__name__}. Pass what "
                            "Trainer.state_dict() gave.")
        found, backend = dict(state_dict), self.replicas.backend
        try:
            if found.pop("format") not in trainer_states.FORMATS:
                raise ValueError("another format")
            states = trainer_states.unpack(found, {
                name: backend.to_numpy(x) for name, x in
                found.pop("slots").items()})
        except Exception as error:
            raise ValueError(
                "expected what Trainer.state_dict() gave; received a dict "
                f"with {sorted(map(str, state_dict))[:6]}. A state of a "
                "torch.optim object cannot be loaded: save that of the "
                "Trainer.") from error
        self._load(states, "the state_dict")

    def _load(self, saved: TrainerStates, source: str) -> None:
        self.fit_states(saved, source)()

    def fit_states(self, saved: TrainerStates, source: str
                   ) -> Callable[[], None]:
        """A function that does what `import_states` of `saved` would do now,
        and refuses nothing; raises as that does."""
        replicas, own = self.replicas, self._object
        replicas.check_complete()
        # Frozen ones too: they may have been trained before.
        arrays = {p.name: p.data() for p in replicas.params()}
        if own is not None:
            put = own.fit(saved.groups, saved.learning_rate)
            known = own.groups()[0].family is not None
            trainer_states.check(saved, source, self._kind(),
                                 arrays if known else {})
            if saved.groups is None and known:
                trainer_states.fit(saved, source, replicas.backend,
                                   self.rule(), arrays)
            return partial(self._take, saved, partial(self._put_object, own, (
                saved.slots, saved.counts), arrays, put))
        if len(saved.groups or ()) > 1:
            raise ValueError(
                "states are loaded into as many groups of parameters as they "
                f"are of; {source} has those of {len(saved.groups or ())} "
                "groups of an optimiser object. Give the Trainer such an "
                "object.")
        return partial(self._take, saved, partial(
            self._put_rule, saved.learning_rate, trainer_states.fit(
                saved, source, replicas.backend, self.optimizer, arrays)))

    def _put_object(self, own: OptimizerObject, memory: Memory,
                    arrays: Mapping[str, Any], put: Callable[[], None]
                    ) -> None:
        own.load(memory, arrays)
        put()

    def _put_rule(self, learning_rate: float, states: DeviceState) -> None:
        self._states = states
        self.optimizer.learning_rate = learning_rate

    def _take(self, saved: TrainerStates, put: Callable[[], None]) -> None:
        scale = self._loss_scale
        put()
        self._schedule.restore(self.lr_scheduler, saved.schedule)
        self._counts, self._summed = dict(saved.counts), None
        self.num_update = saved.num_update
        scale.skipped_steps = saved.skipped_steps
        if scale.dynamic and saved.loss_scale is not None:
            scale.value = saved.loss_scale
            scale.good_steps = saved.good_steps


def check_pair(replicas: Any, trainer: Any) -> None:
    """Refuse what is not replicas and their trainer."""
    if not isinstance(replicas, Replicas):
        raise TypeError(
            "expected the Replicas that mgpu.initialize returns; received "
            f"{type(replicas).__module__}.{type(replicas).__qualname__}. "
            "Call replicas = mgpu.initialize(net, devices), and train these.")
    if not isinstance(trainer, Trainer):
        raise TypeError(f"expected an mgpu.Trainer; received "
                        f"{type(trainer).__module__}."
                        f"{type(trainer).__qualname__}. Make one with "
                        "mgpu.Trainer(replicas, 'sgd', ...).")
    if trainer.replicas is not replicas:
        raise ValueError(
            "a trainer steps the replicas that it was made with; received "
            f"one of {trainer.replicas!r} for {replicas!r}. Make a new "
            "Trainer after each initialize.")


def _check_number(what: str, value: Any, limits: str = "",
                  fits: Callable[[float], bool] = lambda value: True) -> None:
    """Refuse what is not a finite number that `fits`; `limits` says which
    do."""
    rule = f"{what} must be a finite number{limits}"
    if not is_number(value):
        raise TypeError(f"{rule}; received {value!r} of type "
                        f"{type(value).__name__}.")
    if not (abs(value) < float("inf") and fits(value)):
        raise ValueError(f"{rule}; received {value!r}.")


def _bits(numbers: Collection[int]) -> str:
    return f"{sum(1 << j for j in numbers):x}"


def _numbers(bits: str) -> set[int]:
    mask = int(bits, 16)
    return {j for j in range(mask.bit_length()) if mask >> j & 1}


def _own_name(name: Any, names: Collection[str], free: Collection[str]
              ) -> Any:
    """The parameter of `free` that torch calls `name`: the weight and bias
    of a norm are gamma and beta here."""
    for other, own in (("weight", "gamma"), ("bias", "beta")):
        if isinstance(name, str) and name.endswith(other) \
                and name not in names \
                and name.removesuffix(other) + own in free:
            return name.removesuffix(other) + own
    return name


def check_batch_size(batch_size: Any) -> float:
    """What sums over rows are divided by: rows, or tokens, or a sum of
    weights. ValueError for what is no finite number above 0."""
    if is_integer(batch_size, 1):
        return operator.index(batch_size)
    x = batch_size.item() if getattr(batch_size, "shape", None) == () \
        else batch_size
    if is_number(x) and not isinstance(x, np.bool_) \
            and 0 < x < math.inf:
        return float(x)
    raise ValueError(f"batch_size must be a finite number above 0; received "
                     f"{batch_size!r}. Pass the rows of the whole batch, "
                     "over all devices, or what else the loss is divided by: "
                     "its tokens, or the sum of its weights.")
