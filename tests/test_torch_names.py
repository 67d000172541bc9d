"""PyTorch's names on `Replicas`, and its initializers, on both backends."""
import functools
import warnings

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import assert_bit_equal
from nets import convnet

if set(BACKENDS) < {"mxnet", "torch"}:
    pytest.skip("they need both backends", allow_module_level=True)

import torch                                        # noqa: E402
from torch import nn                                # noqa: E402
from torch.nn import init                           # noqa: E402

mx = mgpu.mxnet_compat()

Partial = functools.partial


def replicas_of(backend, k, init="xavier", seed=0):
    return mgpu.initialize(convnet(backend), [mgpu.cpu(i) for i in range(k)],
                           init=init, seed=seed, dtype="float64")


def step(replicas):
    X = np.random.default_rng(0).normal(size=(5, 2, 8, 8))
    mgpu.train_batch(X, np.arange(5) % 3, replicas,
                     mgpu.losses.SoftmaxCrossEntropyLoss(),
                     mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1}))


def test_state_dict_is_what_the_framework_saves(backend, tmp_path):
    replicas = replicas_of(backend, 2)
    step(replicas)
    values = replicas.state_dict()
    X = mgpu.put(np.ones((2, 2, 8, 8)), replicas.devices[0])
    expected = mgpu.to_numpy(replicas[0](X))
    fresh, path = convnet(backend), str(tmp_path / "net")
    if backend.name == "torch":
        own = replicas.net.state_dict()
        assert list(values) == list(own)
        assert all(values[name] is x or values[name].data_ptr()
                   == x.data_ptr() for name, x in own.items())
        torch.save(values, path)
        fresh.double().load_state_dict(torch.load(path))
        found = fresh.eval()(X).detach().numpy()
    else:
        mx.nd.save(path, values)
        fresh.cast("float64")
        fresh.load_parameters(path)
        found = fresh(X).asnumpy()
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_load_state_dict_reaches_all_devices(backend):
    source, target = replicas_of(backend, 3, seed=1), replicas_of(backend, 3)
    step(source)
    before = target.export_numpy()
    assert target.load_state_dict(source.state_dict()) == ([], [])
    target.check_equal()
    wanted = source.export_numpy(device=mgpu.cpu(0))
    for name, x in target.export_numpy(all_devices=True).items():
        for one in x if x.shape != before[name].shape else [x]:
            assert_bit_equal(one, wanted[name])
    assert any((before[n] != x).any() for n, x in wanted.items())
    step(target)


def test_load_state_dict_is_whole_or_not_at_all(backend):
    replicas = replicas_of(backend, 2)
    before = replicas.export_numpy()
    values = dict(replicas.state_dict())
    first, second, *_ = values
    left = dict(values)
    del left[first]
    left["other"] = values[second]
    with pytest.raises(RuntimeError) as caught:
        replicas.load_state_dict(left)
    assert first in str(caught.value) and "other" in str(caught.value)
    assert replicas.load_state_dict(left, strict=False) == (
        [first], ["other"])
    other = mgpu.put(np.ones((7,)), replicas.devices[0])
    with pytest.raises(RuntimeError, match="7"):
        replicas.load_state_dict({**values, first: other * 5}, strict=False)
    with pytest.raises(TypeError, match="takes a dict"):
        replicas.load_state_dict([1])
    for name, x in replicas.export_numpy().items():
        assert x.tobytes() == before[name].tobytes()


class Flagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.loaded = nn.Parameter(torch.ones(4)), False

    def _load_from_state_dict(self, *arguments):
        super()._load_from_state_dict(*arguments)
        self.loaded = True

    def forward(self, x):
        return x * self.w * (2 if self.loaded else 1)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("square", torch.ones(4), persistent=False)
        self.register_load_state_dict_post_hook(Cached.after)

    def after(self, _):
        self.square.copy_(self.w.detach() ** 2)

    def forward(self, x):
        return x * self.square + 0 * self.w


@pytest.mark.parametrize("make", [Flagged, Cached])
def test_load_state_dict_does_what_layers_do_with_it(make, devices):
    x = np.arange(20.0, dtype="float32").reshape(5, 4)
    with mgpu.using_backend("torch"):
        net, other = make(), make()
        replicas = mgpu.initialize(net, devices, init="keep")
        values = {name: torch.full_like(p, 3)
                  for name, p in net.named_parameters()}
        other.load_state_dict(values)
        replicas.load_state_dict(values)
        expected = other(torch.tensor(x)).detach().numpy()
        with warnings.catch_warnings():     # of values that devices lacked
            warnings.simplefilter("error")
            assert abs(replicas.predict(x) - expected).max() < 1e-5
        for replica, device in zip(replicas, devices):
            found = replica(mgpu.put(x, device))
            assert abs(mgpu.to_numpy(found) - expected).max() < 1e-5


class Assigned(Flagged):
    def load_state_dict(self, values, strict=True):
        return super().load_state_dict(values, strict, assign=True)


class WithExtra(Flagged):
    def get_extra_state(self):
        return {"factor": getattr(self, "factor", 1.0)}

    def set_extra_state(self, state):
        self.factor = state["factor"]

    def forward(self, x):
        return super().forward(x) * self.get_extra_state()["factor"]


def test_load_state_dict_takes_what_layers_have_besides_arrays(devices):
    x = np.arange(20.0).reshape(5, 4)
    with mgpu.using_backend("torch"):
        replicas = mgpu.initialize(WithExtra().double(), devices, "keep")
        source, other = WithExtra().double(), WithExtra().double()
        source.factor = 7.0
        replicas.predict(x)
        for net in (replicas, other):
            net.load_state_dict(source.state_dict())
        expected = other(torch.tensor(x)).detach().numpy()
        np.testing.assert_array_equal(replicas.predict(x), expected)
        assert expected[-1, -1] == 19 * 2 * 7


class Failing(Flagged):
    """Its rule fails when the first values are written."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_load_state_dict_post_hook(lambda *_: [].pop())


def test_after_a_rule_that_fails_arrays_are_as_before(devices):
    with mgpu.using_backend("torch"):
        net = Failing()
        net.register_buffer("own", torch.zeros(2))
        replicas = mgpu.initialize(net, devices, init="keep")
        before = replicas.export_numpy(all_devices=True)
        with pytest.raises(IndexError, match="pop"):
            replicas.load_state_dict({
                name: torch.full_like(x, 5)
                for name, x in nn.Module.state_dict(net).items()})
        for name, x in replicas.export_numpy(all_devices=True).items():
            assert (x == before[name]).all()


def test_parameters_that_a_rule_makes_anew_are_trained(devices):
    """As ``assign=True`` makes them; as on one device."""
    found = []
    with mgpu.using_backend("torch"):
        for chosen in (devices, devices[:1]):
            replicas = mgpu.initialize(Assigned().double(), chosen, "keep")
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
            x = np.random.default_rng(0).normal(size=(5, 4))
            for _ in range(2):
                replicas.load_state_dict({"w": torch.full(
                    (4,), 3.0, dtype=torch.float64)})
                mgpu.train_batch(x, x ** 2, replicas, mgpu.losses.L2Loss(),
                                 trainer)
            found.append(replicas.export_numpy()["w"])
        other = Assigned().double()
        other.load_state_dict({"w": torch.full((4,), 3.0).double()})
        loss = ((other(torch.tensor(x)) - torch.tensor(x ** 2)) ** 2
                ).mean(1).mean() / 2
        loss.backward()
        wanted = (other.w - 0.1 * other.w.grad).detach().numpy()
    for w in found:
        np.testing.assert_allclose(w, wanted, rtol=1e-12)


def test_a_refused_state_is_not_taken_for_the_users_writes(backend):
    """Which are of all devices, statistics too."""
    replicas = replicas_of(backend, 2)
    step(replicas)
    before = replicas.export_numpy(all_devices=True)
    mean = next(x for name, x in before.items() if "running_mean" in name)
    assert (mean[0] != mean[1]).any()
    values = dict(replicas.state_dict())
    for wrong in ({}, {"a": 1}, {**values, next(iter(values)): "a"}):
        with pytest.raises(RuntimeError):
            replicas.load_state_dict(wrong)
        for name, x in replicas.export_numpy(all_devices=True).items():
            assert x.tobytes() == before[name].tobytes()


def test_values_that_change_while_they_are_read_are_written(backend):
    """Those of the network itself, under another name."""
    replicas = replicas_of(backend, 2)
    step(replicas)
    before, values = replicas.export_numpy(), replicas.state_dict()
    assert replicas.load_state_dict(values) == ([], [])
    for name, x in replicas.export_numpy().items():
        assert x.tobytes() == before[name].tobytes()
    a, b = [name for name, x in values.items() if len(x.shape) == 1
            and mgpu.to_numpy(x).any()][:2]
    wanted = {name: mgpu.to_numpy(x) for name, x in values.items()}
    wanted[a], wanted[b] = wanted[b], wanted[a]
    assert (wanted[a] != wanted[b]).any()
    replicas.load_state_dict({**values, a: values[b], b: values[a]})
    for name, x in replicas.state_dict().items():
        assert (mgpu.to_numpy(x) == wanted[name]).all()


def test_parameters_are_those_of_replica_0(backend):
    replicas = replicas_of(backend, 2)
    named = dict(replicas.named_parameters())
    assert len(named) == len(replicas.params())
    assert all(x is p.data() for x, p in zip(
        replicas.parameters(), replicas.params(), strict=True))
    assert {*named, *dict(replicas.named_buffers())} == {
        *replicas.state_dict()}
    if backend.name == "torch":
        own = dict(replicas.net.named_parameters())
        assert list(named) == list(own)
        assert all(named[name] is x for name, x in own.items())
    assert replicas.module is replicas.net


def test_train_and_eval_are_the_flags_of_replica_0(backend):
    replicas = replicas_of(backend, 2)
    assert replicas.train() is replicas
    X = np.ones((4, 2, 8, 8))
    if backend.name == "mxnet":
        with pytest.raises(NotImplementedError, match="outside of mgpu.rec"):
            replicas.eval()
    else:
        assert replicas.eval() is replicas
        assert not any(m.training for m in replicas.net.modules())
        with pytest.raises(ValueError, match="eval mode does not train"):
            step(replicas)
        assert replicas.train().net.training
    with pytest.raises(ValueError, match="True or False"):
        replicas.train("yes")
    replicas.zero_grad(set_to_none=True)
    step(replicas)
    assert replicas(mgpu.split_and_load(X, replicas.devices))[1] is not None


def test_what_a_module_has_and_replicas_have_not(backend):
    replicas = replicas_of(backend, 2)
    for name in ("cuda", "half", "to", "apply", "modules"):
        with pytest.raises(AttributeError, match="Use .*(initialize|net)"):
            getattr(replicas, name)
    with pytest.raises(AttributeError, match="Use Replicas.state_dict"):
        replicas[0].state_dict


DRAWN = [(init.xavier_normal_, {"gain": 2.0}), (init.uniform_, {}),
         (init.kaiming_uniform_, {"mode": "fan_out", "nonlinearity": "relu"}),
         (init.trunc_normal_, {"std": 0.02, "a": -0.03, "b": 0.04}),
         (init.orthogonal_, {}), (init.sparse_, {"sparsity": 0.3}),
         (init.constant_, {"val": 0.3}), (init.eye_, {})]


def test_functions_of_torch_compute_by_themselves():
    """In float64, from a number of mgpu's stream."""
    for function, options in DRAWN:
        rule = mgpu.initializers.create(Partial(function, **options))
        found = rule.draw((6, 5), np.random.default_rng(3))
        torch.manual_seed(int(np.random.default_rng(3).integers(1 << 62)))
        wanted = function(torch.empty(6, 5, dtype=torch.float64), **options)
        assert_bit_equal(found, wanted.numpy())


def test_both_backends_draw_the_same_from_a_torch_function():
    def drawn(name):
        with mgpu.using_backend(name) as backend:
            return replicas_of(backend, 2, init.kaiming_normal_,
                               7).export_numpy()
    mxnet, torch_ = drawn("mxnet"), drawn("torch")
    assert len(mxnet) > 4
    for name, x in mxnet.items():
        assert x.tobytes() == torch_[name].tobytes()


def test_what_init_does_not_take_is_refused():
    for function, words in (
            (lambda w: None, "expected an initializer"),
            (init.constant_, "'val'"), (init.xavier_normal, "end in '_'"),
            (init.calculate_gain, "end in '_'"),
            (Partial(init.normal_, 0.3), "must be keyword arguments"),
            (Partial(init.normal_, sigma=0.3), "has the options"),
            (Partial(init.normal_, generator=torch.Generator()), "seed="),
            (init.dirac_, "cannot draw the shape"),
            (nn.init, "expected an initializer")):
        with mgpu.using_backend("torch"):
            net = nn.Linear(3, 2)
            before = net.weight.detach().clone()
            with pytest.raises((TypeError, ValueError), match=words):
                mgpu.initialize(net, [mgpu.cpu(0)], init=function)
            assert (net.weight == before).all()
