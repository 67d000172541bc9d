"""MXNet's names for scripts that run on either backend.

A Gluon script keeps its lines and changes what it imports::

    import mgpu.compat.mxnet as mx
    from mgpu.compat.mxnet import autograd, gluon

The names mean what they mean in mgpu, on one device or several; those that
have no meaning here raise an error that names the replacement. A network stays
what it is, a Gluon Block or a torch Module, and is put on devices by
``net = mx.initialize(net, init, ctx)``, in the place of
``net.initialize(init, ctx)``.

Where a script has one array for one context, it has `Rows` here: a batch, cut
over its contexts. `gluon.data.DataLoader` gives arrays on the host, whose
``as_in_context(contexts)`` gives `Rows`; networks and losses take and return
`Rows`, and metrics take them. What `gluon.utils.split_and_load` gives is a
list of arrays, one for each context, as in Gluon.

Importing this package loads MXNet where it is installed (`mgpu.mxnet_compat`):
``gluon.nn``, ``gluon.rnn``, ``gluon.model_zoo`` and ``gluon.Block`` are its
own.
"""
import contextlib as _contextlib
import sys as _sys
from typing import Any

import mgpu
from mgpu.compat.mxnet import modules as _modules

_sys.meta_path.insert(0, _modules.Finder())
with _contextlib.suppress(mgpu.BackendNotAvailable):
    mgpu.mxnet_compat()

from mgpu.compat.mxnet import (autograd, gluon, metric, nd,  # noqa: E402
                               random)
from mgpu.compat.mxnet.arrays import HostArray, Rows  # noqa: E402
from mgpu.nn import initializers as init  # noqa: E402
from mgpu.optim import lr_scheduler  # noqa: E402

__all__ = ["Context", "HostArray", "Rows", "autograd", "cpu", "gluon", "gpu",
           "init", "initialize", "initializer", "lr_scheduler", "metric",
           "nd", "num_gpus", "random"]

Context, cpu, gpu = mgpu.Device, mgpu.cpu, mgpu.gpu
num_gpus = mgpu.num_gpus
initializer = init
__getattr__ = _modules.missing(__name__)


def initialize(net: Any, init: Any = None, ctx: Any = None,
               **options: Any) -> mgpu.Replicas:
    """`mgpu.initialize` with the order of arguments of Gluon's method.

    Parameters
    ----------
    net : gluon.Block or torch.nn.Module
    init : see `mgpu.initialize`
    ctx : a context, or a list of them
        Default: ``cpu(0)``.
    **options
        Of `mgpu.initialize`.
    """
    return mgpu.initialize(net, cpu(0) if ctx is None else ctx, init,
                           **options)
