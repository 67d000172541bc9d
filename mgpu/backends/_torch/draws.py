"""Which passes may draw from torch's default stream, which threads share."""
import warnings
from collections.abc import Iterator, Sequence, Set
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from mgpu.backends._kept import cells, forward_hooks, global_names

#: functions and methods that draw, by name
_ALWAYS = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm normal "
    "bernoulli multinomial poisson binomial rsample sample normal_ uniform_ "
    "bernoulli_ exponential_ geometric_ cauchy_ log_normal_ random_ "
    "gumbel_softmax fractional_max_pool2d fractional_max_pool3d "
    "manual_seed seed fork_rng set_rng_state".split())
#: those that draw in training mode, or where they are told to
_TRAINING = frozenset(
    "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout "
    "feature_dropout feature_alpha_dropout rrelu rrelu_".split())
_MOST = 5000        # functions that are looked at


def code_of(layers: Sequence[nn.Module]) -> list[Any]:
    """What runs in a pass through `layers`, of the user's: their classes,
    forwards of single layers, and hooks."""
    kinds = dict.fromkeys(kind for m in layers for kind in type(m).__mro__
                          if _is_users(kind))
    return [*kinds, *(vars(m)["forward"] for m in layers
                      if "forward" in vars(m)),
            *(hook for _, hook in forward_hooks(layers))]


def named_draws(layers: Sequence[nn.Module], code: Sequence[Any]
                ) -> dict[bool, bool | None]:
    """By training flag: whether a pass through `layers` may call something
    that draws, by the names in `code`, that of `code_of`, and in what it may
    reach. A pass in which nothing was drawn does not tell of the next one:
    noise may begin later. None: such a pass does tell."""
    own = {name for m in layers for name in (*m._modules, *vars(m))}
    names = _names(code) - own
    always = not _ALWAYS.isdisjoint(names)
    training = not _TRAINING.isdisjoint(names)
    return {False: always or (None if training else False),
            True: always or training or None}


def _names(code: Sequence[Any]) -> set[str]:
    """The names in the code of forward methods and hooks, and of all
    functions of the user's that they name."""
    kinds = [kind for kind in code if isinstance(kind, type)]
    waiting = [vars(x).get("forward") if isinstance(x, type) else x
               for x in code]
    found, met = set[str](), set[int]()
    while waiting and len(met) < _MOST:
        x = waiting.pop()
        x = getattr(x, "__wrapped__", x)
        if isinstance(x, (MethodType, staticmethod, classmethod)):
            x = x.__func__
        if isinstance(x, property):
            x = x.fget
        if not isinstance(x, FunctionType):
            kind = x if isinstance(x, type) else type(x)
            if _is_users(kind) and id(kind) not in met:
                met.add(id(kind))
                waiting += [vars(kind).get("forward")] \
                    if issubclass(kind, nn.Module) else vars(kind).values()
            continue
        if id(x) in met or not _is_users(x):
            continue
        met.add(id(x))
        names = set(global_names(x.__code__))
        found |= names
        waiting += filter(callable, cells(x))
        waiting += [vars(kind)[name] for kind in kinds
                    for name in names & vars(kind).keys()]
        waiting += _named(x.__globals__, names)
    return found


def _is_users(x: Any) -> bool:
    return str(x.__module__).split(".")[0] not in (
        "torch", "builtins", "mgpu", "numpy")


def _named(space: dict[str, Any], names: Set[str]) -> Iterator[Any]:
    for name in names & space.keys():
        value = space[name]
        if isinstance(value, ModuleType):
            if value.__name__.split(".")[0] not in ("torch", "numpy", "mgpu"):
                yield from (vars(value)[n] for n in names & vars(value).keys()
                            if callable(vars(value)[n]))
        elif callable(value):
            yield value


class Watch:
    """Notices numbers that are drawn from torch's default stream while
    several threads run.

    Attributes
    ----------
    drew : bool
        Whether some were; for the caller to take back.
    """

    def __init__(self) -> None:
        self.drew, self._warned = False, False
        self._turns, self._inside = 0, False

    def turn(self, begins: bool) -> None:
        """A thread begins or ends to draw alone, as it may."""
        self._turns, self._inside = self._turns + 1, begins

    def state(self) -> Any:
        return None if self._inside \
            else (self._turns, torch.default_generator.get_state())

    def check(self, before: Any) -> None:
        now = self.state()
        if before is None or now is None or now[0] != before[0] \
                or torch.equal(now[1], before[1]):
            return
        self.drew = True
        if not self._warned:
            self._warned = True
            warnings.warn(
                "numbers were drawn from torch's default random stream while "
                "several devices ran at the same time: which device got which"
                " is chance, and another run gives others. A network that "
                "drew them, or the loss of train_batch, takes turns from now "
                "on. In functions of your own for mgpu.parallel, and in "
                "threads of your own, draw from a torch.Generator each. "
                "(Said once.)", stacklevel=2)


#: the stream is one for the process
watch = Watch()
