"""What a `Trainer` remembers between steps, and its file."""
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu import files, schedule_state
from mgpu.arguments import is_integer, is_number
from mgpu.backends.base import Array, Backend, OptimizerObject
from mgpu.device import as_device
from mgpu.loss_scale import LossScale, check_loss_scale
from mgpu.optimizers.base import NEVER_NEGATIVE, RULES, Optimizer
from mgpu.rule_updates import rule_of

FORMAT = "mgpu trainer states 2"
#: those that can be read
FORMATS = (FORMAT, "mgpu trainer states 1")

class TrainerStates(NamedTuple):
    """The states of a trainer as NumPy copies, whatever the engine and the
    number of devices."""

    optimizer: str                              # the class's name
    num_update: int
    learning_rate: float
    counts: dict[str, int]                      # updates by parameter
    slots: dict[tuple[str, str], np.ndarray]    # by parameter, slot
    loss_scale: float | None = None             # None: not a dynamic one
    good_steps: int = 0                         # since it has changed
    skipped_steps: int = 0
    schedule: dict[str, Any] | None = None      # what its calls change
    #: of an optimiser object: the names and all options of each group
    groups: list[dict[str, Any]] | None = None


def fit(saved: TrainerStates, source: str, backend: Backend,
        own: OptimizerObject, arrays: Mapping[str, Array]
        ) -> Callable[[], None]:
    """A function that puts the states of `saved` into `own`, and raises
    nothing.

    Parameters
    ----------
    source : str
        What to call `saved` in a message.
    arrays : mapping of str -> native array
        Every parameter of the network.

    Raises
    ------
    ValueError
        The states of another optimiser, states that do not fit `arrays`, or
        numbers that no training reaches (a rate of NaN, a count below 0, a
        variance below 0): all of them are listed. Nothing has changed.
    """
    put = own.fit(saved.groups, saved.learning_rate)
    wrong = _impossible(saved, kind_of(own))
    known = own.groups()[0].family is not None
    if isinstance(own.object, Optimizer) or known and saved.groups is None:
        if not wrong:
            wrong = _misfits(saved, backend, rule_of(own), arrays)
    elif known:
        for (name, slot), x in saved.slots.items():
            shape = tuple(arrays[name].shape) if name in arrays else x.shape
            if x.shape not in ((), shape, (*shape[:1], 1)):
                wrong.append(f"{slot} of {name} with shape {x.shape} instead "
                             f"of {shape}")
    if wrong:
        raise ValueError(
            f"{source} must hold the states of this trainer; "
            f"received {'; '.join(dict.fromkeys(wrong))}. Load it into a "
            "trainer with the same optimiser and network.")

    def load() -> None:
        own.load((saved.slots, saved.counts), arrays)
        put()
    return load


def kind_of(own: OptimizerObject) -> str:
    """The class whose states these are: of mgpu, where it has the formula."""
    family = own.groups()[0].family
    return RULES[own.semantics][family].__name__ if family \
        else type(own.object).__name__


def _misfits(saved: TrainerStates, backend: Backend, rule: Optimizer,
             arrays: Mapping[str, Array]) -> list[str]:
    """What `rule` does not remember in this form."""
    wrong = [f"unknown parameter {name}" for name in sorted(
        {*saved.counts, *(name for name, _ in saved.slots)} - arrays.keys())]
    left = dict(saved.slots)
    for name in saved.counts if not wrong else ():
        with backend.scope(recording=False):
            state = rule.create_state(arrays[name], backend.ops)
        for slot, value in state.items():
            found = left.pop((name, slot), None)
            shape = tuple(getattr(value, "shape", ()))
            if found is None:
                wrong.append(f"no {slot} of {name}")
            elif found.shape != shape or found.dtype.kind != "f":
                wrong.append(f"{slot} of {name} with shape {found.shape} "
                             f"instead of {shape}, dtype {found.dtype}")
            elif rule.built_in and slot in NEVER_NEGATIVE \
                    and (found < 0).any():
                wrong.append(f"{slot} of {name} below 0")
    return wrong or [f"unused {slot} of {name}" for name, slot in left]


def _impossible(saved: TrainerStates, own: str) -> list[str]:
    """The numbers of `saved` that no training reaches, and another class
    than `own`."""
    counts = {"num_update": saved.num_update,
              "skipped_steps": saved.skipped_steps,
              **{f"the count of {name}": t
                 for name, t in saved.counts.items()}}
    wrong = [f"{what} {t!r}" for what, t in counts.items()
             if not is_integer(t, 0) or t >= 2 ** 53]
    if not is_integer(saved.good_steps, 0) \
            or saved.good_steps >= LossScale.GROWTH_INTERVAL:
        wrong.append(f"good_steps {saved.good_steps!r}")
    if not is_number(saved.learning_rate) \
            or not 0 <= saved.learning_rate < float("inf"):
        wrong.append(f"learning_rate {saved.learning_rate!r}")
    if saved.optimizer != own:
        wrong.append(f"the state of {saved.optimizer} instead of {own}")
    return wrong


def pack(states: TrainerStates
         ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What fits JSON, and the arrays, by names without a leading '/'."""
    header = states._asdict()
    return header, {f"{name}|{slot}": value for (name, slot), value
                    in header.pop("slots").items()}


def unpack(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
           ) -> TrainerStates:
    """What `pack` packed. An Exception for what it cannot have packed."""
    slots = {}
    for key, array in arrays.items():
        name, _, slot = key.rpartition("|")
        slots[name, slot] = array
    loss_scale = header.get("loss_scale")   # older files have none
    if loss_scale is not None:
        check_loss_scale(loss_scale)
    schedule = header.get("schedule")
    schedule_state.check(schedule)
    groups = header.get("groups")
    for group in groups or ():
        if not (isinstance(group["options"], dict)
                and all(isinstance(name, str) for name in group["names"])):
            raise ValueError(f"{group!r} is no group")
    return TrainerStates(
        str(header["optimizer"]), operator.index(header["num_update"]),
        float(header["learning_rate"]),
        {name: operator.index(t) for name, t in header["counts"].items()},
        slots, loss_scale, operator.index(header.get("good_steps", 0)),
        operator.index(header.get("skipped_steps", 0)), schedule, groups)


def to_dict(states: TrainerStates, backend: Backend) -> dict[str, Any]:
    """What `from_dict` takes: numbers, text and native arrays on the CPU."""
    header, arrays = pack(states)
    home = as_device("cpu")
    return {"format": FORMAT, **header, "slots": {
        name: backend.put(x, home) for name, x in arrays.items()}}


def from_dict(state_dict: Any, backend: Backend) -> TrainerStates:
    """The states of `to_dict`. TypeError or ValueError for all else."""
    if not isinstance(state_dict, Mapping):
        raise TypeError("state_dict must be a dict; received "
                        f"{type(state_dict).__name__}. Pass what "
                        "Trainer.state_dict() gave.")
    found = dict(state_dict)
    try:
        if found.pop("format") not in FORMATS:
            raise ValueError("another format")
        return unpack(found, {name: backend.to_numpy(x) for name, x
                              in found.pop("slots").items()})
    except Exception as error:
        raise ValueError(
            "expected what Trainer.state_dict() gave; received a dict with "
            f"{sorted(map(str, state_dict))[:6]}. A state of a torch.optim "
            "object cannot be loaded: save that of the Trainer.") from error


def write(states: TrainerStates, file: files.FilePath) -> None:
    """Write `states`, whole or not at all: see `files.write_arrays`."""
    header, arrays = pack(states)
    files.write_arrays(file, {"format": FORMAT, **header}, arrays)


def read(file: files.FilePath) -> TrainerStates:
    """What `write` wrote. ValueError for any other contents, OSError for a
    file that cannot be opened."""
    with files.opened(file) as stream:
        # A pickle. A file of ours may begin with the same byte, of a length;
        # its ninth byte begins a header.
        head = stream.read(9)
        if head[:1] == b"\x80" and head[8:] != b"{":
            raise ValueError(
                "expected a file of Trainer.save_states of mgpu; received "
                f"{os.fspath(file)!r}, which looks like one of Gluon's. Pass "
                "it to mgpu.resume_from_gluon, with the network's files.")
    return files.read_arrays(file, FORMATS, "a file of Trainer.save_states",
                             unpack)


def by_layer(names: Sequence[str]) -> Callable[[str], Any]:
    """A sort key: layer after layer, and by name inside a layer, as a Gluon
    Trainer that is given a dictionary sorts up to ten layers of one kind:
    see `mgpu.optimizers.Nadam`."""
    layers: dict[str, int] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], len(layers))
    return lambda name: (layers[name.rpartition(".")[0]], name)
