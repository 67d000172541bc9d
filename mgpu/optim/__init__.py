"""Update rules, written once for both backends, with two semantics.

``semantics="gluon"`` (the default) computes what the optimizers of MXNet
1.9.1 compute on one device (`gluon_rules`); ``semantics="torch"`` what
`torch.optim` of PyTorch 2.13 computes (`torch_rules`). Option names and
defaults are those of that library. The formulas use: w the weight, g the
gradient already divided by the batch size, lr and wd the parameter's own rate
and weight decay, t = 1, 2, ... its update count, and ``clip(x)`` for x with
every element brought within +-c, where c is the option ``clip_gradient``
(None: x itself).

Gluon's optimizers differ in where ``clip_gradient`` acts, and so do these:
``clip(g) + wd w`` in sgd, nag and signum, ``clip(g + wd w)`` in adam, adamax,
nadam and rmsprop; adamw, adagrad, adadelta and ftrl clip g and keep wd out of
it; lamb, lars, dcasgd, sgld and groupadagrad clip g, ftml ``g + wd w``.
With torch's semantics it is always ``clip(g)`` first, as
`torch.nn.utils.clip_grad_value_` before the step would do.

MXNet's compiled updates (sgd, nag, adam, adamw, rmsprop, ftrl, signum) read
their scalars as float32: Gluon trains a float64 network with a rate of
0.1000000015. Here scalars keep double precision.
"""
from dataclasses import fields
from typing import Any

from mgpu.optim.base import RULES, Optimizer, State
from mgpu.optim.gluon_rules import (DCASGD, FTML, LAMB, LARS, NAG, SGD, SGLD,
                                    AdaDelta, AdaGrad, Adam, Adamax, AdamW,
                                    Ftrl, GroupAdaGrad, Nadam, RMSProp, Signum)
from mgpu.optim.torch_rules import (TorchAdadelta, TorchAdagrad, TorchAdam,
                                    TorchAdamax, TorchAdamW, TorchNAdam,
                                    TorchNAG, TorchRMSprop, TorchSGD)
from mgpu.utils.arguments import one_of

__all__ = ["DCASGD", "FTML", "LAMB", "LARS", "RULES", "SGLD", "AdaDelta",
           "AdaGrad", "Adam", "AdamW", "Adamax", "Ftrl", "GroupAdaGrad",
           "NAG", "Nadam", "Optimizer", "RMSProp", "SGD", "Signum", "State",
           "TorchAdadelta", "TorchAdagrad", "TorchAdam", "TorchAdamW",
           "TorchAdamax", "TorchNAG", "TorchNAdam", "TorchRMSprop",
           "TorchSGD", "counterpart", "create"]

_TORCH_NAMES = {"lr": "learning_rate", "weight_decay": "wd"}


def create(name: str, semantics: str = "gluon", **options: Any) -> Optimizer:
    """The optimizer called `name`.

    Parameters
    ----------
    name : str
        ``sgd``, ``nag``, ``adam``, ``adamw``, ``adamax``, ``nadam``,
        ``rmsprop``, ``adagrad``, ``adadelta``; with Gluon's semantics only:
        ``ftrl``, ``signum``, ``lamb``, ``lars``, ``ftml``, ``dcasgd``,
        ``sgld``, ``groupadagrad``. In upper or lower case.
    semantics : {"gluon", "torch"}
        Whose formulas, option names and defaults.
    **options
        The fields of the class: with Gluon's semantics ``learning_rate``,
        ``wd``, ``clip_gradient`` and those of the rule; with torch's ``lr``
        and ``weight_decay`` in the place of the first two, which are accepted
        as well.

    Raises
    ------
    ValueError
        Unknown semantics, optimizer or option; a value out of its range; an
        option given under two names; an optimizer that torch does not have.
    TypeError
        A value of another type: not a number, or not a bool for a switch.
    """
    rules = RULES[one_of("semantics", semantics, RULES)]
    key = str(name).lower()
    if key == "lbsgd":
        raise ValueError(
            "a rule moves the weights in each step; received 'lbsgd', which "
            "counts batches itself: it adds up some of them, and warms up by "
            "their number. Use 'lars', with a warm-up in lr_scheduler, and "
            "mgpu.train(accumulate=).")
    if key not in rules:
        raise ValueError(
            f"unknown optimizer; received {name!r}. Use one of "
            f"{', '.join(rules)}" + ", or semantics='gluon'." * (
                key in RULES["gluon"]))
    short = _TORCH_NAMES if semantics == "torch" else {}
    values = {short.get(option, option): x for option, x in options.items()}
    if len(values) < len(options):
        raise ValueError("lr and learning_rate are one option, and so are "
                         "weight_decay and wd; received both. Give one.")
    known = [*short, *(field.name for field in fields(rules[key]))]
    unknown = [option for option in values if option not in known]
    if unknown:
        raise ValueError(
            f"the optimizer {key!r} has no option "
            f"{', '.join(map(repr, unknown))} with semantics={semantics!r}. "
            f"Use {', '.join(known)}.")
    return rules[key](**values)


def counterpart(cls: type[Optimizer], semantics: str
                ) -> type[Optimizer] | None:
    """The class of the same family as `cls`, with the formulas of `semantics`.

    None where that library has no such optimizer, and for a class that is
    not one of this package.
    """
    if RULES.get(cls.semantics, {}).get(cls.family) is not cls:
        return None
    return RULES[semantics].get(cls.family)
