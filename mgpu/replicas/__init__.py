"""Networks on lists of devices."""
from mgpu.errors import ReplicaMismatchError
from mgpu.nested import as_inputs
from mgpu.parameters import Parameter, get_params
from mgpu.replicas.initialization import BATCH_NORM, initialize
from mgpu.replicas.replicas import Replicas, ReplicaView
from mgpu.replicas.selection import replicas_of

__all__ = ["BATCH_NORM", "Parameter", "ReplicaMismatchError", "ReplicaView",
           "Replicas", "as_inputs", "get_params", "initialize", "replicas_of"]
