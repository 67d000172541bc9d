"""Devices: the same names for the same things on both backends."""
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest

import mgpu
from mgpu import (Device, cpu, gpu, list_devices, num_gpus, try_all_gpus,
                  try_gpu)
from mgpu.backends.device import as_device, as_devices


@pytest.fixture
def gpus(backend, monkeypatch):
    """Sets how many GPUs the backend sees."""
    def see(count):
        monkeypatch.setattr(type(backend), "num_gpus", lambda self: count)
    return see


# -- names --------------------------------------------------------------------

def test_as_device_reads_names_and_devices():
    for name, device in (
            ("cpu", cpu(0)), ("cpu:1", cpu(1)), ("cpu(12)", cpu(12)),
            ("gpu", gpu(0)), ("gpu:3", gpu(3)), ("gpu(0)", gpu(0)),
            ("cuda", gpu(0)), ("cuda:2", gpu(2)), (" cpu:1 ", cpu(1)),
            (Device("gpu", 1), gpu(1)), (Device("cpu"), cpu()),
            (Device("cpu", np.int64(2)), cpu(2))):
        found = as_device(name)
        assert found == device, name
        assert type(found) is Device and type(found.index) is int


def test_a_device_prints_compares_and_hashes_as_a_value():
    assert repr(cpu(1)) == str(cpu(1)) == "cpu(1)"
    assert f"{[gpu(0), cpu(2)]}" == "[gpu(0), cpu(2)]"
    assert cpu(1) == Device("cpu", 1) != gpu(1) != cpu(0)
    assert {cpu(1): "a", gpu(1): "b"}[as_device("cpu:1")] == "a"
    assert pickle.loads(pickle.dumps(gpu(3))) == gpu(3)
    assert eval(repr(gpu(3))) == gpu(3)


def test_native_handles_there_and_back(backend, monkeypatch):
    """`as_device` of a handle is its device, and `handle` gives one of the
    same kind (CPU devices may share one)."""
    if backend.name == "torch":
        import torch
        handles = {"cpu": cpu(0), "cpu:3": cpu(3), "cuda": gpu(0),
                   "cuda:1": gpu(1)}
        handles = {torch.device(name): d for name, d in handles.items()}
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    else:
        import mxnet as mx
        handles = {mx.cpu(): cpu(0), mx.cpu(3): cpu(3), mx.gpu(1): gpu(1)}
    for handle, device in handles.items():
        assert as_device(handle) == device
        assert as_device(backend.handle(device)).kind == device.kind
    assert backend.handle(gpu(1)) in handles


def test_unknown_names_are_refused():
    for name in ("tpu:0", "cpu:-1", "cpu:", "cpu:1.5", "CPU:0", "cpu 1",
                 "cpu:1 gpu:1", "gpu(1", "", "cuda:x", "cpu:0\ncpu:1"):
        with pytest.raises(ValueError) as refused:
            as_device(name)
        assert str(refused.value) == (
            f"unknown device; received {name!r}. Use cpu(i), gpu(i), or a "
            "string such as 'cpu:1', 'gpu:0', 'cuda:0'.")


def test_impossible_devices_are_refused(backend):
    for make in (
            lambda: cpu(-1), lambda: gpu(-1), lambda: cpu(1.0),
            lambda: cpu("1"), lambda: gpu(True), lambda: cpu(None),
            lambda: try_gpu(-1), lambda: as_device(Device("tpu", 0)),
            lambda: as_device(SimpleNamespace(type="mps", index=None)),
            lambda: as_device(SimpleNamespace(device_type="cpu_pinned",
                                              device_id=0))):
        with pytest.raises(ValueError, match=(
                r"unknown device; received \w+\(.*\)\. Use cpu\(i\) or gpu"
                r"\(i\) with an index of 0")):
            make()


def test_as_device_refuses_other_types():
    for thing in (None, 0, 1.5, b"cpu", ("cpu", 1), np.zeros(2), object):
        with pytest.raises(TypeError, match=re.escape(
                f"of type {type(thing).__name__}. Use mgpu.list_devices")):
            as_device(thing)


# -- lists --------------------------------------------------------------------

def test_as_devices_takes_one_or_many(backend, devices):
    assert as_devices([str(d) for d in devices]) == devices
    assert as_devices(tuple(devices)) == devices
    assert as_devices(devices[-1]) == devices[-1:]
    assert as_devices("cpu:7") == [cpu(7)]
    native = [backend.handle(d) for d in devices[:1]]
    assert as_devices(native) == as_devices(native[0]) == [cpu(0)]


def test_repeated_devices_and_an_empty_list_are_refused():
    with pytest.raises(ValueError) as refused:
        as_devices(["cpu:0", cpu(1), "cpu", "cpu(1)"])
    assert str(refused.value) == (
        "devices must be distinct; received [cpu(0), cpu(1), cpu(0), cpu(1)],"
        " with cpu(0), cpu(1) more than once. CPU devices are unlimited: for "
        "4 of them use list_devices(4).")
    with pytest.raises(ValueError, match=r"at least one device is needed; "
                       r"received an empty list\. Use"):
        as_devices([])


def test_an_absent_gpu_is_refused(backend, gpus):
    for count, sees in ((0, "0 GPUs"), (1, "1 GPU"), (2, "2 GPUs")):
        gpus(count)
        with pytest.raises(ValueError) as refused:
            as_devices([cpu(0), f"gpu:{count}"])
        assert str(refused.value) == (
            f"gpu({count}) is not available: the {backend.name} backend sees "
            f"{sees}. Use try_gpu({count}), or a logical device such as "
            f"cpu({count}).")


# -- what there is ------------------------------------------------------------

@pytest.mark.parametrize("count", [0, 1, 3])
def test_gpus_are_chosen_up_to_the_number_present(backend, gpus, count):
    """`try_gpu` takes a CPU device for an absent GPU; `list_devices` takes
    GPUs if there are enough, else CPU devices."""
    gpus(count)
    present = [gpu(i) for i in range(count)]
    assert num_gpus() == count
    assert as_devices([*present, cpu(0)]) == [*present, cpu(0)]
    assert try_gpu() == try_gpu(0)
    for i in range(4):
        assert try_gpu(i) == (gpu(i) if i < count else cpu(i))
    assert try_all_gpus() == (present or [cpu(0)])
    for k in (1, 2, 4):
        assert list_devices(k) == [
            gpu(i) if k <= count else cpu(i) for i in range(k)]


def test_list_devices_refuses_impossible_numbers(backend):
    for k in (0, -1, 2.0, "2", None, True):
        with pytest.raises(ValueError) as refused:
            list_devices(k)
        assert str(refused.value) == (
            "the number of devices must be a whole number, 1 or more; "
            f"received {k!r}. Use for example list_devices(2).")


def test_cpu_devices_are_logical_and_unlimited(backend):
    """An array on one changes without those on the others."""
    far = [cpu(0), cpu(1), cpu(63), cpu(1000)]
    arrays = [mgpu.put(np.float32([i]), d) for i, d in enumerate(far)]
    with mgpu.no_grad():
        arrays[0] += 7          # storage of its own on each
    assert [float(mgpu.to_numpy(x)[0]) for x in arrays] == [7, 1, 2, 3]


@pytest.mark.parametrize("physical, setting", [
    (0, "4"), (1, "4"), (2, "4"), (2, None), (2, "")])
def test_logical_gpus_share_physical_ones(backend, physical, setting,
                                          monkeypatch):
    """MGPU_LOGICAL_GPUS sets their number on torch, if there is a GPU; MXNet
    ignores it."""
    seen = physical
    if backend.name == "torch":
        import torch
        monkeypatch.setattr(torch.cuda, "device_count", lambda: physical)
        if setting and physical:
            seen = 4
    else:
        import mxnet as mx
        monkeypatch.setattr(mx.context, "num_gpus", lambda: physical)
    monkeypatch.delenv("MGPU_LOGICAL_GPUS", raising=False)
    if setting is not None:
        monkeypatch.setenv("MGPU_LOGICAL_GPUS", setting)
    assert num_gpus() == seen
    handles = [backend.handle(gpu(i)) for i in range(seen)]
    assert [as_device(h).index for h in handles] \
        == [i % physical for i in range(seen)]
