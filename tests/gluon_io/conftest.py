"""What the tests of Gluon's files share."""
import importlib.util

import pytest

import mgpu


@pytest.fixture
def mx():
    with mgpu.using_backend("mxnet"):
        import mxnet
        yield mxnet


def files_in(folder, name="net"):
    """Those of an export: the graph, and the arrays."""
    return folder / f"{name}-symbol.json", folder / f"{name}-0000.params"


def imported(path):
    """The module that a source file is."""
    spec = importlib.util.spec_from_file_location("net", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def export(net, folder, *inputs, name="net", init="uniform"):
    """The two files of a network of Gluon's, after a pass of `inputs`: arrays
    or the shapes of ones."""
    import mxnet as mx
    net.initialize(init)
    net.hybridize()
    net(*(mx.nd.ones(x) if isinstance(x, tuple) else x for x in inputs))
    mx.nd.waitall()
    net.export(str(folder / name))
    return files_in(folder, name)


@pytest.fixture
def path(tmp_path):
    """Of a file that is not there yet."""
    return str(tmp_path / "file")


@pytest.fixture
def training(tmp_path):
    """Begins a `Training` whose files are in a folder of its own, and takes
    `steps`. What mgpu does in the test it does by PyTorch."""
    from .trainings import Training

    def make(*arguments, steps=0, **options):
        one = Training(tmp_path, *arguments, **options)
        one.step(steps)
        return one
    with mgpu.using_backend("torch"):
        yield make
