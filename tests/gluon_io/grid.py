"""Grids of MXNet's operators: what MXNet 1.9.1 computes, kept in a file.

    python -m tests.gluon_io --grid

writes tests/files/gluon/operators.json anew, by the real MXNet. Of each array
it keeps the shape and three weighted sums: an element that is off moves them.
"""
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FILE = Path(__file__).parents[1] / "files" / "gluon" / "operators.json"


class Input(NamedTuple):
    """An input of an operator, drawn for each case by itself.

    Attributes
    ----------
    shape : tuple of int
    draw : callable
        ``draw(rng, shape)``: its values.
    kept : str
        "arg" or "aux" for an array of the file, "" for an input of the
        network.
    moves : bool
        Whether its gradient is compared.
    dtype : str
        "" for that of the case.
    """

    shape: tuple[int, ...]
    draw: Callable[..., np.ndarray] = lambda rng, shape: rng.normal(size=shape)
    kept: str = ""
    moves: bool = True
    dtype: str = ""


def below(n: int) -> Callable[..., np.ndarray]:
    """Whole numbers from 0 on."""
    return lambda rng, shape: rng.integers(0, n, shape).astype(float)


def positive(rng: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers from 0.5 to 1.5."""
    return rng.uniform(0.5, 1.5, shape)


class Case(NamedTuple):
    """One operator, with attributes and inputs.

    Attributes
    ----------
    before : tuple of (str, dict, tuple of int)
        Operators that come first, with what enters them: the inputs of the
        case by their numbers, then one another.
    takes : tuple of int
        What enters the operator itself; all inputs by default.
    """

    op: str
    attributes: dict[str, str]
    inputs: tuple[Input, ...]
    train: bool = True
    dtype: str = "float64"
    outputs: int = 1
    tolerance: float = 1e-12
    before: tuple[tuple[str, dict[str, str], tuple[int, ...]], ...] = ()
    takes: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        said = [f"{k}={v}" for k, v in self.attributes.items()]
        said += ["x".join(map(str, x.shape)) or "()" for x in self.inputs]
        said += [] if self.train else ["predicts"]
        said += [] if self.dtype == "float64" else [self.dtype]
        said += [f"after {op} {own}" for op, own, _ in self.before[-1:]]
        said += [f"takes {self.takes}"] if self.takes else []
        return f"{self.op} {' '.join(said)}"

    def arrays(self) -> list[np.ndarray]:
        """The inputs: the same each time, others for each case."""
        rng = np.random.default_rng(zlib.crc32(self.key.encode()))
        return [np.asarray(x.draw(rng, x.shape), x.dtype or self.dtype)
                for x in self.inputs]

    def names(self) -> list[str]:
        """A parameter is called as in Gluon, where layers share nothing."""
        return [f"layer0_{i}" if x.kept else f"data{i}"
                for i, x in enumerate(self.inputs)]

    def graph(self) -> str:
        """As ``-symbol.json``."""
        nodes = [{"op": "null", "name": name, "inputs": []}
                 for name in self.names()]
        count = len(nodes)
        own = (self.op, self.attributes, self.takes or tuple(range(count)))
        nodes += [{"op": op, "name": f"layer0_op{i}", "attrs": attributes,
                   "inputs": [[j, 0, 0] for j in takes]}
                  for i, (op, attributes, takes) in enumerate(
                      (*self.before, own))]
        n = len(nodes) - 1
        return json.dumps({
            "nodes": nodes, "arg_nodes": list(range(count)),
            "node_row_ptr": list(range(n + 2)),
            "heads": [[n, k, 0] for k in range(self.outputs)],
            "attrs": {"mxnet_version": ["int", 10901]}})


def grid(ops: str, attributes: dict[str, list[Any]],
         inputs: list[tuple[Input, ...]], family: str = "{}",
         **options: Any) -> Iterator[Case]:
    """Every combination of values of the attributes and inputs, for each of
    these operators, whose names are in `family`; None leaves an attribute
    out."""
    for op, *values in itertools.product(ops.split(), *attributes.values()):
        given = {k: str(v) for k, v in zip(attributes, values)
                 if v is not None}
        for shapes in inputs:
            yield Case(family.format(op), given, shapes, **options)


def weights(like: np.ndarray, k: int) -> np.ndarray:
    """Those of the loss, and of the sums that are kept."""
    return np.cos(k + np.arange(like.size)).reshape(like.shape)


def summed(x: np.ndarray) -> list[Any]:
    """What is kept of an array. What stands for infinity is 1000."""
    x = np.asarray(x, "float64")
    x = np.where(abs(x) > 1e30, 1000 * np.sign(x), x)
    return [list(x.shape), *(float((x * weights(x, k)).sum())
                             for k in (1, 2, 3)), float(abs(x).max(initial=0))]


def by_mxnet(case: Case) -> list[Any]:
    """Outputs, gradients of the inputs and what became of the auxiliary
    arrays, summed. MXNet's error where it has none."""
    import mxnet as mx
    with mx.util.np_shape(case.op.startswith(("_np", "_npi", "_npx"))):
        names, arrays = case.names(), case.arrays()
        given = {n: mx.nd.array(x, dtype=x.dtype)
                 for n, x in zip(names, arrays)}
        aux = {n: given.pop(n) for n, x in zip(names, case.inputs)
               if x.kept == "aux"}
        # RNN drops in a prediction too where gradients are asked for
        moving = {n for n, x in zip(names, case.inputs)
                  if case.train and x.moves and n in given}
        grads = {n: mx.nd.zeros_like(given[n]) for n in moving}
        bound = mx.sym.load_json(case.graph()).bind(
            mx.cpu(), given, args_grad=grads, aux_states=aux,
            grad_req={n: "write" if n in moving else "null" for n in given})
        outputs = [x.asnumpy() for x in bound.forward(is_train=case.train)]
        if case.train and moving:
            bound.backward([mx.nd.array(weights(x, 4), dtype=x.dtype)
                            for x in outputs])
        return [*map(summed, outputs), *(summed(grads[n].asnumpy())
                                         for n in names if n in moving),
                *(summed(x.asnumpy()) for x in aux.values())]


def by_torch(case: Case, folder: Path) -> list[Any]:
    """The same, by `mgpu.from_gluon`."""
    import mgpu
    names, arrays = case.names(), case.arrays()
    (folder / "op-symbol.json").write_text(case.graph())
    mgpu.gluon_io.save_params(folder / "op.params", {
        f"{x.kept}:{n}": array for n, x, array in zip(names, case.inputs,
                                                      arrays) if x.kept})
    return by_net(case, mgpu.from_gluon(folder / "op-symbol.json",
                                        folder / "op.params"))


def by_net(case: Case, net: Any) -> list[Any]:
    """The same, by a network of torch's that has `gluon_names`."""
    import torch
    names, arrays = case.names(), case.arrays()
    net.train(case.train)
    entering = {n: torch.from_numpy(array).requires_grad_(x.moves)
                for n, x, array in zip(names, case.inputs, arrays)
                if not x.kept}
    found = net(*entering.values())
    outputs = list(found) if isinstance(found, tuple) else [found]
    if case.train and any(y.requires_grad for y in outputs):
        sum((y * torch.from_numpy(weights(y.detach().numpy(), 4)).to(y)).sum()
            for y in outputs).backward()
    own = {net.gluon_names[key].partition(":")[2]: x for key, x in [
        *net.named_parameters(), *net.named_buffers()]
        if key in net.gluon_names}
    tensors = {**entering, **own}
    return [*(summed(y.detach().numpy()) for y in outputs), *(
        summed(np.zeros(x.shape) if tensors[n].grad is None
               else tensors[n].grad.numpy())
        for n, x in zip(names, case.inputs)
        if case.train and x.moves and x.kept != "aux"), *(
        summed(tensors[n].numpy()) for n, x in zip(names, case.inputs)
        if x.kept == "aux")]


def difference(found: list[Any], expected: list[Any]) -> float:
    """The largest, relative to the size of its array; infinite for other
    shapes."""
    if [x[0] for x in found] != [x[0] for x in expected]:
        return np.inf
    worst = 0.0
    for (_, *a, _), (shape, *b, largest) in zip(found, expected):
        # a sum of n numbers
        scale = max(largest, 1e-12) * max(np.prod(shape), 1) ** 0.5
        off = float(np.max(np.abs(np.subtract(a, b)), initial=0)) / scale
        worst = max(worst, off if np.isfinite(off) else np.inf)
    return worst
