"""Weights drawn by other rules."""
from mutants.planting import Mutant, edit

_INIT = "mgpu.initializers:"
_SPREAD = "test_initializers.py::test_mean_and_spread_follow_the_formula["
_OWN = ("test_initializers.py::test_kinds_other_than_weights_have_their_own_"
        "rule")

MUTANTS = [
    Mutant("xavier-fan-in-only", "the mean of the fans is fan-in",
           edit(_INIT + "Xavier.sample", "(fan_in + fan_out) / 2", "fan_in"),
           (_SPREAD + "Xavier(rnd_type='uniform', factor_type='avg'*",)),
    Mutant("xavier-uniform-as-deviation", "the bound is taken for the "
           "deviation", edit(_INIT + "Xavier.sample", "rng.uniform(-c, c,",
                             "rng.uniform(-c * 3 ** 0.5, c * 3 ** 0.5,"),
           (_SPREAD + "Xavier(rnd_type='uniform', factor_type='avg'*",)),
    Mutant("slope-ignored", "MSRAPrelu takes every slope for 0",
           edit(_INIT + "MSRAPrelu.sample", "1 + self.slope ** 2", "1"),
           (_SPREAD + "MSRAPrelu*",)),
    Mutant("fans-swapped", "fan-in and fan-out change places",
           edit(_INIT + "fans", "shape[1] * kernel, shape[0] * kernel",
                "shape[0] * kernel, shape[1] * kernel"),
           ("test_initializers.py::test_fans",)),
    Mutant("kernel-ignored", "the size of the kernel does not count",
           edit(_INIT + "fans", "math.prod(shape[2:])", "1"),
           ("test_initializers.py::test_fans",)),
    Mutant("uniform-from-zero", "half of the interval",
           edit(_INIT + "Uniform.sample", "-self.scale,", "0,"),
           (_SPREAD + "Uniform*",)),
    Mutant("sigma-as-variance", "the deviation is the root of sigma",
           edit(_INIT + "Normal.sample", "self.sigma", "self.sigma ** 0.5"),
           (_SPREAD + "Normal*",)),
    Mutant("orthogonal-unscaled", "the scale is left out",
           edit(_INIT + "Orthogonal.sample", "self.scale * ", ""),
           ("test_initializers.py::test_orthogonal",)),
    Mutant("bias-drawn", "a bias is drawn as weights are",
           edit(_INIT + "draw_parameter", 'elif kind != "weight":',
                'elif kind not in ("weight", "bias"):'), (_OWN,)),
    Mutant("one-stream-for-all", "layers of one shape start alike",
           edit(_INIT + "draw_parameter", 'integer("index", index, 0)])',
                "0])"),
           ("test_initializers.py::test_one_generator_per_parameter",)),
    Mutant("own-initialiser-ignored", "the network's one wins over the layer's"
           , edit(_INIT + "draw_parameter", "own is not None", "False"),
           ("test_initializers.py::test_the_layers_own_initialiser_wins",)),
]
