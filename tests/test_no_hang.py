"""Two MXNet CPU contexts with large products at once, the workload that spins
for ever inside OpenBLAS when a context computes on several threads.

Each case is a process of its own: import order and environment matter.
"""
import os
import subprocess
import sys

import pytest

from conftest import BACKENDS

SCRIPT = """
import sys
import numpy as np
for step in sys.argv[1].split(","):
    if step == "native":    # the user imports MXNet himself, and uses it
        old = [n for n in ("bool", "int", "float", "object", "str", "complex")
               if n not in vars(np)]
        for n in old:
            setattr(np, n, getattr(__builtins__, n))
        import mxnet as mx
        for n in old:
            delattr(np, n)
        mx.nd.dot(mx.nd.ones((64, 64)), mx.nd.ones((64, 64))).wait_to_read()
    elif step == "mgpu":
        import mgpu
        mgpu.set_backend("mxnet")
    else:
        __import__(step)
devices = mgpu.list_devices(2)
xs = [mgpu.put(np.full((1024, 1024), i + 1.0, "float32"), d)
      for i, d in enumerate(devices)]
for _ in range(4):
    ys = mgpu.parallel(lambda x: [mgpu.functional.dot(x, x)
                                  for _ in range(4)], xs)
    mgpu.synchronize(devices)
print([float(mgpu.to_numpy(y[-1])[0, 0]) for y in ys])
"""

ORDERS = ["native,mgpu"] + (["mgpu,torch", "torch,native,mgpu"]
                            if "torch" in BACKENDS else [])


@pytest.mark.parametrize("order, threads", [
    ("mgpu", "2"), *((order, None) for order in ORDERS)]
    if "mxnet" in BACKENDS else [])
def test_two_contexts_finish(order, threads):
    environment = {k: v for k, v in os.environ.items()
                   if k not in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS")}
    if threads:
        environment["OMP_NUM_THREADS"] = threads
    # The work takes about a second; a hang takes the whole time.
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT,
                           order], env=environment, timeout=300,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1024.0, 4096.0]"
