"""A torch network from an exported graph and its arrays."""
import importlib
import keyword
import operator
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from mgpu.backends._torch.gluon import (  # noqa: F401, their rules
    arrays as _arrays, heads, operators, recurrent, vision)
from mgpu.gluon_io.created import with_inputs
from mgpu.gluon_io.graph import (Graph, Node, check_fit, constants,
                                 dense_arrays, entries, load_graph, with_dtype,
                                 without_softmax)
from mgpu.gluon_io.params import save_params
from mgpu.gluon_io.parts import (Call, Layer, Missing, MissingOperator, Part,
                                 Shape, Slot, form_of, missing_in, parts_of,
                                 slots_of)
from mgpu.utils.files import FilePath

_METHODS = "torch.Tensor."


class GluonModule(fx.GraphModule):
    """A network that was exported by Gluon, as PyTorch computes it.

    Attributes
    ----------
    gluon_names : dict of str to str
        The name in the ``.params`` file for each name in `state_dict`.
    gluon_shapes : dict of str to tuple of int
        The shape in that file for each of these names.
    numpy_shapes : bool
        Whether that file is of the NumPy interface.
    """

    gluon_names: dict[str, str]
    gluon_shapes: dict[str, Shape]
    numpy_shapes: bool

    def __deepcopy__(self, memo: Any) -> "GluonModule":
        # that of fx keeps the attributes which it knows
        copy: GluonModule = super().__deepcopy__(memo)
        copy.gluon_names = dict(self.gluon_names)
        copy.gluon_shapes = dict(self.gluon_shapes)
        copy.numpy_shapes = self.numpy_shapes
        return copy


def from_gluon(symbol: FilePath, params: FilePath, dtype: str | None,
               softmax: bool) -> GluonModule:
    """See `mgpu.from_gluon`."""
    graph, arrays = load_graph(symbol), dense_arrays(params)
    if dtype is not None:
        graph = with_dtype(graph, {
            x.dtype.name for x in arrays.values() if x.dtype.kind == "f"},
            dtype)
    return _Builder(graph if softmax else without_softmax(graph), arrays,
                    None if dtype is None else getattr(torch, dtype)).module()


def to_gluon_params(net: nn.Module, path: FilePath) -> None:
    """See `mgpu.to_gluon_params`."""
    net = getattr(net, "_orig_mod", net)    # of torch.compile
    shapes = getattr(net, "gluon_shapes", None)
    if shapes is None:
        raise TypeError("only a network of from_gluon knows Gluon's names; "
                        f"received {type(net).__name__}.")
    own = net.state_dict()
    changed = [f"{key} {_said(own[key]) if key in own else 'missing'} where "
               f"Gluon has {shape}" for key, shape in shapes.items()
               if key not in own or own[key].shape != shape
               or own[key].is_meta]
    changed += [f"{key} {_said(x)} where Gluon has none"
                for key, x in own.items() if key not in shapes
                and not key.endswith(".num_batches_tracked")]
    if changed:
        raise ValueError(
            "MXNet reads the arrays that the network came with; received "
            f"{'; '.join(changed[:5])}. Undo the change (as "
            "torch.nn.utils.prune.remove does), or use mgpu.to_safetensors.")
    for key in shapes:
        if own[key].dtype is torch.bfloat16:
            raise TypeError(f"MXNet has no bfloat16; received {key} of it. "
                            "Convert the network: net.float().")
    save_params(path, {name: own[key].cpu().numpy()
                       for key, name in net.gluon_names.items()},
                numpy_shapes=net.numpy_shapes or None)


def _said(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)}{' without values' if x.is_meta else ''}"


def missing_operators(symbol: FilePath, params: FilePath | None
                      ) -> list[Missing]:
    """See `mgpu.missing_operators`."""
    if params is None:
        return missing_in(with_inputs(load_graph(symbol), ()), None)
    graph, arrays = load_graph(symbol), dense_arrays(params)
    check_fit(graph, arrays)
    return missing_in(with_inputs(graph, arrays), *_known(arrays))


def _known(arrays: Mapping[str, np.ndarray]
           ) -> tuple[dict[str, Shape], set[str]]:
    """The shapes of arrays, and which are of whole numbers."""
    return ({name: x.shape for name, x in arrays.items()},
            {name for name, x in arrays.items() if x.dtype.kind != "f"})


def identifier(name: str) -> str:
    """A name of Gluon as one of Python."""
    name = re.sub(r"\W", "_", name)
    return f"_{name}" if not name or name[0].isdigit() \
        or keyword.iskeyword(name) else name


def prefix_of(node: Node, arrays: list[str]) -> str:
    """What a layer is called: as its parameters begin, or as its node
    does, without Gluon's ending."""
    if arrays:
        # of an RNN: lstm0_l0_i2h_weight, lstm0_l1_i2h_weight, ...
        common = os.path.commonprefix(arrays).rpartition("_")[0]
        return common.removesuffix("_l0") or \
            arrays[0].rpartition("_")[0] or node.name
    return node.name.removesuffix("_fwd")


def _place(form: Any, output: int) -> list[int] | None:
    """Where the output is in what a part returns."""
    if not isinstance(form, tuple):
        return [] if form == output else None
    return next(([i, *found] for i, inner in enumerate(form)
                 if (found := _place(inner, output)) is not None), None)


class _Builder:
    def __init__(self, graph: Graph, arrays: Mapping[str, np.ndarray],
                 dtype: Any) -> None:
        self._graph = with_inputs(graph, arrays)
        self._arrays, self._dtype = arrays, dtype
        self._root, self._fx = nn.Module(), fx.Graph()
        self._constants = constants(graph)
        self._tensors: dict[str, torch.Tensor] = {}
        self._env: dict[tuple[int, int], fx.Node] = {}
        self._parts: dict[int, tuple[fx.Node, Part]] = {}
        self._names: dict[str, str] = {}
        self._layers: dict[str, str] = {}
        # which stand in what torch.fx writes
        self._taken = {"self", "torch", "device", "inf", "nan", "NoneType",
                       "fx_pytree", "pytree"}
        check_fit(graph, arrays)

    def module(self) -> GluonModule:
        nodes = self._graph.nodes
        parts = parts_of(self._graph, *_known(self._arrays))
        entering = {i for i, _ in self._graph.heads}
        entering |= {nodes[i].inputs[slot][0] for i, part in parts.items()
                     for slot in slots_of(part)}
        named = {node.name: i for i, node in enumerate(nodes)
                 if node.op == "null" and i in entering}
        for name in entries(self._graph, self._arrays):
            if name in named:
                self._env[named[name], 0] = self._fx.placeholder(
                    self._own_name(name))
        for name, i in named.items():
            if name in self._arrays:
                self._env[i, 0] = self._array(nodes[i])
        for i, part in parts.items():
            made = self._layer(nodes[i], part) if isinstance(part, Layer) \
                else self._call(nodes[i], part)
            self._parts[i] = made, part
        ends = [self._output(*head) for head in self._graph.heads]
        self._fx.output(ends[0] if len(ends) == 1 else tuple(ends))
        module = GluonModule(self._root, self._fx)
        module.gluon_names = self._names
        module.gluon_shapes = {key: tuple(x.shape) for key, x in
                               module.state_dict().items()
                               if key in self._names}
        module.numpy_shapes = self._graph.numpy_shapes
        return module

    def _output(self, i: int, k: int) -> fx.Node:
        if (i, k) not in self._env:
            if i not in self._parts:
                raise ValueError(
                    f"an array has one output; the graph asks for number {k} "
                    f"of {self._graph.nodes[i].name!r}. Use a whole file.")
            value, part = self._parts[i]
            place = _place(form_of(part), k)
            if place is None:
                raise MissingOperator(
                    f"{self._graph.nodes[i].op}: output {k} is used (node "
                    f"{self._graph.nodes[i].name!r}), which its rule has not.")
            for step in place:
                value = self._fx.call_function(operator.getitem,
                                               (value, step))
            self._env[i, k] = value
        return self._env[i, k]

    def _own_name(self, name: str) -> str:
        """A name that nothing else of the network has, not Python's."""
        name = identifier(name)
        while name in self._taken or hasattr(self._root, name) \
                or hasattr(fx.GraphModule, name):
            name += "_"
        self._taken.add(name)
        return name

    def _tensor(self, name: str) -> torch.Tensor:
        """The same one each time: a shared array stays shared."""
        if name not in self._tensors:
            x = torch.from_numpy(np.array(self._arrays[name]))
            self._tensors[name] = x.to(self._dtype) \
                if self._dtype is not None and x.is_floating_point() else x
        return self._tensors[name]

    def _array(self, node: Node) -> fx.Node:
        name = self._own_name(node.name)
        self._root.register_parameter(name, self._parameter(
            node.name, node.name not in self._constants))
        self._note(name, node.name, aux=False)
        return self._fx.get_attr(name)

    def _parameter(self, name: str, trained: bool) -> nn.Parameter:
        x = self._tensor(name)
        if not isinstance(x, nn.Parameter):
            x = self._tensors[name] = nn.Parameter(
                x, requires_grad=trained and x.is_floating_point())
        return x

    def _note(self, key: str, array: str, aux: bool) -> None:
        self._names[key] = f"{'aux' if aux else 'arg'}:{array}"

    def _layer(self, node: Node, part: Layer) -> fx.Node:
        # One layer that is called twice is one module: torch's ``to`` parts
        # the buffers of two.
        key = repr((part.kind, part.arguments, part.tensors))
        if key not in self._layers or not part.tensors:
            self._layers[key] = self._module(node, part)
        elif any(name in self._root.get_submodule(self._layers[key])._buffers
                 for name in part.tensors):
            self._several_calls(node)
        return self._fx.call_module(self._layers[key], tuple(
            self._argument(node, x) for x in part.inputs))

    def _several_calls(self, node: Node) -> None:
        warnings.warn(
            f"a pass calls a layer with running statistics several times "
            f"({node.op} {node.name!r}). In training MXNet's backward pass "
            "takes in the last call first, PyTorch the first one, so the "
            "running statistics differ from MXNet's (relative, about 0.1). "
            "Predictions with the statistics of the file do not.",
            stacklevel=2)

    def _module(self, node: Node, part: Layer) -> str:
        kind = find(part.kind)
        name = self._own_name(prefix_of(node, [*part.tensors.values()]))
        try:
            with torch.device("meta"):
                layer = kind(**part.arguments)
        except (TypeError, ValueError, RuntimeError, ArithmeticError
                ) as error:
            raise ValueError(
                f"a layer has attributes that fit each other; received "
                f"{part.arguments} for {node.op} {node.name!r} "
                f"({error}). Use a whole file.") from error
        for key, array in part.tensors.items():
            x = self._tensor(array)
            buffer = key in layer._buffers
            expected = (layer._buffers if buffer else layer._parameters)[key]
            if expected is None or x.shape != expected.shape:
                raise ValueError(
                    f"the graph and the arrays belong together; received "
                    f"{array!r} of shape {tuple(x.shape)} for "
                    f"{layer!r}. Use the two files of one export.")
            if key in part.values:
                x.detach().fill_(part.values[key])
            if buffer:
                layer._buffers[key] = x
            else:
                # an RNN of torch notes what is set
                setattr(layer, key, self._parameter(array,
                                                    key not in part.frozen))
            self._note(f"{name}.{key}", array, aux=buffer)
        without = [key for key, x in layer._parameters.items()
                   if x is not None and x.is_meta]
        if without:
            raise ValueError(
                f"a layer has an array for each of its parameters; received "
                f"none for {', '.join(without)} of {node.op} {node.name!r}. "
                "Use a whole file.")
        for key, x in layer._buffers.items():
            if x is not None and x.is_meta:     # torch's count of batches
                layer._buffers[key] = torch.zeros(x.shape, dtype=x.dtype)
        self._root.add_module(name, layer)
        return name

    def _call(self, node: Node, part: Call) -> fx.Node:
        arguments = tuple(self._argument(node, x) for x in part.arguments)
        named = {key: self._argument(node, x) for key, x in part.named.items()}
        if part.function.startswith(_METHODS):
            return self._fx.call_method(part.function.removeprefix(_METHODS),
                                        arguments, named)
        function = find(part.function)
        if function is operator.pow and not isinstance(arguments[0], fx.Node):
            # fx writes `-2 ** x`, which is -(2 ** x)
            function = torch.pow
        return self._fx.call_function(function, arguments, named)

    def _argument(self, node: Node, x: Any) -> Any:
        if isinstance(x, Slot):
            return self._output(*node.inputs[x.number])
        if isinstance(x, Call):
            return self._call(node, x)
        if type(x) in (tuple, list):
            return type(x)(self._argument(node, y) for y in x)
        return x


def find(name: str) -> Any:
    """What stands under the name of a part: ``torch.nn.Conv2d``."""
    module, _, own = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), own)
    except AttributeError as error:     # Conv0d, of a damaged kernel
        raise MissingOperator(f"there is no {name} for an operator of the "
                              "graph") from error
