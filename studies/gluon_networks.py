"""Do published networks of Gluon convert to PyTorch, and agree?

\b
    python -m studies.gluon_networks --names zoo/resnet18_v1
    python -m studies.gluon_networks --jobs 2   # resumes where it was
    python -m studies.gluon_networks --report-only

Gluon's zoo, and gluoncv2's classification networks, without those that differ
from another one in the number of classes alone. Each is written as
``HybridBlock.export`` writes it, with random values, read by MXNet and by
`mgpu.from_gluon`, and compared in float64: a prediction, the gradients of a
training pass (dropout 0), and the running statistics after it. A network runs
in a process of its own, with a limit on memory and time. Its result is
appended to studies/results/gluon_networks.jsonl. From that file the summary
docs/conversion.md and a table of all networks, out/conversion.md, are written.

    pip install gluoncv2==0.0.64
"""
import os

if __name__ == "__main__":      # read when the backends are loaded
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS",
                  "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(_name, "1")
    os.environ["MXNET_SUBGRAPH_VERBOSE"] = "0"

import argparse
import collections
import importlib
import itertools
import json
import math
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

import mgpu

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gluon_networks.jsonl"
PAGE = HERE.parent / "docs" / "conversion.md"
TABLE = HERE.parent / "out" / "conversion.md"
#: largest relative differences of outputs, and of gradients and statistics
BARS = {"float64": (1e-9, 1e-9), "float32": (1e-5, 1e-3)}
#: modules of gluoncv2 whose networks do not classify images
OTHERS = set(
    "alphapose_coco bisenet centernet cgnet dabnet danet deeplabv3 fastscnn "
    "fcn8sd fpenet ibppose_coco icnet jasper jasperdr lednet lffd "
    "lwopenpose_cmupan nvpattexp pspnet quartznet simplepose_coco "
    "simpleposemobile_coco sinet superpointnet visemenet voca".split())
#: in which MXNet has no float64
FLOAT32 = {"LRN", "InstanceNorm"}


# -- the networks -------------------------------------------------------------

def catalogue():
    """{name: function that makes it}, other families in turn."""
    from mxnet.gluon.model_zoo import vision
    from gluoncv2.model_provider import _models
    found = {}
    try:
        vision.get_model("")
    except ValueError as error:
        for name in sorted(map(str.strip, str(error).splitlines()[1:])):
            found[f"zoo/{name}"] = (
                lambda name=name, **options: vision.get_model(name))
    families = collections.defaultdict(list)
    for name, make in _models.items():
        family = make.__module__.rpartition(".")[2]
        if family not in OTHERS and not name.endswith(
                ("_cifar100", "_svhn", "_cub")):
            families[family].append((f"gluoncv2/{name}", make))
    for row in itertools.zip_longest(*families.values()):
        found |= dict(filter(None, row))
    return found


def old_names():
    """Some networks are older than NumPy 1.24 and say ``np.int``."""
    for name, kind in (("int", int), ("float", float), ("bool", bool)):
        if name not in vars(np):
            setattr(np, name, kind)


def traced(make):
    """The graph, and the smallest image that it takes. A last pooling of
    fixed size is fitted to a smaller image."""
    import mxnet as mx
    native = own = None
    for edge in (64, 96, 128, 160, 192, 224, 256, 299, 331, 480):
        if native is None:
            own = getattr(make(), "in_size", None)
            native = max(own or (224,))
        if own:
            edge = min(edge, native)
        try:
            net = make(in_size=(edge, edge))
        except (AssertionError, TypeError):     # knows its own size only
            net = make()
        _fit_pool(net, edge, native)
        symbol = net(mx.sym.var("data"))
        try:
            shapes, *_ = symbol.infer_shape(data=(2, 3, edge, edge))
        except mx.MXNetError as error:
            last = error
            continue
        if shapes:
            return symbol, edge
    raise last


def _fit_pool(net, edge, native):
    features = getattr(net, "features", None)
    *_, pool = getattr(features, "_children", {"": None}).values()
    if type(pool).__name__ == "AvgPool2D" and edge < native:
        k = max(1, max(pool._kwargs["kernel"]) * edge // native)
        pool._kwargs["kernel"] = (k, k)


# -- one network --------------------------------------------------------------

#: a factor of all scales and shifts of norms, and what is added to the shifts,
#: tried in turn. With a small factor a residual branch adds little to what
#: goes past it, and the rounding of many branches does not pile up. With
#: shifts of four deviations hardly a number is at the kink of a ReLU, where
#: rounding in float32 decides which of two gradients it has.
DRAWS = ((1, 0), (1 / 4, 0), (1 / 16, 0), (1, 4))


def draw(rng, name, shape, scale=1, shift=0):
    """Values with which numbers neither vanish nor grow from layer to
    layer."""
    if name.endswith("index"):          # CondenseNet's order of channels
        return rng.permutation(shape[0]).astype(float)
    if len(shape) > 1:
        return rng.normal(size=shape) * math.sqrt(2 / math.prod(shape[1:]))
    if name.endswith("gamma"):
        return scale * rng.uniform(0.5, 1.5, shape)
    if name.endswith("beta"):
        return scale * (shift + rng.normal(size=shape) * 0.1)
    if name.endswith("var"):
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith("alpha"):
        return rng.uniform(0.1, 0.4, shape)
    return rng.normal(size=shape) * 0.1


def edited(text, op, **attributes):
    """The graph, with other attributes of an operator."""
    graph = json.loads(text)
    for node in graph["nodes"]:
        if node["op"] == op:
            node["attrs"].update(attributes)
    return json.dumps(graph)


class Gluon:
    """A graph and its arrays, as MXNet computes."""

    def __init__(self, text, arrays, image, dtype):
        import mxnet as mx
        self._mx = mx
        symbol = mx.sym.load_json(text)
        put = {name: mx.nd.array(x, dtype=dtype)
               for name, x in {**arrays, "data": image}.items()}
        aux = {name: put.pop(name)
               for name in symbol.list_auxiliary_states()}
        self.grads = {name: mx.nd.zeros_like(x) for name, x in put.items()
                      if not name.endswith("index")}
        self._aux = aux
        self._bound = symbol.bind(
            mx.cpu(), put, args_grad=self.grads, aux_states=aux,
            grad_req={name: "write" if name in self.grads else "null"
                      for name in put})

    def predict(self):
        return self._bound.forward(is_train=False)[0].asnumpy()

    def train(self, weights):
        """Gradients and statistics of one pass."""
        self._bound.forward(is_train=True)
        self._bound.backward([self._mx.nd.array(
            weights, dtype=self._bound.outputs[0].dtype)])
        return ({name: x.asnumpy() for name, x in self.grads.items()},
                {name: x.asnumpy() for name, x in self._aux.items()})


def ending(nodes):
    """The arrays of the last layer: all outputs grow as they do."""
    at = nodes[-1]
    while at["op"] not in ("FullyConnected", "Convolution"):
        at = nodes[at["inputs"][0][0]]
    return [nodes[i]["name"] for i, *_ in at["inputs"][1:]]


def examine(make):
    """What the table says of a network."""
    old_names()
    symbol, edge = traced(make)
    for values in DRAWS:
        found = compare(symbol, edge, *values)
        if not verdict(found):
            break
    return found


def drawn(symbol, edge, scale, shift):
    """Arrays by name, an image, their dtype, and MXNet's prediction."""
    rng = np.random.default_rng(0)
    text = symbol.tojson()
    nodes = json.loads(text)["nodes"]
    dtype = "float32" if FLOAT32 & {x["op"] for x in nodes} else "float64"
    image = rng.normal(size=(2, 3, edge, edge))
    shapes, outputs, others = symbol.infer_shape(data=image.shape)
    arrays = {name: draw(rng, name, shape, scale, shift).astype(dtype)
              for name, shape in [*zip(symbol.list_arguments(), shapes),
                                  *zip(symbol.list_auxiliary_states(),
                                       others)] if name != "data"}
    # statistics of the image itself, and a little beside them
    _, found = Gluon(edited(edited(text, "BatchNorm", momentum="0"),
                            "Dropout", p="0"), arrays, image, dtype).train(
        np.zeros(outputs[0]))
    arrays |= {name: x * rng.uniform(0.99, 1.01, x.shape).astype(dtype)
               for name, x in found.items()}
    expected = Gluon(text, arrays, image, dtype).predict()
    if not 1e-2 <= abs(expected).max() <= 1e2:
        for name in ending(nodes):
            arrays[name] /= abs(expected).max()
        expected = Gluon(text, arrays, image, dtype).predict()
    return arrays, image, dtype, expected


def write(symbol, arrays, folder):
    """As ``export`` writes it."""
    import mxnet as mx
    symbol.save(f"{folder}/net-symbol.json")
    aux = set(symbol.list_auxiliary_states())
    mx.nd.save(f"{folder}/net-0000.params", {
        f"{'aux' if name in aux else 'arg'}:{name}":
        mx.nd.array(x, dtype=x.dtype) for name, x in arrays.items()})
    return f"{folder}/net-symbol.json", f"{folder}/net-0000.params"


def compare(symbol, edge, scale, shift, change=None):
    """MXNet and what `from_gluon` makes of it, at values that are drawn with
    this scale and shift. `change`: what to do to the converted network."""
    import torch
    text = symbol.tojson()
    nodes = json.loads(text)["nodes"]
    arrays, image, dtype, expected = drawn(symbol, edge, scale, shift)
    weights = np.random.default_rng(1).normal(size=expected.shape)
    said = {"parameters": sum(
                arrays[name].size for name in symbol.list_arguments()
                if name != "data"),
            "nodes": sum(x["op"] != "null" for x in nodes), "edge": edge,
            "dtype": dtype, "draw": [scale, shift]}
    grads, statistics = Gluon(edited(text, "Dropout", p="0"), arrays, image,
                              dtype).train(weights)
    with tempfile.TemporaryDirectory() as folder:
        files = write(symbol, arrays, folder)
        start = time.perf_counter()
        with mgpu.using_backend("torch"):
            net = mgpu.from_gluon(*files)
        said["converts"] = round(time.perf_counter() - start, 2)
    if change:
        change(net)
    x = torch.from_numpy(image.astype(dtype)).requires_grad_()
    with torch.no_grad():
        y = net.eval()(x).numpy()
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    (net.train()(x) * torch.from_numpy(weights.astype(dtype))).sum().backward()
    own = {"data": x.grad}
    for key, p in net.named_parameters():
        own[net.gluon_names[key][4:]] = p.grad
    state = {net.gluon_names[key][4:]: p for key, p in
             net.named_buffers() if key in net.gluon_names}
    # MXNet's gradient of a PReLU's slope is wrong inside a compiled network
    # (differences of MXNet's own outputs agree with PyTorch).
    for node in nodes:
        if node["op"] == "LeakyReLU" and len(node["inputs"]) > 1:
            grads.pop(nodes[node["inputs"][1][0]]["name"])
    largest = max(abs(g).max() for g in grads.values())
    return {**said, "size": float(abs(expected).max()),
            "outputs": _relative(y, expected, 0),
            "gradients": max(_relative(
                np.zeros_like(g) if own.get(name) is None
                else own[name].numpy(), g, 1e-4 * largest)
                for name, g in grads.items() if _moves(name, net)),
            "statistics": max((_relative(state[name].numpy(), x, 0)
                               for name, x in statistics.items()), default=0)}


def _moves(name, net):
    """Whether the array is a parameter that the converted network trains: a
    `fix_gamma` is none."""
    keys = {array[4:]: key for key, array in net.gluon_names.items()}
    return name == "data" or name in keys and net.get_parameter(
        keys[name]).requires_grad


def _relative(x, expected, least):
    if x.shape != expected.shape:
        return math.inf
    off = float(abs(x - expected).max() / max(abs(expected).max(), least,
                                              1e-300))
    return off if math.isfinite(off) else math.inf


def verdict(found):
    """Why a result does not count; empty if it does."""
    if "error" in found:
        return found["error"]
    out, grad = BARS[found["dtype"]]
    if not 1e-3 <= found["size"] <= 1e3:
        return f"its outputs are of size {found['size']:.0e}"
    if found["outputs"] > out or max(found["gradients"],
                                     found["statistics"]) > grad:
        return "differs"
    return ""


# -- all of them --------------------------------------------------------------

def _child(name, make, memory, pipe, task):
    resource.setrlimit(resource.RLIMIT_AS, (memory << 20,) * 2)
    start = time.perf_counter()
    try:
        found = task(make)
    except Exception as error:      # goes into the table
        lines = str(error).strip().splitlines() or [""]
        line = lines[-1] if type(error).__name__ == "MXNetError" else lines[0]
        found = {"error": f"{type(error).__name__}: {line[:200]}"}
    pipe.send({"name": name, **found,
               "seconds": round(time.perf_counter() - start, 1)})
    os._exit(0)     # backends leave threads behind


def run(todo, jobs, seconds, memory, task=examine):
    """Results of the task for each, as they come."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(todo.items()), []
    while waiting or running:
        while waiting and len(running) < jobs:
            name, make = waiting.pop(0)
            ours, theirs = context.Pipe(False)
            process = context.Process(target=_child, args=(
                name, make, memory, theirs, task))
            process.start()
            theirs.close()
            running.append((name, process, ours, time.monotonic()))
        for row in running:
            name, process, pipe, start = row
            found = None
            if pipe.poll(0.05):
                try:
                    found = pipe.recv()
                except EOFError:
                    found = {"name": name, "error": "the process died"}
            elif time.monotonic() - start > seconds:
                process.kill()
                found = {"name": name, "error": f"more than {seconds} s"}
            if found:
                process.join()
                running.remove(row)
                yield found
                break


def results():
    """The last of each network."""
    if not RESULTS.exists():
        return {}
    return {row["name"]: row for row in map(
        json.loads, RESULTS.read_text().splitlines())}


def main():
    parser = argparse.ArgumentParser(prog="python -m studies.gluon_networks")
    parser.add_argument("--names", nargs="*", help="only these, again")
    parser.add_argument("--again", action="store_true",
                        help="those that do not agree, too")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--memory", type=int, default=10000, help="MB each")
    parser.add_argument("--report-only", action="store_true")
    given = parser.parse_args()
    if not given.report_only:
        mgpu.set_backend("mxnet")
        with mgpu.using_backend("torch"):       # once for all children
            importlib.import_module("mgpu.backends._torch.gluon.build")
        known = results()
        todo = {name: make for name, make in catalogue().items()
                if (name in given.names if given.names else
                    name not in known or given.again
                    and verdict(known[name]))}
        with RESULTS.open("a") as file:
            for n, found in enumerate(run(todo, given.jobs, given.seconds,
                                          given.memory)):
                print(f"{n + 1}/{len(todo)}", found["name"], verdict(found)
                      or "agrees", found.get("seconds", ""), flush=True)
                file.write(json.dumps(found) + "\n")
                file.flush()
    report()


def report():
    """Write the page, and the table of all networks."""
    rows = sorted(results().values(), key=lambda row: row["name"])
    missing = [row for row in rows if "converts" not in row
               and "has no attribute 'shape'" in row["error"]]
    counted = [row for row in rows if row not in missing]
    good = [row for row in counted if not verdict(row)]
    bad = [row for row in counted if verdict(row)]
    others = [row for row in good if row.get("draw", [1, 0]) != [1, 0]]
    float32 = [row for row in good if row["dtype"] == "float32"]
    worst = {key: max(row[key] for row in good if row not in float32)
             for key in ("outputs", "gradients", "statistics")}
    PAGE.write_text(f"""\
# Converted models

Written by `python -m studies.gluon_networks --report-only` from
`studies/results/gluon_networks.jsonl`. The command also writes
`out/conversion.md`, a table of all networks. The networks are Gluon's zoo and
the classification networks of gluoncv2, with random values.

| | networks |
|---|---|
| convert and agree | {len(good)} of {len(counted)} |
| compared in float32, where MXNet has no float64 \
({', '.join(sorted(FLOAT32))}) | {len(float32)} of {len(good)} |
| agree with other initial values only | {len(others)} of {len(good)} |
| not exported by MXNet: the code reads the shape of a symbol | \
{len(missing)} |

The largest relative differences in float64 are {worst['outputs']:.0e}
(outputs), {worst['gradients']:.0e} (gradients) and
{worst['statistics']:.0e} (running statistics).

## Method

- Each network predicts once, and trains one pass with dropout 0, batch 2 and \
a square image.
- A difference is relative to the largest number of its array, of a gradient \
at least to 1e-4 of the largest gradient.
- The tolerance is {BARS['float64'][0]:.0e} in float64. In float32 it is \
{BARS['float32'][0]:.0e} for outputs and {BARS['float32'][1]:.0e} for \
gradients and statistics.
- A last pooling of fixed size is fitted to a smaller image. The last layer \
is scaled where outputs leave 1e-2 to 1e2.
- Other initial values: scales of all norms a quarter or a sixteenth of the \
usual ones, so that rounding of many branches stays small; or shifts of four \
deviations, so that rounding does not decide the gradient of a ReLU.

```sh
pip install gluoncv2==0.0.64
python -m studies.gluon_networks --names zoo/resnet18_v1
python -m studies.gluon_networks --jobs 2       # all; resumes
python -m studies.gluon_networks --report-only  # this page and the table
```

## Networks that do not agree

{', '.join(row["name"] for row in bad) or 'None'}.

The networks with InstanceNorm (ibn, ibnb) differ by float32, the only dtype
of MXNet's layer: in ibn_resnet50 the float32 gradients of MXNet are 2e-3 from
PyTorch's float64 gradients, those of PyTorch 4e-4. The outputs agree to 2e-6.
In float64 differ: {', '.join(row["name"] for row in bad
                             if row.get("dtype") == "float64") or 'none'}.

## MXNet's arithmetic

| MXNet | the converted network |
|---|---|
| rounds the negative part of LeakyReLU and PReLU and the weights of bilinear \
interpolation to float32, in float64 too | the same |
| erf, GELU, SELU, RNNs of ReLU | agree to 1e-7 |
| the gradient of SELU below 0 is scale * (alpha + y), not the derivative | \
the same |
| wrong deconvolution with strides and dilation in float64, not in float32 | \
the right one |
""", encoding="utf-8")
    lines = ["# Converted models: all networks", "",
             "## Networks that do not agree", "",
             "| network | why |", "|---|---|"]
    for row in bad:
        why = verdict(row)
        if why == "differs":
            why = (f"differs: {row['outputs']:.0e}, gradients "
                   f"{row['gradients']:.0e}, statistics "
                   f"{row['statistics']:.0e} ({row['dtype']})")
        lines.append(f"| {row['name']} | {why} |".replace("\n", " "))
    lines += ["", "Not exported by MXNet: "
              + ", ".join(row["name"] for row in missing) + ".", "",
              "## Networks that agree", "",
              "| network | parameters (M) | nodes | image | outputs | "
              "gradients | conversion (s) |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {row['name']} | {row['parameters'] / 1e6:.1f} | "
              f"{row['nodes']} | {row['edge']} | {row['outputs']:.0e} | "
              f"{max(row['gradients'], row['statistics']):.0e} | "
              f"{row['converts']} |" for row in good]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(good)} of {len(counted)} agree: {PAGE}, {TABLE}")


if __name__ == "__main__":
    main()
