"""``metric``: `mgpu.metrics`."""
from mgpu.compat.mxnet.modules import missing
from mgpu.nn.metrics import *  # noqa: F403

__getattr__ = missing(__name__)
