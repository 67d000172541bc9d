"""Judges mutants: ``python -m mutants.runner OUT NAME...`` in tests/.

One process for all of them, apart from that of the other tests: a mutant may
leave an engine in any state, or hang. It collects the test files once, runs
the tests that are named without any mutant, again with each mutant until one
fails, and all of them once more. Verdicts are added to the file OUT, a JSON
line each; the last one of a mutant counts.
"""
import contextlib
import dis
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from mutants.controls import CONTROLS
from mutants.planting import Mutant, all_mutants

TESTS = Path(__file__).resolve().parents[1]


def _rejects(error: Any) -> bool:
    """Whether a test failed because it noticed: by an assertion, or since
    mgpu itself refused. A `NameError` in the mutant is no achievement."""
    if isinstance(error.value, (AssertionError, pytest.fail.Exception)) or \
            type(error.value).__module__.partition(".")[0] == "mgpu":
        return True
    # mgpu raises built-in types as well: by a raise statement of its own.
    last = error.tb
    while last.tb_next is not None:
        last = last.tb_next
    frame = last.tb_frame
    return frame.f_globals["__name__"].partition(".")[0] == "mgpu" and \
        dis.opname[frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


class Judge:
    """A pytest plugin that runs the tests in its own order."""

    def __init__(self, mutants: list[Mutant], out: str):
        self._mutants, self._out = mutants, out
        self._errors: list[Any] = []

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is not None:
            self._errors.append(call.excinfo)

    def _failures(self, item: Any) -> list[Any]:
        self._errors = []
        runtestprotocol(item, log=False, nextitem=None)
        return self._errors

    def pytest_runtestloop(self, session: Any) -> bool:
        wanted = {test: self._find(session.items, test)
                  for mutant in self._mutants for test in mutant.tests}
        items = list(dict.fromkeys(
            item for found in wanted.values() for item in found))
        baseline = self._broken(items)
        for mutant in self._mutants:
            self._write(mutant, *self._judge(mutant, wanted, baseline))
        # A mutant may have left something behind that fails other tests.
        after = self._broken(items)
        for mutant in self._mutants:
            for item in (i for test in mutant.tests for i in wanted[test]):
                if item in after and item not in baseline:
                    self._write(mutant, "fails afterwards", after[item])
        return True

    def _broken(self, items: list[Any]) -> dict[Any, str]:
        """Those that fail, and why."""
        errors = {item: self._failures(item) for item in items}
        return {item: f"{item.nodeid}: {found[0].exconly()}"
                for item, found in errors.items() if found}

    def _write(self, mutant: Mutant, verdict: str, why: str) -> None:
        with open(self._out, "a") as file:
            print(json.dumps([mutant.name, verdict, why]), file=file)

    @staticmethod
    def _find(items: list[Any], test: str) -> list[Any]:
        def fits(item: Any) -> bool:
            name = (f"{item.path.relative_to(TESTS).as_posix()}::"
                    f"{item.nodeid.partition('::')[2]}")
            if test.endswith("*"):
                return name.startswith(test[:-1])
            return name == test or name.partition("[")[0] == test
        return list(filter(fits, items))

    def _judge(self, mutant: Mutant, wanted: dict[str, list[Any]],
               baseline: dict[Any, str]) -> tuple[str, str]:
        for test in mutant.tests:
            if not wanted[test]:
                return "no such test", test
        items = [item for test in mutant.tests for item in wanted[test]]
        for item in items:
            if item in baseline:
                return "fails without", baseline[item]
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(mutant.plant())
            except Exception as error:
                return "not planted", f"{type(error).__name__}: {error}"
            crash = ""
            for item in items:
                errors = self._failures(item)
                if any(map(_rejects, errors)):
                    return "killed", item.nodeid
                if errors:
                    crash = crash or (f"{item.nodeid}: "
                                      f"{errors[0].exconly()}")
        return ("crashed", crash) if crash else (
            "survived", f"{len(items)} tests pass")


def main(out: str, *names: str) -> int:
    every = [*all_mutants(), *(m for ms in CONTROLS.values() for m in ms)]
    mutants = [m for m in every if m.name in names]
    files = sorted({test.partition("::")[0]
                    for mutant in mutants for test in mutant.tests})
    files = [str(TESTS / name) for name in files if (TESTS / name).is_file()]
    # No timeout: its clock starts in a hook that is passed over here. The
    # caller has one for all.
    return pytest.main(["--tb=line", "-p", "no:cacheprovider",
                        "-o", "addopts=-m 'not gpu'", *files],
                       plugins=[Judge(mutants, out)])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
