"""Made the files of this folder, once, with mgpu 0.2.0, MXNet 1.9.1 and
PyTorch: ``python tests/files/0.2/make.py``. Later versions read them.

What they are of stands in ``tests/test_old_files.py``. (``names.json`` is a
frozen list, which is edited by hand.)
"""
import os
import random
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]

import mgpu  # noqa: E402

assert mgpu.__version__ == "0.2.0", "these files are 0.2's"

for name in "torch", "mxnet":
    mgpu.set_backend(name)

import numpy as np  # noqa: E402
import test_old_files as old  # noqa: E402
import torch  # noqa: E402

from mgpu import parity  # noqa: E402
from mgpu.lr_scheduler import FactorScheduler  # noqa: E402


def begin_streams():
    mgpu.seed(5)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def trained(kind, backend):
    """A trainer after three steps, with a change of the rate before the
    third, which its file has to say."""
    replicas, trainer, arguments = old.begin(kind, backend)
    first = replicas.params()[0]
    for step in range(3):
        if kind == "frozen":
            first.grad_req = "null" if step == 0 else "write"
        if kind == "loss_scale" and step == 1:
            X, y = old.BATCH
            mgpu.train_batch(X * np.inf, y, replicas, old.LOSS, trainer)
        if step == 2 and kind.startswith("torch.optim"):
            for group in arguments["optimizer"].param_groups:
                group["lr"] *= 0.5
        elif step == 2 and trainer.lr_scheduler is None:
            trainer.set_learning_rate(0.75 * trainer.learning_rate)
        mgpu.train_batch(*old.BATCH, replicas, old.LOSS, trainer)
    return replicas, trainer


def trainers(backend):
    folder, found = HERE / f"{backend.name}-trainers", {}
    for semantics, rules in mgpu.optimizers.RULES.items():
        assert {f"{semantics}-{rule}" for rule in rules} <= {*old.TRAINERS}
    folder.mkdir(exist_ok=True)
    for kind in old.TRAINERS:
        if kind.startswith("torch") != (backend.name == "torch"):
            continue
        replicas, trainer = trained(kind, backend)
        values = old.flat(replicas)
        trainer.save_states(folder / f"{kind}.states")
        if backend.name == "torch" and kind == "torch-adam":
            torch.save(trainer.state_dict(), folder / "state_dict.pt")
        mgpu.train_batch(*old.BATCH, replicas, old.LOSS, trainer)
        found[kind] = np.stack([values, old.flat(replicas)])
        # The states matter: another step comes without them.
        replicas, trainer, _ = old.begin(kind, backend)
        old.put(replicas, values)
        mgpu.train_batch(*old.BATCH, replicas, old.LOSS, trainer)
        assert np.abs(old.flat(replicas) - found[kind][1]).max() > 1e-6, kind
    np.savez(HERE / f"{backend.name}-trainers.npz", **found)


def named(begin, values):
    return {f"{begin}|{name}": x for name, x in values.items()}


def checkpoints(backend):
    for policy, count in ("per_device", 3), ("sync", 2):
        if (backend.name, policy) == ("torch", "sync"):
            continue    # its streams take 20 kB
        begin_streams()
        run = replicas, _, _ = old.begin_norm(
            backend, old.on(*range(count)), policy)
        replicas.params()[-1].grad_req = "null"
        every, begin = policy == "per_device", f"{backend.name}-{policy}"
        for step in old.steps(run, 6):
            if step == 4:
                mgpu.save_checkpoint(HERE / f"{begin}.checkpoint", *run)
                found = {"draws": old.draws(backend), **named(
                    "values", replicas.export_numpy(all_devices=every))}
        np.savez(HERE / f"{begin}.npz", **found, **named(
            "next", replicas.export_numpy(all_devices=every)))


def statistics(backend):
    run = replicas, _, _ = old.begin_norm(backend, old.on(0, 1, 2))
    list(old.steps(run, 3))
    values = replicas.export_numpy(all_devices=True)
    mgpu.train_batch(*old.BATCH, replicas, old.LOSS, mgpu.Trainer(
        replicas, "sgd", {"learning_rate": 0.0}))
    np.savez(HERE / f"{backend.name}-statistics.npz", **values, **named(
        "next", replicas.export_numpy(all_devices=True)))


def extra(backend):
    begin_streams()
    net = old.counting()
    net[1].state["note"] = old.NOTE
    run = replicas, _, _ = old.begin_norm(backend, old.on(0, 1), net=net)
    for step in old.steps(run, 6):
        if step == 4:
            mgpu.save_checkpoint(HERE / "torch-extra.checkpoint", *run)
            found = named("values", replicas.export_numpy())
            found["sum"] = net[1].state["sum"].numpy()
    np.savez(HERE / "torch-extra.npz", **found,
             **named("next", replicas.export_numpy()))


def keep_one(folder, target):
    """The checkpoint after 4 steps."""
    target.mkdir(exist_ok=True)
    name = "step-00000004.safetensors"
    (target / name).write_bytes((folder / name).read_bytes())


def folders(backend):
    with tempfile.TemporaryDirectory() as place:
        begin_streams()
        run = old.begin_norm(backend, old.on(0, 1))
        found = old.train(run, Path(place, "run"), keep=99)
        np.savez(HERE / f"{backend.name}-folder.npz", **found)
        keep_one(Path(place, "run"), HERE / f"{backend.name}-folder")
    with tempfile.TemporaryDirectory() as place:
        found = old.start_ranks(backend.name, Path(place), keep=99)
        np.savez(HERE / f"{backend.name}-ranks.npz", **found)
        keep_one(Path(place, "run"), HERE / f"{backend.name}-ranks")


def weights(backend):
    run = replicas, _, _ = old.begin_norm(backend, old.on(0))
    list(old.steps(run, 3))
    begin = str(HERE / f"{backend.name}-")
    replicas.save(f"{begin}weights.safetensors")
    replicas.save_parameters(f"{begin}weights.params")
    np.savez(f"{begin}weights.npz", **replicas.export_numpy())
    np.save(f"{begin}predictions.npy", replicas.predict(old.EXAMPLES))


def converted():
    """A network of Gluon's on torch; its values are changed before they are
    written."""
    params = old.SYMBOL.with_name("net-0000.params")
    net = mgpu.from_gluon(old.SYMBOL, params)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.75)
    mgpu.to_gluon_params(net, HERE / "converted.params")
    mgpu.to_safetensors(net, HERE / "converted.safetensors")

    def predicted(net):
        return mgpu.initialize(net, old.on(0), dtype="float64").predict(
            old.PICTURES)
    np.save(HERE / "converted.npy", predicted(net))
    folder = HERE / "converted"
    folder.mkdir(exist_ok=True)
    mgpu.gluon_source(old.SYMBOL, params, folder / "net.py")
    np.save(folder / "net.npy", predicted(
        mgpu.from_gluon(old.SYMBOL, params)))


def traces(backend):
    common = {"batches": [old.BATCH], "steps": 2, "loss": old.LOSS,
              "file": HERE / f"{backend.name}.trace"}

    def net():
        return old.traced(backend.name, backend)
    if backend.name == "mxnet":
        parity.record(net, devices=2, semantics="torch", optimizer_params={
            "lr": 0.125, "momentum": 0.5, "dampening": 0.25}, **common)
    else:
        parity.record(net, optimizer="adam", optimizer_params={
            "lr_scheduler": FactorScheduler(1, 0.5, base_lr=0.125)}, **common)


def main():
    for one in "torch", "mxnet":
        with mgpu.using_backend(one) as backend:
            for make in (trainers, checkpoints, statistics, folders, weights,
                         traces):
                print(one, make.__name__)
                make(backend)
            if one == "torch":
                extra(backend)
                converted()


if __name__ == "__main__":
    os.chdir(HERE)
    main()
