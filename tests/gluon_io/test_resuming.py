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
from mgpu.gluon_io import load_params, load_trainer_states, save_params

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


def distinct():
    """No two parameters of one shape."""
    from mxnet.gluon import nn
    net = nn.HybridSequential(prefix="distinct_")
    with net.name_scope():
        net.add(nn.Dense(5, activation="tanh"), nn.Dense(3))
    return net


def in_symbols(net):
    """As a block that reads an exported graph, which trains every array."""
    import mxnet as mx
    x = mx.sym.var("data")
    block = mx.gluon.SymbolBlock(net(x), x)
    for name, p in block.collect_params("^(?!.*weight)").items():
        p.init = mx.init.One()
        if "running" not in name:
            p.grad_req = "write"
    return block


def scaled(symbols):
    """The gamma of the second of two batch norms is taken as 1: Gluon's
    layer freezes it, and a block of symbols has updates of it."""
    from mxnet.gluon import nn
    net = nn.HybridSequential(prefix="scaled_")
    with net.name_scope():
        for scale in (True, False):     # its gamma is the last by name
            net.add(nn.Dense(5, use_bias=False), nn.BatchNorm(
                scale=scale, epsilon=2 ** -10, prefix=f"z{1 - scale}_"),
                nn.Activation("tanh"))
        net.add(nn.Dense(3))
    return in_symbols(net) if symbols else net


def constant():
    """A block of symbols trains what is a constant in Gluon's."""
    import mxnet as mx

    class Net(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__(prefix="net_")
            with self.name_scope():
                self.dense = mx.gluon.nn.Dense(3)
                self.factor = self.params.get_constant(
                    "factor", np.ones((1, 6)))

        def hybrid_forward(self, F, x, factor):
            return self.dense(F.broadcast_mul(x, factor))
    return in_symbols(Net())


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
            "scaled": (functools.partial(scaled, False), (8, 6)),
            "scaled in symbols": (functools.partial(scaled, True), (8, 6)),
            "constant in symbols": (constant, (8, 6)),
            "distinct": (distinct, (8, 6)), "lstm": (lstm, (8, 6, 3)),
            "resnet18": (resnet18, (2, 3, 16, 16))}


#: what a trainer is given of the parameters of a network
GIVEN = {
    "sorted": lambda every, net: every,
    "list": lambda every, net: list(every.values()),
    "reversed": lambda every, net: list(every.values())[::-1],
    "head first": lambda every, net: [
        *net[-1].collect_params().values(),
        *(p for block in net._children.values() if block is not net[-1]
          for p in block.collect_params().values())],
    "attributes": lambda every, net: {
        f"{9 - int(name[0])}{name[1:]}": p for name, p in
        net._collect_params_with_prefix().items()}}


class Training:
    """Of Gluon, in float64. Several devices need a network without batch
    norm."""

    def __init__(self, folder, network="small", optimizer="sgd-momentum",
                 given="sorted", part=None, contexts=1, store=None,
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
            GIVEN[given](every, self.net),
            optimizer.partition("-")[0],
            {**OPTIMIZERS[optimizer], **options},
            kvstore=None if contexts == 1 else "device",
            update_on_kvstore=store)
        self.order = [p.name for p in self.trainer._params]
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

    def requests(self):
        return {p.name: p.grad_req
                for p in self.net.collect_params().values()}

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


def go_on(files, **options):
    """As of a trainer that was given the whole dictionary."""
    return mgpu.resume_from_gluon(*files, [mgpu.cpu(0)],
                                  **{"order": "sorted", **options})


def lock_step(training, steps, devices, **options):
    """The largest difference after a step of both from MXNet's files."""
    worst, options = 0.0, {"order": "sorted", **options}
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


#: whose kernels clip where the limit is above 0
CLIPPED = [name for name in OPTIMIZERS if name.partition("-")[0] in (
    "sgd", "nag", "adam", "rmsprop", "ftrl", "signum")]


@live
@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_limit_that_is_none(training, optimizer, limit):
    """MXNet's kernels do not clip at it; what it computes in Python does, to
    nothing or to the limit itself, and is refused."""
    one = training("small", optimizer, clip_gradient=limit, **(
        {"clip_weights": limit} if "rmsprop" in optimizer else {}))
    with mgpu.using_backend("mxnet"):
        one.step(2)
    if optimizer in CLIPPED:
        assert lock_step(one, 1, [mgpu.cpu(0)]) < 1e-10
        return
    with pytest.raises(ValueError, match="the options in the file of states: "
                       f"clip_gradient must be .*received {limit}"):
        lock_step(one, 1, [mgpu.cpu(0)])


@live
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "nag"])
def test_a_momentum_that_was_set_to_0(training, optimizer):
    one = training("small", optimizer)
    with mgpu.using_backend("mxnet"):
        one.step(2)
        one.trainer._optimizer.momentum = 0.0
    assert lock_step(one, 2, [mgpu.cpu(0)]) < 1e-10


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
def test_many_steps_and_as_many_more(training, network, optimizer):
    one = training(network, optimizer)
    with mgpu.using_backend("mxnet"):
        one.step(20)
    # ResNet-18 takes its time
    found = lock_step(one, 6 if network == "resnet18" else 20, [mgpu.cpu(0)])
    assert found < 1e-10


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
        resumed = go_on(files)
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
        resumed = go_on(files)
        for _ in range(4):
            one_step(one, resumed)
        assert difference(resumed.replicas, expected) < 1e-9
        assert resumed.trainer.num_update == 7


@live
@pytest.mark.parametrize("engine", ["torch", "mxnet"])
@pytest.mark.parametrize("network", ["scaled", "scaled in symbols"])
def test_nadam_moves_at_a_gamma_that_is_1(training, network, engine):
    """Where MXNet updates it, in each later step too."""
    one = training(network, "nadam", wd=0.0)
    with mgpu.using_backend("mxnet"):
        one.step()
        files = one.save()
        one.step(2)
        expected = one.values()
    with mgpu.using_backend(engine):
        resumed = go_on(files)
        for _ in range(2):
            one_step(one, resumed)
        assert difference(resumed.replicas, expected) < 1e-10
        assert len([p for p in resumed.replicas.params()
                    if p.grad_req == "null"]) == 1


@live
def test_nadam_at_a_gamma_that_is_1_and_has_no_state(training):
    """The files do not say whether MXNet will update it."""
    with mgpu.using_backend("mxnet"):
        one = training("scaled in symbols", "nadam", wd=0.0)
        for updater in one.trainer._updaters:
            updater.states.clear()
        files = one.save()
    with mgpu.using_backend("torch"), pytest.raises(
            ValueError, match="no state of .*'null' or 'write'"):
        go_on(files)
    for request, same in (("null", False), ("write", True)):
        with mgpu.using_backend("torch"):
            resumed = go_on(files, grad_req={"scaled_z0_gamma": "write",
                                             "scaled_z1_gamma": request})
            for _ in range(2):
                one_step(one, resumed)
        if request == "null":
            with mgpu.using_backend("mxnet"):
                one.step(2)
        off = difference(resumed.replicas, one.values())
        assert (off < 1e-10) == same


@live
def test_a_constant_that_a_block_of_symbols_trains(training):
    one = training("constant in symbols")
    with mgpu.using_backend("mxnet"):
        one.step(3)
    assert lock_step(one, 2, [mgpu.cpu(0)]) < 1e-10


@live
@pytest.mark.parametrize("network", ["small", "scaled", "scaled in symbols",
                                     "constant in symbols"])
def test_what_is_trained_before_the_first_step_is_asked_for(training,
                                                            network):
    """A gamma of 1 may be of a layer without a scale; a block of symbols
    trains a constant, and a layer does not."""
    with mgpu.using_backend("mxnet"):
        one = training(network, wd=0.0)
        one.freeze(one.list[0], "null")
        one.trainer._updaters[0].states.clear()
        files, requests = one.save(), one.requests()
    with mgpu.using_backend("torch"), pytest.raises(
            ValueError, match="no state of .*(gamma|factor).*grad_req= with"):
        go_on(files)
    with mgpu.using_backend("torch"):
        resumed = go_on(files, grad_req=requests)
        assert not [x for x in resumed.notes if "the first update" in x]
        for _ in range(2):
            one_step(one, resumed)
    with mgpu.using_backend("mxnet"):
        one.step(2)
    assert difference(resumed.replicas, one.values()) < 1e-10


@live
def test_what_is_frozen_before_the_first_step_is_noted(training):
    """Weights may be frozen by the user alone; a list says which are."""
    with mgpu.using_backend("mxnet"):
        one = training("distinct")
        one.trainer._updaters[0].states.clear()
        files = one.save()
    for order, note, frozen in (
            ("sorted", "do not say what is frozen", 0),
            (one.list[2:], "order= has not named them, so they are", 2)):
        with mgpu.using_backend("torch"):
            resumed = go_on(files, order=order)
        assert [x for x in resumed.notes if note in x]
        assert frozen == len([p for p in resumed.replicas.params()
                              if p.grad_req == "null"])


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
        go_on(files)


@live
def test_on_mxnet_itself(training):
    one = training("small", "adam")
    with mgpu.using_backend("mxnet"):
        one.step(3)
        resumed = go_on(one.save())
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
        trainer = go_on(files).trainer
        assert [trainer.rate(n) for n in range(4, 12)] == expected


@live
@pytest.mark.parametrize("name, step", [("FactorScheduler", 3),
                                        ("MultiFactorScheduler", [4, 11])])
@pytest.mark.parametrize("asked", [False, True])
def test_a_schedule_before_the_first_update(training, name, step, asked):
    """With begin_num_update; whether somebody has looked at the rate or
    not."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        schedule = getattr(mx.lr_scheduler, name)(step, 0.5, base_lr=0.125)
    one = training("small", "sgd", lr_scheduler=schedule, learning_rate=None,
                   begin_num_update=10)
    with mgpu.using_backend("mxnet"):
        one.trainer._updaters[0].states.clear()
        if asked:
            assert one.trainer.learning_rate < 0.125
        files, requests = one.save(), one.requests()
    with mgpu.using_backend("torch"):
        trainer = go_on(files, grad_req=requests).trainer
        assert [trainer.rate(n) for n in range(11, 15)] == [
            schedule(n) for n in range(11, 15)]


@live
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("optimizer, rate", [
    ("ftrl", None), ("adadelta", None), ("adadelta", 0.25)])
@pytest.mark.parametrize("name, step", [("FactorScheduler", 1),
                                        ("MultiFactorScheduler", [1, 3])])
def test_a_schedule_that_an_optimizer_does_not_set(training, name, step,
                                                   optimizer, rate, steps):
    """Ftrl has a rate besides, and AdaDelta asks for none."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        schedule = getattr(mx.lr_scheduler, name)(step, 0.5, base_lr=0.5)
    one = training("small", optimizer, lr_scheduler=schedule,
                   **({} if rate is None else {"learning_rate": rate}))
    with mgpu.using_backend("mxnet"):
        if steps:
            one.step(steps)
        else:
            one.trainer._updaters[0].states.clear()
        files, requests = one.save(), one.requests()
    with mgpu.using_backend("torch"):
        trainer = go_on(files, grad_req=requests).trainer
        assert [trainer.rate(n) for n in range(steps + 1, 6)] == [
            schedule(n) for n in range(steps + 1, 6)]


# -- what the files do not say ------------------------------------------------

@live
@pytest.mark.parametrize("network", ["small", "few"])
@pytest.mark.parametrize("given", GIVEN)
def test_an_order_that_shapes_do_not_decide(training, network, given):
    """Refused, whether the sorted names fit or not; right where it is
    said."""
    one = training(network, given=given)
    with mgpu.using_backend("mxnet"):
        one.step(3)
        files = one.save()
    fit = network == "few" or given in ("sorted", "attributes")
    with mgpu.using_backend("torch"):
        with pytest.raises(ValueError, match="whose shapes do not decide" + (
                ".*Pass order='sorted' for" if fit else
                ".*They do not fit the sorted names: number")):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
        if not fit:
            with pytest.raises(ValueError, match="not fit the sorted names"):
                mgpu.resume_from_gluon(*files, [mgpu.cpu(0)], order="sorted")
    assert lock_step(one, 1, [mgpu.cpu(0)], order=one.order) < 1e-10


@live
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "nadam"])
@pytest.mark.parametrize("given", GIVEN)
def test_an_order_that_shapes_decide(training, given, optimizer):
    one = training("distinct", optimizer, given=given)
    with mgpu.using_backend("mxnet"):
        one.step(3)
    assert lock_step(one, 2, [mgpu.cpu(0)], order=None) < 1e-10


@live
def test_states_that_are_all_the_same_need_no_order(training):
    """Those of sgd, which are none; but in Nadam's place something moves."""
    one = training("few", "sgd", given="reversed")
    with mgpu.using_backend("mxnet"):
        one.step(3)
    assert lock_step(one, 1, [mgpu.cpu(0)], order=None) < 1e-10
    for given, order in (("reversed", None), ("sorted", "sorted"),
                         ("reversed", ())):
        one = training("few", "nadam", given=given)
        order = one.order if order == () else order
        with mgpu.using_backend("mxnet"):
            for updater in one.trainer._updaters:
                updater.states.clear()
        if order is None:
            with mgpu.using_backend("mxnet"):
                files = one.save()
            with mgpu.using_backend("torch"), pytest.raises(
                    ValueError, match="depends on those before it"):
                mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
        else:
            assert lock_step(one, 1, [mgpu.cpu(0)], order=order) < 1e-10


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
def test_an_order_that_is_too_short_is_refused(training):
    one = training("alike")
    with mgpu.using_backend("mxnet"):
        one.step(2)
        files = one.save()
    with mgpu.using_backend("torch"):
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
        with pytest.raises(ValueError, match="shapes do not decide"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)])
        with pytest.raises(ValueError, match="not in the graph"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)],
                                   order=[*names[:-1], "few_weight"])
        with pytest.raises(ValueError, match="with a name twice"):
            mgpu.resume_from_gluon(*files, [mgpu.cpu(0)],
                                   order=[*names[:-1], names[0]])
    assert lock_step(one, 2, [mgpu.cpu(0)], order=names) < 1e-10
    # Those that the trainer was not given are "write" too.
    assert lock_step(one, 1, [mgpu.cpu(0)], order=names,
                     grad_req=one.requests()) < 1e-10


@live
def test_a_head_that_is_trained_alone(training):
    """The rest is frozen, if the trainer was given the whole dictionary."""
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
        go_on(files)
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
            go_on(files, **options)
        go_on(files, **options,
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
                go_on(files)
        else:
            notes = go_on(files).notes
            assert [x for x in notes if f"divided the sum of the gradients by "
                    f"{rows}. If that is not" in x]
        check_factor(one, go_on(files, batch_size=8), scale)


def check_factor(one, resumed, scale):
    """The notes say what to multiply the loss by, and then a step is that of
    `one`."""
    assert bool([x for x in resumed.notes if f"each loss by {scale:g}"
                 in x]) == (scale != 1)
    ordinary = mgpu.losses.SoftmaxCrossEntropyLoss()
    mgpu.train_batch(one.x, one.y, resumed.replicas,
                     lambda *x: scale * ordinary(*x), resumed.trainer)
    assert difference(resumed.replicas, one.values()) < 1e-10


@live
@pytest.mark.parametrize("rows", [None, 8])
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_a_factor_of_gradients_before_the_first_step(training, scale, rows):
    """No step has divided it."""
    one = training("small", rescale_grad=scale)
    with mgpu.using_backend("mxnet"):
        one.trainer._updaters[0].states.clear()
        files, requests = one.save(), one.requests()
        one.step()
    with mgpu.using_backend("torch"):
        resumed = go_on(files, grad_req=requests, batch_size=rows)
        assert not [x for x in resumed.notes if "last step" in x]
        check_factor(one, resumed, scale)


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
        replicas, trainer, notes = go_on(files)
        names = replicas.network.gluon_names()
        assert [names[p.name] for p in replicas.params()
                if p.grad_req == "null"] == [frozen]
        assert [x for x in notes if "so they are frozen" in x]
        assert [x for x in notes if "lr_mult as in the graph" in x]
        assert [x for x in notes if "running statistics are those" in x]
        assert set(trainer.lr_mult.values()) == {1.0, 0.5}
        assert not [x for x in notes if "begin at zero" in x]
        again = go_on(files, grad_req={frozen: "add"}, lr_mult={frozen: 0.25})
        assert [names[p.name] for p in again.replicas.params()
                if p.grad_req != "write"] == [frozen]
        assert [x for x in again.notes if "(grad_req 'add') begin at zero" in x
                ]
        assert set(again.trainer.lr_mult.values()) == {1.0, 0.5, 0.25}
    assert lock_step(one, 1, [mgpu.cpu(0)]) < 1e-10


@live
@pytest.mark.parametrize("optimizer, rows, options, named", [
    ("sgd-momentum", 8, {"learning_rate": 0.1}, "learning_rate=0.1 by 1.5e-"),
    ("sgd-momentum", 6, {}, "rescale_grad=0.16666666666666666 by 3.0e-08"),
    ("sgd-momentum", 8, {"lr_mult": 0.3}, "learning_rate=0.0375 by 4.0e-08"),
    ("sgd-momentum", 8, {"wd_mult": 0.3}, "wd=0.0046875 by 4.0e-08"),
    ("sgd-momentum", 8, {"schedule": 9}, "a rate of the schedule by up to 6."),
    ("adam", 8, {"learning_rate": 0.0625}, "the corrected rate of an update"),
    ("adam", 8, {"beta2": 0.999}, "1 - beta2 by 1.3e-05"),
    ("rmsprop", 8, {"gamma1": 0.9}, "1 - gamma1 by 2.4e-07"),
    ("sgd-momentum", 8, {}, None), ("adagrad", 8, {"learning_rate": 0.1},
                                    None)])
def test_what_float32_does_not_hold_is_reported(training, optimizer, rows,
                                                options, named):
    """By how much a step differs: at most so much of what it moves."""
    given = {key: options[key] for key in ("lr_mult", "wd_mult")
             if key in options}
    options = {key: x for key, x in options.items() if key not in given}
    if "schedule" in options:
        with mgpu.using_backend("mxnet"):
            import mxnet as mx
            options = {"lr_scheduler": mx.lr_scheduler.CosineScheduler(
                options["schedule"], base_lr=0.125)}
    one = training("small", optimizer, **options)
    one.x, one.y = one.x[:rows], one.y[:rows]
    for key, x in given.items():
        setattr(one.net[3].weight, key, x)
    found, notes = [], []
    with mgpu.using_backend("mxnet"):
        one.step(3)
    for _ in range(4):      # what is told at the first one holds for them
        with mgpu.using_backend("mxnet"):
            files, before = one.save(), one.values()
            one.step()
        with mgpu.using_backend("torch"):
            resumed = go_on(files, **{key: {one.net[3].weight.name: x}
                                      for key, x in given.items()})
            one_step(one, resumed)
        found.append(max(
            np.abs(x - expected).max() / np.abs(expected - before[name]).max()
            for name, x in values_of(resumed.replicas).items()
            for expected in [one.values()[name]] if "running" not in name))
        notes += [x for x in resumed.notes if "as float32" in x]
    if named is None:
        assert not notes and max(found) < 1e-10
        return
    assert named in notes[0]
    told = float(notes[0].partition("up to about ")[2].partition(" ")[0])
    assert told / 100 < max(found) < 1.1 * told


# -- a Module's ---------------------------------------------------------------

CROSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def smooth(out, y):
    import torch
    rows = torch.full_like(out, 0.125 / 2)
    rows[torch.arange(len(y)), y.long()] = 1 - 0.125
    return rows


def module(mx, folder, fixed=None, momentum=0.5, given="sgd", end=(),
           dtype="float32", rate=0.125, rows=8, store="local", **options):
    """A checkpoint of the symbol API after 3 steps, and a step more. The
    names of its weights, batches, and values then."""
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, name="fc1")
    x = mx.sym.Activation(x, act_type="tanh")
    x = mx.sym.FullyConnected(x, num_hidden=3, name="fc2")
    x = mx.sym.SoftmaxOutput(x, name="softmax", **dict(end))
    rng = np.random.default_rng(0)
    data, label = rng.normal(size=(rows, 4)), rng.integers(0, 3, rows)
    batch = mx.io.DataBatch([mx.nd.array(data, dtype=dtype)],
                            [mx.nd.array(label, dtype=dtype)])
    mod = mx.mod.Module(x, context=[mx.cpu(0), mx.cpu(1)],
                        fixed_param_names=fixed)
    mod.bind([mx.io.DataDesc("data", (rows, 4), dtype)],
             [mx.io.DataDesc("softmax_label", (rows,), dtype)])
    mx.random.seed(0)
    mod.init_params(mx.init.Xavier())
    options = {key: x for key, x in {
        "learning_rate": rate, "wd": 2 ** -6, "momentum": momentum,
        **options}.items() if x is not None}
    mod.init_optimizer(store, given if isinstance(given, str)
                       else given(**options), options)
    for i in range(4):
        if i == 3:
            mod.save_checkpoint(str(folder / "net"), 10,
                                save_optimizer_states=True)
            predicted = mod.predict(mx.io.NDArrayIter(
                np.array(data, dtype), batch_size=rows))
        mod.forward_backward(batch)
        mod.update()
    values = {name: x.asnumpy() for name, x in mod.get_params()[0].items()}
    return data, label, values, predicted.asnumpy(), [
        folder / name for name in ("net-symbol.json", "net-0010.params",
                                   "net-0010.states")]


def goes_on(made, *devices, optimizer="sgd", loss=None, **options):
    """How far a step from the files of a `module` in float64 is from its
    own."""
    data, label, expected, _, files = made
    with mgpu.using_backend("torch"):
        resumed = mgpu.resume_from_gluon(
            *files, devices or [mgpu.cpu(0)], optimizer=optimizer, **options)
        mgpu.train_batch(data, label, resumed.replicas, loss
                         or mgpu.losses.SoftmaxCrossEntropyLoss(),
                         resumed.trainer)
        return difference(resumed.replicas, expected), resumed.notes


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
        assert bool([x for x in resumed.notes if "trained on 2 devices" in x
                     ]) == (on_store == "0")
        assert difference(resumed.replicas, expected) < 1e-5


@live
@pytest.mark.parametrize("fixed", ["fc1", "fc2"])
def test_a_module_with_fixed_parameters(tmp_path, monkeypatch, fixed):
    """Its states are of as many devices as one wants, if they are empty."""
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        made = module(mx, tmp_path, [f"{fixed}_weight", f"{fixed}_bias"], 0.0,
                      dtype="float64")
    options = {"optimizer_params": {"learning_rate": 0.125, "wd": 2 ** -6}}
    with pytest.raises(ValueError, match="ways: so many may .*Pass order="):
        goes_on(made, **options)
    with pytest.raises(ValueError, match="order of the graph"):
        goes_on(made, order="sorted", **options)
    trained = "fc1" if fixed == "fc2" else "fc2"
    order = [f"{trained}_weight", f"{trained}_bias"]
    assert goes_on(made, order=order, **options)[0] < 1e-10


@live
@pytest.mark.parametrize("on_store", ["0", "1"])
def test_all_of_a_module(tmp_path, monkeypatch, on_store):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", on_store)
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        made = module(mx, tmp_path, momentum=0.0, dtype="float64")
    options = {"optimizer_params": {"learning_rate": 0.125, "wd": 2 ** -6}}
    assert goes_on(made, order="all", **options)[0] < 1e-10
    if on_store == "1":
        assert goes_on(made, **options)[0] < 1e-10
        with pytest.raises(ValueError, match="in 0 ways"):
            goes_on(made, order=["fc1_weight"], **options)


@live
@pytest.mark.parametrize("of_object", [False, True])
def test_multipliers_of_a_module(tmp_path, of_object):
    """MXNet decays biases too where the Module got an object."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        made = module(mx, tmp_path, given=mx.optimizer.SGD if of_object
                      else "sgd", dtype="float64")
    options = {"learning_rate": 0.125, "momentum": 0.5, "wd": 2 ** -6}
    off, notes = goes_on(made, optimizer_params=options)
    assert (off < 1e-10) != of_object
    assert [x for x in notes if "wd_mult as Module gives it to an optimiser "
            "by name; if it had an object, pass wd_mult= with 1" in x]
    assert [x for x in notes if "rescale_grad is one over the rows" in x]
    given = dict.fromkeys(("fc1_bias", "fc2.bias"), float(of_object))
    mine = mgpu.optimizers.SGD(**options)
    with pytest.raises(ValueError, match="received an Optimizer and no resc"):
        goes_on(made, optimizer=mine, wd_mult=given)
    if of_object:
        with pytest.raises(ValueError, match="another wd_mult than by "
                           "name for fc1.bias, fc2.bias and no rescale_grad"):
            goes_on(made, optimizer_params=options, wd_mult=given)
    scale = {"rescale_grad": 1.0 if of_object else 1 / 8}
    with pytest.raises(ValueError, match="none to an object of MXNet's; .*"
                       "no wd_mult for"):
        goes_on(made, optimizer=mine, optimizer_params=scale, batch_size=8)
    for how in ({"optimizer": mine, "optimizer_params": scale},
                {"optimizer_params": {**options, **scale}}):
        off, notes = goes_on(
            made, **how, batch_size=8, wd_mult=given,
            loss=lambda *x: 8 * scale["rescale_grad"] * CROSS(*x))
        assert off < 1e-10
        assert bool([x for x in notes if "each loss by 8" in x]) == of_object


@live
@pytest.mark.parametrize("rows", [None, 6, 8])
def test_the_rows_of_a_module_that_float32_does_not_hold(tmp_path, rows):
    """A note says so, where they are not known; where they are, how far."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        made = module(mx, tmp_path, dtype="float64", rows=rows or 6)
    off, notes = goes_on(made, batch_size=rows, optimizer_params={
        "learning_rate": 0.125, "momentum": 0.5, "wd": 2 ** -6})
    told = [x for x in notes if "as float32" in x]
    assert (off < 1e-10) == (rows == 8) == (not told)
    assert rows == 8 or (
        "rescale_grad=0.16666666666666666 by 3.0e-08" if rows else
        "no power of two, by up to 6.0e-08") in told[0]


@live
def test_a_module_whose_devices_differ_is_refused(tmp_path):
    """Without a store each device trains weights of its own."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        made = module(mx, tmp_path, dtype="float64", store=None)
    with pytest.raises(ValueError, match="those of 2 devices, which differ: "
                       "with kvstore=None"):
        goes_on(made, optimizer_params={"momentum": 0.5})


@live
@pytest.mark.parametrize("optimizer, options", [
    ("sgd", {"learning_rate": 0.25}), ("sgd", {}), ("adam", {})])
def test_options_of_a_module_as_they_were(tmp_path, optimizer, options):
    """Its schedule's rate is that of the optimiser, which MXNet gives to
    adam where nobody has."""
    def all_of(kinds):
        return {"rescale_grad": 2 ** -5, "wd": 2 ** -6,
                "multi_precision": True,
                "lr_scheduler": kinds.lr_scheduler.FactorScheduler(
                    2, 0.5, base_lr=2 ** -4), **options}
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        made = module(mx, tmp_path, given=optimizer, momentum=None,
                      dtype="float64", rate=None, **all_of(mx))
    with pytest.raises(ValueError, match="Pass batch_size=, the rows"):
        goes_on(made, optimizer=optimizer, optimizer_params=all_of(mgpu))
    off, notes = goes_on(
        made, optimizer=optimizer, batch_size=8, optimizer_params={
            **all_of(mgpu), "begin_num_update": 3},
        loss=lambda *x: 0.25 * CROSS(*x))
    assert off < (1e-6 if optimizer == "adam" else 1e-10)
    assert [x for x in notes if "multiply each loss by 0.25" in x]
    assert not [x for x in notes if "counts of updates begin at 0" in x]


@live
@pytest.mark.parametrize("end, loss", [
    ({"grad_scale": 0.25}, lambda out, y: 0.25 * CROSS(out, y)),
    ({"normalization": "batch"}, lambda out, y: CROSS(out, y) / len(y)),
    ({"normalization": "valid", "ignore_label": 2},
     lambda out, y: CROSS(out, y) / (y != 2).sum()),
    ({"use_ignore": True, "ignore_label": 2},
     lambda out, y: CROSS(out, y) * (y != 2)),
    ({"smooth_alpha": 0.125}, lambda out, y: mgpu.losses.
     SoftmaxCrossEntropyLoss(sparse_label=False)(out, smooth(out, y))),
    ({"preserve_shape": True}, lambda out, y: CROSS(out, y))],
    ids=["grad_scale", "batch", "valid", "use_ignore", "smooth_alpha",
         "preserve_shape"])
def test_options_of_the_loss_in_the_graph(tmp_path, end, loss):
    """Refused; the loss that the message names does what they did."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        made = module(mx, tmp_path, end=end, dtype="float64")
    devices = mgpu.cpu(0), mgpu.cpu(1)      # as many as the Module had
    options = {"optimizer_params": {"learning_rate": 0.125, "momentum": 0.5,
                                    "wd": 2 ** -6}}
    name, value = next(iter(end.items()))
    if name == "preserve_shape":    # of rows alone it does nothing
        assert goes_on(made, *devices, **options)[0] < 1e-10
        made[-1][0].write_text(made[-1][0].read_text().replace(
            '{"num_hidden": "3"}', '{"num_hidden": "3", "flatten": "False"}'))
    with pytest.raises(NotImplementedError, match=f"with {name}={value!r}, "
                       "which the losses of mgpu have not. Take"):
        goes_on(made, *devices, **options)
    graph = json.loads(made[-1][0].read_text())
    del next(node for node in graph["nodes"] if node["name"] == "softmax"
             )["attrs"]
    made[-1][0].write_text(json.dumps(graph))
    # MXNet's factor of the gradient is float32
    assert goes_on(made, *devices, loss=loss, **options)[0] < 1e-7


# -- what does not fit --------------------------------------------------------

GOLDEN = [FILES / "training" / f"net{end}" for end in (
    "-symbol.json", "-0000.params", ".states")]
STEPS = FILES / "training" / "steps.params"


@pytest.fixture
def golden(monkeypatch):
    """The files of a small training, and a way to change what is read of
    the states."""
    from mgpu import resuming

    def changed(edit, **options):
        found = load_trainer_states(GOLDEN[2])
        edit(found.states, found.optimizer.state)
        with monkeypatch.context() as patch, mgpu.using_backend("torch"):
            patch.setattr(resuming, "load_trainer_states", lambda _: found)
            return go_on(GOLDEN, **options)
    return changed


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
    (lambda s, o: o.pop("num_update"), ValueError,
     "net.states' has others, or is damaged .no 'num_update'"),
    (lambda s, o: o.update(num_update="3"), ValueError, "or is damaged"),
    (lambda s, o: o.pop("lr_scheduler"), ValueError, "no 'lr_scheduler'"),
    (lambda s, o: o.pop("rescale_grad"), ValueError, "no 'rescale_grad'"),
    (lambda s, o: o["lr_scheduler"].state.pop("base_lr"), ValueError,
     "or is damaged .no 'base_lr'"),
    (lambda s, o: o["lr_scheduler"].state.pop("step"), ValueError,
     "or is damaged .no 'step'"),
    (lambda s, o: o["lr_scheduler"].state.pop("warmup_steps"), ValueError,
     "or is damaged .no 'warmup_steps'"),
    (lambda s, o: o.update(beta1=2.0), ValueError,
     "options in the file of states: beta1 must"),
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
    ({"order": ["conv0.weight"] * 5}, "with a name twice"),
    ({"order": list("abcdefgh")}, "in the graph, whose names are as 'net_"),
    ({"grad_req": {"conv": "null"}}, "grad_req names parameters"),
    ({"lr_mult": {"conv": 2.0}}, "lr_mult names parameters")])
def test_what_is_asked_must_fit(golden, options, match):
    with pytest.raises(ValueError, match=match):
        golden(lambda states, state: None, **options)


@pytest.mark.skipif("torch" not in BACKENDS, reason="goes on with torch")
@pytest.mark.parametrize("optimizer, options, match", [
    (mgpu.optimizers.SGD(), {"wd": 0.25}, "received .'wd'. with an Optim"),
    ("sgd", {"begin_num_update": None}, "begin_num_update must be an"),
    ("sgd", {"begin_num_update": "6"}, "begin_num_update must be an"),
    ("sgd", {"rescale_grad": "1"}, "rescale_grad must be a"),
    ("sgd", {"lr_scheduler": abs}, "expected one lr_scheduler")])
def test_an_optimizer_that_is_given(optimizer, options, match):
    with mgpu.using_backend("torch"), pytest.raises(ValueError, match=match):
        mgpu.resume_from_gluon(
            *GOLDEN, [mgpu.cpu(0)], optimizer=optimizer,
            optimizer_params=options, lr_scheduler=lambda n: 0.1)


@pytest.mark.skipif("torch" not in BACKENDS, reason="goes on with torch")
def test_weights_of_another_file(tmp_path):
    """Not of `export`: said before the states are looked at."""
    arrays = load_params(GOLDEN[1])
    save_params(tmp_path / "a.params", {
        f"{i}.weight": x for i, x in enumerate(arrays.values())})
    with mgpu.using_backend("torch"), pytest.raises(
            ValueError, match="0.weight") as refusal:
        mgpu.resume_from_gluon(GOLDEN[0], tmp_path / "a.params", GOLDEN[2],
                               [mgpu.cpu(0)])
    assert "order" not in str(refusal.value)


@pytest.mark.parametrize("name", ["ftml", "lamb", "lars", "sgld", "dcasgd",
                                  "own"])
def test_optimizers_that_mgpu_has_not(name):
    with mgpu.using_backend(BACKENDS[0]), pytest.raises(
            NotImplementedError, match="has no counterpart"):
        mgpu.resume_from_gluon(*GOLDEN[:2], FILES / f"{name}.states",
                               [mgpu.cpu(0)])


@pytest.mark.parametrize("optimizer", [
    "groupadagrad", "LAMB", mgpu.optimizers.LARS()], ids=str)
def test_states_that_are_not_read_are_refused_of_a_given_optimizer_too(
        optimizer):
    with mgpu.using_backend(BACKENDS[0]), pytest.raises(
            NotImplementedError, match="has no counterpart"):
        mgpu.resume_from_gluon(*GOLDEN, [mgpu.cpu(0)], optimizer=optimizer)


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
                                 order="sorted", batch_norm="sync")
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
