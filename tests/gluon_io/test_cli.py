"""`mgpu inspect`, `mgpu convert` and `mgpu lint SCRIPT.py`."""
import functools
import itertools
import json
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import mgpu
from conftest import BACKENDS
from mgpu import cli, gluon_io
from mgpu.gluon_io import script
from mgpu.tools.inspection import inspect_file

from .conftest import export, files_in

FILES = Path(__file__).parent.parent / "files" / "gluon"
both = pytest.mark.skipif(set(BACKENDS) < {"mxnet", "torch"},
                          reason="compares two engines")


def command(*arguments, columns=80):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(
        cli.cli, list(map(str, arguments)), prog_name="mgpu")


def refused(result):
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: "), result.stderr
    return result.stderr


# -- mgpu inspect -------------------------------------------------------------

@pytest.mark.parametrize("columns, name, shown", [
    (80, "export.params", ["parameters of MXNet", "arrays,"]),
    (120, "sparse.params", ["row-sparse", "csr"]),
    (120, "sgd-factor.states", ["SGD", "FactorScheduler", "factor 0.5",
                                "updates: 2"]),
    (80, "adam-float16.states", ["Adam", "beta2 0.999", "float16"]),
])
def test_inspect_shows_the_contents_of_a_file(columns, name, shown):
    """Format, class, options and dtypes; no line after the first is wider than
    the terminal."""
    result = command("inspect", FILES / name, columns=columns)
    assert result.exit_code == 0, result.output
    assert [x for x in shown if x not in result.output] == [], result.output
    assert max(map(len, result.output.splitlines()[1:])) <= columns


def test_inspect_json_lists_every_array(tmp_path):
    file = tmp_path / "x.params"
    arrays = {"b": np.ones((2, 3), "float32"), "a": np.zeros(4, "float16")}
    gluon_io.save_params(file, arrays)
    found = json.loads(command("inspect", file, "--format", "json").output)
    assert found["arrays"] == [
        {"name": name, "shape": list(x.shape), "dtype": x.dtype.name,
         "bytes": x.nbytes, "storage": "dense"} for name, x in arrays.items()]
    assert found["values"] == 10


def test_states_are_by_index():
    """SGD has states of parameters 0 and 2; parameter 1 is frozen."""
    found = inspect_file(FILES / "sgd-momentum.states")
    states = gluon_io.load_trainer_states(FILES / "sgd-momentum.states")
    assert {s["index"]: s["arrays"][0]["shape"] for s in found["states"]} \
        == {key: list(x.shape) for key, x in states.states.items()}
    assert {s["updates"] for s in found["states"]} == {2}


@pytest.fixture
def of_mgpu(backend):
    """Replicas and their trainer."""
    replicas = mgpu.initialize(mgpu.models.lenet(), [mgpu.cpu(0)],
                               mgpu.initializers.Xavier())
    return replicas, mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})


def test_inspect_names_the_kind_of_a_file(backend, of_mgpu, tmp_path):
    """A checkpoint and trainer states of mgpu, and states of a Module of
    MXNet."""
    replicas, trainer = of_mgpu
    mgpu.save_checkpoint(tmp_path / "a", replicas, trainer)
    trainer.save_states(str(tmp_path / "b"))
    found = inspect_file(tmp_path / "a")
    assert (found["kind"], found["engine"], found["optimizer"],
            found["settings"]) == ("checkpoint of mgpu", backend.name, "SGD",
                                   {"learning_rate": 0.5})
    assert sum(np.prod(p.shape) for p in replicas.params()) == sum(
        np.prod(x["shape"]) for x in found["arrays"]
        if x["name"].startswith("value:"))
    assert inspect_file(tmp_path / "b")["kind"] == "trainer states of mgpu"
    module = FILES / "networks" / "module-0002.states"
    assert "of a Module of MXNet" in inspect_file(module)["kind"]


def test_a_damaged_or_unknown_file_is_an_error_of_one_line(tmp_path):
    for content in (
            b"", b"nothing of the kind", b"{}", b'{"nodes": 3}', b"PK\3\4",
            b"\x80\4K", b"\x12\1" + bytes(40),
            b"\xff\xff\xff\xff\0\0\0\0{}",
            b"\x02\0\0\0\0\0\0\0{}" + bytes(9)):
        (tmp_path / "x").write_bytes(content)
        assert len(refused(command("inspect", tmp_path / "x"))
                   .splitlines()) == 1, content


@pytest.mark.parametrize("kind, write", [
    ("arrays of NumPy", lambda path: np.savez(path, x=np.ones(3))),
    ("of torch.export", lambda path: _zip_of(path, "x/archive_format")),
    ("of torch.save", lambda path: _zip_of(path, "x/data.pkl"))])
def test_inspect_names_the_format_of_a_zip(kind, write, tmp_path):
    write(tmp_path / "x.npz")
    assert kind in " ".join(command("inspect", tmp_path / "x.npz"
                                    ).output.split())


def _zip_of(path, name):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "pt2")


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="pickles its optimizer")
def test_update_counts_of_another_type_are_refused(tmp_path):
    file = tmp_path / "x.states"
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        optimizer = mx.optimizer.SGD()
        optimizer._index_update_count = "text"
        file.write_bytes(pickle.dumps(({}, optimizer)))
    assert "counts" in refused(command("inspect", file))


@pytest.mark.parametrize("how", ["rich", "click"])
def test_a_closed_pipe_is_silent(how, monkeypatch):
    """The status is 141, whether rich has turned BrokenPipeError into
    SystemExit or not."""
    from mgpu.cli import gluon

    def closed(*_):
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            if how == "click":
                raise
            raise SystemExit(1)     # noqa: B904, as rich does
    monkeypatch.setattr(gluon, "print_text", closed)
    result = command("inspect", FILES / "export.params")
    assert (result.exit_code, result.output) == (141, "")


def test_load_states_refuses_a_file_of_gluon(of_mgpu):
    """The error names the function that reads it."""
    with pytest.raises(ValueError, match="mgpu.resume_from_gluon"):
        of_mgpu[1].load_states(FILES / "sgd.states")


# -- mgpu convert -------------------------------------------------------------

@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A network with a shared weight and batch norm, of two files."""
    folder = tmp_path_factory.mktemp("exported")
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        from mxnet.gluon import nn
        mx.random.seed(1)
        net = nn.HybridSequential()
        with net.name_scope():
            first = nn.Dense(6, in_units=6, flatten=False)
            net.add(nn.Dense(6, in_units=5), first, nn.BatchNorm(),
                    nn.Activation("relu"),
                    nn.Dense(6, in_units=6, use_bias=False,
                             params=first.params),
                    nn.Dense(3, in_units=6))
        return export(net, folder, (2, 5), init=mx.init.Xavier())


def values(pair):
    """The network of `from_gluon`, and copies of its values by name."""
    with mgpu.using_backend("torch"):
        net = mgpu.from_gluon(*pair)
        return net, {name: x.numpy().copy()
                     for name, x in net.state_dict().items()}


@both
def test_a_graph_and_its_operators(exported):
    """`inspect_file` counts the operators with the arrays and without."""
    found = inspect_file(*exported)
    assert found["inputs"] == ["data"] and found["missing"] == []
    assert found["operators"] == {"Activation": 1, "BatchNorm": 1,
                                  "FullyConnected": 4}
    assert inspect_file(exported[0])["parameters"] == found["parameters"]
    assert "Each has a rule" in command("inspect", *exported).output


@both
@pytest.mark.parametrize("ending", ["safetensors", "params", "pt2", "py"])
def test_converted_files_train_as_gluons_network(ending, exported,
                                                 tmp_path):
    """`convert --check` compares each format with MXNet in training steps."""
    page = tmp_path / "page.html"
    result = command("convert", *exported, "-o", tmp_path / f"x.{ending}",
                     "--input", "5", "--check", "-o", page)
    assert result.exit_code == 0, result.output
    assert "SAME (lock-step)" in result.output
    assert b"<html" in page.read_bytes()


@both
def test_safetensors_have_shared_tensors_once(exported, tmp_path):
    """The metadata name the stored tensor of the one that shares it; loading
    restores both."""
    import safetensors.torch
    file = tmp_path / "x.safetensors"
    assert command("convert", *exported, "-o", file).exit_code == 0
    net, expected = values(exported)
    about = inspect_file(file)
    names = json.loads(about["metadata"]["gluon_names"])
    assert names == net.gluon_names
    written = {x["name"] for x in about["arrays"]}
    left = expected.keys() - written
    assert len(left) == 1       # the weight of the layer that shares
    for name in left:
        kept = about["metadata"][name]
        assert kept in written and names[kept] == names[name]
    with mgpu.using_backend("torch"):
        for x in net.state_dict().values():
            x.zero_()
        safetensors.torch.load_model(net, file)
    for name, x in net.state_dict().items():
        assert x.numpy().tobytes() == expected[name].tobytes(), name


@both
def test_pt2_predicts_for_any_batch_size(exported, tmp_path):
    import torch
    file = tmp_path / "x.pt2"
    assert command("convert", *exported, "-o", file, "--input", "5"
                   ).exit_code == 0
    net, _ = values(exported)
    loaded = torch.export.load(str(file)).module()
    for n in (1, 7):
        x = torch.randn(n, 5, generator=torch.Generator().manual_seed(0))
        assert torch.equal(loaded(x), net.eval()(x)), f"batch size {n}"


@pytest.mark.skipif("torch" not in BACKENDS, reason="torch writes it")
def test_pt2_of_an_lstm_gives_no_warning(recwarn, tmp_path):
    """torch.export's warning about `_flat_weights` is filtered."""
    result = command("convert", *files_in(FILES / "networks", "lstm"), "-o",
                     tmp_path / "x.pt2", "--input", "6:int64")
    assert result.exit_code == 0, result.output
    assert not [x for x in recwarn if "_flat_weights" in str(x.message)]


@both
def test_a_check_against_a_trace(exported, tmp_path):
    """`convert --trace` compares with a recorded run, and fails for another
    activation and for other initial values."""
    def live():
        with mgpu.using_backend("mxnet"):
            return mgpu.from_gluon(*exported)
    from mgpu import parity
    rng = np.random.default_rng(0)
    trace = tmp_path / "trace"
    parity.record(live, file=str(trace), loss=mgpu.losses.L2Loss(), batches=[
        (rng.standard_normal((4, 5)), rng.standard_normal((4, 3)))])
    arguments = ("-o", tmp_path / "x.params", "--trace", trace)
    result = command("convert", *exported, *arguments)
    assert result.exit_code == 0 and "SAME" in result.output, result.output
    other = tmp_path / "other.json"
    other.write_text(exported[0].read_text().replace('"relu"', '"tanh"'))
    arguments += ("--force",)
    result = command("convert", other, exported[1], *arguments)
    assert result.exit_code == 1 and "DIFFERENT" in result.output
    values = tmp_path / "values.params"
    gluon_io.save_params(values, {
        name: x * np.float32(1.7 if name.endswith("dense0_weight") else 1)
        for name, x in gluon_io.load_params(exported[1]).items()})
    result = command("convert", exported[0], values, *arguments)
    assert result.exit_code == 1 and "initial value" in result.output


@both
def test_missing_operators_are_one_list(exported, tmp_path):
    graph = json.loads(exported[0].read_text())
    for node in graph["nodes"]:
        if node["op"] == "FullyConnected":
            node["op"] = "_made_up"
        if node["op"] == "BatchNorm":
            node["attrs"]["output_mean_var"] = "True"
    symbol, out = tmp_path / "net-symbol.json", tmp_path / "x.params"
    symbol.write_text(json.dumps(graph))
    text = refused(command("convert", symbol, exported[1], "-o", out))
    assert "5 operators have no rule" in text and not out.exists()
    assert "  _made_up: no rule (4 nodes, such as" in text
    assert "  BatchNorm: output_mean_var=True (1 node, such as" in text
    # the same without shapes, which no rule was asked for
    text = command("inspect", symbol).output
    assert "_made_up: no rule (4 nodes" in text
    assert "  BatchNorm: output_mean_var=True (1 node, such as" in text


@pytest.mark.parametrize("options", [(), ("--plain",)])
def test_plain_source_is_asked_for(exported, options, tmp_path):
    """The source imports the Gluon layers of mgpu, unless --plain is given."""
    command("convert", *exported, "-o", tmp_path / "net.py", *options)
    assert ("import Gluon" in (tmp_path / "net.py").read_text()) \
        == (not options)


@pytest.mark.skipif("torch" not in BACKENDS, reason="rules are PyTorch's")
def test_every_operator_of_the_stored_graphs_has_a_rule():
    """`inspect_file` of a graph alone, without shapes, lists no missing
    rule."""
    files = sorted(FILES.rglob("*-symbol.json"))
    assert files and {file.name: inspect_file(file)["missing"]
                      for file in files} == {file.name: [] for file in files}


@pytest.mark.parametrize("arguments, said", [
    (("-o", "x.onnx"), "ends in .py, .safetensors"),
    (("-o", "x.params"), "no PARAMS"),
    (("p", "-o", "x.pt2"), "--input 3x224x224"),
    (("p", "-o", "x.params", "--check"), "--input 3x224x224"),
    (("p", "-o", "x.params", "-o", "x.html"), "without --check"),
    (("p", "-o", "x.pt2", "--input", "3:text"), "16:int32"),
    (("-o", "x.py", "--input", "3", "--check"), "no PARAMS"),
    (("p", "-o", "x.params", "--plain"), "--plain is about source"),
])
def test_wrong_arguments_of_convert(arguments, said):
    assert said in refused(command("convert", "net-symbol.json", *arguments))


# -- what is there is checked, and stays --------------------------------------

@pytest.fixture(scope="module")
def dropping(tmp_path_factory):
    """Dropout at three places, batch norm, and a recurrent layer of two
    layers that drops out between them; two inputs, one of them an index for
    each row, and two outputs."""
    folder = tmp_path_factory.mktemp("dropping")
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        from mxnet.gluon import nn, rnn
        mx.random.seed(1)

        class Forked(mx.gluon.HybridBlock):
            def __init__(self):
                super().__init__()
                with self.name_scope():
                    self.dense, self.norm = nn.Dense(4), nn.BatchNorm()
                    self.rows, self.slope = nn.Embedding(9, 4), \
                        nn.LeakyReLU(0.25)
                    self.one, self.two = nn.Dense(3), nn.Dense(3)

            def hybrid_forward(self, F, x, i):
                x = self.slope(self.norm(self.dense(x))) + self.rows(i)
                return self.one(x), self.two(x)
        nets = {name: nn.HybridSequential() for name in (
            "dense", "lstm", "one", "none", "axes", "cast", "always")}
        nets["forked"] = Forked()
        nets["axes"].add(nn.Dropout(0.5, axes=(1,)), nn.LayerNorm(),
                         nn.Dense(3))
        nets["always"].add(nn.HybridLambda(
            lambda F, x: F.Dropout(x, mode="always")), nn.Dense(3))
        nets["cast"].add(nn.Dense(3), nn.HybridLambda(
            lambda F, x: F.cast(x, "float32")), nn.Dense(2))
        nets["none"].add(nn.Activation("relu"))
        nets["lstm"].add(rnn.LSTM(3, 2, dropout=0.3, input_size=4,
                                  layout="NTC"), nn.Dense(2))
        nets["one"].add(rnn.GRU(3, input_size=4, layout="NTC"), nn.Dense(2))
        nets["dense"].add(
            nn.Dense(8, in_units=4), nn.Dropout(0.25), nn.BatchNorm(),
            nn.Activation("relu"), nn.Dropout(0.5),
            nn.Dense(8, activation="tanh"), nn.Dropout(0.5), nn.Dense(3))
        shapes = {**dict.fromkeys(("lstm", "one", "axes"), [(2, 5, 4)]),
                  "forked": [(2, 5), (2,)]}
        found = {name: export(net, folder, *shapes.get(name, [(2, 4)]),
                              name=name, init=mx.init.Normal(0.5))
                 for name, net in nets.items()}
    half = folder / "half-symbol.json"
    half.write_text(found["cast"][0].read_text().replace(
        '"float32"', '"float16"'))
    return {**found, "half": (half, found["cast"][1])}


#: of networks whose input is not a row of 4
SHAPES = {**dict.fromkeys(("lstm", "one", "axes"), ("5x4",)),
          "forked": ("5", "():int64")}


@pytest.fixture(scope="module")
def check_edited(dropping, tmp_path_factory):
    """Checks the source of a network in which `old` became `new`, `(.*?)`
    being any text."""
    def convert(name, folder, *more):
        inputs = (("--input", shape) for shape in SHAPES.get(name, ("4",)))
        return command("convert", *dropping[name], "-o", folder / "x.py",
                       *itertools.chain(*inputs), *more)

    @functools.cache
    def written(name):
        folder = tmp_path_factory.mktemp("written")
        assert convert(name, folder).exit_code == 0
        return folder

    def check(name, old, new):
        folder = tmp_path_factory.mktemp("edited")
        shutil.copytree(written(name), folder, dirs_exist_ok=True)
        file = folder / "x.py"
        pattern = "(.*?)".join(map(re.escape, old.split("(.*?)")))
        text, count = re.subn(pattern, new, file.read_text(), count=1,
                              flags=re.DOTALL)
        assert count, f"the source has no {old}"
        file.write_text(text)
        result = convert(name, folder, "--check-only")
        assert file.read_text() == text
        return result
    return check


EDITS = {       # a network, a text of its source, and its replacement
    "nothing": ("dense", "nn", "nn"),
    "rates exchanged": ("dense", "nn.Dropout(0.25)(.*?)nn.Dropout()",
                        "nn.Dropout()\\1nn.Dropout(0.25)"),
    "a result that is not used": (
        "dense", "return self.layers(x)",
        "for layer in self.layers:\n"
        "            y = layer(x)\n"
        "            x = x if isinstance(layer, nn.Dropout) else y\n"
        "        return x"),
    "rates exchanged in later passes": (
        "dense", "return self.layers(x)",
        "self.passes = getattr(self, 'passes', 0) + self.training\n"
        "        self.layers[2].p, self.layers[5].p = ((0.25, 0.5)\n"
        "            if self.passes < 4 else (0.5, 0.25))\n"
        "        return self.layers(x)"),
    "another rate after a backward pass": (
        "dense", "return self.layers(x)",
        "y = self.layers(x)\n"
        "        if y.requires_grad:\n"
        "            y.register_hook(\n"
        "                lambda g: vars(self.layers[2]).update(p=0.5))\n"
        "        return y"),
    "whole rows": ("dense", "nn.Dropout()", "nn.Dropout1d()"),
    "predictions too": ("axes", "axes=(1,)", "axes=(1,), always=True"),
    "no change of dropout in predictions": ("always", "nn", "nn"),
    "computed again": (
        "axes", "return self.layers(x)",
        "from torch.utils.checkpoint import checkpoint\n"
        "        return checkpoint(self.layers, x, use_reentrant=False)"),
    "no change of a cast": ("cast", "nn", "nn"),
    "a rate less": ("dense", "nn.Dropout()", "nn.Identity()"),
    "a batch norm of torch's": ("dense", "GluonBatchNorm(", "nn.BatchNorm1d("),
    "a clipped relu": ("dense", "nn.ReLU()", "nn.ReLU6()"),
    "another rate of an LSTM": ("lstm", "dropout=0.3", "dropout=0.4"),
    "a weight of the last row": (
        "forked", "    return net",
        "    net.embedding.weight.data[8, 1] += 1e-6\n    return net"),
    "a row that is not trained": (
        "forked", "nn.Embedding(9, 4)", "nn.Embedding(9, 4, padding_idx=8)"),
    "a slope": ("forked", "slope=0.25", "slope=0.2499"),
    "outputs exchanged": (
        "forked", "return self.linear((.*?)), self.linear2(",
        "return self.linear2(\\1), self.linear("),
    "no change of a GRU": ("one", "nn", "nn")}


@both
@pytest.mark.parametrize("edit", EDITS)
def test_a_check_of_an_edited_source(edit, check_edited):
    """`--check-only` returns 0 if the edit changes no result, else 1, and
    names a changed dropout."""
    name, old, new = EDITS[edit]
    result = check_edited(name, old, new)
    same = new == "nn" or edit == "computed again"
    assert result.exit_code == int(not same), result.output
    assert ("SAME (lock" in result.output) == same
    assert not same or "warning" not in result.output
    said = " ".join(result.output.split())
    assert ("drops out with" in said) == (
        edit in ("rates exchanged", "whole rows", "predictions too",
                 "a rate less", "another rate of an LSTM",
                 "rates exchanged in later passes",
                 "another rate after a backward pass"))
    assert ("is not used as" in said) == (edit == "a result that is not used")
    assert "10 times as large" in result.output


RESULT = "return self.layers(x)"
RANDOM = "takes numbers from a random stream"


@both
@pytest.mark.parametrize("old, new, said", [
    # other outputs
    (RESULT, "y = self.layers(x)\n        return y, y",
     "received 2 outputs ((4, 3), (4, 3)) against 1 output ((4, 3))"),
    (RESULT, "return (self.layers(x),)", "received 1 output in a tuple"),
    (RESULT, RESULT + "[:, :2]",
     "received 1 output ((4, 2)) against 1 output ((4, 3))"),
    (RESULT, RESULT + ", None", "received tuple of Tensor, NoneType"),
    # a draw changes one of a million passes, and a seed gives all the same
    # masks
    (RESULT, RESULT + " * (torch.rand(()) > 1e-6)", RANDOM),
    (RESULT, "torch.manual_seed(0)\n        " + RESULT, RANDOM),
    (RESULT, "with torch.random.fork_rng():\n            torch.manual_seed(0)"
     "\n            " + RESULT, RANDOM),
    # no network
    ("nn.Dropout(0.25),", "", "nn.Identity() takes the place"),
    ("    return net", "    return net.requires_grad_(False)", "all frozen"),
    ("    return net", "    return torch.compile(net)",
     "without torch.compile"),
    ("    def forward", "    @torch.compile\n    def forward",
     "without torch.compile"),
    ("class", "class class", "Correct it")])
def test_an_edit_that_cannot_be_checked(old, new, said, check_edited):
    text = refused(check_edited("dense", old, new))
    assert "received" in text and said in " ".join(text.split())


def test_a_path_with_a_null_character_is_refused():
    with pytest.raises(ValueError, match="null character; received 'a"):
        inspect_file("a\0b")


@both
@pytest.mark.parametrize("damage", ["values", "junk", "function", "rows"])
def test_the_check_reads_the_pt2_file(damage, exported, tmp_path):
    """`--check-only` finds other values, another function, a fixed batch size,
    and text in the file."""
    import torch
    file = tmp_path / "x.pt2"
    net, _ = values(exported)
    if damage == "junk":
        file.write_bytes(b"no network")
    elif damage == "rows":
        torch.export.save(torch.export.export(
            net.eval(), (torch.ones(3, 5),)), file)
    else:
        with torch.no_grad(), mgpu.using_backend("torch"):
            for layer in net.modules():
                if damage == "values" and hasattr(layer, "weight"):
                    layer.weight.mul_(1.7)
                elif damage == "function" and isinstance(
                        layer, torch.nn.ReLU):
                    layer.forward = torch.tanh
            mgpu.to_pt2(net, file, [np.ones((2, 5), "float32")])
    result = command("convert", *exported, "-o", file, "--input", "5",
                     "--check-only")
    assert result.exit_code == (2 if damage in ("junk", "rows") else 1)
    assert {"junk": "expected a file of torch.export",
            "rows": "dynamic first axis", "values": "initial value",
            "function": "predicts otherwise"}[damage] in " ".join(
                (result.output + result.stderr).split())


@both
@pytest.mark.parametrize("ending", ["safetensors", "params", "py"])
def test_an_edited_file_is_not_overwritten(ending, dropping, tmp_path):
    """--force overwrites it; converting again to equal contents needs no
    --force."""
    file = tmp_path / f"x.{ending}"
    arguments = ("convert", *dropping["dense"], "-o", file)
    for _ in range(2):      # the same again is no loss
        assert command(*arguments).exit_code == 0
    written = file.read_bytes()
    file.write_bytes(written + b"# mine")
    text = refused(command(*arguments, "--input", "4", "--check"))
    assert "with other contents" in text and "--force" in text
    assert file.read_bytes() == written + b"# mine"
    assert command(*arguments, "--force").exit_code == 0
    assert file.read_bytes() == written


@both
def test_weights_beside_a_source_are_not_overwritten(dropping, tmp_path):
    """x.py comes with x.safetensors, which exists with other contents: nothing
    is written."""
    files = dropping["dense"]
    file = tmp_path / "x.safetensors"
    assert command("convert", *files, "-o", file).exit_code == 0
    before = file.read_bytes()
    assert "x.safetensors" in refused(
        command("convert", *files, "-o", tmp_path / "x.py"))
    with mgpu.using_backend("torch"), pytest.raises(FileExistsError):
        mgpu.gluon_source(*files, tmp_path / "x.py")
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == before


@both
def test_input_files_are_not_overwritten(dropping, tmp_path):
    """`convert` and `gluon_source` refuse an output that is an input; --force
    does not change that."""
    symbol, params = (tmp_path / f"net{end}" for end in (".py", ".params"))
    for file, source in zip((symbol, params), dropping["dense"]):
        file.write_bytes(source.read_bytes())
    before = params.read_bytes()
    for ending in ((), ("--force",)):
        assert "to read and to write" in refused(command(
            "convert", symbol, params, "-o", params, "--dtype", "float16",
            *ending))
    with mgpu.using_backend("torch"):
        with pytest.raises(ValueError, match="to read and"):
            mgpu.gluon_source(symbol, params, symbol)
        (tmp_path / "folder").mkdir()
        with pytest.raises(IsADirectoryError):
            mgpu.gluon_source(symbol, params, tmp_path / "folder")
    assert params.read_bytes() == before
    assert {x.name for x in tmp_path.iterdir()} == {"net.py", "net.params",
                                                    "folder"}


@both
@pytest.mark.parametrize("name, arguments, said", [
    ("dense", ("--trace", "nosuch"), "nosuch"),
    ("dense", ("--input", "7", "--check"), "Correct --input"),
    ("dense", ("--input", "4", "--input", "4", "--check"), "inputs data"),
    ("half", ("--input", "4", "--check"), "fixes float16 at the node"),
    ("none", ("--input", "4", "--check"), "without parameters")])
def test_files_that_cannot_be_checked_are_not_written(name, arguments, said,
                                               dropping, tmp_path):
    assert said in refused(command("convert", *dropping[name], "-o",
                                   tmp_path / "x.py", *arguments))
    assert not list(tmp_path.iterdir())


@both
def test_arrays_of_another_network_are_refused(backend, exported, dropping,
                                               tmp_path):
    """Alike by the reader of either engine, and by both commands."""
    few = tmp_path / "few.params"
    found = gluon_io.load_params(exported[1])
    gluon_io.save_params(few, dict(list(found.items())[1:]))
    for params in (dropping["dense"][1], few):
        with pytest.raises(ValueError, match="two files of one export"):
            mgpu.from_gluon(exported[0], params)
        for arguments in (("inspect",), ("convert", "-o", tmp_path / "x.py")):
            assert "two files of one export" in refused(command(
                arguments[0], exported[0], params, *arguments[1:]))


@pytest.mark.skipif("torch" not in BACKENDS, reason="torch writes it")
@pytest.mark.parametrize("call, error", [
    (lambda net, a, b: mgpu.register_op("X", None), TypeError),
    (lambda net, a, b: mgpu.register_op(1, len), TypeError),
    (lambda net, a, b: mgpu.from_gluon(a, b, softmax="no"), ValueError),
    (lambda net, a, b: mgpu.from_gluon(a, b, "int8"), ValueError),
    (lambda net, a, b: mgpu.gluon_source(a, b, "x.py", "no"), ValueError),
    (lambda net, a, b: mgpu.to_pt2(net, "x.pt2", None), TypeError),
    (lambda net, a, b: mgpu.to_pt2(net, "x.pt2", [1]), TypeError),
    (lambda net, a, b: mgpu.to_pt2(net, "x.pt2", "abc"), TypeError),
    (lambda net, a, b: mgpu.to_safetensors(net, "x.params"), ValueError),
    (lambda net, a, b: mgpu.to_gluon_params(net, "x.pt2"), ValueError),
    (lambda net, a, b: mgpu.gluon_source(a, b, "net.json"), ValueError)])
def test_wrong_arguments_of_conversions(call, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = files_in(FILES / "networks", "lstm")
    with mgpu.using_backend("torch"):
        net = mgpu.from_gluon(*files)
        with pytest.raises(error, match="received"):
            call(net, *files)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="MXNet's message")
def test_the_other_engine_is_named(tmp_path):
    """`gluon_source` on MXNet raises, and names the call that selects
    torch."""
    with mgpu.using_backend("mxnet"), pytest.raises(
            NotImplementedError, match=r"set_backend\('torch'\)"):
        mgpu.gluon_source("a", "b", tmp_path / "x.py")


# -- mgpu lint SCRIPT.py ------------------------------------------------------

SCRIPT = '''
import mxnet as mx
from mxnet import gluon, autograd as ag
from mxnet.gluon.utils import split_and_load as split
raise SystemExit("it is not run")
ctx = [mx.gpu(0), mx.cpu()]
net.initialize(mx.init.Xavier(), ctx=ctx)
net.hybridize()
p.grad_req = "null"
trainer = gluon.Trainer(
    net.collect_params(), "sgd", kvstore="device")
with ag.record():
    shards = split(x, ctx)
metric = mx.metric.Accuracy()
mx.nd.waitall()
loader, loss = gluon.data.DataLoader(x), gluon.loss.L2Loss()
other.initialize()
net(x.as_in_context(ctx[0]))
rate = mx.lr_scheduler.FactorScheduler(1)
net.save_parameters("x")
net.collect_params(".*bias").setattr("wd_mult", 0)
with ag.pause():
    mx.mod.Module(x)
net = gluon.model_zoo.vision.get_model("resnet18_v1")
'''
TOPICS = {6: "a device, devices", 7: "initial weights", 8: "compile",
          9: "not trained", 10: "optimizer",
          11: "key-value store, parameters", 12: "record",
          13: "split a batch", 14: "metric", 15: "wait", 16: "data, loss",
          17: "initial weights", 18: "to a device", 19: "rate",
          20: "save weights", 21: "multipliers of the decay, parameters",
          22: "not recorded", 23: "a network of symbols",
          24: "a network of the zoo"}


def test_lint_finds_the_topics_of_each_line(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    found = {}
    for number, _, line in script.lint_script(file):
        found.setdefault(number, []).append(line.topic)
    assert {n: ", ".join(sorted(x)) for n, x in found.items()} == TOPICS
    printed = command("lint", file).output
    assert "10: trainer = gluon.Trainer(" in printed
    assert 'see the row "optimizer" in the guide' in printed
    assert "mgpu: mgpu.split_and_load(x, ctx)" in printed
    assert "torch: x.chunk(len(ctx))" in printed


def test_a_script_without_mxnet_has_no_findings(tmp_path):
    for source in ("import numpy as np\nx.asnumpy()\nnet.collect_params()",
                   "", "import mgpu\nmgpu.losses.L2Loss()\nx.backward()"):
        (tmp_path / "x.py").write_text(source)
        assert script.lint_script(tmp_path / "x.py") == [], source


def test_lint_refuses_other_text_and_options_of_networks(tmp_path):
    """Text that does not parse, and --classes, which is about networks."""
    (tmp_path / "x.py").write_bytes(b"def (")
    assert "expected a Python script" in refused(
        command("lint", tmp_path / "x.py"))
    assert "received --classes" in refused(
        command("lint", tmp_path / "x.py", "--classes", "3"))


def test_every_row_has_its_own_topic_and_a_pattern():
    """The row of the whole step alone has no pattern: its parts have rows."""
    assert len({line.topic for line in script.LINES}) == len(script.LINES)
    assert [line.topic for line in script.LINES
            if script._pattern(line) is None] == ["the whole step"]


REPLACED = {
    "mx.random.seed(3)": ("mgpu.seed(3)", "torch.manual_seed(3)"),
    "x.as_in_context(mx.cpu())": (
        "mgpu.put(mgpu.to_numpy(x), mx.cpu())", "x.to(device)"),
    "mx.nd.array(x, ctx=mx.cpu())": (
        "mgpu.put(x, mx.cpu(), dtype=", "device=device"),
    "y = net(x).asnumpy()": ("mgpu.to_numpy(net(x))",
                             "net(x).detach().cpu().numpy()"),
    "gluon.Trainer(net.collect_params(), 'adam', {'learning_rate': 1e-3})": (
        "mgpu.Trainer(replicas, 'adam', {'learning_rate': 0.001})",
        "one of torch.optim"),
    "net.weight.lr_mult = 0.0": ("lr_mult={q.name: 0.0}", "groups"),
    "net.weight.wd_mult = 0.0": ("wd_mult={q.name: 0.0}", "groups"),
    "gluon.utils.clip_global_norm(grads, 0.2)": (
        "trainer.clip_global_norm(0.2)", "clip_grad_norm_(parameters, 0.2 /"),
    "trainer.step(64)": ("trainer.step(64)", "optimizer.step()"),
    "trainer.set_learning_rate(0.2)": ("set_learning_rate(0.2)", "= 0.2"),
    "outputs = [net(X) for X in shards]": ("replicas(shards)", "a process"),
    "net.collect_params().reset_ctx(ctx)": ('mgpu.initialize(net, ctx, "keep"',
                                            "net.to(device)"),
    "npx.gpu(2)": ("mgpu.gpu(2)", 'torch.device("cuda", 2)'),
    # without code in the table: the text names the row
    "net.initialize(mx.init.Xavier(magnitude=2.24))": ("initial weights",) * 2,
    "net.initialize()": ("initial weights",) * 2,
    "gluon.loss.SigmoidBinaryCrossEntropyLoss()": ("loss",) * 2,
    "mx.metric.RMSE()": ("metric",) * 2,
    "mx.lr_scheduler.PolyScheduler(100, 0.1)": ("rate",) * 2,
    "autograd.predict_mode()": ("gradients of predictions",) * 2,
    "p.grad_req = 'add'": ("not trained",) * 2,
    "mod.fit(data)": ("a network of symbols",) * 2,
    "mx.nd.array(x, dtype='int32')": ("an array",) * 2}


def test_a_replacement_keeps_what_the_line_says(tmp_path):
    """The code for mgpu and for torch has the arguments of the line; a call
    without code names its row of the guide."""
    for source, cells in REPLACED.items():
        (tmp_path / "x.py").write_text(
            "import mxnet as mx\nfrom mxnet import autograd, gluon, npx\n"
            f"{source}\nnet.hybridize()")
        found, = (line for number, _, line in script.lint_script(
            tmp_path / "x.py") if number == 3)
        for cell, expected in zip((found.mgpu, found.torch), cells):
            if expected == found.topic:
                expected = f'see the row "{expected}"'
            assert expected in cell.replace("`", ""), source


def test_methods_of_another_framework_are_not_gluons(tmp_path):
    (tmp_path / "x.py").write_text(
        "import mxnet as mx, torch\nx = torch.ones(3)\nmodel = f(torch.nn)\n"
        "for y in model(x):\n    y.backward()\n"
        "z = mx.nd.array(x)\nz.backward()\nunknown.backward()")
    assert [number for number, _, line in script.lint_script(
        tmp_path / "x.py") if line.topic == "backward"] == [7, 8]
