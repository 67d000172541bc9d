"""Cutting batches: Gluon's sizes and errors, on both backends, for native
arrays of both families of MXNet and for NumPy's."""
import argparse
import array
import collections
import itertools
import re
import types
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

import mgpu
from helpers import assert_bit_equal, foreign_array, refusal_of_foreign
from mgpu import cpu, shard_bounds, split_and_load, split_batch
from mgpu.data.split import map_leaves


def on_host(backend, shards):
    assert isinstance(shards, list)
    return [backend.to_numpy(x) for x in shards]


# -- bounds -------------------------------------------------------------------

def test_bounds():
    for k, n in itertools.product(range(1, 9), (*range(20), 70)):
        bounds = shard_bounds(n, k)
        # NumPy cuts as Gluon does: the first n % k get one more.
        ends = np.cumsum([len(part) for part
                          in np.array_split(np.empty(n), k)]).tolist()
        assert bounds == list(zip([0, *ends], ends))
        assert all(type(i) is int for pair in bounds for i in pair)


def test_weights():
    for n, weights, sizes in (
            (9, [2, 1], [6, 3]), (10, [2, 1], [7, 3]), (11, [2, 1], [7, 4]),
            (1, [1, 9], [0, 1]), (2, [1, 1, 1], [1, 1, 0]),
            (0, [3, 1], [0, 0]),
            (7, [1, 1, 2], [2, 2, 3]),          # remainders .75 .75 .5
            (10, [1e308, 1e308], [5, 5]), (3, [0.1, 0.2], [1, 2]),
            (10, [1e-320, 1e300], [0, 10]), (4, np.float32([1, 3]), [1, 3])):
        bounds = shard_bounds(n, len(sizes), weights)
        assert [b - a for a, b in bounds] == sizes, (n, weights)


def test_impossible_weights():
    for weights in ([1], [1, 2, 3], [], [1, 0], [1, -1], [1, float("nan")],
                    [1, float("inf")], [1, None], [1, "x"], 2, "ab"):
        with pytest.raises(ValueError, match="weights must be 2 positive"):
            shard_bounds(4, 2, weights)


def test_impossible_counts():
    for n, k in ((-1, 2), (4, 0), (4, -1), (4.0, 2), (4, 2.0), (None, 2),
                 (4, True)):
        with pytest.raises(ValueError, match=re.escape(
                f"n >= 0 and k >= 1; received n={n!r}, k={k!r}.")):
            shard_bounds(n, k)


# -- split_and_load against Gluon ---------------------------------------------

def rows_along(n, axis):
    x = np.arange(2.0 * n, dtype="float32").reshape(n, 2)
    return x if axis == 0 else x.T


@pytest.mark.device_counts(1, 3, 8)
def test_shards_are_those_of_gluon(engine, devices):
    """On torch they are those that `np.array_split` gives, which are those
    of Gluon on MXNet."""
    k, gluon = len(devices), None
    if engine.name == "mxnet":
        import mxnet as mx
        gluon = mx.gluon.utils.split_and_load
        handles = [engine.handle(d) for d in devices]
    for axis, n in itertools.product((0, 1, -1), (*range(1, 10), 38)):
        x, even_split = rows_along(n, axis), n % k == 0
        native = engine.put(x, cpu(0))
        for data in (x, native):
            shards = split_and_load(data, devices, axis, even_split)
            for shard, part in zip(shards, np.array_split(x, k, axis),
                                   strict=True):
                assert_bit_equal(engine.to_numpy(shard), part)
        if gluon and (n >= k or mx.npx.is_np_array()):  # else Gluon raises
            theirs = gluon(native, handles, axis, even_split)
            for shard, other in zip(shards, theirs, strict=True):
                assert shard.ctx == other.ctx and type(shard) is type(other)
                assert_bit_equal(shard.asnumpy(), other.asnumpy())
        if gluon:
            assert [s.ctx for s in shards] == handles


def test_an_uneven_split_is_refused_as_by_gluon(backend):
    devices = [cpu(i) for i in range(3)]
    for axis, n in itertools.product((0, 1), (1, 4, 38)):
        x = rows_along(n, axis)
        native = backend.put(x, cpu(0))
        calls = [lambda data=data: split_and_load(data, devices, axis)
                 for data in (x, native)]
        if backend.name == "mxnet":
            from mxnet.gluon.utils import split_and_load as gluon
            calls.append(lambda: gluon(
                native, [backend.handle(d) for d in devices], axis))
        for call in calls:
            with pytest.raises(ValueError, match=re.escape(
                    f"data with shape {x.shape} cannot be evenly split into 3 "
                    f"slices along axis {axis}. Use a batch size")):
                call()


# -- what else it promises ----------------------------------------------------

def test_the_dtype_is_kept_and_shards_are_copies(engine, devices):
    for dtype in ("uint8", "int32", "int64", "float16", "float32", "float64",
                  "bool"):
        x = (np.arange(8) % 2).astype(dtype)
        native = engine.put(x, cpu(0))
        for data in (x, native):
            shards = split_and_load(data, devices, even_split=False)
            assert_bit_equal(np.concatenate(on_host(engine, shards)), x)
            if dtype != "bool":
                for shard in shards:
                    shard += 5
        assert_bit_equal(x, (np.arange(8) % 2).astype(dtype))
        assert_bit_equal(engine.to_numpy(native), x)


def test_gradients_flow_back(engine, devices):
    x = engine.put(np.arange(10.0).reshape(5, 2), cpu(0))
    engine.attach_grad(x)
    for axis in (0, 1):
        with mgpu.record():
            shards = split_and_load(x, devices[:2], axis, False)
            losses = [shard * (i + 1.0) for i, shard in enumerate(shards)]
        mgpu.backward(losses)
        expected = np.concatenate([
            np.full_like(part, i + 1) for i, part in enumerate(
                np.array_split(np.empty((5, 2)), len(devices[:2]), axis))],
            axis)
        assert_bit_equal(mgpu.to_numpy(mgpu.grad(x)), expected)


def test_a_missing_axis_raises(backend):
    for shape, axis in (((4,), 1), ((4, 2), 2), ((4, 2), -3), ((), 0)):
        x = np.ones(shape)
        for data in (x, backend.put(x, cpu(0))):
            with pytest.raises(IndexError):
                split_and_load(data, [cpu(0), cpu(1)], axis)


def test_the_other_frameworks_arrays_are_refused(backend):
    x, name = foreign_array(backend)
    for data in (x, [np.ones(3), x], {"a": x}):
        with pytest.raises(TypeError) as refused:
            split_and_load(data, [cpu(0), cpu(1)], even_split=False)
        assert str(refused.value) == refusal_of_foreign(backend, name)
    with pytest.raises(TypeError) as refused:
        split_batch(x, np.ones(3), [cpu(0), cpu(1)])
    assert str(refused.value) == refusal_of_foreign(backend, name)


def test_there_must_be_an_array(backend):
    for data in (None, "text", 3, [], {}, ["a", "b"], [[]]):
        with pytest.raises(TypeError, match="must hold an array to split; "
                           f"received {type(data).__name__}"):
            split_and_load(data, [cpu(0), cpu(1)])


# -- nested data --------------------------------------------------------------

class Pair(NamedTuple):
    left: object
    right: object


@dataclass
class Labelled:
    x: object
    y: object


class Table:
    """Something that NumPy makes an array of, as it does of a data frame."""

    shape = (4, 2)

    def __array__(self, dtype=None, copy=None):
        return np.arange(8.0).reshape(4, 2)


def test_nested_data_are_split_leaf_by_leaf(backend):
    a, b = np.arange(4.0), np.arange(8).reshape(4, 2)
    data = {"x": (a, [b, backend.put(a, cpu(0))]), "name": "train",
            "pair": Pair(a, None), "scale": 2.5,
            "more": collections.deque([b, a]),
            "ordered": collections.OrderedDict(z=a)}
    shards = split_and_load(data, [cpu(0), cpu(1)])
    assert len(shards) == 2 and type(data["x"]) is tuple
    for i, shard in enumerate(shards):
        rows = slice(2 * i, 2 * i + 2)
        assert type(shard) is dict and list(shard) == list(data)
        first, (second, third) = shard["x"]
        for made, whole in ((first, a), (second, b), (third, a),
                            (shard["pair"].left, a), (shard["more"][0], b),
                            (shard["more"][1], a),
                            (shard["ordered"]["z"], a)):
            assert_bit_equal(backend.to_numpy(made), whole[rows])
        assert type(shard["x"]) is tuple and type(shard["x"][1]) is list
        assert type(shard["more"]) is collections.deque
        assert type(shard["pair"]) is Pair and shard["pair"].right is None
        assert type(shard["ordered"]) is collections.OrderedDict
        assert shard["name"] == "train" and shard["scale"] == 2.5


def test_a_dict_with_a_default_keeps_it(backend):
    data = collections.defaultdict(list, x=np.arange(4.0))
    shards = split_and_load(data, [cpu(0), cpu(1)])
    assert [type(s) for s in shards] == [collections.defaultdict] * 2
    assert shards[1]["missing"] == [] and "missing" not in shards[0]
    assert backend.to_numpy(shards[1]["x"]).tolist() == [2, 3]
    assert data["x"].tolist() == [0, 1, 2, 3]


def test_a_mapping_that_is_no_dict(backend, devices):
    """A UserDict, as tokenizers give, keeps its class; others are dicts."""
    class ReadOnly(collections.abc.Mapping):
        def __getitem__(self, name):
            return {"x": X}[name]

        def __iter__(self):
            return iter("x")

        def __len__(self):
            return 1
    X, y = np.arange(8.0), np.arange(8)
    for data, kind in ((collections.UserDict(x=X), collections.UserDict),
                       (ReadOnly(), dict)):
        shards, _ = split_batch(data, y, devices)
        assert {type(shard) for shard in shards} == {kind}
        assert np.concatenate([backend.to_numpy(shard["x"])
                               for shard in shards]).tolist() == X.tolist()
        assert data["x"] is X


def test_sparse_batches_are_refused(backend, devices):
    if backend.name == "mxnet":
        from mxnet import nd
        every = [nd.array(np.eye(4)).tostype(kind)
                 for kind in ("row_sparse", "csr")]
    else:
        import torch
        every = [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
                 *(torch.eye(4).to_sparse(layout=layout)
                   for layout in (torch.sparse_coo, torch.sparse_csr))]
    for x in every:
        for call in (lambda: split_batch({"x": x}, np.arange(4), devices),
                     lambda: split_and_load(x, devices)):
            with pytest.raises(ValueError, match="must hold dense arrays; "
                               "received a sparse or nested .* Make it dense"):
                call()


def test_lists_of_numbers_are_arrays(backend):
    """With the dtypes that `put` gives: Gluon takes such lists too."""
    for data, dtype in (([1, 2, 3, 4], "int64"), ([0.5, 1, 2, 3], "float32"),
                        ([[1, 2], [3, 4], [5, 6], [7, 8]], "int64"),
                        ([True, False, True, True], "bool"),
                        (list(np.int32([1, 2, 3, 4])), "int32")):
        shards = on_host(backend, split_and_load(data, [cpu(0), cpu(1)]))
        assert_bit_equal(np.concatenate(shards), np.array(data, dtype))
        assert len(shards[0]) == 2


def test_what_numpy_can_read_is_split_on_the_host(backend):
    for axis in (0, 1):
        shards = on_host(backend, split_and_load(
            Table(), [cpu(0), cpu(1)], axis))
        assert_bit_equal(np.concatenate(shards, axis), np.array(Table()))


def test_lists_of_text_are_split_by_rows(backend, devices):
    """What belongs to the whole batch is a tuple: it goes to all devices."""
    X = {"x": np.arange(14.0).reshape(7, 2), "text": list("abcdefg"),
         "sizes": [(i, i + 1) for i in range(7)], "classes": ("cat", "dog")}
    y = (np.arange(7), [{"file": name} for name in "abcdefg"])
    Xs, ys = split_batch(X, y, devices)
    found = [(name, size[0], target["file"], int(label))
             for shard, (labels, targets) in zip(Xs, ys)
             for name, size, target, label in zip(
                 shard["text"], shard["sizes"], targets,
                 backend.to_numpy(labels))]
    assert found == [(c, i, c, i) for i, c in enumerate("abcdefg")]
    assert all(shard["classes"] == ("cat", "dog") for shard in Xs)
    for wrong in (dict(X, text=["a", "b"]), (X["x"], [["cat"]]),
                  (X["x"], {"text": ["a", "b"]})):
        with pytest.raises(ValueError, match="an entry for each example; "
                           "received [12] entries, .* as a tuple"):
            split_batch(wrong, y, devices)
    with pytest.raises(ValueError, match=r"shape \(3,\) cannot be evenly"):
        split_and_load((np.ones(4), ["a", "b", "c"]), [cpu(0), cpu(1)])


def test_lists_of_arrays_that_may_be_rows_are_refused(backend, devices):
    """Whatever the number of devices; a tuple, or other forms, are clear. A
    list as X is what a network is called with."""
    X, square = np.zeros((4, 2)), [np.full(4, float(i)) for i in range(4)]
    dicts = [{"boxes": np.zeros((4, 2))} for _ in range(4)]
    for data in ((X, square), (X, {"a": square}), ({"a": square, "x": X},
                 np.arange(4)), (X, dicts), ((X, (1, square)), X)):
        with pytest.raises(ValueError, match="could be both. Pass several"):
            split_batch(*data, devices)
    native = [backend.put(x, cpu(0)) for x in square]
    with pytest.raises(ValueError, match="received 4 of shape \\(4,\\)"):
        split_batch(X, native, devices)
    for data in ((X, tuple(square)), (square, X), (X, square[:3]),
                 (X, [np.zeros(4), np.zeros((4, 1)), *square[2:]]),
                 (X[:1], [np.zeros(1)]), (X, np.stack(square))):
        split_batch(*data, devices)


def test_what_goes_whole_and_may_be_of_the_rows_is_refused(backend, devices):
    """A tuple without arrays, or an object that holds arrays, with as many
    entries or rows as the batch; whatever the number of devices."""
    X, y = np.zeros((4, 2)), np.arange(4)
    for form in ((3, 4, 5, 6), tuple(np.arange(4)), tuple("abcd"), range(4),
                 ((1, 2), (3, 4), (5, 6), (7, 8)), array.array("l", y),
                 collections.deque(range(4))):
        for data in (((X, form), y), (X, (y, {"a": (1.5, form)})),
                     ({"x": X, "sizes": form}, y)):
            with pytest.raises(ValueError, match="that holds 4 entries or ex"
                               r"amples, .* a list, list\(x\)") as refused:
                split_batch(*data, devices)
            assert type(form).__name__ in str(refused.value)
        with pytest.raises(ValueError, match="holds 4 entries or examples"):
            split_and_load((np.zeros((2, 4)), form), devices, 1, False)
        split_batch((X, list(form)), y, devices)
    rows = backend.put(np.zeros((4, 3)), cpu(0))
    for form in (types.SimpleNamespace(a=rows), types.SimpleNamespace(a=[
            1, 2, 3, 4]), argparse.Namespace(a={"b": y})):
        with pytest.raises(ValueError, match=f"a {type(form).__name__} is "
                           ".* received one that holds 4 entries or"):
            split_batch({"x": X, "more": form}, y, devices)
    for whole in ((1, 2, 3), tuple("abc"), range(3), Pair(1, 2), "abcd", None,
                  types.SimpleNamespace(a=(1, 2, 3, 4), b=np.zeros(3)), len,
                  {"a": 1, "b": 2, "c": 3, "d": 4}, b"abcd", (None,) * 4,
                  frozenset("abcd"), types):
        shards, _ = split_batch((X, whole), y, devices)
        assert all(shard[1] == whole for shard in shards)
    split_batch((X[:1], (1,)), y[:1], devices)


# -- split_batch --------------------------------------------------------------


def test_a_batch_without_labels_is_a_dict(backend):
    for batch in (Labelled(np.ones((3, 2)), np.ones(3)),
                  collections.namedtuple("Both", "x y")(np.ones((3, 2)),
                                                        np.ones(3))):
        with pytest.raises(ValueError, match=r"in a pair \(X, y\) or a dict"
                           "|3 and none"):
            split_batch(batch, None, [cpu(0), cpu(1)])


@pytest.mark.parametrize("X, y, received", [
    (np.ones((3, 2)), np.ones(4), "3 and 4"),
    ((np.ones(3), np.ones(4)), np.ones(3), "3 or 4 and 3"),
    (np.ones(3), {"a": np.ones(3), "b": np.ones(2)}, "3 and 2 or 3"),
    (None, np.ones(2), "none and 2"), (np.ones(2), "text", "2 and none"),
    (np.ones(1), 3, "1 and none")])
def test_different_lengths_are_refused(backend, X, y, received):
    native = [map_leaves(lambda a: [backend.put(a, cpu(0))], data, 1)[0]
              for data in (X, y)]
    for data in ((X, y), native):
        with pytest.raises(ValueError, match="the same number of examples; "
                           rf"received {received}\. Cut them"):
            split_batch(*data, [cpu(0), cpu(1)])


def test_a_list_with_an_entry_for_each_row(engine, devices):
    """The boxes of each image."""
    X = np.random.default_rng(0).normal(size=(5, 6))
    y = [{"boxes": np.full((n, 4), 0.5), "n": n} for n in (1, 2, 3, 1, 2)]
    X_shards, y_shards = split_batch(X, y, devices)
    assert sum(y_shards, []) == y
    assert list(map(len, y_shards)) == [
        0 if x is None else len(x) for x in X_shards]
    with pytest.raises(ValueError, match="received 5 and 1 or 2 or 3.* with "
                       "an entry for each example .* as a list"):
        split_batch(X, tuple(y), devices)


def test_an_empty_batch_is_refused(backend):
    for X, y in ((np.ones((0, 2)), np.ones(0)), ([], []), (None, None)):
        with pytest.raises(ValueError, match="hold at least one example"):
            split_batch(X, y, [cpu(0), cpu(1)])
