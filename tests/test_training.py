"""Recording, backward, `parallel`, the step and the loop."""
import os
import re
import sys
import types

import numpy as np
import pytest

import conftest
import mgpu
from helpers import (assert_bit_equal, bricks, convnet,
                     foreign_array, mlp, on, refusal_of_foreign,
                     relative_difference)
from steps import (LOSS, assert_close, assert_unchanged, batch,
                   check_as_on_one_device, initialize, values)


def batches(*rows):
    return [batch(n, i) for i, n in enumerate(rows)]


def set_up(engine, devices, lr=0.125, **options):
    """(replicas, loss, trainer) of a small network in float64."""
    replicas = initialize(mlp(engine), devices, **options)
    return replicas, LOSS, mgpu.Trainer(replicas, "sgd", {"learning_rate": lr})


# -- pieces -------------------------------------------------------------------


def flags():
    backend = mgpu.get_backend()
    return backend.is_recording(), backend.is_training()


def test_scopes_nest_and_come_back(backend):
    assert flags() == (False, False)
    with mgpu.record():
        assert flags() == (True, True)
        with mgpu.no_grad(), mgpu.record(train_mode=False):
            assert flags() == (True, False)
        with pytest.raises(KeyError), mgpu.no_grad():
            assert flags() == (False, False)
            raise KeyError
        assert flags() == (True, True)
    assert flags() == (False, False)
    scope = mgpu.record()
    with scope, scope:      # one object, inside itself
        assert flags() == (True, True)
    assert flags() == (False, False)


def leaf(value):
    x = mgpu.put(np.array([value]), mgpu.cpu(0))
    mgpu.attach_grad(x)
    return x


def test_wrong_losses_are_refused(engine):
    foreign, name = foreign_array(engine)
    x = leaf(2.0)
    with mgpu.record():
        good = x * x
    with mgpu.no_grad():
        outside = x * x
    unreal = mgpu.put(np.ones(1), mgpu.cpu(0))
    for losses, error, message in (
            (outside, RuntimeError, "backward needs losses that were computed "
             "inside mgpu.record() from arrays with gradients attached"),
            ([good, 1.0], TypeError, f"backward takes arrays of the "
             f"{engine.name} backend; received float. Pass what the loss "
             "returned."),
            ([foreign], TypeError, refusal_of_foreign(engine, name)),
            ([None, None], ValueError, "backward needs at least one loss; "
             "received none. Pass examples to at least one device.")):
        with pytest.raises(error, match=re.escape(message)):
            mgpu.backward(losses)
    assert mgpu.to_numpy(mgpu.grad(x)).tolist() == [0]
    for call in (mgpu.grad, lambda y: mgpu.sgd([x, y], 0.1, 1)):
        with pytest.raises(ValueError, match="the array has no gradient "
                           "attached; use mgpu.attach_grad"):
            call(unreal)
    assert mgpu.to_numpy(x).tolist() == [2]
    with pytest.raises(ValueError, match="unknown grad_req; received 'no'"):
        mgpu.attach_grad(unreal, "no")
    for call in (mgpu.attach_grad, mgpu.grad,
                 lambda x: mgpu.sgd([x], 0.1, 1)):
        with pytest.raises(TypeError, match="expected an array of the "
                           f"{engine.name} backend; received ndarray"):
            call(np.ones(2, "float32"))


def test_parallel_leaves_devices_without_rows_out(backend, devices):
    """So the guide's custom step takes any loss; `fn` is called with a list of
    None alone."""
    assert mgpu.parallel(lambda x, y: (x, y), [1, None, None],
                         range(3)) == [(1, 0), None, None]
    assert mgpu.parallel(lambda x: x is None, [None] * 3) == [True] * 3

    def squares(pred, label):
        return (pred * pred).sum(1) + 0 * label     # None has no sum

    def go(replicas, trainer):
        for rows in (1, 3):
            X, y = batch(rows)
            X_shards, y_shards = mgpu.split_batch(X, y * 1.0,
                                                  replicas.devices)
            with mgpu.record():
                losses = mgpu.parallel(squares, replicas(X_shards), y_shards)
            mgpu.backward(losses)
            trainer.step(rows)
    check_as_on_one_device(backend, devices, go)


def test_sgd(backend):
    """The book's function: p -= lr * grad / batch_size, grad = 0."""
    params = mgpu.get_params([np.array([[4.0, 8.0]]), np.ones(3)], mgpu.cpu(1))
    with mgpu.record():
        loss = params[0] * params[0]
    mgpu.backward(loss)
    mgpu.sgd(params, lr=0.5, batch_size=4)
    assert mgpu.to_numpy(params[0]).tolist() == [[3, 6]]
    assert mgpu.to_numpy(params[1]).tolist() == [1, 1, 1]
    assert not mgpu.to_numpy(mgpu.grad(params[0])).any()
    with mgpu.record():     # still a leaf
        loss = params[0] * params[0]
    mgpu.backward(loss)
    assert mgpu.to_numpy(mgpu.grad(params[0])).tolist() == [[6, 12]]


# -- train_batch --------------------------------------------------------------

def test_train_batch_is_one_step_of_the_whole_batch(backend, devices):
    """Of native and of NumPy data; fewer rows than devices included."""
    one = set_up(backend, on(0))
    many = set_up(backend, devices)
    start = values(many[0])
    for i, (X, y) in enumerate(batches(8, 7, 2, 1)):
        wanted, = mgpu.train_batch(X, y, *one)
        data = (X, y) if i % 2 else (mgpu.put(X, mgpu.cpu(0)),
                                     mgpu.put(y, mgpu.cpu(0)))
        losses = mgpu.train_batch(*data, *many)
        assert len(losses) == len(devices)
        for i, loss in enumerate(losses):
            assert (loss is None) == (i >= len(X))
        losses = [mgpu.to_numpy(loss) for loss in losses if loss is not None]
        assert relative_difference(np.concatenate(losses),
                                   mgpu.to_numpy(wanted)) < 1e-12
        assert_close(values(many[0]), values(one[0]))
    for name, copies in values(many[0]).items():
        assert (copies[0] != start[name][0]).any()
        for copy in copies:
            assert_bit_equal(copy, copies[0])


def test_unequal_shards(backend, devices):
    """``weights=[1, 2, ...]``: the same step."""
    weights = [i + 1.0 for i in range(len(devices))]

    def split(X, y, devices):
        return mgpu.split_batch(X, y, devices, weights=weights)
    X, y = batch(20)
    one, many = set_up(backend, on(0)), set_up(backend, devices)
    mgpu.train_batch(X, y, *one)
    losses = mgpu.train_batch(X, y, *many, split_f=split)
    sizes = [len(loss) for loss in losses]
    assert sizes == sorted(sizes) and sum(sizes) == 20
    assert_close(values(many[0]), values(one[0]))


@pytest.mark.parametrize("batch_norm", ["per_device", "sync"])
def test_rows_are_those_of_the_first_input(backend, devices, batch_norm):
    """Images in a list and a dict of what is on each, in the inputs and in
    the labels: there may be nothing on one."""
    ops = backend.ops
    base, dense = bricks(backend)

    class Detector(base):
        def __init__(self):
            super().__init__()
            self.dense = dense(6, 4)

        def forward(self, images, found):
            return [self.dense(x.reshape((1, 6))) * (1 + len(boxes["boxes"]))
                    for x, boxes in zip(images, found, strict=True)]

    def loss(out, found):
        return ops.concat([
            ops.sum((o - f["boxes"]) ** 2 if len(f["boxes"]) else o,
                    axis=(0, 1)).reshape((1,))
            for o, f in zip(out, found, strict=True)])
    X, _ = batch(5)
    boxes = [np.random.default_rng(i).normal(size=(i, 4)) for i in range(5)]

    def split(X, y, devices):
        shards = [
            ([mgpu.put(X[i].reshape(2, 3), device) for i in range(a, b)],
             [{"boxes": mgpu.put(boxes[i], device)} for i in range(a, b)])
            for device, (a, b) in zip(devices, mgpu.data.split.shard_bounds(
                len(X), len(devices)))]
        return shards, [found for _, found in shards]

    def trained(devices, rows, by_hand):
        replicas = mgpu.initialize(Detector(), devices, "xavier", seed=1,
                                   dtype="float64", batch_norm=batch_norm)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        if by_hand:
            shards, found = split(X[:rows], None, devices)
            with mgpu.record():
                losses = mgpu.parallel(
                    lambda out, y: None if out is None else loss(out, y),
                    replicas(*zip(*shards)), found)
            mgpu.backward(losses)
            trainer.step(rows)
        else:
            losses = mgpu.train_batch(X[:rows], None, replicas, loss, trainer,
                                      split)
        assert [0 if x is None else len(x) for x in losses] == [
            b - a for a, b in mgpu.data.split.shard_bounds(rows, len(devices))]
        return values(replicas)
    for rows in (5, 1):
        for by_hand in (False, True):
            assert_close(trained(devices, rows, by_hand),
                         trained(on(0), rows, True))


def test_labels_without_inputs_are_refused(backend):
    replicas, loss, trainer = set_up(backend, on(0, 1))
    before, (X, y) = values(replicas), batch(4)

    def split(X, y, devices):
        xs, ys = mgpu.split_batch(X, y, devices)
        return [xs[0], xs[1][:0]], ys
    with pytest.raises(ValueError) as caught:
        mgpu.train_batch(X, y, replicas, loss, trainer, split)
    assert str(caught.value) == (
        "a device with labels needs inputs; received 2 labels without inputs "
        "on cpu(1). The first array of the inputs determines the number of "
        "examples.")
    assert_unchanged(values(replicas), before)


def test_a_loss_is_called_once_a_step(backend, devices):
    """Whatever it counts, draws or returns: one number is minimized as it
    stands, and may depend on all rows together."""
    class Annealed(mgpu.losses.Loss):
        steps = 0

        def __call__(self, pred, label):
            self.steps += 1
            return LOSS(pred, label) * self.steps

    def drawn(pred, label):
        return LOSS(pred, label) * np.random.random()

    def mean(pred, label):
        return LOSS(pred, label).mean()

    def contrastive(pred, label):
        scores = backend.ops.dot(pred, pred.T)
        return (scores * scores).mean() + LOSS(pred, label).mean()
    found = []
    for make in (Annealed, lambda: drawn, lambda: contrastive, lambda: mean,
                 lambda: LOSS):
        def go(replicas, trainer, make=make):
            loss = make()
            np.random.seed(3)
            for rows in (8, 1, 5):
                first, *others = mgpu.train_batch(*batch(rows), replicas,
                                                  loss, trainer)
                if loss in (mean, contrastive):
                    assert mgpu.to_numpy(first).size == 1
                    assert others == [None] * (len(replicas) - 1)
        found.append(values(check_as_on_one_device(backend, devices, go)[0]))
    assert_close(*found[-2:])       # the mean of all is what is minimized


def test_a_wrong_trainer_is_refused(backend):
    """Of other replicas, or of the framework: that is named with its module,
    as "expected a Trainer; received Trainer" would not help."""
    a, loss, _ = set_up(backend, on(0))
    _, _, trainer = set_up(backend, on(0, 1))
    with pytest.raises(ValueError, match="the trainer was made with other "
                       "replicas; received one of .* Make a new "
                       "Trainer after each initialize"):
        mgpu.train_batch(*batch(4), a, loss, trainer)

    class Trainer:
        pass
    with pytest.raises(TypeError, match=r"their mgpu.Trainer; received .*"
                       rf"Replicas and {__name__}\..*\.Trainer. "):
        mgpu.train_batch(*batch(4), a, loss, Trainer())
    with pytest.raises(TypeError, match="received the class .*Trainer. Pass"):
        mgpu.Trainer(a, Trainer)


def refuse(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


def test_wrong_batches_and_losses_change_nothing(engine):
    replicas, loss, trainer = set_up(engine, on(0, 1, 2))
    before = values(replicas)
    X, y = batch(6)
    foreign, name = foreign_array(engine)
    for (X_, y_), error, text in (
            ((X, y[:5]), ValueError, "X and y must have the same number of "
             "examples; received 6 and 5. Cut them to one length. Pass "
             "numbers as an array or a list, and labels with an entry for "
             "each example (the boxes of each image) as a list."),
            ((X[:0], y[:0]), ValueError, "a batch must hold at least one "
             "example, in a pair (X, y) or a dict; received none. Skip it."),
            ((foreign, y[:3]), TypeError, refusal_of_foreign(engine, name)),
            ((X[:3], foreign), TypeError, refusal_of_foreign(engine, name))):
        refuse(lambda: mgpu.train_batch(X_, y_, replicas, loss, trainer),
               error, text)
    for wrong, received in (
            (lambda out, y: loss(out, y)[:4], "shape (4,)"),
            (lambda out, y: 0.5, "float"), (lambda out, y: None, "NoneType")):
        refuse(lambda: mgpu.train_batch(X, y, replicas, wrong, trainer),
               ValueError, "the loss must return one value per example, "
               "shape (6,), or several, whose mean counts, or one number in "
               "an array; received "
               f"{received}. Use a loss of mgpu.losses, or wrap one that "
               "averages: mgpu.losses.per_example(loss); on torch also "
               "reduction='none'.")
        assert flags() == (False, False)
    with pytest.raises(ValueError, match="labels must be class numbers 0 to "
                       "2; received"):
        mgpu.train_batch(X, y + 2, replicas, loss, trainer)
    assert_unchanged(values(replicas), before)
    assert trainer.num_update == 0


@pytest.mark.parametrize("batch_norm", ["per_device", "sync"])
def test_a_wrong_label_is_named_by_its_row_in_the_batch(backend, devices,
                                                        batch_norm):
    """Not in its shard; both ways through a step."""
    replicas, loss, trainer = set_up(backend, devices, batch_norm=batch_norm)
    X, y = batch(7)
    y[5] = 3
    with pytest.raises(mgpu.losses.LabelError,
                       match="received 3 in row 5. ") as caught:
        mgpu.train_batch(X, y, replicas, loss, trainer)
    assert caught.value.row == 5


# -- the loop -----------------------------------------------------------------

def test_train(backend, devices):
    replicas, loss, trainer = set_up(backend, devices, lr=0.25)
    train_iter, test_iter = batches(8, 7, 1), batches(5, 1)
    history = mgpu.train(replicas, train_iter, test_iter, loss, trainer, 3,
                         progress=False)
    assert history.devices == [str(d) for d in devices]
    assert len(history.loss_per_step) == trainer.num_update == 9
    for epoch in range(3):
        # per example, so that the batch of one row counts as one
        steps = history.loss_per_step[3 * epoch:3 * epoch + 3]
        assert relative_difference(history.train_loss[epoch],
                                   np.dot(steps, [8, 7, 1]) / 16) < 1e-15
        assert history.seconds[epoch] > 0
        assert history.images_per_second[epoch] \
            == 16 / history.seconds[epoch]
    assert history.train_loss[0] > history.train_loss[-1] > 0
    assert history.test_acc[-1] == mgpu.evaluate_accuracy_gpus(
        replicas, test_iter)
    assert len(history.test_acc) == 3
    assert re.fullmatch(
        fr"test acc: {history.test_acc[-1]:.2f}, \d+\.\d sec/epoch on "
        fr"\[{', '.join(map(re.escape, history.devices))}\]",
        history.summary())
    # The losses are those of one device, and of single steps.
    one = set_up(backend, on(0), lr=0.25)
    losses = [mgpu.to_numpy(mgpu.train_batch(*train_iter[i % 3], *one)[0])
              .mean() for i in range(9)]
    assert relative_difference(history.loss_per_step, losses) < 1e-12


def test_a_network_with_one_output_has_its_own_measure(backend, devices):
    """`test_iter` needs scores of classes: raises before a step, not after an
    epoch, and also where the first outputs are 0."""
    replicas = mgpu.initialize(mlp(backend, units=(6, 1)), devices, "zeros",
                               dtype="float64")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
    loss = mgpu.losses.SigmoidBCELoss()
    data = [(X, (X[:, :1] > 0) * 1.0) for X, _ in batches(8, 7)]
    before = values(replicas)

    def train(test_iter, **options):
        return mgpu.train(replicas, data, test_iter, loss, trainer, 2,
                          progress=False, **options)

    def measure():
        return mgpu.evaluate_accuracy_gpus(
            [lambda x, run=run: run(x) > 0 for run in replicas], data,
            devices=replicas.devices)
    with pytest.raises(ValueError, match=r"scores \(n, classes\); received "
                       r"an output of shape \(\d, 1\), .* Pass "
                       "test_iter=None, and your metric as evaluate="):
        train(data)
    with pytest.raises(ValueError, match="evaluate replaces test_iter; "
                       "received both"):
        train(data, evaluate=measure)
    assert_unchanged(values(replicas), before)
    assert trainer.num_update == 0
    history = train(None, evaluate=measure)
    assert len(history.test_acc) == 2 and trainer.num_update == 4
    assert history.test_acc[-1] == measure()


def test_evaluation_on_one_device(backend):
    """`device`: what per-device batch statistics need."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(9, 2, 6, 6)), rng.integers(0, 3, 9)
    replicas = mgpu.initialize(convnet(backend), on(0, 1), "xavier",
                               dtype="float64")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    history = mgpu.train(replicas, [(X, y)], [(X, y)], loss, trainer, 2,
                         device="cpu:1", progress=False)
    assert history.test_acc[-1] == mgpu.evaluate_accuracy_gpu(
        replicas, [(X, y)], mgpu.cpu(1))


def test_progress_bar(backend, capsys, monkeypatch):
    replicas, loss, trainer = set_up(backend, on(0))
    mgpu.train(replicas, batches(4, 4), None, loss, trainer, 3,
               progress=False)
    assert capsys.readouterr() == ("", "")

    class Endless:      # an iterable without a length
        def __iter__(self):
            return iter(batches(4, 4))
    for train_iter, total in ((batches(4, 4), "/6 "), (Endless(), "batch")):
        # a file or a pipe gets no bar
        mgpu.train(replicas, train_iter, None, loss, trainer, 3)
        assert capsys.readouterr() == ("", "")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        mgpu.train(replicas, train_iter, batches(3), loss, trainer, 3)
        drawn = capsys.readouterr()
        assert "train" in drawn.err and total in drawn.err
        assert drawn.out == ""
        monkeypatch.undo()


@pytest.mark.parametrize("epoch, step, window, bad", [
    (0, 2, 2, np.inf), (1, 1, 1, np.inf), (0, 0, 4, np.nan)])
def test_a_loss_that_is_not_finite_names_its_step(
        backend, epoch, step, window, bad):
    devices = on(0, 1)
    replicas, loss, trainer = set_up(backend, devices)

    class Source:
        epochs = -1

        def __iter__(self):
            self.epochs += 1
            for i, (X, y) in enumerate(batches(8, 2, 5)):
                if (self.epochs, i) == (epoch, step):
                    X[1, 0] = bad
                yield X, y
    with pytest.raises(mgpu.NonFiniteLoss) as caught:
        mgpu.train(replicas, Source(), None, loss, trainer, 4,
                   progress=False, max_inflight=window)
    text = str(caught.value)
    assert re.match(
        fr"the loss must be finite; received (nan|inf) in step "
        fr"{3 * epoch + step + 1} \(epoch {epoch + 1}\) on "
        fr"{re.escape(str(devices))}\. Lower the learning rate", text), text
    assert isinstance(caught.value, FloatingPointError)
    history = caught.value.history
    assert len(history.loss_per_step) == 3 * epoch + step + 1
    assert np.isfinite(history.loss_per_step[:-1]).all()
    assert not np.isfinite(history.loss_per_step[-1])
    assert len(history.train_loss) == epoch
    assert history.summary()
    # It is read when it leaves the window, or at the end of the epoch.
    assert trainer.num_update == 3 * epoch + min(step + window, 3)


def test_what_ends_a_training_early_has_its_history(backend, devices):
    replicas, loss, trainer = set_up(backend, devices)

    class NoPlace(Exception):
        history = property()        # cannot be set
    for kind in (KeyboardInterrupt, ZeroDivisionError, NoPlace):
        class Source:
            epochs = 0

            def __iter__(self):
                self.epochs += 1
                for i, one in enumerate(batches(8, 2, 5)):
                    if (self.epochs, i) == (3, 2):
                        raise kind
                    yield one
        with pytest.raises(kind) as caught:
            mgpu.train(replicas, Source(), None, loss, trainer, 4,
                       progress=False)
        if kind is not NoPlace:
            history = getattr(caught.value, "history", mgpu.History())
            assert len(history.train_loss) == len(history.seconds) == 2
            assert len(history.loss_per_step) == 7      # 1 is in flight

    def stop_at_once():
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt) as caught:
        mgpu.train_epochs(
            lambda X, y: mgpu.train_batch(X, y, replicas, loss, trainer),
            batches(8, 2, 5), 2, devices, evaluate=stop_at_once)
    assert len(caught.value.history.train_loss) == 1


def test_the_window_changes_no_number(backend, devices):
    found = []
    for window in (1, 3):
        replicas, loss, trainer = set_up(backend, devices)
        history = mgpu.train(replicas, batches(8, 7, 1, 3, 5), None, loss,
                             trainer, 2, progress=False, max_inflight=window)
        found.append((history.loss_per_step, values(replicas)))
    (losses, weights), *others = found
    assert len(losses) == 10
    for other, other_weights in others:
        assert other == losses
        assert_unchanged(other_weights, weights)


def test_wrong_loops_are_refused(backend):
    replicas, loss, trainer = set_up(backend, on(0))

    def refused(words, train_iter, test_iter=None, epochs=2, **options):
        with pytest.raises(ValueError, match=words):
            mgpu.train(replicas, train_iter, test_iter, loss, trainer, epochs,
                       progress=False, **options)
    for wrong in (0, 1.5, None, True):
        words = f"must be an integer of 1 or more; received {wrong!r}"
        refused(f"num_epochs {words}", batches(2), epochs=wrong)
        refused(f"max_inflight {words}", batches(2), max_inflight=wrong)
    refused("train_iter must be iterable once per epoch; received a "
            "list_iterator, which yields its batches once, for 2 epochs",
            iter(batches(2)))
    refused("test_iter must be iterable once per epoch; received a zip",
            batches(2), zip([1], [2]))
    assert trainer.num_update == 0

    class Once:
        left = batches(2)

        def __iter__(self):
            while self.left:
                yield self.left.pop()
    for source, epoch in (([], 1), (Once(), 2)):
        refused("train_iter must yield at least one batch in each epoch; "
                f"received none in epoch {epoch}. Use an iterable that",
                source)


def test_arguments_of_another_kind_are_named(backend):
    replicas, loss, trainer = set_up(backend, on(0, 1))
    for name, wrong, words in (
            ("loss", None, r"loss\(output, label\); received None of type"),
            ("loss", type(loss), "received the class SoftmaxCross"),
            ("train_iter", None, "train_iter must be an iterable of batches"),
            ("train_iter", [np.ones((2, 6))], "pairs .*received a ndarray"),
            ("train_iter", [types.SimpleNamespace(data=[1], label=[2])],
             "received a SimpleNamespace. Convert to pairs"),
            ("test_iter", 3, "test_iter must be an iterable of batches"),
            ("test_iter", [1, 2], "a int"), ("test_iter", "ab", "str"),
            ("evaluate", 3, "evaluate must be callable"),
            ("animator", True, "animator must be an mgpu.d2l.Animator")):
        with pytest.raises(TypeError, match=words):
            mgpu.train(replicas, **{
                "train_iter": batches(2), "test_iter": None, "loss": loss,
                "trainer": trainer, "num_epochs": 1, "progress": False,
                name: wrong})
    assert trainer.num_update == 0


def loaders(engine, X, y, size):
    """The framework's own DataLoader over arrays."""
    if engine.name == "mxnet":
        from mxnet import gluon
        return gluon.data.DataLoader(
            gluon.data.ArrayDataset(X, y), batch_size=size, last_batch="keep")
    import torch
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(
        torch.from_numpy(X), torch.from_numpy(y)), batch_size=size)


def test_the_frameworks_own_data_loaders(engine, devices):
    """Give the same training as a list of the same batches."""
    X, y = batch(11)
    X = X.astype("float32")
    plain = [(X[i:i + 4], y[i:i + 4]) for i in range(0, 11, 4)]
    found = []
    for source in (plain, loaders(engine, X, y, 4)):
        replicas = mgpu.initialize(mlp(engine), devices, "xavier")
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.25})
        loss = mgpu.losses.SoftmaxCrossEntropyLoss()
        history = mgpu.train(replicas, source, source, loss, trainer, 2,
                             progress=False)
        found.append((history, values(replicas)))
    (a, first), (b, second) = found
    assert a.loss_per_step == b.loss_per_step and a.test_acc == b.test_acc
    assert_unchanged(first, second)


def test_a_training_without_standard_error(backend, monkeypatch):
    with open(os.devnull, "w") as closed:
        pass
    for stream in (None, closed):
        replicas, loss, trainer = set_up(backend, on(0, 1))
        monkeypatch.setattr(sys, "stderr", stream)
        mgpu.train(replicas, batches(2), None, loss, trainer, 1, progress=True)
        assert trainer.num_update == 1


# -- what a review found ------------------------------------------------------

def test_weights_that_are_not_finite_stop_the_training(backend):
    """MXNet's ReLU turns a NaN into a number, so the loss may look well."""
    X = np.random.default_rng(0).random((4, 6), dtype="float32")
    X[0] = np.nan
    net = mlp(backend, (6, 5, 3))
    replicas = mgpu.initialize(net, [mgpu.cpu(0)], "xavier")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    batches = [(X, np.zeros(4, "int32"))] * 3
    with pytest.raises(mgpu.NonFiniteLoss, match="must be finite") as caught:
        mgpu.train(replicas, batches, None,
                   mgpu.losses.SoftmaxCrossEntropyLoss(), trainer, 1,
                   progress=False)
    assert caught.value.history.loss_per_step


@pytest.mark.parametrize("own, other", [("torch", "mxnet")]
                         if len(conftest.BACKENDS) > 1 else [])
def test_recording_on_the_other_backend_is_an_error(own, other):
    with mgpu.using_backend(own) as engine:
        replicas = mgpu.initialize(mlp(engine), [mgpu.cpu(0)], "uniform")
        x = mgpu.put(np.ones((2, 6), "float32"), mgpu.cpu(0))
    with mgpu.using_backend(other), mgpu.record(), pytest.raises(
            RuntimeError, match=f"received one of '{other}'"):
        replicas[0](x)
