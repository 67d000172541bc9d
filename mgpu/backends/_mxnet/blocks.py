"""Names, kinds and values of a network's blocks and parameters."""
import contextlib
import copy
import json
import re
from collections.abc import Iterator
from typing import Any

from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.layers import all_stored, is_layer
from mgpu.backends.network import STATISTICS

_KINDS = ("weight", "bias", "gamma", "beta", *STATISTICS)


# Packages whose blocks have no state between calls. (Not gluon.rnn and
# gluon.contrib.)
_OWN = ("mxnet.gluon.nn.", "mxnet.gluon.model_zoo.", "mgpu.")


def is_known(block: Any) -> bool:
    """Whether `block` is of MXNet or mgpu, without state between calls."""
    return type(block).__module__.startswith(_OWN)


def kind_of(name: str, parameter: Any) -> str:
    kind = next((kind for kind in _KINDS if name.replace(
        "moving_", "running_").endswith(kind)), None)
    if kind is None and parameter.grad_req == "null":
        return "other"
    if kind in STATISTICS:
        return kind
    if parameter.init is not None:      # its own initializer
        return kind or "weight"
    # Gluon initializes all these as weights, including scales and shifts.
    matrix = kind == "weight" and len(shape_of(parameter) or (0, 0)) > 1
    return "weight" if matrix else "unknown"


def value_of(parameter: Any) -> Any:
    """The array on the first context, or None if uninitialized."""
    try:
        return all_stored(parameter)[0]
    except RuntimeError:        # not initialized, or deferred
        return None


def shape_of(parameter: Any) -> tuple[int, ...] | None:
    # A parameter loaded without a layer has only the shape of its array.
    value = value_of(parameter)
    shape = parameter.shape if value is None else value.shape
    # 0 (legacy shapes) and -1 (NumPy shapes) mean unknown.
    known = shape is not None and all(n > 0 for n in shape)
    return tuple(shape) if known else None


def own_init(parameter: Any) -> tuple[Any, dict[str, Any]] | None:
    """The layer's initializer as (name, options). For a user-defined class,
    also a registered one, an object instead of the name."""
    init = parameter.init
    if init is None:
        return None
    if isinstance(init, str):
        # An unknown name raises when it is used.
        with contextlib.suppress(AssertionError, ValueError):
            if is_users(made := mx.init.create(init)):
                return made, {}
        return init, {}
    if is_users(init):
        return init, {}
    # A copy, because dumps() of a Constant array changes the object.
    name, options = json.loads(copy.deepcopy(init).dumps())
    return name, options


def is_users(initializer: Any) -> bool:
    """Whether the class of `initializer` is user-defined."""
    return not type(initializer).__module__.startswith("mxnet.")


def named_blocks(block: Any, path: str = "", into_layers: bool = True
            ) -> Iterator[tuple[str, Any]]:
    """Yield (path, block) for `block` and all blocks in it."""
    yield path, block
    if into_layers or not is_layer(block):
        for name, child in block._children.items():
            yield from named_blocks(child, f"{path}.{name}" if path else name,
                               into_layers)


# -- parameters ---------------------------------------------------------------

def parameters_of(block: Any) -> list[Any]:
    """The parameters of `block`, without its children: attributes, then
    others in its ParameterDict."""
    return list({id(p): p for p in (*block._reg_params.values(),
                                    *block._params._params.values())}.values())


def named_parameters(net: Any) -> dict[str, Any]:
    """The parameters in ``net.collect_params()``, as for Gluon's Trainer, and
    in attributes of its blocks. Parameters that are not attributes (for
    example in a list) are named by the path of their block and Gluon's
    name."""
    found = net._collect_params_with_prefix()
    known, collected = set(map(id, found.values())), net.collect_params()
    held = [(path, block._prefix, p) for path, block in named_blocks(net)
            for p in block._params.values()]
    for path, prefix, p in held + [("", net._prefix, p)
                                   for p in collected.values()]:
        if id(p) in known or collected._params.get(p.name) is not p:
            continue
        known.add(id(p))
        # Of a block outside of this one: without its number, which grows with
        # every network that is created.
        short = p.name[len(prefix):] if p.name.startswith(prefix) \
            else re.sub(r"\d+_", "_", p.name, count=1)
        name = short = f"{path}.{short}".lstrip(".")
        number = 1
        while name in found:
            number += 1
            name = f"{short}_{number}"
        found[name] = p
    return found
