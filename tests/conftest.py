"""Fixtures, kinds of tests, and the fast tier.

A test that takes the fixture `backend` runs on both backends. One that takes
`devices` runs on 3 logical devices; ``@pytest.mark.device_counts(1, 2, 4)``
names other counts where they matter. ``MGPU_TEST_BACKENDS=torch`` selects the
backends (default: those that are installed). A backend that is named there and
does not load is a failure, never a skip.

``kinds.txt`` gives each test function a kind, which becomes its marker
(``pytest -m "equality"``), and says which are slow, or fast with all cases. A
function that the list lacks is an error.

``pytest`` runs the fast tier: the first case of each test function on each
framework, without what is slow and the files that start jobs, environments or
whole trainings (`_SLOW`). ``pytest -m ""`` runs all cases.

``--strict-devices``, or ``MGPU_STRICT_DEVICES=1``, runs every test inside
`mgpu.strict_devices`, and the processes that tests start too. A test of what
raises there is marked: ``@pytest.mark.crosses_devices(reason)``.
"""
import collections
import contextlib
import functools
import gc
import importlib.util
import operator
import os
import random
import signal
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import mgpu
from mgpu import backends as registry

# Tests start hundreds of processes: each would compile mgpu anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Several processes share the cores: OpenMP's threads, which wait busily for
# work, would take them from each other. Read when a backend is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# torch's compiler would compile a program for each set of vector instructions
# that this processor has, to see that it runs.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Before tests import them: their assertions then show the values.
pytest.register_assert_rewrite("helpers", "nets", "steps", "threeway")

ALL_BACKENDS = ("mxnet", "torch")
BACKENDS = [name.strip() for name in os.environ.get(
    "MGPU_TEST_BACKENDS", ",".join(filter(importlib.util.find_spec,
                                          ALL_BACKENDS))).split(",")
            if name.strip()]
KINDS = ("equality", "refusal", "tool")
TESTS = Path(__file__).parent

#: The backends as tests name them: MXNet has two families of arrays, legacy
#: ``mx.nd`` (the mode a process starts in) and ``mx.np``.
ENGINES = [engine for name in BACKENDS for engine in
           (("mxnet-nd", "mxnet-np") if name == "mxnet" else (name,))]

#: these compare the backends only with each other; the rest of tests/oracle
#: compares with an oracle too, and does so for the backends that there are
collect_ignore = [] if set(ALL_BACKENDS) <= set(BACKENDS) \
    else ["oracle/test_networks.py"]

# The fixture below turns the mode on, so that a marked test can do without.
_STRICT = os.environ.pop("MGPU_STRICT_DEVICES", "0")

# Now, so that a missing one fails at once and a backend's settings are no
# test's doing.
for _name in BACKENDS:
    with mgpu.using_backend(_name):
        pass


@pytest.fixture(params=BACKENDS)
def backend(request):
    """The Backend object, in use for the duration of the test."""
    with mgpu.using_backend(request.param) as engine:
        yield engine


@pytest.fixture(params=ENGINES)
def engine(request):
    """As `backend`; MXNet with both of its array families."""
    from helpers import using_engine    # which imports this module
    with using_engine(request.param) as backend:
        yield backend


@pytest.fixture
def devices(request):
    """Three logical devices, or as many as ``device_counts`` says."""
    return [mgpu.cpu(i) for i in range(request.param)]


def pytest_generate_tests(metafunc):
    own = any("devices" in mark.args[0] for mark
              in metafunc.definition.iter_markers("parametrize"))
    if "devices" in metafunc.fixturenames and not own:
        marker = metafunc.definition.get_closest_marker("device_counts")
        metafunc.parametrize("devices", marker.args if marker else (3,),
                             indirect=True, ids=lambda k: f"{k}dev")


@pytest.fixture(autouse=True)
def own_seed(request):
    """What a test draws without a seed of its own depends on its name alone,
    not on the tests before it."""
    number = zlib.crc32(request.node.nodeid.encode())
    random.seed(number)
    np.random.seed(number)
    # (torch.manual_seed keeps a traceback for each kind of device.)
    for engine, seed in (("torch", "default_generator.manual_seed"),
                         ("mxnet", "random.seed")):
        if engine in sys.modules:
            operator.attrgetter(seed)(sys.modules[engine])(number & 0x7fffffff)


@pytest.fixture(autouse=True)
def no_leaks():
    """A test leaves the chosen backend and the environment as they were, and
    no error of its own in MXNet's queue."""
    before, environment = registry._chosen, dict(os.environ)
    loaded = dict(registry._instances)
    yield
    changed = {k for k in environment.keys() | os.environ.keys()
               if environment.get(k) != os.environ.get(k)
               # torch.optim sets the second at its first step
               and not k.startswith(("PYTEST_", "TORCHINDUCTOR_"))}
    chosen, registry._chosen = registry._chosen, before
    registry._inferred = registry._seed = None
    registry._instances.clear()     # a test may load stand-ins
    registry._instances.update(loaded)
    if "mxnet" in sys.modules:
        # MXNet raises the error of an operator whose result is never read
        # at the next wait for all arrays.
        sys.modules["mxnet"].nd.waitall()
    assert chosen == before, "the test leaves another backend chosen"
    assert not changed, f"the test leaves other values in {changed}"


def pytest_addoption(parser):
    parser.addoption(
        "--strict-devices", action="store_true", default=_STRICT == "1",
        help="run every test inside mgpu.strict_devices")


#: files and folders that start jobs, environments or whole trainings, the
#: longest first: not in the fast tier
_SLOW = ("mutants", "distributed", "faults", "test_docs", "test_examples",
         "studies", "test_benchmarks", "test_stress", "test_chapters",
         "test_packaging", "gluon_io/test_networks", "test_migration",
         "test_no_hang", "test_old_files")
#: others with few tests that take long
_LONG = (*_SLOW, "test_options", "oracle", "gluon_io/test_resuming",
         "generated", "test_backends", "test_cli", "test_metrics")


@pytest.hookimpl(tryfirst=True)     # before -m selects by marker
def pytest_collection_modifyitems(config, items):
    _mark_kinds(config, items)
    _mark_fast(items)
    if "gpu" not in config.getoption("markexpr"):
        cards = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=cards)
        items[:] = [item for item in items if item not in cards]
    _longest_first(items)


_relative = functools.cache(os.path.relpath)


def _place(item):
    """(file below tests/, name of the test function)"""
    return (_relative(item.path, TESTS),
            item.nodeid.partition("::")[2].partition("[")[0])


def _listed():
    """The kind of each test function in kinds.txt, and whether it is slow, by
    file and name."""
    kinds, file = {}, None
    for line in (TESTS / "kinds.txt").read_text().splitlines():
        if line[:1] not in (" ", "#", ""):
            file = line
        elif line.strip() and line[0] != "#":
            kind, name, *slow = line.split()
            kinds[file, name] = kind, *slow
    return kinds


def _mark_kinds(config, items):
    listed, found = _listed(), set()
    for item in items:
        if item.path.is_relative_to(TESTS):
            found.add(_place(item))
            for marker in listed.get(_place(item), ()):
                item.add_marker(marker)
    wrong = [f"{file}::{name} has no kind there: add a line with "
             f"{', '.join(KINDS)}" for file, name in sorted(found)
             if (file, name) not in listed]
    if not any("::" in arg for arg in config.args):
        files = {file for file, _ in found}
        wrong += [f"{file}::{name} is there and is no test" for file, name
                  in sorted(listed.keys() - found) if file in files]
    if wrong:
        raise pytest.UsageError("tests/kinds.txt: " + "; ".join(wrong))


def _mark_fast(items):
    """The first case of each test function on each framework is fast."""
    seen = set()
    for item in items:
        if _place(item)[0].startswith(_SLOW) or item.get_closest_marker(
                "slow"):
            continue
        params = item.callspec.params if hasattr(item, "callspec") else {}
        engine = str(params.get("engine", params.get("backend")) or "")
        key = *_place(item), engine.partition("-")[0]
        if key not in seen or item.get_closest_marker("cases"):
            seen.add(key)
            item.add_marker("fast")


def _longest_first(items):
    """Files that take long begin first, then those with many tests: else one
    of several processes is left with them at the end. (``--dist loadfile
    --no-loadscope-reorder`` keeps this order; one process alone does not
    mind.)"""
    counts = collections.Counter(item.path for item in items)

    def rank(item):
        name, _ = _place(item)
        return next((i for i, long in enumerate(_LONG)
                     if name.startswith(long)), len(_LONG)), \
            -counts[item.path], name
    items.sort(key=rank)


def pytest_collection_finish():
    """What is there now stays, and Python need not go through it again: it
    then frees the networks of tests, which are in cycles, soon. Hundreds of
    them, each followed by mgpu, took half of the time of all tests."""
    gc.collect()
    gc.freeze()
    gc.collect()


def pytest_configure(config):
    if config.getoption("--strict-devices"):
        os.environ["MGPU_STRICT_DEVICES"] = "1"     # for child processes
    # A shell starts what runs in the background without Ctrl-C, and processes
    # hand that down to those that tests press Ctrl-C in.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def strict_mode(request):
    """`mgpu.strict_devices` for the whole test, where it was asked for."""
    marker = request.node.get_closest_marker("crosses_devices")
    if marker is not None and not any((*marker.args,
                                       *marker.kwargs.values())):
        raise ValueError("crosses_devices needs a reason")
    with contextlib.ExitStack() as stack:
        if marker is None and request.config.getoption("--strict-devices"):
            with mgpu.using_backend(BACKENDS[0]):   # and all that are loaded
                stack.enter_context(mgpu.strict_devices())
        yield


def pytest_report_header(config):
    lines = [f"backends: {', '.join(BACKENDS)}"]
    lines += [f"{name} is not installed: its tests are skipped"
              for name in ALL_BACKENDS if importlib.util.find_spec(name)
              is None]
    if config.getoption("--strict-devices"):
        lines.append("inside mgpu.strict_devices")
    if collect_ignore:
        lines.append(f"NOT RUN, the other backend is missing: "
                     f"{', '.join(collect_ignore)}; tests/oracle compares "
                     f"{', '.join(BACKENDS)} with only the oracle")
    return lines


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem):
    """Where a testing process has ended: said at once, with the memory that
    is left, since the system ends processes that take too much."""
    with open("/proc/meminfo") as file:
        left, = [line for line in file if line.startswith("MemAvailable")]
    print(f"\nended in {crashitem}; {left.strip()}", flush=True)


def pytest_terminal_summary(terminalreporter):
    """How many mutants were killed. Here, since where several processes test
    this file's hooks are those of the one that reports."""
    killed, survived = (
        sum("::test_is_killed[" in report.nodeid
            for report in terminalreporter.stats.get(outcome, ()))
        for outcome in ("passed", "failed"))
    if killed or survived:
        terminalreporter.write_line(
            f"mutants: killed {killed} of {killed + survived}")
    elif collect_ignore:
        terminalreporter.write_line(
            "mutants: NOT RUN, the other backend is missing")
