"""MXNet against PyTorch against the oracle: one body runs on every backend,
and all results are compared with what `oracle` computed and with each other.

A test says by `covers` whose numbers it checks; `test_complete.py` fails for
a formula that no test covers.
"""
import itertools

import numpy as np

import mgpu
from helpers import (ENGINES, assert_bit_equal, relative_difference,
                     using_engine, worst)

#: no rounding is allowed: the same bits, the same dtype
EXACT = 0.0
#: a few float64 operations whose order is free
ROUNDING = 1e-13
#: some steps of training, or sums over many terms (docs/design.md)
LOCKSTEP = 1e-12

#: the names of formulas whose numbers a test checks
COVERED = set()


def covers(*names):
    def register(test):
        COVERED.update(names)
        return test
    return register


def compare(ours, expected, tolerance, where="result"):
    """AssertionError unless `ours` is `expected`: arrays and numbers, lists of
    them, dicts of arrays by parameter name; None is only None.

    A dict is measured as `helpers.worst` does, tensors at the floor on the
    scale of their layer; everything else tensor by tensor.
    """
    if expected is None or ours is None:
        assert ours is expected, f"{where}: {ours!r} is not {expected!r}"
    elif isinstance(expected, dict) and tolerance:
        gap, name = worst(ours, expected)
        assert gap <= tolerance, f"{where} {name}: {gap:.1e}"
    elif isinstance(expected, (dict, list, tuple)):
        keys = [list(x) if isinstance(x, dict) else list(range(len(x)))
                for x in (ours, expected)]
        assert sorted(keys[0]) == sorted(keys[1]), f"{where}: {keys}"
        for key in keys[0]:
            compare(ours[key], expected[key], tolerance, f"{where} {key}")
    elif tolerance:
        gap = relative_difference(ours, expected)
        assert gap <= tolerance, f"{where}: {gap:.1e}"
    else:
        try:
            assert_bit_equal(ours, expected)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None


def check(results, expected, tolerance, between=None):
    """Compare each backend's result with the oracle's, and any two with each
    other (within `between`, if that is another tolerance)."""
    assert results
    for engine, ours in results.items():
        compare(ours, expected, tolerance, engine)
    for a, b in itertools.combinations(results, 2):
        compare(results[a], results[b],
                tolerance if between is None else between, f"{a} and {b}")


def on_each(run):
    """``{backend: run(backend)}``"""
    results = {}
    for engine in ENGINES:
        with using_engine(engine) as backend:
            results[engine] = run(backend)
    return results


def agree(run, expected, tolerance, between=None):
    """`run`, a function of the backend, gives `expected` on every backend."""
    results = on_each(run)
    check(results, expected, tolerance, between)
    return results


def host(x):
    """Native arrays in lists and dicts as NumPy arrays; None stays."""
    if isinstance(x, (list, tuple)):
        return [host(v) for v in x]
    if isinstance(x, dict):
        return {name: host(v) for name, v in x.items()}
    return None if x is None else mgpu.to_numpy(x)


def scatter(parts, devices):
    """NumPy arrays, one to each device."""
    return [mgpu.put(x, d) for x, d in zip(parts, devices)]


def joined(shards):
    return np.concatenate([host(x) for x in shards if x is not None])


def split_state(replicas):
    """Weights, and running statistics with an axis of devices."""
    values = replicas.export_numpy(all_devices=True)
    running = {n: v for n, v in values.items() if "running_" in n}
    if len(replicas) == 1:
        running = {n: v[None] for n, v in running.items()}
    return ({n: v for n, v in values.items() if n not in running
             and not n.endswith("num_batches_tracked")}, running)


def assert_equal_copies(replicas):
    """Every device holds the same bits of every weight."""
    for p in replicas.params():
        for x in p.list_data():
            assert_bit_equal(mgpu.to_numpy(x), mgpu.to_numpy(p.data()))
