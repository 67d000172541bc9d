"""Gluon's optimizers: what those of MXNet 1.9.1 compute on one device.

Sources: ``python/mxnet/optimizer/optimizer.py`` and the kernels that it calls
(``src/operator/optimizer_op-inl.h``), all checked by running them. For the
letters of the formulas see `mgpu.optimizers`.
"""
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mgpu.backends.ops import Ops
from mgpu.backends.types import Array
from mgpu.optim.base import (Optimizer, adadelta_step, adam_step, adamax_step,
                             averages, limited, mean_square, move_average,
                             nadam_momentum, nadam_step, rule)

#: the families whose kernels in MXNet get their numbers as float32
COMPILED = ("sgd", "nag", "adam", "rmsprop", "ftrl", "signum")


@rule("gluon", "sgd")
class SGD(Optimizer):
    """``v <- momentum v - lr (clip(g) + wd w);  w <- w + v``.

    The rate is inside the velocity v: after a change of rate, old steps keep
    their old size (torch rescales them).
    """

    rate_in_velocity = True
    arrays = ("momentum",)

    momentum: float = 0.0

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        step = self.decayed(weight, grad, wd, ops) * lr
        if not self.momentum:
            weight -= step
            return
        velocity = state["momentum"]
        velocity *= self.momentum
        velocity -= step
        weight += velocity


@rule("gluon", "nag")
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
        velocity -= self.clipped(grad, ops) * lr
        ahead = velocity - weight * (lr * wd) if wd else velocity
        weight += ahead * (1 + self.momentum) - before
        if wd:
            velocity -= weight * (lr * wd)


@dataclass(eq=False, kw_only=True)
class _Averages(Optimizer):
    """A rule with averages of G and of its square."""

    arrays: ClassVar[tuple[str, ...]] = ("mean", "variance")

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


@rule("gluon", "adam")
class Adam(_Averages):
    """With ``G = clip(g + wd w)``: the averages
    ``m <- beta1 m + (1 - beta1) G`` and ``v <- beta2 v + (1 - beta2) G^2``,
    then ``w <- w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) +
    epsilon)``.

    Kingma and Ba 2015, the variant of the end of section 2: epsilon is
    outside the bias correction, so it counts for more in early steps than
    torch's (31.6 times at t = 1).
    """

    clips_before_decay = False
    compute_step = adam_step


@rule("gluon", "adamw")
class AdamW(Adam):
    """Adam's step on ``clip(g)``, and ``lr wd w`` off the same w.

    Gluon 1.9.1 has the operator `mx.nd.contrib.adamw_update` and no
    optimizer that calls it. The operator computes ``w - eta (lr m / (sqrt(v)
    + epsilon) + wd w)``; here its eta is the learning rate and its lr the
    bias correction ``sqrt(1 - beta2^t) / (1 - beta1^t)``, so that the decay
    is that of Loshchilov and Hutter 2019 and of torch's AdamW. wd is 0
    unless given, as in all of Gluon; torch's default is 0.01.
    """

    clips_before_decay = decoupled_decay = True


@rule("gluon", "adamax")
class Adamax(_Averages):
    """With ``G = clip(g + wd w)``: ``m <- beta1 m + (1 - beta1) G``,
    ``u <- max(beta2 u, |G|)``, ``w <- w - lr / (1 - beta1^t) m / u``.

    There is no epsilon, as in Gluon: an element whose gradients have all
    been exactly 0 so far becomes NaN (0 / 0). Torch's rule does not.
    """

    clips_before_decay = False
    arrays = ("mean", "norm")
    epsilon: ClassVar[float] = 0.0      # type: ignore[misc]

    learning_rate: float = 0.002

    compute_step = adamax_step


@rule("gluon", "nadam")
class Nadam(_Averages):
    """Adam with Nesterov momentum on a schedule (Dozat 2016).

    With ``G = clip(g + wd w)``, m and v as in Adam,
    ``mu_t = beta1 (1 - 0.96^(t schedule_decay) / 2)`` and P the product of
    the momenta so far, this one included::

        M = (1 - mu_t) G / (1 - P) + mu_(t+1) m / (1 - P mu_(t+1))
        w <- w - lr M / (sqrt(v / (1 - beta2^t)) + epsilon)

    P is meant to be the product over the updates of *this* parameter. Gluon
    keeps one P for all parameters and multiplies it at every update of any
    of them, so that with n parameters it falls n times as fast and depends
    on their order. That is what happens here when `begin_step` is called.
    A `Trainer` goes through the layers in their order, and in each by name:
    its bias comes before its weight. A Gluon Trainer sorts all by Gluon's
    own names, which torch has not, and which count the layers made so far
    in a process: the same order for up to ten layers of one kind, another
    where ``dense10`` comes before ``dense2``, ``batchnorm0`` before
    ``conv0``, or a parameter of the block's own among its layers. Without
    `begin_step` each parameter has its own P, as in torch. The weights
    diverge in the first steps, until P vanishes, and then keep their
    distance: measured on random gradients, up to 0.8 of a rate per element
    (6 % of the way after 30 steps), and up to 0.4 of a rate between two
    orders.

    A frozen parameter is not updated, so P does not move at it. Gluon's
    SymbolBlock and a Module do update a gamma that batch norm takes as 1
    (``fix_gamma``), to no effect but that on P; `mgpu.from_gluon` freezes
    it, as a Gluon layer with ``scale=False`` does. `mgpu.resume_from_gluon`
    moves P there too where the files have updates of it.

    P is kept per parameter and device in the float ``"schedule"``.
    """

    clips_before_decay = False

    schedule_decay: float = 0.004

    def create_state(self, weight, ops):
        return {**super().create_state(weight, ops), "schedule": 1.0}

    def begin_step(self, states, counts):
        # P only falls and each state has its value at that parameter's last
        # update: the common P is the smallest.
        product = min((state["schedule"] for state in states if state),
                      default=1.0)
        for state, t in zip(states, counts):
            if t is not None:
                state["schedule"] = product
                product *= nadam_momentum(self.beta1, self.schedule_decay,
                                          abs(t))
                if t < 0:       # no update follows that would move it
                    state["schedule"] = product

    compute_step = nadam_step


@rule("gluon", "rmsprop")
class RMSProp(Optimizer):
    """With ``G = clip(g + wd w)`` and ``n <- gamma1 n + (1 - gamma1) G^2``:
    ``w <- w - lr G / sqrt(n + epsilon)``; epsilon is inside the root.

    ``centered=True`` is Graves 2013, equations 38 to 45: also
    ``a <- gamma1 a + (1 - gamma1) G``, and
    ``d <- gamma2 d - lr G / sqrt(n - a^2 + epsilon)``, ``w <- w + d``;
    gamma2, a momentum, counts only there. ``clip_weights`` limits the new
    weight's elements.
    """

    clips_before_decay = False

    learning_rate: float = 0.001
    gamma1: float = 0.9
    gamma2: float = 0.9
    epsilon: float = 1e-8
    centered: bool = False
    clip_weights: float | None = None

    def slots(self):
        return ("variance", "mean", "delta") if self.centered \
            else ("variance",)

    def compute_step(self, grad, state, lr, t, ops):
        spread = mean_square(grad, state, self.gamma1)
        step = grad * lr / ops.sqrt(spread + self.epsilon)
        if not self.centered:
            return step
        state["delta"] *= self.gamma2
        state["delta"] -= step
        return state["delta"] * -1

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        super().update(weight, grad, state, lr=lr, wd=wd, t=t, ops=ops)
        if self.clip_weights is not None:
            weight[:] = limited(weight, self.clip_weights, ops)


@rule("gluon", "adagrad")
class AdaGrad(Optimizer):
    """``h <- h + clip(g)^2;  w <- w - lr (clip(g) / sqrt(h + eps) + wd w)``.

    The decay stays out of h, and eps is inside the root (torch: both the
    other way; Duchi, Hazan and Singer 2011).
    """

    decoupled_decay = True
    arrays = ("history",)

    eps: float = 1e-7

    def compute_step(self, grad, state, lr, t, ops):
        state["history"] += grad * grad
        return grad * lr / ops.sqrt(state["history"] + self.eps)


@rule("gluon", "adadelta")
class AdaDelta(Optimizer):
    """With ``G = clip(g)``: ``a <- rho a + (1 - rho) G^2``,
    ``d = sqrt(b + epsilon) / sqrt(a + epsilon) G``,
    ``b <- rho b + (1 - rho) d^2``, ``w <- w - (d + wd w)``.

    The learning rate is ignored, for the decay as well (Zeiler 2012).
    """

    decoupled_decay = True
    arrays = ("variance", "delta_variance")

    rho: float = 0.9
    epsilon: float = 1e-5

    compute_step = adadelta_step

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        super().update(weight, grad, state, lr=1.0, wd=wd, t=t, ops=ops)


@rule("gluon", "ftrl")
class Ftrl(Optimizer):
    """Follow the regularized leader (McMahan et al. 2013).

    With ``G = clip(g)``::

        z <- z + G - (sqrt(n + G^2) - sqrt(n)) w / lr
        n <- n + G^2
        w <- -sign(z) max(|z| - lamda1, 0) / ((beta + sqrt(n)) / lr + wd)

    The rate divides, so it must be above 0. The first update forgets the
    initial weight but for the term with w, as in Gluon.
    """

    decoupled_decay = divides_by_rate = True
    arrays = ("z", "n")

    learning_rate: float = 0.1
    lamda1: float = 0.01
    beta: float = 1.0

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self.clipped(grad, ops)
        z, n = state["z"], state["n"]
        root = ops.sqrt(n)
        n += grad * grad
        new_root = ops.sqrt(n)
        z += grad - (new_root - root) * weight / lr
        weight[:] = (limited(z, self.lamda1, ops) - z) \
            / ((new_root + self.beta) / lr + wd)


@rule("gluon", "signum")
class Signum(Optimizer):
    """``m <- momentum m + (1 - momentum) (clip(g) + wd w);
    w <- (1 - lr wd_lh) w - lr sign(m)`` (Bernstein et al. 2018).

    With momentum 0 it is Gluon's signSGD, which decays in another way:
    ``w <- (1 - lr wd) w - lr sign(g)``, and takes no wd_lh.
    """

    arrays = ("momentum",)

    momentum: float = 0.9
    wd_lh: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.wd_lh and not self.momentum:
            raise ValueError("signum without momentum has no wd_lh; received "
                             f"wd_lh={self.wd_lh!r}, momentum=0. Use wd, "
                             "which then decays the weight directly.")

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        if self.momentum:
            grad = self.decayed(weight, grad, wd, ops)
            move_average(state["momentum"], grad, self.momentum)
            grad, wd = state["momentum"], self.wd_lh
        if wd:
            weight *= 1 - lr * wd
        weight -= ops.sign(grad) * lr


def _norm(x: Array, ops: Ops) -> Array:
    """The Euclidean norm of all elements."""
    return ops.sqrt(ops.sum(x * x))


def _in_float32(update: Callable[..., None]) -> Callable[..., None]:
    """`update`, which computes in float32 where weights and states are of
    float16: there the squares of a small gradient are 0, and the norm of a
    large layer is infinite. MXNet's kernels square in float16, and add in
    float32."""
    @functools.wraps(update)
    def wide(self, weight, grad, state, *, ops, **numbers):
        if "float16" not in str(weight.dtype):
            update(self, weight, grad, state, ops=ops, **numbers)
            return
        kept = {"": weight, **state}
        moved = {name: ops.astype(x, "float32") for name, x in kept.items()}
        update(self, moved[""], ops.astype(grad, "float32"), moved, ops=ops,
               **numbers)
        for name, x in kept.items():
            x[:] = ops.astype(moved[name], x.dtype)
    return wide


@rule("gluon", "lamb")
class LAMB(_Averages):
    """With the averages m and v of Adam for ``G = clip(g)``, and
    ``s = m' / (sqrt(v') + epsilon) + wd w`` for ``m' = m / (1 - beta1^t)``,
    ``v' = v / (1 - beta2^t)`` (m and v themselves without
    `bias_correction`): ``w <- w - lr |w| / |s| s`` (You et al. 2020).

    |w| is brought to `lower_bound` and `upper_bound`, where they are given
    and not 0. The factor |w| / |s| is 1 where one of them is 0.
    """

    needs_whole = decoupled_decay = True

    epsilon: float = 1e-6
    lower_bound: float | None = None
    upper_bound: float | None = None
    bias_correction: bool = True

    @_in_float32
    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self.clipped(grad, ops)
        mean, variance = averages(self, grad, state)
        if self.bias_correction:
            mean = mean / (1 - self.beta1 ** t)
            variance = variance / (1 - self.beta2 ** t)
        step = mean / (ops.sqrt(variance) + self.epsilon)
        if wd:
            step += weight * wd
        size, length = _norm(weight, ops), _norm(step, ops)
        if self.lower_bound:
            size = ops.maximum(size, self.lower_bound)
        if self.upper_bound:
            size = ops.minimum(size, self.upper_bound)
        # 1 where both are above 0, else 0: nothing waits for their values.
        both = ops.sign(size) * ops.sign(length)
        weight -= step * (both * size / (length + (1 - both))
                          + (1 - both)) * lr


@rule("gluon", "lars")
class LARS(SGD):
    """`SGD` with the rate ``lr eta |w| / (|g| + wd |w| + eps)`` of each
    parameter (You et al. 2017); with lr itself where |w| or |g| is 0.

    g is not clipped in the norm. As with Gluon's Trainer, which tells MXNet's
    rule no names, biases, gammas and betas are treated as weights are.

    MXNet's `momentum_correction`, which multiplies the momentum by the
    quotient of two rates where the rate has changed, reaches the first four
    parameters of its Trainer only. Here it is off, and with a momentum that
    has to be said: ``momentum_correction=False``.
    """

    needs_whole = True

    eta: float = 0.001
    eps: float = 0.0
    momentum_correction: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.momentum and self.momentum_correction:
            raise ValueError(
                "lars corrects no momentum after a change of the rate, which "
                "MXNet does for the first four parameters only; received "
                f"momentum={self.momentum!r} and momentum_correction=True, "
                "the default. Pass momentum_correction=False.")

    @_in_float32
    def update(self, weight, grad, state, *, lr, wd, t, ops):
        size, length = _norm(weight, ops), _norm(grad, ops)
        both = ops.sign(size) * ops.sign(length)    # see LAMB
        factor = both * size * self.eta / (
            length + size * wd + self.eps + (1 - both)) + (1 - both)
        super().update(weight, grad, state, lr=factor * lr, wd=wd, t=t,
                       ops=ops)


@rule("gluon", "ftml")
class FTML(_Averages):
    """With ``G = clip(g + wd w)``: ``v <- beta2 v + (1 - beta2) G^2``,
    ``e = (1 - beta1^t) / lr (sqrt(v / (1 - beta2^t)) + epsilon)``,
    ``z <- beta1 z + (1 - beta1) G - (e - beta1 d) w``, then d is e and
    ``w <- -z / d`` (Zheng and Kwok 2017). It divides by the rate, which a
    Trainer checks.
    """

    clips_before_decay = False
    divides_by_rate = True
    arrays = ("d", "variance", "z")

    learning_rate: float = 0.01
    beta1: float = 0.6

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self.decayed(weight, grad, wd, ops)
        d, variance, z = state["d"], state["variance"], state["z"]
        move_average(variance, grad * grad, self.beta2)
        new = (ops.sqrt(variance / (1 - self.beta2 ** t)) + self.epsilon) * (
            (1 - self.beta1 ** t) / lr)
        move_average(z, grad, self.beta1)
        z -= (new - d * self.beta1) * weight
        d[:] = new
        weight[:] = z / d * -1


@rule("gluon", "dcasgd")
class DCASGD(Optimizer):
    """``w <- w - lr (clip(g) + wd w + lamda clip(g)^2 (w - p))``, where p is
    w before the last update (Zheng et al. 2017).

    There is no momentum: MXNet's rule fails with one.
    """

    decoupled_decay = True
    arrays = ("previous",)

    lamda: float = 0.04

    def create_state(self, weight, ops):
        previous = ops.zeros_like(weight)
        previous[:] = weight
        return {"previous": previous}

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        way = weight - state["previous"]
        state["previous"][:] = weight
        grad = self.clipped(grad, ops)
        weight -= (self.decayed(weight, grad, wd, ops)
                   + grad * grad * way * self.lamda) * lr


@rule("gluon", "sgld")
class SGLD(Optimizer):
    """``w <- w - lr / 2 (clip(g) + wd w) + n``, with n from a normal
    distribution of the variance lr (Welling and Teh 2011).

    n is drawn in NumPy from (`seed`, place of the parameter in the network,
    t): the same on all devices, on both backends and in a run that is resumed.
    MXNet draws from its own stream.
    """

    needs_whole = decoupled_decay = True

    seed: float = 0

    def create_state(self, weight, ops):
        return {"number": 0.0}

    def begin_step(self, states, counts):
        for number, state in enumerate(states):
            state["number"] = float(number)

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        rng = np.random.default_rng(
            [int(self.seed), int(state["number"]), t])
        noise = ops.from_host(rng.normal(0, math.sqrt(lr),
                                         tuple(weight.shape)), weight)
        weight -= self.decayed(weight, grad, wd, ops) * (lr / 2)
        weight += noise


@rule("gluon", "groupadagrad")
class GroupAdaGrad(Optimizer):
    """With ``G = clip(g)``, for each row: ``h <- h + mean(G^2)``, then
    ``w <- w - lr G / sqrt(h + eps)``. Weights have two axes, and no decay:
    ValueError for others.
    """

    needs_whole = decoupled_decay = True
    arrays = ("row_history",)

    eps: float = 1e-5

    def __post_init__(self):
        super().__post_init__()
        if self.wd:
            raise ValueError(f"groupadagrad has no decay; received wd="
                             f"{self.wd!r}. Leave it out, or use 'adagrad'.")

    def create_state(self, weight, ops):
        if len(weight.shape) != 2:
            raise ValueError(
                "groupadagrad has a rate for each row of a matrix; received "
                f"a parameter of shape {tuple(weight.shape)}. Give it those "
                "with two axes, such as embeddings, and a Trainer of another "
                "optimizer the rest.")
        return {"row_history": ops.zeros_like(weight[:, :1])}

    def compute_step(self, grad, state, lr, t, ops):
        state["row_history"] += ops.mean(grad * grad, 1, True)
        return grad * lr / ops.sqrt(state["row_history"] + self.eps)

    update = _in_float32(Optimizer.update)
