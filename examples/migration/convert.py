"""Step 3: the exported network in PyTorch; no MXNet from here on."""
import mgpu

mgpu.set_backend("torch")
net = mgpu.from_gluon("net-symbol.json", "net-0000.params")
mgpu.to_safetensors(net, "net.safetensors")
print(f"{sum(p.numel() for p in net.parameters()):,} trained values")
