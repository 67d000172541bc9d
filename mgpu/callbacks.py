"""Callbacks: `mgpu.training.callbacks`, under its public path."""
from mgpu.training.callbacks import *  # noqa: F403
