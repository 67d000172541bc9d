"""Step 5: the loop of step 2 on PyTorch, from MXNet's weights."""
import mgpu

mgpu.set_backend("torch")
from loop import digits, schedule, start, train     # noqa: E402

net = mgpu.from_gluon("net-symbol.json", "net-0000.params")
train(*start(net, schedule()), *digits(), 1)
