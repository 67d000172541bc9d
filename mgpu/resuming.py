"""Trainings that Gluon has begun: their files become replicas and a trainer
that go on as MXNet would have."""
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from mgpu import lr_scheduler as schedules
from mgpu import optimizers
from mgpu.arguments import by_name
from mgpu.backends.base import STATISTICS
from mgpu.conversion import from_gluon
from mgpu.files import FilePath
from mgpu.gluon_io import load_graph, load_trainer_states
from mgpu.gluon_io.graph import Graph, dense_arrays
from mgpu.gluon_io.order import Order, leaves
from mgpu.gluon_io.states import Record, name_in
from mgpu.gluon_io.states import TrainerStates as GluonStates
from mgpu.optimizers import Optimizer
from mgpu.optimizers.gluon_rules import COMPILED, Adam
from mgpu.parameters import Parameter
from mgpu.replicas import Replicas, initialize
from mgpu.trainer import Trainer, check_batch_size
from mgpu.trainer_states import TrainerStates

#: options that mgpu calls by another name than MXNet
_OPTIONS = {("adagrad", "eps"): "float_stable_eps"}
#: whose state stands before the float32 copy of a parameter, not after it
_STATE_FIRST = ("sgd", "nag")


class Resumed(NamedTuple):
    """A training that goes on.

    Attributes
    ----------
    replicas : Replicas
    trainer : Trainer
    notes : tuple of str
        What is as the files do not say, or say only in part: whose running
        statistics these are, what is frozen and why, by how much MXNet's
        float32 options differ.
    """

    replicas: Replicas
    trainer: Trainer
    notes: tuple[str, ...]


class _Saved(NamedTuple):
    """What is in the files, in the names of the graph."""

    optimizer: Optimizer
    schedule: Any
    num_update: int
    begin: int                          # the count of what has none
    counts: dict[str, int]
    slots: dict[str, dict[str, np.ndarray]]
    copies: dict[str, np.ndarray]       # in float32, of float16 parameters
    order: tuple[str, ...]              # in which MXNet updates
    product: float                      # nadam's
    of_module: bool                     # not of a trainer
    notes: list[str]


def resume_from_gluon(symbol: FilePath, params: FilePath, states: FilePath,
                      devices: Any, *,
                      order: str | Sequence[str] | None = None,
                      optimizer: str | Optimizer | None = None,
                      optimizer_params: Mapping[str, Any] | None = None,
                      lr_scheduler: Any = None,
                      lr_mult: Mapping[str, float] | None = None,
                      wd_mult: Mapping[str, float] | None = None,
                      grad_req: Mapping[str, str] | None = None,
                      batch_size: float | None = None,
                      dtype: str | None = None, softmax: bool = False,
                      batch_norm: str = "per_device") -> Resumed:
    """Go on with a training of Gluon's, or of MXNet's Module, on the engine
    in use.

    The next steps are those that MXNet would have done: its optimiser with
    the saved state, counts, rate and schedule. The files do not hold all of
    a training. `Resumed.notes` says what was concluded.

    Parameters
    ----------
    symbol, params : str or os.PathLike
        What ``HybridBlock.export`` or ``Module.save_checkpoint`` wrote.
    states : str or os.PathLike
        What ``Trainer.save_states`` or ``Module.save_optimizer_states``
        wrote at the same time.
    devices : sequence of distinct devices
    order : "sorted" or sequence of str, optional
        The file of states numbers the parameters of the trainer and has no
        names. "sorted": the trainer was given ``net.collect_params()``,
        which sorts them by name, as texts. A trainer that was given a list,
        or a part of the network, needs that list here: all names, running
        statistics too where they were in it. Those that are not in it are
        frozen. By default "sorted" is concluded where the shapes of the
        states allow nothing else. Of a Module: the names that it trained.
    optimizer, optimizer_params : optional
        As for `Trainer`, where the file has no optimiser (a Module's). The
        counts of a Module's file are those of ``begin_num_update`` in
        `optimizer_params`, 0 if not given, as in MXNet.
    lr_scheduler : callable, optional
        In the place of the saved one. Needed where that is of a class of the
        user's own.
    lr_mult, wd_mult, grad_req : dict, optional
        By parameter name, Gluon's (``"conv0_weight"``) or `Parameter.name`.
        The graph holds the multipliers that the network had when it was
        first called; what is given here counts instead. Without `grad_req`,
        a parameter that the file has no update of is frozen. One with fewer
        updates than others needs an entry: it may be frozen by now, or not
        any more.
    batch_size : float, optional
        What the last ``step`` was given, to learn the ``rescale_grad`` of
        the trainer: the file has their quotient. Needed where that is not
        one over a whole number.
    dtype : {"float32", "float64", "float16"}, optional
        Of the network. A float16 one with ``multi_precision`` goes on from
        its float32 copies, in float32, and another dtype is refused.
    softmax : bool
        Whether a ``SoftmaxOutput`` at the end gives probabilities. False:
        what enters it, for `mgpu.losses.SoftmaxCrossEntropyLoss`, whose
        gradient is that operator's.
    batch_norm : {"per_device", "average", "sync"}
        See `initialize`.

    Returns
    -------
    Resumed
        ``replicas, trainer, notes``.

    Raises
    ------
    ValueError
        If the files do not fit each other, or the order of the parameters
        is not certain; a count or a rate that MXNet cannot have written.
    NotImplementedError
        An optimiser that `mgpu.optimizers` has not; a schedule of the user's
        own; operators as for `from_gluon`.
    OSError
        If a file cannot be opened.
    """
    graph, arrays = load_graph(symbol), dense_arrays(params)
    saved = _read(load_trainer_states(states), graph, arrays, order,
                  _given(optimizer, optimizer_params), lr_scheduler,
                  batch_size)
    if saved.copies:
        if dtype not in (None, "float32"):
            raise ValueError(
                "a float16 network that was trained with multi_precision has "
                f"its values in float32; received dtype={dtype!r}. Leave "
                "dtype out, and pass autocast='float16' to mgpu.initialize "
                "of the trained network where you want its speed.")
        dtype = "float32"
    net = from_gluon(symbol, params, dtype, softmax)
    replicas = initialize(net, devices, init="keep", batch_norm=batch_norm)
    own = {name: key for key, name in replicas.network.gluon_names().items()}
    ours = {p.name: p for p in replicas.params()}
    for name, copy in saved.copies.items():
        ours[own[name]].set_data(copy)
    _freeze(saved, ours, own, grad_req)
    if lr_scheduler is None and saved.schedule is not None:
        _check_rates(saved, ours, own)
    trainer = Trainer(
        replicas, saved.optimizer, lr_scheduler=saved.schedule,
        lr_mult=_multipliers(saved, graph, own, ours, "lr_mult", lr_mult),
        wd_mult=_multipliers(saved, graph, own, ours, "wd_mult", wd_mult))
    trainer.update_order = tuple(own[name] for name in saved.order)
    trainer.import_states(_states(saved, ours, own))
    saved.notes.extend(_remarks(trainer))
    return Resumed(replicas, trainer, tuple(saved.notes))


# -- the optimiser ------------------------------------------------------------

def _given(optimizer: Any, params: Mapping[str, Any] | None
           ) -> tuple[Optimizer, int] | None:
    """The optimiser of the caller, and its begin_num_update."""
    options = dict(by_name("optimizer_params", params))
    begin = options.pop("begin_num_update", 0)
    if optimizer is None:
        if params:
            raise ValueError("optimizer_params go with an optimiser's name; "
                             f"received {sorted(params)} without.")
        return None
    if isinstance(optimizer, Optimizer):
        return optimizer, begin
    return optimizers.create(optimizer, **options), begin


def _family(record: Record) -> str:
    name = name_in("optimizer", record).lower()
    if name not in optimizers.RULES["gluon"]:
        raise NotImplementedError(
            "mgpu.optimizers has "
            f"{', '.join(optimizers.RULES['gluon'])}; received the states of "
            f"{record.kind}, which has no counterpart here.")
    return name


def _optimizer(record: Record, schedule: Any) -> Optimizer:
    """MXNet's optimiser, with its options as they were; `schedule` has the
    rate where there is one."""
    family, state = _family(record), record.state
    kind = optimizers.RULES["gluon"][family]
    options = {}
    for field in fields(kind):
        key = _OPTIONS.get((family, field.name), field.name)
        if field.name == "learning_rate":
            rate = getattr(schedule, "base_lr", None)
            options[field.name] = state.get("lr") if rate is None else rate
            if options[field.name] is None:     # a schedule without a base
                del options[field.name]
        elif key in state:
            options[field.name] = state[key]
        else:
            raise ValueError(
                "the states hold the options of the optimiser; received "
                f"{record.kind} without {key}. Was it of another version of "
                "MXNet? Save it with 1.9.1.")
    return kind(**options)


# -- its schedule -------------------------------------------------------------

_SCHEDULES = {kind.__name__: kind for kind in (
    schedules.FactorScheduler, schedules.MultiFactorScheduler,
    schedules.PolyScheduler, schedules.CosineScheduler)}
_WARMUP = ("warmup_steps", "warmup_begin_lr", "warmup_mode")
_CURVES = {"FactorScheduler": ("step", "factor", "stop_factor_lr"),
           "MultiFactorScheduler": ("step", "factor"),
           "PolyScheduler": ("max_update", "final_lr"),
           "CosineScheduler": ("max_update", "final_lr")}


def _schedule(record: Any, rate: Any, done: int) -> Any:
    """MXNet's schedule after `done` updates, as a function of their number.
    `rate`: the learning rate that the optimiser was given, or None, which has
    taken the place of the schedule's."""
    name = name_in("lr_scheduler", record)
    if name not in _SCHEDULES:
        raise NotImplementedError(
            "the schedules of mgpu.lr_scheduler are "
            f"{', '.join(_SCHEDULES)}; received the states of "
            f"{getattr(record, 'kind', type(record).__name__)}. Pass "
            "lr_scheduler=, a function of the number of the update.")
    state = record.state
    options = {key: state[key] for key in (*_CURVES[name], *_WARMUP)
               if key in state}
    if "power" in state:
        options["pwr"] = state["power"]
    began = state.get("warmup_final_lr", state["base_lr"]
                      if rate is None else rate)
    own = _SCHEDULES[name](base_lr=state.get("base_lr_orig", began),
                           **options)
    own.warmup_final_lr = began
    if not isinstance(own, (schedules.PolyScheduler,
                            schedules.CosineScheduler)):
        own.base_lr = began if rate is None else rate
        expected = own.base_lr if done < own.warmup_steps \
            else own.after_warmup(done)
    elif done > own.max_update:     # the last value stays
        expected = own.after_warmup(done)
    else:
        own.base_lr = expected = state["base_lr"]       # which is not read
    if expected != state["base_lr"]:
        raise ValueError(
            f"after {done} updates this {name} is at {expected!r}; received "
            f"one at {state['base_lr']!r}, which was changed by hand. Pass "
            "lr_scheduler=, with the rates that are to come.")
    return own


# -- what is in the files -----------------------------------------------------

def _read(file: GluonStates, graph: Graph, arrays: Mapping[str, np.ndarray],
          order: str | Sequence[str] | None,
          given: tuple[Optimizer, int] | None, schedule: Any,
          batch_size: float | None) -> _Saved:
    record = file.optimizer
    if (record is None) == (given is None):
        raise ValueError(
            "the file has an optimiser; received another one besides. Leave "
            "optimizer= out." if record is not None else
            "Module.save_optimizer_states keeps no options; received a file "
            "without an optimiser. Pass optimizer= and optimizer_params= as "
            "they were, with begin_num_update.")
    shapes = {name: x.shape for name, x in arrays.items()}
    product, notes = 1.0, list[str]()
    if record is None:
        assert given is not None
        rule, begin = given
        number, counts = begin, dict.fromkeys(file.states, begin)
        keys = Order(file, counts, graph, shapes).of_module(
            order)
        if schedule is not None and hasattr(schedule, "base_lr"):
            rule.learning_rate = schedule.base_lr
    else:
        state = record.state
        begin, number = state.get("begin_num_update", 0), state["num_update"]
        _family(record)
        counts = _counts(record, notes)
        if counts.keys() != file.states.keys() or not all(
                begin < t <= number for t in counts.values()):
            raise ValueError(
                "each state has a count, of num_update at most; received "
                f"{len(file.states)} states with the counts "
                f"{sorted({*counts.values()})}, begin_num_update {begin} and "
                f"num_update {number}. Use a whole file.")
        if schedule is None and state.get("lr_scheduler") is not None:
            schedule = _schedule(state["lr_scheduler"], state.get("lr"),
                                 number)
        rule = _optimizer(record, schedule)
        product = state.get("m_schedule", product)
        keys = Order(file, counts, graph, shapes).of_trainer(order)
        notes.append(_divisor(state.get("rescale_grad", 1.0), batch_size))
    slots, copies = {}, {}
    for name, key in keys.items():
        found, copy = _parted(rule, file.states[key], arrays[name], name)
        slots[name] = found
        if copy is not None:
            copies[name] = copy
    if copies:
        notes.append(f"{len(copies)} parameters are the float32 copies that "
                     "multi_precision keeps of float16 ones; the network is "
                     "float32")
    ordered = sorted(keys, key=keys.__getitem__) if record else list(keys)
    return _Saved(rule, schedule, number, begin, {
        name: counts[key] for name, key in keys.items()}, slots, copies,
        tuple(ordered), float(product), record is None, notes)


def _divisor(scale: float, batch_size: float | None) -> str:
    """What is known of the factor of gradients; Gluon's step sets it to the
    trainer's own one over the batch size."""
    rows = 1 / scale if scale else 0.0
    if batch_size is not None:
        own = scale * check_batch_size(batch_size)
        return (f"the last step divided the sum of the gradients by "
                f"{batch_size:g}" + ("" if abs(own - 1) < 1e-9 else
                f" and multiplied it by {own:g}, the trainer's rescale_grad, "
                f"which mgpu's has not: multiply each loss by {own:g} (not "
                "where it undid a loss scale)"))
    if rows < 1 or abs(rows - round(rows)) > 1e-9 * rows:
        raise ValueError(
            "Gluon's step divides the sum of the gradients by the rows of a "
            f"batch; received states whose last step multiplied it by "
            f"{scale!r}, so the trainer had a rescale_grad of its own. Pass "
            "batch_size=, what that step was given.")
    return (f"the last step divided the sum of the gradients by {rows:.10g}. "
            "If that is not the batch size of that time, the trainer had a "
            "rescale_grad of its own: pass batch_size=")


def _counts(record: Record, notes: list[str]) -> dict[Any, int]:
    """Of all devices, which have the same ones."""
    state, counts = record.state, dict[Any, int]()
    devices = [x for x in state.get("_all_index_update_counts", {
        0: state.get("_index_update_count", {})}).values() if x]
    for one in devices:
        for key, t in one.items():
            if counts.setdefault(key, t) != t:
                raise ValueError(
                    "every device has updated a parameter as often as the "
                    f"others; received {counts[key]} and {t} updates of "
                    f"number {key}, as a trainer writes that was loaded on "
                    "more devices than it was saved on.")
    if len(devices) > 1:
        if _family(record) == "nadam":
            raise ValueError(
                "Nadam's schedule of momentum moves once in an update of a "
                f"parameter; received the states of {len(devices)} devices "
                "that share one and moved it in turn, so their weights "
                "differ. Train on one device, or on the key-value store.")
        notes.append(f"it was trained on {len(devices)} devices; the state "
                     "is that of the first")
    return counts


def _parted(rule: Optimizer, state: Any, weight: np.ndarray, name: str
            ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """The slots of a state, and the float32 copy of a float16 weight."""
    copy = None
    if weight.dtype == np.float16 and isinstance(state, tuple) \
            and len(state) == 2:
        state_first = rule.family in _STATE_FIRST
        at = int(state_first)
        if isinstance(state[at], np.ndarray) \
                and state[at].dtype == np.float32:
            copy, state = state[at], state[1 - at]
            if not np.allclose(copy, weight, 2 ** -10, 2 ** -23):
                raise ValueError(
                    "a float16 parameter is its float32 copy, rounded; "
                    f"received {name!r} with another one in the states. Use "
                    "files of one moment.")
    found, names = tuple(leaves(state)), rule.slots()
    if len(found) != len(names):
        raise ValueError(
            f"{rule!r} keeps {', '.join(names) or 'nothing'} of a parameter; "
            f"received {len(found)} arrays for {name!r}.")
    if rule.family == "signum":     # MXNet's runs downhill
        found = tuple(-x for x in found)
    return dict(zip(names, found)), copy


# -- onto the engine ----------------------------------------------------------

def _by_own_name(what: str, given: Any, own: Mapping[str, str]
                 ) -> dict[str, Any]:
    """Keys are Gluon's names, or mgpu's."""
    return {own.get(name, name): value
            for name, value in by_name(what, given).items()}


def _multipliers(saved: _Saved, graph: Graph, own: Mapping[str, str],
                 known: Mapping[str, Parameter], what: str,
                 given: Mapping[str, float] | None) -> dict[str, float]:
    """Those of the graph, where `given` has no others."""
    found = {}
    for node in graph.nodes:
        key = own.get(node.name, "")
        if node.op != "null" or key not in known:
            continue
        if f"__{what}__" in node.marks:
            found[key] = float(node.marks[f"__{what}__"])
        elif what == "wd_mult" and saved.of_module \
                and not node.name.endswith(("_weight", "_gamma")):
            found[key] = 0.0
    others = [f"{key}: {x:g}" for key, x in found.items() if x != 1]
    if others:
        saved.notes.append(f"{what} as in the graph: {', '.join(others)}")
    return found | _by_own_name(what, given, own)


def _freeze(saved: _Saved, known: Mapping[str, Parameter],
            own: Mapping[str, str], given: Mapping[str, str] | None) -> None:
    requests = _by_own_name("grad_req", given, own)
    strange = sorted(requests.keys() - known.keys())
    if strange:
        raise ValueError(f"grad_req names parameters; received {strange}. "
                         f"There are {sorted(known)}.")
    names = {key: name for name, key in own.items()}
    frozen = []
    latest = max(saved.counts.values(), default=0)
    behind = {name: t for name, t in saved.counts.items()
              if t < latest and own[name] not in requests}
    if behind:
        some = ", ".join(f"{name} ({t})" for name, t in
                         list(behind.items())[:5])
        raise ValueError(
            "a parameter that is trained has as many updates as the others, "
            f"{latest}; received {len(behind)} with fewer: {some}. They were "
            "frozen half way, or trained from there on, which the files do "
            "not say. Pass grad_req= with an entry for each: 'null' or "
            "'write'.")
    for key, p in known.items():
        if key in requests:
            p.grad_req = requests[key]
        elif saved.slots and names[key] not in saved.slots \
                and p.grad_req != "null":
            p.grad_req = "null"
            frozen.append(key)
    if frozen:
        saved.notes.append("the file has no update of them, so they are "
                           f"frozen: {', '.join(frozen)}")


def _check_rates(saved: _Saved, known: Mapping[str, Parameter],
                 own: Mapping[str, str]) -> None:
    """MXNet asks the schedule at each parameter, with the largest count so
    far: those with fewer updates get the rate of the update before where
    none with more stands before them."""
    trained = [name for name in saved.order
               if known[own[name]].grad_req != "null"]
    if trained and saved.counts[trained[0]] < max(saved.counts.values()):
        raise ValueError(
            "a schedule gives every parameter the rate of one update; "
            f"received {trained[0]}, the first that MXNet updates, with "
            f"fewer updates ({saved.counts[trained[0]]}) than others, to "
            "which MXNet would give the rate of the update before. Pass "
            "lr_scheduler=, whose rates count for all.")


def _states(saved: _Saved, known: Mapping[str, Parameter],
            own: Mapping[str, str]) -> TrainerStates:
    """In mgpu's format."""
    counts, slots = {}, {}
    for name, key in own.items():
        if key not in known or not (name in saved.counts or saved.begin):
            continue
        counts[key] = saved.counts.get(name, saved.begin)
        zeros = np.zeros(known[key].shape or ())
        for slot in saved.optimizer.slots():
            slots[key, slot] = saved.slots.get(name, {}).get(slot, zeros)
        if saved.optimizer.family == "nadam":
            slots[key, "schedule"] = np.array(saved.product)
    return TrainerStates(type(saved.optimizer).__name__, saved.num_update,
                         saved.optimizer.learning_rate, counts, slots)


def _remarks(trainer: Trainer) -> Iterator[str]:
    """What is true of every file."""
    replicas, rule = trainer.replicas, trainer.optimizer
    moving = [p.name for p in replicas.buffers() if p.kind in STATISTICS]
    if moving:
        yield (f"the {len(moving)} running statistics are those of the file "
               "on every device; export writes the mean over the devices "
               "that it trained on")
    if rule.family in COMPILED and any(
            p.dtype == "float64" for p in replicas.params()):
        options = {field.name: getattr(rule, field.name)
                   for field in fields(rule)}
        options["learning_rate"] = trainer.rate(trainer.num_update + 1)
        if isinstance(rule, Adam):
            t = trainer.num_update + 1
            options[f"the corrected rate of update {t}"] = \
                options["learning_rate"] * math.sqrt(1 - rule.beta2 ** t) / (
                    1 - rule.beta1 ** t)
        off = [f"{name}={x!r} by {abs(np.float32(x) / x - 1):.1e}"
               for name, x in options.items()
               if isinstance(x, float) and x and np.float32(x) != x]
        if off:
            yield ("MXNet reads options as float32, here they are double; "
                   f"relative difference: {', '.join(off)}")
