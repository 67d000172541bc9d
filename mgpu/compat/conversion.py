"""Networks that Gluon has exported, on the backend in use."""
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mgpu.backends import get_backend
from mgpu.gluon_io.parts import Missing
from mgpu.utils.arguments import one_of
from mgpu.utils.files import FilePath, path_of


#: extensions of the files that mgpu writes
_ENDINGS = (".py", ".safetensors", ".params", ".pt2")


def _check_name(path: FilePath, ending: str) -> None:
    """Raise ValueError for the extension of another kind of file."""
    own = os.path.splitext(path_of(path))[1]
    if own != ending and own in (*_ENDINGS, ".json", ".states"):
        raise ValueError(f"a file {ending} is written; received "
                         f"{path_of(path)!r}. Name it {ending}.")


def from_gluon(symbol: Any, params: FilePath | None = None,
               dtype: str | None = None, softmax: bool = True) -> Any:
    """A native network from what ``HybridBlock.export`` of Gluon wrote, or
    from the block itself.

    On torch, which needs no MXNet for it, the network is a
    `torch.fx.GraphModule` of ordinary layers, with Gluon's arithmetic where
    that differs (running variance, windows of pooling). It trains, and its
    names follow Gluon's: ``conv0_weight`` is ``conv0.weight``. On MXNet it is
    a ``SymbolBlock``.

    Parameters
    ----------
    symbol, params : str or os.PathLike
        ``net-symbol.json`` and ``net-0000.params``. Or `symbol` alone: a
        live ``HybridBlock``, hybridized and called once, which gives all
        shapes. Its values are copied, the means of its contexts; what has
        ``grad_req="null"`` is frozen in the new network too.
    dtype : {"float32", "float64", "float16"}, optional
        Of the parameters; the file's by default.
    softmax : bool
        Whether a ``SoftmaxOutput`` at the end, as networks of MXNet's
        symbols have it, gives probabilities, or what enters it. Labels are
        no inputs, and such an end has not the gradient of its loss: train
        with ``softmax=False`` and `mgpu.losses.SoftmaxCrossEntropyLoss`. The
        options of its loss (``grad_scale``, ``normalization``,
        ``use_ignore``, ``smooth_alpha``) are dropped with the label.

    Returns
    -------
    torch.fx.GraphModule or gluon.SymbolBlock
        It takes the inputs of the graph, in its order: of a recurrent layer
        alone its states too, which it returns. Several outputs are a
        tuple (torch) or a list (MXNet). Its values are its own, and
        `mgpu.initialize` keeps them. Constants of Gluon are not trained.

    Raises
    ------
    NotImplementedError
        Naming every operator and attribute that has no rule on torch: see
        `register_op`.
    ValueError
        If a file is damaged or of another kind, or the two are not of one
        network; if a block has not been hybridized and called.
    TypeError
        If `params` is missing and `symbol` is no ``HybridBlock``, or given
        beside one.
    OSError
        If a file cannot be opened.
    """
    if dtype is not None:
        dtype = str(one_of("dtype", dtype, ("float32", "float64", "float16")))
    one_of("softmax", softmax, (True, False))
    live = callable(getattr(symbol, "export", None)) \
        and callable(getattr(symbol, "collect_params", None))
    if live != (params is None):
        raise TypeError(
            "a network comes from two files, or from a live HybridBlock "
            f"alone; received {type(symbol).__name__} and "
            f"{type(params).__name__}. Pass net-symbol.json and "
            "net-0000.params, or the block.")
    if params is not None:
        return get_backend().from_gluon(symbol, params, dtype, softmax)
    frozen = [p.name for p in symbol.collect_params().values()
              if p.grad_req == "null"]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "net")
        try:
            # Its first call leaves a graph in any block, which only in a
            # hybridized one is what it computes later.
            if not getattr(symbol, "_active", True):
                raise RuntimeError("it is not hybridized")
            symbol.export(path)
        except RuntimeError as error:
            raise ValueError(
                "a block has a graph and all its shapes once it was "
                f"hybridized, initialized and called; received "
                f"{type(symbol).__name__}, which has not ({error}). Call "
                "hybridize(), and the block with one batch.") from error
        return get_backend().from_gluon(
            f"{path}-symbol.json", f"{path}-0000.params", dtype, softmax,
            frozen)


def to_gluon_params(net: Any, path: FilePath) -> None:
    """Write the values of a torch network of `from_gluon` for MXNet.

    The file is what ``export`` writes, so ``SymbolBlock.imports`` and
    ``mx.model.load_checkpoint`` read it with the ``-symbol.json`` that the
    network came from. Whole or not at all. A network that ``torch.compile``
    has wrapped is written as the one inside.

    Raises
    ------
    TypeError
        If `net` is not of `from_gluon`, or has a dtype that MXNet has not.
    ValueError
        Naming each array that has gone, has another shape or no values, or
        was added: the symbol would not fit the file.
    NotImplementedError
        On MXNet, where a block has ``export``.
    """
    _check_name(path, ".params")
    get_backend().converter("to_gluon_params")(net, path)


def to_safetensors(net: Any, path: FilePath) -> None:
    """Write the values of a torch network as safetensors. Whole or not at
    all.

    The names are those of `state_dict`. A tensor that has several is written
    once; the metadata has ``name: name that was written`` for each of the
    others, as ``safetensors.torch.load_model`` reads them, and for a network
    of `from_gluon` the names of its ``.params``, as JSON under
    ``gluon_names``.

    Raises
    ------
    TypeError
        If `net` is no torch network.
    NotImplementedError
        On MXNet, where a block has ``save_parameters``.
    ImportError
        Without the package safetensors.
    """
    _check_name(path, ".safetensors")
    get_backend().converter("to_safetensors")(net, path)


def to_pt2(net: Any, path: FilePath, examples: Sequence[np.ndarray]) -> None:
    """Export a torch network for prediction, by ``torch.export``.

    ``torch.export.load(path).module()`` loads it without mgpu. It accepts any
    batch size; other dimensions are those of `examples`. Dropout is disabled,
    and batch norm uses its running statistics. PyTorch does not support
    ``train()`` on an exported network. The file is written atomically.

    Parameters
    ----------
    net : torch.nn.Module
    path : str or os.PathLike
        The extension should be ``.pt2``.
    examples : list of numpy.ndarray
        One for each input, with a batch size of at least two.

    Raises
    ------
    TypeError
        `net` is not a torch network, or `examples` not a list of arrays.
    ValueError
        The network depends on the batch size, or raises for `examples`.
    NotImplementedError
        On MXNet: use ``export`` of the block.
    """
    _check_name(path, ".pt2")
    if not isinstance(examples, (list, tuple)) or not all(
            isinstance(x, np.ndarray) and x.ndim for x in examples):
        raise TypeError(
            "examples are a list of NumPy arrays, one for each input of the "
            "network, whose first axis is the batch; received "
            f"{examples!r:.200}. Pass for example [X].")
    get_backend().converter("to_pt2")(net, path, examples)


def missing_operators(symbol: FilePath, params: FilePath | None = None
                      ) -> list[Missing]:
    """Return the operators of an exported graph that `from_gluon` lacks.

    Parameters
    ----------
    symbol, params : str or os.PathLike
        ``net-symbol.json`` and ``net-0000.params``. Without `params` shapes
        are unknown, and a rule that needs one is not checked further.

    Returns
    -------
    list of Missing
        `op`, `why` and the name of the `node`, in the order of the graph.

    Raises
    ------
    NotImplementedError
        On MXNet, which has all operators.
    """
    return get_backend().converter("missing_operators")(symbol, params)


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
        is not installed, in ``net.pt``. A file that is there stays: one of
        other contents is not replaced.
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
    ValueError
        As in `from_gluon`; if a file to write is one that is read.
    FileExistsError
        If source or weights are there with other contents: nothing is
        written then.
    OSError
        As in `from_gluon`.
    """
    _check_name(path, ".py")
    one_of("plain", plain, (True, False))
    return get_backend().converter("gluon_source")(symbol, params, path, plain)


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
    if not isinstance(name, str) or not callable(rule):
        raise TypeError(
            "a rule is a function, for the operator of a name; received "
            f"{name!r} and {rule!r}. Pass for example (\"sin\", lambda node, "
            "inputs: Call(\"torch.sin\", (Slot(0),))).")
    get_backend().converter("register_op")(name, rule)
