"""How the PyTorch version of "Concise Implementation for Multiple GPUs" in
*Dive into Deep Learning* departs from its Gluon version: each mechanism by
itself, and all together.

    python -m studies.departures --data FOLDER [--seeds 0,1] [--quick]
        [--backend torch|mxnet] [--work out/departures] [--out FOLDER]

The book prints accuracies of 0.93 and 0.91 (1 and 2 GPUs) for Gluon, 0.89 and
0.81 for PyTorch. Both versions are run here on *one* backend, through mgpu, so
that nothing differs but the mechanism. Each mechanism is measured exactly, on
one step in float64 at the book's batch sizes; and ResNet-18 is trained on a
CPU, with a few hundred images and batches a sixteenth of the book's.

Every measurement and every run is a file in the folder ``--work``. Existing
files are not computed again, so an interrupted call resumes where it stopped.
With ``--only`` a call computes the named runs and measurements, so that
several can share the work. At the end ``departures.json`` and
``departures.png`` are written to ``--out`` from the seeds that were named;
with ``--report``, from what is finished, and nothing more is run.
"""
import argparse
import json
import os
import pathlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import mgpu

SIGMA = 0.01                # of the weights, in the book
MOMENTUM = float(np.float32(0.9))   # of batch norm, as both backends hold it
#: height of an image in each stage of ResNet-18, by the first component of
#: a parameter's name
SIDE = {"1": 28, "3": 28, "4": 14, "5": 7, "6": 4}


class Version(NamedTuple):
    """What a run does as the PyTorch version does it; else as Gluon's."""

    devices: int = 2
    biases: bool = False        # random at the start
    resumes: str = ""           # this run, with new initial weights
    present: bool = False       # divide by the actual batch, not the nominal
    statistics: str = "own"     # of batch norm, in the test: see `scores_with`


GLUON_1, TORCH_1 = "Gluon's, 1 device", "PyTorch's, 1 device"
GLUON, ALL = "Gluon's version", "all: PyTorch's version"
BIASES, RESUMES = "1 random biases", "2 resumes run 1"
FIRST, UNBIASED = "3 statistics of device 0", "4 unbiased variance"
PRESENT = "5 divisor of the short batch"
#: the trainings, each after those that it resumes
VERSIONS = {
    GLUON_1: Version(1),
    TORCH_1: Version(1, biases=True, present=True, statistics="unbiased"),
    GLUON: Version(),
    ALL: Version(resumes=TORCH_1, present=True,
                 statistics="first, unbiased"),
    RESUMES: Version(resumes=GLUON_1),
    PRESENT: Version(present=True),
    BIASES: Version(biases=True),
}
#: training does not read statistics: these are one training, tested twice
TESTED = {FIRST: "first", UNBIASED: "unbiased"}
#: in the order of tables and figures
ORDER = (GLUON, BIASES, RESUMES, FIRST, UNBIASED, PRESENT, ALL)


class Settings(NamedTuple):
    data: str
    backend: str
    rows: int = 518             # 16 x 32 + 6: the last batch is 96 / 16
    test_rows: int = 256
    batch: int = 16             # of one device: 256 / 16
    lr: float = 0.1             # of one device
    epochs: int = 5
    exact_batch: int = 512      # the book's, for two devices
    exact_short: int = 96       # of the book's last batch
    exact_rows: int = 64        # examples whose logits are compared
    laps: int = 3
    lap_batches: int = 4


QUICK = dict(rows=11, test_rows=6, batch=4, epochs=1, exact_batch=8,
             exact_short=3, exact_rows=4, laps=1, lap_batches=2)


# -- the mechanisms ---------------------------------------------------------

def torch_biases(values: dict[str, np.ndarray], seed: int
                 ) -> dict[str, np.ndarray]:
    """Biases as ``torch.nn.Conv2d`` and ``Linear`` draw them,
    U(-1/sqrt(fan_in), 1/sqrt(fan_in)), for the weights in `values`. The
    book's initializer leaves them so."""
    rng, biases = np.random.default_rng([seed, 1]), {}
    for name, value in values.items():
        path, _, own = name.rpartition(".")
        if own == "bias":
            bound = np.prod(values[f"{path}.weight"].shape[1:]) ** -0.5
            biases[name] = rng.uniform(-bound, bound, value.shape).astype(
                value.dtype)
    return biases


class UnbiasedVariance:
    """The running variances that torch's batch norm would have kept.

    Torch adds ``n / (n - 1)`` times what Gluon adds, where n is the number
    of values in a channel on a device. Training does not read statistics, so
    one training gives both: what a step has added is ours after the step
    minus 0.9 times ours before it.

    Attributes
    ----------
    values : dict of str -> ndarray (K, channels), float64
    """

    def __init__(self, replicas: mgpu.Replicas) -> None:
        self.replicas = replicas
        self.before = self._read()
        self.values = dict(self.before)

    def _read(self) -> dict[str, np.ndarray]:
        return {p.name: np.stack([mgpu.to_numpy(x).astype(np.float64)
                                  for x in p.list_data()])
                for p in self.replicas.statistics()
                if p.kind == "running_var"}

    def stepped(self, rows: Sequence[int]) -> None:
        """Add a step with `rows` examples on each device."""
        after = self._read()
        for name, now in after.items():
            n = np.array(rows)[:, None] * SIDE[name.split(".")[0]] ** 2
            added = np.where(n > 1, (now - MOMENTUM * self.before[name])
                             * n / np.maximum(n - 1, 1), 0.0)
            # A device without examples has added nothing.
            self.values[name] = np.where(
                n > 0, MOMENTUM * self.values[name] + added,
                self.values[name])
        self.before = after


def step(replicas: mgpu.Replicas, trainer: mgpu.Trainer, X: np.ndarray,
         y: np.ndarray, divisor: int) -> list[Any]:
    """The book's step: split, forward, backward, ``trainer.step(divisor)``.
    Returns the losses of each device, not waited for."""
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    X_shards, y_shards = mgpu.split_batch(X, y, replicas.devices)
    with mgpu.record():
        losses = mgpu.parallel(
            lambda out, label: None if out is None else loss(out, label),
            replicas(X_shards), y_shards)
    mgpu.backward(losses)
    trainer.step(divisor)
    return losses


def shard_rows(n: int, k: int) -> list[int]:
    return [stop - start for start, stop in mgpu.shard_bounds(n, k)]


def values_with(replicas: mgpu.Replicas, unbiased: UnbiasedVariance, how: str
              ) -> dict[str, np.ndarray]:
    """Return all values of `replicas`, with the statistics `how`: each
    device's "own", or those of the "first" for all; "unbiased" or not."""
    values = replicas.export_numpy(all_devices=True)
    if "unbiased" in how:
        for name, value in unbiased.values.items():
            values[name] = value if len(replicas) > 1 else value[0]
    if "first" in how and len(replicas) > 1:
        for p in replicas.statistics():
            values[p.name] = values[p.name][0]
    return values


def logits(replicas: mgpu.Replicas, X: np.ndarray) -> np.ndarray:
    """Scores in prediction mode, (n, 10), each shard by its own device."""
    X_shards = mgpu.split_batch(X, np.zeros(len(X), "int32"),
                                replicas.devices)[0]
    return np.concatenate([mgpu.to_numpy(out)
                           for out in replicas(X_shards) if out is not None])


def scores_with(replicas: mgpu.Replicas, unbiased: UnbiasedVariance, how: str,
                test: Any) -> np.ndarray:
    """Return the scores of all test examples with the statistics `how`, and
    restore all values."""
    own = replicas.export_numpy(all_devices=True)
    replicas.import_numpy(values_with(replicas, unbiased, how))
    try:
        return np.concatenate([logits(replicas, X) for X, _ in test])
    finally:
        replicas.import_numpy(own)


# -- training ---------------------------------------------------------------

def make(k: int, seed: int, dtype: str) -> mgpu.Replicas:
    """ResNet-18 as Gluon's version initializes it."""
    return mgpu.initialize(mgpu.models.resnet18(), mgpu.list_devices(k),
                           init=mgpu.initializers.Normal(SIGMA), seed=seed,
                           dtype=dtype)


def load(settings: Settings, batch: int, dtype: str = "float32",
         seed: int = 0) -> Any:
    """(train_iter, test batches), of the first examples of the files."""
    train, _ = mgpu.datasets.load(settings.data, batch, limit=settings.rows,
                                  seed=seed, dtype=dtype)
    _, test = mgpu.datasets.load(settings.data, 256, dtype=dtype,
                                 limit=settings.test_rows)
    return train, list(test)


def train_version(settings: Settings, name: str, seed: int,
                  work: pathlib.Path) -> dict[str, Any]:
    """Train one version and return its losses and accuracies. Saves the
    final values in `work` where another version resumes from them."""
    version = VERSIONS[name]
    k, batch = version.devices, version.devices * settings.batch
    # The runs on 1 and on 2 devices draw other weights, and another order
    # of batches; the versions on 2 devices all have the same.
    own_seed = seed if k > 1 else 1000 + seed
    train, test = load(settings, batch, seed=own_seed)
    replicas = make(k, own_seed, "float32")
    if version.biases:
        values = replicas.export_numpy()
        replicas.import_numpy({**values, **torch_biases(values, own_seed)})
    if version.resumes:
        with np.load(state_file(work, version.resumes, seed)) as file:
            kept = dict(file)
        weights = {p.name for p in replicas.params() if p.kind == "weight"}
        replicas.import_numpy({**replicas.export_numpy(), **{
            n: v for n, v in kept.items() if n not in weights}})
    unbiased = UnbiasedVariance(replicas)
    trainer = mgpu.Trainer(replicas, "sgd",
                           {"learning_rate": settings.lr * k})
    ways = {name: version.statistics}
    if name == GLUON:
        ways.update(TESTED)
    labels = np.concatenate([y for _, y in test])
    result: dict[str, Any] = {
        "version": name, "seed": seed, "batch_size": batch,
        "lr": settings.lr * k, "steps_per_epoch": len(train), "loss": [],
        "test_acc": {way: [] for way in ways}, "changed": {}}

    def evaluate() -> None:
        found = {way: scores_with(replicas, unbiased, how, test).argmax(axis=1)
                 for way, how in ways.items()}
        for way, classes in found.items():
            result["test_acc"][way].append(float((classes == labels).mean()))
            result["changed"][way] = int((classes != found[name]).sum())

    began = time.perf_counter()
    evaluate()
    for epoch in range(settings.epochs):
        for X, y in train:
            losses = step(replicas, trainer, X, y,
                          len(y) if version.present else batch)
            unbiased.stepped(shard_rows(len(y), k))
            result["loss"].append(float(np.concatenate(
                [mgpu.to_numpy(v) for v in losses if v is not None]).mean()))
        evaluate()
        print(f"{name}, seed {seed}, epoch {epoch + 1}: loss "
              f"{np.mean(result['loss'][-len(train):]):.3f}, test acc "
              f"{result['test_acc'][name][-1]:.3f}, "
              f"{time.perf_counter() - began:.0f} sec", flush=True)
    if any(name == v.resumes for v in VERSIONS.values()):
        np.savez(state_file(work, name, seed),
                 **values_with(replicas, unbiased, version.statistics))
    return result


def state_file(work: pathlib.Path, name: str, seed: int) -> pathlib.Path:
    return work / f"{slug(name)}-{seed}.npz"


# -- one step, exactly ------------------------------------------------------

def relative(a: np.ndarray, b: np.ndarray) -> float:
    """max|a - b| over max|b|, 0 where both are 0."""
    return float(np.abs(a - b).max() / (np.abs(b).max() or 1.0))


def rows_for(settings: Settings, n: int) -> Any:
    """The first `n` training examples, in float64."""
    train, _ = mgpu.datasets.load(settings.data, n, limit=n, shuffle=False,
                                  dtype="float64")
    return next(iter(train))


def measure_biases(settings: Settings) -> dict[str, Any]:
    """Mechanism 1: scores before any step, with biases zero, random, and
    random only before a batch norm (which takes them out in training)."""
    X, _ = rows_for(settings, settings.exact_rows)
    replicas = make(1, 0, "float64")
    zero = replicas.export_numpy()
    random = torch_biases(zero, 0)
    # All but the 1x1 convolutions of shortcuts and the last layer.
    normed = {n: b for n, b in random.items() if "conv3" not in n
              and n.split(".")[0] in ("0", "3", "4", "5", "6")}
    found = {}
    for name, biases in (("zero", {}), ("random", random),
                         ("random before a batch norm", normed)):
        replicas.import_numpy({**zero, **biases})
        predicted = logits(replicas, X)
        with mgpu.record():     # after predicting: statistics may move
            trained = mgpu.to_numpy(
                replicas[0](mgpu.put(X, replicas.devices[0])))
        found[name] = {
            mode: {"largest": float(np.abs(scores).max()),
                   "spread over rows": float(np.ptp(scores, axis=0).max())}
            for mode, scores in (("prediction", predicted),
                                 ("training", trained))}
        if name == "zero":
            reference = trained
        found[name]["training, relative to zero"] = relative(trained,
                                                             reference)
    return {"rows": len(X), "arrays": len(random),
            "arrays before a batch norm": len(normed), **found}


def measure_statistics(settings: Settings) -> dict[str, Any]:
    """Mechanisms 3 and 4: what two devices add to their statistics in one
    pass of the book's size, and how much torch adds to a variance."""
    X, y = rows_for(settings, settings.exact_batch)
    replicas = make(2, 0, "float64")
    start = replicas.export_numpy()
    unbiased = UnbiasedVariance(replicas)
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    X_shards, y_shards = mgpu.split_batch(X, y, replicas.devices)
    with mgpu.record():
        losses = [*map(loss, replicas(X_shards), y_shards)]
    mgpu.backward(losses)
    mgpu.synchronize(replicas.devices)
    del losses
    unbiased.stepped(shard_rows(len(y), 2))
    after = replicas.export_numpy(all_devices=True)
    between: dict[str, list[float]] = {"running_mean": [], "running_var": []}
    change: dict[str, float] = {}
    for p in replicas.statistics():
        batch = after[p.name] - MOMENTUM * start[p.name]
        between[p.kind].append(relative(batch[1], batch[0]))
        if p.kind == "running_var":
            ours, theirs = batch, unbiased.values[p.name] \
                - MOMENTUM * start[p.name]
            side = SIDE[p.name.split(".")[0]]
            change[f"{side} x {side}"] = max(
                change.get(f"{side} x {side}", 0.0),
                float((theirs / np.where(ours, ours, 1) - 1)[ours > 0].max()))
    rows = X[:settings.exact_rows]
    own = scores_with(replicas, unbiased, "first", [(rows, None)])
    plain = replicas.export_numpy(all_devices=True)
    replicas.import_numpy({**plain, **{
        p.name: plain[p.name][1] for p in replicas.statistics()}})
    other = logits(replicas, rows)
    replicas.import_numpy(plain)
    torchs = scores_with(replicas, unbiased, "first, unbiased", [(rows, None)])
    return {
        "rows per device": shard_rows(len(y), 2),
        "added by device 1, relative to device 0": {
            kind: {"median": float(np.median(gaps)), "largest": max(gaps)}
            for kind, gaps in between.items()},
        "scores by device 1's, relative to device 0's": relative(other, own),
        "added to a variance by torch, relative": change,
        "scores by torch's variance, relative": relative(torchs, own)}


def measure_divisor(settings: Settings) -> dict[str, Any]:
    """Mechanism 5, and sum against mean: one step on the short last batch
    and one on examples that fill the batch."""
    nominal, short = settings.exact_batch, settings.exact_short
    X, y = rows_for(settings, short)
    replicas = make(2, 0, "float64")
    start = replicas.export_numpy()

    def moved(divisor: int, scale: float = 1.0) -> dict[str, np.ndarray]:
        replicas.import_numpy(start)
        trainer = mgpu.Trainer(replicas, "sgd",
                               {"learning_rate": 2 * settings.lr * scale})
        step(replicas, trainer, X, y, divisor)
        after = replicas.export_numpy(device=replicas.devices[0])
        return {p.name: after[p.name] - start[p.name]
                for p in replicas.params()}

    def norm(update: dict[str, np.ndarray]) -> float:
        return float(np.sqrt(sum((u ** 2).sum() for u in update.values())))

    by_nominal, by_present = moved(nominal), moved(short)

    # The same examples as a full batch: torch's mean of the losses, then
    # step(1), against the sum of the losses, then step(rows).
    replicas.import_numpy(start)
    trainer = mgpu.Trainer(replicas, "sgd",
                           {"learning_rate": 2 * settings.lr})
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    X_shards, y_shards = mgpu.split_batch(X, y, replicas.devices)
    with mgpu.record():
        outputs = replicas(X_shards)
        means = mgpu.parallel(lambda out, label: loss(out, label) / short,
                              outputs, y_shards)
    mgpu.backward(means)
    trainer.step(1)
    after = replicas.export_numpy(device=replicas.devices[0])
    by_mean = {name: after[name] - start[name] for name in by_present}
    gap = norm({n: by_mean[n] - by_present[n] for n in by_mean})
    return {"rows": short, "nominal": nominal,
            "update by rows present / by nominal":
                norm(by_present) / norm(by_nominal),
            "rows share in an epoch of the text": short / 60_000,
            "mean of losses against sum / rows, relative":
                gap / norm(by_present)}


def measure_timer(settings: Settings) -> dict[str, Any]:
    """Mechanism 6: the laps of a few training steps on two devices, read
    without a wait and after one. Nothing in a lap reads a result."""
    found: dict[str, Any] = {"batches": settings.lap_batches,
                             "batch_size": 2 * settings.batch}
    for backend in ("mxnet", "torch"):
        with mgpu.using_backend(backend):
            train, _ = load(settings, 2 * settings.batch)
            batches = list(train)[:settings.lap_batches]
            replicas = make(2, 0, "float32")
            trainer = mgpu.Trainer(replicas, "sgd",
                                   {"learning_rate": 2 * settings.lr})
            step(replicas, trainer, *batches[0], 2 * settings.batch)
            laps = []
            for _ in range(settings.laps):
                mgpu.synchronize(replicas.devices)
                timer = mgpu.Timer()
                for X, y in batches:
                    step(replicas, trainer, X, y, 2 * settings.batch)
                timer.stop()        # at once
                mgpu.synchronize(replicas.devices)
                timer.stop()        # from the same start
                laps.append(timer.times)
            found[backend] = {
                "seconds, without a wait and with one": laps,
                "ratio": [a / b for a, b in laps]}
    return found


MEASUREMENTS = {"biases": measure_biases, "statistics": measure_statistics,
                "divisor": measure_divisor, "timer": measure_timer}


# -- files ------------------------------------------------------------------

def slug(name: str) -> str:
    return "".join(c for c in name.replace(" ", "-") if c.isalnum()
                   or c == "-").lower()


def write_json(path: pathlib.Path, value: Any) -> None:
    """Whole or not at all: another call may read it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)


def once(path: pathlib.Path, settings: Settings, work: Any) -> Any:
    """What `work()` returned when it was first done with these settings.

    Raises
    ------
    ValueError
        The file is of other settings.
    """
    own = {**settings._asdict(), "data": pathlib.Path(settings.data).name}
    if path.exists():
        saved = json.loads(path.read_text())
        if saved["settings"] != own:
            raise ValueError(
                f"{path} must be of the settings {own}; received one of "
                f"{saved['settings']}. Choose another --work, or remove it.")
        return saved["result"]
    result = work()
    write_json(path, {"settings": own, "result": result})
    return result


# -- results ----------------------------------------------------------------

def curves(runs: Sequence[dict[str, Any]]
           ) -> dict[str, dict[int, list[float]]]:
    """Test accuracies by version and seed, from before the first epoch."""
    found: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        for way, accuracies in run["test_acc"].items():
            found.setdefault(way, {})[run["seed"]] = accuracies
    return found


def gaps(found: dict[str, dict[int, list[float]]], name: str,
         reference: str) -> list[float]:
    """What `name` has over `reference` at the last epoch, by seeds that
    both have."""
    base = found.get(reference, {})
    return [c[-1] - base[seed][-1] for seed, c in found[name].items()
            if seed in base]


def print_table(runs: Sequence[dict[str, Any]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise ImportError(f"the table needs rich ({error}). Run pip install "
                          "rich.") from error
    found = curves(runs)
    table = Table("version", "seeds", "last epoch", "mean", "mean of all",
                  "less Gluon's")
    for name in (GLUON_1, TORCH_1, *ORDER):
        if name not in found:
            continue
        each = list(found[name].values())
        table.add_row(
            name, " ".join(map(str, found[name])),
            " ".join(f"{c[-1]:.3f}" for c in each),
            f"{np.mean([c[-1] for c in each]):.3f}",
            f"{np.mean([c[1:] for c in each]):.3f}",
            " ".join(f"{gap:+.3f}" for gap in gaps(
                found, name, GLUON_1 if name in (GLUON_1, TORCH_1)
                else GLUON)))
    Console().print(table)


def draw(runs: Sequence[dict[str, Any]], settings: Settings,
         path: pathlib.Path) -> None:
    """Accuracy by epoch, and each mechanism's difference from Gluon's
    version at the last epoch, a point per seed."""
    # The package's own look; a figure of its own, without pyplot.
    from mgpu.tools.plotting.style import (DASHES, GREY, INK, PALETTE,
                                           new_figure, plain_axes,
                                           write_figure)
    found = curves(runs)
    shown = [name for name in ORDER if name in found]
    colours = dict(zip(ORDER, (INK, *PALETTE)))
    figure = new_figure((12.0, 4.8), dpi=150)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    left, right = (plain_axes(axes) for axes in figure.subplots(
        1, 2, width_ratios=(1.15, 1)))
    for i, name in enumerate(shown):
        each = np.array(list(found[name].values()))
        epochs = np.arange(each.shape[1])
        if len(each) > 1:
            left.fill_between(epochs, each.min(axis=0), each.max(axis=0),
                              color=colours[name], alpha=0.08, linewidth=0)
        left.plot(epochs, each.mean(axis=0), color=colours[name], marker="o",
                  markersize=4, linewidth=2.6 if name in (GLUON, ALL)
                  else 1.6, linestyle=DASHES[i % len(DASHES)], label=name)
    left.set(xlabel="epoch (0: before training)", ylabel="test accuracy",
             title="2 devices: mean of the seeds, least to largest")
    left.legend(frameon=False, fontsize=9, handlelength=3.2)
    others = [name for name in shown if name != GLUON]
    for y, name in enumerate(others):
        less = gaps(found, name, GLUON)
        if less:
            right.plot(less, [y] * len(less), "o", color=colours[name],
                       markersize=6, alpha=0.7)
            right.plot([np.mean(less)] * 2, [y - 0.28, y + 0.28],
                       color=colours[name], linewidth=3)
    right.axvline(0, color=GREY, linewidth=1)
    right.set_yticks(range(len(others)), others)
    right.invert_yaxis()
    right.grid(False, axis="y")
    right.set(xlabel="test accuracy less that of Gluon's version, same seed",
              title="last epoch: a point per seed, bar: mean")
    figure.suptitle(
        f"ResNet-18, {settings.rows} training and {settings.test_rows} test "
        f"examples, batch {2 * settings.batch}, lr {2 * settings.lr:g}",
        color=INK, fontsize=13)
    write_figure(figure, path)


# -- command line -----------------------------------------------------------

def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="fashion-mnist",
                        help="the name of a data set, or a folder of IDX "
                        "files")
    parser.add_argument("--backend", default="torch",
                        choices=["mxnet", "torch"],
                        help="the backend; the timer is measured on both")
    parser.add_argument("--seeds", default="0,1",
                        help="a training of each version for each seed")
    parser.add_argument("--quick", action="store_true",
                        help="use a few examples only, to see that all of it "
                        "runs")
    parser.add_argument("--report", action="store_true",
                        help="run nothing, draw what is finished")
    parser.add_argument("--only", help="the names of some runs and "
                        "measurements, as in --work, separated by commas")
    parser.add_argument("--work", type=pathlib.Path,
                        default=pathlib.Path("out/departures"),
                        help="the folder in which each run keeps its result")
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path("out/departures"),
                        help="the folder for departures.json and .png")
    options = parser.parse_args(arguments)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    settings = Settings(options.data, options.backend,
                        **(QUICK if options.quick else {}))
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    jobs = {f"exact-{name}": partial(measure, settings)
            for name, measure in MEASUREMENTS.items()}
    jobs.update({f"{slug(name)}-{seed}": partial(
        train_version, settings, name, seed, options.work)
        for seed in seeds for name in VERSIONS})
    wanted = options.only.split(",") if options.only else list(jobs)
    unknown = [name for name in wanted if name not in jobs]
    if unknown:
        parser.error(f"--only takes {', '.join(jobs)}; received "
                     f"{', '.join(unknown)}")
    done = {}
    with mgpu.using_backend(options.backend):
        for name in wanted:
            if options.report and not (options.work / f"{name}.json").exists():
                print(f"not done yet: {name}", flush=True)
                continue
            done[name] = once(options.work / f"{name}.json", settings,
                              jobs[name])
            if name.startswith("exact-"):
                print(f"{name}: {json.dumps(done[name], indent=1)}",
                      flush=True)
    if options.only:
        return done
    exact = {name: done[f"exact-{name}"] for name in MEASUREMENTS
             if f"exact-{name}" in done}
    runs = [done[key] for key in (f"{slug(name)}-{seed}" for seed in seeds
                                  for name in VERSIONS) if key in done]
    results = {"settings": {**settings._asdict(),
                            "data": pathlib.Path(settings.data).name},
               "seeds": seeds, "exact": exact, "runs": runs}
    for run in runs:
        run["loss"] = [round(loss, 4) for loss in run["loss"]]
    write_json(options.out / "departures.json", results)
    draw(runs, settings, options.out / "departures.png")
    print_table(runs)
    return results


if __name__ == "__main__":
    main()
