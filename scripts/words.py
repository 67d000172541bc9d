"""The check of vocabulary: python scripts/words.py [PATH ...]

Looks for words that have a standard term in documents, comments, docstrings
and messages, and prints the term. Exit status 1 if there are some. Names are
not checked: code between backquotes, the fields of an f-string, and strings
that hold only names.
"""
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

#: not written anew yet, and files of former versions
EXEMPT = ("CHANGELOG.md", "mgpu/parity/", "mgpu/gluon_io/",
          "mgpu/backends/_torch/gluon/", "tests/parity/", "tests/gluon_io/",
          "docs/guide/parity", "docs/internals/parity.md", "tests/files/",
          "tests/test_old_files.py", "scripts/words.py")
#: pattern -> the term
WORDS = {
    r"(?<!layout )(?<![\"'])(?<!mx\.)(?<!MXNet's )(?<!--)\bengines?\b"
    r"(?! itself|\.name| : str)":
        "backend; for communication: communication backend",
    r"\b(optim|initial|normal|synchron|serial|regular|minim)is(e|ed|er|ers|"
    r"es|ing|ation)\b": "American spelling: -ize",
    r"\brefus(e|es|ed|al|als|ing)\b": "raise; not supported; reject",
    r"\b(is|are|was|were) not there\b|\bthere (is|are|was|were) none\b":
        "is missing; does not exist; not available",
    r"\bwanted\b": "expected; requested",
    r"\bof (the|a) user's\b|\bof one's own\b|\bof ours\b|\bof theirs\b":
        "the user's ...; user-defined",
    r"\bfirst weights\b|\bweights are drawn\b": "initial weights; initialized",
    r"\b(is|are|was|be|been) told\b|\btells? (whether|which|what|how|that)\b":
        "reports; shows; determines",
    r"\bmeet(s|ings?)?\b|(?<!not |get )(?<!\| )\bmet\b":
        "all_gather; synchronize",
    r"\bjudges?\b": "loss; check",
    r"\bvoid\b": "invalid",
    r"\bpictures?\b(?!\.py)": "image",
    r"\bslips?\b": "bug",
    r"\bon trial\b": "covered",
    r"(?<![./])\b(twins?|departures?)\b(?!\.\w)": "model pairs; deviations",
    r"\b(one|much|enough|no) room\b|\brooms?\b|\bhouses?\b":
        "capacity; packages, layout",
    r"\bnarrow(er)? (numbers|training|dtypes?)\b": "reduced precision",
    r"\b(go|goes|went|going) on\b": "continue; resume",
    r"\bthat which\b|\bsuch as these\b": "a noun",
    r"\bby hand\b": "manually; in a custom loop",
    r"\b(a|the|each|whole|global|last|first) batch's rows\b|\brows of (a|the|"
    r"each|one|that|this) (batch|device|rank|process)\b": "examples",
    r"\bnobody\b|\bsomebody\b|\banybody\b": "no caller; a noun",
    r"\bwords that you know\b": "API equivalents",
}
#: a code span, or a field of an f-string
CODE = re.compile(r"`[^`]*`|\{[^{}]*\}")
#: a string of names
NAMES = re.compile(r"""[bfru]*["'][\w-]+(, \w+)*["']""", re.IGNORECASE)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a document; of Python source the comments and strings."""
    parts = [(1, path.read_text(encoding="utf-8"))]
    if path.suffix == ".py":
        parts = [(token.start[0], token.string) for token in
                 tokenize.generate_tokens(io.StringIO(parts[0][1]).readline)
                 if token.type in (tokenize.COMMENT, tokenize.STRING)
                 and not NAMES.fullmatch(token.string)]
    for first, part in parts:
        for number, line in enumerate(part.splitlines(), first):
            yield number, CODE.sub("", line)


def main(arguments: list[str]) -> int:
    files = subprocess.run(
        ["git", "ls-files", *(arguments or ["."])], capture_output=True,
        text=True, check=True).stdout.split("\n")
    count = 0
    for name in filter(None, files):
        if name.startswith(EXEMPT) or not name.endswith((".py", ".md",
                                                         ".sh")):
            continue
        for line, text in texts(Path(name)):
            for pattern, term in WORDS.items():
                for found in re.finditer(pattern, text, re.IGNORECASE):
                    count += 1
                    print(f"{name}:{line}: {found[0]!r}: {term}")
    print(f"{count} words to replace" if count else "vocabulary: all good")
    return bool(count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
