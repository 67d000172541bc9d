"""Optimizers: `mgpu.optim`, under its public path."""
from mgpu.optim import *  # noqa: F403
