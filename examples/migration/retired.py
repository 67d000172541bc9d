"""Step 7: predictions by torch.export; MXNet is not needed any more."""
import mgpu

mgpu.set_backend("torch")
import numpy as np                              # noqa: E402
from loop import digits                         # noqa: E402
from safetensors.torch import load_model        # noqa: E402

net = mgpu.from_gluon("net-symbol.json", "net-0000.params")
load_model(net, "trained.safetensors")
_, test = digits()
X, y = next(iter(test))
mgpu.to_pt2(net, "trained.pt2", [X])

import torch                                    # noqa: E402

loaded = torch.export.load("trained.pt2").module()
right = [(loaded(torch.from_numpy(X)).argmax(1).numpy() == y).mean()
         for X, y in test]
print(f"accuracy {np.mean(right):.3f}")
