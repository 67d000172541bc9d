"""Step 2: the loop is mgpu's; network, backend and numbers stay MXNet's."""
import mgpu

mgpu.set_backend("mxnet")
from legacy import EPOCHS, resnet                   # noqa: E402
from loop import digits, schedule, start, train     # noqa: E402

train(*start(resnet(), schedule()), *digits(), EPOCHS)
