"""Step 5: the loop of step 2 on PyTorch: it goes on with MXNet's weights."""
import mgpu

mgpu.set_backend("torch")
from loop import digits, train                  # noqa: E402

net = mgpu.from_gluon("net-symbol.json", "net-0000.params")
replicas, trainer = train(net, *digits(), 1, mgpu.lr_scheduler.FactorScheduler(
    1000, base_lr=0.0625))
mgpu.to_safetensors(net, "trained.safetensors")
