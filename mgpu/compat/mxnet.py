"""MXNet's names for scripts: ``import mgpu.compat.mxnet as mx``."""
