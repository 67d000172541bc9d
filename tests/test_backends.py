"""The registry: which backend is used, in which thread, and the errors
without a backend."""
import asyncio
import os
import re
import subprocess
import sys
import threading
import time
import types
from importlib.machinery import ModuleSpec

import pytest

import forked
from conftest import BACKENDS
from mgpu import (BackendNotAvailable, available_backends, backends as
                  registry, get_backend, seed, set_backend, using_backend)
from mgpu.utils import environment

ALIASES = {"mxnet": "gluon", "torch": "pytorch"}


@pytest.fixture
def patch():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MGPU_BACKEND", raising=False)
        patch.setattr(registry, "_chosen", None)
        patch.setattr(registry, "_installed", None)
        yield patch


def install(patch, name, engine):
    """Put a made-up backend in the place of `name`."""
    module = types.ModuleType(f"made_up_{name}")
    module.__spec__ = ModuleSpec(module.__name__, None)
    module.BACKEND = engine
    patch.setitem(sys.modules, module.__name__, module)
    patch.setitem(registry.ENTRIES, name, registry.Entry(
        module.__name__, module.__name__, name))
    patch.delitem(registry._instances, name, raising=False)


def remove(patch, *names):
    """Make the frameworks of `names` look as if they were not installed."""
    for name in names:
        patch.setitem(registry.ENTRIES, name, registry.Entry(
            "missing_" + name, "missing_" + name,
            name))
        patch.delitem(registry._instances, name, raising=False)


class Engine:
    """A made-up backend."""


# -- choosing -----------------------------------------------------------------

@pytest.mark.parametrize("name", BACKENDS)
def test_set_backend_by_name_and_alias(patch, name):
    set_backend(name)
    engine = get_backend()
    assert engine.name == name
    patch.setattr(registry, "_chosen", None)
    set_backend(ALIASES[name])
    assert get_backend() is engine
    with using_backend(ALIASES[name]) as same:
        assert same is engine


@pytest.mark.parametrize("value, name", [
    ("torch", "torch"), ("pytorch", "torch"), ("mxnet", "mxnet"),
    ("gluon", "mxnet"), ("", "mxnet")])
def test_the_environment_chooses_where_nothing_else_does(patch, value, name):
    for other in ("mxnet", "torch"):
        install(patch, other, type(other, (Engine,), {}))
    patch.setenv("MGPU_BACKEND", value)
    assert type(get_backend()).__name__ == name
    set_backend("torch")
    assert type(get_backend()).__name__ == "torch"
    with using_backend("mxnet") as engine:
        assert type(engine).__name__ == "mxnet" and get_backend() is engine
        with using_backend("torch") as engine:
            assert get_backend() is engine
        assert type(get_backend()).__name__ == "mxnet"
        set_backend("torch")        # counts after the block
        assert type(get_backend()).__name__ == "mxnet"
    assert type(get_backend()).__name__ == "torch"


def test_an_unknown_name_is_refused(patch):
    for name in ("jax", "Torch", "", None, 3):
        for choose in (set_backend,
                       lambda name: using_backend(name).__enter__()):
            with pytest.raises(ValueError) as refused:
                choose(name)
            assert str(refused.value) == (
                f"unknown backend; received {name!r}. Use one of 'mxnet', "
                "'torch', 'gluon', 'pytorch'.")
    assert registry._chosen is None


# -- missing ------------------------------------------------------------------

@pytest.mark.parametrize("name, other", [("mxnet", "torch"),
                                         ("torch", "mxnet")])
@pytest.mark.parametrize("ask", [
    set_backend, lambda name: using_backend(name).__enter__(),
    lambda name: get_backend()], ids=["set", "using", "get"])
def test_a_missing_framework_is_one_line(patch, ask, name, other):
    remove(patch, name)
    install(patch, other, Engine)
    patch.setenv("MGPU_BACKEND", name)
    with pytest.raises(BackendNotAvailable) as refused:
        ask(name)
    assert str(refused.value) == (
        f"the {name!r} backend cannot be loaded (No module named "
        f"'missing_{name}'). Run pip install {name}, or switch with "
        f"mgpu.set_backend({other!r}).")
    assert isinstance(refused.value, ImportError)
    assert registry._chosen is None and name not in registry._instances


def test_nothing_is_advised_that_this_python_cannot_have(patch):
    remove(patch, "mxnet", "torch")
    assert available_backends() == []
    assert registry.default_backend() == "mxnet"
    patch.setitem(registry.ENTRIES, "mxnet", registry.ENTRIES[
        "mxnet"]._replace(newest_python=(3, 1)))
    assert registry.default_backend() == "torch"
    with pytest.raises(BackendNotAvailable, match="Run pip install torch.$"):
        get_backend()
    with pytest.raises(BackendNotAvailable, match="mxnet has no wheels for"):
        set_backend("mxnet")


@pytest.mark.parametrize("error", [ImportError, OSError])
def test_a_framework_that_does_not_load_is_not_available(patch, tmp_path,
                                                         error):
    """Installed, but broken: a library of the system is missing."""
    (tmp_path / "broken_engine.py").write_text(
        f"raise {error.__name__}('libcudart.so.12 is missing')\n")
    patch.syspath_prepend(tmp_path)
    patch.setitem(registry.ENTRIES, "torch", registry.Entry(
        "broken_engine", "broken_engine", "torch"))
    patch.delitem(registry._instances, "torch", raising=False)
    with pytest.raises(BackendNotAvailable, match=re.escape(
            "the 'torch' backend cannot be loaded (libcudart.so.12 is "
            "missing). Run pip install torch, or switch with ")):
        set_backend("torch")


def test_available_backends(patch):
    assert set(BACKENDS) <= set(available_backends()) <= {"mxnet", "torch"}
    remove(patch, "mxnet")
    patch.setitem(registry.ENTRIES, "torch", registry.Entry(
        "not.imported", "json", "pip install"))
    assert available_backends() == ["torch"]


# -- threads and contexts -----------------------------------------------------

def in_thread(function):
    """Its result in a thread that inherits nothing."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_set_backend_is_for_all_threads_and_using_backend_for_one(patch):
    for name in ("mxnet", "torch"):
        install(patch, name, type(name, (Engine,), {}))

    def seen():
        return type(get_backend()).__name__
    set_backend("torch")
    with using_backend("mxnet"):
        assert seen() == "mxnet"
        assert in_thread(seen) == "torch"
    in_thread(lambda: set_backend("mxnet"))
    assert seen() == "mxnet"


def test_a_seed_is_that_of_a_backend_that_a_network_decides(patch):
    """Which is loaded after the seed was set."""
    seeds = []
    for name in ("mxnet", "torch"):
        install(patch, name, type(name, (Engine,), {
            "seed": lambda self, s: seeds.append((type(self).__name__, s))}))
    patch.setattr(registry, "_seed", None)
    seed(7)
    with using_backend("torch"):
        assert seeds == [("mxnet", 7), ("torch", 7)]


def test_tasks_inherit_the_backend_and_keep_their_own(patch):
    names = ("mxnet", "torch")
    for name in names:
        install(patch, name, type(name, (Engine,), {}))

    async def task(name):
        inherited = type(get_backend()).__name__
        with using_backend(name):
            await asyncio.sleep(0)
            return inherited, type(get_backend()).__name__

    async def main():
        with using_backend("torch"):
            return await asyncio.gather(*map(task, names))
    assert asyncio.run(main()) == [("torch", "mxnet"), ("torch", "torch")]


def test_threads_share_one_backend_instance(patch):
    """Its constructor runs until all threads ask for the backend."""
    made, found, load = [], [], registry._load
    asking, all_ask = threading.Semaphore(7), threading.Event()

    class Slow(Engine):
        def __init__(self):
            made.append(self)
            assert all_ask.wait(60)
            time.sleep(0.1)     # for the last of them to construct another

    def counted(name):
        if not asking.acquire(blocking=False):      # the eighth
            all_ask.set()
        return load(name)
    install(patch, "torch", Slow)
    patch.setenv("MGPU_BACKEND", "torch")
    patch.setattr(registry, "_load", counted)
    threads = [threading.Thread(target=lambda: found.append(get_backend()))
               for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and found == made * 8


# -- the object ---------------------------------------------------------------

_FAULTS = """
import resource, sys, threading
import numpy as np
import mgpu
mgpu.set_backend(sys.argv[1])
def faults(result):
    for _ in range(3):      # the process grows to its size
        np.ones(4 << 20, "float32")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(4 << 20, "float32")
    result.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
found = []
faults(found)
thread = threading.Thread(target=faults, args=(found,))
thread.start()
thread.join()
print(*found)
"""


@pytest.mark.parametrize("keep", ["0", "1"])
def test_freed_memory_is_kept(backend, keep):
    """16 MB are 4,096 pages, or 8 huge ones: given back and got again, 20
    times, or not; in the first thread and in another one."""
    found = subprocess.run(
        [sys.executable, "-c", _FAULTS, backend.name], check=True, text=True,
        env={**os.environ, "MGPU_KEEP_MEMORY": keep,
             "MALLOC_MMAP_THRESHOLD_": "131072"},
        stdout=subprocess.PIPE).stdout.split()
    assert [int(n) < 8 * 10 for n in found] == [keep == "1"] * 2, found


_GIVEN_BACK = """
import os, sys
import numpy as np
import mgpu
from mgpu import parity
from nets import mlp
mgpu.set_backend(sys.argv[1])
backend = mgpu.get_backend()
def resident():     # in MB
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
def use():
    arrays = [np.ones(1 << 20, "float32") for _ in range(150)]
def batches():
    for _ in range(2):
        use()
        yield np.ones((4, 6), "float32"), np.zeros(4, "int32")
        kept.append(resident())     # after the step
def train(replicas):
    trainer = mgpu.Trainer(replicas, "sgd")
    mgpu.train_epochs(lambda X, y: mgpu.train_batch(
        X, y, replicas, mgpu.losses.SoftmaxCrossEntropyLoss(), trainer),
        batches(), 1, replicas.devices)
def compare(replicas):
    sides = mlp(backend), mlp(backend)
    [mgpu.initialize(net, mgpu.list_devices(1), "xavier") for net in sides]
    parity.compare(*sides, batches=batches(), steps=2)
replicas = mgpu.initialize(mlp(backend), mgpu.list_devices(2))
for by in train, compare:
    before, kept = resident(), []
    by(replicas)
    print(min(kept) - before, resident() - before)
"""


def test_a_wrong_setting_of_kept_memory_is_refused(monkeypatch):
    monkeypatch.setenv("MGPU_KEEP_MEMORY", "no")
    with pytest.raises(ValueError, match="MGPU_KEEP_MEMORY must be 0 or 1"):
        environment.keep_memory()


def test_freed_memory_is_given_back_after_its_use(backend):
    """600 MB of arrays: kept within a training or a comparison, and not
    after it."""
    out = subprocess.run(
        [forked.python(), "-W", "ignore", "-c", _GIVEN_BACK, backend.name],
        check=True, text=True, stdout=subprocess.PIPE, env={
            **os.environ, "PYTHONPATH": os.pathsep.join(
                [os.path.dirname(__file__), *sys.path])}).stdout
    assert len(out.splitlines()) == 2
    for line in out.splitlines():
        kept, after = map(int, line.split())
        assert kept > 500 and after < 200, out
