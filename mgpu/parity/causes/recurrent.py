"""Causes in recurrent layers: gates in another order, another formula."""
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mgpu.parity.causes.difference import Difference, distance, once
from mgpu.parity.causes.registry import Found, cause

#: the gates in the order of the blocks of both frameworks' weights
GATES = {4: "ifgo", 3: "rzn"}


class Reading(NamedTuple):
    """One way to compute a recurrent layer.

    Attributes
    ----------
    order : tuple of int
        By gate, in the order of `GATES`, the block of the weights.
    early : bool
        GRU: the reset gate is applied before the matrix product.
    swapped : bool
        GRU: the update gate weighs the new value, not the old state.
    """

    order: tuple[int, ...]
    early: bool = False
    swapped: bool = False


#: the weights of a cell: of the input, of the state; their biases
_Cell = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _advance(x: np.ndarray, h: np.ndarray, c: np.ndarray, cell: _Cell,
             how: Reading) -> tuple[np.ndarray, np.ndarray]:
    """The next states of a cell."""
    blocks = [np.split(p, len(how.order)) for p in cell]
    (wx, wh, bx, bh) = ([parts[k] for k in how.order] for parts in blocks)
    a = [x @ w.T + b for w, b in zip(wx, bx)]
    b = [h @ w.T + b for w, b in zip(wh, bh)]
    if len(a) == 4:
        i, f, g, o = map(np.add, a, b)
        c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
        return _sigmoid(o) * np.tanh(c), c
    r, z = _sigmoid(a[0] + b[0]), _sigmoid(a[1] + b[1])
    n = np.tanh(a[2] + ((r * h) @ wh[2].T + bh[2] if how.early
                        else r * b[2]))
    z = 1 - z if how.swapped else z
    return (1 - z) * n + z * h, c


def _cells(d: Difference) -> list[_Cell]:
    """The weights of the layer's cells; empty if it is no recurrent one."""
    if d.place is None or not d.place.inputs_agree or d.place.a is None:
        return []
    values = [d.evidence.before.values[n].astype(float)
              for n in d.place.a.parameters if n in d.evidence.before.values]
    weights, biases = ([p for p in values if p.ndim == n] for n in (2, 1))
    biases = biases or [np.zeros(len(w)) for w in weights]
    cells = list(zip(weights[::2], weights[1::2], biases[::2], biases[1::2]))
    return cells if 2 * len(cells) == len(weights) == len(biases) and all(
        len(cell[1]) in (4 * cell[1].shape[1], 3 * cell[1].shape[1])
        and len({*map(len, cell)}) == 1 for cell in cells) else []


def _run(d: Difference, cells: Sequence[_Cell], axis: int, how: Reading
         ) -> np.ndarray:
    """What the layer returns, with time along `axis` (-1: one step)."""
    call = d.place.call_a
    xs = call.inputs[0].astype(float)
    xs = xs[None] if axis < 0 else np.moveaxis(xs, axis, 0)
    width, n = cells[0][1].shape[1], xs.shape[1]
    both = call.outputs[0].shape[-1] // width       # directions
    given = [s.astype(float).reshape(len(cells), n, width)
             for s in call.inputs[1:3] if s.size == len(cells) * n * width]
    given += [np.zeros((len(cells), n, width))] * (2 - len(given))
    for layer in range(0, len(cells), both):
        ways = []
        for way, cell in enumerate(cells[layer:layer + both]):
            h, c = (s[layer + way] for s in given)
            out = []
            for x in xs[::-1] if way else xs:
                h, c = _advance(x, h, c, cell, how)
                out.append(h)
            ways.append(np.stack(out[::-1] if way else out))
        xs = np.concatenate(ways, -1)
    return xs[0] if axis < 0 else np.moveaxis(xs, 0, axis)


@once
def _readings(d: Difference) -> list[tuple[Reading, str, float]]:
    """How one side computes, where the other does as the frameworks do: in
    words, and the residual."""
    cells = _cells(d)
    return [*_other_readings(d, cells)] if cells else []


def _other_readings(d: Difference, cells: Sequence[_Cell]
                    ) -> Iterator[tuple[Reading, str, float]]:
    gates = len(cells[0][0]) // cells[0][1].shape[1]
    usual = Reading(tuple(range(gates)))
    u, v = d.outputs()
    apart = distance(u, v) if u.shape == v.shape else 0.0
    for axis in (0, 1) if u.ndim == 3 else (-1,) if u.ndim == 2 else ():
        predicted = _run(d, cells, axis, usual)
        for side, own, bad in ((d.b, u, v), (d.a, v, u)) if apart else ():
            if distance(predicted, own) > d.limit * apart:
                continue
            for how in (
                    *(Reading(order) for order in itertools.permutations(
                        usual.order)),
                    *(Reading(usual.order, early, swapped)
                      for early, swapped in ((True, False), (False, True),
                                             (True, True)) if gates == 3)):
                yield how, str(side), distance(
                    _run(d, cells, axis, how), bad) / apart


@cause("permuted gates", "forward", resort=1)
def permuted(d: Difference) -> Found:
    for how, side, residual in _readings(d):
        names = GATES[len(how.order)]
        if how.order != tuple(range(len(names))):
            order = ", ".join(names[how.order.index(k)]
                              for k in range(len(names)))
            yield (f"{d.layer}: {side} takes the blocks of the weights for "
                   f"the gates {order}. In Gluon and PyTorch they are "
                   f"{', '.join(names)}: split them in that order, or give "
                   "a map= that reorders the blocks"), residual


@cause("GRU variant", "forward", resort=1)
def variant(d: Difference) -> Found:
    for how, side, residual in _readings(d):
        texts = [
            "multiplies the state by the reset gate before the matrix "
            "product, n = tanh(W x + U (r * h) + b); Gluon and PyTorch do "
            "after it, n = tanh(W x + r * (U h + b))"] * how.early + [
            "weighs the new value by the update gate, h = (1 - z) * h + "
            "z * n; Gluon and PyTorch the old one, h = (1 - z) * n + z * h"
            ] * how.swapped
        if texts:
            yield f"{d.layer}: {side} {'; it '.join(texts)}", residual


@cause("permuted gates", "initial")
def permuted_values(d: Difference) -> Found:
    """The same values, in blocks of another order."""
    one, two = d.evidence.initial
    wrong = [g.name for g in d.wrong("initial")]
    if not wrong or not all(map(d.trained.get, wrong)):
        return      # constants: the mean of three colours has no gates
    for gates, names in GATES.items():
        if any(len(one[n]) % gates or one[n].shape != two[n].shape
               for n in wrong):
            continue
        for order in itertools.permutations(range(gates)):
            yield (f"{', '.join(wrong[:4])}: {d.b} has the blocks {order} of "
                   f"{d.a}'s: both frameworks' order of gates is "
                   f"{', '.join(names)}"), d.residual(one, two, {
                       n: np.concatenate([np.split(one[n], gates)[k]
                                          for k in order])
                       for n in wrong}, d.scales("initial"))
