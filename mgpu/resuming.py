"""Trainings that Gluon has begun: their files become replicas and a trainer
that go on as MXNet would have."""
import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from mgpu import lr_scheduler as schedules
from mgpu import optimizers
from mgpu.arguments import by_name, integer, is_number, number
from mgpu.backends.base import STATISTICS
from mgpu.conversion import from_gluon
from mgpu.files import FilePath
from mgpu.gluon_io import load_graph, load_trainer_states
from mgpu.gluon_io.graph import (SOFTMAX, Graph, dense_arrays,
                                 fixed_gammas)
from mgpu.gluon_io.order import Order, leaves
from mgpu.gluon_io.states import Record, name_in
from mgpu.gluon_io.states import TrainerStates as GluonStates
from mgpu.optimizers import Optimizer
from mgpu.optimizers.gluon_rules import COMPILED, Adam, RMSProp
from mgpu.parameters import Parameter
from mgpu.replicas import Replicas, initialize
from mgpu.rule_updates import RuleUpdates
from mgpu.trainer import Trainer, check_batch_size
from mgpu.trainer_states import TrainerStates

#: options that mgpu calls by another name than MXNet
_OPTIONS = {("adagrad", "eps"): "float_stable_eps"}
#: whose state stands before the float32 copy of a parameter, not after it
_STATE_FIRST = ("sgd", "nag")
#: whose states in files are read
FAMILIES = ("sgd", "nag", "adam", "adamax", "nadam", "rmsprop", "adagrad",
            "adadelta", "ftrl", "signum")
#: to which MXNet gives a rate even where nobody has, before a schedule's
_OWN_RATE = ("adam", "rmsprop", "adamax", "nadam", "signum")
#: by how much a number is off at most, relative to it, as float32
_ROUNDED = 2.0 ** -24
_EACH_ITS_OWN = ("with kvstore=None each had its own weights, and nothing "
                 "goes on from their mean")


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


class _Given(NamedTuple):
    """The optimiser of the caller, for the files of a Module."""

    optimizer: Optimizer
    by_name: bool
    begin: int | None               # begin_num_update
    scale: float | None             # rescale_grad


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
    scale: float | None                 # of gradients
    module: _Given | None               # None: of a trainer
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
        the whole of it, which it sorts by name, as texts. A trainer that
        was given a list, a part of the network or a dictionary of one's own
        needs the names here, ``[p.name for p in trainer._params]``: running
        statistics too where they were in it. Those that are not in it are
        frozen. Not needed where the shapes decide alone: each is of one
        parameter, or the states of a shape are all the same. Of a Module:
        the names that it trained, or "all".
    optimizer, optimizer_params : optional
        What the Module was given, whose file has no optimiser:
        `optimizer_params` may have ``rescale_grad`` and ``lr_scheduler``.
        An `Optimizer` object needs ``rescale_grad`` there: a Module divides
        by its batch where it makes the optimiser by name, and an object of
        MXNet's by nothing. The counts of a Module's file are those of
        ``begin_num_update`` there, 0 if not given, as in MXNet.
    lr_scheduler : callable, optional
        In the place of the saved one. Needed where that is of a class of the
        user's own.
    lr_mult, wd_mult, grad_req : dict, optional
        By parameter name, Gluon's (``"conv0_weight"``) or `Parameter.name`.
        The graph holds the multipliers that the network had when it was
        first called; what is given here counts instead. Without `grad_req`,
        a parameter that the file has no update of is frozen. One with fewer
        updates than others needs an entry: it may be frozen by now, or not
        any more. States from before the first update say nothing: then a
        constant needs an entry, and of a Gluon trainer a scale of 1 and a
        shift of 0 of a layer; a note says that all others are trained. A
        gamma that batch norm takes as 1 stays frozen; "write" says that
        MXNet updates it, which moves Nadam's schedule. With "add" gradients
        begin at zero: what they were in MXNet is not in the files.
    batch_size : float, optional
        What the last ``step`` was given, to learn the ``rescale_grad`` of
        the trainer: the file has their quotient. Needed where that is not
        one over a whole number, and for a Module with ``rescale_grad``: the
        rows of its batch.
    dtype : {"float32", "float64", "float16"}, optional
        Of the network. A float16 one with ``multi_precision`` goes on from
        its float32 copies, in float32, and another dtype is refused.
    softmax : bool
        Whether a ``SoftmaxOutput`` at the end gives probabilities. False:
        what enters it, for `mgpu.losses.SoftmaxCrossEntropyLoss`, whose
        gradient is that operator's with its default options. With others
        (``normalization``, ``grad_scale``, ...) the graph is refused.
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
        own; operators as for `from_gluon`; an end whose loss has options.
    OSError
        If a file cannot be opened.
    """
    net = from_gluon(symbol, params, dtype, softmax)
    graph, arrays = load_graph(symbol), dense_arrays(params)
    _check_losses(graph)
    given, lr_scheduler = _given(optimizer, optimizer_params, lr_scheduler)
    file = load_trainer_states(states)
    with _naming(states):
        saved = _read(file, graph, arrays, order, given, lr_scheduler,
                      batch_size)
    if saved.copies and dtype is None:
        net = from_gluon(symbol, params, "float32", softmax)
    elif saved.copies and dtype != "float32":
        raise ValueError(
            "a float16 network that was trained with multi_precision has "
            f"its values in float32; received dtype={dtype!r}. Leave "
            "dtype out, and pass autocast='float16' to mgpu.initialize "
            "of the trained network where you want its speed.")
    replicas = initialize(net, devices, init="keep", batch_norm=batch_norm)
    own = {name: key for key, name in replicas.network.gluon_names().items()}
    ours = {p.name: p for p in replicas.params()}
    for name, copy in saved.copies.items():
        ours[own[name]].set_data(copy)
    fixed = _freeze(saved, ours, own, grad_req, fixed_gammas(graph), arrays)
    if lr_scheduler is None and saved.schedule is not None:
        _check_rates(saved, ours, own)
    trainer = Trainer(
        replicas, saved.optimizer, lr_scheduler=saved.schedule,
        lr_mult=_multipliers(saved, graph, own, ours, "lr_mult", lr_mult),
        wd_mult=_multipliers(saved, graph, own, ours, "wd_mult", wd_mult))
    trainer.update_order = tuple(own[name] for name in saved.order
                                 if name in own)
    assert isinstance(trainer.updates, RuleUpdates)
    trainer.updates.fixed = fixed
    trainer.import_states(_states(saved, ours, own, fixed))
    saved.notes.extend(_remarks(trainer, saved.scale))
    return Resumed(replicas, trainer, tuple(saved.notes))


# -- the loss in the graph ----------------------------------------------------

#: the options of a loss that mgpu's have not, as they do nothing; and what
#: does what they do
_LOSS_OPTIONS = {
    "grad_scale": (1.0, "multiply each loss by it"),
    "normalization": ("null", "divide the sum of a device's losses of labels "
                              "by its rows ('batch'; by its labels with "
                              "preserve_shape), or by those of its labels "
                              "that are not ignore_label ('valid')"),
    "use_ignore": (False, "multiply the losses at ignore_label by 0"),
    "smooth_alpha": (0.0, "take as labels rows of alpha / (classes - 1), and "
                          "1 - alpha at the class"),
    "out_grad": (False, "multiply each loss by the gradient that came from "
                        "behind"),
    "preserve_shape": (False, "multiply each loss by the labels in a row")}
_LOSSES = (*SOFTMAX, "LinearRegressionOutput", "MAERegressionOutput",
           "LogisticRegressionOutput")


def _check_losses(graph: Graph) -> None:
    """Refuse an end of the network whose gradient is that of no loss of
    mgpu."""
    for node in graph.nodes:
        if node.op not in _LOSSES:
            continue
        source = graph.nodes[node.inputs[0][0]]
        for key, (plain, instead) in _LOSS_OPTIONS.items():
            value = node.attributes.get(key, plain)
            if value == plain or key == "preserve_shape" \
                    and source.op == "FullyConnected" \
                    and source.attributes["flatten"]:
                continue
            raise NotImplementedError(
                f"a training goes on with the gradient of {node.op} that its "
                f"default options have; received {node.name!r} with "
                f"{key}={value!r}, which the losses of mgpu have not. Take "
                "it out of the -symbol.json, and train with a loss that does "
                f"what it did: {instead}.")


# -- the optimiser ------------------------------------------------------------

def _given(optimizer: Any, params: Mapping[str, Any] | None, schedule: Any
           ) -> tuple[_Given | None, Any]:
    """The optimiser of the caller, and its schedule."""
    options = dict(by_name("optimizer_params", params))
    if optimizer is None:
        if options:
            raise ValueError("optimizer_params go with an optimiser's name; "
                             f"received {sorted(options)} without.")
        return None, schedule
    begin = integer("begin_num_update", options.pop("begin_num_update"), 0) \
        if "begin_num_update" in options else None
    scale = number("rescale_grad", options.pop("rescale_grad")) \
        if "rescale_grad" in options else None
    if options.get("lr_scheduler") is not None and schedule is not None:
        raise ValueError("expected one lr_scheduler; received one as an "
                         "argument and one in optimizer_params. Give one of "
                         "them.")
    schedule = options.pop("lr_scheduler", None) or schedule
    for key in ("multi_precision", "lazy_update"):  # the states show them
        options.pop(key, None)
    named = not isinstance(optimizer, Optimizer)
    if not named and options:
        raise ValueError("optimizer_params go with an optimiser's name; "
                         f"received {sorted(options)} with an Optimizer "
                         "object.")
    name = str(optimizer).lower() if named else optimizer.family
    if name in optimizers.RULES["gluon"].keys() - {*FAMILIES, "adamw"}:
        raise NotImplementedError(_unread(repr(optimizer)))
    if named:
        optimizer = optimizers.create(name, **_limits(name, options))
        if "learning_rate" not in options and name not in _OWN_RATE \
                and hasattr(schedule, "base_lr"):
            optimizer.learning_rate = schedule.base_lr
    return _Given(optimizer, named, begin, scale), schedule


def _limits(family: str, options: dict[str, Any]) -> dict[str, Any]:
    """`options` with the limits as MXNet's kernels read them: 0 and less are
    none."""
    return {key: None if family in COMPILED and key in (
        "clip_gradient", "clip_weights") and is_number(x) and x <= 0 else x
        for key, x in options.items()}


@contextlib.contextmanager
def _naming(states: FilePath) -> Iterator[None]:
    """Errors of Python's, where something in the file is of another kind, as
    one that names it."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            "expected the states of an optimiser of MXNet 1.9.1; "
            f"{os.fspath(states)!r} has others, or is damaged ({why}). Use a "
            "whole file.") from error


def _family(record: Record) -> str:
    name = name_in("optimizer", record).lower()
    if name not in FAMILIES:
        raise NotImplementedError(_unread(record.kind))
    return name


def _unread(received: str) -> str:
    return (f"states are read of {', '.join(FAMILIES)}; received those of "
            f"{received}, which has no counterpart here.")


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
            options[field.name] = state["lr"] if rate is None else rate
            if options[field.name] is None:     # a schedule without a base
                del options[field.name]
        elif key in state:
            options[field.name] = state[key]
        else:
            raise ValueError(
                "the states hold the options of the optimiser; received "
                f"{record.kind} without {key}. Was it of another version of "
                "MXNet? Save it with 1.9.1.")
    try:
        return kind(**_limits(family, options))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the options in the file of states: {error} The "
                         "optimiser cannot go on with it: set it to one of "
                         "these in MXNet, and save the states again."
                         ) from error


# -- its schedule -------------------------------------------------------------

_SCHEDULES = {kind.__name__: kind for kind in (
    schedules.FactorScheduler, schedules.MultiFactorScheduler,
    schedules.PolyScheduler, schedules.CosineScheduler)}
_WARMUP = ("warmup_steps", "warmup_begin_lr", "warmup_mode")
_CURVES = {"FactorScheduler": ("step", "factor", "stop_factor_lr"),
           "MultiFactorScheduler": ("step", "factor"),
           "PolyScheduler": ("max_update", "final_lr"),
           "CosineScheduler": ("max_update", "final_lr")}


def _schedule(record: Any, rate: Any, done: int, asked: bool) -> Any:
    """MXNet's schedule after `done` updates, as a function of their number.
    `rate`: the learning rate that the optimiser was given, or None, which has
    taken the place of the schedule's. `asked`: whether it was asked for the
    rate of an update; `done` may be begin_num_update alone."""
    name = name_in("lr_scheduler", record)
    if name not in _SCHEDULES:
        raise NotImplementedError(
            "the schedules of mgpu.lr_scheduler are "
            f"{', '.join(_SCHEDULES)}; received the states of "
            f"{getattr(record, 'kind', type(record).__name__)}. Pass "
            "lr_scheduler=, a function of the number of the update.")
    state = record.state
    options = {key: state[key] for key in (
        *_CURVES[name], *(_WARMUP if "warmup_final_lr" in state else ()))}
    if "power" in state:
        options["pwr"] = state["power"]
    began = state.get("warmup_final_lr", state["base_lr"]
                      if rate is None else rate)
    own = _SCHEDULES[name](base_lr=state.get("base_lr_orig", began),
                           **options)
    own.warmup_final_lr = began
    start = began if rate is None else rate
    if not asked and state["base_lr"] == start:
        own.base_lr = expected = start
    elif not isinstance(own, (schedules.PolyScheduler,
                            schedules.CosineScheduler)):
        own.base_lr = start
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
          order: str | Sequence[str] | None, given: _Given | None,
          schedule: Any, batch_size: float | None) -> _Saved:
    record = file.optimizer
    if (record is None) == (given is None):
        raise ValueError(
            "the file has an optimiser; received another one besides. Leave "
            "optimizer= out." if record is not None else
            "Module.save_optimizer_states keeps no options; received a file "
            "without an optimiser. Pass optimizer= and optimizer_params= as "
            "the Module was given them, with begin_num_update, the updates "
            "so far.")
    shapes = {name: x.shape for name, x in arrays.items()}
    product, notes = 1.0, list[str]()
    if record is None:
        assert given is not None
        rule, begin = given.optimizer, given.begin or 0
        number, counts = begin, dict.fromkeys(file.states, begin)
        orders = Order(file, counts, graph, shapes)
        keys = orders.of_module(order)
        scale = given.scale
        if scale is not None:
            if batch_size is None:
                raise ValueError(
                    "a Module divides by its batch where it has no "
                    f"rescale_grad; received rescale_grad={scale!r} in "
                    "optimizer_params. Pass batch_size=, the rows of its "
                    "batch, too.")
            notes.append(_divisor(scale, batch_size))
        else:
            if batch_size is not None:
                scale = 1 / check_batch_size(batch_size)
            notes.append(
                "rescale_grad is one over the rows of a batch, as Module "
                "gives it to an optimiser by name; if it had an object, pass "
                "that object's in optimizer_params (MXNet's own is 1.0), and "
                "batch_size=, the rows")
        if len(file.states) > len(keys):
            notes.append(f"it was trained on {len(file.states) // len(keys)} "
                         f"devices, whose states are the same ({_EACH_ITS_OWN}"
                         ")")
        if given.begin is None:
            notes.append(
                "the counts of updates begin at 0, as where MXNet loads such "
                "states: pass the updates so far as begin_num_update in "
                "optimizer_params where a schedule or a correction of Adam's "
                "goes on")
    else:
        state = record.state
        begin, number = state["begin_num_update"], state["num_update"]
        family, counts = _family(record), _counts(record, notes)
        if counts.keys() != file.states.keys() or not all(
                begin < t <= number for t in counts.values()):
            raise ValueError(
                "each state has a count, of num_update at most; received "
                f"{len(file.states)} states with the counts "
                f"{sorted({*counts.values()})}, begin_num_update {begin} and "
                f"num_update {number}. Use a whole file.")
        if schedule is None and state["lr_scheduler"] is not None:
            # MXNet's Ftrl keeps a rate for itself, and its AdaDelta asks for
            # none.
            schedule = _schedule(state["lr_scheduler"], None
                                 if family == "ftrl" else state["lr"], number,
                                 bool(counts) and family != "adadelta")
        rule = _optimizer(record, schedule)
        product = state.get("m_schedule", product)
        orders = Order(file, counts, graph, shapes, family == "nadam")
        keys = orders.of_trainer(order)
        scale = state["rescale_grad"]
        if counts:
            notes.append(_divisor(scale, batch_size))
        elif scale != 1:
            notes.append(
                f"its trainer multiplies gradients by {scale:.10g} (its "
                "rescale_grad), which mgpu's does not: multiply each loss by "
                f"{scale:.10g} (not where that undid a loss scale)")
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
    return _Saved(rule, schedule, number, begin, {
        name: counts[key] for name, key in keys.items()}, slots, copies,
        tuple(orders.updates), float(product), scale, given, notes)


def _divisor(scale: float, batch_size: float | None) -> str:
    """What is known of the factor of gradients; Gluon's step sets it to the
    trainer's own one over the batch size."""
    rows = 1 / scale if scale else 0.0
    if batch_size is not None:
        own = scale * check_batch_size(batch_size)
        return (f"the last step divided the sum of the gradients by "
                f"{batch_size:g}" + ("" if abs(own - 1) < 1e-9 else
                f" and multiplied it by {own:g}, a rescale_grad that mgpu's "
                f"trainer has not: multiply each loss by {own:g} (not where "
                "it undid a loss scale)"))
    if rows < 1 or abs(rows - round(rows)) > 1e-9 * rows:
        raise ValueError(
            "a step divides the sum of the gradients by the rows of a "
            f"batch; received a last one that multiplied it by {scale!r}, "
            "which has a rescale_grad in it. Pass batch_size=, the rows of "
            "that step.")
    return (f"the last step divided the sum of the gradients by {rows:.10g}. "
            "If that is not the batch size of that time, there was a "
            "rescale_grad besides: pass batch_size=")


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
                     f"is that of the first ({_EACH_ITS_OWN})")
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
    if len(found) == 1 and not names and rule.family in _STATE_FIRST:
        found = ()      # a velocity that counts 0: the momentum was set to it
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
        elif what == "wd_mult" and saved.module \
                and not node.name.endswith(("_weight", "_gamma")):
            found[key] = 0.0
    given = _by_own_name(what, given, own)
    others = {key: x for key, x in found.items() if x != 1}
    if saved.module:        # which may have been given an object
        changed = sorted(key for key, x in given.items()
                         if x != found.get(key, x))
        if saved.module.scale is None and (
                changed or not saved.module.by_name):
            raise ValueError(
                "Module gives rescale_grad, one over the rows of its batch, "
                "to an optimiser that it makes by name, and none to an object "
                "of MXNet's; received "
                + (f"another {what} than by name for {', '.join(changed)}"
                   if saved.module.by_name else "an Optimizer")
                + " and no rescale_grad. Pass rescale_grad in "
                "optimizer_params, that of the object (MXNet's own is 1.0) or "
                "one over the rows, and batch_size=, the rows.")
        others = {key: x for key, x in others.items() if key not in given
                  and (what == "lr_mult" or saved.optimizer.wd)}
        if others and not saved.module.by_name:
            raise ValueError(
                f"Module gives {what} to an optimiser that it makes by name, "
                "and none to an object of MXNet's; received an Optimizer and "
                f"no {what} for {', '.join(others)}. Pass the optimiser by "
                f"name, or {what}= with an entry for each: 1 if the Module "
                f"had an object, else {others}.")
    if others:
        where = (f"as Module gives it to an optimiser by name; if it had an "
                 f"object, pass {what}= with 1 for each, and its rescale_grad"
                 if saved.module else "as in the graph")
        each = ", ".join(f"{key}: {x:g}" for key, x in others.items())
        saved.notes.append(f"{what} {where}: {each}")
    return found | given


def _freeze(saved: _Saved, known: Mapping[str, Parameter],
            own: Mapping[str, str], given: Mapping[str, str] | None,
            gammas: set[str], arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Train what MXNet trains. Returns those of `gammas`, which batch norm
    takes as 1, that it updates to no effect, where Nadam moves at them."""
    requests = {key: x for key, x in _by_own_name(
        "grad_req", given, own).items() if key in known
        or x != "null" or key not in own.values()}      # a running statistic
    strange = sorted(requests.keys() - known.keys())
    if strange:
        raise ValueError(f"grad_req names parameters; received {strange}. "
                         f"There are {sorted(known)}.")
    names = {key: name for name, key in own.items()}
    # What the trainer was not given it does not move, whatever its grad_req.
    outside = {key for key in known if names[key] not in saved.order}
    requests = {key: x for key, x in requests.items() if key not in outside}
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
    nadam, fixed = saved.optimizer.family == "nadam", []
    _check_said(saved, {names[key]: p for key, p in known.items()
                        if key not in requests}, gammas, arrays)
    for key, p in known.items():
        if names[key] in gammas:
            request = requests.get(key, "write" if names[key] in saved.slots
                                   or saved.module and not saved.slots
                                   else "null")
            if nadam and request != "null" and key not in outside:
                fixed.append(key)
        elif key in requests:
            p.grad_req = requests[key]
        elif names[key] in saved.slots and p.grad_req == "null":
            p.grad_req = "write"    # a constant that MXNet has trained
        elif names[key] not in (saved.slots or saved.order) \
                and p.grad_req != "null":
            p.grad_req = "null"
            frozen.append(key)
    added = [key for key, p in known.items() if p.grad_req == "add"]
    if added:
        saved.notes.append(
            "their gradients (grad_req 'add') begin at zero; what MXNet's "
            f"held is not in the files: {', '.join(added)}")
    if frozen:
        saved.notes.append(
            ("the file has no update of them" if saved.slots else
             "order= has not named them")
            + f", so they are frozen: {', '.join(frozen)}")
    return fixed


#: what a layer's scale and shift begin with, and stay at without one
_BEGIN = {"gamma": 1.0, "beta": 0.0}


def _check_said(saved: _Saved, known: Mapping[str, Parameter],
                gammas: set[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse states without any update where it depends on the class of a
    block what MXNet trains; a note says that the user may have frozen more.
    `known`: what the caller has said nothing of."""
    if saved.slots:
        return
    unsaid, nadam = [], saved.optimizer.family == "nadam"
    for name, p in known.items():
        if name not in saved.order:
            continue
        if name in gammas:
            doubt = nadam and not saved.module
        else:
            doubt = p.grad_req == "null" or not saved.module \
                and p.kind in _BEGIN \
                and bool((arrays[name] == _BEGIN[p.kind]).all())
        if doubt:
            unsaid.append(name)
    if unsaid:
        raise ValueError(
            "the states of parameters show which of them MXNet updates; "
            f"received no state of {', '.join(map(repr, unsaid[:5]))}"
            f"{', ...' * (len(unsaid) > 5)}, nor of any other: they were "
            "saved before the first update. A Gluon layer does not update a "
            "constant, nor a scale of 1 or a shift of 0 where it has "
            "scale=False or center=False; a SymbolBlock updates all, and a "
            "Module all but fixed_param_names. (Nadam's schedule moves at a "
            "gamma, too, that batch norm takes as 1.) Pass grad_req= with an "
            "entry for each: 'null' or 'write', as {p.name: p.grad_req for p "
            "in net.collect_params().values()} has them in MXNet.")
    if any(p.grad_req != "null" and name in saved.order
           for name, p in known.items()):
        saved.notes.append(
            "the states were saved before the first update, so they do not "
            "say what is frozen, and what grad_req= does not name is "
            "trained: pass it where MXNet had frozen some of the network")


def _check_rates(saved: _Saved, known: Mapping[str, Parameter],
                 own: Mapping[str, str]) -> None:
    """MXNet asks the schedule at each parameter, with the largest count so
    far: those with fewer updates get the rate of the update before where
    none with more stands before them."""
    counts = [(name, saved.counts.get(name, saved.begin))
              for name in saved.order if own.get(name) in known
              and known[own[name]].grad_req != "null"]
    if counts and counts[0][1] < max(t for _, t in counts):
        first, count = counts[0]
        raise ValueError(
            "a schedule gives every parameter the rate of one update; "
            f"received {first}, the first that MXNet updates, with fewer "
            f"updates ({count}) than others, to which MXNet would give the "
            "rate of the update before. Pass "
            "lr_scheduler=, whose rates count for all.")


def _states(saved: _Saved, known: Mapping[str, Parameter],
            own: Mapping[str, str], fixed: Sequence[str]) -> TrainerStates:
    """In mgpu's format."""
    counts, slots = {}, {}
    for name, key in own.items():
        if key not in known or not (name in saved.counts or saved.begin
                                    or key in fixed):
            continue
        counts[key] = saved.counts.get(name, saved.begin)
        zeros = np.zeros(known[key].shape or ())
        for slot in saved.optimizer.slots():
            slots[key, slot] = saved.slots.get(name, {}).get(slot, zeros)
        if saved.optimizer.family == "nadam":
            slots[key, "schedule"] = np.array(saved.product)
    return TrainerStates(type(saved.optimizer).__name__, saved.num_update,
                         saved.optimizer.learning_rate, counts, slots)


def _remarks(trainer: Trainer, scale: float | None) -> Iterator[str]:
    """What is true of every file. `scale`: of the gradients of a step."""
    replicas, rule = trainer.replicas, trainer.optimizer
    moving = [p.name for p in replicas.buffers() if p.kind in STATISTICS]
    if moving:
        yield (f"the {len(moving)} running statistics are those of the file "
               "on every device; export writes the mean over the devices "
               "that it trained on")
    requests = replicas.grad_reqs()
    still = sorted({name.rpartition(".")[0] for name in moving} - {
        name.rpartition(".")[0] for name, request in requests.items()
        if request != "null"})
    if still and len(still) < len(requests):
        yield ("running statistics move in each training pass in PyTorch, in "
               "MXNet where a gradient passes through the layer; scale and "
               f"shift are frozen in {', '.join(still[:5])}"
               f"{', ...' * (len(still) > 5)}: where all layers before one "
               "are frozen too, set its track_running_stats = False")
    if rule.family not in COMPILED or all(
            p.dtype != "float64" for p in replicas.params()):
        return
    factors = {trainer.multipliers(p) for p in replicas.params()
               if p.grad_req != "null"}
    options = {field.name: {getattr(rule, field.name)}
               for field in fields(rule)}
    options["wd"] = {rule.wd * wd for _, wd in factors}
    options["learning_rate"] = {rule.learning_rate * lr for lr, _ in factors}
    options["rescale_grad"] = {scale}
    off: dict[str, float] = {}
    # What changes from step to step has the bound of them all.
    if isinstance(rule, Adam):
        del options["learning_rate"]
        off["the corrected rate of an update"] = _ROUNDED
    elif trainer.lr_scheduler is not None:
        del options["learning_rate"]
        off["a rate of the schedule"] = _ROUNDED
    if scale is None:
        off["1 / the rows of a batch, where they are no power of two,"] = \
            _ROUNDED
    for name, numbers in options.items():
        error, x = max(((_rounding(x), x) for x in numbers
                        if isinstance(x, float)), default=(0.0, 0.0))
        if error:
            off[f"{name}={x!r}"] = error
            if isinstance(rule, (Adam, RMSProp)) and x != 1 \
                    and name in ("beta1", "beta2", "gamma1"):
                off[f"1 - {name}"] = error * x / abs(1 - x)     # new shares
    each = [f"{name} by up to {x:.1e}" if x == _ROUNDED else
            f"{name} by {x:.1e}" for name, x in off.items()]
    if each:
        yield ("MXNet reads options as float32, here they are double; "
               f"relative difference: {', '.join(each)}. So each part "
               "of a step (gradient, momentum, decay) differs by up to about "
               f"{sum(off.values()):.1e} of itself")


def _rounding(x: float) -> float:
    """By how much `x` is off as float32, relative to it."""
    if not x or not math.isfinite(x):
        return 0.0
    with np.errstate(over="ignore"):
        return abs(float(np.float32(x)) - x) / abs(x)
