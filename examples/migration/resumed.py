"""Step 6: resume the training of step 1, with its optimizer state."""
import mgpu

mgpu.set_backend("torch")
from loop import DEVICES, digits, train             # noqa: E402

replicas, trainer, notes = mgpu.resume_from_gluon(
    "net-symbol.json", "net-0000.params", "net.states", DEVICES,
    order="sorted")     # its trainer was given net.collect_params()
print(*notes, sep="\n")
train(replicas, trainer, *digits(), 1)
mgpu.to_safetensors(replicas.net, "trained.safetensors")
