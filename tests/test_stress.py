"""Nothing is left behind: threads, memory and half a step, after many
trainings, interrupts at any moment, and threads that end while they get work.

What may hang, or counts what a whole process holds, runs in one of its own.
"""
import contextlib
import os
import signal
import subprocess
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

import forked
import mgpu
from conftest import BACKENDS
from helpers import assert_bit_equal
from nets import mlp, on_each, shards_of

BEGIN = """
    import faulthandler, gc, random, signal, sys, threading, time, weakref
    import numpy as np
    import mgpu
    from nets import convnet, mlp
    faulthandler.dump_traceback_later(280, exit=True)   # where it hangs
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

    def batch():
        return rng.normal(size=(5, 6)), rng.integers(0, 3, 5)

    def workers():
        return [t for t in threading.enumerate()
                if t.name.startswith("mgpu-")]
"""


def start(name, code):
    """A process that runs `BEGIN` and `code` on the backend `name`."""
    text = textwrap.dedent(BEGIN.format(name=name)) + textwrap.dedent(code)
    return subprocess.Popen(
        [forked.python(), "-W", "ignore", "-c", text],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "MGPU_TEST_BACKENDS": name, "PYTHONPATH":
             os.pathsep.join([str(Path(__file__).parent),
                              str(Path(mgpu.__file__).parent.parent)])})


def run(name, code):
    process = start(name, code)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


# -- many trainings -----------------------------------------------------------

@pytest.mark.parametrize("name", BACKENDS)
def test_many_trainings_leave_nothing(name):
    """On 1 to 8 devices, with rows for some of them only, and every fourth
    time with thunks that wait for each other (synchronized batch norm)."""
    run(name, """
    order, most, dropped = random.Random(0), 0, []
    images = rng.random((5, 2, 6, 6)), rng.integers(0, 3, 5)

    def once(k, i):
        if i % 4:
            replicas, trainer = set_up(k, seed=i)
            data = batch()
        else:
            replicas = mgpu.initialize(
                convnet(backend), mgpu.list_devices(k), "xavier", seed=i,
                dtype="float64", batch_norm="sync")
            trainer = mgpu.Trainer(replicas, "sgd", dict(learning_rate=0.1))
            data = images
        dropped.extend([weakref.ref(replicas), weakref.ref(trainer)])
        mgpu.train(replicas, [data], [data], loss, trainer, 1,
                   progress=False, prefetch=i % 3)

    def arrays():
        mgpu.synchronize(mgpu.list_devices(8))
        gc.collect()
        return sum(map(backend.is_native, gc.get_objects()))

    for i in range(36):
        if i == 20:
            before = arrays()
        k = order.randint(1, 8)
        most = max(most, k)
        once(k, i)
        # one leads the steps, one has drawn batches
        assert len(workers()) <= most + 2, workers()
    assert most == 8
    assert arrays() == before
    assert not [ref for ref in dropped if ref() is not None]
    """)


# -- Ctrl-C -------------------------------------------------------------------

@pytest.mark.parametrize("name, options", list(zip(
    BACKENDS, ["", "prefetch=2, max_inflight=4"])))
def test_ctrl_c_ends_a_training(name, options):
    process = start(name, f"""
    class Endless:
        def __iter__(self):
            for i in range(10 ** 9):
                if i == 20:
                    print("training", flush=True)
                yield batch()
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
                process.wait(timeout=20)
                break
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT, err
    # not as its last line: an MXNet array interrupted in its __init__
    # complains when it is finalized
    assert "\nKeyboardInterrupt\n" in err and "in train" in err


# -- the threads themselves ---------------------------------------------------

@pytest.mark.parametrize("name", BACKENDS)
def test_two_ctrl_c_end_a_program_whose_devices_go_on(name):
    """The first one waits for their work, the second one does not; nor does
    the end of the program, however long that may take."""
    process = start(name, """
    import os
    from mgpu.backends import _workers

    class Call(_workers._Call):
        def wait(self):
            os.write(1, b"waits\\n")
            super().wait()
    _workers._Call, _workers.AT_EXIT = Call, 1e6
    for_ever = threading.Event()
    backend.parallel([for_ever.wait, for_ever.wait], rendezvous=True)
    """)
    try:
        for _ in range(2):
            assert process.stdout.readline() == "waits\n"
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT, err
    assert out == "" and "\nKeyboardInterrupt\n" in err


@pytest.mark.timeout(240)
@pytest.mark.device_counts(1, 3)
def test_work_in_a_signal_handler_is_done_or_refused(backend, devices):
    """It interrupts the thread that waits for the devices, and would wait
    for them in its turn."""
    X, y = np.ones((8, 6)), np.zeros(8, int)
    replicas = mgpu.initialize(mlp(backend), devices, "xavier",
                               dtype="float64")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    shards = shards_of(X, replicas)
    loss, found, handled = mgpu.losses.SoftmaxCrossEntropyLoss(), [], \
        threading.Event()

    def handler(*_):
        try:
            found.append(len(replicas(shards)))
        except RuntimeError as error:
            found.append(str(error))
        finally:
            handled.set()

    def signals(pred, label):
        if not handled.is_set():
            # not to any thread, which may come to it when the handler is gone
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            handled.wait(30)
        return loss(pred, label)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with contextlib.suppress(ValueError):   # it keeps `found`
            mgpu.train_batch(X, y, replicas, signals, trainer)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found[0] == len(devices) or "Set a flag in the handler" in found[0]
    mgpu.train_batch(X, y, replicas, loss, trainer)
    for first, *others in on_each(replicas).values():
        for other in others:
            assert_bit_equal(other, first)
