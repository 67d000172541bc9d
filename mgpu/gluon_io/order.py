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
        #: scales of batch norms that are 1 whatever the file has
        self._unmoved = {graph.nodes[node.inputs[1][0]].name
                         for node in graph.nodes if "BatchNorm" in node.op
                         and node.attributes.get("fix_gamma")}

    def of_module(self, order: Sequence[str] | None) -> dict[str, Any]:
        """By name, the key of its state. A Module counts what it trains, in
        the order of the graph, once for each of its devices; with a
        key-value store it uses names. `order`: those that it trained."""
        states, names = self._states, self._trained
        if isinstance(order, str):
            raise ValueError("the states of a Module are in the order of the "
                             f"graph; received order={order!r}. Leave it "
                             "out, or pass the names that it trained.")
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
        if order is None:
            fitting = [x for x in fitting if len(x) == len(names)] or fitting
        else:
            fitting = [x for x in fitting if x.keys() == {*order}]
        if states and len(fitting) != 1:
            raise ValueError(
                "each state of a Module belongs to a parameter; received "
                f"{len(states)} states, which fit the {len(names)} "
                f"parameters of the graph in {len(fitting)} ways. Pass "
                "order=, the names of those that it trained (all but "
                "fixed_param_names), and use files of one moment.")
        return fitting[0] if fitting else {}

    def of_trainer(self, order: str | Sequence[str] | None
                   ) -> dict[str, int]:
        """By name, the number of its state in a Gluon trainer that was given
        the dictionary of all parameters ("sorted"), or the parameters
        `order`; None: the former, if the states fit nothing else."""
        names = sorted(self._all)
        if order is not None and order != "sorted":
            if isinstance(order, str):
                raise ValueError("order is 'sorted', or a list of names; "
                                 f"received {order!r}.")
            return self._of_list(list(order))
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
        if order is not None:
            return found
        for what, other in fitting.items():
            # An order in which more would never have been updated is none
            # that comes to mind.
            if len(self._named(other)) >= len(found) \
                    and not self._alike(found, self._named(other)):
                raise _refused("states whose shapes do not decide: they fit "
                               f"the sorted names, and the order {what}")
        if not {*self._trained} - self._unmoved <= found.keys():
            for what, other in (("sorted names", names),
                                ("order of the graph", self._all)):
                for latest in (False, True):
                    part = self._of_part(other, found, latest)
                    if part and not self._alike(found, part):
                        some = sorted(part.keys() - found.keys())[:3]
                        raise _refused(
                            f"{len(found)} states of {len(self._trained)} "
                            "parameters, whose shapes do not decide: the "
                            "rest may be frozen, or the trainer was given a "
                            f"part of them ({', '.join(some)}; {what})")
        return found

    def _of_part(self, names: Sequence[str], whole: Mapping[str, Any],
                 latest: bool) -> dict[str, Any]:
        """Where the states are if the trainer had only some of `names`, in
        this order: as early as they fit, or as late. Empty if they do not.
        `whole`: where they are if it had all."""
        found: dict[str, Any] = {}
        # A gamma that is fixed has a state in some trainings, in others not.
        closed = self._fixed | (self._unmoved - whole.keys())
        before, place = -1, -1
        keys = sorted(self._states, reverse=latest)
        for key in keys:
            if latest:
                last = place - (before - key) if found else len(names) - 1
                places = range(last, key - 1, -1)
            else:
                first = place + (key - before) if found else key
                places = range(first, len(names))
            for place in places:
                name = names[place]
                if name not in closed and not self._misfit(
                        names, {place: self._states[key]}):
                    break
            else:
                return {}
            found[name], before = key, key
        return found

    def _of_list(self, names: list[str]) -> dict[str, int]:
        twice = len({*names}) != len(names)
        strange = [names[i] for i in self._states if isinstance(i, int)
                   and i < len(names) and names[i] not in self._shapes]
        # What the exported network has not may have been trained with it.
        if twice or (strange and not {*self._trained} <= {*names}):
            raise _refused("order= with a name twice" if twice else
                           f"order= with {strange[:5]}, which are in the "
                           "states and not in the graph")
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
        "('sorted' where it was given net.collect_params()), and use files "
        "of one moment.")
