"""Data sets and seeded batch iterators, for both backends.

Batches are NumPy arrays. They are converted to arrays of a backend when they
are split over devices, so both backends receive the same bits in the same
order.

==================  =====================================================
`fashion_mnist`     Fashion-MNIST, from its IDX files
`digits`            1,797 handwritten digits, included in the package
`synthetic`         random, learnable data of any shape
`load`              one of these by name, or a folder of IDX files
`BatchIterator`     batches of arrays in memory
`IndexedIterator`   batches of a map-style data set, such as those of torch
                    and Gluon
==================  =====================================================

The first four return ``(train_iter, test_iter)``, two `BatchIterator`.

`fashion_mnist` reads its files from the folder ``root=`` or from the
environment variable ``MGPU_DATA``, or downloads them (31 MB) with the package
pooch: ``pip install pooch``.
"""
import functools
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mgpu import distributed
from mgpu.backends import get_backend
from mgpu.data.split import shard_bounds
from mgpu.utils import arguments, environment
from mgpu.utils.arguments import integer, number, one_of
from mgpu.utils.files import FilePath

_NAMES = ("digits", "fashion-mnist", "synthetic")
_DTYPES = ("float32", "float64")

# The four files of the data set, with the MD5 sums that its authors publish
# (README of github.com/zalandoresearch/fashion-mnist).
_MD5 = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
_MIRRORS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/"
    "fashion/",
)
_ROUNDS = 2         # attempts for each mirror
_TIMEOUT = 30       # seconds to wait for a response of a server

# IDX: two zero bytes, the dtype (8: unsigned byte), the number of dimensions;
# then each dimension, as a big-endian 32-bit integer.
_UBYTES = 0x00000800

Size = int | tuple[int, int] | None
Arrays = tuple[np.ndarray, np.ndarray]


_steps = 0      # of all trainers


def note_step() -> None:
    """Count a completed step. `Trainer` calls it after a step, which has
    consumed the batches yielded before it."""
    global _steps
    _steps += 1


class BatchIterator:
    """Iterable over batches of two arrays, in a seeded order for each epoch.

    Each ``iter()``, and so each ``for`` loop, starts a new epoch. The order of
    epoch `e` is ``numpy.random.default_rng([seed, e]).permutation(n)``. It is
    the same on both backends and does not depend on earlier epochs or other
    random numbers, so setting `epoch` resumes training. In distributed
    training (`mgpu.distributed`), a process receives the examples of each
    batch that its devices would have in one process; possibly none.

    Parameters
    ----------
    X : array, (n, ...)
        Examples; not copied.
    y : array, (n, ...)
        Labels; not copied.
    batch_size : int
        Examples in a batch. The last batch may be smaller.
    seed : int
        0 or more.
    shuffle : bool
        False: keep the order of `X` in every epoch.
    drop_last : bool
        True: drop the last batch if it is incomplete.
    transform : callable, optional
        ``transform(X_batch)`` replaces ``X_batch``. Called for each batch; it
        must return the same number of examples. In distributed training it
        receives the examples of one process, so the result for an example
        must not depend on others.
    info : dict, optional
        Description for reports, see `info` below.

    Yields
    ------
    X : ndarray, (b, ...)
    y : ndarray, (b, ...)
        Copies.

    Attributes
    ----------
    y : ndarray, (n, ...)
    batch_size, num_examples, seed : int
    shuffle, drop_last : bool
    epoch : int
        Epoch that the next ``iter()`` starts, initially 0. Settable.
    position : (int, int)
        Epoch and index of the next batch: where training resumes after the
        batches yielded so far. Settable; the next ``iter()`` starts there.
        Only the latest ``iter()`` advances it; under `mgpu.prefetch`, when a
        batch is taken. After a ``break`` it remains in the epoch; set `epoch`
        to skip the rest. Reading it raises RuntimeError while another thread
        draws the batches.
    stepped : (int, int)
        Position after the last `Trainer` step, as `mgpu.save_checkpoint`
        writes it. Batches yielded since then are not counted before the end
        of the epoch, because Ctrl-C may have interrupted their step.
    info : dict or None
        For the data sets of this module ``{"name": str, "train": int,
        "test": int, "shape": [c, h, w], "source": str}``: the numbers of
        examples, the shape of an example, and the origin. Serializable as
        JSON.

    Raises
    ------
    ValueError
        `batch_size` is not an integer of 1 or more, or `seed` or `epoch` is
        not an integer of 0 or more; `X` and `y` differ in length; no
        examples, or less than one batch with `drop_last`.
    """

    def __init__(self, X: Any, y: Any, batch_size: int, seed: int = 0,
                 shuffle: bool = True, drop_last: bool = False, *,
                 transform: Callable[[np.ndarray], np.ndarray] | None = None,
                 info: dict[str, Any] | None = None) -> None:
        self._X, self.y = np.asarray(X), np.asarray(y)
        if len(self._X) != len(self.y):
            raise ValueError(
                "X and y must have the same length; received "
                f"{len(self._X)} examples and {len(self.y)} labels.")
        self._transform = transform
        # Whether batches are made without user code.
        self.fixed = transform is None
        self.info = None if info is None else dict(info)
        self._begin(len(self.y), batch_size, seed, shuffle, drop_last)

    def _begin(self, examples: int, batch_size: int, seed: int, shuffle: bool,
               drop_last: bool) -> None:
        self.batch_size = arguments.batch_size(batch_size)
        self.seed = integer("seed", seed, 0)
        self.num_examples = examples
        if not examples:
            raise ValueError("a data set needs at least one example; "
                             "received one of length 0.")
        if drop_last and examples < self.batch_size:
            raise ValueError(
                f"drop_last leaves no batch: received {examples} examples "
                f"and batch_size={self.batch_size}. Reduce batch_size.")
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.epoch = 0

    @property
    def X(self) -> np.ndarray:
        """All examples, unshuffled, after the transform. With a `transform`,
        each access computes a new array; without, it is not a copy."""
        return self._X if self._transform is None else self._transform(self._X)

    @property
    def epoch(self) -> int:
        """Epoch that the next ``iter()`` starts."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self.position = value, 0

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and index of the next batch."""
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                f"the position of {self!r} is not available: another thread "
                "draws its batches and may be ahead. Read it in the thread "
                "that takes the batches, and prefetch with mgpu.prefetch of "
                "this object itself.")
        return self._position

    @position.setter
    def position(self, value: tuple[int, int]) -> None:
        epoch, number = value
        epoch, number = integer("epoch", epoch, 0), integer("batch", number, 0)
        if number >= len(self):
            raise ValueError(f"an epoch has {len(self)} batches; received "
                             f"the position before batch {number}, from 0.")
        self._epoch = epoch
        self._position = self._stepped = epoch, number
        self._noted = _steps    # steps when the last batch was yielded
        self._thread: int | None = None     # the one that took that batch

    @property
    def stepped(self) -> tuple[int, int]:
        """Position after the last step of a `Trainer`."""
        yielded = self.position
        return self._stepped if self._noted == _steps else yielded

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        rest = 0 if self.drop_last else self.batch_size - 1
        return (self.num_examples + rest) // self.batch_size

    def __iter__(self) -> "Epoch":
        # The epoch starts here, not with the first batch.
        if self._position[0] != self._epoch:    # not set
            self._position = self._epoch, 0
        self._stepped = self._position
        self._epoch += 1
        return Epoch(self, *self._position)

    def _drawn(self, epoch: int, first: int,
               share: Callable[[int], tuple[int, int]]) -> Iterator[Arrays]:
        order = np.random.default_rng([self.seed, epoch]).permutation(
            self.num_examples) if self.shuffle \
            else np.arange(self.num_examples)
        for i in range(first, len(self)):
            rows = order[i * self.batch_size:(i + 1) * self.batch_size]
            begin, end = share(len(rows))
            own = rows[begin:end]
            yield self._made(own, rows)

    def _made(self, own: np.ndarray, rows: np.ndarray) -> Any:
        """The batch of the examples `own`, those of this process in the
        global batch `rows`."""
        # A transform is called for at least one example.
        X = self._X[own if len(own) else rows[:1]]      # a copy
        if self._transform is not None:
            X = self._transform(X)
        return X if len(own) else X[:0], self.y[own]

    def place(self, epoch: int, number: int) -> list[Any]:
        """Identity of a batch, which processes compare."""
        return [[self.num_examples, self.batch_size], self.seed, self.shuffle,
                self.drop_last, epoch, number, self._contents]

    @functools.cached_property
    def contents(self) -> list[int | None]:
        """Checksums of data that is available without user code. None: not
        available."""
        return [_checksum_of((self.y, self._X[_some(len(self.y), 64)]))]

    @property
    def _contents(self) -> list[int | None]:
        """`contents`, and checksums that run user code."""
        return self.contents

    def __repr__(self) -> str:
        return (f"{type(self).__name__}({self.num_examples} examples, "
                f"batch_size={self.batch_size}, seed={self.seed}, shuffle="
                f"{self.shuffle}, epoch={self.epoch})")


class IndexedIterator(BatchIterator):
    """Iterable over batches of a map-style data set, in the order of
    `BatchIterator`.

    The data set may be one of torch or Gluon, or a list of pairs. In
    distributed training, a process reads its own examples only. Positions and
    checkpoints work as for `BatchIterator`. The attributes ``X`` and ``y``
    are not available.

    Parameters
    ----------
    dataset : object with ``len()`` and ``[]``
        ``dataset[i]`` is the pair (x, y) of example `i`. Each is a NumPy
        array, a native array, a number, or a tuple, list or dict of them. All
        examples have the same shapes.
    batch_size, seed, shuffle, drop_last
        As for `BatchIterator`.

    Yields
    ------
    X, y
        NumPy arrays, stacked along a new first axis; in tuples or dicts if
        the examples are.

    Raises
    ------
    TypeError
        `dataset` has no length, or an example is not a pair.
    ValueError
        No examples, examples of different shapes, or an invalid argument.

    Examples
    --------
    >>> data = [(np.full(2, i), i % 2) for i in range(5)]
    >>> for X, y in IndexedIterator(data, 2, shuffle=False):
    ...     print(X.tolist(), y.tolist())
    [[0, 0], [1, 1]] [0, 1]
    [[2, 2], [3, 3]] [0, 1]
    [[4, 4]] [0]
    """

    def __init__(self, dataset: Any, batch_size: int, seed: int = 0,
                 shuffle: bool = True, drop_last: bool = False) -> None:
        self._dataset, self.fixed, self.info = dataset, False, None
        self._begin(len(dataset), batch_size, seed, shuffle, drop_last)

    @functools.cached_property
    def contents(self) -> list[int | None]:
        data, chosen = self._dataset, []
        while hasattr(data, "indices") and hasattr(data, "dataset"):
            chosen.append(data.indices)         # torch's Subset
            data = data.dataset
        return [_checksum_of(chosen)]

    @functools.cached_property
    def _contents(self) -> list[int | None]:
        """`contents`, and a checksum of some labels, which are rarely
        augmented. None if repeated reads of a label differ."""
        put_back = get_backend().kept_streams()
        try:
            labels = {_checksum_of([self._pair(i)[1] for i in _some(
                self.num_examples, 16)]) for _ in range(3)}
        finally:
            put_back()
        return [*self.contents, labels.pop() if len(labels) == 1 else None]

    def _pair(self, i: int) -> Sequence[Any]:
        pair = self._dataset[int(i)]
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"an example must be a pair (x, y); example {i} "
                            f"is a {type(pair).__name__}. Put several inputs "
                            "into one tuple: ((x1, x2), y).")
        return pair

    def _made(self, own: np.ndarray, rows: np.ndarray) -> Any:
        read = own if len(own) else rows[:1]
        return tuple(_stacked(column, read, len(own))
                     for column in zip(*map(self._pair, read)))


def _some(examples: int, count: int) -> np.ndarray:
    """Indices of `count` evenly spaced examples."""
    return np.unique(np.linspace(0, examples - 1, count).astype(int))


def _on_host(x: Any) -> np.ndarray:
    # np.asarray does not convert MXNet's arrays.
    return x.asnumpy() if hasattr(x, "asnumpy") else np.asarray(x)


def _checksum_of(value: Any) -> int | None:
    """Checksum of arrays, numbers and strings in tuples, lists and dicts.
    None for other types."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (tuple, list)):
        parts = list(map(_checksum_of, value))
        return None if None in parts else zlib.crc32(repr(parts).encode())
    x = _on_host(value)
    if x.dtype == object:
        return None
    # Equal numbers of another dtype have the same checksum.
    wide = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.int64}
    x = x.astype(wide.get(x.dtype.kind, x.dtype))
    return zlib.crc32(np.ascontiguousarray(x).tobytes(),
                      zlib.crc32(repr(x.shape).encode()))


def _stacked(examples: Sequence[Any], numbers: np.ndarray, rows: int) -> Any:
    """Stack the arrays of several examples into one; tuples and dicts entry
    by entry. Returns the first `rows` examples."""
    first = examples[0]
    if isinstance(first, dict):
        return {key: _stacked([x[key] for x in examples], numbers, rows)
                for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(_stacked(column, numbers, rows)
                     for column in zip(*examples, strict=True))
    arrays = list(map(_on_host, examples))
    for i, x in zip(numbers, arrays):
        if x.shape != arrays[0].shape or x.dtype == object:
            raise ValueError(
                "the examples of a data set must have one shape; "
                f"received {arrays[0].shape} for example {numbers[0]} and "
                f"{x.shape} of dtype {x.dtype} for example {i}. Pad them, or "
                "make batches yourself.")
    return np.stack(arrays)[:rows]


class Epoch(Iterator[Arrays]):
    """Iterator over the batches of one epoch of a `BatchIterator`.

    Attributes
    ----------
    moves : bool
        Whether yielding a batch advances the position of the `BatchIterator`.
        A prefetcher sets it to False, calls `taken` for each batch that it
        yields, and `ended` after the last one.
    """

    def __init__(self, data: BatchIterator, epoch: int, first: int) -> None:
        self.moves = True
        self._data, self._epoch, self._number = data, epoch, first
        # Here, not with the first batch: all ranks call iter().
        share = distributed.current().shares(shard_bounds)
        self._batches = data._drawn(epoch, first, share)

    def __next__(self) -> Arrays:
        for batch in self._batches:
            if self.moves:
                self.taken()
            return batch
        if self.moves:
            self.ended()
        raise StopIteration

    def taken(self) -> None:
        """Record that this thread has taken the next batch."""
        data = self._data
        world = distributed.current()
        if world.size > 1:
            world.note_batch(data.place(self._epoch, self._number))
        self._number += 1
        if data._epoch == self._epoch + 1:      # no later iter()
            if data._noted != _steps:
                data._stepped, data._noted = data._position, _steps
            data._thread = threading.get_ident()
            data._position = (self._epoch, self._number) \
                if self._number < len(data) else (self._epoch + 1, 0)

    def ended(self) -> None:
        """Record that the loop has requested a batch after the last one, and
        so has completed the last step."""
        distributed.current().note_batch(None)
        if self._data._epoch == self._epoch + 1:
            self._data._stepped = self._data._position


def fashion_mnist(batch_size: int, resize: Size = None,
                  root: FilePath | None = None,
                  limit: int | None = None, seed: int = 0, *,
                  dtype: str = "float32", shuffle: bool = True,
                  download: bool = True
                  ) -> tuple[BatchIterator, BatchIterator]:
    """Load Fashion-MNIST: 60,000 training and 10,000 test images, 10 classes.

    Reads ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``,
    ``t10k-images-idx3-ubyte`` and ``t10k-labels-idx1-ubyte``, with or
    without ``.gz``, from the first of these folders that is given:

    1. `root`;
    2. the environment variable ``MGPU_DATA``;
    3. the user's cache folder, ``mgpu/fashion-mnist`` in
       ``$XDG_CACHE_HOME`` (default: ``~/.cache``). Missing files are
       downloaded, 31 MB in all, with the package pooch
       (``pip install pooch``), and their checksums are verified.

    The numbers of examples come from the headers of the files, so subsets and
    other data in the same format work too.

    Parameters
    ----------
    batch_size : int
    resize : int or (height, width), optional
        New size, see `bilinear`. Computed for each batch: all 60,000 images
        of 224 x 224 would take 12 GB.
    root : path, optional
        Folder with the four files.
    limit : int, optional
        Use at most the first `limit` training and test examples.
    seed : int
        Seed of the order of training batches, see `BatchIterator`.
    dtype : {"float32", "float64"}
    shuffle : bool
        Whether to shuffle the training examples in each epoch. The test
        examples keep the order of the file.
    download : bool
        Whether to download missing files.

    Returns
    -------
    train_iter, test_iter : BatchIterator
        X (b, 1, 28, 28) of `dtype`: pixels / 255, in [0, 1]. y (b,) int32,
        0 to 9. An incomplete last batch is kept.

    Raises
    ------
    ValueError
        An invalid argument; a file with a wrong magic number or length, or a
        truncated or corrupt gzip stream; different numbers of images and
        labels; a download with a wrong checksum, which is deleted.
    FileNotFoundError
        A file is missing in `root` or ``MGPU_DATA``; or in the cache folder,
        with ``download=False``.
    ConnectionError
        No mirror responds, or none sends the complete file. Files downloaded
        before are kept.
    ImportError
        A file must be downloaded and pooch is not installed.
    """
    return _idx("fashion-mnist", root, download, batch_size, resize, limit,
                seed, dtype, shuffle)


def digits(batch_size: int, resize: Size = 28, limit: int | None = None,
           seed: int = 0, *, dtype: str = "float32", test_size: int = 360,
           shuffle: bool = True) -> tuple[BatchIterator, BatchIterator]:
    """Load the 1,797 handwritten digits of scikit-learn, without a download.

    The test set of "Optical Recognition of Handwritten Digits" (Alpaydin
    and Kaynak 1998, UCI, CC BY 4.0), 8 x 8 pixels of 17 gray levels; origin
    and license in ``data/README.md``.

    The split is deterministic: the digits, sorted by class with a stable
    sort, are cut into `test_size` segments of equal length, and the first of
    each segment is a test example. Both sets keep the order of the file. The
    file groups the digits by its 13 writers (59 % of the digits have their
    nearest neighbor within 140 positions; 16 % is expected by chance), so
    classes and writers have equal shares in both sets. This suits comparisons
    of training runs. It does not measure generalization to new writers: a
    logistic regression on the pixels has an accuracy of 0.96 on this split,
    and of 0.90 on the last 360 digits of the file when trained on the others.

    Parameters
    ----------
    batch_size, limit, seed, dtype, shuffle
        As for `fashion_mnist`.
    resize : int or (height, width), optional
        New size, see `bilinear`. None: 8 x 8.
    test_size : int
        1 to 1,796.

    Returns
    -------
    train_iter, test_iter : BatchIterator
        X (b, 1, 28, 28) of `dtype`, in [0, 1]; y (b,) int32, 0 to 9.

    Raises
    ------
    ValueError
        An invalid argument.
    """
    size = _check(batch_size, resize, limit, seed, dtype)
    test_size = integer("test_size", test_size, 1)
    path = os.path.join(os.path.dirname(__file__), "digits.npz")
    with np.load(path, allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
    X = images[:, None].astype(dtype) / 16
    if size is not None:
        X = bilinear(X, size)
    y = labels.astype("int32")
    by_class = np.argsort(y, kind="stable")
    test = np.zeros(len(y), bool)
    test[by_class[np.arange(test_size) * len(y) // test_size]] = True
    return _iterators("digits", "mgpu/data/digits.npz",
                      (X[~test], y[~test]), (X[test], y[test]), batch_size,
                      limit, seed, shuffle)


def synthetic(batch_size: int, num_train: int = 1024, num_test: int = 256,
              num_classes: int = 10,
              shape: Sequence[int] = (1, 28, 28), seed: int = 0, *,
              noise: float = 0.2, limit: int | None = None,
              dtype: str = "float32", shuffle: bool = True
              ) -> tuple[BatchIterator, BatchIterator]:
    """Generate learnable random data: one pattern per class, plus noise.

    The pattern of a class is uniform in [0, 1). An example is the pattern of
    its class plus normal noise. The data depend on `seed` only and are
    generated in float64; float32 data are rounded float64 data.

    Parameters
    ----------
    batch_size, limit, dtype, shuffle
        As for `fashion_mnist`.
    num_train, num_test, num_classes : int
        1 or more. Class sizes differ by at most one.
    shape : sequence of int
        Shape of an example.
    seed : int
        Seed of the data and of the order of batches.
    noise : float
        Standard deviation of the noise, 0 or more.

    Returns
    -------
    train_iter, test_iter : BatchIterator
        X (b, *shape) of `dtype`; y (b,) int32, 0 to ``num_classes - 1``.

    Raises
    ------
    ValueError
        An invalid argument.
    """
    _check(batch_size, None, limit, seed, dtype)
    for argument, count in (("num_train", num_train), ("num_test", num_test),
                            ("num_classes", num_classes)):
        integer(argument, count, 1)
    shape = tuple(integer("shape", n, 1) for n in shape)
    number("noise", noise, 0)
    # A seed of three words, the last not 0: BatchIterator uses two.
    rng = np.random.default_rng([seed, 0, 1])
    patterns = rng.uniform(size=(num_classes, *shape))

    def draw(n: int) -> Arrays:
        y = rng.permutation(np.arange(n) % num_classes)
        X = patterns[y] + noise * rng.standard_normal((n, *shape))
        return X.astype(dtype), y.astype("int32")

    return _iterators("synthetic", f"random, noise {noise:g}",
                      draw(num_train), draw(num_test), batch_size, limit,
                      seed, shuffle)


def load(name_or_path: FilePath, batch_size: int,
         limit: int | None = None, seed: int = 0, *, resize: Size = None,
         dtype: str = "float32", shuffle: bool = True, download: bool = True
         ) -> tuple[BatchIterator, BatchIterator]:
    """Load a data set by name, or IDX files from a folder.

    Parameters
    ----------
    name_or_path : str or path
        ``"digits"``, ``"fashion-mnist"``, ``"synthetic"``, or a folder with
        files named as those of `fashion_mnist`. A name takes precedence over
        a folder of the same name; write ``"./digits"`` for the folder.
    resize : int or (height, width), optional
        None: 28 x 28; for a folder, the size of its images.
    batch_size, limit, seed, dtype, shuffle, download
        As for `fashion_mnist`.

    Returns
    -------
    train_iter, test_iter : BatchIterator

    Raises
    ------
    ValueError
        `name_or_path` is neither a known name nor a folder.
    Exception
        The errors of the data set.
    """
    if name_or_path == "digits":
        return digits(batch_size, 28 if resize is None else resize, limit,
                      seed, dtype=dtype, shuffle=shuffle)
    if name_or_path == "synthetic":
        size = (28, 28) if resize is None else _size("resize", resize)
        return synthetic(batch_size, shape=(1, *size), seed=seed, limit=limit,
                         dtype=dtype, shuffle=shuffle)
    root, name = None, str(name_or_path)
    if name_or_path != "fashion-mnist":
        if not os.path.isdir(name_or_path):
            raise ValueError(
                f"unknown data set; received {os.fspath(name_or_path)!r}. Use "
                f"{', '.join(map(repr, _NAMES))}, or the path of an existing "
                "folder that holds IDX files.")
        root, name = name_or_path, os.path.basename(
            os.path.abspath(name_or_path))
    return _idx(name, root, download, batch_size, resize, limit, seed, dtype,
                shuffle)


def bilinear(images: np.ndarray, size: int | tuple[int, int]) -> np.ndarray:
    """Resize images by bilinear interpolation with half-pixel centers.

    The center of pixel i of n is at (i + 0.5) / n of the image's size. A new
    pixel interpolates between the two old pixels around its center on each
    axis; border pixels are repeated outside. The result equals
    ``torch.nn.functional.interpolate`` with
    ``mode="bilinear", align_corners=False``, and MXNet's ``BilinearResize2D``
    with ``align_corners=False``, except that MXNet returns the corner pixel
    for a size of 1. There is no antialiasing.

    Parameters
    ----------
    images : ndarray, (..., h, w), float32 or float64
    size : int or (height, width)

    Returns
    -------
    ndarray, (..., height, width), same dtype
        A new array, with the same bits on every machine: no matrix product is
        used. The values exceed the range of the input by at most rounding;
        images in [0, 1] stay in [0, 1].

    Raises
    ------
    ValueError
        `size` is below 1, or `images` have another dtype.
    """
    height, width = _size("size", size)
    if images.dtype not in _DTYPES:
        raise ValueError("images must be float32 or float64; received "
                         f"{images.dtype}. Convert them with astype.")
    for axis, n in ((-2, height), (-1, width)):
        old = images.shape[axis]
        centre = (np.arange(n) + 0.5) * (old / n) - 0.5
        centre = centre.clip(0, old - 1)
        low = centre.astype(np.intp)
        high = np.minimum(low + 1, old - 1)
        weight = (centre - low).astype(images.dtype)
        if axis == -2:
            weight = weight[:, None]
        start = images.take(low, axis)
        # start + (end - start) w, not (1 - w) start + w end: exact where
        # both pixels are equal, as in a background.
        images = start + (images.take(high, axis) - start) * weight
    return images


# -- arguments --------------------------------------------------------------

def _size(name: str, size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, (tuple, list)) \
        and len(size) == 2 else (size, size)
    return integer(name, height, 1), integer(name, width, 1)


def _check(batch_size: Any, resize: Any, limit: Any, seed: Any, dtype: Any
           ) -> tuple[int, int] | None:
    """Check the arguments, before a file is read, and return the size of
    `resize`."""
    arguments.batch_size(batch_size)
    integer("seed", seed, 0)
    integer("limit", 1 if limit is None else limit, 1)
    one_of("dtype", dtype, _DTYPES)
    return None if resize is None else _size("resize", resize)


def _iterators(name: str, source: str, train: Arrays, test: Arrays,
               batch_size: int, limit: int | None, seed: int, shuffle: bool,
               size: tuple[int, int] | None = None
               ) -> tuple[BatchIterator, BatchIterator]:
    """The iterators of a data set. `size`: size of the images in a batch."""
    transform = None if size is None else functools.partial(bilinear,
                                                            size=size)
    info = {"name": name, "train": len(train[1][:limit]),
            "test": len(test[1][:limit]),
            "shape": [*(train[0].shape[1:] if size is None
                        else (*train[0].shape[1:-2], *size))],
            "source": source}
    train_iter, test_iter = (
        BatchIterator(X[:limit], y[:limit], batch_size, seed, shuffled,
                      transform=transform, info=info)
        for (X, y), shuffled in ((train, shuffle), (test, False)))
    return train_iter, test_iter


# -- IDX files --------------------------------------------------------------

def _idx(name: str, root: Any, download: bool, batch_size: int, resize: Size,
         limit: int | None, seed: int, dtype: str, shuffle: bool
         ) -> tuple[BatchIterator, BatchIterator]:
    size = _check(batch_size, resize, limit, seed, dtype)
    folder = _folder(root, download)

    def read(part: str) -> Arrays:
        files = [_path(folder, f"{part}-{kind}-ubyte")
                 for kind in ("images-idx3", "labels-idx1")]
        images, labels = map(_read_idx, files, (3, 1))
        if len(images) != len(labels):
            raise ValueError(
                f"there must be one label per image; received {len(images)} "
                f"images in {files[0]} and {len(labels)} labels in "
                f"{files[1]}. Use files of one data set.")
        return (images[:limit, None].astype(dtype) / 255,
                labels[:limit].astype("int32"))
    return _iterators(name, folder, read("train"), read("t10k"), batch_size,
                      limit, seed, shuffle, size)


def _path(folder: str, name: str) -> str:
    """Path of the file `name`, compressed or not; "" if it is missing."""
    paths = [os.path.join(folder, name + end) for end in (".gz", "")]
    return next(filter(os.path.isfile, paths), "")


def _folder(root: Any, download: bool) -> str:
    """The folder with the four files. Downloads missing ones to the cache if
    allowed."""
    by = "MGPU_DATA=" if root is None else ""
    named = environment.data_folder() if root is None \
        else os.fspath(root) or "."
    cache = (os.environ.get("XDG_CACHE_HOME")
             or os.path.join(os.path.expanduser("~"), ".cache"))
    folder = named or os.path.join(cache, "mgpu", "fashion-mnist")
    missing = [name for name in _MD5 if not _path(folder, name)]
    if missing and named:
        raise FileNotFoundError(
            f"a data folder holds the four IDX files; received {by}"
            f"{folder!r}, which lacks {', '.join(missing)} (with or without "
            ".gz). Put them there, or name another folder.")
    if missing and not download:
        raise FileNotFoundError(
            f"Fashion-MNIST is not in {folder!r}, and download=False. To "
            f"read it, {_cures(folder)}")
    if missing:
        _download(missing, folder)
    return folder


def _cures(folder: str) -> str:
    return (f"put the four IDX files into {folder!r}, or name a folder that "
            "holds them with root= or in the environment variable MGPU_DATA; "
            "the data set digits needs neither files nor a network.")


_AGAIN = ("Remove the file and get it again (Fashion-MNIST is downloaded when "
          "it is missing from the cache folder).")


def _read_idx(path: str, dims: int) -> np.ndarray:
    """The array in an IDX file, uint8, read-only."""
    import gzip     # 2 ms of `import mgpu`
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
            data = f.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} must be a gzip file; it is truncated or "
                         f"corrupt ({error}). {_AGAIN}") from error
    header = 4 + 4 * dims
    magic, *shape = np.frombuffer(data[:header].ljust(header, b"\0"), ">u4"
                                  ).tolist()
    if magic != _UBYTES + dims or not len(data) == header + math.prod(shape) \
            > header:
        raise ValueError(
            f"{path} must be an IDX file of {dims} dimensions as its header "
            f"says; received {len(data)} bytes with magic number {magic} and "
            f"shape {tuple(shape)}. {_AGAIN}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


# -- download ---------------------------------------------------------------

def _download(names: Sequence[str], folder: str) -> None:
    """Download files of Fashion-MNIST to `folder`, each verified and
    atomically."""
    try:
        import pooch
    except ImportError as error:
        raise ImportError(
            f"Fashion-MNIST is not in {folder!r}, and a download needs pooch "
            f"({error}). Run pip install pooch, or {_cures(folder)}"
            ) from error
    for name in names:
        for mirror in _ROUNDS * _MIRRORS:
            url = f"{mirror}{name}.gz"
            try:
                pooch.retrieve(url, f"md5:{_MD5[name]}", f"{name}.gz", folder,
                               downloader=pooch.HTTPDownloader(
                                   timeout=_TIMEOUT))
                break
            except (ValueError, OSError) as error:
                failure = error
        else:
            # A ValueError is a wrong checksum, as after a proxy's response.
            kind = ConnectionError if isinstance(failure, OSError) \
                else ValueError
            raise kind(
                f"Fashion-MNIST is not in {folder!r}, and {url} cannot be "
                f"downloaded ({' '.join(str(failure).split())}). Run it "
                f"again, or {_cures(folder)}") from failure
