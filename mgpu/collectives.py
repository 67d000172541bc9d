"""Collectives over a list with one array per device, for both engines.

All run in place and return None (the text's form) unless they say that they
return something. Sums are taken in a fixed order, which each algorithm
names, so that a run can be repeated bit for bit. Differentiable forms that
return new arrays are in `mgpu.functional`.
"""
from typing import Any, Callable, Dict, List, Sequence

from mgpu.backends import get_backend
from mgpu.backends.base import refuse_foreign
from mgpu.split import shard_bounds

Array = Any
OPS = ("sum", "mean", "max", "min")


def check_list(data: Any, what: str = "data") -> List[Array]:
    """`data` as a list of native arrays of one shape and dtype."""
    backend = get_backend()
    if backend.is_native(data) or not isinstance(data, (list, tuple)):
        raise TypeError(f"{what} must be a list with one array per device; "
                        f"received {type(data).__name__}.")
    if not data:
        raise ValueError(f"{what} must hold at least one array; received an "
                         "empty list.")
    for x in data:
        if not backend.is_native(x):
            refuse_foreign(x, backend.name)
            raise TypeError(f"{what} must hold arrays of the {backend.name} "
                            f"backend; received {type(x).__name__}. Use "
                            "mgpu.put(x, device).")
    forms = [(tuple(x.shape), str(x.dtype)) for x in data]
    if len(set(forms)) > 1:
        raise ValueError(
            f"{what} must hold arrays of one shape and dtype; received "
            f"{', '.join(f'{shape} {dtype}' for shape, dtype in forms)}.")
    return list(data)


def _check(data: Any, op: str, root: int = 0) -> List[Array]:
    arrays = check_list(data)
    if op not in OPS:
        raise ValueError(f"unknown op; received {op!r}. Use one of "
                         f"{', '.join(map(repr, OPS))}.")
    _check_root(root, len(arrays))
    return arrays


def _check_root(root: int, k: int) -> None:
    if isinstance(root, bool) or not isinstance(root, int) \
            or not 0 <= root < k:
        raise ValueError(f"root must be the number of a device, 0 to "
                         f"{k - 1}; received {root!r}.")


def _combine(op: str, into: Array, other: Array) -> None:
    """``into <- into op other``; `other` is brought to the device first."""
    backend = get_backend()
    other = backend.put(other, into)
    if op == "max":
        into[:] = backend.ops.maximum(into, other)
    elif op == "min":
        into[:] = backend.ops.minimum(into, other)
    else:
        into += other


# -- algorithms: each leaves the reduction in every element -------------------

def _naive(data: List[Array], op: str, root: int) -> None:
    """The text's: all to `root`, then back. ``x[root] + x[0] + x[1] ...``"""
    _reduce(data, op, root)
    _broadcast(data, root)


def _tree(data: List[Array], op: str, root: int) -> None:
    """Pairs, then pairs of pairs; log2(K) rounds up and down. The order is
    ``(x[0] + x[1]) + (x[2] + x[3])``, counted from `root`."""
    k = len(data)
    order = data[root:] + data[:root]
    gap = 1
    while gap < k:
        for i in range(0, k - gap, 2 * gap):
            _combine(op, order[i], order[i + gap])
        gap *= 2
    while gap > 1:
        gap //= 2
        for i in range(0, k - gap, 2 * gap):
            order[i + gap][:] = order[i]


def _chunks(data: List[Array]) -> List[List[Array]]:
    """``chunks[i][c]``: chunk c of element i, a view."""
    flat = [get_backend().ops.flat_view(x) for x in data]
    bounds = shard_bounds(len(flat[0]), len(data))
    return [[x[begin:end] for begin, end in bounds] for x in flat]


def _ring(data: List[Array], op: str, root: int) -> None:
    """K - 1 steps to reduce chunk c around the ring, ending on device
    ``c - 1``, and K - 1 to pass the results on (Patarasu and Yuan, 2009).
    Chunk c is summed as ``x[c] + x[c+1] + ... + x[c-1]``."""
    k = len(data)
    chunks = _chunks(data)
    for step in range(k - 1):
        for i in range(k):
            c = (i - step) % k
            if len(chunks[i][c]):
                _combine(op, chunks[(i + 1) % k][c], chunks[i][c])
    for step in range(k - 1):
        for i in range(k):
            c = (i + 1 - step) % k
            if len(chunks[i][c]):
                chunks[(i + 1) % k][c][:] = chunks[i][c]


def _sharded(data: List[Array], op: str, root: int) -> None:
    """Device c reduces slice c of all, ``x[c] + x[0] + x[1] ...``, and every
    device fetches it: reduce-scatter, then all-gather."""
    chunks = _chunks(data)
    for c in range(len(data)):
        column = [row[c] for row in chunks]
        if len(column[c]):
            _naive(column, op, c)


ALGORITHMS: Dict[str, Callable[[List[Array], str, int], None]] = {
    "naive": _naive, "tree": _tree, "ring": _ring, "sharded": _sharded}
ALGORITHMS["auto"] = _naive


def _reduce(data: List[Array], op: str, root: int) -> None:
    for i, x in enumerate(data):
        if i != root:
            _combine(op, data[root], x)


def _broadcast(data: List[Array], root: int) -> None:
    for i, x in enumerate(data):
        if i != root:
            x[:] = data[root]


# -- public -------------------------------------------------------------------

def allreduce(data: List[Array], *, op: str = "sum", algorithm: str = "auto",
              root: int = 0) -> None:
    """Reduce over all elements of `data` and leave the result in each.

    In place on every element; nothing is rebound, so arrays that the caller
    holds elsewhere see the result. Outside of recording: no gradient passes
    (use `mgpu.functional.allreduce` for that).

    Parameters
    ----------
    data : list of native arrays
        One per device, of one shape and dtype.
    op : {"sum", "mean", "max", "min"}
    algorithm : {"auto", "naive", "tree", "ring", "sharded"}
        The order of additions and who moves what; see their docstrings. All
        give the same bits where the sums are exact. "auto" is "naive".
    root : int
        Where "naive" and "tree" collect. Gradients of many parameters are
        best collected on different devices: see `mgpu.assign_roots`.

    Raises
    ------
    TypeError, ValueError
        No list, different shapes or dtypes, an array of the other
        framework, an unknown op or algorithm, an impossible root. Nothing
        has changed then.
    """
    arrays = _check(data, op, root)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm; received {algorithm!r}. Use "
                         f"one of {', '.join(map(repr, ALGORITHMS))}.")
    with get_backend().scope(recording=False):
        ALGORITHMS[algorithm](arrays, op, root)
        if op == "mean":
            for x in arrays:
                x /= len(arrays)


def broadcast(data: List[Array], *, root: int = 0) -> None:
    """Copy element `root` into every other element, in place."""
    arrays = _check(data, "sum", root)
    with get_backend().scope(recording=False):
        _broadcast(arrays, root)


def reduce(data: List[Array], *, op: str = "sum", root: int = 0) -> None:
    """Leave the reduction in element `root`, in place; the others stay."""
    arrays = _check(data, op, root)
    with get_backend().scope(recording=False):
        _reduce(arrays, op, root)
        if op == "mean":
            arrays[root] /= len(arrays)


def allgather(data: List[Array], *, axis: int = 0) -> List[Array]:
    """Join all elements along `axis`, nothing added, on every device.

    Returns
    -------
    list of native arrays
        K fresh arrays, element i on the device of ``data[i]``. Lengths along
        `axis` may differ.
    """
    arrays = _check_joinable(data, axis)
    with get_backend().scope(recording=False):
        return gathered(arrays, axis)


def gathered(data: List[Array], axis: int) -> List[Array]:
    backend = get_backend()
    return [backend.ops.concat([backend.put(x, here) for x in data], axis)
            for here in data]


def _check_joinable(data: Any, axis: int) -> List[Array]:
    for x in data if isinstance(data, (list, tuple)) else [data]:
        check_list([x] if isinstance(data, (list, tuple)) else x)
    rests = [tuple(n for i, n in enumerate(x.shape) if i != axis % x.ndim)
             for x in data]
    if not data or len(set(rests)) > 1 or \
            len({str(x.dtype) for x in data}) > 1:
        raise ValueError(
            f"data must hold arrays of one dtype that differ in axis {axis} "
            f"alone; received {[tuple(x.shape) for x in data]}.")
    return list(data)


def reducescatter(data: List[Array], *, op: str = "sum") -> List[Array]:
    """Reduce over all elements; device i keeps slice i along axis 0.

    Returns
    -------
    list of native arrays
        K fresh arrays; slice bounds as in `mgpu.shard_bounds`, so slices
        are empty where axis 0 is shorter than K. `data` stays unchanged.
    """
    arrays = _check(data, op)
    backend = get_backend()
    bounds = shard_bounds(arrays[0].shape[0], len(arrays))
    with backend.scope(recording=False):
        parts = []
        for (begin, end), here in zip(bounds, arrays):
            part = backend.put(here[begin:end], here)
            for other in arrays:
                if other is not here:
                    _combine(op, part, other[begin:end])
            if op == "mean":
                part /= len(arrays)
            parts.append(part)
        return parts


def assign_roots(sizes: Sequence[int], k: int) -> List[int]:
    """On which of `k` devices to aggregate each array.

    Parameter i goes to device ``i % k`` when all are equally large (the
    text's exercise); in general the largest first, each to the device with
    the fewest bytes so far, so that no device's link carries much more than
    its share.

    Parameters
    ----------
    sizes : sequence of int
        Bytes, or elements, of each array.
    """
    load = [0] * k
    roots = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        roots[i] = min(range(k), key=lambda d: (load[d], d))
        load[roots[i]] += sizes[i]
    return roots
