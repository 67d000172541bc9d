"""Options that commands share: files to write, the form of standard output,
and former names."""
import json
import sys

import pytest
from click.testing import CliRunner

from conftest import BACKENDS
from mgpu import backends as registry, cli
from mgpu.tools import doctor

NET = """
import nets
print("code of a user prints")

def make(epsilon=1e-5):
    return nets.dense_norm({!r}, epsilon, 12, 8)
"""
COMPARED = ["net.py:make", "net.py:make", "--input", "12", "--classes", "3",
            "--steps", "1", "--batch-size", "6"]
BENCH = ["bench", "--backend", BACKENDS[0], "--devices", "1", "--batch-size",
         "4", "--steps", "1", "--rounds", "2"]
RUN = ["reproduce", "lenet", "--backend", BACKENDS[0], "--devices", "1",
       "--limit", "4", "--batch-size", "4", "--epochs", "1"]


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """The current folder, with a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("MGPU_BACKEND", BACKENDS[0])
        (tmp_path / "net.py").write_text(NET.format(BACKENDS[0]))
        yield tmp_path


def mgpu_command(*arguments, status=0):
    result = CliRunner().invoke(cli.cli, arguments, prog_name="mgpu")
    assert result.exit_code == status, result.output
    return result


@pytest.mark.parametrize("command, key", [
    (BENCH, "contenders"), (RUN, "runs"), (["doctor"], "findings"),
    (["compare", *COMPARED], "verdict")], ids=lambda x: next(iter(x)))
def test_json_on_standard_output(command, key, folder):
    """Nothing else is there, whatever user code prints; a file of
    --output has the same text."""
    result = mgpu_command(*command, "--format", "json", "-o", "x.json")
    assert key in json.loads(result.stdout)
    assert (folder / "x.json").read_text() == result.stdout
    assert "written: x.json" in result.stderr
    assert ("code of a user prints" in result.stderr) is (key == "verdict")


@pytest.mark.parametrize("command, former", [
    (BENCH, {"--json": "a.txt", "--plot": "a.svg", "--trace": "b.txt"}),
    (RUN, {"--json": "a.txt", "--plot": "a.svg"}),
    (["compare", *COMPARED], {"--json": "a.txt", "--report": "a.html"}),
    (["doctor"], {"--json": None}),
    (["inspect", "net-symbol.json"], {"--json": None})],
    ids=lambda x: next(iter(x)))
def test_former_options_write_what_they_wrote(command, former, folder):
    (folder / "net-symbol.json").write_text(json.dumps(
        {"nodes": [{"op": "null", "name": "data", "inputs": []}],
         "arg_nodes": [0], "heads": [[0, 0, 0]]}))
    options = [x for pair in former.items() for x in pair if x]
    result = mgpu_command(*command, *options)
    if former == {"--json": None}:
        assert json.loads(result.stdout)
        return
    for file in former.values():
        text = (folder / file).read_text()
        assert "<html" in text if file.endswith(".html") else \
            "<svg" in text if file.endswith(".svg") else json.loads(text)
        assert f"written: {file}" in result.stdout
    help_text = mgpu_command(command[0], "--help").stdout
    assert not any(f"  {name} " in help_text for name in former)


def test_compare_has_a_former_name():
    former = mgpu_command("parity", *COMPARED).stdout
    assert former.endswith(mgpu_command("compare", *COMPARED).stdout)
    listed = mgpu_command("--help").stdout
    assert "  compare " in listed and "  parity " not in listed


# -- errors -------------------------------------------------------------------

def refused(*arguments):
    """The message of a command that must fail with one line and status 2."""
    result = mgpu_command(*arguments, status=2)
    assert result.stdout == "", "nothing is announced"
    line, = result.stderr.splitlines()
    return line.removeprefix("Error: ")


@pytest.mark.parametrize("arguments, text", [
    (["inspect", "none.params"],
     "No such file or directory: 'none.params'. Correct the path."),
    (["lint", "none.py"],
     "No such file or directory: 'none.py'. Correct the path."),
    (["convert", "net-0000.params", "net-symbol.json", "-o", "x.py"],
     "SYMBOL is a -symbol.json; received 'net-0000.params', which is not "
     "JSON. Write net-symbol.json before net-0000.params."),
    ([*RUN, "--data", "."],
     "a data folder holds the four IDX files; received '.', which lacks "
     "train-images-idx3-ubyte, train-labels-idx1-ubyte, "
     "t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte (with or without .gz). "
     "Put them there, or name another folder."),
    ([*RUN, "--lr", "-1"], "--lr must be a positive number; received -1.0. "
     "Write for example 0.1."),
    ([*RUN, "--lr", "nan"], "--lr must be a positive number; received nan. "
     "Write for example 0.1."),
    ([*RUN, "--init-scale", "-1"], "--init-scale must be a finite number of 0 "
     "or more; received -1.0.")])
def test_errors_name_the_fix(arguments, text, folder):
    (folder / "net-0000.params").write_bytes(b"\x12\x01\x80\xff")
    (folder / "net-symbol.json").write_text('{"nodes": []}')
    assert refused(*arguments) == text


CONVOLUTIONS = {
    "mxnet": "from mxnet.gluon import nn\nmake = lambda: nn.Conv2D(4, 3)\n",
    "torch": "import torch\nmake = lambda: torch.nn.Conv2d(1, 4, 3)\n"}


@pytest.mark.parametrize("command", [
    ["compare", "rank.py:make", "rank.py:make", "--classes", "3"],
    ["lint", "rank.py:make"]], ids=lambda x: x[0])
@pytest.mark.parametrize("name", BACKENDS)
def test_examples_of_a_wrong_rank_are_named(name, command, folder):
    (folder / "rank.py").write_text(CONVOLUTIONS[name])
    result = mgpu_command(*command, "--input", "144", status=2)
    line = result.stderr.splitlines()[0]
    assert "Check that the network takes examples of --input 144" in line
    assert ("4D in batch-num_filter-y-x" if name == "mxnet"
            else "Expected 3D (unbatched) or 4D") in line
    assert not any(word in line for word in (".cc:", "Check failed", "ndim"))


def test_a_backend_that_is_missing_is_named_with_its_cure(folder):
    """By the command line's words: --backend, or the variable."""
    (folder / "needs.py").write_text("import absent_framework.nn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.ENTRIES, "absent", registry.Entry(
            "mgpu.backends._absent", "absent_framework", "absent"))
        line = refused("compare", "net.py:make", "needs.py:make",
                       *COMPARED[2:])
        assert line.startswith("No module named 'absent_framework'")
        assert line.endswith("Install it: pip install absent.")
        # a module that lacks something else
        (folder / "other.py").write_text("import no_such_package")
        assert "absent" not in refused("compare", "net.py:make",
                                       "other.py:make", *COMPARED[2:])
        patch.setenv("MGPU_BACKEND", "absent")
        line = refused("reproduce", "lenet")
    assert "Run pip install absent, or write --backend " in line
    assert "set_backend" not in line


def test_a_wrong_setting_is_no_reason_to_install(patch_environment):
    report = doctor.diagnose()
    texts = {f["text"] for f in report["findings"] if f["level"] == "error"}
    for text in ("MGPU_DATA must be an existing folder; received '/nope'",
                 "MGPU_COMM must be gloo or kvstore; received 'nccl'",
                 "MGPU_TEST_BACKENDS must be mxnet, torch or mxnet,torch",
                 "MGPU_THREADS_PER_DEVICE must be a whole number, 1 or more; "
                 "received 'abc'"):
        assert any(found.startswith(text) for found in texts), texts
    assert "MGPU_TIMEOUT must be" not in "".join(texts)
    assert not any("pip" in (row["cure"] or "") for row in report["backends"])


@pytest.fixture
def patch_environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
                "MGPU_DATA": "/nope", "MGPU_COMM": "nccl", "MGPU_TIMEOUT": "5",
                "MGPU_TEST_BACKENDS": "jax", "MGPU_THREADS_PER_DEVICE": "abc"
                }.items():
            patch.setenv(name, value)
        yield


def test_the_doctor_ends_with_what_this_python_cannot_have():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGPU_ENGINE", "gloo")
        for name, entry in {
                "old": registry.Entry("mgpu.backends._absent", "old_absent",
                                      "old", (3, 1)),
                "new": registry.Entry("mgpu.backends._absent", "new_absent",
                                      "new", None, "pip install new --cpu")
                }.items():
            patch.setitem(registry.ENTRIES, name, entry)
        patch.setattr(registry, "ENTRIES",
                      dict(reversed(registry.ENTRIES.items())))
        report = doctor.diagnose()
    assert report["backends"][-1]["name"] == "old"
    new, = (x for x in report["backends"] if x["name"] == "new")
    assert new["cure"] == \
        "pip install new; for CPUs only: pip install new --cpu"
    assert "MGPU_ENGINE is called MGPU_COMM now. Set that." in [
        found["text"] for found in report["findings"]]
