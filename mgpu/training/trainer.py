"""One optimizer step, of a network on several devices."""
import os
from collections.abc import (Callable, Collection, Iterable, Mapping,
                             Sequence)
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from mgpu import optim
from mgpu.backends import in_use
from mgpu.backends.base import OptimizerObject, Step
from mgpu.checkpoints import trainer_states
from mgpu.checkpoints.trainer_states import TrainerStates
from mgpu.collectives import AllReduce
from mgpu.collectives.over_processes import over_processes, share_values
from mgpu.collectives.strategies import strategy_of
from mgpu.compat import pytorch
from mgpu.compat.gluon import check_store, clip
from mgpu.data import datasets
from mgpu.errors import DeviceError, NonFiniteGradient, StaleGradientError
from mgpu.optim.loss_scale import LossScale, all_finite
from mgpu.optim.schedule_state import Schedule, ScheduleState
from mgpu.training import rule_updates
from mgpu.training.parameters import Parameter
from mgpu.training.replicas import Replicas, replicas_of
from mgpu.training.step_agreement import StepAgreement
from mgpu.utils import environment, probes
from mgpu.utils.arguments import (Hints, by_name, check_batch_size, finite,
                                  hinting)
from mgpu.utils.files import FilePath

__all__ = ["StaleGradientError", "Trainer", "TrainerStates",
           "check_batch_size", "check_pair"]


class Trainer(Hints):
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
        updates a network of either backend (torch's arrays are copied to
        MXNet and back).
    optimizer_params : dict, optional
        Options of the optimizer under Gluon's names (``learning_rate``,
        ``wd``, ``momentum``, ``clip_gradient``, ...), under torch's with
        ``semantics="torch"``. ``lr_scheduler`` may stand here too, and of
        Gluon's ``rescale_grad``, which multiplies the gradients, and
        ``multi_precision``, which changes nothing but in float16, where it
        is refused.
    semantics : {"gluon", "torch"}
        Whose formulas, on both backends. Not read where `optimizer` is an
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
        of ``torch.amp.GradScaler`` with its defaults, on both backends: 2**16
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
        An unknown optimizer, option or parameter name.
    TypeError
        `replicas` did not come from `initialize`, or an option of another
        type.
    """

    _hints: ClassVar[Mapping[str, str]] = {
        "lr": "learning_rate and set_learning_rate",
        **dict.fromkeys(("wd", "weight_decay"), "optimizer.wd, or wd_mult"),
        "param_groups": "set_learning_rate, or wd_mult and lr_mult"}

    _internal = ("check_parts", "fit_states", "multipliers", "pending",
                 "rule", "step_parts", "summed", "trains", "updates")

    @hinting(**dict.fromkeys(
        ("lr", "learning_rate", "momentum", "weight_decay", "wd", "betas"),
        "the dict of options: Trainer(replicas, 'adam', "
        "{'learning_rate': 0.001}), or Trainer(replicas, 'adam', "
        "{'lr': 0.001}, semantics='torch') with PyTorch's names"))
    def __init__(self, replicas: Replicas,
                 optimizer: str | optim.Optimizer,
                 optimizer_params: Mapping[str, Any] | None = None,
                 semantics: str = "gluon",
                 lr_scheduler: Schedule | None = None,
                 lr_mult: Mapping[str, float] | None = None,
                 wd_mult: Mapping[str, float] | None = None,
                 loss_scale: float | str | None = None,
                 allreduce: str | AllReduce = "auto",
                 nonfinite: str | None = None, *, kvstore: Any = "device",
                 update_on_kvstore: bool | None = None,
                 compression_params: Any = None):
        check_store(kvstore, compression_params)
        #: the names of what is trained; None: all parameters
        self._names: frozenset[str] | None
        self.replicas, self._names = replicas_of(replicas)
        self.replicas.check_valid()
        strategy = over_processes(strategy_of(allreduce, "allreduce"),
                                  self.replicas.span)
        self._loss_scale = LossScale(loss_scale, nonfinite)
        names = [p.name for p in self.replicas.params()]
        self.lr_mult = _multipliers("lr_mult", lr_mult, names)
        self.wd_mult = _multipliers("wd_mult", wd_mult, names)
        options = dict(by_name("optimizer_params", optimizer_params))
        schedules = [options.pop("lr_scheduler", None), lr_scheduler]
        #: what makes the updates
        self.updates: OptimizerObject = rule_updates.updates_of(
            self.replicas, optimizer, options, semantics,
            [one for one in schedules if one is not None])
        self.semantics = self.updates.semantics
        moved = self.updates.names()
        if None not in (self._names, moved) and self._names != moved:
            raise ValueError(
                "a Trainer moves what is in the groups of its optimizer "
                f"object; received {len(self._names or ())} parameters "
                "besides, which are not those. Pass the replicas.")
        self.update_order = ()
        self._schedule = ScheduleState(self.replicas.backend)
        self._schedule.begin(self.lr_scheduler)
        #: updates so far, and by parameter (a skipped one is not counted)
        self.num_update = 0
        self._counts: dict[str, int] = {}
        #: whose gradients are summed and wait for `update`
        self._summed: list[Parameter] | None = None
        self._agreement = StepAgreement(self.replicas, strategy,
                                        self._facts)
        self._agreement.begin()
        if self.replicas.span.wide:
            share_values([[x] for x in self.updates.others()],
                         self.replicas.span)

    def _facts(self) -> dict[str, Any]:
        """What an update depends on, the same on all ranks."""
        own = self.updates
        return {
            "learning rate": self.rate(self.num_update + 1), **{
                f"options of group {i} of the optimizer": {
                    "names": sorted(names or ()), "formula": family
                    or type(own.object).__qualname__,
                    **{name: repr(x) for name, x in options.items()}}
                for i, (names, family, options) in enumerate(own.groups())},
            "lr_mult, wd_mult and grad_req": {
                p.name: [*map(float, self.multipliers(p)), p.grad_req]
                for p in self.replicas.params()},
            "parameters": sorted(self._moved() or ()),
            "semantics": self.semantics,
            "schedule": type(own.schedule).__name__,
            "rescale_grad": own.scale, "nonfinite": self._loss_scale.nonfinite,
            "loss_scale": [self.loss_scale, self._loss_scale.dynamic]}

    def __repr__(self) -> str:
        return f"Trainer({self.optimizer!r}, {self.replicas!r})"

    if not TYPE_CHECKING:
        def __setattr__(self, name, value):
            # It would do nothing. (A subclass may declare it.)
            if name in self._hints and not hasattr(type(self), name):
                self.__getattr__(name)
            super().__setattr__(name, value)

    @property
    def optimizer(self) -> Any:
        """The `mgpu.optimizers.Optimizer`, or the framework's own object."""
        return self.updates.object

    @property
    def update_order(self) -> Sequence[str]:
        """The parameters in the order in which nadam updates them: Gluon's,
        see `mgpu.checkpoints.trainer_states.by_layer`. May be set; what is not
        named comes last."""
        return self.updates.order

    @update_order.setter
    def update_order(self, names: Iterable[str]) -> None:
        every = [p.name for p in self.replicas.params()]
        self.updates.order = [*dict.fromkeys(
            (*names, *sorted(every, key=trainer_states.by_layer(every))))]

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

    def rule(self) -> optim.Optimizer:
        """`optimizer` as a rule of mgpu's, with the options that it has now.
        ValueError for an optimizer object whose formula mgpu does not have,
        or whose groups have different ones."""
        return rule_updates.rule_of(self.updates)

    # -- rates --------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The rate of the last update (of the first one, before it). Of an
        optimizer object: that of its first group, now."""
        return self.rate(self.num_update)

    @property
    def lr_scheduler(self) -> Schedule | None:
        """``rate = lr_scheduler(number of the update)``. It may be set."""
        return self.updates.schedule

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Schedule | None) -> None:
        self.updates.schedule = schedule

    def set_learning_rate(self, lr: float) -> None:
        """Use `lr` from the next step on. ValueError under a schedule, which
        would replace it, for groups with different rates, or for a negative
        or non-finite rate; TypeError for what is not a number. A schedule of
        torch's goes on from what it finds in its optimizer's groups."""
        if self.lr_scheduler is not None:
            raise ValueError("the learning rate follows the trainer's "
                             f"lr_scheduler; received {lr!r}. Change the "
                             "schedule instead.")
        finite("the learning rate", lr, ", 0 or more", lambda x: x >= 0)
        self.updates.set_learning_rate(float(lr))

    def rate(self, num_update: int) -> float:
        """The learning rate of update `num_update`, from 1, before any
        multiplier. A schedule that changes as it is called is left as it was.
        ValueError or TypeError for a schedule that gives no finite number,
        0 or more."""
        if self.lr_scheduler is None:
            return self.updates.learning_rate
        return self._schedule.look(self.lr_scheduler, max(1, num_update))

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
        batch_size = self._agreement.batch_size(batch_size)
        if self._overrides("allreduce_grads", "update"):
            self.allreduce_grads(ignore_stale_grad)
            self.update(batch_size)
            return

        self._whole(lambda: self._update(self._allreduce(ignore_stale_grad,
                                                         batch_size)))

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
            with an optimizer of torch's semantics that of torch's
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
        replicas, backend = self.replicas, self.replicas.backend
        with replicas.span.world.guard():
            self.check_parts(len(parts), clip_norm)
        rows = 0.0
        sums: dict[Parameter, Any] = {}

        def add() -> None:
            """Add what this part has written to the sums of all parts."""
            for p in replicas.params():
                x = p.data()
                if p.grad_req != "null" and backend.is_fresh(x) \
                        and backend.has_gradient(x):
                    g = backend.grad(x)
                    sums[p] = sums[p] + g if p in sums else backend.put(g, g)
                    backend.mark_used(x)

        def apply() -> None:
            for p, x in sums.items():
                backend.grad(p.data())[...] = x
            whole = self._allreduce(ignore_stale_grad, rows, sums)
            if clip_norm is not None:
                self._clip(self._summed or [], clip_norm,
                           whole / self.updates.scale,
                           1e-6 if self.semantics == "torch" else 1e-8)
            self._update(whole)
        self._agreement.more = {"accumulate": len(parts),
                                "clip_norm": clip_norm}
        try:
            for part in parts:
                with replicas.span.world.guard():
                    rows += part()
                if len(parts) > 1:
                    self._whole(add)
            self._whole(apply)
        except BaseException:
            self._summed = None
            raise
        finally:
            self._agreement.more = {}

    def check_parts(self, count: int, clip_norm: float | None) -> None:
        """Raise ValueError or TypeError as `step_parts` would, of `count`
        parts."""
        if clip_norm is not None:
            finite("clip_norm", clip_norm, " above 0", lambda x: x > 0)
        if (count > 1 or clip_norm is not None) and self._overrides(
                "step", "allreduce_grads", "update"):
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

    def _overrides(self, *names: str) -> bool:
        """Whether one of these methods is the user's own."""
        return any(getattr(getattr(self, name), "__func__", None)
                   is not getattr(Trainer, name) for name in names)

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
        names = self._moved()
        return [p for p in self.replicas.params()
                if (names is None or p.name in names) and p.grad_req != "null"]

    def _moved(self) -> frozenset[str] | None:
        """The names of what this trainer moves now; None: all parameters."""
        names = self.updates.names()
        return self._names if names is None else names

    def trains(self, p: Parameter) -> bool:
        """Whether this trainer moves `p`, unless it is frozen."""
        names = self._moved()
        return names is None or p.name in names

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`Replicas.zero_grad`: every gradient is zero, and
        what has been cleared is not applied. Only ``grad_req="add"`` needs
        it. `set_to_none` is torch's, and changes nothing: gradients stay
        arrays. ValueError where another trainer's gradients grow: torch's
        clears those of its own parameters."""
        pytorch.zero_grad(self)

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
        world = replicas.span.world
        arrays: list[Any] = []
        try:
            with world.guard():
                replicas.check_complete()
                parameters = self._trained()
                arrays = [replicas.network.array(p.number)
                          for p in parameters]
                fresh = {j for j, x in enumerate(arrays)
                         if parameters[j] in held or backend.is_fresh(x)}
                missing = {j for j in fresh
                           if not backend.has_gradient(arrays[j])}
                # Waits for the gradients (not of cards): what has failed in
                # a pass is an error here, before anything changes.
                errors = backend.failures([
                    backend.grad(arrays[j]) for j in fresh - missing])
                if errors:
                    self._summed = None
                    self._mark_used(arrays)
                    raise _failed(errors[0], self)
                reached, missing, whole = self._agreement.join(
                    self.num_update + 1, arrays, fresh, missing, batch_size)
        except BaseException:
            if world.size > 1:
                # Another call must not sum what some of the ranks have.
                self._mark_used(arrays)
            raise
        if batch_size is not None:
            check_batch_size(whole)
        for j, p in enumerate(parameters):
            if j not in reached and not ignore_stale_grad:
                raise StaleGradientError(
                    f"parameter {p.name!r} has no new gradient since the last "
                    f"step: {'the last' if reached else 'no'} backward pass "
                    f"{'did not reach' if reached else 'reached'} it. Run the "
                    "forward pass inside record() and give the losses of all "
                    "devices to one mgpu.backward; freeze the parameter "
                    "(grad_req='null', requires_grad=False); or pass "
                    "ignore_stale_grad=True to skip it.")
        used = sorted(reached - missing)
        self._summed = None
        self._agreement.sum({parameters[j]: j in fresh for j in used},
                            self.updates.gradients_of_others)
        self._mark_used(arrays)     # also those that were skipped
        self._summed = [parameters[j] for j in used]
        return whole

    def _mark_used(self, arrays: Iterable[Any]) -> None:
        for x in arrays:
            self.replicas.backend.mark_used(x)

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
        batch_size = self._agreement.total(
            "update", self.num_update + 1, batch_size,
            **self._agreement.digests(partial(self.summed, "update")))
        self._summed = self.summed("update")
        self._whole(partial(self._update, batch_size))

    @probes.staged("update", "update", probes.weights)
    def _update(self, batch_size: float) -> None:
        debug = environment.debug()     # first: a wrong value is refused
        replicas, scale = self.replicas, self._loss_scale
        backend, summed = replicas.backend, self._summed or []
        work = {p: x for p in summed if backend.has_gradient(
            x := replicas.network.array(p.number))}
        if self._loss_scale.nonfinite != "ignore" and not all_finite(
                backend, [*map(backend.grad, work.values())]):
            self._summed = None
            if self._loss_scale.nonfinite == "raise":
                raise _not_finite(work, self)
            scale.backoff()
        else:
            self._step(work, self.updates.scale / batch_size)
            self._summed = None
            scale.succeed()
        datasets.note_step()
        replicas.after_step()
        if debug:
            replicas.check_equal()

    def _step(self, work: Mapping[Parameter, Any], scale: float) -> None:
        """Update the arrays of `work`, by their gradients times `scale`."""
        own, factors = self.updates, {}
        for p in work:
            factors[p.name] = lr_mult, wd_mult = self.multipliers(p)
            if lr_mult != 1.0 or wd_mult != 1.0:
                finite(f"lr_mult of {p.name!r}", lr_mult)
                finite(f"wd_mult of {p.name!r}", wd_mult)
        counts = {name: self._counts.get(name, 0) + 1 for name in factors}
        # Gluon: the largest number of updates that any parameter has had,
        # this one included. torch: one more than before.
        number = self.num_update + 1 if self.semantics == "torch" \
            else max([self.num_update, *counts.values()])
        with self._schedule.moving(own.schedule):
            own.step(Step(dict(zip(factors, work.values())), factors, counts,
                          number, scale, self.loss_scale))
        self._counts.update(counts)
        self.num_update = own.count(number)

    # -- clipping -----------------------------------------------------------

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
        return self._clip_summed("clip_global_norm", max_norm, batch_size,
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
        return self._clip_summed(
            "clip_grad_norm_", max_norm,
            self._agreement.batch_size(batch_size), 1e-6)

    def _clip_summed(self, caller: str, max_norm: float,
                     batch_size: float | None, eps: float) -> float:
        finite("max_norm", max_norm, " above 0", lambda x: x > 0)
        more = {"max_norm": max_norm, **self._agreement.digests(self.summed)}
        step, divisor = self.num_update + 1, 1.0
        if batch_size is None:
            self._agreement.gather(caller, step, 1, **more)
        else:
            divisor = self._agreement.total(
                caller, step, batch_size, **more) / self.updates.scale
        return self._clip(self.summed(caller), max_norm, divisor, eps)

    def _clip(self, parameters: Sequence[Parameter], max_norm: float,
              divisor: float, eps: float) -> float:
        """Clip summed gradients, to be divided by `divisor`."""
        return clip(self.replicas.backend, [p.grad() for p in parameters],
                    max_norm, divisor * self.loss_scale, eps,
                    "skip" if self._loss_scale.nonfinite == "skip"
                    else "raise")

    # -- states -------------------------------------------------------------

    def save_states(self, fname: FilePath) -> None:
        """Write the optimizer's state to `fname` (safetensors with digests,
        no pickle), whole or not at all. The same file loads on either backend
        and any number of devices. Weights are not in it: see
        `Replicas.export_numpy`, and `mgpu.save_checkpoint` for all in one
        file. Waits for pending updates."""
        trainer_states.write(self.export_states(), fname)

    def load_states(self, fname: FilePath) -> None:
        """Read what `save_states` wrote, onto all devices.

        The trainer keeps its own options, multipliers and schedule; into the
        groups of an optimizer object of torch's go all options of the file,
        as in torch. The
        learning rate is that of the file, and so is a dynamic loss scale
        where both have one, and what a schedule of the same class and
        options has changed in its attributes as it was called.

        Raises
        ------
        ValueError
            The file holds no states, those of another optimizer, or states
            that do not fit the network's parameters; all differences are
            listed and nothing has changed.
        OSError
            The file cannot be opened.
        """
        self.replicas.check_complete()
        self.fit_states(trainer_states.read(fname), repr(os.fspath(fname)))()

    def export_states(self) -> TrainerStates:
        """The optimizer's state as NumPy copies, whatever the backend and the
        number of devices. Waits for pending updates."""
        scale, own = self._loss_scale, self.updates
        slots, counts = own.memory()
        return TrainerStates(
            trainer_states.kind_of(own), self.num_update, own.learning_rate,
            {**self._counts, **counts}, slots,
            scale.value if scale.dynamic else None, scale.good_steps,
            scale.skipped_steps, self._schedule.export(own.schedule),
            own.export())

    def import_states(self, states: TrainerStates) -> None:
        """Put `export_states` of this or of another trainer back, on all
        devices; raises as `load_states` does."""
        self.fit_states(states, "the states")()

    def state_dict(self) -> dict[str, Any]:
        """`export_states` as a dict of numbers, text and native arrays on the
        CPU, all copies. ``torch.save`` writes it, and ``torch.load`` reads it
        with ``weights_only=True``, on that backend. It is no state_dict of a
        `torch.optim` object."""
        return trainer_states.to_dict(self.export_states(),
                                      self.replicas.backend)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put `state_dict` of this or of another trainer back, on all
        devices; raises as `load_states` does."""
        self.fit_states(trainer_states.from_dict(
            state_dict, self.replicas.backend), "the state_dict")()

    def fit_states(self, saved: TrainerStates, source: str
                   ) -> Callable[[], None]:
        """A function that does what `import_states` of `saved` would do now,
        and refuses nothing; raises as that does."""
        replicas = self.replicas
        replicas.check_complete()
        # Frozen ones too: they may have been trained before.
        return partial(self._take, saved, trainer_states.fit(
            saved, source, replicas.backend, self.updates,
            {p.name: p.data() for p in replicas.params()}))

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


def _failed(error: Exception, trainer: Trainer) -> DeviceError:
    """What was queued on a device has failed in the passes of a step."""
    text = (str(error).strip().splitlines() or [""])[-1]
    replicas, step = trainer.replicas, trainer.num_update + 1
    place = f" of {replicas.span.world!r}" if replicas.span.wide else ""
    found = DeviceError(
        f"the passes on {replicas.devices}{place}, in step {step}, failed: "
        f"{type(error).__name__}: {text[:300]}. No parameter has changed, and "
        "this batch's gradients are void. Correct the operation; "
        f"{replicas.backend.finds_failed} shows the line that queued it.",
        replicas.devices[0], step)
    found.__cause__ = error
    return found


def _not_finite(work: Mapping[Parameter, Any], trainer: Trainer
                ) -> NonFiniteGradient:
    world = trainer.replicas.span.world
    name = next(p.name for p in work if not all_finite(
        trainer.replicas.backend, [p.grad()]))
    return NonFiniteGradient(
        "summed gradients are finite (nonfinite='raise'); received NaN or "
        f"infinity in that of {name!r}, in step {trainer.num_update + 1}"
        + (f", as every rank does: {world!r}" if world.size > 1 else "")
        + ". No parameter has changed. Lower the learning rate, look for bad "
        "data, or pass nonfinite='skip'.")


def check_pair(replicas: Any, trainer: Any) -> None:
    """Refuse what is not replicas and their trainer."""
    if not isinstance(replicas, Replicas) or not isinstance(trainer, Trainer):
        received = [f"{type(x).__module__}.{type(x).__qualname__}"
                    for x in (replicas, trainer)]
        raise TypeError(
            "expected the Replicas that mgpu.initialize returns, and their "
            f"mgpu.Trainer; received {' and '.join(received)}. Call replicas "
            "= mgpu.initialize(net, devices), and make an mgpu.Trainer("
            "replicas, 'sgd', ...).")
    if trainer.replicas is not replicas:
        raise ValueError(
            "a trainer steps the replicas that it was made with; received "
            f"one of {trainer.replicas!r} for {replicas!r}. Make a new "
            "Trainer after each initialize.")


def _multipliers(what: str, factors: Any, names: Collection[str]
                 ) -> dict[str, float]:
    """`factors` by the names of parameters here: torch calls the gamma and
    beta of a norm weight and bias."""
    given, found = by_name(what, factors), {}
    for name, factor in given.items():
        for other, own in (("weight", "gamma"), ("bias", "beta")):
            alias = str(name).removesuffix(other) + own
            if str(name).endswith(other) and name not in names \
                    and alias in names and alias not in given:
                name = alias
        found[name] = factor
    unknown = sorted(found.keys() - names)
    if unknown:
        raise ValueError(f"{what} names parameters of the network; received "
                         f"{unknown}. It has {sorted(names)}.")
    for name, factor in found.items():
        finite(f"{what} of {name!r}", factor)
    return found
