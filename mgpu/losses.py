"""Losses: `mgpu.nn.losses`, under its public path."""
from mgpu.nn.losses import *  # noqa: F403
