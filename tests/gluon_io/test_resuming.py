"""Trainings of Gluon that mgpu resumes: every optimizer, on devices, and
schedules."""
import itertools

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import relative_difference
from mgpu.gluon_io import load_trainer_states

from .mutations import FILES
from .trainings import (OPTIMIZERS, at_start, difference, go_on, live,
                        lock_step, one_step, schedule_of, values_of)


@live
@pytest.mark.parametrize("network, optimizer", [
    *(("small", optimizer) for optimizer in OPTIMIZERS),
    # a constant that a block of symbols trains
    ("constant in symbols", "sgd-momentum")])
def test_every_optimizer_goes_on(training, network, optimizer):
    one = training(network, optimizer, steps=3)
    assert lock_step(one, 2) < 1e-10


#: whose kernels clip where the limit is above 0
CLIPPED = [name for name in OPTIMIZERS if name.partition("-")[0] in (
    "sgd", "nag", "adam", "rmsprop", "ftrl", "signum")]


def limited(training, optimizer, limit):
    """A training whose gradients and weights are clipped at `limit`."""
    return training("small", optimizer, steps=2, clip_gradient=limit, **(
        {"clip_weights": limit} if "rmsprop" in optimizer else {}))


@live
@pytest.mark.parametrize("optimizer, limit",
                         zip(CLIPPED, itertools.cycle((0, -1))))
def test_a_kernel_does_not_clip_at_a_limit_of_0_or_less(training, optimizer,
                                                        limit):
    one = limited(training, optimizer, limit)
    assert lock_step(one, 1) < 1e-10


@live
@pytest.mark.parametrize("optimizer, limit", zip(
    [name for name in OPTIMIZERS if name not in CLIPPED],
    itertools.cycle((0, -1))))
def test_a_limit_at_which_mxnets_python_clips_is_refused(training, optimizer,
                                                         limit):
    """To nothing, or to the limit itself."""
    with pytest.raises(ValueError,
                       match=f"clip_gradient must be .*received {limit}"):
        lock_step(limited(training, optimizer, limit), 1)


@live
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "nag"])
def test_a_momentum_that_was_set_to_0(training, optimizer):
    one = training("small", optimizer, steps=2)
    one.trainer._optimizer.momentum = 0.0
    assert lock_step(one, 1) < 1e-10


@live
@pytest.mark.parametrize("network, optimizer, begun", [
    ("small", "adam", {}), ("small", "nadam", {}),
    # whoever updates the states of two devices: the store, or each by itself
    ("few", "sgd-momentum", {"contexts": 2, "store": True}),
    ("few", "adam", {"contexts": 2, "store": False})])
def test_on_devices(training, devices, network, optimizer, begun):
    one = training(network, optimizer, steps=3, **begun)
    assert lock_step(one, 1, devices, batch_norm="sync") < 1e-10


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
        after = values_of(resumed.replicas)
    for key, found in after.items():
        copy = expected[key.removeprefix("arg:")]
        assert found.dtype == copy.dtype == np.float32
        # what is the same after the step is no proof
        assert relative_difference(before[key], copy) > 1e-5
        assert relative_difference(found, copy) < 3e-7


@live
@pytest.mark.parametrize("engine, network, optimizer, frozen", [
    ("mxnet", "small", "adam", 0),
    # it moves at a gamma that is 1, where MXNet updates that
    ("mxnet", "scaled", "nadam", 1), ("torch", "scaled in symbols", "nadam", 1)
])
def test_it_goes_on_alone(training, engine, network, optimizer, frozen):
    """Two steps after one another."""
    one = training(network, optimizer, wd=0.0, steps=1)
    files = one.save()
    one.step(2)
    expected = one.values()
    with mgpu.using_backend(engine):
        resumed = go_on(files)
        for _ in range(2):
            one_step(one, resumed)
        assert difference(resumed.replicas, expected) < 1e-10
        assert resumed.trainer.num_update == 3
        assert frozen == len([p for p in resumed.replicas.params()
                              if p.grad_req == "null"])


@live
def test_nadam_on_devices_in_turn_is_refused(training):
    """One schedule of momentum for all moves at each of them."""
    one = training("small", "nadam", steps=1)
    counts = one.trainer._optimizer._all_index_update_counts
    counts[1] = dict(counts[0])
    files = one.save()
    with pytest.raises(ValueError, match="states of 2 devices"):
        go_on(files)


#: of a schedule; the optimizer, its options, and steps before the files
SCHEDULES = [
    ("FactorScheduler", {"step": 2}, "sgd", {"learning_rate": 0.25}, 3),
    ("FactorScheduler", {"step": 1, "warmup_steps": 6}, "sgd", {}, 3),
    ("MultiFactorScheduler", {"step": [1, 4]}, "sgd", {}, 3),
    ("PolyScheduler", {"max_update": 8, "warmup_steps": 2}, "sgd",
     {"learning_rate": 0.25}, 3),
    ("PolyScheduler", {"max_update": 2, "final_lr": 2 ** -6}, "sgd", {}, 3),
    ("CosineScheduler", {"max_update": 8, "final_lr": 2 ** -6}, "sgd", {}, 3),
    # before the first update
    ("FactorScheduler", {"step": 3}, "sgd", {"begin_num_update": 10}, 0),
    ("MultiFactorScheduler", {"step": [4, 11]}, "sgd",
     {"begin_num_update": 10}, 0),
    # Ftrl has a rate besides, and AdaDelta asks for none
    ("MultiFactorScheduler", {"step": [1, 3]}, "ftrl", {}, 0),
    ("MultiFactorScheduler", {"step": [1, 3]}, "adadelta", {}, 3),
    ("MultiFactorScheduler", {"step": [1, 3]}, "adadelta",
     {"learning_rate": 0.25}, 0)]


@live
@pytest.mark.parametrize("name, arguments, optimizer, options, steps",
                         SCHEDULES)
def test_schedules_go_on(training, name, arguments, optimizer, options,
                         steps):
    """Their rates, whether somebody has looked at them or not."""
    if "Factor" in name:
        arguments = {"factor": 0.5, **arguments}
    if optimizer == "sgd":
        options = {"learning_rate": None, **options}
    schedule = schedule_of(name, base_lr=0.5, **arguments)
    one = training("distinct", optimizer, lr_scheduler=schedule, steps=steps,
                   **options)
    if not steps:
        at_start(one)
    if arguments.get("step") == [4, 11]:
        assert one.trainer.learning_rate < 0.5
    trainer = go_on(one.save(), grad_req=one.requests()).trainer
    begin = steps + 1 + options.get("begin_num_update", 0)
    assert [trainer.rate(n) for n in range(begin, begin + 8)] == [
        schedule(n) for n in range(begin, begin + 8)]


# -- what does not fit --------------------------------------------------------

GOLDEN = [FILES / "training" / f"net{end}" for end in (
    "-symbol.json", "-0000.params", ".states")]
on_torch = pytest.mark.skipif("torch" not in BACKENDS,
                              reason="resumes with torch")


@pytest.fixture
def golden(monkeypatch):
    """The files of a small training, and a way to change what is read of
    the states."""
    from mgpu.checkpoints import resuming

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


@on_torch
@pytest.mark.parametrize("edit, error, match", [
    (_exchange, ValueError, "its state has"),
    (lambda s, o: s.update({99: s.pop(max(s))}), ValueError,
     "no parameter 99"),
    (lambda s, o: o["_all_index_update_counts"].update({1: dict.fromkeys(
        s, 1)}), ValueError, "as often as the others"),
    (lambda s, o: o.pop("num_update"), ValueError,
     "net.states' has others, or is damaged .no 'num_update'"),
    (lambda s, o: o.update(num_update="3"), ValueError,
     "has others, or is damaged"),
    (lambda s, o: o.pop("lr_scheduler"), ValueError, "no 'lr_scheduler'"),
    (lambda s, o: o.pop("rescale_grad"), ValueError, "no 'rescale_grad'"),
    (lambda s, o: o["lr_scheduler"].state.pop("base_lr"), ValueError,
     "or is damaged .no 'base_lr'"),
    (lambda s, o: o["lr_scheduler"].state.pop("step"), ValueError,
     "or is damaged .no 'step'"),
    (lambda s, o: o["lr_scheduler"].state.pop("warmup_steps"), ValueError,
     "or is damaged .no 'warmup_steps'"),
    (lambda s, o: o.update(beta1=2.0), ValueError,
     "beta1 must"),
    (lambda s, o: s.update({max(s): None}), ValueError,
     "received 0 arrays for"),
    (lambda s, o: o.pop("beta1"), ValueError, "no 'beta1'"),
    (lambda s, o: o["lr_scheduler"].state.update(base_lr=3.0), ValueError,
     "changed manually"),
    (lambda s, o: setattr(type(o["lr_scheduler"]), "kind", "own.Schedule"),
     NotImplementedError, "own.Schedule.*Pass lr_scheduler="),
], ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_fit_is_refused(golden, edit, error, match):
    with pytest.raises(error, match=match):
        golden(edit)


@on_torch
@pytest.mark.parametrize("options, match", [
    ({"optimizer": "adam"}, "Leave optimizer= out"),
    ({"optimizer_params": {"wd": 1.0}}, "go with an optimizer's name"),
    ({"order": "natural"}, "order is 'sorted'"),
    ({"order": ["conv0.weight"] * 5}, "with a name twice"),
    ({"order": list("abcdefgh")}, "in the graph, whose names are as 'net_"),
    ({"grad_req": {"conv": "null"}}, "grad_req names parameters"),
    ({"lr_mult": {"conv": 2.0}}, "lr_mult must name parameters")])
def test_what_is_asked_must_fit(golden, options, match):
    with pytest.raises(ValueError, match=match):
        golden(lambda states, state: None, **options)


@on_torch
@pytest.mark.parametrize("optimizer, options, match", [
    (mgpu.optimizers.SGD(), {"wd": 0.25}, "received .'wd'. with an Optim"),
    ("sgd", {"begin_num_update": None}, "begin_num_update must be an"),
    ("sgd", {"begin_num_update": "6"}, "begin_num_update must be an"),
    ("sgd", {"rescale_grad": "1"}, "rescale_grad must be a")])
def test_an_optimizer_that_is_given(optimizer, options, match):
    with mgpu.using_backend("torch"), pytest.raises(ValueError, match=match):
        mgpu.resume_from_gluon(
            *GOLDEN, [mgpu.cpu(0)], optimizer=optimizer,
            optimizer_params=options, lr_scheduler=lambda n: 0.1)


@pytest.mark.parametrize("states, optimizer", [
    *((name, None) for name in ("ftml", "lamb", "lars", "sgld", "dcasgd",
                                "own")),
    # whose states are not read
    *(("training/net", given) for given in (
        "groupadagrad", "LAMB", mgpu.optimizers.LARS()))], ids=str)
def test_optimizers_that_mgpu_has_not(states, optimizer):
    with mgpu.using_backend(BACKENDS[0]), pytest.raises(
            NotImplementedError, match="has no counterpart"):
        mgpu.resume_from_gluon(*GOLDEN[:2], FILES / f"{states}.states",
                               [mgpu.cpu(0)], optimizer=optimizer)
