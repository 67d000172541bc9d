"""Data sets and batch iterators, under their public path."""
from mgpu.data.datasets import *  # noqa: F403
from mgpu.data.iterators import *  # noqa: F403
