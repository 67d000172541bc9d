"""No formula is left out: each rule, loss, initializer, schedule, policy,
strategy and function of `mgpu` is covered by a test of this folder, or stands
below with the test that has its numbers."""
import glob
import importlib
import inspect
import os

from mgpu import collectives, optim
from mgpu.backends.ops import Ops
from mgpu.nn import functional, initializers, losses, models
from mgpu.optim import lr_scheduler
from mgpu.training import replicas
from threeway import COVERED

HERE = os.path.dirname(os.path.abspath(__file__))

#: name -> where its numbers are compared
ELSEWHERE = {
    **dict.fromkeys(("optimizers.gluon.sgld", "optimizers.gluon.groupadagrad"),
                    "tests/test_optimizers.py: noise, and rows of matrices"),
    **dict.fromkeys(("losses.CTCLoss", "losses.CosineEmbeddingLoss",
                     "losses.SDMLLoss", "losses.TripletLoss"),
                    "tests/test_losses.py: Gluon's and torch's own numbers"),
    **{f"lr_scheduler.{name}": "tests/test_lr_scheduler.py: Gluon's numbers"
       for name in lr_scheduler.__all__ if name != "LRScheduler"},
    "collectives.native": "the frameworks' own, which only one backend has on "
                          "CPUs; tests/test_collectives.py: exact sums",
}


def _subclasses(module, kind):
    """Also the names that stand for another, as SoftmaxCELoss does."""
    return [name for name, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, kind)
            and value is not kind and name[0] != "_"]


def formulas():
    for semantics, table in optim.RULES.items():
        yield from (f"optimizers.{semantics}.{name}" for name in table)
    for module, kind in ((losses, losses.Loss),
                         (initializers, initializers.Initializer),
                         (lr_scheduler, lr_scheduler.LRScheduler)):
        yield from (f"{module.__name__.split('.')[-1]}.{name}"
                    for name in _subclasses(module, kind))
    yield from (f"models.{name}" for name, value in vars(models).items()
                if inspect.isfunction(value) and name[0] != "_"
                and value.__module__ == models.__name__)
    yield from (f"batch_norm.{policy}" for policy in replicas.BATCH_NORM)
    yield from (f"collectives.{name}" for name in collectives.ALGORITHMS)
    # those of a backend: tests/test_contract.py
    yield from (f"functional.{name}" for name in functional.__all__
                if not hasattr(Ops, name))


FORMULAS = set(formulas())
# whichever of them pytest was asked to run
for _path in glob.glob(os.path.join(HERE, "test_*.py")):
    importlib.import_module(os.path.splitext(os.path.basename(_path))[0])


def test_every_formula_is_covered():
    """By one of both; a name that is gone, or misspelt, covers nothing."""
    assert sorted([*COVERED, *ELSEWHERE]) == sorted(FORMULAS), (
        "each formula needs a test in tests/oracle that says covers(name), or "
        "a line in ELSEWHERE")


def test_the_search_finds_formulas():
    """Had it found nothing, everything would be covered."""
    assert len(FORMULAS) > 70
    assert {"optimizers.torch.nadam", "losses.SigmoidBCELoss",
            "initializers.LSTMBias", "lr_scheduler.PolyScheduler",
            "batch_norm.sync", "functional.allgather",
            "models.lenet_forward", "collectives.ring"} <= FORMULAS
