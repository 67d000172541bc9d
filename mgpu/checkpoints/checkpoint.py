"""Checkpoints: the state of a training run in one file.

The format is safetensors with digests (`tensor_files`), without pickle. In
distributed training rank 0 writes it, and reads it for all ranks.
"""
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.backends import messages
from mgpu.checkpoints import extra_states, trainer_states
from mgpu.data.iterators import BatchIterator
from mgpu.data.prefetching import Prefetched, order_of
from mgpu.distributed import World
from mgpu.distributed.world import same_examples
from mgpu.training.parameters import BUFFERS
from mgpu.training.replicas import Replicas
from mgpu.training.trainer import Trainer, check_pair
from mgpu.utils import files
from mgpu.utils.arguments import integer
from mgpu.utils.signals import uninterrupted
from mgpu.utils.tensor_files import digest_of

FORMAT = "mgpu checkpoint 2"
#: those that can be read
FORMATS = (FORMAT, "mgpu checkpoint 1")

_EXPECTED = "a file of mgpu.save_checkpoint"

#: what the order of a `BatchIterator` depends on
_ORDER = ("num_examples", "batch_size", "seed", "shuffle", "drop_last")

Data = BatchIterator | Prefetched | None
Arrays = dict[str, np.ndarray]
#: a header and arrays
Contents = tuple[dict[str, Any], Arrays]


def save_checkpoint(file: files.FilePath, replicas: Replicas,
                    trainer: Trainer, data: Data = None) -> None:
    """Save the state of a training run, atomically.

    Call it between two steps, in distributed training on every rank: rank 0
    writes, and the other ranks wait for the file. A run that resumes from the
    file is bit-equal to the run that continues. The file holds: parameters,
    and which of them are frozen; the buffers of every device; gradients that
    no step has applied, or that accumulate; results of
    ``get_extra_state`` (torch: numbers, text, arrays, and lists, tuples
    and dicts of them); the trainer's states, counts, rate and dynamic loss
    scale; for every rank the random number generators of the backend, of
    NumPy (the global one) and of Python; the position in `data`. It does not
    hold options: the resuming program makes the same network, trainer,
    schedule (a function of the number of the update) and data. Waits for
    pending work.

    Parameters
    ----------
    file : path
        An existing file is replaced. The format is safetensors, whatever the
        extension.
    replicas : Replicas
    trainer : Trainer
        Of these replicas.
    data : BatchIterator, or `mgpu.prefetch` of one, optional
        The data of the loop. A resumed run starts with the batch after the
        last step: batches that were loaded since then are repeated
        (`BatchIterator.stepped`). Random numbers that its `transform` draws
        ahead of the loop are lost: with `mgpu.prefetch`, save between
        epochs in that case.

    Raises
    ------
    RuntimeError
        `data` is given, and a gradient waits for `Trainer.step` or
        accumulates (``grad_req="add"``); `Trainer.allreduce_grads` without
        its `Trainer.update`; an update failed midway; the parameters have no
        values yet; or another thread uses the replicas or loads from `data`.
    TypeError, ValueError
        Other objects than replicas, their trainer, or such data. An
        unsupported extra state; a buffer that a pass has created.
    OSError
        The file cannot be written, or is a link (FileExistsError). An
        existing file is unchanged.
    WorkerFailed, ModelMismatch
        Another rank failed to save or write; or parameters and states differ
        between ranks.

    Notes
    -----
    The state of MXNet's random number generators cannot be read. There, each
    save seeds them anew, determined by `mgpu.seed`, the number of saves since
    and the device: a resumed run equals the run that saved, but not a run
    that saved at other steps or never. On torch saving has no side effect.
    """
    write(file, replicas, trainer, data)


def write(file: files.FilePath, replicas: Replicas, trainer: Trainer,
          data: Data, loop: Mapping[str, Any] | None = None,
          called: Mapping[str, np.ndarray] | None = None) -> None:
    """`save_checkpoint`. `loop`: where `train` is, fit for JSON. `called`:
    arrays of its callbacks."""
    check_pair(replicas, trainer)
    world, backend = replicas.span.world, replicas.backend
    with world.guard():
        position = None if data is None else _export_position(data)
        with replicas.exclusive():
            if trainer.pending:
                raise RuntimeError(
                    "a checkpoint holds no summed gradients; received those "
                    "of allreduce_grads. Save after Trainer.update.")
            states, slots = trainer_states.pack(trainer.export_states())
            arrays = {f"{group}:{name}": x for group, every in (
                ("slot", slots), ("called", called or {}))
                for name, x in every.items()}
            own: Arrays = {}
            for p in replicas.all_parameters():
                if p.kind in BUFFERS:
                    own[f"value:{p.name}"] = np.stack(
                        [*map(backend.to_numpy, p.list_data())])
                else:
                    arrays[f"value:{p.name}"] = backend.to_numpy(p.data())
            own |= {f"grad:{world.rank}|{name}": x for name, x
                    in _gradients(replicas, trainer, data).items()}
            extra = {name: extra_states.pack(
                state, own, f"extra:{name}|0|", backend, (
                    "the extra state of a layer", repr(name),
                    "get_extra_state"))
                for name, state in replicas.network.extra_states().items()}
        header = {
            "format": FORMAT, "engine": backend.name, "states": states,
            "grad_req": {p.name: p.grad_req for p in replicas.params()},
            "position": position, "loop": loop}
        if world.size > 1:
            # Times, in `loop`, are each rank's own.
            world.agree("save_checkpoint", {
                **header, "loop": None, "digests": {
                    name: digest_of(x) for name, x in arrays.items()}},
                "These are the same after every step. Change them alike on "
                "all ranks, or on none.")
        streams, numbers = _export_streams(backend, world.rank)
        ranks = _all_gather(world, "save_checkpoint: ranks", ({
            "devices": [*map(str, replicas.devices)], "streams": streams,
            "extra": extra}, own | numbers))
        if world.is_main:
            joined, others = _join_ranks(ranks)
            files.write_arrays(file, {**header, **joined}, arrays | others)
        world.gather("save_checkpoint: written")


def _export_streams(backend: Any, rank: int) -> Contents:
    """The random streams of this process."""
    native = backend.export_streams()
    numpy: Any = np.random.get_state()
    version, python, gauss = random.getstate()
    texts = {name: str(native.pop(name)) for name, x in [*native.items()]
             if x.dtype.kind == "U"}
    return ({"numpy": [numpy[0], *numpy[2:]], "python": [version, gauss],
             "text": texts},
            {f"host:{rank}|numpy": numpy[1],
             f"host:{rank}|python": np.array(python, np.uint32),
             **{f"stream:{rank}|{name}": x for name, x in native.items()}})


def _all_gather(world: World, work: str, contents: Contents
                ) -> list[Contents]:
    """The header and the arrays of every rank, on every rank."""
    if world.size == 1:
        return [contents]
    header, arrays = contents
    found = []
    for rank, (other, plan) in enumerate(world.gather(work, [header, {
            name: [x.dtype.str, list(x.shape)]
            for name, x in arrays.items()}])):
        received = {name: np.empty(shape, dtype)
                    for name, (dtype, shape) in plan.items()}
        for name, x in received.items():
            if rank == world.rank:
                x[...] = arrays[name]
            if x.size:
                world.broadcast(x.reshape(-1).view(np.uint8), rank)
        found.append((other, received))
    return found


def _join_ranks(ranks: Sequence[Contents]) -> Contents:
    """What a file holds of all ranks: a buffer, or an extra state, once where
    it is the same on every device, else for each device."""
    arrays, extra = Arrays(), dict[str, list[Any]]()
    counts = [len(header["devices"]) for header, _ in ranks]
    for key in ranks[0][1]:
        if key.startswith("value:"):
            every = np.concatenate([own[key] for _, own in ranks])
            same = len({x.tobytes() for x in every}) == 1
            arrays[key] = every[0] if same else every
    for name in ranks[0][0]["extra"]:
        begin = f"extra:{name}|0|"
        states = [(header["extra"][name], {
            key.removeprefix(begin): x for key, x in own.items()
            if key.startswith(begin)}) for header, own in ranks]
        if len({repr((tree, {key: digest_of(x) for key, x in inside.items()}))
                for tree, inside in states}) == 1:
            states = states[:1]
        else:
            states = [one for one, count in zip(states, counts)
                      for _ in range(count)]
        extra[name] = [tree for tree, _ in states]
        arrays |= {f"extra:{name}|{i}|{key}": x for i, (_, inside)
                   in enumerate(states) for key, x in inside.items()}
    for _, own in ranks:
        arrays |= {key: x for key, x in own.items()
                   if key.startswith(("stream:", "host:", "grad:"))}
    return {"devices": [name for header, _ in ranks
                        for name in header["devices"]],
            "ranks": counts, "extra": extra,
            "streams": [header["streams"] for header, _ in ranks]}, arrays


# -- resuming -----------------------------------------------------------------

def load_checkpoint(file: files.FilePath, replicas: Replicas,
                    trainer: Trainer, data: Data = None, *,
                    seed: int | None = None) -> None:
    """Resume from a file of `save_checkpoint`.

    On the same backend, ranks and devices the run is bit-equal to the one
    that saved. Also repairs the state after an update that failed midway.
    After Ctrl-C inside the call, load again. In distributed training call it
    on every rank: rank 0 reads the file and sends its contents to the others.

    Parameters
    ----------
    file : path
    replicas, trainer, data
        Made as for the run that saved; `data` if and only if that run
        passed it.
    seed : int, optional
        Seed the random number generators, as `mgpu.seed` does, instead of
        restoring them: for another backend, other devices, or
        another number of processes.

    Raises
    ------
    CheckpointCorrupt
        A ValueError: the file is damaged or no checkpoint. Nothing has
        changed.
    ValueError
        Values, states or data do not
        fit; other devices or another backend without `seed`; another number
        of devices, and buffers (``batch_norm="per_device"``) that differ from
        device to device. All differences are listed, and nothing has changed.
    OSError
        The file cannot be opened.
    RuntimeError
        The parameters have no values yet.
    TypeError
        What is not replicas, their trainer, or such data.
    WorkerFailed
        Rank 0 cannot read the file, or it does not fit another process.
        Nothing has changed.
    """
    check_pair(replicas, trainer)
    world = replicas.span.world
    with world.guard():
        load(file, read(file) if world.is_main else None, replicas, trainer,
             data, seed)


def read(file: files.FilePath) -> Contents:
    """The header and the arrays of a whole checkpoint. CheckpointCorrupt,
    OSError."""
    return files.read_arrays(file, FORMATS, _EXPECTED, _upgrade)


def _unpack(header: Mapping[str, Any], arrays: Arrays
            ) -> tuple[trainer_states.TrainerStates, dict[str, Arrays]]:
    """The states of the trainer, and all arrays by the first part of their
    names. An Exception for what `write` does not write."""
    groups: dict[str, Arrays] = {name: {} for name in (
        "slot", "value", "stream", "host", "extra", "called", "grad")}
    for key, x in arrays.items():
        group, _, name = key.partition(":")
        groups[group][name] = x
    for request in header["grad_req"].values():
        messages.check_grad_req(request)
    for name, every in header["extra"].items():
        for i, tree in enumerate(every):
            extra_states.unpack(tree, groups["extra"], f"{name}|{i}|")
    return trainer_states.unpack(header["states"], groups["slot"]), groups


def load(file: files.FilePath, contents: Contents | None, replicas: Replicas,
         trainer: Trainer, data: Data = None, seed: int | None = None,
         cure: str = "seed=") -> tuple[Any, Arrays]:
    """`load_checkpoint` of what rank 0 has read from `file`, inside of
    `World.guard`. Returns where `train` was, and arrays of its callbacks.
    `cure`: how to ask for new streams."""
    source = None if data is None else _source(data)
    span, backend = replicas.span, replicas.backend
    if seed is not None:
        seed = integer("seed", seed, 0)
    replicas.check_complete()
    header, arrays = _all_gather(span.world, "load_checkpoint",
                                 contents or ({}, {}))[0]
    devices = span.world.gather("load_checkpoint: devices",
                                list(map(str, replicas.devices)))
    place = {"engine": backend.name, "ranks": [*map(len, devices)],
             "devices": [name for names in devices for name in names]}
    wrong: list[str] = []

    def checked(check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except ValueError as error:
            wrong.append(str(error))
    try:
        states, groups = _unpack(header, arrays)
        if seed is None and any(header[name] != x
                                for name, x in place.items()):
            wrong.append(
                "random streams belong to devices; received a checkpoint of "
                f"{_describe(header)} for {_describe(place)}. Pass {cure} to "
                "begin new streams, or use the same devices.")
        put_streams = _fit_streams(header, groups, span.world.rank, None
                                   if wrong or seed is not None else backend)
    except Exception as error:
        raise files.corrupt(file, _EXPECTED, error) from error
    put_values = checked(replicas.fit_numpy, _select_values(
        replicas, groups["value"], len(header["devices"]), wrong))
    put_states = checked(trainer.fit_states, states, "the checkpoint")
    gradients = _select_gradients(groups["grad"], replicas,
                                  len(header["ranks"]), wrong)
    checked(_check_position, header["position"], source)
    checked(_check_extra, replicas, header["extra"])
    if wrong:
        raise ValueError(" Besides, ".join(wrong))
    span.world.gather("load_checkpoint: it fits")

    def apply() -> None:
        put_states()
        replicas.network.set_extra_states({
            name: extra_states.unpack(
                every[i], groups["extra"], f"{name}|{i}|", backend,
                replicas.devices[0])
            for name, every in header["extra"].items()
            for i in [span.first % len(every)]})
        put_values()
        for p in replicas.params():
            if header["grad_req"].get(p.name, p.grad_req) != p.grad_req:
                p.grad_req = header["grad_req"][p.name]
            if p.name in gradients:
                p.put_grad(*gradients[p.name])
            elif trainer.trains(p):
                p.zero_grad()
        if source is not None:
            source.position = tuple(header["position"]["position"])
    uninterrupted(apply)
    # In this thread: MXNet's streams are those of the thread that queues.
    if seed is not None:
        backend.seed(seed)
    put_streams()
    return header.get("loop"), groups["called"]


def _describe(place: Mapping[str, Any]) -> str:
    return (f"{place['engine']} in {len(place['ranks'])} processes, on "
            f"[{', '.join(place['devices'])}]")


def _fit_streams(header: Mapping[str, Any], groups: Mapping[str, Arrays],
                 rank: int, backend: Any) -> Callable[[], None]:
    """A function that puts back the streams of NumPy and Python that `rank`
    had, or rank 0, and those of `backend` unless it is None."""
    rank = rank if rank < len(header["streams"]) else 0
    host, begin = header["streams"][rank], f"{rank}|"
    (name, *rest), (version, gauss) = host["numpy"], host["python"]
    numpy = name, groups["host"][begin + "numpy"], *rest
    python = (version, tuple(groups["host"][begin + "python"].tolist()),
              gauss)
    np.random.RandomState().set_state(numpy)
    random.Random().setstate(python)
    native = (lambda: None) if backend is None else backend.fit_streams({
        key.removeprefix(begin): x for key, x in groups["stream"].items()
        if key.startswith(begin)} | {
            name: np.array(text) for name, text in host["text"].items()})

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        native()
    return put_back


def _upgrade(header: dict[str, Any], arrays: Arrays) -> Contents:
    """A file of mgpu 0.1 as one of today."""
    if header["format"] == FORMAT:
        return header, arrays
    numpy, (version, python, gauss) = header["numpy"], header["python"]
    texts = {key.partition(":")[2]: str(arrays.pop(key))
             for key, x in [*arrays.items()] if x.dtype.kind == "U"}
    found = {key.replace("stream:", "stream:0|"): x
             for key, x in arrays.items()}
    found["host:0|numpy"] = np.array(numpy[1], np.uint32)
    found["host:0|python"] = np.array(python, np.uint32)
    return {"extra": {}, **header, "ranks": [len(header["devices"])],
            "streams": [{"numpy": [numpy[0], *numpy[2:]],
                         "python": [version, gauss], "text": texts}]}, found


def _gradients(replicas: Replicas, trainer: Trainer, data: Data) -> Arrays:
    """The gradients that no step has applied (0|name), or that are added up
    (1|name)."""
    backend, found = replicas.backend, Arrays()
    for p in filter(trainer.trains, replicas.params()):
        used = p.grad_req == "null" or not backend.is_fresh(p.data())
        if not used or p.grad_req == "add":
            x = backend.to_numpy(p.grad())
            if not used or x.any():
                found[f"{used:d}|{p.name}"] = x
    if found and data is not None:
        raise RuntimeError(
            "a position in the data is that of the last step; received "
            f"gradients of later batches, as {min(found)[2:]!r}. Save after "
            "Trainer.step or, where no step is to apply them, after "
            "Replicas.zero_grad.")
    return found


def _select_gradients(found: Arrays, replicas: Replicas, saved: int,
                      wrong: list[str]) -> dict[str, tuple[np.ndarray, bool]]:
    """The gradients of this rank, and whether a step has used them."""
    world = replicas.span.world
    if found and saved != world.size:
        wrong.append("each process has gradients of its own; received those "
                     f"of {saved} for {world.size}. Save after the step.")
    shapes = {p.name: p.shape for p in replicas.params()}
    own = {}
    for key, x in found.items():
        rank, used, name = key.split("|", 2)
        if rank == str(world.rank):
            own[name] = x, used == "1"
            if shapes.get(name) != x.shape:
                wrong.append(f"a gradient of {name} of shape {x.shape}")
    return own


def _source(data: Any) -> BatchIterator:
    source = order_of(data)
    if source is None:
        raise TypeError(
            "data is a BatchIterator (mgpu.datasets), or mgpu.prefetch of "
            f"one; received {type(data).__name__}. Leave it out.")
    return source


def _export_position(data: Any) -> dict[str, Any]:
    source = _source(data)
    return {"position": source.stepped, "contents": source.contents, **{
        name: getattr(source, name) for name in _ORDER}}


def _check_position(saved: Any, source: BatchIterator | None) -> None:
    if saved is None or source is None:
        wrong = [] if saved is source else [
            "data without a position in the file" if saved is None
            else "a position in the file without data"]
    else:
        wrong = [f"{name}={getattr(source, name)!r} for a position with "
                 f"{saved.get(name)!r}" for name in _ORDER
                 if saved.get(name) != getattr(source, name)]
        if not same_examples(saved.get("contents", ()), source.contents):
            wrong.append("other examples than those of the position")
        if saved["position"][1] >= len(source):
            wrong.append(f"batch {saved['position'][1]} of {len(source)}")
    if wrong:
        raise ValueError(f"received {'; '.join(wrong)}. Pass as data what "
                         "the run that saved passed.")


def _select_values(replicas: Replicas, values: Mapping[str, np.ndarray],
                   count: int, wrong: list[str]) -> Arrays:
    """The values of this rank's devices, of `count` in the file. What
    `Replicas.import_numpy` would round, or cannot tell, goes to `wrong`."""
    span, found = replicas.span, dict(values)
    rounded, apart = [], []
    for p in replicas.all_parameters():
        x = values.get(p.name)
        if x is None or p.shape is None:
            continue
        if x.dtype.name != p.dtype != "bfloat16":   # NumPy has no such dtype
            rounded.append(f"{p.name} of {x.dtype} instead of {p.dtype}")
        if p.kind in BUFFERS and x.shape == (count, *p.shape):
            if count != span.total:
                apart.append(p.name)
            own = x[span.first % count:][:len(replicas)]
            found[p.name] = own if len(own) == len(replicas) > 1 else own[0]
    if rounded:
        wrong.append("a checkpoint is not rounded; received "
                     f"{'; '.join(rounded)}. Initialize with that dtype.")
    if apart:
        wrong.append(_only_for("buffers", apart[0], count, replicas))
    return found


def _only_for(what: str, name: str, count: int, replicas: Replicas) -> str:
    return (f"the {what} of {count} devices ({name}, ...) differ, so they are "
            f"those of no other number; received {replicas!r}. Use {count} "
            "devices, or train with batch_norm='average' or 'sync'.")


def _check_extra(replicas: Replicas, extra: Mapping[str, list[Any]]) -> None:
    names = replicas.network.extra_names()
    if set(extra) != set(names):
        raise ValueError(
            "a checkpoint holds the extra states of layers; received "
            f"{sorted(extra)} for {names}. Use the network that was saved.")
    for name, every in extra.items():
        if len(every) not in (1, replicas.span.total):
            raise ValueError(_only_for("extra states", name, len(every),
                                     replicas))
