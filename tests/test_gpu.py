"""On real CUDA devices: ``pytest -m gpu``. Left out otherwise, by the marker.

One card is enough: ``MGPU_LOGICAL_GPUS`` shares it.
"""
import numpy as np
import pytest

import mgpu
from helpers import convnet, relative_difference

pytestmark = pytest.mark.gpu


@pytest.fixture(params=(1, 2, 4))
def gpus(request):
    import torch
    assert torch.cuda.is_available(), "pytest -m gpu needs a CUDA device"
    with pytest.MonkeyPatch.context() as patch, mgpu.using_backend("torch"):
        patch.setenv("MGPU_LOGICAL_GPUS", str(request.param))
        assert mgpu.num_gpus() == request.param
        yield mgpu.list_devices(request.param)


def test_arrays(gpus):
    xs = [mgpu.put(np.full((3, 2), i + 1.0), d) for i, d in enumerate(gpus)]
    assert all(x.device.type == "cuda" for x in xs)
    mgpu.allreduce(xs)
    total = sum(range(1, len(gpus) + 1))
    for x in xs:
        assert (mgpu.to_numpy(x) == total).all()
    mgpu.synchronize(gpus)


def test_nccl():
    """On all cards there are; with one it is a copy of itself."""
    import torch
    with mgpu.using_backend("torch"):
        gpus = [mgpu.gpu(i) for i in range(torch.cuda.device_count())]
        xs = [mgpu.put(np.full((3, 2), i + 1.0), d)
              for i, d in enumerate(gpus)]
        mgpu.allreduce(xs, algorithm="native")
        for x in xs:
            assert (mgpu.to_numpy(x) == sum(range(1, len(gpus) + 1))).all()


@pytest.mark.parametrize("policy", ("per_device", "average", "sync"))
def test_training_equals_the_cpu(gpus, policy):
    rng = np.random.default_rng(0)
    X, y = rng.random((7, 1, 12, 12)), rng.integers(0, 10, 7)
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    values = []
    for devices in (gpus, [mgpu.cpu(i) for i in range(len(gpus))]):
        replicas = mgpu.initialize(
            convnet(mgpu.get_backend(), 1, 10), devices, dtype="float64",
            init="xavier", batch_norm=policy)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        for _ in range(3):
            mgpu.train_batch(X, y, replicas, loss, trainer)
        values.append(replicas.export_numpy(all_devices=True))
    for name, value in values[0].items():
        # cuDNN sums in another order than the CPU
        assert relative_difference(value, values[1][name], 1.0) < 1e-10, name


def test_wrong_card():
    with mgpu.using_backend("torch"):
        with pytest.raises(ValueError, match="is not available"):
            mgpu.initialize(convnet(mgpu.get_backend()), [mgpu.gpu(64)],
                            "uniform")


def small(devices):
    import torch
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(),
                              torch.nn.Dropout(0.5), torch.nn.Linear(5, 3))
    replicas = mgpu.initialize(net, devices, dtype="float64")
    return net, replicas, mgpu.Trainer(replicas, "sgd", {
        "learning_rate": 0.125, "momentum": 0.5})


def step(replicas, trainer, seed=0):
    rng = np.random.default_rng(seed)
    mgpu.train_batch(rng.normal(size=(7, 6)), rng.integers(0, 3, 7), replicas,
                     mgpu.losses.SoftmaxCrossEntropyLoss(), trainer)


def test_edits_of_the_network_reach_all_cards(gpus):
    """By torch's count of writes: NumPy does not see a card's memory."""
    import torch
    net, replicas, trainer = small(gpus)
    step(replicas, trainer)
    with torch.no_grad():
        net[0].weight.clamp_(-0.01, 0.01)
    step(replicas, trainer)
    replicas.check_equal()


def test_clipping_one_cards_part_is_refused(gpus):
    import torch
    net, replicas, trainer = small(gpus)
    shards = mgpu.split_and_load(np.ones((8, 6)), gpus, even_split=False)
    with mgpu.record():
        losses = [out.sum() for out in replicas(shards)]
    mgpu.backward(losses)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    if len(gpus) == 1:
        trainer.step(8)
        return
    with pytest.raises(RuntimeError, match="clip_global_norm"):
        trainer.step(8)
