"""Step 4: MXNet's network and the converted one train the same."""
import mgpu
from mgpu import parity


def gluons():
    with mgpu.using_backend("mxnet"):
        return mgpu.from_gluon("net-symbol.json", "net-0000.params")


def converted():
    with mgpu.using_backend("torch"):
        return mgpu.from_gluon("net-symbol.json", "net-0000.params")


train, _ = mgpu.datasets.digits(8, resize=16, limit=24, dtype="float64")
print(parity.compare(gluons, converted, batches=train, devices=2,
                     optimizer_params={"learning_rate": 0.125,
                                       "momentum": 0.5}))
