"""``gluon.utils``: batches split over devices, and clipping."""
from mgpu.compat.gluon import clip_global_norm
from mgpu.compat.mxnet.modules import missing
from mgpu.data.split import split_and_load, split_data

__all__ = ["clip_global_norm", "split_and_load", "split_data"]
__getattr__ = missing(__name__)
