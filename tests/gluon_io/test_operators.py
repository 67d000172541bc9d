"""Each operator against real MXNet, over a grid of attributes and shapes."""
import json

import pytest

import mgpu
from conftest import BACKENDS
from gluon_io.cases import CASES
from gluon_io.grid import FILE, by_mxnet, by_torch, difference

if "torch" not in BACKENDS:
    pytest.skip("operators become torch's", allow_module_level=True)

OPERATORS = sorted({case.op for case in CASES.values()})


def _wrong(cases, expected, found):
    """What is off, a line each."""
    lines = []
    for case in cases:
        off = difference(found(case), expected[case.key])
        if not off <= case.tolerance:
            lines.append(f"{case.key}: {off:.1e}")
    return lines


@pytest.fixture(scope="module")
def kept():
    return json.loads(FILE.read_text())


@pytest.mark.parametrize("op", OPERATORS)
def test_an_operator_computes_as_mxnets(op, kept, tmp_path):
    """Outputs, gradients and statistics, of every combination, as MXNet
    computed them once; a sample of these as MXNet computes them here."""
    cases = [case for case in CASES.values() if case.op == op]
    with mgpu.using_backend("torch"):
        wrong = _wrong(cases, kept, lambda case: by_torch(case, tmp_path))
    assert not wrong, f"{len(wrong)} of {len(cases)}: " + "; ".join(wrong[:9])
    if "mxnet" in BACKENDS:
        with mgpu.using_backend("mxnet"):
            wrong = _wrong(cases[::max(len(cases) // 2, 1)], kept, by_mxnet)
        assert not wrong, f"the file is not MXNet's: {wrong}"


def test_the_file_holds_the_grid(kept):
    assert kept.keys() == CASES.keys()


def test_a_difference_is_seen(kept):
    case = next(x for x in CASES.values() if x.op == "Convolution")
    expected = kept[case.key]
    assert difference(expected, expected) == 0

    def changed(at, number, value):
        found = json.loads(json.dumps(expected))
        found[at][number] = value
        return difference(found, expected)
    shape, sum_, largest = expected[0][0], expected[-1][2], expected[0][4]
    for off in (changed(0, 0, [shape[0] + 1, *shape[1:]]),
                changed(-1, 2, sum_ * 2), changed(-1, 2, float("nan")),
                # one element, of which the sums have a weighted part
                changed(0, 2, expected[0][2] + 1e-9 * largest)):
        assert off > case.tolerance
