"""One optimiser step on all devices."""
import json
import os
import tempfile
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Union

import numpy as np

from mgpu import optimizers
from mgpu.collectives import allreduce, assign_roots
from mgpu.replicas import Parameter, Replicas

_FORMAT = "mgpu trainer states 1"


class StaleGradientError(RuntimeError):
    """A parameter's gradient was not written since the last step."""


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
        Whose formulas, on both engines.
    lr_scheduler : callable, optional
        ``rate = lr_scheduler(number of the update)``, from 1: those of
        `mgpu.lr_scheduler`, or any function.
    lr_mult, wd_mult : dict, optional
        Factors by parameter name, for example ``{"0.bias": 2.0}``.

    Raises
    ------
    ValueError
        An unknown optimiser, option or parameter name.
    """

    def __init__(self, replicas: Replicas,
                 optimizer: Union[str, optimizers.Optimizer],
                 optimizer_params: Optional[Mapping[str, Any]] = None,
                 semantics: str = "gluon",
                 lr_scheduler: Optional[Callable[[int], float]] = None,
                 lr_mult: Optional[Mapping[str, float]] = None,
                 wd_mult: Optional[Mapping[str, float]] = None):
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
        self.replicas, self.optimizer = replicas, optimizer
        self.semantics = semantics
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
        self._skipped: set = set()

    def __repr__(self) -> str:
        return f"Trainer({self.optimizer!r}, {self.replicas!r})"

    # -- learning rate ------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The rate of the last update (of the first one, before it)."""
        if self._scheduler is not None:
            return float(self._scheduler(self.num_update))
        return self.optimizer.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Use `lr` from the next step on. ValueError under a schedule, which
        would replace it, or for a negative or non-finite rate."""
        if self._scheduler is not None:
            raise ValueError("the learning rate follows an lr_scheduler; "
                             "change the schedule instead.")
        if not 0 <= lr < float("inf"):
            raise ValueError(f"the learning rate must be a number, 0 or "
                             f"more; received {lr!r}.")
        self.optimizer.learning_rate = float(lr)

    # -- a step -------------------------------------------------------------

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """`allreduce_grads`, then `update`.

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
        """
        _check_batch_size(batch_size)
        self.allreduce_grads(ignore_stale_grad)
        self.update(batch_size)

    def _trained(self) -> List[Parameter]:
        self._complete()
        requests = self.replicas.grad_reqs()
        return [p for p in self.replicas.params()
                if requests[p.name] != "null"]

    def _complete(self) -> None:
        if self.replicas._draw is not None:
            raise RuntimeError(
                "the network has not run yet, so shapes are unknown and "
                "there are no gradients; run a forward and a backward pass "
                "before Trainer.step.")

    def _stale(self, parameters: List[Parameter], ignore: bool) -> List[int]:
        """Idle devices. Sets `_skipped`; raises StaleGradientError."""
        backend, devices = self.replicas.backend, self.replicas.devices
        fresh = {p.name: [backend.is_fresh(x) for x in p.list_data()]
                 for p in parameters}
        idle = [i for i in range(len(devices))
                if not self.replicas.recorded[i]
                and not any(flags[i] for flags in fresh.values())]
        skipped = set()
        for name, flags in fresh.items():
            stale = [i for i, flag in enumerate(flags)
                     if not flag and (i not in idle
                                      or len(idle) == len(devices))]
            if stale and not ignore:
                raise StaleGradientError(
                    f"parameter {name!r} has no new gradient on "
                    f"{devices[stale[0]]} since the last step: no backward "
                    "pass reached it. Run the forward pass inside record() "
                    "and call backward on every device's loss; freeze the "
                    "parameter (grad_req='null', requires_grad=False); or "
                    "pass ignore_stale_grad=True to skip it.")
            if stale:
                skipped.add(name)
        self._skipped = skipped
        return idle

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Sum every gradient over the devices, in place on each.

        Legal at any number of devices; between it and `update` a gradient
        may be read, clipped or changed. Parameters are collected on
        different devices, balanced by bytes. Raises as `step` does.
        """
        parameters = self._trained()
        idle = self._stale(parameters, ignore_stale_grad)
        backend, k = self.replicas.backend, len(self.replicas)
        used = [p for p in parameters if p.name not in self._skipped]
        with backend.scope(recording=False):
            for i in idle:
                # Old gradients of a device without rows: exactly zero now.
                for p in used:
                    p.list_grad()[i][:] = 0
            if k == 1:
                return
            gradients = [p.list_grad() for p in used]
            roots = assign_roots([int(np.prod(p.shape)) for p in used], k)

            def collect(root: int) -> None:
                for g, at in zip(gradients, roots):
                    if at == root:
                        allreduce(g, root=root)
            backend.parallel([partial(collect, i) for i in range(k)])

    def update(self, batch_size: int) -> None:
        """Apply the gradients, divided by `batch_size`, on every device.

        Does not touch the gradients. They are stale afterwards.
        """
        _check_batch_size(batch_size)
        backend, optimizer = self.replicas.backend, self.optimizer
        parameters = [p for p in self._trained()
                      if p.name not in self._skipped]
        # Nothing is counted before every state and rate is there.
        number = self.num_update + 1
        rate = optimizer.learning_rate if self._scheduler is None \
            else float(self._scheduler(number))
        with backend.scope(recording=False):
            work = []
            for p in parameters:
                name = p.name
                weights, gradients = p.list_data(), p.list_grad()
                for state, weight in zip(self._states, weights):
                    if name not in state:
                        state[name] = optimizer.create_state(weight,
                                                             backend.ops)
                work.append((
                    name, weights, gradients,
                    rate * self._lr_mult.get(name, p.lr_mult),
                    optimizer.wd * self._wd_mult.get(name, p.wd_mult),
                    self._counts.get(name, 0) + 1))
            scale = 1.0 / batch_size

            def apply(device: int) -> None:
                for name, weights, gradients, lr, wd, t in work:
                    optimizer.update(
                        weights[device], gradients[device] * scale,
                        self._states[device][name], lr=lr, wd=wd, t=t,
                        ops=backend.ops)
            backend.parallel([partial(apply, i)
                              for i in range(len(self.replicas))])
        for name, weights, *_, t in work:
            self._counts[name] = t
            for x in weights:
                backend.mark_used(x)
        self.num_update = number
        self._skipped = set()
        self.replicas.after_step()

    def clip_global_norm(self, max_norm: float, batch_size: int = 1) -> float:
        """Scale all gradients so that their joint norm is `max_norm` at most.

        Call it between `allreduce_grads` and `update`. Each parameter counts
        once, not once per device. Formula: Gluon's ``clip_global_norm``,
        ``scale = max_norm / (norm + 1e-8)`` where that is below 1.

        Parameters
        ----------
        max_norm : float
        batch_size : int
            The norm is that of the gradients divided by it (what `update`
            will apply). With 1, of the summed gradients as they are.

        Returns
        -------
        float
            The norm before clipping; reading it waits for the gradients.
            If it is not finite nothing is scaled and a FloatingPointError
            is raised.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive; received "
                             f"{max_norm!r}.")
        _check_batch_size(batch_size)
        backend = self.replicas.backend
        gradients = [p.list_grad() for p in self._trained()
                     if p.name not in self._skipped]
        with backend.scope(recording=False):
            squares = [backend.ops.sum(g[0] * g[0]) for g in gradients]
            norm = float(np.sqrt(sum(
                float(backend.to_numpy(s).sum()) for s in squares)))
            norm /= batch_size
            if not np.isfinite(norm):
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
        `Replicas.export_numpy`."""
        backend = self.replicas.backend
        header = {"format": _FORMAT, "optimizer": type(self.optimizer).__name__,
                  "semantics": self.semantics, "num_update": self.num_update,
                  "counts": self._counts,
                  "learning_rate": self.optimizer.learning_rate}
        arrays = {"header": np.array(json.dumps(header))}
        for name, slots in self._states[0].items():
            for slot, value in slots.items():
                arrays[f"{name}|{slot}"] = backend.to_numpy(value) \
                    if backend.is_native(value) else np.array(value)
        folder = os.path.dirname(os.path.abspath(fname))
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, fname)
        except BaseException:
            os.unlink(temporary)
            raise

    def load_states(self, fname: Union[str, "os.PathLike[str]"]) -> None:
        """Read what `save_states` wrote, onto all devices.

        Raises
        ------
        ValueError
            Another optimiser's file, or states that do not fit the
            network's parameters; all differences are listed and nothing has
            changed.
        """
        self._complete()
        try:
            with np.load(fname, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            header = json.loads(str(arrays.pop("header")))
            ours = header.get("format") == _FORMAT
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"{os.fspath(fname)!r} is no readable file of "
                             f"trainer states: {error}.") from error
        own = type(self.optimizer).__name__
        wrong = []
        if not ours:
            wrong.append("unknown format")
        elif (header["optimizer"], header["semantics"]) != (
                own, self.semantics):
            wrong.append(f"states of {header['optimizer']} "
                         f"({header['semantics']}) for {own} "
                         f"({self.semantics})")
        parameters = {p.name: p for p in self._trained()}
        backend = self.replicas.backend
        states: List[Dict[str, Dict[str, Any]]] = [
            {} for _ in self.replicas.devices]
        with backend.scope(recording=False):
            names = {key.split("|")[0] for key in arrays}
            wrong += [f"unknown parameter {name}"
                      for name in sorted(names - set(parameters))]
            for name in header.get("counts", {}) if not wrong else ():
                if name not in parameters:
                    wrong.append(f"unknown parameter {name}")
                    continue
                for state, weight in zip(states,
                                         parameters[name].list_data()):
                    slots = self.optimizer.create_state(weight, backend.ops)
                    for slot, value in slots.items():
                        saved = arrays.get(f"{name}|{slot}")
                        shape = tuple(getattr(value, "shape", ()))
                        if saved is None or saved.shape != shape:
                            wrong.append(f"{name}: {slot} of shape " + str(
                                saved if saved is None else saved.shape)
                                + f" instead of {shape}")
                        elif backend.is_native(value):
                            value[...] = backend.put(saved, value)
                        else:
                            slots[slot] = saved.item()
                    state[name] = slots
        if wrong:
            raise ValueError(f"{os.fspath(fname)!r} does not fit: "
                             + "; ".join(dict.fromkeys(wrong)) + ".")
        self._states = states
        self._counts = {k: int(v) for k, v in header["counts"].items()}
        self.num_update = int(header["num_update"])
        self.optimizer.learning_rate = float(header["learning_rate"])


def _check_batch_size(batch_size: Any) -> None:
    if isinstance(batch_size, bool) or not isinstance(
            batch_size, (int, np.integer)) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number, 1 or more; "
                         f"received {batch_size!r}.")
