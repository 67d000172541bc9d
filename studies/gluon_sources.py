"""The source of exported networks, measured: its lines and classes, and
whether it computes what `mgpu.from_gluon` does.

    python -m studies.gluon_sources NET-symbol.json ...

The arrays of ``NET-symbol.json`` are in ``NET-0000.params``.
"""
import importlib.util
import pathlib
import re
import sys
import tempfile
from typing import Any

import mgpu


def measure(symbol: str, params: str, x: Any = None) -> dict[str, Any]:
    """Figures of one network's source. With `x`, a tensor, also "off": by
    how much predictions and gradients differ from those of `from_gluon`,
    relative to the largest of all. (Weights that a file maps into memory
    lie elsewhere, which changes a convolution's last bits.)"""
    import torch
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "net.py")
        names = mgpu.gluon_source(symbol, params, path)
        text = path.read_text()
        spec = importlib.util.spec_from_file_location("net", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        weights, = (p for p in path.parent.iterdir()
                    if p.suffix in (".pt", ".safetensors"))
        net = module.load(str(weights))
    found: dict[str, Any] = {
        "lines": len(text.splitlines()),
        "classes": len(re.findall(r"^class ", text, re.M)),
        "arguments": max((len(re.findall(r"\w+: ", x)) for x in re.findall(
            r"def __init__\(\s*self,(.*?)\) ->", text, re.S)), default=0),
        "width": max(map(len, text.splitlines()))}
    if x is not None:
        theirs = mgpu.from_gluon(symbol, params)
        for m in [*net.modules(), *theirs.modules()]:
            if isinstance(m, torch.nn.Dropout):
                m.p = 0.0
        with torch.no_grad():
            y = theirs.eval()(x)
            off = float((net.eval()(x) - y).abs().max() / y.abs().max())
        (net.train()(x) ** 2).sum().backward()
        (theirs.train()(x) ** 2).sum().backward()
        other = {theirs.gluon_names[k]: p for k, p in
                 theirs.named_parameters(remove_duplicate=False)}
        top = max(float(p.grad.abs().max()) for p in other.values()
                  if p.grad is not None)
        for key, p in net.named_parameters(remove_duplicate=False):
            q = other[names[key]]
            assert p.requires_grad == q.requires_grad
            if q.grad is not None:      # some are zero but for rounding
                off = max(off, float((p.grad - q.grad).abs().max()) / top)
        found["off"] = off
    return found


def main() -> None:
    """A line for each network."""
    import torch
    mgpu.set_backend("torch")
    for symbol in sys.argv[1:]:
        stem = symbol.removesuffix("-symbol.json")
        name = pathlib.Path(stem).name
        size = 299 if "inception" in name else 224 if name.startswith(
            ("alexnet", "densenet", "squeezenet")) else 64
        x = torch.randn(2, 3, size, size, dtype=torch.float64)
        print(name, measure(symbol, f"{stem}-0000.params", x), flush=True)


if __name__ == "__main__":
    main()
