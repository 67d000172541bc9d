"""`Trainer`: one meaning for any number of devices.

Networks are in float64 and without batch norm unless a test says otherwise,
so that K devices differ from one by rounding only, about 1e-16 a step, and
1e-12 excludes any other formula.
"""
import threading
from queue import SimpleQueue

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import (ENGINES, assert_bit_equal, convnet, foreign_array, mlp,
                     on, relative_difference, using_engine)
from steps import (LOSS, ROWS, assert_close, assert_replicas_equal,
                   assert_unchanged, backward, batch, gradients, initialize,
                   sgd, train, train_natively, values)
from mgpu.collectives import host_memory

MXNET = [engine for engine in ENGINES if engine.startswith("mxnet")]
OPTIMIZERS = [
    (2, "sgd", {"learning_rate": 0.125, "momentum": 0.5, "wd": 0.25,
                "clip_gradient": 0.25}),
    (3, "nadam", {"learning_rate": 0.125, "epsilon": 2.0 ** -10}),
    (4, "ftrl", {"learning_rate": 0.125}),
]


# -- K devices are one device -------------------------------------------------

@pytest.mark.parametrize("k, name, options", OPTIMIZERS)
def test_k_devices_are_one_device(backend, k, name, options):
    """Also with uneven shards, and with devices that have no rows."""
    results = []
    for devices in (on(0), on(*range(k))):
        replicas = initialize(mlp(backend), devices)
        start = values(replicas)
        trainer = mgpu.Trainer(replicas, name, options)
        train(replicas, trainer)
        assert trainer.num_update == len(ROWS)
        results.append(values(replicas))
        assert_replicas_equal(results[-1])
    assert_close(results[1], results[0])
    for label in start:     # and all moved
        move = np.abs(results[0][label][0] - start[label][0]).max()
        assert move > 1e-3, label


@pytest.mark.crosses_devices("of work in the host's memory, which the mode "
                             "leaves out")
@pytest.mark.parametrize("semantics", mgpu.optimizers.RULES)
def test_blocks_of_a_weight_are_the_whole(backend, semantics, monkeypatch):
    """In the host's memory a rule gets a few numbers of a weight at a time,
    in NumPy; by itself it gets whole arrays of the backend. (Rules that need
    a norm, or row, of a whole weight always get it.)"""
    monkeypatch.setattr(host_memory, "UPDATE_BLOCK", 64)
    monkeypatch.setattr(host_memory, "SHARE", 16)
    monkeypatch.setattr(host_memory, "cpu_cores", lambda: 3)
    blocks, calls = host_memory.work_on, []
    monkeypatch.setattr(host_memory, "work_on", lambda *arguments: (
        calls.append(arguments), blocks(*arguments)))
    for name, rule in mgpu.optimizers.RULES[semantics].items():
        if rule.needs_whole:
            continue
        results = []
        calls.clear()
        for in_blocks in (True, False):
            monkeypatch.setattr(mgpu.optimizers.Optimizer, "elementwise",
                                in_blocks)
            replicas = initialize(mlp(backend), on(0, 1))
            train(replicas, mgpu.Trainer(
                replicas, name, {"momentum": 0.5} if name == "nag" else {},
                semantics=semantics), [7, 1])
            results.append(values(replicas))
            assert len(calls) == 3 * 2
        # To rounding: torch's square root is a unit in the last place off
        # now and then, and MXNet's compiled expressions round in another
        # order.
        assert_close(*results)


def test_a_step_divides_by_any_number_above_0(engine, devices):
    """The tokens of a batch, the sum of its weights, as masks give them."""
    for size in (6, 2.5, 0.25, np.float32(7.3), np.int64(3), np.array(7.0)):
        for how in ("step", "update", "native"):
            replicas, trainer = sgd(engine, devices)
            start, divisor = values(replicas), float(size)
            backward(replicas, *batch(6))
            if how == "update":
                trainer.allreduce_grads()
                norm = trainer.clip_global_norm(1e9, size)
                assert relative_difference(norm, np.sqrt(sum(
                    (g[0] ** 2).sum() for g in gradients(replicas).values()
                )) / divisor) < 1e-14
                trainer.update(size)
            else:       # `x.sum()` of torch, or of mx.np, has the shape ()
                scalar = engine.put(np.array([divisor]), devices[0]).sum()
                trainer.step(size if how == "step" or scalar.shape
                             else scalar)
            summed = gradients(replicas)
            for name, (found, *_) in values(replicas).items():
                wanted = start[name][0] - 0.125 * summed[name][0] / divisor
                assert relative_difference(found, wanted) < 1e-14


def test_a_wrong_option_in_the_middle_of_a_training_changes_nothing(backend):
    for semantics in ("gluon", "torch"):
        for name, option, value, error in (
                ("sgd", "momentum", 0.5, ValueError),
                ("sgd", "wd", "x", TypeError),
                ("sgd", "learning_rate", float("nan"), ValueError),
                ("rmsprop", "centered", True, ValueError)):
            replicas = initialize(mlp(backend), on(0, 1))
            trainer = mgpu.Trainer(replicas, name, semantics=semantics)
            train(replicas, trainer, [4])
            before = values(replicas)
            good = getattr(trainer.optimizer, option)
            setattr(trainer.optimizer, option, value)
            with pytest.raises(error):
                train(replicas, trainer, [4])
            assert_unchanged(values(replicas), before)
            setattr(trainer.optimizer, option, good)
            trainer.optimizer.learning_rate = 0.5
            train(replicas, trainer, [4])       # nothing is torn


# -- who uses the replicas ----------------------------------------------------

def test_invalidated_replicas_raise(backend, devices, tmp_path):
    net = mlp(backend)
    old, trainer = sgd(backend, devices, net)
    zeros = {name: 0 * value for name, value in old.export_numpy().items()}
    mgpu.save_checkpoint(tmp_path / "old", old, trainer)
    initialize(net, devices, force_reinit=True)
    new = mgpu.initialize(net, devices)
    now = values(new)
    shards = mgpu.split_and_load(batch(8)[0], devices, even_split=False)
    for call in (lambda: trainer.step(1), trainer.allreduce_grads,
                 lambda: old[0](shards[0]), lambda: old(shards),
                 lambda: old.import_numpy(zeros), old.zero_grad,
                 old.export_numpy, lambda: mgpu.Trainer(old, "sgd"),
                 lambda: mgpu.load_checkpoint(tmp_path / "old", old,
                                              trainer)):
        with pytest.raises(RuntimeError, match="invalid: the network was "
                           "initialized again. Use the result of the last"):
            call()
    assert_unchanged(values(new), now)
    train(new, mgpu.Trainer(new, "sgd"))


def test_a_step_after_an_update_that_failed_midway(backend, devices):
    """With the values of before: nothing else is kept of it."""
    class Failing(type(mgpu.optimizers.create("sgd"))):
        left = 3

        def update(self, *args, **kwargs):
            Failing.left -= 1
            if not Failing.left:
                raise ZeroDivisionError("in the rule")
            super().update(*args, **kwargs)
    found = []
    for fails in (False, True):
        Failing.left = 3 if fails else 0
        replicas = initialize(mlp(backend), devices)
        trainer = mgpu.Trainer(replicas, Failing(learning_rate=0.125))
        kept, states = replicas.export_numpy(), trainer.export_states()
        if fails:
            backward(replicas, *batch(8))
            with pytest.raises(ZeroDivisionError):
                trainer.step(8)
            assert trainer.num_update == 0
            trainer.import_states(states)
            replicas.import_numpy(kept)
        train(replicas, trainer)
        found.append(values(replicas))
    assert_unchanged(*found)


@pytest.mark.parametrize("name", MXNET[:1])
def test_a_pass_that_fails_late_updates_nothing(name, devices):
    """Its error comes when its results are read, and only once."""
    with using_engine(name) as engine:
        import mxnet as mx
        replicas, trainer = sgd(engine, devices)
        train(replicas, trainer, [8])
        before = values(replicas)
        Xs, ys = mgpu.split_batch(*batch(8), devices)
        with mgpu.record():
            losses = mgpu.parallel(LOSS, replicas(Xs), ys)
            bad = mx.nd.linalg.potrf(mx.nd.zeros(
                (1, 1), ctx=losses[-1].ctx, dtype="float64") - 1)[0]
            losses[-1] = losses[-1] * bad
        mgpu.backward(losses)
        with pytest.raises(mgpu.errors.DeviceError,
                           match=r"cpu\(2\)\], in step 2.*Check failed"
                           ) as caught:
            trainer.step(8)
        assert isinstance(caught.value.__cause__, mx.MXNetError)
        with pytest.raises(RuntimeError, match="none since the last update"):
            trainer.update(8)
        assert_unchanged(values(replicas), before)
        train(replicas, trainer, [8])
        assert trainer.num_update == 2


def test_one_thread_at_a_time(backend, devices):
    """A second thread raises without waiting; the first continues."""
    replicas, trainer = sgd(backend, devices)
    refused = SimpleQueue()

    def other():
        for call in (lambda: trainer.step(8), lambda: replicas(
                mgpu.split_batch(*batch(8), devices)[0])):
            try:
                call()
            except RuntimeError as error:
                refused.put(str(error))

    def loss(output, label):
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(60)     # without an error it waits for this one
        return LOSS(output, label)
    mgpu.train_batch(*batch(8), replicas, loss, trainer)
    texts = [refused.get() for _ in range(refused.qsize())]
    assert len(texts) == 2
    assert all("one thread at a time" in text for text in texts)
    assert trainer.num_update == 1


# -- arguments ----------------------------------------------------------------

def test_a_wrong_batch_size_is_refused(backend):
    replicas, trainer = sgd(backend, on(0, 1))
    backward(replicas, *batch(4))
    before, held = values(replicas), gradients(replicas)
    for size in (0, -1, "2", None, True, np.inf, np.nan, 1j, np.ones(2)):
        calls = [trainer.step, trainer.update]
        if size is not None:        # which clips the sums as they are
            calls.append(lambda n: trainer.clip_global_norm(1.0, n))
        for call in calls:
            with pytest.raises(ValueError) as caught:
                call(size)
            assert str(caught.value) == (
                "batch_size must be a finite number above 0; received "
                f"{size!r}. Pass the global batch size, over all devices, or "
                "another divisor of the loss: the number of tokens, or the "
                "sum of the weights.")
    assert_unchanged(values(replicas), before)
    assert_unchanged(gradients(replicas), held)
    trainer.step(np.int64(4))       # a whole number of NumPy is one


WRONG = [
    (("rprop",), ValueError, "unknown optimizer; received 'rprop'. Use one "
     "of sgd, nag, adam"),
    (("sgd", {"lr": 0.1}), ValueError, "the optimizer 'sgd' has no option "
     "'lr' with semantics='gluon'. Use"),
    (("sgd", 0.1), TypeError, "optimizer_params must be a dict with names as "
     "keys; received float"),
    (("sgd", {"learning_rate": -1}), ValueError, "learning_rate must be"),
    (("sgd", None, "jax"), ValueError, "unknown semantics; received 'jax'"),
    (("sgd", {"lr_scheduler": float}, "gluon", float), ValueError,
     "expected one lr_scheduler; received one as an argument and one in "
     "optimizer_params"),
    (("sgd", None, "gluon", 0.5), TypeError, "lr_scheduler must be "
     "callable with an update number; received float."),
    (("sgd", None, "gluon", None, 2.0), TypeError,
     "lr_mult must be a dict with names as keys; received float"),
    (("sgd", None, "gluon", None, {"weight": 2.0}), ValueError,
     "lr_mult must name parameters of the network; received ['weight']. It "
     "has ['0.bias', '0.weight', '2.bias', '2.weight']."),
    (("sgd", None, "gluon", None, None, [1, 2]), TypeError,
     "wd_mult must be a dict with names as keys; received list"),
    (("sgd", None, "gluon", None, None, {"0.bias": "2"}), TypeError,
     "wd_mult of '0.bias' must be a finite number; received '2' of type "
     "str."),
    (("sgd", None, "gluon", None, {"0.bias": float("nan")}), ValueError,
     "lr_mult of '0.bias' must be a finite number; received nan."),
    (("sgd", None, "gluon", None, None, None, None, "nccl"), ValueError,
     "unknown allreduce; received 'nccl'"),
    ((mgpu.optimizers.SGD(), {"momentum": 0.5}), ValueError,
     "optimizer_params require an optimizer's name; received ['momentum'] "
     "with an Optimizer object."),
]


def test_wrong_arguments(backend):
    replicas = initialize(mlp(backend), on(0, 1))
    for arguments, error, text in WRONG:
        with pytest.raises(error) as caught:
            mgpu.Trainer(replicas, *arguments)
        assert str(caught.value).startswith(text)


def test_a_trainer_takes_replicas(backend):
    for wrong in ([np.ones(3)], foreign_array(backend)[0]):
        with pytest.raises(TypeError) as caught:
            mgpu.Trainer(wrong, "sgd")
        assert str(caught.value) == (
            "a Trainer expects the Replicas that mgpu.initialize returns; "
            f"received {type(wrong).__name__}. Use Trainer(replicas, ...) or "
            "Trainer(net.collect_params(), ...) of a network that "
            "mgpu.initialize has put on devices, and for lists of arrays "
            "mgpu.sgd. Parameter groups are not supported: "
            "use lr_mult and wd_mult, or a Trainer for each group.")


def test_a_network_with_unknown_shapes(engine, devices):
    """A trainer may be made before the first forward pass."""
    found = []
    for deferred in (True, False):
        replicas = initialize(mlp(engine, deferred=deferred), devices)
        train(replicas, mgpu.Trainer(
            replicas, "sgd", {"learning_rate": 0.125}, lr_mult={
                "0.bias": 2.0}))
        found.append(values(replicas))
    assert_unchanged(*found)


def test_a_step_needs_known_shapes(backend, devices, tmp_path):
    replicas, trainer = sgd(backend, devices, mlp(backend, deferred=True))
    for call in (lambda: trainer.step(4), trainer.allreduce_grads,
                 lambda: trainer.load_states(tmp_path / "none")):
        with pytest.raises(RuntimeError, match="a shape is unknown until the "
                           r"first forward pass. Run replicas\(shards\)"
                           ", or pass sample="):
            call()


def halved(engine):
    """A network that computes with half of what its first weight stores, as
    a mask or dropout of weights does."""
    from mxnet import gluon

    class Halved(gluon.Parameter):
        def data(self, ctx=None):
            return super().data(ctx) * 0.5
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(4, in_units=6, activation="tanh"),
            gluon.nn.Dense(3, in_units=4))
    old = net[0].weight
    new = Halved(old.name, shape=old.shape)
    net[0]._reg_params["weight"] = net[0].params._params[new.name] = new
    object.__setattr__(net[0], "weight", new)
    net.initialize()
    net.cast("float64")
    for i, p in enumerate(net.collect_params().values()):
        p.set_data(engine.put(np.random.default_rng(i).normal(
            size=p.shape), on(0)[0]))
    return net


def stored(net):
    return [p.list_data() for p in net.collect_params().values()]


@pytest.mark.parametrize("name, loop", [*zip(MXNET, ("step", "native"))])
def test_a_parameter_that_gives_forward_something_else_than_it_stores(
        name, devices, loop, tmp_path):
    with using_engine(name) as engine:
        from mxnet import autograd
        plain = halved(engine)
        replicas = mgpu.initialize(halved(engine), devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        for rows in (8, 7, 3):
            X, y = batch(rows)
            with autograd.record():
                losses = LOSS(plain(engine.put(X, on(0)[0])),
                              engine.put(y, on(0)[0]))
            losses.backward()
            for p in plain.collect_params().values():
                p.set_data(p.list_data()[0]
                           - p.list_grad()[0] * (0.125 / rows))
            if loop == "step":
                mgpu.train_batch(X, y, replicas, LOSS, trainer)
            else:
                train_natively(replicas, X, y)
                trainer.step(rows)
        now = [mgpu.to_numpy(x) for (x,) in stored(plain)]

        def check(wanted):
            for arrays, x in zip(stored(replicas.net), wanted, strict=True):
                for array in arrays:
                    assert relative_difference(array.asnumpy(), x) < 1e-12
        check(now)
        mgpu.save_checkpoint(tmp_path / "halved", replicas, trainer)
        saved = replicas.export_numpy()
        assert relative_difference(saved["0.weight"], now[0]) < 1e-12
        for put_back in (
                lambda: mgpu.load_checkpoint(tmp_path / "halved", replicas,
                                             trainer),
                lambda: replicas.import_numpy(saved)):
            replicas.net[0].weight.set_data(engine.put(0 * now[0], on(0)[0]))
            put_back()
            check(now)
        replicas.net[0].weight.set_data(engine.put(now[0] * 2, on(0)[0]))
        check([now[0] * 2, *now[1:]])


@pytest.mark.parametrize("name", MXNET[:1])
def test_gluons_own_loop_completes_shapes(name, devices):
    """Unknown shapes come with its first call; nothing of that is lost."""
    found = []
    for deferred in (False, True):
        with using_engine(name) as engine:
            replicas, trainer = sgd(engine, devices, mlp(engine,
                                                         deferred=deferred))
            for rows in (4, 1):
                train_natively(replicas, *batch(rows))
                trainer.step(rows)
            found.append(values(replicas))
    assert_unchanged(*found)


@pytest.mark.parametrize("name, requests", [*zip(MXNET, (
    ("add",), ("null", "write")))])
def test_gluons_own_loop_follows_another_grad_req(name, devices, requests):
    """Set on the network after `initialize`: of micro-batches none is lost,
    of an abandoned batch nothing is applied."""
    found = []
    for early in (True, False):
        with using_engine(name) as engine:
            net = mlp(engine)

            def change(net=net):
                for request in requests:
                    net.collect_params().setattr("grad_req", request)
            if early:
                change()
            replicas, trainer = sgd(engine, devices, net)
            if not early:
                change()
            train_natively(replicas, *batch(4))
            train_natively(replicas, *batch(1))
            trainer.step(5)
            found.append(values(replicas))
    assert_unchanged(*found)


@pytest.mark.parametrize("policy", ["per_device", "average"])
@pytest.mark.parametrize("ours, other", [*zip(BACKENDS, BACKENDS[::-1])])
def test_a_trainer_keeps_its_backend(ours, other, policy, tmp_path):
    """A step, or a file, while the other one is in use."""
    X, y = np.random.default_rng(0).normal(size=(4, 2, 6, 6)), np.arange(4) % 3
    found = []
    for used in (ours, other):
        with mgpu.using_backend(ours) as backend:
            replicas = initialize(convnet(backend), on(0, 1),
                                  batch_norm=policy)
            trainer = mgpu.Trainer(replicas, "sgd", {"momentum": 0.5})
            for _ in range(2):
                backward(replicas, X, y)
                with mgpu.using_backend(used):
                    trainer.allreduce_grads()
                    trainer.clip_global_norm(10.0)
                    trainer.update(4)
                    trainer.save_states(tmp_path / "states")
                    trainer.load_states(tmp_path / "states")
                    replicas.zero_grad()
            with mgpu.using_backend(used):
                found.append(replicas.export_numpy(all_devices=True))
    for name, x in found[0].items():
        assert_bit_equal(found[1][name], x)
