"""Names and kinds of a torch module's arrays, in Gluon's terms."""
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mgpu.backends._torch.arithmetic import BATCH_NORMS

NORMS = (*BATCH_NORMS, nn.modules.instancenorm._InstanceNorm, nn.LayerNorm,
         nn.GroupNorm)
_GLUON = {"weight": "gamma", "bias": "beta"}     # of norms
# What torch's layers call the weights and biases that they draw.
_DRAWN = re.compile(r"(weight|bias)(_[ih][hr](_l\d+(_reverse)?)?)?"
                    r"|(in|out|[qkv])_proj_(weight|bias)|bias_[kv]")


def joined(path: str, name: str) -> str:
    """The full name of what a module at `path` calls `name`."""
    return f"{path}.{name}" if path else name


def suffix_of(module: nn.Module, name: str) -> str:
    """A parameter's own name, in Gluon's terms: a norm's weight is gamma,
    but where the user has another parameter or buffer of that name."""
    gluon = _GLUON.get(name, name) if isinstance(module, NORMS) else name
    return name if gluon in module._parameters or gluon in module._buffers \
        else gluon


def kind_of(module: nn.Module, name: str, p: torch.Tensor) -> str:
    """`Spec.kind` of the parameter `p`, which `module` calls `name`."""
    if isinstance(module, NORMS) and name in _GLUON:
        return _GLUON[name]
    if not _DRAWN.fullmatch(name) or isinstance(module, nn.RMSNorm):
        return "unknown"
    if "bias" in name:
        return "bias"
    # A vector of weights scales a layer; a PReLU's has a rule of its own.
    scale = not is_lazy(p) and p.dim() < 2 and not isinstance(module,
                                                              nn.PReLU)
    return "unknown" if scale else "weight"


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
