"""The source that is written for a network of Gluon."""
import itertools
import json
import re

import pytest

import mgpu
from conftest import BACKENDS
from gluon_io.conftest import export, files_in, imported
from gluon_io.test_from_gluon import (  # noqa: F401
    NETWORKS, assert_same, exported, from_text, on)
from gluon_io.grid import by_net

if set(BACKENDS) < {"mxnet", "torch"}:
    pytest.skip("these compare two engines", allow_module_level=True)


def scrambled(exported, folder):  # noqa: F811
    """The same network, whose names say nothing."""
    graph = json.loads(exported.symbol.read_text())
    names = {}
    for i, node in enumerate(graph["nodes"]):
        names[node["name"]] = node["name"] = f"n{7919 * (i + 1) % 10007}"
    exported.symbol = folder / "scrambled-symbol.json"
    exported.symbol.write_text(json.dumps(graph))
    from mgpu.gluon_io import load_params, save_params
    save_params(folder / "scrambled.params", {
        f"{k[:4]}{names[k[4:]]}": x
        for k, x in load_params(exported.params).items()})
    exported.params = folder / "scrambled.params"
    exported.given = {names[k]: x for k, x in exported.given.items()}


def written_of(folder, **options):
    """The module that is written for the files of `from_symbol`."""
    mgpu.gluon_source(*files_in(folder), folder / "net.py", **options)
    return imported(folder / "net.py")


def trains(net):
    return {net.gluon_names[key] for key, p in net.named_parameters()
            if p.requires_grad}


class Written:
    """A source file, imported, and its network with the weights."""

    def __init__(self, exported, folder, plain=False):  # noqa: F811
        path = folder / "net.py"
        self.names = mgpu.gluon_source(exported.symbol, exported.params,
                                       path, plain=plain)
        self.text = path.read_text()
        weights, = (p for p in (folder / "net.safetensors", folder / "net.pt")
                    if p.exists())
        self.net = imported(path).load(str(weights))
        self.net.gluon_names = self.names


@pytest.mark.parametrize("exported, names", zip(
    NETWORKS, itertools.cycle(("scrambled", "own"))), indirect=["exported"])
def test_source_computes_as_from_gluon(exported, names, tmp_path):  # noqa: F811
    """Predictions, all gradients and statistics; each parameter has its name
    in the file, and is trained or not as there."""
    if names == "scrambled":
        scrambled(exported, tmp_path)
    with mgpu.using_backend("torch"):
        written = Written(exported, tmp_path)
        net = mgpu.from_gluon(exported.symbol, exported.params)
        assert set(written.names.values()) == set(net.gluon_names.values())
        for case in exported.predicting(), exported:
            assert_same(by_net(case, written.net), by_net(case, net), 1e-12)
        assert trains(written.net) == trains(net)
        # shared arrays stay shared
        assert len([*written.net.parameters()]) == len([*net.parameters()])
        assert max(map(len, written.text.splitlines())) <= 88


#: of x and y, numbers of three axes
EXPRESSIONS = {
    "an index from behind": "F.slice_axis(F.stack(x, x * 2, axis=2), axis=-4, "
                            "begin=-1, end=None)",
    "an index of one axis": "F.slice_axis(F.relu(x), axis=-3, begin=1, "
                            "end=None)",
    "an index of three": "F.slice(F.concat(x, x, dim=0), begin=(-1, 1, -3), "
                         "end=(None, None, None)) - 1",
    "an index with a step": "F.slice(F.relu(x), begin=(0, None, 1), "
                            "end=(2, None, 4), step=(1, 1, 2))",
    "backwards": "F.slice(F.relu(x), begin=(None, -1), end=(None, -3), "
                 "step=(None, -1))",
    "a shuffle of channels": "F.relu(F.reshape(F.swapaxes(F.reshape(F.concat("
                             "x, x, dim=1), (0, -4, 2, -1, -2)), 1, 2), "
                             "(0, -3, -2)))",
    "used twice": "F.tanh(x) * F.sigmoid(F.tanh(x)) + F.tanh(y)",
    "windows with padding and the usual stride":
        "F.Pooling(F.Pooling(x, kernel=(2,), stride=(2,), pad=(1,)), "
        "kernel=(2,), stride=(2,), pad=(1,), pool_type='avg')",
    "an output inside": "(F.tanh(x) * y, F.tanh(x))",
    "an input that is an output": "(y, x + 1)",
    "the second input first": "y - 2 * x",
    "numbers that are not finite": "F.maximum(x, float('-inf')) * -1e30",
    "constants": "F.broadcast_mul(F.arange(1, 5), x) - F.ones((2, 3, 4)) + "
                 "F.broadcast_to(F.eye(3, 4, 1), (2, 3, 4)) * F.full((2, 3, "
                 "4), 0.5)",
    "remainders": "(x % 0.5) + F.broadcast_mod(x, y) + F.round(x * 3)",
    "a reduction": "F.sum(x, axis=(0, 1, 2)) + F.max(y, axis=(0, 1, 2))",
    "rows": "F.where(F.sum(x, axis=(1, 2)) > 0, x, y)"}


@pytest.mark.parametrize("text, names", zip(
    EXPRESSIONS.values(), itertools.cycle((
        ("data0", "data1"), ("w.1", "w_1"), ("class", "self"),
        ("torch", "nn")))), ids=EXPRESSIONS)
def test_source_of_expressions(tmp_path, text, names):
    """Whatever the inputs are called."""
    net = from_text(tmp_path, text, x=names[0], y=names[1])
    with mgpu.using_backend("torch"):
        import torch
        module = written_of(tmp_path)
        count = len([x for x in net.graph.nodes if x.op == "placeholder"])
        given = [torch.randn(2, 3, 4) for _ in range(count)]
        expected, found = net(*given), module.Net()(*given)
        assert type(expected) is type(found)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,)
                          for x in (expected, found)), strict=True):
            assert torch.equal(a, b)


@on("resnet18")
@pytest.mark.parametrize("names", ["own", "scrambled"])
def test_what_repeats_is_one_class(exported, names, tmp_path):  # noqa: F811
    """With a shortcut and without: a residual block, and the network."""
    if names == "scrambled":
        scrambled(exported, tmp_path)
    with mgpu.using_backend("torch"):
        text = Written(exported, tmp_path).text
    assert len(text.splitlines()) <= 100
    assert re.findall(r"^class (\w+)", text, re.M) == ["ResidualBlock", "Net"]
    assert text.count("ResidualBlock(") == 1 + 8
    assert re.search(r"def __init__\(self, in_channels: int, out_channels: "
                     r"int, stride: int = 1\)", text)


def _layer(F, x, name, channels, kernel=1, group=1):  # noqa: N803
    x = F.Convolution(x, name=name, kernel=(kernel, kernel), no_bias=True,
                      pad=(kernel // 2,) * 2, num_filter=channels,
                      num_group=group)
    return F.BatchNorm(x, name=f"{name}_norm", fix_gamma=False)


def _split_units(F, x):  # noqa: N803
    for i in range(3):
        a, b = F.split(x, num_outputs=2, axis=1)
        b = F.relu(_layer(F, b, f"unit{i}", 4))
        x = F.concat(a, b, dim=1)
        x = F.reshape(F.swapaxes(F.reshape(x, (0, -4, 2, -1, -2)), 1, 2),
                      (0, -3, -2))
    return x


def _swishes(F, x):  # noqa: N803
    for i in range(3):
        x = _layer(F, x, f"soft{i}", 8)
        x = x * F.sigmoid(x * 1)
        x = _layer(F, x, f"hard{i}", 8)
        x = x * F.clip(x + 3, 0, 6) / 6
    return x


def _inverted(F, x):  # noqa: N803
    for i, kernel in enumerate((3, 1, 1, 1)):   # the first one is no block
        y = F.relu(_layer(F, x, f"expand{i}", 16, kernel))
        y = F.relu(_layer(F, y, f"depth{i}", 16, 3 + 2 * (i % 2), group=16))
        y = _layer(F, y, f"reduce{i}", 8)
        x = x + y if i else y
    return x


def _levels(F, x):  # noqa: N803
    found = []
    for i, scale in enumerate((2, 4, 2, 4)):
        y = F.UpSampling(_layer(F, x, f"level{i}", 4), scale=scale,
                         sample_type="nearest")
        y = F.relu(_layer(F, y, f"after{i}", 4, 3))
        found.append(F.Pooling(y, global_pool=True, pool_type="avg",
                               kernel=(1, 1)))
    return F.concat(*found, dim=1)


def _factors(F, x):  # noqa: N803
    for i, channels in enumerate((8, 8, 4, 4)):
        if i == 2:
            x = F.relu(_layer(F, x, "fewer", channels))
        factor = F.var(f"factor{i}", shape=(1, channels, 1, 1))
        x = x + F.broadcast_mul(_layer(F, x, f"own{i}", channels), factor)
    return x


def _transposed(F, x):  # noqa: N803
    for i in range(6):
        x = F.Deconvolution(x, name=f"up{i}", kernel=(3, 3), num_filter=8,
                            pad=(int(i % 4 > 0),) * 2)
        x = F.relu(F.BatchNorm(x, name=f"norm{i}", fix_gamma=False))
    return x


def _called_twice(F, x):  # noqa: N803
    for i in range(2):
        shapes = ((4, 8), (4,), (8, 4), (8,))
        arrays = [F.var(f"shared{i}{k}", shape=shape)
                  for k, shape in enumerate(shapes)]
        found = []
        for kind in ("avg", "max"):
            y = F.Flatten(F.Pooling(x, global_pool=True, pool_type=kind,
                                    kernel=(1, 1)))
            y = F.relu(F.FullyConnected(y, *arrays[:2], num_hidden=4))
            found.append(F.FullyConnected(y, *arrays[2:], num_hidden=8))
        gate = F.sigmoid(found[0] + found[1])
        x = F.broadcast_mul(x, F.expand_dims(F.expand_dims(gate, 2), 3))
    return x


def _shortcuts(F, x):  # noqa: N803
    """The first one has no layers, the other nothing."""
    for i in range(2):
        y = F.relu(_layer(F, x, f"first{i}", 8, 3))
        y = _layer(F, y, f"second{i}", 8, 3)
        x = F.relu(y + (x if i else x * 2))
    return x


def _in_one_call(F, x):  # noqa: N803
    y = _layer(F, x, "own", 8)
    return F.relu(F.concat(y, x, y, dim=1))


def _in_each_other(F, x):  # noqa: N803
    for i, channels in enumerate((8, 8, 16)):
        y = x
        for k in range(2):
            own, name = y, f"at{i}{k}"
            y = F.relu(_layer(F, y, f"{name}a", channels, 3))
            y = _layer(F, y, f"{name}b", channels, 3)
            if channels == 16 and k == 0:
                own = _layer(F, own, f"{name}c", channels)
            y = F.relu(y + own)
        x = F.relu(y + (_layer(F, x, f"over{i}", 16)
                        if channels == 16 else x))
    return x


@pytest.mark.parametrize("build, classes, parts", [
    (_levels, ["ConvBlock", "Net"],
     {"scale_factor=scale_factor": 1}),
    (_transposed, ["ConvBlock", "Net"], {"3, padding=padding": 1}),
    (_called_twice, ["SumBlock", "Gate", "Net"],
     {"nn.Linear(": 2, "weight =": 0, "self.body(": 2}),
    (_shortcuts, ["Mul", "ResidualBlock", "Net"], {"downsample=True": 1}),
    (_in_one_call, ["DenseLayer", "Net"], {"self.body(x)": 1}),
    (_factors, ["Block", "Net"], {"torch.zeros(size)": 1}),
    (_in_each_other, [*map("ResidualBlock{}".format, "ABC"), "Net"],
     {"in_channels != out_channels": 1, "self.shortcut(x)": 2}),
    (_split_units, ["SplitBlock", "Net"], {"nn.ChannelShuffle": 1}),
    (_swishes, ["HardSwish", "ConvLayers", "Net"],
     {"nn.SiLU()": 1, "torch.clamp(x + 3, 0, 6)": 1}),
    (_inverted, ["InvertedResidual", "Net"],
     {"InvertedResidual(8": 0, "torch.relu": 0, "InvertedResidual(": 4,
      "residual": 0, "(3, 16, 3": 1})])
def test_a_block_ends_where_a_person_ends_it(tmp_path, build, classes, parts):
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        symbol = build(mx.sym, mx.sym.var("data"))
        channels = 3 if build is _inverted else 8
        shapes, _, others = symbol.infer_shape(data=(2, channels, 4, 4))
        symbol.save(str(tmp_path / "net-symbol.json"))
        mx.nd.save(str(tmp_path / "net-0000.params"), {
            f"{kind}:{name}": mx.nd.random.uniform(0.5, 1, shape)
            for kind, names, all_shapes in (
                ("arg", symbol.list_arguments(), shapes),
                ("aux", symbol.list_auxiliary_states(), others))
            for name, shape in zip(names, all_shapes) if name != "data"})
    with mgpu.using_backend("torch"):
        import torch
        net = written_of(tmp_path).load(str(tmp_path / "net.safetensors"))
        x = torch.randn(2, channels, 4, 4)
        torch.testing.assert_close(
            net(x), mgpu.from_gluon(*files_in(tmp_path))(x))
    text = (tmp_path / "net.py").read_text()
    assert re.findall(r"^class (\w+)", text, re.M) == classes
    assert {part: text.count(part) for part in parts} == parts


def test_lines_that_are_broken_say_the_same():
    """Nothing becomes a tuple, nor stops being one."""
    import ast
    import random
    from mgpu.backends._torch.gluon.source.layout import fit
    rng, long = random.Random(0), 0

    def expression(depth):
        if depth == 0:
            return rng.choice("abcdefg") * rng.randint(1, 12)
        parts = [expression(depth - 1) for _ in range(rng.randint(1, 3))]
        return rng.choice([
            f"f({', '.join(parts)})", f"({' + '.join(parts)}) * k",
            f"({', '.join(parts)},)", f"self.layer({parts[0]})[0]",
            f"g({parts[0]}, key=({parts[-1]} - 1))", f"[{parts[0]}]"])
    for _ in range(300):
        text = f"return {expression(rng.randint(1, 5))}"
        lines = fit(text, 8)
        long += len(lines) > 1
        written, meant = (
            ast.dump(ast.parse("def f():\n" + body))
            for body in ("\n".join(lines), f"        {text}"))
        assert written == meant
    assert long > 100


@pytest.mark.parametrize("name", ['a"""; raise SystemExit; """b', "c\\N{x}'"])
def test_the_name_of_a_file_is_no_code(tmp_path, name):
    from_text(tmp_path, "F.relu(x)")
    (tmp_path / "net-symbol.json").rename(tmp_path / f"{name}-symbol.json")
    with mgpu.using_backend("torch"):
        import torch
        mgpu.gluon_source(tmp_path / f"{name}-symbol.json",
                          tmp_path / "net-0000.params", tmp_path / "net.py")
        module = imported(tmp_path / "net.py")
        assert module.Net()(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
        assert "converted from Gluon" in module.__doc__


@pytest.mark.parametrize("text", [
    "F.LeakyReLU(x, act_type='leaky', slope=0.25)", "F.max(x, axis=2)",
    "F.LeakyReLU(x, act_type='selu')", "F.broadcast_maximum(x, -x)",
    "F.take(x, F.BlockGrad(F.sum(x, axis=(1, 2)) > 0), mode='wrap')",
    "F.L2Normalization(x)", "F.pick(x, F.sum(x, axis=2))",
    "F.contrib.interleaved_matmul_selfatt_qk(F.concat(x, x, dim=2)"
    ".reshape((4, 1, 12)), heads=2)"])
def test_plain_source_of_functions_needs_no_mgpu(tmp_path, text):
    """A copy of what PyTorch has not; its nearest for the rest."""
    net = from_text(tmp_path, text)
    with mgpu.using_backend("torch"):
        import torch
        module = written_of(tmp_path, plain=True)
        x = torch.randn(2, 4, 3)
        torch.testing.assert_close(module.Net()(x), net(x))
    assert "mgpu" not in (tmp_path / "net.py").read_text()


def test_plain_source_of_fixed_statistics_is_refused(tmp_path):
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        files = export(mx.gluon.nn.BatchNorm(
            use_global_stats=True, in_channels=4), tmp_path, (2, 4, 3, 3))
    with mgpu.using_backend("torch"), pytest.raises(
            NotImplementedError, match="GluonBatchNormOf: write it without"):
        mgpu.gluon_source(*files, tmp_path / "net.py", plain=True)
    assert not (tmp_path / "net.py").exists()


@on("lenet")
def test_plain_source_needs_no_mgpu(exported, tmp_path):  # noqa: F811
    """Predictions are the same; the difference is named."""
    with mgpu.using_backend("torch"):
        written = Written(exported, tmp_path, plain=True)
        net = mgpu.from_gluon(exported.symbol, exported.params)
        case = exported.predicting()
        assert by_net(case, written.net) == by_net(case, net)
    assert "mgpu" not in written.text
    assert re.search(r"^# Gluon's running variance.*n / ", written.text, re.M)


@on("lenet")
def test_without_arrays_the_graph_must_know_sizes(
        exported, tmp_path):  # noqa: F811
    with mgpu.using_backend("torch"), pytest.raises(
            ValueError, match="Pass net-0000.params"):
        mgpu.gluon_source(exported.symbol, None, tmp_path / "net.py")
    assert not (tmp_path / "net.py").exists()
