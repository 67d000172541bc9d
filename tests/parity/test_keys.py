"""Outputs with keys: dicts and named tuples."""
from collections import namedtuple

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from mgpu import parity
from mgpu.parity import trace
from nets import bricks, torch_block

RNG = np.random.default_rng(0)
BATCHES = [(RNG.normal(size=(5, 4)), RNG.normal(size=(5, 3)))
           for _ in range(2)]
Both = namedtuple("Both", "mu var")
Turned = namedtuple("Turned", "var mu")
#: what the two heads of a network become, and whether that is the same as
#: {"mu": m, "var": v}: yes, with a note, or no
FORMS = {
    "equal": (lambda m, v: {"mu": m, "var": v}, "same"),
    "another order": (lambda m, v: {"var": v, "mu": m}, "same"),
    "named tuple": (lambda m, v: Turned(v, m), "same"),
    "tuple": (lambda m, v: (m, v), "same"),
    "tuple in another order": (lambda m, v: (v, m), "different"),
    "each other's": (lambda m, v: {"mu": v, "var": m}, "different"),
    "each other's in another order": (
        lambda m, v: {"var": m, "mu": v}, "different"),
    "each other's in a named tuple": (lambda m, v: Both(v, m), "different"),
    "other keys": (lambda m, v: {"mean": m, "log_var": v}, "note"),
    "other keys in another order": (
        lambda m, v: {"log_var": v, "mean": m}, "different"),
    "one other key": (lambda m, v: {"log_var": v, "mu": m}, "note"),
    "one missing": (lambda m, v: {"mu": m}, "different"),
}


def sum_of(output, y):
    """A loss to which all outputs are alike."""
    entries = list(output.values() if isinstance(output, dict) else output)
    return ((sum(entries[1:], entries[0]) - y) ** 2).mean(1)


def two_heads(engine, form):
    def make():
        with mgpu.using_backend(engine) as backend:
            base, dense = bricks(backend)

        class Net(base):
            def __init__(self):
                super().__init__()
                self.mu, self.var = dense(4, 3), dense(4, 3)

            def forward(self, x):
                return form(self.mu(x), self.var(x))
        return Net()
    return make


def judged(result):
    if result.verdict == "same" and any("other keys" in note
                                        for note in result.notes):
        return "note"
    return result.verdict


@pytest.mark.parametrize("name, engine", [
    (name, BACKENDS[i % len(BACKENDS)]) for i, name in enumerate(FORMS)])
def test_outputs_are_compared_by_key(name, engine, tmp_path):
    """Also with a loss that would not tell, and from a trace. Each backend
    is the second model or the first."""
    form, verdict = FORMS[name]
    options = {"batches": BATCHES, "loss": sum_of, "devices": 2}
    a, b = two_heads("mxnet", FORMS["equal"][0]), two_heads(engine, form)
    file = str(tmp_path / "a.safetensors")
    trace.record(b, file=file, **options)
    pair = (a, b) if engine == "mxnet" else (b, a)
    for result in (parity.compare(*pair, **options),
                   trace.compare_trace(file, a, loss=sum_of)):
        assert judged(result) == verdict, result


@pytest.mark.parametrize("name", FORMS)
def test_outputs_of_an_own_step_are_compared_by_key(name):
    """A step that calls the network, without any loss that is returned."""
    form, verdict = FORMS[name]

    def own(net):
        import torch
        moves = torch.optim.SGD(net.parameters(), lr=0.125)

        def step(x, y):
            moves.zero_grad()
            sum_of(net(x), y).mean().backward()
            moves.step()
        return step, [moves]
    a, b = (two_heads("torch", one) for one in (form, FORMS["equal"][0]))
    result = parity.compare(a, b, batches=BATCHES, step_a=own, step_b=own)
    assert judged(result) == verdict, result


def test_keys_of_a_pass_are_those_of_its_mode():
    """A network may return other things where it does not train."""
    def net(turned):
        def forward(net, x):
            m, v = net.mu(x), net.var(x)
            own = [("m", m), ("v", v)] if net.training \
                else [("a", m), ("b", v), ("c", m * v)]
            return dict(own[::-1] if turned else own)
        return torch_block(lambda nn: {"mu": nn.Linear(4, 3),
                                       "var": nn.Linear(4, 3)}, forward)
    result = parity.compare(net(False), net(True), batches=BATCHES,
                            loss=sum_of)
    assert result.same and not result.notes, result
