"""The book's own helpers (*Dive into Deep Learning*, d2l.ai): what its
chapters "Automatic Parallelism", "Training on Multiple GPUs" and "Concise
Implementation for Multiple GPUs" call, on either backend."""
from mgpu.backends.device import try_all_gpus, try_gpu
from mgpu.data.split import split_batch
from mgpu.nn.models import resnet18
from mgpu.tools.plotting import Animator
from mgpu.tools.timing import Accumulator, Benchmark, Timer
from mgpu.training.evaluation import (evaluate_accuracy_gpu,
                                      evaluate_accuracy_gpus)
from mgpu.training.functions import sgd
from mgpu.training.parameters import get_params

__all__ = ["Accumulator", "Animator", "Benchmark", "Timer",
           "evaluate_accuracy_gpu", "evaluate_accuracy_gpus", "get_params",
           "resnet18", "sgd", "split_batch", "try_all_gpus", "try_gpu"]
