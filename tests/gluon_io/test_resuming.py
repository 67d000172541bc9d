"""Trainings that real MXNet has begun and saved, and how mgpu goes on.

In lock-step: each step begins with MXNet's own weights and states, so what is
compared is one step, however long the training was.
"""
import functools
import json
import subprocess
import sys

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import relative_difference
from mgpu.gluon_io import load_params, load_trainer_states

from .mutations import FILES

live = pytest.mark.skipif(set(BACKENDS) < {"mxnet", "torch"},
                          reason="these compare two engines")

#: dyadic numbers, which MXNet's float32 options hold
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.125, "wd": 2 ** -6},
    "sgd-momentum": {"learning_rate": 0.125, "momentum": 0.5, "wd": 2 ** -6,
                     "clip_gradient": 2 ** -5},
    "nag": {"learning_rate": 0.125, "momentum": 0.5, "wd": 2 ** -6},
    # the bias correction of adam reaches its kernel as float32
    "adam": {"learning_rate": 2 ** -12, "beta1": 0.5, "beta2": 0.75,
             "epsilon": 2 ** -10, "wd": 2 ** -6},
    "adamax": {"learning_rate": 2 ** -8},
    "nadam": {"learning_rate": 2 ** -6, "wd": 2 ** -6},
    "rmsprop": {"learning_rate": 2 ** -8, "gamma1": 0.75,
                "epsilon": 2 ** -10},
    "rmsprop-centered": {"learning_rate": 2 ** -8, "gamma1": 0.75,
                         "gamma2": 0.5, "epsilon": 2 ** -10,
                         "centered": True},
    "adagrad": {"learning_rate": 2 ** -6, "eps": 2 ** -10, "wd": 2 ** -6},
    "adadelta": {"epsilon": 2 ** -10, "wd": 2 ** -6},
    "ftrl": {"learning_rate": 2 ** -4, "lamda1": 2 ** -10},
    "signum": {"learning_rate": 2 ** -8, "momentum": 0.5, "wd_lh": 2 ** -6},
}


def small():
    from mxnet.gluon import nn
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, use_bias=False), nn.BatchNorm(epsilon=2 ** -10),
            nn.Activation("tanh"), nn.Dense(5, activation="tanh"),
            nn.Dense(3))
    net[4].weight.lr_mult, net[3].bias.wd_mult = 0.5, 2.0
    return net


def mlp():
    """Names whose order as texts is not that of the layers."""
    from mxnet.gluon import nn
    net = nn.HybridSequential(prefix="mlp_")
    with net.name_scope():
        for _ in range(10):
            net.add(nn.Dense(4, activation="tanh"))
        net.add(nn.Dense(3))
    return net


def alike(count=11):
    """Parameters of one shape. From ten on texts are sorted otherwise."""
    from mxnet.gluon import nn
    net = nn.HybridSequential(prefix="alike_")
    with net.name_scope():
        net.add(*(nn.Dense(6, use_bias=False) for _ in range(count)))
    return net


def resnet18():
    from mxnet.gluon.model_zoo import vision
    return vision.resnet18_v1(classes=3, thumbnail=True)


def lstm():
    """One layer: those below the top have wrong gradients in MXNet."""
    from mxnet.gluon import nn, rnn
    net = nn.HybridSequential()
    net.add(nn.Dense(5, flatten=False), rnn.LSTM(4, layout="NTC"),
            nn.Dense(3))
    return net


NETWORKS = {"small": (small, (8, 2, 6, 6)), "mlp": (mlp, (8, 6)),
            "alike": (alike, (8, 6)),
            "few": (functools.partial(alike, 5), (8, 6)),
            "lstm": (lstm, (8, 6, 3)),
            "resnet18": (resnet18, (2, 3, 16, 16))}


class Training:
    """Of Gluon, in float64. Several devices need a network without batch
    norm."""

    def __init__(self, folder, network="small", optimizer="sgd-momentum",
                 sorted_names=True, part=None, contexts=1, store=None,
                 **options):
        import mxnet as mx
        make, shape = NETWORKS[network]
        rng = np.random.default_rng(0)
        self.x, self.y = rng.normal(size=shape), rng.integers(0, 3, shape[0])
        self.net, self.folder = make(), folder
        self.net.cast("float64")
        mx.random.seed(0)
        self.contexts = [mx.cpu(i) for i in range(contexts)]
        self.net.initialize(mx.init.Xavier(), ctx=self.contexts)
        self.net.hybridize()
        self.net(self.array(self.x))
        every = self.net.collect_params()
        for name, p in every.items():       # none of them are zero
            if name.endswith(("bias", "beta")):
                p.set_data(self.array(rng.normal(size=p.shape)))
        self.list = list(every)
        if part is not None:
            every = self.net[part].collect_params()
        self.trainer = mx.gluon.Trainer(
            every if sorted_names else list(every.values()),
            optimizer.partition("-")[0],
            {**OPTIMIZERS[optimizer], **options},
            kvstore=None if contexts == 1 else "device",
            update_on_kvstore=store)
        self.loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        self.trainer._init_kvstore()
        store = self.trainer._kvstore if self.trainer._update_on_kvstore \
            else None
        for updater, context in zip(
                self.trainer._updaters if store is None
                else [store._updater], self.contexts):
            for i, p in enumerate(self.trainer._params):
                # MXNet makes those of some optimisers in float32, and then
                # cannot update a float64 parameter.
                if p.grad_req != "null":
                    updater.states[i] = self.cast(
                        updater.optimizer.create_state(i, p.data(context)))
                    updater.states_synced[i] = True

    def cast(self, state):
        if isinstance(state, (list, tuple)):
            return tuple(map(self.cast, state))
        return None if state is None else state.astype("float64")

    def array(self, x):
        import mxnet as mx
        return mx.nd.array(x, dtype="float64")

    def freeze(self, name, grad_req):
        self.net.collect_params()[name].grad_req = grad_req
        self.net(self.array(self.x))

    def step(self, count=1):
        from mxnet import autograd
        for _ in range(count):
            rows = len(self.y) // len(self.contexts)
            with autograd.record():
                losses = []
                for i, context in enumerate(self.contexts):
                    x, y = (self.array(whole[i * rows:(i + 1) * rows])
                            .as_in_context(context)
                            for whole in (self.x, self.y))
                    losses.append(self.loss(self.net(x), y))
            autograd.backward(losses)
            self.trainer.step(len(self.y))

    def save(self):
        self.net.export(str(self.folder / "net"))
        self.trainer.save_states(str(self.folder / "net.states"))
        return [self.folder / name for name in (
            "net-symbol.json", "net-0000.params", "net.states")]

    def values(self):
        return {name: p.list_data()[0].asnumpy()
                for name, p in self.net.collect_params().items()}


@pytest.fixture
def training(tmp_path):
    def make(*arguments, **options):
        with mgpu.using_backend("mxnet"):
            return Training(tmp_path, *arguments, **options)
    return make


def values_of(replicas):
    names = replicas.network.gluon_names()
    return {names[key]: x for key, x in replicas.export_numpy().items()
            if key in names}


def difference(replicas, expected):
    """Of the farthest parameter, by its size."""
    return max(relative_difference(x, expected[name]) for name, x in
               values_of(replicas).items())


def one_step(training, resumed):
    mgpu.train_batch(training.x, training.y, resumed.replicas,
                     mgpu.losses.SoftmaxCrossEntropyLoss(), resumed.trainer)


def lock_step(training, steps, devices, **options):
    """The largest difference after a step of both from MXNet's files."""
    worst = 0.0
    for _ in range(steps):
        with mgpu.using_backend("mxnet"):
            files = training.save()
            training.step()
            expected = training.values()
        with mgpu.using_backend("torch"):
            resumed = mgpu.resume_from_gluon(*files, devices, **options)
            one_step(training, resumed)
            worst = max(worst, difference(resumed.replicas, expected))
    return worst


@live
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on(training, optimizer):
    one = training("small", optimizer)
    with mgpu.using_backend("mxnet"):
        one.step(3)
    assert lock_step(one, 3, [mgpu.cpu(0)]) < 1e-10


@live
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adam", "nadam"])
def test_on_devices(training, devices, optimizer):
    one = training("small", optimizer)
    with mgpu.using_backend("mxnet"):
        one.step(3)
    assert lock_step(one, 2, devices, batch_norm="sync") < 1e-10


@live
@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adam", "rmsprop"])
def test_states_of_two_devices(training, devices, optimizer, store):
    """Whoever updates them: the store, or each device by itself."""
    one = training("few", optimizer, contexts=2, store=store)
    with mgpu.using_backend("mxnet"):
        one.step(3)
    assert lock_step(one, 2, devices) < 1e-10


@live
@pytest.mark.parametrize("network", ["resnet18", "lstm", "mlp"])
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adam"])
def test_twenty_steps_and_twenty_more(training, network, optimizer):
    one = training(network, optimizer)
    with mgpu.using_backend("mxnet"):
        one.step(20)
    assert lock_step(one, 20, [mgpu.cpu(0)]) < 1e-10


@live
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_copies_of_float16_parameters(tmp_path, optimizer):
    """The copies go on in float32. The gradients are whole numbers, which
    float16 holds: MXNet has no float16 layers on the CPU."""
    x, y = np.random.default_rng(0).integers(-3, 4, (2, 8, 4))
    files = [tmp_path / name for name in ("net.json", "net.params", "states")]
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        net = mx.gluon.nn.Dense(4, in_units=4, prefix="fc_")
        net.cast("float16")
        net.initialize(mx.init.Xavier())
        trainer = mx.gluon.Trainer(
            net.collect_params(), optimizer.partition("-")[0],
            {**OPTIMIZERS[optimizer], "multi_precision": True}, kvstore=None)
        parameters = {"fc_weight": net.weight, "fc_bias": net.bias}

        def step():
            for p, g in zip(parameters.values(), (y.T @ x, y.sum(0))):
                with mx.autograd.record():
                    loss = p.data() * mx.nd.array(g, dtype="float16")
                loss.backward()
            trainer.step(len(y))

        for _ in range(3):
            step()
        net(mx.sym.var("data")).save(str(files[0]))
        mx.nd.save(str(files[1]), {f"arg:{name}": p.data() for name, p in
                                   parameters.items()})
        trainer.save_states(str(files[2]))
        step()
        at = int(optimizer.partition("-")[0] in ("sgd", "nag"))
        expected = {p.name: trainer._updaters[0].states[i][at].asnumpy()
                    for i, p in enumerate(trainer._params)}
    with mgpu.using_backend("torch"):
        resumed = mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
        before = values_of(resumed.replicas)
        mgpu.train_batch(
            x.astype("float32"), y.astype("float32"), resumed.replicas,
            lambda out, y: (out * y).sum(1), resumed.trainer)
        for key, found in values_of(resumed.replicas).items():
            copy = expected[key.removeprefix("arg:")]
            assert found.dtype == copy.dtype == np.float32
            # what is the same after the step is no proof
            assert relative_difference(before[key], copy) > 1e-5
            assert relative_difference(found, copy) < 3e-7


@live
def test_it_goes_on_alone(training, tmp_path):
    """Several steps after one another, and its own files of states."""
    one = training("small", "nadam")
    with mgpu.using_backend("mxnet"):
        one.step(3)
        files = one.save()
        one.step(4)
        expected = one.values()
    with mgpu.using_backend("torch"):
        resumed = mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
        for _ in range(4):
            one_step(one, resumed)
        assert difference(resumed.replicas, expected) < 1e-9
        assert resumed.trainer.num_update == 7


@live
def test_nadam_on_devices_in_turn_is_refused(training):
    """One schedule of momentum for all moves at each of them."""
    one = training("small", "nadam")
    with mgpu.using_backend("mxnet"):
        one.step()
        counts = one.trainer._optimizer._all_index_update_counts
        counts[1] = dict(counts[0])
        files = one.save()
    with mgpu.using_backend("torch"), pytest.raises(
            ValueError, match="states of 2 devices"):
        mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])


@live
def test_on_mxnet_itself(training):
    one = training("small", "adam")
    with mgpu.using_backend("mxnet"):
        one.step(3)
        resumed = mgpu.resume_from_gluon(*one.save(), [mgpu.cpu(0)])
        one.step()
        one_step(one, resumed)
        assert difference(resumed.replicas, one.values()) < 1e-10


@live
@pytest.mark.parametrize("options", [
    {"learning_rate": 0.25}, {}], ids=["given", "own"])
@pytest.mark.parametrize("name, arguments", [
    ("FactorScheduler", {"step": 2, "factor": 0.5}),
    ("FactorScheduler", {"step": 1, "factor": 0.5, "warmup_steps": 6}),
    ("MultiFactorScheduler", {"step": [1, 4], "factor": 0.5}),
    ("PolyScheduler", {"max_update": 8, "warmup_steps": 2}),
    ("PolyScheduler", {"max_update": 2, "final_lr": 2 ** -6}),
    ("CosineScheduler", {"max_update": 8, "final_lr": 2 ** -6})])
def test_schedules_go_on(training, name, arguments, options):
    """Their rates; weights where MXNet's float32 holds them."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        schedule = getattr(mx.lr_scheduler, name)(base_lr=0.5, **arguments)
    one = training("small", "sgd", lr_scheduler=schedule,
                   **{"learning_rate": None, **options})
    with mgpu.using_backend("mxnet"):
        one.step(3)
        files = one.save()
        expected = [schedule(n) for n in range(4, 12)]
    with mgpu.using_backend("torch"):
        trainer = mgpu.resume_from_gluon(*files, [mgpu.cpu(0)]).trainer
        assert [trainer.rate(n) for n in range(4, 12)] == expected


# -- what the files do not say ------------------------------------------------

@live
def test_a_list_is_refused_or_given(training):
    """Where a trainer has the parameters as they are made, not sorted."""
    one = training("small", sorted_names=False)
    with mgpu.using_backend("mxnet"):
        one.step(3)
        files = one.save()
    with mgpu.using_backend("torch"), pytest.raises(
            ValueError, match="do not fit the sorted names: number"):
        mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
    assert lock_step(one, 1, [mgpu.cpu(0)], order=one.list) < 1e-10


@live
def test_another_order_is_another_training(training):
    """Two parameters of one shape that are exchanged: the proof above sees
    it."""
    one = training("mlp")
    with mgpu.using_backend("mxnet"):
        one.step(3)
    order = sorted(one.list)
    a, b = order.index("mlp_dense2_weight"), order.index("mlp_dense7_weight")
    order[a], order[b] = order[b], order[a]
    assert lock_step(one, 1, [mgpu.cpu(0)], order=order) > 1e-6


@live
def test_shapes_that_do_not_decide_are_refused(training):
    one = training("alike")
    with mgpu.using_backend("mxnet"):
        one.step(2)
        files = one.save()
    with mgpu.using_backend("torch"):
        with pytest.raises(ValueError, match="shapes do not decide"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
        with pytest.raises(ValueError, match="no parameter 10"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)],
                                   order=sorted(one.list)[:-1])
    for order in (sorted(one.list), "sorted"):
        assert lock_step(one, 1, [mgpu.cpu(0)], order=order) < 1e-10


@live
@pytest.mark.parametrize("first, last", [(0, 2), (1, 4), (3, 5), (0, 4)])
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "sgd"])
def test_a_trainer_of_a_part(training, first, last, optimizer):
    """Its states have the numbers of the first parameters of all."""
    one = training("few", optimizer, part=slice(first, last))
    names = sorted(one.list[first:last])
    with mgpu.using_backend("mxnet"):
        one.step(2)
        files = one.save()
    with mgpu.using_backend("torch"):
        with pytest.raises(ValueError, match="given a part of them"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
        with pytest.raises(ValueError, match="not in the graph"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)],
                                   order=[*names[:-1], "few_weight"])
        with pytest.raises(ValueError, match="with a name twice"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)],
                                   order=[*names[:-1], names[0]])
    assert lock_step(one, 2, [mgpu.cpu(0)], order=names) < 1e-10


@live
def test_a_head_that_is_trained_alone(training):
    """Nothing else can be meant where the last one of all has a state."""
    one = training("mlp")
    with mgpu.using_backend("mxnet"):
        for name in one.list:
            if "dense9" not in name:
                one.freeze(name, "null")
                del one.trainer._updaters[0].states[
                    sorted(one.list).index(name)]
        one.step(2)
    assert lock_step(one, 1, [mgpu.cpu(0)]) < 1e-10


@live
@pytest.mark.parametrize("now", ["null", "write"])
def test_what_was_frozen_for_a_time(training, now):
    """Fewer updates are of one that is frozen now, or is not any more."""
    one = training("small")
    name = one.list[0]
    with mgpu.using_backend("mxnet"):
        one.step()
        one.freeze(name, "null")
        one.step(2)
        one.freeze(name, now)
        files = one.save()
    with mgpu.using_backend("torch"), pytest.raises(
            ValueError, match=f"1 with fewer: {name} .1.*Pass grad_req="):
        mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
    assert lock_step(one, 2, [mgpu.cpu(0)], grad_req={name: now}) < 1e-10


@live
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_schedule_at_what_was_frozen(training, optimizer):
    """MXNet gives it the rate of the update before, where it stands first."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        schedule = mx.lr_scheduler.FactorScheduler(1, 0.5, base_lr=2 ** -10)
    one = training("small", optimizer, lr_scheduler=schedule,
                   learning_rate=2 ** -10)
    first, second = (x for x in sorted(one.list)
                     if x.endswith(("beta", "gamma")))
    for name, refused in ((second, False), (first, True)):
        with mgpu.using_backend("mxnet"):
            one.step()
            one.freeze(name, "null")
            one.step()
            one.freeze(name, "write")
            files = one.save()
        options = {"grad_req": dict.fromkeys((first, second), "write")}
        if not refused:
            assert lock_step(one, 1, [mgpu.cpu(0)], **options) < 1e-10
    with mgpu.using_backend("torch"):
        with pytest.raises(ValueError, match=f"received {first}, the first"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)], **options)
        mgpu.resume_from_gluon(*files, [mgpu.cpu(0)], **options,
                               lr_scheduler=lambda n: 0.125)


@live
@pytest.mark.parametrize("scale, rows", [(1.0, 8), (0.5, 16), (0.75, None)])
def test_a_factor_of_gradients(training, scale, rows):
    """The file has its quotient by the batch size."""
    one = training("small", rescale_grad=scale)
    with mgpu.using_backend("mxnet"):
        one.step(2)
        files = one.save()
        one.step()
    with mgpu.using_backend("torch"):
        if rows is None:
            with pytest.raises(ValueError, match="Pass batch_size="):
                mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
        else:
            notes = mgpu.resume_from_gluon(*files, [mgpu.cpu(0)]).notes
            assert [x for x in notes if f"divided the sum of the gradients by "
                    f"{rows}. If that is not" in x]
        resumed = mgpu.resume_from_gluon(*files, [mgpu.cpu(0)], batch_size=8)
        assert bool([x for x in resumed.notes if f"each loss by {scale:g}"
                     in x]) == (scale != 1)
        ordinary = mgpu.losses.SoftmaxCrossEntropyLoss()
        mgpu.train_batch(one.x, one.y, resumed.replicas,
                         lambda *x: scale * ordinary(*x), resumed.trainer)
        assert difference(resumed.replicas, one.values()) < 1e-10


@live
def test_frozen_parameters_and_multipliers(training):
    one = training("small")
    with mgpu.using_backend("mxnet"):
        frozen = one.list[0]
        one.net.collect_params()[frozen].grad_req = "null"
        del one.trainer._updaters[0].states[sorted(one.list).index(frozen)]
        one.step(3)
        files = one.save()
    with mgpu.using_backend("torch"):
        replicas, trainer, notes = mgpu.resume_from_gluon(*files,
                                                          [mgpu.cpu(0)])
        names = replicas.network.gluon_names()
        assert [names[p.name] for p in replicas.params()
                if p.grad_req == "null"] == [frozen]
        assert [x for x in notes if "so they are frozen" in x]
        assert [x for x in notes if "lr_mult as in the graph" in x]
        assert [x for x in notes if "running statistics are those" in x]
        assert set(trainer.lr_mult.values()) == {1.0, 0.5}
        again = mgpu.resume_from_gluon(
            *files, [mgpu.cpu(0)], grad_req={frozen: "write"},
            lr_mult={frozen: 0.25})
        assert all(p.grad_req == "write" for p in again.replicas.params())
        assert set(again.trainer.lr_mult.values()) == {1.0, 0.5, 0.25}
    assert lock_step(one, 1, [mgpu.cpu(0)]) < 1e-10


@live
def test_options_that_float32_does_not_hold_are_reported(training):
    one = training("small", learning_rate=0.1)
    with mgpu.using_backend("mxnet"):
        one.step(3)
        files = one.save()
    with mgpu.using_backend("torch"):
        notes = mgpu.resume_from_gluon(*files, [mgpu.cpu(0)]).notes
        assert [x for x in notes if "learning_rate=0.1 by 1.5e-08" in x]
    assert 1e-12 < lock_step(one, 1, [mgpu.cpu(0)]) < 1e-7


@live
def test_the_corrected_rate_of_adam_is_reported(training):
    """float32 does not hold it even where it holds all options."""
    one = training("small", "adam", learning_rate=0.125)
    with mgpu.using_backend("mxnet"):
        one.step(3)
        files = one.save()
    with mgpu.using_backend("torch"):
        notes = mgpu.resume_from_gluon(*files, [mgpu.cpu(0)]).notes
    off = [float(x.rpartition(" by ")[2]) for x in notes
           if "the corrected rate of update 4" in x]
    # The rate counts by what a step moves of a weight, at most 20 times it.
    assert len(off) == 1 and 1e-11 < lock_step(
        one, 1, [mgpu.cpu(0)]) < 20 * off[0]


# -- a Module's ---------------------------------------------------------------

def module(mx, folder, fixed=None, momentum=0.5):
    """A checkpoint of the symbol API after 3 steps, and a step more. The
    names of its weights, batches, and values then."""
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, name="fc1")
    x = mx.sym.Activation(x, act_type="tanh")
    x = mx.sym.FullyConnected(x, num_hidden=3, name="fc2")
    x = mx.sym.SoftmaxOutput(x, name="softmax")
    rng = np.random.default_rng(0)
    data, label = rng.normal(size=(8, 4)), rng.integers(0, 3, 8)
    batch = mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(label)])
    mod = mx.mod.Module(x, context=[mx.cpu(0), mx.cpu(1)],
                        fixed_param_names=fixed)
    mod.bind([("data", (8, 4))], [("softmax_label", (8,))])
    mx.random.seed(0)
    mod.init_params(mx.init.Xavier())
    mod.init_optimizer("local", "sgd", {"learning_rate": 0.125,
                                       "momentum": momentum,
                                       "wd": 2 ** -6})
    for i in range(4):
        if i == 3:
            mod.save_checkpoint(str(folder / "net"), 10,
                                save_optimizer_states=True)
            predicted = mod.predict(mx.io.NDArrayIter(data, batch_size=8))
        mod.forward_backward(batch)
        mod.update()
    values = {name: x.asnumpy() for name, x in mod.get_params()[0].items()}
    return data, label, values, predicted.asnumpy(), [
        folder / name for name in ("net-symbol.json", "net-0010.params",
                                   "net-0010.states")]


@live
@pytest.mark.parametrize("engine", ["torch", "mxnet"])
@pytest.mark.parametrize("on_store", ["0", "1"])
def test_a_module_goes_on(tmp_path, monkeypatch, engine, on_store):
    """It trains in float32, on two devices, and its states have numbers for
    each device, or names. Its end predicts, or gives what enters it."""
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", on_store)
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        data, label, expected, predicted, files = module(mx, tmp_path)
    with mgpu.using_backend(engine):
        net = mgpu.from_gluon(*files[:2])
        view = mgpu.initialize(net, [mgpu.cpu(0)])
        found = mgpu.to_numpy(view[0](mgpu.put(np.float32(data), mgpu.cpu(0))))
        assert relative_difference(found, predicted) < 1e-5
        with pytest.raises(ValueError, match="without an optimiser"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
        resumed = mgpu.resume_from_gluon(
            *files, [mgpu.cpu(0)], optimizer="sgd", optimizer_params={
                "learning_rate": 0.125, "momentum": 0.5, "wd": 2 ** -6,
                "begin_num_update": 3})
        mgpu.train_batch(np.float32(data), label, resumed.replicas,
                         mgpu.losses.SoftmaxCrossEntropyLoss(),
                         resumed.trainer)
        assert resumed.trainer.num_update == 4
        assert difference(resumed.replicas, expected) < 1e-5


@live
def test_a_module_with_fixed_parameters(tmp_path, monkeypatch):
    """Its states are of as many devices as one wants, if they are empty."""
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        data, label, expected, _, files = module(
            mx, tmp_path, ["fc1_weight", "fc1_bias"], momentum=0.0)
    with mgpu.using_backend("torch"):
        options = {"optimizer": "sgd", "optimizer_params": {
            "learning_rate": 0.125, "wd": 2 ** -6}}
        with pytest.raises(ValueError, match="ways. Pass order="):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)], **options)
        with pytest.raises(ValueError, match="order of the graph"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)], order="sorted",
                                   **options)
        resumed = mgpu.resume_from_gluon(
            *files, [mgpu.cpu(0)], order=["fc2_weight", "fc2_bias"],
            **options)
        mgpu.train_batch(np.float32(data), label, resumed.replicas,
                         mgpu.losses.SoftmaxCrossEntropyLoss(),
                         resumed.trainer)
        assert difference(resumed.replicas, expected) < 1e-5


# -- what does not fit --------------------------------------------------------

GOLDEN = [FILES / "training" / f"net{end}" for end in (
    "-symbol.json", "-0000.params", ".states")]
STEPS = FILES / "training" / "steps.params"


@pytest.fixture
def golden(monkeypatch):
    """The files of a small training, and a way to change what is read of
    the states."""
    from mgpu import resuming

    def go_on(edit, **options):
        found = load_trainer_states(GOLDEN[2])
        edit(found.states, found.optimizer.state)
        with monkeypatch.context() as patch, mgpu.using_backend("torch"):
            patch.setattr(resuming, "load_trainer_states", lambda _: found)
            return mgpu.resume_from_gluon(*GOLDEN, [mgpu.cpu(0)], **options)
    return go_on


def _exchange(states, state):
    a, b = [i for i, x in states.items() if x[0].ndim == 4][0], max(states)
    states[a], states[b] = states[b], states[a]


@pytest.mark.skipif("torch" not in BACKENDS, reason="goes on with torch")
@pytest.mark.parametrize("edit, error, match", [
    (_exchange, ValueError, "its state has"),
    (lambda s, o: s.update({99: s.pop(max(s))}), ValueError, "has a count"),
    (lambda s, o: o.update(num_update=1), ValueError, "of num_update at most"),
    (lambda s, o: o["_all_index_update_counts"].update({1: dict.fromkeys(
        s, 1)}), ValueError, "as often as the others"),
    (lambda s, o: s.update({max(s): None}), ValueError,
     "received 0 arrays for"),
    (lambda s, o: o.pop("beta1"), ValueError, "without beta1"),
    (lambda s, o: o["lr_scheduler"].state.update(base_lr=3.0), ValueError,
     "changed by hand"),
    (lambda s, o: setattr(type(o["lr_scheduler"]), "kind", "own.Schedule"),
     NotImplementedError, "own.Schedule.*Pass lr_scheduler="),
], ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_fit_is_refused(golden, edit, error, match):
    with pytest.raises(error, match=match):
        golden(edit)


@pytest.mark.skipif("torch" not in BACKENDS, reason="goes on with torch")
@pytest.mark.parametrize("options, match", [
    ({"optimizer": "adam"}, "Leave optimizer= out"),
    ({"optimizer_params": {"wd": 1.0}}, "go with an optimiser's name"),
    ({"order": "natural"}, "order is 'sorted'"),
    ({"grad_req": {"conv": "null"}}, "grad_req names parameters"),
    ({"lr_mult": {"conv": 2.0}}, "lr_mult names parameters")])
def test_what_is_asked_must_fit(golden, options, match):
    with pytest.raises(ValueError, match=match):
        golden(lambda states, state: None, **options)


@pytest.mark.parametrize("name", ["ftml", "lamb", "lars", "sgld", "dcasgd",
                                  "own"])
def test_optimizers_that_mgpu_has_not(name):
    with mgpu.using_backend(BACKENDS[0]), pytest.raises(
            NotImplementedError, match="has no counterpart"):
        mgpu.resume_from_gluon(*GOLDEN[:2], FILES / f"{name}.states",
                               [mgpu.cpu(0)])


@pytest.mark.skipif("torch" not in BACKENDS, reason="goes on with torch")
def test_a_process_without_mxnet_goes_on():
    """Predicts and trains as MXNet did, which wrote what came of it."""
    code = f"""
import sys
sys.modules["mxnet"] = None
import json, numpy as np, mgpu
mgpu.set_backend("torch")
files = {[str(x) for x in GOLDEN]!r}
steps = mgpu.gluon_io.load_params({str(STEPS)!r})
net = mgpu.from_gluon(*files[:2])
view = mgpu.initialize(net, [mgpu.cpu(0)])
y = mgpu.to_numpy(view[0](mgpu.put(steps["x"], mgpu.cpu(0))))
found = {{"y": abs(y - steps["predicted"]).max()}}
resumed = mgpu.resume_from_gluon(*files, [mgpu.cpu(0), mgpu.cpu(1)],
                                 batch_norm="sync")
names = resumed.replicas.network.gluon_names()
for _ in range(3):
    mgpu.train_batch(steps["x"], steps["label"], resumed.replicas,
                     mgpu.losses.SoftmaxCrossEntropyLoss(), resumed.trainer)
for key, x in resumed.replicas.export_numpy().items():
    if key in names:
        found[names[key]] = abs(x - steps[names[key]]).max()
print(json.dumps({{key: float(x) for key, x in found.items()}}))
"""
    done = subprocess.run([sys.executable, "-c", code], text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == load_params(STEPS).keys() - {
        "x", "label", "predicted"} | {"y"}
    assert max(found.values()) < 1e-8, found
