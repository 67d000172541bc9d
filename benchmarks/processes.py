"""Training in two processes, one device and one thread each.

    python -m benchmarks.processes '{"what": "steps", "model": "lenet",
                                     "batch": 256, "rounds": 9}'

"steps": `mgpu.Trainer` and DistributedDataParallel, on the same batch. With
"who" one of them alone, "mgpu" or "ddp", as its user has it: mgpu sets how
memory is kept, of which DDP gains where both are in one process. Without it
both take turns in the same two processes, from the same weights.
"gradients": the gradients of a network of MXNet are added up over two
workers, by mgpu over gloo, by MXNet's KVStore "dist_sync", whose scheduler
and server this program starts too, and by gloo itself, on arrays of the same
sizes, which is the bound. Writes the seconds of one step, or of one
reduction, of each contender in each round. In a round the contenders take
many short turns, and the median of their steps counts: both wait where
anything else stops one of the two processes. The first round is not counted.
"""
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import answer, started      # noqa: E402
from benchmarks.contenders import (RATE, batch_of,          # noqa: E402
                                   gluon_net, torch_net)

SIZE = 2
#: seconds of a contender's turn, and of all its turns in a round, about
TURN, ROUND = 0.1, 1.5


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


# -- one rank -----------------------------------------------------------------

def mgpu_steps(spec, rank):
    """A step of mgpu, and its weights by name."""
    import mgpu
    import torch
    torch.manual_seed(0)
    X, y = batch_of(spec["model"], spec["batch"])
    half = slice(*mgpu.shard_bounds(len(X), SIZE)[rank])
    X, y = X[half], y[half]
    replicas = mgpu.initialize(torch_net(spec["model"]), [mgpu.cpu(0)],
                               "xavier", seed=0)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
    loss, last = mgpu.losses.SoftmaxCrossEntropyLoss(), [None]

    def step():
        losses = mgpu.train_batch(X, y, replicas, loss, trainer)
        for values in last[0] or ():        # read a step late, as `train`
            mgpu.to_numpy(values)
        last[0] = losses
    return step, replicas.net


def ddp_steps(spec, rank):
    """A step of DistributedDataParallel with its default options."""
    import torch
    from torch import distributed, nn
    torch.manual_seed(0)
    own = torch_net(spec["model"])
    if "weights" in spec:
        own.load_state_dict(spec["weights"])
    net = nn.parallel.DistributedDataParallel(
        own, process_group=distributed.new_group(backend="gloo"),
        **spec.get("ddp", {}))
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    loss = nn.CrossEntropyLoss()
    X, y = map(torch.from_numpy, batch_of(spec["model"], spec["batch"]))
    X, y = X.chunk(SIZE)[rank], y.long().chunk(SIZE)[rank]

    def step():
        optimizer.zero_grad()
        value = loss(net(X), y)
        value.backward()
        optimizer.step()
        return value.item()
    return step, own


class Alone:
    """The ranks of a job that does without mgpu."""

    def __init__(self):
        from torch import distributed
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group("gloo")
        self.rank = distributed.get_rank()
        self.is_main = self.rank == 0

    def gather(self, work, value=None):
        from torch import distributed
        every = [None] * SIZE
        distributed.all_gather_object(every, value)
        return every


def steps(spec):
    import torch
    torch.set_num_threads(1)
    who = spec.get("who")
    if who == "ddp":
        world = Alone()
        return {"ddp": ddp_steps(spec, world.rank)[0]}, world
    import mgpu
    mgpu.set_backend("torch")
    world = mgpu.distributed.init()
    ours, net = mgpu_steps(spec, world.rank)
    if who:
        return {"mgpu": ours}, world
    theirs, other = ddp_steps(
        {**spec, "weights": net.state_dict()}, world.rank)
    runs = {"mgpu": ours, "ddp": theirs}
    for run in runs.values():
        run()
    for (name, x), y in zip(net.named_parameters(), other.parameters(),
                            strict=True):
        if not torch.allclose(x, y, rtol=1e-4, atol=1e-6):
            raise RuntimeError(f"the contenders differ in {name}")
    return runs, world


def gradients(spec):
    import mgpu
    import numpy as np
    mgpu.set_backend("mxnet")
    world = mgpu.distributed.init()
    from mgpu.collectives import allreduce_many
    from mgpu.collectives.strategies import strategy_of
    from mgpu.collectives.over_processes import over_processes
    mx = sys.modules["mxnet"]
    net = gluon_net(spec["model"])
    sample = batch_of(spec["model"], 2)[0]
    replicas = mgpu.initialize(net, [mgpu.cpu(0)], "xavier", sample=sample)
    columns = [[mx.nd.full(p.shape, world.rank + 1.0)]
               for p in replicas.params() if p.grad_req != "null"]
    strategy = over_processes(strategy_of("auto"), world.span(1))

    def gloo():
        allreduce_many(columns, algorithm=strategy)
        mx.nd.waitall()

    store = mx.kv.create("dist_sync")
    for i, (x,) in enumerate(columns):
        store.init(i, mx.nd.zeros(x.shape))

    def kvstore():
        for i, (x,) in enumerate(columns):
            # A pull overwrites what was pushed: a copy goes.
            store.push(i, x.copy(), priority=-i)
            store.pull(i, out=x, priority=-i)
        mx.nd.waitall()
    runs = {"mgpu": gloo, "kvstore": kvstore}
    for run in runs.values():
        for (x,) in columns:
            x[:] = world.rank + 1
        run()
        if any(not np.all(x.asnumpy() == 3) for x, in columns):
            raise RuntimeError("a sum is wrong")
    runs["gloo"] = bare_gloo([x.size for x, in columns])
    for (x,) in columns:
        x[:] = 0                # sums of sums stay finite
    return runs, world


def bare_gloo(sizes):
    """Return a function that reduces arrays of these sizes by gloo alone: all
    at once, without packing, those below 1 MB as one array."""
    import torch
    from torch import distributed
    large = [n for n in sizes if 4 * n >= 1 << 20]
    arrays = [torch.zeros(n) for n in (*large, sum(sizes) - sum(large))]

    def run():
        for work in [distributed.all_reduce(x, async_op=True)
                     for x in arrays if len(x)]:
            work.wait()
    return run


def rank_of(spec):
    """Measure, as one of the ranks; rank 0 writes what it found."""
    runs, world = {"steps": steps, "gradients": gradients}[spec["what"]](spec)

    def laps(run, count):
        """The seconds of each of `count` calls."""
        found = []
        world.gather("begin")
        for _ in range(count):
            begin = time.perf_counter()
            run()
            found.append(time.perf_counter() - begin)
        return found

    def plan(run):
        """How many calls in a turn, and how many turns in a round."""
        one = statistics.median(laps(run, 5))
        count = max(1, round(TURN / one))
        return count, max(3, round(spec.get("round", ROUND) / count / one))

    count, turns = zip(*(world.gather("plan", plan(run))[0]
                         for run in runs.values()))
    found = {name: [] for name in runs}
    for _ in range(spec["rounds"] + 1):
        taken = {name: [] for name in runs}
        for turn in range(max(turns)):
            for name, n in list(zip(runs, count))[::1 if turn % 2 else -1]:
                taken[name] += laps(runs[name], n)
        for name, seconds in taken.items():
            found[name].append(statistics.median(seconds))
    if world.is_main:
        print(json.dumps({name: x[1:] for name, x in found.items()}),
              flush=True)


# -- the job ------------------------------------------------------------------

def start(spec, **variables):
    """Start a process of the job."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.processes", json.dumps(spec)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables})


def job(spec):
    """What rank 0 of two found."""
    common = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port())}
    with started() as children:
        if spec["what"] == "gradients":
            common.update({
                "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_NODE_HOST": "127.0.0.1",
                "DMLC_PS_ROOT_PORT": str(free_port()),
                "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": str(SIZE)})
            children += [start({"what": "serve"}, DMLC_ROLE=role, **common)
                         for role in ("scheduler", "server")]
            common["DMLC_ROLE"] = "worker"
        ranks = [start({**spec, "rank": rank}, RANK=str(rank),
                       LOCAL_RANK=str(rank), **common)
                 for rank in range(SIZE)]
        children += ranks
        return answer(ranks[0], children, spec.get("limit", 600))


def main():
    spec = json.loads(sys.argv[1])
    if spec["what"] == "serve":
        import mgpu
        mgpu.set_backend("mxnet")   # in these roles the import serves
    elif "rank" in spec:
        rank_of(spec)
    else:
        print(json.dumps(job(spec)))


if __name__ == "__main__":
    main()
