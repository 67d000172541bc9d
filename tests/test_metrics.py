"""Measures: the values of the real ``mxnet.metric``, on any number of devices
and however batches are cut."""
import json
import math
import re

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from distributed import jobs
from helpers import mlp, on
from mgpu.nn import metrics
from nets import several_inputs

if "mxnet" in BACKENDS:
    mgpu.mxnet_compat()         # what it sets is no test's

rng = np.random.default_rng(0)
SCORES = rng.random((23, 5))
PROBABLE = SCORES / SCORES.sum(1, keepdims=True)
LABELS = rng.integers(0, 5, 23)
TWO, BINARY = rng.random((23, 2)), rng.integers(0, 2, 23)

#: ours, MXNet's, labels, predictions
CASES = {
    "accuracy": (lambda m: m.Accuracy(), LABELS, SCORES),
    "axis": (lambda m: m.Accuracy(axis=2), LABELS[:20].reshape(5, 4),
             SCORES[:20].reshape(5, 4, 5)),
    "classes": (lambda m: m.Accuracy(), LABELS, SCORES.argmax(1)),
    "top": (lambda m: m.TopKAccuracy(top_k=3), LABELS, SCORES),
    "f1": (lambda m: m.F1(average="micro"), BINARY, TWO),
    "perplexity": (lambda m: m.Perplexity(None), LABELS, PROBABLE),
    "ignored": (lambda m: m.Perplexity(ignore_label=2), LABELS, PROBABLE),
    "loss": (lambda m: m.Loss(), LABELS, SCORES[:, 0]),
}


def cut(x, k):
    """K shards on devices, of which the last is None."""
    ends = [round(len(x) * i / k) for i in range(k + 1)]
    return [mgpu.put(x[begin:end], mgpu.cpu(i)) for i, (begin, end)
            in enumerate(zip(ends, ends[1:]))] + [None]


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="about MXNet")
@pytest.mark.parametrize("case", CASES)
def test_the_values_of_mxnet(engine, case):
    make, labels, preds = CASES[case]
    own = make(metrics)
    for begin, end in ((0, 4), (4, len(labels))):
        own.update(mgpu.put(labels[begin:end], mgpu.cpu(0)),
                   mgpu.put(preds[begin:end], mgpu.cpu(0)))
    name, value = own.get()
    # the same in a list of shards, and of shards of other batches
    other = make(metrics)
    other.update(cut(labels, 3), cut(preds, 3))
    assert other.get() == (name, value) == own.get_name_value()[0]
    own.reset()
    assert math.isnan(own.get()[1])
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
    real = make(mx.metric)
    with mx.util.np_array(False), mx.util.np_shape(False):
        for begin, end in ((0, 4), (4, len(labels))):
            real.update([mx.nd.array(labels[begin:end], dtype="float64")],
                        [mx.nd.array(preds[begin:end], dtype="float64")])
    assert name == real.get()[0]
    assert value == pytest.approx(real.get()[1], rel=1e-12)


@pytest.mark.parametrize("kind", [metrics.Loss, lambda: metrics.Perplexity(
    None)], ids=["Loss", "Perplexity"])
def test_sums_are_exact_however_they_are_cut(backend, kind):
    """Doubles of all sizes, in any order: the same bits."""
    values = np.exp(rng.normal(0, 8, 60)) / 1e9
    preds = values if kind is metrics.Loss else np.stack([values, values], 1)
    labels = np.zeros(60, int)
    found = set()
    for order in (np.arange(60), rng.permutation(60)):
        for size in (1, 7, 60):
            own = kind()
            for i in range(0, 60, size):
                at = order[i:i + size]
                own.update(labels[at], preds[at])
            found.add(own.get()[1])
    assert len(found) == 1
    if kind is metrics.Loss:
        assert found == {math.fsum(values) / 60}


def test_what_is_not_finite_is_seen(backend):
    own = metrics.Loss()
    own.update(None, [np.array([1.0, np.inf]), None])
    assert own.get()[1] == np.inf
    own.update(None, np.array([-np.inf]))
    assert math.isnan(own.get()[1])


ROWS = [[1, 2], [3, 4]]


@pytest.mark.parametrize("make, labels, preds, words", [
    (metrics.Accuracy, [1.5, 0], ROWS, "numbers 0 to 1; received 1.5"),
    (metrics.Accuracy, [2, 0], ROWS, "numbers 0 to 1; received 2"),
    (metrics.Accuracy, [1, np.inf], [1, 1], "whole; received inf"),
    (lambda: metrics.create(["acc", metrics.TopK(2)]), [0, 1],
     [[1], [3]], "two or more"),
    (lambda: metrics.create([metrics.Loss(), metrics.TopK(3)]), [0, 1],
     ROWS, "3 classes or more"),
    (metrics.Accuracy, [1, 0, 1], ROWS, "a label for each row"),
    (lambda: metrics.TopK(2), [2, 0], ROWS, "numbers 0 to 1"),
    (metrics.F1, 0, 0, "received 'macro'. Use one of 'micro'"),
    (lambda: metrics.F1(average="micro"), [2, 0], ROWS, "received 2"),
    (lambda: metrics.Perplexity(None), [-1, 0], ROWS, "received -1"),
    (lambda: metrics.Perplexity(None, axis=1), 0, 0, "axis; received 1"),
    (lambda: metrics.create("mae"), 0, 0, "received 'mae'. Use one of 'acc"),
    (metrics.Accuracy, [1, 0], np.zeros((0, 2)), r"[[(2,), None]]"),
    (metrics.Accuracy, [None, np.zeros(2)], [np.zeros((0, 2)), None],
     "[[None, None], [(2,), None]]"),
    (metrics.Accuracy, [np.zeros(2), None], [np.ones((2, 2))] * 2,
     "[[(2,), (2, 2)], [None, (2, 2)]]")])
def test_what_has_another_meaning_is_refused(backend, make, labels, preds,
                                             words):
    with pytest.raises(ValueError, match=re.escape(words)):
        own = make()
        own.update(*(x if isinstance(x, list) and isinstance(
            x[-1], np.ndarray | None) else np.array(x)
            for x in (labels, preds)))
    if not isinstance(labels, int):
        assert np.isnan(own.get()[1]).all()     # nothing was counted


def test_devices_without_rows_are_passed_over(backend):
    own = metrics.Accuracy()
    own.update([np.array([1]), None], [np.array([[1, 2]]), None])
    own.update([np.array([1]), np.zeros(0)], [np.array([[1, 2]]), None])
    assert own.get()[1] == 1


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="about MXNet")
def test_scores_that_are_nan_count_as_the_largest(backend):
    nan = float("nan")
    scores = np.array([[nan, 0.2, 0.3], [0.1, nan, 0.5], [0.5, 0.2, nan],
                       [nan, 0.2, nan], [0.1, 0.2, 0.7]])
    labels = np.array([0, 1, 2, 1, 2])
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        for own, theirs in ((metrics.Accuracy(), mx.metric.Accuracy()),
                            (metrics.TopK(2), mx.metric.TopKAccuracy(2))):
            own.update(labels, scores)
            theirs.update([mx.nd.array(labels)],
                          [mx.nd.array(scores, dtype="float64")])
            assert own.get() == theirs.get()


class Odd(metrics.EvalMetric):
    """A user's, with an `update` of its own."""

    def update(self, labels, preds):
        self._add([(1, [7.0])])


def test_a_metric_of_the_users_counts_among_others(backend):
    both = metrics.create(["acc", Odd("odd")])
    both.update(LABELS, SCORES)
    assert both.get()[1][1] == 7 and both.get()[1][0] > 0


def test_several_metrics_at_once(backend):
    both = metrics.create(["acc", metrics.TopK(2)])
    both.update([LABELS], [SCORES])
    names, values = both.get()
    assert names == ["accuracy", "top_k_accuracy_2"]
    assert both.get_name_value() == list(zip(names, values))
    assert values[0] == (SCORES.argmax(1) == LABELS).mean() < values[1] < 1
    both.reset()
    assert all(map(math.isnan, both.get()[1]))


# -- a network ----------------------------------------------------------------

def network(backend, devices):
    return mgpu.initialize(mlp(backend, units=(6, 5)), devices, "uniform",
                           seed=3, dtype="float64")


X = rng.normal(size=(23, 6))
DATA = [(X[:16], LABELS[:16]), (X[16:22], LABELS[16:22]),
        (X[22:], LABELS[22:])]
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def test_evaluate_is_that_of_one_device(backend, devices):
    """Batches of fewer rows than devices too; the accuracy of
    evaluate_accuracy_gpus."""
    replicas = network(backend, devices)
    metric = metrics.create(["acc", metrics.TopK(2)])
    one = mgpu.evaluate(replicas, DATA, metric, device=devices[-1])
    assert mgpu.evaluate(replicas, DATA, metric) == one     # reset
    assert one[1][0] == mgpu.evaluate_accuracy_gpus(replicas, DATA)
    name, value = mgpu.evaluate(replicas, DATA, "loss", loss=LOSS)
    scores = replicas.predict(X)
    shifted = scores - scores.max(1, keepdims=True)
    expected = (np.log(np.exp(shifted).sum(1))
                - shifted[np.arange(23), LABELS]).mean()
    assert name == "loss" and value == pytest.approx(expected, rel=1e-12)


def test_evaluate_takes_losses_where_the_metric_does(backend):
    replicas = network(backend, on(0))
    for metric, loss in (("loss", None), ("acc", LOSS), (["acc", "loss"],
                         None), (["acc", "loss"], LOSS)):
        with pytest.raises(TypeError, match="Evaluate each kind in a sep"):
            mgpu.evaluate(replicas, DATA, metric, loss=loss)
    with pytest.raises(ValueError, match="at least one example"):
        mgpu.evaluate(replicas, [], "acc")
    pair = mgpu.initialize(several_inputs(
        backend, lambda dense, x: (dense(x), dense(x)), (6, 5)), on(0, 1),
        "uniform", dtype="float64")
    with pytest.raises(TypeError, match="a tuple of 2 arrays"):
        mgpu.evaluate(pair, DATA, "acc")
    assert mgpu.evaluate(replicas.net, DATA, "acc") \
        == mgpu.evaluate(replicas, DATA, "acc")


# -- several processes --------------------------------------------------------

@pytest.fixture(scope="module", params=BACKENDS)
def job(request, tmp_path_factory):
    """The processes begin here, and compute while other tests run."""
    return request.param, jobs.start(
        tmp_path_factory.mktemp("job"), 2,
        jobs.ROOT / "tests" / "distributed" / "looping.py", request.param)


def test_all_processes_have_the_value_of_one(job):
    from distributed import looping
    name, processes = job
    told = [json.loads(text.splitlines()[-1]) for text in processes.said()]
    with mgpu.using_backend(name):
        alone = json.loads(json.dumps(looping.work(on(0, 1, 2))))
    assert [rank["failed"] for rank in told] == ["WorkerFailed", "KeyError"]
    for rank in told:
        assert rank["metrics"] == alone["metrics"]
        assert rank["stopped"] == alone["stopped"] == 3
        for key in ("accumulated", "averages"):
            for ours, theirs in zip(rank[key], alone[key], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    rows = [row for rank in told for row in rank["predicted"]]
    np.testing.assert_allclose(rows, alone["predicted"], rtol=0, atol=1e-12)
