"""Semantics of a pass: the framework's own, and Gluon's, for `Replicas`.

Only the copies of modules in a pass are changed, not the user's modules.
"""
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from mgpu.backends import messages
from mgpu.backends._torch import strict
from mgpu.backends._torch.arithmetic import (BATCH_NORMS, DROPOUTS,
                                             INSTANCE_NORMS,
                                             NoFunctionalBatchNorm,
                                             batch_norm_forward,
                                             computes_itself,
                                             dropout_forward,
                                             gluon_batch_norm, masked_forward,
                                             takes_masks)
from mgpu.backends._torch.boundary import Runner
from mgpu.backends._torch.compiled import (TICKET, Compiled, Ticket,
                                           define_mask)
from mgpu.backends._torch.float32 import AsMXNet
from mgpu.backends._torch.graph import recomputing
from mgpu.backends._torch.layers import Between, in_place_of, is_open
from mgpu.backends._torch.modes import saving
from mgpu.backends._torch.ops import dtype_of
from mgpu.backends._torch.streams import standing_in, take_turn, watched
from mgpu.backends._torch.tree import Tree
from mgpu.backends.network import Options
from mgpu.backends.probing import LayerCallback

if TYPE_CHECKING:
    from mgpu.backends._torch.network import TorchNetwork


class Plan(NamedTuple):
    """Options of a pass.

    Attributes
    ----------
    mode : object
        Passes of the same mode draw the same random numbers.
    together : Runner, optional
        Runs devices that wait for each other.
    dresses : bool
        Whether `Meaning.dress` has effects.
    compiles : bool
        Whether compiled code runs.
    own_statistics : bool
        Whether each device has its own running statistics.
    """

    mode: Any = None
    together: Runner | None = None
    dresses: bool = False
    compiles: bool = False
    own_statistics: bool = False


class Meaning:
    """Semantics of a pass. This base class has those of the framework."""

    def begin(self, active: Sequence[int], tree: Tree) -> Plan:
        """Begin a pass of these devices."""
        return Plan()

    def dress(self, i: int, net: nn.Module, layers: Sequence[nn.Module]
              ) -> None:
        """Modify the copy of device `i` before its pass. `layers`: the copies
        of the network's modules, in order."""

    def call(self, i: int, net: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call ``net(*args, **kwargs)``, in the thread of device `i`."""
        return net(*args, **kwargs)

    def turn(self, i: int) -> contextlib.AbstractContextManager[
            Callable[[], bool]]:
        """Context manager for device `i` while no other device runs. Returns
        a function that reports whether it has drawn random numbers."""
        return watched()

    def probing(self, i: int) -> contextlib.AbstractContextManager[Any]:
        """Context manager for a pass of device `i` without side effects."""
        return contextlib.nullcontext()

    def allocated(self, i: int, arrays: Sequence[torch.Tensor]) -> None:
        """Report new `arrays` on device `i`."""


class GluonMeaning(Meaning):
    """Gluon's semantics: layers train inside `record` and predict outside,
    batch norm and dropout are Gluon's. Layers may be observed.

    Parameters
    ----------
    network : TorchNetwork
    devices : sequence of Device
    """

    def __init__(self, network: "TorchNetwork", devices: Sequence[Any]
                 ) -> None:
        self._network, self._devices = network, list(devices)
        self._training = False      # mode of the current pass
        self._switches = False      # whether the network has another mode
        self._paths: list[str] = []
        #: indices of the layers that `_forward` may replace
        self._replaced: list[int] = []
        #: key of the plan, and whether layers train or modes change
        self._planned: tuple[Any, bool] = None, False
        self._changed = False
        self._between: dict[int, Between] = {}
        self._passes: dict[int, _BackwardContext] = {}
        self._compiled = Compiled(network.backend.threads)
        self._tickets = [Ticket(partial(network.backend.generator, device))
                         for device in devices]
        self._probing = self._refreshed = False
        #: key of the compiled pass; None: layers run one by one
        self._key: Any = None

    def begin(self, active: Sequence[int], tree: Tree) -> Plan:
        network = self._network
        training = network.backend.is_training()
        if self._planned != (weakref.ref(tree), training):
            self._plan(tree, training)
        self._between, self._passes = {}, {}
        self._key, self._refreshed = None, False
        if network.options.hybridize and not network.by_layer \
                and not strict.on():
            define_mask()
            self._key = (*network.net.modules(), tree.key, training,
                         network.own_arithmetic, *(
                hook for m in network.net.modules() for table in (
                    m._forward_hooks, m._forward_pre_hooks)
                for hook in table.values()))
        compiles = self._key is not None
        return Plan(
            training, network.runner, self._changed or compiles
            or network.seen is not None, compiles, training
            and network.backend.is_recording() and network.normalize is None)

    def _plan(self, tree: Tree, training: bool) -> None:
        self._training, self._paths = training, tree.paths
        layers = tree.modules[:len(tree.paths)]
        # A layer in eval mode in a training network is frozen.
        self._switches = layers[0].training != training
        if not training and not self._switches:
            _check_predicting(self._network.net)
        self._replaced = [
            n for n, layer in enumerate(layers)
            if isinstance(layer, BATCH_NORMS) or takes_masks(layer)]
        self._changed = self._switches or any(
            layers[n].training for n in self._replaced)
        self._planned = weakref.ref(tree), training

    @contextlib.contextmanager
    def probing(self, i: int) -> Iterator[None]:
        generator = self._network.backend.generator(self._devices[i])
        state, before = generator.get_state(), self._key
        self._probing, self._key = True, None
        try:
            yield
        finally:
            self._probing, self._key = False, before
            generator.set_state(state)

    def allocated(self, i: int, arrays: Sequence[torch.Tensor]) -> None:
        strict.place(arrays, self._devices[i])

    def dress(self, i: int, net: nn.Module, layers: Sequence[nn.Module]
              ) -> None:
        network = self._network
        if self._switches:
            net.train(self._training)
        here = self._passes[i] = _BackwardContext(network, self._devices[i])
        if network.seen is not None and not self._probing:
            between = self._between[i] = Between(network.seen, i,
                                                 network.functions)
            for path, layer in innermost(net):
                for table in ("_forward_pre_hooks", "_forward_hooks"):
                    vars(layer)[table] = vars(layer)[table].copy()
                watch_layer(layer, path, i, between, network.seen)
        for n in self._replaced:
            layer = layers[n]
            forward = self._forward(net, layer, self._paths[n], i, here) \
                if layer.training and "forward" not in vars(layer) else None
            if forward is not None:
                vars(layer)["forward"] = forward
        if self._key is not None and not self._refreshed:
            self._refreshed = True
            self._compiled.refresh(self._key, net)

    def _forward(self, net: nn.Module, layer: nn.Module, path: str, i: int,
                 here: "_BackwardContext") -> Callable[..., Any] | None:
        """The forward that replaces that of a training layer, or None."""
        network = self._network
        if isinstance(layer, BATCH_NORMS):
            rule = network.normalize or (
                None if network.own_arithmetic or layer.running_mean is None
                else gluon_batch_norm)
            if rule is None or computes_itself(layer):
                return None
            return batch_norm_forward(layer, path, rule, i,
                                      here.keeps_statistics)
        if network.draw_mask is not None and takes_masks(layer) \
                and not self._probing:
            return masked_forward(layer, network.draw_mask, i,
                                  partial(here.generator, path), here.masks)
        if type(layer) in DROPOUTS:
            return dropout_forward(layer, partial(here.generator, path),
                                   lambda: vars(net)["_buffers"][TICKET])
        return None

    def call(self, i: int, net: nn.Module, args: Any, kwargs: Any) -> Any:
        network = self._network
        options = network.options
        network.backend.check_inputs((*args, *kwargs.values()),
                                     self._devices[i])
        if options.channels_last:
            args = tuple(map(channels_last, args))
            kwargs = {name: channels_last(x) for name, x in kwargs.items()}
        with contextlib.ExitStack() as stack:
            for block in self._around(i):
                stack.enter_context(block)
            if i in self._passes:
                self._passes[i].begins()
            output = net(*args, **kwargs) if self._key is None \
                else self._compiled(self._key, self._tickets[i], net, args,
                                    kwargs)
        return output if options.autocast is None \
            else widened(options, output)

    def _around(self, i: int
                ) -> list[contextlib.AbstractContextManager[Any]]:
        network = self._network
        options = network.options
        blocks: list[contextlib.AbstractContextManager[Any]] = []
        if network.float32.names or network.float32.watched:
            blocks.append(AsMXNet(network.float32))
        if i in self._between and not self._probing:
            blocks.append(self._between[i])
        if network.normalize is not None:
            blocks.append(NoFunctionalBatchNorm())
        if options.autocast is not None:
            blocks.append(autocast(network.backend.handle(
                self._devices[i]), options))
        if torch.is_grad_enabled() and not network.backend.is_recording():
            blocks.append(torch.no_grad())
        return blocks

    def turn(self, i: int) -> contextlib.AbstractContextManager[
            Callable[[], bool]]:
        return standing_in(self._network.backend.generator(
            self._devices[i], "functional"))


class _BackwardContext:
    """State of a device's pass that a backward pass needs to recompute."""

    def __init__(self, network: "TorchNetwork", device: Any) -> None:
        self._network, self._device = network, device
        self.masks: dict[int, Any] = {}
        self._joint = network.normalize is not None
        #: states of the stream before a layer in a checkpoint draws
        self._streams: dict[str, list[torch.Tensor]] = {}
        self._state: Any = None

    def begins(self) -> None:
        self._state = saving(), torch.is_grad_enabled()

    def generator(self, path: str) -> torch.Generator | None:
        """The stream of a dropout layer. None, torch's default stream, inside
        a checkpoint, which restores that stream."""
        network = self._network
        if recomputing():
            return self._again(path) if self._joint else None
        stream = network.backend.generator(self._device)
        if not network.backend.is_recording() \
                or (saving(), torch.is_grad_enabled()) == self._state:
            return stream
        if self._joint:     # devices synchronize, so they cannot take turns
            self._streams.setdefault(path, []).append(stream.get_state())
            return stream
        take_turn()
        return None

    def _again(self, path: str) -> torch.Generator:
        """The stream in the state of the forward pass of a layer."""
        found = self._streams.get(path, ())
        if len(found) != 1 or self._network.draw_mask is not None:
            raise messages.not_again()
        stream = torch.Generator(self._network.backend.handle(self._device))
        stream.set_state(found[0])
        return stream

    def keeps_statistics(self) -> bool:
        """Whether batch-norm layers update their running statistics."""
        return not recomputing() and self._network.backend.is_recording()


def _check_predicting(net: nn.Module) -> None:
    """Raise ValueError for norm layers in training mode in a prediction,
    whose outputs would depend on the split over devices."""
    found = [path for path, m in net.named_modules()
             if m.training and isinstance(m, (*BATCH_NORMS, *INSTANCE_NORMS))
             and m.running_mean is not None]
    if found:
        raise ValueError(
            "layers with running statistics must not be in training mode in "
            f"a prediction; received {found}, in a network in eval mode. Call "
            ".eval() on them; or call replicas.net itself, to update their "
            "statistics.")


# -- single layers ------------------------------------------------------------

def innermost(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Paths and layers without children, each once. Includes attention, which
    does not call its child."""
    inside: set[int] = set()
    for path, module in net.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            inside.update(map(id, module.children()))
        elif module._modules:
            continue
        if id(module) not in inside:
            yield path, module


def watch_layer(module: nn.Module, path: str, index: int, between: Between,
                seen: LayerCallback) -> list[Any]:
    """Call `seen` after each call of an innermost layer. Returns handles."""
    given: list[Any] = []
    closed = not is_open(module)

    def begins(_: Any, inputs: Any) -> None:
        between.inside = closed
        if getattr(module, "inplace", False):   # inputs are overwritten
            inputs = tree_map(_cloned, inputs)
        given[:] = [inputs]

    def ends(_: Any, inputs: Any, outputs: Any) -> Any:
        between.inside = False
        between.after = path
        put = None if recomputing() else seen(path, given[0], outputs, index)
        return None if put is None else in_place_of(outputs, put)
    return [module.register_forward_pre_hook(begins),
            module.register_forward_hook(ends)]


def _cloned(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def channels_last(x: Any) -> Any:
    """`x` with channels last in memory, if it is a 4-d tensor."""
    return x.contiguous(memory_format=torch.channels_last) \
        if isinstance(x, torch.Tensor) and x.dim() == 4 else x


def autocast(handle: torch.device, options: Options) -> Any:
    """Torch's autocast for `Options.autocast`."""
    # No cache of cast weights: usually a pass uses each weight once, and all
    # threads share the cache.
    return torch.autocast(handle.type, dtype_of(options.autocast),
                          cache_enabled=False)


def widened(options: Options, x: Any) -> Any:
    """Cast an output of autocast to float32, for sums and NumPy."""
    narrow = dtype_of(options.autocast)
    return tree_map(lambda t: t.float() if isinstance(t, torch.Tensor)
                    and t.dtype is narrow else t, x)
