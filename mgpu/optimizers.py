"""Update rules, written once for both engines, in two meanings.

``semantics="gluon"`` (the default) computes what the optimisers of MXNet
1.9.1 compute on one device; ``semantics="torch"`` what `torch.optim` of
PyTorch 2.13 computes. Option names and defaults are those of that library.
The formulas below use: w the weight, g the gradient already divided by the
batch size, lr and wd the parameter's own rate and weight decay, t = 1, 2, ...
its update count, and ``clip(x)`` for x with every element brought within
+-c, where c is the option ``clip_gradient`` (None: x itself).

Where ``clip_gradient`` acts differs between the optimisers of Gluon, and is
followed here: ``clip(g) + wd w`` in sgd, nag and signum, ``clip(g + wd w)``
in adam, adamax, nadam and rmsprop; adamw, adagrad, adadelta and ftrl clip g
and keep wd out of it. With torch's semantics it is always ``clip(g)`` first,
as `torch.nn.utils.clip_grad_value_` before the step would do.

MXNet's compiled updates (sgd, nag, adam, adamw, rmsprop, ftrl, signum) read
their scalars as float32: Gluon trains a float64 network with a rate of
0.1000000015. Here scalars keep double precision.
"""
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import numpy as np

from mgpu.backends.base import Array, Ops

State = dict[str, Array | float]


# -- options ----------------------------------------------------------------

def _at_least_0(value: float) -> bool:
    return 0 <= value < math.inf


def _below_1(value: float) -> bool:
    return 0 <= value < 1


def _up_to_1(value: float) -> bool:
    return 0 <= value <= 1


def _above_0(value: float) -> bool:
    return 0 < value < math.inf


_TEXT: dict[Callable[[float], bool], str] = {
    _at_least_0: "a finite number, 0 or more",
    _below_1: "a number from 0 to below 1",
    _up_to_1: "a number from 0 to 1",
    _above_0: "a finite number above 0",
}
#: what an option must be; those not named here are `_at_least_0`
_RANGE = {"beta1": _below_1, "beta2": _below_1, "betas": _below_1,
          "gamma1": _up_to_1, "gamma2": _up_to_1, "rho": _up_to_1,
          "alpha": _up_to_1, "clip_gradient": _above_0,
          "clip_weights": _above_0}
_FLAGS = ("centered", "nesterov", "amsgrad", "decoupled_weight_decay")
_MAY_BE_NONE = ("clip_gradient", "clip_weights")
_TORCH_NAMES = {"lr": "learning_rate", "weight_decay": "wd"}


def _checked(name: str, value: Any) -> Any:
    """The option's value as Python floats or a bool, or an error."""
    if name in _FLAGS:
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False; received "
                            f"{value!r}.")
        return bool(value)
    if value is None and name in _MAY_BE_NONE:
        return None
    if name == "betas":
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise TypeError(f"betas must be two numbers; received {value!r}. "
                            "Use for example betas=(0.9, 0.999).")
        return tuple(_number(name, beta) for beta in value)
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    inside = _RANGE.get(name, _at_least_0)
    rule = _TEXT[inside] + (" (None: off)" if name in _MAY_BE_NONE else "")
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {rule}; received {value!r} of type "
                        f"{type(value).__name__}.")
    if not inside(value):
        raise ValueError(f"{name} must be {rule}; received {value!r}.")
    return float(value)


# -- the interface ----------------------------------------------------------

_OURS: set[type] = set()


def _rule(cls: type) -> type:
    _OURS.add(dataclass(eq=False, kw_only=True)(cls))
    return cls


@_rule
class Optimizer:
    """A rule that moves one weight; one object serves every device.

    It holds options only. What an update remembers is in the state of that
    weight on that device, so devices may be updated at the same time.

    Parameters
    ----------
    learning_rate : float
    wd : float
        Weight decay.
    clip_gradient : float, optional
        Limit of each element's size; see the module for where it acts.

    Raises
    ------
    TypeError
        An option that is no number (no bool, for a switch).
    ValueError
        An option out of its range, or options that exclude each other.
    """

    learning_rate: float = 0.01
    wd: float = 0.0
    clip_gradient: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _checked(field.name, getattr(self, field.name))
            setattr(self, field.name, value)

    @property
    def elementwise(self) -> bool:
        """Whether `update` treats each element alone, so that it may be
        given a weight piece by piece, as NumPy arrays. True for the classes
        of this module; a class derived from them may say so too."""
        return type(self) in _OURS

    def create_state(self, weight: Array, ops: Ops) -> State:
        """What the rule remembers of `weight` before the first update.

        Returns
        -------
        dict
            Named slots, {} for a rule without memory: arrays of the shape,
            dtype and device of `weight`, or Python floats. `update` changes
            the arrays in place and may replace the floats.
        """
        return {name: ops.zeros_like(weight) for name in self._slots()}

    def begin_step(self, states: Sequence[State],
                   counts: Sequence[int | None]) -> None:
        """Called for each device before its updates of one step.

        Only `nadam` needs it, with Gluon's semantics: see there. The others
        do nothing.

        Parameters
        ----------
        states : the device's states, of all parameters, in their order
        counts : for each, the `t` of the coming `update`, or None if that
            parameter is not updated in this step
        """

    def update(self, weight: Array, grad: Array, state: State, *, lr: float,
               wd: float, t: int, ops: Ops) -> None:
        """Move `weight`, in place; to be called inside
        ``scope(recording=False)``.

        Nothing is copied to the host and nothing blocks. `grad` is left as
        it is.

        Parameters
        ----------
        weight, grad : arrays of one shape, dtype and device
            `grad` is already divided by the batch size.
        state : dict
            From `create_state` of this weight; updated.
        lr, wd : float
            This parameter's rate and weight decay: multipliers and schedule
            are applied, `learning_rate` and `wd` of the object are not read.
        t : int
            1 at the first update of this parameter, then 2, 3, ...
        ops : Ops
            The functions of the engine that the arrays belong to.
        """
        raise NotImplementedError

    def _slots(self) -> tuple[str, ...]:
        return ()

    def _clip(self, x: Array, ops: Ops) -> Array:
        limit = self.clip_gradient
        return x if limit is None else _limited(x, limit, ops)

    def _clip_then_decay(self, weight: Array, grad: Array, wd: float,
                         ops: Ops) -> Array:
        grad = self._clip(grad, ops)
        return grad + weight * wd if wd else grad

    def _decay_then_clip(self, weight: Array, grad: Array, wd: float,
                         ops: Ops) -> Array:
        return self._clip(grad + weight * wd if wd else grad, ops)


def _limited(x: Array, limit: float, ops: Ops) -> Array:
    """`x` within +-limit. Not ``x.clip``: MXNet rounds its bounds to
    float32, and the engines would part in the ninth digit."""
    return ops.minimum(ops.maximum(x, -limit), limit)


def _average(average: Array, x: Array, keep: float) -> None:
    """``average <- keep average + (1 - keep) x``, in place."""
    average *= keep
    average += x * (1 - keep)


def _nadam_momentum(beta1: float, decay: float, t: int) -> float:
    """Nadam's schedule: ``beta1 (1 - 0.96^(t decay) / 2)``."""
    return beta1 * (1 - 0.5 * 0.96 ** (t * decay))


def _nadam(weight: Array, grad: Array, state: State, lr: float, t: int,
           ops: Ops, beta1: float, beta2: float, epsilon: float,
           decay: float) -> None:
    """The rule of `Nadam`, for G = grad; the same in both libraries."""
    mean, variance = state["mean"], state["variance"]
    now = _nadam_momentum(beta1, decay, t)
    later = _nadam_momentum(beta1, decay, t + 1)
    product = state["schedule"] = float(state["schedule"]) * now
    _average(mean, grad, beta1)
    _average(variance, grad * grad, beta2)
    step = grad * (lr * (1 - now) / (1 - product))
    step += mean * (lr * later / (1 - product * later))
    weight -= step / (ops.sqrt(variance / (1 - beta2 ** t)) + epsilon)


def _adadelta(grad: Array, state: State, ops: Ops, rho: float,
              epsilon: float) -> Array:
    """The step d of `AdaDelta`, for G = grad; the same in both libraries."""
    variance, past = state["variance"], state["delta_variance"]
    _average(variance, grad * grad, rho)
    step = ops.sqrt((past + epsilon) / (variance + epsilon)) * grad
    _average(past, step * step, rho)
    return step


# -- Gluon's rules ----------------------------------------------------------
# Sources: python/mxnet/optimizer/optimizer.py of MXNet 1.9.1 and the kernels
# that it calls, src/operator/optimizer_op-inl.h; all checked by running them.

@_rule
class SGD(Optimizer):
    """``v <- momentum v - lr (clip(g) + wd w);  w <- w + v``.

    The rate is inside the velocity v: after a change of rate, old steps keep
    their old size (torch rescales them).
    """

    momentum: float = 0.0

    def _slots(self):
        return ("momentum",) if self.momentum else ()

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        step = self._clip_then_decay(weight, grad, wd, ops) * lr
        if not self.momentum:
            weight -= step
            return
        velocity = state["momentum"]
        velocity *= self.momentum
        velocity -= step
        weight += velocity


@_rule
class NAG(SGD):
    """``v <- momentum v - lr (clip(g) + wd w)``, then w moves by
    ``momentum v - lr (clip(g) + wd w)`` with the new v.

    As in Gluon's kernel, which writes the weight first and reads it again,
    the velocity that is *kept* has the decay of the new weight:
    ``v <- momentum v - lr (clip(g) + wd w_new)``. Without wd the two are the
    same; torch's rule has no such term.
    """

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        if not self.momentum:
            super().update(weight, grad, state, lr=lr, wd=wd, t=t, ops=ops)
            return
        velocity = state["momentum"]
        velocity *= self.momentum
        before = velocity * 1.0
        velocity -= self._clip(grad, ops) * lr
        ahead = velocity - weight * (lr * wd) if wd else velocity
        weight += ahead * (1 + self.momentum) - before
        if wd:
            velocity -= weight * (lr * wd)


@_rule
class Adam(Optimizer):
    """With ``G = clip(g + wd w)``: the averages
    ``m <- beta1 m + (1 - beta1) G`` and ``v <- beta2 v + (1 - beta2) G^2``,
    then ``w <- w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) +
    epsilon)``.

    Kingma and Ba 2015, the variant of the end of section 2: epsilon is
    outside the bias correction, so it counts for more in early steps than
    torch's (31.6 times at t = 1).
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def _slots(self):
        return ("mean", "variance")

    def _step(self, grad: Array, state: State, lr: float, t: int,
              ops: Ops) -> Array:
        """Take G into the averages; what the weight loses."""
        mean, variance = state["mean"], state["variance"]
        _average(mean, grad, self.beta1)
        _average(variance, grad * grad, self.beta2)
        lr *= math.sqrt(1 - self.beta2 ** t) / (1 - self.beta1 ** t)
        return mean * lr / (ops.sqrt(variance) + self.epsilon)

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self._decay_then_clip(weight, grad, wd, ops)
        weight -= self._step(grad, state, lr, t, ops)


@_rule
class AdamW(Adam):
    """Adam's step on ``clip(g)``, and ``lr wd w`` off the same w.

    Gluon 1.9.1 has the operator `mx.nd.contrib.adamw_update` and no
    optimiser that calls it. The operator computes ``w - eta (lr m / (sqrt(v)
    + epsilon) + wd w)``; here its eta is the learning rate and its lr the
    bias correction ``sqrt(1 - beta2^t) / (1 - beta1^t)``, so that the decay
    is that of Loshchilov and Hutter 2019 and of torch's AdamW. wd is 0
    unless given, as in all of Gluon; torch's default is 0.01.
    """

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        step = self._step(self._clip(grad, ops), state, lr, t, ops)
        if wd:
            step += weight * (lr * wd)
        weight -= step


@_rule
class Adamax(Optimizer):
    """With ``G = clip(g + wd w)``: ``m <- beta1 m + (1 - beta1) G``,
    ``u <- max(beta2 u, |G|)``, ``w <- w - lr / (1 - beta1^t) m / u``.

    There is no epsilon, as in Gluon: an element whose gradients have all
    been exactly 0 so far becomes NaN (0 / 0). Torch's rule does not.
    """

    learning_rate: float = 0.002
    beta1: float = 0.9
    beta2: float = 0.999

    def _slots(self):
        return ("mean", "norm")

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        mean, norm = state["mean"], state["norm"]
        grad = self._decay_then_clip(weight, grad, wd, ops)
        _average(mean, grad, self.beta1)
        norm[:] = ops.maximum(norm * self.beta2, ops.abs(grad))
        weight -= mean * (lr / (1 - self.beta1 ** t)) / norm


@_rule
class Nadam(Optimizer):
    """Adam with Nesterov momentum on a schedule (Dozat 2016).

    With ``G = clip(g + wd w)``, m and v as in Adam,
    ``mu_t = beta1 (1 - 0.96^(t schedule_decay) / 2)`` and P the product of
    the momenta so far, this one included::

        M = (1 - mu_t) G / (1 - P) + mu_(t+1) m / (1 - P mu_(t+1))
        w <- w - lr M / (sqrt(v / (1 - beta2^t)) + epsilon)

    P is meant to be the product over the updates of *this* parameter. Gluon
    keeps one P for all parameters and multiplies it at every update of any
    of them, so that with n parameters it falls n times as fast and depends
    on their order. That is what happens here when `begin_step` is called
    with the parameters in Gluon's order (a Gluon Trainer given a dictionary
    sorts them by name: a layer's bias comes before its weight). Without
    `begin_step` each parameter has its own P, as in torch. The two part in
    the first steps, until P vanishes, and then keep their distance: measured
    on random gradients, up to 0.8 of a rate per element (6 % of the way
    after 30 steps), and up to 0.4 of a rate between two orders.

    P is kept per parameter and device in the float ``"schedule"``.
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    schedule_decay: float = 0.004

    def _slots(self):
        return ("mean", "variance")

    def create_state(self, weight, ops):
        return {**super().create_state(weight, ops), "schedule": 1.0}

    def begin_step(self, states, counts):
        # P only falls and each state has its value at that parameter's last
        # update: the common P is the smallest.
        product = min((state["schedule"] for state in states), default=1.0)
        for state, t in zip(states, counts):
            if t is not None:
                state["schedule"] = product
                product *= _nadam_momentum(self.beta1, self.schedule_decay, t)

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self._decay_then_clip(weight, grad, wd, ops)
        _nadam(weight, grad, state, lr, t, ops, self.beta1, self.beta2,
               self.epsilon, self.schedule_decay)


@_rule
class RMSProp(Optimizer):
    """With ``G = clip(g + wd w)`` and ``n <- gamma1 n + (1 - gamma1) G^2``:
    ``w <- w - lr G / sqrt(n + epsilon)``; epsilon is inside the root.

    ``centered=True`` is Graves 2013, equations 38 to 45: also
    ``a <- gamma1 a + (1 - gamma1) G``, and
    ``d <- gamma2 d - lr G / sqrt(n - a^2 + epsilon)``, ``w <- w + d``;
    gamma2, a momentum, counts only there. ``clip_weights`` limits the new
    weight's elements.
    """

    learning_rate: float = 0.001
    gamma1: float = 0.9
    gamma2: float = 0.9
    epsilon: float = 1e-8
    centered: bool = False
    clip_weights: float | None = None

    def _slots(self):
        return ("variance", "mean", "delta") if self.centered \
            else ("variance",)

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self._decay_then_clip(weight, grad, wd, ops)
        spread = state["variance"]
        _average(spread, grad * grad, self.gamma1)
        if self.centered:
            mean, delta = state["mean"], state["delta"]
            _average(mean, grad, self.gamma1)
            spread = spread - mean * mean
            delta *= self.gamma2
        step = grad * lr / ops.sqrt(spread + self.epsilon)
        if self.centered:
            delta -= step
            weight += delta
        else:
            weight -= step
        if self.clip_weights is not None:
            weight[:] = _limited(weight, self.clip_weights, ops)


@_rule
class AdaGrad(Optimizer):
    """``h <- h + clip(g)^2;  w <- w - lr (clip(g) / sqrt(h + eps) + wd w)``.

    The decay stays out of h, and eps is inside the root (torch: both the
    other way; Duchi, Hazan and Singer 2011).
    """

    eps: float = 1e-7

    def _slots(self):
        return ("history",)

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self._clip(grad, ops)
        history = state["history"]
        history += grad * grad
        step = grad / ops.sqrt(history + self.eps)
        if wd:
            step += weight * wd
        weight -= step * lr


@_rule
class AdaDelta(Optimizer):
    """With ``G = clip(g)``: ``a <- rho a + (1 - rho) G^2``,
    ``d = sqrt(b + epsilon) / sqrt(a + epsilon) G``,
    ``b <- rho b + (1 - rho) d^2``, ``w <- w - (d + wd w)``.

    The learning rate is ignored, for the decay too (Zeiler 2012).
    """

    rho: float = 0.9
    epsilon: float = 1e-5

    def _slots(self):
        return ("variance", "delta_variance")

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self._clip(grad, ops)
        step = _adadelta(grad, state, ops, self.rho, self.epsilon)
        if wd:
            step += weight * wd
        weight -= step


@_rule
class Ftrl(Optimizer):
    """Follow the regularised leader (McMahan et al. 2013). With
    ``G = clip(g)``::

        z <- z + G - (sqrt(n + G^2) - sqrt(n)) w / lr
        n <- n + G^2
        w <- -sign(z) max(|z| - lamda1, 0) / ((beta + sqrt(n)) / lr + wd)

    The rate divides, so it must be above 0. The first update forgets the
    initial weight but for the term with w, as in Gluon.
    """

    learning_rate: float = 0.1
    lamda1: float = 0.01
    beta: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        self._refuse_zero(self.learning_rate)

    def _slots(self):
        return ("z", "n")

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        self._refuse_zero(lr)
        grad = self._clip(grad, ops)
        z, n = state["z"], state["n"]
        root = ops.sqrt(n)
        n += grad * grad
        new_root = ops.sqrt(n)
        z += grad - (new_root - root) * weight / lr
        weight[:] = (_limited(z, self.lamda1, ops) - z) \
            / ((new_root + self.beta) / lr + wd)

    @staticmethod
    def _refuse_zero(lr: float) -> None:
        if not lr > 0:
            raise ValueError("ftrl divides by the learning rate, which must "
                             f"be above 0; received {lr!r}. To keep a "
                             "parameter as it is, freeze it.")


@_rule
class Signum(Optimizer):
    """``m <- momentum m + (1 - momentum) (clip(g) + wd w);
    w <- (1 - lr wd_lh) w - lr sign(m)`` (Bernstein et al. 2018).

    With momentum 0 it is Gluon's signSGD, which decays in another way:
    ``w <- (1 - lr wd) w - lr sign(g)``, and takes no wd_lh.
    """

    momentum: float = 0.9
    wd_lh: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.wd_lh and not self.momentum:
            raise ValueError("signum without momentum has no wd_lh; received "
                             f"wd_lh={self.wd_lh!r}, momentum=0. Use wd, "
                             "which then decays the weight directly.")

    def _slots(self):
        return ("momentum",) if self.momentum else ()

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        if self.momentum:
            grad = self._clip_then_decay(weight, grad, wd, ops)
            _average(state["momentum"], grad, self.momentum)
            grad, wd = state["momentum"], self.wd_lh
        if wd:
            weight *= 1 - lr * wd
        weight -= ops.sign(grad) * lr


# -- torch's rules ----------------------------------------------------------
# Sources: torch/optim/*.py of PyTorch 2.13 (the _single_tensor_ functions).
# G = clip(g) + wd w throughout, unless a docstring says otherwise.

def _refuse_nesterov(momentum: float, dampening: float) -> None:
    if not momentum or dampening:
        raise ValueError(
            "Nesterov momentum needs a momentum above 0 and no dampening; "
            f"received momentum={momentum!r}, dampening={dampening!r}. Use "
            "for example momentum=0.9.")


@_rule
class TorchSGD(Optimizer):
    """``b <- momentum b + (1 - dampening) G`` (b = G at the first update),
    then ``w <- w - lr b``, or ``w - lr (G + momentum b)`` with nesterov."""

    learning_rate: float = 0.001
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.nesterov:
            _refuse_nesterov(self.momentum, self.dampening)

    def _slots(self):
        return ("momentum",) if self.momentum else ()

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self._clip_then_decay(weight, grad, wd, ops)
        if self.momentum:
            buffer = state["momentum"]
            buffer *= self.momentum
            buffer += grad * (1.0 if t == 1 else 1 - self.dampening)
            grad = grad + buffer * self.momentum if self.nesterov else buffer
        weight -= grad * lr


@_rule
class TorchNAG(Optimizer):
    """torch's SGD with ``nesterov=True``, where momentum must be given:
    ``b <- momentum b + G;  w <- w - lr (G + momentum b)``."""

    learning_rate: float = 0.001
    momentum: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        _refuse_nesterov(self.momentum, 0.0)

    def _slots(self):
        return ("momentum",)

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self._clip_then_decay(weight, grad, wd, ops)
        buffer = state["momentum"]
        buffer *= self.momentum
        buffer += grad
        weight -= (grad + buffer * self.momentum) * lr


@_rule
class TorchAdam(Optimizer):
    """m and v as in Gluon's `Adam`, then
    ``w <- w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)``.

    ``amsgrad=True`` puts the largest v so far in the place of v.
    """

    learning_rate: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def _slots(self):
        return ("mean", "variance") + ("max_variance",) * self.amsgrad

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        self._move(weight, self._clip_then_decay(weight, grad, wd, ops), state,
                   lr, t, ops)

    def _move(self, weight: Array, grad: Array, state: State, lr: float,
              t: int, ops: Ops) -> None:
        beta1, beta2 = self.betas
        mean, variance = state["mean"], state["variance"]
        _average(mean, grad, beta1)
        _average(variance, grad * grad, beta2)
        if self.amsgrad:
            largest = state["max_variance"]
            largest[:] = ops.maximum(largest, variance)
            variance = largest
        root = ops.sqrt(variance) / math.sqrt(1 - beta2 ** t)
        weight -= mean * (lr / (1 - beta1 ** t)) / (root + self.eps)


@_rule
class TorchAdamW(TorchAdam):
    """``w <- (1 - lr wd) w``, then `TorchAdam` on ``clip(g)`` (Loshchilov
    and Hutter 2019)."""

    wd: float = 0.01

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        if wd:
            weight *= 1 - lr * wd
        self._move(weight, self._clip(grad, ops), state, lr, t, ops)


@_rule
class TorchAdamax(Optimizer):
    """``m <- beta1 m + (1 - beta1) G``, ``u <- max(beta2 u, |G| + eps)``,
    ``w <- w - lr / (1 - beta1^t) m / u``."""

    learning_rate: float = 0.002
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def _slots(self):
        return ("mean", "norm")

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        beta1, beta2 = self.betas
        mean, norm = state["mean"], state["norm"]
        grad = self._clip_then_decay(weight, grad, wd, ops)
        _average(mean, grad, beta1)
        norm[:] = ops.maximum(norm * beta2, ops.abs(grad) + self.eps)
        weight -= mean * (lr / (1 - beta1 ** t)) / norm


@_rule
class TorchNAdam(Optimizer):
    """Gluon's `Nadam` with a product P of each parameter's own, kept in the
    float ``"schedule"``, and other defaults.

    ``decoupled_weight_decay=True``: ``w <- (1 - lr wd) w`` first, and the
    rest on ``clip(g)``. torch itself keeps P in its default dtype, float32
    unless it is told otherwise; here P is double.
    """

    learning_rate: float = 0.002
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum_decay: float = 0.004
    decoupled_weight_decay: bool = False

    def _slots(self):
        return ("mean", "variance")

    def create_state(self, weight, ops):
        return {**super().create_state(weight, ops), "schedule": 1.0}

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        if self.decoupled_weight_decay:
            weight *= 1 - lr * wd
            wd = 0.0
        grad = self._clip_then_decay(weight, grad, wd, ops)
        _nadam(weight, grad, state, lr, t, ops, *self.betas, self.eps,
               self.momentum_decay)


@_rule
class TorchRMSprop(Optimizer):
    """``v <- alpha v + (1 - alpha) G^2;  d = G / (sqrt(v) + eps)``, then
    ``w <- w - lr d``, or with momentum ``b <- momentum b + d;
    w <- w - lr b``.

    ``centered=True``: also ``a <- alpha a + (1 - alpha) G``, and
    ``v - a^2`` in the place of v in d.
    """

    learning_rate: float = 0.01
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    def _slots(self):
        return ("variance",) + ("mean",) * self.centered \
            + ("momentum",) * bool(self.momentum)

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self._clip_then_decay(weight, grad, wd, ops)
        spread = state["variance"]
        _average(spread, grad * grad, self.alpha)
        if self.centered:
            mean = state["mean"]
            _average(mean, grad, self.alpha)
            spread = spread - mean * mean
        step = grad / (ops.sqrt(spread) + self.eps)
        if self.momentum:
            buffer = state["momentum"]
            buffer *= self.momentum
            buffer += step
            step = buffer
        weight -= step * lr


@_rule
class TorchAdagrad(Optimizer):
    """``h <- h + G^2;  w <- w - lr / (1 + (t - 1) lr_decay) G / (sqrt(h) +
    eps)``; h starts at initial_accumulator_value."""

    learning_rate: float = 0.01
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def create_state(self, weight, ops):
        start = self.initial_accumulator_value
        return {"history": ops.zeros_like(weight) + start}

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self._clip_then_decay(weight, grad, wd, ops)
        history = state["history"]
        history += grad * grad
        weight -= grad * (lr / (1 + (t - 1) * self.lr_decay)) \
            / (ops.sqrt(history) + self.eps)


@_rule
class TorchAdadelta(Optimizer):
    """Gluon's `AdaDelta` on G, with ``w <- w - lr d``."""

    learning_rate: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6

    def _slots(self):
        return ("variance", "delta_variance")

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self._clip_then_decay(weight, grad, wd, ops)
        weight -= _adadelta(grad, state, ops, self.rho, self.eps) * lr


# -- by name ----------------------------------------------------------------

_RULES: dict[str, dict[str, type[Optimizer]]] = {
    "gluon": {"sgd": SGD, "nag": NAG, "adam": Adam, "adamw": AdamW,
              "adamax": Adamax, "nadam": Nadam, "rmsprop": RMSProp,
              "adagrad": AdaGrad, "adadelta": AdaDelta, "ftrl": Ftrl,
              "signum": Signum},
    "torch": {"sgd": TorchSGD, "nag": TorchNAG, "adam": TorchAdam,
              "adamw": TorchAdamW, "adamax": TorchAdamax,
              "nadam": TorchNAdam, "rmsprop": TorchRMSprop,
              "adagrad": TorchAdagrad, "adadelta": TorchAdadelta},
}


def create(name: str, semantics: str = "gluon", **options: Any) -> Optimizer:
    """The optimiser called `name`.

    Parameters
    ----------
    name : str
        ``sgd``, ``nag``, ``adam``, ``adamw``, ``adamax``, ``nadam``,
        ``rmsprop``, ``adagrad``, ``adadelta``, ``ftrl`` or ``signum``, in
        any case (the last two: Gluon's only).
    semantics : {"gluon", "torch"}
        Whose formulas, option names and defaults.
    **options
        The fields of the class: with Gluon's semantics ``learning_rate``,
        ``wd``, ``clip_gradient`` and those of the rule; with torch's ``lr``
        and ``weight_decay`` in the place of the first two, which are taken
        as well.

    Raises
    ------
    ValueError
        Unknown semantics, optimiser or option; a value out of its range; an
        option given under two names; an optimiser that torch does not have.
    TypeError
        A value that is no number (no bool, for a switch).
    """
    if semantics not in _RULES:
        raise ValueError("unknown semantics; received "
                         f"{semantics!r}. Use 'gluon' or 'torch'.")
    rules, key = _RULES[semantics], str(name).lower()
    if key not in rules:
        if key in _RULES["gluon"]:
            raise ValueError(f"torch has no optimiser {key!r}; received it "
                             "with semantics='torch'. Use semantics='gluon', "
                             f"or one of {', '.join(rules)}.")
        raise ValueError(f"unknown optimiser; received {name!r}. Use one of "
                         f"{', '.join(rules)}.")
    known = [field.name for field in fields(rules[key])]
    values = dict(options)
    if semantics == "torch":
        for short, field in _TORCH_NAMES.items():
            if short in values:
                if field in values:
                    raise ValueError(f"{short} and {field} are one option; "
                                     f"received both. Give {short} only.")
                values[field] = values.pop(short)
        known = list(_TORCH_NAMES) + known
    unknown = [option for option in values if option not in known]
    if unknown:
        raise ValueError(
            f"the optimiser {key!r} has no option "
            f"{', '.join(map(repr, unknown))} with semantics={semantics!r}. "
            f"Use {', '.join(known)}.")
    return rules[key](**values)
