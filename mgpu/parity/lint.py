"""What will bite in the move of one Gluon network to PyTorch. See `lint`."""
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, prod, sqrt
from typing import Any, NamedTuple

import numpy as np

import mgpu
from mgpu import losses, nested
from mgpu.backends import backend_of, base, using_backend
from mgpu.device import list_devices
from mgpu.optimizers import Optimizer, create


class Finding(NamedTuple):
    """A difference between Gluon and PyTorch that this network, or its
    training, meets.

    Attributes
    ----------
    rule : str
        One of `RULES`.
    where : str
        Layers or options concerned.
    text : str
        What Gluon does, what torch does, and how large it is.
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
    layers: list[base.Layer]
    specs: list[base.Spec]
    aliases: dict[str, list[str]]
    shapes: dict[str, tuple[int, ...]]      # first input of each layer
    rule: Optimizer | None
    schedule: bool
    loss: Any
    rows: int | None
    examples: int | None


_Check = Callable[[_Subject], Iterator[tuple[str, str, str]]]
_CHECKS: dict[str, _Check] = {}


def _rule(name: str) -> Callable[[_Check], _Check]:
    def register(check: _Check) -> _Check:
        _CHECKS[name] = check
        return check
    return register


def lint(net: Any, *, sample: Any = None, optimizer: Any = "sgd",
         optimizer_params: Mapping[str, Any] | None = None,
         lr_scheduler: Any = None, loss: Any = None,
         batch_size: int | None = None, examples: int | None = None
         ) -> list[Finding]:
    """The differences between Gluon and PyTorch that bite here, and no
    others.

    Parameters
    ----------
    net : gluon.Block, or a function that makes one
        Without values it is initialised, to know its shapes.
    sample : array or tuple of arrays, optional
        What the network is called with. Without it, what depends on the
        shape of a layer's input is not found (flattening dense layers,
        pooling windows in the padding, the size of variance differences).
    optimizer, optimizer_params, lr_scheduler
        As for `mgpu.Trainer` (and ``gluon.Trainer``).
    loss : loss of mgpu.losses or its class, optional
    batch_size, examples : int, optional
        What ``trainer.step`` is told, and the size of the training set.

    Returns
    -------
    list of Finding
        In the order of `RULES`; docs/guide/parity.md has the source of each.
    """
    options = dict(optimizer_params or {})
    schedule = options.pop("lr_scheduler", None) or lr_scheduler
    rule = optimizer if isinstance(optimizer, Optimizer) \
        else create(optimizer, **options)
    try:
        name = backend_of(net)
    except TypeError:
        if not callable(net):
            raise
        net = net()
        name = backend_of(net)
    with using_backend(name) as backend:
        shapes: dict[str, tuple[int, ...]] = {}
        network = backend.network(net)
        if sample is not None:
            keep = "keep" if network.values() is not None else None
            replicas = mgpu.initialize(net, list_devices(1), init=keep,
                                       sample=sample, force_reinit=True)
            network = replicas.network

            def watch(path: str, inputs: Any, outputs: Any, index: int
                      ) -> None:
                if inputs and hasattr(inputs[0], "shape"):
                    shapes.setdefault(path, tuple(inputs[0].shape))
            shards, _ = mgpu.split_batch(
                _floats(sample, network.specs()),
                np.zeros(nested.rows_of(sample)), replicas.devices)
            with network.watch_layers(watch):
                replicas(shards)
        subject = _Subject(
            network.layers(), network.specs(), network.aliases(), shapes,
            rule, schedule is not None, loss, batch_size, examples)
    return [Finding(name, *found) for name, check in _CHECKS.items()
            for found in check(subject)]


def _floats(sample: Any, specs: Sequence[base.Spec]) -> Any:
    dtype = next((s.dtype for s in specs if "float" in s.dtype), "float32")

    return nested.cast_floats(sample, dtype)


def _of(subject: _Subject, *kinds: str) -> list[base.Layer]:
    return [layer for layer in subject.layers if layer.kind in kinds]


def _names(layers: Sequence[Any]) -> str:
    paths = [getattr(layer, "path", layer) or "the network"
             for layer in layers]
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more"
                                   if len(paths) > 3 else "")


# -- layers -------------------------------------------------------------------

@_rule("batch norm keeps the biased variance")
def _variance(s):
    norms = [layer for layer in _of(s, "batch_norm")
             if not layer.options["use_global_stats"]]
    if not norms:
        return
    counts = [prod(s.shapes[layer.path]) // s.shapes[layer.path][
        layer.options["axis"]] for layer in norms if layer.path in s.shapes]
    size = f" For the batch given, n is {min(counts)} at least: " \
        f"{1 / (min(counts) - 1):.1e} of the variance." \
        if counts and min(counts) > 1 else ""
    yield (_names(norms), "Gluon's running variance is that of the batch "
           "divided by n, torch's by n - 1; and MXNet stores the momentum as "
           "float32." + size, "mgpu.parity.gluonize(net)")


@_rule("batch norm momentum")
def _momentum(s):
    for layer in _of(s, "batch_norm"):
        kept = layer.options["momentum"]
        if abs(kept - 0.9) > 1e-9:
            yield (_names([layer]), f"momentum={kept:g} is the share that is "
                   "kept in Gluon, and the share that is replaced in torch.",
                   f"BatchNorm(momentum={1 - kept:g})")


@_rule("epsilon")
def _epsilon(s):
    for layer in _of(s, "batch_norm", "layer_norm", "instance_norm",
                     "group_norm"):
        epsilon = layer.options["epsilon"]
        if epsilon != 1e-5:
            yield (_names([layer]), f"epsilon is {epsilon:g}; torch's "
                   "default is 1e-05.", f"eps={epsilon:g}")


@_rule("fixed gamma or beta")
def _fixed(s):
    for layer in _of(s, "batch_norm"):
        scale, center = layer.options["scale"], layer.options["center"]
        if not scale:
            yield (_names([layer]), "scale=False: gamma counts as 1, "
                   "whatever is stored in it, and is not trained.",
                   "fill bn.weight with 1 and bn.weight.requires_grad_(False)"
                   "; affine=False would take beta away too")
        if not center:
            yield (_names([layer]), "center=False: beta is not trained.",
                   "bn.bias.requires_grad_(False)")


@_rule("batch norm over another axis")
def _axis(s):
    for layer in _of(s, "batch_norm"):
        axis = layer.options["axis"]
        if axis != 1:
            yield (_names([layer]), f"normalises over axis {axis}; torch "
                   "always over axis 1.", "permute before and after")


@_rule("batch norm with global statistics")
def _global(s):
    layers = [layer for layer in _of(s, "batch_norm")
              if layer.options["use_global_stats"]]
    if layers:
        yield (_names(layers), "use_global_stats=True predicts in training "
               "too.", "bn.eval() after every net.train()")


@_rule("dense layers flatten")
def _flatten(s):
    for layer in _of(s, "dense"):
        shape = s.shapes.get(layer.path, ())
        if layer.options["flatten"] and len(shape) > 2:
            yield (_names([layer]), f"an input of shape {shape} becomes "
                   f"({shape[0]}, {prod(shape[1:])}); Linear would act on "
                   f"the last axis, {shape[-1]}.",
                   "nn.Flatten() before the Linear")


def _last_window(n: int, kernel: int, stride: int, pad: int) -> int:
    return ceil((n + 2 * pad - kernel) / stride) + 1


@_rule("pooling windows in the padding")
def _pooling(s):
    for layer in _of(s, "max_pool", "avg_pool"):
        own, shape = layer.options, s.shapes.get(layer.path, ())[2:]
        if not own["ceil"]:
            continue
        outside = [n for n, k, stride, pad in zip(
            shape, own["kernel"], own["stride"], own["padding"])
            if (_last_window(n, k, stride, pad) - 1) * stride >= n + pad]
        if outside:
            yield (_names([layer]), "ceil_mode=True: the last window of "
                   f"{outside[0]} values lies wholly in the padding. Gluon "
                   "keeps it, torch drops it.",
                   "F.pad by one stride more, then ceil_mode=True")
        else:
            yield (_names([layer]), "the output size is rounded up.",
                   "ceil_mode=True")


@_rule("average without the padding")
def _average(s):
    layers = [layer for layer in _of(s, "avg_pool")
              if not layer.options["count_include_pad"]
              and any(layer.options["padding"])]
    if layers:
        yield (_names(layers), "count_include_pad=False.",
               "count_include_pad=False")


@_rule("dropout along axes")
def _dropout(s):
    for layer in _of(s, "dropout"):
        axes = layer.options["axes"]
        if axes:
            yield (_names([layer]), f"one mask value along axes {axes}.",
                   {(2,): "nn.Dropout1d", (2, 3): "nn.Dropout2d",
                    (2, 3, 4): "nn.Dropout3d"}.get(
                        tuple(axes), "a mask of your own") + " "
                   f"({layer.options['rate']:g})")


@_rule("slope of a leaky ReLU")
def _slope(s):
    for layer in _of(s, "leaky_relu"):
        slope = layer.options["slope"]
        if slope != 0.01:
            yield (_names([layer]), f"the slope is {slope:g}; torch's "
                   "default is 0.01.", f"negative_slope={slope:g}")


# -- parameters ---------------------------------------------------------------

@_rule("initial values")
def _initial(s):
    weights = [p for p in s.specs if p.kind == "weight" and p.init is None]
    biases = [p for p in s.specs if p.kind == "bias"]
    if weights:
        known = [p for p in weights if p.shape and len(p.shape) > 1]
        size = ""
        if known:
            fan = prod(known[0].shape[1:])
            size = f" ({known[0].name}: +-0.07 against +-{1 / sqrt(fan):.3f})"
        yield (_names([p.name for p in weights]), "Gluon draws weights from "
               "Uniform(-0.07, 0.07), unless initialize() is told otherwise; "
               "torch from +-1/sqrt(fan in), embeddings from N(0, 1)." + size,
               "copy the weights, or nn.init.uniform_(w, -0.07, 0.07)")
    if biases:
        yield (_names([p.name for p in biases]), "biases start at 0 in "
               "Gluon whatever the initialiser, at random in torch.",
               "nn.init.zeros_(bias)")


@_rule("shared parameters")
def _shared(s):
    for names in s.aliases.values():
        yield (" = ".join(names), "one tensor under several names.",
               "assign the same nn.Parameter, or use the module twice")


@_rule("frozen parameters")
def _frozen(s):
    frozen = [p.name for p in s.specs if p.grad_req == "null"
              and p.kind in ("weight", "bias", "other") and "float" in p.dtype]
    if frozen:
        yield (_names(frozen), "grad_req='null'.", "requires_grad_(False)")


@_rule("gradients that add up")
def _adding(s):
    adding = [p.name for p in s.specs if p.grad_req == "add"]
    if adding:
        yield (_names(adding), "grad_req='add' until zero_grad().",
               "torch always adds: no zero_grad() between those passes")


@_rule("multipliers of a parameter")
def _multipliers(s):
    for p in s.specs:
        if (p.lr_mult, p.wd_mult) != (1.0, 1.0) and p.grad_req != "null":
            yield (p.name, f"lr_mult={p.lr_mult:g}, wd_mult={p.wd_mult:g}.",
                   "a parameter group of its own")


# -- training -----------------------------------------------------------------

def _is(s: _Subject, *names: str) -> bool:
    return type(s.rule).__name__.lower() in names


@_rule("momentum under a changing rate")
def _velocity(s):
    if _is(s, "sgd", "nag") and s.rule.momentum and s.schedule:
        yield ("lr_scheduler", "the rate is inside Gluon's velocity and "
               "outside torch's: after each change the old steps keep their "
               "size in Gluon and are rescaled in torch.",
               "mgpu.Trainer, or multiply every momentum_buffer by "
               "old rate / new rate at each change")


@_rule("weight decay in Nesterov's velocity")
def _nag(s):
    if _is(s, "nag") and s.rule.momentum and s.rule.wd:
        yield ("wd", "Gluon keeps the decay of the new weight in the "
               "velocity.", "mgpu.Trainer; SGD(nesterov=True) has no such "
               "term")


@_rule("epsilon of the optimiser")
def _optimiser_epsilon(s):
    if _is(s, "adam", "adamw"):
        t1 = 1 / sqrt(1 - s.rule.beta2)
        yield ("epsilon", "Gluon adds it outside the bias correction: at the "
               f"first step it counts {t1:.1f} times as much as torch's; it "
               "matters where gradients are not far above it.",
               "mgpu.Trainer(semantics='gluon'), or eps = "
               f"{s.rule.epsilon:g} / sqrt(1 - {s.rule.beta2:g}**t)")
    elif _is(s, "rmsprop", "adagrad"):
        epsilon = s.rule.eps if _is(s, "adagrad") else s.rule.epsilon
        yield ("epsilon", "Gluon adds it inside the root, torch outside.",
               f"mgpu.Trainer(semantics='gluon'); eps={epsilon:g} is near it "
               "only where gradients are large")
    elif _is(s, "adamax"):
        yield ("epsilon", "Gluon has none: a gradient that is exactly 0 "
               "from the start gives NaN.", "eps=0 for the same numbers")


@_rule("options of the optimiser")
def _options(s):
    if _is(s, "rmsprop"):
        yield ("gamma1", "the share that is kept.",
               f"alpha={s.rule.gamma1:g} (torch's default is 0.99)"
               + (f", centered=True, momentum={s.rule.gamma2:g}"
                  if s.rule.centered else ""))
    elif _is(s, "adadelta"):
        yield ("learning_rate", "Gluon's AdaDelta ignores it.",
               f"lr=1, rho={s.rule.rho:g}, eps={s.rule.epsilon:g}")
    elif _is(s, "nadam"):
        yield ("the momentum schedule", "Gluon keeps one product for all "
               "parameters, which grows with each of them.", "mgpu.Trainer")
    elif _is(s, "ftrl", "signum"):
        yield (type(s.rule).__name__, "torch.optim has no such optimiser.",
               "mgpu.Trainer")


@_rule("weight decay")
def _decay(s):
    if not s.rule.wd:
        return
    if _is(s, "adam", "adamax", "nadam", "rmsprop"):
        yield ("wd", "is added to the gradient (L2), before the averages.",
               f"weight_decay={s.rule.wd:g} of the same optimiser, not of "
               "AdamW")
    elif _is(s, "adagrad", "adadelta"):
        yield ("wd", "is kept out of the averages (decoupled); torch adds "
               "it to the gradient.", "mgpu.Trainer(semantics='gluon')")


@_rule("gradient clipping")
def _clipping(s):
    if s.rule.clip_gradient is not None:
        order = "before" if _is(s, "sgd", "nag", "signum", "adamw", "adagrad",
                                "adadelta", "ftrl") else "after"
        yield ("clip_gradient", "clips each element of the gradient, "
               f"divided by the batch size, {order} the weight decay is "
               "added.", "torch.nn.utils.clip_grad_value_(parameters, "
               f"{s.rule.clip_gradient:g}) before the step"
               + ("" if order == "before" or not s.rule.wd
                  else ", with the decay added by hand first"))


@_rule("a short last batch")
def _short(s):
    if s.rows and s.examples and s.examples % s.rows:
        left = s.examples % s.rows
        yield ("trainer.step", f"the last batch has {left} rows; "
               f"trainer.step({s.rows}) divides it by {s.rows}, a mean loss "
               f"by {left}: its step is {s.rows / left:.3g} times as large.",
               f"loss.sum() / {s.rows}")


@_rule("the loss")
def _loss(s):
    kind = s.loss if inspect.isclass(s.loss) else type(s.loss)
    found = {
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
            "F.kl_div(reduction='none').flatten(1).sum(1)")}.get(kind)
    if found:
        yield (kind.__name__, *found)


#: the names of all rules
RULES = tuple(_CHECKS)
