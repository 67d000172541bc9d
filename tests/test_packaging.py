"""The sdist and the wheel: what is in them, and that the wheel works outside
of the checkout, in environments that hold only what its extras bring."""
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

import mgpu
from conftest import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
#: what an sdist has beyond the package: the tests and the site need it
ROOMS = ("benchmarks", "docs", "examples", "scripts", "studies", "tests")
PAPERS = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE",
          "MANIFEST.in", "PKG-INFO", "README.md", "mkdocs.yml",
          "pyproject.toml", "pytest_mgpu.py", "setup.cfg"}
BUILD = "import sys, setuptools.build_meta as backend\n" \
        "getattr(backend, 'build_' + sys.argv[1])(sys.argv[2])"


def run(*command, cwd, **environment):
    """Output of a process that knows nothing of the checkout."""
    env = {k: v for k, v in os.environ.items()
           if not k.startswith(("MGPU_", "PYTHON"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, text=True,
                          env={**env, **environment}, timeout=300,
                          capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(folder):
    return {path.relative_to(folder).as_posix()
            for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the checkout: a build leaves files where it runs."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    return shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "out"))


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", BUILD, "sdist", folder, cwd=source)
    packed, = folder.iterdir()
    with tarfile.open(packed) as archive:
        archive.extractall(folder, **(      # not in 3.11.3 and older
            {"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    assert packed.name == f"mgpu_gluon-{mgpu.__version__}.tar.gz"
    return folder / packed.name[:-len(".tar.gz")]


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel that is made from the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-c", BUILD, "wheel", folder, cwd=sdist)
    made, = folder.iterdir()
    return made


def test_an_sdist_has_what_the_tests_and_the_site_need(source, sdist):
    found = files(sdist)
    for room in ("mgpu", *ROOMS):
        expected = {f"{room}/{name}" for name in files(source / room)}
        assert len(expected) > 2 and expected <= found, expected - found
    assert {name for name in found if "/" not in name} == PAPERS
    assert {name.split("/")[0] for name in found if "/" in name} == {
        "mgpu", "mgpu_gluon.egg-info", *ROOMS}


def test_a_wheel_is_the_whole_package_and_nothing_else(source, wheel):
    found = {name for name in zipfile.ZipFile(wheel).namelist()
             if ".dist-info/" not in name}
    assert found == {"pytest_mgpu.py", *(
        f"mgpu/{name}" for name in files(source / "mgpu"))}
    assert {"mgpu/py.typed", "mgpu/data/digits.npz",
            "mgpu/parity/report.html.j2"} <= found


def test_metadata(wheel):
    (at,) = (x.parent for x in zipfile.Path(wheel).iterdir()
             if x.name.endswith(".dist-info"))
    found = importlib.metadata.PathDistribution(
        next(x for x in at.iterdir() if x.name.endswith(".dist-info")))
    about = found.metadata
    assert (about["Name"], about["Version"], about["Author"],
            about["License-Expression"]) == (
        "mgpu-gluon", mgpu.__version__, "the mgpu developers", "Apache-2.0")
    assert about["Description"].startswith("# mgpu\n")
    assert set(about.get_all("Provides-Extra")) == {
        "mxnet", "mxnet-cu112", "torch", "cli", "plot", "data", "report",
        "trace", "twins", "docs", "test", "all"}
    assert {(x.group, x.name) for x in found.entry_points} == {
        ("console_scripts", "mgpu"), ("pytest11", "pytest_mgpu")}


# -- environments of their own ------------------------------------------------

def brought(dist, extras, found):
    """Adds to `found` the names of all that pip would install for `dist`."""
    for text in dist.requires or ():
        need = Requirement(text)
        if need.marker and not any(need.marker.evaluate({"extra": extra})
                                   for extra in (*extras, "")):
            continue
        same = need.name == dist.metadata["Name"]   # mgpu-gluon[report]
        if same or (need.name, *need.extras) not in found:
            found.add((need.name, *need.extras))
            brought(dist if same else importlib.metadata.distribution(
                need.name), need.extras, found)
    return {name for name, *_ in found} - {dist.metadata["Name"]}


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A function that makes a virtual environment with the wheel and, by
    links to what is installed here, with what the named extras need; its
    folder of programs."""
    def make(*extras):
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        programs, = (x for x in folder.iterdir() if x.name == "bin")
        run(sys.executable, "-m", "pip", "--python", programs / "python",
            "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
        packages, = folder.glob("lib/python*/site-packages")
        ours, = importlib.metadata.distributions(path=[str(packages)])
        for name in brought(ours, extras, set()):
            dist = importlib.metadata.distribution(name)
            for top in {file.parts[0] for file in dist.files} - {
                    "..", "__pycache__"}:
                link = packages / top
                if not link.exists():   # namespaces have several owners
                    link.symlink_to(dist.locate_file(top))
        return programs
    return make


TRAIN = """
    import importlib.util, json, pathlib, sys
    import mgpu

    assert pathlib.Path(mgpu.__file__).is_relative_to(sys.prefix)
    assert mgpu.available_backends() == [sys.argv[1]]
    assert importlib.util.find_spec(sys.argv[2]) is None
    devices = mgpu.list_devices(2)
    batches, _ = mgpu.datasets.digits(batch_size=4, dtype="float64")
    net = mgpu.initialize(mgpu.models.lenet(), devices, dtype="float64",
                          init=mgpu.initializers.Xavier(),
                          sample=next(iter(batches))[0])
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 2 ** -5})
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    steps = [mgpu.train_batch(X, y, net, loss, trainer)
             for (X, y), _ in zip(batches, range(3))]
    print(json.dumps([[mgpu.to_numpy(x).tolist() for x in step]
                      for step in steps]))
"""


def test_the_wheel_trains_with_one_engine_only(environment, tmp_path):
    """Three steps in an environment that lacks the other engine; where both
    are installed, with the same losses."""
    losses = [json.loads(run(
        environment(name) / "python", "-c", textwrap.dedent(TRAIN), name,
        {"mxnet": "torch", "torch": "mxnet"}[name], cwd=tmp_path))
        for name in BACKENDS]
    for found in losses:
        assert np.shape(found) == (3, 2, 2)     # steps, devices, rows
        np.testing.assert_allclose(found, losses[0], rtol=1e-10)


def test_the_wheel_without_extras(environment, tmp_path):
    programs = environment()
    for command in ([programs / "mgpu"], [programs / "python", "-m", "mgpu"]):
        assert mgpu.__version__ in run(*command, "--version", cwd=tmp_path)


@pytest.mark.parametrize("engine", BACKENDS[-1:])
def test_the_extra_cli_is_enough_for_the_commands(environment, engine,
                                                  tmp_path):
    """`trace record` and `parity --report` ask for packages of their own."""
    command = environment(engine, "cli") / "mgpu"
    file = {"torch": "torch_nets.py", "mxnet": "gluon_nets.py"}[engine]
    net = f"{ROOT / 'examples' / 'port' / file}:lenet"
    shape = ["--input", "1x28x28", "--classes", "10", "--steps", "2"]
    run(command, "trace", "record", net, *shape, "-o", "a.trace",
        cwd=tmp_path)
    run(command, "parity", "a.trace", net, "--report", "page.html",
        cwd=tmp_path)
    assert "<svg" in (tmp_path / "page.html").read_text(encoding="utf-8")
