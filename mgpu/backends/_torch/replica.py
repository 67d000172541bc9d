"""One copy of a user's module, on one device, with Gluon's meaning.

The user's module is changed only during a call: training flags, and the
forward functions of batch-norm and dropout layers, are restored after it.
"""
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from mgpu.backends import base
from mgpu.backends._torch import strict
from mgpu.backends._torch.arithmetic import (BATCH_NORMS, DROPOUTS,
                                             batch_norm_forward,
                                             dropout_forward,
                                             gluon_batch_norm, masked_forward)
from mgpu.backends._torch.compiled import (compile_module, compiling,
                                           define_mask, threads, ticket_for)
from mgpu.backends._torch.names import arrays_of, walk
from mgpu.backends._torch.ops import dtype_of

if TYPE_CHECKING:
    from mgpu.backends._torch.network import TorchNetwork

# Held while a thread draws from torch's default stream, which all threads
# share.
_turn = threading.Lock()


class TorchReplica(base.Replica):
    """One module on one device.

    Attributes
    ----------
    module : torch.nn.Module
        The user's module or a copy of it, with parameters, hooks and
        attributes of its own.
    ticket : torch.Tensor
        Represents this replica in compiled code: see `ticket_for`.
    """

    def __init__(self, network: "TorchNetwork", module: nn.Module, device,
                 index: int):
        self.module, self.device, self.index = module, device, index
        self._network = network
        self._handle = network.backend.handle(device)
        self._layers = list(module.modules())
        strict.place(arrays_of(module), device)
        self._owners = [(getattr(m, which), name)
                        for which in ("_parameters", "_buffers")
                        for _, m, name, _ in walk(module, which)]
        self._batch_norms = [
            (path, m) for path, m in module.named_modules()
            if isinstance(m, BATCH_NORMS)]
        self.ticket = ticket_for(self)
        if any(type(m) in DROPOUTS for m in self._layers):
            define_mask()      # the user may have compiled the network
        # The same functions in every call: compiled code checks that they
        # are those it was made from.
        self._dropouts = [(m, dropout_forward(m, self.generator, self.ticket))
                          for m in self._layers if type(m) in DROPOUTS]
        # A layer without running statistics computes as torch does.
        self._own = self._dropouts + [
            (m, batch_norm_forward(m, path, gluon_batch_norm, index))
            for path, m in self._batch_norms if m.running_mean is not None]
        #: by training flag: the compiled network
        self._compiled: dict[bool, Callable[..., Any]] = {}
        self._known: set[Any] = set()       # calls that compile nothing
        #: whether it draws from torch's default stream (functional dropout,
        #: attention or recurrent dropout); None: it has not trained yet
        self._draws: bool | None = None

    def array(self, number: int) -> Any:
        # Looked up in every call: a user may replace the tensor.
        owner, name = self._owners[number]
        return owner[name]

    def generator(self) -> torch.Generator:
        """The stream of the masks of dropout layers."""
        return self._network.backend.generator(self.device)

    def __call__(self, *inputs: Any) -> Any:
        network = self._network
        backend, options = network.backend, network.options
        backend.check_inputs(inputs, self.device)
        training, recording = backend.is_training(), backend.is_recording()
        if options.channels_last:
            inputs = tuple(map(channels_last, inputs))
        wrong = [(m, m.training) for m in self._layers
                 if m.training is not training]
        patched: list[nn.Module] = []
        try:
            for module, _ in wrong:
                _set_training(module, training)
            for layer, forward in self._forwards() if training else ():
                if "forward" not in layer.__dict__:
                    patched.append(layer)
                    layer.__dict__["forward"] = forward
            in_turn = training and self._draws is not False \
                and network.normalise is None   # they wait for each other
            if not in_turn and options.autocast is None \
                    and recording is torch.is_grad_enabled():
                return self._run(inputs, training)
            with contextlib.ExitStack() as stack:
                if in_turn:
                    stack.enter_context(self._in_turn())
                if options.autocast is not None:
                    stack.enter_context(autocast(self._handle, options))
                stack.enter_context(torch.set_grad_enabled(recording))
                result = self._run(inputs, training)
                return result if options.autocast is None else tree_map(
                    partial(_widened, dtype_of(options.autocast)), result)
        except RuntimeError as error:
            network.explain(error, inputs)
            raise
        finally:
            for layer in patched:
                del layer.__dict__["forward"]
            for module, flag in wrong:
                _set_training(module, flag)

    def _forwards(self) -> Sequence[tuple[nn.Module, Callable[..., Any]]]:
        """The layers that compute by functions of mgpu in training."""
        network = self._network
        normalise, masks = network.normalise, network.draw_mask
        if normalise is None and masks is None:
            return self._dropouts if network.own_arithmetic else self._own
        found = list(self._dropouts) if masks is None else [
            (m, masked_forward(m, masks, self.index))
            for m, _ in self._dropouts]
        for path, m in self._batch_norms:
            if normalise is not None or not (network.own_arithmetic
                                        or m.running_mean is None):
                found.append((m, batch_norm_forward(
                    m, path, normalise or gluon_batch_norm, self.index)))
        return found

    def _run(self, inputs: tuple[Any, ...], training: bool) -> Any:
        network = self._network
        # The layers of compiled code cannot be reached.
        if not network.options.hybridize or network.by_layer or strict.on():
            return self.module(*inputs)
        call = (training, torch.is_grad_enabled(), network.own_arithmetic, *(
            (x.shape, x.stride(), x.dtype, x.requires_grad)
            if isinstance(x, torch.Tensor) else repr(x)
            for x in tree_leaves(inputs)))
        with compiling(exclusive=call not in self._known), \
                threads(network.backend.threads):
            if training not in self._compiled:
                self._compiled[training] = compile_module(
                    self.module, network.backend.threads)
            result = self._compiled[training](*inputs)
        self._known.add(call)
        return result

    def forget(self) -> None:
        """Expect that every kind of call may have to be compiled again."""
        self._known.clear()

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Inside the block, no other replica runs, and this device's random
        stream stands in for torch's default one, which all threads share."""
        handle = self._handle
        default = torch.default_generator if handle.type == "cpu" \
            else torch.cuda.default_generators[handle.index]
        own = self._network.backend.generator(self.device, "functional")
        with _turn:
            users, before = default.get_state(), own.get_state()
            default.set_state(before)
            try:
                yield
            finally:
                after = default.get_state()
                own.set_state(after)
                default.set_state(users)
                self._draws = bool(self._draws) \
                    or not torch.equal(before, after)


def _set_training(module: nn.Module, training: bool) -> None:
    # not module.train(), which a user may have overridden, nor setattr,
    # which looks for parameters and buffers of that name first
    if "training" in module.__dict__:
        module.__dict__["training"] = training
    else:       # a ScriptModule keeps it elsewhere
        module.training = training


def channels_last(x: Any) -> Any:
    """A 4-d tensor with its channels last in memory; else `x`."""
    return x.contiguous(memory_format=torch.channels_last) \
        if isinstance(x, torch.Tensor) and x.dim() == 4 else x


def autocast(handle: torch.device, options: base.Options) -> Any:
    """Torch's autocast of `Options.autocast`."""
    # No cache of cast weights: a pass uses each weight once, as a rule, and
    # all threads share the cache.
    return torch.autocast(handle.type, dtype_of(options.autocast),
                          cache_enabled=False)


def _widened(narrow: torch.dtype, x: Any) -> Any:
    # The outputs of a network may be summed, or read by NumPy.
    return x.float() if isinstance(x, torch.Tensor) and x.dtype is narrow \
        else x
