"""Executes the examples and writes them as notebooks, docs/examples/*.ipynb.

    python docs/build_notebooks.py [NAME ...]       # default: all examples

Each example runs cell by cell, with its own settings, in a fresh process. A
cell's outputs are what it printed and the images that it wrote. Needs mgpu
with torch and matplotlib. A notebook notes the hash of its script; the tests
say when the script has changed since.
"""
import contextlib
import hashlib
import io
import json
import os
import platform
import sys
import tempfile
from base64 import b64encode
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOKS = Path(__file__).resolve().parent / "examples"


def scripts():
    """The examples that are notebooks: scripts with cells."""
    return [path for path in sorted(EXAMPLES.glob("*.py"))
            if path.read_text(encoding="utf-8").startswith("# %%")]


def cells(script):
    """The cells of a script: [("markdown" or "code", text)]."""
    found = []
    for part in script.split("# %%")[1:]:
        kind, _, text = part.partition("\n")
        if kind.strip() == "[markdown]":
            text = "\n".join(line[2:] for line in text.splitlines())
        found.append(("markdown" if kind.strip() else "code", text.strip()))
    return found


def digest(path):
    """The hash of a script that its notebook notes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def execute(path):
    """What each code cell printed, and the PNG files that it wrote."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv[:] = [str(path)]
    namespace = {"__name__": "__main__", "__file__": str(path)}
    found, pictures = [], {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for kind, text in cells(path.read_text(encoding="utf-8")):
            if kind == "markdown":
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(text, str(path), "exec"), namespace)
            written = {file.name: file.read_bytes()
                       for file in sorted(Path(folder, "out").glob("*.png"))}
            new = [data for name, data in written.items()
                   if pictures.get(name) != data]
            pictures = written
            found.append((printed.getvalue().replace(folder + "/", ""), new))
        os.chdir(EXAMPLES)
    return found


def notebook(path, outputs):
    """The notebook of a script, in Jupyter's format 4.5."""
    outputs, made = iter(outputs), []
    for number, (kind, text) in enumerate(cells(
            path.read_text(encoding="utf-8"))):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {},
                "source": text.splitlines(keepends=True)}
        if kind == "code":
            printed, pictures = next(outputs)
            cell.update(execution_count=None, outputs=[
                {"output_type": "stream", "name": "stdout",
                 "text": printed.splitlines(keepends=True)}
            ] * bool(printed) + [
                {"output_type": "display_data", "metadata": {},
                 "data": {"image/png": b64encode(data).decode()}}
                for data in pictures])
        made.append(cell)
    import mgpu
    with mgpu.using_backend("torch") as engine:
        versions = f"Python {platform.python_version()}, mgpu " \
            f"{mgpu.__version__}, torch {engine.version}"
    return {"cells": made, "nbformat": 4, "nbformat_minor": 5, "metadata": {
        "kernelspec": {"display_name": "Python 3", "language": "python",
                       "name": "python3"},
        "language_info": {"name": "python"},
        "mgpu": {"source": path.name, "sha256": digest(path),
                 "executed_with": versions}}}


def main():
    os.environ["MGPU_BACKEND"] = "torch"
    chosen = [path for path in scripts() if path.stem in sys.argv[1:]] \
        or scripts()
    NOTEBOOKS.mkdir(exist_ok=True)
    for path in chosen:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            outputs = process.submit(execute, path).result()
        file = NOTEBOOKS / f"{path.stem}.ipynb"
        file.write_text(json.dumps(notebook(path, outputs), indent=1) + "\n",
                        encoding="utf-8")
        print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
