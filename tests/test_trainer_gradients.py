"""Which gradients a step of a `Trainer` applies: of one batch, summed once,
with what the user writes to them, or an error before anything changes."""
from copy import deepcopy

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import (assert_bit_equal, mlp, on, relative_difference,
                     using_engine)
from nets import gated
from steps import (LOSS, ROWS, assert_close, assert_replicas_equal,
                   assert_unchanged, backward, batch, check_as_on_one_device,
                   gradients, initialize, sgd, sides, values)

STALE = ("parameter {!r} has no new gradient since the last step: {}. Run the "
         "forward pass inside record() and pass the losses of all devices to "
         "one mgpu.backward; freeze the parameter (grad_req='null', "
         "requires_grad=False); or pass ignore_stale_grad=True to skip it.")
MISSED = "the last backward pass did not reach it"


def test_a_stale_gradient_is_an_error_that_names_it(engine):
    for signs, name in (([-1, -1], "right.weight"), ([1, 1], "left.weight"),
                        ([-1], "right.weight")):
        replicas, trainer = sgd(engine, on(*range(len(signs))), gated(engine),
                                momentum=0.5)
        backward(replicas, *sides(*signs))
        before, held = values(replicas), gradients(replicas)
        for call in (lambda: trainer.step(2), trainer.allreduce_grads):
            with pytest.raises(mgpu.StaleGradientError) as caught:
                call()
            assert str(caught.value) == STALE.format(name, MISSED)
        assert isinstance(caught.value, RuntimeError)
        assert_unchanged(values(replicas), before)
        assert_unchanged(gradients(replicas), held)
        assert trainer.num_update == 0
        trainer.step(2, ignore_stale_grad=True)     # the same gradients, later


@pytest.mark.parametrize("passes", ["none", "forward", "predicted"])
def test_a_step_without_a_backward_pass(backend, devices, passes):
    replicas, trainer = sgd(backend, devices)
    shards = mgpu.split_and_load(batch(8)[0], devices, even_split=False)
    with mgpu.record() if passes == "forward" else mgpu.no_grad():
        if passes != "none":
            replicas(shards)
    before = values(replicas)
    with pytest.raises(mgpu.StaleGradientError) as caught:
        trainer.step(8)
    assert str(caught.value) == STALE.format(
        "0.weight", "no backward pass reached it")
    assert_unchanged(values(replicas), before)


def test_a_step_of_a_part_of_the_rows(engine, devices):
    """Of the examples of one device, whose losses alone have a backward pass;
    or through the network itself, after a write to it."""
    X, y = batch(9)

    def go(replicas, trainer):
        for replica in (replicas[len(replicas) - 1], replicas.net):
            weight = replicas.params()[0].data()
            getattr(weight, "data", weight)[:] = weight * 0.5
            where = getattr(replica, "device", replicas.devices[0])
            with mgpu.record():
                loss = LOSS(replica(mgpu.put(X[6:], where)),
                            mgpu.put(y[6:], where))
            mgpu.backward(loss)
            trainer.step(3)
    check_as_on_one_device(engine, devices, go)


def test_a_step_after_a_refused_one(engine, devices):
    """With what the user has done to the gradients since."""
    def go(replicas, trainer):
        with pytest.raises(mgpu.StaleGradientError):
            mgpu.train_batch(*sides(*[1] * 8), replicas, LOSS, trainer)
        for p in replicas.params():
            gradient = p.grad()
            getattr(gradient, "data", gradient)[:] = gradient * 0.5
        trainer.step(8, ignore_stale_grad=True)
    check_as_on_one_device(engine, devices, go, lambda engine, devices: sgd(
        engine, devices, gated(engine), momentum=0.5))


@pytest.mark.parametrize("stepped, request_", [("custom", "write"),
                                               ("train_batch", "add")])
def test_an_edit_that_leaves_zeros_is_none(engine, devices, stepped,
                                           request_):
    """Clipping multiplies all gradients of the network, also those that the
    batch did not reach: these stay skipped, and what it did reach is
    scaled."""
    class Clipping(mgpu.Trainer):
        def update(self, batch_size):
            for p in self.replicas.params():
                g = p.data().grad
                if g is not None:
                    with mgpu.no_grad():
                        g *= 0.5
            super().update(batch_size)
    found = []
    for made, rescale in ((Clipping, 1), (mgpu.Trainer, 2)):
        replicas = initialize(gated(engine), devices)
        for p in replicas.params():
            p.grad_req = request_
        trainer = made(replicas, "sgd", {
            "learning_rate": 0.125, "momentum": 0.5, "wd": 0.25})
        for side in (-1, 1):
            before = values(replicas)
            X, y = sides(*[side] * 4)
            if made is Clipping and stepped == "train_batch":
                mgpu.train_batch(X, y, replicas, LOSS, trainer,
                                 ignore_stale_grad=True)
            else:
                backward(replicas, X, y)
                trainer.allreduce_grads(ignore_stale_grad=True)
                trainer.update(4 * rescale)
            replicas.zero_grad()
        found.append(values(replicas))
        for name in ("left.weight", "left.bias"):
            assert_bit_equal(found[-1][name][0], before[name][0])
        assert_replicas_equal(found[-1])
    assert_close(*found)


@pytest.mark.skipif("torch" not in BACKENDS, reason="needs torch")
def test_an_own_optimiser_skips_what_was_skipped(devices):
    """`torch.optim` on summed gradients, clipped by torch, leaves a parameter
    alone that had no gradient, as in plain PyTorch."""
    import torch
    found = []
    for K in (0, len(devices)):
        with using_engine("torch") as engine:
            replicas = initialize(gated(engine), devices if K else on(0))
            net = replicas.net
            if not K:   # plain from here on
                net = deepcopy(net)
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 1.0})
            own = torch.optim.SGD(net.parameters(), 0.125, momentum=0.5,
                                  weight_decay=0.25)
            for side in (-1, 1, 1, -1):
                X, y = sides(*[side] * 4)
                own.zero_grad()
                if K:
                    backward(replicas, X, y)
                    trainer.allreduce_grads(ignore_stale_grad=True)
                else:
                    torch.nn.functional.cross_entropy(
                        net(torch.from_numpy(X)), torch.from_numpy(y),
                        reduction="sum").backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                other = net.right if side == -1 else net.left
                assert other.weight.grad is None
                own.step()
            found.append({name: [p.detach().numpy().copy()]
                          for name, p in net.named_parameters()})
    assert_close(found[1], found[0])


def test_a_layer_that_only_some_devices_rows_reach(engine, devices):
    """A mixture of experts: the step depends on the batch, not on how it was
    cut. (`gated` looks at the first row: here a device has one row, or it
    has all of them, each gone through by itself.)"""
    X, y = sides(-1, 1, 1)

    def go(replicas, trainer):
        places = replicas.devices
        for _ in range(3):
            with mgpu.record():
                losses = []
                for i in range(3):
                    device = places[i % len(places)]
                    output = replicas[i % len(places)](
                        mgpu.put(X[i:i + 1], device))
                    losses.append(LOSS(output, mgpu.put(
                        y[i:i + 1], device)).sum())
                if len(places) == 1:
                    losses = [sum(losses[1:], losses[0])]
            mgpu.backward(losses)
            trainer.step(3)
    check_as_on_one_device(engine, devices, go, lambda engine, devices: sgd(
        engine, devices, gated(engine), momentum=0.5))


def test_a_step_applies_one_batch(engine, devices):
    """A batch that was abandoned after its backward pass is not applied with
    the next one, cleared or not."""
    found = []
    for abandoned in ("", "as it is", "cleared"):
        replicas, trainer = sgd(engine, devices)
        if abandoned:
            backward(replicas, *batch(8, 7))
        if abandoned == "cleared":
            replicas.zero_grad()
        backward(replicas, *batch(1))
        trainer.step(1)
        found.append(values(replicas))
    assert_unchanged(found[1], found[0])
    assert_unchanged(found[2], found[0])


def test_train_batch_applies_no_earlier_gradient(engine, devices):
    """Of a batch that was given up, by layers that the next one does not
    reach; in custom steps the gradient stays, as in Gluon."""
    for by_hand in (False, True):
        replicas, trainer = sgd(engine, devices, gated(engine))
        backward(replicas, *sides(-1, 1))
        before = values(replicas)
        if by_hand:
            backward(replicas, *sides(1, 1))
            trainer.step(2)
            assert (values(replicas)["left.weight"][0]
                    != before["left.weight"][0]).any()
        else:
            with pytest.raises(mgpu.StaleGradientError, match="left.weight"):
                mgpu.train_batch(*sides(1, 1), replicas, LOSS, trainer)
            assert_unchanged(values(replicas), before)


def test_of_several_passes_the_last_counts(engine, devices):
    """An attack on the examples of each device, then the training pass."""
    def attacked(run, x, labels):
        for _ in range(2):
            x = mgpu.put(mgpu.to_numpy(x), x)
            mgpu.attach_grad(x)
            with mgpu.record():
                one = LOSS(run(x), labels)
            mgpu.backward([one])
            x = mgpu.put(mgpu.to_numpy(x)
                         + np.sign(mgpu.to_numpy(mgpu.grad(x))), x)
        return x

    def go(replicas, trainer):
        for rows in ROWS:
            shards = [one for one in zip(replicas, *mgpu.split_batch(
                *batch(rows), replicas.devices)) if len(one[1])]
            changed = [attacked(*one) for one in shards]
            with mgpu.record():
                losses = [LOSS(run(x), labels) for (run, _, labels), x
                          in zip(shards, changed)]
            mgpu.backward(losses)
            trainer.step(rows)
    check_as_on_one_device(engine, devices, go)


def adding(engine, devices, name="sgd", **options):
    """(replicas, trainer), where all gradients are added up."""
    replicas = initialize(mlp(engine), devices)
    for p in replicas.params():
        p.grad_req = "add"
    return replicas, mgpu.Trainer(replicas, name, {"learning_rate": 0.125,
                                                   **options})


def test_a_gradient_that_is_changed_between_two_passes_of_a_step(
        engine, devices):
    """``grad_req="add"``: the second pass adds to the change."""
    def go(replicas, trainer):
        for edit in ("scale", "row"):
            for seed in range(2):
                backward(replicas, *batch(8, seed))
                for g in replicas.params()[0].list_grad():
                    if seed == 0 and edit == "row":
                        g[0] = 0
                    elif seed == 0:
                        g *= 0.5
            trainer.step(16)
            replicas.zero_grad()
    check_as_on_one_device(engine, devices, go, adding)


@pytest.mark.parametrize("loop", ["replicas", "halved",
                                  "with a forward pass for a log"])
def test_sums_that_grow_are_summed_once(engine, devices, loop):
    """``grad_req="add"`` without `zero_grad`: the sum keeps growing, by the
    next batch's gradients, on any number of devices. What is written to it
    between sum and update is of that step, and of all devices."""

    def go(replicas, trainer):
        for rows in ROWS:
            X, y = batch(rows)
            backward(replicas, X, y)
            trainer.allreduce_grads()
            if loop == "halved":
                for p in replicas.params():
                    p.list_grad()[0][:] = p.list_grad()[0] * 0.5
            if loop.startswith("with"):
                with mgpu.record():
                    replicas(mgpu.split_batch(X, y, replicas.devices)[0])
            trainer.update(rows)
    check_as_on_one_device(engine, devices, go, lambda *places: adding(
        *places, "nadam", epsilon=2.0 ** -10))


@pytest.mark.parametrize("late", [False, True])
def test_a_change_of_the_networks_gradient_is_applied(engine, devices, late):
    """Before the step, or between its two halves, where the framework clips;
    on torch also as in ``p.grad.data.clamp_``, which it does not count."""
    edits = [lambda g: g.__imul__(0.5)] * 2
    if engine.name == "torch":
        edits += [lambda g: g.data.clamp_(-1e-3, 1e-3),
                  lambda g: g.data.neg_(), lambda g: g.numpy().__imul__(0.5)]

    def go(replicas, trainer):
        for edit, rows in zip(edits, ROWS):
            backward(replicas, *batch(rows))
            if late:
                trainer.allreduce_grads()
            for p in replicas.params():
                edit(p.grad())
            if late:
                trainer.update(rows)
            else:
                trainer.step(rows)
    check_as_on_one_device(engine, devices, go)


@pytest.mark.skipif("torch" not in BACKENDS, reason="a habit of torch")
@pytest.mark.parametrize("k, when", [(1, "before the sum"),
                                     (3, "after the sum")])
def test_a_gradient_that_the_user_takes_away_is_not_applied(k, when):
    """As ``torch.optim`` passes over a parameter whose ``.grad`` is None: no
    momentum, no weight decay, no count."""
    import torch
    torch.manual_seed(0)
    with mgpu.using_backend("torch"):
        plain = torch.nn.Linear(6, 3).double()
        net = deepcopy(plain)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.125)
        replicas = mgpu.initialize(net, on(*range(k)))
        trainer = mgpu.Trainer(replicas, "adamw", {"lr": 0.125},
                               semantics="torch")
        for step in range(4):
            X, y = batch(8, step)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                plain(torch.from_numpy(X)), torch.from_numpy(y)).backward()
            backward(replicas, X, y)
            if when == "after the sum":
                trainer.allreduce_grads()
            if step % 2:
                plain.bias.grad = net.bias.grad = None
            if when == "after the sum":
                assert trainer.clip_global_norm(1e9, 8) > 0
                trainer.update(8)
            else:
                trainer.step(8)
            optimizer.step()
        replicas.check_equal()
    for p, q in zip(net.parameters(), plain.parameters()):
        assert (p - q).abs().max() < 1e-12


@pytest.mark.parametrize("overridden, stepped", [
    ("update", "train_batch"), ("allreduce_grads", "custom"),
    ("both", "train_batch"), ("an attribute", "custom")])
def test_a_step_calls_what_a_subclass_overrides(backend, devices, overridden,
                                                stepped):
    """With what it writes to gradients there, also in ways that torch does
    not count."""
    def halve(trainer):
        for p in trainer.summed():
            gradient = p.data().grad
            if backend.name == "torch":
                gradient = gradient.data
            gradient *= 0.5

    class Half(mgpu.Trainer):
        def update(self, batch_size):
            halve(self)
            super().update(batch_size)

    class Doubled(mgpu.Trainer):
        def allreduce_grads(self, ignore_stale_grad=False):
            super().allreduce_grads(ignore_stale_grad)
            for p in self.summed():
                for g in p.list_grad():
                    g *= 2.0

    class Both(Half, Doubled):
        pass
    kind, factor = {"update": (Half, 0.5), "allreduce_grads": (Doubled, 2.0),
                    "both": (Both, 1.0), "an attribute": (mgpu.Trainer, 0.5)
                    }[overridden]
    found = []
    for made, rate in ((kind, 0.5), (mgpu.Trainer, 0.5 * factor)):
        replicas = initialize(mlp(backend), devices)
        trainer = made(replicas, "sgd", {"learning_rate": rate})
        if overridden == "an attribute" and not found:
            own = trainer.update
            trainer.update = lambda rows: (halve(trainer), own(rows))
        for seed, rows in enumerate(ROWS):
            X, y = batch(rows, seed)
            if stepped == "train_batch":
                mgpu.train_batch(X, y, replicas, LOSS, trainer)
            else:
                backward(replicas, X, y)
                trainer.step(rows)
        found.append(values(replicas))
        if overridden != "both":    # which writes to all, and then to one
            assert_replicas_equal(gradients(replicas))
    assert_replicas_equal(found[0])
    assert_close(*found)


def test_a_backward_pass_after_the_sum_is_refused(backend, devices):
    for request_ in ("write", "add"):
        replicas, trainer = sgd(backend, devices)
        for p in replicas.params():
            p.grad_req = request_
        backward(replicas, *batch(8))
        trainer.allreduce_grads()
        backward(replicas, *batch(8, 1))
        before = values(replicas)
        with pytest.raises(RuntimeError, match="has written since. Call "
                           "allreduce_grads again"):
            trainer.update(8)
        assert_unchanged(values(replicas), before)
        trainer.step(8)     # sums the new ones


def test_a_mean_for_each_device_is_refused(engine):
    """Sums of them would be applied; each one's share of a mean is right."""
    def mean(output, labels):
        return LOSS(output, labels).mean()

    def of_torch(output, labels):
        from torch.nn.functional import cross_entropy
        return cross_entropy(output, labels.long())
    X, y = batch(7)
    expected, other = sgd(engine, on(0))
    backward(expected, X, y)
    other.step(len(X))
    torchs = mgpu.get_backend().name == "torch"
    for loss in [mean, of_torch] if torchs else [mean]:
        replicas, trainer = sgd(engine, on(0, 1, 2))
        shards, labels = mgpu.split_batch(X, y, replicas.devices)
        with mgpu.record():
            losses = [*map(loss, replicas(shards), labels)]
        before = gradients(replicas)
        with pytest.raises(ValueError, match="a sum of means is not"):
            mgpu.backward(losses)
        assert_unchanged(gradients(replicas), before)
        with mgpu.record():
            losses = [loss(output, b) * (len(b) / len(X))
                      for output, b in zip(replicas(shards), labels)]
        mgpu.backward(losses)
        trainer.step(1)
        assert_close(values(replicas), values(expected))


def test_a_penalty_has_the_same_pass_or_is_added(backend, devices):
    """The two fixes in the error of a second pass give one number, that of the
    formula; to call allreduce_grads again is right for "add"."""
    found, X, y = [], *batch(8)
    for way in ("formula", "one pass", "before the sum", "after the sum"):
        replicas, trainer = adding(backend, devices)
        if way in ("formula", "one pass"):
            for p in replicas.params():
                p.grad_req = "write"
        before = values(replicas)
        Xs, ys = mgpu.split_batch(X, y, devices)

        def penalties():
            return [(p.data() * p.data()).sum() * 0.5 * 8
                    for p in replicas.params()]
        with mgpu.record():
            losses = mgpu.parallel(LOSS, replicas(Xs), ys)
            if way == "one pass":
                losses = losses + penalties()
        mgpu.backward(losses)
        if way == "after the sum":
            trainer.allreduce_grads()
        if way.endswith("the sum"):
            with mgpu.record():
                alone = penalties()
            mgpu.backward(alone)
        trainer.allreduce_grads()
        trainer.update(8)
        found.append(values(replicas))
        assert_replicas_equal(found[-1])
        if way == "formula":
            for name, copies in before.items():
                found[0][name][0] = found[0][name][0] - 0.125 * copies[0]
        else:
            assert_close(found[-1], found[0])


def test_gradients_are_summed_once(backend, devices):
    """A second sum would multiply them by K: it is an error for any K."""
    replicas = initialize(mlp(backend), devices)
    trainer = mgpu.Trainer(replicas, "sgd")
    X, y = batch(6)
    backward(replicas, X, y)
    trainer.allreduce_grads()
    held = gradients(replicas)
    for call in (trainer.allreduce_grads, lambda: trainer.step(6)):
        with pytest.raises(mgpu.StaleGradientError):
            call()
    assert_unchanged(gradients(replicas), held)
    trainer.update(6)           # what was summed is still there to apply
    before = values(replicas)
    for call, name in ((lambda: trainer.update(6), "update"),
                       (lambda: trainer.clip_global_norm(1.0),
                        "clip_global_norm")):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == (
            f"{name} requires gradients summed by allreduce_grads; "
            "received none since the last update. Call allreduce_grads "
            "first, or step for both.")
    assert_unchanged(values(replicas), before)
    assert trainer.num_update == 1


def test_clip_global_norm(engine, devices):
    """Once per parameter, not per device; with `batch_size` the norm of what
    will be applied."""
    replicas, trainer = sgd(engine, devices)
    for rows, max_norm in ((1, 0.25), (6, 0.25), (1, 1e6)):
        backward(replicas, *batch(6))
        trainer.allreduce_grads()
        summed = gradients(replicas)
        norm = np.sqrt(sum((g[0] ** 2).sum() for g in summed.values())) / rows
        assert norm > 0.25      # so that clipping is seen
        returned = trainer.clip_global_norm(max_norm, batch_size=rows)
        assert type(returned) is float
        assert abs(returned - norm) < 1e-14 * norm
        scale = min(1.0, max_norm / (norm + 1e-8))
        clipped = gradients(replicas)
        for name, copies in clipped.items():
            for copy, g in zip(copies, summed[name]):
                assert relative_difference(copy, g * scale) < 1e-14
        if max_norm > norm:
            assert_unchanged(clipped, summed)
        trainer.update(6)


def test_a_norm_that_is_not_finite_is_refused(backend, devices):
    replicas = initialize(mlp(backend), devices)
    trainer = mgpu.Trainer(replicas, "sgd")
    backward(replicas, *batch(4))
    trainer.allreduce_grads()
    replicas.params()[2].list_grad()[0][:] = float("nan")
    held = gradients(replicas)
    with pytest.raises(FloatingPointError, match="the gradients have norm "
                       "nan; they were not clipped. Lower the learning rate"):
        trainer.clip_global_norm(1.0)
    assert_unchanged(gradients(replicas), held)
    with pytest.raises(ValueError, match="max_norm must be .*; received"):
        trainer.clip_global_norm(-1.0)
