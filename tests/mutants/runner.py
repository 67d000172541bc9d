"""Judges mutants: ``python -m mutants.runner OUT NAME...`` in tests/.

One process for all of them, apart from that of the other tests: a mutant may
leave an engine in any state, or hang. It collects the test files once. It
runs the tests that a mutant names, with it, until one fails, and that one
again without it. That the others pass without it is for the ordinary run to
say. Verdicts are added to the file OUT, a JSON line each.
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
        for mutant in self._mutants:
            self._write(mutant, *self._judge(mutant, [
                self._find(session.items, test) for test in mutant.tests]))
        return True

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

    def _judge(self, mutant: Mutant, wanted: list[list[Any]]
               ) -> tuple[str, str]:
        for test, items in zip(mutant.tests, wanted, strict=True):
            if not items:
                return "no such test", test
        crash = ""
        for item in sum(wanted, []):
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(mutant.plant())
                except Exception as error:
                    return "not planted", f"{type(error).__name__}: {error}"
                errors = self._failures(item)
            if any(map(_rejects, errors)):
                # It says nothing if it fails without the mutant too, or
                # with what this one or an earlier one has left behind.
                errors = self._failures(item)
                return ("fails without", f"{item.nodeid}: "
                        f"{errors[0].exconly()}") if errors \
                    else ("killed", item.nodeid)
            if errors:
                crash = crash or f"{item.nodeid}: {errors[0].exconly()}"
        return ("crashed", crash) if crash else (
            "survived", f"{sum(map(len, wanted))} tests pass")


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
