"""Options that commands share: files to write, the form of standard output,
and former names."""
import json
import sys

import pytest
from click.testing import CliRunner

from conftest import BACKENDS
from mgpu import cli

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
    (["parity", *COMPARED], "verdict")], ids=lambda x: next(iter(x)))
def test_json_on_standard_output(command, key, folder):
    """Nothing else is there, whatever code of the user's prints; a file of
    --output has the same text."""
    result = mgpu_command(*command, "--format", "json", "-o", "x.json")
    assert key in json.loads(result.stdout)
    assert (folder / "x.json").read_text() == result.stdout
    assert "written: x.json" in result.stderr
    assert ("code of a user prints" in result.stderr) is (key == "verdict")


@pytest.mark.parametrize("command, former", [
    (BENCH, {"--json": "a.txt", "--plot": "a.svg", "--trace": "b.txt"}),
    (RUN, {"--json": "a.txt", "--plot": "a.svg"}),
    (["parity", *COMPARED], {"--json": "a.txt", "--report": "a.html"}),
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
