"""The public names of `mgpu`, which loads this module when one is used."""
from mgpu import (callbacks, datasets, distributed, errors, functional,
                  initializers, losses, lr_scheduler, metrics, models,
                  optimizers)
from mgpu.backends import (BackendNotAvailable, available_backends,
                           get_backend, mxnet_compat, set_backend,
                           using_backend)
from mgpu.backends.base import Kwargs
from mgpu.checkpoint import load_checkpoint, save_checkpoint
from mgpu.collectives import (allgather, allreduce, allreduce_many,
                              assign_roots, broadcast, reduce, reducescatter)
from mgpu.compat.gluon import clip_global_norm
from mgpu.conversion import (from_gluon, gluon_source, missing_operators,
                             register_op, to_gluon_params, to_pt2,
                             to_safetensors)
from mgpu.device import (Device, cpu, gpu, list_devices, num_gpus,
                         try_all_gpus, try_gpu)
from mgpu.evaluation import (accuracy, evaluate, evaluate_accuracy_gpu,
                             evaluate_accuracy_gpus)
from mgpu.plotting import Animator
from mgpu.prefetching import prefetch
from mgpu.profiling import Profile
from mgpu.parameters import Parameter, get_params
from mgpu.errors import ReplicaMismatchError
from mgpu.replicas import Replicas, initialize
from mgpu.resuming import Resumed, resume_from_gluon
from mgpu.split import (shard_bounds, split_and_load, split_batch,
                        split_data)
from mgpu.strict import CrossDeviceError, strict_devices
from mgpu.timing import (Accumulator, Benchmark, Timer, synchronize,
                         waitall)
from mgpu.trainer import StaleGradientError, Trainer
from mgpu.training import (History, NonFiniteLoss, attach_grad, backward, grad,
                           no_grad, parallel, put, record, seed, sgd, to_numpy,
                           train, train_batch, train_epochs)
from mgpu.training.data_parallel import DataParallel

__all__ = [
    "Accumulator", "Animator", "BackendNotAvailable", "Benchmark",
    "CrossDeviceError", "DataParallel", "Device", "History", "Kwargs",
    "NonFiniteLoss", "Parameter", "Profile", "ReplicaMismatchError",
    "Replicas", "Resumed", "StaleGradientError", "Timer", "Trainer",
    "accuracy", "allgather",
    "allreduce", "allreduce_many", "assign_roots", "attach_grad",
    "available_backends", "backward", "broadcast", "callbacks",
    "clip_global_norm", "cpu", "datasets", "distributed", "errors",
    "evaluate", "evaluate_accuracy_gpu", "evaluate_accuracy_gpus",
    "from_gluon", "functional", "get_backend", "get_params", "gluon_source",
    "gpu", "grad", "initialize", "initializers", "list_devices",
    "load_checkpoint", "losses", "lr_scheduler", "metrics",
    "missing_operators", "models",
    "mxnet_compat", "no_grad", "num_gpus", "optimizers", "parallel",
    "prefetch", "put", "record", "reduce", "reducescatter", "register_op",
    "resume_from_gluon", "save_checkpoint", "seed", "set_backend", "sgd",
    "shard_bounds", "split_and_load", "split_batch",
    "split_data", "strict_devices",
    "synchronize", "to_gluon_params", "to_numpy", "to_pt2", "to_safetensors",
    "train", "train_batch", "train_epochs", "try_all_gpus", "try_gpu",
    "using_backend", "waitall",
]
