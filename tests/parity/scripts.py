"""Training scripts as users of Gluon and PyTorch write them, without mgpu.

Of each there are two: networks, and the functions that make a step. The
second are ports of the first, written for PyTorch, not line by line.
`test_own_step` proves that they train the same, and plants faults in the
ports by changing their text. Frameworks are imported inside functions: the
backend must load them first.
"""
import math

from nets import gluon, gluon_block, torch, torch_block

# -- 1: digits, by convolutional networks of nets.py --------------------------

def digits_gluon(net):
    from mxnet import autograd, gluon
    trainer = gluon.Trainer(net.collect_params(), "sgd", {
        "learning_rate": 0.05, "momentum": 0.9, "wd": 5e-4})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    def step(x, y):
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(x.shape[0])
        return loss
    return step, [trainer]


def digits_torch(net):
    import torch
    from torch import nn
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9,
                                weight_decay=5e-4)
    net.train()

    def step(x, y):
        optimizer.zero_grad()
        loss = criterion(net(x), y.long())
        loss.backward()
        optimizer.step()
        return loss.item()
    return step, [optimizer]


# -- 2: pictures --------------------------------------------------------------

#: updates of warm-up, and of the whole training
WARM, UPDATES = 2, 6


def block_gluon(channels, stride):
    return gluon_block(lambda nn: {
        "body": gluon(lambda nn: [
            nn.Conv2D(channels, 3, stride, 1, use_bias=False),
            nn.BatchNorm(), nn.Activation("relu"),
            nn.Conv2D(channels, 3, 1, 1, use_bias=False), nn.BatchNorm()])(),
        "shortcut": gluon(lambda nn: [
            nn.Conv2D(channels, 1, stride, use_bias=False),
            nn.BatchNorm()])()},
        lambda net, F, x: F.relu(net.body(x) + net.shortcut(x)))()


residual_gluon = gluon(lambda nn: [
    nn.Conv2D(4, 3, 1, 1, use_bias=False), nn.BatchNorm(),
    nn.Activation("relu"), block_gluon(4, 1), block_gluon(6, 2),
    nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(4)])


def pictures_gluon(net):
    from mxnet import autograd, gluon, lr_scheduler
    from mxnet import ndarray as nd
    net.hybridize()
    # no decay of batch norm and biases
    for p in net.collect_params(".*beta|.*gamma|.*bias").values():
        p.wd_mult = 0.0
    trainer = gluon.Trainer(net.collect_params(), "nag", {
        "momentum": 0.9, "wd": 1e-3, "lr_scheduler":
        lr_scheduler.CosineScheduler(
            UPDATES, base_lr=0.2, final_lr=0.0, warmup_steps=WARM,
            warmup_begin_lr=0.0)})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False)

    def smooth(y, classes=4, eta=0.1):
        return nd.one_hot(y, classes, on_value=1 - eta + eta / classes,
                          off_value=eta / classes, dtype="float64")

    def step(x, y):
        with autograd.record():
            loss = loss_of(net(x), smooth(y))
        loss.backward()
        trainer.step(x.shape[0])
        return loss
    return step, [trainer]


def block_torch(ins, channels, stride):
    return torch_block(lambda nn: {
        "body": nn.Sequential(
            nn.Conv2d(ins, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels)),
        "shortcut": nn.Sequential(
            nn.Conv2d(ins, channels, 1, stride, bias=False),
            nn.BatchNorm2d(channels))},
        lambda net, x: (net.body(x) + net.shortcut(x)).relu())()


residual_torch = torch(lambda nn: [
    nn.Conv2d(1, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
    block_torch(4, 4, 1), block_torch(4, 6, 2), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(6, 4)])


def pictures_torch(net):
    import torch
    from torch.nn import functional as F
    plain = [p for p in net.parameters() if p.ndim == 1]
    optimizer = torch.optim.SGD([
        {"params": [p for p in net.parameters() if p.ndim > 1],
         "weight_decay": 1e-3},
        {"params": plain, "weight_decay": 0.0}], lr=0.2, momentum=0.9,
        nesterov=True)

    def factor(done):
        update = done + 1       # Gluon's schedules count from 1
        if update < WARM:
            return update / WARM
        return (1 + math.cos(math.pi * (update - WARM) / (UPDATES - WARM))
                ) / 2
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def step(x, y):
        net.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y.long(), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()
    return step, [optimizer, schedule]


# -- 3: a language model ------------------------------------------------------

#: the largest norm of gradients
CLIP = 0.1


def words_gluon():
    from mxnet.gluon import nn, rnn

    class Words(nn.Block):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.embed = nn.Embedding(11, 6)
                self.drop = nn.Dropout(0.25)
                self.lstm = rnn.LSTMCell(5, input_size=6)
                self.decoder = nn.Dense(11, flatten=False, in_units=5)

        def forward(self, x, state=None):
            if state is None:
                state = self.lstm.begin_state(x.shape[0], ctx=x.context,
                                              dtype=self.embed.weight.dtype)
            out, state = self.lstm.unroll(
                x.shape[1], self.drop(self.embed(x)), state, layout="NTC",
                merge_outputs=True)
            return self.decoder(self.drop(out)), state
    return Words()


def language_gluon(net):
    from mxnet import autograd, gluon
    trainer = gluon.Trainer(net.collect_params(), "sgd",
                            {"learning_rate": 0.5})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    carried = {"state": None}

    def step(x, y):
        state = carried["state"]
        if state is not None:
            state = [s.detach() for s in state]
        with autograd.record():
            output, state = net(x, state)
            loss = loss_of(output.reshape((-1, 11)), y.reshape((-1,)))
        loss.backward()
        carried["state"] = state
        grads = [p.grad() for p in net.collect_params().values()]
        # the gradients are sums over all words
        gluon.utils.clip_global_norm(grads, CLIP * x.size)
        trainer.step(x.size)
        return loss.mean()
    return step, [trainer, carried]


def words_torch():
    from torch import nn

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.drop = nn.Dropout(0.25)
            self.lstm = nn.LSTM(6, 5, batch_first=True)
            self.decoder = nn.Linear(5, 11)

        def forward(self, x, state=None):
            out, state = self.lstm(self.drop(self.embed(x)), state)
            return self.decoder(self.drop(out)), state
    return Words()


def language_torch(net):
    import torch
    from torch.nn import functional as F
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    carried = {"state": None}

    def step(x, y):
        net.train()
        state = carried["state"]
        if state is not None:
            state = tuple(s.detach() for s in state)
        optimizer.zero_grad()
        output, state = net(x, state)
        loss = F.cross_entropy(output.reshape(-1, 11), y.reshape(-1).long())
        loss.backward()
        carried["state"] = state
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        return loss
    return step, [optimizer, carried]


# -- 4: a transformer ---------------------------------------------------------

#: numbers of a word, heads, words of a sentence
WIDTH, HEADS, LENGTH = 8, 2, 6


PARTS = ("query", "key", "value", "out")


def attention_gluon():
    def forward(net, F, x):
        q, k, v = (
            F.reshape(F.transpose(F.reshape(
                layer(x), (0, 0, HEADS, -1)), (0, 2, 1, 3)),
                (-1, 0, 0), reverse=True)
            for layer in (net.query, net.key, net.value))
        scores = F.batch_dot(q, k, transpose_b=True) \
            / math.sqrt(WIDTH // HEADS)
        mixed = F.batch_dot(net.drop(F.softmax(scores)), v)
        mixed = F.transpose(F.reshape(
            mixed, (-1, HEADS, 0, 0), reverse=True), (0, 2, 1, 3))
        return net.out(F.reshape(mixed, (0, 0, -1)))
    return gluon_block(lambda nn: {
        **{name: nn.Dense(WIDTH, flatten=False, in_units=WIDTH)
           for name in PARTS}, "drop": nn.Dropout(0.1)}, forward)()


def transform(net, F, x):
    x = net.norm1(x + net.drop(net.attention(x)))
    return net.norm2(x + net.drop(net.outer(net.inner(x))))


layer_gluon = gluon_block(lambda nn: {
    "attention": attention_gluon(), "norm1": nn.LayerNorm(in_channels=WIDTH),
    "inner": nn.Dense(16, activation="relu", flatten=False, in_units=WIDTH),
    "outer": nn.Dense(WIDTH, flatten=False, in_units=16),
    "norm2": nn.LayerNorm(in_channels=WIDTH), "drop": nn.Dropout(0.1)},
    transform)


def encode(net, F, x, place):
    x = net.layers(F.broadcast_add(net.embed(x) * math.sqrt(WIDTH), place))
    return net.classes(F.mean(x, axis=1))


encoder_gluon = gluon_block(lambda nn: {
    "embed": nn.Embedding(13, WIDTH), "place": {"shape": (1, LENGTH, WIDTH)},
    "layers": gluon(lambda nn: [layer_gluon()])(),
    "classes": nn.Dense(3, in_units=WIDTH)}, encode)


def sentences_gluon(net):
    from mxnet import autograd, gluon, lr_scheduler

    class InverseRoot(lr_scheduler.LRScheduler):
        def __call__(self, num_update):
            return self.base_lr / math.sqrt(WIDTH) * min(
                num_update ** -0.5, num_update * 3 ** -1.5)
    trainer = gluon.Trainer(net.collect_params(), "adam", {
        "learning_rate": 0.1, "beta2": 0.98, "epsilon": 1e-9,
        "lr_scheduler": InverseRoot(0.1)})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    def step(x, y):
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(len(x))
        return loss
    return step, [trainer]


def attention_torch():
    def forward(net, x):
        q, k, v = (layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
                   for layer in (net.query, net.key, net.value))
        scores = q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS)
        mixed = net.drop(scores.softmax(-1).flatten(0, 1)).unflatten(
            0, (-1, HEADS)) @ v
        return net.out(mixed.transpose(1, 2).flatten(2))
    return torch_block(lambda nn: {
        **{name: nn.Linear(WIDTH, WIDTH) for name in PARTS},
        "drop": nn.Dropout(0.1)}, forward)()


layer_torch = torch_block(lambda nn: {
    "attention": attention_torch(), "norm1": nn.LayerNorm(WIDTH),
    "inner": nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU()),
    "outer": nn.Linear(16, WIDTH), "norm2": nn.LayerNorm(WIDTH),
    "drop": nn.Dropout(0.1)}, lambda net, x: transform(net, None, x))


def encoder_torch():
    def forward(net, x):
        x = net.embed(x) * math.sqrt(WIDTH)
        return net.classes(net.layers(x + net.place).mean(1))
    from torch import zeros
    return torch_block(lambda nn: {
        "embed": nn.Embedding(13, WIDTH),
        "place": nn.Parameter(zeros(1, LENGTH, WIDTH)),
        "layers": nn.Sequential(layer_torch()),
        "classes": nn.Linear(WIDTH, 3)}, forward)()


def sentences_torch(net):
    import torch
    from torch.nn import functional as F
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, eps=1e-9,
                                 betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) ** -0.5, (done + 1) * 3 ** -1.5
                                    ) / math.sqrt(WIDTH))
    net.train()

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y.long())
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss
    return step, [optimizer, schedule]
