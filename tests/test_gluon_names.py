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
from mgpu.compat import mxnet as names

if "mxnet" in BACKENDS:
    mgpu.mxnet_compat()         # what it sets is no test's

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
def test_only_floats_are_scaled(backend):
    """Whole numbers would be cut, and what came before them is scaled."""
    x = mgpu.put(np.full(3, 5.0), mgpu.cpu(0))
    whole, none = (mgpu.put(a, mgpu.cpu(0)) for a in (
        np.arange(4), np.ones((0, 2))))
    with pytest.raises(TypeError, match="received .*int64"):
        mgpu.clip_global_norm([x, whole], 1.0)
    assert (mgpu.to_numpy(x) == 5).all()
    assert mgpu.to_numpy(whole).tolist() == [0, 1, 2, 3]
    norm = mgpu.clip_global_norm([x, none], 1.0)
    assert norm == pytest.approx(75 ** 0.5)
    assert (mgpu.to_numpy(x) ** 2).sum() == pytest.approx(1)
    with pytest.raises(ValueError, match="received none"):
        mgpu.clip_global_norm([none], 1.0)


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


# -- its other arguments ------------------------------------------------------

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
            "adadelta", "ftrl", "signum", "lamb", "lars", "ftml", "dcasgd"]
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


# -- objects of MXNet's -------------------------------------------------------

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
    "LAMB": dict(learning_rate=0.125, beta1=0.5, beta2=0.75,
                 epsilon=2.0 ** -10, upper_bound=2.0),
    "LARS": dict(learning_rate=0.125, eta=0.5, wd=0.25, momentum=0.5,
                 momentum_correction=False),
    "FTML": dict(learning_rate=0.125, beta1=0.5, beta2=0.75,
                 epsilon=2.0 ** -10),
    "DCASGD": dict(learning_rate=0.125, lamda=0.5),
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
                 1e-6 if name in ("Adam", "RMSProp", "Ftrl", "LAMB", "LARS")
                 else 1e-12)
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
            (mx.optimizer.LBSGD(), "received mxnet.*LBSGD"),
            (mx.optimizer.DCASGD(momentum=0.5), "dcasgd has no momentum"),
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


# -- functions ----------------------------------------------------------------

@BOTH
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("even", [True, False])
def test_split_data_is_gluons(engine, axis, even):
    from mxnet import gluon
    data = np.arange(54.0).reshape(6, 9)
    with using_engine("mxnet-nd") as theirs:
        x = theirs.put(data, mgpu.cpu(0))
        try:
            wanted = [part.asnumpy() for part in gluon.utils.split_data(
                x, 4 if not even else 3, axis, even)]
        except ValueError as error:
            wanted = str(error)
    for x in (data, engine.put(data, mgpu.cpu(0))):
        found = [np.asarray(part) if isinstance(part, np.ndarray)
                 else mgpu.to_numpy(part) for part in mgpu.split_data(
                     x, 3 if even else 4, axis, even)]
        assert [a.tolist() for a in found] == [a.tolist() for a in wanted]
    with pytest.raises(ValueError, match="cannot be evenly split into 4"):
        mgpu.split_data(data, num_slice=4, batch_axis=axis)


def test_words_of_gluon_for_devices(backend):
    class Context:      # mx.cpu(1) is one
        device_type, device_id = "cpu", 1
    X = np.ones((4, 2))
    for devices in (on(0, 1), [mgpu.cpu(0), Context()]):
        shards = mgpu.split_and_load(X, ctx_list=devices, batch_axis=1)
        assert [tuple(x.shape) for x in shards] == [(4, 1)] * 2
        replicas = mgpu.initialize(mlp(backend), ctx=devices, init="xavier")
        assert replicas.devices == on(0, 1)
        p = replicas.params()[0]
        assert p.list_ctx() == on(0, 1)
        with backend.scope(recording=False):
            p.data(ctx=devices[1])[...] = 7
        assert [bool((mgpu.to_numpy(x) == 7).all())
                for x in p.list_data()] == [False, True]
    assert mgpu.initialize(mlp(backend), ctx=mgpu.cpu(2), init="xavier"
                           ).devices == on(2)
    for wrong in ({}, {"ctx": on(0), "devices": on(0)}):
        with pytest.raises(TypeError, match="expected devices or ctx; "):
            mgpu.initialize(mlp(backend), **wrong)
    mgpu.waitall()


@BOTH
@pytest.mark.parametrize("bound", [0.5, 1e9])
def test_clip_global_norm_is_gluons(backend, bound):
    from mxnet import gluon
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(2, 3)), rng.normal(size=5)]
    with using_engine("mxnet-nd") as theirs:
        x = [theirs.put(a.astype("float32"), mgpu.cpu(0)) for a in data]
        norm = gluon.utils.clip_global_norm(x, bound)
        wanted = [a.asnumpy() for a in x]
    for check in (True, False):
        ours = [backend.put(a, mgpu.cpu(i)) for i, a in enumerate(data)]
        found = mgpu.clip_global_norm(ours, bound, check_isfinite=check)
        if not check:
            assert tuple(found.shape) == (1,)
            found = mgpu.to_numpy(found)[0]
        assert found == pytest.approx(norm, rel=1e-6)
        exact = np.sqrt(sum((a ** 2).sum() for a in data))
        assert found == pytest.approx(exact, rel=1e-15)
        for x, a, b in zip(ours, wanted, data):
            np.testing.assert_allclose(mgpu.to_numpy(x), a, rtol=1e-6)
            np.testing.assert_allclose(mgpu.to_numpy(x), b * min(
                1, bound / (exact + 1e-8)), rtol=1e-15)


def test_a_norm_that_is_not_finite_is_refused(backend):
    x = backend.put(np.array([1.0, np.inf]), mgpu.cpu(0))
    with pytest.raises(FloatingPointError, match="norm inf"):
        mgpu.clip_global_norm([x], 1.0)
    assert mgpu.to_numpy(x)[0] == 1.0
    for wrong, error in (([], ValueError), (x, TypeError), ([1.0], TypeError)):
        with pytest.raises(error):
            mgpu.clip_global_norm(wrong, 1.0)


@pytest.mark.parametrize("k", FEW)
def test_clipping_by_the_function_reaches_all_devices(backend, k):
    """As `Trainer.clip_global_norm`."""
    found = []
    for function in (False, True):
        replicas = initialize(backend, k)
        trainer = mgpu.Trainer(replicas, "sgd", OPTIONS)
        backward(replicas, *batch(8, 0))
        trainer.allreduce_grads()
        if function:
            mgpu.clip_global_norm([p.grad() for p in replicas.params()], 0.5)
        else:
            trainer.clip_global_norm(0.5)
        trainer.update(8)
        replicas.check_equal()
        found.append(values(replicas))
    assert_close(*found, 1e-300)


# -- names on Replicas --------------------------------------------------------

def test_collect_params_selects_by_paths(backend):
    replicas = mgpu.initialize(bn_net(backend), on(0, 1), "xavier")
    every = replicas.collect_params()
    assert list(every) == [p.name for p in replicas.all_parameters()]
    assert every["0.weight"] is replicas.params()[0]
    assert every.list_ctx() == on(0, 1)
    chosen = replicas.collect_params("0|.*gamma")
    assert list(chosen.keys()) == ["0.weight", "0.bias", "1.gamma"]
    assert [name for name, _ in chosen.items()] == list(chosen)
    for wrong in ("dense0_weight", "weight"):
        with pytest.raises(ValueError, match="matches none of .*'0.weight'"):
            replicas.collect_params(wrong)
    with pytest.raises(ValueError, match="select must be a regular"):
        replicas.collect_params("(")


@BOTH
@pytest.mark.parametrize("k", FEW)
def test_setattr_of_collected_parameters(backend, k):
    def setup(collect):
        collect(".*bias").setattr("lr_mult", 2.0)
        collect(".*weight").setattr("wd_mult", 0.5)
        collect("2.bias|dense.*1_bias").setattr("grad_req", "null")
    replicas = initialize(backend, k)
    trainer = mgpu.Trainer(replicas.collect_params(), "sgd", OPTIONS)
    setup(replicas.collect_params)
    train(replicas, trainer)

    def make(net):
        net.collect_params(".*bias").setattr("lr_mult", 2.0)
        net.collect_params(".*weight").setattr("wd_mult", 0.5)
        net[2].bias.grad_req = "null"
        return [real(net.collect_params(), "sgd", OPTIONS)]
    assert_close(values(replicas), gluons(make))
    with pytest.raises(AttributeError, match="received 'dtype'"):
        replicas.collect_params().setattr("dtype", "float16")
    with pytest.raises(ValueError, match="lr_mult must be a finite"):
        replicas.collect_params().setattr("lr_mult", None)


def test_zero_grad_of_some_parameters(backend):
    replicas = initialize(backend, 2)
    backward(replicas, *batch(8, 0))
    replicas.collect_params(".*bias").zero_grad()
    for p in replicas.params():
        zero = [not mgpu.to_numpy(g).any() for g in p.list_grad()]
        assert zero == [p.kind == "bias"] * 2, p.name


@BOTH
@pytest.mark.parametrize("k", FEW)
def test_files_of_parameters_are_gluons(backend, k, tmp_path):
    """Written on either engine, read by the real Gluon, and back."""
    file = str(tmp_path / "net.params")
    replicas = mgpu.initialize(bn_net(backend), on(*range(k)), "xavier",
                               seed=3)
    replicas.save_parameters(file)
    wanted = {p.name: mgpu.to_numpy(p.data())
              for p in replicas.all_parameters()
              if not p.name.endswith("tracked")}
    with using_engine("mxnet-nd") as theirs:
        net = bn_net(theirs)
        net.load_parameters(file)
        found = net._collect_params_with_prefix()
        assert {name: p.data().asnumpy().tolist()
                for name, p in found.items()} == {
                    name: x.tolist() for name, x in wanted.items()}
        for p in found.values():
            p.set_data(p.data() + 1)
        net.save_parameters(file)
    replicas.load_parameters(file, ctx=on(*range(k)))
    for p in replicas.all_parameters():
        for x in p.list_data() if p.name in wanted else ():
            np.testing.assert_array_equal(mgpu.to_numpy(x),
                                          wanted[p.name] + 1)


def test_what_a_file_of_parameters_lacks_or_has_besides(backend, tmp_path):
    from mgpu import gluon_io
    file = tmp_path / "part.params"
    replicas = mgpu.initialize(bn_net(backend), on(0, 1), "xavier", seed=3)
    before = replicas.export_numpy()
    gluon_io.save_params(file, {"arg:0.bias": np.full(4, 2, "float32"),
                                "5.weight": np.ones(2, "float32")})
    for options, text in (
            ({}, "unknown 5.weight"), ({"allow_missing": True}, "unknown 5"),
            ({"ignore_extra": True}, "missing 0.weight"),
            ({"ctx": on(0)}, "replicas stay on their devices"),
            ({"cast_dtype": True, "dtype_source": "saved"}, "'saved'")):
        with pytest.raises(ValueError, match=text):
            replicas.load_parameters(file, **options)
    assert_close(replicas.export_numpy(), before, 1e-300)
    replicas.load_parameters(file, allow_missing=True, ignore_extra=True)
    after = replicas.export_numpy()
    assert after.pop("0.bias").tolist() == [2.0] * 4
    del before["0.bias"]
    assert_close(after, before, 1e-300)
    gluon_io.save_params(file, {"0.bias": np.full(4, 1 / 3)})
    with pytest.raises(ValueError, match="float64 instead of float32"):
        replicas.load_parameters(file, allow_missing=True)
    replicas.load_parameters(file, allow_missing=True, cast_dtype=True)
    assert replicas.export_numpy()["0.bias"][0] == np.float32(1 / 3)


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="about MXNet")
@pytest.mark.parametrize("late", [False, True])
def test_hybridize_later_gives_the_same_bits(late):
    with mgpu.using_backend("mxnet") as backend:
        found = []
        for how in (None, "initialize", "later"):
            replicas = initialize(backend, 2, hybridize=how == "initialize")
            if how == "later" and not late:
                replicas.hybridize(static_alloc=True)
            trainer = mgpu.Trainer(replicas, "sgd", OPTIONS)
            train(replicas, trainer)
            if how == "later" and late:
                replicas.hybridize()
            assert replicas.net._active == (how is not None)
            train(replicas, trainer)
            found.append(values(replicas))
        replicas.hybridize(False)
        assert not replicas.net._active
        assert_close(found[1], found[0], 1e-300)
        assert_close(found[2], found[0], 1e-300)


def test_hybridize_is_the_option_of_initialize(backend):
    replicas = initialize(backend, 2, batch_norm="sync")
    with pytest.raises(ValueError, match="received hybridize.. with"):
        replicas.hybridize()
    with pytest.raises(TypeError, match="received .'fuse'."):
        replicas.hybridize(fuse=True)
    replicas.hybridize(False)


def test_names_of_a_block_say_what_mgpu_calls(backend):
    replicas = initialize(backend)
    p = replicas.params()[0]
    for thing, name, use in (
            (replicas, "reset_ctx", "mgpu.initialize(net, devices, force"),
            (replicas, "initialize", "mgpu.initialize(net, devices, force"),
            (replicas, "cast", "mgpu.initialize(net, devices, dtype=...)"),
            (replicas, "forward", "replicas(shards)"),
            (replicas, "apply", "replicas.net.apply(fn)"),
            (replicas, "summary", "repr(replicas)"),
            (replicas, "export", "replicas.net.export"),
            (replicas, "save_params", "Replicas.save_parameters"),
            (replicas[0], "collect_params", "Replicas.collect_params"),
            (replicas.collect_params(), "initialize", "mgpu.initialize("),
            (replicas.collect_params(), "save", "Replicas.save_parameters"),
            (p, "reset_ctx", "mgpu.initialize(net, devices, force"),
            (p, "cast", "mgpu.initialize(net, devices, dtype="),
            (p, "initialize", "mgpu.initialize("), (p, "var", "the network"),
            (p, "ctx", "Parameter.list_devices()")):
        with pytest.raises(AttributeError) as caught:
            getattr(thing, name)
        assert f"no attribute {name!r}. Use {use}" in str(caught.value)


@BOTH
def test_an_optimiser_object_is_that_of_one_trainer(backend):
    """Its updates are counted by one; a schedule may be any function."""
    mx = mgpu.mxnet_compat()
    optimizer = mx.optimizer.NAG(momentum=0.5,
                                 lr_scheduler=lambda n: 0.25 / n)
    replicas = mgpu.initialize(mlp(backend), on(0, 1), "xavier",
                               dtype="float64")
    first, second = (mgpu.Trainer(replicas.collect_params(f".*{name}"),
                                  optimizer) for name in ("weight", "bias"))
    assert first.learning_rate == 0.25
    X = np.ones((4, 6))
    with mgpu.record():
        losses = [out.sum() for out in replicas(
            mgpu.split_and_load(X, replicas.devices))]
    mgpu.backward(losses)
    first.step(4)
    before = values(replicas)
    with pytest.raises(ValueError, match="that of one Trainer"):
        second.step(4)
    assert_close(values(replicas), before, 1e-300)
    with pytest.raises(ValueError, match="after 1 updates|that of one"):
        mgpu.Trainer(replicas, optimizer)


# -- initialisers -------------------------------------------------------------

@BOTH
def test_an_initialiser_of_the_users_draws_alike_on_both_engines():
    mx = mgpu.mxnet_compat()
    names = []

    class Mine(mx.init.Initializer):
        def _init_weight(self, name, arr):
            names.append(str(name))
            arr[:] = mx.nd.random.normal(shape=arr.shape) + float(
                np.random.rand())

        def _init_bias(self, name, arr):
            raise AssertionError("Gluon asks for weights only")
    init, found = Mine(), []
    for engine in BACKENDS * 2:
        with mgpu.using_backend(engine) as backend:
            state = np.random.get_state()[1].tolist()
            replicas = mgpu.initialize(mlp(backend), on(0, 1), init, seed=5)
            replicas.check_equal()
            assert "drawn by Mine" in repr(replicas)
            assert np.random.get_state()[1].tolist() == state
            found.append(values(replicas))
    for other in found[1:]:
        assert_close(other, found[0], 1e-300)
    assert set(names) == {"0.weight", "2.weight"}
    assert not found[0]["0.bias"].any() and found[0]["0.weight"].std() > 0.5
    with mgpu.using_backend(BACKENDS[0]) as backend:
        other = values(mgpu.initialize(mlp(backend), on(0), Mine(), seed=6))
    assert (other["0.weight"] != found[0]["0.weight"]).any()


@BOTH
@pytest.mark.parametrize("kind", ["counts", "draws", "generates"])
def test_an_initialiser_that_remembers_is_refused(backend, kind):
    """Its values would depend on what it was called for before."""
    mx = mgpu.mxnet_compat()

    class Mine(mx.init.Initializer):
        def __init__(self):
            super().__init__()
            self.calls, self.stream = 0, np.random.RandomState(1)
            self.generator = np.random.default_rng(1)

        def _init_weight(self, name, arr):
            if kind == "counts":
                self.calls += 1
            elif kind == "draws":
                arr[:] = self.stream.rand(*arr.shape)
            else:
                arr[:] = self.generator.random(arr.shape)
    what = {"counts": "calls", "draws": "stream"}.get(kind, "generator")
    init = Mine()
    with pytest.raises(ValueError, match=f"whose call changes .'{what}"):
        mgpu.initialize(mlp(backend), on(0, 1), init)
    assert init.calls == 0


@BOTH
def test_values_of_an_initialiser_of_the_users_are_gluons(backend):
    """What depends on the name and the shape only, in float64."""
    mx = mgpu.mxnet_compat()

    class Mine(mx.init.Initializer):
        def _init_weight(self, name, arr):
            arr[:] = mx.nd.arange(arr.size).reshape(arr.shape) / 8 + 0.1
    with using_engine("mxnet-nd") as theirs:
        net = mlp(theirs)
        net.cast("float64")
        net.initialize(Mine())
        wanted = {name: p.data().asnumpy() for name, p
                  in net._collect_params_with_prefix().items()}
    replicas = mgpu.initialize(mlp(backend), on(0, 1), Mine(),
                               dtype="float64")
    assert_close(values(replicas), wanted, 1e-7)


@BOTH
def test_mixed_goes_by_the_names_of_weights(backend):
    """What the Module interface of MXNet draws: biases stay zeros there
    too. (Gluon's initialize takes no Mixed.)"""
    mx = mgpu.mxnet_compat()

    class Mine(mx.init.Initializer):
        def _init_weight(self, name, arr):
            arr[:] = 5
    init = mx.init.Mixed([".*bias", "0[.]", ".*"], [
        mx.init.One(), Mine(), mx.init.Constant(3)])
    found = values(mgpu.initialize(mlp(backend), on(0, 1), init))
    assert {name: set(x.ravel()) for name, x in found.items()} == {
        "0.weight": {5}, "0.bias": {0}, "2.weight": {3}, "2.bias": {0}}
    array = mx.nd.ones(3)
    init(mx.init.InitDesc("0.bias"), array)
    assert not array.asnumpy().any()


@BOTH
def test_initialisers_that_mean_nothing_here(backend):
    mx = mgpu.mxnet_compat()
    for wrong, text in (
            (mx.init.Load({}), "mx.init.Load either.*Replicas.load_param"),
            (mx.init.Mixed(["dense0.*", ".*"], [mx.init.One()] * 2),
             "received 'dense0.*', which matches none of .*'0.weight'"),
            (mx.init.Mixed(["0"], [mx.init.One()]), "received '2.weight' "
             "and .'0'.. Add"),
            (mx.init.FusedRNN(None, 2, 1, "lstm"), "unknown initialiser; "
             "received 'fusedrnn'")):
        with pytest.raises(ValueError, match=text):
            mgpu.initialize(mlp(backend), on(0), wrong)
    replicas = mgpu.initialize(mlp(backend), on(0), mx.init.Xavier(
        "gaussian", "in", 2))
    ours = mgpu.initialize(mlp(backend), on(0), mgpu.initializers.Xavier(
        "gaussian", "in", 2))
    assert_close(values(replicas), values(ours), 1e-300)


# -- MXNet's names for scripts ------------------------------------------------

@BOTH
@pytest.mark.parametrize("last", [None, "keep", "discard", "rollover"])
def test_a_data_loader_gives_gluons_batches(backend, last):
    """Three epochs, shuffled: what "rollover" leaves comes in the next."""
    gluon = mgpu.mxnet_compat().gluon
    X, y = np.arange(20.0).reshape(10, 2), np.arange(10)
    found = []
    for data in (gluon.data, names.gluon.data):
        np.random.seed(3)
        loader = data.DataLoader(
            data.ArrayDataset(X, y).transform(lambda x, label: (2 * x, label)),
            4, shuffle=True, last_batch=last)
        found.append([(len(loader), [[x.asnumpy() for x in batch]
                                     for batch in loader])
                      for _ in range(3)])
    assert [n for n, _ in found[0]] == [n for n, _ in found[1]]
    theirs, ours = ([x for _, epoch in run for batch in epoch for x in batch]
                    for run in found)
    assert len(theirs) == len(ours) > 10
    for a, b in zip(theirs, ours):
        assert np.array_equal(a, b) and a.shape == b.shape


def rows_of(x, devices):
    return np.asarray(x).view(names.HostArray).as_in_context(devices)


def test_rows_are_a_batch_on_all_contexts(backend, devices):
    x = np.arange(12.0).reshape(6, 2)
    rows = rows_of(x, devices)
    assert rows.shape == x.shape and len(rows) == 6
    assert rows.context == rows.ctx == devices
    assert np.array_equal(rows.asnumpy(), x)
    assert rows.as_in_ctx(devices) is rows
    for others in ([names.cpu(7)], [*devices, names.cpu(7)]):
        with pytest.raises(ValueError, match="stay on the devices"):
            rows.as_in_context(others)
    weights = np.array([1, 0, 2, 0.5, 1, 3])
    loss = names.gluon.loss.L2Loss()
    got = loss(rows, rows_of(x[::-1], devices),
               sample_weight=rows_of(weights[:, None], devices))
    assert np.allclose(got.asnumpy(), weights * [50, 18, 2, 2, 18, 50])
    got = names.gluon.loss.SigmoidBCELoss()(rows, rows, None, 2.0)
    assert got.shape == (6,)
    assert np.allclose(got.asnumpy(), np.concatenate([
        mgpu.to_numpy(mgpu.losses.SigmoidBCELoss(pos_weight=2.0)(one, one))
        for one in rows.shards if one is not None]))


def test_rows_for_fewer_rows_than_contexts(backend):
    devices = on(0, 1, 2)
    net = names.initialize(mlp(backend), "xavier", devices, dtype="float64")
    x, y = np.arange(6.0)[None] / 7, np.ones((1, 3))
    data, label = rows_of(x, devices), rows_of(y, devices)
    assert len(data) == 1 and (2 * data).shape == (1, 6)
    with names.autograd.record():
        output = net(data)
        loss = names.gluon.loss.L2Loss()(output, label)
    loss.backward()
    assert np.allclose(((output - label) ** 2).asnumpy().mean() / 2,
                       loss.asnumpy())
    metric = names.metric.Loss()
    metric.update(label, loss)
    assert metric.get()[1] == pytest.approx(loss.asnumpy()[0], 1e-15)


def test_what_stands_beside_rows_in_a_loss(backend, devices):
    """One row is the same for all; what may be of the rows is refused."""
    x = np.arange(1.0, 13).reshape(4, 3) / 10
    rows, loss = rows_of(x, devices), names.gluon.loss.SigmoidBCELoss()
    factors = np.array([[1.0, 2, 3]])
    expected = mgpu.losses.SigmoidBCELoss()(
        *[mgpu.put(x, devices[0])] * 2, None, factors)
    for found in (loss(rows, rows, None, factors),
                  loss(rows, rows, pos_weight=factors)):
        assert np.allclose(found.asnumpy(), mgpu.to_numpy(expected), 1e-13)
    for wrong in (factors[0], x, x[:, :1], mgpu.put(x, devices[0]),
                  [1.0] * len(devices)):
        with pytest.raises(TypeError, match="of one row"):
            loss(rows, rows, None, wrong)
        with pytest.raises(TypeError, match="of one row"):
            loss(rows, rows, sample_weight=wrong)
    assert type(rows.asnumpy()) is np.ndarray
    host = x.view(names.HostArray)
    for number in (host.sum(), host.mean(), host.max(), (2 * host).sum()):
        assert isinstance(number, float)
    assert type(host + 1) is names.HostArray
    copied = host.asnumpy()
    copied[:] = 0
    assert type(copied) is np.ndarray and host.all()


def test_rows_compute_as_one_array(backend, devices):
    """Sums of losses, their gradients and metrics are those of the batch."""
    x, y = np.arange(1.0, 7), np.array([3.0, 1, 4, 1, 5, 9])
    a, b = rows_of(x, devices), rows_of(y, devices)
    for ours, theirs in (
            (a + b, x + y), (a - 2, x - 2), (2 - a, 2 - x), (a * b, x * y),
            (np.float64(3) * a, 3 * x), (a / b, x / y), (1 / a, 1 / x),
            (a ** 2, x ** 2), (-a, -x)):
        assert np.allclose(ours.asnumpy(), theirs)
    metric = names.metric.Loss()
    metric.update(None, a + 2 * b)
    assert metric.get()[1] == pytest.approx((x + 2 * y).mean(), 1e-15)
    for wrong in (np.ones(6), [1, 2], None):
        with pytest.raises(TypeError, match="as_in_context"):
            a + wrong
    for wrong in (y[:5], y[:, None]):
        with pytest.raises(ValueError, match="as many axes"):
            a * rows_of(wrong, devices)
    for wrong in (bool, list, lambda rows: rows[0], lambda rows: rows == b,
                  lambda rows: 2 > rows):
        with pytest.raises(TypeError, match="asnumpy"):
            wrong(a)
    whole = rows_of(np.arange(6), devices)
    for wrong in (lambda: whole / 2, lambda: a + whole):
        with pytest.raises(TypeError, match="compute in floats"):
            wrong()


@BOTH
def test_a_data_set_takes_native_arrays_too(backend):
    x = np.arange(12.0).reshape(6, 2)
    data = names.gluon.data.ArrayDataset(mgpu.put(x, names.cpu(0)), x[:, 0])
    first, second = names.gluon.data.DataLoader(data, 4)
    assert np.array_equal(np.concatenate([first[0], second[0]]), x)


def two_outputs(backend, wrap):
    """A network that gives an output, and `wrap` of it."""
    if backend.name == "mxnet":
        from mxnet.gluon import nn
        layer = nn.HybridSequential
    else:
        from torch import nn
        layer = nn.Module

    class Two(layer):
        def __init__(self):
            super().__init__()
            self.own = mlp(backend)

        def forward(self, x):
            out = self.own(x)
            return out, wrap(x, out)
    return Two()


def test_outputs_of_a_network_are_rows_each(backend, devices):
    net = names.initialize(two_outputs(backend, lambda x, out: x * 2), None,
                           devices, dtype="float64")
    x = np.arange(36.0).reshape(6, 6)
    out, twice = net(rows_of(x, devices))
    assert out.shape == (6, 3) and np.array_equal(twice.asnumpy(), 2 * x)
    loss = names.gluon.loss.L2Loss()(twice, rows_of(x, devices))
    assert np.allclose(loss.asnumpy(), (x ** 2).mean(1) / 2)


def test_outputs_without_rows_are_refused(backend, devices):
    """Else a value for each context would be taken for a row."""
    x = rows_of(np.arange(72.0).reshape(12, 6), devices)
    for wrap in (lambda x, out: out.sum().reshape((1,)),
                 lambda x, out: [out, out.reshape((1, -1, 3))]):
        net = names.initialize(two_outputs(backend, wrap), None, devices,
                               dtype="float64")
        with pytest.raises(TypeError, match="a row for each row.*data.shards"):
            net(x)
        assert len(net(x.shards)) == len(devices)
    net = names.initialize(
        two_outputs(backend, lambda x, out: [out, out * 2]), None, devices,
        dtype="float64")
    _, (one, twice) = net(x)
    assert np.array_equal(2 * one.asnumpy(), twice.asnumpy())


@pytest.mark.parametrize("size", [len, lambda rows: rows.shape[0]])
def test_a_script_with_rows_has_the_step_of_one_array(backend, devices, size):
    X, y = np.arange(42.0).reshape(7, 6) / 50, np.arange(7) % 3
    found = []
    for context in (on(0), devices):
        np.random.seed(5)
        net = names.initialize(mlp(backend), names.init.Xavier(),
                               context if len(context) > 1 else context[0],
                               dtype="float64")
        trainer = names.gluon.Trainer(net.collect_params(), "sgd",
                                      {"learning_rate": 0.5})
        losses = names.gluon.loss.SoftmaxCrossEntropyLoss(), \
            names.gluon.loss.L2Loss()
        for _ in range(2):
            data, label = rows_of(X, context), rows_of(y, context)
            with names.autograd.record():
                output = net(data)
                loss = losses[0](output, label) + 2 * losses[1](output, output)
            if len(found):
                loss.backward()
            else:
                names.autograd.backward([loss])
            trainer.step(size(data))
        found.append(values(net))
    assert_close(*found, 1e-12)


@pytest.mark.parametrize(("thing", "name", "use"), [
    (lambda: names.gluon, "nn", "mxnet.gluon or torch.nn"),
    (lambda: names.nd, "array", "NumPy arrays"),
    (lambda: names.autograd, "grad", "mgpu.grad"),
    (lambda: names, "np", "NumPy on the host"),
    (lambda: names.metric, "RMSE", "Replicas.predict"),
    (lambda: names.optimizer, "SGD", "gluon.Trainer"),
    (lambda: names.gluon.loss, "Loss", "a function of output and label"),
    (lambda: names.Rows([], []), "sum", "a step divides by the rows"),
    (lambda: names.gluon.data, "vision", "mgpu.datasets")])
def test_a_name_of_mxnet_without_a_meaning_names_the_word(thing, name, use):
    with pytest.raises(AttributeError, match=use):
        getattr(thing(), name)
