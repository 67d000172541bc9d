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
