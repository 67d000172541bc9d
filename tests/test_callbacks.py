"""Callbacks of `train`; several batches in one step; gradients that are
clipped in it."""
import collections
import signal

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import assert_all_equal, mlp, on
from mgpu import datasets
from mgpu.training import callbacks
from nets import dense_norm, gated

rng = np.random.default_rng(0)
X, LABELS = rng.normal(size=(22, 6)), rng.integers(0, 3, 22).astype("int32")
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()
#: uneven, and fewer rows than devices
CUTS = ((0, 8), (8, 9), (9, 14), (14, 20), (20, 22))
DATA = [(X[begin:end], LABELS[begin:end]) for begin, end in CUTS]
#: the same three steps, each of one batch
JOINED = [(X[:9], LABELS[:9]), (X[9:20], LABELS[9:20]),
          (X[20:], LABELS[20:])]


def made(backend, devices, optimizer="sgd", net=None, **options):
    params = options.pop("params", {"learning_rate": 0.5})
    replicas = mgpu.initialize(
        net or mlp(backend, units=(6, 4, 3)), devices, "uniform", seed=3,
        dtype="float64")
    return replicas, mgpu.Trainer(replicas, optimizer, params, **options)


def train(run, data=DATA, epochs=2, **options):
    replicas, trainer = run
    return mgpu.train(replicas, data, None, LOSS, trainer, epochs,
                      progress=False, **options)


def assert_near(run, other, limit=1e-12):
    a, b = (one[0].export_numpy() for one in (run, other))
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=limit)
    run[0].check_equal()


def assert_same(found, wanted):
    for name, x in wanted.items():
        np.testing.assert_array_equal(found[name], x)


# -- accumulation -------------------------------------------------------------

@pytest.mark.parametrize("kind", ["plain", "scaled", "clipped"])
def test_accumulated_batches_are_one_step_of_the_joined_batch(
        backend, devices, kind):
    """The last step of an epoch has the batches that are left."""
    options = {"loss_scale": "dynamic"} if kind == "scaled" else {}
    clip = {"clip_norm": 0.125} if kind == "clipped" else {}
    params = {"learning_rate": 0.5, "momentum": 0.5, "wd": 0.01}
    run, joined, cut = (made(backend, devices, params=params, **options)
                        for _ in range(3))
    history = train(run, accumulate=2, **clip)
    expected = train(joined, JOINED, **clip)
    assert_near(run, joined)
    assert run[1].num_update == joined[1].num_update == 6
    np.testing.assert_allclose(history.loss_per_step, expected.loss_per_step,
                               rtol=1e-12)
    np.testing.assert_allclose(history.train_loss, expected.train_loss,
                               rtol=1e-12)
    # and in a batch that is cut
    losses = [mgpu.train_batch(*batch, *cut[:1], LOSS, cut[1], accumulate=3,
                               **clip) for batch in JOINED * 2]
    assert_near(cut, joined)
    assert sum(len(x) for x in losses[0] if x is not None) == 9


def test_what_one_batch_reaches_is_updated(backend):
    """Also where the last one does not reach it."""
    first, second = X[:4].copy(), X[4:10].copy()
    first[:, 0], second[:, 0] = -1, 1       # the layers `left` and `right`
    data = [(first, LABELS[:4]), (second, LABELS[4:10])]
    for order in (data, data[::-1]):
        run, other = (made(backend, on(0), net=gated(backend))
                      for _ in range(2))
        before, sums = run[0].export_numpy(), {}
        train(run, order, 1, accumulate=2)
        for batch in order:
            mgpu.train_batch(*batch, other[0], LOSS, other[1],
                             ignore_stale_grad=True)
            for name, x in other[0].export_numpy().items():
                sums[name] = sums.get(name, 0) + (before[name] - x) \
                    * len(batch[0])
            other[0].import_numpy(before)
        for name, x in run[0].export_numpy().items():
            np.testing.assert_allclose(x, before[name] - sums[name] / 10,
                                       atol=1e-12)


def test_what_no_batch_of_a_step_reaches_is_an_error(backend):
    run = made(backend, on(0), net=gated(backend))
    before = run[0].export_numpy()
    one = X[:4].copy()
    one[:, 0] = -1
    with pytest.raises(mgpu.StaleGradientError):
        train(run, [(one, LABELS[:4])] * 2, 1, accumulate=2)
    assert_same(run[0].export_numpy(), before)


def test_buffers_move_as_in_so_many_steps(backend):
    run, frozen = (made(
        backend, on(0, 1), net=dense_norm(backend.name, columns=6),
        params={"learning_rate": rate}) for rate in (0.5, 0.0))
    before = run[0].export_numpy(all_devices=True)
    train(run, DATA[:2], 1, accumulate=2)
    train(frozen, DATA[:2], 1)
    values = frozen[0].export_numpy(all_devices=True)
    found = run[0].export_numpy(all_devices=True)
    for p in run[0].statistics():
        np.testing.assert_allclose(found[p.name], values[p.name],
                                   atol=1e-12)
        assert (found[p.name] != before[p.name]).any()


def test_a_step_that_fails_in_its_second_batch_updates_nothing(backend):
    """Running statistics have moved, as the framework leaves them."""
    run = made(backend, on(0, 1), net=dense_norm(backend.name, columns=6))
    before = run[0].export_numpy(all_devices=True)
    with pytest.raises(ValueError, match="same number of examples"):
        train(run, [DATA[0], (X[:3], LABELS[:2])], 1, accumulate=2)
    now = run[0].export_numpy(all_devices=True)
    for p in run[0].params():
        np.testing.assert_array_equal(now[p.name], before[p.name])
    assert run[1].num_update == 0
    with pytest.raises(RuntimeError, match="update requires"):
        run[1].update(9)


def test_what_accumulates_by_itself_is_refused(backend):
    class Own(mgpu.Trainer):
        def update(self, batch_size):
            super().update(batch_size)
    replicas, trainer = made(backend, on(0))
    own = Own(replicas, "sgd", {"learning_rate": 0.1})
    before = replicas.export_numpy()
    for options in ({"accumulate": 2}, {"clip_norm": 1.0}):
        with pytest.raises(ValueError, match="an Own, which|a Own, which"):
            train((replicas, own), **options)
    with pytest.raises(ValueError, match="clip_norm must be a finite"):
        train((replicas, trainer), clip_norm=0)
    with pytest.raises(ValueError, match="accumulate must be an integer"):
        train((replicas, trainer), accumulate=0)
    replicas.params()[0].grad_req = "add"
    with pytest.raises(ValueError, match="grad_req='add' of '0.weight'"):
        train((replicas, trainer), accumulate=2)
    assert_same(replicas.export_numpy(), before)


def test_an_infinite_gradient_skips_the_whole_step(backend):
    run = made(backend, on(0, 1), nonfinite="skip")
    before = run[0].export_numpy()

    def loss(output, y):
        return LOSS(output, y) * (np.inf if len(y) == 1 else 1.0)
    with pytest.raises(mgpu.NonFiniteLoss):
        mgpu.train(run[0], DATA[:2], None, loss, run[1], 1, progress=False,
                   accumulate=2, clip_norm=1.0)
    assert run[1].skipped_steps == 1 and run[1].num_update == 0
    assert_same(run[0].export_numpy(), before)


# -- clipping -----------------------------------------------------------------

@pytest.mark.parametrize("semantics, scale", [
    ("gluon", 1024.0), ("torch", None), ("torch", 1024.0)])
def test_clip_norm_is_that_of_a_loop_of_the_framework(
        backend, semantics, scale):
    """Of the gradient of the mean loss, by Gluon's and torch's formulas; the
    gradients are small, so that their constants matter."""
    limit, rate = 1e-7, 1e6

    def loss(output, y):
        return LOSS(output, y) * 1e-4
    name = "learning_rate" if semantics == "gluon" else "lr"
    run = made(backend, on(0, 1), params={name: rate}, semantics=semantics,
               loss_scale=scale)
    scaled = made(backend, on(0, 1), params={name: 0.0},
                  semantics=semantics)
    before = run[0].export_numpy()
    mgpu.train_batch(X, LABELS, run[0], loss, run[1], clip_norm=limit)
    mgpu.train_batch(X, LABELS, scaled[0], loss, scaled[1])
    gradients = [mgpu.to_numpy(p.grad()) / len(X)
                 for p in scaled[0].params()]
    if semantics == "torch":
        torch = pytest.importorskip("torch")
        leaves = [torch.zeros(g.shape, dtype=torch.float64)
                  for g in gradients]
        for leaf, g in zip(leaves, gradients):
            leaf.grad = torch.from_numpy(g.copy())
        torch.nn.utils.clip_grad_norm_(leaves, limit)
        clipped = [leaf.grad.numpy() for leaf in leaves]
    else:
        mx = pytest.importorskip("mxnet")
        # it takes float32 alone
        arrays = [mx.nd.array(g, dtype="float32") for g in gradients]
        mx.gluon.utils.clip_global_norm(arrays, limit)
        clipped = [x.asnumpy() for x in arrays]
    after = run[0].export_numpy()
    for p, g in zip(run[0].params(), clipped):
        np.testing.assert_allclose(
            (before[p.name] - after[p.name]) / rate, g, rtol=0,
            atol=limit * (1e-9 if semantics == "torch" else 1e-6))


# -- callbacks ----------------------------------------------------------------

def test_when_callbacks_come(backend):
    """After each step, after each epoch with its history, and at the end."""
    seen = []

    class Own:
        def on_step(self, event):
            seen.append(("step", event.epoch, event.step, event.loss,
                         event.trainer.num_update))

        def on_end(self, event):
            seen.append(("end", event.epoch, event.step))
    run = made(backend, on(0, 1))
    history = train(run, JOINED, 2, evaluate=lambda: 0.5, prefetch=2,
                    max_inflight=3, callbacks=[
        Own(), lambda event: seen.append((
            "epoch", event.epoch, event.step, event.loss,
            len(event.history.test_acc), event.num_epochs))])
    losses = history.loss_per_step
    steps = [("step", 1 + i // 3, i + 1, pytest.approx(losses[i]), i + 1)
             for i in range(6)]
    epochs = [("epoch", n, 3 * n, history.train_loss[n - 1], n, 2)
              for n in (1, 2)]
    assert seen == [*steps[:3], epochs[0], *steps[3:], epochs[1],
                    ("end", 2, 6)]


@pytest.mark.parametrize("at", [2, 3])
def test_a_callback_ends_the_training_after_its_step(backend, at, tmp_path):
    """The history has all steps; the checkpoint resumes with the next."""
    def stop(event):
        if event.step == at:
            event.stop()
    run = made(backend, on(0, 1))
    history = train(run, JOINED, 2, checkpoint_dir=tmp_path,
                    callbacks=[callbacks.each_step(stop)])
    assert len(history.loss_per_step) == at == run[1].num_update
    assert history.train_loss == []
    run, whole = made(backend, on(0, 1)), made(backend, on(0, 1))
    history = train(run, JOINED, 2, checkpoint_dir=tmp_path, resume="auto")
    assert history.loss_per_step == train(whole, JOINED, 2).loss_per_step
    assert_near(run, whole, 0)


def test_a_callback_ends_the_training_after_its_epoch(backend):
    run, other = made(backend, on(0, 1)), made(backend, on(0, 1))
    history = train(run, JOINED, 5, callbacks=[
        lambda event: event.epoch == 2 and event.stop()])
    assert len(history.train_loss) == 2 and len(history.seconds) == 2
    assert history.loss_per_step == train(other, JOINED, 2).loss_per_step


def test_an_error_in_a_callback_ends_the_training(backend):
    def fail(event):
        raise KeyError("mine")
    run = made(backend, on(0))
    with pytest.raises(KeyError, match="mine") as seen:
        train(run, callbacks=[callbacks.each_step(fail)])
    assert seen.value.history.train_loss == [] and run[1].num_update == 1


def test_what_is_no_callback_is_refused(backend):
    run = made(backend, on(0))
    for wrong, words in (
            ([3], "received 3"), ([callbacks.EMA], "EMA'>. Make an object"),
            ([type("Keras", (), {"on_epoch_end": print})()],
             "received .*Keras object")):
        with pytest.raises(TypeError, match=words):
            train(run, callbacks=wrong)
    assert run[1].num_update == 0


def restoring(backend, folder, policy, devices, epochs):
    """A run that ends with its best epoch; that epoch's values."""
    replicas = mgpu.initialize(
        dense_norm(backend.name, 1e-3, 6), on(*range(devices)), "uniform",
        seed=3, dtype="float64", batch_norm=policy)
    kept = []
    train((replicas, mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})),
          [(X[:10], LABELS[:10]), (X[10:], LABELS[10:])], epochs,
          checkpoint_dir=folder, resume="auto",
          resume_seed=None if devices == 2 else 1,
          evaluate=accuracies(*(0.5, 0.1, 0.2)[-epochs:]),
          callbacks=[callbacks.EarlyStopping(9, restore_best=True),
                     lambda event: kept.append(
                         event.replicas.export_numpy(all_devices=True))])
    return replicas, kept[0]


# -- stopping early -----------------------------------------------------------

def accuracies(*values):
    found = iter(values)
    return lambda: next(found)


@pytest.mark.parametrize("restore", [False, True])
def test_early_stopping_waits_for_a_better_epoch(backend, restore):
    run = made(backend, on(0, 1))
    kept = []
    stop = callbacks.EarlyStopping(2, min_delta=0.05, restore_best=restore)
    history = train(run, JOINED, 9, evaluate=accuracies(
        0.1, 0.5, 0.54, 0.3, 0.9), callbacks=[stop, lambda event: kept.append(
            event.replicas.export_numpy())])
    assert history.test_acc == [0.1, 0.5, 0.54, 0.3]
    assert stop.best == 0.5 and stop.stopped and stop.waited == 2
    assert_same(run[0].export_numpy(), kept[1 if restore else 3])
    run[0].check_equal()


def test_the_best_epoch_is_restored_after_a_stop_in_the_next(backend):
    run, kept = made(backend, on(0, 1)), []

    def stop(event):
        if kept:
            event.stop()
    train(run, JOINED, 9, evaluate=accuracies(0.5), callbacks=[
        callbacks.EarlyStopping(2, restore_best=True),
        lambda event: kept.append(event.replicas.export_numpy()),
        callbacks.each_step(stop)])
    assert run[1].num_update > 1
    assert_same(run[0].export_numpy(), kept[0])


def test_the_best_epoch_has_the_buffers_of_its_devices(backend, tmp_path):
    """Resumed on other devices, too, where they are equal on all."""
    for policy in ("average", "per_device"):
        replicas, best = restoring(backend, tmp_path / policy, policy, 2, 3)
        assert_same(replicas.export_numpy(all_devices=True), best)
    _, best = restoring(backend, tmp_path / "two", "average", 2, 1)
    replicas, _ = restoring(backend, tmp_path / "two", "average", 3, 2)
    for name, x in replicas.export_numpy().items():
        np.testing.assert_array_equal(x, best[name] if x.shape == best[
            name].shape else best[name][0])


def test_a_best_epoch_of_other_devices_is_refused(backend, tmp_path):
    restoring(backend, tmp_path, "per_device", 2, 1)
    with pytest.raises(ValueError, match="buffers of 2 devices"):
        restoring(backend, tmp_path, "per_device", 3, 2)


def test_a_refused_training_leaves_the_callbacks(backend, tmp_path):
    """Also one that raises with its first batch."""
    run, other = made(backend, on(0, 1)), made(backend, on(0, 1))
    free, uneven = callbacks.EMA(0.5), [(X, LABELS[:5])]
    every = [callbacks.EarlyStopping(2, "train_loss"),
             callbacks.Checkpoint(tmp_path / "best", "train_loss")]
    train(run, JOINED, callbacks=every)
    before = [one.best for one in every]
    assert None not in before
    updates = run[1].num_update
    folder = {"callbacks": [callbacks.Checkpoint(tmp_path)]}
    for one, kind, options in (
            (run, ValueError, {"epochs": 0}),
            (run, ValueError, {"resume": "auto"}),
            (run, ValueError, {"callbacks": [callbacks.EarlyStopping(2)]}),
            (run, IsADirectoryError, folder),
            (run, ValueError, {"device": "abc"}),
            (other, ValueError, {"data": uneven})):
        with pytest.raises(kind):
            train(one, **{
                "data": JOINED, **options, "callbacks": every + [free]
                + options.get("callbacks", [])})
    assert [one.best for one in every] == before
    assert run[1].num_update == updates
    free.update(made(backend, on(0))[0])    # it has no training yet
    with pytest.raises(ValueError):
        train(other, JOINED[:1] + uneven, 1, callbacks=every)
    assert every[0].best is None            # it had begun


def test_an_ema_is_of_replicas(backend):
    run, average = made(backend, on(0)), callbacks.EMA(0.5)
    with pytest.raises(RuntimeError, match="no update yet"):
        average.averages()
    with pytest.raises(RuntimeError, match="begin with the first step"):
        average.applied().__enter__()
    average.update(run[0])
    assert average.updates == 1
    before = run[0].export_numpy()
    with pytest.raises(RuntimeError, match="Train outside of it"):
        with average.applied():
            mgpu.train_batch(X, LABELS, run[0], LOSS, run[1])
    assert_same(run[0].export_numpy(), before)
    with pytest.raises(ValueError, match="an EMA is of one network"):
        average.update(made(backend, on(0))[0])


class Keeps:
    """Has a state of many kinds, as a schedule of torch's."""

    def __init__(self, state, epochs):
        self.kept, self.epochs = state, epochs

    def on_epoch(self, event):
        if event.epoch > self.epochs:
            raise InterruptedError

    def state(self):
        return self.kept, {"0": np.arange(3), "|0": np.arange(2)}

    def restore(self, state):
        self.kept, self.arrays = state


def test_a_state_of_a_callback_comes_back_as_it_was(backend, tmp_path):
    state = {3: 1, "rate": np.float32(0.1), "pair": (1, [2.5, None]),
             "milestones": collections.Counter({30: 1, 80: 2}),
             "array": np.arange(4.0, dtype="float16"),
             "native": mgpu.put(np.ones(2), mgpu.cpu(0)), "bytes": b"x"}
    keeps = Keeps(state, 1)
    with pytest.raises(InterruptedError):
        train(made(backend, on(0, 1)), JOINED, 3, callbacks=[keeps],
              checkpoint_dir=tmp_path)
    again = Keeps(None, 3)
    train(made(backend, on(0, 1)), JOINED, 3, callbacks=[again],
          checkpoint_dir=tmp_path, resume="auto", resume_seed=1)
    native = again.kept.pop("native"), state.pop("native")
    assert backend.is_native(native[0])
    assert (mgpu.to_numpy(native[0]) == mgpu.to_numpy(native[1])).all()
    arrays = again.kept.pop("array"), state.pop("array")
    assert arrays[0].dtype == "float16" and (arrays[0] == arrays[1]).all()
    assert again.kept == state
    assert [type(x) for x in again.kept.values()] \
        == [type(x) for x in state.values()]
    assert {name: len(x) for name, x in again.arrays.items()} \
        == {"0": 3, "|0": 2}


def test_a_state_that_no_file_holds_is_refused(backend, tmp_path):
    """Before the first step."""
    run = made(backend, on(0))
    masked = np.ma.array([1, 2], mask=[True, False])
    for state, words in (
            (({1, 2}, {}), "set in Keeps"), ((masked, {}), "MaskedArray in"),
            ((0, {"m": masked}), "MaskedArray in Keeps"),
            ((0, {"a": np.array(["x"])}), "ndarray in Keeps")):
        keeps = Keeps(None, 3)
        keeps.state = lambda state=state: state
        with pytest.raises(ValueError, match="the state of a callback is "
                           f"made of .*{words}"):
            train(run, JOINED, 3, callbacks=[keeps], checkpoint_dir=tmp_path)
        assert run[1].num_update == 0


def test_a_signal_at_the_end_is_heard(backend, tmp_path):
    """Also where a callback asks for the end in the same step."""
    def end(event):
        event.stop()
        signal.raise_signal(signal.SIGTERM)
    for hook in ("on_end", "on_epoch", "on_step"):
        ends = type("Ends", (), {hook: staticmethod(end)})()
        with pytest.raises(SystemExit) as seen:
            train(made(backend, on(0)), JOINED, 1, callbacks=[ends],
                  checkpoint_dir=tmp_path / hook)
        assert seen.value.code == 143


def test_the_loss_of_a_training_without_an_epoch_is_nan(backend):
    class Stops:
        def on_step(self, event):
            event.stop()

        def on_end(self, event):
            self.loss = event.loss
    stops = Stops()
    train(made(backend, on(0)), callbacks=[stops])
    assert np.isnan(stops.loss)


def test_batches_that_are_filled_anew_accumulate(backend):
    """One batch's arrays, or lists, are used again for the next."""
    def again(copied):
        x, y, native = np.zeros((4, 6)), np.zeros(4, "int32"), mgpu.put(
            np.zeros((4, 6)), mgpu.cpu(0))
        for i in range(4):
            x[:], y[:] = X[i:i + 4], LABELS[i:i + 4]
            native[:] = mgpu.put(x, native)
            yield (x.copy() if copied else x if i % 2 else native), (
                y.copy() if copied else y)
    found = []
    for copied in (True, False):
        run = made(backend, on(0, 1))
        train(run, again(copied), 1, accumulate=2)
        assert run[1].num_update == 2
        found.append(run[0].export_numpy())
    assert_all_equal(*found)


@pytest.mark.parametrize("first", [True, False])
def test_the_rate_of_a_step_is_logged_in_any_order(backend, first):
    run, log = made(backend, on(0, 1)), callbacks.LearningRateLog()
    halve = callbacks.each_step(lambda event: event.trainer.set_learning_rate(
        event.learning_rate / 2))
    train(run, JOINED, 1, callbacks=[log, halve] if first else [halve, log])
    assert log.rates == [0.5, 0.25, 0.125]


def test_early_stopping_of_a_loss_takes_the_smaller(backend):
    run = made(backend, on(0), params={"learning_rate": 0.0})
    history = train(run, JOINED, 9, callbacks=[
        callbacks.EarlyStopping(3, "train_loss")])
    assert len(history.train_loss) == 4
    with pytest.raises(ValueError, match="monitor='test_acc' takes"):
        train(run, JOINED, 9, callbacks=[callbacks.EarlyStopping(3)])


def test_the_state_of_callbacks_is_in_checkpoints(backend, tmp_path):
    """A run that was ended in between has the decisions and averages of the
    uninterrupted one."""
    values = (0.1, 0.5, 0.4, 0.3, 0.9)

    def go(folder, epochs, *scores):
        run = made(backend, on(0, 1))
        every = [callbacks.EarlyStopping(2, restore_best=True),
                 callbacks.EMA(0.75), callbacks.LearningRateLog()]
        history = train(run, JOINED, epochs, checkpoint_dir=folder,
                        resume="auto", callbacks=every,
                        evaluate=accuracies(*scores))
        return run, every, history
    whole, expected, history = go(tmp_path / "whole", 9, *values)
    assert history.test_acc == [0.1, 0.5, 0.4, 0.3]     # it ends there
    go(tmp_path / "parts", 3, *values)
    for _ in range(2):      # a run that has stopped does not begin again
        run, every, again = go(tmp_path / "parts", 9, *values[3:])
        assert again.test_acc == history.test_acc
        assert_near(run, whole, 0)
        assert every[0].stopped and every[0].best == 0.5
        assert every[2].rates == expected[2].rates == [0.5] * 12
        assert_same(every[1].averages(), expected[1].averages())


def test_other_callbacks_than_a_run_began_with_are_refused(backend, tmp_path):
    train(made(backend, on(0, 1)), JOINED, 1, checkpoint_dir=tmp_path,
          callbacks=[callbacks.EMA(0.75)])
    for words, options in (
            ("callbacks that it has begun with", {}),
            ("accumulate=2 for a checkpoint with 1", {"accumulate": 2})):
        with pytest.raises(ValueError, match=words):
            train(made(backend, on(0, 1)), JOINED, 9, resume="auto",
                  checkpoint_dir=tmp_path, **options)


@pytest.mark.parametrize("listed", [True, False])
def test_a_run_resumes_between_accumulated_steps(backend, tmp_path, listed):
    def data():
        return DATA if listed else datasets.BatchIterator(
            X, LABELS, 4, seed=1)

    def stop(event):
        if event.step == 2:
            event.stop()
    whole, run = made(backend, on(0, 1)), made(backend, on(0, 1))
    history = train(whole, data(), 2, accumulate=2)
    train(run, data(), 2, accumulate=2, checkpoint_dir=tmp_path,
          callbacks=[callbacks.each_step(stop)])
    run = made(backend, on(0, 1))
    again = train(run, data(), 2, accumulate=2, checkpoint_dir=tmp_path,
                  resume="auto")
    assert again.loss_per_step == history.loss_per_step
    assert_near(run, whole, 0)


def test_a_checkpoint_of_the_best_epoch(backend, tmp_path):
    run, kept = made(backend, on(0, 1)), []
    best = callbacks.Checkpoint(tmp_path / "best", "test_acc")
    train(run, JOINED, 3, evaluate=accuracies(0.1, 0.5, 0.4), callbacks=[
        best, callbacks.Checkpoint(tmp_path / "last"),
        lambda event: kept.append(event.replicas.export_numpy())])
    assert best.best == 0.5
    for name, number in (("best", 1), ("last", 2)):
        run[0].load(tmp_path / name)
        assert_same(run[0].export_numpy(), kept[number])


# -- averages -----------------------------------------------------------------

def test_averages_are_those_of_torch(backend):
    if "torch" not in BACKENDS:
        pytest.skip("the averages are compared with torch's")
    with mgpu.using_backend("torch"):
        import torch
    run, ema = made(backend, on(0, 1)), callbacks.EMA(0.9)
    holder = torch.nn.Module()
    for i, p in enumerate(run[0].params()):
        holder.register_parameter(f"p{i}", torch.nn.Parameter(
            torch.zeros(p.shape, dtype=torch.float64)))
    averaged = torch.optim.swa_utils.AveragedModel(
        holder,
        multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def follow(event):
        with torch.no_grad():
            for p, x in zip(run[0].params(), holder.parameters()):
                x.copy_(torch.from_numpy(mgpu.to_numpy(p.data())))
        averaged.update_parameters(holder)
    train(run, callbacks=[ema, callbacks.each_step(follow)])
    assert ema.updates == averaged.n_averaged == 10
    for x, expected in zip(ema.averages().values(), averaged.parameters()):
        np.testing.assert_allclose(x, expected.detach().numpy(), rtol=0,
                                   atol=1e-14)


def test_averages_are_applied_for_a_block(backend):
    run, ema = made(backend, on(0, 1)), callbacks.EMA(0.5)
    replicas, _ = run
    train(run, callbacks=[ema])
    before, plain = replicas.export_numpy(), replicas.predict(X)
    with ema.applied():
        replicas.check_equal()
        assert_same(replicas.export_numpy(), ema.averages())
        assert (replicas.predict(X) != plain).any()
    assert_same(replicas.export_numpy(), before)
    np.testing.assert_array_equal(replicas.predict(X), plain)
    replicas.check_equal()
