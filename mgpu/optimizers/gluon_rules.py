"""Gluon's optimisers: what those of MXNet 1.9.1 compute on one device.

Sources: ``python/mxnet/optimizer/optimizer.py`` and the kernels that it calls
(``src/operator/optimizer_op-inl.h``), all checked by running them. For the
letters of the formulas see `mgpu.optimizers`.
"""
import math

from mgpu.backends.base import Array, Ops
from mgpu.optimizers.base import (Optimizer, State, adadelta_step, limited,
                                  move_average, nadam_momentum, nadam_update,
                                  rule)

#: the families whose kernels in MXNet get their numbers as float32
COMPILED = ("sgd", "nag", "adam", "rmsprop", "ftrl", "signum")


@rule("gluon", "sgd")
class SGD(Optimizer):
    """``v <- momentum v - lr (clip(g) + wd w);  w <- w + v``.

    The rate is inside the velocity v: after a change of rate, old steps keep
    their old size (torch rescales them).
    """

    rate_in_velocity = True

    momentum: float = 0.0

    def slots(self):
        return ("momentum",) if self.momentum else ()

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


@rule("gluon", "adam")
class Adam(Optimizer):
    """With ``G = clip(g + wd w)``: the averages
    ``m <- beta1 m + (1 - beta1) G`` and ``v <- beta2 v + (1 - beta2) G^2``,
    then ``w <- w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) +
    epsilon)``.

    Kingma and Ba 2015, the variant of the end of section 2: epsilon is
    outside the bias correction, so it counts for more in early steps than
    torch's (31.6 times at t = 1).
    """

    clips_before_decay = False
    arrays = ("mean", "variance")

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def _step(self, grad: Array, state: State, lr: float, t: int,
              ops: Ops) -> Array:
        """Move the averages by G = grad; the step that the weight loses."""
        mean, variance = state["mean"], state["variance"]
        move_average(mean, grad, self.beta1)
        move_average(variance, grad * grad, self.beta2)
        lr *= math.sqrt(1 - self.beta2 ** t) / (1 - self.beta1 ** t)
        return mean * lr / (ops.sqrt(variance) + self.epsilon)

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self.decayed(weight, grad, wd, ops)
        weight -= self._step(grad, state, lr, t, ops)


@rule("gluon", "adamw")
class AdamW(Adam):
    """Adam's step on ``clip(g)``, and ``lr wd w`` off the same w.

    Gluon 1.9.1 has the operator `mx.nd.contrib.adamw_update` and no
    optimiser that calls it. The operator computes ``w - eta (lr m / (sqrt(v)
    + epsilon) + wd w)``; here its eta is the learning rate and its lr the
    bias correction ``sqrt(1 - beta2^t) / (1 - beta1^t)``, so that the decay
    is that of Loshchilov and Hutter 2019 and of torch's AdamW. wd is 0
    unless given, as in all of Gluon; torch's default is 0.01.
    """

    clips_before_decay = decoupled_decay = True

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        step = self._step(self.clipped(grad, ops), state, lr, t, ops)
        if wd:
            step += weight * (lr * wd)
        weight -= step


@rule("gluon", "adamax")
class Adamax(Optimizer):
    """With ``G = clip(g + wd w)``: ``m <- beta1 m + (1 - beta1) G``,
    ``u <- max(beta2 u, |G|)``, ``w <- w - lr / (1 - beta1^t) m / u``.

    There is no epsilon, as in Gluon: an element whose gradients have all
    been exactly 0 so far becomes NaN (0 / 0). Torch's rule does not.
    """

    clips_before_decay = False
    arrays = ("mean", "norm")

    learning_rate: float = 0.002
    beta1: float = 0.9
    beta2: float = 0.999

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        mean, norm = state["mean"], state["norm"]
        grad = self.decayed(weight, grad, wd, ops)
        move_average(mean, grad, self.beta1)
        norm[:] = ops.maximum(norm * self.beta2, ops.abs(grad))
        weight -= mean * (lr / (1 - self.beta1 ** t)) / norm


@rule("gluon", "nadam")
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
    arrays = ("mean", "variance")

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    schedule_decay: float = 0.004

    def create_state(self, weight, ops):
        return {**super().create_state(weight, ops), "schedule": 1.0}

    def begin_step(self, states, counts):
        # P only falls and each state has its value at that parameter's last
        # update: the common P is the smallest.
        product = min((state["schedule"] for state in states), default=1.0)
        for state, t in zip(states, counts):
            if t is not None:
                state["schedule"] = product
                product *= nadam_momentum(self.beta1, self.schedule_decay,
                                          abs(t))
                if t < 0:       # no update follows that would move it
                    state["schedule"] = product

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self.decayed(weight, grad, wd, ops)
        nadam_update(weight, grad, state, lr, t, ops, self.beta1, self.beta2,
                     self.epsilon, self.schedule_decay)


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

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self.decayed(weight, grad, wd, ops)
        spread = state["variance"]
        move_average(spread, grad * grad, self.gamma1)
        if self.centered:
            mean, delta = state["mean"], state["delta"]
            move_average(mean, grad, self.gamma1)
            spread = spread - mean * mean
            delta *= self.gamma2
        step = grad * lr / ops.sqrt(spread + self.epsilon)
        if self.centered:
            delta -= step
            weight += delta
        else:
            weight -= step
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

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self.clipped(grad, ops)
        history = state["history"]
        history += grad * grad
        step = grad / ops.sqrt(history + self.eps)
        if wd:
            step += weight * wd
        weight -= step * lr


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

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        grad = self.clipped(grad, ops)
        step = adadelta_step(grad, state, ops, self.rho, self.epsilon)
        if wd:
            step += weight * wd
        weight -= step


@rule("gluon", "ftrl")
class Ftrl(Optimizer):
    """Follow the regularised leader (McMahan et al. 2013).

    With ``G = clip(g)``::

        z <- z + G - (sqrt(n + G^2) - sqrt(n)) w / lr
        n <- n + G^2
        w <- -sign(z) max(|z| - lamda1, 0) / ((beta + sqrt(n)) / lr + wd)

    The rate divides, so it must be above 0. The first update forgets the
    initial weight but for the term with w, as in Gluon.
    """

    decoupled_decay = True
    arrays = ("z", "n")

    learning_rate: float = 0.1
    lamda1: float = 0.01
    beta: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        self._refuse_zero(self.learning_rate)

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        self._refuse_zero(lr)
        grad = self.clipped(grad, ops)
        z, n = state["z"], state["n"]
        root = ops.sqrt(n)
        n += grad * grad
        new_root = ops.sqrt(n)
        z += grad - (new_root - root) * weight / lr
        weight[:] = (limited(z, self.lamda1, ops) - z) \
            / ((new_root + self.beta) / lr + wd)

    @staticmethod
    def _refuse_zero(lr: float) -> None:
        if not lr > 0:
            raise ValueError("ftrl divides by the learning rate, which must "
                             f"be above 0; received {lr!r}. To keep a "
                             "parameter as it is, freeze it.")


@rule("gluon", "signum")
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

    def slots(self):
        return ("momentum",) if self.momentum else ()

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        if self.momentum:
            grad = self.decayed(weight, grad, wd, ops)
            move_average(state["momentum"], grad, self.momentum)
            grad, wd = state["momentum"], self.wd_lh
        if wd:
            weight *= 1 - lr * wd
        weight -= ops.sign(grad) * lr
