"""Small networks in pairs: the same layers in Gluon and in torch.

They are written here, not by `mgpu`, so that a test compares `mgpu` with
something that it did not write itself. Frameworks are imported inside
functions: the backend must load them first.
"""
import numpy as np

import mgpu


def gluon(make):
    """A function that makes a Gluon network from ``make(nn) -> layers``."""
    def net():
        with mgpu.using_backend("mxnet"):
            from mxnet.gluon import nn
        stack = nn.HybridSequential()
        stack.add(*make(nn))
        return stack
    return net


def torch(make, seed=None):
    """A function that makes a torch network from ``make(nn) -> layers``: not
    Gluon's numbers, and those of `seed` if there is one."""
    def net():
        import torch
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            return torch.nn.Sequential(*make(torch.nn))
    return net


# -- pairs --------------------------------------------------------------------

def rows_gluon():
    """Rows of 6 numbers in 3 classes."""
    return gluon(lambda nn: [
        nn.Dense(8, in_units=6), nn.BatchNorm(in_channels=8),
        nn.Activation("relu"), nn.Dropout(0.2), nn.Dense(3, in_units=8)])()


def rows_torch():
    return torch(lambda nn: [
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(8, 3)])()


def two_convs_gluon(dropout=0.5, scale=True):
    """Images of shape (1, 8, 8), 3 classes."""
    return gluon(lambda nn: [
        nn.Conv2D(4, 3, in_channels=1),
        nn.BatchNorm(in_channels=4, scale=scale), nn.Activation("relu"),
        nn.Dropout(dropout), nn.Conv2D(4, 3, in_channels=4),
        nn.MaxPool2D(2, 2), nn.Flatten(), nn.Dense(3, in_units=16)])()


def two_convs_torch(dropout=0.5, eps=1e-5, pool=None):
    return torch(lambda nn: [
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, eps), nn.ReLU(),
        nn.Dropout(dropout), nn.Conv2d(4, 4, 3), pool or nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16, 3)])()


def conv_gluon(batch_norm=True, dropout=0.5, channels=1):
    """Images of shape (channels, 6, 6), 3 classes: convolution, batch norm or
    tanh, ReLU, dropout, dense."""
    return gluon(lambda nn: [
        nn.Conv2D(3, 3, in_channels=channels), nn.BatchNorm(in_channels=3)
        if batch_norm else nn.Activation("tanh"), nn.Activation("relu"),
        nn.Dropout(dropout), nn.Flatten(), nn.Dense(3, in_units=48)])()


def conv_torch(eps=1e-5, batch_norm=True, dropout=0.5, channels=1):
    return torch(lambda nn: [
        nn.Conv2d(channels, 3, 3), nn.BatchNorm2d(3, eps) if batch_norm
        else nn.Tanh(), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(),
        nn.Linear(48, 3)], seed=0)()


def bricks(engine):
    """The base class of a backend's networks, and its dense layer of
    (inputs, outputs)."""
    if engine.name == "mxnet":
        from mxnet.gluon import Block, nn
        return Block, lambda n_in, n_out: nn.Dense(n_out, in_units=n_in)
    from torch import nn
    return nn.Module, nn.Linear


def gated(engine):
    """Rows of 6 numbers in 3 classes: a layer `body`, then the layer `left` or
    `right`, by the sign of the first number of the first row."""
    base, dense = bricks(engine)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.body = dense(6, 3)
            self.left, self.right = dense(3, 3), dense(3, 3)

        def forward(self, x):
            y = self.body(x)
            return self.left(y) if mgpu.to_numpy(x)[0, 0] < 0 \
                else self.right(y)
    return Net()


def dense_norm(engine, epsilon=1e-5, columns=5, units=8):
    """Rows of so many numbers in 3 classes: dense, batch norm, dense."""
    if engine == "mxnet":
        return gluon(lambda nn: [
            nn.Dense(units, in_units=columns), nn.BatchNorm(
                in_channels=units, epsilon=epsilon),
            nn.Dense(3, in_units=units)])()
    return torch(lambda nn: [
        nn.Linear(columns, units), nn.BatchNorm1d(units, epsilon),
        nn.Linear(units, 3)])()


# -- networks of named parts --------------------------------------------------

def torch_block(parts, forward):
    """A function that makes a torch network: ``parts(nn)`` are its layers by
    name, ``forward(net, x)`` is what it computes."""
    def make():
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                for name, layer in parts(nn).items():
                    setattr(self, name, layer)

            def forward(self, x):
                return forward(self, x)
        return Net()
    return make


def gluon_block(parts, forward):
    """The same in Gluon; ``forward(net, F, x)``. A part may be an array, which
    becomes a constant, or the options of a parameter: `forward` gets their
    values by name."""
    def make():
        with mgpu.using_backend("mxnet"):
            from mxnet import nd
            from mxnet.gluon import nn

        class Net(nn.HybridBlock):
            def __init__(self):
                super().__init__()
                for name, part in parts(nn).items():
                    if isinstance(part, np.ndarray):
                        part = self.params.get_constant(
                            name, nd.array(part, dtype=part.dtype))
                    elif isinstance(part, dict):
                        part = self.params.get(name, **part)
                    setattr(self, name, part)

            def hybrid_forward(self, F, x, **values):
                return forward(self, F, x, **values)
        return Net()
    return make


def torch_layer(function):
    """A layer of torch without parameters: ``function(x)``."""
    return torch_block(lambda nn: {}, lambda net, x: function(x))()


def functional_norm(columns):
    """A torch module that normalizes by ``F.batch_norm`` of its own."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(columns))
            self.register_buffer("var", torch.ones(columns))

        def forward(self, x):
            return nn.functional.batch_norm(x, self.mean, self.var,
                                            training=self.training)
    return Net()


def two_dense(*between):
    """In torch, for images of shape (1, 8, 8), 3 classes: flatten, dense,
    `between`, dense."""
    return torch(lambda nn: [nn.Flatten(), nn.Linear(64, 5), *between,
                             nn.Linear(5, 3)])()


# -- pairs of any size, with the same parameters, names and order -------------

def mlp(backend, units=(6, 5, 3), deferred=False):
    """Dense layers with ReLU between them: a native network of `backend`
    without values from `mgpu`; ``units[0]`` is the number of inputs.

    Both backends have the same parameters, names and order: (out, in) weights
    and biases. ``deferred=True`` leaves the numbers of inputs to
    the first forward pass. Works with both array families of MXNet.
    """
    pairs = list(zip(units, units[1:]))
    if backend.name == "mxnet":
        from mxnet.gluon import nn
        net = nn.HybridSequential()
        for i, (n_in, n_out) in enumerate(pairs):
            if i:
                net.add(nn.Activation("relu"))
            net.add(nn.Dense(n_out, in_units=0 if deferred else n_in))
        return net
    from torch import nn
    layers = []
    for i, (n_in, n_out) in enumerate(pairs):
        if i:
            layers.append(nn.ReLU())
        layers.append(nn.LazyLinear(n_out) if deferred
                      else nn.Linear(n_in, n_out))
    return nn.Sequential(*layers)


def convnet(backend, channels=2, classes=3, batch_norm=True, deferred=False):
    """Convolution, batch norm, ReLU, pooling, convolution, batch norm, ReLU,
    mean over the image, dense: a native network of `backend` for images
    (n, `channels`, h, w) with h and w of 4 or more.

    The same parameters, names and order on both backends, then the running
    statistics. Works with both array families of MXNet.
    """
    if backend.name == "mxnet":
        from mxnet.gluon import nn
        net = nn.HybridSequential()
        for n_in, n_out in ((channels, 4), (4, 5)):
            net.add(nn.Conv2D(n_out, 3, padding=1,
                              in_channels=0 if deferred else n_in))
            if batch_norm:
                net.add(nn.BatchNorm(in_channels=0 if deferred else n_out))
            net.add(nn.Activation("relu"))
            if n_out == 4:
                net.add(nn.AvgPool2D(2))
        net.add(nn.GlobalAvgPool2D(), nn.Flatten(),
                nn.Dense(classes, in_units=0 if deferred else 5))
        return net
    from torch import nn
    layers = []
    for n_in, n_out in ((channels, 4), (4, 5)):
        layers.append(nn.LazyConv2d(n_out, 3, padding=1) if deferred
                      else nn.Conv2d(n_in, n_out, 3, padding=1))
        if batch_norm:
            layers.append(nn.LazyBatchNorm2d() if deferred
                          else nn.BatchNorm2d(n_out))
        layers.append(nn.ReLU())
        if n_out == 4:
            layers.append(nn.AvgPool2d(2))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.LazyLinear(classes) if deferred else nn.Linear(5, classes))


def branched(backend, count=3, unused=False):
    """For images (n, 1, h, w) in 10 classes: `count` branches of
    convolution and batch norm, of which the last has two of both; a dense
    layer of their sum. `unused`: the output is a pair, of the scores and of
    the first branch, on which the scores do not depend."""
    if backend.name == "mxnet":
        from mxnet.gluon import nn
        Base, head = nn.HybridBlock, [nn.GlobalAvgPool2D(), nn.Flatten(),
                                      nn.Dense(10, in_units=4)]

        def stack(*layers):
            found = nn.HybridSequential()
            found.add(*layers)
            return found

        def conv(n_in, n_out):
            return nn.Conv2D(n_out, 3, padding=1, in_channels=n_in)

        def norm(n):
            return nn.BatchNorm(in_channels=n)
    else:
        from torch import nn
        Base, stack, norm = nn.Module, nn.Sequential, nn.BatchNorm2d
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)]

        def conv(n_in, n_out):
            return nn.Conv2d(n_in, n_out, 3, padding=1)

    class Branched(Base):
        def __init__(self):
            super().__init__()
            for i in range(count):
                own = [conv(1, 4), norm(4)]
                more = [conv(4, 4), norm(4)] if i == count - 1 else []
                setattr(self, f"branch{i}", stack(*own, *more))
            self.head = stack(*head)

        def forward(self, x):
            every = [getattr(self, f"branch{i}")(x) for i in range(count)]
            if unused:
                return self.head(every[1] + every[2]), every[0]
            return self.head(sum(every[1:], every[0]))
    return Branched()


# -- torch networks of the tests of hooks, modes and draws --------------------

def perceptron():
    """Rows of 6 numbers to 4, float64."""
    return torch(lambda nn: [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)],
                 seed=0)().double()


def normalized():
    return torch(lambda nn: [nn.Linear(6, 4), nn.BatchNorm1d(4),
                             nn.Linear(4, 4)], seed=0)().double()


def plain_or_replicated(net, devices=None, steps=2, prepare=None):
    """The parameters by name after steps of SGD: of mgpu on `devices`, or of
    plain torch. ``prepare(net)`` is called when the training has begun."""
    import torch
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 6)), rng.normal(size=(12, 4))
    if devices:
        replicas = mgpu.initialize(net, devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if prepare is not None:
        prepare(net)
    for _ in range(steps):
        if devices:
            mgpu.train_batch(X, y, replicas, mgpu.losses.L2Loss(), trainer)
            replicas.check_equal()
        else:
            optimizer.zero_grad()
            (net(torch.from_numpy(X)) - torch.from_numpy(y)).square().mean(
                1).sum().div(2 * len(X)).backward()
            optimizer.step()
    return {name: p.detach().numpy().copy()
            for name, p in net.named_parameters()}


def trains_as_plain(make, devices, prepare=None, steps=2):
    """Asserts it of the networks that ``make()`` makes."""
    plain, found = (plain_or_replicated(make(), where, steps, prepare)
                    for where in (None, devices))
    assert plain.keys() == found.keys()
    for name, value in plain.items():
        assert np.abs(found[name] - value).max() < 1e-12, name


# -- training them, and their values ------------------------------------------

def shards_of(x, replicas):
    return mgpu.split_and_load(x, replicas.devices, even_split=False)


def train(replicas, x, steps=1, **options):
    """A few steps on the sum of squares of the outputs."""
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125,
                                             **options})
    for _ in range(steps):
        with mgpu.record():
            losses = [(out * out).reshape((len(out), -1)).sum(1)
                      for out in replicas(shards_of(x, replicas))
                      if out is not None]
        mgpu.backward(losses)
        trainer.step(len(x))


def on_each(replicas):
    """Name -> the values on every device, as NumPy arrays."""
    return {p.name: [mgpu.to_numpy(x) for x in p.list_data()]
            for p in (*replicas.params(), *replicas.statistics())}


def with_values(engine, net, seed=1):
    """Give a native network values of its own, by the backend's own means."""
    rng = np.random.default_rng(seed)
    if engine.name == "mxnet":
        net.initialize()
        for p in net.collect_params().values():
            p.set_data(engine.put(
                rng.uniform(1, 9, p.shape).astype("float32"), mgpu.cpu(0)))
    else:
        for tensor in net.state_dict().values():
            tensor.copy_(engine.put(np.array(
                rng.uniform(1, 9, tensor.shape)), mgpu.cpu(0)))
    return net


def native_values(engine, net):
    """Name -> value, as the framework itself has them."""
    if engine.name == "mxnet":
        return {name: p.data(p.list_ctx()[0]).asnumpy() for name, p
                in net._collect_params_with_prefix().items()}
    return {name: engine.to_numpy(t) for name, t in net.state_dict().items()}


def several_inputs(engine, forward, columns=(6, 3)):
    """A network whose forward is ``forward(dense layer, *inputs)``."""
    base, dense = bricks(engine)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.dense = dense(*columns)

        def forward(self, *inputs):
            return forward(self.dense, *inputs)
    return Net()


def sequential(engine, layers):
    if engine.name == "mxnet":
        from mxnet.gluon.nn import Sequential
        net = Sequential()
        net.add(*layers)
        return net
    from torch.nn import Sequential
    return Sequential(*layers)


def dense_pair(engine, tie):
    """Two dense layers (4, 4) that share weight and bias, or not."""
    if engine.name == "mxnet":
        from mxnet.gluon import nn
        net = nn.HybridSequential()
        first = nn.Dense(4, in_units=4)
        net.add(first, nn.Activation("relu"), nn.Dense(
            4, in_units=4, params=first.params if tie else None))
        return net
    from torch import nn
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    if tie:
        net[2].weight, net[2].bias = net[0].weight, net[0].bias
    return net
