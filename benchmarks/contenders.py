"""Training loops that race, each in a process of its own.

    python -m benchmarks.contenders '{"loop": "mgpu", "backend": "torch", ...}'

A contender prepares, takes a first step and writes the seconds of both
(``prepared``, ``first``). Then, for each number of steps that it reads from
stdin, it takes them, waits for the devices, and writes the seconds
(``seconds``) and those that the thread of the loop computed (``host``). All
train on the same fixed batch. The keys of the argument:

| key | read by | meaning |
|---|---|---|
| loop | all | a name in `LOOPS` |
| model | all | "tiny", "lenet" or "resnet18" |
| batch | all | examples in the global batch |
| devices | all | logical CPU devices; torch: threads; halves, ddp: processes |
| weights | all | if true, write the weights before and after at the end |
| backend | mgpu, halves | "torch" or "mxnet" |
| hybridize | mgpu, halves, torch, gluon | if true, compile the network |
| fabric | ddp | if true, train by Lightning Fabric |
| threads | gluon | OMP_NUM_THREADS |
| rank, port | ddp | set for the processes that it starts |
"""
import gc
import json
import os
import runpy
import subprocess
import sys
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "port")]
RATE = 0.01


def batch_of(model, rows):
    import numpy as np
    rng = np.random.default_rng(0)
    shape = (16,) if model == "tiny" else (1, 28, 28)
    return (rng.random((rows, *shape), dtype="float32"),
            rng.integers(0, 10, rows).astype("int32"))


def torch_net(model):
    import torch
    from torch import nn
    if model == "tiny":
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    if model == "lenet":
        import torch_nets
        return torch_nets.lenet()
    import mgpu
    with mgpu.using_backend("torch"):
        net = mgpu.models.resnet18()
    for module in net.modules():    # PyTorch's own arithmetic and values
        getattr(module, "reset_parameters", lambda: None)()
        if isinstance(module, torch.nn.BatchNorm2d):
            module.__class__ = torch.nn.BatchNorm2d
    return net


def gluon_net(model):
    from mxnet.gluon import nn
    if model == "tiny":
        net = nn.HybridSequential()
        net.add(nn.Dense(16, activation="relu", in_units=16),
                nn.Dense(10, in_units=16))
        return net
    if model == "lenet":
        import gluon_nets
        return gluon_nets.lenet()
    import mgpu
    with mgpu.using_backend("mxnet"):
        return mgpu.models.resnet18()


# -- mgpu ---------------------------------------------------------------------

def mgpu_loop(spec):
    import mgpu
    mgpu.set_backend(spec["backend"])
    net = (torch_net if spec["backend"] == "torch" else gluon_net)(
        spec["model"])
    devices = [mgpu.cpu(i) for i in range(spec["devices"])]
    X, y = batch_of(spec["model"], spec["batch"])
    options = {"hybridize": True} if spec.get("hybridize") else {}
    replicas = mgpu.initialize(net, devices, "xavier", sample=X[:2],
                               **options)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()

    def run(steps):
        before = None
        for _ in range(steps):
            losses = mgpu.train_batch(X, y, replicas, loss, trainer)
            for values in before or ():     # read a step late, as `train`
                mgpu.to_numpy(values)
            before = losses
        mgpu.synchronize(devices)
    run.weights = lambda: [mgpu.to_numpy(p.data()) for p in replicas.params()]
    return run


def halves_loop(spec):
    """As many processes as devices, each with one device and its share of the
    batch, at the same time, which exchange nothing: what the machine's shared
    caches and memory leave of a speed-up without communication."""
    k = spec["devices"]
    part = {**spec, "loop": "mgpu", "devices": 1, "batch": spec["batch"] // k,
            "weights": False}
    others = [subprocess.Popen(
        [sys.executable, "-m", "benchmarks.contenders", json.dumps(part)],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(k - 1)]
    for other in others:
        other.stdout.readline()
    own = mgpu_loop(part)

    def run(steps):
        for other in others:
            print(steps, file=other.stdin, flush=True)
        own(steps)
        for other in others:
            if not other.stdout.readline():
                raise RuntimeError("a half ended")

    def stop():
        for other in others:
            other.stdin.close()
            other.wait()
    run.stop, run.weights = stop, own.weights
    return run


# -- PyTorch ------------------------------------------------------------------

def torch_weights(net):
    return [p.detach().numpy().copy() for p in net.parameters()]


def torch_loop(spec):
    """Plain PyTorch with `devices` intra-op threads."""
    import torch
    torch.set_num_threads(spec["devices"])
    torch.manual_seed(0)
    net = torch_net(spec["model"])
    if spec.get("hybridize"):
        net = torch.compile(net, dynamic=False)
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    loss = torch.nn.CrossEntropyLoss()
    X, y = map(torch.from_numpy, batch_of(spec["model"], spec["batch"]))
    y = y.long()

    def run(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(net(X), y).backward()
            optimizer.step()
    run.weights = lambda: torch_weights(net)
    return run


def book_torch_loop(spec):
    """The loop of the book, *Dive into Deep Learning*: one device after the
    other, gradients summed on the first device and copied back."""
    import torch
    torch.set_num_threads(1)
    torch.manual_seed(0)
    nets = [torch_net(spec["model"]) for _ in range(spec["devices"])]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    X, y = map(torch.from_numpy, batch_of(spec["model"], spec["batch"]))
    Xs, ys = X.chunk(len(nets)), y.long().chunk(len(nets))

    def run(steps):
        for _ in range(steps):
            losses = [loss(net(x), t).sum() for net, x, t in zip(nets, Xs, ys)]
            for value in losses:
                value.backward()
            with torch.no_grad():
                for params in zip(*(net.parameters() for net in nets)):
                    for p in params[1:]:
                        params[0].grad += p.grad.to(params[0].device)
                    for p in params[1:]:
                        p.grad[:] = params[0].grad.to(p.device)
                for net in nets:
                    for p in net.parameters():
                        p -= RATE * p.grad / len(X)
                        p.grad.zero_()
    run.weights = lambda: torch_weights(nets[-1])
    return run


def ddp_loop(spec):
    """`DistributedDataParallel` over gloo, a process with one thread each;
    this one is rank 0 and starts the others. With `fabric` by Lightning
    Fabric, default settings."""
    import torch
    from torch import distributed, nn
    rank, size = spec.get("rank", 0), spec["devices"]
    torch.set_num_threads(1)
    if rank == 0:
        store = distributed.TCPStore("127.0.0.1", 0, size, True,
                                     wait_for_workers=False)
        for i in range(1, size):
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.contenders", json.dumps(
                    {**spec, "rank": i, "port": store.port})], cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    else:
        store = distributed.TCPStore("127.0.0.1", spec["port"], size, False)
    distributed.init_process_group("gloo", store=store, rank=rank,
                                   world_size=size)
    torch.manual_seed(0)
    net = torch_net(spec["model"])
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    if spec.get("fabric"):
        # As under torchrun, so that Fabric starts no processes itself.
        os.environ.update({
            "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "TORCHELASTIC_RUN_ID": "benchmark"})
        from lightning_fabric import Fabric
        fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp")
        fabric.launch()
        net, optimizer = fabric.setup(net, optimizer)
        backward = fabric.backward
    else:
        net = nn.parallel.DistributedDataParallel(net)
        backward = torch.Tensor.backward
    loss = nn.CrossEntropyLoss()
    X, y = map(torch.from_numpy, batch_of(spec["model"], spec["batch"]))
    X, y = X.chunk(size)[rank], y.long().chunk(size)[rank]

    def take(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            backward(loss(net(X), y))
            optimizer.step()

    def run(steps):
        told = torch.tensor([steps])
        distributed.broadcast(told, 0)
        if not told:
            return False
        take(int(told))
        distributed.barrier()
        return True
    if rank:
        while run(0):
            pass
        sys.exit()
    run.stop, run.weights = lambda: run(0), lambda: torch_weights(net)
    return run


# -- MXNet --------------------------------------------------------------------

def gluon_loop(spec):
    """Gluon's own loop with `gluon.Trainer` and default settings, a context
    for each device; with `threads`, on one context with so many threads."""
    threads = spec.get("threads")
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    import numpy as np
    for name, kind in (("bool", bool), ("int", int), ("float", float),
                       ("object", object), ("str", str),
                       ("complex", complex)):
        if name not in vars(np):
            setattr(np, name, kind)
    import mxnet as mx
    from mxnet import autograd, gluon
    contexts = [mx.cpu(i) for i in range(spec["devices"])]
    net = plain_gluon_net(spec["model"])
    net.initialize(mx.init.Xavier(), ctx=contexts)
    if spec.get("hybridize"):
        net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd",
                            {"learning_rate": RATE})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    X, y = (mx.nd.array(a) for a in batch_of(spec["model"], spec["batch"]))

    def run(steps):
        for _ in range(steps):
            Xs = gluon.utils.split_and_load(X, contexts)
            ys = gluon.utils.split_and_load(y, contexts)
            with autograd.record():
                losses = [loss(net(a), b) for a, b in zip(Xs, ys)]
            autograd.backward(losses)
            trainer.step(spec["batch"])
            mx.nd.waitall()
    run.weights = lambda: [p.data(contexts[-1]).asnumpy()
                           for p in net.collect_params().values()]
    return run


def plain_gluon_net(model):
    if model != "resnet18":
        return gluon_net(model)
    # Only the network's file: mgpu's backend would set MXNet up.
    import mxnet
    names = ("mgpu", "mgpu.backends", "mgpu.backends._mxnet",
             "mgpu.backends._mxnet.framework")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[-1]].mx = mxnet
    file = ROOT / "mgpu" / "backends" / "_mxnet" / "models.py"
    return runpy.run_path(str(file))["resnet18"](10, 1)


LOOPS = {"mgpu": mgpu_loop, "halves": halves_loop, "torch": torch_loop,
         "book": book_torch_loop, "ddp": ddp_loop, "gluon": gluon_loop}


def main():
    spec = json.loads(sys.argv[1])
    begin = time.perf_counter()
    run = LOOPS[spec["loop"]](spec)
    prepared = time.perf_counter() - begin
    before = run.weights() if spec.get("weights") else []
    # After the imports a full collection takes 0.08 s; in which step it falls
    # is chance.
    gc.collect()
    begin = time.perf_counter()
    run(1)
    first = time.perf_counter() - begin
    print(json.dumps({"prepared": prepared, "first": first}), flush=True)
    for line in sys.stdin:
        steps = int(line)
        begin, host = time.perf_counter(), time.thread_time()
        run(steps)
        print(json.dumps({"seconds": time.perf_counter() - begin,
                          "host": time.thread_time() - host}), flush=True)
    if before:
        print(json.dumps([[x.tolist() for x in weights]
                          for weights in (before, run.weights())]))
    getattr(run, "stop", lambda: None)()


if __name__ == "__main__":
    main()
