"""How fast this machine trains, where the time goes, and what more devices
would give: `mgpu bench`.
"""
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any

import numpy as np

from mgpu.backends import canonical, get_backend, using_backend
from mgpu.backends.device import Device, as_devices, cpu_cores, list_devices
from mgpu.collectives import allreduce_many
from mgpu.nn import models
from mgpu.nn.initializers import Xavier
from mgpu.nn.losses import SoftmaxCrossEntropyLoss
from mgpu.tools import chapters, profiling
from mgpu.tools.doctor import versions
from mgpu.tools.plotting.bench import plot_bench as plot
from mgpu.tools.plotting.style import check_figure as check_plot
from mgpu.tools.profiling import Profile, fit
from mgpu.tools.timing import Timer
from mgpu.training import put, train_batch
from mgpu.training.parameters import get_params
from mgpu.training.progress import ProgressBar
from mgpu.training.replicas import initialize
from mgpu.training.trainer import Trainer
from mgpu.utils import arguments
from mgpu.utils.arguments import integer, one_of

__all__ = ["MODELS", "check_plot", "measure_reduce", "plan", "plot", "predict",
           "run"]

MODELS = ("lenet", "resnet18")
#: small: the numbers stay finite for any number of steps
_RATE = 0.001
_PARTS = ("dispatch", *profiling.PARTS, "other")

Report = dict[str, Any]


@dataclass
class _Contender:
    """A network in training, on one backend and one list of devices."""

    backend: str
    devices: list[Device]
    step: Callable[[int], Any]      # trains on the first n rows
    sizes: list[int]                # elements of each trained array
    batch_size: int

    def title(self) -> str:
        return f"{self.backend} on {', '.join(map(str, self.devices))}"

    def steps(self, count: int, rows: int) -> float:
        """Seconds of `count` steps."""
        with using_backend(self.backend), get_backend().device_threads():
            timer = Timer(self.devices)
            for _ in range(count):
                self.step(rows)
            return timer.stop()


# -- networks -----------------------------------------------------------------

def _prepare(model: str | Callable[[], Any], settings: Mapping[str, Any],
             devices: list[Device]) -> _Contender:
    """A contender on the backend in use."""
    batch_size, shape = settings["batch_size"], settings["shape"]
    classes, dtype, seed = (settings[x] for x in ("classes", "dtype", "seed"))
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(batch_size, *shape)).astype(dtype)
    y = rng.integers(0, classes, batch_size).astype(np.int32)
    if model == "lenet":
        start = models.lenet_params(0.1, seed, dtype)
        params = [get_params(start, d) for d in devices]
        sizes = [p.size for p in start]

        def step(n: int) -> Any:
            return chapters.lenet_step(X[:n], y[:n], params, devices, _RATE)
    else:
        net = model() if callable(model) \
            else models.resnet18(classes, shape[0])
        replicas = initialize(net, devices, init=Xavier(), seed=seed,
                              sample=X[:1], dtype=dtype)
        trainer = Trainer(replicas, "sgd", {"learning_rate": _RATE})
        loss = SoftmaxCrossEntropyLoss()
        sizes = [prod(p.shape or ()) for p in replicas.params()]

        def step(n: int) -> Any:
            return train_batch(X[:n], y[:n], replicas, loss, trainer)
    return _Contender(get_backend().name, devices, step, sizes, batch_size)


# -- the benchmark ------------------------------------------------------------

def run(model: str | Callable[[], Any] = "lenet",
        devices: Sequence[Any] = (1, 2), *,
        backends: Sequence[str] | None = None, batch_size: int = 256,
        steps: int = 5, rounds: int = 7, dtype: str = "float32",
        shape: Sequence[int] = (1, 28, 28), classes: int = 10,
        predict_for: Sequence[int] = (), seed: int = 0, name: str = "",
        timeline: Any = None, progress: bool = False,
        trace: Any = None) -> Report:
    """Train a network on random data, on several lists of devices in turn.

    Each (backend, devices) is a contender. They take turns, `steps` steps
    each, all devices waited for before and after; every second round goes
    the other way round, so that no one always follows the same neighbour.
    Then each trains some steps more inside a `Profile`, with the whole
    batch, a half and a quarter of it. Nothing is evaluated, and the data
    are on the host, as in training.

    Parameters
    ----------
    model : "lenet", "resnet18", or a function
        The book's networks (LeNet from scratch, as in `mgpu.tools.chapters`;
        `models.resnet18` with `Replicas` and a `Trainer`), or a function
        without arguments that makes a native network of the backend in use.
    devices : sequence
        Numbers of devices, or lists of devices. Each is a contender.
    backends : sequence of str, optional
        Default: the backend in use.
    batch_size : int
        Rows of a step over all devices, the same for each contender.
    steps, rounds : int
        Steps of a contender in a round, and rounds. `rounds` is 2 or more,
        because the first one is not counted.
    dtype : {"float32", "float64"}
    shape, classes : sequence of int, int
        The shape of one example, and the number of classes. For LeNet
        (1, 28, 28) and 10; for ResNet-18 (channels, height, width).
    predict_for : sequence of int
        More numbers of devices to `predict`, which are not measured.
    seed : int
        Seed of the data and of the initial weights.
    name : str
        What the report calls a `model` that is a function.
    timeline : file, optional
        Write the spans of all contenders (`Profile.chrome_trace`).
    progress : bool
        Draw a progress bar, if tqdm is installed.
    trace : file, optional
        The former name of `timeline`, for one version.

    Returns
    -------
    dict
        Fit for JSON. ``"model"``, ``"batch_size"``, ``"steps"``,
        ``"rounds"``, ``"dtype"``, ``"shape"``, ``"classes"``, ``"seed"``,
        ``"versions"``, ``"cpu_cores"``; ``"contenders"``, a list of dicts:

        - ``"backend"``, ``"devices"``;
        - ``"seconds"``: seconds of a step, by counted round;
        - ``"images_per_second"``, and ``"ratio"`` to the first contender
          round by round (above 1: faster): each ``{"median", "min",
          "max"}``;
        - ``"table"``, ``"verdict"``, ``"profiling_cost"``: what its Profile
          says; ``"parts"``: medians of `Profile.parts`, seconds per step;
        - ``"predicted"``: what `predict` gives for as many devices, from
          measurements on one; ``"error"``: predicted over measured seconds,
          minus 1.

        ``"measurements"``: by backend, what `predict` takes.
        ``"predictions"``: by backend, a list for the numbers in `predict_for`.

    Raises
    ------
    ValueError, TypeError
        A wrong argument. Nothing has been measured then. The same is true
        where the network raises an error of its own, because it cannot take
        data of this shape.
    """
    settings: dict[str, Any] = {
        "batch_size": arguments.batch_size(batch_size),
        "steps": integer("steps", steps, 1),
        "rounds": integer("rounds", rounds, 2),
        "dtype": one_of("dtype", dtype, ("float32", "float64")),
        "shape": [integer("a side of the shape", n, 1) for n in shape],
        "classes": integer("classes", classes, 1), "seed": seed}
    _check_model(model, tuple(settings["shape"]), classes)
    counts = [integer("a number of devices to predict", k, 1)
              for k in predict_for]
    if not devices:
        raise ValueError("at least one number of devices is needed; received "
                         "none.")
    engines = [get_backend().name] if backends is None \
        else list(dict.fromkeys(map(canonical, backends)))
    make = partial(_prepare, model, settings)
    contenders = []
    for engine, places in plan(engines, devices):
        with using_backend(engine):
            contenders.append(make(places))

    seconds = _alternate(contenders, steps, rounds, progress)
    profiles = {c.title(): _profile(c, steps) for c in contenders}
    rows = [_row(c, own, seconds[0], profiles[c.title()])
            for c, own in zip(contenders, seconds)]
    measurements: dict[str, Any] = {}
    predictions: dict[str, Any] = {}
    if counts or any(len(c.devices) > 1 for c in contenders):
        for engine in engines:
            measurements[engine] = found = _measure(
                [c for c in contenders if c.backend == engine], profiles,
                make, steps, dtype)
            predictions[engine] = [predict(found, k) for k in counts]
        for row in rows:
            row["predicted"] = predict(measurements[row["backend"]],
                                       len(row["devices"]))
            row["error"] = row["predicted"]["seconds"] \
                / statistics.median(row["seconds"]) - 1
    timeline = trace if timeline is None else timeline
    if timeline is not None:
        profiling.write_chrome_trace(timeline, profiles)
    return {
        "model": model if isinstance(model, str) else name or getattr(
            model, "__name__", repr(model)),
        **settings, "versions": versions(engines), "cpu_cores": cpu_cores(),
        "contenders": rows, "measurements": measurements,
        "predictions": predictions}


def plan(backends: Sequence[str], devices: Sequence[Any]
         ) -> list[tuple[str, list[Device]]]:
    """The (backend, devices) of every run: each of `devices`, a number of
    devices or a list of them, on each backend. All are checked before the
    first run starts."""
    found = []
    for engine in backends:
        with using_backend(engine):
            found += [(engine, as_devices(entry) if isinstance(
                entry, (list, tuple, str, Device)) else list_devices(entry))
                for entry in devices]
    return found


def _check_model(model: Any, sides: tuple[int, ...], classes: int) -> None:
    """Raise ValueError for an unknown model, or unsupported image sizes."""
    if isinstance(model, str) and model not in MODELS:
        raise ValueError(f"unknown model; received {model!r}. Use one of "
                         f"{', '.join(map(repr, MODELS))}, or a function "
                         "that makes a network.")
    if model == "lenet" and (sides, classes) != ((1, 28, 28), 10):
        raise ValueError("LeNet requires images of (1, 28, 28), 10 classes; "
                         f"received {sides} and {classes}. Use resnet18, or "
                         "a custom network.")
    if model == "resnet18" and len(sides) != 3:
        raise ValueError("ResNet-18 requires images of (channels, height, "
                         f"width); received {sides}. Pass three numbers, or "
                         "use a custom network.")


def _row(contender: _Contender, seconds: list[float], first: list[float],
         profile: Profile) -> dict[str, Any]:
    """What the report says of a contender. `seconds`: those of a step, by
    round; `first`: those of the first contender."""
    rows = contender.batch_size
    return {
        "backend": contender.backend,
        "devices": [str(d) for d in contender.devices], "seconds": seconds,
        "images_per_second": _spread([rows / s for s in seconds]),
        "ratio": _spread([a / b for a, b in zip(first, seconds)]),
        "table": profile.table(), "parts": _parts(profile, rows),
        "verdict": profile.verdict(), "profiling_cost": profile.cost(),
        "predicted": None, "error": None}


def _alternate(contenders: list[_Contender], steps: int, rounds: int,
               progress: bool) -> list[list[float]]:
    """Seconds of a step of each contender, by counted round."""
    seconds: list[list[float]] = [[] for _ in contenders]
    order = list(range(len(contenders)))
    turns = [(number, i) for number in range(rounds)
             for i in (order[::-1] if number % 2 else order)]
    with ProgressBar(progress, "bench", len(turns), "turn") as bar:
        for number, i in turns:
            spent = contenders[i].steps(steps, contenders[i].batch_size)
            if number:
                seconds[i].append(spent / steps)
            bar.advance()
    return seconds


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

    Seconds of a step: ``copy + dispatch k + (fixed + per_row rows/k) s +
    update s + reduce + other``, with ``s = k / min(k, c)`` and, for two
    devices or more,

    ``reduce = latency 2 (k - 1) arrays + 2 k bytes / bandwidth``.

    - The host queues the work of one device after the other, so `dispatch`
      counts k times.
    - Forward and backward passes share the examples, and the largest shard
      counts. They run in parallel up to the number of cores: if the cores
      support c devices at once, k of them take turns and need `s` times
      as long.
    - Each device updates a full copy of the parameters.
    - The sum of the gradients reads and writes each device's arrays once, in
      one memory.
    - The batch is copied once, for any k.

    Parameters
    ----------
    measurements : mapping
        Seconds of a step of ``"rows"`` examples on one device:
        ``"dispatch"``, ``"copy"``, ``"update"``, ``"other"``, and for the
        forward and backward pass ``"fixed"`` and ``"per_row"``
        (`mgpu.tools.profiling.fit`). The number of gradients, ``"arrays"``,
        and their ``"bytes"``. For an all-reduce ``"latency"`` (seconds per
        message) and ``"bandwidth"`` (bytes per second). ``"capacity"``: the
        number of devices that compute in parallel; None: any number (GPUs).
    k : int

    Returns
    -------
    dict
        ``"devices"``, ``"seconds"``, ``"images_per_second"``; ``"parts"``:
        seconds by stage; ``"note"``: a remark if devices must take turns,
        else "".

    Raises
    ------
    ValueError
        `k` is not a whole number of 1 or more.
    """
    k, m = integer("the number of devices", k, 1), measurements
    lanes = k if m["capacity"] is None else min(k, m["capacity"])
    turns = k / lanes
    parts = {
        "dispatch": k * m["dispatch"], "copy": m["copy"],
        "compute": turns * (m["fixed"] + m["per_row"] * ceil(m["rows"] / k)),
        "reduce": 0.0 if k == 1 else 2 * (k - 1) * m["arrays"] * m["latency"]
        + 2 * k * m["bytes"] / m["bandwidth"],
        "update": turns * m["update"], "other": m["other"]}
    seconds = sum(parts.values())
    note = "" if lanes == k else (
        f"the cores run {lanes} of {k} logical devices in parallel: they "
        "take turns")
    return {"devices": k, "seconds": seconds,
            "images_per_second": m["rows"] / seconds, "parts": parts,
            "note": note}


def _measure(contenders: list[_Contender], profiles: dict[str, Profile],
             make: Callable[[list[Device]], _Contender], steps: int,
             dtype: str) -> dict[str, Any]:
    """The arguments of `predict`, from the contender of one backend on one
    device, or from a new one."""
    with using_backend(contenders[0].backend):
        single = next((c for c in contenders if len(c.devices) == 1), None)
        if single is None:
            most = max(contenders, key=lambda c: len(c.devices))
            single = make(most.devices[:1])
            profile = _profile(single, steps)
        else:
            profile = profiles[single.title()]
        parts, sizes = _parts(profile, single.batch_size), _batches(single)
        if len(sizes) > 1:
            fixed, per_row = fit(sizes, [_parts(profile, n)["compute"]
                                         for n in sizes])
        else:       # a batch of one example
            fixed, per_row = parts["compute"], 0.0
        latency, bandwidth = measure_reduce(
            [c.devices for c in contenders], len(single.sizes), dtype)
    on_cpu = single.devices[0].kind == "cpu"
    return {
        "rows": single.batch_size, "fixed": fixed, "per_row": per_row,
        **{name: parts[name] for name in ("dispatch", "copy", "update")},
        # One device has nothing to reduce: its reduce time is overhead.
        "other": max(0.0, parts["other"] + parts["reduce"]),
        "arrays": len(single.sizes),
        "bytes": sum(single.sizes) * np.dtype(dtype).itemsize,
        "latency": latency, "bandwidth": bandwidth,
        "capacity": profiling.cpu_capacity() if on_cpu else None}


def measure_reduce(lists: Sequence[Sequence[Device]], arrays: int,
                   dtype: str = "float32", *, repeat: int = 5,
                   large: int = 1 << 22) -> tuple[float, float]:
    """Measure an all-reduce between two devices, on the backend in use.

    Parameters
    ----------
    lists : sequence of lists of Device
        The two devices are the first two of the longest list; where that has
        only one, the second is another logical CPU device.
    arrays : int
        How many arrays of one element are summed, with 2 messages each.
    dtype : {"float32", "float64"}
    repeat : int
        The best of so many is taken.
    large : int
        Bytes of an array that is read and written on each of the devices.

    Returns
    -------
    latency, bandwidth : float
        Seconds per message, and bytes per second.
    """
    entries = [list(entry) for entry in lists]
    devices = max(entries, key=len)[:2]
    if len(devices) == 1:
        devices.append(Device("cpu", int(devices[0] == Device("cpu", 0))))
    item = np.dtype(dtype).itemsize

    def best(count: int, size: int) -> float:
        columns = [[put(np.zeros(size, dtype), d) for d in devices]
                   for _ in range(count)]
        timer = Timer(devices)
        for _ in range(repeat + 1):     # once to warm up
            timer.start()
            allreduce_many(columns)     # zeros for ever: no overflow
            timer.stop()
        return min(timer.times[1:])

    latency = best(arrays, 1) / (2 * arrays)
    size = max(1, large // item)
    return latency, 2 * 2 * size * item / best(1, size)
