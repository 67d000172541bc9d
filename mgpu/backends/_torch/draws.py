"""Which passes may draw from torch's default stream, which threads share."""
import warnings
import weakref
from collections.abc import Iterator, Sequence, Set
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu.backends._kept import cells, forward_hooks, global_names
from mgpu.backends._torch.arithmetic import TAKING
from mgpu.backends._torch.leaves import users_hooks

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
#: what makes user's code run in backward passes (an autograd.Function's)
_BACKWARD = frozenset("apply register_hook register_multi_grad_hook "
                      "register_full_backward_hook".split())
_MOST = 5000        # functions that are looked at


_PLAIN = (int, float, bool, str, bytes, type(None), torch.Tensor, ModuleType,
          torch.Generator, weakref.ref)
#: attributes of every module
_OWN = vars(nn.Module()).keys() | {"forward"}
_FUNCTIONS = (FunctionType, MethodType)
_LARGE, _DEEP = 100, 3      # collections in collections that are looked at


def code_of(layers: Sequence[nn.Module]) -> list[Any]:
    """What runs in a pass through `layers`, of the user's: their classes,
    forwards of single layers, hooks, and what attributes hold."""
    kinds = dict.fromkeys(kind for m in layers for kind in type(m).__mro__
                          if _is_users(kind))
    met = set[int]()
    return [*kinds, *(vars(m)["forward"] for m in layers
                      if "forward" in vars(m)),
            *(hook for _, hook in forward_hooks(layers)),
            *_backward_hooks(layers),
            *(held for m in layers for name, x in vars(m).items()
              if name not in _OWN for held in _held(x, met))]


def _backward_hooks(layers: Sequence[nn.Module]) -> Iterator[Any]:
    for m in layers:
        for table in (m._backward_hooks, m._backward_pre_hooks):
            yield from table.values()
        for p in m._parameters.values():
            if p is not None:
                yield from users_hooks(p, "_backward_hooks")
                yield from users_hooks(p, "_post_accumulate_grad_hooks")


def named_draws(layers: Sequence[nn.Module], code: Sequence[Any]
                ) -> dict[bool | str, bool | None]:
    """By training flag, and for "backward" passes: whether a pass through
    `layers` may call something that draws, by the names in `code`, that of
    `code_of`, and in what it may reach. A pass in which nothing was drawn
    does not tell of the next one: noise may begin later. None: such a pass
    does tell. False: nothing of the user's runs."""
    names = _names(code, {
        name for m in layers for name in (*m._modules, *vars(m))})
    if "getattr" in names:
        names |= {x for m in layers for x in vars(m).values()
                  if isinstance(x, str)}
    always = not _ALWAYS.isdisjoint(names)
    training = not _TRAINING.isdisjoint(names)
    return {False: always or (None if code else False),
            True: always or training or None,
            "backward": (always or training) and (
                not _BACKWARD.isdisjoint(names)
                or any(True for _ in _backward_hooks(layers)))
            or (None if code else False)}


def _held(x: Any, met: set[int], depth: int = 0) -> Iterator[Any]:
    """The functions, and the classes of objects of the user's, in an
    attribute."""
    if isinstance(x, _PLAIN) or depth > _DEEP or id(x) in met:
        return
    met.add(id(x))
    if isinstance(x, (dict, list, tuple, set)):
        if len(x) <= _LARGE:
            for one in x.values() if isinstance(x, dict) else x:
                yield from _held(one, met, depth + 1)
    elif isinstance(x, partial):
        yield from _held([x.func, x.args, x.keywords], met, depth)
    elif isinstance(x, (type, nn.Module)):
        kind = x if isinstance(x, type) else type(x)
        if _is_users(kind):
            yield kind
    elif _is_users(type(x)) and not isinstance(x, _FUNCTIONS):
        # Its class: passes may leave another one each.
        yield type(x)
        yield from _held([type(x).__call__ if callable(x) else None,
                          getattr(x, "__dict__", None)], met, depth)
    elif callable(x):
        yield x


def _names(code: Sequence[Any], own: Set[str]) -> set[str]:
    """The names in the code of forward methods, hooks and what attributes
    hold, but `own`, and of all functions of the user's that they name; and
    those of the functions of torch's."""
    kinds = dict.fromkeys(kind for x in code if isinstance(x, type)
                          for kind in x.__mro__ if _is_users(kind))
    waiting = [x for x in code if not isinstance(x, type)]
    for name in ("forward", "backward"):
        waiting += [vars(kind).get(name) for kind in kinds]
    found, met = set[str](), set[int]()
    while waiting and len(met) < _MOST:
        x = waiting.pop()
        x = getattr(x, "__wrapped__", x)
        if isinstance(x, (MethodType, staticmethod, classmethod)):
            x = x.__func__
        if isinstance(x, property):
            x = x.fget
        if isinstance(x, FunctionType) and _is_users(x):
            pass
        elif _is_users(x if isinstance(x, type) else type(x)):
            kind = x if isinstance(x, type) else type(x)
            if id(kind) not in met:
                met.add(id(kind))
                waiting += [vars(kind).get("forward")] \
                    if issubclass(kind, nn.Module) else vars(kind).values()
            continue
        else:
            found.add(getattr(x, "__name__", ""))
            continue
        if id(x) in met:
            continue
        met.add(id(x))
        names = set(global_names(x.__code__))
        found |= names - own
        if "getattr" in names:
            found |= set(_texts(x.__code__)) - own
        for value in (*cells(x), *(x.__defaults__ or ()),
                      *(x.__kwdefaults__ or {}).values()):
            waiting += _held(value, set())
        waiting += [vars(kind)[name] for kind in kinds
                    for name in names & vars(kind).keys()]
        waiting += _named(x.__globals__, names)
    return found


def _texts(code: CodeType) -> Iterator[str]:
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _texts(x)
        elif isinstance(x, str):
            yield x


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
        else:
            yield from _held(value, set())


class Watch:
    """Notices numbers that are drawn from torch's default stream while
    several threads run.

    Attributes
    ----------
    drew : bool
        Whether some were; for the caller to take back.
    inside : bool
        Whether a thread draws alone.
    """

    def __init__(self) -> None:
        self.drew, self._warned = False, False
        self._turns, self.inside = 0, False

    def turn(self, begins: bool) -> None:
        """A thread begins or ends to draw alone, as it may."""
        self._turns, self.inside = self._turns + 1, begins

    def state(self) -> Any:
        return None if self.inside \
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


class Draws(TorchDispatchMode):
    """Notices operations that draw from torch's default streams, also where
    the stream is put back behind them.

    Attributes
    ----------
    found : bool
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False    # see strict.Mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        may = not self.found and not TAKING.now and \
            torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        before = _states() if may else []
        result = func(*args, **(kwargs or {}))
        if may:     # rrelu does not draw where it predicts
            self.found |= not all(map(torch.equal, before, _states()))
        return result


def default_generators() -> list[torch.Generator]:
    return [torch.default_generator, *(
        torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


def _states() -> list[torch.Tensor]:
    return [x.get_state() for x in default_generators()]
