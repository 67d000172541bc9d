"""Data sets, the same for both backends.

===============  =====================================================
`fashion_mnist`  Fashion-MNIST, from its IDX files
`digits`         1,797 handwritten digits, included in the package
`synthetic`      random, learnable data of any shape
`load`           one of these by name, or a folder of IDX files
===============  =====================================================

All return ``(train_iter, test_iter)``, two `BatchIterator`.

`fashion_mnist` reads its files from the folder ``root=`` or from the
environment variable ``MGPU_DATA``, or downloads them (31 MB) with the package
pooch: ``pip install pooch``.
"""
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mgpu.data import idx_files
from mgpu.data.iterators import Arrays, BatchIterator
from mgpu.utils import arguments
from mgpu.utils.arguments import integer, number, one_of
from mgpu.utils.files import FilePath

_NAMES = ("digits", "fashion-mnist", "synthetic")
_DTYPES = ("float32", "float64")

Size = int | tuple[int, int] | None


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
    size = _check(batch_size, resize, limit, seed, dtype)
    folder = idx_files.data_folder(root, download)
    train, test = ((images[:limit, None].astype(dtype) / 255,
                    labels[:limit].astype("int32"))
                   for images, labels in idx_files.read(folder))
    return _iterators("fashion-mnist", folder, train, test, batch_size, limit,
                      seed, shuffle, size)


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
    root = None if name_or_path == "fashion-mnist" else name_or_path
    if root is not None and not os.path.isdir(root):
        raise ValueError(
            f"unknown data set; received {os.fspath(root)!r}. Use "
            f"{', '.join(map(repr, _NAMES))}, or the path of an existing "
            "folder that holds IDX files.")
    found = fashion_mnist(batch_size, resize, root, limit, seed, dtype=dtype,
                          shuffle=shuffle, download=download)
    for one in found if root is not None else ():
        one.info = {**(one.info or {}), "name": os.path.basename(
            os.path.abspath(name_or_path))}
    return found


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
