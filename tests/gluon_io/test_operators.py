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
    """Outputs, gradients and statistics, of every combination."""
    cases = [case for case in CASES.values() if case.op == op]
    with mgpu.using_backend("torch"):
        wrong = _wrong(cases, kept, lambda case: by_torch(case, tmp_path))
    assert not wrong, f"{len(wrong)} of {len(cases)}: " + "; ".join(wrong[:9])


def test_the_file_holds_the_grid(kept):
    assert kept.keys() == CASES.keys()


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="asks MXNet")
@pytest.mark.parametrize("op", OPERATORS)
def test_what_is_kept_is_mxnets(op, kept):
    """A sample of the grid, live."""
    cases = [case for case in CASES.values() if case.op == op]
    with mgpu.using_backend("mxnet"):
        assert not _wrong(cases[::max(len(cases) // 2, 1)], kept, by_mxnet)


@pytest.mark.parametrize("name", ["shape", "sum", "nan", "one element"])
def test_a_difference_is_seen(name, kept):
    case = next(x for x in CASES.values() if x.op == "Convolution")
    expected = kept[case.key]
    found = json.loads(json.dumps(expected))
    assert difference(found, expected) == 0
    if name == "shape":
        found[1][0][0] += 1
    elif name == "one element":     # of which the sums see a weighted part
        found[0][2] += 1e-9 * found[0][4]
    else:
        found[-1][2] = found[-1][2] * 2 if name == "sum" else float("nan")
    assert difference(found, expected) > case.tolerance
