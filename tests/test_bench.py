"""`mgpu bench`: what it reports, and the model that predicts."""
import json
import math
import os

import numpy as np
import pytest
from click.testing import CliRunner

import mgpu
from conftest import BACKENDS
from helpers import mlp
from mgpu import cli
from mgpu.tools import bench
from mgpu.tools.profiling import STAGES

SMALL = dict(batch_size=8, steps=2, rounds=3)
PARTS = {"dispatch", "copy", "compute", "reduce", "update", "other"}
OPTIONS = ["--batch-size", "8", "--steps", "1", "--rounds", "2"]


def small_net():
    """For rows of 4 and 3 classes; the command line makes it too."""
    return mlp(mgpu.get_backend(), (4, 5, 3))


def run(model=small_net, **options):
    return bench.run(model, **{"shape": (4,), "classes": 3, **SMALL,
                               **options})


# -- what is reported ---------------------------------------------------------

def test_a_report(backend, devices):
    k = len(devices)
    counts = sorted({1, k})
    report = run(devices=counts, predict_for=[8])
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert (report["model"], report["batch_size"], report["shape"]) == (
        "small_net", 8, [4])
    assert report["versions"][backend.name] == backend.version
    assert [len(row["devices"]) for row in report["contenders"]] == counts
    first = report["contenders"][0]["seconds"]
    for row in report["contenders"]:
        assert row["backend"] == backend.name
        assert len(row["seconds"]) == 2         # the first round is left out
        assert min(row["seconds"]) > 0
        rates = [8 / s for s in row["seconds"]]
        ratios = [a / b for a, b in zip(first, row["seconds"])]
        for name, values in (("images_per_second", rates),
                             ("ratio", ratios)):
            assert row[name] == {"median": float(np.median(values)),
                                 "min": min(values), "max": max(values)}
        assert [line["device"] for line in row["table"]] == [
            "host", *row["devices"]]
        assert {f"{s}_ms" for s in (*STAGES, "other")} < set(row["table"][0])
        assert set(row["parts"]) == PARTS | {"seconds"}
        assert "-bound: " in row["verdict"] \
            or "No part takes half of a step: " in row["verdict"]
        assert "(batches of " in row["verdict"]
        assert row["profiling_cost"] > 0
        if k > 1:
            assert row["predicted"]["devices"] == len(row["devices"])
            assert math.isclose(
                1 + row["error"], row["predicted"]["seconds"]
                / np.median(row["seconds"]))
    guess, = report["predictions"][backend.name]
    assert guess == bench.predict(report["measurements"][backend.name], 8)
    assert report["measurements"][backend.name]["arrays"] == 4
    assert report["measurements"][backend.name]["bytes"] == 4 * (
        4 * 5 + 5 + 5 * 3 + 3)


def test_a_prediction_without_a_contender_on_one_device(backend):
    """One is made, on the first device of the largest contender."""
    report = run(devices=[2], batch_size=1)     # one batch size: no line
    assert len(report["contenders"]) == 1
    assert report["measurements"][backend.name]["per_row"] == 0
    assert report["contenders"][0]["predicted"]["devices"] == 2


@pytest.mark.parametrize("options, text", [
    (dict(model="vgg"), "unknown model; received 'vgg'"),
    (dict(model="lenet", shape=(3, 28, 28), classes=10),
     r"received \(3, 28, 28\) and 10"),
    (dict(batch_size=0), "batch_size must be an integer of 1"),
    (dict(steps=0), "steps must be an integer of 1"),
    (dict(rounds=1), "rounds must be an integer of 2"),
    (dict(predict_for=[0]), "devices to predict must be an integer of 1"),
    (dict(dtype="int8"), "unknown dtype; received 'int8'"),
    (dict(devices=[]), "at least one number of devices"),
    (dict(devices=[0]), "the number of devices must be a whole number"),
    (dict(devices=[["cpu:0", "cpu:0"]]), "devices must be distinct"),
    (dict(backends=["jax"]), "unknown backend; received 'jax'"),
    (dict(shape=[0]), "a side of the shape must be an integer of 1")])
def test_what_is_refused(options, text):
    with pytest.raises(ValueError, match=text), \
            mgpu.using_backend(BACKENDS[0]):
        run(**options)


# -- prediction ---------------------------------------------------------------

ONE = {"rows": 100, "dispatch": 2.0, "copy": 1.0, "fixed": 4.0,
       "per_row": 0.5, "update": 3.0, "other": 0.25, "arrays": 5,
       "bytes": 60, "latency": 0.125, "bandwidth": 40.0, "capacity": None}


@pytest.mark.parametrize("k, capacity, parts", [
    # 4 + 0.5 * 100
    (1, None, dict(dispatch=2, compute=54, reduce=0, update=3)),
    # 4 + 0.5 * 50; 2 * 1 * 5 * 0.125 + 2 * 2 * 60 / 40
    (2, 2, dict(dispatch=4, compute=29, reduce=1.25 + 6, update=3)),
    # 4 + 0.5 * 34, the largest of three shards; 2 * 2 * 5 / 8 + 6 * 60 / 40
    (3, None, dict(dispatch=6, compute=21, reduce=2.5 + 9, update=3)),
    # four on two cores take turns: twice 4 + 0.5 * 25, and twice 3
    (4, 2, dict(dispatch=8, compute=33, reduce=3.75 + 12, update=6)),
    # three on two: 1.5 times
    (3, 2, dict(dispatch=6, compute=31.5, reduce=2.5 + 9, update=4.5))])
def test_predict(k, capacity, parts):
    """Numbers that are exact in binary, computed manually."""
    found = bench.predict({**ONE, "capacity": capacity}, k)
    assert found["parts"] == {**parts, "copy": 1, "other": 0.25}
    assert found["devices"] == k
    assert found["seconds"] == sum(parts.values()) + 1.25
    assert found["images_per_second"] == 100 / found["seconds"]
    crowded = capacity is not None and k > capacity
    assert found["note"] == (f"the cores run {capacity} of {k} logical devices"
                             " in parallel: they take turns"
                             if crowded else "")


def test_predict_refuses():
    for k in (0, 1.5, True, "2"):
        with pytest.raises(ValueError, match="the number of devices must be"):
            bench.predict(ONE, k)


def test_measure_reduce(backend, devices):
    latency, bandwidth = bench.measure_reduce([devices], 3, repeat=1,
                                              large=1 << 12)
    assert 0 < latency < math.inf and 0 < bandwidth < math.inf


def test_the_timeline_has_a_former_name(tmp_path):
    for name in ("timeline", "trace"):
        run(devices=[1], backends=BACKENDS[:1], **{name: tmp_path / name})
        assert json.loads((tmp_path / name).read_text())["traceEvents"]


# -- the command line ---------------------------------------------------------

def command(*arguments):
    return CliRunner().invoke(cli.cli, ["bench", *arguments],
                              prog_name="mgpu")


def test_end_to_end(tmp_path):
    """All backends at once, with every file that can be written."""
    files = {name: tmp_path / f"bench.{name}"
             for name in ("json", "png", "timeline.json")}
    backend = "both" if len(BACKENDS) == 2 else BACKENDS[0]
    result = command(
        "--model", f"{__file__}:small_net", "--input", "4", "--classes",
        "3", "--backend", backend, "--devices", "1,2", *OPTIONS,
        "--predict", "4, 64", "--dtype", "float64",
        *(word for file in files.values() for word in ("-o", str(file))))
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir(tmp_path)) == ["bench.json", "bench.png",
                                            "bench.timeline.json"]
    report = json.loads(files["json"].read_text())
    assert report["dtype"] == "float64" and report["shape"] == [4]
    assert [(row["backend"], len(row["devices"]))
            for row in report["contenders"]] == [
        (name, k) for name in ("mxnet", "torch") if name in BACKENDS
        for k in (1, 2)]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(files["timeline.json"].read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events
                 if e["name"] == "process_name"}
    assert list(processes.values()) == [
        f"{row['backend']} on {', '.join(row['devices'])}"
        for row in report["contenders"]]
    assert {e["pid"] for e in events if e["ph"] == "X"} == set(processes)
    shown = " ".join(result.output.split())
    for text in ("images/s", "predicted", "dispatch",
                 " of 64 logical devices in parallel: "):
        assert text in shown
    # Which of the two is a matter of time, that is of other work.
    assert "-bound: " in shown or "No part takes half of a step: " in shown
    for file in files.values():
        assert f"written: {file}" in result.output


@pytest.mark.parametrize("arguments, text", [
    (["--predict", "0"], "--predict takes numbers, from 1 on"),
    (["--model", "vgg"], "MODULE:FACTORY"),
    (["--model", "lenet", "--input", "3x28x28"], "LeNet requires"),
    (["--model", "resnet18", "--input", "5"], "ResNet-18 requires images of "
     "(channels, height, width); received (5,)")])
def test_refused_in_one_line(arguments, text):
    result = command("--backend", BACKENDS[0], *arguments)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("Error: ") and text in result.stderr
