"""A training in one file, from which it goes on to the bit.

The file is npz: no pickle, and a CRC-32 for each array, so that a flipped bit
is an error. (safetensors has no checksum, and would be one more package.)
"""
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mgpu import extra_states, files, trainer_states
from mgpu.arguments import integer
from mgpu.backends import messages
from mgpu.datasets import BatchIterator
from mgpu.parameters import BUFFERS
from mgpu.prefetching import Prefetched
from mgpu.replicas import Replicas
from mgpu.trainer import Trainer
from mgpu.training import check_pair

FORMAT = "mgpu checkpoint 1"

#: what the order of a `BatchIterator` depends on
_ORDER = ("num_examples", "batch_size", "seed", "shuffle", "drop_last")

Data = BatchIterator | Prefetched | None


def save_checkpoint(file: files.FilePath, replicas: Replicas,
                    trainer: Trainer, data: Data = None) -> None:
    """Write what a training goes on from, whole or not at all.

    Call it between two steps. The run that goes on from the file has the bits
    of the run that goes on from here. In the file are: weights, and what is
    frozen; the buffers of every device; what layers give by
    ``get_extra_state`` (torch: numbers, text, arrays, and lists, tuples and
    dicts of them); the trainer's slots, counts, rate and dynamic loss scale;
    the random streams of the engine, NumPy's global one and Python's; the
    position in `data`. Options are not: the program that goes on makes
    network, trainer, schedule (a function of the number of the update) and
    data as this one did. Waits for pending work.

    Parameters
    ----------
    file : path
        A file that is there is replaced.
    replicas : Replicas
    trainer : Trainer
        Of these replicas.
    data : BatchIterator, or `mgpu.prefetch` of one, optional
        What the loop goes through. The run that goes on begins with the
        batch after the last step: what was handed out since then comes
        again (`BatchIterator.stepped`). Random numbers that its `transform`
        draws ahead of the loop are lost: with `mgpu.prefetch`, save between
        epochs then.

    Raises
    ------
    RuntimeError
        A gradient waits for `Trainer.step`, or was added up
        (``grad_req="add"``), and was not cleared (`Replicas.zero_grad`);
        an update failed midway; the parameters have no values yet; or
        another thread uses the replicas or draws from `data`.
    TypeError, ValueError
        What is not replicas, their trainer, or such data. An extra state that
        is neither of these; a buffer that a pass has made.

    Notes
    -----
    MXNet's random streams cannot be read. There, each save begins new ones,
    from a seed that `mgpu.seed` and the number of saves since determine: the
    run that went on from the file equals the one that saved, not one that
    saved at other steps or never. On torch saving changes nothing.
    """
    check_pair(replicas, trainer)
    position = None if data is None else _position(data)
    backend = replicas.backend
    with replicas.owned():
        _check_between_steps(replicas, trainer)
        replicas.give_up()
        replicas.network.follow()
        replicas.following.follow(replicas.all_parameters())
        states, slots = trainer_states.pack(trainer.export_states())
        extra, more = extra_states.pack(replicas.network.extra_states(),
                                        backend)
        arrays = {f"slot:{name}": x for name, x in slots.items()}
        arrays |= {f"extra:{name}": x for name, x in more.items()}
        for p in replicas.all_parameters():
            copies = p.list_data() if p.kind in BUFFERS else p.list_data()[:1]
            every = [backend.to_numpy(x) for x in copies]
            alike = len({x.tobytes() for x in every}) == 1
            arrays[f"value:{p.name}"] = every[0] if alike else np.stack(every)
        arrays |= {f"stream:{name}": x
                   for name, x in backend.export_streams().items()}
    numpy: Any = np.random.get_state()
    files.write_arrays(file, {
        "format": FORMAT, "engine": backend.name,
        "devices": list(map(str, replicas.devices)), "states": states,
        "extra": extra,
        "grad_req": {p.name: p.grad_req for p in replicas.params()},
        "position": position, "python": random.getstate(),
        "numpy": [numpy[0], numpy[1].tolist(), *numpy[2:]]}, arrays)


def load_checkpoint(file: files.FilePath, replicas: Replicas,
                    trainer: Trainer, data: Data = None, *,
                    seed: int | None = None) -> None:
    """Go on from a file of `save_checkpoint`.

    On the same engine and devices the run has the bits of the one that saved.
    What an update that failed midway has torn is whole after it. After Ctrl-C
    inside the call, load again.

    Parameters
    ----------
    file : path
    replicas, trainer, data
        Made as for the run that saved; `data` if and only if that gave it.
    seed : int, optional
        Begin new random streams of the engine, as `mgpu.seed` does, in the
        place of those in the file: for another engine, or other devices.

    Raises
    ------
    ValueError
        The file is damaged or no checkpoint; values, states or data do not
        fit; other devices or another engine without `seed`; another number
        of devices, and buffers (``batch_norm="per_device"``) that differ from
        device to device. Nothing has changed.
    OSError
        The file cannot be opened.
    RuntimeError
        The parameters have no values yet.
    TypeError
        What is not replicas, their trainer, or such data.
    """
    check_pair(replicas, trainer)
    source = None if data is None else _source(data)
    backend, devices = replicas.backend, list(map(str, replicas.devices))
    if seed is not None:
        seed = integer("seed", seed, 0)

    def unpack(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
        groups: dict[str, Any] = {"slot": {}, "value": {}, "stream": {},
                                  "extra": {}}
        for key, x in arrays.items():
            group, _, name = key.partition(":")
            groups[group][name] = x
        place = header["engine"], list(map(str, header["devices"]))
        at = header["position"]
        if at is not None:
            epoch, number = at["position"]
            at = {name: at[name] for name in _ORDER} | {"position": (
                integer("position", epoch, 0), integer("position", number, 0))}
        for request in header["grad_req"].values():
            messages.check_grad_req(request)
        put_back = [_host_streams(header["numpy"], header["python"])]
        if seed is None and place == (backend.name, devices):
            put_back.append(backend.fit_streams(groups["stream"]))
        return (place, trainer_states.unpack(header["states"],
                                             groups["slot"]),
                groups["value"], put_back, header["grad_req"], at,
                # older files have none
                extra_states.unpack(header.get("extra", {}), groups["extra"]))

    (place, states, values, put_back, requests, position,
     extra) = files.read_arrays(
        file, FORMAT, "a file of mgpu.save_checkpoint", unpack)
    _check_values(replicas, values, len(place[1]))
    put_values = replicas.fit_numpy(values)
    if seed is None and place != (backend.name, devices):
        raise ValueError(
            "random streams belong to an engine and its devices; received a "
            f"checkpoint of {place[0]} on [{', '.join(place[1])}] for "
            f"{replicas!r}. Pass seed= to begin new streams, or use the same "
            "devices.")
    _check_position(position, source)
    _check_extra(replicas, extra, len(place[1]))

    def apply() -> None:
        trainer.import_states(states)       # the last that may refuse
        replicas.network.set_extra_states({
            name: [extra_states.build(every[i % len(every)], backend, device)
                   for i, device in enumerate(replicas.devices)]
            for name, every in extra.items()})
        put_values()
        for p in replicas.params():
            if requests.get(p.name, p.grad_req) != p.grad_req:
                p.grad_req = requests[p.name]
        if source is not None:
            source.position = position["position"]
    replicas.network.follow()   # what the user has set meanwhile
    backend.uninterrupted(apply)
    # In this thread: MXNet's streams are those of the thread that queues.
    if seed is not None:
        backend.seed(seed)
    for put in put_back:
        put()


def _check_between_steps(replicas: Replicas, trainer: Trainer) -> None:
    backend = replicas.backend
    for p in replicas.params():
        request = p.grad_req
        if request == "null":
            continue
        if trainer.pending or any(map(backend.is_fresh, p.list_data())):
            raise RuntimeError(
                "a checkpoint holds no gradients; received a trainer whose "
                f"step is not done: {p.name!r} has a new gradient. Save after "
                "Trainer.step or, where no step is to apply the batch, after "
                "Replicas.zero_grad.")
        if request == "add" and any(backend.to_numpy(g).any()
                                    for g in p.list_grad()):
            raise RuntimeError(
                "a checkpoint holds no gradients; received one of "
                f"{p.name!r}, with grad_req='add', that is not zero. Save "
                "after Replicas.zero_grad.")


def _source(data: Any) -> BatchIterator:
    source = data.data if isinstance(data, Prefetched) else data
    if not isinstance(source, BatchIterator):
        raise TypeError(
            "a position is that of a BatchIterator (mgpu.datasets), or of "
            f"mgpu.prefetch of one; received {type(source).__name__}. Leave "
            "data out, and bring your data to its place yourself.")
    return source


def _position(data: Any) -> dict[str, Any]:
    source = _source(data)
    return {"position": source.stepped,
            **{name: getattr(source, name) for name in _ORDER}}


def _check_position(saved: Any, source: BatchIterator | None) -> None:
    if saved is None and source is None:
        return
    wrong = []
    if saved is None or source is None:
        wrong.append("data without a position in the file" if saved is None
                     else "a position in the file without data")
    else:
        wrong += [f"{name}={getattr(source, name)!r} for a position with "
                  f"{saved[name]!r}" for name in _ORDER
                  if saved[name] != getattr(source, name)]
        _, number = saved["position"]
        if number >= len(source):
            wrong.append(f"batch {number} of {len(source)}")
    if wrong:
        raise ValueError(
            "a position counts the batches of one order; received "
            f"{'; '.join(wrong)}. Pass as data what the run that saved "
            "passed.")


def _check_values(replicas: Replicas, values: Mapping[str, np.ndarray],
                  count: int) -> None:
    """Refuse what `Replicas.import_numpy` would round, or cannot tell."""
    wrong, apart = [], []
    for p in replicas.all_parameters():
        x = values.get(p.name)
        if x is None or p.shape is None:
            continue
        if x.dtype.name != p.dtype != "bfloat16":   # NumPy has no such dtype
            wrong.append(f"{p.name} of {x.dtype} instead of {p.dtype}")
        if x.ndim > len(p.shape) and count != len(replicas):
            apart.append(p.name)
    if wrong:
        raise ValueError("a checkpoint is not rounded; received "
                         f"{'; '.join(wrong)}. Initialize with that dtype.")
    if apart:
        raise ValueError(
            f"the buffers of {count} devices ({apart[0]}, ...) differ, so "
            f"they are those of no other number; received {replicas!r}. Use "
            f"{count} devices, or train with batch_norm='average' or 'sync'.")


def _check_extra(replicas: Replicas, extra: Mapping[str, list[Any]],
                 count: int) -> None:
    names = replicas.network.extra_names()
    if set(extra) != set(names):
        raise ValueError(
            "a checkpoint holds what get_extra_state of the network's layers "
            f"gives; received {sorted(extra)} for {names}. Use the network "
            "that was saved (older versions of mgpu saved none).")
    apart = [name for name, every in extra.items()
             if len(every) not in (1, len(replicas))]
    if apart:
        raise ValueError(
            f"extra states of {count} devices ({apart[0]}, ...) differ, so "
            f"they are those of no other number; received {replicas!r}. Use "
            f"{count} devices.")


def _host_streams(numpy: Any, python: Any) -> Callable[[], None]:
    """A function that puts NumPy's and Python's global streams back."""
    version, internal, gauss = python
    python = version, tuple(internal), gauss
    random.Random().setstate(python)
    if not 0 <= numpy[2] <= len(numpy[1]):      # NumPy would read beyond it
        raise ValueError(f"a position in NumPy's stream of {numpy[2]}")
    np.random.RandomState().set_state(tuple(numpy))

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(tuple(numpy))
    return put_back
