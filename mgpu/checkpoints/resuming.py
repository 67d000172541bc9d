"""Resume trainings of Gluon: read their files into replicas and a trainer
that continue as MXNet would."""
import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from mgpu import optimizers
from mgpu.backends.network import STATISTICS
from mgpu.checkpoints.trainer_states import TrainerStates
from mgpu.compat.conversion import from_gluon
from mgpu.gluon_io import load_graph, load_trainer_states
from mgpu.gluon_io.graph import SOFTMAX, Graph, dense_arrays, fixed_gammas
from mgpu.gluon_io.order import Order, leaves
from mgpu.gluon_io.states import Record, name_in
from mgpu.optim import Optimizer, lr_scheduler as schedules
from mgpu.optim.gluon_rules import COMPILED, Adam, RMSProp
from mgpu.training.parameters import Parameter
from mgpu.training.replicas import Replicas, initialize
from mgpu.training.rule_updates import RuleUpdates
from mgpu.training.trainer import Trainer, check_batch_size
from mgpu.utils.arguments import by_name, integer, is_number, number
from mgpu.utils.files import FilePath

#: options that mgpu calls by another name than MXNet
_OPTIONS = {("adagrad", "eps"): "float_stable_eps"}
#: whose state precedes the float32 copy of a parameter in the file
_STATE_FIRST = ("sgd", "nag")
#: supported optimizers of files
FAMILIES = ("sgd", "nag", "adam", "adamax", "nadam", "rmsprop", "adagrad",
            "adadelta", "ftrl", "signum")
#: to which MXNet gives a default rate, before a schedule's
_OWN_RATE = ("adam", "rmsprop", "adamax", "nadam", "signum")
#: relative rounding error of float32
_ROUNDED = 2.0 ** -24
#: entries of a Module's optimizer options that are no options of it
_MODULE_OPTIONS = {"begin_num_update", "rescale_grad", "lr_scheduler",
              "multi_precision", "lazy_update"}
_RESCALE = ("pass its rescale_grad in optimizer_params (MXNet's own is 1.0), "
            "and batch_size=, the batch size")
_SEPARATE_WEIGHTS = ("with kvstore=None each had separate weights, and their "
                 "mean cannot be resumed")


class Resumed(NamedTuple):
    """A resumed training.

    Attributes
    ----------
    replicas : Replicas
    trainer : Trainer
    notes : tuple of str
        Conclusions that the files do not state, or only in part: which
        device's running statistics were saved, which parameters are frozen
        and why, the rounding of MXNet's float32 options.
    """

    replicas: Replicas
    trainer: Trainer
    notes: tuple[str, ...]


@dataclass
class _Training:
    """What the files and the caller say, in the names of the graph."""

    optimizer: Optimizer
    schedule: Any
    module: bool = False                # else a trainer
    by_name: bool = True                # how a Module was given the optimizer
    rescaled: bool = False              # whether with a rescale_grad
    begin: int = 0                      # the count of what has none
    num_update: int = 0
    product: float = 1.0                # nadam's
    scale: float | None = None          # of gradients
    order: Sequence[str] = ()           # in which MXNet updates
    counts: dict[str, int] = field(default_factory=dict)
    slots: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    #: in float32, of float16 parameters
    copies: dict[str, np.ndarray] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


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
    """Resume a training of Gluon, or of MXNet's Module, on the current
    backend.

    The next steps are those of MXNet: its optimizer with the saved state,
    counts, rate and schedule. The files do not hold the whole state of a
    training. `Resumed.notes` lists the conclusions drawn.

    Parameters
    ----------
    symbol, params : str or os.PathLike
        Files of ``HybridBlock.export`` or ``Module.save_checkpoint``.
    states : str or os.PathLike
        File of ``Trainer.save_states`` or ``Module.save_optimizer_states``,
        written at the same time.
    devices : sequence of distinct devices
    order : "sorted" or sequence of str, optional
        The parameters of the trainer in their order: the file of states has
        no names. "sorted": the trainer was given all of
        ``net.collect_params()``, which it sorts by name, as texts. For a
        trainer that was given a list, a part of the network or a user-defined
        dictionary pass the names, ``[p.name for p in trainer._params]``, with
        the running statistics among them. Parameters without a name in it are
        frozen. Not needed if shapes determine the order: each shape is that
        of one parameter, or the states of a shape are all equal. For a
        Module: the names that it trained, or "all".
    optimizer, optimizer_params : optional
        The arguments of the Module, whose file has no optimizer:
        `optimizer_params` may have ``rescale_grad`` and ``lr_scheduler``.
        An `Optimizer` object requires ``rescale_grad``: a Module divides by
        its batch size if it makes the optimizer by name, and MXNet's objects
        do not divide. The counts of a Module's file are those of
        ``begin_num_update``, 0 by default, as in MXNet.
    lr_scheduler : callable, optional
        Replaces the saved one, or that in `optimizer_params`. Required if
        that is of a user-defined class.
    lr_mult, wd_mult, grad_req : dict, optional
        By parameter name, Gluon's (``"conv0_weight"``) or `Parameter.name`.
        They replace the multipliers in the graph, which are those of the
        network's first call. Without `grad_req`, a parameter without updates
        in the file is frozen. One with fewer updates than others requires an
        entry: it may or may not be frozen. States from before the first
        update do not show what is frozen: then a constant requires an entry,
        and for a Gluon trainer also a scale of 1 and a shift of 0 of a layer;
        a note lists that all others are trained. A gamma that batch norm
        takes as 1 stays frozen; "write": MXNet updates it, which moves
        Nadam's schedule. With "add" gradients start at zero: the files do not
        hold them.
    batch_size : float, optional
        The argument of the last ``step``, to compute the trainer's
        ``rescale_grad``: the file has their quotient. Required if that is not
        one over an integer, and for a Module with ``rescale_grad``: its
        batch size.
    dtype : {"float32", "float64", "float16"}, optional
        Of the network. A float16 one with ``multi_precision`` resumes from
        its float32 copies, in float32, and supports no other dtype.
    softmax : bool
        Whether a final ``SoftmaxOutput`` returns probabilities. False: its
        input, for `mgpu.losses.SoftmaxCrossEntropyLoss`, whose gradient is
        that of the operator with its default options. Other options
        (``normalization``, ``grad_scale``, ...) are not supported.
    batch_norm : {"per_device", "average", "sync"}
        See `initialize`.

    Returns
    -------
    Resumed
        ``replicas, trainer, notes``.

    Raises
    ------
    ValueError
        The files do not fit each other; the order of the parameters is
        ambiguous; or MXNet cannot have written a count or a rate.
    NotImplementedError
        An optimizer that `mgpu.optimizers` does not have; a user-defined
        schedule; operators as for `from_gluon`; a final loss with options.
    OSError
        A file cannot be opened.
    """
    net = from_gluon(symbol, params, dtype, softmax)
    graph, arrays = load_graph(symbol), dense_arrays(params)
    _check_losses(graph)
    given = _module_optimizer(optimizer, optimizer_params, lr_scheduler,
                              batch_size)
    file = load_trainer_states(states)
    if (file.optimizer is None) == (given is None):
        raise ValueError(
            "the file has an optimizer; received another. Leave optimizer= "
            "out." if given else "received a file without an optimizer. Pass "
            "optimizer= and optimizer_params= of the Module, with "
            "begin_num_update, the updates so far.")
    try:
        saved = _read(file, graph, arrays, order, given, lr_scheduler,
                      batch_size)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"expected states of MXNet 1.9.1; {os.fspath(states)!r} has "
            f"others, or is damaged ({why}).") from error
    if saved.copies and dtype not in (None, "float32"):
        raise ValueError(
            "a float16 network with multi_precision has its values in "
            f"float32; received dtype={dtype!r}. Leave dtype out.")
    if saved.copies:
        net = from_gluon(symbol, params, "float32", softmax)
    replicas = initialize(net, devices, init="keep", batch_norm=batch_norm)
    names = replicas.network.gluon_names()
    own = {name: key for key, name in names.items()}
    known = {names[p.name]: p for p in replicas.params()}
    for name, copy in saved.copies.items():
        known[name].set_data(copy)
    fixed = _freeze(saved, known, _rename("grad_req", grad_req, own),
                    own, fixed_gammas(graph), arrays)
    if lr_scheduler is None and saved.schedule is not None:
        _check_rates(saved, known)
    lr_mult, wd_mult = (
        _multipliers(saved, graph, known, what, _rename(what, x, own))
        for what, x in (("lr_mult", lr_mult), ("wd_mult", wd_mult)))
    trainer = Trainer(replicas, saved.optimizer, lr_mult=lr_mult,
                      lr_scheduler=saved.schedule, wd_mult=wd_mult)
    trainer.update_order = tuple(own[name] for name in saved.order
                                 if name in own)
    assert isinstance(trainer.updates, RuleUpdates)
    trainer.updates.fixed = [own[name] for name in fixed]
    trainer.import_states(_states(saved, known, fixed))
    saved.notes.extend(_general_notes(trainer, saved.scale))
    return Resumed(replicas, trainer, tuple(saved.notes))


def _rename(what: str, given: Any, own: Mapping[str, str]) -> dict[str, Any]:
    """`given`, whose keys are Gluon's names or mgpu's, by mgpu's."""
    return {own.get(name, name): value
            for name, value in by_name(what, given).items()}


def _names(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:5])) + ", ..." * (len(names) > 5)


# -- the loss in the graph ----------------------------------------------------

#: the options of a loss that mgpu's have not, as they do nothing; and what
#: does what they do
_LOSS_OPTIONS = {
    "grad_scale": (1.0, "multiply each loss by it"),
    "normalization": ("null", "divide a device's losses by its rows ('batch') "
                              "or labels that are not ignored ('valid')"),
    "use_ignore": (False, "multiply the losses at ignore_label by 0"),
    "smooth_alpha": (0.0, "labels of alpha / (classes - 1), 1 - alpha at the "
                          "class"),
    "out_grad": (False, "multiply each loss by the gradient from behind"),
    "preserve_shape": (False, "multiply each loss by the labels in a row")}
_LOSSES = (*SOFTMAX, "LinearRegressionOutput", "MAERegressionOutput",
           "LogisticRegressionOutput")


def _check_losses(graph: Graph) -> None:
    """Raise NotImplementedError for an output layer whose gradient is not
    that of a loss of mgpu."""
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
                f"received the loss {node.name!r} ({node.op}) with "
                f"{key}={value!r}, which the losses of mgpu have not. Take "
                "it out of the -symbol.json, and train with a loss that does "
                f"what it did: {instead}.")


# -- the optimizer ------------------------------------------------------------

def _module_optimizer(optimizer: Any, params: Mapping[str, Any] | None,
                      schedule: Any, batch_size: float | None
                      ) -> _Training | None:
    """What the caller says of the optimizer of a Module."""
    options = dict(by_name("optimizer_params", params))
    named, notes = not isinstance(optimizer, Optimizer), list[str]()
    known = {key: options.pop(key) for key in _MODULE_OPTIONS & options.keys()}
    if params and (optimizer is None or options and not named):
        raise ValueError("optimizer_params go with an optimizer's name; "
                         f"received {sorted(params)} with "
                         f"{'no' if named else 'an Optimizer'} object.")
    if optimizer is None:
        return None
    schedule = schedule or known.get("lr_scheduler")
    begin = integer("begin_num_update", known.get("begin_num_update", 0), 0)
    name = str(optimizer).lower() if named else optimizer.family
    if name in optimizers.RULES["gluon"].keys() - {*FAMILIES, "adamw"}:
        raise NotImplementedError(_unsupported(repr(optimizer)))
    if named:
        optimizer = optimizers.create(name, **_kernel_limits(name, options))
        if "learning_rate" not in options and name not in _OWN_RATE:
            optimizer.learning_rate = getattr(schedule, "base_lr",
                                              optimizer.learning_rate)
    if "begin_num_update" not in known:
        notes.append(
            "the counts of updates begin at 0, as in MXNet: pass the updates "
            "so far as begin_num_update in optimizer_params to continue a "
            "schedule or a correction of Adam's")
    scale, rescaled = None, "rescale_grad" in known
    if rescaled:
        scale = number("rescale_grad", known["rescale_grad"])
        if batch_size is None:
            raise ValueError(f"received rescale_grad={scale!r} of a Module. "
                             "Pass batch_size=, the rows of its batch, too.")
        notes.append(_divisor(scale, batch_size))
    else:
        notes.append("rescale_grad is one over the batch size, as of an "
                     f"optimizer by name; if it had an object, {_RESCALE}")
        if batch_size is not None:
            scale = 1 / check_batch_size(batch_size)
    return _Training(optimizer, schedule, True, named, rescaled, begin, begin,
                  scale=scale, notes=notes)


def _kernel_limits(family: str, options: dict[str, Any]) -> dict[str, Any]:
    """`options` with the limits as MXNet's kernels read them: 0 and less are
    none."""
    return {key: None if family in COMPILED and key in (
        "clip_gradient", "clip_weights") and is_number(x) and x <= 0 else x
        for key, x in options.items()}


def _family(record: Record) -> str:
    name = name_in("optimizer", record).lower()
    if name not in FAMILIES:
        raise NotImplementedError(_unsupported(record.kind))
    return name


def _unsupported(received: str) -> str:
    return (f"states are read of {', '.join(FAMILIES)}; received those of "
            f"{received}, which has no counterpart here.")


def _optimizer(record: Record, schedule: Any) -> Optimizer:
    """MXNet's optimizer, with its options as they were; `schedule` has the
    rate where there is one."""
    family, state = _family(record), record.state
    kind, options = optimizers.RULES["gluon"][family], {}
    for name in (x.name for x in fields(kind)):
        key = _OPTIONS.get((family, name), name)
        if name == "learning_rate":
            rate = getattr(schedule, "base_lr", None)
            options[name] = state["lr"] if rate is None else rate
            if options[name] is None:       # a schedule without a base
                del options[name]
        else:
            options[name] = state[key]
    return kind(**_kernel_limits(family, options))


# -- its schedule -------------------------------------------------------------

_SCHEDULES: dict[str, Any] = {kind.__name__: kind for kind in (
    schedules.FactorScheduler, schedules.MultiFactorScheduler,
    schedules.PolyScheduler, schedules.CosineScheduler)}


def _schedule(record: Any, rate: Any, done: int, asked: bool) -> Any:
    """MXNet's schedule after `done` updates, as a function of their number.
    `rate`: the learning rate that the optimizer was given, or None, which has
    taken the place of the schedule's. `asked`: whether it was asked for the
    rate of an update; `done` may be begin_num_update alone."""
    name = name_in("lr_scheduler", record)
    if name not in _SCHEDULES:
        raise NotImplementedError(
            f"the schedules of mgpu are {', '.join(_SCHEDULES)}; received "
            f"{getattr(record, 'kind', type(record).__name__)}. Pass "
            "lr_scheduler=, a function of the number of the update.")
    state, kind = record.state, _SCHEDULES[name]
    base = state["base_lr"]
    options = {key: state["power" if key == "pwr" else key]
               for key in inspect.signature(kind).parameters
               if key != "base_lr" and ("warmup_final_lr" in state
                                        or not key.startswith("warmup"))}
    began = state.get("warmup_final_lr", base if rate is None else rate)
    own = kind(base_lr=state.get("base_lr_orig", began), **options)
    own.warmup_final_lr = began
    start = began if rate is None else rate
    if not asked and base == start:
        own.base_lr = expected = start
    elif "max_update" not in options:
        own.base_lr = start
        expected = start if done < own.warmup_steps \
            else own.after_warmup(done)
    elif done > own.max_update:     # the last value stays
        expected = own.after_warmup(done)
    else:
        own.base_lr = expected = base       # which is not read
    if expected != base:
        raise ValueError(
            f"after {done} updates this {name} is at {expected!r}; received "
            f"one at {base!r}, which was changed manually. Pass "
            "lr_scheduler=, with the following rates.")
    return own


# -- what is in the files -----------------------------------------------------

def _read(file: Any, graph: Graph, arrays: Mapping[str, np.ndarray],
          order: str | Sequence[str] | None, given: _Training | None,
          schedule: Any, batch_size: float | None) -> _Training:
    if given is not None:
        saved, counts = given, dict.fromkeys(file.states, given.begin)
    else:
        saved, counts = _read_trainer(file, schedule, batch_size)
    orders = Order(file, counts, graph,
                   {name: x.shape for name, x in arrays.items()},
                   saved.optimizer.family == "nadam")
    keys: Mapping[str, Any] = orders.of_module(order) if saved.module \
        else orders.of_trainer(order)
    saved.order = tuple(orders.updates)
    for name, key in keys.items():
        saved.counts[name] = counts[key]
        saved.slots[name], copy = _split_state(
            saved.optimizer, file.states[key], arrays[name], name)
        if copy is not None:
            saved.copies[name] = copy
    if saved.module and len(file.states) > len(keys):
        saved.notes.append(
            f"it was trained on {len(file.states) // len(keys)} devices, "
            f"whose states are the same ({_SEPARATE_WEIGHTS})")
    if saved.copies:
        saved.notes.append(
            f"{len(saved.copies)} parameters are the float32 copies that "
            "multi_precision keeps of float16 ones; the network is float32")
    return saved


def _read_trainer(file: Any, schedule: Any, batch_size: float | None
                  ) -> tuple[_Training, dict[Any, int]]:
    """What the file of a Gluon trainer says, and the counts of updates by the
    number of the parameter."""
    record, notes = file.optimizer, list[str]()
    state, family = record.state, _family(record)
    begin, done, scale = (state[key] for key in (
        "begin_num_update", "num_update", "rescale_grad"))
    counts = _counts(record, notes)
    if schedule is None and state["lr_scheduler"] is not None:
        # MXNet's Ftrl keeps a rate for itself, and its AdaDelta asks for none.
        schedule = _schedule(
            state["lr_scheduler"], None if family == "ftrl" else state["lr"],
            done, bool(counts) and family != "adadelta")
    if counts:
        notes.append(_divisor(scale, batch_size))
    elif scale != 1:
        notes.append(f"its trainer multiplies gradients by its rescale_grad, "
                     f"which mgpu's does not: {_loss_factor(scale)}")
    return _Training(
        _optimizer(record, schedule), schedule, begin=begin, num_update=done,
        product=float(state.get("m_schedule", 1.0)), scale=scale,
        notes=notes), counts


def _loss_factor(scale: float) -> str:
    return (f"multiply each loss by {scale:.10g} (not where that undid a loss "
            "scale)")


def _divisor(scale: float, batch_size: float | None) -> str:
    """What is known of the factor of gradients; Gluon's step sets it to the
    trainer's own one over the batch size."""
    text = "the last step divided the sum of the gradients by"
    if batch_size is not None:
        own = scale * check_batch_size(batch_size)
        return f"{text} {batch_size:g}" + (
            "" if abs(own - 1) < 1e-9 else " and had a rescale_grad, which "
            f"mgpu's trainer has not: {_loss_factor(own)}")
    rows = 1 / scale if scale else 0.0
    if rows < 1 or abs(rows - round(rows)) > 1e-9 * rows:
        raise ValueError(
            f"the last step multiplied gradients by {scale!r}, which has a "
            "rescale_grad in it. Pass batch_size=, the rows of that step.")
    return (f"{text} {rows:.10g}. If that is not the batch size of that time, "
            "there was a rescale_grad besides: pass batch_size=")


def _counts(record: Record, notes: list[str]) -> dict[Any, int]:
    """Of all devices, which have the same ones."""
    state = record.state
    devices = [x for x in state.get("_all_index_update_counts", {
        0: state.get("_index_update_count", {})}).values() if x]
    counts = {key: t for one in devices for key, t in one.items()}
    if any(counts[key] != t for one in devices for key, t in one.items()):
        raise ValueError(
            "every device updates a parameter as often as the others; "
            "received other counts, as after a load on more devices.")
    if len(devices) > 1:
        if _family(record) == "nadam":
            raise ValueError(
                f"received Nadam's states of {len(devices)} devices, which "
                "moved one schedule in turn, so their weights differ. Train "
                "on one device, or on the key-value store.")
        notes.append(f"it was trained on {len(devices)} devices; the state "
                     f"is that of the first ({_SEPARATE_WEIGHTS})")
    return counts


def _split_state(rule: Optimizer, state: Any, weight: np.ndarray, name: str
                 ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """The slots of a state, and the float32 copy of a float16 weight."""
    copy, at = None, int(rule.family in _STATE_FIRST)
    if weight.dtype == np.float16 and isinstance(state, tuple) \
            and len(state) == 2 and isinstance(state[at], np.ndarray) \
            and state[at].dtype == np.float32:
        copy, state = state[at], state[1 - at]
    found, slots = tuple(leaves(state)), rule.slots()
    if len(found) == 1 and not slots and rule.family in _STATE_FIRST:
        found = ()      # a velocity that counts 0: the momentum was set to it
    if len(found) != len(slots):
        raise ValueError(
            f"{rule!r} keeps {', '.join(slots) or 'nothing'} of a parameter; "
            f"received {len(found)} arrays for {name!r}.")
    if rule.family == "signum":     # MXNet's runs downhill
        found = tuple(-x for x in found)
    return dict(zip(slots, found)), copy


# -- onto the backend ---------------------------------------------------------

def _multipliers(saved: _Training, graph: Graph,
                 known: Mapping[str, Parameter], what: str,
                 given: Mapping[str, float]) -> dict[str, float]:
    """Those of the graph, where `given` has no others."""
    found = {}
    for node in graph.nodes:
        if node.op != "null" or node.name not in known:
            continue
        key = known[node.name].name
        if f"__{what}__" in node.marks:
            found[key] = float(node.marks[f"__{what}__"])
        elif what == "wd_mult" and saved.module \
                and not node.name.endswith(("_weight", "_gamma")):
            found[key] = 0.0
    others = {key: x for key, x in found.items() if x != 1}
    where = "as in the graph"
    if saved.module:        # which may have been given an object
        where = ("as Module gives it to an optimizer by name; if it had an "
                 f"object, pass {what}= with 1 for each, and its rescale_grad")
        changed = sorted(key for key, x in given.items()
                         if x != found.get(key, x))
        if not saved.rescaled and (changed or not saved.by_name):
            raise ValueError(
                "Module gives rescale_grad to an optimizer by name alone; "
                + (f"received another {what} than by name for "
                   f"{', '.join(changed)}" if saved.by_name
                   else "received an Optimizer")
                + f" and no rescale_grad. For an object, {_RESCALE}.")
        others = {key: x for key, x in others.items() if key not in given
                  and (what == "lr_mult" or saved.optimizer.wd)}
        if others and not saved.by_name:
            raise ValueError(
                f"Module gives {what} to an optimizer by name, and none to "
                "an object of MXNet's; received an Optimizer and no "
                f"{what} for {', '.join(others)}. Pass 1 for each if the "
                f"Module had an object, else {others}.")
    if others:
        each = ", ".join(f"{key}: {x:g}" for key, x in others.items())
        saved.notes.append(f"{what} {where}: {each}")
    return {**found, **given}


def _freeze(saved: _Training, known: Mapping[str, Parameter],
            requests: Mapping[str, str], own: Mapping[str, str],
            gammas: set[str], arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Train what MXNet trains. Returns those of `gammas`, which batch norm
    takes as 1, that it updates to no effect, where Nadam moves at them."""
    keys = {p.name: name for name, p in known.items()}
    strange = sorted(key for key, x in requests.items() if key not in keys
                     # but for a running statistic
                     and (x != "null" or key not in own.values()))
    if strange:
        raise ValueError(f"grad_req names parameters; received {strange}. "
                         f"There are {sorted(keys)}.")
    # What the trainer was not given it does not move, whatever its grad_req.
    wanted = {keys[key]: x for key, x in requests.items()
              if keys.get(key) in saved.order}
    latest = max(saved.counts.values(), default=0)
    behind = [f"{name} ({t})" for name, t in saved.counts.items()
              if t < latest and name not in wanted]
    if behind:
        raise ValueError(
            f"the files do not say whether parameters with fewer than "
            f"{latest} updates are trained now; received {len(behind)} with "
            f"fewer: {_names(behind)}. Pass grad_req= with an entry for each: "
            "'null' or 'write'.")
    if not saved.slots:
        _check_requests(saved, {
            name: p for name, p in known.items()
            if name in saved.order and name not in wanted}, gammas, arrays)
    frozen, fixed = [], []
    for name, p in known.items():
        trained = name in (saved.slots or saved.order)
        if name in gammas:
            request = wanted.get(name, "write" if name in saved.slots
                                 or saved.module and not saved.slots
                                 else "null")
            if saved.optimizer.family == "nadam" and request != "null" \
                    and name in saved.order:
                fixed.append(name)
        elif name in wanted:
            p.grad_req = wanted[name]
        elif trained and p.grad_req == "null":  # MXNet trains this constant
            p.grad_req = "write"
        elif not trained and p.grad_req != "null":
            p.grad_req = "null"
            frozen.append(p.name)
    added = [p.name for p in known.values() if p.grad_req == "add"]
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


def _check_requests(saved: _Training, unsaid: Mapping[str, Parameter],
                    gammas: set[str], arrays: Mapping[str, np.ndarray]
                    ) -> None:
    """Raise ValueError for states without updates if the class of a block
    determines what MXNet trains; a note lists that the user may have frozen
    more. `unsaid`: parameters that the caller has not named."""
    doubt = [repr(name) for name, p in unsaid.items() if (
        saved.optimizer.family == "nadam" and not saved.module
        if name in gammas else p.grad_req == "null" or not saved.module
        and p.kind in _BEGIN and (arrays[name] == _BEGIN[p.kind]).all())]
    if doubt:
        raise ValueError(
            "states from before the first update do not say what is trained; "
            f"received no state of {_names(doubt)}. Pass grad_req= with an "
            "entry for each, 'null' or 'write', as {p.name: p.grad_req for p "
            "in net.collect_params().values()} has them in MXNet.")
    if any(p.grad_req != "null" for p in unsaid.values()):
        saved.notes.append(
            "the states are from before the first update and do not say what "
            "is frozen: what grad_req= does not name is trained")


def _check_rates(saved: _Training, known: Mapping[str, Parameter]) -> None:
    """MXNet asks the schedule at each parameter, with the largest count so
    far: those with fewer updates get the rate of the update before where
    none with more stands before them."""
    counts = [(saved.counts.get(name, saved.begin), name)
              for name in saved.order if name in known
              and known[name].grad_req != "null"]
    if counts and counts[0][0] < max(counts)[0]:
        raise ValueError(
            f"received {counts[0][1]}, the first that MXNet updates, with "
            f"fewer updates ({counts[0][0]}) than others: MXNet gives it the "
            "rate of the update before. Pass lr_scheduler=, whose rates "
            "count for all.")


def _states(saved: _Training, known: Mapping[str, Parameter],
            fixed: Sequence[str]) -> TrainerStates:
    """In mgpu's format."""
    counts, slots = {}, {}
    for name, p in known.items():
        if not (name in saved.counts or saved.begin or name in fixed):
            continue
        counts[p.name] = saved.counts.get(name, saved.begin)
        zeros = np.zeros(p.shape or ())
        for slot in saved.optimizer.slots():
            slots[p.name, slot] = saved.slots.get(name, {}).get(slot, zeros)
        if saved.optimizer.family == "nadam":
            slots[p.name, "schedule"] = np.array(saved.product)
    return TrainerStates(type(saved.optimizer).__name__, saved.num_update,
                         saved.optimizer.learning_rate, counts, slots)


def _general_notes(trainer: Trainer, scale: float | None) -> Iterator[str]:
    """What is true of every file. `scale`: of the gradients of a step."""
    replicas, rule = trainer.replicas, trainer.optimizer
    layers = {p.name.rpartition(".")[0] for p in replicas.buffers()
              if p.kind in STATISTICS}
    if layers:
        yield (f"the running statistics of {len(layers)} layers are those of "
               "the file on every device: with batch_norm='per_device' "
               "several devices continue with separate ones")
    trained = {name.rpartition(".")[0] for name, request
               in replicas.grad_reqs().items() if request != "null"}
    if trained and layers - trained:
        yield ("running statistics move in each training pass in PyTorch, in "
               "MXNet where a gradient passes through the layer: where all "
               "layers before are frozen too, set track_running_stats = False "
               f"in {_names(sorted(layers - trained))}")
    if rule.family not in COMPILED or all(
            p.dtype != "float64" for p in replicas.params()):
        return
    factors = {trainer.multipliers(p) for p in replicas.params()
               if p.grad_req != "null"}
    options = {x.name: {getattr(rule, x.name)} for x in fields(rule)} | {
        "wd": {rule.wd * wd for _, wd in factors},
        "learning_rate": {rule.learning_rate * lr for lr, _ in factors},
        "rescale_grad": {scale}}
    off: dict[str, float] = {}
    # What changes from step to step has the bound of them all.
    if isinstance(rule, Adam) or trainer.lr_scheduler is not None:
        del options["learning_rate"]
        off["the corrected rate of an update" if isinstance(rule, Adam)
            else "a rate of the schedule"] = _ROUNDED
    if scale is None:
        off["1 / the batch size, where it is no power of two,"] = \
            _ROUNDED
    for name, numbers in options.items():
        error, x = max(((_float32_error(x), x) for x in numbers
                        if isinstance(x, float)), default=(0.0, 0.0))
        if error:
            off[f"{name}={x!r}"] = error
            if isinstance(rule, (Adam, RMSProp)) and x != 1 \
                    and name in ("beta1", "beta2", "gamma1"):
                off[f"1 - {name}"] = error * x / abs(1 - x)     # new shares
    each = [f"{name} by {'up to ' * (x == _ROUNDED)}{x:.1e}"
            for name, x in off.items()]
    if each:
        yield ("MXNet reads options as float32, here they are double; "
               f"relative difference: {', '.join(each)}. So each part "
               "of a step (gradient, momentum, decay) differs by up to about "
               f"{sum(off.values()):.1e} of itself")


def _float32_error(x: float) -> float:
    """By how much `x` is off as float32, relative to it."""
    with np.errstate(over="ignore"):
        return abs(float(np.float32(x)) - x) / abs(x) \
            if x and math.isfinite(x) else 0.0
