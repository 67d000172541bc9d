"""Learning rates of other updates."""
from mutants.planting import Mutant, edit

_LR = "mgpu.lr_scheduler:"
_TESTS = ("test_lr_scheduler.py::test_values_by_hand",)

MUTANTS = [
    Mutant("steps-for-updates", "a schedule counts steps where Gluon counts a "
           "parameter's updates",
           edit("mgpu.trainer:Trainer._next_update",
                'self.optimizer.semantics == "torch"', "True"),
           ("test_trainer.py::test_what_gluon_asks_a_schedule_for*",)),
    Mutant("factor-one-early", "the change comes with update `step`",
           edit(_LR + "FactorScheduler.after_warmup",
                "(num_update - 1) // self.step", "num_update // self.step"),
           _TESTS),
    Mutant("factor-without-floor", "the rate falls below stop_factor_lr",
           edit(_LR + "FactorScheduler.after_warmup",
                "max(lr * self.factor, self.stop_factor_lr)",
                "lr * self.factor"), _TESTS),
    Mutant("multifactor-one-early", "the change comes with the named update",
           edit(_LR + "MultiFactorScheduler.after_warmup",
                "(self.step, num_update)", "(self.step, num_update + 1)"),
           _TESTS),
    Mutant("cosine-ends-early", "the last rate comes one update too soon",
           edit(_LR + "CosineScheduler.curve", "done / self.max_steps",
                "min(1, done / (self.max_steps - 1))"), _TESTS),
    Mutant("poly-linear", "the power is not read",
           edit(_LR + "PolyScheduler.curve", "self.power", "1"), _TESTS),
    Mutant("decay-to-zero", "the final rate is not read",
           edit(_LR + "_Decay.after_warmup",
                "self.final_lr + \\\n", "0 + \\\n"), _TESTS),
    Mutant("warm-up-one-early", "the warm-up begins one update on",
           edit(_LR + "LRScheduler.get_warmup_lr", "rise * num_update",
                "rise * (num_update + 1)"), _TESTS),
]
