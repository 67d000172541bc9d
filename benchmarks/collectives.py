"""All-reduce in one process, against what the memory can do, the loop of the
book *Dive into Deep Learning*, and gloo between processes.

    python -m benchmarks.collectives \\
        '{"backend": "torch", "k": 2, "rounds": 7}'

Writes one line of JSON: seconds of each contender in each round. A "list" is
the gradients of ResNet-18 (76 arrays, 45 MB), a "buffer" one array of as many
bytes. ``copy`` is the time in which two threads copy K buffers of that size
once: each byte read and written once, the bound for an all-reduce.
"""
import concurrent.futures
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def shapes_of(what):
    import mgpu
    with mgpu.using_backend("torch"):
        net = mgpu.models.resnet18()
    shapes = [tuple(p.shape) for p in net.parameters()]
    return shapes if what == "list" else [(sum(map(np.prod, shapes)),)]


def book(lists):
    """The book's allreduce, for each array."""
    import mgpu
    for data in lists:
        for x in data[1:]:
            data[0] += mgpu.put(x, data[0])
        for x in data[1:]:
            x[:] = data[0]


def contenders(backend, k, what):
    import mgpu
    mgpu.set_backend(backend)
    devices = [mgpu.cpu(i) for i in range(k)]
    hosts = [np.full(s, 1e-3, "float32") for s in shapes_of(what)]
    lists = [[mgpu.put(x, d) for d in devices] for x in hosts]
    size = sum(x.size for x in hosts)
    threads = 2
    parts = [(np.ones(size // threads, "float32"),
              np.zeros(size // threads, "float32")) for _ in range(threads)]
    pool = concurrent.futures.ThreadPoolExecutor(threads)

    def copy():
        for _ in range(k):
            list(pool.map(lambda p: np.copyto(p[1], p[0]), parts))

    def ours():
        mgpu.allreduce_many(lists)

    def one_by_one():
        book(lists)

    def timed(function):
        def run():
            mgpu.synchronize(devices)
            begin = time.perf_counter()
            function()
            mgpu.synchronize(devices)
            return time.perf_counter() - begin
        return run
    return {"copy": timed(copy), "mgpu": timed(ours),
            "book": timed(one_by_one)}


class Gloo:
    """K processes that all-reduce with gloo."""

    def __init__(self, k, what):
        self.children = [subprocess.Popen(
            [sys.executable, "-m", "benchmarks.collectives", json.dumps(
                {"gloo": i, "k": k, "what": what})], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for i in range(k)]
        port = self.children[0].stdout.readline()
        for child in self.children[1:]:
            child.stdin.write(port)
            child.stdin.flush()

    def __call__(self):
        for child in self.children:
            child.stdin.write("go\n")
            child.stdin.flush()
        return max(float(child.stdout.readline()) for child in self.children)

    def close(self):
        for child in self.children:
            child.stdin.close()
            child.wait()


def gloo_rank(spec):
    import torch
    from torch import distributed
    torch.set_num_threads(1)
    rank, k = spec["gloo"], spec["k"]
    if rank == 0:
        store = distributed.TCPStore("127.0.0.1", 0, k, True,
                                     wait_for_workers=False)
        print(store.port, flush=True)
    else:
        store = distributed.TCPStore("127.0.0.1", int(input()), k, False)
    distributed.init_process_group("gloo", store=store, rank=rank,
                                   world_size=k)
    arrays = [torch.full(s, 1e-3) for s in shapes_of(spec["what"])]
    for _ in sys.stdin:
        distributed.barrier()
        begin = time.perf_counter()
        for x in arrays:
            distributed.all_reduce(x)
        print(time.perf_counter() - begin, flush=True)


def main():
    spec = json.loads(sys.argv[1])
    if "gloo" in spec:
        return gloo_rank(spec)
    found = {}
    for what in ("buffer", "list"):
        runs = contenders(spec["backend"], spec["k"], what)
        gloo = Gloo(spec["k"], what) if spec["k"] == 2 else None
        if gloo:
            runs["gloo"] = gloo
        rounds = [{name: run() for name, run in runs.items()}
                  for _ in range(spec["rounds"] + 1)][1:]
        if gloo:
            gloo.close()
        found[what] = {name: [r[name] for r in rounds] for name in runs}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
