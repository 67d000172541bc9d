"""The script that takes the book's PyTorch version apart: each switch does
what PyTorch itself does, and a quick run of all of it writes its files."""
import importlib.util
import json
from pathlib import Path

import pytest

import mgpu

SCRIPT = Path(__file__).resolve().parents[2] / "studies" / "departures.py"


resnet18 = mgpu.models.resnet18


def narrow_resnet18():
    """ResNet-18 with an eighth of its channels; on MXNet, which is only
    timed, the whole one."""
    if mgpu.get_backend().name == "mxnet":
        return resnet18()
    from torch import nn

    from mgpu.backends._torch import models
    stages = [nn.Sequential(
        models.Residual(one, two, one != two, 2 if one != two else 1),
        models.Residual(two, two))
        for one, two in ((8, 8), (8, 16), (16, 32), (32, 64))]
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 1, 1), models.BatchNorm2d(8), nn.ReLU(), *stages,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


@pytest.fixture(scope="module")
def departures():
    spec = importlib.util.spec_from_file_location("departures", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mgpu.models, "resnet18", narrow_resnet18)
        yield module


@pytest.fixture(scope="module")
def quick(departures, tmp_path_factory):
    """The results of a quick run, its folder, and how to run it again."""
    folder = tmp_path_factory.mktemp("departures")

    def run(*more):
        return departures.main([
            "--data", "digits", "--quick", "--seeds", "0", "--work",
            str(folder / "work"), "--out", str(folder), *more])
    return run(), folder, run


def test_quick_run_writes_all_results(departures, quick):
    results, folder, _ = quick
    saved = json.loads((folder / "departures.json").read_text())
    assert saved == json.loads(json.dumps(results))
    assert [run["version"] for run in saved["runs"]] == \
        list(departures.VERSIONS)
    assert saved["exact"].keys() == departures.MEASUREMENTS.keys()
    assert (folder / "departures.png").read_bytes()[:4] == b"\x89PNG"
    baseline, = (r for r in saved["runs"]
                 if r["version"] == departures.GLUON)
    assert {departures.FIRST, departures.UNBIASED} < \
        baseline["test_acc"].keys()


def test_short_batch_moves_by_the_ratio_of_the_divisors(quick):
    found = quick[0]["exact"]["divisor"]
    # 1e-9: an update is a small difference of two float64 weights
    assert found["update by rows present / by nominal"] == pytest.approx(
        found["nominal"] / found["rows"], rel=1e-9)
    assert found["mean of losses against sum / rows, relative"] < 1e-9


def test_only_biases_that_no_batch_norm_follows_act_in_training(quick):
    found = quick[0]["exact"]["biases"]
    before, random = (found[name]["training, relative to zero"] for name in
                      ("random before a batch norm", "random"))
    # 1e-9: float64 rounding, amplified by twenty normalizations
    assert before < 1e-9 < 1e-3 < random
    assert found["zero"]["prediction"]["largest"] < 1e-4 < \
        found["random"]["prediction"]["largest"]


def test_what_is_done_is_not_done_again(departures, quick, monkeypatch):
    _, folder, run = quick

    def again(*args):
        pytest.fail("done a second time")
    monkeypatch.setattr(departures, "train_version", again)
    monkeypatch.setitem(departures.MEASUREMENTS, "timer", again)
    (folder / "departures.png").unlink()
    assert run() == json.loads((folder / "departures.json").read_text())
    assert (folder / "departures.png").exists()


def test_runs_of_other_settings_are_refused(departures, quick):
    _, folder, run = quick
    with pytest.raises(ValueError, match="must be of the settings"):
        run("--backend", "mxnet")
