"""One optimiser step on all devices."""
import json
import os
from functools import partial
from numbers import Real
from typing import (Any, Callable, Dict, List, Mapping, NamedTuple, Optional,
                    Tuple, Union)

import numpy as np

from mgpu import files, optimizers, profiling
from mgpu.arguments import is_integer
from mgpu.backends import HOST_OPS, using_backend
from mgpu.collectives import allreduce_many, threads_for
from mgpu.replicas import Parameter, Replicas
from mgpu.strict import flag

_FORMAT = "mgpu trainer states 1"
#: of a dynamic loss scale: see `Trainer`
_FIRST_SCALE, _GROWTH_INTERVAL = 2.0 ** 16, 2000


class StaleGradientError(RuntimeError):
    """A parameter's gradient was not written since the last step."""


class TrainerStates(NamedTuple):
    """What a `Trainer` remembers between steps; arrays by (parameter's name,
    slot)."""

    optimizer: str
    num_update: int
    learning_rate: float
    counts: Dict[str, int]
    slots: Dict[Tuple[str, str], np.ndarray]    # by parameter, slot
    loss_scale: Optional[float] = None          # None: not a dynamic one
    good_steps: int = 0                         # since it has changed
    skipped_steps: int = 0


class _Update(NamedTuple):
    """What is to be done to one parameter."""

    name: str
    weights: List[Any]      # one per device
    gradients: List[Any]
    lr: float
    wd: float
    t: int


class _Views(NamedTuple):
    """The host's memory behind one parameter on one device."""

    weight: np.ndarray
    gradient: np.ndarray
    slots: Dict[str, np.ndarray]
    state: Dict[str, Any]   # the state itself, which also holds numbers


#: bytes of a block of each array
_BLOCK = 1 << 17


def _unscaled(gradient: np.ndarray, loss_scale: float) -> np.ndarray:
    # On its own, not with the division by the batch size: NumPy brings a
    # number to the array's dtype first, and in float16 the two together are
    # a few bits, or zero. The scale itself may be beyond float16.
    if loss_scale == 1.0:
        return gradient
    wide = np.promote_types(gradient.dtype, np.float32)
    return np.divide(gradient, loss_scale, dtype=wide).astype(
        gradient.dtype, copy=False)


def _apply_blocks(optimizer: optimizers.Optimizer, work: List[_Update],
                  devices: List[List[_Views]], scale: float,
                  loss_scale: float) -> None:
    """Do `work` on some devices."""
    profiling.at_once()
    each = [pair for views in devices for pair in zip(work, views)]
    with np.errstate(all="ignore"):     # as the engines
        for update, (weight, gradient, slots, state) in each:
            step, block = max(1, _BLOCK // weight.itemsize), state
            for begin in range(0, len(weight), step):
                part = slice(begin, begin + step)
                block = {**state, **{s: x[part] for s, x in slots.items()}}
                optimizer.update(
                    weight[part],
                    _unscaled(gradient[part], loss_scale) * scale, block,
                    lr=update.lr, wd=update.wd, t=update.t, ops=HOST_OPS)
            # Numbers that the rule has replaced, the same for every block.
            state.update((s, x) for s, x in block.items() if s not in slots)


class Trainer:
    """Sums gradients over devices and updates every replica alike.

    Gluon's `Trainer` with one meaning for any number of devices: gradients
    are summed, divided once by the number of rows, and each device updates
    its own full copy, so all copies keep the same bits.

    Parameters
    ----------
    replicas : Replicas
    optimizer : str or mgpu.optimizers.Optimizer
        sgd, nag, adam, adamw, adamax, nadam, rmsprop, adagrad, adadelta,
        ftrl, signum.
    optimizer_params : dict, optional
        Options of the optimiser under Gluon's names (``learning_rate``,
        ``wd``, ``momentum``, ``clip_gradient``, ...), under torch's with
        ``semantics="torch"``. ``lr_scheduler`` may stand here too.
    semantics : {"gluon", "torch"}
        Whose formulas, on both engines. Not read where `optimizer` is an
        object.
    lr_scheduler : callable, optional
        ``rate = lr_scheduler(number of the update)``, from 1: those of
        `mgpu.lr_scheduler`, or any function.
    lr_mult, wd_mult : dict, optional
        Factors by parameter name, for example ``{"0.bias": 2.0}``.
    loss_scale : float or "dynamic", optional
        What losses are multiplied by before the backward pass, so that small
        gradients do not vanish in float16; `update` divides by it.
        `train_batch` multiplies; other code multiplies its losses by
        `Trainer.loss_scale` itself. A power of two changes no bit of the
        result unless something overflows or vanishes. "dynamic" is the rule
        of ``torch.amp.GradScaler`` with its defaults, on both engines: 2**16
        at first; an update whose summed gradients are not all finite is
        skipped on all devices and halves the scale; 2000 updates in a row
        double it. Each update then waits for the gradients.

    Attributes
    ----------
    loss_scale : float
        The scale now; 1.0 without one. To be read, not set.
    skipped_steps : int
        Updates that a dynamic scale has skipped so far; they are not in
        `num_update`.

    Raises
    ------
    ValueError
        An unknown optimiser, option or parameter name.
    TypeError
        `replicas` did not come from `initialize`, or an option of another
        type.
    """

    def __init__(self, replicas: Replicas,
                 optimizer: Union[str, optimizers.Optimizer],
                 optimizer_params: Optional[Mapping[str, Any]] = None,
                 semantics: str = "gluon",
                 lr_scheduler: Optional[Callable[[int], float]] = None,
                 lr_mult: Optional[Mapping[str, float]] = None,
                 wd_mult: Optional[Mapping[str, float]] = None,
                 loss_scale: Union[None, float, str] = None):
        if not isinstance(replicas, Replicas):
            raise TypeError(
                "a Trainer takes the Replicas that mgpu.initialize returns; "
                f"received {type(replicas).__name__}. For lists of arrays "
                "use mgpu.sgd.")
        options = dict(optimizer_params or {})
        scheduler = options.pop("lr_scheduler", None)
        if scheduler is not None and lr_scheduler is not None:
            raise ValueError("one lr_scheduler is wanted; received one as an "
                             "argument and one in optimizer_params.")
        scheduler = scheduler or lr_scheduler
        if isinstance(optimizer, optimizers.Optimizer):
            if options:
                raise ValueError(
                    "optimizer_params go with an optimiser's name; received "
                    f"{sorted(options)} with an Optimizer object.")
            rate_given = True
        else:
            rate_given = "learning_rate" in options or "lr" in options
            optimizer = optimizers.create(optimizer, semantics=semantics,
                                          **options)
        names = {p.name for p in replicas.params()}
        for what, factors in (("lr_mult", lr_mult), ("wd_mult", wd_mult)):
            unknown = sorted(set(factors or ()) - names)
            if unknown:
                raise ValueError(
                    f"{what} names parameters of the network; received "
                    f"{unknown}. It has {sorted(names)}.")
            for name, factor in (factors or {}).items():
                _check_number(f"{what} of {name!r}", factor)
        self._dynamic = isinstance(loss_scale, str) and \
            loss_scale == "dynamic"
        if not self._dynamic and loss_scale is not None:
            _check_loss_scale(loss_scale)
        self.loss_scale = _FIRST_SCALE if self._dynamic \
            else 1.0 if loss_scale is None else float(loss_scale)
        self.skipped_steps = self._good_steps = 0
        self.replicas, self.optimizer = replicas, optimizer
        self._lr_mult, self._wd_mult = dict(lr_mult or {}), dict(wd_mult or {})
        self._scheduler = scheduler
        if scheduler is not None and hasattr(scheduler, "base_lr"):
            # Gluon: a rate that was given replaces the schedule's own.
            if rate_given:
                scheduler.base_lr = optimizer.learning_rate
            else:
                optimizer.learning_rate = scheduler.base_lr
        #: updates so far, and by parameter (a skipped one is not counted)
        self.num_update = 0
        self._counts: Dict[str, int] = {}
        self._states: List[Dict[str, Dict[str, Any]]] = [
            {} for _ in replicas.devices]
        #: whose gradients are summed and wait for `update`
        self._collected: Optional[List[Parameter]] = None

    def __repr__(self) -> str:
        return f"Trainer({self.optimizer!r}, {self.replicas!r})"

    # -- learning rate ------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The rate of the last update (of the first one, before it)."""
        if self._scheduler is not None:
            return float(self._scheduler(max(1, self.num_update)))
        return self.optimizer.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Use `lr` from the next step on. ValueError under a schedule, which
        would replace it, or for a negative or non-finite rate; TypeError for
        what is no number."""
        if self._scheduler is not None:
            raise ValueError("the learning rate follows the trainer's "
                             f"lr_scheduler; received {lr!r}. Change the "
                             "schedule instead.")
        _check_number("the learning rate", lr, 0)
        self.optimizer.learning_rate = float(lr)

    # -- a step -------------------------------------------------------------

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """`allreduce_grads`, then `update`.

        With ``grad_req="add"`` gradients go on growing until they are set to
        zero (`Replicas.zero_grad`); do it after each step, as in Gluon.

        Parameters
        ----------
        batch_size : int
            What the summed gradients are divided by: the rows of the whole
            batch, over all devices.
        ignore_stale_grad : bool
            Skip, on every device, a parameter whose gradient was not
            written since the last step. By default that is an error.

        Raises
        ------
        StaleGradientError
            Names the parameter and the device; nothing has changed. A
            device whose replica did not run at all since the last step (it
            had no rows) contributes zero and is no error.
        ValueError
            A batch size that is no whole number, 1 or more.
        """
        check_batch_size(batch_size)
        self.allreduce_grads(ignore_stale_grad)
        self.update(batch_size)

    def _trained(self) -> List[Parameter]:
        self._check_complete()
        requests = self.replicas.grad_reqs()
        return [p for p in self.replicas.params()
                if requests[p.name] != "null"]

    def _check_complete(self) -> None:
        if self.replicas._draw is not None:
            raise RuntimeError(
                "the network has not run yet, so shapes are unknown and "
                "there are no gradients; run a forward and a backward pass "
                "before Trainer.step.")

    @profiling.staged("reduce", "all-reduce", profiling.gradients)
    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Sum every gradient over the devices, in place on each.

        Legal at any number of devices; between it and `update` a gradient
        may be read, clipped or changed. The gradients are stale from now on:
        what a backward pass wrote is summed once. CPU devices share the work
        evenly, and MXNet's wait for all queued work first; elsewhere
        parameters are collected on different devices, balanced by bytes.
        Raises as `step` does.
        """
        parameters, replicas = self._trained(), self.replicas
        backend, devices = replicas.backend, replicas.devices
        columns = [p.list_data() for p in parameters]
        fresh = [[backend.is_fresh(x) for x in arrays] for arrays in columns]
        idle = [i for i in range(len(devices)) if not replicas.recorded[i]
                and not any(flags[i] for flags in fresh)]
        if len(idle) == len(devices):
            idle = []       # nothing ran at all
        used, gradients = [], []
        for p, arrays, flags in zip(parameters, columns, fresh):
            stale = [i for i, flag in enumerate(flags)
                     if not flag and i not in idle]
            if stale and not ignore_stale_grad:
                raise StaleGradientError(
                    f"parameter {p.name!r} has no new gradient on "
                    f"{devices[stale[0]]} since the last step: no backward "
                    "pass reached it. Run the forward pass inside record() "
                    "and call backward on every device's loss; freeze the "
                    "parameter (grad_req='null', requires_grad=False); or "
                    "pass ignore_stale_grad=True to skip it.")
            if not stale:
                used.append(p)
                gradients.append([backend.grad(x) for x in arrays])
        with using_backend(backend.name), backend.scope(recording=False):
            for i in idle:
                # Old gradients of a device without rows: exactly zero now.
                for copies in gradients:
                    copies[i][...] = 0
            allreduce_many(gradients)
        # Also those that were skipped: theirs belong to this step.
        for arrays in columns:
            for x in arrays:
                backend.mark_used(x)
        replicas.recorded = [False] * len(devices)
        self._collected = used

    def _summed(self, caller: str) -> List[Parameter]:
        self._check_complete()
        if self._collected is None:
            raise RuntimeError(
                f"{caller} works on gradients that allreduce_grads has "
                "summed; received none since the last update. Call "
                "allreduce_grads first, or step for both.")
        return self._collected

    @profiling.staged("update", "update", profiling.weights)
    def update(self, batch_size: int) -> None:
        """Apply the gradients, divided by `batch_size`, on every device.

        Does not touch the gradients; waits on CPU devices, as
        `allreduce_grads` does. RuntimeError without an
        `allreduce_grads` before it: an old gradient is never applied again.
        While the environment variable ``MGPU_DEBUG`` is 1 it ends with
        `Replicas.check_equal` (`ReplicaMismatchError`), which waits. With
        ``loss_scale="dynamic"`` it may skip the step (`skipped_steps`).
        """
        check_batch_size(batch_size)
        debug = flag("MGPU_DEBUG")      # read first: a wrong value is refused
        parameters = self._summed("update")
        replicas, optimizer = self.replicas, self.optimizer
        backend = replicas.backend
        # Nothing is counted before every state and rate is there.
        number = self.num_update + 1
        rate = optimizer.learning_rate if self._scheduler is None \
            else float(self._scheduler(number))
        with using_backend(backend.name), backend.scope(recording=False):
            if self._dynamic and not self._finite(parameters):
                self._collected = None
                self._skip_step()
                replicas.after_step()
                if debug:
                    replicas.check_equal()
                return
            work = []
            for p in parameters:
                name, weights = p.name, p.list_data()
                for state, weight in zip(self._states, weights):
                    if name not in state:
                        state[name] = optimizer.create_state(weight,
                                                             backend.ops)
                work.append(_Update(
                    name, weights, [backend.grad(x) for x in weights],
                    rate * self._lr_mult.get(name, p.lr_mult),
                    optimizer.wd * self._wd_mult.get(name, p.wd_mult),
                    self._counts.get(name, 0) + 1))
            counts = {update.name: update.t for update in work}
            if type(optimizer).begin_step is not \
                    optimizers.Optimizer.begin_step:
                order = sorted(self._states[0], key=self._gluons_order())
                for state in self._states:
                    optimizer.begin_step(
                        [state[name] for name in order],
                        [counts.get(name) for name in order])
            self._apply(work, 1.0 / batch_size)
            self._counts.update(counts)
            self.num_update, self._collected = number, None
            if self._dynamic:
                self._count_good_step()
            replicas.after_step()
            if debug:
                replicas.check_equal()

    def _apply(self, work: List[_Update], scale: float) -> None:
        """The optimiser's rule on every device, for gradients times `scale`
        and divided by the loss scale.

        In the host's memory elementwise rules go through all arrays block by
        block, so that what a rule allocates stays in a core's cache: memory
        is read and written once. The formulas are the same, in NumPy."""
        backend, optimizer = self.replicas.backend, self.optimizer
        k, loss_scale = len(self.replicas), self.loss_scale
        views = self._host_views(work) if optimizer.elementwise else None
        if views is not None:
            threads = threads_for(k * sum(v.weight.nbytes for v in views[0]),
                                  k)
            backend.on_host(
                [partial(_apply_blocks, optimizer, work, views[i::threads],
                         scale, loss_scale) for i in range(threads)],
                [x for update in work for x in update.weights])
            return

        def apply(device: int) -> None:
            for update in work:
                gradient = update.gradients[device]
                if loss_scale != 1.0:
                    # On its own: MXNet reads numbers from text, and not
                    # every quotient of two to the last bit.
                    gradient = gradient / loss_scale
                optimizer.update(
                    update.weights[device], gradient * scale,
                    self._states[device][update.name], lr=update.lr,
                    wd=update.wd, t=update.t, ops=backend.ops)
        backend.parallel([partial(apply, i) for i in range(k)])

    def _host_views(self, work: List[_Update]) -> Optional[List[List[_Views]]]:
        """For each device and update; None where an array has no view."""
        backend, found = self.replicas.backend, []
        for i, states in enumerate(self._states):
            found.append([])
            for update in work:
                state = states[update.name]
                slots = [s for s, x in state.items() if backend.is_native(x)]
                views = backend.host_views(
                    [update.weights[i], update.gradients[i],
                     *(state[s] for s in slots)])
                if views is None:
                    return None
                found[i].append(_Views(
                    *views[:2], dict(zip(slots, views[2:])), state))
        return found

    def _finite(self, parameters: List[Parameter]) -> bool:
        """Whether all gradients are, which have been summed, so that one
        device's tell of all; waits."""
        backend = self.replicas.backend
        ops, total = backend.ops, None
        for p in parameters:
            # Zero times a number is 0, times infinity or NaN it is NaN.
            here = ops.astype(ops.sum(p.list_grad()[0] * 0.0), "float32")
            total = here if total is None else total + here
        return total is None or not np.isnan(backend.to_numpy(total)).any()

    # torch/amp/grad_scaler.py and _amp_update_scale_ have this rule; the
    # scale stays a normal float32, as theirs is one.

    def _skip_step(self) -> None:
        self.loss_scale = max(self.loss_scale * 0.5, 2.0 ** -126)
        self.skipped_steps += 1
        self._good_steps = 0

    def _count_good_step(self) -> None:
        self._good_steps += 1
        if self._good_steps == _GROWTH_INTERVAL:
            self.loss_scale = min(self.loss_scale * 2.0, 2.0 ** 127)
            self._good_steps = 0

    def _gluons_order(self) -> Callable[[str], Any]:
        """Layer after layer, and by name inside a layer, as a Gluon Trainer
        that is given a dictionary sorts a plain stack of layers."""
        layers: Dict[str, int] = {}
        for p in self.replicas.params():
            layers.setdefault(p.name.rpartition(".")[0], len(layers))
        return lambda name: (layers[name.rpartition(".")[0]], name)

    def clip_global_norm(self, max_norm: float, batch_size: int = 1) -> float:
        """Scale all gradients so that their joint norm is `max_norm` at most.

        Call it between `allreduce_grads` and `update` (RuntimeError
        elsewhere). Each parameter counts once, not once per device.
        Formula: Gluon's ``clip_global_norm``, ``scale = max_norm / (norm +
        1e-8)`` where that is below 1.

        Parameters
        ----------
        max_norm : float
        batch_size : int
            The norm is that of the gradients divided by it and by the
            `loss_scale` (what `update` will apply). With 1, and without a
            scale, of the summed gradients as they are.

        Returns
        -------
        float
            The norm before clipping; reading it waits for the gradients.
            If it is not finite nothing is scaled and a FloatingPointError
            is raised; with a dynamic scale it is returned, and `update` will
            skip the step.
        """
        _check_number("max_norm", max_norm, 0)
        if not max_norm:
            raise ValueError("max_norm must be above 0; received "
                             f"{max_norm!r}. Freeze parameters that are not "
                             "to move.")
        check_batch_size(batch_size)
        backend = self.replicas.backend
        parameters = self._summed("clip_global_norm")
        gradients = [p.list_grad() for p in parameters]
        with backend.scope(recording=False):
            squares = []
            for p, (g, *_) in zip(parameters, gradients):
                if p.dtype not in ("float32", "float64"):
                    # A sum of squares in float16 ends at a norm of 256.
                    g = backend.ops.astype(g, "float32")
                squares.append(backend.ops.sum(g * g))
            norm = float(np.sqrt(sum(
                float(backend.to_numpy(s).sum()) for s in squares)))
            norm /= batch_size * self.loss_scale
            if not np.isfinite(norm):
                if self._dynamic:
                    return norm
                raise FloatingPointError(
                    f"the gradients have norm {norm}; they were not clipped. "
                    "Lower the learning rate, or find the step that made "
                    "them.")
            scale = max_norm / (norm + 1e-8)
            if scale < 1.0:
                for copies in gradients:
                    for g in copies:
                        g *= scale
        return norm

    # -- states -------------------------------------------------------------

    def save_states(self, fname: Union[str, "os.PathLike[str]"]) -> None:
        """Write the optimiser's state to `fname` (npz with a JSON header, no
        pickle), whole or not at all. The same file loads on either engine
        and any number of devices. Weights are not in it: see
        `Replicas.export_numpy`. Waits for pending updates."""
        saved = self.export_states()
        header = {"format": _FORMAT, "optimizer": saved.optimizer,
                  "num_update": saved.num_update, "counts": saved.counts,
                  "learning_rate": saved.learning_rate,
                  "loss_scale": saved.loss_scale,
                  "good_steps": saved.good_steps,
                  "skipped_steps": saved.skipped_steps}
        arrays = {"header": np.array(json.dumps(header))}
        for (name, slot), value in saved.slots.items():
            arrays[f"{name}|{slot}"] = value
        with files.part_of(fname) as part, open(part, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())

    def load_states(self, fname: Union[str, "os.PathLike[str]"]) -> None:
        """Read what `save_states` wrote, onto all devices.

        The trainer keeps its own options, multipliers and schedule; the
        learning rate is that of the file, and so is a dynamic loss scale
        where both have one.

        Raises
        ------
        ValueError
            No such file's contents, another optimiser's, or states that do
            not fit the network's parameters; all differences are listed and
            nothing has changed.
        OSError
            The file cannot be opened.
        """
        self._check_complete()
        self._import(_read_states(fname), repr(os.fspath(fname)))

    def export_states(self) -> TrainerStates:
        """The optimiser's state as NumPy copies, whatever the engine and the
        number of devices. Waits for pending updates."""
        backend = self.replicas.backend
        return TrainerStates(
            type(self.optimizer).__name__, self.num_update,
            self.optimizer.learning_rate, dict(self._counts),
            {(name, slot): backend.to_numpy(value)
             if backend.is_native(value) else np.array(value)
             for name, slots in self._states[0].items()
             for slot, value in slots.items()},
            self.loss_scale if self._dynamic else None, self._good_steps,
            self.skipped_steps)

    def import_states(self, states: TrainerStates) -> None:
        """Put `export_states` of this or of another trainer back, on all
        devices; raises as `load_states` does."""
        self._check_complete()
        self._import(states, "the states")

    def _import(self, saved: TrainerStates, source: str) -> None:
        own = type(self.optimizer).__name__
        wrong = []
        if saved.optimizer != own:
            wrong.append(f"the state of {saved.optimizer} instead of {own}")
        # Frozen ones too: they may have been trained before.
        parameters = {p.name: p for p in self.replicas.params()}
        known = {*saved.counts, *(name for name, _ in saved.slots)}
        wrong += [f"unknown parameter {name}"
                  for name in sorted(known - set(parameters))]
        backend, left = self.replicas.backend, dict(saved.slots)
        states: List[Dict[str, Dict[str, Any]]] = [
            {} for _ in self.replicas.devices]
        with backend.scope(recording=False):
            for name in saved.counts if not wrong else ():
                for state, weight in zip(states,
                                         parameters[name].list_data()):
                    state[name] = slots = self.optimizer.create_state(
                        weight, backend.ops)
                    for slot, value in slots.items():
                        found = saved.slots.get((name, slot))
                        left.pop((name, slot), None)
                        shape = tuple(getattr(value, "shape", ()))
                        if found is None:
                            wrong.append(f"no {slot} of {name}")
                        elif found.shape != shape:
                            wrong.append(f"{slot} of {name} with shape "
                                         f"{found.shape} instead of {shape}")
                        elif backend.is_native(value):
                            value[...] = backend.put(found, value)
                        else:
                            slots[slot] = found.item()
        wrong = wrong or [f"unused {slot} of {name}" for name, slot in left]
        if wrong:
            raise ValueError(
                f"{source} must hold the states of this trainer; "
                f"received {'; '.join(dict.fromkeys(wrong))}. Load it into a "
                "trainer with the same optimiser and network.")
        self._states, self._counts = states, dict(saved.counts)
        self.num_update = saved.num_update
        self.optimizer.learning_rate = saved.learning_rate
        self.skipped_steps = saved.skipped_steps
        if self._dynamic and saved.loss_scale is not None:
            self.loss_scale = saved.loss_scale
            self._good_steps = saved.good_steps


def _read_states(fname: Union[str, "os.PathLike[str]"]) -> TrainerStates:
    try:
        with np.load(fname, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(str(arrays.pop("header")))
        if header["format"] != _FORMAT:
            raise ValueError(f"its format is {header['format']!r}")
        slots = {}
        for key, array in arrays.items():
            name, _, slot = key.rpartition("|")
            slots[name, slot] = array
        loss_scale = header.get("loss_scale")   # older files have none
        if loss_scale is not None:
            _check_loss_scale(loss_scale)
        return TrainerStates(
            str(header["optimizer"]), int(header["num_update"]),
            float(header["learning_rate"]),
            {name: int(t) for name, t in header["counts"].items()}, slots,
            loss_scale, int(header.get("good_steps", 0)),
            int(header.get("skipped_steps", 0)))
    except OSError:
        raise
    except Exception as error:      # zip, NumPy, JSON: each has its own
        raise ValueError(
            f"a file of Trainer.save_states is wanted; {os.fspath(fname)!r} "
            f"is not one, or is damaged ({error}). Use a whole file.") \
            from error


def _check_number(what: str, value: Any, least: float = -float("inf")) -> None:
    rule = f"{what} must be a finite number" + (
        "" if least else ", 0 or more")
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{rule}; received {value!r} of type "
                        f"{type(value).__name__}.")
    if not least <= value < float("inf"):
        raise ValueError(f"{rule}; received {value!r}.")


def _check_loss_scale(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) \
            or not 0 < value < float("inf"):
        raise ValueError(
            "loss_scale must be None, 'dynamic' or a finite number above 0; "
            f"received {value!r}. Use a power of two, such as 1024.0.")


def check_batch_size(batch_size: Any) -> None:
    """Refuse what no sum over rows can be divided by (ValueError)."""
    if not is_integer(batch_size, 1):
        raise ValueError(f"batch_size must be a whole number, 1 or more; "
                         f"received {batch_size!r}. Pass the rows of the "
                         "whole batch, over all devices.")
