"""What a `Trainer` remembers between steps, and its file."""
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mgpu import files
from mgpu.backends.base import Array, Backend
from mgpu.loss_scale import check_loss_scale

if TYPE_CHECKING:
    from mgpu.optimizers import Optimizer

FORMAT = "mgpu trainer states 1"

#: of one device: by the name of a parameter, its slots
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


def export_slots(backend: Backend, state: Mapping[str, Mapping[str, Any]]
                 ) -> dict[tuple[str, str], np.ndarray]:
    """NumPy copies of one device's state; waits for pending updates."""
    return {(name, slot): backend.to_numpy(value)
            if backend.is_native(value) else np.array(value)
            for name, slots in state.items()
            for slot, value in slots.items()}


def fit(saved: TrainerStates, source: str, backend: Backend,
        optimizer: "Optimizer", arrays: Mapping[str, Sequence[Array]],
        devices: int) -> list[DeviceState]:
    """The states of `saved` as native arrays, for each device.

    Parameters
    ----------
    source : str
        What to call `saved` in a message.
    arrays : mapping of str -> sequence of native arrays
        Every parameter of the network, on each device.

    Raises
    ------
    ValueError
        The states of another optimiser, or states that do not fit `arrays`:
        all differences are listed.
    """
    own = type(optimizer).__name__
    wrong = []
    if saved.optimizer != own:
        wrong.append(f"the state of {saved.optimizer} instead of {own}")
    known = {*saved.counts, *(name for name, _ in saved.slots)}
    wrong += [f"unknown parameter {name}"
              for name in sorted(known - set(arrays))]
    left = dict(saved.slots)
    states: list[DeviceState] = [{} for _ in range(devices)]
    with backend.scope(recording=False):
        for name in saved.counts if not wrong else ():
            for state, weight in zip(states, arrays[name], strict=True):
                state[name] = slots = optimizer.create_state(weight,
                                                             backend.ops)
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
    return states


def write(states: TrainerStates, file: files.FilePath) -> None:
    """Write npz with a JSON header, no pickle, whole or not at all."""
    header = {"format": FORMAT, **states._asdict()}
    arrays = {f"{name}|{slot}": value
              for (name, slot), value in header.pop("slots").items()}
    arrays["header"] = np.array(json.dumps(header))
    with files.part_of(file) as part, open(part, "wb") as stream:
        np.savez(stream, **arrays)
        stream.flush()
        os.fsync(stream.fileno())


def read(file: files.FilePath) -> TrainerStates:
    """What `write` wrote. ValueError for any other contents, OSError for a
    file that cannot be opened."""
    try:
        with np.load(file, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files}
        header = json.loads(str(arrays.pop("header")))
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}")
        slots = {}
        for key, array in arrays.items():
            name, _, slot = key.rpartition("|")
            slots[name, slot] = array
        loss_scale = header.get("loss_scale")   # older files have none
        if loss_scale is not None:
            check_loss_scale(loss_scale)
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
            f"expected a file of Trainer.save_states; {os.fspath(file)!r} "
            f"is not one, or is damaged ({error}). Use a whole file.") \
            from error


def by_layer(names: Sequence[str]) -> Callable[[str], Any]:
    """A sort key: layer after layer, and by name inside a layer, as a Gluon
    Trainer that is given a dictionary sorts a plain stack of layers."""
    layers: dict[str, int] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], len(layers))
    return lambda name: (layers[name.rpartition(".")[0]], name)
