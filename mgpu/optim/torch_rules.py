"""What the optimizers of `torch.optim` of PyTorch 2.13 compute.

Sources: ``torch/optim/*.py``, the ``_single_tensor_`` functions. For the
letters of the formulas see `mgpu.optimizers`; ``G = clip(g) + wd w``
throughout, unless a docstring says otherwise.
"""
from dataclasses import dataclass
from typing import ClassVar

from mgpu.optim.base import (Optimizer, adadelta_step, adam_step, adamax_step,
                             mean_square, nadam_step, rule)


@dataclass(eq=False, kw_only=True)
class _Averages(Optimizer):
    """A rule with averages of G and of its square; torch's options also under
    the names that Gluon's formulas have."""

    arrays: ClassVar[tuple[str, ...]] = ("mean", "variance")

    learning_rate: float = 0.002
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    beta1 = property(lambda self: self.betas[0])
    beta2 = property(lambda self: self.betas[1])
    epsilon = property(lambda self: self.eps)
    schedule_decay = property(lambda self: self.momentum_decay)


@rule("torch", "sgd")
class TorchSGD(Optimizer):
    """``b <- momentum b + (1 - dampening) G`` (b = G at the first update),
    then ``w <- w - lr b``, or ``w - lr (G + momentum b)`` with nesterov."""

    arrays = ("momentum",)

    learning_rate: float = 0.001
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError(
                "Nesterov momentum needs a momentum above 0 and no dampening; "
                f"received momentum={self.momentum!r}, dampening="
                f"{self.dampening!r}. Use for example momentum=0.9.")

    def compute_step(self, grad, state, lr, t, ops):
        if self.momentum:
            buffer = state["momentum"]
            buffer *= self.momentum
            buffer += grad * (1.0 if t == 1 else 1 - self.dampening)
            grad = grad + buffer * self.momentum if self.nesterov else buffer
        return grad * lr


@rule("torch", "nag")
class TorchNAG(TorchSGD):
    """torch's SGD with ``nesterov=True``, where momentum must be given:
    ``b <- momentum b + G;  w <- w - lr (G + momentum b)``."""

    dampening: ClassVar[float] = 0.0    # type: ignore[misc]
    nesterov: ClassVar[bool] = True     # type: ignore[misc]


@rule("torch", "adam")
class TorchAdam(_Averages):
    """m and v as in Gluon's `Adam`, then
    ``w <- w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)``.

    ``amsgrad=True`` puts the largest v so far in the place of v.
    """

    learning_rate: float = 0.001
    amsgrad: bool = False

    def slots(self):
        return ("mean", "variance") + ("max_variance",) * self.amsgrad

    compute_step = adam_step


@rule("torch", "adamw")
class TorchAdamW(TorchAdam):
    """``w <- (1 - lr wd) w``, then `TorchAdam` on ``clip(g)`` (Loshchilov
    and Hutter 2019)."""

    decoupled_decay = True

    wd: float = 0.01


@rule("torch", "adamax")
class TorchAdamax(_Averages):
    """``m <- beta1 m + (1 - beta1) G``, ``u <- max(beta2 u, |G| + eps)``,
    ``w <- w - lr / (1 - beta1^t) m / u``."""

    arrays = ("mean", "norm")

    compute_step = adamax_step


@rule("torch", "nadam")
class TorchNAdam(_Averages):
    """Gluon's `Nadam` with a separate product P for each parameter, kept in
    the float ``"schedule"``, and other defaults.

    ``decoupled_weight_decay=True``: ``w <- (1 - lr wd) w`` first, and the
    rest on ``clip(g)``. torch itself keeps P in its default dtype, usually
    float32; here P is double.
    """

    momentum_decay: float = 0.004
    decoupled_weight_decay: bool = False

    def create_state(self, weight, ops):
        return {**super().create_state(weight, ops), "schedule": 1.0}

    compute_step = nadam_step

    def update(self, weight, grad, state, *, lr, wd, t, ops):
        if self.decoupled_weight_decay:
            weight *= 1 - lr * wd
            wd = 0.0
        super().update(weight, grad, state, lr=lr, wd=wd, t=t, ops=ops)


@rule("torch", "rmsprop")
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

    def slots(self):
        return ("variance",) + ("mean",) * self.centered \
            + ("momentum",) * bool(self.momentum)

    def compute_step(self, grad, state, lr, t, ops):
        spread = mean_square(grad, state, self.alpha)
        step = grad / (ops.sqrt(spread) + self.eps)
        if self.momentum:
            state["momentum"] *= self.momentum
            state["momentum"] += step
            step = state["momentum"]
        return step * lr


@rule("torch", "adagrad")
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

    def compute_step(self, grad, state, lr, t, ops):
        state["history"] += grad * grad
        return grad * (lr / (1 + (t - 1) * self.lr_decay)) \
            / (ops.sqrt(state["history"]) + self.eps)


@rule("torch", "adadelta")
class TorchAdadelta(Optimizer):
    """Gluon's `AdaDelta` on G, with ``w <- w - lr d``."""

    arrays = ("variance", "delta_variance")

    learning_rate: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6

    epsilon = _Averages.epsilon

    compute_step = adadelta_step
