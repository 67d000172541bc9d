"""The update rules as formulas in NumPy, for `tests/oracle` and for
`test_optimizers.py`.

Written from the documentation and kernels of MXNet and PyTorch and from the
papers, not from mgpu.optimizers. `w` is a weight, `g` its gradient, `s` the
memory of that weight, `t` the number of the update, `o` the options, `f` what
the library does to a scalar (float32, in MXNet's kernels), and `clip` limits
each element. ``s["shared"]`` is common to all weights.
"""
import numpy as np


def rule(semantics, name):
    """The function called ``gluon_sgd``, and so on."""
    return globals()[f"{semantics}_{name}"]


def _memory(s, *names):
    return [s.get(name, 0.0) for name in names]


def gluon_sgd(w, g, s, lr, wd, t, o, f, clip):
    mu = o.get("momentum", 0.0)
    s["v"] = f(mu) * s.get("v", 0.0) - f(lr) * (clip(g) + f(wd) * w)
    return w + s["v"]


def gluon_nag(w, g, s, lr, wd, t, o, f, clip):
    mu, lr, wd = f(o.get("momentum", 0.0)), f(lr), f(wd)
    if not mu:
        return w - lr * (clip(g) + wd * w)
    v = mu * s.get("v", 0.0)
    new = w - v + (mu + 1) * (v - lr * (clip(g) + wd * w))
    s["v"] = v - lr * (clip(g) + wd * new)
    return new


def _adam_step(G, s, lr, t, o, f):
    b1, b2 = o.get("beta1", 0.9), o.get("beta2", 0.999)
    rate = lr * np.sqrt(1 - b2 ** t) / (1 - b1 ** t)
    m, v = _memory(s, "m", "v")
    s["m"] = f(b1) * m + (1 - f(b1)) * G
    s["v"] = f(b2) * v + (1 - f(b2)) * G ** 2
    return f(rate) * s["m"] / (np.sqrt(s["v"]) + f(o.get("epsilon", 1e-8)))


def gluon_adam(w, g, s, lr, wd, t, o, f, clip):
    return w - _adam_step(clip(g + f(wd) * w), s, lr, t, o, f)


def gluon_adamw(w, g, s, lr, wd, t, o, f, clip):
    return w - f(lr) * (_adam_step(clip(g), s, 1.0, t, o, f) + f(wd) * w)


def gluon_adamax(w, g, s, lr, wd, t, o, f, clip):
    b1, b2 = o.get("beta1", 0.9), o.get("beta2", 0.999)
    G = clip(g + wd * w)
    m, u = _memory(s, "m", "u")
    s["m"], s["u"] = b1 * m + (1 - b1) * G, np.maximum(b2 * u, abs(G))
    return w - lr / (1 - b1 ** t) * s["m"] / s["u"]


def gluon_nadam(w, g, s, lr, wd, t, o, f, clip):
    b1, b2 = o.get("beta1", 0.9), o.get("beta2", 0.999)
    decay = o.get("schedule_decay", 0.004)
    now, later = (b1 * (1 - 0.5 * 0.96 ** (i * decay)) for i in (t, t + 1))
    shared = s["shared"]
    P = shared["P"] = shared.get("P", 1.0) * now
    G = clip(g + wd * w)
    m, v = _memory(s, "m", "v")
    s["m"], s["v"] = b1 * m + (1 - b1) * G, b2 * v + (1 - b2) * G ** 2
    M = (1 - now) * G / (1 - P) + later * s["m"] / (1 - P * later)
    root = np.sqrt(s["v"] / (1 - b2 ** t))
    return w - lr * M / (root + o.get("epsilon", 1e-8))


def gluon_rmsprop(w, g, s, lr, wd, t, o, f, clip):
    g1, g2 = o.get("gamma1", 0.9), o.get("gamma2", 0.9)
    epsilon, limit = o.get("epsilon", 1e-8), o.get("clip_weights", np.inf)
    G = clip(g + wd * w)
    n, a, d = _memory(s, "n", "a", "d")
    s["n"] = g1 * n + (1 - g1) * G ** 2
    if o.get("centered"):
        s["a"] = g1 * a + (1 - g1) * G
        s["d"] = g2 * d - lr * G / np.sqrt(s["n"] - s["a"] ** 2 + epsilon)
        w = w + s["d"]
    else:
        w = w - lr * G / np.sqrt(s["n"] + epsilon)
    return np.clip(w, -limit, limit)


def gluon_adagrad(w, g, s, lr, wd, t, o, f, clip):
    s["h"] = s.get("h", 0.0) + clip(g) ** 2
    return w - lr * (clip(g) / np.sqrt(s["h"] + o.get("eps", 1e-7)) + wd * w)


def gluon_adadelta(w, g, s, lr, wd, t, o, f, clip):
    rho, e = o.get("rho", 0.9), o.get("epsilon", 1e-5)
    a, b = _memory(s, "a", "b")
    s["a"] = rho * a + (1 - rho) * clip(g) ** 2
    d = np.sqrt(b + e) / np.sqrt(s["a"] + e) * clip(g)
    s["b"] = rho * b + (1 - rho) * d ** 2
    return w - d - wd * w


def gluon_ftrl(w, g, s, lr, wd, t, o, f, clip):
    l1, beta, G = o.get("lamda1", 0.01), o.get("beta", 1.0), clip(g)
    z, n = _memory(s, "z", "n")
    s["z"] = z + G - (np.sqrt(n + G ** 2) - np.sqrt(n)) * w / lr
    s["n"] = n + G ** 2
    return (np.sign(s["z"]) * l1 - s["z"]) * (abs(s["z"]) > l1) \
        / ((beta + np.sqrt(s["n"])) / lr + wd)


def gluon_signum(w, g, s, lr, wd, t, o, f, clip):
    mu, lr, wd = f(o.get("momentum", 0.9)), f(lr), f(wd)
    if not mu:
        return (1 - lr * wd) * w - lr * np.sign(g)
    s["m"] = mu * s.get("m", 0.0) + (1 - mu) * (clip(g) + wd * w)
    return (1 - lr * f(o.get("wd_lh", 0.0))) * w - lr * np.sign(s["m"])


def _length(x):
    return np.sqrt((x * x).sum())


def gluon_lamb(w, g, s, lr, wd, t, o, f, clip):
    b1, b2 = f(o.get("beta1", 0.9)), f(o.get("beta2", 0.999))
    g, lr, wd = clip(g), f(lr), f(wd)
    s["m"] = b1 * s.get("m", 0.0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * g * g
    fix = o.get("bias_correction", True)
    m, v = (s["m"] / (1 - b1 ** t), s["v"] / (1 - b2 ** t)) if fix \
        else (s["m"], s["v"])
    step = m / (np.sqrt(v) + f(o.get("epsilon", 1e-6))) + wd * w
    size = min(max(_length(w), o.get("lower_bound", 0.0)),
               o.get("upper_bound", np.inf))
    ratio = size / _length(step) if size and _length(step) else 1.0
    return w - lr * ratio * step


def gluon_lars(w, g, s, lr, wd, t, o, f, clip):
    lr, wd, size, length = f(lr), f(wd), _length(w), _length(g)
    if size and length:
        lr = lr * o.get("eta", 0.001) * size / (
            length + wd * size + f(o.get("eps", 0.0)))
    s["v"] = f(o.get("momentum", 0.0)) * s.get("v", 0.0) \
        - lr * (clip(g) + wd * w)
    return w + s["v"]


def gluon_ftml(w, g, s, lr, wd, t, o, f, clip):
    b1, b2 = f(o.get("beta1", 0.6)), f(o.get("beta2", 0.999))
    g = clip(g + f(wd) * w)
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * g * g
    d = (1 - b1 ** t) / f(lr) * (np.sqrt(s["v"] / (1 - b2 ** t))
                                 + f(o.get("epsilon", 1e-8)))
    s["z"] = b1 * s.get("z", 0.0) + (1 - b1) * g \
        - (d - b1 * s.get("d", 0.0)) * w
    s["d"] = d
    return -s["z"] / d


def gluon_dcasgd(w, g, s, lr, wd, t, o, f, clip):
    g, before = clip(g), s.get("w", w)
    s["w"] = w
    return w - lr * (g + wd * w + o.get("lamda", 0.04) * g * g * (w - before))


def torch_sgd(w, g, s, lr, wd, t, o, f, clip):
    mu, G = o.get("momentum", 0.0), clip(g) + wd * w
    s["b"] = G if t == 1 else mu * s["b"] + (1 - o.get("dampening", 0.0)) * G
    if not mu:
        return w - lr * G
    return w - lr * (G + mu * s["b"] if o.get("nesterov") else s["b"])


def torch_nag(w, g, s, lr, wd, t, o, f, clip):
    return torch_sgd(w, g, s, lr, wd, t, {**o, "nesterov": True}, f, clip)


def torch_adam(w, g, s, lr, wd, t, o, f, clip, decoupled=False):
    b1, b2 = o.get("betas", (0.9, 0.999))
    G = clip(g) + (0.0 if decoupled else wd) * w
    w = w - decoupled * lr * wd * w
    m, v, top = _memory(s, "m", "v", "top")
    s["m"], s["v"] = b1 * m + (1 - b1) * G, b2 * v + (1 - b2) * G ** 2
    s["top"] = np.maximum(top, s["v"])
    v = s["top"] if o.get("amsgrad") else s["v"]
    return w - lr * s["m"] / (1 - b1 ** t) \
        / (np.sqrt(v / (1 - b2 ** t)) + o.get("eps", 1e-8))


def torch_adamw(*args):
    return torch_adam(*args, decoupled=True)


def torch_adamax(w, g, s, lr, wd, t, o, f, clip):
    (b1, b2), G = o.get("betas", (0.9, 0.999)), clip(g) + wd * w
    m, u = _memory(s, "m", "u")
    s["m"] = b1 * m + (1 - b1) * G
    s["u"] = np.maximum(b2 * u, abs(G) + o.get("eps", 1e-8))
    return w - lr / (1 - b1 ** t) * s["m"] / s["u"]


def torch_nadam(w, g, s, lr, wd, t, o, f, clip):
    b1, b2 = o.get("betas", (0.9, 0.999))
    options = {"beta1": b1, "beta2": b2, "epsilon": o.get("eps", 1e-8),
               "schedule_decay": o.get("momentum_decay", 0.004)}
    s["shared"] = s.setdefault("own", {})       # no P in common
    g = clip(g)
    if o.get("decoupled_weight_decay"):
        w, wd = w - lr * wd * w, 0.0
    return gluon_nadam(w, g + wd * w, s, lr, 0.0, t, options, f, lambda x: x)


def torch_rmsprop(w, g, s, lr, wd, t, o, f, clip):
    alpha, mu, G = o.get("alpha", 0.99), o.get("momentum", 0.0), \
        clip(g) + wd * w
    v, a, b = _memory(s, "v", "a", "b")
    s["v"], s["a"] = alpha * v + (1 - alpha) * G ** 2, \
        alpha * a + (1 - alpha) * G
    spread = s["v"] - s["a"] ** 2 if o.get("centered") else s["v"]
    s["b"] = mu * b + G / (np.sqrt(spread) + o.get("eps", 1e-8))
    return w - lr * s["b"]


def torch_adagrad(w, g, s, lr, wd, t, o, f, clip):
    G = clip(g) + wd * w
    s["h"] = s.get("h", o.get("initial_accumulator_value", 0.0)) + G ** 2
    return w - lr / (1 + (t - 1) * o.get("lr_decay", 0.0)) * G \
        / (np.sqrt(s["h"]) + o.get("eps", 1e-10))


def torch_adadelta(w, g, s, lr, wd, t, o, f, clip):
    options = {"rho": o.get("rho", 0.9), "epsilon": o.get("eps", 1e-6)}
    d = w - gluon_adadelta(w, clip(g) + wd * w, s, lr, 0.0, t, options, f,
                           lambda x: x)
    return w - lr * d


DEFAULT_LR = {
    "gluon": {"sgd": 0.01, "nag": 0.01, "adam": 0.001, "adamw": 0.001,
              "adamax": 0.002, "nadam": 0.001, "rmsprop": 0.001,
              "adagrad": 0.01, "adadelta": 0.01, "ftrl": 0.1, "signum": 0.01,
              "lamb": 0.001, "lars": 0.01, "ftml": 0.01, "dcasgd": 0.01},
    "torch": {"sgd": 0.001, "nag": 0.001, "adam": 0.001, "adamw": 0.001,
              "adamax": 0.002, "nadam": 0.002, "rmsprop": 0.01,
              "adagrad": 0.01, "adadelta": 1.0}}


def base_rates(semantics, name, options):
    """The rate and the decay, by default those of the documentation."""
    lr = options.get("learning_rate", options.get("lr"))
    wd = options.get("wd", options.get("weight_decay"))
    if lr is None:
        lr = DEFAULT_LR[semantics][name]
    if wd is None:
        wd = 0.01 if (semantics, name) == ("torch", "adamw") else 0.0
    return lr, wd
