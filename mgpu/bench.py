"""How fast this machine trains, where the time goes, and what more devices
would give: `mgpu bench`.
"""
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any

import numpy as np

from mgpu import models, plotting, probes, profiling
from mgpu.arguments import integer
from mgpu.backends import get_backend, using_backend
from mgpu.collectives import allreduce_many
from mgpu.device import Device, as_devices, cpu_cores, list_devices
from mgpu.doctor import versions
from mgpu.initializers import Xavier
from mgpu.losses import SoftmaxCrossEntropyLoss
from mgpu.profiling import Profile, fit
from mgpu.parameters import get_params
from mgpu.replicas import initialize
from mgpu.nested import rows_of
from mgpu.split import split_batch
from mgpu.trainer import Trainer
from mgpu.training import (backward, grad, parallel, put, record, sgd,
                           train_batch)

MODELS = ("lenet", "resnet18")
#: small: the numbers stay finite for any number of steps
_RATE = 0.001
_PARTS = ("dispatch", "copy", "compute", "reduce", "update", "other")

Report = dict[str, Any]


@dataclass
class _Contender:
    """A network in training, on one engine and one list of devices."""

    backend: str
    devices: list[Device]
    step: Callable[[int], Any]      # trains on the first n rows
    sizes: list[int]                # elements of each trained array
    batch_size: int

    def steps(self, count: int, rows: int) -> float:
        """Seconds of `count` steps."""
        with using_backend(self.backend) as engine:
            engine.synchronize(self.devices)
            begin = time.perf_counter()
            for _ in range(count):
                self.step(rows)
            engine.synchronize(self.devices)
            return time.perf_counter() - begin


# -- networks -----------------------------------------------------------------

def _prepare(model: str | Callable[[], Any], devices: list[Device],
             batch_size: int, shape: tuple[int, ...], classes: int,
             dtype: str, seed: int) -> _Contender:
    """On the engine in use."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(batch_size, *shape)).astype(dtype)
    y = rng.integers(0, classes, batch_size).astype(np.int32)
    if model == "lenet":
        start = models.lenet_params(0.1, seed, dtype)
        params = [get_params(start, d) for d in devices]
        step = partial(_lenet_step, X, y, params, devices)
        sizes = [p.size for p in start]
    else:
        net = models.resnet18(classes, shape[0]) if model == "resnet18" \
            else model()
        replicas = initialize(net, devices, init=Xavier(), seed=seed,
                              sample=X[:1], dtype=dtype)
        trainer = Trainer(replicas, "sgd", {"learning_rate": _RATE})
        loss = SoftmaxCrossEntropyLoss()

        def step(n: int) -> Any:
            return train_batch(X[:n], y[:n], replicas, loss, trainer)
        sizes = [prod(p.shape) for p in replicas.params()]
    return _Contender(get_backend().name, devices, step, sizes, batch_size)


def _lenet_step(X: np.ndarray, y: np.ndarray, params: list[list[Any]],
                devices: list[Device], n: int) -> Any:
    """The text's step from scratch, with the stages of `Profile`."""
    def gradients() -> list[list[Any]]:
        return [[grad(p) for p in own] for own in params]

    stage = probes.stage
    with probes.step(devices, n):
        with stage("copy", "split"):
            X_shards, y_shards = split_batch(X[:n], y[:n], devices)
        with record(), stage("compute", "forward and loss",
                             results=lambda: losses):
            losses = parallel(_lenet_losses, X_shards, y_shards, params)
        with stage("compute", "backward", devices, gradients, [
                i for i, x in enumerate(losses) if x is not None]):
            backward(losses)
        with stage("reduce", "all-reduce", results=gradients):
            allreduce_many(list(zip(*gradients())))
        with stage("update", "update", results=lambda: params):
            parallel(partial(sgd, lr=_RATE, batch_size=n), params)
    return losses


def _lenet_losses(X: Any, y: Any, params: list[Any]) -> Any:
    if not rows_of(X):      # fewer rows than devices
        return None
    return SoftmaxCrossEntropyLoss()(models.lenet_forward(X, params), y)


# -- the benchmark ------------------------------------------------------------

def run(model: str | Callable[[], Any] = "lenet",
        devices: Sequence[Any] = (1, 2), *,
        backends: Sequence[str] | None = None, batch_size: int = 256,
        steps: int = 5, rounds: int = 7, dtype: str = "float32",
        shape: Sequence[int] = (1, 28, 28), classes: int = 10,
        predict_for: Sequence[int] = (), seed: int = 0, name: str = "",
        trace: Any = None, progress: bool = False) -> Report:
    """Train a network on random data, on several lists of devices in turn.

    Each (engine, devices) is a contender. They take turns, `steps` steps
    each, all devices waited for before and after; every second round goes
    the other way round, so that no one always follows the same neighbour.
    Then each trains some steps more inside a `Profile`, with the whole
    batch, a half and a quarter of it. Nothing is evaluated, and the data
    are on the host, as in training.

    Parameters
    ----------
    model : "lenet", "resnet18", or a function
        The text's networks (`models.lenet` from scratch, `models.resnet18`
        with `Replicas` and a `Trainer`), or a function without arguments
        that makes a native network of the engine in use.
    devices : sequence
        Numbers of devices, or lists of devices; a contender each.
    backends : sequence of str, optional
        Default: the engine in use.
    batch_size : int
        Rows of a step over all devices: the same for each contender.
    steps, rounds : int
        `rounds` is 2 or more: the first one is not counted.
    dtype : {"float32", "float64"}
    shape, classes : sequence of int, int
        Of one example, and of the labels. For LeNet (1, 28, 28) and 10.
    predict_for : sequence of int
        Numbers of devices to `predict`, beside those that are measured.
    seed : int
        Of the data and the weights.
    name : str
        What the report calls a `model` that is a function.
    trace : file, optional
        Write the spans of all contenders (`Profile.chrome_trace`).
    progress : bool
        Draw a bar (tqdm; without the package there is none).

    Returns
    -------
    dict
        Fit for JSON. ``"model"``, ``"batch_size"``, ``"steps"``,
        ``"rounds"``, ``"dtype"``, ``"shape"``, ``"classes"``, ``"seed"``,
        ``"versions"``, ``"cpu_cores"``; ``"contenders"``, a list of dicts:

        - ``"backend"``, ``"devices"``;
        - ``"seconds"``: of a step, by counted round;
        - ``"images_per_second"``, and ``"ratio"`` to the first contender
          round by round (above 1: faster): each ``{"median", "min",
          "max"}``;
        - ``"table"``, ``"verdict"``, ``"profiling_cost"``: of its Profile;
          ``"parts"``: medians of `Profile.parts`, seconds per step;
        - ``"predicted"``: `predict` for so many devices, from measurements
          on one; ``"error"``: predicted over measured seconds, minus 1.

        ``"measurements"``: by engine, what `predict` takes.
        ``"predictions"``: by engine, a list for the numbers in `predict_for`.

    Raises
    ------
    ValueError, TypeError
        A wrong argument. Nothing has been measured then; nor where the
        network raises an error of its own, because data of this shape do
        not fit it.
    """
    batch_size = integer("batch_size", batch_size, 1)
    steps, rounds = integer("steps", steps, 1), integer("rounds", rounds, 2)
    wanted = [integer("a number of devices to predict", k, 1)
              for k in predict_for]
    shape = tuple(integer("a side of the shape", n, 1) for n in shape)
    classes = integer("classes", classes, 1)
    if dtype not in ("float32", "float64"):
        raise ValueError(f"unknown dtype; received {dtype!r}. Use 'float32' "
                         "or 'float64'.")
    if isinstance(model, str) and model not in MODELS:
        raise ValueError(f"unknown model; received {model!r}. Use one of "
                         f"{', '.join(map(repr, MODELS))}, or a function "
                         "that makes a network.")
    if model == "lenet" and (shape, classes) != ((1, 28, 28), 10):
        raise ValueError("LeNet takes pictures of (1, 28, 28) in 10 classes; "
                         f"received {shape} and {classes}. Use resnet18, or "
                         "a network of your own.")
    if not devices:
        raise ValueError("at least one number of devices is needed; received "
                         "none.")
    engines = [get_backend().name] if backends is None else list(backends)
    plan = []
    for engine in engines:
        with using_backend(engine):
            plan += [(engine, as_devices(entry) if isinstance(
                entry, (list, tuple, str, Device)) else list_devices(entry))
                for entry in devices]
    make = partial(_prepare, model, batch_size=batch_size, shape=shape,
                   classes=classes, dtype=dtype, seed=seed)
    contenders = []
    for engine, places in plan:
        with using_backend(engine):
            contenders.append(make(devices=places))

    seconds = _alternate(contenders, steps, rounds, progress)
    profiles: dict[str, Profile] = {}
    rows = []
    for contender, own in zip(contenders, seconds):
        profile = _profile(contender, steps)
        profiles[f"{contender.backend} on {_named(contender)}"] = profile
        rows.append({
            "backend": contender.backend,
            "devices": [str(d) for d in contender.devices],
            "seconds": own,
            "images_per_second": _spread([batch_size / s for s in own]),
            "ratio": _spread([a / b for a, b in zip(seconds[0], own)]),
            "table": profile.table(), "parts": _parts(profile, batch_size),
            "verdict": profile.verdict(), "profiling_cost": profile.cost(),
            "predicted": None, "error": None})
    measurements: dict[str, Any] = {}
    predictions: dict[str, Any] = {}
    if wanted or any(len(c.devices) > 1 for c in contenders):
        for engine in dict.fromkeys(engines):
            measurements[engine] = found = _measure(
                engine, contenders, profiles, make, steps, dtype)
            predictions[engine] = [predict(found, k) for k in wanted]
        for row in rows:
            row["predicted"] = predict(measurements[row["backend"]],
                                       len(row["devices"]))
            row["error"] = row["predicted"]["seconds"] \
                / statistics.median(row["seconds"]) - 1
    if trace is not None:
        profiling.write_chrome_trace(trace, profiles)
    return {
        "model": model if isinstance(model, str) else name or getattr(
            model, "__name__", repr(model)),
        "batch_size": batch_size, "steps": steps, "rounds": rounds,
        "dtype": dtype, "shape": list(shape), "classes": classes,
        "seed": seed, "versions": versions(map(_engine, dict.fromkeys(
            engines))), "cpu_cores": cpu_cores(), "contenders": rows,
        "measurements": measurements, "predictions": predictions}


def _engine(name: str) -> Any:
    with using_backend(name) as engine:
        return engine


def _named(contender: _Contender) -> str:
    return ", ".join(map(str, contender.devices))


def _alternate(contenders: list[_Contender], steps: int, rounds: int,
               progress: bool) -> list[list[float]]:
    """Seconds of a step of each contender, by counted round."""
    seconds: list[list[float]] = [[] for _ in contenders]
    order = list(range(len(contenders)))
    turns = [(number, i) for number in range(rounds)
             for i in (order[::-1] if number % 2 else order)]
    for number, i in _with_bar(turns) if progress else turns:
        spent = contenders[i].steps(steps, contenders[i].batch_size)
        if number:
            seconds[i].append(spent / steps)
    return seconds


def _with_bar(turns: Sequence[Any]) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:     # the bar is a comfort, the package an extra
        return turns
    return tqdm(turns, desc="bench", unit="turn", leave=False)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values),
            "max": max(values)}


def _batches(contender: _Contender) -> list[int]:
    """The whole batch, a half and a quarter, with a row for each device."""
    whole = contender.batch_size
    least = min(whole, len(contender.devices))
    return sorted({max(least, whole // part) for part in (4, 2, 1)})


def _profile(contender: _Contender, steps: int) -> Profile:
    """`steps` steps by stage and as many as a whole, for each batch size."""
    profile = Profile(contender.devices)
    with using_backend(contender.backend):
        for rows in _batches(contender):
            contender.step(rows)    # a new size: memory, compiled kernels
            with profile:
                for _ in range(2 * steps):
                    contender.step(rows)
    return profile


def _parts(profile: Profile, rows: int) -> dict[str, float]:
    """Medians, which one slow step does not move."""
    found = [p for p in profile.parts() if p["rows"] == rows]
    return {name: statistics.median(p[name] for p in found)
            for name in (*_PARTS, "seconds")}


# -- prediction ---------------------------------------------------------------

def predict(measurements: Mapping[str, Any], k: int) -> dict[str, Any]:
    """What a step would take on `k` devices, from measurements on one.

    ``copy + dispatch k + (fixed + per_row rows/k) s + update s + reduce +
    other``, with ``s = k / min(k, c)`` and

    ``reduce = latency 2 (k - 1) arrays + 2 k bytes / bandwidth`` (none for
    one device).

    The host issues the work of one device after the other, so `dispatch`
    counts k times. Forward and backward share the rows (the largest shard
    counts) and run at the same time, as far as there are cores: k logical
    devices on room for c take turns, `s` as long. Each updates a full copy.
    The sum of the gradients reads and writes each device's arrays once, in
    one memory. The batch is copied once, whatever k is.

    Parameters
    ----------
    measurements : mapping
        Of one step of ``"rows"`` rows on one device, in seconds:
        ``"dispatch"``, ``"copy"``, ``"update"``, ``"other"``; of forward
        and backward, ``"fixed"`` and ``"per_row"`` (`mgpu.profiling.fit`).
        ``"arrays"`` and ``"bytes"`` of the gradients; ``"latency"``
        (seconds a message) and ``"bandwidth"`` (bytes a second);
        ``"room"``: how many devices can compute at once, or None for any
        number (GPUs).
    k : int

    Returns
    -------
    dict
        ``"devices"``, ``"seconds"``, ``"images_per_second"``; ``"parts"``:
        seconds by stage; ``"note"``: that there are fewer cores, or "".

    Raises
    ------
    ValueError
        `k` is no whole number, 1 or more.
    """
    k, m = integer("the number of devices", k, 1), measurements
    lanes = k if m["room"] is None else min(k, m["room"])
    turns = k / lanes
    parts = {
        "dispatch": k * m["dispatch"], "copy": m["copy"],
        "compute": turns * (m["fixed"] + m["per_row"] * ceil(m["rows"] / k)),
        "reduce": 0.0 if k == 1 else 2 * (k - 1) * m["arrays"] * m["latency"]
        + 2 * k * m["bytes"] / m["bandwidth"],
        "update": turns * m["update"], "other": m["other"]}
    seconds = sum(parts.values())
    note = "" if lanes == k else (
        f"{k} logical devices have room for {lanes} on the cores here: they "
        "take turns")
    return {"devices": k, "seconds": seconds,
            "images_per_second": m["rows"] / seconds, "parts": parts,
            "note": note}


def _measure(engine: str, contenders: list[_Contender],
             profiles: dict[str, Profile], make: Callable[..., _Contender],
             steps: int, dtype: str) -> dict[str, Any]:
    """What `predict` takes: from the contender on one device, or a new one
    where there is none."""
    with using_backend(engine):
        alone = next((c for c in contenders if c.backend == engine
                      and len(c.devices) == 1), None)
        if alone is None:
            most = max((c for c in contenders if c.backend == engine),
                       key=lambda c: len(c.devices))
            alone = make(devices=most.devices[:1])
            profile = _profile(alone, steps)
        else:
            profile = profiles[f"{engine} on {_named(alone)}"]
        parts = _parts(profile, alone.batch_size)
        sizes = _batches(alone)
        if len(sizes) > 1:
            fixed, per_row = fit(sizes, [_parts(profile, n)["compute"]
                                         for n in sizes])
        else:       # a batch of one row
            fixed, per_row = parts["compute"], 0.0
        latency, bandwidth = measure_reduce(
            [c.devices for c in contenders if c.backend == engine],
            len(alone.sizes), dtype)
    on_cpu = alone.devices[0].kind == "cpu"
    return {
        "rows": alone.batch_size, "fixed": fixed, "per_row": per_row,
        **{name: parts[name] for name in ("dispatch", "copy", "update")},
        # What the all-reduce of one device takes, which has nothing to do.
        "other": max(0.0, parts["other"] + parts["reduce"]),
        "arrays": len(alone.sizes),
        "bytes": sum(alone.sizes) * np.dtype(dtype).itemsize,
        "latency": latency, "bandwidth": bandwidth,
        "room": profiling.room_for_cpus() if on_cpu else None}


def measure_reduce(lists: Sequence[Sequence[Device]], arrays: int,
                   dtype: str = "float32", *, repeat: int = 5,
                   large: int = 1 << 22) -> tuple[float, float]:
    """Seconds a message and bytes a second of an all-reduce between two
    devices, on the engine in use: the best of `repeat` short ones.

    Messages: 2 for each of `arrays` arrays of one element. Bytes: an array
    of `large` bytes is read and written on each of two devices. The devices
    are the first two of the longest of `lists`; where it has but one,
    another logical CPU.
    """
    devices = list(max(lists, key=len))[:2]
    if len(devices) == 1:
        devices.append(next(d for d in (Device("cpu", 0), Device("cpu", 1))
                            if d not in devices))
    item = np.dtype(dtype).itemsize

    def best(count: int, size: int) -> float:
        columns = [[put(np.zeros(size, dtype), d) for d in devices]
                   for _ in range(count)]
        backend, found = get_backend(), []
        for _ in range(repeat + 1):     # once to warm up
            backend.synchronize(devices)
            begin = time.perf_counter()
            allreduce_many(columns)     # zeros for ever: no overflow
            backend.synchronize(devices)
            found.append(time.perf_counter() - begin)
        return min(found[1:])

    latency = best(arrays, 1) / (2 * arrays)
    size = max(1, large // item)
    return latency, 2 * 2 * size * item / best(1, size)


# -- the figure ---------------------------------------------------------------

#: those of the palette that do not stand for an engine
_COLOURS = {"dispatch": plotting._AMBER, "copy": plotting._PURPLE,
            "compute": plotting._SKY, "reduce": plotting._GREEN,
            "update": plotting._GREY, "other": "#d0d0d0"}


def plot(report: Report, file: plotting.FilePath) -> Any:
    """Draw what `run` returned: throughput with its spread and, where there
    is one, its prediction; and the parts of a step.

    Parameters
    ----------
    report : dict
        Of `run`.
    file : str or path
        ``.png`` (1800 pixels wide) or ``.svg``.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        Another ending of `file`.
    FileNotFoundError
        The folder of `file` is not there.
    ImportError
        Matplotlib is not installed.
    """
    path, rows = plotting._checked_file(file), report["contenders"]
    colours = plotting._engine_colours(
        list(dict.fromkeys(row["backend"] for row in rows)))
    names = [f"{row['backend']}, {len(row['devices'])}" for row in rows]
    figure = plotting._new_figure((12.0, 2.6 + 0.5 * len(rows)), dpi=150)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    speed, time_ = (plotting._plain(axes) for axes in figure.subplots(1, 2))

    for i, row in enumerate(rows):
        rate = row["images_per_second"]
        speed.barh(i, rate["median"], 0.7, color=colours[row["backend"]])
        speed.plot([rate["min"], rate["max"]], [i, i], linewidth=1.6,
                   color=plotting._INK, solid_capstyle="butt")
        for end in ("min", "max"):
            speed.plot(rate[end], i, "|", color=plotting._INK, markersize=9)
        if row["predicted"] is not None:
            mark, = speed.plot(
                row["predicted"]["images_per_second"], i, "D", markersize=7,
                markerfacecolor="white", markeredgecolor=plotting._INK,
                linestyle="none")
            mark.set_label("predicted" if i == 0 else None)
        speed.annotate(f"{row['ratio']['median']:.2f}×", (0, i), (6, 0),
                       textcoords="offset points", va="center",
                       color="white", fontweight="bold")
        left = 0.0
        for part in _PARTS:
            width = 1000 * max(0.0, row["parts"][part])
            time_.barh(i, width, 0.7, left=left, color=_COLOURS[part],
                       label=part if i == 0 else None)
            left += width
    for axes in (speed, time_):
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
    speed.set_xlabel("images per second (line: slowest to fastest round;\n"
                     "in the bars: times the first)")
    time_.set_xlabel("milliseconds of a step, by what the host waits for")
    if rows[0]["predicted"] is not None:
        speed.legend(loc="best", frameon=False)
    figure.legend(*time_.get_legend_handles_labels(), frameon=False,
                  loc="outside lower right", ncols=len(_PARTS))
    figure.suptitle(f"{report['model']}, batch {report['batch_size']}, "
                    f"{report['dtype']}, {report['cpu_cores']} cores",
                    color=plotting._INK, fontsize=13)
    plotting._write(figure, path)
    return figure


def check_plot(file: plotting.FilePath) -> None:
    """Refuse what `plot` would, before the work and not after it."""
    plotting._checked_file(file)
    plotting._new_figure((1.0, 1.0))
