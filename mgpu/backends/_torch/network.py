"""A user's `torch.nn.Module` on several devices, with Gluon's meaning.

Nothing of the user's module is changed for good: training flags, and the
forward functions of batch-norm and dropout layers, are set for the duration
of a replica's call and put back.
"""
import contextlib
import copy
import inspect
import itertools
import threading
import weakref
from functools import lru_cache, partial
from typing import (Any, Callable, Dict, Iterator, List, Optional, Sequence,
                    Set, Tuple)

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from mgpu.backends import base
from mgpu.backends._torch import strict
from mgpu.backends._torch.layers import describe
from mgpu.backends._torch.ops import dtype_of

_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_NORMS = (*_BATCH_NORMS, nn.modules.instancenorm._InstanceNorm, nn.LayerNorm,
          nn.GroupNorm)
_DROPOUTS = {nn.Dropout: 0, nn.Dropout1d: 2, nn.Dropout2d: 2,
             nn.Dropout3d: 2}   # leading axes of the mask; 0: all of them


def gluon_batch_norm(call: base.BatchNormCall, index: int = 0) -> Any:
    """A training pass as Gluon on CPU computes it: normalised with the
    batch's biased variance, and that same variance kept (torch keeps the
    unbiased one). framework-independent source: MXNet's batch_norm.cc."""
    x, count = call.x, call.x.numel() // call.x.shape[1]
    running_mean, running_var = call.running_mean, call.running_var
    # Gluon: no backward pass, no update. With a momentum of 1 statistics stay;
    # rounding must not wear them away.
    keep = torch.is_grad_enabled() and call.momentum != 1
    # torch adds (1 - momentum) times the unbiased variance, which is `factor`
    # times the biased one: to a variance that has the same factor. Few
    # operations, as each of them is host time of every layer.
    factor = count / (count - 1) if count > 1 else 1.0
    by_torch = keep and count > 1   # else it divides by 0
    scaled = running_var * factor if by_torch else None
    y = torch.batch_norm(x, call.gamma, call.beta,
                         running_mean if by_torch else None, scaled, True,
                         1 - call.momentum, call.epsilon,
                         torch.backends.cudnn.enabled)
    if keep:
        with torch.no_grad():
            if by_torch:
                torch.mul(scaled, 1 / factor, out=running_var)
            else:       # one value of each channel: its mean; variance 0
                running_mean.mul_(call.momentum).add_(
                    x.reshape(-1).to(running_mean.dtype),
                    alpha=1 - call.momentum)
                running_var.mul_(call.momentum)
    return y


def batch_norm_call(layer: nn.Module, x: Any, path: str
                    ) -> base.BatchNormCall:
    """A training call of `layer` in Gluon's terms; the call is counted."""
    # dtype float32, as MXNet stores the momentum of a layer
    momentum = float(np.float32(1 - layer.momentum)) \
        if layer.momentum is not None \
        else 1 - 1 / (int(layer.num_batches_tracked or 0) + 1)
    if torch.is_grad_enabled() and layer.running_mean is not None:
        layer.num_batches_tracked.add_(1)
    return base.BatchNormCall(
        x, layer.weight, layer.bias, layer.running_mean, layer.running_var,
        layer.eps, momentum, 1, path)


def _batch_norm_forward(layer: nn.Module, path: str,
                        rule: base.BatchNormRule, index: int
                        ) -> Callable[[Any], Any]:
    def forward(x: Any) -> Any:
        return rule(batch_norm_call(layer, x, path), index)
    return forward


def _mask_shape(x: Any, leading: int) -> Any:
    return x.shape if not leading else \
        x.shape[:leading] + (1,) * (x.dim() - leading)


def _draw_mask(x: Any, leading: int, keep: float, replica: "TorchReplica"
               ) -> Any:
    mask = torch.empty(_mask_shape(x, leading), dtype=x.dtype,
                       device=x.device)
    return mask.bernoulli_(keep, generator=replica.generator())


def _dropout_forward(layer: nn.Module, replica: "TorchReplica"
                     ) -> Callable[[Any], Any]:
    leading, ticket = _DROPOUTS[type(layer)], replica.ticket

    def forward(x: Any) -> Any:
        keep = 1 - layer.p
        if torch.compiler.is_dynamo_compiling():
            mask = torch.ops.mgpu.dropout_mask(x.detach(), leading, keep,
                                                ticket)
        else:
            mask = _draw_mask(x, leading, keep, replica)
        return x * mask.div_(keep) if keep else x * mask
    return forward


def _masked_forward(layer: nn.Module, rule: base.DropoutRule, index: int
                    ) -> Callable[[Any], Any]:
    leading = _DROPOUTS[type(layer)]

    def forward(x: Any) -> Any:
        axes = tuple(range(leading, x.dim())) if leading else ()
        return x * rule(x, layer.p, axes, index)
    return forward


class TorchReplica(base.Replica):
    """One module on one device.

    Attributes
    ----------
    module : torch.nn.Module
        An ordinary module: its parameters, hooks and attributes are its own.
    ticket : torch.Tensor
        Stands for this replica in compiled code: (its number, the masks
        that compiled code has drawn).
    """

    def __init__(self, network: "TorchNetwork", module: nn.Module, device,
                 index: int):
        self.module, self.device, self.index = module, device, index
        self._network = network
        self._handle = network.backend.handle(device)
        self._modules = list(module.modules())
        strict.place(_arrays_of(module), device)
        self._owners = [(getattr(m, which), name)
                        for which in ("_parameters", "_buffers")
                        for _, m, name, _ in _walk(module, which)]
        self._batch_norms = [
            (path, m) for path, m in module.named_modules()
            if isinstance(m, _BATCH_NORMS)]
        number = next(_numbers)
        _by_number[number] = self
        self.ticket = torch.tensor([number, 0])
        if any(type(m) in _DROPOUTS for m in self._modules):
            _define_mask()      # the user may have compiled the network
        # The same functions in every call: compiled code asks whether they
        # are the ones that it was made from.
        self._dropouts = [(m, _dropout_forward(m, self))
                          for m in self._modules if type(m) in _DROPOUTS]
        # One that keeps no statistics: torch's own will do.
        self._own = self._dropouts + [
            (m, _batch_norm_forward(m, path, gluon_batch_norm, index))
            for path, m in self._batch_norms if m.running_mean is not None]
        #: by training flag: the compiled network
        self._compiled: Dict[bool, Callable[..., Any]] = {}
        self._known: Set[Any] = set()       # calls that compile nothing
        #: draws from torch's default stream (functional dropout, attention
        #: or recurrent dropout); None: not known before it has trained once
        self._draws: Optional[bool] = None

    def array(self, number: int) -> Any:
        # Looked up, not kept: a user may put another tensor in its place.
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
            inputs = tuple(map(_channels_last, inputs))
        wrong = [(m, m.training) for m in self._modules
                 if m.training is not training]
        patched: List[nn.Module] = []
        try:
            for module, _ in wrong:
                _set_training(module, training)
            for layer, forward in self._forwards() if training else ():
                if "forward" not in layer.__dict__:
                    patched.append(layer)
                    layer.__dict__["forward"] = forward
            in_turn = training and self._draws is not False \
                and network.rule is None    # those that meet cannot wait
            if not in_turn and options.autocast is None \
                    and recording is torch.is_grad_enabled():
                return self._run(inputs, training)
            with contextlib.ExitStack() as stack:
                if in_turn:
                    stack.enter_context(self._in_turn())
                if options.autocast is not None:
                    stack.enter_context(_autocast(self._handle, options))
                stack.enter_context(torch.set_grad_enabled(recording))
                result = self._run(inputs, training)
                return result if options.autocast is None else tree_map(
                    partial(_widened, dtype_of(options.autocast)), result)
        finally:
            for layer in patched:
                del layer.__dict__["forward"]
            for module, flag in wrong:
                _set_training(module, flag)

    def _forwards(self) -> Sequence[Tuple[nn.Module, Callable[..., Any]]]:
        """Layers that compute by our functions in training."""
        network = self._network
        rule, dropout = network.rule, network.dropout_rule
        if rule is None and dropout is None:
            return self._dropouts if network.native else self._own
        found = list(self._dropouts) if dropout is None else [
            (m, _masked_forward(m, dropout, self.index))
            for m, _ in self._dropouts]
        for path, m in self._batch_norms:
            if rule is not None or not (network.native
                                        or m.running_mean is None):
                found.append((m, _batch_norm_forward(
                    m, path, rule or gluon_batch_norm, self.index)))
        return found

    def _run(self, inputs: Tuple[Any, ...], training: bool) -> Any:
        network = self._network
        # Compiled code shows nobody its layers.
        if not network.options.hybridize or network.by_layer or strict.on():
            return self.module(*inputs)
        call = training, torch.is_grad_enabled(), network.native, tuple(
            (x.shape, x.stride(), x.dtype, x.requires_grad)
            if isinstance(x, torch.Tensor) else repr(x)
            for x in tree_leaves(inputs))
        with _compiling(alone=call not in self._known), \
                _threads(network.backend.threads):
            if training not in self._compiled:
                self._compiled[training] = _compile(
                    self.module, network.backend.threads)
            result = self._compiled[training](*inputs)
        self._known.add(call)
        return result

    def forget(self) -> None:
        """What has been compiled may have to be compiled again."""
        self._known.clear()

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """One replica at a time, with this device's random stream in the
        place of torch's default one, which all threads share."""
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


_turn = threading.Lock()
_numbers = itertools.count()
_by_number: "weakref.WeakValueDictionary[int, TorchReplica]" = \
    weakref.WeakValueDictionary()


def _set_training(module: nn.Module, training: bool) -> None:
    # not module.train(), which a user may have overridden, nor setattr,
    # which looks for parameters and buffers of that name first
    if "training" in module.__dict__:
        module.__dict__["training"] = training
    else:       # a ScriptModule keeps it elsewhere
        module.training = training


def _channels_last(x: Any) -> Any:
    return x.contiguous(memory_format=torch.channels_last) \
        if isinstance(x, torch.Tensor) and x.dim() == 4 else x


def _autocast(handle: torch.device, options: base.Options
              ) -> contextlib.AbstractContextManager[None]:
    # A pass uses each weight once, as a rule; the cache of cast weights is
    # one for all threads.
    return torch.autocast(handle.type, dtype_of(options.autocast),
                          cache_enabled=False)


def _widened(narrow: torch.dtype, x: Any) -> Any:
    # What a network gives may be added up, or read by NumPy.
    return x.float() if isinstance(x, torch.Tensor) and x.dtype is narrow \
        else x


# -- compiled networks --------------------------------------------------------

class _Compiling:
    """Compiled networks run at the same time; one that may have to be
    compiled runs alone. While torch traces, calls of compiled functions in
    other threads are errors to it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running, self._alone = 0, False

    @contextlib.contextmanager
    def __call__(self, alone: bool) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not (
                alone and self._running))
            self._running += 1
            self._alone = alone
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._alone = False
                self._changed.notify_all()


_compiling = _Compiling()


@contextlib.contextmanager
def _threads(wanted: int) -> Iterator[None]:
    """Cores for this thread, which may be the user's own: compiled code is
    made for a number of them."""
    before = torch.get_num_threads()
    if before != wanted:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if before != wanted:
            torch.set_num_threads(before)


#: shapes of inputs (and other conditions) of one replica, training or
#: predicting, that are compiled; after these torch runs layer by layer
_SHAPES = 32


def _compile(module: nn.Module, threads: int) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        return module(*inputs)
    # Replicas share their source code, on which torch counts compilations.
    return torch.compile(
        run, dynamic=False, isolate_recompiles=True, recompile_limit=_SHAPES,
        # torch's own random streams, which `_in_turn` looks after
        options={"cpp.threads": threads, "fallback_random": True})


@lru_cache(maxsize=None)
def _define_mask() -> None:
    """Make the drawing of a mask one operation to the compiler. That it
    writes to the ticket keeps it from being left out, done twice, put in
    another order or made one with another."""
    @torch.library.custom_op("mgpu::dropout_mask", mutates_args={"ticket"})
    def dropout_mask(x: torch.Tensor, leading: int, keep: float,
                     ticket: torch.Tensor) -> torch.Tensor:
        ticket[1] += 1
        return _draw_mask(x, leading, keep, _by_number[int(ticket[0])])

    @dropout_mask.register_fake
    def _(x, leading, keep, ticket):
        return torch.empty(_mask_shape(x, leading), dtype=x.dtype,
                           device=x.device)


def _check_compiler(devices: Sequence[Any]) -> None:
    """RuntimeError where torch cannot compile."""
    if "isolate_recompiles" not in inspect.signature(
            torch.compile).parameters:
        raise RuntimeError(
            "hybridize=True needs a torch whose torch.compile has "
            f"isolate_recompiles; received {torch.__version__}. Upgrade "
            "torch, or use hybridize=False.")
    if any(device.kind == "gpu" for device in devices):
        from torch.utils._triton import has_triton
        if not has_triton():
            raise RuntimeError(
                "hybridize=True on a GPU needs the compiler Triton; found "
                "none that works. Install triton, or use hybridize=False.")
    if any(device.kind == "cpu" for device in devices):
        from torch._inductor.cpp_builder import get_cpp_compiler
        try:
            get_cpp_compiler()
        except Exception as error:
            raise RuntimeError(
                "hybridize=True on a CPU needs a C++ compiler; found none "
                "that works. Install g++, set the environment variable CXX "
                "to one before the program starts, or use "
                "hybridize=False.") from error


def _suffix(module: nn.Module, name: str) -> str:
    """A parameter's own name, in Gluon's words."""
    if isinstance(module, _NORMS):
        return {"weight": "gamma", "bias": "beta"}.get(name, name)
    return name


def _kind(module: nn.Module, suffix: str) -> str:
    if isinstance(module, _NORMS) and suffix in (
            "gamma", "beta", "running_mean", "running_var"):
        return suffix
    return "bias" if "bias" in suffix else "weight"


def _walk(net: nn.Module, which: str) -> Iterator[Any]:
    """(path, module, own name, tensor), each tensor once."""
    seen = set()
    for path, module in net.named_modules():
        for name, tensor in getattr(module, which).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield path, module, name, tensor


def _arrays_of(net: nn.Module) -> List[torch.Tensor]:
    return [tensor for which in ("_parameters", "_buffers")
            for *_, tensor in _walk(net, which)]


class TorchNetwork(base.Network):
    def __init__(self, backend: Any, net: nn.Module):
        self.backend, self.net = backend, net
        self.rule: Optional[base.BatchNormRule] = None
        self.dropout_rule: Optional[base.DropoutRule] = None
        self.options = base.Options()
        self._watchers = 0
        self._replicas: List[TorchReplica] = []

    def specs(self) -> List[base.Spec]:
        found = []
        for path, module, name, p in _walk(self.net, "_parameters"):
            suffix = _suffix(module, name)
            own = ("constant", {"value": 0.25}) \
                if isinstance(module, nn.PReLU) else None
            found.append(base.Spec(
                ".".join(filter(None, (path, suffix))),
                _kind(module, suffix), None if is_lazy(p) else tuple(p.shape),
                str(p.dtype).replace("torch.", ""),
                self.backend.grad_req(p), own))
        for path, module, name, b in _walk(self.net, "_buffers"):
            kind = name if isinstance(module, _NORMS) and name in (
                "running_mean", "running_var") else "other"
            found.append(base.Spec(
                ".".join(filter(None, (path, name))), kind,
                None if is_lazy(b) else tuple(b.shape),
                str(b.dtype).replace("torch.", ""), "null"))
        return found

    def grad_req(self, number: int) -> str:
        if not self._replicas:
            return self.specs()[number].grad_req
        return self.backend.grad_req(self._replicas[0].array(number))

    def set_grad_req(self, number, grad_req, arrays) -> None:
        for x in arrays:
            self.backend.attach_grad(x, grad_req)
        for replica in self._replicas:
            replica.forget()

    def devices(self) -> List[Any]:
        arrays = _arrays_of(self.net)
        return [arrays[0].device if arrays else torch.device("cpu")]

    def predictors(self, devices) -> List[Callable[..., Any]]:
        here = [self.backend.handle(d) for d in devices] == self.devices()
        # Flags are set on a module while it runs: threads need copies.
        return [TorchReplica(
            self, self.net if here else copy.deepcopy(self.net).to(
                self.backend.handle(device)), device, i)
            for i, device in enumerate(devices)]

    def cast(self, dtype: str) -> None:
        self.net.to(dtype_of(dtype))

    def infer_shapes(self, inputs, device) -> None:
        self.net.to(self.backend.handle(device))
        flags = {m: m.training for m in self.net.modules()}
        try:
            self.net.eval()
            with torch.no_grad():
                self.net(*inputs)
        finally:
            for module, flag in flags.items():
                module.training = flag

    def values(self) -> Optional[Dict[str, np.ndarray]]:
        specs = self.specs()
        if any(spec.shape is None for spec in specs):
            return None
        return {spec.name: self.backend.to_numpy(array)
                for spec, array in zip(specs, _arrays_of(self.net))}

    def prepare(self, options: base.Options, devices: Sequence[Any]) -> None:
        if options.hybridize:
            cumulative = [path for path, m in self.net.named_modules()
                          if isinstance(m, _BATCH_NORMS)
                          and m.momentum is None and m.track_running_stats]
            if cumulative:
                raise ValueError(
                    "hybridize=True needs batch-norm layers whose momentum "
                    "is a number; received momentum=None, whose factor is "
                    f"another one in every step, in {cumulative}. Give the "
                    "layers a momentum, or use hybridize=False.")
            _check_compiler(devices)
        self.options = options

    @property
    def by_layer(self) -> bool:
        """Somebody looks at single layers, or has rules for them."""
        return bool(self._watchers) or self.rule is not None \
            or self.dropout_rule is not None

    def autocast(self, devices: Sequence[Any]
                 ) -> contextlib.AbstractContextManager[None]:
        if self.options.autocast is None:
            return contextlib.nullcontext()
        return _autocast(self.backend.handle(devices[0]), self.options)

    def replicate(self, devices: Sequence[Any]) -> List[base.Replica]:
        requests = [spec.grad_req for spec in self.specs()]
        # Copied before the first one moves: a copy of a copy on another
        # card would cross the bus twice.
        copies = [self.net] + [copy.deepcopy(self.net) for _ in devices[1:]]
        replicas: List[base.Replica] = []
        for i, (module, device) in enumerate(zip(copies, devices)):
            module.to(self.backend.handle(device))
            if self.options.channels_last:
                for array in _arrays_of(module):
                    array.data = _channels_last(array.data)
            for array, request in zip(_arrays_of(module), requests):
                if request != "null":
                    self.backend.attach_grad(array, request)
            replicas.append(TorchReplica(self, module, device, i))
        self._replicas = replicas
        return list(replicas)

    def forward_backward(self, replicas, inputs, head, leaves) -> None:
        def loss(i: int) -> Any:
            return None if inputs[i] is None \
                else head(i, replicas[i](*inputs[i]))
        self.backend.forward_backward(
            [partial(loss, i) for i in range(len(inputs))], leaves)

    def layers(self) -> List[base.Layer]:
        names = {}
        for which in ("_parameters", "_buffers"):
            for path, module, own, tensor in _walk(self.net, which):
                suffix = _suffix(module, own)
                names[id(tensor)] = ".".join(filter(None, (path, suffix)))
        return [base.Layer(path, *describe(module), tuple(
                    names[id(x)] for which in ("_parameters", "_buffers")
                    for x in getattr(module, which).values()
                    if x is not None))
                for path, module in self.net.named_modules()
                if not module._modules]

    def aliases(self) -> Dict[str, List[str]]:
        found: Dict[int, List[str]] = {}
        for path, module in self.net.named_modules(remove_duplicate=False):
            for name, tensor in (*module._parameters.items(),
                                 *module._buffers.items()):
                if tensor is not None:
                    found.setdefault(id(tensor), []).append(".".join(
                        filter(None, (path, _suffix(module, name)))))
        return {names[0]: names for names in found.values()
                if len(names) > 1}

    @contextlib.contextmanager
    def watch(self, watch: base.Watch) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for replica in self._replicas:
                for path, module in replica.module.named_modules():
                    if not module._modules:
                        def told(_, inputs, outputs, path=path,
                                 index=replica.index):
                            watch(path, inputs, outputs, index)
                        handle = module.register_forward_hook(told)
                        stack.callback(handle.remove)
            self._watchers += 1
            try:
                yield
            finally:
                self._watchers -= 1

    @contextlib.contextmanager
    def dropout(self, rule: base.DropoutRule) -> Iterator[None]:
        before, self.dropout_rule = self.dropout_rule, rule
        try:
            yield
        finally:
            self.dropout_rule = before

    @contextlib.contextmanager
    def batch_norm(self, rule: Optional[base.BatchNormRule]
                   ) -> Iterator[None]:
        before, self.rule = self.rule, rule
        try:
            yield
        finally:
            self.rule = before
