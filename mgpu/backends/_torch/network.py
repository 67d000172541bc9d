"""A user's `torch.nn.Module` on several devices, with Gluon's meaning.

Nothing of the user's module is changed for good: training flags, and the
forward functions of batch-norm and dropout layers, are set for the duration
of a replica's call and put back.
"""
import contextlib
import copy
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

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
    x = call.x
    count = x.numel() // x.shape[1]
    # With momentum 1 torch hands out the statistics of this very batch.
    mean, var = (torch.zeros_like(call.running_mean) for _ in range(2))
    y = torch.batch_norm(x, call.gamma, call.beta, mean, var, True, 1.0,
                         call.epsilon, torch.backends.cudnn.enabled)
    if torch.is_grad_enabled():     # Gluon: no backward pass, no update
        with torch.no_grad():
            biased = var * ((count - 1) / count) if count > 1 \
                else torch.zeros_like(var)
            for running, value in ((call.running_mean, mean),
                                   (call.running_var, biased)):
                running.mul_(call.momentum).add_(value,
                                                 alpha=1 - call.momentum)
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


def _dropout_forward(layer: nn.Module, generator: torch.Generator
                     ) -> Callable[[Any], Any]:
    leading = _DROPOUTS[type(layer)]

    def forward(x: Any) -> Any:
        shape = x.shape if not leading else \
            x.shape[:leading] + (1,) * (x.dim() - leading)
        keep = 1 - layer.p
        mask = torch.empty(shape, dtype=x.dtype, device=x.device)
        mask.bernoulli_(keep, generator=generator)
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
    """

    def __init__(self, network: "TorchNetwork", module: nn.Module, device,
                 index: int):
        self.module, self.device, self.index = module, device, index
        self._network = network
        self._modules = list(module.modules())
        strict.place(_arrays_of(module), device)
        self._owners = [(getattr(m, which), name)
                        for which in ("_parameters", "_buffers")
                        for _, m, name, _ in _walk(module, which)]
        self._batch_norms = [
            (path, m) for path, m in module.named_modules()
            if isinstance(m, _BATCH_NORMS)]
        self._dropouts = [m for m in self._modules if type(m) in _DROPOUTS]
        #: draws from torch's default stream (functional dropout, attention
        #: or recurrent dropout); None: not known before it has trained once
        self._draws: Optional[bool] = None

    def array(self, number: int) -> Any:
        # Looked up, not kept: a user may put another tensor in its place.
        owner, name = self._owners[number]
        return owner[name]

    def __call__(self, *inputs: Any) -> Any:
        backend = self._network.backend
        backend.check_inputs(inputs, self.device)
        training = backend.is_training()
        flags = [m.training for m in self._modules]
        patched: List[nn.Module] = []
        try:
            for module in self._modules:
                # not module.train(): a user may have overridden it
                module.training = training
            if training:
                rule = self._network.rule or gluon_batch_norm
                for path, layer in self._batch_norms:
                    if self._network.rule is None and (
                            self._network.native
                            or layer.running_mean is None):
                        continue        # nothing to keep: torch's own will do
                    if "forward" not in layer.__dict__:
                        patched.append(layer)
                        layer.__dict__["forward"] = _batch_norm_forward(
                            layer, path, rule, self.index)
                for layer in self._dropouts:
                    patched.append(layer)
                    mask = self._network.dropout_rule
                    layer.__dict__["forward"] = _dropout_forward(
                        layer, backend.generator(self.device)) \
                        if mask is None else _masked_forward(
                            layer, mask, self.index)
            with self._default_stream(), \
                    torch.set_grad_enabled(backend.is_recording()):
                return self.module(*inputs)
        finally:
            for layer in patched:
                del layer.__dict__["forward"]
            for module, flag in zip(self._modules, flags):
                module.training = flag


    def _default_stream(self) -> contextlib.AbstractContextManager[None]:
        # Replicas that meet inside the pass cannot take turns.
        if self._draws is False or not self._network.backend.is_training() \
                or self._network.rule is not None:
            return contextlib.nullcontext()
        return self._in_turn()

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """One replica at a time, with this device's random stream in the
        place of torch's default one, which all threads share."""
        handle = self._network.backend.handle(self.device)
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

    def replicate(self, devices: Sequence[Any]) -> List[base.Replica]:
        requests = [spec.grad_req for spec in self.specs()]
        # Copied before the first one moves: a copy of a copy on another
        # card would cross the bus twice.
        copies = [self.net] + [copy.deepcopy(self.net) for _ in devices[1:]]
        replicas: List[base.Replica] = []
        for i, (module, device) in enumerate(zip(copies, devices)):
            module.to(self.backend.handle(device))
            for array, request in zip(_arrays_of(module), requests):
                if request != "null":
                    self.backend.attach_grad(array, request)
            replicas.append(TorchReplica(self, module, device, i))
        self._replicas = replicas
        return list(replicas)

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
            yield

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
