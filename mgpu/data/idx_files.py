"""IDX files of images and labels: Fashion-MNIST, which can be downloaded, or
other data in its format.
"""
import math
import os
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from mgpu.utils import environment
from mgpu.utils.files import FilePath

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


def read(folder: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Images (n, h, w) and labels (n,) of the training set, then of the test
    set; uint8, read-only."""
    for part in ("train", "t10k"):
        files = [_path(folder, f"{part}-{kind}-ubyte")
                 for kind in ("images-idx3", "labels-idx1")]
        images, labels = map(_read, files, (3, 1))
        if len(images) != len(labels):
            raise ValueError(
                f"there must be one label per image; received {len(images)} "
                f"images in {files[0]} and {len(labels)} labels in "
                f"{files[1]}. Use files of one data set.")
        yield images, labels


def _path(folder: str, name: str) -> str:
    """Path of the file `name`, compressed or not; "" if it is missing."""
    paths = [os.path.join(folder, name + end) for end in (".gz", "")]
    return next(filter(os.path.isfile, paths), "")


def data_folder(root: FilePath | None, download: bool) -> str:
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


def _read(path: str, dims: int) -> np.ndarray:
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
