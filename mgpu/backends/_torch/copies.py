"""Forward and backward passes of a network on several devices.

The network is the only state. Each pass makes a shallow copy of the module
tree for each device, with private leaves for parameters. Those of device 0
share the memory of the network; those of other devices are overwritten with
its values.
"""
import contextlib
import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import (Callable, Iterable, Iterator, Mapping,
                             Sequence)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mgpu.backends import containers
from mgpu.backends._torch import strict
from mgpu.backends._torch.boundary import (Alias, DeviceGraph, Ended, Joint,
                                           Runner, Sources, keep)
from mgpu.backends._torch.graph import read
from mgpu.backends._torch.streams import Turns, states, watched
from mgpu.backends._torch.tree import (TABLES, Contents, Copies, Tree,
                                       made_more, plain_network, redirect,
                                       version)
from mgpu.backends._workers import inside_worker
from mgpu.backends.containers import Batch, Call, Probed
from mgpu.backends.other_batch import of_other_batch

_MISSING = object()


class _Held(NamedTuple):
    """Array or attribute of a device.

    Valid while the network has `original` at that `version`, and, if it is a
    part of `original`, for batches of `size` examples.
    """

    original: Any
    version: Any
    value: Any
    size: int | None = None


class _Copy(NamedTuple):
    """Copy of a network for one device and one pass."""

    net: nn.Module
    leaves: dict[int, torch.Tensor]
    originals: Copies               # id of a copy -> original
    modules: dict[int, nn.Module]   # id of an original -> copy
    contents: Contents              # before the pass
    arrays: dict[int, torch.Tensor]     # id of an original -> copy
    stamps: list[tuple[int, int]]   # of `arrays`


#: key of an attribute: (id of a module, name)
_Place = tuple[int, str]


class _Changes(NamedTuple):
    """Attributes and buffers set by a forward pass."""

    attributes: dict[_Place, Any]
    buffers: dict[_Place, Any]


def _stamps(arrays: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Version and address of arrays, which change with writes."""
    return [(0 if x.is_inference() else x._version, x.data_ptr())
            for x in arrays]


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def on_one_device() -> bool:
    """Whether the caller supports one device only: in the pass of a device,
    torch.func, forward-mode derivatives, tracing or compilation."""
    return (inside_worker() or torch.compiler.is_compiling()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch.autograd.forward_ad._current_level >= 0
            or torch.jit.is_tracing())


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


class DeviceCopies:
    """Runs a network on several devices.

    Parameters
    ----------
    net : nn.Module
        Not modified, except by forward itself.
    devices : sequence of torch.device
        The first one is that of the network.
    run : Runner
        Calls thunks, number i for device i, and blocks until all return.
    meaning : Meaning, optional
    """

    def __init__(self, net: nn.Module, devices: Sequence[torch.device],
                 run: Runner, meaning: Meaning | None = None) -> None:
        self.net, self.devices = plain_network(net), list(devices)
        self._meaning = meaning or Meaning()
        self._run, self._turns = run, Turns(run, self._meaning.turn)
        self._lock = threading.RLock()
        self._arrays: list[dict[int, _Held]] = [{} for _ in devices]
        #: running statistics of each device
        self._own: list[dict[int, _Held]] = [{} for _ in devices]
        self._attributes: list[dict[_Place, _Held]] = [{} for _ in devices]
        self._plan = Plan()
        self._checked: Any = None
        self._tree: Tree | None = None      # of the last pass
        self._last: list[torch.Tensor] = []     # leaves
        self._joint = Joint(self._turns.backward, any(
            d.type != "cpu" for d in devices), self._lock)

    def takes_one_device(self) -> bool:
        """Whether the network itself must be called: the caller supports one
        device only, or parameters are lazy."""
        return on_one_device() or any(map(is_lazy, self.net.parameters()))

    def run(self, calls: Mapping[int, Call], batch: Batch) -> dict[int, Any]:
        """Call the network on several devices.

        Parameters
        ----------
        calls : mapping of int -> (args, kwargs)
            Arguments by device index.
        batch : Batch
            The batch that the calls are parts of.

        Returns
        -------
        dict
            Results of forward on each device. Their backward pass adds the
            sum over the devices to ``.grad`` of the network's parameters.

        Raises
        ------
        RuntimeError
            Forward creates a layer or a parameter, writes to a parameter, or
            stores a tensor outside of the network that a loss then uses.
        """
        with self._lock:
            return self._pass(dict(calls), batch)

    def probe(self, call: Call, device: int) -> Probed | None:
        """See `mgpu.backends.network.Network.probe`."""
        spare = DeviceCopies(self.net, self.devices, self._run, self._meaning)
        with self._lock, torch.random.fork_rng(), torch.no_grad(), \
                self._meaning.probing(device):
            spare._attributes[device] = {
                key: one._replace(value=_clone(one.value,
                                               self.devices[device], {}))
                for key, one in self._attributes[device].items()}
            made = spare._copy(device, self._read(), {}, None, private=True)
            for module in made.modules.values():
                for table in ("_forward_hooks", "_forward_pre_hooks"):
                    vars(module)[table] = OrderedDict(
                        (key, hook) for key, hook in
                        vars(module)[table].items()     # weight_norm has one
                        if _module_of(hook).startswith("torch."))
            args, kwargs = call
            try:
                output = self._meaning.call(device, made.net, args, kwargs)
            except Exception:
                return None
            return Probed(output, lambda place: vars(
                made.modules[place[0]]).get(place[1]))

    def alone(self, args: Any, kwargs: Any) -> Any:
        """Call a deep copy of the network on one device without gradients.
        None if it draws random numbers or cannot be copied."""
        with torch.random.fork_rng(), torch.no_grad():
            before = states()
            try:
                output = copy.deepcopy(self.net)(*args, **kwargs)
            except Exception:
                return None
            return output if states() == before else None

    # -- copies ---------------------------------------------------------------

    def _read(self) -> Tree:
        """The current modules and arrays of the network."""
        tree, self._tree = self._tree, None
        if tree is None or not tree.is_current():
            tree = None         # release objects that only it keeps alive
            tree = Tree(self.net)
        if not tree.has_graphs():
            self._tree = tree
        return tree

    def _overwrite(self, i: int, arrays: Sequence[torch.Tensor],
                   some: bool = False) -> dict[int, Any]:
        """Copy the values of `arrays` to device i. Returns its copies by id.
        `some`: whether the network has other arrays."""
        old, new, made = self._arrays[i], {}, []
        same: tuple[list[Any], list[Any]] = [], []
        written: tuple[list[Any], list[Any]] = [], []
        for x in arrays:
            held, source, now = old.get(id(x)), x.detach(), version(x)
            if held is None or held.original is not x \
                    or held.value.shape != x.shape \
                    or held.value.dtype != x.dtype \
                    or held.value.stride() != x.stride():
                held = _Held(x, now, source.to(self.devices[i], copy=True))
                made.append(held.value)
            else:
                pair = same if held.version == now \
                    and not x.is_inference() else written
                pair[0].append(held.value)
                pair[1].append(source)
                if pair is written:
                    held = _Held(x, now, held.value)
            new[id(x)] = held
        if written[0]:
            # torch raises in backward of a graph that needs the old values.
            torch._foreach_copy_(*written, non_blocking=True)
        if same[0]:     # ``p.data`` may have been written
            with torch.autograd._unsafe_preserve_version_counter(
                    tuple(same[0])):
                torch._foreach_copy_(*same, non_blocking=True)
        self._meaning.allocated(i, made)
        self._arrays[i] = {**old, **new} if some else new
        return {key: held.value for key, held in new.items()}

    def arrays(self, x: torch.Tensor) -> list[torch.Tensor]:
        """See `mgpu.backends.network.Network.arrays`, for the array `x`."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            found = [x]
            for i in range(1, len(self.devices)):
                own = self._own[i].get(id(x))
                found.append(
                    own.value if own is not None and _is_valid(own, x, None)
                    else self._overwrite(i, [x], True)[id(x)])
            return found

    def keep_statistics(self, x: torch.Tensor, values: Sequence[torch.Tensor]
                        ) -> None:
        """Set the running statistic `x` to ``values[i]`` on device i."""
        for i in range(1, len(self.devices)):
            self._own[i][id(x)] = _Held(x, version(x), values[i])

    def forget_statistics(self, x: torch.Tensor) -> None:
        """Let all devices copy the running statistic `x` of the network."""
        for own in self._own:
            own.pop(id(x), None)

    def _values(self, i: int, tree: Tree, private: bool
                ) -> dict[int, torch.Tensor]:
        """Values of the network's arrays on device i, by id."""
        if not private:
            return {key: x.detach() if x.requires_grad else x
                    for key, x in tree.arrays.items()}
        own = {}
        if self._plan.own_statistics:
            own = {key: one.value for key, one in self._own[i].items()
                   if key in tree.arrays
                   and _is_valid(one, tree.arrays[key], None)}
        found = {**own, **self._overwrite(i, [
            x for key, x in tree.arrays.items() if key not in own])}
        return {key: found[key] for key in tree.arrays}

    def _copy(self, i: int, tree: Tree, sources: Sources, batch: Batch | None,
              plain: bool = False, private: bool = False) -> _Copy:
        """Copy the network for device i. `plain`: with the arrays of the
        network. `private`: without sharing its memory."""
        leaves: Sources = {}
        arrays = dict(tree.arrays) if plain \
            else self._values(i, tree, private)
        for key, x in () if plain else tree.arrays.items():
            if isinstance(x, nn.Parameter):
                value = torch.Tensor._make_subclass(type(x), arrays[key],
                                                    x.requires_grad)
                value.__dict__.update(x.__dict__)
                arrays[key] = value
            elif x.requires_grad:
                arrays[key] = arrays[key].detach().requires_grad_()
            if x.requires_grad:
                sources[key], leaves[key] = x, arrays[key]
        modules = {key: object.__new__(type(module))
                   for key, module in tree.by_id.items()}
        memo = Copies({**arrays, **modules})
        originals = Copies({id(memo[key]): x for key, x in (
            *tree.arrays.items(), *tree.by_id.items())})
        for module in tree.modules if tree.compiled else ():    # itself
            if type(module).__name__ == "OptimizedModule":
                memo[id(module)] = memo[id(module._orig_mod)]
        for key, module in tree.by_id.items():
            own = vars(module).copy()
            for table in TABLES:
                own[table] = {name: memo.get(id(x))
                              for name, x in own[table].items()}
            own.pop("_compiled_call_impl", None)
            object.__setattr__(modules[key], "__dict__", own)
        clones: dict[int, Any] = {}
        held: dict[_Place, _Held] = {}
        mutable = tree.values if private else {}
        for place in {**tree.references, **mutable, **self._attributes[i]}:
            key, name = place
            if key not in modules or name not in vars(modules[key]):
                continue
            x = shown = vars(modules[key])[name]
            one = known = self._attributes[i].get(place)
            if one is not None and one.size is None and tree.shares(x):
                one = None      # a view of a parameter, without a version
            elif one is not None and not _is_valid(one, x, batch):
                one = _part(one, x, i, self.devices[i], batch)
            if one is None and place in mutable:
                one = _Held(x, version(x), _clone(x, self.devices[i], clones))
            if known is not None and known.size and _is_valid(known, x, None):
                held[place] = known     # possibly of another batch size
            elif one is not None:
                held[place] = one
            if one is not None:
                x = one.value
            if not plain:
                x = containers.replace(x, is_tensor, functools.partial(
                    _entered, sources, leaves))
            x = redirect(x, memo)
            if one is None and known is not None and not plain \
                    and batch is not None and known.size \
                    and _is_of_other_batch(known, shown, batch):
                start, stop = batch.bounds[i]
                x = of_other_batch(
                    x, known.value, is_tensor,
                    f"{type(modules[key]).__name__}.{name}",
                    (known.size, batch.bounds[-1][1], stop - start),
                    self.devices[i])
            vars(modules[key])[name] = x
        copies = list(modules.values())
        self._meaning.dress(i, copies[0], copies[:len(tree.paths)])
        self._attributes[i] = held
        return _Copy(copies[0], leaves, originals, modules, Contents(copies),
                     {} if plain else arrays,
                     [] if plain else _stamps(arrays.values()))

    # -- attributes and buffers set by forward --------------------------------

    def _check_writes(self, tree: Tree, copies: dict[int, _Copy],
                      changes: dict[int, _Changes]) -> None:
        """Raise RuntimeError if forward has written to a parameter, or
        different values to a buffer on the devices. The buffers of norm
        layers are a device's own."""
        written: set[int] = set()
        for made in copies.values():
            stamps = _stamps(made.arrays.values())
            if stamps != made.stamps:
                written |= {key for key, old, new in zip(
                    made.arrays, made.stamps, stamps) if new != old}
        places = {place for one in changes.values() for place in one.buffers}
        # Through ``x.data`` writes are not counted.
        buffers = tree.buffers_on_cpu if len(copies) > 1 else set()
        if not (written or places or buffers):
            return
        for key in written:
            if isinstance(tree.arrays[key], nn.Parameter):
                raise RuntimeError(
                    f"forward writes to the parameter {self._name_of(key)}, "
                    "as nn.Embedding(max_norm=) does: each device would write "
                    "for its own examples. Write to it outside of forward.")
        values = [(key, "", [made.arrays[key] for made in copies.values()])
                  for key in (written | buffers) - tree.of_norms]
        values += [(0, name, [one.buffers.get((key, name))
                              for one in changes.values()])
                   for key, name in places]
        for key, name, (x, *others) in values:
            if not all(is_tensor(x) and is_tensor(y) and _are_alike(
                    x, strict.moved(y, x)) for y in others):
                raise RuntimeError(
                    f"forward updates the buffer {name or self._name_of(key)} "
                    "from the examples of its device, and the devices' values "
                    "differ. Update it outside of forward, from the joined "
                    "outputs.")

    def _name_of(self, key: int) -> str:
        """Name of the network's array with this id."""
        return next((name for name, x in (*self.net.named_parameters(),
                                          *self.net.named_buffers())
                     if id(x) == key), "that an attribute has")

    def _commit(self, tree: Tree, changes: dict[int, _Changes], batch: Batch
                ) -> None:
        """Set the attributes of the network: joined like outputs, or the
        value of device 0. Each device keeps its own value."""
        first = min(changes)
        places = {place: None for i in changes
                  for place in changes[i].attributes}
        for place in places:
            module, name = tree.by_id[place[0]], place[1]
            values = {i: c.attributes[place] for i, c in changes.items()
                      if place in c.attributes}
            shown, size = values.get(first), None
            if len(values) == len(changes) and len(self.devices) > 1 \
                    and not any(x is _MISSING for x in values.values()) \
                    and containers.arrays_in(shown, is_tensor):
                with contextlib.suppress(ValueError):
                    shown = batch.join(
                        list(values.values()),
                        f"{type(module).__name__}.{name}", place)
                    size = batch.bounds[-1][1]
            if shown is _MISSING:
                vars(module).pop(name, None)
            elif first in values:
                vars(module)[name] = shown
            for i, x in values.items():
                if x is not _MISSING and (i or size is not None):
                    self._attributes[i][place] = _Held(
                        vars(module).get(name), 0, x, size)
        for (key, name), x in changes[first].buffers.items():
            tree.by_id[key]._buffers[name] = x
        for i, held in enumerate(self._attributes):
            for place, one in list(held.items()):
                now = version(one.original)
                if i and i not in changes and one.version != now:
                    del held[place]     # without examples
                else:       # written in place on device 0
                    held[place] = one._replace(version=now)

    def _commit_buffers(self, tree: Tree, copies: dict[int, _Copy]) -> None:
        """Copy buffers written by the first device to the network."""
        first = min(copies)
        if first:
            values = copies[first].arrays.values()
            # torch's batch norm does not increment their version.
            uncounted = {id(x) for x in tree.statistics
                         if self._plan.own_statistics}
            for x, value, old, new in zip(
                    tree.arrays.values(), values, copies[first].stamps,
                    _stamps(values), strict=True):
                if (new != old or id(x) in uncounted) \
                        and value.shape == x.shape \
                        and not isinstance(x, nn.Parameter):
                    x.copy_(value)
        if not self._plan.own_statistics:
            return
        for i in range(1, len(self.devices)):
            for x in tree.statistics:
                if i in copies:
                    self._own[i][id(x)] = _Held(
                        x, version(x), copies[i].arrays[id(x)])
                    self._arrays[i].pop(id(x), None)
                else:
                    self._own[i].pop(id(x), None)

    # -- passes ---------------------------------------------------------------

    def _pass(self, calls: dict[int, Any], batch: Batch) -> dict[int, Any]:
        active = list(calls)
        self._check_last()
        recorded = torch.is_grad_enabled() \
            and not torch.is_inference_mode_enabled()
        plain = active == [0]       # no boundary: the leaves of the network
        tree, sources = self._read(), Sources()
        plan = self._plan = self._meaning.begin(active, tree)
        compiled, together = tree.compiled or plan.compiles, plan.together
        forward = functools.partial(self._turns.forward, (
            tree.key, plan.mode), batch.bounds[-1][1], compiled, together)
        if len(self.devices) == 1 and together is None \
                and not tree.compiled and not plan.dresses:
            (args, kwargs), sizes = calls[0], tree.sizes()
            results = forward({0: functools.partial(
                self._meaning.call, 0, self.net, args, kwargs)})
            if tree.sizes() != sizes:
                raise made_more(self.net)
            return dict(enumerate(results))
        with torch.inference_mode(False), torch.no_grad():
            copies = {i: self._copy(i, tree, sources, batch, plain, i > 0)
                      for i in active}
        if recorded and not plain:
            for i in active:
                calls[i] = containers.replace(
                    calls[i], is_tensor, functools.partial(
                        _entered, sources, copies[i].leaves))
        outputs = dict(zip(active, forward({i: functools.partial(
            self._meaning.call, i, copies[i].net, *calls[i])
            for i in active}), strict=True))
        changes = {i: _changes(tree, copies[i]) for i in active}
        self._check_writes(tree, copies, changes)
        ended = functools.partial(self._ended, tree, copies, batch, compiled)
        if recorded and plain:
            outputs[0] = _kept(outputs[0], ended)
        elif recorded:
            self._join(tree, sources, copies, outputs, changes,
                       together is not None, ended)
        self._commit(tree, changes, batch)
        with torch.inference_mode(False), torch.no_grad():
            self._commit_buffers(tree, copies)
        return outputs

    def _join(self, tree: Tree, sources: Sources, copies: dict[int, _Copy],
              outputs: dict[int, Any], changes: dict[int, _Changes],
              connected: bool, ended: Ended) -> None:
        """Connect outputs and attributes with the network's tensors."""
        graphs = {i: DeviceGraph(copies[i].leaves, *_roots(
            tree, output, changes[i]), connected)
            for i, output in outputs.items()}
        if self._checked != tree.key:
            self._check_references(graphs, tree)
        self._last = [leaf for graph in graphs.values()
                      for leaf in graph.leaves.values()]
        joined = self._joint.connect(graphs, _reached(graphs, sources), ended)
        for i in outputs:
            take = functools.partial(_next_of, joined[i], tree.arrays)
            outputs[i] = containers.replace(outputs[i], is_tensor, take)
            for place, x in changes[i].attributes.items():
                changes[i].attributes[place] = containers.replace(
                    x, is_tensor, take)

    def _ended(self, tree: Tree, copies: dict[int, _Copy], batch: Batch,
               compiled: bool, last: bool) -> None:
        """After a backward pass: set attributes that its hooks have set.
        After the `last` one, the copies share the attributes of the network,
        except `compiled` ones, which are reused."""
        if not all(made.contents.are_same() for made in copies.values()):
            self._commit(tree, {i: _changes(tree, made)
                                for i, made in copies.items()}, batch)
        for made in copies.values() if last and not compiled else ():
            for key, module in tree.by_id.items():
                object.__setattr__(made.modules[key], "__dict__",
                                   vars(module))

    # -- checks ---------------------------------------------------------------

    def _check_last(self) -> None:
        if not self._joint.running \
                and any(leaf.grad is not None for leaf in self._last):
            self._last = []
            raise RuntimeError(
                "a loss of the last pass used a tensor that forward stored in "
                "a list, a hook or a closure: its gradient did not reach the "
                "network. Return the tensor from forward.")

    def _check_references(self, graphs: dict[int, DeviceGraph], tree: Tree
                          ) -> None:
        """Raise RuntimeError if forward uses parameters of the network
        instead of those of its copy."""
        last = max(graphs)
        found = set(map(id, read(graphs[last].roots)[0])) if last else ()
        for name, p in self.net.named_parameters():
            if id(p) in found:
                raise RuntimeError(
                    f"forward uses {name} of the network itself on device "
                    f"{last}, through a global variable or an object. Use it "
                    "as an attribute of the module.")
        self._checked = tree.key


def _module_of(hook: Any) -> str:
    return str(getattr(hook, "__module__", type(hook).__module__))


def _are_alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether `x` and `y` are equal up to rounding, NaN included."""
    if torch.equal(x, y) or x.shape != y.shape or not x.is_floating_point():
        return torch.equal(x, y)
    digits = 1e-10 if x.dtype == torch.float64 else 1e-5
    finite = x[x.isfinite()].abs()
    bound = digits * float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(x, y, digits, bound, equal_nan=True)


def _is_valid(one: _Held, x: Any, batch: Batch | None) -> bool:
    """Whether a device's value is valid for the network's value `x`."""
    return one.original is x and one.version == version(x) and (
        one.size is None or batch is None or one.size == batch.bounds[-1][1])


def _part(one: _Held, x: Any, i: int, device: torch.device,
          batch: Batch | None) -> _Held | None:
    """A device's part of a value that the user has set instead of a joined
    one. None if the value is used by all devices."""
    if batch is None or one.size is None \
            or _is_of_other_batch(one, x, batch) \
            or not containers.have_form(x, one.original, is_tensor, one.size,
                                        batch.bounds[-1][1]):
        return None
    start, stop = batch.bounds[i]
    return _Held(x, version(x), batch.split_like(
        x, one.original, one.value, start, stop, device), batch.bounds[-1][1])


def _is_of_other_batch(one: _Held, x: Any, batch: Batch | None) -> bool:
    """Whether `x` was set by a batch of another size."""
    return batch is not None and one.original is x \
        and one.size not in (None, batch.bounds[-1][1])


def _recorded(x: Any) -> list[torch.Tensor]:
    return [t for t in containers.arrays_in(x, is_tensor) if t.requires_grad]


def _entered(sources: Sources, leaves: Sources, x: torch.Tensor
             ) -> torch.Tensor:
    """The leaf of a device for an input or attribute that requires a
    gradient."""
    if not x.requires_grad or id(x) in leaves:
        return leaves.get(id(x), x)
    sources[id(x)] = x
    leaf = leaves[id(x)] = x.detach().requires_grad_()
    return leaf if x.is_leaf or not torch.is_grad_enabled() \
        else Alias.apply(leaf)


def _reached(graphs: dict[int, DeviceGraph], sources: Sources) -> Sources:
    """`sources` without inputs and attributes that no root depends on. A
    backward pass would run the graphs of these."""
    if all(isinstance(x, nn.Parameter) for x in sources.values()):
        return sources
    found = {id(x) for graph in graphs.values() for x in read(graph.roots)[0]}
    return {key: x for key, x in sources.items()
            if isinstance(x, nn.Parameter) or any(
                id(graph.leaves.get(key)) in found
                for graph in graphs.values())}


def _clone(x: Any, device: torch.device, memo: dict[int, Any]) -> Any:
    """Copy tensors, NumPy arrays and containers to a device. Other objects
    are shared."""
    if id(x) in memo:
        return memo[id(x)]
    if isinstance(x, torch.Tensor):
        new = x.detach().to(device, copy=True)
    elif isinstance(x, (np.ndarray, bytearray, set)):
        new = x.copy()
    else:
        found = containers.parts(x)
        if found is None:
            return x
        new = containers.rebuild(x, found[0], [
            _clone(value, device, memo) for value in found[1]])
    memo[id(x)] = new
    return new


def _changes(tree: Tree, copy: _Copy) -> _Changes:
    """Attributes and buffers set in `copy` since the last call."""
    found = _Changes({}, {})
    if copy.contents.are_same():
        return found
    for (key, module), (before, parameters, buffers, modules) in zip(
            tree.by_id.items(), copy.contents.before(), strict=True):
        after = vars(copy.modules[key])
        for table, former in (("_modules", modules),
                              ("_parameters", parameters)):
            if len(after[table]) != len(vars(module)[table]):
                raise made_more(module)
            for name, x in former.items():
                if after[table].get(name) is not x:
                    raise RuntimeError(
                        f"forward of {type(module).__name__} replaces its "
                        f"parameter or layer {name!r} on several devices. "
                        "Replace it outside of forward.")
        for own, old, new in ((found.attributes, before, after),
                              (found.buffers, buffers, after["_buffers"])):
            own.update({(key, name): redirect(x, copy.originals)
                        for name, x in new.items()
                        if old.get(name, _MISSING) is not x})
        found.attributes.update({(key, name): _MISSING for name in before
                                 if name not in after})
    copy.contents.read()
    return found


def _roots(tree: Tree, output: Any, changes: _Changes
           ) -> tuple[list[torch.Tensor], list[str | None]]:
    """The tensors of a pass that require a gradient, and the names of those
    in attributes."""
    roots = _recorded(output)
    names: list[str | None] = [None] * len(roots)
    for (key, name), x in changes.attributes.items():
        more = [t for t in _recorded(x) if id(t) not in tree.arrays]
        roots += more
        names += [f"{type(tree.by_id[key]).__name__}.{name}"] * len(more)
    return roots, names


def _next_of(joined: Iterator[torch.Tensor], own: Mapping[int, Any],
             x: torch.Tensor) -> torch.Tensor:
    """The joined tensor for `x`. The network's `own` arrays stay."""
    return next(joined) if x.requires_grad and id(x) not in own else x


def _kept(output: Any, ended: Ended) -> Any:
    """`output`, with `ended` called after each of its backward passes."""
    roots = [x for x in _recorded(output) if not x.is_leaf]
    found = keep(roots, ended=ended)[0] if roots else iter(())
    return containers.replace(
        output, is_tensor, lambda x: x if x.is_leaf else next(found))
