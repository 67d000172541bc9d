"""``nd``: what of it does not make arrays."""
from mgpu.compat.mxnet.modules import missing
from mgpu.tools.timing import waitall

__all__ = ["waitall"]
__getattr__ = missing(__name__)
