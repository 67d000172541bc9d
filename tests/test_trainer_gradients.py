"""Which gradients a step of a `Trainer` applies: of one batch, summed once,
with what the user writes to them, or an error before anything changes."""
import functools
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
                   gradients, initialize, sgd, sides, train,
                   train_natively, values)

STALE = ("parameter {!r} has no new gradient{} since the last step: no "
         "backward pass reached it. Run the forward pass inside record() and "
         "call backward on every device's loss; freeze the parameter "
         "(grad_req='null', requires_grad=False); or pass "
         "ignore_stale_grad=True to skip it.")
OTHERS = STALE.replace("no backward pass reached it", "the last backward "
                       "pass did not reach it").replace("; freeze", (
                           "; add up losses, or use grad_req='add', where "
                           "each had a backward pass of its own; freeze"))


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
            assert str(caught.value) == OTHERS.format(name, "")
        assert isinstance(caught.value, RuntimeError)
        assert_unchanged(values(replicas), before)
        assert_unchanged(gradients(replicas), held)
        assert trainer.num_update == 0
        trainer.step(2, ignore_stale_grad=True)     # the same gradients, later


@pytest.mark.parametrize("passes", ["none", "forward", "predicted", "first",
                                    "one by one"])
def test_a_step_without_a_backward_pass(backend, devices, passes):
    replicas, trainer = sgd(backend, devices)
    shards = mgpu.split_and_load(batch(8)[0], devices, even_split=False)
    text = STALE
    if passes == "forward":
        with mgpu.record():
            replicas(shards)
    elif passes == "predicted":
        replicas(shards)
    elif passes != "none":      # of the first device alone
        with mgpu.record():
            outputs = replicas(shards) if passes == "first" else [
                replica(shard) for replica, shard in zip(replicas, shards)]
        mgpu.backward(outputs[:1])
        text = STALE.replace("freeze", "in a forward pass of Gluon's read "
                             "p.data(x.context), not p.data(); freeze")
    before = values(replicas)
    with pytest.raises(mgpu.StaleGradientError) as caught:
        trainer.step(8)
    assert str(caught.value) == text.format(
        "0.weight", "" if text is STALE else " on cpu(1)")
    assert_unchanged(values(replicas), before)


def test_a_skipped_gradient_is_zero_until_the_user_writes_it(engine, devices):
    """Clipping by hand, and surgery on gradients, in a step by hand: nothing
    of an earlier batch counts, and what is written is applied."""
    replicas, trainer = sgd(engine, devices, gated(engine))
    for side in (-1, 1):
        backward(replicas, *sides(*[side] * 4))
        trainer.allreduce_grads(ignore_stale_grad=True)
        if side == -1:
            trainer.update(4)
    skipped = {p.name: p for p in replicas.params()
               if p.name.startswith("left")}
    for p in skipped.values():
        for g in p.list_grad():
            assert not mgpu.to_numpy(g).any()
    before, weight = values(replicas), skipped["left.weight"]
    with mgpu.no_grad():
        weight.list_grad()[0][:] += 2
    assert [p.name for p in trainer.summed() if p.name in skipped] == [
        "left.weight"]
    trainer.update(4)
    after = values(replicas)
    assert_replicas_equal(after)
    for name in skipped:
        move = 0.125 * 2 / 4 * (name == "left.weight")
        assert np.abs(before[name][0] - after[name][0] - move).max() < 1e-12


@pytest.mark.parametrize("stepped, request_", [("by hand", "write"),
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


@pytest.mark.parametrize("passes", ["native", "device by device"])
def test_a_step_applies_one_batch(engine, devices, passes):
    """A batch that was abandoned after its backward pass is not applied with
    the next one, though that leaves devices idle; cleared or not."""
    def go(replicas, X, y):
        if passes == "native":
            train_natively(replicas, X, y)
            return
        for replica, x, label in zip(
                replicas, *mgpu.split_batch(X, y, devices)):
            if len(x):
                with mgpu.record():
                    one = LOSS(replica(x), label)
                mgpu.backward(one)
    if passes == "native" and engine.name == "torch":
        pytest.skip("the network itself is on the first device")
    found = []
    for abandoned in ("", "as it is", "cleared"):
        replicas, trainer = sgd(engine, devices)
        if abandoned:
            go(replicas, *batch(8, 7))
        if abandoned == "cleared":
            replicas.zero_grad()
        go(replicas, *batch(1))
        trainer.step(1)
        found.append(values(replicas))
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


@pytest.mark.parametrize("order", ["device by device", "all, then all"])
def test_of_several_passes_the_last_of_each_device_counts(
        engine, devices, order):
    """An attack on the rows and then the pass that trains, as on one device:
    a second pass of one device does not void what others hold."""
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

    def go(replicas, trainer, native):
        for rows in ROWS:
            Xs, ys = mgpu.split_batch(*batch(rows), replicas.devices)
            shards = [(replicas.net if native else replica, x, labels)
                      for replica, x, labels in zip(replicas, Xs, ys)
                      if len(x)]
            for together in ([[one] for one in shards]
                             if order == "device by device" else [shards]):
                changed = [attacked(*one) for one in together]
                with mgpu.record():
                    losses = [LOSS(run(x), labels) for (run, _, labels), x
                              in zip(together, changed)]
                for one in losses:
                    mgpu.backward([one])
            trainer.step(rows)
    # (torch's own network is on the first device.)
    for native in (False, True) if engine.name == "mxnet" else (False,):
        check_as_on_one_device(
            engine, devices, functools.partial(go, native=native))


def test_passes_that_do_not_tell_their_batch_are_refused(backend):
    """Before anything changes; what the message says helps."""
    devices = on(0, 1)
    replicas, trainer = sgd(backend, devices)
    Xs, ys = mgpu.split_batch(*batch(8), devices)

    def losses():
        with mgpu.record():
            return [LOSS(replica(x), labels)
                    for replica, x, labels in zip(replicas, Xs, ys)]

    def passes():
        for one in losses():
            mgpu.backward([one])
        mgpu.backward(losses()[1:])
    passes()
    before = values(replicas), gradients(replicas)
    for call in (trainer.allreduce_grads, lambda: trainer.step(8)):
        with pytest.raises(RuntimeError, match=(
                r"in the latest batch: 1 on cpu\(0\), 2 on cpu\(1\)\. Give "
                r"the losses of all.*mgpu.backward\(losses\).*zero_grad")):
            call()
    assert_unchanged(values(replicas), before[0])
    assert_unchanged(gradients(replicas), before[1])
    mgpu.backward(losses())
    trainer.step(8)
    passes()
    replicas.zero_grad()        # the batch is given up
    for one in losses():
        mgpu.backward([one])
    trainer.step(8)


def test_gradients_of_the_network_itself(backend, devices):
    """Gluon's own loop, ``net(x)`` for each shard (torch: of the first
    device): what is written to the first device's weight alone is refused
    before anything changes, as no replica was run that would copy it."""
    replicas, trainer = sgd(backend, devices)
    weight = replicas.params()[0].data()
    getattr(weight, "data", weight)[:] = weight * 0.5
    before = values(replicas)
    X, y = mgpu.split_batch(*batch(8), devices)
    with mgpu.record():
        losses = [LOSS(replicas.net(x), labels) for x, labels in zip(
            X[:1] if backend.name == "torch" else X, y)]
    mgpu.backward(losses)
    with pytest.raises(mgpu.ReplicaMismatchError, match=(
            r"'0.weight' on cpu\(0\) and on cpu\(1\) does not.*"
            "write with Parameter.set_data")):
        trainer.step(8)
    assert_unchanged(values(replicas), before)


def test_after_a_refused_step_gradients_are_the_users(backend, devices):
    """`train_batch` does not look for what nobody can write."""
    replicas, trainer = sgd(backend, devices, gated(backend))
    with pytest.raises(mgpu.StaleGradientError):
        mgpu.train_batch(*sides(*[1] * 8), replicas, LOSS, trainer)
    reached = [p for p in replicas.params()
               if mgpu.to_numpy(p.list_grad()[0]).any()]
    gradient = reached[0].list_grad()[0]
    if backend.name == "torch":
        gradient.data.mul_(0.5)     # no version counts it
    else:
        gradient *= 0.5
    with pytest.raises(RuntimeError, match="on some devices"):
        trainer.step(8, ignore_stale_grad=True)


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


def test_a_change_of_one_devices_gradient_between_two_passes_is_refused(
        engine, devices):
    replicas, trainer = adding(engine, devices)
    before = values(replicas)
    backward(replicas, *batch(8, 0))
    gradient = replicas.params()[0].list_grad()[0]
    gradient *= 0.5
    backward(replicas, *batch(8, 1))
    with pytest.raises(RuntimeError, match="on some devices"):
        trainer.step(16)
    assert_unchanged(values(replicas), before)


@pytest.mark.parametrize("loop", ["replicas", "native", "halved",
                                  "with a forward pass for a log"])
def test_sums_that_grow_are_summed_once(engine, devices, loop):
    """``grad_req="add"`` without `zero_grad`: the sum goes on growing, by the
    next batch's gradients, on any number of devices. What is written to it
    between sum and update is of that step, and of all devices."""
    if loop == "native" and engine.name == "torch":
        pytest.skip("the network itself is on the first device")

    def go(replicas, trainer):
        for rows in ROWS:
            X, y = batch(rows)
            (train_natively if loop == "native" else backward)(replicas, X, y)
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


def test_clipping_one_devices_part_is_refused(engine, devices):
    """The commonest habit clips one device's part of the sum: refused before
    anything changes."""
    replicas, trainer = sgd(engine, devices)
    backward(replicas, *batch(8))
    for p in replicas.params():
        g = p.list_grad()[0]
        g *= 0.5
    before = values(replicas), gradients(replicas)
    for call in (trainer.allreduce_grads, lambda: trainer.step(8)):
        with pytest.raises(RuntimeError, match="allreduce_grads.*changed on "
                           "some devices.*clip_global_norm"):
            call()
    assert_unchanged(values(replicas), before[0])
    assert_unchanged(gradients(replicas), before[1])
    for p in replicas.params():     # a change on all devices is the user's
        for g in p.list_grad():
            g *= 0.5
    trainer.step(8)
    # And the next batch is a new one.
    backward(replicas, *batch(8))
    trainer.step(8)


def test_what_is_added_on_a_device_without_rows_counts(engine, devices):
    """Each adds its share of a penalty; to zeros there, not to the gradient
    of an earlier batch, which the next pass voids after an abandoned one
    too."""
    def go(replicas, trainer):
        train(replicas, trainer)
        for rows in (1, 2):
            backward(replicas, *batch(rows))
            for p in replicas.params():
                for g, w in zip(p.list_grad(), p.list_data()):
                    g += w / len(replicas.devices)
            trainer.step(rows)
        backward(replicas, *batch(8))       # abandoned
        backward(replicas, *batch(1))
        trainer.step(1)
        backward(replicas, *batch(8))
        with mgpu.record():         # a forward pass for a log
            replicas(mgpu.split_batch(*batch(1), replicas.devices)[0])
        trainer.step(8)
    check_as_on_one_device(engine, devices, go)


def test_a_change_of_replica_0s_sum_reaches_all(engine, devices):
    """Between all-reduce and update, where the framework clips; on torch also
    as in ``p.grad.data.clamp_``, which it does not count."""
    edits = [lambda g: g.__imul__(0.5)] * 2
    if engine.name == "torch":
        edits += [lambda g: g.data.clamp_(-1e-3, 1e-3),
                  lambda g: g.data.neg_(), lambda g: g.numpy().__imul__(0.5)]

    def go(replicas, trainer):
        for edit, rows in zip(edits, ROWS):
            backward(replicas, *batch(rows))
            trainer.allreduce_grads()
            for p in replicas.params():
                edit(p.list_grad()[0])
            trainer.update(rows)
        assert_replicas_equal(gradients(replicas))
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
    ("update", "train_batch"), ("allreduce_grads", "by hand"),
    ("both", "train_batch"), ("an attribute", "by hand")])
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


@pytest.mark.skipif("torch" not in BACKENDS, reason="a habit of torch")
def test_writes_that_torch_does_not_count_are_seen():
    """To one device's part, before the sum. A large gradient whose rows are
    opposites: its values add up to 0, also after some of these writes. None
    is one too."""
    from torch import nn

    with using_engine("torch"):
        for dtype, edit in (
                ("float64", lambda g: g.clamp_(-1e-3, 1e-3)),
                ("float64", lambda g: g.numpy().__imul__(0.5)),
                ("float32", lambda g: g.copy_(g.roll(1, 0))),
                ("float64", lambda g: g.copy_(g.roll(1, 1))),
                ("float32", lambda g: g.neg_()),
                ("float64", lambda g: g[0, -2:].neg_()),
                ("float64", None)):
            net = nn.Linear(2048, 2)
            replicas = mgpu.initialize(net, on(0, 1), "xavier", dtype=dtype)
            trainer = mgpu.Trainer(replicas, "sgd")
            X = np.random.default_rng(0).normal(size=(4, 2048)).astype(dtype)
            with mgpu.record():
                losses = [out[:, 0] - out[:, 1] for out in replicas(
                    mgpu.split_and_load(X, replicas.devices))]
            mgpu.backward(losses)
            if edit is None:
                net.weight.grad = None
            else:
                edit(net.weight.grad.data)
            with pytest.raises(RuntimeError, match="'weight' changed on"):
                trainer.step(4)


def test_sums_that_another_trainer_has_applied_are_not_applied_again(
        backend, devices):
    replicas = initialize(mlp(backend), devices)
    first, second = (mgpu.Trainer(replicas, "sgd") for _ in range(2))
    backward(replicas, *batch(8))
    first.allreduce_grads()
    backward(replicas, *batch(8, 1))
    second.step(8)
    before = values(replicas)
    with pytest.raises(RuntimeError, match="received those of another"):
        first.update(8)
    assert_unchanged(values(replicas), before)


def test_a_backward_pass_after_the_sum_is_refused(backend, devices):
    for request_ in ("write", "add"):
        replicas, trainer = sgd(backend, devices)
        for p in replicas.params():
            p.grad_req = request_
        backward(replicas, *batch(8))
        trainer.allreduce_grads()
        backward(replicas, *batch(8, 1))
        before = values(replicas)
        with pytest.raises(RuntimeError, match={
                "write": "a backward pass has written since.* penalties too "
                         ".* grad_req='add' and call",
                "add": "has written since. Call allreduce_grads again"}[
                    request_]):
            trainer.update(8)
        assert_unchanged(values(replicas), before)
        trainer.step(8)     # sums the new ones


def test_a_penalty_has_the_same_pass_or_is_added(backend, devices):
    """The two cures that the refusal of a second pass names are one number,
    that of the formula; to call allreduce_grads again is right for "add"."""
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
            f"{name} works on gradients that allreduce_grads has summed; "
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
