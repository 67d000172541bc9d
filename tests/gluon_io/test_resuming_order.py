"""What Gluon's files do not say: the order of parameters, what is frozen, the
size of a batch, and what float32 does not hold."""
import numpy as np
import pytest

import mgpu

from .trainings import (GIVEN, at_start, difference, go_on, live, lock_step,
                        one_step, schedule_of, values_of)


@live
@pytest.mark.parametrize("network, given", [
    ("small", "sorted"), ("small", "head first"), ("few", "list"),
    ("few", "reversed"), ("small", "attributes")])
def test_an_order_that_shapes_do_not_decide(training, network, given):
    """Refused, whether the sorted names fit or not; right where it is
    said."""
    one = training(network, given=given, steps=3)
    files = one.save()
    fit = network == "few" or given in ("sorted", "attributes")
    with pytest.raises(ValueError, match="whose shapes do not decide" + (
            ".*Pass order='sorted' for" if fit else
            ".*They do not fit the sorted names: number")):
        go_on(files, order=None)
    if not fit:
        with pytest.raises(ValueError, match="not fit the sorted names"):
            go_on(files)
    assert lock_step(one, 1, order=one.order) < 1e-10


@live
@pytest.mark.parametrize("optimizer, given", zip(
    ("sgd-momentum", "nadam") * 3, GIVEN))
def test_an_order_that_shapes_decide(training, given, optimizer):
    one = training("distinct", optimizer, given=given, steps=3)
    assert lock_step(one, 2, order=None) < 1e-10


@live
def test_states_that_are_all_the_same_need_no_order(training):
    """Those of sgd, which are none; but in Nadam's place something moves."""
    one = training("few", "sgd", given="reversed", steps=3)
    assert lock_step(one, 1, order=None) < 1e-10
    for given, order in (("reversed", None), ("sorted", "sorted"),
                         ("reversed", ())):
        one = training("few", "nadam", given=given)
        order = one.order if order == () else order
        at_start(one)
        if order is None:
            with pytest.raises(ValueError,
                               match="depends on those before it"):
                go_on(one.save(), order=None)
        else:
            assert lock_step(one, 1, order=order) < 1e-10


@live
def test_another_order_is_another_training(training):
    """Two parameters of one shape that are exchanged: the proof above sees
    it."""
    one = training("mlp", steps=3)
    order = sorted(one.list)
    a, b = order.index("mlp_dense2_weight"), order.index("mlp_dense7_weight")
    order[a], order[b] = order[b], order[a]
    assert lock_step(one, 1, order=order) > 1e-6


@live
def test_an_order_that_is_too_short_is_refused(training):
    one = training("alike", steps=2)
    files = one.save()
    with pytest.raises(ValueError, match="no parameter 10"):
        go_on(files, order=sorted(one.list)[:-1])
    for order in (sorted(one.list), "sorted"):
        assert lock_step(one, 1, order=order) < 1e-10


@live
@pytest.mark.parametrize("optimizer, first, last", [
    ("sgd", 1, 4), ("sgd-momentum", 3, 5)])
def test_a_trainer_of_a_part(training, first, last, optimizer):
    """Its states have the numbers of the first parameters of all."""
    one = training("few", optimizer, part=slice(first, last))
    names = sorted(one.list[first:last])
    one.step(2)
    files = one.save()
    with pytest.raises(ValueError, match="shapes do not decide"):
        go_on(files, order=None)
    with pytest.raises(ValueError, match="not in the graph"):
        go_on(files, order=[*names[:-1], "few_weight"])
    with pytest.raises(ValueError, match="with a name twice"):
        go_on(files, order=[*names[:-1], names[0]])
    assert lock_step(one, 2, order=names) < 1e-10
    # Those that the trainer was not given are "write" too.
    assert lock_step(one, 1, order=names, grad_req=one.requests()) < 1e-10


@live
def test_a_head_that_is_trained_alone(training):
    """The rest is frozen, if the trainer was given the whole dictionary."""
    one = training("mlp")
    for name in one.list:
        if "dense9" not in name:
            one.freeze(name, "null")
            del one.trainer._updaters[0].states[sorted(one.list).index(name)]
    one.step(2)
    assert lock_step(one, 1) < 1e-10


@live
@pytest.mark.parametrize("now", ["null", "write"])
def test_what_was_frozen_for_a_time(training, now):
    """Fewer updates are of one that is frozen now, or is not any more."""
    one = training("small")
    name = one.list[0]
    one.step()
    one.freeze(name, "null")
    one.step(2)
    one.freeze(name, now)
    files = one.save()
    with pytest.raises(ValueError, match=f"1 with fewer: {name} .1.*Pass "
                       "grad_req="):
        go_on(files)
    assert lock_step(one, 2, grad_req={name: now}) < 1e-10


@live
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_schedule_at_what_was_frozen(training, optimizer):
    """MXNet gives it the rate of the update before, where it stands first."""
    schedule = schedule_of("FactorScheduler", 1, 0.5, base_lr=2 ** -10)
    one = training("small", optimizer, lr_scheduler=schedule,
                   learning_rate=2 ** -10)
    first, second = (x for x in sorted(one.list)
                     if x.endswith(("beta", "gamma")))
    for name, refused in ((second, False), (first, True)):
        one.step()
        one.freeze(name, "null")
        one.step()
        one.freeze(name, "write")
        files = one.save()
        options = {"grad_req": dict.fromkeys((first, second), "write")}
        if not refused:
            assert lock_step(one, 1, **options) < 1e-10
    with pytest.raises(ValueError, match=f"received {first}, the first"):
        go_on(files, **options)
    go_on(files, **options, lr_scheduler=lambda n: 0.125)


@live
@pytest.mark.parametrize("scale, steps, rows", [
    (1.0, 2, 8), (0.5, 2, 16), (0.75, 2, None),
    # before the first step, none has divided it
    (1.0, 0, None), (0.125, 0, 8)])
def test_a_factor_of_gradients(training, scale, steps, rows):
    """The file has its quotient by the batch size; the notes say what to
    multiply the loss by, and then a step is that of MXNet."""
    one = training("small", rescale_grad=scale, steps=steps)
    if not steps:
        at_start(one)
    files, options = one.save(), {"grad_req": one.requests()}
    one.step()
    if not steps:
        options["batch_size"] = rows
    elif rows is None:
        with pytest.raises(ValueError, match="Pass batch_size="):
            go_on(files)
    else:
        assert [x for x in go_on(files).notes if "divided the sum of the "
                f"gradients by {rows}. If that is not" in x]
    resumed = go_on(files, **{"batch_size": 8, **options})
    assert steps or not [x for x in resumed.notes if "last step" in x]
    assert bool([x for x in resumed.notes if f"each loss by {scale:g}"
                 in x]) == (scale != 1)
    ordinary = mgpu.losses.SoftmaxCrossEntropyLoss()
    one_step(one, resumed, lambda *x: scale * ordinary(*x))
    assert difference(resumed.replicas, one.values()) < 1e-10


@live
def test_frozen_parameters_and_multipliers(training):
    one = training("small")
    frozen = one.list[0]
    one.net.collect_params()[frozen].grad_req = "null"
    del one.trainer._updaters[0].states[sorted(one.list).index(frozen)]
    one.step(3)
    files = one.save()
    replicas, trainer, notes = go_on(files)
    names = replicas.network.gluon_names()
    assert [names[p.name] for p in replicas.params()
            if p.grad_req == "null"] == [frozen]
    assert [x for x in notes if "so they are frozen" in x]
    assert [x for x in notes if "lr_mult as in the graph" in x]
    assert set(trainer.lr_mult.values()) == {1.0, 0.5}
    assert not [x for x in notes if "begin at zero" in x]
    again = go_on(files, grad_req={frozen: "add"}, lr_mult={frozen: 0.25})
    assert [names[p.name] for p in again.replicas.params()
            if p.grad_req != "write"] == [frozen]
    assert [x for x in again.notes if "(grad_req 'add') begin at zero" in x]
    assert set(again.trainer.lr_mult.values()) == {1.0, 0.5, 0.25}
    assert lock_step(one, 1) < 1e-10


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
        options = {"lr_scheduler": schedule_of(
            "CosineScheduler", options["schedule"], base_lr=0.125)}
    one = training("small", optimizer, **options)
    one.x, one.y = one.x[:rows], one.y[:rows]
    for key, x in given.items():
        setattr(one.net[3].weight, key, x)
    found, notes = [], []
    one.step(3)
    for _ in range(2):      # what is told at the first one holds for both
        files, before = one.save(), one.values()
        one.step()
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


# -- before the first step ---------------------------------------------------

@live
def test_nadam_at_a_gamma_that_is_1_and_has_no_state(training):
    """The files do not say whether MXNet will update it."""
    one = training("scaled in symbols", "nadam", wd=0.0)
    at_start(one)
    files = one.save()
    with pytest.raises(ValueError, match="no state of .*'null' or 'write'"):
        go_on(files)
    for request, same in (("null", False), ("write", True)):
        resumed = go_on(files, grad_req={"scaled_z0_gamma": "write",
                                         "scaled_z1_gamma": request})
        for _ in range(2):
            one_step(one, resumed)
        if request == "null":
            one.step(2)
        off = difference(resumed.replicas, one.values())
        assert (off < 1e-10) == same


@live
@pytest.mark.parametrize("network", ["small", "scaled", "scaled in symbols",
                                     "constant in symbols"])
def test_what_is_trained_before_the_first_step_is_asked_for(training,
                                                            network):
    """A gamma of 1 may be of a layer without a scale; a block of symbols
    trains a constant, and a layer does not."""
    one = training(network, wd=0.0)
    one.freeze(one.list[0], "null")
    at_start(one)
    files, requests = one.save(), one.requests()
    with pytest.raises(
            ValueError, match="no state of .*(gamma|factor).*grad_req= with"):
        go_on(files)
    resumed = go_on(files, grad_req=requests)
    assert not [x for x in resumed.notes if "the first update" in x]
    for _ in range(2):
        one_step(one, resumed)
    one.step(2)
    assert difference(resumed.replicas, one.values()) < 1e-10


@live
def test_what_is_frozen_before_the_first_step_is_noted(training):
    """Weights may be frozen by the user alone; a list says which are."""
    one = training("distinct")
    at_start(one)
    files = one.save()
    for order, note, frozen in (
            ("sorted", "do not say what is frozen", 0),
            (one.list[2:], "order= has not named them, so they are", 2)):
        resumed = go_on(files, order=order)
        assert [x for x in resumed.notes if note in x]
        assert frozen == len([p for p in resumed.replicas.params()
                              if p.grad_req == "null"])
