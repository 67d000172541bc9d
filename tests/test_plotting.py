"""Figures hold the values that they are given, write the files that they are
asked for, and leave the user's matplotlib alone."""
import os
import struct
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from mgpu.backends.device import cpu
from mgpu.tools.plotting import Animator, plot_graph, plot_runs, plot_timings

PNG = b"\x89PNG\r\n\x1a\n"


def width(path):
    """Pixels, from the header of a PNG file."""
    data = path.read_bytes()
    assert data[:8] == PNG and data[12:16] == b"IHDR"
    return struct.unpack(">I", data[16:20])[0]


RUN = {"backend": "torch", "devices": ["cpu:0"], "train_loss": [2.0, 1.0],
       "test_acc": [0.5, 0.75], "images_per_second": [100.0, 50.0],
       "batch_size": 256, "lr": 0.2, "dtype": "float32", "seed": 0}
ROW = {"backend": "torch", "name": "GPU1 time", "seconds": 0.5}


# -- matplotlib stays the user's --------------------------------------------

def test_without_matplotlib_a_figure_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (Animator, plot_graph, lambda: plot_runs([RUN], "x.png"),
                 lambda: plot_timings([ROW], "x.png")):
        with pytest.raises(ImportError, match="Run pip install matplotlib."):
            draw()


def test_settings_of_matplotlib_are_left_alone(monkeypatch, tmp_path):
    """pyplot and IPython are not imported: it would be an error here."""
    import matplotlib
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setitem(sys.modules, "IPython", None)
    before = dict(matplotlib.rcParams.copy())
    with Animator(file=tmp_path / "a.png") as animator:
        animator.add(1, 2)
    plot_graph(tmp_path / "b.svg")
    assert dict(matplotlib.rcParams.copy()) == before


# -- Animator ---------------------------------------------------------------

def test_animator_keeps_the_values():
    animator = Animator("epoch", "value", legend=["loss", "accuracy"])
    assert animator.X == [] and animator.Y == []
    animator.add(1, (2.5, None))
    animator.add(2, [np.float32(1.5), np.array(0.25)])
    animator.add((3, 4), np.array([1.0, 0.5]))
    animator.add((None, 5), (7, 0.75))
    assert animator.X == [[1, 2, 3], [2, 4, 5]]
    assert animator.Y == [[2.5, 1.5, 1.0], [0.25, 0.5, 0.75]]
    for line, x, y in zip(animator.axes.lines, animator.X, animator.Y):
        assert list(line.get_xdata()) == x and list(line.get_ydata()) == y


def test_animator_takes_arrays_of_the_backend(backend):
    animator = Animator()
    animator.add(1, [backend.put(np.array([0.5]), cpu(1)),
                     backend.put(np.array([2.0]), cpu(0))])
    assert animator.Y == [[0.5], [2.0]]


def test_file_is_written_after_an_error(tmp_path):
    path = tmp_path / "curve.png"
    with pytest.raises(RuntimeError, match="mine"):
        with Animator(file=path) as animator:
            animator.add(1, 1)
            path.unlink()
            raise RuntimeError("mine")
    assert path.read_bytes()[:8] == PNG


def test_save_writes_elsewhere(tmp_path):
    animator = Animator()
    animator.add(1, 1)
    animator.save(tmp_path / "a.PNG")
    animator.save(str(tmp_path / "b.svg"))
    assert (tmp_path / "a.PNG").read_bytes()[:8] == PNG
    assert b"<svg" in (tmp_path / "b.svg").read_bytes()
    with pytest.raises(ValueError, match="save needs a file"):
        animator.save()


@pytest.mark.parametrize("x, y, error, text", [
    (3, (1, 2), ValueError, "1 x and 2 y for 3 lines"),
    ((3, 4), (1, 2, 3), ValueError, "2 x and 3 y for 3 lines"),
    (3, (1, 2, "high"), TypeError, "received 'high'"),
    ("abc", (1, 2, 3), TypeError, "received 'abc'"),
    (3, (1, 2, [3, 4]), TypeError, "a point needs a number"),
])
def test_bad_points_are_refused(x, y, error, text):
    animator = Animator(legend=["a", "b", "c"])
    animator.add(1, (1, 2, 3))
    with pytest.raises(error, match=text):
        animator.add(x, y)
    assert animator.X == [[1], [1], [1]] and animator.Y == [[1], [2], [3]]


@pytest.fixture
def notebook(monkeypatch):
    """A kernel's IPython, as far as it is used: `shown` lists what a cell
    displays, `updated` what then takes its place."""
    seen = SimpleNamespace(shown=[], updated=[])

    def display(image, display_id=False):
        seen.shown.append(image)
        if display_id:
            return SimpleNamespace(update=seen.updated.append)

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel="a kernel")
    module.display, module.Image = display, lambda data: data
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    seen.leave = lambda: setattr(ipython, "get_ipython", lambda: None)
    return seen


def test_notebook_shows_one_figure_that_changes(notebook):
    animator = Animator()
    for x in range(3):
        animator.add(x, x * x)
    assert len(notebook.shown) == 1 and len(notebook.updated) == 2
    images = notebook.shown + notebook.updated
    assert all(image[:8] == PNG for image in images)
    assert len(set(images)) == 3
    plot_graph()
    assert len(notebook.shown) == 2


def test_ipython_without_a_kernel_shows_nothing(notebook):
    notebook.leave()
    Animator().add(1, 1)
    plot_graph()
    assert notebook.shown == []


# -- files that raise -------------------------------------------------------

@pytest.mark.parametrize("draw", [
    lambda file: Animator(file=file), lambda file: Animator().save(file),
    lambda file: plot_runs([RUN], file),
    lambda file: plot_timings([ROW], file), plot_graph])
def test_bad_files_are_refused(draw, tmp_path):
    for name in ("curve.jpg", "curve"):
        with pytest.raises(ValueError, match="PNG or SVG; received"):
            draw(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="folder of a figure"):
        draw(tmp_path / "nowhere" / "curve.png")
    assert os.listdir(tmp_path) == []


# -- plot_runs --------------------------------------------------------------

def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_runs_hold_the_values(tmp_path):
    twice = {**RUN, "devices": ["cpu:0", "cpu:1"], "test_acc": [0.25, None],
             "images_per_second": [200.0, 100.0]}
    figure = plot_runs([RUN, twice], tmp_path / "runs.png", title="LeNet")
    accuracy, loss, speed = figure.axes
    drawn = [(list(line.get_xdata()), list(line.get_ydata()))
             for line in accuracy.lines]
    assert drawn == [([1, 2], [0.5, 0.75]), ([1], [0.25])]
    assert [list(line.get_ydata()) for line in loss.lines] == [[2, 1], [2, 1]]
    # Two epochs of n images: 2n images in n/100 + n/50 seconds.
    assert [bar.get_height() for bar in speed.patches] == pytest.approx(
        [2 / (1 / 100 + 1 / 50), 2 / (1 / 200 + 1 / 100)], rel=1e-15)
    assert [t.get_text() for t in speed.texts] == ["1.00×", "2.00×"]
    assert labels(figure) == ["torch, 1 device", "torch, 2 devices"]
    assert width(tmp_path / "runs.png") == 1800
    assert accuracy.get_xlabel() == loss.get_xlabel() == "epoch"
    assert accuracy.get_ylabel() == "test accuracy"
    assert loss.get_ylabel() == "training loss"
    assert speed.get_ylabel() == "images per second"


def test_seeds_are_thin_lines_with_a_bold_mean(tmp_path):
    seeds = [{**RUN, "seed": s, "test_acc": acc} for s, acc in enumerate(
        ([0.25, 0.5], [0.5, 0.5], [0.75, 0.5, 1.0]))]
    accuracy = plot_runs(seeds, tmp_path / "runs.svg").axes[0]
    *thin, mean = accuracy.lines
    assert [list(t.get_ydata()) for t in thin] == [s["test_acc"]
                                                   for s in seeds]
    assert list(mean.get_ydata()) == [0.5, 0.5]     # to the shortest
    assert all(t.get_linewidth() < mean.get_linewidth() for t in thin)
    text = (tmp_path / "runs.svg").read_text(encoding="utf-8")
    assert "the mean of 3 seeds" in text


def test_a_missing_field_is_named(tmp_path):
    with pytest.raises(ValueError, match="needs a run; received none"):
        plot_runs([], tmp_path / "runs.png")
    for name in ("backend", "devices", "train_loss", "test_acc",
                 "images_per_second"):
        run = {k: v for k, v in RUN.items() if k != name}
        with pytest.raises(ValueError, match=f"needs the field '{name}'"):
            plot_runs([RUN, run], tmp_path / "runs.png")
    assert os.listdir(tmp_path) == []


# -- plot_timings -----------------------------------------------------------

NAMES = ("GPU1 time", "GPU2 time", "GPU1 & GPU2", "Run on GPU1",
         "Copy to CPU", "Run on GPU1 and copy to CPU")


def some_timings(*engines):
    seconds = (0.5, 0.25, 0.5, 1.0, 0.125, 1.25)
    return [{"backend": e, "name": n, "seconds": s * (k + 1)}
            for k, e in enumerate(engines) for n, s in zip(NAMES, seconds)]


@pytest.mark.parametrize("engines", [("mxnet",), ("mxnet", "torch")])
def test_timings_mark_the_sum_next_to_the_joint_one(tmp_path, engines):
    figure = plot_timings(some_timings(*engines), tmp_path / "t.png",
                          title="Automatic parallelism")
    axes, = figure.axes
    assert [t.get_text() for t in axes.get_yticklabels()] == list(NAMES)
    texts = [t.get_text() for t in axes.texts]
    assert texts[:6] == ["0.5000 sec", "0.2500 sec",
                         "0.5000 sec (sum 0.7500)", "1.0000 sec",
                         "0.1250 sec", "1.2500 sec (sum 1.1250)"]
    assert len(texts) == 6 * len(engines)
    marks = {line.get_xdata()[0] for line in axes.lines}
    assert marks == {k * s for k in range(1, len(engines) + 1)
                     for s in (0.75, 1.125)}
    assert labels(figure) == list(engines)
    assert width(tmp_path / "t.png") == 1800


# -- plot_graph -------------------------------------------------------------

def test_graph_is_written(tmp_path):
    plot_graph(tmp_path / "graph.png")
    assert width(tmp_path / "graph.png") == 1800
    plot_graph(tmp_path / "graph.svg")
    text = (tmp_path / "graph.svg").read_text(encoding="utf-8")
    for label in ("GPU 1", "CPU", "GPU 2", "layer 1 backward", "loss",
                  "copy slice 2", "copy between devices"):
        assert label in text
