"""The command line and what `mgpu doctor` finds."""
import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import mgpu
from conftest import BACKENDS
from mgpu import backends as registry, cli
from mgpu.cli.reproduce import CHAPTERS
from mgpu.tools import doctor
from mgpu.utils import files

SCHEMA = {"backend": str, "devices": list, "batch_size": int, "lr": float,
          "seed": int, "dtype": str, "data": dict, "train_loss": list,
          "test_acc": list, "seconds": list, "images_per_second": list,
          "loss_per_step": list}
SMALL = ["--limit", "24", "--batch-size", "8", "--epochs", "2",
         "--init-scale", "0.1", "--lr", "0.0625"]


#: what each command's ``--help`` prints, by its name
HELP = Path(__file__).parent / "files" / "help"


def mgpu_command(*arguments):
    return CliRunner().invoke(cli.cli, arguments, prog_name="mgpu")


def refused(result):
    """The message of a command that must fail with one line and status 2."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("Error: "), result.stderr
    return lines[0]


@pytest.fixture
def patch():
    """Undone before conftest looks for leaks."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def absent(patch):
    """A backend whose framework is not installed."""
    patch.setitem(registry.ENTRIES, "absent", registry.Entry(
        "mgpu.backends._absent", "absent_framework",
        "absent"))
    return "absent"


@pytest.fixture
def default(patch):
    """A default backend that is there, also where tests run on torch only."""
    patch.setenv("MGPU_BACKEND", BACKENDS[0])


# -- reproduce ----------------------------------------------------------------

def test_a_run_for_each_number_of_devices(backend, tmp_path):
    file, plot = tmp_path / "runs.json", tmp_path / "runs.png"
    result = mgpu_command("reproduce", "lenet", "--backend", backend.name,
                          "--devices", "1,2", *SMALL, "-o", str(file),
                          "--output", str(plot))
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert set(report) == {"chapter", "versions", "runs"}
    assert report["chapter"] == "lenet"
    assert report["versions"][backend.name] == backend.version
    assert {"python", "numpy", "mgpu"} <= set(report["versions"])
    assert [run["devices"] for run in report["runs"]] == [
        ["cpu(0)"], ["cpu(0)", "cpu(1)"]]
    for run in report["runs"]:
        assert {k: type(run[k]) for k in SCHEMA} == SCHEMA
        assert run["backend"] == backend.name
        assert run["data"]["name"] == "digits" and run["data"]["train"] == 24
        assert len(run["loss_per_step"]) == 2 * 3
        assert len(run["test_acc"]) == len(run["seconds"]) == 2
        line = re.escape(f"on [{', '.join(run['devices'])}]")
        assert re.search(r"^test acc: \d\.\d\d, \d+\.\d sec/epoch " + line
                         + "$", result.stdout, re.MULTILINE)
    assert "1.00x" in result.stdout     # the table: speed-up over one device
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["runs.json", "runs.png"]
    assert os.stat(file).st_mode & 0o777 == 0o644


def test_reproduce_auto_parallelism(backend, tmp_path):
    file, plot = tmp_path / "runs.json", tmp_path / "runs.svg"
    result = mgpu_command("reproduce", "auto-parallelism", "--backend",
                          backend.name, "--size", "16", "--repeat", "2",
                          "-o", str(file), "-o", str(plot))
    assert result.exit_code == 0, result.output
    run, = json.loads(file.read_text())["runs"]
    assert run["devices"] == ["cpu(0)", "cpu(1)"]   # or gpu, where there are
    assert (run["size"], run["repeat"]) == (16, 2)
    assert len(run["timings"]) == 6
    assert re.search(r"^GPU1 & GPU2: \d+\.\d{4} sec$", result.stdout,
                     re.MULTILINE)
    assert b"<svg" in plot.read_bytes()


if {"mxnet", "torch"} <= set(BACKENDS):     # these compare the two
    def test_both_backends_one_after_the_other(tmp_path):
        file = tmp_path / "runs.json"
        result = mgpu_command("reproduce", "lenet", "--backend", "both",
                              "--devices", "1,2", *SMALL, "--dtype",
                              "float64", "-o", str(file))
        assert result.exit_code == 0, result.output
        runs = json.loads(file.read_text())["runs"]
        assert [(r["backend"], len(r["devices"])) for r in runs] == [
            ("mxnet", 1), ("mxnet", 2), ("torch", 1), ("torch", 2)]
        lines = [line for line in result.stdout.splitlines()
                 if line.startswith("mxnet against torch on [cpu(0)")]
        assert len(lines) == 2
        for line in lines:
            # 1e-10 is what the project promises; measured: below 1e-14
            assert float(re.search(r"loss (\S+) ", line).group(1)) < 1e-10


@pytest.mark.parametrize("arguments, words", [
    (["--devices", "1,cpu:0"], "numbers or devices, not both"),
    (["--devices", "2,2"], "each number once"),
    (["--devices", "0"], "from 1 to 1024"),
    (["--devices", "gpu:99"], "gpu(99) is not available"),
    (["--lr", "1e30"], "loss must be finite"),
    (["--data", "nowhere"], "unknown data set; received 'nowhere'"),
    (["--size", "8"], "--size is not an option of lenet"),
    (["-o", "no/such/folder/x.svg"], "the folder of --output must exist"),
    (["-o", "x.bmp"], "--output takes a file that ends in .json, .png, .svg; "
     "received 'x.bmp'"),
    (["-o", "b.json"], "--output takes one file with all results; received "
     "'new.json' and 'b.json'"),
])
def test_errors_are_one_line_and_status_2(default, arguments, words, tmp_path,
                                          patch):
    patch.chdir(tmp_path)
    options = ["--limit", "8", "--batch-size", "4", "--devices", "1",
               "--epochs", "2", "-o", "new.json"]
    result = mgpu_command("reproduce", "lenet", *options, *arguments)
    assert words in refused(result)
    assert os.listdir(tmp_path) == [], "nothing is written"


@pytest.mark.parametrize("code, status, words", [
    ("raise SystemExit(0)", 2, "sys.exit("),
    ("import sys; sys.exit('done')", 2, "__name__"),
    ("raise KeyboardInterrupt", 130, "Aborted!")])
def test_a_script_that_ends_the_program_is_no_answer(tmp_path, code, status,
                                                     words):
    """Its status would read as one: 0 is "the same"."""
    script = tmp_path / "script.py"
    script.write_text(f"def net():\n    raise NotImplementedError\n{code}\n")
    result = mgpu_command("compare", f"{script}:net", f"{script}:net",
                          "--input", "6", "--classes", "3")
    assert result.exit_code == status and words in result.stderr


def test_finished_runs_are_kept_when_a_later_one_fails(backend, tmp_path,
                                                       patch):
    lenet = CHAPTERS["lenet"]

    def fails_on_two(devices, **options):
        if len(devices) == 2:
            raise FloatingPointError("the loss must be finite")
        return lenet(devices, **options)
    patch.setitem(CHAPTERS, "lenet", fails_on_two)
    file = tmp_path / "runs.json"
    refused(mgpu_command("reproduce", "lenet", "--backend", backend.name,
                         *SMALL, "-o", str(file)))
    run, = json.loads(file.read_text())["runs"]
    assert run["devices"] == ["cpu(0)"]


def test_json_without_nan_whole_or_not_at_all(tmp_path):
    file = tmp_path / "x.json"
    files.write_json(str(file), {"loss": 1.0})
    for bad in ({"loss": float("nan")}, {"loss": object()}):
        with pytest.raises((ValueError, TypeError)):
            files.write_json(str(file), bad)
    assert json.loads(file.read_text()) == {"loss": 1.0}
    assert os.listdir(tmp_path) == ["x.json"]


# -- starting -----------------------------------------------------------------

def python_m_mgpu(*arguments, without=()):
    """`python -m mgpu` in a process that lacks some packages."""
    return subprocess.run(
        [sys.executable, "-c", "import runpy, sys; "
         f"sys.modules.update(dict.fromkeys({without!r})); "
         "runpy.run_module('mgpu', run_name='__main__')", *arguments],
        capture_output=True, text=True, timeout=120, env={
            **os.environ, "MGPU_BACKEND": BACKENDS[0], "PYTHONPATH":
            os.path.dirname(os.path.dirname(mgpu.__file__))})


#: all that is optional, but for the backends
OPTIONAL = ("click", "rich", "tqdm", "matplotlib", "jinja2", "safetensors",
            "pooch")


def test_version_and_doctor_need_numpy_only():
    done = python_m_mgpu("--version", without=OPTIONAL)
    assert (done.returncode, done.stdout, done.stderr) == (
        0, f"mgpu, version {mgpu.__version__}\n", "")
    done = python_m_mgpu("doctor", without=OPTIONAL)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{BACKENDS[0]} (default): loads" in done.stdout


@pytest.mark.parametrize("without, arguments", [
    (OPTIONAL, ["--help"]), (("rich",), ["compare", "a", "b"])])
def test_a_missing_package_is_one_line(without, arguments):
    done = python_m_mgpu(*arguments, without=without)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (f"Error: the command line needs {without[0]}. Run "
                           "pip install click rich tqdm.\n")


def test_help_loads_no_backend():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from mgpu import cli\n"
         "cli.cli(['--help'], standalone_mode=False)\n"
         "sys.exit(bool({'torch', 'mxnet'} & set(sys.modules)))"],
        capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name in ("bench", "doctor", "compare", "lint", "reproduce", "trace"):
        assert f"\n  {name} " in done.stdout


def help_texts(command=cli.cli, *names):
    """What ``--help`` prints, 80 columns wide, of a command and of those that
    are inside it."""
    result = CliRunner().invoke(cli.cli, [*names, "--help"], prog_name="mgpu",
                                terminal_width=80)
    assert result.exit_code == 0, result.output
    yield " ".join(["mgpu", *names]), result.stdout
    for inner in getattr(command, "list_commands", lambda _: [])(None):
        yield from help_texts(command.get_command(None, inner), *names, inner)


def test_help_texts():
    """After a change that is meant: ``python tests/test_cli.py`` renews the
    files. Look at their difference."""
    stored = {file.stem: file.read_text("utf-8") for file in HELP.iterdir()}
    texts = dict(help_texts())
    assert texts.keys() == stored.keys()
    for name, text in texts.items():
        assert text == stored[name], name
        assert "\\b" not in text


# -- doctor -------------------------------------------------------------------

def finding(report, words):
    found = [f["level"] for f in report["findings"] if words in f["text"]]
    assert found, report["findings"]
    return found[0]


def test_doctor_lists_every_backend(default):
    report = doctor.diagnose()
    rows = {row["name"]: row for row in report["backends"]}
    assert set(rows) == {"mxnet", "torch"}
    for name in BACKENDS:
        with mgpu.using_backend(name) as engine:
            assert rows[name] == {
                "name": name, "loads": True, "version": engine.version,
                "gpus": engine.num_gpus(), "problem": None, "cure": None}
            assert report["versions"][name] == engine.version
    assert report["default"] == BACKENDS[0]
    assert report["cpu_cores"] >= 1 and report["threads_per_device"] >= 1
    assert doctor.healthy(report)


def test_the_doctor_says_why_a_backend_is_missing(absent, default):
    report = doctor.diagnose()
    row = report["backends"][-1]
    assert row["name"] == absent and not row["loads"]
    assert "_absent" in row["problem"] and "\n" not in row["problem"]
    assert row["cure"] == "pip install absent"
    assert report["versions"][absent] is None
    assert doctor.healthy(report), "the default is another one"
    result = mgpu_command("doctor", "--format", "json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["default"] == BACKENDS[0]
    assert found["backends"][-1]["cure"] == "pip install absent"


def test_a_default_that_does_not_load_is_an_error(absent, patch):
    patch.setenv("MGPU_BACKEND", absent)
    report = doctor.diagnose()
    assert finding(report, "'absent', does not load") == "error"
    assert not doctor.healthy(report)
    result = mgpu_command("doctor")
    assert result.exit_code == 1 and "pip install absent" in result.stdout


@pytest.mark.parametrize("name, value, words, level", [
    ("MGPU_BACKEND", "jax", "received 'jax'", "error"),
    ("MGPU_THREADS_PER_DEVICE", "0",
     "must be a whole number, 1 or more; received '0'", "error"),
    ("MGPU_THREADS_PER_DEVICE", "4096", "more than the", "warning"),
    ("MGPU_TREADS", "2", "MGPU_TREADS is set, and nothing reads it",
     "warning"),
    *[("MXNET_CPU_TEMP_COPY", "4", "mgpu's value, 96", "warning"),
      ("MXNET_ENGINE_TYPE", "NaiveEngine", "tested without", "warning")
      ] * ("mxnet" in BACKENDS)])
def test_settings(default, patch, name, value, words, level):
    patch.setenv(name, value)
    report = doctor.diagnose()
    assert finding(report, words) == level
    assert doctor.healthy(report) == (level != "error")
    if name in doctor.VARIABLES:
        assert report["variables"][name]["value"] == value


if "mxnet" in BACKENDS:
    def test_mxnet_that_was_imported_earlier(default, patch):
        from mgpu.backends._mxnet import framework
        patch.setattr(framework, "IMPORTED_EARLIER", True)
        patch.setenv("OMP_NUM_THREADS", "2")
        assert finding(doctor.diagnose(), "OMP_NUM_THREADS is 2") == "warning"
        patch.delenv("OMP_NUM_THREADS")
        patch.setenv("MXNET_OMP_MAX_THREADS", "1")    # that is safe
        assert not any("imported earlier" in f["text"]
                       for f in doctor.diagnose()["findings"])


def test_links_and_special_files_stay_what_they_are(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    files.write_json(link, [1])
    assert link.is_symlink() and json.loads(target.read_text()) == [1]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_json(pipe, [2])
    assert json.loads(os.read(reader, 99)) == [2] and pipe.is_fifo()
    files.write_arrays(pipe, {"format": "x"}, {"a": np.arange(3)})
    (tmp_path / "copy").write_bytes(os.read(reader, 9999))
    assert files.read_arrays(
        tmp_path / "copy", ["x"], "a file",
        lambda header, arrays: arrays["a"].tolist()) == [0, 1, 2]
    (tmp_path / "copy").unlink()
    os.close(reader)
    with pytest.raises(IsADirectoryError, match="expected a file name"):
        files.write_json(tmp_path, [1])
    assert sorted(tmp_path.iterdir()) == [link, pipe, target]


@pytest.mark.parametrize("write", [
    lambda file: files.write_json(file, [1]),
    lambda file: files.write_arrays(file, {"format": ""}, {"a": np.ones(99)})],
    ids=["json", "arrays"])
def test_a_file_that_cannot_be_written_is_named(tmp_path, patch, write):
    file = tmp_path / "none" / "file"
    with pytest.raises(FileNotFoundError, match="the folder of a file must "
                       f"exist; received '{file}'. Make '{file.parent}' "):
        write(file)
    for wrong in (None, b"name", 1, io.BytesIO()):
        with pytest.raises(TypeError, match="a path names a file; received "
                           + type(wrong).__name__):
            write(wrong)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    patch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=re.escape(
            f"[Errno 28] No space left on device: '{tmp_path / 'file'}'")):
        write(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_file_has_the_mode_that_open_gives_it(tmp_path):
    """What the umask leaves; that of a file that was there."""
    file = tmp_path / "file.json"
    before = os.umask(0o027)
    try:
        files.write_json(file, [1])
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o640
    file.chmod(0o604)
    files.write_json(file, [2])
    assert file.stat().st_mode & 0o777 == 0o604


@pytest.mark.parametrize("moment", ["open", "write", "chmod", "replace"])
def test_ctrl_c_leaves_no_part_of_a_file(tmp_path, patch, moment):
    """And is what the caller sees, also where the file is in place."""
    file = tmp_path / "file.json"

    def press(*arguments, really=os.replace):
        if moment == "replace":
            really(*arguments)
        raise KeyboardInterrupt
    file.touch()
    if moment in ("chmod", "replace"):
        patch.setattr(os, moment, press)
    with pytest.raises(KeyboardInterrupt), files.part_of(file) as part:
        if moment == "open":
            press()
        with open(part, "w") as stream:
            stream.write("[1]")
            if moment == "write":
                press()
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text() == ("[1]" if moment == "replace" else "")


if __name__ == "__main__":
    for _name, _text in help_texts():
        (HELP / f"{_name}.txt").write_text(_text, "utf-8")
