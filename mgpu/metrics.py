"""Metrics: `mgpu.nn.metrics`, under its public path."""
from mgpu.nn.metrics import *  # noqa: F403
