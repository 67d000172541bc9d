"""The examples run on both backends, print what the book's chapters show, and
open as notebooks. Sizes are tiny; each script runs once per backend, in a
process of its own, and several tests read what it printed."""
import ast
import json
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import forked
from conftest import BACKENDS
from test_neutrality import offences

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "docs"))
from build_notebooks import NOTEBOOKS, cells, digest, scripts  # noqa: E402

SCRIPTS = scripts()
TINY = {
    "auto_parallelism": "--devices cpu:2,cpu:3 --size 16 --repeat 3",
    # Batches of 32, 32 and 1: with two devices one of them gets no row.
    "multiple_gpus": "--epochs 3 --limit 65 --batch-size 32 --lr 0.05",
    # 9 rows: the second run splits its only batch into 5 and 4.
    "multiple_gpus_concise": "--epochs 1 --limit 9 --batch-size 5 --lr 0.01",
    "exercises": "--size 32 --repeat 2 --epochs 1 --limit 12",
}
#: exercises that train ResNet-18 for seconds: on the last backend alone, as no
#: script asks which one it is
LARGE = {"sixteen_devices", "resnet_settings"}


def python(arguments, cwd, program=None):
    return subprocess.run(
        [program or forked.python(), *map(str, arguments)], cwd=cwd,
        timeout=300, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    @lru_cache(None)
    def run(name, backend):
        folder = tmp_path_factory.mktemp(f"{name}-{backend}")
        options = ["--backend", backend, *TINY[name].split(),
                   *(exercises(backend) if name == "exercises" else ())]
        result = python([ROOT / "examples" / f"{name}.py", *options], folder)
        assert result.returncode == 0, result.stdout + result.stderr
        # Matplotlib, or a backend, must have nothing to say about them.
        assert "Error" not in result.stderr, result.stderr
        return SimpleNamespace(out=result.stdout, folder=folder,
                               lines=result.stdout.splitlines())
    return run


def test_every_script_is_run():
    assert {path.stem for path in SCRIPTS} == set(TINY)


# -- one script for each chapter of the book --------------------------------

def test_auto_parallelism(backend, run):
    printed = run("auto_parallelism", backend.name)
    assert "GPU1 is cpu(2), GPU2 is cpu(3)" in printed.lines[0]
    names = [match.group(1) for match in re.finditer(
        r"^(.*): \d+\.\d{4} sec$", printed.out, re.MULTILINE)]
    assert names == ["GPU1 time", "GPU2 time", "GPU1 & GPU2", "Run on GPU1",
                     "Copy to CPU", "Run on GPU1 and copy to CPU"]
    picture = (printed.folder / "out" / "graph.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"


LAST_LINES = [
    r"test acc: [01]\.\d\d, \d+\.\d sec/epoch on \[cpu\(0\)\]",
    r"test acc: [01]\.\d\d, \d+\.\d sec/epoch on \[cpu\(0\), cpu\(1\)\]"]


# What both backends print: no start, split, loss or update differs.
LOSSES = {"lenet": [2.246, 2.246], "resnet18": [2.458, 2.348]}


def check_runs(printed, network, backend):
    """One and two devices: last line, curve, training loss."""
    last = [line for line in printed.lines if line.startswith("test acc")]
    assert len(last) == 2
    for line, pattern in zip(last, LAST_LINES):
        assert re.fullmatch(pattern, line)
    for count in (1, 2):
        curve = printed.folder / "out" / f"{network}-{backend}-{count}.png"
        assert curve.read_bytes()[:4] == b"\x89PNG"
    losses = [float(x) for x in re.findall(r"train loss (\d+\.\d+)",
                                           printed.out)]
    # Nine float32 steps at most move the last digit shown by one at most.
    assert losses == pytest.approx(LOSSES[network], abs=1.5e-3)


def test_multiple_gpus(backend, run):
    printed = run("multiple_gpus", backend.name)
    zeros = str(np.zeros(20))
    for text in ("W1 (20, 1, 3, 3)", "W3 (800, 128)", "129,068 parameters",
                 f"b1: {zeros}", f"b1 grad: {zeros}",
                 "before allreduce: [[1. 1.]] [[2. 2.]]",
                 "after allreduce: [[3. 3.]] [[3. 3.]]",
                 "3 rows on 2 devices: [2, 1]"):
        assert text in printed.out
    table = np.arange(20.0).reshape(4, 5)
    assert f"input:\n{table}\ngoes to:\n[cpu(0), cpu(1)]\noutput:\n" \
        f"{table[:2]}\n{table[2:]}\n" in printed.out
    check_runs(printed, "lenet", backend.name)


def test_multiple_gpus_concise(backend, run):
    printed = run("multiple_gpus_concise", backend.name)
    assert "76 trainable arrays, 11,175,818 values, 34 running statistics" \
        in printed.lines[0]
    # Without GPUs the demonstration is on these two; cpu(0) is free.
    shown = ["cpu(1)", "cpu(2)"]
    kernels = []
    for device in shown:
        assert f"output on {device}: (2, 10)" in printed.out
        at = printed.lines.index(f"first kernel of 0.weight on {device}:")
        kernels.append(printed.lines[at + 1:at + 4])
    assert kernels[0] == kernels[1] and "0." in kernels[0][0]
    assert "equal, bit for bit: True" in printed.lines
    assert any(line.startswith("not initialized on cpu: ") and "cpu(0)" in
               line for line in printed.lines)
    check_runs(printed, "resnet18", backend.name)


# -- the exercises ----------------------------------------------------------

def exercises(backend=BACKENDS[-1]):
    """The names of those that run on a backend."""
    tree = ast.parse((ROOT / "examples" / "exercises.py").read_text())
    return [node.name for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.decorator_list
            and (backend == BACKENDS[-1] or node.name not in LARGE)]


def answer(printed, name):
    return printed.out.split(f"=== {name} ")[1].split("\n=== ")[0]


def test_exercises_print_their_answers(backend, run):
    printed = run("exercises", backend.name)
    for name in exercises(backend.name):
        _, _, found = answer(printed, name).partition("\n\n")
        assert re.search(r"\d", found) and len(found.splitlines()) >= 2, name


def test_exercises_that_have_one_right_answer(backend, run):
    printed = run("exercises", backend.name)
    for name, text in (
            ("richer_dependencies", "equal to NumPy in every entry: True"),
            ("multi_device_accuracy", "the same accuracy: True"),
            ("sixteen_devices", "16 copies equal, bit for bit, after two "
                                "steps: True"),
            ("unequal_devices", "12 rows as [8, 4]"),
            ("without_waiting", "the same last loss in all three, bit for "
                                "bit: True")):
        if name in exercises(backend.name):
            assert text in answer(printed, name)
    found = re.search(r"difference of the gradient (\S+)",
                      answer(printed, "unequal_devices"))
    # Sums of a few hundred float64 terms in another order.
    assert float(found.group(1)) < 1e-12


def test_aggregation_counts_the_bytes(backend, run):
    text = answer(run("exercises", backend.name), "aggregation")
    busiest = [float(x) for x in re.findall(r"([\d.]+) MB +[\d.]+ ms", text)]
    # Two devices: 2 (k - 1) n and 4 (k - 1) / k n are both 2 n.
    assert busiest == pytest.approx(
        3 * [2 * 4e-6 * 129_068] + 3 * [2 * 4e-6 * 11_175_818], abs=0.006)


def test_list_loads_no_framework(tmp_path):
    result = python(["-c", (
        "import runpy, sys\n"
        "path = sys.argv[1]\n"
        "sys.path.insert(0, path.rpartition('/')[0])\n"
        "sys.argv[:] = [path, '--list']\n"
        "runpy.run_path(path)\n"
        "assert not {'torch', 'mxnet'} & set(sys.modules)\n"),
        ROOT / "examples" / "exercises.py"], tmp_path, sys.executable)
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] \
        == exercises()


@pytest.mark.parametrize("script, wrong, said", [
    ("exercises", "nonsense", "nonsense"),
    ("multiple_gpus", "--epoch_s 3", "--epoch_s"),
])
def test_a_wrong_argument_is_refused(script, wrong, said, tmp_path):
    result = python([ROOT / "examples" / f"{script}.py", *wrong.split()],
                    tmp_path)
    assert result.returncode == 2 and said in result.stderr
    assert "Traceback" not in result.stderr


# -- the form ---------------------------------------------------------------

@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_is_a_notebook(path):
    """A title, then settings only, which are the options of the script."""
    script = path.read_text()
    marks = [x for x in script.splitlines() if x.startswith("# %%")]
    assert set(marks) == {"# %%", "# %% [markdown]"}
    title, settings, *rest = cells(script)
    assert title[0] == "markdown" and title[1].startswith("# ")
    found = python([path, "--help"], path.parent).stdout
    for line in settings[1].splitlines():
        name, value = re.fullmatch(r"(\w+) = (.+?) +# \S.*", line).groups()
        ast.literal_eval(value)
        assert f"--{name.replace('_', '-')} " in found
    for kind, text in rest:
        assert text
        if kind == "code":
            compile(text, str(path), "exec")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_notebook_in_the_docs_is_that_of_the_script(path):
    """Otherwise: python docs/build_notebooks.py"""
    notebook = json.loads((NOTEBOOKS / f"{path.stem}.ipynb").read_text())
    assert notebook["metadata"]["mgpu"]["sha256"] == digest(path)
    assert [(cell["cell_type"], "".join(cell["source"])) for cell
            in notebook["cells"]] == cells(path.read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_is_neutral(path):
    """No framework is imported and no branch asks which one it is."""
    assert offences(path.read_text()) == []


def test_in_a_notebook_the_kernels_arguments_are_ignored(backend, tmp_path):
    """Cell by cell, with what a Jupyter kernel finds in `sys.argv`; the
    settings are those of the first cell, as a person has edited it."""
    codes = [text for kind, text in cells(
        (ROOT / "examples" / "auto_parallelism.py").read_text())
        if kind == "code"]
    codes[0] = f"backend, devices, out = {backend.name!r}, 'auto', 'out'\n" \
        "size, repeat = 8, 2"
    (tmp_path / "cells.py").write_text(
        "import sys, types\n"
        "sys.modules['ipykernel'] = types.ModuleType('ipykernel')\n"
        "sys.argv[1:1] = ['-f', '/home/me/kernel-1.json']\n"
        "namespace = {}\n"
        f"for cell in {codes!r}:\n"
        "    exec(cell, namespace)\n")
    result = python([tmp_path / "cells.py", "--size", "nonsense"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"2 products of 8 x 8 matrices each, backend {backend.name}" \
        in result.stdout
    assert "the graph: above" in result.stdout
    assert not (tmp_path / "out").exists()      # it was shown, not written
