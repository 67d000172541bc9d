"""What a training writes down: `CSVLogger`, `TensorBoard`, the history's
figure, and how losses, schedules and callbacks print."""
import csv
import json
import re
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

import forked
import mgpu
from helpers import mlp, on
from mgpu.training import callbacks

rng = np.random.default_rng(0)
X, LABELS = rng.normal(size=(12, 6)), rng.integers(0, 3, 12).astype("int32")
DATA = [(X[:5], LABELS[:5]), (X[5:], LABELS[5:])]
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def train(backend, epochs=3, test=DATA, **options):
    replicas = mgpu.initialize(mlp(backend, units=(6, 4, 3)), on(0, 1),
                               "uniform", seed=3, dtype="float64")
    trainer = mgpu.Trainer(
        replicas, "sgd", lr_scheduler=lambda n: 0.5 / (1 + n // 3))
    return mgpu.train(replicas, DATA, test, LOSS, trainer, epochs, **options)


def table(file):
    with open(file, newline="") as stream:
        return list(csv.DictReader(stream))


# -- the table ----------------------------------------------------------------

def test_the_table_has_the_numbers_of_the_history(backend, tmp_path):
    file = tmp_path / "log.csv"
    history = train(backend, callbacks=[callbacks.CSVLogger(file)])
    found = table(file)
    for name in ("train_loss", "test_acc", "seconds", "images_per_second"):
        assert [float(row[name]) for row in found] == getattr(history, name)
    assert [row["epoch"] for row in found] == ["1", "2", "3"]
    assert [row["step"] for row in found] == ["2", "4", "6"]
    assert [float(row["learning_rate"]) for row in found] == [
        0.5, 0.25, 0.5 / 3]
    # without test data; the file is replaced
    train(backend, 1, None, callbacks=[callbacks.CSVLogger(file)])
    assert [row["test_acc"] for row in table(file)] == [""]


def test_a_resumed_run_has_the_whole_table(backend, tmp_path):
    """Also of epochs whose line was written and whose checkpoint was not."""
    file = tmp_path / "log.csv"

    def logged(epochs, *more, resume="auto"):
        return train(backend, epochs, checkpoint_dir=tmp_path / "run",
                     resume=resume, callbacks=[
                         callbacks.CSVLogger(file), *more])

    class Killed(Exception):
        pass

    def fail(event):
        if event.epoch == 2:
            raise Killed
    with pytest.raises(Killed):
        logged(3, fail)
    assert len(table(file)) == 2
    history = logged(3)
    found = table(file)
    assert [row["epoch"] for row in found] == ["1", "2", "3"]
    assert [float(x["train_loss"]) for x in found] == history.train_loss
    assert [float(row["learning_rate"]) for row in found] == [
        0.5, 0.25, 0.5 / 3]


def test_a_killed_run_leaves_whole_lines(backend, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"""
import os, signal
import numpy as np
import mgpu
from helpers import mlp
mgpu.set_backend({backend.name!r})
replicas = mgpu.initialize(mlp(mgpu.get_backend(), units=(6, 4, 3)),
                           mgpu.list_devices(2), "uniform")
trainer = mgpu.Trainer(replicas, "sgd", {{"learning_rate": 0.1}})
data = [(np.ones((4, 6), "float32"), np.zeros(4, "int32"))] * 3
mgpu.train(replicas, data, None, mgpu.losses.SoftmaxCrossEntropyLoss(),
           trainer, 5, callbacks=[
    mgpu.callbacks.CSVLogger({str(tmp_path / "log.csv")!r}),
    mgpu.callbacks.each_step(lambda event: event.step == 8
                             and os.kill(os.getpid(), signal.SIGKILL))])
""")

    ended = subprocess.run([forked.python(), str(program)], timeout=120,
                           env={"PYTHONPATH": f"{forked.ROOT}:"
                                f"{forked.ROOT / 'tests'}"})
    assert ended.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert [row["step"] for row in table(tmp_path / "log.csv")] == ["3", "6"]


@pytest.mark.parametrize("file, error", [
    ("", IsADirectoryError), ("none/log.csv", FileNotFoundError)])
def test_a_file_that_cannot_be_written_is_refused_first(backend, tmp_path,
                                                        file, error):
    seen = []
    with pytest.raises(error):
        train(backend, callbacks=[
            callbacks.each_step(seen.append),
            callbacks.CSVLogger(tmp_path / file)])
    assert not seen


# -- TensorBoard --------------------------------------------------------------

class Writer:
    """Stands for `tensorboardX.SummaryWriter`."""

    made = []

    def __init__(self, logdir, purge_step=None, flush_secs=120):
        self.logdir, self.purge_step = logdir, purge_step
        self.scalars, self.closed = {}, False
        Writer.made.append(self)

    def add_scalar(self, tag, value, step):
        self.scalars.setdefault(tag, []).append((step, value))

    def flush(self):
        assert not self.closed

    def close(self):
        self.closed = True


@pytest.fixture
def written(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX",
                        types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(Writer, "made", [])
    return Writer.made


def test_tensorboard_gets_the_numbers_of_the_history(backend, tmp_path,
                                                     written):
    board = callbacks.TensorBoard(tmp_path / "board")
    history = train(backend, callbacks=[board])
    one, = written
    assert one.closed and one.logdir == str(tmp_path / "board")
    assert one.scalars == {
        "loss_per_step": [*enumerate(history.loss_per_step, 1)],
        "train_loss": [*zip((2, 4, 6), history.train_loss)],
        "test_acc": [*zip((2, 4, 6), history.test_acc)],
        "learning_rate": [(2, 0.5), (4, 0.25), (6, 0.5 / 3)]}
    # a second training begins anew, without test data
    train(backend, 1, None, callbacks=[board])
    assert "test_acc" not in written[1].scalars
    assert written[1].purge_step == 1


def test_a_resumed_run_goes_on_in_tensorboard(backend, tmp_path, written):
    for epochs in (1, 3):
        history = train(backend, epochs, checkpoint_dir=tmp_path / "run",
                        resume="auto", callbacks=[
                            callbacks.TensorBoard(tmp_path)])
    first, second = (one.scalars["loss_per_step"] for one in written)
    assert [one.purge_step for one in written] == [1, 3]
    assert first + second == [*enumerate(history.loss_per_step, 1)]


def test_without_a_writer_the_error_has_the_command(monkeypatch, tmp_path):
    for name in ("tensorboardX", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        callbacks.TensorBoard(tmp_path)


def test_the_recipe_for_wandb_logs_each_epoch(backend, monkeypatch):
    logged, ended = [], []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(
        init=lambda project, mode: types.SimpleNamespace(
            log=lambda values, step: logged.append((step, mode, values)),
            finish=lambda: ended.append(True))))
    page = forked.ROOT / "docs" / "guide" / "logging.md"
    recipe = re.findall(r"```python\n(import wandb.*?)```", page.read_text(),
                        re.DOTALL)
    replicas = mgpu.initialize(mlp(backend, units=(6, 4, 3)), on(0, 1),
                               "uniform", seed=3, dtype="float64")
    names = {"mgpu": mgpu, "replicas": replicas, "train_iter": DATA,
             "test_iter": DATA, "loss": LOSS, "trainer": mgpu.Trainer(
                 replicas, "sgd", {"learning_rate": 0.1})}
    exec(recipe[0], names)
    history = names["history"]
    assert ended == [True] and logged == [
        (step, "online", {"train_loss": loss, "test_acc": accuracy})
        for step, loss, accuracy in zip(
            (2, 4), history.train_loss, history.test_acc)]


# -- the history --------------------------------------------------------------

def test_a_history_as_a_dict_and_as_a_figure(backend, tmp_path):
    history = train(backend)
    copy = history.to_dict()
    assert json.loads(json.dumps(copy)) == vars(history)
    copy["train_loss"].clear()
    assert len(history.train_loss) == 3
    figure = history.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    lines = [[*axes.lines[0].get_ydata()] for axes in figure.axes]
    assert lines == [history.loss_per_step, history.train_loss,
                     history.test_acc]
    assert len(train(backend, test=None).plot().axes) == 2
    with pytest.raises(ValueError, match="needs a training step"):
        mgpu.History().plot()


# -- how things print ---------------------------------------------------------

@pytest.mark.parametrize("made", [
    "FactorScheduler(step=3, factor=0.5, stop_factor_lr=1e-08, base_lr=0.1, "
    "warmup_steps=0, warmup_begin_lr=0.0, warmup_mode='linear')",
    "MultiFactorScheduler(step=[2, 5], factor=1.0, base_lr=0.01, "
    "warmup_steps=1, warmup_begin_lr=0.0, warmup_mode='constant')",
    "PolyScheduler(max_update=9, base_lr=0.1, pwr=3.0, final_lr=0.0, "
    "warmup_steps=0, warmup_begin_lr=0.0, warmup_mode='linear')",
    "CosineScheduler(max_update=9, base_lr=0.1, final_lr=0.01, "
    "warmup_steps=2, warmup_begin_lr=0.0, warmup_mode='linear')",
    "EarlyStopping(patience=2, monitor='train_loss', min_delta=0.5, "
    "restore_best=True)", "Checkpoint(path='w.safetensors', monitor=None)",
    "LearningRateLog()", "EMA(decay=0.5)", "CSVLogger(file='log.csv')",
    "HuberLoss(rho=2.0)", "L2Loss(weight=1.0)",
    "SoftmaxCrossEntropyLoss(axis=1, sparse_label=False, "
    "from_logits=False)"])
def test_a_repr_has_the_options(made):
    names = {name: getattr(module, name) for module in (
        mgpu.lr_scheduler, callbacks, mgpu.losses) for name in dir(module)}
    assert repr(eval(made, names)) == made


# -- losses -------------------------------------------------------------------

def test_losses_that_training_returns_are_detached(backend):
    replicas = mgpu.initialize(mlp(backend, units=(6, 4, 3)), on(0, 1),
                               "uniform", dtype="float64")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})

    def number(output, label):
        return LOSS(output, label).mean()
    for loss in (LOSS, number):
        losses = [x for x in mgpu.train_batch(X, LABELS, replicas, loss,
                                              trainer) if x is not None]
        for x in losses:
            assert getattr(x, "grad_fn", None) is None
            with pytest.raises(RuntimeError):
                mgpu.backward(x)
