"""Names and kinds of a torch module's arrays, in Gluon's terms."""
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mgpu.backends._torch.arithmetic import BATCH_NORMS

NORMS = (*BATCH_NORMS, nn.modules.instancenorm._InstanceNorm, nn.LayerNorm,
         nn.GroupNorm)


def joined(path: str, name: str) -> str:
    """The full name of what a module at `path` calls `name`."""
    return f"{path}.{name}" if path else name


def suffix_of(module: nn.Module, name: str) -> str:
    """A parameter's own name, in Gluon's terms: a norm's weight is gamma."""
    if isinstance(module, NORMS):
        return {"weight": "gamma", "bias": "beta"}.get(name, name)
    return name


def kind_of(module: nn.Module, suffix: str) -> str:
    """`Spec.kind` of a parameter whose name ends in `suffix`."""
    if isinstance(module, NORMS) and suffix in (
            "gamma", "beta", "running_mean", "running_var"):
        return suffix
    return "bias" if "bias" in suffix else "weight"


def walk(net: nn.Module, which: str) -> Iterator[Any]:
    """Yield (path, module, own name, tensor), each tensor once."""
    seen = set()
    for path, module in net.named_modules():
        for name, tensor in getattr(module, which).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield path, module, name, tensor


def arrays_of(net: nn.Module) -> list[torch.Tensor]:
    """The parameters, then the buffers, each tensor once."""
    return [tensor for which in ("_parameters", "_buffers")
            for *_, tensor in walk(net, which)]
