"""`mgpu.testing.assert_parity` and its pytest plugin."""
import os
import subprocess
import sys

import pytest

import mgpu
from conftest import BACKENDS
from mgpu import testing
from mgpu.parity import report
from nets import gluon, torch
from parity.batches import vectors
from test_report import Page

pytest_plugins = ["pytester"]

SUITE = '''
import numpy as np
import pytest
import mgpu
from mgpu.testing import assert_parity
from nets import dense_norm

def make(epsilon=1e-5):
    return dense_norm("ENGINE", epsilon)

def batches():
    rng = np.random.default_rng(0)
    return [(rng.random((6, 5)), rng.integers(0, 3, 6).astype("int32"))]

def test_same():
    assert assert_parity(make, make, batches=batches()).same

@pytest.mark.parametrize("where", ["a/b"])
def test_port(where):
    assert_parity(make, lambda: make(1e-3), batches=batches())

@pytest.mark.xfail(strict=True)
def test_known():
    assert_parity(make, lambda: make(1e-3), batches=batches())

def test_another_failure():
    assert 1 == 2
'''


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(test_suite=SUITE.replace("ENGINE", BACKENDS[0]))
    return lambda *options: pytester.runpytest_inprocess(
        "-p", "pytest_mgpu", "-p", "no:cacheprovider", *options)


def test_failures_are_listed_and_get_a_page(suite, pytester):
    result = suite("--parity-report", "pages")
    result.assert_outcomes(passed=1, failed=2, xfailed=1)
    page, = os.listdir(pytester.path / "pages")
    result.stdout.fnmatch_lines([
        "*ParityError: different (lockstep*", "*first difference: *",
        "*= comparisons that failed =*",
        "test_suite.py::test_port?a/b?", "  step 1, *",
        f"  report: pages/{page}"])
    text = (pytester.path / "pages" / page).read_text(encoding="utf-8")
    assert "First difference" in text
    assert "pytest &#39;test_suite.py::test_port[a/b]&#39;" in text
    # the line of the test, none of mgpu's
    assert "testing.py:" not in result.stdout.str()


def test_without_a_page_no_failure_is_hidden(suite, pytester):
    """Without the option, or where a page cannot be written."""
    result = suite()
    result.assert_outcomes(passed=1, failed=2, xfailed=1)
    result.stdout.fnmatch_lines([
        "*comparisons that failed*",
        "--parity-report DIR writes a page for each."])
    with pytest.MonkeyPatch.context() as patch:
        def full(*arguments, **options):
            raise OSError("no space left")
        patch.setattr(report, "write_html", full)
        result = suite("--parity-report", "pages")
    result.assert_outcomes(passed=1, failed=2, xfailed=1)
    result.stdout.fnmatch_lines(["  no report: OSError: no space left"])
    assert not list(pytester.path.glob("**/*.html"))


def test_a_suite_without_comparisons_sees_nothing(pytester):
    pytester.makepyfile("def test_it(): assert 1 == 2")
    result = pytester.runpytest_inprocess("-p", "pytest_mgpu")
    assert "comparisons that failed" not in result.stdout.str()


REFUSED = SUITE[:SUITE.index("def test_same")] + '''
def wide():
    return dense_norm("ENGINE", units=7)

def noisy():
    from torch import nn
    class Noisy(nn.Linear):
        def forward(self, x):
            import torch
            return super().forward(x) + torch.randn(len(x), 4).to(x)
    return Noisy(5, 4)

def broken():
    raise RuntimeError("no weights <here>")

def test_match():
    assert_parity(make, wide, batches=batches(), devices=2)

def test_draws():
    assert_parity(noisy, mgpu.parity.Side(noisy, devices=2),
                  batches=batches())

def test_option():
    assert_parity(make, make, batches=batches(), weights="c")

def test_broken():
    assert_parity(make, broken, batches=batches())

def test_no_comparison():
    assert_parity(make, make, batches=batches(), stpes=3)

def test_expected():
    with pytest.raises(ValueError):
        assert_parity(make, wide, batches=batches())
'''


@pytest.mark.skipif("torch" not in BACKENDS, reason="noise is drawn on torch")
def test_a_refusal_has_a_page_too(pytester):
    pytester.makepyfile(test_suite=REFUSED.replace("ENGINE", BACKENDS[0]))
    result = pytester.runpytest_inprocess(
        "-p", "pytest_mgpu", "-p", "no:cacheprovider", "--parity-report",
        "pages")
    result.assert_outcomes(passed=1, failed=5)
    pages = {page.name.partition("-test_")[2]: Page(page.read_text("utf-8"))
             for page in (pytester.path / "pages").iterdir()}
    assert sorted(pages) == [f"{name}.html" for name in (
        "broken", "draws", "match", "option")]
    for name, words in {
            "match": ["every parameter of one network needs its partner",
                      "Add entries to map=",
                      "left in b: 0.weight", f"({BACKENDS[0]} ",
                      "devices 2"],
            "draws": ["both sides must draw the same random numbers",
                      "Use dropout layers", "Noisy (torch ", "devices - 2"],
            "option": ["unknown weights"],
            "broken": ["RuntimeError: no weights <here>", "against broken, "
                       "lock-step", "give the first batch"]}.items():
        text = pages[f"{name}.html"].text
        assert text.index("Not compared") < text.index(words[0])
        for part in [*words, f"pytest 'test_suite.py::test_{name}'"]:
            assert part in text, (name, part, text)
    result.stdout.fnmatch_lines([
        "*= comparisons that failed =*", "test_suite.py::test_match",
        "  not compared (lockstep): every parameter of one network needs *",
        "  report: pages/*test_match.html"])
    assert "test_no_comparison\n  not" not in result.stdout.str()


def test_an_extra_that_is_missing_is_said_at_the_start(suite):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "jinja2", None)
        result = suite("--parity-report", "pages")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--parity-report*pip install jinja2*"])


def test_the_plugin_loads_nothing():
    """pytest imports it at every start."""
    code = ("import sys, pytest, pytest_mgpu; print(sorted({m.split('.')[0] "
            "for m in sys.modules} & {'mgpu', 'numpy', 'torch', 'mxnet', "
            "'jinja2', 'matplotlib', 'rich'}))")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        timeout=120, env={**os.environ, "PYTHONPATH": os.path.dirname(
            os.path.dirname(mgpu.__file__))})
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_what_cannot_be_compared_is_no_failed_assertion():
    with pytest.raises(TypeError, match="unexpected .* 'input_shape'"):
        testing.assert_parity(None, None, batches=[], input_shape=(20,))
    with pytest.raises(ValueError, match="unknown weights"):
        testing.assert_parity(None, None, batches=[], weights="c")


def test_mxnets_float32_may_be_allowed():
    original = gluon(lambda nn: [nn.Dense(3, in_units=5), nn.LeakyReLU(0.1)])
    ported, other = (
        torch(lambda nn, slope=slope: [nn.Linear(5, 3), nn.LeakyReLU(slope)])
        for slope in (0.1, 0.2))
    options = {"batches": vectors(5)}
    with pytest.raises(testing.ParityError, match="^same but for MXNet's "
                       "float32"):
        testing.assert_parity(original, ported, **options)
    options["allow_mxnet_float32"] = True
    testing.assert_parity(original, ported, **options)
    with pytest.raises(testing.ParityError, match="^different"):
        testing.assert_parity(original, other, **options)
