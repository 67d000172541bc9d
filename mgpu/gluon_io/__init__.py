"""What Gluon leaves on disk, read and written without MXNet: NumPy alone."""
from mgpu.gluon_io.params import (CSR, RowSparse, UnreadableParams,
                                  load_params, save_params)
from mgpu.gluon_io.states import (Record, TrainerStates, load_trainer_states)

__all__ = ["CSR", "Record", "RowSparse", "TrainerStates", "UnreadableParams",
           "load_params", "load_trainer_states", "save_params"]
