"""`mgpu compare`, `mgpu trace` and `mgpu lint`."""
import json
import os
import re
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from conftest import BACKENDS
from mgpu import backends as registry, cli
from mgpu.cli import errors, find
from mgpu.cli.options import parse_params
from mgpu.nn import losses
from nets import gluon

NETS = """
import nets

def make(epsilon=1e-5, units=8):
    return nets.dense_norm({!r}, epsilon, 12, units)
"""
A, B = (f"nets_{name}.py:make" for name in (BACKENDS[0], BACKENDS[-1]))
SMALL = ["--input", "12", "--classes", "3", "--steps", "2",
         "--batch-size", "6"]
SLIP = ["--kwargs-b", '{"epsilon": 0.001}']


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """The current folder, with a module for each engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "path", list(sys.path))
        for name in set(registry.ENTRIES) - set(BACKENDS):
            patch.delitem(registry.ENTRIES, name)     # not under test
        for name in BACKENDS:
            (tmp_path / f"nets_{name}.py").write_text(NETS.format(name))
        yield tmp_path


def mgpu_command(*arguments):
    return CliRunner().invoke(cli.cli, arguments, prog_name="mgpu")


def refused(*arguments):
    """The only line on standard error of a command that ends with 2."""
    result = mgpu_command(*arguments)
    assert result.exit_code == 2, result.output
    line, = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert not re.search(r"(?<![-\w])(map|rules|sample|devices|shape)=", line)
    return line


# -- status 0 and 1 -----------------------------------------------------------

def test_the_same_is_status_0(folder):
    result = mgpu_command("compare", A, B, *SMALL, "--devices", "2",
                          "--optimizer-params", "momentum=0.9", "--plan",
                          "--details", "-o", "x.html", "-o", "x.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("SAME (lock-step)")
    assert "momentum=0.9" in "".join(result.stdout.split())
    assert "0.weight" in result.stdout      # the plan
    found = json.loads((folder / "x.json").read_text())
    assert found["verdict"] == "same"
    assert found["sides"]["b"]["devices"] == ["cpu(0)", "cpu(1)"]
    page = (folder / "x.html").read_text()
    assert "mgpu compare nets_" in page      # the command, to repeat it
    assert result.stdout.splitlines()[-2:] == ["written: x.json",
                                               "written: x.html"]


def test_a_difference_is_status_1():
    result = mgpu_command("compare", A, B, *SMALL, *SLIP)
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("DIFFERENT")
    words = " ".join(result.stdout.split())
    assert "First difference" in words and "The worst of each" not in words
    assert "its epsilon 1e-05 in a, 0.001 in b" in words
    assert "Traceback" not in result.output
    lines = result.stdout.splitlines()
    assert len(lines) <= 24 and "--details shows" in lines[-1]


def test_strict(folder):
    """Rounding hides a difference of 1e-12 in an epsilon of 1e-5."""
    for strict, code in (([], 0), (["--strict"], 1)):
        result = mgpu_command("compare", A, B, *SMALL, *strict, "--kwargs-b",
                              '{"epsilon": 1.0000001e-5}', "--tolerance",
                              "1e-6", "-o", "found.json")
        assert result.exit_code == code, result.output
        assert "not reached by this data: layers '1' of a and '1' of b: " \
            "batch_norm with epsilon 1e-05 and" in " ".join(
                result.stdout.split())
        found = json.loads((folder / "found.json").read_text())
        assert found["coverage"]["options"]
        assert (found["reason"] is None) is (not strict)


LEAKY = """
from nets import gluon, torch
original = gluon(lambda nn: [nn.Dense(4, in_units=12), nn.LeakyReLU(0.1)])
port = torch(lambda nn: [nn.Linear(12, 4), nn.LeakyReLU(0.1)])
"""


if "mxnet" in BACKENDS:
    @pytest.mark.parametrize("command", [
        ["compare", "leaky.py:original", "leaky.py:port", *SMALL],
        ["convert", "net-symbol.json", "net-0000.params", "-o", "net.py",
         "--plain", "--input", "12", "--check"]], ids=lambda x: x[0])
    def test_mxnets_float32(command, folder):
        import mxnet as mx
        (folder / "leaky.py").write_text(LEAKY)
        net = gluon(lambda nn: [nn.Dense(4, in_units=12),
                                nn.LeakyReLU(0.1)])()
        net.initialize()
        net.hybridize()
        net(mx.nd.ones((1, 12)))
        net.export("net")
        for allow, code in (([], 1), (["--allow-mxnet-float32"], 0)):
            result = mgpu_command(*command, *allow)
            assert result.exit_code == code, result.output
            assert "SAME BUT FOR MXNET'S FLOAT32" in " ".join(
                result.stdout.split())


def test_a_module_of_the_current_folder():
    name = A.partition(".")[0]
    try:
        result = mgpu_command("compare", f"{name}:make", B, *SMALL)
    finally:
        del sys.modules[name]
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("options", [
    ["--optimizer", "adam", "--semantics", "torch"],
    ["--b-devices", "cpu:1,cpu:2", "--devices", "2"],
    ["--batch-norm", "sync", "--devices", "2", "--dropout", "off"],
    # a float32 loss of MXNet is right to 2e-6, and so is its gradient
    ["--dtype", "float32", "--tolerance", "1e-4"], ["--weights", "b"],
    ["--loss", "kl-div"]], ids=lambda options: options[1])
def test_options_reach_the_comparison(options):
    result = mgpu_command("compare", A, B, *SMALL, *options)
    assert result.exit_code == 0, result.output


def test_a_map_and_rules(folder):
    (folder / "map.json").write_text(json.dumps(
        {"0.weight": {"to": "0.weight"}, "rules": [["^x", "y"]]}))
    result = mgpu_command("compare", A, B, *SMALL, "--map", "map.json")
    assert result.exit_code == 0, result.output
    assert "matched by given map" in result.stdout


def test_batches_and_a_loss_of_the_user(folder):
    (folder / "own.py").write_text('''
import numpy as np
from mgpu.losses import L2Loss

class Halved(L2Loss):
    def __init__(self):
        super().__init__(weight=0.5)

def batches():
    rng = np.random.default_rng(0)
    return [(rng.random((4, 12)), rng.random((4, 3)))]
''')
    result = mgpu_command("compare", A, B, "--steps", "1", "--data",
                          "own.py:batches", "--loss", "own.py:Halved")
    assert result.exit_code == 0, result.output


def test_invariance(folder):
    result = mgpu_command("compare", A, "--invariance", *SMALL, "--devices",
                          "1,2", "--batch-norm", "sync", "-o", "i.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("exact")
    assert json.loads((folder / "i.json").read_text())["devices"] == [1, 2]
    # each device's own statistics: another training
    assert mgpu_command("compare", A, "--invariance", *SMALL, "--devices",
                        "1,2").exit_code == 1


def test_a_trace(folder):
    result = mgpu_command("trace", "record", A, "-o", "run.trace", *SMALL,
                          "--keep", "2")
    assert result.exit_code == 0, result.output
    assert "2 steps, kept: 2" in result.stdout
    result = mgpu_command("compare", "run.trace", B, "-o", "t.html")
    assert result.exit_code == 0, result.output
    assert mgpu_command("compare", "run.trace", B, *SLIP).exit_code == 1
    assert "says itself what was done; received --input, --steps" in refused(
        "compare", "run.trace", B, "--input", "12", "--steps", "2")


if "mxnet" in BACKENDS:
    def test_lint(folder):
        (folder / "relu.py").write_text(
            "from mxnet.gluon import nn\n"
            "relu = lambda: nn.Activation('relu')\nloss = lambda y, z: y")
        for net, status, last in (
                ("nets_mxnet.py:make", 1, "differences to PyTorch"),
                ("relu.py:relu", 0, "0 differences to PyTorch")):
            result = mgpu_command("lint", net, "--input", "12",
                                  "--batch-size", "5", "--loss",
                                  "relu.py:loss")
            assert result.exit_code == status, result.output
            assert result.stdout.splitlines()[-1].endswith(last)
            assert ("mgpu.parity.gluonize(net)" in result.stdout) == status


# -- status 2 -----------------------------------------------------------------

@pytest.mark.parametrize("arguments, words", [
    ([A, "nets"], "given as MODULE:FACTORY or FILE.py:FACTORY"),
    ([A, "no_such_module:make"], "no_such_module cannot be imported"),
    ([A, "no_such_file.py:make"], "there is no such file"),
    (["run.trace", B], "there is no file 'run.trace'. Name a file that"),
    ([A, A.replace("make", "mkae")], "Use one of make"),
    ([A, B, "--kwargs-a", "{units: 3}"], "--kwargs-a takes JSON"),
    ([A, B, "--kwargs-a", "[3]"], "--kwargs-a takes a JSON object"),
    ([A, B, "--kwargs-a", '{"width": 3}'], "TypeError: "),
    ([A, B, "--input", "3x"], "received '3x'"),
    ([A, B, "--input", "13"], "--traceback shows where"),
    ([A, B, "--devices", "1,2"], "--devices takes a number or devices"),
    ([A, B, "--optimizer", "sdg"], "sdg"),
    ([A, B, "--optimizer-params", "momentum"], "NAME=VALUE"),
    ([A, B, "--data", "nowhere"], "unknown data set"),
    ([A, B, "-o", "no/folder/x.html"], "the folder of --output"),
    ([A, B, "-o", "x.pdf"], "x.pdf"),
    ([A, "--invariance", "-o", "x.html"], "has no page"),
    ([A], "two networks are compared"),
    ([A, B], "needs --input and --classes"),
    ([A, B, "--invariance"], "two networks are compared"),
    ([A, "--invariance", "--devices", "cpu:0"], "--devices takes numbers"),
    ([A, B, "--map", "none.json"], "--map takes a JSON file"),
    ([A, "--invariance", "--weights", "b"], "received --weights"),
])
def test_what_cannot_be_compared_is_status_2(arguments, words, folder):
    before = sorted(os.listdir(folder))
    options = [] if arguments == [A, B] else SMALL
    assert words in refused("compare", *options, *arguments)
    assert sorted(p for p in os.listdir(folder) if p != "__pycache__") \
        == before, "nothing is written"


def test_parameters_that_do_not_match_are_listed():
    result = mgpu_command("compare", A, B, *SMALL, "--kwargs-b",
                          '{"units": 4}')
    assert result.exit_code == 2, result.output
    first, *rest, last = result.stderr.splitlines()
    assert first.startswith("Error: every parameter")
    assert "--map" in last and "map=" not in last and "rules=" not in last
    assert "  0.weight (8, 12): nothing like it in b, nearest is 0.weight " \
        "(4, 12)" in rest
    assert any(line.startswith("  left in b: 0.weight") for line in rest)
    assert len(rest) < 14
    traced = mgpu_command("compare", A, B, *SMALL, "--kwargs-b",
                          '{"units": 4}', "--traceback")
    assert traced.exit_code == 2
    assert "Traceback (most recent call last)" in traced.stderr


def test_an_engine_that_is_missing_matters_where_it_is_needed(folder):
    (folder / "needs.py").write_text("import absent_framework")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.ENTRIES, "absent", registry.Entry(
            "mgpu.backends._absent", "json",    # a package that is there
            "pip install 'mgpu[absent]'"))
        assert mgpu_command("compare", A, B, *SMALL).exit_code == 0
        line = refused("compare", A, "needs.py:make", *SMALL)
    assert "absent_framework" in line and "mgpu[absent]" in line


# -- the table of statuses ----------------------------------------------------

def test_each_verdict_has_one_status():
    from mgpu.parity import result
    from mgpu.parity.invariance import STATUSES
    both = result.FORMULAS + ", and MXNet's float32"
    for verdict, float32, formulas, statuses in (
            ("same", [], [], "0000"), ("different", [], [], "1111"),
            ("no proof", [], [], "2222"), ("not compared", [], [], "2222"),
            # nothing allowed, formulas, float32, both
            (result.FLOAT32, [{}], [], "1100"), (both, [{}], [{}], "1110"),
            (result.FORMULAS, [], [{}], "1010")):
        found = result.Result(verdict, [], None, {}, {}, {}, float32=float32,
                              formulas=formulas)
        assert statuses == "".join(str(errors.exit_status(
            found, allow_mxnet_float32=x, allow_formulas=y))
            for x in (False, True) for y in (False, True)), verdict
    assert {x: errors.STATUS[x] for x in STATUSES} == {
        "exact": 0, "not compared": 2, "batch statistics": 1, "wrong": 1}


# -- parts --------------------------------------------------------------------

@pytest.mark.parametrize("text, value", [
    (None, None), ("lr=0.1,momentum=0.9", {"lr": 0.1, "momentum": 0.9}),
    ("a=true, b=x", {"a": True, "b": "x"}),
    ('{"betas": [0.9, 0.99]}', {"betas": [0.9, 0.99]})])
def test_parse_params(text, value):
    assert parse_params(text) == value


@pytest.mark.parametrize("loss, check", [
    (losses.SoftmaxCrossEntropyLoss(), lambda y: y.dtype == "int32"
     and y.shape == (5,) and 0 <= y.min() and y.max() < 4),
    (losses.L2Loss(), lambda y: y.shape == (5, 4)),
    (losses.SigmoidBinaryCrossEntropyLoss(), lambda y: y.shape == (5, 4)
     and set(np.unique(y)) <= {0.0, 1.0}),
    (losses.KLDivLoss(), lambda y: np.allclose(y.sum(1), 1)),
    (lambda pred, label: pred, lambda y: y.shape == (5,))])
def test_random_batches_are_the_same_again(loss, check):
    batches = find.RandomBatches((2, 3), 4, 5, 3, loss, seed=1)
    first, second = list(batches), list(batches)
    assert len(first) == len(batches) == 3
    for (X, y), (X2, y2) in zip(first, second):
        assert X.shape == (5, 2, 3) and check(y)
        assert (X == X2).all() and (y == y2).all()
    assert (first[0][0] != first[1][0]).any()
