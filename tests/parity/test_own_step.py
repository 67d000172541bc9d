"""Training steps of the user's own, on one side or on both."""
import inspect

import numpy as np
import pytest

import mgpu
from mgpu import parity
from mgpu.parity import Side
from nets import gluon, gluon_block, torch_block
from nets import torch as torch_
from parity import scripts
from parity.steps import gluon_step, gluons_halving, halving, torch_step

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
    "none": ({"learning_rate": 0.125}, {"lr": 0.125}, []),
    "float32": ({"learning_rate": 0.1}, {"lr": 0.1}, ["MXNet's"]),
    "momentum": ({"learning_rate": 0.125, "momentum": 0.5, "wd": 0.25},
                 {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}, []),
    "momentum and schedule": (
        {"learning_rate": 0.125, "momentum": 0.5, "schedule": gluons_halving},
        {"lr": 0.125, "momentum": 0.5, "schedule": halving}, ["momentum:"]),
    "adam": ({"optimizer": "adam", "learning_rate": 0.125},
             {"optimizer": "Adam", "lr": 0.125}, ["Adam's", "MXNet's"]),
    "clipping": ({"learning_rate": 0.125, "clip": 0.0625},
                 {"lr": 0.125, "clip": 0.0625}, ["clipping"]),
    "scaler and clipping": (
        {"learning_rate": 0.125, "clip": 0.0625},
        {"lr": 0.125, "clip": 0.0625, "scaler": 256.0}, ["clipping"]),
    "two parts": ({"learning_rate": 0.125}, {"lr": 0.125, "parts": 2}, []),
}


def compare_pairs(a, b, batches=BATCHES):
    """The comparison of two pairs (network, step)."""
    return parity.compare(a[0], b[0], batches=batches, step_a=a[1],
                          step_b=b[1])


def both_orders(a, b, batches=BATCHES):
    """Their comparison, and that with the pairs exchanged."""
    return (compare_pairs(*pairs, batches) for pairs in ((a, b), (b, a)))


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loop_and_its_port_are_the_same_but_for_named_formulas(name):
    """And the formulas are those that act, in either order of the sides."""
    options_a, options_b, words = FORMULAS[name]
    for result in both_orders((A, gluon_step(**options_a)),
                              (B, torch_step(**options_b))):
        assert result.proves(formulas=True), result
        assert [f["text"].split()[0] for f in result.formulas] == words
        assert result.same is not bool(words)
        # of values of opposite signs the difference is up to twice the larger
        assert all(1e-10 < f["size"] <= 2 for f in result.formulas)


@pytest.mark.parametrize("devices", [1, 3])
def test_one_side_may_be_mgpus(devices):
    for side, net, step in ((A, B, torch_step(lr=0.125)),
                            (B, A, gluon_step(learning_rate=0.125))):
        result = parity.compare(
            Side(side, devices=devices), net, batches=BATCHES, step_b=step,
            optimizer_params={"learning_rate": 0.125})
        assert result.same, result


def test_a_loop_equals_itself_with_whatever_optimiser():
    for optimizer in ("Adamax", "NAdam", "RMSprop", "Adagrad", "Adadelta",
                      "AdamW", "RAdam", "Rprop"):
        step = torch_step(optimizer, lr=0.01)
        result = parity.compare(B, B, batches=BATCHES, step_a=step,
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


MOMENTUM, SINGLE, CLIPPING = "momentum:", "MXNet's optimisers", "clipping"
STATISTICS = "batch norm: PyTorch", "batch norm: MXNet"
#: both networks and both steps, batches, and how the formulas begin
SCRIPTS = {
    "digits": (scripts.lenet_gluon, scripts.digits_gluon,
               scripts.lenet_torch, scripts.digits_torch, pictures(14),
               [SINGLE]),
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
    sides = [(a, step_a), (b, step_b)][::-1 if swapped else 1]
    (a, step_a), (b, step_b) = sides
    import torch
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return parity.compare(a, b, batches=batches, step_a=step_a,
                              step_b=step_b, **options)


def changed(function, changes):
    """The function with other text: pairs of old and new lines."""
    text = inspect.getsource(function)
    for old, new in changes:
        assert text.count(old) == 1, (old, text)
        text = text.replace(old, new)
    space = dict(vars(scripts))
    exec(text, space)
    return space[function.__name__]


@pytest.mark.parametrize("name, swapped", [
    (name, bool(i % 2)) for i, name in enumerate(SCRIPTS)])
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
    "two halves of a batch": ("digits", halves(2)),
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
    "schedule from 0": ("pictures", [("update = done + 1", "update = done")],
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


@pytest.mark.parametrize("name, swapped", [
    (name, bool(i % 2)) for i, name in enumerate(FAULTS)])
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


def test_a_wrong_rate_is_no_fault_of_clipping():
    """Where both sides clip alike, each by its own formula; where they do not,
    clipping comes before the rate."""
    for clip, stage, name in ((0.0625, "rate", "schedule"),
                              (0.125, "clipping", "clipping")):
        for result in both_orders(
                (A, gluon_step(learning_rate=0.125, clip=0.0625,
                               schedule=gluons_halving)),
                (B, torch_step(lr=0.125, clip=clip, schedule=halving,
                               before=True))):
            assert result.verdict == "different"
            assert result.first.stage == stage, result
            assert result.causes[0].name == name, result


# -- several optimisers, one after the other ----------------------------------

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
@pytest.mark.parametrize("name", ADVERSARIES)
def test_what_follows_an_update_in_a_step_is_explained_by_its_formula(
        name, whole):
    """The second loss is taken with weights that the first optimiser has
    moved; PyTorch adds its gradients to those of the first, Gluon writes over
    them, and both are read when their optimiser gets them."""
    one, two, options_a, options_b, words = ADVERSARIES[name]
    for result in both_orders(
            (adversaries_gluon, adversaries_step_gluon(
                one, whole, **options_a)),
            (adversaries_torch, adversaries_step_torch(
                two, whole, **options_b)), SIXES):
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
        pairs = [(adversaries_gluon, adversaries_step_gluon(
            one, **options_a)), (adversaries_torch, adversaries_step_torch(
                two, **{**options_b, **fault}))]
        result = compare_pairs(*pairs[::1 if which == "adam" else -1], SIXES)
        assert result.verdict == "different", (which, result)


# -- weights that no optimiser has --------------------------------------------

HEAD = (gluon(lambda nn: [nn.Dense(4, activation="tanh", in_units=5),
                          nn.Dense(3, in_units=4)]),
        torch_(lambda nn: [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)]))


def gluon_head(clips=None, frozen=False):
    """Trains the last layer; `clips`: what it clips, "head" or "all"."""
    def make(net):
        if frozen:
            net[0].collect_params().setattr("grad_req", "null")
        return gluon_step(
            of=net[-1], clip=clips and 0.0625,
            clipped=net if clips == "all" else net[-1],
            learning_rate=0.125)(net)
    return make


def torch_head(clips=None, moves="head", steps=True):
    def make(net):
        import torch
        own = {"head": net[-1].parameters(), "all": net.parameters(),
               "bias": [net[-1].bias]}
        optimizer = torch.optim.SGD(own[moves], lr=0.125)

        def step(x, y):
            net.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y.long())
            loss.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_((
                    net if clips == "all" else net[-1]).parameters(), 0.0625)
            if steps:
                optimizer.step()
            return loss
        return step, [optimizer]
    return make


@pytest.mark.parametrize("steps, cause", [
    ((gluon_head(), torch_head()), ""),
    ((gluon_head("head"), torch_head("head")), ""),
    ((gluon_head("all"), torch_head("all")), ""),
    ((gluon_head(), torch_head("all")),
     "clipping: {b} clips gradients to the global norm 0.06249"),
    ((gluon_head("head"), torch_head("all")), "clipping: "),
    ((gluon_head(), torch_head(moves="all")),
     "left out of the update: {a} does not update 0.weight, 0.bias: "),
    ((gluon_head(), torch_head(moves="bias")),
     "left out of the update: {b} does not update 1.weight: "),
    ((gluon_head(), torch_head(steps=False)),
     "left out of the update: {b} does not update 1.weight, 1.bias: "),
    ((gluon_head(frozen=True), torch_head(steps=False)),
     "left out of the update: {b} does not update 1.weight, 1.bias: "),
], ids=["right", "clips the head", "clips all", "one clips all",
        "both clip", "trains all", "trains the bias", "no step", "frozen"])
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
        step, parts = gluon_step(**{"learning_rate": 0.125, **options})(net)
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


def torch_average(decay, kind, **options):
    def make(net):
        import torch
        step, parts = torch_step(**{"lr": 0.125, **options})(net)
        weights = {name: x for name, x in net.state_dict(
            keep_vars=True).items() if x.is_floating_point()}
        average = {name: p.detach().clone() for name, p in weights.items()}
        model = torch.optim.swa_utils.AveragedModel(
            net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(
                decay))
        model.n_averaged += 1       # the first update is one, no copy

        def averaged(x, y):
            loss = step(x, y)
            if kind == "model":
                model.update_parameters(net)
            for name, p in weights.items():
                average[name] = decay * average[name] \
                    + (1 - decay) * p.detach()
            return loss
        return averaged, [*parts, *({"model": [model], "none": []}.get(
            kind, [average]))]
    return make


@pytest.mark.parametrize("formula, names", [
    ("none", "collect_params"), ("float32", "_collect_params_with_prefix"),
    ("float32", "collect_params"), ("adam", "collect_params"),
    ("statistics", "_collect_params_with_prefix")])
def test_an_average_of_what_a_formula_explains_is_explained_with_it(
        formula, names):
    """By either kind of Gluon's names; another average never is."""
    a, b, kind = A, B, {"none": "model"}.get(formula, "rebinds")
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
    result = parity.compare(A, B, batches=BATCHES,
                            step_a=gluon_average(0.75),
                            step_b=torch_average(0.75, "none"))
    assert not result.same
    assert (result.first.step, result.first.stage) == (1, "memory")


def torch_copy(statistics, decay=0.75, part="copy"):
    """A copy of the network, whose weights are averaged; `statistics` does
    something to its running statistics."""
    def make(net):
        import copy

        import torch
        step, parts = torch_step(lr=0.125)(net)
        own = copy.deepcopy(net)

        def averaged(x, y):
            loss = step(x, y)
            with torch.no_grad():
                for e, p in zip(own.parameters(), net.parameters()):
                    e.lerp_(p, 1 - decay)
                for e, p in zip(own.buffers(), net.buffers()):
                    statistics(e, p)
            return loss
        return averaged, [*parts, own if part == "copy" else dict(
            own.named_parameters())]
    return make


@pytest.mark.parametrize("name", ["copied", "averaged", "left", "weights"])
def test_running_statistics_that_one_average_alone_holds_follow_the_network(
        name):
    """Copies say nothing of their own; an average is another one than no
    average; what stays as it was at the start may be meant or not."""
    own = {"copied": lambda e, p: e.copy_(p),
           "averaged": lambda e, p: e.is_floating_point() and e.lerp_(
               p, 0.25),
           "left": lambda e, p: None, "weights": lambda e, p: None}[name]
    for decay in (0.75, 0.5):
        for result in both_orders(
                (NORM_A, gluon_average(
                    0.75, statistics=False)), (NORM_B, torch_copy(
                    own, decay, "weights" if name == "weights" else "copy")),
                BATCHES[:3]):
            right = decay == 0.75 and name in ("copied", "weights")
            assert result.proves(formulas=True) is right, result
            if decay == 0.5 or name == "averaged":
                assert result.verdict == "different", result
                assert result.first.stage == "memory", result
            elif name == "left":
                assert result.verdict == "no proof", result
                assert "average.named_parameters()" in result.reason


def test_a_network_that_needs_more_than_a_batch_is_refused():
    """Its step would call it with the states of the step before."""
    import torch

    class Carried(torch.nn.Module):
        def __init__(self, *default):
            super().__init__()
            self.rnn, self.out = torch.nn.GRU(3, 4), torch.nn.Linear(4, 3)
            self.default = default

        def needs(self, x, state):
            x, state = self.rnn(x[:, None], state)
            return self.out(x[:, 0]), state

        def forward(self, x, *state):
            return self.needs(x, *(state or self.default))

    def make(net):
        moves, carried = torch.optim.SGD(net.parameters(), lr=0.125), {
            "state": torch.zeros(1, 1, 4, dtype=torch.float64)}

        def step(x, y):
            moves.zero_grad()
            out, carried["state"] = net(x, carried["state"].detach())
            loss = torch.nn.functional.cross_entropy(out, y.long())
            loss.backward()
            moves.step()
            return loss
        return step, [moves, carried]
    rows = [(x[:, :3], y) for x, y in BATCHES]
    result = parity.compare(lambda: Carried(None), lambda: Carried(None),
                            batches=rows, step_a=make, step_b=make)
    assert result.same, result

    class Bare(Carried):
        def forward(self, x, state):
            return self.needs(x, state)
    with pytest.raises(TypeError, match="missing 1 required.*'state'"):
        parity.compare(Bare, Bare, batches=rows, step_a=make, step_b=make)


def test_weights_may_have_rates_and_decays_and_optimisers_of_their_own():
    def torch_groups(net):
        import torch
        return [torch.optim.SGD([
            {"params": net[0].parameters(), "lr": 0.25,
             "weight_decay": 0.125}, {"params": net[3].parameters()}],
            lr=0.125, momentum=0.5)]

    def gluon_groups(net):
        from mxnet import gluon
        for p in net[0].collect_params().values():
            p.lr_mult = 2.0
        for p in net[2].collect_params().values():
            p.wd_mult = 0.0
        return [gluon.Trainer(net.collect_params(), "sgd", {
            "learning_rate": 0.125, "momentum": 0.5, "wd": 0.125})]

    def torch_two(net):
        import torch
        return [torch.optim.SGD(net[i].parameters(), lr=lr, momentum=0.5)
                for i, lr in ((0, 0.25), (3, 0.125))]

    def gluon_two(net):
        from mxnet import gluon
        return [gluon.Trainer(net[i].collect_params(), "sgd", {
            "learning_rate": lr, "momentum": 0.5})
            for i, lr in ((0, 0.25), (2, 0.125))]

    for gluons, torchs in ((gluon_groups, torch_groups),
                           (gluon_two, torch_two)):
        for result in both_orders((A, gluon_loop(gluons)),
                                  (B, torch_loop(torchs))):
            assert result.same, result


def gluon_loop(trainers, parts=1):
    """A step of several trainers; `parts`: gradients add up over so many."""
    def make(net):
        from mxnet import autograd, gluon
        own = trainers(net)
        loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
        if parts > 1:
            for p in net.collect_params().values():
                p.grad_req = "add"

        def step(x, y):
            net.collect_params().zero_grad()
            size = len(x) // parts
            for i in range(0, len(x), size):
                with autograd.record():
                    loss = loss_of(net(x[i:i + size]), y[i:i + size])
                loss.backward()
            for trainer in own:
                trainer.step(len(x))
        return step, own
    return make


def torch_loop(optimizers):
    def make(net):
        from torch.nn import functional
        own = optimizers(net)
        net.train()

        def step(x, y):
            for optimizer in own:
                optimizer.zero_grad()
            loss = functional.cross_entropy(net(x), y.long())
            loss.backward()
            for optimizer in own:
                optimizer.step()
            return loss
        return step, own
    return make


def one_trainer(net):
    from mxnet import gluon
    return [gluon.Trainer(net.collect_params(), "sgd",
                          {"learning_rate": 0.125})]


def test_gradients_may_add_up_on_either_side():
    result = parity.compare(A, B, batches=BATCHES,
                            step_a=gluon_loop(one_trainer, parts=4),
                            step_b=torch_step(lr=0.125))
    assert result.same, result


def tagged():
    """F.dropout, an option by keyword, and a dictionary as its output."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Tagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x, *, scale=1.0):
            hidden = torch.relu(self.one(x)) * scale
            return {"logits": self.two(functional.dropout(
                hidden, 0.5, self.training)), "hidden": hidden}
    return Tagged()


def test_the_step_calls_a_network_as_it_likes():
    step = torch_step(lr=0.125, call=lambda net, x: net(
        x=x, scale=1.0)["logits"])
    for other, own in ((A, gluon_step(learning_rate=0.125)),
                       (B, torch_step(lr=0.125))):
        result = parity.compare(other, tagged, batches=BATCHES, step_a=own,
                                step_b=step, map={
                                    "0.weight": "one.weight",
                                    "0.bias": "one.bias"})
        assert result.worst["gradient"].status == "same", result


def test_dropout_inside_of_a_layer_is_refused_by_name():
    def forward(net, x):
        x = x[:, None, :4]
        return net.out(net.attend(x, x, x)[0][:, 0])
    attending = torch_block(lambda nn: {
        "attend": nn.MultiheadAttention(4, 2, dropout=0.5),
        "out": nn.Linear(4, 3)}, forward)
    step = torch_step(lr=0.125)
    with pytest.raises(ValueError, match="dropout= of nn.LSTM and nn.Multi"):
        parity.compare(attending, attending, batches=BATCHES, step_a=step,
                       step_b=step)


def plain_loop(prepare=lambda net: None, after=lambda optimizer, count: None,
               optimizer="SGD", **options):
    """A loop of PyTorch's; `after(optimizer, count)` follows each update,
    and `prepare(net)` gives more parts."""
    def make(net):
        import torch
        moves = getattr(torch.optim, optimizer)(net.parameters(), **options)
        more, count = prepare(net), 0

        def step(x, y):
            nonlocal count
            count += 1
            moves.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y.long()).backward()
            moves.step()
            after(moves, count)
            for part in more or ():
                part.update_parameters(net)
        return step, [moves, *(more or ())]
    return make


def forgets(optimizer, count):
    optimizer.state.clear()


def slows(optimizer, count):
    optimizer.param_groups[0]["lr"] = 0.125 if count < 3 else 0.0625


def average(**options):
    def prepare(net):
        from torch.optim import swa_utils
        return [swa_utils.AveragedModel(net, **options)]
    return prepare


MOMENTUM = {"lr": 0.125, "momentum": 0.5}
#: loops of PyTorch's that differ, and loops that do not
PAIRS = {
    "nesterov": (gluon_step(learning_rate=0.125, momentum=0.5), plain_loop(
        nesterov=True, **MOMENTUM), False),
    "dampening": (gluon_step(learning_rate=0.125, momentum=0.5), plain_loop(
        dampening=0.5, **MOMENTUM), False),
    "memory thrown away": (plain_loop(**MOMENTUM), plain_loop(
        after=forgets, **MOMENTUM), False),
    "steps thrown away": (
        plain_loop(optimizer="Adam", lr=0.125), plain_loop(
            optimizer="Adam", after=forgets, lr=0.125), False),
    "buffers of the average": (
        plain_loop(average(use_buffers=True), lr=0.125),
        plain_loop(average(), lr=0.125), True),
    "counted by the step itself": (
        plain_loop(after=slows, lr=0.125), torch_step(
            lr=0.125, schedule=lambda optimizer: __import__(
                "torch").optim.lr_scheduler.StepLR(optimizer, 3, 0.5)), True),
    "counted, and slower": (plain_loop(after=slows, lr=0.125),
                            plain_loop(lr=0.125), False)}


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
    net = gluon(lambda nn: [nn.Dense(4, in_units=5), nn.BatchNorm(
        in_channels=4, momentum=0.5), nn.Dense(3, in_units=4)])
    port = torch_(lambda nn: [nn.Linear(5, 4), nn.BatchNorm1d(
        4, momentum=0.5), nn.Linear(4, 3)])

    def make(net):
        step, parts = torch_step(lr=0.125)(net)

        def another(x, y):
            old = 0.5 * net[1].running_var
            loss = step(x, y)       # 8 rows: the factor is 8 / 7
            net[1].running_var.copy_(old + (net[1].running_var - old) * (
                7 / 8 * count / (count - 1)))
            return loss
        return another, parts
    result = parity.compare(
        net, port, batches=BATCHES[:2],
        step_a=gluon_step(learning_rate=0.125), step_b=make)
    assert result.proves(formulas=True) is (count == 8), result


def test_weights_outside_of_the_network_are_refused():
    def outside(net):
        import torch
        scale = torch.nn.Parameter(torch.ones(()))
        moves = torch.optim.SGD([*net.parameters(), scale], lr=0.1)
        return lambda x, y: None, moves

    def another(net):
        import torch
        return lambda x, y: None, [torch.optim.SGD(net.parameters(), lr=0.1),
                                   torch.nn.Bilinear(2, 2, 2)]
    before = B()
    for step, kind, words in ((outside, ValueError, "1 weights that are not"),
                              (another, TypeError, "received Bilinear")):
        with pytest.raises(kind, match=words):
            parity.compare(before, B, batches=BATCHES, step_a=step)
    assert {str(p.dtype) for p in before.parameters()} == {"torch.float32"}


def test_a_closure_is_waited_for():
    def make(net):
        import torch
        moves = torch.optim.SGD(net.parameters(), lr=0.125)

        def step(x, y):
            def again():
                moves.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(x), y.long())
                loss.backward()
                return loss
            return moves.step(again)
        return step, moves
    result = parity.compare(B, B, batches=BATCHES, step_a=make,
                            step_b=torch_step(lr=0.125))
    assert result.same, result
