"""One process and several processes with as many devices in all train the
same."""
import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from distributed import equality, jobs
from helpers import on

PROGRAM = jobs.ROOT / "tests" / "distributed" / "equality.py"
#: devices of each rank; four in all, of which the last has no row of the
#: last batch
COUNTS = {"torch": "1,2,1", "mxnet": "2,2"}


def run_alone(backend, dtype="float64", only=()):
    """What one process finds in each scenario."""
    with mgpu.using_backend(backend):
        return {name: {key: np.array(x) for key, x in found.items()}
                for name, found in equality.found_by(
                    on(0, 1, 2, 3), dtype, only)}


def read(folder, size, scenarios):
    """What each rank has found in each scenario."""
    return {name: [dict(np.load(folder / f"{name}-{rank}.npz"))
                   for rank in range(size)] for name in scenarios}


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


@pytest.mark.parametrize("name", BACKENDS)
def test_processes_change_nothing(name, tmp_path):
    counts = COUNTS[name]
    size = counts.count(",") + 1
    job = jobs.start(tmp_path, size, PROGRAM, name, counts, tmp_path)
    expected = run_alone(name)
    job.said(600)
    assert expected.keys() == equality.SCENARIOS.keys() - {
        scenario for scenario, function in equality.SCENARIOS.items()
        if name not in getattr(function, "on", BACKENDS)}
    for scenario, runs in read(tmp_path, size, expected).items():
        for found in runs:
            # of the largest number: sums in another order round differently
            assert difference(expected[scenario], found) <= 1e-12, scenario
            # All ranks hold the same bits.
            for key, x in found.items():
                assert x.tobytes() == runs[0][key].tobytes(), (scenario, key)


#: sums of gradients, of statistics, in the middle of passes, of batches
SUMS = ("per_device", "average", "sync_in_branches", "added_up")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The folder of a job of MXNet's parameter server, which adds up in
    float32."""
    if "mxnet" not in BACKENDS:
        pytest.skip("about MXNet's KVStore")
    folder = tmp_path_factory.mktemp("server")
    jobs.start(folder, 2, PROGRAM, "mxnet", "2,2", folder, "float32",
               *SUMS, MGPU_COMM="kvstore").said(600)
    return folder


def test_a_parameter_server_changes_nothing(server):
    """To the rounding of float32."""
    expected = run_alone("mxnet", "float32", SUMS)
    for scenario, runs in read(server, 2, expected).items():
        for found in runs:
            assert difference(expected[scenario], found) <= 2e-6, scenario


def test_what_a_parameter_server_would_round_does_not_go_through_it(server):
    one = run_alone("mxnet", only=["per_device"])["per_device"]
    for other in read(server, 2, ["float64"])["float64"]:
        assert difference(one, other) <= 1e-12


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
