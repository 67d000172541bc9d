"""``random``: the seed of dropout."""
from mgpu.compat.mxnet.modules import missing
from mgpu.training.functions import seed

__all__ = ["seed"]
__getattr__ = missing(__name__)
