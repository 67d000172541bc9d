"""Batches for tests of comparisons."""
import numpy as np


def pictures(rows=8, count=2, seed=0, classes=3, dtype="float64"):
    """Pictures of (1, 8, 8) and class numbers."""
    rng = np.random.default_rng(seed)
    return [(rng.random((rows, 1, 8, 8)).astype(dtype),
             rng.integers(0, classes, rows).astype("int32"))
            for _ in range(count)]


def vectors(width):
    """One of 8 rows of `width` normal numbers and class numbers below 3."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(8, width)), rng.integers(0, 3, 8))]
