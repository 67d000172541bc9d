"""`mgpu demo`: what it shows, and that a fault of mgpu or of the demo's own
parts ends it with status 1."""
import pytest
from click.testing import CliRunner

import mgpu
from conftest import BACKENDS
from mgpu.cli import demo
from mgpu.cli.demo import port, programs

BOTH = pytest.mark.skipif(len(BACKENDS) < 2, reason="needs both backends")


@BOTH
def test_it_shows_three_things(tmp_path):
    done = CliRunner().invoke(demo.demo, ["-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    for text in ("mxnet against torch on [cpu(0), cpu(1)]: largest difference",
                 "+ net = mgpu.DataParallel(network(), mgpu.list_devices(2))",
                 "likely cause: statistics momentum"):
        assert text in done.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "demo-lenet.json", "demo-lenet.png", "plain.py", "two_devices.py"}


@BOTH
def test_a_backend_that_computes_otherwise_is_seen(tmp_path, monkeypatch):
    with mgpu.using_backend("torch") as torch:
        monkeypatch.setattr(torch.ops, "relu",
                            lambda x: x.clamp(min=1e-6), raising=False)
    found = demo.lenet(BACKENDS, tmp_path, epochs=1, limit=64)
    assert any("mxnet" in line and "torch" in line for line in found)


@pytest.mark.skipif("torch" not in BACKENDS, reason="needs torch")
def test_another_script_is_seen(tmp_path, monkeypatch):
    assert demo.one_changed_line(tmp_path) == []
    monkeypatch.setitem(programs.CHANGES, "    optimizer.zero_grad()", "")
    assert len(demo.one_changed_line(tmp_path)) == 1


@BOTH
def test_a_port_without_a_bug_is_seen(monkeypatch):
    monkeypatch.setattr(port, "port", port.original)
    assert demo.bug_in_a_port() == [
        "the comparison has not found the bug of the port"]
