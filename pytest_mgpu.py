"""pytest plugin: report a failed or invalid `mgpu.testing.assert_parity`.

A module outside the package, and without imports of it: pytest loads it at
every start, also for suites that compare nothing.
"""
import os
import re

import pytest

_KEY = "mgpu parity"


def pytest_addoption(parser):
    parser.getgroup("mgpu").addoption(
        "--parity-report", metavar="DIR", help="write an HTML page for each "
        "assert_parity that fails or raises (needs jinja2 and matplotlib)")


def pytest_configure(config):
    folder = config.getoption("--parity-report")
    if folder is None:
        return
    from mgpu.parity.report import check_packages
    try:
        check_packages()
        os.makedirs(folder, exist_ok=True)
    except (ImportError, OSError) as error:
        raise pytest.UsageError(f"--parity-report: {error}") from error


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    result = getattr(call.excinfo and call.excinfo.value, "parity_result",
                     None)
    if report.failed and result is not None:    # not an expected failure
        words = str(result.first) if result.first is not None \
            else f"{result.verdict} (lockstep)"
        if result.verdict == "not compared":
            words += ": " + result.reason.splitlines()[0]
        page = _write(result, item)
        # user_properties travel from pytest-xdist's workers, and to JUnit
        report.user_properties.append((_KEY, words + page))


def _write(result, item):
    folder = item.config.getoption("--parity-report")
    if folder is None:
        return ""
    from mgpu.parity.report import write_html
    name = re.sub(r"[^\w.-]+", "-", item.nodeid).strip("-")[-120:]
    file = os.path.join(folder, f"{name}.html")
    try:
        write_html(result, file, command=f"pytest {item.nodeid!r}")
    except Exception as error:      # the test's own failure matters more
        return f"\n  no report: {type(error).__name__}: {error}"
    return f"\n  report: {file}"


def pytest_terminal_summary(terminalreporter):
    rows = [(report.nodeid, words)
            for report in terminalreporter.stats.get("failed", [])
            for key, words in getattr(report, "user_properties", ())
            if key == _KEY]
    if rows:
        terminalreporter.section("comparisons that failed")
    for nodeid, words in rows:
        terminalreporter.write_line(f"{nodeid}\n  {words}")
    if rows and terminalreporter.config.getoption("--parity-report") is None:
        terminalreporter.write_line(
            "--parity-report DIR writes a page for each.")
