"""The script that takes the book's PyTorch version apart: each switch does
what PyTorch itself does, and a quick run of all of it writes its files."""
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import mgpu

SCRIPT = Path(__file__).resolve().parents[2] / "studies" / "departures.py"


@pytest.fixture(scope="module")
def departures():
    spec = importlib.util.spec_from_file_location("departures", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    # 1e-9: float64 rounding, amplified by twenty normalisations
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


def test_torchs_variance_is_that_of_torchs_own_layers(departures, backend):
    """Two steps on 5 and on 3 rows. Where the engine is torch, a network of
    plain `nn.BatchNorm2d` takes the same steps; on both engines the first
    layer is computed by hand."""
    rng = np.random.default_rng(0)
    batches = [(rng.random((n, 1, 28, 28)), rng.integers(0, 10, n).astype(
        "int32")) for n in (5, 3)]
    replicas = departures.make(1, 0, "float64")
    start = replicas.export_numpy()
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    unbiased = departures.UnbiasedVariance(replicas)
    by_hand = np.ones(64)
    for X, y in batches:
        w = replicas.export_numpy()["0.weight"][:, 0]       # (64, 3, 3)
        padded = np.pad(X[:, 0], ((0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(
            padded, (3, 3), axis=(1, 2))
        maps = np.einsum("nijkl,ckl->cnij", windows, w)
        by_hand = departures.MOMENTUM * by_hand + (
            1 - departures.MOMENTUM) * maps.var(axis=(1, 2, 3), ddof=1)
        departures.step(replicas, trainer, X, y, len(y))
        unbiased.stepped([len(y)])
    # 1e-12: float64 rounding. Biased variances would be off by 1 / 2351.
    np.testing.assert_allclose(unbiased.values["1.running_var"][0], by_hand,
                               rtol=1e-12)
    if backend.name != "torch":
        return
    import torch
    net = mgpu.models.resnet18().double()
    for name, layer in list(net.named_modules()):
        if isinstance(layer, torch.nn.BatchNorm2d):
            plain = torch.nn.BatchNorm2d(
                layer.num_features,
                momentum=1 - departures.MOMENTUM).double()
            parent, _, own = name.rpartition(".")
            setattr(net.get_submodule(parent), own, plain)
    with torch.no_grad():
        for name, x in net.state_dict().items():
            ours = name.replace("weight", "gamma").replace("bias", "beta")
            value = start.get(name, start.get(ours))
            if value is not None:
                x.copy_(torch.from_numpy(value))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    for X, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            net(torch.from_numpy(X)), torch.from_numpy(y).long()).backward()
        optimizer.step()
    found = net.state_dict()
    for name, value in unbiased.values.items():
        # 1e-9: rounding, amplified by the first step and twenty layers
        np.testing.assert_allclose(value[0], found[name].numpy(), rtol=1e-9,
                                   err_msg=name)


def test_first_devices_statistics_are_put_on_all(departures, backend):
    rng = np.random.default_rng(0)
    replicas = departures.make(2, 0, "float32")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    unbiased = departures.UnbiasedVariance(replicas)
    departures.step(replicas, trainer, rng.random(
        (5, 1, 28, 28), dtype="float32"), np.arange(5, dtype="int32"), 5)
    unbiased.stepped(departures.shard_rows(5, 2))
    before = replicas.export_numpy(all_devices=True)
    X = rng.random((4, 1, 28, 28), dtype="float32")
    own, first = (departures.judge(replicas, unbiased, how, [(X, None)])
                  for how in ("own", "first"))
    # Device 0 judges the first two rows either way; the last ones change.
    np.testing.assert_array_equal(own[:2], first[:2])
    assert (own[2:] != first[2:]).any()
    after = replicas.export_numpy(all_devices=True)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_biases_are_drawn_as_torch_draws_them(departures):
    """Bounds and spread, against torch's own layers of the same shapes."""
    with mgpu.using_backend("torch"):
        import torch
        layers = {"a": torch.nn.Conv2d(8, 4000, 3),
                  "b": torch.nn.Linear(50, 4000)}
    values = {f"{n}.{own}": x.detach().numpy() for n, layer in layers.items()
              for own, x in layer.named_parameters()}
    ours = departures.torch_biases(values, 0)
    assert ours.keys() == {"a.bias", "b.bias"}
    for name, biases in ours.items():
        # 5 %: 4,000 draws; the spread of a uniform sample has 1.4 %
        assert biases.std() == pytest.approx(values[name].std(), rel=0.05)
        assert np.abs(biases).max() == pytest.approx(
            np.abs(values[name]).max(), rel=0.05)
