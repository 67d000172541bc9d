"""A sample of the generated ports and of the equal pairs; the judge judged.

``python -m tests.ports --mistakes --seeds 2`` takes them all.
"""
import pytest

from . import equal, judge
from .mistakes import MISTAKES, Mistake
from .nets import FAMILIES

#: kinds of several stages, each in one network
SAMPLE = [("another activation", "transformer"), ("padding", "vgg"),
          ("epsilon of batch norm", "residual"),
          ("kernel flipped", "convnet"), ("label smoothing", "mlp"),
          ("mask missing", "attention"),
          ("momentum for 1 - momentum", "squeeze"),
          ("class weights", "tied"), ("layer frozen", "inception"),
          ("learning rate", "embedded"), ("no decay of biases", "densenet"),
          ("BGR for RGB", "separable")]


@pytest.mark.parametrize("kind, family", SAMPLE)
def test_a_mistake_is_seen_and_named(kind, family):
    row = judge.judge(MISTAKES[kind], family, 0)
    assert row.verdict == "different", row.text
    assert row.layer and row.cause == "right", row


@pytest.mark.parametrize("kind, family", [
    ("activation missing", "inception"),    # of a part of what is joined
    ("channels last before flatten", "convnet")])
def test_zeros_in_other_places_are_not_masks(kind, family):
    row = judge.judge(MISTAKES[kind], family, 0)
    assert row.verdict == "different" and row.layer, row.text
    assert "dropout masks" not in row.causes, row.text


@pytest.mark.parametrize("seed", range(12))
def test_equal_pairs_are_equal(seed):
    """One of several families, each written in two ways."""
    names = list(FAMILIES)
    row = equal.judged(names[5 * seed % len(names)], seed)
    assert row.verdict in judge.SAME, row.text


def test_the_kinds_are_those_that_were_promised():
    bare = [m for m in MISTAKES.values() if not m.causes]
    assert len(bare) >= 15 and len(MISTAKES) >= 90
    assert {tuned for tuned, _ in FAMILIES.values()} == {True, False}


@pytest.mark.parametrize("kind, family", SAMPLE[2:4])
def test_the_judge_wants_the_layer_and_the_cause(kind, family):
    """A port without its mistake, and a right answer to another question."""
    true = MISTAKES[kind]
    harmless = Mistake(kind, lambda p: p.at(p.a.nodes[0].name), true.causes)
    row = judge.judge(harmless, family, 0)
    assert row.verdict in judge.SAME
    assert (row.layer, row.cause) == (False, "missing")

    def elsewhere(p):
        true.plant(p)
        p.places = {p.task.net.nodes[-1].name} - p.places
    row = judge.judge(Mistake(kind, elsewhere, ("another",)), family, 0)
    assert row.layer is False
    assert row.cause == ("wrong" if row.causes else "missing")
