"""Files of PyTorch, made of a network of `from_gluon`."""
import json
import struct
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mgpu.backends import messages
from mgpu.utils import environment
from mgpu.utils.files import FilePath, part_of


def to_safetensors(net: nn.Module, path: FilePath) -> None:
    """See `mgpu.to_safetensors`."""
    if not isinstance(net, nn.Module):
        raise messages.not_a_network(net, "torch", "torch.nn.Module")
    net = getattr(net, "_orig_mod", net)    # of torch.compile
    library: Any = environment.package("safetensors", "to_safetensors",
                                       "safetensors.torch")
    values: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    about = {"format": "pt"}
    # The same object under two names is one tensor: state_dict has two.
    own = {**dict(net.named_parameters(remove_duplicate=False)),
           **dict(net.named_buffers(remove_duplicate=False))}
    for name, x in net.state_dict().items():
        kept = first.setdefault(id(own.get(name, x)), name)
        if kept == name:
            values[name] = x.contiguous()
        else:
            about[name] = kept
    names = getattr(net, "gluon_names", None)
    if names is not None:
        about["gluon_names"] = json.dumps(names)
    # Its own save_file makes files that nobody else may read.
    with part_of(path) as part, open(part, "wb") as file:
        file.write(_in_order(library.torch.save(values, about), about))


def _in_order(data: bytes, about: dict[str, str]) -> bytes:
    """The same file, whose metadata are in one order: the library has another
    each time."""
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    text = json.dumps({**header, "__metadata__": about}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + length:]


def to_pt2(net: nn.Module, path: FilePath, examples: Sequence[np.ndarray]
           ) -> None:
    """See `mgpu.to_pt2`."""
    if not isinstance(net, nn.Module):
        raise messages.not_a_network(net, "torch", "torch.nn.Module")
    batch = torch.export.Dim("batch")
    training = net.training
    net.eval()
    try:
        with warnings.catch_warnings():
            # nn.LSTM assigns a list of its own weights as it runs
            warnings.filterwarnings("ignore", ".*_flat_weights")
            program = torch.export.export(
                net, tuple(map(torch.from_numpy, map(np.array, examples))),
                dynamic_shapes=tuple({0: batch} for _ in examples))
    except (RuntimeError, ValueError, TypeError) as error:
        line = next(filter(str.strip, str(error).splitlines()), "")
        shapes = ", ".join(str(x.shape) for x in examples)
        raise ValueError(
            "torch.export takes inputs of the shapes that the network was "
            "made for, and a network that is one graph for every size of the "
            f"batch; received {shapes} ({line.strip()[:200]}). Give examples "
            "of other shapes, or write source.") from error
    finally:
        net.train(training)
    with part_of(path) as part, open(part, "wb") as file:
        torch.export.save(program, file)
