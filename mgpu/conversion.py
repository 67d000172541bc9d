"""Networks that Gluon has exported, on the engine in use."""
from collections.abc import Callable
from typing import Any

from mgpu.arguments import one_of
from mgpu.backends import get_backend
from mgpu.files import FilePath


def from_gluon(symbol: FilePath, params: FilePath, dtype: str | None = None
               ) -> Any:
    """A native network from what ``HybridBlock.export`` of Gluon wrote.

    On torch, which needs no MXNet for it, the network is a
    `torch.fx.GraphModule` of ordinary layers, with Gluon's arithmetic where
    that differs (running variance, windows of pooling). It trains, and its
    names follow Gluon's: ``conv0_weight`` is ``conv0.weight``. On MXNet it is
    a ``SymbolBlock``.

    Parameters
    ----------
    symbol, params : str or os.PathLike
        ``net-symbol.json`` and ``net-0000.params``.
    dtype : {"float32", "float64", "float16"}, optional
        Of the parameters; the file's by default.

    Returns
    -------
    torch.fx.GraphModule or gluon.SymbolBlock
        It takes the inputs of the graph, in its order. Several outputs are a
        tuple (torch) or a list (MXNet). Its values are its own, and
        `mgpu.initialize` keeps them.

    Raises
    ------
    NotImplementedError
        Naming every operator and attribute that has no rule on torch: see
        `register_op`.
    ValueError
        If a file is damaged or of another kind, or the two are not of one
        network.
    OSError
        If a file cannot be opened.
    """
    if dtype is not None:
        one_of("dtype", dtype, ("float32", "float64", "float16"))
    return get_backend().from_gluon(symbol, params, dtype)


def to_gluon_params(net: Any, path: FilePath) -> None:
    """Write the values of a torch network of `from_gluon` for MXNet.

    The file is what ``export`` writes, so ``SymbolBlock.imports`` and
    ``mx.model.load_checkpoint`` read it with the ``-symbol.json`` that the
    network came from. Whole or not at all.

    Raises
    ------
    TypeError
        If `net` is not of `from_gluon`, or has a dtype that MXNet has not.
    NotImplementedError
        On MXNet, where a block has ``export``.
    """
    get_backend().to_gluon_params(net, path)


def gluon_source(symbol: FilePath, params: FilePath | None, path: FilePath,
                 plain: bool = False) -> dict[str, str]:
    """Write the source of a network of Gluon, as a person would port it.

    The file defines ``Net``, a `torch.nn.Module`, and ``load(path)``, which
    makes one with the weights in a file. What repeats in the network is a
    class, whose arguments are what differs. Its numbers are those of
    `from_gluon`; it needs mgpu where Gluon's arithmetic is not PyTorch's
    (batch norm's running variance, windows of pooling), and says so.

    Parameters
    ----------
    symbol, params : str or os.PathLike
        ``net-symbol.json`` and ``net-0000.params``. Without `params` (None)
        no weights are written; the graph has to know all sizes.
    path : str or os.PathLike
        Of the source: ``net.py``. The weights are beside it, in
        ``net.safetensors``, or, where layers share an array or that package
        is not installed, in ``net.pt``.
    plain : bool
        PyTorch's own layers in the place of mgpu's, with a comment that
        names the difference.

    Returns
    -------
    dict of str to str
        The name in the ``.params`` file for each name in `state_dict`.

    Raises
    ------
    NotImplementedError
        As in `from_gluon`; on MXNet.
    ValueError, OSError
        As in `from_gluon`.
    """
    return get_backend().gluon_source(symbol, params, path, plain)


def register_op(name: str, rule: Callable[..., Any]) -> None:
    """Say what an operator of MXNet becomes in `from_gluon` on torch.

    Parameters
    ----------
    name : str
        As in the graph: ``"Convolution"``.
    rule : callable
        ``rule(node, inputs)`` returns a `Layer` or a `Call` of
        `mgpu.gluon_io`. ``node.attributes`` has all attributes of the
        operator. `inputs` has a `Source` for each input, with the name and
        the shape where it is an array of the file. For an attribute that it
        does not know the rule raises NotImplementedError.
    """
    get_backend().register_op(name, rule)
