"""Compiled networks: `torch.compile` with mgpu's threads and streams."""
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch
from torch.func import functional_call

from mgpu.backends._torch.arithmetic import draw_mask, mask_shape
from mgpu.backends._torch.openmp import threads

_numbers = itertools.count()
_by_number: "weakref.WeakValueDictionary[int, Any]" = \
    weakref.WeakValueDictionary()
#: buffer of a compiled network that identifies the device
TICKET = "mgpu_ticket"


class Ticket:
    """Represents a device in compiled code.

    Attributes
    ----------
    generator : callable
        Returns the random stream of the device.
    tensor : Tensor
        (number of the ticket, number of masks drawn by compiled code).
    """

    def __init__(self, generator: Callable[[], torch.Generator]) -> None:
        number = next(_numbers)
        self.generator, self.tensor = generator, torch.tensor([number, 0])
        _by_number[number] = self


# Held while a thread calls compiled code, or compiles it. While torch traces,
# calls of compiled functions in other threads raise; and its cache lookup is
# not thread-safe: concurrent calls would recompile.
_alone = threading.RLock()


@contextlib.contextmanager
def _options() -> Iterator[None]:
    """Context manager with the options of torch.compile."""
    from torch._dynamo import config as dynamo      # takes a second
    # Compile backward passes now, not when they first run, because compiling
    # sets torch's random state, which replicas share.
    with functorch.patch(force_non_lazy_backward_lowering=True), \
            dynamo.patch(skip_nnmodule_hook_guards=False):  # hooks may change
        yield


#: maximum number of input shapes (and other conditions) for which a pass is
#: compiled; for more, torch runs it layer by layer
_SHAPES = 32


class Compiled:
    """A network as one compiled function of parameters, buffers and inputs,
    whose graphs all devices share.

    Parameters
    ----------
    cores : int
        Number of CPU cores of the code.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        #: by modes of the modules: a copy of the network, and its function
        self._known: dict[Any, tuple[nn.Module, Callable[..., Any]]] = {}
        #: the network compiled last, and the tensors of its pass. It has no
        #: tensors: code compiled with a network's own tensors is not reused
        #: for others.
        self._first: tuple[nn.Module | None, dict[str, Any]] = None, {}

    def refresh(self, key: Any, net: nn.Module) -> None:
        """Set the attributes of the following passes to those of `net`, a
        copy with the modes of `key`."""
        if key not in self._known:
            self._first = net, _tensors(net)
            for module in net.modules():
                for table in ("_parameters", "_buffers"):
                    vars(module)[table] = {
                        name: x if x is None else _without_memory(x)
                        for name, x in vars(module)[table].items()}
            net.register_buffer(TICKET, torch.zeros(2, dtype=torch.int64))
            self._known[key] = net, self._compile(net)
            return
        for own, new in zip(self._known[key][0].modules(), net.modules(),
                            strict=True):
            vars(own).update({
                name: x for name, x in vars(new).items() if name not in (
                    "forward", "_parameters", "_buffers", "_modules")})

    def _compile(self, net: nn.Module) -> Callable[..., Any]:
        def run(tensors: dict[str, Any], args: Any, kwargs: Any) -> Any:
            return functional_call(net, tensors, args, kwargs,
                                   tie_weights=False)
        return torch.compile(
            run, dynamic=False, fullgraph=True, isolate_recompiles=True,
            recompile_limit=_SHAPES,
            # fallback_random: torch's own random streams
            options={"cpp.threads": self._cores, "fallback_random": True})

    def __call__(self, key: Any, ticket: Ticket, net: nn.Module, args: Any,
                 kwargs: Any) -> Any:
        """Call ``net(*args, **kwargs)`` for a copy `net`."""
        first, tensors = self._first
        if net is first:
            self._first = None, {}
        else:
            tensors = _tensors(net)
        tensors[TICKET] = ticket.tensor     # last for all devices
        with _alone, _options(), threads(self._cores):
            return self._known[key][1](tensors, args, kwargs)


def _tensors(net: nn.Module) -> dict[str, Any]:
    return {**dict(net.named_parameters(remove_duplicate=False)),
            **dict(net.named_buffers(remove_duplicate=False))}


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    empty = x.detach().to("meta")
    return nn.Parameter(empty, x.requires_grad) \
        if isinstance(x, nn.Parameter) else empty


@cache
def define_mask() -> None:
    """Define drawing a mask as an operation of the compiler.

    It writes to the ticket, so the compiler does not remove, repeat, reorder
    or merge it.
    """
    @torch.library.custom_op("mgpu::dropout_mask", mutates_args={"ticket"})
    def dropout_mask(x: torch.Tensor, leading: int, keep: float,
                     ticket: torch.Tensor) -> torch.Tensor:
        ticket[1] += 1
        return draw_mask(x, leading, keep,
                         _by_number[int(ticket[0])].generator())

    @dropout_mask.register_fake
    def _(x, leading, keep, ticket):
        return torch.empty(mask_shape(x, leading), dtype=x.dtype,
                           device=x.device)
