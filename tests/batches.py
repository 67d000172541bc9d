"""Batches that several tests use: NumPy arrays, drawn from a seed."""
import numpy as np


def rows(n, columns=6, dtype="float32", seed=0):
    """Normal numbers of shape (n, columns)."""
    return pictures(n, (columns,), dtype, seed)


def pictures(n, shape=(2, 6, 6), dtype="float32", seed=0):
    """Normal numbers of shape (n, channels, height, width)."""
    return np.random.default_rng(seed).normal(size=(n, *shape)).astype(dtype)


def classes(n, count=3, seed=0):
    """Integers from 0 to ``count - 1``, of shape (n,)."""
    return np.random.default_rng(seed).integers(0, count, n)
