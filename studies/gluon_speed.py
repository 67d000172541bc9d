"""How long `mgpu.from_gluon` takes for Gluon's ResNet-50, and how much memory.

``python studies/gluon_speed.py``, with MXNet 1.9.1, which writes the files;
they are converted in a process of its own. Imports are not counted. The peak
is that of resident memory above what it was before the call.
"""
import json
import subprocess
import sys
import tempfile
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


def main() -> None:
    import mgpu
    mgpu.set_backend("mxnet")
    import mxnet as mx
    with tempfile.TemporaryDirectory() as folder:
        net = mx.gluon.model_zoo.vision.resnet50_v1()
        net.initialize()
        net.hybridize()
        net(mx.nd.ones((1, 3, 64, 64))).wait_to_read()
        net.export(str(Path(folder) / "net"))
        for _ in range(3):
            done = subprocess.run(
                [sys.executable, "-c", CONVERT, f"{folder}/net-symbol.json",
                 f"{folder}/net-0000.params"], check=True, text=True,
                capture_output=True)
            found = json.loads(done.stdout)
            print(f"{found['seconds']:.2f} s, peak {found['peak']:.2f} times "
                  "the file")


if __name__ == "__main__":
    main()
