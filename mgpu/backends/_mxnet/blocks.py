"""The blocks and parameters of a network: their names, kinds and values."""
import contextlib
import copy
import json
import re
from collections.abc import Iterator
from typing import Any

from mgpu.backends import base
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.layers import all_stored, is_layer

_KINDS = ("weight", "bias", "gamma", "beta", *base.STATISTICS)


# Packages whose blocks keep nothing from one call to the next. (Not
# gluon.rnn and gluon.contrib.)
_OWN = ("mxnet.gluon.nn.", "mxnet.gluon.model_zoo.", "mgpu.")


def is_known(block: Any) -> bool:
    """Whether `block` is of MXNet or mgpu and keeps nothing between calls."""
    return type(block).__module__.startswith(_OWN)


def kind_of(name: str, parameter: Any) -> str:
    kind = next((kind for kind in _KINDS if name.replace(
        "moving_", "running_").endswith(kind)), None)
    if kind is None and parameter.grad_req == "null":
        return "other"
    if kind in base.STATISTICS:
        return kind
    if parameter.init is not None:      # a rule of its own
        return kind or "weight"
    # Gluon draws all these as weights, also what scales or shifts a layer.
    matrix = kind == "weight" and len(shape_of(parameter) or (0, 0)) > 1
    return "weight" if matrix else "unknown"


def value_of(parameter: Any) -> Any:
    """The array on the first context, or None before there is one."""
    try:
        return all_stored(parameter)[0]
    except RuntimeError:        # not initialized, or deferred
        return None


def shape_of(parameter: Any) -> tuple[int, ...] | None:
    # What was loaded without a layer's description has only its array's.
    value = value_of(parameter)
    shape = parameter.shape if value is None else value.shape
    # 0 (legacy shapes) and -1 (NumPy shapes) stand for unknown.
    known = shape is not None and all(n > 0 for n in shape)
    return tuple(shape) if known else None


def own_init(parameter: Any) -> tuple[Any, dict[str, Any]] | None:
    """The layer's own initializer as (name, options); an object of a user's
    class, also of a registered one that is named, in the place of the name."""
    init = parameter.init
    if init is None:
        return None
    if isinstance(init, str):
        # A name that nobody knows is refused where it is drawn by.
        with contextlib.suppress(AssertionError, ValueError):
            if is_users(made := mx.init.create(init)):
                return made, {}
        return init, {}
    if is_users(init):
        return init, {}
    # A copy: dumps() of a Constant array changes the object itself.
    name, options = json.loads(copy.deepcopy(init).dumps())
    return name, options


def is_users(initializer: Any) -> bool:
    """Whether it is of a class of the user's own."""
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
    """The parameters of `block` itself: its attributes, then those that it
    made or took in otherwise."""
    return list({id(p): p for p in (*block._reg_params.values(),
                                    *block._params._params.values())}.values())


def named_parameters(net: Any) -> dict[str, Any]:
    """What Gluon's own Trainer takes of `net`, ``net.collect_params()``, and
    the attributes of its blocks. Those that are no attribute (in a list, say)
    are called by the path of their block and Gluon's name in it."""
    found = net._collect_params_with_prefix()
    known, collected = set(map(id, found.values())), net.collect_params()
    held = [(path, block._prefix, p) for path, block in named_blocks(net)
            for p in block._params.values()]
    for path, prefix, p in held + [("", net._prefix, p)
                                   for p in collected.values()]:
        if id(p) in known or collected._params.get(p.name) is not p:
            continue
        known.add(id(p))
        # Of a block that is not in this one: without its number, which grows
        # with every network that is made.
        short = p.name[len(prefix):] if p.name.startswith(prefix) \
            else re.sub(r"\d+_", "_", p.name, count=1)
        name = short = f"{path}.{short}".lstrip(".")
        number = 1
        while name in found:
            number += 1
            name = f"{short}_{number}"
        found[name] = p
    return found
