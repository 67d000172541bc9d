"""Whole programs of torch and Gluon run on several devices with one changed
line, and compute what they compute on one.

A program of tests/programs appends its numbers to `results`. After the line
that makes `net`, the line ``net = mgpu.DataParallel(net, devices)`` is
inserted.
"""
import re
from pathlib import Path

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS

FOLDER = Path(__file__).parent / "programs"
PROGRAMS = {path.stem: "mxnet" if "mxnet" in path.read_text() else "torch"
            for path in sorted(FOLDER.glob("*.py"))}
LINE = "net = mgpu.DataParallel(net, devices)"
#: Adam divides by roots of sums of the smallest gradients.
ADAM = 1e-10


def changed(source):
    """The program with `LINE`, at the last place where `net` is made (Gluon:
    initialized)."""
    lines = source.splitlines()
    at = max(n for n, line in enumerate(lines) if re.match(
        r"net(, \w+)? = |net\.cast", line))
    while lines[at + 1].startswith(" "):
        at += 1
    return "\n".join([*lines[:at + 1], LINE, *lines[at + 1:]])


def run(source, name, devices):
    """The numbers in `results`, and the network's values."""
    if PROGRAMS[name] == "torch":
        import torch
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
    else:
        import mxnet as mx
        mx.random.seed(0)
        np.random.seed(0)
    space = {"mgpu": mgpu, "devices": devices, "__name__": name}
    try:
        exec(compile(source, f"{name}.py", "exec"), space)
    finally:
        if PROGRAMS[name] == "torch":
            torch.set_default_dtype(before)
    params = space["net"].state_dict().values() if PROGRAMS[name] == "torch" \
        else [p.data() for p in space["net"].collect_params().values()]
    return np.hstack([mgpu.to_numpy(x).ravel() for x in (*space["results"],
                                                         *params)])


@pytest.mark.parametrize("name", [name for name, engine in PROGRAMS.items()
                                  if engine in BACKENDS])
def test_a_program_with_one_changed_line(name):
    """On one device, and on three with uneven parts of a batch."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    with mgpu.using_backend(PROGRAMS[name]):
        plain = run(source, name, None)
        for k in (1, 3):
            found = run(changed(source), name, mgpu.list_devices(k))
            np.testing.assert_allclose(
                found, plain, rtol=0, atol=ADAM if re.search(
                    "(?i)adam|rmsprop", source) else 1e-12)


def test_the_line_is_that_of_the_documentation():
    assert LINE in changed("net = Net(\n    1)\nx = 2").splitlines()[2]
