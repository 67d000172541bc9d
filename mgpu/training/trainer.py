"""The optimizer step of a network on several devices."""
import os
from collections.abc import (Callable, Collection, Iterable, Mapping,
                             Sequence)
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from mgpu import optim
from mgpu.backends import in_use
from mgpu.backends.native_objects import OptimizerObject, Step
from mgpu.checkpoints import trainer_states
from mgpu.checkpoints.trainer_states import TrainerStates
from mgpu.collectives import AllReduce
from mgpu.collectives.over_processes import over_processes, share_values
from mgpu.collectives.strategies import strategy_of
from mgpu.compat import pytorch
from mgpu.compat.gluon import check_store, clip
from mgpu.data.iterators import note_step
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
from mgpu.utils.signals import uninterrupted

__all__ = ["StaleGradientError", "Trainer", "TrainerStates",
           "check_batch_size", "check_pair"]


class Trainer(Hints):
    """Apply an optimizer to a network on several devices.

    Gluon's `Trainer`, with the same meaning for any number of devices:
    gradients are summed over all devices and ranks, and divided once by the
    batch size. Each parameter has one optimizer state and one update, on the
    network itself; the next forward pass copies it to the other devices.

    Parameters
    ----------
    replicas : Replicas, or parameters of its network
        ``net.collect_params()``, ``net.parameters()``, a list or dict of some
        of them, or of `Parameter`. Other parameters are not updated: another
        trainer may update them from the same gradients, before the next pass.
    optimizer : str, mgpu.optimizers.Optimizer or the framework's own object
        sgd, nag, adam, adamw, adamax, nadam, rmsprop, adagrad, adadelta,
        ftrl, signum, lamb, lars, ftml, dcasgd, sgld, groupadagrad. An object
        of a class of `torch.optim` or `mx.optimizer`, or of a derived class,
        updates the network itself: mgpu calls its ``step()``, with its own
        groups, schedules, hooks and state. Parameters in none of a torch
        object's groups are not updated. Parameters in the groups that are not
        the network's, for example those of a loss, are updated too, with
        gradients that are divided in the same way, and cleared. An object of
        MXNet's updates a network of either backend (arrays are copied to
        MXNet and back).
    optimizer_params : dict, optional
        Options of the optimizer under Gluon's names (``learning_rate``,
        ``wd``, ``momentum``, ``clip_gradient``, ...), or torch's with
        ``semantics="torch"``. Also accepts ``lr_scheduler``; Gluon's
        ``rescale_grad``, a factor of the gradients; and
        ``multi_precision``, which has no effect and is not supported in
        float16.
    semantics : {"gluon", "torch"}
        The framework whose formulas are used, on both backends. Ignored if
        `optimizer` is an object.
    lr_scheduler : callable, optional
        ``rate = lr_scheduler(number of the update)``, from 1: from
        `mgpu.lr_scheduler`, or any function. All parameters of a step have
        one rate. (Gluon calls the schedule for each parameter: one that was
        frozen for some steps, and comes first, has the previous step's rate.)
        As in Gluon, an explicit rate replaces the ``base_lr`` of a schedule
        (except with ftrl), and so does the default rate of adam, adamw,
        adamax, nadam, rmsprop and signum.
    lr_mult, wd_mult : dict, optional
        Factors by parameter name, for example ``{"0.bias": 2.0}``. torch's
        names weight and bias are accepted for the gamma and beta of a norm.
    loss_scale : float or "dynamic", optional
        Factor of the loss before the backward pass, so that small gradients
        do not underflow in float16; `update` divides by it. `train_batch`
        applies it; multiply losses of a custom loop by `Trainer.loss_scale`.
        A power of two does not change the result unless a value overflows or
        underflows. "dynamic": the rule of ``torch.amp.GradScaler`` with its
        defaults, on both backends. The scale starts at 2**16; an update whose
        summed gradients are not all finite is skipped and halves the scale;
        2000 updates in a row double it. Each update then waits for the
        gradients.
    nonfinite : {"raise", "skip", "ignore"}, optional
        Action of `update` if a summed gradient has a NaN or an infinite
        element; the same on all ranks. "raise":
        `mgpu.errors.NonFiniteGradient`. "skip": skip the update, and count it
        in `skipped_steps`. "ignore": apply the update without a check. The
        check waits for the gradients. Default: "skip" with a dynamic scale,
        which supports no other, else "ignore".
    allreduce : str or mgpu.collectives.AllReduce
        The ``algorithm=`` of `mgpu.allreduce` that sums gradients over ranks.
    kvstore, update_on_kvstore
        Accepted for Gluon; no effect. (With None a Gluon trainer does not sum
        the gradients of several devices, and their parameters diverge; mgpu
        sums them.) Raises ValueError for "nccl", "dist_*" and
        ``compression_params``.

    Attributes
    ----------
    loss_scale : float
        The current scale; 1.0 without one. Read-only.
    lr_mult, wd_mult : dict of str -> float
        The factors of this trainer.
    skipped_steps : int
        Number of updates skipped because a gradient was not finite;
        `num_update` does not count them.

    Raises
    ------
    ValueError
        An unknown optimizer, option or parameter name.
    TypeError
        `replicas` is not a result of `initialize`, or an option has another
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
        #: the names of the trained parameters; None: all
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
        #: applies the updates
        self.updates: OptimizerObject = rule_updates.updates_of(
            self.replicas, optimizer, options, semantics,
            [one for one in schedules if one is not None])
        self.semantics = self.updates.semantics
        moved = self.updates.names()
        if None not in (self._names, moved) and self._names != moved:
            raise ValueError(
                "a Trainer updates the parameters in its optimizer object's "
                f"groups; received {len(self._names or ())} parameters "
                "that differ from these. Pass the replicas.")
        self.update_order = ()
        self._schedule = ScheduleState(self.replicas.backend)
        self._schedule.begin(self.lr_scheduler)
        #: updates so far, and by parameter, without skipped ones
        self.num_update = 0
        self._counts: dict[str, int] = {}
        #: parameters with summed gradients for `update`
        self._summed: list[Parameter] | None = None
        self._agreement = StepAgreement(self.replicas, strategy,
                                        self._facts)
        self._agreement.begin()
        if self.replicas.span.wide:
            share_values([[x] for x in self.updates.others()],
                         self.replicas.span)

    def _facts(self) -> dict[str, Any]:
        """The inputs of an update, equal on all ranks."""
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
            # It would have no effect. (A subclass may declare it.)
            if name in self._hints and not hasattr(type(self), name):
                self.__getattr__(name)
            super().__setattr__(name, value)

    @property
    def optimizer(self) -> Any:
        """The `mgpu.optimizers.Optimizer`, or the framework's own object."""
        return self.updates.object

    @property
    def update_order(self) -> Sequence[str]:
        """The order in which nadam updates the parameters: Gluon's, see
        `mgpu.checkpoints.trainer_states.by_layer`. It may be set; parameters
        without a name in it come last."""
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
        """Convert `optimizer` to a rule of mgpu, with its current options.
        Raises ValueError for an optimizer object whose formula mgpu does not
        have, or whose groups have different ones."""
        return rule_updates.rule_of(self.updates)

    # -- rates --------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The rate of the last update; before it, that of the first one. For
        an optimizer object the current rate of its first group."""
        return self.rate(self.num_update)

    @property
    def lr_scheduler(self) -> Schedule | None:
        """``rate = lr_scheduler(number of the update)``. It may be set."""
        return self.updates.schedule

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Schedule | None) -> None:
        self.updates.schedule = schedule

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the following steps. Raises ValueError
        under a schedule, which would replace it, for groups with different
        rates, and for a negative or non-finite rate; TypeError if `lr` is not
        a number. A torch schedule continues from the rates in its optimizer's
        groups."""
        if self.lr_scheduler is not None:
            raise ValueError("the learning rate follows the trainer's "
                             f"lr_scheduler; received {lr!r}. Change the "
                             "schedule instead.")
        finite("the learning rate", lr, ", 0 or more", lambda x: x >= 0)
        self.updates.set_learning_rate(float(lr))

    def rate(self, num_update: int) -> float:
        """The learning rate of update `num_update`, from 1, before any
        multiplier. Does not change a stateful schedule. Raises ValueError or
        TypeError if the schedule does not return a finite number, 0 or
        more."""
        if self.lr_scheduler is None:
            return self.updates.learning_rate
        return self._schedule.look(self.lr_scheduler, max(1, num_update))

    def multipliers(self, p: Parameter) -> tuple[float, float]:
        """The factors of a parameter's rate and weight decay: those of this
        trainer, else the parameter's own."""
        lr_mult, wd_mult = p.multipliers()
        return (self.lr_mult.get(p.name, lr_mult),
                self.wd_mult.get(p.name, wd_mult))

    # -- a step -------------------------------------------------------------

    def step(self, batch_size: float | None = None,
             ignore_stale_grad: bool = False) -> None:
        """Call `allreduce_grads`, then `update`.

        With ``grad_req="add"`` gradients accumulate until they are set to
        zero (`Replicas.zero_grad`): do it after each step, as in Gluon.
        Calls `allreduce_grads` and `update` of a subclass that overrides
        them. (Gluon's own `step` does not.)

        Parameters
        ----------
        batch_size : float
            Divisor of the summed gradients: the global batch size, over all
            devices; or the number of tokens, the sum of the weights. In
            distributed training: that of this rank, which may be 0. The sum
            over all ranks is the divisor. Raises ValueError if it is missing,
            or a closure as for torch's own step.
        ignore_stale_grad : bool
            Skip parameters that no backward pass has reached since the last
            step. By default they raise.

        Raises
        ------
        StaleGradientError
            No example of the batch has reached a parameter. The message names
            it; nothing has changed.
        mgpu.errors.DeviceError
            A queued operation has failed on a device. No parameter has
            changed, and the gradients are invalid.
        mgpu.errors.NonFiniteGradient
            With ``nonfinite="raise"``. No parameter has changed.
        RuntimeError
            Another thread uses the replicas, or they are invalid. Nothing has
            changed.
        ValueError
            `batch_size` is not a finite number above 0.
        """
        batch_size = self._agreement.batch_size(batch_size)
        if self._overrides("allreduce_grads", "update"):
            self.allreduce_grads(ignore_stale_grad)
            self.update(batch_size)
            return

        self._atomic(lambda: self._update(self._allreduce(ignore_stale_grad,
                                                         batch_size)))

    def step_parts(self, parts: Sequence[Callable[[], float]],
                   ignore_stale_grad: bool = False,
                   clip_norm: float | None = None) -> None:
        """Perform one step on a batch that is split into `parts`.

        The parts run one after the other. Their gradients are accumulated and
        divided by the total batch size. Buffers are updated by each part. If
        a part raises, no parameter has changed, and all gradients are
        invalid.

        Parameters
        ----------
        parts : sequence of callables
            Each runs the forward and backward passes of its part on all
            devices, and returns its number of examples. In distributed
            training: the same number of parts on each rank; a part without
            examples returns 0.
        ignore_stale_grad : bool
            As in `step`, for parameters that no part reached.
        clip_norm : float, optional
            The maximum norm of the gradients divided by the total batch size
            and by the `loss_scale`. The factor is that of `clip_global_norm`;
            for an optimizer with torch's semantics that of torch's
            ``clip_grad_norm_``: ``clip_norm / (norm + 1e-6)`` if below 1.

        Raises
        ------
        Exception
            Errors of `step` and `clip_global_norm`.
        ValueError
            A subclass overrides `step`, `allreduce_grads` or `update`; or,
            with several parts, a parameter has ``grad_req="add"``, or one
            that the trainer does not update has a gradient.
        """
        replicas, backend = self.replicas, self.replicas.backend
        with replicas.span.world.guard():
            self.check_parts(len(parts), clip_norm)
        rows = 0.0
        sums: dict[Parameter, Any] = {}

        def add() -> None:
            """Add the gradients of this part to the sums of all parts."""
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
                    self._atomic(add)
            self._atomic(apply)
        except BaseException:
            self._summed = None
            raise
        finally:
            self._agreement.more = {}

    def check_parts(self, count: int, clip_norm: float | None) -> None:
        """Raise ValueError or TypeError as `step_parts` with `count` parts
        would."""
        if clip_norm is not None:
            finite("clip_norm", clip_norm, " above 0", lambda x: x > 0)
        if (count > 1 or clip_norm is not None) and self._overrides(
                "step", "allreduce_grads", "update"):
            raise ValueError(
                "accumulate and clip_norm require mgpu's own Trainer.step, "
                "allreduce_grads and update; received a "
                f"{type(self).__name__}, which overrides them. Accumulate and "
                "clip in the subclass, or use an mgpu.Trainer.")
        added = [p.name for p in self.replicas.params()
                 if p.grad_req == "add"] if count > 1 else []
        if added:
            raise ValueError(
                "accumulate sums the gradients of its batches itself, "
                "starting at zero in each step; received grad_req='add' of "
                f"{added[0]!r}. Use grad_req='write', or accumulate=1.")

    def _overrides(self, *names: str) -> bool:
        """Whether a subclass overrides one of these methods."""
        return any(getattr(getattr(self, name), "__func__", None)
                   is not getattr(Trainer, name) for name in names)

    def _atomic(self, section: Callable[[], None]) -> None:
        """Call `section` completely, or not at all after Ctrl-C, with
        exclusive use of the replicas."""
        backend = self.replicas.backend

        def scoped() -> None:
            with in_use(backend), backend.scope(recording=False):
                section()
        with self.replicas.span.world.guard(), self.replicas.exclusive():
            uninterrupted(scoped)

    def _trained(self) -> list[Parameter]:
        """The parameters that this trainer updates now."""
        names = self._moved()
        return [p for p in self.replicas.params()
                if (names is None or p.name in names) and p.grad_req != "null"]

    def _moved(self) -> frozenset[str] | None:
        """The names of the parameters that this trainer updates; None:
        all."""
        names = self.updates.names()
        return self._names if names is None else names

    def trains(self, p: Parameter) -> bool:
        """Whether this trainer updates `p`, unless it is frozen."""
        names = self._moved()
        return names is None or p.name in names

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero, as `Replicas.zero_grad`: the next step
        does not apply them. Only ``grad_req="add"`` needs it. `set_to_none`
        is accepted for torch and has no effect: gradients remain arrays.
        Raises ValueError where another trainer's gradients accumulate:
        torch's method clears those of its own parameters."""
        pytorch.zero_grad(self)

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over the ranks for `update`.

        Over the devices of a process they are sums after the backward pass.
        Between this call and `update` gradients may be read, clipped or
        changed. Each gradient is taken once: afterwards it is stale until the
        next backward pass. Raises as `step` does.
        """
        self._atomic(partial(self._allreduce, ignore_stale_grad))

    @probes.staged("reduce", "all-reduce", probes.gradients)
    def _allreduce(self, ignore_stale_grad: bool,
                   batch_size: float | None = None,
                   held: Collection[Parameter] = ()) -> float:
        """Return the sum of `batch_size` over all ranks, which is then above
        0. `held`: parameters that earlier parts of the batch have reached."""
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
                # Waits for the gradients, except on GPUs: a failure in a pass
                # raises here, before anything changes.
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
                # Another call must not sum the gradients of some ranks.
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
                    "forward pass inside record() and pass the losses of all "
                    "devices to one mgpu.backward; freeze the parameter "
                    "(grad_req='null', requires_grad=False); or pass "
                    "ignore_stale_grad=True to skip it.")
        used = sorted(reached - missing)
        self._summed = None
        self._agreement.sum({parameters[j]: j in fresh for j in used},
                            self.updates.gradients_of_others)
        self._mark_used(arrays)     # also the skipped ones
        self._summed = [parameters[j] for j in used]
        return whole

    def _mark_used(self, arrays: Iterable[Any]) -> None:
        for x in arrays:
            self.replicas.backend.mark_used(x)

    def summed(self, caller: str = "summed") -> list[Parameter]:
        """The parameters whose gradients `allreduce_grads` has summed since
        the last update, except gradients that the user has removed. Raises
        RuntimeError naming `caller` if there was no `allreduce_grads`."""
        self.replicas.check_complete()
        if self._summed is None:
            raise RuntimeError(
                f"{caller} requires gradients summed by allreduce_grads; "
                "received none since the last update. Call "
                "allreduce_grads first, or step for both.")
        backend = self.replicas.backend
        for p in self._summed:
            if backend.is_fresh(p.data()):
                raise RuntimeError(
                    f"{caller} requires gradients summed by allreduce_grads; "
                    f"received that of {p.name!r}, which a backward pass "
                    "has written since. Call allreduce_grads again.")
        return [p for p in self._summed if backend.has_gradient(p.data())]

    def update(self, batch_size: float) -> None:
        """Apply the gradients, divided by `batch_size`.

        Does not change the gradients; waits on CPU devices. In distributed
        training with ``MGPU_DEBUG=1`` it calls `Replicas.check_equal` at its
        end. With ``loss_scale="dynamic"`` it may skip the step
        (`skipped_steps`).

        Raises
        ------
        RuntimeError
            No `allreduce_grads` since the last update: an old gradient would
            be applied again. Or a backward pass has written gradients since
            `allreduce_grads`.
        """
        batch_size = self._agreement.total(
            "update", self.num_update + 1, batch_size,
            **self._agreement.digests(partial(self.summed, "update")))
        self._summed = self.summed("update")
        self._atomic(partial(self._update, batch_size))

    @probes.staged("update", "update", probes.weights)
    def _update(self, batch_size: float) -> None:
        debug = environment.debug()     # first: raises for a wrong value
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
        note_step()
        replicas.after_step()
        if debug:
            replicas.check_equal()

    def _step(self, work: Mapping[Parameter, Any], scale: float) -> None:
        """Update the arrays of `work` by their gradients times `scale`."""
        own, factors = self.updates, {}
        for p in work:
            factors[p.name] = lr_mult, wd_mult = self.multipliers(p)
            if lr_mult != 1.0 or wd_mult != 1.0:
                finite(f"lr_mult of {p.name!r}", lr_mult)
                finite(f"wd_mult of {p.name!r}", wd_mult)
        counts = {name: self._counts.get(name, 0) + 1 for name in factors}
        # Gluon: the largest number of updates of any parameter, this one
        # included. torch: one more than before.
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
        """Scale all gradients so that their joint norm is at most `max_norm`.

        Call it between `allreduce_grads` and `update`; raises RuntimeError
        elsewhere. The factor is that of Gluon's ``clip_global_norm``:
        ``scale = max_norm / (norm + 1e-8)`` if below 1.

        Parameters
        ----------
        max_norm : float
        batch_size : float, optional
            The norm is that of the gradients divided by `batch_size` and by
            the `loss_scale`, as `update` will apply them (also times Gluon's
            ``rescale_grad``). Default: of the summed gradients, without a
            division. In distributed training: as in `step`.

        Returns
        -------
        float
            The norm before clipping; reading it waits for the gradients. If
            it is not finite, raises FloatingPointError and scales nothing.
            With a dynamic scale, or nonfinite="skip", it is returned, and
            `update` will skip the step.
        """
        return self._clip_summed("clip_global_norm", max_norm, batch_size,
                                 1e-8)

    def clip_grad_norm_(self, max_norm: float,
                        batch_size: float | None = None) -> float:
        """Clip the gradients of the mean loss by torch's formula: ``scale =
        max_norm / (norm + 1e-6)`` if below 1.

        With `update` of the same `batch_size` the numbers are those of
        ``torch.nn.utils.clip_grad_norm_`` between ``backward`` of a mean loss
        and ``step``. The norm is that of the parameters of this trainer.

        Parameters
        ----------
        max_norm : float
        batch_size : float
            The divisor of `update`. Raises ValueError if it is missing: in
            torch the gradients are divided before they are clipped.

        Returns
        -------
        float
            The norm before clipping. Raises as `clip_global_norm`: if it is
            not finite nothing is scaled (torch sets all gradients to NaN).
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
        """Write the optimizer states to `fname` (safetensors with digests, no
        pickle), atomically. The file loads on either backend and any number
        of devices. It does not hold parameters: see `Replicas.export_numpy`,
        and `mgpu.save_checkpoint` for both in one file. Waits for pending
        updates."""
        trainer_states.write(self.export_states(), fname)

    def load_states(self, fname: FilePath) -> None:
        """Load a file of `save_states`.

        The trainer keeps its own options, multipliers and schedule. The
        groups of a torch optimizer object get all options of the file, as in
        torch. Loaded are the learning rate, a dynamic loss scale if both have
        one, and the changed attributes of a schedule of the same class and
        options.

        Raises
        ------
        ValueError
            The file holds no states, those of another optimizer, or states
            that do not fit the network's parameters. The message lists all
            differences; nothing has changed.
        OSError
            The file cannot be opened.
        """
        self.replicas.check_complete()
        self.fit_states(trainer_states.read(fname), repr(os.fspath(fname)))()

    def export_states(self) -> TrainerStates:
        """Copy the optimizer states to NumPy, in a form that is independent
        of the backend and the number of devices. Waits for pending
        updates."""
        scale, own = self._loss_scale, self.updates
        slots, counts = own.memory()
        return TrainerStates(
            trainer_states.kind_of(own), self.num_update, own.learning_rate,
            {**self._counts, **counts}, slots,
            scale.value if scale.dynamic else None, scale.good_steps,
            scale.skipped_steps, self._schedule.export(own.schedule),
            own.export())

    def import_states(self, states: TrainerStates) -> None:
        """Load the result of `export_states` of this or another trainer;
        raises as `load_states` does."""
        self.fit_states(states, "the states")()

    def state_dict(self) -> dict[str, Any]:
        """Copy the states to a dict of numbers, text and native arrays on the
        CPU. ``torch.save`` writes it, and ``torch.load`` with
        ``weights_only=True`` reads it, on that backend. A `torch.optim`
        object cannot load it."""
        return trainer_states.to_dict(self.export_states(),
                                      self.replicas.backend)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict` of this or another trainer; raises
        as `load_states` does."""
        self.fit_states(trainer_states.from_dict(
            state_dict, self.replicas.backend), "the state_dict")()

    def fit_states(self, saved: TrainerStates, source: str
                   ) -> Callable[[], None]:
        """Check `saved` as `import_states` would, and return a function that
        loads it without raising."""
        replicas = self.replicas
        replicas.check_complete()
        # Frozen parameters too: they may have been trained before.
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
    """A DeviceError for an operation that failed in the passes of a step."""
    text = (str(error).strip().splitlines() or [""])[-1]
    replicas, step = trainer.replicas, trainer.num_update + 1
    place = f" of {replicas.span.world!r}" if replicas.span.wide else ""
    found = DeviceError(
        f"the passes on {replicas.devices}{place}, in step {step}, failed: "
        f"{type(error).__name__}: {text[:300]}. No parameter has changed, and "
        "this batch's gradients are invalid. Correct the operation; "
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
        "summed gradients must be finite (nonfinite='raise'); received NaN or "
        f"infinity in that of {name!r}, in step {trainer.num_update + 1}"
        + (f", as on every rank: {world!r}" if world.size > 1 else "")
        + ". No parameter has changed. Lower the learning rate, check the "
        "data, or pass nonfinite='skip'.")


def check_pair(replicas: Any, trainer: Any) -> None:
    """Raise for other objects than replicas and their trainer."""
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
            "the trainer was made with other replicas; received "
            f"one of {trainer.replicas!r} for {replicas!r}. Make a new "
            "Trainer after each initialize.")


def _multipliers(what: str, factors: Any, names: Collection[str]
                 ) -> dict[str, float]:
    """Rename the weight and bias of a norm, torch's names, in `factors` to
    gamma and beta."""
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
        raise ValueError(f"{what} must name parameters of the network; "
                         f"received {unknown}. It has {sorted(names)}.")
    for name, factor in found.items():
        finite(f"{what} of {name!r}", factor)
    return found
