"""What `mgpu doctor` finds out: is this machine fit, and if not, why."""
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mgpu import backends
from mgpu.backends import Backend
from mgpu.utils import environment, files
from mgpu.utils.environment import cpu_cores

Findings = list[tuple[str, str]]        # (level, text)

#: meanings of the environment variables, by name
VARIABLES = {v.name: v.meaning for v in environment.VARIABLES}


def versions(engines: Iterable[str | Backend] = ()) -> dict[str, str]:
    """Versions by name: python, numpy, mgpu, and those of `backends`, given as
    Backend objects or as names of backends, which are loaded."""
    import mgpu
    found = {"python": platform.python_version(), "numpy": np.__version__,
             "mgpu": mgpu.__version__}
    for engine in engines:
        with backends.using_backend(
                engine if isinstance(engine, str) else engine.name) as loaded:
            found[loaded.name] = loaded.version
    return found


def diagnose() -> dict[str, Any]:
    """Examine this process and this machine. Loads every backend that loads.

    Returns
    -------
    dict
        Fit for JSON.

        - ``"versions"``: by name. For a framework that does not load, the
          version of its package, or None where it is not installed.
        - ``"backends"``: a list of ``{"name", "loads", "version", "gpus",
          "problem", "cure"}``. ``version`` and ``gpus`` are None where the
          backend does not load, ``problem`` and ``cure`` where it does.
        - ``"default"``: the backend of a script that chooses none.
        - ``"cpu_cores"``, ``"threads_per_device"``: int.
        - ``"variables"``: the ``MGPU_*`` variables that are set, with their
          values and meanings.
        - ``"findings"``: a list of ``{"level", "text"}``, where the level is
          "info", "warning" or "error".
    """
    findings: Findings = []
    engines, rows = [], []
    known: dict[str, str | None] = {**versions()}
    # What cannot be installed on this Python comes last.
    for name, entry in sorted(backends.ENTRIES.items(),
                              key=lambda item: not item[1].has_wheels()):
        row: dict[str, Any] = {
            "name": name, "loads": False, "version": None, "gpus": None,
            "problem": None, "cure": None}
        rows.append(row)
        try:
            with backends.using_backend(name) as engine:
                row.update(loads=True, version=engine.version,
                           gpus=engine.num_gpus())
                engines.append(engine)
                findings += engine.doctor()
        except Exception as error:  # any: the report is about it
            row.update(problem=_line(error.__cause__ or error), cure=_cure(
                entry, error))
            known[name] = _installed(entry.framework)
    known.update(versions(engines))
    threads, problems = _variables()
    default, no_default = _default(rows)
    return {
        "versions": known, "backends": rows, "default": default,
        "cpu_cores": cpu_cores(), "threads_per_device": threads,
        "variables": {name: {"value": os.environ[name],
                             "meaning": VARIABLES[name]}
                      for name in sorted(VARIABLES) if name in os.environ},
        "findings": [{"level": level, "text": text} for level, text in
                     problems + no_default + _threads(threads) + findings]}


def _line(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ImportError) \
        else f"{type(error).__name__}: {text}"


def _cure(entry: backends.Entry, error: Exception) -> str:
    if not isinstance(error, backends.BackendNotAvailable):
        return "correct that setting"
    return entry.cure() + (f"; for CPUs only: {entry.cpu_only}"
                           if entry.cpu_only else "")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _variables() -> tuple[int, Findings]:
    """The threads of a device, and what is wrong with ``MGPU_*``."""
    found: Findings = []
    for variable in environment.VARIABLES:
        try:
            variable.read()
        except ValueError as error:
            found.append(("error", str(error)))
    former = {v.former: v.name for v in environment.VARIABLES if v.former}
    found += [("warning", f"{name} is called {former[name]} now. Set that.")
              for name in former if name in os.environ]
    found += [("warning", f"{name} is set, and nothing reads it; mgpu knows "
               f"{', '.join(VARIABLES)}. Correct its name or unset it.")
              for name in sorted(os.environ)
              if name.startswith("MGPU_") and name not in VARIABLES
              and name not in former]
    try:
        return environment.threads_per_device(), found
    except ValueError:
        return 1, found


def _threads(count: int) -> Findings:
    cores = cpu_cores()
    if count > cores:
        return [("warning", f"MGPU_THREADS_PER_DEVICE is {count}, more than "
                 f"the {cores} cores here; unset it or lower it.")]
    return [("info", f"{cores // count} logical CPU devices of {count} "
             f"thread(s) use the {cores} core(s) here; more devices run, but "
             "no faster.")]


def _default(rows: list[dict[str, Any]]) -> tuple[str | None, Findings]:
    """The backend of a script that chooses none, and what is wrong there."""
    others = [row["name"] for row in rows if row["loads"]]
    switch = f" Set MGPU_BACKEND={others[0]} or call mgpu.set_backend(" \
        f"{others[0]!r})." if others else ""
    try:
        name = backends.default_backend()
    except ValueError as error:
        return None, [("error", f"MGPU_BACKEND: {error}")]
    if name in others:
        return name, []
    return name, [("error", f"the default backend, {name!r}, does not load."
                   + switch)]


def healthy(report: dict[str, Any]) -> bool:
    """Whether a script can run: a backend loads, and nothing is an error."""
    return any(row["loads"] for row in report["backends"]) and not any(
        finding["level"] == "error" for finding in report["findings"])


def lines(found: dict[str, Any]) -> Iterator[str]:
    """What `diagnose` has found, in words."""
    yield ", ".join(f"{name} {version or 'not installed'}"
                    for name, version in found["versions"].items())
    for row in found["backends"]:
        name = row["name"] + " (default)" * (row["name"] == found["default"])
        if row["loads"]:
            gpus = row["gpus"]
            yield f"{name}: loads, {gpus} GPU{'s' * (gpus != 1)}"
        else:
            yield (f"{name}: does not load: {row['problem'].rstrip('.')}. "
                   f"What to do: {row['cure']}")
    yield (f"{found['cpu_cores']} CPU cores, {found['threads_per_device']} "
           "thread(s) per logical CPU device (MGPU_THREADS_PER_DEVICE); "
           "logical CPU devices are unlimited")
    for name, variable in found["variables"].items():
        yield f"{name}={variable['value']}: {variable['meaning']}"
    for finding in found["findings"]:
        yield f"{finding['level']}: {finding['text']}"


def report(as_json: bool = False) -> int:
    """`mgpu doctor` without click: print what `diagnose` has found, and
    return the exit status, 0 or 1. Needs nothing but NumPy."""
    found = diagnose()
    print(files.json_text(found).rstrip() if as_json
          else "\n".join(lines(found)))
    return 0 if healthy(found) else 1
