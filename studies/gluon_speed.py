"""How long `mgpu.from_gluon` takes for Gluon's ResNet-50, how much memory, and
how fast its network is.

``python studies/gluon_speed.py [--rounds 15] [--rows 8] [--size 224]``, with
MXNet 1.9.1, which writes the files; they are converted in processes of their
own. Imports are not counted. The peak is that of resident memory above what
it was before the call. The passes of a hand-written network, of a copy of
it and of what mgpu makes alternate; a row of the table is the median, and
its difference from the hand-written one. Run it with nothing else running:
some four minutes.
"""
import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONVERT = """
import json, os, re, sys, time
import torch, mgpu
mgpu.set_backend("torch")
import mgpu.backends._torch.gluon.build, mgpu.backends._torch.gluonize
def resident(what):
    return int(re.search(what + r":\\s+(\\d+)",
                         open("/proc/self/status").read())[1])
open("/proc/self/clear_refs", "w").write("5")       # the peak begins here
before = resident("VmRSS")
start = time.perf_counter()
net = mgpu.from_gluon(*sys.argv[1:])
seconds = time.perf_counter() - start
after = resident("VmHWM")
print(json.dumps({"seconds": seconds, "peak": (after - before) * 1024
                  / os.path.getsize(sys.argv[2])}))
"""

EXPORT = """
import sys
import mgpu
mgpu.set_backend("mxnet")
import mxnet as mx
mx.random.seed(0)
net = mx.gluon.model_zoo.vision.resnet50_v1()
net.initialize(mx.init.Xavier())
net.hybridize()
net(mx.nd.ones((1, 3, 64, 64))).wait_to_read()
net.export(sys.argv[1])
"""


def conversion(files: list[str]) -> None:
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", CONVERT, *files],
                              check=True, text=True, capture_output=True)
        found = json.loads(done.stdout)
        print(f"conversion: {found['seconds']:.2f} s, peak "
              f"{found['peak']:.2f} times the file", flush=True)


def by_hand():
    """ResNet-50 as Gluon's zoo has it: the stride is in the first
    convolution of a block, and those of size 1 in it have biases."""
    from torch import nn

    class Bottleneck(nn.Module):
        def __init__(self, before, channels, stride):
            super().__init__()
            inner = channels // 4
            self.body = nn.Sequential(
                nn.Conv2d(before, inner, 1, stride), nn.BatchNorm2d(inner),
                nn.ReLU(), nn.Conv2d(inner, inner, 3, 1, 1, bias=False),
                nn.BatchNorm2d(inner), nn.ReLU(),
                nn.Conv2d(inner, channels, 1), nn.BatchNorm2d(channels))
            self.shortcut = nn.Identity() if before == channels else \
                nn.Sequential(nn.Conv2d(before, channels, 1, stride,
                                        bias=False),
                              nn.BatchNorm2d(channels))
            self.relu = nn.ReLU()

        def forward(self, x):
            return self.relu(self.body(x) + self.shortcut(x))

    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64),
              nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for stage, (count, channels) in enumerate(
            ((3, 256), (4, 512), (6, 1024), (3, 2048))):
        for i in range(count):
            layers.append(Bottleneck(before, channels,
                                     2 if stage and not i else 1))
            before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(2048, 1000))


def source(files: list[str], folder: str, plain: bool):
    import mgpu
    path = Path(folder) / f"net{'_plain' * plain}.py"
    mgpu.gluon_source(*files, path, plain=plain)
    found = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    weights, = (x for x in (path.with_suffix(".safetensors"),
                            path.with_suffix(".pt")) if x.exists())
    return module.load(weights)


def speed(files: list[str], folder: str, given: argparse.Namespace) -> None:
    import torch

    import mgpu
    mgpu.set_backend("torch")
    torch.manual_seed(0)
    nets = {"hand-written": by_hand(), "a copy of it": by_hand(),
            "from_gluon": mgpu.from_gluon(*files),
            "source": source(files, folder, False),
            "source, plain": source(files, folder, True)}
    # Same values, so that the work is the same, down to subnormal numbers.
    for values in zip(*(net.parameters() for net in nets.values()),
                      strict=True):
        for x in values:
            assert x.shape == values[0].shape, "not the same network"
            x.data.copy_(values[-1])
    x = torch.randn(given.rows, 3, given.size, given.size)
    outputs = []
    for net in nets.values():
        with torch.no_grad():
            outputs.append(net.train()(x))
    for name, y in zip(nets, outputs):
        difference = ((y - outputs[0]).abs().max() / outputs[0].abs().max())
        assert difference < 1e-3, f"{name} computes something else"

    def forward(net):
        with torch.no_grad():
            net(x)

    def both(net):
        net.zero_grad()
        net(x).sum().backward()

    for what, one in ("forward", forward), ("forward and backward", both):
        times = {name: [] for name in nets}
        for number in range(given.rounds + 1):
            order = list(nets)
            shift = number % len(order)     # none is always after another
            for name in order[shift:] + order[:shift]:
                start = time.perf_counter()
                one(nets[name])
                times[name].append(time.perf_counter() - start)
        median = {name: statistics.median(found[1:])     # one to warm up
                  for name, found in times.items()}
        print(f"\n{what}, {given.rows} x {given.size}, median of "
              f"{given.rounds}:")
        for name, seconds in median.items():
            more = seconds / median["hand-written"] - 1
            print(f"  {name:14} {seconds * 1e3:8.1f} ms {more:+7.1%}",
                  flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python studies/gluon_speed.py",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "net")
        subprocess.run([sys.executable, "-c", EXPORT, prefix], check=True)
        files = [f"{prefix}-symbol.json", f"{prefix}-0000.params"]
        conversion(files)
        speed(files, folder, given)


if __name__ == "__main__":
    main()
