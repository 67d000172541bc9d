"""Three chapters of the book *Dive into Deep Learning* (d2l.ai) as functions,
on the backend in use.

`mgpu reproduce` runs them, and a script may call them too. Each returns a
plain dict, fit for JSON, and each is written with mgpu's public functions
only.

==================  =====================================================
`auto_parallelism`  "Automatic Parallelism": two devices and a copy, timed
                    separately and together
`lenet`             "Training on Multiple GPUs": from scratch, over lists of
                    parameters
`resnet18`          "Concise Implementation for Multiple GPUs": `Replicas`
                    and a `Trainer`
==================  =====================================================
"""
import queue
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from mgpu.backends import get_backend
from mgpu.backends.device import Device, as_devices
from mgpu.collectives import allreduce_many
from mgpu.data.nested import rows_of
from mgpu.data.split import split_batch
from mgpu.nn import functional as F, initializers, models
from mgpu.nn.losses import SoftmaxCrossEntropyLoss
from mgpu.tools.timing import Benchmark, synchronize
from mgpu.training import (History, backward, grad, parallel, put, record, sgd,
                           to_numpy, train, train_epochs)
from mgpu.training.evaluation import DataIter, evaluate_accuracy_gpu
from mgpu.training.parameters import get_params
from mgpu.training.replicas import initialize
from mgpu.training.trainer import Trainer
from mgpu.utils import environment, probes
from mgpu.utils.arguments import integer

Run = dict[str, Any]


# -- A. automatic parallelism -------------------------------------------------

def auto_parallelism(devices: Any, *, size: int | None = None,
                     repeat: int | None = None, dtype: str = "float32",
                     seed: int = 0) -> Run:
    """Time work on two devices, and work and a copy, separately and together.

    The work is `repeat` products of a matrix with itself, all kept. Both
    devices are warmed up once. A block on one device waits for that device,
    a joint block once for both. Prints the chapter's six lines as they are
    measured, then what they say.

    Parameters
    ----------
    devices : two devices
    size, repeat : int, optional
        Rows of the matrix, uniform in [0, 1), and the number of products.
        Default: 1024 and 20 on a CPU, which take seconds; 4000 and 50, as in
        the book, where both devices are GPUs. The results take ``repeat *
        size ** 2`` values on each device, and once more on the host.
    dtype : {"float32", "float64"}
    seed : int
        Seed of the matrices.

    Returns
    -------
    dict
        ``{"backend", "devices", "size", "repeat", "dtype", "seed",
        "timings": [{"backend", "name", "seconds"}, ...], "verdict": [str,
        str]}``; `mgpu.tools.plotting.plot_timings` draws the timings.

    Raises
    ------
    ValueError
        Not two devices; a size or a number that is not 1 or more.
    """
    backend, devices = get_backend(), as_devices(devices)
    if len(devices) != 2:
        raise ValueError("automatic parallelism compares two devices; "
                         f"received {devices}. Use list_devices(2).")
    on_gpus = all(d.kind == "gpu" for d in devices)
    size = integer("size", (1024, 4000)[on_gpus] if size is None else size, 1)
    repeat = integer("repeat", (20, 50)[on_gpus] if repeat is None
                     else repeat, 1)
    rng = np.random.default_rng(seed)
    first, second = (put(rng.uniform(size=(size, size)).astype(dtype), d)
                     for d in devices)
    print(f"GPU1 is {devices[0]}, GPU2 is {devices[1]}: {repeat} products "
          f"of {size} x {size}, {dtype}, on {backend.name}", flush=True)
    seconds: dict[str, float | None] = {}

    def timed(name: str, where: Any, work: Callable[[], Any]) -> Any:
        # One device alone computes on as many cores as next to another one.
        with backend.device_threads(), Benchmark(name, where) as clock:
            result = work()
        seconds[name] = clock.seconds
        return result

    def products(*matrices: Any) -> Any:
        return parallel(lambda x: [F.dot(x, x) for _ in range(repeat)],
                        matrices)

    products(first, second)
    synchronize(devices)
    timed("GPU1 time", devices[0], lambda: products(first))
    timed("GPU2 time", devices[1], lambda: products(second))
    timed("GPU1 & GPU2", devices, lambda: products(first, second))
    results, = timed("Run on GPU1", devices[0], lambda: products(first))
    timed("Copy to CPU", devices[0], lambda: [to_numpy(y) for y in results])
    results.clear()
    timed("Run on GPU1 and copy to CPU", devices[0],
          lambda: _products_and_copies(first, repeat))

    gpu1, gpu2, both, run, copy, joint = seconds.values()
    verdict = [f"GPU1 & GPU2: {_verdict(both, gpu1, gpu2)}",
               f"Run on GPU1 and copy to CPU: {_verdict(joint, run, copy)}"]
    if all(d.kind == "cpu" for d in devices):
        verdict[0] += (f" Logical CPU devices share {environment.cpu_cores()} "
                       "cores, their caches and the memory.")
        verdict[1] += (" The copies share the memory, and its bandwidth, with "
                       "the products.")
    print(*verdict, sep="\n", flush=True)
    return {"backend": backend.name, "devices": [str(d) for d in devices],
            "size": size, "repeat": repeat, "dtype": dtype, "seed": seed,
            "timings": [{"backend": backend.name, "name": name, "seconds": s}
                        for name, s in seconds.items()], "verdict": verdict}


def _products_and_copies(x: Any, repeat: int) -> list[np.ndarray]:
    """Result i - 1 goes to the host while product i is computed: one thread
    starts products, another waits for one after the other and copies it."""
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def compute() -> None:
        try:
            for _ in range(repeat):
                ready.put(F.dot(x, x))
        finally:
            ready.put(None)     # also after an error: the other must end

    def fetch() -> list[np.ndarray]:
        copies = []
        while (y := ready.get()) is not None:
            copies.append(to_numpy(y))
        return copies

    return get_backend().parallel([compute, fetch], rendezvous=True)[1]


def _verdict(joint: Any, a: Any, b: Any) -> str:
    """What the seconds of two pieces of work say, `joint` those of both
    together. Times of one thing differ by some percent, so smaller
    differences do not count as a gain or a loss."""
    total, ratio = a + b, joint / (a + b)
    if ratio < 0.95:
        found = "they overlapped."
    elif ratio > 1.05:
        found = "they got in each other's way."
    elif min(a, b) < 0.1 * total:
        found = (f"nothing to see, the shorter one is "
                 f"{100 * min(a, b) / total:.0f} % of it.")
    else:
        found = "no overlap."
    return f"{ratio:.2f} of the time of one after the other: {found}"


# -- B. from scratch ----------------------------------------------------------

def lenet(devices: Any, *, train_iter: DataIter, test_iter: DataIter,
          epochs: int = 10, lr: float = 0.2, seed: int = 0,
          dtype: str = "float32", init_scale: float = 0.01,
          progress: bool = False, animator: Any = None) -> Run:
    """Train the book's LeNet from scratch, over lists of device parameters.

    Every device holds all parameters, drawn once, and takes its share of
    each batch. Gradients are summed over the devices (`allreduce_many`), and
    `sgd` divides by the rows of the whole batch. The accuracy is that of
    device 0.

    Parameters
    ----------
    devices : sequence of devices
    train_iter, test_iter : iterables of (X, y)
        X (n, 1, 28, 28), y (n,): those of `mgpu.datasets`, or others that
        can be gone through once per epoch. NumPy batches are converted to
        `dtype`; arrays of the backend must have it.
    epochs : int
    lr : float
    seed : int
        Seed of the initial weights.
    dtype : {"float32", "float64"}
    init_scale : float
        Standard deviation of the initial weights. With the book's 0.01 the
        loss stays constant for about 250 steps; with 0.1 it does not.
    progress : bool
        Draw a progress bar, if tqdm is installed.
    animator : mgpu.tools.plotting.Animator, optional

    Returns
    -------
    dict
        ``{"backend", "devices", "batch_size", "lr", "seed", "dtype",
        "init_scale", "data", "train_loss", "test_acc", "seconds",
        "images_per_second", "loss_per_step"}``: the settings, then lists as
        in `History`. ``"data"`` is the iterator's `info`, ``"batch_size"``
        its `batch_size` (None where it has none).

    Raises
    ------
    ValueError
        A wrong rate, scale, or number of epochs; a device named twice.
    NonFiniteLoss
        See `train_epochs`.
    """
    devices, lr = as_devices(devices), _rate(lr)
    start = models.lenet_params(init_scale, seed, dtype)
    device_params = [get_params(start, d) for d in devices]
    first, names = device_params[0], [name for name, _ in models.LENET]
    with get_backend().device_threads():
        history = train_epochs(
            partial(lenet_step, device_params=device_params, devices=devices,
                    lr=lr),
            _Cast(train_iter, dtype), epochs, devices, progress=progress,
            animator=animator, description="lenet",
            weights=lambda: dict(zip(names, first)),
            evaluate=lambda: evaluate_accuracy_gpu(
                [lambda X: models.lenet_forward(X, first)],
                _Cast(test_iter, dtype), devices[0]))
    return _run(history, train_iter, lr, seed, dtype, init_scale)


def lenet_step(X: Any, y: Any, device_params: Sequence[list[Any]],
               devices: Sequence[Device], lr: float) -> list[Any]:
    """One step of `lenet`: all forward passes, all backward passes,
    all-reduce, `sgd`. A `Profile` sees these stages.

    Parameters
    ----------
    X, y : arrays of n rows
    device_params : sequence of lists of native arrays
        Each device's parameters; changed in place.
    devices : sequence of Device
    lr : float

    Returns
    -------
    list of native arrays
        The loss of each row, by device; None where a device had no row.
    """
    def gradients() -> list[list[Any]]:
        return [[grad(p) for p in own] for own in device_params]

    with probes.step(devices, X):
        X_shards, y_shards = split_batch(X, y, devices)
        with record(), probes.stage("compute", "forward and loss",
                                    results=lambda: losses):
            losses = parallel(_lenet_losses, X_shards, y_shards, device_params)
        with probes.stage("compute", "backward", devices, gradients, [
                i for i, loss in enumerate(losses) if loss is not None]):
            backward(losses)
        with probes.stage("reduce", "all-reduce", results=gradients):
            allreduce_many([*map(list, zip(*gradients()))])
        with probes.stage("update", "update", results=lambda: device_params):
            parallel(partial(sgd, lr=lr, batch_size=len(X)), device_params)
    return losses


def _lenet_losses(X: Any, y: Any, params: list[Any]) -> Any:
    if not rows_of(X):      # fewer rows than devices
        return None
    return SoftmaxCrossEntropyLoss()(models.lenet_forward(X, params), y)


# -- C. concise ---------------------------------------------------------------

def resnet18(devices: Any, *, train_iter: DataIter, test_iter: DataIter,
             epochs: int = 10, lr: float = 0.1, seed: int = 0,
             dtype: str = "float32", init_scale: float = 0.01,
             progress: bool = False, animator: Any = None) -> Run:
    """Train the book's ResNet-18 with `initialize`, `Trainer` and `train`.

    A new network is initialized on all devices with Normal(`init_scale`) and
    trained by SGD without momentum. Batch statistics are those of each
    device's own rows. All devices evaluate, outside the timed lap.

    Parameters
    ----------
    devices, train_iter, test_iter, epochs, lr, seed, dtype, init_scale,
    progress, animator
        As for `lenet`; the images may have any size that their `info`
        gives in ``"shape"``, channels first (without it: one channel).

    Returns
    -------
    dict
        As for `lenet`.

    Raises
    ------
    ValueError, NonFiniteLoss
        As for `lenet`.
    """
    devices, lr = as_devices(devices), _rate(lr)
    shape = (getattr(train_iter, "info", None) or {}).get("shape", [1])
    replicas = initialize(
        models.resnet18(in_channels=shape[0]), devices,
        init=initializers.Normal(init_scale), seed=seed, dtype=dtype)
    trainer = Trainer(replicas, "sgd", {"learning_rate": lr})
    with get_backend().device_threads():
        history = train(replicas, _Cast(train_iter, dtype),
                        _Cast(test_iter, dtype), SoftmaxCrossEntropyLoss(),
                        trainer, epochs, progress=progress, animator=animator)
    return _run(history, train_iter, lr, seed, dtype, init_scale)


# -- runs ---------------------------------------------------------------------

def summary(run: Run) -> str:
    """The book's last line for a run that `lenet` or `resnet18` returned:
    ``test acc: 0.85, 1.2 sec/epoch on [cpu(0), cpu(1)]``."""
    return History(**{name: run[name] for name in (
        "devices", "train_loss", "test_acc", "seconds")}).summary()


def differences(runs: Sequence[Run]) -> list[str]:
    """A line for every two runs on the same devices and different backends:
    how far apart their losses and accuracies are."""
    lines = []
    for a, b in combinations(runs, 2):
        if a["devices"] != b["devices"] or a["backend"] == b["backend"]:
            continue
        gap = np.abs(np.subtract(a["loss_per_step"], b["loss_per_step"]))
        acc = np.abs(np.subtract(a["test_acc"], b["test_acc"]))
        lines.append(
            f"{a['backend']} against {b['backend']} on "
            f"[{', '.join(a['devices'])}]: largest difference of the loss "
            f"{gap.max():.1e} (step {gap.argmax() + 1} of {len(gap)}), of the "
            f"test accuracy {acc.max():.4f}")
    if lines and runs[0]["dtype"] == "float32":
        lines.append("Training amplifies rounding: float32 runs diverge after "
                     "some steps, --dtype float64 runs far later.")
    return lines


def _run(history: History, train_iter: DataIter, lr: float, seed: int,
         dtype: str, init_scale: float) -> Run:
    return {"backend": get_backend().name, "lr": lr, "seed": seed,
            "dtype": dtype, "init_scale": init_scale,
            "batch_size": getattr(train_iter, "batch_size", None),
            "data": getattr(train_iter, "info", None)
            or {"name": type(train_iter).__name__}, **vars(history)}


def _rate(lr: Any) -> float:
    if not 0 < lr < float("inf"):
        raise ValueError(f"the learning rate must be a positive number; "
                         f"received {lr!r}.")
    return float(lr)


class _Cast:
    """Batches with their NumPy examples in `dtype`."""

    def __init__(self, batches: Any, dtype: str) -> None:
        self._batches, self._dtype = batches, dtype

    def __len__(self) -> int:
        return len(self._batches)       # TypeError where it has none

    def __iter__(self) -> Any:
        for X, y in self._batches:
            yield (X.astype(self._dtype, copy=False)
                   if isinstance(X, np.ndarray) else X), y
