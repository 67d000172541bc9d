"""Equal pairs, drawn at random, are equal; a mistake in one is named.

``python -m tests.ports 1000`` draws more of them.
"""
import numpy as np
import pytest
import torch

from mgpu.parity.result import FLOAT32

from . import nets
from .nets import FAMILIES
from .pairs import Pair, draw, outputs


@pytest.mark.parametrize("seed", range(12))
def test_equal_pairs_are_equal(seed):
    """One of several families, each written in two ways."""
    names = list(FAMILIES)
    p, done = draw(names[5 * seed % len(names)], seed)
    x = p.batches[0][0]
    for net in (p.a, p.b):      # the rewritings are right
        assert np.allclose(outputs(net, x), outputs(p.task.net, x), 1e-6, 1e-8)
    result, _ = p.compare()
    assert result.verdict in ("same", FLOAT32), (result, p.options, done)


# -- mistakes -----------------------------------------------------------------

def changed(name, kind=None, **options):
    """Another kind or other options of a node of the port."""
    def plant(p):
        p.b = p.b.change(name, kind, **options)
    return plant


def no_mask(p):
    p.a = p.a if any(n.kind == "mask" for n in p.a) else p.a.after(
        "scale1", "mask", "mask1").rewire("mask1", "scale1", "x")
    p.b = p.a.without("mask1")


def other_momentum(p):
    p.a = p.a.change("batch_norm1", momentum=0.75)
    p.b = p.b.change("batch_norm1", momentum=0.25)


def bgr(p):
    p.sides["b"]["prepare"] = lambda X, y: (X[:, ::-1].copy(), y)


#: kind: family, the change of the port, the named cause (or None), the stage,
#: and the place. `parity/faults.py` has a fault for each cause.
MISTAKES = {
    "padding": ("vgg", changed("conv1", pad=0), "layer options", "layer",
                "conv1"),
    "kernel flipped": ("convnet", changed("conv2", flipped=True), None,
                       "layer", "conv2"),
    "mask missing": ("attention", no_mask, "attention mask", "layer",
                     "F.softmax after dense3"),
    "momentum for 1 - momentum": (
        "residual", other_momentum, "statistics momentum", "statistic",
        "batch_norm1.running_mean"),
    "layer frozen": ("inception", changed("conv1", frozen_weight=True),
                     "frozen parameter", "gradient", "conv1.weight"),
    "BGR for RGB": ("vgg", bgr, "input preparation", "layer", "conv1"),
    # Zeros in other places: of a part of what is joined, for example.
    "activation missing": ("inception", changed("act3", "nothing"), None,
                           "layer", "max_pool2"),
    "channels last before flatten": (
        "convnet", changed("flatten1", "channels_last"), "dense flatten",
        "layer", "dropout1"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_seen_and_named(kind):
    """No other cause is named first, dropout masks among them."""
    family, plant, cause, stage, place = MISTAKES[kind]
    torch.manual_seed(0)
    task = nets.draw(family, 0)
    p = Pair(task, task.net, task.net,
             task.batches(np.random.default_rng(0), 7))
    plant(p)
    result, _ = p.compare()
    assert result.verdict == "different", result
    assert (result.first.stage, result.first.name) == (stage, place), result
    assert [c.name for c in result.causes][:1] == [cause] * (
        cause is not None), result
