"""Forward and backward passes of a block on several contexts.

The network is the only state. Its parameters are on one context, where the
first device runs the network itself. In each pass, the other devices run
copies whose parameters are recorded copies of the network's. So there is one
graph, whose backward pass runs on all contexts in parallel and accumulates
the gradients in the network.
"""
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mgpu.backends._mxnet.block_tree import (BlockTree, AttributeKey, alias,
                                             blocks_of, copied, state_of,
                                             view_of)
from mgpu.backends._mxnet.blocks import parameters_of
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.layers import stored
from mgpu.backends._mxnet.states import (DeviceStates, DeviceStatistics,
                                         set_states, sets_of)
from mgpu.backends._workers import run_in_turn
from mgpu.backends.containers import Batch, Probed

autograd = mx.autograd


class ContextCopies:
    """Runs a network on several contexts.

    Parameters
    ----------
    net : Block
        Not modified, except by forward itself.
    contexts : list of Context
        The first one is that of the network.
    call : callable
        ``call(net, args)`` runs a copy.
    run : callable
        ``run(thunks)`` calls thunks, one per active device, which queue work,
        and blocks until they return.
    one_backward : bool
        Whether a second backward pass of other devices' outputs raises. It
        would overwrite the gradients of the first one.
    statistics : sequence of Parameter
        Parameters with a value for each device in training passes.
    buffers : sequence of Parameter
        Other parameters that forward writes. If the first device has no
        examples, the network takes the values of the first device that has.
    """

    def __init__(self, net: Any, contexts: Sequence[Any], *,
                 call: Callable[[Any, tuple[Any, ...]], Any] = lambda net,
                 args: net(*args),
                 run: Callable[[list[Any]], list[Any]] = run_in_turn,
                 one_backward: bool = False,
                 statistics: Sequence[Any] = (),
                 buffers: Sequence[Any] = ()) -> None:
        self.net, self.contexts = net, list(contexts)
        self._call, self._run, self._one_backward = call, run, one_backward
        self.statistics = DeviceStatistics(statistics, contexts)
        self._moved = set(buffers)
        self._states = DeviceStates(net, contexts)
        self._lock = threading.RLock()
        #: by device: see `BlockTree`
        self._arrays: list[dict[Any, Any]] = [{} for _ in contexts]
        self._count = 0         # of devices in the last recorded pass
        #: attributes of the last device before the last pass
        self._before: dict[AttributeKey, Any] = {}

    def run(self, calls: Mapping[int, tuple[Any, ...]], batch: Batch
            ) -> dict[int, Any]:
        """Call the network on several devices.

        Parameters
        ----------
        calls : dict
            Device -> args.
        batch : Batch
            The batch that the calls are parts of.

        Returns
        -------
        dict
            Device -> result of forward. Gradients flow to the network's
            parameters.

        Raises
        ------
        RuntimeError
            Forward creates a layer or a parameter, or writes to a parameter.
        ValueError
            Forward sets an attribute whose values cannot be joined; or see
            `check_count`.
        """
        with self._lock:
            self.statistics.flush()
            if len(self.contexts) > 1:
                return self._pass(calls, batch)
            return dict(zip(calls, self._run([
                partial(self._forward, 0, None, args)
                for args in calls.values()]), strict=True))

    def probe(self, args: tuple[Any, ...], device: int) -> Probed | None:
        """Call forward on a device without gradients, hooks and side effects.
        Returns its result and the attributes that it sets; None if it
        raises."""
        with self._lock:
            try:
                tree, output = run_aside(
                    self.net, self.contexts[device],
                    lambda net: self._call(net, args), self._before)
            except Exception:
                return None
        view = tree.view()
        return Probed(output, lambda place: view[place[0]].get(place[1]))

    def check_count(self, count: int) -> None:
        """Raise ValueError if the number of devices changes in a recorded
        pass of a network with static shapes.

        MXNet would reuse the backward graph of an earlier batch, with its
        number of devices.
        """
        if not autograd.is_recording():
            return
        if self._count not in (0, count) and any(
                ("static_shape", True) in vars(block).get("_flags", ())
                for block in blocks_of(self.net)):
            raise ValueError(
                f"a batch on {count} device(s) after one on {self._count}, "
                "in a network with static_shape=True: MXNet would compute "
                "wrong gradients. Use hybridize(static_alloc=True), or drop "
                "the last batch.")
        self._count = count

    def refreshed(self, i: int, p: Any) -> Any:
        """The copy of the Parameter `p` on device `i`, updated to the value
        of the network."""
        with self._lock, autograd.pause():
            return copied(p, self.contexts[i], self._arrays[i])

    # -- passes ---------------------------------------------------------------

    def _pass(self, calls: Mapping[int, tuple[Any, ...]], batch: Batch
              ) -> dict[int, Any]:
        active, net = list(calls), self.net
        self.check_count(len(active))
        trains = autograd.is_recording() and autograd.is_training()
        states = self._states.begin(active, batch)
        earlier = state_of(view_of(net))
        self._before = {**earlier, **states[active[-1]]}
        try:
            with self._one_pass(len(active)):
                # Queued before the pass of device 0.
                trees = {i: BlockTree(
                    net, self.contexts[i], self._arrays[i], states[i],
                    self.statistics.begin(i) if trains else {})
                    for i in active if i}
                set_states(net, states.get(0, {}))
                views = {i: trees[i].view() if i else view_of(net)
                         for i in active}
                before = state_of(views[active[0]]) if active[0] \
                    else {**earlier, **states[0]}
                counts = [(p, own, sets_of(own)) for tree in trees.values()
                          for p, q in tree.parameters.items()
                          for own in (p, q)]
                outputs = self._run([partial(
                    self._forward, i, trees.get(i), calls[i])
                    for i in active])
            self._check_writes(trees, active, {
                p for p, own, count in counts if sets_of(own) != count})
        except BaseException:
            set_states(net, earlier)
            raise
        if trains:
            self.statistics.end(active)
        if active[0]:       # the network takes the first device's buffers
            first = trees[active[0]].parameters
            with autograd.pause():
                for p in first.keys() & self._moved:
                    stored(first[p]).copyto(stored(p))
        self._states.end(before, views, batch)
        return dict(zip(active, outputs, strict=True))

    def _check_writes(self, trees: Mapping[int, BlockTree],
                      active: Sequence[int], written: set[Any]) -> None:
        """Raise RuntimeError if forward has written to a parameter, or
        different values to a buffer on the devices."""
        for p in written:
            if p.grad_req != "null":
                raise RuntimeError(
                    f"forward writes to the parameter {p.name}: each device "
                    "would write for its own examples. Write to it outside of "
                    "forward.")
            first, *others = [stored(trees[i].parameters[p] if i else p)
                              .asnumpy() for i in active]
            if not all(np.array_equal(x, first) for x in others):
                raise RuntimeError(
                    f"forward updates the buffer {p.name} from the examples "
                    "of its device, and the devices' values differ. Update it "
                    "outside of forward, from the joined outputs.")

    def _forward(self, i: int, tree: BlockTree | None, args: tuple[Any, ...]
                 ) -> Any:
        # A new Context: it remembers the thread's earlier one.
        with mx.Context(self.contexts[i]):
            if tree is not None:
                tree.update()
            return self._call(self.net if tree is None else tree.net, args)

    @contextlib.contextmanager
    def _one_pass(self, count: int) -> Iterator[None]:
        """Context manager in which all devices start from aliases of the
        network's parameters: MXNet runs the backward pass of a node once."""
        parameters = {p: vars(p)["_data"] for block in blocks_of(self.net)
                      for p in parameters_of(block)
                      if p.grad_req == "write" and vars(p)["_data"]} \
            if self._one_backward and count > 1 and autograd.is_recording() \
            else {}
        try:
            for p, arrays in parameters.items():
                p.__dict__["_data"] = [alias(arrays[0])]
            yield
        finally:
            for p, arrays in parameters.items():
                p.__dict__["_data"] = arrays


def run_aside(net: Any, context: Any, call: Callable[[Any], Any],
              states: Mapping[AttributeKey, Any], trains: bool = False,
              hooks: bool = False) -> tuple[BlockTree, Any]:
    """Copy `net` to a context and call ``call(copy)``, without gradients and
    side effects. Returns both. `states`: attributes that differ from the
    network's; `hooks`: whether hooks run."""
    with autograd.pause(train_mode=trains), mx.Context(context):
        tree = BlockTree(net, context, {}, states, apart=True)
        for _, new in () if hooks else tree.blocks:
            new.__dict__.update(_forward_hooks={}, _forward_pre_hooks={})
        return tree, call(tree.net)
