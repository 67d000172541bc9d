"""Which parameter a state of a trainer belongs to: the file has numbers."""
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.gluon_io.graph import Graph
from mgpu.gluon_io.parts import Shape
from mgpu.gluon_io.states import TrainerStates


def statistics(graph: Graph) -> set[str]:
    """Arrays that no update moves: running statistics, the fourth and fifth
    input of a batch norm."""
    return {graph.nodes[i].name for node in graph.nodes
            if "BatchNorm" in node.op for i, _ in node.inputs[3:5]}


def leaves(state: Any) -> Iterator[np.ndarray]:
    """The arrays of a state."""
    if isinstance(state, tuple):
        for x in state:
            yield from leaves(x)
    elif state is not None:
        yield state


class Order:
    """Says which parameter a key of a file of states means.

    Raises ValueError where states do not fit, or would fit by two of the
    orders that are in use, and differently. `counts`: of updates, by key.
    """

    def __init__(self, saved: TrainerStates, counts: Mapping[Any, int],
                 graph: Graph, shapes: Mapping[str, Shape]) -> None:
        self._states: dict[Any, Any] = saved.states
        self._counts = counts
        self._shapes, fixed = shapes, statistics(graph)
        self._all = [node.name for node in graph.nodes
                     if node.op == "null" and node.name in shapes]
        self._trained = [name for name in self._all if name not in fixed]
        self._fixed = fixed

    def of_module(self) -> dict[str, Any]:
        """By name, the key of its state. A Module counts what it trains, in
        the order of the graph, once for each of its devices; with a
        key-value store it uses names."""
        states, names = self._states, self._trained
        if any(isinstance(key, str) for key in states):
            strange = sorted(map(str, states.keys() - set(names)))
            if strange:
                raise _refused(f"states of {strange[:5]}, which are no "
                               "parameters of the graph")
            found = dict(zip(states, states))
            wrong = self._misfit(names, {names.index(x): states[x]
                                         for x in found})
            if wrong:
                raise _refused("states that do not fit: " + wrong)
            return found
        fitting = []
        for devices in range(1, len(states) + 1):
            first = {key // devices: key // devices * devices
                     for key in states}
            # as many states of each parameter as devices, and the same
            if len(first) * devices == len(states) \
                    and not self._misfit(names, {i: states[key] for i, key
                                                 in first.items()}) \
                    and all(_same(states[key], states[first[key // devices]])
                            for key in states):
                fitting.append({names[i]: key for i, key in first.items()})
        whole = [x for x in fitting if len(x) == len(names)] or fitting
        if states and len(whole) != 1:
            raise _refused(
                f"{len(states)} states of a Module, which fit the "
                f"{len(names)} parameters of the graph in {len(whole)} ways")
        return whole[0] if whole else {}

    def of_trainer(self, order: str | Sequence[str]) -> dict[str, int]:
        """By name, the number of its state in a Gluon trainer that was given
        a dictionary ("sorted"), or the parameters `order`."""
        if not isinstance(order, str):
            return self._of_list(list(order))
        if order != "sorted":
            raise ValueError("order is 'sorted', or a list of names; "
                             f"received {order!r}.")
        names = sorted(self._all)
        wrong = self._misfit(names, self._states)
        fitting = {what: other for what, other in (
            ("of the graph", self._all),
            ("of the graph without running statistics", self._trained),
            ("of the sorted names without running statistics",
             sorted(self._trained)))
            if not self._misfit(other, self._states)}
        if wrong:
            raise _refused("states that do not fit the sorted names: " + wrong
                           + "".join(f". They would fit the order {what}"
                                     for what in list(fitting)[:1]))
        found = self._named(names)
        for what, other in fitting.items():
            # An order in which more would never have been updated is none
            # that comes to mind.
            if len(self._named(other)) >= len(found) \
                    and not self._alike(found, self._named(other)):
                raise _refused("states whose shapes do not decide: they fit "
                               f"the sorted names, and the order {what}")
        return found

    def _of_list(self, names: list[str]) -> dict[str, int]:
        missing = sorted({*self._trained} - {*names})
        if missing or len({*names}) != len(names):
            raise _refused(f"order= without {missing[:5]}" if missing else
                           "order= with a name twice")
        wrong = self._misfit(names, self._states)
        if wrong:
            raise _refused(f"an order= in which {wrong}")
        return self._named(names)

    def _named(self, names: Sequence[str]) -> dict[str, Any]:
        return {names[i]: i for i in self._states if names[i] in self._shapes}

    def _alike(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
        """Whether every parameter gets the same by both."""
        return a.keys() == b.keys() and all(
            self._counts.get(a[x]) == self._counts.get(b[x])
            and _same(self._states[a[x]], self._states[b[x]]) for x in a)

    def _misfit(self, names: Sequence[str], states: Mapping[Any, Any]
                ) -> str:
        """Why `states`, by number, are not those of `names`; "" if they
        may be."""
        for i, state in states.items():
            if not isinstance(i, int) or i >= len(names):
                return f"there is no parameter {i!r}"
            name = names[i]
            if name in self._fixed:
                return f"number {i} is {name!r}, which is not trained"
            for x in leaves(state):
                if x.shape != self._shapes.get(name, x.shape):
                    return (f"number {i} is {name!r} of shape "
                            f"{self._shapes[name]}, and its state has "
                            f"{x.shape}")
        return ""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or isinstance(a, np.ndarray) \
        and isinstance(b, np.ndarray) and np.array_equal(a, b)


def _refused(what: str) -> ValueError:
    return ValueError(
        f"each state belongs to a parameter; received {what}. Pass order=, "
        "the names of all parameters of the trainer in its order "
        "(sorted(net.collect_params()) where it was given the dictionary), "
        "and use files of one moment.")
