"""Update rules of other formulas."""
from mutants.planting import Mutant, edit

_BASE = "mgpu.optimizers.base:"
_OPT = "mgpu.optimizers.gluon_rules:"


def _gluon(start):
    return (f"test_optimizers.py::test_rule_is_the_library[torch-gluon-{start}"
            "*",)


_SGD = _gluon("sgd-learning_rate=0.0625-momentum=0.5-wd=0.125")
_ADAM = _gluon("adam-")

MUTANTS = [
    Mutant("any-option-taken", "a rate under a wrong name changes nothing",
           edit("mgpu.optimizers.base:Optimizer.__setattr__",
                "is type(self)", "is None"),
           ("test_optimizers.py::test_an_option_that_is_none_is_refused",)),
    Mutant("decay-of-nothing", "weight decay is left out",
           edit(_BASE + "Optimizer.decayed", "grad + weight * wd", "grad"),
           _SGD),
    Mutant("decay-twice", "weight decay counts twice",
           edit(_BASE + "Optimizer.decayed", "weight * wd",
                "weight * (2 * wd)"), _SGD),
    Mutant("clip-after-decay", "sgd clips the sum of gradient and decay",
           edit(_BASE + "Optimizer.decayed",
                "grad = self.clipped(grad, ops)", "pass",
                "grad if self.clips_before_decay else ", ""), _SGD),
    Mutant("clip-before-decay", "adam clips the gradient only",
           edit(_BASE + "Optimizer.decayed",
                "if self.clips_before_decay:", "if True:",
                "if self.clips_before_decay else self.clipped(grad, ops)", ""),
           _ADAM),
    Mutant("rate-outside-velocity", "a new rate rescales old steps, as torch's"
           , edit(_OPT + "SGD.update", "wd, ops) * lr", "wd, ops)",
                  "weight -= step", "weight -= step * lr",
                  "weight += velocity", "weight += velocity * lr"), _SGD),
    Mutant("momentum-forgotten", "the velocity is only the last step",
           edit(_OPT + "SGD.update", "velocity *= self.momentum",
                "velocity *= 0"), _SGD),
    Mutant("nag-without-look-ahead", "Nesterov's rule is plain momentum",
           edit(_OPT + "NAG.update",
                "ahead * (1 + self.momentum) - before", "ahead"),
           _gluon("nag-learning_rate=0.0625-momentum=0.5-wd=0.0]")),
    Mutant("adam-epsilon-inside", "epsilon is under the root",
           edit(_OPT + "Adam._step", "ops.sqrt(variance) + self.epsilon",
                "ops.sqrt(variance + self.epsilon)"), _ADAM),
    Mutant("adam-epsilon-moved", "epsilon acts after the bias correction, as "
           "torch's", edit(_OPT + "Adam._step", "self.epsilon",
                           "self.epsilon * math.sqrt(1 - self.beta2 ** t)"),
           _ADAM),
    Mutant("bias-correction-forgotten", "the first steps are short",
           edit(_OPT + "Adam._step", "lr *= ", "1 * "), _ADAM),
    Mutant("betas-swapped", "the two averages change their memory",
           edit(_OPT + "Adam._step", "move_average(mean, grad, self.beta1)",
                "move_average(mean, grad, self.beta2)",
                "grad * grad, self.beta2", "grad * grad, self.beta1"), _ADAM),
    Mutant("adamw-decay-without-rate", "the decay is not scaled by the rate",
           edit(_OPT + "AdamW.update", "lr * wd", "wd"), _gluon("adamw-")),
    Mutant("adamax-without-decay-of-norm", "the norm never falls",
           edit(_OPT + "Adamax.update", "norm * self.beta2", "norm"),
           _gluon("adamax-")),
    Mutant("nadam-momentum-constant", "the schedule of momenta is left out",
           edit(_BASE + "nadam_momentum",
                "beta1 * (1 - 0.5 * 0.96 ** (t * decay))", "beta1"),
           _gluon("nadam-")),
    Mutant("rmsprop-epsilon-outside", "epsilon is added to the root",
           edit(_OPT + "RMSProp.update", "ops.sqrt(spread + self.epsilon)",
                "(ops.sqrt(spread) + self.epsilon)"), _gluon("rmsprop-")),
    Mutant("adagrad-forgets", "the sum of squares is the last square",
           edit(_OPT + "AdaGrad.update", "history += grad * grad",
                "history[:] = grad * grad"), _gluon("adagrad-")),
    Mutant("adadelta-one-average", "the steps are not averaged",
           edit(_BASE + "adadelta_step",
                "move_average(past, step * step, rho)", "pass"),
           _gluon("adadelta")),
    Mutant("ftrl-sign", "the threshold is added, not taken off",
           edit(_OPT + "Ftrl.update", "limited(z, self.lamda1, ops) - z",
                "-limited(z, self.lamda1, ops) - z"), _gluon("ftrl-")),
]
