"""A training in one file, from which it goes on to the bit.

The file is safetensors with digests (`tensor_files`): no pickle. With several
processes rank 0 writes it, and reads it for all.
"""
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu import extra_states, files, trainer_states
from mgpu.arguments import integer, is_number
from mgpu.backends import messages
from mgpu.datasets import BatchIterator
from mgpu.distributed import World
from mgpu.distributed.world import same_examples
from mgpu.parameters import BUFFERS
from mgpu.prefetching import Prefetched, order_of
from mgpu.replicas import Replicas
from mgpu.trainer import Trainer, check_pair

FORMAT = "mgpu checkpoint 2"
#: those that can be read
FORMATS = (FORMAT, "mgpu checkpoint 1")

#: what the order of a `BatchIterator` depends on
_ORDER = ("num_examples", "batch_size", "seed", "shuffle", "drop_last")

Data = BatchIterator | Prefetched | None
Arrays = dict[str, np.ndarray]


def save_checkpoint(file: files.FilePath, replicas: Replicas,
                    trainer: Trainer, data: Data = None) -> None:
    """Write what a training goes on from, whole or not at all.

    Call it between two steps, with several processes on every rank: rank 0
    alone writes, and the others go on when the file is there. The run that
    goes on from the file has the bits of the run that goes on from here. In
    the file are: weights, and what is frozen; the buffers of every device;
    what layers give by ``get_extra_state`` (torch: numbers, text, arrays, and
    lists, tuples and dicts of them); the trainer's slots, counts, rate and
    dynamic loss scale; of every process the random streams of the engine,
    NumPy's global one and Python's; the position in `data`. Options are not:
    the program that goes on makes network, trainer, schedule (a function of
    the number of the update) and data as this one did. Waits for pending
    work.

    Parameters
    ----------
    file : path
        A file that is there is replaced. It is safetensors, whatever its
        name.
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
    OSError
        The file cannot be written, or is a link (FileExistsError). One that
        was there is whole.
    WorkerFailed, ModelMismatch
        Another process could not save, or write; or the processes do not
        hold the same weights and states.

    Notes
    -----
    MXNet's random streams cannot be read. There, each save begins new ones,
    from a seed that `mgpu.seed`, the number of saves since and the device
    determine: the run that went on from the file equals the one that saved,
    not one that saved at other steps or never. On torch saving changes
    nothing.
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
        files.path_of(file)
        position = None if data is None else _position(data)
        with replicas.owned():
            _check_between_steps(replicas, trainer)
            states, slots = trainer_states.pack(trainer.export_states())
            extra = extra_states.pack(
                {name: [state] for name, state in
                 replicas.network.extra_states().items()}, backend)
            arrays = {f"slot:{name}": x for name, x in slots.items()}
            arrays |= {f"called:{name}": x
                       for name, x in (called or {}).items()}
            buffers = {}
            for p in replicas.all_parameters():
                if p.kind in BUFFERS:
                    buffers[p.name] = [backend.to_numpy(x)
                                       for x in p.list_data()]
                else:
                    arrays[f"value:{p.name}"] = backend.to_numpy(p.data())
        header = {
            "format": FORMAT, "engine": backend.name, "states": states,
            "grad_req": {p.name: p.grad_req for p in replicas.params()},
            "position": position, "loop": loop}
        if world.size > 1:
            # Times, in `loop`, are each rank's own.
            world.agree("save_checkpoint", {
                **header, "loop": None, "digests": {
                    name: _digest(x) for name, x in arrays.items()}},
                "These are the same after every step. Change them alike on "
                "all ranks, or on none.")
        more, others = _of_all_ranks(world, backend, buffers, extra,
                                     list(map(str, replicas.devices)))
        if world.is_main:
            files.write_arrays(file, {**header, **more}, arrays | others)
        world.gather("save_checkpoint: written")


def _digest(x: np.ndarray) -> str:
    flat = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return hashlib.sha256(flat.data).hexdigest()[:32]


def _alike(every: Sequence[Any]) -> bool:
    return every[0] is not None and all(x == every[0] for x in every)


def _of_all_ranks(world: World, backend: Any,
                  buffers: Mapping[str, list[np.ndarray]],
                  extra: tuple[dict[str, Any], Arrays],
                  devices: list[str]) -> tuple[dict[str, Any], Arrays]:
    """What differs from device to device and from process to process: for
    the header, and arrays. Whole on rank 0 alone."""
    trees, more = extra
    # by name: one digest where all devices of this process agree
    marks: dict[str, Any] = {}
    for name, every in buffers.items():
        digests = [_digest(x) for x in every]
        marks[f"value:{name}"] = digests[0] if _alike(digests) else None
    for name, every in trees.items():
        marks[f"extra:{name}"] = [json.dumps(every), [
            _digest(x) for key, x in more.items()
            if key.startswith(f"{name}|")]] if len(every) == 1 else None
    told = world.gather("save_checkpoint: buffers", marks)
    joint = {name for name in marks if _alike([one[name] for one in told])}

    streams = backend.export_streams()
    numpy: Any = np.random.get_state()
    version, internal, gauss = random.getstate()
    own: Arrays = {f"stream|{name}": x for name, x in streams.items()
                   if x.dtype.kind != "U"}
    own |= {"host|numpy": numpy[1],
            "host|python": np.array(internal, np.uint32)}
    own |= {f"value|{name}": np.stack(every) for name, every
            in buffers.items() if f"value:{name}" not in joint}
    apart = [name for name in trees if f"extra:{name}" not in joint]
    own |= {f"extra|{key}": x for key, x in more.items()
            if key.rsplit("|", 2)[0] in apart}
    told = world.gather("save_checkpoint: streams", {
        "devices": devices, "numpy": [numpy[0], *numpy[2:]],
        "python": [version, gauss], "text": {
            name: str(x) for name, x in streams.items()
            if x.dtype.kind == "U"},
        "extra": {name: trees[name] for name in apart}})
    ranks = _collected(world, own)

    arrays: Arrays = {f"value:{name}": every[0] for name, every
                      in buffers.items() if f"value:{name}" in joint}
    arrays |= {f"extra:{key}": x for key, x in more.items()
               if key.rsplit("|", 2)[0] not in apart}
    for name in buffers:
        if f"value:{name}" not in joint:
            arrays[f"value:{name}"] = np.concatenate(
                [one[f"value|{name}"] for one in ranks])
    found = {name: every for name, every in trees.items()
             if name not in apart}
    for name in apart:      # a state for each device
        found[name] = []
        for one, facts in zip(ranks, told):
            every = facts["extra"][name]
            for i in range(len(facts["devices"])):
                j, g = i % len(every), len(found[name])
                found[name].append(every[j])
                begin = f"extra|{name}|{j}|"
                arrays |= {f"extra:{name}|{g}|{key.removeprefix(begin)}": x
                           for key, x in one.items() if key.startswith(begin)}
    for rank, one in enumerate(ranks):
        arrays |= {f"{key.replace('|', f':{rank}|', 1)}": x
                   for key, x in one.items()
                   if key.startswith(("stream|", "host|"))}
    return {"devices": [name for one in told for name in one["devices"]],
            "ranks": [len(one["devices"]) for one in told], "extra": found,
            "streams": [{key: one[key] for key in ("numpy", "python", "text")}
                        for one in told]}, arrays


def _collected(world: World, own: Arrays) -> list[Arrays]:
    """The arrays of every rank, on rank 0; elsewhere, the own ones in the
    place of all."""
    told = world.gather("save_checkpoint: arrays", [
        [name, x.dtype.str, list(x.shape)] for name, x in own.items()])
    found = [own]
    for rank, entries in enumerate(told[1:], 1):
        sizes = [int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
                 for _, dtype, shape in entries]
        flat = np.empty(sum(sizes), np.uint8)
        if rank == world.rank:
            flat = np.concatenate([np.ascontiguousarray(x).reshape(-1)
                                   .view(np.uint8) for x in own.values()])
        world.broadcast(flat, rank)
        one, end = {}, 0
        for (name, dtype, shape), size in zip(entries, sizes):
            begin, end = end, end + size
            one[name] = flat[begin:end].view(dtype).reshape(shape)
        found.append(one if world.is_main else own)
    return found


# -- going on -----------------------------------------------------------------

class Saved(NamedTuple):
    """What a file says, looked through."""

    engine: str
    devices: list[str]          # of all ranks
    ranks: list[int]            # how many devices each has
    states: trainer_states.TrainerStates
    values: Arrays
    extra: dict[str, list[Any]]
    requests: dict[str, str]
    position: dict[str, Any] | None
    streams: list[tuple[dict[str, Any], Arrays]]    # of each rank
    loop: dict[str, Any] | None


def load_checkpoint(file: files.FilePath, replicas: Replicas,
                    trainer: Trainer, data: Data = None, *,
                    seed: int | None = None) -> None:
    """Go on from a file of `save_checkpoint`.

    On the same engine, processes and devices the run has the bits of the one
    that saved. What an update that failed midway has torn is whole after it.
    After Ctrl-C inside the call, load again. With several processes call it
    on every rank: rank 0 reads the file, and the others receive what is in
    it.

    Parameters
    ----------
    file : path
    replicas, trainer, data
        Made as for the run that saved; `data` if and only if that gave it.
    seed : int, optional
        Begin new random streams of the engine, as `mgpu.seed` does, in the
        place of those in the file: for another engine, other devices, or
        another number of processes.

    Raises
    ------
    CheckpointCorrupt
        A ValueError: the file is damaged or no checkpoint. Nothing has
        changed.
    ValueError
        Values, states or data do not
        fit; other devices or another engine without `seed`; another number
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


Contents = tuple[dict[str, Any], Arrays]


def read(file: files.FilePath) -> Contents:
    """The header and the arrays of a whole checkpoint. CheckpointCorrupt,
    OSError."""
    def unpack(header: dict[str, Any], arrays: Arrays) -> Contents:
        if header["format"] != FORMAT:
            header, arrays = _of_format_1(header, arrays)
        _saved(header, arrays)
        return header, arrays
    return files.read_arrays(file, FORMATS, "a file of mgpu.save_checkpoint",
                             unpack)


def load(file: files.FilePath, contents: Contents | None, replicas: Replicas,
         trainer: Trainer, data: Data = None, seed: int | None = None,
         cure: str = "seed=") -> dict[str, Any] | None:
    """`load_checkpoint` of what rank 0 has read from `file`, inside of
    `World.telling`. Returns where `train` was. `cure`: how to ask for new
    streams."""
    source = None if data is None else _source(data)
    span, backend = replicas.span, replicas.backend
    if seed is not None:
        seed = integer("seed", seed, 0)
    replicas.check_complete()
    header, arrays = _shared(span.world, contents)
    saved = _saved(header, arrays)
    told = span.world.gather("load_checkpoint: devices",
                             list(map(str, replicas.devices)))
    own_place = (backend.name, [name for names in told for name in names],
                 list(map(len, told)))
    place = saved.engine, saved.devices, saved.ranks
    rank = span.world.rank
    host, streams = saved.streams[rank if rank < len(saved.streams) else 0]

    wrong: list[str] = []

    def checked(check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except ValueError as error:
            wrong.append(str(error))
    count = len(saved.devices)
    values = _own_values(replicas, saved.values, count, wrong)
    put_values = checked(replicas.fit_numpy, values)
    put_states = checked(trainer.fit_states, saved.states, "the checkpoint")
    if seed is None and place != own_place:
        wrong.append(
            "random streams belong to an engine and its devices; received "
            f"a checkpoint of {_place(*place)} for {_place(*own_place)}. "
            f"Pass {cure} to begin new streams, or use the same devices.")
    checked(_check_position, saved.position, source)
    checked(_check_extra, replicas, saved.extra, count)
    if wrong:
        raise ValueError(" Besides, ".join(wrong))
    put_back = [_host_streams(host, streams)]
    if seed is None:
        put_back.append(_fitted(file, backend, host, streams))
    span.world.gather("load_checkpoint: it fits")

    def apply() -> None:
        put_states()
        replicas.network.set_extra_states({
            name: extra_states.build(every[span.first % len(every)], backend,
                                     replicas.devices[0])
            for name, every in saved.extra.items()})
        put_values()
        for p in replicas.params():
            if saved.requests.get(p.name, p.grad_req) != p.grad_req:
                p.grad_req = saved.requests[p.name]
        if source is not None and saved.position is not None:
            source.position = saved.position["position"]
    backend.uninterrupted(apply)
    # In this thread: MXNet's streams are those of the thread that queues.
    if seed is not None:
        backend.seed(seed)
    for put in put_back:
        put()
    return saved.loop


def _place(engine: str, devices: Sequence[str], ranks: Sequence[int]) -> str:
    return f"{engine} on [{', '.join(devices)}]" + (
        f" of {len(ranks)} processes with {', '.join(map(str, ranks))} "
        "devices" if len(ranks) > 1 else "")


def _fitted(file: Any, backend: Any, host: Mapping[str, Any],
            streams: Mapping[str, np.ndarray]) -> Callable[[], None]:
    try:
        return backend.fit_streams({
            **{name: np.array(text) for name, text in host["text"].items()},
            **{key.removeprefix("stream|"): x for key, x in streams.items()
               if key.startswith("stream|")}})
    except Exception as error:
        raise files.corrupt(file, "a file of mgpu.save_checkpoint", error
                            ) from error


def _shared(world: World, contents: Contents | None) -> Contents:
    """What rank 0 has read, on every rank."""
    header, arrays = contents or ({}, {})
    if world.size == 1:
        return header, arrays
    text = json.dumps([header, [[name, x.dtype.str, list(x.shape)]
                                for name, x in arrays.items()]]).encode()
    size = world.gather("load_checkpoint", len(text))[0]
    flat = np.frombuffer(bytearray(text), np.uint8) if world.is_main \
        else np.empty(size, np.uint8)
    world.broadcast(flat)
    header, entries = json.loads(flat.tobytes())
    found = {}
    for name, dtype, shape in entries:
        x = np.array(arrays[name], order="C") if world.is_main \
            else np.empty(shape, dtype)
        if x.size:
            world.broadcast(x.reshape(-1).view(np.uint8))
        found[name] = x
    return header, found


def _saved(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
           ) -> Saved:
    """An Exception for what `write` cannot have written."""
    groups: dict[str, Any] = {"slot": {}, "value": {}, "stream": {},
                              "host": {}, "extra": {}, "called": {}}
    for key, x in arrays.items():
        group, _, name = key.partition(":")
        groups[group][name] = x
    at = header["position"]
    if at is not None:
        epoch, number = at["position"]
        at = {name: at[name] for name in _ORDER} | {"position": (
            integer("position", epoch, 0), integer("position", number, 0)),
            "contents": list(at.get("contents", ()))}
    for request in header["grad_req"].values():
        messages.check_grad_req(request)
    streams: list[tuple[dict[str, Any], Arrays]] = []
    for rank, host in enumerate(header["streams"]):
        own = {f"{group}|{key.removeprefix(f'{rank}|')}": x
               for group in ("stream", "host")
               for key, x in groups[group].items()
               if key.startswith(f"{rank}|")}
        _host_streams(host, own)
        streams.append((host, own))
    strange = [key for group in ("stream", "host") for key in groups[group]
               if key.partition("|")[0] not in map(str, range(len(streams)))]
    strange += [key for key in groups["extra"]
                if key.rsplit("|", 2)[0] not in header["extra"]]
    if strange:
        raise ValueError(f"an array {strange[0][:200]!r} of nothing")
    devices = [*map(str, header["devices"])]
    ranks = [integer("devices", n, 1) for n in header["ranks"]]
    if sum(ranks) != len(devices) or len(ranks) != len(streams):
        raise ValueError(f"{len(devices)} devices of ranks with {ranks}")
    loop = header.get("loop")
    if loop is not None:
        _check_loop(loop)
        loop = {**loop, "arrays": groups["called"]}
    return Saved(str(header["engine"]), devices, ranks,
                 trainer_states.unpack(header["states"], groups["slot"]),
                 groups["value"],
                 extra_states.unpack(header["extra"], groups["extra"]),
                 header["grad_req"], at, streams, loop)


def _check_loop(loop: Mapping[str, Any]) -> None:
    epochs = integer("epochs", loop["epochs"], 0)
    if loop["test_epoch"] is not None:
        integer("test_epoch", loop["test_epoch"], 0)
    history = loop["history"]
    for size in loop["sizes"]:
        integer("rows", size, 0)
    for name, each in history.items():
        if name == "devices":
            continue
        if not all(is_number(x) for x in each) \
                or len(each) != epochs and name != "loss_per_step" \
                and (each or name != "test_acc"):
            raise ValueError(f"a history with {name} of {len(each)}")
    if len(history["loss_per_step"]) < len(loop["sizes"]):
        raise ValueError("fewer losses than steps")


def _of_format_1(header: dict[str, Any], arrays: Arrays) -> Contents:
    """A file of mgpu 0.1 as one of today."""
    numpy, (version, internal, gauss) = header["numpy"], header["python"]
    found = {f"stream:0|{key[7:]}" if key.startswith("stream:") else key: x
             for key, x in arrays.items()}
    text = {key[7:]: str(found.pop(f"stream:0|{key[7:]}"))
            for key, x in arrays.items()
            if key.startswith("stream:") and x.dtype.kind == "U"}
    found["host:0|numpy"] = np.array(numpy[1], np.uint32)
    found["host:0|python"] = np.array(internal, np.uint32)
    return {**header, "ranks": [len(header["devices"])],
            # older files have none
            "extra": header.get("extra", {}), "streams": [{
                "numpy": [numpy[0], *numpy[2:]], "python": [version, gauss],
                "text": text}]}, found


def _check_between_steps(replicas: Replicas, trainer: Trainer) -> None:
    backend = replicas.backend
    for p in filter(trainer.trains, replicas.params()):
        request = p.grad_req
        if request == "null":
            continue
        if trainer.pending or backend.is_fresh(p.data()):
            raise RuntimeError(
                "a checkpoint holds no gradients; received a trainer whose "
                f"step is not done: {p.name!r} has a new gradient. Save after "
                "Trainer.step or, where no step is to apply the batch, after "
                "Replicas.zero_grad.")
        if request == "add" and backend.to_numpy(p.grad()).any():
            raise RuntimeError(
                "a checkpoint holds no gradients; received one of "
                f"{p.name!r}, with grad_req='add', that is not zero. Save "
                "after Replicas.zero_grad.")


def _source(data: Any) -> BatchIterator:
    source = order_of(data)
    if source is None:
        raise TypeError(
            "a position is that of a BatchIterator (mgpu.datasets), or of "
            f"mgpu.prefetch of one; received {type(data).__name__}. Leave "
            "data out, and bring your data to its place yourself.")
    return source


def _position(data: Any) -> dict[str, Any]:
    source = _source(data)
    return {"position": source.stepped, "contents": source.contents, **{
        name: getattr(source, name) for name in _ORDER}}


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
        if not same_examples(saved["contents"], source.contents):
            wrong.append("other examples than those of the position")
        _, number = saved["position"]
        if number >= len(source):
            wrong.append(f"batch {number} of {len(source)}")
    if wrong:
        raise ValueError(
            "a position counts the batches of one order; received "
            f"{'; '.join(wrong)}. Pass as data what the run that saved "
            "passed.")


def _own_values(replicas: Replicas, values: Mapping[str, np.ndarray],
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
        if p.kind not in BUFFERS or x.shape != (count, *p.shape):
            continue
        if count != span.total:
            apart.append(p.name)
            found[p.name] = x[0]
        else:
            own = x[span.first:span.first + len(replicas)]
            found[p.name] = own if len(own) > 1 else own[0]
    if rounded:
        wrong.append("a checkpoint is not rounded; received "
                     f"{'; '.join(rounded)}. Initialize with that dtype.")
    if apart:
        wrong.append(
            f"the buffers of {count} devices ({apart[0]}, ...) differ, so "
            f"they are those of no other number; received {replicas!r}. Use "
            f"{count} devices, or train with batch_norm='average' or 'sync'.")
    return found


def _check_extra(replicas: Replicas, extra: Mapping[str, list[Any]],
                 count: int) -> None:
    names = replicas.network.extra_names()
    if set(extra) != set(names):
        raise ValueError(
            "a checkpoint holds what get_extra_state of the network's layers "
            f"gives; received {sorted(extra)} for {names}. Use the network "
            "that was saved (older versions of mgpu saved none).")
    apart = [name for name, every in extra.items()
             if len(every) not in (1, replicas.span.total)]
    if apart:
        raise ValueError(
            f"extra states of {count} devices ({apart[0]}, ...) differ, so "
            f"they are those of no other number; received {replicas!r}. Use "
            f"{count} devices.")


def _host_streams(host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
                  ) -> Callable[[], None]:
    """A function that puts NumPy's and Python's global streams back."""
    name, place, *rest = host["numpy"]
    keys = arrays["host|numpy"]
    version, gauss = host["python"]
    python = version, tuple(arrays["host|python"].tolist()), gauss
    random.Random().setstate(python)
    if not 0 <= place <= len(keys):     # NumPy would read beyond it
        raise ValueError(f"a position in NumPy's stream of {place}")
    numpy = name, keys, place, *rest
    np.random.RandomState().set_state(numpy)

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
    return put_back
