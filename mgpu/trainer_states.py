"""What a `Trainer` remembers between steps, and its file."""
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu import files, schedule_state
from mgpu.arguments import is_integer, is_number
from mgpu.backends.base import Array, Backend
from mgpu.loss_scale import LossScale, check_loss_scale
from mgpu.optimizers.base import NEVER_NEGATIVE, Optimizer

FORMAT = "mgpu trainer states 2"
#: those that can be read
FORMATS = (FORMAT, "mgpu trainer states 1")

#: by the name of a parameter, its slots
DeviceState = dict[str, dict[str, Any]]


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


def export_slots(backend: Backend, state: Mapping[str, Mapping[str, Any]]
                 ) -> dict[tuple[str, str], np.ndarray]:
    """NumPy copies of one device's state; waits for pending updates."""
    return {(name, slot): backend.to_numpy(value)
            if backend.is_native(value) else np.array(value)
            for name, slots in state.items()
            for slot, value in slots.items()}


def fit(saved: TrainerStates, source: str, backend: Backend,
        optimizer: Optimizer, arrays: Mapping[str, Array]) -> DeviceState:
    """The states of `saved` as native arrays.

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
        variance below 0): all of them are listed.
    """
    wrong = _impossible(saved, type(optimizer).__name__)
    known = {*saved.counts, *(name for name, _ in saved.slots)}
    wrong += [f"unknown parameter {name}"
              for name in sorted(known - set(arrays))]
    left = dict(saved.slots)
    states: DeviceState = {}
    with backend.scope(recording=False):
        for name in saved.counts if not wrong else ():
            states[name] = slots = optimizer.create_state(arrays[name],
                                                          backend.ops)
            for slot, value in slots.items():
                found = saved.slots.get((name, slot))
                left.pop((name, slot), None)
                shape = tuple(getattr(value, "shape", ()))
                if found is None:
                    wrong.append(f"no {slot} of {name}")
                elif found.shape != shape or found.dtype.kind != "f":
                    wrong.append(f"{slot} of {name} with shape "
                                 f"{found.shape} instead of {shape}, "
                                 f"dtype {found.dtype}")
                elif optimizer.built_in and slot in NEVER_NEGATIVE \
                        and (found < 0).any():
                    wrong.append(f"{slot} of {name} below 0")
                elif backend.is_native(value):
                    value[...] = backend.put(found, value)
                else:
                    slots[slot] = found.item()
    _refuse(source, wrong or [f"unused {slot} of {name}"
                              for name, slot in left])
    return states


def check(saved: TrainerStates, source: str, own: str,
          arrays: Mapping[str, Array]) -> None:
    """Raise ValueError as `fit` does, for states of an optimizer object of
    the class `own`, whose memory of `arrays` has their shapes."""
    wrong = _impossible(saved, own)
    for (name, slot), value in saved.slots.items():
        shape = tuple(arrays[name].shape) if name in arrays else value.shape
        if value.shape not in ((), shape, (*shape[:1], 1)):
            wrong.append(f"{slot} of {name} with shape {value.shape} "
                         f"instead of {shape}")
    _refuse(source, wrong)


def _refuse(source: str, wrong: Sequence[str]) -> None:
    if wrong:
        raise ValueError(
            f"{source} must hold the states of this trainer; "
            f"received {'; '.join(dict.fromkeys(wrong))}. Load it into a "
            "trainer with the same optimiser and network.")


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
