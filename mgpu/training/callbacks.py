"""What `mgpu.train` calls after steps and epochs.

A callback is an object with ``on_step(event)``, ``on_epoch(event)`` or
``on_end(event)``, or a function, which is called as `on_epoch`. Each gets an
`Event`. `on_step` comes when a step is done on the host and its losses are
not read yet; `on_epoch` when all devices were waited for, the history has the
epoch with its test accuracy, and no checkpoint of it is written yet; `on_end`
when training has ended by itself or by `Event.stop`, after the last
checkpoint. An error in one ends the training.

With several processes each rank calls its own, and all ranks stop if one
asks for it. A callback that has ``state()`` and ``restore(state)`` (as those
of this module have) continues where `train` resumes: `state` returns a pair,
the same on all ranks, and `restore` takes it. The first is made of numbers
(of NumPy's too), text, None, arrays, and lists, tuples and dicts of them; the
second is a dict of NumPy arrays. Other callbacks start anew.
"""
import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from mgpu.checkpoints import extra_states, weight_files
from mgpu.training.replicas import Replicas
from mgpu.training.trainer import Trainer
from mgpu.utils.arguments import described, integer, number, one_of
from mgpu.utils.files import (FilePath, check_file, check_folder, path_of,
                              replacing)

__all__ = ["CSVLogger", "EMA", "Checkpoint", "EarlyStopping", "Event",
           "LearningRateLog", "TensorBoard", "each_step"]

Values = dict[str, np.ndarray]
State = tuple[Any, Mapping[str, np.ndarray]]
_HOOKS = ("on_step", "on_epoch", "on_end")
_MONITORS = ("test_acc", "train_loss")


class Event:
    """Where a training is.

    Attributes
    ----------
    replicas : Replicas
    trainer : Trainer
    history : History
        In `on_step` without the losses of the steps that are queued.
    epoch, num_epochs : int
        The epoch of the step, or the one that has ended, from 1; and of how
        many.
    step : int
        Steps so far, those before a resume included.
    learning_rate : float
        Of this step, or of the last one of the epoch; what callbacks set
        afterwards is not in it.
    losses : list of native arrays, or None
        What `train_batch` returns, in `on_step`; with ``accumulate`` those
        of each batch, one after the other.
    """

    def __init__(self, replicas: Replicas, trainer: Trainer, history: Any,
                 epoch: int, num_epochs: int, step: int,
                 losses: Sequence[Any] | None = None) -> None:
        self.replicas, self.trainer, self.history = replicas, trainer, history
        self.epoch, self.num_epochs, self.step = epoch, num_epochs, step
        self.losses = losses
        self.learning_rate = float(trainer.learning_rate)
        #: whether a callback has called `stop`
        self.stopping = False

    def stop(self) -> None:
        """End the training, on all ranks: after this step, without the rest
        of its epoch, as a signal does; or after this epoch."""
        self.stopping = True

    @property
    def loss(self) -> float:
        """The mean loss of the rows of this step, or of the epoch. Of a
        step: those of this process; reading it waits for the step. NaN
        without rows."""
        if self.losses is None:
            return float((self.history.train_loss or [float("nan")])[-1])
        every = [self.replicas.backend.to_numpy(x).astype(np.float64)
                 for x in self.losses if x is not None]
        rows = sum(map(len, every))
        return sum(float(x.sum()) for x in every) / rows if rows \
            else float("nan")


def _calling(hook: str, function: Callable[[Event], Any]) -> Any:
    """A callback that calls `function`."""
    return SimpleNamespace(**{hook: function, "__qualname__": getattr(
        function, "__qualname__", type(function).__qualname__)})


def each_step(function: Callable[[Event], Any]) -> Any:
    """A callback that calls `function` with an `Event` after each step:
    ``each_step(lambda event: scheduler.step())``."""
    return _calling("on_step", function)


def _label(callback: Any) -> str:
    """What a callback is, with what its state depends on."""
    return type(callback).__qualname__ + getattr(callback, "_options", "")


class _Lasting:
    """A callback of this module."""

    def __repr__(self) -> str:
        return described(self)

    def fit(self, replicas: Replicas, evaluates: bool, saves: bool) -> None:
        """Raise ValueError where it does not fit a training; nothing has
        changed."""

    def begin(self, replicas: Replicas) -> None:
        """A training begins."""


class Calls:
    """The callbacks of one `train`. TypeError for what is none.

    Parameters
    ----------
    callbacks : sequence
    replicas, trainer : Replicas and Trainer
    evaluates : bool
        Whether the history gets a test accuracy.
    saves : bool
        Whether checkpoints are written.
    """

    def __init__(self, callbacks: Any = (), replicas: Any = None,
                 trainer: Any = None, evaluates: bool = False,
                 saves: bool = False) -> None:
        self._all: list[Any] = []
        for one in callbacks:
            hooks = any(callable(getattr(one, hook, None)) for hook in _HOOKS)
            if isinstance(one, type) or not (hooks or callable(one)):
                raise TypeError(
                    "a callback has on_step(event), on_epoch(event) or "
                    "on_end(event), or is a function of an event; received "
                    f"{one!r}. Make an object of a class, or use "
                    "mgpu.callbacks.each_step(function).")
            self._all.append(one if hooks else _calling("on_epoch", one))
        self._replicas, self._trainer = replicas, trainer
        self._own = [one for one in self._all if isinstance(one, _Lasting)]
        self._lasting = [one for one in self._all if hasattr(one, "state")
                         and hasattr(one, "restore")]
        self._begun = False
        for one in self._own:
            one.fit(replicas, evaluates, saves)
        for one in self._lasting if saves else ():
            try:
                state = one.state()
            except Exception:   # it has none before the first step
                continue
            self._pack(0, one, state, {})

    def names(self) -> list[str]:
        """What each is, in words that are the same on all ranks."""
        return [getattr(one, "__qualname__", type(one).__qualname__)
                for one in self._all]

    def _begin(self) -> None:
        """Begin the training, or resume it: no batch has raised."""
        for one in self._own if not self._begun else ():
            one.begin(self._replicas)
        self._begun = True

    def call(self, hook: str, *place: Any) -> bool:
        """Call `hook` of all with an `Event` of `place`; returns whether one
        of any rank asks for the end."""
        self._begin()
        called = [one for one in self._all if hasattr(one, hook)]
        if not called:
            return False
        event = Event(self._replicas, self._trainer, *place)
        for one in called:
            getattr(one, hook)(event)
        return any(self._replicas.span.world.gather(
            f"train: callbacks, {hook}", event.stopping))

    def state(self) -> tuple[list[Any], dict[str, np.ndarray]]:
        """Names and states, and arrays, of those that have a state."""
        self._begin()
        found: list[Any] = []
        arrays: Values = {}
        for i, one in enumerate(self._lasting):
            found.append([_label(one),
                          self._pack(i, one, one.state(), arrays), True])
        return found, arrays

    def _pack(self, i: int, one: Any, pair: Any, arrays: Values) -> Any:
        """What ``one.state()`` gave, as JSON; its arrays go to `arrays`."""
        state, own = pair
        words = "the state of a callback", _label(one), "state()"
        backend = self._replicas.backend
        extra_states.pack([*own.values()], {}, "", backend, words)
        arrays |= {f"{i}|{name}": x for name, x in own.items()}
        return extra_states.pack(state, arrays, f"{i}:", backend, words)

    def check(self, saved: Sequence[Any]) -> None:
        """Raise ValueError unless the callbacks are those of `state`."""
        names = [_label(one) for one in self._lasting]
        if [name for name, *_ in saved] != names:
            raise ValueError(
                "train resumes with the callbacks that it has begun with; "
                f"received {names} for {[name for name, *_ in saved]}. Pass "
                "the same, or use another checkpoint_dir.")

    def restore(self, saved: Sequence[Any], arrays: Mapping[str, np.ndarray]
                ) -> bool:
        """Restore `state`. Returns whether a callback had stopped the
        training."""
        self._begin()
        backend, first = self._replicas.backend, self._replicas.devices[0]
        for i, (one, (_, state, *packed)) in enumerate(
                zip(self._lasting, saved)):
            begin = f"{i}|"
            if packed:      # by a version before, it is JSON as it is
                state = extra_states.unpack(state, arrays, f"{i}:", backend,
                                            first)
            one.restore((state, {key.removeprefix(begin): x
                                 for key, x in arrays.items()
                                 if key.startswith(begin)}))
        return any(getattr(one, "stopped", False) for one in self._all)


class _Monitor(_Lasting):
    """A callback that compares a list of the history with its best value."""

    best: float | None = None

    def __init__(self, monitor: str | None, min_delta: float = 0.0) -> None:
        self._monitor = one_of("monitor", monitor, (*_MONITORS, None))
        self._min_delta = number("min_delta", min_delta, 0)

    def fit(self, replicas: Replicas, evaluates: bool, saves: bool) -> None:
        if self._monitor == "test_acc" and not evaluates:
            raise ValueError("monitor='test_acc' takes a training with "
                             "test_iter or evaluate; received neither.")

    def begin(self, replicas: Replicas) -> None:
        """`train` begins. It starts anew, until `restore`."""
        self._replicas, self.best = replicas, None

    def _improves(self, history: Any) -> bool:
        """Whether the last value is better, by more than `min_delta`; then
        it is the best. Without a monitor: always."""
        if self._monitor is None:
            return True
        value = getattr(history, self._monitor)[-1]
        sign = 1 if self._monitor == "test_acc" else -1
        better = value == value if self.best is None \
            else sign * (value - self.best) > self._min_delta
        if better:
            self.best = value
        return better


def _values_of(replicas: Replicas) -> Values:
    """What `Replicas.import_numpy` puts back on each device; buffers that are
    equal on all, once, so that another number of devices takes them."""
    with warnings.catch_warnings():     # of several processes
        warnings.simplefilter("ignore", UserWarning)
        values = replicas.export_numpy(all_devices=True)
    for p in replicas.buffers():
        every = values[p.name]
        if every.shape != p.shape \
                and len({one.tobytes() for one in every}) == 1:
            values[p.name] = every[0]
    return values


class EarlyStopping(_Monitor):
    """Ends a training that gets no better.

    Parameters
    ----------
    patience : int
        Stop after so many epochs in a row without a new best, 1 or more.
    monitor : {"test_acc", "train_loss"}
        A list of `History`: the larger accuracy is better, the smaller loss.
    min_delta : float
        A new best is better by more than this.
    restore_best : bool
        When the training has ended (also by `num_epochs`), put back weights
        and buffers of the best epoch. The trainer's states, and a checkpoint
        of `train`, are those of the last one.

    Attributes
    ----------
    best : float or None
    waited : int
        Epochs since then.
    stopped : bool
        Whether it has ended the training; it stays so where that is resumed.

    Raises
    ------
    ValueError
        Another `patience`, `monitor` or `min_delta`. In `train`: "test_acc"
        without test data; `restore_best` with `checkpoint_dir` in several
        processes.
    """

    def __init__(self, patience: int, monitor: str = "test_acc",
                 min_delta: float = 0.0, restore_best: bool = False) -> None:
        super().__init__(one_of("monitor", monitor, _MONITORS), min_delta)
        self._patience = integer("patience", patience, 1)
        self._restore_best = bool(restore_best)
        self._options = f"({monitor!r}, restore_best={self._restore_best})"
        self._values: Values = {}
        self.waited, self.stopped = 0, False

    def fit(self, replicas: Replicas, evaluates: bool, saves: bool) -> None:
        super().fit(replicas, evaluates, saves)
        if self._restore_best and saves and replicas.span.wide:
            raise ValueError(
                "a checkpoint of several processes holds no best weights; "
                "received restore_best=True with checkpoint_dir. Use "
                "mgpu.callbacks.Checkpoint.")

    def begin(self, replicas: Replicas) -> None:
        super().begin(replicas)
        self._values, self.waited, self.stopped = {}, 0, False

    def on_epoch(self, event: Event) -> None:
        if self._improves(event.history):
            self.waited = 0
            if self._restore_best:
                self._values = _values_of(event.replicas)
        else:
            self.waited += 1
            if self.waited >= self._patience:
                self.stopped = True
                event.stop()

    def on_end(self, event: Event) -> None:
        if self._values:    # the next epoch may have begun, and been stopped
            event.replicas.import_numpy(self._values)

    def state(self) -> State:
        return [self.best, self.waited, self.stopped], self._values

    def restore(self, state: State) -> None:
        (self.best, self.waited, self.stopped), values = state
        self._values = dict(values)
        if self._values:    # raises now, if it would at the end
            self._replicas.fit_numpy(self._values)


class Checkpoint(_Monitor):
    """Write parameters and buffers after each epoch (`Replicas.save`), or
    after each best epoch so far. A training cannot resume from this file: use
    the `checkpoint_dir` of `train`.

    Parameters
    ----------
    path : path
        One file, replaced each time.
    monitor : {None, "test_acc", "train_loss"}
        None: every epoch.

    Attributes
    ----------
    best : float or None
        Of the file.
    """

    def __init__(self, path: FilePath, monitor: str | None = None) -> None:
        super().__init__(monitor)
        self._path = path_of(path)
        self._options = f"(monitor={monitor!r})"

    def fit(self, replicas: Replicas, evaluates: bool, saves: bool) -> None:
        super().fit(replicas, evaluates, saves)
        weight_files.check_ending(check_file(self._path))

    def on_epoch(self, event: Event) -> None:
        if self._improves(event.history):
            event.replicas.save(self._path)

    def state(self) -> State:
        return self.best, {}

    def restore(self, state: State) -> None:
        self.best = state[0]


class LearningRateLog(_Lasting):
    """The learning rate of each step.

    Attributes
    ----------
    rates : list of float
    """

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step(self, event: Event) -> None:
        self.rates.append(event.learning_rate)

    def state(self) -> State:
        return self.rates, {}

    def restore(self, state: State) -> None:
        self.rates = list(state[0])


class CSVLogger(_Lasting):
    """Writes a table of the training: one line for each epoch.

    After each epoch the file is replaced, so a program that is killed leaves
    a whole one. In a training that is resumed (`checkpoint_dir` of `train`)
    it has the epochs before the stop too. Of several processes rank 0
    writes.

    Columns: ``epoch``, ``step`` (steps so far), ``learning_rate`` (of the
    last step of the epoch), and of `History` ``train_loss``, ``test_acc``
    (empty without test data), ``seconds`` and ``images_per_second``.

    Parameters
    ----------
    file : path
        Replaced if it exists.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        In `train`, before the first step: its folder does not exist, or it
        is a folder.
    """

    def __init__(self, file: FilePath) -> None:
        self._file, self._evaluates = path_of(file), False
        self._rows: list[tuple[float | None, ...]] = []

    def fit(self, replicas: Replicas, evaluates: bool, saves: bool) -> None:
        self._evaluates = evaluates
        if replicas.span.world.is_main:
            check_folder(check_file(self._file), "a CSVLogger")

    def begin(self, replicas: Replicas) -> None:
        self._rows = []

    def on_epoch(self, event: Event) -> None:
        history = event.history
        self._rows.append((
            event.epoch, event.step, event.learning_rate,
            history.train_loss[-1],
            history.test_acc[-1] if self._evaluates else None,
            history.seconds[-1], history.images_per_second[-1]))
        if event.replicas.span.world.is_main:
            with replacing(self._file) as part:
                part.write(_COLUMNS)
                part.writelines(",".join(
                    "" if x is None else repr(x) for x in row) + "\n"
                    for row in self._rows)

    def state(self) -> State:
        return self._rows, {}

    def restore(self, state: State) -> None:
        self._rows = list(state[0])


#: the first line of the file of `CSVLogger`
_COLUMNS = ("epoch,step,learning_rate,train_loss,test_acc,seconds,"
            "images_per_second\n")


def _summary_writer() -> Any:
    """The class that writes the files of TensorBoard."""
    for name in _WRITERS:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).SummaryWriter
    raise ImportError(
        "mgpu.callbacks.TensorBoard needs the package tensorboard (with "
        "PyTorch) or tensorboardX. Run pip install tensorboardX.")


_WRITERS = ("tensorboardX", "torch.utils.tensorboard")


class TensorBoard(_Lasting):
    """Writes a training for TensorBoard: ``tensorboard --logdir folder``.

    Scalars, by the number of the step: ``loss_per_step``; with each epoch
    ``train_loss``, ``test_acc`` (with test data) and ``learning_rate``. The
    loss of a step is written when `History` has it, which waits for nothing:
    in several processes at the end of the epoch, when it is that of all. Of
    several processes rank 0 writes. In a training that is resumed TensorBoard
    hides what was written of steps after the checkpoint.

    Parameters
    ----------
    folder : path
        Made if it does not exist; one for each run.

    Raises
    ------
    ImportError
        Neither tensorboardX nor PyTorch's writer (package tensorboard) is
        installed.
    """

    def __init__(self, folder: FilePath) -> None:
        self._folder = path_of(folder)
        _summary_writer()
        self._writer: Any = None
        self._written = 0       # steps

    def begin(self, replicas: Replicas) -> None:
        self._writer = None

    def on_step(self, event: Event) -> None:
        if not event.replicas.span.world.is_main:
            return
        if self._writer is None:
            self._written = event.step - 1
            self._writer = _summary_writer()(
                self._folder, purge_step=event.step, flush_secs=10)
        if not event.replicas.span.wide:
            self._write_steps(event)

    def _write_steps(self, event: Event) -> None:
        losses = event.history.loss_per_step
        for step in range(self._written, len(losses)):
            self._writer.add_scalar("loss_per_step", losses[step], step + 1)
        self._written = max(self._written, len(losses))

    def on_epoch(self, event: Event) -> None:
        if self._writer is None:
            return
        self._write_steps(event)
        history = event.history
        for name, values in (("train_loss", history.train_loss),
                             ("test_acc", history.test_acc),
                             ("learning_rate", [event.learning_rate])):
            if values:
                self._writer.add_scalar(name, values[-1], event.step)
        self._writer.flush()

    def on_end(self, event: Event) -> None:
        if self._writer is not None:
            self._write_steps(event)
            self._writer.close()
            self._writer = None


class EMA(_Lasting):
    """Exponential moving averages of the parameters, as those of
    ``torch.optim.swa_utils.AveragedModel`` with
    ``get_ema_multi_avg_fn(decay)`` that are updated after each step (skipped
    ones too): ``average = decay * average + (1 - decay) * parameter``, where
    the first update takes the parameters as they are then. In the dtype of
    each parameter, on the first device. Buffers are not averaged (torch's
    ``use_buffers=False``): they are those of the training.

    In `train` it is a callback; in a loop of your own call `update`.

    Parameters
    ----------
    decay : float
        From 0 to 1.

    Attributes
    ----------
    updates : int
    """

    def __init__(self, decay: float = 0.999) -> None:
        self._decay = number("decay", decay, 0, 1)
        self._replicas: Replicas | None = None
        self._averages: dict[str, Any] = {}
        self.updates = 0

    def fit(self, replicas: Replicas, evaluates: bool = False,
            saves: bool = False) -> None:
        if self._replicas not in (None, replicas):
            raise ValueError("an EMA is of one network; received other "
                             f"replicas, {replicas!r}. Make a new EMA.")

    def begin(self, replicas: Replicas) -> None:
        """`train` begins."""
        self._replicas = replicas

    def on_step(self, event: Event) -> None:
        self.update(event.replicas)

    def update(self, replicas: Replicas) -> None:
        """Take the parameters as they are now into the averages. ValueError
        for other replicas than before."""
        self.fit(replicas)
        self.begin(replicas)
        backend, weight = replicas.backend, 1.0 - self._decay
        with backend.scope(recording=False):
            for p in replicas.params():
                x, average = p.data(), self._averages.get(p.name)
                if average is None:
                    self._averages[p.name] = backend.put(x, x)
                else:
                    average += (x - average) * weight
        self.updates += 1

    def averages(self) -> Values:
        """NumPy copies by name; waits. RuntimeError before an update."""
        backend = self._of().backend
        return {name: backend.to_numpy(x)
                for name, x in self._averages.items()}

    def _of(self) -> Replicas:
        if self._replicas is None or not self._averages:
            raise RuntimeError("averages begin with the first step; received "
                               "no update yet. Call ema.update(replicas).")
        return self._replicas

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """In the block the network holds the averages; then again the bits
        that it had.

        Raises
        ------
        RuntimeError
            There was no update; or the parameters were changed in the block,
            by a training for example. They are what they were before it.
        """
        replicas = self._of()
        backend = replicas.backend
        parameters = replicas.params()
        with backend.scope(recording=False):
            before = [backend.put(p.data(), p.data()) for p in parameters]
        changed: list[str] = []
        try:
            for p in parameters:
                p.set_data(self._averages[p.name])
            put = [backend.to_numpy(p.data()).tobytes() for p in parameters]
            yield
            changed = [p.name for p, bits in zip(parameters, put)
                       if backend.to_numpy(p.data()).tobytes() != bits]
        finally:
            for p, x in zip(parameters, before):
                p.set_data(x)
        if changed:
            raise RuntimeError(
                "EMA.applied is for predictions; received a change of "
                f"{changed[0]!r}, which is undone. Train outside of it.")

    def state(self) -> State:
        return self.updates, self.averages() if self.updates else {}

    def restore(self, state: State) -> None:
        self.updates, values = state
        assert self._replicas is not None
        backend = self._replicas.backend
        self._averages = {
            p.name: backend.put(values[p.name], p.data(), dtype=p.dtype)
            for p in self._replicas.params() if p.name in values}
