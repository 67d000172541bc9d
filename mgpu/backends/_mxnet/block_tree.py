"""Copies of a Gluon block on another context, for one pass."""
import types
from collections.abc import Mapping
from operator import is_
from typing import Any

import numpy as np

from mgpu.backends import containers
from mgpu.backends._mxnet.blocks import named_blocks
from mgpu.backends._mxnet.framework import mx

autograd, gluon, NDArray = mx.autograd, mx.gluon, mx.nd.NDArray
_Scope = gluon.block._BlockScope
#: attributes set by tracing: one graph serves all contexts
TRACED = ("_cached_graph", "_cached_op", "_in_format", "_out_format")
#: attributes that forward does not change
_LISTS = {"_forward_hooks", "_forward_pre_hooks", "_flags", "_cached_op_args"}
#: attributes created by Gluon
INTERNAL = frozenset({*TRACED, *vars(gluon.HybridBlock(prefix="x_"))})
#: key of an attribute: (id of a block, name)
AttributeKey = tuple[int, str]
_ATOMS = (type(None), bool, int, float, str, bytes, type)


def is_array(x: Any) -> bool:
    return isinstance(x, NDArray)


def is_recorded(x: Any) -> bool:
    """Whether `x` is recorded for autograd."""
    try:
        autograd.get_symbol(x)
    except mx.MXNetError:
        return False
    return True


def on_context(x: Any, context: Any) -> Any:
    """`x`, or a recorded copy of it on another context."""
    return x if x.ctx == context else x.copyto(context)


def has_form(x: Any, like: Any) -> bool:
    """Whether `x` is an array of the shape, dtype and family of `like`."""
    return type(x) is type(like) and x.shape == like.shape \
        and x.dtype == like.dtype


class BlockTree:
    """A copy of a block on another context, for one pass.

    Parameters
    ----------
    net : Block
        Its parameters are on one context.
    context : Context
    buffers : dict
        Parameter -> array on `context`, memory that is reused by later
        passes.
    attributes : dict
        Values of attributes on the context, by `AttributeKey`.
    own : dict
        Parameter -> array of the copy, not copied.
    apart : bool
        Whether to copy arrays on `context` and `attributes` too.

    Attributes
    ----------
    net : Block
        The copy. Its parameters are recorded copies of the network's, so
        that a backward pass adds to the network's gradients.
    blocks : list of (block, its copy)
    parameters : dict of Parameter -> its copy
    """

    def __init__(self, net: Any, context: Any, buffers: dict[Any, Any],
                 attributes: Mapping[AttributeKey, Any],
                 own: Mapping[Any, Any] = types.MappingProxyType({}),
                 apart: bool = False) -> None:
        self.context, self._memory, self._apart = context, buffers, apart
        self._attributes, self._own = attributes, own
        #: by id: (object, its copy); the object keeps its id
        self._memo: dict[int, tuple[Any, Any]] = {}
        self.blocks: list[tuple[Any, Any]] = []
        self.parameters: dict[Any, Any] = {}
        self._context_map: list[list[Any]] = [[], []]
        self._context_map[context.device_typeid & 1] = [
            None] * context.device_id + [0]
        self.net = self.copy(net)

    def copy(self, x: Any) -> Any:
        """Copy `x`, including the arrays, parameters and blocks in it."""
        if isinstance(x, _ATOMS):
            return x
        if id(x) not in self._memo:
            self._memo[id(x)] = x, x        # while it is read
            self._memo[id(x)] = x, self._copied(x)
        return self._memo[id(x)][1]

    def _copied(self, x: Any) -> Any:
        if isinstance(x, gluon.Block):
            return self._block(x)
        if is_array(x):
            return x.copyto(self.context) if self._apart \
                else on_context(x, self.context)
        if isinstance(x, gluon.Parameter):
            new = self.parameters[x] = _like(x)
            self._fill(x, new)
            return new
        if isinstance(x, (gluon.ParameterDict, _Scope)):
            new = _like(x)
            for name in vars(new).keys() & {"_params", "_shared", "_block"}:
                new.__dict__[name] = self.copy(vars(x)[name])
            return new
        if isinstance(x, (np.ndarray, bytearray)):
            return x.copy()
        held, make = containers.opened(x, (gluon.Block, NDArray))
        # Each device has its own containers, except those of a function.
        new = [self.copy(y) if not isinstance(x, types.FunctionType)
               or isinstance(y, (gluon.Block, gluon.Parameter, NDArray)) else y
               for y in held]
        return x if make is None or callable(x) and all(map(is_, new, held)) \
            else make(new)

    def _block(self, x: Any) -> Any:
        new = object.__new__(type(x))
        self._memo[id(x)] = x, new      # a child may refer to `x`
        self.blocks.append((x, new))
        for name, value in list(vars(x).items()):
            is_own = (id(x), name) in self._attributes
            if is_own:
                value = self._attributes[id(x), name]
            if (self._apart or not is_own) and name not in TRACED \
                    and (name not in _LISTS or value):
                value = self.copy(value)
            new.__dict__[name] = value
        return new

    def _fill(self, p: Any, new: Any) -> None:
        """Set the value of `new` to a recorded copy of that of `p`."""
        new.__dict__.update(vars(p), _trainer=None, _grad=None)
        arrays = vars(p)["_data"]
        if arrays is None:
            return
        if len(arrays) > 1 or {p._stype, p._grad_stype} != {"default"}:
            raise ValueError(
                f"DataParallel supports dense parameters on one context; got "
                f"{p.name}, {p._stype} with {p._grad_stype} gradients, on "
                f"{p._ctx_list}. Initialize the network on the first device "
                "only.")
        new.__dict__.update(
            _data=[self._own[p] if p in self._own
                   else copied(p, self.context, self._memory)],
            _ctx_list=[self.context], _ctx_map=self._context_map)

    def update(self) -> None:
        """Copy parameters and graphs created by the first device's pass.

        Raises
        ------
        RuntimeError
            The pass has created a block or a parameter.
        """
        for p, new in self.parameters.items():
            if vars(new)["_data"] is None:
                self._fill(p, new)
        for block, new in self.blocks:
            if len(block._children) != len(new._children) or \
                    len(block._params._params) != len(new._params._params):
                raise RuntimeError(
                    f"forward of {type(block).__name__} made a block or a "
                    "parameter. Call the network once before it runs on "
                    "several devices.")
            if getattr(block, "_cached_op", None) \
                    is not getattr(new, "_cached_op", None):
                new.__dict__.update({name: vars(block)[name]
                                     for name in TRACED})
                new.__dict__["_cached_op_args"] = self.copy(
                    block._cached_op_args)

    def view(self) -> dict[int, dict[str, Any]]:
        """Attributes of the copies, by id of the block."""
        return {id(block): vars(new) for block, new in self.blocks}


def _like(x: Any) -> Any:
    """A shallow copy of `x`."""
    new = object.__new__(type(x))
    new.__dict__.update(vars(x))
    return new


def copied(p: Any, context: Any, buffers: dict[Any, Any]) -> Any:
    """Copy the Parameter `p` to `context`, into `buffers`. Recorded if the
    parameter has a gradient."""
    values = vars(p)["_data"][0]
    with autograd.pause():
        if not has_form(buffers.get(p), values):
            buffers[p] = values.copyto(context)
    # MXNet does not write to arrays of a graph, so detach.
    target = buffers[p].detach()
    # The backward pass of a copy would not accumulate.
    (alias(values) if p.grad_req == "add" else values).copyto(target)
    return target


def alias(x: Any) -> Any:
    """A view of `x` with its own node in the graph. It has no second
    derivative with respect to `x`."""
    if not x.shape or 0 in x.shape:
        return x.copy()
    y = x.as_nd_ndarray().reshape(x.shape)
    return y.as_np_ndarray() if isinstance(x, mx.np.ndarray) else y


def is_state(x: Any) -> bool:
    """Whether an attribute may have different values on the devices: it
    contains no block, parameter or function."""
    found = containers.parts(x)
    if found is not None:
        return all(map(is_state, found[1]))
    return not (isinstance(x, (gluon.Block, gluon.Parameter,
                               gluon.ParameterDict, mx.sym.Symbol))
                or callable(x))


def blocks_of(net: Any) -> list[Any]:
    """`net` and all blocks in it, without duplicates."""
    return [*{id(block): block for _, block in named_blocks(net)}.values()]


def view_of(net: Any) -> dict[int, dict[str, Any]]:
    """Attributes of the blocks in `net`, by id of the block."""
    return {id(block): vars(block) for block in blocks_of(net)}


def state_of(view: Mapping[int, dict[str, Any]]) -> dict[AttributeKey, Any]:
    """The user-defined attributes of blocks."""
    return {(key, name): x for key, own in view.items()
            for name, x in own.items()
            if name not in INTERNAL and is_state(x)}
