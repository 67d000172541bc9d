"""Initializers: `mgpu.nn.initializers`, under its public path."""
from mgpu.nn.initializers import *  # noqa: F403
