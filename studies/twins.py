"""Do published pairs of networks train the same on both backends?

\b
    python -m studies.twins --pairs resnet18
    python -m studies.twins --families            # each family's smallest
    python -m studies.twins --limit 250 --jobs 2  # resumes where it was
    python -m studies.twins --report-only

Each name that gluoncv2 (MXNet) and pytorchcv (PyTorch) share is a pair of
networks, written independently. `mgpu.parity.compare` takes both through the
same steps of training. A pair runs in a process of its own, with a limit on
memory and time; its result is appended to studies/results/twins.jsonl. From
that file the summary docs/internals/twins.md and all tables, out/twins.md,
are written.

    pip install gluoncv2==0.0.64 pytorchcv==0.0.67 psutil click tqdm
"""
import os

if __name__ == "__main__":      # read when the backends are loaded
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS",
                  "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(_name, "1")

import collections
import concurrent.futures
import contextlib
import copy
import gc
import importlib.metadata
import json
import math
import platform
import re
import subprocess
import sys
import threading
import time
import traceback
import unittest.mock
import warnings
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import mgpu                     # noqa: E402
import mgpu.functional as F     # noqa: E402
from mgpu import parity         # noqa: E402

RESULTS = HERE / "results" / "twins.jsonl"
#: what each pair costs at its own input size, which decides the order:
#: `--plan` makes the file
PLANS = HERE / "twins_plans.json"
PAGE = HERE.parent / "docs" / "internals" / "twins.md"
TABLES = HERE.parent / "out" / "twins.md"
MISSING = ("the pairs come from two packages; one of them is missing. Run: "
           "pip install gluoncv2==0.0.64 pytorchcv==0.0.67")
OPTIMIZER = {"learning_rate": 0.01, "momentum": 0.9, "wd": 1e-4}
#: (devices, steps): momentum counts from the second step on
SCHEDULE = ((2, 3), (1, 1))
#: multiplications and additions (10^9) of one row's forward pass at which a
#: pair keeps its own input size with four rows; with two rows, twice that
BUDGET = 0.35
#: a batch norm must see at least this many values a channel and device:
#: over very few it divides by a variance that may be next to nothing
VALUES = 16
#: gradients under this are those of a dead network
DEAD = 1e-14


# -- the pairs ---------------------------------------------------------------

def catalogue():
    """{name: (family, function for MXNet, function for torch)}; a family is
    the module that both packages keep the architecture in."""
    try:
        with mgpu.using_backend("mxnet"):   # first: it readies NumPy for MXNet
            from gluoncv2.model_provider import _models as gluon
        from pytorchcv.model_provider import _models as torch
    except ImportError as error:
        raise SystemExit(f"{MISSING} ({error})") from error
    return {name: (torch[name].__module__.rpartition(".")[2], gluon[name],
                   torch[name]) for name in sorted(set(gluon) & set(torch))}


def old_names():
    """Some networks are older than NumPy 1.24 and say ``np.int``."""
    for name, kind in (("int", int), ("float", float), ("bool", bool)):
        if name not in vars(np):
            setattr(np, name, kind)


class Sizes:
    """What one row costs. On torch's "meta" device a pass computes nothing,
    so it takes milliseconds."""

    def __init__(self, make, shapes, device):
        import torch
        self.macs, self.values = 0, math.inf
        with torch.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net = make()
            for module in net.modules():
                module.register_forward_hook(self._count)
            with torch.no_grad():
                output = net.train()(*(
                    torch.empty(2, *s) if s else torch.ones(
                        2, dtype=torch.int64) for s in shapes))
        self.parameters = sum(p.numel() for p in net.parameters())
        self.leaves = list(_leaves(output))

    def _count(self, module, inputs, output):
        weight = getattr(module, "weight", None)
        kind = type(module).__name__
        output = next(_leaves(output), None)
        if output is None or weight is None:
            return
        if kind.startswith("BatchNorm"):
            per_row = output.numel() // (output.shape[0] * output.shape[1])
            self.values = min(self.values, per_row)
        elif kind.startswith("ConvTranspose"):
            self.macs += inputs[0].numel() // 2 * weight[0].numel()
        elif weight.dim() > 1:
            self.macs += output.numel() // 2 * weight[0].numel()


def _leaves(tree):
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from _leaves(branch)
    elif hasattr(tree, "shape"):
        yield tree


#: pairs whose input is no image: one row of each input, [] for a whole
#: number up to the third entry; and how both networks are made
SPECIAL = {
    "nvpattexp": ([[8, 16, 29], []], 116, {}),
    "voca": ([[1, 16, 29], []], 8, {}),
    # spectra of sound, the part after the (random) dither of the audio
    "jasper": ([[64, 96], []], 96, {"from_audio": False}),
    "jasperdr": ([[64, 96], []], 96, {"from_audio": False}),
    "quartznet": ([[64, 96], []], 96, {"from_audio": False}),
    # gluoncv2's takes its own size only, and does not say so
    "superpointnet": ([[1, 224, 224]], None, {}),
}
#: options of both constructors: maps, before points are read off them
OPTIONS = dict.fromkeys(("alphapose_coco", "centernet", "simplepose_coco",
                         "simpleposemobile_coco"), {"return_heatmap": True})


def choose(family, torch_function, budget=BUDGET):
    """The input, the number of rows and the construction of a pair.

    The network's own input size where it is affordable, else the largest
    that is, else the smallest that the network takes.

    Returns
    -------
    dict
        shapes (of one row), rows, options (of both constructors), pool (the
        last one's window, fitted to a smaller input), macs (10^9),
        parameters (10^6), values (that a batch norm sees, in one row and
        channel), classify (one output, a row of scores).
    """
    import torch
    if family in SPECIAL:
        shapes, top, options = SPECIAL[family]
        return look(torch_function, shapes, options, top=top, rows=4)
    always = OPTIONS.get(family, {})
    with torch.device("meta"):
        net = torch_function()
    native = getattr(net, "in_size", None) or 224
    native = list(native) if isinstance(native, (tuple, list)) \
        else [native, native]
    channels = next((m.in_channels for m in net.modules()
                     if isinstance(getattr(m, "in_channels", None), int)), 3)
    pool = last_pool(net)
    own = None
    try:
        own = look(torch_function, [[channels, *native]], always)
        for rows, most in ((4, budget), (2, 2 * budget)):
            if own["macs"] <= most and (
                    rows == 4 or own["values"] >= VALUES
                    and max(native) > 64):
                return {**own, "rows": rows}
    except Exception:       # no pass at this size
        pass
    fitting = max(native) * math.sqrt(budget / own["macs"]) if own else 64
    smallest = max(64, int(fitting // 32) * 32)
    best = None
    for edge in (*range(smallest, smallest + 97, 32), 256, 512, 640):
        if edge > max(native) or own and edge == max(native):
            break
        h, w = (max(32, round(edge * n / max(native) / 32) * 32)
                for n in native)
        fitted = pool and max(1, pool * edge // max(native))
        for options in ({"in_size": (h, w)}, {}):
            try:
                found = look(torch_function, [[channels, h, w]],
                             {**always, **options}, pool=fitted, rows=4,
                             own_size=False)
            except Exception:   # it takes only other sizes
                continue
            if found["values"] * 2 >= VALUES:
                return found
            best = best or found
            break
    if best or own:     # small maps: one row is too few for a batch norm
        return best or {**own, "rows": 2 if own["values"] >= VALUES
                        and max(native) > 64 else 4}
    raise ValueError("no input size was found that the network takes")


def look(torch_function, shapes, options, **more):
    """A plan with these inputs."""
    plan = {"shapes": shapes, "options": options, "own_size": True, **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sizes = Sizes(lambda: made(torch_function, plan), shapes, "meta")
        except (RuntimeError, NotImplementedError):     # needs numbers
            if max(shapes[0]) > 256:
                raise
            sizes = Sizes(lambda: made(torch_function, plan), shapes, "cpu")
    return {**plan, "macs": round(sizes.macs / 1e9, 4),
            "parameters": round(sizes.parameters / 1e6, 3),
            "values": min(sizes.values, 10 ** 6),
            "classify": len(sizes.leaves) == 1
            and len(sizes.leaves[0].shape) == 2}


def _torch_pool(net):
    pool = getattr(getattr(net, "features", None), "final_pool", None)
    return pool if type(pool).__name__ == "AvgPool2d" else None


def last_pool(net):
    """The window of a torch network's last pooling, None if it has none of
    fixed size."""
    pool = _torch_pool(net)
    return pool and int(np.max(pool.kernel_size))


def made(function, plan):
    """A network of either package, the window of its last pooling fitted to
    a smaller input where the plan says so."""
    net = function(**plan["options"])
    _repair(net)
    _permute(net)
    k = plan.get("pool")
    if not k:
        return net
    pool = _torch_pool(net)
    if pool is not None:
        pool.kernel_size = k
        return net
    *_, pool = net.features._children.values()
    if type(pool).__name__ != "AvgPool2D":
        raise ValueError(f"the last layer is {type(pool).__name__}, no "
                         "average pooling as in the torch network")
    pool._kwargs["kernel"] = (k, k)
    return net


def _repair(net):
    """gluoncv2/models/isqrtcovresnet.py keeps an `autograd.Function` object
    to call it in every pass; MXNet lets one be called once."""
    for child in getattr(net, "_children", {}).values():
        _repair(child)
        for name, value in list(vars(child).items()):
            if type(value).__mro__[-2].__name__ == "Function":
                child.__dict__[name] = lambda *x, fresh=value: \
                    copy.copy(fresh)(*x)


def _permute(net):
    """CondenseNet's layers pick channels by an index that only a trained
    network has; untrained it is 0 everywhere, and no gradient gets through.
    Both networks get the same permutations."""
    rng = np.random.default_rng(0)

    def walk(block):
        children = getattr(block, "_children", None)    # Gluon
        children = block._modules if children is None else children
        for child in children.values():
            walk(child)
        if not type(block).__name__.startswith("Condense") \
                or not hasattr(block, "index"):
            return
        n = block.index.shape[0]
        half = hasattr(block, "dense") or hasattr(block, "linear")
        order = rng.permutation(2 * n if half else n)[:n]
        if hasattr(block.index, "set_data"):
            block.index.initialize(_constant(order), force_reinit=True)
        elif block.index.device.type != "meta":
            block.index.copy_(block.index.new_tensor(order))
    walk(net)


def _constant(values):
    import mxnet
    return mxnet.init.Constant(mxnet.nd.array(values))


# -- one pair ----------------------------------------------------------------

def squares(pred, label):
    """A loss for any network: the mean over all outputs of w * y^2, for each
    row; fixed weights w between 1/2 and 3/2 tell the outputs apart."""
    total = None
    for y in _leaves(pred):
        if "float" not in str(y.dtype):     # lengths
            continue
        shape = tuple(y.shape)
        numbers = np.arange(math.prod(shape[1:])).reshape(shape[1:])
        w = mgpu.get_backend().put((1 + 0.5 * np.sin(1 + numbers)).astype(
            "float64" if "64" in str(y.dtype) else "float32"), y)
        each = w * y * y
        each = F.mean(each, axis=tuple(range(1, len(shape)))) \
            if len(shape) > 1 else each
        total = each if total is None else total + each
    return total


def batches(plan, steps, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        arrays = tuple(
            rng.standard_normal((plan["rows"], *s)) if s else
            rng.integers(plan["top"] // 2, plan["top"], plan["rows"])
            for s in plan["shapes"])
        found.append((arrays if len(arrays) > 1 else arrays[0],
                      rng.integers(0, 10, plan["rows"]).astype("int32")))
    return found


def summary(result):
    """What is kept of a `parity.Result`."""
    gradients = [g for g in result.gaps if g.stage == "gradient"]
    none = result.verdict == "no proof"
    return {
        **({"verdict": "none", "error": result.reason} if none
           else {"verdict": result.verdict}),
        "dtype": result.settings["dtype"],
        "how": result.plan.how,
        "confirmed": result.plan.confirmed,
        "tensors": len(result.plan.pairs),
        "shared": sum(n.startswith("shared") for n in result.plan.notes),
        "worst": {stage: [gap.relative, gap.name, gap.status, gap.own]
                  for stage, gap in result.worst.items()},
        "statuses": collections.Counter(g.status for g in result.gaps),
        "first": result.first and str(result.first),
        "location": result.location,
        "causes": [str(cause) for cause in result.causes],
        "losses": result.losses, "notes": result.notes,
        "largest_gradient": max((g.scale for g in gradients), default=0.0),
        "dead": sum(g.scale < DEAD for g in gradients),
        "gradients": len(gradients)}


def run_pair(name, plan, functions, devices, steps,
             told=lambda text: None, remedy=True, dtype="float64"):
    """Compare one pair; a dict for the file of results.

    Where they differ but for MXNet's float32, that is the cause. Else it is
    tried again with what its family's `CORRECTIONS` say corrected: if that
    makes the pair the same it is the cause. A pair that does not run in
    float64 is compared in float32.
    """
    def compared(dtype, corrected=False):
        net, changed = made(functions[1], plan), []
        if corrected:
            changed = [text for text, correct in CORRECTIONS.get(
                plan.get("family", ""), {}).items() if correct(net)]
        with contextlib.ExitStack() as stack:
            if plan.get("family") in CHANCE:
                stack.enter_context(without_chance(CHANCE[plan["family"]]))
            result = parity.compare(
                parity.Side(lambda: made(functions[0], plan),
                            init=mgpu.initializers.MSRAPrelu()),
                net, batches=batches(plan, steps),
                loss=None if plan["classify"] else squares, optimizer="sgd",
                optimizer_params=OPTIMIZER, devices=devices, dtype=dtype,
                progress=lambda done, steps: told(f"step {done} of {steps}"))
            result.evidence = None
            return result, [*changed, *dict.fromkeys(
                FLOAT32[found["function"]] for found in result.float32
                if found["function"] in FLOAT32)]
    try:
        result, changed = compared(dtype)
    except Exception as error:      # as both backends say it
        if not re.search("float64|ouble|data type|default_type", str(error)):
            raise
        told("float32")
        result, changed = compared("float32")
        result.notes.append("float32: " + " ".join(str(error).split())[-200:])
    found = summary(result)
    if result.agrees and not result.same:
        found.update(verdict="different", remedy="; ".join(changed),
                     remedied=max(x[0] for x in found["worst"].values()))
    elif remedy and found["verdict"] == "different":
        again, changed = compared(found["dtype"], True)
        if changed and again.first is None:
            found["remedy"] = "; ".join(changed)
        found["remedied"] = max(g.relative for g in again.worst.values())
        found["still"] = again.first and str(again.first)
    return found


#: families that draw random numbers in the pass, and what a Bernoulli draw is
#: then replaced by
CHANCE = {"shakedropresnet_cifar": 0, "shakeshakeresnet_cifar": 0,
          "resdropresnet_cifar": 1, "fractalnet_cifar": 1}


@contextlib.contextmanager
def without_chance(bernoulli):
    """The draws of both packages become the same constants: the two backends'
    generators cannot draw alike."""
    import mxnet
    import torch
    with contextlib.ExitStack() as stack:
        def put(owner, name, function):
            stack.enter_context(
                unittest.mock.patch.object(owner, name, function))
        put(np.random, "binomial", lambda n, p, size=None: (
            bernoulli if size is None else np.full(size, float(bernoulli))))
        put(np.random, "randint", lambda low, high=None, size=None:
            0 if size is None else np.zeros(size, "int64"))
        put(mxnet.nd.random, "uniform_like", lambda x, low=0.0, high=1.0:
            mxnet.nd.ones_like(x) * (low + 0.7 * (high - low)))
        put(torch, "bernoulli", lambda x: torch.full_like(x, bernoulli))
        put(torch, "rand", lambda *shape, **kind: torch.full(
            shape, 0.7, **kind))
        put(torch.Tensor, "uniform_", lambda x, low=0.0, high=1.0:
            x.fill_(low + 0.7 * (high - low)))
        yield


SLOPES = ("MXNet multiplies the negative half of LeakyReLU and PReLU in "
          "float32, also in a float64 network (src/operator/mshadow_op.h, "
          "xelu: `DType(float(a) * float(b))`)")
RESIZE = ("MXNet's BilinearResize2D computes the positions that it reads in "
          "float32, also in a float64 network (src/operator/contrib/"
          "bilinear_resize.cc: `const float h1r = ...`)")
#: by `mgpu.parity.float32.WORDS`
FLOAT32 = {"leaky_relu": SLOPES, "prelu": SLOPES, "interpolate": RESIZE}


def _align_corners(net):
    blocks = [m for m in net.modules()
              if getattr(m, "align_corners", None) is False]
    for block in blocks:
        block.align_corners = True
    return len(blocks)


def _swish(net):
    from pytorchcv.models.common import Swish
    net.features.final_block.activ = Swish()
    return 1


def _softmax_of_columns(net):
    from torch import nn
    found = [m for m in net.modules() if hasattr(m, "conf")]
    for block in found:
        block.conf = nn.Softmax(dim=-1)
    return len(found)


def _bilinear(net):
    found = [m for m in net.modules()
             if getattr(m, "mode", "") == "nearest"]
    for block in found:
        block.mode, block.align_corners = "bilinear", True
    return len(found)


def _drop_values(net):
    from torch import nn
    found = [m for m in net.modules() if type(m) is nn.Dropout2d]
    for layer in found:
        layer.__class__ = nn.Dropout
    return len(found)


def _still_side_classifiers(net):
    *side, _ = net.classifiers
    found = [m for c in side for m in c.modules()
             if type(m).__name__ == "BatchNorm2d"]
    for layer in found:
        layer.momentum = 0.0
    return len(found)


def _share_of_old(net):
    layers = [m for m in net.modules()
              if type(m).__name__ == "BatchNorm2d"]
    for layer in layers:
        layer.momentum = 0.9
    return len(layers)


def _not_in_place(net):
    layers = [m for m in net.modules() if getattr(m, "inplace", False)]
    for layer in layers:
        layer.inplace = False
    return len(layers)


_CORNERS = ("pytorchcv/models/{0}.py:{1} resizes with align_corners=False, "
            "gluoncv2/models/{0}.py:{2} aligns the corners, the only way of "
            "its InterpolationBlock")
_MOMENTUM = ("momentum=0.1 in gluoncv2/models/nasnet.py:128 is the share of "
             "the old statistic, in pytorchcv/models/nasnet.py:127 that of "
             "the new one: Gluon's should be 0.9")
#: where the two networks are not the same: {family: {the lines: a change to
#: the torch network that makes it what the Gluon network is}}
CORRECTIONS = {
    "cgnet": {_CORNERS.format("cgnet", 339, 401): _align_corners},
    "dabnet": {_CORNERS.format("dabnet", 440, 538): _align_corners},
    "sinet": {_CORNERS.format("sinet", 791, 840): _align_corners,
              "softmax over the channels in pytorchcv/models/sinet.py:795, "
              "over the columns of the image in gluoncv2/models/sinet.py:"
              "850 (MXNet's default is the last axis)": _softmax_of_columns},
    "scnet": {
        "pytorchcv/models/scnet.py:77 takes the nearest value, gluoncv2/"
        "models/common.py:1439 (InterpolationBlock) interpolates as soon as "
        "a size is given": _bilinear},
    "fractalnet_cifar": {
        "pytorchcv/models/fractalnet_cifar.py:58 drops whole channels "
        "(nn.Dropout2d), gluoncv2/models/fractalnet_cifar.py:65 single "
        "values (nn.Dropout)": _drop_values},
    "msdnet": {
        "the side classifiers (models/msdnet.py) compute outputs that the "
        "network does not return: no backward pass reaches their batch "
        "norms, and there alone MXNet moves running statistics":
            _still_side_classifiers},
    "mixnet": {"the last block is activated by swish in gluoncv2/models/"
               "mixnet.py:459 (the value left over from the loop), by ReLU "
               "in pytorchcv/models/mixnet.py:416": _swish},
    "nasnet": {_MOMENTUM: _share_of_old},
    "pnasnet": {_MOMENTUM: _share_of_old},
    "lffd": {"without a batch norm before it, the pre-activation of "
             "pytorchcv/models/common.py (PreConvBlock, "
             "nn.ReLU(inplace=True)) overwrites the skip connection, "
             "Gluon's does not": _not_in_place},
}


def serve(schedule, budget, dtype):
    """A worker: reads names of pairs from stdin, and writes lines of JSON to
    stdout, each a sign of life. `schedule`: (devices, steps)."""
    def tell(**record):
        print(json.dumps(record), flush=True)
    warnings.simplefilter("ignore")
    pairs = catalogue()
    old_names()
    import torch
    torch.set_num_threads(1)
    for name in map(str.strip, sys.stdin):
        family, *functions = pairs[name]
        remedy = True
        for devices, steps in schedule:
            begin, plan = time.process_time(), {}
            try:
                plan = {"family": family}
                plan.update(choose(family, functions[1], budget))
                tell(plan=plan)
                record = run_pair(name, plan, functions, devices, steps,
                                  told=lambda text: tell(step=text),
                                  remedy=remedy, dtype=dtype)
                remedy = "remedy" not in record     # once is enough
            except Exception as error:
                record = {"verdict": "none", "error":
                          f"{type(error).__name__}: {error}"[:2000],
                          "trace": traceback.format_exc()[-1500:]}
            gc.collect()
            with contextlib.suppress(Exception):    # of work left behind
                with mgpu.using_backend("mxnet"):
                    mgpu.synchronize([mgpu.cpu(0)])
            tell(record={"pair": name, "devices": devices, "steps": steps,
                         **plan, **record, "seconds": round(
                             time.process_time() - begin, 1)})


# -- many pairs --------------------------------------------------------------

class Worker:
    """A process that runs pairs, watched, and renewed when it has grown."""

    def __init__(self, schedule, limits, budget=BUDGET, dtype="float64"):
        self.schedule, self.limits = schedule, limits
        self.options = ["--budget", str(budget), "--dtype", dtype]
        self.child = None

    def start(self):
        self.child = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker",
             *self.options,
             "--devices", ",".join(f"{k}:{n}" for k, n in self.schedule)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, bufsize=0)
        os.set_blocking(self.child.stdout.fileno(), False)
        self.text, self.pairs = b"", 0

    def stop(self):
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child.stdout.close()
            self.child.stdin.close()
            self.child = None

    def run(self, name):
        """The records of a pair: it has so many seconds between two signs of
        life (four times that before the first step, which the matching
        precedes), so many in all, and so many GB."""
        import psutil
        per_step, per_pair, memory = self.limits
        if self.child is None:
            self.start()
        self.child.stdin.write(f"{name}\n".encode())
        process = psutil.Process(self.child.pid)
        begin = last = tick = time.monotonic()
        records, peak, size, stepping, why = [], 0.0, 0.0, False, ""
        plan = {"family": plans().get(name, {}).get("family", "")}
        while len(records) < len(self.schedule) and not why:
            time.sleep(0.05)
            lapse, tick = time.monotonic() - tick, time.monotonic()
            if lapse > 5 or process.status() == psutil.STATUS_STOPPED:
                begin, last = begin + lapse, last + lapse   # a pause of both
            ended = self.child.poll() is not None
            self.text += self.child.stdout.read() or b""
            *lines, self.text = self.text.split(b"\n")
            for said in (json.loads(x) for x in lines if x[:1] == b"{"):
                last, stepping = time.monotonic(), "step" in said
                plan = said.get("plan", plan)
                if "record" in said:
                    records.append({**said["record"],
                                    "peak_gb": round(peak, 2)})
            if ended:
                why = f"the process ended with {self.child.returncode}"
                continue
            info = process.memory_info()        # without mapped files
            size = (info.rss - info.shared) / 2 ** 30
            peak, now = max(peak, size), time.monotonic()
            if peak > memory:
                why = f"memory: over {memory:g} GB"
            elif now - last > per_step * (1 if stepping else 4):
                why = f"time: a step took over {per_step:g} s"
            elif now - begin > per_pair:
                why = f"time: over {per_pair:g} s"
        self.pairs += 1
        if why or size > memory / 3 or self.pairs >= 25:
            self.stop()
        for devices, steps in self.schedule[len(records):]:
            records.append({
                "pair": name, "devices": devices, "steps": steps,
                **plan, "verdict": "none", "error": why,
                "peak_gb": round(peak, 2),
                "seconds": round(time.monotonic() - begin, 1)})
        return records


def load(path=RESULTS):
    """The newest record of each (pair, devices)."""
    found = {}
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found[record["pair"], record["devices"]] = record
    return found


def plans():
    """{name: plan} as `make_plans` keeps them."""
    return json.loads(PLANS.read_text()) if PLANS.exists() else {}


def make_plans(names=()):
    """Look at what each pair costs, and keep it."""
    import tqdm
    warnings.simplefilter("ignore")
    found, pairs = plans(), catalogue()
    old_names()
    for name in tqdm.tqdm([n for n in names or pairs if n not in found]):
        family, _, torch_function = pairs[name]
        try:
            plan = choose(family, torch_function, math.inf)
        except Exception as error:
            plan = {"error": f"{type(error).__name__}: {error}"[:300]}
        found[name] = {"family": family, **plan}
        PLANS.write_text("{\n" + ",\n".join(
            f"{json.dumps(n)}: {json.dumps(found[n])}"
            for n in sorted(found)) + "\n}\n")


def cost(plan):
    """Of a step, about in seconds of one core."""
    return plan.get("macs", 1e3) * plan.get("rows", 4) \
        + plan.get("parameters", 1e3) / 10 + 0.5


def order(found):
    """Names: the cheapest of each family first, cheap ones first; those that
    differ from another only in the number of classes come last."""
    repeats = re.compile(r"_(cifar100|svhn|cub|voc|ade20k)$")
    names = sorted(found, key=lambda n: (bool(repeats.search(n)),
                                         cost(found[n])))
    seen, first, rest = set(), [], []
    for name in names:
        family = found[name]["family"]
        (rest if family in seen else first).append(name)
        seen.add(family)
    return sorted(first, key=lambda n: cost(found[n])), rest


def append(record):
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")


def open_question(record):
    """No verdict, or a difference without a cause."""
    return record["verdict"] == "none" \
        or record["verdict"] == "different" and not cause(record)


def execute(names, schedule, jobs, limits, budget, dtype, retry):
    """Run what has no result yet; tell each as it comes."""
    import tqdm
    done = load()
    waiting = [name for name in names if any(
        (name, k) not in done or retry and open_question(done[name, k])
        for k, _ in schedule)]
    local = threading.local()
    workers = []

    def run(name):
        if not hasattr(local, "worker"):
            local.worker = Worker(schedule, limits, budget, dtype)
            workers.append(local.worker)
        return local.worker.run(name)
    try:
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            runs = [pool.submit(run, name) for name in waiting]
            for future in tqdm.tqdm(concurrent.futures.as_completed(runs),
                                    total=len(runs)):
                for record in future.result():
                    append(record)
                    tqdm.tqdm.write(line(record))
    finally:
        for worker in workers:
            worker.stop()


def line(record):
    worst = max([x[0] for x in record.get("worst", {}).values()] or [0])
    return (f"{record['pair']} K={record['devices']} {record['verdict']} "
            f"worst {worst:.1e} {record.get('seconds', 0):.0f} s "
            f"{record['peak_gb']} GB {record.get('how', '')} "
            + (record.get("error") or record.get("first") or "")[:200])


def main():
    import click

    @click.command(help=__doc__)
    @click.option("--pairs", is_flag=True,
                  help="Compare the named pairs only.")
    @click.option("--families", is_flag=True,
                  help="Compare only the cheapest pair of each family.")
    @click.option("--limit", type=int, help="Compare this many pairs, "
                  "the cheapest first.")
    @click.option("--devices", default=",".join(
        f"{k}:{n}" for k, n in SCHEDULE), show_default=True,
        help="For each run of a pair, the number of devices and of steps.")
    @click.option("--jobs", default=2, show_default=True,
                  help="How many pairs to compare at the same time.")
    @click.option("--step-limit", default=60.0, show_default=True,
                  help="Seconds that one step may take.")
    @click.option("--pair-limit", default=300.0, show_default=True,
                  help="Seconds that a pair may take.")
    @click.option("--memory", default=5.0, show_default=True,
                  help="Gigabytes of memory that a pair may take.")
    @click.option("--budget", default=BUDGET, show_default=True,
                  help="A pair whose forward pass needs more than this many "
                  "billion multiplications for a row gets a smaller input.")
    @click.option("--dtype", default="float64", show_default=True,
                  type=click.Choice(["float64", "float32"]),
                  help="The numbers to compare in.")
    @click.option("--retry", is_flag=True,
                  help="Repeat the pairs that have no verdict, or differ "
                  "without a cause.")
    @click.option("--plan", "planning", is_flag=True,
                  help="Only find out what each pair costs.")
    @click.option("--report-only", is_flag=True,
                  help="Compare nothing, write docs/internals/twins.md "
                  "and out/twins.md.")
    @click.option("--worker", is_flag=True, hidden=True)
    @click.argument("names", nargs=-1)
    def command(pairs, families, limit, devices, jobs, step_limit,
                pair_limit, memory, budget, dtype, retry, planning,
                report_only, worker, names):
        schedule = [tuple(int(x) for x in part.split(":"))
                    for part in devices.split(",")]
        if worker:
            return serve(schedule, budget, dtype)
        if not report_only:
            known = catalogue()
            unknown = [n for n in names if n not in known]
            if unknown or bool(names) != pairs:
                raise click.UsageError(
                    f"no such pair: {', '.join(unknown)}" if unknown
                    else "--pairs NAME... needs names, and names need it")
            if planning:
                return make_plans(names)
            if names:
                chosen = names
            else:
                first, rest = order(plans())
                chosen = (first if families else first + rest)[:limit]
            execute(chosen, schedule, jobs,
                    (step_limit, pair_limit, memory), budget, dtype,
                    retry)
        report()
    command()


# -- the page ----------------------------------------------------------------

#: what no run can say of a family
CAUSES = {
    "inceptionresnetv1":
        "dropout of 0.6 before the last layers by default in pytorchcv/"
        "models/inceptionresnetv1.py:394, none in gluoncv2/models/"
        "inceptionresnetv1.py:454",
    "simpleposemobile_coco":
        "the Gluon network cannot be built: gluoncv2/models/"
        "simpleposemobile_coco.py:80 calls DucBlock without in_size and "
        "fixed_size, which gluoncv2/models/common.py:1915 requires",
}


def verdicts(records):
    """{pair: (verdict, cause)}: the worst of its comparisons."""
    by_pair = collections.defaultdict(list)
    for (name, _), record in sorted(records.items()):
        by_pair[name].append(record)
    found = {}
    for name, those in by_pair.items():
        kinds = {r["verdict"] for r in those}
        verdict = next(v for v in ("different", "none", "same") if v in kinds)
        if verdict == "same" and any(hollow(r) for r in those):
            verdict = "none"
        causes = [cause(r) for r in those if r["verdict"] == verdict
                  or verdict == "none"]
        found[name] = verdict, next(filter(None, causes), "")
    return found


def hollow(record):
    """Why a "same" proves nothing, or ""."""
    if record["largest_gradient"] < DEAD:
        return "all gradients are zero: the comparison proves nothing"
    if record["dead"] * 2 > record["gradients"]:
        return "most gradients are zero: the comparison proves little"
    if record["statuses"].get("rounding", 0) * 2 > sum(
            record["statuses"].values()):
        why = next((n for n in record["notes"] if "float32" in n), "")
        return ("most tensors differ by what rounding does to the network "
                "alone: the comparison proves little. " + why)
    for note in record["notes"]:
        if "proves nothing" in note:
            return note
    return ""


def cause(record):
    """What is known of the reason, in one line."""
    known = CAUSES.get(record.get("family"))
    if known:
        return known
    if record["verdict"] == "none":
        lines = [x for x in record.get("error", "").splitlines()
                 if "Traceback" not in x and not x.startswith("  File")]
        return " ".join(lines).split(" In a: ")[0][:300]
    if record.get("remedy"):
        return (f"{record['remedy']}. With torch doing so too the pair is "
                f"the same, worst {record['remedied']:.1e}")
    if record["verdict"] == "different":
        return "; ".join(record.get("causes", [])[:1])
    return hollow(record)


def cell(text):
    return " ".join(str(text).split()).replace("|", "\\|")


STAGES = ("output", "loss", "gradient", "weight", "memory", "statistic")


def table(records, found):
    lines = ["| pair | family | input | rows | K | matched by | "
             + " | ".join(STAGES) + " | verdict |",
             "|---|---|---|--:|--:|---|" + "--:|" * len(STAGES) + "---|"]
    keys = sorted(records, key=lambda k: (records[k].get("family", ""), k))
    for name, devices in keys:
        r = records[name, devices]
        shapes = ", ".join("x".join(map(str, s)) or "number"
                           for s in r.get("shapes", ()))
        if not r.get("own_size", True):
            shapes += " (reduced)"
        worst = r.get("worst", {})
        how = r.get("how", "") + ("" if r.get("confirmed") is not False
                                  else ", not confirmed")
        if r.get("dtype") == "float32":
            shapes += ", float32"
        verdict = r["verdict"] if r["verdict"] != "none" else "no verdict"
        if r["verdict"] == "same" and hollow(r):
            verdict = "no verdict"
        lines.append(
            f"| {name} | {r.get('family', '')} | {shapes} | "
            f"{r.get('rows', '')} | {devices} | {how} | " + " | ".join(
                f"{worst[s][0]:.0e}" if s in worst else "" for s in STAGES)
            + f" | {verdict} |")
    return lines


def causes(records):
    """{cause: its pairs}, the most frequent first."""
    by_cause = collections.defaultdict(set)
    for (name, _), r in sorted(records.items()):
        for text in filter(None, r.get("remedy", "").split("; ")):
            by_cause[text].add(name)
    return dict(sorted(by_cause.items(), key=lambda item: -len(item[1])))


def page(records, total=(0, 0)):
    """The contents of docs/internals/twins.md, the summary; `total`: how many
    pairs and families exist."""
    found = verdicts(records)
    families = {r["family"] for r in records.values() if "family" in r}
    count = collections.Counter(v for v, _ in found.values())
    with_cause = sum(bool(c) for v, c in found.values() if v == "different")
    judged = {name for name, (v, _) in found.items() if v != "none"}
    judged_families = {r["family"] for (n, _), r in records.items()
                       if n in judged}
    same = [r for r in records.values() if r["verdict"] == "same"]
    worst = max((x[0] for r in same for x in r["worst"].values()
                 if x[2] == "same" and r.get("dtype") != "float32"),
                default=0.0)
    single = sorted({r["pair"] for r in same if r.get("dtype") == "float32"})
    rounding = sum(r["statuses"].get("rounding", 0) for r in same)
    tensors = sum(sum(r["statuses"].values()) for r in same)
    versions = {}
    for name in ("mxnet", "torch", "gluoncv2", "pytorchcv", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "?"
    reduced = {n for (n, _), r in records.items()
               if not r.get("own_size", True)}
    by_cause = causes(records)
    engine = {n for text in (SLOPES, RESIZE) for n in by_cause.get(text, ())}
    twin = {n for text, names in by_cause.items()
            if text not in (SLOPES, RESIZE) for n in names}
    twin |= {n for n, (v, _) in found.items() if v == "different"} - engine
    hours = sum(r.get("seconds", 0) for r in records.values()) / 3600
    lines = [
        "# Model pairs", "",
        "*Written by `python -m studies.twins --report-only` from "
        "`studies/results/twins.jsonl`. The command also writes "
        "`out/twins.md`, a table of all comparisons.*", "",
        f"**{len(found)} pairs of {len(families)} architecture families: "
        f"{count['same']} train the same, {count['different']} differ "
        f"({with_cause} with a known cause), {count['none']} got no "
        f"verdict.** {len(judged)} of {len(found)} pairs "
        f"({100 * len(judged) / max(1, len(found)):.1f} %) and "
        f"{len(judged_families)} of {len(families)} families have a verdict.",
        "", "| | |", "|---|---|",
        f"| pairs whose two networks differ | {len(twin)} |",
        "| pairs that differ because MXNet computes a part in float32 | "
        f"{len(engine - twin)} |",
        f"| tensors compared in pairs that are the same | {tensors} |",
        "| largest relative difference within the tolerance of 1e-10 | "
        f"{worst:.1e} |",
        "| tensors above the tolerance, by no more than [rounding "
        f"noise](parity.md) | {rounding} |",
        "| pairs compared in float32, tolerance 1e-5 | "
        f"{', '.join(single) or 'none'} |",
        f"| pairs with a smaller input than their own | {len(reduced)} |", "",
        "## Method", "",
        "- gluoncv2 (MXNet) and pytorchcv (PyTorch) implement the same "
        "networks independently. A name in both packages is a pair. A family "
        "is the module of an architecture. There are "
        f"{total[0]} pairs of {total[1]} families, some apart only in the "
        "number of classes. The cheapest pair of each family ran first, then "
        "others by their cost.",
        "- `mgpu.parity.compare` compares each pair: float64, lock-step, SGD "
        "with momentum 0.9, rate 0.01 and weight decay 1e-4; 3 steps on 2 "
        "logical devices and 1 step on 1 (the largest pairs: on 1 only).",
        "- Both networks start from the same weights (MSRA, in NumPy, not "
        "pretrained). Each step compares outputs, the loss of each example, "
        "gradients, updated weights, momenta and running statistics.",
        "- Inputs are normal random numbers: 4 examples (2 on each device), "
        "or 2 where a step is slow. With a smaller input (`--budget`) the "
        "window of a last average pooling shrinks too, in both networks.",
        "- Classifiers use softmax cross-entropy, other networks the mean of "
        "`w * y * y` over all outputs with fixed weights `w`.",
        "- A pair without nonzero gradients gets no verdict.", "",
        f"Python {platform.python_version()}, " + ", ".join(
            f"{n} {v}" for n, v in versions.items())
        + f"; {hours:.1f} hours of one process.", "", "```sh",
        "pip install gluoncv2==0.0.64 pytorchcv==0.0.67 psutil",
        "python -m studies.twins --pairs resnet18",
        "python -m studies.twins --jobs 2       # all; resumes",
        "python -m studies.twins --report-only  # this page, and out/twins.md",
        "```", "", "## Causes", "",
        "Each of these causes was tested: the torch network was changed in "
        "this one respect and compared again, and the pair is the same.", ""]
    lines += [f"{n}. {text}: {len(names)} pair{'s' * (len(names) > 1)}."
              for n, (text, names) in enumerate(by_cause.items(), 1)]
    other = sorted(n for n, (v, _) in found.items() if v == "different"
                   and not any(n in names for names in by_cause.values()))
    if other:
        lines += ["", "These pairs were not changed and compared again:", ""]
        lines += [f"- {name}: {found[name][1] or 'cause unknown'}"
                  for name in other]
    return "\n".join(lines) + "\n"


def tables(records):
    """All pairs, in Markdown."""
    found = verdicts(records)
    numbers = {text: n for n, text in enumerate(causes(records), 1)}
    lines = ["# Model pairs: all comparisons", "",
             "The numbers are the worst relative difference of each stage "
             "over all tensors and steps.", ""]
    differ = sorted(n for n, (v, _) in found.items() if v == "different")
    if differ:
        lines += [
            "## Pairs that differ", "",
            "The column *then* is the worst relative difference after the "
            "change that the cause names (above 1e-10: no more than the "
            "rounding noise of the pair, or a float32 product that rounds "
            "the other way). The numbers of causes are those of "
            "docs/internals/twins.md.", "",
            "| pair | first difference | cause | then |",
            "|---|---|---|--:|"]
        for name in differ:
            those = [r for k, r in sorted(records.items()) if k[0] == name]
            first = next((r["first"] for r in those if r.get("first")), "")
            told = [r for r in those if r.get("remedy")]
            why = ", ".join(str(numbers[t]) for t in told[0]["remedy"]
                            .split("; ")) if told \
                else found[name][1] or "unknown"
            then = f"{told[0]['remedied']:.0e}" if told else ""
            lines.append("| " + " | ".join(map(
                cell, (name, first, why, then))) + " |")
        lines.append("")
    silent = sorted(n for n, (v, _) in found.items() if v == "none")
    if silent:
        lines += ["## Pairs without a verdict", "", "| pair | why |",
                  "|---|---|"]
        lines += [f"| {name} | {cell(found[name][1] or 'unknown')} |"
                  for name in silent] + [""]
    return "\n".join(lines + ["## All comparisons", ""]
                     + table(records, found)) + "\n"


def report():
    records = load()
    if records:
        families = {family for family, *_ in catalogue().values()}
        PAGE.write_text(page(records, (len(catalogue()), len(families))))
        TABLES.parent.mkdir(exist_ok=True)
        TABLES.write_text(tables(records))


if __name__ == "__main__":
    main()
