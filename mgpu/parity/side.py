"""One side of a comparison, as a user describes it."""
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mgpu.backends import backend_of
from mgpu.nn.losses import SoftmaxCrossEntropyLoss
from mgpu.parity.measure import TOLERANCE
from mgpu.utils.arguments import one_of


@dataclass
class Side:
    """A network and how it trains. What is None here is that of `compare`.

    Parameters
    ----------
    net : gluon.Block or torch.nn.Module, or a function that makes one
    devices : int or sequence of devices, optional
        A number stands for that many, from `mgpu.list_devices`.
    loss : callable, optional
        ``loss(pred, label)`` returns one value per example, or one number
        per shard, as torch's losses with a reduction do.
    optimizer, optimizer_params, semantics, lr_scheduler, lr_mult, wd_mult
        As for `mgpu.Trainer`. An `lr_scheduler` object counts updates: give
        each side its own.
    batch_norm : str, optional
        As for `mgpu.initialize`.
    native : bool, optional
        Layers compute as the framework computes them without mgpu. Matters
        for batch norm on torch, which keeps the unbiased variance.
    divisor : int, optional
        The number that summed gradients are divided by. None: the number of
        rows in the batch.
    prepare : callable, optional
        ``prepare(X, y) -> (X, y)``, NumPy to NumPy: what this side does to a
        batch before the network gets it.
    step : callable, optional
        The user's own training step, as it stands: ``step(net)`` returns
        ``(step, parts)``, where ``step(x, y)`` takes one step on native
        arrays, and may return the loss; `parts` are its optimizers,
        schedules, loss scalers, averages of the weights (a network, or a
        dictionary by names of parameters), and dictionaries of what it
        carries from step to step. They are set to the same state on both
        sides before each step. One device; `loss` and the options of
        optimizers are the step's own. Lock-step only.
    init, seed : optional
        As for `mgpu.initialize`. None keeps the network's own values, and
        draws Gluon's default where it has none.
    """

    net: Any
    devices: Any = None
    loss: Callable | None = None
    optimizer: Any = None
    optimizer_params: Mapping[str, Any] | None = None
    semantics: str | None = None
    lr_scheduler: Callable[[int], float] | None = None
    lr_mult: Mapping[str, float] | None = None
    wd_mult: Mapping[str, float] | None = None
    batch_norm: str | None = None
    native: bool | None = None
    divisor: int | None = None
    prepare: Callable | None = None
    step: Callable[[Any], Any] | None = None
    init: Any = None
    seed: int | None = None

    def over(self, defaults: "Side") -> "Side":
        """The same with the values of `defaults` where it has none."""
        return Side(**{f.name: getattr(defaults, f.name)
                       if getattr(self, f.name) is None
                       else getattr(self, f.name) for f in fields(Side)})


def complete(side: Any, *, loss: Callable | None = None, **options: Any
             ) -> Side:
    """`side`, a `Side` or what `Side` takes as `net`, over these options.
    The default loss is `SoftmaxCrossEntropyLoss`."""
    side = side if isinstance(side, Side) else Side(side)
    return side.over(Side(None, loss=loss or SoftmaxCrossEntropyLoss(),
                          **options))


def check_common(dropout: str, dtype: str) -> None:
    """Check two options that every comparison has (ValueError)."""
    one_of("dropout", dropout, ("masks", "off"))
    one_of("dtype", dtype, tuple(TOLERANCE))


def network_of(net: Any) -> tuple[Any, str]:
    """A network, which may be given by a function that makes it, and the
    name of its engine. TypeError for anything else."""
    if _is_function(net):
        net = net()
    return net, backend_of(net)


def factory(net: Any) -> Callable[[], Any]:
    """`net`, if it is a function that makes networks; else TypeError."""
    if _is_function(net):
        return net
    raise TypeError("expected a function that makes the network, so that "
                    f"each run gets a new one; received {type(net).__name__}"
                    ". Pass for example lambda: Net().")


def _is_function(net: Any) -> bool:
    """Whether `net` can be called and is not a network itself."""
    try:
        return not backend_of(net)
    except TypeError:
        return callable(net)


def fresh(side: Side, net: Any, **options: Any) -> Side:
    """`side` with the network `net`, for another run. Schedules count
    updates, so each run gets its own."""
    return replace(side, net=net, lr_scheduler=copy.deepcopy(
        side.lr_scheduler), optimizer_params=copy.deepcopy(
            side.optimizer_params), optimizer=copy.deepcopy(side.optimizer),
        **options)
