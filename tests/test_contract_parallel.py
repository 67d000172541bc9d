"""`parallel` and work in threads as `mgpu.backends.base` says, on both
backends and both array families of MXNet."""
import contextvars
import os
import signal
import sys
import threading

import numpy as np
import pytest

import mgpu
from contract import flags, gradient, leaf, modes, recording
from helpers import on_torch


@pytest.fixture
def backend(engine):
    return engine


@pytest.fixture(params=[False, True], ids=["free", "rendezvous"])
def parallel(request, backend):
    return lambda thunks: backend.parallel(thunks, rendezvous=request.param)


def test_results_are_in_order(parallel, devices):
    assert parallel([lambda d=d: d for d in devices]) == devices
    assert parallel([]) == []


def test_the_first_exception_is_raised_after_all_have_run(parallel):
    ran = []

    def thunk(i):
        ran.append(i)
        if i in (1, 2):
            raise ValueError(i)
    with pytest.raises(ValueError) as raised:
        parallel([lambda i=i: thunk(i) for i in range(4)])
    assert raised.value.args == (1,)
    assert sorted(ran) == [0, 1, 2, 3]
    assert parallel([lambda: 1, lambda: 2]) == [1, 2]   # and still works


class Odd(BaseException):
    """Not an `Exception`, as KeyboardInterrupt is not."""


def test_nothing_is_swallowed(parallel):
    def stop():
        raise Odd
    with pytest.raises(Odd):
        parallel([lambda: 1, stop])
    assert parallel([lambda: 1, lambda: 2]) == [1, 2]


variable = contextvars.ContextVar("variable", default=None)


def test_the_callers_modes_are_carried(backend, parallel, devices):
    token = variable.set("mine")
    try:
        for recording, training in ((True, True), (False, True),
                                    (True, False), (False, False)):
            with backend.scope(recording, training):
                here = modes(backend)
                seen = parallel([
                    lambda: (variable.get(), mgpu.get_backend(),
                             flags(backend), modes(backend))
                    for _ in devices])
            assert seen == [("mine", backend, (recording, training), here)
                            ] * len(devices)
    finally:
        variable.reset(token)


def test_torch_autocast_and_inference_mode_are_carried(backend, parallel):
    if backend.name == "torch":
        import torch
        x = torch.ones(2, 2)
        with torch.autocast("cpu", torch.bfloat16):
            assert [y.dtype for y in parallel([lambda: x @ x] * 2)] \
                == [torch.bfloat16] * 2
        with torch.inference_mode():
            assert all(y.is_inference() for y in parallel([lambda: x + x] * 2))
        with torch.no_grad():
            assert parallel([torch.is_grad_enabled] * 2) == [False] * 2
    assert parallel([lambda: modes(backend)] * 2) == [modes(backend)] * 2


def test_a_thunk_leaves_no_mode_behind(backend, parallel):
    before = modes(backend)

    def thunk():
        with backend.scope(recording=True, training=True):
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        parallel([thunk, thunk])
    assert parallel([lambda: (flags(backend), modes(backend))] * 2) \
        == [((False, False), before)] * 2


def test_nested_parallel_runs_in_turn(backend, parallel):
    def inner(i):
        return backend.parallel([lambda j=j: 10 * i + j for j in range(3)])
    assert parallel([lambda i=i: inner(i) for i in range(2)]) \
        == [[0, 1, 2], [10, 11, 12]]


def test_no_rendezvous_inside_a_rendezvous(backend):
    """It would wait for ever."""
    def inner():
        return backend.parallel([lambda: 1, lambda: 2], rendezvous=True)
    with pytest.raises(RuntimeError) as refused:
        backend.parallel([inner, inner], rendezvous=True)
    assert str(refused.value) == (
        "functions that wait for each other cannot start inside a function of"
        " mgpu.parallel. Call the replicas together, outside of it.")


def test_backward_inside_parallel(backend, parallel, devices):
    xs = [leaf(backend, [1.0, 2.0], d) for d in devices]

    def step(x):
        with recording(backend):
            y = x * x
        backend.backward([y])
        return gradient(backend, x)
    assert parallel([lambda x=x: step(x) for x in xs]) \
        == [[2, 4]] * len(devices)


def test_callers_from_several_threads(backend):
    """Each gets its own results; thunks that wait for each other are not
    interleaved with those of another caller, which would wait for ever."""
    results, context = {}, contextvars.copy_context()

    def meet(meeting, n, i):
        meeting.wait()
        return n, i

    def call(n):
        results[n] = []
        for _ in range(50):
            meeting = threading.Barrier(3, timeout=60)
            results[n].append(backend.parallel(
                [lambda i=i: meet(meeting, n, i) for i in range(3)],
                rendezvous=True))
    threads = [threading.Thread(target=context.copy().run, args=(call, n))
               for n in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)     # as many interleavings as there can be
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert results == {n: [[(n, i) for i in range(3)]] * 50
                       for n in range(4)}


def test_ctrl_c_lets_the_threads_finish(backend):
    """KeyboardInterrupt arrives when no thunk works on behind one's back."""
    begun, go, finished = threading.Event(), threading.Event(), []

    def thunk():
        begun.set()
        go.wait(30)
        finished.append(1)

    def press():
        begun.wait(30)
        os.kill(os.getpid(), signal.SIGINT)
        go.set()
    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        backend.parallel([thunk, thunk], rendezvous=True)
    presser.join()
    assert finished == [1, 1]
    assert backend.parallel([int, int], rendezvous=True) == [0, 0]


class Preempted(Exception):
    """What a signal handler of the program raises."""


@pytest.mark.parametrize("count, number", [(1, signal.SIGTERM),
                                           (2, signal.SIGINT)])
def test_no_signal_cuts_work_in_the_hosts_memory_short(backend, count,
                                                       number):
    def handler(*_):
        raise Preempted

    def signalled():    # once: a second one may come when all is over
        # To the thread that handles it: another one, to which the system may
        # give it, may come to it when the handler is gone.
        signal.pthread_kill(threading.main_thread().ident, number)
        done.append(1)
    done, before = [], signal.signal(number, handler)
    try:
        with pytest.raises(Preempted):
            backend.run_on_host_views(
                [signalled, *[lambda: done.append(1)] * (count - 1)], [])
    finally:
        signal.signal(number, before)
    assert done == [1] * count


@on_torch
def test_backward_passes_of_networks_apart_run_at_the_same_time(backend):
    """Each waits for the other; losses with a common leaf have one pass."""
    barrier = threading.Barrier(2, timeout=30)

    def wait(gradient):
        barrier.wait()
    xs = [backend.put(np.ones(3), mgpu.cpu(i)) for i in range(2)]
    for x in xs:
        mgpu.attach_grad(x)
    with mgpu.record():
        losses = [x * 2 for x in xs]
    for loss in losses:
        loss.register_hook(wait)
    mgpu.backward(losses)
    assert [mgpu.grad(x).tolist() for x in xs] == [[2.0] * 3] * 2
    with mgpu.record():
        losses = [xs[0] * 2, xs[0] * 3]
    mgpu.backward(losses)
    assert mgpu.grad(xs[0]).tolist() == [5.0] * 3
