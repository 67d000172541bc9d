"""A user's `torch.nn.Module` on several devices."""
import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map

from mgpu.backends import base, messages
from mgpu.backends._kept import Kept, reached
from mgpu.backends._torch.arithmetic import (BATCH_NORMS, DROPOUTS,
                                             is_gluons_dropout,
                                             masked_forward, takes_masks)
from mgpu.backends._torch.attributes import (Attributes, check_views, copied,
                                             follow_attributes,
                                             follow_weak, hooks_of,
                                             makers_of_hooks)
from mgpu.backends._torch.compiled import check_compiler
from mgpu.backends._torch.draws import code_of, named_draws, watch
from mgpu.backends._torch.float32 import AsMXNet
from mgpu.backends._torch.graph import leaves_of, recomputing, total
from mgpu.backends._torch.layers import (Between, describe, in_place_of,
                                         is_open)
from mgpu.backends._torch.leaves import together
from mgpu.backends._torch.names import (NORMS, arrays_of, joined, kind_of,
                                        suffix_of, walk)
from mgpu.backends._torch.ops import dtype_of, name_of_dtype
from mgpu.backends._torch.places import is_trained
from mgpu.backends._torch.own_step import MaskedFunctions, TorchParts
from mgpu.backends._torch.replica import (TorchReplica, autocast,
                                          channels_last)


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr,
               torch.sparse_bsc)
# Nothing that is made in inference mode can be trained.
_to_be_trained = torch.inference_mode(False)


class TorchNetwork(base.Network):
    """A user's module, and its copies on several devices."""

    backend: Any
    replaces = True

    def __init__(self, backend: Any, net: nn.Module):
        self.backend, self.net = backend, net
        self.normalise: base.Normalise | None = None
        self.functions: dict[str, base.Layer] = {}
        self.draw_mask: base.DrawMask | None = None
        self.options = base.Options()
        self.float32: base.Float32Functions = base.Float32Functions()
        self._watchers = 0
        self.replicas: list[TorchReplica] = []
        self._kept = Kept()
        self._makers: list[Any] = []    # see `makers_of_hooks`
        self.draws: dict[bool | str, bool | None] = {}    # see `named_draws`
        self._code: list[Any] | None = None         # that it was told by
        #: the replicas that backward passes have reached since `follow`
        self.reached: set[int] = set()
        #: held while a replica's training flags are read and saved
        self.reading = threading.Lock()

    def specs(self) -> list[base.Spec]:
        found = []
        for path, module, name, p in walk(self.net, "_parameters"):
            own = ("constant", {"value": 0.25}) \
                if isinstance(module, nn.PReLU) else None
            found.append(base.Spec(
                joined(path, suffix_of(module, name)),
                kind_of(module, name, p), _shape(p), name_of_dtype(p),
                self.backend.grad_req(p), own))
        for path, module, name, b in walk(self.net, "_buffers"):
            kind = name if isinstance(module, NORMS) \
                and name in base.STATISTICS else "other"
            found.append(base.Spec(joined(path, name), kind, _shape(b),
                                   name_of_dtype(b), "null"))
        return found

    def gluon_names(self) -> dict[str, str]:
        names = getattr(self.net, "gluon_names", None)
        if names is None:
            raise TypeError("only a network of from_gluon knows Gluon's "
                            f"names; received {type(self.net).__name__}.")
        keys = [joined(path, name) for kind in ("_parameters", "_buffers")
                for path, _, name, _ in walk(self.net, kind)]
        return {spec.name: names[key].partition(":")[2]
                for key, spec in zip(keys, self.specs(), strict=True)
                if key in names}

    def grad_req(self, number: int) -> str:
        if not self.replicas:
            return self.specs()[number].grad_req
        return self.backend.grad_req(self.replicas[0].array(number))

    def set_grad_req(self, number, grad_req, arrays) -> None:
        first = arrays[0]
        # Where the user has frozen or thawed it, its gradient is the user's.
        kept = first.grad if first.requires_grad is (grad_req != "null") \
            and self.backend.turned(first) else None
        for x in arrays:
            self.backend.attach_grad(x, grad_req)
        first.grad = kept
        for replica in self.replicas:
            replica.forget()

    def adopt(self, number, arrays, earlier) -> None:
        request = self.backend.trained_req(earlier) \
            if arrays[0].requires_grad else "null"
        self.set_grad_req(number, request, arrays)

    def first(self, replica: TorchReplica) -> TorchReplica:
        """The replica that is the user's own module."""
        return self.replicas[0] if self.replicas else replica

    def devices(self) -> list[Any]:
        arrays = arrays_of(self.net)
        return [arrays[0].device if arrays else torch.device("cpu")]

    def predictors(self, devices) -> list[Callable[..., Any]]:
        here = [self.backend.handle(d) for d in devices] == self.devices()
        self._name_draws([*self.net.modules()])
        # Flags are set on a module while it runs: threads need copies.
        return [TorchReplica(
            self, self.net if here else _copy(self.net).to(
                self.backend.handle(device)), device, i)
            for i, device in enumerate(devices)]

    @_to_be_trained
    def cast(self, dtype: str) -> None:
        self.net.to(dtype_of(dtype))

    @_to_be_trained
    def infer_shapes(self, inputs, device) -> None:
        home, make_lazy = self.devices()[0], _lazy_layers(self.net)
        given = base.apart(inputs)
        self.net.to(self.backend.handle(device))
        flags = {m: m.training for m in self.net.modules()}
        watch.turn(True)    # one thread completes, and the others wait
        try:
            self.net.eval()
            with torch.no_grad():
                base.forward_call(self.net, inputs)()
        except BaseException as error:      # an input that does not fit
            make_lazy()
            self.net.to(home)
            if isinstance(error, (RuntimeError, ValueError)):
                self.explain(error, given)
            raise
        finally:
            watch.turn(False)
            for module, flag in flags.items():
                module.training = flag

    def explain(self, error: Exception, inputs: Any) -> None:
        """Raise torch's error about a dtype of `inputs` in mgpu's words."""
        messages.explain_dtype(
            error, r"(?s)^(?!.*'indices').*(dtype|[Ss]calar type|Input type|"
            "[Pp]romoti|not implemented for)", [     # indices: no floats
                name_of_dtype(x) for x in tree_leaves(inputs)
                if isinstance(x, torch.Tensor)],
            [spec.dtype for spec in self.specs()])

    def values(self) -> dict[str, np.ndarray] | None:
        specs = self.specs()
        if any(spec.shape is None for spec in specs):
            return None
        return {spec.name: self.backend.to_numpy(array)
                for spec, array in zip(specs, arrays_of(self.net))}

    def missing(self) -> set[str]:
        return {joined(path, suffix_of(module, name))
                for path, module, name, p in walk(self.net, "_parameters")
                if hasattr(module, _WITHOUT_VALUES)
                and bool(p.isnan().all())}

    def own_names(self) -> list[str]:
        return [joined(path, name) for which in ("_parameters", "_buffers")
                for path, _, name, _ in walk(self.net, which)]

    def state(self, first) -> dict[str, Any]:
        return self.net.state_dict()

    def fit_state(self, values, first, strict):
        if self.extra_names():
            raise ValueError(
                "load_state_dict writes arrays on all devices; received a "
                f"network whose layers have {self.extra_names()} besides. "
                "Load it with net.load_state_dict before mgpu.initialize, or "
                "use mgpu.load_checkpoint.")
        # Torch's own rules: a copy tells what they make of the values.
        copy = _copy(self.net)
        parameters = [(joined(path, name), m, name, x) for path, m, name, x
                      in walk(copy, "_parameters")]
        with self._arrays_kept():
            told = copy.load_state_dict(values, strict)
        made = [path for path, m, name, x in parameters
                if m._parameters.get(name) is not x]
        if made:
            raise RuntimeError(
                "values are loaded into the parameters that are there; "
                "received a network whose own rules make new ones (assign="
                f"True does): {', '.join(made)}. Load them with "
                "net.load_state_dict before mgpu.initialize.")
        pairs = list(zip(arrays_of(self.net), arrays_of(copy), strict=True))
        other = [f"{tuple(new.shape)} instead of {tuple(old.shape)}"
                 for old, new in pairs if old.shape != new.shape]
        if other:
            raise RuntimeError(
                "values are loaded into arrays of their shapes; received a "
                "network whose own rules make arrays of other shapes of "
                f"these: {'; '.join(other)}. Load them with net."
                "load_state_dict before mgpu.initialize.")
        named = {id(x) for name, x in copy.state_dict(keep_vars=True).items()
                 if name not in told.missing_keys}
        return {i: new.detach() for i, (_, new) in enumerate(pairs)
                if id(new) in named}, list(told.missing_keys), list(
                    told.unexpected_keys)

    def load_state(self, values, strict):
        # What else rules write, in what state_dict leaves out or in plain
        # attributes, reaches the other devices as what the user writes does.
        with self._arrays_kept():
            self.net.load_state_dict(values, strict)

    @contextlib.contextmanager
    def _arrays_kept(self) -> Iterator[None]:
        """The user's rules load in the block, into the tensors that are
        there; after an error in them the network's arrays are as before, and
        nobody takes what the rules wrote for the user's own writes."""
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        before = [(x, x.detach().clone(),
                   torch.autograd._unsafe_preserve_version_counter(x))
                  for x in arrays_of(self.net)]
        try:
            # Swapped tensors would not be those that are known here.
            torch.__future__.set_swap_module_params_on_conversion(False)
            yield
        except BaseException:
            with torch.no_grad():
                for x, old, version in before:
                    x.copy_(old)
                    version.__exit__()
            raise
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    def set_mode(self, training: bool) -> None:
        self.net.train(training)

    def shares(self, other: Any) -> list[str]:
        theirs = set(map(id, other.parameters())) \
            if isinstance(other, nn.Module) else set()
        return [joined(path, suffix_of(module, name))
                for path, module, name, p in walk(self.net, "_parameters")
                if id(p) in theirs]

    def names_of(self, parameters) -> list[str | None]:
        names = dict(zip(map(id, arrays_of(self.net)),
                         (spec.name for spec in self.specs())))
        return [names.get(id(p)) for p in parameters]

    def defer(self, devices, draws) -> bool:
        numbers = {id(x): i for i, x in enumerate(arrays_of(self.net))}

        def fill(arrays: Sequence[Any]) -> None:
            for x in arrays:
                if numbers.get(id(x)) in draws:
                    value = draws[numbers[id(x)]](tuple(x.shape))
                    x.data.copy_(torch.from_numpy(value))

        def complete(module: Any, *inputs: Any, **options: Any) -> None:
            lazy = [x for x in arrays_of(module) if is_lazy(x)]
            del module.initialize_parameters        # torch's own follows
            module.initialize_parameters(*inputs, **options)
            fill(lazy)      # and not what was loaded
        fill([x for x in arrays_of(self.net) if not is_lazy(x)])
        for module in self.net.modules():
            if isinstance(module, LazyModuleMixin):
                vars(module)["initialize_parameters"] = partial(
                    complete, module)
        return True

    def check(self, dtype, devices) -> None:
        layers = list(self.net.named_modules())
        tables: list[tuple[str, Any]] = [
            (path, m) for path, m in layers
            if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        sparse = [joined(path, "weight") for path, m in tables if m.sparse]
        if sparse:
            raise messages.sparse_gradient(sparse)
        other = [joined(path, name) for of in ("_parameters", "_buffers")
                 for path, _, name, x in walk(self.net, of)
                 if x.layout is not torch.strided or x.is_complex()
                 or "float8" in str(x.dtype)]
        if other:
            raise ValueError(
                "parameters and buffers are dense arrays of real numbers; "
                f"received sparse, complex or float8 ones: {other}. Keep a "
                "constant in a plain attribute, and complex numbers as "
                "pairs.")
        proxies = [joined(path, name) for path, m in layers
                   for name, child in m._modules.items()
                   if type(child) in weakref.ProxyTypes]
        if proxies:
            raise ValueError(
                "a layer of a network is the layer itself, which torch moves "
                f"to a device; received weakref.proxy as {proxies}. Keep what"
                " is registered elsewhere in a list: self.other = [layer].")
        scripted = [path for path, m in layers
                    if isinstance(m, torch.jit.ScriptModule)]
        if scripted:
            raise ValueError(
                "a network consists of nn.Module layers; received TorchScript"
                f" in {scripted}. Pass the module that it was made from, and "
                "hybridize=True to compile it.")
        trained = [joined(path, name)
                   for path, _, name, b in walk(self.net, "_buffers")
                   if is_trained(b)]
        if trained and len(devices) > 1:
            raise ValueError(
                "on several devices a buffer has no gradient, which would be "
                "that of the rows of one device; received requires_grad in "
                f"{trained}. Make it an nn.Parameter.")
        counted = [path for path, m in tables if m.scale_grad_by_freq]
        if counted and len(devices) > 1:
            raise ValueError(
                "on several devices a gradient is the sum over all rows; "
                f"received scale_grad_by_freq=True in {counted}, which counts "
                "words in the rows of each device. Use one device, or "
                "scale_grad_by_freq=False.")
        written = [path for path, m in tables if m.max_norm is not None]
        if written and len(devices) > 1:
            raise ValueError(
                "on several devices a forward pass leaves the weights as they"
                f" are; received max_norm in {written}, with which each "
                "device changes the rows that it meets. Use one device, or "
                "no max_norm and torch.renorm after each step.")

    def prepare(self, options: base.Options, devices: Sequence[Any]) -> None:
        if options.hybridize:
            cumulative = [path for path, m in self.net.named_modules()
                          if isinstance(m, BATCH_NORMS)
                          and m.momentum is None and m.track_running_stats]
            if cumulative:
                raise ValueError(
                    "hybridize=True needs batch-norm layers whose momentum "
                    "is a number; received momentum=None, whose factor "
                    f"changes in every step, in {cumulative}. Give the "
                    "layers a momentum, or use hybridize=False.")
            check_compiler(devices)
        self.options = options

    def hybridize(self, active, devices) -> None:
        self.prepare(self.options._replace(hybridize=active), devices)

    @property
    def by_layer(self) -> bool:
        """Whether the layers must run one by one, because they are watched
        or computed by functions of mgpu."""
        return bool(self._watchers) or self.normalise is not None \
            or self.draw_mask is not None

    def autocast(self, devices) -> base.ContextManager:
        if self.options.autocast is None:
            return contextlib.nullcontext()
        return autocast(self.backend.handle(devices[0]), self.options)

    @_to_be_trained
    def replicate(self, devices: Sequence[Any]) -> list[base.Replica]:
        requests = [spec.grad_req for spec in self.specs()]
        if len(devices) > 1:
            check_views(self.net)
        # Copied before the first one moves: a copy of a copy on another
        # card would cross the bus twice.
        copies = [self.net] + [_copy(self.net) for _ in devices[1:]]
        replicas: list[TorchReplica] = []
        for i, (module, device) in enumerate(zip(copies, devices)):
            module.to(self.backend.handle(device))
            if self.options.channels_last:
                for array in arrays_of(module):
                    array.data = channels_last(array.data)
            for array, request in zip(arrays_of(module), requests):
                if request != "null":
                    self.backend.attach_grad(array, request)
            replicas.append(TorchReplica(self, module, device, i))
            if i:
                replicas[i].borrow_hooks()
        self.replicas = replicas
        self._attributes = Attributes([r.layers for r in replicas])
        self._makers = makers_of_hooks(replicas[0].layers)
        self._name_draws(replicas[0].layers)
        return list(replicas)

    def follow(self) -> None:
        self._attributes.untold.forget()
        self._attributes.check_layers()
        if len(self.replicas) > 1:
            if parametrize._cache_enabled:
                raise ValueError(
                    "on several devices each has weights of its own; received"
                    " a pass inside torch.nn.utils.parametrize.cached(), "
                    "which keeps those of one for all. Write `with cached():`"
                    " in the network's forward.")
            self._check_forms()
            follow_attributes([[owner[name] for owner, name in r.weights]
                               for r in self.replicas])
        if (len(self.replicas) > 1 or self.options.hybridize) \
                and not self._watchers and self.replicas[0].users is None \
                and self._attributes.follow():
            self._name_draws(self.replicas[0].layers)
            for replica in self.replicas:
                replica.forget()
        if watch.drew:
            watch.drew = False
            for replica in self.replicas:
                replica.learn_again()
        self._kept = Kept(
            hooks_of(self.replicas[0].layers, self._makers)
            if len(self.replicas) > 1 and not self._watchers
            and self.backend.is_recording() else (),
            (torch.Tensor, np.ndarray), nn.Module)
        self.reached.clear()
        if self._kept.backward:
            self.backend.keeping.add(self)

    def _name_draws(self, layers: Sequence[nn.Module]) -> None:
        """See `named_draws`; again only where other code runs, since a
        counter in an attribute changes with each pass."""
        code, known = code_of(layers), self._code
        if known is None or len(code) != len(known) \
                or not all(map(is_, code, known)):
            self._code, self.draws = code, named_draws(layers, code)
            for replica in self.replicas:
                replica.learn_again()

    def _check_forms(self) -> None:
        """ValueError where the user has given parameters another dtype or
        shape in place."""
        first, second, *_ = self.replicas
        for number, ((own, name), (others, _)) in enumerate(zip(
                first.weights, second.weights)):
            here, there = own[name], others[name]
            if here.dtype is not there.dtype or here.shape != there.shape:
                raise ValueError(
                    "on several devices a parameter keeps its dtype and shape"
                    f", {name_of_dtype(there)} {tuple(there.shape)}; received"
                    f" {name_of_dtype(here)} {tuple(here.shape)} for "
                    f"{self.specs()[number].name!r}. Call mgpu.initialize(net"
                    ", devices, init='keep', force_reinit=True), and make a "
                    "new Trainer; or change it back.")

    def begin_lag(self, source: int | None) -> None:
        if self.replicas[0].users is None:
            self._attributes.begin_lag(source)

    def catch_up(self, source: int, idle: Sequence[int]) -> None:
        if self.replicas[0].users is None:
            for i in idle:
                self._attributes.catch_up(source, i)

    def explain_states(self, error: Exception, inputs: Any,
                       module: nn.Module) -> None:
        """See `messages.explain_states`."""
        messages.explain_states(
            error, self._attributes.shapes(module) if self.replicas else [],
            next((len(x) for x in inputs if isinstance(x, torch.Tensor)
                  and x.ndim), 0), len(self.replicas))

    def check_read(self) -> None:
        """ValueError if a pass has read what nobody knows there."""
        if self.replicas:
            self._attributes.untold.check()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """The block holds a pass of one replica, which leaves what all of
        them hold as it is."""
        if len(self.replicas) < 2:
            yield
            return
        before = self._attributes.shared()
        yield
        self._attributes.check_shared(before)

    def leave(self) -> None:
        """A pass of replica 0 has ended."""
        if len(self.replicas) > 1:
            self._attributes.leave()

    def extra_names(self) -> list[str]:
        return [joined(path, "_extra_state")
                for path, m in self.net.named_modules() if _has_extra(m)]

    def extra_states(self) -> dict[str, list[Any]]:
        late = self._attributes.late_buffers()
        if late:
            raise ValueError(
                "a checkpoint holds the buffers that are there at "
                f"mgpu.initialize; received {late}, which passes have made. "
                "Make them tensors in __init__, or persistent=False where "
                "each pass makes them anew.")
        one_way = [path for path, m in self.net.named_modules()
                   if _has_extra(m) and type(m).set_extra_state
                   is nn.Module.set_extra_state]
        if one_way:
            raise ValueError(
                "what get_extra_state gives goes back by set_extra_state; "
                f"received layers without one: {one_way}. Write it.")
        each = [[m.get_extra_state() for m in r.layers if _has_extra(m)]
                for r in self.replicas]
        return dict(zip(self.extra_names(), map(list, zip(*each))))

    def set_extra_states(self, states) -> None:
        for i, replica in enumerate(self.replicas):
            layers = filter(_has_extra, replica.layers)
            for m, name in zip(layers, self.extra_names()):
                m.set_extra_state(states[name][i])
        self._attributes.settle()

    def check_kept(self, backward: bool = False) -> None:
        # One device at a time may keep what the user reads in between.
        several = len(self.reached) > 1
        self.reached.clear()
        if not backward:
            self.check_read()
        self._attributes.note_streams()
        if several or not backward:
            self._kept.check(backward)

    def turns(self) -> "_Streams":
        return _Streams(self.replicas)

    def predicts(self) -> bool:
        with self.reading:
            users = self.replicas[0].users if self.replicas else None
            if users[0] if users else self.net.training:
                return False
            modes = users or [m.training for m in self.net.modules()]
        if any(modes):
            name = next(path for (path, _), mode in zip(
                self.net.named_modules(), modes) if mode)
            raise ValueError(
                "a network in eval mode has no part in training mode while "
                f"it trains; received one whose {name!r} is. Call net.train()"
                ", then .eval() on the layers that are to stay frozen. "
                "Predictions with dropout are made outside of record().")
        if torch.is_grad_enabled():
            raise ValueError(
                "a network in eval mode does not train; received "
                f"{type(self.net).__name__}, which is, inside record(). Call "
                "net.train() to train it; use mgpu.record(train_mode=False) "
                "for gradients of its predictions, and torch.no_grad() for "
                "predictions without them.")
        return True

    def forward_backward(self, replicas, inputs, head, leaves) -> None:
        owner = {id(x): i for i in range(len(inputs)) for x in leaves(i)}
        join = together()
        for replica, given in zip(self.replicas, inputs):
            if given is not None:   # none waits for the others
                replica.place().record()

        def both(i: int) -> Any:
            """Both passes of device i. Returns its loss instead where the
            backward pass must wait for the losses of other devices."""
            if inputs[i] is None:
                return None
            output = base.forward_call(replicas[i], inputs[i])()
            with self.replicas[i].around_loss():
                loss = head(i, output)
            if not loss.requires_grad:
                raise messages.not_recorded()
            owners = {owner.get(id(x), -1) for x in leaves_of(loss)}
            if -1 in owners:
                return loss     # depends on a leaf that devices may share
            for other in owners - {i}:
                raise messages.foreign_leaf(i, other)
            root = total(loss)
            join(root)
            torch.autograd.backward(root)
            return None
        waiting = [loss for loss in self.backend.parallel(
            [partial(both, i) for i in range(len(inputs))])
            if loss is not None]
        if waiting:
            self.backend.run_backward(waiting, join)

    def layers(self) -> list[base.Layer]:
        names = {id(tensor): joined(path, suffix_of(module, own))
                 for which in ("_parameters", "_buffers")
                 for path, module, own, tensor in walk(self.net, which)}
        return [base.Layer(path, *describe(module), tuple(
                    names[id(x)] for which in ("parameters", "buffers")
                    for x in getattr(module, which)()))
                for path, module in _innermost(self.net)]

    def settings(self) -> dict[str, str]:
        # Others may print what they hold: observers of quantisation do.
        return {path: f"training={m.training} " + (
            m.extra_repr() if type(m).__module__.startswith("torch.nn.")
            else "") for path, m in self.net.named_modules()}

    def aliases(self) -> dict[str, list[str]]:
        found: dict[int, list[str]] = {}
        for path, module in self.net.named_modules(remove_duplicate=False):
            for name, tensor in (*module._parameters.items(),
                                 *module._buffers.items()):
                if tensor is not None:
                    found.setdefault(id(tensor), []).append(
                        joined(path, suffix_of(module, name)))
        return {names[0]: names for names in found.values() if len(names) > 1}

    @contextlib.contextmanager
    def watch_layers(self, seen: base.LayerCallback) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for replica in self.replicas:
                for path, module in _innermost(replica.module):
                    for handle in _watch(module, path, replica, seen):
                        stack.callback(handle.remove)
                before, replica.seen = replica.seen, seen
                stack.callback(setattr, replica, "seen", before)
            self._watchers += 1
            try:
                yield
            finally:
                self._watchers -= 1

    def use_masks(self, draw):
        return self._using("draw_mask", draw)

    def check_visible(self):
        hidden = [path for path, m in self.net.named_modules()
                  if m._compiled_call_impl is not None
                  or hasattr(m, "_orig_mod")
                  or hasattr(m.forward, "_torchdynamo_orig_callable")]
        if hidden:
            raise messages.compiled(hidden)

    def inner_dropout(self):
        nets = [x.module for x in self.replicas] or [self.net]
        return [(path, m, "p" if is_gluons_dropout(m) else "dropout")
                for net in nets for path, m in _innermost(net)
                if is_gluons_dropout(m) and not takes_masks(m)
                or isinstance(m, nn.RNNBase) and m.num_layers > 1
                and m.dropout]

    @contextlib.contextmanager
    def natively(self, draw, begins, seen) -> Iterator[None]:
        replica = self.replicas[0]
        again: dict[int, Any] = {}

        def before(_: Any, inputs: Any) -> None:
            if torch.is_grad_enabled() and not recomputing():
                begins(inputs)

        def told(_: Any, inputs: Any, outputs: Any) -> None:
            if torch.is_grad_enabled() and not recomputing():
                seen(outputs)
        with contextlib.ExitStack() as stack:
            stack.callback(self.net.register_forward_pre_hook(before).remove)
            stack.callback(self.net.register_forward_hook(told).remove)
            for layer in replica.layers:
                if type(layer) in DROPOUTS and "forward" not in vars(layer):
                    # By torch's own stream: a checkpoint sets it again.
                    vars(layer)["forward"] = masked_forward(
                        layer, draw, 0, lambda: None, again)
                    stack.callback(vars(layer).pop, "forward")
            stack.enter_context(MaskedFunctions(draw, again))
            if self.float32.names or self.float32.watched:
                stack.enter_context(AsMXNet(self.float32))
            if replica.seen is not None:
                replica.between = stack.enter_context(
                    Between(replica.seen, 0, self.functions))
                stack.callback(setattr, replica, "between", None)
            yield

    def trains(self, path) -> bool | None:
        if not torch.is_grad_enabled():
            return None
        return path in self.functions \
            or bool(self.net.get_submodule(path).training)

    def own_parts(self, parts) -> TorchParts:
        paths = {joined(path, name): joined(path, suffix_of(module, name))
                 for path, module, name, _ in walk(self.net, "_parameters")}
        inside = [path for path, module in self.net.named_modules()
                  if isinstance(module, (nn.RNNBase, nn.MultiheadAttention))
                  and module.dropout]
        if inside:
            raise messages.dropout_inside(inside)
        named = {name: self.net.get_parameter(path)
                 for path, name in paths.items()}
        paths |= {joined(path, name): joined(path, name)
                  for path, _, name, _ in walk(self.net, "_buffers")}
        return TorchParts(named, paths, parts, list(self.net.modules()))

    def use_batch_norm(self, normalise):
        own = self.replicas[0].own_batch_norms
        if normalise is not None and own:
            raise messages.own_batch_norm(own)
        if normalise is not None and self.replicas[0].not_joined:
            raise messages.not_joined(self.replicas[0].not_joined)
        return self._using("normalise", normalise)

    @contextlib.contextmanager
    def _using(self, name: str, value: Any) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)


class _Streams(base.Turns):
    """Replicas that draw from torch's default stream run one at a time."""

    def __init__(self, replicas: Sequence[TorchReplica]):
        self._replicas = replicas

    def begin(self, index) -> None:
        self._replicas[index].go_on()

    def end(self, index) -> None:
        self._replicas[index].halt()


def _innermost(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that contain no others, each once, with their paths.
    Attention is one of them: it does not call the layer that it contains."""
    inside: set[int] = set()
    for path, module in net.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            inside.update(map(id, module.children()))
        elif module._modules:
            continue
        if id(module) not in inside:
            yield path, module


def _watch(module: nn.Module, path: str, replica: TorchReplica,
           seen: base.LayerCallback) -> Iterator[Any]:
    """Let `seen` be called after each call of an innermost layer; yields
    handles."""
    given: list[Any] = []
    closed = not is_open(module)

    def begins(_: Any, inputs: Any) -> None:
        if replica.between is not None:
            replica.between.inside = closed
        if getattr(module, "inplace", False):   # it overwrites them
            inputs = tree_map(_cloned, inputs)
        given[:] = [inputs]

    def told(_: Any, inputs: Any, outputs: Any) -> Any:
        if replica.between is not None:
            replica.between.inside = False
            replica.between.after = path
        put = None if recomputing() else seen(
            path, given[0], outputs, replica.index)
        return None if put is None else in_place_of(outputs, put)
    yield module.register_forward_pre_hook(begins)
    yield module.register_forward_hook(told)


def _cloned(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _has_extra(m: nn.Module) -> bool:
    return type(m).get_extra_state is not nn.Module.get_extra_state


def _copy(net: nn.Module) -> nn.Module:
    """A copy of `net`. Refuses tensors with a history, except what a hook
    computes anew before each pass (legacy ``weight_norm``, pruning)."""
    copies: dict[int, Any] = {}
    for path, module in net.named_modules():
        computed = {getattr(hook, name, None) for name in (
            "name", "_tensor_name") for hook in
            module._forward_pre_hooks.values()}
        for name, x in vars(module).items():
            if isinstance(x, torch.Tensor) and not x.is_leaf:
                if name not in computed:
                    raise _computed(joined(path, name))
                copies[id(x)] = x.detach().clone()
            # Those torch does not copy, and no pass writes to them.
            copies |= {id(t): t for t in reached(x, torch.Tensor, nn.Module)
                       if t.layout in _COMPRESSED}
    for *_, p in walk(net, "_parameters"):
        if type(p).__deepcopy__ is nn.Parameter.__deepcopy__:
            # That gives each memory of its own. Here what shares memory with
            # it, a buffer or a tensor in an attribute, does so in the copy.
            copies[id(p)] = type(p)(copy.deepcopy(p.data, copies),
                                    p.requires_grad)
    try:
        made = copied(net, copies, arrays_of(net))
    except Exception:
        made = copied(net, copies | _shared(net), arrays_of(net))
    follow_weak(net, made)
    return made


def _shared(net: nn.Module) -> dict[int, Any]:
    """By `id`, the attributes of layers that cannot be copied, such as a lock
    or a file: there is only one."""
    shared, kept = {}, {id(x): x for x in (*net.modules(), *arrays_of(net))}
    for path, module in net.named_modules():
        for name, x in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules") \
                    or isinstance(x, torch.Tensor):
                continue
            try:
                copy.deepcopy(x, dict(kept))
            except Exception as error:
                if "graph leaves" in str(error):    # torch's words
                    raise _computed(joined(path, name)) from None
                shared[id(x)] = x
    return shared


def _computed(name: str) -> ValueError:
    return ValueError(
        "a network on several devices computes its tensors from its "
        f"parameters in each forward pass; received {name!r}, which was "
        "computed before. Compute it in forward(), and clear what a pass has "
        "kept there.")


def _shape(x: Any) -> tuple[int, ...] | None:
    return None if is_lazy(x) else tuple(x.shape)


# An attribute of modules whose parameters begin as NaN. NaN stays through a
# copy, a cast and a move, where a version counter would not.
_WITHOUT_VALUES = "mgpu_without_values"


def without_values(net: nn.Module) -> nn.Module:
    """Take the values of `net` away: a parameter is `missing` until
    something is written to it."""
    for module in net.modules():
        setattr(module, _WITHOUT_VALUES, True)
    for p in net.parameters():
        nn.init.constant_(p, float("nan"))
    return net


def _lazy_layers(net: nn.Module) -> Callable[[], None]:
    """A function that makes the lazy layers of `net` lazy again, after a
    forward pass has completed some of them in place."""
    layers = [(m, type(m), dict(vars(m))) for m in net.modules()
              if isinstance(m, LazyModuleMixin)]
    # Handles of hooks know these very dictionaries.
    tables = [(table, dict(table)) for _, _, state in layers
              for table in state.values() if isinstance(table, dict)]
    tensors = [(x, type(x), x.data) for x in arrays_of(net) if is_lazy(x)]

    def make_lazy() -> None:
        for x, kind, data in tensors:
            x.data = data
            x.__class__ = kind
        for table, entries in tables:
            table.clear()
            table.update(entries)
        for m, kind, state in layers:
            m.__class__ = kind
            vars(m).clear()
            vars(m).update(state)
    return make_lazy
