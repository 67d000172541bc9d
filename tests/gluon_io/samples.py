"""Files of every kind, written by MXNet, or by hand where MXNet 1.9.1 only
reads them.

A function of `PARAMS` or `STATES` takes `mxnet` and the path of a file to
write. It is called in MXNet's legacy mode, and leaves that on.
"""
import contextlib
import functools
import os
import struct
import zlib

import numpy as np

DTYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64",
          "bool")


def values(key, shape, dtype="float32"):
    """Numbers that belong to a key; floats with all that bits can say."""
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype,
                            endpoint=True)
    x = np.asarray(rng.normal(size=shape)).astype(dtype)
    if x.size > 4:
        x.flat[:4] = -0.0, np.nan, np.inf, np.finfo(dtype).smallest_subnormal
    return x


@contextlib.contextmanager
def numpy_mode(mx):
    mx.npx.set_np()
    try:
        yield
    finally:
        mx.npx.reset_np()


# -- parameters ---------------------------------------------------------------

def network(mx, prefix="net_"):
    """Two layers that share a weight, and running statistics."""
    nn = mx.gluon.nn
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        first = nn.Dense(3, in_units=3)
        net.add(first, nn.BatchNorm(in_channels=3),
                nn.Dense(3, in_units=3, params=first.params))
    net.initialize()
    for name, p in net.collect_params().items():
        p.set_data(mx.np.array(values(name, p.shape)) if mx.util.is_np_array()
                   else mx.nd.array(values(name, p.shape)))
    return net


def _network_in_numpy_mode(mx, path):
    with numpy_mode(mx):
        network(mx).save_parameters(path)


def _deduplicated(mx, path):
    network(mx).save_parameters(path, deduplicate=True)


def _exported(mx, path):
    net = network(mx)
    net.hybridize()
    net(mx.nd.ones((2, 3)))
    mx.nd.waitall()
    net.export(path)
    os.replace(path + "-0000.params", path)
    os.unlink(path + "-symbol.json")


def _checkpoint(mx, path):
    mx.model.save_checkpoint(path, 3, None, {"w": _nd(mx, "w", (2, 3))},
                             {"mean": _nd(mx, "mean", (3,))})
    os.replace(path + "-0003.params", path)


def _nd(mx, key, shape, dtype="float32"):
    return mx.nd.array(values(key, shape, dtype), dtype=dtype)


def _dtypes(mx, path):
    mx.nd.save(path, {name: _nd(mx, name, (2, 3), name) for name in DTYPES})


def _dtypes_in_numpy_mode(mx, path):
    with numpy_mode(mx):
        mx.npx.save(path, {
            f"{name}{shape}": mx.np.array(values(name, shape, name),
                                          dtype=name)
            for name in DTYPES for shape in ((), (2, 3), (0, 2))})


def _list_in_numpy_mode(mx, path):
    with numpy_mode(mx):
        mx.npx.save(path, [mx.np.array(values("x", (3,)))])


def sparse(mx):
    """By name: with values, and with none."""
    rows = mx.nd.sparse.row_sparse_array(
        (values("rows", (2, 3)), [0, 2]), shape=(4, 3))
    columns = mx.nd.sparse.csr_matrix(
        (values("columns", (3,), "float64"), [2, 0, 1], [0, 1, 1, 3]),
        shape=(3, 4), dtype="float64")
    return {"rows": rows, "columns": columns,
            "no rows": mx.nd.sparse.zeros("row_sparse", (4, 3)),
            "no columns": mx.nd.sparse.zeros("csr", (4, 3))}


PARAMS = {
    "save_parameters": lambda mx, path: network(mx).save_parameters(path),
    "save_parameters-np": _network_in_numpy_mode,
    "deduplicated": _deduplicated,
    "export": _exported,
    "collect_params": lambda mx, path: network(
        mx).collect_params().save(path),
    "save_params": lambda mx, path: network(mx).collect_params().save(
        path, strip_prefix="net_"),
    "save_checkpoint": _checkpoint,
    "nd.save": _dtypes,
    "nd.save-list": lambda mx, path: mx.nd.save(
        path, [_nd(mx, "a", (2,)), _nd(mx, "b", (1, 2, 3), "float64")]),
    "nd.save-one": lambda mx, path: mx.nd.save(path, _nd(mx, "a", (2, 2))),
    "nd.save-empty": lambda mx, path: mx.nd.save(path, {}),
    "nd.save-names": lambda mx, path: mx.nd.save(
        path, {"": _nd(mx, "a", (1,)), "größe/ñ 名": _nd(mx, "b", (2,))}),
    "npx.save": _dtypes_in_numpy_mode,
    "npx.save-list": _list_in_numpy_mode,
    "sparse": lambda mx, path: mx.nd.save(path, sparse(mx)),
}


def by_hand(version, arrays):
    """The bytes of a file of a version that MXNet 1.9.1 does not write: 1, or
    0, which has no number of a version."""
    parts = [struct.pack("<QQQ", 0x112, 0, len(arrays))]
    for x in arrays.values():
        parts += [struct.pack(f"<II{x.ndim}q", 0xF993FAC8, x.ndim, *x.shape)
                  if version else struct.pack(f"<I{x.ndim}I", x.ndim,
                                              *x.shape),
                  struct.pack("<iii", 2, 5, DTYPES.index(x.dtype.name)),
                  x.tobytes()]
    parts.append(struct.pack("<Q", len(arrays)))
    for name in arrays:
        parts.append(struct.pack("<Q", len(name.encode())) + name.encode())
    return b"".join(parts)


def old(version):
    return by_hand(version, {name: values(name, (2, 3), name)
                             for name in DTYPES[:7]})


def read_by_mxnet(mx, path):
    """What MXNet 1.9.1 loads, in the mode in which it does: a dictionary or
    a list of tuples of NumPy arrays (the values, then the indices), with the
    shape of a sparse array before them."""
    try:
        found = mx.nd.load(path)
    except mx.MXNetError as error:
        if "saved in np shape semantics" not in str(error):
            raise
        with numpy_mode(mx):
            return _plain(mx.npx.load(path))
    return _plain(found)


def _plain(found):
    if isinstance(found, dict):
        return {name: _parts(x) for name, x in found.items()}
    return [_parts(x) for x in found]


def _parts(x):
    if getattr(x, "stype", "default") == "default":
        return (x.asnumpy(),)
    indices = [x.indices] if x.stype == "row_sparse" else [x.indptr,
                                                           x.indices]
    return (x.shape, x.data.asnumpy(), *(i.asnumpy() for i in indices))


# -- trainer states -----------------------------------------------------------

OPTIMIZERS = {
    "sgd": {}, "sgd-momentum": {"momentum": 0.9}, "nag": {"momentum": 0.9},
    "adam": {}, "adamax": {}, "nadam": {}, "rmsprop": {},
    "rmsprop-centered": {"centered": True}, "adagrad": {}, "adadelta": {},
    "ftrl": {}, "signum": {"momentum": 0.9}, "ftml": {}, "dcasgd": {},
    "lamb": {}, "sgld": {}, "lars": {"momentum": 0.9}}
#: MXNet cannot update a float16 parameter with these and a copy
NO_MASTER = ("sgld",)


def schedules(mx):
    s = mx.lr_scheduler
    return {
        "factor": s.FactorScheduler(1, 0.5, base_lr=0.5),
        "multifactor": s.MultiFactorScheduler([1, 3], 0.5, base_lr=0.5),
        "poly": s.PolyScheduler(9, base_lr=0.5, warmup_steps=1),
        "cosine": s.CosineScheduler(9, base_lr=0.5)}


def trained(mx, optimizer, dtype="float32", **options):
    """A trainer after two steps; the parameter in the middle is frozen."""
    parameters = []
    for i in range(3):
        p = mx.gluon.Parameter(f"p{i}", shape=(2, 3), dtype=dtype,
                               grad_req="null" if i == 1 else "write")
        p.initialize()
        p.set_data(mx.nd.array(np.linspace(-i, 1, 6).reshape(2, 3),
                               dtype=dtype))
        parameters.append(p)
    trainer = mx.gluon.Trainer(parameters, optimizer, options, kvstore=None)
    for step in range(2):
        with mx.autograd.record():
            for i, p in enumerate(parameters[::2]):
                (p.data() * mx.nd.array(np.linspace(
                    -1 - i, step, 6).reshape(2, 3), dtype=dtype)).backward()
        trainer.step(4)
    return trainer


def _saved(name, **more):
    def save(mx, path):
        trainer = trained(mx, name.partition("-")[0], **OPTIMIZERS[name],
                          **more)
        trainer.save_states(path)
        return trainer
    return save


def _scheduled(name):
    def save(mx, path):
        trainer = trained(mx, "sgd", lr_scheduler=schedules(mx)[name])
        trainer.save_states(path)
        return trainer
    return save


def _in_numpy_mode(mx, path):
    with numpy_mode(mx):
        net = mx.gluon.nn.Dense(2, in_units=2)
        net.initialize()
        trainer = mx.gluon.Trainer(net.collect_params(), "adam")
        with mx.autograd.record():
            loss = net(mx.np.ones((1, 2))).sum()
        loss.backward()
        trainer.step(1)
        trainer.save_states(path)
        return trainer


def _of_the_user(mx, path):
    """Classes of a user's own, as a pickle names them: by their module."""
    class OwnSchedule(mx.lr_scheduler.LRScheduler):
        def __call__(self, count):
            return 0.25 / count

    class OwnOptimizer(mx.optimizer.Optimizer):
        def create_state(self, index, weight):
            return [mx.nd.zeros(weight.shape), mx.nd.ones((1,))]

        def update(self, index, weight, grad, state):
            self._update_count(index)
            state[0][:] += grad
            weight[:] -= self._get_lr(index) * grad

    for kind in (OwnSchedule, OwnOptimizer):
        kind.__qualname__ = kind.__name__
        globals()[kind.__name__] = kind
    trainer = trained(mx, OwnOptimizer(lr_scheduler=OwnSchedule(0.25)))
    trainer.save_states(path)
    return trainer


STATES = {
    **{name: _saved(name) for name in OPTIMIZERS},
    **{f"{name}-float16": _saved(name, dtype="float16", multi_precision=True)
       for name in OPTIMIZERS if name not in NO_MASTER},
    **{f"sgd-{name}": _scheduled(name) for name in
       ("factor", "multifactor", "poly", "cosine")},
    "adam-np": _in_numpy_mode, "own": _of_the_user,
}


def kept(trainer):
    """What MXNet keeps: by number, nested tuples of NumPy arrays."""
    def plain(x):
        if x is None:
            return None
        if isinstance(x, (tuple, list)):
            return tuple(map(plain, x))
        return x.asnumpy()
    return {i: plain(x) for i, x in trainer._updaters[0].states.items()}


# -- narrow networks, for an environment without MXNet ------------------------

def _net(mx):
    nn = mx.gluon.nn
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=2, use_bias=False),
                nn.BatchNorm(epsilon=2 ** -10, in_channels=4),
                nn.Activation("relu"), nn.Dense(3, in_units=64))
    return net


def _resnet(mx):
    vision = mx.gluon.model_zoo.vision
    return vision.ResNetV1(vision.BasicBlockV1, [1, 1], [4, 4, 6],
                           classes=3, thumbnail=True, prefix="resnet_")


def _lstm(mx):
    """One layer: those below the top have wrong gradients in MXNet."""
    nn = mx.gluon.nn
    net = nn.HybridSequential(prefix="lstm_")
    with net.name_scope():
        net.add(nn.Embedding(7, 4), mx.gluon.rnn.LSTM(5, layout="NTC"),
                nn.Dropout(0.0), nn.Dense(3))
    return net


def _mixer(mx):
    """In numpy mode: attention without a library, and a normalized sum."""
    nn, npx = mx.gluon.nn, mx.npx

    class Mixer(mx.gluon.HybridBlock):
        def __init__(self, **options):
            super().__init__(**options)
            with self.name_scope():
                self.query = nn.Dense(4, flatten=False)
                self.key = nn.Dense(4, flatten=False)
                self.norm = nn.BatchNorm(axis=1, epsilon=2 ** -10)
                self.out = nn.Dense(3, activation="relu")
                self.last = nn.Dense(3)

        def hybrid_forward(self, F, x):
            scores = F.np.matmul(self.query(x), F.np.swapaxes(
                self.key(x), 1, 2)) / 2.0
            mixed = F.np.matmul(F.npx.softmax(scores, axis=-1), x)
            x = self.norm(F.np.concatenate([x, F.np.tanh(mixed)], axis=2))
            return self.last(self.out(F.npx.reshape(x, (-2, -5))))

    assert npx.is_np_array()
    return Mixer(prefix="mixer_")


#: how a network is made, the shape of its input, its optimizer as in
#: `trainings`, and other options
NETWORKS = {
    "resnet": (_resnet, (4, 3, 8, 8), "sgd-momentum", {}),
    "lstm": (_lstm, (4, 6), "nag", {"words": 7}),
    "mixer": (_mixer, (4, 3, 5), "adagrad", {}),
}


def _training(mx, folder, make, shape, optimizer, **options):
    from gluon_io.trainings import Training
    return Training(folder, (functools.partial(make, mx), shape), optimizer,
                    **options)


def write_training(mx, folder):
    """A small network after 3 steps of adam with a schedule."""
    one = _training(
        mx, folder, _net, (4, 2, 6, 6), "adam", learning_rate=2 ** -8,
        lr_scheduler=mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=2 ** -8))
    one.step(3)
    one.save()


def write_networks(mx, folder):
    """Each of `NETWORKS`, and a checkpoint of a Module, after two steps; and
    what a third makes of it."""
    for name, (*given, options) in NETWORKS.items():
        with numpy_mode(mx) if name == "mixer" else contextlib.nullcontext():
            one = _training(mx, folder, *given, name=name, **options)
            one.step(2)
            one.save()
            predicted = one.net(one.array(one.x)).asnumpy()
            one.step()
            np.savez_compressed(
                folder / f"{name}-steps.npz", x=one.x, label=one.y,
                predicted=predicted,
                **{f"after:{key}": x for key, x in one.values().items()},
                **{f"gradient:{p.name}": p.grad().asnumpy()
                   for p in one.trainer._params if p.grad_req != "null"})
    _write_module(mx, str(folder / "module"))


def _of_checkpoint(mx, path, data):
    net, values, statistics = mx.model.load_checkpoint(path, 2)
    bound = net.bind(mx.cpu(), {**values, "data": data, "softmax_label":
                                mx.nd.zeros(len(data))},
                     aux_states=statistics)
    return bound.forward(is_train=False)[0].asnumpy()


def _write_module(mx, path):
    """Of symbols, with `SoftmaxOutput`, as `Module.fit` leaves it; Module
    trains in float32."""
    sym = mx.sym
    net = sym.Convolution(sym.var("data"), kernel=(3, 3), num_filter=4,
                          name="conv")
    net = sym.BatchNorm(net, fix_gamma=False, eps=2 ** -10, name="norm")
    net = sym.Pooling(sym.Activation(net, act_type="tanh"), kernel=(2, 2),
                      stride=(2, 2), pool_type="max")
    net = sym.FullyConnected(sym.flatten(net), num_hidden=3, name="dense")
    net = sym.SoftmaxOutput(net, sym.var("softmax_label"), name="softmax")
    rng = np.random.default_rng(5)
    x, label = rng.normal(size=(4, 1, 8, 8)), rng.integers(0, 3, 4)
    batch = mx.io.DataBatch([mx.nd.array(x)], [mx.nd.array(label)])
    module = mx.mod.Module(net)
    module.bind([("data", x.shape)], [("softmax_label", label.shape)])
    mx.random.seed(5)
    module.init_params(mx.init.Normal(0.5))
    module.init_optimizer(kvstore=None, optimizer="sgd", optimizer_params={
        "learning_rate": 0.25, "momentum": 0.5, "rescale_grad": 0.25})
    for step in range(3):
        if step == 2:
            mx.nd.waitall()     # without it MXNet copies old statistics
            module.save_checkpoint(path, 2, save_optimizer_states=True)
            predicted = _of_checkpoint(mx, path, batch.data[0])
        module.forward_backward(batch)
        module.update()
    mx.nd.waitall()
    values, statistics = module.get_params()
    gradients = dict(zip(module._param_names,
                         module._exec_group.grad_arrays))
    np.savez_compressed(path + "-steps.npz", x=x, label=label,
                        predicted=predicted, **{
        f"after:{name}": p.asnumpy() for name, p in (values | statistics
                                                     ).items()}, **{
        f"gradient:{name}": gradients[name][0].asnumpy() for name in values})
