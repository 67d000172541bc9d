"""Collectives: bit for bit where sums are exact, in the documented order
where they are not."""
import contextlib
import functools
import itertools

import numpy as np
import pytest

import mgpu
from helpers import (ENGINES, assert_bit_equal, foreign_array,
                     refusal_of_foreign, using_engine)
from mgpu import (allgather, allreduce, assign_roots, broadcast, collectives,
                  cpu, reduce, reducescatter, shard_bounds)
from mgpu.collectives import OPS, AllReduce, host_memory
from mgpu.collectives.strategies import Balanced, Buckets

SHAPES = [(), (0, 3), (1,), (3,), (5, 7), (4, 1, 3)]
#: mgpu's own; "native" has tests of its own
ALGORITHMS = [a for a in collectives.ALGORITHMS if a != "native"]
COUNTS = (1, 2, 3, 5)
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")


@pytest.fixture(params=ENGINES)
def backend(request):
    with using_engine(request.param) as backend:
        yield backend


def put(backend, hosts):
    return [backend.put(x, cpu(i)) for i, x in enumerate(hosts)]


def integers(k, shape, dtype="float32"):
    """Small whole numbers that depend on the device and the place, with the
    largest and the smallest of them on different devices at each place."""
    n = int(np.prod(shape))
    return [((np.arange(n) * (3 + i) + 5 * i) % 11 + i).reshape(shape)
            .astype(dtype) for i in range(k)]


def reduced(hosts, op):
    every = np.stack(hosts)
    if op == "mean":
        total = every.sum(axis=0, dtype=every.dtype)
        return (total / np.array(len(hosts), every.dtype)).astype(every.dtype)
    function = {"sum": np.sum, "max": np.max, "min": np.min}[op]
    return function(every, axis=0).astype(every.dtype)


# -- allreduce, bit for bit ---------------------------------------------------

@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_allreduce_is_exact_and_in_place(backend, algorithm):
    for k, op, shape in itertools.product(COUNTS, OPS, SHAPES):
        hosts = integers(k, shape)
        data = put(backend, hosts)
        aliases = list(data)
        assert allreduce(data, op=op, algorithm=algorithm) is None
        assert all(a is b for a, b in zip(data, aliases, strict=True))
        for x in aliases:
            assert_bit_equal(backend.to_numpy(x), reduced(hosts, op))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_allreduce_keeps_the_dtype(backend, algorithm):
    for dtype, op in itertools.product(DTYPES, OPS):
        if op == "mean" and "int" in dtype:
            continue        # raises, see below
        hosts = integers(3, (3, 3), dtype)
        data = put(backend, hosts)
        allreduce(data, op=op, algorithm=algorithm)
        for x in data:
            assert_bit_equal(backend.to_numpy(x), reduced(hosts, op))


def test_views_and_leaves_see_the_result(backend, devices):
    """What the caller holds elsewhere: a slice, a gradient, a leaf."""
    hosts = [np.arange(6.0) + i for i in range(len(devices))]
    data = put(backend, hosts)
    slices = [x[2:4] for x in data]
    for x in data:
        backend.attach_grad(x)
    allreduce(data)
    for part in slices:
        assert_bit_equal(backend.to_numpy(part), reduced(hosts, "sum")[2:4])
    with mgpu.record():
        losses = [x * (i + 1.0) for i, x in enumerate(data)]
    mgpu.backward(losses)
    allreduce([mgpu.grad(x) for x in data], op="mean")
    for x in data:
        assert_bit_equal(backend.to_numpy(mgpu.grad(x)),
                         np.full(6, (1 + len(devices)) / 2))


def test_slices_are_reduced_in_place(backend, devices):
    data = put(backend, integers(len(devices), (6, 2)))
    for algorithm in ALGORITHMS:
        parts = [x[1:4] for x in data]
        before = [backend.to_numpy(x) for x in data]
        allreduce(parts, op="max", algorithm=algorithm)
        for x, old in zip(data, before):
            new = old.copy()
            new[1:4] = reduced([b[1:4] for b in before], "max")
            assert_bit_equal(backend.to_numpy(x), new)


def test_nothing_is_recorded(backend, devices):
    xs = put(backend, [np.ones(2)] * len(devices))
    for x in xs:
        backend.attach_grad(x)
    with mgpu.record():
        losses = [x * 2 for x in xs]
        copies = put(backend, [np.ones(2)] * len(devices))
        allreduce(copies)
        losses.append(copies[0] * xs[0])
        assert backend.is_recording() and backend.is_training()
    mgpu.backward(losses)
    assert backend.to_numpy(mgpu.grad(xs[0])).tolist() \
        == [2 + len(devices)] * 2


@pytest.mark.parametrize("backend", [
    engine for engine in ENGINES if engine != "torch"], indirect=True)
def test_mxnets_kvstore(backend):
    for shape, op in itertools.product(SHAPES, ("sum", "mean")):
        hosts = integers(3, shape)
        data = put(backend, hosts)
        allreduce(data, op=op, algorithm="native")
        for x in data:
            assert_bit_equal(backend.to_numpy(x), reduced(hosts, op))


def test_native_collectives_refuse_what_they_cannot_do(backend):
    """NCCL is for cards (`tests/test_gpu.py`), kvstore for sums."""
    op, what = ("max", "kvstore supports sums only; received op='max'") \
        if backend.name == "mxnet" else ("sum", "arrays on cpu, cpu")
    data = put(backend, [np.ones(2), np.ones(2)])
    with pytest.raises(ValueError, match=what):
        allreduce(data, op=op, algorithm="native")
    assert backend.to_numpy(data[0]).tolist() == [1, 1]


# -- the others ---------------------------------------------------------------


def test_reduce_leaves_the_others(backend, devices):
    for op, shape, root in itertools.product(OPS, SHAPES, range(3)):
        hosts = integers(len(devices), shape)
        data = put(backend, hosts)
        assert reduce(data, op=op, root=root) is None
        for i, x in enumerate(data):
            assert_bit_equal(backend.to_numpy(x), reduced(hosts, op)
                             if i == root else hosts[i])


def test_allgather(backend):
    """Lengths along the axis differ, one of them 0."""
    for axis in (0, 1, -1, -2):
        hosts = [np.full((i, 3) if axis in (0, -2) else (2, i), i + 1.0)
                 for i in range(3)]
        data = put(backend, hosts)
        made = allgather(data, axis=axis)
        assert len(made) == 3
        for y in made:
            assert_bit_equal(backend.to_numpy(y), np.concatenate(hosts, axis))
            if 0 not in y.shape:
                y += 1          # fresh: the elements stay
        for x, host in zip(data, hosts):
            assert_bit_equal(backend.to_numpy(x), host)


@pytest.mark.device_counts(1, 3)
def test_reducescatter(backend, devices):
    """Slices are empty where axis 0 is shorter than the list."""
    k = len(devices)
    for op, shape in itertools.product(OPS, [*SHAPES[1:], (3, 0)]):
        hosts = integers(k, shape)
        data = put(backend, hosts)
        made = reducescatter(data, op=op)
        answer = reduced(hosts, op)
        for y, (begin, end) in zip(made, shard_bounds(shape[0], k),
                                   strict=True):
            assert_bit_equal(backend.to_numpy(y), answer[begin:end])
            if 0 not in y.shape:
                y += 1      # fresh
        for x, host in zip(data, hosts):
            assert_bit_equal(backend.to_numpy(x), host)


# -- errors -------------------------------------------------------------------

EVERY = [allreduce, broadcast, reduce, allgather, reducescatter]


@pytest.mark.parametrize("function", [allreduce, allgather])
def test_no_list_is_refused(backend, function):
    x = backend.put(np.ones(2), cpu(0))
    for data in (x, None, "ab", {"a": x}, iter([x])):
        with pytest.raises(TypeError) as refused:
            function(data)
        assert str(refused.value) == (
            "data must be a list with one array per device; received "
            f"{type(data).__name__}. Create one with mgpu.split_and_load, or "
            "with mgpu.put(x, device) for each device.")
    for data in ([], ()):
        with pytest.raises(ValueError) as refused:
            function(data)
        assert str(refused.value) == (
            "data must hold at least one array; received an empty list. Pass "
            "one array per device.")


@pytest.mark.parametrize("function", EVERY)
def test_what_is_not_native_is_refused(backend, function):
    x = backend.put(np.ones(3, "float32"), cpu(0))
    foreign, name = foreign_array(backend)
    with pytest.raises(TypeError) as refused:
        function([x, foreign])
    assert str(refused.value) == refusal_of_foreign(backend, name)
    for other in (np.ones(3, "float32"), 1.0, None, [x]):
        with pytest.raises(TypeError) as refused:
            function([x, other])
        assert str(refused.value) == (
            f"data must hold arrays of the {backend.name} backend; received "
            f"{type(other).__name__}. Use mgpu.put(x, device).")
    assert backend.to_numpy(x).tolist() == [1, 1, 1]


def assert_refused(backend, values, text, functions=(allreduce,), **options):
    """Each of the functions raises for these arrays and leaves them alone."""
    data = put(backend, values)
    for function in functions:
        with pytest.raises(ValueError) as refused:
            function(data, **options)
        assert str(refused.value) == text
    for x, value in zip(data, values):
        assert_bit_equal(backend.to_numpy(x), value)


@pytest.mark.parametrize("other", [
    np.ones(3, "float32"), np.ones((1, 2), "float32"), np.ones(2),
    np.ones(2, "int32"), np.ones(2, bool)],
    ids=lambda x: f"{x.shape}{x.dtype}")
def test_different_shapes_and_dtypes_are_refused(backend, other):
    assert_refused(
        backend, [np.ones(2, "float32"), other],
        "data must hold arrays of one shape and dtype; received (2,) float32,"
        f" {other.shape} {other.dtype}. Convert them.",
        (allreduce, broadcast, reduce, reducescatter))


def test_unknown_ops_are_refused(backend):
    for op in ("product", "", None, "Sum"):
        assert_refused(
            backend, [np.ones(2)] * 2, f"unknown op; received {op!r}. Use "
            "one of 'sum', 'mean', 'max', 'min'.",
            (allreduce, reduce, reducescatter), op=op)


def test_unknown_algorithms_are_refused(backend):
    for algorithm in ("nccl", "", None):
        assert_refused(
            backend, [np.ones(2)] * 2, f"unknown algorithm; received "
            f"{algorithm!r}. Use one of 'naive', 'tree', 'ring', 'sharded', "
            "'native', 'auto', or an instance of a subclass of AllReduce.",
            algorithm=algorithm)


def test_impossible_roots_are_refused(backend):
    for root in (-1, 2, 0.0, None, True, "0"):
        assert_refused(
            backend, [np.ones(2)] * 2, "root must be a device index, 0 to 1; "
            f"received {root!r}.", (allreduce, broadcast, reduce), root=root)


def test_reductions_of_another_dtype_are_refused(backend):
    """The mean of integers is no integer, the sum of truths is no truth."""
    for dtype, op in (("int32", "mean"), ("uint8", "mean"), ("bool", "sum"),
                      ("bool", "mean"), ("bool", "max"), ("bool", "min")):
        assert_refused(
            backend, [np.ones(2, dtype), np.zeros(2, dtype)],
            f"{op} does not support {dtype} arrays; received (2,) {dtype}, "
            f"(2,) {dtype}. Convert them first, for example with "
            "mgpu.functional.astype(x, 'float32').",
            (allreduce, reduce, reducescatter), op=op)


@pytest.mark.parametrize("backend", [
    engine for engine in ENGINES if engine == "torch"], indirect=True)
def test_complex_numbers_have_no_largest(backend):
    import torch
    data = [torch.ones(2, dtype=torch.complex64) for _ in range(2)]
    for op, algorithm in itertools.product(("max", "min"),
                                           collectives.ALGORITHMS):
        with pytest.raises(ValueError, match=op + " is not defined for "
                           "complex numbers"):
            allreduce(data, op=op, algorithm=algorithm)


SHARED = ("arrays that a collective writes must not overlap in memory; "
          "received one array twice, or views that share memory. Copy one of "
          "them with mgpu.put(x, device).")
WRITING = [broadcast, reduce, *(functools.partial(allreduce, algorithm=a)
                                for a in collectives.ALGORITHMS)]


def test_arrays_that_share_memory_are_refused(backend):
    """Sums would be added to themselves: the step of a training becomes
    2^(k-1) times too large (framework-differences, 2.1)."""
    whole = backend.put(np.arange(6.0), cpu(0))
    x, y = put(backend, [np.ones(4), np.ones(4)])
    for data in ([x, y, x], [x, y[0:], y], [whole[:4], whole[2:]],
                 [whole[0:4], x, whole[1:5]]):
        for write in WRITING:
            with pytest.raises(ValueError) as refused:
                write(data)
            assert str(refused.value) == SHARED
    for a, before in ((whole, np.arange(6.0)), (x, np.ones(4))):
        assert_bit_equal(backend.to_numpy(a), before)


def test_parts_of_one_array_may_stand_for_devices(backend):
    """They lie side by side."""
    for algorithm in ALGORITHMS:
        whole = backend.put(np.arange(6.0), cpu(0))
        allreduce([whole[:3], whole[3:]], algorithm=algorithm)
        assert backend.to_numpy(whole).tolist() == [3, 5, 7, 3, 5, 7]


def test_arrays_without_a_place_for_each_element_are_refused(backend):
    """Tensors of torch that repeat elements, and sparse arrays."""
    x, = put(backend, [np.ones((2, 3), "float32")])
    wrong = [x[0].as_strided((2, 2), (1, 1)), x[:1, ::2].expand(2, 2),
             x.to_sparse()] if backend.name == "torch" \
        else [x.as_nd_ndarray().tostype("row_sparse")]
    for y, write in itertools.product(wrong, WRITING):
        other = backend.put(np.ones(y.shape, "float32"), cpu(1))
        with pytest.raises(ValueError, match="the elements of an array that "
                           "is written must not share memory; received "):
            write([other, y])
        assert (backend.to_numpy(other) == 1).all()


def test_one_array_may_be_read_twice(backend):
    x = backend.put(np.arange(4.0), cpu(0))
    assert [backend.to_numpy(y).tolist() for y in reducescatter([x, x])] \
        == [[0, 2], [4, 6]]
    assert backend.to_numpy(allgather([x, x])[0]).tolist() \
        == [0, 1, 2, 3, 0, 1, 2, 3]


def test_allgather_along_a_missing_axis(backend):
    for shape, axis in (((2, 2), 2), ((2, 2), -3), ((), 0), ((3,), 1)):
        assert_refused(
            backend, [np.ones(shape, "float32")] * 2,
            f"an array of shape {shape} has no axis {axis} to concatenate "
            f"along; received {shape} float32, {shape} float32. Use an axis "
            "of all arrays.", [allgather], axis=axis)


def test_allgather_of_what_does_not_fit(backend):
    for other, axis in ((np.ones((2, 3), "float32"), 0),
                        (np.ones((3, 2), "float32"), 1),
                        (np.ones(2, "float32"), 0), (np.ones((2, 2)), 0),
                        (np.ones((2, 2, 1), "float32"), -1)):
        assert_refused(
            backend, [np.ones((2, 2), "float32"), other],
            "data must hold arrays of one dtype that differ only in axis "
            f"{axis}; received (2, 2) float32, {other.shape} {other.dtype}. "
            "Convert them.", [allgather], axis=axis)


def test_reducescatter_needs_an_axis(backend):
    with pytest.raises(ValueError, match="splits along axis 0; received"):
        reducescatter(put(backend, [np.array(1.0)] * 2))


def test_arrays_that_do_not_lie_in_memory_row_by_row(backend, devices):
    """A transposed tensor of torch, where the algorithm cuts no array."""
    hosts = integers(len(devices), (2, 3))
    for algorithm in ALGORITHMS:
        if backend.name == "torch" and algorithm in ("ring", "sharded"):
            continue        # raises, see below
        data = [x.T for x in put(backend, [h.T.copy() for h in hosts])]
        allreduce(data, algorithm=algorithm)
        for x in data:
            assert_bit_equal(backend.to_numpy(x), reduced(hosts, "sum"))


# -- assign_roots -------------------------------------------------------------

def test_equal_sizes_go_round():
    for k in range(1, 9):
        assert assign_roots([40] * 20, k) == [i % k for i in range(20)]


def test_impossible_numbers_of_devices():
    for k in (0, -1, 1.0, None, True):
        with pytest.raises(ValueError) as refused:
            assign_roots([1], k)
        assert str(refused.value) == (
            "the number of devices must be a whole number, 1 or more; "
            f"received {k!r}.")


# -- many lists ---------------------------------------------------------------

@pytest.mark.parametrize("mode", [contextlib.nullcontext,
                                  mgpu.strict_devices],
                         ids=["plain", "strict"])
def test_many_lists_are_reduced_alike(backend, devices, mode):
    k, shapes = len(devices), [(3,), (2, 2), (5, 1), (40,)]
    with mode():    # strict: not in the host's memory, by copies
        lists = [[mgpu.put(np.full(s, 10.0 * j + i, "float32"), d)
                  for i, d in enumerate(devices)]
                 for j, s in enumerate(shapes)]
        mgpu.allreduce_many(lists)
    for j, (shape, arrays) in enumerate(zip(shapes, lists)):
        total = sum(10.0 * j + i for i in range(k))
        for x in arrays:
            assert_bit_equal(mgpu.to_numpy(x),
                             np.full(shape, total, "float32"))


def test_arrays_are_cut_between_threads(backend, devices, monkeypatch):
    """Blocks of a few bytes, and shares of threads that end inside arrays of
    different dtypes."""
    monkeypatch.setattr(host_memory, "REDUCE_BLOCK", 64)
    monkeypatch.setattr(host_memory, "SHARE", 16)
    monkeypatch.setattr(host_memory, "cpu_cores", lambda: 3)
    hosts = [integers(len(devices), shape, dtype)
             for shape, dtype in (((7,), "float64"), ((33, 3), "float32"),
                                  ((1,), "float32"), ((2, 5, 5), "float64"))]
    for op in OPS:
        lists = [put(backend, columns) for columns in hosts]
        mgpu.allreduce_many(lists, op=op)
        for columns, arrays in zip(hosts, lists):
            for x in arrays:
                assert_bit_equal(backend.to_numpy(x), reduced(columns, op))


def test_many_lists_of_different_lengths_are_refused(backend):
    one, two = ([mgpu.put(np.ones(2, "float32"), mgpu.cpu(i))
                 for i in range(n)] for n in (1, 2))
    with pytest.raises(ValueError, match="one array per device; received "
                       r"lists of \[1, 2\] arrays"):
        mgpu.allreduce_many([two, one])
    assert (mgpu.to_numpy(two[0]) == 1).all()


# -- the seam that training uses ----------------------------------------------

@pytest.mark.parametrize("engine, strategy", [
    (engine, strategy) for engine in ENGINES
    for strategy in (Balanced(), Buckets(8), Buckets(100))
    # `Buckets` needs the backend's own collective, which torch has on CUDA
    # cards only
    if engine != "torch" or isinstance(strategy, Balanced)],
    indirect=["engine"], ids=str)
def test_strategies_that_have_no_name(engine, strategy):
    hosts = [integers(3, shape, dtype) for shape, dtype in (
        ((7,), "float64"), ((3, 3), "float32"), ((), "float32"),
        ((2, 5), "float64"))]
    lists = [put(engine, columns) for columns in hosts]
    mgpu.allreduce_many(lists, algorithm=strategy)
    for columns, arrays in zip(hosts, lists):
        for x in arrays:
            assert_bit_equal(engine.to_numpy(x), reduced(columns, "sum"))


@pytest.mark.parametrize("algorithm", ["ring", "sharded"])
def test_a_list_that_is_refused_leaves_the_others_as_they_are(backend,
                                                              algorithm):
    """Only torch has arrays that are not contiguous; shapes differ on both."""
    values = [np.full((2, 3), i + 1.0) for i in range(2)]
    lists = [put(backend, values), put(backend, values)]
    lists[1] = [x.T for x in lists[1]] if backend.name == "torch" \
        else [lists[1][0], lists[1][1].T]
    with pytest.raises(ValueError, match="algorithm='naive' or 'tree'"
                       if backend.name == "torch" else "one shape"):
        mgpu.allreduce_many(lists, algorithm=algorithm)
    for x, before in zip(lists[0], values):
        assert_bit_equal(backend.to_numpy(x), before)


def test_a_strategy_that_puts_other_arrays_into_its_list(backend):
    class Rebinds(AllReduce):
        def allreduce_list(self, data, op, root):
            data[:] = [data[0] + data[1]] * 2

    with pytest.raises(RuntimeError, match=r"Write x\[:\] = result"):
        allreduce(put(backend, [np.ones(2), np.ones(2)]), algorithm=Rebinds())


def test_a_strategy_without_a_method_is_refused(backend):
    with pytest.raises(ValueError, match="a subclass of AllReduce"):
        allreduce(put(backend, [np.ones(2)]), algorithm=AllReduce())

    class Empty(AllReduce):
        pass
    with pytest.raises(NotImplementedError, match="Empty.. has neither"):
        allreduce(put(backend, [np.ones(2)] * 2), algorithm=Empty())


class Noting(AllReduce):
    """Notes what it is given; does nothing."""

    def __init__(self):
        self.seen = []

    def allreduce(self, lists, op, roots):
        self.seen.append(([tuple(data[0].shape) for data in lists], op,
                          list(roots)))


def test_a_user_defined_strategy_gets_its_arguments(backend):
    """An axis for each array, no empty arrays, a sum for a mean."""
    own, lists = Noting(), [put(backend, [np.ones(shape, "float32")] * 2)
                            for shape in ((), (0, 3), (4,), (2, 2))]
    mgpu.allreduce_many(lists, op="mean", algorithm=own)
    assert own.seen == [([(1,), (4,), (2, 2)], "sum", [0, 0, 1])]
    assert backend.to_numpy(lists[2][1]).tolist() == [0.5] * 4
