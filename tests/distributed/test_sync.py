"""``batch_norm="sync"`` over processes: what fails on one rank, and what only
one process knows."""
import json
import threading

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from distributed import jobs

PROGRAM = jobs.ROOT / "tests" / "distributed" / "sync_faults.py"


@pytest.fixture(scope="module", params=BACKENDS)
def found(request, tmp_path_factory):
    """What each rank says of `sync_faults`."""
    job = jobs.start(tmp_path_factory.mktemp("job"), 2, PROGRAM,
                     request.param)
    return [json.loads(line.removeprefix("FOUND "))
            for text in job.said(100)
            for line in text.splitlines() if line.startswith("FOUND ")]


@pytest.mark.parametrize("case, own", [
    ("error between layers", "a layer refuses its input"),
    ("error in the loss", "an error on one rank"),
    ("error in backward", "an error on one rank"),
    ("other loop", "a layer refuses its input"),
    ("no rows by hand", "at least one shard must hold rows")])
def test_others_hear_of_an_error(found, case, own):
    (kind, message), (own_kind, own_message) = (one[case] for one in found)
    if own_kind == "MXNetError":        # it prints what failed
        own = own_kind
    else:
        assert own_kind == "ValueError" and own in own_message
    assert kind == "WorkerFailed" and own in message and "rank 1" in message


@pytest.mark.parametrize("case", ["other order", "fewer layers"])
def test_other_layers_on_a_rank_are_refused_on_all(found, case):
    for one in found:
        kind, message = one[case]
        assert kind == "RuntimeError"
        assert "needs the same layers in the same order on every rank" \
            in message and "'1.second' (float64 (1, 4, 1, 1)) on rank" \
            in message


@pytest.mark.parametrize("case", ["one replica", "network itself"])
def test_own_calls_are_refused_with_one_device_on_a_rank(found, case):
    for one in found:
        kind, message = one[case]
        assert kind == "RuntimeError"
        assert "all replicas train together" in message


def test_nothing_has_changed_and_the_next_step_is_right(found):
    for one in found:
        assert one["equal"]
        # The forward pass of a loop by hand has moved statistics on torch.
        assert not [name for name, changed in one.items() if changed
                    if name.startswith("changed") and "other loop" not in
                    name]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_rank_that_ends_in_a_pass(name, tmp_path):
    job = jobs.start(tmp_path, 2, PROGRAM, name, "end")
    (status, text), (own, _) = job.wait(60)
    assert (status, own) == (1, 3)
    assert "on rank 0, rank 1 has ended" in text and "WorkerLost" in text


# -- through -----------------------------------------------------------------

@pytest.fixture(params=BACKENDS)
def backend(request):
    with mgpu.using_backend(request.param) as found:
        yield found


def leaf(backend, *numbers):
    x = backend.put(np.array(numbers), mgpu.cpu(0))
    backend.attach_grad(x)
    return x


def test_through_maps_values_and_gradients(backend):
    x = leaf(backend, 1.0, 2.0)
    with backend.scope(recording=True):
        y, _ = backend.through(x, lambda x: 3 * x, lambda dy: 5 * dy)
        z = y * y
    backend.backward([z])
    assert backend.to_numpy(y).tolist() == [3, 6]
    assert backend.to_numpy(backend.grad(x)).tolist() == [30, 60]


def test_through_without_recording_is_a_map(backend):
    x = leaf(backend, 1.0)
    with backend.scope(recording=False):
        y, _ = backend.through(x, lambda x: 3 * x, None)
    assert backend.to_numpy(y).tolist() == [3]


def test_gradients_come_back_in_one_order(backend):
    """Whatever threads have recorded the branches, one at a time."""
    order, inside = [], threading.Lock()

    def back(i, dy):
        assert inside.acquire(blocking=False)
        order.append(i)
        inside.release()
        return dy

    def recorded(shuffled):
        x = leaf(backend, 1.0)
        with backend.scope(recording=True):
            branches, after = [], None
            for i in range(6):
                y, after = backend.through(x * (i + 1), lambda x: x,
                                           lambda dy, i=i: back(i, dy), after)
                branches.append(y)
            branches = backend.parallel([
                lambda i=i: branches[i] * 2 for i in shuffled])
            loss = branches[shuffled.index(0)]
            for i in range(1, 6):
                loss = loss + branches[shuffled.index(i)]
        order.clear()
        backend.backward([loss])
        backend.to_numpy(backend.grad(x))
        return list(order)
    first = recorded(list(range(6)))
    assert sorted(first) == list(range(6))
    assert recorded([3, 0, 5, 1, 4, 2]) == first


def test_what_no_loss_depends_on_has_no_gradient(backend):
    x, z = leaf(backend, 1.0), leaf(backend, 1.0)
    met = []
    with backend.scope(recording=True):
        _, after = backend.through(x * 2, lambda x: x, met.append)
        y, _ = backend.through(z * 2, lambda z: z, lambda dy: dy, after)
    backend.backward([y])
    assert backend.to_numpy(backend.grad(z)).tolist() == [2]
    assert not backend.is_fresh(x) and met in ([], [None])
