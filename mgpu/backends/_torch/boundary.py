"""An autograd node between a network and the graphs of its devices.

The forward pass of each device records a separate graph, from *leaves*
(private copies of parameters and inputs) to *roots* (the results). The node
`_Boundary` has the tensors of the network as inputs (*sources*) and the roots
of all devices as outputs. Its backward pass runs the graphs of the devices in
parallel, and returns the sums over the devices. From outside, this is plain
autograd.
"""
import weakref
from collections.abc import (Callable, Collection, Iterable, Iterator,
                             Mapping, Sequence)
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from mgpu.backends._torch import strict
from mgpu.backends._torch.graph import nodes

_TOKEN = torch.empty(0)

#: run(thunks) returns the results of thunks, one per device. For thunks that
#: wait for each other, run(thunks, turn) runs one at a time, number n inside
#: turn(n)
Runner = Callable[..., list[Any]]
#: ended(last): called after a backward pass; `last`: no other can follow
Ended = Callable[[bool], None]
#: input tensors of the boundary, by id
Sources = dict[int, torch.Tensor]


@dataclass
class DeviceGraph:
    """The recorded graph of one device's pass.

    Attributes
    ----------
    leaves : dict
        Id of a source -> leaf of the device.
    roots : list of Tensor
    names : list of str or None
        For roots that forward set as attributes, the name.
    connected : bool
        Whether it is connected with the graphs of other devices, by
        synchronized batch statistics.
    retained : bool
        Whether it is part of another graph that runs later, and not freed.
    """

    leaves: dict[int, torch.Tensor]
    roots: list[torch.Tensor]
    names: list[str | None] = field(default_factory=list)
    connected: bool = False
    retained: bool = False


class _Hold:
    """Object that autograd keeps alive as long as the buffers of a device's
    graph."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph


@dataclass
class Joint:
    """Runs the graphs of a network's devices.

    Attributes
    ----------
    run : callable
        ``run(devices, thunks)`` returns the results of thunks, one for each
        device index.
    one_call : bool
        Whether to run all devices in one call of autograd: on GPUs, where
        autograd has a thread for each device.
    lock : context manager
        Block in which no pass writes to the devices' copies.
    running : bool
        Whether a backward pass is accumulating in leaves. Remains True after
        an interrupt before the leaves are cleared.
    """

    run: Callable[[Sequence[int], Sequence[Any]], list[Any]]
    one_call: bool
    lock: AbstractContextManager[Any]
    running: bool = False

    def connect(self, graphs: Mapping[int, DeviceGraph], sources: Sources,
                ended: Ended | None = None
                ) -> dict[int, Iterator[torch.Tensor]]:
        """The roots of all devices as outputs of one node with inputs
        `sources`. `ended` is called after each of its backward passes."""
        found: dict[int, Iterator[torch.Tensor]] = {
            i: iter(()) for i in graphs}
        ready: dict[int, Any] = {}
        holds: dict[int, weakref.ref[_Hold]] = {}
        roots = {i: graph.roots for i, graph in graphs.items() if graph.roots}
        if roots:
            joined = iter(_Boundary.apply(self, roots, holds, ready, ended,
                                          *sources.values()))
            for i in roots:
                found[i], holds[i] = keep(
                    [*islice(joined, len(roots[i]))], graphs[i], ready, i)
        return found

    def sums(self, work: dict[int, tuple[DeviceGraph, Any, bool]],
             sources: Sources) -> list[torch.Tensor | None]:
        """Gradients of `sources`, summed in the order of the devices."""
        graphs = [graph for graph, *_ in work.values()]
        self.running = True
        try:
            if self.one_call or any(graph.connected for graph in graphs):
                _run(work.values())
            else:
                self.run(list(work), [partial(_run, [one])
                                      for one in work.values()])
            return _added([(key, leaf.grad) for graph in graphs
                           for key, leaf in graph.leaves.items()], sources)
        finally:        # clear the leaves, also after an error
            for graph in graphs:
                for leaf in graph.leaves.values():
                    leaf.grad = None
            self.running = False

    def differentiable_sums(
            self, work: dict[int, tuple[DeviceGraph, Any, bool]],
            sources: Sources) -> list[torch.Tensor | None]:
        """`sums`, recorded (``create_graph=True``): the derivative of each
        device is a graph behind another boundary.

        Raises
        ------
        RuntimeError
            The graphs are connected.
        """
        if any(graph.connected for graph, *_ in work.values()):
            raise RuntimeError("batch_norm='sync' has no second derivatives. "
                               "Use batch_norm='per_device'.")
        inputs = dict(sources)
        leaves = {i: dict(graph.leaves) for i, (graph, *_) in work.items()}

        def entered(i: int, h: Any) -> Any:
            if h is None or not h.requires_grad:
                return h
            inputs[id(h)] = h
            leaf = leaves[i][id(h)] = h.detach().requires_grad_()
            return leaf

        def thunk(graph: DeviceGraph, heads: list[Any]) -> Any:
            roots, given = _reached(graph.roots, heads)
            return torch.autograd.grad(
                roots, [*graph.leaves.values()], given, create_graph=True,
                allow_unused=True)
        found = self.run(list(work), [
            partial(thunk, graph, [entered(i, h) for h in heads])
            for i, (graph, heads, _) in work.items()])
        outer = self.connect({i: DeviceGraph(
            leaves[i], [g for g in given if g is not None and g.requires_grad],
            retained=True) for i, given in zip(work, found)}, inputs)
        return _added([
            (key, next(outer[i]) if g is not None and g.requires_grad else g)
            for (i, (graph, *_)), given in zip(work.items(), found)
            for key, g in zip(graph.leaves, given, strict=True)], sources)


class _Boundary(torch.autograd.Function):
    """Sources -> roots of all devices."""

    @staticmethod
    def forward(ctx: Any, joint: Joint, roots: Mapping[int, Any],
                holds: Mapping[int, Any], ready: dict[int, Any],
                ended: Ended | None, *sources: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.joint, ctx.holds, ctx.ready = joint, holds, ready
        ctx.ended, ctx.sources = ended, {id(x): x for x in sources}
        ctx.counts = {i: len(own) for i, own in roots.items()}
        return tuple(root.detach() for own in roots.values() for root in own)

    @staticmethod
    def backward(ctx: Any, *heads: Any) -> Any:
        work, left = {}, iter(heads)
        for i, count in ctx.counts.items():
            given = [*islice(left, count)]
            if any(h is not None for h in given):
                graph = ctx.ready.pop(i)
                # A living hold means `retain_graph`, which nodes cannot read.
                work[i] = graph, given, graph.retained \
                    or ctx.holds[i]() is not None
        _check_attributes(work, len(ctx.counts))
        run = ctx.joint.differentiable_sums if torch.is_grad_enabled() \
            else ctx.joint.sums
        with ctx.joint.lock:
            totals = run(work, ctx.sources)
            if ctx.ended is not None:
                last = all(hold() is None for hold in ctx.holds.values())
                ctx.ended(last)
                if last:
                    ctx.ended = None
        for source, total in zip(ctx.sources.values(), totals, strict=True):
            if total is None:
                _call_hooks_if_reached(source)
        return None, None, None, None, None, *totals


def keep(roots: Sequence[torch.Tensor], graph: DeviceGraph | None = None,
         ready: dict[int, Any] | None = None, i: int = 0,
         ended: Ended | None = None
         ) -> "tuple[Iterator[torch.Tensor], weakref.ref[_Hold]]":
    """Put `roots` behind a node that sets ``ready[i]`` to `graph` in a
    backward pass. Also returns a reference that dies when no other backward
    pass can follow. `ended` is called after each."""
    hold, ready = _Hold(graph), {} if ready is None else ready
    alive = weakref.ref(hold)

    def unpack(hold: _Hold) -> torch.Tensor:
        ready[i] = hold
        return _TOKEN
    # Only autograd refers to the hold: once it is released, the graph is not
    # used again, and its buffers are freed.
    with saved_tensors_hooks(lambda _: hold, unpack):
        return iter(_Keep.apply(ready, i, None if ended is None else lambda:
                                ended(alive() is None), *roots)), alive


class _Keep(torch.autograd.Function):
    """Identity on the roots of one device. In a backward pass it runs before
    the boundary, and passes the device's graph to it."""

    @staticmethod
    def forward(ctx: Any, ready: dict[int, Any], i: int,
                ended: Callable[[], None] | None, *roots: torch.Tensor
                ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.ready, ctx.i, ctx.ended, ctx.spare = ready, i, ended, None
        ctx.save_for_backward(_TOKEN)
        return tuple(root.detach() for root in roots)

    @staticmethod
    def backward(ctx: Any, *heads: Any) -> Any:
        if ctx.ended is not None:
            _call_afterwards(ctx.ended)
        # A loss of other devices runs this node too, with None, and torch
        # may then release its saved tensors.
        unused = all(h is None for h in heads)
        if ctx.spare is None:
            try:
                _ = ctx.saved_tensors       # calls `unpack`
            except RuntimeError:        # of torch, in a second pass
                if unused:
                    return None, None, None, *heads
                raise
            ctx.spare = ctx.ready.pop(ctx.i)
        if not unused:
            ctx.ready[ctx.i], ctx.spare = ctx.spare.graph, None
        return None, None, None, *heads


def devices_of(loss: torch.Tensor) -> set[int]:
    """Indices of the devices whose outputs a loss depends on."""
    return {node.i for node in nodes([loss])[0]
            if type(node) is _Keep._backward_cls}


class Alias(torch.autograd.Function):
    """Alias of a tensor that is neither a leaf nor a view, so that a forward
    pass may write to it in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def _run(work: Collection[tuple[DeviceGraph, Any, bool]]) -> None:
    """Run one backward pass of several graphs."""
    roots, heads = _reached(
        [root for graph, *_ in work for root in graph.roots],
        [head for _, heads, _ in work for head in heads])
    torch.autograd.backward(roots, heads,
                            retain_graph=any(keeps for *_, keeps in work))


def _reached(roots: Sequence[torch.Tensor], heads: Sequence[Any]
             ) -> tuple[list[torch.Tensor], list[Any]]:
    """The roots that have a gradient, and their gradients."""
    at = [n for n, head in enumerate(heads) if head is not None]
    return [roots[n] for n in at], [heads[n] for n in at]


def _added(parts: Iterable[tuple[int, torch.Tensor | None]], sources: Sources
           ) -> list[torch.Tensor | None]:
    """Sum the parts of each source, in new memory: autograd does not copy the
    result, and gradients of leaves may be views of each other."""
    totals: dict[int, Any] = dict.fromkeys(sources)
    for key, g in parts:
        if g is not None and key in totals:
            total, g = totals[key], strict.moved(g, sources[key])
            totals[key] = g if total is None else g + total \
                if total.is_sparse and not g.is_sparse else total + g
    return list(totals.values())


def _check_attributes(work: Mapping[int, tuple[DeviceGraph, Any, bool]],
                      devices: int) -> None:
    """Raise RuntimeError for a loss on an attribute that has the value of one
    device."""
    if devices == 1 or 0 not in work:
        return
    graph, heads, _ = work[0]
    for n, name in enumerate(graph.names):
        if name and heads[n] is not None and not any(
                name in other.names
                and given[other.names.index(name)] is not None
                for i, (other, given, _) in work.items() if i):
            raise RuntimeError(
                f"the loss uses {name}, which forward has set: it has the "
                "value of the first device's examples only. Return it from "
                "forward.")


def _call_hooks_if_reached(x: torch.Tensor) -> None:
    """For the rest of this backward pass, call the hooks of `x` only if a
    gradient has reached it. Torch would call the hooks of all inputs of a
    node."""
    grad = x.grad
    count = None if grad is None else grad._version

    def is_new(_: Any) -> bool:
        return x.grad is not grad or grad is not None \
            and grad._version != count
    for hooks, reached in ((x._backward_hooks, lambda g: g is not None),
                           (x._post_accumulate_grad_hooks, is_new)):
        if hooks:
            before = dict(hooks)
            during = {key: partial(_call_if, reached, hook)
                      for key, hook in before.items()}
            _call_afterwards(partial(_restore, hooks, before, during))
            hooks.update(during)


def _call_if(reached: Callable[[Any], bool], hook: Any, x: Any) -> Any:
    return hook(x) if reached(x) else None


def _restore(hooks: dict[int, Any], before: dict[int, Any],
             during: dict[int, Any]) -> None:
    hooks.update((key, hook) for key, hook in before.items()
                 if hooks.get(key) is during[key])


def _call_afterwards(function: Callable[[], None]) -> None:
    """Call `function` at the end of this backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
