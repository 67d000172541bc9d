"""`mgpu.prefetch`: the same batches, and no thread is left behind."""
import contextlib
import contextvars
import functools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import mgpu
from helpers import assert_bit_equal, mlp, on
from mgpu.data import datasets
from conftest import BACKENDS


def drawing():
    return [t for t in threading.enumerate() if t.name == "mgpu-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert not drawing()
    yield
    assert not drawing()


def eventually(condition):
    """Wait for `condition`; a wait without end is a failure."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(1e-3)


class Source:
    """`n` batches, counted as they are drawn; by iter() the epochs."""

    def __init__(self, n, fail_at=None):
        self.n, self.fail_at, self.epochs, self.drawn = n, fail_at, 0, 0
        self.alive = weakref.WeakSet()

    def __iter__(self):
        self.epochs += 1
        return self.batches()

    def batches(self):
        for i in range(self.n):
            if i == self.fail_at:
                raise LookupError(i)
            self.drawn += 1
            X = Array.of(i)
            self.alive.add(X)
            yield X, np.array([i])
            del X


class Array(np.ndarray):    # a plain one has no weak references in a set

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    @classmethod
    def of(cls, i):
        return np.full(3, float(i)).view(cls)


def numbers(batches):
    return [int(y[0]) for _, y in batches]


# -- the same batches ---------------------------------------------------------

@pytest.mark.parametrize("depth", [1, 9])
def test_the_same_batches_in_the_same_order(backend, depth):
    """Over epochs, with and without a length; and what each was."""
    def loader():
        return datasets.digits(400, seed=3)[0]
    plain, ahead = loader(), mgpu.prefetch(loader(), depth)
    assert len(ahead) == len(plain) == 4
    for _ in range(2):
        pairs = list(zip(plain, ahead, strict=True))
        assert len(pairs) == 4
        for (X, y), (found_X, found_y) in pairs:
            assert_bit_equal(found_X, X)
            assert_bit_equal(found_y, y)
    without = mgpu.prefetch(Source(5), depth)
    with pytest.raises(TypeError, match="has no len"):
        len(without)
    assert numbers(without) == numbers(without) == [0, 1, 2, 3, 4]
    assert list(mgpu.prefetch([], depth)) == []
    things = [object(), "text", None, (1, {"a": [2]})]
    assert [a is b for a, b in zip(mgpu.prefetch(things, depth), things)] \
        == [True] * 4
    once = mgpu.prefetch(iter(range(3)), depth)
    assert list(once) == [0, 1, 2] and list(once) == []


# -- how far ahead ------------------------------------------------------------

@pytest.mark.parametrize("depth", [1, 3])
def test_at_most_depth_batches_wait(backend, depth):
    """They are drawn while the consumer is busy, and no more than these;
    nothing holds on to one that was handed out."""
    source = Source(8)
    for taken, _batch in enumerate(mgpu.prefetch(source, depth), 1):
        wanted = min(8, taken + depth)
        eventually(lambda: source.drawn == wanted)
        time.sleep(5e-3)        # for one that goes further to do so
        assert source.drawn == wanted
        assert len(source.alive) == wanted - taken + 1  # the one in use
    assert taken == 8
    del _batch
    assert not source.alive


def test_it_draws_in_one_other_thread_with_the_callers_modes(engine):
    def seen():
        # MXNet's loaders make the arrays that the thread's mode asks for
        return (engine.is_recording(), engine.is_training(),
                mgpu.get_backend(),
                type(mgpu.put(np.ones(1), mgpu.cpu(0))))

    def source():
        for _ in range(3):
            yield seen(), threading.current_thread()
    with mgpu.record(), mgpu.using_backend(engine.name):
        found = list(mgpu.prefetch(source()))
        here = seen()
    assert [modes for modes, _ in found] == [here] * 3
    thread, = {t for _, t in found}
    assert thread is not threading.current_thread()
    # and nothing of it stays in the caller
    assert not engine.is_recording()


# -- ends ---------------------------------------------------------------------

@pytest.mark.parametrize("place", [0, 2])
def test_an_exception_comes_at_its_place(backend, place):
    found = []
    with pytest.raises(LookupError, match=f"^{place}$"):
        for _, y in mgpu.prefetch(Source(4, fail_at=place), 3):
            found.append(int(y[0]))
    assert found == list(range(place))
    assert not drawing()
    batches = iter(mgpu.prefetch(Source(1, fail_at=0)))
    for error in (LookupError, StopIteration):
        with pytest.raises(error):
            next(batches)


@pytest.mark.parametrize("how", ["break", "exception", "dropped"])
def test_no_thread_is_left(backend, how):
    source = Source(10 ** 9)
    ahead = mgpu.prefetch(source, 4)
    if how == "dropped":
        batches = iter(ahead)
        next(batches)
        assert drawing()
        del batches
    else:
        with contextlib.suppress(ZeroDivisionError):
            for _ in ahead:
                if how == "break":
                    break
                raise ZeroDivisionError
        _ = None        # the batch
    assert not drawing()
    assert source.drawn <= 5 and not source.alive


def test_ctrl_c_while_a_batch_is_waited_for(backend):
    waits, go = threading.Event(), threading.Event()

    def source():
        yield 1
        eventually(lambda: found)
        waits.set()
        go.wait(30)
        yield 2

    def press():
        waits.wait(30)
        os.kill(os.getpid(), signal.SIGINT)
        go.set()
    presser = threading.Thread(target=press)
    presser.start()
    found = []
    with pytest.raises(KeyboardInterrupt):
        for x in mgpu.prefetch(source()):
            found.append(x)
            if x == 2:
                time.sleep(30)
    presser.join()
    assert found == [1] and not drawing()


def test_the_process_ends_with_an_iterator_in_use():
    """The interpreter has stopped its thread, so waiting for it would hang."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c",
         "import itertools, mgpu\n"
         f"mgpu.set_backend({BACKENDS[0]!r})\n"
         "batches = iter(mgpu.prefetch(itertools.count(), 2))\n"
         "print(next(batches), flush=True)"],
        capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_wrong_arguments_are_refused(backend):
    for wrong in (0, -1, 1.5, None, True, "1"):
        with pytest.raises(ValueError, match="depth must be an integer of 1"):
            mgpu.prefetch([], wrong)
    with pytest.raises(TypeError, match="data must be an iterable of batches; "
                       "received int. Pass a list"):
        mgpu.prefetch(3)
    with pytest.raises(ValueError, match=r"gpu\(99\) is not available"):
        mgpu.prefetch([], devices="gpu:99")
    replicas, loss, trainer = set_up(backend, on(0))
    for wrong in (-1, 0.5, None, True):
        with pytest.raises(ValueError, match="prefetch must be an integer of "
                           f"0 or more; received {wrong!r}"):
            mgpu.train(replicas, [], None, loss, trainer, 1, prefetch=wrong)


# -- training -----------------------------------------------------------------

def batches(n=5):
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(5 - i % 3, 6)), rng.integers(0, 3, 5 - i % 3))
            for i in range(n)]


def set_up(engine, devices):
    replicas = mgpu.initialize(mlp(engine), devices, "xavier", seed=1,
                               dtype="float64")
    return (replicas, mgpu.losses.SoftmaxCrossEntropyLoss(),
            mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.25,
                                           "momentum": 0.5}))


def test_the_same_training(backend, devices):
    """To the bit, and with a list, an own iterator and a wrapped one."""
    found = []
    for n, source in ((0, batches()), (3, Source(0)),
                      (0, mgpu.prefetch(batches(), 2))):
        if isinstance(source, Source):
            source.batches = lambda: iter(batches())
        replicas, loss, trainer = set_up(backend, devices)
        history = mgpu.train(replicas, source, None, loss, trainer, 2,
                             progress=False, prefetch=n)
        assert not drawing()
        found.append((history.loss_per_step,
                      replicas.export_numpy(all_devices=True)))
    losses, values = found[0]
    assert len(losses) == 10 and losses[0] > losses[-1]
    for other, others in found[1:]:
        assert other == losses
        for name, value in values.items():
            assert_bit_equal(others[name], value)


@pytest.mark.parametrize("name", {"torch"} & set(BACKENDS))
def test_data_and_functional_dropout_draw_the_same_numbers_in_every_run(name):
    """From torch's default stream, for which each replica has its own."""
    import torch

    class Net(torch.nn.Sequential):
        def forward(self, x):
            time.sleep(0.005)       # in its turn, while data is drawn
            for layer in self:
                x = torch.nn.functional.dropout(layer(x), 0.3, self.training)
            return x

    def data():
        for X, y in batches(6):
            # so often that a replica runs meanwhile
            noise = sum(torch.randn(X.shape) for _ in range(300))
            yield X + noise.numpy() / 100, y
    found = []
    with mgpu.using_backend(name):
        for ahead in (0, 2):
            torch.manual_seed(0)
            net = Net(*(torch.nn.Linear(6, 6) for _ in range(5)))
            mgpu.seed(1)
            replicas = mgpu.initialize(net, on(0, 1), dtype="float64")
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
            found.append(mgpu.train_epochs(
                lambda X, y, r=replicas, t=trainer: mgpu.train_batch(
                    X, y, r, mgpu.losses.SoftmaxCrossEntropyLoss(), t),
                list(data()) if not ahead else data(), 1, on(0, 1),
                prefetch=ahead).loss_per_step)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", {"mxnet"} & set(BACKENDS))
def test_each_epoch_of_mxnet_data_draws_numbers_of_its_own(name):
    """The same in every run; each thread has streams there."""
    with mgpu.using_backend(name):
        import mxnet as mx

        class Data:
            def __iter__(self):
                return (float(mx.nd.random.uniform().asscalar())
                        for _ in range(3))
        runs = []
        for _ in range(2):
            mgpu.seed(3)
            source = mgpu.prefetch(Data())
            runs.append([*source, *source])
    assert runs[0] == runs[1] and len(set(runs[0])) == 6


def test_a_training_may_run_inside_the_data(backend):
    """Which has the turn to draw: its replicas do not wait for it. Nor does
    who closes a source that waits for its turn."""
    def data():
        replicas, loss, trainer = set_up(backend, on(0, 1))
        for X, y in batches():
            mgpu.train_batch(X, y, replicas, loss, trainer)
            yield trainer.num_update
    assert list(mgpu.prefetch(data())) == [1, 2, 3, 4, 5]
    source = Source(9)
    waiting = iter(mgpu.prefetch(source))
    next(waiting)
    eventually(lambda: source.drawn == 2)
    with backend.drawing([])():
        next(waiting)
        waiting.close()


def test_who_waits_in_its_turn_to_draw_leaves_it_to_others(backend):
    """And has it again afterwards. A turn is of threads that share a stream:
    torch's."""
    def free():
        def draw():
            with contextlib.suppress(InterruptedError), \
                    backend.drawing(["at once or not at all"])():
                found.append(True)
        found = []
        other = threading.Thread(target=draw)
        other.start()
        other.join()
        return found == [True]
    with backend.drawing([])():
        before = free()
        with backend.aside():
            assert free()
        assert backend.parallel([free, free]) == [True, True]
        assert free() == before
    assert free()
    with backend.aside():
        assert free()


def result_of(function):
    """Of a call that may hang."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()),
                              daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it hangs, or has failed"
    return found[0]


@pytest.mark.parametrize("again", [
    mgpu.prefetch, lambda source: (a for a, _ in zip(
        mgpu.prefetch(source), mgpu.prefetch(Source(4))))],
    ids=["itself", "zip"])
def test_what_is_prefetched_is_prefetched_again(backend, again):
    """The one that draws waits for the other one, which draws meanwhile."""
    def train(ahead):
        replicas, loss, trainer = set_up(backend, on(0, 1))
        source = Source(0)
        source.batches = lambda: iter(batches(4))
        return mgpu.train(
            replicas, again(source) if ahead else source, None, loss,
            trainer, 1, progress=False, prefetch=ahead).loss_per_step
    found = []
    for ahead in (0, 2):
        found.append(result_of(functools.partial(
            contextvars.copy_context().run, train, ahead)))
    assert len(found[0]) == 4 and found[0] == found[1]


def test_a_thread_that_has_drawn_draws_again(backend):
    """One that ended would leave its random streams in MXNet's memory."""
    def data():
        for _ in range(3):
            yield threading.current_thread()

    def pairs():
        for pair in zip(mgpu.prefetch(data()), mgpu.prefetch(data())):
            yield from pair

    def kept():
        return {t for t in threading.enumerate()
                if t.name.startswith("mgpu-prefetch")}
    assert len(set(pairs())) == 2
    before = kept()
    for _ in range(5):
        assert set(pairs()) <= before
    assert kept() == before


def test_a_training_that_fails_leaves_no_thread(backend):
    replicas, loss, trainer = set_up(backend, on(0, 1))
    data = batches(20)
    data[2][0][0] = np.nan
    with pytest.raises(mgpu.NonFiniteLoss, match=r"in step 3 \(epoch 1\)"):
        mgpu.train(replicas, data, None, loss, trainer, 2, progress=False,
                   prefetch=4)
    assert not drawing()
    data[1] = data[1][0], data[1][1][:1]
    with contextlib.suppress(ValueError):
        mgpu.train(replicas, data, None, loss, trainer, 2, progress=False,
                   prefetch=4)
    assert not drawing() and not backend.is_recording()





# -- CUDA ---------------------------------------------------------------------

@pytest.mark.gpu
def test_batches_for_a_gpu_are_page_locked():
    import torch
    assert torch.cuda.is_available(), "pytest -m gpu needs a CUDA device"
    with mgpu.using_backend("torch"):
        X, y = batches(1)[0]
        data = [((X, {"mask": X > 0}), y), ((torch.from_numpy(X), {}), "y")]
        (a, b), on_cpu = mgpu.prefetch(data), mgpu.prefetch(data,
                                                            devices="cpu:0")
        for tensor, wanted in ((a[0][0], X), (a[0][1]["mask"], X > 0),
                               (a[1], y), (b[0][0], X)):
            assert tensor.is_pinned() and tensor[1:].is_pinned()
            assert_bit_equal(tensor.numpy(), wanted)
        assert b[1] == "y"
        assert [x is y for x, y in zip(on_cpu, data)] == [True] * 2
        results = []
        for n in (0, 2):
            replicas, loss, trainer = set_up(mgpu.get_backend(),
                                             [mgpu.gpu(0)])
            history = mgpu.train(replicas, batches(40), None, loss, trainer,
                                 2, progress=False, prefetch=n)
            results.append(history.loss_per_step)
        assert results[0] == results[1]
