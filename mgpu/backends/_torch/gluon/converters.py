"""The functions that `mgpu.compat.conversion` describes, by its names."""
from mgpu.backends._torch.gluon.build import (missing_operators,
                                              to_gluon_params)
from mgpu.backends._torch.gluon.files import to_pt2, to_safetensors
from mgpu.backends._torch.gluon.source.files import gluon_source
from mgpu.gluon_io.parts import register_op

__all__ = ["gluon_source", "missing_operators", "register_op",
           "to_gluon_params", "to_pt2", "to_safetensors"]
