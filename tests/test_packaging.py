"""The sdist and the wheel: what is in them. (``scripts/check_wheel.sh`` runs
the wheel outside of the checkout, with what its extras bring.)"""
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mgpu

ROOT = Path(__file__).resolve().parents[1]
#: what an sdist has beyond the package: the tests and the site need it
FOLDERS = ("benchmarks", "docs", "examples", "scripts", "studies", "tests")
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
    for name in ("mgpu", *FOLDERS):
        expected = {f"{name}/{x}" for x in files(source / name)}
        assert len(expected) > 2 and expected <= found, expected - found
    assert {name for name in found if "/" not in name} == PAPERS
    assert {name.split("/")[0] for name in found if "/" in name} == {
        "mgpu", "mgpu_gluon.egg-info", *FOLDERS}


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
