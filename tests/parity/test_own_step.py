"""Training steps of the user's own, on one side or on both."""
import inspect
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import mgpu
from mgpu import parity
from mgpu.parity import Side
from nets import (conv_gluon, conv_torch, gluon, gluon_block, several_inputs,
                  torch_block)
from nets import torch as torch_
from parity import scripts
from parity.steps import (RATE, gluon_step, gluons_halving, halving,
                          torch_step)

RNG = np.random.default_rng(0)
#: of 8 rows: float32 holds an eighth
BATCHES = [(RNG.normal(size=(8, 5)), RNG.integers(0, 3, 8).astype("int32"))
           for _ in range(5)]
A = gluon(lambda nn: [nn.Dense(4, activation="relu", in_units=5),
                      nn.Dropout(0.5), nn.Dense(3, in_units=4)])
B = torch_(lambda nn: [nn.Linear(5, 4), nn.ReLU(), nn.Dropout(0.5),
                       nn.Linear(4, 3)])
NORM_A = gluon(lambda nn: [nn.Dense(4, in_units=5), nn.BatchNorm(
    in_channels=4), nn.Dense(3, in_units=4)])
NORM_B = torch_(lambda nn: [nn.Linear(5, 4), nn.BatchNorm1d(4, eps=1e-5),
                            nn.Linear(4, 3)])
#: the words that a formula begins with, by the options of both loops
FORMULAS = {
    "none": ({}, {}, []),
    "float32": ({"learning_rate": 0.1}, {"lr": 0.1}, ["MXNet's"]),
    "momentum": ({"momentum": 0.5, "wd": 0.25},
                 {"momentum": 0.5, "weight_decay": 0.25}, []),
    "momentum and schedule": (
        {"momentum": 0.5, "schedule": gluons_halving},
        {"momentum": 0.5, "schedule": halving}, ["momentum:"]),
    "adam": ({"optimizer": "adam"}, {"optimizer": "Adam"},
             ["Adam's", "MXNet's"]),
    "clipping": ({"clip": 0.0625}, {"clip": 0.0625}, ["clipping"]),
    "scaler and clipping": (
        {"clip": 0.0625}, {"clip": 0.0625, "scaler": 256.0}, ["clipping"]),
    "two parts": ({}, {"parts": 2}, []),
}


def compare_pairs(*pairs, batches=BATCHES, swapped=False, **options):
    """The comparison of two pairs (network, step), or of these exchanged."""
    (a, step_a), (b, step_b) = pairs[::-1 if swapped else 1]
    return parity.compare(a, b, batches=batches, step_a=step_a,
                          step_b=step_b, **options)


def both_orders(a, b, batches=BATCHES):
    """Their comparison, and that with the pairs exchanged."""
    return (compare_pairs(a, b, batches=batches, swapped=swapped)
            for swapped in (False, True))


def in_turn(names):
    """Each name, every second one with exchanged sides."""
    return [(name, bool(i % 2)) for i, name in enumerate(names)]


@pytest.mark.parametrize("name, swapped", in_turn(FORMULAS))
def test_a_loop_and_its_port_are_the_same_but_for_named_formulas(
        name, swapped):
    """And the formulas are those that act, whichever side is Gluon's."""
    options_a, options_b, words = FORMULAS[name]
    result = compare_pairs((A, gluon_step(**options_a)),
                           (B, torch_step(**options_b)), swapped=swapped)
    assert result.proves(formulas=True), result
    assert [f["text"].split()[0] for f in result.formulas] == words
    assert result.same is not bool(words)
    # of values of opposite signs the difference is up to twice the larger
    assert all(1e-10 < f["size"] <= 2 for f in result.formulas)


@pytest.mark.parametrize("devices", [1, 3])
def test_one_side_may_be_mgpus(devices):
    for side, net, step in ((A, B, torch_step()),
                            (B, A, gluon_step())):
        result = parity.compare(
            Side(side, devices=devices), net, batches=BATCHES, step_b=step,
            optimizer_params={"learning_rate": 0.125})
        assert result.same, result


def test_a_loop_equals_itself_with_whatever_optimizer():
    for optimizer in ("Adamax", "NAdam", "RMSprop", "Adagrad", "Adadelta",
                      "AdamW", "RAdam", "Rprop"):
        step = torch_step(optimizer, lr=0.01)
        result = parity.compare(B, B, batches=BATCHES[:3], step_a=step,
                                step_b=step)
        assert result.same, (optimizer, result)


# -- whole scripts ------------------------------------------------------------

def pictures(size, classes=4):
    return [(RNG.normal(size=(8, 1, size, size)),
             RNG.integers(0, classes, 8).astype("int32")) for _ in range(5)]


def tokens(words, length, shape, classes):
    return [(RNG.integers(0, words, (8, length)).astype("int32"),
             RNG.integers(0, classes, shape).astype("int32"))
            for _ in range(5)]


MOMENTUM, SINGLE, CLIPPING = "momentum:", "MXNet's optimizers", "clipping"
STATISTICS = "batch norm: PyTorch", "batch norm: MXNet"
#: both networks and both steps, batches, and how the formulas begin
SCRIPTS = {
    "digits": (partial(conv_gluon, False), scripts.digits_gluon,
               partial(conv_torch, batch_norm=False), scripts.digits_torch,
               pictures(6, 3), [SINGLE]),
    "pictures": (scripts.residual_gluon, scripts.pictures_gluon,
                 scripts.residual_torch, scripts.pictures_torch, pictures(8),
                 [MOMENTUM, SINGLE, *STATISTICS]),
    "language": (scripts.words_gluon, scripts.language_gluon,
                 scripts.words_torch, scripts.language_torch,
                 tokens(11, 4, (8, 4), 11), [CLIPPING]),
    "sentences": (scripts.encoder_gluon, scripts.sentences_gluon,
                  scripts.encoder_torch, scripts.sentences_torch,
                  tokens(13, 6, (8,), 3), ["Adam's", SINGLE])}


def compared(name, swapped, changes=(), fault=None, **options):
    """A script against its port, whose text is changed."""
    mgpu.mxnet_compat()
    a, step_a, b, step_b, batches, _ = SCRIPTS[name]
    if fault == "gluon":
        step_a = changed(step_a, changes)
    elif changes:
        step_b = changed(step_b, changes)
    import torch
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return compare_pairs((a, step_a), (b, step_b), batches=batches,
                             swapped=swapped, **options)


def changed(function, changes):
    """The function with other text: pairs of old and new lines."""
    text = inspect.getsource(function)
    for old, new in changes:
        assert text.count(old) == 1, (old, text)
        text = text.replace(old, new)
    space = dict(vars(scripts))
    exec(text, space)
    return space[function.__name__]


@pytest.mark.parametrize("name, swapped", in_turn(SCRIPTS))
def test_a_script_and_its_port_are_the_same_but_for_named_formulas(
        name, swapped):
    result = compared(name, swapped)
    assert result.verdict == "same but for named formulas", result
    texts = [f["text"] for f in result.formulas]
    words = SCRIPTS[name][-1]
    assert len(texts) == len(words) and all(
        any(text.startswith(word) for text in texts) for word in words), texts
    # what is rounded to float32 is not said to make a large difference
    assert all(f["size"] < 1e-5 for f in result.formulas
               if "float32" in f["text"]), result.formulas
    assert result.coverage["not_on_trial"] == [] \
        == result.coverage["options"]


STEP, MOVE = "        optimizer.step()\n", "        schedule.step()\n"
CLIP_ALL = ("        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)"
            "\n")
ONE_PASS = ("        loss = criterion(net(x), y.long())\n"
            "        loss.backward()\n")


def halves(divisor):
    return [(ONE_PASS, f"""\
        total = 0
        for half in (slice(4), slice(4, 8)):
            loss = criterion(net(x[half]), y[half].long())
            (loss / {divisor}).backward()
            total += loss.item() / 2
"""), ("return loss.item()", "return total")]


def scaled(clip):
    """With a `GradScaler`."""
    return [("    carried =", "    scaler = torch.amp.GradScaler('cpu', "
             "init_scale=64.0)\n    carried ="),
            ("loss.backward()", "scaler.scale(loss).backward()"),
            (CLIP_ALL, clip + CLIP_ALL),
            (STEP, "        scaler.step(optimizer)\n"
             "        scaler.update()\n"),
            ("[optimizer, carried]", "[optimizer, carried, scaler]")]


#: by what they add to a port: the script, and its changes
ALSO_RIGHT = {
    "a loss scaler": ("language", scaled(
        "        scaler.unscale_(optimizer)\n")),
    "a state that is no part": ("language", [
        ('    carried = {"state": None}\n', "    carried = None\n"),
        ('        state = carried["state"]\n',
         "        nonlocal carried\n        state = carried\n"),
        ('carried["state"] = state', "carried = state"),
        ("[optimizer, carried]", "[optimizer]")]),
    "a rate by hand": ("sentences", [
        (STEP + MOVE, """\
        nonlocal updates
        updates += 1
        optimizer.param_groups[0]["lr"] = 0.1 / math.sqrt(WIDTH) * min(
            updates ** -0.5, updates * 3 ** -1.5)
        optimizer.step()
"""), ("    net.train()\n", "    net.train()\n    updates = 0\n"),
        ("[optimizer, schedule]", "[optimizer]")]),
}


@pytest.mark.parametrize("name", ALSO_RIGHT)
def test_a_port_may_do_the_same_in_another_way(name):
    script, changes = ALSO_RIGHT[name]
    result = compared(script, False, changes)
    assert result.verdict == "same but for named formulas", result


#: script, changes, step and stage of the first difference, and the cause, if
#: there is one
FAULTS = {
    "schedule too early": ("pictures", [(STEP + MOVE, MOVE + STEP)],
                           1, "rate", "schedule: one step ahead"),
    "schedule by epoch": ("pictures", [
        ("    def step(", "    done = {'steps': 0}\n\n    def step("),
        (MOVE, "        done['steps'] += 1\n"
         "        if done['steps'] % 2 == 0:\n            schedule.step()\n"),
        ], 2, "rate", "schedule: moves 2 times"),
    "no schedule": ("pictures", [(MOVE, "")], 2, "rate",
                    "schedule: does not move"),
    "clips before it unscales": ("language", scaled(""), 1, "clipping",
                                 "clipping: still multiplied by"),
    "clips by value": ("language", [
        ("clip_grad_norm_(net.parameters(), CLIP)",
         "clip_grad_value_(net.parameters(), CLIP / 4)")], 1, "clipping",
         "clipping: clips each element to 0.025"),
    "clips each tensor": ("language", [(CLIP_ALL, """\
        for p in net.parameters():
            torch.nn.utils.clip_grad_norm_(p, CLIP)
""")], 1, "clipping", "clipping: each tensor by its own norm"),
    "never clips": ("language", [(CLIP_ALL, "")], 1, "clipping",
                    "clipping: does not clip"),
    "prediction mode": ("pictures", [("net.train()", "net.eval()")], 1,
                        "layer", "training mode: net.train()"),
    "prediction mode after the first step": ("language", [
        ("        net.train()\n", ""),
        ("        return loss\n", "        net.eval()\n        return loss\n"
         )], 2, "layer", "training mode: 'drop'"),
    "loss divided twice": ("digits", [
        ("net(x), y.long())", "net(x), y.long()) / len(x)")], 1, "loss",
        "loss reduction: divides by the rows"),
    "gradients divided twice": ("digits", [
        ("loss.backward()", "(loss / len(x)).backward()")], 1, "gradient",
        "loss reduction: divided by 8 already"),
    "accumulation not divided": ("digits", halves(1), 1, "gradient",
                                 "gradient scale: all gradients of b"),
    "no zero_grad": ("digits", [("        optimizer.zero_grad()\n", "")], 2,
                     "gradient", "stale gradient: still contains"),
    "zero_grad before the step": ("digits", [
        (STEP, "        optimizer.zero_grad()\n" + STEP),
        ("    def step(x, y):\n        optimizer.zero_grad()\n",
         "    def step(x, y):\n")], 1, "clipping",
        "left out of the update: zero_grad() before the backward pass"),
    "no update": ("digits", [(STEP, "")], 1, "clipping",
                  "left out of the update: call optimizer.step()"),
    "no decay": ("digits", [(",\n" + " " * 32 + "weight_decay=5e-4", "")], 1,
                 "weight", "optimizer options: wd 0.0"),
    "decay of biases": ("pictures", [
        ('"weight_decay": 0.0', '"weight_decay": 1e-3')], 1, "weight",
        "weight decay on biases: set wd_mult"),
    "no smoothing": ("pictures", [(", label_smoothing=0.1", "")], 1, "loss",
                     None),
    "state not carried": ("language", [
        ('        carried["state"] = state\n', "")], 2, "layer", None),
    "two updates": ("digits", [(STEP, STEP * 2)], 1, "weight",
                    "updates in a step: 2 times"),
    "another momentum": ("digits", [("momentum=0.9", "momentum=0.8")], 2,
                         "weight", "optimizer options: momentum"),
    "another beta": ("sentences", [("(0.9, 0.98)", "(0.9, 0.999)")], 1,
                     "weight", None),
    "gluon: step(1)": ("digits", [("x.shape[0])", "1)")], 1, "gradient",
                       "loss reduction: divided by 8 already"),
    "gluon: prediction mode": ("language", [
        ("autograd.record()", "autograd.record(train_mode=False)")], 1,
        "layer", "training mode: trains in prediction mode"),
    "gluon: clips the sum": ("language", [("CLIP * x.size", "CLIP")], 1,
                             "clipping", "clipping: to the global norm"),
}


@pytest.mark.parametrize("name, swapped", in_turn(FAULTS))
def test_a_fault_in_a_loop_is_found_and_no_wrong_cause_is_named(
        name, swapped):
    """In one order of the sides or the other."""
    script, changes, step, stage, cause = FAULTS[name]
    result = compared(script, swapped, changes, name.partition(":")[0],
                      steps=5 if stage == "rate" else 3)
    assert result.verdict == "different"
    assert (result.first.step, result.first.stage) == (step, stage), result
    assert not any("stopped" in note for note in result.notes), result
    if cause is None:
        assert result.causes == [], result
    else:
        expected, words = cause.split(": ")
        assert result.causes[0].name == expected, result
        assert words in result.causes[0].text, result


@pytest.mark.parametrize("clip, stage, name", [
    (0.0625, "rate", "schedule"), (0.125, "clipping", "clipping")])
def test_a_wrong_rate_is_no_fault_of_clipping(clip, stage, name):
    """Where both sides clip alike, each by its own formula; where they do not,
    clipping comes before the rate."""
    for result in both_orders(
            (A, gluon_step(clip=0.0625, schedule=gluons_halving)),
            (B, torch_step(clip=clip, schedule=halving,
                           before=True)), BATCHES[:3]):
        assert result.verdict == "different"
        assert result.first.stage == stage, result
        assert result.causes[0].name == name, result


# -- several optimizers, one after the other ----------------------------------

#: of 6 rows: float32 holds no sixth
SIXES = [(rng.normal(size=(6, 3)), rng.normal(size=(6, 4)))
         for rng in map(np.random.default_rng, range(3))]


def pair_gluon(n_in, n_out):
    return gluon(lambda nn: [nn.Dense(8, activation="tanh", in_units=n_in),
                             nn.Dense(n_out, in_units=8)])()


def pair_torch(n_in, n_out):
    return torch_(lambda nn: [nn.Linear(n_in, 8), nn.Tanh(),
                              nn.Linear(8, n_out)])()


adversaries_gluon = gluon_block(
    lambda nn: {"gen": pair_gluon(3, 4), "dis": pair_gluon(4, 1)},
    lambda net, F, x: net.dis(net.gen(x)))
adversaries_torch = torch_block(
    lambda nn: {"gen": pair_torch(3, 4), "dis": pair_torch(4, 1)},
    lambda net, x: net.dis(net.gen(x)))


def adversaries_step_gluon(optimizer, whole=True, **options):
    """`whole`: the pass of the generator calls the network, no parts."""
    def make(net):
        from mxnet import autograd, gluon, nd
        moves_g, moves_d = (gluon.Trainer(
            part.collect_params(), optimizer, {"learning_rate": rate,
                                               **options})
            for part, rate in ((net.gen, 0.1), (net.dis, 0.2)))
        loss_of = gluon.loss.SigmoidBinaryCrossEntropyLoss()

        def step(x, y):
            one, zero = (f((len(x), 1), dtype=x.dtype)
                         for f in (nd.ones, nd.zeros))
            with autograd.record():
                loss = loss_of(net.dis(y), one) + loss_of(
                    net.dis(net.gen(x).detach()), zero)
            loss.backward()
            moves_d.step(len(x))
            with autograd.record():
                out = net(x) if whole else net.dis(net.gen(x))
                loss = loss_of(out, one)
            loss.backward()
            moves_g.step(len(x))
            return loss
        return step, [moves_g, moves_d]
    return make


def adversaries_step_torch(optimizer, whole=True, rate=0.2, real=1.0, both=1,
                           zeros=True, late=False, twice=False, other=None,
                           **options):
    def make(net):
        import torch
        from torch.nn.functional import binary_cross_entropy_with_logits
        kind = getattr(torch.optim, optimizer)
        moves_g = kind(net.gen.parameters(), lr=0.1, **options)
        moves_d = kind(net.dis.parameters(), lr=rate,
                       **{**options, **(other or {})})

        def loss_of(output, label):
            return binary_cross_entropy_with_logits(
                output, torch.full_like(output, label))

        def step(x, y):
            moves_d.zero_grad()
            loss = loss_of(net.dis(y), real) + loss_of(
                net.dis(net.gen(x).detach()), 0.0)
            (loss / both).backward()
            for _ in range(0 if late else 2 if twice else 1):
                moves_d.step()
            if zeros:
                moves_g.zero_grad()
            loss = loss_of(net(x) if whole else net.dis(net.gen(x)), 1.0)
            loss.backward()
            moves_g.step()
            if late:
                moves_d.step()
            return loss
        return step, [moves_g, moves_d]
    return make


#: options of both, and how the formulas begin
ADVERSARIES = {
    "sgd": ("sgd", "SGD", {"momentum": 0.5, "wd": 0.0625},
            {"momentum": 0.5, "weight_decay": 0.0625}, ["MXNet's"]),
    "plain sgd": ("sgd", "SGD", {}, {}, ["MXNet's"]),
    "adam": ("adam", "Adam", {"beta1": 0.5}, {"betas": (0.5, 0.999)},
             ["Adam's", "MXNet's"])}


@pytest.mark.parametrize("whole", [True, False], ids=["", "parts"])
@pytest.mark.parametrize("name, swapped", in_turn(ADVERSARIES))
def test_what_follows_an_update_in_a_step_is_explained_by_its_formula(
        name, swapped, whole):
    """The second loss is taken with weights that the first optimizer has
    moved; PyTorch adds its gradients to those of the first, Gluon writes over
    them, and both are read when their optimizer gets them."""
    one, two, options_a, options_b, words = ADVERSARIES[name]
    result = compare_pairs(
        (adversaries_gluon, adversaries_step_gluon(one, whole, **options_a)),
        (adversaries_torch, adversaries_step_torch(two, whole, **options_b)),
        batches=SIXES, swapped=swapped is whole)
    assert result.proves(formulas=True), result
    assert [f["text"].split()[0] for f in result.formulas] == words
    assert not result.notes, result


@pytest.mark.parametrize("fault", [
    {"rate": 0.1}, {"rate": 0.2 * (1 + 1e-6)}, {"real": 0.9}, {"both": 2},
    {"zeros": False}, {"late": True}, {"twice": True},
    {"other": {"eps": 1e-7}}, {"other": {"weight_decay": 1e-6}},
    {"other": {"betas": (0.9, 0.999)}}], ids=str)
def test_a_formula_of_an_update_hides_no_fault_of_a_step(fault):
    """Gluon is model a for Adam, and model b for SGD."""
    for which in ("adam", "sgd"):
        one, two, options_a, options_b, _ = ADVERSARIES[which]
        if which == "sgd" and {"eps", "betas"} & fault.get("other", {}).keys():
            continue
        result = compare_pairs(
            (adversaries_gluon, adversaries_step_gluon(one, **options_a)),
            (adversaries_torch, adversaries_step_torch(
                two, **{**options_b, **fault})),
            batches=SIXES[:2], swapped=which == "sgd")
        assert result.verdict == "different", (which, result)


# -- weights that no optimizer has --------------------------------------------

HEAD = (gluon(lambda nn: [nn.Dense(4, activation="tanh", in_units=5),
                          nn.Dense(3, in_units=4)]),
        torch_(lambda nn: [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)]))


def head(net):
    return net[-1]


def gluon_sgd(net, rate=RATE, **options):
    from mxnet import gluon
    return gluon.Trainer(net.collect_params(), "sgd",
                         {"learning_rate": rate, **options})


def torch_sgd(weights, rate=RATE, **options):
    import torch
    return torch.optim.SGD(weights, rate, **options)


def gluon_head(clipped=None, frozen=False):
    """Trains the last layer; ``clipped(net)``: the part that it clips."""
    def trainers(net):
        if frozen:
            net[0].collect_params().setattr("grad_req", "null")
        return [gluon_sgd(net[-1])]
    return gluon_step(clip=clipped and 0.0625, clipped=clipped,
                      trainers=trainers)


def torch_head(clipped=None, trained=lambda net: net[-1].parameters(),
               **options):
    return torch_step(clip=clipped and 0.0625, clipped=clipped, **options,
                      optimizers=lambda net: [torch_sgd(trained(net))])


def everything(net):
    return net


@pytest.mark.parametrize("steps, cause", [
    ((gluon_head(), torch_head()), ""),
    ((gluon_head(head), torch_head(head)), ""),
    ((gluon_head(everything), torch_head(everything)), ""),
    ((gluon_head(), torch_head(everything)),
     "clipping: {b} clips gradients to the global norm 0.06249"),
    ((gluon_head(head), torch_head(everything)), "clipping: "),
    ((gluon_head(), torch_head(trained=lambda net: net.parameters())),
     "left out of the update: {a} does not update 0.weight, 0.bias: "),
    ((gluon_head(), torch_head(trained=lambda net: [net[-1].bias])),
     "left out of the update: {b} does not update 1.weight: "),
    ((gluon_head(frozen=True), torch_head(updates=False)),
     "left out of the update: {b} does not update 1.weight, 1.bias: "),
], ids=["right", "clips the head", "clips all", "one clips all",
        "both clip", "trains all", "trains the bias", "frozen"])
def test_gradients_of_weights_that_no_optimiser_has_do_not_count(
        steps, cause):
    """On either side, frozen or not: a mistake is placed at the others."""
    for result, (one, two), layer in zip(
            both_orders(*zip(HEAD, steps), BATCHES[:2]), ("ab", "ba"),
            ("1.", "2.")):      # the names are those of a
        words = cause.format(a=f"{one} (mxnet)", b=f"{two} (torch)").replace(
            "1.", layer)
        assert result.proves(formulas=True) is not bool(cause), result
        if cause:
            assert result.first.stage == "clipping", result
            assert str(result.causes[0]).startswith(words), result
            assert not result.formulas, result


# -- averages of the weights, and what else a step may have -------------------

def gluon_average(decay, names="_collect_params_with_prefix",
                  statistics=True, **options):
    """A step with an average by names, of running statistics too or not."""
    def make(net):
        step, parts = gluon_step(**options)(net)
        weights = {name: p for name, p in getattr(net, names)().items()
                   if statistics or p.grad_req != "null"}
        average = {name: p.data().copy() for name, p in weights.items()}

        def averaged(x, y):
            loss = step(x, y)
            for name, p in weights.items():
                average[name][:] = decay * average[name] \
                    + (1 - decay) * p.data()
            return loss
        return averaged, [*parts, average]
    return make


def torch_average(decay, kind="names", statistics=lambda e, p: None,
                  **options):
    """A step with an average of the weights. `kind`: new tensors by "names",
    torch's "model", a "copy" of the network, to whose running statistics
    `statistics` does something, or the "weights" of that copy alone."""
    def make(net):
        import copy

        import torch
        from torch.optim import swa_utils
        step, parts = torch_step(**options)(net)
        own = copy.deepcopy(net)
        weights = {name: x for name, x in net.state_dict(
            keep_vars=True).items() if x.is_floating_point()}
        average = {name: p.detach().clone() for name, p in weights.items()}
        model = swa_utils.AveragedModel(
            net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(decay))
        model.n_averaged += 1       # the first update is one, no copy

        def averaged(x, y):
            loss = step(x, y)
            model.update_parameters(net)
            with torch.no_grad():
                for name, p in weights.items():
                    average[name] = average[name].lerp(p, 1 - decay)
                for e, p in zip(own.parameters(), net.parameters()):
                    e.lerp_(p, 1 - decay)
                for e, p in zip(own.buffers(), net.buffers()):
                    statistics(e, p)
            return loss
        return averaged, [*parts, {
            "names": average, "model": model, "copy": own,
            "weights": dict(own.named_parameters())}[kind]]
    return make


@pytest.mark.parametrize("formula, names", [
    ("none", "collect_params"), ("float32", "_collect_params_with_prefix"),
    ("adam", "collect_params"),
    ("statistics", "_collect_params_with_prefix")])
def test_an_average_of_what_a_formula_explains_is_explained_with_it(
        formula, names):
    """By either kind of Gluon's names; another average never is."""
    a, b, kind = A, B, "model" if formula == "none" else "names"
    options_a, options_b, words = FORMULAS.get(formula, FORMULAS["none"])
    if formula == "statistics":
        words, a, b = ["batch", "batch"], NORM_A, NORM_B
    for decay in (0.75, 0.5):
        result = parity.compare(
            a, b, batches=BATCHES[:3], step_a=gluon_average(
                0.75, names, **options_a),
            step_b=torch_average(decay, kind, **options_b))
        assert sorted(f["text"].split()[0] for f in result.formulas
                      ) == words, result
        assert result.proves(formulas=True) is (decay == 0.75), result
        assert decay == 0.75 or result.first.name.endswith(".average")


def test_an_average_that_one_side_does_not_keep_is_a_difference():
    result = parity.compare(A, B, batches=BATCHES[:2],
                            step_a=gluon_average(0.75),
                            step_b=torch_step())
    assert not result.same
    assert (result.first.step, result.first.stage) == (1, "memory")


@pytest.mark.parametrize("name", ["copied", "averaged", "left", "weights"])
def test_running_statistics_that_one_average_alone_holds_follow_the_network(
        name):
    """Copies say nothing of their own; an average is another one than no
    average; what stays as it was at the start may be meant or not."""
    own = {"copied": lambda e, p: e.copy_(p),
           "averaged": lambda e, p: e.is_floating_point() and e.lerp_(
               p, 0.25)}.get(name, lambda e, p: None)
    kind = "weights" if name == "weights" else "copy"
    for decay, swapped in ((0.75, False), (0.75, True), (0.5, False)):
        result = compare_pairs(
            (NORM_A, gluon_average(0.75, statistics=False)),
            (NORM_B, torch_average(decay, kind, own)), batches=BATCHES[:2],
            swapped=swapped)
        right = decay == 0.75 and name in ("copied", "weights")
        assert result.proves(formulas=True) is right, result
        if decay == 0.5 or name == "averaged":
            assert result.verdict == "different", result
            assert result.first.stage == "memory", result
        elif name == "left":
            assert result.verdict == "no proof", result
            assert "average.named_parameters()" in result.reason


def gluon_groups(net):
    """Rates and decays of their own, by multipliers."""
    for p in net[0].collect_params().values():
        p.lr_mult = 2.0
    for p in net[2].collect_params().values():
        p.wd_mult = 0.0
    return [gluon_sgd(net, momentum=0.5, wd=0.125)]


def torch_groups(net):
    return [torch_sgd([
        {"params": net[0].parameters(), "lr": 0.25, "weight_decay": 0.125},
        {"params": net[3].parameters()}], momentum=0.5)]


def gluon_two(net):
    return [gluon_sgd(net[0], 0.25, momentum=0.5),
            gluon_sgd(net[2], momentum=0.5)]


def torch_two(net):
    return [torch_sgd(net[0].parameters(), 0.25, momentum=0.5),
            torch_sgd(net[3].parameters(), momentum=0.5)]


@pytest.mark.parametrize("gluons, torchs", [
    (gluon_groups, torch_groups), (gluon_two, torch_two)])
def test_weights_may_have_rates_and_decays_and_optimisers_of_their_own(
        gluons, torchs):
    for result in both_orders((A, gluon_step(trainers=gluons)),
                              (B, torch_step(optimizers=torchs)),
                              BATCHES[:3]):
        assert result.same, result


def test_gradients_may_add_up_on_either_side():
    result = parity.compare(A, B, batches=BATCHES[:2],
                            step_a=gluon_step(parts=4),
                            step_b=torch_step())
    assert result.same, result


def tagged():
    """F.dropout, an option by keyword, and a dictionary as its output."""
    from torch import nn
    from torch.nn import functional

    class Tagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x, *, scale=1.0):
            hidden = self.one(x).relu() * scale
            return {"logits": self.two(functional.dropout(
                hidden, 0.5, self.training)), "hidden": hidden}
    return Tagged()


def test_the_step_calls_a_network_as_it_likes():
    step = torch_step(call=lambda net, x: net(
        x=x, scale=1.0)["logits"])
    for other, own in ((A, gluon_step()),
                       (B, torch_step())):
        result = parity.compare(other, tagged, batches=BATCHES[:2],
                                step_a=own, step_b=step, map={
                                    "0.weight": "one.weight",
                                    "0.bias": "one.bias"})
        assert result.worst["gradient"].status == "same", result


def forgets(optimizer, count):
    optimizer.state.clear()


def slows(optimizer, count):
    optimizer.param_groups[0]["lr"] = 0.125 if count < 3 else 0.0625


#: loops that differ, and loops that do not
PAIRS = {
    "nesterov": (gluon_step(momentum=0.5),
                 torch_step(nesterov=True, momentum=0.5), False),
    "dampening": (gluon_step(momentum=0.5),
                  torch_step(dampening=0.5, momentum=0.5), False),
    "memory thrown away": (torch_step(momentum=0.5),
                           torch_step(after=forgets, momentum=0.5), False),
    "steps thrown away": (torch_step("Adam"),
                          torch_step("Adam", after=forgets), False),
    "counted by the step itself": (
        torch_step(after=slows),
        torch_step(schedule=partial(halving, every=3)), True),
    "counted, and slower": (torch_step(after=slows), torch_step(), False)}


@pytest.mark.parametrize("name", PAIRS)
def test_a_formula_hides_no_other_option_and_no_memory(name):
    *steps, same = PAIRS[name]
    for result in both_orders(*(
            (A if "gluon" in step.__qualname__ else B, step)
            for step in steps), BATCHES[:4]):
        assert result.proves(formulas=True) is same, result


@pytest.mark.parametrize("count", [16, 8])
def test_an_unbiased_variance_is_that_of_the_batch(count):
    """With another number of values the formula explains nothing."""
    def make(net):
        step, parts = torch_step()(net)

        def another(x, y):
            old = 0.9 * net[1].running_var
            loss = step(x, y)       # 8 rows: the factor is 8 / 7
            net[1].running_var.copy_(old + (net[1].running_var - old) * (
                7 / 8 * count / (count - 1)))
            return loss
        return another, parts
    result = parity.compare(
        NORM_A, NORM_B, batches=BATCHES[:2],
        step_a=gluon_step(), step_b=make)
    assert result.proves(formulas=True) is (count == 8), result


def test_a_closure_is_waited_for():
    def make(net):
        from torch.nn import functional
        moves = torch_sgd(net.parameters())

        def step(x, y):
            def again():
                moves.zero_grad()
                loss = functional.cross_entropy(net(x), y.long())
                loss.backward()
                return loss
            return moves.step(again)
        return step, moves
    result = parity.compare(B, B, batches=BATCHES[:2], step_a=make,
                            step_b=torch_step())
    assert result.same, result


# -- refused ------------------------------------------------------------------

def attending():
    """Dropout inside of a layer."""
    return torch_block(
        lambda nn: {"attend": nn.MultiheadAttention(4, 2, dropout=0.5),
                    "out": nn.Linear(4, 3)},
        lambda net, x: net.out(net.attend(*[x[:, None, :4]] * 3)[0][:, 0]))()


def carried():
    """A network that needs the state of the step before."""
    return several_inputs(SimpleNamespace(name="torch"), lambda dense, x,
                          state: dense(x) + state, (5, 3))


def outside(net):
    import torch
    scale = torch.nn.Parameter(torch.ones(()))
    return [torch_sgd([*net.parameters(), scale])]


def another(net):
    import torch
    return [torch_sgd(net.parameters()), torch.nn.Bilinear(2, 2, 2)]


@pytest.mark.parametrize("net, step, error, words", [
    (attending, torch_step(), ValueError,
     "dropout= of nn.LSTM and nn.Multi"),
    (carried, torch_step(call=lambda net, x: net(x, 0.0)),
     TypeError, "missing 1 required.*'state'"),
    (B, torch_step(optimizers=outside), ValueError, "1 weights that are not"),
    (B, torch_step(optimizers=another), TypeError, "received Bilinear")],
    ids=["dropout of a layer", "a state", "outside", "no optimizer"])
def test_what_an_own_step_cannot_have_is_refused(net, step, error, words):
    before = net() if net is B else net
    with pytest.raises(error, match=words):
        parity.compare(before, net, batches=BATCHES, step_a=step, step_b=step)
    assert net is not B or {str(p.dtype) for p in before.parameters()} == {
        "torch.float32"}
