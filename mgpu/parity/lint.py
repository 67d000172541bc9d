"""Differences between Gluon and PyTorch that concern one network: `lint`."""
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from math import ceil, prod, sqrt
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends import using_backend
from mgpu.backends.device import list_devices
from mgpu.backends.network import Network, Spec
from mgpu.backends.probing import Layer
from mgpu.data.nested import cast_floats, rows_of
from mgpu.data.split import split_batch
from mgpu.nn import losses
from mgpu.optim import Optimizer, counterpart, create
from mgpu.parity.side import network_of
from mgpu.training.parameters import STATISTICS
from mgpu.training.replicas import initialize


class Finding(NamedTuple):
    """A difference between Gluon and PyTorch that concerns this network or
    its training.

    Attributes
    ----------
    rule : str
        One of `RULES`.
    where : str
        Layers or options concerned.
    text : str
        What Gluon does, what torch does, and how large the difference is.
    torch : str
        What to write in PyTorch for the same numbers.
    """

    rule: str
    where: str
    text: str
    torch: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text} In torch: {self.torch}"


class _Subject(NamedTuple):
    """What the rules look at."""

    layers: list[Layer]
    specs: list[Spec]
    aliases: dict[str, list[str]]
    shapes: dict[str, tuple[int, ...]]      # first input of each layer
    optimizer: Any
    schedule: bool
    loss: Any
    rows: int | None
    examples: int | None

    @property
    def family(self) -> str:
        """That of an optimizer with Gluon's formulas, else ""."""
        return self.optimizer.family \
            if self.optimizer.semantics == "gluon" else ""

    def of(self, *kinds: str) -> list[Layer]:
        return [layer for layer in self.layers if layer.kind in kinds]


#: by name, the function that finds a difference, and `port` of `_rule`
_RULES: dict[str, tuple[Callable, bool]] = {}


def _rule(name: str, port: bool = False) -> Callable[[Callable], Callable]:
    """Register a rule: a function of a `_Subject` that yields (where, text,
    torch), which counts unless `where` is empty. `port`: it concerns only a
    Gluon network that is to be written in torch, not a torch network."""
    def register(find: Callable) -> Callable:
        _RULES[name] = find, port
        return find
    return register


def _layer_rule(name: str, *kinds: str) -> Callable[[Callable], Callable]:
    """Register a rule for single layers: a function of a layer's options and
    of the shape of its input (() where it is not known) that yields (text,
    torch)."""
    def register(find: Callable) -> Callable:
        @_rule(name, port=True)
        def find_all(s: _Subject) -> Iterator[tuple[str, str, str]]:
            for layer in s.of(*kinds):
                for found in find(layer.options, s.shapes.get(layer.path, ())):
                    yield (_names([layer]), *found)
        return find
    return register


def lint(net: Any, *, sample: Any = None, optimizer: Any = "sgd",
         optimizer_params: Mapping[str, Any] | None = None,
         lr_scheduler: Any = None, loss: Any = None,
         batch_size: int | None = None, examples: int | None = None
         ) -> list[Finding]:
    """The differences between Gluon and PyTorch that concern this network
    and its training.

    Parameters
    ----------
    net : network, or a function that makes one
        A Gluon network: what to mind when it is written in torch. A torch
        network: what differs between plain PyTorch and mgpu, which trains it
        with Gluon's arithmetic. Without values the network is initialized,
        to know its shapes.
    sample : array or tuple of arrays, optional
        What the network is called with. Without it, what depends on the
        shape of a layer's input is not found: flattening dense layers,
        pooling windows in the padding, the size of variance differences.
    optimizer, optimizer_params, lr_scheduler
        As for `mgpu.Trainer` (and ``gluon.Trainer``).
    loss : loss of mgpu.losses or its class, optional
    batch_size, examples : int, optional
        What ``trainer.step`` is told, and the size of the training set.

    Returns
    -------
    list of Finding
        In the order of `RULES`; docs/internals/divergences.md has the
        size of each difference.

    Raises
    ------
    TypeError
        `net` is not a network of either framework.
    """
    options = dict(optimizer_params or {})
    schedule = options.pop("lr_scheduler", None) or lr_scheduler
    rule = optimizer if isinstance(optimizer, Optimizer) \
        else create(optimizer, **options)
    net, name = network_of(net)
    with using_backend(name) as backend:
        shapes: dict[str, tuple[int, ...]] = {}
        network = backend.network(net)
        if sample is not None:
            network = _watched(network, sample, shapes)
        subject = _Subject(
            network.layers(), network.specs(), network.aliases(), shapes,
            rule, schedule is not None, loss, batch_size, examples)
        gluon = backend.semantics == "gluon"
    return [Finding(name, *found) for name, (find, port) in _RULES.items()
            if gluon or not port for found in find(subject) if found[0]]


def _watched(network: Network, sample: Any,
             shapes: dict[str, tuple[int, ...]]) -> Network:
    """Run the network, and keep the shape of each layer's first input."""
    init = None if network.missing() else "keep"
    replicas = initialize(network.net, list_devices(1), init=init,
                          sample=sample, force_reinit=True)

    def watch(path: str, inputs: Any, outputs: Any, index: int) -> None:
        if inputs and hasattr(inputs[0], "shape"):
            shapes.setdefault(path, tuple(inputs[0].shape))
    dtype = next((s.dtype for s in replicas.network.specs()
                  if "float" in s.dtype), "float32")
    shards, _ = split_batch(cast_floats(sample, dtype),
                            np.zeros(rows_of(sample) or 0), replicas.devices)
    with replicas.network.watch_layers(watch):
        replicas(shards)
    return replicas.network


def _names(layers: Iterable[Any]) -> str:
    paths = [getattr(layer, "path", layer) or "the network"
             for layer in layers]
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more"
                                   if len(paths) > 3 else "")


# -- layers -------------------------------------------------------------------

@_rule("batch norm keeps the biased variance")
def _variance(s):
    norms = [layer for layer in s.of("batch_norm")
             if not layer.options["use_global_stats"]]
    counts = [prod(shape) // shape[layer.options["axis"]] for layer in norms
              for shape in [s.shapes.get(layer.path)] if shape]
    size = f" For the batch given, n is {min(counts)} at least: " \
        f"{1 / (min(counts) - 1):.1e} of the variance." \
        if counts and min(counts) > 1 else ""
    yield (_names(norms), "Gluon's running variance is that of the batch "
           "divided by n, torch's by n - 1; and MXNet stores the momentum as "
           "float32." + size, "mgpu.parity.gluonize(net)")


@_layer_rule("batch norm momentum", "batch_norm")
def _momentum(o, shape):
    if abs(o["momentum"] - 0.9) > 1e-9:
        yield (f"momentum={o['momentum']:g} is the share that is kept in "
               "Gluon, and the share that is replaced in torch.",
               f"BatchNorm(momentum={1 - o['momentum']:g})")


@_layer_rule("epsilon", "batch_norm", "layer_norm", "instance_norm",
             "group_norm")
def _epsilon(o, shape):
    if o["epsilon"] != 1e-5:
        yield (f"epsilon is {o['epsilon']:g}; torch's default is 1e-05.",
               f"eps={o['epsilon']:g}")


@_layer_rule("fixed gamma or beta", "batch_norm")
def _fixed(o, shape):
    if not o["scale"]:
        yield ("scale=False: gamma counts as 1, whatever is stored in it, "
               "and is not trained.",
               "fill bn.weight with 1 and bn.weight.requires_grad_(False); "
               "affine=False would take beta away too")
    if not o["center"]:
        yield ("center=False: beta is not trained.",
               "bn.bias.requires_grad_(False)")


@_layer_rule("batch norm over another axis", "batch_norm")
def _axis(o, shape):
    if o["axis"] != 1:
        yield (f"normalizes over axis {o['axis']}; torch always over axis "
               "1.", "permute before and after")


@_rule("batch norm with global statistics", port=True)
def _global(s):
    yield (_names(layer for layer in s.of("batch_norm")
                  if layer.options["use_global_stats"]),
           "use_global_stats=True predicts in training too.",
           "bn.eval() after every net.train()")


@_rule("statistics that no gradient passes", port=True)
def _unreached(s):
    trained = {p.name for p in s.specs if p.grad_req != "null"}
    before = takewhile(lambda layer: trained.isdisjoint(layer.parameters),
                       s.layers)
    yield (_names(layer for layer in before if layer.kind == "batch_norm"
                  and not layer.options["use_global_stats"]),
           "nothing in the layer or before it is trained, so no gradient "
           "comes to it: its running statistics stay in Gluon, and move in "
           "torch.", "bn.momentum = 0.0")


@_layer_rule("dense layers flatten", "dense")
def _flatten(o, shape):
    if o["flatten"] and len(shape) > 2:
        yield (f"an input of shape {shape} becomes ({shape[0]}, "
               f"{prod(shape[1:])}); Linear would act on the last axis, "
               f"{shape[-1]}.", "nn.Flatten() before the Linear")


@_layer_rule("pooling windows in the padding", "max_pool", "avg_pool")
def _pooling(o, shape):
    if not o["ceil"]:
        return
    outside = [n for n, k, stride, pad in zip(
        shape[2:], o["kernel"], o["stride"], o["padding"])
        if ceil((n + 2 * pad - k) / stride) * stride >= n + pad]
    if outside:
        yield (f"ceil_mode=True: the last window of {outside[0]} values lies "
               "wholly in the padding. Gluon keeps it, torch drops it.",
               "F.pad by one stride more, then ceil_mode=True")
    else:
        yield "the output size is rounded up.", "ceil_mode=True"


@_rule("average without the padding", port=True)
def _average(s):
    yield (_names(layer for layer in s.of("avg_pool")
                  if not layer.options["count_include_pad"]
                  and any(layer.options["padding"])),
           "count_include_pad=False.", "count_include_pad=False")


@_layer_rule("dropout along axes", "dropout")
def _dropout(o, shape):
    if o["axes"]:
        layer = {(2,): "nn.Dropout1d", (2, 3): "nn.Dropout2d",
                 (2, 3, 4): "nn.Dropout3d"}.get(
                     tuple(o["axes"]), "a mask of your own")
        yield (f"one mask value along axes {o['axes']}.",
               f"{layer} ({o['rate']:g})")


@_layer_rule("slope of a leaky ReLU", "leaky_relu")
def _slope(o, shape):
    if o["slope"] != 0.01:
        yield (f"the slope is {o['slope']:g}; torch's default is 0.01.",
               f"negative_slope={o['slope']:g}")


# -- parameters ---------------------------------------------------------------

@_rule("initial values", port=True)
def _initial(s):
    weights = [p for p in s.specs if p.kind == "weight" and p.init is None]
    sizes = [f" ({p.name}: +-0.07 against +-"
             f"{1 / sqrt(prod(p.shape[1:])):.3f})"
             for p in weights if p.shape and len(p.shape) > 1]
    yield (_names(p.name for p in weights), "Gluon draws weights from "
           "Uniform(-0.07, 0.07), unless initialize() is told otherwise; "
           "torch from +-1/sqrt(fan in), embeddings from N(0, 1)."
           + "".join(sizes[:1]),
           "copy the weights, or nn.init.uniform_(w, -0.07, 0.07)")
    yield (_names(p.name for p in s.specs if p.kind == "bias"), "biases "
           "start at 0 in Gluon whatever the initializer, at random in torch.",
           "nn.init.zeros_(bias)")


@_rule("shared parameters", port=True)
def _shared(s):
    for names in s.aliases.values():
        yield (" = ".join(names), "one tensor under several names.",
               "assign the same nn.Parameter, or use the module twice")


@_rule("frozen parameters", port=True)
def _frozen(s):
    fixed = {name for layer in s.of("batch_norm") for name in layer.parameters
             for kind, option in (("gamma", "scale"), ("beta", "center"))
             if name.endswith(kind) and not layer.options[option]}
    yield (_names(p.name for p in s.specs if p.grad_req == "null"
                  and p.name not in fixed and p.kind not in STATISTICS
                  and "float" in p.dtype),
           "grad_req='null'.", "requires_grad_(False)")


@_rule("gradients that add up", port=True)
def _adding(s):
    yield (_names(p.name for p in s.specs if p.grad_req == "add"),
           "grad_req='add' until zero_grad().",
           "torch always adds: no zero_grad() between those passes")


@_rule("multipliers of a parameter", port=True)
def _multipliers(s):
    for p in s.specs:
        if (p.lr_mult, p.wd_mult) != (1.0, 1.0) and p.grad_req != "null":
            yield (p.name, f"lr_mult={p.lr_mult:g}, wd_mult={p.wd_mult:g}.",
                   "a parameter group of its own")


# -- training -----------------------------------------------------------------

@_rule("momentum under a changing rate")
def _velocity(s):
    if s.optimizer.rate_in_velocity and s.optimizer.momentum and s.schedule:
        yield ("lr_scheduler", "the rate is inside Gluon's velocity and "
               "outside torch's: after each change the old steps keep their "
               "size in Gluon and are rescaled in torch.",
               "mgpu.Trainer, or multiply every momentum_buffer by "
               "old rate / new rate at each change")


@_rule("weight decay in Nesterov's velocity")
def _nag(s):
    if s.family == "nag" and s.optimizer.momentum and s.optimizer.wd:
        yield ("wd", "Gluon keeps the decay of the new weight in the "
               "velocity.", "mgpu.Trainer; SGD(nesterov=True) has no such "
               "term")


@_rule("epsilon of the optimizer")
def _optimiser_epsilon(s):
    o = s.optimizer
    if s.family in ("adam", "adamw"):
        yield ("epsilon", "Gluon adds it outside the bias correction: at the "
               f"first step it counts {1 / sqrt(1 - o.beta2):.1f} times as "
               "much as torch's; it matters where gradients are not far "
               "above it.", "mgpu.Trainer(semantics='gluon'), or eps = "
               f"{o.epsilon:g} / sqrt(1 - {o.beta2:g}**t)")
    elif s.family in ("rmsprop", "adagrad"):
        epsilon = o.eps if s.family == "adagrad" else o.epsilon
        yield ("epsilon", "Gluon adds it inside the root, torch outside.",
               f"mgpu.Trainer(semantics='gluon'); eps={epsilon:g} is near it "
               "only where gradients are large")
    elif s.family == "adamax":
        yield ("epsilon", "Gluon has none: a gradient that is exactly 0 "
               "from the start gives NaN.", "eps=0 for the same numbers")


@_rule("options of the optimizer")
def _options(s):
    o = s.optimizer
    if s.family == "rmsprop":
        yield ("gamma1", "the share that is kept.",
               f"alpha={o.gamma1:g} (torch's default is 0.99)"
               + (f", centered=True, momentum={o.gamma2:g}"
                  if o.centered else ""))
    elif s.family == "adadelta":
        yield ("learning_rate", "Gluon's AdaDelta ignores it.",
               f"lr=1, rho={o.rho:g}, eps={o.epsilon:g}")
    elif s.family == "nadam":
        yield ("the momentum schedule", "Gluon keeps one product for all "
               "parameters, which grows with each of them.", "mgpu.Trainer")
    elif s.family and counterpart(type(o), "torch") is None:
        yield (type(o).__name__, "torch.optim has no such optimizer.",
               "mgpu.Trainer")


@_rule("weight decay")
def _decay(s):
    o, torchs = s.optimizer, counterpart(type(s.optimizer), "torch")
    if not (o.wd and s.family and torchs):
        return
    if o.decoupled_decay and not torchs.decoupled_decay:
        yield ("wd", "is kept out of the averages (decoupled); torch adds "
               "it to the gradient.", "mgpu.Trainer(semantics='gluon')")
    elif s.family in ("adam", "adamax", "nadam", "rmsprop"):
        yield ("wd", "is added to the gradient (L2), before the averages.",
               f"weight_decay={o.wd:g} of the same optimizer, not of AdamW")


@_rule("gradient clipping")
def _clipping(s):
    o = s.optimizer
    if o.clip_gradient is not None:
        yield ("clip_gradient", "clips each element of the gradient, "
               "divided by the batch size, "
               f"{'before' if o.clips_before_decay else 'after'} the weight "
               "decay is added.",
               "torch.nn.utils.clip_grad_value_(parameters, "
               f"{o.clip_gradient:g}) before the step"
               + ("" if o.clips_before_decay or not o.wd
                  else ", with the decay added by hand first"))


@_rule("a short last batch")
def _short(s):
    if s.rows and s.examples and s.examples % s.rows:
        left = s.examples % s.rows
        yield ("trainer.step", f"the last batch has {left} rows; "
               f"trainer.step({s.rows}) divides it by {s.rows}, a mean loss "
               f"by {left}: its step is {s.rows / left:.3g} times as large.",
               f"loss.sum() / {s.rows}")


_LOSSES = {
    losses.SoftmaxCrossEntropyLoss: (
        "labels out of range are clipped to the nearest class, torch "
        "raises; one value per example, torch's mean is over all.",
        "F.cross_entropy(reduction='none'), and check the labels"),
    losses.L2Loss: ("is half the squared error.",
                    "0.5 * F.mse_loss(reduction='none')"),
    losses.HuberLoss: (
        "with rho is smooth_l1, not torch's huber.",
        "F.smooth_l1_loss(beta=rho, reduction='none')"),
    losses.KLDivLoss: (
        "is the sum over each example, with 1e-12 inside the logarithm.",
        "F.kl_div(reduction='none').flatten(1).sum(1)")}


@_rule("the loss")
def _loss(s):
    kind = s.loss if inspect.isclass(s.loss) else type(s.loss)
    if kind in _LOSSES:
        yield (kind.__name__, *_LOSSES[kind])


#: the names of all rules
RULES = tuple(_RULES)
