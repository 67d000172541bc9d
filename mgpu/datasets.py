"""Datasets: `mgpu.data.datasets`, under its public path."""
from mgpu.data.datasets import *  # noqa: F403
