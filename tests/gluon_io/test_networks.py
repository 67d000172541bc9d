"""Networks of gluoncv2 that classify: their graphs as MXNet exports them, with
values that are drawn here. studies/gluon_networks.py runs hundreds."""
import importlib.util
import json
import zipfile

import pytest

import mgpu
from conftest import BACKENDS

from .mutations import FILES, TESTS

if set(BACKENDS) < {"mxnet", "torch"}:
    pytest.skip("these compare two engines", allow_module_level=True)

_SPEC = importlib.util.spec_from_file_location(
    "gluon_networks", TESTS.parent / "studies" / "gluon_networks.py")
study = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(study)

with zipfile.ZipFile(FILES / "networks.zip") as _zip:
    #: the image's edge, and what the values are drawn with
    DRAWS = json.loads(_zip.read("draws.json"))

#: of those in the file, as many as there are kinds of blocks
NETWORKS = ("octresnet20_ad2_cifar10", "diaresnet20_cifar10",
            "shakeshakeresnet20_2x16d_cifar10", "shufflenet_g1_wd4",
            "mobilenetv3_small_w7d20")


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_computes_as_mxnets(name):
    """A prediction, gradients and running statistics of a pass."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        with zipfile.ZipFile(FILES / "networks.zip") as file:
            text = file.read(f"{name}.json").decode()
        found = study.compare(mx.sym.load_json(text), *DRAWS[name])
    assert not study.verdict(found), found


@pytest.mark.parametrize("change", ["weight", "running_mean", None])
def test_the_comparison_sees_a_change(change):
    """Of one number in a million of itself."""
    def moved(net):
        for key, x in net.state_dict().items():
            if change and key.endswith(change):
                x.view(-1)[0] *= 1 + 1e-6
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        symbol = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3),
                                    num_filter=4)
        symbol = mx.sym.FullyConnected(
            mx.sym.BatchNorm(symbol, fix_gamma=False), num_hidden=3)
        found = study.compare(symbol, 8, 1, 0, change=moved)
    assert study.verdict(found) == ("differs" if change else "")
