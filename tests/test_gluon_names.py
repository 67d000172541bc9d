"""What users of Gluon type, on both backends, against the real Gluon.

The network has known inputs and is in float64; numbers are dyadic, which
MXNet's float32 scalars hold exactly, so 1e-12 excludes any other formula
(1e-6 where Gluon's kernel takes a rate that it has computed).
"""
import gc
import itertools
import re
import sys

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import assert_bit_equal, mlp, on, using_engine
from mgpu.compat import mxnet as names
from nets import dense_norm
from steps import (DYADIC, assert_close, assert_unchanged, backward, batch,
                   double_states, gradients, initialize, train,
                   trained_by_gluon, values)

if "mxnet" in BACKENDS:
    mgpu.mxnet_compat()         # what it sets is no test's

BOTH = pytest.mark.skipif({"mxnet", "torch"} - set(BACKENDS) != set(),
                          reason="compares with the real Gluon")


def real(*arguments, **options):
    from mxnet import gluon
    return gluon.Trainer(*arguments, **options)


# -- the first argument of a Trainer ------------------------------------------

OPTIONS = {"learning_rate": 0.125, "momentum": 0.5, "wd": 0.25}


def native(replicas, pattern=None):
    """What a user of the framework would pass."""
    net = replicas.net
    if replicas.backend.name == "mxnet":
        return net.collect_params(pattern)
    chosen = [x for name, x in net.named_parameters()
              if pattern is None or re.match(pattern, name)]
    return iter(chosen) if pattern is None else chosen


def test_what_is_not_scaled(backend):
    """Whole numbers would be cut; a norm that is not finite says nothing.
    What came before them is not scaled."""
    x, infinite = (mgpu.put(np.full(3, v), mgpu.cpu(0)) for v in (5.0, np.inf))
    whole, none = (mgpu.put(a, mgpu.cpu(0)) for a in (
        np.arange(4), np.ones((0, 2))))
    for arrays, error, text in (
            ([x, whole], TypeError, "received .*int64"),
            ([x, infinite], FloatingPointError, "norm inf"),
            ([none], ValueError, "received none"), ([], ValueError, ""),
            (x, TypeError, ""), ([1.0], TypeError, "")):
        with pytest.raises(error, match=text):
            mgpu.clip_global_norm(arrays, 1.0)
    assert (mgpu.to_numpy(x) == 5).all()
    assert mgpu.to_numpy(whole).tolist() == [0, 1, 2, 3]


@BOTH
@pytest.mark.parametrize("pattern", [None, ".*weight"])
def test_a_trainer_of_parameters_moves_these(engine, devices, pattern):
    replicas = initialize(mlp(engine), devices)
    train(replicas, mgpu.Trainer(native(replicas, pattern), "sgd", OPTIONS),
          DYADIC)
    replicas.check_equal()
    assert_close(values(replicas), trained_by_gluon(lambda net: [
        real(net.collect_params(pattern), "sgd", OPTIONS)]))


@BOTH
@pytest.mark.parametrize("alternate", [False, True])
def test_two_trainers_share_a_batch_or_take_turns(backend, devices,
                                                  alternate):
    replicas = initialize(mlp(backend), devices)
    ours = [mgpu.Trainer(native(replicas, f".*{kind}"), name, OPTIONS)
            for kind, name in (("weight", "nag"), ("bias", "sgd"))]

    def steps(i):
        return [i % 2] if alternate else [0, 1]
    for i, rows in enumerate(DYADIC):
        backward(replicas, *batch(rows, i))
        for number in steps(i):
            ours[number].step(rows)
    replicas.check_equal()
    assert_close(values(replicas), trained_by_gluon(lambda net: [
        real(net.collect_params(".*weight"), "nag", OPTIONS),
        real(net.collect_params(".*bias"), "sgd", OPTIONS)], steps=steps))


@pytest.mark.parametrize("batch_norm", ["per_device", "average", "sync"])
def test_two_trainers_with_batch_norm_are_one(backend, batch_norm):
    """After both the statistics are those that one trainer leaves."""
    found = []
    for split in (False, True):
        replicas = initialize(bn_net(backend), on(0, 1), batch_norm=batch_norm)
        names = [p.name for p in replicas.params()]
        trainers = [mgpu.Trainer(
            [p for p in replicas.params() if p.name in part], "sgd", OPTIONS)
            for part in ([names] if not split else [names[:2], names[2:]])]
        for i in range(2):
            backward(replicas, *batch(8, i))
            for trainer in trainers:
                trainer.step(8)
        found.append(replicas.export_numpy(all_devices=True))
    for name, wanted in found[0].items():
        np.testing.assert_array_equal(found[1][name], wanted)


def bn_net(backend):
    return dense_norm(backend.name, columns=6)


def test_a_step_of_some_leaves_no_gradient_of_theirs_to_a_later_batch(
        backend):
    """A device without rows in the next batch adds nothing of the last."""
    replicas = initialize(mlp(backend), on(0, 1))
    weights, biases = (mgpu.Trainer(native(replicas, f".*{kind}"), "sgd",
                                    {"learning_rate": 0.125})
                       for kind in ("weight", "bias"))
    backward(replicas, *batch(8, 0))
    weights.step(8)
    backward(replicas, *batch(1, 1))        # on the first device only
    grads, before = gradients(replicas), values(replicas)
    biases.step(1)
    for name, now in values(replicas).items():
        moved = 0.125 * grads[name][0] if name.endswith("bias") else 0
        np.testing.assert_allclose(now[1], before[name][1] - moved,
                                   rtol=1e-13)


def test_a_trainer_finds_no_network(backend):
    replicas, other = initialize(mlp(backend), on(0)), mlp(backend)
    if backend.name == "mxnet":
        other.initialize()
    every = list(native(replicas).values() if backend.name == "mxnet"
                 else native(replicas))
    theirs = list(other.collect_params().values()
                  if backend.name == "mxnet" else other.parameters())
    for wrong, error, text in (
            (theirs, ValueError, "4 parameters of none"),
            (every + theirs, ValueError, "trains one network.* received 4 "
             "of 8"), ([], ValueError, "0 parameters of none"),
            (every[:1] * 2, ValueError, "more than once"),
            ([{"params": every}], TypeError, "groups are not supported"),
            (replicas.net, TypeError, "a Trainer expects the Replicas")):
        with pytest.raises(error, match=text):
            mgpu.Trainer(wrong, "sgd")
    assert mgpu.Trainer(replicas.params()[:2], "sgd").replicas is replicas
    net = replicas.net          # which keeps them
    del replicas
    gc.collect()
    assert mgpu.Trainer(every, "sgd").replicas.net is net


# -- its other arguments ------------------------------------------------------

@BOTH
def test_stores_change_nothing(backend):
    wanted = trained_by_gluon(lambda net: [
        real(net.collect_params(), "sgd", OPTIONS)])
    for options in ({"kvstore": None},
                    {"kvstore": "local", "update_on_kvstore": True},
                    {"kvstore": "device", "update_on_kvstore": False}):
        replicas = initialize(mlp(backend), on(0, 1))
        train(replicas, mgpu.Trainer(replicas, "sgd", OPTIONS, **options),
              DYADIC)
        assert_close(values(replicas), wanted)


def test_what_would_be_another_number_is_refused(backend):
    for options, text in (
            ({"kvstore": "dist_sync"}, "mgpu launch"),
            ({"kvstore": "nccl"}, "allreduce= .on GPUs 'native'"),
            ({"kvstore": "postal"}, "unknown kvstore; received 'postal'"),
            ({"semantics": "device"}, "unknown semantics"),
            ({"compression_params": {"type": "2bit"}}, "are not supported"),
            ({"optimizer_params": {"rescale_grad": 0}},
             "rescale_grad must be"),
            ({"optimizer_params": {"begin_num_update": 3}}, "no option "
             "'begin_num_update'"),
            ({"optimizer_params": {"rescale_grad": 2.0}, "semantics":
              "torch"}, "no option 'rescale_grad'"),
            ({"optimizer_params": {"multi_precision": True}},
             "not supported for weights in reduced precision")):
        dtype = "float16" if "reduced" in text else "float64"
        replicas = mgpu.initialize(mlp(backend), on(0), "xavier", dtype=dtype)
        with pytest.raises(ValueError, match=text):
            mgpu.Trainer(replicas, "sgd", **options)


@BOTH
def test_rescale_grad_multiplies(engine, devices):
    options = {**OPTIONS, "rescale_grad": 0.25, "clip_gradient": 2.0 ** -6,
               "multi_precision": True, "lazy_update": True}
    replicas = initialize(mlp(engine), devices)
    train(replicas, mgpu.Trainer(replicas, "sgd", options), DYADIC)
    assert_close(values(replicas), trained_by_gluon(lambda net: [
        real(net.collect_params(), "sgd", options)]))


def test_the_norm_that_is_clipped_is_that_of_what_is_applied(backend):
    replicas = initialize(mlp(backend), on(0, 1))
    trainer = mgpu.Trainer(replicas, "sgd", {"rescale_grad": 0.25})
    backward(replicas, *batch(8, 0))
    trainer.allreduce_grads()
    whole = trainer.clip_global_norm(1e9)
    assert trainer.clip_global_norm(1e9, 8) == pytest.approx(
        whole / 8 * 0.25, rel=1e-14)


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
@pytest.mark.parametrize("kind", SCHEDULES)
def test_rates_of_a_schedule_in_optimizer_params(kind):
    """All optimizers: the real Trainer's rates, from MXNet's schedules and
    from mgpu's, whoever says the base rate."""
    mx = mgpu.mxnet_compat()
    name, options = SCHEDULES[kind]
    with mgpu.using_backend("mxnet") as backend:
        net = initialize(mlp(backend), on(0)).net
    # How they turn numbers into rates depends on the schedule alone.
    for family, given in itertools.product(
            FAMILIES if kind == "factor" else ("sgd", "adam", "ftrl"),
            ({}, {"learning_rate": 0.125})):
        theirs = real(net.collect_params(), family, {
            **given, "lr_scheduler": getattr(mx.lr_scheduler, name)(
                **options)})
        wanted = []
        for number in range(1, 7):
            theirs.optimizer.num_update = number
            wanted.append(theirs.learning_rate)
        for engine in BACKENDS:
            with mgpu.using_backend(engine) as backend:
                replicas = initialize(mlp(backend), on(0))
                for module in (mx.lr_scheduler, mgpu.lr_scheduler):
                    schedule = getattr(module, name)(**options)
                    trainer = mgpu.Trainer(replicas, family, {
                        **given, "lr_scheduler": schedule})
                    assert [trainer.rate(n) for n in range(1, 7)] \
                        == pytest.approx(wanted, rel=1e-14), family


#: its defaults are rounded to float32 there
ADAM = ({"beta1": 0.5, "beta2": 0.75, "epsilon": 2.0 ** -10}, {})


@BOTH
@pytest.mark.parametrize("kind", ["sgd", "adam", "object"])
def test_steps_under_a_schedule_of_mxnets(backend, kind):
    mx = mgpu.mxnet_compat()

    def made():
        schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.25)
        if kind == "object":
            return [mx.optimizer.Adam(**ADAM[0], lr_scheduler=schedule)]
        return kind, {**ADAM[kind == "sgd"], "lr_scheduler": schedule}
    replicas = initialize(mlp(backend), on(0, 1))
    trainer = mgpu.Trainer(replicas, *made())
    train(replicas, trainer, DYADIC)
    # (Adam has a rate of its own, which goes before the schedule's.)
    assert trainer.learning_rate == (0.25 if kind == "sgd" else 0.001) / 4
    assert_close(values(replicas), trained_by_gluon(lambda net: [real(
        net.collect_params(), *made())]), 1e-12 if kind == "sgd" else 1e-6)


# -- objects of MXNet's -------------------------------------------------------

#: by what they remember: an array, two, three, and None with an array
OBJECTS = {
    "SGD": dict(learning_rate=0.125, momentum=0.5, wd=0.25,
                clip_gradient=2.0 ** -4, rescale_grad=0.5),
    "Adam": dict(learning_rate=0.125, beta1=0.5, beta2=0.75,
                 epsilon=2.0 ** -10),
    "Nadam": dict(learning_rate=0.125, beta1=0.5, beta2=0.75,
                  epsilon=2.0 ** -10, schedule_decay=0.5),
    "RMSProp": dict(learning_rate=2.0 ** -6, gamma1=0.75, gamma2=0.5,
                    epsilon=2.0 ** -10, centered=True),
    "LAMB": dict(learning_rate=0.125, beta1=0.5, beta2=0.75,
                 epsilon=2.0 ** -10, upper_bound=2.0),
    "LARS": dict(learning_rate=0.125, eta=0.5, wd=0.25, momentum=0.5,
                 momentum_correction=False),
    "DCASGD": dict(learning_rate=0.125, lamda=0.5),
}


@BOTH
@pytest.mark.parametrize("name", OBJECTS)
def test_an_mxnet_optimizer_object(name):
    """Step by step the real Trainer with such an object, whose rate and
    decay the program changes in between."""
    mx = mgpu.mxnet_compat()

    def made():
        return getattr(mx.optimizer, name)(**OBJECTS[name])

    def change(optimizer, trainer, i):
        if i == 1:
            optimizer.wd = 0.5
            trainer.set_learning_rate(0.0625)
            assert optimizer.lr == trainer.learning_rate == 0.0625
    theirs, kept = made(), []

    def make(net):
        kept.append(real(net.collect_params(), theirs))
        return kept
    wanted = trained_by_gluon(make, lambda i: change(theirs, kept[0], i))
    for engine in BACKENDS:
        with mgpu.using_backend(engine) as backend, double_states():
            replicas, ours = initialize(mlp(backend), on(0, 1)), made()
            trainer = mgpu.Trainer(replicas, ours)
            for i, rows in enumerate(DYADIC):
                train(replicas, trainer, [rows], i)
                change(ours, trainer, i)
            assert_close(values(replicas), wanted, 1e-12)
            assert ours.num_update == len(DYADIC)
            assert ours.rescale_grad == OBJECTS[name].get("rescale_grad", 1.0)


@BOTH
def test_any_optimiser_object_of_mxnets_and_multipliers_steps_and_resumes(
        tmp_path):
    """A user-defined class, and factors of rates and decays; a schedule that
    counts; then from a file."""
    mx = mgpu.mxnet_compat()

    class Mine(mx.optimizer.Optimizer):
        def create_state(self, index, weight):
            return mx.nd.zeros(weight.shape, weight.context, weight.dtype)

        def update(self, index, weight, grad, state):
            self._update_count(index)
            lr, wd = self._get_lr(index), self._get_wd(index)
            state[:] = 0.5 * state + grad * self.rescale_grad + wd * weight
            weight[:] = weight - lr * mx.nd.sign(state) * state ** 2

    def made():
        return Mine(learning_rate=0.25, wd=0.125, begin_num_update=2,
                    lr_scheduler=mx.lr_scheduler.FactorScheduler(2, 0.5))

    def theirs(net):
        parameters = net.collect_params()
        for name, p in parameters.items():
            p.lr_mult = 2.0 if name.endswith("bias") else 1.0
        return [real(parameters, made())]
    wanted = trained_by_gluon(theirs)
    for engine in BACKENDS:
        with mgpu.using_backend(engine) as backend:
            def begin():
                replicas = initialize(mlp(backend), on(0, 1))
                return replicas, mgpu.Trainer(replicas, made(), lr_mult={
                    p.name: 2.0 for p in replicas.params()
                    if p.name.endswith("bias")})
            replicas, trainer = begin()
            for i, rows in enumerate(DYADIC):
                if i == 2:
                    mgpu.save_checkpoint(tmp_path / engine, replicas, trainer)
                    replicas, trainer = begin()
                    mgpu.load_checkpoint(tmp_path / engine, replicas, trainer)
                train(replicas, trainer, [rows], i)
            assert_close(values(replicas), wanted, 1e-12)


@BOTH
def test_a_wrong_scale_of_an_object_is_refused(backend):
    mx = mgpu.mxnet_compat()
    with pytest.raises(ValueError, match="rescale_grad must be"):
        mgpu.Trainer(initialize(mlp(backend), on(0)),
                     mx.optimizer.SGD(rescale_grad=0.0))


# -- functions ----------------------------------------------------------------

@BOTH
def test_split_data_is_gluons(backend):
    from mxnet import gluon
    data = np.arange(54.0).reshape(6, 9)
    for axis, (parts, even) in itertools.product((0, 1), (
            (3, True), (4, False))):
        with using_engine("mxnet-nd") as theirs:
            wanted = [part.asnumpy().tolist() for part in
                      gluon.utils.split_data(theirs.put(data, mgpu.cpu(0)),
                                             parts, axis, even)]
        for x in (data, backend.put(data, mgpu.cpu(0))):
            assert [np.asarray(part).tolist() if x is data else
                    mgpu.to_numpy(part).tolist() for part in
                    mgpu.split_data(x, parts, axis, even)] == wanted
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
            p.data(ctx=devices[0])[...] = 7
        assert (mgpu.to_numpy(p.data(ctx=devices[1])) == 7).all()
    assert mgpu.initialize(mlp(backend), ctx=mgpu.cpu(2), init="xavier"
                           ).devices == on(2)
    for wrong in ({}, {"ctx": on(0), "devices": on(0)}):
        with pytest.raises(TypeError, match="expected devices or ctx; "):
            mgpu.initialize(mlp(backend), **wrong)
    mgpu.waitall()


@BOTH
def test_clip_global_norm_is_gluons(backend):
    from mxnet import gluon
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(2, 3)), rng.normal(size=5), np.ones((0, 2))]
    exact = np.sqrt(sum((a ** 2).sum() for a in data))
    for bound, check in itertools.product((0.5, 1e9), (True, False)):
        with using_engine("mxnet-nd") as theirs:
            x = [theirs.put(a.astype("float32"), mgpu.cpu(0))
                 for a in data[:2]]
            norm = gluon.utils.clip_global_norm(x, bound)
            wanted = [a.asnumpy() for a in x]
        ours = [backend.put(a, mgpu.cpu(i)) for i, a in enumerate(data)]
        found = mgpu.clip_global_norm(ours, bound, check_isfinite=check)
        if not check:
            assert tuple(found.shape) == (1,)
            found = mgpu.to_numpy(found)[0]
        assert found == pytest.approx(norm, rel=1e-6)
        assert found == pytest.approx(exact, rel=1e-15)
        for x, a, b in zip(ours, wanted, data):
            np.testing.assert_allclose(mgpu.to_numpy(x), a, rtol=1e-6)
            np.testing.assert_allclose(mgpu.to_numpy(x), b * min(
                1, bound / (exact + 1e-8)), rtol=1e-15)


# -- names on Replicas --------------------------------------------------------

def test_collect_params_selects_by_paths(backend):
    replicas = initialize(bn_net(backend), on(0, 1))
    every = replicas.collect_params()
    assert list(every) == [p.name for p in replicas.all_parameters()]
    assert every["0.weight"] is replicas.params()[0]
    assert every.list_ctx() == on(0, 1)
    chosen = replicas.collect_params("0|.*gamma")
    assert list(chosen.keys()) == ["0.weight", "0.bias", "1.gamma"]
    assert [name for name, _ in chosen.items()] == list(chosen)


@BOTH
def test_setattr_of_collected_parameters(backend, devices):
    replicas = initialize(mlp(backend), devices)
    trainer = mgpu.Trainer(replicas.collect_params(), "sgd", OPTIONS)
    replicas.collect_params(".*bias").setattr("lr_mult", 2.0)
    replicas.collect_params(".*weight").setattr("wd_mult", 0.5)
    replicas.collect_params("2.bias").setattr("grad_req", "null")
    train(replicas, trainer, DYADIC)

    def make(net):
        net.collect_params(".*bias").setattr("lr_mult", 2.0)
        net.collect_params(".*weight").setattr("wd_mult", 0.5)
        net[2].bias.grad_req = "null"
        return [real(net.collect_params(), "sgd", OPTIONS)]
    assert_close(values(replicas), trained_by_gluon(make))


def test_wrong_calls_of_collected_parameters(backend):
    replicas = initialize(bn_net(backend), on(0, 1))
    for wrong, text in (
            ("dense0_weight", "matches none of .*'0.weight'"),
            ("weight", "matches none of .*'0.weight'")):
        with pytest.raises(ValueError, match=text):
            replicas.collect_params(wrong)
    with pytest.raises(AttributeError, match="received 'dtype'"):
        replicas.collect_params().setattr("dtype", "float16")
    with pytest.raises(ValueError, match="lr_mult must be a finite"):
        replicas.collect_params().setattr("lr_mult", None)


def test_zero_grad_of_some_parameters(backend):
    replicas = initialize(mlp(backend), on(0, 1))
    backward(replicas, *batch(8, 0))
    replicas.collect_params(".*bias").zero_grad()
    for p in replicas.params():
        zero = [not mgpu.to_numpy(g).any() for g in p.list_grad()]
        assert zero == [p.kind == "bias"] * 2, p.name


@BOTH
def test_files_of_parameters_are_gluons(backend, devices, tmp_path):
    """Written on either backend, read by the real Gluon, and back."""
    file = str(tmp_path / "net.params")
    replicas = mgpu.initialize(bn_net(backend), devices, "xavier", seed=3)
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
    replicas.load_parameters(file, ctx=devices)
    for p in replicas.all_parameters():
        for x in p.list_data() if p.name in wanted else ():
            np.testing.assert_array_equal(mgpu.to_numpy(x),
                                          wanted[p.name] + 1)


def test_what_a_file_of_parameters_lacks_or_has_besides(backend, tmp_path):
    from mgpu import gluon_io
    file = tmp_path / "part.params"
    replicas = mgpu.initialize(bn_net(backend), on(0, 1), "xavier", seed=3)
    before = replicas.export_numpy()
    gluon_io.save_params(file, {"arg:0.bias": np.full(8, 2, "float32"),
                                "5.weight": np.ones(2, "float32")})
    for options, text in (
            ({}, "unknown 5.weight"), ({"allow_missing": True}, "unknown 5"),
            ({"ignore_extra": True}, "missing 0.weight"),
            ({"ctx": on(0)}, "replicas stay on their devices"),
            ({"cast_dtype": True, "dtype_source": "saved"}, "'saved'")):
        with pytest.raises(ValueError, match=text):
            replicas.load_parameters(file, **options)
    for name, x in replicas.export_numpy().items():
        assert_bit_equal(x, before[name])
    replicas.load_parameters(file, allow_missing=True, ignore_extra=True)
    for name, x in replicas.export_numpy().items():
        assert_bit_equal(x, np.full(8, 2, "float32") if name == "0.bias"
                         else before[name])
    gluon_io.save_params(file, {"0.bias": np.full(8, 1 / 3)})
    with pytest.raises(ValueError, match="float64 instead of float32"):
        replicas.load_parameters(file, allow_missing=True)
    replicas.load_parameters(file, allow_missing=True, cast_dtype=True)
    assert replicas.export_numpy()["0.bias"][0] == np.float32(1 / 3)


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="about MXNet")
@pytest.mark.parametrize("late", [False, True])
def test_hybridize_later_gives_the_same_bits(late):
    found = []
    for how in (None, "initialize", "later"):
        with mgpu.using_backend("mxnet") as backend:
            replicas = initialize(mlp(backend), on(0, 1),
                                  hybridize=how == "initialize")
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
    assert_unchanged(found[1], found[0])
    assert_unchanged(found[2], found[0])


def test_hybridize_is_the_option_of_initialize(backend):
    replicas = initialize(mlp(backend), on(0, 1), batch_norm="sync")
    with pytest.raises(ValueError, match="'sync' does not support hybridize"):
        replicas.hybridize()
    replicas.hybridize(False)


def test_names_of_a_block_say_what_mgpu_calls(backend):
    replicas = initialize(mlp(backend), on(0))
    for thing, name, use in (
            (replicas, "cast", "mgpu.initialize(net, devices, dtype=...)"),
            (replicas, "forward", "replicas(shards)"),
            (replicas, "apply", "replicas.net.apply"),
            (replicas[0], "collect_params", "Replicas.collect_params")):
        with pytest.raises(AttributeError) as caught:
            getattr(thing, name)
        assert f"no attribute {name!r}. Use {use}" in str(caught.value)


# -- initializers -------------------------------------------------------------

@BOTH
def test_a_user_defined_initializer_is_equal_on_both_backends():
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
        assert_unchanged(other, found[0])
    assert set(names) == {"0.weight", "2.weight"}
    assert not found[0]["0.bias"][0].any()
    assert found[0]["0.weight"][0].std() > 0.5
    with mgpu.using_backend(BACKENDS[0]) as backend:
        other = values(mgpu.initialize(mlp(backend), on(0), Mine(), seed=6))
    assert (other["0.weight"][0] != found[0]["0.weight"][0]).any()


@BOTH
def test_an_initializer_that_remembers_is_refused(backend):
    """Its values would depend on what it was called for before."""
    mx = mgpu.mxnet_compat()

    class Mine(mx.init.Initializer):
        def __init__(self, kind):
            super().__init__()
            self.kind, self.calls = kind, 0
            self.stream = np.random.RandomState(1)

        def _init_weight(self, name, arr):
            if self.kind == "calls":
                self.calls += 1
            else:
                arr[:] = self.stream.rand(*arr.shape)
    for kind in ("calls", "stream"):
        init = Mine(kind)
        with pytest.raises(ValueError, match=f"whose call changes .'{kind}"):
            mgpu.initialize(mlp(backend), on(0, 1), init)
        assert init.calls == 0


@BOTH
def test_values_of_an_initializer_of_the_users_are_gluons(backend):
    """What depends on the name and the shape only, in float64."""
    mx = mgpu.mxnet_compat()

    class Mine(mx.init.Initializer):
        def _init_weight(self, name, arr):
            arr[:] = mx.nd.arange(arr.size).reshape(arr.shape) / 8 + 0.1
    with using_engine("mxnet-nd") as theirs:
        net = mlp(theirs)
        net.cast("float64")
        net.initialize(Mine())
        wanted = {name: [p.data().asnumpy()] for name, p
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
    assert {name: set(x[0].ravel()) for name, x in found.items()} == {
        "0.weight": {5}, "0.bias": {0}, "2.weight": {3}, "2.bias": {0}}
    array = mx.nd.ones(3)
    init(mx.init.InitDesc("0.bias"), array)
    assert not array.asnumpy().any()


@BOTH
def test_initializers_that_mean_nothing_here(backend):
    mx = mgpu.mxnet_compat()
    for wrong, text in (
            (mx.init.Load({}), "Load is not supported.*Replicas.load_param"),
            (mx.init.Mixed(["dense0.*", ".*"], [mx.init.One()] * 2),
             "received 'dense0.*', which matches none of .*'0.weight'"),
            (mx.init.Mixed(["0"], [mx.init.One()]), "received '2.weight' "
             "and .'0'.. Add"),
            (mx.init.FusedRNN(None, 2, 1, "lstm"), "unknown initializer; "
             "received 'fusedrnn'")):
        with pytest.raises(ValueError, match=text):
            mgpu.initialize(mlp(backend), on(0), wrong)
    replicas = mgpu.initialize(mlp(backend), on(0), mx.init.Xavier(
        "gaussian", "in", 2))
    ours = mgpu.initialize(mlp(backend), on(0), mgpu.initializers.Xavier(
        "gaussian", "in", 2))
    assert_unchanged(values(replicas), values(ours))


# -- MXNet's names for scripts ------------------------------------------------

@BOTH
def test_a_data_loader_gives_gluons_batches():
    """Three epochs, shuffled: what "rollover" leaves comes in the next."""
    gluon = mgpu.mxnet_compat().gluon
    X, y = np.arange(20.0).reshape(10, 2), np.arange(10)
    for last in (None, "keep", "discard", "rollover"):
        found = []
        for data in (gluon.data, names.gluon.data):
            np.random.seed(3)
            loader = data.DataLoader(data.ArrayDataset(X, y).transform(
                lambda x, label: (2 * x, label)), 4, shuffle=True,
                last_batch=last)
            found.append([(len(loader), [[x.asnumpy() for x in batch]
                                         for batch in loader])
                          for _ in range(3)])
        assert [n for n, _ in found[0]] == [n for n, _ in found[1]]
        theirs, ours = ([x for _, epoch in run for batch in epoch
                         for x in batch] for run in found)
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
    """One row is the same for all."""
    x = np.arange(1.0, 13).reshape(4, 3) / 10
    rows, loss = rows_of(x, devices), names.gluon.loss.SigmoidBCELoss()
    factors = np.array([[1.0, 2, 3]])
    expected = mgpu.losses.SigmoidBCELoss()(
        *[mgpu.put(x, devices[0])] * 2, None, factors)
    for found in (loss(rows, rows, None, factors),
                  loss(rows, rows, pos_weight=factors)):
        assert np.allclose(found.asnumpy(), mgpu.to_numpy(expected), 1e-13)
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


def test_what_is_not_of_these_rows_is_refused(backend, devices):
    x = np.arange(1.0, 13).reshape(4, 3) / 10
    rows, loss = rows_of(x, devices), names.gluon.loss.SigmoidBCELoss()
    for others in ([names.cpu(7)], [*devices, names.cpu(7)]):
        with pytest.raises(ValueError, match="stay on the devices"):
            rows.as_in_context(others)
    for wrong in (np.ones(3), x, x[:, :1], mgpu.put(x, devices[0]),
                  [1.0] * len(devices)):
        with pytest.raises(TypeError, match="of one row"):
            loss(rows, rows, None, wrong)
        with pytest.raises(TypeError, match="of one row"):
            loss(rows, rows, sample_weight=wrong)
    for wrong in (np.ones(6), [1, 2], None):
        with pytest.raises(TypeError, match="as_in_context"):
            rows + wrong
    ones = rows_of(np.ones(6), devices)
    for wrong in (np.ones(5), np.ones((6, 1))):
        with pytest.raises(ValueError, match="as many axes"):
            ones * rows_of(wrong, devices)
    for call in (lambda rows: rows == rows, lambda rows: 2 > rows):
        with pytest.raises(TypeError, match="asnumpy"):
            call(rows)
    whole = rows_of(np.arange(6), devices)
    for call in (lambda: whole / 2, lambda: ones + whole):
        with pytest.raises(TypeError, match="compute in floats"):
            call()


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


def test_a_script_with_rows_has_the_step_of_one_array(backend, devices):
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
        for size in (len, lambda rows: rows.shape[0]):
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
    assert_close(*found)


def test_a_name_of_mxnet_without_a_meaning_names_the_word():
    for path in ("gluon.contrib", "nd.array", "np", "metric.RMSE"):
        module, _, name = f"mgpu.compat.mxnet.{path}".rpartition(".")
        text = f"has no '{path}'. Networks are those of .*mgpu.put"
        with pytest.raises(AttributeError, match=text):
            getattr(sys.modules[module], name)
        with pytest.raises(ImportError, match=text):
            exec(f"from {module} import {name}")
