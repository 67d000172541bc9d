"""Lines of source of at most 88 columns."""
import re

WIDTH = 88
_OPEN, _CLOSE = "([{", ")]}"


def fit(text: str, indent: int = 0, end: str = "") -> list[str]:
    """The lines of a statement; brackets are opened, one part to a line,
    where it does not fit into one, or where a chain has three parts."""
    space = " " * indent
    if len(space) + len(text) + len(end) <= WIDTH and not _long(text):
        return [space + text + end]
    found = _outer(text)
    if found is None:
        return [space + text + end]
    start, stop = found
    parts = split(text[start + 1:stop])
    if not parts:
        return [space + text + end]
    lines = [space + text[:start + 1]]
    loop = _loop(text[start + 1:stop])
    if loop is not None:
        lines += fit(loop[0], indent + 4) + fit(loop[1], indent + 4)
    elif not _long(text) and indent + 4 + stop - start - 1 <= WIDTH:
        lines.append(f"{space}    {text[start + 1:stop]}")
    else:
        # A comma would make a tuple of what brackets only hold together.
        grouped = text[start] == "(" and len(parts) == 1 and (
            text[stop - 1] != ",") and not re.search(r"[\w\])]$", text[:start])
        for part in parts:
            lines += fit(part, indent + 4, "" if grouped else ",")
    return [*lines, space + text[stop:] + end]


def _long(text: str) -> bool:
    at = text.find("nn.Sequential(")
    if at < 0 or "super().__init__" in text[:at]:
        return text.startswith("super().__init__(") and "nn." in text
    start = at + len("nn.Sequential(")
    return len(split(text[start:_match(text, start - 1)])) > 2


def _loop(text: str) -> tuple[str, str] | None:
    """A generator's expression and its ``for``."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in _OPEN) - (c in _CLOSE)
        if depth == 0 and text.startswith(" for ", i):
            return text[:i], text[i + 1:]
    return None


def _match(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        if depth == 0:
            return i
    raise ValueError(text)


def _outer(text: str) -> tuple[int, int] | None:
    """The brackets to open: the last ones on the outermost level."""
    i, found = 0, None
    while i < len(text):
        if text[i] in _OPEN:
            stop = _match(text, i)
            if stop > i + 1:
                found = i, stop
            i = stop
        i += 1
    return found


def split(text: str) -> list[str]:
    """At the commas of the outermost level."""
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in _OPEN) - (c in _CLOSE)
        if c == "," and depth == 0:
            parts.append(text[last:i].strip())
            last = i + 1
    rest = text[last:].strip()
    return [*parts, rest] if rest else parts


_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


def loops(texts: list[str]) -> list[tuple[str, int]]:
    """Items of a chain, with how many each stands for: three alike, or whose
    one number grows evenly, are a loop."""
    found = []
    i = 0
    while i < len(texts):
        n = next((k for k in range(i, len(texts)) if texts[k] != texts[i]),
                 len(texts)) - i
        if n >= 3:
            found.append((f"*({texts[i]} for _ in range({n}))", n))
            i += n
            continue
        n, text = _growing(texts[i:])
        if n >= 3:
            found.append((text, n))
            i += n
        else:
            found.append((texts[i], 1))
            i += 1
    return found


def _growing(texts: list[str]) -> tuple[int, str]:
    form = _NUMBER.sub("#", texts[0])
    rows = []
    for text in texts:
        if _NUMBER.sub("#", text) != form:
            break
        rows.append([int(x) for x in _NUMBER.findall(text)])
    if len(rows) < 3:
        return 1, ""
    moving = [k for k in range(len(rows[0])) if rows[0][k] != rows[1][k]]
    if len(moving) != 1:
        return 1, ""
    k = moving[0]
    step, n = rows[1][k] - rows[0][k], 2
    while n < len(rows) and [a - b for a, b in zip(rows[n], rows[n - 1])] == [
            step if j == k else 0 for j in range(len(rows[0]))]:
        n += 1
    place = list(_NUMBER.finditer(texts[0]))[k]
    text = texts[0][:place.start()] + "n" + texts[0][place.end():]
    first = rows[0][k]
    return n, f"*({text} for n in range({first}, {first + n * step}, {step}))"
