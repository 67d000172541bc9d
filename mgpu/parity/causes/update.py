"""Causes of another update from equal gradients: see `update_search`."""
from dataclasses import fields
from functools import partial

from mgpu.optim import RULES, Optimizer, counterpart
from mgpu.parity.causes.difference import Difference, near_as_single
from mgpu.parity.causes.registry import cause
from mgpu.parity.causes.update_search import (Changes, Update, options_of,
                                              replaced)
from mgpu.parity.run import rate_outside_velocity


@cause("batch divisor", "update")
def divisor(d: Difference, rule: Update, other: Update) -> Changes:
    before = [pair[0].divisor for pair in d.evidence.earlier[-1:]]
    for number in dict.fromkeys((*before, other.divisor)):
        if number != rule.divisor:
            short = " This one is shorter than the one before." \
                if before and before[0] > d.rows else ""
            yield (f"{other.side} divides the gradients of a batch of "
                   f"{d.rows} rows by {number}, {rule.side} by "
                   f"{rule.divisor:g}: divide by the rows of each batch, "
                   f"Trainer.step(rows).{short}"), replaced(divisor=number)


# -- the formula --------------------------------------------------------------

def _of_other_semantics(rule: type[Optimizer]) -> type[Optimizer] | None:
    return counterpart(rule, "torch" if rule.semantics == "gluon" else "gluon")


def _other_semantics(rule: Update) -> Update:
    """The rule with the formula of the other library. Its velocity is
    translated by the rate of the last update."""
    own = type(rule.optimizer)
    kind = _of_other_semantics(own)
    if kind is None:
        return rule
    power = kind.rate_in_velocity - own.rate_in_velocity
    slots = rule.slots if not power else {
        (n, s): -v * rule.last_rate.get(n, 1.0) ** power
        for (n, s), v in rule.slots.items()}
    return rule._replace(slots=slots).with_options({}, kind)


def _semantics(rule: Update, other: Update, text: str) -> Changes:
    yield (f"{text}. Give {other.side} the semantics of {rule.side}: "
           "semantics='gluon' or 'torch' of Side and mgpu.Trainer for both"
           ), _other_semantics


def _has_velocity(rule: Update) -> bool:
    kind = type(rule.optimizer)
    return kind.rate_in_velocity or rate_outside_velocity(kind)


@cause("rate inside the velocity", "update")
def velocity(d: Difference, rule: Update, other: Update) -> Changes:
    if _has_velocity(rule) and d.wrong("weight"):
        yield from _semantics(rule, other, (
            "the learning rate is inside the velocity in Gluon (v <- m v - "
            "lr g) and outside on torch (w <- w - lr b), which differ where "
            "the rate changes"))


@cause("Adam epsilon", "update")
def adam_epsilon(d: Difference, rule: Update, other: Update) -> Changes:
    if rule.optimizer.family in ("adam", "adamw"):
        yield from _semantics(rule, other, (
            "Gluon adds epsilon outside the bias correction (sqrt(v) + "
            "epsilon), torch inside (sqrt(v / (1 - beta2^t)) + eps)"))


# -- weight decay and multipliers ---------------------------------------------

def _decays(rule: Update, other: Update) -> bool:
    return bool(rule.optimizer.wd or other.optimizer.wd)


def _without_decay(names: list[str], rule: Update) -> Update:
    return rule._replace(wd_mult={n: 0.0 if n in names else f
                                  for n, f in rule.wd_mult.items()})


@cause("weight decay on biases", "update")
def decay_of_biases(d: Difference, rule: Update, other: Update) -> Changes:
    for which, weights in (("biases, gammas and betas", ("weight",)),
                           ("biases and betas", ("weight", "gamma"))):
        bare = [n for n, kind in d.kinds.items() if kind not in weights]
        if _decays(rule, other) and any(map(rule.wd_mult.get, bare)):
            yield (f"{other.side} does not decay {which}, {rule.side} does: "
                   "set wd_mult in mgpu and Gluon, parameter groups with "
                   "weight_decay=0 on torch"), \
                partial(_without_decay, bare)


@cause("coupled weight decay", "update")
def decoupled(d: Difference, rule: Update, other: Update) -> Changes:
    sides = (rule.side, other.side)
    texts = ["{} adds weight decay to the gradient (L2), {} takes it off the "
             "weight (AdamW): use adam on both, or adamw on both".format(
                 *pair) for pair in (sides[::-1], sides)]
    own = type(rule.optimizer)
    adams = [RULES[own.semantics][family] for family in ("adamw", "adam")
             if own.family in ("adam", "adamw")]
    if adams and other.optimizer.family in ("adam", "adamw") \
            and other.optimizer.family != own.family:
        adams.append(type(other.optimizer))
    for decay in ("inside", "outside") if _decays(rule, other) \
            and own.family != "nag" else ():    # whose velocity holds it
        yield texts[decay == "outside"], replaced(decay=decay)
    for kind in adams if _decays(rule, other) else ():
        if kind is not own:
            yield texts[kind.decoupled_decay], \
                partial(Update.with_options, options={}, kind=kind)


@cause("multipliers", "update")
def multipliers(d: Difference, rule: Update, other: Update) -> Changes:
    for factors in ("lr_mult", "wd_mult"):
        mine, yours = getattr(rule, factors), getattr(other, factors)
        differ = [n for n in mine if mine[n] != yours.get(n)]
        if mine != yours:
            yield (f"{factors} of {', '.join(differ[:4])} differs: give both "
                   "sides the same"), replaced(**{factors: yours})
        yield f"{other.side} ignores {factors}, {rule.side} does not", \
            replaced(**{factors: dict.fromkeys(mine, 1.0)})


@cause("order of parameters", "update")
def order(d: Difference, rule: Update, other: Update) -> Changes:
    if rule.order != other.order:
        n, m = next(pair for pair in zip(rule.order, other.order)
                    if pair[0] != pair[1])
        yield (f"{other.side} gives its optimizer {m} where {rule.side} gives "
               f"{n}, and {type(rule.optimizer).__name__} treats a weight by "
               "its place: register the layers in one order"
               ), replaced(order=other.order)


# -- options ------------------------------------------------------------------

def other_options(rule: Update, other: Update, single: bool) -> Changes:
    """Give the rule options of the other side, each by itself and all
    together: those that differ by rounding to float32 (`single`), or the
    others."""
    mine, yours = options_of(rule.optimizer), options_of(other.optimizer)
    differ = [n for n in mine if n in yours and mine[n] != yours[n]
              and n != "learning_rate"]
    for names in [[n] for n in differ] + [differ] * (len(differ) > 1):
        if single is all(isinstance(mine[n], float)
                         and near_as_single(mine[n], yours[n])
                         for n in names):
            shown = ", ".join(f"{n} {yours[n]!r} (not {mine[n]!r})"
                              for n in names)
            yield (f"{other.side} has {shown}, {rule.side} has not: make "
                   "them equal"), partial(Update.with_options, options={
                       n: yours[n] for n in names})


@cause("optimizer options", "update")
def options(d: Difference, rule: Update, other: Update) -> Changes:
    yield from other_options(rule, other, single=False)
    mine, yours = options_of(rule.optimizer), options_of(other.optimizer)
    for field in fields(rule.optimizer):
        name, value = field.name, getattr(rule.optimizer, field.name)
        if name in mine and name not in yours and value != field.default:
            yield (f"{rule.side} has {name} {value!r}, {other.side} has no "
                   f"{name}: make them equal"), partial(
                       Update.with_options, options={name: field.default})


@cause("optimizer formula", "update")
def formula(d: Difference, rule: Update, other: Update) -> Changes:
    if _has_velocity(rule):
        if not d.wrong("weight"):
            yield from _semantics(rule, other, (
                "the velocities differ, the weights do not: Gluon's NAG "
                "keeps the decay of the new weight, torch's of the old one"))
    elif rule.optimizer.family not in ("adam", "adamw"):
        yield from _semantics(rule, other, (
            f"Gluon's and torch's {rule.optimizer.family} differ in epsilon "
            "or weight decay"))


@cause("optimizer formula", "update")
def another_optimizer(d: Difference, rule: Update, other: Update) -> Changes:
    own = type(rule.optimizer)
    if type(other.optimizer) not in (own, _of_other_semantics(own)):
        yield (f"{other.side} has {other.optimizer!r}, {rule.side} "
               f"{rule.optimizer!r}"), replaced(
                   optimizer=other.optimizer, slots=other.slots,
                   rate=other.rate)


@cause("learning rate", "update")
def learning_rate(d: Difference, rule: Update, other: Update) -> Changes:
    if rule.rate != other.rate and not near_as_single(rule.rate, other.rate):
        yield (f"the rate is {other.rate:g} on {other.side} and "
               f"{rule.rate:g} on {rule.side}: give both the same rate, and "
               "the same schedule"), replaced(rate=other.rate)
