"""Trainings of a Module, MXNet's symbol API, that mgpu resumes."""
import json

import numpy as np
import pytest

import mgpu
from helpers import relative_difference

from .trainings import difference, live, on_mxnet, schedule_of

CROSS = mgpu.losses.SoftmaxCrossEntropyLoss()
#: of the optimizer of a `module`
OPTIONS = {"learning_rate": 0.125, "momentum": 0.5, "wd": 2 ** -6}


def smooth(out, y):
    import torch
    rows = torch.full_like(out, 0.125 / 2)
    rows[torch.arange(len(y)), y.long()] = 1 - 0.125
    return rows


@on_mxnet
def module(folder, fixed=None, momentum=0.5, given="sgd", end=(),
           dtype="float64", rate=0.125, rows=8, store="local",
           of_object=False, **options):
    """A checkpoint of the symbol API after 3 steps, and a step more. The
    names of its weights, batches, and values then."""
    import mxnet as mx
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
    mod.init_optimizer(store, mx.optimizer.SGD(**options) if of_object
                       else given, options)
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
        mgpu.train_batch(data, label, resumed.replicas, loss or CROSS,
                         resumed.trainer)
        return difference(resumed.replicas, expected), resumed.notes


@live
@pytest.mark.parametrize("engine, on_store", [("torch", "1"), ("mxnet", "0")])
def test_a_module_goes_on(tmp_path, monkeypatch, engine, on_store):
    """It trains in float32, on two devices, and its states have numbers for
    each device, or names. Its end predicts, or gives what enters it."""
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", on_store)
    data, label, expected, predicted, files = module(
        tmp_path, dtype="float32")
    with mgpu.using_backend(engine):
        net = mgpu.from_gluon(*files[:2])
        view = mgpu.initialize(net, [mgpu.cpu(0)])
        found = mgpu.to_numpy(view[0](mgpu.put(np.float32(data), mgpu.cpu(0))))
        assert relative_difference(found, predicted) < 1e-5
        resumed = mgpu.resume_from_gluon(
            *files, [mgpu.cpu(0)], optimizer="sgd", optimizer_params={
                "learning_rate": 0.125, "momentum": 0.5, "wd": 2 ** -6,
                "begin_num_update": 3})
        mgpu.train_batch(np.float32(data), label, resumed.replicas,
                         CROSS, resumed.trainer)
        assert resumed.trainer.num_update == 4
        assert bool([x for x in resumed.notes if "trained on 2 devices" in x
                     ]) == (on_store == "0")
        assert difference(resumed.replicas, expected) < 1e-5


@live
@pytest.mark.parametrize("fixed", ["fc1", "fc2"])
def test_a_module_with_fixed_parameters(tmp_path, monkeypatch, fixed):
    """Its states are of as many devices as one wants, if they are empty."""
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    made = module(tmp_path, [f"{fixed}_weight", f"{fixed}_bias"], 0.0)
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
    made = module(tmp_path, momentum=0.0)
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
    made = module(tmp_path, of_object=of_object)
    off, notes = goes_on(made, optimizer_params=OPTIONS)
    assert (off < 1e-10) != of_object
    assert [x for x in notes if "wd_mult as Module gives it to an optimizer "
            "by name; if it had an object, pass wd_mult= with 1" in x]
    assert [x for x in notes if "rescale_grad is one over the batch size" in x]
    given = dict.fromkeys(("fc1_bias", "fc2.bias"), float(of_object))
    mine = mgpu.optimizers.SGD(**OPTIONS)
    with pytest.raises(ValueError, match="received an Optimizer and no resc"):
        goes_on(made, optimizer=mine, wd_mult=given)
    if of_object:
        with pytest.raises(ValueError, match="another wd_mult than by "
                           "name for fc1.bias, fc2.bias and no rescale_grad"):
            goes_on(made, optimizer_params=OPTIONS, wd_mult=given)
    scale = {"rescale_grad": 1.0 if of_object else 1 / 8}
    with pytest.raises(ValueError, match="none to an object of MXNet's; .*"
                       "no wd_mult for"):
        goes_on(made, optimizer=mine, optimizer_params=scale, batch_size=8)
    for how in ({"optimizer": mine, "optimizer_params": scale},
                {"optimizer_params": {**OPTIONS, **scale}}):
        off, notes = goes_on(
            made, **how, batch_size=8, wd_mult=given,
            loss=lambda *x: 8 * scale["rescale_grad"] * CROSS(*x))
        assert off < 1e-10
        assert bool([x for x in notes if "each loss by 8" in x]) == of_object


@live
@pytest.mark.parametrize("rows", [None, 6, 8])
def test_the_rows_of_a_module_that_float32_does_not_hold(tmp_path, rows):
    """A note says so, where they are not known; where they are, how far."""
    made = module(tmp_path, rows=rows or 6)
    off, notes = goes_on(made, batch_size=rows, optimizer_params=OPTIONS)
    told = [x for x in notes if "as float32" in x]
    assert (off < 1e-10) == (rows == 8) == (not told)
    assert rows == 8 or (
        "rescale_grad=0.16666666666666666 by 3.0e-08" if rows else
        "no power of two, by up to 6.0e-08") in told[0]


@live
def test_a_module_whose_devices_differ_is_refused(tmp_path):
    """Without a store each device trains weights of its own."""
    made = module(tmp_path, store=None)
    with pytest.raises(ValueError, match="those of 2 devices, which differ: "
                       "with kvstore=None"):
        goes_on(made, optimizer_params={"momentum": 0.5})
    with mgpu.using_backend("torch"), pytest.raises(
            ValueError, match="without an optimizer"):
        mgpu.resume_from_gluon(*made[-1], [mgpu.cpu(0)])


@live
@pytest.mark.parametrize("optimizer, options", [
    ("sgd", {"learning_rate": 0.25}), ("sgd", {}), ("adam", {})])
def test_options_of_a_module_as_they_were(tmp_path, optimizer, options):
    """Its schedule's rate is that of the optimizer, which MXNet gives to
    adam where nobody has."""
    given = {"rescale_grad": 2 ** -5, "wd": 2 ** -6, "multi_precision": True,
             **options}
    made = module(tmp_path, given=optimizer, momentum=None, rate=None,
                  lr_scheduler=schedule_of("FactorScheduler", 2, 0.5,
                                           base_lr=2 ** -4), **given)
    given["lr_scheduler"] = mgpu.lr_scheduler.FactorScheduler(
        2, 0.5, base_lr=2 ** -4)
    with pytest.raises(ValueError, match="Pass batch_size=, the rows"):
        goes_on(made, optimizer=optimizer, optimizer_params=given)
    off, notes = goes_on(
        made, optimizer=optimizer, batch_size=8, optimizer_params={
            **given, "begin_num_update": 3},
        loss=lambda *x: 0.25 * CROSS(*x))
    assert off < (1e-6 if optimizer == "adam" else 1e-10)
    assert [x for x in notes if "multiply each loss by 0.25" in x]
    assert not [x for x in notes if "counts of updates begin at 0" in x]


def valid_on_its_device(y):
    """For each label, how many of its half of the batch are not 2: the loss
    of a Module sees a device's rows, mgpu's those of all."""
    valid = (y != 2).reshape((2, -1)).sum(1)
    return valid.repeat_interleave(len(y) // 2)


@live
@pytest.mark.parametrize("end, loss", [
    ({"grad_scale": 0.25}, lambda out, y: 0.25 * CROSS(out, y)),
    ({"normalization": "batch"}, lambda out, y: CROSS(out, y) * 2 / len(y)),
    ({"normalization": "valid", "ignore_label": 2},
     lambda out, y: CROSS(out, y) / valid_on_its_device(y)),
    ({"use_ignore": True, "ignore_label": 2},
     lambda out, y: CROSS(out, y) * (y != 2)),
    ({"smooth_alpha": 0.125}, lambda out, y: mgpu.losses.
     SoftmaxCrossEntropyLoss(sparse_label=False)(out, smooth(out, y))),
    ({"preserve_shape": True}, lambda out, y: CROSS(out, y))],
    ids=["grad_scale", "batch", "valid", "use_ignore", "smooth_alpha",
         "preserve_shape"])
def test_options_of_the_loss_in_the_graph(tmp_path, end, loss):
    """Refused; the loss that the message names does what they did."""
    made = module(tmp_path, end=end)
    devices = mgpu.cpu(0), mgpu.cpu(1)      # as many as the Module had
    options = {"optimizer_params": OPTIONS}
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
