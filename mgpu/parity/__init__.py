"""Prove that two networks train the same, and say why when they do not."""
import copy
from typing import Any

from mgpu.backends import backend_of, using_backend
from mgpu.parity.comparison import TOLERANCE, Result, compare
from mgpu.parity.diagnosis import Cause
from mgpu.parity.invariance import InvarianceReport, invariance
from mgpu.parity.lint import Finding, lint
from mgpu.parity.matching import MatchError, Plan
from mgpu.parity.measure import Gap
from mgpu.parity.side import Side
from mgpu.parity.trace import Recording, compare_trace, record

__all__ = ["Cause", "Finding", "Gap", "InvarianceReport", "MatchError",
           "Plan", "Recording", "Result", "Side", "TOLERANCE", "compare",
           "compare_trace", "gluonize", "invariance", "lint", "record"]


def gluonize(net: Any, *, inplace: bool = True, undo: bool = False) -> Any:
    """Give a torch network Gluon's batch-norm arithmetic in plain PyTorch.

    In training the layers keep the *biased* variance of the batch, as Gluon
    on CPU does (torch keeps the unbiased one, n / (n - 1) larger), and their
    share of the old statistics is ``float(numpy.float32(1 - momentum))``, as
    MXNet stores it. Source: MXNet 1.9.1, src/operator/nn/batch_norm.cc.

    Statistics are updated in each forward pass in training mode, as torch
    does, also under `torch.no_grad`; Gluon updates them in the backward pass.
    The two differ only in a forward pass that no backward pass follows: use
    ``net.eval()`` for those. `state_dict`, hooks and optimizers are not
    touched: only the class of the layers changes.

    Parameters
    ----------
    net : torch.nn.Module
        A Gluon network comes back as it is.
    inplace : bool
        False: change and return a deep copy.
    undo : bool
        Give the layers torch's arithmetic back.

    Returns
    -------
    The network.

    Raises
    ------
    TypeError
        A batch-norm class that is not torch's own BatchNorm1d, 2d or 3d
        (lazy layers: run a forward pass first). Nothing has changed then.
    """
    with using_backend(backend_of(net)) as backend:
        return backend.gluonize(net if inplace else copy.deepcopy(net),
                                not undo)
