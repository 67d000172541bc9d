"""Published pairs of networks, of gluoncv2 and of pytorchcv, in lock-step.

Small ones of three families; studies/twins.py runs them all."""
import importlib.util
import json
import math
import pathlib

import numpy as np
import pytest

_PATH = pathlib.Path(__file__).parents[2] / "studies" / "twins.py"
_SPEC = importlib.util.spec_from_file_location("twins", _PATH)
twins = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(twins)

#: inputs of 32 x 32, or little work on larger ones
PAIRS = ("voca8flame", "fdmobilenet_wd4", "seresnet20_cifar10")


@pytest.fixture(scope="module")
def catalogue():
    return twins.catalogue()


def plan_of(catalogue, name):
    family, _, torch_function = catalogue[name]
    # a small budget: the ImageNet ones at a smaller input
    return {"family": family,
            **twins.choose(family, torch_function, budget=0.005)}


def compared(catalogue, name, devices, steps):
    return twins.run_pair(name, plan_of(catalogue, name),
                          catalogue[name][1:], devices, steps)


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_trains_the_same(catalogue, name):
    record = compared(catalogue, name, devices=2, steps=2)
    assert record["verdict"] == "same", record["first"]
    assert record["confirmed"]
    assert not twins.hollow(record)
    # Not only within the tolerance: no tensor needed the chaos of the step.
    assert "rounding" not in record["statuses"]
    assert record["gradients"] > 3
    a, b = record["losses"]["a"], record["losses"]["b"]
    assert len(a) == len(b) == 2 and all(map(math.isfinite, a))


def test_a_cause_is_proven(catalogue):
    """MXNet's float32 inside a float64 network, and torch made to match."""
    record = compared(catalogue, "nvpattexp116bazel76", 1, 1)
    assert record["verdict"] == "different"
    assert record["remedy"] == twins.SLOPES
    # the pair's own rounding, as far below float32's as float64 is
    assert record["remedied"] < 1e-12


def record(name, **changes):
    worst = {s: [1e-14, "w", "same", None] for s in twins.STAGES}
    return {"pair": name, "family": name[:-1], "devices": 1, "steps": 1,
            "shapes": [[3, 32, 32]], "rows": 4, "own_size": True,
            "verdict": "same", "how": "order and shape", "confirmed": True,
            "worst": worst, "statuses": {"same": 9}, "first": None,
            "causes": [], "notes": [], "largest_gradient": 1.0, "dead": 0,
            "gradients": 3, "seconds": 1.0, **changes}


def test_the_page():
    records = {(r["pair"], 1): r for r in (
        record("good1"), record("good2"),
        record("dead1", largest_gradient=0.0),
        record("wide1", verdict="different", first="step 1, a | b",
               remedy="a float32", remedied=1e-13),
        record("slow1", verdict="none", error="time: over 9 s", worst={}))}
    page = twins.page(records)
    assert ("**5 pairs of 4 architecture families: 2 train the same, 1 "
            "differ (1 with a known cause), 2 got no verdict.**") in page
    assert "3 of 5 pairs (60.0 %) and 2 of 4 families" in page
    assert "1. a float32: 1 pair." in page
    page = twins.tables(records)
    assert "| wide1 | step 1, a \\| b | 1 | 1e-13 |" in page
    assert "| slow1 | time: over 9 s |" in page
    assert "| dead1 | all gradients are zero" in page


# -- without mgpu -------------------------------------------------------------

#: which docs/internals/twins.md calls the same
PLAIN = ("preresnet20_cifar10", "sepreresnet20_cifar10",
         "resnext20_32x2d_cifar10")


def plain_step(catalogue, name, change=lambda net: None, rows=4):
    """One step of plain MXNet and of plain torch from equal values: by what
    part of the largest value outputs, losses, gradients and weights differ.
    Nothing of mgpu takes part."""
    import mxnet as mx
    import torch
    rng = np.random.default_rng(0)
    one, two = catalogue[name][1](), catalogue[name][2]().double()
    change(two)
    one.initialize()
    one.cast("float64")
    x = rng.normal(size=(rows, 3, 32, 32))
    X = mx.nd.array(x, dtype="float64")
    y = rng.integers(0, one(X).shape[-1], rows)
    left = list(one._collect_params_with_prefix().values())
    right = [p for n, p in two.state_dict(keep_vars=True).items()
             if not n.endswith("num_batches_tracked")]
    assert [p.shape for p in left] == [tuple(p.shape) for p in right]
    for p, q in zip(left, right):
        value = rng.normal(size=p.shape) * 0.1 if len(p.shape) > 1 \
            else rng.uniform(0.5, 1.5, p.shape)
        p.set_data(mx.nd.array(value, dtype="float64"))
        q.data.copy_(torch.from_numpy(value))

    trainer = mx.gluon.Trainer(one.collect_params(), "sgd",
                               {"learning_rate": 0.125})
    with mx.autograd.record():
        output = one(X)
        loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(
            output, mx.nd.array(y, dtype="float64"))
    loss.backward()
    trainer.step(rows)

    optimizer = torch.optim.SGD(two.parameters(), lr=0.125)
    its_output = two(torch.from_numpy(x))
    its_loss = torch.nn.functional.cross_entropy(
        its_output, torch.from_numpy(y), reduction="none")
    its_loss.mean().backward()
    optimizer.step()

    trained = [(p, q) for p, q in zip(left, right) if p.grad_req != "null"]
    assert trained and all(q.requires_grad for _, q in trained)
    return {stage: max(float(np.abs(a - b).max()) for a, b in pairs)
            / max(float(np.abs(a).max()) for a, _ in pairs)
            for stage, pairs in {
                "output": [(output.asnumpy(), its_output.detach().numpy())],
                "loss": [(loss.asnumpy(), its_loss.detach().numpy())],
                "gradient": [(p.grad().asnumpy() / rows, q.grad.numpy())
                             for p, q in trained],
                "weight": [(p.data().asnumpy(), q.detach().numpy())
                           for p, q in trained]}.items()}


@pytest.mark.parametrize("name", PLAIN)
def test_pairs_called_the_same_agree_without_mgpu(catalogue, name):
    said = [json.loads(line) for line in
            twins.RESULTS.read_text().splitlines()]
    assert {r["verdict"] for r in said if r["pair"] == name} == {"same"}
    apart = plain_step(catalogue, name)
    assert max(apart.values()) < 1e-11, apart


def test_the_plain_step_sees_a_fault(catalogue):
    def other_epsilon(net):
        next(m for m in net.modules() if hasattr(m, "eps")).eps = 1e-3
    apart = plain_step(catalogue, PLAIN[0], other_epsilon)
    assert min(apart.values()) > 1e-6, apart
