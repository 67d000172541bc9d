"""What users of Gluon type, on both engines, against the real Gluon.

The network has known inputs and is in float64; numbers are dyadic, which
MXNet's float32 scalars hold exactly, so 1e-12 leaves no room for another
formula (1e-6 where Gluon's kernel takes a rate that it has computed).
"""
import gc

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import mlp, on, relative_difference, using_engine

BOTH = pytest.mark.skipif({"mxnet", "torch"} - set(BACKENDS) != set(),
                          reason="compares with the real Gluon")
ROWS = (8, 4, 2, 1)     # powers of two: Gluon's 1 / rows is exact
FEW = (1, 3)            # devices


def initialize(engine, k=1, **options):
    return mgpu.initialize(mlp(engine), on(*range(k)), "xavier", seed=1,
                           dtype="float64", **options)


def batch(rows, seed):
    rng = np.random.default_rng([rows, seed])
    return rng.normal(size=(rows, 6)), rng.integers(0, 3, rows)


def backward(replicas, X, y):
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    Xs, ys = mgpu.split_batch(X, y, replicas.devices)
    with mgpu.record():
        losses = [None if out is None else loss(out, label)
                  for out, label in zip(replicas(Xs), ys)]
    mgpu.backward(losses)


def train(replicas, *trainers, between=lambda i: None):
    for i, rows in enumerate(ROWS):
        backward(replicas, *batch(rows, i))
        for trainer in trainers:
            trainer.step(rows)
        between(i)


def values(replicas):
    return {p.name: mgpu.to_numpy(p.data()) for p in replicas.params()}


def gluons(make, between=lambda i: None, steps=None):
    """Weights by mgpu's names after training by real Gluon trainers.
    `make(net)`: these; `steps(i)`: which of them step."""
    with using_engine("mxnet-nd") as backend, \
            pytest.MonkeyPatch.context() as patch:
        from mxnet import autograd, gluon, optimizer
        net = initialize(backend).net
        # Some make states of float32, which their kernels refuse.
        zeros = optimizer.optimizer.zeros
        patch.setattr(optimizer.optimizer, "zeros", lambda *a, **k: zeros(
            *a[:2], **{**k, "dtype": "float64"}))
        trainers, loss = make(net), gluon.loss.SoftmaxCrossEntropyLoss()
        for i, rows in enumerate(ROWS):
            X, y = (mgpu.put(a, mgpu.cpu(0)) for a in batch(rows, i))
            with autograd.record():
                losses = loss(net(X), y)
            losses.backward()
            for number in range(len(trainers)) if steps is None else steps(i):
                trainers[number].step(rows, ignore_stale_grad=True)
            between(i)
        return {name: p.data().asnumpy() for name, p
                in net._collect_params_with_prefix().items()}


def real(*arguments, **options):
    from mxnet import gluon
    return gluon.Trainer(*arguments, **options)


def assert_close(found, wanted, limit=1e-12):
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert relative_difference(found[name], x) < limit, name


# -- the first argument of a Trainer ------------------------------------------

OPTIONS = {"learning_rate": 0.125, "momentum": 0.5, "wd": 0.25}


def native(replicas, pattern=None):
    """What a user of the framework would pass."""
    import re
    net = replicas.net
    if replicas.backend.name == "mxnet":
        return net.collect_params(pattern)
    chosen = [x for name, x in net.named_parameters()
              if pattern is None or re.match(pattern, name)]
    return iter(chosen) if pattern is None else chosen


@BOTH
@pytest.mark.parametrize("k", FEW)
@pytest.mark.parametrize("pattern", [None, ".*weight"])
def test_a_trainer_of_parameters_moves_these(engine, k, pattern):
    replicas = initialize(engine, k)
    train(replicas, mgpu.Trainer(native(replicas, pattern), "sgd", OPTIONS))
    replicas.check_equal()
    assert_close(values(replicas), gluons(lambda net: [
        real(net.collect_params(pattern), "sgd", OPTIONS)]))


@BOTH
@pytest.mark.parametrize("k", FEW)
@pytest.mark.parametrize("alternate", [False, True])
def test_two_trainers_share_a_batch_or_take_turns(backend, k, alternate):
    replicas = initialize(backend, k)
    ours = [mgpu.Trainer(native(replicas, f".*{kind}"), name, OPTIONS)
            for kind, name in (("weight", "nag"), ("bias", "sgd"))]

    def steps(i):
        return [i % 2] if alternate else [0, 1]
    for i, rows in enumerate(ROWS):
        backward(replicas, *batch(rows, i))
        for number in steps(i):
            ours[number].step(rows)
    replicas.check_equal()
    assert_close(values(replicas), gluons(lambda net: [
        real(net.collect_params(".*weight"), "nag", OPTIONS),
        real(net.collect_params(".*bias"), "sgd", OPTIONS)], steps=steps))


@pytest.mark.parametrize("batch_norm", ["per_device", "average", "sync"])
def test_two_trainers_with_batch_norm_are_one(backend, batch_norm):
    """After both the statistics are those that one trainer leaves."""
    found = []
    for split in (False, True):
        replicas = mgpu.initialize(bn_net(backend), on(0, 1), "xavier", seed=1,
                                   dtype="float64", batch_norm=batch_norm)
        names = [p.name for p in replicas.params()]
        trainers = [mgpu.Trainer(
            [p for p in replicas.params() if p.name in part], "sgd", OPTIONS)
            for part in ([names] if not split else [names[:2], names[2:]])]
        for i in range(2):
            backward(replicas, *batch(8, i))
            for trainer in trainers:
                trainer.step(8)
        found.append({p.name: [mgpu.to_numpy(x) for x in p.list_data()]
                      for p in replicas.all_parameters()})
    for name, wanted in found[0].items():
        for one, other in zip(found[1][name], wanted):
            np.testing.assert_array_equal(one, other)


def bn_net(backend):
    if backend.name == "mxnet":
        from mxnet.gluon import nn
        net = nn.HybridSequential()
        net.add(nn.Dense(4, in_units=6), nn.BatchNorm(in_channels=4),
                nn.Dense(3, in_units=4))
        return net
    from torch import nn
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_a_step_of_some_leaves_no_gradient_of_theirs_to_a_later_batch(
        backend):
    """A device without rows in the next batch adds nothing of the last."""
    replicas = initialize(backend, 2)
    weights, biases = (mgpu.Trainer(native(replicas, f".*{kind}"), "sgd",
                                    {"learning_rate": 0.125})
                       for kind in ("weight", "bias"))
    backward(replicas, *batch(8, 0))
    weights.step(8)
    backward(replicas, *batch(1, 1))        # on the first device only
    grads = {p.name: mgpu.to_numpy(p.list_grad()[0]).copy()
             for p in replicas.params()}
    before = values(replicas)
    biases.step(1)
    for name, now in values(replicas).items():
        moved = 0.125 * grads[name] if name.endswith("bias") else 0
        np.testing.assert_allclose(now, before[name] - moved, rtol=1e-13)
    with pytest.raises(mgpu.StaleGradientError):
        biases.step(1)


def test_a_trainer_finds_no_network(backend):
    replicas, other = initialize(backend), mlp(backend)
    if backend.name == "mxnet":
        other.initialize()
    every = list(native(replicas).values() if backend.name == "mxnet"
                 else native(replicas))
    theirs = list(other.collect_params().values()
                  if backend.name == "mxnet" else other.parameters())
    for wrong, error, text in (
            (theirs, ValueError, "4 parameters of none"),
            (every + theirs, ValueError, "trains one network; received 4 of "
             "8"), ([], ValueError, "received none"),
            (every[:1] * 2, ValueError, "more than once"),
            ([{"params": every}], TypeError, "one rule for all"),
            (replicas.net, TypeError, "a Trainer takes the Replicas")):
        with pytest.raises(error, match=text):
            mgpu.Trainer(wrong, "sgd")
    assert mgpu.Trainer(replicas.params()[:2], "sgd").replicas is replicas
    del replicas
    gc.collect()
    with pytest.raises(ValueError, match="4 parameters of none.*keep what it "
                       "returns"):
        mgpu.Trainer(every, "sgd")


# -- its other arguments -------------------------------------------------------

@BOTH
@pytest.mark.parametrize("options", [
    {"kvstore": None}, {"kvstore": "local", "update_on_kvstore": True},
    {"kvstore": "device", "update_on_kvstore": False}], ids=str)
def test_stores_change_nothing(backend, options):
    replicas = initialize(backend, 2)
    train(replicas, mgpu.Trainer(replicas, "sgd", OPTIONS, **options))
    assert_close(values(replicas), gluons(lambda net: [
        real(net.collect_params(), "sgd", OPTIONS)]))


@pytest.mark.parametrize("options, text", [
    ({"kvstore": "dist_sync"}, "mgpu launch"),
    ({"kvstore": "nccl"}, "allreduce='native'"),
    ({"kvstore": "postal"}, "unknown kvstore; received 'postal'"),
    ({"semantics": "device"}, "Write kvstore='device'"),
    ({"compression_params": {"type": "2bit"}}, "summed as they are"),
    ({"optimizer_params": {"rescale_grad": 0}}, "rescale_grad must be"),
    ({"optimizer_params": {"begin_num_update": 3}}, "no option "
     "'begin_num_update'"),
    ({"optimizer_params": {"rescale_grad": 2.0}, "semantics": "torch"},
     "no option 'rescale_grad'")], ids=str)
def test_what_would_be_another_number_is_refused(backend, options, text):
    with pytest.raises(ValueError, match=text):
        mgpu.Trainer(initialize(backend), "sgd", **options)


@BOTH
def test_rescale_grad_multiplies(engine):
    options = {**OPTIONS, "rescale_grad": 0.25, "clip_gradient": 2.0 ** -6,
               "multi_precision": True, "lazy_update": True}
    replicas = initialize(engine, 3)
    train(replicas, mgpu.Trainer(replicas, "sgd", options))
    assert_close(values(replicas), gluons(lambda net: [
        real(net.collect_params(), "sgd", options)]))


def test_the_norm_that_is_clipped_is_that_of_what_is_applied(backend):
    replicas = initialize(backend, 2)
    trainer = mgpu.Trainer(replicas, "sgd", {"rescale_grad": 0.25})
    backward(replicas, *batch(8, 0))
    trainer.allreduce_grads()
    whole = trainer.clip_global_norm(1e9)
    assert trainer.clip_global_norm(1e9, 8) == pytest.approx(
        whole / 8 * 0.25, rel=1e-14)


def test_multi_precision_of_float16_is_refused(backend):
    replicas = mgpu.initialize(mlp(backend), on(0), "xavier",
                               dtype="float16")
    with pytest.raises(ValueError, match="multi_precision=True and narrower"):
        mgpu.Trainer(replicas, "sgd", {"multi_precision": True})


FAMILIES = ["sgd", "nag", "adam", "adamax", "nadam", "rmsprop", "adagrad",
            "adadelta", "ftrl", "signum"]
SCHEDULES = {
    "factor": ("FactorScheduler", dict(step=2, factor=0.5, base_lr=0.25)),
    "multifactor": ("MultiFactorScheduler", dict(
        step=[1, 3], factor=0.5, base_lr=0.25)),
    "poly": ("PolyScheduler", dict(max_update=6, base_lr=0.25, pwr=2)),
    "cosine": ("CosineScheduler", dict(max_update=6, base_lr=0.25)),
    "warm-up": ("FactorScheduler", dict(
        step=2, factor=0.5, base_lr=0.25, warmup_steps=2,
        warmup_begin_lr=0.125)),
}


@BOTH
@pytest.mark.parametrize("rate", [None, 0.125])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_rates_of_a_schedule_in_optimizer_params(kind, rate):
    """All optimisers: the real Trainer's rates, from MXNet's schedules and
    from mgpu's, whoever says the base rate."""
    mx = mgpu.mxnet_compat()
    name, options = SCHEDULES[kind]
    given = {} if rate is None else {"learning_rate": rate}
    with mgpu.using_backend("mxnet") as backend:
        net = initialize(backend).net
    for family in FAMILIES:
        theirs = real(net.collect_params(), family, {
            **given, "lr_scheduler": getattr(mx.lr_scheduler, name)(
                **options)})
        wanted = []
        for number in range(1, 7):
            theirs.optimizer.num_update = number
            wanted.append(theirs.learning_rate)
        for engine in BACKENDS:
            with mgpu.using_backend(engine) as backend:
                replicas = initialize(backend)
                for module in (mx.lr_scheduler, mgpu.lr_scheduler):
                    schedule = getattr(module, name)(**options)
                    trainer = mgpu.Trainer(replicas, family, {
                        **given, "lr_scheduler": schedule})
                    assert [trainer.rate(n) for n in range(1, 7)] \
                        == pytest.approx(wanted, rel=1e-14), family


#: its defaults are rounded to float32 there
ADAM = ({"beta1": 0.5, "beta2": 0.75, "epsilon": 2.0 ** -10}, {})


@BOTH
@pytest.mark.parametrize("family", ["sgd", "adam"])
def test_steps_under_a_schedule_of_mxnets(backend, family):
    mx = mgpu.mxnet_compat()

    def options():
        return {**ADAM[family == "sgd"], "lr_scheduler": mx.lr_scheduler
                .FactorScheduler(2, 0.5, base_lr=0.25)}
    replicas = initialize(backend, 2)
    train(replicas, mgpu.Trainer(replicas, family, options()))
    assert_close(values(replicas), gluons(lambda net: [real(
        net.collect_params(), family, options())]), 1e-6
        if family == "adam" else 1e-12)


# -- objects of MXNet's ---------------------------------------------------------

OBJECTS = {
    "SGD": dict(learning_rate=0.125, momentum=0.5, wd=0.25,
                clip_gradient=2.0 ** -4, rescale_grad=0.5),
    "NAG": dict(learning_rate=0.125, momentum=0.5, wd=0.25),
    "Adam": dict(learning_rate=0.125, beta1=0.5, beta2=0.75,
                 epsilon=2.0 ** -10),
    "Adamax": dict(learning_rate=0.125, beta1=0.5, beta2=0.75),
    "Nadam": dict(learning_rate=0.125, beta1=0.5, beta2=0.75,
                  epsilon=2.0 ** -10, schedule_decay=0.5),
    "RMSProp": dict(learning_rate=2.0 ** -6, gamma1=0.75, gamma2=0.5,
                    epsilon=2.0 ** -10, centered=True),
    "AdaGrad": dict(learning_rate=0.125, eps=2.0 ** -10, wd=0.25),
    "AdaDelta": dict(rho=0.75, epsilon=2.0 ** -10, wd=0.25),
    "Ftrl": dict(learning_rate=0.125, lamda1=2.0 ** -7, beta=2.0),
    "Signum": dict(learning_rate=0.125, momentum=0.5, wd_lh=0.25),
}


@BOTH
@pytest.mark.parametrize("name", OBJECTS)
def test_an_optimiser_object_of_mxnets(backend, name):
    """Step by step the real Trainer with such an object, whose rate and
    decay the program changes in between."""
    mx = mgpu.mxnet_compat()

    def made():
        return getattr(mx.optimizer, name)(**OBJECTS[name])

    def between(optimizer, trainer):
        def change(i):
            if i == 1:
                optimizer.wd = 0.5
                trainer.set_learning_rate(0.0625)
                assert optimizer.lr == trainer.learning_rate == 0.0625
        return change
    replicas, ours = initialize(backend, 2), made()
    trainer = mgpu.Trainer(replicas, ours)
    train(replicas, trainer, between=between(ours, trainer))
    theirs, kept = made(), []

    def make(net):
        kept.append(real(net.collect_params(), theirs))
        return kept
    wanted = gluons(make, lambda i: between(theirs, kept[0])(i))
    assert_close(values(replicas), wanted,
                 1e-6 if name in ("Adam", "RMSProp", "Ftrl") else 1e-12)
    assert ours.num_update == 0 and ours.rescale_grad == OBJECTS[name].get(
        "rescale_grad", 1.0)


@BOTH
def test_a_schedule_in_an_optimiser_object(backend):
    mx = mgpu.mxnet_compat()

    def made():
        return mx.optimizer.Adam(**ADAM[0], lr_scheduler=mx.lr_scheduler
                                 .FactorScheduler(2, 0.5, base_lr=0.25))
    replicas = initialize(backend, 2)
    trainer = mgpu.Trainer(replicas, made())
    assert trainer.learning_rate == 0.001
    train(replicas, trainer)
    assert trainer.learning_rate == 0.0005
    assert_close(values(replicas), gluons(lambda net: [
        real(net.collect_params(), made())]), 1e-6)
    with pytest.raises(ValueError, match="expected one lr_scheduler"):
        mgpu.Trainer(replicas, made(), lr_scheduler=lambda n: 0.1)


@BOTH
def test_an_object_without_a_counterpart_is_refused(backend):
    mx = mgpu.mxnet_compat()

    class Mine(mx.optimizer.SGD):
        pass
    used = mx.optimizer.SGD()
    used._update_count(0)
    multiplied = mx.optimizer.SGD()
    multiplied.set_lr_mult({"0.weight": 2.0})
    replicas = initialize(backend)
    for wrong, text in (
            (Mine(), "whose formula mgpu has; received .*Mine"),
            (mx.optimizer.LAMB(), "received mxnet.*LAMB"),
            (used, "after 1 updates"), (multiplied, "received an optimiser "
                                        "with lr_mult {'0.weight': 2.0}"),
            (mx.optimizer.SGD(param_idx2name={0: "0_bias"}), "wd_mult"),
            (mx.optimizer.SGD(begin_num_update=3), "begin_num_update=3"),
            (mx.optimizer.SGD(rescale_grad=0.0), "rescale_grad must be")):
        with pytest.raises(ValueError, match=text):
            mgpu.Trainer(replicas, wrong)
    optimizer = mx.optimizer.SGD()
    trainer = mgpu.Trainer(replicas, optimizer)
    backward(replicas, *batch(4, 0))
    before = values(replicas)
    optimizer.set_wd_mult({0: 2.0})
    with pytest.raises(ValueError, match="with wd_mult {0: 2.0}"):
        trainer.step(4)
    assert_close(values(replicas), before, 1e-300)
