"""Data sets: every test writes the IDX files that it reads and serves them
itself."""
import gzip
import hashlib
import http.server
import json
import os
import socket
import struct
import sys
import threading

import numpy as np
import pytest

import mgpu
from mgpu import datasets
from mgpu.data import idx_files
from mgpu.data.iterators import BatchIterator

PARTS = {"train": 41, "t10k": 13}       # examples in the generated files
DIGITS_SHA256 = ("87ff0c9e40dc7e2c0e34e7257799c2e3"
                 "f3aec1a016363bb11cad869ec428a826")
FILES = [f"{part}-{kind}" for part in PARTS
         for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]


def idx(array, magic=None):
    """`array` (uint8) as the bytes of an IDX file."""
    head = struct.pack(f">{1 + array.ndim}I",
                       0x800 + array.ndim if magic is None else magic,
                       *array.shape)
    return head + array.tobytes()


def pictures(part, side=28):
    """Images and labels, uint8."""
    rng, n = np.random.default_rng(5), PARTS[part]
    return (rng.integers(0, 256, (n, side, side), np.uint8),
            rng.integers(0, 10, n, np.uint8))


def contents(side=28):
    """The unpacked bytes of four files, by name."""
    return dict(zip(FILES, (idx(array) for part in PARTS
                            for array in pictures(part, side))))


def write(folder, files, packed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if packed:
            (folder / (name + ".gz")).write_bytes(gzip.compress(data))
        else:
            (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def env(tmp_path):
    """An environment in which no data set is found and no proxy used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MGPU_DATA", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        patch.setenv("no_proxy", "127.0.0.1")
        yield patch


@pytest.fixture
def cache(env, tmp_path):
    return tmp_path / "cache" / "mgpu" / "fashion-mnist"


# -- batches ----------------------------------------------------------------

def rows(iterator):
    """The labels of one epoch, which number the examples in these tests."""
    return np.concatenate([y for _, y in iterator])


def numbered(n, batch_size, **options):
    X = np.arange(n * 6, dtype="float32").reshape(n, 1, 2, 3)
    return BatchIterator(X, np.arange(n, dtype="int32"), batch_size,
                         **options)


def test_an_epoch_holds_every_example_once_with_its_label():
    it = numbered(10, 4)
    batches = list(it)
    assert len(it) == len(batches) == 3
    assert [X.shape for X, _ in batches] == [(4, 1, 2, 3)] * 2 + [(2, 1, 2, 3)]
    for X, y in batches:
        assert X.dtype == np.float32 and y.dtype == np.int32
        assert np.array_equal(X, it.X[y])
    order = np.concatenate([y for _, y in batches])
    assert sorted(order) == list(range(10)) and list(order) != sorted(order)


@pytest.mark.parametrize("n, batch_size, keep, drop", [
    (8, 4, 2, 2), (9, 4, 3, 2), (4, 4, 1, 1), (7, 1, 7, 7)])
def test_length_and_last_batch(n, batch_size, keep, drop):
    for drop_last, count in ((False, keep), (True, drop)):
        it = numbered(n, batch_size, drop_last=drop_last)
        assert len(it) == len(list(it)) == count
    assert len(numbered(3, 4)) == 1


def test_the_order_depends_only_on_the_seed_and_the_epoch():
    first = [rows(numbered(20, 3, seed=7)) for _ in range(2)]
    assert np.array_equal(*first)
    assert not np.array_equal(first[0], rows(numbered(20, 3, seed=8)))
    assert np.array_equal(first[0], rows(numbered(20, 11, seed=7)))
    it = numbered(20, 3, seed=7)
    epochs = [rows(it) for _ in range(4)]
    assert it.epoch == 4
    assert len({tuple(e) for e in epochs}) == 4
    resumed = numbered(20, 3, seed=7)
    resumed.epoch = 2
    assert np.array_equal(rows(resumed), epochs[2])
    assert np.array_equal(rows(resumed), epochs[3])


def test_the_order_is_the_same_on_every_numpy():
    # Recorded with NumPy 1.26.4; 1.23.5 and 2.4.6 give the same.
    it = numbered(12, 5, seed=3)
    it.epoch = 1
    assert rows(it).tolist() == [0, 4, 11, 1, 2, 5, 10, 7, 9, 8, 6, 3]


def test_a_position_is_after_the_last_batch_that_was_handed_out():
    it = numbered(10, 4, seed=2)
    first, second = list(it), list(it)
    assert it.position == (2, 0)
    for at, (_, y) in enumerate(it, 1):
        assert it.position == ((2, at) if at < 3 else (3, 0))
        resumed = numbered(10, 4, seed=2)
        resumed.position = 0, at % 3
        assert np.array_equal(rows(resumed), np.concatenate(
            [y for _, y in first[at % 3:]]))
        assert resumed.epoch == 1 and resumed.position == (1, 0)
        assert np.array_equal(rows(resumed), np.concatenate(
            [y for _, y in second]))
    early, late = iter(it), iter(it)        # only the latest one counts
    next(late), next(early)
    assert it.position == (4, 1)
    it.epoch = 7
    assert it.position == (7, 0) and next(early)[1].size == 4
    assert it.position == (7, 0)
    for wrong in ((-1, 0), (0, 3), (0, -1), (0, 0.5)):
        with pytest.raises(ValueError):
            it.position = wrong
    assert it.position == (7, 0)


def test_a_position_of_batches_that_another_thread_draws_is_refused():
    """It may be ahead; `mgpu.prefetch` counts those that are taken."""
    it = numbered(10, 4)
    for at, _ in enumerate(mgpu.prefetch(it, 3), 1):
        assert it.position == ((0, at) if at < 3 else (1, 0))
    for _ in mgpu.prefetch(map(tuple, it), 3):
        with pytest.raises(RuntimeError, match="another thread draws"):
            it.position
    it.epoch = 0
    assert it.position == (0, 0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_batch_is_the_users_to_change(shuffle):
    it = numbered(4, 4, shuffle=shuffle)
    before = it.X.copy()
    for X, y in it:
        X[:], y[:] = -1, -1
    assert np.array_equal(it.X, before)
    assert it.y.tolist() == [0, 1, 2, 3]


def test_transform_is_applied_to_batches_and_to_X():
    it = numbered(5, 2, shuffle=False, transform=lambda X: X[..., :1] + 1)
    assert np.array_equal(np.concatenate([X for X, _ in it]), it.X)
    assert np.array_equal(it.X, numbered(5, 2).X[..., :1] + 1)


@pytest.mark.parametrize("make", [
    lambda b: numbered(4, b), datasets.synthetic, datasets.fashion_mnist],
    ids=["BatchIterator", "synthetic", "fashion_mnist"])
def test_a_wrong_batch_size_is_refused(make, env):
    for value in (0, -1, 2.5, "2", None, True):
        with pytest.raises(ValueError, match="batch_size must be an integer "
                                             "of 1 or more; received"):
            make(value)


@pytest.mark.parametrize("make, message", [
    (lambda: BatchIterator(np.zeros((3, 2)), np.zeros(4), 1),
     "same length; received 3 examples and 4 labels"),
    (lambda: BatchIterator(np.zeros((0, 2)), np.zeros(0), 1),
     "at least one example"),
    (lambda: numbered(3, 4, drop_last=True), "drop_last leaves no batch"),
    (lambda: setattr(numbered(3, 4), "epoch", -1), "epoch must be"),
    (lambda: datasets.digits(4, dtype="int8"),
     "unknown dtype; received 'int8'. Use one of 'float32', 'float64'"),
    (lambda: datasets.digits(4, resize=0), "resize must be an integer of 1"),
    (lambda: datasets.bilinear(np.zeros((1, 2, 2), np.uint8), 4),
     "images must be float32 or float64; received uint8"),
    (lambda: datasets.digits(4, test_size=1797), "at least one example"),
    (lambda: datasets.synthetic(4, noise=float("nan")), "noise must be"),
])
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# -- resizing ---------------------------------------------------------------

@pytest.mark.parametrize("old, new", [
    ((8, 8), 28), ((28, 28), (9, 40)), ((3, 4), 1), ((1, 1), 3)])
def test_bilinear_is_its_definition(old, new):
    x = np.random.default_rng(0).uniform(size=(2, 1, *old))
    found = datasets.bilinear(x, new)
    height, width = new if isinstance(new, tuple) else (new, new)
    assert found.shape == (2, 1, height, width)

    def mix(i, n, n_old):
        """The weight of each old pixel in the new pixel i: a hat around its
        centre, the border repeated."""
        at = min(max((i + 0.5) * n_old / n - 0.5, 0), n_old - 1)
        return np.maximum(0, 1 - np.abs(np.arange(n_old) - at))

    for i in range(height):
        for j in range(width):
            expected = (mix(i, height, old[0]) @ x[:, 0]
                        @ mix(j, width, old[1]))
            # A few roundings of numbers below 1.
            np.testing.assert_allclose(found[:, 0, i, j], expected, rtol=0,
                                       atol=1e-14)


# -- IDX files --------------------------------------------------------------

@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_reads_the_files(packed, tmp_path, env):
    folder = write(tmp_path / "idx", contents(), packed)
    train, test = datasets.fashion_mnist(16, root=folder, seed=4)
    for it, part in ((train, "train"), (test, "t10k")):
        images, labels = pictures(part)
        order = (np.random.default_rng([4, 0]).permutation(len(labels))
                 if part == "train" else np.arange(len(labels)))
        X, y = map(np.concatenate, zip(*it))
        assert X.shape == (len(labels), 1, 28, 28) and X.dtype == np.float32
        assert y.dtype == np.int32 and np.array_equal(y, labels[order])
        assert np.array_equal(X[:, 0], images[order] / np.float32(255))
        assert it.info == {
            "name": "fashion-mnist", "shape": [1, 28, 28], "train": 41,
            "test": 13, "source": str(folder)}


def test_dtype_limit_and_resize(tmp_path):
    dtype = "float64"
    root = write(tmp_path / "idx", contents())
    train, test = datasets.fashion_mnist(4, (14, 20), root, 9, dtype=dtype,
                                         shuffle=False)
    whole, _ = datasets.fashion_mnist(4, root=root, dtype=dtype)
    assert (train.num_examples, test.num_examples) == (9, 9)
    assert train.info["shape"] == [1, 14, 20]
    expected = datasets.bilinear(whole.X[:9], (14, 20))
    assert train.X.dtype == expected.dtype == dtype
    assert np.array_equal(train.X, expected)
    assert np.array_equal(train.y, whole.y[:9])
    assert datasets.fashion_mnist(4, root=root, limit=20)[1].num_examples == 13


IMAGES, LABELS = FILES[0], FILES[1]


def damage(name, change, packed=True):
    """Write all files right, but `name` as `change` makes of its bytes."""
    def apply(folder):
        write(folder, contents(), packed)
        path = folder / (name + ".gz" if packed else name)
        path.write_bytes(change(path.read_bytes()))
        return path.name
    return apply


def repacked(change):
    return lambda data: gzip.compress(change(gzip.decompress(data)))


@pytest.mark.parametrize("apply, message", [
    (damage(IMAGES, repacked(lambda d: b"\0\0\x08\x01" + d[4:])),
     r"received \d+ bytes with magic number 2049 and"),
    (damage(IMAGES, lambda d: b"", packed=False), "received 0 bytes"),
    (damage(IMAGES, repacked(lambda d: d[:-1])),
     "as its header says; received 32159 bytes with magic number 2051 and "
     r"shape \(41, 28, 28\)"),
    (damage(IMAGES, lambda d: d[:-8] + b"\1\2\3\4" + d[-4:]),
     "truncated or corrupt .*CRC"),
    (damage(LABELS, repacked(lambda d: idx(np.zeros(40, np.uint8)))),
     "one label per image; received 41 images in .* and 40 labels in"),
    (damage(IMAGES, repacked(lambda d: idx(np.zeros((0, 28, 28), np.uint8)))),
     r"and shape \(0, 28, 28\)"),
])
def test_a_wrong_file_is_refused(apply, message, tmp_path, env):
    name = apply(tmp_path / "idx")
    with pytest.raises(ValueError, match=message) as error:
        datasets.fashion_mnist(4, root=tmp_path / "idx")
    assert name in str(error.value)
    assert str(tmp_path / "idx") in str(error.value)


def test_search_order_is_root_then_MGPU_DATA_then_the_cache(
        tmp_path, env, cache):
    write(cache, contents(side=3))
    assert datasets.fashion_mnist(4)[0].info["shape"] == [1, 3, 3]
    named = write(tmp_path / "named", contents(side=4))
    env.setenv("MGPU_DATA", str(named))
    assert datasets.fashion_mnist(4)[0].info["shape"] == [1, 4, 4]
    root = write(tmp_path / "root", contents(side=5))
    train, _ = datasets.fashion_mnist(4, root=str(root))
    assert train.info["shape"] == [1, 5, 5]
    env.setenv("MGPU_DATA", "")         # as if it were not set
    assert datasets.fashion_mnist(4)[0].info["shape"] == [1, 3, 3]
    env.delenv("XDG_CACHE_HOME")
    env.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path / "home" / ".cache" / "mgpu" / "fashion-mnist",
          contents(side=6))
    assert datasets.fashion_mnist(4)[0].info["shape"] == [1, 6, 6]


# -- download ---------------------------------------------------------------

class Handler(http.server.BaseHTTPRequestHandler):
    """A file server whose manners the test sets; see `server`."""

    def do_GET(self):
        server, name = self.server, os.path.basename(self.path)
        server.log.append(name)
        if server.statuses:
            return self.send_error(server.statuses.pop(0))
        body = server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        end = server.cuts.pop(0) if server.cuts else None
        self.wfile.write(body[:end])       # then the connection is closed

    def log_message(self, *args):
        pass


@pytest.fixture
def server(env):
    """A mirror on the loopback interface.

    ``files``: what it has, by name. ``cuts``: after how many bytes of its
    body each next answer ends. ``statuses``: the status of each next answer.
    ``log``: the requests.
    """
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as mirror:
        mirror.files = {name + ".gz": gzip.compress(data)
                        for name, data in contents().items()}
        mirror.cuts, mirror.statuses, mirror.log = [], [], []
        thread = threading.Thread(target=mirror.serve_forever,
                                  kwargs={"poll_interval": 0.01})
        thread.start()
        mirror.url = f"http://127.0.0.1:{mirror.server_port}/"
        env.setattr(idx_files, "_MIRRORS", (mirror.url,))
        env.setattr(idx_files, "_MD5", {
            name[:-3]: hashlib.md5(data).hexdigest()
            for name, data in mirror.files.items()})
        yield mirror
        mirror.shutdown()
        thread.join()


def assert_complete(cache, server):
    assert {p.name: p.read_bytes() for p in cache.iterdir()} == server.files


def test_a_download_fills_the_cache_once(server, cache):
    train, test = datasets.fashion_mnist(16)
    assert_complete(cache, server)
    assert (train.num_examples, test.num_examples) == (41, 13)
    assert train.info["source"] == str(cache)
    assert server.log == [name + ".gz" for name in FILES]
    datasets.fashion_mnist(16)
    assert len(server.log) == 4, "the second call must use the cache"


def test_a_transfer_that_was_cut_short_is_tried_again(server, cache):
    """Nothing is left of a file that never arrives whole."""
    server.cuts = [1000] * 9
    with pytest.raises(ConnectionError, match=IMAGES):
        datasets.fashion_mnist(16)
    assert os.listdir(cache) == []
    server.cuts = [1000]
    server.log.clear()
    datasets.fashion_mnist(16)
    assert server.log.count(IMAGES + ".gz") == 2
    assert_complete(cache, server)


def test_a_download_says_when_pooch_is_missing(server, cache, env):
    env.setitem(sys.modules, "pooch", None)     # the import raises
    with pytest.raises(ImportError) as error:
        datasets.fashion_mnist(16)
    for part in ("pip install pooch", str(cache), "MGPU_DATA", "digits"):
        assert part in str(error.value)
    assert server.log == [] and not cache.exists()


def test_a_wrong_checksum_is_refused_and_the_file_removed(server, cache):
    name = LABELS + ".gz"
    server.files[name] = gzip.compress(b"another file")
    found = hashlib.md5(server.files[name]).hexdigest()
    with pytest.raises(ValueError, match="MD5") as error:
        datasets.fashion_mnist(16)
    for part in (server.url + name, found, idx_files._MD5[LABELS],
                 "Deleted", "MGPU_DATA", str(cache)):
        assert part in str(error.value)
    assert os.listdir(cache) == [IMAGES + ".gz"]


def closed_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}/"


def test_a_second_mirror_takes_over(server, cache, env):
    """Without any there is one clear error."""
    url = closed_port()
    env.setattr(idx_files, "_MIRRORS", (url,))
    with pytest.raises(ConnectionError) as error:
        datasets.fashion_mnist(16)
    for part in (url, str(cache), "MGPU_DATA", "digits", "refused"):
        assert part in str(error.value)
    assert os.listdir(cache) == []
    server.statuses = [503] * 2
    env.setattr(idx_files, "_MIRRORS", (server.url,))
    with pytest.raises(ConnectionError, match="503"):
        datasets.fashion_mnist(16)
    server.log.clear()
    env.setattr(idx_files, "_MIRRORS", (url, server.url))
    datasets.fashion_mnist(16)
    assert_complete(cache, server)
    assert len(server.log) == 4


def test_download_false_never_asks(server, cache):
    with pytest.raises(FileNotFoundError, match="download=False.*MGPU_DATA"):
        datasets.fashion_mnist(16, download=False)
    assert server.log == [] and not cache.exists()


@pytest.mark.parametrize("by, have", [
    ("root", None), ("root", FILES[:3]), ("MGPU_DATA", [])],
    ids=["no folder", "three files", "empty"])
def test_a_folder_that_was_named_is_never_replaced(by, have, tmp_path, env,
                                                   server, cache):
    """Neither by a download nor by the cache, which has the data here."""
    write(cache, contents())
    named = tmp_path / "named"
    if have is not None:
        write(named, {n: contents()[n] for n in have})
    if by == "MGPU_DATA":
        env.setenv("MGPU_DATA", str(named))
    with pytest.raises(FileNotFoundError) as error:
        datasets.fashion_mnist(16, root=named if by == "root" else None)
    message = str(error.value)
    received = ("MGPU_DATA=" if by == "MGPU_DATA" else "") + repr(str(named))
    assert f"four IDX files; received {received}, which lacks" in message
    for name in FILES:
        assert (name in message) == (name not in (have or []))
    assert server.log == []


# -- digits, synthetic, load ------------------------------------------------

def test_the_digits_are_those_of_scikit_learn():
    train, test = datasets.digits(64, resize=None, shuffle=False)
    assert (train.num_examples, test.num_examples) == (1437, 360)
    assert train.X.shape[1:] == (1, 8, 8)
    # In the order of the file again: the first of each of 360 stretches of
    # the digits sorted by class.
    path = os.path.join(os.path.dirname(mgpu.__file__), "data", "digits.npz")
    with np.load(path, allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
    assert images.dtype == labels.dtype == np.uint8
    # Made from sklearn.datasets.load_digits(), scikit-learn 1.9.1.
    assert hashlib.sha256(images.tobytes() + labels.tobytes()
                          ).hexdigest() == DIGITS_SHA256
    X = images[:, None] / np.float32(16)
    by_class = [i for c in range(10) for i in np.flatnonzero(labels == c)]
    last = sorted(by_class[k * 1797 // 360] for k in range(360))
    first = sorted(set(range(1797)) - set(last))
    for it, rows_ in ((train, first), (test, last)):
        assert np.array_equal(it.X, X[rows_])
        assert np.array_equal(it.y, labels[rows_])


def test_digits_options():
    train, test = datasets.digits(10, (9, 11), 7, dtype="float64",
                                  test_size=100)
    assert train.X.shape == test.X.shape == (7, 1, 9, 11)
    assert train.X.dtype == np.float64
    whole, rest = datasets.digits(10, None, test_size=1)
    assert (whole.num_examples, rest.num_examples) == (1796, 1)


def test_synthetic_data_are_seeded():
    train, test = datasets.synthetic(64, seed=2)
    same, _ = datasets.synthetic(64, seed=2)
    other, _ = datasets.synthetic(64, seed=3)
    double, _ = datasets.synthetic(64, seed=2, dtype="float64", limit=9)
    assert np.array_equal(train.X, same.X)
    assert np.array_equal(train.y, same.y)
    assert not np.array_equal(train.X, other.X)
    assert np.array_equal(train.X[:9], double.X.astype("float32"))
    assert train.X.shape == (1024, 1, 28, 28) and test.num_examples == 256
    assert train.X.dtype == np.float32 and train.y.dtype == np.int32
    counts = np.bincount(train.y)
    assert len(counts) == 10 and counts.max() - counts.min() <= 1


def test_synthetic_options():
    train, test = datasets.synthetic(8, 30, 5, 3, (4,), noise=0, limit=20)
    assert train.X.shape == (20, 4) and test.X.shape == (5, 4)
    assert len(np.unique(train.X, axis=0)) == 3     # no noise: the patterns
    assert train.info == {"name": "synthetic", "train": 20, "test": 5,
                          "shape": [4], "source": "random, noise 0"}


def test_load_by_name_and_by_path(tmp_path, env):
    root = write(tmp_path / "mine", contents())
    for what, name, shape in (
            ("digits", "digits", [1, 28, 28]),
            ("synthetic", "synthetic", [1, 28, 28]),
            (str(root), "mine", [1, 28, 28]), (root, "mine", [1, 28, 28])):
        train, test = datasets.load(what, 5, 12, 1, dtype="float64")
        assert train.info["name"] == name and train.info["shape"] == shape
        assert (train.num_examples, test.num_examples) == (12, 12)
        assert train.seed == 1 and train.X.dtype == np.float64
        assert json.loads(json.dumps(train.info)) == train.info
        small, _ = datasets.load(what, 5, resize=(6, 7), shuffle=False)
        assert next(iter(small))[0].shape == (5, 1, 6, 7)
        assert not small.shuffle
    env.setenv("MGPU_DATA", str(root))
    train, _ = datasets.load("fashion-mnist", 5, download=False)
    assert train.info["name"] == "fashion-mnist"
    assert train.info["source"] == str(root)


@pytest.mark.parametrize("name", ["mnist", "./digits", "/no/such/folder", ""])
def test_an_unknown_data_set_lists_those_there_are(name, tmp_path, env):
    env.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"'{name}'. Use 'digits', 'fashion-"
                       "mnist', 'synthetic', or the path of an existing fold"):
        datasets.load(name, 5)


def test_a_path_goes_to_the_folder_not_to_the_name(tmp_path, env):
    write(tmp_path / "digits", contents())
    env.chdir(tmp_path)
    assert datasets.load("./digits", 5)[0].num_examples == 41
    assert datasets.load("digits", 5)[0].num_examples == 1437
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty"):
        datasets.load("empty", 5)


# -- any object with a length and an index ------------------------------------

def framework_data(backend, X, y):
    """A data set of the framework, whose examples are ((x, 2x), y)."""
    if backend.name == "torch":
        import torch
        from torch.utils.data import Dataset

        class Own(Dataset):
            def __len__(self):
                return len(X)

            def __getitem__(self, i):
                x = torch.from_numpy(X[i])
                return (x, 2 * x), torch.tensor(y[i])
        return Own()
    from mxnet import gluon
    from mxnet import np as mxnp
    return gluon.data.ArrayDataset(mxnp.array(X), mxnp.array(y)).transform(
        lambda x, label: ((x, 2 * x), label))


def test_any_data_set_is_drawn_in_the_same_order(backend):
    X = np.arange(21, dtype="float32").reshape(7, 3)
    y = np.arange(7, dtype="int64")
    own = datasets.IndexedIterator(framework_data(backend, X, y), 3, seed=4)
    arrays = datasets.BatchIterator(X, y, 3, seed=4)
    assert len(own) == len(arrays) == 3
    for _ in range(2):
        for ((a, b), labels), (x, expected) in zip(own, arrays, strict=True):
            assert type(a) is type(labels) is np.ndarray
            np.testing.assert_array_equal(a, x)
            np.testing.assert_array_equal(b, 2 * x)
            np.testing.assert_array_equal(labels, expected)
    next(iter(own)), next(iter(arrays))
    assert own.position == arrays.position == (2, 1)
    own.position = (0, 2)
    assert len(list(own)) == 1
    assert repr(own).startswith("IndexedIterator(7 examples, batch_size=3")


def test_examples_may_be_numbers_and_dicts():
    data = [({"a": np.full(2, i), "b": [i, 0]}, i) for i in range(4)]
    X, y = next(iter(datasets.IndexedIterator(data, 2, shuffle=False)))
    assert X["a"].tolist() == [[0, 0], [1, 1]] and y.tolist() == [0, 1]
    assert [x.tolist() for x in X["b"]] == [[0, 1], [0, 0]]


@pytest.mark.parametrize("data, error, words", [
    (iter([]), TypeError, "has no len"),
    ([], ValueError, "at least one example"),
    ([1, 2], TypeError, "example 0 is a int"),
    ([(1, 2, 3)], TypeError, "example 0 is a tuple"),
    ([(np.ones(2), 0), (np.ones(3), 1)], ValueError, r"\(3,\) of dtype"),
    ([(np.array([None]), 0)], ValueError, "dtype object")])
def test_other_objects_are_refused(data, error, words):
    with pytest.raises(error, match=words):
        list(datasets.IndexedIterator(data, 2, shuffle=False))
