"""The rows of the guide's table do the same in each column.

A program for each column has the cells' own code in the place of <topic>, and
gives numbers by names; numbers of one name are equal.
"""
import re

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from mgpu.gluon_io import script

X = np.arange(24.0).reshape(6, 4) ** 1.5 - 40
Y = np.array([0, 1, 2, 0, 1, 2])
W = np.random.default_rng(0).standard_normal((3, 4)) / 20

#: what cells name
NUMBERS = {"most": 1.0, "rate": 0.5, "batch_size": 6, "rows": 4, "step": 2,
           "factor": 0.5, "number": 3}

#: what each column begins with: its packages, a network of known values
SETUP = {
    "gluon": """
import mxnet as mx
from mxnet import autograd, gluon, init, nd
from mxnet.gluon import SymbolBlock
devices = [mx.cpu(0), mx.cpu(1)]
ctx, arrays = devices[0], None
net = gluon.nn.Dense(3, in_units=4)
net.initialize(ctx=devices)
net.weight.set_data(nd.array(W))
net.bias.set_data(nd.zeros(3))
x = nd.array([2.5], ctx=ctx)
""", "mgpu": """
devices = mgpu.list_devices(2)
device = devices[0]
net = dense()
replicas = mgpu.initialize(net, devices)
replicas.import_numpy({"weight": W.astype("f"), "bias": np.zeros(3, "f")})
x = mgpu.put(np.array([2.5], "f"), device)
q = replicas.params()[1]
""", "torch": """
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
device, devices = "cpu", ["cpu", "cpu"]
net = nn.Linear(4, 3)
net.load_state_dict({"weight": torch.tensor(W).float(),
                     "bias": torch.zeros(3)})
parameters = list(net.parameters())
x = torch.tensor([2.5])
"""}

#: what each column ends with
WEIGHT = {
    "gluon": 'out["weight"] = net.weight.data(ctx).asnumpy()',
    "mgpu": 'out["weight"] = replicas.export_numpy()["weight"]',
    "torch": 'out["weight"] = net.weight.detach().numpy()'}

#: the programs: columns of one name give the same numbers
PROGRAMS = {
    "arrays": dict.fromkeys(("gluon", "mgpu", "torch"), """
for name, x in (("float", X), ("whole", Y)):
    x = <an array>
    out[name], out[name + " dtype"] = <to NumPy>, (<to NumPy>).dtype.name
x = <to a device>
x = x[:1] if x.ndim == 1 else x[0, :1]
out["number"] = <to a number>
"""),
    "a step, with its norm clipped": {
        "gluon": """
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate},
                        update_on_kvstore=False)
loss = <loss>
devices = [ctx]
net.collect_params().reset_ctx(devices)
with autograd.record():
    ls = [loss(net(nd.array(X)), nd.array(Y))]
<backward>
trainer.allreduce_grads()
arrays = [p.grad() for p in net.collect_params().values()]
<gradient norm>
trainer.update(batch_size)
""", "mgpu": """
trainer = <optimizer>
loss = <loss>
shards, labels = mgpu.split_batch(X.astype("f"), Y, devices)
with mgpu.record():
    ls = mgpu.parallel(loss, replicas(shards), labels)
<backward>
<gradient norm:1>
<gradient norm>
<gradient norm:2>
""", "torch": """
optimizer = <optimizer>
loss = (<loss>)(net(torch.tensor(X).float()), torch.tensor(Y))
<backward>
<gradient norm>
<step>
"""},
    "steps of several devices, with a schedule": {
        "gluon": """
<compile>
<seed of dropout>
for p in [net.bias]:
    factor = 0.25
    <multipliers of the rate>
    <multipliers of the decay>
name, factor = "nag", 0.5
schedule = <rate>
options = {"learning_rate": 0.1, "wd": 0.1, "momentum": 0.9,
           "lr_scheduler": schedule}
trainer = <another optimizer>
loss = <loss>
X = nd.array(X)
for k in range(5):
    <record>
        X_shards, labels = <split a batch>, gluon.utils.split_and_load(
            nd.array(Y), devices)
        outputs = <forward on all devices>
        ls = [loss(y, z) for y, z in zip(outputs, labels)]
    <backward>
    <step>
<not recorded>
    out["rows"] = np.concatenate([y.asnumpy() for y in outputs])
<wait>
out["bias"] = net.bias.data(ctx).asnumpy()
""", "mgpu": """
<seed of dropout>
schedule = <rate>
schedule.base_lr = 0.1
name, options = "nag", {"learning_rate": 0.1, "wd": 0.1, "momentum": 0.9,
                         "lr_scheduler": schedule}
trainer = <another optimizer>
factor = 0.25
multiplied = [<multipliers of the rate>, <multipliers of the decay>]
trainer = mgpu.Trainer(replicas, name, options, lr_mult=multiplied[0],
                       wd_mult=multiplied[1])
loss = <loss>
for k in range(5):
    X_shards = mgpu.split_and_load(X.astype("f"), devices)
    labels = mgpu.split_and_load(Y, devices)
    <record>
        outputs = <forward on all devices>
        ls = mgpu.parallel(loss, outputs, labels)
    <backward>
    <step>
out["rows"] = np.concatenate([mgpu.to_numpy(y) for y in outputs])
<wait>
out["bias"] = replicas.export_numpy()["bias"]
"""},
    "a new rate": {
        "gluon": """
loss = <loss>
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
<a new rate>
with autograd.record():
    ls = [loss(net(x), y) for x, y in zip(
        gluon.utils.split_and_load(nd.array(X), devices),
        gluon.utils.split_and_load(nd.array(Y), devices))]
<backward>
<step>
""", "mgpu": """
loss = <loss>
trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
<a new rate>
X, y = X.astype("f"), Y
<the whole step>
""", "torch": """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
<a new rate>
loss = (<loss>)(net(torch.tensor(X).float()), torch.tensor(Y))
<backward>
<step>
"""},
    "a schedule": {
        **dict.fromkeys(("gluon", "mgpu"), """
schedule = <rate>
schedule.base_lr = 0.1
out["rates"] = [schedule(k) for k in range(1, 8)]
"""), "torch": """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
schedule, rates = <rate>, []
for k in range(7):
    rates.append(optimizer.param_groups[0]["lr"])
    optimizer.step()
    schedule.step()
out["rates"] = rates
"""},
    "data and a metric": {
        "gluon": """
dataset = gluon.data.ArrayDataset(nd.array(X), nd.array(Y))
batches = list(<data>)
out["batches"] = np.concatenate([x.asnumpy() for x, _ in batches])
out["sizes"] = [len(x) for x, _ in batches]
metric = <metric>
metric.update(nd.array(Y), nd.array(SCORES))
out["metric"] = metric.get()[1]
""", "mgpu": """
y = Y
batches = list(<data>)
out["batches"] = np.concatenate([x for x, _ in batches])
out["sizes"] = [len(x) for x, _ in batches]
y_hat, y = (mgpu.put(x, device) for x in (SCORES, Y))
out["metric"] = <metric>
""", "torch": """
dataset = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
batches = list(<data>)
out["batches"] = np.concatenate([x.numpy() for x, _ in batches])
out["sizes"] = [len(x) for x, _ in batches]
y_hat, y = torch.tensor(SCORES), torch.tensor(Y)
out["metric"] = float(<metric>)
"""},
    "files": {
        "gluon": """
file = folder + "/gluon.params"
<save weights>
net = gluon.nn.Dense(3, in_units=4)
<weights from a file>
out["predicted"] = net(nd.array(X, ctx=devices[1])).asnumpy()
<on other devices>
<compile>
net(nd.array(X, ctx=devices[0]))
prefix = folder + "/net"
<save the network>
symbol, params = prefix + "-symbol.json", prefix + "-0000.params"
block = SymbolBlock.imports(symbol, ["data"], params)
out["again"] = block(nd.array(X)).asnumpy()
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
file = folder + "/gluon.states"
trainer._init_kvstore()
<save the optimizer>
<the optimizer from a file>
out["rate"] = trainer.learning_rate
""", "mgpu": """
file = folder + "/mgpu.params"
<save weights>
replicas.load_parameters(file)
out["predicted"] = np.concatenate([mgpu.to_numpy(y) for y in replicas(
    mgpu.split_and_load(X.astype("f"), devices))])
out["again"] = out["predicted"]
trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 1})
file = folder + "/mgpu.states"
<save the optimizer>
<the optimizer from a file>
out["rate"] = trainer.learning_rate
<on other devices>
""", "torch": """
file = folder + "/torch.pt"
<save weights>
<weights from a file>
X = torch.tensor(X).float()
out["predicted"] = net(X).detach().numpy()
file = folder + "/torch.pt2"
<save the network>
out["again"] = (<a network from files>)(X).detach().numpy()
optimizer = torch.optim.SGD(net.parameters(), lr=1)
file = folder + "/optimizer.pt"
<save the optimizer>
<the optimizer from a file>
out["rate"] = optimizer.param_groups[0]["lr"]
<on other devices>
"""}}

#: rows that name what is there, or stays; or that need what is not here
NOT_RUN = {
    "devices", "a device", "number of GPUs",            # GPUs
    "initial weights", "not trained", "key-value store",  # each draws its own
    "parameters", "gradients of predictions",           # names, and modes
    "a network of symbols", "a network of the zoo"}     # conversion


def codes(line, column):
    return re.findall("`(.+?)`", getattr(line, column))


def filled(program, column):
    """A program with the code of the cells in it."""
    lines = {line.topic: line for line in script.LINES}

    def code(found):
        topic, _, number = found[1].partition(":")
        text = codes(lines[topic], column)[int(number or 0)]
        multiplied = re.fullmatch(r"mgpu\.Trainer\(\.\.\., \w+=(.+)\)", text)
        return multiplied[1] if multiplied else text
    return re.sub("<([a-z][^<>]*)>", code, program)


SCORES = np.array([[.1, .9, 0], [.8, .2, 0], [0, .3, .7], [1, 0, 0],
                   [.2, .5, .3], [.4, .3, .3]], "float32")


def run(title, column, folder, engine):
    def dense():
        if engine.name == "torch":
            import torch
            return torch.nn.Linear(4, 3)
        from mxnet import gluon
        return gluon.nn.Dense(3, in_units=4)
    names = {"mgpu": mgpu, "np": np, "X": X, "Y": Y, "W": W, "out": {},
             "SCORES": SCORES, "folder": str(folder), "dense": dense,
             **NUMBERS}
    exec(SETUP[column] + filled(PROGRAMS[title][column], column)
         + WEIGHT[column], names)
    return names["out"]


@pytest.mark.skipif(set(BACKENDS) < {"mxnet", "torch"},
                    reason="compares two engines")
@pytest.mark.parametrize("title", PROGRAMS)
def test_the_cells_of_a_row_do_the_same(title, tmp_path):
    found = {}
    for column, engine in (("gluon", "mxnet"), ("mgpu", "mxnet"),
                           ("mgpu", "torch"), ("torch", "torch")):
        if column in PROGRAMS[title]:
            with mgpu.using_backend(engine) as backend:
                found[column, engine] = run(title, column, tmp_path, backend)
    expected = found.pop(("gluon", "mxnet"))
    for place, out in found.items():
        assert out.keys() == expected.keys(), place
        for name, x in expected.items():
            if name.endswith("dtype"):
                assert out[name] == x, (place, name)
            else:
                np.testing.assert_allclose(out[name], x, 2e-5, 1e-6,
                                           err_msg=f"{place} {name}")


def test_every_row_is_run_or_named():
    run = {topic.partition(":")[0] for columns in PROGRAMS.values()
           for program in columns.values()
           for topic in re.findall("<([a-z][^<>]*)>", program)}
    assert run | NOT_RUN == {x.topic for x in script.LINES}
    assert not run & NOT_RUN
