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

    Raises ValueError where states do not fit, or fit in two ways that differ.
    `counts`: of updates, by key. `in_turn`: whether the update of a parameter
    depends on those before it.
    """

    def __init__(self, saved: TrainerStates, counts: Mapping[Any, int],
                 graph: Graph, shapes: Mapping[str, Shape],
                 in_turn: bool = False) -> None:
        self._states: dict[Any, Any] = saved.states
        self._counts, self._in_turn = counts, in_turn
        self._apart = 0     # devices whose states fit, and differ
        self._shapes, self._fixed = shapes, statistics(graph)
        self._all = [node.name for node in graph.nodes
                     if node.op == "null" and node.name in shapes]
        self._trained = [name for name in self._all
                         if name not in self._fixed]
        #: of updates, by name
        self.updates: Sequence[str] = self._trained

    def of_module(self, order: str | Sequence[str] | None) -> dict[str, Any]:
        """By name, the key of its state. A Module counts what it trains, in
        the order of the graph, once for each of its devices; with a
        key-value store it uses names. `order`: those that it trained, or
        "all"."""
        states, names = self._states, self._trained
        if isinstance(order, str) and order != "all":
            raise ValueError("the states of a Module are in the order of the "
                             f"graph; received order={order!r}. Leave it "
                             "out, or pass the names that it trained, or "
                             "'all'.")
        meant = None if order is None else {*names} if order == "all" \
            else {*order}
        if any(isinstance(key, str) for key in states):
            strange = sorted(map(str, states.keys() - set(names)))
            if strange:
                raise _refused(f"states of {strange[:5]}, which are no "
                               "parameters of the graph")
            wrong = self._misfit(names, {names.index(x): states[x]
                                         for x in states})
            if wrong:
                raise _refused("states that do not fit: " + wrong)
            fitting = [dict(zip(states, states))]
        else:
            fitting = list(self._on_devices())
            if not fitting and self._apart:
                raise ValueError(
                    "a Module's devices have the same states; received "
                    f"those of {self._apart} devices, which differ: with "
                    "kvstore=None each trains weights of its own, and the "
                    "file of weights has their mean, from which nothing goes "
                    "on. Use files of one moment, of a training with a "
                    "key-value store.")
        if meant is not None:
            fitting = [x for x in fitting if x.keys() == meant]
        if meant is not None and not states:
            if not meant <= {*names}:
                raise ValueError(
                    "order= has the names of what a Module trained; received "
                    f"{sorted(meant - {*names})[:5]}, which the graph has "
                    f"not. It has {names}.")
            self.updates = [name for name in names if name in meant]
        if states and len(fitting) != 1:
            raise ValueError(
                "each state of a Module belongs to a parameter; received "
                f"{len(states)} states, which fit the {len(names)} "
                f"parameters of the graph in {len(fitting)} ways: so many "
                "may have been trained, or fewer on more devices. Pass "
                "order=, 'all' or the names of those that it trained (all "
                "but fixed_param_names), and use files of one moment.")
        return fitting[0] if fitting else {}

    def _on_devices(self) -> Iterator[dict[str, Any]]:
        """What the numbers of a Module mean, for each number of devices that
        it may have had."""
        states, names = self._states, self._trained
        for devices in range(1, len(states) + 1):
            first = {key // devices: key // devices * devices
                     for key in states}
            # as many states of each parameter as devices, and the same
            if len(first) * devices == len(states) \
                    and not self._misfit(names, {i: states[key] for i, key
                                                 in first.items()}):
                if all(_same(states[key], states[first[key // devices]])
                       for key in states):
                    yield {names[i]: key for i, key in first.items()}
                else:
                    self._apart = self._apart or devices

    def of_trainer(self, order: str | Sequence[str] | None
                   ) -> dict[str, int]:
        """By name, the number of its state in a Gluon trainer that was given
        the dictionary of all parameters ("sorted"), or the parameters
        `order`; None: what the shapes alone decide."""
        names = sorted(self._all)
        if order is None:
            return self._by_shapes()
        if order != "sorted":
            if isinstance(order, str):
                raise ValueError("order is 'sorted', or a list of names; "
                                 f"received {order!r}.")
            return self._of_list(list(order))
        wrong = self._misfit(names, self._states)
        if wrong:
            raise _refused("states that do not fit the sorted names: " + wrong)
        return self._named(names)

    def _by_shapes(self) -> dict[str, int]:
        """A list may have any order and leave any parameter out. So the
        states of a shape are as many as its parameters, and one or all the
        same, or it is not known whose they are."""
        found: dict[str, int] = {}
        fitting: dict[tuple[str, ...], list[int]] = {}
        for key, state in sorted(self._states.items()):
            fitting.setdefault(tuple(
                name for name in sorted(self._trained)
                if all(x.shape == self._shapes[name] for x in leaves(state))),
                []).append(key)
        for names, keys in fitting.items():
            alike = len(names) == 1 or not self._in_turn and all(
                self._counts.get(key) == self._counts.get(keys[0])
                and _same(self._states[key], self._states[keys[0]])
                for key in keys)
            if not alike or len(names) != len(keys):
                some = ", ".join(map(repr, names[:3])) or "none"
                wrong = self._misfit(sorted(self._all), self._states)
                raise _refused(
                    f"{len(self._states)} states whose shapes do not decide: "
                    f"{len(keys)} of them fit {len(names)} parameters "
                    f"({some}{', ...' * (len(names) > 3)})"
                    + (f". They do not fit the sorted names: {wrong}"
                       if wrong else ""))
            found.update(zip(names, keys))
        # One without a state stands where its rate is not known.
        self.updates = [*({*self._trained} - found.keys()),
                        *sorted(found, key=found.__getitem__)]
        if self._in_turn and len(found) < len(self._trained):
            raise _refused(
                "states whose shapes do not decide: the update of a "
                "parameter depends on those before it, and "
                f"{self.updates[0]!r} has no state")
        return found

    def _of_list(self, names: list[str]) -> dict[str, int]:
        twice = len({*names}) != len(names)
        strange = [names[i] for i in self._states if isinstance(i, int)
                   and i < len(names) and names[i] not in self._shapes]
        # What the exported network has not may have been trained with it.
        if twice or (strange and not {*self._trained} <= {*names}):
            raise _refused("order= with a name twice" if twice else
                           f"order= with {strange[:5]}, which are in the "
                           "states and not in the graph, whose names are as "
                           f"{self._all[0]!r}")
        wrong = self._misfit(names, self._states)
        if wrong:
            raise _refused(f"an order= in which {wrong}")
        return self._named(names)

    def _named(self, names: Sequence[str]) -> dict[str, Any]:
        self.updates = [name for name in names if name in self._shapes]
        return {names[i]: i for i in self._states if names[i] in self._shapes}

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
        f"each state belongs to a parameter; received {what}. Pass "
        "order='sorted' for gluon.Trainer(net.collect_params(), ...), and for "
        "a trainer of a list, a part, or a dictionary of one's own, the names "
        "of its parameters, [p.name for p in trainer._params]; and use files "
        "of one moment.")
