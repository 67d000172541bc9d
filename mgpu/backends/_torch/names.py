"""Names and kinds of a torch module's arrays, as in Gluon."""
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mgpu.backends._torch.arithmetic import BATCH_NORMS
from mgpu.backends.network import STATISTICS

NORMS = (*BATCH_NORMS, nn.modules.instancenorm._InstanceNorm, nn.LayerNorm,
         nn.GroupNorm)
_GLUON = {"weight": "gamma", "bias": "beta"}     # of norms
# Names of weights and biases that torch's layers initialize randomly.
_DRAWN = re.compile(r"(weight|bias)(_[ih][hr](_l\d+(_reverse)?)?)?"
                    r"|(in|out|[qkv])_proj_(weight|bias)|bias_[kv]")


def joined(path: str, name: str) -> str:
    """The full name of the attribute `name` of the module at `path`."""
    return f"{path}.{name}" if path else name


def suffix_of(module: nn.Module, name: str) -> str:
    """The last part of a parameter's name in Gluon: gamma for the weight of a
    norm layer, unless it has another array of that name."""
    gluon = _GLUON.get(name, name) if isinstance(module, NORMS) else name
    return name if gluon in module._parameters or gluon in module._buffers \
        else gluon


class Entry(NamedTuple):
    """A parameter or buffer of a network, at its first position."""

    path: str
    module: nn.Module
    key: str            # name in the module
    tensor: torch.Tensor
    table: str          # of the module: "_parameters" or "_buffers"

    @property
    def own_name(self) -> str:
        """Name in `state_dict`."""
        return joined(self.path, self.key)

    @property
    def name(self) -> str:
        """Name in mgpu."""
        return joined(self.path, suffix_of(self.module, self.key))


def kind_of(entry: Entry) -> str:
    """`Spec.kind` of an entry."""
    _, module, key, p, table = entry
    if table == "_buffers":
        return key if isinstance(module, NORMS) and key in STATISTICS \
            else "other"
    if isinstance(module, NORMS) and key in _GLUON:
        return _GLUON[key]
    if not _DRAWN.fullmatch(key) or isinstance(module, nn.RMSNorm):
        return "unknown"
    if "bias" in key:
        return "bias"
    # A vector of weights is a scale; that of a PReLU has an initializer.
    scale = not is_lazy(p) and p.dim() < 2 and not isinstance(module,
                                                              nn.PReLU)
    return "unknown" if scale else "weight"


def parameters_of(net: nn.Module, table: str = "_parameters"
                  ) -> Iterator[Entry]:
    """The parameters (or buffers) of a network, each once."""
    seen = set()
    for path, module in net.named_modules():
        for key, tensor in getattr(module, table).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield Entry(path, module, key, tensor, table)


def entries_of(net: nn.Module) -> list[Entry]:
    """The parameters, then the buffers, of a network."""
    return [*parameters_of(net), *parameters_of(net, "_buffers")]


def arrays_of(net: nn.Module) -> list[torch.Tensor]:
    """The tensors of `entries_of`."""
    return [entry.tensor for entry in entries_of(net)]
