"""A comparison in the terminal, as a page and as JSON."""
import io
import json
import os
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

import mgpu
from conftest import BACKENDS
from mgpu import parity
from mgpu.parity import page, report
from mgpu.parity.comparison import Result
from mgpu.parity.diagnosis import Cause
from mgpu.parity.forms import Turn
from mgpu.parity.matching import Pair, Plan
from mgpu.parity.measure import Gap
from nets import dense_norm

VOID = {"meta", "br", "link", "img", "input", "hr"}
LONG = "features." + ".".join(f"stage{i}" for i in range(30)) + ".weight"


class Page(HTMLParser):
    """What a page holds; refuses elements that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def compared(epsilon=1e-5, **options):
    rng = np.random.default_rng(0)
    batches = [(rng.random((6, 5)), rng.integers(0, 3, 6).astype("int32"))
               for _ in range(3)]
    return parity.compare(
        lambda: dense_norm(BACKENDS[0], 1e-5),
        lambda: dense_norm(BACKENDS[0], epsilon), batches=batches, devices=2,
        **options)


@pytest.fixture(scope="module")
def different():
    return compared(1e-3)


@pytest.fixture(scope="module")
def same():
    return compared()


def made_up(**changes):
    """A result with what is hard to come by: infinities, long names, zeros,
    markup in a name."""
    wrong = Gap(1, "gradient", LONG, np.inf, np.inf, 2.0, "different", (3, 1),
                1.5, np.nan)
    gaps = [wrong, Gap(2, "gradient", LONG, 0.0, 0.0, 2.0, "same", (), 1.0,
                       1.0),
            Gap(1, "weight", "<script>.weight", 1e-12, 1e-12, 1.0, "same",
                (0,), 1.0, 1.0)]
    side = {"engine": "mxnet 1.9.1", "network": "A & B <i>",
            "devices": ["cpu(0)"]}
    values = dict(
        verdict="different", gaps=gaps, first=wrong,
        plan=Plan("order and shape", [Pair((LONG,), ("fc.weight",),
                                          (Turn((1, 0)),))],
                  {"a": ["scale"], "b": ["offset"]}, False, ["shared in a"]),
        sides={"a": side, "b": side}, losses={"a": [1.0, np.inf],
                                              "b": [1.0, np.nan]},
        settings={"steps": 2, "dtype": "float64", "tolerance": 1e-10,
                  "seed": 3}, causes=[Cause("x", "the [cause]", 0.5)],
        notes=["note <1>"])
    return Result(**{**values, **changes})


def printed(result, width=80, **options):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    report.print_result(result, console, **options)
    return console.file.getvalue()


# -- the page -----------------------------------------------------------------

def check_page(text):
    """What holds for every seen."""
    seen = Page(text)
    assert "http:" not in text and "https:" not in text and "//" not in text
    assert "@import" not in text
    for name, value in seen.attributes:
        if name in ("src", "href", "xlink:href", "action", "poster", "data"):
            assert value.startswith("#"), (name, value)
    ids = [value for name, value in seen.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = re.findall(r'(?:url\(|xlink:href=")#([^)"]*)', text)
    assert set(links) <= set(ids)
    assert not seen.all("script")
    assert seen.all("html")[0]["lang"] == "en"
    charts = seen.all("svg")
    assert charts and all(c["role"] == "img" and len(c["aria-label"]) > 40
                          for c in charts)
    assert len(seen.all("caption")) == len(seen.all("table")) > 0
    for colour in page.VARIABLES:    # else it would be lost in the dark
        assert colour not in text[text.index("<svg"):].lower()
    assert "prefers-color-scheme: dark" in text
    assert "ellipsis" not in text
    assert any(m.get("name") == "viewport" for m in seen.all("meta"))
    return seen


def test_the_page_of_a_difference(different, tmp_path):
    file = tmp_path / "x.html"
    report.write_html(different, file, command="mgpu compare a:a b:b")
    page = check_page(file.read_text(encoding="utf-8"))
    words, first = page.text, different.first
    assert words.index("Different") < words.index("First difference")
    for value in (f"{first.a:.17g}", f"{first.b:.17g}",
                  f"{first.absolute:.3e}", str(list(first.index)),
                  "1e-05 in a, 0.001 in b", "mgpu compare a:a b:b",
                  mgpu.__version__, np.__version__, "cpu(0), cpu(1)",
                  "tolerance 1e-10"):
        assert value in words, value
    assert different.causes and str(different.causes[0]) in words
    for pair in different.plan.pairs:
        assert f"{pair.a[0]} {pair.b[0]} as it is" in words
    for gap in different.worst.values():
        assert f"{gap.relative:.1e}" in words
    captions = [c["aria-label"].partition(":")[0] for c in page.all("svg")]
    assert captions == ["Line chart", "Dot chart", "Line chart"]
    assert os.listdir(tmp_path) == ["x.html"]


def test_a_page_with_infinities_and_markup():
    page = check_page(report.to_html(made_up()))
    assert "<script>" in page.text and "A & B <i>" in page.text
    assert LONG in page.text
    assert "inf" in page.text and "nan" in page.text
    assert "infinite" in page.text      # the upper end of the axis
    assert "transposed to (1, 0)" in page.text
    assert "scale - left as it is" in page.text
    assert "- offset left as it is" in page.text
    assert "no forward pass confirms" in page.text


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_extra_is_named(package, same):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=package) as caught:
            report.to_html(same)
    assert f"pip install {package}" in str(caught.value)


# -- the terminal -------------------------------------------------------------

def in_order(text, *words):
    places = [text.index(word) for word in words]
    assert places == sorted(places), text


def test_the_terminal_shows_the_verdict_first(different):
    words = printed(different)
    assert words.startswith("DIFFERENT (lock-step)\n")
    assert len(words.splitlines()) <= 24
    in_order(words, "on trial: 6 of 6", "First difference\n",
             f"{different.first.a:.17g}", "1e-05 in a, 0.001 in b",
             "Likely cause\n", "make them equal", "--details")
    assert "matched by" not in words    # a cause is known
    assert "The worst of each" not in words and "SGD" not in words
    whole = printed(different, details=True)
    in_order(whole, "SGD", "on trial: 6 of 6", "First difference\n",
             "absolute difference", "First layer whose output differs\n",
             "Likely causes\n  1. ", "The worst of each", "matched by")
    assert "--details" not in whole
    plan = printed(different, plan=True)
    assert "matched by" in plan
    assert "as it is" in plan and "as it is" not in words + whole


def crowded(**changes):
    """What a large network may have: much that was not on trial, and notes."""
    names = [f"'block{i}.weight'" for i in range(500)]
    gap = Gap(1, "gradient", "block3.weight", 0.5, 0.5, 2.0, "different",
              (3, 1), 1.5, 1.0)
    return made_up(gaps=[gap], first=gap, coverage={
        "parameters": [10, 510], "layers_a": [3, 503], "layers_b": [3, 503],
        "not_on_trial": [f"no gradient moved parameters {', '.join(names)}",
                         *(f"1 of 9 rows of 'words{i}' were not reached"
                           for i in range(9))],
        "options": [f"layers '{i}' of a and '{i}' of b: ceil" for i in range(
            9)]},
        notes=["dropout: masks drawn in NumPy",
               *(f"note <{i}>" for i in range(9))],
        causes=[Cause(f"cause {i}", "change line 7", 0.5) for i in range(9)],
        **changes)


@pytest.mark.parametrize("changes", [
    {}, {"verdict": "same", "first": None, "causes": []}],
    ids=["different", "same"])
def test_a_verdict_stays_short(changes):
    result = crowded()
    vars(result).update(changes)
    words, whole = printed(result), printed(result, details=True)
    assert len(words.splitlines()) <= 25, words
    assert max(map(len, words.splitlines())) <= 80
    assert words.splitlines()[-1].startswith("--details shows")
    said = " ".join(words.split())
    assert "not on trial: no gradient moved parameters 'block0.weight', " \
        "'block1.weight', 'block2.weight' and 497 more" in said
    for part in ("not on trial: 7 more", "note: note <2>", "note: 6 more"):
        assert part in said
    for part in ("'block499.weight'", "'words8'", "note: note <8>",
                 "note: dropout: masks"):
        assert part not in said and part in whole
    if result.first is None:
        assert "warning: not reached by this data: 6 more" in said
    else:
        assert "cause 0: change line 7" in said and "cause 8" in whole
        assert "other likely causes: cause 1, cause 2, cause 3 and 5 more" \
            in said
    # in a test's failure there is no option for the rest
    text = str(result)
    assert len(text.splitlines()) <= 16
    assert "'block2.weight' and 497 more" in text and "note: 6 more" in text
    page = check_page(report.to_html(result)).text
    assert "'block499.weight'" in page and "note <8>" in page


def test_a_difference_without_a_cause_says_so():
    result = made_up(causes=[])
    for text in (printed(result), str(result)):
        assert "none that mgpu knows" in text
    result = made_up()
    assert "none that mgpu knows" not in printed(result) + str(result)


def test_options_of_a_layer_whose_input_differs_explain_nothing():
    layers = [{"path": "fc", "kind": "dense", "options": {"flatten": x}}
              for x in (True, False)]
    result = made_up(location={"a": layers[0], "b": layers[1],
                               "inputs_agree": False, "predicting": False})
    assert "its flatten" not in printed(result)
    assert "its flatten" in printed(result, details=True)
    result.location["inputs_agree"] = True
    assert "its flatten" in printed(result)


@pytest.mark.parametrize("changes, words", [
    ({}, "first differ in step 1, in the gradient of " + LONG),
    ({"verdict": "same", "first": None, "gaps": [
        Gap(1, "loss", "", 1e-9, 1e-9, 1.0, "rounding", (), 1.0, 1.0),
        Gap(1, "output", "", 1e-12, 1e-12, 1.0, "same", (), 1.0, 1.0)]},
     "up to a relative 1.0e-12 (1e-10 is tolerated) and 1 larger difference "
     "that rounding explains.")])
def test_the_verdict_in_a_sentence(changes, words):
    assert words in report.sentence(made_up(**changes))


# -- JSON ---------------------------------------------------------------------

def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_json_is_valid_and_whole(different, tmp_path):
    file = tmp_path / "x.json"
    report.write_json(different, file)
    found = json.loads(file.read_text(), parse_constant=no_constant)
    assert found["verdict"] == "different"
    assert len(found["gaps"]) == len(different.gaps)
    assert found["first"]["a"] == different.first.a
    assert found["plan"]["pairs"][0]["a"] == different.plan.pairs[0].a[0]
    assert set(found) == set(different.to_dict())


def test_json_has_text_for_what_it_does_not_know(tmp_path):
    file = tmp_path / "x.json"
    report.write_json(made_up(settings={
        "x": np.float32(0.5), "y": np.array([1, 2]), "z": -np.inf}), file)
    found = json.loads(file.read_text(), parse_constant=no_constant)
    assert found["first"]["absolute"] == "Infinity"
    assert found["first"]["b"] == found["losses"]["b"][1] == "NaN"
    assert found["settings"] == {"x": 0.5, "y": [1, 2], "z": "-Infinity"}
    assert found["plan"]["pairs"][0]["axes"] == [1, 0]
