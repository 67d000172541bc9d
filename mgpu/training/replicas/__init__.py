"""Networks on lists of devices."""
from mgpu.data.nested import as_inputs
from mgpu.errors import ReplicaMismatchError
from mgpu.training.parameters import Parameter, get_params
from mgpu.training.replicas.initialization import BATCH_NORM, initialize
from mgpu.training.replicas.replicas import Replicas, ReplicaView
from mgpu.training.replicas.selection import replicas_of

__all__ = ["BATCH_NORM", "Parameter", "ReplicaMismatchError", "ReplicaView",
           "Replicas", "as_inputs", "get_params", "initialize", "replicas_of"]
