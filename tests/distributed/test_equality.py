"""One process and several processes with as many devices in all train the
same."""
import subprocess
import sys

import numpy as np
import pytest

from conftest import BACKENDS
from distributed import equality, jobs

PROGRAM = jobs.ROOT / "tests" / "distributed" / "equality.py"
#: devices of each rank; four in all, of which the last has no row of the
#: last batch
COUNTS = ("2,2", "1,2,1")


def run_alone(backend, folder, dtype):
    subprocess.run([sys.executable, PROGRAM, backend, "4", folder, dtype],
                   check=True, cwd=folder, timeout=200, env={
                       k: v for k, v in jobs.environment(0, 1, 0).items()
                       if k != "RANK"})


@pytest.fixture(scope="module", params=BACKENDS)
def alone(request, tmp_path_factory):
    """The folder of the run in one process, and the backend."""
    folder = tmp_path_factory.mktemp("alone")
    run_alone(request.param, folder, "float64")
    return request.param, folder


@pytest.fixture(scope="module", params=COUNTS)
def together(request, alone, tmp_path_factory):
    """The folder of the run in several processes, and their number."""
    folder, size = tmp_path_factory.mktemp("job"), request.param.count(",") + 1
    jobs.start(folder, size, PROGRAM, alone[0], request.param,
               folder).said(200)
    return folder, size


def difference(one, other):
    """The largest difference of two runs, relative to the largest number that
    stands beside it: values of the network together, all else by itself."""
    assert one.keys() == other.keys()
    groups = {}
    for name in one:
        groups.setdefault(name.split()[0], []).append(name)
    worst = 0.0
    for names in groups.values():
        assert all(one[n].shape == other[n].shape for n in names)
        largest = max(np.abs(one[n]).max(initial=0) for n in names)
        apart = max(np.abs(one[n] - other[n]).max(initial=0) for n in names)
        worst = max(worst, apart / largest if apart else 0.0)
    return worst


@pytest.mark.parametrize("name", equality.SCENARIOS)
def test_processes_change_nothing(alone, together, name):
    (backend, expected), (folder, size) = alone, together
    function = equality.SCENARIOS[name]
    one = dict(np.load(expected / f"{name}-0.npz"))
    assert bool(one) == (backend in getattr(function, "on", BACKENDS))
    runs = [dict(np.load(folder / f"{name}-{rank}.npz"))
            for rank in range(size)]
    for other in runs:
        # of the largest number: sums in another order round differently
        assert difference(one, other) <= 1e-12
        # All ranks hold the same bits.
        for key, x in other.items():
            assert x.tobytes() == runs[0][key].tobytes(), key


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="about MXNet's KVStore")
def test_a_parameter_server_changes_nothing(tmp_path_factory):
    """To the rounding of float32, which it adds in."""
    expected, folder = (tmp_path_factory.mktemp(x) for x in ("alone", "job"))
    run_alone("mxnet", expected, "float32")
    jobs.start(folder, 2, PROGRAM, "mxnet", "2,2", folder, "float32",
               MGPU_ENGINE="kvstore").said(200)
    for name in equality.SCENARIOS:
        one = dict(np.load(expected / f"{name}-0.npz"))
        for rank in range(2):
            other = dict(np.load(folder / f"{name}-{rank}.npz"))
            assert difference(one, other) <= 2e-6, name


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="about MXNet's KVStore")
def test_a_parameter_server_refuses_what_it_would_round(tmp_path):
    job = jobs.start(tmp_path, 2, PROGRAM, "mxnet", "1,1", tmp_path,
                     MGPU_ENGINE="kvstore")
    for status, text in job.wait(60):
        assert status == 1
        assert "ValueError: the engine 'kvstore' adds up in float32; " \
            "received 0.weight of float64 and 9 others. Use " \
            "engine='torch'" in text


@pytest.mark.parametrize("changed", ["value a", "loss"])
def test_a_difference_is_seen(changed):
    one = {"value a": np.ones(2), "value b": np.full(3, 1e6),
           "loss": np.ones(1)}
    other = {k: x.copy() for k, x in one.items()}
    assert difference(one, other) == 0
    other[changed][0] += 1e-3
    assert difference(one, other) > 1e-12
    with pytest.raises(AssertionError):
        difference(one, {"value a": one["value a"]})
