"""Accuracy: integer counts, the same on any number of devices."""
import contextlib
import functools
import re
import warnings

import numpy as np
import pytest

import mgpu
from batches import classes, pictures, rows
from helpers import (ENGINES, assert_all_equal, assert_bit_equal, convnet,
                     mlp, on, using_engine)
from nets import native_values, several_inputs

#: rows of the batches: uneven, and fewer than the devices
ROWS = (16, 7, 3, 1)


def batches_of(X, y, rows=ROWS):
    ends = np.cumsum(rows)
    return [(X[end - n:end], y[end - n:end]) for n, end in zip(rows, ends)]


@functools.lru_cache
def integers():
    """Integer inputs (27, 6), labels, and an integer weight (4, 6): every
    score is a small integer, exact in float32, and many are equal."""
    rng = np.random.default_rng(0)
    X = rng.integers(-2, 3, (sum(ROWS), 6)).astype("float32")
    weight = rng.integers(-1, 2, (4, 6)).astype("float32")
    y = rng.integers(0, 4, len(X))
    scores = X @ weight.T
    y[::2] = scores[::2].argmax(1)      # half of them right
    ties = (np.sort(scores, 1)[:, -1] == np.sort(scores, 1)[:, -2]).sum()
    assert ties >= 5
    return X, y, weight


def exact():
    """The accuracy of `integers`, in NumPy: of equal scores the first."""
    X, y, weight = integers()
    return int(((X @ weight.T).argmax(1) == y).sum()) / len(X)


def linear(engine, devices):
    """Replicas with those weights."""
    replicas = mgpu.initialize(mlp(engine, units=(6, 4)), devices, "uniform")
    replicas.import_numpy({"0.weight": integers()[2],
                           "0.bias": np.zeros(4)})
    return replicas


def data():
    X, y, _ = integers()
    return batches_of(X, y)


# -- accuracy -----------------------------------------------------------------

def test_accuracy_counts(engine):
    scores = np.float32([[0, 1, 0], [2, 2, 1], [0, 0, 0], [5, 4, 9]])
    labels = np.array([1, 0, 0, 1])
    column = labels.reshape(4, 1)
    for y_hat in (scores, mgpu.put(scores, mgpu.cpu(1)),
                  scores.argmax(1), scores.argmax(1).reshape(4, 1)):
        for y in (labels, labels.astype("float32"), column,
                  mgpu.put(labels, mgpu.cpu(0)), labels.tolist()):
            count = mgpu.accuracy(y_hat, y)
            assert count == 3 and type(count) is int
    assert mgpu.accuracy(scores[:0], labels[:0]) == 0
    # 2 ** 24 + 1 is no float32: it must not become the next class.
    big = np.array([2 ** 24 + 1])
    assert mgpu.accuracy(big, big - 1) == 0


def test_accuracy_of_shapes_and_labels_that_do_not_fit(engine):
    """Labels that are no class numbers would count as wrong predictions."""
    for y_hat, y in ((np.ones((3, 2)), np.ones(2)),
                     (np.ones((3, 1)), np.ones((3, 4))),
                     (np.ones((3, 2)), np.ones((3, 2))),
                     (np.ones((3, 2, 2)), np.ones(3)),
                     (np.float32(1), np.float32(1)),
                     (np.ones(4), np.ones((2, 2)))):
        with pytest.raises(ValueError, match=re.escape(
                f"received shapes {y_hat.shape} and {y.shape}.")):
            mgpu.accuracy(y_hat, y)
    for wrong in (1.5, np.nan):
        with pytest.raises(ValueError, match=f"are whole; received {wrong}."):
            mgpu.accuracy(mgpu.put(np.eye(2), mgpu.cpu(0)),
                          np.array([1, wrong]))


def test_scores_of_a_single_output_are_no_class_numbers(engine, devices):
    """They would be compared with 0 and 1: an accuracy of 0. Thresholds make
    class numbers of them."""
    X = rows(4, dtype="float64")
    replicas = mgpu.initialize(mlp(engine, units=(6, 1)), devices, "xavier",
                               seed=1, dtype="float64")
    scores = replicas.predict(X)
    y = (scores[:, 0] > 0).astype("float64")
    y[2] = 1 - y[2]
    for call in (lambda: mgpu.accuracy(scores, y),
                 lambda: mgpu.accuracy(scores[:, 0], y),
                 lambda: mgpu.evaluate_accuracy_gpus(replicas, [(X, y)])):
        with pytest.raises(ValueError, match="class numbers are whole; "
                           "received .* make class numbers: pred > 0"):
            call()
    assert mgpu.accuracy(mgpu.put(scores, mgpu.cpu(0)) > 0, y) == 3
    assert mgpu.evaluate_accuracy_gpus(
        [lambda x, run=run: run(x) > 0 for run in replicas], [(X, y)],
        devices=devices) == 0.75


# -- the same count on any number of devices ----------------------------------

def test_integer_networks_have_the_exact_count(engine, devices):
    """The integer sum of hits is that of NumPy, to the last one, on every
    backend and number of devices: equal scores included."""
    replicas = linear(engine, devices)
    assert mgpu.evaluate_accuracy_gpus(replicas, data()) == exact()
    assert 0.3 < exact() < 1
    for device in devices:
        assert mgpu.evaluate_accuracy_gpu(replicas, data(), device) == exact()


# -- forms of `net` -----------------------------------------------------------

def native(engine, devices):
    """A network of the framework, initialized by its own means."""
    weight = integers()[2]
    net = mlp(engine, units=(6, 4))
    if engine.name == "mxnet":
        net.initialize(ctx=[engine.handle(d) for d in devices])
        net[0].weight.set_data(engine.put(weight, devices[0]))
        net[0].bias.set_data(engine.put(np.zeros(4, "float32"), devices[0]))
    else:
        net.load_state_dict({"0.weight": engine.put(weight, devices[0]),
                             "0.bias": engine.put(np.zeros(4), devices[0])})
    return net


def test_forms_of_net(engine, devices):
    """A Gluon Block runs on the contexts that it was initialized on; of a
    torch module every device that is named gets a copy."""
    net, replicas = native(engine, devices), linear(engine, devices)
    for form, options in (
            (net, {}), (net, {"devices": devices}),
            (list(replicas), {"devices": devices}),
            (tuple(replicas), {"devices": devices}),
            ([lambda x, r=r: r(x) for r in replicas], {"devices": devices}),
            ([replicas[0]], {"device": devices[0]})):
        assert mgpu.evaluate_accuracy_gpus(form, data(), **options) == exact()
    for form, *device in ((net,), (net, devices[-1]),
                          ([replicas[0]], devices[0])):
        assert mgpu.evaluate_accuracy_gpu(form, data(), *device) == exact()


def test_a_user_defined_split(engine, devices):
    seen = []

    def split(X, y, places):
        seen.append(places)
        return mgpu.split_batch(X, y, places,
                                weights=range(1, len(places) + 1))
    assert mgpu.evaluate_accuracy_gpus(linear(engine, devices), data(),
                                       split) == exact()
    assert seen == [devices] * len(ROWS)


# -- nothing is touched -------------------------------------------------------

def test_flags_statistics_and_gradients_stay(engine, devices):
    """In prediction mode, also inside `record`; a torch user's own flags are
    as they were, each of them."""
    X, y = pictures(9, dtype="float64"), classes(9)
    replicas = mgpu.initialize(convnet(engine), devices, "xavier",
                               dtype="float64")
    with mgpu.record():
        outputs = replicas([mgpu.put(X, d) for d in devices])
    mgpu.backward(outputs)
    if engine.name == "torch":
        replicas.net[1].eval()

    def arrays():
        return [mgpu.to_numpy(x) for p in replicas.all_parameters()
                for x in p.list_data()] + [mgpu.to_numpy(g) for p in
                                           replicas.params()
                                           for g in p.list_grad()]

    def flags():
        return engine.name == "torch" and [m.training for m in
                                           replicas.net.modules()]
    before, found = (arrays(), flags()), []
    for net, options in ((replicas, {}), (replicas, {"device": devices[-1]}),
                         (replicas.net, {})):
        for scope in (mgpu.record, mgpu.no_grad):
            with scope():
                modes = engine.is_recording(), engine.is_training()
                found.append(mgpu.evaluate_accuracy_gpus(
                    net, [(X, y)] * 2, **options))
                assert modes == (engine.is_recording(), engine.is_training())
    assert len(set(found)) == 1
    for a, b in zip(arrays(), before[0], strict=True):
        assert_bit_equal(a, b)
    assert flags() == before[1]


def test_all_devices_use_the_networks_statistics(engine):
    """Also with ``batch_norm="per_device"``, where another device trains with
    its own, which may be exported."""
    replicas = mgpu.initialize(convnet(engine), on(0, 1), "xavier")
    X, values = pictures(40), replicas.export_numpy()
    replicas.import_numpy({**values, **{
        p.name: np.stack([values[p.name], values[p.name] + 3])
        for p in replicas.statistics() if p.kind == "running_mean"}})
    y = mgpu.to_numpy(replicas[0](mgpu.put(X, mgpu.cpu(0)))).argmax(1)
    for device in (None, *on(0, 1)):
        assert mgpu.evaluate_accuracy_gpus(replicas, [(X, y)],
                                           device=device) == 1
        assert (replicas.predict(X, device=device).argmax(1) == y).all()
    one = mgpu.initialize(convnet(engine), on(0), "xavier")
    with warnings.catch_warnings():     # one device's statistics: no mean
        warnings.simplefilter("error", UserWarning)
        one.import_numpy(replicas.export_numpy(device="cpu:1"))
    assert mgpu.evaluate_accuracy_gpus(one, [(X, y)]) < 1


# -- wrong arguments ----------------------------------------------------------

def test_wrong_arguments_are_refused(backend):
    replicas = linear(backend, on(1, 2))
    f = replicas[0]

    elsewhere = "the network is on .cpu.1., cpu.2..; received .cpu.0..."
    for net, batches, options, text in (
            (replicas, data(), {"devices": on(1, 2), "device": "cpu:1"},
             "device= names one device and devices= all"),
            (replicas, data(), {"device": "cpu:0"}, elsewhere),
            (replicas, data(), {"devices": on(0, 1)}, elsewhere),
            ([f, f], data(), {}, ""), ([f], data(), {"devices": on(1, 2)},
                                       "argument 2 is longer"),
            (replicas, iter([]), {}, "needs at least one example")):
        with pytest.raises((TypeError, ValueError), match=text or None):
            mgpu.evaluate_accuracy_gpus(net, batches, **options)


def test_one_of_two_outputs_is_evaluated(engine, devices):
    """An auxiliary head: which of the two is the accuracy of?"""
    replicas = mgpu.initialize(several_inputs(
        engine, lambda dense, x: (dense(x), x)), devices, "xavier")
    X = rows(6)
    y = replicas.predict(X)[0].argmax(1)
    y[1] = (y[1] + 1) % 3
    with pytest.raises(TypeError, match="whose output is a tuple of 2 arrays"
                       ". Select one: pass devices= and a list"):
        mgpu.evaluate_accuracy_gpus(replicas, [(X, y)])
    assert mgpu.evaluate_accuracy_gpus(
        [lambda x, run=run: run(x)[0] for run in replicas], [(X, y)],
        devices=devices) == 5 / 6


def test_a_block_is_evaluated_where_it_is(backend):
    """Contexts are real on MXNet; on torch every CPU device is the CPU."""
    net = native(backend, on(1, 2))
    with contextlib.nullcontext() if backend.name == "torch" else \
            pytest.raises(ValueError, match=(
                r"the network is on \[cpu\(1\), cpu\(2\)\]; received \[cpu"
                r"\(0\)\]. Evaluate on")):
        assert mgpu.evaluate_accuracy_gpus(net, data(), device="cpu:0") \
            == exact()


def test_a_list_of_native_networks_predicts(engine):
    """Training mode and statistics of each network stay as they are."""
    devices = on(0, 1)
    nets = [convnet(engine) for _ in devices]
    for net, device in zip(nets, devices):
        mgpu.initialize(net, [device], "xavier", seed=3)
    batch = [(pictures(8), classes(8))]
    before = [native_values(engine, net) for net in nets]
    assert mgpu.evaluate_accuracy_gpus(nets, batch, devices=devices) \
        == mgpu.evaluate_accuracy_gpus(nets[:1], batch, devices=devices[:1])
    for old, net in zip(before, nets):
        assert_all_equal(native_values(engine, net), old)


@pytest.mark.parametrize("engine_name", [
    engine for engine in ENGINES if engine.startswith("mxnet")])
def test_an_error_of_mxnet_does_not_come_up_in_a_later_call(engine_name):
    """MXNet stores the error of an operation and raises it at the next wait.
    (It has no float16 Dense on CPUs.)"""
    with using_engine(engine_name) as engine:
        with contextlib.suppress(Exception):    # left by another test
            mgpu.synchronize(on(0))
        x = np.ones((4, 6), "float16")

        def evaluate():
            replicas = mgpu.initialize(mlp(engine), on(0, 1, 2),
                                       dtype="float16")
            mgpu.evaluate_accuracy_gpus(replicas, [(x, np.zeros(4))])
        for call in (evaluate, lambda: mgpu.initialize(
                mlp(engine, deferred=True), on(0, 1), dtype="float16",
                sample=x)):
            with pytest.raises(Exception, match="float16 fully connected"):
                call()
            mgpu.synchronize(on(0, 1, 2))       # waits for everything
