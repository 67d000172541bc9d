"""Parameters, which are read, written and frozen on all devices; values that
leave for NumPy and come back; `get_params`."""

import numpy as np
import pytest

import mgpu
from batches import pictures, rows
from conftest import BACKENDS
from helpers import (ENGINES, assert_all_equal, assert_bit_equal, convnet, mlp,
                     on, on_torch, relative_difference, using_engine)
from nets import bricks, dense_pair, on_each, shards_of, train

MXNET = [engine for engine in ENGINES if engine.startswith("mxnet")]


# -- reading and writing ------------------------------------------------------

def test_reading_a_parameter(engine):
    replicas = mgpu.initialize(mlp(engine), on(1, 3), "xavier")
    p = replicas.params()[0]
    assert (p.name, p.kind, p.shape, p.dtype, p.grad_req) \
        == ("0.weight", "weight", (5, 6), "float32", "write")
    assert repr(p) == "Parameter 0.weight (shape=(5, 6), dtype=float32)"
    assert p.list_devices() == on(1, 3)
    assert_bit_equal(mgpu.to_numpy(p.data()), mgpu.to_numpy(p.data("cpu:3")))
    with mgpu.no_grad():    # the network's own array, which all follow
        p.data()[:] = 2
        p.data(mgpu.cpu(3))[:] = 3      # a copy
    for x in (*p.list_data(), p.data("cpu:3"), replicas[1].arrays()[0]):
        assert (mgpu.to_numpy(x) == 2).all()
    assert not mgpu.to_numpy(p.grad("cpu:1")).any()


def test_a_parameter_is_not_on_another_device(engine):
    replicas = mgpu.initialize(mlp(engine), on(1, 3), "xavier")
    p = replicas.params()[0]
    for read in (p.data, p.grad, lambda device: replicas.export_numpy(
            device=device)):
        with pytest.raises(RuntimeError, match=(
                r"parameter '0.weight' is not initialized on cpu\(0\); it "
                r"is on \[cpu\(1\), cpu\(3\)\]. Read it there, or")):
            read(mgpu.cpu(0))


def test_writing_a_parameter(engine, devices):
    replicas = mgpu.initialize(mlp(engine), devices, "uniform")
    p = replicas.params()[0]
    value = np.arange(30.0).reshape(5, 6)
    for given in (value, mgpu.put(value, devices[-1])):
        p.set_data(0 * value)
        p.set_data(given)
        for x in p.list_data():
            assert_bit_equal(mgpu.to_numpy(x), value.astype("float32"))
    with mgpu.record():         # inside a recorded block too
        p.set_data(value)
        outputs = replicas([mgpu.put(rows(4), d) for d in devices])
    mgpu.backward(outputs)
    assert all(mgpu.to_numpy(g).any() for g in p.list_grad())


def test_zero_grad(engine, devices):
    replicas = mgpu.initialize(convnet(engine), devices, "xavier")
    replicas.params()[1].grad_req = "null"
    with mgpu.record():
        outputs = replicas([mgpu.put(pictures(2), d) for d in devices])
    mgpu.backward(outputs)
    first, *rest = [p for p in replicas.params() if p.grad_req != "null"]
    held = first.grad()
    first.zero_grad()           # in place
    assert not mgpu.to_numpy(held).any()
    assert all(mgpu.to_numpy(g).any() for g in rest[-1].list_grad())
    replicas.zero_grad()
    for p in rest:
        for g in p.list_grad():
            assert not mgpu.to_numpy(g).any()


@on_torch
def test_a_parameter_without_axes(engine, devices):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.scale
    replicas = mgpu.initialize(Net(), devices, "keep")
    train(replicas, np.ones((2, 6), "float32"))     # idle devices too
    for value in replicas.params()[0].list_data():
        # 2 - 0.125 * (2 rows * 6 numbers * 2 * 2) / 2
        assert mgpu.to_numpy(value) == -1.0
    replicas.params()[0].set_data(4.0)
    assert replicas.export_numpy() == {"scale": np.float32(4)}


@on_torch
def test_a_parameter_without_elements(engine, devices):
    import torch
    net = mlp(engine)
    net.register_parameter("none", torch.nn.Parameter(torch.zeros(0, 3)))
    replicas = mgpu.initialize(net, devices, "xavier")
    trainer = mgpu.Trainer(replicas, "sgd", {"momentum": 0.5})
    with mgpu.record():
        losses = [(out * out).sum() + replica.arrays()[0].sum()
                  for replica, out in zip(replicas, replicas(
                      shards_of(rows(8), replicas)))]
    mgpu.backward(losses)
    trainer.step(8)
    assert replicas.export_numpy()["none"].shape == (0, 3)


def test_wrong_values_and_grad_reqs_are_refused(engine):
    replicas = mgpu.initialize(convnet(engine), on(0, 1), "uniform")
    weight, mean = replicas.params()[0], replicas.statistics()[0]
    with pytest.raises(ValueError, match=r"parameter '0.weight' has shape "
                       r"\(4, 2, 3, 3\); received \(6, 5\). Reshape the val"):
        weight.set_data(np.ones((6, 5)))
    with pytest.raises(ValueError, match="unknown grad_req; received 'no'. "
                       "Use 'write', 'add' or 'null'."):
        weight.grad_req = "no"
    with pytest.raises(ValueError, match="a buffer has no gradient; received "
                       "grad_req='write' for '1.running_mean'"):
        mean.grad_req = "write"
    assert mean.grad_req == "null"
    weight.grad_req = "null"
    with pytest.raises(ValueError, match="parameter '0.weight' has no "
                       "gradient; its grad_req is 'null'"):
        weight.list_grad()


# -- frozen parameters --------------------------------------------------------

def test_freezing_and_unfreezing(engine, devices):
    """The gradient of what the user unfreezes is zero until a pass."""
    net = mlp(engine)
    replicas = mgpu.initialize(net, devices, "xavier")
    weight = replicas.params()[0]
    start = on_each(replicas)
    weight.grad_req = "null"
    assert replicas.grad_reqs() == {"0.weight": "null", "0.bias": "write",
                                    "2.weight": "write", "2.bias": "write"}
    train(replicas, rows(8))
    frozen = on_each(replicas)
    assert_bit_equal(frozen["0.weight"], start["0.weight"])
    assert (frozen["2.weight"][0] != start["2.weight"][0]).any()
    weight.zero_grad()          # nothing to do, and no error
    if engine.name == "mxnet":
        net[0].weight.grad_req = "write"
    else:
        net[0].weight.requires_grad = True
    assert not any(mgpu.to_numpy(g).any() for g in weight.list_grad())
    train(replicas, rows(8))
    now = on_each(replicas)["0.weight"]
    assert (now[0] != start["0.weight"][0]).any()
    assert_bit_equal(now, [now[0]] * len(devices))


def with_cell(engine):
    """Two matrices, each with a bias, in one layer of Gluon."""
    from mxnet import gluon
    base, dense = bricks(engine)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.cell, self.end = gluon.rnn.RNNCell(4, input_size=6), \
                dense(4, 3)

        def forward(self, x):
            return self.end(self.cell(x, [0 * x[:, :4]])[0])
    return Net()


def with_weight_elsewhere(engine):
    """A bias whose weight belongs to another block."""
    import mxnet as mx
    base, dense = bricks(engine)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.layer, self.end = dense(6, 3), dense(3, 3)
            self.layer.bias.grad_req = "null"
            self.bias = self.params.get("own", shape=(3,))

        def forward(self, x):
            linear = mx.npx.fully_connected if mx.util.is_np_array() \
                else mx.nd.FullyConnected
            return self.end(linear(
                x, self.layer.weight.data(x.context),
                self.bias.data(x.context), num_hidden=3))
    return Net()


@pytest.mark.parametrize("name, make", [
    (name, make) for name in MXNET
    for make in (mlp, with_cell, with_weight_elsewhere)
    # Gluon's cells do not take the arrays of mx.np.
    if (name, make) != ("mxnet-np", with_cell)])
@pytest.mark.parametrize("when", ["before", "between", "by mgpu"])
@pytest.mark.device_counts(1, 3)
def test_a_bias_learns_while_its_weight_is_frozen(name, devices, make, when):
    """In float32 as in float64. (Gluon's own Dense layer in float32 leaves
    the gradient of such a bias as it is: the oneDNN kernel computes it only
    together with that of the weight.)"""
    def freeze(net):
        for key, p in net._collect_params_with_prefix().items():
            if "weight" in key and not key.startswith(("2.", "end.")):
                p.grad_req = "null"
    found = []
    with using_engine(name) as engine:
        for dtype, places in (("float64", on(0)), ("float32", devices)):
            net = make(engine)
            if when == "before":
                freeze(net)
            replicas = mgpu.initialize(net, places, "uniform", seed=1,
                                       dtype=dtype)
            train(replicas, rows(8, dtype=dtype))
            if when == "between":
                freeze(net)
            elif when == "by mgpu":
                for p in replicas.params():
                    if "weight" in p.name and p.name[:2] not in ("2.", "en"):
                        p.grad_req = "null"
            for seed in (1, 2, 3):
                train(replicas, rows(8, dtype=dtype, seed=seed))
            found.append(on_each(replicas))
    for key, arrays in found[1].items():
        for x in arrays:        # four steps in float32
            assert relative_difference(x, found[0][key][0]) < 1e-5, key


# -- values through NumPy -----------------------------------------------------

@pytest.mark.parametrize("source, target", list(zip(
    ENGINES, ENGINES[1:] + ENGINES[:1])))
def test_values_cross_backends_and_device_counts(source, target):
    with using_engine(source) as engine:
        a = mgpu.initialize(convnet(engine), on(0, 1), "xavier",
                            batch_norm="average", dtype="float64")
        train(a, pictures(6, dtype="float64"))
        values = a.export_numpy()
    with using_engine(target) as engine:
        b = mgpu.initialize(convnet(engine), on(2, 3, 4),
                            "uniform", dtype="float64")
        b.import_numpy(values)
        for p in b.params() + b.statistics():
            for value in p.list_data():
                assert_bit_equal(mgpu.to_numpy(value), values[p.name])
        # A copy on both ways: nothing is shared with what was handed over.
        values["0.weight"][:] = 0
        assert mgpu.to_numpy(b.params()[0].data()).any()


def bare_norm(backend, kind):
    """A norm layer that learns no gamma, or no beta, between two others."""
    no = {"center": False} if kind == "bias" \
        else {"center": False, "scale": False}
    if backend.name == "mxnet":
        from mxnet.gluon import nn
        norm = {"batch": nn.BatchNorm, "instance": nn.InstanceNorm}.get(
            kind, nn.LayerNorm)     # over the last axis, of 4 columns
        net = nn.HybridSequential()
        net.add(nn.Conv2D(4, 3, in_channels=2), norm(in_channels=4, **no),
                nn.Conv2D(3, 1, in_channels=4), nn.Flatten())
        return net
    from torch import nn
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4, affine=False) if kind == "batch" else
        nn.InstanceNorm2d(4) if kind == "instance" else
        nn.LayerNorm(4, bias=False) if kind == "bias" else
        nn.LayerNorm(4, elementwise_affine=False),
        nn.Conv2d(4, 3, 1), nn.Flatten())


@pytest.mark.parametrize("kind", ["batch", "instance", "layer", "bias"])
def test_a_norm_layer_without_gamma_and_beta_is_one_network(devices, kind):
    """Gluon's layer keeps them as frozen parameters, torch's has none: the
    draws behind them are the same, and values cross."""
    found, kept, after = {}, {}, {}
    for name in BACKENDS:
        with using_engine(name) as engine:
            replicas = mgpu.initialize(bare_norm(engine, kind), devices,
                                       "xavier", seed=3)
            found[name] = replicas.export_numpy()
            train(replicas, pictures(6))
            kept[name] = replicas.export_numpy(device=devices[0])
            after[name] = replicas
    weights = [p.name for p in after[BACKENDS[0]].params()
               if p.kind == "weight"]
    for name in BACKENDS:
        assert "; 0 parameters kept, " in repr(after[name])
        assert len({repr(r).partition("; ")[2] for r in after.values()}) == 1
        for weight in weights:
            assert_bit_equal(found[name][weight], found[BACKENDS[0]][weight])
        for other in BACKENDS:
            with using_engine(other):
                after[other].import_numpy(kept[name])
                values = after[other].export_numpy(device=devices[0])
                for shared in kept[name].keys() & values.keys():
                    assert_bit_equal(values[shared], kept[name][shared])
                for constant in values.keys() - kept[name].keys():
                    if constant.endswith(("gamma", "beta")):
                        assert (values[constant]
                                == constant.endswith("gamma")).all()


@on_torch
def test_a_gamma_that_a_layer_does_not_have_is_refused(engine):
    """Unless it changes nothing."""
    replicas = mgpu.initialize(bare_norm(engine, "batch"), on(0, 1))
    for name, value in (("1.gamma", np.full(4, 2.0)),
                        ("1.beta", np.ones(4)), ("0.gamma", np.ones(4)),
                        ("9.gamma", np.ones(4))):
        with pytest.raises(ValueError, match=f"received unknown {name}"):
            replicas.import_numpy({**replicas.export_numpy(),
                                   name: value})


def with_own_statistics(engine, devices):
    """Replicas whose running statistics on device i are i + 1."""
    replicas = mgpu.initialize(convnet(engine), devices, "uniform")
    replicas.import_numpy({**replicas.export_numpy(), **{
        p.name: np.stack([np.full(p.shape, i + 1.0)
                          for i in range(len(devices))])
        for p in replicas.statistics()}})
    return replicas


@pytest.mark.device_counts(1, 3)
def test_every_devices_statistics_survive(engine, devices):
    k, replicas = len(devices), with_own_statistics(engine, devices)
    every = replicas.export_numpy(all_devices=True)
    for i, device in enumerate(devices):
        one = replicas.export_numpy(device=device)
        assert one["1.running_mean"].tolist() == [i + 1] * 4
        row = every["1.running_mean"] if k == 1 else every["1.running_mean"][i]
        assert_bit_equal(row, one["1.running_mean"])
    for p in replicas.statistics():
        p.set_data(np.zeros(p.shape))
    replicas.import_numpy(every)
    assert_all_equal(replicas.export_numpy(all_devices=True), every)


def test_statistics_that_are_exported_are_the_networks(engine):
    replicas = with_own_statistics(engine, on(0, 1, 2))
    for p in replicas.statistics():
        assert_bit_equal(replicas.export_numpy()[p.name],
                         mgpu.to_numpy(p.data()))
    with pytest.raises(ValueError, match="exports one device's statistics and "
                       "all_devices= all; received device="):
        replicas.export_numpy(device=mgpu.cpu(0), all_devices=True)


@on_torch
@pytest.mark.parametrize("dtype", ["int16", "uint16"])
def test_buffers_of_other_integers_come_back(engine, dtype, devices, tmp_path):
    """Also those of a dtype that no data has."""
    import torch
    from torch import nn
    net = nn.Linear(6, 3)
    net.register_buffer("table", torch.arange(4).to(getattr(torch, dtype)))
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd")
    mgpu.save_checkpoint(tmp_path / "saved", replicas, trainer)
    wanted = replicas.export_numpy()
    replicas.import_numpy({**wanted, "table": wanted["table"] + 1})
    assert replicas.export_numpy()["table"].tolist() == [1, 2, 3, 4]
    mgpu.load_checkpoint(tmp_path / "saved", replicas, trainer)
    assert_all_equal(replicas.export_numpy(), wanted)


class Changing(dict):
    """Each value is another one when it is read again."""

    def __getitem__(self, name):
        value = super().__getitem__(name)
        self[name] = np.full(99, "gone")
        return value


def test_values_are_read_once(engine, devices):
    """And native arrays are values too: what the framework has read from a
    file of its own, for example."""
    replicas = mgpu.initialize(mlp(engine), devices, "xavier")
    wanted = {name: x + 1 for name, x in replicas.export_numpy().items()}
    replicas.import_numpy(Changing(wanted))
    assert_all_equal(replicas.export_numpy(), wanted)
    wanted = {name: x + 1 for name, x in wanted.items()}
    replicas.import_numpy({name: engine.put(x, devices[-1])
                           for name, x in wanted.items()})
    assert_all_equal(replicas.export_numpy(), wanted)


UNFIT = [
    (lambda v: v.pop("0.bias"), "missing 0.bias"),
    (lambda v: v.update(extra=np.ones(1)), "unknown extra"),
    (lambda v: v.update({"0.bias": np.ones(3)}),
     "0.bias: shape (3,) instead of (4,)"),
    (lambda v: v.update({"0.bias": np.array(["a"] * 4)}), "0.bias: dtype <U1"),
    (lambda v: v.update({"0.bias": np.zeros(4, "complex64")}),
     "0.bias: dtype complex64"),
    (lambda v: v.update({"1.running_var": np.ones((3, 4))}),
     "1.running_var: shape (3, 4) instead of (4,)"),
    (lambda v: v.update({"1.running_var": np.full(4, 1e39)}),
     "1.running_var: values beyond the range of float32")]


def test_values_that_do_not_fit_are_refused(engine):
    replicas = mgpu.initialize(convnet(engine), on(0, 1), "xavier")
    before = on_each(replicas)
    for change, text in UNFIT:
        values = {name: value + 1 for name, value
                  in replicas.export_numpy().items()}
        change(values)
        with pytest.raises(ValueError) as caught:
            replicas.import_numpy(values)
        assert str(caught.value) == (
            f"the values must be those of this network; received {text}. Pass "
            "the result of export_numpy of a network with the same layers.")
        assert_all_equal(on_each(replicas), before)


def test_values_beyond_float16_change_nothing(engine):
    """70000 would be infinite there; 65504 is its largest number."""
    replicas = mgpu.initialize(mlp(engine), on(0, 1), "xavier",
                               dtype="float16")
    before = on_each(replicas)
    values = {name: value + 1 for name, value
              in replicas.export_numpy().items()}
    last = list(values)[-1]
    wide = {**values, last: np.full(values[last].shape, 7e4)}
    with pytest.raises(ValueError, match=f"{last}: values beyond the range "
                       "of float16"):
        replicas.import_numpy(wide)
    assert_all_equal(on_each(replicas), before)
    wide[last][...] = 65504
    replicas.import_numpy(wide)
    assert (replicas.export_numpy()[last] == 65504).all()


# -- parameters with two names ------------------------------------------------

def test_shared_parameters(engine, devices):
    """One entry, whose gradient is the sum over both uses, moved once."""
    x, found = rows(5, 4, "float64"), []
    for tie in (True, False):
        replicas = mgpu.initialize(dense_pair(engine, tie), devices, "xavier",
                                   dtype="float64")
        if not tie:     # the same values in both layers
            values = replicas.export_numpy()
            for kind in ("weight", "bias"):
                values[f"2.{kind}"] = values[f"0.{kind}"]
            replicas.import_numpy(values)
        start = replicas.export_numpy()
        train(replicas, x)
        found.append({name: [x - start[name] for x in xs]
                      for name, xs in on_each(replicas).items()})
    tied, apart = found
    assert list(tied) == ["0.weight", "0.bias"]
    for kind in ("weight", "bias"):
        for i, move in enumerate(tied[f"0.{kind}"]):
            assert np.abs(move).max() > 0
            # float64; the differences cancel three digits
            assert relative_difference(move, apart[f"0.{kind}"][i] + apart[
                f"2.{kind}"][i]) < 1e-12


def test_a_shared_parameter_may_come_under_each_name(engine, devices):
    """As the network's own state has it."""
    replicas = mgpu.initialize(dense_pair(engine, True), devices, "xavier",
                               dtype="float64")
    values = replicas.export_numpy()
    new = {name: x + 1 for name, x in values.items()}
    weight, bias = new["0.weight"], new["0.bias"]
    for given in ({**new, "2.weight": weight, "2.bias": bias},
                  {"0.bias": bias, "2.weight": weight}):
        replicas.import_numpy(given)
        for name, x in new.items():
            assert_bit_equal(on_each(replicas)[name], [x] * len(devices))
        replicas.import_numpy(values)
    if engine.name == "torch":
        replicas.import_numpy({
            name: x.numpy() + 1
            for name, x in replicas.net.state_dict().items()})
        assert_bit_equal(replicas.export_numpy()["0.bias"], bias)


def test_other_values_under_a_second_name_are_refused(engine):
    replicas = mgpu.initialize(dense_pair(engine, True), on(0, 1), "xavier")
    values = replicas.export_numpy()
    with pytest.raises(ValueError, match="other values of 2.bias than of "
                       "0.bias"):
        replicas.import_numpy({
            "0.weight": values["0.weight"], "0.bias": values["0.bias"] + 1,
            "2.bias": values["0.bias"]})
    assert_all_equal(replicas.export_numpy(), values)


# -- get_params ---------------------------------------------------------------

def test_get_params(engine, devices):
    host = [np.arange(6.0).reshape(2, 3), np.arange(3, dtype="float32")]
    native = [mgpu.put(x, mgpu.cpu(0)) for x in host]
    for source in (host, native, tuple(host)):
        for device in devices:
            params = mgpu.get_params(source, device)
            assert type(params) is list
            for p, x in zip(params, host):
                assert_bit_equal(mgpu.to_numpy(p), x)
                assert_bit_equal(mgpu.to_numpy(mgpu.grad(p)), 0 * x)
                with mgpu.no_grad():
                    p[:] = 9
    for x, y in zip(native, host):      # not shared
        assert_bit_equal(mgpu.to_numpy(x), y)
    named = mgpu.get_params({"W": host[0]}, "cpu:1", grad_req="add")
    assert list(named) == ["W"]
    for _ in range(2):
        with mgpu.record():
            loss = named["W"] * named["W"]
        mgpu.backward(loss)
    assert_bit_equal(mgpu.to_numpy(mgpu.grad(named["W"])), 4 * host[0])


def test_wrong_get_params(backend):
    for arguments, error, text in (
            ((np.ones((2, 3)), "cpu:0"), TypeError, "params must be a list, "
             "or a dict, of arrays; received one ndarray"),
            (([np.ones(2)], ["cpu:0", "cpu:1"]), TypeError,
             "expected a device")):
        with pytest.raises(error, match=text):
            mgpu.get_params(*arguments)
