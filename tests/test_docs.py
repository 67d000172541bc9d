"""Every code block of README, the guide and the examples' page runs, with the
output that the page shows; links lead somewhere; generated parts are current.

The Python blocks of a page run in order in one namespace, in a process of
their own, on each backend (once where they choose a backend themselves). Each
shell block runs as pasted, in a scratch folder with the examples, as after
activating the environment, with the ``python`` and ``mgpu`` of `forked`. A
``text`` block is the output of the block before it; ``...`` stands for
anything, and below ``<!-- numbers vary -->`` any number for any other.
``<!-- not run: reason -->`` excuses the block below it.
"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import forked
from conftest import BACKENDS
from mgpu.gluon_io import script
from mgpu.utils import environment

ROOT = Path(__file__).resolve().parent.parent
GUIDE = [*sorted((ROOT / "docs" / "getting-started").glob("*.md")),
         *sorted((ROOT / "docs" / "guide").glob("*.md")),
         ROOT / "docs" / "limitations.md"]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *GUIDE]
BLOCK = re.compile(r"(?:^<!-- (?:not run: ([^\n]+)|(numbers vary)) -->\n)?"
                   r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: blocks that cannot run in a test (a GPU, a download, minutes)
MOST_NOT_RUN = 9


class Block(NamedTuple):
    language: str
    text: str
    line: int               # of its first line, from 1
    excuse: str | None
    output: str | None      # what the page shows
    numbers_vary: bool = False


def blocks(page):
    """The blocks of a page that run, and those that are excused."""
    source, found, end = page.read_text(encoding="utf-8"), [], -1
    for match in BLOCK.finditer(source):
        excuse, vary, language, text = match.groups()
        line = source.count("\n", 0, match.start(4)) + 1
        if language == "diff" or page.name == "habits.md":
            continue    # tests/test_migration.py, tests/test_habits.py
        if language == "text":
            assert found and not source[end:match.start()].strip(), \
                f"{page.name}:{line}: not directly below what prints it"
            found[-1] = found[-1]._replace(output=text,
                                           numbers_vary=bool(vary))
        else:
            assert language in ("python", "sh"), f"{page.name}:{line}"
            found.append(Block(language, text, line, excuse, None))
        end = match.end()
    return found


def check_output(page, block, printed):
    """The output is what the page shows, if it shows any."""
    if block.output is None:
        return

    def tidy(text):
        if block.numbers_vary:      # and with them the widths of columns
            text = re.sub(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]\d+)?", "7", text)
            text = re.sub(r"\s+|━+|─+", " ", text)
        return "\n".join(map(str.strip, text.strip().splitlines()))
    parts = tidy(block.output).split("...")
    assert any(part.strip() for part in parts), "it would equal any output"
    assert re.fullmatch(".*?".join(map(re.escape, parts)), tidy(printed),
                        re.DOTALL), \
        f"{page.name}:{block.line} shows\n{block.output}and prints\n{printed}"


#: Runs blocks, [[line, text]], and prints what each has printed.
RUNNER = """
import contextlib, io, json, sys
page, blocks = json.load(sys.stdin)
namespace, printed = {"__name__": "__main__"}, []
for line, text in blocks:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile("\\n" * (line - 1) + text, page, "exec"), namespace)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def environment_of_a_person(**variables):
    """The variables of a shell with the environment activated."""
    own = {k: v for k, v in os.environ.items() if k not in (
        "MGPU_BACKEND", "MGPU_DATA", "MGPU_STRICT_DEVICES")}
    path = forked.folder(), Path(sys.executable).parent, own["PATH"]
    return {**own, "PATH": ":".join(map(str, path)), **variables}


def of(language):
    """(page, its blocks that run in this language), where there are any; only
    pages whose backends are there."""
    for page in PAGES:
        todo = [b for b in blocks(page) if b.language == language
                and b.excuse is None]
        code = "".join(b.text for b in todo)
        named = {"mxnet": "mxnet|gluon_nets|both", "torch": "torch|both"}
        if todo and all(name in BACKENDS or not re.search(pattern, code)
                        for name, pattern in named.items()):
            yield page, todo


def runs():
    for page, todo in of("python"):
        # a call, or networks of one framework
        chooses = any(re.search(
            r"^[^#]*\b(set|using)_backend\(|^import (torch|mxnet)\b", b.text,
            re.MULTILINE) for b in todo)
        for name in [""] if chooses else BACKENDS:
            yield pytest.param(page, todo, name,
                               id=f"{page.stem}-{name}".strip("-"))


@pytest.mark.parametrize("page, todo, engine", list(runs()))
def test_python_blocks_run(page, todo, engine, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [forked.python(), "-W", "ignore", "-c", RUNNER], cwd=tmp_path,
        env=environment_of_a_person(MGPU_BACKEND=engine), text=True,
        input=json.dumps([str(page), [(b.line, b.text) for b in todo]]),
        capture_output=True)
    assert done.returncode == 0, done.stderr
    for block, printed in zip(todo, json.loads(done.stdout.splitlines()[-1]),
                              strict=True):
        check_output(page, block, printed)


@pytest.mark.parametrize("page, todo", [pytest.param(
    *pair, id=str(pair[0].relative_to(ROOT))) for pair in of("sh")])
def test_shell_blocks_run(page, todo, tmp_path):
    for name in ("examples", "scripts", "setup.cfg"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in todo:
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text], cwd=tmp_path,
            timeout=300, capture_output=True, text=True,
            env=environment_of_a_person())
        # 1: `mgpu lint` lists something, or `mgpu compare` found a
        # difference, which the page shows
        expected = (1,) if "mgpu lint" in block.text else (0, 1) \
            if "DIFFERENT" in (block.output or "") else (0,)
        assert result.returncode in expected, \
            f"{page.name}:{block.line}\n{result.stdout}{result.stderr}"
        check_output(page, block, result.stdout)


def test_few_blocks_are_not_run():
    excused = [f"{page.name}:{b.line} {b.excuse}" for page in PAGES
               for b in blocks(page) if b.excuse]
    assert len(excused) <= MOST_NOT_RUN, excused


def test_another_output_is_seen():
    for shown, printed in (("loss ...\n", "acc 0.5\n"), ("a\n", "a\nb\n"),
                           ("a\n...\nc\n", "a\nb\n"),
                           ("...\n", "anything\n")):
        with pytest.raises(AssertionError):
            check_output(PAGES[0], Block("sh", "", 1, None, shown), printed)


def test_the_table_of_variables_is_current():
    page = ROOT / "docs" / "guide" / "environment.md"
    assert environment.table() in page.read_text(encoding="utf-8")


def test_the_table_of_gluons_lines_is_that_of_the_code():
    page = ROOT / "docs" / "guide" / "migrating.md"
    assert script.table() in page.read_text(encoding="utf-8")


def anchors(page):
    """The headings of a page as the site and GitHub name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", t.lower())).strip("-")
            for t in titles}


def broken_links(page):
    text = re.sub(r"^```.*?^```$|`[^`\n]+`(?!\])", "",
                  page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" not in link and not (target.exists() and (
                not anchor or anchor in anchors(target))):
            yield f"{page.relative_to(ROOT)}: {link}"


def test_links_lead_somewhere():
    pages = [*PAGES[:2], *sorted((ROOT / "docs").rglob("*.md"))]
    assert [link for page in pages for link in broken_links(page)] == []


def test_results_of_studies_are_summaries():
    """The commands on these pages write the rest, into out/."""
    for name in ("conversion", "sources", "internals/twins",
                 "internals/departures"):
        text = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
        assert len(text.splitlines()) <= 60
        assert "python -m studies." in text


def test_the_search_loads_nothing_from_the_network():
    """The offline plugin takes a script from unpkg.com where none is named."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "  - offline" in text
    script, = re.findall(r"^  polyfills: \[(.*iframe-worker.*)\]", text, re.M)
    assert (ROOT / "docs" / script).is_file()
