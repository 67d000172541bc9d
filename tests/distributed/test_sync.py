"""`Backend.through`, by which ``batch_norm="sync"`` sums over processes."""
import threading

import numpy as np

import mgpu


def leaf(backend, *numbers):
    x = backend.put(np.array(numbers), mgpu.cpu(0))
    backend.attach_grad(x)
    return x


def test_through_maps_values_and_gradients(backend):
    """z = y y with y = 3 x: the gradient 2 y is mapped by 5, and reaches x as
    10 y."""
    x = leaf(backend, 1.0, 2.0)
    with backend.scope(recording=False):
        y, _ = backend.through(x, lambda x: 3 * x, None)
    assert backend.to_numpy(y).tolist() == [3, 6]
    with backend.scope(recording=True):
        y, _ = backend.through(x, lambda x: 3 * x, lambda dy: 5 * dy)
        z = y * y
    backend.backward([z])
    assert backend.to_numpy(y).tolist() == [3, 6]
    assert backend.to_numpy(backend.grad(x)).tolist() == [30, 60]


def test_gradients_come_back_in_one_order(backend):
    """The gradient functions run one at a time, in the same order for branches
    whose later operations other threads recorded in another order."""
    order, inside = [], threading.Lock()

    def back(i, dy):
        assert inside.acquire(blocking=False), "two at a time"
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


def test_a_branch_without_loss_has_no_gradient(backend):
    """Only `after` joins the branch to the loss; its gradient function gets
    None or is not called."""
    x, z = leaf(backend, 1.0), leaf(backend, 1.0)
    received = []
    with backend.scope(recording=True):
        _, after = backend.through(x * 2, lambda x: x,
                                   received.append)
        y, _ = backend.through(z * 2, lambda z: z, lambda dy: dy, after)
    backend.backward([y])
    assert backend.to_numpy(backend.grad(z)).tolist() == [2]
    assert not backend.is_fresh(x) and received in ([], [None])
