"""What Gluon leaves on disk, read and written without MXNet: NumPy alone."""
from mgpu.gluon_io.graph import Graph, Node, UnreadableSymbol, load_graph
from mgpu.gluon_io.params import (CSR, RowSparse, UnreadableParams,
                                  load_params, save_params)
from mgpu.gluon_io.parts import (Call, Layer, Missing, MissingOperator, Slot,
                                 Source)
from mgpu.gluon_io.states import (Record, TrainerStates, load_trainer_states)

__all__ = ["CSR", "Call", "Graph", "Layer", "Missing", "MissingOperator",
           "Node", "Record", "RowSparse", "Slot", "Source", "TrainerStates",
           "UnreadableParams", "UnreadableSymbol", "load_graph",
           "load_params", "load_trainer_states", "save_params"]
