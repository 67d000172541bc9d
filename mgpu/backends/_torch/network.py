"""A `torch.nn.Module` on several devices."""
import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from mgpu.backends import messages
from mgpu.backends._torch.arithmetic import (BATCH_NORMS, DROPOUTS,
                                             check_joined, computes_itself,
                                             is_gluons_dropout,
                                             masked_forward, takes_masks)
from mgpu.backends._torch.copies import DeviceCopies
from mgpu.backends._torch.float32 import AsMXNet
from mgpu.backends._torch.gluonize import has_fixed_statistics
from mgpu.backends._torch.graph import recomputing
from mgpu.backends._torch.layers import Between, describe
from mgpu.backends._torch.meaning import (GluonMeaning, autocast,
                                          channels_last, innermost,
                                          watch_layer)
from mgpu.backends._torch.names import (arrays_of, entries_of,
                                        joined, kind_of, parameters_of,
                                        suffix_of)
from mgpu.backends._torch.ops import dtype_of, name_of_dtype
from mgpu.backends._torch.own_step import MaskedFunctions, TorchParts
from mgpu.backends._torch.streams import watch
from mgpu.backends.containers import ONE
from mgpu.backends.network import (Network, Normalize, Options, Runner, Spec,
                                   forward_call)
from mgpu.backends.probing import (DrawMask, Float32Functions, Layer,
                                   LayerCallback)
from mgpu.backends.types import ContextManager

# Tensors created in inference mode cannot be trained.
_to_be_trained = torch.inference_mode(False)


class TorchNetwork(Network):
    """A module of the user, and its copies on several devices."""

    backend: Any
    replaces = True

    def __init__(self, backend: Any, net: nn.Module):
        self.backend, self.net = backend, net
        self.normalize: Normalize | None = None
        self.runner: Runner | None = None      # if devices synchronize
        self.functions: dict[str, Layer] = {}
        self.draw_mask: DrawMask | None = None
        self.seen: LayerCallback | None = None
        self.options = Options()
        self.float32: Float32Functions = Float32Functions()
        #: table, key in it, and mgpu's name of each array
        self._placed: list[tuple[dict[str, Any], str, str]] = []
        self._copies: DeviceCopies

    def specs(self) -> list[Spec]:
        return [Spec(
            e.name, kind_of(e), None if is_lazy(e.tensor)
            else tuple(e.tensor.shape), name_of_dtype(e.tensor),
            "null" if e.table == "_buffers"
            else self.backend.grad_req(e.tensor),
            ("constant", {"value": 0.25}) if e.table == "_parameters"
            and isinstance(e.module, nn.PReLU) else None)
            for e in entries_of(self.net)]

    def gluon_names(self) -> dict[str, str]:
        names = getattr(self.net, "gluon_names", None)
        if names is None:
            raise TypeError("only a network of from_gluon has Gluon's "
                            f"names; received {type(self.net).__name__}.")
        return {e.name: names[e.own_name].partition(":")[2]
                for e in entries_of(self.net) if e.own_name in names}

    def grad_req(self, number: int) -> str:
        return self.backend.grad_req(self.array(number))

    def set_grad_req(self, number, grad_req) -> None:
        self.backend.attach_grad(self.array(number), grad_req)

    def devices(self) -> list[Any]:
        arrays = arrays_of(self.net)
        return [arrays[0].device if arrays else torch.device("cpu")]

    def predictors(self, devices) -> list[Callable[..., Any]]:
        def predictor(device: Any) -> Callable[..., Any]:
            copies = DeviceCopies(
                self.net, [*self.devices(), self.backend.handle(device)],
                self.backend.run, meaning=GluonMeaning(self, [device] * 2))

            def predict(*args: Any, **kwargs: Any) -> Any:
                return copies.run({1: (args, kwargs)}, ONE)[1]
            return predict
        return list(map(predictor, devices))

    @_to_be_trained
    def cast(self, dtype: str) -> None:
        self.net.to(dtype_of(dtype))

    @_to_be_trained
    def infer_shapes(self, inputs, device) -> None:
        home, make_lazy = self.devices()[0], _lazy_layers(self.net)
        self.net.to(self.backend.handle(device))
        flags = {m: m.training for m in self.net.modules()}
        watch.turn(True)    # other threads wait
        try:
            self.net.eval()
            with torch.no_grad():
                forward_call(self.net, inputs)()
        except BaseException:       # for example a wrong input shape
            make_lazy()
            self.net.to(home)
            raise
        finally:
            watch.turn(False)
            for module, flag in flags.items():
                module.training = flag

    def values(self) -> dict[str, np.ndarray] | None:
        specs = self.specs()
        if any(spec.shape is None for spec in specs):
            return None
        return {spec.name: self.backend.to_numpy(array)
                for spec, array in zip(specs, arrays_of(self.net))}

    def missing(self) -> set[str]:
        return {e.name for e in parameters_of(self.net)
                if hasattr(e.module, _WITHOUT_VALUES)
                and bool(e.tensor.isnan().all())}

    def own_names(self) -> list[str]:
        return [e.own_name for e in entries_of(self.net)]

    def state(self) -> dict[str, Any]:
        return self.net.state_dict()

    def load_state(self, values, strict):
        # Copies: the values may be the network's tensors.
        copies: Any = collections.OrderedDict(
            (name, x.clone() if isinstance(x, torch.Tensor) else x)
            for name, x in values.items())
        if hasattr(values, "_metadata"):
            copies._metadata = values._metadata
        before = [(x, x.detach().clone(),
                   torch.autograd._unsafe_preserve_version_counter(x))
                  for x in arrays_of(self.net)]
        try:
            return self.net.load_state_dict(copies, strict)
        except BaseException:
            # Restore the version counters: these are not writes of the user.
            with torch.no_grad():
                for x, old, version in before:
                    x.copy_(old)
                    version.__exit__()
            raise

    def set_mode(self, training: bool) -> None:
        self.net.train(training)

    def shares(self, other: Any) -> list[str]:
        theirs = set(map(id, other.parameters())) \
            if isinstance(other, nn.Module) else set()
        return [e.name for e in parameters_of(self.net)
                if id(e.tensor) in theirs]

    def names_of(self, parameters) -> list[str | None]:
        names = {id(e.tensor): e.name for e in entries_of(self.net)}
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
            del module.initialize_parameters        # reveals torch's method
            module.initialize_parameters(*inputs, **options)
            fill(lazy)      # not loaded values
        fill([x for x in arrays_of(self.net) if not is_lazy(x)])
        for module in self.net.modules():
            if isinstance(module, LazyModuleMixin):
                vars(module)["initialize_parameters"] = partial(
                    complete, module)
        return True

    def check(self, dtype, devices) -> None:
        tables: list[tuple[str, Any]] = [
            (path, m) for path, m in self.net.named_modules()
            if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        sparse = [joined(path, "weight") for path, m in tables if m.sparse]
        if sparse:
            raise messages.sparse_gradient(sparse)
        other = [e.own_name for e in entries_of(self.net)
                 if e.tensor.layout is not torch.strided
                 or e.tensor.is_complex() or "float8" in str(e.tensor.dtype)]
        if other:
            raise ValueError(
                "parameters and buffers must be dense and real; "
                f"received sparse, complex or float8 ones: {other}. Store a "
                "constant in a plain attribute, and complex numbers as "
                "pairs.")
        counted = [path for path, m in tables if m.scale_grad_by_freq]
        if counted and len(devices) > 1:
            raise ValueError(
                "scale_grad_by_freq=True is not supported on several devices, "
                "because it counts indices per device; received it in "
                f"{counted}. Use one device, or scale_grad_by_freq=False.")

    def prepare(self, options: Options, devices: Sequence[Any]) -> None:
        if options.hybridize:
            cumulative = [path for path, m in self.net.named_modules()
                          if isinstance(m, BATCH_NORMS)
                          and m.momentum is None and m.track_running_stats]
            if cumulative:
                raise ValueError(
                    "hybridize=True does not support batch-norm layers with "
                    f"momentum=None; received {cumulative}. Give the layers a "
                    "momentum, or use hybridize=False.")
        self.options = options

    def hybridize(self, active, devices) -> None:
        self.prepare(self.options._replace(hybridize=active), devices)

    @property
    def by_layer(self) -> bool:
        """Whether the layers must run one by one, because they are observed
        or computed by functions of mgpu."""
        return self.seen is not None or self.normalize is not None \
            or self.draw_mask is not None

    def autocast(self, devices) -> ContextManager:
        if self.options.autocast is None:
            return contextlib.nullcontext()
        return autocast(self.backend.handle(devices[0]), self.options)

    @_to_be_trained
    def place(self, devices: Sequence[Any]) -> None:
        requests = [spec.grad_req for spec in self.specs()]
        self.net.to(self.backend.handle(devices[0]))
        for array, request in zip(arrays_of(self.net), requests, strict=True):
            if self.options.channels_last:
                array.data = channels_last(array.data)
            if request != "null":
                self.backend.attach_grad(array, request)
        if all(m.training for m in self.net.modules()):
            # As net.train() at the start of a script: it may freeze layers.
            self.net.train()
        meaning = GluonMeaning(self, devices)
        meaning.allocated(0, arrays_of(self.net))
        self._placed = [(getattr(e.module, e.table), e.key, e.name)
                        for e in entries_of(self.net)]
        self._copies = DeviceCopies(
            self.net, [self.backend.handle(d) for d in devices],
            self.backend.run, meaning=meaning)

    def array(self, number: int) -> Any:
        if not self._placed:
            return arrays_of(self.net)[number]
        # Looked up in every call, because a user may replace the tensor.
        table, key, name = self._placed[number]
        if table.get(key) is None:
            raise messages.changed_layers([name])
        return table[key]

    def arrays(self, number: int) -> list[Any]:
        return self._copies.arrays(self.array(number))

    def write_statistics(self, number, values) -> None:
        x = self.array(number)
        with torch.no_grad():
            x.copy_(values[0])
        self._copies.keep_statistics(x, values)

    def written(self, number) -> None:
        self._copies.keep_statistics(self.array(number))

    def run(self, calls, batch) -> dict[int, Any]:
        return self._copies.run(calls, batch)

    def probe(self, call, device) -> Any:
        return self._copies.probe(call, device)

    def extra_names(self) -> list[str]:
        return [joined(path, "_extra_state")
                for path, m in self.net.named_modules() if _has_extra(m)]

    def extra_states(self) -> dict[str, Any]:
        known = {(id(table), key) for table, key, _ in self._placed}
        late = [e.own_name for e in parameters_of(self.net, "_buffers")
                if (id(e.module._buffers), e.key) not in known
                and e.key not in e.module._non_persistent_buffers_set]
        if late:
            raise ValueError(
                "the buffers of a checkpoint must exist at mgpu.initialize; "
                f"received {late}, which passes have created. Register "
                "tensors in __init__, or use persistent=False for buffers "
                "that each pass creates.")
        one_way = [path for path, m in self.net.named_modules()
                   if _has_extra(m) and type(m).set_extra_state
                   is nn.Module.set_extra_state]
        if one_way:
            raise ValueError(
                "layers with get_extra_state need set_extra_state; "
                f"received layers without it: {one_way}. Implement it.")
        return {joined(path, "_extra_state"): m.get_extra_state()
                for path, m in self.net.named_modules() if _has_extra(m)}

    def set_extra_states(self, states) -> None:
        for path, m in self.net.named_modules():
            if _has_extra(m):
                m.set_extra_state(states[joined(path, "_extra_state")])

    def predicts(self) -> bool:
        if self.net.training:
            return False
        modes = [m.training for m in self.net.modules()]
        if any(modes):
            name = next(path for (path, _), mode in zip(
                self.net.named_modules(), modes) if mode)
            raise ValueError(
                "a network in eval mode must not have layers in training mode "
                f"inside record(); received {name!r} in training mode. Call "
                "net.train(), then .eval() on the layers to freeze; or run "
                "predictions with dropout outside of record().")
        if torch.is_grad_enabled():
            raise ValueError(
                "a network in eval mode does not train; received "
                f"{type(self.net).__name__}, which is, inside record(). Call "
                "net.train() to train it; use mgpu.record(train_mode=False) "
                "for gradients of its predictions, and torch.no_grad() for "
                "predictions without them.")
        return True

    def layers(self) -> list[Layer]:
        names = {id(e.tensor): e.name for e in entries_of(self.net)}
        return [Layer(path, *describe(module), tuple(
                    names[id(x)] for which in ("parameters", "buffers")
                    for x in getattr(module, which)()))
                for path, module in innermost(self.net)]

    def settings(self) -> dict[str, str]:
        # Other classes may print their state, as quantization observers do.
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

    def watch_layers(self, seen):
        return self._using("seen", seen)

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
        return [(path, m, "p" if is_gluons_dropout(m) else "dropout")
                for path, m in innermost(self.net)
                if is_gluons_dropout(m) and not takes_masks(m)
                or isinstance(m, nn.RNNBase) and m.num_layers > 1
                and m.dropout]

    @contextlib.contextmanager
    def natively(self, draw, begins, seen) -> Iterator[None]:
        again: dict[int, Any] = {}

        def before(_: Any, inputs: Any) -> None:
            if torch.is_grad_enabled() and not recomputing():
                begins(inputs)

        def after(_: Any, inputs: Any, outputs: Any) -> None:
            if torch.is_grad_enabled() and not recomputing():
                seen(outputs)
        with contextlib.ExitStack() as stack:
            stack.callback(self.net.register_forward_pre_hook(before).remove)
            stack.callback(self.net.register_forward_hook(after).remove)
            for layer in self.net.modules():
                if type(layer) in DROPOUTS and "forward" not in vars(layer):
                    # From torch's default stream, which checkpoints restore.
                    vars(layer)["forward"] = masked_forward(
                        layer, draw, 0, lambda: None, again)
                    stack.callback(vars(layer).pop, "forward")
            stack.enter_context(MaskedFunctions(draw, again))
            if self.float32.names or self.float32.watched:
                stack.enter_context(AsMXNet(self.float32))
            if self.seen is not None:
                between = stack.enter_context(
                    Between(self.seen, 0, self.functions))
                for path, layer in innermost(self.net):
                    for handle in watch_layer(layer, path, 0, between,
                                              self.seen):
                        stack.callback(handle.remove)
            yield

    def trains(self, path) -> bool | None:
        if not torch.is_grad_enabled():
            return None
        return path in self.functions \
            or bool(self.net.get_submodule(path).training)

    def own_parts(self, parts) -> TorchParts:
        inside = [path for path, module in self.net.named_modules()
                  if isinstance(module, (nn.RNNBase, nn.MultiheadAttention))
                  and module.dropout]
        if inside:
            raise messages.dropout_inside(inside)
        return TorchParts(
            {e.name: e.tensor for e in parameters_of(self.net)},
            {e.own_name: e.name for e in entries_of(self.net)}, parts,
            list(self.net.modules()))

    @contextlib.contextmanager
    def use_batch_norm(self, normalize, run) -> Iterator[None]:
        own = [path for path, m in self.net.named_modules()
               if isinstance(m, BATCH_NORMS) and computes_itself(m)
               and not has_fixed_statistics(m)]
        if own:
            raise messages.own_batch_norm(own)
        check_joined(self.net)
        with self._using("normalize", normalize), self._using("runner", run):
            yield

    @contextlib.contextmanager
    def _using(self, name: str, value: Any) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)


def _has_extra(m: nn.Module) -> bool:
    return type(m).get_extra_state is not nn.Module.get_extra_state


# Attribute of modules whose parameters are initially NaN. NaN survives a copy,
# a cast and a move to another device; a version counter does not.
_WITHOUT_VALUES = "mgpu_without_values"


def without_values(net: nn.Module) -> nn.Module:
    """Delete the values of `net`. A parameter is `missing` until it is
    written."""
    for module in net.modules():
        setattr(module, _WITHOUT_VALUES, True)
    for p in net.parameters():
        nn.init.constant_(p, float("nan"))
    return net


def _lazy_layers(net: nn.Module) -> Callable[[], None]:
    """Return a function that makes the lazy layers of `net` lazy again, after
    a forward pass has completed some of them."""
    layers = [(m, type(m), dict(vars(m))) for m in net.modules()
              if isinstance(m, LazyModuleMixin)]
    # Handles of hooks refer to these dictionaries.
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
