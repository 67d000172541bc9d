"""Nothing public is left out: each name of `mgpu` is covered by a test of
this folder, or stands below with the reason why it has no numbers to compare.
"""
import ast
import glob
import importlib
import inspect
import os

import mgpu
from mgpu import collectives, functional, initializers, losses, lr_scheduler
from mgpu import models, optimizers, replicas
from mgpu.backends import base
from threeway import COVERED

HERE = os.path.dirname(os.path.abspath(__file__))

_WALKED = "a module; its own names are walked below"
_CHOICE = "chooses or names an engine"
_PLACE = "names devices"
_ERROR = "an error; the tests of its module raise it"
_CLOCK = "seconds, which no two runs share"
_READS = "says what was given, computes nothing"
#: public name -> why no test of this folder compares numbers of it
NO_NUMBERS = {
    **dict.fromkeys(("functional", "initializers", "losses", "lr_scheduler",
                     "models", "optimizers"), _WALKED),
    "distributed": "tests/distributed compares processes with one process",
    "errors": "errors; the tests of their modules raise them",
    **dict.fromkeys(("Parameter", "Replicas"),
                    "a class; its members are walked below"),
    "datasets": "reads files with NumPy only, before there is an engine",
    "callbacks": "tests/test_callbacks.py compares averages with torch's",
    **dict.fromkeys(("metrics", "evaluate"),
                    "tests/test_metrics.py compares them with MXNet's"),
    "DataParallel": "tests/test_data_parallel.py compares with one device",
    "Replicas.predict": "tests/test_prediction.py: the rows of one device",
    **dict.fromkeys(("Replicas.save", "Replicas.load"),
                    "tests/test_prediction.py: the same bits after it"),
    **dict.fromkeys(("Trainer.step_parts", "Trainer.check_parts"),
                    "tests/test_callbacks.py: the step of the joined batch"),
    **dict.fromkeys(("available_backends", "get_backend", "mxnet_compat",
                     "set_backend", "using_backend"), _CHOICE),
    **dict.fromkeys(("Device", "cpu", "gpu", "list_devices", "num_gpus",
                     "try_all_gpus", "try_gpu"), _PLACE),
    **dict.fromkeys(("BackendNotAvailable", "CrossDeviceError",
                     "NonFiniteLoss", "ReplicaMismatchError",
                     "StaleGradientError"), _ERROR),
    **dict.fromkeys(("Benchmark", "Timer"), _CLOCK),
    "Animator": "draws what it is given",
    **dict.fromkeys(("Resumed", "from_gluon", "gluon_source",
                     "missing_operators", "register_op", "resume_from_gluon",
                     "to_gluon_params", "to_pt2", "to_safetensors"),
                    "tests/gluon_io compares them with the real MXNet"),
    **dict.fromkeys(("Replicas.fit_numpy", "Trainer.fit_states",
                     "load_checkpoint",
                     "save_checkpoint"),
                    "tests/test_checkpoint.py: the same bits after it"),
    "Profile": "seconds; tests/test_profiling.py: the same bits with it",
    "prefetch": "the batches of its source; tests/test_prefetch.py",
    "collectives.native": "the frameworks' own, which only one engine has on "
                          "CPUs; tests/test_collectives.py: exact sums",
    **dict.fromkeys(("Kwargs", "Replicas.state_dict",
                     "Replicas.load_state_dict", "Replicas.parameters",
                     "Replicas.named_parameters", "Replicas.named_buffers",
                     "Replicas.train", "Replicas.eval", "Replicas.module"),
                    "tests/test_keyword_inputs.py and test_torch_names.py: "
                    "the framework's own numbers"),
    **dict.fromkeys(("optimizers.gluon.sgld", "optimizers.gluon.groupadagrad"),
                    "tests/test_optimizers.py: noise, and rows of matrices"),
    "Replicas.complete_shapes": "tests/test_gluon_names.py: from a file",
    "Replicas.complete_values": "a piece of `initialize`, which is covered",
    "Replicas.autocast": "only torch has it; tests/test_options.py",
    **dict.fromkeys(("Replicas.compute_gradients", "Trainer.multipliers",
                     "Parameter.multipliers", "Trainer.rate",
                     "Replicas.forward_backward",
                     "Replicas.joined", "Replicas.run_one",
                     "Replicas.end_pass", "Replicas.told",
                     "Replicas.kept_sums",
                     "Replicas.pass_over", "Trainer.optimizer",
                     "Trainer.update_order"),
                    "a piece of `train_batch`, which is covered"),
    **dict.fromkeys((f"Ops.{name}" for name in vars(base.Ops)
                     if name[0] != "_" and name != "astype"),
                    "tests/test_contract.py: NumPy's values and gradients"),
    **dict.fromkeys(("synchronize", "waitall"), "waits"),
    **dict.fromkeys(("clip_global_norm", "split_data",
                     "Replicas.collect_params", "Replicas.hybridize",
                     "Replicas.load_parameters", "Replicas.save_parameters",
                     "Parameter.list_ctx"),
                    "tests/test_gluon_names.py compares with the real Gluon"),
    "strict_devices": "refuses what crosses devices, and changes no number",
    "losses.check_classes": "refuses labels",
    "losses.check_per_example": "refuses shapes",
    **dict.fromkeys(("losses.CTCLoss", "losses.CosineEmbeddingLoss",
                     "losses.SDMLLoss", "losses.TripletLoss"),
                    "tests/test_losses.py: Gluon's and torch's own numbers"),
    "initializers.Initializer": "the base class: each rule is covered",
    "losses.Loss": "the base class: each loss is covered",
    "lr_scheduler.LRScheduler": "the base class: each schedule is covered",
    "optimizers.Optimizer": "the base class: each rule is covered",
    **dict.fromkeys(("optimizers.RULES", "optimizers.State",
                     "optimizers.counterpart"), _READS),
    **dict.fromkeys(("Parameter.place", "Replicas.all_parameters",
                     "Replicas.complete", "Parameter.write",
                     "Trainer.loss_scale", "Trainer.skipped_steps",
                     "Trainer.pending", "Trainer.summed", "Trainer.trains",
                     "Trainer.lr_scheduler", "Trainer.rule",
                     "Replicas.buffers", "Replicas.grad_reqs", "Replicas.net",
                     "Replicas.joint", "Replicas.moved", "Replicas.digest",
                     "Replicas.statistics", "Parameter.dtype",
                     "Parameter.grad_req", "Parameter.list_devices",
                     "Parameter.shape", "Parameter.refit",
                     "Parameter.replicas"), _READS),
    **dict.fromkeys(("Replicas.count", "Replicas.index"), _READS),
    **dict.fromkeys(("Parameter.lr_mult", "Parameter.wd_mult"),
                    "what `Trainer.multipliers` reads; "
                    "tests/test_trainer_rates.py"),
    **dict.fromkeys(("Trainer.clip_grad_norm_", "Trainer.load_state_dict",
                     "Trainer.state_dict", "Trainer.zero_grad"),
                    "tests/test_given_torch.py compares them with torch's"),
    "Replicas.owned": "refuses other threads",
    **dict.fromkeys(("Replicas.check_equal", "Replicas.check_digests"),
                    "compares bits and changes none"),
    **dict.fromkeys(("Replicas.check_valid", "Replicas.check_complete"),
                    "raises an error or nothing"),
    "Replicas.after_step": "called by `Trainer.update`: batch_norm.average",
}


def _own(module):
    """The public functions and classes that a module itself defines."""
    return [name for name, value in vars(module).items()
            if not name.startswith("_") and callable(value)
            and getattr(value, "__module__", None) == module.__name__]


def _members(cls):
    return [name for name in dir(cls) if not name.startswith("_")]


def public_names():
    rules = [rule for table in optimizers.RULES.values()
             for rule in table.values()]
    yield from mgpu.__all__
    for semantics, table in optimizers.RULES.items():
        for name in table:
            yield f"optimizers.{semantics}.{name}"
    for name in optimizers.__all__:
        if getattr(optimizers, name) not in rules:
            yield f"optimizers.{name}"
    # also names that stand for another, as SoftmaxCELoss does
    for name, value in vars(losses).items():
        if name in _own(losses) or inspect.isclass(value) \
                and issubclass(value, losses.Loss):
            yield f"losses.{name}"
    for module in (initializers, lr_scheduler):
        yield from (f"{module.__name__.split('.')[1]}.{name}"
                    for name in {*module.__all__, *_own(module)})
    yield from (f"models.{name}" for name in _own(models))
    yield from (f"batch_norm.{policy}" for policy in replicas.BATCH_NORM)
    yield from (f"collectives.{name}" for name in collectives.ALGORITHMS)
    operations = _members(base.Ops)
    yield from (f"Ops.{name}" for name in operations)
    yield from (f"functional.{name}" for name in functional.__all__
                if name not in operations)
    for cls in (mgpu.Trainer, mgpu.Replicas, mgpu.Parameter):
        yield from (f"{cls.__name__}.{name}" for name in _members(cls))


PUBLIC = sorted(set(public_names()))
#: read whole, whichever of them pytest was asked to run
MODULES = {name: importlib.import_module(name) for name in sorted(
    os.path.splitext(os.path.basename(path))[0]
    for path in glob.glob(os.path.join(HERE, "test_*.py")))
    if name != __name__.rpartition(".")[2]}


def test_every_public_name_is_covered():
    wrong = [name for name in PUBLIC
             if (name in COVERED) == (name in NO_NUMBERS)]
    assert not wrong, (
        f"{', '.join(wrong)}: each needs a test in tests/oracle that says "
        "covers(name), or a reason in NO_NUMBERS; not both")


def test_nothing_else_is_claimed():
    """A name that is gone, or misspelt, covers nothing."""
    assert not COVERED.keys() - set(PUBLIC)
    assert not NO_NUMBERS.keys() - set(PUBLIC)
    assert all(NO_NUMBERS.values())


def used(module):
    """The names that a module says outside of its claims."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = [
                d for d in node.decorator_list if not (
                    isinstance(d, ast.Call)
                    and getattr(d.func, "id", "") == "covers")]
    found = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "value", "arg"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.add(value)
    return found


def test_a_claim_is_a_test_that_says_the_name():
    """Where `mgpu.allreduce` is covered, `allreduce` is written, outside of
    the claim (or comes from a table of the package)."""
    words = {module.__name__: used(module) for module in MODULES.values()}
    idle = [(name, test.__module__, test.__name__)
            for name, tests in COVERED.items() for test in tests
            if name.rpartition(".")[2] not in words[test.__module__]
            and not name.startswith("collectives.")
            or not test.__name__.startswith("test_")]
    assert not idle


def test_the_walk_sees_what_there_is():
    """Had it found nothing, everything would be covered."""
    assert len(PUBLIC) > 150
    assert {"allreduce", "optimizers.torch.nadam", "losses.SigmoidBCELoss",
            "losses.per_example", "initializers.LSTMBias", "Ops.conv2d",
            "lr_scheduler.PolyScheduler", "batch_norm.sync",
            "functional.allgather", "models.lenet_forward", "collectives.ring",
            "Trainer.clip_global_norm", "Parameter.set_data"} <= set(PUBLIC)
