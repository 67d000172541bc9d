"""The update rules against the real `gluon.Trainer` and the real
`torch.optim`. (tests/oracle compares them with formulas in NumPy.)

Each case trains three bare weights on given gradients for seven steps: the
first has gradients of 1e-7 (there the place of epsilon shows), the second of
1 (some are clipped), the third of 1e-3. The rate falls to a quarter after
three steps; the second weight has half the rate, the third double decay.
Trajectories are compared after every step.
"""
import os
from typing import NamedTuple

import numpy as np
import pytest

import mgpu
import nets
from helpers import on
from mgpu import optimizers
from mgpu.backends import using_backend
from mgpu.backends.device import Device
from tests.conftest import BACKENDS

# MXNet 1.9.1 on today's SciPy, at every `mx.nd.array`.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Please import `csr_matrix`:DeprecationWarning")

SHAPES = ((2, 3), (40,), (1,))
SCALES = (1e-7, 1.0, 1e-3)
LR_MULT = (1.0, 0.5, 1.0)
WD_MULT = (1.0, 1.0, 2.0)
STEPS, BATCH, LR = 7, 4, 2.0 ** -4


class Case(NamedTuple):
    semantics: str
    name: str
    options: dict

    def __str__(self):
        options = (f"{k}={v}" for k, v in self.options.items())
        return "-".join((self.semantics, self.name, *options))


def _cases():
    """Every optimizer with its defaults, and with dyadic options (which
    float32 holds exactly, so that MXNet's float32 scalars are no excuse),
    alone and with decay and clipping."""
    gluon = {
        "sgd": [{}, {"momentum": 0.5}],
        "nag": [{}, {"momentum": 0.5}],
        "adam": [{"beta1": 0.75, "beta2": 0.9375, "epsilon": 2.0 ** -26}],
        "adamw": [{"beta1": 0.75, "beta2": 0.9375, "epsilon": 2.0 ** -26}],
        "adamax": [{"beta1": 0.75, "beta2": 0.9375}],
        "nadam": [{"beta1": 0.75, "beta2": 0.9375, "epsilon": 2.0 ** -26,
                   "schedule_decay": 0.5}],
        "rmsprop": [{"gamma1": 0.75, "epsilon": 2.0 ** -40},
                    {"gamma1": 0.75, "epsilon": 2.0 ** -40,
                     "clip_weights": 0.5},
                    {"gamma1": 0.75, "gamma2": 0.5, "epsilon": 2.0 ** -40,
                     "centered": True},
                    {"gamma1": 0.75, "gamma2": 0.5, "epsilon": 2.0 ** -40,
                     "centered": True, "clip_weights": 0.5}],
        "adagrad": [{"eps": 2.0 ** -40}],
        "adadelta": [{"rho": 0.75, "epsilon": 2.0 ** -20}],
        "ftrl": [{"lamda1": 2.0 ** -30, "beta": 0.5}, {"lamda1": 0.5}],
        "signum": [{"momentum": 0.0}, {"momentum": 0.5},
                   {"momentum": 0.5, "wd_lh": 0.25}],
        "lamb": [{"beta1": 0.75, "beta2": 0.9375, "epsilon": 2.0 ** -26},
                 {"beta1": 0.75, "beta2": 0.9375, "epsilon": 2.0 ** -26,
                  "lower_bound": 0.5, "upper_bound": 2.0,
                  "bias_correction": False}],
        "lars": [{"eta": 0.5, "eps": 2.0 ** -20},
                 {"eta": 0.5, "momentum": 0.5, "momentum_correction": False}],
        "ftml": [{"beta1": 0.75, "beta2": 0.9375, "epsilon": 2.0 ** -26}],
        "dcasgd": [{"lamda": 0.5}],
    }
    adam = {"betas": (0.75, 0.9375), "eps": 2.0 ** -26}
    torch = {
        "sgd": [{}, {"momentum": 0.5}, {"momentum": 0.5, "dampening": 0.25},
                {"momentum": 0.5, "nesterov": True}],
        "nag": [{"momentum": 0.5}],
        "adam": [adam, {**adam, "amsgrad": True}],
        "adamw": [adam, {**adam, "amsgrad": True}],
        "adamax": [adam],
        "nadam": [{**adam, "momentum_decay": 0.5},
                  {**adam, "decoupled_weight_decay": True}],
        "rmsprop": [{"alpha": 0.75}, {"alpha": 0.75, "momentum": 0.5},
                    {"alpha": 0.75, "centered": True},
                    {"alpha": 0.75, "centered": True, "momentum": 0.5}],
        "adagrad": [{}, {"lr_decay": 0.5, "initial_accumulator_value": 0.25,
                         "eps": 2.0 ** -26}],
        "adadelta": [{"rho": 0.75, "eps": 2.0 ** -20}],
    }
    for semantics, table, rate, decay in (
            ("gluon", gluon, "learning_rate", "wd"),
            ("torch", torch, "lr", "weight_decay")):
        for name, variants in table.items():
            yield Case(semantics, name,
                       {"momentum": 0.9} if (semantics, name)
                       == ("torch", "nag") else {})
            for variant in variants:
                yield Case(semantics, name, {rate: LR, **variant})
                yield Case(semantics, name, {
                    rate: LR, **variant, decay: 0.125, "clip_gradient": 0.5})


# Another default, and limits that float32 does not hold (`mx.nd.clip`
# rounds them).
CASES = [*_cases(), Case("gluon", "rmsprop", {"centered": True}),
         Case("gluon", "sgd", {"clip_gradient": 0.3}),
         Case("gluon", "rmsprop", {"clip_weights": 0.3}),
         Case("torch", "adam", {"clip_gradient": 0.3})]
#: what Gluon's own state arrays, always float32, do not let it train
FLOAT32_ONLY = ("rmsprop", "adagrad", "adadelta", "ftrl")
#: what Gluon computes in Python, with double scalars (the rest: kernels)
IN_PYTHON = ("adamax", "nadam", "dcasgd")
#: for which MXNet takes norms, or powers of betas, in float32
WITH_NORMS = ("lamb", "lars", "ftml")


def problem(dtype="float64", tiny=SCALES[0]):
    """Weights and, for every step, the gradients summed over the batch."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=s).astype(dtype) for s in SHAPES]
    grads = [[(BATCH * scale * rng.normal(size=s)).astype(dtype)
              for s, scale in zip(SHAPES, (tiny, *SCALES[1:]))]
             for _ in range(STEPS)]
    return weights, grads


def library_problem(case):
    """In the best dtype that the library trains."""
    if case.semantics == "torch" or case.name not in FLOAT32_ONLY:
        return problem()
    # AdaDelta's step for 1e-7 vanishes in float32 next to the weight.
    return problem("float32", 1e-4 if case.name == "adadelta" else 1e-7)


def rates(lr):
    return [lr if step < 3 else lr / 4 for step in range(STEPS)]


# -- the real gluon.Trainer ----------------------------------------

def _kernel_adamw(mx):
    """Gluon 1.9.1 has `adamw_update` and no optimizer that calls it: this
    one does, with eta the rate and lr the bias correction."""
    class AdamW(mx.optimizer.Optimizer):
        def __init__(self, learning_rate=0.001, beta1=0.9, beta2=0.999,
                     epsilon=1e-8, **common):
            super().__init__(learning_rate=learning_rate, **common)
            self.options = {"beta1": beta1, "beta2": beta2,
                            "epsilon": epsilon}

        def create_state(self, index, weight):
            return mx.nd.zeros_like(weight), mx.nd.zeros_like(weight)

        def update(self, index, weight, grad, state):
            self._update_count(index)
            t = self._index_update_count[index]
            correction = np.sqrt(1 - self.options["beta2"] ** t) \
                / (1 - self.options["beta1"] ** t)
            mx.nd.contrib.adamw_update(
                weight, grad, *state, self.rescale_grad, out=weight,
                lr=correction, eta=self._get_lr(index),
                wd=self._get_wd(index), **self.options,
                clip_gradient=self.clip_gradient or -1.0)
    return AdamW


def by_gluon(case, weights, grads, used=lambda step, i: True):
    """The same from a `gluon.Trainer` on one device. The loss is the sum of
    ``w g``, so that its gradients are the g; those of a weight that is not
    `used` in a step are stale, and it is skipped."""
    with using_backend("mxnet"):
        import mxnet as mx
    params = []
    for i, (w, a, b) in enumerate(zip(weights, LR_MULT, WD_MULT)):
        p = mx.gluon.Parameter(f"w{i}", shape=w.shape, dtype=w.dtype,
                               lr_mult=a, wd_mult=b)
        p.initialize(ctx=mx.cpu(0))
        p.set_data(mx.nd.array(w, dtype=w.dtype))
        params.append(p)
    if case.name == "adamw":
        trainer = mx.gluon.Trainer(params, _kernel_adamw(mx)(**case.options))
    else:
        trainer = mx.gluon.Trainer(params, case.name, dict(case.options))
    path = []
    for step, (gs, lr) in enumerate(zip(grads,
                                        rates(trainer.learning_rate))):
        trainer.set_learning_rate(lr)
        with mx.autograd.record():
            losses = [(p.data() * mx.nd.array(g, dtype=g.dtype)).sum()
                      for i, (p, g) in enumerate(zip(params, gs))
                      if used(step, i)]
        mx.autograd.backward(losses)
        trainer.step(BATCH, ignore_stale_grad=True)
        path.append([p.data().asnumpy() for p in params])
    return path


# -- the real torch.optim ------------------------------------------

def by_torch(case, weights, grads):
    """The same from `torch.optim`, clipping with torch's own
    `clip_grad_value_`."""
    with using_backend("torch"):
        import torch
    options = dict(case.options)
    limit = options.pop("clip_gradient", None)
    kinds = {"sgd": "SGD", "nag": "SGD", "adam": "Adam", "adamw": "AdamW",
             "adamax": "Adamax", "nadam": "NAdam", "rmsprop": "RMSprop",
             "adagrad": "Adagrad", "adadelta": "Adadelta"}
    if case.name == "nag":
        options["nesterov"] = True
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # NAdam keeps its P in this dtype
    environment = dict(os.environ)  # torch.optim loads a compiler: it adds
    try:
        params = [torch.nn.Parameter(torch.from_numpy(w.copy()))
                  for w in weights]
        trainer = getattr(torch.optim, kinds[case.name])(
            [{"params": [p]} for p in params], **options)
        lr = trainer.defaults["lr"]
        for group, b in zip(trainer.param_groups, WD_MULT):
            group["weight_decay"] *= b
        path = []
        for gs, rate in zip(grads, rates(lr)):
            for p, g, a, group in zip(params, gs, LR_MULT,
                                      trainer.param_groups):
                p.grad = torch.from_numpy(g / BATCH)
                group["lr"] = rate * a
            if limit is not None:
                torch.nn.utils.clip_grad_value_(params, limit)
            trainer.step()
            path.append([p.detach().numpy().copy() for p in params])
        return path
    finally:
        torch.set_default_dtype(before)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]


# -- the rules themselves ---------------------------------------------------

def by_mgpu(engine, case, weights, grads, *, hook=True,
            used=lambda step, i: True):
    """The same from `mgpu.optimizers`, driven as a Trainer drives it."""
    optimizer = optimizers.create(case.name, case.semantics, **case.options)
    now = [engine.put(w, Device("cpu", 0)) for w in weights]
    for w in now:
        engine.attach_grad(w)   # a leaf, as a parameter is
    states = [optimizer.create_state(w, engine.ops) for w in now]
    counts, path = [0] * len(now), []
    for step, (gs, lr) in enumerate(zip(grads,
                                        rates(optimizer.learning_rate))):
        counts = [t + used(step, i) for i, t in enumerate(counts)]
        if hook:
            optimizer.begin_step(states, [
                t if used(step, i) else None for i, t in enumerate(counts)])
        for i, (w, g, s, t) in enumerate(zip(now, gs, states, counts)):
            if used(step, i):
                grad = engine.put(g / BATCH, w)
                with engine.scope(recording=False):
                    optimizer.update(
                        w, grad, s, lr=lr * LR_MULT[i],
                        wd=optimizer.wd * WD_MULT[i], t=t, ops=engine.ops)
                np.testing.assert_array_equal(
                    engine.to_numpy(grad), g / BATCH,
                    "the update changed the gradient")
        path.append([engine.to_numpy(w) for w in now])
    for state, w in zip(states, weights):
        for slot in state.values():
            if not isinstance(slot, float):
                slot = engine.to_numpy(slot)
                assert (slot.shape, slot.dtype) == (w.shape, w.dtype)
    return path


def gap(path, expected, weights):
    """The largest distance at any step, weight by weight, relative to the
    weight's whole move. Of that, a few roundings of the weight itself are
    forgiven: they, too, are what a small move is measured in."""
    worst = 0.0
    for i, w in enumerate(weights):
        move = max(abs(step[i] - w).max() for step in expected)
        rounding = 4 * np.finfo(path[0][i].dtype).eps * abs(w).max()
        assert move > 10 * rounding, f"weight {i} stands still"
        for ours, theirs in zip(path, expected):
            assert ours[i].shape == theirs[i].shape == w.shape
            assert np.isfinite([ours[i], theirs[i]]).all()
            off = abs(ours[i] - theirs[i]).max() - rounding
            worst = max(worst, off / move)
    return worst


def numbered(cases=CASES, keep=lambda case: True):
    return [pytest.param(i, id=str(case)) for i, case in enumerate(cases)
            if keep(case)]


@pytest.mark.parametrize("number", numbered(
    keep=lambda case: {"gluon": "mxnet", "torch": "torch"}[case.semantics]
    in BACKENDS))
def test_rule_is_the_library(number):
    """The trajectory on each backend is that of the library to rounding; the
    tolerance says which rounding."""
    case = CASES[number]
    weights, grads = library_problem(case)
    if weights[0].dtype == "float32":
        tolerance = 1e-6    # float32 rounding: 6e-8, some ten times
    elif case.semantics == "torch" or case.name in IN_PYTHON:
        tolerance = 1e-12   # float64 rounding
    elif case.options.get("learning_rate") == LR:
        # All options are dyadic: float64 rounding. But Adam's kernel gets
        # the bias correction as a float32, 6e-8 of the step, and norms are
        # float32.
        tolerance = 3e-7 if case.name in ("adam", "adamw", *WITH_NORMS) \
            else 1e-12
    else:
        # Defaults in float32: beta2 is 1.3e-8 more than 0.999, so that
        # 1 - beta2 is 1.3e-5 less than 0.001, and its root 6.4e-6.
        tolerance = 1e-5
    run = by_gluon if case.semantics == "gluon" else by_torch
    wanted = run(case, weights, grads)
    for name in BACKENDS:
        with using_backend(name) as backend:
            path = by_mgpu(backend, case, weights, grads)
        assert gap(path, wanted, weights) < tolerance, name


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="compares with Gluon")
def test_nadam_shares_its_schedule_as_gluon_does(backend):
    """All weights have one product of momenta, also when some skip steps;
    without `begin_step` the trajectory is another."""
    case = Case("gluon", "nadam", {"learning_rate": LR})
    weights, grads = problem()

    def used(step, i):
        return (step + i) % 3 != 1

    expected = by_gluon(case, weights, grads, used)
    path = by_mgpu(backend, case, weights, grads, used=used)
    assert gap(path, expected, weights) < 1e-12     # float64 rounding
    alone = by_mgpu(backend, case, weights, grads, used=used, hook=False)
    assert gap(alone, expected, weights) > 0.05


@pytest.mark.parametrize("semantics, finite", [("gluon", False),
                                               ("torch", True)])
def test_adamax_without_any_gradient(backend, semantics, finite):
    """Gluon's formula has no epsilon and divides 0 by 0; torch's is finite."""
    rule = optimizers.create("adamax", semantics)
    w = backend.put(np.ones(2), Device("cpu", 0))
    rule.update(w, backend.put(np.array([0.0, 1.0]), w),
                rule.create_state(w, backend.ops), lr=0.5, wd=0.0, t=1,
                ops=backend.ops)
    assert list(np.isfinite(backend.to_numpy(w))) == [finite, True]


WRONG = [
    (ValueError, "unknown optimizer; received 'lion'. Use one of sgd, nag, "
     "adam, adamw, adamax, nadam, rmsprop, adagrad, adadelta, ftrl, signum",
     "lion", "gluon", {}),
    (ValueError, "unknown semantics; received 'keras'. Use one of 'gluon'",
     "sgd", "keras", {}),
    (ValueError, "unknown optimizer; received 'ftrl'. .*semantics='gluon'",
     "ftrl", "torch", {}),
    (ValueError, "'sgd' has no option 'beta1' with semantics='gluon'. Use "
     "learning_rate, wd, clip_gradient, momentum", "sgd", "gluon",
     {"beta1": 0.5}),
    (ValueError, "lr and learning_rate are one option", "sgd", "torch",
     {"lr": 0.5, "learning_rate": 0.5}),
    (ValueError, "learning_rate must be a finite number, 0 or more; received "
     "-0.5", "sgd", "gluon", {"learning_rate": -0.5}),
    (ValueError, "clip_gradient must be a finite number above 0; received "
     "0", "adam", "gluon", {"clip_gradient": 0}),
    (ValueError, "beta1 must be a finite number from 0 to below 1; received 1",
     "adam", "gluon", {"beta1": 1}),
    (ValueError, "rho must be a finite number from 0 to 1; received 2",
     "adadelta", "gluon", {"rho": 2}),
    (ValueError, "ftrl divides by the learning rate", "ftrl", "gluon",
     {"learning_rate": 0}),
    (ValueError, "signum without momentum has no wd_lh", "signum", "gluon",
     {"momentum": 0, "wd_lh": 0.5}),
    (ValueError, "Nesterov momentum needs .* received momentum=0.0", "nag",
     "torch", {}),
    (TypeError, "learning_rate must be .* received '0.1' of type str", "sgd",
     "gluon", {"learning_rate": "0.1"}),
    (TypeError, "centered must be True or False; received 1", "rmsprop",
     "gluon", {"centered": 1}),
    (TypeError, "betas must be two numbers; received 0.9", "adam", "torch",
     {"betas": 0.9}),
    (ValueError, "momentum_correction=False", "lars", "gluon",
     {"momentum": 0.9}),
    (ValueError, "has no decay", "groupadagrad", "gluon", {"wd": 0.1}),
    (ValueError, "a whole number", "sgld", "gluon", {"seed": 0.5}),
    (ValueError, "counts batches itself", "lbsgd", "gluon", {}),
]


def test_create_refuses_wrong_names_and_options():
    for error, match, name, semantics, options in WRONG:
        with pytest.raises(error, match=match):
            optimizers.create(name, semantics, **options)


def test_setting_an_unknown_option_raises():
    """The error names the options; options, and attributes of a subclass, can
    be set."""
    for semantics in ("gluon", "torch"):
        rule = optimizers.create("sgd", semantics)
        with pytest.raises(AttributeError, match="SGD has the options .*'wd'"
                           ".*received 'lr'.*set_learning_rate"):
            rule.lr = 0.5
        rule.learning_rate = 0.5

        class Own(type(rule)):
            def remember(self):
                self.seen = 1
        own = Own()
        own.remember()
        assert (rule.learning_rate, own.seen) == (0.5, 1)


@pytest.mark.parametrize("family", ["ftrl", "ftml"])
def test_a_rate_of_zero_for_one_parameter_leaves_all_as_they_are(backend,
                                                                 family):
    """ftrl and ftml divide by the rate: the step raises before any value
    changes."""
    replicas = mgpu.initialize(nets.mlp(backend, (6, 4, 3)), on(0, 1),
                               "ones", dtype="float64")
    trainer = mgpu.Trainer(replicas, family,
                           lr_mult={replicas.params()[-1].name: 0.0})
    before = replicas.export_numpy()

    def step():
        mgpu.train_batch(np.ones((3, 6)), np.zeros(3, int), replicas,
                         lambda out, y: out.sum(1), trainer)
    with pytest.raises(ValueError, match="above 0; received 0.0"):
        step()
    for name, x in replicas.export_numpy().items():
        np.testing.assert_array_equal(x, before[name])
    assert trainer.num_update == 0
    trainer.lr_mult.clear()
    step()      # the trainer still works
    assert trainer.num_update == 1


# -- rules with noise, and with rows ----------------------------------------

def test_sgld_adds_noise_with_the_variance_of_the_rate(backend):
    """Half a step of SGD, and noise that depends on the (fixed) seed and not
    on the decay."""
    w = np.random.default_rng(0).normal(size=(400, 50))
    g = np.ones_like(w)
    found, tops = [], ({}, {"wd": 0.5}, {"seed": 1})
    for options in tops:
        rule = optimizers.create("sgld", **options)
        x = backend.put(w, Device("cpu", 0))
        states = [rule.create_state(x, backend.ops)]
        rule.begin_step(states, [1])
        with backend.scope(recording=False):
            rule.update(x, backend.put(g, x), states[0], lr=0.25, wd=rule.wd,
                        t=1, ops=backend.ops)
        found.append(backend.to_numpy(x) - w + 0.125 * (g + rule.wd * w))
    plain, decayed, other = found
    np.testing.assert_allclose(decayed, plain, atol=1e-12)
    assert abs(np.corrcoef(plain.ravel(), other.ravel())[0, 1]) < 0.05
    # Standard errors of 20,000 numbers: 0.0035 and 0.0025.
    assert abs(plain.mean()) < 0.02 and abs(plain.std() - 0.5) < 0.01


def test_noise_differs_by_parameter_and_step_not_by_device(
        backend):
    """Initial weights and gradients are 0, so that a step is its noise."""
    replicas = mgpu.initialize(nets.mlp(backend), on(0, 1, 2),
                               "zeros", dtype="float64")
    trainer = mgpu.Trainer(replicas, "sgld", {"learning_rate": 1.0})
    for p in replicas.params():
        p.grad_req = "add"
    before = None
    for _ in range(2):
        X = np.zeros((3, 6))
        mgpu.train_batch(X, np.zeros(3, int), replicas,
                         lambda out, y: (out * 0).sum(1), trainer)
        replicas.check_equal()
        values = replicas.export_numpy()
        rows = [x.ravel()[:2] for x in values.values()]
        assert len({tuple(row) for row in rows}) == len(rows)
        if before is not None:
            steps = [values[name] - before[name] for name in values]
            assert [name for step, name in zip(steps, values)
                    if np.allclose(step, before[name])] == []
        before = values


def test_two_trainers_of_one_network_have_the_noise_of_one(backend):
    """Each trains some parameters; two weights of equal shape have different
    noise."""
    steps = []
    for split in (True, False):
        replicas = mgpu.initialize(nets.mlp(backend, (4, 4, 4)),
                                   on(0, 1), "zeros", dtype="float64")
        sets = [".*0.weight|.*bias", ".*2.weight"] if split else [".*"]
        trainers = [mgpu.Trainer(replicas.collect_params(names), "sgld",
                                 {"learning_rate": 1.0}) for names in sets]
        shards, labels = mgpu.split_batch(np.zeros((3, 4)), np.zeros(3),
                                          replicas.devices)
        with mgpu.record():
            losses = mgpu.parallel(lambda x, y: (x * 0).sum(1),
                                   replicas(shards), labels)
        mgpu.backward(losses)
        for trainer in trainers:
            trainer.step(3)
        steps.append(replicas.export_numpy())
    one, other = (steps[0][f"{i}.weight"].ravel() for i in (0, 2))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.9
    for name, x in steps[0].items():    # as of one trainer
        np.testing.assert_array_equal(x, steps[1][name])


@pytest.mark.parametrize(("name", "options"), [
    ("lars", {"eta": 0.5}), ("lamb", {}), ("groupadagrad", {})])
def test_norms_of_float16_are_neither_0_nor_infinite(backend, name, options):
    """Squares of the small gradient are almost 0 in float16, and the sum of
    the large one's is beyond it."""
    for shape, gradient in (((8, 4), 2.0 ** -13), ((300, 300), 1.0)):
        found = []
        for dtype in ("float16", "float64"):
            rng = np.random.default_rng(0)
            w = backend.put(rng.normal(size=shape).astype("float16")
                            .astype(dtype), Device("cpu", 0))
            g = (gradient * rng.normal(size=shape)).astype("float16")
            before = backend.to_numpy(w).astype("float64")
            rule = optimizers.create(name, **options)
            state = rule.create_state(w, backend.ops)
            with backend.scope(recording=False):
                rule.update(w, backend.put(g.astype(dtype), w), state, lr=0.5,
                            wd=0.0, t=1, ops=backend.ops)
            found.append(backend.to_numpy(w) - before)
        half, double = found
        # Rounding of weights: 2 ** -11 of 4.
        np.testing.assert_allclose(half, double, rtol=0.02, atol=0.002)


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="compares with MXNet")
def test_groupadagrad_is_the_library(backend):
    """Weights of MXNet's optimizer after each of three steps, with and without
    clipping."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(4, 3)).astype("float32")
    grads = [rng.normal(size=w.shape).astype("float32") for _ in range(3)]
    with using_backend("mxnet"):
        import mxnet as mx
    for options in ({}, {"clip_gradient": 0.5}):
        theirs = mx.optimizer.contrib.GroupAdaGrad(learning_rate=0.5,
                                                   **options)
        rule = optimizers.create("groupadagrad", learning_rate=0.5, **options)
        x, y = mx.nd.array(w), backend.put(w, Device("cpu", 0))
        state = theirs.create_state(0, x)
        own = rule.create_state(y, backend.ops)
        for t, g in enumerate(grads, 1):
            theirs.update(0, x, mx.nd.array(g), state)
            with backend.scope(recording=False):
                rule.update(y, backend.put(g, y), own, lr=0.5, wd=0.0, t=t,
                            ops=backend.ops)
        # float32 rounding
        np.testing.assert_allclose(backend.to_numpy(y), x.asnumpy(),
                                   rtol=1e-6, atol=1e-6)


