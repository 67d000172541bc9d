"""torch's optimizer and schedule objects, and names of its optimizers, on a
`Trainer`: the numbers of torch's own loop in float64."""
import copy
import warnings

import numpy as np
import pytest

import mgpu
import steps
from conftest import BACKENDS
from helpers import mlp, on, relative_difference
from steps import backward

if "torch" not in BACKENDS:
    pytest.skip("torch's objects", allow_module_level=True)

import torch                                        # noqa: E402
from torch import nn, optim                         # noqa: E402
from torch.optim import lr_scheduler                # noqa: E402


@pytest.fixture(autouse=True)
def double():
    """NAdam keeps a product in torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def on_torch():
    with mgpu.using_backend("torch"):
        yield


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(rows, seed=0):
    return tuple(map(torch.tensor, steps.batch(rows, seed)))


def gap(one, other):
    return max(relative_difference(a.detach().numpy(), b.detach().numpy())
               for a, b in zip(one.parameters(), other.parameters()))


class Pair:
    """torch's own loop, and that of mgpu, from equal networks."""

    def __init__(self, make, devices, schedule=None, net=network):
        self.nets = net(), net()
        self.optimizers = [make(net) for net in self.nets]
        self.schedules = [schedule(o) for o in self.optimizers] \
            if schedule else []
        self.replicas = mgpu.initialize(self.nets[1], devices)
        self.trainer = mgpu.Trainer(self.replicas, self.optimizers[1])

    def step(self, rows=8, seed=0, clip=None):
        """On both sides; returns the norms."""
        X, y = batch(rows, seed)
        net, (optimizer, other) = self.nets[0], self.optimizers
        optimizer.zero_grad()
        other.zero_grad()       # as a script does that goes over to mgpu
        nn.functional.cross_entropy(net(X), y).backward()
        backward(self.replicas, X, y)
        norms = None
        if clip:
            self.trainer.allreduce_grads()
            norms = (float(nn.utils.clip_grad_norm_(net.parameters(), clip)),
                     self.trainer.clip_grad_norm_(clip, rows))
            self.trainer.update(rows)
        else:
            self.trainer.step(rows)
        optimizer.step()
        return norms

    def gap(self):
        return gap(*self.nets)


def plain_sgd(net):
    return optim.SGD(net.parameters(), 0.1)


def values_of(net):
    return {name: x.clone() for name, x in net.state_dict().items()}


def assert_unmoved(net, before):
    assert all(torch.equal(x, before[name])
               for name, x in net.state_dict().items())


def two_groups(cls, **options):
    """A rule for two layers, whose options differ."""
    def make(net):
        return cls([{"params": net[0].parameters(), "weight_decay": 0.25,
                     "lr": 0.03}, {"params": net[2].parameters()}], lr=0.05,
                   **options)
    return make


@pytest.mark.parametrize("k, make", [
    (3, two_groups(optim.SGD, momentum=0.9, nesterov=True)),
    (1, two_groups(optim.Adam, amsgrad=True)),
    (2, two_groups(optim.Adam, decoupled_weight_decay=True)),
    (3, two_groups(optim.AdamW, foreach=True)),
    (4, two_groups(optim.RMSprop, centered=True, momentum=0.5)),
    (2, two_groups(optim.Adagrad, lr_decay=0.1,
                   initial_accumulator_value=0.2)),
], ids=lambda x: str(x) if isinstance(x, int) else "")
def test_an_object_updates_as_in_torchs_own_loop(on_torch, k, make):
    pair = Pair(make, on(*range(k)))
    for number, rows in enumerate((8, 3, 5)):
        pair.step(rows, number)
        for optimizer in pair.optimizers:       # as programs do
            group = optimizer.param_groups[number % 2]
            group["lr"] *= 0.5
            group["weight_decay"] += 0.01
            if "betas" in group:
                group["betas"] = (0.8, 0.99)
            if group.get("momentum"):
                group["momentum"] -= 0.1
        assert pair.gap() < 1e-12


def plateau(optimizer):
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    values = iter((3.0, 4.0, 2.0, 5.0, 6.0, 1.0, 1.5, 1.0))
    step = schedule.step
    schedule.step = lambda: step(next(values))
    return schedule


def sequential(optimizer):
    with warnings.catch_warnings():     # torch's own
        warnings.simplefilter("ignore")
        return lr_scheduler.SequentialLR(optimizer, [
            lr_scheduler.LinearLR(optimizer, total_iters=3),
            lr_scheduler.ExponentialLR(optimizer, 0.7)], [3])


SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [
        lambda n: 0.9 ** n, lambda n: 1 / (n + 1)]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=8),
    "plateau": plateau, "sequential": sequential}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_that_is_stepped_as_in_torch_gives_torchs_numbers(
        on_torch, kind):
    """And no warning of torch's, which look for optimizer.step()."""
    pair = Pair(two_groups(optim.AdamW), on(0, 1), SCHEDULES[kind])
    for number in range(5):
        pair.step(8, number)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for schedule in pair.schedules:
                schedule.step()
        assert not told and pair.gap() < 1e-12
    one, other = pair.optimizers
    assert [g["lr"] for g in one.param_groups] == \
        [g["lr"] for g in other.param_groups]
    assert pair.trainer.learning_rate == one.param_groups[0]["lr"]


@pytest.mark.device_counts(1, 3)
def test_clip_grad_norm_is_torchs_between_backward_of_a_mean_loss_and_step(
        on_torch, devices):
    pair = Pair(lambda net: optim.SGD(net.parameters(), 0.5), devices)
    for number, (rows, limit) in enumerate(((8, 1e-3), (3, 0.1), (7, 1e3))):
        norm, own = pair.step(rows, number, limit)
        assert abs(norm - own) < 1e-12 and pair.gap() < 1e-12


def test_what_is_in_no_group_is_not_moved(on_torch, devices, tmp_path):
    """A head is trained; gradients of the rest are no stale ones, and no step
    that is not done."""
    pair = Pair(lambda net: optim.Adam(net[2].parameters(), 0.1), devices)
    before = values_of(pair.nets[1][0])
    for rows in (8, 3):
        pair.step(rows)
        mgpu.save_checkpoint(tmp_path / "c", pair.replicas, pair.trainer)
    pair.replicas.check_equal()
    assert pair.gap() < 1e-12
    assert_unmoved(pair.nets[1][0], before)
    assert pair.trainer.export_states().counts == {"2.weight": 2, "2.bias": 2}


def test_a_group_may_be_added_and_a_layer_unfrozen(on_torch):
    pair = Pair(lambda net: optim.SGD(net[2].parameters(), 0.1, momentum=0.5),
                on(0, 1, 2))
    pair.step()
    for net, optimizer in zip(pair.nets, pair.optimizers):
        optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.3})
    for number in range(2):
        pair.step(5, number)
        assert pair.gap() < 1e-12
    assert pair.trainer.export_states().counts["0.weight"] == 2


def another_parameter(net, optimizer):
    net[0].weight = nn.Parameter(torch.ones(5, 6))


def in_a_group(**options):
    return lambda net, optimizer: optimizer.param_groups[1].update(options)


@pytest.mark.parametrize("make, change", [
    (optim.SGD, lambda net, optimizer: optimizer.param_groups.pop()),
    (optim.SGD, another_parameter), (optim.SGD, in_a_group(momentum=0.9)),
    (optim.AdamW, in_a_group(decoupled_weight_decay=False)),
    (optim.Adam, in_a_group(maximize=True)),
    (optim.Adam, lambda net, optimizer: optimizer.state.clear()),
    (optim.SGD, lambda net, optimizer: setattr(optimizer, "step", list))])
def test_what_programs_change_between_steps_counts_as_in_torch(
        on_torch, make, change):
    pair = Pair(two_groups(make), on(0, 1))
    pair.step()
    for net, optimizer in zip(pair.nets, pair.optimizers):
        change(net, optimizer)
    for number in range(2):
        pair.step(5, number)
        assert pair.gap() < 1e-12


def test_a_user_defined_optimizer_gets_summed_gradients(
        on_torch, devices):
    """After `allreduce_grads`, and after a pass of its own."""
    net, other = network(), network()
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd")
    backward(replicas, *batch(8))
    trainer.allreduce_grads()
    nn.functional.cross_entropy(other(batch(8)[0]), batch(8)[1],
                                reduction="sum").backward()
    for n in (net, other):
        optimizer = plain_sgd(n)
        optimizer.step()
        optimizer.zero_grad()
        n(batch(3)[0]).sum().backward()
        optimizer.step()
    assert gap(net, other) < 1e-12


def test_tied_lazy_and_frozen_parameters_in_another_dtype(on_torch):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.one, self.last = nn.Linear(6, 6), nn.LazyLinear(3)
            self.two = nn.Linear(6, 6)
            self.two.weight = self.one.weight
            self.one.bias.requires_grad_(False)

        def forward(self, x):
            return self.last(torch.tanh(self.two(self.one(x))))
    nets = []
    for _ in range(2):
        torch.set_default_dtype(torch.float32)
        nets.append(Tied())
        torch.set_default_dtype(torch.float64)
    net, own = nets
    net.double()
    optimizers = [optim.Adam(net.parameters(), 0.1) for net in nets]
    X, y = batch(8)
    replicas = mgpu.initialize(own, on(0, 1), sample=X[:1], dtype="float64")
    net(X)
    net.load_state_dict(own.state_dict())
    trainer = mgpu.Trainer(replicas, optimizers[1])
    for _ in range(3):
        optimizers[0].zero_grad()
        nn.functional.cross_entropy(net(X), y).backward()
        optimizers[0].step()
        backward(replicas, X, y)
        trainer.step(8)
    assert gap(net, own) < 1e-12


def test_two_objects_of_one_network_step_from_one_pass(on_torch):
    makes = (lambda net: optim.SGD(net[0].parameters(), 0.1),
             lambda net: optim.Adam(net[2].parameters(), 0.1))
    pair = Pair(makes[0], on(0, 1))
    others = [makes[1](net) for net in pair.nets]
    second = mgpu.Trainer(pair.replicas, others[1])
    for number in range(3):
        others[0].zero_grad()
        pair.step(6, number)
        others[0].step()
        second.step(6)
        assert pair.gap() < 1e-12


def losses_of(replicas, X, y):
    shards = mgpu.split_batch(X, y, replicas.devices)
    with mgpu.record():
        return [nn.functional.cross_entropy(out, label, reduction="sum")
                for out, label in zip(replicas(shards[0]), shards[1])]


def by_hand(replicas, optimizer):
    total = sum(losses_of(replicas, *batch(8)))
    for x, gradient in zip(replicas.net.parameters(), torch.autograd.grad(
            total, list(replicas.net.parameters()))):
        x.grad = gradient
    optimizer.step()


def by_inputs(replicas, optimizer):
    losses = losses_of(replicas, *batch(8))
    optimizer.zero_grad()
    replicas.zero_grad()    # between the passes, as in torch
    for x in replicas.net.parameters():
        x.grad = None
    sum(losses).backward(inputs=list(replicas.net.parameters()))
    optimizer.step()


@pytest.mark.parametrize("way", [by_hand, by_inputs])
def test_an_own_step_applies_the_sum_over_the_devices(on_torch, devices, way):
    nets = network(), network()
    for net, places in zip(nets, (devices, devices[:1])):
        way(mgpu.initialize(net, places), plain_sgd(net))
    assert gap(*nets) < 1e-12
    assert gap(nets[0], network()) > 1e-3


@pytest.mark.parametrize("request_", ["write", "add"])
def test_a_step_after_a_pass_of_the_users_own_is_right(
        on_torch, devices, request_):
    """A pass on all devices with unused gradients leaves nothing."""
    net, other = network(), network()
    replicas = mgpu.initialize(net, devices)
    replicas.params()[0].grad_req = request_
    pair = [(n, plain_sgd(n)) for n in (net, other)]

    def closure(n, optimizer):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(n(batch(5)[0]), batch(5)[1])
        loss.backward()
        return loss
    for number in range(2):
        backward(replicas, *batch(8))
        if request_ == "add":   # on all devices: they are added up
            replicas.zero_grad()
        for n, optimizer in pair:
            if number % 2:
                optimizer.step(lambda n=n, o=optimizer: closure(n, o))
            else:
                closure(n, optimizer)
                optimizer.step()
        torch.autograd.grad(sum(losses_of(replicas, *batch(8))),
                            list(net.parameters()))     # a look
    assert gap(net, other) < 1e-12


@pytest.mark.parametrize("request_", ["write", "add"])
def test_without_a_backward_pass_there_is_no_gradient(
        on_torch, devices, request_):
    """Not zeros, by which torch's optimizers would move on."""
    net = network()
    replicas = mgpu.initialize(net, devices)
    for p in replicas.params():
        p.grad_req = request_
    trainer = mgpu.Trainer(replicas, "sgd")
    for _ in range(2):
        shards = mgpu.split_and_load(batch(1)[0], devices, even_split=False)
        for given in (shards, shards[::-1]):    # fewer rows than devices
            with mgpu.record():
                replicas(given)
        assert all(x.grad is None for x in net.parameters())
        backward(replicas, *batch(8))
        trainer.step(8)
        net.zero_grad()


def test_zero_grad_does_not_clear_what_another_trainer_adds_up(on_torch):
    net = network()
    replicas = mgpu.initialize(net, on(0, 1))
    trainer = mgpu.Trainer(replicas, optim.SGD(net[2].parameters(), 0.1))
    trainer.zero_grad()
    replicas.params()[0].grad_req = "add"
    with pytest.raises(ValueError, match="'0.weight', which this trainer"):
        trainer.zero_grad()


class Own(optim.Optimizer):
    """A user-defined optimizer with its own step and state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    held = self.state[p].setdefault("held",
                                                    torch.zeros_like(p))
                    held.lerp_(p.grad, 0.25)
                    p -= group["lr"] * held.sign() * p.grad.abs().sqrt()


def hooked(net):
    optimizer = plain_sgd(net)
    optimizer.register_step_post_hook(lambda *_: [
        p.data.clamp_(-0.25, 0.25) for p in net.parameters()])
    return optimizer


OBJECTS = {
    "Own": lambda net: Own(net.parameters()), "hooks": hooked,
    **{cls.__name__: lambda net, cls=cls: cls(net.parameters(), lr=0.01)
       for cls in (optim.ASGD, optim.Adafactor)},
    "tensor": lambda net: optim.Adam(net.parameters(), torch.tensor(0.1)),
    "formulas": lambda net: optim.Adam([
        {"params": net[0].parameters(), "decoupled_weight_decay": True},
        {"params": net[2].parameters()}], weight_decay=0.1)}


@pytest.mark.parametrize("name", OBJECTS)
def test_any_class_steps_as_in_torchs_own_loop_and_resumes(
        on_torch, name, tmp_path):
    pair = Pair(OBJECTS[name], on(0, 1, 2))
    for number in range(2):
        pair.step(5, number)
        assert pair.gap() < 1e-12
    mgpu.save_checkpoint(tmp_path / "c", pair.replicas, pair.trainer)
    again = Pair(OBJECTS[name], on(0, 1, 2))
    mgpu.load_checkpoint(tmp_path / "c", again.replicas, again.trainer)
    for number in range(2, 4):
        for one in pair, again:
            one.step(5, number)
    assert gap(pair.nets[1], again.nets[1]) == 0 and pair.gap() < 1e-12


def test_the_objects_own_step_and_state_dict_are_torchs(on_torch):
    """Steps of a trainer and of the script alternate; a state goes over to
    another object."""
    pair = Pair(two_groups(optim.Adam), on(0, 1))
    pair.step()
    X, y = batch(6)
    for net, optimizer in zip(pair.nets, pair.optimizers):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X), y).backward()
        optimizer.step()
    pair.step(5, 1)
    again = Pair(two_groups(optim.Adam), on(0, 1, 2))
    for net, optimizer, own, state in zip(
            again.nets, again.optimizers, pair.nets, pair.optimizers):
        net.load_state_dict(own.state_dict())
        optimizer.load_state_dict(copy.deepcopy(state.state_dict()))
    again.step(5, 2)
    pair.step(5, 2)
    assert pair.gap() < 1e-12 and gap(pair.nets[1], again.nets[1]) < 1e-12


@pytest.mark.device_counts(1, 3)
def test_the_parameters_of_a_loss_are_updated_with_the_networks(
        on_torch, devices):
    """Their gradients are divided as the network's are, and cleared."""
    def weighted(heads):
        return lambda out, y: (nn.functional.cross_entropy(
            heads(out), y, reduction="none") * torch.exp(heads.bias[0]))
    nets, heads, optimizers = [], [], []
    for _ in range(2):
        nets.append(network())
        heads.append(nn.Linear(3, 3))
        heads[-1].load_state_dict(heads[0].state_dict())
        optimizers.append(optim.Adam([
            {"params": nets[-1].parameters()},
            {"params": heads[-1].parameters(), "lr": 0.05}], 0.1))
    replicas = mgpu.initialize(nets[1], devices)
    trainer = mgpu.Trainer(replicas, optimizers[1])
    for number, rows in enumerate((8, 3, 7)):
        X, y = batch(rows, number)
        optimizers[0].zero_grad()
        weighted(heads[0])(nets[0](X), y).mean().backward()
        optimizers[0].step()
        mgpu.train_batch(X, y, replicas, weighted(heads[1]), trainer)
    assert gap(*nets) < 1e-12 and gap(*heads) < 1e-12
    assert all(x.grad is None for x in heads[1].parameters())
    state = trainer.state_dict()
    assert sum(name.startswith("group 1") for name in state["slots"]) == 4
    trainer.load_state_dict(state)


def test_an_optimizer_without_a_trainer_raises(on_torch):
    net = network()
    replicas = mgpu.initialize(net, on(0, 1))
    grouped = two_groups(optim.SGD)(net)
    with pytest.raises(ValueError, match="has none of them"):
        mgpu.Trainer(replicas, optim.SGD(network().parameters()))
    before = values_of(net)
    backward(replicas, *batch(8))
    with pytest.raises(TypeError, match="closure"):     # torch's own error
        mgpu.Trainer(replicas, optim.LBFGS(net.parameters())).step(8)
    trainer = mgpu.Trainer(replicas, grouped)
    replicas.params()[0].lr_mult = 2.0
    backward(replicas, *batch(8))
    with pytest.raises(ValueError, match="'0.weight'. Create a parameter"):
        trainer.step(8)
    assert_unmoved(net, before)


def test_set_learning_rate_writes_to_the_groups(on_torch):
    pair = Pair(plain_sgd, on(0, 1))
    pair.trainer.set_learning_rate(0.25)
    pair.optimizers[0].param_groups[0]["lr"] = 0.25
    pair.step()
    assert pair.optimizers[1].param_groups[0]["lr"] == 0.25
    assert pair.trainer.learning_rate == 0.25 and pair.gap() < 1e-12


def test_other_rates_than_those_of_the_object_are_refused(on_torch):
    pair = Pair(two_groups(optim.SGD), on(0, 1))
    with pytest.raises(ValueError, match="different learning rates"):
        pair.trainer.set_learning_rate(0.25)
    optimizer = pair.optimizers[1]
    for rule in (optimizer, "sgd"):
        with pytest.raises(TypeError, match="received StepLR.*optimizer"):
            mgpu.Trainer(pair.replicas, rule,
                         lr_scheduler=lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(ValueError, match="have its rates"):
        mgpu.Trainer(pair.replicas, optimizer, lr_scheduler=lambda n: 0.1)


def begin(devices):
    net = network()
    optimizer = two_groups(optim.AdamW)(net)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=8)
    replicas = mgpu.initialize(net, devices)
    return replicas, mgpu.Trainer(replicas, optimizer), schedule


def go_on(replicas, trainer, schedule, numbers):
    for number in numbers:
        backward(replicas, *batch(8, number))
        trainer.step(8)
        schedule.step()


def test_options_of_numpy_are_in_the_states(on_torch):
    pair = Pair(lambda net: optim.Adam(net.parameters(), 0.1), on(0, 1))
    group = pair.optimizers[1].param_groups[0]
    group.update(lr=np.float32(0.3), betas=(np.float64(0.5), 0.75))
    pair.step()
    state = pair.trainer.state_dict()
    assert state["groups"][0]["options"].get("lr") == float(np.float32(0.3))
    again = Pair(lambda net: optim.Adam(net.parameters(), 0.1), on(0, 1))
    again.trainer.load_state_dict(state)
    group = again.optimizers[1].param_groups[0]
    assert group["lr"] == float(np.float32(0.3))
    assert group["betas"] == (0.5, 0.75)


@pytest.mark.parametrize("form", ["checkpoint", "states", "dict"])
def test_a_resumed_run_has_rates_and_momenta_of_the_groups_and_equal_bits(
        on_torch, tmp_path, form):
    replicas, trainer, schedule = begin(on(0, 1))
    go_on(replicas, trainer, schedule, range(2))
    values, state = replicas.export_numpy(), schedule.state_dict()
    if form == "checkpoint":
        mgpu.save_checkpoint(tmp_path / "c", replicas, trainer)
    elif form == "states":
        trainer.save_states(tmp_path / "s")
    else:
        torch.save(trainer.state_dict(), tmp_path / "d")
    go_on(replicas, trainer, schedule, range(2, 4))
    later, again, other = begin(on(0, 1))
    if form == "checkpoint":
        mgpu.load_checkpoint(tmp_path / "c", later, again)
    else:
        later.import_numpy(values)
        if form == "states":
            again.load_states(tmp_path / "s")
        else:
            again.load_state_dict(torch.load(tmp_path / "d",
                                             weights_only=True))
    other.load_state_dict(state)
    go_on(later, again, other, range(2, 4))
    one, two = replicas.export_numpy(), later.export_numpy()
    assert all((one[name] == two[name]).all() for name in one)


def test_states_of_other_groups_are_refused_and_nothing_changes(on_torch):
    net = network()
    replicas = mgpu.initialize(net, on(0, 1))
    grouped = mgpu.Trainer(replicas, two_groups(optim.SGD, momentum=0.5)(net))
    optimizer = optim.SGD(net.parameters(), 0.1, momentum=0.5)
    whole = mgpu.Trainer(replicas, optimizer)
    plain = mgpu.Trainer(replicas, "sgd", {"lr": 0.2, "momentum": 0.5},
                         semantics="torch")
    for one, other in ((grouped, whole), (whole, grouped), (grouped, plain),
                       (plain, grouped)):
        before = other.export_states()
        with pytest.raises(ValueError, match="groups? of parameters"):
            other.import_states(one.export_states())
        assert other.export_states() == before
    whole.import_states(plain.export_states())      # the rate is the file's
    assert whole.learning_rate == optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="a network of MXNet's")
def test_a_network_of_mxnets_has_no_parameters_of_torchs():
    with mgpu.using_backend("mxnet") as backend:
        replicas = mgpu.initialize(mlp(backend), on(0, 1), "xavier",
                                   sample=np.zeros((1, 6)), dtype="float64")
        with pytest.raises(ValueError, match="none of them.*or pass its"):
            mgpu.Trainer(replicas, optim.Adam(network().parameters()))


def on_both(backend, **options):
    replicas = mgpu.initialize(mlp(backend), on(0, 1), "xavier", seed=1,
                               sample=np.zeros((1, 6)), dtype="float64")
    return replicas, mgpu.Trainer(replicas, "nadam", {"lr": 0.1},
                                  semantics="torch", **options)


def test_state_dict_round_trip_on_both_backends(backend):
    replicas, trainer = on_both(backend)
    X, y = (x.numpy() for x in batch(8))
    backward(replicas, X, y)
    trainer.step(8)
    state, (_, other) = trainer.state_dict(), on_both(backend)
    other.load_state_dict(state)
    one, two = trainer.export_states(), other.export_states()
    assert one._replace(slots=0) == two._replace(slots=0)
    assert all((x == two.slots[key]).all() for key, x in one.slots.items())


def test_wrong_calls_by_torchs_names_are_refused(backend):
    replicas, trainer = on_both(backend)
    for wrong, error, words in (
            ({"state": {}, "param_groups": []}, ValueError,
             "Trainer.state_dict"),
            ({**trainer.state_dict(), "slots": 1}, ValueError,
             "Trainer.state_dict"),
            ([], ValueError, "Trainer.state_dict")):
        with pytest.raises(error, match=words):
            trainer.load_state_dict(wrong)
    with pytest.raises(ValueError, match="batch_size must be.*received None. "
                       "Pass the global batch size"):
        trainer.step()
    with pytest.raises(ValueError, match="batch_size must be.*function"):
        trainer.step(lambda: 0.0)
    backward(replicas, *(x.numpy() for x in batch(8)))
    trainer.allreduce_grads()
    with pytest.raises(ValueError, match="batch_size must be.*None"):
        trainer.clip_grad_norm_(1.0)


def test_zero_grad_is_harmless_before_a_pass_and_voids_one(backend):
    replicas, trainer = on_both(backend)
    for set_to_none in (True, False):
        trainer.zero_grad(set_to_none=set_to_none)
        backward(replicas, *(x.numpy() for x in batch(8)))
        trainer.zero_grad(set_to_none)
        with pytest.raises(mgpu.StaleGradientError):
            trainer.step(8)
