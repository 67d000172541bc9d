"""The text's three chapters as functions, on the engine in use.

`mgpu reproduce` runs them; a script may call them too. Each returns a plain
dict, fit for JSON, and each is written with mgpu's public pieces alone.

==================  =====================================================
`auto_parallelism`  "Automatic Parallelism": two devices and a copy timed
                    alone and together
`lenet`             "Training on Multiple GPUs": from scratch, over lists of
                    parameters
`resnet18`          "Concise Implementation": `Replicas` and a `Trainer`
==================  =====================================================
"""
import os
import queue
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mgpu import functional as F
from mgpu import initializers, models
from mgpu.arguments import is_integer
from mgpu.backends import get_backend
from mgpu.collectives import allreduce_many
from mgpu.device import Device, as_devices, cpu_cores
from mgpu.evaluation import DataIter, evaluate_accuracy_gpu
from mgpu.losses import SoftmaxCrossEntropyLoss
from mgpu.parameters import get_params
from mgpu.replicas import initialize
from mgpu.nested import rows_of
from mgpu.split import split_batch
from mgpu.timing import Benchmark, synchronize
from mgpu.trainer import Trainer
from mgpu.training import (History, backward, grad, parallel, put, record, sgd,
                           to_numpy, train, train_epochs)

Run = dict[str, Any]


# -- A. automatic parallelism -------------------------------------------------

def auto_parallelism(devices: Any, *, size: int | None = None,
                     repeat: int | None = None, dtype: str = "float32",
                     seed: int = 0) -> Run:
    """Time work on two devices, and work and a copy, alone and together.

    The work is `repeat` products of a matrix with itself, all kept. Both
    devices are warmed up once. A block on one device waits for that device,
    a joint block once for both. Prints the chapter's six lines as they are
    measured, then what they say.

    Parameters
    ----------
    devices : two devices
    size, repeat : int, optional
        Rows of the matrix, uniform in [0, 1), and the number of products:
        1024 and 20 on a CPU (seconds), 4000 and 50, the text's, where both
        devices are GPUs. The results take ``repeat * size ** 2`` values on
        each device, and once more on the host.
    dtype : {"float32", "float64"}
    seed : int
        Of the matrices.

    Returns
    -------
    dict
        ``{"backend", "devices", "size", "repeat", "dtype", "seed",
        "timings": [{"backend", "name", "seconds"}, ...], "verdict": [str,
        str]}``; the timings are what `mgpu.plotting.plot_timings` draws.

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
    size = _count("size", size, 4000 if on_gpus else 1024)
    repeat = _count("repeat", repeat, 50 if on_gpus else 20)
    rng = np.random.default_rng(seed)
    first, second = (put(rng.uniform(size=(size, size)).astype(dtype), d)
                     for d in devices)
    print(f"GPU1 is {devices[0]}, GPU2 is {devices[1]}: {repeat} products "
          f"of {size} x {size}, {dtype}, on {backend.name}", flush=True)
    products = partial(_products, repeat=repeat)
    timings: list[dict[str, Any]] = []

    def timed(name: str, where: Any, work: Callable[[], Any]) -> Any:
        with Benchmark(name, where) as clock:
            result = work()
        timings.append({"backend": backend.name, "name": name,
                        "seconds": clock.seconds})
        return result

    # `parallel` with one entry, not a plain call: alone as well as together
    # a device computes with its own share of the cores.
    parallel(products, [first, second])
    synchronize(devices)
    timed("GPU1 time", devices[0], lambda: parallel(products, [first]))
    timed("GPU2 time", devices[1], lambda: parallel(products, [second]))
    timed("GPU1 & GPU2", devices, lambda: parallel(products, [first, second]))
    results, = timed("Run on GPU1", devices[0],
                     lambda: parallel(products, [first]))
    timed("Copy to CPU", devices[0], lambda: [to_numpy(y) for y in results])
    results.clear()
    timed("Run on GPU1 and copy to CPU", devices[0],
          lambda: _products_and_copies(first, repeat))

    alone1, alone2, both, run, copy, joint = (t["seconds"] for t in timings)
    verdict = [
        "GPU1 & GPU2: " + _verdict(both, alone1, alone2) + " "
        + _shared_by(devices),
        "Run on GPU1 and copy to CPU: " + _verdict(joint, run, copy) + " "
        + ("The copies cross the bus between GPU and host." if
           devices[0].kind == "gpu" else
           "A CPU's host copies cross no bus: they share the memory, and its "
           "bandwidth, with the products.")]
    for line in verdict:
        print(line, flush=True)
    return {"backend": backend.name, "devices": [str(d) for d in devices],
            "size": size, "repeat": repeat, "dtype": dtype, "seed": seed,
            "timings": timings, "verdict": verdict}


def _count(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if not is_integer(value, 1):
        raise ValueError(f"{name} must be 1 or more; received {value!r}.")
    return int(value)


def _products(x: Any, repeat: int) -> list[Any]:
    return [F.dot(x, x) for _ in range(repeat)]


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


def _verdict(joint: float, a: float, b: float) -> str:
    """What the times of two pieces of work, alone and joint, say. Times of
    one thing differ by some percent: no less counts as a gain or a loss."""
    total, ratio = a + b, joint / (a + b)
    text = f"{ratio:.2f} of the time of one after the other: "
    if ratio < 0.95:
        return text + "they overlapped."
    if ratio > 1.05:
        return text + "they got in each other's way."
    if min(a, b) < 0.1 * total:
        return text + (f"nothing to see, the shorter part is "
                       f"{100 * min(a, b) / total:.0f} % of it.")
    return text + "no overlap."


def _shared_by(devices: Sequence[Device]) -> str:
    kinds = {d.kind for d in devices}
    if kinds == {"cpu"}:
        cores = cpu_cores()
        return (f"Logical CPU devices share {cores} core"
                f"{'s' * (cores != 1)}, their caches and the memory.")
    if kinds == {"gpu"}:
        return "Logical GPUs share a card." if os.environ.get(
            "MGPU_LOGICAL_GPUS") else "Two GPUs share the host alone."
    return "A GPU and a CPU share the host's cores, which feed the GPU."


# -- B. from scratch ----------------------------------------------------------

def lenet(devices: Any, *, train_iter: DataIter, test_iter: DataIter,
          epochs: int = 10, lr: float = 0.2, seed: int = 0,
          dtype: str = "float32", init_scale: float = 0.01,
          progress: bool = False, animator: Any = None) -> Run:
    """Train the text's LeNet from scratch, over lists of device parameters.

    Every device holds all parameters, drawn once, and takes its share of
    each batch; gradients are summed over the devices (`allreduce_many`), and
    `sgd` divides by the rows of the whole batch. The accuracy is that of
    device 0.

    Parameters
    ----------
    devices : sequence of devices
    train_iter, test_iter : iterables of (X, y)
        X (n, 1, 28, 28), y (n,); those of `mgpu.datasets`, or others that
        can be gone through once per epoch. NumPy batches are converted to
        `dtype`, arrays of the engine must have it.
    epochs : int
    lr : float
    seed : int
        Of the initial weights.
    dtype : {"float32", "float64"}
    init_scale : float
        Standard deviation of the initial weights. With the text's 0.01 the
        loss stays where it is for about 250 steps; with 0.1 it does not.
    progress : bool
        Draw a bar (tqdm).
    animator : mgpu.plotting.Animator, optional

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
    step = partial(lenet_step, device_params=device_params, devices=devices,
                   lr=lr)

    def predict(X: Any) -> Any:
        return models.lenet_forward(X, device_params[0])

    history = train_epochs(
        step, _Cast(train_iter, dtype), epochs, devices, progress=progress,
        animator=animator, description="lenet",
        weights=lambda: dict(zip((name for name, _ in models.LENET),
                                 device_params[0])),
        evaluate=lambda: evaluate_accuracy_gpu(
            [predict], _Cast(test_iter, dtype), devices[0]))
    return _run(history, train_iter, lr, seed, dtype, init_scale)


def lenet_step(X: Any, y: Any, device_params: Sequence[list[Any]],
               devices: Sequence[Device], lr: float) -> list[Any]:
    """One step of `lenet`: all forwards, all backwards, all-reduce, `sgd`.

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
    X_shards, y_shards = split_batch(X, y, devices)
    with record():
        losses = parallel(_lenet_losses, X_shards, y_shards, device_params)
    backward(losses)
    allreduce_many([[grad(p) for p in copies]
                    for copies in zip(*device_params)])
    parallel(partial(sgd, lr=lr, batch_size=rows_of(X)), device_params)
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
    """Train the text's ResNet-18 with `initialize`, `Trainer` and `train`.

    A new network, initialised on all devices with Normal(`init_scale`); SGD
    without momentum; batch statistics of each device's own rows; evaluation
    on all devices, outside the timed lap.

    Parameters
    ----------
    devices, train_iter, test_iter, epochs, lr, seed, dtype, init_scale,
    progress, animator
        As for `lenet`; the pictures may have any size that their `info`
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
    history = train(replicas, _Cast(train_iter, dtype),
                    _Cast(test_iter, dtype), SoftmaxCrossEntropyLoss(),
                    trainer, epochs, progress=progress, animator=animator)
    return _run(history, train_iter, lr, seed, dtype, init_scale)


# -- runs ---------------------------------------------------------------------

def summary(run: Run) -> str:
    """The text's last line for a run that `lenet` or `resnet18` returned:
    ``test acc: 0.85, 1.2 sec/epoch on [cpu(0), cpu(1)]``."""
    return History(devices=run["devices"], train_loss=run["train_loss"],
                   test_acc=run["test_acc"], seconds=run["seconds"]).summary()


def _run(history: History, train_iter: DataIter, lr: float, seed: int,
         dtype: str, init_scale: float) -> Run:
    return {"backend": get_backend().name, "devices": history.devices,
            "batch_size": getattr(train_iter, "batch_size", None), "lr": lr,
            "seed": seed, "dtype": dtype, "init_scale": init_scale,
            "data": getattr(train_iter, "info", None)
            or {"name": type(train_iter).__name__},
            "train_loss": history.train_loss, "test_acc": history.test_acc,
            "seconds": history.seconds,
            "images_per_second": history.images_per_second,
            "loss_per_step": history.loss_per_step}


def _rate(lr: Any) -> float:
    if not 0 < lr < float("inf"):
        raise ValueError(f"the learning rate must be a positive number; "
                         f"received {lr!r}.")
    return float(lr)


class _Cast:
    """Batches with their NumPy examples in `dtype`."""

    def __init__(self, batches: DataIter, dtype: str):
        self._batches, self._dtype = batches, dtype

    def __len__(self) -> int:
        return len(self._batches)       # TypeError where it has none

    def __iter__(self) -> Any:
        for X, y in self._batches:
            if isinstance(X, np.ndarray):
                X = X.astype(self._dtype, copy=False)
            yield X, y
