"""What a `Trainer` remembers between steps, and its file."""
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends import Backend
from mgpu.backends.device import as_device
from mgpu.backends.native_objects import OptimizerObject
from mgpu.backends.types import Array
from mgpu.optim import schedule_state
from mgpu.optim.base import RULES, Optimizer
from mgpu.training.rule_updates import rule_of
from mgpu.utils import files
from mgpu.utils.arguments import is_integer, is_number

FORMAT = "mgpu trainer states 2"
#: those that can be read
FORMATS = (FORMAT, "mgpu trainer states 1")

class TrainerStates(NamedTuple):
    """The states of a trainer as NumPy copies, whatever the backend and the
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
    #: of an optimizer object: the names and all options of each group
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
        The states of another optimizer, states that do not fit `arrays` (all
        of them are listed), or numbers that no training reaches, such as a
        rate of NaN or a count below 0. Nothing has changed.
    """
    put = own.fit(saved.groups, saved.learning_rate)
    known, kind = own.groups()[0].family is not None, kind_of(own)
    numbers = (saved.num_update, saved.good_steps, saved.skipped_steps,
               *saved.counts.values())
    wrong = []
    if not all(is_integer(n, 0) and n < 2 ** 53 for n in numbers) \
            or not all(is_number(x) and 0 <= x < float("inf")
                       for x in (saved.learning_rate, saved.loss_scale or 1)):
        wrong = [f"numbers that no training reaches: {numbers[:3]}, rate "
                 f"{saved.learning_rate}, loss scale {saved.loss_scale}"]
    elif saved.optimizer != kind:
        wrong = [f"the state of {saved.optimizer} instead of {kind}"]
    elif isinstance(own.object, Optimizer) or known and saved.groups is None:
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
            "trainer with the same optimizer and network.")

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
    return wrong or [f"unused {slot} of {name}" for name, slot in left]


def pack(states: TrainerStates
         ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What fits JSON, and the arrays, by names without a leading '/'."""
    header = states._asdict()
    return header, {f"{name}|{slot}": value for (name, slot), value
                    in header.pop("slots").items()}


def unpack(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
           ) -> TrainerStates:
    """What `pack` packed. An Exception for what it cannot have packed."""
    schedule_state.check(header.get("schedule"))
    # Older files lack those that have a default.
    known = {name: header[name] for name in TrainerStates._fields
             if name in header}
    return TrainerStates(**known, slots={
        (name, slot): x for key, x in arrays.items()
        for name, _, slot in [key.rpartition("|")]})


def to_dict(states: TrainerStates, backend: Backend) -> dict[str, Any]:
    """What `from_dict` takes: numbers, text and native arrays on the CPU."""
    header, arrays = pack(states)
    home = as_device("cpu")
    return {"format": FORMAT, **header, "slots": {
        name: backend.put(x, home) for name, x in arrays.items()}}


def from_dict(state_dict: Any, backend: Backend) -> TrainerStates:
    """The states of `to_dict`. ValueError for all else."""
    try:
        found = dict(state_dict)
        if found.pop("format") not in FORMATS:
            raise ValueError("another format")
        return unpack(found, {name: backend.to_numpy(x) for name, x
                              in found.pop("slots").items()})
    except Exception as error:
        raise ValueError(
            "expected what Trainer.state_dict() gave; received another "
            f"{type(state_dict).__name__}. A state of a torch.optim object "
            "cannot be loaded: save that of the Trainer.") from error


def write(states: TrainerStates, file: files.FilePath) -> None:
    """Write `states`, whole or not at all: see `files.write_arrays`."""
    header, arrays = pack(states)
    files.write_arrays(file, {"format": FORMAT, **header}, arrays)


def read(file: files.FilePath) -> TrainerStates:
    """What `write` wrote. ValueError for any other contents, OSError for a
    file that cannot be opened."""
    return files.read_arrays(
        file, FORMATS, "a file of Trainer.save_states (one of Gluon's goes to "
        "mgpu.resume_from_gluon)", unpack)


def by_layer(names: Sequence[str]) -> Callable[[str], Any]:
    """A sort key: layer after layer, and by name inside a layer, as a Gluon
    Trainer that is given a dictionary sorts up to ten layers of one kind:
    see `mgpu.optimizers.Nadam`."""
    layers: dict[str, int] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], len(layers))
    return lambda name: (layers[name.rpartition(".")[0]], name)
