"""Runs mutants: ``python -m mutants.runner OUT [--any] NAME...`` in tests/.

One process for all of them, apart from that of the other tests: a mutant may
leave a backend in any state, or hang. A mutant's killer runs with it until a
case fails, and that case once more without it. With ``--any`` the fast tests
of the killer's file follow, then all fast tests. Verdicts are added to the
file OUT, a JSON line each.
"""
import dis
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from mutants.controls import CONTROLS
from mutants.planting import Mutant, NotPlanted, all_mutants

TESTS = Path(__file__).resolve().parents[1]

#: seconds after which no further test is tried with a mutant
_LIMIT = 120

#: these start processes, which no mutant reaches
_APART = ("mutants", "distributed", "faults", "studies", "ports")


def _rejects(error: Any) -> bool:
    """Whether a test failed because it noticed: by an assertion, or since
    mgpu itself raised. A `NameError` in the mutant is no achievement."""
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

    def __init__(self, mutants: list[Mutant], out: str, any_test: bool):
        self._mutants, self._out, self._any = mutants, out, any_test
        self._errors: list[Any] = []

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is not None and not call.excinfo.errisinstance(
                pytest.skip.Exception):
            self._errors.append(call.excinfo)

    def pytest_runtestloop(self, session: Any) -> bool:
        for one in self._mutants:
            verdict = self._judge(one, self._tests(one, session.items))
            with open(self._out, "a") as file:
                print(json.dumps([one.name, *verdict]), file=file)
        return True

    def _failures(self, item: Any) -> list[Any]:
        self._errors = []
        runtestprotocol(item, log=False, nextitem=None)
        return self._errors

    def _tests(self, one: Mutant, items: list[Any]) -> list[Any]:
        names = [f"{item.path.relative_to(TESTS).as_posix()}::"
                 f"{item.nodeid.partition('::')[2]}" for item in items]
        file = one.killer.partition("::")[0]
        chosen = [item for name, item in zip(names, items)
                  if one.killer in (name, name.partition("[")[0])]
        # a case that has a word of the mutant's name comes first
        words = set(one.name.split("-"))
        chosen.sort(key=lambda item: words.isdisjoint(
            item.name.partition("[")[2].strip("]").split("-")))
        if self._any:
            fast = [(name, item) for name, item in zip(names, items)
                    if item.get_closest_marker("fast")]
            fast.sort(key=lambda pair: not pair[0].startswith(file))
            chosen += [item for _, item in fast]
        return chosen

    def _judge(self, one: Mutant, items: list[Any]) -> tuple[str, str]:
        if not items:
            return "no such test", one.killer
        crash, began = "", time.monotonic()
        for number, item in enumerate(items):
            try:
                with one.planted():
                    errors = self._failures(item)
            except NotPlanted as error:
                return "not planted", str(error)
            if any(map(_rejects, errors)):
                # It says nothing if it fails without the mutant too.
                if not self._failures(item):
                    return "killed", item.nodeid
            elif errors:
                crash = crash or f"{item.nodeid}: {errors[0].exconly()}"
            if time.monotonic() - began > _LIMIT:
                return "survived", f"{number + 1} of {len(items)} tests"
        return ("crashed", crash) if crash else (
            "survived", f"{len(items)} tests pass")


def main(out: str, *words: str) -> int:
    any_test = "--any" in words
    every = [*all_mutants(), *(m for ms in CONTROLS.values() for m in ms)]
    mutants = [one for one in every if one.name in words]
    files = sorted({one.killer.partition("::")[0] for one in mutants})
    files = ["."] if any_test else [
        name for name in files if (TESTS / name).is_file()]
    # No timeout: its clock starts in a hook that is passed over here. The
    # caller has one for all.
    return pytest.main(
        ["--tb=line", "-p", "no:cacheprovider", "-o", "addopts=",
         *(f"--ignore={name}" for name in _APART), *files],
        plugins=[Judge(mutants, out, any_test)])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
