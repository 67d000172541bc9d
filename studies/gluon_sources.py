"""The sources that mgpu writes for published networks: their lines and
classes, and whether they train as MXNet does.

    python -m studies.gluon_sources         # resumes where it was
    python -m studies.gluon_sources --names zoo/resnet18_v1
    python -m studies.gluon_sources --report-only

Gluon's zoo, networks of gluoncv2, and five with names that say nothing
(the graph's, exchanged for numbers). Each is exported with random values and
written as source; the source is imported, loads its weights, and goes through
`mgpu.parity.compare` with MXNet's network: lock-step in float64, two devices,
two steps of SGD with momentum, dropout 0. Rows are appended
to studies/results/gluon_sources.jsonl. From them the summary docs/sources.md
and a table of all networks, out/sources.md, are written.
"""
import os

if __name__ == "__main__":      # read when the backends are loaded
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS",
                  "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(_name, "1")
    os.environ["MXNET_SUBGRAPH_VERBOSE"] = "0"

import argparse
import importlib.util
import json
import pathlib
import re
import tempfile
import warnings

import numpy as np

import mgpu
from studies import gluon_networks as networks

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gluon_sources.jsonl"
PAGE = HERE.parent / "docs" / "sources.md"
TABLE = HERE.parent / "out" / "sources.md"
OTHERS = """airnet50_1x64d_r2 bagnet9 bn_vgg11 channelnet condensenet74_c4_g4
    darknet53 densenet40_k12_cifar10 diaresnet20_cifar10 dla34
    efficientnet_b0 fdmobilenet_wd4 ghostnet hardnet39ds mnasnet_b1
    mobilenetv3_small_w1
    nin_cifar10 preresnet20_cifar10 pyramidnet110_a48_cifar10
    resnet10 resnext50_32x4d senet16
    shufflenetv2_wd2 xception""".split()
SCRAMBLED = """zoo/resnet18_v1 zoo/densenet121 zoo/mobilenetv2_0.25
    zoo/squeezenet1.1 gluoncv2/shufflenetv2_wd2""".split()
ENDING = " (names scrambled)"


def scrambled(symbol, arrays):
    """The same network, whose names say nothing."""
    import mxnet as mx
    graph = json.loads(symbol.tojson())
    names = {}
    for i, node in enumerate(graph["nodes"]):
        if node["name"] != "data":
            names[node["name"]] = node["name"] = f"n{7919 * (i + 1) % 10007}"
    return mx.sym.load_json(json.dumps(graph)), {
        names[key]: x for key, x in arrays.items()}, {
        names[key]: key for key in arrays}


def without_dropout(symbol):
    """MXNet draws its masks where no other backend can take them."""
    import mxnet as mx
    return mx.sym.load_json(networks.edited(symbol.tojson(), "Dropout",
                                            p="0"))


def written(files, folder, known):
    """The text of the source, and a function that gives its network. `known`:
    the names in MXNet's network of arrays that are called otherwise here."""
    path = pathlib.Path(folder, "net.py")
    with mgpu.using_backend("torch"):
        names = mgpu.gluon_source(*files, path)
        names = {key: array[:4] + known.get(array[4:], array[4:])
                 for key, array in names.items()}
    weights, = (p for p in (path.with_suffix(x) for x in (
        ".safetensors", ".pt")) if p.exists())
    spec = importlib.util.spec_from_file_location("net", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make():
        net = module.load(str(weights))
        net.gluon_names = names
        return net
    return path.read_text(), make


def parity(files, make, image):
    """What `mgpu.parity.compare` says."""
    def live():
        with mgpu.using_backend("mxnet"):
            return mgpu.from_gluon(*files)

    def names(net, engine):
        with mgpu.using_backend(engine):
            replicas = mgpu.initialize(net(), [mgpu.cpu(0)], init="keep")
            return {array: key for key, array in
                    replicas.network.gluon_names().items()}
    theirs, ours = names(live, "mxnet"), names(make, "torch")
    rng = np.random.default_rng(2)
    with mgpu.using_backend("torch"):
        import torch
        with torch.no_grad():
            shape = make()(torch.from_numpy(image)).shape
    batches = [(rng.normal(size=(4, *image.shape[1:])),
                rng.normal(size=(4, *shape[1:]))) for _ in range(2)]
    return mgpu.parity.compare(
        live, make, batches=batches, loss=mgpu.losses.L2Loss(),
        weights="own", devices=2, map={
            key: ours[array] for array, key in theirs.items()},
        optimizer_params={"learning_rate": 2 ** -7, "momentum": 0.5})


def figures(text):
    return {"lines": len(text.splitlines()),
            "classes": len(re.findall(r"^class ", text, re.M)),
            "arguments": max((len(re.findall(r"\w+: ", x)) for x in
                              re.findall(r"def __init__\(\s*self,(.*?)\) ->",
                                         text, re.S)), default=0),
            "width": max(map(len, text.splitlines()))}


def examine(make, scramble):
    """The row of a network."""
    networks.old_names()
    warnings.simplefilter("ignore")
    symbol, edge = networks.traced(make)
    for values in networks.DRAWS:
        arrays, image, dtype, _ = networks.drawn(symbol, edge, *values)
        with tempfile.TemporaryDirectory() as folder:
            files = networks.write(without_dropout(symbol), arrays, folder)
            graph, others, known = scrambled(symbol, arrays) if scramble \
                else (symbol, arrays, {})
            for name in ("whole", "own"):
                os.mkdir(f"{folder}/{name}")
            text, _ = written(networks.write(graph, others,
                                             f"{folder}/whole"), folder, known)
            _, source = written(networks.write(
                without_dropout(graph), others, f"{folder}/own"),
                f"{folder}/own", known)
            result = parity(files, source, image)
        found = {**figures(text), "edge": edge, "dtype": dtype,
                 "draw": list(values), "same": result.verdict == "same",
                 "worst": max((float(gap.relative) for gap in
                               result.worst.values()), default=0.0)}
        if found["same"]:
            break
    return found


def catalogue():
    every = networks.catalogue()
    chosen = [name for name in every if name.startswith("zoo/")]
    chosen += [f"gluoncv2/{name}" for name in OTHERS]
    found = {name: (every[name], False) for name in chosen}
    return found | {name + ENDING: (every[name], True) for name in SCRAMBLED}


def results():
    if not RESULTS.exists():
        return {}
    return {row["name"]: row for row in map(
        json.loads, RESULTS.read_text().splitlines())}


def report():
    """Write the page, and the table of all networks."""
    rows = sorted(results().values(), key=lambda row: row["name"])
    good = [row for row in rows if row.get("same")]
    bad = [row for row in rows if not row.get("same")]
    failed = "\n".join(
        f"| {row['name']} | "
        + (f"differs: {row['worst']:.0e} |" if "lines" in row else
           f"{row['error'][:80]} |") for row in bad)
    longest = max(good, key=lambda row: row["lines"])
    PAGE.write_text(f"""\
# Generated sources

Written by `python -m studies.gluon_sources --report-only` from
`studies/results/gluon_sources.jsonl`. The command also writes
`out/sources.md`, a table of all networks.

`mgpu convert NET-symbol.json -o net.py` writes an exported network as PyTorch
source. The study does it for Gluon's zoo and for networks of gluoncv2. Each
source is imported, loads its weights, and is compared with MXNet's network by
`mgpu compare`: lock-step in float64, two devices, two steps, dropout 0.

| | |
|---|---|
| sources that train the same | {len(good)} of {len(rows)} |
| largest relative difference of an array | \
{max(row['worst'] for row in good):.0e} |
| lines of a source | {min(row['lines'] for row in good)} to \
{longest['lines']} ({longest['name']}) |
| most arguments of a class | {max(row['arguments'] for row in good)} |

| not compared | why |
|---|---|
{failed}

```sh
pip install gluoncv2==0.0.64
python -m studies.gluon_sources --names zoo/resnet18_v1
python -m studies.gluon_sources --jobs 2        # all; resumes
python -m studies.gluon_sources --report-only   # this page and the table
```
""", encoding="utf-8")
    lines = ["# Generated sources: all networks", "",
             "| network | lines | classes | most arguments | difference |",
             "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['lines']} | {row['classes']} | "
            f"{row['arguments']} | "
            + (f"{row['worst']:.0e} |" if row["same"] else
               f"**differs: {row['worst']:.0e}** |")
            if "lines" in row else
            f"| {row['name']} | | | | {row['error'][:80]} |")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(good)} of {len(rows)}: {PAGE.name}")


def main():
    parser = argparse.ArgumentParser(prog="python -m studies.gluon_sources")
    parser.add_argument("--names", nargs="*", help="only these, again")
    parser.add_argument("--again", action="store_true",
                        help="those that are not the same, too")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--memory", type=int, default=14000, help="MB each")
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
                    and not known[name].get("same"))}
        with RESULTS.open("a") as file:
            for n, found in enumerate(networks.run(
                    todo, given.jobs, given.seconds, given.memory,
                    lambda row: examine(*row))):
                print(f"{n + 1}/{len(todo)}", found["name"],
                      found.get("same", found.get("error")),
                      found.get("worst"), found["seconds"], flush=True)
                file.write(json.dumps(found) + "\n")
                file.flush()
    report()


if __name__ == "__main__":
    main()
