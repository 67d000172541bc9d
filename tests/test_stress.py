"""Nothing is left behind: threads, memory and half a step, after hundreds of
trainings, interrupts at any moment, and threads that end while they get work.

What may hang, or counts what a whole process holds, runs in one of its own.
"""
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from mgpu.backends._workers import Workers
from nets import mlp

BEGIN = """
    import ctypes, faulthandler, gc, random, resource, signal, sys
    import threading, time
    import weakref
    import numpy as np
    import mgpu
    from helpers import assert_bit_equal, convnet, mlp
    faulthandler.dump_traceback_later(100, exit=True)   # where it hangs
    mgpu.set_backend({name!r})
    backend = mgpu.get_backend()
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    rng = np.random.default_rng(0)

    def set_up(k, seed=0, **options):
        replicas = mgpu.initialize(mlp(backend), mgpu.list_devices(k),
                                   "xavier", seed=seed, dtype="float64",
                                   **options)
        return replicas, mgpu.Trainer(replicas, "sgd", dict(
            learning_rate=0.125, momentum=0.5))

    def batches(n):
        rng = np.random.default_rng(n)
        return [(rng.normal(size=(5, 6)), rng.integers(0, 3, 5))
                for _ in range(n)]

    def workers():
        return [t for t in threading.enumerate()
                if t.name.startswith("mgpu-")]
"""


def start(name, code):
    """A process that runs `BEGIN` and `code` on the engine `name`."""
    text = textwrap.dedent(BEGIN.format(name=name)) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", text],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "MGPU_TEST_BACKENDS": name, "PYTHONPATH":
             os.pathsep.join([str(Path(__file__).parent),
                              str(Path(mgpu.__file__).parent.parent)])})


def run(name, code):
    process = start(name, code)
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


# -- many trainings -----------------------------------------------------------

@pytest.mark.parametrize("name", BACKENDS)
def test_two_hundred_trainings_leave_nothing(name):
    """On 1 to 8 devices, with rows for some of them only, and every fourth
    time with thunks that wait for each other (synchronised batch norm)."""
    run(name, """
    order, most, dropped = random.Random(0), 0, []
    pictures = rng.random((5, 2, 6, 6)), rng.integers(0, 3, 5)

    def once(k, i):
        if i % 4:
            replicas, trainer = set_up(k, seed=i)
            batch = batches(1)[0]
        else:
            replicas = mgpu.initialize(
                convnet(backend), mgpu.list_devices(k), "xavier", seed=i,
                dtype="float64", batch_norm="sync")
            trainer = mgpu.Trainer(replicas, "sgd", dict(learning_rate=0.1))
            batch = pictures
        dropped.extend([weakref.ref(replicas), weakref.ref(trainer)])
        mgpu.train(replicas, [batch], [batch], loss, trainer, 1,
                   progress=False, prefetch=i % 3)

    def arrays():
        mgpu.synchronize(mgpu.list_devices(8))
        gc.collect()
        return sum(map(backend.is_native, gc.get_objects()))

    def resident():     # MB, without what the allocator keeps for later
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return pages * resource.getpagesize() / 2 ** 20

    for i in range(100):
        if i == 20:
            before = arrays()
        k = order.randint(1, 8)
        most = max(most, k)
        once(k, i)
        # one leads the steps, one has drawn batches
        assert len(workers()) <= most + 2, workers()
    assert most == 8
    after_100 = arrays(), resident()
    for i in range(100, 200):
        once(order.randint(1, 8), i)
    assert arrays() == after_100[0] == before, (arrays(), after_100, before)
    assert not [ref for ref in dropped if ref() is not None]
    # One set of 8 devices takes about 20 kB: this only sees whole stacks
    # and arenas, of which an allocator may take a few more at any time.
    assert resident() - after_100[1] < 48, (resident(), after_100)
    """)


# -- Ctrl-C -------------------------------------------------------------------

@pytest.mark.parametrize("options", ["", "prefetch=2, max_inflight=4"])
@pytest.mark.parametrize("name", BACKENDS)
def test_ctrl_c_ends_a_training(name, options):
    process = start(name, f"""
    class Endless:
        def __iter__(self):
            for i in range(10 ** 9):
                if i == 20:
                    print("training", flush=True)
                yield batches(1)[0]
    replicas, trainer = set_up(3)
    mgpu.train(replicas, Endless(), None, loss, trainer, 1, progress=False,
               {options})
    """)
    try:
        assert process.stdout.readline() == "training\n"
        # MXNet's arrays have finalizers in Python; an exception that comes
        # in one of them is printed and lost, so a user may press again.
        for _ in range(10):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=8)
                break
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT, err
    # not as its last line: an MXNet array that Ctrl-C met in its __init__
    # complains when it is finalized
    assert "\nKeyboardInterrupt\n" in err and "in train" in err


def test_a_call_that_is_interrupted_runs_all_thunks_once_or_none():
    run(BACKENDS[0], """
    import contextlib
    from mgpu.backends._workers import Workers

    class Stop(BaseException):
        pass

    def stop(*_):
        raise Stop
    signal.signal(signal.SIGALRM, stop)
    workers = Workers("w", int, lambda: contextlib.nullcontext)
    # Python's own Thread.start does not take such an exception well.
    workers.run([int] * 8)
    order, outcomes = random.Random(0), set()
    for i in range(1500):
        k, ran = order.randint(1, 8), []
        try:
            signal.setitimer(signal.ITIMER_REAL, order.uniform(1e-5, 4e-4))
            try:
                workers.run([lambda i=i: ran.append(i) for i in range(k)])
                outcome = "quiet"
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Stop:
            outcome = "stopped"
        assert sorted(ran) in ([], list(range(k))), (k, ran)
        outcomes.add((outcome, bool(ran)))
    assert outcomes >= {("quiet", True), ("stopped", True)}, outcomes
    assert ("quiet", False) not in outcomes
    assert workers.run([lambda: 1, lambda: 2]) == [1, 2]
    """)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("threads, wanted", [("devices", 2),
                                             ("prefetch", 1)])
def test_the_interpreter_ends_after_the_work_of_threads(name, threads,
                                                         wanted):
    """Work that two Ctrl-C have left, thunks that wait for each other, and a
    batch that is drawn; under torch's own code the end is an abort."""
    assert run(name, """
    xs = [mgpu.put(np.ones((256, 256), "float32"), mgpu.cpu(i))
          for i in range(2)]
    begun, ends, meeting = [], [], threading.Barrier(2)

    def work(i):
        meeting.wait()
        begun.append(i)
        mgpu.attach_grad(xs[i])
        while not ends or time.monotonic() < ends[0]:
            with mgpu.record():
                y = mgpu.functional.dot(xs[i], xs[i])
            mgpu.backward(y)
            mgpu.to_numpy(xs[i])
        sys.stdout.write("done\\n")      # one write: print has two

    def press():
        while not ends:
            if len(begun) == 2:     # raise_signal would wake this thread
                signal.pthread_kill(threading.main_thread().ident,
                                    signal.SIGINT)
            time.sleep(0.2)
    if THREADS == "prefetch":
        batches = mgpu.prefetch(map(work, [0]))
        meeting = threading.Barrier(1)
        threading.Timer(0.2, lambda: ends.append(time.monotonic() + 0.3)
                        ).start()
        threading.Thread(target=list, args=(batches,), daemon=True).start()
        while not begun:
            time.sleep(0.01)
    else:
        threading.Thread(target=press, daemon=True).start()
        try:
            backend.parallel([lambda: work(0), lambda: work(1)],
                             rendezvous=True)
        except KeyboardInterrupt:
            ends.append(time.monotonic() + 0.5)
    """.replace("THREADS", repr(threads))) == "done\n" * wanted


# -- the threads themselves ---------------------------------------------------

def named(name):
    return [t for t in threading.enumerate() if t.name.startswith(name)]


def workers(name, idle):
    return Workers(name, int, lambda: contextlib.nullcontext, idle)


def test_a_thread_without_work_ends():
    own = workers("idle", 0.02)
    for k in (1, 3, 2):
        assert own.run([lambda i=i: i for i in range(k)]) == list(range(k))
        end = time.monotonic() + 30
        while named("idle"):
            assert time.monotonic() < end, named("idle")
            time.sleep(1e-3)


def test_a_thread_that_is_about_to_end_loses_no_work():
    """Calls and ends at the same moments, from two callers."""
    own, results = workers("race", 1e-4), {}

    def call(n):
        pauses = np.random.default_rng(n).uniform(0, 3e-4, 800)
        results[n] = []
        for pause in pauses:
            time.sleep(pause)
            results[n].append(own.run([lambda i=i: (n, i)
                                       for i in range(1 + len(results[n]) % 3)
                                       ]))
    callers = [threading.Thread(target=call, args=(n,), daemon=True)
               for n in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert results == {n: [[(n, i) for i in range(1 + j % 3)]
                           for j in range(800)] for n in range(2)}


def test_a_call_keeps_nothing_alive():
    """Neither arguments nor results, nor, where it fails, its frames."""
    own = workers("keeping", 5)

    class Thing:
        count = 0

        def __init__(self):
            Thing.count += 1

        def __del__(self):
            Thing.count -= 1

    def fail(thing):
        raise LookupError
    gc.disable()    # no help from it
    try:
        for _ in range(20):
            things = own.run([Thing] * 3)
            assert Thing.count == 3
            own.run([Thing] * 2)
            assert Thing.count == 3
            with contextlib.suppress(LookupError):
                own.run([lambda thing=thing: fail(thing)
                         for thing in things])
            del things
            assert Thing.count == 0
    finally:
        gc.enable()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("k", (1, 2, 3))
def test_work_in_a_signal_handler_is_done_or_refused(backend, k):
    """It interrupts the thread that waits for the devices, and would wait
    for them in its turn."""
    X, y = np.ones((8, 6)), np.zeros(8, int)
    net = mlp(backend)
    replicas = mgpu.initialize(net, mgpu.list_devices(k), "xavier",
                               dtype="float64")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    shards = mgpu.split_and_load(X, replicas.devices, even_split=False)
    loss, found = mgpu.losses.SoftmaxCrossEntropyLoss(), []

    def handler(*_):
        try:
            found.append(len(replicas(shards)))
        except RuntimeError as error:
            found.append(str(error))

    def signals(pred, label):
        if not found:
            # not to any thread, which may come to it when the handler is gone
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(0.05)
        return loss(pred, label)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with contextlib.suppress(ValueError):   # it keeps `found`
            mgpu.train_batch(X, y, replicas, signals, trainer)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [k] or "Set a flag in the handler" in found[0]
    mgpu.train_batch(X, y, replicas, loss, trainer)
    replicas.check_equal()
