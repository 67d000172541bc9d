"""Forward and backward passes of one block on several contexts.

The network is the only state. Its parameters lie on one context, where the
first device runs the network itself. In each pass the other devices run
copies whose parameters are recorded copies of the network's: one graph, whose
backward pass runs on all contexts at the same time and adds up in the
network's own gradients.
"""
import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mgpu.backends._mxnet.block_tree import (BlockTree, Place, alias,
                                             blocks_of, copied, is_array,
                                             state_of, view_of)
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.states import DeviceStates, set_states
from mgpu.backends._mxnet.statistics import DeviceStatistics, sets_of
from mgpu.backends._workers import run_in_turn
from mgpu.backends.containers import Batch, Call, Probed

autograd, gluon = mx.autograd, mx.gluon


def _plain(net: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return net(*args, **kwargs)


class ContextCopies:
    """Runs a network on several contexts.

    Parameters
    ----------
    net : Block
        It stays as it is, but for what forward itself writes.
    contexts : list of Context
        The first one is the network's.
    call : callable
        ``call(net, args, kwargs)`` runs a copy.
    run : callable
        ``run(thunks)`` calls thunks, one for each device that runs, and
        waits for them; they queue work.
    one_backward : bool
        Let a second backward pass of other devices' outputs raise an error.
        It would overwrite the gradients that the first one has written.
    statistics : DeviceStatistics, optional
        Each device's own, in passes that train. Without it the devices
        follow the network.
    buffers : sequence of Parameter
        What forward writes besides. A network whose first device has no
        examples takes the values of the first device that has.
    """

    def __init__(self, net: Any, contexts: Sequence[Any], *,
                 call: Callable[..., Any] = _plain,
                 run: Callable[[list[Any]], list[Any]] = run_in_turn,
                 one_backward: bool = False,
                 statistics: DeviceStatistics | None = None,
                 buffers: Sequence[Any] = ()) -> None:
        self.net, self.contexts = net, list(contexts)
        self._call, self._run, self._one_backward = call, run, one_backward
        self._statistics = statistics or DeviceStatistics([], contexts)
        self._others = list(buffers)
        self._states = DeviceStates(net, contexts)
        self._lock = threading.RLock()
        #: by device: see `BlockTree`
        self._arrays: list[dict[int, Any]] = [{} for _ in contexts]
        self._count = 0         # of devices in the last recorded pass
        #: before the last pass: the network's attributes, the last device's
        self._before: tuple[dict[Place, Any], dict[Place, Any]] = {}, {}

    def run(self, calls: Mapping[int, Call], batch: Batch) -> dict[int, Any]:
        """Call the network on devices.

        Parameters
        ----------
        calls : dict
            Device -> (args, kwargs).
        batch : Batch
            What the calls are parts of.

        Returns
        -------
        dict
            Device -> what forward returns there. The arrays are connected
            with the network's own parameters.

        Raises
        ------
        RuntimeError
            Forward makes a layer or a parameter, or writes to a parameter.
        ValueError
            Forward leaves values in an attribute that cannot be joined; or
            see `check_count`.
        """
        with self._lock:
            self._statistics.settle()
            if len(self.contexts) > 1:
                return self._pass(calls, batch)
            active = list(calls)
            return dict(zip(active, self._run([
                partial(self._forward, 0, None, calls[i]) for i in active]),
                strict=True))

    def probe(self, call: Call, device: int) -> Probed | None:
        """What forward returns for `call` on a device, and sets; None where
        it raises. It runs without gradients and hooks, and nothing that it
        sets stays."""
        context = self.contexts[device]

        def own(x: Any) -> Any:
            return x.copyto(context) if is_array(x) else copy.deepcopy(x)
        with self._lock, autograd.pause(), mx.Context(context):
            now, (before, states) = state_of(view_of(self.net)), self._before
            set_states(self.net, before)
            try:
                tree = BlockTree(self.net, context, {}, {
                    place: own(x) for place, x in states.items()})
            finally:
                set_states(self.net, now)
            for _, new in tree.blocks:
                new.__dict__.update(_forward_hooks={}, _forward_pre_hooks={})
            try:
                output = self._call(tree.net, *call)
            except Exception:
                return None
        view = tree.view()
        return Probed(output, lambda place: view[place[0]].get(place[1]))

    def alone(self, *args: Any) -> Any:
        """What a deep copy of the network returns on one device, without
        gradients; None where it cannot be copied."""
        with autograd.pause(train_mode=autograd.is_training()):
            try:
                return copy.deepcopy(self.net)(*args)
            except Exception:
                return None

    def check_count(self, count: int) -> None:
        """Raise ValueError for another number of devices than before, in a
        recorded pass of a network with static shapes.

        MXNet then runs the backward pass of an earlier batch, whether the
        gradients of several devices are added to the weights' or not.
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
        """Device `i`'s copy of the Parameter `p`, with the network's
        value."""
        with self._lock, autograd.pause():
            return copied(p, self.contexts[i], self._arrays[i])

    # -- passes ---------------------------------------------------------------

    def _pass(self, calls: Mapping[int, Call], batch: Batch
              ) -> dict[int, Any]:
        active, net = list(calls), self.net
        self.check_count(len(active))
        trains = autograd.is_recording() and autograd.is_training()
        states = self._states.begin(active, batch)
        gates = self._gates(len(active))
        # Copies are queued before device 0's pass, which keeps it busy.
        sources = {key: gate for key, (_, gate) in gates.items()}
        trees = {i: BlockTree(
            net, self.contexts[i], self._arrays[i], states[i], sources,
            self._statistics.begin(i) if trains else {})
            for i in active if i}
        earlier = state_of(view_of(net))
        self._before = earlier, states[active[-1]]
        set_states(net, states.get(0, {}))
        views = {i: trees[i].view() if i else view_of(net) for i in active}
        before = state_of(views[active[0]])
        written = [(p, sets_of(p)) for tree in trees.values()
                   for pair in tree.parameters for p in pair
                   if p.grad_req != "null"]
        try:
            with _holding(gates):
                outputs = self._run([partial(
                    self._forward, i, trees.get(i), calls[i])
                    for i in active])
            _check_sets(written)
        except BaseException:
            set_states(net, earlier)
            raise
        if trains:
            self._statistics.end(active)
        if active[0]:
            self._write_back(trees[active[0]])
        self._states.end(before, views, batch)
        return dict(zip(active, outputs, strict=True))

    def _forward(self, i: int, tree: BlockTree | None, call: Call) -> Any:
        # A new Context: it remembers the thread's earlier one.
        with mx.Context(self.contexts[i]):
            if tree is None:
                return self._call(self.net, *call)
            tree.update()
            output = self._call(tree.net, *call)
        tree.give_back()
        return output

    def _gates(self, count: int) -> dict[int, tuple[Any, Any]]:
        """Id of a Parameter -> (it, its `alias`), from which all devices
        start: MXNet runs back through a node once."""
        if not self._one_backward or count < 2 \
                or not autograd.is_recording():
            return {}
        return {id(p): (p, alias(vars(p)["_data"][0]))
                for block in blocks_of(self.net)
                for p in (*block._reg_params.values(),
                          *block._params._params.values())
                if p.grad_req == "write" and vars(p)["_data"]}

    def _write_back(self, tree: BlockTree) -> None:
        """Device 0 has no examples: the network takes the first device's
        buffers. Running statistics move later."""
        found = {id(p): new for p, new in tree.parameters}
        with autograd.pause():
            for p in self._others:
                if id(p) in found and vars(p)["_data"]:
                    vars(found[id(p)])["_data"][0].copyto(vars(p)["_data"][0])


@contextlib.contextmanager
def _holding(gates: Mapping[int, tuple[Any, Any]]) -> Iterator[None]:
    """Inside the block the network's parameters have these arrays."""
    before = [(p, vars(p)["_data"]) for p, _ in gates.values()]
    try:
        for p, gate in gates.values():
            p.__dict__["_data"] = [gate]
        yield
    finally:
        for p, arrays in before:
            p.__dict__["_data"] = arrays


def _check_sets(known: Sequence[tuple[Any, int]]) -> None:
    for p, count in known:
        if sets_of(p) != count:
            raise RuntimeError(
                f"forward writes to the parameter {p.name}: each device "
                "would write for its own examples. Write to it outside of "
                "forward.")
