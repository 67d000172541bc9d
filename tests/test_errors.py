"""`mgpu.errors`: one family, and the former places of its classes."""
import sys

import mgpu


def test_every_error_has_a_class_of_the_family():
    names = mgpu.errors.__all__
    assert all(issubclass(getattr(mgpu.errors, name), mgpu.errors.MgpuError)
               for name in names)
    # where they were before, with the bases that they had
    for place, name, base in (
            ("mgpu.training.trainer", "StaleGradientError", RuntimeError),
            ("mgpu.training.replicas", "ReplicaMismatchError", RuntimeError),
            ("mgpu.training", "NonFiniteLoss", FloatingPointError),
            ("mgpu.losses", "LabelError", ValueError),
            ("mgpu.backends.strict", "CrossDeviceError", RuntimeError),
            ("mgpu.backends", "BackendNotAvailable", ImportError),
            ("mgpu.gluon_io", "UnreadableParams", ValueError),
            ("mgpu.gluon_io", "UnreadableSymbol", ValueError),
            ("mgpu.gluon_io", "MissingOperator", NotImplementedError),
            ("mgpu.parity", "MatchError", ValueError),
            ("mgpu.parity.run", "CannotRun", RuntimeError),
            ("mgpu.testing", "ParityError", AssertionError)):
        __import__(place)
        error = getattr(sys.modules[place], name)
        assert error is getattr(mgpu.errors, name) and name in names
        assert issubclass(error, base)
