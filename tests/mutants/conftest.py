"""Runs all collected mutants once, and counts those that were killed."""
import json
import os
import subprocess
from pathlib import Path

import pytest

import forked
from conftest import ALL_BACKENDS, BACKENDS

TESTS = Path(__file__).resolve().parents[1]

#: they plant faults in both backends
collect_ignore = [] if set(ALL_BACKENDS) <= set(BACKENDS) \
    else ["test_mutants.py"]

#: seconds for all of them, a good multiple of what they take: only a mutant
#: that hangs gets there
_LIMIT = 600


def _judged(out, names, *options):
    """(verdict, reason) by name, from a process of its own."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (
        str(TESTS), str(TESTS.parent), environment.get("PYTHONPATH"))))
    # A pytest of its own, with options of its own.
    environment.pop("PYTEST_ADDOPTS", None)
    out.touch()
    try:
        run = subprocess.run(
            [forked.python(), "-m", "mutants.runner", str(out), *options,
             *names], cwd=TESTS, env=environment, timeout=_LIMIT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        end = f"exit status {run.returncode}: {run.stdout[-3000:]}"
    except subprocess.TimeoutExpired:
        end = f"no end after {_LIMIT} s; the first one without a verdict hangs"
    found = {name: ("no verdict", end) for name in names}
    for line in out.read_text().splitlines():
        name, verdict, why = json.loads(line)
        found[name] = verdict, why
    return found


@pytest.fixture(scope="session")
def verdicts(request, tmp_path_factory):
    """(verdict, reason) of each mutant that was collected: by its killer,
    else by any test."""
    names = [item.callspec.params["mutant"].name
             for item in request.session.items
             if "mutant" in getattr(item, "fixturenames", ())]
    folder = tmp_path_factory.mktemp("mutants")
    found = _judged(folder / "killers", names)
    alive = [name for name, (verdict, _) in found.items()
             if verdict not in ("killed", "not planted")
             and not name.startswith("control: ")]
    if alive:
        found |= _judged(folder / "any", alive, "--any")
    return found


@pytest.fixture
def verdict(verdicts, mutant):
    """That of one mutant."""
    return verdicts[mutant.name]
