"""What the tests of Gluon's files share."""
import pytest

import mgpu


@pytest.fixture
def mx():
    with mgpu.using_backend("mxnet"):
        import mxnet
        yield mxnet


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
