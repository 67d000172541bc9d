"""Forward and backward passes of a network on several devices.

The network is the only state. Each pass makes a shallow copy of the module
tree for each device, with private leaves for parameters. Those of device 0
share the memory of the network; those of other devices are overwritten with
its values.
"""
import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mgpu.backends import containers
from mgpu.backends._torch import strict
from mgpu.backends._torch.boundary import (Alias, DeviceGraph, Ended, Joint,
                                           Runner, Sources, keep)
from mgpu.backends._torch.graph import read
from mgpu.backends._torch.meaning import Meaning, Plan
from mgpu.backends._torch.states import (MISSING, Changes, DeviceArrays,
                                         DeviceAttributes)
from mgpu.backends._torch.streams import Turns, states
from mgpu.backends._torch.tree import (TABLES, Contents, Copies, Tree,
                                       is_tensor, made_more, plain_network,
                                       redirect)
from mgpu.backends._workers import inside_worker
from mgpu.backends.containers import Batch, Call, Probed


class _Copy(NamedTuple):
    """Copy of a network for one device and one pass."""

    net: nn.Module
    leaves: dict[int, torch.Tensor]
    originals: Copies               # id of a copy -> original
    modules: dict[int, nn.Module]   # id of an original -> copy
    contents: Contents              # before the pass
    arrays: dict[int, torch.Tensor]     # id of an original -> copy
    stamps: list[tuple[int, int]]   # of `arrays`

    def written(self) -> set[int]:
        """The ids of the originals of arrays written since `stamps`."""
        return {key for key, old, new in zip(
            self.arrays, self.stamps, _stamps(self.arrays.values()),
            strict=True) if new != old}


def _stamps(arrays: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Version and address of arrays, which change with writes."""
    return [(0 if x.is_inference() else x._version, x.data_ptr())
            for x in arrays]


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
        self._arrays = DeviceArrays(self.devices, self._meaning.allocated)
        self._attributes = DeviceAttributes(self.devices)
        self._plan = Plan()
        self._checked: Any = None
        self._tree: Tree | None = None      # of the last pass
        self._last: list[torch.Tensor] = []     # leaves
        self._joint = Joint(self._turns.backward, any(
            d.type != "cpu" for d in devices), self._lock)

    def takes_one_device(self) -> bool:
        """Whether the network itself must be called: in the pass of a device,
        torch.func, forward-mode derivatives, tracing or compilation, or if
        parameters are lazy."""
        return (inside_worker() or torch.compiler.is_compiling()
                or torch._C._functorch.peek_interpreter_stack() is not None
                or torch.autograd.forward_ad._current_level >= 0
                or torch.jit.is_tracing()
                or any(map(is_lazy, self.net.parameters())))

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
            spare._attributes = self._attributes.copy_of(device)
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

    def arrays(self, x: torch.Tensor) -> list[torch.Tensor]:
        """See `mgpu.backends.network.Network.arrays`, for the array `x`."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            return self._arrays.of(x)

    def keep_statistics(self, x: torch.Tensor,
                        values: Sequence[torch.Tensor] = ()) -> None:
        """Set the running statistic `x` to ``values[i]`` on device i; without
        values, let all devices copy that of the network."""
        self._arrays.keep(x, dict(enumerate(values)))

    def _copy(self, i: int, tree: Tree, sources: Sources, batch: Batch | None,
              plain: bool = False, private: bool = False) -> _Copy:
        """Copy the network for device i. `plain`: with the arrays of the
        network. `private`: without sharing its memory."""
        leaves: Sources = {}
        arrays = dict(tree.arrays)
        if private:
            arrays = self._arrays.overwrite(i, arrays,
                                            self._plan.own_statistics)
        elif not plain:
            arrays = {key: x.detach() if x.requires_grad else x
                      for key, x in arrays.items()}
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
        for (key, name), (x, lacks) in self._attributes.begin(
                i, tree, batch, private).items():
            if not plain:
                x = containers.replace(x, is_tensor, functools.partial(
                    _entered, sources, leaves))
            x = redirect(x, memo)
            vars(modules[key])[name] = lacks(x) if lacks and not plain else x
        copies = list(modules.values())
        self._meaning.dress(i, copies[0], copies[:len(tree.paths)])
        return _Copy(copies[0], leaves, originals, modules, Contents(copies),
                     {} if plain else arrays,
                     [] if plain else _stamps(arrays.values()))

    # -- attributes and buffers set by forward --------------------------------

    def _check_writes(self, tree: Tree, copies: dict[int, _Copy],
                      changes: dict[int, Changes]) -> None:
        """Raise RuntimeError if forward has written to a parameter, or
        different values to a buffer on the devices. The buffers of norm
        layers are a device's own."""
        written = {key for made in copies.values() for key in made.written()}
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

    def _commit_buffers(self, tree: Tree, copies: dict[int, _Copy]) -> None:
        """Copy buffers written by the first device to the network, and keep
        the running statistics of the others."""
        first = copies[min(copies)]
        # torch's batch norm does not increment their version.
        statistics = tree.statistics if self._plan.own_statistics else []
        if 0 not in copies:
            for key in first.written().union(map(id, statistics)):
                if first.arrays[key].shape == tree.arrays[key].shape:
                    tree.arrays[key].copy_(first.arrays[key])
        for x in statistics:
            self._arrays.keep(x, {i: made.arrays[id(x)]
                                  for i, made in copies.items() if i})

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
        self._attributes.end(tree, changes, batch)
        with torch.inference_mode(False), torch.no_grad():
            self._commit_buffers(tree, copies)
        return outputs

    def _join(self, tree: Tree, sources: Sources, copies: dict[int, _Copy],
              outputs: dict[int, Any], changes: dict[int, Changes],
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
            self._attributes.end(tree, {
                i: _changes(tree, made) for i, made in copies.items()}, batch)
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


def _changes(tree: Tree, copy: _Copy) -> Changes:
    """Attributes and buffers set in `copy` since the last call."""
    found = Changes({}, {})
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
                        if old.get(name, MISSING) is not x})
        found.attributes.update({(key, name): MISSING for name in before
                                 if name not in after})
    copy.contents.read()
    return found


def _roots(tree: Tree, output: Any, changes: Changes
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
