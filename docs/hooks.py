"""What the site is made of besides the pages in docs/.

Pages of the repository outside docs/, README first, and the notebooks of
docs/examples become pages of the site.
"""
import json
import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
#: page of the site: file of the repository
OUTSIDE = {"index.md": "README.md",
           "examples/index.md": "examples/README.md",
           "contributing.md": "CONTRIBUTING.md",
           "changelog.md": "CHANGELOG.md"}


def on_files(files, config):
    for page, file in OUTSIDE.items():
        if (ROOT / file).exists():
            text = (ROOT / file).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=re.sub(
                r"\[([^]]+)\]\(([^):]+)\)",
                lambda m, page=page, file=file: _link(m, page, file), text)))
    for path in sorted((ROOT / "docs" / "examples").glob("*.ipynb")):
        files.append(File.generated(
            config, f"examples/{path.stem}.md",
            content=_page(json.loads(path.read_text(encoding="utf-8")))))
    return files


def _link(match, page, file):
    """A link between files as one between pages; plain text where the site
    has no such page."""
    path, hash_, anchor = match[2].partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
    known = {own: found for found, own in OUTSIDE.items()}
    if not path:
        return match[0]
    if target not in known and not target.startswith("docs/"):
        return match[1]
    target = known.get(target, target.removeprefix("docs/"))
    target = os.path.relpath(target.replace(".ipynb", ".md"),
                             posixpath.dirname(page) or ".")
    return f"[{match[1]}]({target}{hash_}{anchor})"


def _page(notebook):
    """A notebook as Markdown."""
    about, parts = notebook["metadata"]["mgpu"], []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
            else:
                parts.append('<p><img alt="figure" src="data:image/png;base64,'
                             f'{output["data"]["image/png"]}"></p>')
    parts.insert(1, f"*Executed with {about['executed_with']} on logical CPU "
                 f"devices. The script is `examples/{about['source']}`. Times "
                 "are those of one run on a machine with other work.*")
    return "\n\n".join(parts) + "\n"
