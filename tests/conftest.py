"""Fixtures: each test that asks for `backend` runs on both engines, each that
asks for `devices` runs on 1, 2, 3 and 4 logical devices.

``MGPU_TEST_BACKENDS=torch`` narrows the engines (default: both). An engine
that is named and does not load is a failure, never a skip.

``--strict-devices``, or ``MGPU_STRICT_DEVICES=1``, runs every test inside
`mgpu.strict_devices`, and the processes that tests start too. A test that is
about what the mode refuses says so: ``@pytest.mark.crosses_devices(reason)``.
"""
import collections
import contextlib
import gc
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

BACKENDS = [name.strip() for name in os.environ.get(
    "MGPU_TEST_BACKENDS", "mxnet,torch").split(",") if name.strip()]
DEVICE_COUNTS = (1, 2, 3, 4)

#: The engines as tests name them: MXNet has two families of arrays, legacy
#: ``mx.nd`` (the mode a process starts in) and ``mx.np``.
ENGINES = [engine for name in BACKENDS for engine in
           (("mxnet-nd", "mxnet-np") if name == "mxnet" else (name,))]

#: these compare the engines only with each other; the rest of tests/oracle
#: compares with an oracle too, and does so for the engines that there are
collect_ignore = [] if {"mxnet", "torch"} <= set(BACKENDS) \
    else ["oracle/test_networks.py"]

# The fixture below turns the mode on, so that a marked test can do without.
_STRICT = os.environ.pop("MGPU_STRICT_DEVICES", "0")

# Now, so that a missing one fails at once and an engine's settings are no
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


@pytest.fixture(params=DEVICE_COUNTS, ids=lambda k: f"{k}dev")
def devices(request):
    return [mgpu.cpu(i) for i in range(request.param)]


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
    registry._instances.clear()     # a test may load stand-ins
    registry._instances.update(loaded)
    if "mxnet" in sys.modules:
        # MXNet raises the error of an operator whose result nobody waits for
        # at the next wait for all arrays, whoever that is.
        sys.modules["mxnet"].nd.waitall()
    assert chosen == before, "the test leaves another backend chosen"
    assert not changed, f"the test leaves other values in {changed}"


def pytest_addoption(parser):
    parser.addoption(
        "--strict-devices", action="store_true", default=_STRICT == "1",
        help="run every test inside mgpu.strict_devices")


#: files and folders with few tests that take long, the longest first
_LONG = ("mutants", "distributed", "faults", "test_docs", "test_examples",
         "oracle", "studies", "test_benchmarks", "test_stress",
         "test_chapters", "test_packaging", "gluon_io/test_networks",
         "gluon_io/test_resuming",
         "generated", "test_migration", "test_no_hang", "test_backends",
         "test_cli", "test_metrics")


def pytest_collection_modifyitems(session, items):
    """Files that take long begin first, then those with many tests: else one
    of several processes is left with them at the end. (``--dist loadfile
    --no-loadscope-reorder`` keeps this order; one process alone does not
    mind.)"""
    counts = collections.Counter(item.path for item in items)

    def rank(item):
        name = os.path.relpath(item.path, Path(__file__).parent)
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
    lines = [f"engines: {', '.join(BACKENDS)}"]
    if config.getoption("--strict-devices"):
        lines.append("inside mgpu.strict_devices")
    if collect_ignore:
        lines.append(f"NOT RUN, for want of the other engine: "
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
            "mutants: NOT RUN, for want of the other engine")
