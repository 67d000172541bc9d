"""One autograd node between a network and the graphs of its devices.

Each device's forward pass records a graph of its own, from *leaves* (its
private copies of parameters and inputs) to *roots* (what it returns). The
node `_Boundary` has the network's own tensors as inputs (*sources*) and the
roots of all devices as outputs. Its backward pass runs the devices' graphs,
at the same time, and returns the sums over the devices. To everything outside
of it, this is plain autograd.
"""
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from mgpu.backends._torch import strict
from mgpu.backends._torch.graph import nodes

_TOKEN = torch.empty(0)

#: run(thunks): the results of thunks, one for each device. Where they wait
#: for each other, run(thunks, turn) lets one run at a time, number n inside
#: of turn(n)
Runner = Callable[..., list[Any]]
#: ended(last): a backward pass has ended; `last`: there can be no other
Ended = Callable[[bool], None]


class Running:
    """Whether a backward pass adds to leaves now. It stays so where an
    interrupt comes before they are empty again."""

    now = False


@dataclass
class DeviceGraph:
    """What one device's pass has recorded.

    Attributes
    ----------
    leaves : dict
        Index of a source -> the device's leaf for it.
    roots : list of Tensor
    names : list of str or None
        Of the roots that forward left in an attribute: its name.
    connected : bool
        It is one with those of the other devices, by joint statistics.
    retained : bool
        A part of another graph, which runs later: it is not freed.
    running : Running
        Whether its backward pass is running.
    """

    leaves: dict[int, torch.Tensor]
    roots: list[torch.Tensor]
    names: list[str | None] = field(default_factory=list)
    connected: bool = False
    retained: bool = False
    running: Running = field(default_factory=Running)


class _Hold:
    """Lives as long as autograd keeps the buffers of a device's graph."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph


class Sources(list[torch.Tensor]):
    """Tensors that go into the boundary, each once."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(tensors)
        self._at = {id(x): n for n, x in enumerate(tensors)}

    def index_of(self, x: torch.Tensor) -> int:
        """The index of `x`, which is appended where it is new."""
        n = self._at.setdefault(id(x), len(self))
        if n == len(self):
            self.append(x)
        return n


class Joint:
    """How the graphs of a network's devices are run.

    Parameters
    ----------
    run : callable
        ``run(devices, thunks)``: the results of thunks, one for each of the
        devices with these numbers.
    one_call : bool
        Run all devices in one call of autograd: on GPUs, where autograd has a
        thread for each device and threads of ours would wait for it.
    locked : callable
        Gives a block in which no pass writes to the devices' copies.
    """

    def __init__(self, run: Callable[[Sequence[int], Sequence[Any]],
                                     list[Any]], one_call: bool,
                 locked: Callable[[], AbstractContextManager[Any]]) -> None:
        self.run, self.one_call, self.locked = run, one_call, locked

    def connect(self, graphs: Mapping[int, DeviceGraph],
                sources: Sequence[torch.Tensor], ended: Ended | None = None
                ) -> dict[int, Iterator[torch.Tensor]]:
        """The roots of all devices as outputs of one node over `sources`;
        `ended` is called behind each of its backward passes."""
        holds = {i: _Hold(graph) for i, graph in graphs.items()
                 if graph.roots}
        found: dict[int, Iterator[torch.Tensor]] = {
            i: iter(()) for i in graphs}
        if not holds:
            return found
        ready: dict[int, _Hold | DeviceGraph] = {}
        joined = _Boundary.apply(self, holds, ready, ended, *sources)
        at = 0
        for i in list(holds):
            # autograd alone keeps the hold: once it drops it, nobody asks
            # for this graph again, and its buffers are freed.
            hold, count = holds.pop(i), len(graphs[i].roots)

            def pack(_: Any, hold: _Hold = hold) -> _Hold:
                return hold

            def unpack(hold: _Hold, i: int = i) -> torch.Tensor:
                ready[i] = hold
                return _TOKEN
            with saved_tensors_hooks(pack, unpack):
                found[i] = iter(_Keep.apply(ready, i, *joined[at:at + count]))
            del hold, pack
            at += count
        return found

    def sums(self, work: dict[int, tuple[DeviceGraph, Any, bool]],
             sources: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of `sources`, added in the order of the devices."""
        def thunk(i: int) -> None:
            graph, heads, keep = work[i]
            pairs = _pairs(graph, heads)
            torch.autograd.backward([r for r, _ in pairs],
                                    [h for _, h in pairs], retain_graph=keep)
        for graph, *_ in work.values():
            graph.running.now = True
        try:
            if self.one_call or any(g.connected for g, *_ in work.values()):
                pairs = [pair for graph, heads, _ in work.values()
                         for pair in _pairs(graph, heads)]
                torch.autograd.backward(
                    [r for r, _ in pairs], [h for _, h in pairs],
                    retain_graph=any(keep for *_, keep in work.values()))
            else:
                self.run(list(work), [partial(thunk, i)
                                      for i in work])
            totals: list[torch.Tensor | None] = [None] * len(sources)
            for graph, *_ in work.values():
                for n, leaf in graph.leaves.items():
                    totals[n] = _plus(totals[n], leaf.grad, sources[n])
            return totals
        finally:        # also after an error nothing is left in the leaves
            for graph, *_ in work.values():
                for leaf in graph.leaves.values():
                    leaf.grad = None
                graph.running.now = False

    def differentiable_sums(
            self, work: dict[int, tuple[DeviceGraph, Any, bool]],
            sources: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """`sums` that are recorded (``create_graph=True``): each device's
        derivative is a graph behind a boundary of its own.

        Raises
        ------
        RuntimeError
            Graphs that are connected.
        """
        if any(graph.connected for graph, *_ in work.values()):
            raise RuntimeError("batch_norm='sync' has no second derivatives. "
                               "Use batch_norm='per_device'.")
        inputs = Sources(sources)
        count = len(sources)
        leaves: dict[int, dict[int, torch.Tensor]] = {}
        heads: dict[int, list[Any]] = {}
        for i, (graph, given, _) in work.items():
            leaves[i], heads[i] = dict(graph.leaves), []
            for h in given:
                if h is not None and h.requires_grad:
                    n = inputs.index_of(h)
                    leaves[i][n] = h = h.detach().requires_grad_()
                heads[i].append(h)

        def thunk(i: int) -> Any:
            pairs = _pairs(work[i][0], heads[i])
            return torch.autograd.grad(
                [r for r, _ in pairs], list(work[i][0].leaves.values()),
                [h for _, h in pairs], create_graph=True, allow_unused=True)
        found = dict(zip(work, self.run(list(work), [
            partial(thunk, i) for i in work]), strict=True))
        outer = self.connect({i: DeviceGraph(
            leaves[i], [g for g in found[i]
                        if g is not None and g.requires_grad], retained=True)
            for i in work}, inputs)
        totals: list[torch.Tensor | None] = [None] * len(inputs)
        for i, (graph, *_) in work.items():
            for n, g in zip(graph.leaves, found[i], strict=True):
                if g is not None and g.requires_grad:
                    g = next(outer[i])
                totals[n] = _plus(totals[n], g, sources[n])
        return totals[:count]


class _Boundary(torch.autograd.Function):
    """Sources -> roots of all devices."""

    @staticmethod
    def forward(ctx: Any, joint: Joint, holds: Mapping[int, _Hold],
                ready: dict[int, Any], ended: Ended | None,
                *sources: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.joint, ctx.ready, ctx.sources = joint, ready, sources
        ctx.ended = ended
        ctx.holds = {i: weakref.ref(hold) for i, hold in holds.items()}
        ctx.counts = {i: len(h.graph.roots) for i, h in holds.items()}
        return tuple(root.detach() for hold in holds.values()
                     for root in hold.graph.roots)

    @staticmethod
    def backward(ctx: Any, *heads: Any) -> Any:
        work, at = {}, 0
        for i, count in ctx.counts.items():
            given, at = heads[at:at + count], at + count
            if any(h is not None for h in given):
                graph = ctx.ready.pop(i)
                # `retain_graph` is not told to nodes: then the hold lives.
                work[i] = graph, given, graph.retained \
                    or ctx.holds[i]() is not None
        _check_attributes(work, len(ctx.counts))
        run = ctx.joint.differentiable_sums if torch.is_grad_enabled() \
            else ctx.joint.sums
        with ctx.joint.locked():
            totals = run(work, ctx.sources)
            if ctx.ended is not None:
                last = all(hold() is None for hold in ctx.holds.values())
                ctx.ended(last)
                if last:
                    ctx.ended = None
        for source, total in zip(ctx.sources, totals, strict=True):
            if total is None and source._backward_hooks:
                _during_pass(source._backward_hooks, lambda hook: lambda g:
                             None if g is None else hook(g))
            if total is None and source._post_accumulate_grad_hooks:
                _during_pass(source._post_accumulate_grad_hooks, partial(
                    _if_new, *_gradient_of(source)))
        return None, None, None, None, *totals


class _Keep(torch.autograd.Function):
    """The roots of one device -> the same. In a backward pass it runs before
    the boundary, and hands it the device's graph."""

    @staticmethod
    def forward(ctx: Any, ready: dict[int, Any], i: int,
                *roots: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.ready, ctx.i, ctx.spare = ready, i, None
        ctx.save_for_backward(_TOKEN)
        return tuple(root.detach() for root in roots)

    @staticmethod
    def backward(ctx: Any, *heads: Any) -> Any:
        # A loss of other devices runs this node too, with None, and torch
        # may then release what it has saved.
        unused = all(h is None for h in heads)
        if ctx.spare is None:
            try:
                _ = ctx.saved_tensors       # calls `unpack`
            except RuntimeError:        # torch's own, of a second time
                if unused:
                    return None, None, *heads
                raise
            ctx.spare = ctx.ready.pop(ctx.i)
        if not unused:
            ctx.ready[ctx.i], ctx.spare = ctx.spare.graph, None
        return None, None, *heads


def devices_of(loss: torch.Tensor) -> set[int]:
    """The devices whose outputs a loss depends on, of several."""
    return {node.i for node in nodes([loss])[0]
            if type(node) is _Keep._backward_cls}


def told(roots: Sequence[torch.Tensor], ended: Ended
         ) -> Iterator[torch.Tensor]:
    """`roots`, which no leaf is among; `ended` is called behind each backward
    pass of them."""
    if not roots:
        return iter(())
    hold = _Hold(None)

    def pack(_: Any, hold: _Hold = hold) -> _Hold:
        return hold
    with saved_tensors_hooks(pack, lambda hold: _TOKEN):
        return iter(_Telling.apply(ended, weakref.ref(hold), *roots))


class _Telling(torch.autograd.Function):
    """Roots -> the same."""

    @staticmethod
    def forward(ctx: Any, ended: Ended, hold: "weakref.ref[_Hold]",
                *roots: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.ended, ctx.hold = ended, hold
        ctx.save_for_backward(_TOKEN)
        return tuple(root.detach() for root in roots)

    @staticmethod
    def backward(ctx: Any, *heads: Any) -> Any:
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: ctx.ended(ctx.hold() is None))
        return None, None, *heads


class Alias(torch.autograd.Function):
    """The same memory as a tensor that is neither a leaf nor a view: a
    forward pass may write to it in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def _pairs(graph: DeviceGraph, heads: Any) -> list[tuple[Any, Any]]:
    return [(root, head) for root, head in zip(graph.roots, heads,
                                               strict=True)
            if head is not None]


def _plus(total: torch.Tensor | None, g: torch.Tensor | None,
          source: torch.Tensor) -> torch.Tensor | None:
    """``total + g``, in new memory: autograd takes the sum as it is, and the
    gradients of leaves may be views of one another."""
    if g is None:
        return total
    g = strict.moved(g, source)
    if total is None:
        return g
    return g + total if total.is_sparse and not g.is_sparse else total + g


def _check_attributes(work: Mapping[int, tuple[DeviceGraph, Any, bool]],
                      devices: int) -> None:
    """Refuse a loss on an attribute that forward left on one device."""
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


def _during_pass(hooks: dict[int, Any], change: Callable[[Any], Any]) -> None:
    """Put ``change(hook)`` in the place of each of `hooks` for the rest of
    this backward pass: of a node's inputs, torch calls those of a tensor
    that no gradient has reached too."""
    before = dict(hooks)
    hooks.update({key: change(hook) for key, hook in before.items()})
    during = dict(hooks)

    def restore() -> None:
        for key, hook in before.items():
            if hooks.get(key) is during[key]:
                hooks[key] = hook
    torch.autograd.Variable._execution_engine.queue_callback(restore)


def _gradient_of(x: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    return x.grad, 0 if x.grad is None else x.grad._version


def _if_new(grad: torch.Tensor | None, version: int, hook: Any) -> Any:
    """`hook`, which is called if the gradient is not as it was."""
    def called(x: torch.Tensor) -> None:
        now, count = _gradient_of(x)
        if now is not grad or count != version:
            hook(x)
    return called
