"""Networks that add tables of their own to the input, in Gluon and in
torch."""
from nets import gluon_block, torch_block


def in_gluon(tables, kind="constant", use="broadcast_add", freeze=False):
    """Adds tables to the input. "null": parameters without a gradient."""
    def null(value):
        import mxnet as mx
        return {"shape": value.shape, "grad_req": "null",
                "init": mx.init.Constant(mx.nd.array(value, dtype="float64"))}

    def forward(net, F, x, **given):
        for name in tables:
            x = F.tanh(getattr(F, use)(x, F.reshape(
                given[name], (1, -1, 6))))
        return net.out(F.mean(net.hidden(x), axis=1))

    def make():
        net = gluon_block(lambda nn: {
            **(tables if kind == "constant" else {
                name: null(value) for name, value in tables.items()}),
            "hidden": nn.Dense(6, in_units=6, flatten=False),
            "out": nn.Dense(3, in_units=6)}, forward)()
        if freeze:
            net.hidden.collect_params().setattr("grad_req", "null")
        return net
    return make


def in_torch(tables, kind="buffer", use="add", freeze=False):
    def forward(net, x):
        import torch
        for name in tables:
            x = torch.tanh(getattr(torch, use)(x, getattr(net, name)))
        return net.out(net.hidden(x).mean(1))

    def make():
        import torch
        net = torch_block(lambda nn: {
            **{name: nn.Parameter(torch.tensor(value), requires_grad=False)
               for name, value in tables.items() if kind == "frozen"},
            "hidden": nn.Linear(6, 6), "out": nn.Linear(6, 3)}, forward)()
        if kind != "frozen":
            for name, value in tables.items():
                net.register_buffer(name, torch.tensor(value),
                                    persistent=kind == "buffer")
        if freeze:
            net.hidden.requires_grad_(False)
        return net
    return make
