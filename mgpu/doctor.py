"""What `mgpu doctor` finds out: is this machine fit, and if not, why."""
import importlib.metadata
import os
import platform
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from mgpu import backends
from mgpu.device import cpu_cores

#: the environment variables that mgpu reads, and what they say
VARIABLES = {
    "MGPU_BACKEND": "the engine to use without set_backend",
    "MGPU_DATA": "the folder with the IDX files of Fashion-MNIST",
    "MGPU_LOGICAL_GPUS": "so many logical GPUs share the physical ones "
                         "(torch)",
    "MGPU_THREADS_PER_DEVICE": "threads that a logical CPU device computes "
                               "with on torch; 1 without it, as on MXNet",
    "MGPU_TEST_BACKENDS": "the engines that mgpu's own tests run on",
}


def versions(engines: Any = ()) -> Dict[str, str]:
    """Versions by name: python, numpy, mgpu, and those of `engines`, Backend
    objects."""
    import mgpu
    found = {"python": platform.python_version(), "numpy": np.__version__,
             "mgpu": mgpu.__version__}
    return {**found, **{e.name: e.version for e in engines}}


def diagnose() -> Dict[str, Any]:
    """Examine this process and machine. Loads every backend that it can.

    Returns
    -------
    dict
        Fit for JSON. ``"versions"``: by name, for a framework that does not
        load that of its package, if there is one. ``"backends"``: a list of
        ``{"name", "loads", "version", "gpus", "problem", "cure"}``;
        ``version`` and ``gpus`` are None where it does not load, ``problem``
        and ``cure`` (a command) where it does. ``"default"``: the backend
        that a script without `set_backend` gets. ``"cpu_cores"``,
        ``"threads_per_device"``: int. ``"variables"``: the environment's
        ``MGPU_*`` with their values and meanings. ``"findings"``: a list of
        ``{"level", "text"}``, level "info", "warning" or "error".
    """
    findings: List[Tuple[str, str]] = []
    engines, rows = [], []
    known = versions()
    for name, entry in backends._BACKENDS.items():
        row = {"name": name, "loads": False, "version": None, "gpus": None,
               "problem": None, "cure": None}
        rows.append(row)
        try:
            with backends.using_backend(name) as engine:
                row.update(loads=True, version=engine.version,
                           gpus=engine.num_gpus())
                engines.append(engine)
                findings += engine.doctor()
        except Exception as error:  # whatever it is, it is what to report
            row.update(problem=_line(error.__cause__ or error),
                       cure=entry.install)
            known[name] = _installed(entry.framework)
    known.update(versions(engines))
    threads, problem = _threads()
    default, no_default = _default(rows)
    findings = problem + no_default + findings + _variables()
    return {
        "versions": known, "backends": rows, "default": default,
        "cpu_cores": cpu_cores(), "threads_per_device": threads,
        "variables": {name: {"value": value, "meaning": VARIABLES[name]}
                      for name, value in sorted(os.environ.items())
                      if name in VARIABLES},
        "findings": [{"level": level, "text": text}
                     for level, text in findings]}


def _line(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ImportError) \
        else f"{type(error).__name__}: {text}"


def _installed(package: str) -> Optional[str]:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _threads() -> Tuple[int, List[Tuple[str, str]]]:
    name = "MGPU_THREADS_PER_DEVICE"
    text, cores = os.environ.get(name, "1"), cpu_cores()
    if not text.isdecimal() or int(text) < 1:
        return 1, [("error", f"{name} must be 1 or more; received {text!r}. "
                    f"Unset it, or set it to a number up to {cores}.")]
    count = int(text)
    if count > cores:
        return count, [("warning", f"{name} is {count}, more than the "
                        f"{cores} cores here; unset it or lower it.")]
    return count, [("info", f"{max(1, cores // count)} logical CPU devices "
                    f"of {count} thread{'s' * (count != 1)} use the {cores} "
                    f"core{'s' * (cores != 1)} here; more devices run, but "
                    "no faster.")]


def _default(rows: List[Dict[str, Any]]
             ) -> Tuple[Optional[str], List[Tuple[str, str]]]:
    """The backend of a script that chooses none, and what is wrong there."""
    others = [row["name"] for row in rows if row["loads"]]
    switch = f" Set MGPU_BACKEND={others[0]} or call mgpu.set_backend(" \
        f"{others[0]!r})." if others else ""
    name = os.environ.get("MGPU_BACKEND") or backends._DEFAULT
    try:
        name = backends._canonical(name)
    except ValueError as error:
        return None, [("error", f"MGPU_BACKEND: {error}")]
    if name in others:
        return name, []
    return name, [("error", f"the default backend, {name!r}, does not load."
                   + switch)]


def _variables() -> List[Tuple[str, str]]:
    return [("warning", f"{name} is set, and nothing reads it; mgpu knows "
             f"{', '.join(VARIABLES)}.")
            for name in sorted(os.environ)
            if name.startswith("MGPU_") and name not in VARIABLES]


def healthy(report: Dict[str, Any]) -> bool:
    """Whether a script can run: a backend loads, and nothing is an error."""
    return any(row["loads"] for row in report["backends"]) and not any(
        finding["level"] == "error" for finding in report["findings"])
