"""`mgpu.DataParallel` of a torch module."""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import rnn

from mgpu.backends._torch import strict
from mgpu.backends._torch.boundary import Runner
from mgpu.backends._torch.copies import DeviceCopies
from mgpu.backends._torch.sync_batch_norm import Synchronized
from mgpu.backends.wrapper import Wrapper, delegate


class Arrays:
    """See `mgpu.data.examples.Arrays`."""

    @staticmethod
    def take(x: Any, axis: int, start: int, stop: int, device: torch.device
             ) -> Any:
        # A copy: slices of one tensor share the version counter.
        return x.narrow(axis, start, stop - start).to(device, copy=True)

    @staticmethod
    def to(x: Any, device: torch.device) -> Any:
        return x.to(device)

    @staticmethod
    def concat(arrays: Sequence[torch.Tensor], axis: int,
               device: torch.device) -> torch.Tensor:
        first = arrays[0].to(device)
        return torch.cat([first, *(strict.moved(x, first)
                                   for x in arrays[1:])], axis)

    @staticmethod
    def sequences(x: Any) -> list[Any] | None:
        return rnn.unpack_sequence(x) if isinstance(x, rnn.PackedSequence) \
            else None

    @staticmethod
    def packed(sequences: Sequence[Any], like: Any) -> Any:
        return rnn.pack_sequence(list(sequences),
                                 enforce_sorted=like.sorted_indices is None)

    @staticmethod
    def time_major(net: nn.Module) -> list[str]:
        return [path or type(m).__name__ for path, m in net.named_modules()
                if isinstance(m, nn.RNNBase) and not m.batch_first]


class DataParallel(Wrapper, nn.Module):
    """See `mgpu.training.data_parallel.DataParallel`.

    Parameters, buffers, modules and attributes are those of the network.
    """

    _copies: DeviceCopies
    _split: Any                             # a BatchSplit

    def __init__(self, net: nn.Module, devices: Sequence[torch.device],
                 run: Runner, split: Any,
                 remake: Callable[[nn.Module], Any],
                 synchronize: Any = None) -> None:
        modes = [(module, module.training) for module in net.modules()]
        self.__dict__["module"] = net
        super().__init__()      # sets `training` of the network
        for module, training in modes:
            module.training = training
        self.__dict__.update(
            {name: vars(net)[name] for name in (
                "_parameters", "_buffers", "_modules")},
            _copies=DeviceCopies(net, devices, run, synchronize and
                                 Synchronized(net, synchronize)),
            _split=split, _remake=remake)

    @torch.compiler.disable     # else compiled code runs on one device
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        copies, split = self._copies, self._split
        size = None if copies.takes_one_device() \
            else split.size(args, kwargs)
        devices = copies.devices[:size or 1]
        if len(devices) < 2:
            return self.module(*args, **kwargs)
        return split.run(
            args, kwargs, size, devices,
            (self.training, torch.is_grad_enabled()), copies.run,
            lambda call, n: copies.probe(call(), n),
            lambda: copies.alone(args, kwargs))

    # -- delegation to the network --------------------------------------------

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, value: bool) -> None:
        self.module.training = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)


#: hooks and torch's attributes for them; `training` is a property
_OWN = frozenset(nn.Module().__dict__) - {"_parameters", "_buffers",
                                          "_modules"}


# Methods that a subclass of nn.Module may override, as nn.RNN does `_apply`.
delegate(DataParallel, nn.Module, (
    "state_dict", "load_state_dict", "train", "apply", "_apply",
    "named_parameters", "named_buffers", "named_modules", "children",
    "named_children", "zero_grad", "requires_grad_", "register_buffer",
    "register_parameter", "add_module"))
