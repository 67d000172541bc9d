"""Copies of a Gluon block for another context, for one pass."""
import copy
import functools
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from mgpu.backends import containers
from mgpu.backends._mxnet.framework import mx

autograd, gluon, NDArray = mx.autograd, mx.gluon, mx.nd.NDArray
_Scope = gluon.block._BlockScope
#: what tracing sets: one graph serves all contexts
TRACED = ("_cached_graph", "_cached_op", "_in_format", "_out_format")
#: attributes that Gluon itself makes
INTERNAL = frozenset({*TRACED, *vars(gluon.HybridBlock(prefix="x_"))})
#: an attribute: (id of a block, name)
Place = tuple[int, str]
_ATOMS = (type(None), bool, int, float, str, bytes, type)


def is_array(x: Any) -> bool:
    return isinstance(x, NDArray)


def is_recorded(x: Any) -> bool:
    """Whether a gradient may reach `x`."""
    try:
        autograd.get_symbol(x)
    except mx.MXNetError:
        return False
    return True


def on_context(x: Any, context: Any) -> Any:
    """`x`, or a recorded copy of it on another context."""
    return x if x.ctx == context else x.copyto(context)


class BlockTree:
    """A block as another context has it during one pass.

    Parameters
    ----------
    net : Block
        Its parameters lie on one context.
    context : Context
    buffers : dict
        id of a Parameter -> (it, array on `context`): memory that the next
        pass uses again.
    attributes : dict
        By `Place`, the context's own value.
    sources : dict
        id of a Parameter -> the recorded array to copy in its place.
    own : dict
        id of a Parameter -> the array that the copy has, as it is.

    Attributes
    ----------
    net : Block
        The copy. Its parameters are recorded copies of the network's, so
        that a backward pass adds to the network's gradients.
    blocks : list of (block, its copy)
    """

    def __init__(self, net: Any, context: Any, buffers: dict[int, Any],
                 attributes: Mapping[Place, Any],
                 sources: Mapping[int, Any] = types.MappingProxyType({}),
                 own: Mapping[int, Any] = types.MappingProxyType({})) -> None:
        self.context, self._memory = context, buffers
        self._attributes, self._sources, self._own = attributes, sources, own
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []         # or ids would be used again
        self.blocks: list[tuple[Any, Any]] = []
        #: (parameter, its copy)
        self.parameters: list[tuple[Any, Any]] = []
        self.net = self.copy(net)

    def copy(self, x: Any) -> Any:
        """`x` with copies of the arrays, parameters and blocks in it."""
        if isinstance(x, _ATOMS):
            return x
        if id(x) not in self._memo:
            self._alive.append(x)
            self._copy(x)
        return self._memo.get(id(x), x)

    def _copy(self, x: Any) -> None:
        memo = self._memo
        if is_array(x):
            memo[id(x)] = on_context(x, self.context)
        elif isinstance(x, (np.ndarray, bytearray)):
            memo[id(x)] = x.copy()
        elif isinstance(x, gluon.Parameter):
            memo[id(x)] = new = copy.copy(x)
            self.parameters.append((x, new))
            self._fill(x, new)
        elif isinstance(x, gluon.Block):
            memo[id(x)] = new = object.__new__(type(x))
            self.blocks.append((x, new))
            for name, value in list(vars(x).items()):
                new.__dict__[name] = value if name in TRACED \
                    else self._attributes[id(x), name] \
                    if (id(x), name) in self._attributes else self.copy(value)
        elif isinstance(x, gluon.ParameterDict):
            memo[id(x)] = new = copy.copy(x)
            new.__dict__.update({name: self.copy(vars(x)[name])
                                 for name in ("_params", "_shared")})
        elif isinstance(x, _Scope):
            memo[id(x)] = new = copy.copy(x)
            new.__dict__["_block"] = self.copy(vars(x)["_block"])
        elif isinstance(x, types.MethodType):
            if isinstance(x.__self__, gluon.Block):
                memo[id(x)] = types.MethodType(x.__func__,
                                               self.copy(x.__self__))
        elif isinstance(x, functools.partial):
            memo[id(x)] = functools.partial(
                self.copy(x.func), *map(self.copy, x.args),
                **{key: self.copy(v) for key, v in x.keywords.items()})
        elif isinstance(x, types.FunctionType):
            self._copy_function(x)
        elif isinstance(x, (set, frozenset)):
            memo[id(x)] = type(x)(map(self.copy, x))
        elif (found := containers.parts(x)) is not None:
            memo[id(x)] = x         # while it is read
            memo[id(x)] = containers.rebuild(
                x, found[0], list(map(self.copy, found[1])))

    def _copy_function(self, x: types.FunctionType) -> None:
        """A closure over blocks, parameters or arrays."""
        cells = []
        for cell in x.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                value = None
            cells.append(types.CellType(self.copy(value)) if isinstance(
                value, (gluon.Block, gluon.Parameter, NDArray)) else cell)
        if any(a is not b for a, b in zip(cells, x.__closure__ or ())):
            new = types.FunctionType(x.__code__, x.__globals__, x.__name__,
                                     x.__defaults__, tuple(cells))
            new.__kwdefaults__ = x.__kwdefaults__
            self._memo[id(x)] = new

    def _fill(self, p: Any, new: Any) -> None:
        """Give `new` a recorded copy of the values of `p`."""
        new.__dict__.update(vars(p), _trainer=None, _grad=None)
        arrays = vars(p)["_data"]
        if arrays is None:
            return
        if p._stype != "default" or p._grad_stype != "default":
            raise TypeError(f"parameter {p.name} is sparse. DataParallel "
                            "supports dense parameters.")
        if len(arrays) > 1:
            raise ValueError(
                f"parameter {p.name} is on several contexts, {p._ctx_list}. "
                "Initialize the network on the first device only.")
        target = self._own.get(id(p))
        if target is None:
            target = copied(p, self.context, self._memory,
                            self._sources.get(id(p)))
        places: list[list[Any]] = [[], []]
        places[self.context.device_typeid & 1] = [
            None] * self.context.device_id + [0]
        new.__dict__.update(_data=[target], _ctx_list=[self.context],
                            _ctx_map=places)

    def update(self) -> None:
        """Take over what the first device's pass has initialized and traced.

        Raises
        ------
        RuntimeError
            The pass has made a block or a parameter.
        """
        for p, new in self.parameters:
            if vars(new)["_data"] is None:
                self._fill(p, new)
        for block, new in self.blocks:
            if len(block._children) != len(new._children) or \
                    len(block._params._params) != len(new._params._params):
                raise RuntimeError(
                    f"forward of {type(block).__name__} made a block or a "
                    "parameter. Call the network once before it runs on "
                    "several devices.")
            if isinstance(block, gluon.HybridBlock) \
                    and new._cached_op is not block._cached_op:
                new.__dict__.update({name: vars(block)[name]
                                     for name in TRACED})
                new.__dict__["_cached_op_args"] = self.copy(
                    block._cached_op_args)

    def view(self) -> dict[int, dict[str, Any]]:
        """The attributes of the copies, by id of the block."""
        return {id(block): vars(new) for block, new in self.blocks}

    def give_back(self) -> None:
        """Give the network the graphs that only this context has traced."""
        first = {id(new): p for p, new in self.parameters}
        for block, new in self.blocks:
            if isinstance(block, gluon.HybridBlock) \
                    and block._cached_op is None \
                    and new._cached_op is not None:
                block.__dict__.update({name: vars(new)[name]
                                       for name in TRACED})
                block.__dict__["_cached_op_args"] = [
                    (is_input, x if is_input else first[id(x)])
                    for is_input, x in new._cached_op_args]


def copied(p: Any, context: Any, memory: dict[int, tuple[Any, Any]],
           source: Any = None) -> Any:
    """An array on `context` with the values of the Parameter `p`, in
    `memory`; recorded where the parameter has a gradient, as a copy of
    `source` (None: of the parameter's array)."""
    values = vars(p)["_data"][0]
    known, buffer = memory.get(id(p), (None, None))
    with autograd.pause():
        if known is not p or buffer.shape != values.shape \
                or buffer.dtype != values.dtype \
                or type(buffer) is not type(values):
            buffer = values.copyto(context)
            memory[id(p)] = p, buffer
    # MXNet writes to no array of a graph: this one is of none.
    target = buffer.detach()
    # (A frozen array may have a gradient: see `MXNetNetwork`.)
    if p.grad_req == "null" and values.grad is None:
        with autograd.pause():
            values.copyto(target)
        return target
    if source is None:      # backward of a copy would not add
        source = alias(values) if p.grad_req == "add" else values
    source.copyto(target)
    return target


def alias(x: Any) -> Any:
    """`x` by a node of its own in the graph; shares its memory. It has no
    second derivative with respect to `x`."""
    if not x.shape or 0 in x.shape:
        return x.copy()
    y = x.as_nd_ndarray().reshape(x.shape)
    return y.as_np_ndarray() if isinstance(x, mx.np.ndarray) else y


def is_state(x: Any) -> bool:
    """Whether a device may have a value of its own for an attribute: it
    reaches no block, parameter or function."""
    found = containers.parts(x)
    if found is not None:
        return all(map(is_state, found[1]))
    return not (isinstance(x, (gluon.Block, gluon.Parameter,
                               gluon.ParameterDict, mx.sym.Symbol))
                or callable(x))


def blocks_of(net: Any) -> list[Any]:
    """`net` and the blocks in it, each once."""
    found: dict[int, Any] = {}
    waiting = [net]
    while waiting:
        block = waiting.pop()
        if id(block) not in found:
            found[id(block)] = block
            waiting += block._children.values()
    return list(found.values())


def view_of(net: Any) -> dict[int, dict[str, Any]]:
    """The attributes of the blocks in `net`, by id of the block."""
    return {id(block): vars(block) for block in blocks_of(net)}


def state_of(view: Mapping[int, dict[str, Any]]) -> dict[Place, Any]:
    """The user's attributes among those of blocks."""
    return {(key, name): x for key, own in view.items()
            for name, x in own.items()
            if name not in INTERNAL and is_state(x)}
