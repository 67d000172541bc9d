"""The public names of `mgpu`, which loads this module when one is used."""
from mgpu import (callbacks, checkpoints, collectives, d2l, datasets,
                  distributed, errors, initializers, losses, metrics,
                  optimizers)
from mgpu.backends import (BackendNotAvailable, available_backends,
                           get_backend, mxnet_compat, set_backend,
                           using_backend)
from mgpu.backends.device import (Device, cpu, gpu, list_devices, num_gpus,
                                  try_all_gpus, try_gpu)
from mgpu.backends.network import Kwargs
from mgpu.backends.strict import CrossDeviceError, strict_devices
from mgpu.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from mgpu.checkpoints.resuming import Resumed, resume_from_gluon
from mgpu.collectives import (allgather, allreduce, allreduce_many,
                              assign_roots, broadcast, reduce, reducescatter)
from mgpu.compat.conversion import (from_gluon, gluon_source,
                                    missing_operators, register_op,
                                    to_gluon_params, to_pt2, to_safetensors)
from mgpu.compat.gluon import clip_global_norm
from mgpu.data.prefetching import prefetch
from mgpu.data.split import (shard_bounds, split_and_load, split_batch,
                             split_data)
from mgpu.errors import NonFiniteLoss, ReplicaMismatchError
from mgpu.nn import functional, models
from mgpu.optim import lr_scheduler
from mgpu.tools.plotting import Animator
from mgpu.tools.profiling import Profile
from mgpu.tools.timing import (Accumulator, Benchmark, Timer, synchronize,
                               waitall)
from mgpu.training.data_parallel import DataParallel
from mgpu.training.evaluation import (accuracy, evaluate,
                                      evaluate_accuracy_gpu,
                                      evaluate_accuracy_gpus)
from mgpu.training.functions import (attach_grad, backward, grad, no_grad,
                                     parallel, put, record, seed, sgd,
                                     to_numpy)
from mgpu.training.history import History
from mgpu.training.loop import train, train_epochs
from mgpu.training.parameters import Parameter, get_params
from mgpu.training.replicas import Replicas, initialize
from mgpu.training.step import train_batch
from mgpu.training.trainer import StaleGradientError, Trainer

__all__ = [
    "DataParallel", "Device", "Kwargs", "Profile", "Replicas", "Trainer",
    "backward", "callbacks", "checkpoints", "collectives", "cpu", "d2l",
    "datasets", "distributed", "errors", "evaluate", "from_gluon",
    "get_backend", "gpu", "initialize", "initializers", "list_devices",
    "losses", "lr_scheduler", "metrics", "models", "num_gpus",
    "optimizers", "parallel", "prefetch", "put", "record",
    "resume_from_gluon", "seed", "set_backend", "split_and_load",
    "split_batch", "strict_devices", "synchronize", "to_numpy", "train",
    "train_batch", "using_backend",
]
#: what ``dir(mgpu)`` lists
LISTED = (*__all__, "__version__", "parity")
# Names that their packages list: `mgpu.collectives`, `mgpu.d2l`, ...
__all__ += [
    "Accumulator", "Animator", "BackendNotAvailable", "Benchmark",
    "CrossDeviceError", "History", "NonFiniteLoss", "Parameter",
    "ReplicaMismatchError", "Resumed", "StaleGradientError", "Timer",
    "accuracy", "allgather", "allreduce", "allreduce_many", "assign_roots",
    "attach_grad", "available_backends", "broadcast", "clip_global_norm",
    "evaluate_accuracy_gpu", "evaluate_accuracy_gpus", "functional",
    "get_params", "gluon_source", "grad", "load_checkpoint",
    "missing_operators", "mxnet_compat", "no_grad", "reduce",
    "reducescatter", "register_op", "save_checkpoint", "sgd",
    "shard_bounds", "split_data", "to_gluon_params", "to_pt2",
    "to_safetensors", "train_epochs", "try_all_gpus", "try_gpu", "waitall",
]
